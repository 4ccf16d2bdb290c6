//! The gate's duty cycle: many client connections on one side, the shards of this process on the other.
//!
//! A gate hands appends over to shards and their answers back, relays the order stream, and delivers records straight
//! from the shards' log regions. Each subscriber is a cursor: one that stops reading stops its own deliveries when its
//! ring or its stream's credit is used up, and delays nobody else.

mod client;
mod old;
mod pace;
mod read;
mod stream;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use antelog_protocol::ledger::{Applied, Ledger};
use antelog_protocol::wire::order::OrderEntry;
use antelog_protocol::{ClientId, Lsn, ShardId};

pub(crate) use self::client::reply_bytes_max;
use self::client::{Answer, Client, Outcome};
pub use self::old::OldLog;
use super::agent::Agent;
use super::bus::{self, ShardPort, ToGate};
use super::mailbox::{Admission, Mailbox, Notice};
use super::order_log::OrderLog;
use crate::channel::Ring;
use crate::counters::{Counter, Counters};
use crate::mem::Region;
use crate::transport::{Event, PeerId, RegionKey, Transport};

/// Order entries kept to relay; a client that is further behind gets a snapshot instead.
const RELAY_ENTRIES_MAX: usize = 4096;
/// Bytes of order entries kept to relay.
const RELAY_BYTES_MAX: usize = 1 << 20;

/// Run-time options of a gate.
#[derive(Clone, Debug)]
pub struct GateConfig {
    /// Most clients connected at a time.
    pub clients_max: u16,
    /// Capacity of the ring of each client in either direction, in bytes; a client may ask for a smaller one.
    pub ring_bytes: usize,
    /// Appends a session may have outstanding per shard.
    pub outstanding_max: u32,
    /// Largest record in bytes.
    pub record_bytes_max: u32,
    /// Cuts of free windows remembered.
    pub free_cuts_max: usize,
    /// Have the kernel back a client's rings when it connects, not as they are first used.
    pub prefault: bool,
}

/// What a gate agent is made of, besides its transport.
#[derive(Debug)]
pub struct GateParts<L> {
    /// Options.
    pub config: GateConfig,
    /// The shards of this process. The gate follows the order stream through the first.
    pub ports: Vec<ShardPort>,
    /// Connections come from here.
    pub mailbox: Mailbox<Admission<L>>,
    /// What an operator should know is told here.
    pub notices: Sender<Notice>,
    /// Counters to publish in.
    pub counters: Counters,
}

/// The memory of a client slot, kept for the next client.
#[derive(Debug)]
struct SlotMemory {
    incoming: Arc<Region>,
    staging: Arc<Region>,
    staging_key: RegionKey,
}

/// A question for the tail on its way.
#[derive(Debug)]
struct TailQuestion {
    token: u64,
    client: ClientId,
    client_token: u64,
    /// The index to apply before answering, once the sequencer has said it.
    index: Option<u64>,
}

struct GateCounters {
    clients: Counter,
    refused: Counter,
    cut_off: Counter,
    appends: Counter,
    delivered: Counter,
    pushed_back: Counter,
    held_back: Counter,
    forbidden: Counter,
    view: Counter,
    applied: Counter,
    /// Of each shard: whether it takes appends, as far as the order stream says.
    open: Vec<(ShardId, Counter)>,
}

/// What all clients of a gate share.
struct Common {
    config: GateConfig,
    ports: Vec<ShardPort>,
    /// The epoch in which the replica of each port leads, as of this cycle.
    serving: Vec<Option<u32>>,
    /// First slot that may not be delivered, of each port, as of this cycle.
    deliverable: Vec<Lsn>,
    /// Connections and attempts to append so far: their numbers.
    connections: u32,
    ledger: Ledger,
    relay: OrderLog,
    /// A snapshot of the order log that is being told: its ledger, and entries still to come.
    snapshot: Option<(Ledger, u32)>,
    tails: VecDeque<TailQuestion>,
    next_tail_token: u64,
    /// A request did not fit into a port's queue: the port, and the bytes it needs.
    queue_full: Option<(usize, usize)>,
    /// The time of this cycle.
    now_ns: u64,
    /// When the first append that came too early may be taken.
    paced_ns: Option<u64>,
    /// No more requests are taken.
    closing: bool,
    counters: GateCounters,
}

