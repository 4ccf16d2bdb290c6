//! Connecting: the first contact of a client, and the dialer of its session.
//!
//! Name look-up, connection and hand-shake block, so each attempt has a short-lived thread of its own; how many there
//! are is bounded by the number of nodes, because an address is not dialled again before the answer.

use std::collections::VecDeque;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use antelog_core::access::{Access, Secret};
use antelog_core::client::session::{Dialed, Dialer};
use antelog_core::handshake::{Endpoint, Hello, Welcome};
use antelog_core::node::Waker;
use antelog_core::path::Ability;
use antelog_net_tcp::{TcpLink, dial};
use antelog_protocol::ClientId;
use antelog_protocol::wire::session::ClusterMap;

use super::Log;
use super::completion::lock;
use super::error::Error;
use crate::network::{Network, NodeLink};

/// The ring that the first contact asks for: the smallest that any cluster grants. Nothing is ever sent through it.
const FIRST_RING_BYTES: u64 = antelog_core::channel::CAPACITY_BYTES_MIN as u64;

/// Whom to call, and as whom.
#[derive(Clone)]
pub(super) struct Caller {
    pub(super) cluster: String,
    pub(super) client: ClientId,
    pub(super) ring_bytes: u64,
    pub(super) timeout: Duration,
    pub(super) secret: Option<Secret>,
    pub(super) network: Network,
    /// Where it is said which network was chosen for a connection, and why.
    pub(super) log: Option<Log>,
}

impl Caller {
    /// Connects to the first of a name's addresses that answers, all within the timeout. The error is one line and
    /// names the address.
    fn call(&self, address: &str) -> Result<(TcpLink, Welcome), String> {
        let mut hello = Hello {
            cluster: self.cluster.clone(),
            from: Endpoint::Client { session: self.client.0 },
            record_bytes_max: 0,
            ring_bytes: self.ring_bytes,
            log_bytes: 0,
            ability: Ability::tcp(),
            nonce: None,
        };
        let started = Instant::now();
        let resolved = address
            .to_socket_addrs()
            .map_err(|error| format!("cannot look up {address}: {error}; an address is host:port"))?;
        let mut failure = format!("{address} has no address");
        for to in resolved {
            let left = self.timeout.saturating_sub(started.elapsed());
            if left.is_zero() {
                break;
            }
            hello.ability = self.network.ability(to.ip());
            match dial(to, &hello, self.secret.as_ref(), left) {
                Ok(connected) => return Ok(connected),
                Err(error) => failure = error.to_string(),
            }
        }
        Err(failure)
    }
}

/// The cluster's map. A node that listens on all its interfaces says so in its address; it is meant where we met it.
fn map_of(welcome: &Welcome, address: &str, peer: SocketAddr) -> Result<ClusterMap, String> {
    let mut map = ClusterMap::decode(&welcome.payload)
        .map_err(|error| format!("{address} sent a malformed map of the cluster: {error}"))?;
    for (_, gate) in map.shards.iter_mut().flat_map(|s| &mut s.gates) {
        if let Some(everywhere) = gate.parse::<SocketAddr>().ok().filter(|a| a.ip().is_unspecified()) {
            *gate = SocketAddr::new(peer.ip(), everywhere.port()).to_string();
        }
    }
    Ok(map)
}

/// What the first contact tells.
pub(super) struct First {
    pub(super) map: ClusterMap,
    /// The ring that the cluster's nodes grant a client, in bytes.
    pub(super) ring_bytes: usize,
    pub(super) access: Access,
}

/// Asks all addresses at once what the cluster is like.
///
/// # Errors
/// [`Error::Connect`] with what came of each address.
pub(super) fn first_contact(caller: &Caller, addresses: &[String]) -> Result<First, Error> {
    let caller = Caller { ring_bytes: FIRST_RING_BYTES, ..caller.clone() };
    let until = Instant::now() + caller.timeout + Duration::from_millis(200);
    let (answer, answers) = mpsc::channel();
    for address in addresses {
        let (caller, address, answer) = (caller.clone(), address.clone(), answer.clone());
        let ask = move || {
            let result = caller.call(&address).and_then(|(link, welcome)| {
                let ring_bytes = usize::try_from(welcome.ring_bytes).unwrap_or(usize::MAX);
                Ok(First { map: map_of(&welcome, &address, link.peer())?, ring_bytes, access: welcome.access })
            });
            // Nobody listens any more when another address was faster.
            let _ = answer.send(result);
        };
        if let Err(error) = thread::Builder::new().name("antelog-dial".into()).spawn(ask) {
            return Err(Error::System(format!("cannot start a thread: {error}")));
        }
    }
    drop(answer);
    let mut attempts = Vec::new();
    loop {
        match answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(Ok(found)) => return Ok(found),
            Ok(Err(failure)) => attempts.push(failure),
            Err(RecvTimeoutError::Disconnected) => return Err(Error::Connect { attempts }),
            Err(RecvTimeoutError::Timeout) => {
                attempts.push(format!("no answer within {:?}", caller.timeout));
                return Err(Error::Connect { attempts });
            }
        }
    }
}

#[derive(Default)]
struct Answers {
    queue: VecDeque<Dialed<NodeLink>>,
    waker: Option<Waker>,
}

/// Connects a session to gates, each attempt on a short-lived thread.
pub struct ClientDialer {
    caller: Caller,
    answers: Arc<Mutex<Answers>>,
}

impl ClientDialer {
    pub(super) fn new(caller: Caller) -> ClientDialer {
        ClientDialer { caller, answers: Arc::default() }
    }
}

impl Dialer<NodeLink> for ClientDialer {
    fn request(&mut self, address: &str) {
        let (caller, answers, to) = (self.caller.clone(), self.answers.clone(), address.to_owned());
        let call = move || {
            let result = caller.call(&to).and_then(|(link, welcome)| {
                let ring_bytes = usize::try_from(welcome.ring_bytes).unwrap_or(usize::MAX);
                let map = map_of(&welcome, &to, link.peer())?;
                if let Some(log) = &caller.log {
                    log(&format!("gate {to} over {}: {}", welcome.path, welcome.path_reason));
                }
                Ok((Network::link(link, welcome.path), map, ring_bytes, welcome.incarnation))
            });
            let mut answers = lock(&answers);
            answers.queue.push_back(Dialed { address: to, result });
            let waker = answers.waker.clone();
            drop(answers);
            waker.iter().for_each(Waker::wake);
        };
        if let Err(error) = thread::Builder::new().name("antelog-dial".into()).spawn(call) {
            let result = Err(format!("cannot start a thread to connect: {error}"));
            lock(&self.answers).queue.push_back(Dialed { address: address.to_owned(), result });
        }
    }

    fn take(&mut self) -> Option<Dialed<NodeLink>> {
        lock(&self.answers).queue.pop_front()
    }

    fn waker(&mut self, waker: Waker) {
        lock(&self.answers).waker = Some(waker);
    }
}
