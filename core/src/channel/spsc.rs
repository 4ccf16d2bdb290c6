//! A queue of byte messages from one thread to another: bounded, no locks, read in place.
//!
//! The same layout as the network ring (`frame`), without check words: both ends are this process. Each side keeps a copy
//! of the other's index and looks at the shared one only when the copy says "full" or "empty", so in the steady state
//! a cache line moves between the cores once per batch, not once per message.
//!
//! *Waking.* `publish` wakes the consumer if it is parked. The other direction is rarer and lazier: a producer that met a
//! full queue raises a flag; the consumer looks at it once per eighth of the queue and whenever it has run empty. Before a
//! thread parks it looks at what could wake it once more: the consumer at [`Consumer::is_empty`], a producer that met a full
//! queue at [`Producer::room`].
#![allow(unsafe_code)]

use std::io;

use super::frame::{HEADER_BYTES, Layout, SKIP, frame_bytes, message_bytes_max};
use crate::mem::Region;
use crate::node::Waker;
use crate::sync::{Arc, AtomicBool, AtomicU64, Ordering, fence};
use crate::transport::Full;

/// On cache lines of its own: two, because x86 prefetches lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Padded<T>(T);

#[derive(Debug)]
struct Shared {
    buffer: std::sync::Arc<Region>,
    layout: Layout,
    /// Published by the producer: everything before it may be read.
    tail: Padded<AtomicU64>,
    /// Published by the consumer: everything before it may be overwritten.
    head: Padded<AtomicU64>,
    /// The producer met a full queue and wants to be woken.
    blocked: Padded<AtomicBool>,
}

/// The sending half.
#[derive(Debug)]
pub struct Producer {
    shared: Arc<Shared>,
    pushed: u64,
    published: u64,
    head: u64,
    /// What the shared flag says.
    blocked: bool,
    waker: Waker,
}

/// The receiving half.
#[derive(Debug)]
pub struct Consumer {
    shared: Arc<Shared>,
    consumed: u64,
    tail: u64,
    /// Frame bytes of the message that `peek` returned last; 0 when there is none.
    peeked: u64,
    /// `consumed` when the producer's flag was last looked at.
    settled: u64,
    producer: Waker,
}

/// A queue of `capacity_bytes` (a power of two within the limits of [`channel`](super)); `waker` wakes the thread that
/// owns the [`Consumer`].
///
/// # Errors
/// The kernel's error when it has no memory for it.
pub fn channel(capacity_bytes: usize, waker: Waker) -> io::Result<(Producer, Consumer)> {
    let layout = Layout::new(capacity_bytes);
    let buffer = Region::new(capacity_bytes)?;
    // Every lap goes through all of it.
    buffer.prefault();
    let shared = Arc::new(Shared {
        buffer,
        layout,
        tail: Padded::default(),
        head: Padded::default(),
        blocked: Padded::default(),
    });
    let producer = Producer { shared: shared.clone(), pushed: 0, published: 0, head: 0, blocked: false, waker };
    let consumer = Consumer { shared, consumed: 0, tail: 0, peeked: 0, settled: 0, producer: Waker::none() };
    Ok((producer, consumer))
}

impl Producer {
    /// The largest message this queue takes, in bytes.
    pub fn message_bytes_max(&self) -> usize {
        message_bytes_max(self.shared.layout.capacity())
    }

    /// The largest message, in bytes, that `push` takes now. 0 also when it takes none.
    pub fn room(&self) -> usize {
        self.shared.layout.room(self.pushed, self.shared.head.0.load(Ordering::Acquire))
    }

    /// Adds one message, the concatenation of `parts`; the consumer sees it after [`publish`](Self::publish).
    ///
    /// # Errors
    /// `Full`: the consumer has to consume first. Panics when the message is longer than
    /// [`message_bytes_max`](Self::message_bytes_max).
    #[inline]
    pub fn push(&mut self, parts: &[&[u8]]) -> Result<(), Full> {
        let len = parts.iter().map(|part| part.len()).sum();
        let mut at = self.begin(len)?;
        for part in parts {
            self.shared.buffer.put(at, part);
            at += part.len();
        }
        Ok(())
    }

    /// Adds one message: `head`, then `len` bytes from `offset` of `region`.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    #[inline]
    pub fn push_from(&mut self, head: &[u8], region: &Region, offset: usize, len: usize) -> Result<(), Full> {
        let at = self.begin(head.len() + len)?;
        self.shared.buffer.put(at, head);
        self.shared.buffer.put_from(at + head.len(), region, offset, len);
        Ok(())
    }

