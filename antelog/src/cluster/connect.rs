//! Hand-shakes and dialing: who may connect to the nodes here, and whom they call.
//!
//! Replicas call the sequencer and the replicas of their shard with higher numbers, clients call gates. A connection that is
//! lost is made again by whoever made it, at once and then with backoff. A replica that comes back without its memory is
//! another incarnation, which the order log does not take for the one before; a sequencer that does so has lost the order
//! log.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use antelog_core::access::{Access, Keyring, Secret};
use antelog_core::config::{Config, NodeEntry, Role, resolve};
use antelog_core::counters::Counters;
use antelog_core::handshake::{Endpoint, Hello, Refusal, RefusalCode, Welcome};
use antelog_core::node::mailbox::{Admission, MailSender, Notice};
use antelog_core::node::replica::{replica_peer, sequencer_peer};
use antelog_core::path::{Ability, Path, decide};
use antelog_core::transport::PeerId;
use antelog_net_tcp::{Accept, DialError, Listener, ListenerHandle, TcpLink, dial};
use antelog_protocol::wire::session::{ClusterMap, ShardGates};
use antelog_protocol::{ClientId, ShardId};

use super::assemble::{Door, Doors, member_peer, replicas};
use super::connections::Connections;
use super::networks::Networks;
use super::serves_clients;
use crate::network::{Network, NodeLink};
use crate::watch::Observed;

/// Time for a connection attempt with its hand-shake.
const DIAL_TIME: Duration = Duration::from_secs(2);
/// First pause after a failed attempt; doubles up to the longest.
const BACKOFF_MIN: Duration = Duration::from_millis(20);
/// Longest pause between attempts.
const BACKOFF_MAX: Duration = Duration::from_secs(1);

/// Ports bound and not answered yet.
pub(super) struct Ports {
    nodes: BTreeMap<u16, Listener>,
    pub(super) clients: Vec<Listener>,
}

/// Binds what the local nodes listen on, and writes the ports that the system chose into the configuration.
pub(super) fn bind(config: &mut Config, local: &BTreeSet<u16>) -> Result<Ports, String> {
    let mut ports = Ports { nodes: BTreeMap::new(), clients: vec![] };
    let mut clients: BTreeMap<String, String> = BTreeMap::new();
    for node in config.nodes.iter_mut().filter(|n| local.contains(&n.id)) {
        if let Some(address) = node.listen.as_mut().filter(|_| node.role != Role::Primary) {
            let listener = Listener::bind(resolve(address)?).map_err(|e| e.to_string())?;
            *address = chosen(address, &listener);
            ports.nodes.insert(node.id, listener);
        }
        if let Some(address) = node.clients.as_mut().filter(|_| serves_clients(node.role)) {
            if let Some(bound) = clients.get(address) {
                *address = bound.clone();
                continue;
            }
            let listener = Listener::bind(resolve(address)?).map_err(|e| e.to_string())?;
            let bound = chosen(address, &listener);
            clients.insert(address.clone(), bound.clone());
            *address = bound;
            ports.clients.push(listener);
        }
    }
    if ports.clients.len() > 1 {
        return Err("the replicas of one process share one gate: give them the same 'clients' address".into());
    }
    Ok(ports)
}

/// The address as configured, with the port that was bound.
fn chosen(address: &str, listener: &Listener) -> String {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    format!("{host}:{}", listener.local_addr().port())
}

/// What whoever answers calls knows of this process.
pub(super) struct Known<'a> {
    pub(super) config: &'a Config,
    pub(super) doors: &'a Doors,
    pub(super) networks: &'a Networks,
    pub(super) keys: &'a Keyring,
    pub(super) observed: &'a Observed,
}

/// Answers calls on all ports.
pub(super) fn serve(
    ports: Ports,
    known: &Known<'_>,
    connections: &Connections,
    is_closing: &Arc<AtomicBool>,
) -> Result<Vec<ListenerHandle>, String> {
    let mut handles = Vec::new();
    let Known { config, doors, .. } = known;
    let failed = |e: std::io::Error| format!("cannot start a listening thread: {e}");
    for (id, listener) in ports.nodes {
        let (Some(node), Some(door)) = (config.node(id), doors.nodes.get(&id)) else { continue };
        let accept = NodeAccept::new(known, node, door, connections.clone());
        handles.push(listener.serve(Arc::new(accept)).map_err(failed)?);
    }
    for listener in ports.clients {
        let Some(door) = &doors.gate else { continue };
        let accept = GateAccept::new(known, door, is_closing.clone());
        handles.push(listener.serve(Arc::new(accept)).map_err(failed)?);
    }
    Ok(handles)
}

