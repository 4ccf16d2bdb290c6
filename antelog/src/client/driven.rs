//! A session that the caller drives on its own thread: for programs that cannot afford to be woken by another one.

use antelog_core::client::session::{Session, SessionOptions};

use super::connect::{Caller, ClientDialer, First, first_contact};
use super::{ClientOptions, Error, GATES_MAX, caller_of, random_id};
use crate::network::{NodeTransport, Traffic};

/// A session; see [`Session`] for what it does. Stays on the thread that made it.
pub type DrivenSession = Session<NodeTransport, ClientDialer>;

/// Makes a session whose duty cycle the caller runs, again and again, on the calling thread. It connects by itself.
///
/// # Errors
/// [`Error::NoAddress`], [`Error::Connect`] when no address leads to a node that lets us in, [`Error::System`].
pub fn driven_session(options: &ClientOptions) -> Result<DrivenSession, Error> {
    if options.addresses.is_empty() {
        return Err(Error::NoAddress);
    }
    let client = random_id()?;
    let caller = caller_of(options)?;
    let First { ring_bytes, .. } = first_contact(&caller, &options.addresses)?;
    let caller = Caller { client, ring_bytes: ring_bytes as u64, ..caller };
    let mut session = SessionOptions::new(client, options.addresses.clone());
    (session.ring_bytes, session.gates_max, session.prefault) = (ring_bytes, GATES_MAX, true);
    let transport = caller.network.transport(GATES_MAX.into(), Traffic::Rings, None).map_err(Error::System)?;
    Session::new(transport, ClientDialer::new(caller), session).map_err(|e| Error::System(e.to_string()))
}
