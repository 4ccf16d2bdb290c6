//! What a member keeps across a restart: its identity, the newest snapshot, the entries behind it, term and vote.
//!
//! A journal is a sequence of records, each with its length and CRC; the first that is not whole ends it. That is right
//! for a tail torn by a crash, of which nothing was promised. It is noticed if more is gone: the newest commit index
//! that was kept must lie within the entries that are left.
//!
//! * [`FileJournal`] — a journal in a folder, written by a thread of its own.

mod file;

use std::fmt::Debug;

use antelog_protocol::wire::DecodeError;
use raft::eraftpb::{Entry, HardState, Snapshot};

pub use self::file::FileJournal;
use super::wire::{Bytes, SNAPSHOT_BYTES_MAX, put_conf, put_entry, take_conf, take_entry};
use crate::crc::crc32c;

/// What is kept first: other formats are refused.
const FORMAT: u64 = 1;
const HEAD_BYTES: usize = 9;

const IDENTITY: u8 = 1;
const SNAPSHOT: u8 = 2;
const ENTRY: u8 = 3;
const HARD: u8 = 4;
const LIFE: u8 = 5;
const CLEAN: u8 = 6;

/// What Raft hands over to be kept, in this order.
#[derive(Debug)]
pub struct Record<'a> {
    /// Replaces everything before, unless empty.
    pub snapshot: &'a Snapshot,
    /// Appended; they replace those with the same and later indices.
    pub entries: &'a [Entry],
    /// Term, vote and commit index.
    pub hard: Option<&'a HardState>,
}

/// Where records go. Nothing here blocks.
pub trait Journal: Debug {
    /// Takes a record, which has this number.
    fn append(&mut self, number: u64, record: &Record<'_>);

    /// Takes a record that stands for all before it, which need not be kept any longer.
    fn replace(&mut self, number: u64, record: &Record<'_>);

    /// The newest number up to which everything is kept.
    ///
    /// # Errors
    /// When something cannot be kept: the member must stop.
    fn kept(&mut self, now_ns: u64) -> Result<u64, String>;

    /// Whether it has grown so much that it is to be replaced.
    fn is_long(&self) -> bool;

    /// Whether nothing more is kept until a full disk has room again.
    fn is_full(&self) -> bool {
        false
    }

    /// When [`kept`](Self::kept) will have something to say, if that is known beforehand.
    fn deadline_ns(&self) -> Option<u64>;

    /// The member ends in an orderly way: what it handed over is kept when this returns.
    fn close(&mut self);
}

/// What a journal held.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recovered {
    /// The member's identity; 0: none.
    pub id: u64,
    /// The newest snapshot.
    pub snapshot: Snapshot,
    /// The entries behind it.
    pub entries: Vec<Entry>,
    /// Term, vote and commit index.
    pub hard: HardState,
    /// In which life of the machine it was written, and whether its writer ended in an orderly way.
    pub life: u128,
    /// See [`life`](Self::life).
    pub clean: bool,
}

fn put(out: &mut Vec<u8>, kind: u8, payload: impl FnOnce(&mut Vec<u8>)) {
    let at = out.len();
    out.extend_from_slice(&[0; HEAD_BYTES - 1]);
    out.push(kind);
    payload(out);
    let len = out.len() - at - HEAD_BYTES;
    out[at..at + 4].copy_from_slice(&(len as u32).to_le_bytes());
    let crc = crc32c(0, &[&out[at..at + 4], &out[at + HEAD_BYTES - 1..]]);
    out[at + 4..at + 8].copy_from_slice(&crc.to_le_bytes());
}

fn words(out: &mut Vec<u8>, words: &[u64]) {
    words.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
}

/// Writes whose journal it is: first in every file.
pub fn put_identity(out: &mut Vec<u8>, id: u64) {
    put(out, IDENTITY, |out| words(out, &[FORMAT, id]));
}

/// Writes in which life of the machine what follows is written.
pub fn put_life(out: &mut Vec<u8>, life: u128) {
    put(out, LIFE, |out| out.extend_from_slice(&life.to_le_bytes()));
}

/// Writes that the writer ended in an orderly way.
pub fn put_clean(out: &mut Vec<u8>) {
    put(out, CLEAN, |_| {});
}

/// Writes a record.
pub fn put_record(out: &mut Vec<u8>, record: &Record<'_>) {
    if !record.snapshot.is_empty() {
        put(out, SNAPSHOT, |out| {
            let meta = record.snapshot.get_metadata();
            words(out, &[meta.index, meta.term]);
            put_conf(out, meta.get_conf_state());
            out.extend_from_slice(&record.snapshot.data);
        });
    }
    record.entries.iter().for_each(|entry| put(out, ENTRY, |out| put_entry(out, entry)));
    if let Some(hard) = record.hard {
        put(out, HARD, |out| words(out, &[hard.term, hard.vote, hard.commit]));
    }
}

impl Recovered {
    /// Reads a journal as far as it is whole; with how many bytes that is.
    ///
    /// # Errors
    /// When it is of another format, or more is gone than a torn tail.
    pub fn read(bytes: &[u8]) -> Result<(Recovered, usize), String> {
        let mut recovered = Recovered::default();
        let mut rest = Bytes(bytes);
        loop {
            let before = bytes.len() - rest.0.len();
            let Some((kind, payload)) = next(&mut rest) else {
                recovered.check()?;
                return Ok((recovered, before));
            };
            let at = |error: DecodeError| format!("the record at byte {before} is none: {error}");
            recovered.take(kind, payload).map_err(at)?;
        }
    }

