//! The part of a replica that leads: takes appends from the gate, replicates them, follows the order stream, reports.
//!
//! Decisions are [`antelog_protocol::shard::Shard`]'s; this file moves the bytes.

use antelog_protocol::ledger::{Applied, Contradiction, Ledger};
use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::shard::{Append, FillRoom, Shard, ShardOut};
use antelog_protocol::wire::node::{Report, Target};
use antelog_protocol::wire::order::{ORDER_ENTRY_BYTES_MAX, OrderEntry};
use antelog_protocol::{ClientId, Lsn, Outcome, Position, Refusal, ReplicaId};

use super::catch_up::CHUNK_TOKEN;
use super::peers::Standing;
use super::{Life, ReplicaAgent};
use crate::channel::spsc::Producer;
use crate::counters::{Counter, Counters};
use crate::log::LogWriter;
use crate::node::bus::{self, ANY_CONNECTION, ToShard};
use crate::node::mailbox::Notice;
use crate::node::sequencer::ORDER_CREDIT;
use crate::storage::refill_margin;
use crate::transport::{DownReason, PeerId, Transport};

/// Appends taken from the gate in one cycle, so that a burst cannot hold up the order stream.
const REQUESTS_PER_CYCLE: usize = 128;
/// Bytes a log lets run ahead of its slowest connected member before it takes no more appends.
const LAG_BYTES_MAX: u64 = 8 << 20;

/// See the module's text.
pub(super) struct Leader {
    pub(super) shard: Shard,
    pub(super) log: LogWriter,
    /// The newest report that has not been taken.
    report: Option<Report>,
    /// A replica that follows and is to become a member: its placements count until a change of members says more.
    pub(super) joiner: Option<ReplicaId>,
    /// Records have room on all members' disks up to this offset.
    disk_room: u64,
    /// Slots are missing in the log that were bound.
    pub(super) has_gaps: bool,
    /// The operator was told that the region is used up.
    exhausted: bool,
    /// Requests wait for acknowledgements or for entries to be confirmed.
    blocked: bool,
    /// Requests wait for room at the gate or for backups.
    no_room: bool,
}

pub(super) struct LeaderCounters {
    records: Counter,
    no_ops: Counter,
    fills_by_age: Counter,
    fills_by_target: Counter,
    fills_ahead: Counter,
    fills_by_timer: Counter,
    grant_stalls: Counter,
    reports: Counter,
    refused: Counter,
    appended: Counter,
    durable: Counter,
    committed: Counter,
}

impl LeaderCounters {
    pub(super) fn new(counters: &Counters) -> LeaderCounters {
        LeaderCounters {
            records: counters.register("records"),
            no_ops: counters.register("no_ops"),
            fills_by_age: counters.register("fills_by_age"),
            fills_by_target: counters.register("fills_by_target"),
            fills_ahead: counters.register("fills_ahead"),
            fills_by_timer: counters.register("fills_by_timer"),
            grant_stalls: counters.register("grant_stalls"),
            reports: counters.register("reports"),
            refused: counters.register("appends_refused"),
            appended: counters.register("appended_lsn"),
            durable: counters.register("durable_lsn"),
            committed: counters.register("committed_lsn"),
        }
    }
}

/// The protocol's effects, applied to the parts they concern.
struct Effects<'a> {
    log: &'a mut LogWriter,
    record: &'a [u8],
    answers: &'a mut Producer,
    report: &'a mut Option<Report>,
}

impl ShardOut for Effects<'_> {
    fn record(&mut self, lsn: Lsn, client: ClientId, seq: u64) {
        assert!(self.log.next_lsn() == lsn, "slot {lsn} is written after {}", self.log.next_lsn());
        self.log.record(client, seq, self.record);
    }

    fn no_ops(&mut self, lsn: Lsn, count: u32) {
        assert!(self.log.next_lsn() == lsn, "slot {lsn} is written after {}", self.log.next_lsn());
        self.log.no_ops(count);
    }

    fn acknowledge(&mut self, client: ClientId, seq: u64, _lsn: Lsn, position: Position) {
        bus::tell(self.answers, &[&bus::acknowledged(client, seq, position)]);
    }

    fn forget(&mut self, client: ClientId, seq: u64) {
        bus::tell(self.answers, &[&bus::refused(client, ANY_CONNECTION, seq, Refusal::Forgotten)]);
    }

    fn report(&mut self, report: &Report) {
        *self.report = Some(*report);
    }
}

