//! What one connection has yet to send: a byte stream made of staged bytes and of ranges of registered regions.
//!
//! Everything is bounded and allocated when the connection is admitted. An operation either fits as a whole or is
//! refused without a trace, which is what the contract calls full.

use std::collections::VecDeque;
use std::iter;

use antelog_core::transport::{Full, LocalRange, RemoteOffset};

use crate::frame::{BadFrame, Frame, HEADER_BYTES};
use crate::uring::{Piece, Socket};

/// Writes of fewer bytes are copied behind their header; from here on the kernel reads the region itself.
const REFERENCE_BYTES: usize = 1024;

/// A stretch of the outgoing byte stream.
#[derive(Clone, Copy, Debug)]
enum Segment {
    /// The next bytes of the staging ring.
    Staged { len: usize },
    /// Bytes of a registered region.
    Source { region: usize, offset: usize, len: usize },
}

/// The send side of a connection.
pub struct Output {
    /// Size of the staging ring in bytes, a power of two.
    ring_bytes: usize,
    /// Bytes ever sent from the staging ring.
    staged_from: u64,
    /// Bytes ever put into the staging ring.
    staged_to: u64,
    segments: VecDeque<Segment>,
    segments_max: usize,
    /// Operations that asked for `Placed`: number, token.
    tokens: VecDeque<(u64, u64)>,
    tokens_max: usize,
    /// Operations ever accepted.
    issued: u64,
    /// Operations known to have taken effect.
    placed: u64,
}

impl Output {
    /// An empty queue for `operations` outstanding writes; `ring_bytes` is a power of two.
    pub fn new(ring_bytes: usize, operations: usize) -> Output {
        let segments_max = 2 * operations + 1;
        Output {
            ring_bytes,
            staged_from: 0,
            staged_to: 0,
            segments: VecDeque::with_capacity(segments_max),
            segments_max,
            tokens: VecDeque::with_capacity(operations),
            tokens_max: operations,
            issued: 0,
            placed: 0,
        }
    }

    /// Whether everything was sent.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Whether `staged` bytes and `referenced` ranges fit. Room for one acknowledgement is kept back, so that a queue
    /// full of our own writes never keeps the peer waiting for it.
    fn fits(&self, staged: usize, referenced: usize) -> bool {
        let used = (self.staged_to - self.staged_from) as usize;
        used + staged + HEADER_BYTES <= self.ring_bytes && self.segments.len() + 1 + referenced < self.segments_max
    }

    /// Queues a one-sided write. See the transport contract.
    ///
    /// # Errors
    /// [`Full`], without effect.
    pub fn write(
        &mut self,
        socket: &mut Socket,
        local: LocalRange,
        remote: RemoteOffset,
        notify: Option<u32>,
        token: Option<u64>,
    ) -> Result<(), Full> {
        let region = usize::from(local.region.0);
        let limit = socket.source(region).len();
        let inside = local.offset.checked_add(local.len).is_some_and(|end| end <= limit);
        assert!(inside, "write of {}+{} from a region of {limit} bytes", local.offset, local.len);
        let copied = local.len < REFERENCE_BYTES;
        let (staged, referenced) = if copied { (HEADER_BYTES + local.len, 0) } else { (HEADER_BYTES, 1) };
        if !self.fits(staged, referenced) || (token.is_some() && self.tokens.len() == self.tokens_max) {
            return Err(Full);
        }
        self.begin_write(socket, remote, local.len, notify, token);
        if copied {
            let (at, first) = self.reserve(local.len);
            socket.stage_source(at, region, local.offset, first);
            socket.stage_source(0, region, local.offset + first, local.len - first);
        } else {
            self.segments.push_back(Segment::Source { region, offset: local.offset, len: local.len });
        }
        Ok(())
    }

    /// Queues a write of bytes that are copied.
    ///
    /// # Errors
    /// [`Full`], without effect.
    pub fn write_inline(
        &mut self,
        socket: &mut Socket,
        bytes: &[u8],
        remote: RemoteOffset,
        notify: Option<u32>,
    ) -> Result<(), Full> {
        if !self.fits(HEADER_BYTES + bytes.len(), 0) {
            return Err(Full);
        }
        self.begin_write(socket, remote, bytes.len(), notify, None);
        self.stage(socket, bytes);
        Ok(())
    }

