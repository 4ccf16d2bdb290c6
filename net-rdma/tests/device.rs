//! The real provider on a real RDMA stack: two devices in one process, both on the first RoCE v2 port with an IPv4 GID.
//!
//! Where there is no such port every test says that it was skipped. Waits have limits so that a fault ends the test; no
//! outcome depends on how long anything took.

mod common;

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use antelog_core::mem::{Region, sys};
use antelog_net_rdma::provider::{
    Access, Completion, DeviceEvent, Done, End, Failure, Local, MemoryId, Operation, Patience, Provider, ProviderError,
    QueueId, Receive, Request,
};
use antelog_net_rdma::verbs::{Device, Place, REQUESTS_PER_POST};
use common::place;

/// Bytes each node registers for its peer to write.
const MEMORY_BYTES: usize = 64 << 10;
const QUEUE: QueueId = QueueId(0);
const DEPTH: usize = 64;
/// For connections that are to work: 4.096 µs · 2^18 = 1.07 s, seven times.
const PATIENT: Patience = Patience { ack_timeout: 18, retries: 7 };
/// For peers that are not there: 4.096 µs · 2^10 = 4.2 ms, once more.
const IMPATIENT: Patience = Patience { ack_timeout: 10, retries: 1 };
/// After so long a test fails rather than hangs.
const HANG: Duration = Duration::from_secs(60);

/// A device with one piece of memory that its peer may write.
struct Node {
    device: Device,
    memory: MemoryId,
    region: Arc<Region>,
}

impl Node {
    fn new(place: &Place) -> Node {
        let mut device = Device::open(place, 4, 1024).unwrap();
        let region = Region::new(MEMORY_BYTES).unwrap();
        let memory = device.register(&region, Access::RemoteWrite).unwrap();
        Node { device, memory, region }
    }

    fn end(&mut self, psn: u32) -> End {
        let (number, _) = self.device.create(QUEUE, DEPTH, DEPTH).unwrap();
        End { port: self.device.port(), number, psn }
    }

    fn local(&self, offset: usize, len: usize) -> Local {
        Local { memory: self.memory, offset, len }
    }

    fn write(&self, id: u64, peer: &Node, offset: usize, local: Local) -> Request {
        let remote = peer.device.remote(peer.memory);
        let operation = Operation::Write { address: remote.address + offset as u64, rkey: remote.rkey, imm: None };
        Request { id, operation, local, signalled: true, inline: false }
    }

    fn receive(&mut self, id: u64, offset: usize, len: usize) {
        let local = self.local(offset, len);
        self.device.post_receives(QUEUE, &[Receive { id, local }]).unwrap();
    }

    /// The next `count` completions.
    fn completions(&mut self, count: usize) -> Vec<Completion> {
        let none = Completion { id: 0, result: Err(Failure::Flushed) };
        let mut completions = vec![none; count];
        let (mut taken, start) = (0, Instant::now());
        while taken < count {
            taken += self.device.poll(&mut completions[taken..]);
            assert!(start.elapsed() < HANG, "{taken} of {count} completions came: {:?}", &completions[..taken]);
            std::thread::yield_now();
        }
        completions
    }

    fn completion(&mut self) -> Completion {
        self.completions(1)[0]
    }

    fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.region.append_to(offset, len, &mut bytes);
        bytes
    }
}

fn connect(a: &mut Node, b: &mut Node) {
    let (end_a, end_b) = (a.end(0x00_1234), b.end(0xFF_FFFE));
    a.device.connect(QUEUE, end_a.psn, &end_b, PATIENT).unwrap();
    b.device.connect(QUEUE, end_b.psn, &end_a, PATIENT).unwrap();
}

fn nodes() -> Option<(Node, Node)> {
    let place = place()?;
    let (mut a, mut b) = (Node::new(&place), Node::new(&place));
    connect(&mut a, &mut b);
    Some((a, b))
}

fn done(id: u64, done: Done) -> Completion {
    Completion { id, result: Ok(done) }
}

fn failed(id: u64, failure: Failure) -> Completion {
    Completion { id, result: Err(failure) }
}

/// Waits for the descriptor, at most so long.
fn readable(device: &Device, limit: Duration) -> bool {
    sys::ppoll(&mut [sys::readable(device.wait_fd().unwrap())], Some(limit.as_nanos() as u64)).unwrap() == 1
}

