//! The oracle's view of the order stream: what the sequencer hands to its transport, and what arrives at its followers,
//! whichever way the transport takes.

use std::os::fd::RawFd;
use std::sync::Arc;

use antelog_protocol::limits::SEQUENCERS_MAX;

use super::network::{Landed, Shared, Tapped};
use crate::mem::Region;
use crate::transport::{Event, Full, LocalRange, MessageHandle, PeerId, RegionKey, RemoteOffset, Transport};

/// First bytes of the sequencer's messages that are looked at; PROTOCOL.md §5 and `wire::node` define them.
/// Reports, questions and changes.
pub(super) const TO_SEQUENCER_TAGS: [u8; 3] = [1, 4, 6];
pub(super) const TARGET_TAG: u8 = 2;
const ORDER_TAG: u8 = 3;
const LEAD_TAG: u8 = 8;
const SNAPSHOT_TAG: u8 = 9;

/// On which side of the order stream an agent is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Sends it, while it leads, to the peers below this number; those from there on are other sequencers.
    Leader { replicas: u16 },
    /// Gets it from any sequencer.
    Follower { number: usize },
    /// Neither.
    Bystander,
}

/// A transport that is looked at, and changed in nothing.
pub(super) struct Tap<T> {
    inner: T,
    network: Shared,
    role: Role,
    /// Each peer's order stream: entries follow each other within one, which ends with the connection or the lead.
    streams: Vec<u32>,
}

fn word(message: &[u8], at: usize) -> u64 {
    message[at..at + 8].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

impl<T: Transport> Tap<T> {
    pub(super) fn new(inner: T, network: &Shared, role: Role, peers_max: u16) -> Tap<T> {
        Tap { inner, network: network.clone(), role, streams: vec![0; peers_max.into()] }
    }

    /// Order entries must be the committed ones.
    fn sent(&mut self, to: PeerId, message: &[u8]) {
        let link = self.streams[usize::from(to.0)];
        match message[0] {
            LEAD_TAG => self.begin(to),
            ORDER_TAG => {
                let (index, hash) = (word(message, 8), super::trace::hash(&message[16..]));
                self.network.borrow_mut().taps.push(Tapped { link, index, hash });
            }
            // A target's cut number follows its prefix.
            TARGET_TAG => self.network.borrow_mut().edge_targets += u64::from(word(message, 0) >> 32 == 0),
            _ => {}
        }
    }

    fn begin(&mut self, to: PeerId) {
        let mut network = self.network.borrow_mut();
        network.streams += 1;
        self.streams[usize::from(to.0)] = network.streams;
    }

    fn received(&mut self, number: usize, events: &[Event]) {
        for event in events {
            if let Event::Received { peer, message } = event
                && usize::from(peer.0) < SEQUENCERS_MAX
                && let message = self.inner.message(*message)
                && let Some(tag @ (&ORDER_TAG | &SNAPSHOT_TAG)) = message.first()
            {
                let landed = Landed { number, index: word(message, 8), snapshot: *tag == SNAPSHOT_TAG };
                self.network.borrow_mut().landed.push(landed);
            }
        }
    }
}

impl<T: Transport> Transport for Tap<T> {
    type Link = T::Link;

    fn register(&mut self, region: Arc<Region>) -> RegionKey {
        self.inner.register(region)
    }

    fn admit(&mut self, peer: PeerId, link: T::Link, exposed: &[Arc<Region>]) {
        self.begin(peer);
        self.inner.admit(peer, link, exposed);
    }

    fn write(
        &mut self,
        to: PeerId,
        local: LocalRange,
        remote: RemoteOffset,
        notify: Option<u32>,
        token: Option<u64>,
    ) -> Result<(), Full> {
        self.inner.write(to, local, remote, notify, token)
    }

    fn write_inline(
        &mut self,
        to: PeerId,
        bytes: &[u8],
        remote: RemoteOffset,
        notify: Option<u32>,
    ) -> Result<(), Full> {
        self.inner.write_inline(to, bytes, remote, notify)
    }

    fn send(&mut self, to: PeerId, message: &[u8]) -> Result<(), Full> {
        self.inner.send(to, message)?;
        if matches!(self.role, Role::Leader { replicas } if to.0 < replicas) {
            self.sent(to, message);
        }
        Ok(())
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, events: &mut [Event]) -> usize {
        let count = self.inner.poll(events);
        if let Role::Follower { number } = self.role {
            self.received(number, &events[..count]);
        }
        count
    }

    fn message(&self, handle: MessageHandle) -> &[u8] {
        self.inner.message(handle)
    }

    fn release(&mut self, handle: MessageHandle) {
        self.inner.release(handle);
    }

    fn fence(&mut self, peer: PeerId) {
        self.inner.fence(peer);
    }

    fn wait_fds(&self, fds: &mut Vec<RawFd>) {
        self.inner.wait_fds(fds);
    }

    fn prepare_wait(&mut self) -> bool {
        self.inner.prepare_wait()
    }
}
