//! A simulated disk under the journal of a sequencer's member: a flush takes a drawn time, and a crash keeps a prefix of
//! what is on its way, the last record torn anywhere.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use super::rng::Rng;
use crate::node::group::journal::{Journal, Record, Recovered, put_identity, put_record};

/// Bytes after which a journal is replaced: few, so that it happens.
const LONG_BYTES: usize = 16 << 10;

/// What is on its way to the disk.
#[derive(Debug)]
struct Pending {
    number: u64,
    /// The flush that keeps it begins and ends.
    begin_ns: u64,
    due_ns: u64,
    bytes: Vec<u8>,
    replaces: bool,
}

/// The disk, which outlives its member.
#[derive(Debug)]
pub(crate) struct SimDisk {
    kept: Vec<u8>,
    pending: VecDeque<Pending>,
    rng: Rng,
    /// Longest time that a flush takes, in nanoseconds.
    most_ns: u64,
    /// Nothing is kept until it has room again.
    pub(crate) full: bool,
}

/// A member's journal on it.
#[derive(Debug)]
pub(crate) struct SimJournal {
    disk: Rc<RefCell<SimDisk>>,
    id: u64,
    /// Records count when they are kept; otherwise at once.
    flushed: bool,
    now_ns: u64,
    handed: u64,
    told: u64,
    bytes: usize,
}

impl SimDisk {
    /// An empty disk.
    pub(crate) fn new(rng: Rng, most_ns: u64) -> Rc<RefCell<SimDisk>> {
        Rc::new(RefCell::new(SimDisk { kept: Vec::new(), pending: VecDeque::new(), rng, most_ns, full: false }))
    }

    /// The machine stops: of what is on its way a prefix is kept, torn at the end.
    pub(crate) fn crash(&mut self) {
        while let Some(pending) = self.pending.pop_front() {
            if self.rng.percent(50) {
                self.keep(&pending);
                continue;
            }
            if !pending.replaces {
                let torn = self.rng.below(pending.bytes.len() as u64 + 1) as usize;
                self.kept.extend_from_slice(&pending.bytes[..torn]);
            }
            break;
        }
        self.pending.clear();
    }

    /// The process stops: the kernel keeps what it was given.
    pub(crate) fn finish(&mut self) {
        while let Some(pending) = self.pending.pop_front() {
            self.keep(&pending);
        }
    }

    /// Everything is gone.
    pub(crate) fn erase(&mut self) {
        self.pending.clear();
        self.kept.clear();
    }

    fn keep(&mut self, pending: &Pending) {
        if pending.replaces {
            self.kept.clear();
        }
        self.kept.extend_from_slice(&pending.bytes);
    }

    /// A member starts, with this identity if the disk knows none: its journal, and what was kept.
    pub(crate) fn open(disk: &Rc<RefCell<SimDisk>>, id: u64, flushed: bool) -> (SimJournal, Recovered) {
        let mut state = disk.borrow_mut();
        let read = Recovered::read(&state.kept);
        let (recovered, whole) = read.unwrap_or_else(|error| panic!("a simulated disk lost more than it may: {error}"));
        state.kept.truncate(whole);
        let id = if recovered.id == 0 { id } else { recovered.id };
        if recovered.id == 0 {
            put_identity(&mut state.kept, id);
        }
        let bytes = state.kept.len();
        let journal = SimJournal { disk: disk.clone(), id, flushed, now_ns: 0, handed: 0, told: 0, bytes };
        (journal, recovered)
    }
}

impl SimJournal {
    fn hand_over(&mut self, number: u64, bytes: Vec<u8>, replaces: bool) {
        self.handed = number;
        let mut disk = self.disk.borrow_mut();
        // What comes while a flush is under way is kept by the next one, all of it together.
        let last = disk.pending.back().map(|p| (p.begin_ns, p.due_ns)).filter(|(_, due_ns)| *due_ns > self.now_ns);
        let (begin_ns, due_ns) = match last {
            Some((begin_ns, due_ns)) if begin_ns > self.now_ns => (begin_ns, due_ns),
            _ => {
                let begin_ns = last.map_or(self.now_ns, |(_, due_ns)| due_ns);
                let most_ns = disk.most_ns;
                (begin_ns, begin_ns + disk.rng.below(most_ns + 1))
            }
        };
        disk.pending.push_back(Pending { number, begin_ns, due_ns, bytes, replaces });
    }
}

impl Journal for SimJournal {
    fn append(&mut self, number: u64, record: &Record<'_>) {
        let mut bytes = Vec::new();
        put_record(&mut bytes, record);
        self.bytes += bytes.len();
        self.hand_over(number, bytes, false);
    }

    fn replace(&mut self, number: u64, record: &Record<'_>) {
        let mut bytes = Vec::new();
        put_identity(&mut bytes, self.id);
        put_record(&mut bytes, record);
        self.bytes = bytes.len();
        self.hand_over(number, bytes, true);
    }

    fn kept(&mut self, now_ns: u64) -> Result<u64, String> {
        self.now_ns = now_ns;
        let mut disk = self.disk.borrow_mut();
        while !disk.full && disk.pending.front().is_some_and(|p| p.due_ns <= now_ns) {
            let Some(pending) = disk.pending.pop_front() else { break };
            self.told = pending.number;
            disk.keep(&pending);
        }
        Ok(if self.flushed { self.told } else { self.handed })
    }

    fn is_long(&self) -> bool {
        self.bytes > LONG_BYTES
    }

    fn is_full(&self) -> bool {
        self.disk.borrow().full
    }

    fn deadline_ns(&self) -> Option<u64> {
        let disk = self.disk.borrow();
        disk.pending.front().map(|p| p.due_ns).filter(|_| self.flushed && !disk.full)
    }

    fn close(&mut self) {
        self.disk.borrow_mut().finish();
    }
}
