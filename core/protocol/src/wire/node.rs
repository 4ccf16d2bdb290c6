//! Messages between replicas and the sequencer. Each fits one transport `send`.

use super::change::{ChangeOutcome, change_code, change_from, outcome_code, outcome_from};
use super::{DecodeError, Reader, Writer};
use crate::types::{Change, ClientId, CutPoint, Lsn, Position, ReplicaId, ShardId};

/// Bytes that hold any node message but an order entry and [`NodeMessage::Fetched`].
pub const NODE_MESSAGE_BYTES_MAX: usize = 112;

/// Bytes before the entry in [`NodeMessage::Order`].
pub const ORDER_HEAD_BYTES: usize = 16;

/// Bytes before the log's in [`NodeMessage::Fetched`].
pub const FETCHED_HEAD_BYTES: usize = 24;

/// The cumulative state of one replica: the newest supersedes all earlier ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The shard.
    pub shard: ShardId,
    /// The replica within the shard: 0 is the first primary.
    pub replica: u16,
    /// Which life the replica is in.
    pub incarnation: u64,
    /// The replica serves as primary.
    pub primary: bool,
    /// The replica's epoch: of the newest change of its shard's members that it has applied.
    pub epoch: u32,
    /// That change's number.
    pub change: u32,
    /// Replicas of the shard that it has no connection to, by their numbers' bits. Its own: it is about to end, and whoever
    /// can is to take its place.
    pub lost: u8,
    /// A replica that holds everything and waits to become a member, as the primary knows it.
    pub joiner: Option<ReplicaId>,
    /// The replica's view.
    pub view: u32,
    /// Fixed windows: the last cut whose slots are all durable.
    pub point: CutPoint,
    /// First slot that is not durable: what a free window's cut takes.
    pub durable_lsn: Lsn,
    /// First slot that is not appended: what a closed shard still has to get rid of.
    pub appended_lsn: Lsn,
    /// First slot after the last record: what follows are no-ops.
    pub records_lsn: Lsn,
    /// The shard takes no appends.
    pub closed: bool,
    /// Records, without no-ops, ever appended.
    pub records: u64,
    /// Index of the last order entry applied: the order stream's credit.
    pub applied_index: u64,
    /// The member that this replica was in an earlier life, of which it keeps everything on disk that counted as durable.
    /// 0: none.
    pub succeeds: u64,
}

/// Sequencer to shard: bring the report up to this cut now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// The cut to reach; whole cuts only.
    pub point: CutPoint,
    /// Take no more appends until the window that begins at `point` is granted: the next grant says how it goes on. Void
    /// once that window is granted.
    pub close: bool,
    /// How long before targets are expected the shard should be done with its cuts, in nanoseconds: as long as its
    /// answers to targets took lately. 0: they took no time to speak of.
    pub lead_ns: u32,
}

/// A message between a replica and the sequencer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeMessage<'a> {
    /// Replica to sequencer.
    Report(Report),
    /// Sequencer to primary.
    Target(Target),
    /// Sequencer to replica: the order stream, in index order.
    Order {
        /// Index in the order log, from 1.
        index: u64,
        /// The entry's bytes, see [`OrderEntry::decode`](super::order::OrderEntry::decode).
        entry: &'a [u8],
    },
    /// Replica to sequencer: which index must be applied before a read is current?
    ReadIndex {
        /// Chosen by the replica.
        token: u64,
    },
    /// The answer to `ReadIndex`.
    ReadIndexIs {
        /// The question's token.
        token: u64,
        /// The newest committed index when the question arrived.
        index: u64,
    },
    /// Replica to sequencer: an operator asks for a change. Asked again with the same client and token, it is answered again
    /// and not made twice.
    Change {
        /// The session that asks.
        client: ClientId,
        /// The session's number for it.
        token: u64,
        /// What is to change.
        change: Change,
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
    /// Sequencer to replica: this member leads since this term. Questions and changes go to who leads in the highest term.
    Lead {
        /// The term.
        term: u64,
    },
    /// Sequencer to a replica that is too far behind of the order stream: what follows begins anew, with this many
    /// `SnapshotEntry` messages, and then goes on behind `index`.
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
        /// The entry's bytes.
        entry: &'a [u8],
    },
    /// Replica to replica of the same shard, first on every connection.
    Greeting(Greeting),
    /// Primary to a replica that is no member: take my log from here on. Nothing is written before `Started` answers it.
    Start(Place),
    /// The answer to `Start`.
    Started(Place),
    /// New primary to the other members: nothing of an older epoch may be written to you any more, and your log ends where
    /// mine does.
    Fence(Place),
    /// The answer to `Fence`: it is so; the log is good up to this place.
    Fenced(Place),
    /// Primary to a replica that joins: a session of the duplicate table as of the place where it starts.
    Session {
        /// The session.
        client: ClientId,
        /// Its next number.
        next_seq: u64,
        /// The slot of its last record.
        last_lsn: Lsn,
    },
    /// Replica to replica: my disk has lost what follows this place; give me whole entries from there on, as many as you
    /// like and are bound, that end at this offset or before.
    Fetch {
        /// Where they begin.
        before: Place,
        /// Absolute offset in bytes.
        until_bytes: u64,
    },
    /// The answer to `Fetch`, in as many messages as it takes, in order. An empty one: nothing is here.
    Fetched {
        /// Absolute offset of the first byte.
        at_bytes: u64,
        /// Bytes of the answer that follow in further messages.
        left_bytes: u64,
        /// Bytes of the log.
        bytes: &'a [u8],
    },
}

