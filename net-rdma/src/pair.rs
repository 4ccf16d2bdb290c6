//! One peer whose data goes through a queue pair: how it comes up, moves data and ends.
//!
//! ```text
//! admit ──► offer sent ──► offer received: connected, ready sent ──► ready received: probe sent
//!                                                  probe received and own probe done ──► up
//! ```
//! The probe is the first message through the queue pair, in both directions: a pair that connects but carries no data (a
//! filtered port, a wrong route) is found out before anything depends on it.

use std::collections::VecDeque;
use std::net::IpAddr;

use antelog_core::transport::{DownReason, PeerId};

use crate::counters::PairCounters;
use crate::inbox::{BATCH, Inbox};
use crate::output::Output;
use crate::provider::{Patience, Provider, ProviderError, QueueId, Receive};
use crate::setup::{Offer, Setup};

/// A completion's id: generation, peer, kind, and the request's count or the receive's slot.
const RECEIVE_BIT: u64 = 1 << 31;

/// What ids of a pair's requests begin with.
pub fn label(peer: PeerId, generation: u16) -> u64 {
    u64::from(generation) << 48 | u64::from(peer.0) << 32
}

/// Takes an id apart: peer, generation, and the slot if it is a receive.
pub fn unlabel(id: u64) -> (PeerId, u16, Option<u32>) {
    let slot = (id & RECEIVE_BIT != 0).then_some((id & (RECEIVE_BIT - 1)) as u32);
    (PeerId((id >> 32) as u16), (id >> 48) as u16, slot)
}

/// How far the set-up has come.
#[derive(Debug, Default)]
pub struct Progress {
    /// To be said over the carrier, in this order.
    pub to_say: VecDeque<Setup>,
    /// The peer's offer came and the queue pair is connected.
    pub is_connected: bool,
    /// The peer's queue pair receives.
    pub is_peer_ready: bool,
    /// Our probe was handed over.
    pub is_probing: bool,
    /// It arrived.
    pub is_probe_done: bool,
    /// The peer's probe came.
    pub is_probe_seen: bool,
    /// The peer declined, or we did: the pair ends once this was said.
    pub declined: Option<String>,
}

/// See the module's text.
#[derive(Debug)]
pub struct Pair {
    /// Whose.
    pub peer: PeerId,
    /// Life of the peer's connection: completions of earlier lives are dropped by it.
    pub generation: u16,
    /// Where the peer is, for lines to the operator and for the health of pairs.
    pub host: IpAddr,
    /// Operations are taken.
    pub is_up: bool,
    /// Until then.
    pub progress: Progress,
    /// By when it must be up, in the provider's nanoseconds.
    pub deadline_ns: u64,
    /// First packet number of this side.
    pub psn: u32,
    /// Sending side.
    pub output: Output,
    /// Receiving side.
    pub inbox: Inbox,
    /// The carrier reported the end; it is passed on once the completion queue is empty.
    pub closing: Option<DownReason>,
    /// In the list of pairs with something staged.
    pub is_dirty: bool,
    /// Its counters.
    pub counters: PairCounters,
}

impl Pair {
    /// The queue pair.
    pub fn queue(&self) -> QueueId {
        QueueId(self.peer.0)
    }

    /// Hands over what is staged.
    ///
    /// # Errors
    /// The device's; the pair is of no use any more.
    pub fn ring<P: Provider>(&mut self, device: &mut P, probe: bool) -> Result<(), ProviderError> {
        let queue = QueueId(self.peer.0);
        let (requests, signals) = self.output.doorbell(probe);
        if requests.is_empty() {
            return Ok(());
        }
        device.post(queue, requests)?;
        self.counters.on_doorbell(requests.len(), signals);
        self.output.on_handed_over();
        Ok(())
    }

    /// Posts a request behind all others on a queue that has failed, and returns its id: its completion is the queue's last.
    /// `None`: the device takes none.
    pub fn post_last<P: Provider>(&mut self, device: &mut P) -> Option<u64> {
        let last = self.output.last_request();
        device.post(self.queue(), &[last]).ok()?;
        Some(last.id)
    }

    /// Posts receives that are free again, in batches; `all`: even an incomplete one. Stages a credit if one is due.
    ///
    /// # Errors
    /// As [`ring`](Self::ring).
    pub fn replenish<P: Provider>(&mut self, device: &mut P, all: bool) -> Result<(), ProviderError> {
        let base = label(self.peer, self.generation) | RECEIVE_BIT;
        loop {
            let slots = self.inbox.batch(all);
            if slots.is_empty() {
                break;
            }
            let count = slots.len().min(BATCH);
            let none = Receive { id: 0, local: self.inbox.buffers.local(0) };
            let mut receives = [none; BATCH];
            for (receive, &slot) in receives.iter_mut().zip(&slots[slots.len() - count..]) {
                *receive = Receive { id: base | u64::from(slot), local: self.inbox.buffers.local(slot) };
            }
            device.post_receives(QueueId(self.peer.0), &receives[..count])?;
            self.inbox.on_posted(count);
        }
        if self.is_up
            && let Some(count) = self.inbox.credit_due()
        {
            if self.output.is_batch(1) {
                self.ring(device, false)?;
            }
            if self.output.send_credit(count).is_err() {
                // A completion frees a slot, and then this is tried again.
                return Ok(());
            }
            self.inbox.on_announced();
            self.counters.on_credit();
        }
        Ok(())
    }

    /// The peer's offer: connects, and prepares the answer.
    ///
    /// # Errors
    /// One line for the operator of either side.
    pub fn on_offer<P: Provider>(&mut self, device: &mut P, offer: Offer, patience: Patience) -> Result<(), String> {
        if offer.end.port.is_infiniband != device.port().is_infiniband {
            return Err("one side's device is InfiniBand and the other's Ethernet".into());
        }
        device.connect(self.queue(), self.psn, &offer.end, patience).map_err(|error| error.text)?;
        self.output.set_remote(offer.regions, offer.receives);
        self.progress.is_connected = true;
        self.progress.to_say.push_back(Setup::Ready);
        Ok(())
    }

    /// Sends the probe when both queue pairs receive, and goes up when both probes are through. True when it just went up.
    ///
    /// # Errors
    /// The device's.
    pub fn advance<P: Provider>(&mut self, device: &mut P) -> Result<bool, ProviderError> {
        let progress = &mut self.progress;
        if progress.is_connected && progress.is_peer_ready && !progress.is_probing {
            progress.is_probing = true;
            let sent = self.output.send_probe();
            assert!(sent.is_ok(), "a new queue has room for its first request");
            self.ring(device, true)?;
        }
        let goes_up = self.progress.is_probe_done && self.progress.is_probe_seen && !self.is_up;
        self.is_up |= goes_up;
        Ok(goes_up)
    }
}
