//! The ring against a network that delays, refuses and lies.

use std::collections::VecDeque;

use super::*;
use crate::channel::CAPACITY_BYTES_MIN;
use crate::transport::{Event, MessageHandle};

const PEER: PeerId = PeerId(0);
const CAPACITY: usize = CAPACITY_BYTES_MIN;

struct Xorshift(u64);

impl Xorshift {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 11) % bound
    }
}

enum Op {
    Write(LocalRange, usize),
    Inline(Vec<u8>, usize),
}

/// A transport that writes into one remote region. Queued operations read their local bytes as late as possible, so a
/// sender that rewrites bytes too early is caught.
struct Fake {
    local: Arc<Region>,
    remote: Arc<Region>,
    queue: VecDeque<Op>,
    queued: bool,
    rng: Xorshift,
    /// Refuses this many of 16 operations.
    refuse: u64,
    accepted: usize,
    notified: usize,
}

impl Fake {
    fn refuses(&mut self) -> bool {
        let refused = self.rng.below(16) < self.refuse;
        self.accepted += usize::from(!refused);
        refused
    }

    fn deliver(&mut self, most: usize) {
        for _ in 0..most {
            match self.queue.pop_front() {
                Some(Op::Write(local, to)) => self.remote.put_from(to, &self.local, local.offset, local.len),
                Some(Op::Inline(bytes, to)) => {
                    self.remote.store_u64(to, u64::from_ne_bytes(bytes.try_into().unwrap()));
                }
                None => return,
            }
        }
    }

    fn issue(&mut self, op: Op, notify: Option<u32>) -> Result<(), Full> {
        if self.refuses() {
            return Err(Full);
        }
        self.notified += usize::from(notify.is_some());
        self.queue.push_back(op);
        if !self.queued {
            self.deliver(usize::MAX);
        }
        Ok(())
    }
}

impl Transport for Fake {
    type Link = ();

    fn register(&mut self, _: Arc<Region>) -> RegionKey {
        RegionKey(3)
    }

    fn admit(&mut self, _: PeerId, (): (), _: &[Arc<Region>]) {}

    fn write(
        &mut self,
        to: PeerId,
        local: LocalRange,
        remote: RemoteOffset,
        notify: Option<u32>,
        token: Option<u64>,
    ) -> Result<(), Full> {
        assert_eq!((to, local.region, remote.region, token), (PEER, RegionKey(3), 7, None));
        self.issue(Op::Write(local, remote.offset), notify)
    }

    fn write_inline(
        &mut self,
        to: PeerId,
        bytes: &[u8],
        remote: RemoteOffset,
        notify: Option<u32>,
    ) -> Result<(), Full> {
        assert_eq!((to, remote.region, bytes.len()), (PEER, 7, 8));
        self.issue(Op::Inline(bytes.to_vec(), remote.offset), notify)
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

    fn wait_fds(&self, _: &mut Vec<std::os::fd::RawFd>) {}

    fn prepare_wait(&mut self) -> bool {
        false
    }
}

struct Side {
    ring: Ring,
    net: Fake,
}

/// Two sides; the first sends through `there` bytes, the second through `back` bytes.
fn pair(there: usize, back: usize, seed: u64, refuse: u64, queued: bool) -> (Side, Side) {
    let region = |len| Region::new(len).unwrap();
    let (in_a, in_b) = (region(Ring::region_bytes(back)), region(Ring::region_bytes(there)));
    let side = |incoming: &Arc<Region>, remote: &Arc<Region>, capacity_in, capacity_out, seed| {
        let local = region(capacity_out);
        let ring = Ring::new(incoming.clone(), local.clone(), RegionKey(3), capacity_in, capacity_out);
        let net = Fake {
            local,
            remote: remote.clone(),
            queue: VecDeque::new(),
            queued,
            rng: Xorshift(seed | 1),
            refuse,
            accepted: 0,
            notified: 0,
        };
        Side { ring: ring.with_remote_region(7), net }
    };
    (side(&in_a, &in_b, back, there, seed), side(&in_b, &in_a, there, back, seed.wrapping_mul(77)))
}

/// The body of message number `number`: it tells its number, and every byte is predictable.
fn body(number: u64, len: usize) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend((8..len).map(|i| (number as usize * 31 + i * 7) as u8));
    bytes
}

