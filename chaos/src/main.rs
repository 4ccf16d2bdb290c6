//! Chaos: a cluster of real processes in network namespaces, clients that write down what they see, faults from a seed, and
//! a checker of what was seen. See `antelog-chaos --help`.

mod check;
mod circumstances;
mod clients;
mod cluster;
mod disks;
mod faults;
mod history;
mod network;
mod prober;
mod reader;
mod record;
mod run;
mod stall;
mod stalls;
mod writer;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "antelog-chaos", version, about = "Disturbs a real cluster and checks what its clients saw")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a cluster in namespaces of its own, disturb it from a seed, check what clients saw; needs root
    Run(run::RunArgs),
    /// Measure how long confirmations stop when a primary, a backup, a sequencer or a whole shard is killed; needs root
    Stalls(stalls::StallArgs),
    /// Check what clients of an earlier run saw
    Check {
        /// The folder with the histories
        folder: PathBuf,
    },
    /// Append records and write down what was answered: what a run starts as a client
    Writer(writer::WriterArgs),
    /// Follow the log and write down what was told: what a run starts as a client
    Reader(reader::ReaderArgs),
    /// Read single positions and write down what they hold: what a run starts as a client
    Prober(prober::ProberArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Stalls(args) => stalls::run(&args),
        Command::Check { folder } => history::read(&folder).and_then(|history| {
            let verdict = check::check(&history, &circumstances::Circumstances::read(&folder)?);
            println!("{verdict:#?}");
            Ok(verdict.violations_total == 0)
        }),
        Command::Writer(args) => writer::run(&args).map(|()| true),
        Command::Reader(args) => reader::run(&args).map(|()| true),
        Command::Prober(args) => prober::run(&args).map(|()| true),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("antelog-chaos: {why}");
            ExitCode::FAILURE
        }
    }
}
