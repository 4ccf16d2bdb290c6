//! The primary of one shard: append, placed, speculative delivery, report, fill, commit.
//!
//! The caller owns the bytes: it asks [`Shard::on_append`] what to do with a record, writes the entries that
//! [`ShardOut`] names into its log region, replicates them, and tells of placements, order entries, targets and time.
//! `PROTOCOL.md` §4. When no-ops are filled in is in `fill`.

mod fill;
mod take_over;

use alloc::collections::VecDeque;

use crate::duplicates::{Duplicates, Verdict};
use crate::ledger::{Applied, Contradiction, Ledger};
use crate::limits::REPLICAS_MAX;
use crate::mutant::{Mutant, planted};
use crate::types::{Beat, ClientId, CutPoint, Lsn, Position, Refusal, ReplicaId, ShardId, WindowMode};
use crate::wire::node::{Report, Target};
use crate::wire::order::OrderEntry;
pub use take_over::Inheritance;

/// Run-time options of a shard.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// The shard.
    pub shard: ShardId,
    /// The primary.
    pub replica: ReplicaId,
    /// The primary's epoch.
    pub epoch: u32,
    /// The ordering tick in nanoseconds.
    pub tick_ns: u64,
    /// When this shard's free ticks fall, as an offset into the tick, in nanoseconds.
    pub tick_phase_ns: u64,
    /// When cuts are filled.
    pub beat: Beat,
    /// How long a fill that a target asks for may wait for records that are likely to come meanwhile, in nanoseconds.
    pub fill_wait_ns: u64,
    /// A cut is filled once no record has come for this many times the interval its quota stands for: the writers
    /// paused. 0: only when its first record is a tick old.
    pub pause_gaps: u32,
    /// The shard is no member until it is told to join: it takes no appends before a grant opens it.
    pub standby: bool,
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
    /// Tell the client that its record is bound, and nobody here knows where.
    fn forget(&mut self, client: ClientId, seq: u64);
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
    /// Fills because a target asked for them, or because the shard was closed.
    pub fills_by_target: u64,
    /// Fills ahead of a target that was expected.
    pub fills_ahead: u64,
    /// Fills by the published timer.
    pub fills_by_timer: u64,
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
    /// Placed end on each other replica, by its number.
    placed: [Lsn; REPLICAS_MAX],
    /// Replicas whose placements count, by their numbers' bits.
    counted: u8,
    durable: Lsn,
    /// Slots below are in the log of a predecessor, which may have reported them.
    inherited: Lsn,
    committed: Lsn,
    granted: Lsn,
    /// End of the slots whose cut is predetermined.
    fixed_end: Lsn,
    /// The newest window is fixed.
    fixed: bool,
    /// The newest grant takes no appends here.
    closed: bool,
    /// End of the cut that holds slot `appended`, when granted: an append needs no division until it gets there.
    cut_end: Option<Lsn>,
    /// The interval between records that the quota of that cut stands for.
    gap_ns: u64,
    /// The last cut whose slots were all taken by records: its end, and when.
    completed: Option<(Lsn, u64)>,
    /// When the first real record of the cut being filled was appended.
    partial_since_ns: Option<u64>,
    appended_at_ns: u64,
    /// The newest target; kept until the grants reach it.
    target: Target,
    /// When what the target lacks is filled at the latest.
    fill_at_ns: Option<u64>,
    /// The next target, as it is expected, and when to fill up to it so that its report is in time.
    expected: Option<(CutPoint, u64)>,
    /// Targets for which that goes on, since one found slots missing.
    expecting: u32,
    /// When the reported point last moved.
    advanced_at_ns: u64,
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
    /// A shard with an empty log that knows nothing of the order log.
    pub fn new(config: ShardConfig) -> Shard {
        let ledger = Ledger::new(config.free_cuts_max);
        let duplicates = Duplicates::new(config.sessions_max, config.session_remembered);
        Shard::with(config, ledger, duplicates)
    }

    fn with(config: ShardConfig, ledger: Ledger, duplicates: Duplicates) -> Shard {
        assert!(config.tick_ns > 0 && config.pending_max > 0, "a shard needs a tick and room for appends");
        Shard {
            ledger,
            duplicates,
            appended: Lsn(0),
            placed: [Lsn(0); REPLICAS_MAX],
            counted: 0,
            durable: Lsn(0),
            inherited: Lsn(0),
            committed: Lsn(0),
            granted: Lsn(0),
            fixed_end: Lsn(0),
            fixed: false,
            closed: config.standby,
            cut_end: None,
            gap_ns: config.tick_ns,
            completed: None,
            partial_since_ns: None,
            appended_at_ns: 0,
            target: Target::default(),
            fill_at_ns: None,
            expected: None,
            expecting: 0,
            advanced_at_ns: 0,
            reported: Report {
                shard: config.shard,
                replica: config.replica.number,
                incarnation: config.replica.incarnation,
                primary: true,
                epoch: config.epoch,
                ..Report::default()
            },
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
        if planted(Mutant::SpeculateWithoutAGrant) && self.fixed {
            return self.durable;
        }
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
            // What follows a record that a closed shard refused is refused for the same reason, not as a gap.
            Verdict::New | Verdict::Refuse(Refusal::Gap { .. }) if self.closed() => match self.open_shard(client) {
                Some(instead) => Append::Refused(Refusal::Closed { instead }),
                None => Append::Busy,
            },
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

    /// Whether the shard takes no appends at present.
    pub fn closed(&self) -> bool {
        // A target that closes holds until the window that begins there is granted.
        self.closed || (self.target.close && self.target.point.window == self.ledger.next_window())
    }

    /// A shard that takes appends, by the newest grant; different clients are told different ones.
    fn open_shard(&self, client: ClientId) -> Option<ShardId> {
        let open = || self.ledger.members().iter().filter(|m| m.open && m.shard != self.config.shard);
        let nth = (client.0 % open().count().max(1) as u128) as usize;
        open().nth(nth).map(|m| m.shard)
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
        self.appended_at_ns = now_ns;
        self.reported.records_lsn = self.appended;
        let in_fixed = self.fixed || self.cut_end.is_some();
        if self.partial_since_ns.is_none() && in_fixed && self.cut_end != Some(self.appended) {
            self.partial_since_ns = Some(now_ns);
        }
        self.close_full_cut(now_ns);
        if planted(Mutant::FillOverARecord) && self.fill_at_ns.is_some() {
            out.no_ops(lsn, 1);
        } else {
            out.record(lsn, client, seq);
        }
        self.after_append(now_ns, out);
    }

    fn advance_appended(&mut self, count: u64) {
        if self.cut_end.is_none_or(|end| self.appended >= end) {
            self.find_cut();
        }
        self.appended = self.appended.plus(count);
    }

    /// Finds the cut that holds slot `appended`.
    fn find_cut(&mut self) {
        self.cut_end = None;
        if self.appended < self.fixed_end
            && let Some((end, quota)) = self.ledger.cut_of(self.config.shard, self.appended)
        {
            self.cut_end = Some(end);
            self.gap_ns = self.config.tick_ns / u64::from(quota);
        }
    }

    /// A cut whose slots are all taken needs no fill any more.
    fn close_full_cut(&mut self, now_ns: u64) {
        if self.cut_end == Some(self.appended) {
            self.partial_since_ns = None;
            self.completed = Some((self.appended, now_ns));
        }
    }

    /// Without backups a slot is durable as soon as it is written.
    fn after_append(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        if self.counted == 0 {
            self.advance_durable(now_ns, out);
        }
    }

    /// Everything below `lsn` is placed on this replica.
    pub fn on_placed(&mut self, now_ns: u64, replica: u16, lsn: Lsn, out: &mut impl ShardOut) {
        assert!(lsn <= self.appended, "replica {replica} placed slot {lsn}, which was never appended");
        let placed = &mut self.placed[usize::from(replica)];
        if lsn > *placed {
            *placed = lsn;
            self.advance_durable(now_ns, out);
        }
    }

    /// From now on the placements of these replicas count, and of no others: the members' (until the entry that drops one
    /// is applied), and a joiner's before it is one. Bits by number.
    pub fn set_counted(&mut self, now_ns: u64, counted: u8, out: &mut impl ShardOut) {
        if counted != self.counted {
            self.counted = counted;
            self.advance_durable(now_ns, out);
        }
    }

    /// A replica begins anew: everything below `lsn` is placed on it, or needs not be.
    pub fn restart_replica(&mut self, replica: u16, lsn: Lsn) {
        self.placed[usize::from(replica)] = lsn;
    }

    /// First slot not placed on a replica.
    pub fn placed(&self, replica: u16) -> Lsn {
        self.placed[usize::from(replica)]
    }

    fn advance_durable(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        let counted = self.placed.iter().enumerate().filter(|(number, _)| self.counted & 1 << number != 0);
        let durable = if planted(Mutant::QuorumOfMembers) {
            counted.map(|(_, lsn)| *lsn).max().unwrap_or(self.appended)
        } else {
            counted.map(|(_, lsn)| *lsn).min().unwrap_or(self.appended)
        };
        if durable <= self.durable {
            return;
        }
        self.durable = durable;
        if planted(Mutant::AcknowledgeWhenDurable) {
            self.acknowledge_below(self.deliverable(), out);
        }
        self.note_stall();
        self.report_if_reached(now_ns, out);
    }

    fn note_stall(&mut self) {
        let stalled = self.fixed && self.durable > self.granted;
        if stalled && !self.stalled {
            self.stats.grant_stalls += 1;
        }
        self.stalled = stalled;
    }

    /// Fixed windows: reports as soon as the slots of the next cut are durable.
    fn report_if_reached(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        let early = u64::from(planted(Mutant::ReportOneSlotEarly));
        let reached = self.durable.plus(early);
        let Some(point) = self.ledger.point_reached(self.config.shard, reached) else { return };
        if point > self.reported.point {
            invariant!(I13, point <= self.ledger.granted_point(), "a report of {point} without its grant");
            self.reported.point = point;
            self.advanced_at_ns = now_ns;
            self.send_report(now_ns, out);
        }
    }

    fn send_report(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        self.reported.view = self.ledger.view();
        self.reported.change = self.ledger.membership(self.config.shard).map_or(0, |m| m.change);
        self.reported.durable_lsn = self.durable;
        self.reported.appended_lsn = self.appended;
        self.reported.closed = self.closed();
        self.reported.records = self.stats.records;
        self.reported.applied_index = self.ledger.applied_index();
        self.reported_at_ns = Some(now_ns);
        self.stats.reports += 1;
        out.report(&self.reported);
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
            Applied::ViewChanged => self.failed |= self.ledger.has_failed(self.config.shard),
            Applied::MembersChanged(_) | Applied::Trimmed | Applied::Again | Applied::Void => {}
        }
        Ok(applied)
    }

    fn on_granted(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        let shard = self.config.shard;
        self.fixed = self.ledger.mode() == Some(WindowMode::Fixed);
        self.granted = self.ledger.granted_lsn(shard);
        self.fixed_end = self.ledger.fixed_end(shard);
        let was_closed = self.reported.closed;
        self.closed = !self.ledger.open(shard).unwrap_or(!self.config.standby);
        // Records may have run ahead of the grants; the cut they stand in is known only now.
        self.find_cut();
        let at_cut_start = self.ledger.point_reached(shard, self.appended).and_then(|p| self.ledger.lsn_at(shard, p))
            == Some(self.appended);
        if at_cut_start || self.cut_end.is_none() && !self.fixed {
            self.partial_since_ns = None;
        } else if self.partial_since_ns.is_none() && self.fixed {
            self.partial_since_ns = Some(now_ns);
        }
        self.note_stall();
        self.report_if_reached(now_ns, out);
        self.fill_when_granted(now_ns, out);
        if self.reported_at_ns.is_none() || self.closed() != was_closed {
            self.send_report(now_ns, out);
        }
    }

    fn on_bound(&mut self, out: &mut impl ShardOut) {
        let shard = self.config.shard;
        let committed = self.ledger.committed_lsn(shard);
        self.believe_predecessor(committed);
        invariant!(I2, committed >= self.committed, "shard {shard}: bound slots went back");
        let believed = planted(Mutant::ReportOneSlotEarly) || planted(Mutant::CountRepeatedReports);
        invariant!(
            I11,
            committed <= self.durable || believed,
            "shard {shard}: slot {committed} is bound but not durable"
        );
        let bound = self.ledger.bound();
        if let Some(predetermined) = self.ledger.lsn_at(shard, bound) {
            invariant!(I10, predetermined == committed, "shard {shard}: the cut {bound} is not the predetermined one");
        }
        self.committed = committed;
        self.granted = self.granted.max(self.ledger.granted_lsn(shard));
        self.acknowledge_below(committed, out);
    }

    fn acknowledge_below(&mut self, end: Lsn, out: &mut impl ShardOut) {
        while let Some(next) = self.pending.front().copied().filter(|p| p.lsn < end) {
            self.pending.pop_front();
            self.acknowledge(next, out);
        }
    }

    fn acknowledge(&mut self, append: Pending, out: &mut impl ShardOut) {
        let Pending { lsn, client, seq } = append;
        let early = planted(Mutant::AcknowledgeWhenDurable);
        invariant!(I6, lsn < self.committed || early, "slot {lsn} would be acknowledged before its cut is bound");
        let position = self.ledger.position(self.config.shard, lsn);
        invariant!(I4, position.is_some(), "slot {lsn} is bound without a position");
        let Some(position) = position else { return };
        invariant!(
            I5,
            position < self.ledger.committed() || early,
            "position {position} is acknowledged before it is bound"
        );
        invariant!(I14, !self.failed, "a failed shard would acknowledge slot {lsn}");
        out.acknowledge(client, seq, lsn, position);
    }

    /// Time passed: free ticks, fills, repeated reports.
    pub fn on_time(&mut self, now_ns: u64, out: &mut impl ShardOut) {
        self.fill_by_time(now_ns, out);
        if self.ledger.mode() == Some(WindowMode::Free) {
            self.free_tick(now_ns, out);
        }
        let due = self.reported_at_ns.is_none_or(|at| now_ns >= at + self.config.report_every_ns);
        if due {
            self.send_report(now_ns, out);
        }
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
        if planted(Mutant::ForgetSessions) {
            self.duplicates = Duplicates::new(self.config.sessions_max, self.config.session_remembered);
        }
        self.send_report(now_ns, out);
    }

    /// What the agent knows of the shard's other replicas: those it has no connection to, by their numbers' bits, and one
    /// that has caught up and waits to become a member. Reported when it changes.
    pub fn set_replicas(&mut self, now_ns: u64, lost: u8, joiner: Option<ReplicaId>, out: &mut impl ShardOut) {
        if (self.reported.lost, self.reported.joiner) != (lost, joiner) {
            (self.reported.lost, self.reported.joiner) = (lost, joiner);
            self.send_report(now_ns, out);
        }
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
        let tick = match self.ledger.mode() {
            Some(WindowMode::Free) => self.next_tick_ns.unwrap_or(0),
            _ => u64::MAX,
        };
        report.min(tick).min(self.fill_deadline_ns().unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests;
