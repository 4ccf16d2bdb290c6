//! What a shard's log holds, as the oracle reads it from the regions of its members: its own parser of log entries, and
//! one memory of every slot that was bound or delivered. Who holds the log may change; what was read once stays true.
//!
//! Entries are read when a cut binds them or somebody is handed them, long before they can be dropped, from the primary
//! that the order log names, and must then stand on every member of the newest committed membership. Only what a shard had
//! not bound when it was lost is forgotten, and remembered as lost.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Violation;
use super::members::{Life, Members};
use crate::log::LogReader;
use crate::mem::Region;
use crate::sim::process::Birth;
use crate::storage::{BLOCK_BYTES, Name, SimDisk};

const HEADER_BYTES: u64 = 64;
const PAD: u8 = 3;

/// An entry that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) lsn: u64,
    pub(super) count: u64,
    pub(super) record: Option<u32>,
    /// Offset in absolute bytes.
    at: u64,
}

/// What stands in a region next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) lsn: u64,
    pub(super) count: u64,
    /// Session and number of a record.
    pub(super) record: Option<(u128, u64)>,
    epoch: u64,
    at: u64,
    end: u64,
    len: usize,
}

/// The memory of one life of a replica.
#[derive(Debug)]
struct Held {
    region: Arc<Region>,
    reader: LogReader,
    /// Its disk, and how often whoever used it had died when this life began.
    disk: Option<(SimDisk, u64)>,
    /// Entries up to here were compared with it.
    compared: usize,
}

/// Where a life's entries are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    Memory,
    Disk,
}

impl Held {
    /// The entry in memory at an offset; `None` when there is none of this shard.
    fn parse(&self, shard: u16, at: u64) -> Option<(u8, Found)> {
        self.parse_in(From::Memory, shard, at)
    }

    /// The log's bytes at an offset.
    fn get(&self, from: From, at: u64, into: &mut [u8]) {
        let lap_bytes = self.region.len() as u64;
        match (&self.disk, from) {
            (Some((disk, _)), From::Disk) => {
                // As replicas choose it: DESIGN.md, "Segments on disk".
                let segment_bytes = lap_bytes / 4;
                let mut done = 0;
                while done < into.len() {
                    let now = at + done as u64;
                    let start = now - now % segment_bytes;
                    let len = (into.len() - done).min((start + segment_bytes - now) as usize);
                    let part = &mut into[done..done + len];
                    disk.peek(Name::Segment(start), BLOCK_BYTES as u64 + now - start, part);
                    done += len;
                }
            }
            _ => self.region.get((at % lap_bytes) as usize, into),
        }
    }

    /// The process of this life is gone: what its disk holds is no more what it held.
    fn is_over(&self) -> bool {
        self.disk.as_ref().is_some_and(|(disk, deaths)| disk.deaths() != *deaths)
    }

    fn parse_in(&self, from: From, shard: u16, at: u64) -> Option<(u8, Found)> {
        let place = (at % self.region.len() as u64) as usize;
        let mut header = [0; HEADER_BYTES as usize];
        self.get(from, at, &mut header);
        let number = |at: usize, count: usize| {
            header[at..at + count].iter().rev().fold(0u128, |sum, byte| sum << 8 | u128::from(*byte))
        };
        let (kind, length) = (header[0], number(4, 4) as u64);
        if number(2, 2) != u128::from(shard) || !(1..=PAD).contains(&kind) {
            return None;
        }
        let payload = if kind == PAD { length } else { length.next_multiple_of(HEADER_BYTES) };
        let fits = place as u64 + HEADER_BYTES + payload <= self.region.len() as u64;
        let found = Found {
            lsn: number(8, 8) as u64,
            count: number(16, 4) as u64,
            record: (kind == 1).then(|| (number(24, 16), number(40, 8) as u64)),
            epoch: number(20, 4) as u64,
            at,
            end: at + HEADER_BYTES + payload,
            len: length as usize,
        };
        fits.then_some((kind, found))
    }

    /// The next entry with slots from an offset on.
    fn next(&self, shard: u16, at: u64, lsn: u64) -> Option<Found> {
        let (kind, found) = self.parse(shard, at)?;
        if kind != PAD {
            return (found.lsn == lsn && found.count > 0).then_some(found);
        }
        let (kind, found) = self.parse(shard, found.end).filter(|_| found.lsn == lsn)?;
        (kind != PAD && found.lsn == lsn && found.count > 0).then_some(found)
    }

