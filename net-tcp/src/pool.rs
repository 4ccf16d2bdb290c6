//! Received messages waiting for their reader: fixed slots, allocated once per transport.

use antelog_core::transport::{MessageHandle, SEND_BYTES_MAX};

/// Which connection a message came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Slot in the transport's table.
    pub slot: usize,
    /// Tells apart connections that used the slot one after the other.
    pub serial: u64,
}

/// Slots of [`SEND_BYTES_MAX`] bytes each.
pub struct Pool {
    bytes: Box<[u8]>,
    slots: Box<[Slot]>,
    free: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Slot {
    len: usize,
    origin: Option<Origin>,
}

impl Pool {
    /// A pool of `count` slots. Their memory is touched, and so taken from the system, only as they are used.
    pub fn new(count: usize) -> Pool {
        let count = u32::try_from(count).expect("fewer than 2^32 message slots");
        Pool {
            bytes: vec![0; count as usize * SEND_BYTES_MAX].into_boxed_slice(),
            slots: vec![Slot { len: 0, origin: None }; count as usize].into_boxed_slice(),
            // Last in, first out, so that few slots stay in use and in the cache.
            free: (0..count).rev().collect(),
        }
    }

    /// Keeps a copy of `message`, which has at most [`SEND_BYTES_MAX`] bytes; `None` when no slot is free.
    pub fn put(&mut self, message: &[u8], origin: Origin) -> Option<MessageHandle> {
        let index = self.free.pop()?;
        let start = index as usize * SEND_BYTES_MAX;
        self.bytes[start..start + message.len()].copy_from_slice(message);
        self.slots[index as usize] = Slot { len: message.len(), origin: Some(origin) };
        Some(MessageHandle(index))
    }

    /// The bytes of a message that was not released yet. Panics for another handle.
    pub fn message(&self, handle: MessageHandle) -> &[u8] {
        let slot = &self.slots[handle.0 as usize];
        assert!(slot.origin.is_some(), "message {} was released already", handle.0);
        let start = handle.0 as usize * SEND_BYTES_MAX;
        &self.bytes[start..start + slot.len]
    }

    /// Frees a message's slot; where the message came from. Panics when it was free.
    pub fn release(&mut self, handle: MessageHandle) -> Origin {
        let slot = &mut self.slots[handle.0 as usize];
        let origin = slot.origin.take().expect("a message is released once");
        self.free.push(handle.0);
        origin
    }
}
