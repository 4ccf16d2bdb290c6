//! The transport itself: a table of connections driven by one ring, on one thread.
//!
//! A duty cycle costs at most two system calls however many peers there are: one when deferred work waits, one to
//! hand over what became due. A cycle in which nothing happened costs none.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use antelog_core::mem::Region;
use antelog_core::transport::{
    DownReason, Event, Full, LocalRange, MessageHandle, PeerId, RegionKey, RemoteOffset, SEND_BYTES_MAX,
    SENDS_IN_FLIGHT_MAX, Transport,
};

use crate::bootstrap::TcpLink;
use crate::connection::{Connection, Rest};
use crate::output::Output;
use crate::pool::{Origin, Pool};
use crate::uring::{Ring, SetupError, Socket};

/// The most bytes `write_inline` takes, by the contract.
const INLINE_BYTES_MAX: usize = 256;

/// The receive buffer holds at least a few of the largest messages.
const RECEIVE_BYTES_MIN: usize = 8 * SEND_BYTES_MAX;

/// The staging ring holds at least a few of the largest messages.
const STAGING_BYTES_MIN: usize = 4 * SEND_BYTES_MAX;

/// How often one `poll` goes on to receive what it knows to wait: a long write takes two receives, one for its header and
/// one for the rest. Bounded, so that a fast peer does not keep the owner from its other work.
const ROUNDS_PER_POLL: usize = 4;

/// How long a dropped transport waits for the kernel to let go of its buffers before it leaks them.
const DROP_TIME: Duration = Duration::from_secs(1);

/// Sizes. The defaults suit a node; memory is taken from the system only as it is used.
#[derive(Clone, Debug)]
pub struct Options {
    /// Receive buffer per connection, in bytes; at least 64 KiB.
    pub receive_bytes: usize,
    /// Staging ring per connection, in bytes: what small operations are copied to. At least 32 KiB; rounded up to a
    /// power of two.
    pub staging_bytes: usize,
    /// Writes per connection that may be under way before `Full`.
    pub operations: usize,
    /// Received messages per transport that may be unreleased before reading stops; 8 KiB each. `None`: as many as
    /// all peers together may have under way, up to 16384.
    pub messages: Option<usize>,
}

impl Default for Options {
    fn default() -> Options {
        Options { receive_bytes: 64 << 10, staging_bytes: 256 << 10, operations: 1024, messages: None }
    }
}

/// What a completion belongs to: a connection's receive or its send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Receive,
    Send,
}

fn label(slot: usize, request: Request) -> u64 {
    (slot as u64) << 1 | u64::from(request == Request::Send)
}

fn unlabel(label: u64) -> (usize, Request) {
    (((label >> 1) as usize), if label & 1 == 1 { Request::Send } else { Request::Receive })
}

/// [`Transport`] over TCP. Made and used on one thread.
pub struct TcpTransport {
    options: Options,
    /// Slot in `connections` by peer.
    by_peer: Box<[Option<usize>]>,
    /// A slot is used again only after the kernel reported everything queued for it, so completions never go astray.
    connections: Vec<Option<Box<Connection>>>,
    /// Connections with something to report, each at most once.
    ready: VecDeque<usize>,
    /// Connections with requests to queue, each at most once.
    dirty: VecDeque<usize>,
    /// Connections that wait for a message slot, each at most once.
    stalled: VecDeque<usize>,
    sources: Vec<Arc<Region>>,
    pool: Pool,
    serial: u64,
    /// Receives have been queued since the `poll` before last, and the kernel was not told.
    is_put_off: bool,
    /// A send has finished since `poll` was called last.
    made_room: bool,
    /// Declared last so that it goes last.
    ring: Ring,
    /// The kernel accepts requests from the thread that made the ring only.
    _one_thread: PhantomData<*const ()>,
}

impl TcpTransport {
    /// Sets up a transport for peers `0..peers_max` on the calling thread.
    ///
    /// # Errors
    /// Why this machine has no usable io_uring.
    pub fn new(peers_max: u16, options: Options) -> Result<TcpTransport, SetupError> {
        let peers = usize::from(peers_max);
        let messages = options.messages.unwrap_or((peers * SENDS_IN_FLIGHT_MAX).min(16384)).max(1);
        let options = Options {
            receive_bytes: options.receive_bytes.max(RECEIVE_BYTES_MIN),
            staging_bytes: options.staging_bytes.max(STAGING_BYTES_MIN).next_power_of_two(),
            operations: options.operations.max(1),
            messages: Some(messages),
        };
        Ok(TcpTransport {
            options,
            by_peer: vec![None; peers].into_boxed_slice(),
            connections: Vec::new(),
            ready: VecDeque::new(),
            dirty: VecDeque::new(),
            stalled: VecDeque::new(),
            sources: Vec::new(),
            pool: Pool::new(messages),
            serial: 0,
            is_put_off: false,
            made_room: false,
            ring: Ring::new(2 * u32::from(peers_max) + 16)?,
            _one_thread: PhantomData,
        })
    }

