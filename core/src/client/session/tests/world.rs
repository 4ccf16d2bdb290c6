//! A cluster in memory: gates with real rings, driven by hand from the tests.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use antelog_protocol::ledger::grant_head;
use antelog_protocol::wire::order::{
    Decree, ORDER_ENTRY_BYTES_MAX, ShardChangeHead, encode_cut, encode_decree, encode_grant, encode_shard_change,
    encode_view_change,
};
use antelog_protocol::wire::session::{Reply, Request, SESSION_HEAD_BYTES_MAX, ShardGates};
use antelog_protocol::{ChangeError, CutPoint, Lsn, Member, ReplicaId, WindowMode};

use super::super::*;
use crate::channel::Ring;
use crate::client::Membership;
use crate::mem::Region;
use crate::transport::{Full, LocalRange, MessageHandle, RegionKey, RemoteOffset};

pub const GATE_RING: usize = 64 << 10;
pub const CLIENT_RING: usize = 64 << 10;
/// Longer than all pauses between attempts to connect that a test waits for.
pub const SUSPECT_NS: u64 = 10_000_000_000;

pub struct FakeGate {
    pub address: String,
    pub accepts: bool,
    incoming: Arc<Region>,
    staging: Arc<Region>,
    ring: Ring,
    client: Option<(PeerId, Arc<Region>)>,
    /// Requests read and not asked for.
    requests: Vec<String>,
}

#[derive(Default)]
pub struct World {
    events: VecDeque<Event>,
    sources: Vec<Arc<Region>>,
    pub gates: Vec<FakeGate>,
    peers: BTreeMap<u16, usize>,
    dialed: VecDeque<Dialed<usize>>,
    pub dials: Vec<String>,
    map: Option<ClusterMap>,
    /// The newest attempt that each gate has seen for each shard.
    attempts: BTreeMap<(usize, u16), u32>,
}

/// The client's transport, and its dialer.
#[derive(Clone)]
pub struct Net(pub Arc<Mutex<World>>);

impl Net {
    pub fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }
}

impl Transport for Net {
    type Link = usize;

    fn register(&mut self, region: Arc<Region>) -> RegionKey {
        let mut world = self.world();
        world.sources.push(region);
        RegionKey(world.sources.len() as u16 - 1)
    }

    fn admit(&mut self, peer: PeerId, gate: usize, exposed: &[Arc<Region>]) {
        let mut world = self.world();
        world.peers.insert(peer.0, gate);
        world.gates[gate].client = Some((peer, exposed[0].clone()));
    }

    fn write(
        &mut self,
        to: PeerId,
        local: LocalRange,
        remote: RemoteOffset,
        _: Option<u32>,
        _: Option<u64>,
    ) -> Result<(), Full> {
        let world = self.world();
        let gate = *world.peers.get(&to.0).ok_or(Full)?;
        let source = &world.sources[usize::from(local.region.0)];
        world.gates[gate].incoming.put_from(remote.offset, source, local.offset, local.len);
        Ok(())
    }

    fn write_inline(&mut self, to: PeerId, bytes: &[u8], remote: RemoteOffset, _: Option<u32>) -> Result<(), Full> {
        let world = self.world();
        let gate = *world.peers.get(&to.0).ok_or(Full)?;
        world.gates[gate].incoming.store_u64(remote.offset, u64::from_ne_bytes(bytes.try_into().unwrap()));
        Ok(())
    }

    fn send(&mut self, _: PeerId, _: &[u8]) -> Result<(), Full> {
        Err(Full)
    }

    fn flush(&mut self) {}

    fn poll(&mut self, events: &mut [Event]) -> usize {
        let mut world = self.world();
        let count = events.len().min(world.events.len());
        events[..count].iter_mut().for_each(|slot| *slot = world.events.pop_front().unwrap());
        count
    }

    fn message(&self, _: MessageHandle) -> &[u8] {
        &[]
    }

    fn release(&mut self, _: MessageHandle) {}

    fn fence(&mut self, peer: PeerId) {
        let mut world = self.world();
        if let Some(gate) = world.peers.remove(&peer.0) {
            world.gates[gate].client = None;
        }
        world.events.retain(|event| !matches!(event, Event::Notified { peer: of, .. } if *of == peer));
    }

