//! Which networks this process can use, and the transports for them: the one place that knows both.
//!
//! Every connection begins with a hand-shake over TCP, in which both sides say what they wish and can
//! ([`Ability`]); pairs that agree on RDMA move their data to a queue pair, all others stay on TCP through io_uring.

use std::net::{IpAddr, ToSocketAddrs, UdpSocket};
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use antelog_core::counters::Counters;
use antelog_core::path::{Ability, Path, Wish};
use antelog_core::transport::SENDS_IN_FLIGHT_MAX;
use antelog_net_rdma::discover::{Choice, Discovery, Override, choose};
use antelog_net_rdma::health::Health;
use antelog_net_rdma::provider::Patience;
use antelog_net_rdma::verbs::{Device, Place, library};
use antelog_net_rdma::watch::Watch;
use antelog_net_rdma::{Link, Options, RdmaTransport};
use antelog_net_tcp::{TcpLink, TcpTransport};

/// The transport of every agent and session.
pub type NodeTransport = RdmaTransport<Device, TcpTransport>;

/// A connection for it.
pub type NodeLink = Link<TcpLink>;

/// What the peers of a transport bring: decides how many receives are posted for each, 8 KiB apiece, and how much is kept
/// for small operations to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// The order stream: many messages at a time.
    OrderStream,
    /// Reports, of which the newest supersedes.
    Reports,
    /// Rings: notifications only.
    Rings,
}

/// What an operator asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkOptions {
    /// RDMA, TCP, or RDMA where possible.
    pub wish: Wish,
    /// `DEVICE[:PORT[:GID]]`, when the choice is not left to us.
    pub rdma_device: Option<String>,
    /// A packet is sent again after 4.096 µs · 2^this, seven times.
    pub rdma_ack_timeout: u8,
}

impl Default for NetworkOptions {
    fn default() -> NetworkOptions {
        NetworkOptions { wish: Wish::Auto, rdma_device: None, rdma_ack_timeout: 14 }
    }
}

/// What a process, or one node of it, uses. Clones share what is known of the device's health.
#[derive(Clone, Debug)]
pub struct Network {
    wish: Wish,
    choice: Result<Choice, String>,
    health: Health,
    ack_timeout: u8,
    /// Sees when the device is removed.
    _watch: Option<Arc<Watch>>,
}

impl Network {
    /// Chooses for a node or client with these addresses.
    ///
    /// # Errors
    /// RDMA is insisted on and cannot be used, or what is prescribed does not exist: one line.
    pub fn choose(options: &NetworkOptions, addresses: &[IpAddr], health: Health) -> Result<Network, String> {
        let wanted = match &options.rdma_device {
            Some(text) => text.parse::<Override>()?,
            None => Override::default(),
        };
        let found = Discovery::read(FilePath::new("/sys"));
        let mut choice = choose(&found, options.wish, &wanted, addresses);
        if choice.is_ok()
            && let Err(why) = library()
        {
            choice = Err(why);
        }
        match choice {
            Err(why) if options.wish == Wish::Rdma || (options.rdma_device.is_some() && options.wish != Wish::Tcp) => {
                Err(format!("no RDMA: {why}; \"antelog doctor\" says more"))
            }
            choice => {
                let watch = choice.as_ref().ok().map(|choice| Arc::new(Watch::start(&choice.device, health.clone())));
                let ack_timeout = options.rdma_ack_timeout;
                Ok(Network { wish: options.wish, choice, health, ack_timeout, _watch: watch })
            }
        }
    }

    /// What a side that talks to `host` can do now.
    pub fn ability(&self, host: IpAddr) -> Ability {
        let usable = self.choice.as_ref().map(|_| ()).map_err(Clone::clone);
        let reason = self.health.disabled().or_else(|| self.health.avoided(host));
        Ability { wish: self.wish, rdma: usable.and_then(|()| reason.map_or(Ok(()), Err)) }
    }

