//! The sequencer's duty cycle: reports in, the order log, the order stream to every replica out.
//!
//! Decisions are [`antelog_protocol::sequencer::Sequencer`]'s. The single sequencer is a group of one: a proposal is
//! committed when it is appended to the order log, and takes effect only from there.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::mpsc::Sender;

use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::sequencer::{Sequencer, SequencerConfig, SequencerOut};
use antelog_protocol::wire::change::ChangeOutcome;
use antelog_protocol::wire::node::{NODE_MESSAGE_BYTES_MAX, NodeMessage, ORDER_HEAD_BYTES, Report, Target};
use antelog_protocol::wire::order::ORDER_ENTRY_BYTES_MAX;
use antelog_protocol::{Change, ClientId, ShardId};

use super::agent::Agent;
use super::mailbox::{Admission, Mailbox, Notice};
use super::order_log::OrderLog;
use super::replica::CHANGES_MAX;
use crate::counters::{Counter, Counters};
use crate::transport::{DownReason, Event, MessageHandle, PeerId, Transport};

/// Order entries a replica may be sent beyond the index it has reported as applied: the order stream's flow control.
pub const ORDER_CREDIT: u64 = 256;

/// Order entries kept for followers.
const ORDER_ENTRIES_MAX: usize = 1 << 16;
/// Bytes of order entries kept for followers.
const ORDER_BYTES_MAX: usize = 8 << 20;

/// Changes remembered, so that one that is asked for again is answered and not made again after others have followed.
const CHANGES_REMEMBERED: usize = 1024;

/// A replica that follows the order stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    /// Its number at the sequencer.
    pub peer: PeerId,
    /// Its shard.
    pub shard: ShardId,
    /// Its number in the shard: 0 is the primary.
    pub replica: u16,
}

/// What a sequencer agent is made of, besides its transport.
#[derive(Debug)]
pub struct SequencerParts<L> {
    /// The protocol's options.
    pub config: SequencerConfig,
    /// Every replica of every shard; its number is its place in this list.
    pub replicas: Vec<Replica>,
    /// Connections come from here.
    pub mailbox: Mailbox<Admission<L>>,
    /// Losses are told here.
    pub notices: Sender<Notice>,
    /// Counters to publish in.
    pub counters: Counters,
}

#[derive(Debug)]
struct Follower {
    replica: Replica,
    connected: bool,
    /// Next index to send; known once the replica has reported what it applied.
    next: Option<u64>,
    applied: u64,
    /// A target that has not left.
    target: Option<Target>,
    /// A `ReadIndex` that was not answered: its token.
    read_index: Option<u64>,
    /// Answers to changes that have not left.
    changes: VecDeque<Changed>,
}

/// A change that was decided on.
#[derive(Clone, Copy, Debug)]
struct Changed {
    client: ClientId,
    token: u64,
    outcome: ChangeOutcome,
}

/// What a replica says.
enum Heard {
    Report(Report),
    ReadIndex(u64),
    Change(ClientId, u64, Change),
}

/// The protocol's effects.
struct Effects<'a> {
    /// The proposal waiting to be committed.
    proposal: &'a mut Vec<u8>,
    followers: &'a mut [Follower],
}

impl SequencerOut for Effects<'_> {
    fn propose(&mut self, entry: &[u8]) {
        assert!(self.proposal.is_empty(), "one proposal is in flight at most");
        self.proposal.extend_from_slice(entry);
    }

    fn target(&mut self, shard: ShardId, primary: u16, target: Target) {
        let follower = self.followers.iter_mut().find(|f| f.replica.shard == shard && f.replica.replica == primary);
        if let Some(follower) = follower {
            follower.target = Some(target);
        }
    }
}

struct SequencerCounters {
    reports: Counter,
    cuts: Counter,
    grants: Counter,
    targets: Counter,
    quota_changes: Counter,
    grounded: Counter,
    free_windows: Counter,
    fallbacks: Counter,
    committed: Counter,
}

