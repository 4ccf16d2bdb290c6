//! A replica's log on disk: opened before the replica begins, written behind what it appends or verifies, and cut whenever
//! its log is.
//!
//! Beside the log, the directory remembers whose log it is a copy of (the epoch of the primary that it was last made to
//! conform to) and which lives of the replica it keeps everything of that they ever counted as durable. See "A replica's
//! disk" in DESIGN.md.

use antelog_protocol::duplicates::Duplicates;
use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::shard::ShardConfig;
use antelog_protocol::wire::entry::{EntryHeader, EntryKind, HEADER_BYTES};
use antelog_protocol::wire::node::Place;
use antelog_protocol::{ClientId, Lsn};

use super::catch_up::chunk_bytes;
use crate::log::{LogWriter, Verifier};
use crate::node::Waker;
use crate::node::agent::leave;
use crate::node::mailbox::{MailSender, Mailbox, mailbox};
pub(super) use crate::storage::entry_bytes;
use crate::storage::{
    AFTER_DAMAGE, Condition, Damage, Disk, Keep, LogStore, Mark, OldEntries, OldEntriesPolled, OldEntriesThread, Owner,
    Reader, Request, Rot, Store, StoreConfig, StoreError, Verify,
};

/// Segments are a quarter of the region, at most this many bytes.
const SEGMENT_BYTES_MAX: u64 = 64 << 20;
/// Lives that are remembered: as often may a replica start before the order log hears of it.
const LIVES_MAX: usize = 32;
/// Sessions that are remembered of what is dropped from disk; the newest count.
const SESSIONS_MAX: usize = 100;
/// How often it is looked whether something may be dropped from disk, in nanoseconds.
const DROP_EVERY_NS: u64 = 1_000_000_000;
/// Bytes read at a time when an old log is gone through.
const SCAN_BYTES: usize = 1 << 20;

/// What a replica's disk is opened with.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// The cluster's name.
    pub cluster: String,
    /// A slot counts as durable when it is flushed to every member's disk, not when it is in every member's memory.
    pub flushed: bool,
    /// How much is kept.
    pub keep: Keep,
    /// Largest record in bytes.
    pub record_bytes_max: usize,
    /// Unix time, in milliseconds, when the clock of duty cycles was 0.
    pub unix_ms: u64,
    /// Who looks for old entries.
    pub readers: Readers,
}

/// Who looks for entries that have left memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// A thread for each of the two that ask, because looking for a cold entry may read a segment.
    Threads,
    /// Those who ask, when they are called: threads are nothing for the simulator.
    Polled,
}

impl Readers {
    /// `answers_bytes` bounds what waits in front of whoever asks, which `waker` wakes. What is rotten is told to
    /// `rot` by threads only.
    fn begin<D: Disk + Send + 'static>(
        self,
        name: &str,
        reader: Reader<D>,
        answers_bytes: usize,
        waker: Waker,
        rot: Option<MailSender<Rot>>,
    ) -> std::io::Result<Box<dyn OldEntries>> {
        Ok(match self {
            Readers::Threads => Box::new(OldEntriesThread::spawn(name, reader, answers_bytes, waker, rot)?),
            Readers::Polled => Box::new(OldEntriesPolled::new(reader, waker)),
        })
    }
}

/// What a replica is given of its disk.
#[derive(Debug)]
pub struct DiskParts {
    /// The log on disk.
    pub store: Box<dyn Store>,
    /// See [`DiskOptions::flushed`].
    pub flushed: bool,
    /// See [`DiskOptions::keep`].
    pub keep: Keep,
    pub(super) memory: Memory,
    pub(super) past: Past,
    pub(super) old: Box<dyn OldEntries>,
    /// What both readers have found to be rotten.
    pub(super) rot: Option<Mailbox<Rot>>,
}

