//! The reading ends of a shard's log: a gate's [`LogReader`], and the [`Verifier`] of a backup.

use std::fmt;
use std::sync::Arc;

use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::wire::DecodeError;
use antelog_protocol::wire::entry::{CRC_OFFSET, EntryHeader, EntryKind, HEADER_BYTES};
use antelog_protocol::{Lsn, ShardId};

use super::Shared;
use crate::crc::crc32c;
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

    /// A cursor at the first slot kept.
    pub fn first(&self) -> Result<Cursor, Overrun> {
        let at = self.shared.head();
        if at == self.shared.tail() {
            // Nothing was ever written: the head only moves to entries.
            return Ok(Cursor { at, lsn: Lsn(0) });
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
            if header.kind == EntryKind::Pad || end <= cursor.lsn {
                cursor.at += header.span_bytes() as u64;
                continue;
            }
            return Ok(match header.kind {
                EntryKind::Record => Item::Record { header, offset: self.shared.place(cursor.at) + HEADER_BYTES },
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
        let mut bytes = [0; HEADER_BYTES];
        self.shared.region.get(self.shared.place(at), &mut bytes);
        // Bytes that are no header can only come from overwriting: the caller's cursor is at an entry.
        EntryHeader::decode(&bytes).map_err(|_| Overrun)
    }
}

/// Why a backup's region is not a continuation of the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerifyError {
    /// A header's bytes are not an entry's.
    Header(DecodeError),
    /// An entry of another shard.
    Shard(ShardId),
    /// The entry's first slot is not the next one.
    Lsn {
        /// The slot found.
        found: Lsn,
        /// The slot expected.
        expected: Lsn,
    },
    /// The epoch went back.
    Epoch,
    /// The entry runs over the end of the lap or of what was written.
    Length,
    /// The CRC does not continue the chain.
    Crc,
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VerifyError::Header(error) => write!(f, "the bytes are no entry header: {error}"),
            VerifyError::Shard(shard) => write!(f, "the entry belongs to shard {shard}"),
            VerifyError::Lsn { found, expected } => write!(f, "the entry's slot is {found}, expected {expected}"),
            VerifyError::Epoch => write!(f, "the entry's epoch is older than the one before"),
            VerifyError::Length => write!(f, "the entry is longer than what was written"),
            VerifyError::Crc => write!(f, "the entry's CRC does not continue the chain"),
        }
    }
}

/// Follows the chain of entries in a backup's region, checking each.
#[derive(Debug)]
pub struct Verifier {
    region: std::sync::Arc<Region>,
    shard: ShardId,
    at: u64,
    lsn: Lsn,
    crc: u32,
    epoch: u32,
}

impl Verifier {
    /// A verifier at the start of an empty log.
    pub fn new(region: std::sync::Arc<Region>, shard: ShardId) -> Verifier {
        Verifier { region, shard, at: 0, lsn: Lsn(0), crc: 0, epoch: 0 }
    }

    /// Everything below this offset, in absolute bytes, is verified.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Everything below this slot is verified.
    pub fn lsn(&self) -> Lsn {
        self.lsn
    }

    /// Verifies the next entry, which ends at or before `written`. False when there is none.
    ///
    /// # Errors
    /// When the bytes do not continue the chain; nothing moves then.
    pub fn step(&mut self, written: u64) -> Result<bool, VerifyError> {
        if planted(Mutant::TakeShapesForEntries) {
            return Ok(self.step_by_shape());
        }
        if self.at + HEADER_BYTES as u64 > written {
            return Ok(false);
        }
        let place = (self.at % self.region.len() as u64) as usize;
        let mut bytes = [0; HEADER_BYTES];
        self.region.get(place, &mut bytes);
        let header = EntryHeader::decode(&bytes).map_err(VerifyError::Header)?;
        let span =
            if header.kind == EntryKind::Pad { HEADER_BYTES + header.length as usize } else { header.span_bytes() };
        if header.shard != self.shard {
            return Err(VerifyError::Shard(header.shard));
        }
        if header.lsn != self.lsn {
            return Err(VerifyError::Lsn { found: header.lsn, expected: self.lsn });
        }
        if header.epoch < self.epoch {
            return Err(VerifyError::Epoch);
        }
        if place + span > self.region.len() || self.at + span as u64 > written {
            return Err(VerifyError::Length);
        }
        let mut crc = crc32c(self.crc, &[&bytes[..CRC_OFFSET]]);
        if header.kind == EntryKind::Record {
            crc = self.region.crc32c(place + HEADER_BYTES, header.length as usize, crc);
        }
        if crc != header.crc {
            return Err(VerifyError::Crc);
        }
        self.at += span as u64;
        self.lsn = self.lsn.plus(header.count.into());
        (self.crc, self.epoch) = (crc, header.epoch);
        Ok(true)
    }

    /// What a verifier does that believes headers: [`Mutant::TakeShapesForEntries`].
    fn step_by_shape(&mut self) -> bool {
        let place = (self.at % self.region.len() as u64) as usize;
        let mut bytes = [0; HEADER_BYTES];
        self.region.get(place, &mut bytes);
        let shaped = EntryHeader::decode(&bytes).ok().filter(|header| header.shard == self.shard);
        let Some(header) = shaped else { return false };
        let pad = header.kind == EntryKind::Pad;
        self.at += if pad { HEADER_BYTES + header.length as usize } else { header.span_bytes() } as u64;
        self.lsn = self.lsn.plus(header.count.into());
        true
    }
}