#[test]
fn a_flag_written_behind_bytes_is_seen_after_them() {
    let Some((mut a, b)) = nodes() else { return };
    for round in 1..=20u64 {
        a.region.put(0, &[round as u8; 4096]);
        a.region.store_u64(8192, round);
        let bytes = Request { signalled: false, ..a.write(1, &b, 4096, a.local(0, 4096)) };
        let flag = Request { inline: true, ..a.write(round, &b, 16384, a.local(8192, 8)) };
        a.device.post(QUEUE, &[bytes, flag]).unwrap();
        // What went inline was taken along: its source is free again at once.
        a.region.store_u64(8192, u64::MAX);
        let start = Instant::now();
        while b.region.load_u64(16384) != round {
            assert!(start.elapsed() < HANG, "the flag of round {round} did not come");
        }
        assert_eq!(b.bytes(4096, 4096), [round as u8; 4096]);
        assert_eq!(a.completion(), done(round, Done::Request));
    }
}

#[test]
fn a_write_with_a_hint_uses_a_receive_up() {
    let Some((mut a, mut b)) = nodes() else { return };
    b.receive(70, 0, 64);
    b.receive(71, 0, 0);
    a.region.put(0, b"antelog");
    for (id, imm) in [(5, 0x0102_0304), (6, u32::MAX)] {
        let mut request = a.write(id, &b, 1024 * id as usize, a.local(0, 7));
        if let Operation::Write { imm: hint, .. } = &mut request.operation {
            *hint = Some(imm);
        }
        a.device.post(QUEUE, &[request]).unwrap();
        assert_eq!(b.completion(), done(65 + id, Done::Notified { imm }));
        assert_eq!(b.bytes(1024 * id as usize, 7), b"antelog");
        assert_eq!(a.completion(), done(id, Done::Request));
    }
    assert_eq!(b.bytes(0, 64), [0; 64], "the receive's buffer is untouched");
}

#[test]
fn messages_arrive_in_receives_with_and_without_a_number() {
    let Some((mut a, mut b)) = nodes() else { return };
    let send = |a: &Node, id, len, imm, inline| Request {
        id,
        operation: Operation::Send { imm },
        local: a.local(0, len),
        signalled: true,
        inline,
    };
    for id in 0..4 {
        b.receive(id, 4096 * id as usize, 4096);
    }
    a.region.put(0, &[7; 4096]);
    let requests = [
        send(&a, 10, 4096, None, false),
        send(&a, 11, 3, Some(0xDEAD_BEEF), true),
        send(&a, 12, 0, None, false),
        send(&a, 13, 0, Some(0), false),
    ];
    a.device.post(QUEUE, &requests).unwrap();
    let expected = [
        done(0, Done::Received { len: 4096, imm: None }),
        done(1, Done::Received { len: 3, imm: Some(0xDEAD_BEEF) }),
        done(2, Done::Received { len: 0, imm: None }),
        done(3, Done::Received { len: 0, imm: Some(0) }),
    ];
    assert_eq!(b.completions(4), expected);
    assert_eq!(b.bytes(0, 4100), [&[7; 4099][..], &[0]].concat());
    assert_eq!(a.completions(4), [10, 11, 12, 13].map(|id| done(id, Done::Request)));
}

#[test]
fn sixteen_requests_take_one_completion() {
    let Some((mut a, mut b)) = nodes() else { return };
    let requests: Vec<Request> = (0..REQUESTS_PER_POST as u64)
        .map(|id| {
            a.region.put(id as usize * 8, &(id + 1).to_le_bytes());
            let request = a.write(id, &b, id as usize * 8, a.local(id as usize * 8, 8));
            Request { signalled: id == 15, ..request }
        })
        .collect();
    for _ in 0..8 {
        // More than the queue has places: completions of the last one give all sixteen back.
        a.device.post(QUEUE, &requests).unwrap();
        assert_eq!(a.completion(), done(15, Done::Request));
    }
    assert_eq!(a.device.poll(&mut [done(0, Done::Request)]), 0);
    assert_eq!(b.device.poll(&mut [done(0, Done::Request)]), 0, "writes are one-sided");
    assert_eq!(b.bytes(0, 128), a.bytes(0, 128));
    assert_eq!(b.region.load_u64(120), 16);
}

