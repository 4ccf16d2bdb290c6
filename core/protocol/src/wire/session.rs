//! Messages between clients and gates.
//!
//! Each message has a fixed head; a record's bytes follow the heads of `Append`, `Deliver` and `ReadIs`.

use super::change::{ChangeOutcome, change_code, change_from, outcome_code, outcome_from};
pub use super::map::{ClusterMap, ShardGates};
use super::{DecodeError, Reader, Writer};
use crate::types::{Change, ClientId, Lsn, Outcome, Position, Refusal, ShardId};

/// Bytes that hold the head of any session message.
pub const SESSION_HEAD_BYTES_MAX: usize = 80;

/// Client to gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Append a record to a shard.
    Append {
        /// The shard.
        shard: ShardId,
        /// How often the session has begun anew to send this shard what is outstanding: refusals say which time they answer.
        attempt: u32,
        /// The session knows of all of the shard's failures up to this view.
        view: u32,
        /// Number of the record in this session and shard, from 0.
        seq: u64,
        /// The record.
        record: &'a [u8],
    },
    /// Deliver a shard's slots from a position on.
    Subscribe {
        /// Chosen by the client; one per subscription and shard.
        stream: u32,
        /// The shard.
        shard: ShardId,
        /// Deliver slots at or above this position.
        from: Position,
        /// Bytes the gate may deliver before `Consumed` says more.
        credit_bytes: u64,
        /// The client knows the shard's failures up to this view: a gate that does not yet waits until it does.
        view: u32,
    },
    /// End a stream.
    Unsubscribe {
        /// The stream.
        stream: u32,
    },
    /// The client has consumed this much of a stream; cumulative.
    Consumed {
        /// The stream.
        stream: u32,
        /// Bytes consumed since the stream began, counted as [`stream_bytes`].
        bytes: u64,
    },
    /// Relay the order stream on this connection, beginning with a snapshot.
    Follow,
    /// Relay the order stream no more.
    Unfollow,
    /// Read the record at a position; answered when the position is bound.
    Read {
        /// Chosen by the client.
        token: u64,
        /// The position.
        position: Position,
    },
    /// Forget a read that was not answered.
    Cancel {
        /// The read's token.
        token: u64,
    },
    /// Ask for the first position that is not bound.
    Tail {
        /// Chosen by the client.
        token: u64,
    },
    /// Ask for a change of membership or ordering. Asked again with the same token, it is not made twice.
    Change {
        /// Chosen by the client.
        token: u64,
        /// What is to change.
        change: Change,
    },
    /// Ask what became of an append, of this session or of another.
    Outcome {
        /// Chosen by the client.
        token: u64,
        /// The shard.
        shard: ShardId,
        /// The session that appended.
        client: ClientId,
        /// Its number for the append.
        seq: u64,
    },
}

/// What a slot held when it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadResult<'a> {
    /// A record.
    Record(&'a [u8]),
    /// A slot without a record.
    NoOp,
    /// The slot belongs to a shard that another node serves.
    Elsewhere(ShardId),
    /// The log begins above the position.
    Trimmed(Position),
    /// The slot is bound and its shard is lost, or has returned without it.
    Unavailable,
}

