//! The client's side of a cluster: one [`session::Session`] appends, subscribes, reads, reconnects and retries.
//!
//! A session is driven by whoever owns it, like any duty cycle: a thread of its own in the `antelog` library, the load
//! generator's loop in `profile`, virtual time in the simulator.

mod pool;
pub mod session;

use std::sync::Arc;

use antelog_protocol::client::Event;
use antelog_protocol::ledger::Ledger;
use antelog_protocol::{ChangeError, Member, Outcome, Position, Refusal, ShardId, WindowMode};

/// A record's bytes, shared between the merge (until confirmed) and the user.
pub type Record = Arc<[u8]>;

/// A subscription of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubscriptionId(pub u32);

/// What a bound position holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slot {
    /// A record.
    Record(Record),
    /// No record: the slot was filled to keep the order moving.
    NoOp,
    /// The log begins above the position, at the given one.
    Trimmed(Position),
    /// The slot is bound, and its shard is lost at present or has returned without it: nobody can say what it holds.
    Unavailable,
}

/// Who takes part in the log, and how it is ordered, by the newest grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// First window of which this holds.
    pub window: u64,
    /// The first position of that window.
    pub position: Position,
    /// How positions are bound.
    pub mode: WindowMode,
    /// The shards that are or were members, in id order; one that only stands by is not listed.
    pub members: Vec<Member>,
}

impl Membership {
    /// `None` when no window is granted.
    pub fn of(ledger: &Ledger) -> Option<Membership> {
        let ((window, position), mode) = ledger.newest_run().zip(ledger.mode())?;
        Some(Membership { window, position, mode, members: ledger.members().to_vec() })
    }

    /// A shard's part; `None` while it was never a member.
    pub fn member(&self, shard: ShardId) -> Option<&Member> {
        self.members.iter().find(|m| m.shard == shard)
    }
}

/// What a session tells its owner, from inside its duty cycle.
pub trait SessionHandler {
    /// The append is bound at `position`, for ever.
    fn on_acknowledged(&mut self, shard: ShardId, seq: u64, position: Position);
    /// The append was refused and will not be retried: the record is not in the log.
    ///
    /// A refusal breaks the sequence of its shard: records of this session behind it are refused too, as
    /// [`Refusal::Gap`] or, when none came before, [`Refusal::UnknownSession`], and the session takes no further append to
    /// that shard until all are answered. After [`Refusal::Closed`] an owner that is free to choose the shard waits for
    /// these answers and then appends what was refused, in the order of its numbers, to the shard named `instead`,
    /// before anything new: so its records keep their order. It need not ask when the shard takes appends again: the
    /// next append finds out.
    ///
    /// [`Refusal::Failed`]: the shard was lost as a whole before the append was sent.
    fn on_refused(&mut self, shard: ShardId, seq: u64, refusal: Refusal);
    /// The append was under way when its shard was lost as a whole: whether the record is in the log is not known, and the
    /// session does not send it again. [`Session::outcome`](session::Session::outcome) tells once the shard has returned.
    fn on_unknown(&mut self, shard: ShardId, seq: u64);
    /// A subscription delivers, confirms or fails.
    fn on_event(&mut self, subscription: SubscriptionId, event: Event<Record>);
    /// A subscription ended: the log begins above its next position, at `head`.
    fn on_trimmed(&mut self, subscription: SubscriptionId, head: Position);
    /// The answer to a read.
    fn on_read(&mut self, token: u64, position: Position, slot: Slot);
    /// The answer to a question for the tail: the first position that was not bound.
    fn on_tail(&mut self, token: u64, position: Position);
    /// The answer to what became of an append: bound, not in the log, or forgotten.
    fn on_outcome(&mut self, _token: u64, _outcome: Outcome) {}
    /// The answer to a change, once the order stream shows it, or to a question for the membership.
    fn on_membership(&mut self, _token: u64, _answer: Result<Membership, ChangeError>) {}
    /// The connection to a gate came up (`error` is `None`) or was lost, or an attempt failed. The session goes on
    /// trying by itself.
    fn on_connection(&mut self, address: &str, error: Option<&str>);
    /// A subscription ended: the cluster has no such shard. Known once the cluster's map is.
    fn on_unknown_shard(&mut self, _subscription: SubscriptionId, _shard: ShardId) {}
    /// A subscription ended: the client has as many as its limit of so many allows.
    fn on_crowded(&mut self, _subscription: SubscriptionId, _subscriptions_max: u32) {}
    /// Whether the subscription's next event can be taken now. While it is false nothing is handed out, the stream's
    /// credit runs out, and the log stops sending; other subscriptions are not affected. Asked again every duty cycle.
    fn ready(&mut self, _subscription: SubscriptionId) -> bool {
        true
    }
}
