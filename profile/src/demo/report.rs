//! A demo's results as a text table for people and as JSON for programs.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use antelog_protocol::Ordering;
use serde::Serialize;

use super::gain::{Gain, Model};
use super::{Demo, ModeResult};
use crate::load::mean_rate_per_s;
use crate::outside::OutsideLoad;
use crate::stats::{Series, Spread, Summary, Totals};

/// Columns that the table is at most wide.
pub const WIDTH: usize = 100;

/// The latencies of a mode under the names that reports use.
fn latencies(result: &ModeResult) -> [(&'static str, &Series); 4] {
    let measured = &result.measured;
    [
        ("append", &measured.append),
        ("delivery", &measured.delivery),
        ("confirm", &measured.confirm),
        ("e2e", &measured.e2e),
    ]
}

/// The results as a text table, at most [`WIDTH`] columns wide, ending in a line break.
pub fn table(demo: &Demo) -> String {
    let mut text = String::new();
    let heads = ["mean", "p50", "p90", "p99", "p99.9", "records"];
    let heads: String = heads.iter().map(|head| format!("{head:>12}")).collect();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{:<22}{heads}", "latency in µs");
    for result in &demo.modes {
        for (index, (name, series)) in latencies(result).into_iter().enumerate() {
            let mode = if index == 0 { result.mode.name() } else { "" };
            let s = series.summary();
            let values = [s.mean_us, s.p50_us, s.p90_us, s.p99_us, s.p999_us].map(|us| format!("{us:>12.1}")).concat();
            let _ = writeln!(text, "{mode:<12}{name:<10}{values}{:>12}", s.count);
        }
        let order = result.order_path_us.map_or("not known".to_owned(), |us| format!("{us:.1}"));
        let queue = result.measured.queue.mean_us();
        let compute = result.measured.compute.mean_us();
        let no_ops = result.counted.no_op_share() * 100.0;
        let failed = result.measured.totals.failed;
        let parts = format!("order path O {order}, queue Q {queue:.1}, compute C {compute:.1}");
        wrap(&mut text, &format!("{:<12}{parts}; no-ops {no_ops:.1} %, misspeculated {failed}", ""));
    }
    for free in [Ordering::FreeEvent, Ordering::FreeTick] {
        if let Some(gain) = demo.gain(free) {
            write_gain(&mut text, free, &gain);
        }
    }
    text.push('\n');
    for line in about(demo) {
        wrap(&mut text, &line);
    }
    text
}

fn write_gain(text: &mut String, free: Ordering, gain: &Gain) {
    let spread = |s: Spread| format!("{:.2}× ({:.2}–{:.2})", s.median, s.min, s.max);
    let pairs = gain.delivery_p50.count;
    text.push('\n');
    wrap(text, &format!("{} / fixed, median of {pairs} pairs (min–max)", free.name()));
    wrap(text, &format!("  {:<14}{}", "delivery p50", spread(gain.delivery_p50)));
    wrap(text, &format!("  {:<14}{}", "e2e p50", spread(gain.e2e_p50)));
    let (predicted, best) = (gain.e2e_predicted, gain.model.best_gain());
    let e2e = spread(gain.e2e_mean);
    let limit = "(limit at equal O: 2×)";
    wrap(text, &format!("  {:<14}{e2e:<24}predicted {predicted:.2}×, at most {best:.2}× {limit}", "e2e mean"));
    let m: &Model = &gain.model;
    let (d, fixed_o) = (m.delivery_us, m.fixed_order_us);
    let (free_us, fixed_us) = (m.free_us(), m.fixed_us());
    let sum = |o: f64, q: f64, c: f64| format!("{o:.0} + {q:.0} + {c:.0}");
    let free_parts = sum(m.free_order_us, m.free_queue_us, m.free_compute_us);
    let fixed_parts = sum(d, m.fixed_queue_us, m.fixed_compute_us);
    wrap(text, &format!("  its median repetition: free = D + O + Q + C = {d:.0} + {free_parts} = {free_us:.0} µs;"));
    let fixed = format!("max({d:.0} + {fixed_o:.0}, {fixed_parts})");
    wrap(text, &format!("                         fixed = max(D + O, D + Q + C) = {fixed} = {fixed_us:.0} µs"));
}

/// `1 shard`, `2 shards`.
pub(crate) fn plural(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// What went wrong with a mode's records, if anything.
pub(crate) fn wrongs(result: &ModeResult) -> Option<String> {
    let Totals { refused, disconnects, foreign, unfinished, moved, .. } = result.measured.totals;
    let counts = [
        (unfinished, "records not finished in time"),
        (refused, "records refused"),
        (moved, "records moved to another shard"),
        (disconnects, "connections lost"),
        (foreign, "records of others"),
    ];
    let wrong: Vec<String> = counts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
    (!wrong.is_empty()).then(|| format!("NOTE {}: {}", result.mode.name(), wrong.join(", ")))
}

/// What else the machine did meanwhile.
pub(crate) fn outside(load: Option<OutsideLoad>) -> String {
    match load {
        Some(OutsideLoad { load_average_before, busy_cores, steal_share, cores }) => format!(
            "outside load: load average {load_average_before:.2} before; meanwhile others kept {busy_cores:.2} of {} \
             busy, {:.1} % stolen",
            plural(cores, "core"),
            steal_share * 100.0
        ),
        None => "outside load: not known on this system".to_owned(),
    }
}

/// Under what circumstances this was measured, and what went wrong.
fn about(demo: &Demo) -> Vec<String> {
    let config = &demo.config;
    let labels = &config.labels;
    let mut lines = vec![
        format!(
            "transport {}, durability {}, launch {}, {}; {}, each {} records/s of {} bytes; {}, compute {} µs \
             {}, {}",
            labels.transport,
            labels.durability,
            labels.launch,
            plural(labels.cores, "core"),
            plural(config.load.writers.len(), "shard"),
            mean_rate_per_s(&config.load.writers),
            config.load.record_bytes,
            if config.merged { "one consumer of the merged order" } else { "one consumer per shard" },
            config.consumer.compute_ns as f64 / 1e3,
            config.consumer.kind.name(),
            plural(config.consumer.workers, "worker"),
        ),
        format!(
            "{} per mode, interleaved in random order (seed {}); each {:.2} s after a warm-up of {:.2} s that is dropped; \
             latencies run from intended send times",
            plural(config.repetitions as usize, "repetition"),
            config.seed,
            demo.split.measure_ns as f64 / 1e9,
            demo.split.warm_up_ns as f64 / 1e9,
        ),
    ];
    lines.push(outside(demo.outside));
    lines.extend(demo.modes.iter().filter_map(wrongs));
    lines.extend(demo.failures.iter().map(|failure| format!("FAILED {failure}")));
    lines
}

/// Adds a line, broken between words where it would be too wide.
fn wrap(text: &mut String, line: &str) {
    wrap_by(text, line, 2);
}

/// As [`wrap`], with what follows the first break indented by so many columns.
pub(crate) fn wrap_by(text: &mut String, line: &str, indent: usize) {
    let mut width = 0;
    for (index, word) in line.split(' ').enumerate() {
        let length = word.chars().count();
        if index > 0 && width + 1 + length > WIDTH {
            let _ = write!(text, "\n{:indent$}", "");
            width = indent;
        } else if index > 0 {
            text.push(' ');
            width += 1;
        }
        text.push_str(word);
        width += length;
    }
    text.push('\n');
}

#[derive(Serialize)]
struct Json<'a> {
    version: &'static str,
    transport: &'a str,
    durability: &'a str,
    launch: &'a str,
    cores: usize,
    shards: usize,
    rate_per_s: f64,
    record_bytes: usize,
    compute_us: f64,
    compute_kind: &'static str,
    workers: usize,
    seconds: f64,
    repetitions: u32,
    warm_up_s: f64,
    measure_s: f64,
    seed: u64,
    modes: BTreeMap<String, JsonMode>,
    gain: Option<JsonGain>,
    gain_spread: Option<Gain>,
    gain_spread_free_tick: Option<Gain>,
    outside_load: Option<OutsideLoad>,
    failures: &'a [String],
}

/// A mode's figures.
#[derive(Serialize)]
pub(crate) struct JsonMode {
    append: Summary,
    delivery: Summary,
    confirm: Summary,
    e2e: Summary,
    append_service: Summary,
    delivery_service: Summary,
    /// Null for a free mode without a fixed one beside it.
    order_path_us: Option<f64>,
    queue_us: f64,
    compute_us: f64,
    no_op_share: f64,
    /// What the cluster counted, by name, without warm-ups and draining.
    counted: BTreeMap<String, u64>,
    counted_in_warm_ups: BTreeMap<String, u64>,
    failed: u64,
    totals: Totals,
    repetitions: usize,
    e2e_mean_spread: Option<Spread>,
    delivery_p50_spread: Option<Spread>,
    e2e_p50_spread: Option<Spread>,
}

#[derive(Serialize)]
struct JsonGain {
    delivery_p50: f64,
    e2e_p50: f64,
    e2e_mean: f64,
    e2e_predicted: f64,
}

impl JsonMode {
    pub(crate) fn of(result: &ModeResult) -> JsonMode {
        let [append, delivery, confirm, e2e] = latencies(result).map(|(_, series)| series.summary());
        let measured = &result.measured;
        let spread = |figure: fn(&super::Repetition) -> f64| {
            Spread::of(&result.repetitions.iter().map(figure).collect::<Vec<f64>>())
        };
        JsonMode {
            append,
            delivery,
            confirm,
            e2e,
            append_service: measured.append_service.summary(),
            delivery_service: measured.delivery_service.summary(),
            order_path_us: result.order_path_us,
            queue_us: measured.queue.mean_us(),
            compute_us: measured.compute.mean_us(),
            no_op_share: result.counted.no_op_share(),
            counted: result.counted.by_name().clone(),
            counted_in_warm_ups: result.counted_before.by_name().clone(),
            failed: measured.totals.failed,
            totals: measured.totals,
            repetitions: result.repetitions.len(),
            e2e_mean_spread: spread(|r| r.e2e_mean_us),
            delivery_p50_spread: spread(|r| r.delivery_p50_us),
            e2e_p50_spread: spread(|r| r.e2e_p50_us),
        }
    }
}

/// The results as JSON. `gain` is of `fixed` over `free-event`: medians of per-repetition ratios, and the model's
/// prediction; null when either mode was not run.
pub fn json(demo: &Demo) -> String {
    let config = &demo.config;
    let event = demo.gain(Ordering::FreeEvent);
    let json = Json {
        version: env!("CARGO_PKG_VERSION"),
        transport: &config.labels.transport,
        durability: &config.labels.durability,
        launch: &config.labels.launch,
        cores: config.labels.cores,
        shards: config.load.writers.len(),
        rate_per_s: mean_rate_per_s(&config.load.writers),
        record_bytes: config.load.record_bytes,
        compute_us: config.consumer.compute_ns as f64 / 1e3,
        compute_kind: config.consumer.kind.name(),
        workers: config.consumer.workers,
        seconds: config.seconds,
        repetitions: config.repetitions,
        warm_up_s: demo.split.warm_up_ns as f64 / 1e9,
        measure_s: demo.split.measure_ns as f64 / 1e9,
        seed: config.seed,
        modes: demo.modes.iter().map(|r| (r.mode.name().replace('-', "_"), JsonMode::of(r))).collect(),
        gain: event.map(|gain| JsonGain {
            delivery_p50: gain.delivery_p50.median,
            e2e_p50: gain.e2e_p50.median,
            e2e_mean: gain.e2e_mean.median,
            e2e_predicted: gain.e2e_predicted,
        }),
        gain_spread: event,
        gain_spread_free_tick: demo.gain(Ordering::FreeTick),
        outside_load: demo.outside,
        failures: &demo.failures,
    };
    serde_json::to_string_pretty(&json).expect("numbers and text with text keys are valid JSON")
}
