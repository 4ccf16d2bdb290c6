//! The simulated network: links with drawn delays, bounded queues, losses.
//!
//! An operation is handed over at the end of the duty cycle that issued it, takes a drawn time to the other side, takes
//! effect there, and is acknowledged after another drawn time; each direction keeps its order (but see
//! [`NetKnobs::targets_overtake`]). Bytes are read from their source only when they land, which the contract allows: a
//! source that changes too early tears them. In a network with a NIC operations land when they arrive; without one when
//! the receiver polls, as TCP does. When a link is lost, what has not landed never does, and both sides learn of it at
//! times of their own.

mod link;
mod transport;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

pub use self::transport::{SimLink, SimTransport};

use self::link::Link;
use super::queue::{Queue, What};
use super::rng::Rng;
use super::trace::{Kind, Trace};
use crate::mem::Region;
use crate::transport::{DownReason, PeerId};

/// How long one direction of a link takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// The shortest time, in nanoseconds.
    pub base_ns: u64,
    /// Most that it takes longer ordinarily, in nanoseconds.
    pub jitter_ns: u64,
}

/// What draws of the network are taken from.
#[derive(Clone, Debug)]
pub struct NetKnobs {
    /// Operations land when they arrive, without the receiver (RDMA), not when it polls (TCP).
    pub nic: bool,
    /// Ways of each kind of link: replication, order, client.
    pub ways: [Way; 3],
    /// Most that one of [`long_one_in`](Self::long_one_in) ways takes longer, in nanoseconds.
    pub long_ns: u64,
    /// How rare long ways are; 0: there are none.
    pub long_one_in: u64,
    /// Fewest and most operations a direction of a link takes before it is full.
    pub capacity: (u64, u64),
    /// Targets overtake order entries that are under way, which no transport does and the protocol allows.
    pub targets_overtake: bool,
}

impl NetKnobs {
    /// The longest of the shortest ways, in nanoseconds.
    pub fn longest_way_ns(&self) -> u64 {
        self.ways.iter().map(|way| way.base_ns).max().unwrap_or(0)
    }
}

/// What a link carries, for faults and counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkKind {
    /// A primary's log to a backup.
    Replication = 0,
    /// Reports and the order stream.
    Order = 1,
    /// A client and a gate.
    Client = 2,
}

/// What was seen, for probes and checks.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Operations that met a full transport.
    pub(super) full: u64,
    /// Targets that overtook something.
    pub(super) overtaken: u64,
    /// Links lost, by kind, with operations under way.
    pub(super) lost: [u64; 3],
    /// Messages that found no receive posted on a link between nodes: the order stream's flow control failed.
    pub(super) overrun: Option<u32>,
    /// Writes of a primary that were under way when the other side shut it out.
    pub(super) fenced: u64,
    /// Links that ended because one side broke the rules.
    pub(super) rules_broken: u64,
}

/// An order entry seen on its way to a follower.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tapped {
    pub(super) link: u32,
    pub(super) index: u64,
    pub(super) hash: u64,
}

/// An order entry that a follower was handed, or a snapshot up to one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Landed {
    pub(super) number: usize,
    pub(super) index: u64,
    pub(super) snapshot: bool,
}

/// Something that waits in an endpoint to be polled.
#[derive(Debug)]
enum Waiting {
    Placed { token: u64 },
    Notified { value: u32 },
    Received { message: Vec<u8> },
    Down { reason: DownReason },
}

#[derive(Debug)]
struct Endpoint {
    /// Who is woken.
    thread: usize,
    sources: Vec<Arc<Region>>,
    /// Link and side of each peer.
    peers: Vec<Option<(u32, u8)>>,
    inbox: VecDeque<(u32, PeerId, Waiting)>,
    /// Links with an operation that arrived and lands when polled, in order of arrival.
    arrivals: VecDeque<u32>,
    /// Arrivals that wait until messages are released.
    held_back: Vec<u32>,
    polled_ns: u64,
    /// Some direction has room again.
    room: bool,
    /// Targets that it sends may overtake its order entries.
    overtaken: bool,
}

/// Links that were dropped without having been given to a transport.
type Dropped = Arc<Mutex<Vec<(u32, u8)>>>;

/// The network and virtual time. Shared by everything that runs in one simulation.
#[derive(Debug)]
pub struct Network {
    pub(super) now_ns: u64,
    /// When operations of the running duty cycle leave.
    pub(super) issue_ns: u64,
    pub(super) queue: Queue,
    pub(super) trace: Trace,
    pub(super) seen: Seen,
    pub(super) taps: Vec<Tapped>,
    /// Order streams begun.
    pub(super) streams: u32,
    /// What of the order stream followers were handed.
    pub(super) landed: Vec<Landed>,
    /// Targets sent that name the end of a window.
    pub(super) edge_targets: u64,
    /// Operations that still leave in this duty cycle; what is issued beyond is lost with its process.
    pub(super) leave: Option<u64>,
    /// Whoever closes a connection now dies without a word: the other side learns of it only after so long.
    pub(super) silent_ns: Option<u64>,
    /// Threads for which something has arrived.
    pub(super) woken: Vec<usize>,
    knobs: NetKnobs,
    rng: Rng,
    links: Vec<Link>,
    endpoints: Vec<Endpoint>,
    dropped: Dropped,
}