    /// Where the entry of a slot stands that was written since an epoch: a lost shard goes on anywhere in its region.
    fn search(&self, shard: u16, lsn: u64, epoch: u64) -> Option<u64> {
        let is_it = |at: &u64| {
            let found = self.parse(shard, *at).filter(|(kind, _)| *kind != PAD);
            found.is_some_and(|(_, f)| f.lsn == lsn && f.epoch >= epoch && f.count > 0)
        };
        // Absolute offsets, from where its memory begins.
        let head = self.reader.first().map_or(0, |first| first.at);
        (head..head + self.region.len() as u64).step_by(HEADER_BYTES as usize).find(is_it)
    }

    fn bytes(&self, from: From, found: &Found, into: &mut Vec<u8>) {
        into.resize(found.len, 0);
        self.get(from, found.at + HEADER_BYTES, into);
    }

    /// First slot that it keeps.
    fn head(&self) -> u64 {
        loop {
            if let Ok(first) = self.reader.first() {
                return first.lsn.0;
            }
        }
    }
}

/// One shard's slots and the replicas that hold them.
#[derive(Debug)]
pub(super) struct ShardTruth {
    shard: u16,
    lives: BTreeMap<Life, Held>,
    pub(super) members: Members,
    entries: Vec<Entry>,
    /// Where the next entry stands, and its slot. `None`: anywhere, because the shard was lost in between.
    at: Option<u64>,
    pub(super) lsn: u64,
    /// Slots below are bound.
    pub(super) bound: u64,
    /// What the shard had delivered and not bound whenever it was lost.
    lost: Vec<Entry>,
    /// The epoch in which the shard began, or returned when it was lost last.
    returned: u64,
    /// What the primaries so far have dropped: slots below may stand nowhere.
    keeps: u64,
    /// Some replica that led had not everything that is bound: slots below were lost with the whole shard.
    pub(super) unavailable_below: u64,
    scratch: Vec<u8>,
}

/// How a record's bytes are recognised: whether they are those of this record.
pub(super) trait Recognise {
    /// The record at a slot that is read for the first time.
    fn find(&mut self, session: u128, seq: u64, lsn: u64, bytes: &[u8]) -> Result<u32, Violation>;
    /// Which record this may be, if any.
    fn guess(&self, session: u128, seq: u64, bytes: &[u8]) -> Option<u32>;
    /// Whether these are a known record's bytes.
    fn is(&self, record: u32, session: u128, seq: u64, bytes: &[u8]) -> bool;
}

impl ShardTruth {
    pub(super) fn new(shard: u16) -> ShardTruth {
        ShardTruth {
            shard,
            lives: BTreeMap::new(),
            members: Members::default(),
            entries: Vec::new(),
            at: Some(0),
            lsn: 0,
            bound: 0,
            lost: Vec::new(),
            returned: 0,
            keeps: 0,
            unavailable_below: 0,
            scratch: Vec::new(),
        }
    }

    /// A replica begins a life.
    pub(super) fn born(&mut self, birth: Birth) {
        let Birth { life, region, reader, disk, .. } = birth;
        let disk = disk.map(|disk| {
            let deaths = disk.deaths();
            (disk, deaths)
        });
        self.lives.insert(life, Held { region, reader, disk, compared: 0 });
    }

    /// Laps of the region that were read.
    pub(super) fn laps(&self) -> u64 {
        let region_bytes = self.lives.values().next().map_or(u64::MAX, |held| held.region.len() as u64);
        self.entries.last().map_or(0, |entry| entry.at) / region_bytes
    }

    /// The entry that holds a slot, which was read.
    pub(super) fn entry(&self, lsn: u64) -> Option<Entry> {
        find(&self.entries, lsn)
    }

