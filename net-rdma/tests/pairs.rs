//! What happens to pairs when peers, devices and owners do not do the usual: each test was once a way to hang or to lie.
//!
//! On the emulated fabric, with TCP over loopback as the carrier.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};

use antelog_core::mem::Region;
use antelog_core::transport::{DownReason, Event, Full, LocalRange, MessageHandle, PeerId, RemoteOffset, Transport};
use antelog_net_rdma::emulated::{Behaviour, DeviceId, Emulated, Fabric, Grant};
use antelog_net_rdma::health::Health;
use antelog_net_rdma::provider::{Limits, Patience};
use antelog_net_rdma::{Link, Options, RdmaTransport};
use antelog_net_tcp::{TcpLink, TcpTransport};

#[path = "pairs/churn.rs"]
mod churn;
#[path = "../../net-tcp/tests/common/mod.rs"]
mod common;
#[path = "pairs/fallback.rs"]
mod fallback;
#[path = "pairs/faulty.rs"]
mod faulty;
#[path = "pairs/strangers.rs"]
mod strangers;
use common::Pairs;

const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const PEER: PeerId = PeerId(0);
const OTHER: PeerId = PeerId(1);
const NOTHING: Event = Event::Notified { peer: PeerId(u16::MAX), value: u32::MAX };

/// Rounds after which something has not happened.
const ROUNDS_MAX: usize = 200_000;

fn tcp() -> TcpTransport {
    TcpTransport::new(2, antelog_net_tcp::Options::default()).unwrap()
}

/// A transport over an emulated device, and all it reported.
struct Side {
    transport: RdmaTransport<Emulated, TcpTransport>,
    device: DeviceId,
    health: Health,
    said: Arc<Mutex<Vec<String>>>,
    region: Arc<Region>,
    events: Vec<Event>,
}

impl Side {
    fn new(fabric: &Fabric, options: &Options) -> Side {
        Side::granted(fabric, options, u64::MAX)
    }

    fn granted(fabric: &Fabric, options: &Options, lockable_bytes: u64) -> Side {
        let limits = Limits { message_bytes_max: 1 << 20, completions: options.completions(2), requests_max: 1 << 10 };
        let device = fabric.device(Grant { limits, queues: 2, inline_bytes: 64, lockable_bytes });
        let id = device.id();
        let said = Arc::new(Mutex::new(Vec::new()));
        let log = said.clone();
        let health = Health::new(Arc::new(move |line: &str| log.lock().unwrap().push(line.to_owned())));
        let mut transport = RdmaTransport::new(tcp(), Some(device), 2, options.clone(), health.clone());
        let region = Region::new(1 << 16).unwrap();
        transport.register(region.clone());
        Side { transport, device: id, health, said, region, events: Vec::new() }
    }

    fn admit(&mut self, link: TcpLink, rdma: bool) {
        let region = self.region.clone();
        self.transport.admit(PEER, Link { carrier: link, rdma: rdma.then_some(HOST) }, &[region]);
    }

    fn poll(&mut self) {
        let mut events = [NOTHING; 16];
        let count = self.transport.poll(&mut events);
        self.events.extend(&events[..count]);
    }

    fn is_up(&self) -> bool {
        self.transport.is_pair(PEER)
    }

    fn downs(&self) -> Vec<DownReason> {
        let reason = |event: &Event| if let Event::PeerDown { reason, .. } = event { Some(*reason) } else { None };
        self.events.iter().filter_map(reason).collect()
    }

    /// Messages reported since the last call, not released.
    fn messages(&mut self) -> Vec<MessageHandle> {
        let handle = |event: &Event| if let Event::Received { message, .. } = event { Some(*message) } else { None };
        let handles = self.events.iter().filter_map(handle).collect();
        self.events.retain(|event| handle(event).is_none());
        handles
    }

    /// Gives all messages back; how many there were.
    fn release(&mut self) -> usize {
        let messages = self.messages();
        messages.iter().for_each(|message| self.transport.release(*message));
        messages.len()
    }

    fn write(&mut self, len: usize, notify: Option<u32>, token: Option<u64>) -> Result<(), Full> {
        let local = LocalRange { region: antelog_core::transport::RegionKey(0), offset: 0, len };
        self.transport.write(PEER, local, RemoteOffset { region: 0, offset: 0 }, notify, token)
    }

    fn said(&self) -> Vec<String> {
        self.said.lock().unwrap().clone()
    }
}

/// Two sides and what joins them.
struct Rig {
    fabric: Fabric,
    links: Pairs,
    a: Side,
    b: Side,
}

impl Rig {
    fn new(seed: u64, options: &Options) -> Rig {
        let fabric = Fabric::new(seed, Behaviour::default());
        let (a, b) = (Side::new(&fabric, options), Side::new(&fabric, options));
        Rig { fabric, links: Pairs::new("127.0.0.1:0"), a, b }
    }

    fn up(seed: u64, options: &Options) -> Rig {
        let mut rig = Rig::new(seed, options);
        rig.connect(true);
        rig.until("both come up", |rig| rig.a.is_up() && rig.b.is_up());
        rig
    }