/// Gate to client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    /// The record is bound.
    Acknowledged {
        /// The shard.
        shard: ShardId,
        /// The append's number.
        seq: u64,
        /// Where it is, for ever.
        position: Position,
    },
    /// The record was not appended.
    Refused {
        /// The shard.
        shard: ShardId,
        /// The attempt that it answers.
        attempt: u32,
        /// The append's number.
        seq: u64,
        /// Why.
        refusal: Refusal,
    },
    /// A record of a stream.
    Deliver {
        /// The stream.
        stream: u32,
        /// Its slot in the shard.
        lsn: Lsn,
        /// Its position: predicted when `speculative`.
        position: Position,
        /// The gate's view.
        view: u32,
        /// Whether the position was not bound yet.
        speculative: bool,
        /// The session that appended it.
        client: ClientId,
        /// The session's number for it.
        seq: u64,
        /// The record.
        record: &'a [u8],
    },
    /// Slots of a stream without records, at consecutive positions.
    NoOps {
        /// The stream.
        stream: u32,
        /// The first slot.
        lsn: Lsn,
        /// Its position.
        position: Position,
        /// How many.
        count: u32,
        /// The gate's view.
        view: u32,
    },
    /// Positions that were to be a stream's slots and are nobody's, because its shard was lost: no-ops by decree.
    Decreed {
        /// The stream.
        stream: u32,
        /// The shard's next slot, which lies behind.
        lsn: Lsn,
        /// The first position.
        position: Position,
        /// How many follow each other.
        count: u32,
        /// The gate's view.
        view: u32,
    },
    /// Slots of a stream, at consecutive positions, that are bound and that no replica has: their shard is lost, or has
    /// returned without them.
    Unavailable {
        /// The stream.
        stream: u32,
        /// The first slot.
        lsn: Lsn,
        /// Its position.
        position: Position,
        /// How many.
        count: u32,
        /// The gate's view.
        view: u32,
    },
    /// The stream ended: its next slot is below the trim point.
    Trimmed {
        /// The stream.
        stream: u32,
        /// The first position still there.
        head: Position,
    },
    /// The shard of the stream is not served by this gate.
    NotHere {
        /// The stream.
        stream: u32,
    },
    /// The stream was not begun: the client has as many subscriptions as it may have.
    Crowded {
        /// The stream.
        stream: u32,
        /// How many it may have.
        subscriptions_max: u32,
    },
    /// An order entry, relayed in index order.
    Order {
        /// Index in the order log.
        index: u64,
        /// The entry.
        entry: &'a [u8],
    },
    /// The order stream begins anew: what follows up to and including `entries` order messages states the ledger as of
    /// `index`, with everything below `base` bound.
    Snapshot {
        /// Index in the order log that the snapshot covers.
        index: u64,
        /// Positions below this are bound.
        base: Position,
        /// Number of `Order` messages that belong to the snapshot.
        entries: u32,
        /// The current view.
        view: u32,
    },
    /// The answer to `Read`.
    ReadIs {
        /// The question's token.
        token: u64,
        /// What is there.
        result: ReadResult<'a>,
    },
    /// The answer to `Tail`.
    TailIs {
        /// The question's token.
        token: u64,
        /// The first position that was not bound.
        position: Position,
        /// Index of the order log that the gate had applied then: what was granted before the question is in it.
        index: u64,
    },
    /// The gate is about to end: it takes no more requests and sends the answers that are still to come.
    Closing,
    /// The answer to `Change`.
    ChangeIs {
        /// The question's token.
        token: u64,
        /// What became of it.
        outcome: ChangeOutcome,
    },
    /// The answer to `Outcome`.
    OutcomeIs {
        /// The question's token.
        token: u64,
        /// What became of the append.
        outcome: Outcome,
        /// The number that the shard expects of that session next.
        next_seq: u64,
    },
}

/// What a delivery of `record_bytes` counts against a stream's credit.
pub const fn stream_bytes(record_bytes: usize) -> u64 {
    (record_bytes + SESSION_HEAD_BYTES_MAX) as u64
}

impl<'a> Request<'a> {
    /// Writes the head; returns its length and the bytes that follow it.
    pub fn encode(&self, head: &mut [u8; SESSION_HEAD_BYTES_MAX]) -> (usize, &'a [u8]) {
        let mut w = Writer::new(head);
        let mut body: &'a [u8] = &[];
        match *self {
            Request::Append { shard, attempt, view, seq, record } => {
                w.u16(1).u16(shard.0).u32(attempt).u64(seq).u32(view).u32(0);
                body = record;
            }
            Request::Subscribe { stream, shard, from, credit_bytes, view } => {
                w.u16(2).u16(shard.0).u32(stream).u64(from.0).u64(credit_bytes).u32(view);
            }
            Request::Unsubscribe { stream } => {
                w.u16(3).u16(0).u32(stream);
            }
            Request::Consumed { stream, bytes } => {
                w.u16(4).u16(0).u32(stream).u64(bytes);
            }
            Request::Follow => {
                w.u16(5).u16(0).u32(0);
            }
            Request::Read { token, position } => {
                w.u16(6).u16(0).u32(0).u64(token).u64(position.0);
            }
            Request::Cancel { token } => {
                w.u16(8).u16(0).u32(0).u64(token);
            }
            Request::Tail { token } => {
                w.u16(7).u16(0).u32(0).u64(token);
            }
            Request::Change { token, change } => {
                let (kind, detail) = change_code(change);
                w.u16(9).u16(kind).u32(0).u64(token).u64(detail);
            }
            Request::Unfollow => {
                w.u16(10).u16(0).u32(0);
            }
            Request::Outcome { token, shard, client, seq } => {
                w.u16(11).u16(shard.0).u32(0).u64(token).u128(client.0).u64(seq);
            }
        }
        (w.len(), body)
    }

