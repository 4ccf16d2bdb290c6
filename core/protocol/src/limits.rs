//! Compile-time bounds. Everything else is configuration.

/// Most shards a cluster may have: the largest grant must fit one message.
pub const SHARDS_MAX: usize = 256;

/// Most members of a sequencer group.
pub const SEQUENCERS_MAX: usize = 5;

/// Most replicas of a shard, spares included.
pub const REPLICAS_MAX: usize = 8;

/// Most slots one shard may contribute to one cut.
pub const QUOTA_MAX: u32 = 1 << 20;

/// Most cuts in one window.
pub const WINDOW_CUTS_MAX: u32 = 1 << 20;

/// Largest record a configuration may allow, in bytes.
pub const RECORD_BYTES_LIMIT: usize = 64 << 20;

/// Most consecutive no-ops one log entry counts.
pub const NO_OPS_PER_ENTRY_MAX: u32 = u32::MAX;
