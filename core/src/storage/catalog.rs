//! The segments of a log, shared by the store that writes them and the readers of old entries.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use antelog_protocol::Lsn;

use super::mark::Mark;

/// A segment on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// Absolute offset of its first byte.
    pub(super) start: u64,
    /// Before the first entry that begins in it.
    pub(super) first: Mark,
    /// When it was begun, in milliseconds of Unix time.
    pub(super) begun_ms: u64,
}

/// See the module's text. Changed a few times per segment, so a lock does no harm; the ends are read without it.
#[derive(Debug, Default)]
pub(super) struct Catalog {
    segments: Mutex<Vec<Segment>>,
    /// Held while bytes are changed that lie below the written end: by a cut, or by a repair.
    changing: Mutex<()>,
    /// Everything below is in the segment files.
    written: AtomicU64,
    /// Counts how often the log was cut, so that a reader whose segment changed knows why.
    cuts: AtomicU64,
}

impl Catalog {
    pub(super) fn segments(&self) -> MutexGuard<'_, Vec<Segment>> {
        // The list is whole after every statement that changes it, even if a thread panicked holding it.
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps others from changing what is written.
    pub(super) fn change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    pub(super) fn set_written(&self, at: u64) {
        self.written.store(at, Ordering::Release);
    }

    pub(super) fn cuts(&self) -> u64 {
        self.cuts.load(Ordering::Acquire)
    }

    /// Replaces the list, for a log that was opened, cut, or begun anew.
    pub(super) fn replace(&self, segments: Vec<Segment>, written: u64) {
        let mut held = self.segments();
        *held = segments;
        self.cuts.fetch_add(1, Ordering::AcqRel);
        self.set_written(written);
    }

    /// Before the first entry kept.
    pub(super) fn first(&self) -> Option<Mark> {
        self.segments().first().map(|segment| segment.first)
    }

    /// The segment in which the entry with this slot begins, or one before it; none if it was trimmed.
    pub(super) fn by_lsn(&self, lsn: Lsn) -> Option<Segment> {
        let segments = self.segments();
        segments[..segments.partition_point(|s| s.first.lsn <= lsn)].last().copied()
    }

    /// The segment whose first entry is the last one at or before this offset; none if that was trimmed.
    pub(super) fn by_first(&self, at: u64) -> Option<Segment> {
        let segments = self.segments();
        segments[..segments.partition_point(|s| s.first.at <= at)].last().copied()
    }

    /// The segment that holds this offset; none if it was trimmed or is not written yet.
    pub(super) fn by_offset(&self, at: u64) -> Option<Segment> {
        let segments = self.segments();
        segments[..segments.partition_point(|s| s.start <= at)].last().copied()
    }
}
