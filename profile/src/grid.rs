//! The grid: where does speculation lose?
//!
//! A cell is one duration of computation under one scenario, and a small demo of its own: `fixed` beside `free-event` with
//! the same arrivals, interleaved in random order. Speculation is worse in a cell when the median over the pairs of fixed /
//! free-event, of mean end-to-end latencies, exceeds a limit. A cell that cannot be measured is noted and the grid goes on.

pub mod report;

use antelog_protocol::Ordering;

use crate::consumer::{Compute, ConsumerConfig};
use crate::demo::{self, Bench, Demo, DemoConfig, Labels, Repetition, Split};
use crate::hog::HogConfig;
use crate::load::{Arrivals, LoadConfig, Random, WriterConfig, even_writers, uneven_writers};
use crate::log::Clock;
use crate::stats::Spread;

/// The computations that make up the whole grid, in nanoseconds.
pub const COMPUTES_NS: [u64; 7] = [0, 100_000, 500_000, 1_000_000, 1_500_000, 4_000_000, 50_000_000];
/// Records of a burst.
pub const BURST_RECORDS: u32 = 30;
/// How long the slow shard holds every report back, in microseconds.
pub const REPORT_DELAY_US: u64 = 5_000;
/// Share of a consumer's workers that may be busy on average. Above it, queueing would be what is measured.
pub const UTILISATION_MAX: f64 = 0.5;

/// What is the matter in a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// Nothing: regular arrivals at the same rate everywhere.
    Steady,
    /// Every writer sends [`BURST_RECORDS`] at once, at the same mean rate.
    Bursts,
    /// The last shard holds every report back by [`REPORT_DELAY_US`].
    SlowShard,
    /// Another program wants a core.
    Hog,
    /// Shards' rates differ at the same mean; their quotas, as configured, do not.
    Uneven,
}

impl Scenario {
    /// All of them.
    pub const ALL: [Scenario; 5] =
        [Scenario::Steady, Scenario::Bursts, Scenario::SlowShard, Scenario::Hog, Scenario::Uneven];

    /// The name used on the command line and in output.
    pub const fn name(self) -> &'static str {
        match self {
            Scenario::Steady => "steady",
            Scenario::Bursts => "bursts",
            Scenario::SlowShard => "slow-shard",
            Scenario::Hog => "hog",
            Scenario::Uneven => "uneven",
        }
    }

    /// The scenario with this name.
    pub fn from_name(name: &str) -> Option<Scenario> {
        Scenario::ALL.into_iter().find(|scenario| scenario.name() == name)
    }
}

/// What to run.
#[derive(Clone, Debug)]
pub struct GridConfig {
    /// Computations on a batch, in nanoseconds.
    pub computes_ns: Vec<u64>,
    /// Scenarios.
    pub scenarios: Vec<Scenario>,
    /// Modes; `fixed` and `free-event` among them.
    pub modes: Vec<Ordering>,
    /// Runs of each mode per cell.
    pub repetitions: u32,
    /// Load of a run in nanoseconds, its warm-up included.
    pub run_ns: u64,
    /// Warm-up of each run in nanoseconds, at most a quarter of it.
    pub warm_up_ns: u64,
    /// How long a run may take to finish what is outstanding, in nanoseconds.
    pub drain_ns: u64,
    /// Shards, each with a writer and a consumer.
    pub shards: u16,
    /// Records per second and shard, on average over the shards; lowered in cells where it would keep more than
    /// [`UTILISATION_MAX`] of a consumer's workers busy.
    pub rate_per_s: f64,
    /// Bytes of a record.
    pub record_bytes: usize,
    /// Batches that each consumer computes at once.
    pub workers: usize,
    /// What [`Scenario::Hog`] runs.
    pub hog: HogConfig,
    /// Greatest ratio fixed / free-event that is not worse.
    pub limit: f64,
    /// Decides the order of runs, the phases of bursts and the records' tags.
    pub seed: u64,
    /// Say nothing on standard error while running.
    pub quiet: bool,
    /// For the reports.
    pub labels: Labels,
}

