//! The store: what the log's owner calls in its duty cycle.
//!
//! Nothing here waits. [`LogStore::write_up_to`] says how far the region holds the log, [`LogStore::flush`] that it shall be
//! durable, [`LogStore::poll`] does what can be done and takes what is done.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;

use antelog_protocol::Lsn;
use antelog_protocol::mutant::{Mutant, planted};

use super::catalog::{Catalog, Segment};
use super::disk::{BLOCK_BYTES, Completion, Disk, Name, Op};
use super::error::{StoreError, is_full};
use super::format::{HEADER_BYTES, Identity, Layout, Owner};
use super::jobs::{Making, Saving, Tidying};
use super::mark::{Chain, Mark, step_over};
use super::retention::{Keep, Span};
use super::writes::Writes;
use crate::mem::Region;

/// After a full disk was met, it is tried again this often, in nanoseconds.
const RETRY_NS: u64 = 50_000_000;

/// Segments that are open for writing at a time, at most.
pub(super) const ACTIVE_MAX: usize = 16;

/// Number of the identity's file.
pub(super) const IDENTITY_FILE: usize = ACTIVE_MAX;
/// Number of the file of rare commands.
pub(super) const COMMAND_FILE: usize = ACTIVE_MAX + 1;

/// How much of a log is verified when it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    /// The newest segments, as many as fill the region.
    Newest,
    /// All that is on disk.
    All,
}

/// What to do when bytes are broken that were durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// Do not open the log.
    Refuse,
    /// Cut the log before them, and say so in [`Recovered::lost_bytes`](super::Recovered::lost_bytes): for a replica that
    /// fetches the rest from its peers before it counts as one.
    Cut,
}

/// How a log is kept.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Whose log it is.
    pub owner: Owner,
    /// The incarnation of a replica whose directory is empty.
    pub incarnation: u64,
    /// Bytes of the log per segment file: a multiple of [`BLOCK_BYTES`], and no entry is longer.
    pub segment_bytes: u64,
    /// How much to verify.
    pub verify: Verify,
    /// What to do about damage.
    pub damage: Damage,
    /// Unix time, in milliseconds, when the clock given to [`LogStore::poll`] was 0.
    pub unix_ms: u64,
}

/// How the store is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Well.
    Good,
    /// The disk is full: nothing is lost, and everything goes on when there is room. Records up to
    /// [`LogStore::room_end`] have their place already.
    Full,
    /// Writing or syncing failed. This is for ever: the replica must end, because nobody can say what the disk holds.
    Failed,
}

/// A segment that is open for writing.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) start: u64,
    pub(super) file: usize,
    /// The header is to be written, or written again.
    pub(super) header_due: bool,
    /// Before the first entry, once that is known.
    pub(super) first: Option<Mark>,
    /// When it was begun, in milliseconds of Unix time.
    pub(super) begun_ms: u64,
    /// Something was written since the last sync began.
    pub(super) dirty: bool,
}

/// A group commit under way.
#[derive(Clone, Copy, Debug)]
struct Syncing {
    target: Mark,
    remaining: usize,
}

/// What a token means: its upper half.
pub(super) const WRITE: u64 = 1 << 32;
pub(super) const SYNC: u64 = 2 << 32;
pub(super) const MAKE: u64 = 3 << 32;
pub(super) const TIDY: u64 = 4 << 32;
pub(super) const SAVE: u64 = 5 << 32;

/// See the module's text.
pub struct LogStore<D: Disk> {
    pub(super) disk: D,
    pub(super) chain: Chain,
    pub(super) cluster: Arc<str>,
    pub(super) layout: Layout,
    pub(super) unix_ms: u64,
    pub(super) region: Arc<Region>,
    pub(super) catalog: Arc<Catalog>,
    /// Oldest first.
    pub(super) active: VecDeque<Active>,
    /// Starts and first marks of segments whose header was not written yet, oldest first.
    pub(super) firsts: VecDeque<(u64, Mark)>,
    pub(super) identity: Identity,
    pub(super) requested: Mark,
    /// Everything below has been given to the disk.
    pub(super) submitted: u64,
    /// Everything below is in the files.
    pub(super) written: u64,
    pub(super) flushed: Mark,
    /// The durable end that the newest header tells.
    pub(super) told: u64,
    pub(super) writes: Writes,
    syncing: Option<Syncing>,
    /// What the next group is for; it stays until the group begins, or a busy log would never be synced.
    pub(super) wanted: Mark,
    /// What was asked for since.
    pub(super) later: Mark,
    pub(super) making: Making,
    pub(super) tidying: Tidying,
    pub(super) saving: Saving,
    /// Operations given to the disk and not completed.
    pub(super) under_way: usize,
    /// When to try again after the disk was full.
    pub(super) retry_at_ns: Option<u64>,
    pub(super) now_ns: u64,
    pub(super) failure: Option<StoreError>,
}

