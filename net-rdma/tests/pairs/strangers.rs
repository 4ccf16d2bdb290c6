//! Peers that keep to no rules: a carrier and a device in the test's own hands at the other end.

use antelog_core::transport::{DownReason, Event, Transport};
use antelog_net_rdma::emulated::{Behaviour, Emulated, Fabric, Grant};
use antelog_net_rdma::provider::{
    Access, Completion, Done, End, Failure, Local, MemoryId, Operation, Patience, PortAddress, Provider, QueueId,
    Receive, Request,
};
use antelog_net_tcp::TcpTransport;

use super::common::Pairs;
use super::*;

const QUEUE: QueueId = QueueId(0);
const PATIENCE: Patience = Patience { ack_timeout: 14, retries: 7 };
const READY: &[u8] = &[2];

/// The other end.
struct Stranger {
    carrier: TcpTransport,
    device: Emulated,
    memory: MemoryId,
    number: u32,
    heard: Vec<Vec<u8>>,
    completions: Vec<Completion>,
}

impl Stranger {
    fn offer(&self, receives: u32, regions: &[(u64, u64, u32)]) -> Vec<u8> {
        let port = self.device.port();
        let mut bytes = vec![1];
        bytes.extend_from_slice(&port.gid);
        bytes.extend_from_slice(&port.lid.to_le_bytes());
        bytes.extend_from_slice(&port.mtu_bytes.to_le_bytes());
        bytes.push(0);
        bytes.extend_from_slice(&self.number.to_le_bytes());
        bytes.extend_from_slice(&7u32.to_le_bytes());
        bytes.extend_from_slice(&receives.to_le_bytes());
        bytes.extend_from_slice(&(regions.len() as u16).to_le_bytes());
        for (address, len, rkey) in regions {
            bytes.extend_from_slice(&address.to_le_bytes());
            bytes.extend_from_slice(&len.to_le_bytes());
            bytes.extend_from_slice(&rkey.to_le_bytes());
        }
        bytes
    }

    fn say(&mut self, bytes: &[u8]) {
        self.carrier.send(PEER, bytes).unwrap();
    }

    fn poll(&mut self) {
        self.carrier.flush();
        let mut events = [NOTHING; 8];
        let count = self.carrier.poll(&mut events);
        for event in &events[..count] {
            if let Event::Received { message, .. } = *event {
                self.heard.push(self.carrier.message(message).to_vec());
                self.carrier.release(message);
            }
        }
        let mut taken = [Completion { id: 0, result: Err(Failure::Flushed) }; 16];
        let count = self.device.poll(&mut taken);
        self.completions.extend(&taken[..count]);
    }

    fn post_receive(&mut self, id: u64) {
        let local = Local { memory: self.memory, offset: 0, len: 8192 };
        self.device.post_receives(QUEUE, &[Receive { id, local }]).unwrap();
    }

    fn send(&mut self, imm: Option<u32>, len: usize) {
        let local = Local { memory: self.memory, offset: 0, len };
        let operation = Operation::Send { imm };
        self.device.post(QUEUE, &[Request { id: 99, operation, local, signalled: true, inline: false }]).unwrap();
    }

    fn messages(&self) -> usize {
        let is_message = |done: &&Completion| matches!(done.result, Ok(Done::Received { imm: None, .. }));
        self.completions.iter().filter(is_message).count()
    }

    /// Connects to what `a` offered.
    fn accept(&mut self) {
        let offer = self.heard.iter().find(|heard| heard[0] == 1).expect("an offer");
        let number = |at: usize| u32::from_le_bytes(offer[at..at + 4].try_into().unwrap());
        let gid = offer[1..17].try_into().unwrap();
        let port = PortAddress { gid, lid: 0, mtu_bytes: 4096, is_infiniband: false };
        let end = End { port, number: number(22), psn: number(26) };
        self.device.connect(QUEUE, 7, &end, PATIENCE).unwrap();
    }
}

/// `a` is an ordinary side; the other is not.
fn meet(seed: u64) -> (Side, Stranger) {
    let fabric = Fabric::new(seed, Behaviour::default());
    let mut a = Side::new(&fabric, &Options::default());
    let mut device = fabric.device(Grant::default());
    let memory = device.register(&Region::new(1 << 16).unwrap(), Access::Local).unwrap();
    let (number, _) = device.create(QUEUE, 32, 32).unwrap();
    let (to_b, to_a) = Pairs::new("127.0.0.1:0").link();
    let mut carrier = tcp();
    carrier.admit(PEER, to_a, &[]);
    a.admit(to_b, true);
    let mut stranger = Stranger { carrier, device, memory, number, heard: Vec::new(), completions: Vec::new() };
    until(&mut a, &mut stranger, "a offers", |_, stranger| !stranger.heard.is_empty());
    (a, stranger)
}