    fn output(&mut self, to: PeerId) -> Result<(usize, &mut Output, &mut Socket), Full> {
        let slot = self.by_peer.get(usize::from(to.0)).copied().flatten().ok_or(Full)?;
        let connection = self.connections[slot].as_mut().ok_or(Full)?;
        let (output, socket) = connection.output().ok_or(Full)?;
        Ok((slot, output, socket))
    }

    fn mark_dirty(&mut self, slot: usize) {
        let Some(connection) = &mut self.connections[slot] else { return };
        if !connection.is_dirty {
            connection.is_dirty = true;
            self.dirty.push_back(slot);
        }
    }

    fn mark_ready(&mut self, slot: usize) {
        let Some(connection) = &mut self.connections[slot] else { return };
        if !connection.is_ready {
            connection.is_ready = true;
            self.ready.push_back(slot);
        }
    }

    /// Queues what is due on dirty connections; whether that were sends too.
    fn start_dirty(&mut self) -> bool {
        let mut sends = false;
        for _ in 0..self.dirty.len() {
            let Some(slot) = self.dirty.pop_front() else { break };
            let Some(connection) = &mut self.connections[slot] else { continue };
            connection.is_dirty = false;
            let was_sending = connection.is_sending();
            if !connection.start(&mut self.ring, label(slot, Request::Receive), label(slot, Request::Send)) {
                // The ring is full for now.
                connection.is_dirty = true;
                self.dirty.push_back(slot);
            }
            sends |= connection.is_sending() && !was_sending;
            self.reclaim(slot);
        }
        sends
    }

    fn enter(&mut self) {
        self.is_put_off = false;
        if let Err(errno) = self.ring.enter() {
            // The ring is unusable: every peer is lost, and the owner learns it the usual way.
            for slot in 0..self.connections.len() {
                if let Some(connection) = &mut self.connections[slot] {
                    connection.end(DownReason::Io(errno));
                    self.mark_ready(slot);
                }
            }
        }
    }

    /// Takes all completions.
    fn reap(&mut self) {
        while let Some(completion) = self.ring.completion() {
            let (slot, request) = unlabel(completion.label);
            let Some(connection) = self.connections.get_mut(slot).and_then(Option::as_mut) else { continue };
            match request {
                Request::Receive => connection.on_received(completion.result, completion.more),
                Request::Send => {
                    connection.on_sent(completion.result);
                    // An owner that met `Full` has room now, though no event says so.
                    self.made_room = true;
                }
            }
            if connection.is_closing {
                self.reclaim(slot);
                continue;
            }
            let due = connection.wants_start();
            if request == Request::Receive {
                // Its next receive is queued after parsing, which makes room.
                self.mark_ready(slot);
            } else if due {
                self.mark_dirty(slot);
            }
        }
    }

    /// Gives `slot` up and cuts its connection; it is used again once the kernel is done with it.
    fn close(&mut self, slot: usize) {
        let Some(connection) = &mut self.connections[slot] else { return };
        if let Some(entry) = self.by_peer.get_mut(usize::from(connection.peer.0))
            && *entry == Some(slot)
        {
            *entry = None;
        }
        connection.close(&mut self.ring);
        self.reclaim(slot);
    }

    fn reclaim(&mut self, slot: usize) {
        let Some(connection) = &self.connections[slot] else { return };
        let listed = connection.is_ready || connection.is_dirty || connection.is_stalled;
        if connection.is_closing && !listed && !connection.is_in_flight() {
            self.connections[slot] = None;
        }
    }

    /// Reports one connection's events; how many.
    fn report(&mut self, slot: usize, events: &mut [Event]) -> usize {
        let Some(connection) = &mut self.connections[slot] else { return 0 };
        connection.is_ready = false;
        if connection.is_closing {
            self.reclaim(slot);
            return 0;
        }
        let (count, rest) = connection.report(&mut self.pool, events);
        let due = connection.wants_start();
        match rest {
            Rest::Idle => {}
            Rest::More => self.mark_ready(slot),
            Rest::Stalled if !connection.is_stalled => {
                connection.is_stalled = true;
                self.stalled.push_back(slot);
            }
            Rest::Stalled => {}
            Rest::Down => self.close(slot),
        }
        if due && rest != Rest::Down {
            self.mark_dirty(slot);
        }
        count
    }

    /// A free slot in the table, with room for it in every list.
    fn free_slot(&mut self) -> usize {
        let slot = self.connections.iter().position(Option::is_none).unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let slots = self.connections.len();
        for list in [&mut self.ready, &mut self.dirty, &mut self.stalled] {
            list.reserve(slots.saturating_sub(list.len()));
        }
        slot
    }
}

impl Transport for TcpTransport {
    type Link = TcpLink;

    fn register(&mut self, region: Arc<Region>) -> RegionKey {
        let key = RegionKey(u16::try_from(self.sources.len()).expect("fewer than 65536 regions"));
        for connection in self.connections.iter_mut().flatten() {
            connection.add_source(region.clone());
        }
        self.sources.push(region);
        key
    }

