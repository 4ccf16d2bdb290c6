//! The primary of one shard: append, placed, speculative delivery, report, fill, commit.
//!
//! The caller owns the bytes: it asks [`Shard::on_append`] what to do with a record, writes the entries that
//! [`ShardOut`] names into its log region, replicates them, and tells of placements, order entries, targets and time.
//! `PROTOCOL.md` §4.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use crate::duplicates::{Duplicates, Verdict};
use crate::ledger::{Applied, Contradiction, Ledger};
use crate::types::{ClientId, Lsn, Position, Refusal, ShardId, WindowMode};
use crate::wire::node::{Report, Target};
use crate::wire::order::OrderEntry;

/// Run-time options of a shard.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// The shard.
    pub shard: ShardId,
    /// The primary's epoch.
    pub epoch: u32,
    /// Number of backups: members besides the primary.
    pub backups: usize,
    /// The ordering tick in nanoseconds.
    pub tick_ns: u64,
    /// When this shard's free ticks fall, as an offset into the tick, in nanoseconds.
    pub tick_phase_ns: u64,
    /// The report is repeated at least this often, in nanoseconds (`suspect_ns / 4`).
    pub report_every_ns: u64,
    /// Most appends waiting for their cut.
    pub pending_max: usize,
    /// Most sessions in the duplicate table.
    pub sessions_max: usize,
    /// Records remembered per session.
    pub session_remembered: usize,
    /// Cuts of free windows remembered by the ledger.
    pub free_cuts_max: usize,
}

/// What a shard makes the world do.
pub trait ShardOut {
    /// Write the record at hand as the entry of slot `lsn` and replicate it.
    fn record(&mut self, lsn: Lsn, client: ClientId, seq: u64);
    /// Write one entry of `count` no-ops from slot `lsn` and replicate it.
    fn no_ops(&mut self, lsn: Lsn, count: u32);
    /// Tell the client that its record is bound.
    fn acknowledge(&mut self, client: ClientId, seq: u64, lsn: Lsn, position: Position);
    /// Send the report; it replaces any earlier one that has not left yet.
    fn report(&mut self, report: &Report);
}

/// Room in the log region for fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FillRoom {
    /// Fills go as far as a cut needs.
    Plenty,
    /// The log takes no records any more: fills go to the end of the grants, so that they need few entries.
    Few,
    /// Not even for an entry of no-ops: nothing is filled, so this shard's cuts end here.
    None,
}

/// What became of an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Append {
    /// Appended as this slot; acknowledged when its cut is bound.
    Accepted(Lsn),
    /// A retry of a record that is bound already.
    Bound(Position),
    /// A retry of a record that is still waiting; it will be acknowledged.
    Waiting,
    /// Not appended.
    Refused(Refusal),
    /// Not appended and not answered: try again after acknowledgements made room.
    Busy,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    lsn: Lsn,
    client: ClientId,
    seq: u64,
}

/// Counts that tell how the shard fares. All are totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardStats {
    /// Records appended.
    pub records: u64,
    /// Slots filled with no-ops.
    pub no_ops: u64,
    /// Fills because a record had waited a tick.
    pub fills_by_age: u64,
    /// Fills because a target asked for them.
    pub fills_by_target: u64,
    /// Times the durable end reached the end of the grants and delivery stalled.
    pub grant_stalls: u64,
    /// Reports sent.
    pub reports: u64,
}

/// The state of a primary.
#[derive(Debug)]
pub struct Shard {
    config: ShardConfig,
    ledger: Ledger,
    duplicates: Duplicates,
    appended: Lsn,
    /// Placed end on each backup.
    placed: Vec<Lsn>,
    durable: Lsn,
    committed: Lsn,
    granted: Lsn,
    /// End of the cut that holds slot `appended`, when granted: an append needs no division until it gets there.
    cut_end: Option<Lsn>,
    /// When the first real record of the cut being filled was appended.
    partial_since_ns: Option<u64>,
    /// The newest target; kept until the grants reach it.
    target: Target,
    reported: Report,
    reported_at_ns: Option<u64>,
    next_tick_ns: Option<u64>,
    stalled: bool,
    pending: VecDeque<Pending>,
    stats: ShardStats,
    failed: bool,
    room: FillRoom,
}

