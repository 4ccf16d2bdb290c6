//! A session that the caller drives on its own thread: for programs that cannot afford to be woken by another one.

use antelog_core::client::session::{Session, SessionOptions};
use antelog_net_tcp::{Options, TcpTransport};

use super::tcp::{Caller, TcpDialer, first_contact};
use super::{ClientOptions, Error, GATES_MAX, random_id};

/// A session over TCP; see [`Session`] for what it does. Stays on the thread that made it.
pub type DrivenSession = Session<TcpTransport, TcpDialer>;

/// Makes a session whose duty cycle the caller runs, again and again, on the calling thread. It connects by itself.
///
/// # Errors
/// [`Error::NoAddress`], [`Error::Connect`] when no address leads to a node that lets us in, [`Error::System`].
pub fn driven_session(options: &ClientOptions) -> Result<DrivenSession, Error> {
    if options.addresses.is_empty() {
        return Err(Error::NoAddress);
    }
    let client = random_id()?;
    let caller = Caller {
        cluster: options.cluster_name.clone(),
        client: random_id()?,
        ring_bytes: 0,
        timeout: options.connect_timeout,
    };
    let (_, ring_bytes) = first_contact(&caller, &options.addresses)?;
    let caller = Caller { client, ring_bytes: ring_bytes as u64, ..caller };
    let mut session = SessionOptions::new(client, options.addresses.clone());
    (session.ring_bytes, session.gates_max, session.prefault) = (ring_bytes, GATES_MAX, true);
    let messages = Some(16);
    let transport = TcpTransport::new(GATES_MAX, Options { messages, ..Options::default() });
    let transport = transport.map_err(|e| Error::System(e.to_string()))?;
    Session::new(transport, TcpDialer::new(caller), session).map_err(|e| Error::System(e.to_string()))
}
