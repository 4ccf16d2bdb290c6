//! What the store does beside writing, one operation at a time each: making the next segment, removing old ones, saving the
//! identity.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::disk::{Disk, Name, Op};
use super::error::StoreError;
use super::format::{HEADER_BYTES, IDENTITY_FILE_BYTES, NOTE_BYTES_MAX};
use super::store::{ACTIVE_MAX, Active, IDENTITY_FILE, LogStore, MAKE, Passing, SAVE, TIDY};
use crate::mem::Region;

/// Whether the operation of a job's step is to be given to the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Turn {
    #[default]
    Due,
    UnderWay,
    /// Due when the disk may have room.
    Waits,
}

impl Turn {
    fn after(passing: Passing) -> Turn {
        if passing == Passing::Again { Turn::Due } else { Turn::Waits }
    }

    fn retry(&mut self) {
        if *self == Turn::Waits {
            *self = Turn::Due;
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MakeStep {
    Create,
    Allocate,
    Sync,
    SyncDirectory,
}

/// The next segment, reserved before it is needed, so that a full disk shows while there is still room for records.
#[derive(Debug, Default)]
pub(super) struct Making {
    step: Option<MakeStep>,
    turn: Turn,
    start: u64,
    file: usize,
    /// The step met a full disk and has not succeeded since.
    pub(super) full: bool,
}

impl Making {
    pub(super) fn retry(&mut self) {
        self.turn.retry();
    }

    /// The file of a segment that is not finished; the job is forgotten.
    pub(super) fn abandon(&mut self) -> Option<(u64, usize)> {
        let unfinished = self.step.filter(|step| *step != MakeStep::Create).map(|_| (self.start, self.file));
        *self = Making::default();
        unfinished
    }
}

/// Segments to be removed, oldest first, each durably before the next: no power loss leaves a gap.
#[derive(Debug, Default)]
pub(super) struct Tidying {
    starts: VecDeque<u64>,
    turn: Turn,
    removed: bool,
}

impl Tidying {
    pub(super) fn push(&mut self, start: u64) {
        self.starts.push_back(start);
    }

    pub(super) fn is_idle(&self) -> bool {
        self.starts.is_empty()
    }

    /// Takes the next segment out of the job.
    pub(super) fn next(&mut self) -> Option<u64> {
        (self.turn, self.removed) = (Turn::Due, false);
        self.starts.pop_front()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SaveStep {
    /// The file that is written over must not be the identity's after any power loss.
    Part,
    Create,
    Write,
    Sync,
    Exchange,
    /// Where there is nothing to exchange it for, or the file system does not exchange names.
    Rename,
    SyncDirectory,
}

/// The identity on its way to the disk: a new file that replaces the old one, which stays and is written over the next time.
/// So a full disk has room for it. See "The identity" in DESIGN.md.
#[derive(Debug)]
pub(super) struct Saving {
    step: Option<SaveStep>,
    turn: Turn,
    bytes: Arc<Region>,
    /// Counts calls of `save`.
    wanted: u64,
    /// The call whose state is under way.
    under_way: u64,
    saved: u64,
    pub(super) full: bool,
    /// The names that were exchanged last are durable.
    pub(super) parted: bool,
}

impl Saving {
    pub(super) fn new() -> io::Result<Saving> {
        let bytes = Region::new(IDENTITY_FILE_BYTES)?;
        Ok(Saving { step: None, turn: Turn::Due, bytes, wanted: 0, under_way: 0, saved: 0, full: false, parted: false })
    }

    pub(super) fn retry(&mut self) {
        self.turn.retry();
    }

    pub(super) fn is_idle(&self) -> bool {
        self.saved == self.wanted
    }

    /// Forgets what is half done; it is begun again.
    pub(super) fn abandon(&mut self) {
        (self.step, self.turn, self.full) = (None, Turn::Due, false);
    }

    /// Everything asked for is durable.
    pub(super) fn done(&mut self) {
        self.saved = self.wanted;
    }
}

impl<D: Disk> LogStore<D> {
    /// Goes on with making the next segment, or begins to.
    pub(super) fn make(&mut self) {
        if self.making.step.is_none() {
            let next = match self.active.back() {
                None => self.segment_start(self.submitted),
                // One segment ahead of the one that is written.
                Some(newest) if newest.start <= self.segment_start(self.requested.at) => {
                    newest.start + self.layout.segment_bytes
                }
                Some(_) => return,
            };
            let free = (0..ACTIVE_MAX).find(|file| self.active.iter().all(|segment| segment.file != *file));
            let Some(file) = free else { return };
            self.making = Making { step: Some(MakeStep::Create), start: next, file, ..Making::default() };
        }
        let Making { step: Some(step), turn: Turn::Due, start, file, .. } = self.making else { return };
        self.making.turn = Turn::UnderWay;
        let op = match step {
            MakeStep::Create => Op::Open { file, name: Name::Segment(start), create: true },
            MakeStep::Allocate => Op::Allocate { file, bytes: HEADER_BYTES + self.layout.segment_bytes },
            MakeStep::Sync => Op::Sync { file },
            MakeStep::SyncDirectory => Op::SyncDirectory,
        };
        self.submit(op, MAKE);
    }

    pub(super) fn on_made(&mut self, result: i32) {
        let Making { step: Some(step), start, file, .. } = self.making else { return };
        let name = Name::Segment(start);
        if result < 0 {
            self.making.turn = match step {
                MakeStep::Create => Turn::after(self.passes(result, "create", name)),
                MakeStep::Allocate => Turn::after(self.passes(result, "reserve space for", name)),
                MakeStep::Sync | MakeStep::SyncDirectory => {
                    self.fail(&format!("sync {name}"), -result);
                    Turn::Waits
                }
            };
            self.making.full |= self.making.turn == Turn::Waits;
            return;
        }
        self.making.full = false;
        self.making.turn = Turn::Due;
        self.making.step = match step {
            MakeStep::Create => Some(MakeStep::Allocate),
            MakeStep::Allocate => Some(MakeStep::Sync),
            MakeStep::Sync => Some(MakeStep::SyncDirectory),
            MakeStep::SyncDirectory => {
                let segment = Active { start, file, header_due: true, first: None, begun_ms: 0, dirty: false };
                self.active.push_back(segment);
                None
            }
        };
    }

    /// Goes on with removing segments.
    pub(super) fn tidy(&mut self) {
        let Some(&start) = self.tidying.starts.front() else { return };
        if self.tidying.turn != Turn::Due {
            return;
        }
        self.tidying.turn = Turn::UnderWay;
        let op = if self.tidying.removed { Op::SyncDirectory } else { Op::Remove { name: Name::Segment(start) } };
        self.submit(op, TIDY);
    }

    pub(super) fn on_tidied(&mut self, result: i32) {
        self.tidying.turn = Turn::Due;
        let Some(&start) = self.tidying.starts.front() else { return };
        if self.tidying.removed && result < 0 {
            self.fail("sync the directory", -result);
        } else if self.tidying.removed {
            self.tidying.starts.pop_front();
            self.tidying.removed = false;
        } else if result >= 0 || result == -libc::ENOENT {
            self.tidying.removed = true;
        } else if !matches!(-result, libc::EINTR | libc::EAGAIN) {
            self.fail(&format!("remove {}", Name::Segment(start)), -result);
        }
    }

    /// Replaces the caller's note in the identity; returns a number that [`saved`](Self::saved) reaches when it is durable.
    /// Of several that wait only the newest is written. Panics when it is longer than [`NOTE_BYTES_MAX`].
    pub fn save(&mut self, note: &[u8]) -> u64 {
        assert!(note.len() <= NOTE_BYTES_MAX, "the identity keeps at most {NOTE_BYTES_MAX} bytes");
        self.identity.note.clear();
        self.identity.note.extend_from_slice(note);
        self.saving.wanted += 1;
        self.saving.wanted
    }

    /// As [`save`](Self::save), and waits until the note is durable.
    ///
    /// # Errors
    /// When the disk fails or is full.
    pub fn save_now(&mut self, note: &[u8]) -> Result<(), StoreError> {
        let wanted = self.save(note);
        loop {
            self.poll(self.now_ns)?;
            if self.saved() >= wanted {
                return Ok(());
            }
            if self.saving.full {
                return Err(StoreError::Full { place: self.disk.place() });
            }
            self.disk.wait();
        }
    }

    /// The newest call of [`save`](Self::save) whose note is durable.
    pub fn saved(&self) -> u64 {
        self.saving.saved
    }

    /// Goes on with saving the identity, or begins to.
    pub(super) fn save_identity(&mut self) {
        if self.saving.step.is_none() {
            if self.saving.is_idle() {
                return;
            }
            self.identity.flushed = self.flushed;
            self.saving.bytes.put(0, &self.identity.encode());
            self.saving.under_way = self.saving.wanted;
            self.saving.step = Some(if self.saving.parted { SaveStep::Create } else { SaveStep::Part });
            self.saving.turn = Turn::Due;
        }
        let (Some(step), Turn::Due) = (self.saving.step, self.saving.turn) else { return };
        self.saving.turn = Turn::UnderWay;
        let file = IDENTITY_FILE;
        let bytes = self.saving.bytes.clone();
        let op = match step {
            SaveStep::Create => Op::Open { file, name: Name::IdentityNew, create: true },
            SaveStep::Write => Op::Write { file, at: 0, source: &bytes, offset: 0, len: IDENTITY_FILE_BYTES },
            SaveStep::Sync => Op::Sync { file },
            SaveStep::Exchange => Op::Exchange { one: Name::IdentityNew, other: Name::Identity },
            SaveStep::Rename => Op::Rename { from: Name::IdentityNew, to: Name::Identity },
            SaveStep::Part | SaveStep::SyncDirectory => Op::SyncDirectory,
        };
        // What an exchange has done counts as soon as it may have.
        self.saving.parted &= !matches!(step, SaveStep::Exchange | SaveStep::Rename);
        self.submit(op, SAVE);
    }

    pub(super) fn on_saved(&mut self, result: i32) {
        let Some(step) = self.saving.step else { return };
        if result < 0 {
            self.saving.turn = match step {
                SaveStep::Create => Turn::after(self.passes(result, "create", Name::IdentityNew)),
                SaveStep::Write => Turn::after(self.passes(result, "write", Name::IdentityNew)),
                SaveStep::Exchange => {
                    self.saving.step = Some(SaveStep::Rename);
                    Turn::Due
                }
                SaveStep::Rename => Turn::after(self.passes(result, "rename", Name::IdentityNew)),
                SaveStep::Part | SaveStep::Sync | SaveStep::SyncDirectory => {
                    self.fail("sync the identity", -result);
                    Turn::Waits
                }
            };
            self.saving.full |= self.saving.turn == Turn::Waits;
            return;
        }
        self.saving.full = false;
        self.saving.turn = Turn::Due;
        self.saving.parted |= matches!(step, SaveStep::Part | SaveStep::SyncDirectory);
        self.saving.step = match step {
            SaveStep::Part => Some(SaveStep::Create),
            SaveStep::Create => Some(SaveStep::Write),
            // A short write is begun again.
            SaveStep::Write if (result as usize) < IDENTITY_FILE_BYTES => Some(SaveStep::Write),
            SaveStep::Write => Some(SaveStep::Sync),
            SaveStep::Sync => {
                self.disk.close(IDENTITY_FILE);
                Some(SaveStep::Exchange)
            }
            SaveStep::Exchange | SaveStep::Rename => Some(SaveStep::SyncDirectory),
            SaveStep::SyncDirectory => {
                self.saving.saved = self.saving.under_way;
                None
            }
        };
    }
}
