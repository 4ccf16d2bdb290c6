//! `sim`: seeds on the simulator, one in detail or many in parallel, and how to run a failing one again; and figures.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering as Atomic};

use antelog_core::sim::knobs::FaultSet;
use antelog_core::sim::{self, Failure, Knobs, Overrides, Probes, probes, simulate};
use antelog_net_rdma::sim as rdma;
use antelog_profile::figures::model::Model;
use antelog_profile::figures::{Figure, Options};
use antelog_protocol::Ordering;
use antelog_protocol::limits::SHARDS_MAX;
use clap::{Args, ValueEnum};

use super::{Outcome, Stop, output};

const AFTER_HELP: &str = "\
Every failing seed is one line: what kind of failure, the seed, and the command that runs it again, with the version \
it failed on. The last line is 'N passed, M failed'.

Exit codes:
  0  every seed passed
  1  wrong: an invariant did not hold, or a batch of 1000 default seeds or more (60 over rdma) missed a situation that
     it must reach
  2  wrong usage
  3  stuck: something was never told after the faults were over
  4  crash: an agent or a session panicked
When seeds fail in several ways, wrong counts before crash and crash before stuck.";

/// What simulated clusters use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Transport {
    Tcp,
    Rdma,
}

impl Transport {
    /// Situations that a batch of so many default seeds must reach.
    fn required(self) -> (&'static [&'static str], u64) {
        match self {
            Transport::Tcp => (&probes::REQUIRED, probes::BATCH_SEEDS),
            Transport::Rdma => (&rdma::REQUIRED, rdma::BATCH_SEEDS),
        }
    }
}

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct SimArgs {
    /// Run this seed and print its knobs, its digest and what it reached
    #[arg(long, value_name = "S", conflicts_with_all = ["seed_from", "seeds", "jobs"])]
    seed: Option<u64>,
    /// With --seed: print every event
    #[arg(long, requires = "seed")]
    trace: bool,
    /// First seed of a batch
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed_from: u64,
    /// Seeds of a batch
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Threads that run seeds; as many as there are cores if not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// Shards, instead of as many as the seed draws
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u16).range(1..=SHARDS_MAX as i64))]
    shards: Option<u16>,
    /// Records per second and shard, instead of as many as the seed draws
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    rate: Option<u64>,
    /// Minutes of load in virtual time, instead of what the seed draws
    #[arg(long, value_name = "M", conflicts_with = "ms", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    minutes: Option<u64>,
    /// Milliseconds of load in virtual time, instead of what the seed draws
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=600_000_000))]
    ms: Option<u64>,
    /// fixed, free-tick or free-event, instead of what the seed draws
    #[arg(long, value_name = "ORDERING", value_parser = ordering)]
    ordering: Option<Ordering>,
    /// Sequencers, instead of as many as the seed draws
    #[arg(long, value_name = "N", value_parser = super::nodes::one_three_or_five)]
    sequencers: Option<u16>,
    /// Which faults may happen: all, none, or some of lost-links, pauses, sessions, leaders, crashes, partitions,
    /// shard-loss, power; instead of what the seed draws, which is processes that die, partitions, lost shards and disks in
    /// some seeds
    #[arg(long, value_name = "LIST", value_parser = faults)]
    faults: Option<FaultSet>,
    /// What the clusters use: the simulated network as it is, or the RDMA transport on an emulated fabric, over that
    #[arg(long, value_name = "TRANSPORT", value_enum, default_value_t = Transport::Tcp)]
    transport: Transport,
    /// Instead of seeds: a curve of the literature from the real code on virtual time
    #[arg(long, value_name = "FIGURE", value_parser = figure, conflicts_with_all = ["seed", "seed_from", "seeds"])]
    #[arg(conflicts_with_all = ["trace", "transport", "shards", "rate", "minutes", "ms"])]
    #[arg(conflicts_with_all = ["ordering", "sequencers", "faults"])]
    figure: Option<Figure>,
    /// With --figure: the latency model, paper, lan or a TOML file
    #[arg(long, value_name = "FILE", requires = "figure", default_value = "paper")]
    model: String,
    /// With --figure: less load and fewer seeds
    #[arg(long, requires = "figure")]
    quick: bool,
    /// With --figure: write the tables to this file
    #[arg(long, value_name = "FILE", requires = "figure")]
    json: Option<PathBuf>,
}

fn figure(text: &str) -> Result<Figure, String> {
    let names = Figure::ALL.map(Figure::name).join(", ");
    Figure::from_name(text).ok_or_else(|| format!("unknown figure {text:?}: use one of {names}"))
}

fn ordering(text: &str) -> Result<Ordering, String> {
    Ordering::from_name(text).ok_or_else(|| format!("unknown ordering {text:?}: use fixed, free-tick or free-event"))
}

fn faults(text: &str) -> Result<FaultSet, String> {
    let names = FaultSet::NAMES.join(", ");
    FaultSet::from_names(text).ok_or_else(|| format!("unknown faults {text:?}: use all, none, or some of {names}"))
}

impl SimArgs {
    fn jobs(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.jobs.map_or_else(cores, usize::from)
    }

    fn overrides(&self) -> Overrides {
        let load_ns = self.minutes.map(|m| m * 60_000_000_000).or(self.ms.map(|ms| ms * 1_000_000));
        let Self { shards, rate: rate_per_s, ordering, sequencers, faults, .. } = *self;
        Overrides { shards, rate_per_s, load_ns, ordering, sequencers, faults }
    }

