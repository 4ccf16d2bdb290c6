//! `profile bench`: what a cluster moves, what one record costs beside the bare network, and what idling costs.

use std::path::PathBuf;

use antelog::cluster::{Cluster, Nodes};
use antelog_core::config::Config;
use antelog_core::node::launch::cores;
use antelog_core::node::{Idle, LaunchMode};
use antelog_profile::bench::{self, BenchConfig, IdleCounts, Rig};
use antelog_profile::floor;
use antelog_profile::log::RealClock;
use antelog_protocol::{Ordering, ShardId};
use clap::Args;

use super::embedded::{EmbeddedLog, Layout, labels, measured_config};
use super::transport::TransportArgs;
use super::{Outcome, Stop, output};

#[derive(Args)]
pub struct BenchArgs {
    /// Records under way: sent, and not yet both delivered and acknowledged. 1 is compared with the bare network
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_value = "1,32,128")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=4096))]
    window: Vec<u64>,
    /// Orderings, like fixed,free-event
    #[arg(long, value_name = "MODE[,MODE…]", value_delimiter = ',', default_value = "fixed")]
    ordering: Vec<String>,
    /// Seconds of each measurement
    #[arg(long, value_name = "N", default_value_t = 1.0)]
    seconds: f64,
    /// Repetitions of everything
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Bytes per record
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(24..=8192))]
    record_bytes: u32,
    /// Shards, each a primary and a backup
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=16))]
    shards: u16,
    /// Slots that each shard contributes to a cut
    #[arg(long, value_name = "N", default_value_t = 10)]
    quota: u32,
    /// One subscription of all shards merged in position order, instead of one for each shard
    #[arg(long)]
    merged: bool,
    /// Leave out the bare network
    #[arg(long)]
    no_floor: bool,
    /// Leave out the idle cluster
    #[arg(long)]
    no_idle: bool,
    #[command(flatten)]
    transport: TransportArgs,
    /// Also write the result as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Change a key of [cluster] or [launch], like cluster.tick_us=500
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Starts clusters, and connects to those that are loaded.
struct BenchRig {
    config: Config,
    cluster: Option<Cluster>,
}

impl BenchRig {
    fn start(&mut self, config: Config) -> Result<&Cluster, String> {
        let cluster = Cluster::start(config, Nodes::All)?;
        Ok(self.cluster.insert(cluster))
    }

    fn end(&mut self) -> Result<(), String> {
        self.cluster.take().and_then(Cluster::stop).map_or(Ok(()), Err)
    }
}

impl Rig for BenchRig {
    type Log = EmbeddedLog;

    fn start(&mut self, mode: Ordering) -> Result<EmbeddedLog, String> {
        let mut config = self.config.clone();
        config.cluster.ordering = mode;
        EmbeddedLog::connect(self.start(config)?)
    }

    fn stop(&mut self, log: EmbeddedLog) -> Result<(), String> {
        drop(log);
        self.end()
    }

    fn start_idle(&mut self) -> Result<(), String> {
        let mut config = self.config.clone();
        (config.launch.mode, config.launch.idle) = (LaunchMode::Shared, Idle::Park);
        self.start(config).map(drop)
    }

    fn counted(&mut self) -> IdleCounts {
        self.cluster.as_ref().map_or_else(IdleCounts::default, |cluster| IdleCounts {
            cuts: cluster.counter("sequencer", "cuts"),
            slots: cluster.counter("shard", "records") + cluster.counter("shard", "no_ops"),
            reports: cluster.counter("sequencer", "reports"),
        })
    }

    fn stop_idle(&mut self) -> Result<(), String> {
        self.end()
    }
}

/// Runs `profile bench`.
pub fn run(args: &BenchArgs) -> Outcome {
    if !(args.seconds > 0.0 && args.seconds <= 3600.0) {
        return Err(Stop::Failed(format!("--seconds {}: expected more than 0", args.seconds)));
    }
    let mode = |name: &String| Ordering::from_name(name).ok_or_else(|| format!("--ordering {name}: no such ordering"));
    let modes = args.ordering.iter().map(mode).collect::<Result<Vec<_>, _>>()?;
    output::check_writable(args.json.as_deref())?;
    let layout = Layout::of(args.shards);
    let config = measured_config("bench", args.shards, args.quota, &layout, &args.transport, &args.set)?;
    let bench = BenchConfig {
        modes,
        shards: (0..args.shards).map(ShardId).collect(),
        record_bytes: args.record_bytes as usize,
        windows: args.window.clone(),
        merged: args.merged,
        repetitions: args.repetitions,
        measure_ns: (args.seconds * 1e9) as u64,
        floor_cores: if args.no_floor { Vec::new() } else { floor::available_cores() },
        idle: !args.no_idle,
        labels: labels(&config)?,
    };
    let mut rig = BenchRig { config, cluster: None };
    // The client's thread is pinned beside the cluster's; this one keeps its freedom for what comes after.
    let client = std::thread::Builder::new().name("antelog-bench".into()).spawn(move || {
        if let Some(core) = layout.client_core {
            core_affinity::set_for_current(cores()[core]);
        }
        bench::run(&mut rig, &RealClock, &bench)
    });
    let client = client.map_err(|e| format!("cannot start a thread: {e}"))?;
    let result = client.join().map_err(|_| "the bench's thread panicked: this is a bug, see above".to_owned())??;
    output::print(result.table().trim_end())?;
    if let Some(path) = &args.json {
        output::write_file(path, &format!("{}\n", result.json()))?;
    }
    Ok(())
}
