//! Round trips, every truncation, and arbitrary bytes.

use proptest::prelude::*;

use super::*;

fn hello() -> Hello {
    Hello {
        cluster: "zoo".into(),
        from: Endpoint::Node { from: 3, to: 1, incarnation: 9 },
        record_bytes_max: 65536,
        ring_bytes: 0,
        log_bytes: 1 << 30,
        ability: Ability { wish: Wish::Auto, rdma: Err("it has no device".into()) },
        nonce: Some([3; 32]),
    }
}

fn welcome() -> Welcome {
    Welcome {
        incarnation: 4,
        ring_bytes: 1 << 20,
        record_bytes_max: 4096,
        log_bytes: 1 << 30,
        access: Access::Append,
        path: Path::Rdma,
        path_reason: "both can".into(),
        payload: vec![7; 100],
    }
}

fn read_hello(bytes: &[u8]) -> Result<Hello, HandshakeError> {
    let (header, body) = bytes.split_first_chunk().ok_or(HandshakeError::Truncated("the header"))?;
    let len = hello_body_bytes(header)?;
    if body.len() < len {
        return Err(HandshakeError::Truncated("the body"));
    }
    Hello::decode(body)
}

fn read_answer(bytes: &[u8]) -> Result<Answer, HandshakeError> {
    let (header, body) = bytes.split_first_chunk().ok_or(HandshakeError::Truncated("the header"))?;
    AnswerHeader::decode(header)?.decode_body(body)
}

#[test]
fn every_prefix_and_every_extension_is_an_error() {
    let bytes = hello().encode().unwrap();
    assert_eq!(read_hello(&bytes), Ok(hello()));
    for len in 0..bytes.len() {
        assert!(read_hello(&bytes[..len]).is_err(), "a hello cut to {len} bytes was accepted");
        assert!(Hello::decode(&bytes[HELLO_HEADER_BYTES..][..len.min(bytes.len() - HELLO_HEADER_BYTES - 1)]).is_err());
    }
    assert_eq!(Hello::decode(&[&bytes[HELLO_HEADER_BYTES..], b"x"].concat()), Err(HandshakeError::Trailing(1)));
    for answer in [
        Answer::Welcome(welcome()),
        Answer::Challenge([9; 32]),
        Answer::Refusal(Refusal::new(RefusalCode::Busy, "full house")),
    ] {
        let bytes = answer.encode().unwrap();
        assert_eq!(read_answer(&bytes), Ok(answer));
        for len in 0..bytes.len() {
            assert!(read_answer(&bytes[..len]).is_err(), "an answer cut to {len} bytes was accepted");
        }
        assert_eq!(read_answer(&[&bytes[..], b"x"].concat()), Err(HandshakeError::Trailing(1)));
    }
}

#[test]
fn errors_say_what_was_expected_and_what_came() {
    let error = hello_body_bytes(b"GET / HTTP/1").unwrap_err().to_string();
    assert_eq!(error, "expected an antelog hand-shake, got \"GET / HT\" (this looks like HTTP)");
    let mut bytes = hello().encode().unwrap();
    bytes[8] = 7;
    let error = read_hello(&bytes).unwrap_err();
    assert_eq!(error.to_string(), "expected protocol version 5, got version 7");
    assert_eq!(Refusal::from_error(&error).text, "it speaks protocol version 5, this side 7");
    let mut bytes = hello().encode().unwrap();
    bytes[11] = 0xff;
    assert!(read_hello(&bytes).unwrap_err().to_string().starts_with("expected at most 1024 bytes of hello, got 65"));
    let mut bytes = hello().encode().unwrap();
    bytes[13] = 0xff;
    assert_eq!(read_hello(&bytes), Err(HandshakeError::Text("the cluster name")));
    bytes[13] = b'z';
    bytes[16] = 9;
    assert_eq!(read_hello(&bytes).unwrap_err().to_string(), "expected a known endpoint's kind, got 9");
    // What goes into a log must not be able to make lines of its own there.
    let mut bytes = hello().encode().unwrap();
    bytes[13] = b'\n';
    assert_eq!(read_hello(&bytes), Err(HandshakeError::Text("the cluster name")));
    assert_eq!(Refusal::new(RefusalCode::Other, "two\nlines\x1b[2J").text, "two lines [2J");
    let lines = Hello { ability: Ability { wish: Wish::Tcp, rdma: Err("two\nlines".into()) }, ..hello() };
    assert_eq!(read_hello(&lines.encode().unwrap()).unwrap().ability.rdma, Err("two lines".into()));
    let long = Hello { cluster: "x".repeat(65), ..hello() };
    assert_eq!(long.encode().unwrap_err().to_string(), "expected at most 64 bytes of cluster name, got 65");
    let large = Answer::Welcome(Welcome { payload: vec![0; PAYLOAD_BYTES_MAX + 1], ..welcome() });
    assert!(large.encode().is_err());
}