impl Leader {
    pub(super) fn new(shard: Shard, log: LogWriter, has_gaps: bool) -> Leader {
        let (report, joiner) = (None, None);
        Leader {
            shard,
            log,
            report,
            joiner,
            disk_room: u64::MAX,
            has_gaps,
            exhausted: false,
            blocked: false,
            no_room: false,
        }
    }

    /// The protocol's state machine, and the effects it may have, borrowed apart.
    fn split<'a>(&'a mut self, record: &'a [u8], answers: &'a mut Producer) -> (&'a mut Shard, Effects<'a>) {
        let effects = Effects { log: &mut self.log, record, answers, report: &mut self.report };
        (&mut self.shard, effects)
    }

    pub(super) fn begin(&mut self, now_ns: u64, counted: u8, answers: &mut Producer) {
        let (shard, mut effects) = self.split(&[], answers);
        shard.begin(now_ns, counted, &mut effects);
    }

    pub(super) fn on_order_entry(
        &mut self,
        now_ns: u64,
        index: u64,
        entry: &OrderEntry<'_>,
        answers: &mut Producer,
    ) -> Result<Applied, Contradiction> {
        let (shard, mut effects) = self.split(&[], answers);
        shard.on_order_entry(now_ns, index, entry, &mut effects)
    }

    pub(super) fn follow_anew(&mut self, now_ns: u64, ledger: Ledger, answers: &mut Producer) {
        let (shard, mut effects) = self.split(&[], answers);
        shard.follow_anew(now_ns, ledger, &mut effects);
    }

    pub(super) fn on_target(&mut self, now_ns: u64, target: Target, answers: &mut Producer) {
        let (shard, mut effects) = self.split(&[], answers);
        shard.on_target(now_ns, target, &mut effects);
    }

    pub(super) fn set_counted(&mut self, now_ns: u64, counted: u8, answers: &mut Producer) {
        let (shard, mut effects) = self.split(&[], answers);
        shard.set_counted(now_ns, counted, &mut effects);
    }
}

impl<T: Transport> ReplicaAgent<T> {
    /// Tells the protocol how much room fills have. A cycle writes far less than what separates the steps.
    fn look_at_room(&mut self) {
        let Some(Life::Leading(leader)) = &mut self.life else { return };
        let room = if leader.log.make_room(0).is_ok() && leader.log.tail() <= leader.disk_room {
            FillRoom::Plenty
        } else if leader.log.has_room_for_no_ops() {
            FillRoom::Few
        } else {
            FillRoom::None
        };
        if room == FillRoom::None && !leader.log.recycles() && !leader.exhausted {
            leader.exhausted = true;
            let text = "the log region has no room left even for no-ops: no shard's records can be ordered any more; \
                        restart the cluster with a larger region_bytes";
            let _ = self.notices.send(Notice::Warning { agent: self.name.clone(), text: text.into() });
        }
        leader.shard.set_room(room);
    }

    pub(super) fn on_placed(&mut self, now_ns: u64, peer: PeerId, token: u64) {
        if !self.is_primary() {
            return;
        }
        let Some(other) = self.peers.iter_mut().find(|p| p.id() == peer) else { return };
        if token == CHUNK_TOKEN {
            let number = other.number;
            return self.on_chunk_placed(now_ns, number);
        }
        let lsn = other.mirror.on_placed(token);
        self.on_log_placed(now_ns, peer, lsn);
    }

    /// Everything below `lsn` is placed on a replica.
    pub(super) fn on_log_placed(&mut self, now_ns: u64, peer: PeerId, lsn: Lsn) {
        let Some(Life::Leading(leader)) = &mut self.life else { return };
        let Some(other) = self.peers.iter().find(|p| p.id() == peer) else { return };
        if self.disk.as_ref().is_none_or(|disk| !disk.flushed) {
            let (shard, mut effects) = leader.split(&[], &mut self.gate.answers);
            shard.on_placed(now_ns, other.number, lsn, &mut effects);
        }
        if other.standing == Standing::Joining && leader.joiner.is_none() {
            self.count_joiner(now_ns, peer);
        }
    }