/// This process's incarnation: another one after every start.
pub(super) fn incarnation() -> u64 {
    static INCARNATION: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    *INCARNATION.get_or_init(|| {
        let mut bytes = [0; 8];
        // Without randomness the time still differs from one start to the next.
        if getrandom::fill(&mut bytes).is_err() {
            let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            bytes = (since.as_nanos() as u64).to_le_bytes();
        }
        u64::from_le_bytes(bytes) | 1
    })
}

fn cluster_matches(config: &Config, hello: &Hello) -> Result<(), Refusal> {
    let name = &config.cluster.name;
    // A client that names no cluster takes the one it finds.
    let is_unnamed = hello.cluster.is_empty() && matches!(hello.from, Endpoint::Client { .. } | Endpoint::Observer);
    if hello.cluster == *name || is_unnamed {
        return Ok(());
    }
    let text = format!("this is cluster \"{name}\", the caller belongs to cluster \"{}\"", hello.cluster);
    Err(Refusal::new(RefusalCode::Cluster, text))
}

/// The network of a pair, decided from what the caller says and what this side can do now.
fn path_of(hello: &Hello, own: &Network, caller: SocketAddr) -> Result<(Path, String), Refusal> {
    decide(&hello.ability, &own.ability(caller.ip())).map_err(|disagreement| {
        let code = if disagreement.is_final { RefusalCode::Incompatible } else { RefusalCode::Other };
        Refusal::new(code, disagreement.text)
    })
}

/// Which node calls which, and under which number each knows the other.
struct Call<'a> {
    to: &'a NodeEntry,
    /// The called node's number at the caller.
    to_peer: PeerId,
    /// The caller's number at the called node.
    from_peer: PeerId,
}

/// The calls that a node makes.
fn calls<'a>(config: &'a Config, from: &NodeEntry) -> Vec<Call<'a>> {
    let mut calls = Vec::new();
    if let Some(own) = member_peer(config, from.id) {
        // The lower member calls the higher.
        for to in config.sequencers() {
            let to_peer = member_peer(config, to.id).filter(|peer| *peer > own);
            calls.extend(to_peer.map(|to_peer| Call { to, to_peer, from_peer: own }));
        }
        return calls;
    }
    let number = replicas(config).iter().find(|(id, _)| *id == from.id).map(|(_, replica)| replica.peer);
    let (Some(shard), Some(at_sequencer)) = (from.shard, number) else { return calls };
    for (member, to) in (0..).zip(config.sequencers()) {
        calls.push(Call { to, to_peer: sequencer_peer(member), from_peer: at_sequencer });
    }
    let own = config.replicas_of(shard).position(|n| n.id == from.id).unwrap_or_default() as u16;
    for (number, to) in (0..).zip(config.replicas_of(shard)).filter(|(number, _)| *number > own) {
        calls.push(Call { to, to_peer: replica_peer(number), from_peer: replica_peer(own) });
    }
    calls
}

/// Whether a restart of this node is the end of the order log: it is the only one that had it.
fn loses_order(config: &Config, node: &NodeEntry) -> bool {
    node.role == Role::Sequencer && config.sequencers().len() == 1 && config.data_dir(node).is_none()
}

fn hello(config: &Config, from: u16, to: u16, ability: Ability) -> Hello {
    Hello {
        cluster: config.cluster.name.clone(),
        from: Endpoint::Node { from, to, incarnation: incarnation() },
        record_bytes_max: config.cluster.record_bytes_max,
        ring_bytes: 0,
        log_bytes: config.cluster.region_bytes as u64,
        ability,
        nonce: None,
    }
}

/// Answers nodes that call a local node.
struct NodeAccept {
    config: Config,
    id: u16,
    /// Numbers of the nodes that may call.
    callers: HashMap<u16, PeerId>,
    mail: MailSender<Admission<NodeLink>>,
    network: Network,
    keys: Keyring,
    agent: String,
    connections: Connections,
    observed: Observed,
}

impl NodeAccept {
    fn new(known: &Known<'_>, node: &NodeEntry, door: &Door, connections: Connections) -> NodeAccept {
        let config = known.config;
        let mut callers = HashMap::new();
        for from in &config.nodes {
            for call in calls(config, from).iter().filter(|c| c.to.id == node.id) {
                callers.insert(from.id, call.from_peer);
                connections.expect(&door.agent, call.from_peer, node.id, from.id);
            }
        }
        NodeAccept {
            config: config.clone(),
            id: node.id,
            callers,
            mail: door.mail.clone(),
            network: known.networks.of(node),
            keys: known.keys.clone(),
            agent: door.agent.clone(),
            connections,
            observed: known.observed.clone(),
        }
    }
}

