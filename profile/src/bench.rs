//! The bench: how many records a cluster moves, what the shortest way of one record costs beside the bare network, and
//! what an idle cluster costs.
//!
//! Repetitions are interleaved: each measures the floor, one record under way, every window, and the idle cluster, so that
//! what the machine does meanwhile meets all of them alike. Figures are medians over the repetitions, with the least and the
//! greatest.

pub mod closed;
mod table;

use std::thread;
use std::time::Duration;

use antelog_protocol::{Ordering, ShardId};
use serde::Serialize;

use self::closed::ClosedConfig;
use crate::demo::Labels;
use crate::floor::{self, FloorConfig};
use crate::log::{Clock, Log};
use crate::outside::{self, OutsideLoad, Watch};
use crate::stats::Spread;

/// With one record under way: the pause before the next, in nanoseconds.
const LONE_PAUSE_NS: u64 = 200_000;

/// What to run.
#[derive(Clone, Debug)]
pub struct BenchConfig {
    /// The modes, in the order of the report.
    pub modes: Vec<Ordering>,
    /// The shards to write to.
    pub shards: Vec<ShardId>,
    /// Bytes per record.
    pub record_bytes: usize,
    /// Numbers of records under way, each measured apart.
    pub windows: Vec<u64>,
    /// One subscription to all shards for the windows, merged in position order. The single record always has a
    /// subscription to its shard: in the merged order it would wait for slots of other shards.
    pub merged: bool,
    /// How often everything is measured.
    pub repetitions: u32,
    /// Nanoseconds of each measurement.
    pub measure_ns: u64,
    /// Cores for the floor; see [`FloorConfig::cores`]. Empty: the floor is not measured.
    pub floor_cores: Vec<usize>,
    /// Whether an idle cluster is watched.
    pub idle: bool,
    /// For the reports.
    pub labels: Labels,
}

/// What a cluster has counted, cumulative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdleCounts {
    /// Cuts committed.
    pub cuts: u64,
    /// Records and no-ops written.
    pub slots: u64,
    /// Reports of primaries and backups.
    pub reports: u64,
}

/// Provides clusters.
pub trait Rig {
    /// A client of a cluster.
    type Log: Log;

    /// Starts a new and empty cluster, spinning as the machine allows, and a client that is connected to it.
    ///
    /// # Errors
    /// When that fails.
    fn start(&mut self, mode: Ordering) -> Result<Self::Log, String>;

    /// Ends the cluster.
    ///
    /// # Errors
    /// When it has come to harm.
    fn stop(&mut self, log: Self::Log) -> Result<(), String>;

    /// Starts a cluster whose threads park, without a client. It is ended by [`stop_idle`](Self::stop_idle).
    ///
    /// # Errors
    /// When that fails.
    fn start_idle(&mut self) -> Result<(), String>;

    /// What the idle cluster has counted.
    fn counted(&mut self) -> IdleCounts;

    /// Ends the idle cluster.
    ///
    /// # Errors
    /// When it has come to harm.
    fn stop_idle(&mut self) -> Result<(), String>;
}

/// One mode at one window. Latencies are in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The mode's name.
    pub mode: &'static str,
    /// Records under way.
    pub window: u64,
    /// Records per second.
    pub records_per_s: Spread,
    /// Median of send → delivery.
    pub delivery_p50_us: Spread,
    /// 99th percentile of send → delivery.
    pub delivery_p99_us: Spread,
    /// Median of send → acknowledgement.
    pub append_p50_us: Spread,
    /// 99th percentile of send → acknowledgement.
    pub append_p99_us: Spread,
    /// Window 1: delivery's median by the floor's TCP round trip, spinning, of the same repetition.
    pub delivery_by_floor: Option<Spread>,
}

/// The idle cluster.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct IdleRow {
    /// Share of one core that the process used, 0 to 1.
    pub cpu_share: Spread,
    /// Cuts committed, all repetitions together.
    pub cuts: u64,
    /// Slots written, all repetitions together.
    pub slots: u64,
    /// Reports per second.
    pub reports_per_s: Spread,
}

/// Results.
#[derive(Clone, Debug, Serialize)]
pub struct Bench {
    /// antelog's version.
    pub version: &'static str,
    /// Bytes per record.
    pub record_bytes: usize,
    /// Shards written to.
    pub shards: usize,
    /// One subscription for all shards.
    pub merged: bool,
    /// How often everything was measured.
    pub repetitions: u32,
    /// Median TCP round trip on the same cores, spinning, in microseconds.
    pub floor_us: Option<Spread>,
    /// By mode and window.
    pub rows: Vec<Row>,
    /// The idle cluster.
    pub idle: Option<IdleRow>,
    /// The network, durability and launch.
    pub cluster: String,
    /// What else the machine did.
    pub outside_load: Option<OutsideLoad>,
}

#[derive(Default)]
struct Samples {
    rate: Vec<f64>,
    delivery: [Vec<f64>; 2],
    append: [Vec<f64>; 2],
    by_floor: Vec<f64>,
}

