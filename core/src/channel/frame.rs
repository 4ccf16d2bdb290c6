//! Where messages lie in a byte ring: the arithmetic that the network ring and the thread queue share.
//!
//! Positions are absolute (bytes since the channel began) and never wrap; only the index into the buffer does. A
//! message is a header of 8 bytes and its body, padded to 8, and never crosses the end of the buffer: where it would,
//! a header with the length [`SKIP`] sends the reader to the start of the next lap.

/// Bytes in front of every message: a length and, in the network ring, a check word.
pub(super) const HEADER_BYTES: usize = 8;

/// The length that means "nothing more in this lap".
pub(super) const SKIP: u32 = u32::MAX;

/// The smallest channel, in bytes.
pub const CAPACITY_BYTES_MIN: usize = 4096;

/// The largest channel, in bytes.
pub const CAPACITY_BYTES_MAX: usize = 1 << 30;

/// The largest message, in bytes, that a channel of `capacity` bytes carries.
///
/// A quarter: a message and the skip before it then never need more than half of the channel, so a receiver may
/// be lazy about reporting what it consumed without ever blocking the sender for good.
pub const fn message_bytes_max(capacity: usize) -> usize {
    capacity / 4 - HEADER_BYTES
}

/// Bytes that a message of `len` bytes takes in a channel.
pub(super) const fn frame_bytes(len: usize) -> usize {
    HEADER_BYTES + len.next_multiple_of(8)
}

/// The size of one byte ring, and what follows from it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    capacity: usize,
}

/// Where a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Absolute position at which a skip header is needed first.
    pub skip_at: Option<u64>,
    /// Absolute position of the frame.
    pub start: u64,
}

impl Layout {
    /// Panics unless `capacity` is a power of two within the limits: a size is chosen at set-up, by code.
    pub(super) fn new(capacity: usize) -> Layout {
        let allowed = (CAPACITY_BYTES_MIN..=CAPACITY_BYTES_MAX).contains(&capacity) && capacity.is_power_of_two();
        assert!(
            allowed,
            "a channel's capacity is a power of two from {CAPACITY_BYTES_MIN} to {CAPACITY_BYTES_MAX}, not {capacity}"
        );
        Layout { capacity }
    }

    #[inline]
    pub(super) fn capacity(self) -> usize {
        self.capacity
    }

    /// The buffer index of an absolute position.
    #[inline]
    pub(super) fn index(self, position: u64) -> usize {
        position as usize & (self.capacity - 1)
    }

    /// Bytes from `position` to the end of its lap; never 0.
    #[inline]
    pub(super) fn to_end(self, position: u64) -> usize {
        self.capacity - self.index(position)
    }

    /// Where a message of `len` bytes goes when `pushed` is the sender's position and everything before `consumed` is
    /// free again; `None` when it does not fit yet. Panics when it could never fit.
    #[inline]
    pub(super) fn place(self, pushed: u64, consumed: u64, len: usize) -> Option<Place> {
        let most = message_bytes_max(self.capacity);
        assert!(len <= most, "a message of {len} bytes in a channel whose messages have at most {most}");
        let frame = frame_bytes(len);
        let free = self.capacity - (pushed - consumed) as usize;
        let to_end = self.to_end(pushed);
        if frame <= to_end {
            return (frame <= free).then_some(Place { skip_at: None, start: pushed });
        }
        let fits = to_end + frame <= free;
        fits.then_some(Place { skip_at: Some(pushed), start: pushed + to_end as u64 })
    }

    /// The largest message that [`place`](Self::place) finds room for; 0 also when there is none at all.
    #[inline]
    pub(super) fn room(self, pushed: u64, consumed: u64) -> usize {
        let free = self.capacity - (pushed - consumed) as usize;
        let to_end = self.to_end(pushed);
        // Either in what is left of this lap, or behind a skip at the start of the next one.
        let frame = free.min(to_end).max(free.saturating_sub(to_end));
        frame.min(self.capacity / 4).saturating_sub(HEADER_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `room` and `place` agree at every position and fill level of a small ring: what `room` promises fits, 1 byte
    /// (one frame step) more does not, unless the limit on messages is what stopped it.
    #[test]
    fn room_is_exactly_what_fits() {
        let layout = Layout::new(CAPACITY_BYTES_MIN);
        let most = message_bytes_max(layout.capacity());
        for pushed in (layout.capacity() as u64..2 * layout.capacity() as u64).step_by(8) {
            for used in (0..=layout.capacity() as u64).step_by(64) {
                let consumed = pushed - used;
                let room = layout.room(pushed, consumed);
                if room > 0 {
                    assert!(layout.place(pushed, consumed, room).is_some(), "room {room} at {pushed}-{used}");
                }
                if room < most {
                    assert_eq!(layout.place(pushed, consumed, room + 1), None, "more than {room} at {pushed}-{used}");
                }
            }
        }
    }

    #[test]
    fn half_a_ring_always_takes_the_largest_message() {
        let layout = Layout::new(CAPACITY_BYTES_MIN);
        let half = layout.capacity() as u64 / 2;
        for pushed in (2 * half..4 * half).step_by(8) {
            assert_eq!(layout.room(pushed, pushed - half), message_bytes_max(layout.capacity()));
        }
    }

    #[test]
    fn a_frame_never_crosses_the_end() {
        let layout = Layout::new(4096);
        let place = layout.place(4080, 4080, 100).unwrap();
        assert_eq!(place, Place { skip_at: Some(4080), start: 4096 });
        assert_eq!(layout.place(4080, 4080, 8).unwrap(), Place { skip_at: None, start: 4080 });
    }

    #[test]
    #[should_panic(expected = "power of two")]
    fn an_odd_capacity_is_refused() {
        Layout::new(5000);
    }

    #[test]
    #[should_panic(expected = "at most 1016")]
    fn a_message_that_never_fits_is_a_bug() {
        let _ = Layout::new(4096).place(0, 0, 1017);
    }
}
