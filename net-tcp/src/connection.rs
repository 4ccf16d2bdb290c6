//! One peer's connection: parses what arrives, places writes in the exposed regions, and turns the rest into events.
//!
//! Frames are parsed only as far as there is room to report their events, so nothing is queued: what cannot be
//! reported yet stays in the receive buffer, and when that is full, in the network.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use antelog_core::mem::Region;
use antelog_core::transport::{DownReason, Event, PeerId, SEND_BYTES_MAX, SENDS_IN_FLIGHT_MAX};

use crate::frame::{Frame, HEADER_BYTES};
use crate::output::Output;
use crate::pool::{Origin, Pool};
use crate::uring::{Range, Ring, Socket};

/// Writes up to this size take effect at once, when all their bytes are there; larger ones piece by piece. Published
/// words are small, so their readers never see half of one.
const WHOLE_BYTES: usize = 512;

/// What a receive asks for beyond the rest of a write under way. A few records of 4 KiB with their frames come in one
/// piece: copying them costs less than one more system call. Of a long write the rest, once its header was read, is received
/// where it belongs instead of being copied there.
const AHEAD_BYTES: usize = 16 << 10;

/// A write of which bytes are still to come.
#[derive(Clone, Copy, Debug)]
struct Landing {
    region: usize,
    offset: usize,
    left: usize,
    notify: Option<u32>,
    acknowledge: bool,
}

impl Landing {
    /// So many more bytes are in place.
    fn advance(&mut self, bytes: usize) {
        self.offset += bytes;
        self.left -= bytes;
    }
}

/// Why parsing stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// Everything complete was parsed.
    Empty,
    /// No room for another event.
    Events,
    /// No slot for a message, until one is released.
    Messages,
    /// The peer broke the rules.
    Broken,
}

/// What a turn of [`Connection::report`] leaves to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// Nothing until more arrives.
    Idle,
    /// More events wait.
    More,
    /// Waits for messages to be released.
    Stalled,
    /// `PeerDown` was reported.
    Down,
}

/// A connection from admission to its last completion.
pub struct Connection {
    /// Who the other side is.
    pub peer: PeerId,
    /// Where messages are said to come from.
    pub origin: Origin,
    /// In the transport's list of connections that have something to report.
    pub is_ready: bool,
    /// In the transport's list of connections that have requests to queue.
    pub is_dirty: bool,
    /// Waits for messages to be released.
    pub is_stalled: bool,
    /// Given up; stays until the kernel is done with its buffers.
    pub is_closing: bool,
    /// Messages reported but not released.
    pub unreleased: usize,
    socket: Socket,
    output: Output,
    /// The socket held more than the last receive asked for.
    has_more: bool,
    /// Received bytes that were parsed, as an offset into the receive buffer.
    parsed: usize,
    /// Received bytes, as an offset into the receive buffer.
    filled: usize,
    landing: Option<Landing>,
    /// Operations of the peer that took effect.
    effected: u64,
    /// The peer waits for an acknowledgement.
    is_owed: bool,
    placed: Option<u64>,
    notified: Option<u32>,
    /// Nothing more arrives, for this reason.
    ended: Option<DownReason>,
    /// Nothing more can be sent; what the peer sent before is still read.
    is_mute: bool,
}

impl Connection {
    /// A connection over a connected, blocking socket. `sources` are the regions it may send from.
    pub fn new(
        (peer, origin): (PeerId, Origin),
        fd: OwnedFd,
        options: &crate::Options,
        sources: Vec<Arc<Region>>,
        exposed: &[Arc<Region>],
    ) -> Connection {
        Connection {
            peer,
            origin,
            is_ready: false,
            is_dirty: false,
            is_stalled: false,
            is_closing: false,
            unreleased: 0,
            socket: Socket::new(fd, options.receive_bytes, options.staging_bytes, sources, exposed.to_vec()),
            output: Output::new(options.staging_bytes, options.operations),
            has_more: false,
            parsed: 0,
            filled: 0,
            landing: None,
            effected: 0,
            is_owed: false,
            placed: None,
            notified: None,
            ended: None,
            is_mute: false,
        }
    }

    /// The send side, as long as operations are accepted.
    #[inline]
    pub fn output(&mut self) -> Option<(&mut Output, &mut Socket)> {
        (self.ended.is_none() && !self.is_mute).then_some((&mut self.output, &mut self.socket))
    }

    /// Adds a region to send from.
    pub fn add_source(&mut self, region: Arc<Region>) {
        self.socket.add_source(region);
    }

    /// Whether the kernel still uses the buffers.
    pub fn is_in_flight(&self) -> bool {
        self.socket.is_receiving() || self.socket.is_sending()
    }

    /// Whether a send is in flight.
    pub fn is_sending(&self) -> bool {
        self.socket.is_sending()
    }

    /// Whether bytes wait in the socket and no receive was queued for them yet.
    pub fn has_more(&self) -> bool {
        self.has_more && !self.socket.is_receiving()
    }

