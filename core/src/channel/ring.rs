//! The message ring between two peers: every message matters, arrives once and in order, and is read in place.
//!
//! Each side exposes one region to the other. Sending is: copy the message into a registered mirror of the peer's ring,
//! write the new bytes across, then write the tail word with a notification. Receiving is: load the tail, read the
//! messages where they lie, write the consumed count back. Both counts are absolute bytes since the admission, so there is
//! no ambiguity between "empty" and "full", and a wrong count is recognised.
//!
//! **Lazy credits.** The consumed count is written back once an eighth of the ring is unreported, never per message. That
//! cannot block the sender for good: with everything consumed it sees at least 7/8 of its ring free, and half is enough
//! for any message (`frame`). A credit always notifies, because the sender may have parked on a full ring at any time
//! before it lands and the receiver cannot know; one wake-up per eighth of a ring is cheap.
//!
//! **Hostile peers.** Counts and headers come from a peer and are checked before use; see [`RingError`]. What a message
//! *says* is the decoder's to check. A peer that breaks the protocol by rewriting bytes it has already published
//! can tear the content of a message under its reader; it can neither lengthen it nor move it out of the ring.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use super::frame::{HEADER_BYTES, Layout, SKIP, frame_bytes, message_bytes_max};
use crate::mem::Region;
use crate::transport::{Full, LocalRange, PeerId, RegionKey, RemoteOffset, Transport};

/// Offset of the word that says how far the peer has written our incoming ring.
const TAIL_AT: usize = 0;
/// Offset of the word that says how far the peer has consumed our outgoing ring; a cache line of its own.
const CONSUMED_AT: usize = 64;
/// Offset of the incoming ring's bytes.
const BYTES_AT: usize = 128;
/// The ring's notifications carry no information but "look".
const LOOK: u32 = 0;

/// The peer broke the ring's protocol. The caller fences it: nothing more can be read or sent before a
/// [`Ring::reset`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingError {
    /// The tail went backwards, is not aligned, or leads further than the peer had credit for.
    Tail {
        /// The word found, in absolute bytes.
        tail: u64,
        /// What the peer was told to be consumed.
        reported: u64,
    },
    /// A header whose check word does not belong to its position, or a length that cannot be there.
    Header {
        /// Absolute position of the header.
        at: u64,
        /// The length it claims, in bytes.
        len: u32,
    },
    /// The peer claims to have consumed what was never sent to it, or takes a credit back.
    Credit {
        /// The word found, in absolute bytes.
        credit: u64,
        /// What had been announced to the peer.
        announced: u64,
    },
}

impl fmt::Display for RingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RingError::Tail { tail, reported } => {
                write!(f, "peer published an impossible ring tail {tail} (credit given up to {reported})")
            }
            RingError::Header { at, len } => write!(f, "peer's ring holds no valid message at {at} (length {len})"),
            RingError::Credit { credit, announced } => {
                write!(f, "peer returned an impossible credit {credit} (announced to it: {announced})")
            }
        }
    }
}

impl std::error::Error for RingError {}

/// One side of a duplex message ring. Owned by the thread that owns the transport. Nothing here allocates after `new`.
#[derive(Debug)]
pub struct Ring {
    incoming: Arc<Region>,
    staging: Arc<Region>,
    staging_key: RegionKey,
    remote_region: u16,
    layout_in: Layout,
    layout_out: Layout,

    /// Staged so far; `announced <= written <= pushed`, all at message boundaries.
    pushed: u64,
    /// Data writes accepted so far.
    written: u64,
    /// Tail writes accepted so far.
    announced: u64,
    /// The newest valid consumed count seen; staged bytes before it are free again.
    credited: u64,
    /// The newest skip header staged.
    skip_at: Option<u64>,

    /// The newest valid tail seen.
    tail: u64,
    /// Everything before it was consumed here.
    consumed: u64,
    /// What the peer was told of `consumed`.
    reported: u64,
    /// Frame bytes of the message that `peek` returned last; 0 when there is none.
    peeked: u64,