    /// Queues a message.
    ///
    /// # Errors
    /// [`Full`], without effect.
    pub fn send(&mut self, socket: &mut Socket, message: &[u8]) -> Result<(), Full> {
        if !self.fits(HEADER_BYTES + message.len(), 0) {
            return Err(Full);
        }
        self.issued += 1;
        let frame = Frame::Send { len: message.len() as u32, number: self.issued as u32 };
        self.stage(socket, &frame.encode());
        self.stage(socket, message);
        Ok(())
    }

    /// Queues an acknowledgement of the peer's first `count` operations; false if there is no room now.
    pub fn acknowledge(&mut self, socket: &mut Socket, count: u64) -> bool {
        let used = (self.staged_to - self.staged_from) as usize;
        if used + HEADER_BYTES > self.ring_bytes || self.segments.len() == self.segments_max {
            return false;
        }
        self.stage(socket, &Frame::Placed { count }.encode());
        true
    }

    /// Takes note of the peer's acknowledgement of our first `count` operations; the newest token it covers, if any.
    ///
    /// # Errors
    /// [`BadFrame`] for a count that goes back, or beyond what was issued.
    pub fn placed(&mut self, count: u64) -> Result<Option<u64>, BadFrame> {
        if count < self.placed || count > self.issued {
            return Err(BadFrame);
        }
        self.placed = count;
        let mut newest = None;
        while let Some(&(number, token)) = self.tokens.front() {
            if number > count {
                break;
            }
            self.tokens.pop_front();
            newest = Some(token);
        }
        Ok(newest)
    }

    /// The stretches of memory to send next, in order.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + '_ {
        let mut position = self.staged_from;
        self.segments.iter().flat_map(move |&segment| {
            let (first, second) = match segment {
                Segment::Staged { len } => {
                    let at = self.wrap(position);
                    position += len as u64;
                    let before_end = len.min(self.ring_bytes - at);
                    let rest = Piece::Staged { offset: 0, len: len - before_end };
                    (Piece::Staged { offset: at, len: before_end }, (before_end < len).then_some(rest))
                }
                Segment::Source { region, offset, len } => (Piece::Source { region, offset, len }, None),
            };
            iter::once(first).chain(second)
        })
    }

    /// Takes note that the first `bytes` of [`pieces`](Self::pieces) were sent.
    pub fn sent(&mut self, bytes: usize) {
        let mut left = bytes;
        while left > 0 {
            let Some(segment) = self.segments.front_mut() else { return };
            let (len, staged) = match segment {
                Segment::Staged { len } => (len, true),
                Segment::Source { offset, len, .. } => {
                    *offset += left.min(*len);
                    (len, false)
                }
            };
            let part = left.min(*len);
            *len -= part;
            left -= part;
            let done = *len == 0;
            if staged {
                self.staged_from += part as u64;
            }
            if done {
                self.segments.pop_front();
            }
        }
    }

    fn begin_write(
        &mut self,
        socket: &mut Socket,
        remote: RemoteOffset,
        len: usize,
        notify: Option<u32>,
        token: Option<u64>,
    ) {
        self.issued += 1;
        if let Some(token) = token {
            self.tokens.push_back((self.issued, token));
        }
        let frame = Frame::Write {
            region: remote.region,
            offset: remote.offset as u64,
            len: u32::try_from(len).expect("a write is shorter than 4 GiB"),
            notify,
            acknowledge: token.is_some(),
            number: self.issued as u32,
        };
        self.stage(socket, &frame.encode());
    }

    fn stage(&mut self, socket: &mut Socket, bytes: &[u8]) {
        let (at, first) = self.reserve(bytes.len());
        socket.stage(at, &bytes[..first]);
        socket.stage(0, &bytes[first..]);
    }

    /// Takes `len` bytes of the staging ring, which has them: where they begin and how many lie before the wrap.
    fn reserve(&mut self, len: usize) -> (usize, usize) {
        let at = self.wrap(self.staged_to);
        self.staged_to += len as u64;
        match self.segments.back_mut() {
            Some(Segment::Staged { len: existing }) => *existing += len,
            _ if len > 0 => self.segments.push_back(Segment::Staged { len }),
            _ => {}
        }
        (at, len.min(self.ring_bytes - at))
    }

    fn wrap(&self, position: u64) -> usize {
        position as usize & (self.ring_bytes - 1)
    }
}
