//! Who is lost, and what follows from it: a backup is dropped, a member is promoted, a shard is failed, a replica that has
//! caught up is added, a lost shard returns. `PROTOCOL.md` §6.
//!
//! A lost connection is suspicion at once. It is enough where the other members of the shard have lost theirs too; where
//! nobody can say, the connection has `lost_grace_ns` to come back; who stays silent for `suspect_ns` is lost.

use alloc::vec::Vec;

use super::members::Part;
use super::{Sequencer, SequencerOut};
use crate::ledger::Membership;
use crate::mutant::{Mutant, planted};
use crate::types::{Lsn, ReplicaId, ShardId};
use crate::wire::node::Report;
use crate::wire::order::{ShardChangeHead, encode_shard_change, encode_view_change};

/// How many times longer a new leader waits for a replica that it has never heard: as long as a connection that was refused
/// for a while may take to be tried again.
const UNHEARD_SUSPECTS: u64 = 10;

/// What the sequencer knows of one replica.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ReplicaState {
    /// Its life, by its newest report; 0 before the first.
    incarnation: u64,
    connected: bool,
    /// When its connection was lost, or it was last heard.
    heard_ns: u64,
    /// Replicas it has no connection to, and since when its report says so of any.
    lost: u8,
    lost_ns: u64,
    /// Newest change of its shard that it has applied.
    change: u32,
    epoch: u32,
    durable: Lsn,
    joiner: Option<ReplicaId>,
    /// The member that it was in an earlier life and keeps everything of; 0: none.
    succeeds: u64,
}

/// What is to be written.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Members { epoch: u32, primary: u16, members: Vec<ReplicaId> },
    Fail,
}

impl Sequencer {
    fn replica_mut(&mut self, shard: ShardId, number: u16) -> Option<&mut ReplicaState> {
        let at = self.index(shard)?;
        self.replicas[at].get_mut(usize::from(number))
    }

    /// The number of a shard's primary.
    pub fn primary(&self, shard: ShardId) -> u16 {
        self.ledger.membership(shard).map_or(0, |m| m.primary)
    }

    /// This member begins to lead: whom it has never heard may have been about to connect to it for a while.
    pub(super) fn expect_replicas(&mut self, now_ns: u64) {
        let heard_ns = now_ns + UNHEARD_SUSPECTS * self.config.suspect_ns;
        let unheard = ReplicaState { connected: true, heard_ns, ..ReplicaState::default() };
        self.replicas.iter_mut().flatten().for_each(|r| *r = unheard);
        (self.look, self.look_at_ns) = (true, None);
    }

    /// A replica's connection is lost.
    pub fn on_replica_down(&mut self, now_ns: u64, shard: ShardId, number: u16, out: &mut impl SequencerOut) {
        if let Some(state) = self.replica_mut(shard, number) {
            (state.connected, state.heard_ns) = (false, now_ns);
        }
        self.look_at_replicas(now_ns, out);
    }

    /// Any replica's report, a primary's or not.
    pub(super) fn hear(&mut self, now_ns: u64, report: &Report) {
        let Some(state) = self.replica_mut(report.shard, report.replica) else { return };
        let is_new = state.incarnation != report.incarnation || !state.connected;
        let news = is_new
            || (state.lost, state.change, state.joiner) != (report.lost, report.change, report.joiner)
            || state.succeeds != report.succeeds
            || state.durable > report.durable_lsn;
        if report.lost & !state.lost != 0 {
            state.lost_ns = now_ns;
        }
        *state = ReplicaState {
            incarnation: report.incarnation,
            connected: true,
            heard_ns: now_ns,
            lost: report.lost,
            lost_ns: state.lost_ns,
            change: report.change,
            epoch: report.epoch,
            durable: report.durable_lsn,
            joiner: report.joiner,
            succeeds: report.succeeds,
        };
        self.look |= news;
    }

    /// Whether somebody may be lost, or gained, and when to look again.
    pub(super) fn look_at_replicas(&mut self, now_ns: u64, out: &mut impl SequencerOut) {
        self.look = true;
        self.decide(now_ns, out);
    }

