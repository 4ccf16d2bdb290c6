//! How many slots each shard gets in a window, from the rate at which records arrive; and the mode of the next window.
//!
//! A quota that is too small costs cuts, one that is too large costs no-ops; neither costs latency, because cuts follow
//! reports and not a clock. So a quota may be exceeded a little before it grows: a regular stream then has no no-ops
//! at all.

use super::Sequencer;
use super::members::Part;
use crate::limits::QUOTA_MAX;
use crate::types::{Lsn, Member, Ordering, WindowMode};

/// Thousandths of a record per tick by which arrivals may exceed a quota of one.
const MILLI_OVER: u64 = 1050;
/// Ticks between two decisions that make a sample.
const SAMPLE_TICKS: u64 = 8;
/// Most that a quota grows from one window to the next.
const GROWTH_MAX: u32 = 4;

/// Arrivals of one shard.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Arrivals {
    /// Records ever appended, as reported.
    total: u64,
    /// Of those, counted in samples.
    sampled: u64,
    /// Thousandths of a record per tick, smoothed.
    rate_milli: Option<u64>,
    /// What came before the first total is nobody's rate.
    unknown: bool,
}

impl Arrivals {
    /// Nothing is known yet of a shard that may have run for long.
    pub(super) fn unknown() -> Arrivals {
        Arrivals { unknown: true, ..Arrivals::default() }
    }

    pub(super) fn on_total(&mut self, records: u64) {
        self.total = self.total.max(records);
        if core::mem::take(&mut self.unknown) {
            self.sampled = self.total;
        }
    }

    /// Takes a sample. Growth shows sooner than decay: an average of three quarters and of one half.
    fn sample(&mut self, elapsed_ns: u64, tick_ns: u64) {
        let records = self.total - self.sampled;
        self.sampled = self.total;
        let now = (u128::from(records) * 1000 * u128::from(tick_ns) / u128::from(elapsed_ns.max(1))) as u64;
        self.rate_milli = Some(match self.rate_milli {
            None => now,
            Some(rate) if now > rate => rate + (now - rate) / 4 * 3,
            Some(rate) => rate - (rate - now) / 2,
        });
    }

    fn forget(&mut self) {
        (self.sampled, self.rate_milli) = (self.total, None);
    }

    /// The quota for the next window: kept while it fits, else what the rate needs.
    fn next_quota(&self, quota: u32) -> u32 {
        let Some(rate) = self.rate_milli else { return quota };
        let q = u64::from(quota);
        if 950 * q.saturating_sub(1) < rate && rate <= MILLI_OVER * q {
            return quota;
        }
        let needed = u32::try_from(rate.div_ceil(MILLI_OVER)).unwrap_or(QUOTA_MAX);
        needed.clamp(1, quota.saturating_mul(GROWTH_MAX).min(QUOTA_MAX))
    }
}

impl Sequencer {
    /// The mode of the window to grant next. `auto` goes free for a while when fixed cuts waited for their last
    /// report longer than a tick after half of them were in.
    pub(super) fn next_mode(&mut self) -> WindowMode {
        let (waited_ns, waits) = self.progress.take_wait();
        if self.config.ordering != Ordering::Auto {
            return self.config.ordering.window_mode();
        }
        let fixed = self.ledger.mode() == Some(WindowMode::Fixed);
        // One late report binds several cuts: the longer they wait, the fewer waits there are.
        let enough = waits >= u64::from(self.config.window_cuts / 16).max(1);
        if self.free_left == 0 && fixed && enough && waited_ns > self.config.tick_ns {
            self.free_left = self.config.ground_windows;
            self.stats.fallbacks += u64::from(self.free_left > 0);
        }
        if self.free_left == 0 {
            return WindowMode::Fixed;
        }
        self.free_left -= 1;
        WindowMode::Free
    }

    /// Fills `members` for the next window.
    pub(super) fn decide_quotas(&mut self, now_ns: u64, mode: WindowMode) {
        let elapsed_ns = self.decided_at_ns.map_or(0, |at| now_ns.saturating_sub(at));
        let sample = elapsed_ns >= SAMPLE_TICKS * self.config.tick_ns;
        if sample || self.decided_at_ns.is_none() {
            self.decided_at_ns = Some(now_ns);
        }
        self.members.clear();
        for at in 0..self.shards.len() {
            let first_lsn = self.ledger.granted_lsn(self.shards[at].shard);
            let backlog = self.backlog(at);
            if sample {
                let state = &mut self.shards[at];
                // What it took in while it was closed says nothing about what will come.
                if state.open {
                    state.arrivals.sample(elapsed_ns, self.config.tick_ns)
                } else {
                    state.arrivals.forget()
                }
            }
            let returned = self.move_part(now_ns, at, backlog);
            let state = &self.shards[at];
            if state.since.is_none() && state.part != Part::In {
                continue;
            }
            let drain = u32::try_from(backlog.div_ceil(self.config.window_cuts.into())).unwrap_or(QUOTA_MAX);
            let quota = match state.part {
                _ if mode == WindowMode::Free => 0,
                Part::In if !self.config.adaptive_quotas => state.configured,
                Part::In if returned => 1,
                Part::In => state.arrivals.next_quota(state.quota),
                // What it appends before it hears of this needs a place too.
                Part::Closing { .. } => drain.clamp(1, QUOTA_MAX),
                Part::Grounded { .. } | Part::Out => drain.min(QUOTA_MAX),
                Part::Failed => 0,
            };
            self.members.push(Member { shard: state.shard, quota, first_lsn, open: state.part == Part::In });
        }
    }

    /// Slots of a shard beyond what is granted, or bound when the newest window is free.
    pub(super) fn backlog(&self, at: usize) -> u64 {
        let state = &self.shards[at];
        let granted: Lsn = self.ledger.granted_lsn(state.shard);
        state.appended.0.saturating_sub(granted.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(rate_milli: u64) -> Arrivals {
        Arrivals { rate_milli: Some(rate_milli), ..Arrivals::default() }
    }

    #[test]
    fn quotas_follow_the_rate_with_hysteresis_and_bounds() {
        // (rate per tick in thousandths, quota before, quota after)
        for (rate, before, after) in [
            (10_000, 10, 10),
            (10_400, 10, 10), // a little over: cuts come a little sooner
            (10_600, 10, 11),
            (9_000, 10, 10), // a little under: 0.95 · 9 = 8.55 is the edge
            (8_550, 10, 9),
            (10_000, 11, 11),
            (9_400, 11, 9),
            (2_000, 2, 2),
            (900, 2, 1),
            (0, 10, 1), // a quiet shard goes to 1 at once when its average has
            (0, 1, 1),
            (100_000, 3, 12), // at most four times as much
            (1, 1, 1),
        ] {
            assert_eq!(at(rate).next_quota(before), after, "rate {rate}, quota {before}");
        }
        assert_eq!(Arrivals::default().next_quota(7), 7, "nothing is known yet");
    }

    #[test]
    fn averages_rise_fast_and_fall_slowly() {
        let mut arrivals = Arrivals::default();
        let mut total = 0;
        let mut rates = Vec::new();
        // 5 records a tick, then 10, then none; samples of 100 ticks of 1000 ns.
        for records in [500, 1000, 1000, 0, 0, 0] {
            total += records;
            arrivals.on_total(total);
            arrivals.on_total(total - 1);
            arrivals.sample(100_000, 1000);
            rates.push(arrivals.rate_milli.unwrap());
        }
        assert_eq!(rates, [5000, 8750, 9686, 4843, 2422, 1211]);
    }

    use alloc::vec::Vec;
}