    fn take(&mut self, kind: u8, payload: &[u8]) -> Result<(), DecodeError> {
        let mut r = Bytes(payload);
        self.clean = false;
        match kind {
            IDENTITY => {
                if r.number(8)? != FORMAT {
                    return Err(DecodeError::Value("format"));
                }
                self.id = r.number(8)?;
            }
            SNAPSHOT => {
                let (index, term) = (r.number(8)?, r.number(8)?);
                let conf = take_conf(&mut r)?;
                self.snapshot.data = r.take(r.0.len())?.to_vec().into();
                let meta = self.snapshot.mut_metadata();
                (meta.index, meta.term) = (index, term);
                meta.set_conf_state(conf);
                self.entries.clear();
            }
            ENTRY => {
                let entry = take_entry(&mut r)?;
                let first = self.snapshot.get_metadata().index + 1;
                let Some(at) = entry.index.checked_sub(first).map(|at| at as usize) else {
                    return Err(DecodeError::Value("index"));
                };
                if at > self.entries.len() {
                    return Err(DecodeError::Value("index"));
                }
                self.entries.truncate(at);
                self.entries.push(entry);
            }
            HARD => {
                (self.hard.term, self.hard.vote, self.hard.commit) = (r.number(8)?, r.number(8)?, r.number(8)?);
            }
            LIFE => self.life = u128::from(r.number(8)?) | u128::from(r.number(8)?) << 64,
            CLEAN => self.clean = true,
            tag => return Err(DecodeError::Tag(tag)),
        }
        r.finish()
    }

    /// Whether the member had any part in a group.
    pub fn is_blank(&self) -> bool {
        self.hard.term == 0 && self.snapshot.is_empty()
    }

    fn check(&self) -> Result<(), String> {
        let last = self.snapshot.get_metadata().index + self.entries.len() as u64;
        if self.hard.commit > last {
            return Err(format!(
                "it ends at entry {last}, but entry {} was committed: the file is damaged; delete the folder to have \
                 this member join as a new one",
                self.hard.commit
            ));
        }
        Ok(())
    }
}

/// The next whole record.
fn next<'a>(r: &mut Bytes<'a>) -> Option<(u8, &'a [u8])> {
    let head = r.take(HEAD_BYTES).ok()?;
    let len = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
    let crc = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
    if len > SNAPSHOT_BYTES_MAX + 4096 {
        return None;
    }
    let payload = r.take(len).ok()?;
    (crc32c(0, &[&head[..4], &head[HEAD_BYTES - 1..], payload]) == crc).then_some((head[HEAD_BYTES - 1], payload))
}

#[cfg(test)]
mod tests {
    use raft::eraftpb::ConfState;

    use super::*;

    fn entry(index: u64, term: u64, data: &'static [u8]) -> Entry {
        Entry { index, term, data: data.into(), ..Entry::default() }
    }

    fn snapshot(index: u64) -> Snapshot {
        let mut snapshot = Snapshot { data: b"state"[..].into(), ..Snapshot::default() };
        let meta = snapshot.mut_metadata();
        (meta.index, meta.term) = (index, 1);
        meta.set_conf_state(ConfState { voters: vec![7, 8, 9], ..ConfState::default() });
        snapshot
    }

    fn journal() -> Vec<u8> {
        let mut out = Vec::new();
        put_identity(&mut out, 7);
        let (none, hard) =
            (Snapshot::default(), |commit| HardState { term: 2, vote: 8, commit, ..HardState::default() });
        put_record(&mut out, &Record { snapshot: &snapshot(1), entries: &[], hard: None });
        let entries = [entry(2, 1, b"a"), entry(3, 1, b"b"), entry(4, 1, b"c")];
        put_record(&mut out, &Record { snapshot: &none, entries: &entries, hard: Some(&hard(2)) });
        // Another leader's entries replace two of them.
        put_record(&mut out, &Record { snapshot: &none, entries: &[entry(3, 2, b"d")], hard: Some(&hard(3)) });
        out
    }

    #[test]
    fn what_was_kept_comes_back() {
        let bytes = journal();
        let (read, len) = Recovered::read(&bytes).unwrap();
        assert_eq!((read.id, len), (7, bytes.len()));
        assert_eq!((&read.snapshot, &read.entries[..]), (&snapshot(1), &[entry(2, 1, b"a"), entry(3, 2, b"d")][..]));
        assert_eq!((read.hard.term, read.hard.vote, read.hard.commit), (2, 8, 3));
        assert!(Recovered::read(&[]).unwrap().0.is_blank());
    }

    #[test]
    fn a_torn_tail_is_cut_and_more_than_that_is_noticed() {
        let bytes = journal();
        let whole: Vec<usize> =
            (0..=bytes.len()).filter(|end| Recovered::read(&bytes[..*end]).is_ok_and(|(_, len)| len == *end)).collect();
        assert_eq!(whole.len(), 9, "eight records, and nothing before the first");
        for end in 0..bytes.len() {
            let before = *whole.iter().rfind(|w| **w <= end).unwrap();
            assert_eq!(Recovered::read(&bytes[..end]).unwrap().1, before);
            let mut flipped = bytes.clone();
            flipped[end] ^= 1;
            assert_eq!(Recovered::read(&flipped).unwrap().1, *whole.iter().rfind(|w| **w <= end).unwrap());
        }
        let mut out = Vec::new();
        put_identity(&mut out, 7);
        let hard = HardState { term: 2, commit: 9, ..HardState::default() };
        put_record(&mut out, &Record { snapshot: &snapshot(5), entries: &[], hard: Some(&hard) });
        assert!(Recovered::read(&out).unwrap_err().contains("entry 9 was committed"));
    }
}