/// What the directory remembers beside the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    /// The log is a copy of what the primary of this epoch wrote, as far as it goes.
    pub(super) epoch: u32,
    /// Lives of this replica of which everything is here that they counted as durable; the newest is the present one.
    pub(super) lives: Vec<u64>,
    /// Sessions of records that are not on disk any more: next number and last slot, for a log that begins at this slot.
    pub(super) sessions: Vec<(ClientId, u64, Lsn)>,
    pub(super) sessions_from: Lsn,
}

/// What is known of the entries that are on disk and not in memory any more.
#[derive(Debug)]
pub(super) struct Past {
    /// The sessions of its records.
    pub(super) duplicates: Duplicates,
    /// Records in it.
    pub(super) records: u64,
    /// First slot after the last of them.
    pub(super) records_lsn: Lsn,
    /// Some of its slots are lost.
    pub(super) has_gaps: bool,
}

impl Past {
    pub(super) fn new(config: &ShardConfig) -> Past {
        let duplicates = Duplicates::new(config.sessions_max, config.session_remembered);
        Past { duplicates, records: 0, records_lsn: Lsn(0), has_gaps: false }
    }

    /// What a primary that gives back what is not bound, from a slot on, knows of the rest: the log may hold more of its
    /// sessions than memory does.
    pub(super) fn of(
        config: &ShardConfig,
        log: &LogWriter,
        bound: Lsn,
        sessions: impl Iterator<Item = (ClientId, u64, Lsn)>,
    ) -> Past {
        let mut past = Past::new(config);
        let unbound = log.first_numbers_from(bound);
        for (client, next_seq, last_lsn) in sessions {
            let next_seq = unbound.get(&client).map_or(next_seq, |seq| next_seq.min(*seq));
            if next_seq > 0 {
                past.duplicates.restore(client, next_seq, last_lsn.min(Lsn(bound.0.saturating_sub(1))));
            }
        }
        past
    }

    /// Takes in the next entry.
    pub(super) fn learn(&mut self, header: &EntryHeader) {
        match header.kind {
            EntryKind::Record => {
                self.duplicates.replay(header.client, header.seq, header.lsn);
                self.records += 1;
                self.records_lsn = header.lsn.plus(1);
            }
            EntryKind::Lost => self.has_gaps = true,
            EntryKind::NoOps | EntryKind::Pad => {}
        }
    }
}

/// Whole entries as a reader gives them, one after the other, with where each lies.
pub(crate) fn entries(bytes: &[u8]) -> impl Iterator<Item = (usize, EntryHeader)> + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        let header = EntryHeader::decode(bytes.get(at..at + HEADER_BYTES)?.try_into().ok()?).ok()?;
        let found = (at, header);
        at += entry_bytes(&header);
        Some(found)
    })
}

impl Memory {
    fn encode(&self) -> Vec<u8> {
        let head = [u64::from(self.epoch), self.sessions_from.0, self.lives.len() as u64];
        let sessions = self
            .sessions
            .iter()
            .flat_map(|(client, next_seq, last_lsn)| [client.0 as u64, (client.0 >> 64) as u64, *next_seq, last_lsn.0]);
        head.into_iter().chain(self.lives.iter().copied()).chain(sessions).flat_map(u64::to_le_bytes).collect()
    }

    fn decode(note: &[u8]) -> Memory {
        let words = note.chunks_exact(8).filter_map(|word| word.try_into().ok().map(u64::from_le_bytes));
        let words: Vec<u64> = words.collect();
        let [epoch, from, lives, rest @ ..] = &words[..] else { return Memory::default() };
        let (lives, sessions) = rest.split_at(rest.len().min(*lives as usize));
        let session =
            |words: &[u64]| (ClientId(u128::from(words[0]) | u128::from(words[1]) << 64), words[2], Lsn(words[3]));
        Memory {
            epoch: u32::try_from(*epoch).unwrap_or(0),
            lives: lives.to_vec(),
            sessions: sessions.chunks_exact(4).map(session).collect(),
            sessions_from: Lsn(*from),
        }
    }