    /// Whether anything happened to a replica, or silence has to be looked for.
    pub(super) fn may_look(&self, now_ns: u64) -> bool {
        self.look || self.look_at_ns.is_some_and(|at| at <= now_ns)
    }

    /// When silence has to be looked for.
    pub(super) fn look_at_ns(&self) -> Option<u64> {
        self.look_at_ns
    }

    /// Who has not listened for a while cannot say who was silent: nobody is suspected for that time.
    pub(super) fn forgive(&mut self, now_ns: u64) {
        let away_ns = now_ns.saturating_sub(core::mem::replace(&mut self.awake_ns, now_ns));
        // It looks for silence more often than that.
        if away_ns > self.config.suspect_ns / 2 {
            for state in self.replicas.iter_mut().flatten() {
                // Who is waited for with more patience already keeps it.
                state.heard_ns = (state.heard_ns + away_ns).min(now_ns.max(state.heard_ns));
                state.lost_ns = (state.lost_ns + away_ns).min(now_ns);
            }
        }
    }

    /// Writes what follows from who is lost, if anything does.
    pub(super) fn encode_membership(&mut self, now_ns: u64) -> Option<usize> {
        // Until nothing follows any more.
        self.look = true;
        // Silence is looked for twice within the time that makes it a failure.
        let soon = self.replicas.iter().flatten().any(|r| !r.connected && r.incarnation != 0);
        let pause_ns = if soon { self.config.lost_grace_ns / 2 } else { self.config.suspect_ns / 4 };
        self.look_at_ns = self.replicas.iter().any(|r| !r.is_empty()).then_some(now_ns + pause_ns.max(1));
        for at in 0..self.shards.len() {
            let Some(decision) = self.next_change(now_ns, at) else { continue };
            let shard = self.shards[at].shard;
            let view = self.ledger.view();
            return Some(match decision {
                Decision::Fail => encode_view_change(&mut self.buffer, view + 1, shard),
                Decision::Members { epoch, primary, members } => {
                    let change = self.ledger.membership(shard).map_or(0, |m| m.change) + 1;
                    let head = ShardChangeHead { view, shard, change, epoch, primary, since_failure: 0 };
                    encode_shard_change(&mut self.buffer, head, &members)
                }
            });
        }
        self.look = false;
        None
    }

    fn next_change(&self, now_ns: u64, at: usize) -> Option<Decision> {
        let replicas = &self.replicas[at];
        if replicas.is_empty() {
            return None;
        }
        match self.ledger.membership(self.shards[at].shard) {
            None => first_members(replicas, self.config.shards[at].members),
            Some(m) if m.has_failed() => self.returning(now_ns, replicas, m),
            Some(m) => self.lost_or_gained(now_ns, replicas, m),
        }
    }

    /// The replica that has kept most of a lost shard's log goes on with it; the others join it.
    fn returning(&self, now_ns: u64, replicas: &[ReplicaState], m: &Membership) -> Option<Decision> {
        let there = |r: &&ReplicaState| r.connected && r.incarnation != 0;
        // All have the time to come that would have made them suspected.
        let waited = replicas.iter().all(|r| there(&r) || r.heard_ns + self.config.suspect_ns <= now_ns);
        let told = replicas.iter().filter(there).all(|r| r.change >= m.change);
        if !waited || !told {
            return None;
        }
        let best = replicas.iter().filter(there).map(|r| r.durable).max()?;
        let primary = replicas.iter().position(|r| there(&r) && r.durable == best)?;
        let member = ReplicaId { number: primary as u16, incarnation: replicas[primary].incarnation };
        let members = alloc::vec![member];
        Some(Decision::Members { epoch: m.epoch + 1, primary: member.number, members })
    }

