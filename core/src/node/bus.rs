//! Messages between a gate and a shard of the same process, over two `spsc` queues, and the shard's published progress.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use antelog_protocol::wire::change::{ChangeOutcome, change_code, change_from, outcome_code, outcome_from};
use antelog_protocol::wire::session::{append_outcome_code, append_outcome_from, refusal_code, refusal_from};
use antelog_protocol::{Change, ClientId, Lsn, Outcome, Position, Refusal, ShardId};

use crate::channel::spsc::{Consumer, Producer};
use crate::log::LogReader;
use crate::node::gate::OldLog;
use crate::node::idle::Waker;

/// Bytes before the record in an append.
pub const APPEND_HEAD_BYTES: usize = 40;
/// Bytes of an answer to an append.
pub const ANSWER_BYTES: usize = 48;
/// Bytes before the entry in an order message.
pub const ORDER_HEAD_BYTES: usize = 16;

/// Gate to shard.
#[derive(Debug, PartialEq, Eq)]
pub enum ToShard<'a> {
    /// A client's append.
    Append {
        /// The session.
        client: ClientId,
        /// The gate's number of the session's connection, or of its newest attempt to append to this shard.
        connection: u32,
        /// The epoch in which the shard is served here, as the gate has checked it.
        epoch: u32,
        /// The session's number for it.
        seq: u64,
        /// The record.
        record: &'a [u8],
    },
    /// Ask the sequencer which order index makes a read current.
    ReadIndex {
        /// Chosen by the gate.
        token: u64,
    },
    /// Ask the sequencer for a change.
    Change {
        /// The session that asks.
        client: ClientId,
        /// The session's number for it.
        token: u64,
        /// What is to change.
        change: Change,
    },
    /// Ask what became of an append.
    Outcome {
        /// The session that asks.
        asker: ClientId,
        /// The session's number for it.
        token: u64,
        /// The session that appended.
        client: ClientId,
        /// Its number for the append.
        seq: u64,
    },
}

/// Shard to gate.
#[derive(Debug, PartialEq, Eq)]
pub enum ToGate<'a> {
    /// The append is bound.
    Acknowledged {
        /// The session.
        client: ClientId,
        /// The session's number for it.
        seq: u64,
        /// Where it is.
        position: Position,
    },
    /// The append was refused.
    Refused {
        /// The session.
        client: ClientId,
        /// The connection on which it was asked for: after a lost one the same append is asked for again, and the new
        /// connection must hear what became of that.
        connection: u32,
        /// The session's number for it.
        seq: u64,
        /// Why.
        refusal: Refusal,
    },
    /// The shard applied this entry of the order stream.
    Order {
        /// Its index.
        index: u64,
        /// Its bytes.
        entry: &'a [u8],
    },
    /// The order stream begins anew, with this many `SnapshotEntry` messages, and goes on behind `index`.
    Snapshot {
        /// Index of the last entry that the snapshot covers.
        index: u64,
        /// Positions below are bound.
        base: Position,
        /// The view.
        view: u32,
        /// Number of entries.
        entries: u32,
    },
    /// An entry of a snapshot.
    SnapshotEntry {
        /// Its bytes.
        entry: &'a [u8],
    },
    /// The answer to `ReadIndex`.
    ReadIndexIs {
        /// The question's token.
        token: u64,
        /// The index to apply before reading.
        index: u64,
    },
    /// The answer to `Change`.
    ChangeIs {
        /// The session that asked.
        client: ClientId,
        /// The session's number for it.
        token: u64,
        /// What became of it.
        outcome: ChangeOutcome,
    },
    /// The answer to `Outcome`.
    OutcomeIs {
        /// The session that asked.
        asker: ClientId,
        /// The session's number for it.
        token: u64,
        /// What became of the append.
        outcome: Outcome,
        /// The number that the shard expects of the appending session next.
        next_seq: u64,
    },
}

/// The head of an append message; the record follows it.
pub fn append_head(client: ClientId, connection: u32, epoch: u32, seq: u64) -> [u8; APPEND_HEAD_BYTES] {
    let mut head = [0; APPEND_HEAD_BYTES];
    head[0] = 1;
    head[4..8].copy_from_slice(&connection.to_le_bytes());
    head[8..24].copy_from_slice(&client.0.to_le_bytes());
    head[24..32].copy_from_slice(&seq.to_le_bytes());
    head[32..36].copy_from_slice(&epoch.to_le_bytes());
    head
}

