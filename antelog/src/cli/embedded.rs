//! Clusters that measurements start and end: how they share the machine with the client, and the client itself.

use std::time::{Duration, Instant};

use antelog::cluster::Cluster;
use antelog::{ClientOptions, DrivenSession, driven_session};
use antelog_core::client::session::AppendError;
use antelog_core::client::{Record, SessionHandler, Slot, SubscriptionId};
use antelog_core::config::Config;
use antelog_core::log::Retention;
use antelog_core::node::{Idle, LaunchMode, now_ns};
use antelog_profile::log::{Log, LogError};
use antelog_protocol::client::{Event, Scope};
use antelog_protocol::{Position, Refusal, ShardId};

use super::Stop;
use super::nodes::embedded_config;

/// Time for a fresh cluster to answer its first client.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// One client of one cluster, driven by the calling thread.
pub struct EmbeddedLog {
    session: DrivenSession,
}

impl EmbeddedLog {
    /// Connects to a cluster that was just started.
    pub fn connect(cluster: &Cluster) -> Result<EmbeddedLog, String> {
        let seeds = cluster.client_addresses().to_vec();
        let mut session = driven_session(&ClientOptions::new(seeds)).map_err(|e| e.to_string())?;
        let started = Instant::now();
        let mut connecting = Connecting::default();
        while session.map().is_none() {
            session.duty_cycle(now_ns(), &mut connecting);
            if started.elapsed() > CONNECT_TIME {
                let why = connecting.error.unwrap_or_else(|| "no answer".into());
                return Err(format!("the cluster did not come up: {why}"));
            }
            std::thread::yield_now();
        }
        Ok(EmbeddedLog { session })
    }
}

impl Log for EmbeddedLog {
    fn append(&mut self, shard: ShardId, record: &[u8]) -> Result<u64, LogError> {
        self.session.append(shard, record).map_err(|error| match error {
            AppendError::Full | AppendError::NotConnectedYet => LogError::Full,
            other => LogError::Failed(other.to_string()),
        })
    }

    fn subscribe(&mut self, scope: Scope, from: Position) -> SubscriptionId {
        self.session.subscribe(scope, from)
    }

    fn poll<H: SessionHandler>(&mut self, now_ns: u64, handler: &mut H) -> usize {
        self.session.duty_cycle(now_ns, handler)
    }
}

/// Waits for the first connection.
#[derive(Default)]
struct Connecting {
    error: Option<String>,
}

impl SessionHandler for Connecting {
    fn on_acknowledged(&mut self, _: ShardId, _: u64, _: Position) {}
    fn on_refused(&mut self, _: ShardId, _: u64, _: Refusal) {}
    fn on_event(&mut self, _: SubscriptionId, _: Event<Record>) {}
    fn on_trimmed(&mut self, _: SubscriptionId, _: Position) {}
    fn on_read(&mut self, _: u64, _: Position, _: Slot) {}
    fn on_tail(&mut self, _: u64, _: Position) {}
    fn on_connection(&mut self, address: &str, error: Option<&str>) {
        self.error = error.map(|e| format!("{address}: {e}"));
    }
}

/// How the cluster shares this machine with the client: decided by the number of cores.
pub struct Layout {
    /// How agents share threads.
    pub mode: LaunchMode,
    /// What threads do without work.
    pub idle: Idle,
    /// Core of the client's thread.
    pub client_core: Option<usize>,
}

/// The layout for `agents` agents on `cores` cores.
pub fn layout(cores: usize, agents: usize) -> Layout {
    if cores > agents {
        // A core for every agent and one for the client.
        Layout { mode: LaunchMode::Dedicated, idle: Idle::Spin, client_core: Some(agents) }
    } else if cores >= 2 {
        // The whole cluster spins on one core and the client on another: waking a parked thread costs far more than
        // a turn of the shared loop.
        Layout { mode: LaunchMode::Shared, idle: Idle::Spin, client_core: Some(1) }
    } else {
        Layout { mode: LaunchMode::Shared, idle: Idle::Yield, client_core: None }
    }
}

/// The configuration of a cluster to be measured; `set` overrides what is chosen here.
pub fn measured_config(name: &str, shards: u16, quota: u32, layout: &Layout, set: &[String]) -> Result<Config, Stop> {
    let mut config = embedded_config(shards, "127.0.0.1:0", quota);
    let c = &mut config.cluster;
    c.name = name.into();
    c.record_bytes_max = 8 << 10;
    c.client_ring_bytes = 1 << 20;
    c.region_bytes = 16 << 20;
    c.retention = Retention::Recycle;
    c.outstanding_max = 4096;
    c.clients_max = 16;
    (config.launch.mode, config.launch.idle) = (layout.mode, layout.idle);
    config.launch.prefault = true;
    Config::parse(&config.to_string(), set).map_err(|e| Stop::Failed(e.to_string()))
}
