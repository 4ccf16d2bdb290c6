//! antelog
pub mod cluster;
#[path = "client/dialer.rs"]
pub mod client_tcp;