/// A `ReadIndex` message.
pub fn read_index(token: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[0] = 2;
    bytes[8..].copy_from_slice(&token.to_le_bytes());
    bytes
}

/// A `Change` message.
pub fn change(client: ClientId, token: u64, change: Change) -> [u8; 40] {
    let (kind, detail) = change_code(change);
    let mut bytes = [0; 40];
    bytes[0] = 3;
    bytes[2..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..24].copy_from_slice(&client.0.to_le_bytes());
    bytes[24..32].copy_from_slice(&token.to_le_bytes());
    bytes[32..].copy_from_slice(&detail.to_le_bytes());
    bytes
}

/// An `Outcome` message.
pub fn outcome(asker: ClientId, token: u64, client: ClientId, seq: u64) -> [u8; 56] {
    let mut bytes = [0; 56];
    bytes[0] = 4;
    bytes[8..24].copy_from_slice(&asker.0.to_le_bytes());
    bytes[24..32].copy_from_slice(&token.to_le_bytes());
    bytes[32..48].copy_from_slice(&client.0.to_le_bytes());
    bytes[48..].copy_from_slice(&seq.to_le_bytes());
    bytes
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn client_at(bytes: &[u8], at: usize) -> ClientId {
    let mut word = [0; 16];
    word.copy_from_slice(&bytes[at..at + 16]);
    ClientId(u128::from_le_bytes(word))
}

/// Reads a message to the shard. The queue carries only this module's messages: anything else is a bug and panics.
pub fn to_shard(bytes: &[u8]) -> ToShard<'_> {
    match bytes[0] {
        1 => ToShard::Append {
            client: client_at(bytes, 8),
            connection: u32_at(bytes, 4),
            epoch: u32_at(bytes, 32),
            seq: u64_at(bytes, 24),
            record: &bytes[APPEND_HEAD_BYTES..],
        },
        2 => ToShard::ReadIndex { token: u64_at(bytes, 8) },
        3 => match change_from(u16_at(bytes, 2), u64_at(bytes, 32)) {
            Ok(change) => ToShard::Change { client: client_at(bytes, 8), token: u64_at(bytes, 24), change },
            Err(error) => unreachable!("a message to a shard asks for no change: {error}"),
        },
        4 => ToShard::Outcome {
            asker: client_at(bytes, 8),
            token: u64_at(bytes, 24),
            client: client_at(bytes, 32),
            seq: u64_at(bytes, 48),
        },
        tag => unreachable!("no message to a shard has the tag {tag}"),
    }
}

fn answer(tag: u8, code: u8, client: ClientId, seq: u64, detail: u64) -> [u8; ANSWER_BYTES] {
    let mut bytes = [0; ANSWER_BYTES];
    (bytes[0], bytes[1]) = (tag, code);
    bytes[8..24].copy_from_slice(&client.0.to_le_bytes());
    bytes[24..32].copy_from_slice(&seq.to_le_bytes());
    bytes[32..40].copy_from_slice(&detail.to_le_bytes());
    bytes
}

/// An `Acknowledged` message.
pub fn acknowledged(client: ClientId, seq: u64, position: Position) -> [u8; ANSWER_BYTES] {
    answer(1, 0, client, seq, position.0)
}

/// Stands for the connection of an append when the answer is for whichever attempt is the newest.
pub const ANY_CONNECTION: u32 = 0;

/// A `Refused` message.
pub fn refused(client: ClientId, connection: u32, seq: u64, refusal: Refusal) -> [u8; ANSWER_BYTES] {
    let (code, detail) = refusal_code(refusal);
    let mut bytes = answer(2, code as u8, client, seq, detail);
    bytes[4..8].copy_from_slice(&connection.to_le_bytes());
    bytes
}

/// The head of an order message; the entry follows it.
pub fn order_head(index: u64) -> [u8; ORDER_HEAD_BYTES] {
    let mut head = [0; ORDER_HEAD_BYTES];
    head[0] = 3;
    head[8..].copy_from_slice(&index.to_le_bytes());
    head
}

/// A `Snapshot` message.
pub fn snapshot(index: u64, base: Position, view: u32, entries: u32) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[0] = 6;
    bytes[4..8].copy_from_slice(&view.to_le_bytes());
    bytes[8..16].copy_from_slice(&index.to_le_bytes());
    bytes[16..24].copy_from_slice(&base.0.to_le_bytes());
    bytes[24..28].copy_from_slice(&entries.to_le_bytes());
    bytes
}