    fn connect(&mut self, rdma: bool) {
        let (to_b, to_a) = self.links.link();
        self.a.admit(to_b, rdma);
        self.b.admit(to_a, rdma);
    }

    fn round(&mut self) {
        self.a.transport.flush();
        self.b.transport.flush();
        self.a.poll();
        self.b.poll();
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Rig) -> bool) {
        for _ in 0..ROUNDS_MAX {
            if done(self) {
                return;
            }
            self.round();
        }
        panic!("{what}: not in {ROUNDS_MAX} rounds; a {:?}, b {:?}", self.a.events, self.b.events);
    }

    fn settle(&mut self) {
        (0..2000).for_each(|_| self.round());
    }
}

fn receives(receives: usize) -> Options {
    Options { receives, ..Options::default() }
}

/// One side is up and has used all its credit before the other is up: the credit comes back once it is.
#[test]
fn credit_earned_before_going_up_is_returned() {
    let mut found = 0;
    for seed in 0..128 {
        let mut rig = Rig::new(seed, &receives(16));
        rig.connect(true);
        rig.until("one comes up", |rig| rig.a.is_up() || rig.b.is_up());
        if !rig.a.is_up() || rig.b.is_up() {
            continue;
        }
        // No acknowledgement: `b` does not learn that its probe arrived, if it has not yet.
        rig.fabric.set_behaviour(Behaviour { ack_in: 0, completion_in: 1, ..Behaviour::default() });
        while rig.a.transport.send(PEER, b"x").is_ok() {}
        let mut released = 0;
        rig.until("all arrive", |rig| {
            released += rig.b.release();
            released == 16
        });
        rig.settle();
        if rig.b.is_up() {
            continue;
        }
        found += 1;
        rig.fabric.set_behaviour(Behaviour::default());
        rig.until("b comes up", |rig| rig.b.is_up());
        rig.until("there is credit again", |rig| rig.a.transport.send(PEER, b"y").is_ok());
    }
    assert!(found > 1, "only {found} of the seeds let one side up first");
}

/// A thread that parks right after its last release owes nobody credit.
#[test]
fn parking_after_a_release_returns_credit() {
    let mut rig = Rig::up(1, &receives(32));
    while rig.a.transport.send(PEER, b"x").is_ok() {}
    let mut held = Vec::new();
    rig.until("all arrive", |rig| {
        held.extend(rig.b.messages());
        held.len() == 32
    });
    rig.settle();
    held.drain(..).for_each(|message| rig.b.transport.release(message));
    for _ in 0..2000 {
        // Nothing arrives at `b`, so it would stay parked.
        rig.b.transport.prepare_wait();
        rig.a.poll();
    }
    assert_eq!(rig.a.transport.send(PEER, b"y"), Ok(()));
}

/// Fewer receives than are posted in one batch, down to a single one.
#[test]
fn few_receives_are_slow_but_do_not_hang() {
    for count in [1, 2, 3, 7, 8, 15, 17] {
        let mut rig = Rig::up(count as u64, &receives(count));
        for round in 0..50 {
            rig.until("a message is accepted", |rig| {
                rig.b.release();
                rig.a.transport.send(PEER, b"there").is_ok()
            });
            rig.until("one comes back", |rig| {
                rig.a.release();
                rig.b.transport.write_inline(PEER, b"back", RemoteOffset { region: 0, offset: 0 }, Some(round)).is_ok()
            });
        }
        rig.settle();
        rig.b.release();
        assert_eq!((rig.a.downs(), rig.b.downs()), (vec![], vec![]));
    }
}

/// The end of a pair waits for its receives to be flushed, not for completions that were taken before.
#[test]
fn the_end_of_a_pair_is_not_waited_for_in_vain() {
    for seed in 0..20 {
        let mut rig = Rig::up(seed, &receives(64));
        let before_ns = rig.fabric.now_ns();
        rig.fabric.break_queue(rig.a.device, antelog_net_rdma::provider::QueueId(0));
        rig.until("it ends", |rig| rig.a.downs().len() == 1 && rig.b.downs().len() == 1);
        let took_ns = rig.fabric.now_ns() - before_ns;
        assert!(took_ns < 50_000_000, "seed {seed}: {took_ns} ns of virtual time");
    }
}

/// Buffers whose messages are released only after the pair's end serve later pairs: nothing registered is lost.
#[test]
fn held_messages_do_not_use_up_memory() {
    let options = receives(32);
    // The source, the staging memory, and buffers for one pair and for what is held meanwhile.
    let buffers = (32 + 24) * 8192;
    let lockable = (2 << 16) + options.staging_bytes as u64 + 2 * buffers;
    let fabric = Fabric::new(3, Behaviour::default());
    let (a, b) = (Side::new(&fabric, &options), Side::granted(&fabric, &options, lockable));
    let mut rig = Rig { fabric, links: Pairs::new("127.0.0.1:0"), a, b };
    let mut kept: Option<MessageHandle> = None;
    for life in 0..6u8 {
        rig.connect(true);
        rig.until("both come up", |rig| rig.a.is_up() && rig.b.is_up());
        if let Some(message) = kept.take() {
            assert_eq!(rig.b.transport.message(message), [life - 1; 100]);
            rig.b.transport.release(message);
        }
        rig.a.transport.send(PEER, &[life; 100]).unwrap();
        rig.until("it arrives", |rig| {
            kept = kept.or(rig.b.messages().pop());
            kept.is_some()
        });
    }
    assert_eq!((rig.a.said(), rig.b.said()), (vec![], vec![]));
}

