//! Who takes part: shards that join and leave while the log runs, and stragglers that are grounded for a while.
//!
//! A shard once listed in a grant stays listed; that it left means that it is closed and has no quota. Whoever is to
//! leave is first told to take no more appends (a target that closes), gets what it still holds ordered, and then
//! gets no slots.

use super::{Sequencer, SequencerOut, ShardState};
use crate::mutant::{Mutant, planted};
use crate::types::{Beat, Change, ChangeError, CutPoint, Lsn, ShardId, WindowMode};
use crate::wire::node::{Report, Target};

/// Cuts behind the first at which the published lag fix acts.
const PAPER_LAG_CUTS: u64 = 3;

/// A shard's part in the windows to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Not a member, or not any more.
    Out,
    /// A member.
    In,
    /// It was lost as a whole and has not returned.
    Failed,
    /// It takes no more appends and gets rid of what it holds.
    Closing {
        /// For good; otherwise to be grounded.
        leave: bool,
    },
    /// It has no slots for a while.
    Grounded {
        /// When it may return.
        until_ns: u64,
    },
}

impl Sequencer {
    /// An operator asks for a change. Asking for what is so already changes nothing.
    ///
    /// # Errors
    /// [`ChangeError`]; nothing changes then.
    pub fn on_change(&mut self, now_ns: u64, change: Change, out: &mut impl SequencerOut) -> Result<(), ChangeError> {
        self.may_change(change)?;
        self.make_change(now_ns, change, out);
        Ok(())
    }

    /// Makes a change that was found possible, by this member or by one that led then: all members make the same ones,
    /// in the order of the log.
    pub fn make_change(&mut self, now_ns: u64, change: Change, out: &mut impl SequencerOut) {
        match change {
            Change::Join(shard) => self.join(shard),
            Change::Leave(shard) => self.leave(now_ns, shard, out),
            Change::Ordering(ordering) if ordering != self.config.ordering => {
                self.config.ordering = ordering;
                self.free_left = 0;
                (self.change, self.rush) = (true, true);
            }
            Change::Ordering(_) => {}
            // Asked for again it changes nothing.
            Change::Trim(upto) => self.trim = self.trim.max(upto),
        }
        self.decide(now_ns, out);
    }

    pub(super) fn index_of(&self, shard: ShardId) -> Result<usize, ChangeError> {
        self.index(shard).ok_or(ChangeError::UnknownShard(shard))
    }

    fn join(&mut self, shard: ShardId) {
        let Ok(at) = self.index_of(shard) else { return };
        self.shards[at].wanted = true;
        if !matches!(self.shards[at].part, Part::In | Part::Failed) {
            self.shards[at].part = Part::In;
            self.shards[at].quota = self.shards[at].configured;
            // The edge is brought near, so that it need not wait for the windows that are granted.
            (self.change, self.rush) = (true, true);
        }
    }

    fn leave(&mut self, now_ns: u64, shard: ShardId, out: &mut impl SequencerOut) {
        let Ok(at) = self.index_of(shard) else { return };
        self.shards[at].wanted = false;
        if matches!(self.shards[at].part, Part::Out | Part::Failed | Part::Closing { leave: true }) {
            return;
        }
        self.shards[at].part = Part::Closing { leave: true };
        self.unsettled = true;
        if !self.leads {
            return;
        }
        if !self.shards.iter().any(|s| s.part == Part::In) {
            // Others were grounded since the change was found possible: somebody must take slots.
            self.call_from_the_ground();
        }
        // A free window says at once that the shard is closed; in fixed ones a target does, and the grant follows.
        self.change |= self.ledger.mode() == Some(WindowMode::Free);
        self.send_target(now_ns, at, out);
    }

    /// Who is on the ground, or on the way to it, takes part again: there is nobody else.
    pub(super) fn call_from_the_ground(&mut self) {
        for state in &mut self.shards {
            if matches!(state.part, Part::Grounded { .. } | Part::Closing { leave: false }) {
                state.part = Part::In;
                (self.change, self.rush) = (true, true);
            }
        }
    }