    /// Remembers the sessions that have written nothing since this slot.
    fn note_sessions(&mut self, table: impl Iterator<Item = (ClientId, u64, Lsn)>, before: Lsn) {
        self.sessions = table.filter(|(.., last_lsn)| *last_lsn < before).collect();
        self.sessions.sort_unstable_by_key(|(.., last_lsn)| std::cmp::Reverse(*last_lsn));
        self.sessions.truncate(SESSIONS_MAX);
    }
}

/// How a disk is found at the start of a replica.
#[derive(Debug)]
pub struct Opened {
    /// The replica's share of it.
    pub parts: DiskParts,
    /// Its gate's.
    pub old: Box<dyn OldEntries>,
    /// One line for the operator when something was found that was not so before.
    pub notice: Option<String>,
}

/// Opens the log in a directory and takes it up: `log`, empty until now, holds the newest of it afterwards. Waits for the
/// disk.
/// `waker` wakes the replica's thread, `gate_waker` that of the gate: both read old entries.
///
/// # Errors
/// One line: the directory is another's, or damaged, or cannot be used.
pub fn open<D: Disk + Send + 'static>(
    disk: D,
    log: &mut Verifier,
    config: &ShardConfig,
    options: &DiskOptions,
    waker: Waker,
    gate_waker: Waker,
) -> Result<Opened, String> {
    let region = log.region().clone();
    let (own, lap_bytes) = (config.replica, region.len() as u64);
    let segment_bytes = (lap_bytes / 4).min(SEGMENT_BYTES_MAX);
    let owner = Owner { cluster: options.cluster.clone(), shard: config.shard, replica: own.number };
    let store_config = StoreConfig {
        owner,
        incarnation: own.incarnation,
        segment_bytes,
        verify: Verify::Newest,
        damage: Damage::Refuse,
        unix_ms: options.unix_ms,
    };
    let text = |error: StoreError| error.to_string();
    let (mut store, found) = LogStore::open(disk, &store_config, region).map_err(text)?;
    let place = store.disk().place();
    let lost_bytes = if planted(Mutant::ForgetTheBaseOffset) { found.in_region.at / lap_bytes * lap_bytes } else { 0 };
    let begins = Mark { at: found.in_region.at - lost_bytes, ..found.in_region };
    if !log.resume(begins.into(), found.end.at - lost_bytes) {
        return Err(format!("{place}: the log's newest entries are not as they were verified: {AFTER_DAMAGE}"));
    }
    let mut memory = Memory::decode(&store.identity().note);
    // What counted was in memory, of which a sudden end may have lost the newest.
    let keeps = options.flushed || found.clean;
    let notice = (!keeps && found.end.at > 0).then(|| {
        format!(
            "{place}: the last end was a sudden one, and with durability 'replicated' the newest records may be lost"
        )
    });
    if !keeps {
        memory.lives.clear();
    }
    let excess = (memory.lives.len() + 1).saturating_sub(LIVES_MAX);
    memory.lives.drain(..excess);
    memory.lives.push(own.incarnation);
    store.save_now(&memory.encode()).map_err(text)?;
    let cannot = |error: std::io::Error| format!("{place}: cannot read old entries: {error}");
    let buffer_bytes = 2 * (options.record_bytes_max + 2 * HEADER_BYTES) + SCAN_BYTES;
    let mut reader = store.reader(buffer_bytes).map_err(cannot)?;
    let mut past = Past::new(config);
    for (client, next_seq, last_lsn) in memory.sessions.iter().rev() {
        past.duplicates.restore(*client, *next_seq, *last_lsn);
    }
    let until = found.in_region.lsn;
    scan(&mut reader, &mut past, found.first, until).map_err(|why| format!("{place}: {why}: {AFTER_DAMAGE}"))?;
    let answers_bytes = (4 * buffer_bytes).next_power_of_two();
    let (rot_mail, rot) = mailbox(waker.clone());
    let mail = Some(rot_mail);
    let for_gate =
        options.readers.begin("antelog-reader", reader, answers_bytes, gate_waker, mail.clone()).map_err(cannot)?;
    let chunk_bytes = chunk_bytes(options.record_bytes_max);
    let reader = store.reader(2 * chunk_bytes).map_err(cannot)?;
    let answers_bytes = (4 * chunk_bytes).next_power_of_two();
    let old = options.readers.begin("antelog-giver", reader, answers_bytes, waker, mail).map_err(cannot)?;
    let (flushed, keep) = (options.flushed, options.keep);
    let parts = DiskParts { store: Box::new(store), flushed, keep, memory, past, old, rot: Some(rot) };
    Ok(Opened { parts, old: for_gate, notice })
}

