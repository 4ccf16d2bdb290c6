//! When a shard fills cuts with no-ops, and how far. `PROTOCOL.md` §4, *Fill*.
//!
//! No-ops cost slots and an entry of 64 bytes, never a round trip: what is filled at once is reported at once. They are
//! avoided only where records are about to take the slots anyway.

use super::{FillRoom, Shard, ShardOut};
use crate::mutant::{Mutant, planted};
use crate::types::{Beat, CutPoint, Lsn};
use crate::wire::node::Target;

/// Reports later than the others' by less than a tick divided by this are not late.
const LATE_DIVISOR: u64 = 8;
/// Targets expected after one for which the shard was late.
const EXPECT_TARGETS: u32 = 16;

impl Shard {
    /// The sequencer asks for the report of a cut: fill up to it. Harmless when late, repeated or reordered.
    pub fn on_target(&mut self, now_ns: u64, target: Target, out: &mut impl ShardOut) {
        if target <= self.target {
            return;
        }
        let was_closed = self.closed();
        self.target = target;
        self.expect_next(now_ns);
        self.fill_to_target(now_ns, out);
        if self.closed() && !was_closed {
            self.send_report(now_ns, out);
        }
    }

    /// Where answers to targets take a good part of a tick, a shard that is often late does not wait to be asked: targets
    /// come about a tick apart, so it fills up to the next one soon enough for its report to arrive with the others'. Late
    /// is who lacks slots when a target arrives, or has got them after it would have had to report.
    fn expect_next(&mut self, now_ns: u64) {
        let allowed_ns = u64::from(self.target.lead_ns).saturating_sub(self.config.tick_ns / LATE_DIVISOR);
        let late_cut = |(end, at_ns): (Lsn, u64)| {
            Some(end) == self.ledger.lsn_at(self.config.shard, self.target.point) && at_ns + allowed_ns > now_ns
        };
        let late = self.target_end().is_some() || self.completed.is_some_and(late_cut);
        self.expecting = if late { EXPECT_TARGETS } else { self.expecting.saturating_sub(1) };
        let (tick_ns, lead_ns) = (self.config.tick_ns, u64::from(self.target.lead_ns));
        if lead_ns == 0 || self.expecting == 0 || self.config.beat != Beat::Target {
            self.expected = None;
            return;
        }
        let ticks = lead_ns / tick_ns + 1;
        let at_ns = now_ns + ticks * tick_ns - lead_ns;
        self.expected = self.ledger.point_after(self.target.point, ticks).map(|point| (point, at_ns));
    }

    /// Says how much room the log region has left for fills.
    pub fn set_room(&mut self, room: FillRoom) {
        let had_none = core::mem::replace(&mut self.room, room) == FillRoom::None;
        if had_none && room != FillRoom::None && self.target_end().is_some() {
            // What was asked for meanwhile is not asked for again.
            self.fill_at_ns = Some(0);
        }
    }

    fn may_fill(&self) -> bool {
        !self.failed && self.room != FillRoom::None
    }

    /// After a grant: a closed shard gets its slots out of the way, an open one resumes its target (L1).
    pub(super) fn fill_when_granted(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        if self.closed && self.may_fill() && self.fixed_end > self.appended {
            self.stats.fills_by_target += 1;
            self.fill(now_ns, self.fixed_end, out);
        }
        if planted(Mutant::ForgetTheTargetAtAnEdge) {
            return;
        }
        self.fill_to_target(now_ns, out);
    }

    /// Slots that the target asks for and that are granted, if they are not all appended. At an edge without a grant
    /// the target stays.
    fn target_end(&self) -> Option<Lsn> {
        self.missing(self.target.point)
    }

    fn missing(&self, point: CutPoint) -> Option<Lsn> {
        let point = point.min(self.ledger.granted_point());
        self.ledger.lsn_at(self.config.shard, point).filter(|end| *end > self.appended)
    }

    /// Fills up to the target: at once when more is missing than can be expected within `fill_wait_ns`, else then.
    fn fill_to_target(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        let Some(end) = self.target_end().filter(|_| self.may_fill()) else {
            self.fill_at_ns = None;
            return;
        };
        let expected_ns = (end.0 - self.appended.0).saturating_mul(self.gap_ns);
        let may_wait = self.config.beat == Beat::Target && !self.closed();
        let wait_ns = if may_wait { self.config.fill_wait_ns } else { 0 };
        if expected_ns <= wait_ns && self.fill_at_ns.is_none_or(|at| at > now_ns) {
            self.fill_at_ns.get_or_insert(now_ns + wait_ns);
            return;
        }
        let end = if self.room == FillRoom::Few { self.fixed_end } else { end };
        self.stats.fills_by_target += 1;
        self.fill(now_ns, end, out);
    }

    /// Appends no-ops up to slot `end`, as one entry.
    fn fill(&mut self, now_ns: u64, end: Lsn, out: &mut impl ShardOut) {
        let first = self.appended;
        let count = u32::try_from(end.0 - first.0).unwrap_or(u32::MAX);
        self.stats.no_ops += u64::from(count);
        self.advance_appended(u64::from(count));
        // A fill ends at the end of a cut.
        self.partial_since_ns = None;
        self.fill_at_ns = None;
        out.no_ops(first, count);
        self.after_append(now_ns, out);
    }

    /// When the next fill is due if nothing arrives before.
    pub(super) fn fill_deadline_ns(&self) -> Option<u64> {
        if !self.may_fill() {
            return None;
        }
        let by_cut = match self.config.beat {
            Beat::Target => self.aged_at_ns(),
            Beat::Paper { .. } => {
                (self.appended < self.fixed_end).then(|| self.advanced_at_ns + self.config.tick_ns * 3 / 2)
            }
        };
        let expected = self.expected.map(|(_, at)| at);
        by_cut.into_iter().chain(self.fill_at_ns).chain(expected).min()
    }

    /// When the cut being filled holds a record that has waited long enough: a tick, or a pause of the writers.
    /// Beyond the grants there is no cut to fill yet; the grant comes back here.
    fn aged_at_ns(&self) -> Option<u64> {
        let since_ns = self.partial_since_ns.filter(|_| self.cut_end.is_some())?;
        let aged_ns = since_ns + self.config.tick_ns;
        let pause_ns = self.gap_ns * u64::from(self.config.pause_gaps);
        Some(if pause_ns == 0 { aged_ns } else { aged_ns.min(self.appended_at_ns + pause_ns) })
    }

    /// Fills what is due.
    pub(super) fn fill_by_time(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        if self.fill_at_ns.is_some_and(|at| at <= now_ns) {
            self.fill_to_target(now_ns, out);
        }
        if let Some((point, _)) = self.expected.filter(|(_, at)| *at <= now_ns) {
            self.expected = None;
            if let Some(end) = self.missing(point).filter(|_| self.may_fill()) {
                self.stats.fills_ahead += 1;
                self.fill(now_ns, end, out);
            }
        }
        if self.fill_deadline_ns().is_none_or(|at| at > now_ns) {
            return;
        }
        if self.cut_end.is_none_or(|end| self.appended >= end) {
            self.find_cut();
        }
        let Some(end) = self.cut_end else { return };
        match self.config.beat {
            Beat::Target => self.stats.fills_by_age += 1,
            Beat::Paper { .. } => {
                self.stats.fills_by_timer += 1;
                self.advanced_at_ns = now_ns;
            }
        }
        self.fill(now_ns, end, out);
    }
}
