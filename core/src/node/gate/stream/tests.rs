//! What a stream delivers, of logs and ledgers made by hand.

use std::sync::Arc;

use antelog_protocol::ledger::grant_head;
use antelog_protocol::wire::node::Place;
use antelog_protocol::wire::order::{
    ORDER_ENTRY_BYTES_MAX, OrderEntry, encode_cut, encode_free_cut, encode_grant, encode_view_change,
};
use antelog_protocol::{ClientId, CutPoint, Member, ShardId, WindowMode};

use super::*;
use crate::channel::spsc;
use crate::log::{LogOptions, LogWriter, Retention, Verifier};
use crate::mem::Region;
use crate::node::Waker;
use crate::node::bus::Progress;
use crate::transport::RegionKey;

const SHARD: ShardId = ShardId(0);

fn port(log: &LogWriter) -> ShardPort {
    let (requests, _) = spsc::channel(4096, Waker::none()).unwrap();
    let (_, answers) = spsc::channel(4096, Waker::none()).unwrap();
    ShardPort {
        shard: SHARD,
        replica: 0,
        log: log.reader(),
        progress: Arc::new(Progress::default()),
        requests,
        answers,
        old: None,
    }
}

fn apply(ledger: &mut Ledger, encode: impl FnOnce(&mut [u8]) -> usize) {
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let len = encode(&mut buffer);
    ledger.apply(ledger.applied_index() + 1, &OrderEntry::decode(&buffer[..len]).unwrap()).unwrap();
}

fn granted(mode: WindowMode, cuts: u32, quota: u32) -> Ledger {
    let mut ledger = Ledger::new(1);
    let head = grant_head(0, mode, 0, cuts, Position(0));
    apply(&mut ledger, |b| encode_grant(b, head, &[Member { shard: SHARD, quota, first_lsn: Lsn(0), open: true }]));
    ledger
}

fn log(region_bytes: usize) -> LogWriter {
    let options = LogOptions { retention: Retention::Recycle, record_bytes_max: 960 };
    LogWriter::new(Region::new(region_bytes).unwrap(), SHARD, 0, options)
}

/// What was put into a ring's staging region from an offset on, as `name lsn@position+count`, and where it ends.
fn told(staging: &Region, mut at: usize) -> (Vec<String>, usize) {
    let mut said = Vec::new();
    loop {
        let mut len = [0; 4];
        staging.get(at, &mut len);
        let mut message = vec![0; u32::from_le_bytes(len) as usize];
        if message.is_empty() {
            return (said, at);
        }
        staging.get(at + 8, &mut message);
        at += 8 + message.len().next_multiple_of(8);
        said.push(match Reply::decode(&message).unwrap() {
            Reply::Deliver { lsn, position, .. } => format!("record {lsn}@{position}"),
            Reply::Decreed { lsn, position, count, .. } => format!("void {lsn}@{position}+{count}"),
            Reply::Unavailable { lsn, position, count, .. } => format!("missing {lsn}@{position}+{count}"),
            other => panic!("{other:?}"),
        });
    }
}

#[test]
fn a_lost_shard_is_told_as_missing_and_void_and_goes_on_behind_when_it_has_returned_without_memory() {
    // Two slots a cut, four cuts; slots 0 and 1 are bound when the shard is lost.
    let mut ledger = granted(WindowMode::Fixed, 4, 2);
    apply(&mut ledger, |b| encode_cut(b, 0, CutPoint { window: 0, cut: 1, prefix: 0 }));
    apply(&mut ledger, |b| encode_view_change(b, 1, SHARD));
    let (incoming, staging) = (Region::new(8192).unwrap(), Region::new(4096).unwrap());
    let mut ring = Ring::new(incoming, staging.clone(), RegionKey(0), 4096, 4096);
    let mut stream = Stream::new((1, SHARD), (Position(1), 0), 1 << 20, &ledger);
    let (_, end) = deliver_lost(&mut stream, &ledger, &mut ring);
    assert!(matches!(end, Delivery::Caught), "{end:?}");
    let (said, at) = told(&staging, 0);
    assert_eq!(said, ["missing 1@1+1", "void 2@2+2", "void 2@4+2", "void 2@6+2"]);
    let (delivered, _) = deliver_lost(&mut stream, &ledger, &mut ring);
    assert_eq!(delivered.messages, 0, "once");
    // It returns with an empty log.
    let head = grant_head(1, WindowMode::Fixed, 1, 4, Position(8));
    let member = Member { shard: SHARD, quota: 1, first_lsn: Lsn(2), open: true };
    apply(&mut ledger, |b| encode_grant(b, head, &[member]));
    let mut verifier = Verifier::new(Region::new(256 << 10).unwrap(), SHARD);
    verifier.restart(Place { lsn: Lsn(2), ..verifier.place() });
    let options = LogOptions { retention: Retention::Recycle, record_bytes_max: 960 };
    let mut log = LogWriter::take_over(verifier, 2, options);
    let port = port(&log);
    assert_eq!(missing_below(&port, &ledger), Lsn(2));
    log.record(ClientId(1), 0, b"record");
    assert_eq!(missing_below(&port, &ledger), Lsn(2));
    let source = Source { port: &port, epoch: None, deliverable: Lsn(3) };
    let (delivered, _) = deliver(&mut stream, &source, &ledger, &mut ring);
    assert_eq!(delivered.records, 1);
    let (said, at) = told(&staging, at);
    assert_eq!(said, ["record 2@8"]);
    let mut other = Stream::new((2, SHARD), (Position(0), 0), 1 << 20, &ledger);
    deliver(&mut other, &source, &ledger, &mut ring);
    let expected = ["missing 0@0+2", "void 2@2+2", "void 2@4+2", "void 2@6+2", "record 2@8"];
    assert_eq!(told(&staging, at).0, expected);
}

