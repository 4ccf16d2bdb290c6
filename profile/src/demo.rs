//! The demo: ordering modes beside each other on the same machine, with the same work.
//!
//! Modes are interleaved: every repetition runs each mode once, on a cluster of its own, in random order, so that what the
//! machine does meanwhile meets all of them alike. A mode's histograms are merged over its repetitions; ratios are taken
//! within a repetition and given as the median of all with the least and the greatest.

pub mod gain;
pub mod report;

use std::io::IsTerminal;

use antelog_protocol::{Ordering, Position};
use indicatif::{ProgressBar, ProgressStyle};

use self::gain::Gain;
use crate::consumer::ConsumerConfig;
use crate::counted::Counted;
use crate::hog::HogConfig;
use crate::load::{LoadConfig, Random};
use crate::log::{Clock, Host, Log};
use crate::outside::{OutsideLoad, Watch};
use crate::run::{Outcome, RunConfig, drive};
use crate::stats::Measured;

/// Shortest time that a run may measure, in nanoseconds: below it there are too few windows to speak of a steady state.
pub const MEASURE_NS_MIN: u64 = 50_000_000;

/// What the reports say about the cluster; the demo itself does not look at it.
#[derive(Clone, Debug, Default)]
pub struct Labels {
    /// The network: `tcp`, `rdma`.
    pub transport: String,
    /// When a record counts as durable: `replicated`, `flushed`.
    pub durability: String,
    /// How the nodes' duty cycles share threads.
    pub launch: String,
    /// Cores that this process may use.
    pub cores: usize,
}

/// What to run.
#[derive(Clone, Debug)]
pub struct DemoConfig {
    /// The modes, in the order of the report.
    pub modes: Vec<Ordering>,
    /// How often each is run.
    pub repetitions: u32,
    /// Seconds of load over all modes and repetitions, warm-ups included; starting and draining come on top.
    pub seconds: f64,
    /// Warm-up of each run in nanoseconds; shortened to a quarter of the run when it is longer.
    pub warm_up_ns: u64,
    /// How long a run may take to finish what is outstanding, in nanoseconds.
    pub drain_ns: u64,
    /// What the writers send.
    pub load: LoadConfig,
    /// What each consumer computes.
    pub consumer: ConsumerConfig,
    /// One consumer of the merged order, instead of one for each shard.
    pub merged: bool,
    /// Another program that wants a core during every run.
    pub hog: Option<HogConfig>,
    /// Decides the order of runs, and with the load's seed its arrivals.
    pub seed: u64,
    /// Say nothing on standard error while running.
    pub quiet: bool,
    /// For the reports.
    pub labels: Labels,
}

/// How the seconds of a demo are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Warm-up of each run, in nanoseconds.
    pub warm_up_ns: u64,
    /// Load of each run after it, in nanoseconds.
    pub measure_ns: u64,
}

impl DemoConfig {
    /// Divides the seconds over the runs.
    ///
    /// # Errors
    /// When there are too few for a useful run, or no runs.
    pub fn split(&self) -> Result<Split, String> {
        let runs = self.modes.len() as f64 * f64::from(self.repetitions);
        if runs == 0.0 {
            return Err("a demo needs at least 1 mode and 1 repetition".to_owned());
        }
        let run_ns = (self.seconds * 1e9 / runs) as u64;
        let warm_up_ns = self.warm_up_ns.min(run_ns / 4);
        let measure_ns = run_ns - warm_up_ns;
        if measure_ns < MEASURE_NS_MIN {
            let needed = runs * MEASURE_NS_MIN as f64 / 0.75e9;
            let seconds = self.seconds;
            return Err(format!(
                "{seconds} s over {runs} runs are too short to measure; give at least {needed:.1} s or fewer repetitions"
            ));
        }
        Ok(Split { warm_up_ns, measure_ns })
    }
}

/// Provides clusters.
pub trait Bench: Host {
    /// A client of a cluster.
    type Log: Log;

    /// Starts a new and empty cluster in `mode`, and a client that is connected to it.
    ///
    /// # Errors
    /// When that fails; the demo notes it and goes on with the next run.
    fn start(&mut self, mode: Ordering, repetition: u32) -> Result<Self::Log, String>;

