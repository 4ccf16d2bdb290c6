//! What comes over the network.

use std::sync::Arc;

use antelog::watch::http::{Parsed, parse};
use antelog_core::channel::Ring;
use antelog_core::handshake::{
    ANSWER_HEADER_BYTES, Answer, AnswerHeader, HELLO_HEADER_BYTES, Hello, Refusal, hello_body_bytes, may_be_handshake,
};
use antelog_core::mem::Region;
use antelog_core::transport::RegionKey;
use antelog_net_rdma::setup::Setup;
use antelog_net_tcp::frame::{Frame, HEADER_BYTES};
use antelog_protocol::ledger::{Ledger, Slot};
use antelog_protocol::wire::node::NodeMessage;
use antelog_protocol::wire::order::{
    GrantHead, ORDER_ENTRY_BYTES_MAX, OrderEntry, ShardChangeHead, encode_cut, encode_decree, encode_free_cut,
    encode_grant, encode_shard_change, encode_trim, encode_view_change,
};
use antelog_protocol::wire::session::{ClusterMap, Reply, Request, SESSION_HEAD_BYTES_MAX};
use antelog_protocol::{Lsn, Position, ShardId};

pub fn hello(input: &[u8]) {
    let _ = may_be_handshake(input);
    let Some((header, body)) = input.split_first_chunk::<HELLO_HEADER_BYTES>() else { return };
    let read = hello_body_bytes(header).and_then(|len| Hello::decode(body.get(..len).unwrap_or(body)));
    match read {
        Ok(hello) => {
            assert!(!hello.cluster.contains(char::is_control), "it goes into a log");
            let bytes = hello.encode().expect("what was read can be written");
            assert_eq!(&bytes[HELLO_HEADER_BYTES..], &body[..bytes.len() - HELLO_HEADER_BYTES]);
        }
        // What the caller is told.
        Err(error) => drop(Answer::Refusal(Refusal::from_error(&error)).encode().expect("a refusal fits")),
    }
}

pub fn answer(input: &[u8]) {
    let Some((header, body)) = input.split_first_chunk::<ANSWER_HEADER_BYTES>() else { return };
    let Ok(header) = AnswerHeader::decode(header) else { return };
    let Some(body) = body.get(..header.body_bytes) else { return };
    let Ok(answer) = header.decode_body(body) else { return };
    let bytes = answer.encode().expect("what was read can be written");
    if matches!(answer, Answer::Refusal(_)) {
        // Of another version, or with a code that only that has.
        let header = AnswerHeader::decode(bytes.first_chunk().expect("a header")).expect("our own");
        assert_eq!(header.decode_body(&bytes[ANSWER_HEADER_BYTES..]), Ok(answer));
    } else {
        // That a proof follows is said in the header.
        assert_eq!(&bytes[ANSWER_HEADER_BYTES..], body);
    }
}

pub fn request(input: &[u8]) {
    let Ok(request) = Request::decode(input) else { return };
    let mut head = [0; SESSION_HEAD_BYTES_MAX];
    let (len, body) = request.encode(&mut head);
    same(input, &head[..len], body, |bytes| Request::decode(bytes) == Ok(request));
}

pub fn reply(input: &[u8]) {
    let Ok(reply) = Reply::decode(input) else { return };
    let mut head = [0; SESSION_HEAD_BYTES_MAX];
    let (len, body) = reply.encode(&mut head);
    same(input, &head[..len], body, |bytes| Reply::decode(bytes) == Ok(reply));
}

/// The message is as long as what was read and means the same; reserved fields need not be.
fn same(input: &[u8], head: &[u8], body: &[u8], means_the_same: impl Fn(&[u8]) -> bool) {
    assert_eq!(head.len() + body.len(), input.len());
    assert_eq!(&input[head.len()..], body);
    if head.len() == input.len() {
        assert!(means_the_same(head));
    }
}

pub fn node_message(input: &[u8]) {
    let mut buffer = [0; 16 + ORDER_ENTRY_BYTES_MAX];
    let Some(input) = input.get(..input.len().min(buffer.len())) else { return };
    let Ok(message) = NodeMessage::decode(input) else { return };
    let len = message.encode(&mut buffer);
    assert_eq!(NodeMessage::decode(&buffer[..len]), Ok(message));
}

/// Entries one after another, each applied to a ledger, which is asked about everything in between.
pub fn order(input: &[u8]) {
    let mut ledger = Ledger::new(16);
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    for part in super::parts(input).take(64) {
        let Ok(entry) = OrderEntry::decode(part) else { continue };
        let len = encode(&mut buffer, &entry);
        assert_eq!(OrderEntry::decode(&buffer[..len]), Ok(entry), "written again, an entry means the same");
        let index = ledger.applied_index() + 1;
        if ledger.apply(index, &entry).is_err() {
            // A node stops here: its ledger is not asked any more.
            return;
        }
        ask(&ledger);
    }
}

