//! The transport contract on TCP through io_uring.
#![deny(unsafe_code)]
