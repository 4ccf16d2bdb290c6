//! `profile grid`: whether speculation ever loses, over durations of computation and scenarios.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use antelog_core::config::Config;
use antelog_profile::grid::{self, COMPUTES_NS, Cell, CellResult, Grid, GridConfig, REPORT_DELAY_US, Scenario, report};
use antelog_profile::hog::HogConfig;
use antelog_profile::load::mean_rate_per_s;
use antelog_profile::log::RealClock;
use antelog_protocol::Ordering;
use clap::Args;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use super::embedded::{self, EmbeddedBench, Layout, RECORD_BYTES};
use super::transport::TransportArgs;
use super::{Outcome, Stop, output};

/// Longest computation in milliseconds.
const COMPUTE_MS_MAX: f64 = 10_000.0;

const AFTER_HELP: &str = "\
Exit code 0 when every cell was run and in none fixed was worse than --limit, otherwise 1. Cells:
  antelog profile grid --cells compute=0,1.5 scenario=steady,bursts
Computations are in milliseconds (default 0, 0.1, 0.5, 1, 1.5, 4, 50); scenarios are steady, bursts, slow-shard, hog
and uneven (default all).";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct GridArgs {
    /// Choose cells: compute=MS,… and scenario=NAME,…
    #[arg(long, value_name = "KEY=A,B", num_args = 1..)]
    cells: Vec<String>,
    /// Runs of each mode per cell [default: 5, with --quick 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: Option<u32>,
    /// Seconds of each run, its warm-up included [default: 2, with --quick 0.5]
    #[arg(long, value_name = "N")]
    seconds: Option<f64>,
    /// Fewer and shorter runs
    #[arg(long)]
    quick: bool,
    /// Greatest ratio fixed / free-event of mean end-to-end latencies that is not worse
    #[arg(long, value_name = "X", default_value_t = 1.05)]
    limit: f64,
    /// Run free-tick as well
    #[arg(long)]
    free_tick: bool,
    /// Records of 4 KiB per second and shard, on average over the shards
    #[arg(long, value_name = "N", default_value_t = 10_000.0)]
    rate: f64,
    /// Batches each consumer computes at a time; the rate is lowered in cells that would keep more than half busy
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u16).range(1..))]
    workers: u16,
    /// Shards, each a primary and a backup
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=16))]
    shards: u16,
    /// Core that the hog wants [default: the client's]
    #[arg(long, value_name = "N")]
    hog_core: Option<usize>,
    /// Per cent of the time in which it wants it
    #[arg(long, value_name = "N", default_value_t = 50.0)]
    hog_duty: f64,
    /// Repeat the order of runs and the arrivals of an earlier grid
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    #[command(flatten)]
    transport: TransportArgs,
    /// Also write the result as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Change a key of [cluster] or [launch], like cluster.tick_us=500
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Runs `profile grid`.
pub fn run(args: &GridArgs) -> Outcome {
    let layout = Layout::of(args.shards);
    let config = grid_config(args, &layout)?;
    output::check_writable(args.json.as_deref())?;
    output::print(&report::heading(&config)?)?;
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The second one ends the process at once.
        flag::register_conditional_shutdown(signal, 1, interrupted.clone())
            .and_then(|_| flag::register(signal, interrupted.clone()))
            .map_err(|e| format!("cannot catch signals: {e}"))?;
    }
    let (limit, shards, set) = (args.limit, args.shards, args.set.clone());
    let transport = args.transport.clone();
    let start = move |cell: &Cell| {
        let config = cluster_config(cell, shards, &layout, &transport, &set)?;
        Ok(EmbeddedBench::new(config, &layout, interrupted.clone()))
    };
    let tell = move |result: &CellResult| output::print(&report::cell(result, limit));
    let (grid, told) = embedded::on_client_core(&layout, move || grid::run(&RealClock, config, start, tell))??;
    write_json(args, &grid)?;
    told?;
    output::print(report::summary(&grid).trim_end())?;
    if grid.passes() { Ok(()) } else { Err(Stop::Told) }
}

fn write_json(args: &GridArgs, grid: &Grid) -> Outcome {
    match &args.json {
        Some(path) => output::write_file(path, &format!("{}\n", report::json(grid)?)),
        None => Ok(()),
    }
}

fn cluster_config(
    cell: &Cell,
    shards: u16,
    layout: &Layout,
    transport: &TransportArgs,
    set: &[String],
) -> Result<Config, String> {
    let mut config = embedded::config(shards, mean_rate_per_s(&cell.writers), layout, transport, set)?;
    if cell.scenario == Scenario::SlowShard
        && let Some(last) = config.shards.last_mut()
    {
        last.report_delay_us = REPORT_DELAY_US;
    }
    Ok(config)
}

