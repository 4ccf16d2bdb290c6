//! What a session is told at set-up, what it asks of whoever dials, and the errors of its calls.

use std::fmt;
use std::io;

use antelog_protocol::wire::session::ClusterMap;
use antelog_protocol::{ClientId, ShardId};

use crate::channel::{CAPACITY_BYTES_MAX, CAPACITY_BYTES_MIN};
use crate::node::Waker;

/// The smallest incoming ring of a session: the largest order entry must fit a quarter of it.
pub const RING_BYTES_MIN: usize = 8 * CAPACITY_BYTES_MIN;

/// Connects to gates in the background: name look-up, connection and hand-shake block, a session does not.
pub trait Dialer<L> {
    /// Starts connecting to `address`. The answer comes through [`take`](Self::take), exactly one for each request.
    fn request(&mut self, address: &str);
    /// The next answer, if one is there.
    fn take(&mut self) -> Option<Dialed<L>>;
    /// Wakes the session's thread whenever an answer is there.
    fn waker(&mut self, waker: Waker);
}

/// The answer to one request of a [`Dialer`].
pub struct Dialed<L> {
    /// The address, as it was requested.
    pub address: String,
    /// The connection, the cluster's map, the capacity of the gate's incoming ring in bytes, and the gate's incarnation;
    /// or in one line why there is no connection.
    pub result: Result<(L, ClusterMap, usize, u64), String>,
}

/// Sizes and names. [`SessionOptions::new`] has the defaults.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Random, so that no two sessions ever share it: the log recognises retries by it.
    pub client: ClientId,
    /// Capacity of the incoming ring of each gate, in bytes: a power of two, and at least four times the largest record.
    /// The same number goes into the hand-shake.
    pub ring_bytes: usize,
    /// Addresses to learn the cluster's map from.
    pub seeds: Vec<String>,
    /// Bytes that one stream (a subscription's part of one shard) may have received and not handed out. Raised to four
    /// of the cluster's largest records if it is less.
    pub stream_credit_bytes: u64,
    /// Pause after the first failed attempt to connect; it doubles with each further one.
    pub backoff_min_ns: u64,
    /// Longest pause between attempts to connect.
    pub backoff_max_ns: u64,
    /// Cuts of free windows that the session's ledger remembers.
    pub free_cuts_max: usize,
    /// Most gates a map may name: the transport's number of peers.
    pub gates_max: u16,
    /// Have the kernel back the rings at once, so that no page fault delays a record.
    pub prefault: bool,
    /// Seed of the jitter of pauses. Any number; equal numbers give equal runs in a simulator.
    pub random_seed: u64,
}

impl SessionOptions {
    /// The defaults for a session of `client` that learns the cluster's map from `seeds`.
    pub fn new(client: ClientId, seeds: Vec<String>) -> SessionOptions {
        SessionOptions {
            client,
            ring_bytes: 8 << 20,
            seeds,
            stream_credit_bytes: 1 << 20,
            backoff_min_ns: 10_000_000,
            backoff_max_ns: 2_000_000_000,
            free_cuts_max: 4096,
            gates_max: 64,
            prefault: false,
            random_seed: (client.0 ^ (client.0 >> 64)) as u64,
        }
    }

    pub(super) fn check(&self) -> Result<(), SetupError> {
        let sound =
            self.ring_bytes.is_power_of_two() && (RING_BYTES_MIN..=CAPACITY_BYTES_MAX).contains(&self.ring_bytes);
        if !sound {
            return Err(SetupError::RingBytes(self.ring_bytes));
        }
        if self.seeds.is_empty() {
            return Err(SetupError::NoSeeds);
        }
        if self.gates_max == 0 {
            return Err(SetupError::NoGates);
        }
        Ok(())
    }
}

/// Why there is no session.
#[derive(Debug)]
pub enum SetupError {
    /// The ring's size is no power of two or outside its limits.
    RingBytes(usize),
    /// No address to begin with.
    NoSeeds,
    /// `gates_max` is 0.
    NoGates,
    /// The system has no memory for a ring.
    Memory(io::Error),
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetupError::RingBytes(bytes) => write!(
                f,
                "ring_bytes is {bytes}, which is not a power of two from {RING_BYTES_MIN} to {CAPACITY_BYTES_MAX}"
            ),
            SetupError::NoSeeds => write!(f, "no address of the cluster was given; name at least one node"),
            SetupError::NoGates => write!(f, "gates_max is 0; a session needs at least one gate"),
            SetupError::Memory(error) => write!(f, "no memory for a session's ring: {error}"),
        }
    }
}

impl std::error::Error for SetupError {}

/// Why an append was not taken. Nothing was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppendError {
    /// The shard has as many appends outstanding as the cluster allows, or its gate has no room: try again after the next
    /// acknowledgement.
    Full,
    /// The record is larger than the cluster takes.
    TooLarge {
        /// The limit in bytes.
        limit_bytes: usize,
    },
    /// The cluster has no such shard.
    UnknownShard(ShardId),
    /// The shard is lost as a whole at present: wait for its return, or choose another.
    Lost(ShardId),
    /// The cluster's map is not known yet: no gate has answered so far.
    NotConnectedYet,
}

impl fmt::Display for AppendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AppendError::Full => write!(f, "too many appends are outstanding; wait for an acknowledgement"),
            AppendError::TooLarge { limit_bytes } => write!(
                f,
                "the record is larger than this cluster's limit of {limit_bytes} bytes (record_bytes_max); split it or \
                 raise the limit"
            ),
            AppendError::UnknownShard(shard) => write!(f, "the cluster has no shard {shard}"),
            AppendError::Lost(shard) => {
                write!(f, "shard {shard} is lost at present; wait for its return, or append to another")
            }
            AppendError::NotConnectedYet => write!(f, "no node of the cluster has answered yet"),
        }
    }
}

impl std::error::Error for AppendError {}
