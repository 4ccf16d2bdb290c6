//! Random traffic on the emulated fabric against a model: what a completion says is there is there, and nothing else ever
//! changes. `ANTELOG_EMULATED_WRITES` sets how many writes are checked.
//!
//! Every word written carries its stream, its place and the sequence number of its write. Since one queue's messages are
//! placed in order, a word may only hold the newest write known to be there or a later one.

use std::collections::VecDeque;
use std::sync::Arc;

use antelog_core::mem::Region;
use antelog_net_rdma::emulated::{Behaviour, Emulated, Fabric, Grant};
use antelog_net_rdma::provider::{
    Access, Completion, Done, End, Failure, Local, MemoryId, Operation, Patience, Provider, QueueId, Receive, Request,
};

const REQUESTS: usize = 64;
const RECEIVES: usize = 32;
/// Longest write.
const WRITE_BYTES: usize = 4096;
/// Longest send.
const SEND_BYTES: usize = 256;
/// What one stream writes at its receiver, and the zeroes behind it.
const WINDOW_BYTES: usize = 64 << 10;
const GUARD_BYTES: usize = 4 << 10;
/// A queue's part of its device's source memory: one place per outstanding request.
const SOURCE_BYTES: usize = REQUESTS * WRITE_BYTES;
const INBOX_BYTES: usize = RECEIVES * SEND_BYTES;
const PATIENCE: Patience = Patience { ack_timeout: 1, retries: 7 };

struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 16) % bound as u64) as usize
    }
}

struct Device {
    provider: Emulated,
    window: (MemoryId, Arc<Region>),
    source: (MemoryId, Arc<Region>),
    inbox: (MemoryId, Arc<Region>),
}

/// A request, as the sender remembers it.
#[derive(Clone, Copy)]
struct Sent {
    seq: u64,
    /// First word in the window, and how many; 0 for a send.
    at: usize,
    words: usize,
    signalled: bool,
}

/// What a message leaves at the receiver besides bytes in the window.
#[derive(Clone, Copy)]
enum Arrival {
    Notified { seq: u64 },
    Received { seq: u64, words: usize },
}

/// One end of a connection: it sends a stream to its peer and takes its peer's.
struct Side {
    device: usize,
    queue: QueueId,
    peer: usize,
    next_seq: u64,
    outstanding: VecDeque<Sent>,
    /// Writes of this stream that the receiver has no word of yet.
    unannounced: VecDeque<Sent>,
    /// What the receiver will see of this stream, in order.
    arrivals: VecDeque<Arrival>,
    /// By word of the window at the peer: the newest write that is there for certain.
    newest: Vec<u64>,
    next_receive: u64,
    next_arrival: u64,
    has_failed: bool,
}

fn word(stream: usize, seq: u64, place: usize) -> u64 {
    (stream as u64) << 56 | (place as u64) << 40 | seq
}

struct Model {
    fabric: Fabric,
    rng: Rng,
    devices: Vec<Device>,
    sides: Vec<Side>,
    /// Writes of at least a word: posted, and found to be there when a completion covered them, or an arrival told so.
    posted: u64,
    checked: u64,
    announced: u64,
    flushed: u64,
    reconnected: u64,
    scratch: Vec<u8>,
}

impl Model {
    fn new(seed: u64, devices: usize, queues_per_pair: usize, behaviour: Behaviour) -> Model {
        let fabric = Fabric::new(seed, behaviour);
        let queues = (devices - 1) * queues_per_pair;
        let new_device = |_| {
            let mut provider = fabric.device(Grant { queues, ..Grant::default() });
            let mut register = |bytes: usize, access| {
                let region = Region::new(bytes * queues).unwrap();
                (provider.register(&region, access).unwrap(), region)
            };
            let window = register(WINDOW_BYTES + GUARD_BYTES, Access::RemoteWrite);
            let source = register(SOURCE_BYTES, Access::Local);
            let inbox = register(INBOX_BYTES, Access::Local);
            Device { provider, window, source, inbox }
        };
        let devices: Vec<Device> = (0..devices).map(new_device).collect();
        let mut sides: Vec<Side> = Vec::new();
        let mut used = vec![0; devices.len()];
        for a in 0..devices.len() {
            for b in a + 1..devices.len() {
                for _ in 0..queues_per_pair {
                    let first = sides.len();
                    for (device, peer) in [(a, first + 1), (b, first)] {
                        sides.push(Side::new(device, QueueId(used[device]), peer));
                        used[device] += 1;
                    }
                }
            }
        }
        let rng = Rng(seed | 1);
        let (posted, checked, announced, flushed, reconnected) = (0, 0, 0, 0, 0);
        let scratch = Vec::new();
        let mut model =
            Model { fabric, rng, devices, sides, posted, checked, announced, flushed, reconnected, scratch };
        for side in (0..model.sides.len()).step_by(2) {
            model.connect(side);
        }
        model
    }