impl Shard {
    /// A shard with an empty log.
    pub fn new(config: ShardConfig) -> Shard {
        assert!(config.tick_ns > 0 && config.pending_max > 0, "a shard needs a tick and room for appends");
        Shard {
            ledger: Ledger::new(config.free_cuts_max),
            duplicates: Duplicates::new(config.sessions_max, config.session_remembered),
            appended: Lsn(0),
            placed: vec![Lsn(0); config.backups],
            durable: Lsn(0),
            committed: Lsn(0),
            granted: Lsn(0),
            cut_end: None,
            partial_since_ns: None,
            target: Target::default(),
            reported: Report { shard: config.shard, epoch: config.epoch, ..Report::default() },
            reported_at_ns: None,
            next_tick_ns: None,
            stalled: false,
            pending: VecDeque::with_capacity(config.pending_max),
            stats: ShardStats::default(),
            failed: false,
            room: FillRoom::Plenty,
            config,
        }
    }

    /// The shard's follower state of the order log.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// First slot not appended.
    pub fn appended(&self) -> Lsn {
        self.appended
    }

    /// First slot not durable.
    pub fn durable(&self) -> Lsn {
        self.durable
    }

    /// First slot not bound.
    pub fn committed(&self) -> Lsn {
        self.committed
    }

    /// First slot that may not be delivered: durable, and either bound or covered by a grant (I13).
    pub fn deliverable(&self) -> Lsn {
        self.durable.min(self.granted.max(self.committed))
    }

    /// Totals since the start.
    pub fn stats(&self) -> ShardStats {
        self.stats
    }

    /// Appends waiting for their cut.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Judges an append without changing anything; [`Append::Accepted`] says which slot it would get.
    pub fn judge(&self, client: ClientId, seq: u64) -> Append {
        if self.failed {
            return Append::Refused(Refusal::Failed);
        }
        match self.duplicates.judge(client, seq) {
            Verdict::Refuse(refusal) => Append::Refused(refusal),
            Verdict::Retry(lsn) if lsn < self.committed => match self.ledger.position(self.config.shard, lsn) {
                Some(position) => Append::Bound(position),
                // The ledger forgot the window: the slot lies below the trim point.
                None => Append::Refused(Refusal::Forgotten),
            },
            Verdict::Retry(_) => Append::Waiting,
            Verdict::New if self.pending.len() == self.config.pending_max => Append::Busy,
            Verdict::New => Append::Accepted(self.appended),
        }
    }

    /// A client's record arrived: judges it, and appends it when it is `Accepted`.
    pub fn on_append(&mut self, now_ns: u64, client: ClientId, seq: u64, out: &mut impl ShardOut) -> Append {
        let verdict = self.judge(client, seq);
        if let Append::Accepted(lsn) = verdict {
            self.accept(now_ns, lsn, client, seq, out);
        }
        verdict
    }

    /// Appends the record that [`judge`](Self::judge) has just accepted as slot `lsn`.
    pub fn accept(&mut self, now_ns: u64, lsn: Lsn, client: ClientId, seq: u64, out: &mut impl ShardOut) {
        invariant!(I7, lsn == self.appended, "slot {lsn} is appended after {}", self.appended);
        self.duplicates.record(client, seq, lsn);
        self.pending.push_back(Pending { lsn, client, seq });
        self.stats.records += 1;
        self.advance_appended(1);
        if self.partial_since_ns.is_none() && self.cut_end != Some(self.appended) {
            self.partial_since_ns = Some(now_ns);
        }
        self.close_full_cut();
        out.record(lsn, client, seq);
        self.after_append(now_ns, out);
    }

    fn advance_appended(&mut self, count: u64) {
        if self.cut_end.is_none_or(|end| self.appended >= end) {
            self.cut_end = self.ledger.cut_end(self.config.shard, self.appended);
        }
        self.appended = self.appended.plus(count);
    }

    /// A cut whose slots are all taken needs no fill any more.
    fn close_full_cut(&mut self) {
        if self.cut_end == Some(self.appended) {
            self.partial_since_ns = None;
        }
    }

    /// Without backups a slot is durable as soon as it is written.
    fn after_append(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        if self.config.backups == 0 {
            self.advance_durable(now_ns, out);
        }
    }

    /// Everything below `lsn` is placed on this backup.
    pub fn on_placed(&mut self, now_ns: u64, backup: usize, lsn: Lsn, out: &mut impl ShardOut) {
        assert!(lsn <= self.appended, "backup {backup} placed slot {lsn}, which was never appended");
        if lsn > self.placed[backup] {
            self.placed[backup] = lsn;
            self.advance_durable(now_ns, out);
        }
    }

