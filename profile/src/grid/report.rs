//! A grid's results: beforehand what it will do and how long that takes, a paragraph per cell, a summary, and JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use antelog_protocol::Ordering;
use serde::Serialize;

use super::{BURST_RECORDS, Cell, CellResult, Grid, GridConfig, REPORT_DELAY_US, Scenario, UTILISATION_MAX, Verdict};
use crate::demo::Demo;
use crate::demo::gain::Gain;
use crate::demo::report::{JsonMode, outside, plural, wrap_by, wrongs};
use crate::outside::OutsideLoad;
use crate::stats::Spread;

/// Starting a cluster, connecting to it and stopping it, in seconds: for the estimate only.
const OVERHEAD_S: f64 = 0.1;

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// About how long the grid takes, in seconds, when no run has to be waited for.
pub fn estimate_s(config: &GridConfig) -> f64 {
    let last_ms: f64 = config.computes_ns.iter().map(|ns| ms(*ns)).sum();
    let drains = last_ms / 1e3 * config.runs() as f64 / config.computes_ns.len().max(1) as f64;
    config.runs() as f64 * (config.run_ns as f64 / 1e9 + OVERHEAD_S) + drains
}

/// What will be done, ending in a line break.
///
/// # Errors
/// When the runs are too short to measure.
pub fn heading(config: &GridConfig) -> Result<String, String> {
    let split = config.split()?;
    let seconds = estimate_s(config);
    let long = if seconds < 90.0 { format!("{seconds:.0} s") } else { format!("{:.0} minutes", seconds / 60.0) };
    let modes: Vec<&str> = config.modes.iter().map(|mode| mode.name()).collect();
    let labels = &config.labels;
    let mut text = String::new();
    wrap_by(
        &mut text,
        &format!("{}, about {long}; Ctrl-C prints what there is", plural(config.cells().len(), "cell")),
        2,
    );
    let lines = [
        format!(
            "each: {} {} times, interleaved in random order (seed {}), {:.2} s after a warm-up of {:.2} s that is dropped; \
             the runs of a repetition have the same intended send times, and latencies run from these",
            modes.join(" and "),
            config.repetitions,
            config.seed,
            split.measure_ns as f64 / 1e9,
            split.warm_up_ns as f64 / 1e9,
        ),
        format!(
            "load: {}, {} records/s of {} bytes per shard; one consumer per shard, each up to {} batches at once, computed \
             by timer; the rate is lowered where more than {:.0} % of them would be busy",
            plural(config.shards.into(), "shard"),
            config.rate_per_s,
            config.record_bytes,
            config.workers,
            UTILISATION_MAX * 100.0,
        ),
        format!(
            "transport {}, durability {}, launch {}, {}",
            labels.transport,
            labels.durability,
            labels.launch,
            plural(labels.cores, "core")
        ),
    ];
    lines.iter().for_each(|line| wrap_by(&mut text, line, 2));
    for scenario in &config.scenarios {
        wrap_by(&mut text, &format!("  {:<11}{}", scenario.name(), about(*scenario, config)), 13);
    }
    Ok(text)
}

fn about(scenario: Scenario, config: &GridConfig) -> String {
    match scenario {
        Scenario::Steady => "regular arrivals at the same rate everywhere".to_owned(),
        Scenario::Bursts => {
            format!("every writer sends {BURST_RECORDS} records at once, phases random, same mean rate")
        }
        Scenario::SlowShard => {
            format!("shard {} holds every report back by {REPORT_DELAY_US} µs", config.shards.saturating_sub(1))
        }
        Scenario::Hog => {
            let (core, duty) = (config.hog.core, config.hog.duty * 100.0);
            format!("another thread wants core {core} for {duty:.0} % of the time")
        }
        Scenario::Uneven => "shards' rates differ at the same mean; their quotas, as configured, do not".to_owned(),
    }
}

fn title(cell: &Cell) -> String {
    format!("{}, compute {} ms", cell.scenario.name(), ms(cell.compute_ns))
}

fn rates(cell: &Cell) -> String {
    let mut rates: Vec<String> = cell.writers.iter().map(|writer| format!("{:.0}", writer.rate_per_s)).collect();
    let each = if rates.windows(2).all(|pair| pair[0] == pair[1]) { " per shard" } else { "" };
    if !each.is_empty() {
        rates.truncate(1);
    }
    format!("{} records/s{each}", rates.join(" + "))
}

fn spread(spread: Option<Spread>) -> String {
    let shown = |s: Spread| format!("{:.2} ({:.2}–{:.2})", s.median, s.min, s.max);
    spread.map_or("none".to_owned(), shown)
}