    /// Makes room and writes the header; returns the body's offset in the buffer.
    #[inline]
    fn begin(&mut self, len: usize) -> Result<usize, Full> {
        let layout = self.shared.layout;
        let place = match layout.place(self.pushed, self.head, len) {
            Some(place) => place,
            None => {
                self.refresh_head(len);
                layout.place(self.pushed, self.head, len).ok_or(Full)?
            }
        };
        if let Some(at) = place.skip_at {
            self.shared.buffer.put(layout.index(at), &header(SKIP));
        }
        let at = layout.index(place.start);
        self.shared.buffer.put(at, &header(len as u32));
        self.pushed = place.start + frame_bytes(len) as u64;
        Ok(at + HEADER_BYTES)
    }

    /// Looks at the consumer's index, and leaves word when that does not help either.
    #[cold]
    fn refresh_head(&mut self, len: usize) {
        let shared = &*self.shared;
        self.head = shared.head.0.load(Ordering::Acquire);
        let full = shared.layout.place(self.pushed, self.head, len).is_none();
        // Only the producer writes the flag. A consumer that cleared it might clear a newer cry for help than the one it
        // answers, and the producer would sleep for good.
        if full != self.blocked {
            self.blocked = full;
            shared.blocked.0.store(full, Ordering::Relaxed);
        }
    }

    /// Makes everything pushed visible and wakes the consumer if it is parked. One comparison when nothing is new.
    #[inline]
    pub fn publish(&mut self) {
        if self.published != self.pushed {
            self.shared.tail.0.store(self.pushed, Ordering::Release);
            self.published = self.pushed;
            self.waker.wake();
        }
    }
}

impl Consumer {
    /// Names the thread to wake when a queue that was full for the producer has room again. Without it, a producer that
    /// parks after `Full` needs a deadline of its own.
    pub fn set_producer_waker(&mut self, producer: Waker) {
        self.producer = producer;
    }

    /// True when nothing published is unread. Does not move the cached index, so it may be called before parking.
    pub fn is_empty(&self) -> bool {
        self.consumed == self.shared.tail.0.load(Ordering::Acquire)
    }

    /// The next message, where it lies; the same one until [`consume`](Self::consume).
    #[inline]
    pub fn peek(&mut self) -> Option<&[u8]> {
        if self.consumed == self.tail {
            self.tail = self.shared.tail.0.load(Ordering::Acquire);
            if self.consumed == self.tail {
                self.settle();
                return None;
            }
        }
        let layout = self.shared.layout;
        let mut len = self.header_at(self.consumed);
        if len == SKIP {
            // A skip is published together with the message behind it.
            self.consumed += layout.to_end(self.consumed) as u64;
            len = self.header_at(self.consumed);
        }
        let (at, len) = (layout.index(self.consumed) + HEADER_BYTES, len as usize);
        self.peeked = frame_bytes(len) as u64;
        // SAFETY: the bytes were published by the release store of `tail` that we have acquired, and the producer
        // writes them again only after `head` passed them, which takes `&mut self` and so ends the slice.
        Some(unsafe { self.shared.buffer.bytes(at, len) })
    }

    #[inline]
    fn header_at(&self, position: u64) -> u32 {
        let mut bytes = [0; HEADER_BYTES];
        self.shared.buffer.get(self.shared.layout.index(position), &mut bytes);
        u64::from_le_bytes(bytes) as u32
    }

    /// Gives the message that [`peek`](Self::peek) returned back. Panics when there was none.
    #[inline]
    pub fn consume(&mut self) {
        assert!(self.peeked > 0, "consume follows a peek that found a message");
        self.consumed += self.peeked;
        self.peeked = 0;
        self.shared.head.0.store(self.consumed, Ordering::Release);
        if self.consumed - self.settled >= self.shared.layout.capacity() as u64 / 8 {
            self.settle();
        }
    }

    /// Wakes a producer that waits for room, if something was consumed since the last look.
    #[inline]
    fn settle(&mut self) {
        if self.settled == self.consumed {
            return;
        }
        self.settled = self.consumed;
        // Index, fence, look at the flag; the producer: flag, the parker's fence, look at the index (`room`). One of the
        // two sees the other.
        fence(Ordering::SeqCst);
        if self.shared.blocked.0.load(Ordering::Relaxed) {
            self.producer.wake();
        }
    }
}

