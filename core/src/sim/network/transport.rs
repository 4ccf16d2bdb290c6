//! [`Transport`] over the simulated network.

use std::os::fd::RawFd;
use std::sync::{Arc, PoisonError};

use super::link::{Body, Operation};
use super::{Dropped, Shared, Waiting};
use crate::mem::Region;
use crate::transport::{
    Event, Full, LocalRange, MessageHandle, PeerId, RegionKey, RemoteOffset, SEND_BYTES_MAX, Transport,
};

/// One end of a connection that no transport has taken over. Dropping it closes the connection.
#[derive(Debug)]
pub struct SimLink {
    pub(super) id: u32,
    side: u8,
    dropped: Option<Dropped>,
}

impl SimLink {
    pub(super) fn new(id: u32, side: u8, dropped: Dropped) -> SimLink {
        SimLink { id, side, dropped: Some(dropped) }
    }

    /// The link's number.
    pub(in crate::sim) fn id(&self) -> u32 {
        self.id
    }
}

impl Drop for SimLink {
    fn drop(&mut self) {
        if let Some(dropped) = self.dropped.take() {
            dropped.lock().unwrap_or_else(PoisonError::into_inner).push((self.id, self.side));
        }
    }
}

/// A transport of the simulated network.
pub struct SimTransport {
    network: Shared,
    endpoint: usize,
    /// Received messages with the link they came by.
    messages: Vec<Option<(u32, Vec<u8>)>>,
    free: Vec<u32>,
}

impl SimTransport {
    /// A transport for peers `0..peers_max`, whose owner is `thread`.
    pub fn new(network: &Shared, thread: usize, peers_max: u16) -> SimTransport {
        let endpoint = network.borrow_mut().endpoint(thread, peers_max);
        SimTransport { network: network.clone(), endpoint, messages: Vec::new(), free: Vec::new() }
    }

    pub(in crate::sim) fn endpoint(&self) -> usize {
        self.endpoint
    }

    fn keep(&mut self, link: u32, message: Vec<u8>) -> MessageHandle {
        match self.free.pop() {
            Some(at) => {
                self.messages[at as usize] = Some((link, message));
                MessageHandle(at)
            }
            None => {
                self.messages.push(Some((link, message)));
                MessageHandle(self.messages.len() as u32 - 1)
            }
        }
    }
}

impl Transport for SimTransport {
    type Link = SimLink;

    fn register(&mut self, region: Arc<Region>) -> RegionKey {
        let mut network = self.network.borrow_mut();
        let sources = &mut network.endpoints[self.endpoint].sources;
        sources.push(region);
        RegionKey(sources.len() as u16 - 1)
    }

    fn admit(&mut self, peer: PeerId, mut link: SimLink, exposed: &[Arc<Region>]) {
        link.dropped = None;
        self.network.borrow_mut().take_over(self.endpoint, peer, (link.id, link.side), exposed);
    }

    fn write(
        &mut self,
        to: PeerId,
        local: LocalRange,
        remote: RemoteOffset,
        notify: Option<u32>,
        token: Option<u64>,
    ) -> Result<(), Full> {
        let mut network = self.network.borrow_mut();
        let source = network.endpoints[self.endpoint].sources[usize::from(local.region.0)].clone();
        let inside = local.offset.checked_add(local.len).is_some_and(|end| end <= source.len());
        assert!(inside, "a write's source lies outside its region");
        let body = Body::Write { source, offset: local.offset, len: local.len, remote };
        network.issue(self.endpoint, to, Operation { body, notify, token })
    }

    fn write_inline(
        &mut self,
        to: PeerId,
        bytes: &[u8],
        remote: RemoteOffset,
        notify: Option<u32>,
    ) -> Result<(), Full> {
        assert!(bytes.len() <= 256, "an inline write of {} bytes", bytes.len());
        let body = Body::Inline { bytes: bytes.to_vec(), remote };
        self.network.borrow_mut().issue(self.endpoint, to, Operation { body, notify, token: None })
    }

    fn send(&mut self, to: PeerId, message: &[u8]) -> Result<(), Full> {
        assert!(message.len() <= SEND_BYTES_MAX, "a message of {} bytes", message.len());
        let mut network = self.network.borrow_mut();
        let body = Body::Send { message: message.to_vec() };
        network.issue(self.endpoint, to, Operation { body, notify: None, token: None })
    }

    fn flush(&mut self) {}

    fn poll(&mut self, events: &mut [Event]) -> usize {
        let network = self.network.clone();
        let mut network = network.borrow_mut();
        let now_ns = network.now_ns;
        let endpoint = &mut network.endpoints[self.endpoint];
        endpoint.polled_ns = now_ns;
        endpoint.room = false;
        let mut count = 0;
        while count < events.len() {
            let Some((link, peer, waiting)) = network.endpoints[self.endpoint].inbox.pop_front() else {
                if network.land_polled(self.endpoint) {
                    continue;
                }
                break;
            };
            events[count] = match waiting {
                Waiting::Placed { token } => Event::Placed { peer, token },
                Waiting::Notified { value } => Event::Notified { peer, value },
                Waiting::Received { message } => Event::Received { peer, message: self.keep(link, message) },
                Waiting::Down { reason } => {
                    network.endpoints[self.endpoint].peers[usize::from(peer.0)] = None;
                    Event::PeerDown { peer, reason }
                }
            };
            count += 1;
        }
        count
    }

    fn message(&self, handle: MessageHandle) -> &[u8] {
        self.messages[handle.0 as usize].as_ref().map_or(&[], |(_, message)| message)
    }

    fn release(&mut self, handle: MessageHandle) {
        if let Some((link, _)) = self.messages[handle.0 as usize].take() {
            self.free.push(handle.0);
            self.network.borrow_mut().released(self.endpoint, link);
        }
    }

    fn fence(&mut self, peer: PeerId) {
        self.network.borrow_mut().cut(self.endpoint, peer);
    }

    fn wait_fds(&self, _: &mut Vec<RawFd>) {}

    fn prepare_wait(&mut self) -> bool {
        let network = self.network.borrow();
        let endpoint = &network.endpoints[self.endpoint];
        endpoint.room || !endpoint.inbox.is_empty() || !endpoint.arrivals.is_empty()
    }
}

impl Drop for SimTransport {
    fn drop(&mut self) {
        // While a panic unwinds the network may be in use; nobody looks at it afterwards.
        let Ok(mut network) = self.network.try_borrow_mut() else { return };
        for peer in 0..network.endpoints[self.endpoint].peers.len() {
            network.cut(self.endpoint, PeerId(peer as u16));
        }
    }
}