/// Sends `count` messages of random size both ways at once and checks that each arrives once, in order, unharmed.
fn exchange(seed: u64, refuse: u64, queued: bool, count: u64) {
    let mut rng = Xorshift(seed.wrapping_mul(0x2545_F491_4F6C_DD1D) | 1);
    let (mut a, mut b) = pair(CAPACITY, 2 * CAPACITY, seed, refuse, queued);
    let source = Region::new(2 * CAPACITY).unwrap();
    let (mut sent, mut received) = ([0u64; 2], [0u64; 2]);
    let mut steps = 0;
    while received != [count, count] {
        steps += 1;
        assert!(steps < 200 * count + 10_000, "stuck at {sent:?} sent, {received:?} received");
        let (me, side) = if rng.below(2) == 0 { (0, &mut a) } else { (1, &mut b) };
        for _ in 0..rng.below(6) {
            let most = side.ring.message_bytes_max() as u64;
            let most = if rng.below(4) == 0 { most } else { 200 };
            let message = body(sent[me], 8 + rng.below(most - 7) as usize);
            let room = side.ring.room();
            let pushed = if sent[me] == count {
                break;
            } else if rng.below(2) == 0 {
                let cut = rng.below(message.len() as u64) as usize;
                side.ring.push(&[&message[..cut], &[], &message[cut..]])
            } else {
                source.put(5, &message[8..]);
                side.ring.push_from(&message[..8], &source, 5, message.len() - 8)
            };
            assert_eq!(pushed.is_ok(), message.len() <= room, "room {room} is what fits");
            sent[me] += u64::from(pushed.is_ok());
        }
        side.ring.publish(&mut side.net, PEER);
        side.net.deliver(rng.below(4) as usize);
        for _ in 0..rng.below(8) {
            let Some(message) = side.ring.peek().unwrap() else { break };
            assert_eq!(message, body(received[1 - me], message.len()));
            received[1 - me] += 1;
            side.ring.consume();
        }
        side.ring.credit(&mut side.net, PEER);
    }
    assert_eq!((a.ring.peek(), b.ring.peek()), (Ok(None), Ok(None)));
}

#[test]
fn messages_arrive_once_in_order_unharmed() {
    exchange(1, 0, false, 20_000);
}

#[test]
fn a_network_that_delays_and_refuses_changes_nothing() {
    for seed in 1..40 {
        exchange(seed, seed % 12, true, 500);
        exchange(seed, seed % 12, false, 500);
    }
}

#[test]
fn a_stopped_receiver_stops_the_sender_and_loses_nothing() {
    let (mut a, mut b) = pair(CAPACITY, CAPACITY, 5, 0, false);
    let mut sent = 0;
    while a.ring.push(&[&body(sent, 100)]).is_ok() {
        sent += 1;
        assert!(a.ring.publish(&mut a.net, PEER));
    }
    assert_eq!(sent, 4096 / 112);
    assert!(a.ring.room() < 100);
    for number in 0..sent {
        assert_eq!(b.ring.peek().unwrap().unwrap(), body(number, 100));
        b.ring.consume();
        assert!(b.ring.credit(&mut b.net, PEER));
    }
    assert_eq!(b.ring.peek(), Ok(None));
    assert!(a.ring.push(&[&body(0, 100)]).is_ok());
}

#[test]
fn credits_are_few_and_always_enough() {
    let (mut a, mut b) = pair(CAPACITY, CAPACITY, 5, 0, false);
    for number in 0..1000 {
        // 24 bytes a message, each drained at once.
        a.ring.push(&[&body(number, 16)]).unwrap();
        a.ring.publish(&mut a.net, PEER);
        assert!(b.ring.peek().unwrap().is_some());
        b.ring.consume();
        b.ring.credit(&mut b.net, PEER);
        assert!(a.ring.room() >= CAPACITY / 4 - 8, "a drained ring takes any message");
    }
    assert_eq!(b.net.accepted, 1000 * 24 / 528, "one credit per eighth of the ring, rounded up to messages");
    assert_eq!(b.net.notified, b.net.accepted, "the sender may have parked");
    assert!(b.ring.credit_all(&mut b.net, PEER));
    assert_eq!(a.ring.read_credit(), Ok(a.ring.announced));
}

