//! A thread that blocks on the transport's descriptor wakes, and frames that make no sense end a connection.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use antelog_core::handshake::{ANSWER_HEADER_BYTES, AnswerHeader};
use antelog_core::mem::Region;
use antelog_core::mem::sys;
use antelog_core::transport::{DownReason, Event, LocalRange, PeerId, RemoteOffset, Transport};
use antelog_net_tcp::{DialError, Options, TcpTransport, dial};

mod common;
use common::{Door, Pairs, hello};

const PEER: PeerId = PeerId(0);

/// Blocks in poll(2) until the descriptor is readable; false after 20 s.
fn block(transport: &TcpTransport) -> bool {
    let mut fds = Vec::new();
    transport.wait_fds(&mut fds);
    sys::ppoll(&mut [sys::readable(fds[0])], Some(20_000_000_000)).unwrap() == 1
}

/// Polls, blocking in between, until something is reported.
fn next_event(transport: &mut TcpTransport) -> Event {
    let mut events = [Event::Placed { peer: PEER, token: 0 }; 1];
    while transport.poll(&mut events) == 0 {
        if !transport.prepare_wait() {
            assert!(block(transport), "the descriptor never became readable");
        }
    }
    events[0]
}

#[test]
fn a_blocked_thread_wakes_for_every_event() {
    let pairs = Pairs::new("127.0.0.1:0");
    let (here, there) = pairs.link();
    let (say, said) = mpsc::channel();
    let sleeper = thread::spawn(move || {
        let mut transport = TcpTransport::new(1, Options::default()).unwrap();
        let region = Region::new(4 << 20).unwrap();
        transport.admit(PEER, there, &[region]);
        say.send(()).unwrap();
        let mut notified = Vec::new();
        loop {
            match next_event(&mut transport) {
                Event::Notified { value, .. } => notified.push(value),
                Event::PeerDown { reason, .. } => return (notified, reason),
                other => panic!("unexpected {other:?}"),
            }
        }
    });
    said.recv().unwrap();
    let mut transport = TcpTransport::new(1, Options::default()).unwrap();
    let source = Region::new(4 << 20).unwrap();
    let key = transport.register(source);
    transport.admit(PEER, here, &[]);
    for step in 0..50u32 {
        // Long enough for the other side to block, and large enough for a send to be cut short now and then.
        thread::sleep(Duration::from_millis(2));
        let len = if step % 10 == 0 { 3 << 20 } else { 4096 };
        let local = LocalRange { region: key, offset: 0, len };
        let remote = RemoteOffset { region: 0, offset: 0 };
        transport.write(PEER, local, remote, Some(step), Some(u64::from(step))).unwrap();
        transport.flush();
        let token = u64::from(step);
        assert_eq!(next_event(&mut transport), Event::Placed { peer: PEER, token });
    }
    drop(transport);
    let (notified, reason) = sleeper.join().unwrap();
    assert_eq!(notified, (0..50).collect::<Vec<_>>());
    assert_eq!(reason, DownReason::Closed);
}

/// A connection of which the other end is a plain socket, with its hand-shake done.
fn raw_pair() -> (TcpTransport, TcpStream) {
    raw_pair_onto(&Region::new(4096).unwrap())
}

fn raw_pair_onto(region: &Arc<Region>) -> (TcpTransport, TcpStream) {
    let door = Door::open("127.0.0.1:0", Vec::new());
    let mut raw = TcpStream::connect(door.address()).unwrap();
    raw.write_all(&hello("test").encode().unwrap()).unwrap();
    let mut header = [0; ANSWER_HEADER_BYTES];
    raw.read_exact(&mut header).unwrap();
    let mut body = vec![0; AnswerHeader::decode(&header).unwrap().body_bytes];
    raw.read_exact(&mut body).unwrap();
    let (_, link) = door.links.recv().unwrap();
    let mut transport = TcpTransport::new(1, Options::default()).unwrap();
    transport.admit(PEER, link, std::slice::from_ref(region));
    (transport, raw)
}