fn until(a: &mut Side, b: &mut Stranger, what: &str, mut done: impl FnMut(&mut Side, &mut Stranger) -> bool) {
    for _ in 0..ROUNDS_MAX {
        if done(a, b) {
            return;
        }
        a.transport.flush();
        a.poll();
        b.poll();
    }
    panic!("{what}: not in {ROUNDS_MAX} rounds; {:?}, heard {:?}, {:?}", a.events, b.heard, b.completions);
}

/// Up, with one receive posted beyond the probe's.
fn meet_up(seed: u64) -> (Side, Stranger) {
    let (mut a, mut b) = meet(seed);
    b.accept();
    b.post_receive(0);
    b.post_receive(1);
    // In the wrong order, which does no harm.
    b.say(READY);
    let offer = b.offer(1, &[(u64::MAX - 4096, 4096, 0xBAD)]);
    b.say(&offer);
    until(&mut a, &mut b, "a is ready", |_, b| b.heard.iter().any(|heard| heard == READY));
    b.send(Some(0), 0);
    until(&mut a, &mut b, "a is up", |a, _| a.is_up());
    (a, b)
}

/// Whatever is said, and however often: one end, nothing of it reaches the owner as a message, and one line says why.
#[test]
fn nonsense_ends_the_connection_once() {
    let texts: [&[&[u8]]; 5] = [
        &[b"\xFFwhat", b"\xFFever"],
        &[&[], &[9]],
        &[b"\x03no memory", b"\x03no memory"],
        &[&[4], &[4], b"\x03"],
        &[b"\x03two\nlines"],
    ];
    for (seed, texts) in texts.iter().enumerate() {
        for up in [false, true] {
            let (mut a, mut b) = if up { meet_up(seed as u64) } else { meet(seed as u64) };
            texts.iter().for_each(|text| b.say(text));
            until(&mut a, &mut b, "a ends it", |a, _| !a.downs().is_empty());
            for _ in 0..2000 {
                a.poll();
                b.poll();
            }
            assert_eq!((a.events.len(), a.downs().len()), (1, 1), "{texts:?}: {:?}", a.events);
            assert!(a.said().iter().all(|line| !line.contains('\n')));
        }
    }
}

#[test]
fn a_second_offer_breaks_the_rules() {
    for up in [false, true] {
        let (mut a, mut b) = if up { meet_up(5) } else { meet(5) };
        let offer = b.offer(1, &[]);
        b.say(&offer);
        b.say(&offer);
        until(&mut a, &mut b, "a ends it", |a, _| !a.downs().is_empty());
        assert_eq!(a.downs(), [DownReason::Protocol]);
        assert_eq!(a.health.avoided(HOST).as_deref(), Some("the peer's second offer on one connection"));
    }
}

/// A single receive is honoured: the second message waits for the credit.
#[test]
fn one_receive_is_one_message() {
    let (mut a, mut b) = meet_up(6);
    for round in 0..20 {
        assert_eq!(a.transport.send(PEER, b"x"), Ok(()), "round {round}");
        assert_eq!(a.transport.send(PEER, b"y"), Err(Full));
        until(&mut a, &mut b, "it arrives", |_, b| b.messages() == round + 1);
        b.post_receive(2);
        b.send(Some(round as u32 + 1), 0);
        until(&mut a, &mut b, "there is credit again", |a, _| a.write(1, Some(1), None).is_ok());
        // The write goes nowhere that exists only if it is handed over: it is not, the pair is torn down below.
        if round == 0 {
            break;
        }
    }
}

/// Credit for what was never sent.
#[test]
fn invented_credit_breaks_the_rules() {
    let (mut a, mut b) = meet_up(7);
    b.send(Some(1), 0);
    until(&mut a, &mut b, "a ends it", |a, _| !a.downs().is_empty());
    assert_eq!(a.downs(), [DownReason::Protocol]);
}

/// A region the stranger made up: its device refuses, and that is the end.
#[test]
fn writes_to_an_invented_region_end_the_pair() {
    let (mut a, mut b) = meet_up(8);
    a.write(4096, None, Some(1)).unwrap();
    until(&mut a, &mut b, "a ends it", |a, _| !a.downs().is_empty());
    assert_eq!(a.events, [Event::PeerDown { peer: PEER, reason: DownReason::Protocol }]);
}