    fn wait_fds(&self, _: &mut Vec<RawFd>) {}

    fn prepare_wait(&mut self) -> bool {
        !self.world().events.is_empty()
    }
}

impl Dialer<usize> for Net {
    fn request(&mut self, address: &str) {
        let mut world = self.world();
        world.dials.push(address.to_owned());
        let map = world.map.clone();
        let gate = world.gates.iter().position(|g| g.address == address && g.accepts);
        let result = match (gate, map) {
            (Some(gate), Some(map)) => {
                world.gates[gate].ring.reset();
                Ok((gate, map, GATE_RING, 1))
            }
            _ => Err("wrong cluster".to_owned()),
        };
        world.dialed.push_back(Dialed { address: address.to_owned(), result });
    }

    fn take(&mut self) -> Option<Dialed<usize>> {
        self.world().dialed.pop_front()
    }

    fn waker(&mut self, _: Waker) {}
}

/// What a gate's ring writes through.
struct ToClient<'a> {
    staging: &'a Region,
    client: &'a Region,
    events: &'a mut VecDeque<Event>,
}

impl Transport for ToClient<'_> {
    type Link = ();

    fn register(&mut self, _: Arc<Region>) -> RegionKey {
        RegionKey(0)
    }

    fn admit(&mut self, _: PeerId, (): (), _: &[Arc<Region>]) {}

    fn write(
        &mut self,
        _: PeerId,
        local: LocalRange,
        remote: RemoteOffset,
        _: Option<u32>,
        _: Option<u64>,
    ) -> Result<(), Full> {
        self.client.put_from(remote.offset, self.staging, local.offset, local.len);
        Ok(())
    }

    fn write_inline(&mut self, to: PeerId, bytes: &[u8], remote: RemoteOffset, _: Option<u32>) -> Result<(), Full> {
        self.client.store_u64(remote.offset, u64::from_ne_bytes(bytes.try_into().unwrap()));
        self.events.push_back(Event::Notified { peer: to, value: 0 });
        Ok(())
    }

    fn send(&mut self, _: PeerId, _: &[u8]) -> Result<(), Full> {
        Err(Full)
    }

    fn flush(&mut self) {}

    fn poll(&mut self, _: &mut [Event]) -> usize {
        0
    }

    fn message(&self, _: MessageHandle) -> &[u8] {
        &[]
    }

    fn release(&mut self, _: MessageHandle) {}

    fn fence(&mut self, _: PeerId) {}

    fn wait_fds(&self, _: &mut Vec<RawFd>) {}

    fn prepare_wait(&mut self) -> bool {
        false
    }
}

impl World {
    /// Sends raw bytes to the client as one message.
    pub fn raw(&mut self, gate: usize, parts: &[&[u8]]) {
        let FakeGate { staging, ring, client, .. } = &mut self.gates[gate];
        let Some((peer, client)) = client.as_ref() else { return };
        ring.push(parts).expect("the client reads");
        ring.publish(&mut ToClient { staging, client, events: &mut self.events }, *peer);
    }

    pub fn reply(&mut self, gate: usize, reply: Reply<'_>) {
        let mut head = [0; SESSION_HEAD_BYTES_MAX];
        let (len, body) = reply.encode(&mut head);
        self.raw(gate, &[&head[..len], body]);
    }

    /// What the client asked since the last call.
    pub fn requests(&mut self, gate: usize) -> Vec<String> {
        self.read(gate);
        std::mem::take(&mut self.gates[gate].requests)
    }

