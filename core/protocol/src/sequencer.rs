//! The sequencer's policy: reports in; grants, cuts and targets out.
//!
//! It decides from committed entries and reports only. A proposal takes effect when it comes back through
//! [`Sequencer::on_committed`], so a group of one and a replicated group run the same code; at most one proposal is in
//! flight and newer decisions coalesce behind it. `PROTOCOL.md` §5.

use alloc::vec::Vec;

use crate::ledger::{Applied, Contradiction, Ledger, grant_head};
use crate::limits::{QUOTA_MAX, SHARDS_MAX, WINDOW_CUTS_MAX};
use crate::types::{CutPoint, Lsn, Member, Ordering, ShardId, WindowMode};
use crate::wire::node::{Report, Target};
use crate::wire::order::{ORDER_ENTRY_BYTES_MAX, OrderEntry, encode_cut, encode_free_cut, encode_grant};

/// Run-time options of the sequencer.
#[derive(Clone, Debug)]
pub struct SequencerConfig {
    /// The ordering tick in nanoseconds.
    pub tick_ns: u64,
    /// When the sequencer's free ticks fall, as an offset into the tick, in nanoseconds.
    pub tick_phase_ns: u64,
    /// Cuts in a window (`W`).
    pub window_cuts: u32,
    /// How positions are bound.
    pub ordering: Ordering,
    /// Shards in id order, with the quota of each in fixed windows.
    pub quotas: Vec<(ShardId, u32)>,
    /// Cuts of free windows remembered by the ledger.
    pub free_cuts_max: usize,
}

/// What the sequencer makes the world do.
pub trait SequencerOut {
    /// Append the entry to the order log; when committed it comes back through [`Sequencer::on_committed`].
    fn propose(&mut self, entry: &[u8]);
    /// Tell a shard's primary its target. Newest wins; may be lost.
    fn target(&mut self, shard: ShardId, target: Target);
}

#[derive(Clone, Copy, Debug)]
struct ShardState {
    shard: ShardId,
    quota: u32,
    point: CutPoint,
    durable: Lsn,
    /// Reported since the last free cut.
    fresh: bool,
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequencerStats {
    /// Reports taken.
    pub reports: u64,
    /// Cuts committed.
    pub cuts: u64,
    /// Grants committed.
    pub grants: u64,
    /// Targets sent.
    pub targets: u64,
}

/// The state of the leader.
#[derive(Debug)]
pub struct Sequencer {
    config: SequencerConfig,
    ledger: Ledger,
    shards: Vec<ShardState>,
    /// The highest cut that any shard has reported.
    target: Target,
    in_flight: bool,
    next_tick_ns: Option<u64>,
    tick_due: bool,
    /// Reused for vectors of free cuts and members of grants, so that deciding allocates nothing.
    lsns: Vec<Lsn>,
    members: Vec<Member>,
    buffer: Vec<u8>,
    stats: SequencerStats,
}

impl Sequencer {
    /// A sequencer with an empty order log. Panics when the configuration breaks a limit of [`crate::limits`].
    pub fn new(config: SequencerConfig) -> Sequencer {
        let count = config.quotas.len();
        assert!((1..=SHARDS_MAX).contains(&count), "a cluster has 1 to {SHARDS_MAX} shards, not {count}");
        assert!((1..=WINDOW_CUTS_MAX).contains(&config.window_cuts), "window_cuts out of range");
        assert!(config.quotas.is_sorted_by_key(|(shard, _)| *shard), "shards in id order");
        assert!(config.quotas.iter().all(|(_, q)| (1..=QUOTA_MAX).contains(q)), "quota out of range");
        let shards = config.quotas.iter().map(|(shard, quota)| ShardState {
            shard: *shard,
            quota: *quota,
            point: CutPoint::default(),
            durable: Lsn(0),
            fresh: false,
        });
        Sequencer {
            ledger: Ledger::new(config.free_cuts_max),
            shards: shards.collect(),
            target: Target::default(),
            in_flight: false,
            next_tick_ns: None,
            tick_due: false,
            lsns: Vec::with_capacity(count),
            members: Vec::with_capacity(count),
            buffer: alloc::vec![0; ORDER_ENTRY_BYTES_MAX],
            stats: SequencerStats::default(),
            config,
        }
    }

    /// The sequencer's own state of the order log.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Totals since the start.
    pub fn stats(&self) -> SequencerStats {
        self.stats
    }

    /// The order log is open for writing: grants the first window.
    pub fn on_start(&mut self, out: &mut impl SequencerOut) {
        self.decide(out);
    }

    /// A primary's report arrived. Reports may be lost, repeated and reordered: only progress counts.
    pub fn on_report(&mut self, report: &Report, out: &mut impl SequencerOut) {
        let Ok(index) = self.shards.binary_search_by_key(&report.shard, |s| s.shard) else { return };
        self.stats.reports += 1;
        let state = &mut self.shards[index];
        let repeated = report.point <= state.point;
        state.point = state.point.max(report.point);
        state.durable = state.durable.max(report.durable_lsn);
        state.fresh = true;
        let point = state.point;
        invariant!(I13, point <= self.ledger.granted_point(), "a report of {point}, which was never granted");
        if point > self.target.point {
            self.target = Target { point };
            self.send_targets(out);
        } else if repeated && point < self.target.point {
            // The target may have been lost with a connection.
            self.stats.targets += 1;
            out.target(report.shard, self.target);
        }
        self.decide(out);
    }