impl Accept for NodeAccept {
    fn secrets(&self, hello: &Hello) -> &[Secret] {
        self.keys.of(&hello.from)
    }

    fn decide(&self, hello: &Hello, caller: SocketAddr, _: Option<usize>) -> Result<Welcome, Refusal> {
        cluster_matches(&self.config, hello)?;
        if hello.from == Endpoint::Observer {
            return self.observed.status().welcome(incarnation(), Access::Admin);
        }
        let Endpoint::Node { from, to, .. } = hello.from else {
            let text = "this port is for the cluster's own nodes; clients use the port that the key 'clients' names";
            return Err(Refusal::new(RefusalCode::Node, text));
        };
        if to != self.id {
            let text = format!("this is node {}, the caller looks for node {to}", self.id);
            return Err(Refusal::new(RefusalCode::Node, text));
        }
        if !self.callers.contains_key(&from) {
            let text = format!("node {} expects no call from node {from}: the configurations differ", self.id);
            return Err(Refusal::new(RefusalCode::Node, text));
        }
        let c = &self.config.cluster;
        if hello.log_bytes != c.region_bytes as u64 || hello.record_bytes_max != c.record_bytes_max {
            let text = format!(
                "node {} has region_bytes {} and record_bytes_max {}, the caller {} and {}: the configurations differ",
                self.id, c.region_bytes, c.record_bytes_max, hello.log_bytes, hello.record_bytes_max
            );
            return Err(Refusal::new(RefusalCode::Incompatible, text));
        }
        let (path, path_reason) = path_of(hello, &self.network, caller)?;
        Ok(Welcome {
            incarnation: incarnation(),
            ring_bytes: 0,
            record_bytes_max: c.record_bytes_max,
            log_bytes: c.region_bytes as u64,
            access: Access::Admin,
            path,
            path_reason,
            payload: vec![],
        })
    }

    fn established(&self, hello: Hello, welcome: Welcome, _: Option<usize>, link: TcpLink) {
        let Endpoint::Node { from, .. } = hello.from else { return };
        if let Some(peer) = self.callers.get(&from) {
            let link = Network::node_link(link, welcome.path, self.config.cluster.suspect_ms);
            self.connections.up(&self.agent, *peer);
            self.mail.send(Admission::Node { peer: *peer, link });
        }
    }

    fn refused(&self, from: SocketAddr, why: &str) {
        tracing::warn!(node = self.id, peer = %from, reason = why, "node {}: refused {from}: {why}", self.id);
    }
}

/// Answers clients.
struct GateAccept {
    config: Config,
    map: Vec<u8>,
    counters: Option<Counters>,
    mail: MailSender<Admission<NodeLink>>,
    network: Network,
    keys: Keyring,
    is_closing: Arc<AtomicBool>,
    observed: Observed,
}

/// The gates beside each shard's replicas: its nodes in the order of the configuration, the primary first.
pub(super) fn cluster_map(config: &Config) -> ClusterMap {
    let gates = |shard: u16| {
        let addresses = (0..).zip(config.replicas_of(shard));
        let gates = addresses.filter_map(|(number, node)| Some((number, node.clients.clone()?)));
        ShardGates { shard: ShardId(shard), gates: gates.collect() }
    };
    let mut shards: Vec<ShardGates> = config.shards.iter().map(|shard| gates(shard.id)).collect();
    shards.sort_by_key(|s| s.shard);
    ClusterMap {
        tick_ns: config.cluster.tick_us * 1000,
        suspect_ns: config.cluster.suspect_ms * 1_000_000,
        record_bytes_max: config.cluster.record_bytes_max,
        outstanding_max: config.cluster.outstanding_max,
        shards,
        ordering: config.cluster.ordering.name().into(),
    }
}

impl GateAccept {
    fn new(known: &Known<'_>, door: &Door, is_closing: Arc<AtomicBool>) -> GateAccept {
        GateAccept {
            config: known.config.clone(),
            map: cluster_map(known.config).encode(),
            counters: known.doors.gate_counters.clone(),
            mail: door.mail.clone(),
            network: known.networks.of_gate(),
            keys: known.keys.clone(),
            is_closing,
            observed: known.observed.clone(),
        }
    }

    /// Clients connected now.
    fn clients(&self) -> u64 {
        let counters = self.counters.as_ref().map(Counters::snapshot).unwrap_or_default();
        counters.iter().find(|(name, _)| name == "gate.clients").map_or(0, |(_, clients)| *clients)
    }
}