    /// What a shard's part becomes with the next window; true when it returns from the ground.
    pub(super) fn move_part(&mut self, now_ns: u64, at: usize, backlog: u64) -> bool {
        let free = self.ledger.mode() == Some(WindowMode::Free);
        let ground_ns = u64::from(self.config.ground_windows) * self.window_ns();
        let state = &mut self.shards[at];
        match state.part {
            Part::Closing { leave } if free || (state.closed && backlog == 0) => {
                state.part = if leave {
                    Part::Out
                } else {
                    // One that straggles again and again stays away longer.
                    Part::Grounded { until_ns: now_ns + (ground_ns << state.grounded_before.min(4)) }
                };
                false
            }
            Part::Grounded { until_ns } if until_ns <= now_ns => {
                state.part = Part::In;
                state.returned_at_ns = now_ns;
                true
            }
            _ => false,
        }
    }

    fn window_ns(&self) -> u64 {
        u64::from(self.config.window_cuts) * self.config.tick_ns
    }

    /// Shards whose slots are all granted and that take no appends any more leave now, not with the window.
    pub(super) fn look_at_leavers(&mut self) {
        if self.change || !self.unsettled {
            return;
        }
        self.unsettled = self.shards.iter().any(|s| matches!(s.part, Part::Closing { .. } | Part::Grounded { .. }));
        let drained = |at: &usize| {
            let state = &self.shards[*at];
            state.part == Part::Closing { leave: true } && state.closed && self.backlog(*at) == 0
        };
        self.change = (0..self.shards.len()).any(|at| drained(&at));
    }

    /// Whether a grounded shard may return and no grant came by itself.
    pub(super) fn return_due(&self, now_ns: u64) -> bool {
        self.return_at_ns().is_some_and(|at| at <= now_ns)
    }

    /// Up to where others have to follow a shard: to the cut of its last record. Closed shards run ahead with no-ops, and
    /// so do those that expect a target; if that counted, an idle log would chase itself.
    pub(super) fn last_wanted(&self, at: usize, report: &Report) -> CutPoint {
        if self.config.beat != Beat::Target || planted(Mutant::FollowFillsAhead) {
            return self.shards[at].point;
        }
        let Some(last) = report.records_lsn.0.checked_sub(1).map(Lsn) else { return CutPoint::default() };
        let reported = self.shards[at].point;
        if last >= self.ledger.granted_lsn(report.shard) {
            return reported; // Its records fill all that is granted.
        }
        self.ledger.point_of(report.shard, last).unwrap_or_default().min(reported)
    }

    /// When grounded shards return even if the log is idle.
    pub(super) fn return_at_ns(&self) -> Option<u64> {
        if !self.unsettled {
            return None;
        }
        let until = |s: &ShardState| if let Part::Grounded { until_ns } = s.part { Some(until_ns) } else { None };
        self.shards.iter().filter_map(until).min().map(|at| at + self.window_ns())
    }

    /// Tells shards the target, or when the pace allows it.
    pub(super) fn pace_targets(&mut self, now_ns: u64, out: &mut impl SequencerOut) {
        let due_ns = self.target_at_ns.map_or(now_ns, |at| at + self.config.target_pace_ns);
        if due_ns <= now_ns {
            self.send_targets(now_ns, out);
        } else {
            self.target_due_ns = Some(due_ns);
        }
    }

    /// The lag fix without a threshold: every shard behind the target is asked for it.
    pub(super) fn send_targets(&mut self, now_ns: u64, out: &mut impl SequencerOut) {
        self.target_at_ns = Some(now_ns);
        self.target_due_ns = None;
        self.asked.on_target(now_ns, self.config.tick_ns, self.target);
        for at in 0..self.shards.len() {
            if self.shards[at].part == Part::In {
                self.send_target(now_ns, at, out);
            }
        }
        if self.config.ground_windows > 0 && self.watch_at_ns.is_none() {
            self.watch_at_ns = Some(now_ns + self.config.tick_ns);
        }
    }

    /// Tells one shard its target, if there is anything to tell.
    pub(super) fn send_target(&mut self, now_ns: u64, at: usize, out: &mut impl SequencerOut) {
        let state = &self.shards[at];
        let close = matches!(state.part, Part::Closing { .. });
        let point = if close { self.ledger.granted_point() } else { self.target };
        let told = match state.part {
            Part::Out | Part::Failed | Part::Grounded { .. } => false,
            // A free window says itself who is closed; the fixed ones before it are still to be reported, perhaps by a
            // primary that was not told.
            Part::Closing { .. } => self.ledger.mode() == Some(WindowMode::Fixed) || state.point < point,
            Part::In => state.open && state.point < point && self.beat_asks(state, point),
        };
        if told {
            self.stats.targets += 1;
            out.target(
                state.shard,
                self.primary(state.shard),
                Target { point, close, lead_ns: state.answers.lead_ns(self.config.tick_ns) },
            );
            self.shards[at].answers.on_asked(now_ns, point);
        }
    }

