//! The duty cycle of a replica of a shard: it follows the order stream, and either leads its shard as primary (takes appends
//! from the gate, replicates them, reports) or follows the primary's log.
//!
//! Who leads is said by the order log alone. Decisions of a primary are [`antelog_protocol::shard::Shard`]'s; these files
//! move the bytes:
//!
//! * `leader` — a primary's work in a cycle;
//! * `follower` — a backup's: what it checks and keeps;
//! * `change` — how one becomes the other: promotion, fence, joining;
//! * `leave` — how one gives up its place before its process ends;
//! * `disk` — the log on disk, if there is one; `keep` — what a cycle does with it; `catch_up` — how others are given what
//!   is only there; `rot` — how they mend each other's;
//! * `peers` — the other replicas and what is said to them;
//! * `order` — the order stream, snapshots of it, and questions to who leads the sequencers.

mod catch_up;
mod change;
pub(crate) mod disk;
mod follower;
mod keep;
mod leader;
mod leave;
mod order;
mod peers;
mod rot;

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use antelog_protocol::ledger::Ledger;
use antelog_protocol::limits::SEQUENCERS_MAX;
use antelog_protocol::shard::ShardConfig;
use antelog_protocol::wire::node::{NODE_MESSAGE_BYTES_MAX, NodeMessage, Place, Report};
use antelog_protocol::{Lsn, ReplicaId, ShardId};

use self::catch_up::CatchUp;
pub use self::disk::{DiskOptions, DiskParts, Opened, Readers, open as open_disk};
use self::disk::{OwnDisk, Past};
use self::follower::Follower;
use self::leader::{Leader, LeaderCounters};
use self::leave::Leave;
use self::order::Questions;
use self::peers::Peer;
pub use self::peers::{PEERS_MAX, replica_peer, sequencer_peer};
use self::rot::Repairs;
use super::agent::Agent;
use super::bus::GatePort;
use super::mailbox::{Admission, Mailbox, Notice};
use super::sequencer::ORDER_CREDIT;
use crate::channel::mirror::{CONTROL_REGION, DRAINED_AT};
use crate::counters::{Counter, Counters};
use crate::log::{LogOptions, Verifier};
use crate::mem::Region;
use crate::transport::{DownReason, Event, MessageHandle, PeerId, RegionKey, RemoteOffset, Transport};

pub use self::order::CHANGES_MAX;

/// What a replica is made of, besides its transport.
#[derive(Debug)]
pub struct ReplicaParts<L> {
    /// The protocol's options, and who this replica is. The epoch is the order log's to say.
    pub config: ShardConfig,
    /// Replicas that the shard is configured with.
    pub replicas: u16,
    /// Every report of a primary is held back this long, in nanoseconds: see
    /// [`report_delay_us`](crate::config::ShardEntry::report_delay_us).
    pub report_delay_ns: u64,
    /// How the log is kept.
    pub options: LogOptions,
    /// The log: empty, or what the disk had of it.
    pub log: Verifier,
    /// The log on disk. `None`: it is in memory only.
    pub disk: Option<DiskParts>,
    /// The gate.
    pub gate: GatePort,
    /// Connections come from here.
    pub mailbox: Mailbox<Admission<L>>,
    /// Losses are told here.
    pub notices: Sender<Notice>,
    /// Counters to publish in.
    pub counters: Counters,
}

/// Reports that a sequencer is sent at once although nothing has come from it meanwhile: it may have nothing to say, or may
/// not be taking them. Those that say nothing new leave room for one that does.
const UNHEARD_REPORTS_MAX: u32 = 384;
/// See [`UNHEARD_REPORTS_MAX`].
const UNHEARD_OLD_REPORTS_MAX: u32 = 128;

/// A sequencer member as this replica knows it.
#[derive(Clone, Copy, Debug, Default)]
struct Sequencer {
    connected: bool,
    /// The newest report has not left to it.
    report_due: bool,
    reported_ns: Option<u64>,
    reported: Report,
    /// Reports soon after one another since it was heard.
    unheard: u32,
}

