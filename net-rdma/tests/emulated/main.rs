//! What the emulated fabric does, one behaviour a test: each is something a real device may do.

mod failures;

use std::sync::Arc;

use antelog_core::mem::Region;
use antelog_net_rdma::emulated::{Behaviour, Emulated, Fabric, Grant};
use antelog_net_rdma::provider::{
    Access, Completion, Done, End, Failure, Limits, Local, MemoryId, Operation, Patience, Provider, QueueId, Receive,
    Request,
};

const BYTES: usize = 8192;
const PATIENCE: Patience = Patience { ack_timeout: 2, retries: 3 };
/// 4.096 µs · 2^2.
const TIMEOUT_NS: u64 = 16_384;
const Q: QueueId = QueueId(0);

/// A device with one memory that peers may write and one they may not.
struct Node {
    provider: Emulated,
    open: (MemoryId, Arc<Region>),
    closed: (MemoryId, Arc<Region>),
}

/// Everything moves at its first chance, in one piece.
fn calm() -> Behaviour {
    Behaviour { step_on_poll: false, pieces_max: 1, pieces_per_step_max: 64, ack_in: 1, completion_in: 1, ..slow() }
}

fn slow() -> Behaviour {
    Behaviour { step_on_poll: false, ..Behaviour::default() }
}

impl Node {
    fn new(fabric: &Fabric, grant: Grant) -> Node {
        let mut provider = fabric.device(grant);
        let mut register = |access| {
            let region = Region::new(BYTES).unwrap();
            (provider.register(&region, access).unwrap(), region)
        };
        let (open, closed) = (register(Access::RemoteWrite), register(Access::Local));
        Node { provider, open, closed }
    }

    fn end(&mut self, queue: QueueId, psn: u32) -> End {
        let (number, _) = self.provider.create(queue, 16, 4).unwrap();
        End { port: self.provider.port(), number, psn }
    }

    /// A write from the start of the closed memory to `to` in the peer's open memory.
    fn write(&self, peer: &Node, id: u64, to: usize, len: usize) -> Request {
        let remote = peer.provider.remote(peer.open.0);
        let operation = Operation::Write { address: remote.address + to as u64, rkey: remote.rkey, imm: None };
        let local = Local { memory: self.closed.0, offset: 0, len };
        Request { id, operation, local, signalled: true, inline: false }
    }

    fn send(&self, id: u64, len: usize) -> Request {
        let local = Local { memory: self.closed.0, offset: 0, len };
        Request { id, operation: Operation::Send { imm: None }, local, signalled: true, inline: false }
    }

    fn receive(&mut self, id: u64, len: usize) {
        let local = Local { memory: self.closed.0, offset: 4096, len };
        self.provider.post_receives(Q, &[Receive { id, local }]).unwrap();
    }

    fn poll(&mut self) -> Vec<(u64, Result<Done, Failure>)> {
        let mut out = [Completion { id: 0, result: Ok(Done::Request) }; 8];
        let mut all = Vec::new();
        loop {
            let count = self.provider.poll(&mut out);
            all.extend(out[..count].iter().map(|c| (c.id, c.result)));
            if count < out.len() {
                return all;
            }
        }
    }
}

fn patterned(region: &Region, len: usize) -> Vec<u8> {
    let bytes: Vec<u8> = (0..len).map(|n| (n % 251) as u8 + 1).collect();
    region.put(0, &bytes);
    bytes
}

fn bytes(region: &Region, at: usize, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    region.get(at, &mut out);
    out
}

fn connect(a: &mut Node, b: &mut Node, queue: QueueId) {
    let (at_a, at_b) = (a.end(queue, 77), b.end(queue, 99));
    a.provider.connect(queue, 77, &at_b, PATIENCE).unwrap();
    b.provider.connect(queue, 99, &at_a, PATIENCE).unwrap();
}

/// Two nodes, connected by queue 0.
fn pair(seed: u64, behaviour: Behaviour) -> (Fabric, Node, Node) {
    let fabric = Fabric::new(seed, behaviour);
    let (mut a, mut b) = (Node::new(&fabric, Grant::default()), Node::new(&fabric, Grant::default()));
    connect(&mut a, &mut b, Q);
    (fabric, a, b)
}

