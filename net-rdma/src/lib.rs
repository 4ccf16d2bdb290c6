//! antelog's transport contract on RDMA verbs.
//!
//! Reading order: `provider` says what is asked of a device, `verbs` is the real one (libibverbs, loaded at run time) and
//! `emulated` one in memory for tests. `transport` moves the data of pairs that agreed on RDMA to queue pairs and leaves
//! all others on their carrier, which is TCP.

pub mod emulated;
pub mod provider;
