//! A queue pair's state: what is under way to the peer, which slots are in use, which completions nobody sees yet.

use std::collections::VecDeque;

use super::rng::Rng;
use crate::provider::{Completion, Operation, Patience, Receive};

/// Most pieces a message is cut into.
const PIECES_MAX: usize = 16;
/// No loss was drawn.
const NEVER: u8 = u8::MAX;

/// Where a message's bytes come from.
pub(super) enum Source {
    /// Taken along when it was posted.
    Taken(Box<[u8]>),
    /// Fetched from the sender's memory when they are placed.
    Memory { memory: usize, offset: usize },
}

/// A source that must not have changed when its completion is polled.
pub(super) struct Watched {
    pub(super) id: u64,
    pub(super) memory: usize,
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) digest: u64,
}

/// A posted request.
pub(super) struct Message {
    pub(super) id: u64,
    pub(super) operation: Operation,
    pub(super) len: usize,
    pub(super) source: Source,
    pub(super) signalled: bool,
    pub(super) watched: Option<Watched>,
}

/// How the oldest message that is not executed yet is being placed.
pub(super) struct Placing {
    /// The receiver's memory and the offset of the first byte.
    pub(super) memory: usize,
    pub(super) offset: usize,
    /// All pieces but the first and last have this length, a multiple of 8.
    grain_bytes: usize,
    pub(super) count: u8,
    pub(super) next: u8,
    order: [u8; PIECES_MAX],
    /// The piece before which the message is lost.
    lost_at: u8,
}

impl Placing {
    /// Cuts `len` bytes at `offset` between aligned words.
    pub(super) fn new(rng: &mut Rng, memory: usize, offset: usize, len: usize, pieces_max: u32) -> Placing {
        let words = if len == 0 { 0 } else { (offset + len).div_ceil(8) - offset / 8 };
        let wanted = 1 + rng.below(words.min(pieces_max as usize).clamp(1, PIECES_MAX));
        let grain = words.div_ceil(wanted).max(1);
        let count = words.div_ceil(grain);
        let mut order = std::array::from_fn(|n| n as u8);
        for n in (1..count).rev() {
            order.swap(n, rng.below(n + 1));
        }
        Placing { memory, offset, grain_bytes: grain * 8, count: count as u8, next: 0, order, lost_at: NEVER }
    }

    /// Draws whether, and where, what is left is lost: before a piece or after the last.
    pub(super) fn draw_loss(&mut self, rng: &mut Rng, loss: u32) {
        let left = usize::from(self.count - self.next);
        self.lost_at = if rng.one_in(loss) { self.next + rng.below(left + 1) as u8 } else { NEVER };
    }

    pub(super) fn is_lost(&self) -> bool {
        self.next == self.lost_at
    }

    /// The next piece of a message of `len` bytes: its first byte within the message, and its length.
    pub(super) fn piece(&mut self, len: usize) -> (usize, usize) {
        let number = usize::from(self.order[usize::from(self.next)]);
        self.next += 1;
        // Positions count from the aligned word that holds the first byte.
        let skipped = self.offset % 8;
        let from = (number * self.grain_bytes).max(skipped);
        let to = ((number + 1) * self.grain_bytes).min(skipped + len);
        (from - skipped, to - from)
    }
}

/// What one end sends the other, oldest first.
#[derive(Default)]
pub(super) struct Stream {
    /// Requests not acknowledged yet.
    pub(super) messages: VecDeque<Message>,
    /// So many of them, from the front, the peer has executed.
    pub(super) executed: usize,
    pub(super) placing: Option<Placing>,
}

/// Both ends of a connection as the sender knows them.
#[derive(Clone, Copy)]
pub(super) struct Route {
    pub(super) gid: [u8; 16],
    pub(super) number: u32,
    pub(super) psn: u32,
    pub(super) peer_gid: [u8; 16],
    pub(super) peer_number: u32,
    pub(super) peer_psn: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Takes receives.
    Made,
    Connected(Patience),
    /// Takes everything and completes it with `Flushed`.
    Error,
}

/// Which half of a queue pair a completion belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Send = 0,
    Receive = 1,
}

/// A completion and the slots that are free once it is polled.
pub(super) struct Entry {
    pub(super) queue: usize,
    pub(super) number: u32,
    pub(super) side: Side,
    pub(super) frees: usize,
    pub(super) completion: Completion,
}

pub(super) struct Queue {
    pub(super) number: u32,
    pub(super) state: State,
    pub(super) route: Option<Route>,
    pub(super) stream: Stream,
    pub(super) requests_max: usize,
    pub(super) receives_max: usize,
    pub(super) requests_used: usize,
    pub(super) receives_used: usize,
    pub(super) receives: VecDeque<Receive>,
    /// Acknowledged requests that no completion covers yet.
    pub(super) uncovered: usize,
    /// Of the acknowledged requests whose slots are not free, in order; `None` for those without a watched source.
    pub(super) retired: VecDeque<Option<Watched>>,
    /// Completions that are not visible yet, by [`Side`].
    pub(super) done: [VecDeque<Entry>; 2],
    /// Nothing moves before this time: something was lost.
    pub(super) stalled_until_ns: u64,
    /// No message is executed before this time: the receiver was not ready.
    pub(super) not_ready_until_ns: u64,
    /// Losses since the last acknowledgement.
    pub(super) attempts: u32,
}

impl Queue {
    pub(super) fn new(number: u32, requests_max: usize, receives_max: usize) -> Queue {
        Queue {
            number,
            state: State::Made,
            route: None,
            stream: Stream::default(),
            requests_max,
            receives_max,
            requests_used: 0,
            receives_used: 0,
            receives: VecDeque::new(),
            uncovered: 0,
            retired: VecDeque::new(),
            done: [VecDeque::new(), VecDeque::new()],
            stalled_until_ns: 0,
            not_ready_until_ns: 0,
            attempts: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_every_byte_once_and_tear_no_word() {
        let mut rng = Rng::new(1);
        let mut permuted = 0;
        for round in 0..2000 {
            let (offset, len) = (rng.below(64), rng.below(if round % 2 == 0 { 40 } else { 5000 }));
            let mut placing = Placing::new(&mut rng, 0, offset, len, 16);
            let mut seen = vec![0; len];
            let mut last = 0;
            for _ in 0..placing.count {
                let (from, piece) = placing.piece(len);
                assert!(piece > 0);
                for (at, end) in [(from, 0), (from + piece, len)] {
                    assert!(at == end || (offset + at).is_multiple_of(8), "{offset}+{len}: a cut at {at}");
                }
                seen[from..from + piece].iter_mut().for_each(|n| *n += 1);
                permuted += usize::from(from < last);
                last = from;
            }
            assert!(seen.iter().all(|&n| n == 1), "{offset}+{len}: {seen:?}");
            assert_eq!(placing.next, placing.count);
        }
        assert!(permuted > 1000, "{permuted}");
    }
}