    /// Every member's flushed log counts, and nothing else: its own, and what the others say of theirs.
    pub(super) fn count_flushed(&mut self, now_ns: u64, own: Lsn) {
        let own_number = self.own.number;
        let Some(Life::Leading(leader)) = &mut self.life else { return };
        let counts = |p: &&super::Peer| matches!(p.standing, Standing::Member | Standing::Joining);
        let others = self.peers.iter().filter(counts).map(|p| (p.number, p.mirror.flushed()));
        let (mut impossible, mut joins) = (None, None);
        for (number, lsn) in others.chain([(own_number, own)]) {
            if lsn > leader.shard.appended() {
                impossible = Some(number);
            } else if lsn > leader.shard.placed(number) {
                let (shard, mut effects) = leader.split(&[], &mut self.gate.answers);
                shard.on_placed(now_ns, number, lsn, &mut effects);
                joins = joins.or(Some(number));
            }
        }
        if joins.is_some() && leader.joiner.is_none() {
            let joining = self.peers.iter().find(|p| p.standing == Standing::Joining).map(super::Peer::id);
            joining.into_iter().for_each(|id| self.count_joiner(now_ns, id));
        }
        if let Some(peer) = impossible.and_then(|number| self.peer(number)).map(|p| p.id()) {
            // It has not the log that it is given.
            self.cut_off(now_ns, peer, DownReason::Protocol);
        }
    }

    /// What the protocol does by time.
    pub(super) fn lead_on_time(&mut self, now_ns: u64) -> usize {
        let Some(Life::Leading(leader)) = &mut self.life else { return 0 };
        let mut work = 0;
        if leader.shard.deadline_ns() <= now_ns {
            let (shard, mut effects) = leader.split(&[], &mut self.gate.answers);
            shard.on_time(now_ns, &mut effects);
            work += 1;
        }
        let applied = leader.shard.ledger().applied_index();
        if applied - leader.shard.reported_index() >= ORDER_CREDIT / 2 {
            let (shard, mut effects) = leader.split(&[], &mut self.gate.answers);
            shard.report_progress(now_ns, &mut effects);
        }
        work
    }

    /// The newest report, with what this replica knows of the others.
    pub(super) fn report_as_leader(&mut self, now_ns: u64) {
        let lost = self.lost();
        let Some(Life::Leading(leader)) = &mut self.life else { return };
        let joiner = leader.joiner;
        let (shard, mut effects) = leader.split(&[], &mut self.gate.answers);
        shard.set_replicas(now_ns, lost, joiner, &mut effects);
        if leader.report.is_none() {
            let (shard, mut effects) = leader.split(&[], &mut self.gate.answers);
            shard.on_sequencer_connected(now_ns, &mut effects);
        }
    }

    /// Takes appends from the gate while there is room for all that they will need.
    pub(super) fn take_requests(&mut self, now_ns: u64) -> usize {
        let mut count = 0;
        if let Some(leader) = self.leader() {
            (leader.blocked, leader.no_room) = (false, false);
        }
        while count < REQUESTS_PER_CYCLE {
            if !self.has_room() {
                if let Some(leader) = self.leader() {
                    leader.no_room = true;
                }
                break;
            }
            let Some(bytes) = self.gate.requests.peek() else { break };
            match bus::to_shard(bytes) {
                ToShard::ReadIndex { token } => self.questions.ask(token),
                ToShard::Change { client, token, change } => {
                    if !self.questions.change(client, token, change) {
                        break;
                    }
                }
                ToShard::Outcome { asker, token, client, seq } => {
                    let (outcome, next_seq) = match &self.life {
                        Some(Life::Leading(leader)) => {
                            let on_disk = self.disk.as_ref().map(|disk| disk.store.first().lsn);
                            leader.outcome(client, seq, on_disk)
                        }
                        _ => (Outcome::NotHere, 0),
                    };
                    bus::tell(&mut self.gate.answers, &[&bus::outcome_is(asker, token, outcome, next_seq)]);
                }
                ToShard::Append { client, connection, epoch, seq, record } => {
                    // What was meant for an earlier epoch may be in the log, or lost with it: its session has to ask.
                    let (own, life) = (self.epoch, &mut self.life);
                    let Some(Life::Leading(leader)) = life.as_mut().filter(|_| epoch == own) else {
                        let refused = bus::refused(client, connection, seq, Refusal::NotHere);
                        bus::tell(&mut self.gate.answers, &[&refused]);
                        self.gate.requests.consume();
                        count += 1;
                        continue;
                    };
                    let Ok(answer) = leader.append(now_ns, client, connection, seq, record, &mut self.gate.answers)
                    else {
                        leader.blocked = true;
                        break;
                    };
                    if let Some((answer, refused)) = answer {
                        self.counters.leader.refused.add(u64::from(refused));
                        bus::tell(&mut self.gate.answers, &[&answer]);
                    }
                }
            }
            self.gate.requests.consume();
            count += 1;
        }
        count
    }

