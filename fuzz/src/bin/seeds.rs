//! Writes an input of every kind for each decoder into `fuzz/corpus`: what a fuzzer would take long to guess. With
//! `--list` it prints the decoders' names.

use std::path::Path;

use antelog_core::access::Access;
use antelog_core::handshake::{Answer, Endpoint, Hello, Refusal, RefusalCode, Welcome};
use antelog_core::path::{Ability, Path as Network, Wish};
use antelog_fuzz::{TARGETS, joined};
use antelog_net_rdma::provider::{End, PortAddress, RemoteMemory};
use antelog_net_rdma::setup::{Offer, Setup};
use antelog_net_tcp::frame::Frame;
use antelog_protocol::ledger::grant_head;
use antelog_protocol::wire::node::{Greeting, NodeMessage, Place, Report, Target};
use antelog_protocol::wire::order::{
    Decree, ORDER_ENTRY_BYTES_MAX, ShardChangeHead, encode_cut, encode_decree, encode_free_cut, encode_grant,
    encode_shard_change, encode_view_change,
};
use antelog_protocol::wire::session::{ClusterMap, ReadResult, Reply, Request, SESSION_HEAD_BYTES_MAX, ShardGates};
use antelog_protocol::{
    Change, ChangeError, ClientId, CutPoint, Lsn, Member, Ordering, Outcome, Position, Refusal as Refused, ReplicaId,
    ShardId, WindowMode,
};

fn handshakes(write: &mut dyn FnMut(&str, Vec<u8>)) {
    for (from, rdma, nonce) in [
        (Endpoint::Node { from: 3, to: 1, incarnation: 9 }, Err("no device".to_owned()), None),
        (Endpoint::Client { session: 7 }, Ok(()), Some([5; 32])),
        (Endpoint::Observer, Ok(()), None),
    ] {
        let ability = Ability { wish: Wish::Auto, rdma };
        let hello =
            Hello { cluster: "zoo".into(), from, record_bytes_max: 1, ring_bytes: 2, log_bytes: 3, ability, nonce };
        write("hello", hello.encode().unwrap());
    }
    let welcome = Welcome {
        incarnation: 4,
        ring_bytes: 5,
        record_bytes_max: 6,
        log_bytes: 7,
        access: Access::Append,
        path: Network::Rdma,
        path_reason: "both can".into(),
        payload: vec![1; 10],
    };
    let refusal = Refusal::new(RefusalCode::Secret, "this cluster requires a secret");
    for answer in [Answer::Welcome(welcome), Answer::Challenge([6; 32]), Answer::Refusal(refusal)] {
        write("answer", answer.encode().unwrap());
    }
}

fn sessions(write: &mut dyn FnMut(&str, Vec<u8>)) {
    let (shard, position, lsn) = (ShardId(1), Position(2), Lsn(3));
    let mut head = [0; SESSION_HEAD_BYTES_MAX];
    for request in [
        Request::Append { shard, attempt: 1, view: 0, seq: 9, record: b"record" },
        Request::Subscribe { stream: 1, shard, from: position, credit_bytes: 5, view: 6 },
        Request::Unsubscribe { stream: 2 },
        Request::Consumed { stream: 3, bytes: 4 },
        Request::Follow,
        Request::Read { token: 5, position },
        Request::Tail { token: 7 },
        Request::Cancel { token: 5 },
        Request::Change { token: 8, change: Change::Ordering(Ordering::Auto) },
        Request::Unfollow,
        Request::Outcome { token: 9, shard, client: ClientId(4), seq: 5 },
    ] {
        let (len, body) = request.encode(&mut head);
        write("request", [&head[..len], body].concat());
    }
    for reply in [
        Reply::Acknowledged { shard, seq: 1, position },
        Reply::Refused { shard, attempt: 1, seq: 1, refusal: Refused::Closed { instead: shard } },
        Reply::Deliver {
            stream: 1,
            lsn,
            position,
            view: 2,
            speculative: true,
            client: ClientId(4),
            seq: 5,
            record: b"r",
        },
        Reply::NoOps { stream: 1, lsn, position, count: 6, view: 7 },
        Reply::Trimmed { stream: 1, head: position },
        Reply::NotHere { stream: 1 },
        Reply::Crowded { stream: 1, subscriptions_max: 2 },
        Reply::Closing,
        Reply::Order { index: 8, entry: b"entry" },
        Reply::Snapshot { index: 1, base: position, entries: 2, view: 3 },
        Reply::ReadIs { token: 1, result: ReadResult::Elsewhere(shard) },
        Reply::TailIs { token: 1, position, index: 5 },
        Reply::ChangeIs { token: 8, outcome: Err(ChangeError::LastShard(shard)) },
        Reply::Decreed { stream: 1, lsn, position, count: 6, view: 7 },
        Reply::Unavailable { stream: 1, lsn, position, count: 6, view: 7 },
        Reply::OutcomeIs { token: 9, outcome: Outcome::Bound(position), next_seq: 6 },
    ] {
        let (len, body) = reply.encode(&mut head);
        write("reply", [&head[..len], body].concat());
    }
    let gates = vec![(0, "127.0.0.1:1".into()), (1, "[::1]:2".into())];
    let shards = [0, 4].map(|shard| ShardGates { shard: ShardId(shard), gates: gates.clone() });
    let map = ClusterMap {
        tick_ns: 1000,
        suspect_ns: 2000,
        record_bytes_max: 10,
        outstanding_max: 8,
        shards: shards.into(),
        ordering: "fixed".into(),
    };
    write("cluster_map", map.encode());
}

