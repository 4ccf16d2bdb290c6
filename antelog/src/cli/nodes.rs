//! `dev`, `node` and `config`: running nodes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use antelog::cluster::{Cluster, Nodes};
use antelog::watch::{Port, Watch};
use antelog_core::access::Keyring;
use antelog_core::config::{self, Config, NodeEntry, PolicyConfig, Role, ShardEntry};
use clap::{Args, Subcommand};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::log::LogArgs;
use super::transport::TransportArgs;
use super::{DEFAULT_ADDRESS, Outcome, Stop, output};

/// How often a running node looks whether it should end.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Counters are written once in so many looks.
const LOOKS_PER_WRITE: u64 = 4;

#[derive(Args)]
pub struct DevArgs {
    /// Where clients connect
    #[arg(long, value_name = "ADDR", default_value = DEFAULT_ADDRESS)]
    listen: String,
    /// Shards, each a primary and a backup
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    shards: u16,
    /// Shards more that stand by: `antelog shard add` lets them take part
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=64))]
    standby: u16,
    /// Sequencers: with 3 or 5 of them the log goes on when one or two end
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = one_three_or_five)]
    sequencers: u16,
    #[command(flatten)]
    transport: TransportArgs,
    #[command(flatten)]
    watch: WatchArgs,
    /// Change a key of [cluster] or [launch], like cluster.tick_us=500
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

#[derive(Args)]
pub struct NodeArgs {
    /// The cluster's configuration file
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The number of the node to run
    #[arg(long, value_name = "N")]
    id: u16,
    #[command(flatten)]
    transport: TransportArgs,
    #[command(flatten)]
    watch: WatchArgs,
    /// Change a key of [cluster] or [launch], like launch.idle=spin
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// How a running node is watched.
#[derive(Args)]
struct WatchArgs {
    /// Write all counters to this file, every fifth of a second
    #[arg(long, value_name = "FILE")]
    counters: Option<PathBuf>,
    /// Serve /metrics, /health and /ready over HTTP, for whoever reaches the address
    #[arg(long, value_name = "ADDR")]
    metrics: Option<String>,
    #[command(flatten)]
    log: LogArgs,
}

impl WatchArgs {
    /// Prepares to be watched: puts the address into the configuration and binds it, checks the file, takes the events.
    fn prepare(&self, config: &mut Config) -> Result<Option<Port>, Stop> {
        if self.metrics.is_some() {
            config.launch.metrics.clone_from(&self.metrics);
            config.validate().map_err(|e| e.to_string())?;
        }
        output::check_writable(self.counters.as_deref())?;
        self.log.start()?;
        let address = config.launch.metrics.as_deref().map(config::resolve).transpose()?;
        Ok(address.map(Port::bind).transpose()?)
    }
}

/// Serves what there is to be seen of a cluster.
fn serve(port: Option<Port>, cluster: &Cluster) -> Result<Option<Watch>, Stop> {
    let Some(port) = port else { return Ok(None) };
    let watch = port.serve(cluster.observed().clone())?;
    output::print(&format!("# metrics, health and readiness at http://{}", watch.local_addr()))?;
    Ok(Some(watch))
}

#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Check a configuration file and print it in full, with defaults
    Check {
        /// The file
        file: PathBuf,
        /// Change a key of [cluster] or [launch] before checking
        #[arg(long = "set", value_name = "KEY=VALUE")]
        set: Vec<String>,
    },
}

/// An embedded cluster: every shard a primary and a backup, one sequencer, all on loopback.
pub fn embedded_config(shards: u16, clients: &str, quota: u32) -> Config {
    let mut config = Config {
        policy: PolicyConfig::default(),
        cluster: Default::default(),
        launch: Default::default(),
        access: vec![],
        shards: (0..shards)
            .map(|id| ShardEntry { id, quota, standby: false, tick_phase_us: None, report_delay_us: 0 })
            .collect(),
        nodes: vec![NodeEntry {
            id: 0,
            role: Role::Sequencer,
            shard: None,
            listen: Some("127.0.0.1:0".into()),
            clients: None,
            data_dir: None,
            transport: None,
            rdma_device: None,
        }],
    };
    for shard in 0..shards {
        let node = |id, role| NodeEntry {
            id,
            role,
            shard: Some(shard),
            listen: None,
            clients: None,
            data_dir: None,
            transport: None,
            rdma_device: None,
        };
        let clients = Some(clients.to_owned());
        config.nodes.push(NodeEntry { clients: clients.clone(), ..node(1 + 2 * shard, Role::Primary) });
        let listen = Some("127.0.0.1:0".to_owned());
        config.nodes.push(NodeEntry { listen, clients, ..node(2 + 2 * shard, Role::Backup) });
    }
    config
}

/// The number of sequencers on a command line.
pub fn one_three_or_five(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(count @ (1 | 3 | 5)) => Ok(count),
        _ => Err("a cluster has 1, 3 or 5 sequencers".into()),
    }
}

/// Adds sequencers to an embedded cluster that has one: the log goes on while most of them run.
fn add_sequencers(config: &mut Config, sequencers: u16) {
    let first = config.nodes.iter().map(|n| n.id).max().unwrap_or(0) + 1;
    let Some(one) = config.nodes.iter().find(|n| n.role == Role::Sequencer).cloned() else { return };
    config.nodes.extend((1..sequencers).map(|more| NodeEntry { id: first + more - 1, ..one.clone() }));
}