    /// Gives the connection up: nothing is parsed or sent any more, and nothing lands.
    pub fn close(&mut self, ring: &mut Ring) {
        self.is_closing = true;
        self.end(DownReason::Closed);
        self.socket.shutdown();
        self.socket.stop_landing(ring);
    }

    /// Takes note that nothing more arrives. The first reason counts.
    pub fn end(&mut self, reason: DownReason) {
        self.ended.get_or_insert(reason);
    }

    /// Queues whatever requests are due; false if the ring had no room for all.
    pub fn start(&mut self, ring: &mut Ring, receive_label: u64, send_label: u64) -> bool {
        if self.ended.is_some() {
            return true;
        }
        let mut queued = true;
        // Before what has arrived was looked at, it is not known where the next bytes belong.
        if !self.socket.is_receiving() && !self.is_ready {
            self.make_room();
            let room = (self.socket.receive_bytes() - self.filled).min(AHEAD_BYTES);
            if room > 0 {
                // While bytes of a write are missing, everything received was parsed: what comes next belongs to it.
                let landing = self.landing.filter(|l| l.left > 0).map(|l| Range {
                    region: l.region,
                    offset: l.offset,
                    len: l.left,
                });
                let buffer = (self.filled, room);
                queued &= self.socket.receive(ring, receive_label, buffer, landing, !self.has_more);
            }
        }
        if !self.socket.is_sending() && !self.is_mute {
            if self.is_owed && self.output.acknowledge(&mut self.socket, self.effected) {
                self.is_owed = false;
            }
            if !self.output.is_empty() {
                queued &= self.socket.send(ring, send_label, self.output.pieces());
            }
        }
        queued
    }

    /// Moves unparsed bytes to the buffer's start when little room is left behind them.
    fn make_room(&mut self) {
        if self.parsed == self.filled {
            (self.parsed, self.filled) = (0, 0);
        } else if self.can_compact() && self.socket.receive_bytes() - self.filled < self.socket.receive_bytes() / 2 {
            self.socket.compact(self.parsed, self.filled - self.parsed);
            self.filled -= self.parsed;
            self.parsed = 0;
        }
    }

    /// Bytes move only if at least as many were parsed since, so that moving costs no more than parsing. An incomplete
    /// frame is far smaller than half the buffer and therefore always gets room for its rest.
    fn can_compact(&self) -> bool {
        self.filled - self.parsed <= self.parsed
    }

    /// A receive finished with `result`; `more` says that it left bytes in the socket.
    pub fn on_received(&mut self, result: i32, more: bool) {
        let landing = self.socket.finish_receive();
        self.has_more = more;
        match usize::try_from(result) {
            Ok(0) => self.end(DownReason::Closed),
            Ok(bytes) => {
                let landed = bytes.min(landing);
                if let Some(landing) = &mut self.landing {
                    // The write that it landed for: until its bytes are there, nothing behind it is parsed.
                    landing.advance(landed);
                }
                self.filled += bytes - landed;
            }
            Err(_) if is_passing(-result) => {}
            Err(_) => self.end(reason_of(-result)),
        }
    }

    /// A send finished with `result`.
    pub fn on_sent(&mut self, result: i32) {
        self.socket.finish_send();
        match usize::try_from(result) {
            Ok(bytes) => self.output.sent(bytes),
            Err(_) if is_passing(-result) => {}
            Err(_) => {
                // Receives go on: they deliver what the peer sent before, and then the end, since this is shut down.
                self.is_mute = true;
                self.socket.shutdown();
            }
        }
    }

    /// Whether requests are due.
    pub fn wants_start(&self) -> bool {
        let send = !self.socket.is_sending() && !self.is_mute && (self.is_owed || !self.output.is_empty());
        let receive = !self.socket.is_receiving() && (self.filled < self.socket.receive_bytes() || self.can_compact());
        self.ended.is_none() && (send || receive)
    }

    /// Parses what arrived and reports it in `events`, which has room for at least one.
    pub fn report(&mut self, pool: &mut Pool, events: &mut [Event]) -> (usize, Rest) {
        let mut count = 0;
        let stop = self.parse(pool, events, &mut count);
        let peer = self.peer;
        let mut push = |event| match events.get_mut(count) {
            Some(slot) => {
                *slot = event;
                count += 1;
                true
            }
            None => false,
        };
        if self.notified.is_some_and(|value| push(Event::Notified { peer, value })) {
            self.notified = None;
        }
        if self.placed.is_some_and(|token| push(Event::Placed { peer, token })) {
            self.placed = None;
        }
        let unreported = self.notified.is_some() || self.placed.is_some();
        if stop == Stop::Broken {
            // Outlives an end that was seen before: the peer did both, and this is the one to tell.
            self.ended = Some(DownReason::Protocol);
        }
        let rest = match (stop, self.ended) {
            _ if unreported => Rest::More,
            (Stop::Events, _) => Rest::More,
            (Stop::Messages, _) => Rest::Stalled,
            (Stop::Broken | Stop::Empty, Some(reason)) => {
                if push(Event::PeerDown { peer, reason }) {
                    Rest::Down
                } else {
                    Rest::More
                }
            }
            _ => Rest::Idle,
        };
        (count, rest)
    }

