//! The section `[policy]`: how the ordering adapts. Times are in ticks, so that they need no change when the tick does.

use std::fmt;

use antelog_protocol::Beat;
use serde::Deserialize;

use super::{ConfigError, wrong};

/// Keys of `[policy]`. All concern fixed windows, but `ground_windows`, which `auto` uses too.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyConfig {
    /// `target`: cuts are filled on demand. `paper` and `paper-without-lag-fix`: by the published timer, for comparison.
    #[serde(deserialize_with = "beat")]
    pub beat: Beat,
    /// Quotas follow arrival rates; otherwise they stay as configured for each shard.
    pub adaptive_quotas: bool,
    /// How long a fill that another shard's progress asks for may wait for records that are likely to come meanwhile.
    pub fill_wait_ticks: f64,
    /// A cut is filled once no record has come for this many times the interval its quota stands for; 0: only when
    /// its first record is a tick old.
    pub pause_gaps: u32,
    /// Shards are asked to catch up at most this often.
    pub target_pace_ticks: f64,
    /// A cut that only adds shards to the last one follows it after at least this time.
    pub prefix_pace_ticks: f64,
    /// A shard that has not caught up after this time, while most have, is grounded.
    pub late_ticks: u32,
    /// Windows for which a straggler is grounded, and for which `auto` grants free windows; 0: never.
    pub ground_windows: u32,
}

impl Default for PolicyConfig {
    fn default() -> PolicyConfig {
        PolicyConfig {
            beat: Beat::Target,
            adaptive_quotas: true,
            fill_wait_ticks: 0.1,
            pause_gaps: 8,
            target_pace_ticks: 0.02,
            prefix_pace_ticks: 0.125,
            late_ticks: 4,
            ground_windows: 5,
        }
    }
}

impl PolicyConfig {
    /// A time in nanoseconds.
    pub fn ns(ticks: f64, tick_ns: u64) -> u64 {
        (ticks * tick_ns as f64).round() as u64
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        for (key, ticks) in [
            ("fill_wait_ticks", self.fill_wait_ticks),
            ("target_pace_ticks", self.target_pace_ticks),
            ("prefix_pace_ticks", self.prefix_pace_ticks),
        ] {
            if !(0.0..=10.0).contains(&ticks) {
                return Err(wrong(format!("policy.{key} must be 0 to 10, not {ticks}")));
            }
        }
        if !(1..=1_000_000).contains(&self.late_ticks) {
            return Err(wrong(format!("policy.late_ticks must be 1 to 1000000, not {}", self.late_ticks)));
        }
        if self.ground_windows > 1_000_000 || self.pause_gaps > 1_000_000 {
            return Err(wrong("policy.ground_windows and policy.pause_gaps must be at most 1000000"));
        }
        Ok(())
    }
}

fn beat<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Beat, D::Error> {
    let name = String::deserialize(deserializer)?;
    Beat::from_name(&name).ok_or_else(|| {
        serde::de::Error::custom(format!("unknown beat '{name}', expected target, paper or paper-without-lag-fix"))
    })
}

impl fmt::Display for PolicyConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n[policy]\nbeat = \"{}\"\nadaptive_quotas = {}", self.beat.name(), self.adaptive_quotas)?;
        writeln!(f, "fill_wait_ticks = {:?}\npause_gaps = {}", self.fill_wait_ticks, self.pause_gaps)?;
        writeln!(f, "target_pace_ticks = {:?}", self.target_pace_ticks)?;
        writeln!(f, "prefix_pace_ticks = {:?}\nlate_ticks = {}", self.prefix_pace_ticks, self.late_ticks)?;
        writeln!(f, "ground_windows = {}", self.ground_windows)
    }
}
