//! What a shard's log holds, as the oracle reads it from the regions themselves: its own parser of log entries, one cursor
//! for each replica. Entries are read when a cut binds them or somebody is handed them, long before they can be dropped.

use std::sync::Arc;

use super::Violation;
use crate::mem::Region;

const HEADER_BYTES: u64 = 64;

/// Entries one after another, as (first slot, slots, record).
pub(super) type Entry = (u64, u64, Option<u32>);

/// What stands in a log's region next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) lsn: u64,
    pub(super) count: u64,
    /// Session and number of a record.
    pub(super) record: Option<(u128, u64)>,
    /// Where the record's bytes lie in the region.
    pub(super) offset: usize,
    pub(super) len: usize,
}

/// How far a replica's region was read.
#[derive(Debug)]
pub(super) struct Cursor {
    region: Arc<Region>,
    shard: u16,
    at: u64,
    pub(super) lsn: u64,
}

impl Cursor {
    pub(super) fn new(region: Arc<Region>, shard: u16) -> Cursor {
        Cursor { region, shard, at: 0, lsn: 0 }
    }

    pub(super) fn region(&self) -> &Region {
        &self.region
    }

    /// Laps of the region that were read.
    pub(super) fn laps(&self) -> u64 {
        self.at / self.region.len() as u64
    }

    /// The next entry with slots. An error when the region does not hold it.
    pub(super) fn next(&mut self) -> Result<Found, Violation> {
        loop {
            let place = (self.at % self.region.len() as u64) as usize;
            let mut header = [0; HEADER_BYTES as usize];
            self.region.get(place, &mut header);
            let number = |at: usize, count: usize| {
                header[at..at + count].iter().rev().fold(0u128, |sum, byte| sum << 8 | u128::from(*byte))
            };
            let (kind, shard, length) = (header[0], number(2, 2), number(4, 4) as u64);
            let (lsn, count) = (number(8, 8) as u64, number(16, 4) as u64);
            if shard != u128::from(self.shard) || lsn != self.lsn || !(1..=3).contains(&kind) {
                let what = format!("slot {} of shard {} is not in the region at {}", self.lsn, self.shard, self.at);
                return Err(Violation::new("I11", what));
            }
            let payload = if kind == 3 { length } else { length.next_multiple_of(HEADER_BYTES) };
            self.at += HEADER_BYTES + payload;
            if kind == 3 {
                continue;
            }
            self.lsn += count;
            let record = (kind == 1).then(|| (number(24, 16), number(40, 8) as u64));
            let offset = place + HEADER_BYTES as usize;
            return Ok(Found { lsn, count, record, offset, len: length as usize });
        }
    }
}

/// One shard's slots and replicas.
#[derive(Debug)]
pub(super) struct ShardTruth {
    /// The primary's cursor, then the backups'.
    pub(super) replicas: Vec<Cursor>,
    pub(super) entries: Vec<Entry>,
    /// Of each backup, entries compared with the primary's.
    pub(super) compared: Vec<usize>,
}

impl ShardTruth {
    pub(super) fn new(shard: u16, regions: &[Arc<Region>]) -> ShardTruth {
        let cursor = |region: &Arc<Region>| Cursor::new(region.clone(), shard);
        ShardTruth {
            replicas: regions.iter().map(cursor).collect(),
            entries: Vec::new(),
            compared: vec![0; regions.len()],
        }
    }

    /// The entry that holds a slot, which was read.
    pub(super) fn entry(&self, lsn: u64) -> Option<Entry> {
        let after = self.entries.partition_point(|entry| entry.0 <= lsn);
        let entry = *self.entries[..after].last()?;
        (lsn < entry.0 + entry.1).then_some(entry)
    }

    /// The first slot with a record from `from` on, below `to`.
    pub(super) fn record_between(&self, from: u64, to: u64) -> Option<u64> {
        let first = self.entries.partition_point(|entry| entry.0 + entry.1 <= from);
        let below = self.entries[first..].iter().take_while(|entry| entry.0 < to);
        below.filter(|entry| entry.2.is_some()).map(|entry| entry.0).next()
    }
}
