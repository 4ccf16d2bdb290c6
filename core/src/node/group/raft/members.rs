//! Members that come back as others, and states for those that are far behind.

use raft::eraftpb::{ConfChange, ConfChangeType};

use super::{CUT_AFTER_ENTRIES, HEARD_TICKS, KEPT_ENTRIES, RaftGroup, node_of};
use crate::node::group::journal::Record;
use crate::node::group::wire::Reconfigure;

/// A new member takes part in votes when it lacks no more entries than this.
const CAUGHT_UP: u64 = 64;

impl RaftGroup {
    /// The leader makes room for members that came back as others, and has new ones take part.
    pub(super) fn replace_members(&mut self) {
        let conf = self.raw.store().conf().clone();
        for place in 0..self.others.len() {
            let Some(id) = self.others[place].id.filter(|_| self.others[place].connected) else { continue };
            if conf.voters.contains(&id) {
                continue;
            }
            let all = conf.voters.iter().chain(&conf.learners);
            let gone = all.copied().find(|v| node_of(*v) == node_of(id) && *v != id);
            let change = match gone {
                Some(gone) => (ConfChangeType::RemoveNode, gone),
                None if !conf.learners.contains(&id) => (ConfChangeType::AddLearnerNode, id),
                None if self.has_caught_up(id) => (ConfChangeType::AddNode, id),
                None => continue,
            };
            self.reconfigure(change.0, change.1);
        }
    }

    /// Who has nothing yet is not counted on, however short the log is.
    pub(super) fn has_caught_up(&self, id: u64) -> bool {
        let matched = self.raw.raft.prs().get(id).map_or(0, |progress| progress.matched);
        matched > 0 && matched + CAUGHT_UP > self.raw.raft.raft_log.last_index()
    }

    pub(super) fn reconfigure(&mut self, kind: ConfChangeType, id: u64) {
        if self.raw.raft.has_pending_conf() {
            return;
        }
        let change = ConfChange { change_type: kind, node_id: id, ..ConfChange::default() };
        let ours = Reconfigure { kind, id }.encode().to_vec();
        let _ = self.raw.propose_conf_change(ours, change);
        self.pump();
    }

    /// Whether a snapshot of this member's state is needed: by a member that is behind, or for a shorter journal.
    pub fn wants_snapshot(&self) -> bool {
        self.raw.store().wants_snapshot() || self.journal_is_long()
    }

    pub(super) fn journal_is_long(&self) -> bool {
        self.journal.as_ref().is_some_and(|journal| journal.is_long())
    }

    /// The state after all that was learned.
    pub fn offer_snapshot(&mut self, data: Vec<u8>) {
        assert!(self.learned.is_empty(), "a snapshot of what was learned so far");
        let applied = self.applied;
        self.raw.mut_store().offer_snapshot(applied, data);
        if self.journal_is_long()
            && let Some(journal) = &mut self.journal
        {
            let store = self.raw.store();
            let entries: Vec<_> = store.entries_from(applied + 1).cloned().collect();
            let record = Record { snapshot: store.kept_snapshot(), entries: &entries, hard: Some(store.hard()) };
            self.handed += 1;
            journal.replace(self.handed, &record);
        }
    }

    pub(super) fn heard_mask(&self) -> Vec<u8> {
        let mut mask = vec![0; self.heard_at.len().div_ceil(8)];
        for (replica, at) in self.heard_at.iter().enumerate() {
            if at.is_some_and(|at| at + HEARD_TICKS > self.ticks) {
                mask[replica / 8] |= 1 << (replica % 8);
            }
        }
        mask
    }

    /// Another member that hears a replica, by what it said of late.
    pub fn heard_elsewhere(&self, replica: usize) -> Option<usize> {
        self.others.iter().position(|other| {
            let hears = other.heard.get(replica / 8).is_some_and(|byte| byte & 1 << (replica % 8) != 0);
            other.connected && hears && other.heard_at + HEARD_TICKS > self.ticks
        })
    }

    /// Hands leadership to another member, if it can take it; what is proposed meanwhile waits.
    pub fn transfer_leadership(&mut self, place: usize) {
        if let Some(id) = self.others[place].id {
            self.raw.transfer_leader(id);
            self.pump();
        }
    }

    /// Another member leads, as far as this one knows.
    pub fn is_led_elsewhere(&self) -> bool {
        self.leader().0.is_some_and(|place| place != self.own)
    }

    /// Hands leadership to whoever has most of the log; asked for again until it is done. False: there is nobody.
    pub fn hand_over(&mut self) -> bool {
        let voters = &self.raw.store().conf().voters;
        let is_there = |place: &usize| {
            let other = &self.others[*place];
            other.connected
                && other.heard_at + HEARD_TICKS > self.ticks
                && other.id.is_some_and(|id| voters.contains(&id))
        };
        let matched = |place: &usize| {
            let progress = self.others[*place].id.and_then(|id| self.raw.raft.prs().get(id));
            progress.map_or(0, |progress| progress.matched)
        };
        let Some(next) = (0..self.others.len()).filter(is_there).max_by_key(matched) else { return false };
        if self.raw.raft.lead_transferee.is_none() {
            self.transfer_leadership(next);
        }
        true
    }

    /// Drops entries that nobody needs: whoever is further behind gets a snapshot.
    pub(super) fn cut(&mut self) {
        if self.raw.store().kept() < KEPT_ENTRIES + CUT_AFTER_ENTRIES {
            return;
        }
        let last = self.raw.store().last();
        let upto = self.applied.min(last.saturating_sub(KEPT_ENTRIES as u64));
        self.raw.mut_store().compact(upto);
    }
}
