//! The reading end of a shard's log, for gates.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use antelog_protocol::Lsn;
use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::wire::entry::{EntryHeader, EntryKind, HEADER_BYTES};

use super::Shared;
use crate::mem::Region;

/// A place in the log: an entry's offset and the slot to read there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Offset of an entry, in absolute bytes.
    pub at: u64,
    /// The slot wanted next; at or after the entry's first.
    pub lsn: Lsn,
}

/// What is at a cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    /// A record: its header, and where its payload lies in the region.
    Record {
        /// The entry's header.
        header: EntryHeader,
        /// Offset of the payload in the region.
        offset: usize,
    },
    /// Slots without records, from the cursor's on.
    NoOps {
        /// How many.
        count: u64,
    },
    /// Slots that were lost, from the cursor's on.
    Lost {
        /// How many.
        count: u64,
    },
}

/// The entry was dropped and possibly overwritten while it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overrun;

/// Reads a log from another thread than its writer's.
#[derive(Clone, Debug)]
pub struct LogReader {
    shared: Arc<Shared>,
}

impl LogReader {
    pub(super) fn new(shared: Arc<Shared>) -> LogReader {
        LogReader { shared }
    }

    /// The region that payload offsets refer to.
    pub fn region(&self) -> &Region {
        &self.shared.region
    }

    /// Whether no entry is kept: none was ever written, or none since the log began anew.
    pub fn is_empty(&self) -> bool {
        self.shared.head() == self.shared.tail()
    }

    /// The end of what may be read, in absolute bytes.
    pub fn end(&self) -> u64 {
        self.shared.tail()
    }

    /// A cursor at the first slot kept.
    pub fn first(&self) -> Result<Cursor, Overrun> {
        let at = self.shared.head();
        if at == self.shared.tail() {
            // Nothing was written since the log began: the head only moves to entries.
            return Ok(Cursor { at, lsn: Lsn(self.shared.begins.load(Ordering::Acquire)) });
        }
        let lsn = self.header(at)?.lsn;
        self.check(at).map(|()| Cursor { at, lsn })
    }

    /// A cursor at a slot that is appended and kept, or at the log's end. [`Overrun`] when it was dropped.
    pub fn seek(&self, lsn: Lsn) -> Result<Cursor, Overrun> {
        loop {
            if let Ok(cursor) = self.seek_once(lsn) {
                return Ok(cursor);
            }
            // The head moved meanwhile: that matters only if it passed the slot.
            if self.first().is_ok_and(|first| lsn < first.lsn) {
                return Err(Overrun);
            }
        }
    }

    fn seek_once(&self, lsn: Lsn) -> Result<Cursor, Overrun> {
        let (head, tail) = (self.shared.head(), self.shared.tail());
        let first = self.first()?;
        if lsn < first.lsn {
            return Err(Overrun);
        }
        let (mut at, _) = self.shared.index.at_or_before(lsn.0, head, tail).unwrap_or((first.at, first.lsn.0));
        while at < tail {
            let header = self.header(at)?;
            if header.kind != EntryKind::Pad && lsn < header.lsn.plus(header.count.into()) {
                break;
            }
            at += header.span_bytes() as u64;
        }
        self.check(head.max(first.at))?;
        Ok(Cursor { at, lsn })
    }

    /// The item at a cursor whose slot is appended, and the cursor moved to it (past a pad).
    #[inline]
    pub fn item(&self, cursor: &mut Cursor) -> Result<Item, Overrun> {
        loop {
            let header = self.header(cursor.at)?;
            // Only a header that was not being overwritten says how long its entry is.
            self.check(cursor.at)?;
            let end = header.lsn.plus(header.count.into());
            let beyond = header.kind != EntryKind::Pad && header.lsn > cursor.lsn;
            if beyond && !planted(Mutant::DeliverOverwritten) {
                return Err(Overrun); // The log begins behind the slot: the cursor is of another.
            }
            if header.kind == EntryKind::Pad || end <= cursor.lsn {
                cursor.at += header.span_bytes() as u64;
                continue;
            }
            return Ok(match header.kind {
                EntryKind::Record => Item::Record { header, offset: self.shared.place(cursor.at) + HEADER_BYTES },
                EntryKind::Lost => Item::Lost { count: end.0 - cursor.lsn.0 },
                _ => Item::NoOps { count: end.0 - cursor.lsn.0 },
            });
        }
    }

    /// Whether the entry at this offset was intact until now: call after copying its payload.
    #[inline]
    pub fn check(&self, at: u64) -> Result<(), Overrun> {
        if at >= self.shared.head() || planted(Mutant::DeliverOverwritten) { Ok(()) } else { Err(Overrun) }
    }

    fn header(&self, at: u64) -> Result<EntryHeader, Overrun> {
        // Bytes that are no header can only come from overwriting: the caller's cursor is at an entry.
        self.shared.header(at).ok_or(Overrun)
    }
}