/// See the module's text.
pub struct SequencerAgent<T: Transport> {
    transport: T,
    sequencer: Sequencer,
    order: OrderLog,
    proposal: Vec<u8>,
    followers: Vec<Follower>,
    /// The newest changes, oldest first.
    changes: VecDeque<Changed>,
    mailbox: Mailbox<Admission<T::Link>>,
    notices: Sender<Notice>,
    events: Box<[Event]>,
    message: Box<[u8]>,
    counters: SequencerCounters,
    started: bool,
}

impl<T: Transport> SequencerAgent<T> {
    /// Builds the agent on the thread that will run it.
    pub fn new(parts: SequencerParts<T::Link>, transport: T) -> SequencerAgent<T> {
        let followers = parts.replicas.iter().enumerate().map(|(at, replica)| {
            assert!(usize::from(replica.peer.0) == at, "replicas are numbered by their place");
            Follower {
                replica: *replica,
                connected: false,
                next: None,
                applied: 0,
                target: None,
                read_index: None,
                changes: VecDeque::new(),
            }
        });
        let counters = SequencerCounters {
            reports: parts.counters.register("reports"),
            cuts: parts.counters.register("cuts"),
            grants: parts.counters.register("grants"),
            targets: parts.counters.register("targets"),
            quota_changes: parts.counters.register("quota_changes"),
            grounded: parts.counters.register("grounded"),
            free_windows: parts.counters.register("free_windows"),
            fallbacks: parts.counters.register("fallbacks"),
            committed: parts.counters.register("committed_position"),
        };
        SequencerAgent {
            transport,
            sequencer: Sequencer::new(parts.config),
            order: OrderLog::new(0, ORDER_ENTRIES_MAX, ORDER_BYTES_MAX),
            proposal: Vec::with_capacity(ORDER_ENTRY_BYTES_MAX),
            followers: followers.collect(),
            changes: VecDeque::with_capacity(CHANGES_REMEMBERED),
            mailbox: parts.mailbox,
            notices: parts.notices,
            events: vec![Event::Notified { peer: PeerId(0), value: 0 }; 64].into_boxed_slice(),
            message: vec![0; ORDER_HEAD_BYTES + ORDER_ENTRY_BYTES_MAX].into_boxed_slice(),
            counters,
            started: false,
        }
    }

    /// The order log, as far as it is kept.
    pub fn order(&self) -> &OrderLog {
        &self.order
    }

    fn split(&mut self) -> (&mut Sequencer, Effects<'_>) {
        (&mut self.sequencer, Effects { proposal: &mut self.proposal, followers: &mut self.followers })
    }

    /// Appends proposals to the order log, which for a group of one commits them, until there are none.
    fn commit(&mut self, now_ns: u64) {
        let mut entry = [0; ORDER_ENTRY_BYTES_MAX];
        while !self.proposal.is_empty() {
            let len = self.proposal.len();
            entry[..len].copy_from_slice(&self.proposal);
            self.proposal.clear();
            let index = self.order.append(&entry[..len]);
            let (sequencer, mut effects) = self.split();
            if let Err(contradiction) = sequencer.on_committed(now_ns, index, &entry[..len], &mut effects) {
                panic!("sequencer: {contradiction}");
            }
        }
    }

    fn admit(&mut self) -> usize {
        let Some(Admission::Node { peer, link }) = self.mailbox.take() else { return 0 };
        let Some(follower) = self.followers.get_mut(usize::from(peer.0)) else { return 0 };
        self.transport.admit(peer, link, &[]);
        // Its first report says which index it needs next.
        (follower.connected, follower.next, follower.applied) = (true, None, 0);
        1
    }

    fn take_events(&mut self, now_ns: u64) -> usize {
        let count = self.transport.poll(&mut self.events);
        for at in 0..count {
            match self.events[at] {
                Event::Received { peer, message } => self.on_message(now_ns, peer, message),
                Event::PeerDown { peer, reason } => self.on_down(now_ns, peer, reason),
                Event::Notified { .. } | Event::Placed { .. } => {}
            }
        }
        count
    }

