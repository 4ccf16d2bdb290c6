//! Changes of membership and ordering, and what became of them, as numbers: the same in session and node messages.

use super::DecodeError;
use crate::limits::NUMBER_MAX;
use crate::types::{Change, ChangeError, Ordering, Position, ShardId};

/// Orderings by their number on the wire.
const ORDERINGS: [Ordering; 4] = [Ordering::Fixed, Ordering::FreeTick, Ordering::FreeEvent, Ordering::Auto];

/// What became of a change: the index of the order log from which on it may show, or why it was not taken.
pub type ChangeOutcome = Result<u64, ChangeError>;

/// The kind and detail that stand for a change.
pub fn change_code(change: Change) -> (u16, u64) {
    match change {
        Change::Join(shard) => (0, shard.0.into()),
        Change::Leave(shard) => (1, shard.0.into()),
        Change::Ordering(ordering) => (2, ORDERINGS.iter().position(|o| *o == ordering).unwrap_or_default() as u64),
        Change::Trim(upto) => (3, upto.0),
    }
}

/// The change that a kind and detail stand for.
///
/// # Errors
/// When there is none.
pub fn change_from(kind: u16, detail: u64) -> Result<Change, DecodeError> {
    let shard = || u16::try_from(detail).map(ShardId).map_err(|_| DecodeError::Value("shard"));
    Ok(match kind {
        0 => Change::Join(shard()?),
        1 => Change::Leave(shard()?),
        2 => Change::Ordering(
            *ORDERINGS.get(usize::try_from(detail).unwrap_or(usize::MAX)).ok_or(DecodeError::Value("ordering"))?,
        ),
        3 if detail <= NUMBER_MAX => Change::Trim(Position(detail)),
        _ => return Err(DecodeError::Value("change")),
    })
}

/// The code, shard and index that stand for an outcome.
pub fn outcome_code(outcome: ChangeOutcome) -> (u16, u16, u64) {
    match outcome {
        Ok(index) => (0, 0, index),
        Err(ChangeError::UnknownShard(shard)) => (1, shard.0, 0),
        Err(ChangeError::LastShard(shard)) => (2, shard.0, 0),
        Err(ChangeError::Forbidden) => (3, 0, 0),
        Err(ChangeError::NotBound) => (4, 0, 0),
    }
}

/// The outcome that a code, shard and index stand for.
///
/// # Errors
/// When there is none.
pub fn outcome_from(code: u16, shard: u16, index: u64) -> Result<ChangeOutcome, DecodeError> {
    let error = match code {
        0 if shard == 0 => return Ok(Ok(index)),
        1 => ChangeError::UnknownShard(ShardId(shard)),
        2 => ChangeError::LastShard(ShardId(shard)),
        3 if shard == 0 => ChangeError::Forbidden,
        4 if shard == 0 => ChangeError::NotBound,
        _ => return Err(DecodeError::Value("outcome")),
    };
    if index == 0 { Ok(Err(error)) } else { Err(DecodeError::Value("outcome")) }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// One of every kind.
    pub(crate) const CHANGES: [Change; 7] = [
        Change::Join(ShardId(u16::MAX)),
        Change::Leave(ShardId(3)),
        Change::Ordering(Ordering::Fixed),
        Change::Ordering(Ordering::FreeTick),
        Change::Ordering(Ordering::FreeEvent),
        Change::Ordering(Ordering::Auto),
        Change::Trim(Position(NUMBER_MAX)),
    ];

    /// One of every kind.
    pub(crate) const OUTCOMES: [ChangeOutcome; 5] = [
        Ok(u64::MAX),
        Err(ChangeError::UnknownShard(ShardId(9))),
        Err(ChangeError::LastShard(ShardId(u16::MAX))),
        Err(ChangeError::Forbidden),
        Err(ChangeError::NotBound),
    ];

    #[test]
    fn numbers_that_stand_for_nothing_are_refused() {
        for change in CHANGES {
            let (kind, detail) = change_code(change);
            assert_eq!(change_from(kind, detail), Ok(change));
        }
        for outcome in OUTCOMES {
            let (code, shard, index) = outcome_code(outcome);
            assert_eq!(outcome_from(code, shard, index), Ok(outcome));
        }
        assert_eq!(change_from(0, 1 << 16), Err(DecodeError::Value("shard")));
        assert_eq!(change_from(2, 4), Err(DecodeError::Value("ordering")));
        assert_eq!(change_from(3, NUMBER_MAX + 1), Err(DecodeError::Value("change")));
        assert_eq!(change_from(4, 0), Err(DecodeError::Value("change")));
        for (code, shard, index) in [(0, 1, 5), (1, 1, 5), (2, 1, 5), (3, 1, 0), (3, 0, 5), (4, 1, 0), (5, 0, 0)] {
            assert_eq!(outcome_from(code, shard, index), Err(DecodeError::Value("outcome")));
        }
    }
}