fn nodes(write: &mut dyn FnMut(&str, Vec<u8>)) {
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let (client, point) = (ClientId(4), CutPoint { window: 1, cut: 2, prefix: 0 });
    for message in [
        NodeMessage::Report(Report { point, ..Report::default() }),
        NodeMessage::Target(Target { point, close: true, lead_ns: 5 }),
        NodeMessage::Order { index: 1, entry: b"entry" },
        NodeMessage::ReadIndex { token: 1 },
        NodeMessage::ReadIndexIs { token: 1, index: 2 },
        NodeMessage::Change { client, token: 1, change: Change::Join(ShardId(1)) },
        NodeMessage::ChangeIs { client, token: 1, outcome: Ok(7) },
        NodeMessage::Lead { term: 3 },
        NodeMessage::Snapshot { index: 1, base: Position(2), view: 3, entries: 4 },
        NodeMessage::SnapshotEntry { entry: b"entry" },
        NodeMessage::Greeting(Greeting { incarnation: 9, epoch: 2, bound: Place::default() }),
        NodeMessage::Start(Place::default()),
        NodeMessage::Session { client, next_seq: 5, last_lsn: Lsn(6) },
        NodeMessage::Fetch { before: Place::default(), until_bytes: 7 },
        NodeMessage::Fetched { at_bytes: 8, left_bytes: 9, bytes: b"entries" },
    ] {
        let len = message.encode(&mut buffer);
        write("node_message", buffer[..len].to_vec());
    }
    let mut entry = |encode: &dyn Fn(&mut [u8]) -> usize| {
        let len = encode(&mut buffer);
        buffer[..len].to_vec()
    };
    let member =
        |shard, quota, first_lsn| Member { shard: ShardId(shard), quota, first_lsn: Lsn(first_lsn), open: true };
    let grant = |mode, window, start, quota, first: [u64; 2]| {
        move |b: &mut [u8]| {
            let head = grant_head(0, mode, window, 2, Position(start));
            encode_grant(b, head, &[member(0, quota, first[0]), member(1, quota, first[1])])
        }
    };
    let cut = |window, cut, prefix| move |b: &mut [u8]| encode_cut(b, 0, CutPoint { window, cut, prefix });
    let free_cut = |window, cut, lsns: [u64; 2]| {
        move |b: &mut [u8]| encode_free_cut(b, 0, CutPoint { window, cut, prefix: 0 }, &lsns.map(Lsn))
    };
    let fixed = [
        entry(&grant(WindowMode::Fixed, 0, 0, 3, [0, 0])),
        entry(&cut(0, 1, 1)),
        entry(&grant(WindowMode::Fixed, 1, 12, 1, [6, 6])),
        entry(&cut(2, 0, 0)),
    ];
    let free = [
        entry(&grant(WindowMode::Free, 0, 0, 0, [0, 0])),
        entry(&free_cut(0, 1, [4, 5])),
        entry(&free_cut(1, 0, [4, 9])),
        entry(&grant(WindowMode::Fixed, 1, 13, 2, [4, 9])),
        entry(&|b: &mut [u8]| encode_view_change(b, 1, ShardId(1))),
    ];
    let members = |change, epoch, primary, numbers: &'static [u16]| {
        move |b: &mut [u8]| {
            let head = ShardChangeHead { view: 0, shard: ShardId(1), change, epoch, primary, since_failure: 0 };
            let members: Vec<_> = numbers.iter().map(|n| ReplicaId { number: *n, incarnation: 7 }).collect();
            encode_shard_change(b, head, &members)
        }
    };
    let changes = [
        entry(&members(1, 1, 0, &[0, 1])),
        entry(&grant(WindowMode::Fixed, 0, 0, 3, [0, 0])),
        entry(&members(2, 2, 1, &[1])),
        entry(&|b: &mut [u8]| encode_view_change(b, 1, ShardId(1))),
        entry(&members(3, 3, 1, &[1])),
    ];
    let decree = Decree { view: 1, shard: ShardId(1), from: Position(2), lease_end: Position(12), lsn: Lsn(1) };
    let decree = entry(&|b: &mut [u8]| encode_decree(b, &decree));
    write("order", joined(&fixed));
    write("order", joined(&free));
    write("order", joined(&changes));
    write("order", joined(&[decree]));
}