    fn advance_durable(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        let durable = self.placed.iter().copied().min().unwrap_or(self.appended);
        if durable <= self.durable {
            return;
        }
        self.durable = durable;
        self.note_stall();
        self.report_if_reached(now_ns, out);
    }

    fn note_stall(&mut self) {
        let fixed = self.ledger.mode() == Some(WindowMode::Fixed);
        let stalled = fixed && self.durable > self.granted;
        if stalled && !self.stalled {
            self.stats.grant_stalls += 1;
        }
        self.stalled = stalled;
    }

    /// Fixed windows: reports as soon as the slots of the next cut are durable.
    fn report_if_reached(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        if self.ledger.mode() != Some(WindowMode::Fixed) {
            return;
        }
        let Some(point) = self.ledger.point_reached(self.config.shard, self.durable) else { return };
        if point > self.reported.point {
            invariant!(I13, point <= self.ledger.granted_point(), "a report of {point} without its grant");
            self.reported.point = point;
            self.send_report(now_ns, out);
        }
    }

    fn send_report(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        self.reported.view = self.ledger.view();
        self.reported.durable_lsn = self.durable;
        self.reported.records = self.stats.records;
        self.reported.applied_index = self.ledger.applied_index();
        self.reported_at_ns = Some(now_ns);
        self.stats.reports += 1;
        out.report(&self.reported);
    }

    /// The sequencer asks for the report of a cut: fill up to it. Harmless when late, repeated or reordered.
    pub fn on_target(&mut self, now_ns: u64, target: Target, out: &mut impl ShardOut) {
        if target > self.target {
            self.target = target;
            self.fill_to_target(now_ns, out);
        }
    }

    /// Says how much room the log region has left for fills.
    pub fn set_room(&mut self, room: FillRoom) {
        self.room = room;
    }

    /// Fills up to the target; at an edge without a grant the target stays and is resumed on the grant (L1).
    fn fill_to_target(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        if self.failed || self.room == FillRoom::None || self.ledger.mode() != Some(WindowMode::Fixed) {
            return;
        }
        let point = self.target.point.min(self.ledger.granted_point());
        let Some(end) = self.ledger.lsn_at(self.config.shard, point) else { return };
        if end > self.appended {
            let end = if self.room == FillRoom::Few { self.granted } else { end };
            self.stats.fills_by_target += 1;
            self.fill(now_ns, end, out);
        }
    }

    /// Appends no-ops up to slot `end`, as one entry.
    fn fill(&mut self, now_ns: u64, end: Lsn, out: &mut impl ShardOut) {
        let first = self.appended;
        let count = u32::try_from(end.0 - first.0).unwrap_or(u32::MAX);
        self.stats.no_ops += u64::from(count);
        self.advance_appended(u64::from(count));
        // A fill ends at the end of a cut.
        self.partial_since_ns = None;
        out.no_ops(first, count);
        self.after_append(now_ns, out);
    }

    /// An entry of the order stream arrived.
    ///
    /// # Errors
    /// When the order stream contradicts itself: the replica must stop.
    pub fn on_order_entry(
        &mut self,
        now_ns: u64,
        index: u64,
        entry: &OrderEntry<'_>,
        out: &mut impl ShardOut,
    ) -> Result<Applied, Contradiction> {
        let applied = self.ledger.apply(index, entry)?;
        match applied {
            Applied::Granted => self.on_granted(now_ns, out),
            Applied::Bound => self.on_bound(out),
            Applied::ViewChanged => self.failed |= self.ledger.failed().any(|f| f.shard == self.config.shard),
            Applied::Again | Applied::Void => {}
        }
        Ok(applied)
    }

    fn on_granted(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        let shard = self.config.shard;
        self.granted = self.ledger.granted_lsn(shard);
        // Records may have run ahead of the grants; the cut they stand in is known only now.
        self.cut_end = self.ledger.cut_end(shard, self.appended);
        let at_cut_start = self.ledger.point_reached(shard, self.appended).and_then(|p| self.ledger.lsn_at(shard, p))
            == Some(self.appended);
        if at_cut_start {
            self.partial_since_ns = None;
        } else if self.partial_since_ns.is_none() && self.ledger.mode() == Some(WindowMode::Fixed) {
            self.partial_since_ns = Some(now_ns);
        }
        self.note_stall();
        self.report_if_reached(now_ns, out);
        self.fill_to_target(now_ns, out);
        if self.reported_at_ns.is_none() {
            self.send_report(now_ns, out);
        }
    }