#[test]
fn a_stream_waits_for_failures_that_its_client_knows_of_and_does_not_go_back_for_them() {
    // Two slots a cut, four cuts; slots 0 and 1 are bound, and the client has passed what is void.
    let mut ledger = granted(WindowMode::Fixed, 4, 2);
    apply(&mut ledger, |b| encode_cut(b, 0, CutPoint { window: 0, cut: 1, prefix: 0 }));
    let mut log = log(256 << 10);
    for seq in 0..8 {
        log.record(ClientId(1), seq, b"record");
    }
    let (incoming, staging) = (Region::new(8192).unwrap(), Region::new(4096).unwrap());
    let mut ring = Ring::new(incoming, staging.clone(), RegionKey(0), 4096, 4096);
    let mut stream = Stream::new((1, SHARD), (Position(6), 1), 1 << 20, &ledger);
    let port = port(&log);
    let source = Source { port: &port, epoch: None, deliverable: Lsn(8) };
    assert_eq!(deliver(&mut stream, &source, &ledger, &mut ring).0.messages, 0, "the shard was lost since");
    apply(&mut ledger, |b| encode_view_change(b, 1, SHARD));
    deliver_lost(&mut stream, &ledger, &mut ring);
    assert_eq!(told(&staging, 0).0, ["void 2@6+2"]);
}

#[test]
fn a_log_that_dropped_everything_bound_begins_behind_the_grants() {
    let mut ledger = granted(WindowMode::Fixed, 1, 64);
    apply(&mut ledger, |b| encode_cut(b, 0, CutPoint { window: 1, cut: 0, prefix: 0 }));
    let mut log = log(256 << 10);
    log.set_limits(Lsn(64), u64::MAX, u64::MAX);
    // Entries of 1 KiB: the first block holds exactly the 64 slots that are bound.
    for seq in 0..250 {
        log.make_room(960).unwrap();
        log.record(ClientId(1), seq, &[0; 960]);
    }
    let port = port(&log);
    assert_eq!(port.log.first().unwrap().lsn, Lsn(64));
    assert_eq!(log_head(&port, &ledger), Position(64));
}

#[test]
fn a_stream_whose_next_position_is_forgotten_is_trimmed() {
    let mut ledger = granted(WindowMode::Free, 10, 0);
    for cut in 1..=3 {
        let point = CutPoint { window: 0, cut, prefix: 0 };
        apply(&mut ledger, |b| encode_free_cut(b, 0, point, &[Lsn(cut.into())]));
    }
    let mut log = log(256 << 10);
    for seq in 0..3 {
        log.record(ClientId(1), seq, b"record");
    }
    let port = port(&log);
    let (incoming, staging) = (Region::new(8192).unwrap(), Region::new(4096).unwrap());
    let mut ring = Ring::new(incoming, staging, RegionKey(0), 4096, 4096);
    let mut stream = Stream::new((1, SHARD), (Position(0), 0), 1 << 20, &ledger);
    stream.cursor = Some(port.log.first().unwrap());
    let source = Source { port: &port, epoch: None, deliverable: Lsn(3) };
    let (_, end) = deliver(&mut stream, &source, &ledger, &mut ring);
    assert!(matches!(end, Delivery::Trimmed { head: Position(2) }), "{end:?}");
    stream.cursor = Some(port.log.seek(Lsn(2)).unwrap());
    let (delivered, end) = deliver(&mut stream, &source, &ledger, &mut ring);
    assert!(matches!(end, Delivery::Caught) && delivered.records == 1, "{end:?}");
}
