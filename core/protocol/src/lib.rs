//! The ordering and speculation protocol of antelog as pure state machines.
//!
//! No clock, socket, thread, file or randomness: inputs are `on_…(now_ns, …)` calls, effects go to an `Out` trait that
//! the caller passes in. The same code therefore runs on pinned threads, embedded in a program, and in a simulator.
//! `PROTOCOL.md` beside this crate specifies it; invariants are asserted in the code under their numbers.
//!
//! Reading order:
//!
//! 1. [`types`]: the words — lsn, position, window, cut.
//! 2. [`ledger`]: what the order log says, and the arithmetic of positions.
//! 3. [`shard`]: append, placed, speculative delivery, report, fill, commit. [`duplicates`] suppresses retries.
//! 4. [`sequencer`]: reports in; grants, cuts and targets out.
//! 5. [`client`]: the merge that turns deliveries and the order stream into deliver, confirm and fail.
//! 6. [`wire`]: every byte format; [`limits`]: every compile-time bound; [`mutant`]: bugs that tests can plant.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

#[macro_use]
mod invariant;

pub mod client;
pub mod duplicates;
pub mod ledger;
pub mod limits;
pub mod mutant;
pub mod sequencer;
pub mod shard;
pub mod types;
pub mod wire;

pub use types::*;
