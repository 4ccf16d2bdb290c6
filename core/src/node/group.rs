//! The sequencer's group: who decides which entries of the order log are committed.
//!
//! A group of one commits what it proposes, at once ([`Group::Alone`]). Several members run Raft ([`raft`]): the leader
//! proposes, and an entry is committed when most of the members have it. PROTOCOL.md §5.
//!
//! * [`raft`] — a member of a replicated group;
//! * [`wire`] — what members tell each other;
//! * [`journal`] — what a member keeps on disk.

pub mod journal;
pub mod raft;
mod store;
pub mod wire;

pub use raft::{Garbage, GroupParts, Learned, RaftGroup, member_id};

/// Who commits.
pub enum Group {
    /// The only sequencer: what it proposes is committed. See "A group of one" in DESIGN.md.
    Alone,
    /// A member of several.
    Raft(Box<RaftGroup>),
}

#[cfg(test)]
mod tests;
