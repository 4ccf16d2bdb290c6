//! Opening a log: whose directory it is, where the chain of entries ends, and the newest entries back in the region.

use std::collections::VecDeque;
use std::sync::Arc;

use super::catalog::Segment;
use super::disk::{BLOCK_BYTES, Disk, Name, Op};
use super::error::{StoreError, run};
use super::format::{IDENTITY_FILE_BYTES, Identity, Layout, SegmentHeader};
use super::mark::{Chain, Mark, Step};
use super::store::{COMMAND_FILE, Damage, LogStore, StoreConfig, Verify};
use crate::log::VerifyError;
use crate::mem::Region;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Bytes read at a time, at most.
const CHUNK_BYTES_MAX: u64 = 1 << 20;

/// Bytes of a region of this length that recovery may leave unfilled, beside its longest entry.
pub fn refill_margin(region_bytes: u64) -> u64 {
    chunk_bytes(region_bytes) + region_bytes / 64
}

fn chunk_bytes(region_bytes: u64) -> u64 {
    (region_bytes / 4).min(CHUNK_BYTES_MAX)
}

/// What was found in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// Before the first entry on disk.
    pub first: Mark,
    /// Before the first entry that the region holds again.
    pub in_region: Mark,
    /// The end of the log: all before is durable and verified as far as was asked for.
    pub end: Mark,
    /// The last user had ended in an orderly way.
    pub clean: bool,
    /// Bytes that had been durable and are gone ([`Damage::Cut`] only).
    pub lost_bytes: u64,
}

/// A segment file, and its header if that is good.
struct Found {
    start: u64,
    header: Option<SegmentHeader>,
}

impl<D: Disk> LogStore<D> {
    /// Opens the log in a directory, or begins one in an empty directory; waits for the disk. `region` receives the newest
    /// entries, as many as fit, at their places.
    ///
    /// # Errors
    /// When the directory is another's, or damaged, or cannot be read or written.
    pub fn open(
        mut disk: D,
        config: &StoreConfig,
        region: Arc<Region>,
    ) -> Result<(LogStore<D>, Recovered), StoreError> {
        let layout = Layout { segment_bytes: config.segment_bytes, region_bytes: region.len() as u64 };
        let whole = layout.segment_bytes.is_multiple_of(BLOCK) && layout.segment_bytes > 0;
        assert!(whole, "segments of {} bytes are no whole blocks", layout.segment_bytes);
        let (starts, has_identity) = scan(&disk)?;
        let identity = if has_identity {
            read_identity(&mut disk, config, &layout)?
        } else if starts.is_empty() {
            Identity {
                owner: config.owner.clone(),
                incarnation: config.incarnation,
                generation: 0,
                clean: true,
                begins: true,
                layout,
                flushed: Mark::default(),
                note: Vec::new(),
            }
        } else {
            return Err(foreign(&disk, "it holds segments of a log and no identity".into()));
        };
        let clean = identity.clean;
        let mut store = LogStore::new(disk, config, region, identity)?;
        store.identity.generation += 1;
        store.identity.clean = false;
        if store.identity.begins {
            let mark = store.identity.flushed;
            store.begin(mark, &starts)?;
            return Ok((store, Recovered { first: mark, in_region: mark, end: mark, clean, lost_bytes: 0 }));
        }
        let (in_region, lost_bytes) = store.recover(config, &starts)?;
        let (first, end) = (store.first(), store.requested);
        Ok((store, Recovered { first, in_region, end, clean, lost_bytes }))
    }

