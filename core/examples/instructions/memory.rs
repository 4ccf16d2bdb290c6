//! A transport between agents of one thread: a write is a copy between two regions, a message a copy into the receiver's
//! list, and everything takes effect at once.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;

use antelog_core::mem::Region;
use antelog_core::transport::{
    Event, Full, LocalRange, MessageHandle, PeerId, RegionKey, RemoteOffset, SEND_BYTES_MAX, Transport,
};

/// One end of a connection once it was admitted.
struct End {
    transport: usize,
    peer: PeerId,
    exposed: Vec<Arc<Region>>,
}

#[derive(Default)]
struct State {
    /// Ends of every link, as far as they were admitted.
    links: Vec<[Option<End>; 2]>,
    /// Events of every transport.
    events: Vec<VecDeque<Event>>,
    /// Messages of every transport: slots, and which are free.
    messages: Vec<(Vec<Vec<u8>>, Vec<u32>)>,
}

/// All transports and links.
#[derive(Clone, Default)]
pub struct Network(Rc<RefCell<State>>);

/// One end of a link: its number and which end.
pub type Link = (usize, usize);

impl Network {
    /// A new link's two ends.
    pub fn link(&self) -> (Link, Link) {
        let mut state = self.0.borrow_mut();
        state.links.push([None, None]);
        let link = state.links.len() - 1;
        ((link, 0), (link, 1))
    }

    /// A new transport.
    pub fn transport(&self) -> Memory {
        let mut state = self.0.borrow_mut();
        state.events.push(VecDeque::with_capacity(1024));
        state.messages.push((Vec::new(), Vec::new()));
        let id = state.events.len() - 1;
        Memory { id, network: self.clone(), peers: Vec::new(), sources: Vec::new(), read: Vec::new() }
    }
}

/// See the module's text.
pub struct Memory {
    id: usize,
    network: Network,
    peers: Vec<Option<Link>>,
    sources: Vec<Arc<Region>>,
    /// Bytes of the messages that `poll` has reported, by handle.
    read: Vec<Vec<u8>>,
}

impl Memory {
    /// Calls `act` with the other end and the events of its transport.
    fn with<R>(&self, to: PeerId, act: impl FnOnce(&mut State, usize, usize) -> R) -> Result<R, Full> {
        let (link, end) = self.peers.get(usize::from(to.0)).copied().flatten().ok_or(Full)?;
        let mut state = self.network.0.borrow_mut();
        if state.links[link][1 - end].is_none() {
            return Err(Full);
        }
        Ok(act(&mut state, link, 1 - end))
    }
}

fn notify(state: &mut State, link: usize, end: usize, notify: Option<u32>) {
    if let (Some(value), Some(other)) = (notify, &state.links[link][end]) {
        let (transport, peer) = (other.transport, other.peer);
        let events = &mut state.events[transport];
        // Several notifications may be reported as one.
        if events.back() != Some(&Event::Notified { peer, value }) {
            events.push_back(Event::Notified { peer, value });
        }
    }
}

impl Transport for Memory {
    type Link = Link;

    fn register(&mut self, region: Arc<Region>) -> RegionKey {
        self.sources.push(region);
        RegionKey(self.sources.len() as u16 - 1)
    }

    fn admit(&mut self, peer: PeerId, link: Link, exposed: &[Arc<Region>]) {
        let index = usize::from(peer.0);
        if self.peers.len() <= index {
            self.peers.resize(index + 1, None);
        }
        self.peers[index] = Some(link);
        let end = End { transport: self.id, peer, exposed: exposed.to_vec() };
        self.network.0.borrow_mut().links[link.0][link.1] = Some(end);
    }

    fn write(
        &mut self,
        to: PeerId,
        local: LocalRange,
        remote: RemoteOffset,
        notification: Option<u32>,
        token: Option<u64>,
    ) -> Result<(), Full> {
        self.with(to, |state, link, end| {
            if let Some(other) = &state.links[link][end] {
                let source = &self.sources[usize::from(local.region.0)];
                other.exposed[usize::from(remote.region)].put_from(remote.offset, source, local.offset, local.len);
            }
            notify(state, link, end, notification);
            state.events[self.id].extend(token.map(|token| Event::Placed { peer: to, token }));
        })
    }

    fn write_inline(
        &mut self,
        to: PeerId,
        bytes: &[u8],
        remote: RemoteOffset,
        notification: Option<u32>,
    ) -> Result<(), Full> {
        self.with(to, |state, link, end| {
            if let Some(other) = &state.links[link][end] {
                let region = &other.exposed[usize::from(remote.region)];
                match <[u8; 8]>::try_from(bytes) {
                    Ok(word) => region.store_u64(remote.offset, u64::from_ne_bytes(word)),
                    Err(_) => region.put(remote.offset, bytes),
                }
            }
            notify(state, link, end, notification);
        })
    }

    fn send(&mut self, to: PeerId, message: &[u8]) -> Result<(), Full> {
        self.with(to, |state, link, end| {
            let Some(other) = &state.links[link][end] else { return };
            let (transport, peer) = (other.transport, other.peer);
            let (slots, free) = &mut state.messages[transport];
            let index = free.pop().unwrap_or_else(|| {
                slots.push(Vec::with_capacity(SEND_BYTES_MAX));
                slots.len() as u32 - 1
            });
            let slot = &mut slots[index as usize];
            slot.clear();
            slot.extend_from_slice(message);
            state.events[transport].push_back(Event::Received { peer, message: MessageHandle(index) });
        })
    }

    fn flush(&mut self) {}

    fn poll(&mut self, events: &mut [Event]) -> usize {
        let state = &mut *self.network.0.borrow_mut();
        let waiting = &mut state.events[self.id];
        let count = events.len().min(waiting.len());
        for (slot, event) in events.iter_mut().zip(waiting.drain(..count)) {
            *slot = event;
            if let Event::Received { message: MessageHandle(index), .. } = event {
                let index = index as usize;
                if self.read.len() <= index {
                    self.read.resize_with(index + 1, Vec::new);
                }
                // The bytes move here for as long as the message is read: what is lent out must not be in the cell.
                std::mem::swap(&mut self.read[index], &mut state.messages[self.id].0[index]);
            }
        }
        count
    }

    fn message(&self, handle: MessageHandle) -> &[u8] {
        &self.read[handle.0 as usize]
    }

    fn release(&mut self, handle: MessageHandle) {
        let state = &mut *self.network.0.borrow_mut();
        let (slots, free) = &mut state.messages[self.id];
        std::mem::swap(&mut self.read[handle.0 as usize], &mut slots[handle.0 as usize]);
        free.push(handle.0);
    }

    fn fence(&mut self, peer: PeerId) {
        if let Some((link, end)) = self.peers.get_mut(usize::from(peer.0)).and_then(Option::take) {
            self.network.0.borrow_mut().links[link][end] = None;
        }
    }

    fn wait_fds(&self, _: &mut Vec<RawFd>) {}

    fn prepare_wait(&mut self) -> bool {
        !self.network.0.borrow().events[self.id].is_empty()
    }
}