#[test]
fn a_write_outside_is_refused_and_ends_the_connection_at_both_ends() {
    let Some(place) = place() else { return };
    let (mut a, mut b) = (Node::new(&place), Node::new(&place));
    let private = Region::new(4096).unwrap();
    let private_id = b.device.register(&private, Access::Local).unwrap();
    let (open, closed) = (b.device.remote(b.memory), b.device.remote(private_id));
    let cases = [
        ("across the end", open.address + open.len - 4, open.rkey),
        ("ahead of the start", open.address - 8, open.rkey),
        ("memory that is not for peers", closed.address, closed.rkey),
        ("a key that fits other memory", open.address, closed.rkey),
    ];
    a.region.put(0, &[9; 8]);
    for (what, address, rkey) in cases {
        connect(&mut a, &mut b);
        b.receive(3, 0, 64);
        let operation = Operation::Write { address, rkey, imm: None };
        let local = a.local(0, 8);
        a.device.post(QUEUE, &[Request { id: 8, operation, local, signalled: false, inline: false }]).unwrap();
        assert_eq!(a.completion(), failed(8, Failure::Refused), "{what}");
        assert_eq!(b.completion(), failed(3, Failure::Flushed), "{what}");
        // Whatever follows is flushed.
        let next = a.write(9, &b, 0, a.local(0, 8));
        a.device.post(QUEUE, &[next]).unwrap();
        assert_eq!(a.completion(), failed(9, Failure::Flushed), "{what}");
        assert!(b.bytes(0, MEMORY_BYTES).iter().all(|byte| *byte == 0), "{what}");
        assert_eq!(private.load_u64(0), 0, "{what}");
        a.device.destroy(QUEUE);
        b.device.destroy(QUEUE);
    }
}

#[test]
fn a_failed_queue_flushes_and_its_slot_serves_again() {
    let Some((mut a, mut b)) = nodes() else { return };
    for _ in 0..3 {
        for id in 1..=3 {
            a.receive(id, 0, 64);
        }
        a.device.fail(QUEUE);
        a.device.fail(QUEUE);
        assert_eq!(a.completions(3), [1, 2, 3].map(|id| failed(id, Failure::Flushed)));
        a.device.destroy(QUEUE);
        b.device.destroy(QUEUE);
        connect(&mut a, &mut b);
        b.region.store_u64(0, 0x5EED);
        let request = b.write(4, &a, 4096, b.local(0, 8));
        b.device.post(QUEUE, &[request]).unwrap();
        assert_eq!(b.completion(), done(4, Done::Request));
        assert_eq!(a.region.load_u64(4096), 0x5EED);
    }
    a.device.destroy(QUEUE);
    // Queues that do not exist: nothing happens.
    a.device.destroy(QUEUE);
    a.device.fail(QUEUE);
    a.device.fail(QueueId(99));
    a.device.destroy(QueueId(99));
    let error = a.device.post(QUEUE, &[]).unwrap_err();
    assert!(error.text.ends_with("queue pair 0 was not made"), "{error}");
}

#[test]
fn nothing_lands_once_a_queue_is_destroyed() {
    let Some(place) = place() else { return };
    let (mut a, mut b) = (Node::new(&place), Node::new(&place));
    for round in 1..=10u64 {
        let (end_a, end_b) = (a.end(1), b.end(2));
        a.device.connect(QUEUE, 1, &end_b, IMPATIENT).unwrap();
        b.device.connect(QUEUE, 2, &end_a, IMPATIENT).unwrap();
        // A train of writes is on its way while the far end is torn down.
        a.region.put(0, &[round as u8; 4096]);
        let requests: Vec<Request> = (0..16).map(|id| a.write(id, &b, 4096, a.local(0, 4096))).collect();
        a.device.post(QUEUE, &requests).unwrap();
        b.device.destroy(QUEUE);
        b.region.put(4096, &[0xEE; 4096]);
        for completion in a.completions(16) {
            let late = matches!(completion.result, Ok(Done::Request) | Err(Failure::Unreachable | Failure::Flushed));
            assert!(late, "{completion:?}");
        }
        assert_eq!(b.bytes(4096, 4096), [0xEE; 4096], "round {round}");
        a.device.destroy(QUEUE);
    }
}

#[test]
fn a_peer_that_is_not_there_is_unreachable() {
    let Some(place) = place() else { return };
    let mut a = Node::new(&place);
    let own = a.end(0);
    let nobody = End { number: 0xAB_CDEF, ..own };
    a.device.connect(QUEUE, 0, &nobody, IMPATIENT).unwrap();
    let request = a.write(1, &a, 0, a.local(0, 8));
    a.device.post(QUEUE, &[request, Request { id: 2, signalled: false, ..request }]).unwrap();
    assert_eq!(a.completions(2), [failed(1, Failure::Unreachable), failed(2, Failure::Flushed)]);
}