/// What a replica does at present.
enum Life {
    Following(Box<Follower>),
    /// It is to lead, and waits for the others to shut the last primary out: those that have answered, by their bits.
    Fencing(Box<Follower>, u8),
    Leading(Box<Leader>),
}

/// See the module's text.
pub struct ReplicaAgent<T: Transport> {
    name: String,
    shard: ShardId,
    own: ReplicaId,
    config: ShardConfig,
    options: LogOptions,
    transport: T,
    region: Arc<Region>,
    /// `None` only while one becomes another.
    life: Option<Life>,
    peers: Vec<Peer>,
    /// The highest epoch that this replica has obeyed.
    epoch: u32,
    /// The log is a copy of what the primary of this epoch wrote, as far as it goes: what is bound in a later one may be
    /// something else.
    log_epoch: u32,
    /// The log on disk.
    disk: Option<OwnDisk>,
    catch_up: Option<CatchUp>,
    repairs: Repairs,
    /// The slot below which the primary was told that the log is flushed here. `None`: it is to be told again.
    told_flushed: Option<Lsn>,
    /// The operator was told that the disk is full.
    disk_is_full: bool,
    /// Up to which offset the disk has room, as the primary was told: 0 for as much as is wanted.
    told_room: Option<u64>,
    /// Whose writes are the log's.
    primary: Option<u16>,
    /// Before this place of the log was what the primary was told that it may overwrite, and up to which offset.
    told: Place,
    told_at: u64,
    /// It may not have heard.
    tell_again: bool,
    /// Furthest that the log ever reached in this life of the region, in absolute bytes.
    reached: u64,
    sequencers: [Sequencer; SEQUENCERS_MAX],
    questions: Questions,
    leave: Leave,
    gate: GatePort,
    mailbox: Mailbox<Admission<T::Link>>,
    notices: Sender<Notice>,
    /// The newest report.
    report: Report,
    report_at_ns: u64,
    report_delay_ns: u64,
    /// When a report that is held back may leave; a newer one that takes its place does not wait anew.
    report_due_ns: Option<u64>,
    events: Box<[Event]>,
    counters: ReplicaCounters,
}

struct ReplicaCounters {
    leader: LeaderCounters,
    verified: Counter,
    is_primary: Counter,
    is_member: Counter,
    epoch: Counter,
    promotions: Counter,
    demotions: Counter,
    joins: Counter,
    rot_found: Counter,
    rot_repaired: Counter,
}

impl<T: Transport> ReplicaAgent<T> {
    /// Builds the agent on the thread that will run it. `source` is the log's region as registered with the transport.
    ///
    /// # Errors
    /// When the kernel has no memory for the control regions.
    pub fn new(parts: ReplicaParts<T::Link>, source: RegionKey, mut transport: T) -> std::io::Result<ReplicaAgent<T>> {
        let ReplicaParts { config, replicas, options, log, disk, .. } = parts;
        let (shard, own) = (config.shard, config.replica);
        let region = log.region().clone();
        let peers = peers::peers(own.number, replicas, source, region.len())?;
        let ledger = Ledger::new(config.free_cuts_max);
        let counters = ReplicaCounters {
            leader: LeaderCounters::new(&parts.counters),
            verified: parts.counters.register("verified_lsn"),
            is_primary: parts.counters.register("is_primary"),
            is_member: parts.counters.register("is_member"),
            epoch: parts.counters.register("epoch"),
            promotions: parts.counters.register("promotions"),
            demotions: parts.counters.register("demotions"),
            joins: parts.counters.register("joins"),
            rot_found: parts.counters.register("rot_found"),
            rot_repaired: parts.counters.register("rot_repaired"),
        };
        let name = replica_name(shard, own.number);
        let (disk, past, catch_up, repairs) = match disk {
            Some(mut parts) => {
                let repairs = Repairs::new(parts.rot.take());
                let (disk, past, old) = OwnDisk::new(&name, parts);
                let staging = Region::new(catch_up::chunk_bytes(options.record_bytes_max))?;
                let key = transport.register(staging.clone());
                (Some(disk), past, Some(CatchUp::new(old, staging, key)), repairs)
            }
            None => (None, Past::new(&config), None, Repairs::new(None)),
        };
        Ok(ReplicaAgent {
            name,
            shard,
            own,
            options,
            transport,
            region,
            told: log.first_place().unwrap_or(log.place()),
            told_at: log.head(),
            told_flushed: None,
            told_room: None,
            disk_is_full: false,
            catch_up,
            repairs,
            tell_again: false,
            reached: log.at(),
            log_epoch: disk.as_ref().map_or(0, OwnDisk::epoch),
            disk,
            life: Some(Life::Following(Box::new(Follower::new(&config, ledger, log, past)))),
            config,
            peers,
            epoch: 0,
            primary: None,
            sequencers: [Sequencer::default(); SEQUENCERS_MAX],
            questions: Questions::default(),
            leave: Leave::default(),
            gate: parts.gate,
            mailbox: parts.mailbox,
            notices: parts.notices,
            report: Report { shard, replica: own.number, incarnation: own.incarnation, ..Report::default() },
            report_at_ns: 0,
            report_delay_ns: parts.report_delay_ns,
            report_due_ns: None,
            events: vec![Event::Notified { peer: sequencer_peer(0), value: 0 }; 64].into_boxed_slice(),
            counters,
        })
    }