fn steps(fabric: &Fabric, count: usize) {
    (0..count).for_each(|_| fabric.step());
}

/// Far enough for every retry of [`PATIENCE`].
fn wait_out(fabric: &Fabric) {
    for _ in 0..10 {
        fabric.advance(4 * TIMEOUT_NS);
        steps(fabric, 20);
    }
}

const OK: Result<Done, Failure> = Ok(Done::Request);

#[test]
fn a_write_lands_in_pieces_in_any_order_and_tears_no_word() {
    let mut partial = 0;
    let mut later_first = 0;
    for seed in 0..50 {
        let (fabric, mut a, b) = pair(seed, Behaviour { pieces_per_step_max: 2, ..slow() });
        let sent = patterned(&a.closed.1, 1001);
        a.provider.post(Q, &[a.write(&b, 5, 3, 1001)]).unwrap();
        while a.poll().is_empty() {
            let now = bytes(&b.open.1, 0, 1008);
            // The last, incomplete word is there or not, too.
            let words: Vec<bool> = (0..126).map(|w| now[(w * 8 + 3).min(1003)] != 0).collect();
            for (n, byte) in now.iter().enumerate() {
                let wanted = if (3..1004).contains(&n) && words[n / 8] { sent[n - 3] } else { 0 };
                assert_eq!(*byte, wanted, "byte {n} of a word that is torn");
            }
            let there = words.iter().filter(|&&w| w).count();
            partial += usize::from(there > 0 && there < 126);
            later_first += usize::from(!words[0] && there > 0);
            fabric.step();
        }
        assert_eq!(bytes(&b.open.1, 3, 1001), sent);
        assert_eq!(bytes(&b.open.1, 1004, BYTES - 1004), vec![0; BYTES - 1004]);
    }
    assert!(partial > 100 && later_first > 50, "{partial} {later_first}");
}

#[test]
fn writes_of_one_queue_land_in_order() {
    for seed in 0..20 {
        let (fabric, mut a, b) = pair(seed, slow());
        patterned(&a.closed.1, 64);
        for n in 0..16 {
            a.provider.post(Q, &[a.write(&b, n, n as usize * 64, 64)]).unwrap();
        }
        for _ in 0..100 {
            fabric.step();
            let there: Vec<usize> =
                (0..16).map(|n| bytes(&b.open.1, n * 64, 64).iter().filter(|&&b| b != 0).count()).collect();
            let first_incomplete = there.iter().position(|&n| n < 64).unwrap_or(15);
            assert!(there[first_incomplete + 1..].iter().all(|&n| n == 0), "{there:?}");
        }
        let ids: Vec<u64> = a.poll().iter().map(|c| c.0).collect();
        assert_eq!(ids, (0..16).collect::<Vec<_>>());
    }
}

#[test]
fn completions_of_two_queues_overtake_each_other() {
    let mut overtaken = 0;
    for seed in 0..50 {
        let (fabric, mut a, mut b) = pair(seed, slow());
        connect(&mut a, &mut b, QueueId(1));
        a.provider.post(Q, &[a.write(&b, 1, 0, 8)]).unwrap();
        a.provider.post(QueueId(1), &[a.write(&b, 2, 8, 8)]).unwrap();
        steps(&fabric, 100);
        let ids: Vec<u64> = a.poll().iter().map(|c| c.0).collect();
        assert!(ids == [1, 2] || ids == [2, 1], "{ids:?}");
        overtaken += usize::from(ids == [2, 1]);
    }
    assert!((10..40).contains(&overtaken), "{overtaken}");
}

