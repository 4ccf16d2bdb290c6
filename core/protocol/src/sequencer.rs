//! The sequencer's policy: reports in; grants, cuts and targets out.
//!
//! It decides from committed entries and reports only. A proposal takes effect when it comes back through
//! [`Sequencer::on_committed`], so a group of one and a replicated group run the same code; at most one proposal is in
//! flight and newer decisions coalesce behind it. `PROTOCOL.md` §5.
//!
//! * `progress` — which cuts are reported by all, and for how long they waited for the last;
//! * `lead` — which member of the group decides, and how another takes over;
//! * `members` — who takes part: joining, leaving, grounding of stragglers;
//! * `failures` — replicas lost and gained, shards that fail and return;
//! * `quota` — how many slots each gets, and when windows are free instead.

mod failures;
mod lead;
mod members;
mod progress;
mod quota;

use alloc::vec::Vec;

use crate::ledger::{Applied, Contradiction, Ledger, grant_head};
use crate::limits::{QUOTA_MAX, SHARDS_MAX, WINDOW_CUTS_MAX};
use crate::mutant::{Mutant, planted};
use crate::types::{Beat, CutPoint, Lsn, Member, Ordering, Position, ShardId, WindowMode};
pub use crate::types::{Change, ChangeError};
use crate::wire::node::{Report, Target};
use crate::wire::order::{ORDER_ENTRY_BYTES_MAX, OrderEntry, encode_cut, encode_free_cut, encode_grant, encode_trim};
use failures::ReplicaState;
pub use lead::Standing;
use members::Part;
use progress::{Answers, Asked, Progress};
use quota::Arrivals;

/// Run-time options of the sequencer.
#[derive(Clone, Debug)]
pub struct SequencerConfig {
    /// The ordering tick in nanoseconds.
    pub tick_ns: u64,
    /// When the sequencer's free ticks fall, as an offset into the tick, in nanoseconds.
    pub tick_phase_ns: u64,
    /// Cuts in a window (`W`).
    pub window_cuts: u32,
    /// Which windows are granted.
    pub ordering: Ordering,
    /// When shards are asked to catch up.
    pub beat: Beat,
    /// Shards in id order.
    pub shards: Vec<MemberConfig>,
    /// Quotas follow arrival rates; otherwise they stay what they begin with.
    pub adaptive_quotas: bool,
    /// Targets are sent at most this often, in nanoseconds; the first after a pause at once.
    pub target_pace_ns: u64,
    /// A cut that only adds members to the prefix of the last one follows it after at least this time, in nanoseconds.
    pub prefix_pace_ns: u64,
    /// A shard that has not reached a target after this many ticks is late.
    pub late_ticks: u32,
    /// Windows (of `window_cuts` ticks) for which a straggler is grounded, and for which `auto` goes free. 0: never.
    pub ground_windows: u32,
    /// A replica that is not heard for this long is lost, in nanoseconds.
    pub suspect_ns: u64,
    /// A lost connection to a replica that nobody else can speak for has this long to come back, in nanoseconds.
    pub lost_grace_ns: u64,
    /// Cuts of free windows remembered by the ledger.
    pub free_cuts_max: usize,
}

/// A shard as the sequencer is configured with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberConfig {
    /// The shard.
    pub shard: ShardId,
    /// Its quota until arrivals are known.
    pub quota: u32,
    /// It is no member until it is told to join.
    pub standby: bool,
    /// Its replicas, spares included. 0: they are nobody's business here, as where only the ordering is looked at.
    pub replicas: u16,
    /// Of those the first so many are its members when it begins; the others are spares.
    pub members: u16,
}

/// What the sequencer makes the world do.
pub trait SequencerOut {
    /// Append the entry to the order log; when committed it comes back through [`Sequencer::on_committed`].
    fn propose(&mut self, entry: &[u8]);
    /// Tell a shard's primary, which has this number, its target. Newest wins; may be lost.
    fn target(&mut self, shard: ShardId, primary: u16, target: Target);
}