/// Goes through the entries between two places of a log on disk. Waits for the disk.
fn scan<D: Disk>(reader: &mut Reader<D>, past: &mut Past, from: Mark, until: Lsn) -> Result<(), String> {
    let mut lsn = from.lsn;
    while lsn < until {
        reader.request(0, Request::Entries { lsn, bytes_max: SCAN_BYTES });
        let (_, read) = loop {
            match reader.poll() {
                Some(answer) => break answer,
                None => reader.wait(),
            }
        };
        let answer = read.map_err(|error| error.to_string())?;
        let mut bytes = Vec::new();
        reader.buffer().append_to(answer.offset, answer.len, &mut bytes);
        for (_, header) in entries(&bytes).filter(|(_, header)| header.lsn < until) {
            past.learn(&header);
            lsn = lsn.max(header.lsn.plus(header.count.into()));
        }
    }
    Ok(())
}

/// The disk of a replica at work.
#[derive(Debug)]
pub(super) struct OwnDisk {
    /// For the one line of a replica that leaves.
    name: String,
    pub(super) store: Box<dyn Store>,
    pub(super) flushed: bool,
    keep: Keep,
    reserve_bytes: u64,
    drop_at_ns: u64,
    memory: Memory,
}

impl OwnDisk {
    pub(super) fn new(name: &str, parts: DiskParts) -> (OwnDisk, Past, Box<dyn OldEntries>) {
        let DiskParts { store, flushed, keep, memory, past, old, rot: _ } = parts;
        // A record is at most half a segment.
        let segment_bytes = store.identity().layout.segment_bytes;
        let reserve_bytes = segment_bytes / 2 + segment_bytes / 16;
        (OwnDisk { name: name.into(), store, flushed, keep, reserve_bytes, drop_at_ns: 0, memory }, past, old)
    }

    /// Whose log it is a copy of: see [`Memory::epoch`].
    pub(super) fn epoch(&self) -> u32 {
        self.memory.epoch
    }

    /// Whether everything is here that this life of the replica counted as durable.
    pub(super) fn keeps(&self, incarnation: u64) -> bool {
        self.memory.lives.contains(&incarnation)
    }

    /// What the disk cannot do ends the replica: what it holds is not known any more.
    fn done<T>(&self, result: Result<T, StoreError>) -> T {
        result.unwrap_or_else(|error| leave(format!("{}: {error}: this replica leaves", self.name)))
    }

    /// Writes behind what the log has; returns the work done.
    #[inline]
    pub(super) fn write_behind(&mut self, now_ns: u64, end: Place) -> usize {
        let end = Mark::from(end);
        if end.at > self.store.requested().at {
            self.store.write_up_to(end);
            if self.flushed {
                self.store.flush();
            }
        }
        let result = self.store.poll(now_ns);
        self.done(result)
    }

    /// Nothing of the region is being written: it may be changed.
    pub(super) fn quiesce(&mut self) {
        self.store.wait_for_writes();
    }

