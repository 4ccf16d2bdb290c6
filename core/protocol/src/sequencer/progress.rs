//! Which cuts all members have reported, kept so that a report costs a few instructions and a cut one pass over the
//! members; and for how long cuts waited between their median and their last report.

use alloc::collections::VecDeque;

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

/// Answers that take less than a tick divided by this need no lead.
const LEAD_DIVISOR: u64 = 4;
/// Most ticks of lead.
const LEAD_TICKS_MAX: u64 = 4;

/// How long one shard takes to answer a target: the way there, the fill made durable, the way back.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Answers {
    /// The target it was last asked for and has not answered, and when.
    asked: Option<(CutPoint, u64)>,
    /// The longest time of late: shorter answers, which were on their way already, let it sink slowly.
    took_ns: u64,
}

impl Answers {
    pub(super) fn on_asked(&mut self, now_ns: u64, point: CutPoint) {
        self.asked.get_or_insert((point, now_ns));
    }

    pub(super) fn on_reached(&mut self, now_ns: u64, point: CutPoint) {
        if let Some((_, at_ns)) = self.asked.filter(|(asked, _)| *asked <= point) {
            let took_ns = now_ns.saturating_sub(at_ns);
            self.took_ns = took_ns.max(self.took_ns - (self.took_ns - self.took_ns.min(took_ns)) / 64);
            self.asked = None;
        }
    }

    /// The lead that would have let it answer in time.
    pub(super) fn lead_ns(&self, tick_ns: u64) -> u32 {
        if self.took_ns < tick_ns / LEAD_DIVISOR {
            return 0;
        }
        u32::try_from(self.took_ns.min(LEAD_TICKS_MAX * tick_ns)).unwrap_or(u32::MAX)
    }
}

/// Targets remembered; at most sixteen a tick are.
const ASKED_MAX: usize = 256;

/// When shards were asked for which cuts.
#[derive(Debug, Default)]
pub(super) struct Asked(VecDeque<(CutPoint, u64)>);

impl Asked {
    pub(super) fn on_target(&mut self, now_ns: u64, tick_ns: u64, target: CutPoint) {
        if self.0.back().is_some_and(|(point, at)| *point >= target || now_ns < at + tick_ns / 16) {
            return;
        }
        if self.0.len() == ASKED_MAX {
            self.0.pop_front();
        }
        self.0.push_back((target, now_ns));
    }

    /// Since when a shard at this point has been asked for more; `None`: it has not.
    pub(super) fn since_ns(&self, point: CutPoint) -> Option<u64> {
        self.0.get(self.0.partition_point(|(asked, _)| *asked <= point)).map(|(_, at)| *at)
    }
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
