//! Connections between two transports of our own, for measurements: a listener that takes one caller after the other, and a
//! caller. Which network they take is decided as between nodes.

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use antelog::network::{Network, NodeLink};
use antelog_core::access::Access;
use antelog_core::handshake::{Endpoint, Hello, Refusal, RefusalCode, Welcome};
use antelog_core::path::{Path, decide};
use antelog_net_tcp::{Accept, Listener, ListenerHandle, TcpLink, dial};

/// The name under which both ends find each other: no cluster has it.
const NAME: &str = "antelog doctor";

/// How long connecting may take.
const CONNECT_TIME: Duration = Duration::from_secs(10);

/// A connection, who is at its other end, and which network it takes and why.
pub struct Linked {
    pub link: NodeLink,
    pub peer: SocketAddr,
    pub path: Path,
    pub reason: String,
}

/// Takes callers.
pub struct Door {
    handle: ListenerHandle,
    callers: Receiver<Linked>,
}

struct Doorman {
    network: Network,
    callers: Mutex<Sender<Linked>>,
}

impl Accept for Doorman {
    fn decide(&self, hello: &Hello, from: SocketAddr, _: Option<usize>) -> Result<Welcome, Refusal> {
        if hello.cluster != NAME {
            return Err(Refusal::new(
                RefusalCode::Cluster,
                "this is \"antelog doctor --listen\", no node of a cluster",
            ));
        }
        let (path, path_reason) = decide(&hello.ability, &self.network.ability(from.ip()))
            .map_err(|disagreement| Refusal::new(RefusalCode::Incompatible, disagreement.text))?;
        Ok(Welcome {
            incarnation: 1,
            ring_bytes: 0,
            record_bytes_max: 0,
            log_bytes: 0,
            access: Access::Admin,
            path,
            path_reason,
            payload: Vec::new(),
        })
    }

    fn established(&self, _: Hello, welcome: Welcome, _: Option<usize>, link: TcpLink) {
        let peer = link.peer();
        let linked =
            Linked { link: Network::link(link, welcome.path), peer, path: welcome.path, reason: welcome.path_reason };
        // Fails only when nobody waits any more.
        let _ = self.callers.lock().map(|callers| callers.send(linked));
    }

    fn refused(&self, from: SocketAddr, why: &str) {
        eprintln!("antelog: {from} {why}");
    }
}

impl Door {
    /// Listens.
    ///
    /// # Errors
    /// The address cannot be had: one line.
    pub fn open(address: SocketAddr, network: &Network) -> Result<Door, String> {
        let (sender, callers) = channel();
        let listener = Listener::bind(address).map_err(|e| e.to_string())?;
        let doorman = Doorman { network: network.clone(), callers: Mutex::new(sender) };
        let handle = listener.serve(Arc::new(doorman)).map_err(|e| format!("cannot start a thread: {e}"))?;
        Ok(Door { handle, callers })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.handle.local_addr()
    }

    /// The next caller, waited for.
    pub fn next(&self) -> Option<Linked> {
        self.callers.recv().ok()
    }
}

/// Calls a door.
///
/// # Errors
/// Nobody is there, or they cannot agree on a network: one line.
pub fn call(address: SocketAddr, network: &Network) -> Result<Linked, String> {
    let hello = Hello {
        cluster: NAME.into(),
        from: Endpoint::Client { session: 1 },
        record_bytes_max: 0,
        ring_bytes: 0,
        log_bytes: 0,
        ability: network.ability(address.ip()),
        nonce: None,
    };
    let (link, welcome) = dial(address, &hello, None, CONNECT_TIME).map_err(|e| e.to_string())?;
    let peer = link.peer();
    Ok(Linked { link: Network::link(link, welcome.path), peer, path: welcome.path, reason: welcome.path_reason })
}