    /// Finds the end of the log and cuts what is behind it; returns where the region's entries begin, and what is lost.
    fn recover(&mut self, config: &StoreConfig, starts: &[u64]) -> Result<(Mark, u64), StoreError> {
        let found = self.read_headers(starts)?;
        let known = found.iter().filter_map(|f| f.header.as_ref()).map(|header| header.flushed).max().unwrap_or(0);
        let known = known.max(self.identity.flushed.at);
        let from = match config.verify {
            Verify::All => 0,
            Verify::Newest => {
                let first_at = |f: &Found| f.header.as_ref().map(|header| header.first.at);
                let newest = found.iter().rev().find_map(first_at).unwrap_or(0);
                // From where the region is filled, and from where nothing before can be torn.
                let most = newest.saturating_sub(self.layout.region_bytes).min(known);
                let fits = |f: &Found| first_at(f).is_some_and(|at| at <= most);
                // A segment whose header is lost is found again from the one before it.
                let lost = found.iter().position(|f| f.header.is_none()).unwrap_or(found.len());
                found.iter().rposition(fits).unwrap_or(0).min(lost.saturating_sub(1))
            }
        };
        let Some(header) = found.get(from).and_then(|f| f.header.as_ref()) else {
            let why = match found.first() {
                Some(oldest) => format!("the header of {} is not readable", Name::Segment(oldest.start)),
                None => "its segments are missing".into(),
            };
            return Err(StoreError::Damaged { place: self.disk.place(), why, good_to: 0 });
        };
        let begins = header.first;
        let mut walk = Walk::new(self, begins, starts, known);
        walk.go()?;
        let Walk { mark: end, firsts, in_region, ended, .. } = walk;
        if end.at < known && config.damage == Damage::Refuse {
            let name = Name::Segment(self.segment_start(end.at));
            let why = ended.map_or("the file ends".into(), |error| error.to_string());
            let why = format!("{name} does not hold what was durable up to offset {known}: {why}");
            return Err(StoreError::Damaged { place: self.disk.place(), why, good_to: end.at });
        }
        let segments = segments(&found, &firsts, end.at);
        (self.requested, self.flushed) = (end, end);
        (self.wanted, self.later) = (end, end);
        (self.submitted, self.written, self.told) = (end.at, end.at, end.at);
        let is_right = |s: &Segment| {
            found.iter().any(|f| f.start == s.start && f.header.as_ref().is_some_and(|header| header.first == s.first))
        };
        let wrong: Vec<Segment> = segments.iter().filter(|s| !is_right(s)).copied().collect();
        self.catalog.replace(segments, end.at);
        self.cut(&end, end.at, starts)?;
        self.restore_headers(&wrong)?;
        // A log that ended long before its newest segment was looked for too late.
        let is_short = end.at - in_region.at < self.layout.region_bytes / 2 && in_region.at > self.first().at;
        let in_region = if is_short { self.load()? } else { in_region };
        Ok((in_region, known.saturating_sub(end.at)))
    }

    /// Reads every segment's header. Segments follow each other without a gap, or the log is refused.
    fn read_headers(&mut self, starts: &[u64]) -> Result<Vec<Found>, StoreError> {
        let block = self.scratch(BLOCK_BYTES)?;
        let mut found: Vec<Found> = Vec::with_capacity(starts.len());
        for &start in starts {
            let name = Name::Segment(start);
            if let Some(before) = found.last().filter(|f| f.start + self.layout.segment_bytes != start) {
                let why = format!("no segment follows {} before {name}", Name::Segment(before.start));
                return Err(StoreError::Damaged { place: self.disk.place(), why, good_to: before.start });
            }
            run(&mut self.disk, Op::Open { file: COMMAND_FILE, name, create: false }, name)?;
            block.put(0, &[0; BLOCK_BYTES]);
            let read = Op::Read { file: COMMAND_FILE, at: 0, target: &block, offset: 0, len: BLOCK_BYTES };
            let done = run(&mut self.disk, read, name);
            self.disk.close(COMMAND_FILE);
            done?;
            let mut bytes = [0; BLOCK_BYTES];
            block.get(0, &mut bytes);
            let header = SegmentHeader::decode(&bytes);
            if let Some(header) = &header {
                let ours = header.cluster == self.cluster && header.shard == self.chain.shard;
                if !ours || header.layout != self.layout || header.start != start {
                    return Err(foreign(&self.disk, format!("{name} is a segment of another log")));
                }
            }
            found.push(Found { start, header });
        }
        Ok(found)
    }

    /// Reads the newest entries on disk into the region again, as many as fit; returns where they begin. Waits for the
    /// disk. For a log that was cut so far back that the region holds nothing of it any more; nothing may be under way.
    ///
    /// # Errors
    /// When the disk cannot be read.
    pub fn load(&mut self) -> Result<Mark, StoreError> {
        assert!(self.is_idle(), "the log is loaded when nothing is under way");
        let end = self.requested;
        let segments = self.catalog.segments().clone();
        let fits = |s: &Segment| s.first.at + self.layout.region_bytes <= end.at;
        let from = segments.iter().rposition(fits).unwrap_or(0);
        let Some(begins) = segments.get(from).map(|segment| segment.first) else { return Ok(end) };
        let starts: Vec<u64> = segments.iter().map(|segment| segment.start).collect();
        let mut walk = Walk::new(self, begins, &starts, u64::MAX);
        walk.go()?;
        let (good_to, in_region) = (walk.mark.at, walk.in_region);
        if good_to >= end.at {
            return Ok(in_region);
        }
        let why = format!("{} is not as it was written", Name::Segment(self.segment_start(good_to)));
        Err(StoreError::Damaged { place: self.disk.place(), good_to, why })
    }

