//! `demo`: fixed ordering with speculation beside free ordering, on fresh embedded clusters, with a real client.

use std::path::PathBuf;

use antelog::cluster::{Cluster, Nodes};
use antelog_core::config::Config;
use antelog_core::node::launch::cores;
use antelog_profile::consumer::{Compute, ConsumerConfig};
use antelog_profile::demo::{self, Bench, DemoConfig, Labels, report};
use antelog_profile::load::{Arrivals, LoadConfig};
use antelog_profile::log::{Counted, Host, RealClock};
use antelog_protocol::{Ordering, ShardId};
use clap::Args;

use super::embedded::{EmbeddedLog, Layout, layout, measured_config};
use super::{Outcome, Stop, output};

#[derive(Args)]
pub struct DemoArgs {
    /// Seconds of load, all modes and repetitions together
    #[arg(long, value_name = "N", default_value_t = 20.0)]
    seconds: f64,
    /// Also write the result as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Repetitions of each mode
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Records of 4 KiB per second and shard
    #[arg(long, value_name = "N", default_value_t = 10_000.0)]
    rate: f64,
    /// Milliseconds of compute per batch
    #[arg(long, value_name = "MS", default_value_t = 1.5)]
    compute_ms: f64,
    /// Batches each consumer computes at a time: 1 is a serial consumer
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    workers: u16,
    /// One consumer of all shards merged in position order, instead of one for each shard
    #[arg(long)]
    merged: bool,
    /// Shards, each a primary and a backup
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=16))]
    shards: u16,
    /// Poisson arrivals instead of regular ones
    #[arg(long)]
    poisson: bool,
    /// Change a key of [cluster] or [launch], like cluster.tick_us=500
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Starts clusters and connects to them.
struct DemoBench {
    config: Config,
    /// Yield the core when there is nothing to do, because others need it.
    yields: bool,
    cluster: Option<Cluster>,
}

impl Host for DemoBench {
    fn idle(&mut self, work: usize, _until_ns: u64) {
        match (work, self.yields) {
            (0, true) => std::thread::yield_now(),
            (0, false) => std::hint::spin_loop(),
            _ => {}
        }
    }

    fn counted(&mut self) -> Counted {
        self.cluster.as_ref().map_or_else(Counted::default, |cluster| Counted {
            record_slots: cluster.counter("shard", "records"),
            no_op_slots: cluster.counter("shard", "no_ops"),
        })
    }
}

impl Bench for DemoBench {
    type Log = EmbeddedLog;

    fn start(&mut self, mode: Ordering, repetition: u32) -> Result<EmbeddedLog, String> {
        let mut config = self.config.clone();
        for shard in &mut config.shards {
            shard.tick_phase_us = Some(tick_phase_us(config.cluster.tick_us, shard.id, repetition));
        }
        config.cluster.ordering = mode;
        let cluster = Cluster::start(config, Nodes::All, std::sync::Arc::new(|_: &str| {}))?;
        EmbeddedLog::connect(self.cluster.insert(cluster))
    }

    fn stop(&mut self, log: EmbeddedLog) -> Result<(), String> {
        drop(log);
        self.cluster.take().and_then(Cluster::stop).map_or(Ok(()), Err)
    }
}

/// When a shard's free ticks fall in a repetition. How long a free record waits depends on how far apart the shards' ticks
/// are; steps of the golden ratio spread the repetitions evenly over all distances, where drawing them would leave
/// the result to luck.
fn tick_phase_us(tick_us: u64, shard: u16, repetition: u32) -> u64 {
    let step = f64::from(shard) * f64::from(repetition) * 0.618_033_988_75;
    (step.fract() * tick_us as f64) as u64
}

fn demo_config(args: &DemoArgs, layout: &Layout) -> Result<Config, Stop> {
    let quota = (args.rate * 0.001).round().max(1.0) as u32;
    measured_config("demo", args.shards, quota, layout, &args.set)
}

/// Runs `demo`.
pub fn run(args: &DemoArgs) -> Outcome {
    output::check_writable(args.json.as_deref())?;
    let available = cores().len();
    let layout = layout(available, 2 + 2 * usize::from(args.shards));
    let config = demo_config(args, &layout)?;
    if !(args.rate > 0.0 && args.rate <= 10_000_000.0) {
        return Err(Stop::Failed(format!("--rate {}: expected records per second and shard", args.rate)));
    }
    if !(args.compute_ms >= 0.0 && args.compute_ms <= 10_000.0) {
        return Err(Stop::Failed(format!("--compute-ms {}: expected milliseconds up to 10000", args.compute_ms)));
    }
    let mut seed = [0; 8];
    getrandom::fill(&mut seed).map_err(|e| format!("the operating system gives no random numbers: {e}"))?;
    let demo = DemoConfig {
        modes: vec![Ordering::FreeTick, Ordering::FreeEvent, Ordering::Fixed],
        repetitions: args.repetitions,
        seconds: args.seconds,
        warm_up_ns: 200_000_000,
        drain_ns: 5_000_000_000,
        load: LoadConfig {
            shards: (0..args.shards).map(ShardId).collect(),
            rate_per_s: args.rate,
            record_bytes: 4096,
            arrivals: if args.poisson { Arrivals::Poisson } else { Arrivals::Regular },
            seed: u64::from_le_bytes(seed),
        },
        consumer: ConsumerConfig {
            compute_ns: (args.compute_ms * 1e6) as u64,
            workers: args.workers.into(),
            kind: Compute::Timed,
        },
        merged: args.merged,
        seed: u64::from_le_bytes(seed),
        quiet: false,
        labels: Labels {
            transport: "tcp (io_uring, loopback)".into(),
            durability: "replicated".into(),
            launch: format!("{} + {}", config.launch.mode, config.launch.idle),
            cores: available,
        },
    };
    let yields = layout.client_core.is_none();
    let mut bench = DemoBench { config, yields, cluster: None };
    // The client's thread is pinned beside the cluster's; this one keeps its freedom for what comes after.
    let client = std::thread::Builder::new().name("antelog-demo".into()).spawn(move || {
        if let Some(core) = layout.client_core {
            core_affinity::set_for_current(cores()[core]);
        }
        demo::run(&mut bench, &RealClock, demo)
    });
    let client = client.map_err(|e| format!("cannot start a thread: {e}"))?;
    let result = client.join().map_err(|_| "the demo's thread panicked: this is a bug, see above".to_owned())??;
    output::print(report::table(&result).trim_end())?;
    if let Some(path) = &args.json {
        output::write_file(path, &format!("{:#}\n", report::json(&result)))?;
    }
    Ok(())
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