impl<D: Disk> LogStore<D> {
    pub(super) fn new(
        disk: D,
        config: &StoreConfig,
        region: Arc<Region>,
        identity: Identity,
    ) -> Result<LogStore<D>, StoreError> {
        let layout = identity.layout;
        let no_memory = |disk: &D, error: std::io::Error| {
            StoreError::io(disk, "allocate buffers", error.raw_os_error().unwrap_or(libc::ENOMEM))
        };
        let writes = Writes::new().map_err(|error| no_memory(&disk, error))?;
        let saving = Saving::new().map_err(|error| no_memory(&disk, error))?;
        Ok(LogStore {
            disk,
            chain: Chain::new(config.owner.shard, &layout),
            cluster: config.owner.cluster.as_str().into(),
            layout,
            unix_ms: config.unix_ms,
            region,
            catalog: Arc::default(),
            active: VecDeque::with_capacity(ACTIVE_MAX),
            firsts: VecDeque::with_capacity((layout.region_bytes / layout.segment_bytes) as usize + 2),
            identity,
            requested: Mark::default(),
            submitted: 0,
            written: 0,
            flushed: Mark::default(),
            told: 0,
            writes,
            syncing: None,
            wanted: Mark::default(),
            later: Mark::default(),
            making: Making::default(),
            tidying: Tidying::default(),
            saving,
            under_way: 0,
            retry_at_ns: None,
            now_ns: 0,
            failure: None,
        })
    }

    /// Says that the region holds the log up to `end`, a place between two entries: it will be written there by and by.
    /// The bytes from [`released`](Self::released) on must stay in the region.
    #[inline]
    pub fn write_up_to(&mut self, end: Mark) {
        debug_assert!(end.at >= self.requested.at, "the log only grows");
        let next = self.segment_start(self.requested.at) + self.layout.segment_bytes;
        if end.at >= next {
            self.find_firsts(&end);
        }
        self.requested = end;
    }

    /// Notes the first entry of every segment between the last end and this one.
    #[cold]
    fn find_firsts(&mut self, end: &Mark) {
        assert!(end.at - self.written <= self.layout.region_bytes, "the region was overwritten before it was written");
        let mut mark = self.requested;
        while mark.at < end.at {
            let next = self.segment_start(mark.at) + self.layout.segment_bytes;
            mark = step_over(&mark, &self.region);
            if mark.at >= next {
                self.firsts.push_back((self.segment_start(mark.at), mark));
            }
        }
        assert!(mark.at == end.at && mark.crc == end.crc, "offset {} is not between two entries", end.at);
    }

    /// Asks for everything up to the last [`write_up_to`](Self::write_up_to) to be made durable. What is asked for while
    /// another group is under way goes with the next.
    #[inline]
    pub fn flush(&mut self) {
        let begun = self.syncing.map_or(self.flushed.at, |syncing| syncing.target.at);
        self.later = self.requested;
        if self.wanted.at <= begun {
            self.wanted = self.requested;
        }
    }

    /// Does what can be done at `now_ns` and takes what is done; returns how much that was.
    ///
    /// # Errors
    /// When writing or syncing failed, now or earlier: the replica must end.
    pub fn poll(&mut self, now_ns: u64) -> Result<usize, StoreError> {
        self.now_ns = now_ns;
        let mut work = self.take_completions();
        if self.retry_at_ns.is_some_and(|at| at <= now_ns) {
            self.retry_at_ns = None;
            self.writes.retry();
            self.making.retry();
            self.saving.retry();
            work += 1;
        }
        if self.failure.is_none() {
            let before = self.under_way;
            self.make();
            self.tidy();
            self.save_identity();
            self.pump_writes();
            self.start_sync();
            work += self.under_way - before;
        }
        self.disk.enter();
        match &self.failure {
            None => Ok(work),
            Some(failure) => Err(failure.clone()),
        }
    }