    /// From now on reports are held back this long, in nanoseconds: see [`ReplicaParts::report_delay_ns`].
    pub fn set_report_delay(&mut self, delay_ns: u64) {
        self.report_delay_ns = delay_ns;
    }

    /// Whether it leads its shard.
    pub fn is_primary(&self) -> bool {
        matches!(self.life, Some(Life::Leading(_)))
    }

    /// Its state of the order log.
    pub fn ledger(&self) -> &Ledger {
        match &self.life {
            Some(Life::Leading(leader)) => leader.shard.ledger(),
            Some(Life::Following(follower) | Life::Fencing(follower, _)) => &follower.ledger,
            None => unreachable!("a replica is looked at while it changes"),
        }
    }

    fn leader(&mut self) -> Option<&mut Leader> {
        match &mut self.life {
            Some(Life::Leading(leader)) => Some(leader),
            _ => None,
        }
    }

    fn follower(&mut self) -> Option<&mut Follower> {
        match &mut self.life {
            Some(Life::Following(follower) | Life::Fencing(follower, _)) => Some(follower),
            _ => None,
        }
    }

    fn peer(&mut self, number: u16) -> Option<&mut Peer> {
        self.peers.iter_mut().find(|p| p.number == number)
    }

    fn admit(&mut self, now_ns: u64) -> usize {
        let (peer, link) = match self.mailbox.take() {
            Some(Admission::Node { peer, link }) => (peer, link),
            Some(Admission::Leave { done }) => {
                self.leave(now_ns, done);
                return 1;
            }
            _ => return 0,
        };
        if let Some(sequencer) = self.sequencers.get_mut(usize::from(peer.0)) {
            self.transport.admit(peer, link, &[]);
            *sequencer = Sequencer { connected: true, report_due: true, ..Sequencer::default() };
            self.questions.ask_again();
            self.report_now(now_ns);
        } else if let Some(at) = self.peers.iter().position(|p| p.id() == peer) {
            let exposed = [self.region.clone(), self.peers[at].mirror.control().clone()];
            self.transport.admit(peer, link, &exposed);
            let greeting = self.greeting();
            self.peers[at].on_down();
            self.forget_answer(self.peers[at].bit());
            self.forget_chunk(self.peers[at].number);
            self.peers[at].on_connected(greeting);
            (self.tell_again, self.told_flushed, self.told_room) = (true, None, None);
            self.look_at_losses(now_ns);
        }
        1
    }