/// A cell's figures and its verdict, ending in a line break. The first word of the last line is the verdict.
pub fn cell(result: &CellResult, limit: f64) -> String {
    let CellResult { cell, demo, verdict } = result;
    let mut text = String::new();
    let share = cell.utilisation * 100.0;
    wrap_by(&mut text, &format!("{}: {}, {share:.1} % of workers busy", title(cell), rates(cell)), 2);
    if let Some(demo) = demo {
        write_modes(&mut text, demo);
        write_ratios(&mut text, result, demo);
        write_counters(&mut text, demo);
        let notes = demo.modes.iter().filter_map(wrongs).chain([outside(demo.outside)]);
        let failures = demo.failures.iter().map(|failure| format!("FAILED {failure}"));
        notes.chain(failures).for_each(|line| wrap_by(&mut text, &format!("  {line}"), 4));
    }
    let why = match verdict {
        Verdict::Ok => {
            let ratio = spread(result.ratio(|r| r.e2e_mean_us));
            format!("fixed / free-event {ratio}, limit {limit}")
        }
        Verdict::Worse(why) | Verdict::Failed(why) => why.clone(),
    };
    wrap_by(&mut text, &format!("{} {}: {why}", verdict.name(), title(cell)), 2);
    text
}

fn write_modes(text: &mut String, demo: &Demo) {
    let heads: String = ["mean", "p50", "p99", "records"].iter().map(|head| format!("{head:>12}")).collect();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "  {:<12}{heads}{:>10}{:>16}", "e2e in µs", "no-ops", "misspeculated");
    for mode in &demo.modes {
        let e2e = mode.measured.e2e.summary();
        let figures = [e2e.mean_us, e2e.p50_us, e2e.p99_us].map(|us| format!("{us:>12.1}")).concat();
        let no_ops = format!("{:.1} %", mode.counted.no_op_share() * 100.0);
        let failed = mode.measured.totals.failed;
        let _ = writeln!(text, "  {:<12}{figures}{:>12}{no_ops:>10}{failed:>16}", mode.mode.name(), e2e.count);
    }
}

fn write_ratios(text: &mut String, result: &CellResult, demo: &Demo) {
    let mean = result.ratio(|r| r.e2e_mean_us);
    let (p50, p99) = (result.ratio(|r| r.e2e_p50_us), result.ratio(|r| r.e2e_p99_us));
    let pairs = plural(mean.map_or(0, |ratio| ratio.count), "pair");
    let (mean, p50, p99) = (spread(mean), spread(p50), spread(p99));
    let head = format!("  fixed / free-event, median of {pairs} (min–max)");
    wrap_by(text, &format!("{head}: e2e mean {mean}, p50 {p50}, p99 {p99}"), 4);
    if let Some(Gain { e2e_mean, delivery_p50, e2e_predicted, model, .. }) = demo.gain(Ordering::FreeEvent) {
        let (gain, best, delivery) = (e2e_mean.median, model.best_gain(), delivery_p50.median);
        let line = format!(
            "  e2e gain {gain:.2}×, predicted {e2e_predicted:.2}×, at most {best:.2}×; delivery {delivery:.2}×"
        );
        wrap_by(text, &line, 4);
    }
}

/// All counters that moved, summed over the repetitions.
fn write_counters(text: &mut String, demo: &Demo) {
    for mode in &demo.modes {
        wrap_by(text, &format!("  {:<12}{}", mode.mode.name(), mode.counted.compact()), 14);
        let before = mode.counted_before.only_here(&mode.counted).compact();
        if !before.is_empty() {
            wrap_by(text, &format!("  {:<12}in the warm-ups only: {before}", ""), 14);
        }
    }
}

