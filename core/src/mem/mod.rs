//! This crate's `unsafe`: memory that a network writes, and the few system calls `std` lacks.
//!
//! Outside this module only the two channels that hand out messages in place (`channel::ring`, `channel::spsc`) have an
//! unsafe block each; everything else in the crate denies unsafe code. See "Rooms for unsafe" in DESIGN.md.
#![allow(unsafe_code)]

mod region;
pub mod sys;

pub use region::{Pages, Region};