#[test]
fn an_armed_descriptor_wakes_for_a_completion() {
    let Some((mut a, mut b)) = nodes() else { return };
    for id in 0..8 {
        b.receive(id, 0, 64);
    }
    while b.device.event().is_some() {}
    for id in 0..8u64 {
        b.device.arm();
        assert!(!readable(&b.device, Duration::ZERO), "nothing has happened yet");
        let local = a.local(0, 16);
        let operation = Operation::Send { imm: None };
        a.device.post(QUEUE, &[Request { id, operation, local, signalled: true, inline: false }]).unwrap();
        // "Connection established" wakes it as well and is no event for us.
        let start = Instant::now();
        let mut completion = [done(99, Done::Request)];
        while b.device.poll(&mut completion) == 0 {
            assert!(readable(&b.device, HANG) && start.elapsed() < HANG, "not woken");
            assert_eq!(b.device.event(), None);
        }
        assert_eq!(completion[0], done(id, Done::Received { len: 16, imm: None }));
        assert_eq!(a.completion(), done(id, Done::Request));
    }
    // What nobody took from the channel does not pile up: arming clears it.
    b.device.arm();
    assert!(!readable(&b.device, Duration::ZERO));
}

#[test]
fn ranges_outside_and_lists_too_long_never_reach_the_device() {
    let Some((a, b)) = nodes() else { return };
    let panics = |what: &str, make: &dyn Fn(&Node) -> Vec<Request>| {
        let place = place().unwrap();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut node = Node::new(&place);
            node.end(0);
            let requests = make(&node);
            node.device.post(QUEUE, &requests)
        }));
        let text = result.expect_err(what).downcast_ref::<String>().cloned().unwrap_or_default();
        assert!(text.contains(what), "{text}");
    };
    panics("lies outside registered memory", &|node| vec![node.write(0, &b, 0, node.local(MEMORY_BYTES - 7, 8))]);
    panics("lies outside registered memory", &|node| vec![node.write(0, &b, 0, node.local(usize::MAX, 8))]);
    panics("17 requests posted at once", &|node| vec![node.write(0, &b, 0, node.local(0, 8)); 17]);
    panics("bytes inline, of", &|node| {
        vec![Request { inline: true, ..node.write(0, &b, 0, node.local(0, MEMORY_BYTES)) }]
    });
    drop((a, b));
}

#[test]
fn limits_are_the_devices_own() {
    let Some(place) = place() else { return };
    let mut device = Device::open(&place, 1, usize::MAX).unwrap();
    let limits = device.limits();
    let (_, inline_bytes) = device.create(QUEUE, 1, 1).unwrap();
    println!("{place}: {limits:?}, {inline_bytes} bytes inline, {:?}", device.port());
    assert!(limits.completions >= 1024 && limits.message_bytes_max >= 1 << 20 && limits.requests_max >= 256);
    let small = Device::open(&place, 1, 100).unwrap().limits().completions;
    assert!((100..limits.completions).contains(&small), "{small} completions granted of 100");
}

#[test]
fn what_cannot_be_opened_or_connected_is_told_in_one_line() {
    let Some(place) = place() else { return };
    let text = |place: &Place| Device::open(place, 1, 16).unwrap_err().text;
    let here = format!("RDMA device {}, port {}, GID index", place.device, place.port);
    let error = text(&Place { device: "nobody0".to_owned(), ..place.clone() });
    assert!(error.contains("no such device; there are ") && error.contains(&place.device), "{error}");
    let error = text(&Place { port: 77, ..place.clone() });
    assert!(error.contains("port 77, GID index") && error.contains(": no such port: "), "{error}");
    let error = text(&Place { gid_index: 255, ..place.clone() });
    assert!(error.starts_with(&here) && error.contains("GID"), "{error}");

    let mut a = Node::new(&place);
    let own = a.end(0);
    let mut peer = own;
    peer.port.is_infiniband = true;
    let error = a.device.connect(QUEUE, 0, &peer, PATIENT).unwrap_err().text;
    assert!(error.starts_with(&here) && error.contains("one end is InfiniBand and the other Ethernet"), "{error}");
    // An address that no interface has and no route leads to.
    peer = own;
    peer.port.gid[12..].copy_from_slice(&[203, 0, 113, 9]);
    match a.device.connect(QUEUE, 0, &peer, PATIENT) {
        Ok(()) => println!("this device does not look for a route before it sends"),
        Err(ProviderError { text, errno }) => {
            assert!(text.contains("did not go from INIT to RTR") && text.contains("203.0.113.9"), "{text}");
            assert!(errno != 0 && !text.contains('\n'), "{text}");
            println!("{text}");
        }
    }
}

