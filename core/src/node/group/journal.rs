//! What a member keeps across a restart.

use std::fmt::Debug;

use raft::eraftpb::{Entry, HardState, Snapshot};

/// What Raft hands over to be kept, in this order.
#[derive(Debug)]
pub struct Record<'a> {
    /// Replaces everything before, unless empty.
    pub snapshot: &'a Snapshot,
    /// Appended; they replace those with the same and later indices.
    pub entries: &'a [Entry],
    /// Term, vote and commit index.
    pub hard: Option<&'a HardState>,
}

/// Where records go. Nothing here blocks.
pub trait Journal: Debug {
    /// Takes a record, which has this number.
    fn append(&mut self, number: u64, record: &Record<'_>);

    /// The newest number up to which everything is kept, when that is more than was said before.
    fn kept(&mut self, now_ns: u64) -> Option<u64>;

    /// When [`kept`](Self::kept) will have something to say, if that is known beforehand.
    fn deadline_ns(&self) -> Option<u64>;
}
