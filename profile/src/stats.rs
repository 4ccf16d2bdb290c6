//! Histograms of latencies: recorded in nanoseconds, merged as histograms, summarised in microseconds.
//!
//! Percentiles are never averaged: those of several clients or repetitions come from the merged histogram.

use hdrhistogram::Histogram;
use serde::Serialize;

/// Longest latency told apart, in nanoseconds; longer ones are recorded as this one.
pub const LATENCY_MAX_NS: u64 = 60_000_000_000;
/// Significant decimal digits that are kept.
pub const DIGITS: u8 = 3;

/// One kind of latency. All buckets exist from the start, so that recording neither allocates nor fails.
#[derive(Clone, Debug)]
pub struct Series(Histogram<u64>);

impl Default for Series {
    fn default() -> Series {
        Series::new()
    }
}

impl Series {
    /// An empty series.
    pub fn new() -> Series {
        let mut histogram = Histogram::new_with_bounds(1, LATENCY_MAX_NS, DIGITS).expect("constant bounds are valid");
        histogram.auto(false);
        Series(histogram)
    }

    /// Records a latency in nanoseconds.
    #[inline]
    pub fn record_ns(&mut self, latency_ns: u64) {
        self.0.saturating_record(latency_ns.min(LATENCY_MAX_NS));
    }

    /// Records the time from `from_ns` to `to_ns`. Times of one clock do not run backwards; should they, it counts as 0.
    #[inline]
    pub fn record_between(&mut self, from_ns: u64, to_ns: u64) {
        self.record_ns(to_ns.saturating_sub(from_ns));
    }

    /// Adds all that `other` has recorded.
    pub fn merge(&mut self, other: &Series) {
        self.0.add(&other.0).expect("all series have the same bounds");
    }

    /// How many latencies were recorded.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The mean in microseconds; 0 when empty.
    pub fn mean_us(&self) -> f64 {
        if self.0.is_empty() { 0.0 } else { self.0.mean() / 1e3 }
    }

    /// The latency in microseconds that the share `quantile` (0 to 1) of all does not exceed; 0 when empty.
    pub fn quantile_us(&self, quantile: f64) -> f64 {
        self.0.value_at_quantile(quantile) as f64 / 1e3
    }

    /// The longest in microseconds; 0 when empty.
    pub fn max_us(&self) -> f64 {
        self.0.max() as f64 / 1e3
    }

    /// The figures that reports print.
    pub fn summary(&self) -> Summary {
        Summary {
            mean_us: self.mean_us(),
            p50_us: self.quantile_us(0.5),
            p90_us: self.quantile_us(0.9),
            p99_us: self.quantile_us(0.99),
            p999_us: self.quantile_us(0.999),
            max_us: self.max_us(),
            count: self.count(),
        }
    }

    /// The histogram itself, in nanoseconds, for writers of standard formats.
    pub fn histogram(&self) -> &Histogram<u64> {
        &self.0
    }
}

/// A series in figures. All but `count` are microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Mean.
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p999_us: f64,
    /// Longest.
    pub max_us: f64,
    /// How many were recorded.
    pub count: u64,
}

/// All that one client measures in one run. Latencies run from the *intended* send time unless they say otherwise, so
/// that a stall counts against every record that should have been sent during it.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Records whose intended send time lies before this one (nanoseconds) belong to the warm-up: they are counted in
    /// the totals below and in no series.
    pub from_ns: u64,
    /// Intended send → acknowledgement (position bound) at the writer.
    pub append: Series,
    /// Actual send → acknowledgement: service time, blind to stalls before the send.
    pub append_service: Series,
    /// Intended send → record in the consumer's hands, speculative or not.
    pub delivery: Series,
    /// Actual send → record in the consumer's hands: service time.
    pub delivery_service: Series,
    /// Intended send → consumer knows the record's position is bound.
    pub confirm: Series,
    /// Intended send → output may be released: the later of confirm and computation done.
    pub e2e: Series,
    /// Record in hand → consumer knows its position is bound; 0 for records that were bound when they came. The mean
    /// is the order path O where delivery is speculative, because delivery + this = confirm, record by record.
    pub confirm_wait: Series,
    /// Record in hand → its computation starts.
    pub queue: Series,
    /// Computation starts → done, once per record of a batch.
    pub compute: Series,
    /// The totals of the run.
    pub totals: Totals,
}

