//! What the transport asks of an RDMA device: registered memory, reliable connections and one completion queue.
//!
//! Two providers implement it: `verbs`, which drives a device through libibverbs, and
//! `emulated`, which behaves in memory as badly as the verbs specification allows. Memory is named by
//! [`MemoryId`] and offset, never by address, so that a provider can check every range and the transport needs no unsafe
//! code. Everything belongs to one thread.

use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;

use antelog_core::mem::Region;

/// Registered memory: what [`Provider::register`] returned for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryId(pub u32);

/// A queue pair: an index the caller chooses, below the number of queue pairs the provider was opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueId(pub u16);

/// What remote peers may do with registered memory. Nobody may ever read it remotely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A source of writes and sends, or a buffer for receives.
    Local,
    /// Peers may also write it.
    RemoteWrite,
}

/// What a peer needs to write registered memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RemoteMemory {
    /// Address of the first byte in the owner's process.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// The key that opens it. Kept out of logs.
    pub rkey: u32,
}

impl fmt::Debug for RemoteMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteMemory").field("len", &self.len).finish_non_exhaustive()
    }
}

/// A port's address, as its peers need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAddress {
    /// Global identifier (the IPv6 or IPv4-mapped address on RoCE), in network order.
    pub gid: [u8; 16],
    /// Local identifier; 0 on RoCE.
    pub lid: u16,
    /// Largest path MTU in bytes: 256, 512, 1024, 2048 or 4096.
    pub mtu_bytes: u16,
    /// InfiniBand rather than Ethernet.
    pub is_infiniband: bool,
}

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The port.
    pub port: PortAddress,
    /// Queue pair number, 24 bits.
    pub number: u32,
    /// First packet sequence number this end sends, 24 bits.
    pub psn: u32,
}

/// How reliable a connection tries to be before it gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// A packet is sent again after 4.096 µs · 2^this; 1 to 31.
    pub ack_timeout: u8,
    /// So often, 0 to 7, before the connection fails.
    pub retries: u8,
}

/// What the device and port grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest single write or send in bytes.
    pub message_bytes_max: usize,
    /// Completions the queue holds. What may be outstanding is capped by this: an overrun is fatal.
    pub completions: usize,
    /// Requests one queue may have outstanding, each way.
    pub requests_max: usize,
}

/// Bytes of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    /// The memory.
    pub memory: MemoryId,
    /// First byte in it.
    pub offset: usize,
    /// Number of bytes; may be 0.
    pub len: usize,
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// One-sided write to `address` under `rkey`. `imm` makes it consume a receive at the peer and complete there.
    Write {
        /// Where it goes, in the peer's address space.
        address: u64,
        /// The key for it.
        rkey: u32,
        /// A hint for the peer.
        imm: Option<u32>,
    },
    /// Two-sided message.
    Send {
        /// Comes with the message.
        imm: Option<u32>,
    },
}

/// One request to a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Comes back in the completion.
    pub id: u64,
    /// What it does.
    pub operation: Operation,
    /// The bytes: they stay unchanged until a completion covers the request.
    pub local: Local,
    /// Complete with an entry of its own when it succeeds. Failures always do.
    pub signalled: bool,
    /// Take the bytes along with the request instead of having the device fetch them; only up to the queue's
    /// `inline_bytes`.
    pub inline: bool,
}

/// One posted receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receive {
    /// Comes back in the completion.
    pub id: u64,
    /// Where a message may be put.
    pub local: Local,
}

/// Why a request or the queue failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The queue was in error already.
    Flushed,
    /// The peer did not answer within the connection's patience.
    Unreachable,
    /// The peer posts no receives.
    ReceiverNotReady,
    /// The peer refused: outside its memory, wrong key, or a request it does not take.
    Refused,
    /// Anything else, with the verbs status code.
    Other(u32),
}

