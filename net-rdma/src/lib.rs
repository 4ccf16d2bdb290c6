//! antelog's transport contract on RDMA verbs.
//!
//! Reading order: `provider` says what is asked of a device, `verbs` is the real one (libibverbs, loaded at run time) and
//! `emulated` one in memory for tests. `transport` moves the data of pairs that agreed on RDMA to queue pairs and leaves
//! all others on their carrier, which is TCP. `sim` puts clusters of the simulator on the emulated device.

pub mod counters;
pub mod discover;
mod drain;
pub mod emulated;
pub mod health;
mod inbox;
mod output;
mod pair;
pub mod provider;
pub mod setup;
pub mod sim;
mod transport;
pub mod verbs;
pub mod watch;

pub use transport::{Link, Options, RdmaTransport};