/// The head of a snapshot's entry; the entry follows it.
pub fn snapshot_entry() -> [u8; 8] {
    [7, 0, 0, 0, 0, 0, 0, 0]
}

/// A `ReadIndexIs` message.
pub fn read_index_is(token: u64, index: u64) -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[0] = 4;
    bytes[8..16].copy_from_slice(&token.to_le_bytes());
    bytes[16..].copy_from_slice(&index.to_le_bytes());
    bytes
}

/// A `ChangeIs` message.
pub fn change_is(client: ClientId, token: u64, outcome: ChangeOutcome) -> [u8; ANSWER_BYTES] {
    let (code, shard, index) = outcome_code(outcome);
    let mut bytes = answer(5, code as u8, client, token, index);
    bytes[2..4].copy_from_slice(&shard.to_le_bytes());
    bytes
}

/// An `OutcomeIs` message.
pub fn outcome_is(asker: ClientId, token: u64, outcome: Outcome, next_seq: u64) -> [u8; ANSWER_BYTES] {
    let (code, detail) = append_outcome_code(outcome);
    let mut bytes = answer(8, code, asker, token, detail);
    bytes[40..].copy_from_slice(&next_seq.to_le_bytes());
    bytes
}

/// Reads a message to the gate. The queue carries only this module's messages: anything else is a bug and panics.
pub fn to_gate(bytes: &[u8]) -> ToGate<'_> {
    match bytes[0] {
        1 => ToGate::Acknowledged {
            client: client_at(bytes, 8),
            seq: u64_at(bytes, 24),
            position: Position(u64_at(bytes, 32)),
        },
        2 => {
            let refusal = refusal_from(bytes[1].into(), u64_at(bytes, 32)).unwrap_or(Refusal::Failed);
            ToGate::Refused {
                client: client_at(bytes, 8),
                connection: u32_at(bytes, 4),
                seq: u64_at(bytes, 24),
                refusal,
            }
        }
        3 => ToGate::Order { index: u64_at(bytes, 8), entry: &bytes[ORDER_HEAD_BYTES..] },
        4 => ToGate::ReadIndexIs { token: u64_at(bytes, 8), index: u64_at(bytes, 16) },
        5 => match outcome_from(bytes[1].into(), u16_at(bytes, 2), u64_at(bytes, 32)) {
            Ok(outcome) => ToGate::ChangeIs { client: client_at(bytes, 8), token: u64_at(bytes, 24), outcome },
            Err(error) => unreachable!("a message to a gate says nothing of a change: {error}"),
        },
        6 => ToGate::Snapshot {
            index: u64_at(bytes, 8),
            base: Position(u64_at(bytes, 16)),
            view: u32_at(bytes, 4),
            entries: u32_at(bytes, 24),
        },
        7 => ToGate::SnapshotEntry { entry: &bytes[8..] },
        8 => ToGate::OutcomeIs {
            asker: client_at(bytes, 8),
            token: u64_at(bytes, 24),
            outcome: append_outcome_from(bytes[1], u64_at(bytes, 32)).unwrap_or(Outcome::Forgotten),
            next_seq: u64_at(bytes, 40),
        },
        tag => unreachable!("no message to a gate has the tag {tag}"),
    }
}

/// A shard's progress as its gate sees it. Written by the shard's thread only.
#[derive(Debug, Default)]
pub struct Progress {
    deliverable: AtomicU64,
    /// One more than the epoch in which the replica leads; 0 while it does not.
    serving: AtomicU64,
}

impl Progress {
    /// First slot that may not be delivered.
    #[inline]
    pub fn deliverable(&self) -> Lsn {
        Lsn(self.deliverable.load(Ordering::Acquire))
    }

    /// The epoch in which the replica leads its shard, so that its log may be delivered and appends taken.
    #[inline]
    pub fn serving(&self) -> Option<u32> {
        self.serving.load(Ordering::Acquire).checked_sub(1).map(|epoch| epoch as u32)
    }

    /// The replica leads its shard from now on, in this epoch, or does no more.
    pub fn set_serving(&self, epoch: Option<u32>) {
        self.serving.store(epoch.map_or(0, |epoch| u64::from(epoch) + 1), Ordering::Release);
    }

    /// Publishes the slot; entries below it are in the region.
    #[inline]
    pub fn set_deliverable(&self, lsn: Lsn) {
        self.deliverable.store(lsn.0, Ordering::Release);
    }
}

