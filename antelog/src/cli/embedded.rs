//! Embedded clusters for measurements, and one client of each: what `demo` and `profile grid` have in common.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering as Atomic};
use std::time::{Duration, Instant};

use antelog::cluster::{Cluster, Nodes};
use antelog::{ClientOptions, DrivenSession, Error, driven_session};
use antelog_core::client::session::AppendError;
use antelog_core::client::{Record, SessionHandler, Slot, SubscriptionId};
use antelog_core::config::Config;
use antelog_core::log::Retention;
use antelog_core::node::launch::cores;
use antelog_core::node::{Idle, LaunchMode, now_ns};
use antelog_profile::counted::Counted;
use antelog_profile::demo::{Bench, Labels};
use antelog_profile::log::{Host, Log, LogError};
use antelog_protocol::client::{Event, Scope};
use antelog_protocol::{Ordering, Position, Refusal, ShardId};

use super::Stop;
use super::nodes::embedded_config;
use super::processes::Processes;
use super::transport::{self, TransportArgs, config_options};

/// Time for a fresh cluster to answer its first client; emulated machines need more than a moment for it.
const CONNECT_TIME: Duration = Duration::from_secs(30);
/// Bytes of a record in every measurement.
pub const RECORD_BYTES: usize = 4096;

/// Starts clusters and connects to them.
pub struct EmbeddedBench {
    config: Config,
    /// A process for each node instead of threads in this one.
    processes: bool,
    has_said: bool,
    /// Yield the core when there is nothing to do, because others need it.
    yields: bool,
    interrupted: Arc<AtomicBool>,
    cluster: Option<Started>,
}

/// A cluster at work.
enum Started {
    Here(Box<Cluster>),
    Processes(Processes),
}

impl EmbeddedBench {
    /// A bench for clusters of this configuration, laid out like this; a run ends when `interrupted` becomes true.
    pub fn new(config: Config, layout: &Layout, interrupted: Arc<AtomicBool>) -> EmbeddedBench {
        let yields = layout.client_core.is_none();
        EmbeddedBench { config, processes: false, has_said: false, yields, interrupted, cluster: None }
    }

    /// Runs each node in a process of its own.
    #[must_use]
    pub fn in_processes(mut self) -> EmbeddedBench {
        self.processes = true;
        self.yields = true;
        self
    }
}

/// One client of one cluster.
pub struct EmbeddedLog {
    session: DrivenSession,
}

impl EmbeddedLog {
    /// Connects to a cluster that was just started.
    pub fn connect(cluster: &Cluster) -> Result<EmbeddedLog, String> {
        EmbeddedLog::connect_to(cluster.client_addresses(), cluster.config())
    }

    fn connect_to(gates: &[String], config: &Config) -> Result<EmbeddedLog, String> {
        let mut options = ClientOptions::new(gates.to_vec());
        options.network = config_options(config);
        let started = Instant::now();
        let mut session = loop {
            match driven_session(&options) {
                Ok(session) => break session,
                // Processes take a moment to listen.
                Err(Error::Connect { .. }) if started.elapsed() < CONNECT_TIME => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) => return Err(error.to_string()),
            }
        };
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
    fn on_unknown(&mut self, _: ShardId, _: u64) {}
    fn on_event(&mut self, _: SubscriptionId, _: Event<Record>) {}
    fn on_trimmed(&mut self, _: SubscriptionId, _: Position) {}
    fn on_read(&mut self, _: u64, _: Position, _: Slot) {}
    fn on_tail(&mut self, _: u64, _: Position) {}
    fn on_connection(&mut self, address: &str, error: Option<&str>) {
        self.error = error.map(|e| format!("{address}: {e}"));
    }
}

impl Host for EmbeddedBench {
    fn idle(&mut self, work: usize, _until_ns: u64) {
        match (work, self.yields) {
            (0, true) => std::thread::yield_now(),
            (0, false) => std::hint::spin_loop(),
            _ => {}
        }
    }

    fn counted(&mut self) -> Counted {
        let counters = match &self.cluster {
            None => Vec::new(),
            Some(Started::Here(cluster)) => cluster.counters(),
            Some(Started::Processes(processes)) => processes.counters(),
        };
        counters.into_iter().filter(|(name, _)| name.starts_with("shard-") || name.starts_with("sequencer")).collect()
    }

    fn interrupted(&self) -> bool {
        self.interrupted.load(Atomic::Relaxed)
    }
}

impl Bench for EmbeddedBench {
    type Log = EmbeddedLog;

    fn start(&mut self, mode: Ordering, repetition: u32) -> Result<EmbeddedLog, String> {
        let mut config = self.config.clone();
        for shard in &mut config.shards {
            shard.tick_phase_us = Some(tick_phase_us(config.cluster.tick_us, shard.id, repetition));
        }
        config.cluster.ordering = mode;
        if self.processes {
            let processes = Processes::start(config.clone())?;
            let connected = EmbeddedLog::connect_to(processes.clients(), &config);
            let Started::Processes(processes) = self.cluster.insert(Started::Processes(processes)) else {
                unreachable!("it was just put there")
            };
            return connected.map_err(|error| processes.failure().unwrap_or(error));
        }
        let cluster = Cluster::start(config, Nodes::All)?;
        let connected = EmbeddedLog::connect(&cluster);
        self.cluster = Some(Started::Here(Box::new(cluster)));
        connected
    }

