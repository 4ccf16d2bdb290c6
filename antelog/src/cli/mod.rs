//! The command line: parses, runs, and turns every error into one line and an exit code.
//!
//! Exit codes: 0 done, 1 failed (one line on standard error says why), 2 wrong usage; `sim` and `doctor` have
//! more, see their help.

mod append;
mod bench;
mod cluster;
mod demo;
mod doctor;
mod embedded;
mod grid;
mod host;
mod link;
mod log;
mod members;
mod nodes;
mod output;
mod processes;
mod profile;
mod query;
mod rdma_floor;
mod sim;
mod soft_roce;
mod subscribe;
mod transport;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use antelog::{Client, ClientOptions};
use antelog_core::access::Secret;
use clap::{Args, Parser, Subcommand};

/// Where `antelog dev` serves clients, and where the client commands look.
pub const DEFAULT_ADDRESS: &str = "127.0.0.1:7411";

const AFTER_HELP: &str = "\
First steps:
  antelog demo                     see speculation beat its baseline on this machine
  antelog dev                      run a cluster in this terminal, then in another one:
  echo hello | antelog append      append a line
  antelog subscribe --to-tail      read everything back
  antelog subscribe --events       watch records being delivered, then confirmed";

#[derive(Parser)]
#[command(
    name = "antelog",
    version,
    about = "A speculative shared log: records are delivered before their global order is bound",
    after_help = AFTER_HELP,
    arg_required_else_help = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure fixed (speculative) against free ordering in one run: two shards, real clients, real sockets
    Demo(demo::DemoArgs),
    /// Run a whole cluster in this process until Ctrl-C: two shards with a backup each, and a sequencer
    Dev(nodes::DevArgs),
    /// Run one node of a cluster described by a configuration file
    Node(nodes::NodeArgs),
    /// Work with configuration files
    Config {
        #[command(subcommand)]
        command: nodes::ConfigCommand,
    },
    /// Append records from a file or standard input
    Append(append::AppendArgs),
    /// Follow the log: records in order, confirmed or as they are speculated
    Subscribe(subscribe::SubscribeArgs),
    /// Print the record at a position
    Read(query::ReadArgs),
    /// Print the first position that is not bound
    Tail(query::TailArgs),
    /// Print what became of an append whose shard was lost while it was under way
    Outcome(query::OutcomeArgs),
    /// Let shards join and leave the running log
    Shard {
        #[command(subcommand)]
        command: members::ShardCommand,
    },
    /// Look at a running cluster as a whole
    Cluster {
        #[command(subcommand)]
        command: cluster::ClusterCommand,
    },
    /// Change how the running log is ordered
    Ordering(members::OrderingArgs),
    /// Drop what lies below a position, all of it bound
    Trim(members::TrimArgs),
    /// Run simulated clusters on virtual time from seeds, with faults, and check what clients are told
    Sim(sim::SimArgs),
    /// Look at what this machine lacks for RDMA and for speed; exit code 0: RDMA is usable, 3: TCP only, 1: broken
    Doctor(doctor::DoctorArgs),
    /// Make an RDMA device in software, for machines without RDMA hardware
    SoftRoce {
        #[command(subcommand)]
        command: soft_roce::SoftRoceCommand,
    },
    /// Measure
    Profile {
        #[command(subcommand)]
        command: profile::ProfileCommand,
    },
}

/// How client commands find the cluster.
#[derive(Args, Clone)]
pub struct ClusterArgs {
    /// Addresses of gates (host:port); any one that answers is enough
    #[arg(long, value_name = "ADDR[,ADDR…]", value_delimiter = ',')]
    #[arg(default_value = DEFAULT_ADDRESS, env = "ANTELOG_GATES")]
    cluster: Vec<String>,
    /// Refuse to talk to a cluster of another name
    #[arg(long, value_name = "NAME")]
    cluster_name: Option<String>,
    /// A file with a secret of the cluster, if it requires one
    #[arg(long, value_name = "FILE", env = "ANTELOG_SECRET_FILE")]
    secret_file: Option<PathBuf>,
    #[command(flatten)]
    transport: transport::TransportArgs,
}

impl ClusterArgs {
    fn connect(&self) -> Result<Client, String> {
        Client::connect(self.options(self.cluster.clone())?).map_err(|e| e.to_string())
    }

    fn secret(&self) -> Result<Option<Secret>, String> {
        self.secret_file.as_ref().map(Secret::read).transpose()
    }

    /// How a client of these gates is to be.
    fn options(&self, gates: Vec<String>) -> Result<ClientOptions, String> {
        let mut options = ClientOptions::new(gates);
        if let Some(name) = &self.cluster_name {
            options.cluster_name = name.clone();
        }
        options.secret = self.secret()?;
        options.network = self.transport.options();
        if self.transport.is_given() {
            options.log = Some(Arc::new(|line: &str| eprintln!("antelog: {line}")));
        }
        Ok(options)
    }
}

/// Runs the command line.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Command::Demo(args) => demo::run(&args),
        Command::Dev(args) => nodes::dev(&args),
        Command::Node(args) => nodes::node(&args),
        Command::Config { command } => nodes::config(&command),
        Command::Append(args) => append::run(&args),
        Command::Subscribe(args) => subscribe::run(&args),
        Command::Read(args) => query::read(&args),
        Command::Tail(args) => query::tail(&args),
        Command::Outcome(args) => query::outcome(&args),
        Command::Shard { command } => members::shard(&command),
        Command::Cluster { command } => cluster::run(&command),
        Command::Ordering(args) => members::ordering(&args),
        Command::Trim(args) => members::trim(&args),
        Command::Profile { command } => profile::run(&command),
        Command::Doctor(args) => return exit(doctor::run(&args)),
        Command::SoftRoce { command } => soft_roce::command(&command),
        Command::Sim(args) => return exit(sim::run(&args)),
    };
    exit(result.map(|()| ExitCode::SUCCESS))
}

fn exit(result: Result<ExitCode, Stop>) -> ExitCode {
    match result {
        Ok(code) => code,
        Err(Stop::ReaderGone) => ExitCode::SUCCESS,
        Err(Stop::Told) => ExitCode::FAILURE,
        Err(Stop::Failed(text)) => {
            eprintln!("antelog: {text}");
            ExitCode::FAILURE
        }
    }
}

/// Why a command ends early.
#[derive(Debug)]
pub enum Stop {
    /// Whoever read our output is gone (`| head`): no error.
    ReaderGone,
    /// The output has told already what is wrong.
    Told,
    /// One line: what, where, what to do.
    Failed(String),
}

impl From<String> for Stop {
    fn from(text: String) -> Stop {
        Stop::Failed(text)
    }
}

impl From<antelog::Error> for Stop {
    fn from(error: antelog::Error) -> Stop {
        Stop::Failed(error.to_string())
    }
}

/// What commands return.
pub type Outcome = Result<(), Stop>;