    fault: Option<RingError>,
}

impl Ring {
    /// Bytes of the region that a side with an incoming ring of `capacity` bytes exposes.
    pub const fn region_bytes(capacity: usize) -> usize {
        BYTES_AT + capacity
    }

    /// A ring that receives in `incoming` (exposed to the peer, at least [`region_bytes`](Self::region_bytes) long)
    /// and sends from `staging` (registered with the transport as `staging_key`, at least `capacity_out` long). The
    /// peer's `capacity_in` is our `capacity_out` and the other way round. Panics on sizes that do not fit.
    pub fn new(
        incoming: Arc<Region>,
        staging: Arc<Region>,
        staging_key: RegionKey,
        capacity_in: usize,
        capacity_out: usize,
    ) -> Ring {
        let (layout_in, layout_out) = (Layout::new(capacity_in), Layout::new(capacity_out));
        assert!(incoming.len() >= Self::region_bytes(capacity_in), "the incoming region is too short for its ring");
        assert!(staging.len() >= capacity_out, "the staging region is too short for its ring");
        let mut ring = Ring {
            incoming,
            staging,
            staging_key,
            remote_region: 0,
            layout_in,
            layout_out,
            pushed: 0,
            written: 0,
            announced: 0,
            credited: 0,
            skip_at: None,
            tail: 0,
            consumed: 0,
            reported: 0,
            peeked: 0,
            fault: None,
        };
        ring.reset();
        ring
    }

    /// Names the peer's region when it is not the first that the peer exposes to us.
    #[must_use]
    pub fn with_remote_region(mut self, region: u16) -> Ring {
        self.remote_region = region;
        self
    }

    /// Starts over at 0. Call it for every admission, after the old connection was fenced and before the region is
    /// exposed again: the peer's first words must not be overwritten. Staged and unread messages are dropped.
    pub fn reset(&mut self) {
        self.incoming.store_u64(TAIL_AT, 0);
        self.incoming.store_u64(CONSUMED_AT, 0);
        (self.pushed, self.written, self.announced, self.credited) = (0, 0, 0, 0);
        (self.tail, self.consumed, self.reported, self.peeked) = (0, 0, 0, 0);
        self.skip_at = None;
        self.fault = None;
    }

    /// The largest message this ring sends, in bytes.
    pub fn message_bytes_max(&self) -> usize {
        message_bytes_max(self.layout_out.capacity())
    }

    /// The largest message, in bytes, that `push` takes now. 0 also when it takes none.
    pub fn room(&self) -> usize {
        match self.read_credit() {
            Ok(credited) => self.layout_out.room(self.pushed, credited),
            Err(_) => 0,
        }
    }

    /// What the peer did wrong, if anything was noticed since the last reset; for a side that sends and never peeks.
    pub fn fault(&self) -> Option<RingError> {
        self.fault
    }

    /// True while something pushed was not published to its end.
    pub fn unpublished(&self) -> bool {
        self.announced != self.pushed
    }

    /// Whether the peer reported that it consumed everything pushed. It reports lazily, unless it calls
    /// [`credit_all`](Self::credit_all).
    pub fn is_consumed(&self) -> bool {
        self.read_credit().is_ok_and(|credited| credited == self.pushed)
    }

    /// Stages one message, the concatenation of `parts`.
    ///
    /// # Errors
    /// `Full`: the peer has to consume first. Panics when the message is longer than
    /// [`message_bytes_max`](Self::message_bytes_max).
    #[inline]
    pub fn push(&mut self, parts: &[&[u8]]) -> Result<(), Full> {
        let len = parts.iter().map(|part| part.len()).sum();
        let mut at = self.stage_header(len)?;
        for part in parts {
            self.staging.put(at, part);
            at += part.len();
        }
        Ok(())
    }

    /// Stages one message: `head`, then `len` bytes from `offset` of `region`, which is not the staging region.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    #[inline]
    pub fn push_from(&mut self, head: &[u8], region: &Region, offset: usize, len: usize) -> Result<(), Full> {
        let at = self.stage_header(head.len() + len)?;
        self.staging.put(at, head);
        self.staging.put_from(at + head.len(), region, offset, len);
        Ok(())
    }