/// Where a shard is served, by what the order log says of it.
enum Served {
    /// By this process's replica at this port.
    Here(usize),
    /// By a replica of this process that is about to lead, or by nobody known.
    Soon,
    /// By another process.
    Elsewhere,
    /// Nowhere: it is lost as a whole. Any gate tells what is bound and what is void.
    Lost,
}

impl Common {
    fn served(&self, shard: ShardId) -> Served {
        let ports = || self.ports.iter().enumerate().filter(|(_, p)| p.shard == shard);
        let Some(membership) = self.ledger.membership(shard) else {
            return if ports().next().is_some() { Served::Soon } else { Served::Elsewhere };
        };
        if membership.has_failed() {
            return Served::Lost;
        }
        match ports().find(|(_, p)| p.replica == membership.primary) {
            // The replica may know more of the order log than the gate, or less.
            Some((port, _)) if self.serving[port] == Some(membership.epoch) => Served::Here(port),
            Some(_) => Served::Soon,
            None => Served::Elsewhere,
        }
    }

    /// Puts a question to a port's replica; false when its queue has no room now.
    fn ask(&mut self, port: usize, question: &[u8]) -> bool {
        let asked = self.ports[port].requests.push(&[question]).is_ok();
        if !asked {
            self.queue_full = Some((port, question.len()));
        }
        asked
    }

    /// Asks for the tail on behalf of a client; false when there is no room now.
    fn ask_tail(&mut self, client: ClientId, client_token: u64) -> bool {
        let token = self.next_tail_token;
        if !self.ask(0, &bus::read_index(token)) {
            return false;
        }
        self.tails.push_back(TailQuestion { token, client, client_token, index: None });
        self.next_tail_token += 1;
        true
    }

    /// A number that no connection and no attempt has had.
    fn next_connection(&mut self) -> u32 {
        self.connections = self.connections.wrapping_add(1).max(bus::ANY_CONNECTION + 1);
        self.connections
    }
}

/// See the module's text.
pub struct GateAgent<T: Transport> {
    transport: T,
    common: Common,
    clients: Vec<Option<Box<Client>>>,
    memory: Vec<Option<SlotMemory>>,
    sessions: HashMap<ClientId, usize>,
    mailbox: Mailbox<Admission<T::Link>>,
    notices: Sender<Notice>,
    events: Box<[Event]>,
    /// Some client could not send or go on for want of room: look at all of them in the next cycle.
    again: bool,
    /// Who waits until everything begun is finished.
    closing: Option<Sender<()>>,
}

impl<T: Transport> GateAgent<T> {
    /// Builds the agent on the thread that will run it.
    pub fn new(parts: GateParts<T::Link>, transport: T) -> GateAgent<T> {
        assert!(!parts.ports.is_empty(), "a gate serves a shard");
        let slots = usize::from(parts.config.clients_max);
        let counters = GateCounters {
            clients: parts.counters.register("clients"),
            refused: parts.counters.register("clients_refused"),
            cut_off: parts.counters.register("clients_cut_off"),
            appends: parts.counters.register("appends"),
            delivered: parts.counters.register("records_delivered"),
            pushed_back: parts.counters.register("pushed_back"),
            held_back: parts.counters.register("held_back"),
            forbidden: parts.counters.register("forbidden"),
            view: parts.counters.register("view"),
            applied: parts.counters.register("applied_index"),
            open: open_counters(&parts),
        };
        let common = Common {
            serving: vec![None; parts.ports.len()],
            deliverable: vec![Lsn(0); parts.ports.len()],
            connections: 0,
            ports: parts.ports,
            ledger: Ledger::new(parts.config.free_cuts_max),
            relay: OrderLog::new(0, RELAY_ENTRIES_MAX, RELAY_BYTES_MAX),
            snapshot: None,
            tails: VecDeque::new(),
            next_tail_token: 0,
            queue_full: None,
            now_ns: 0,
            paced_ns: None,
            closing: false,
            counters,
            config: parts.config,
        };
        GateAgent {
            transport,
            common,
            clients: (0..slots).map(|_| None).collect(),
            memory: (0..slots).map(|_| None).collect(),
            sessions: HashMap::with_capacity(slots),
            mailbox: parts.mailbox,
            notices: parts.notices,
            events: vec![Event::Notified { peer: PeerId(0), value: 0 }; 64].into_boxed_slice(),
            again: false,
            closing: None,
        }
    }