    fn take_events(&mut self, now_ns: u64) -> usize {
        let count = self.transport.poll(&mut self.events);
        for at in 0..count {
            match self.events[at] {
                Event::Placed { peer, token } => self.on_placed(now_ns, peer, token),
                Event::Received { peer, message } => self.on_message(now_ns, peer, message),
                Event::PeerDown { peer, reason } => self.on_down(now_ns, peer, reason),
                // A backup verified further, or the primary wrote: the words are read where they are needed.
                Event::Notified { .. } => {}
            }
        }
        count
    }

    fn on_message(&mut self, now_ns: u64, peer: PeerId, handle: MessageHandle) {
        let from_sequencer = usize::from(peer.0) < SEQUENCERS_MAX;
        let understood = if from_sequencer {
            self.sequencers[usize::from(peer.0)].unheard = 0;
            self.on_sequencer_message(now_ns, peer, handle)
        } else {
            let message = match NodeMessage::decode(self.transport.message(handle)) {
                Ok(NodeMessage::Greeting(greeting)) => Some(NodeMessage::Greeting(greeting)),
                Ok(NodeMessage::Start(place)) => Some(NodeMessage::Start(place)),
                Ok(NodeMessage::Started(place)) => Some(NodeMessage::Started(place)),
                Ok(NodeMessage::Fence(place)) => Some(NodeMessage::Fence(place)),
                Ok(NodeMessage::Fenced(place)) => Some(NodeMessage::Fenced(place)),
                Ok(NodeMessage::Session { client, next_seq, last_lsn }) => {
                    Some(NodeMessage::Session { client, next_seq, last_lsn })
                }
                Ok(NodeMessage::Fetch { before, until_bytes }) => Some(NodeMessage::Fetch { before, until_bytes }),
                Ok(NodeMessage::Fetched { at_bytes, left_bytes, bytes }) => {
                    self.repairs.on_fetched(peer, at_bytes, left_bytes, bytes);
                    self.transport.release(handle);
                    return;
                }
                _ => None,
            };
            message.is_some_and(|message| self.on_replica_message(now_ns, peer, message))
        };
        self.transport.release(handle);
        if !understood {
            // Its sender does not speak the protocol.
            self.cut_off(now_ns, peer, DownReason::Protocol);
        }
    }

    /// Nothing of this peer lands any more; whoever made the connection makes another.
    fn cut_off(&mut self, now_ns: u64, peer: PeerId, reason: DownReason) {
        self.transport.fence(peer);
        self.on_down(now_ns, peer, reason);
    }

    fn on_down(&mut self, now_ns: u64, peer: PeerId, reason: DownReason) {
        if let Some(sequencer) = self.sequencers.get_mut(usize::from(peer.0)) {
            sequencer.connected = false;
            self.questions.on_sequencer_down(peer);
        } else if let Some(at) = self.peers.iter().position(|p| p.id() == peer) {
            self.peers[at].on_down();
            self.forget_answer(self.peers[at].bit());
            self.forget_chunk(self.peers[at].number);
            self.look_at_losses(now_ns);
        }
        // The control thread may be gone already when the node stops.
        let _ = self.notices.send(Notice::PeerDown { agent: self.name.clone(), peer, reason });
    }

    fn warn(&self, text: String) {
        // The control thread may be gone already when the node stops.
        let _ = self.notices.send(Notice::Warning { agent: self.name.clone(), text });
    }

    /// What is on its way from disk to this replica, or to this one from there, does not arrive.
    fn forget_chunk(&mut self, number: u16) {
        self.repairs.forget(number);
        if let Some(catch_up) = &mut self.catch_up {
            catch_up.forget(number);
        }
    }

    /// Replicas without a connection, by their bits, and this one if it leaves.
    fn lost(&self) -> u8 {
        let own = if self.leave.begun { 1 << self.own.number } else { 0 };
        self.peers.iter().filter(|p| !p.connected).fold(own, |bits, p| bits | p.bit())
    }

    /// Tells the sequencers when connections to other replicas came or went.
    fn look_at_losses(&mut self, now_ns: u64) {
        let lost = self.lost();
        if self.report.lost != lost || self.is_primary() {
            self.report.lost = lost;
            self.report_now(now_ns);
        }
    }