#[test]
fn publishing_nothing_issues_nothing_and_a_batch_is_two_writes() {
    let (mut a, _b) = pair(CAPACITY, CAPACITY, 5, 0, false);
    assert!(a.ring.publish(&mut a.net, PEER));
    assert_eq!(a.net.accepted, 0);
    for number in 0..10 {
        a.ring.push(&[&body(number, 50)]).unwrap();
    }
    assert!(a.ring.unpublished());
    assert!(a.ring.publish(&mut a.net, PEER) && a.ring.publish(&mut a.net, PEER));
    assert!(!a.ring.unpublished());
    assert_eq!((a.net.accepted, a.net.notified), (2, 1), "one data write, one tail write that notifies");
}

#[test]
fn a_refused_tail_is_written_later_without_the_data() {
    let (mut a, mut b) = pair(CAPACITY, CAPACITY, 5, 0, false);
    a.ring.push(&[b"first"]).unwrap();
    // Find a state in which the data write passes and the tail write does not.
    a.net.refuse = 8;
    while a.ring.written == a.ring.announced {
        if a.ring.publish(&mut a.net, PEER) {
            a.ring.push(&[b"again"]).unwrap();
        }
    }
    a.net.refuse = 0;
    let before = a.net.accepted;
    assert!(a.ring.publish(&mut a.net, PEER));
    assert_eq!(a.net.accepted - before, 1);
    let mut last = Vec::new();
    while let Some(message) = b.ring.peek().unwrap() {
        last = message.to_vec();
        b.ring.consume();
    }
    assert!(last == b"first" || last == b"again");
    assert_eq!(b.ring.consumed, a.ring.pushed);
}

#[test]
fn empty_messages_are_messages_and_peek_repeats() {
    let (mut a, mut b) = pair(CAPACITY, CAPACITY, 5, 0, false);
    a.ring.push(&[]).unwrap();
    a.ring.publish(&mut a.net, PEER);
    assert_eq!(b.ring.peek(), Ok(Some(&[][..])));
    assert_eq!(b.ring.peek(), Ok(Some(&[][..])));
    b.ring.consume();
    assert_eq!(b.ring.peek(), Ok(None));
}

#[test]
#[should_panic(expected = "consume follows a peek")]
fn consuming_twice_is_a_bug() {
    let (mut a, mut b) = pair(CAPACITY, CAPACITY, 5, 0, false);
    a.ring.push(&[b"x"]).unwrap();
    a.ring.publish(&mut a.net, PEER);
    b.ring.peek().unwrap();
    b.ring.consume();
    b.ring.consume();
}

#[test]
fn a_reset_on_both_sides_starts_over() {
    let (mut a, mut b) = pair(CAPACITY, CAPACITY, 5, 0, false);
    for round in 0..3 {
        for number in 0..200 {
            a.ring.push(&[&body(number + round, 40)]).unwrap();
            a.ring.publish(&mut a.net, PEER);
            assert_eq!(b.ring.peek().unwrap().unwrap(), body(number + round, 40));
            b.ring.consume();
            b.ring.credit(&mut b.net, PEER);
        }
        a.ring.push(&[b"lost with the connection"]).unwrap();
        a.ring.reset();
        b.ring.reset();
        assert_eq!(b.ring.peek(), Ok(None));
    }
}

#[test]
fn lying_tails_are_errors_for_good() {
    for tail in [u64::MAX, u64::MAX - 7, 4, 4096 + 8, 1 << 40] {
        let (_a, mut b) = pair(CAPACITY, CAPACITY, 5, 0, false);
        b.ring.incoming.store_u64(TAIL_AT, tail);
        assert_eq!(b.ring.peek(), Err(RingError::Tail { tail, reported: 0 }));
        b.ring.incoming.store_u64(TAIL_AT, 0);
        assert!(b.ring.peek().is_err(), "a fault stays until the reset");
        b.ring.reset();
        assert_eq!(b.ring.peek(), Ok(None));
    }
    // Backwards.
    let (mut a, mut b) = pair(CAPACITY, CAPACITY, 5, 0, false);
    a.ring.push(&[b"hello"]).unwrap();
    a.ring.publish(&mut a.net, PEER);
    assert!(b.ring.peek().unwrap().is_some());
    b.ring.consume();
    b.ring.incoming.store_u64(TAIL_AT, 0);
    assert_eq!(b.ring.peek(), Err(RingError::Tail { tail: 0, reported: 0 }));
}