    /// Makes both queues of a connection and connects them.
    fn connect(&mut self, first: usize) {
        let mut ends = Vec::new();
        for side in [first, first + 1] {
            let psn = self.rng.below(1 << 24) as u32;
            let (device, queue) = (self.sides[side].device, self.sides[side].queue);
            let provider = &mut self.devices[device].provider;
            let (number, inline_bytes) = provider.create(queue, REQUESTS, RECEIVES).unwrap();
            assert_eq!(inline_bytes, 64);
            ends.push(End { port: provider.port(), number, psn });
            self.post_receives(side, RECEIVES);
        }
        for (side, end, peer) in [(first, ends[0], ends[1]), (first + 1, ends[1], ends[0])] {
            let queue = self.sides[side].queue;
            let provider = &mut self.devices[self.sides[side].device].provider;
            provider.connect(queue, end.psn, &peer, PATIENCE).unwrap();
        }
    }

    fn post_receives(&mut self, side: usize, count: usize) {
        let Side { device, queue, ref mut next_receive, .. } = self.sides[side];
        for _ in 0..count {
            let id = *next_receive;
            *next_receive += 1;
            let device = &mut self.devices[device];
            let offset = usize::from(queue.0) * INBOX_BYTES + id as usize % RECEIVES * SEND_BYTES;
            let local = Local { memory: device.inbox.0, offset, len: SEND_BYTES };
            let id = 1 << 63 | u64::from(queue.0) << 48 | id;
            device.provider.post_receives(queue, &[Receive { id, local }]).unwrap();
        }
    }

    fn post(&mut self, side: usize) {
        let rng = &mut self.rng;
        let kind = rng.below(100);
        let words = match rng.below(100) {
            0..2 => 512,
            2..5 => 0,
            5..80 => 8 + rng.below(25),
            _ => 1 + rng.below(8),
        };
        let ours = &mut self.sides[side];
        let seq = ours.next_seq;
        ours.next_seq += 1;
        let (is_send, is_notified) = (kind < 10 && words * 8 <= SEND_BYTES, kind >= 90);
        let at = if is_send { 0 } else { rng.below(WINDOW_BYTES / 8 - words + 1) };
        let signalled = ours.outstanding.len() + 1 == REQUESTS || rng.below(8) == 0;
        let inline = words <= 8 && rng.below(2) == 0;

        let source = (usize::from(ours.queue.0) * REQUESTS + seq as usize % REQUESTS) * WRITE_BYTES;
        let device = &mut self.devices[ours.device];
        self.scratch.clear();
        (0..words).for_each(|n| self.scratch.extend(word(side, seq, at + n).to_le_bytes()));
        device.source.1.put(source, &self.scratch);
        let local = Local { memory: device.source.0, offset: source, len: words * 8 };
        let sent = Sent { seq, at, words: if is_send { 0 } else { words }, signalled };
        ours.outstanding.push_back(sent);
        if !is_send {
            ours.unannounced.push_back(sent);
            self.posted += u64::from(words > 0);
        }
        if is_send {
            ours.arrivals.push_back(Arrival::Received { seq, words });
        } else if is_notified {
            ours.arrivals.push_back(Arrival::Notified { seq });
        }
        let (from, queue, peer) = (ours.device, ours.queue, ours.peer);
        let operation = if is_send {
            Operation::Send { imm: Some(seq as u32) }
        } else {
            let remote = self.devices[self.sides[peer].device].provider.remote(MemoryId(0));
            let window = usize::from(self.sides[peer].queue.0) * (WINDOW_BYTES + GUARD_BYTES);
            let address = remote.address + (window + at * 8) as u64;
            Operation::Write { address, rkey: remote.rkey, imm: is_notified.then_some(seq as u32) }
        };
        let id = u64::from(queue.0) << 48 | seq;
        let request = Request { id, operation, local, signalled, inline };
        self.devices[from].provider.post(queue, &[request]).unwrap();
        if inline {
            // The bytes were taken along: the source may change at once.
            self.scratch.fill(0xEE);
            self.devices[from].source.1.put(source, &self.scratch);
        }
    }