    /// The lag fix without a threshold: every shard behind the highest reported cut is asked for it at once.
    fn send_targets(&mut self, out: &mut impl SequencerOut) {
        for state in &self.shards {
            if state.point < self.target.point {
                self.stats.targets += 1;
                out.target(state.shard, self.target);
            }
        }
    }

    /// Time passed: the sequencer's own tick in `free-tick`.
    pub fn on_time(&mut self, now_ns: u64, out: &mut impl SequencerOut) {
        if self.config.ordering != Ordering::FreeTick {
            return;
        }
        let tick = self.config.tick_ns;
        let next = *self.next_tick_ns.get_or_insert(now_ns - now_ns % tick + self.config.tick_phase_ns % tick + tick);
        if now_ns >= next {
            self.next_tick_ns = Some(next + ((now_ns - next) / tick + 1) * tick);
            self.tick_due = true;
            self.decide(out);
        }
    }

    /// When [`on_time`](Self::on_time) has something to do.
    pub fn deadline_ns(&self) -> u64 {
        match self.config.ordering {
            Ordering::FreeTick => self.next_tick_ns.unwrap_or(0),
            Ordering::Fixed | Ordering::FreeEvent => u64::MAX,
        }
    }

    /// A proposal of this sequencer, or an entry from before, is committed at `index`.
    ///
    /// # Errors
    /// When the order log contradicts itself: the sequencer must stop.
    pub fn on_committed(
        &mut self,
        index: u64,
        entry: &[u8],
        out: &mut impl SequencerOut,
    ) -> Result<Applied, Contradiction> {
        let Ok(decoded) = OrderEntry::decode(entry) else {
            return Err(Contradiction { invariant: "I17", what: "the order log holds bytes that are no entry" });
        };
        let applied = self.ledger.apply(index, &decoded)?;
        match applied {
            Applied::Granted => self.stats.grants += 1,
            Applied::Bound => self.stats.cuts += 1,
            _ => {}
        }
        self.in_flight = false;
        self.decide(out);
        Ok(applied)
    }

    /// Proposes the next entry if one is due and none is in flight.
    fn decide(&mut self, out: &mut impl SequencerOut) {
        if self.in_flight {
            return;
        }
        let len = if self.grant_due() {
            self.encode_grant()
        } else {
            match self.ledger.mode() {
                Some(WindowMode::Fixed) => self.encode_fixed_cut(),
                Some(WindowMode::Free) => self.encode_free_cut(),
                None => None,
            }
        };
        if let Some(len) = len {
            self.in_flight = true;
            out.propose(&self.buffer[..len]);
        }
    }

    /// The next window is granted when binding passes the middle of the last one; a free window must end first.
    fn grant_due(&self) -> bool {
        let Some(mode) = self.ledger.mode() else { return true };
        let last = self.ledger.next_window() - 1;
        let due = match mode {
            WindowMode::Fixed => CutPoint { window: last, cut: self.config.window_cuts / 2, prefix: 0 },
            WindowMode::Free => self.ledger.granted_point(),
        };
        self.ledger.bound() >= due
    }

    fn encode_grant(&mut self) -> Option<usize> {
        let mode = self.config.ordering.window_mode();
        self.members.clear();
        for state in &self.shards {
            let first_lsn = match self.ledger.mode() {
                Some(WindowMode::Fixed) => self.ledger.granted_lsn(state.shard),
                Some(WindowMode::Free) => self.ledger.committed_lsn(state.shard),
                None => Lsn(0),
            };
            let quota = if mode == WindowMode::Fixed { state.quota } else { 0 };
            self.members.push(Member { shard: state.shard, quota, first_lsn });
        }
        let start = self.ledger.granted_end();
        let head = grant_head(self.ledger.view(), mode, self.ledger.next_window(), self.config.window_cuts, start);
        Some(encode_grant(&mut self.buffer, head, &self.members))
    }

    /// The cut that every shard has reached, and the members of the next that are in already.
    fn encode_fixed_cut(&mut self) -> Option<usize> {
        let whole = self.shards.iter().map(|s| s.point).min()?;
        let prefix = self.shards.iter().take_while(|s| s.point > whole).count();
        let point = CutPoint { prefix: prefix as u16, ..whole };
        if point <= self.ledger.bound() {
            return None;
        }
        for (index, state) in self.shards.iter().enumerate() {
            let reported = state.point >= whole && (index >= prefix || state.point > whole);
            invariant!(I11, reported, "shard {} has not reported what the cut {point} takes", state.shard);
        }
        Some(encode_cut(&mut self.buffer, self.ledger.view(), point))
    }

    fn encode_free_cut(&mut self) -> Option<usize> {
        let due = match self.config.ordering {
            Ordering::FreeTick => self.tick_due,
            Ordering::Fixed | Ordering::FreeEvent => self.shards.iter().all(|s| s.fresh),
        };
        if !due {
            return None;
        }
        self.tick_due = false;
        self.lsns.clear();
        let mut advanced = false;
        for state in &mut self.shards {
            state.fresh = false;
            // A report that was overtaken by a newer cut's cannot take slots back.
            let durable = state.durable.max(self.ledger.committed_lsn(state.shard));
            advanced |= durable > self.ledger.committed_lsn(state.shard);
            self.lsns.push(durable);
        }
        if !advanced {
            return None;
        }
        let point = self.ledger.next_free_point()?;
        Some(encode_free_cut(&mut self.buffer, self.ledger.view(), point, &self.lsns))
    }
}

#[cfg(test)]
mod tests;
