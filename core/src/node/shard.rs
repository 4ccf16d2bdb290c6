//! The primary's duty cycle: takes appends from the gate, replicates them, follows the order stream, reports.
//!
//! Decisions are [`antelog_protocol::shard::Shard`]'s; this file moves the bytes.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::mpsc::Sender;

use antelog_protocol::shard::{Append, FillRoom, Shard, ShardConfig, ShardOut};
use antelog_protocol::wire::node::{NODE_MESSAGE_BYTES_MAX, NodeMessage, Report};
use antelog_protocol::wire::order::{ORDER_ENTRY_BYTES_MAX, OrderEntry};
use antelog_protocol::{Change, ClientId, Lsn, Position, Refusal, ShardId};

use super::agent::Agent;
use super::bus::{self, GatePort, ToShard};
use super::mailbox::{Admission, Mailbox, Notice};
use super::sequencer::ORDER_CREDIT;
use crate::channel::mirror::Mirror;
use crate::channel::spsc::Producer;
use crate::counters::{Counter, Counters};
use crate::log::LogWriter;
use crate::transport::{DownReason, Event, MessageHandle, PeerId, Transport};

/// The sequencer's number at every replica.
pub const SEQUENCER: PeerId = PeerId(0);

/// Appends taken from the gate in one cycle, so that a burst cannot hold up the order stream.
const REQUESTS_PER_CYCLE: usize = 128;
/// Bytes a log lets run ahead of its slowest connected backup before it takes no more appends.
const LAG_BYTES_MAX: u64 = 8 << 20;

/// Changes on their way to the sequencer, for all clients together.
pub const CHANGES_MAX: usize = 64;

/// What a shard agent is made of, besides its transport.
#[derive(Debug)]
pub struct ShardParts<L> {
    /// The protocol's options.
    pub config: ShardConfig,
    /// Every report is held back this long, in nanoseconds: see
    /// [`report_delay_us`](crate::config::ShardEntry::report_delay_us).
    pub report_delay_ns: u64,
    /// The log.
    pub log: LogWriter,
    /// One mirror a backup, in the order of the protocol's backups.
    pub mirrors: Vec<Mirror>,
    /// The gate.
    pub gate: GatePort,
    /// Connections come from here.
    pub mailbox: Mailbox<Admission<L>>,
    /// Losses are told here.
    pub notices: Sender<Notice>,
    /// Counters to publish in.
    pub counters: Counters,
}