impl Accept for GateAccept {
    fn secrets(&self, hello: &Hello) -> &[Secret] {
        self.keys.of(&hello.from)
    }

    fn decide(&self, hello: &Hello, caller: SocketAddr, secret: Option<usize>) -> Result<Welcome, Refusal> {
        cluster_matches(&self.config, hello)?;
        if hello.from == Endpoint::Observer {
            return self.observed.status().welcome(incarnation(), self.keys.grant(secret).access);
        }
        if !matches!(hello.from, Endpoint::Client { .. }) {
            let text = "this port is for clients; nodes use the port that the key 'listen' names";
            return Err(Refusal::new(RefusalCode::Node, text));
        }
        if self.is_closing.load(Ordering::Relaxed) {
            return Err(Refusal::new(RefusalCode::Busy, "the node is shutting down"));
        }
        let c = &self.config.cluster;
        if self.clients() >= c.clients_max.into() {
            let text = format!("{} clients are connected, as many as cluster.clients_max allows", c.clients_max);
            return Err(Refusal::new(RefusalCode::Busy, text));
        }
        let ring = hello.ring_bytes;
        let most = c.client_ring_bytes as u64;
        let least = antelog_core::channel::CAPACITY_BYTES_MIN as u64;
        if !ring.is_power_of_two() || ring > most || ring < least {
            let text = format!("the client's ring of {ring} bytes must be a power of two from {least} to {most}");
            return Err(Refusal::new(RefusalCode::Incompatible, text));
        }
        let (path, path_reason) = path_of(hello, &self.network, caller)?;
        Ok(Welcome {
            incarnation: incarnation(),
            ring_bytes: most,
            record_bytes_max: c.record_bytes_max,
            log_bytes: 0,
            access: self.keys.grant(secret).access,
            path,
            path_reason,
            payload: self.map.clone(),
        })
    }

    fn established(&self, hello: Hello, welcome: Welcome, secret: Option<usize>, link: TcpLink) {
        if let Endpoint::Client { session } = hello.from {
            let link = Network::link(link, welcome.path);
            let ring_bytes = hello.ring_bytes as usize;
            let grant = self.keys.grant(secret);
            self.mail.send(Admission::Client { session: ClientId(session), link, ring_bytes, grant });
        }
    }

    fn refused(&self, from: SocketAddr, why: &str) {
        tracing::warn!(peer = %from, reason = why, "clients: refused {from}: {why}");
    }
}

/// Tells the dialer of an agent's peer that the connection is lost.
type Lost = Arc<Mutex<HashMap<(String, PeerId), Sender<()>>>>;

/// The threads that call peers, and the one that hears from the agents.
pub struct Dialers {
    /// Dropping these ends the dialing threads.
    lost: Lost,
    threads: Vec<JoinHandle<()>>,
    failure: Arc<Mutex<Option<String>>>,
}

/// What one dialing thread does.
struct Line {
    from: u16,
    to: u16,
    /// The called node is the only sequencer, with the order log in its memory.
    loses_order: bool,
    address: String,
    suspect_ms: u64,
    hello: Hello,
    secret: Option<Secret>,
    network: Network,
    peer: PeerId,
    mail: MailSender<Admission<NodeLink>>,
    agent: String,
    connections: Connections,
    failure: Arc<Mutex<Option<String>>>,
}

impl Dialers {
    pub(super) fn start(
        config: &Config,
        doors: &Doors,
        networks: &Networks,
        keys: &Keyring,
        connections: &Connections,
        heard: Receiver<Notice>,
    ) -> Dialers {
        let failure = Arc::new(Mutex::new(None));
        let mut lost = HashMap::new();
        let mut threads = Vec::new();
        for (id, door) in &doors.nodes {
            let Some(node) = config.node(*id) else { continue };
            for call in calls(config, node) {
                let (sender, receiver) = channel();
                lost.insert((door.agent.clone(), call.to_peer), sender);
                connections.expect(&door.agent, call.to_peer, *id, call.to.id);
                let line = Line {
                    from: *id,
                    to: call.to.id,
                    loses_order: loses_order(config, call.to),
                    address: call.to.listen.clone().unwrap_or_default(),
                    suspect_ms: config.cluster.suspect_ms,
                    hello: hello(config, *id, call.to.id, Ability::tcp()),
                    secret: keys.cluster().cloned(),
                    network: networks.of(node),
                    peer: call.to_peer,
                    mail: door.mail.clone(),
                    agent: door.agent.clone(),
                    connections: connections.clone(),
                    failure: failure.clone(),
                };
                threads.push(std::thread::spawn(move || line.keep(&receiver)));
            }
        }
        let lost = Arc::new(Mutex::new(lost));
        let (senders, connections) = (lost.clone(), connections.clone());
        // Ends when the last agent is gone, which in launch mode `invoked` may be after this.
        std::thread::spawn(move || listen(&heard, &senders, &connections));
        Dialers { lost, threads, failure }
    }