    fn read(&mut self, gate: usize) {
        let FakeGate { staging, ring, client, requests, .. } = &mut self.gates[gate];
        let Some((peer, client)) = client.as_ref() else { return };
        while let Some(message) = ring.peek().unwrap() {
            requests.push(match Request::decode(message).unwrap() {
                Request::Append { shard, attempt, seq, record, .. } => {
                    self.attempts.insert((gate, shard.0), attempt);
                    format!("append {shard} #{seq} {}", String::from_utf8_lossy(record))
                }
                Request::Subscribe { stream, shard, from, .. } => format!("subscribe {stream} shard {shard} @{from}"),
                Request::Unsubscribe { stream } => format!("unsubscribe {stream}"),
                Request::Consumed { stream, bytes } => format!("consumed {stream} {bytes}"),
                Request::Follow => "follow".to_owned(),
                Request::Unfollow => "unfollow".to_owned(),
                Request::Outcome { token, shard, client, seq } => {
                    format!("outcome {token} {shard} {:x} #{seq}", client.0)
                }
                Request::Read { token, position } => format!("read {token} @{position}"),
                Request::Cancel { token } => format!("cancel {token}"),
                Request::Tail { token } => format!("tail {token}"),
                Request::Change { token, change } => format!("change {token} {change:?}"),
            });
            ring.consume();
        }
        ring.credit(&mut ToClient { staging, client, events: &mut self.events }, *peer);
    }

    /// The gate refuses the newest attempt.
    pub fn refuse(&mut self, gate: usize, shard: u16, seq: u64, refusal: antelog_protocol::Refusal) {
        self.read(gate);
        let attempt = self.attempts.get(&(gate, shard)).copied().unwrap_or(0);
        self.reply(gate, Reply::Refused { shard: ShardId(shard), attempt, seq, refusal });
    }

    pub fn connected(&self, gate: usize) -> bool {
        self.gates[gate].client.is_some()
    }

    /// The gate closes the connection.
    pub fn drop_connection(&mut self, gate: usize) {
        if let Some((peer, _)) = self.gates[gate].client.take() {
            self.peers.remove(&peer.0);
            self.gates[gate].requests.clear();
            self.events.push_back(Event::PeerDown { peer, reason: DownReason::Closed });
        }
    }

    pub fn order(&mut self, gate: usize, index: u64, entry: &[u8]) {
        self.reply(gate, Reply::Order { index, entry });
    }

    pub fn snapshot(&mut self, gate: usize, index: u64, entries: &[Vec<u8>]) {
        self.snapshot_in(0, gate, (index, 0), entries);
    }

    pub fn snapshot_in(&mut self, view: u32, gate: usize, (index, base): (u64, u64), entries: &[Vec<u8>]) {
        let count = entries.len() as u32;
        self.reply(gate, Reply::Snapshot { index, base: Position(base), entries: count, view });
        for entry in entries {
            self.order(gate, 0, entry);
        }
    }

    pub fn deliver(&mut self, gate: usize, stream: u32, lsn: u64, position: u64, record: &[u8]) {
        self.deliver_in(0, gate, stream, (lsn, position), record);
    }

    pub fn deliver_in(&mut self, view: u32, gate: usize, stream: u32, (lsn, position): (u64, u64), record: &[u8]) {
        let (lsn, position, client) = (Lsn(lsn), Position(position), ClientId(9));
        let reply = Reply::Deliver { stream, lsn, position, view, speculative: true, client, seq: 0, record };
        self.reply(gate, reply);
    }

    /// The stream that the client asked this gate for last, of a shard.
    pub fn stream(&mut self, gate: usize, shard: u16) -> u32 {
        self.read(gate);
        let wanted = format!("shard {shard} @");
        let asked = |line: &&String| line.starts_with("subscribe") && line.contains(&wanted);
        let line = self.gates[gate].requests.iter().rev().find(asked).expect("the stream was asked for");
        line.split(' ').nth(1).unwrap().parse().unwrap()
    }
}

/// Shards 0 and 1 with quota 1 each: even positions belong to shard 0. A window of `cuts` cuts.
pub fn grant(cuts: u32) -> Vec<u8> {
    grant_in(0, (0, cuts), 0, [0, 0])
}

/// As `grant`: in a view, a window from a position on, with the first slots of both shards.
pub fn grant_in(view: u32, (window, cuts): (u64, u32), start: u64, lsns: [u64; 2]) -> Vec<u8> {
    let member = |at: usize| Member { shard: ShardId(at as u16), quota: 1, first_lsn: Lsn(lsns[at]), open: true };
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let head = grant_head(view, WindowMode::Fixed, window, cuts, Position(start));
    let len = encode_grant(&mut buffer, head, &[member(0), member(1)]);
    buffer[..len].to_vec()
}

pub fn cut(cut: u32, prefix: u16) -> Vec<u8> {
    cut_in(0, 0, cut, prefix)
}

