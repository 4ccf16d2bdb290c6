//! Everybody who should not connect, and the line the operator reads about it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use antelog_core::handshake::{ANSWER_HEADER_BYTES, Answer, AnswerHeader, RefusalCode};
use antelog_net_tcp::{BindError, DialError, Listener, PENDING_MAX, dial};

mod common;
use common::{Door, hello};

const TIME: Duration = Duration::from_secs(20);

/// What the listener answers to these bytes.
fn answer_to(door: &Door, bytes: &[u8]) -> (AnswerHeader, Answer) {
    let mut stream = TcpStream::connect(door.address()).unwrap();
    stream.set_read_timeout(Some(TIME)).unwrap();
    stream.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let (header, body) = answer.split_first_chunk::<ANSWER_HEADER_BYTES>().expect("an answer");
    let header = AnswerHeader::decode(header).unwrap();
    (header, header.decode_body(body).unwrap())
}

fn refusal_of(door: &Door, bytes: &[u8]) -> (RefusalCode, String) {
    match answer_to(door, bytes).1 {
        Answer::Refusal(refusal) => (refusal.code, refusal.text),
        answer => panic!("{bytes:?} was answered {answer:?}"),
    }
}

#[test]
fn both_address_families_connect_and_carry_the_payload() {
    for address in ["127.0.0.1:0", "[::1]:0"] {
        let payload: Vec<u8> = (0..32 << 10).map(|index| index as u8).collect();
        let door = Door::open(address, payload.clone());
        let (link, welcome) = dial(door.address(), &hello("test"), None, TIME).unwrap();
        assert_eq!(link.peer(), door.address());
        assert_eq!((welcome.incarnation, welcome.payload), (5, payload));
        let (said, taken) = door.links.recv().unwrap();
        assert_eq!(said, hello("test"));
        assert_eq!(taken.peer().ip(), door.address().ip());
    }
}

#[test]
fn strangers_are_told_and_reported() {
    let door = Door::open("127.0.0.1:0", Vec::new());
    let (code, text) = refusal_of(&door, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert_eq!(code, RefusalCode::NotAntelog);
    assert_eq!(text, "expected an antelog hand-shake, got \"GET / HT\" (this looks like HTTP)");
    assert!(door.refusal().ends_with(&format!("sent no valid hand-shake: {text}")));

    let (code, _) = refusal_of(&door, &[0x16, 0x03, 0x01, 0x02, 0x00, 0x01]);
    assert_eq!(code, RefusalCode::NotAntelog);
    assert!(door.refusal().ends_with("(this looks like TLS)"));

    let mut bytes = hello("test").encode().unwrap();
    bytes[8] = 7;
    let (code, text) = refusal_of(&door, &bytes);
    assert_eq!((code, &text[..]), (RefusalCode::Version, "it speaks protocol version 5, this side 7"));
    assert!(door.refusal().ends_with("speaks protocol version 7, this side 5"));

    let mut bytes = hello("test").encode().unwrap();
    bytes[11] = 0xff;
    assert_eq!(refusal_of(&door, &bytes).0, RefusalCode::Other);
    assert!(door.refusal().contains("expected at most 1024 bytes of hello"));

    let error = dial(door.address(), &hello("zoo"), None, TIME).unwrap_err();
    assert!(matches!(&error, DialError::Rejected(_, refusal) if refusal.code == RefusalCode::Cluster));
    let address = door.address();
    assert_eq!(error.to_string(), format!("{address} refused the connection: this is cluster \"test\", not \"zoo\""));
    assert!(door.refusal().ends_with("was refused (Cluster): this is cluster \"test\", not \"zoo\""));

    drop(TcpStream::connect(address).unwrap());
    assert!(door.refusal().ends_with("closed the connection without a word"));
    let bytes = hello("test").encode().unwrap();
    for len in 1..bytes.len() {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&bytes[..len]).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert!(door.refusal().ends_with("closed the connection in the middle of its hand-shake"), "{len} bytes");
    }
    assert!(door.links.try_recv().is_err(), "a stranger was let in");
    dial(address, &hello("test"), None, TIME).expect("a friend is still let in");
}

#[test]
fn garbage_of_all_kinds_never_stops_the_listener() {
    let door = Door::open("127.0.0.1:0", Vec::new());
    let good = hello("test").encode().unwrap();
    let mut state = 1u64;
    for case in 0..300 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let mut bytes = good.clone();
        let at = (state >> 33) as usize % bytes.len();
        bytes[at] ^= (state >> 20) as u8 | 1;
        bytes.truncate(1 + (state >> 40) as usize % bytes.len());
        if case % 3 == 0 {
            bytes = state.to_le_bytes().repeat(1 + at);
        }
        let mut stream = TcpStream::connect(door.address()).unwrap();
        let _ = stream.write_all(&bytes);
    }
    dial(door.address(), &hello("test"), None, TIME).expect("a friend is still let in");
}

#[test]
fn silent_and_slow_callers_delay_nobody_and_are_cut_off() {
    let mut door = Door::open("127.0.0.1:0", Vec::new());
    let address = door.address();
    // More than may be pending: the oldest make way.
    let silent: Vec<TcpStream> = (0..PENDING_MAX + 10).map(|_| TcpStream::connect(address).unwrap()).collect();
    dial(address, &hello("test"), None, TIME).expect("a friend gets past the silent ones");
    assert!(door.refusal().ends_with("made way for others: 64 hand-shakes are pending"));
    // A byte now and then does not extend the deadline.
    let mut slow = TcpStream::connect(address).unwrap();
    let name = slow.local_addr().unwrap().to_string();
    let bytes = hello("test").encode().unwrap();
    let mut sent = bytes.iter();
    let line = loop {
        match door.refusals.recv_timeout(Duration::from_millis(200)) {
            Ok(line) if line.starts_with(&name) => break line,
            Ok(_) => {}
            Err(_) => {
                let byte = sent.next().expect("the slow caller is cut off before it is done");
                let _ = slow.write_all(&[*byte]);
            }
        }
    };
    assert!(line.ends_with("did not finish its hand-shake within 2s"), "{line}");
    door.handle.stop();
    drop(silent);
    assert!(matches!(dial(address, &hello("test"), None, TIME), Err(DialError::Refused(_))));
}

#[test]
fn failing_calls_say_why() {
    let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = dial(unused, &hello("test"), None, TIME).unwrap_err();
    assert_eq!(error.to_string(), format!("nothing listens on {unused}: is the node running?"));

    // Accepts into its backlog and never answers.
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = mute.local_addr().unwrap();
    let start = Instant::now();
    let error = dial(address, &hello("test"), None, Duration::from_millis(100)).unwrap_err();
    assert!(start.elapsed() >= Duration::from_millis(100));
    assert!(error.to_string().starts_with(&format!("{address} did not answer within 100ms")), "{error}");

    let error = dial(address, &hello(&"x".repeat(65)), None, TIME).unwrap_err();
    assert_eq!(error.to_string(), "the hand-shake cannot be sent: expected at most 64 bytes of cluster name, got 65");
}

#[test]
fn a_port_in_use_and_a_strange_address_are_explained() {
    let first = Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = first.local_addr();
    let error = Listener::bind(address).unwrap_err();
    assert!(matches!(error, BindError::InUse(_)));
    let text = error.to_string();
    assert!(text.starts_with(&format!("cannot listen on {address}: port {} is in use", address.port())), "{text}");
    let error = Listener::bind("192.0.2.1:7400".parse().unwrap()).unwrap_err();
    assert!(error.to_string().contains("this machine does not have the address 192.0.2.1"), "{error}");
}