    fn warn(&self, text: String) {
        // The control thread may be gone already when the node stops.
        let _ = self.notices.send(Notice::Warning { agent: "gate".into(), text });
    }

    fn admit(&mut self) -> usize {
        let Some(mail) = self.mailbox.take() else { return 0 };
        let (session, link, ring_bytes, grant) = match mail {
            Admission::Client { session, link, ring_bytes, grant } => (session, link, ring_bytes, grant),
            Admission::Close { done } => {
                self.close(done);
                return 1;
            }
            Admission::Node { .. } | Admission::Leave { .. } => return 1,
        };
        if let Some(old) = self.sessions.get(&session).copied() {
            // The client knows that its old connection is dead before we do.
            self.drop_client(old);
        }
        let Some(slot) = self.clients.iter().position(Option::is_none) else {
            self.common.counters.refused.add(1);
            self.warn(format!("client {session} dropped: {} clients are connected already", self.clients.len()));
            return 1;
        };
        if let Err(error) = self.make_memory(slot) {
            self.common.counters.refused.add(1);
            self.warn(format!("client {session} dropped: no memory for its rings: {error}"));
            return 1;
        }
        let Some(memory) = &self.memory[slot] else { return 1 };
        let capacity = self.common.config.ring_bytes;
        let ring = Ring::new(memory.incoming.clone(), memory.staging.clone(), memory.staging_key, capacity, ring_bytes);
        self.transport.admit(PeerId(slot as u16), link, std::slice::from_ref(&memory.incoming));
        let identity = (session, self.common.next_connection());
        let client = Client::new(identity, grant, ring, &self.common.config, self.common.ports.len());
        self.clients[slot] = Some(Box::new(client));
        self.sessions.insert(session, slot);
        self.common.counters.clients.set(self.sessions.len() as u64);
        1
    }

    fn make_memory(&mut self, slot: usize) -> std::io::Result<()> {
        if self.memory[slot].is_none() {
            let incoming = Region::new(Ring::region_bytes(self.common.config.ring_bytes))?;
            let staging = Region::new(self.common.config.ring_bytes)?;
            if self.common.config.prefault {
                incoming.prefault();
                staging.prefault();
            }
            let staging_key = self.transport.register(staging.clone());
            self.memory[slot] = Some(SlotMemory { incoming, staging, staging_key });
        }
        Ok(())
    }

    /// Tells every client that this gate is about to end.
    fn close(&mut self, done: Sender<()>) {
        self.common.closing = true;
        self.clients.iter_mut().flatten().for_each(|client| client.reply(Answer::Closing));
        self.closing = Some(done);
    }

    /// Says that everything begun is finished, once it is.
    fn look_whether_closed(&mut self) {
        if self.closing.is_some()
            && self.clients.iter().flatten().all(|client| client.is_settled(&self.common.serving))
            && let Some(done) = self.closing.take()
        {
            // Whoever waited may have lost patience.
            let _ = done.send(());
        }
    }

    fn drop_client(&mut self, slot: usize) {
        self.transport.fence(PeerId(slot as u16));
        if let Some(client) = self.clients[slot].take() {
            let session = client.session();
            self.sessions.remove(&session);
            self.common.tails.retain(|question| question.client != session);
        }
        self.common.counters.clients.set(self.sessions.len() as u64);
    }

    fn take_events(&mut self) -> usize {
        let count = self.transport.poll(&mut self.events);
        for at in 0..count {
            match self.events[at] {
                Event::PeerDown { peer, .. } => self.drop_client(usize::from(peer.0)),
                // Clients speak through their rings only.
                Event::Received { peer, message } => {
                    self.transport.release(message);
                    self.drop_client(usize::from(peer.0));
                }
                Event::Notified { .. } | Event::Placed { .. } => {}
            }
        }
        count
    }