/// Overrides from the environment, then from flags.
fn overrides(flags: &[String]) -> Vec<String> {
    let mut all = Config::environment(std::env::vars());
    all.extend(flags.iter().cloned());
    all
}

/// Runs an embedded cluster until a signal.
pub fn dev(args: &DevArgs) -> Outcome {
    let mut config = embedded_config(args.shards + args.standby, &args.listen, 10);
    config.cluster.name = "dev".into();
    add_sequencers(&mut config, args.sequencers);
    config.shards.iter_mut().skip(args.shards.into()).for_each(|shard| shard.standby = true);
    let mut config = Config::parse(&config.to_string(), &overrides(&args.set)).map_err(|e| e.to_string())?;
    args.transport.apply(&mut config);
    let port = args.watch.prepare(&mut config)?;
    let mut signals = catch_signals()?;
    let cluster = Cluster::start(config, Nodes::All)?;
    let config = cluster.config();
    let addresses = cluster.client_addresses().join(", ");
    output::print(&format!(
        "antelog dev: {}{} shards × (primary + backup) and {}, {} ordering, {}\n\
         each replica keeps {} MiB in memory; nothing is written to disk\n\
         network: {}\n\
         clients connect to {addresses}; Ctrl-C ends it",
        args.shards,
        if args.standby > 0 { format!(" + {} standby", args.standby) } else { String::new() },
        if args.sequencers == 1 { "a sequencer".into() } else { format!("{} sequencers", args.sequencers) },
        config.cluster.ordering.name(),
        cluster.launch_text(),
        config.cluster.region_bytes >> 20,
        cluster.network_text(),
    ))?;
    let watch = serve(port, &cluster)?;
    args.watch.log.end(wait(cluster, &mut signals, args.watch.counters.as_deref(), watch))
}

/// Runs one node until a signal.
pub fn node(args: &NodeArgs) -> Outcome {
    let mut config = load(&args.config, &args.set)?;
    args.transport.apply(&mut config);
    let port = args.watch.prepare(&mut config)?;
    let mut signals = catch_signals()?;
    output::print(&format!("{config}"))?;
    let cluster = Cluster::start(config, Nodes::One(args.id)).map_err(|e| format!("node {}: {e}", args.id))?;
    let entry = cluster.config().node(args.id).cloned();
    let role = entry.as_ref().map(|n| n.role.to_string()).unwrap_or_default();
    let serving = match cluster.client_addresses() {
        [] => String::new(),
        addresses => format!(", clients connect to {}", addresses.join(", ")),
    };
    output::print(&format!("# node {} ({role}) is up, {}{serving}", args.id, cluster.launch_text()))?;
    output::print(&format!("# network: {}", cluster.network_text()))?;
    let watch = serve(port, &cluster)?;
    args.watch.log.end(wait(cluster, &mut signals, args.watch.counters.as_deref(), watch))
}

fn load(path: &Path, set: &[String]) -> Result<Config, Stop> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    Config::parse(&text, &overrides(set)).map_err(|e| Stop::Failed(format!("{}: {e}", path.display())))
}

/// `config check`.
pub fn config(command: &ConfigCommand) -> Outcome {
    let ConfigCommand::Check { file, set } = command;
    let config = load(file, set)?;
    Keyring::load(&config, true)?;
    output::print(config.to_string().trim_end())
}

/// The signals that end a node.
struct Ending {
    signals: Signals,
    /// From now on a signal ends the process at once.
    at_once: Arc<AtomicBool>,
}

/// Exit code of a process that was told twice to end.
const AT_ONCE: i32 = 130;

fn catch_signals() -> Result<Ending, Stop> {
    let failed = |e: std::io::Error| Stop::Failed(format!("cannot catch signals: {e}"));
    let at_once = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, AT_ONCE, at_once.clone()).map_err(failed)?;
    }
    Ok(Ending { signals: Signals::new([SIGINT, SIGTERM]).map_err(failed)?, at_once })
}

fn wait(cluster: Cluster, ending: &mut Ending, counters: Option<&Path>, watch: Option<Watch>) -> Outcome {
    let mut looks = 0u64;
    while ending.signals.pending().next().is_none() {
        if let Some(file) = counters.filter(|_| looks.is_multiple_of(LOOKS_PER_WRITE)) {
            write_counters(&cluster, file)?;
        }
        looks += 1;
        if let Some(failure) = cluster.failure() {
            cluster.observed().fail(&failure);
            cluster.stop();
            return Err(Stop::Failed(failure));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    ending.at_once.store(true, Ordering::SeqCst);
    cluster.observed().close();
    if let Some(file) = counters {
        write_counters(&cluster, file)?;
    }
    let failure = cluster.close();
    // Answers to the last.
    drop(watch);
    failure.map_or(Ok(()), |failure| Err(Stop::Failed(failure)))
}

/// Replaces the file as a whole: readers never see half of it.
fn write_counters(cluster: &Cluster, file: &Path) -> Outcome {
    let text: String = cluster.counters().iter().map(|(name, value)| format!("{name} {value}\n")).collect();
    let mut fresh = file.as_os_str().to_owned();
    fresh.push(".new");
    let written = std::fs::write(&fresh, text).and_then(|()| std::fs::rename(&fresh, file));
    written.map_err(|e| Stop::Failed(format!("cannot write {}: {e}", file.display())))
}
