//! Which cuts all members have reported, kept so that a report costs a few instructions and a cut one pass over the
//! members; and for how long cuts waited between their median and their last report.

use super::ShardState;
use super::members::Part;
use crate::types::CutPoint;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The last cut that all members have reported.
    whole: CutPoint,
    /// Members.
    members: usize,
    /// Members that have reported more than `whole`.
    ahead: usize,
    /// Members that take appends, and those of them that are ahead.
    open: usize,
    open_ahead: usize,
    /// When half of the open members were ahead.
    median_at_ns: u64,
    /// Of the open windows' members, how many at the front are known to be ahead.
    prefix: usize,
    waited_ns: u64,
    waits: u64,
}

fn counts(state: &ShardState) -> bool {
    state.open && state.part == Part::In
}

impl Progress {
    /// Counts again: members, their parts or points changed.
    pub(super) fn recount(&mut self, now_ns: u64, shards: &[ShardState]) {
        let members = || shards.iter().filter(|s| s.since.is_some());
        let Some(whole) = members().map(|s| s.point).min() else { return };
        let ahead = |s: &&ShardState| s.point > whole;
        self.whole = whole;
        self.members = members().count();
        self.ahead = members().filter(ahead).count();
        self.open = members().filter(|s| counts(s)).count();
        self.open_ahead = members().filter(|s| counts(s)).filter(ahead).count();
        self.prefix = 0;
        if self.half_ahead() {
            self.median_at_ns = now_ns;
        }
    }

    fn half_ahead(&self) -> bool {
        2 * self.open_ahead >= self.open
    }

    /// A member's point moved from `before` on.
    pub(super) fn on_advance(&mut self, now_ns: u64, shards: &[ShardState], index: usize, before: CutPoint) {
        let state = &shards[index];
        if before > self.whole || state.point <= self.whole {
            return;
        }
        self.ahead += 1;
        if counts(state) && !self.half_ahead() {
            self.open_ahead += 1;
            if self.half_ahead() {
                self.median_at_ns = now_ns;
            }
        } else {
            self.open_ahead += usize::from(counts(state));
        }
        if self.ahead == self.members {
            self.waited_ns += now_ns.saturating_sub(self.median_at_ns);
            self.waits += 1;
            self.recount(now_ns, shards);
        }
    }

    /// How far cuts may be bound.
    pub(super) fn reached(&mut self, shards: &[ShardState]) -> Option<CutPoint> {
        if self.members == 0 {
            return None;
        }
        let whole = self.whole;
        let in_window = |s: &&ShardState| s.since.is_some_and(|w| w <= whole.window);
        let mut members = shards.iter().filter(in_window).skip(self.prefix);
        while members.next().is_some_and(|s| s.point > whole) {
            self.prefix += 1;
        }
        Some(CutPoint { prefix: self.prefix as u16, ..whole })
    }

    /// For how long cuts waited on average for their last report after half were in, since the last call, and how many.
    pub(super) fn take_wait(&mut self) -> (u64, u64) {
        let (waited, waits) = (core::mem::take(&mut self.waited_ns), core::mem::take(&mut self.waits));
        (waited / waits.max(1), waits)
    }
}
