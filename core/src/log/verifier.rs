//! A log as a backup follows it: every entry checked before it counts, and the log's end found again when a primary is lost.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::wire::DecodeError;
use antelog_protocol::wire::entry::{CRC_OFFSET, EntryHeader, EntryKind, HEADER_BYTES};
use antelog_protocol::wire::node::Place;
use antelog_protocol::{Lsn, ShardId};

use super::{LogReader, Shared};
use crate::crc::crc32c;
use crate::mem::Region;

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

/// Follows the chain of entries in a backup's region, checking each; readers see what is checked.
#[derive(Debug)]
pub struct Verifier {
    shared: Arc<Shared>,
    shard: ShardId,
    at: u64,
    lsn: Lsn,
    crc: u32,
    epoch: u32,
}

impl Verifier {
    /// A verifier at the start of an empty log.
    pub fn new(region: Arc<Region>, shard: ShardId) -> Verifier {
        Verifier { shared: Shared::new(region), shard, at: 0, lsn: Lsn(0), crc: 0, epoch: 0 }
    }

    pub(super) fn with(shared: Arc<Shared>, shard: ShardId, place: Place) -> Verifier {
        let Place { epoch, crc, at_bytes, lsn } = place;
        Verifier { shared, shard, at: at_bytes, lsn, crc, epoch }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The shard whose log it is.
    pub fn shard(&self) -> ShardId {
        self.shard
    }

    /// A reader for another thread.
    pub fn reader(&self) -> LogReader {
        LogReader::new(self.shared.clone())
    }

    /// The region, to be registered with a transport.
    pub fn region(&self) -> &Arc<Region> {
        &self.shared.region
    }

    /// Everything below this offset, in absolute bytes, is verified.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Everything below this slot is verified.
    pub fn lsn(&self) -> Lsn {
        self.lsn
    }

    /// Where the verified log ends.
    pub fn place(&self) -> Place {
        Place { epoch: self.epoch, crc: self.crc, at_bytes: self.at, lsn: self.lsn }
    }

    /// First offset kept, in absolute bytes.
    pub fn head(&self) -> u64 {
        self.shared.head()
    }

    /// Begins a log at this place: nothing before it is kept. No reader may be at work.
    pub fn restart(&mut self, place: Place) {
        // Nobody finds anything until the new log stands.
        self.shared.head.store(u64::MAX, Ordering::Release);
        self.shared.index.clear();
        self.shared.begins.store(place.lsn.0, Ordering::Release);
        self.shared.tail.store(place.at_bytes, Ordering::Release);
        self.shared.head.store(place.at_bytes, Ordering::Release);
        (self.at, self.lsn, self.crc, self.epoch) = (place.at_bytes, place.lsn, place.crc, place.epoch);
        self.cut();
    }

    /// Takes up a log whose entries from `begins` to `end` (absolute bytes) are in the region already, as they were read
    /// from disk. False when they are not a chain that ends there.
    pub fn resume(&mut self, begins: Place, end: u64) -> bool {
        self.shared.index.clear();
        self.shared.begins.store(begins.lsn.0, Ordering::Release);
        self.shared.tail.store(begins.at_bytes, Ordering::Release);
        self.shared.head.store(begins.at_bytes, Ordering::Release);
        (self.at, self.lsn, self.crc, self.epoch) = (begins.at_bytes, begins.lsn, begins.crc, begins.epoch);
        while self.at < end && self.step(end) == Ok(true) {}
        self.at == end
    }

    /// Ends the chain here: entries that were given back continue it, and must not be found again.
    fn cut(&self) {
        if self.at != self.head() + self.shared.len() {
            self.shared.region.put(self.shared.place(self.at), &[0; HEADER_BYTES]);
        }
    }

    /// Gives back what lies behind this place, where an entry of the verified log ends. Nobody writes to it any more.
    pub fn rewind(&mut self, place: Place) {
        assert!(place.at_bytes <= self.at && place.at_bytes >= self.head(), "a log ends where it has an entry");
        // The whole chain, verified or not: whose log has some of it writes that again, and the rest must not follow it.
        self.find_end();
        let mut next = place;
        while let Some((_, behind)) = self.entry(next) {
            self.shared.region.put(self.shared.place(next.at_bytes), &[0; HEADER_BYTES]);
            next = behind;
        }
        self.shared.index.forget_from(place.at_bytes);
        // Nothing may be left of it: then it begins here.
        self.shared.begins.store(place.lsn.0, Ordering::Release);
        self.shared.tail.store(place.at_bytes, Ordering::Release);
        (self.at, self.lsn, self.crc, self.epoch) = (place.at_bytes, place.lsn, place.crc, place.epoch);
        self.cut();
    }

    /// Drops what lies before this place of the log: it may be overwritten.
    pub fn drop_before(&mut self, place: Place) {
        if place.at_bytes > self.head() {
            // At the log's end it is where the next entry will begin.
            self.shared.index.begin_at(place.at_bytes, place.lsn.0, place.crc);
            self.shared.begins.store(place.lsn.0, Ordering::Release);
            self.shared.head.store(place.at_bytes, Ordering::Release);
        }
    }

    /// The entry at a place of the verified log and the place behind it. `None` at the log's end.
    pub fn entry(&self, place: Place) -> Option<(EntryHeader, Place)> {
        if place.at_bytes >= self.at { None } else { self.shared.entry(place) }
    }

    /// The first place whose entry is kept.
    pub fn first_place(&self) -> Option<Place> {
        self.shared.first_place(self.place())
    }

    /// The place behind the last entry of which all slots are below `lsn`, if what is kept goes back that far.
    pub fn place_before(&self, lsn: Lsn) -> Option<Place> {
        self.shared.place_before(lsn, self.place())
    }

    /// Verifies to the end of the chain, wherever that is: nobody writes any more. Bytes that do not continue it are no
    /// part of the log.
    pub fn find_end(&mut self) {
        while self.step(u64::MAX) == Ok(true) {}
    }

    /// Verifies the next entry, which ends at or before `written`. False when there is none.
    ///
    /// # Errors
    /// When the bytes do not continue the chain; nothing moves then.
    pub fn step(&mut self, written: u64) -> Result<bool, VerifyError> {
        if planted(Mutant::TakeShapesForEntries) {
            return Ok(self.step_by_shape());
        }
        if written - self.at < HEADER_BYTES as u64 {
            return Ok(false);
        }
        let place = self.shared.place(self.at);
        let mut bytes = [0; HEADER_BYTES];
        self.shared.region.get(place, &mut bytes);
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
        if place + span > self.shared.region.len() || span as u64 > written - self.at {
            return Err(VerifyError::Length);
        }
        let mut crc = crc32c(self.crc, &[&bytes[..CRC_OFFSET]]);
        if header.kind == EntryKind::Record {
            crc = self.shared.region.crc32c(place + HEADER_BYTES, header.length as usize, crc);
        }
        if crc != header.crc && !planted(Mutant::UnchainedEntries) {
            return Err(VerifyError::Crc);
        }
        self.shared.index.note(self.at, header.lsn.0, self.crc);
        self.at += span as u64;
        self.lsn = self.lsn.plus(header.count.into());
        (self.crc, self.epoch) = (header.crc, header.epoch);
        self.shared.tail.store(self.at, Ordering::Release);
        Ok(true)
    }

    /// What a verifier does that believes headers: [`Mutant::TakeShapesForEntries`].
    fn step_by_shape(&mut self) -> bool {
        let place = self.shared.place(self.at);
        let mut bytes = [0; HEADER_BYTES];
        self.shared.region.get(place, &mut bytes);
        let shaped = EntryHeader::decode(&bytes).ok().filter(|header| header.shard == self.shard);
        let Some(header) = shaped else { return false };
        let pad = header.kind == EntryKind::Pad;
        self.at += if pad { HEADER_BYTES + header.length as usize } else { header.span_bytes() } as u64;
        self.lsn = self.lsn.plus(header.count.into());
        true
    }
}
