//! All of this crate's `unsafe`: memory that a network writes, and the few system calls `std` lacks.
//!
//! Everything else in the crate denies unsafe code. See "Rooms for unsafe" in DESIGN.md.
#![allow(unsafe_code)]

mod region;
pub mod sys;

pub use region::{Pages, Region};