pub fn cut_in(view: u32, window: u64, cut: u32, prefix: u16) -> Vec<u8> {
    let mut buffer = [0; 64];
    let len = encode_cut(&mut buffer, view, CutPoint { window, cut, prefix });
    buffer[..len].to_vec()
}

pub fn view_change(view: u32, shard: u16) -> Vec<u8> {
    let mut buffer = [0; 64];
    let len = encode_view_change(&mut buffer, view, ShardId(shard));
    buffer[..len].to_vec()
}

/// Replica `primary` leads the shard from now on, and is its only member.
pub fn members(view: u32, (shard, change): (u16, u32), epoch: u32, primary: u16) -> Vec<u8> {
    let mut buffer = [0; 256];
    let head = ShardChangeHead { view, shard: ShardId(shard), change, epoch, primary, since_failure: 0 };
    let replica = |number| ReplicaId { number, incarnation: 1 };
    let len = encode_shard_change(&mut buffer, head, &[replica(primary)]);
    buffer[..len].to_vec()
}

/// Part of a snapshot: the shard was lost in this view.
pub fn decree(view: u32, shard: u16, (from, lease_end): (u64, u64), lsn: u64) -> Vec<u8> {
    let mut buffer = [0; 64];
    let (from, lease_end, lsn) = (Position(from), Position(lease_end), Lsn(lsn));
    let len = encode_decree(&mut buffer, &Decree { view, shard: ShardId(shard), from, lease_end, lsn });
    buffer[..len].to_vec()
}

/// Writes down what it is told.
#[derive(Default)]
pub struct Log {
    pub said: Vec<String>,
    pub paused: bool,
}

/// Shard, quota and whether it is open.
fn quotas(members: &[Member]) -> Vec<(u16, u32, bool)> {
    members.iter().map(|m| (m.shard.0, m.quota, m.open)).collect()
}

impl SessionHandler for Log {
    fn on_acknowledged(&mut self, shard: ShardId, seq: u64, position: Position) {
        self.said.push(format!("ack {shard} #{seq} @{position}"));
    }

    fn on_refused(&mut self, shard: ShardId, seq: u64, refusal: antelog_protocol::Refusal) {
        let why = match refusal {
            antelog_protocol::Refusal::Closed { instead } => format!(", {instead} instead"),
            _ => String::new(),
        };
        self.said.push(format!("refused {shard} #{seq}{why}"));
    }

    fn on_unknown(&mut self, shard: ShardId, seq: u64) {
        self.said.push(format!("unknown {shard} #{seq}"));
    }

    fn on_outcome(&mut self, token: u64, outcome: antelog_protocol::Outcome) {
        self.said.push(format!("outcome {token} {outcome:?}"));
    }

    fn on_membership(&mut self, token: u64, answer: Result<Membership, ChangeError>) {
        self.said.push(match answer {
            Ok(m) => {
                format!("member {token} window {} @{} {:?} {:?}", m.window, m.position, m.mode, quotas(&m.members))
            }
            Err(error) => format!("member {token} {error}"),
        });
    }

    fn on_event(&mut self, _: SubscriptionId, event: antelog_protocol::client::Event<Record>) {
        use antelog_protocol::client::Event;
        self.said.push(match event {
            Event::Deliver { position, record, speculative, .. } => {
                let mark = if speculative { '?' } else { '+' };
                format!("{mark}{position} {}", String::from_utf8_lossy(&record[..record.len().min(8)]))
            }
            Event::Confirm { upto } => format!("={upto}"),
            Event::Fail { from } => format!("!{from}"),
            Event::Unavailable { from, to } => format!("x{from}-{to}"),
        });
    }

    fn on_trimmed(&mut self, _: SubscriptionId, head: Position) {
        self.said.push(format!("trimmed {head}"));
    }

    fn on_read(&mut self, token: u64, position: Position, slot: crate::client::Slot) {
        self.said.push(format!("read {token} @{position} {slot:?}"));
    }

    fn on_tail(&mut self, token: u64, position: Position) {
        self.said.push(format!("tail {token} {position}"));
    }

    fn on_connection(&mut self, address: &str, error: Option<&str>) {
        self.said.push(format!("{address}: {}", error.unwrap_or("up")));
    }