    fn lost_or_gained(&self, now_ns: u64, replicas: &[ReplicaState], m: &Membership) -> Option<Decision> {
        let is_alive = |member: &&ReplicaId| !self.is_lost(now_ns, replicas, m, **member);
        let primary = replicas.get(usize::from(m.primary))?;
        let is_settled = |member: &ReplicaId| {
            is_alive(&member) && replicas.get(usize::from(member.number)).is_none_or(|r| !leaves(r, member.number))
        };
        if primary.joiner.is_none() && m.members.iter().all(is_settled) {
            return None;
        }
        let mut alive: Vec<ReplicaId> = m.members.iter().filter(is_alive).copied().collect();
        let stays = |member: &ReplicaId| !leaves(&replicas[usize::from(member.number)], member.number);
        // Nobody takes the place of the last.
        if alive.iter().any(stays) {
            alive.retain(stays);
        }
        if alive.is_empty() {
            return self.succeeding(now_ns, replicas, m);
        }
        // Whoever was not heard yet may not be there, while somebody is who keeps everything on disk.
        let heard = |a: &&ReplicaId| replicas[usize::from(a.number)].incarnation != 0;
        let primary_lost = !alive.iter().any(|a| a.number == m.primary);
        if primary_lost && planted(Mutant::FailWithThePrimary) {
            return Some(Decision::Fail);
        }
        if primary_lost {
            let promoted = alive.iter().filter(heard).max_by_key(|a| longest(replicas, a))?.number;
            return Some(Decision::Members { epoch: m.epoch + 1, primary: promoted, members: alive });
        }
        if alive.len() < m.members.len() {
            let led = alive.iter().filter(heard).any(|a| a.number == m.primary);
            return led.then_some(Decision::Members { epoch: m.epoch, primary: m.primary, members: alive });
        }
        let joiner = primary.joiner.filter(|_| primary.epoch == m.epoch && primary.change == m.change)?;
        let known = replicas.get(usize::from(joiner.number))?;
        let is_there =
            known.connected && known.incarnation == joiner.incarnation && primary.lost & 1 << joiner.number == 0;
        let is_there = is_there && !leaves(known, joiner.number);
        let mut members = alive;
        // A joiner that is gone again counts until a change says that it does not.
        if is_there && m.member(joiner.number).is_none() {
            members.push(joiner);
            members.sort_unstable();
        }
        Some(Decision::Members { epoch: m.epoch, primary: m.primary, members })
    }

    /// All members of a shard are lost. Those that were born again and keep everything on disk that counted as durable go on
    /// with it, and nothing fails; otherwise the shard has.
    fn succeeding(&self, now_ns: u64, replicas: &[ReplicaState], m: &Membership) -> Option<Decision> {
        let state = |member: &ReplicaId| &replicas[usize::from(member.number)];
        let is_here = |r: &ReplicaState| r.connected && r.incarnation != 0;
        // Who has not heard yet who the members are cannot say that it was one.
        let is_behind = |r: &ReplicaState| is_here(r) && r.change < m.change;
        if m.members.iter().any(|member| is_behind(state(member))) {
            return None;
        }
        let mut here = m.members.iter().filter(|member| is_here(state(member)));
        let keeps = |member: &&ReplicaId| state(member).succeeds == member.incarnation;
        if here.clone().next().is_none() || !here.any(|member| keeps(&member)) {
            return Some(Decision::Fail);
        }
        // All have the time to come that would have made them suspected.
        let waits = |r: &ReplicaState| !is_here(r) && r.heard_ns + self.config.suspect_ns > now_ns;
        if m.members.iter().any(|member| waits(state(member))) {
            return None;
        }
        let born = |member: &ReplicaId| ReplicaId { number: member.number, incarnation: state(member).incarnation };
        let keeping = m.members.iter().filter(|member| is_here(state(member)) && keeps(member));
        let members: Vec<ReplicaId> = keeping.map(born).collect();
        let primary = members.iter().max_by_key(|member| longest(replicas, member))?.number;
        Some(Decision::Members { epoch: m.epoch + 1, primary, members })
    }

    fn is_lost(&self, now_ns: u64, replicas: &[ReplicaState], m: &Membership, member: ReplicaId) -> bool {
        let Some(state) = replicas.get(usize::from(member.number)) else { return false };
        if state.incarnation != 0 && state.incarnation != member.incarnation {
            return true;
        }
        let silent_ns = now_ns.saturating_sub(state.heard_ns);
        if silent_ns >= self.config.suspect_ns {
            return true;
        }
        let bit = 1 << member.number;
        if state.connected {
            // Between its primary and it nothing goes through.
            let primary = &replicas[usize::from(m.primary)];
            let since_ns = now_ns.saturating_sub(primary.lost_ns);
            let cut_off = primary.connected && primary.lost & bit != 0 && since_ns >= self.config.suspect_ns;
            return member.number != m.primary && cut_off;
        }
        let mut witnesses = m.members.iter().filter(|w| w.number != member.number);
        let mut said = 0;
        let all_agree = witnesses.all(|w| {
            let witness = &replicas[usize::from(w.number)];
            said += u32::from(witness.connected);
            !witness.connected || witness.lost & bit != 0
        });
        all_agree && (said > 0 || silent_ns >= self.config.lost_grace_ns)
    }

