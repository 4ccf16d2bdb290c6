//! The writing end of a shard's log.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::wire::entry::{CRC_OFFSET, EntryHeader, EntryKind, HEADER_BYTES, span_bytes};
use antelog_protocol::wire::node::Place;
use antelog_protocol::{ClientId, Lsn, ShardId};

use super::{LogReader, Shared, Verifier};
use crate::crc::crc32c;
use crate::mem::Region;

/// What happens when the region is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Retention {
    /// Appends are refused; nothing is ever dropped.
    Refuse,
    /// The oldest confirmed entries make room.
    Recycle,
}

impl fmt::Display for Retention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Retention::Refuse => "refuse",
            Retention::Recycle => "recycle",
        })
    }
}

/// The region has no room for the entry now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogFull;

/// How a log is kept.
#[derive(Clone, Copy, Debug)]
pub struct LogOptions {
    /// What happens when the region is full.
    pub retention: Retention,
    /// Largest record in bytes.
    pub record_bytes_max: usize,
}

/// Writes a shard's entries, chains their CRCs, and frees room by the retention rule.
#[derive(Debug)]
pub struct LogWriter {
    shared: Arc<Shared>,
    shard: ShardId,
    epoch: u32,
    retention: Retention,
    record_bytes_max: usize,
    tail: u64,
    head: u64,
    next_lsn: Lsn,
    crc: u32,
    /// Entries below this lsn may be dropped.
    committed: Lsn,
    /// Every backup has verified everything below this offset, and it is on disk if there is one; the region may be
    /// overwritten no further.
    drained: u64,
    /// Entries from this offset on are nowhere else yet.
    written: u64,
}

impl LogWriter {
    /// An empty log in `region`, whose length is a multiple of the block size.
    pub fn new(region: Arc<Region>, shard: ShardId, epoch: u32, options: LogOptions) -> LogWriter {
        LogWriter::take_over(Verifier::new(region, shard), epoch, options)
    }

    /// Goes on where a log that was followed ends, in an epoch of its own.
    pub fn take_over(log: Verifier, epoch: u32, options: LogOptions) -> LogWriter {
        let LogOptions { retention, record_bytes_max } = options;
        assert!(record_bytes_max <= log.region().len() / 4, "the largest record must fit four times into the region");
        let Place { crc, at_bytes: tail, lsn: next_lsn, .. } = log.place();
        LogWriter {
            shared: log.shared().clone(),
            shard: log.shard(),
            epoch,
            retention,
            record_bytes_max,
            tail,
            head: log.head(),
            next_lsn,
            crc,
            committed: Lsn(0),
            drained: u64::MAX,
            written: u64::MAX,
        }
    }

    /// The log as one follows it that is not written any more, up to its last entry of which all slots are below `lsn`;
    /// whether it begins anew, with nothing kept.
    pub fn give_up(self, lsn: Lsn) -> (Verifier, bool) {
        let mut log = Verifier::with(self.shared.clone(), self.shard, self.place());
        let place = log.place_before(lsn).or_else(|| log.first_place());
        match place {
            Some(place) => log.rewind(place),
            None => log.restart(Place { epoch: self.epoch, crc: 0, at_bytes: self.tail, lsn: self.next_lsn }),
        }
        (log, place.is_none())
    }

    /// Where the log ends.
    pub fn place(&self) -> Place {
        Place { epoch: self.epoch, crc: self.crc, at_bytes: self.tail, lsn: self.next_lsn }
    }

    /// The first place whose entry is kept.
    pub fn first_place(&self) -> Option<Place> {
        self.shared.first_place(self.place())
    }

    /// Of every session with records in slots from this one on, the number of the first of them.
    pub fn first_numbers_from(&self, lsn: Lsn) -> BTreeMap<ClientId, u64> {
        let (end, mut numbers) = (self.place(), BTreeMap::new());
        let mut next = self.shared.place_before(lsn, end).or_else(|| self.first_place());
        while let Some(place) = next.filter(|place| place.at_bytes < end.at_bytes) {
            let Some((header, behind)) = self.shared.entry(place) else { break };
            if header.kind == EntryKind::Record && header.lsn >= lsn {
                numbers.entry(header.client).or_insert(header.seq);
            }
            next = Some(behind);
        }
        numbers
    }

    /// Whether an entry begins at this place and is kept, or the log ends there.
    pub fn has_place(&self, place: Place) -> bool {
        let found = self.shared.place_before(place.lsn, self.place());
        found.is_some_and(|found| Place { epoch: found.epoch, ..place } == found)
    }

    /// A reader for another thread.
    pub fn reader(&self) -> LogReader {
        LogReader::new(self.shared.clone())
    }

    /// The region, to be registered with a transport.
    pub fn region(&self) -> &Arc<Region> {
        &self.shared.region
    }

    /// End of the last entry, in absolute bytes.
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// First offset kept, in absolute bytes.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// The slot after the last entry.
    pub fn next_lsn(&self) -> Lsn {
        self.next_lsn
    }

