//! Messages between replicas and the sequencer. Each fits one transport `send`.

use super::change::{ChangeOutcome, change_code, change_from, outcome_code, outcome_from};
use super::{DecodeError, Reader, Writer};
use crate::types::{Change, ClientId, CutPoint, Lsn, ShardId};

/// Bytes that hold any node message but an order entry.
pub const NODE_MESSAGE_BYTES_MAX: usize = 80;

/// Bytes before the entry in [`NodeMessage::Order`].
pub const ORDER_HEAD_BYTES: usize = 16;

/// The cumulative state of one replica: the newest supersedes all earlier ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The shard.
    pub shard: ShardId,
    /// The replica within the shard: 0 is the first primary.
    pub replica: u16,
    /// The replica's epoch.
    pub epoch: u32,
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
}

impl<'a> NodeMessage<'a> {
    /// Writes the message; returns its length.
    pub fn encode(&self, buffer: &mut [u8]) -> usize {
        let mut w = Writer::new(buffer);
        match self {
            NodeMessage::Report(report) => {
                w.u8(1).u8(report.closed.into()).u16(report.shard.0).u16(report.replica).u16(report.point.prefix);
                w.u32(report.epoch).u32(report.view).u64(report.point.window).u32(report.point.cut).u32(0);
                w.u64(report.durable_lsn.0)
                    .u64(report.appended_lsn.0)
                    .u64(report.records_lsn.0)
                    .u64(report.records)
                    .u64(report.applied_index);
            }
            NodeMessage::Lead { term } => {
                w.u64(8).u64(*term);
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
                w.u8(6).u8(0).u16(kind).u32(detail).u64(*token).u128(client.0);
            }
            NodeMessage::ChangeIs { client, token, outcome } => {
                let (code, shard, index) = outcome_code(*outcome);
                w.u8(7).u8(0).u16(code).u16(shard).u16(0).u64(*token).u128(client.0).u64(index);
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
            1 => {
                let closed = flag(r.u8()?)?;
                let (shard, replica, prefix) = (ShardId(r.u16()?), r.u16()?, r.u16()?);
                let (epoch, view, window, cut) = (r.u32()?, r.u32()?, r.u64()?, r.u32()?);
                reserved(r.u32()?.into())?;
                NodeMessage::Report(Report {
                    shard,
                    replica,
                    epoch,
                    view,
                    point: CutPoint { window, cut, prefix },
                    durable_lsn: Lsn(r.u64()?),
                    appended_lsn: Lsn(r.u64()?),
                    records_lsn: Lsn(r.u64()?),
                    closed,
                    records: r.u64()?,
                    applied_index: r.u64()?,
                })
            }
            2 => {
                let close = flag(r.u8()?)?;
                let (prefix, cut, window) = (r.u16()?, r.u32()?, r.u64()?);
                let lead_ns = r.u32()?;
                reserved(r.u32()?.into())?;
                NodeMessage::Target(Target { point: CutPoint { window, cut, prefix }, close, lead_ns })
            }
            tag @ (3..=5 | 8) => {
                if r.bytes(7)?.iter().any(|b| *b != 0) {
                    return Err(DecodeError::Value("reserved"));
                }
                match tag {
                    3 => NodeMessage::Order { index: r.u64()?, entry: r.rest() },
                    4 => NodeMessage::ReadIndex { token: r.u64()? },
                    8 => NodeMessage::Lead { term: r.u64()? },
                    _ => NodeMessage::ReadIndexIs { token: r.u64()?, index: r.u64()? },
                }
            }
            6 => {
                reserved(r.u8()?.into())?;
                let change = change_from(r.u16()?, r.u32()?)?;
                NodeMessage::Change { token: r.u64()?, client: ClientId(r.u128()?), change }
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
            closed: true,
            records: 8,
            applied_index: 9,
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
        ];
        for message in others.into_iter().chain(changes).chain(outcomes) {
            let mut buffer = [0; NODE_MESSAGE_BYTES_MAX];
            let len = message.encode(&mut buffer);
            assert_eq!(NodeMessage::decode(&buffer[..len]), Ok(message));
            let fixed = if matches!(message, NodeMessage::Order { .. }) { ORDER_HEAD_BYTES } else { len };
            for end in 0..fixed {
                assert!(NodeMessage::decode(&buffer[..end]).is_err());
            }
        }
        assert_eq!(NodeMessage::decode(&[9]), Err(DecodeError::Tag(9)));
    }
}