    fn admit(&mut self, peer: PeerId, link: TcpLink, exposed: &[Arc<Region>]) {
        assert!(usize::from(peer.0) < self.by_peer.len(), "peer {} of {} at most", peer.0, self.by_peer.len());
        self.fence(peer);
        // A link that cannot be made ready is broken already; its first receive says how.
        let stream = link.into_stream();
        let _ = stream.set_nonblocking(false);
        let _ = stream.set_nodelay(true);
        let slot = self.free_slot();
        self.serial += 1;
        let origin = Origin { slot, serial: self.serial };
        let fd = OwnedFd::from(stream);
        let connection = Connection::new((peer, origin), fd, &self.options, self.sources.clone(), exposed);
        self.connections[slot] = Some(Box::new(connection));
        self.by_peer[usize::from(peer.0)] = Some(slot);
        self.mark_dirty(slot);
    }

    #[inline]
    fn write(
        &mut self,
        to: PeerId,
        local: LocalRange,
        remote: RemoteOffset,
        notify: Option<u32>,
        token: Option<u64>,
    ) -> Result<(), Full> {
        let (slot, output, socket) = self.output(to)?;
        output.write(socket, local, remote, notify, token)?;
        self.mark_dirty(slot);
        Ok(())
    }

    #[inline]
    fn write_inline(
        &mut self,
        to: PeerId,
        bytes: &[u8],
        remote: RemoteOffset,
        notify: Option<u32>,
    ) -> Result<(), Full> {
        assert!(bytes.len() <= INLINE_BYTES_MAX, "inline writes take at most {INLINE_BYTES_MAX} bytes");
        let (slot, output, socket) = self.output(to)?;
        output.write_inline(socket, bytes, remote, notify)?;
        self.mark_dirty(slot);
        Ok(())
    }

    #[inline]
    fn send(&mut self, to: PeerId, message: &[u8]) -> Result<(), Full> {
        assert!(message.len() <= SEND_BYTES_MAX, "messages have at most {SEND_BYTES_MAX} bytes");
        let (slot, output, socket) = self.output(to)?;
        output.send(socket, message)?;
        self.mark_dirty(slot);
        Ok(())
    }

    fn flush(&mut self) {
        if !self.dirty.is_empty() {
            // Sends that finished meanwhile make way for what was issued since.
            self.reap();
            // Receives that were queued for the next arrivals can wait for the system call of the next `poll`: what was
            // sent, or what other agents of the thread have to send, cannot.
            if self.start_dirty() {
                self.enter();
            }
        }
    }

    fn poll(&mut self, events: &mut [Event]) -> usize {
        self.ring.disarm();
        // Whoever polls goes on to send.
        self.made_room = false;
        let mut count = 0;
        for round in 0..ROUNDS_PER_POLL {
            // A receive for what may arrive later is put off once: the owner is likely to have something to send by then,
            // and one system call does for both.
            if self.start_dirty() || round > 0 || self.is_put_off || self.ring.has_deferred() {
                self.enter();
            } else {
                self.is_put_off = self.ring.has_queued();
            }
            self.reap();
            let mut more = false;
            for _ in 0..self.ready.len() {
                if count == events.len() {
                    return count;
                }
                let Some(slot) = self.ready.pop_front() else { break };
                count += self.report(slot, &mut events[count..]);
                more |= self.connections[slot].as_ref().is_some_and(|c| c.has_more());
            }
            if !more {
                break;
            }
        }
        count
    }

    #[inline]
    fn message(&self, handle: MessageHandle) -> &[u8] {
        self.pool.message(handle)
    }

    fn release(&mut self, handle: MessageHandle) {
        let origin = self.pool.release(handle);
        if let Some(connection) = &mut self.connections[origin.slot]
            && connection.origin == origin
        {
            connection.unreleased -= 1;
        }
        // Which of them can go on is found out by letting all try, a rare and cheap event.
        while let Some(slot) = self.stalled.pop_front() {
            if let Some(connection) = &mut self.connections[slot] {
                connection.is_stalled = false;
                if connection.is_closing { self.reclaim(slot) } else { self.mark_ready(slot) }
            }
        }
    }

    fn fence(&mut self, peer: PeerId) {
        if let Some(slot) = self.by_peer.get(usize::from(peer.0)).copied().flatten() {
            self.close(slot);
        }
    }

    fn wait_fds(&self, fds: &mut Vec<RawFd>) {
        fds.push(self.ring.fd());
    }

    fn prepare_wait(&mut self) -> bool {
        self.reap();
        self.start_dirty();
        self.enter();
        self.ring.arm();
        self.made_room || !self.ready.is_empty() || !self.dirty.is_empty() || self.ring.has_work()
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        for slot in 0..self.connections.len() {
            if let Some(connection) = &mut self.connections[slot] {
                connection.close(&mut self.ring);
            }
        }
        let until = Instant::now() + DROP_TIME;
        while self.connections.iter().flatten().any(|connection| connection.is_in_flight()) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.ring.wait(left).is_err() {
                break;
            }
            self.reap();
        }
    }
}
