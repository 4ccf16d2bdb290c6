//! The receiving side of a pair: buffers that the device fills with messages, read in place until they are released.
//!
//! A buffer is in one of two states. *Posted*: the device may write it at any time, so nobody looks. *Held*: a message
//! arrived in it, and it is posted again only after its release. Buffers are reposted in batches, and what was reposted is
//! returned to the sender as credit, so a sender never meets an unposted receive.
#![allow(unsafe_code)]

use std::rc::Rc;
use std::sync::Arc;

use antelog_core::mem::Region;
use antelog_core::transport::SEND_BYTES_MAX;

use crate::provider::{Local, MemoryId};

/// Receives beyond those the peer has credit for: what returned credits and the first probe use up before this side has
/// looked, and what waits for a batch. See "Credits of receives" in DESIGN.md.
pub const SLACK: usize = 24;

/// Receives are posted again in batches of this many.
pub const BATCH: usize = 16;

/// Memory for receives, registered once and used again by later pairs.
#[derive(Debug)]
pub struct Buffers {
    region: Arc<Region>,
    memory: MemoryId,
}

impl Buffers {
    /// `region` is registered as `memory` and written by nobody but the device.
    pub fn new(region: Arc<Region>, memory: MemoryId) -> Rc<Buffers> {
        Rc::new(Buffers { region, memory })
    }

    /// Bytes of memory for `receives` credited receives.
    pub const fn bytes(receives: usize) -> usize {
        (receives + SLACK) * SEND_BYTES_MAX
    }

    /// How many receives it holds.
    pub fn count(&self) -> usize {
        self.region.len() / SEND_BYTES_MAX
    }

    /// The range of one receive.
    pub fn local(&self, slot: u32) -> Local {
        Local { memory: self.memory, offset: slot as usize * SEND_BYTES_MAX, len: SEND_BYTES_MAX }
    }
}

/// A message that arrived and was not released.
#[derive(Debug)]
pub struct Held {
    /// The memory; while its pair lives, the pair's.
    pub buffers: Rc<Buffers>,
    /// The buffer.
    pub slot: u32,
    /// Whose it is.
    pub peer: u16,
    len: usize,
}

impl Held {
    /// The message of `len` bytes that the device has put into `slot`. The caller has its completion in hand, and does not
    /// post the slot again before it drops this.
    pub fn new(buffers: &Rc<Buffers>, slot: u32, len: usize, peer: u16) -> Held {
        assert!(len <= SEND_BYTES_MAX && (slot as usize) < buffers.count(), "a message outside its buffer");
        Held { buffers: buffers.clone(), slot, peer, len }
    }

    /// The message.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the device writes posted buffers only, the memory is not open to remote writes, and a buffer is not
        // posted while its `Held` exists: the transport posts it when it takes this out of its table, or never.
        unsafe { self.buffers.region.bytes(self.slot as usize * SEND_BYTES_MAX, self.len) }
    }
}

/// What of a pair's receives is used up, and what the peer was told.
#[derive(Debug)]
pub struct Inbox {
    /// The memory.
    pub buffers: Rc<Buffers>,
    /// Used up and released, not posted again yet.
    free: Vec<u32>,
    /// Receives used by the peer's credited operations and released so far.
    returned: u64,
    /// What the peer was told of it.
    announced: u64,
    /// The peer is told once this many are unannounced.
    step: u64,
    /// Receives posted and not completed.
    pub posted: usize,
}

impl Inbox {
    /// All buffers free, to be posted first of all.
    pub fn new(buffers: Rc<Buffers>) -> Inbox {
        let count = buffers.count();
        let step = ((count - SLACK) / 4).max(1) as u64;
        let free = (0..count as u32).collect();
        Inbox { buffers, free, returned: 0, announced: 0, step, posted: 0 }
    }

    /// A receive was used up and its buffer is free again; `credited`: by an operation for which the peer needed credit.
    pub fn release(&mut self, slot: u32, credited: bool) {
        self.free.push(slot);
        self.returned += u64::from(credited);
    }

    /// Buffers to post now, at most [`BATCH`]; `all`: even if fewer are free.
    pub fn batch(&self, all: bool) -> &[u32] {
        let at = match self.free.len() {
            free if free >= BATCH => free - BATCH,
            _ if all => 0,
            free => free,
        };
        &self.free[at..]
    }

    /// `count` buffers of the last batch were posted.
    pub fn on_posted(&mut self, count: usize) {
        self.free.truncate(self.free.len() - count);
        self.posted += count;
    }

    /// The credit to announce now, if it is worth a message: receives returned since the start, modulo 2^32. All full
    /// batches have been posted; what waits for the next one is part of [`SLACK`], so it counts as posted, and a peer with
    /// fewer receives than make a batch does not wait for ever.
    pub fn credit_due(&self) -> Option<u32> {
        debug_assert!(self.free.len() < BATCH, "credit before receives");
        (self.returned - self.announced >= self.step).then_some(self.returned as u32)
    }

    /// The credit was announced.
    pub fn on_announced(&mut self) {
        self.announced = self.returned;
    }
}

#[cfg(test)]
mod tests;