    fn stop(&mut self, log: EmbeddedLog) -> Result<(), String> {
        drop(log);
        match self.cluster.take() {
            Some(Started::Here(cluster)) => cluster.stop().map_or(Ok(()), Err),
            Some(Started::Processes(mut processes)) => {
                if !std::mem::replace(&mut self.has_said, true) {
                    // Which network each pair of nodes took, and why: the same in every repetition.
                    processes.said().iter().for_each(|line| eprintln!("antelog: {line}"));
                }
                processes.failure().map_or(Ok(()), Err)
            }
            None => Ok(()),
        }
    }
}

/// When a shard's free ticks fall in a repetition. How long a free record waits depends on how far apart the shards' ticks
/// are; steps of the golden ratio spread the repetitions evenly over all distances, where drawing them would leave
/// the result to luck.
fn tick_phase_us(tick_us: u64, shard: u16, repetition: u32) -> u64 {
    let step = f64::from(shard) * f64::from(repetition) * 0.618_033_988_75;
    (step.fract() * tick_us as f64) as u64
}

/// How the cluster shares this machine with the client: decided by the number of cores.
#[derive(Clone, Copy)]
pub struct Layout {
    /// How agents are spread over threads.
    pub mode: LaunchMode,
    /// What threads do without work.
    pub idle: Idle,
    /// Core of the client's thread.
    pub client_core: Option<usize>,
}

impl Layout {
    /// For clusters of so many shards, each a primary and a backup, beside a gate and a sequencer.
    pub fn of(shards: u16) -> Layout {
        layout(cores().len(), 2 + 2 * usize::from(shards))
    }
}

fn layout(cores: usize, agents: usize) -> Layout {
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

/// The configuration of a cluster for measurements at so many records/s and shard.
pub fn config(
    shards: u16,
    rate_per_s: f64,
    layout: &Layout,
    transport: &TransportArgs,
    set: &[String],
) -> Result<Config, String> {
    let quota = (rate_per_s * 0.001).round().max(1.0) as u32;
    measured_config("demo", shards, quota, layout, transport, set)
}

/// The configuration of a cluster to be measured; `set` overrides what is chosen here.
pub fn measured_config(
    name: &str,
    shards: u16,
    quota: u32,
    layout: &Layout,
    transport: &TransportArgs,
    set: &[String],
) -> Result<Config, String> {
    let mut config = embedded_config(shards, "127.0.0.1:0", quota);
    let c = &mut config.cluster;
    c.name = name.into();
    c.record_bytes_max = 2 * RECORD_BYTES as u32;
    c.client_ring_bytes = 1 << 20;
    c.region_bytes = 16 << 20;
    c.retention = Retention::Recycle;
    c.outstanding_max = 4096;
    c.clients_max = 16;
    (config.launch.mode, config.launch.idle) = (layout.mode, layout.idle);
    config.launch.prefault = true;
    let mut config = Config::parse(&config.to_string(), set).map_err(|e| e.to_string())?;
    transport.apply(&mut config);
    Ok(config)
}

/// What reports say about such a cluster.
///
/// # Errors
/// RDMA is insisted on and cannot be used.
pub fn labels(config: &Config) -> Result<Labels, String> {
    Ok(Labels {
        transport: transport::label(config)?,
        durability: "replicated".into(),
        launch: format!("{} + {}", config.launch.mode, config.launch.idle),
        cores: cores().len(),
    })
}

/// A rate given on the command line.
pub fn check_rate(rate: f64) -> Result<(), Stop> {
    match rate > 0.0 && rate <= 10_000_000.0 {
        true => Ok(()),
        false => Err(Stop::Failed(format!("--rate {rate}: expected records per second and shard"))),
    }
}

/// A seed that nobody has chosen.
pub fn random_seed() -> Result<u64, Stop> {
    let mut seed = [0; 8];
    getrandom::fill(&mut seed).map_err(|e| format!("the operating system gives no random numbers: {e}"))?;
    Ok(u64::from_le_bytes(seed))
}

/// Runs a measurement on a thread that is pinned beside the cluster's; the caller's keeps its freedom for what comes after.
pub fn on_client_core<R: Send + 'static>(
    layout: &Layout,
    measure: impl FnOnce() -> R + Send + 'static,
) -> Result<R, Stop> {
    let core = layout.client_core;
    let client = std::thread::Builder::new().name("antelog-client".into()).spawn(move || {
        if let Some(core) = core {
            core_affinity::set_for_current(cores()[core]);
        }
        measure()
    });
    let client = client.map_err(|e| format!("cannot start a thread: {e}"))?;
    client.join().map_err(|_| Stop::Failed("the measuring thread panicked: this is a bug, see above".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::tick_phase_us;

    #[test]
    fn phases_cover_the_tick_evenly() {
        assert_eq!(tick_phase_us(1000, 0, 7), 0);
        assert_eq!([1, 2, 3].map(|r| tick_phase_us(1000, 1, r)), [618, 236, 854]);
        let mut phases: Vec<u64> = (1..=15).map(|r| tick_phase_us(1000, 1, r)).collect();
        phases.sort_unstable();
        assert!(phases.windows(2).all(|w| w[1] - w[0] < 150), "{phases:?}");
        assert!((450..=550).contains(&phases[7]), "the middle one is in the middle: {phases:?}");
    }
}
