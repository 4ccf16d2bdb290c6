//! Two transports, connected, with a region each to write from and some to be written: what most checks start with.

use std::sync::Arc;

use super::Harness;
use crate::mem::Region;
use crate::transport::{
    DownReason, Event, Full, LocalRange, MessageHandle, PeerId, RegionKey, RemoteOffset, Transport,
};

/// How often both sides are polled before a check gives up waiting.
const ROUNDS_MAX: usize = 2_000_000;

/// Rounds in which late events still get a chance to appear, where none may.
const QUIET_ROUNDS: usize = 2_000;

/// Size of the regions on both sides, in bytes.
pub const REGION_BYTES: usize = 8 << 20;

/// A reported event, with a message's bytes instead of its handle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    Placed(u64),
    Notified(u32),
    Received(Vec<u8>),
    Down(DownReason),
}

/// One transport with everything it reported.
pub struct Side<T: Transport> {
    pub transport: T,
    pub source: Arc<Region>,
    pub key: RegionKey,
    pub exposed: Vec<Arc<Region>>,
    /// Reported and not taken yet, in order.
    pub seen: Vec<(PeerId, Seen)>,
    /// Messages that are kept instead of released.
    pub held: Vec<MessageHandle>,
    /// Whether to keep messages.
    pub holds: bool,
    /// Events per poll.
    pub slice: usize,
}

impl<T: Transport> Side<T> {
    pub fn new<H: Harness<T = T>>(harness: &mut H, peers_max: u16, regions: usize) -> Side<T> {
        let mut transport = harness.transport(peers_max);
        let source = Region::new(REGION_BYTES).expect("memory for a region");
        let key = transport.register(source.clone());
        let exposed = (0..regions).map(|_| Region::new(REGION_BYTES).expect("memory for a region")).collect();
        Side { transport, source, key, exposed, seen: Vec::new(), held: Vec::new(), holds: false, slice: 16 }
    }

    /// Polls once and keeps what was reported.
    pub fn poll(&mut self) -> usize {
        let mut events = [Event::Placed { peer: PeerId(u16::MAX), token: u64::MAX }; 64];
        let count = self.transport.poll(&mut events[..self.slice]);
        assert!(count <= self.slice, "T5: poll reported {count} events in a slice of {}", self.slice);
        for &event in &events[..count] {
            let seen = match event {
                Event::Placed { peer, token } => (peer, Seen::Placed(token)),
                Event::Notified { peer, value } => (peer, Seen::Notified(value)),
                Event::PeerDown { peer, reason } => (peer, Seen::Down(reason)),
                Event::Received { peer, message } => {
                    let bytes = self.transport.message(message).to_vec();
                    if self.holds {
                        self.held.push(message);
                    } else {
                        self.transport.release(message);
                    }
                    (peer, Seen::Received(bytes))
                }
            };
            self.seen.push(seen);
        }
        count
    }

    /// Writes from the same offset as it writes to, into the peer's first region.
    pub fn write(
        &mut self,
        to: PeerId,
        offset: usize,
        len: usize,
        notify: Option<u32>,
        token: Option<u64>,
    ) -> Result<(), Full> {
        let local = LocalRange { region: self.key, offset, len };
        self.transport.write(to, local, RemoteOffset { region: 0, offset }, notify, token)
    }

    pub fn placed(&self) -> Option<u64> {
        self.seen.iter().rev().find_map(|(_, seen)| if let Seen::Placed(token) = seen { Some(*token) } else { None })
    }

    pub fn downs(&self) -> Vec<DownReason> {
        self.seen
            .iter()
            .filter_map(|(_, seen)| if let Seen::Down(reason) = seen { Some(*reason) } else { None })
            .collect()
    }

    pub fn messages(&self) -> Vec<&[u8]> {
        let bytes = |(_, seen): &'_ (PeerId, Seen)| matches!(seen, Seen::Received(_));
        let seen = self.seen.iter().filter(|entry| bytes(entry));
        seen.map(|(_, seen)| if let Seen::Received(bytes) = seen { &bytes[..] } else { &[] }).collect()
    }

    /// Every operation reports full.
    pub fn assert_full(&mut self, to: PeerId) {
        assert_eq!(self.write(to, 0, 64, None, None), Err(Full), "T7: write to a lost peer");
        assert_eq!(self.write(to, 0, 4096, Some(1), Some(1)), Err(Full), "T7: write to a lost peer");
        let remote = RemoteOffset { region: 0, offset: 0 };
        assert_eq!(self.transport.write_inline(to, b"x", remote, None), Err(Full), "T7: write_inline to a lost peer");
        assert_eq!(self.transport.send(to, b"x"), Err(Full), "T7: send to a lost peer");
    }
}

/// Two connected sides. To `a`, its peer is [`Rig::B`], and the other way round.
pub struct Rig<'h, H: Harness> {
    pub harness: &'h mut H,
    pub a: Side<H::T>,
    pub b: Side<H::T>,
}

impl<'h, H: Harness> Rig<'h, H> {
    /// What `b` calls `a`.
    pub const A: PeerId = PeerId(2);
    /// What `a` calls `b`.
    pub const B: PeerId = PeerId(1);

    pub fn new(harness: &'h mut H) -> Rig<'h, H> {
        let a = Side::new(harness, 4, 1);
        let b = Side::new(harness, 4, 2);
        let mut rig = Rig { harness, a, b };
        rig.connect();
        rig
    }

    pub fn connect(&mut self) {
        let (to_b, to_a) = self.harness.link();
        self.a.transport.admit(Self::B, to_b, &self.a.exposed);
        self.b.transport.admit(Self::A, to_a, &self.b.exposed);
    }

    /// Polls both sides once.
    pub fn round(&mut self) {
        self.a.transport.flush();
        self.b.transport.flush();
        self.harness.step();
        if self.a.poll() + self.b.poll() == 0 {
            // The network may need the processor to make progress.
            std::thread::yield_now();
        }
    }

    /// Polls until `done`.
    pub fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        for _ in 0..ROUNDS_MAX {
            if done(self) {
                return;
            }
            self.round();
        }
        panic!("{what}: did not happen within {ROUNDS_MAX} rounds");
    }

    /// Polls for a while in which nothing need happen.
    pub fn settle(&mut self) {
        for _ in 0..QUIET_ROUNDS {
            self.round();
        }
    }

    /// Repeats `operation` on this side until it is accepted.
    pub fn insist(&mut self, what: &str, mut operation: impl FnMut(&mut Self) -> Result<(), Full>) {
        self.until(what, |rig| operation(rig).is_ok());
    }

    /// Writes a byte with a token, and waits until everything issued by `a` so far took effect.
    pub fn drain_a(&mut self, token: u64) {
        self.insist("a last write is accepted", |rig| rig.a.write(Self::B, REGION_BYTES - 1, 1, None, Some(token)));
        self.until("the last write is placed", |rig| rig.a.placed() == Some(token));
    }
}

/// A small deterministic generator (xorshift64*), so that failures repeat.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() >> 11) as usize % end
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.next().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }
}

/// A copy of part of a region.
pub fn copy(region: &Region, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    region.get(offset, &mut bytes);
    bytes
}