    /// Room at the gate for the answers to all pending appends and changes and one more, beside a grant; and members near
    /// enough.
    fn has_room(&self) -> bool {
        let (pending, tail) = match &self.life {
            Some(Life::Leading(leader)) => (leader.shard.pending(), leader.log.tail()),
            _ => (0, 0),
        };
        let answers = (pending + self.questions.changes() + 2) * (bus::ANSWER_BYTES + 16) + ORDER_ENTRY_BYTES_MAX;
        let near = |p: &super::Peer| p.standing != Standing::Member || p.mirror.lag_bytes(tail) < LAG_BYTES_MAX;
        self.gate.answers.room() >= answers
            && (!self.is_primary() || self.peers.iter().all(|p| !p.mirror.connected() || near(p)))
    }

    /// Whether requests wait that could be taken.
    pub(super) fn requests_wait(&self) -> bool {
        let may_go_on = match &self.life {
            Some(Life::Leading(leader)) => !leader.blocked && (!leader.no_room || self.has_room()),
            _ => self.has_room(),
        };
        may_go_on && !self.gate.requests.is_empty()
    }

    /// Replicates what was appended, and takes the report that is due.
    pub(super) fn send_log(&mut self, now_ns: u64) {
        let Some(Life::Leading(leader)) = &mut self.life else { return };
        if let Some(report) = leader.report.take() {
            self.report = report;
            self.spread_report();
        }
        self.catch_up(now_ns);
        self.limit_log();
        let Some(Life::Leading(leader)) = &mut self.life else { return };
        let (tail, next_lsn) = (leader.log.tail(), leader.log.next_lsn());
        for peer in &mut self.peers {
            // Whoever was born anew has not learned yet what is bound of what it has in memory, which must not be
            // overwritten by what this log had beyond its.
            let fits = self.disk.is_none() || tail <= peer.mirror.drained() + self.region.len() as u64;
            if peer.from_disk || !fits {
                peer.mirror.announce(&mut self.transport);
            } else {
                peer.mirror.pump(&mut self.transport, tail, next_lsn);
            }
        }
    }

    /// Tells the log what may be dropped and overwritten, and the protocol how much room that leaves: at the end of every
    /// cycle, and at once when another replica is to follow from a place, because appends of the same cycle must not
    /// overwrite what it is to be given.
    pub(super) fn limit_log(&mut self) {
        let Some(Life::Leading(leader)) = &mut self.life else { return };
        let mut drained = self.peers.iter().map(super::Peer::drained).min().unwrap_or(u64::MAX);
        let mut written = u64::MAX;
        if let Some(disk) = &self.disk {
            let own = self.told_room.filter(|room| *room != 0).unwrap_or(u64::MAX);
            leader.disk_room = self.peers.iter().map(super::Peer::disk_room).min().unwrap_or(u64::MAX).min(own);
            // After a restart the region is not filled to the last byte again, and must reach back to what is bound.
            drained = drained.min(disk.store.released()).saturating_sub(refill_margin(self.region.len() as u64));
            written = disk.store.written();
        }
        leader.log.set_limits(leader.shard.committed(), drained, written);
        self.look_at_room();
    }