    pub(super) fn take_completions(&mut self) -> usize {
        let mut count = 0;
        while let Some(Completion { token, result }) = self.disk.completion() {
            self.under_way -= 1;
            count += 1;
            let which = (token & 0xFFFF_FFFF) as usize;
            match token & !0xFFFF_FFFF {
                WRITE => self.on_written(which, result),
                SYNC => self.on_synced(which, result),
                MAKE => self.on_made(result),
                TIDY => self.on_tidied(result),
                _ => self.on_saved(result),
            }
        }
        count
    }

    pub(super) fn submit(&mut self, op: Op<'_>, token: u64) {
        let taken = self.disk.submit(op, token);
        // Sixteen writes, sixteen syncs and one operation of each job are the most there ever are.
        assert!(taken, "the disk takes more operations than the store has");
        self.under_way += 1;
    }

    /// Whether a result says to try again now, or later because the disk is full; anything else is the end.
    pub(super) fn passes(&mut self, result: i32, verb: &str, name: Name) -> Passing {
        match -result {
            libc::EINTR | libc::EAGAIN => Passing::Again,
            errno if is_full(errno) => {
                self.retry_at_ns.get_or_insert(self.now_ns + RETRY_NS);
                Passing::Later
            }
            errno => {
                self.fail(&format!("{verb} {name}"), errno);
                Passing::Never
            }
        }
    }

    pub(super) fn fail(&mut self, what: &str, errno: i32) {
        if self.failure.is_none() {
            self.failure = Some(StoreError::io(&self.disk, what, errno));
        }
    }

    /// Begins a group commit if one is wanted, nothing else is being synced, and all it needs is written.
    fn start_sync(&mut self) {
        if self.wanted.at <= self.flushed.at {
            self.wanted = self.later;
        }
        if self.syncing.is_some() || self.wanted.at <= self.flushed.at || self.written < self.wanted.at {
            return;
        }
        // What came since goes along if it is written: that is the group.
        let target = if self.written == self.requested.at { self.requested } else { self.wanted };
        let mut remaining = 0;
        for at in 0..self.active.len() {
            let segment = &mut self.active[at];
            if segment.dirty && segment.start < target.at {
                segment.dirty = false;
                let (file, token) = (segment.file, SYNC | segment.file as u64);
                self.submit(Op::Sync { file }, token);
                remaining += 1;
            }
        }
        self.syncing = Some(Syncing { target, remaining });
        if remaining == 0 {
            self.finish_sync();
        }
    }

    fn on_synced(&mut self, file: usize, result: i32) {
        if result < 0 && planted(Mutant::RetryFailedSyncs) {
            return self.submit(Op::Sync { file }, SYNC | file as u64);
        }
        // Even an interrupted sync may have dropped the error of a write: there is no second try.
        // See "What a failed fdatasync means" in DESIGN.md.
        if result < 0 {
            self.fail("sync the log", -result);
        }
        let syncing = self.syncing.as_mut().expect("a sync is under way");
        syncing.remaining -= 1;
        if syncing.remaining == 0 && self.failure.is_none() {
            self.finish_sync();
        }
    }

    pub(super) fn stop_syncing(&mut self) {
        self.syncing = None;
    }

    fn finish_sync(&mut self) {
        let Some(Syncing { target, .. }) = self.syncing.take() else { return };
        self.flushed = target;
        while let Some(oldest) = self.active.front() {
            let end = oldest.start + self.layout.segment_bytes;
            if self.active.len() == 1 || end > target.at || self.submitted < end || oldest.dirty {
                break;
            }
            self.disk.close(oldest.file);
            self.active.pop_front();
        }
        // A header now and then says how much was durable, so that recovery can tell a torn end from a broken disk.
        let start = self.segment_start(self.submitted);
        if target.at - self.told.min(target.at) >= self.layout.segment_bytes / 16
            && let Some(segment) = self.active.iter_mut().find(|s| s.start == start && s.first.is_some())
        {
            segment.header_due = true;
            self.told = target.at;
        }
    }

    pub(super) fn segment_start(&self, at: u64) -> u64 {
        at - at % self.layout.segment_bytes
    }

    pub(super) fn wall_ms(&self) -> u64 {
        self.unix_ms + self.now_ns / 1_000_000
    }