    /// Ends the cluster and frees what it used. Called after every successful start.
    ///
    /// # Errors
    /// When the cluster has come to harm during the run; its measurements are then dropped.
    fn stop(&mut self, log: Self::Log) -> Result<(), String>;
}

/// What remains of a repetition when histograms are merged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Repetition {
    /// Its number, from 0.
    pub number: u32,
    /// Median delivery latency in microseconds.
    pub delivery_p50_us: f64,
    /// Median end-to-end latency in microseconds.
    pub e2e_p50_us: f64,
    /// 99th percentile of the end-to-end latency in microseconds.
    pub e2e_p99_us: f64,
    /// Mean end-to-end latency in microseconds.
    pub e2e_mean_us: f64,
    /// Mean delivery latency in microseconds.
    pub delivery_mean_us: f64,
    /// Mean of confirm − delivery in microseconds; see [`Measured::confirm_wait`].
    pub confirm_wait_mean_us: f64,
    /// Mean time that records queued for the consumer, in microseconds.
    pub queue_mean_us: f64,
    /// Mean time that their batch was computed, in microseconds.
    pub compute_mean_us: f64,
}

/// One mode over all its repetitions.
#[derive(Clone, Debug)]
pub struct ModeResult {
    /// The mode.
    pub mode: Ordering,
    /// Merged measurements.
    pub measured: Measured,
    /// Summed counters of the clusters, without warm-up and draining.
    pub counted: Counted,
    /// What they counted before that, in the warm-ups.
    pub counted_before: Counted,
    /// The repetitions that succeeded.
    pub repetitions: Vec<Repetition>,
    /// The mean order path O in microseconds: record durable → consumer knows that its position is bound, as seen at the
    /// consumer. In `fixed` it is confirm − delivery. A free window delivers after binding, so there it is this mode's
    /// delivery − D, where D is the delivery of `fixed` in the same demo; `None` when that was not run.
    pub order_path_us: Option<f64>,
}

/// A demo's results.
#[derive(Clone, Debug)]
pub struct Demo {
    /// What was asked for.
    pub config: DemoConfig,
    /// How its time was divided.
    pub split: Split,
    /// By mode, in the order asked for.
    pub modes: Vec<ModeResult>,
    /// What else the machine did, where that can be told.
    pub outside: Option<OutsideLoad>,
    /// Runs that failed, and why.
    pub failures: Vec<String>,
}

impl Demo {
    /// The results of a mode.
    pub fn mode(&self, mode: Ordering) -> Option<&ModeResult> {
        self.modes.iter().find(|result| result.mode == mode)
    }

    /// The gain of `fixed` over a free mode; `None` when either was not measured.
    pub fn gain(&self, free: Ordering) -> Option<Gain> {
        gain::gain(self.mode(free)?, self.mode(Ordering::Fixed)?)
    }
}

/// Runs all modes in all repetitions; when it is interrupted, as many as have ended.
///
/// # Errors
/// When the configuration makes no sense, or no run of some mode succeeded.
pub fn run<B: Bench, C: Clock + Clone>(bench: &mut B, clock: &C, config: DemoConfig) -> Result<Demo, String> {
    let split = config.split()?;
    let empty = |mode: &Ordering| ModeResult {
        mode: *mode,
        measured: Measured::new(0),
        counted: Counted::default(),
        counted_before: Counted::default(),
        repetitions: Vec::new(),
        order_path_us: None,
    };
    let mut modes: Vec<ModeResult> = config.modes.iter().map(empty).collect();
    let mut failures = Vec::new();
    let progress = Progress::new(&config);
    let watch = Watch::start();
    let mut random = Random::new(config.seed);
    'all: for number in 0..config.repetitions {
        let mut order: Vec<usize> = (0..modes.len()).collect();
        random.shuffle(&mut order);
        // All modes of a repetition get the same arrivals; tags differ, so that no record is taken for another run's.
        let load_seed = config.load.seed ^ random.next_u64();
        for index in order {
            if bench.interrupted() {
                break 'all;
            }
            let mode = modes[index].mode;
            progress.begin(mode, number);
            let run = RunConfig {
                load: LoadConfig { seed: load_seed, ..config.load.clone() },
                consumer: config.consumer,
                merged: config.merged,
                hog: config.hog,
                from: Position(0),
                warm_up_ns: split.warm_up_ns,
                measure_ns: split.measure_ns,
                drain_ns: config.drain_ns,
                tag: random.next_u64(),
            };
            match run_once(bench, clock, mode, number, &run) {
                Ok(outcome) => add(&mut modes[index], number, &outcome),
                // A run cut short is not a failed one.
                Err(_) if bench.interrupted() => {}
                Err(why) => failures.push(format!("{} repetition {}: {why}", mode.name(), number + 1)),
            }
            progress.end();
        }
    }
    progress.finish();
    if let Some(nothing) = modes.iter().find(|result| result.repetitions.is_empty()) {
        let why = failures.first().map_or("nothing was measured", String::as_str);
        return Err(format!("no run in mode {} succeeded: {why}", nothing.mode.name()));
    }
    set_order_paths(&mut modes);
    Ok(Demo { config, split, modes, outside: watch.and_then(|w| w.stop()), failures })
}