    pub(super) fn scratch(&self, bytes: usize) -> Result<Arc<Region>, StoreError> {
        Region::new(bytes).map_err(|error| {
            StoreError::io(&self.disk, "allocate a buffer", error.raw_os_error().unwrap_or(libc::ENOMEM))
        })
    }
}

/// What is in the directory: the segments' starts, ascending, and whether there is an identity.
fn scan<D: Disk>(disk: &D) -> Result<(Vec<u64>, bool), StoreError> {
    let listed = disk.list();
    let names = listed.map_err(|error| StoreError::io(disk, "list it", error.raw_os_error().unwrap_or(libc::EIO)))?;
    let (mut starts, mut has_identity) = (Vec::new(), false);
    for text in names {
        match Name::parse(&text) {
            Some(Name::Segment(start)) => starts.push(start),
            Some(Name::Identity) => has_identity = true,
            // Left by a save that was interrupted; the next one replaces it.
            Some(Name::IdentityNew) => {}
            None => return Err(foreign(disk, format!("it holds {text:?}"))),
        }
    }
    starts.sort_unstable();
    Ok((starts, has_identity))
}

fn foreign<D: Disk>(disk: &D, why: String) -> StoreError {
    StoreError::Foreign { place: disk.place(), why }
}

fn read_identity<D: Disk>(disk: &mut D, config: &StoreConfig, layout: &Layout) -> Result<Identity, StoreError> {
    let name = Name::Identity;
    let no_memory = |error: std::io::Error| error.raw_os_error().unwrap_or(libc::ENOMEM);
    let region = Region::new(IDENTITY_FILE_BYTES);
    let region = region.map_err(|error| StoreError::io(disk, "allocate a buffer", no_memory(error)))?;
    run(disk, Op::Open { file: COMMAND_FILE, name, create: false }, name)?;
    let read = Op::Read { file: COMMAND_FILE, at: 0, target: &region, offset: 0, len: IDENTITY_FILE_BYTES };
    let done = run(disk, read, name);
    disk.close(COMMAND_FILE);
    done?;
    let mut bytes = vec![0; IDENTITY_FILE_BYTES];
    region.get(0, &mut bytes);
    let Some(identity) = Identity::decode(&bytes) else {
        let why = "the file 'identity' is not as it was written".into();
        return Err(StoreError::Damaged { place: disk.place(), why, good_to: 0 });
    };
    let (found, wanted) = (&identity.owner, &config.owner);
    if found != wanted {
        let why = format!(
            "it belongs to cluster '{}', shard {}, replica {}, not to cluster '{}', shard {}, replica {}",
            found.cluster, found.shard, found.replica, wanted.cluster, wanted.shard, wanted.replica
        );
        return Err(foreign(disk, why));
    }
    if identity.layout != *layout {
        let Layout { segment_bytes, region_bytes } = identity.layout;
        let why = format!(
            "it was written with segments of {segment_bytes} and a region of {region_bytes} bytes: configure these"
        );
        return Err(foreign(disk, why));
    }
    Ok(identity)
}

/// The segments of a log that ends at `end`, with what the walk has found rather than what a header says.
fn segments(found: &[Found], firsts: &[(u64, Mark)], end: u64) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::with_capacity(found.len());
    for Found { start, header } in found {
        let walked = firsts.iter().find(|(of, _)| of == start).map(|(_, first)| *first);
        let first = walked.or(header.as_ref().map(|header| header.first));
        let begun_ms = header.as_ref().map(|h| h.begun_ms).or(segments.last().map(|s| s.begun_ms)).unwrap_or(0);
        match first {
            Some(first) if first.at <= end && (*start < end || segments.is_empty()) => {
                segments.push(Segment { start: *start, first, begun_ms })
            }
            _ => break,
        }
    }
    segments
}

/// Follows the chain over segments, through the region: what is read last is what the region holds in the end.
struct Walk<'a, D: Disk> {
    disk: &'a mut D,
    chain: Chain,
    segment_bytes: u64,
    region: Arc<Region>,
    chunk_bytes: u64,
    /// Verified up to here.
    mark: Mark,
    /// Everything from the walk's beginning to here was read.
    loaded: u64,
    /// The region may have been changed up to here: a read past a file's end may leave anything.
    touched: u64,
    /// There is nothing from here on.
    limit: u64,
    /// Of segments that begin behind the walk's beginning.
    firsts: Vec<(u64, Mark)>,
    /// Now and then a place between two entries, oldest first.
    samples: VecDeque<Mark>,
    sample_bytes: u64,
    /// Before the first entry that the region holds.
    in_region: Mark,
    open: Option<u64>,
    /// Segments that end behind this offset may hold what is not durable yet.
    known: u64,
    /// Why the chain ended before the files did.
    ended: Option<VerifyError>,
}