    /// The write has to be there, or later ones of its stream.
    fn check(&mut self, stream: usize, write: Sent) {
        let peer = &self.sides[self.sides[stream].peer];
        let window = usize::from(peer.queue.0) * (WINDOW_BYTES + GUARD_BYTES);
        let region = &self.devices[peer.device].window.1;
        let ours = &mut self.sides[stream];
        for place in write.at..write.at + write.words {
            let found = region.load_u64(window + place * 8);
            let newest = &mut ours.newest[place];
            *newest = write.seq.max(*newest);
            let allowed = word(stream, *newest, place)..word(stream, ours.next_seq, place);
            assert!(allowed.contains(&found), "stream {stream}, word {place}: {found:#x} is not in {allowed:x?}");
        }
    }

    fn completed(&mut self, device: usize, completion: &Completion) {
        let queue = QueueId((completion.id >> 48) as u16 & 0x7FFF);
        let number = completion.id & ((1 << 48) - 1);
        let side = self.sides.iter().position(|s| s.device == device && s.queue == queue).unwrap();
        if completion.id >> 63 == 1 {
            return self.arrived(side, number, completion);
        }
        match completion.result {
            Ok(done) => assert_eq!(done, Done::Request),
            Err(_) => {
                self.flushed += 1;
                self.sides[side].has_failed = true;
            }
        }
        loop {
            let sent = self.sides[side].outstanding.pop_front().expect("a request that completed was outstanding");
            let is_own = sent.seq == number;
            assert!(sent.seq <= number, "request {number} completed twice or out of order");
            if is_own && completion.result.is_err() {
                return;
            }
            assert_eq!(sent.signalled, is_own, "a signalled request completes by itself, others never");
            self.check(side, sent);
            self.checked += u64::from(sent.words > 0);
            if is_own {
                return;
            }
            assert!(completion.result.is_ok() || !sent.signalled);
        }
    }

    fn arrived(&mut self, side: usize, number: u64, completion: &Completion) {
        assert_eq!(number, self.sides[side].next_arrival, "receives complete once and in order");
        self.sides[side].next_arrival += 1;
        let stream = self.sides[side].peer;
        let Ok(done) = completion.result else {
            assert_eq!(completion.result, Err(Failure::Flushed));
            self.sides[side].has_failed = true;
            return;
        };
        let arrival = self.sides[stream].arrivals.pop_front().expect("something that arrived was sent");
        let seq = match (done, arrival) {
            (Done::Notified { imm }, Arrival::Notified { seq }) => {
                assert_eq!(imm, seq as u32);
                seq
            }
            (Done::Received { len, imm }, Arrival::Received { seq, words }) => {
                assert_eq!((len, imm), (words * 8, Some(seq as u32)));
                let Side { device, queue, .. } = self.sides[side];
                let offset = usize::from(queue.0) * INBOX_BYTES + number as usize % RECEIVES * SEND_BYTES;
                for n in 0..words {
                    let found = self.devices[device].inbox.1.load_u64(offset + n * 8);
                    assert_eq!(found, word(stream, seq, n));
                }
                seq
            }
            (done, _) => panic!("{done:?} is not what was sent"),
        };
        while self.sides[stream].unannounced.front().is_some_and(|w| w.seq <= seq) {
            let write = self.sides[stream].unannounced.pop_front().unwrap();
            self.check(stream, write);
            self.announced += u64::from(write.words > 0);
        }
        if !self.sides[side].has_failed {
            self.post_receives(side, 1);
        }
    }

    /// When all of a failed connection has completed, nothing of it lands any more, and a new one begins.
    fn mend(&mut self, first: usize) {
        let pair = [first, first + 1];
        if !pair.iter().any(|&s| self.sides[s].has_failed) {
            return;
        }
        for side in pair {
            let ours = &mut self.sides[side];
            ours.has_failed = true;
            self.devices[ours.device].provider.fail(ours.queue);
        }
        let is_drained = |s: &Side| s.outstanding.is_empty() && s.next_arrival == s.next_receive;
        if !pair.iter().all(|&s| is_drained(&self.sides[s])) {
            return;
        }
        let window = |model: &Model, side: usize| {
            let Side { device, queue, .. } = model.sides[side];
            let mut bytes = vec![0; WINDOW_BYTES];
            model.devices[device].window.1.get(usize::from(queue.0) * (WINDOW_BYTES + GUARD_BYTES), &mut bytes);
            bytes
        };
        for side in pair {
            let Side { device, queue, .. } = self.sides[side];
            self.devices[device].provider.destroy(queue);
        }
        let before = pair.map(|side| window(self, side));
        (0..10).for_each(|_| self.fabric.step());
        assert!(before == pair.map(|side| window(self, side)), "something landed in a queue that had ended");
        for side in pair {
            let ours = &mut self.sides[side];
            ours.has_failed = false;
            ours.arrivals.clear();
            ours.unannounced.clear();
        }
        self.connect(first);
        self.reconnected += 1;
    }

