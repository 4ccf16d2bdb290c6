//! The rare commands, which wait for the disk: cutting a log, beginning it anew, ending in an orderly way.

use std::sync::Arc;

use antelog_protocol::mutant::{Mutant, planted};

use super::catalog::Segment;
use super::disk::{BLOCK_BYTES, Disk, Name, Op};
use super::error::{StoreError, run};
use super::format::{HEADER_BYTES, IDENTITY_FILE_BYTES};
use super::mark::Mark;
use super::store::{ACTIVE_MAX, Active, COMMAND_FILE, IDENTITY_FILE, LogStore};
use crate::mem::Region;

impl<D: Disk> LogStore<D> {
    /// Discards everything from `end` on, a place between two entries that is not beyond what was asked to be written, and
    /// not before the first entry kept. When it returns, what is discarded will never come back, and `end` is where the log
    /// goes on; what is below and was not durable still has to be flushed. Waits for the disk: to conform to a new primary
    /// is rare.
    ///
    /// # Errors
    /// When the disk fails; the store has failed with it then.
    pub fn truncate_to(&mut self, end: Mark) -> Result<(), StoreError> {
        assert!(end.at <= self.requested.at && end.at >= self.first().at, "offset {} is not in the log", end.at);
        self.command(|store| store.discard_from(end))
    }

    fn discard_from(&mut self, end: Mark) -> Result<(), StoreError> {
        self.drain()?;
        let at = end.at.min(self.written);
        let starts = self.starts();
        self.firsts.retain(|(_, first)| first.at <= end.at);
        self.requested = end;
        (self.submitted, self.written) = (at, at);
        if self.flushed.at > end.at {
            self.flushed = end;
        }
        (self.wanted, self.later) = (self.flushed, self.flushed);
        let kept = |s: &Segment| s.start < end.at || s.start == starts[0];
        let segments: Vec<Segment> = self.catalog.segments().iter().copied().filter(kept).collect();
        self.catalog.replace(segments, at);
        self.cut(&end, at, &starts)
    }

    /// Does something of which a half leaves the store in no state to go on.
    fn command(&mut self, run: impl FnOnce(&mut Self) -> Result<(), StoreError>) -> Result<(), StoreError> {
        let catalog = self.catalog.clone();
        let _changing = catalog.change();
        let result = run(self);
        if let Err(error) = &result {
            self.failure.get_or_insert_with(|| error.clone());
        }
        result
    }

    /// Discards the whole log and begins one at `begins`, where the region goes on: for a replica that receives the log from
    /// the middle. Waits for the disk.
    ///
    /// # Errors
    /// When the disk fails; the store has failed with it then.
    pub fn start_over(&mut self, begins: Mark) -> Result<(), StoreError> {
        self.command(|store| {
            store.drain()?;
            let starts = store.starts();
            store.begin(begins, &starts)
        })
    }

    /// Makes everything durable and says that the replica ended in an orderly way: nothing may be written afterwards. Waits
    /// for the disk.
    ///
    /// # Errors
    /// When the disk fails or is full.
    pub fn finish(&mut self) -> Result<(), StoreError> {
        self.flush();
        self.settle()?;
        self.drain()?;
        self.identity.clean = true;
        self.write_identity()
    }

    /// Polls until nothing is left to be done, waiting for the disk.
    ///
    /// # Errors
    /// When the disk fails or is full.
    pub fn settle(&mut self) -> Result<(), StoreError> {
        loop {
            self.poll(self.now_ns)?;
            if self.is_idle() {
                return Ok(());
            }
            if self.under_way == 0 && self.deadline_ns().is_some() {
                return Err(StoreError::Full { place: self.disk.place() });
            }
            self.disk.wait();
        }
    }

    /// Lets everything under way end, and forgets what was to follow.
    fn drain(&mut self) -> Result<(), StoreError> {
        self.wait_for_writes();
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        self.writes.clear();
        self.retry_at_ns = None;
        if let Some((start, file)) = self.making.abandon() {
            self.disk.close(file);
            self.remove(start)?;
        }
        self.disk.close(IDENTITY_FILE);
        self.saving.abandon();
        while let Some(start) = self.tidying.next() {
            self.remove(start)?;
        }
        self.stop_syncing();
        Ok(())
    }