    fn beat_asks(&self, state: &ShardState, point: CutPoint) -> bool {
        match self.config.beat {
            Beat::Target => true,
            Beat::Paper { .. } if self.target == self.edge => true,
            Beat::Paper { lag_fix } => {
                let cuts = |p: CutPoint| p.window * u64::from(self.config.window_cuts) + u64::from(p.cut);
                lag_fix && cuts(point) - cuts(state.point) >= PAPER_LAG_CUTS
            }
        }
    }

    /// Closing shards are told again where the granted windows end now.
    pub(super) fn close_again(&mut self, now_ns: u64, out: &mut impl SequencerOut) {
        for at in 0..self.shards.len() {
            if matches!(self.shards[at].part, Part::Closing { .. }) {
                self.send_target(now_ns, at, out);
            }
        }
    }

    /// Looks for shards that have not reached a target for long while most have, and grounds them.
    pub(super) fn watch(&mut self, now_ns: u64, out: &mut impl SequencerOut) {
        let late_ns = u64::from(self.config.late_ticks) * self.config.tick_ns;
        let behind_ns = |s: &ShardState| self.asked.since_ns(s.point).map_or(0, |since| now_ns.saturating_sub(since));
        let members = || self.shards.iter().filter(|s| s.part == Part::In && s.open);
        let late = members().filter(|s| behind_ns(s) >= late_ns).count();
        // For most to be in time they must not be about to be late themselves.
        let in_time = members().filter(|s| behind_ns(s) < late_ns / 2).count();
        let behind = members().any(|s| s.point < self.target);
        self.watch_at_ns = behind.then_some(now_ns + self.config.tick_ns);
        let may_ground = self.config.beat == Beat::Target && self.ledger.mode() == Some(WindowMode::Fixed);
        if late == 0 || late > in_time || !may_ground {
            return;
        }
        for at in 0..self.shards.len() {
            let state = &self.shards[at];
            let since_ns = self.asked.since_ns(state.point).unwrap_or(now_ns);
            if now_ns - since_ns >= late_ns && state.part == Part::In && state.open && self.most_stay() {
                self.ground(now_ns, at, out);
            }
        }
    }

    /// Whether at least half of the members would keep a quota with one less.
    fn most_stay(&self) -> bool {
        let count = |wanted: fn(&Part) -> bool| self.shards.iter().filter(|s| wanted(&s.part)).count();
        let staying = count(|p| *p == Part::In);
        let all = staying + count(|p| matches!(p, Part::Closing { leave: false } | Part::Grounded { .. }));
        staying > 1 && 2 * (staying - 1) >= all
    }

    fn ground(&mut self, now_ns: u64, at: usize, out: &mut impl SequencerOut) {
        let steady_ns = 16 * u64::from(self.config.ground_windows) * self.window_ns();
        let state = &mut self.shards[at];
        let again = state.returned_at_ns > 0 && now_ns - state.returned_at_ns < steady_ns;
        state.grounded_before = if again { state.grounded_before + 1 } else { 0 };
        state.part = Part::Closing { leave: false };
        self.unsettled = true;
        self.stats.grounded += 1;
        self.send_target(now_ns, at, out);
        self.recount(now_ns);
    }

    /// A report moved a member's point.
    pub(super) fn advance(&mut self, now_ns: u64, at: usize, point: CutPoint) {
        let before = self.shards[at].point;
        self.shards[at].point = point;
        self.shards[at].answers.on_reached(now_ns, point);
        self.skip_windows_without_slots(at);
        if self.shards[at].since.is_some() {
            self.progress.on_advance(now_ns, &self.shards, at, before);
        }
    }

    /// A member without slots in a window needs not report it.
    pub(super) fn skip_windows_without_slots(&mut self, at: usize) {
        let state = &mut self.shards[at];
        while state.point.cut == 0 && self.ledger.quota(state.shard, state.point.window) == Some(0) {
            state.point.window += 1;
        }
    }

    pub(super) fn recount(&mut self, now_ns: u64) {
        self.progress.recount(now_ns, &self.shards);
    }
}
