//! A gate as the session sees it: its address, whether it is connected, and the ring to it.
//!
//! A gate is a peer of the transport; its index in the session's table is its `PeerId` for the session's life, so
//! regions and staging memory are set up once and reused by every connection.

use std::sync::Arc;

use antelog_protocol::wire::session::{Request, SESSION_HEAD_BYTES_MAX};

use crate::channel::Ring;
use crate::mem::Region;
use crate::transport::{Full, PeerId, RegionKey, Transport};

/// Whether a gate is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// Not connected; dialled at this time if it is wanted.
    Down { retry_ns: u64 },
    /// The dialer is at it.
    Dialing,
    /// Connected.
    Up,
}

#[derive(Debug)]
struct Channel {
    ring: Ring,
    incoming: Arc<Region>,
    staging: Arc<Region>,
    staging_key: RegionKey,
    capacity_out: usize,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Gate {
    pub(super) address: String,
    pub(super) link: Link,
    /// Something was asked of this gate: it is to be connected.
    pub(super) wanted: bool,
    /// Attempts and connections that failed since one lasted.
    pub(super) failures: u32,
    /// When the connection began.
    pub(super) up_since_ns: u64,
    /// The ring may hold messages not read yet.
    pub(super) ready: bool,
    /// Something was pushed or consumed that is not published yet.
    pub(super) output: bool,
    /// It said that it is about to end, and waits until all that it sent is consumed.
    pub(super) closing: bool,
    channel: Option<Channel>,
}

impl Gate {
    pub(super) fn new(address: String) -> Gate {
        Gate {
            address,
            link: Link::Down { retry_ns: 0 },
            wanted: false,
            failures: 0,
            up_since_ns: 0,
            ready: false,
            output: false,
            closing: false,
            channel: None,
        }
    }

    pub(super) fn up(&self) -> bool {
        self.link == Link::Up
    }

    /// When it is to be dialled, if it is.
    #[inline]
    pub(super) fn dial_at_ns(&self) -> Option<u64> {
        match self.link {
            Link::Down { retry_ns } if self.wanted => Some(retry_ns),
            _ => None,
        }
    }

    /// Takes over a new connection. The old one is down.
    ///
    /// # Errors
    /// When the system has no memory for the rings, in one line.
    pub(super) fn admit<T: Transport>(
        &mut self,
        transport: &mut T,
        peer: PeerId,
        link: T::Link,
        (capacity_in, capacity_out): (usize, usize),
        prefault: bool,
    ) -> Result<(), String> {
        if let Some(channel) = &mut self.channel {
            // Nothing of the old connection may land in a ring that starts anew.
            transport.fence(peer);
            channel.ring.reset();
        }
        if self.channel.as_ref().is_none_or(|c| c.capacity_out != capacity_out) {
            self.channel = Some(self.new_channel(transport, capacity_in, capacity_out, prefault)?);
        }
        let Some(channel) = &self.channel else { return Ok(()) };
        transport.admit(peer, link, std::slice::from_ref(&channel.incoming));
        self.link = Link::Up;
        self.ready = true;
        (self.output, self.closing) = (false, false);
        Ok(())
    }

    fn new_channel<T: Transport>(
        &mut self,
        transport: &mut T,
        capacity_in: usize,
        capacity_out: usize,
        prefault: bool,
    ) -> Result<Channel, String> {
        let memory = |error| format!("no memory for the rings of {capacity_in} and {capacity_out} bytes: {error}");
        let (incoming, staging, staging_key) = match self.channel.take() {
            Some(old) if old.staging.len() >= capacity_out => (old.incoming, old.staging, old.staging_key),
            old => {
                let incoming = match old {
                    Some(old) => old.incoming,
                    None => Region::new(Ring::region_bytes(capacity_in)).map_err(memory)?,
                };
                let staging = Region::new(capacity_out).map_err(memory)?;
                if prefault {
                    incoming.prefault();
                    staging.prefault();
                }
                let key = transport.register(staging.clone());
                (incoming, staging, key)
            }
        };
        let ring = Ring::new(incoming.clone(), staging.clone(), staging_key, capacity_in, capacity_out);
        Ok(Channel { ring, incoming, staging, staging_key, capacity_out })
    }

    /// The ring to read from, while connected.
    pub(super) fn ring(&mut self) -> Option<&mut Ring> {
        if self.link != Link::Up {
            return None;
        }
        self.channel.as_mut().map(|c| &mut c.ring)
    }

    /// Stages a request.
    ///
    /// # Errors
    /// `Full` when the gate is not connected or has to consume first.
    #[inline]
    pub(super) fn push(&mut self, request: &Request<'_>) -> Result<(), Full> {
        let ring = self.ring().ok_or(Full)?;
        let mut head = [0; SESSION_HEAD_BYTES_MAX];
        let (len, body) = request.encode(&mut head);
        ring.push(&[&head[..len], body])?;
        self.output = true;
        Ok(())
    }

    /// Publishes what was pushed and reports what was consumed; what the transport does not take now is tried again in
    /// the next cycle. An error is what the gate did wrong.
    #[inline]
    pub(super) fn publish<T: Transport>(&mut self, transport: &mut T, peer: PeerId) -> Result<(), String> {
        let closing = self.closing;
        let Some(ring) = self.ring() else { return Ok(()) };
        if let Some(fault) = ring.fault() {
            return Err(fault.to_string());
        }
        let published = ring.publish(transport, peer);
        let credited = if closing { ring.credit_all(transport, peer) } else { ring.credit(transport, peer) };
        self.output = !(published && credited);
        Ok(())
    }
}
