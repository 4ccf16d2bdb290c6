//! How nodes are, asked one by one: what `antelog cluster status` puts together.
//!
//! A node answers on every port it listens on, in the hand-shake itself (an [`Endpoint::Observer`] calls), on control
//! threads: nothing it does for others waits for it. It tells what its agents publish, never what it believes of others.

use std::collections::BTreeMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use antelog_core::access::{Access, Secret};
use antelog_core::config::{Config, NodeEntry, Role};
use antelog_core::counters::Counters;
use antelog_core::handshake::{Endpoint, Hello, PAYLOAD_BYTES_MAX, Refusal, RefusalCode, Welcome};
use antelog_core::path::{Ability, Path};
use antelog_net_tcp::dial;
use serde::{Deserialize, Serialize};

/// What one process says of the nodes in it, and whom else it knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The cluster's name.
    pub cluster: String,
    /// The ordering it was configured with: `antelog ordering` may have changed it.
    pub ordering: String,
    /// What an answer promises: `replicated` or `flushed`.
    pub durability: String,
    /// Every node of the cluster, by the configuration of the one that answers.
    pub nodes: Vec<Node>,
    /// The nodes in the process that answers.
    pub here: Vec<Here>,
    /// What they lack to do their work: a line each.
    pub missing: Vec<String>,
}

/// A node, as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its number.
    pub id: u16,
    /// `sequencer`, `primary`, `backup` or `spare`: what it is at first.
    pub role: String,
    /// Its shard.
    pub shard: Option<u16>,
    /// The shard takes no appends until it is told to.
    pub standby: bool,
    /// Where it can be asked, `host:port`.
    pub address: String,
}

/// A node that answers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Here {
    /// Its number.
    pub node: u16,
    /// The folder in which it keeps its log; none: in memory only.
    pub data_dir: Option<String>,
    /// What its agents count, by agent and counter: those of METRICS.md, but for networks'.
    pub agents: BTreeMap<String, BTreeMap<String, u64>>,
}

impl Here {
    /// The value of a counter of the first agent whose name begins so.
    pub fn value(&self, agent: &str, counter: &str) -> Option<u64> {
        let of_agent = self.agents.iter().find(|(name, _)| name.starts_with(agent))?.1;
        of_agent.get(counter).copied()
    }
}

/// Where a node can be asked: at its port for clients, or for nodes if it serves none.
fn address(node: &NodeEntry) -> String {
    let own = if node.role == Role::Sequencer { &node.listen } else { &node.clients };
    own.clone().unwrap_or_default()
}

impl Status {
    /// What the process of these agents, each with its node, says.
    pub(crate) fn of(config: &Config, agents: &[(u16, &Counters)], missing: Vec<String>) -> Status {
        let standby = |shard| config.shards.iter().any(|s| Some(s.id) == shard && s.standby);
        let node = |n: &NodeEntry| Node {
            id: n.id,
            role: n.role.to_string(),
            shard: n.shard,
            standby: standby(n.shard),
            address: address(n),
        };
        let mut here: BTreeMap<u16, Here> = BTreeMap::new();
        for (node, counters) in agents {
            let entry = config.node(*node);
            let data_dir = entry.and_then(|n| config.data_dir(n)).map(|path| path.display().to_string());
            let of_node = here.entry(*node).or_insert_with(|| Here { node: *node, data_dir, ..Here::default() });
            let name = |full: String| full[counters.agent().len() + 1..].to_owned();
            let values = counters.snapshot().into_iter().map(|(full, value)| (name(full), value));
            let values = values.filter(|(name, _)| !name.starts_with("rdma.") && !name.starts_with("shard-"));
            of_node.agents.insert(counters.agent().to_owned(), values.collect());
        }
        Status {
            cluster: config.cluster.name.clone(),
            ordering: config.cluster.ordering.name().into(),
            durability: config.cluster.durability.to_string(),
            nodes: config.nodes.iter().map(node).collect(),
            here: here.into_values().collect(),
            missing,
        }
    }

    /// The welcome that says all this.
    pub(crate) fn welcome(&self, incarnation: u64, access: Access) -> Result<Welcome, Refusal> {
        // Numbers, texts and lists of them always have a text.
        let payload = serde_json::to_vec(self).unwrap_or_default();
        if payload.len() > PAYLOAD_BYTES_MAX {
            let text = format!("{} bytes of status are more than fit: ask for /metrics instead", payload.len());
            return Err(Refusal::new(RefusalCode::Other, text));
        }
        Ok(Welcome {
            incarnation,
            ring_bytes: 0,
            record_bytes_max: 0,
            log_bytes: 0,
            access,
            path: Path::Tcp,
            path_reason: String::new(),
            payload,
        })
    }
}

/// Asks the node at an address how it is; all within `timeout`.
///
/// # Errors
/// One line: why there is no answer.
pub fn ask(address: &str, cluster: &str, secret: Option<&Secret>, timeout: Duration) -> Result<Status, String> {
    let hello = Hello {
        cluster: cluster.to_owned(),
        from: Endpoint::Observer,
        record_bytes_max: 0,
        ring_bytes: 0,
        log_bytes: 0,
        ability: Ability::tcp(),
        nonce: None,
    };
    let mut places = address
        .to_socket_addrs()
        .map_err(|error| format!("cannot look up {address}: {error}; an address is host:port"))?;
    let to = places.next().ok_or_else(|| format!("{address} has no address"))?;
    let (_, welcome) = dial(to, &hello, secret, timeout).map_err(|error| error.to_string())?;
    let mut status: Status =
        serde_json::from_slice(&welcome.payload).map_err(|e| format!("{address} sent no status: {e}"))?;
    // A node that listens on all its interfaces says so in its address; it is meant where we met it.
    for node in &mut status.nodes {
        if let Some(everywhere) = node.address.parse::<SocketAddr>().ok().filter(|a| a.ip().is_unspecified()) {
            node.address = SocketAddr::new(to.ip(), everywhere.port()).to_string();
        }
    }
    Ok(status)
}