    /// A slot's record, if it was delivered before its shard was lost.
    pub(super) fn lost_records(&self, lsn: u64) -> impl Iterator<Item = u32> + '_ {
        self.lost.iter().filter(move |e| e.lsn == lsn).filter_map(|e| e.record)
    }

    /// The first slot with a record from `from` on, below `to`.
    pub(super) fn record_between(&self, from: u64, to: u64) -> Option<u64> {
        let first = self.entries.partition_point(|entry| entry.lsn + entry.count <= from);
        let below = self.entries[first..].iter().take_while(|entry| entry.lsn < to);
        below.filter(|entry| entry.record.is_some()).map(|entry| entry.lsn).next()
    }

    /// Reads the log up to a slot and compares every member's with it. `why` says what asks for it.
    pub(super) fn advance(&mut self, to: u64, why: &str, known: &mut impl Recognise) -> Result<(), Violation> {
        let shard = self.shard;
        let missing = |lsn: u64, life: Life| {
            let (number, incarnation) = life;
            let what = format!(
                "slot {lsn} of shard {shard} is {why} and does not stand in the region of member {number} \
                 (incarnation {incarnation})"
            );
            Err(Violation::new("I11", what))
        };
        if self.lsn < to {
            let Some(leads) = self.members.first() else {
                let what = format!("slot {} of shard {shard} is {why} and nobody holds the shard's log", self.lsn);
                return Err(Violation::new("I14", what));
            };
            let Some(held) = self.lives.get(&leads) else { return missing(self.lsn, leads) };
            while self.lsn < to {
                let at = self.at.or_else(|| held.search(shard, self.lsn, self.returned));
                let Some(found) = at.and_then(|at| held.next(shard, at, self.lsn)) else {
                    return missing(self.lsn, leads);
                };
                let mut record = None;
                if let Some((session, seq)) = found.record {
                    held.bytes(From::Memory, &found, &mut self.scratch);
                    record = Some(known.find(session, seq, found.lsn, &self.scratch)?);
                }
                self.entries.push(Entry { lsn: found.lsn, count: found.count, record, at: found.at });
                self.at = Some(found.end);
                self.lsn += found.count;
            }
        }
        self.compare(known, missing)
    }

    fn compare(
        &mut self,
        known: &impl Recognise,
        missing: impl Fn(u64, Life) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        for life in &self.members.lives {
            let Some(held) = self.lives.get_mut(life) else { continue };
            while let Some(entry) = self.entries.get(held.compared) {
                if !stands(held, (self.shard, self.bound), entry, known, &mut self.scratch) {
                    return missing(entry.lsn, *life);
                }
                held.compared += 1;
            }
        }
        Ok(())
    }

    /// I4: every member holds everything that is known of the log and that its primary keeps.
    pub(super) fn verify(&mut self, keeps: u64, known: &impl Recognise) -> Result<(), Violation> {
        let first = self.entries.partition_point(|e| e.lsn < keeps.max(self.unavailable_below));
        for life in &self.members.lives {
            let Some(held) = self.lives.get_mut(life) else {
                return Err(Violation::new("I4", format!("a member of shard {} never lived: {life:?}", self.shard)));
            };
            for entry in &self.entries[first..] {
                if !stands(held, (self.shard, self.bound), entry, known, &mut self.scratch) {
                    let what = format!(
                        "slot {} of shard {} was bound or delivered, and replica {} (incarnation {}), a member, does not \
                         hold it",
                        entry.lsn, self.shard, life.0, life.1
                    );
                    return Err(Violation::new("I4", what));
                }
            }
            held.compared = self.entries.len();
        }
        Ok(())
    }

    /// First slot that the primary keeps.
    pub(super) fn primary_keeps(&mut self) -> u64 {
        // Nothing is dropped from disk.
        let in_memory = |held: &&Held| held.disk.is_none();
        let leads = self.members.first().and_then(|life| self.lives.get(&life));
        let head = leads.filter(in_memory).map_or(0, Held::head);
        // One that was promoted just now does not know yet what its predecessor dropped.
        self.keeps = self.keeps.max(head);
        self.keeps
    }

    /// Other members by the order log.
    pub(super) fn on_members(
        &mut self,
        members: &Members,
        committed: u64,
        known: &impl Recognise,
    ) -> Result<(), Violation> {
        let returns = self.members.has_failed();
        // What the last primary dropped nobody has to hold.
        let keeps = self.primary_keeps();
        self.members = members.clone();
        if returns {
            self.returned = members.epoch;
            self.return_with_less(committed, known);
        }
        let verified = self.verify(keeps, known);
        // Other lives than the members' and the present ones are of no use any more.
        let newest: BTreeMap<u16, u64> = self.lives.keys().copied().collect();
        let lives = &self.members.lives;
        self.lives.retain(|life, _| lives.contains(life) || newest.get(&life.0) == Some(&life.1));
        verified
    }

    /// A lost shard returns: whoever leads it need not hold what was bound, and then nobody does.
    fn return_with_less(&mut self, committed: u64, known: &impl Recognise) {
        let Some(held) = self.members.first().and_then(|life| self.lives.get(&life)) else { return };
        let (shard, scratch) = (self.shard, &mut self.scratch);
        // What was only placed there, for a replica that had not caught up, is no part of its log.
        let end = held.reader.end();
        let is_kept = |e: &&Entry| e.at < end && stands(held, (shard, 0), e, known, scratch);
        let kept = self.entries.iter().rev().take_while(is_kept).count();
        let first = self.entries.len() - kept;
        self.unavailable_below = self.entries.get(first).map_or(committed, |e| e.lsn);
    }

    /// The shard is lost: what is not bound is void, but may have been delivered. Returns its records.
    pub(super) fn on_failed(&mut self, members: &Members, lsn: u64, known: &impl Recognise) -> Vec<u32> {
        // Everything that was delivered stood on every member; whoever holds most says what.
        let mut most: Vec<Entry> = Vec::new();
        for held in self.members.lives.iter().filter_map(|life| self.lives.get(life)) {
            let at = self.at.or_else(|| held.search(self.shard, self.lsn, self.returned));
            let (mut at, mut next, mut tail) = (at, self.lsn, Vec::new());
            while let Some(found) = at.and_then(|at| held.next(self.shard, at, next)) {
                let mut record = None;
                if let Some((session, seq)) = found.record {
                    held.bytes(From::Memory, &found, &mut self.scratch);
                    record = known.guess(session, seq, &self.scratch);
                }
                tail.push(Entry { lsn: found.lsn, count: found.count, record, at: found.at });
                (at, next) = (Some(found.end), next + found.count);
            }
            if tail.len() > most.len() {
                most = tail;
            }
        }
        self.members = members.clone();
        let first = self.entries.partition_point(|e| e.lsn < lsn);
        let void: Vec<Entry> = self.entries.drain(first..).collect();
        let records = void.iter().filter_map(|e| e.record).collect();
        if let Some(last) = self.entries.last_mut() {
            last.count = last.count.min(lsn - last.lsn);
        }
        self.lost.extend(void.into_iter().chain(most));
        (self.at, self.lsn) = (None, lsn);
        self.lives.values_mut().for_each(|held| held.compared = held.compared.min(first));
        records
    }
}

