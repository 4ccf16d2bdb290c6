//! The real provider against a peer built on somebody else's verbs crate (`ffi-check/src/peer.rs`).
//!
//! `ANTELOG_TEST_PEER` names the peer's program; without it, or without a device, the test says that it was skipped.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use antelog_core::mem::Region;
use antelog_net_rdma::provider::{
    Access, Completion, Done, End, Failure, Local, Operation, Patience, Provider, QueueId, Receive, Request,
};
use antelog_net_rdma::verbs::Device;

const QUEUE: QueueId = QueueId(0);
/// The sequence number ours starts with; the peer's crate always starts with 0.
const PSN: u32 = 0xFF_FFFF;
const PATIENT: Patience = Patience { ack_timeout: 18, retries: 7 };
/// After so long the test fails rather than hangs.
const HANG: Duration = Duration::from_secs(60);
/// Where answers arrive in our memory.
const ANSWERS: usize = 16384;
/// Where the peer looks for what is written, and for the flag behind it.
const WRITTEN: u64 = 4096 * 8;
const FLAG: u64 = 8191 * 8;

/// Ends the peer with the test.
struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn completion(device: &mut Device) -> Completion {
    let mut completion = [Completion { id: 0, result: Err(Failure::Flushed) }];
    let start = Instant::now();
    while device.poll(&mut completion) == 0 {
        assert!(start.elapsed() < HANG, "no completion came");
        std::thread::yield_now();
    }
    completion[0]
}

/// The next two completions: our request's and the answer's, in either order.
fn answered(device: &mut Device, request: u64, len: usize) {
    let mut both = [completion(device), completion(device)];
    both.sort_by_key(|completion| completion.id);
    let received = Completion { id: 1000 + request, result: Ok(Done::Received { len, imm: None }) };
    assert_eq!(both, [Completion { id: request, result: Ok(Done::Request) }, received]);
}

#[test]
fn an_independent_implementation_understands_ours_and_we_it() {
    let Some(program) = std::env::var_os("ANTELOG_TEST_PEER") else {
        common::skip("ANTELOG_TEST_PEER does not name the peer's program, which net-rdma/ffi-check/run builds");
        return;
    };
    let Some(place) = common::place() else { return };
    let mut device = Device::open(&place, 1, 64).unwrap();
    let region = Region::new(65536).unwrap();
    let memory = device.register(&region, Access::Local).unwrap();
    let (number, inline_bytes) = device.create(QUEUE, 16, 16).unwrap();

    let mut command = Command::new(program);
    command.args([place.device.clone(), place.gid_index.to_string(), PSN.to_string()]);
    let mut peer = Peer(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(peer.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut to_peer = peer.0.stdin.take().unwrap();
    let hello = lines.next().expect("the peer introduces itself");
    let hello: Vec<u64> = hello.split(' ').map(|number| number.parse().unwrap()).collect();
    let [peer_number, address, rkey, len] = hello[..] else { panic!("{hello:?}") };
    assert_eq!(len, 65536);
    let end = End { port: device.port(), number: peer_number as u32, psn: 0 };
    device.connect(QUEUE, PSN, &end, PATIENT).unwrap();
    writeln!(to_peer, "{number}").unwrap();
    assert_eq!(lines.next().as_deref(), Some("ready"));

    let local = |offset, len| Local { memory, offset, len };
    let receive = |id| Receive { id: 1000 + id, local: local(ANSWERS, 4096) };
    let bytes = |len: usize| -> Vec<u8> { (0..len).map(|at| (at * 7 + len) as u8).collect() };
    let arrived = |len| {
        let mut arrived = Vec::new();
        region.append_to(ANSWERS, len, &mut arrived);
        arrived
    };
    // Messages: inline, one packet, and several packets where the path MTU is below 4096.
    for (id, len) in [(0, 8), (1, 1024), (2, 4096)] {
        region.put(0, &bytes(len));
        device.post_receives(QUEUE, &[receive(id)]).unwrap();
        let operation = Operation::Send { imm: None };
        let inline = len <= inline_bytes;
        device.post(QUEUE, &[Request { id, operation, local: local(0, len), signalled: true, inline }]).unwrap();
        answered(&mut device, id, len);
        assert_eq!(arrived(len), bytes(len).into_iter().rev().collect::<Vec<u8>>());
    }
    // Bytes, and a flag behind them that is seen only after them.
    let write = |id, at, imm, local, signalled| {
        let operation = Operation::Write { address: address + at, rkey: rkey as u32, imm };
        Request { id, operation, local, signalled, inline: false }
    };
    region.put(0, &bytes(4096));
    region.store_u64(8192, 1);
    device.post_receives(QUEUE, &[receive(4)]).unwrap();
    let requests = [write(3, WRITTEN, None, local(0, 4096), false), write(4, FLAG, None, local(8192, 8), true)];
    device.post(QUEUE, &requests).unwrap();
    answered(&mut device, 4, 4096);
    assert_eq!(arrived(4096), bytes(4096));
    // A number that comes with a write.
    device.post_receives(QUEUE, &[receive(5)]).unwrap();
    device.post(QUEUE, &[write(5, WRITTEN, Some(0x00C0_FFEE), local(0, 8), true)]).unwrap();
    answered(&mut device, 5, 8);
    assert_eq!(region.load_u64(ANSWERS), 0x00C0_FFEE);
    writeln!(to_peer, "bye").unwrap();
    assert!(peer.0.wait().unwrap().success());
}