    /// Reads a request.
    ///
    /// # Errors
    /// When the bytes are not exactly one valid request.
    pub fn decode(bytes: &'a [u8]) -> Result<Request<'a>, DecodeError> {
        let mut r = Reader::new(bytes);
        let (tag, shard, stream) = (r.u16()?, ShardId(r.u16()?), r.u32()?);
        let request = match tag {
            1 => {
                let (seq, view) = (r.u64()?, r.u32()?);
                if r.u32()? != 0 {
                    return Err(DecodeError::Value("reserved"));
                }
                Request::Append { shard, attempt: stream, view, seq, record: r.rest() }
            }
            2 => {
                let (from, credit_bytes) = (Position(r.u64()?), r.u64()?);
                Request::Subscribe { stream, shard, from, credit_bytes, view: r.u32()? }
            }
            3 => Request::Unsubscribe { stream },
            4 => Request::Consumed { stream, bytes: r.u64()? },
            5 => Request::Follow,
            6 => Request::Read { token: r.u64()?, position: Position(r.u64()?) },
            7 => Request::Tail { token: r.u64()? },
            8 => Request::Cancel { token: r.u64()? },
            9 if stream == 0 => Request::Change { token: r.u64()?, change: change_from(shard.0, r.u64()?)? },
            10 => Request::Unfollow,
            11 => Request::Outcome { shard, token: r.u64()?, client: ClientId(r.u128()?), seq: r.u64()? },
            tag => return Err(DecodeError::Tag(tag as u8)),
        };
        r.finish()?;
        Ok(request)
    }
}

impl<'a> Reply<'a> {
    /// Writes the head; returns its length and the bytes that follow it.
    pub fn encode(&self, head: &mut [u8; SESSION_HEAD_BYTES_MAX]) -> (usize, &'a [u8]) {
        let mut w = Writer::new(head);
        let mut body: &'a [u8] = &[];
        match *self {
            Reply::Acknowledged { shard, seq, position } => {
                w.u16(1).u16(shard.0).u32(0).u64(seq).u64(position.0);
            }
            Reply::Refused { shard, attempt, seq, refusal } => {
                let (code, detail) = refusal_code(refusal);
                w.u16(2).u16(shard.0).u32(code).u64(seq).u64(detail).u32(attempt);
            }
            Reply::Deliver { stream, lsn, position, view, speculative, client, seq, record } => {
                w.u16(3).u16(speculative.into()).u32(stream).u64(lsn.0).u64(position.0);
                w.u128(client.0).u64(seq).u32(view).u32(0);
                body = record;
            }
            Reply::NoOps { stream, lsn, position, count, view } => {
                empty_slots(&mut w, 4, stream, (lsn, position, count, view));
            }
            Reply::Decreed { stream, lsn, position, count, view } => {
                empty_slots(&mut w, 12, stream, (lsn, position, count, view));
            }
            Reply::Unavailable { stream, lsn, position, count, view } => {
                empty_slots(&mut w, 13, stream, (lsn, position, count, view));
            }
            Reply::Trimmed { stream, head } => {
                w.u16(5).u16(0).u32(stream).u64(head.0);
            }
            Reply::NotHere { stream } => {
                w.u16(6).u16(0).u32(stream);
            }
            Reply::Crowded { stream, subscriptions_max } => {
                w.u16(15).u16(0).u32(stream).u32(subscriptions_max);
            }
            Reply::Closing => {
                w.u16(16).u16(0).u32(0);
            }
            Reply::Order { index, entry } => {
                w.u16(7).u16(0).u32(0).u64(index);
                body = entry;
            }
            Reply::Snapshot { index, base, entries, view } => {
                w.u16(8).u16(0).u32(entries).u64(index).u64(base.0).u32(view);
            }
            Reply::ReadIs { token, result } => {
                let (kind, detail) = match result {
                    ReadResult::Record(record) => {
                        body = record;
                        (0, 0)
                    }
                    ReadResult::NoOp => (1, 0),
                    ReadResult::Elsewhere(shard) => (2, shard.0.into()),
                    ReadResult::Trimmed(head) => (3, head.0),
                    ReadResult::Unavailable => (4, 0),
                };
                w.u16(9).u16(kind).u32(0).u64(token).u64(detail);
            }
            Reply::TailIs { token, position, index } => {
                w.u16(10).u16(0).u32(0).u64(token).u64(position.0).u64(index);
            }
            Reply::ChangeIs { token, outcome } => {
                let (code, shard, index) = outcome_code(outcome);
                w.u16(11).u16(code).u32(shard.into()).u64(token).u64(index);
            }
            Reply::OutcomeIs { token, outcome, next_seq } => {
                let (code, detail) = append_outcome_code(outcome);
                w.u16(14).u16(code.into()).u32(0).u64(token).u64(next_seq).u64(detail);
            }
        }
        (w.len(), body)
    }