    /// A view began: the shard that was lost has nothing to report any more.
    pub(super) fn on_shard_failed(&mut self, now_ns: u64) {
        let granted = self.ledger.granted_point();
        for at in 0..self.shards.len() {
            let shard = self.shards[at].shard;
            if !self.ledger.has_failed(shard) || self.shards[at].part == Part::Failed {
                continue;
            }
            self.stats.shards_failed += u64::from(self.leads);
            let kept = self.ledger.committed_lsn(shard);
            let state = &mut self.shards[at];
            state.part = Part::Failed;
            (state.open, state.closed, state.fresh) = (false, true, false);
            (state.durable, state.appended) = (kept, kept);
            state.point = state.point.max(granted);
            self.skip_windows_without_slots(at);
        }
        self.change = true;
        if !self.shards.iter().any(|s| s.part == Part::In) {
            self.call_from_the_ground();
        }
        self.recount(now_ns);
    }

    /// A change that does not name its predecessor and has whoever was dropped back: [`Mutant::ApplyVoidChanges`].
    ///
    /// [`Mutant::ApplyVoidChanges`]: crate::mutant::Mutant::ApplyVoidChanges
    pub(super) fn encode_void_change(&mut self, shard: ShardId) -> Option<usize> {
        let at = self.index(shard)?;
        let m = self.ledger.membership(shard)?;
        let head = ShardChangeHead {
            view: self.ledger.view(),
            shard,
            change: m.change,
            epoch: m.epoch,
            primary: m.primary,
            since_failure: 0,
        };
        let all = (0..)
            .zip(&self.replicas[at])
            .map(|(number, r)| m.member(number).unwrap_or(ReplicaId { number, incarnation: r.incarnation.max(1) }));
        let all: Vec<ReplicaId> = all.collect();
        (all.len() > m.members.len() && !m.has_failed()).then(|| encode_shard_change(&mut self.buffer, head, &all))
    }

    /// A shard has other members. One that was lost comes back at the next edge.
    pub(super) fn on_members_changed(&mut self, shard: ShardId) {
        self.stats.member_changes += u64::from(self.leads);
        let Some(at) = self.index(shard) else { return };
        let state = &mut self.shards[at];
        if state.part == Part::Failed && !state.wanted {
            // Its operator asked for it to leave while it was lost.
            state.part = Part::Out;
        } else if state.part == Part::Failed {
            state.part = Part::In;
            state.quota = state.configured;
            state.arrivals = Default::default();
            (self.change, self.rush) = (true, true);
        }
        // Whoever leads the shard now may not have heard the target.
        self.look = true;
    }
}

/// Whether a replica says of itself that it is about to end.
fn leaves(state: &ReplicaState, number: u16) -> bool {
    state.lost & 1 << number != 0
}

/// Who has verified most comes last; of several, the one with the smallest number.
fn longest(replicas: &[ReplicaState], member: &ReplicaId) -> (Lsn, core::cmp::Reverse<u16>) {
    (replicas[usize::from(member.number)].durable, core::cmp::Reverse(member.number))
}

/// A shard begins with all its replicas but the spares.
fn first_members(replicas: &[ReplicaState], members: u16) -> Option<Decision> {
    let there = |r: &&ReplicaState| r.connected && r.incarnation != 0;
    let all = replicas.iter().take(members.into());
    if all.clone().filter(there).count() < all.len() {
        return None;
    }
    let members = (0..).zip(all).map(|(number, r)| ReplicaId { number, incarnation: r.incarnation });
    Some(Decision::Members { epoch: 1, primary: 0, members: members.collect() })
}

#[cfg(test)]
mod tests;
