//! `profile`: measurements.

use std::path::PathBuf;

use antelog_core::path::Wish;
use antelog_profile::floor::{self, FloorConfig};
use clap::{Args, Subcommand};

use super::transport::TransportArgs;
use super::{Outcome, Stop, output, rdma_floor};

#[derive(Subcommand)]
pub enum ProfileCommand {
    /// What the network alone costs: TCP round trips of 4 KiB → 64 B on the demo's cores; with --transport rdma, bare
    /// requests beside the transport's
    Floor(FloorArgs),
    /// Whether speculation ever loses: fixed beside free-event ordering over durations of computation and scenarios
    Grid(super::grid::GridArgs),
    /// What a cluster moves with so many records under way, what one record costs beside the floor, and what idling costs
    Bench(super::bench::BenchArgs),
}

#[derive(Args)]
pub struct FloorArgs {
    /// Also write the result as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Seconds of each measurement
    #[arg(long, value_name = "N", default_value_t = 2.0)]
    seconds: f64,
    #[command(flatten)]
    transport: TransportArgs,
}

/// Runs `profile`.
pub fn run(command: &ProfileCommand) -> Outcome {
    match command {
        ProfileCommand::Floor(args) => measure_floor(args),
        ProfileCommand::Grid(args) => super::grid::run(args),
        ProfileCommand::Bench(args) => super::bench::run(args),
    }
}

fn measure_floor(args: &FloorArgs) -> Outcome {
    if !(args.seconds > 0.0 && args.seconds <= 3600.0) {
        return Err(Stop::Failed(format!("--seconds {}: expected more than 0", args.seconds)));
    }
    output::check_writable(args.json.as_deref())?;
    let each_ns = (args.seconds * 1e9) as u64;
    if args.transport.transport == Some(Wish::Rdma) {
        let (floor, place) = rdma_floor::measure(&args.transport.options(), each_ns)?;
        output::print(floor.table(&place).trim_end())?;
        if let Some(path) = &args.json {
            output::write_file(path, &format!("{:#}\n", floor.json(&place)))?;
        }
        return Ok(());
    }
    let config = FloorConfig { cores: floor::available_cores(), each_ns };
    let floor = floor::measure(&config)?;
    output::print(floor.table().trim_end())?;
    if let Some(path) = &args.json {
        output::write_file(path, &format!("{:#}\n", floor.json()))?;
    }
    Ok(())
}