fn grid_config(args: &GridArgs, layout: &Layout) -> Result<GridConfig, Stop> {
    embedded::check_rate(args.rate)?;
    let wrong = |text: String| Err(Stop::Failed(text));
    if !(args.limit > 0.0 && args.limit.is_finite()) {
        return wrong(format!("--limit {}: expected a ratio above 0", args.limit));
    }
    if !(args.hog_duty > 0.0 && args.hog_duty <= 100.0) {
        return wrong(format!("--hog-duty {}: expected above 0 and at most 100 per cent", args.hog_duty));
    }
    let seconds = args.seconds.unwrap_or(if args.quick { 0.5 } else { 2.0 });
    if !(seconds > 0.0 && seconds <= 3600.0) {
        return wrong(format!("--seconds {seconds}: expected more than 0"));
    }
    let cluster = embedded::config(args.shards, args.rate, layout, &args.transport, &args.set)?;
    let hog = HogConfig { core: args.hog_core.or(layout.client_core).unwrap_or_default(), duty: args.hog_duty / 100.0 };
    let labels = embedded::labels(&cluster)?;
    if hog.core >= labels.cores {
        return wrong(format!(
            "--hog-core {}: this process may use {} core(s), numbered from 0",
            hog.core, labels.cores
        ));
    }
    let (computes_ns, scenarios) = parse_cells(&args.cells)?;
    let mut modes = vec![Ordering::Fixed, Ordering::FreeEvent];
    if args.free_tick {
        modes.push(Ordering::FreeTick);
    }
    Ok(GridConfig {
        computes_ns,
        scenarios,
        modes,
        repetitions: args.repetitions.unwrap_or(if args.quick { 3 } else { 5 }),
        run_ns: (seconds * 1e9) as u64,
        warm_up_ns: 500_000_000,
        drain_ns: 5_000_000_000,
        shards: args.shards,
        rate_per_s: args.rate,
        record_bytes: RECORD_BYTES,
        workers: args.workers.into(),
        hog,
        limit: args.limit,
        seed: args.seed.map_or_else(embedded::random_seed, Ok)?,
        quiet: !std::io::IsTerminal::is_terminal(&std::io::stderr()),
        labels,
    })
}

/// Reads `compute=0,1.5` and `scenario=steady`; what is not named is everything.
fn parse_cells(items: &[String]) -> Result<(Vec<u64>, Vec<Scenario>), String> {
    let (mut computes_ns, mut scenarios) = (Vec::new(), Vec::new());
    for item in items {
        let (key, values) = item.split_once('=').unwrap_or((item, ""));
        for value in values.split(',') {
            match key {
                "compute" => push(&mut computes_ns, compute_ns(value)?),
                "scenario" => {
                    let known = Scenario::ALL.map(Scenario::name).join(", ");
                    let scenario = Scenario::from_name(value);
                    push(
                        &mut scenarios,
                        scenario.ok_or_else(|| {
                            format!("--cells {item}: there is no scenario '{value}'; expected {known}")
                        })?,
                    );
                }
                _ => return Err(format!("--cells {item}: expected compute=MS,… or scenario=NAME,…")),
            }
        }
    }
    if computes_ns.is_empty() {
        computes_ns = COMPUTES_NS.to_vec();
    }
    if scenarios.is_empty() {
        scenarios = Scenario::ALL.to_vec();
    }
    Ok((computes_ns, scenarios))
}

fn compute_ns(value: &str) -> Result<u64, String> {
    let ms = value.parse().ok().filter(|ms| (0.0..=COMPUTE_MS_MAX).contains(ms));
    let ms: f64 = ms.ok_or_else(|| format!("--cells compute={value}: expected milliseconds up to {COMPUTE_MS_MAX}"))?;
    Ok((ms * 1e6).round() as u64)
}

/// A cell that is named twice is run once.
fn push<T: PartialEq>(list: &mut Vec<T>, value: T) {
    if !list.contains(&value) {
        list.push(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(items: &[&str]) -> Result<(Vec<u64>, Vec<Scenario>), String> {
        parse_cells(&items.iter().map(|item| (*item).to_owned()).collect::<Vec<String>>())
    }

    #[test]
    fn cells_are_chosen_by_computation_and_scenario() {
        assert_eq!(parse(&[]), Ok((COMPUTES_NS.to_vec(), Scenario::ALL.to_vec())));
        let chosen = parse(&["compute=0,1.5", "scenario=bursts,steady,bursts"]);
        assert_eq!(chosen, Ok((vec![0, 1_500_000], vec![Scenario::Bursts, Scenario::Steady])));
        assert_eq!(parse(&["compute=0.1"]), Ok((vec![100_000], Scenario::ALL.to_vec())));
        for (item, expected) in [
            ("compute=fast", "compute=fast: expected milliseconds"),
            ("compute=-1", "compute=-1: expected milliseconds"),
            ("compute", "compute=: expected milliseconds"),
            ("scenario=calm", "no scenario 'calm'; expected steady, bursts, slow-shard, hog, uneven"),
            ("shards=2", "expected compute=MS"),
        ] {
            let error = parse(&[item]).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
