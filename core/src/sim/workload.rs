//! What writers do: patterns of appends over time, with record sizes that fit the run's knobs.

use super::knobs::{Knobs, Sizes};
use super::rng::Rng;

/// When a writer appends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pattern {
    /// One record after another at equal distances.
    Steady { gap_ns: u64 },
    /// At random distances.
    Poisson { gap_ns: u64 },
    /// So many at once, then silence.
    Bursts { size: u32, gap_ns: u64 },
    /// Silence, then everything.
    Late { size: u32 },
    /// So many outstanding, the next one a while after an answer.
    Closed { window: u32, think_ns: u64 },
    /// One at a time, each to the next shard after the answer to the one before: what linearizability is about.
    Sequential { think_ns: u64 },
}

/// How a writer chooses shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    One(u16),
    Next,
    Any,
}

/// One writer of a client.
#[derive(Debug)]
pub(super) struct Writer {
    pattern: Pattern,
    choice: Choice,
    shards: u16,
    next_shard: u16,
    /// When the next record is due.
    next_ns: u64,
    /// When a record that was pushed back is tried again.
    retry_ns: u64,
    /// Records that are due.
    owed: u32,
    /// Records without an answer.
    outstanding: Vec<u32>,
    ended: bool,
    sizes: Sizes,
    record_bytes_max: u64,
}

impl Writer {
    /// Draws a writer that takes its share of the load.
    pub(super) fn draw(knobs: &Knobs, rng: &mut Rng, writers: u64) -> Writer {
        let total = knobs.load.rate_per_s * u64::from(knobs.shards);
        let gap_ns = (1_000_000_000 * writers / total.max(1)).max(1);
        let records = (knobs.load.load_ns / gap_ns).clamp(1, 2_000);
        let burst = rng.range(2, 40).min(records.max(2)) as u32;
        let pattern = match rng.below(10) {
            0 | 1 => Pattern::Steady { gap_ns },
            2 | 3 => Pattern::Poisson { gap_ns },
            4 => Pattern::Bursts { size: burst, gap_ns: gap_ns * u64::from(burst) },
            5 => Pattern::Late { size: records.min(400) as u32 },
            6 => Pattern::Steady { gap_ns: gap_ns * 20 },
            7 => Pattern::Closed { window: rng.range(1, 32) as u32, think_ns: gap_ns },
            _ => Pattern::Sequential { think_ns: rng.pick(&[0, 0, gap_ns]) },
        };
        let choice = match (pattern, rng.below(3)) {
            (Pattern::Sequential { .. }, _) => Choice::Next,
            (_, 0) => Choice::One(rng.below(knobs.shards.into()) as u16),
            (_, 1) => Choice::Next,
            _ => Choice::Any,
        };
        let first_ns = match pattern {
            Pattern::Late { .. } => rng.range(knobs.load.load_ns / 3, knobs.load.load_ns),
            _ => rng.below(knobs.load.load_ns / 4 + 1),
        };
        Writer {
            pattern,
            choice,
            shards: knobs.shards,
            next_shard: rng.below(knobs.shards.into()) as u16,
            next_ns: first_ns,
            retry_ns: 0,
            owed: 0,
            outstanding: Vec::new(),
            ended: false,
            sizes: knobs.load.sizes,
            record_bytes_max: knobs.record_bytes_max.into(),
        }
    }

    /// Notes what has become due; returns whether a record is to be appended now.
    pub(super) fn due(&mut self, now_ns: u64, rng: &mut Rng) -> bool {
        if self.owed > 0 {
            return now_ns >= self.retry_ns;
        }
        while now_ns >= self.next_ns && self.owed < 1_000 {
            let (owed, gap_ns) = match self.pattern {
                Pattern::Steady { gap_ns } => (1, gap_ns),
                Pattern::Poisson { gap_ns } => (1, rng.gap(gap_ns).max(1)),
                Pattern::Bursts { size, gap_ns } => (size, gap_ns),
                Pattern::Late { size } => (size, u64::MAX / 2),
                // These go on when an answer comes.
                Pattern::Closed { window, .. } => (window.saturating_sub(self.outstanding.len() as u32), u64::MAX / 2),
                Pattern::Sequential { .. } => (u32::from(self.outstanding.is_empty()), u64::MAX / 2),
            };
            self.owed += owed;
            self.next_ns = self.next_ns.saturating_add(gap_ns);
        }
        self.owed > 0
    }

    /// The shard and size of the next record.
    pub(super) fn choose(&mut self, rng: &mut Rng) -> (u16, usize) {
        let shard = match self.choice {
            Choice::One(shard) => shard,
            Choice::Next => self.next_shard,
            Choice::Any => rng.below(self.shards.into()) as u16,
        };
        let max = self.record_bytes_max;
        let len = match (self.sizes, rng.below(10)) {
            (Sizes::Tiny, _) => rng.range(0, max),
            (Sizes::Mixed, 0) => 0,
            (Sizes::Mixed, 1..=7) => rng.range(1, max.min(512)),
            (Sizes::Mixed, _) => rng.range(1, max),
            (Sizes::Large, _) => rng.range(max / 2, max),
        };
        (shard, len as usize)
    }

    /// The session took the record.
    pub(super) fn taken(&mut self, record: u32) {
        self.owed -= 1;
        self.outstanding.push(record);
        self.next_shard = (self.next_shard + 1) % self.shards;
    }

    /// The session did not take it: try again at this time.
    pub(super) fn pushed_back(&mut self, until_ns: u64) {
        self.retry_ns = until_ns;
    }

    /// When it has something to do.
    pub(super) fn at_ns(&self) -> u64 {
        if self.owed > 0 { self.retry_ns } else { self.next_ns }
    }

    /// A record was answered; some patterns go on then.
    pub(super) fn answered(&mut self, now_ns: u64, record: u32) {
        let Some(at) = self.outstanding.iter().position(|r| *r == record) else { return };
        self.outstanding.swap_remove(at);
        if let Pattern::Closed { think_ns, .. } | Pattern::Sequential { think_ns } = self.pattern
            && self.owed == 0
            && !self.ended
        {
            self.next_ns = now_ns + think_ns;
        }
    }

    /// Its session is gone, and with it the answers.
    pub(super) fn forget(&mut self, now_ns: u64) {
        self.outstanding.clear();
        if matches!(self.pattern, Pattern::Closed { .. } | Pattern::Sequential { .. }) {
            self.next_ns = now_ns;
        }
    }

    /// Nothing more is appended.
    pub(super) fn end(&mut self) {
        (self.owed, self.next_ns, self.ended) = (0, u64::MAX, true);
    }
}