    fn on_bound(&mut self, out: &mut impl ShardOut) {
        let shard = self.config.shard;
        let committed = self.ledger.committed_lsn(shard);
        invariant!(I2, committed >= self.committed, "shard {shard}: bound slots went back");
        invariant!(I11, committed <= self.durable, "shard {shard}: slot {committed} is bound but not durable");
        if self.ledger.mode() == Some(WindowMode::Fixed) {
            let bound = self.ledger.bound();
            invariant!(
                I10,
                self.ledger.lsn_at(shard, bound) == Some(committed),
                "shard {shard}: the cut {bound} is not the predetermined one"
            );
        }
        self.committed = committed;
        self.granted = self.granted.max(self.ledger.granted_lsn(shard));
        while let Some(next) = self.pending.front().copied().filter(|p| p.lsn < committed) {
            self.pending.pop_front();
            self.acknowledge(next, out);
        }
    }

    fn acknowledge(&mut self, append: Pending, out: &mut impl ShardOut) {
        let Pending { lsn, client, seq } = append;
        invariant!(I6, lsn < self.committed, "slot {lsn} would be acknowledged before its cut is bound");
        let position = self.ledger.position(self.config.shard, lsn);
        invariant!(I4, position.is_some(), "slot {lsn} is bound without a position");
        let Some(position) = position else { return };
        invariant!(I5, position < self.ledger.committed(), "position {position} is acknowledged before it is bound");
        invariant!(I14, !self.failed, "a failed shard would acknowledge slot {lsn}");
        out.acknowledge(client, seq, lsn, position);
    }

    /// Time passed: free ticks, fills of records that waited a tick, repeated reports.
    pub fn on_time(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        match self.ledger.mode() {
            Some(WindowMode::Fixed) => self.fill_by_age(now_ns, out),
            Some(WindowMode::Free) => self.free_tick(now_ns, out),
            None => {}
        }
        let due = self.reported_at_ns.is_none_or(|at| now_ns >= at + self.config.report_every_ns);
        if due {
            self.send_report(now_ns, out);
        }
    }

    /// Fills the cut that holds a real record which has waited a tick.
    fn fill_by_age(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        let aged = self.partial_since_ns.is_some_and(|since| now_ns >= since + self.config.tick_ns);
        if !aged || self.failed || self.room == FillRoom::None {
            return;
        }
        // Beyond the grants there is no cut to fill yet; the grant comes back here.
        let Some(end) = self.ledger.cut_end(self.config.shard, self.appended) else { return };
        self.stats.fills_by_age += 1;
        self.fill(now_ns, end, out);
    }

    /// Reports durable lengths on the tick, changed or not: the sequencer waits for every shard's report.
    fn free_tick(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        let next = *self.next_tick_ns.get_or_insert_with(|| {
            let started = now_ns - now_ns % self.config.tick_ns + self.config.tick_phase_ns % self.config.tick_ns;
            if started > now_ns { started } else { started + self.config.tick_ns }
        });
        if now_ns >= next {
            let missed = (now_ns - next) / self.config.tick_ns;
            self.next_tick_ns = Some(next + (missed + 1) * self.config.tick_ns);
            self.send_report(now_ns, out);
        }
    }

    /// Sends the report again now: the connection to the sequencer is new.
    pub fn on_sequencer_connected(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        self.send_report(now_ns, out);
    }

    /// Sends a report because the order stream's sender waits for credit.
    pub fn report_progress(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        self.send_report(now_ns, out);
    }

    /// Index the sequencer was last told to be applied here.
    pub fn reported_index(&self) -> u64 {
        self.reported.applied_index
    }

    /// When [`on_time`](Self::on_time) has something to do even without input.
    pub fn deadline_ns(&self) -> u64 {
        let report = self.reported_at_ns.map_or(0, |at| at + self.config.report_every_ns);
        let order = match self.ledger.mode() {
            Some(WindowMode::Fixed) => match (self.partial_since_ns, self.cut_end) {
                (Some(since), Some(_)) if self.room != FillRoom::None => since + self.config.tick_ns,
                _ => u64::MAX,
            },
            Some(WindowMode::Free) => self.next_tick_ns.unwrap_or(0),
            None => u64::MAX,
        };
        report.min(order)
    }
}

#[cfg(test)]
mod tests;