    /// The device, port and GID in use, if RDMA is.
    pub fn device(&self) -> Option<&Choice> {
        self.choice.as_ref().ok()
    }

    /// One line: which network, and why.
    pub fn text(&self) -> String {
        match &self.choice {
            Ok(choice) => format!("rdma where the other side can: {}", choice.why),
            Err(why) => format!("tcp: {why}"),
        }
    }

    /// A connection between nodes: one on which nothing gets through is lost after the time that makes its peer suspected.
    pub fn node_link(carrier: TcpLink, path: Path, suspect_ms: u64) -> NodeLink {
        if let Err(error) = carrier.give_up_after(Duration::from_millis(suspect_ms)) {
            tracing::warn!("a connection to {} may hang when the network fails: {error}", carrier.peer());
        }
        Network::link(carrier, path)
    }

    /// A connection as the hand-shake decided.
    pub fn link(carrier: TcpLink, path: Path) -> NodeLink {
        let rdma = (path == Path::Rdma).then(|| carrier.peer().ip());
        Link { carrier, rdma }
    }

    /// A transport for so many peers on the calling thread.
    ///
    /// # Errors
    /// Why there is no TCP, or no RDMA where it is insisted on.
    pub fn transport(
        &self,
        peers: usize,
        traffic: Traffic,
        counters: Option<&Counters>,
    ) -> Result<NodeTransport, String> {
        let peers = u16::try_from(peers).map_err(|_| format!("{peers} peers are more than a transport takes"))?;
        let messages = (traffic == Traffic::Rings).then_some(16);
        let tcp = antelog_net_tcp::Options { messages, ..Default::default() };
        let carrier = TcpTransport::new(peers, tcp).map_err(|error| error.to_string())?;
        let options = Options {
            receives: if traffic == Traffic::OrderStream { SENDS_IN_FLIGHT_MAX } else { 64 },
            staging_bytes: if traffic == Traffic::Rings { 64 << 10 } else { 256 << 10 },
            patience: Patience { ack_timeout: self.ack_timeout, retries: 7 },
            ..Options::default()
        };
        let device = match &self.choice {
            Ok(choice) if !self.health.is_disabled() => {
                let place = Place { device: choice.device.clone(), port: choice.port, gid_index: choice.gid_index };
                match Device::open(&place, peers, options.completions(peers)) {
                    Ok(device) => Some(device),
                    Err(error) if self.wish == Wish::Rdma => return Err(error.text),
                    Err(error) => {
                        self.health.disable(&error.text);
                        None
                    }
                }
            }
            _ => None,
        };
        let is_rdma = device.is_some();
        let transport = RdmaTransport::new(carrier, device, peers, options, self.health.clone());
        Ok(match counters {
            Some(counters) if is_rdma => transport.with_counters(counters),
            _ => transport,
        })
    }

    /// Fails if RDMA is insisted on and has turned out to be of no use, as after memory could not be registered.
    ///
    /// # Errors
    /// What was found out: one line.
    pub fn check(&self) -> Result<(), String> {
        match self.health.disabled() {
            Some(why) if self.wish == Wish::Rdma => Err(format!("no RDMA: {why}")),
            _ => Ok(()),
        }
    }
}

/// The addresses from which this machine would call these `host:port`s.
pub fn own_addresses(addresses: &[String]) -> Vec<IpAddr> {
    let mut own = Vec::new();
    for address in addresses.iter().filter_map(|address| address.to_socket_addrs().ok()).flatten() {
        let any: (IpAddr, u16) = if address.is_ipv4() {
            (std::net::Ipv4Addr::UNSPECIFIED.into(), 0)
        } else {
            (std::net::Ipv6Addr::UNSPECIFIED.into(), 0)
        };
        // Connecting a datagram socket sends nothing: the kernel only looks up the route.
        let found = UdpSocket::bind(any).and_then(|socket| {
            socket.connect(address)?;
            socket.local_addr()
        });
        own.extend(found.ok().map(|address| address.ip()));
    }
    own
}