#[derive(Clone, Copy, Debug)]
struct ShardState {
    shard: ShardId,
    part: Part,
    /// Operators want it to be a member.
    wanted: bool,
    /// First window whose grant lists it.
    since: Option<u64>,
    /// The quota to begin with.
    configured: u32,
    /// Quota in the newest fixed window in which it was open; before that, the configured one.
    quota: u32,
    /// Whether the newest grant takes its appends.
    open: bool,
    /// The last cut it has reported, or needs not report.
    point: CutPoint,
    durable: Lsn,
    appended: Lsn,
    /// Its newest report says that it takes no appends.
    closed: bool,
    /// Reported since the last free cut.
    fresh: bool,
    arrivals: Arrivals,
    answers: Answers,
    /// When it last came back from the ground, and how often in a row it had to go there before.
    returned_at_ns: u64,
    grounded_before: u32,
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
    /// Grants of free windows among them.
    pub free_windows: u64,
    /// Targets sent.
    pub targets: u64,
    /// Quotas that differ from the same shard's in the window before.
    pub quota_changes: u64,
    /// Times a shard was grounded for being late.
    pub grounded: u64,
    /// Shards that were lost as a whole.
    pub shards_failed: u64,
    /// Changes of shards' members.
    pub member_changes: u64,
    /// Times `auto` left fixed windows because cuts waited for their last report.
    pub fallbacks: u64,
}