    fn guards_are_untouched(&self) {
        for device in &self.devices {
            let mut guard = vec![0; GUARD_BYTES];
            for at in (WINDOW_BYTES..device.window.1.len()).step_by(WINDOW_BYTES + GUARD_BYTES) {
                device.window.1.get(at, &mut guard);
                assert!(guard.iter().all(|&b| b == 0), "something landed between two windows");
            }
        }
    }

    /// Runs until so many writes were posted and all has completed.
    fn run(&mut self, writes: u64) {
        let mut taken = [Completion { id: 0, result: Ok(Done::Request) }; 32];
        loop {
            self.fabric.step();
            for side in 0..self.sides.len() {
                let ours = &self.sides[side];
                let room = if ours.has_failed { 0 } else { REQUESTS - ours.outstanding.len() };
                let burst = if self.posted < writes { self.rng.below(room.min(16) + 1) } else { 0 };
                (0..burst).for_each(|_| self.post(side));
            }
            for device in 0..self.devices.len() {
                let count = self.devices[device].provider.poll(&mut taken);
                taken[..count].iter().for_each(|completion| self.completed(device, completion));
                while self.devices[device].provider.event().is_some() {}
            }
            (0..self.sides.len()).step_by(2).for_each(|first| self.mend(first));
            if self.posted >= writes && self.fabric.is_quiet() && !self.sides.iter().any(|s| s.has_failed) {
                return self.guards_are_untouched();
            }
        }
    }
}

impl Side {
    fn new(device: usize, queue: QueueId, peer: usize) -> Side {
        Side {
            device,
            queue,
            peer,
            next_seq: 1,
            outstanding: VecDeque::new(),
            unannounced: VecDeque::new(),
            arrivals: VecDeque::new(),
            newest: vec![0; WINDOW_BYTES / 8],
            next_receive: 0,
            next_arrival: 0,
            has_failed: false,
        }
    }
}

fn writes() -> u64 {
    std::env::var("ANTELOG_EMULATED_WRITES")
        .map_or(200_000, |n| n.parse().expect("ANTELOG_EMULATED_WRITES is a number"))
}

#[test]
fn what_completed_is_there_and_nothing_else_changes() {
    for (seed, devices, queues_per_pair) in [(1, 2, 4), (2, 3, 2), (3, 4, 3), (4, 4, 1)] {
        let behaviour = Behaviour { step_on_poll: false, loss: 2000, ..Behaviour::default() };
        let mut model = Model::new(seed, devices, queues_per_pair, behaviour);
        model.run(writes() / 4);
        assert_eq!((model.flushed, model.reconnected), (0, 0));
        // What was not covered by a completion when everything came to rest: the unsignalled requests at the end.
        let left: usize = model.sides.iter().map(|s| s.outstanding.len()).sum();
        assert!(left < model.sides.len() * REQUESTS);
        println!("{} posted, {} checked, {} announced", model.posted, model.checked, model.announced);
        assert!(model.posted - model.checked <= left as u64, "every write a completion covered was checked");
        assert!(model.announced * 10 > model.posted * 9);
    }
}

#[test]
fn queues_that_fail_take_nothing_but_their_own_traffic_along() {
    let behaviour = Behaviour { step_on_poll: false, loss: 100, queue_failure: 2000, ..Behaviour::default() };
    let mut model = Model::new(5, 3, 2, behaviour);
    model.run(writes() / 4);
    println!("{} posted, {} checked, {} reconnected", model.posted, model.checked, model.reconnected);
    assert!(model.reconnected > 10 && model.flushed > 100, "{} {}", model.reconnected, model.flushed);
    assert!(model.checked * 2 > model.posted);
}

#[test]
fn equal_seeds_give_equal_runs() {
    let run = |seed| {
        let behaviour = Behaviour { step_on_poll: false, loss: 100, queue_failure: 500, ..Behaviour::default() };
        let mut model = Model::new(seed, 3, 1, behaviour);
        model.run(5_000);
        (model.fabric.now_ns(), model.posted, model.checked, model.flushed, model.reconnected)
    };
    assert_eq!(run(9), run(9));
    assert_ne!(run(9), run(10));
}
