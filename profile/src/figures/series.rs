//! Exact percentiles: virtual time has no error that buckets could hide in.

use super::drive::{Run, Sample};

/// Latencies in nanoseconds, sorted.
#[derive(Clone, Debug, Default)]
pub struct Series(Vec<u64>);

impl Series {
    /// Of the samples of all runs.
    pub fn of(runs: &[&Run], latency_ns: impl Fn(&Sample) -> u64) -> Series {
        runs.iter().flat_map(|run| run.samples.iter().map(&latency_ns)).collect::<Vec<u64>>().into()
    }

    /// The mean, in milliseconds; NaN without samples.
    pub fn mean_ms(&self) -> f64 {
        self.0.iter().map(|ns| *ns as f64).sum::<f64>() / self.0.len() as f64 / 1e6
    }

    /// A percentile by nearest rank, in milliseconds; NaN without samples.
    pub fn percentile_ms(&self, percent: f64) -> f64 {
        let rank = (percent / 100.0 * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.clamp(1, self.0.len().max(1)) - 1).map_or(f64::NAN, |ns| *ns as f64 / 1e6)
    }
}

impl From<Vec<u64>> for Series {
    fn from(mut latencies_ns: Vec<u64>) -> Series {
        latencies_ns.sort_unstable();
        Series(latencies_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let series = Series::from((1..=200).rev().map(|ms| ms * 1_000_000).collect::<Vec<u64>>());
        assert_eq!(series.mean_ms(), 100.5);
        assert_eq!([50.0, 99.0, 100.0, 0.0].map(|p| series.percentile_ms(p)), [100.0, 198.0, 200.0, 1.0]);
        assert!(Series::default().percentile_ms(50.0).is_nan());
    }
}