    fn parse(&mut self, pool: &mut Pool, events: &mut [Event], count: &mut usize) -> Stop {
        if self.ended == Some(DownReason::Protocol) {
            return Stop::Broken;
        }
        loop {
            if self.landing.is_some() && !self.land() {
                return Stop::Empty;
            }
            let available = self.filled - self.parsed;
            let Some(header) = self.socket.received(self.parsed, available).first_chunk::<HEADER_BYTES>() else {
                return Stop::Empty;
            };
            let stop = match Frame::decode(header) {
                Ok(Frame::Write { region, offset, len, notify, acknowledge, number }) => {
                    let to = (usize::from(region), offset, len as usize);
                    self.on_write(to, notify, acknowledge, number)
                }
                Ok(Frame::Send { len, number }) => self.on_send((len as usize, number), pool, events, count),
                Ok(Frame::Placed { count }) => self.on_placed(count),
                Err(_) => Some(Stop::Broken),
            };
            if let Some(stop) = stop {
                return stop;
            }
        }
    }

    fn on_write(
        &mut self,
        (region, offset, len): (usize, u64, usize),
        notify: Option<u32>,
        acknowledge: bool,
        number: u32,
    ) -> Option<Stop> {
        let exposed = self.socket.exposed();
        let limit = exposed.get(region).map_or(0, |region| region.len() as u64);
        let inside = offset.checked_add(len as u64).is_some_and(|end| end <= limit);
        if !inside || region >= exposed.len() || number != self.next_number() {
            return Some(Stop::Broken);
        }
        if len <= WHOLE_BYTES && self.filled - self.parsed < HEADER_BYTES + len {
            return Some(Stop::Empty);
        }
        self.parsed += HEADER_BYTES;
        // Fits a usize: it lies inside a region.
        self.landing = Some(Landing { region, offset: offset as usize, left: len, notify, acknowledge });
        None
    }

    /// Places what arrived of a write; true if that was the last of it.
    fn land(&mut self) -> bool {
        let Some(landing) = &mut self.landing else { return true };
        let part = landing.left.min(self.filled - self.parsed);
        let bytes = self.socket.received(self.parsed, part);
        let region = &self.socket.exposed()[landing.region];
        match <[u8; 8]>::try_from(bytes) {
            // A whole word may be one that other threads read as such: publish it.
            Ok(word) if landing.offset.is_multiple_of(8) => region.store_u64(landing.offset, u64::from_ne_bytes(word)),
            _ => region.put(landing.offset, bytes),
        }
        self.parsed += part;
        landing.advance(part);
        if landing.left > 0 {
            return false;
        }
        self.notified = landing.notify.or(self.notified);
        self.is_owed |= landing.acknowledge;
        self.effected += 1;
        self.landing = None;
        true
    }

    fn on_send(
        &mut self,
        (len, number): (usize, u32),
        pool: &mut Pool,
        events: &mut [Event],
        count: &mut usize,
    ) -> Option<Stop> {
        if len > SEND_BYTES_MAX || number != self.next_number() {
            return Some(Stop::Broken);
        }
        if self.filled - self.parsed < HEADER_BYTES + len {
            return Some(Stop::Empty);
        }
        // Earlier writes' notifications go first, so that the order of events is that of the operations.
        if let (Some(value), Some(slot)) = (self.notified, events.get_mut(*count)) {
            *slot = Event::Notified { peer: self.peer, value };
            *count += 1;
            self.notified = None;
        }
        let Some(slot) = events.get_mut(*count) else { return Some(Stop::Events) };
        if self.unreleased >= SENDS_IN_FLIGHT_MAX {
            return Some(Stop::Messages);
        }
        let bytes = self.socket.received(self.parsed + HEADER_BYTES, len);
        let Some(message) = pool.put(bytes, self.origin) else { return Some(Stop::Messages) };
        *slot = Event::Received { peer: self.peer, message };
        *count += 1;
        self.unreleased += 1;
        self.parsed += HEADER_BYTES + len;
        self.effected += 1;
        None
    }

    fn on_placed(&mut self, count: u64) -> Option<Stop> {
        match self.output.placed(count) {
            Ok(token) => self.placed = token.or(self.placed),
            Err(_) => return Some(Stop::Broken),
        }
        self.parsed += HEADER_BYTES;
        None
    }

    fn next_number(&self) -> u32 {
        (self.effected + 1) as u32
    }
}

/// Conditions under which the same request simply is queued again.
fn is_passing(errno: i32) -> bool {
    matches!(errno, libc::EAGAIN | libc::EINTR | libc::ENOBUFS | libc::ENOMEM)
}

/// A process that ends resets its connections, so a reset is an end like any other.
fn reason_of(errno: i32) -> DownReason {
    match errno {
        libc::EPIPE | libc::ECONNRESET | libc::ECONNABORTED | libc::ENOTCONN | libc::ECANCELED => DownReason::Closed,
        errno => DownReason::Io(errno),
    }
}