    /// Takes what shards say: answers go to their clients, order entries to the ledger and the relay.
    fn take_answers(&mut self) -> usize {
        let (mut count, mut last, mut changed) = (0, 0, false);
        for port in 0..self.common.ports.len() {
            let shard = self.common.ports[port].shard;
            while let Some(bytes) = self.common.ports[port].answers.peek() {
                count += 1;
                match bus::to_gate(bytes) {
                    ToGate::Acknowledged { client, seq, position } => {
                        if let Some(client) = client_of(&self.sessions, &mut self.clients, &mut last, client) {
                            client.answer(port, Answer::Acknowledged { shard, seq, position });
                        }
                    }
                    ToGate::Refused { client, connection, seq, refusal } => {
                        if let Some(client) = client_of(&self.sessions, &mut self.clients, &mut last, client) {
                            client.refused(port, connection, (shard, seq), refusal);
                        }
                    }
                    ToGate::Order { index, entry } if port == 0 => {
                        changed |= follow(&mut self.common.ledger, &mut self.common.relay, index, entry);
                    }
                    ToGate::Order { .. } => {}
                    ToGate::Snapshot { index, base, view, entries } => {
                        let ledger = Ledger::at(index, base, view, self.common.config.free_cuts_max);
                        self.common.snapshot = Some((ledger, entries));
                        changed |= self.common.end_snapshot();
                    }
                    ToGate::SnapshotEntry { entry } => {
                        follow_snapshot(&mut self.common.snapshot, entry);
                        changed |= self.common.end_snapshot();
                    }
                    ToGate::ReadIndexIs { token, index } => {
                        // Tokens are sent in order, so an answer is good for every older question too.
                        for question in self.common.tails.iter_mut().filter(|q| q.token <= token) {
                            question.index.get_or_insert(index);
                        }
                    }
                    ToGate::OutcomeIs { asker, token, outcome, next_seq } => {
                        if let Some(client) = client_of(&self.sessions, &mut self.clients, &mut 0, asker) {
                            client.outcome(Answer::Outcome { token, outcome, next_seq });
                        }
                    }
                    ToGate::ChangeIs { client, token, outcome } => {
                        if let Some(client) = client_of(&self.sessions, &mut self.clients, &mut 0, client) {
                            client.reply(Answer::Changed { token, outcome });
                        }
                    }
                }
                self.common.ports[port].answers.consume();
            }
        }
        if changed {
            for (shard, open) in &self.common.counters.open {
                open.set(takes_appends(&self.common.ledger, *shard).into());
            }
            self.common.counters.view.set(self.common.ledger.view().into());
        }
        self.common.counters.applied.set(self.common.ledger.applied_index());
        count + self.answer_tails()
    }

    fn answer_tails(&mut self) -> usize {
        let mut count = 0;
        let applied = self.common.ledger.applied_index();
        while let Some(question) = self.common.tails.front().filter(|q| q.index.is_some_and(|i| i <= applied)) {
            let (token, position) = (question.client_token, self.common.ledger.committed());
            let answer = Answer::Tail { token, position, index: applied };
            if let Some(client) = client_of(&self.sessions, &mut self.clients, &mut 0, question.client) {
                client.tail(answer);
            }
            self.common.tails.pop_front();
            count += 1;
        }
        count
    }

    /// Notes who leads and how far shards may be delivered; returns whether anything moved.
    fn look_at_progress(&mut self) -> usize {
        let mut moved = 0;
        let Common { ports, serving, deliverable, .. } = &mut self.common;
        for (port, seen) in ports.iter().zip(serving.iter_mut().zip(deliverable)) {
            // In this order: what a new primary may deliver is published before it serves.
            let now = (port.progress.serving(), port.progress.deliverable());
            if now != (*seen.0, *seen.1) {
                (*seen.0, *seen.1) = now;
                moved = 1;
            }
        }
        moved
    }

    /// Takes in what disks have answered.
    fn take_old(&mut self) -> usize {
        self.common.ports.iter_mut().filter_map(|port| port.old.as_mut()).map(|old| old.get_mut().poll()).sum()
    }

    fn serve_clients(&mut self) -> usize {
        let mut work = 0;
        (self.again, self.common.queue_full, self.common.paced_ns) = (false, None, None);
        for slot in 0..self.clients.len() {
            let Some(client) = self.clients[slot].as_deref_mut() else { continue };
            let peer = PeerId(slot as u16);
            match client.serve(&mut self.common, &mut self.transport, peer) {
                Outcome::Done { count, again } => {
                    work += count;
                    self.again |= again;
                }
                Outcome::CutOff { why } => {
                    let session = client.session();
                    self.drop_client(slot);
                    self.common.counters.cut_off.add(1);
                    self.warn(format!("client {session} was cut off: {why}"));
                }
            }
        }
        for port in &mut self.common.ports {
            port.requests.publish();
        }
        work
    }
}

