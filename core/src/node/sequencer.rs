//! The sequencer's duty cycle: reports in, the order log, the order stream to every replica out.
//!
//! Decisions are [`antelog_protocol::sequencer::Sequencer`]'s and take effect when they are committed: at once by a
//! sequencer on its own, by most of the members in a group ([`super::group`]). Every member follows the order log; the one
//! that leads decides, sends order entries and targets, and answers.
//!
//! * `followers` — the replicas: the order stream, targets and answers on their way to them;
//! * `members` — the other members of the group, and what the group has learned;
//! * `state` — what a member that is far behind is given.

mod followers;
mod members;
mod state;

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::mpsc::Sender;

use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::sequencer::{Sequencer, SequencerConfig};
use antelog_protocol::wire::change::ChangeOutcome;
use antelog_protocol::wire::node::{NodeMessage, ORDER_HEAD_BYTES, Report};
use antelog_protocol::wire::order::ORDER_ENTRY_BYTES_MAX;
use antelog_protocol::{Change, ClientId, ShardId};

use self::followers::{Effects, Follower};
use super::agent::Agent;
use super::group::{Group, GroupParts, RaftGroup};
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
    /// The agent's name.
    pub name: String,
    /// The protocol's options.
    pub config: SequencerConfig,
    /// Every replica of every shard; its number is its place in this list.
    pub replicas: Vec<Replica>,
    /// The other members. `None`: there are none. Member `m` has the number `replicas.len() + m` as a peer.
    pub group: Option<GroupParts>,
    /// Connections come from here.
    pub mailbox: Mailbox<Admission<L>>,
    /// Losses are told here.
    pub notices: Sender<Notice>,
    /// Counters to publish in.
    pub counters: Counters,
}

/// A sequencer's group, as it knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    /// The identity of this sequencer in it.
    pub own: u64,
    /// Those that have a vote.
    pub voters: Vec<u64>,
    /// This one leads.
    pub leads: bool,
}

/// A change that was decided on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Changed {
    pub(crate) client: ClientId,
    pub(crate) token: u64,
    pub(crate) outcome: ChangeOutcome,
}

/// A change that a replica asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asking {
    peer: PeerId,
    client: ClientId,
    token: u64,
    change: Change,
}

/// What a replica says.
enum Heard {
    Report(Report),
    ReadIndex(u64),
    Change(ClientId, u64, Change),
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
    leads: Counter,
    members: Counter,
    is_leader: Counter,
    is_voter: Counter,
    term: Counter,
    applied: Counter,
}

/// See the module's text.
pub struct SequencerAgent<T: Transport> {
    name: String,
    transport: T,
    sequencer: Sequencer,
    group: Group,
    order: OrderLog,
    proposal: Vec<u8>,
    followers: Vec<Follower>,
    /// The newest changes, oldest first.
    changes: VecDeque<Changed>,
    /// Changes that wait to be made, or for what becomes of them, oldest first.
    asking: VecDeque<Asking>,
    /// The one that is on its way through the group.
    changing: Option<(ClientId, u64)>,
    free_cuts_max: usize,
    mailbox: Mailbox<Admission<T::Link>>,
    notices: Sender<Notice>,
    events: Box<[Event]>,
    message: Box<[u8]>,
    counters: SequencerCounters,
    started: bool,
    /// The operator was told that the disk is full.
    disk_is_full: bool,
    /// Who waits until another one leads: the process is about to end.
    leaving: Option<Sender<()>>,
}