/// Sends are started between two looks at what arrives. A receive that is started with them must not take later bytes of a
/// long write to where earlier ones belong, which have arrived and were not looked at.
#[test]
fn a_send_between_two_parts_of_a_write_leaves_them_in_order() {
    const PART: usize = 1000;
    let region = Region::new(4096).unwrap();
    let (mut transport, mut raw) = raw_pair_onto(&region);
    let mut events = [Event::Placed { peer: PEER, token: 0 }; 4];
    assert_eq!(transport.poll(&mut events), 0);
    let mut frame = vec![1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    frame.extend_from_slice(&(3 * PART as u32).to_le_bytes());
    frame.extend_from_slice(&1u32.to_le_bytes());
    for part in 1..=3 {
        frame.extend_from_slice(&[part; PART]);
        raw.write_all(&frame).unwrap();
        frame.clear();
        // What has arrived is received, but not looked at before the send.
        transport.prepare_wait();
        transport.send(PEER, b"between").unwrap();
        transport.flush();
        assert_eq!(transport.poll(&mut events), 0);
    }
    let mut bytes = vec![0; 3 * PART];
    for _ in 0..1000 {
        assert_eq!(transport.poll(&mut events), 0);
        transport.flush();
    }
    region.get(0, &mut bytes);
    let expected: Vec<u8> = (1..=3).flat_map(|part| [part; PART]).collect();
    assert!(bytes == expected, "parts are not where they belong");
}

/// The rest of a long write is received right into its region: a fence has to stop that too, however much has arrived.
#[test]
fn nothing_of_a_long_write_lands_after_a_fence() {
    const BYTES: usize = 1 << 20;
    for waiting in [false, true] {
        let region = Region::new(BYTES).unwrap();
        let (mut transport, mut raw) = raw_pair_onto(&region);
        let mut header = vec![1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        header.extend_from_slice(&(BYTES as u32).to_le_bytes());
        header.extend_from_slice(&1u32.to_le_bytes());
        raw.write_all(&header).unwrap();
        raw.write_all(&vec![7; BYTES / 4]).unwrap();
        let landed = |region: &Region| {
            let mut bytes = vec![0; BYTES];
            region.get(0, &mut bytes);
            bytes.iter().filter(|byte| **byte == 7).count()
        };
        let mut events = [Event::Placed { peer: PEER, token: 0 }; 4];
        while landed(&region) < BYTES / 4 {
            assert_eq!(transport.poll(&mut events), 0);
        }
        if waiting {
            // The receive of what is missing has been started.
            transport.prepare_wait();
        }
        raw.write_all(&vec![7; BYTES / 8]).unwrap();
        transport.fence(PEER);
        let after = landed(&region);
        let _ = raw.write_all(&vec![7; BYTES / 8]);
        for _ in 0..100 {
            assert_eq!(transport.poll(&mut events), 0);
            transport.flush();
            transport.prepare_wait();
        }
        assert_eq!(landed(&region), after);
    }
}

#[test]
fn frames_that_make_no_sense_end_the_connection() {
    let write = |region: u8, offset: u64, len: u32, number: u32| {
        let mut bytes = vec![1, 0, region, 0, 0, 0, 0, 0];
        bytes.extend_from_slice(&offset.to_le_bytes());
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(&number.to_le_bytes());
        bytes.extend_from_slice(&[7; 64]);
        bytes
    };
    let mut unknown_flag = write(0, 0, 8, 1);
    unknown_flag[1] = 0x80;
    let mut placed = write(0, 1, 0, 0);
    placed[0] = 3;
    let mut long_message = write(0, 0, 8193, 1);
    long_message[0] = 2;
    let cases = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        vec![0; 24],
        vec![0xff; 10_000],
        write(1, 0, 8, 1),
        write(0, 4089, 8, 1),
        write(0, u64::MAX, 8, 1),
        write(0, 0, u32::MAX, 1),
        write(0, 0, 8, 2),
        unknown_flag,
        placed,
        long_message,
    ];
    for bytes in cases {
        let (mut transport, mut raw) = raw_pair();
        raw.write_all(&bytes).unwrap();
        let down = next_event(&mut transport);
        assert_eq!(down, Event::PeerDown { peer: PEER, reason: DownReason::Protocol }, "after {bytes:?}");
        // The peer learns it too: its connection ends.
        raw.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert!(matches!(raw.read(&mut [0; 64]), Ok(0) | Err(_)));
    }
}

#[test]
fn a_connection_cut_within_a_frame_is_closed() {
    for len in [1, 23, 24, 30] {
        let (mut transport, mut raw) = raw_pair();
        let mut bytes = vec![1, 1, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0];
        bytes.extend_from_slice(&[7; 8]);
        raw.write_all(&bytes[..len]).unwrap();
        drop(raw);
        assert_eq!(next_event(&mut transport), Event::PeerDown { peer: PEER, reason: DownReason::Closed });
    }
}

#[test]
fn bytes_that_come_one_by_one_make_frames() {
    let (mut transport, mut raw) = raw_pair();
    raw.set_nodelay(true).unwrap();
    let mut bytes = vec![1, 1, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0];
    bytes.extend_from_slice(&[7; 8]);
    let mut events = [Event::Placed { peer: PEER, token: 0 }; 4];
    for byte in bytes {
        assert_eq!(transport.poll(&mut events), 0);
        raw.write_all(&[byte]).unwrap();
    }
    assert_eq!(next_event(&mut transport), Event::Notified { peer: PEER, value: 9 });
}

#[test]
fn a_server_that_is_not_antelog_is_named() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let web = thread::spawn(move || {
        let (mut stream, _) = server.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        let _ = stream.read(&mut [0; 1024]);
    });
    let error = dial(address, &hello("test"), None, Duration::from_secs(20)).unwrap_err();
    assert!(matches!(error, DialError::NotAntelog(..)), "{error}");
    let expected = "is no antelog node: expected an antelog hand-shake, got \"HTTP/1.1\" (this looks like HTTP)";
    assert_eq!(error.to_string(), format!("{address} {expected}"));
    web.join().unwrap();
}
