//! A shard's log in its region: entries one after another, in laps, found again by lsn.
//!
//! Offsets are absolute bytes since the log began; an entry at offset `at` lies at `at % region length` and never
//! straddles the end of the region (a pad entry skips the rest of a lap). The writer owns the log's thread; readers on
//! other threads follow `head` and `tail`, which the writer publishes. See "The region log" in DESIGN.md.

mod index;
mod reader;
mod verifier;
mod writer;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use antelog_protocol::Lsn;
use antelog_protocol::wire::entry::{EntryHeader, HEADER_BYTES};
use antelog_protocol::wire::node::Place;

use crate::mem::Region;
pub use index::BLOCK_BYTES;
use index::BlockIndex;
pub use reader::{Cursor, Item, LogReader, Overrun};
pub use verifier::{Verifier, VerifyError};
pub use writer::{LogFull, LogOptions, LogWriter, Retention};

/// Smallest region a log works in, in bytes.
pub const REGION_BYTES_MIN: usize = 4 * BLOCK_BYTES;

/// What writer and readers of one log share.
#[derive(Debug)]
struct Shared {
    region: Arc<Region>,
    index: BlockIndex,
    /// First offset kept.
    head: AtomicU64,
    /// End of the last entry.
    tail: AtomicU64,
    /// The slot that the first entry will have, while there is none.
    begins: AtomicU64,
}

impl Shared {
    fn new(region: Arc<Region>) -> Arc<Shared> {
        assert!(region_bytes_valid(region.len()), "a log region is a multiple of the block size");
        let index = BlockIndex::new(region.len());
        Arc::new(Shared { region, index, head: AtomicU64::new(0), tail: AtomicU64::new(0), begins: AtomicU64::new(0) })
    }

    fn header(&self, at: u64) -> Option<EntryHeader> {
        let mut bytes = [0; HEADER_BYTES];
        self.region.get(self.place(at), &mut bytes);
        EntryHeader::decode(&bytes).ok()
    }

    /// The place of the first entry kept; `end` where there is none. Of the entry before nothing is known but its checksum:
    /// another log may go on here with an older epoch than this one did.
    fn first_place(&self, end: Place) -> Option<Place> {
        let at_bytes = self.head();
        if at_bytes == end.at_bytes {
            return Some(end);
        }
        let header = self.header(at_bytes)?;
        let crc = self.index.crc_before(at_bytes)?;
        Some(Place { epoch: 0, crc, at_bytes, lsn: header.lsn })
    }

    /// The place behind the last entry of which all slots are below `lsn`, if what is kept goes back that far; `end` is
    /// where the log ends.
    fn place_before(&self, lsn: Lsn, end: Place) -> Option<Place> {
        if lsn >= end.lsn {
            return Some(end);
        }
        let (at_bytes, first) = self.index.at_or_before(lsn.0, self.head(), end.at_bytes)?;
        let crc = self.index.crc_before(at_bytes)?;
        let mut place = Place { epoch: 0, crc, at_bytes, lsn: Lsn(first) };
        while place.at_bytes < end.at_bytes {
            let (_, behind) = self.entry(place)?;
            if behind.lsn > lsn {
                break;
            }
            place = behind;
        }
        Some(place)
    }

    /// The entry at a place and the place behind it.
    fn entry(&self, place: Place) -> Option<(EntryHeader, Place)> {
        let header = self.header(place.at_bytes)?;
        let at_bytes = place.at_bytes + header.span_bytes() as u64;
        let lsn = header.lsn.plus(header.count.into());
        Some((header, Place { epoch: header.epoch, crc: header.crc, at_bytes, lsn }))
    }

    fn len(&self) -> u64 {
        self.region.len() as u64
    }

    /// Where an absolute offset lies in the region.
    fn place(&self, at: u64) -> usize {
        (at % self.len()) as usize
    }

    fn head(&self) -> u64 {
        self.head.load(Ordering::Acquire)
    }

    fn tail(&self) -> u64 {
        self.tail.load(Ordering::Acquire)
    }
}

/// Whether `region_bytes` is a usable length for a log's region.
pub fn region_bytes_valid(region_bytes: usize) -> bool {
    region_bytes >= REGION_BYTES_MIN && region_bytes.is_multiple_of(BLOCK_BYTES)
}

const _: () = assert!(BLOCK_BYTES.is_multiple_of(HEADER_BYTES));

#[cfg(test)]
mod tests;
