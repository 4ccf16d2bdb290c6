//! What the steady state costs: no allocations, few doorbells, fewer completions.
//!
//! The emulated fabric allocates, so here the device is a wire that delivers at once. It panics where a real one would
//! hold the sender up: when a message or notification finds no receive.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;

use antelog_core::counters::Counters;
use antelog_core::mem::Region;
use antelog_core::transport::{Event, LocalRange, PeerId, RegionKey, RemoteOffset, Transport};
use antelog_net_rdma::health::Health;
use antelog_net_rdma::provider::{
    Access, Completion, DeviceEvent, Done, End, Limits, MemoryId, Operation, Patience, PortAddress, Provider,
    ProviderError, QueueId, Receive, RemoteMemory, Request,
};
use antelog_net_rdma::{Link, Options, RdmaTransport};
use antelog_net_tcp::TcpTransport;

#[path = "../../net-tcp/tests/common/mod.rs"]
mod common;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

fn count() {
    // Gone while a thread ends; nothing of ours runs then.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const PEER: PeerId = PeerId(0);
const NOTHING: Event = Event::Placed { peer: PEER, token: 0 };

/// What one end of the wire has.
struct Half {
    memories: Vec<Arc<Region>>,
    receives: VecDeque<Receive>,
    completions: VecDeque<Completion>,
}

/// One end of a wire between two devices with a queue pair each.
struct Wire {
    halves: Rc<RefCell<[Half; 2]>>,
    own: usize,
}

fn wire(options: &Options) -> [Wire; 2] {
    let entries = options.completions(1);
    let half = || Half {
        memories: Vec::new(),
        receives: VecDeque::with_capacity(entries),
        completions: VecDeque::with_capacity(entries),
    };
    let halves = Rc::new(RefCell::new([half(), half()]));
    [0, 1].map(|own| Wire { halves: halves.clone(), own })
}

fn copy(from: &Region, mut at: usize, to: &Region, mut onto: usize, mut left: usize) {
    let mut some = [0; 4096];
    while left > 0 {
        let len = left.min(some.len());
        from.get(at, &mut some[..len]);
        to.put(onto, &some[..len]);
        (at, onto, left) = (at + len, onto + len, left - len);
    }
}

impl Provider for Wire {
    fn limits(&self) -> Limits {
        Limits { message_bytes_max: 1 << 20, completions: 4096, requests_max: 1024 }
    }

    fn port(&self) -> PortAddress {
        PortAddress { gid: [self.own as u8; 16], lid: 0, mtu_bytes: 4096, is_infiniband: false }
    }

    fn register(&mut self, region: &Arc<Region>, _: Access) -> Result<MemoryId, ProviderError> {
        let memories = &mut self.halves.borrow_mut()[self.own].memories;
        memories.push(region.clone());
        Ok(MemoryId(memories.len() as u32 - 1))
    }

    fn remote(&self, memory: MemoryId) -> RemoteMemory {
        let len = self.halves.borrow()[self.own].memories[memory.0 as usize].len() as u64;
        RemoteMemory { address: u64::from(memory.0) << 32, len, rkey: memory.0 }
    }

    fn create(&mut self, _: QueueId, _: usize, _: usize) -> Result<(u32, usize), ProviderError> {
        Ok((self.own as u32, 64))
    }

    fn connect(&mut self, _: QueueId, _: u32, _: &End, _: Patience) -> Result<(), ProviderError> {
        Ok(())
    }

    fn post(&mut self, _: QueueId, requests: &[Request]) -> Result<(), ProviderError> {
        let mut halves = self.halves.borrow_mut();
        for request in requests {
            let [first, second] = &mut *halves;
            let (own, peer) = if self.own == 0 { (first, second) } else { (second, first) };
            let source = &own.memories[request.local.memory.0 as usize];
            let (from, len) = (request.local.offset, request.local.len);
            let mut receive = || peer.receives.pop_front().expect("credits: there is always a receive");
            let told = match request.operation {
                Operation::Write { address, rkey, imm } => {
                    let onto = (address - (u64::from(rkey) << 32)) as usize;
                    copy(source, from, &peer.memories[rkey as usize], onto, len);
                    imm.map(|imm| (receive().id, Done::Notified { imm }))
                }
                Operation::Send { imm } => {
                    let receive = receive();
                    let memory = &peer.memories[receive.local.memory.0 as usize];
                    copy(source, from, memory, receive.local.offset, len);
                    Some((receive.id, Done::Received { len, imm }))
                }
            };
            peer.completions.extend(told.map(|(id, done)| Completion { id, result: Ok(done) }));
            if request.signalled {
                own.completions.push_back(Completion { id: request.id, result: Ok(Done::Request) });
            }
        }
        Ok(())
    }

    fn post_receives(&mut self, _: QueueId, receives: &[Receive]) -> Result<(), ProviderError> {
        self.halves.borrow_mut()[self.own].receives.extend(receives);
        Ok(())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        let ready = &mut self.halves.borrow_mut()[self.own].completions;
        let count = ready.len().min(completions.len());
        completions.iter_mut().zip(ready.drain(..count)).for_each(|(place, completion)| *place = completion);
        count
    }

    fn fail(&mut self, _: QueueId) {}

    /// Its receives are not flushed: nobody waits for them here.
    fn destroy(&mut self, _: QueueId) {}

    fn arm(&mut self) {}

    fn wait_fd(&self) -> Option<RawFd> {
        None
    }

    fn event(&mut self) -> Option<DeviceEvent> {
        None
    }

    fn now_ns(&self) -> u64 {
        0
    }
}

type Side = RdmaTransport<Wire, TcpTransport>;

/// Two sides with 1 MiB to write from and to, up.
fn sides(counters: &[Counters; 2]) -> [Side; 2] {
    let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let pairs = common::Pairs::new("127.0.0.1:0");
    let options = Options::default();
    let mut counters = counters.iter();
    let mut sides = wire(&options).map(|device| {
        let carrier = TcpTransport::new(1, antelog_net_tcp::Options::default()).unwrap();
        let side = RdmaTransport::new(carrier, Some(device), 1, options.clone(), Health::new(Arc::new(|_: &str| {})));
        side.with_counters(counters.next().unwrap())
    });
    let (one, other) = pairs.link();
    for (side, link) in sides.iter_mut().zip([one, other]) {
        let region = Region::new(1 << 20).unwrap();
        side.register(region.clone());
        side.admit(PEER, Link { carrier: link, rdma: Some(host) }, &[region]);
    }
    while !sides.iter().all(|side| side.is_pair(PEER)) {
        sides.iter_mut().for_each(|side| assert_eq!(side.poll(&mut [NOTHING; 8]), 0));
    }
    sides
}

/// A thousand rounds of everything, filling the queues in each tenth.
fn traffic(sides: &mut [Side; 2], token: &mut u64) -> usize {
    let mut events = [NOTHING; 8];
    let mut reported = 0;
    for round in 0..1000 {
        for side in &mut *sides {
            for _ in 0..if round % 10 == 0 { 3000 } else { 1 } {
                *token += 1;
                let remote = RemoteOffset { region: 0, offset: 0 };
                let large = LocalRange { region: RegionKey(0), offset: 0, len: 5000 };
                let small = LocalRange { region: RegionKey(0), offset: 0, len: 50 };
                let _ = side.write(PEER, large, remote, Some(1), Some(*token));
                let _ = side.write(PEER, small, remote, None, None);
                let _ = side.write_inline(PEER, b"inline", remote, Some(2));
                let _ = side.send(PEER, b"message");
            }
            side.flush();
            let _ = side.prepare_wait();
            let count = side.poll(&mut events);
            reported += count;
            for event in &events[..count] {
                match *event {
                    Event::Received { message, .. } => {
                        assert_eq!(side.message(message), b"message");
                        side.release(message);
                    }
                    Event::PeerDown { .. } => panic!("the pair ended"),
                    Event::Placed { .. } | Event::Notified { .. } => {}
                }
            }
        }
    }
    reported
}

#[test]
fn nothing_is_allocated_after_admission() {
    let mut sides = sides(&["one", "other"].map(Counters::new));
    let mut token = 0;
    let before = ALLOCATIONS.get();
    let reported = traffic(&mut sides, &mut token);
    assert_eq!(ALLOCATIONS.get() - before, 0, "the steady state allocated");
    assert!(reported > 3000, "hardly anything happened: {reported} events");
}

/// A batch of sixteen records of 4 KiB, each written with a token, is one doorbell and one completion.
#[test]
fn a_batch_of_records_costs_one_doorbell_and_one_completion() {
    const BATCHES: u64 = 1000;
    const RECORDS: u64 = 16;
    let counters = ["one", "other"].map(Counters::new);
    let mut sides = sides(&counters);
    let value = |name: &str| {
        let found = counters[0].snapshot().into_iter().find(|(known, _)| known == name);
        found.unwrap_or_else(|| panic!("no counter {name}")).1
    };
    let names = ["writes", "requests", "doorbells", "signalled", "completions", "full"];
    let values = || names.map(|name| value(&format!("one.rdma.{name}")));
    let before = values();
    let mut placed = 0;
    for batch in 0..BATCHES {
        for record in 0..RECORDS {
            let local = LocalRange { region: RegionKey(0), offset: record as usize * 4096, len: 4096 };
            let remote = RemoteOffset { region: 0, offset: record as usize * 4096 };
            sides[0].write(PEER, local, remote, None, Some(batch * RECORDS + record + 1)).unwrap();
        }
        sides[0].flush();
        let mut events = [NOTHING; 8];
        let count = sides[0].poll(&mut events);
        for event in &events[..count] {
            let Event::Placed { token, .. } = *event else { panic!("{event:?}") };
            placed = token;
        }
        sides[1].poll(&mut events);
    }
    assert_eq!(placed, BATCHES * RECORDS);
    let mut spent = values();
    spent.iter_mut().zip(before).for_each(|(after, before)| *after -= before);
    assert_eq!(spent, [BATCHES * RECORDS, BATCHES * RECORDS, BATCHES, BATCHES, BATCHES, 0]);
}