    /// Makes room for a message and writes its header; returns the body's offset in the staging region. The body
    /// must follow before anything is published.
    #[inline]
    fn stage_header(&mut self, len: usize) -> Result<usize, Full> {
        let layout = self.layout_out;
        let place = match layout.place(self.pushed, self.credited, len) {
            Some(place) => place,
            None => {
                self.take_credit();
                layout.place(self.pushed, self.credited, len).ok_or(Full)?
            }
        };
        if let Some(at) = place.skip_at {
            self.staging.put(layout.index(at), &header(at, SKIP));
            self.skip_at = Some(at);
        }
        let at = layout.index(place.start);
        let frame = frame_bytes(len);
        // The padding is sent too: it must not be what an earlier message, to another peer perhaps, left there.
        self.staging.put(at + frame - 8, &[0; 8]);
        self.staging.put(at, &header(place.start, len as u32));
        self.pushed = place.start + frame as u64;
        Ok(at + HEADER_BYTES)
    }

    fn take_credit(&mut self) {
        match self.read_credit() {
            Ok(credited) => self.credited = credited,
            Err(error) => self.fault = self.fault.or(Some(error)),
        }
    }

    fn read_credit(&self) -> Result<u64, RingError> {
        let credit = u64::from_le(self.incoming.load_u64(CONSUMED_AT));
        let valid = credit >= self.credited && credit <= self.announced && credit.is_multiple_of(8);
        if valid { Ok(credit) } else { Err(RingError::Credit { credit, announced: self.announced }) }
    }

    /// Issues everything pushed: the new bytes in one write (two where they wrap), then the tail. True when all of it
    /// was accepted; otherwise call it again after the transport's next `poll`. Costs two comparisons when nothing is new.
    ///
    /// Staged bytes are rewritten only after the peer reported that it consumed them, so no `Placed` is asked for.
    #[inline]
    pub fn publish<T: Transport>(&mut self, transport: &mut T, to: PeerId) -> bool {
        if self.announced == self.pushed {
            return true;
        }
        while self.written < self.pushed {
            let lap_end = self.written + self.layout_out.to_end(self.written) as u64;
            // Behind a skip header nothing is worth sending. Fewer bytes than a lap are unwritten, so a skip at or
            // after `written` is in the same lap.
            let (end, next) = match self.skip_at {
                Some(at) if at >= self.written => (at + HEADER_BYTES as u64, lap_end),
                _ => (lap_end.min(self.pushed), lap_end.min(self.pushed)),
            };
            let index = self.layout_out.index(self.written);
            let local = LocalRange { region: self.staging_key, offset: index, len: (end - self.written) as usize };
            let remote = RemoteOffset { region: self.remote_region, offset: BYTES_AT + index };
            if transport.write(to, local, remote, None, None).is_err() {
                break;
            }
            self.written = next;
        }
        // The end of a lap is a message boundary too: whatever was written can be announced.
        if self.written > self.announced {
            let remote = RemoteOffset { region: self.remote_region, offset: TAIL_AT };
            if transport.write_inline(to, &self.written.to_le_bytes(), remote, Some(LOOK)).is_ok() {
                self.announced = self.written;
            }
        }
        self.announced == self.pushed
    }