fn networks(write: &mut dyn FnMut(&str, Vec<u8>)) {
    for frame in [
        Frame::Write { region: 1, offset: 2, len: 3, notify: Some(4), acknowledge: true, number: 5 },
        Frame::Send { len: 1, number: 2 },
        Frame::Placed { count: 9 },
    ] {
        write("tcp_frame", frame.encode().to_vec());
    }
    let port = PortAddress { gid: [7; 16], lid: 3, mtu_bytes: 4096, is_infiniband: false };
    let regions = vec![RemoteMemory { address: 1 << 40, len: 4096, rkey: 5 }];
    let offer = Offer { end: End { port, number: 6, psn: 7 }, receives: 8, regions };
    for setup in [Setup::Offer(offer), Setup::Ready, Setup::Refused, Setup::Decline("no memory".into())] {
        write("rdma_setup", setup.encode());
    }
    // A tail of 16, and a header of a message of 5 bytes at the ring's beginning.
    let tail = [&0u16.to_le_bytes()[..], &16u64.to_le_bytes()].concat();
    let message = [&128u16.to_le_bytes()[..], &5u32.to_le_bytes(), &[0; 4], b"hello\0\0\0"].concat();
    write("ring", joined(&[message, tail]));
    write("http", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".to_vec());
    write("http", b"POST / HTTP/1.0\r\n\r\n".to_vec());
}

fn files(write: &mut dyn FnMut(&str, Vec<u8>)) {
    write("log", [&[0, 1, 64, 100, 255, 3, 0, 9][..], &[70, 0, 1, 200, 1, 128]].concat());
    write("log", vec![10; 8]);
    write("config", b"[launch]\nmode = \"dedicated\"\nidle = \"spin\"\n[[shard]]\nid = 0\n".to_vec());
    write("override", b"cluster.tick_us=500\npolicy.beat=paper\nlaunch.metrics=127.0.0.1:1".to_vec());
    write("override", b"cluster.name=\"x\"\ncluster=1".to_vec());
    write("secret", b"sixteen bytes ok\r\n".to_vec());
    write("secret", b"short".to_vec());
}

fn main() -> std::io::Result<()> {
    if std::env::args().nth(1).as_deref() == Some("--list") {
        TARGETS.iter().for_each(|target| println!("{}", target.name));
        return Ok(());
    }
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let mut failure = None;
    let mut numbers = std::collections::BTreeMap::<String, u32>::new();
    let mut write = |target: &str, bytes: Vec<u8>| {
        let number = numbers.entry(target.to_owned()).or_default();
        let folder = corpus.join(target);
        let written = std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::write(folder.join(format!("seed-{number:02}")), bytes));
        failure = failure.take().or(written.err());
        *number += 1;
    };
    handshakes(&mut write);
    sessions(&mut write);
    nodes(&mut write);
    networks(&mut write);
    files(&mut write);
    failure.map_or(Ok(()), Err)
}