/// What completed successfully.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// A signalled request; all earlier ones of its queue are done too.
    Request,
    /// A message arrived in the receive.
    Received {
        /// Its length.
        len: usize,
        /// What came with it.
        imm: Option<u32>,
    },
    /// A write with a hint arrived and used the receive up; its buffer is untouched.
    Notified {
        /// The hint.
        imm: u32,
    },
}

/// An entry of the completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The request's or receive's id.
    pub id: u64,
    /// What became of it. Of failures only the id is known besides.
    pub result: Result<Done, Failure>,
}

/// Something about the device that is no completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// The device is gone or unusable, or its completion queue is: nothing will complete any more.
    Lost,
    /// The port went down.
    PortDown,
    /// A queue pair has failed without the peer's doing; completions tell the rest.
    Failed,
}

/// What was tried on which device, what happened, and what would mend it: one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderError {
    /// The line.
    pub text: String,
    /// The kernel's error number where there is one, otherwise 0.
    pub errno: i32,
}

impl fmt::Display for ProviderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for ProviderError {}

/// A device in use by one thread: a protection domain, a completion queue for everything, and up to as many queue pairs as
/// it was opened for.
pub trait Provider {
    /// What the device grants.
    fn limits(&self) -> Limits;

    /// The port's address.
    fn port(&self) -> PortAddress;

    /// Registers all of `region`, without relaxed ordering; it stays registered, and the region alive, until the provider
    /// is dropped. Set-up; slow.
    ///
    /// # Errors
    /// No memory may be locked, mostly: the text says how much and what the limit is.
    fn register(&mut self, region: &Arc<Region>, access: Access) -> Result<MemoryId, ProviderError>;

    /// What a peer needs to write it.
    fn remote(&self, memory: MemoryId) -> RemoteMemory;

    /// Makes a reliable-connection queue pair for so many outstanding requests and receives. Receives may be posted at once.
    /// Returns its number and how many bytes a request may take along inline (at least 0, whatever was hoped for).
    ///
    /// # Errors
    /// What the device lacks. Panics if `queue` exists.
    fn create(&mut self, queue: QueueId, requests: usize, receives: usize) -> Result<(u32, usize), ProviderError>;

    /// Connects it: from here on it receives, and requests may be posted. `psn` is the number this end starts with.
    ///
    /// # Errors
    /// Which step failed, for which port and peer, and the likely cause.
    fn connect(&mut self, queue: QueueId, psn: u32, peer: &End, patience: Patience) -> Result<(), ProviderError>;

    /// Hands requests to the device in order, with one doorbell. Never more than fit by the numbers given to `create`.
    ///
    /// # Errors
    /// The device took some or none: the queue is of no use any more. Panics on ranges outside registered memory.
    fn post(&mut self, queue: QueueId, requests: &[Request]) -> Result<(), ProviderError>;

    /// Posts receives.
    ///
    /// # Errors
    /// As [`post`](Self::post).
    fn post_receives(&mut self, queue: QueueId, receives: &[Receive]) -> Result<(), ProviderError>;

    /// Takes completions, at most as many as fit; returns how many. No system call.
    fn poll(&mut self, completions: &mut [Completion]) -> usize;

    /// Puts the queue into error: everything outstanding completes with [`Failure::Flushed`] (or its own result) soon. Does
    /// nothing for a queue that does not exist.
    fn fail(&mut self, queue: QueueId);

    /// Ends the queue: when this returns, nothing from its peer lands and nothing of it is sent any more. Completions of it
    /// that nobody took may still be in the completion queue. Does nothing for a queue that does not exist.
    fn destroy(&mut self, queue: QueueId);

    /// Asks for the descriptor to become readable at the next completion. After it returns, look once more before
    /// blocking: what completed before is not announced.
    fn arm(&mut self);

    /// The descriptor that becomes readable after [`arm`](Self::arm).
    fn wait_fd(&self) -> Option<RawFd>;

    /// What happened to the device, oldest first; `None`: nothing more. Costs a system call.
    fn event(&mut self) -> Option<DeviceEvent>;

    /// A monotonic clock in nanoseconds, for deadlines of set-up and tear-down.
    fn now_ns(&self) -> u64;
}
