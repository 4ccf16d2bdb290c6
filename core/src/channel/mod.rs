//! Channels: how threads and peers hand over byte messages without locks, allocation or copies they do not need.
//!
//! * [`ring`] — between two peers over one-sided writes, with credits; every message matters.
//! * [`spsc`] — between two threads of one process.
//!
//! Both lay messages out in the same way (`frame`): contiguous, so a receiver reads them in place.

mod frame;
pub mod mirror;
pub mod ring;
pub mod spsc;

pub use frame::{CAPACITY_BYTES_MAX, CAPACITY_BYTES_MIN, message_bytes_max};
pub use ring::{Ring, RingError};