/// Measures everything.
///
/// # Errors
/// What went wrong first; a record that was lost, doubled or changed is an error too.
pub fn run<R: Rig, C: Clock + Clone>(rig: &mut R, clock: &C, config: &BenchConfig) -> Result<Bench, String> {
    let mut windows = config.windows.clone();
    windows.sort_unstable();
    windows.dedup();
    if config.repetitions == 0 || windows.is_empty() || config.modes.is_empty() {
        return Err("a bench needs a repetition, a mode and a window".to_owned());
    }
    let watch = Watch::start();
    let pairs: Vec<(Ordering, u64)> = config.modes.iter().flat_map(|m| windows.iter().map(|w| (*m, *w))).collect();
    let mut samples: Vec<Samples> = pairs.iter().map(|_| Samples::default()).collect();
    let (mut floors, mut idles) = (Vec::new(), Idles::default());
    for _ in 0..config.repetitions {
        let floor_us = match config.floor_cores.is_empty() {
            true => None,
            false => Some(measure_floor(config)?),
        };
        floors.extend(floor_us);
        for ((mode, window), samples) in pairs.iter().zip(&mut samples) {
            let context = |error| format!("{}, {window} under way: {error}", mode.name());
            let mut log = rig.start(*mode).map_err(context)?;
            let closed = closed::drive(&mut log, clock, &closed_config(config, *window));
            rig.stop(log).map_err(context)?;
            samples.add(&closed.map_err(context)?, floor_us.filter(|_| *window == 1));
        }
        if config.idle {
            idles.add(rig, config.measure_ns)?;
        }
    }
    let rows = pairs.into_iter().zip(&samples).filter_map(|((mode, window), s)| s.row(mode, window));
    let Labels { transport, durability, launch, cores } = &config.labels;
    Ok(Bench {
        version: env!("CARGO_PKG_VERSION"),
        record_bytes: config.record_bytes,
        shards: config.shards.len(),
        merged: config.merged,
        repetitions: config.repetitions,
        floor_us: Spread::of(&floors),
        rows: rows.collect(),
        idle: idles.row(),
        cluster: format!("transport {transport}, durability {durability}, launch {launch}, {cores} cores"),
        outside_load: watch.and_then(|w| w.stop()),
    })
}

fn measure_floor(config: &BenchConfig) -> Result<f64, String> {
    let each_ns = config.measure_ns / 4;
    let floor = floor::measure(&FloorConfig { cores: config.floor_cores.clone(), each_ns })?;
    Ok(floor.tcp_spinning.round_trip.p50_us)
}

fn closed_config(config: &BenchConfig, window: u64) -> ClosedConfig {
    ClosedConfig {
        shards: config.shards.clone(),
        record_bytes: config.record_bytes,
        window,
        pause_ns: if window == 1 { LONE_PAUSE_NS } else { 0 },
        merged: config.merged && window > 1,
        warm_up_ns: config.measure_ns / 4,
        measure_ns: config.measure_ns,
    }
}

impl Samples {
    fn add(&mut self, closed: &closed::Closed, floor_us: Option<f64>) {
        self.rate.push(closed.records_per_s);
        for (kept, series) in [(&mut self.delivery, &closed.delivery), (&mut self.append, &closed.append)] {
            kept[0].push(series.quantile_us(0.5));
            kept[1].push(series.quantile_us(0.99));
        }
        self.by_floor.extend(floor_us.map(|floor_us| closed.delivery.quantile_us(0.5) / floor_us));
    }

    fn row(&self, mode: Ordering, window: u64) -> Option<Row> {
        Some(Row {
            mode: mode.name(),
            window,
            records_per_s: Spread::of(&self.rate)?,
            delivery_p50_us: Spread::of(&self.delivery[0])?,
            delivery_p99_us: Spread::of(&self.delivery[1])?,
            append_p50_us: Spread::of(&self.append[0])?,
            append_p99_us: Spread::of(&self.append[1])?,
            delivery_by_floor: Spread::of(&self.by_floor),
        })
    }
}

#[derive(Default)]
struct Idles {
    cpu_share: Vec<f64>,
    reports_per_s: Vec<f64>,
    cuts: u64,
    slots: u64,
}

impl Idles {
    /// Watches an idle cluster. The calling thread sleeps, so that what the process uses is the cluster's.
    fn add<R: Rig>(&mut self, rig: &mut R, time_ns: u64) -> Result<(), String> {
        rig.start_idle()?;
        // Connections and the first window come first.
        thread::sleep(Duration::from_millis(300));
        let (before, cpu_before) = (rig.counted(), outside::threads_cpu_s());
        thread::sleep(Duration::from_nanos(time_ns));
        let (after, cpu_after) = (rig.counted(), outside::threads_cpu_s());
        rig.stop_idle()?;
        let seconds = time_ns as f64 / 1e9;
        self.cpu_share.extend(cpu_before.zip(cpu_after).map(|(before, after)| (after - before) / seconds));
        self.reports_per_s.push((after.reports - before.reports) as f64 / seconds);
        self.cuts += after.cuts - before.cuts;
        self.slots += after.slots - before.slots;
        Ok(())
    }

    fn row(&self) -> Option<IdleRow> {
        Some(IdleRow {
            cpu_share: Spread::of(&self.cpu_share)?,
            cuts: self.cuts,
            slots: self.slots,
            reports_per_s: Spread::of(&self.reports_per_s)?,
        })
    }
}

impl Bench {
    /// The results as JSON.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers with text keys are valid JSON")
    }
}
