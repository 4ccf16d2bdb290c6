//! The published measurements that figures stand beside: SpecLog and its system Belfast (OSDI 2025), and Scalog (NSDI 2020)
//! as measured there. 4 KiB records, 1 ms tick, windows of 100 cuts, a primary and a backup, ten writers of 1000 records/s
//! per shard. Milliseconds.

/// Computation, Scalog's and Belfast's end-to-end latency at 4 shards.
pub const COMPUTE: [(f64, f64, f64); 9] = [
    (0.1, 3.51, 3.38),
    (0.5, 4.20, 3.58),
    (1.0, 5.00, 3.50),
    (1.5, 6.23, 3.83),
    (2.0, 6.72, 4.36),
    (2.5, 7.32, 5.04),
    (3.0, 8.13, 5.79),
    (4.0, 9.39, 7.21),
    (5.0, 11.23, 8.69),
];

/// Shards, Scalog's and Belfast's delivery latency.
pub const DELIVERY: [(u16, f64, f64); 2] = [(2, 3.71, 1.17), (4, 3.96, 1.12)];

/// Shards, Scalog's and Belfast's append latency.
#[expect(clippy::approx_constant, reason = "3.14 ms were measured")]
pub const APPEND: [(u16, f64, f64); 3] = [(2, 3.07, 2.86), (4, 3.14, 3.28), (10, 3.07, 3.25)];

/// Shards, Scalog's and Belfast's end-to-end latency at a computation of 1.2 ms.
pub const SHARDS: [(u16, f64, f64); 5] =
    [(2, 5.08, 3.22), (4, 5.05, 3.36), (6, 5.16, 3.43), (8, 5.25, 3.56), (10, 5.05, 3.86)];

/// 10 shards, a computation of 1.2 ms: median, 95th and 99th percentile of Scalog and of Belfast.
pub const TAILS: [(f64, f64, f64); 3] = [(50.0, 5.10, 3.38), (95.0, 6.33, 5.18), (99.0, 7.75, 7.30)];

/// 40 emulated shards: computation, Scalog, Belfast.
pub const EMULATED: [(f64, f64, f64); 2] = [(1.2, 5.20, 4.32), (2.0, 6.40, 4.32)];

/// Cuts in a window and Belfast's end-to-end latency.
pub const WINDOW: [(u32, f64); 7] =
    [(5, 4.33), (10, 4.00), (20, 4.15), (50, 3.68), (100, 3.41), (200, 4.04), (300, 4.32)];

/// Peak after a burst of 30 records on a shard of 3000 records/s: Scalog, Belfast, Belfast without its lag fix.
pub const BURST: [f64; 3] = [6.3, 6.2, 9.4];

/// From the first late report until a straggler's quota is 0.
pub const STRAGGLER_MS: f64 = 140.0;

/// Without confirmations after a shard was lost, of two and with windows of 100 cuts.
pub const SHARD_LOST_MS: f64 = 55.5;
