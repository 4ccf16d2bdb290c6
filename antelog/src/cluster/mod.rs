//! Runs the nodes of a cluster in this process: all of them (embedded, as in `antelog dev`) or one (`antelog node`).
//!
//! This is the composition root: the only place that knows which network is below. It binds the ports, builds the
//! agents on their threads, answers hand-shakes and dials the peers; the data threads then talk among themselves.

mod assemble;
mod connect;
mod networks;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::channel;

use antelog_core::config::{Config, Role};
use antelog_core::counters::Counters;
use antelog_core::node::{Invoked, LaunchMode, Running};
use antelog_net_tcp::ListenerHandle;

pub use connect::Dialers;

use networks::Networks;

/// Where lines for the operator go.
pub type OperatorLog = Arc<dyn Fn(&str) + Send + Sync>;

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
    counters: Vec<Counters>,
    networks: Networks,
    config: Config,
}

impl Cluster {
    /// Starts nodes of a validated configuration on threads of their own. With [`Nodes::All`], port 0 in an address lets
    /// the system choose.
    ///
    /// # Errors
    /// One line: what was tried, on what, and what to do.
    pub fn start(config: Config, nodes: Nodes, log: OperatorLog) -> Result<Cluster, String> {
        if config.launch.mode == LaunchMode::Invoked {
            return Err("launch.mode = \"invoked\" is for programs that drive the agents: use Cluster::invoked".into());
        }
        Cluster::set_up(config, nodes, log).map(|(cluster, _)| cluster)
    }

    /// Starts nodes whose agents the caller drives on its own thread, by calling [`Invoked::step`] again and again: launch
    /// mode `invoked`. Drop the agents before the cluster.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn invoked(mut config: Config, nodes: Nodes, log: OperatorLog) -> Result<(Cluster, Invoked), String> {
        config.launch.mode = LaunchMode::Invoked;
        Cluster::set_up(config, nodes, log)
    }

    fn set_up(mut config: Config, nodes: Nodes, log: OperatorLog) -> Result<(Cluster, Invoked), String> {
        let local: BTreeSet<u16> = match nodes {
            Nodes::All => config.nodes.iter().map(|n| n.id).collect(),
            Nodes::One(id) if config.node(id).is_some() => BTreeSet::from([id]),
            Nodes::One(id) => {
                let known: Vec<String> = config.nodes.iter().map(|n| n.id.to_string()).collect();
                return Err(format!("the configuration has no node {id}; it has {}", known.join(", ")));
            }
        };
        let ports = connect::bind(&mut config, &local)?;
        let clients = ports.clients.iter().map(|l| l.local_addr().to_string()).collect();
        let (notices, heard) = channel();
        let networks = Networks::choose(&config, &local, &log)?;
        let assembly = assemble::assemble(&config, &local, &networks, &notices)?;
        // The notices end when the last agent is gone.
        drop(notices);
        let invoked = Invoked::build_in_turns(assembly.invoked, assembly.invoked_turns)?;
        let running = antelog_core::node::launch(assembly.threads).map_err(|e| e.to_string())?;
        let listeners = connect::serve(ports, &config, &assembly.doors, &networks, &log)?;
        let dialers = Dialers::start(&config, &assembly.doors, &networks, heard, &log);
        let cluster = Cluster {
            running: Some(running),
            dialers: Some(dialers),
            listeners,
            clients,
            counters: assembly.counters,
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
        let mut all: Vec<(String, u64)> = self.counters.iter().flat_map(Counters::snapshot).collect();
        let leads = |(name, value): &(String, u64)| match name.strip_suffix(".is_primary") {
            Some(replica) if *value == 1 => Some(replica.to_owned()),
            _ => None,
        };
        for replica in all.iter().filter_map(leads).collect::<Vec<_>>() {
            let Some(shard) = replica.strip_prefix("replica-").and_then(|r| r.split('-').next()) else { continue };
            let own = all.iter().filter_map(|(name, value)| Some((name.strip_prefix(&replica)?, value)));
            let of_shard: Vec<_> = own.map(|(name, value)| (format!("shard-{shard}{name}"), *value)).collect();
            all.extend(of_shard);
        }
        all
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

    /// Stops the nodes and waits for them.
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

/// Whether a node serves clients.
fn serves_clients(role: Role) -> bool {
    role != Role::Sequencer
}