fn encode(buffer: &mut [u8], entry: &OrderEntry<'_>) -> usize {
    match entry {
        OrderEntry::Grant(g) => {
            let members: Vec<_> = g.members.iter().collect();
            let head = GrantHead {
                view: g.view,
                mode: g.mode,
                window: g.window,
                windows: g.windows,
                cuts: g.cuts,
                first_cut: g.first_cut,
                start: g.start,
            };
            encode_grant(buffer, head, &members)
        }
        OrderEntry::Cut { view, point } => encode_cut(buffer, *view, *point),
        OrderEntry::FreeCut { view, point, lsns } => {
            encode_free_cut(buffer, *view, *point, &lsns.iter().collect::<Vec<Lsn>>())
        }
        OrderEntry::ViewChange { view, shard } => encode_view_change(buffer, *view, *shard),
        OrderEntry::ShardChange(c) => {
            let members: Vec<_> = c.members.iter().collect();
            let head = ShardChangeHead {
                view: c.view,
                shard: c.shard,
                change: c.change,
                epoch: c.epoch,
                primary: c.primary,
                since_failure: c.since_failure,
            };
            encode_shard_change(buffer, head, &members)
        }
        OrderEntry::Decree(decree) => encode_decree(buffer, decree),
        OrderEntry::Trim { view, upto } => encode_trim(buffer, *view, *upto),
    }
}

fn ask(ledger: &Ledger) {
    let committed = ledger.committed();
    for position in [Position(0), committed, Position(committed.0 / 2), ledger.granted_end(), Position(u64::MAX)] {
        // Slots of a shard that was lost may be void there, and lie elsewhere since.
        let is_kept = |slot: &Slot| ledger.failed().all(|f| f.shard != slot.shard);
        if let Some(slot) = ledger.locate(position).filter(is_kept) {
            assert_eq!(ledger.position(slot.shard, slot.lsn), Some(position));
        }
    }
    for shard in ledger.members().iter().take(4).map(|m| m.shard).chain([ShardId(u16::MAX)]) {
        let (bound, granted) = (ledger.committed_lsn(shard), ledger.granted_lsn(shard));
        for lsn in [Lsn(0), bound, granted, Lsn(u64::MAX)] {
            let _ = (ledger.position_run(shard, lsn), ledger.cut_of(shard, lsn), ledger.point_reached(shard, lsn));
            let _ = (ledger.point_of(shard, lsn), ledger.run_length(shard, lsn, 100));
        }
        let _ = (ledger.first_lsn_at(shard, committed), ledger.lsn_at(shard, ledger.bound()), ledger.fixed_end(shard));
    }
    let _ = (ledger.granted_point(), ledger.next_free_point(), ledger.point_after(ledger.bound(), 3));
    // Who begins with a snapshot knows the same.
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let mut late = Ledger::at(ledger.applied_index(), ledger.snapshot_base(), ledger.view(), 16);
    ledger.snapshot(&mut buffer, |entry| {
        let entry = OrderEntry::decode(entry).expect("a snapshot holds entries");
        late.apply_snapshot(&entry).expect("a snapshot does not contradict itself");
    });
    assert_eq!(late.committed(), committed);
    assert_eq!(late.granted_end(), ledger.granted_end());
}

pub fn cluster_map(input: &[u8]) {
    if let Ok(map) = ClusterMap::decode(input) {
        assert_eq!(map.encode(), input);
    }
}

pub fn tcp_frame(input: &[u8]) {
    for bytes in input.as_chunks::<HEADER_BYTES>().0 {
        if let Ok(frame) = Frame::decode(bytes) {
            assert_eq!(&frame.encode(), bytes);
        }
    }
}

pub fn rdma_setup(input: &[u8]) {
    if let Ok(setup) = Setup::decode(input) {
        assert_eq!(setup.encode(), input);
    }
}

/// Capacity of a client's smallest ring, in bytes.
const RING_BYTES: usize = 4096;

/// Regions are memory maps, which take longer than all the rest.
struct RingMemory {
    incoming: Arc<Region>,
    staging: Arc<Region>,
}

thread_local! {
    static RING: RingMemory = RingMemory {
        incoming: Region::new(Ring::region_bytes(RING_BYTES)).expect("memory"),
        staging: Region::new(RING_BYTES).expect("memory"),
    };
}

/// A peer that writes what it likes into a ring, in steps.
pub fn ring(input: &[u8]) {
    RING.with(|memory| {
        let RingMemory { incoming, staging } = memory;
        incoming.put(0, &[0; Ring::region_bytes(RING_BYTES)]);
        let mut ring = Ring::new(incoming.clone(), staging.clone(), RegionKey(0), RING_BYTES, RING_BYTES);
        for part in super::parts(input).take(16) {
            let Some((at, bytes)) = part.split_first_chunk::<2>() else { continue };
            let at = usize::from(u16::from_le_bytes(*at)) % incoming.len();
            incoming.put(at, &bytes[..bytes.len().min(incoming.len() - at)]);
            // A ring holds no more messages than words.
            for _ in 0..=RING_BYTES / 8 {
                match ring.peek() {
                    Ok(Some(message)) => assert!(message.len() <= RING_BYTES),
                    Ok(None) => break,
                    Err(_) => return,
                }
                ring.consume();
            }
            let _ = (ring.push(&[b"message"]), ring.room(), ring.is_consumed());
            if ring.fault().is_some() {
                return;
            }
        }
    });
}

pub fn http(input: &[u8]) {
    match parse(input) {
        Parsed::Get { path } => assert!(path.starts_with('/') && path.bytes().all(|byte| byte.is_ascii_graphic())),
        // What comes next cannot make it less of an error.
        Parsed::Bad(status) => assert!([400, 405, 431].contains(&status)),
        Parsed::More => {}
    }
}