#[test]
fn unsignalled_requests_complete_with_the_next_signalled_one() {
    let (fabric, mut a, b) = pair(1, calm());
    patterned(&a.closed.1, 8);
    for n in 0..5 {
        let request = a.write(&b, n, n as usize * 8, 8);
        a.provider.post(Q, &[Request { signalled: n == 3, ..request }]).unwrap();
    }
    steps(&fabric, 20);
    assert_eq!(a.poll(), [(3, OK)]);
    assert_eq!(bytes(&b.open.1, 32, 8), [1, 2, 3, 4, 5, 6, 7, 8]);
    // 4 is done too, but says so only when it fails; and it did not.
    a.provider.fail(Q);
    steps(&fabric, 20);
    assert_eq!(a.poll(), []);
}

#[test]
#[should_panic(expected = "more than 16 requests without a polled completion that covers them")]
fn who_never_signals_runs_full() {
    let (fabric, mut a, b) = pair(1, calm());
    for n in 0..17 {
        let request = a.write(&b, n, 0, 8);
        a.provider.post(Q, &[Request { signalled: false, ..request }]).unwrap();
        steps(&fabric, 10);
    }
}

#[test]
#[should_panic(expected = "more than 16 requests without a polled completion that covers them")]
fn a_completion_frees_slots_only_when_polled() {
    let (fabric, mut a, b) = pair(1, calm());
    for n in 0..16 {
        a.provider.post(Q, &[a.write(&b, n, 0, 8)]).unwrap();
    }
    steps(&fabric, 50);
    assert_eq!(a.poll().len(), 16);
    for n in 0..17 {
        a.provider.post(Q, &[a.write(&b, n, 0, 8)]).unwrap();
        steps(&fabric, 50);
    }
}

#[test]
#[should_panic(expected = "more than 4 receives without a polled completion")]
fn too_many_receives() {
    let (_fabric, mut a, _b) = pair(1, calm());
    (0..5).for_each(|n| a.receive(n, 8));
}

#[test]
#[should_panic(expected = "the completion queue of 3 entries overran")]
fn the_completion_queue_overruns() {
    let fabric = Fabric::new(1, calm());
    let limits = Limits { completions: 3, ..Grant::default().limits };
    let mut a = Node::new(&fabric, Grant { limits, ..Grant::default() });
    let mut b = Node::new(&fabric, Grant::default());
    connect(&mut a, &mut b, Q);
    for n in 0..4 {
        a.provider.post(Q, &[a.write(&b, n, 0, 8)]).unwrap();
    }
    steps(&fabric, 50);
}

#[test]
fn sends_use_receives_up_in_order_and_wait_for_them() {
    let (fabric, mut a, mut b) = pair(3, calm());
    let sent = patterned(&a.closed.1, 100);
    a.provider.post(Q, &[a.send(1, 100)]).unwrap();
    let write = a.write(&b, 2, 0, 8);
    let Operation::Write { address, rkey, .. } = write.operation else { unreachable!() };
    a.provider.post(Q, &[Request { operation: Operation::Write { address, rkey, imm: Some(7) }, ..write }]).unwrap();
    // Longer than any patience: a receiver that is not ready holds up for ever.
    wait_out(&fabric);
    assert_eq!((a.poll(), b.poll()), (vec![], vec![]));
    b.receive(10, 128);
    steps(&fabric, 50);
    assert_eq!(a.poll(), [(1, OK)]);
    assert_eq!(b.poll(), [(10, Ok(Done::Received { len: 100, imm: None }))]);
    assert_eq!(bytes(&b.closed.1, 4096, 128), [&sent[..], &[0; 28]].concat());
    b.receive(11, 0);
    steps(&fabric, 50);
    assert_eq!(a.poll(), [(2, OK)]);
    assert_eq!(b.poll(), [(11, Ok(Done::Notified { imm: 7 }))]);
    assert_eq!(bytes(&b.open.1, 0, 9), [1, 2, 3, 4, 5, 6, 7, 8, 0]);
}

#[test]
fn nothing_to_write_and_nothing_to_send_work() {
    let (fabric, mut a, mut b) = pair(4, slow());
    b.receive(10, 0);
    a.provider.post(Q, &[a.write(&b, 1, BYTES, 0), a.send(2, 0)]).unwrap();
    steps(&fabric, 100);
    assert_eq!(a.poll(), [(1, OK), (2, OK)]);
    assert_eq!(b.poll(), [(10, Ok(Done::Received { len: 0, imm: None }))]);
}

