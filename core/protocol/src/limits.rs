//! Compile-time bounds. Everything else is configuration.

/// Most shards a cluster may have: the largest grant must fit one message.
pub const SHARDS_MAX: usize = 256;

/// Most members of a sequencer group.
pub const SEQUENCERS_MAX: usize = 5;

/// Most replicas of a shard, spares included.
pub const REPLICAS_MAX: usize = 8;

/// Most slots one shard may contribute to one cut.
pub const QUOTA_MAX: u32 = 1 << 20;

/// No honest position, lsn, index or window reaches this: at ten million slots a second it takes 57 years. What is larger is
/// refused where it is read, so that arithmetic with what was read does not overflow.
pub const NUMBER_MAX: u64 = 1 << 54;

/// Most cuts one grant opens: 500 years of the shortest tick, and few enough that sums of grants do not overflow.
pub const GRANT_CUTS_MAX: u64 = 1 << 44;

/// Most cuts in one window.
pub const WINDOW_CUTS_MAX: u32 = 1 << 20;

/// Largest record a configuration may allow, in bytes.
pub const RECORD_BYTES_LIMIT: usize = 64 << 20;

/// Most consecutive no-ops one log entry counts.
pub const NO_OPS_PER_ENTRY_MAX: u32 = u32::MAX;