fn run_once<B: Bench, C: Clock + Clone>(
    bench: &mut B,
    clock: &C,
    mode: Ordering,
    repetition: u32,
    config: &RunConfig,
) -> Result<Outcome, String> {
    let mut log = bench.start(mode, repetition)?;
    let outcome = drive(&mut log, clock, bench, config);
    // The cluster is stopped in any case, and the reason why the run failed comes before why the stop did.
    let stopped = bench.stop(log);
    let outcome = outcome?;
    stopped?;
    let measured = &outcome.measured;
    if measured.delivery.count() == 0 || measured.e2e.count() == 0 {
        return Err(format!("of {} records sent none was delivered and confirmed", measured.totals.sent));
    }
    Ok(outcome)
}

fn add(result: &mut ModeResult, number: u32, outcome: &Outcome) {
    let measured = &outcome.measured;
    result.repetitions.push(Repetition {
        number,
        delivery_p50_us: measured.delivery.quantile_us(0.5),
        e2e_p50_us: measured.e2e.quantile_us(0.5),
        e2e_p99_us: measured.e2e.quantile_us(0.99),
        e2e_mean_us: measured.e2e.mean_us(),
        delivery_mean_us: measured.delivery.mean_us(),
        confirm_wait_mean_us: measured.confirm_wait.mean_us(),
        queue_mean_us: measured.queue.mean_us(),
        compute_mean_us: measured.compute.mean_us(),
    });
    result.measured.merge(measured);
    result.counted.add(&outcome.counted);
    result.counted_before.add(&outcome.counted_before);
}

/// See [`ModeResult::order_path_us`].
fn set_order_paths(modes: &mut [ModeResult]) {
    let fixed = modes.iter().find(|result| result.mode == Ordering::Fixed);
    let fixed_delivery_us = fixed.map(|result| result.measured.delivery.mean_us());
    for result in modes {
        result.order_path_us = match result.mode {
            Ordering::Fixed => Some(result.measured.confirm_wait.mean_us()),
            _ => fixed_delivery_us.map(|d| (result.measured.delivery.mean_us() - d).max(0.0)),
        };
    }
}

/// How far the demo is, on standard error.
enum Progress {
    Quiet,
    /// A line per run, where nobody watches a bar.
    Lines,
    /// Drawn between runs only: a thread that redraws it meanwhile would compete with what is measured.
    Bar(ProgressBar),
}

impl Progress {
    fn new(config: &DemoConfig) -> Progress {
        if config.quiet {
            return Progress::Quiet;
        }
        if !std::io::stderr().is_terminal() {
            return Progress::Lines;
        }
        let bar = ProgressBar::new(config.modes.len() as u64 * u64::from(config.repetitions));
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} runs, {eta} left  {msg}");
        bar.set_style(style.expect("the template is valid"));
        Progress::Bar(bar)
    }

    fn begin(&self, mode: Ordering, number: u32) {
        let text = format!("{}, repetition {}", mode.name(), number + 1);
        match self {
            Progress::Quiet => {}
            Progress::Lines => eprintln!("{text}"),
            Progress::Bar(bar) => {
                bar.set_message(text);
                bar.tick();
            }
        }
    }

    fn end(&self) {
        if let Progress::Bar(bar) = self {
            bar.inc(1);
        }
    }

    fn finish(&self) {
        if let Progress::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests;