    /// The next message, where it lies; the same one until [`consume`](Self::consume). Decode it before the transport
    /// is polled again (see "Hostile peers" above). Bad credits of the peer are reported here too.
    ///
    /// # Errors
    /// [`RingError`], from then on for good: fence the peer.
    #[inline]
    pub fn peek(&mut self) -> Result<Option<&[u8]>, RingError> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        match self.find_message() {
            Ok(None) => Ok(None),
            Ok(Some((offset, len))) => {
                // SAFETY: the range lies between `consumed` and the tail, which was loaded with acquire after the peer's
                // writes (T2), and an honest sender leaves it alone until `credit` reported it consumed, which takes
                // `&mut self` and so ends the slice. A peer that writes it nonetheless tears the content of plain
                // bytes, which decoders treat as untrusted anyway; position and length are ours.
                Ok(Some(unsafe { self.incoming.bytes(offset, len) }))
            }
            Err(error) => {
                self.fault = Some(error);
                Err(error)
            }
        }
    }

    /// Finds the next message: offset in the region and length. Checks all that the peer wrote, and reads it once.
    #[inline]
    fn find_message(&mut self) -> Result<Option<(usize, usize)>, RingError> {
        let layout = self.layout_in;
        loop {
            if self.consumed == self.tail && !self.load_tail()? {
                return Ok(None);
            }
            let at = self.consumed;
            let index = layout.index(at);
            let mut bytes = [0u8; HEADER_BYTES];
            self.incoming.get(BYTES_AT + index, &mut bytes);
            let len = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            let bad = RingError::Header { at, len };
            if bytes != header(at, len) {
                return Err(bad);
            }
            let (available, to_end) = ((self.tail - at) as usize, layout.to_end(at));
            if len == SKIP {
                // A skip is shorter than the largest frame, so the next header, at the start of a lap, is not another.
                if to_end >= layout.capacity() / 4 || to_end > available {
                    return Err(bad);
                }
                self.consumed += to_end as u64;
                continue;
            }
            let len = len as usize;
            if len > message_bytes_max(layout.capacity()) || frame_bytes(len) > available.min(to_end) {
                return Err(bad);
            }
            self.peeked = frame_bytes(len) as u64;
            return Ok(Some((BYTES_AT + index + HEADER_BYTES, len)));
        }
    }

    /// Looks at the peer's tail; true when it leads further.
    fn load_tail(&mut self) -> Result<bool, RingError> {
        let tail = u64::from_le(self.incoming.load_u64(TAIL_AT));
        // Not even bytes consumed here may be overwritten before the peer was told so.
        let most = self.reported + self.layout_in.capacity() as u64;
        if tail < self.tail || tail > most || !tail.is_multiple_of(8) {
            return Err(RingError::Tail { tail, reported: self.reported });
        }
        self.tail = tail;
        Ok(tail != self.consumed)
    }

    /// Gives the message that [`peek`](Self::peek) returned back. Panics when there was none.
    #[inline]
    pub fn consume(&mut self) {
        assert!(self.peeked > 0, "consume follows a peek that found a message");
        self.consumed += self.peeked;
        self.peeked = 0;
    }

    /// Reports what was consumed once it is an eighth of the ring. Call it once a cycle. False when the transport was
    /// full: the report is still due.
    #[inline]
    pub fn credit<T: Transport>(&mut self, transport: &mut T, to: PeerId) -> bool {
        let due = self.consumed - self.reported >= self.layout_in.capacity() as u64 / 8;
        !due || self.credit_all(transport, to)
    }

    /// Reports everything consumed, however little it is; for an orderly end. Returns as [`credit`](Self::credit).
    pub fn credit_all<T: Transport>(&mut self, transport: &mut T, to: PeerId) -> bool {
        if self.consumed != self.reported {
            let remote = RemoteOffset { region: self.remote_region, offset: CONSUMED_AT };
            if transport.write_inline(to, &self.consumed.to_le_bytes(), remote, Some(LOOK)).is_err() {
                return false;
            }
            self.reported = self.consumed;
        }
        true
    }
}

/// The header of a message of `len` bytes at absolute position `at`. Its check word depends on both, so neither bytes of
/// an earlier lap nor zeroes pass for a header.
#[inline]
fn header(at: u64, len: u32) -> [u8; HEADER_BYTES] {
    let mixed = (at + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ u64::from(len).wrapping_mul(0xD1B5_4A32_D192_ED03);
    let check = (mixed ^ (mixed >> 32)) as u32;
    (u64::from(len) | u64::from(check) << 32).to_le_bytes()
}

#[cfg(test)]
mod tests;
