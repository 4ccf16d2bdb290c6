//! The options that choose a network, the same for every command.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use antelog::network::{Network, NetworkOptions};
use antelog_core::config::Config;
use antelog_core::path::Wish;
use antelog_net_rdma::health::Health;
use clap::Args;

/// Which network data takes.
#[derive(Args, Clone, Debug, Default)]
pub struct TransportArgs {
    /// auto: RDMA where both sides can, TCP otherwise; rdma, tcp: nothing else [default: auto]
    #[arg(long, value_name = "WHICH", env = "ANTELOG_TRANSPORT")]
    pub transport: Option<Wish>,
    /// RDMA device, port and GID to use instead of those with this machine's address
    #[arg(long, value_name = "DEVICE[:PORT[:GID]]", env = "ANTELOG_RDMA_DEVICE")]
    pub rdma_device: Option<String>,
}

impl TransportArgs {
    /// Puts what was given above what the configuration says, for all nodes.
    pub fn apply(&self, config: &mut Config) {
        if let Some(wish) = self.transport {
            config.launch.transport = wish;
            config.nodes.iter_mut().for_each(|node| node.transport = None);
        }
        if let Some(device) = &self.rdma_device {
            config.launch.rdma_device = Some(device.clone());
            config.nodes.iter_mut().for_each(|node| node.rdma_device = None);
        }
    }

    /// What a client is to use.
    pub fn options(&self) -> NetworkOptions {
        let wish = self.transport.unwrap_or_default();
        NetworkOptions { wish, rdma_device: self.rdma_device.clone(), ..NetworkOptions::default() }
    }

    /// Whether anything was asked for: then it is said what came of it.
    pub fn is_given(&self) -> bool {
        self.transport.is_some() || self.rdma_device.is_some()
    }
}

/// What reports call the network of an embedded cluster with this configuration.
///
/// # Errors
/// RDMA is insisted on and cannot be used.
pub fn label(config: &Config) -> Result<String, String> {
    let options = config_options(config);
    let health = Health::new(Arc::new(|_: &str| {}));
    let network = Network::choose(&options, &[IpAddr::V4(Ipv4Addr::LOCALHOST)], health)?;
    Ok(match network.device() {
        Some(choice) => {
            format!("rdma ({} port {} GID {}, both ends on it)", choice.device, choice.port, choice.gid_index)
        }
        None => "tcp (io_uring, loopback)".into(),
    })
}

/// The network that a configuration asks for, where its nodes say nothing else.
pub fn config_options(config: &Config) -> NetworkOptions {
    NetworkOptions {
        wish: config.launch.transport,
        rdma_device: config.launch.rdma_device.clone(),
        rdma_ack_timeout: config.launch.rdma_ack_timeout,
    }
}