/// One cell.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// Computation on a batch, in nanoseconds.
    pub compute_ns: u64,
    /// What is the matter.
    pub scenario: Scenario,
    /// The load: one writer per shard.
    pub writers: Vec<WriterConfig>,
    /// Share of the busiest consumer's workers that are busy on average when every record is a batch of its own.
    pub utilisation: f64,
}

impl GridConfig {
    /// The cells, in the order in which they are run: all computations under the first scenario, then under the next.
    pub fn cells(&self) -> Vec<Cell> {
        let computes = |scenario: &Scenario| self.computes_ns.iter().map(|ns| self.cell(*ns, *scenario)).collect();
        self.scenarios.iter().flat_map(|scenario| -> Vec<Cell> { computes(scenario) }).collect()
    }

    fn cell(&self, compute_ns: u64, scenario: Scenario) -> Cell {
        let writers = match scenario {
            Scenario::Uneven => uneven_writers,
            _ => even_writers,
        };
        let busiest = |rate| writers(self.shards, rate).iter().map(|w| w.rate_per_s).fold(0.0, f64::max);
        let compute_s = compute_ns as f64 / 1e9;
        let workers = self.workers as f64;
        let rate_max = UTILISATION_MAX * workers / (compute_s * busiest(1.0));
        let rate_per_s = self.rate_per_s.min(rate_max);
        let utilisation = busiest(rate_per_s) * compute_s / workers;
        Cell { compute_ns, scenario, writers: writers(self.shards, rate_per_s), utilisation }
    }

    /// How many runs the whole takes.
    pub fn runs(&self) -> usize {
        self.computes_ns.len() * self.scenarios.len() * self.modes.len() * self.repetitions as usize
    }

    /// How the time of each run is divided.
    ///
    /// # Errors
    /// When it is too short to measure, or there is no cell.
    pub fn split(&self) -> Result<Split, String> {
        match self.cells().first() {
            Some(cell) => self.demo(cell, self.seed).split(),
            None => Err("a grid needs at least 1 cell".to_owned()),
        }
    }

    /// The demo of a cell.
    pub fn demo(&self, cell: &Cell, seed: u64) -> DemoConfig {
        DemoConfig {
            modes: self.modes.clone(),
            repetitions: self.repetitions,
            seconds: self.run_ns as f64 / 1e9 * self.modes.len() as f64 * f64::from(self.repetitions),
            warm_up_ns: self.warm_up_ns,
            drain_ns: self.drain_ns,
            load: LoadConfig {
                writers: cell.writers.clone(),
                record_bytes: self.record_bytes,
                arrivals: match cell.scenario {
                    Scenario::Bursts => Arrivals::Bursts(BURST_RECORDS),
                    _ => Arrivals::Regular,
                },
                seed,
            },
            consumer: ConsumerConfig { compute_ns: cell.compute_ns, workers: self.workers, kind: Compute::Timed },
            merged: false,
            hog: (cell.scenario == Scenario::Hog).then_some(self.hog),
            seed,
            quiet: self.quiet,
            labels: self.labels.clone(),
        }
    }
}

/// How speculation fared in a cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Not worse.
    Ok,
    /// Worse, and in what.
    Worse(String),
    /// It could not be measured, or not all of it, and why.
    Failed(String),
}

impl Verdict {
    /// The word used in output.
    pub const fn name(&self) -> &'static str {
        match self {
            Verdict::Ok => "ok",
            Verdict::Worse(_) => "worse",
            Verdict::Failed(_) => "failed",
        }
    }
}

/// A cell that was run.
#[derive(Clone, Debug)]
pub struct CellResult {
    /// The cell.
    pub cell: Cell,
    /// What was measured; `None` when a mode had no run that succeeded.
    pub demo: Option<Demo>,
    /// What to make of it.
    pub verdict: Verdict,
}