    /// Sends the report again as soon as may be: something in it changed that somebody waits for.
    fn report_now(&mut self, now_ns: u64) {
        match &mut self.life {
            Some(Life::Leading(_)) => self.report_as_leader(now_ns),
            Some(Life::Following(follower) | Life::Fencing(follower, _)) => {
                let m = follower.ledger.membership(self.shard);
                self.counters.is_member.set(m.is_some_and(|m| m.holds(self.own)).into());
                // An earlier life was the member, and all that it counted as durable is here.
                let earlier = m.and_then(|m| m.member(self.own.number)).filter(|member| *member != self.own);
                let kept = |member: &ReplicaId| self.disk.as_ref().is_some_and(|disk| disk.keeps(member.incarnation));
                let succeeds = earlier.filter(kept).map_or(0, |member| member.incarnation);
                self.report = Report {
                    shard: self.shard,
                    replica: self.own.number,
                    incarnation: self.own.incarnation,
                    epoch: m.map_or(0, |m| m.epoch),
                    change: m.map_or(0, |m| m.change),
                    lost: self.report.lost,
                    view: follower.ledger.view(),
                    durable_lsn: follower.log.lsn(),
                    appended_lsn: follower.log.lsn(),
                    applied_index: follower.ledger.applied_index(),
                    succeeds,
                    ..Report::default()
                };
                self.spread_report();
            }
            None => {}
        }
    }

    /// The newest report goes to every sequencer.
    fn spread_report(&mut self) {
        self.sequencers.iter_mut().for_each(|s| s.report_due = true);
    }

    /// Whether a sequencer is to have the newest report now. Who does not lead, or takes nothing, need not have every one:
    /// it hears often enough to know that the replica lives, and nothing queues up for it without bound.
    fn reports_to(&self, now_ns: u64, member: u16) -> bool {
        let sequencer = &self.sequencers[usize::from(member)];
        // In nearly every cycle nothing is due.
        if !sequencer.connected || !sequencer.report_due {
            return false;
        }
        let is_old = sequencer.reported == self.report;
        let most = if is_old { UNHEARD_OLD_REPORTS_MAX } else { UNHEARD_REPORTS_MAX };
        let is_prompt = self.questions.may_lead(sequencer_peer(member)) && sequencer.unheard < most;
        is_prompt || !self.reported_lately(now_ns, sequencer)
    }

    fn reported_lately(&self, now_ns: u64, sequencer: &Sequencer) -> bool {
        sequencer.reported_ns.is_some_and(|at| now_ns < at + self.config.report_every_ns / 2)
    }

    fn send_reports(&mut self, now_ns: u64) {
        let members = 0..SEQUENCERS_MAX as u16;
        if !members.clone().any(|member| self.reports_to(now_ns, member)) {
            return;
        }
        let delay_ns = if self.is_primary() { self.report_delay_ns } else { 0 };
        let due_ns = *self.report_due_ns.get_or_insert(now_ns + delay_ns);
        if due_ns > now_ns {
            return;
        }
        self.report_due_ns = None;
        self.report_at_ns = now_ns + self.config.report_every_ns;
        let mut buffer = [0; NODE_MESSAGE_BYTES_MAX];
        let len = NodeMessage::Report(self.report).encode(&mut buffer);
        for member in members {
            if self.reports_to(now_ns, member) && self.transport.send(sequencer_peer(member), &buffer[..len]).is_ok() {
                let mut sequencer = self.sequencers[usize::from(member)];
                sequencer.unheard += u32::from(self.reported_lately(now_ns, &sequencer));
                (sequencer.report_due, sequencer.reported_ns, sequencer.reported) = (false, Some(now_ns), self.report);
                self.sequencers[usize::from(member)] = sequencer;
            }
        }
    }