#[test]
fn unwritten_stale_and_overlong_headers_are_errors() {
    let put_header = |at: u64, bytes: [u8; 8], tail: u64| {
        let (_a, b) = pair(CAPACITY, CAPACITY, 5, 0, false);
        b.ring.incoming.put(BYTES_AT + b.ring.layout_in.index(at), &bytes);
        b.ring.incoming.store_u64(TAIL_AT, tail);
        b.ring
    };
    let error = |len| Err(RingError::Header { at: 0, len });
    assert_eq!(put_header(0, [0; 8], 64).peek(), error(0), "zeroes are not an empty message");
    assert_eq!(put_header(0, header(4096, 8), 64).peek(), error(8), "a header of another lap");
    assert_eq!(put_header(0, header(0, 1017), 4096).peek(), error(1017), "longer than a message may be");
    assert_eq!(put_header(0, header(0, 1 << 31), 4096).peek(), error(1 << 31));
    assert_eq!(put_header(0, header(0, 100), 64).peek(), error(100), "beyond the tail");
    assert_eq!(put_header(0, header(0, SKIP), 4096).peek(), error(SKIP), "a skip of a whole lap");
    assert_eq!(put_header(0, header(0, 16), 24).peek(), Ok(Some(&[0; 16][..])));
}

#[test]
fn a_frame_or_skip_across_the_end_is_an_error() {
    let at = 4096 - 16;
    let ring_at = |bytes: [u8; 8], tail: u64| {
        let (_a, mut b) = pair(CAPACITY, CAPACITY, 5, 0, false);
        b.ring.incoming.put(BYTES_AT + at as usize, &bytes);
        b.ring.incoming.store_u64(TAIL_AT, tail);
        (b.ring.tail, b.ring.consumed, b.ring.reported) = (at, at, at);
        b.ring
    };
    assert_eq!(ring_at(header(at, 100), 4096 + 400).peek(), Err(RingError::Header { at, len: 100 }));
    assert_eq!(ring_at(header(at, SKIP), at + 8).peek(), Err(RingError::Header { at, len: SKIP }));
    assert_eq!(ring_at(header(at, SKIP), 4096).peek(), Ok(None), "a skip with nothing behind it yet");
}

#[test]
fn lying_credits_stop_the_sender_and_are_reported() {
    for credit in [8, u64::MAX, 1 << 20] {
        let (mut a, _b) = pair(CAPACITY, CAPACITY, 5, 0, false);
        a.ring.incoming.store_u64(CONSUMED_AT, credit);
        assert_eq!(a.ring.room(), 0);
        // Fill until the sender needs to look at the credit.
        while a.ring.push(&[&[1; 1000]]).is_ok() {}
        assert_eq!(a.ring.fault(), Some(RingError::Credit { credit, announced: 0 }));
        assert!(a.ring.peek().is_err());
    }
}

/// Random bytes over the whole exposed region: an error or a message, never a panic and nothing outside.
#[test]
fn noise_never_panics() {
    let mut rng = Xorshift(0x5EED);
    for _ in 0..3000 {
        let (mut a, mut b) = pair(CAPACITY, CAPACITY, 9, 0, false);
        for number in 0..20 {
            a.ring.push(&[&body(number, 90)]).unwrap();
        }
        a.ring.publish(&mut a.net, PEER);
        for _ in 0..1 + rng.below(8) {
            let noise = rng.next() >> rng.below(64);
            let offset = 8 * rng.below(Ring::region_bytes(CAPACITY) as u64 / 8) as usize;
            let offset = if rng.below(8) == 0 { 64 * rng.below(2) as usize } else { offset };
            b.ring.incoming.store_u64(offset, noise);
        }
        for _ in 0..600 {
            match b.ring.peek() {
                Ok(Some(_)) => b.ring.consume(),
                Ok(None) | Err(_) => break,
            }
        }
        let _ = b.ring.push(&[b"reply"]);
        b.ring.publish(&mut b.net, PEER);
        b.ring.credit(&mut b.net, PEER);
    }
}
