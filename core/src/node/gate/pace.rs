//! The pace at which a client may append: two token buckets, in the form of the time at which each would be empty again.
//!
//! What is too early stays in the client's ring until its time has come, so a client that is too fast is held back and
//! loses nothing.

use crate::access::Limits;

/// A client that paused may append this much of a second's worth at once, in nanoseconds.
const BURST_NS: u64 = 100_000_000;

/// One bucket: so many units a second.
#[derive(Debug)]
struct Bucket {
    units_per_s: u64,
    /// When all that was taken so far is paid for.
    paid_ns: u64,
}

impl Bucket {
    fn new(units_per_s: u64) -> Option<Bucket> {
        (units_per_s > 0).then_some(Bucket { units_per_s, paid_ns: 0 })
    }

    /// From when on something may be taken.
    fn free_ns(&self) -> u64 {
        self.paid_ns.saturating_sub(BURST_NS)
    }

    /// Takes units, on credit if there are not enough: a record may be larger than what a second allows.
    fn take(&mut self, now_ns: u64, units: u64) {
        let cost_ns = u128::from(units) * 1_000_000_000 / u128::from(self.units_per_s);
        self.paid_ns = self.paid_ns.max(now_ns).saturating_add(u64::try_from(cost_ns).unwrap_or(u64::MAX));
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Pace {
    appends: Option<Bucket>,
    bytes: Option<Bucket>,
}

impl Pace {
    /// The pace that limits allow; `None` where there is no limit.
    pub(super) fn new(limits: &Limits) -> Option<Box<Pace>> {
        let pace = Pace { appends: Bucket::new(limits.appends_per_s), bytes: Bucket::new(limits.bytes_per_s) };
        (pace.appends.is_some() || pace.bytes.is_some()).then(|| Box::new(pace))
    }

    /// When the next append may be taken.
    pub(super) fn free_ns(&self) -> u64 {
        [&self.appends, &self.bytes].into_iter().flatten().map(Bucket::free_ns).max().unwrap_or(0)
    }

    /// Counts an append that was taken.
    pub(super) fn take(&mut self, now_ns: u64, bytes: usize) {
        if let Some(bucket) = &mut self.appends {
            bucket.take(now_ns, 1);
        }
        if let Some(bucket) = &mut self.bytes {
            bucket.take(now_ns, bytes as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    /// Appends of so many bytes that are taken within so many seconds by a client that always has one more.
    fn taken(limits: Limits, bytes: usize, seconds: u64) -> u64 {
        let start_ns = 7 * SECOND_NS;
        let (mut pace, mut now_ns, mut count) = (Pace::new(&limits).unwrap(), start_ns, 0);
        loop {
            now_ns = now_ns.max(pace.free_ns());
            if now_ns >= start_ns + seconds * SECOND_NS {
                return count;
            }
            pace.take(now_ns, bytes);
            count += 1;
        }
    }

    #[test]
    fn a_client_in_a_hurry_gets_its_rate_and_one_burst() {
        // 100 a second, and a tenth of a second's worth and one more at once.
        let limits = Limits { appends_per_s: 100, ..Limits::default() };
        assert_eq!(taken(limits, 5, 10), 1000 + 10);
        let limits = Limits { bytes_per_s: 10_000, ..Limits::default() };
        assert_eq!(taken(limits, 100, 10), 1000 + 10);
        // The tighter of the two holds.
        let both = Limits { appends_per_s: 100, bytes_per_s: 1000, ..Limits::default() };
        assert_eq!(taken(both, 100, 10), 100 + 1);
    }

    #[test]
    fn a_record_larger_than_a_second_allows_passes_and_is_paid_for() {
        let limits = Limits { bytes_per_s: 10, ..Limits::default() };
        let mut pace = Pace::new(&limits).unwrap();
        assert_eq!(pace.free_ns(), 0);
        pace.take(SECOND_NS, 100);
        assert_eq!(pace.free_ns(), 11 * SECOND_NS - BURST_NS);
    }

    #[test]
    fn no_limits_are_no_pace() {
        assert!(Pace::new(&Limits { subscriptions_max: 5, ..Limits::default() }).is_none());
    }
}