fn header(len: u32) -> [u8; HEADER_BYTES] {
    u64::from(len).to_le_bytes()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::node::Parker;

    #[test]
    fn messages_wrap_and_keep_their_order() {
        let (mut producer, mut consumer) = channel(4096, Waker::none()).unwrap();
        let source = Region::new(4096).unwrap();
        source.put(100, &[7; 1000]);
        let (mut sent, mut received) = (0usize, 0usize);
        while received < 5000 {
            loop {
                let len = sent * 37 % 900;
                let number = sent.to_le_bytes();
                let room = producer.room();
                let pushed = match sent % 2 {
                    0 => producer.push(&[&number, &[7; 1000][..len]]),
                    _ => producer.push_from(&number, &source, 100, len),
                };
                assert_eq!(pushed.is_ok(), room >= 8 + len);
                if pushed.is_err() {
                    break;
                }
                sent += 1;
            }
            producer.publish();
            assert!(!consumer.is_empty());
            while let Some(message) = consumer.peek() {
                assert_eq!(message[..8], received.to_le_bytes());
                assert_eq!(message[8..], [7; 1000][..received * 37 % 900]);
                consumer.consume();
                received += 1;
            }
            assert!(consumer.is_empty());
        }
    }

    #[test]
    fn nothing_is_seen_before_it_is_published() {
        let (mut producer, mut consumer) = channel(4096, Waker::none()).unwrap();
        producer.push(&[b"a", b"b"]).unwrap();
        assert!(consumer.is_empty() && consumer.peek().is_none());
        producer.publish();
        producer.publish();
        assert_eq!(consumer.peek(), Some(&b"ab"[..]));
        assert_eq!(consumer.peek(), Some(&b"ab"[..]));
        consumer.consume();
        assert!(consumer.peek().is_none());
    }

    /// A million messages between two threads that both park: a lost wake-up in either direction hangs the test.
    #[test]
    fn a_million_messages_cross_between_parked_threads() {
        const COUNT: u64 = 1_000_000;
        let (mut receiver_parker, receiver) = Parker::new().unwrap();
        let (mut sender_parker, sender) = Parker::new().unwrap();
        let (mut producer, mut consumer) = channel(16 << 10, receiver).unwrap();
        consumer.set_producer_waker(sender);
        let sending = std::thread::spawn(move || {
            for number in 0..COUNT {
                let len = (number % 57) as usize;
                let parts: [&[u8]; 2] = [&number.to_le_bytes(), &[number as u8; 57][..len]];
                while producer.push(&parts).is_err() {
                    producer.publish();
                    sender_parker.park(&[], None, || producer.room() >= 8 + len);
                }
                if number % 13 == 0 {
                    producer.publish();
                }
            }
            producer.publish();
        });
        for number in 0..COUNT {
            while consumer.is_empty() {
                // The flag for the producer is looked at by a peek that finds nothing.
                assert!(consumer.peek().is_none() || !consumer.is_empty());
                receiver_parker.park(&[], None, || !consumer.is_empty());
            }
            let message = consumer.peek().unwrap();
            assert_eq!(message[..8], number.to_le_bytes());
            assert_eq!(message[8..], [number as u8; 57][..(number % 57) as usize]);
            consumer.consume();
        }
        sending.join().unwrap();
        assert!(consumer.peek().is_none());
    }
}

/// Run with `RUSTFLAGS="--cfg loom" cargo test --release -p antelog-core loom_`.
#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::node::Parker;

    /// The consumer parks for messages and the producer for room; the queue holds four of these messages.
    #[test]
    fn loom_messages_and_room_wake_both_sides() {
        const COUNT: u64 = 5;
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let (mut receiver_parker, receiver) = Parker::new().unwrap();
            let (mut sender_parker, sender) = Parker::new().unwrap();
            let (mut producer, mut consumer) = channel(4096, receiver).unwrap();
            consumer.set_producer_waker(sender);
            let sending = loom::thread::spawn(move || {
                for number in 0..COUNT {
                    while producer.push(&[&number.to_le_bytes(), &[0; 1000]]).is_err() {
                        sender_parker.park(&[], None, || producer.room() >= 1008);
                    }
                    producer.publish();
                }
            });
            for number in 0..COUNT {
                while consumer.peek().is_none() {
                    receiver_parker.park(&[], None, || !consumer.is_empty());
                }
                assert_eq!(consumer.peek().unwrap()[..8], number.to_le_bytes());
                consumer.consume();
            }
            sending.join().unwrap();
        });
    }
}
