//! The transport contract: what the log asks of a network, and all that it may assume of one.
//!
//! Every network (io_uring TCP, RDMA verbs, the simulator's) implements [`Transport`] and passes the same test suite,
//! [`contract`](crate::contract). Numbered guarantees:
//!
//! * **T1 order** — operations to one peer take effect there in issue order.
//! * **T2 visibility** — a write's bytes are visible before its notification and before any later operation's effect.
//! * **T3 placed** — `Placed { token }` says that this and all earlier operations to that peer took effect.
//! * **T4 full** — `Full` means nothing happened; operations never block and never allocate.
//! * **T5 bounded** — `poll` fills at most the slice it is given; events are `Copy`, so handlers may use the transport.
//! * **T6 fence** — after `fence(peer)` returns, nothing from that peer lands.
//! * **T7 down** — after `PeerDown`, operations to that peer return `Full` until it is admitted again.
//!
//! Two layers are *above* this trait and exist once: credits (`channel`), and retries after a lost connection
//! (`node`, `client`).

use std::os::fd::RawFd;
use std::sync::Arc;

use crate::mem::Region;

/// The largest message `send` takes, in bytes. A grant for 256 shards fits.
pub const SEND_BYTES_MAX: usize = 8192;

/// How many sent but unreleased messages a peer may have under way before `send` may report [`Full`]. The
/// order stream's own flow control stays below this, so an RDMA transport can post receives once.
pub const SENDS_IN_FLIGHT_MAX: usize = 512;

/// Index of a peer in one transport's table. The owner of the transport assigns it and gives it meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u16);

/// Handle of a region registered with this transport as a source of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionKey(pub u16);

/// Bytes of a registered local region: the source of a one-sided write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalRange {
    /// Region the bytes are in.
    pub region: RegionKey,
    /// First byte, as an offset into the region.
    pub offset: usize,
    /// Number of bytes.
    pub len: usize,
}

/// Where a one-sided write lands: a region the peer exposed to us when it admitted us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteOffset {
    /// Index into the list of regions the peer exposed to us.
    pub region: u16,
    /// First byte, as an offset into that region.
    pub offset: usize,
}

/// The operation was not accepted and had no effect: no room, or the peer is not connected. Try again after `poll`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// A received message inside the transport, valid until [`Transport::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageHandle(pub u32);

/// Why a peer went down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownReason {
    /// The peer closed the connection or its process ended.
    Closed,
    /// The operating system or device reported an error (`errno`).
    Io(i32),
    /// The peer broke the transport's rules: bad framing, or a write outside what was exposed to it.
    Protocol,
}

/// What `poll` reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The operation issued with `token`, and all earlier ones to `peer`, took effect there (T3).
    Placed {
        /// The peer written to.
        peer: PeerId,
        /// The newest token covered; older ones are covered too and may not be reported on their own.
        token: u64,
    },
    /// A write by `peer` into a region exposed to it carried a notification; its bytes are visible (T2).
    /// `value` is a hint, never protocol data, and several notifications may be reported as one.
    Notified {
        /// The peer that wrote.
        peer: PeerId,
        /// The hint of the newest write so reported.
        value: u32,
    },
    /// A message sent by `peer`.
    Received {
        /// The sender.
        peer: PeerId,
        /// Read it with [`Transport::message`] and give it back with [`Transport::release`].
        message: MessageHandle,
    },
    /// The connection is gone (T7). Reported once per admission.
    PeerDown {
        /// The peer lost.
        peer: PeerId,
        /// What was seen.
        reason: DownReason,
    },
}

/// One network, owned by one thread. Not `Send` once it is in use: set-up builds it inside its thread.
pub trait Transport {
    /// An established, authenticated connection that has not been given to a data thread yet.
    type Link: Send + 'static;

    /// Registers `region` as a source for [`write`](Self::write). Set-up only; may allocate.
    fn register(&mut self, region: Arc<Region>) -> RegionKey;

    /// Takes over an established connection as `peer`. `exposed` are the regions the peer may write, in the order
    /// in which it numbers them. An older connection of the same peer is fenced first. Operations may report [`Full`]
    /// until both sides have set the connection up. Control path; may allocate.
    fn admit(&mut self, peer: PeerId, link: Self::Link, exposed: &[Arc<Region>]);

    /// Writes `local` to `remote` in `to`'s memory. `notify` wakes the peer with a hint; `token` asks for `Placed`.
    /// The local bytes must stay unchanged until a `Placed` that covers the write, until an answer of the peer's shows that
    /// it has them (a network may send them again after that, and drops them there as known), or until the peer is down.
    fn write(
        &mut self,
        to: PeerId,
        local: LocalRange,
        remote: RemoteOffset,
        notify: Option<u32>,
        token: Option<u64>,
    ) -> Result<(), Full>;

    /// Writes a few bytes (at most 256) that are copied before this returns.
    fn write_inline(&mut self, to: PeerId, bytes: &[u8], remote: RemoteOffset, notify: Option<u32>)
    -> Result<(), Full>;

    /// Sends a message of at most [`SEND_BYTES_MAX`] bytes, copied before this returns.
    fn send(&mut self, to: PeerId, message: &[u8]) -> Result<(), Full>;

    /// Starts everything issued since the last flush. Operations need not start before it.
    fn flush(&mut self);

    /// Reports events, at most `events.len()`; returns how many. Never blocks.
    fn poll(&mut self, events: &mut [Event]) -> usize;

    /// The bytes of a received message.
    fn message(&self, handle: MessageHandle) -> &[u8];

    /// Gives a received message's buffer back.
    fn release(&mut self, handle: MessageHandle);

    /// Cuts `peer` off: when this returns nothing from it lands any more (T6). No `PeerDown` follows. Unreleased
    /// messages of that peer stay readable until released.
    fn fence(&mut self, peer: PeerId);

    /// Appends descriptors that poll readable when `poll` has something to report, for threads that park. None: the
    /// transport must be polled.
    fn wait_fds(&self, fds: &mut Vec<RawFd>);

    /// Called right before a thread blocks on [`wait_fds`](Self::wait_fds): returns true if events wait already.
    fn prepare_wait(&mut self) -> bool;
}