/// The gate's end of a shard.
#[derive(Debug)]
pub struct ShardPort {
    /// The shard.
    pub shard: ShardId,
    /// The replica's number in it.
    pub replica: u16,
    /// Its log.
    pub log: LogReader,
    /// How far it may be delivered.
    pub progress: Arc<Progress>,
    /// Appends go here.
    pub requests: Producer,
    /// Answers and the order stream come from here.
    pub answers: Consumer,
    /// The entries of its log that have left memory, if it is on disk: every reader of the gate asks there.
    pub old: Option<RefCell<OldLog>>,
}

/// The shard's end of its gate.
#[derive(Debug)]
pub struct GatePort {
    /// How far the gate may deliver.
    pub progress: Arc<Progress>,
    /// Appends come from here.
    pub requests: Consumer,
    /// Answers and the order stream go here.
    pub answers: Producer,
    /// Wakes the gate when the progress moved and nothing was said.
    pub waker: Waker,
    /// The gate follows the order stream through this replica.
    pub relays: bool,
}

/// Says something to the gate. Answers fit by construction: appends are taken only while there is room for theirs (L4). A
/// gate that has not drained megabytes of order entries hangs, and a node with a hung thread must stop.
pub fn tell(answers: &mut Producer, parts: &[&[u8]]) {
    assert!(answers.push(parts).is_ok(), "the gate's thread does not drain its queue");
}

#[cfg(test)]
mod tests {
    use antelog_protocol::ChangeError;

    use super::*;

    #[test]
    fn messages_come_back() {
        let client = ClientId(0xFEED_FACE_0123);
        let append = [&append_head(client, 0xAABB_CCDD, 5, 7)[..], b"xyz"].concat();
        let connection = 0xAABB_CCDD;
        assert_eq!(to_shard(&append), ToShard::Append { client, connection, epoch: 5, seq: 7, record: b"xyz" });
        assert_eq!(to_shard(&read_index(8)), ToShard::ReadIndex { token: 8 });
        let position = Position(99);
        assert_eq!(to_gate(&acknowledged(client, 7, position)), ToGate::Acknowledged { client, seq: 7, position });
        for refusal in [
            Refusal::Gap { expected: 3 },
            Refusal::UnknownSession,
            Refusal::Forgotten,
            Refusal::TooLarge { limit_bytes: 9 },
            Refusal::RegionFull { region_bytes: 10 },
            Refusal::NotHere,
            Refusal::Failed,
            Refusal::Closed { instead: ShardId(700) },
            Refusal::OldView { view: 9 },
            Refusal::Forbidden,
        ] {
            let connection = 0xAABB_CCDD;
            let said = ToGate::Refused { client, connection, seq: 7, refusal };
            assert_eq!(to_gate(&refused(client, connection, 7, refusal)), said);
        }
        let order = [&order_head(4)[..], &[1, 2]].concat();
        assert_eq!(to_gate(&order), ToGate::Order { index: 4, entry: &[1, 2] });
        let base = Position(77);
        let begun = ToGate::Snapshot { index: 3, base, view: 4, entries: 5 };
        assert_eq!(to_gate(&snapshot(3, base, 4, 5)), begun);
        assert_eq!(to_gate(&[&snapshot_entry()[..], &[8, 9]].concat()), ToGate::SnapshotEntry { entry: &[8, 9] });
        assert_eq!(to_gate(&read_index_is(1, 2)), ToGate::ReadIndexIs { token: 1, index: 2 });
        let asked = Change::Leave(ShardId(0x0102));
        assert_eq!(to_shard(&change(client, 8, asked)), ToShard::Change { client, token: 8, change: asked });
        let other = ClientId(5);
        let asked = ToShard::Outcome { asker: client, token: 8, client: other, seq: 9 };
        assert_eq!(to_shard(&outcome(client, 8, other, 9)), asked);
        for outcome in [Outcome::Bound(position), Outcome::NotInLog, Outcome::Forgotten, Outcome::NotHere] {
            let said = ToGate::OutcomeIs { asker: client, token: 8, outcome, next_seq: 3 };
            assert_eq!(to_gate(&outcome_is(client, 8, outcome, 3)), said);
        }
        for outcome in [Ok(7), Err(ChangeError::LastShard(ShardId(0x0102)))] {
            assert_eq!(to_gate(&change_is(client, 8, outcome)), ToGate::ChangeIs { client, token: 8, outcome });
        }
    }
}
