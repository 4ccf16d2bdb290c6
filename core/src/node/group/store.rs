//! The group's log as Raft reads it: entries in memory behind a snapshot, and who takes part.
//!
//! What is to survive a restart is written by the group, which hands entries over here once they are on their way to
//! the journal. Snapshots are made when Raft has asked for one: see [`Store::wants_snapshot`].

use std::cell::Cell;
use std::collections::VecDeque;

use raft::eraftpb::{ConfState, Entry, HardState, Snapshot};
use raft::util::limit_size;
use raft::{Error, GetEntriesContext, RaftState, Result, Storage, StorageError};

use super::journal::Recovered;

/// The first index and term of a new group: before it lies nothing but who takes part, so that who joins later, and
/// cannot know them, gets a snapshot.
pub(super) const FOUNDED: (u64, u64) = (1, 1);

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Store {
    entries: VecDeque<Entry>,
    /// Index and term of the entry before the first one kept.
    before: (u64, u64),
    hard: HardState,
    /// Who takes part, by what is applied.
    conf: ConfState,
    /// The newest there is; empty: none.
    snapshot: Snapshot,
    wanted: Cell<bool>,
}

impl Store {
    /// The log of a group that begins with these members.
    pub(super) fn founded(voters: Vec<u64>) -> Store {
        let mut snapshot = Snapshot::default();
        let meta = snapshot.mut_metadata();
        (meta.index, meta.term) = FOUNDED;
        meta.set_conf_state(ConfState { voters, ..ConfState::default() });
        let hard = HardState { term: FOUNDED.1, commit: FOUNDED.0, ..HardState::default() };
        Store::recovered(Recovered { snapshot, hard, ..Recovered::default() })
    }

    /// The log as a journal held it.
    pub(super) fn recovered(recovered: Recovered) -> Store {
        let Recovered { snapshot, entries, mut hard, .. } = recovered;
        let meta = snapshot.get_metadata();
        hard.commit = hard.commit.max(meta.index);
        let (before, conf) = ((meta.index, meta.term), meta.get_conf_state().clone());
        Store { entries: entries.into(), before, hard, conf, snapshot, ..Store::default() }
    }

    /// Nobody takes part that is known of.
    pub(super) fn is_blank(&self) -> bool {
        self.conf.voters.is_empty() && self.hard.term == 0
    }

    pub(super) fn conf(&self) -> &ConfState {
        &self.conf
    }

    pub(super) fn set_conf(&mut self, conf: ConfState) {
        self.conf = conf;
    }

    pub(super) fn hard(&self) -> &HardState {
        &self.hard
    }

    pub(super) fn set_hard(&mut self, hard: HardState) {
        self.hard = hard;
    }

    /// The newest snapshot there is; empty: none.
    pub(super) fn kept_snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    pub(super) fn last(&self) -> u64 {
        self.before.0 + self.entries.len() as u64
    }

    pub(super) fn kept(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn entries_from(&self, index: u64) -> impl Iterator<Item = &Entry> {
        self.entries.iter().skip_while(move |e| e.index < index)
    }

    /// Appends entries; those that they contradict are dropped.
    pub(super) fn append(&mut self, entries: &[Entry]) {
        let Some(first) = entries.first() else { return };
        assert!(first.index > self.before.0 && first.index <= self.last() + 1, "the group's log has a gap");
        self.entries.truncate((first.index - self.before.0 - 1) as usize);
        self.entries.extend(entries.iter().cloned());
    }

    /// Begins anew behind a snapshot that came from another member.
    pub(super) fn install(&mut self, snapshot: &Snapshot) {
        let meta = snapshot.get_metadata();
        self.entries.clear();
        self.before = (meta.index, meta.term);
        self.conf = meta.get_conf_state().clone();
        self.hard.commit = self.hard.commit.max(meta.index);
        self.snapshot = snapshot.clone();
    }

    /// Drops entries up to `index`, which all that matters has been made of.
    pub(super) fn compact(&mut self, index: u64) {
        while self.entries.front().is_some_and(|e| e.index <= index) {
            if let Some(entry) = self.entries.pop_front() {
                self.before = (entry.index, entry.term);
            }
        }
    }

    /// Raft asked for a snapshot, and none is there that would do.
    pub(super) fn wants_snapshot(&self) -> bool {
        self.wanted.get()
    }

    /// The state after `index`, whose term the log still knows.
    pub(super) fn offer_snapshot(&mut self, index: u64, data: Vec<u8>) {
        let Ok(term) = self.term(index) else { return };
        let mut snapshot = Snapshot { data: data.into(), ..Snapshot::default() };
        let meta = snapshot.mut_metadata();
        (meta.index, meta.term) = (index, term);
        meta.set_conf_state(self.conf.clone());
        self.snapshot = snapshot;
        self.wanted.set(false);
    }
}

impl Storage for Store {
    fn initial_state(&self) -> Result<RaftState> {
        Ok(RaftState::new(self.hard.clone(), self.conf.clone()))
    }

    fn entries(&self, low: u64, high: u64, most: impl Into<Option<u64>>, _: GetEntriesContext) -> Result<Vec<Entry>> {
        if low <= self.before.0 {
            return Err(Error::Store(StorageError::Compacted));
        }
        assert!(high <= self.last() + 1, "entries up to {high} of a log that ends at {}", self.last());
        let (from, to) = ((low - self.before.0 - 1) as usize, (high - self.before.0 - 1) as usize);
        let mut entries: Vec<Entry> = self.entries.range(from..to).cloned().collect();
        limit_size(&mut entries, most.into());
        Ok(entries)
    }

    fn term(&self, index: u64) -> Result<u64> {
        if index == self.before.0 {
            return Ok(self.before.1);
        }
        let at = index.checked_sub(self.before.0 + 1).ok_or(Error::Store(StorageError::Compacted))?;
        self.entries.get(at as usize).map(|e| e.term).ok_or(Error::Store(StorageError::Unavailable))
    }

    fn first_index(&self) -> Result<u64> {
        Ok(self.before.0 + 1)
    }

    fn last_index(&self) -> Result<u64> {
        Ok(self.last())
    }

    fn snapshot(&self, request_index: u64, to: u64) -> Result<Snapshot> {
        let meta = self.snapshot.get_metadata();
        let conf = meta.get_conf_state();
        // It must reach what the log still has, and know of the member, which refuses it otherwise.
        let knows = conf.voters.contains(&to) || conf.learners.contains(&to);
        if !self.snapshot.is_empty() && knows && meta.index >= self.before.0.max(request_index) {
            return Ok(self.snapshot.clone());
        }
        self.wanted.set(true);
        Err(Error::Store(StorageError::SnapshotTemporarilyUnavailable))
    }
}