    fn on_message(&mut self, now_ns: u64, peer: PeerId, handle: MessageHandle) {
        let message = match NodeMessage::decode(self.transport.message(handle)) {
            Ok(NodeMessage::Report(report)) => Some(Heard::Report(report)),
            Ok(NodeMessage::ReadIndex { token }) => Some(Heard::ReadIndex(token)),
            Ok(NodeMessage::Change { client, token, change }) => Some(Heard::Change(client, token, change)),
            _ => None,
        };
        self.transport.release(handle);
        let follower = &mut self.followers[usize::from(peer.0)];
        match message {
            Some(Heard::Report(report)) if self.order.last_index() >= report.applied_index => {
                self.on_report(now_ns, peer, &report);
            }
            Some(Heard::ReadIndex(token)) => follower.read_index = Some(token),
            Some(Heard::Change(client, token, change)) if follower.changes.len() < CHANGES_MAX => {
                let changed = self.change(now_ns, client, token, change);
                self.followers[usize::from(peer.0)].changes.push_back(changed);
            }
            _ => {
                self.transport.fence(peer);
                self.on_down(now_ns, peer, DownReason::Protocol);
            }
        }
    }

    fn on_report(&mut self, now_ns: u64, peer: PeerId, report: &Report) {
        let follower = &mut self.followers[usize::from(peer.0)];
        let Replica { shard, replica, .. } = follower.replica;
        if report.shard != shard || report.replica != replica {
            self.transport.fence(peer);
            self.on_down(now_ns, peer, DownReason::Protocol);
            return;
        }
        follower.applied = follower.applied.max(report.applied_index);
        let came_back = follower.next.is_none() && report.applied_index > 0;
        follower.next.get_or_insert(report.applied_index + 1);
        if planted(Mutant::SkipAnOrderEntry) && came_back {
            follower.next = Some(report.applied_index + 2);
        }
        let mut report = *report;
        if planted(Mutant::CountRepeatedReports) && came_back {
            report.point = self.sequencer.ledger().point_after(report.point, 1).unwrap_or(report.point);
        }
        let (sequencer, mut effects) = self.split();
        sequencer.on_report(now_ns, &report, &mut effects);
        self.commit(now_ns);
    }

    /// Makes a change, unless it was made before: an answer that was lost must not undo what others have changed since.
    fn change(&mut self, now_ns: u64, client: ClientId, token: u64, change: Change) -> Changed {
        if let Some(changed) = self.changes.iter().find(|c| (c.client, c.token) == (client, token)) {
            return *changed;
        }
        let (sequencer, mut effects) = self.split();
        let decided = sequencer.on_change(now_ns, change, &mut effects);
        self.commit(now_ns);
        let changed = Changed { client, token, outcome: decided.map(|()| self.order.last_index()) };
        if self.changes.len() == CHANGES_REMEMBERED {
            self.changes.pop_front();
        }
        self.changes.push_back(changed);
        changed
    }

    fn on_down(&mut self, now_ns: u64, peer: PeerId, reason: DownReason) {
        let follower = &mut self.followers[usize::from(peer.0)];
        (follower.connected, follower.next, follower.read_index) = (false, None, None);
        follower.changes.clear();
        let Replica { shard, replica, .. } = follower.replica;
        let (sequencer, mut effects) = self.split();
        sequencer.on_replica_down(now_ns, shard, replica, &mut effects);
        self.commit(now_ns);
        // The control thread may be gone already when the node stops.
        let _ = self.notices.send(Notice::PeerDown { agent: "sequencer".into(), peer, reason });
    }