/// All ratios in one table and the count, which is the last line.
pub fn summary(grid: &Grid) -> String {
    let config = &grid.config;
    let mut text = String::from("fixed / free-event, mean e2e, median of pairs, by compute in ms\n");
    let heads: String = config.computes_ns.iter().map(|ns| format!("{:>9}", ms(*ns))).collect();
    let _ = writeln!(text, "  {:<12}{heads}", "");
    for scenario in &config.scenarios {
        let shown = |compute_ns: &u64| {
            let mut results = grid.results.iter();
            let result = results.find(|r| r.cell.scenario == *scenario && r.cell.compute_ns == *compute_ns);
            let ratio = result.and_then(|r| r.ratio(|r| r.e2e_mean_us)).map(|ratio| format!("{:.2}", ratio.median));
            let mark = match result.map(|r| &r.verdict) {
                None | Some(Verdict::Ok) => " ",
                Some(Verdict::Worse(_)) => "!",
                Some(Verdict::Failed(_)) => "?",
            };
            format!("{:>8}{mark}", ratio.unwrap_or_else(|| "–".to_owned()))
        };
        let row: String = config.computes_ns.iter().map(shown).collect();
        let _ = writeln!(text, "  {:<12}{}", scenario.name(), row.trim_end());
    }
    let (worse, failed) = (grid.count("worse"), grid.count("failed"));
    for (count, mark, word) in [(worse, "!", "worse"), (failed, "?", "failed")] {
        if count > 0 {
            let _ = writeln!(text, "  {mark} {word}");
        }
    }
    let planned = config.cells().len();
    let ran = grid.results.len();
    let interrupted = if ran < planned { format!(" of {planned}, interrupted") } else { String::new() };
    let failed = if failed > 0 { format!(", {failed} failed") } else { String::new() };
    let _ = writeln!(text, "{}{interrupted}, {worse} worse{failed}", plural(ran, "cell"));
    text
}

#[derive(Serialize)]
struct Json<'a> {
    version: &'static str,
    transport: &'a str,
    durability: &'a str,
    launch: &'a str,
    cores: usize,
    shards: u16,
    record_bytes: usize,
    workers: usize,
    repetitions: u32,
    warm_up_s: f64,
    measure_s: f64,
    seed: u64,
    limit: f64,
    cells_planned: usize,
    worse: usize,
    failed: usize,
    cells: Vec<JsonCell>,
}

#[derive(Serialize)]
struct JsonCell {
    scenario: &'static str,
    compute_ms: f64,
    rates_per_s: Vec<f64>,
    utilisation: f64,
    verdict: &'static str,
    why: Option<String>,
    /// Of fixed / free-event; null when that was not measured.
    e2e_mean_ratio: Option<Spread>,
    e2e_p50_ratio: Option<Spread>,
    e2e_p99_ratio: Option<Spread>,
    gain: Option<Gain>,
    modes: BTreeMap<String, JsonMode>,
    outside_load: Option<OutsideLoad>,
    failures: Vec<String>,
}

impl JsonCell {
    fn of(result: &CellResult) -> JsonCell {
        let CellResult { cell, demo, verdict } = result;
        let modes = demo.iter().flat_map(|demo| &demo.modes);
        JsonCell {
            scenario: cell.scenario.name(),
            compute_ms: ms(cell.compute_ns),
            rates_per_s: cell.writers.iter().map(|writer| writer.rate_per_s).collect(),
            utilisation: cell.utilisation,
            verdict: verdict.name(),
            why: match verdict {
                Verdict::Ok => None,
                Verdict::Worse(why) | Verdict::Failed(why) => Some(why.clone()),
            },
            e2e_mean_ratio: result.ratio(|r| r.e2e_mean_us),
            e2e_p50_ratio: result.ratio(|r| r.e2e_p50_us),
            e2e_p99_ratio: result.ratio(|r| r.e2e_p99_us),
            gain: demo.as_ref().and_then(|demo| demo.gain(Ordering::FreeEvent)),
            modes: modes.map(|mode| (mode.mode.name().replace('-', "_"), JsonMode::of(mode))).collect(),
            outside_load: demo.as_ref().and_then(|demo| demo.outside),
            failures: demo.as_ref().map(|demo| demo.failures.clone()).unwrap_or_default(),
        }
    }
}

/// The results as JSON.
///
/// # Errors
/// When the runs are too short to measure.
pub fn json(grid: &Grid) -> Result<String, String> {
    let config = &grid.config;
    let split = config.split()?;
    let json = Json {
        version: env!("CARGO_PKG_VERSION"),
        transport: &config.labels.transport,
        durability: &config.labels.durability,
        launch: &config.labels.launch,
        cores: config.labels.cores,
        shards: config.shards,
        record_bytes: config.record_bytes,
        workers: config.workers,
        repetitions: config.repetitions,
        warm_up_s: split.warm_up_ns as f64 / 1e9,
        measure_s: split.measure_ns as f64 / 1e9,
        seed: config.seed,
        limit: config.limit,
        cells_planned: config.cells().len(),
        worse: grid.count("worse"),
        failed: grid.count("failed"),
        cells: grid.results.iter().map(JsonCell::of).collect(),
    };
    Ok(serde_json::to_string_pretty(&json).expect("numbers and text with text keys are valid JSON"))
}