    fn on_unknown_shard(&mut self, _: SubscriptionId, shard: ShardId) {
        self.said.push(format!("no shard {shard}"));
    }

    fn ready(&mut self, _: SubscriptionId) -> bool {
        !self.paused
    }
}

/// A session with shards 0 and 1 on gates `a` and `b`, and a clock.
pub struct Rig {
    pub net: Net,
    pub session: Session<Net, Net>,
    pub log: Log,
    pub now_ns: u64,
}

impl Rig {
    pub fn new() -> Rig {
        Rig::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut SessionOptions)) -> Rig {
        let gate = |address: &str| {
            let incoming = Region::new(Ring::region_bytes(GATE_RING)).unwrap();
            let staging = Region::new(CLIENT_RING).unwrap();
            let ring = Ring::new(incoming.clone(), staging.clone(), RegionKey(0), GATE_RING, CLIENT_RING);
            FakeGate {
                address: address.into(),
                accepts: true,
                incoming,
                staging,
                ring,
                client: None,
                requests: Vec::new(),
            }
        };
        let shard = |shard, gates: [&str; 3]| ShardGates {
            shard: ShardId(shard),
            gates: (0..).zip(gates.map(String::from)).collect(),
        };
        let map = ClusterMap {
            tick_ns: 1_000_000,
            record_bytes_max: 1000,
            outstanding_max: 8,
            suspect_ns: SUSPECT_NS,
            shards: vec![shard(0, ["a", "b", "c"]), shard(1, ["b", "a", "c"])],
            ordering: "fixed".into(),
        };
        let world = World { gates: vec![gate("a"), gate("b"), gate("c")], map: Some(map), ..World::default() };
        let net = Net(Arc::new(Mutex::new(world)));
        let mut options = SessionOptions::new(ClientId(7), vec!["a".into()]);
        options.ring_bytes = CLIENT_RING;
        options.stream_credit_bytes = 8000;
        change(&mut options);
        let session = Session::new(net.clone(), net.clone(), options).unwrap();
        Rig { net, session, log: Log::default(), now_ns: 1 }
    }

    /// Drives the session until it has nothing to do.
    pub fn run(&mut self) {
        for _ in 0..100 {
            let due = self.session.deadline_ns().is_some_and(|at| at <= self.now_ns);
            if self.session.duty_cycle(self.now_ns, &mut self.log) == 0 && !due && !self.session.prepare_wait() {
                return;
            }
        }
        panic!("the session does not come to rest: {:?}", self.log.said);
    }

    /// Lets a few pauses pass, if there are any.
    pub fn wait(&mut self) {
        self.run();
        for _ in 0..3 {
            self.pause();
        }
    }

    /// Lets one pause pass, if there is one: not the time after which somebody is found to be silent.
    pub fn pause(&mut self) {
        let until_ns = self.now_ns + SUSPECT_NS / 2;
        if let Some(at) = self.session.deadline_ns().filter(|at| *at < until_ns) {
            self.now_ns = self.now_ns.max(at);
            self.run();
        }
    }

    /// What the handler was told since the last call, without connections.
    pub fn said(&mut self) -> Vec<String> {
        self.run();
        self.log.said.drain(..).filter(|line| !line.contains(": ")).collect()
    }

    pub fn requests(&mut self, gate: usize) -> Vec<String> {
        self.run();
        self.net.world().requests(gate)
    }

    /// Subscribes to everything and answers the question for the order stream, at the gate that is asked, with a grant
    /// of 100 cuts; returns that gate and the streams of both shards.
    pub fn subscribed(&mut self) -> (usize, u32, u32) {
        self.session.subscribe(Scope::All, Position(0));
        self.run();
        let asked = [self.requests(0), self.requests(1)];
        let stream = |gate: usize| {
            let line = asked[gate].iter().find(|line| line.starts_with("subscribe")).unwrap();
            line.split(' ').nth(1).unwrap().parse().unwrap()
        };
        let relay = usize::from(!asked[0].contains(&"follow".to_owned()));
        self.net.world().snapshot(relay, 1, &[grant(100)]);
        self.run();
        (relay, stream(0), stream(1))
    }
}
