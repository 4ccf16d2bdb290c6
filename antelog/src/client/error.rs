//! Everything that can go wrong with a client, each in one line: what happened, where, and what to do about it.

use std::fmt;
use std::time::Duration;

use antelog_protocol::{ChangeError, ClientId, Position, Refusal, ShardId};

/// Why an operation of a [`Client`](crate::Client) failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// No address was given.
    NoAddress,
    /// No node let us in.
    Connect {
        /// What came of each address.
        attempts: Vec<String>,
    },
    /// This machine cannot run a client.
    System(String),
    /// The record is larger than the cluster takes. Nothing was appended.
    TooLarge {
        /// The record's size in bytes.
        bytes: usize,
        /// The cluster's `record_bytes_max`.
        limit_bytes: usize,
    },
    /// The cluster has no such shard.
    UnknownShard {
        /// The shard asked for.
        shard: ShardId,
        /// The shards there are.
        shards: Vec<ShardId>,
    },
    /// The shard refused the append.
    Refused {
        /// The shard.
        shard: ShardId,
        /// Its reason.
        refusal: Refusal,
    },
    /// The client has as many subscriptions as it may have.
    Crowded {
        /// How many those are.
        subscriptions_max: u32,
    },
    /// The shard was lost as a whole while the append was under way: whether the record is in the log is not known. It is
    /// not appended again, nor to another shard: [`Client::outcome`](crate::Client::outcome) tells what became of it.
    Unknown {
        /// The shard.
        shard: ShardId,
        /// The client's session.
        client: ClientId,
        /// Its number for the append.
        seq: u64,
    },
    /// The shard named is lost as a whole at present. Nothing was appended.
    ShardLost {
        /// The shard.
        shard: ShardId,
    },
    /// The subscription came to bound records that nobody has at present: their shard is lost, or has returned without them.
    Unavailable {
        /// The first position that is unavailable.
        from: Position,
        /// The first behind it.
        to: Position,
    },
    /// The change of membership was not made.
    NotChanged(ChangeError),
    /// The log begins above what the subscription wants next.
    Trimmed {
        /// The first position still there.
        head: Position,
    },
    /// No answer in time; the operation was given up.
    Timeout {
        /// What was asked.
        what: String,
        /// How long was waited.
        after: Duration,
        /// What is wrong with the connections, if anything is.
        problem: Option<String>,
    },
    /// The client's thread has ended: by a panic, for it does not end otherwise while anybody uses it. Whether an
    /// append that waited was written is not known.
    Closed,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NoAddress => write!(f, "no address of the cluster was given; name at least one node, as host:port"),
            Error::Connect { attempts } => write!(f, "cannot connect to the cluster: {}", attempts.join("; ")),
            Error::System(what) => write!(f, "this machine cannot run a client: {what}"),
            Error::TooLarge { bytes, limit_bytes } => write!(
                f,
                "the record of {bytes} bytes is larger than this cluster's limit of {limit_bytes} (record_bytes_max); \
                 split it, or raise the limit"
            ),
            Error::UnknownShard { shard, shards } => {
                write!(f, "the cluster has no shard {shard}; its shards are")?;
                shards.iter().try_for_each(|shard| write!(f, " {shard}"))
            }
            Error::Refused { shard, refusal } => write!(f, "shard {shard} refused the append: {refusal}"),
            Error::Crowded { subscriptions_max } => write!(
                f,
                "this client may have {subscriptions_max} subscriptions at a time and has them; end one, or raise \
                 subscriptions_max"
            ),
            Error::Unknown { shard, client, seq } => write!(
                f,
                "shard {shard} was lost while the append was under way: whether the record is in the log is known when the \
                 shard has returned; ask for the outcome of append {seq} of session {client}"
            ),
            Error::ShardLost { shard } => {
                write!(f, "shard {shard} is lost at present; wait for its return, or append to another")
            }
            Error::Unavailable { from, to } => write!(
                f,
                "positions {from} to {to} (exclusive) are unavailable: their shard is lost, or has returned without them; \
                 wait for its return, or skip them"
            ),
            Error::NotChanged(why) => why.fmt(f),
            Error::Trimmed { head } => {
                write!(f, "the log no longer has what comes next: it begins at position {head}; subscribe from there")
            }
            Error::Timeout { what, after, problem } => {
                write!(f, "no answer to {what} within {after:?}")?;
                problem.iter().try_for_each(|problem| write!(f, "; {problem}"))
            }
            Error::Closed => write!(f, "the client's thread has ended; connect again"),
        }
    }
}

impl std::error::Error for Error {}