impl<T: Transport> SequencerAgent<T> {
    /// Builds the agent on the thread that will run it.
    pub fn new(parts: SequencerParts<T::Link>, transport: T) -> SequencerAgent<T> {
        let followers = parts.replicas.iter().enumerate().map(|(at, replica)| {
            assert!(usize::from(replica.peer.0) == at, "replicas are numbered by their place");
            Follower::new(*replica)
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
            leads: parts.counters.register("leads"),
            members: parts.counters.register("members"),
            is_leader: parts.counters.register("is_leader"),
            is_voter: parts.counters.register("is_voter"),
            term: parts.counters.register("term"),
            applied: parts.counters.register("applied_index"),
        };
        SequencerAgent {
            name: parts.name,
            transport,
            free_cuts_max: parts.config.free_cuts_max,
            sequencer: Sequencer::new(parts.config),
            group: parts.group.map_or(Group::Alone, |group| Group::Raft(Box::new(RaftGroup::new(group)))),
            asking: VecDeque::new(),
            changing: None,
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
            disk_is_full: false,
            leaving: None,
        }
    }

    /// The order log, as far as it is kept.
    pub fn order(&self) -> &OrderLog {
        &self.order
    }

    /// Its group, as it knows it; `None`: it is on its own.
    pub fn members(&self) -> Option<Members> {
        let Group::Raft(group) = &self.group else { return None };
        Some(Members { own: group.id(), voters: group.members().0.to_vec(), leads: group.leads().is_some() })
    }

    /// Hands leadership to another member of the group, if this one leads.
    pub fn transfer_leadership(&mut self, member: usize) {
        if let Group::Raft(group) = &mut self.group {
            group.transfer_leadership(member);
        }
    }

    fn is_follower_of(&self, report: &Report, peer: PeerId) -> bool {
        let Replica { shard, replica, .. } = self.followers[usize::from(peer.0)].replica;
        // On its own it has committed all there is; a group's member may lag behind its leader.
        let known = report.applied_index <= self.order.last_index() || !matches!(self.group, Group::Alone);
        (report.shard, report.replica) == (shard, replica) && known
    }

    fn split(&mut self) -> (&mut Sequencer, Effects<'_>) {
        (&mut self.sequencer, Effects { proposal: &mut self.proposal, followers: &mut self.followers })
    }

    fn admit(&mut self) -> usize {
        let (peer, link) = match self.mailbox.take() {
            Some(Admission::Node { peer, link }) => (peer, link),
            Some(Admission::Leave { done }) => {
                self.leaving = Some(done);
                return 1;
            }
            _ => return 0,
        };
        let member = self.member(peer);
        self.transport.admit(peer, link, &[]);
        match (member, &mut self.group) {
            (Some(member), Group::Raft(group)) => group.connected(member),
            (Some(_), Group::Alone) => self.transport.fence(peer),
            (None, _) => {
                // Its first report says which index it needs next: it may have lost what it had reported before.
                let follower = &mut self.followers[usize::from(peer.0)];
                follower.drop_all();
                (follower.connected, follower.lead_due) = (true, true);
                (follower.report, follower.applied) = (None, 0);
            }
        }
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
        if let Some(member) = self.member(peer) {
            self.on_group_message(now_ns, peer, member, handle);
            return self.commit(now_ns);
        }
        let message = match NodeMessage::decode(self.transport.message(handle)) {
            Ok(NodeMessage::Report(report)) => Some(Heard::Report(report)),
            Ok(NodeMessage::ReadIndex { token }) => Some(Heard::ReadIndex(token)),
            Ok(NodeMessage::Change { client, token, change }) => Some(Heard::Change(client, token, change)),
            _ => None,
        };
        self.transport.release(handle);
        let leads = self.leads().is_some();
        let asking = self.asking.iter().filter(|a| a.peer == peer).count();
        let answers = asking + self.followers[usize::from(peer.0)].changes.len();
        match message {
            Some(Heard::Report(report)) if self.is_follower_of(&report, peer) => self.on_report(now_ns, peer, &report),
            // Only the leader answers: whoever asked another member asks again when it hears of the leader.
            Some(Heard::ReadIndex(token)) if leads => {
                let question = self.ask_read();
                self.followers[usize::from(peer.0)].read_index = Some((token, question));
                self.commit(now_ns);
            }
            // It may ask for all of its changes again when it hears of a new leader.
            Some(Heard::Change(client, token, change)) if leads && answers < 2 * CHANGES_MAX => {
                self.change(now_ns, Asking { peer, client, token, change });
            }
            Some(Heard::ReadIndex(_) | Heard::Change(..)) if !leads => {}
            _ => {
                self.transport.fence(peer);
                self.on_down(now_ns, peer, DownReason::Protocol);
            }
        }
    }

    fn on_report(&mut self, now_ns: u64, peer: PeerId, report: &Report) {
        let at = usize::from(peer.0);
        self.followers[at].report = Some(*report);
        if let Group::Raft(group) = &mut self.group {
            group.hear(at);
        }
        if self.leads().is_some() {
            self.take_report(now_ns, at, report);
        }
    }

    /// The leader takes a report.
    fn take_report(&mut self, now_ns: u64, at: usize, report: &Report) {
        if report.applied_index > self.order.last_index() {
            return; // Another leads already, and this member does not know it yet.
        }
        let follower = &mut self.followers[at];
        follower.applied = follower.applied.max(report.applied_index);
        let came_back = follower.next.is_none() && report.applied_index > 0;
        if follower.connected {
            follower.next.get_or_insert(report.applied_index + 1);
        }
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

    fn on_down(&mut self, now_ns: u64, peer: PeerId, reason: DownReason) {
        match (self.member(peer), &mut self.group) {
            (Some(member), Group::Raft(group)) => group.disconnected(member),
            (Some(_), Group::Alone) => {}
            (None, _) => {
                let follower = &mut self.followers[usize::from(peer.0)];
                follower.connected = false;
                follower.drop_all();
                let Replica { shard, replica, .. } = follower.replica;
                self.asking.retain(|asking| asking.peer != peer);
                if self.leads().is_some() {
                    let (sequencer, mut effects) = self.split();
                    sequencer.on_replica_down(now_ns, shard, replica, &mut effects);
                }
            }
        }
        self.commit(now_ns);
        // The control thread may be gone already when the node stops.
        let _ = self.notices.send(Notice::PeerDown { agent: self.name.clone(), peer, reason });
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
        self.counters.applied.set(self.sequencer.ledger().applied_index());
        self.counters.is_leader.set(self.leads().is_some().into());
        let (members, term, is_voter) = match &self.group {
            Group::Alone => (1, 1, true),
            Group::Raft(group) => {
                let voters = group.members().0;
                (voters.len(), group.leader().1, voters.contains(&group.id()))
            }
        };
        self.counters.is_voter.set(is_voter.into());
        self.counters.members.set(members as u64);
        self.counters.term.set(term);
    }
}

impl<T: Transport> Agent for SequencerAgent<T> {
    fn name(&self) -> &str {
        &self.name
    }

    fn duty_cycle(&mut self, now_ns: u64) -> usize {
        if !self.started {
            self.started = true;
            if matches!(self.group, Group::Alone) {
                self.counters.leads.add(1);
                let (sequencer, mut effects) = self.split();
                sequencer.on_lead(now_ns, &mut effects);
                self.commit(now_ns);
            }
        }
        let mut work = self.take_events(now_ns);
        work += self.admit();
        if self.sequencer.deadline_ns() <= now_ns {
            let (sequencer, mut effects) = self.split();
            sequencer.on_time(now_ns, &mut effects);
            self.commit(now_ns);
            work += 1;
        }
        if let Group::Raft(group) = &mut self.group {
            // After messages: a leader's sign of life may have waited for a thread that did not run.
            group.settle(now_ns);
            group.tick(now_ns);
            self.tell_whether_full();
            self.commit(now_ns);
        }
        self.look_whether_left();
        if work > 0 {
            self.publish();
        }
        self.send(work > 0);
        self.send_to_members();
        self.transport.flush();
        work
    }

    fn deadline_ns(&self) -> Option<u64> {
        let group_ns = match &self.group {
            Group::Alone => u64::MAX,
            Group::Raft(group) => group.deadline_ns(),
        };
        Some(self.sequencer.deadline_ns().min(group_ns)).filter(|d| *d != u64::MAX)
    }

    fn stop(&mut self, _now_ns: u64) {
        if let Group::Raft(group) = &mut self.group {
            group.close();
        }
    }

    fn wait_fds(&self, fds: &mut Vec<RawFd>) {
        self.transport.wait_fds(fds);
    }

    fn prepare_wait(&mut self) -> bool {
        self.transport.prepare_wait() || self.mailbox.waits()
    }
}