struct ShardCounters {
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

impl ShardCounters {
    fn new(counters: &Counters) -> ShardCounters {
        ShardCounters {
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

/// See the module's text.
pub struct ShardAgent<T: Transport> {
    name: String,
    shard_id: ShardId,
    transport: T,
    shard: Shard,
    log: LogWriter,
    mirrors: Vec<Mirror>,
    gate: GatePort,
    mailbox: Mailbox<Admission<T::Link>>,
    notices: Sender<Notice>,
    sequencer_connected: bool,
    /// The newest report that has not left.
    report: Option<Report>,
    report_delay_ns: u64,
    /// When the report that is held back may leave; a newer one that takes its place does not wait anew.
    report_due_ns: Option<u64>,
    /// A question for the sequencer that has not left.
    read_index: Option<u64>,
    /// The newest question that was not answered: asked again on a new connection.
    asked: Option<u64>,
    changes: VecDeque<Asked>,
    events: Box<[Event]>,
    counters: ShardCounters,
    /// The operator was told that the region is used up.
    exhausted: bool,
    /// Requests wait for acknowledgements or for entries to be confirmed.
    blocked: bool,
    /// Requests wait for room at the gate or for backups.
    no_room: bool,
}

/// A change that was not answered: asked again on a new connection.
#[derive(Clone, Copy, Debug)]
struct Asked {
    client: ClientId,
    token: u64,
    change: Change,
    sent: bool,
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
        tell_gate(self.answers, &[&bus::acknowledged(client, seq, position)]);
    }

    fn report(&mut self, report: &Report) {
        *self.report = Some(*report);
    }
}

/// Answers fit by construction: appends are taken only while there is room for theirs (L4). A gate that has not
/// drained megabytes of order entries hangs, and a node with a hung thread must stop.
fn tell_gate(answers: &mut Producer, parts: &[&[u8]]) {
    assert!(answers.push(parts).is_ok(), "the gate's thread does not drain its queue");
}

impl<T: Transport> ShardAgent<T> {
    /// From now on reports are held back this long, in nanoseconds: see [`ShardParts::report_delay_ns`].
    pub fn set_report_delay(&mut self, delay_ns: u64) {
        self.report_delay_ns = delay_ns;
    }

    /// Builds the agent on the thread that will run it; the log's region is registered by the caller, as the mirrors'
    /// source.
    pub fn new(parts: ShardParts<T::Link>, transport: T) -> ShardAgent<T> {
        let shard_id = parts.config.shard;
        assert!(parts.mirrors.len() == parts.config.backups, "one mirror a backup");
        ShardAgent {
            name: format!("shard-{shard_id}"),
            shard_id,
            transport,
            shard: Shard::new(parts.config),
            log: parts.log,
            mirrors: parts.mirrors,
            gate: parts.gate,
            mailbox: parts.mailbox,
            notices: parts.notices,
            sequencer_connected: false,
            report: None,
            report_delay_ns: parts.report_delay_ns,
            report_due_ns: None,
            read_index: None,
            asked: None,
            changes: VecDeque::new(),
            events: vec![Event::Notified { peer: SEQUENCER, value: 0 }; 64].into_boxed_slice(),
            counters: ShardCounters::new(&parts.counters),
            exhausted: false,
            blocked: false,
            no_room: false,
        }
    }

    fn admit(&mut self, now_ns: u64) -> usize {
        let Some(Admission::Node { peer, link }) = self.mailbox.take() else { return 0 };
        if peer == SEQUENCER {
            self.transport.admit(peer, link, &[]);
            self.sequencer_connected = true;
            self.read_index = self.asked;
            self.changes.iter_mut().for_each(|c| c.sent = false);
            let (shard, mut effects) = self.split(&[]);
            shard.on_sequencer_connected(now_ns, &mut effects);
        } else if let Some(mirror) = self.mirrors.iter_mut().find(|m| m.peer() == peer) {
            self.transport.admit(peer, link, std::slice::from_ref(mirror.control()));
            mirror.on_connected();
        }
        1
    }

    /// The protocol's state machine, and the effects it may have, borrowed apart.
    fn split<'a>(&'a mut self, record: &'a [u8]) -> (&'a mut Shard, Effects<'a>) {
        let effects = Effects { log: &mut self.log, record, answers: &mut self.gate.answers, report: &mut self.report };
        (&mut self.shard, effects)
    }

    /// Tells the protocol how much room fills have. A cycle writes far less than what separates the steps.
    fn look_at_room(&mut self) {
        let room = if self.log.make_room(0).is_ok() {
            FillRoom::Plenty
        } else if self.log.has_room_for_no_ops() {
            FillRoom::Few
        } else {
            FillRoom::None
        };
        if room == FillRoom::None && !self.log.recycles() && !self.exhausted {
            self.exhausted = true;
            let text = "the log region has no room left even for no-ops: no shard's records can be ordered any more; \
                        restart the cluster with a larger region_bytes";
            let _ = self.notices.send(Notice::Warning { agent: self.name.clone(), text: text.into() });
        }
        self.shard.set_room(room);
    }

    fn take_events(&mut self, now_ns: u64) -> usize {
        let count = self.transport.poll(&mut self.events);
        for at in 0..count {
            match self.events[at] {
                Event::Placed { peer, token } => self.on_placed(now_ns, peer, token),
                Event::Received { peer, message } => self.on_message(now_ns, peer, message),
                Event::PeerDown { peer, reason } => self.on_down(peer, reason),
                // A backup verified further: `drained` is read where it is needed.
                Event::Notified { .. } => {}
            }
        }
        count
    }

    fn on_placed(&mut self, now_ns: u64, peer: PeerId, token: u64) {
        let Some(backup) = self.mirrors.iter().position(|m| m.peer() == peer) else { return };
        let lsn = self.mirrors[backup].on_placed(token);
        let (shard, mut effects) = self.split(&[]);
        shard.on_placed(now_ns, backup, lsn, &mut effects);
    }

    fn on_message(&mut self, now_ns: u64, peer: PeerId, handle: MessageHandle) {
        let mut effects =
            Effects { log: &mut self.log, record: &[], answers: &mut self.gate.answers, report: &mut self.report };
        match NodeMessage::decode(self.transport.message(handle)) {
            Ok(NodeMessage::Order { index, entry }) if peer == SEQUENCER => {
                let decoded = OrderEntry::decode(entry);
                let Ok(decoded) = decoded else { panic!("shard {}: the order stream holds no entry", self.shard_id) };
                if let Err(contradiction) = self.shard.on_order_entry(now_ns, index, &decoded, &mut effects) {
                    panic!("shard {}: {contradiction}", self.shard_id);
                }
                tell_gate(&mut self.gate.answers, &[&bus::order_head(index), entry]);
            }
            Ok(NodeMessage::Lead { .. }) if peer == SEQUENCER => {}
            Ok(NodeMessage::Target(target)) if peer == SEQUENCER => {
                self.shard.on_target(now_ns, target, &mut effects);
            }
            Ok(NodeMessage::ReadIndexIs { token, index }) if peer == SEQUENCER => {
                self.asked = self.asked.filter(|asked| *asked > token);
                tell_gate(&mut self.gate.answers, &[&bus::read_index_is(token, index)]);
            }
            Ok(NodeMessage::ChangeIs { client, token, outcome }) if peer == SEQUENCER => {
                self.changes.retain(|c| (c.client, c.token) != (client, token));
                tell_gate(&mut self.gate.answers, &[&bus::change_is(client, token, outcome)]);
            }
            // Not a message for a primary: its sender does not speak the protocol.
            _ => {
                self.transport.fence(peer);
                self.on_down(peer, DownReason::Protocol);
            }
        }
        self.transport.release(handle);
    }

    fn on_down(&mut self, peer: PeerId, reason: DownReason) {
        if peer == SEQUENCER {
            self.sequencer_connected = false;
        } else if let Some(mirror) = self.mirrors.iter_mut().find(|m| m.peer() == peer) {
            mirror.on_down();
        }
        // The control thread may be gone already when the node stops.
        let _ = self.notices.send(Notice::PeerDown { agent: self.name.clone(), peer, reason });
    }

    /// Takes appends from the gate while there is room for all that they will need.
    fn take_requests(&mut self, now_ns: u64) -> usize {
        let mut count = 0;
        (self.blocked, self.no_room) = (false, false);
        while count < REQUESTS_PER_CYCLE {
            if !self.has_room() {
                self.no_room = true;
                break;
            }
            let Some(bytes) = self.gate.requests.peek() else { break };
            match bus::to_shard(bytes) {
                ToShard::ReadIndex { token } => {
                    // A newer question's answer is good for older ones too.
                    (self.read_index, self.asked) = (Some(token), Some(token));
                }
                ToShard::Change { client, token, change } => {
                    let known = self.changes.iter().any(|c| (c.client, c.token) == (client, token));
                    if !known && self.changes.len() == CHANGES_MAX {
                        self.blocked = true;
                        break;
                    }
                    if !known {
                        self.changes.push_back(Asked { client, token, change, sent: false });
                    }
                }
                ToShard::Append { client, connection, seq, record } => {
                    let verdict = self.shard.judge(client, seq);
                    let answer = match verdict {
                        Append::Busy => {
                            self.blocked = true;
                            break;
                        }
                        Append::Waiting => None,
                        Append::Bound(position) => Some(bus::acknowledged(client, seq, position)),
                        Append::Refused(refusal) => Some(bus::refused(client, connection, seq, refusal)),
                        Append::Accepted(lsn) => match self.log.make_room(record.len()) {
                            Ok(()) => {
                                let mut effects = Effects {
                                    log: &mut self.log,
                                    record,
                                    answers: &mut self.gate.answers,
                                    report: &mut self.report,
                                };
                                self.shard.accept(now_ns, lsn, client, seq, &mut effects);
                                None
                            }
                            Err(_) if self.log.recycles() => {
                                self.blocked = true;
                                break;
                            }
                            Err(_) => {
                                let region_bytes = self.log.region().len() as u64;
                                Some(bus::refused(client, connection, seq, Refusal::RegionFull { region_bytes }))
                            }
                        },
                    };
                    if let Some(answer) = answer {
                        // An accepted append is answered at once only when the region was full after all.
                        let refused = matches!(verdict, Append::Refused(_) | Append::Accepted(_));
                        self.counters.refused.add(u64::from(refused));
                        tell_gate(&mut self.gate.answers, &[&answer]);
                    }
                }
            }
            self.gate.requests.consume();
            count += 1;
        }
        count
    }

    /// Room at the gate for the answers to all pending appends and changes and one more, beside a grant; and backups near
    /// enough.
    fn has_room(&self) -> bool {
        let answers =
            (self.shard.pending() + self.changes.len() + 2) * (bus::ANSWER_BYTES + 16) + ORDER_ENTRY_BYTES_MAX;
        let tail = self.log.tail();
        self.gate.answers.room() >= answers
            && self.mirrors.iter().all(|m| !m.connected() || m.lag_bytes(tail) < LAG_BYTES_MAX)
    }

    fn send(&mut self, now_ns: u64) {
        let applied = self.shard.ledger().applied_index();
        if self.sequencer_connected && applied - self.shard.reported_index() >= ORDER_CREDIT / 2 {
            let (shard, mut effects) = self.split(&[]);
            shard.report_progress(now_ns, &mut effects);
        }
        let drained = self.mirrors.iter().map(Mirror::drained).min().unwrap_or(u64::MAX);
        self.log.set_limits(self.shard.committed(), drained);
        let (tail, next_lsn) = (self.log.tail(), self.log.next_lsn());
        for mirror in &mut self.mirrors {
            mirror.pump(&mut self.transport, tail, next_lsn);
        }
        if self.sequencer_connected {
            let mut buffer = [0; NODE_MESSAGE_BYTES_MAX];
            if let Some(report) = self.report {
                let due_ns = *self.report_due_ns.get_or_insert(now_ns + self.report_delay_ns);
                let len = NodeMessage::Report(report).encode(&mut buffer);
                if due_ns <= now_ns {
                    self.report_due_ns = None;
                    if self.transport.send(SEQUENCER, &buffer[..len]).is_ok() {
                        self.report = None;
                    }
                }
            }
            if let Some(token) = self.read_index {
                let len = NodeMessage::ReadIndex { token }.encode(&mut buffer);
                if self.transport.send(SEQUENCER, &buffer[..len]).is_ok() {
                    self.read_index = None;
                }
            }
            for asked in self.changes.iter_mut().filter(|c| !c.sent) {
                let Asked { client, token, change, .. } = *asked;
                let len = NodeMessage::Change { client, token, change }.encode(&mut buffer);
                asked.sent = self.transport.send(SEQUENCER, &buffer[..len]).is_ok();
            }
        }
    }

    fn publish(&mut self) {
        let deliverable = self.shard.deliverable();
        if deliverable != self.gate.progress.deliverable() {
            self.gate.progress.set_deliverable(deliverable);
            self.gate.waker.wake();
        }
        self.gate.answers.publish();
        let stats = self.shard.stats();
        self.counters.records.set(stats.records);
        self.counters.no_ops.set(stats.no_ops);
        self.counters.fills_by_age.set(stats.fills_by_age);
        self.counters.fills_by_target.set(stats.fills_by_target);
        self.counters.fills_ahead.set(stats.fills_ahead);
        self.counters.fills_by_timer.set(stats.fills_by_timer);
        self.counters.grant_stalls.set(stats.grant_stalls);
        self.counters.reports.set(stats.reports);
        self.counters.appended.set(self.shard.appended().0);
        self.counters.durable.set(self.shard.durable().0);
        self.counters.committed.set(self.shard.committed().0);
    }
}

impl<T: Transport> Agent for ShardAgent<T> {
    fn name(&self) -> &str {
        &self.name
    }

    fn duty_cycle(&mut self, now_ns: u64) -> usize {
        self.look_at_room();
        let mut work = self.take_events(now_ns);
        work += self.admit(now_ns);
        work += self.take_requests(now_ns);
        if self.shard.deadline_ns() <= now_ns {
            let (shard, mut effects) = self.split(&[]);
            shard.on_time(now_ns, &mut effects);
            work += 1;
        }
        if work > 0 {
            self.publish();
        }
        self.send(now_ns);
        self.transport.flush();
        work
    }

    fn deadline_ns(&self) -> Option<u64> {
        let shard_ns = self.shard.deadline_ns();
        let held_ns = self.report_due_ns.filter(|_| self.sequencer_connected);
        Some(held_ns.map_or(shard_ns, |held_ns| held_ns.min(shard_ns)))
    }

    fn wait_fds(&self, fds: &mut Vec<RawFd>) {
        self.transport.wait_fds(fds);
    }

    fn prepare_wait(&mut self) -> bool {
        let may_go_on = !self.blocked && (!self.no_room || self.has_room());
        self.transport.prepare_wait() || self.mailbox.waits() || (may_go_on && !self.gate.requests.is_empty())
    }
}
