//! The transport contract on TCP through io_uring.
//!
//! One-sided writes do not exist on TCP, so each side's transport places the bytes that arrive in the regions its
//! owner exposed, and acknowledges what was placed when asked. [`dial`] and [`Listener`] establish connections;
//! [`TcpTransport`] carries them.
#![deny(unsafe_code)]

mod bootstrap;
mod connection;
pub mod frame;
mod listen;
mod output;
mod pool;
mod transport;
mod uring;

pub use bootstrap::{DialError, TcpLink, dial};
pub use listen::{Accept, BindError, HANDSHAKE_TIME, Listener, ListenerHandle, PENDING_MAX};
pub use transport::{Options, TcpTransport};
pub use uring::SetupError;
