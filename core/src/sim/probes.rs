//! Named situations that a batch of runs must have reached: a simulator that never gets there proves nothing.

use std::collections::BTreeMap;

/// Situations that a batch of at least [`BATCH_SEEDS`] default seeds must reach.
pub const REQUIRED: [&str; 76] = [
    "fill by age",
    "fill by target",
    "prefix cut",
    "free cut",
    "grant",
    "grant stall",
    "connection lost during replication",
    "connection lost during order stream",
    "connection lost during client",
    "connection attempt failed",
    "region lap",
    "region full refusal",
    "no-op run split",
    "retry answered after reconnect",
    "late follower",
    "target at the end of a window",
    "pause longer than a tick",
    "client ring full",
    "outstanding limit reached",
    "gate queue full",
    "full transport",
    "target overtook an order entry",
    "wake-up between threads",
    "speculative delivery",
    "trimmed",
    "session replaced",
    "read answered",
    "tail answered",
    "idle log",
    "change of mode",
    "change of quotas",
    "change of members",
    "shard closed",
    "shard opened again",
    "free window ended early",
    "closed shard refusal",
    "change made",
    "change refused",
    "fill ahead of a target",
    "fill by the published timer",
    "straggler grounded",
    "fallback to free windows",
    "change of leader",
    "leader paused",
    "leader isolated",
    "leader hands over",
    "sequencer crash",
    "sequencer without memory",
    "backup dropped",
    "primary promoted",
    "promotion with appends outstanding",
    "late write of a fenced primary",
    "replica joined",
    "reborn replica joined",
    "deposed primary came back",
    "process died",
    "process died between two sends",
    "process died in silence",
    "partition",
    "partition in one direction",
    "pause of a suspect",
    "shard cut off",
    "aimed strike",
    "view change",
    "fail delivered",
    "append unknown",
    "unavailable told",
    "shard returned",
    "more than eight shards",
    "no backups",
    "process on disk died",
    "machine of a process died",
    "power lost everywhere",
    "members succeeded",
    "replica left",
    "replica waited for its disk",
];

/// A batch this large has to reach everything.
pub const BATCH_SEEDS: u64 = 1000;

/// Counts by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probes(BTreeMap<&'static str, u64>);

impl Probes {
    pub(super) fn add(&mut self, name: &'static str, count: u64) {
        if count > 0 {
            *self.0.entry(name).or_default() += count;
        }
    }

    /// Adds another run's counts.
    pub fn merge(&mut self, other: &Probes) {
        for (name, count) in &other.0 {
            self.add(name, *count);
        }
    }

    /// What was reached and how often.
    pub fn reached(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.0.iter().map(|(name, count)| (*name, *count))
    }

    /// Which required situations were not reached.
    pub fn missed(&self, required: &[&'static str]) -> Vec<&'static str> {
        required.iter().copied().filter(|name| !self.0.contains_key(name)).collect()
    }
}
