//! `demo`: fixed ordering with speculation beside free ordering, on fresh embedded clusters, with a real client.

use std::path::PathBuf;

use antelog_core::node::Idle;
use antelog_profile::consumer::{Compute, ConsumerConfig};
use antelog_profile::demo::{self, DemoConfig, report};
use antelog_profile::load::{Arrivals, LoadConfig, even_writers};
use antelog_profile::log::RealClock;
use antelog_protocol::Ordering;
use clap::Args;

use super::embedded::{self, EmbeddedBench, Layout, RECORD_BYTES};
use super::transport::TransportArgs;
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
    /// A process for each node instead of threads in this one
    #[arg(long)]
    processes: bool,
    #[command(flatten)]
    transport: TransportArgs,
    /// Poisson arrivals instead of regular ones
    #[arg(long)]
    poisson: bool,
    /// Change a key of [cluster] or [launch], like cluster.tick_us=500
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Runs `demo`.
pub fn run(args: &DemoArgs) -> Outcome {
    output::check_writable(args.json.as_deref())?;
    let layout = Layout::of(args.shards);
    let mut config = embedded::config(args.shards, args.rate, &layout, &args.transport, &args.set)?;
    if args.processes {
        // As many threads as nodes, on the cores there are: nobody spins while others have work.
        config.launch.idle = Idle::Park;
    }
    embedded::check_rate(args.rate)?;
    if !(args.compute_ms >= 0.0 && args.compute_ms <= 10_000.0) {
        return Err(Stop::Failed(format!("--compute-ms {}: expected milliseconds up to 10000", args.compute_ms)));
    }
    let seed = embedded::random_seed()?;
    let demo = DemoConfig {
        modes: vec![Ordering::FreeTick, Ordering::FreeEvent, Ordering::Fixed],
        repetitions: args.repetitions,
        seconds: args.seconds,
        warm_up_ns: 200_000_000,
        drain_ns: 5_000_000_000,
        load: LoadConfig {
            writers: even_writers(args.shards, args.rate),
            record_bytes: RECORD_BYTES,
            arrivals: if args.poisson { Arrivals::Poisson } else { Arrivals::Regular },
            seed,
        },
        consumer: ConsumerConfig {
            compute_ns: (args.compute_ms * 1e6) as u64,
            workers: args.workers.into(),
            kind: Compute::Timed,
        },
        merged: args.merged,
        hog: None,
        seed,
        quiet: false,
        labels: embedded::labels(&config)?,
    };
    let mut bench = EmbeddedBench::new(config, &layout, Default::default());
    if args.processes {
        bench = bench.in_processes();
    }
    let result = embedded::on_client_core(&layout, move || demo::run(&mut bench, &RealClock, demo))??;
    output::print(report::table(&result).trim_end())?;
    if let Some(path) = &args.json {
        output::write_file(path, &format!("{:#}\n", report::json(&result)))?;
    }
    Ok(())
}