/// A handle to the network.
pub type Shared = Rc<RefCell<Network>>;

impl Network {
    /// A network without links at time 0.
    pub fn new(seed: u64, knobs: NetKnobs, written: bool) -> Shared {
        Rc::new(RefCell::new(Network {
            now_ns: 0,
            issue_ns: 0,
            queue: Queue::default(),
            trace: Trace::new(written),
            seen: Seen::default(),
            taps: Vec::new(),
            streams: 0,
            landed: Vec::new(),
            edge_targets: 0,
            leave: None,
            silent_ns: None,
            woken: Vec::new(),
            knobs,
            rng: Rng::new(seed, 2),
            links: Vec::new(),
            endpoints: Vec::new(),
            dropped: Dropped::default(),
        }))
    }

    pub(super) fn note(&mut self, kind: Kind, a: u64, b: u64, c: u64) {
        self.trace.note(self.now_ns, kind, a, b, c);
    }

    pub(super) fn plan(&mut self, at_ns: u64, what: What) {
        self.queue.plan(at_ns.max(self.now_ns), what);
    }

    fn endpoint(&mut self, thread: usize, peers_max: u16) -> usize {
        self.endpoints.push(Endpoint {
            thread,
            sources: Vec::new(),
            peers: vec![None; peers_max.into()],
            inbox: VecDeque::new(),
            arrivals: VecDeque::new(),
            held_back: Vec::new(),
            polled_ns: 0,
            room: false,
            overtaken: false,
        });
        self.endpoints.len() - 1
    }

    /// Targets that this endpoint sends overtake, if the knobs say so.
    pub(super) fn let_overtake(&mut self, endpoint: usize) {
        self.endpoints[endpoint].overtaken = true;
    }

    /// Both ends of a new connection.
    pub(super) fn connect(&mut self, kind: LinkKind) -> (SimLink, SimLink) {
        let id = self.links.len() as u32;
        let (low, high) = self.knobs.capacity;
        let capacity = [self.rng.range(low, high) as usize, self.rng.range(low, high) as usize];
        self.links.push(Link::new(kind, capacity));
        self.note(Kind::Link, id.into(), kind as u64, 0);
        let end = |side| SimLink::new(id, side, self.dropped.clone());
        (end(0), end(1))
    }

    /// Time for one way of `bytes` bytes over a link.
    fn way_ns(&mut self, link: u32, bytes: usize) -> u64 {
        let way = self.knobs.ways[self.links[link as usize].kind as usize];
        let knobs = &self.knobs;
        let long = knobs.long_one_in > 0 && self.rng.below(knobs.long_one_in) == 0;
        let long_ns = if long { self.rng.below(knobs.long_ns) } else { 0 };
        way.base_ns + self.rng.below(way.jitter_ns + 1) + long_ns + bytes as u64 / 4
    }

    /// Links of a kind that work.
    pub(super) fn living(&self, kind: usize) -> Vec<u32> {
        let living = self.links.iter().enumerate().filter(|(_, l)| l.alive && l.kind as usize == kind);
        living.map(|(at, _)| at as u32).collect()
    }

    /// Links of an end that work.
    pub(super) fn links_of(&self, endpoint: usize) -> Vec<u32> {
        let links = self.endpoints[endpoint].peers.iter().flatten().map(|(link, _)| *link);
        links.filter(|link| self.links[*link as usize].alive).collect()
    }

    /// Does what was planned for now, if it is the network's; false otherwise.
    pub(super) fn act(&mut self, what: What) -> bool {
        match what {
            What::Arrive { link, side } => self.arrive(link, side),
            What::Acked { link, side } => self.acked(link, side),
            What::Room { link, side } => self.room(link, side),
            What::Down { link, side, reason } => self.down(link, side, reason),
            What::Lose { link } => self.lose(link),
            _ => return false,
        }
        true
    }

    /// Closes connections that nobody took over.
    pub(super) fn bury(&mut self) {
        loop {
            let next = self.dropped.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some((link, side)) = next else { return };
            self.close(link, side, DownReason::Closed);
        }
    }

    fn wake(&mut self, endpoint: usize) {
        let thread = self.endpoints[endpoint].thread;
        self.woken.push(thread);
    }
}

/// Moves a network that no simulation drives: the contract's suite runs over bare transports.
pub fn advance(network: &Shared, by_ns: u64) {
    let mut network = network.borrow_mut();
    let until_ns = network.now_ns + by_ns;
    network.bury();
    while network.queue.next_at_ns().is_some_and(|at| at <= until_ns) {
        let Some((at_ns, what)) = network.queue.next() else { break };
        network.now_ns = at_ns;
        network.issue_ns = at_ns;
        network.act(what);
    }
    network.woken.clear();
    network.now_ns = until_ns;
    network.issue_ns = until_ns;
}

/// A connection between two transports that no simulation drives.
pub fn connect(network: &Shared) -> (SimLink, SimLink) {
    network.borrow_mut().connect(LinkKind::Client)
}