    pub(super) fn publish(&mut self) {
        self.gate.answers.publish();
        let Some(Life::Leading(leader)) = &self.life else { return };
        let deliverable = leader.shard.deliverable();
        if deliverable != self.gate.progress.deliverable() {
            self.gate.progress.set_deliverable(deliverable);
            self.gate.waker.wake();
        }
        let (stats, counters) = (leader.shard.stats(), &self.counters.leader);
        counters.records.set(stats.records);
        counters.no_ops.set(stats.no_ops);
        counters.fills_by_age.set(stats.fills_by_age);
        counters.fills_by_target.set(stats.fills_by_target);
        counters.fills_ahead.set(stats.fills_ahead);
        counters.fills_by_timer.set(stats.fills_by_timer);
        counters.grant_stalls.set(stats.grant_stalls);
        counters.reports.set(stats.reports);
        counters.appended.set(leader.shard.appended().0);
        counters.durable.set(leader.shard.durable().0);
        counters.committed.set(leader.shard.committed().0);
    }

    /// Counts a joiner that has everything that is durable, and asks for it to become a member.
    pub(super) fn count_joiner(&mut self, now_ns: u64, peer: PeerId) {
        let Some(Life::Leading(leader)) = &mut self.life else { return };
        let Some(other) = self.peers.iter().find(|p| p.id() == peer) else { return };
        let early = planted(Mutant::CountASpareEarly);
        let caught_up = leader.shard.placed(other.number) >= leader.shard.durable() || early;
        if let Some(replica) = other.replica().filter(|_| caught_up && other.mirror.connected()) {
            leader.joiner = Some(replica);
            self.recount(now_ns);
            self.report_as_leader(now_ns);
        }
    }

    /// Whose placements count: the members' and a joiner's.
    pub(super) fn recount(&mut self, now_ns: u64) {
        let own = self.own.number;
        let Some(Life::Leading(leader)) = &mut self.life else { return };
        let members = leader.shard.ledger().membership(self.config.shard).map_or(&[][..], |m| &m.members);
        let numbers = members.iter().map(|m| m.number).filter(|n| *n != own);
        let mut counted = numbers.fold(0, |bits: u8, n| bits | 1 << n);
        if self.disk.as_ref().is_some_and(|disk| disk.flushed) {
            counted |= 1 << own;
        }
        if !planted(Mutant::CountASpareEarly) {
            counted |= leader.joiner.map_or(0, |j| 1 << j.number);
        }
        leader.set_counted(now_ns, counted, &mut self.gate.answers);
    }
}

impl Leader {
    /// What became of a session's append. Without the log from its first slot on, an unknown number may be one of those that
    /// are missing.
    fn outcome(&self, client: ClientId, seq: u64, on_disk: Option<Lsn>) -> (Outcome, u64) {
        let first = on_disk.or_else(|| self.log.first_place().map(|first| first.lsn));
        self.shard.outcome(client, seq, first == Some(Lsn(0)) && !self.has_gaps)
    }
}

/// The answer to an append, if there is one at once, and whether it is a refusal.
type Answered = Option<([u8; bus::ANSWER_BYTES], bool)>;

/// The append has to wait.
struct Wait;

impl Leader {
    fn append(
        &mut self,
        now_ns: u64,
        client: ClientId,
        connection: u32,
        seq: u64,
        record: &[u8],
        answers: &mut Producer,
    ) -> Result<Answered, Wait> {
        Ok(match self.shard.judge(client, seq) {
            Append::Busy => return Err(Wait),
            Append::Waiting => None,
            Append::Bound(position) => Some((bus::acknowledged(client, seq, position), false)),
            Append::Refused(refusal) => Some((bus::refused(client, connection, seq, refusal), true)),
            Append::Accepted(_) if self.log.tail() > self.disk_room => {
                Some((bus::refused(client, connection, seq, Refusal::DiskFull), true))
            }
            Append::Accepted(lsn) => match self.log.make_room(record.len()) {
                Ok(()) => {
                    let (shard, mut effects) = self.split(record, answers);
                    shard.accept(now_ns, lsn, client, seq, &mut effects);
                    None
                }
                Err(_) if self.log.recycles() => return Err(Wait),
                Err(_) => {
                    let region_bytes = self.log.region().len() as u64;
                    Some((bus::refused(client, connection, seq, Refusal::RegionFull { region_bytes }), true))
                }
            },
        })
    }
}