#[test]
fn a_message_longer_than_its_receive_fails_both() {
    let (fabric, mut a, mut b) = pair(4, slow());
    patterned(&a.closed.1, 9);
    b.receive(10, 8);
    b.receive(11, 8);
    a.provider.post(Q, &[a.send(1, 9)]).unwrap();
    steps(&fabric, 100);
    assert_eq!(a.poll(), [(1, Err(Failure::Refused))]);
    assert_eq!(b.poll(), [(10, Err(Failure::Other(1))), (11, Err(Failure::Flushed))]);
    assert_eq!(bytes(&b.closed.1, 4096, 9), [0; 9]);
}

#[test]
fn writes_that_are_not_allowed_are_refused_and_end_both_queues() {
    type Spoil = fn(&mut Request, &Node);
    let spoils: [Spoil; 4] = [
        |r, b| r.operation = Operation::Write { address: b.provider.remote(b.open.0).address, rkey: 1, imm: None },
        |r, b| {
            let closed = b.provider.remote(b.closed.0);
            r.operation = Operation::Write { address: closed.address, rkey: closed.rkey, imm: None };
        },
        |r, b| {
            let open = b.provider.remote(b.open.0);
            r.operation = Operation::Write { address: open.address + open.len - 7, rkey: open.rkey, imm: None };
        },
        |r, b| {
            let open = b.provider.remote(b.open.0);
            r.operation = Operation::Write { address: u64::MAX - 3, rkey: open.rkey, imm: None };
        },
    ];
    for spoil in spoils {
        let (fabric, mut a, mut b) = pair(5, slow());
        patterned(&a.closed.1, 8);
        b.receive(10, 8);
        let good = Request { signalled: false, ..a.write(&b, 1, 64, 8) };
        let mut bad = Request { signalled: false, ..a.write(&b, 2, 0, 8) };
        spoil(&mut bad, &b);
        a.provider.post(Q, &[good, bad, a.write(&b, 3, 128, 8)]).unwrap();
        steps(&fabric, 100);
        assert_eq!(a.poll(), [(2, Err(Failure::Refused)), (3, Err(Failure::Flushed))]);
        assert_eq!(b.poll(), [(10, Err(Failure::Flushed))]);
        let landed: Vec<usize> = (0..BYTES).filter(|&n| bytes(&b.open.1, n, 1) != [0]).collect();
        assert_eq!(landed, (64..72).collect::<Vec<_>>(), "only the write before");
        assert!(bytes(&b.closed.1, 0, BYTES).iter().all(|&b| b == 0));
        // The queues are of no use any more: everything comes back at once.
        a.provider.post(Q, &[Request { signalled: false, ..a.write(&b, 4, 0, 8) }]).unwrap();
        b.receive(12, 8);
        steps(&fabric, 100);
        assert_eq!(a.poll(), [(4, Err(Failure::Flushed))]);
        assert_eq!(b.poll(), [(12, Err(Failure::Flushed))]);
    }
}

#[test]
fn lost_messages_arrive_later_and_patience_ends() {
    let (mut arrived, mut gave_up) = (0, 0);
    for seed in 0..40 {
        let (fabric, mut a, b) = pair(seed, Behaviour { loss: 2, ..slow() });
        let sent = patterned(&a.closed.1, 64);
        a.provider.post(Q, &[a.write(&b, 1, 0, 64)]).unwrap();
        wait_out(&fabric);
        let done = a.poll();
        match done[..] {
            [(1, Ok(Done::Request))] => {
                assert_eq!(bytes(&b.open.1, 0, 64), sent);
                arrived += 1;
            }
            [(1, Err(Failure::Unreachable))] => gave_up += 1,
            _ => panic!("{done:?}"),
        }
    }
    assert!(arrived > 20 && gave_up > 0, "{arrived} {gave_up}");
}