/// What replicas of a shard tell each other when they meet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Greeting {
    /// Which life the sender is in.
    pub incarnation: u64,
    /// The newest epoch it knows.
    pub epoch: u32,
    /// Up to here its log holds nothing but what is bound: where it could begin to follow.
    pub bound: Place,
}

/// A place in a shard's log: where an entry ends and the next begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The epoch of the sender, or of the entry before.
    pub epoch: u32,
    /// CRC of the entry before: what the next one's is seeded with.
    pub crc: u32,
    /// Absolute offset in bytes.
    pub at_bytes: u64,
    /// Slot of the next entry.
    pub lsn: Lsn,
}

impl Place {
    fn encode(&self, w: &mut Writer<'_>) {
        w.u32(self.epoch).u32(self.crc).u64(self.at_bytes).u64(self.lsn.0);
    }

    fn decode(r: &mut Reader<'_>) -> Result<Place, DecodeError> {
        Ok(Place { epoch: r.u32()?, crc: r.u32()?, at_bytes: r.u64()?, lsn: Lsn(r.u64()?) })
    }
}

impl<'a> NodeMessage<'a> {
    /// Writes the message; returns its length.
    pub fn encode(&self, buffer: &mut [u8]) -> usize {
        let mut w = Writer::new(buffer);
        match self {
            NodeMessage::Report(report) => {
                let flags =
                    u8::from(report.closed) | u8::from(report.primary) << 1 | u8::from(report.joiner.is_some()) << 2;
                let joiner = report.joiner.unwrap_or_default();
                w.u8(1).u8(flags).u16(report.shard.0).u16(report.replica).u16(report.point.prefix);
                w.u32(report.epoch).u32(report.view).u64(report.point.window).u32(report.point.cut).u32(report.change);
                w.u64(report.incarnation).u64(joiner.incarnation).u16(joiner.number).u8(report.lost).u8(0).u32(0);
                w.u64(report.durable_lsn.0)
                    .u64(report.appended_lsn.0)
                    .u64(report.records_lsn.0)
                    .u64(report.records)
                    .u64(report.applied_index)
                    .u64(report.succeeds);
            }
            NodeMessage::Target(target) => {
                w.u8(2).u8(target.close.into()).u16(target.point.prefix).u32(target.point.cut).u64(target.point.window);
                w.u32(target.lead_ns).u32(0);
            }
            NodeMessage::Order { index, entry } => {
                w.u64(3).u64(*index).bytes(entry);
            }
            NodeMessage::ReadIndex { token } => {
                w.u64(4).u64(*token);
            }
            NodeMessage::ReadIndexIs { token, index } => {
                w.u64(5).u64(*token).u64(*index);
            }
            NodeMessage::Change { client, token, change } => {
                let (kind, detail) = change_code(*change);
                w.u8(6).u8(0).u16(kind).u32(0).u64(*token).u128(client.0).u64(detail);
            }
            NodeMessage::ChangeIs { client, token, outcome } => {
                let (code, shard, index) = outcome_code(*outcome);
                w.u8(7).u8(0).u16(code).u16(shard).u16(0).u64(*token).u128(client.0).u64(index);
            }
            NodeMessage::Lead { term } => {
                w.u64(8).u64(*term);
            }
            NodeMessage::Snapshot { index, base, view, entries } => {
                w.u64(9).u64(*index).u64(base.0).u32(*view).u32(*entries);
            }
            NodeMessage::SnapshotEntry { entry } => {
                w.u64(10).bytes(entry);
            }
            NodeMessage::Greeting(greeting) => {
                w.u64(11).u64(greeting.incarnation).u64(greeting.epoch.into());
                greeting.bound.encode(&mut w);
            }
            NodeMessage::Start(place) => place.encode(w.u64(12)),
            NodeMessage::Started(place) => place.encode(w.u64(13)),
            NodeMessage::Fence(place) => place.encode(w.u64(14)),
            NodeMessage::Fenced(place) => place.encode(w.u64(15)),
            NodeMessage::Session { client, next_seq, last_lsn } => {
                w.u64(16).u128(client.0).u64(*next_seq).u64(last_lsn.0);
            }
            NodeMessage::Fetch { before, until_bytes } => {
                before.encode(w.u64(17));
                w.u64(*until_bytes);
            }
            NodeMessage::Fetched { at_bytes, left_bytes, bytes } => {
                w.u64(18).u64(*at_bytes).u64(*left_bytes).bytes(bytes);
            }
        }
        w.len()
    }

