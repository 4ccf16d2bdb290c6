//! The networks of the nodes that run here, each chosen from its configuration and addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use antelog_core::config::{Config, NodeEntry, Role, resolve};
use antelog_net_rdma::health::Health;

use crate::network::{Network, NetworkOptions};

/// See the module's text.
pub(super) struct Networks {
    nodes: BTreeMap<u16, Network>,
    gate: Option<u16>,
}

impl Networks {
    /// Chooses for every local node.
    ///
    /// # Errors
    /// A node insists on RDMA and cannot have it, or names a device that does not exist.
    pub(super) fn choose(config: &Config, local: &BTreeSet<u16>) -> Result<Networks, String> {
        let mut nodes = BTreeMap::new();
        let health = Health::new(Arc::new(|line: &str| tracing::warn!("{line}")));
        for node in config.nodes.iter().filter(|node| local.contains(&node.id)) {
            let options = NetworkOptions {
                wish: node.transport.unwrap_or(config.launch.transport),
                rdma_device: node.rdma_device.clone().or_else(|| config.launch.rdma_device.clone()),
                rdma_ack_timeout: config.launch.rdma_ack_timeout,
            };
            let network = Network::choose(&options, &addresses(node)?, health.clone())
                .map_err(|error| format!("node {}: {error}", node.id))?;
            nodes.insert(node.id, network);
        }
        let here = |node: &&NodeEntry| node.role != Role::Sequencer && local.contains(&node.id);
        let gate = config.nodes.iter().filter(here).min_by_key(|node| node.role != Role::Primary);
        Ok(Networks { nodes, gate: gate.map(|node| node.id) })
    }

    /// The network of a local node.
    pub(super) fn of(&self, node: &NodeEntry) -> Network {
        self.nodes[&node.id].clone()
    }

    /// The network of the gate: that of the first primary here, or of the first replica.
    pub(super) fn of_gate(&self) -> Network {
        self.nodes[&self.gate.expect("a gate belongs to a replica")].clone()
    }

    /// What is used, and why: a line.
    pub(super) fn text(&self) -> String {
        let mut texts: Vec<String> = self.nodes.values().map(Network::text).collect();
        texts.dedup();
        texts.join("; ")
    }
}

/// Where a node can be reached: that is where its device has to be.
fn addresses(node: &NodeEntry) -> Result<Vec<IpAddr>, String> {
    let named = [&node.listen, &node.clients].into_iter().flatten();
    named.map(|address| resolve(address).map(|address| address.ip())).collect()
}