#[test]
fn a_silent_peer_is_unreachable_after_the_patience_and_not_before() {
    let (fabric, mut a, mut b) = pair(6, calm());
    b.provider.destroy(Q);
    a.receive(10, 8);
    a.provider.post(Q, &[a.write(&b, 1, 0, 8), Request { signalled: false, ..a.write(&b, 2, 0, 8) }]).unwrap();
    let waits = u64::from(PATIENCE.retries) + 1;
    while fabric.now_ns() < waits * TIMEOUT_NS {
        fabric.step();
        assert_eq!(a.poll(), []);
    }
    while fabric.now_ns() < 4 * waits * TIMEOUT_NS + 10_000 {
        fabric.step();
    }
    let mut done = a.poll();
    done.sort_by_key(|c| c.0);
    assert_eq!(done, [(1, Err(Failure::Unreachable)), (2, Err(Failure::Flushed)), (10, Err(Failure::Flushed))]);
}

#[test]
fn both_ends_have_to_mean_each_other() {
    for wrong_psn in [false, true] {
        let fabric = Fabric::new(7, calm());
        let (mut a, mut b) = (Node::new(&fabric, Grant::default()), Node::new(&fabric, Grant::default()));
        let (at_a, at_b) = (a.end(Q, 77), b.end(Q, 99));
        a.provider.connect(Q, 77, &at_b, PATIENCE).unwrap();
        patterned(&a.closed.1, 8);
        a.provider.post(Q, &[a.write(&b, 1, 0, 8)]).unwrap();
        steps(&fabric, 10);
        assert_eq!(bytes(&b.open.1, 0, 8), [0; 8], "the peer is not connected yet");
        let expected = if wrong_psn { End { psn: 78, ..at_a } } else { at_a };
        b.provider.connect(Q, 99, &expected, PATIENCE).unwrap();
        wait_out(&fabric);
        let result = if wrong_psn { Err(Failure::Unreachable) } else { OK };
        assert_eq!(a.poll(), [(1, result)]);
        assert_eq!(b.provider.connect(Q, 99, &at_a, PATIENCE).unwrap_err().errno, 22, "connected already");
    }
}

#[test]
fn bytes_are_fetched_late_unless_taken_along() {
    let mut late = 0;
    for seed in 0..20 {
        let (fabric, mut a, b) = pair(seed, Behaviour { watch_sources: false, pieces_per_step_max: 1, ..slow() });
        a.closed.1.put(0, &[1; 64]);
        a.provider.post(Q, &[a.write(&b, 1, 0, 64), Request { inline: true, ..a.write(&b, 2, 64, 64) }]).unwrap();
        fabric.step();
        a.closed.1.put(0, &[2; 64]);
        steps(&fabric, 100);
        late += usize::from(bytes(&b.open.1, 0, 64).contains(&2));
        assert_eq!(bytes(&b.open.1, 64, 64), [1; 64]);
    }
    assert!(late > 5, "{late}");
}

#[test]
#[should_panic(expected = "the source of request 0x1 changed before a completion that covers it was polled")]
fn a_source_that_changes_too_early_is_noticed() {
    let (fabric, mut a, b) = pair(1, calm());
    a.provider.post(Q, &[Request { signalled: false, ..a.write(&b, 1, 0, 64) }, a.write(&b, 2, 0, 0)]).unwrap();
    steps(&fabric, 50);
    a.closed.1.put(63, &[1]);
    a.poll();
}

#[test]
#[should_panic(expected = "65 bytes inline")]
fn too_much_to_take_along() {
    let (_fabric, mut a, b) = pair(1, calm());
    a.provider.post(Q, &[Request { inline: true, ..a.write(&b, 1, 0, 65) }]).unwrap();
}

#[test]
#[should_panic(expected = "range 8185+8 lies outside MemoryId(1) of 8192 bytes")]
fn a_source_outside_registered_memory() {
    let (_fabric, mut a, b) = pair(1, calm());
    let mut request = a.write(&b, 1, 0, 8);
    request.local.offset = BYTES - 7;
    a.provider.post(Q, &[request]).unwrap();
}