    /// Reads a reply.
    ///
    /// # Errors
    /// When the bytes are not exactly one valid reply.
    pub fn decode(bytes: &'a [u8]) -> Result<Reply<'a>, DecodeError> {
        let mut r = Reader::new(bytes);
        let (tag, small, stream) = (r.u16()?, r.u16()?, r.u32()?);
        let reply = match tag {
            1 => Reply::Acknowledged { shard: ShardId(small), seq: r.u64()?, position: Position(r.u64()?) },
            2 => {
                let (seq, detail, attempt) = (r.u64()?, r.u64()?, r.u32()?);
                Reply::Refused { shard: ShardId(small), attempt, seq, refusal: refusal_from(stream, detail)? }
            }
            3 => {
                let (lsn, position) = (Lsn(r.u64()?), Position(r.u64()?));
                let (client, seq, view) = (ClientId(r.u128()?), r.u64()?, r.u32()?);
                if small > 1 || r.u32()? != 0 {
                    return Err(DecodeError::Value("speculative"));
                }
                Reply::Deliver { stream, lsn, position, view, speculative: small == 1, client, seq, record: r.rest() }
            }
            4 | 12 | 13 => {
                let (lsn, position) = (Lsn(r.u64()?), Position(r.u64()?));
                let (count, view) = (r.u32()?, r.u32()?);
                match tag {
                    4 => Reply::NoOps { stream, lsn, position, count, view },
                    12 => Reply::Decreed { stream, lsn, position, count, view },
                    _ => Reply::Unavailable { stream, lsn, position, count, view },
                }
            }
            5 => Reply::Trimmed { stream, head: Position(r.u64()?) },
            6 => Reply::NotHere { stream },
            7 => Reply::Order { index: r.u64()?, entry: r.rest() },
            8 => Reply::Snapshot { entries: stream, index: r.u64()?, base: Position(r.u64()?), view: r.u32()? },
            9 => {
                let (token, detail) = (r.u64()?, r.u64()?);
                let result = match small {
                    0 => ReadResult::Record(r.rest()),
                    1 => ReadResult::NoOp,
                    2 => {
                        ReadResult::Elsewhere(ShardId(u16::try_from(detail).map_err(|_| DecodeError::Value("shard"))?))
                    }
                    3 => ReadResult::Trimmed(Position(detail)),
                    4 => ReadResult::Unavailable,
                    _ => return Err(DecodeError::Value("result")),
                };
                Reply::ReadIs { token, result }
            }
            10 => Reply::TailIs { token: r.u64()?, position: Position(r.u64()?), index: r.u64()? },
            11 => {
                let shard = u16::try_from(stream).map_err(|_| DecodeError::Value("shard"))?;
                Reply::ChangeIs { token: r.u64()?, outcome: outcome_from(small, shard, r.u64()?)? }
            }
            14 => {
                let (token, next_seq, detail) = (r.u64()?, r.u64()?, r.u64()?);
                let code = u8::try_from(small).map_err(|_| DecodeError::Value("outcome"))?;
                Reply::OutcomeIs { token, outcome: append_outcome_from(code, detail)?, next_seq }
            }
            15 => Reply::Crowded { stream, subscriptions_max: r.u32()? },
            16 => Reply::Closing,
            tag => return Err(DecodeError::Tag(tag as u8)),
        };
        r.finish()?;
        Ok(reply)
    }
}

/// Slots of a stream that hold no record.
fn empty_slots(w: &mut Writer<'_>, tag: u16, stream: u32, (lsn, position, count, view): (Lsn, Position, u32, u32)) {
    w.u16(tag).u16(0).u32(stream).u64(lsn.0).u64(position.0).u32(count).u32(view);
}

/// The code and detail that stand for an append's outcome on the wire.
pub fn append_outcome_code(outcome: Outcome) -> (u8, u64) {
    match outcome {
        Outcome::Bound(position) => (1, position.0),
        Outcome::NotInLog => (2, 0),
        Outcome::Waiting => (3, 0),
        Outcome::Forgotten => (4, 0),
        Outcome::NotHere => (5, 0),
    }
}

/// The outcome that a code and detail stand for.
///
/// # Errors
/// When there is none.
pub fn append_outcome_from(code: u8, detail: u64) -> Result<Outcome, DecodeError> {
    Ok(match code {
        1 => Outcome::Bound(Position(detail)),
        2 => Outcome::NotInLog,
        3 => Outcome::Waiting,
        4 => Outcome::Forgotten,
        5 => Outcome::NotHere,
        _ => return Err(DecodeError::Value("outcome")),
    })
}

/// The code and detail that stand for a refusal on the wire.
pub fn refusal_code(refusal: Refusal) -> (u32, u64) {
    match refusal {
        Refusal::Gap { expected } => (1, expected),
        Refusal::UnknownSession => (2, 0),
        Refusal::Forgotten => (3, 0),
        Refusal::TooLarge { limit_bytes } => (4, limit_bytes.into()),
        Refusal::RegionFull { region_bytes } => (5, region_bytes),
        Refusal::NotHere => (6, 0),
        Refusal::Failed => (7, 0),
        Refusal::Closed { instead } => (8, instead.0.into()),
        Refusal::OldView { view } => (9, view.into()),
        Refusal::Forbidden => (10, 0),
        Refusal::DiskFull => (11, 0),
    }
}

/// The refusal that a code and detail stand for.
///
/// # Errors
/// When there is none.
pub fn refusal_from(code: u32, detail: u64) -> Result<Refusal, DecodeError> {
    Ok(match code {
        1 => Refusal::Gap { expected: detail },
        2 => Refusal::UnknownSession,
        3 => Refusal::Forgotten,
        4 => Refusal::TooLarge { limit_bytes: u32::try_from(detail).map_err(|_| DecodeError::Value("limit"))? },
        5 => Refusal::RegionFull { region_bytes: detail },
        6 => Refusal::NotHere,
        7 => Refusal::Failed,
        8 => Refusal::Closed { instead: ShardId(u16::try_from(detail).map_err(|_| DecodeError::Value("shard"))?) },
        9 => Refusal::OldView { view: u32::try_from(detail).map_err(|_| DecodeError::Value("view"))? },
        10 => Refusal::Forbidden,
        11 => Refusal::DiskFull,
        _ => return Err(DecodeError::Value("refusal")),
    })
}

#[cfg(test)]
mod tests;