    /// Starts of all segment files, ascending.
    fn starts(&self) -> Vec<u64> {
        let mut starts: Vec<u64> = self.catalog.segments().iter().map(|s| s.start).collect();
        starts.extend(self.active.iter().map(|s| s.start));
        starts.sort_unstable();
        starts.dedup();
        starts
    }

    /// Removes a segment durably.
    fn remove(&mut self, start: u64) -> Result<(), StoreError> {
        let name = Name::Segment(start);
        match run(&mut self.disk, Op::Remove { name }, name) {
            Err(StoreError::Io { errno: libc::ENOENT, .. }) => {}
            other => drop(other?),
        }
        run(&mut self.disk, Op::SyncDirectory, name).map(drop)
    }

    /// Removes all of `starts` (ascending) from `end` on, but not the oldest, and cuts what is left at `at`, the end of what
    /// the files hold below `end`. The catalog lists what remains. Afterwards the files are open for the log to go on.
    pub(super) fn cut(&mut self, end: &Mark, at: u64, starts: &[u64]) -> Result<(), StoreError> {
        // First what would call the rest of the log damaged.
        self.write_identity()?;
        for segment in self.active.drain(..) {
            self.disk.close(segment.file);
        }
        let (oldest, segment_bytes) = (starts.first().copied().unwrap_or(0), self.layout.segment_bytes);
        // Newest first: an interruption leaves a log without a gap.
        for &start in starts.iter().rev().filter(|&&start| start >= end.at && start > oldest) {
            self.remove(start)?;
        }
        // What is not durable yet may have been written: it is synced here, because nobody remembers it afterwards.
        let from = at.min(self.flushed.at);
        let open = starts.iter().filter(|&&s| s + segment_bytes > from && (s < end.at || s == oldest));
        for (file, &start) in open.enumerate() {
            assert!(file < ACTIVE_MAX, "more segments are open than there are files");
            let name = Name::Segment(start);
            run(&mut self.disk, Op::Open { file, name, create: false }, name)?;
            let known = self.catalog.segments().iter().find(|s| s.start == start).copied();
            let (first, begun_ms) = (known.map(|s| s.first), known.map_or(0, |s| s.begun_ms));
            self.active.push_back(Active { start, file, header_due: first.is_none(), first, begun_ms, dirty: false });
            if let Some(segment) = known {
                self.write_header_now(file, &segment)?;
            }
        }
        for which in (0..self.active.len()).rev() {
            let Active { start, file, .. } = self.active[which];
            let name = Name::Segment(start);
            let bytes = Self::file_at(start, at.clamp(start, start + segment_bytes));
            if !planted(Mutant::KeepTornTails) {
                run(&mut self.disk, Op::SetLength { file, bytes }, name)?;
            }
            let bytes = HEADER_BYTES + segment_bytes;
            match run(&mut self.disk, Op::Allocate { file, bytes }, name) {
                // Somebody else has taken the space. Writes will tell.
                Err(StoreError::Full { .. }) => {}
                other => drop(other?),
            }
            run(&mut self.disk, Op::Sync { file }, name)?;
        }
        self.told = self.flushed.at;
        let start = self.segment_start(end.at);
        let is_known =
            self.firsts.iter().any(|(of, _)| *of == start) || self.catalog.segments().iter().any(|s| s.start == start);
        if !is_known {
            // The cut is the boundary of two segments: the second begins with the next entry.
            self.firsts.push_back((start, *end));
        }
        self.load_last_block(end, at)
    }

    /// Puts the block in which the log ends into the region, where the next write of it comes from.
    fn load_last_block(&mut self, end: &Mark, at: u64) -> Result<(), StoreError> {
        let within = (at % BLOCK_BYTES as u64) as usize;
        let Some(segment) = self.active.iter().find(|s| s.start == self.segment_start(at)) else { return Ok(()) };
        if within == 0 || at < end.at {
            return Ok(());
        }
        let (start, file, block) = (segment.start, segment.file, at - within as u64);
        let target = self.scratch(BLOCK_BYTES)?;
        let read = Op::Read { file, at: Self::file_at(start, block), target: &target, offset: 0, len: BLOCK_BYTES };
        run(&mut self.disk, read, Name::Segment(start))?;
        // What the region holds behind the end belongs to the lap before.
        self.region.put_from((block % self.layout.region_bytes) as usize, &target, 0, within);
        Ok(())
    }