    /// Reads a message.
    ///
    /// # Errors
    /// When the bytes are not exactly one valid message.
    pub fn decode(bytes: &'a [u8]) -> Result<NodeMessage<'a>, DecodeError> {
        let mut r = Reader::new(bytes);
        let message = match r.u8()? {
            1 => NodeMessage::Report(decode_report(&mut r)?),
            2 => {
                let close = flag(r.u8()?)?;
                let (prefix, cut, window) = (r.u16()?, r.u32()?, r.u64()?);
                let lead_ns = r.u32()?;
                reserved(r.u32()?.into())?;
                NodeMessage::Target(Target { point: CutPoint { window, cut, prefix }, close, lead_ns })
            }
            tag @ (3..=5 | 8..=18) => {
                if r.bytes(7)?.iter().any(|b| *b != 0) {
                    return Err(DecodeError::Value("reserved"));
                }
                match tag {
                    3 => NodeMessage::Order { index: r.u64()?, entry: r.rest() },
                    4 => NodeMessage::ReadIndex { token: r.u64()? },
                    5 => NodeMessage::ReadIndexIs { token: r.u64()?, index: r.u64()? },
                    8 => NodeMessage::Lead { term: r.u64()? },
                    9 => NodeMessage::Snapshot {
                        index: r.u64()?,
                        base: Position(r.u64()?),
                        view: r.u32()?,
                        entries: r.u32()?,
                    },
                    10 => NodeMessage::SnapshotEntry { entry: r.rest() },
                    11 => {
                        let (incarnation, epoch) = (r.u64()?, r.u64()?);
                        let epoch = u32::try_from(epoch).map_err(|_| DecodeError::Value("epoch"))?;
                        NodeMessage::Greeting(Greeting { incarnation, epoch, bound: Place::decode(&mut r)? })
                    }
                    12 => NodeMessage::Start(Place::decode(&mut r)?),
                    13 => NodeMessage::Started(Place::decode(&mut r)?),
                    14 => NodeMessage::Fence(Place::decode(&mut r)?),
                    15 => NodeMessage::Fenced(Place::decode(&mut r)?),
                    16 => NodeMessage::Session {
                        client: ClientId(r.u128()?),
                        next_seq: r.u64()?,
                        last_lsn: Lsn(r.u64()?),
                    },
                    17 => NodeMessage::Fetch { before: Place::decode(&mut r)?, until_bytes: r.u64()? },
                    _ => NodeMessage::Fetched { at_bytes: r.u64()?, left_bytes: r.u64()?, bytes: r.rest() },
                }
            }
            6 => {
                reserved(r.u8()?.into())?;
                let kind = r.u16()?;
                reserved(r.u32()?.into())?;
                let (token, client) = (r.u64()?, ClientId(r.u128()?));
                NodeMessage::Change { token, client, change: change_from(kind, r.u64()?)? }
            }
            7 => {
                reserved(r.u8()?.into())?;
                let (code, shard) = (r.u16()?, r.u16()?);
                reserved(r.u16()?.into())?;
                let (token, client) = (r.u64()?, ClientId(r.u128()?));
                NodeMessage::ChangeIs { client, token, outcome: outcome_from(code, shard, r.u64()?)? }
            }
            tag => return Err(DecodeError::Tag(tag)),
        };
        r.finish()?;
        Ok(message)
    }
}

fn decode_report(r: &mut Reader<'_>) -> Result<Report, DecodeError> {
    let flags = r.u8()?;
    let (shard, replica, prefix) = (ShardId(r.u16()?), r.u16()?, r.u16()?);
    let (epoch, view, window, cut, change) = (r.u32()?, r.u32()?, r.u64()?, r.u32()?, r.u32()?);
    let (incarnation, joining, number, lost) = (r.u64()?, r.u64()?, r.u16()?, r.u8()?);
    if flags > 7 || (flags & 4 == 0 && (joining, number) != (0, 0)) {
        return Err(DecodeError::Value("flag"));
    }
    reserved(u64::from(r.u8()?) + u64::from(r.u32()?))?;
    Ok(Report {
        incarnation,
        primary: flags & 2 != 0,
        change,
        lost,
        joiner: (flags & 4 != 0).then_some(ReplicaId { number, incarnation: joining }),
        closed: flags & 1 != 0,
        shard,
        replica,
        epoch,
        view,
        point: CutPoint { window, cut, prefix },
        durable_lsn: Lsn(r.u64()?),
        appended_lsn: Lsn(r.u64()?),
        records_lsn: Lsn(r.u64()?),
        records: r.u64()?,
        applied_index: r.u64()?,
        succeeds: r.u64()?,
    })
}

fn flag(value: u8) -> Result<bool, DecodeError> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(DecodeError::Value("flag")),
    }
}