    /// Sends what followers lack. While there is other work (`busy`) backups wait: nothing depends on them hearing at
    /// once, as long as they stay within half their credit.
    fn send(&mut self, busy: bool) {
        for follower in &mut self.followers {
            let behind = follower.next.map_or(0, |next| (self.order.last_index() + 1).saturating_sub(next));
            let is_primary = follower.replica.replica == self.sequencer.primary(follower.replica.shard);
            if busy && !is_primary && behind < ORDER_CREDIT / 4 {
                continue;
            }
            let Some(next) = follower.next.as_mut().filter(|_| follower.connected) else { continue };
            while *next <= self.order.last_index() && *next <= follower.applied + ORDER_CREDIT {
                let Some(entry) = self.order.get(*next) else {
                    let text = format!(
                        "replica {} of shard {} needs order entry {next}, which is no longer kept (from {}): it cannot \
                         join any more, restart the cluster",
                        follower.replica.replica,
                        follower.replica.shard,
                        self.order.first_index()
                    );
                    let _ = self.notices.send(Notice::Warning { agent: "sequencer".into(), text });
                    self.transport.fence(follower.replica.peer);
                    follower.connected = false;
                    break;
                };
                let len = NodeMessage::Order { index: *next, entry }.encode(&mut self.message);
                if self.transport.send(follower.replica.peer, &self.message[..len]).is_err() {
                    break;
                }
                *next += 1;
            }
            let mut buffer = [0; NODE_MESSAGE_BYTES_MAX];
            if let Some(target) = follower.target {
                let len = NodeMessage::Target(target).encode(&mut buffer);
                if self.transport.send(follower.replica.peer, &buffer[..len]).is_ok() {
                    follower.target = None;
                }
            }
            if let Some(token) = follower.read_index {
                // A group of one is its own quorum: what it has committed is current.
                let index = self.order.last_index();
                let len = NodeMessage::ReadIndexIs { token, index }.encode(&mut buffer);
                if self.transport.send(follower.replica.peer, &buffer[..len]).is_ok() {
                    follower.read_index = None;
                }
            }
            while let Some(Changed { client, token, outcome }) = follower.changes.front().copied() {
                let len = NodeMessage::ChangeIs { client, token, outcome }.encode(&mut buffer);
                if self.transport.send(follower.replica.peer, &buffer[..len]).is_err() {
                    break;
                }
                follower.changes.pop_front();
            }
        }
    }

    fn publish(&self) {
        let stats = self.sequencer.stats();
        self.counters.reports.set(stats.reports);
        self.counters.cuts.set(stats.cuts);
        self.counters.grants.set(stats.grants);
        self.counters.targets.set(stats.targets);
        self.counters.quota_changes.set(stats.quota_changes);
        self.counters.grounded.set(stats.grounded);
        self.counters.free_windows.set(stats.free_windows);
        self.counters.fallbacks.set(stats.fallbacks);
        self.counters.committed.set(self.sequencer.ledger().committed().0);
    }
}

impl<T: Transport> Agent for SequencerAgent<T> {
    fn name(&self) -> &str {
        "sequencer"
    }

    fn duty_cycle(&mut self, now_ns: u64) -> usize {
        if !self.started {
            self.started = true;
            let (sequencer, mut effects) = self.split();
            sequencer.on_start(now_ns, &mut effects);
            self.commit(now_ns);
        }
        let mut work = self.take_events(now_ns);
        work += self.admit();
        if self.sequencer.deadline_ns() <= now_ns {
            let (sequencer, mut effects) = self.split();
            sequencer.on_time(now_ns, &mut effects);
            self.commit(now_ns);
            work += 1;
        }
        if work > 0 {
            self.publish();
        }
        self.send(work > 0);
        self.transport.flush();
        work
    }

    fn deadline_ns(&self) -> Option<u64> {
        Some(self.sequencer.deadline_ns()).filter(|d| *d != u64::MAX)
    }

    fn wait_fds(&self, fds: &mut Vec<RawFd>) {
        self.transport.wait_fds(fds);
    }

    fn prepare_wait(&mut self) -> bool {
        self.transport.prepare_wait() || self.mailbox.waits()
    }
}
