//! A place in the chain of entries, and the step over one entry from there.

use antelog_protocol::wire::entry::{CRC_OFFSET, EntryHeader, EntryKind, HEADER_BYTES};
use antelog_protocol::wire::node::Place;
use antelog_protocol::{Lsn, ShardId};

use super::format::Layout;
use crate::crc::crc32c;
use crate::log::VerifyError;
use crate::mem::Region;

/// A place between two entries of a log: all that is needed to verify, or to write, the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// Absolute offset, in bytes.
    pub at: u64,
    /// Slot of the next entry.
    pub lsn: Lsn,
    /// CRC of the entry before; 0 at a log's beginning.
    pub crc: u32,
    /// Epoch of the entry before.
    pub epoch: u32,
}

impl From<Place> for Mark {
    fn from(Place { epoch, crc, at_bytes: at, lsn }: Place) -> Mark {
        Mark { at, lsn, crc, epoch }
    }
}

impl From<Mark> for Place {
    fn from(Mark { at: at_bytes, lsn, crc, epoch }: Mark) -> Place {
        Place { epoch, crc, at_bytes, lsn }
    }
}

/// Bytes an entry takes; a pad says what it skips.
pub fn entry_bytes(header: &EntryHeader) -> usize {
    match header.kind {
        EntryKind::Pad => HEADER_BYTES + header.length as usize,
        _ => header.span_bytes(),
    }
}

/// What verifying an entry needs to know about its log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain {
    pub(super) shard: ShardId,
    /// Length of the log's region: no entry straddles a multiple of it.
    pub(super) lap_bytes: u64,
    /// No entry is longer.
    pub(super) entry_bytes_max: u64,
}

/// What is at a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// An entry that continues the chain, and the mark behind it.
    Entry(EntryHeader, Mark),
    /// What is there of the entry could continue the chain; it takes this many bytes.
    Needs(usize),
}

impl Chain {
    pub(super) fn new(shard: ShardId, layout: &Layout) -> Chain {
        let Layout { segment_bytes, region_bytes } = *layout;
        // A record is at most a quarter of the region; a pad is shorter than the entry that did not fit.
        Chain { shard, lap_bytes: region_bytes, entry_bytes_max: segment_bytes.min(region_bytes / 4 + 128) }
    }

    /// Verifies the entry at `mark`, of which `available` bytes lie at `place` of `region`.
    pub(super) fn step(
        &self,
        mark: &Mark,
        region: &Region,
        place: usize,
        available: usize,
    ) -> Result<Step, VerifyError> {
        if available < HEADER_BYTES {
            return Ok(Step::Needs(HEADER_BYTES));
        }
        let mut bytes = [0; HEADER_BYTES];
        region.get(place, &mut bytes);
        let header = EntryHeader::decode(&bytes).map_err(VerifyError::Header)?;
        if header.shard != self.shard {
            return Err(VerifyError::Shard(header.shard));
        }
        if header.lsn != mark.lsn {
            return Err(VerifyError::Lsn { found: header.lsn, expected: mark.lsn });
        }
        if header.epoch < mark.epoch {
            return Err(VerifyError::Epoch);
        }
        let span = entry_bytes(&header) as u64;
        if span > self.entry_bytes_max || mark.at % self.lap_bytes + span > self.lap_bytes {
            return Err(VerifyError::Length);
        }
        // Of a pad and of no-ops only the header is covered, and so needed.
        let needed = if header.kind == EntryKind::Record { span as usize } else { HEADER_BYTES };
        if available < needed {
            return Ok(Step::Needs(needed));
        }
        let mut crc = crc32c(mark.crc, &[&bytes[..CRC_OFFSET]]);
        if header.kind == EntryKind::Record {
            crc = region.crc32c(place + HEADER_BYTES, header.length as usize, crc);
        }
        if crc != header.crc {
            return Err(VerifyError::Crc);
        }
        Ok(Step::Entry(
            header,
            Mark { at: mark.at + span, lsn: mark.lsn.plus(header.count.into()), crc, epoch: header.epoch },
        ))
    }
}

/// The mark behind the entry at `mark`, which is known to be good: only its header is looked at.
pub(super) fn step_over(mark: &Mark, region: &Region) -> Mark {
    let mut bytes = [0; HEADER_BYTES];
    region.get((mark.at % region.len() as u64) as usize, &mut bytes);
    let header = EntryHeader::decode(&bytes);
    let header = header.unwrap_or_else(|error| panic!("no entry at offset {} of the log's region: {error}", mark.at));
    assert!(header.lsn == mark.lsn, "slot {} at offset {} of the log's region, not {}", header.lsn, mark.at, mark.lsn);
    Mark {
        at: mark.at + entry_bytes(&header) as u64,
        lsn: mark.lsn.plus(header.count.into()),
        crc: header.crc,
        epoch: header.epoch,
    }
}
