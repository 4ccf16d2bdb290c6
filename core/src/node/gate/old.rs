//! Entries of a shard's log that have left memory, as the gate's streams and reads ask for them.
//!
//! A disk answers in its own time: whoever asks gets a token, goes on with something else, and looks again when the gate was
//! woken. What nobody takes is dropped, and asked for again if somebody wants it after all.

use std::collections::VecDeque;

use antelog_protocol::Lsn;
use antelog_protocol::wire::entry::{EntryHeader, EntryKind, HEADER_BYTES};

use crate::node::replica::disk::entries;
use crate::storage::{OldEntries, OldRead, ReadError, Request};

/// Answers that wait to be taken, at most.
const READY_MAX: usize = 64;
/// Bytes asked for at a time by a stream.
const STREAM_BYTES: usize = 256 << 10;

/// A shard's old entries, shared by all clients of a gate.
#[derive(Debug)]
pub struct OldLog {
    entries: Box<dyn OldEntries>,
    next: u64,
    waiting: Vec<u64>,
    ready: VecDeque<(u64, OldRead)>,
}

/// What has become of a question.
#[derive(Debug)]
pub(super) enum Taken {
    Waiting,
    /// Nobody took the answer in time.
    Gone,
    Ready(OldRead),
}

impl OldLog {
    /// The old entries behind a reader.
    pub fn new(entries: Box<dyn OldEntries>) -> OldLog {
        OldLog { entries, next: 0, waiting: Vec::new(), ready: VecDeque::new() }
    }

    /// First slot kept on disk.
    pub(super) fn first(&self) -> Lsn {
        self.entries.first().lsn
    }

    /// Takes in what was answered; returns how much.
    pub(super) fn poll(&mut self) -> usize {
        let mut count = 0;
        while let Some((token, read)) = self.entries.poll() {
            self.waiting.retain(|waiting| *waiting != token);
            if self.ready.len() == READY_MAX {
                self.ready.pop_front();
            }
            self.ready.push_back((token, read));
            count += 1;
        }
        count
    }

    /// Whether [`poll`](Self::poll) has something to do.
    pub(super) fn waits(&mut self) -> bool {
        self.entries.waits()
    }

    /// Asks for the entries from a slot on: the token, unless too much is asked for already.
    fn ask(&mut self, lsn: Lsn, bytes_max: usize) -> Option<u64> {
        let token = self.next;
        self.entries.request(token, Request::Entries { lsn, bytes_max }).ok()?;
        self.next += 1;
        self.waiting.push(token);
        Some(token)
    }

    fn take(&mut self, token: u64) -> Taken {
        if self.waiting.contains(&token) {
            return Taken::Waiting;
        }
        match self.ready.iter().position(|(ready, _)| *ready == token) {
            Some(at) => self.ready.remove(at).map_or(Taken::Gone, |(_, read)| Taken::Ready(read)),
            None => Taken::Gone,
        }
    }
}

/// An old slot.
#[derive(Debug)]
pub(super) enum Old<'a> {
    Record(EntryHeader, &'a [u8]),
    NoOps(u64),
    Lost(u64),
    /// The disk has not answered yet, or has no time for another question.
    Waits,
    /// It is in memory still, or was a moment ago: look again.
    Again,
    /// It is kept no more.
    Trimmed,
    /// The disk does not hold it, or cannot be read.
    Failed(ReadError),
}

/// One reader's place in the old entries of a log.
#[derive(Debug, Default)]
pub(super) struct OldCursor {
    asked: Option<u64>,
    /// Whole entries, and where the next one is.
    bytes: Vec<u8>,
    at: usize,
}

impl OldCursor {
    /// What is at a slot, which is not in memory; a stream reads on from there.
    pub(super) fn next(&mut self, log: &mut OldLog, lsn: Lsn) -> Old<'_> {
        self.look(log, lsn, STREAM_BYTES)
    }

    /// What is at a slot, which is not in memory.
    pub(super) fn only(&mut self, log: &mut OldLog, lsn: Lsn) -> Old<'_> {
        self.look(log, lsn, 1)
    }

    /// Whether the slot is among what was read already.
    pub(super) fn holds(&mut self, lsn: Lsn) -> bool {
        self.seek(lsn).is_some()
    }

    /// What was read is used up, or not wanted any more.
    pub(super) fn forget(&mut self) {
        (self.bytes, self.at) = (Vec::new(), 0);
    }

    fn look(&mut self, log: &mut OldLog, lsn: Lsn, bytes_max: usize) -> Old<'_> {
        if !self.holds(lsn)
            && let Some(other) = self.fetch(log, lsn, bytes_max)
        {
            return other;
        }
        let Some(header) = self.seek(lsn) else { return Old::Again };
        let end = header.lsn.plus(header.count.into());
        match header.kind {
            EntryKind::Record => {
                let from = self.at + HEADER_BYTES;
                Old::Record(header, &self.bytes[from..from + header.length as usize])
            }
            EntryKind::Lost => Old::Lost(end.0 - lsn.0),
            EntryKind::NoOps | EntryKind::Pad => Old::NoOps(end.0 - lsn.0),
        }
    }

    /// Moves to the entry that holds a slot, if it was read.
    fn seek(&mut self, lsn: Lsn) -> Option<EntryHeader> {
        let from = self.at;
        let mut found = entries(&self.bytes[from..]).skip_while(|(_, h)| h.lsn.plus(h.count.into()) <= lsn);
        let (at, header) = found.next()?;
        self.at = from + at;
        let whole = header.kind != EntryKind::Record || self.at + header.span_bytes() <= self.bytes.len();
        (header.lsn <= lsn && whole).then_some(header)
    }

    /// Asks for a slot, or takes the answer: `None` when it has come.
    fn fetch(&mut self, log: &mut OldLog, lsn: Lsn, bytes_max: usize) -> Option<Old<'static>> {
        self.forget();
        let taken = self.asked.map_or(Taken::Gone, |token| log.take(token));
        match taken {
            Taken::Waiting => return Some(Old::Waits),
            Taken::Gone => {
                self.asked = log.ask(lsn, bytes_max);
                return Some(Old::Waits);
            }
            Taken::Ready(read) => {
                self.asked = None;
                match read {
                    Ok((_, bytes)) => self.bytes = bytes,
                    Err(ReadError::Trimmed { .. }) => return Some(Old::Trimmed),
                    Err(ReadError::Beyond { .. }) => return Some(Old::Again),
                    Err(error) => return Some(Old::Failed(error)),
                }
            }
        }
        None
    }
}
