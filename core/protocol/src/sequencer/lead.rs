//! Who decides: one member of the group leads, the others follow the order log and can take over at any time.
//!
//! A follower applies committed entries and nothing else. What a leader knows beside them it learns again when it takes
//! over: who reported what, from the newest reports; who takes part, from the newest grant and from the changes that
//! operators have asked for, which all members remember. Quotas stay what they are until rates are known.

use alloc::vec::Vec;

use super::members::Part;
use super::progress::Answers;
use super::quota::Arrivals;
use super::{Sequencer, SequencerOut};
use crate::ledger::Ledger;
use crate::types::{Change, ChangeError, CutPoint, Ordering, ShardId};

/// What operators have asked for, beside the order log the state that all members of a group share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Which windows are granted.
    pub ordering: Ordering,
    /// Shards that are to be members, in id order.
    pub wanted: Vec<ShardId>,
}

impl Sequencer {
    /// Whether this member decides.
    pub fn leads(&self) -> bool {
        self.leads
    }

    /// From now on this member decides: everything that was committed before is applied. Reports that are known are to
    /// be told again.
    pub fn on_lead(&mut self, now_ns: u64, out: &mut impl SequencerOut) {
        self.leads = true;
        self.in_flight = false;
        self.cut_at_ns = now_ns;
        if self.ledger.applied_index() > 0 {
            self.take_over(now_ns);
            self.close_again(now_ns, out);
        }
        self.decide(now_ns, out);
    }

    /// This member decides no more.
    pub fn on_follow(&mut self) {
        self.leads = false;
        self.in_flight = false;
    }

    /// Forgets what belonged to an earlier lead and makes the most of the ledger.
    fn take_over(&mut self, now_ns: u64) {
        (self.target, self.edge) = (CutPoint::default(), CutPoint::default());
        (self.target_at_ns, self.target_due_ns, self.prefix_due_ns) = (None, None, None);
        (self.change, self.rush, self.granting_rush, self.free_left) = (false, false, false, 0);
        (self.next_tick_ns, self.tick_due, self.watch_at_ns) = (None, false, None);
        self.asked = super::Asked::default();
        self.decided_at_ns = Some(now_ns);
        self.unsettled = true;
        // Who was not heard by this member has as much time as everybody else.
        self.expect_replicas(now_ns);
        let (bound, granted) = (CutPoint { prefix: 0, ..self.ledger.bound() }, self.ledger.granted_point());
        for at in 0..self.shards.len() {
            let shard = self.shards[at].shard;
            let member = self.ledger.member(shard).copied();
            let failed = self.ledger.has_failed(shard);
            let state = &mut self.shards[at];
            state.since = self.ledger.listed_since(shard);
            state.open = !failed && member.is_some_and(|m| m.open);
            state.part = match member {
                _ if failed => Part::Failed,
                None if state.wanted => Part::In,
                None => Part::Out,
                Some(m) if m.open && state.wanted => Part::In,
                // It is to be grounded: it gets rid of what it holds first.
                Some(m) if state.wanted && m.quota > 0 => Part::Closing { leave: false },
                // It is on the ground, or was lost and is back.
                Some(_) if state.wanted => Part::In,
                Some(m) if m.open || m.quota > 0 => Part::Closing { leave: true },
                Some(_) => Part::Out,
            };
            self.change |= state.part == Part::In && !state.open;
            self.rush |= state.part == Part::In && member.is_none();
            (state.closed, state.fresh) = (failed, false);
            if failed {
                let kept = self.ledger.committed_lsn(shard);
                (state.durable, state.appended) = (kept, kept);
                state.point = state.point.max(granted);
            }
            // Whatever is bound was reported.
            state.point = state.point.max(bound);
            (state.arrivals, state.answers) = (Arrivals::unknown(), Answers::default());
            (state.returned_at_ns, state.grounded_before) = (0, 0);
            self.skip_windows_without_slots(at);
        }
        let ordered = self.ledger.mode() == Some(self.config.ordering.window_mode());
        if !ordered && self.config.ordering != Ordering::Auto {
            (self.change, self.rush) = (true, true);
        }
        self.recount(now_ns);
    }

    /// Whether a change can be made.
    ///
    /// # Errors
    /// Why not.
    pub fn may_change(&self, change: Change) -> Result<(), ChangeError> {
        match change {
            Change::Join(shard) => self.index_of(shard).map(|_| ()),
            Change::Leave(shard) => {
                let state = &self.shards[self.index_of(shard)?];
                let others = || self.shards.iter().filter(|s| s.shard != shard);
                let takes_last = state.part == Part::In && !others().any(|s| s.part == Part::In);
                // One that is lost may be the last that is to come back.
                let is_last = state.wanted && !others().any(|s| s.wanted);
                if takes_last || is_last { Err(ChangeError::LastShard(shard)) } else { Ok(()) }
            }
            Change::Trim(upto) if upto > self.ledger.committed() => Err(ChangeError::NotBound),
            Change::Ordering(_) | Change::Trim(_) => Ok(()),
        }
    }

    /// What operators have asked for so far.
    pub fn standing(&self) -> Standing {
        let wanted = self.shards.iter().filter(|s| s.wanted).map(|s| s.shard).collect();
        Standing { ordering: self.config.ordering, wanted }
    }

    /// Replaces everything by the state of another member; this one follows.
    pub fn restore(&mut self, mut ledger: Ledger, standing: &Standing) {
        self.on_follow();
        self.grant_index = ledger.applied_index();
        ledger.continue_from(core::mem::replace(&mut self.ledger, Ledger::new(1)));
        self.ledger = ledger;
        self.config.ordering = standing.ordering;
        for state in &mut self.shards {
            state.wanted = standing.wanted.contains(&state.shard);
            state.since = self.ledger.listed_since(state.shard);
            state.open = self.ledger.member(state.shard).is_some_and(|m| m.open);
            if let Some(member) = self.ledger.member(state.shard).filter(|m| m.open && m.quota > 0) {
                state.quota = member.quota;
            }
        }
    }
}

#[cfg(test)]
mod tests;