impl CellResult {
    /// Of a figure of repetitions, fixed / free-event: one ratio per repetition in which both succeeded.
    pub fn ratio(&self, figure: fn(&Repetition) -> f64) -> Option<Spread> {
        self.demo.as_ref().and_then(|demo| ratio(demo, figure))
    }
}

/// A grid's results.
#[derive(Clone, Debug)]
pub struct Grid {
    /// What was asked for.
    pub config: GridConfig,
    /// The cells that were run: all, unless it was interrupted.
    pub results: Vec<CellResult>,
}

impl Grid {
    /// How many cells have a verdict of this name.
    pub fn count(&self, name: &str) -> usize {
        self.results.iter().filter(|result| result.verdict.name() == name).count()
    }

    /// All cells were run and none is worse or failed.
    pub fn passes(&self) -> bool {
        self.count("ok") == self.config.cells().len()
    }
}

/// Runs all cells. `start` provides what starts a cell's clusters, `tell` gets every result as soon as it is there; an
/// error of `tell` ends the grid and is returned with what there is.
///
/// # Errors
/// When the configuration makes no sense.
pub fn run<B: Bench, E>(
    clock: &(impl Clock + Clone),
    config: GridConfig,
    mut start: impl FnMut(&Cell) -> Result<B, String>,
    mut tell: impl FnMut(&CellResult) -> Result<(), E>,
) -> Result<(Grid, Result<(), E>), String> {
    config.split()?;
    let cells = config.cells();
    let mut seeds = Random::new(config.seed);
    let mut grid = Grid { config, results: Vec::new() };
    for cell in cells {
        let demo = grid.config.demo(&cell, seeds.next_u64());
        let mut interrupted = false;
        let result = start(&cell).and_then(|mut bench| {
            let result = demo::run(&mut bench, clock, demo);
            interrupted = bench.interrupted();
            result
        });
        let result = match result {
            Ok(demo) => CellResult { verdict: verdict(&demo, grid.config.limit), cell, demo: Some(demo) },
            // Not even one run of every mode has ended: there is nothing to say about this cell.
            Err(_) if interrupted => break,
            Err(why) => CellResult { cell, demo: None, verdict: Verdict::Failed(why) },
        };
        let told = tell(&result);
        grid.results.push(result);
        if told.is_err() {
            return Ok((grid, told));
        }
        if interrupted {
            break;
        }
    }
    Ok((grid, Ok(())))
}

fn ratio(demo: &Demo, figure: fn(&Repetition) -> f64) -> Option<Spread> {
    let (fixed, free) = (demo.mode(Ordering::Fixed)?, demo.mode(Ordering::FreeEvent)?);
    let pair = |a: &Repetition| free.repetitions.iter().find(|b| b.number == a.number).map(|b| figure(a) / figure(b));
    let ratios: Vec<f64> = fixed.repetitions.iter().filter_map(pair).filter(|ratio| ratio.is_finite()).collect();
    Spread::of(&ratios)
}

/// Latencies of records that never came out are in no histogram, so losing some would look like speed: a cell in which
/// `fixed` lost records is worse, whatever its ratio.
fn verdict(demo: &Demo, limit: f64) -> Verdict {
    if let Some(failure) = demo.failures.first() {
        return Verdict::Failed(failure.clone());
    }
    let (Some(ratio), Some(fixed)) = (ratio(demo, |r| r.e2e_mean_us), demo.mode(Ordering::Fixed)) else {
        return Verdict::Failed("fixed and free-event were never measured in the same repetition".to_owned());
    };
    let totals = &fixed.measured.totals;
    let mut reasons = Vec::new();
    if ratio.median > limit {
        reasons.push(format!("mean e2e {:.2} times that of free-event", ratio.median));
    }
    for (count, what) in [
        (totals.failed, "records were misspeculated"),
        (totals.unfinished, "records were not finished in time"),
        (totals.refused, "records were refused"),
    ] {
        if count > 0 {
            reasons.push(format!("{count} {what}"));
        }
    }
    if reasons.is_empty() { Verdict::Ok } else { Verdict::Worse(reasons.join(", ")) }
}

#[cfg(test)]
mod tests;