    /// Whether a full region is freed as entries are confirmed, so that waiting helps.
    pub fn recycles(&self) -> bool {
        self.retention == Retention::Recycle
    }

    /// Tells which entries are bound and so may be dropped, how far the region may be overwritten for the backups' and the
    /// disk's sake, and how far the log is on disk: what is not stays in memory (`u64::MAX`: there is none).
    pub fn set_limits(&mut self, committed: Lsn, drained: u64, written: u64) {
        (self.committed, self.drained, self.written) = (committed, drained, written);
    }

    /// Bytes kept free beyond records: for no-ops in a full log, and as the distance that lets readers finish with an
    /// entry after it was dropped.
    fn reserve_bytes(&self) -> u64 {
        self.shared.len() / 32
    }

    /// First offset that the region cannot take now.
    fn limit(&self) -> u64 {
        self.head.min(self.drained).saturating_add(self.shared.len())
    }

    /// Makes room for a record of `length` bytes, with the reserve left over.
    pub fn make_room(&mut self, length: usize) -> Result<(), LogFull> {
        let needed = (span_bytes(length) + span_bytes(self.record_bytes_max)) as u64 + self.reserve_bytes();
        while self.tail + needed > self.limit() {
            if self.retention == Retention::Refuse || !self.drop_block(self.tail + needed) {
                return Err(LogFull);
            }
        }
        Ok(())
    }

    /// Drops the oldest block of entries, if all of them are bound.
    fn drop_block(&mut self, needed: u64) -> bool {
        if needed > self.drained.saturating_add(self.shared.len()) {
            return false;
        }
        let Some((at, lsn)) = self.shared.index.next_block_entry(self.head + 1, self.tail) else { return false };
        let bound = lsn <= self.committed.0 || planted(Mutant::RecycleUnbound);
        if !bound || at > self.written {
            return false;
        }
        self.head = at;
        self.shared.head.store(at, Ordering::Release);
        true
    }

    /// Writes a record; [`make_room`](Self::make_room) was called for it.
    pub fn record(&mut self, client: ClientId, seq: u64, record: &[u8]) {
        let header = EntryHeader {
            kind: EntryKind::Record,
            shard: self.shard,
            length: record.len() as u32,
            lsn: self.next_lsn,
            count: 1,
            epoch: self.epoch,
            client,
            seq,
            crc: 0,
        };
        self.write(header, record);
    }

    /// Writes `count` no-ops. Panics when even the reserve is used up: see "A full region" in DESIGN.md.
    pub fn no_ops(&mut self, count: u32) {
        self.empty(EntryKind::NoOps, count);
    }

    /// Writes that `count` slots are lost: they were bound, and no replica has them.
    pub fn lost(&mut self, count: u32) {
        self.empty(EntryKind::Lost, count);
    }

    fn empty(&mut self, kind: EntryKind, count: u32) {
        let header = EntryHeader {
            kind,
            shard: self.shard,
            length: 0,
            lsn: self.next_lsn,
            count,
            epoch: self.epoch,
            client: ClientId(0),
            seq: 0,
            crc: 0,
        };
        self.write(header, &[]);
    }

    /// Whether the reserve still holds an entry of no-ops.
    pub fn has_room_for_no_ops(&mut self) -> bool {
        if self.retention == Retention::Recycle {
            let _ = self.make_room(0);
        }
        // A cycle may write a few.
        self.tail + 64 * (HEADER_BYTES as u64) <= self.limit()
    }

    fn write(&mut self, header: EntryHeader, payload: &[u8]) {
        let span = header.span_bytes();
        let to_end = self.shared.region.len() - self.shared.place(self.tail);
        if span > to_end {
            let pad = EntryHeader {
                kind: EntryKind::Pad,
                length: (to_end - HEADER_BYTES) as u32,
                count: 0,
                client: ClientId(0),
                seq: 0,
                ..header
            };
            self.put(pad, &[], to_end);
        }
        let count = u64::from(header.count);
        self.put(header, payload, span);
        self.next_lsn = self.next_lsn.plus(count);
        self.shared.tail.store(self.tail, Ordering::Release);
    }

    /// Writes one entry at the tail and moves the tail by `span`.
    fn put(&mut self, header: EntryHeader, payload: &[u8], span: usize) {
        assert!(self.tail + span as u64 <= self.limit(), "shard {}'s log region overflows", self.shard);
        let mut bytes = header.encode();
        let crc = crc32c(self.crc, &[&bytes[..CRC_OFFSET], payload]);
        bytes[CRC_OFFSET..].copy_from_slice(&crc.to_le_bytes());
        let at = self.shared.place(self.tail);
        self.shared.region.put(at, &bytes);
        self.shared.region.put(at + HEADER_BYTES, payload);
        self.shared.index.note(self.tail, header.lsn.0, self.crc);
        self.crc = crc;
        self.tail += span as u64;
    }
}