    /// The log ends at `end` now and goes on as a copy of what the primary of `epoch` writes: the disk follows before
    /// anybody is told. `anew`: nothing of what was is kept.
    pub(super) fn conform(&mut self, end: Place, anew: bool, epoch: u32, own: u64) {
        (self.memory.epoch, self.memory.lives) = (epoch, vec![own]);
        if anew {
            (self.memory.sessions, self.memory.sessions_from) = (Vec::new(), Lsn(0));
        }
        self.remember();
        self.cut(end, anew);
    }

    /// The log ends at `end` now.
    pub(super) fn cut(&mut self, end: Place, anew: bool) {
        let end = Mark::from(end);
        let result = if anew {
            self.store.start_over(end)
        } else if end.at < self.store.requested().at {
            self.store.truncate_to(end)
        } else {
            Ok(())
        };
        self.done(result);
    }

    /// It is the primary of this epoch whose log this is.
    pub(super) fn lead(&mut self, epoch: u32) {
        self.memory.epoch = epoch;
        self.remember();
    }

    fn remember(&mut self) {
        let result = self.store.save_now(&self.memory.encode());
        self.done(result);
    }

    /// Up to which offset there is room for records on a full disk; 0 when it is not full. Some is left for no-ops.
    pub(super) fn room(&self) -> u64 {
        if self.store.condition() == Condition::Full {
            let room_end = self.store.room_end();
            (room_end - self.reserve_bytes.min(room_end)).max(1)
        } else {
            0
        }
    }

    /// Whether to look for what may be dropped now.
    pub(super) fn is_time_to_drop(&mut self, now_ns: u64) -> bool {
        let due = now_ns >= self.drop_at_ns;
        if due {
            self.drop_at_ns = now_ns + DROP_EVERY_NS;
        }
        due
    }

    /// Drops what the rules let go, of what lies below `allowed`, a place up to which everything is bound. The sessions of
    /// what is dropped are remembered first, and so are those of what was never here.
    /// `trimmed`: the first slot that is to be kept in any case.
    pub(super) fn drop_old(&mut self, trimmed: Lsn, allowed: Place, table: impl Iterator<Item = (ClientId, u64, Lsn)>) {
        let first = self.store.first();
        let asked_for = self.store.trim_before(trimmed).min(allowed.at_bytes);
        let to = self.store.trim_by(&self.keep, allowed.at_bytes).max(asked_for);
        if to <= first.at && first.lsn == self.memory.sessions_from {
            return;
        }
        self.memory.note_sessions(table, allowed.lsn);
        self.memory.sessions_from = first.lsn;
        match self.store.save_now(&self.memory.encode()) {
            // There will be room when something is dropped.
            Err(StoreError::Full { .. }) => {}
            result => self.done(result),
        }
        if to > first.at {
            self.store.trim(to);
        }
    }

    /// The replica ends in an orderly way: everything up to `end` is kept.
    pub(super) fn finish(&mut self, end: Place) -> Result<(), StoreError> {
        let end = Mark::from(end);
        if end.at > self.store.requested().at {
            self.store.write_up_to(end);
        }
        self.store.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::NOTE_BYTES_MAX;

    #[test]
    fn what_a_directory_remembers_comes_back() {
        let mut memory = Memory { epoch: 7, lives: vec![1, u64::MAX], sessions_from: Lsn(9), ..Memory::default() };
        let table = (0..3u64).map(|n| (ClientId(u128::from(n) << 64 | 5), n + 1, Lsn(10 * n)));
        memory.note_sessions(table, Lsn(20));
        assert_eq!(
            memory.sessions,
            [(ClientId(1 << 64 | 5), 2, Lsn(10)), (ClientId(5), 1, Lsn(0))],
            "the newest first"
        );
        assert_eq!(Memory::decode(&memory.encode()), memory);
        assert_eq!(Memory::decode(&[]), Memory::default());
        memory.lives = vec![0; LIVES_MAX];
        memory.note_sessions((0..9999u64).map(|n| (ClientId(1), 1, Lsn(n))), Lsn(20_000));
        assert!(memory.encode().len() <= NOTE_BYTES_MAX);
    }
}