fn find(entries: &[Entry], lsn: u64) -> Option<Entry> {
    let after = entries.partition_point(|entry| entry.lsn <= lsn);
    let entry = *entries[..after].last()?;
    (lsn < entry.lsn + entry.count).then_some(entry)
}

/// Whether an entry stands in a region, or on the disk behind it. Below `bound` slots are bound.
fn stands(
    held: &Held,
    (shard, bound): (u16, u64),
    entry: &Entry,
    known: &impl Recognise,
    scratch: &mut Vec<u8>,
) -> bool {
    if stands_in(From::Memory, held, shard, entry, known, scratch) {
        return true;
    }
    match &held.disk {
        None => false,
        // Of who is dead only the memory is as it was, and that needs hold only what is not bound.
        Some(_) if held.is_over() => entry.lsn < bound,
        Some(_) => stands_in(From::Disk, held, shard, entry, known, scratch),
    }
}

fn stands_in(
    from: From,
    held: &Held,
    shard: u16,
    entry: &Entry,
    known: &impl Recognise,
    scratch: &mut Vec<u8>,
) -> bool {
    let Some((kind, found)) = held.parse_in(from, shard, entry.at) else { return false };
    // An entry of no-ops that a lost shard had bound in part is shorter now.
    let same = kind != PAD && found.lsn == entry.lsn && found.count >= entry.count;
    same && match (found.record, entry.record) {
        (None, None) => true,
        (Some((session, seq)), Some(record)) => {
            held.bytes(from, &found, scratch);
            known.is(record, session, seq, scratch)
        }
        _ => false,
    }
}
