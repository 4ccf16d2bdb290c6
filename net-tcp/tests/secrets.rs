//! Who knows the secret gets in, nobody else; and whatever a stranger in the middle does to a hand-shake ends it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use antelog_core::access::{Access, Secret};
use antelog_core::handshake::{ANSWER_HEADER_BYTES, Answer, AnswerHeader, RefusalCode};
use antelog_net_tcp::{DialError, dial};

mod common;
use common::{Door, hello};

const TIME: Duration = Duration::from_secs(20);

fn secret(byte: u8) -> Secret {
    Secret::new(&[byte; 32]).unwrap()
}

fn door() -> Door {
    Door::with_secrets("127.0.0.1:0", b"what only members learn".to_vec(), vec![secret(1), secret(2)])
}

#[test]
fn either_secret_opens_and_says_what_for() {
    let door = door();
    let (_, welcome) = dial(door.address(), &hello("test"), Some(&secret(1)), TIME).unwrap();
    assert_eq!((welcome.access, &welcome.payload[..]), (Access::Admin, &b"what only members learn"[..]));
    let (_, welcome) = dial(door.address(), &hello("test"), Some(&secret(2)), TIME).unwrap();
    assert_eq!(welcome.access, Access::Read);
    // A refusal for another reason comes through too.
    let error = dial(door.address(), &hello("zoo"), Some(&secret(1)), TIME).unwrap_err();
    assert!(error.to_string().ends_with("this is cluster \"test\", not \"zoo\""), "{error}");
}

#[test]
fn a_wrong_secret_and_a_missing_one_are_told_apart_on_both_sides() {
    let door = door();
    let refused = |result: Result<_, DialError>| match result {
        Err(DialError::Rejected(_, refusal)) => (refusal.code, refusal.text),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("let in"),
    };
    let (code, text) = refused(dial(door.address(), &hello("test"), Some(&secret(3)), TIME));
    assert_eq!(code, RefusalCode::Secret);
    assert!(text.starts_with("the caller's secret is not one that this side knows"), "{text}");
    assert!(door.refusal().ends_with(&format!("was refused (Secret): {text}")));
    let (code, text) = refused(dial(door.address(), &hello("test"), None, TIME));
    assert_eq!(code, RefusalCode::Secret);
    assert!(text.starts_with("this cluster requires a secret: set cluster.secret_file"), "{text}");
    assert!(door.refusal().ends_with(&format!("was refused (Secret): {text}")));
    // The other way round: the caller insists.
    let open = Door::open("127.0.0.1:0", Vec::new());
    let (code, text) = refused(dial(open.address(), &hello("test"), Some(&secret(1)), TIME));
    assert_eq!(code, RefusalCode::Secret);
    assert!(text.starts_with("the caller has a secret and this cluster has none"), "{text}");
    assert!(open.refusal().ends_with(&format!("was refused (Secret): {text}")));
}

