//! Runs the nodes of a cluster in this process: all of them (embedded, as in `antelog dev`) or one (`antelog node`).
//!
//! This is the composition root: the only place that knows which network is below. It binds the ports, builds the
//! agents on their threads, answers hand-shakes and dials the peers; the data threads then talk among themselves.

mod assemble;
mod connect;
mod connections;
mod networks;
mod shutdown;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::channel;

use antelog_core::access::Keyring;
use antelog_core::config::{Config, NodeEntry, Role};
use antelog_core::counters::Counters;
use antelog_core::node::{Invoked, LaunchMode, Running};
use antelog_net_tcp::ListenerHandle;

pub use connect::Dialers;
pub use connections::Connection;

use assemble::Doors;
use connect::Known;
use connections::Connections;
use networks::Networks;
use shutdown::Closer;

use crate::watch::Observed;

/// Which of the configuration's nodes run here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nodes {
    /// Every node: an embedded cluster.
    All,
    /// The node with this number.
    One(u16),
}

/// Nodes at work. Dropping it stops them.
pub struct Cluster {
    running: Option<Running>,
    dialers: Option<Dialers>,
    listeners: Vec<ListenerHandle>,
    clients: Vec<String>,
    observed: Observed,
    closer: Closer,
    networks: Networks,
    config: Config,
}

impl Cluster {
    /// Starts nodes of a validated configuration on threads of their own. With [`Nodes::All`], port 0 in an address lets
    /// the system choose.
    ///
    /// # Errors
    /// One line: what was tried, on what, and what to do.
    pub fn start(config: Config, nodes: Nodes) -> Result<Cluster, String> {
        if config.launch.mode == LaunchMode::Invoked {
            return Err("launch.mode = \"invoked\" is for programs that drive the agents: use Cluster::invoked".into());
        }
        Cluster::set_up(config, nodes).map(|(cluster, _)| cluster)
    }

    /// Starts nodes whose agents the caller drives on its own thread, by calling [`Invoked::step`] again and again: launch
    /// mode `invoked`. Drop the agents before the cluster.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn invoked(mut config: Config, nodes: Nodes) -> Result<(Cluster, Invoked), String> {
        config.launch.mode = LaunchMode::Invoked;
        Cluster::set_up(config, nodes)
    }

    fn set_up(mut config: Config, nodes: Nodes) -> Result<(Cluster, Invoked), String> {
        let local: BTreeSet<u16> = match nodes {
            Nodes::All => config.nodes.iter().map(|n| n.id).collect(),
            Nodes::One(id) if config.node(id).is_some() => BTreeSet::from([id]),
            Nodes::One(id) => {
                let known: Vec<String> = config.nodes.iter().map(|n| n.id.to_string()).collect();
                return Err(format!("the configuration has no node {id}; it has {}", known.join(", ")));
            }
        };
        let here = |n: &&NodeEntry| local.contains(&n.id);
        let keys = Keyring::load(&config, config.nodes.iter().filter(here).any(|n| serves_clients(n.role)))?;
        let ports = connect::bind(&mut config, &local)?;
        let clients = ports.clients.iter().map(|l| l.local_addr().to_string()).collect();
        let (notices, heard) = channel();
        let networks = Networks::choose(&config, &local)?;
        let assembly = assemble::assemble(&config, &local, &networks, &notices)?;
        // The notices end when the last agent is gone.
        drop(notices);
        let invoked = Invoked::build_in_turns(assembly.invoked, assembly.invoked_turns)?;
        let running = antelog_core::node::launch(assembly.threads).map_err(|e| e.to_string())?;
        let (connections, doors) = (Connections::default(), &assembly.doors);
        let closer = Closer {
            nodes: doors.nodes.iter().map(|(id, door)| (*id, door.mail.clone())).collect(),
            gate: doors.gate.as_ref().map(|door| door.mail.clone()),
            is_closing: Arc::default(),
        };
        let observed = observe(&config, doors, assembly.counters, connections.clone());
        let known = Known { config: &config, doors, networks: &networks, keys: &keys, observed: &observed };
        let listeners = connect::serve(ports, &known, &connections, &closer.is_closing)?;
        let dialers = Dialers::start(&config, doors, &networks, &keys, &connections, heard);
        let cluster = Cluster {
            running: Some(running),
            dialers: Some(dialers),
            listeners,
            clients,
            observed,
            closer,
            networks,
            config,
        };
        Ok((cluster, invoked))
    }

    /// Addresses on which clients are served here, as bound.
    pub fn client_addresses(&self) -> &[String] {
        &self.clients
    }

    /// The configuration in force, with the ports that were chosen.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// All counters of the nodes here, as (`agent.name`, value). Those of a replica that leads its shard are there a second
    /// time as the shard's.
    pub fn counters(&self) -> Vec<(String, u64)> {
        self.observed.counters()
    }

    /// What can be watched of the nodes here, from any thread.
    pub fn observed(&self) -> &Observed {
        &self.observed
    }

    /// Sum of one counter over all agents whose name begins with `agent`.
    pub fn counter(&self, agent: &str, name: &str) -> u64 {
        let matches = |full: &str| {
            full.rsplit_once('.').is_some_and(|(prefix, counter)| prefix.starts_with(agent) && counter == name)
        };
        self.counters().iter().filter(|(full, _)| matches(full)).map(|(_, value)| value).sum()
    }

    /// Why the nodes stopped by themselves, if they did.
    pub fn failure(&self) -> Option<String> {
        let dialers = self.dialers.as_ref().and_then(Dialers::failure);
        self.running.as_ref().and_then(Running::failure).or(dialers)
    }

    /// One line about the networks used here, and why.
    pub fn network_text(&self) -> String {
        self.networks.text()
    }

    /// One line about how the nodes run: launch mode, idle strategy, threads.
    pub fn launch_text(&self) -> String {
        let launch = &self.config.launch;
        format!("{} + {}", launch.mode, launch.idle)
    }

    /// Stops the nodes at once and waits for their threads. [`close`](Self::close) is the polite way.
    pub fn stop(mut self) -> Option<String> {
        self.shut_down()
    }

    fn shut_down(&mut self) -> Option<String> {
        let failure = self.failure();
        self.listeners.clear();
        let stopped = self.running.take().and_then(Running::stop);
        self.dialers.take();
        failure.or(stopped)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.shut_down();
    }
}

/// What can be watched: every agent's counters under its node, the gate's under the first replica's here.
fn observe(config: &Config, doors: &Doors, counters: Vec<Counters>, connections: Connections) -> Observed {
    let node_of = |agent: &str| {
        let own = doors.nodes.iter().find(|(_, door)| door.agent == agent);
        let serving = || doors.nodes.keys().find(|id| config.node(**id).is_some_and(|n| serves_clients(n.role)));
        own.map(|(id, _)| id).or_else(serving).copied().unwrap_or_default()
    };
    let agents = counters.into_iter().map(|counters| (node_of(counters.agent()), counters)).collect();
    Observed::new(config, agents, Arc::new(move || connections.list()))
}

/// Whether a node serves clients.
fn serves_clients(role: Role) -> bool {
    role != Role::Sequencer
}