    /// A refusal that dialing again cannot mend.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Dialers {
    fn drop(&mut self) {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Hears from the agents until the last is gone: lost connections go to their dialers, warnings to the operator.
fn listen(heard: &Receiver<Notice>, lost: &Lost, connections: &Connections) {
    for notice in heard {
        match notice {
            Notice::Warning { agent, text } => tracing::warn!(agent, reason = text, "{agent}: {text}"),
            Notice::PeerDown { agent, peer, reason } => {
                connections.down(&agent, peer, &format!("the connection was lost ({reason:?})"));
                let lost = lost.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(sender) = lost.get(&(agent, peer)) {
                    // The dialer may be gone already when the node stops.
                    let _ = sender.send(());
                }
            }
        }
    }
}

impl Line {
    /// Keeps the connection: dials, hands the link over, waits for its loss, dials again. Ends with `lost`'s sender.
    fn keep(&self, lost: &Receiver<()>) {
        let mut incarnation = None;
        let mut said = String::new();
        let mut pause = BACKOFF_MIN;
        loop {
            match self.call() {
                Ok((link, welcome)) => {
                    let known = *incarnation.get_or_insert(welcome.incarnation);
                    if known != welcome.incarnation && self.loses_order {
                        self.fail(format!(
                            "the sequencer, node {} at {}, was restarted and has lost the order log: restart the whole \
                             cluster",
                            self.to, self.address
                        ));
                        return;
                    }
                    let text = format!(
                        "node {}: node {} at {} over {}: {}",
                        self.from, self.to, self.address, welcome.path, welcome.path_reason
                    );
                    if said != text {
                        let (path, reason) = (welcome.path.to_string(), &welcome.path_reason);
                        tracing::info!(
                            node = self.from,
                            peer = self.to,
                            address = self.address,
                            path,
                            reason,
                            "{text}"
                        );
                        said = text;
                    }
                    let link = Network::node_link(link, welcome.path, self.suspect_ms);
                    self.connections.up(&self.agent, self.peer);
                    self.mail.send(Admission::Node { peer: self.peer, link });
                    let connected = Instant::now();
                    if lost.recv().is_err() {
                        return;
                    }
                    let (node, peer, address) = (self.from, self.to, &self.address);
                    tracing::warn!(node, peer, address, "node {node}: lost node {peer} at {address}");
                    if connected.elapsed() > BACKOFF_MAX {
                        // It may be there again already: who waits for it waits for this.
                        pause = BACKOFF_MIN;
                        continue;
                    }
                }
                Err((error, final_)) => {
                    let text = format!("node {}: no connection to node {}: {error}", self.from, self.to);
                    if final_ {
                        self.fail(text);
                        return;
                    }
                    self.connections.down(&self.agent, self.peer, &error);
                    // Each reason is said once, not at every attempt.
                    if said != text {
                        tracing::warn!(node = self.from, peer = self.to, reason = error, "{text}");
                        said = text;
                    }
                }
            }
            match lost.recv_timeout(pause) {
                Err(RecvTimeoutError::Disconnected) => return,
                Ok(()) | Err(RecvTimeoutError::Timeout) => pause = (pause * 2).min(BACKOFF_MAX),
            }
        }
    }

    fn call(&self) -> Result<(TcpLink, Welcome), (String, bool)> {
        let address = resolve(&self.address).map_err(|e| (e, false))?;
        let hello = Hello { ability: self.network.ability(address.ip()), ..self.hello.clone() };
        dial(address, &hello, self.secret.as_ref(), DIAL_TIME).map_err(|error| {
            let code = match &error {
                DialError::Rejected(_, refusal) => Some(refusal.code),
                DialError::Version(..) => Some(RefusalCode::Version),
                _ => None,
            };
            // Whoever has no secret can prove nothing: with one, a refusal must not be able to end this node.
            let is_trusted = self.secret.is_none();
            let mends_itself = !is_trusted || matches!(code, None | Some(RefusalCode::Busy | RefusalCode::Other));
            (error.to_string(), !mends_itself)
        })
    }

    fn fail(&self, text: String) {
        tracing::error!(node = self.from, peer = self.to, "{text}");
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(text);
    }
}