#[test]
fn who_answers_without_knowing_the_secret_is_not_believed() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    // What an acceptor without secrets would say, and then a challenge and a proof that is made up.
    let welcome = {
        let open = Door::open("127.0.0.1:0", Vec::new());
        let mut stream = TcpStream::connect(open.address()).unwrap();
        stream.write_all(&hello("test").encode().unwrap()).unwrap();
        let mut header = [0; ANSWER_HEADER_BYTES];
        stream.read_exact(&mut header).unwrap();
        let mut body = vec![0; AnswerHeader::decode(&header).unwrap().body_bytes];
        stream.read_exact(&mut body).unwrap();
        [&header[..], &body].concat()
    };
    let mut made_up = welcome.clone();
    made_up[11] = 1;
    made_up.extend_from_slice(&[7; 32]);
    let challenge = Answer::Challenge([9; 32]).encode().unwrap();
    for answer in [welcome, made_up.clone(), [&challenge[..], &made_up].concat(), [&challenge[..], &challenge].concat()]
    {
        let server = server.try_clone().unwrap();
        let liar = thread::spawn(move || {
            let (mut stream, _) = server.accept().unwrap();
            stream.write_all(&answer).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let error = dial(address, &hello("test"), Some(&secret(1)), TIME).unwrap_err();
        assert!(matches!(error, DialError::Unproven(_)), "{error}");
        liar.join().unwrap();
    }
}

/// What the one in the middle does to the byte at a place, of the caller's (0) or the acceptor's (1): pass it on, changed
/// or not, or cut the line.
type Tamper = Arc<dyn Fn(usize, usize, u8) -> Option<u8> + Send + Sync>;

/// Passes one connection on to `to`, as `tamper` says; where to call, and how many bytes went in either direction.
fn between(to: SocketAddr, tamper: Tamper) -> (SocketAddr, Arc<[AtomicUsize; 2]>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let passed: Arc<[AtomicUsize; 2]> = Arc::default();
    let counts = passed.clone();
    thread::spawn(move || {
        let (caller, _) = listener.accept().unwrap();
        let acceptor = TcpStream::connect(to).unwrap();
        for side in 0..2 {
            let (from, into) = if side == 0 { (&caller, &acceptor) } else { (&acceptor, &caller) };
            let (mut from, mut into) = (from.try_clone().unwrap(), into.try_clone().unwrap());
            let (tamper, counts) = (tamper.clone(), counts.clone());
            thread::spawn(move || {
                let mut byte = [0];
                while matches!(from.read(&mut byte), Ok(1)) {
                    let at = counts[side].fetch_add(1, Ordering::Relaxed);
                    let Some(changed) = tamper(side, at, byte[0]) else { break };
                    if into.write_all(&[changed]).is_err() {
                        break;
                    }
                }
                let _ = into.shutdown(Shutdown::Both);
                let _ = from.shutdown(Shutdown::Both);
            });
        }
    });
    (address, passed)
}

/// Bytes of a whole hand-shake in either direction.
fn lengths(door: &Door) -> [usize; 2] {
    let (address, passed) = between(door.address(), Arc::new(|_, _, byte| Some(byte)));
    let (link, _) = dial(address, &hello("test"), Some(&secret(1)), TIME).unwrap();
    drop(link);
    door.links.recv_timeout(TIME).unwrap();
    [passed[0].load(Ordering::Relaxed), passed[1].load(Ordering::Relaxed)]
}

/// Calls through the one in the middle, who must not succeed. A changed length makes a side wait for what never comes.
fn must_fail(door: &Door, side: usize, what: &str, tamper: Tamper) {
    let (address, _) = between(door.address(), tamper);
    let result = dial(address, &hello("test"), Some(&secret(1)), Duration::from_millis(400));
    assert!(result.is_err(), "{what}: the caller noticed nothing");
    if side == 0 {
        // What the caller said was changed: the acceptor must not have let anybody in.
        assert!(door.links.try_recv().is_err(), "{what}: the acceptor noticed nothing");
    } else {
        while door.links.try_recv().is_ok() {}
    }
}

#[test]
fn a_flipped_bit_anywhere_ends_the_hand_shake() {
    let door = door();
    let lengths = lengths(&door);
    assert!(lengths[0] > 100 && lengths[1] > 130, "{lengths:?}");
    for (side, length) in lengths.into_iter().enumerate() {
        for at in 0..length {
            let flip: Tamper = Arc::new(move |s, a, byte| Some(byte ^ (u8::from((s, a) == (side, at)) << (at % 8))));
            must_fail(&door, side, &format!("side {side}, byte {at} flipped"), flip);
        }
    }
}

#[test]
fn a_hand_shake_cut_short_anywhere_is_none() {
    let door = door();
    let lengths = lengths(&door);
    for (side, length) in lengths.into_iter().enumerate() {
        for at in 0..length {
            let cut: Tamper = Arc::new(move |s, a, byte| ((s, a) != (side, at)).then_some(byte));
            must_fail(&door, side, &format!("side {side}, cut before byte {at}"), cut);
        }
    }
    dial(door.address(), &hello("test"), Some(&secret(1)), TIME).expect("a friend is still let in");
}

#[test]
fn a_recorded_hand_shake_opens_nothing() {
    let door = door();
    let said: Arc<Mutex<Vec<u8>>> = Arc::default();
    let record = said.clone();
    let (address, _) = between(
        door.address(),
        Arc::new(move |side, _, byte| {
            if side == 0 {
                record.lock().unwrap().push(byte);
            }
            Some(byte)
        }),
    );
    dial(address, &hello("test"), Some(&secret(1)), TIME).unwrap();
    door.links.recv_timeout(TIME).unwrap();
    let mut stream = TcpStream::connect(door.address()).unwrap();
    stream.write_all(&said.lock().unwrap()).unwrap();
    let mut answers = Vec::new();
    stream.read_to_end(&mut answers).unwrap();
    // The challenge is a new one, to which the recorded proof is no answer.
    let refusal = &answers[ANSWER_HEADER_BYTES + 32..];
    let (header, body) = refusal.split_first_chunk().unwrap();
    let answer = AnswerHeader::decode(header).unwrap().decode_body(body).unwrap();
    assert!(matches!(answer, Answer::Refusal(refusal) if refusal.code == RefusalCode::Secret));
    assert!(door.links.try_recv().is_err());
}
