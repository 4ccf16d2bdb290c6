//! A log that remembers every byte it ever had, and what is common to the tests.

use std::sync::Arc;

use antelog_protocol::wire::entry::{CRC_OFFSET, EntryHeader, EntryKind, HEADER_BYTES, span_bytes};
use antelog_protocol::{ClientId, Lsn, ShardId};

use crate::crc::crc32c;
use crate::mem::Region;
use crate::sim::rng::Rng;
use crate::storage::*;

pub(super) const REGION_BYTES: usize = 256 << 10;
pub(super) const SEGMENT_BYTES: u64 = 64 << 10;
pub(super) const SHARD: ShardId = ShardId(3);

pub(super) fn config() -> StoreConfig {
    StoreConfig {
        owner: Owner { cluster: "test".into(), shard: SHARD, replica: 1 },
        incarnation: 7,
        segment_bytes: SEGMENT_BYTES,
        verify: Verify::Newest,
        damage: Damage::Refuse,
        unix_ms: 1_000_000,
    }
}

/// Appends entries to a region as a primary does, and keeps them all.
pub(super) struct Scribe {
    pub(super) region: Arc<Region>,
    pub(super) end: Mark,
    /// Places between entries, ascending; the last is the end.
    pub(super) marks: Vec<Mark>,
    /// The log's bytes from offset `base` on.
    pub(super) bytes: Vec<u8>,
    pub(super) base: u64,
    pub(super) epoch: u32,
    numbers: u64,
}

impl Scribe {
    pub(super) fn new() -> Scribe {
        Scribe::at(Mark::default())
    }

    pub(super) fn at(begins: Mark) -> Scribe {
        let region = Region::new(REGION_BYTES).unwrap();
        let epoch = begins.epoch.max(1);
        Scribe { region, end: begins, marks: vec![begins], bytes: Vec::new(), base: begins.at, epoch, numbers: 0 }
    }

    /// A record of this many bytes, with a pad before it if need be.
    pub(super) fn record(&mut self, length: usize) {
        self.numbers += 1;
        let payload: Vec<u8> = (0..length).map(|n| (n as u64 * 31 + self.numbers * 7) as u8).collect();
        self.put(EntryKind::Record, 1, &payload);
    }

    pub(super) fn no_ops(&mut self, count: u32) {
        self.put(EntryKind::NoOps, count, &[]);
    }

    fn put(&mut self, kind: EntryKind, count: u32, payload: &[u8]) {
        let to_end = REGION_BYTES - (self.end.at % REGION_BYTES as u64) as usize;
        let span = span_bytes(payload.len());
        if span > to_end {
            self.entry(EntryKind::Pad, 0, (to_end - HEADER_BYTES) as u32, &[], to_end);
        }
        self.entry(kind, count, payload.len() as u32, payload, span);
    }

    fn entry(&mut self, kind: EntryKind, count: u32, length: u32, payload: &[u8], span: usize) {
        let is_record = kind == EntryKind::Record;
        let client = ClientId(if is_record { 5 } else { 0 });
        let seq = if is_record { self.numbers } else { 0 };
        let (lsn, epoch) = (self.end.lsn, self.epoch);
        let header = EntryHeader { kind, shard: SHARD, length, lsn, count, epoch, client, seq, crc: 0 };
        let mut bytes = header.encode();
        let crc = crc32c(self.end.crc, &[&bytes[..CRC_OFFSET], payload]);
        bytes[CRC_OFFSET..].copy_from_slice(&crc.to_le_bytes());
        let place = (self.end.at % REGION_BYTES as u64) as usize;
        self.region.put(place, &bytes);
        self.region.put(place + HEADER_BYTES, payload);
        self.region.append_to(place, span, &mut self.bytes);
        self.end = Mark { at: self.end.at + span as u64, lsn: self.end.lsn.plus(count.into()), crc, epoch };
        self.marks.push(self.end);
    }

    /// One entry of any kind and size that this much room takes; false when it takes none.
    pub(super) fn anything(&mut self, rng: &mut Rng, room: u64) -> bool {
        let length = match rng.below(10) {
            0..6 => rng.below(300),
            6..9 => rng.below(6000),
            _ => rng.below(30_000),
        };
        // Twice, for a pad before it.
        if room < 2 * span_bytes(length as usize) as u64 {
            return false;
        }
        if rng.percent(15) {
            self.no_ops(rng.range(1, 1000) as u32)
        } else {
            self.record(length as usize)
        }
        true
    }