fn reserved(value: u64) -> Result<(), DecodeError> {
    if value == 0 { Ok(()) } else { Err(DecodeError::Value("reserved")) }
}

#[cfg(test)]
mod tests {
    use super::super::change::tests::{CHANGES, OUTCOMES};
    use super::*;

    const PLACE: Place = Place { epoch: 1, crc: 2, at_bytes: 3, lsn: Lsn(4) };

    #[test]
    fn messages_come_back_and_prefixes_are_refused() {
        let report = Report {
            shard: ShardId(1),
            replica: 2,
            epoch: 3,
            view: 4,
            point: CutPoint { window: 5, cut: 6, prefix: 0 },
            durable_lsn: Lsn(7),
            appended_lsn: Lsn(10),
            records_lsn: Lsn(8),
            incarnation: 11,
            primary: true,
            change: 12,
            lost: 5,
            joiner: Some(ReplicaId { number: 3, incarnation: u64::MAX }),
            closed: true,
            records: 8,
            applied_index: 9,
            succeeds: 21,
        };
        let target = Target { point: CutPoint { window: 1, cut: 2, prefix: 0 }, close: true, lead_ns: 5 };
        let (client, token) = (ClientId(u128::MAX - 5), 11);
        let changes = CHANGES.map(|change| NodeMessage::Change { client, token, change });
        let outcomes = OUTCOMES.map(|outcome| NodeMessage::ChangeIs { client, token, outcome });
        let others = [
            NodeMessage::Report(report),
            NodeMessage::Target(target),
            NodeMessage::Order { index: 3, entry: &[1, 2, 3] },
            NodeMessage::ReadIndex { token: 4 },
            NodeMessage::ReadIndexIs { token: 4, index: 5 },
            NodeMessage::Lead { term: 6 },
            NodeMessage::Snapshot { index: 7, base: Position(8), view: 9, entries: 10 },
            NodeMessage::SnapshotEntry { entry: &[4, 5] },
            NodeMessage::Greeting(Greeting { incarnation: 12, epoch: 13, bound: PLACE }),
            NodeMessage::Start(PLACE),
            NodeMessage::Started(PLACE),
            NodeMessage::Fence(PLACE),
            NodeMessage::Fenced(PLACE),
            NodeMessage::Session { client, next_seq: 14, last_lsn: Lsn(15) },
            NodeMessage::Fetch { before: PLACE, until_bytes: 16 },
            NodeMessage::Fetched { at_bytes: 17, left_bytes: 18, bytes: &[6, 7, 8] },
        ];
        for message in others.into_iter().chain(changes).chain(outcomes) {
            let mut buffer = [0; NODE_MESSAGE_BYTES_MAX];
            let len = message.encode(&mut buffer);
            assert_eq!(NodeMessage::decode(&buffer[..len]), Ok(message));
            let fixed = match message {
                NodeMessage::Order { .. } => ORDER_HEAD_BYTES,
                NodeMessage::SnapshotEntry { .. } => 8,
                NodeMessage::Fetched { .. } => FETCHED_HEAD_BYTES,
                _ => len,
            };
            for end in 0..fixed {
                assert!(NodeMessage::decode(&buffer[..end]).is_err());
            }
        }
        assert_eq!(NodeMessage::decode(&[99]), Err(DecodeError::Tag(99)));
    }
}