    /// The command that runs a seed again.
    fn command(&self, seed: u64) -> String {
        let mut command = format!("antelog sim --seed {seed}");
        let mut add = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                command += &format!(" --{name} {value}");
            }
        };
        add("transport", (self.transport == Transport::Rdma).then(|| "rdma".to_owned()));
        add("shards", self.shards.map(|v| v.to_string()));
        add("rate", self.rate.map(|v| v.to_string()));
        add("minutes", self.minutes.map(|v| v.to_string()));
        add("ms", self.ms.map(|v| v.to_string()));
        add("sequencers", self.sequencers.map(|n| n.to_string()));
        add("ordering", self.ordering.map(|v| v.name().to_owned()));
        add("faults", self.faults.map(|v| v.to_string()));
        format!("{command}  # {}", version())
    }
}

/// The commit this was built from, if the build said so (`ANTELOG_COMMIT=$(git describe --always --dirty)`).
fn version() -> &'static str {
    option_env!("ANTELOG_COMMIT").unwrap_or(concat!("version ", env!("CARGO_PKG_VERSION")))
}

/// What a batch came to.
#[derive(Default)]
struct Tally {
    passed: u64,
    failed: u64,
    /// Wrong, stuck, crashed.
    kinds: [bool; 3],
    probes: Probes,
    virtual_ns: u64,
}

impl Tally {
    fn add(&mut self, outcome: &sim::Outcome) {
        self.probes.merge(&outcome.probes);
        self.virtual_ns += outcome.virtual_ns;
        match &outcome.failure {
            None => self.passed += 1,
            Some(failure) => {
                self.failed += 1;
                let kind = match failure {
                    Failure::Wrong(_) => 0,
                    Failure::Stuck(_) => 1,
                    Failure::Crash(_) => 2,
                };
                self.kinds[kind] = true;
            }
        }
    }

    fn code(&self) -> u8 {
        match self.kinds {
            [true, ..] => 1,
            [_, _, true] => 4,
            [_, true, _] => 3,
            _ => 0,
        }
    }
}

fn run_seed(args: &SimArgs, seed: u64, traced: bool) -> Result<sim::Outcome, Stop> {
    let knobs = Knobs::draw(seed, &args.overrides());
    let outcome = match args.transport {
        Transport::Tcp => simulate(knobs, traced),
        Transport::Rdma => rdma::simulate(knobs, traced),
    };
    outcome.map_err(|e| Stop::Failed(format!("seed {seed}: no memory for its cluster: {e}")))
}

fn failure_line(args: &SimArgs, seed: u64, failure: &Failure) -> String {
    format!("{failure}; seed {seed}; redo: {}", args.command(seed))
}

/// Runs `sim`.
pub fn run(args: &SimArgs) -> Result<ExitCode, Stop> {
    if let Some(figure) = args.figure {
        return run_figure(args, figure).map(|()| ExitCode::SUCCESS);
    }
    let mut tally = Tally::default();
    if let Some(seed) = args.seed {
        output::print(&Knobs::draw(seed, &args.overrides()).to_string())?;
        let outcome = run_seed(args, seed, args.trace)?;
        if let Some(trace) = &outcome.trace {
            output::print(trace.trim_end())?;
        }
        for (name, count) in outcome.probes.reached() {
            output::print(&format!("reached {name}: {count}"))?;
        }
        output::print(&format!("digest {:016x} after {} us", outcome.digest, outcome.virtual_ns / 1000))?;
        if let Some(failure) = &outcome.failure {
            output::print(&failure_line(args, seed, failure))?;
        }
        tally.add(&outcome);
    } else {
        tally = batch(args)?;
    }
    output::print(&format!("{} passed, {} failed", tally.passed, tally.failed))?;
    Ok(ExitCode::from(tally.code()))
}

fn run_figure(args: &SimArgs, figure: Figure) -> Outcome {
    let options = Options { model: Model::load(&args.model)?, quick: args.quick, jobs: args.jobs() };
    let tables = figure.run(&options)?;
    for table in &tables {
        output::print(&table.to_string())?;
    }
    let Some(path) = &args.json else { return Ok(()) };
    let all =
        serde_json::json!({ "figure": figure.name(), "model": args.model, "quick": args.quick, "tables": tables });
    output::write_file(path, &format!("{all:#}\n"))
}

fn batch(args: &SimArgs) -> Result<Tally, Stop> {
    let jobs = args.jobs();
    let next = AtomicU64::new(0);
    let shared = Mutex::new((Tally::default(), None));
    let work = || {
        loop {
            let number = next.fetch_add(1, Atomic::Relaxed);
            if number >= args.seeds {
                return;
            }
            let seed = args.seed_from.wrapping_add(number);
            let result = run_seed(args, seed, false);
            let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
            let said = result.and_then(|outcome| {
                shared.0.add(&outcome);
                outcome.failure.map_or(Ok(()), |failure| output::print(&failure_line(args, seed, &failure)))
            });
            if let Err(stop) = said {
                shared.1.get_or_insert(stop);
                next.store(args.seeds, Atomic::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(work);
        }
    });
    let (mut tally, stop) = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
    stop.map_or(Ok(()), Err)?;
    let (required, batch_seeds) = args.transport.required();
    let missed = tally.probes.missed(required);
    output::print(&format!(
        "{} seeds of {:.0} ms of virtual time on average reached {} of {} situations",
        args.seeds,
        tally.virtual_ns as f64 / 1e6 / args.seeds as f64,
        required.len() - missed.len(),
        required.len()
    ))?;
    if !missed.is_empty() {
        output::print(&format!("missed: {}", missed.join(", ")))?;
    }
    if args.seeds >= batch_seeds && args.overrides() == Overrides::default() {
        tally.kinds[0] |= !missed.is_empty();
    }
    Ok(tally)
}