impl<'a, D: Disk> Walk<'a, D> {
    fn new(store: &'a mut LogStore<D>, begins: Mark, starts: &[u64], known: u64) -> Walk<'a, D> {
        let Layout { segment_bytes, region_bytes } = store.layout;
        Walk {
            disk: &mut store.disk,
            chain: store.chain,
            segment_bytes,
            region: store.region.clone(),
            // The longest entry, and a chunk beyond it, fit the region together.
            chunk_bytes: chunk_bytes(region_bytes),
            mark: begins,
            loaded: begins.at - begins.at % BLOCK,
            touched: begins.at,
            limit: starts.last().map_or(0, |newest| newest + segment_bytes),
            firsts: Vec::new(),
            samples: VecDeque::from([begins]),
            sample_bytes: region_bytes / 1024,
            in_region: begins,
            open: None,
            known,
            ended: None,
        }
    }

    fn go(&mut self) -> Result<(), StoreError> {
        let begins = self.mark.at;
        let result = self.follow();
        if self.open.is_some() {
            self.disk.close(COMMAND_FILE);
        }
        result?;
        // What was read behind the end is nothing.
        let (mut at, lap) = (self.mark.at, self.region.len() as u64);
        while at < self.touched {
            let len = (BLOCK - at % BLOCK).min(self.touched - at);
            self.region.put((at % lap) as usize, &[0; BLOCK_BYTES][..len as usize]);
            at += len;
        }
        let held_from = self.touched.max(self.mark.at).saturating_sub(lap).max(begins);
        self.in_region = self.samples.iter().find(|s| s.at >= held_from).copied().unwrap_or(self.mark);
        Ok(())
    }

    fn follow(&mut self) -> Result<(), StoreError> {
        let lap = self.region.len() as u64;
        loop {
            let available = self.loaded.saturating_sub(self.mark.at) as usize;
            match self.chain.step(&self.mark, &self.region, (self.mark.at % lap) as usize, available) {
                Ok(Step::Entry(_, next)) => self.step_to(next),
                Ok(Step::Needs(_)) => {
                    if !self.load()? {
                        return Ok(());
                    }
                }
                Err(error) => {
                    self.ended = Some(error);
                    return Ok(());
                }
            }
        }
    }

    fn step_to(&mut self, next: Mark) {
        let start = next.at - next.at % self.segment_bytes;
        if self.mark.at < start {
            self.firsts.push((start, next));
        }
        if self.samples.back().is_none_or(|newest| next.at - newest.at >= self.sample_bytes) {
            self.samples.push_back(next);
            let lap = self.region.len() as u64;
            while self.samples.front().is_some_and(|oldest| oldest.at + lap < next.at) {
                self.samples.pop_front();
            }
        }
        self.mark = next;
    }

    /// Reads on; false when the files end.
    fn load(&mut self) -> Result<bool, StoreError> {
        if self.loaded >= self.limit {
            return Ok(false);
        }
        let start = self.loaded - self.loaded % self.segment_bytes;
        let name = Name::Segment(start);
        let file = COMMAND_FILE;
        if self.open != Some(start) {
            if self.open.take().is_some() {
                self.disk.close(file);
            }
            run(self.disk, Op::Open { file, name, create: false }, name)?;
            self.open = Some(start);
            if start + self.segment_bytes > self.known {
                // What the last process wrote may be in the cache only, and what is recovered counts as durable.
                run(self.disk, Op::Sync { file }, name)?;
            }
            self.disk.forget_cached(file);
        }
        let lap = self.region.len() as u64;
        let offset = self.loaded % lap;
        let len = self.chunk_bytes.min(start + self.segment_bytes - self.loaded).min(lap - offset);
        let at = LogStore::<D>::file_at(start, self.loaded);
        let (offset, len) = (offset as usize, len as usize);
        self.touched = self.loaded + len as u64;
        let read = run(self.disk, Op::Read { file, at, target: &self.region, offset, len }, name)?;
        self.loaded += read as u64;
        if read == 0 || !read.is_multiple_of(BLOCK_BYTES) {
            self.limit = self.loaded;
        }
        Ok(read > 0)
    }
}
