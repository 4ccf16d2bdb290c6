//! antelog's core: log regions, channels, duty cycles and configuration, independent of the network below.
#![deny(unsafe_code)]

pub mod contract;
pub mod handshake;
pub mod mem;
pub mod transport;