    /// Goes on from `mark`, one of its own.
    pub(super) fn cut(&mut self, mark: &Mark) {
        assert!(self.marks.contains(mark), "{mark:?} is no place between two entries");
        self.marks.retain(|m| m.at <= mark.at);
        self.bytes.truncate((mark.at - self.base) as usize);
        self.end = *mark;
    }

    pub(super) fn slice(&self, from: u64, to: u64) -> &[u8] {
        &self.bytes[(from - self.base) as usize..(to - self.base) as usize]
    }

    /// Asserts that a region holds the entries between two marks.
    pub(super) fn assert_region(&self, region: &Region, from: u64, to: u64) {
        for pair in self.marks.windows(2).filter(|pair| pair[0].at >= from && pair[1].at <= to) {
            let mut found = Vec::new();

            region.append_to(
                (pair[0].at % REGION_BYTES as u64) as usize,
                (pair[1].at - pair[0].at) as usize,
                &mut found,
            );
            assert!(covered(&found) == covered(self.slice(pair[0].at, pair[1].at)), "the entry at {pair:?} differs");
        }
    }

    /// Asserts that a region holds these bytes of the log, down to those between entries.
    pub(super) fn assert_bytes(&self, region: &Region, from: u64, to: u64) {
        let mut at = from;
        while at < to {
            let place = (at % REGION_BYTES as u64) as usize;
            let len = ((to - at) as usize).min(REGION_BYTES - place);
            let mut found = vec![0; len];
            region.get(place, &mut found);
            assert!(
                found == self.slice(at, at + len as u64),
                "the region differs between {at} and {}",
                at + len as u64
            );
            at += len as u64;
        }
    }

    /// The last mark at or before an offset.
    pub(super) fn before_at(&self, at: u64) -> Mark {
        self.marks[self.marks.partition_point(|m| m.at <= at) - 1]
    }

    /// The mark before the entry that holds a slot.
    pub(super) fn before(&self, lsn: Lsn) -> Mark {
        let at = self.marks.partition_point(|m| m.lsn <= lsn);
        // Of marks with the same slot the last is behind a pad.
        self.marks[at - 1]
    }
}

/// The bytes of some entries with those made zero that no CRC covers: a torn write may change them unnoticed.
pub(super) fn covered(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let header = EntryHeader::decode(bytes[at..at + HEADER_BYTES].try_into().unwrap()).unwrap();
        let is_pad = header.kind == EntryKind::Pad;
        let length = header.length as usize;
        let (kept, span) = if is_pad { (0, HEADER_BYTES + length) } else { (length, header.span_bytes()) };
        // The bytes that a pad skips may be cut.
        let end = (at + span).min(bytes.len());
        bytes[at + HEADER_BYTES + kept..end].fill(0);
        at += span;
    }
    bytes
}

/// Reads something, waiting for it.
pub(super) fn read<D: Disk>(reader: &mut Reader<D>, request: Request) -> Result<(Mark, Vec<u8>), ReadError> {
    assert!(reader.request(9, request));
    loop {
        if let Some((token, answer)) = reader.poll() {
            assert_eq!(token, 9);
            return answer.map(|answer| {
                let mut bytes = Vec::new();
                reader.buffer().append_to(answer.offset, answer.len, &mut bytes);
                (answer.begins, bytes)
            });
        }
        reader.wait();
    }
}

/// Reads the whole log by slots and asserts every byte.
pub(super) fn assert_readable<D: Disk>(reader: &mut Reader<D>, scribe: &Scribe, first: Mark, end: Mark) {
    let mut at = first;
    while at.lsn < end.lsn {
        let (begins, bytes) = read(reader, Request::Entries { lsn: at.lsn, bytes_max: 20_000 }).unwrap();
        assert_eq!(begins, scribe.before(at.lsn));
        let expected = scribe.slice(begins.at, begins.at + bytes.len() as u64);
        assert!(covered(&bytes) == covered(expected), "the entries from {} differ", begins.at);
        let to = begins.at + bytes.len() as u64;
        // The bytes that a pad skips may be cut.
        let next = scribe.marks[scribe.marks.partition_point(|m| m.at <= to) - 1];
        assert!(next.at > begins.at && next.lsn > at.lsn, "at least one entry at a time");
        at = next;
    }
}