/// A carrier that is never short of events leaves room for those of pairs.
#[test]
fn a_busy_carrier_does_not_starve_pairs() {
    let mut rig = Rig::up(4, &Options::default());
    let (here, there) = rig.links.link();
    let mut caller = tcp();
    caller.admit(OTHER, there, &[]);
    rig.b.transport.admit(OTHER, Link { carrier: here, rdma: None }, &[]);
    let mut events = [NOTHING; 2];
    let mut place = None;
    for round in 0..1000 {
        // More than one poll takes.
        while caller.send(OTHER, b"through the carrier").is_ok() {}
        caller.flush();
        caller.poll(&mut [NOTHING; 4]);
        if round == 200 {
            rig.a.transport.send(PEER, b"through the queue pair").unwrap();
            rig.a.transport.flush();
            (0..1000).for_each(|_| rig.fabric.step());
        }
        let count = rig.b.transport.poll(&mut events);
        for event in &events[..count] {
            if let Event::Received { peer, message } = *event {
                place = place.or((peer == PEER).then_some(round));
                rig.b.transport.release(message);
            }
        }
    }
    let place = place.expect("the pair's message is reported");
    assert!(place < 205, "the pair's message came in round {place}");
}

/// A new connection replaces one that is still being set up, at every step, on both sides or seen by one side later.
#[test]
fn a_pair_that_is_starting_can_be_replaced() {
    for rounds in 0..40 {
        let mut rig = Rig::new(rounds, &receives(64));
        for late in [0, 1, 5] {
            rig.connect(true);
            (0..rounds).for_each(|_| rig.round());
            let (to_b, to_a) = rig.links.link();
            rig.a.admit(to_b, true);
            (0..late).for_each(|_| rig.round());
            rig.b.admit(to_a, true);
        }
        rig.until("both come up", |rig| rig.a.is_up() && rig.b.is_up());
        // What the replaced connections may have reported ends before this.
        rig.a.events.clear();
        rig.b.events.clear();
        rig.a.transport.send(PEER, b"hello").unwrap();
        rig.until("a message arrives", |rig| rig.b.release() == 1);
        rig.settle();
        assert_eq!((rig.a.events.len(), rig.b.events.len()), (0, 0), "{:?} {:?}", rig.a.events, rig.b.events);
        assert_eq!((rig.a.health.avoided(HOST), rig.b.health.avoided(HOST)), (None, None));
    }
}

/// Both devices fail the queue at the same time, under traffic: one end on each side, nothing behind it.
#[test]
fn both_sides_may_break_at_once() {
    let queue = antelog_net_rdma::provider::QueueId(0);
    for seed in 0..40 {
        let mut rig = Rig::up(seed, &receives(64));
        for round in 0..seed {
            let _ = rig.a.transport.send(PEER, b"x");
            let _ = rig.b.write(5000, Some(1), Some(round));
            rig.round();
        }
        rig.fabric.break_queue(rig.a.device, queue);
        rig.fabric.break_queue(rig.b.device, queue);
        rig.until("both end", |rig| !rig.a.downs().is_empty() && !rig.b.downs().is_empty());
        rig.settle();
        for side in [&rig.a, &rig.b] {
            assert_eq!(side.downs().len(), 1);
            assert!(matches!(side.events.last(), Some(Event::PeerDown { .. })), "{:?}", side.events);
        }
        rig.b.release();
    }
}

/// Slices of one place, and of none, which report nothing and lose nothing.
#[test]
fn the_smallest_slices_do() {
    let mut rig = Rig::up(5, &receives(64));
    let poll = |side: &mut Side, len: usize| {
        let mut events = [NOTHING; 1];
        let count = side.transport.poll(&mut events[..len]);
        assert!(count <= len);
        side.events.extend(&events[..count]);
    };
    let mut sent = 0;
    for round in 0..20_000 {
        if round % 10 == 0 && round < 15_000 && rig.a.transport.send(PEER, &[sent as u8; 9]).is_ok() {
            sent += 1;
        }
        rig.a.transport.flush();
        poll(&mut rig.a, round % 2);
        poll(&mut rig.b, usize::from(round % 3 == 0));
        if round % 100 == 0 {
            rig.b.release();
        }
    }
    let mut arrived = 0;
    drop(std::mem::replace(&mut rig.a, Side::new(&rig.fabric, &Options::default())));
    for _ in 0..20_000 {
        poll(&mut rig.b, 1);
        arrived += rig.b.release();
    }
    assert!(sent > 500, "{sent}");
    assert_eq!(rig.b.events, [Event::PeerDown { peer: PEER, reason: DownReason::Closed }]);
    assert!(arrived <= sent);
}