/// Counts of one run, warm-up included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Records handed to the log; one that moved to another shard is counted again.
    pub sent: u64,
    /// Records acknowledged.
    pub acknowledged: u64,
    /// Records refused for good. They are in no series.
    pub refused: u64,
    /// Records that one shard refused and that were sent to another instead, keeping their intended times.
    pub moved: u64,
    /// Times the log pushed back.
    pub pushed_back: u64,
    /// Records delivered, each delivery counted.
    pub delivered: u64,
    /// Of these, before their position was bound.
    pub speculative: u64,
    /// Records whose outputs were released.
    pub released: u64,
    /// Failures of speculation that the consumer was told of.
    pub fails: u64,
    /// Delivered records that these took back.
    pub failed: u64,
    /// Delivered records of other clients or runs; not measured.
    pub foreign: u64,
    /// Lost connections and failed attempts to connect.
    pub disconnects: u64,
    /// Records due that were not sent, acknowledged, confirmed and released when the time for draining had passed.
    pub unfinished: u64,
}

impl Totals {
    fn merge(&mut self, other: &Totals) {
        self.sent += other.sent;
        self.acknowledged += other.acknowledged;
        self.refused += other.refused;
        self.moved += other.moved;
        self.pushed_back += other.pushed_back;
        self.delivered += other.delivered;
        self.speculative += other.speculative;
        self.released += other.released;
        self.fails += other.fails;
        self.failed += other.failed;
        self.foreign += other.foreign;
        self.disconnects += other.disconnects;
        self.unfinished += other.unfinished;
    }
}

impl Measured {
    /// Nothing measured yet; series take records intended at `from_ns` or later.
    pub fn new(from_ns: u64) -> Measured {
        Measured { from_ns, ..Measured::default() }
    }

    /// Whether a record belongs to the series, by its intended send time in nanoseconds.
    #[inline]
    pub fn covers(&self, intended_ns: u64) -> bool {
        intended_ns >= self.from_ns
    }

    /// Adds what another client or repetition has measured.
    pub fn merge(&mut self, other: &Measured) {
        self.append.merge(&other.append);
        self.append_service.merge(&other.append_service);
        self.delivery.merge(&other.delivery);
        self.delivery_service.merge(&other.delivery_service);
        self.confirm.merge(&other.confirm);
        self.e2e.merge(&other.e2e);
        self.confirm_wait.merge(&other.confirm_wait);
        self.queue.merge(&other.queue);
        self.compute.merge(&other.compute);
        self.totals.merge(&other.totals);
    }
}

/// Median, least and greatest of a few figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Median: the mean of the middle two when there is an even number.
    pub median: f64,
    /// Least.
    pub min: f64,
    /// Greatest.
    pub max: f64,
    /// How many there were.
    pub count: usize,
}

impl Spread {
    /// Of `values`, none of which may be NaN; `None` when there are none.
    pub fn of(values: &[f64]) -> Option<Spread> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Some(Spread { median: low.midpoint(high), min, max, count: sorted.len() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_close(actual: f64, expected: f64) -> bool {
        (actual - expected).abs() <= expected * 0.001
    }

    #[test]
    fn a_summary_is_in_microseconds() {
        let mut series = Series::new();
        (1..=1000).for_each(|us| series.record_ns(us * 1000));
        let summary = series.summary();
        assert!(is_close(summary.mean_us, 500.5), "{summary:?}");
        assert!(is_close(summary.p50_us, 500.0) && is_close(summary.p90_us, 900.0), "{summary:?}");
        assert!(is_close(summary.p99_us, 990.0) && is_close(summary.p999_us, 999.0), "{summary:?}");
        assert!(is_close(summary.max_us, 1000.0) && summary.count == 1000, "{summary:?}");
    }

    #[test]
    fn latencies_beyond_the_bounds_saturate() {
        let mut series = Series::new();
        series.record_ns(0);
        series.record_ns(u64::MAX);
        series.record_between(9, 5);
        assert_eq!(series.count(), 3);
        assert!(is_close(series.max_us(), 60e6), "{}", series.max_us());
        assert_eq!(Series::new().summary(), Summary::default());
    }

    #[test]
    fn percentiles_come_from_the_merged_histogram() {
        let (mut quick, mut slow) = (Measured::new(0), Measured::new(0));
        (0..99).for_each(|_| quick.delivery.record_ns(100_000));
        slow.delivery.record_ns(9_900_000);
        slow.totals = Totals { delivered: 1, failed: 2, ..Totals::default() };
        quick.totals.delivered = 99;
        quick.merge(&slow);
        // Averaging the two medians would give 5000.
        assert!(is_close(quick.delivery.quantile_us(0.5), 100.0));
        assert!(is_close(quick.delivery.quantile_us(0.999), 9900.0));
        assert!(is_close(quick.delivery.mean_us(), 198.0));
        assert_eq!((quick.totals.delivered, quick.totals.failed), (100, 2));
    }

    #[test]
    fn a_spread_has_the_median_between_least_and_greatest() {
        assert_eq!(Spread::of(&[]), None);
        assert_eq!(Spread::of(&[3.0, 1.0, 2.5]), Some(Spread { median: 2.5, min: 1.0, max: 3.0, count: 3 }));
        assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]).map(|s| s.median), Some(2.5));
    }
}