    /// What a follower does in a cycle: checks the log, and says how far it may be overwritten.
    fn follow(&mut self, now_ns: u64) -> usize {
        let Some(Life::Following(follower) | Life::Fencing(follower, _)) = &mut self.life else { return 0 };
        let primary = self.peers.iter().find(|p| Some(p.number) == self.primary);
        let end = primary.map_or(0, Peer::end);
        let mut work = follower.verify(&self.name, end);
        if follower.is_true(self.log_epoch) {
            work += follower.learn();
        }
        self.reached = self.reached.max(follower.log.at());
        let (bound, applied) = (follower.bound(), follower.ledger.applied_index());
        self.counters.verified.set(follower.log.lsn().0);
        // Told often enough that the primary never waits, and no more often: each time is a message.
        let drained = self.disk.as_ref().map_or(bound.at_bytes, |disk| bound.at_bytes.min(disk.store.released()));
        let untold = drained.saturating_sub(self.told_at);
        if let Some(peer) = primary.filter(|p| p.greeting.is_some())
            && (untold >= self.region.len() as u64 / 16 || (self.tell_again && drained > 0))
        {
            let remote = RemoteOffset { region: CONTROL_REGION, offset: DRAINED_AT };
            if self.transport.write_inline(peer.id(), &drained.to_le_bytes(), remote, Some(0)).is_ok() {
                (self.told, self.told_at, self.tell_again) = (bound, drained, false);
            }
        }
        if now_ns >= self.report_at_ns || applied - self.report.applied_index >= ORDER_CREDIT / 2 {
            self.report_at_ns = now_ns + self.config.report_every_ns;
            self.report_now(now_ns);
            // A new primary may have wiped the word out that it was told before it knew of this replica's answer.
            (self.told_flushed, self.told_room) = (None, None);
        }
        work
    }
}

/// The name of a replica's agent.
pub fn replica_name(shard: ShardId, number: u16) -> String {
    format!("replica-{shard}-{number}")
}

impl<T: Transport> Agent for ReplicaAgent<T> {
    fn name(&self) -> &str {
        &self.name
    }

    fn duty_cycle(&mut self, now_ns: u64) -> usize {
        let mut work = self.take_events(now_ns);
        if !self.is_primary() {
            // The acknowledgement of what has landed: the primary waits for it, and not for the verification.
            self.transport.flush();
        }
        work += self.admit(now_ns);
        work += self.take_requests(now_ns);
        work += self.lead_on_time(now_ns);
        work += self.mend(now_ns);
        let followed = self.follow(now_ns);
        if work > 0 {
            self.publish();
            self.look_whether_left();
        }
        for peer in &mut self.peers {
            peer.send(&mut self.transport);
        }
        self.send_log(now_ns);
        self.send_reports(now_ns);
        self.send_questions();
        if self.disk.as_ref().is_some_and(|disk| disk.flushed) {
            // Others wait for what it has flushed.
            work += self.write_behind(now_ns);
            self.transport.flush();
            return work + followed;
        }
        self.transport.flush();
        // What leaves to other replicas does not wait for the disk.
        work + followed + self.write_behind(now_ns)
    }

    fn deadline_ns(&self) -> Option<u64> {
        let connected = self.sequencers.iter().any(|s| s.connected);
        let held_ns = self.report_due_ns.filter(|_| connected);
        let own_ns = match &self.life {
            Some(Life::Leading(leader)) => Some(leader.shard.deadline_ns()),
            _ => connected.then_some(self.report_at_ns),
        };
        let disk_ns = self.disk.as_ref().and_then(|disk| disk.store.deadline_ns());
        own_ns.into_iter().chain(held_ns).chain(disk_ns).chain(self.repairs.deadline_ns()).min()
    }

    fn stop(&mut self, _now_ns: u64) {
        self.end_log();
    }

    fn wait_fds(&self, fds: &mut Vec<RawFd>) {
        self.transport.wait_fds(fds);
        if let Some(disk) = &self.disk {
            disk.store.wait_fds(fds);
        }
    }

    fn prepare_wait(&mut self) -> bool {
        self.transport.prepare_wait()
            || self.mailbox.waits()
            || self.requests_wait()
            || self.disk.as_mut().is_some_and(|disk| disk.store.prepare_wait())
            || self.catch_up.as_mut().is_some_and(CatchUp::waits)
            || self.repairs.waits()
    }
}
