//! One stream: a subscriber's cursor in one shard's log, delivered as far as the shard, its credit and the ring allow.

use antelog_protocol::ledger::Ledger;
use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::wire::session::{Reply, SESSION_HEAD_BYTES_MAX, stream_bytes};
use antelog_protocol::{Lsn, Position, ShardId};

use crate::channel::Ring;
use crate::log::{Cursor, Item, Overrun};
use crate::node::bus::ShardPort;
use crate::transport::Full;

/// Messages one stream may take of a cycle, so that a reader of old records does not hold up the tail of others.
const MESSAGES_PER_CYCLE: usize = 128;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) id: u32,
    pub(super) port: usize,
    from: Position,
    /// Unknown until windows up to `from` are known.
    cursor: Option<Cursor>,
    credit_bytes: u64,
    consumed: u64,
    sent: u64,
}

/// Why delivery stopped.
#[derive(Debug)]
pub(super) enum Delivery {
    /// Nothing more may be delivered now.
    Caught,
    /// The cycle's share is used up; there is more.
    More,
    /// The client's ring has no room.
    RingFull,
    /// The next slot is no longer kept.
    Trimmed { head: Position },
    /// A record was overwritten while it was being copied.
    Overrun,
}

/// What a call delivered.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Delivered {
    pub(super) messages: usize,
    pub(super) records: u64,
}

impl Stream {
    pub(super) fn new(id: u32, port: usize, from: Position, credit_bytes: u64) -> Stream {
        Stream { id, port, from, cursor: None, credit_bytes, consumed: 0, sent: 0 }
    }

    pub(super) fn on_consumed(&mut self, bytes: u64) -> Result<(), String> {
        if bytes < self.consumed || bytes > self.sent {
            return Err(format!("it says it consumed {bytes} bytes of stream {}, {} were sent", self.id, self.sent));
        }
        self.consumed = bytes;
        Ok(())
    }

    fn has_credit(&self, bytes: u64) -> bool {
        self.sent - self.consumed + bytes <= self.credit_bytes
    }
}

/// Position of the first slot that a port's log keeps.
pub(super) fn log_head(port: &ShardPort, ledger: &Ledger) -> Position {
    let first = loop {
        // An error means that the head moved just now.
        if let Ok(first) = port.log.first() {
            break first.lsn;
        }
    };
    match ledger.position(port.shard, first) {
        Some(position) => position.max(ledger.first_known()),
        None if first < ledger.committed_lsn(port.shard) => ledger.first_known(),
        // Everything bound was dropped: what is kept has its place behind all that is granted.
        None => ledger.granted_end(),
    }
}

/// Delivers what may be delivered.
pub(super) fn deliver(
    stream: &mut Stream,
    port: &ShardPort,
    deliverable: Lsn,
    ledger: &Ledger,
    ring: &mut Ring,
) -> (Delivered, Delivery) {
    let mut delivered = Delivered::default();
    let trimmed = || Delivery::Trimmed { head: log_head(port, ledger) };
    let mut cursor = match stream.cursor.map_or_else(|| find(stream, port, ledger), |c| Ok(Some(c))) {
        Ok(Some(cursor)) => cursor,
        Ok(None) => return (delivered, Delivery::Caught),
        Err(Overrun) => return (delivered, trimmed()),
    };
    // The cursor's position, and how many slots from it on have consecutive ones.
    let (mut position, mut run) = (Position(0), 0);
    let end = loop {
        if cursor.lsn >= deliverable {
            break Delivery::Caught;
        }
        if delivered.messages == MESSAGES_PER_CYCLE {
            break Delivery::More;
        }
        if run == 0 {
            let Some(found) = position_run(ledger, port.shard, cursor.lsn) else {
                // Bound so long ago that the ledger has forgotten where; or, I13, without a grant to speculate with.
                break if cursor.lsn < ledger.committed_lsn(port.shard) { trimmed() } else { Delivery::Caught };
            };
            (position, run) = found;
        }
        let Ok(item) = item(port, &mut cursor) else { break trimmed() };
        let mut head = [0; SESSION_HEAD_BYTES_MAX];
        match item {
            Item::Record { header, offset } => {
                let bytes = stream_bytes(header.length as usize);
                if !stream.has_credit(bytes) {
                    break Delivery::Caught;
                }
                let reply = Reply::Deliver {
                    stream: stream.id,
                    lsn: cursor.lsn,
                    position,
                    view: ledger.view(),
                    speculative: position >= ledger.committed(),
                    client: header.client,
                    seq: header.seq,
                    record: &[],
                };
                let (len, _) = reply.encode(&mut head);
                if ring.push_from(&head[..len], port.log.region(), offset, header.length as usize).is_err() {
                    break Delivery::RingFull;
                }
                if port.log.check(cursor.at).is_err() {
                    break Delivery::Overrun;
                }
                stream.sent += bytes;
                cursor = Cursor { at: cursor.at + header.span_bytes() as u64, lsn: cursor.lsn.plus(1) };
                (position, run) = (position.plus(1), run - 1);
                delivered.records += 1;
            }
            Item::NoOps { count } => {
                if !stream.has_credit(stream_bytes(0)) {
                    break Delivery::Caught;
                }
                let most = count.min(deliverable.0 - cursor.lsn.0);
                let Ok(passed) = no_ops(stream.id, port.shard, (cursor.lsn, position), most, ledger, ring) else {
                    break Delivery::RingFull;
                };
                stream.sent += stream_bytes(0);
                cursor.lsn = cursor.lsn.plus(passed);
                run = 0;
            }
        }
        delivered.messages += 1;
    };
    stream.cursor = Some(cursor);
    (delivered, end)
}

