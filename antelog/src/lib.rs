//! antelog
#[path = "client/dialer.rs"]
pub mod client_tcp;
pub mod cluster;