    /// Lets everything that is under way end, and gives the disk nothing new: the region's bytes may be changed then.
    pub fn wait_for_writes(&mut self) {
        while self.under_way > 0 {
            if self.take_completions() == 0 {
                self.disk.wait();
            }
        }
    }

    /// The end that was last given to [`write_up_to`](Self::write_up_to).
    pub fn requested(&self) -> Mark {
        self.requested
    }

    /// End of what the files hold, in absolute bytes.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// End of what is durable: a place between two entries.
    pub fn flushed(&self) -> Mark {
        self.flushed
    }

    /// The region may overwrite what lies below this offset.
    pub fn released(&self) -> u64 {
        self.written - self.written % BLOCK_BYTES as u64
    }

    /// Before the first entry kept on disk.
    pub fn first(&self) -> Mark {
        self.catalog.first().unwrap_or(self.requested)
    }

    /// What the replica must not forget, as it was saved or is being saved.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// How the store is doing.
    pub fn condition(&self) -> Condition {
        if self.failure.is_some() {
            Condition::Failed
        } else if self.making.full || self.saving.full || self.writes.is_held_up() {
            Condition::Full
        } else {
            Condition::Good
        }
    }

    /// Space is reserved for the log up to this offset.
    pub fn room_end(&self) -> u64 {
        self.active.back().map_or(self.submitted, |newest| newest.start + self.layout.segment_bytes)
    }

    /// Whether nothing is under way or wanted.
    pub fn is_idle(&self) -> bool {
        self.under_way == 0
            && self.written == self.requested.at
            && self.later.at <= self.flushed.at
            && self.retry_at_ns.is_none()
            && self.tidying.is_idle()
            && self.saving.is_idle()
    }

    /// When [`poll`](Self::poll) has something to do although nothing is completed: after a full disk.
    pub fn deadline_ns(&self) -> Option<u64> {
        self.retry_at_ns
    }

    /// Descriptors that become readable when the disk has done something while the owner sleeps.
    pub fn wait_fds(&self, fds: &mut Vec<RawFd>) {
        self.disk.wait_fds(fds);
    }

    /// To be called before sleeping; true when something is done already.
    pub fn prepare_wait(&mut self) -> bool {
        self.disk.prepare_wait()
    }

    /// The disk below.
    pub fn disk(&self) -> &D {
        &self.disk
    }

    /// Drops whole segments below `upto`, as far as they are durable and not the newest; returns the first entry kept.
    /// Readers see that at once, the files go by and by.
    pub fn trim(&mut self, upto: u64) -> Mark {
        let upto = upto.min(self.flushed.at);
        let mut segments = self.catalog.segments();
        let segment_bytes = self.layout.segment_bytes;
        let oldest_active = self.active.front().map_or(u64::MAX, |oldest| oldest.start);
        let gone = segments
            .windows(2)
            // A header is durable when something behind it is.
            .take_while(|pair| pair[1].first.at <= upto && pair[1].start < self.flushed.at)
            .take_while(|pair| pair[0].start + segment_bytes <= oldest_active)
            .count();
        for Segment { start, .. } in segments.drain(..gone) {
            self.tidying.push(start);
        }
        let first = segments.first().map_or(self.requested, |segment| segment.first);
        drop(segments);
        first
    }

    /// The offset to [`trim`](Self::trim) up to so that this slot, and as little as possible before it, is kept.
    pub fn trim_before(&self, lsn: Lsn) -> u64 {
        self.catalog.by_lsn(lsn).map_or(0, |segment| segment.first.at)
    }

    /// The offset to [`trim`](Self::trim) up to by a rule, at most `allowed`.
    pub fn trim_by(&self, keep: &Keep, allowed: u64) -> u64 {
        if *keep == Keep::default() {
            return 0;
        }
        let spans: Vec<Span> =
            self.catalog.segments().iter().map(|s| Span { start: s.start, begun_ms: s.begun_ms }).collect();
        let end = self.written.max(spans.last().map_or(0, |s| s.start));
        keep.trim_to(&spans, end, self.wall_ms(), allowed)
    }

    /// Where the log's bytes at an absolute offset lie in their segment's file.
    pub(super) fn file_at(start: u64, at: u64) -> u64 {
        HEADER_BYTES + (at - start)
    }
}

/// What a result that is an error means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passing {
    Again,
    Later,
    Never,
}