fn position_run(ledger: &Ledger, shard: ShardId, lsn: Lsn) -> Option<(Position, u64)> {
    let found = ledger.position_run(shard, lsn);
    if found.is_none() && planted(Mutant::SpeculateWithoutAGrant) {
        let ahead = lsn.0.checked_sub(ledger.granted_lsn(shard).0)?;
        return Some((ledger.granted_end().plus(ahead), 1));
    }
    found
}

/// What is at a cursor whose slot may be delivered.
fn item(port: &ShardPort, cursor: &mut Cursor) -> Result<Item, Overrun> {
    if port.log.check(cursor.at).is_err() && !planted(Mutant::DeliverOverwritten) {
        // A cursor that waited for its slot may stand at an entry that is gone while the slot itself is there.
        *cursor = port.log.seek(cursor.lsn)?;
    }
    port.log.item(cursor)
}

/// Delivers slots without records, at most `most`, as far as they have consecutive positions; returns how many.
fn no_ops(
    stream: u32,
    shard: ShardId,
    (lsn, position): (Lsn, Position),
    most: u64,
    ledger: &Ledger,
    ring: &mut Ring,
) -> Result<u64, Full> {
    let count = u32::try_from(ledger.run_length(shard, lsn, most)).unwrap_or(u32::MAX);
    let mut head = [0; SESSION_HEAD_BYTES_MAX];
    let (len, _) = Reply::NoOps { stream, lsn, position, count, view: ledger.view() }.encode(&mut head);
    ring.push(&[&head[..len]])?;
    Ok(count.into())
}

/// Where the stream begins; `None` until windows up to its position are known.
fn find(stream: &Stream, port: &ShardPort, ledger: &Ledger) -> Result<Option<Cursor>, Overrun> {
    if stream.from < ledger.first_known() {
        return Err(Overrun);
    }
    ledger.first_lsn_at(port.shard, stream.from).map(|lsn| port.log.seek(lsn)).transpose()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use antelog_protocol::ledger::grant_head;
    use antelog_protocol::wire::order::{ORDER_ENTRY_BYTES_MAX, OrderEntry, encode_cut, encode_free_cut, encode_grant};
    use antelog_protocol::{ClientId, CutPoint, Member, ShardId, WindowMode};

    use super::*;
    use crate::channel::spsc;
    use crate::log::{LogOptions, LogWriter, Retention};
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

    #[test]
    fn a_log_that_dropped_everything_bound_begins_behind_the_grants() {
        let mut ledger = granted(WindowMode::Fixed, 1, 64);
        apply(&mut ledger, |b| encode_cut(b, 0, CutPoint { window: 1, cut: 0, prefix: 0 }));
        let mut log = log(256 << 10);
        log.set_limits(Lsn(64), u64::MAX);
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
        let mut stream = Stream::new(1, 0, Position(0), 1 << 20);
        stream.cursor = Some(port.log.first().unwrap());
        let (_, end) = deliver(&mut stream, &port, Lsn(3), &ledger, &mut ring);
        assert!(matches!(end, Delivery::Trimmed { head: Position(2) }), "{end:?}");
        stream.cursor = Some(port.log.seek(Lsn(2)).unwrap());
        let (delivered, end) = deliver(&mut stream, &port, Lsn(3), &ledger, &mut ring);
        assert!(matches!(end, Delivery::Caught) && delivered.records == 1, "{end:?}");
    }
}
