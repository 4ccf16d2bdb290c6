//! antelog's core: log regions, channels, duty cycles and configuration, independent of the network below.
#![deny(unsafe_code)]

pub mod access;
pub mod channel;
pub mod client;
pub mod config;
pub mod contract;
pub mod counters;
mod crc;
pub mod handshake;
pub mod log;
pub mod mem;
pub mod node;
pub mod path;
pub mod sim;
pub mod storage;
mod sync;
pub mod transport;
