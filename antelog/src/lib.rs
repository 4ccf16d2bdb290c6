//! antelog: a high-performance speculative shared log.
//!
//! Writers append records to shards; every record gets a position in one total order. Records are delivered before their
//! position is bound, with the predicted one; a confirmation follows, and the prediction fails only when a whole
//! shard is lost. Start with [`Client`].

mod client;
pub mod cluster;
pub mod network;
pub mod status;
pub mod watch;

pub use antelog_core::access::{Access, Secret};
pub use antelog_core::client::{Membership, Record, Slot};
pub use antelog_protocol::client::{Event, Scope};
pub use antelog_protocol::wire::session::{ClusterMap, ShardGates};
pub use antelog_protocol::{
    Change, ChangeError, ClientId, Member, Ordering, Outcome, Position, Refusal, ShardId, WindowMode,
};
pub use client::{
    Client, ClientOptions, DrivenSession, Error, OnUnavailable, Pending, SubscribeOptions, Subscription, driven_session,
};
