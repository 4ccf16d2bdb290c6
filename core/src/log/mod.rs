//! A shard's log in its region: entries one after another, in laps, found again by lsn.
//!
//! Offsets are absolute bytes since the log began; an entry at offset `at` lies at `at % region length` and never
//! straddles the end of the region (a pad entry skips the rest of a lap). The writer owns the log's thread; readers on
//! other threads follow `head` and `tail`, which the writer publishes. See "The region log" in DESIGN.md.

mod index;
mod reader;
mod writer;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use antelog_protocol::wire::entry::HEADER_BYTES;

use crate::mem::Region;
pub use index::BLOCK_BYTES;
use index::BlockIndex;
pub use reader::{Cursor, Item, LogReader, Overrun, Verifier, VerifyError};
pub use writer::{LogFull, LogWriter, Retention};

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
}

impl Shared {
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