/// The connected client of a session. `last` is the slot found last: answers come in runs.
fn client_of<'a>(
    sessions: &HashMap<ClientId, usize>,
    clients: &'a mut [Option<Box<Client>>],
    last: &mut usize,
    session: ClientId,
) -> Option<&'a mut Client> {
    let is_last = clients.get(*last).is_some_and(|c| c.as_ref().is_some_and(|c| c.session() == session));
    if !is_last {
        *last = *sessions.get(&session)?;
    }
    clients[*last].as_deref_mut()
}

/// The counters that say which shards take appends; several ports may be one shard's.
fn open_counters<L>(parts: &GateParts<L>) -> Vec<(ShardId, Counter)> {
    let shards: BTreeSet<ShardId> = parts.ports.iter().map(|port| port.shard).collect();
    shards.into_iter().map(|shard| (shard, parts.counters.register(&format!("shard-{shard}.open")))).collect()
}

/// Whether a shard is open in the newest window and somebody leads it.
fn takes_appends(ledger: &Ledger, shard: ShardId) -> bool {
    ledger.open(shard) == Some(true) && ledger.membership(shard).is_some_and(|m| !m.has_failed())
}

/// Takes an entry of a snapshot in.
fn follow_snapshot(snapshot: &mut Option<(Ledger, u32)>, entry: &[u8]) {
    let Some((ledger, left)) = snapshot else { return };
    *left = left.saturating_sub(1);
    let applied = OrderEntry::decode(entry).map(|decoded| ledger.apply_snapshot(&decoded));
    if !matches!(applied, Ok(Ok(_))) {
        panic!("gate: a snapshot that its replica took cannot be applied: {applied:?}");
    }
}

impl Common {
    /// A snapshot takes the ledger's place when it is whole, as it does at the replica: nobody is told of half of one.
    fn end_snapshot(&mut self) -> bool {
        let Some((mut ledger, _)) = self.snapshot.take_if(|(_, left)| *left == 0) else { return false };
        let newer = ledger.applied_index() > self.ledger.applied_index();
        if newer {
            self.relay = OrderLog::new(ledger.applied_index(), RELAY_ENTRIES_MAX, RELAY_BYTES_MAX);
            std::mem::swap(&mut self.ledger, &mut ledger);
            self.ledger.continue_from(ledger);
        }
        newer
    }
}

/// Applies an order entry and keeps it to relay. True: more than the bound positions changed.
fn follow(ledger: &mut Ledger, relay: &mut OrderLog, index: u64, entry: &[u8]) -> bool {
    let applied = OrderEntry::decode(entry).map(|decoded| ledger.apply(index, &decoded));
    match applied {
        Ok(Ok(Applied::Again)) => false,
        Ok(Ok(applied)) => {
            relay.append(entry);
            applied != Applied::Bound
        }
        Ok(Err(contradiction)) => panic!("gate: {contradiction}"),
        Err(error) => panic!("gate: the order stream holds no entry: {error}"),
    }
}

impl<T: Transport> Agent for GateAgent<T> {
    fn name(&self) -> &str {
        "gate"
    }

    fn duty_cycle(&mut self, now_ns: u64) -> usize {
        self.common.now_ns = now_ns;
        let mut work = self.take_events();
        work += self.admit();
        work += self.take_answers();
        work += self.look_at_progress();
        work += self.take_old();
        if work > 0 || self.again {
            work += self.serve_clients();
            self.look_whether_closed();
        }
        self.transport.flush();
        work
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.common.paced_ns
    }

    fn wait_fds(&self, fds: &mut Vec<RawFd>) {
        self.transport.wait_fds(fds);
    }

    fn prepare_wait(&mut self) -> bool {
        let disk = self.common.ports.iter_mut().any(|p| p.old.as_mut().is_some_and(|old| old.get_mut().waits()));
        let seen = self.common.serving.iter().zip(&self.common.deliverable);
        disk || self.transport.prepare_wait()
            || self.mailbox.waits()
            || self.common.ports.iter().any(|p| !p.answers.is_empty())
            || self.common.queue_full.is_some_and(|(port, bytes)| self.common.ports[port].requests.room() >= bytes)
            || self.common.ports.iter().zip(seen).any(|(port, (serving, deliverable))| {
                (port.progress.serving(), port.progress.deliverable()) != (*serving, *deliverable)
            })
    }
}