    /// Begins a log at `mark`, removing the segments that are there.
    pub(super) fn begin(&mut self, mark: Mark, starts: &[u64]) -> Result<(), StoreError> {
        self.identity.begins = true;
        self.flushed = mark;
        self.write_identity()?;
        for segment in self.active.drain(..) {
            self.disk.close(segment.file);
        }
        for &start in starts.iter().rev() {
            self.remove(start)?;
        }
        let (start, file) = (self.segment_start(mark.at), 0);
        let name = Name::Segment(start);
        run(&mut self.disk, Op::Open { file, name, create: true }, name)?;
        run(&mut self.disk, Op::Allocate { file, bytes: HEADER_BYTES + self.layout.segment_bytes }, name)?;
        let begun_ms = self.wall_ms();
        self.active.push_back(Active { start, file, header_due: false, first: Some(mark), begun_ms, dirty: false });
        self.write_header_now(file, &Segment { start, first: mark, begun_ms })?;
        run(&mut self.disk, Op::SyncDirectory, name)?;
        self.firsts.clear();
        (self.requested, self.wanted, self.later) = (mark, mark, mark);
        (self.submitted, self.written, self.told) = (mark.at, mark.at, mark.at);
        self.catalog.replace(vec![Segment { start, first: mark, begun_ms }], mark.at);
        self.identity.begins = false;
        self.write_identity()
    }

    /// Writes the headers again that recovery has found to be wrong, durably.
    pub(super) fn restore_headers(&mut self, segments: &[Segment]) -> Result<(), StoreError> {
        for segment in segments {
            let (file, name) = (COMMAND_FILE, Name::Segment(segment.start));
            run(&mut self.disk, Op::Open { file, name, create: false }, name)?;
            let written = self.write_header_now(file, segment);
            self.disk.close(file);
            written?;
        }
        Ok(())
    }

    /// Writes a segment's header to its file, durably.
    fn write_header_now(&mut self, file: usize, segment: &Segment) -> Result<(), StoreError> {
        let name = Name::Segment(segment.start);
        let block = self.scratch(BLOCK_BYTES)?;
        block.put(0, &self.header(segment).encode());
        write_all(&mut self.disk, file, &block, name)?;
        run(&mut self.disk, Op::Sync { file }, name).map(drop)
    }

    /// Replaces the identity, durably, with the state it has now.
    fn write_identity(&mut self) -> Result<(), StoreError> {
        self.identity.flushed = self.flushed;
        let bytes = self.scratch(IDENTITY_FILE_BYTES)?;
        bytes.put(0, &self.identity.encode());
        let (file, name) = (COMMAND_FILE, Name::IdentityNew);
        if !self.saving.parted {
            run(&mut self.disk, Op::SyncDirectory, name)?;
        }
        run(&mut self.disk, Op::Open { file, name, create: true }, name)?;
        let written = write_all(&mut self.disk, file, &bytes, name)
            .and_then(|()| run(&mut self.disk, Op::Sync { file }, name).map(drop));
        self.disk.close(file);
        written?;
        self.saving.parted = false;
        if run(&mut self.disk, Op::Exchange { one: name, other: Name::Identity }, name).is_err() {
            run(&mut self.disk, Op::Rename { from: name, to: Name::Identity }, name)?;
        }
        run(&mut self.disk, Op::SyncDirectory, name)?;
        self.saving.parted = true;
        self.saving.done();
        Ok(())
    }
}

/// Writes all of a region to a file's beginning.
fn write_all<D: Disk>(disk: &mut D, file: usize, source: &Arc<Region>, name: Name) -> Result<(), StoreError> {
    let mut done = 0;
    while done < source.len() {
        let op = Op::Write { file, at: done as u64, source, offset: done, len: source.len() - done };
        let written = run(disk, op, name)?;
        if written == 0 {
            return Err(StoreError::io(disk, &format!("write {name}"), libc::EIO));
        }
        done += written / BLOCK_BYTES * BLOCK_BYTES;
    }
    Ok(())
}