#[test]
fn a_machine_without_that_device_or_the_library_gets_one_line_too() {
    let nowhere = Place { device: "nobody0".to_owned(), port: 1, gid_index: 0 };
    let error = Device::open(&nowhere, 1, 16).unwrap_err();
    println!("{error}");
    let known = ["RDMA device nobody0, port 1, GID index 0: ", "cannot load libibverbs.so.1 ("];
    assert!(known.iter().any(|start| error.text.starts_with(start)) && !error.text.contains('\n'), "{error}");
}

/// Set in the child that may lock only a little memory.
const LIMITED: &str = "ANTELOG_TEST_MEMORY_LIMITED";

#[test]
fn memory_that_may_not_be_locked_is_refused_with_the_remedy() {
    let Some(place) = place() else { return };
    if std::env::var_os(LIMITED).is_some() {
        let mut device = Device::open(&place, 1, 16).unwrap();
        let region = Region::new(1 << 20).unwrap();
        let error = device.register(&region, Access::Local).unwrap_err();
        println!("{error}");
        assert!(error.text.contains("cannot register 1048576 bytes of memory: Cannot allocate memory (errno 12)"));
        assert!(
            error.text.contains("may lock 65536 bytes in all (RLIMIT_MEMLOCK): raise it with `ulimit -l unlimited`")
        );
        assert_eq!(error.errno, 12);
        return;
    }
    // Root's limit does not bind, so a child without its privileges tries. Set by the shell: no unsafe code here.
    let test = "memory_that_may_not_be_locked_is_refused_with_the_remedy";
    let mut child = Command::new("/bin/sh");
    child.args(["-c", "ulimit -l 64 && exec \"$0\" \"$@\""]).arg(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env(LIMITED, "1");
    if fs::read_to_string("/proc/self/status").unwrap().contains("\nUid:\t0\t") {
        child.uid(65534).gid(65534);
    }
    match child.output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout);
            print!("{text}");
            assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
            assert!(text.contains("1 passed"), "{text}");
        }
        Err(error) => common::skip(&format!("no child without privileges: {error}")),
    }
}

/// Takes the network interface down and up and the device away: for a machine of its own (`--ignored`).
#[test]
#[ignore = "breaks the machine's RDMA device"]
fn a_port_that_goes_down_and_a_device_that_vanishes_are_reported() {
    let Some(place) = place() else { return };
    let run = |command: &str| {
        assert!(Command::new("/bin/sh").args(["-c", command]).status().unwrap().success(), "{command}");
    };
    let (mut a, mut b) = (Node::new(&place), Node::new(&place));
    connect(&mut a, &mut b);
    let path =
        format!("/sys/class/infiniband/{}/ports/{}/gid_attrs/ndevs/{}", place.device, place.port, place.gid_index);
    let interface = fs::read_to_string(path).unwrap().trim().to_owned();
    a.device.arm();
    run(&format!("ip link set {interface} down"));
    assert!(readable(&a.device, HANG), "not woken");
    assert_eq!(a.device.event(), Some(DeviceEvent::PortDown));
    let error = Device::open(&place, 1, 16).unwrap_err();
    assert!(error.text.contains("the port is down") || error.text.contains("GID"), "{error}");
    run(&format!("ip link set {interface} up"));
    // Deleting blocks until the last user of the device is gone, or takes it away from them: either way Drop ends it.
    let mut gone = Command::new("rdma").args(["link", "delete", &place.device]).spawn().unwrap();
    let start = Instant::now();
    let mut lost = None;
    while lost.is_none() && start.elapsed() < Duration::from_secs(10) {
        lost = a.device.event().filter(|event| *event == DeviceEvent::Lost);
    }
    println!("after the device was deleted: {lost:?}");
    if lost.is_some() {
        a.device.fail(QUEUE);
        a.device.arm();
        assert_eq!(a.device.event(), None);
        assert!(!readable(&a.device, Duration::ZERO), "a lost device wakes nobody any more");
        assert!(a.device.register(&a.region.clone(), Access::Local).is_err());
    }
    a.device.destroy(QUEUE);
    drop((a, b));
    assert!(gone.wait().unwrap().success());
}