/// The state of the leader.
#[derive(Debug)]
pub struct Sequencer {
    config: SequencerConfig,
    ledger: Ledger,
    shards: Vec<ShardState>,
    /// This member decides.
    leads: bool,
    /// Replicas of each shard, by number.
    replicas: Vec<Vec<ReplicaState>>,
    /// Something happened to a replica.
    look: bool,
    look_at_ns: Option<u64>,
    /// When anything was last decided.
    awake_ns: u64,
    progress: Progress,
    /// The highest cut that any open shard has reported, or the edge that a change needs.
    target: CutPoint,
    target_at_ns: Option<u64>,
    asked: Asked,
    /// A target waits for the pace.
    target_due_ns: Option<u64>,
    cut_at_ns: u64,
    /// A longer prefix waits for the pace.
    prefix_due_ns: Option<u64>,
    /// Somebody may be closing or grounded.
    unsettled: bool,
    /// Something is to change at the next edge, which is granted at once.
    change: bool,
    /// That edge is brought near.
    rush: bool,
    /// So is the edge of the grant in flight.
    granting_rush: bool,
    /// The last edge that was.
    edge: CutPoint,
    /// Index of the newest grant.
    grant_index: u64,
    /// What lies below is not to be kept, as operators have asked.
    trim: Position,
    /// `auto`: free windows still to grant.
    free_left: u32,
    decided_at_ns: Option<u64>,
    watch_at_ns: Option<u64>,
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
    /// A sequencer with an empty order log, which follows. Panics when the configuration breaks a limit of
    /// [`crate::limits`].
    pub fn new(config: SequencerConfig) -> Sequencer {
        let count = config.shards.len();
        assert!((1..=SHARDS_MAX).contains(&count), "a cluster has 1 to {SHARDS_MAX} shards, not {count}");
        assert!((1..=WINDOW_CUTS_MAX).contains(&config.window_cuts), "window_cuts out of range");
        assert!(config.shards.is_sorted_by_key(|s| s.shard), "shards in id order");
        assert!(config.shards.iter().all(|s| (1..=QUOTA_MAX).contains(&s.quota)), "quota out of range");
        assert!(config.shards.iter().any(|s| !s.standby), "a cluster begins with a shard that does not stand by");
        let shards = config.shards.iter().map(|s| ShardState {
            shard: s.shard,
            part: if s.standby { Part::Out } else { Part::In },
            wanted: !s.standby,
            since: None,
            configured: s.quota,
            quota: s.quota,
            open: false,
            point: CutPoint::default(),
            durable: Lsn(0),
            appended: Lsn(0),
            closed: false,
            fresh: false,
            arrivals: Arrivals::default(),
            answers: Answers::default(),
            returned_at_ns: 0,
            grounded_before: 0,
        });
        let replicas = config.shards.iter().map(|s| alloc::vec![ReplicaState::default(); s.replicas.into()]);
        Sequencer {
            ledger: Ledger::new(config.free_cuts_max),
            shards: shards.collect(),
            leads: false,
            replicas: replicas.collect(),
            look: false,
            look_at_ns: None,
            awake_ns: 0,
            progress: Progress::default(),
            target: CutPoint::default(),
            target_at_ns: None,
            asked: Asked::default(),
            target_due_ns: None,
            cut_at_ns: 0,
            prefix_due_ns: None,
            unsettled: false,
            change: false,
            rush: false,
            granting_rush: false,
            edge: CutPoint::default(),
            grant_index: 0,
            trim: Position(0),
            free_left: 0,
            decided_at_ns: None,
            watch_at_ns: None,
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

    /// A shard's place in what is kept of each: its number, where all up to it are configured.
    pub(super) fn index(&self, shard: ShardId) -> Option<usize> {
        let number = usize::from(shard.0);
        match self.shards.get(number) {
            Some(state) if state.shard == shard => Some(number),
            _ => self.shards.binary_search_by_key(&shard, |s| s.shard).ok(),
        }
    }

    /// A replica's report arrived. Reports may be lost, repeated and reordered: only progress counts, whichever primary
    /// of the shard made it; but not that of a life of the shard which was lost.
    pub fn on_report(&mut self, now_ns: u64, report: &Report, out: &mut impl SequencerOut) {
        let Some(index) = self.index(report.shard) else { return };
        self.stats.reports += 1;
        if !self.replicas[index].is_empty() {
            self.hear(now_ns, report);
            let lost =
                self.ledger.membership(report.shard).is_none_or(|m| m.has_failed() || report.change < m.since_failure);
            if !report.primary || (lost && !planted(Mutant::CountReportsOfLostShards)) {
                return self.decide(now_ns, out);
            }
        }
        let granted = self.ledger.granted_point();
        invariant!(I13, report.point <= granted, "a report of {}, which was never granted", report.point);
        let state = &mut self.shards[index];
        let repeated = report.point <= state.point;
        state.durable = state.durable.max(report.durable_lsn);
        state.appended = state.appended.max(report.appended_lsn);
        // What it says from before it knew the newest grant is about an older one.
        state.closed = report.closed && report.applied_index >= self.grant_index;
        state.fresh = true;
        state.arrivals.on_total(report.records);
        if report.point > state.point {
            self.advance(now_ns, index, report.point);
        }
        let (point, part) = (self.shards[index].point, self.shards[index].part);
        let reached = if point > self.target { self.last_wanted(index, report) } else { point };
        if reached > self.target {
            self.target = reached;
            self.pace_targets(now_ns, out);
        } else if repeated && (point < self.target || part != Part::In) {
            // The target may have been lost with a connection.
            self.send_target(now_ns, index, out);
        }
        self.look_at_leavers();
        self.decide(now_ns, out);
    }

    /// Time passed: paced targets, the watch over stragglers, the sequencer's own tick in `free-tick`.
    pub fn on_time(&mut self, now_ns: u64, out: &mut impl SequencerOut) {
        if self.target_due_ns.is_some_and(|at| at <= now_ns) {
            self.send_targets(now_ns, out);
        }
        if self.watch_at_ns.is_some_and(|at| at <= now_ns) {
            self.watch(now_ns, out);
        }
        if self.config.ordering == Ordering::FreeTick {
            let tick = self.config.tick_ns;
            let first = now_ns - now_ns % tick + self.config.tick_phase_ns % tick + tick;
            let next = *self.next_tick_ns.get_or_insert(first);
            if now_ns >= next {
                self.next_tick_ns = Some(next + ((now_ns - next) / tick + 1) * tick);
                self.tick_due = true;
            }
        }
        self.decide(now_ns, out);
    }

    /// When [`on_time`](Self::on_time) has something to do.
    pub fn deadline_ns(&self) -> u64 {
        if !self.leads {
            return u64::MAX;
        }
        let tick = match self.config.ordering {
            Ordering::FreeTick => Some(self.next_tick_ns.unwrap_or(0)),
            _ => None,
        };
        let times =
            [tick, self.target_due_ns, self.prefix_due_ns, self.watch_at_ns, self.return_at_ns(), self.look_at_ns()];
        times.into_iter().flatten().min().unwrap_or(u64::MAX)
    }

    /// An entry is committed at `index`: a proposal of this member, or of one that led before.
    ///
    /// # Errors
    /// When the order log contradicts itself: the sequencer must stop.
    pub fn on_committed(
        &mut self,
        now_ns: u64,
        index: u64,
        entry: &[u8],
        out: &mut impl SequencerOut,
    ) -> Result<Applied, Contradiction> {
        let Ok(decoded) = OrderEntry::decode(entry) else {
            return Err(Contradiction { invariant: "I17", what: "the order log holds bytes that are no entry" });
        };
        let applied = self.ledger.apply(index, &decoded)?;
        self.in_flight = false;
        match applied {
            Applied::Granted => {
                self.grant_index = index;
                self.on_granted(now_ns, out);
                let granted_once =
                    matches!(&decoded, OrderEntry::Grant(g) if g.window + 1 == self.ledger.next_window());
                if planted(Mutant::GrantTwice) && granted_once {
                    self.in_flight = true;
                    out.propose(entry);
                }
            }
            Applied::Bound => {
                self.stats.cuts += u64::from(self.leads);
                self.cut_at_ns = now_ns;
            }
            Applied::ViewChanged => self.on_shard_failed(now_ns),
            Applied::MembersChanged(shard) => {
                self.on_members_changed(shard);
                if planted(Mutant::ApplyVoidChanges)
                    && let Some(len) = self.encode_void_change(shard)
                {
                    self.in_flight = true;
                    out.propose(&self.buffer[..len]);
                }
            }
            Applied::Trimmed | Applied::Again | Applied::Void => {}
        }
        self.decide(now_ns, out);
        Ok(applied)
    }

    /// Proposes the next entry if one is due and none is in flight.
    fn decide(&mut self, now_ns: u64, out: &mut impl SequencerOut) {
        self.forgive(now_ns);
        if self.in_flight || !self.leads {
            return;
        }
        let membership = if self.may_look(now_ns) { self.encode_membership(now_ns) } else { None };
        let len = if membership.is_some() {
            membership
        } else if self.trim > self.ledger.trimmed() {
            Some(encode_trim(&mut self.buffer, self.ledger.view(), self.trim))
        } else if self.grant_due(now_ns) {
            Some(self.encode_grant(now_ns))
        } else {
            match self.ledger.bound_mode() {
                Some(WindowMode::Fixed) => self.encode_fixed_cut(now_ns),
                Some(WindowMode::Free) => self.encode_free_cut(),
                None => None,
            }
        };
        if let Some(len) = len {
            self.in_flight = true;
            out.propose(&self.buffer[..len]);
        }
    }

    /// The next window is granted when binding passes the middle of the last one, or at once when something is to
    /// change with it. A free window must be the one that is being cut; it ends whole, or where a change finds it.
    fn grant_due(&mut self, now_ns: u64) -> bool {
        let Some(mode) = self.ledger.mode() else { return true };
        // Without anybody who could take slots there is nothing to grant.
        let takes = |s: &ShardState| match s.part {
            Part::In | Part::Closing { .. } => true,
            // With the next grant it may return.
            Part::Grounded { until_ns } => until_ns <= now_ns,
            Part::Out | Part::Failed => false,
        };
        if !self.shards.iter().any(takes) {
            return false;
        }
        // Its edge is not brought near: on an idle log that would make shards late, and ground them, for nothing.
        self.change |= self.return_due(now_ns);
        let last = self.ledger.next_window() - 1;
        let bound = self.ledger.bound();
        match mode {
            WindowMode::Fixed => {
                self.change || bound >= CutPoint { window: last, cut: self.config.window_cuts / 2, prefix: 0 }
            }
            WindowMode::Free => bound.window > last || (self.change && bound.window == last),
        }
    }

    fn encode_grant(&mut self, now_ns: u64) -> usize {
        let mode = self.next_mode();
        self.change = false;
        self.granting_rush = core::mem::take(&mut self.rush);
        self.decide_quotas(now_ns, mode);
        // Where all who take slots were lost, or leave with this grant, the window is a free one: it has none.
        let mode = if self.members.iter().all(|m| m.quota == 0) { WindowMode::Free } else { mode };
        let (start, window) = (self.ledger.granted_end(), self.ledger.next_window());
        let head = grant_head(self.ledger.view(), mode, window, self.config.window_cuts, start);
        encode_grant(&mut self.buffer, head, &self.members)
    }

    /// A window opened: what it says of each shard, and what that makes of cuts not reported.
    fn on_granted(&mut self, now_ns: u64, out: &mut impl SequencerOut) {
        let window = self.ledger.next_window() - 1;
        let fixed = self.ledger.mode() == Some(WindowMode::Fixed);
        let start = CutPoint { window, cut: 0, prefix: 0 };
        self.stats.grants += u64::from(self.leads);
        self.stats.free_windows += u64::from(self.leads && !fixed);
        // What follows a free window begins where that was cut: nothing before it is to be reported any more.
        let all_bound = self.ledger.bound() >= start;
        for at in 0..self.shards.len() {
            let Some(member) = self.ledger.member(self.shards[at].shard).copied() else { continue };
            let state = &mut self.shards[at];
            state.open = member.open;
            if fixed && member.open {
                let changed = state.since.is_some() && state.quota != member.quota;
                self.stats.quota_changes += u64::from(self.leads && changed);
                state.quota = member.quota;
            }
            if state.since.is_none() || all_bound {
                state.since.get_or_insert(window);
                state.point = state.point.max(start);
            }
            if !fixed {
                state.fresh = false;
            }
            self.skip_windows_without_slots(at);
        }
        self.recount(now_ns);
        if !self.leads {
            return;
        }
        // Records of a free window are bound once the fixed windows before it are, and ask for nothing themselves.
        let waits = !fixed && !all_bound;
        if core::mem::take(&mut self.granting_rush) || waits {
            // Every shard fills up to the edge.
            self.edge = start;
            self.target = self.target.max(start);
            self.send_targets(now_ns, out);
        }
        self.close_again(now_ns, out);
    }

    /// The cut that every shard has reached, and the members of the next that are in already.
    fn encode_fixed_cut(&mut self, now_ns: u64) -> Option<usize> {
        let point = self.progress.reached(&self.shards)?;
        let bound = self.ledger.bound();
        self.prefix_due_ns = None;
        if point <= bound {
            return None;
        }
        let whole = CutPoint { prefix: 0, ..point };
        let due_ns = self.cut_at_ns + self.config.prefix_pace_ns;
        if whole <= bound && now_ns < due_ns {
            self.prefix_due_ns = Some(due_ns);
            return None;
        }
        let listed = self.shards.iter().filter(|s| s.since.is_some_and(|w| w <= point.window));
        for (index, state) in listed.enumerate() {
            let reported = state.point >= whole && (index >= point.prefix.into() || state.point > whole);
            invariant!(I11, reported, "shard {} has not reported what the cut {point} takes", state.shard);
        }
        Some(encode_cut(&mut self.buffer, self.ledger.view(), point))
    }

    fn encode_free_cut(&mut self) -> Option<usize> {
        let due = match self.config.ordering {
            Ordering::FreeTick => self.tick_due,
            _ => self.shards.iter().all(|s| s.fresh || !s.open),
        };
        if !due {
            return None;
        }
        self.tick_due = false;
        self.lsns.clear();
        let mut advanced = false;
        for state in self.shards.iter_mut().filter(|s| s.since.is_some()) {
            state.fresh = false;
            // A report that was overtaken by a newer cut's cannot take slots back.
            let committed = self.ledger.committed_lsn(state.shard);
            let durable = state.durable.max(committed);
            advanced |= durable > committed;
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