#[test]
fn a_refusal_is_understood_whatever_its_version_and_code() {
    let refusal = Refusal::new(RefusalCode::Version, "it speaks protocol version 7, this side 1");
    let mut bytes = Answer::Refusal(refusal.clone()).encode().unwrap();
    bytes[8] = 7;
    let (header, body) = bytes.split_first_chunk().unwrap();
    let header = AnswerHeader::decode(header).unwrap();
    assert_eq!(header.version, 7);
    assert_eq!(header.decode_body(body), Ok(Answer::Refusal(refusal)));
    bytes[11] = 200;
    let Ok(Answer::Refusal(later)) = read_answer(&bytes) else { panic!("not a refusal") };
    assert_eq!(later.code, RefusalCode::Other);
    let mut bytes = Answer::Welcome(welcome()).encode().unwrap();
    bytes[8] = 7;
    assert_eq!(read_answer(&bytes), Err(HandshakeError::Version(7)));
}

#[test]
fn long_texts_are_cut_at_a_character() {
    let refusal = Refusal::new(RefusalCode::Other, "ü".repeat(200));
    assert_eq!(refusal.text.len(), 300);
    assert_eq!(Refusal::new(RefusalCode::Other, format!("x{}", "ü".repeat(200))).text.len(), 299);
}

proptest! {
    #[test]
    fn hellos_come_back(
        cluster in "\\PC{0,16}",
        node in any::<Option<(u16, u16, u64)>>(),
        session in any::<u128>(),
        sizes in any::<(u32, u64, u64)>(),
    ) {
        let from = match node {
            Some((from, to, incarnation)) => Endpoint::Node { from, to, incarnation },
            None if session % 7 == 0 => Endpoint::Observer,
            None => Endpoint::Client { session },
        };
        let (record_bytes_max, ring_bytes, log_bytes) = sizes;
        let wish = [Wish::Auto, Wish::Rdma, Wish::Tcp][(session % 3) as usize];
        let rdma = if session % 2 == 0 { Ok(()) } else { Err(cluster.clone()) };
        let ability = Ability { wish, rdma };
        let nonce = (session % 5 < 2).then_some([session as u8; 32]);
        let hello = Hello { cluster, from, record_bytes_max, ring_bytes, log_bytes, ability, nonce };
        prop_assert_eq!(read_hello(&hello.encode().unwrap()), Ok(hello));
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), is_ours in any::<bool>()) {
        let mut bytes = bytes;
        if is_ours && bytes.len() > 12 {
            bytes[..8].copy_from_slice(&MAGIC);
            bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
            bytes[10] %= 4;
            bytes[11] = 0;
        }
        let _ = read_hello(&bytes);
        let _ = read_answer(&bytes);
        let _ = Hello::decode(&bytes);
        let _ = may_be_handshake(&bytes);
    }

    #[test]
    fn one_flipped_byte_never_panics(at in 0usize..2000, value in any::<u8>()) {
        let mut bytes = hello().encode().unwrap();
        let len = bytes.len();
        bytes[at % len] = value;
        let _ = read_hello(&bytes);
        let mut bytes = Answer::Welcome(welcome()).encode().unwrap();
        let len = bytes.len();
        bytes[at % len] = value;
        let _ = read_answer(&bytes);
    }
}
