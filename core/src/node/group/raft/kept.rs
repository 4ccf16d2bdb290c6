//! What is to survive a restart, and what waits for it.

use super::RaftGroup;
use crate::node::group::journal::Record;

impl RaftGroup {
    /// Nothing is kept for now, because the disk is full.
    pub fn disk_is_full(&self) -> bool {
        self.journal.as_ref().is_some_and(|journal| journal.is_full())
    }

    /// Looks whether the journal has kept what it was given. Panics when it cannot: the member must stop.
    pub fn settle(&mut self, now_ns: u64) {
        let kept = self.journal.as_mut().map(|journal| journal.kept(now_ns));
        match kept {
            Some(Ok(number)) if self.on_kept(number) => self.pump(),
            Some(Err(failure)) => panic!("sequencer: {failure}"),
            _ => {}
        }
    }

    /// The member ends in an orderly way.
    pub fn close(&mut self) {
        if let Some(journal) = &mut self.journal {
            journal.close();
        }
    }

    /// Hands a record to the journal, if it says anything; returns the number that stands for it.
    pub(super) fn keep(&mut self, record: &Record<'_>) -> u64 {
        let says_something = record.hard.is_some() || !record.entries.is_empty() || !record.snapshot.is_empty();
        if let Some(journal) = self.journal.as_mut().filter(|_| says_something) {
            self.handed += 1;
            journal.append(self.handed, record);
        }
        self.handed
    }

    /// Everything up to this number is kept: messages that promise it may leave. Whether there was anything.
    pub(super) fn on_kept(&mut self, record: u64) -> bool {
        let before = self.held.len();
        while self.held.front().is_some_and(|(r, ..)| *r <= record) {
            let (_, number, messages) = self.held.pop_front().unwrap_or_default();
            self.raw.on_persist_ready(number);
            self.send(messages);
        }
        self.advance_applied();
        self.held.len() < before
    }

    /// Tells Raft what is applied. A snapshot counts when it is kept.
    pub(super) fn advance_applied(&mut self) {
        self.raw.advance_apply_to(self.applied.min(self.raw.raft.raft_log.persisted));
    }
}
