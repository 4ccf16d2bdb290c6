//! Figures of steady load: by computation, by shards, by window; and bursts.

use antelog_protocol::{Beat, Ordering};

use super::drive::{Run, no_ops_percent, run};
use super::series::Series;
use super::setup::{BEGIN_NS, Setup};
use super::{Options, Table, paper};

/// The modes of every table, in the order of its columns.
pub const MODES: [Ordering; 3] = [Ordering::FreeTick, Ordering::FreeEvent, Ordering::Fixed];
/// Records per second and shard.
pub const RATE_PER_S: u64 = 10_000;
/// What the published system gained at its best point is about this; ours is to reach it everywhere near it.
const GAIN_WANTED: f64 = 1.4;
const LARGE: [u16; 2] = [40, 256];

/// A latency in milliseconds as text.
pub fn ms(value: f64) -> String {
    if value.is_finite() { format!("{value:.2}") } else { "-".to_owned() }
}

/// Whether ours is better than a published number, as text.
pub fn verdict(ours: f64, published: f64) -> String {
    if ours <= published { "better" } else { "worse" }.to_owned()
}

/// Whether two curves rise and fall alike: the correlation of their values.
pub fn shape(ours: &[f64], published: &[f64]) -> String {
    let mean = |v: &[f64]| v.iter().sum::<f64>() / v.len() as f64;
    let (a, b) = (mean(ours), mean(published));
    let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| (x - a) * (y - b)).sum::<f64>();
    let square = |v: &[f64], m: f64| v.iter().map(|x| (x - m).powi(2)).sum::<f64>();
    let correlation = product(ours, published) / (square(ours, a) * square(published, b)).sqrt();
    format!("shape: correlation of ours (fixed) with Belfast's {correlation:.2}; 1 is the same up to scale")
}

/// Steady runs of every mode and seed, by number of shards.
struct Steady {
    shards: Vec<u16>,
    seeds: usize,
    runs: Vec<Run>,
}

impl Steady {
    fn new(options: &Options, shards: &[u16]) -> Result<Steady, String> {
        let mut setups = Vec::new();
        for shards in shards {
            let (seeds, times) = effort(options, *shards);
            for mode in MODES {
                setups.extend(
                    (0..seeds).map(|seed| Setup::steady(&options.model, mode, *shards, RATE_PER_S, times, seed)),
                );
            }
        }
        let runs = options.spread(&setups, run)?;
        Ok(Steady { shards: shards.to_vec(), seeds: effort(options, shards[0]).0 as usize, runs })
    }

    fn of(&self, shards: u16, mode: Ordering) -> Vec<&Run> {
        let at = self.shards.iter().position(|s| *s == shards).unwrap_or(0);
        let mode = MODES.iter().position(|m| *m == mode).unwrap_or(0);
        let first = (at * MODES.len() + mode) * self.seeds;
        self.runs[first..first + self.seeds].iter().collect()
    }

    fn each(&self, shards: u16, figure: impl Fn(&[&Run]) -> f64) -> [f64; 3] {
        MODES.map(|mode| figure(&self.of(shards, mode)))
    }

    fn e2e(&self, shards: u16, compute_ns: u64) -> [f64; 3] {
        self.each(shards, |runs| Series::of(runs, |s| s.e2e_ns(compute_ns)).mean_ms())
    }
}

/// Seeds and times of a point: many shards have many samples.
fn effort(options: &Options, shards: u16) -> (u64, (u64, u64)) {
    match shards {
        0..=10 => (options.seeds(), options.times()),
        _ => (1, if options.quick { (120_000_000, 60_000_000) } else { (150_000_000, 150_000_000) }),
    }
}

fn columns(first: &str) -> Vec<&str> {
    vec![first, "Scalog", "Belfast", "free-tick", "free-event", "fixed", "gain", "verdict"]
}

fn row(first: String, published: Option<(f64, f64)>, ours: [f64; 3]) -> Vec<String> {
    let [tick, event, fixed] = ours;
    let (scalog, belfast) = published.unzip();
    let gain = tick.min(event) / fixed;
    let text = |value: Option<f64>| value.map_or("-".to_owned(), ms);
    let verdict = belfast.map_or("-".to_owned(), |belfast| verdict(fixed, belfast));
    vec![first, text(scalog), text(belfast), ms(tick), ms(event), ms(fixed), format!("{gain:.2}"), verdict]
}

const GAIN_NOTE: &str = "gain: the better free mode over fixed; verdict: fixed beside Belfast's published number";

/// End-to-end latency by computation, delivery and append by shards.
///
/// # Errors
/// A run failed.
pub fn compute(options: &Options) -> Result<Vec<Table>, String> {
    let steady = Steady::new(options, &[2, 4, 10])?;
    let name = &options.model.name;
    let mut e2e = Table::new(format!("e2e by computation, mean ms, 4 shards, model {name}"), &columns("C ms"));
    let (mut ours, mut published) = (Vec::new(), Vec::new());
    for (compute_ms, scalog, belfast) in paper::COMPUTE {
        let means = steady.e2e(4, (compute_ms * 1e6) as u64);
        ours.push(means[2]);
        published.push(belfast);
        e2e.rows.push(row(format!("{compute_ms:.1}"), Some((scalog, belfast)), means));
    }
    e2e.notes.push(GAIN_NOTE.into());
    e2e.notes.push(shape(&ours, &published));
    let delivery = |shards| steady.each(shards, |r| Series::of(r, |s| s.delivered_ns - s.intended_ns).mean_ms());
    let append = |shards| steady.each(shards, |r| Series::of(r, |s| s.acknowledged_ns - s.intended_ns).mean_ms());
    let mut others = Table::new(format!("delivery and append by shards, mean ms, model {name}"), &columns("shards"));
    for (shards, scalog, belfast) in paper::DELIVERY {
        others.rows.push(row(format!("delivery {shards}"), Some((scalog, belfast)), delivery(shards)));
    }
    for (shards, scalog, belfast) in paper::APPEND {
        others.rows.push(row(format!("append {shards}"), Some((scalog, belfast)), append(shards)));
    }
    let [tick, event, fixed] = delivery(4);
    let confirm = steady.each(4, |r| Series::of(r, |s| s.confirmed_ns - s.delivered_ns).mean_ms())[2];
    others.notes.push(format!(
        "order path at 4 shards, ms: free-tick {:.2}, free-event {:.2} (delivery less that of fixed), fixed {confirm:.2} \
         (confirmation less delivery); the paper's is about 2.33",
        tick - fixed,
        event - fixed
    ));
    others.notes.extend(health(&steady.runs));
    Ok(vec![e2e, others])
}

/// Unfinished records and no-ops of runs.
pub fn health(runs: &[Run]) -> Option<String> {
    let unfinished: u64 = runs.iter().map(|run| run.unfinished).sum();
    let share = no_ops_percent(runs);
    Some(format!("{unfinished} records unfinished; no-ops {share:.1} % of slots over all modes"))
}

/// End-to-end latency by number of shards.
///
/// # Errors
/// A run failed.
pub fn shards(options: &Options) -> Result<Vec<Table>, String> {
    let small = Steady::new(options, &[2, 4, 6, 8, 10])?;
    let large = Steady::new(options, if options.quick { &LARGE[..1] } else { &LARGE[..] })?;
    let name = &options.model.name;
    let mut e2e = Table::new(format!("e2e by shards, mean ms, C = 1.2 ms, model {name}"), &columns("shards"));
    let (mut ours, mut published) = (Vec::new(), Vec::new());
    for (shards, scalog, belfast) in paper::SHARDS {
        let means = small.e2e(shards, 1_200_000);
        ours.push(means[2]);
        published.push(belfast);
        e2e.rows.push(row(shards.to_string(), Some((scalog, belfast)), means));
    }
    for shards in &large.shards {
        for (compute_ms, scalog, belfast) in paper::EMULATED {
            let published = (*shards == 40).then_some((scalog, belfast));
            let means = large.e2e(*shards, (compute_ms * 1e6) as u64);
            e2e.rows.push(row(format!("{shards}, C = {compute_ms}"), published, means));
            let gain = means[0].min(means[1]) / means[2];
            if gain < GAIN_WANTED {
                e2e.notes.push(format!("{shards} shards, C = {compute_ms}: gain {gain:.2} is below {GAIN_WANTED}"));
            }
        }
    }
    e2e.notes.push(GAIN_NOTE.into());
    e2e.notes.push(shape(&ours, &published));
    let mut tails = Table::new("e2e percentiles, ms, 10 shards, C = 1.2 ms", &columns("percentile"));
    for (percent, scalog, belfast) in paper::TAILS {
        let ours = small.each(10, |runs| Series::of(runs, |s| s.e2e_ns(1_200_000)).percentile_ms(percent));
        tails.rows.push(row(format!("p{percent}"), Some((scalog, belfast)), ours));
    }
    Ok(vec![e2e, tails, sequencer(&[&small, &large])])
}

/// What the sequencer does for so many shards.
fn sequencer(all: &[&Steady]) -> Table {
    let counters = ["records", "reports", "cuts", "quota_changes", "fills_by_age", "fills_by_target", "fills_ahead"];
    let mut table = Table::new("the sequencer's work and fills, per second", &["shards", "mode", "no-ops %"]);
    table.columns.extend(counters.map(str::to_owned));
    for steady in all {
        for shards in &steady.shards {
            for mode in MODES {
                let runs = steady.of(*shards, mode);
                let seconds = runs.iter().map(|run| run.measured_ns).sum::<u64>() as f64 / 1e9;
                let count = |counter: &str| runs.iter().map(|run| run.count(counter)).sum::<u64>() as f64;
                let no_ops = format!("{:.1}", no_ops_percent(runs.iter().copied()));
                let first = vec![shards.to_string(), mode.name().to_owned(), no_ops];
                let rest = counters.iter().map(|counter| format!("{:.0}", count(counter) / seconds));
                table.rows.push(first.into_iter().chain(rest).collect());
            }
        }
    }
    table
}

/// End-to-end latency by window length.
///
/// # Errors
/// A run failed.
pub fn window(options: &Options) -> Result<Vec<Table>, String> {
    let (seeds, times) = (options.seeds(), options.times());
    let setups: Vec<Setup> = paper::WINDOW
        .iter()
        .flat_map(|(cuts, _)| (0..seeds).map(|seed| (*cuts, seed)))
        .map(|(window_cuts, seed)| Setup {
            window_cuts,
            ..Setup::steady(&options.model, Ordering::Fixed, 4, RATE_PER_S, times, seed)
        })
        .collect();
    let runs = options.spread(&setups, run)?;
    let title = format!("e2e by window, ms, fixed, 4 shards, C = 1.2 ms, model {}", options.model.name);
    let mut table = Table::new(title, &["W", "Belfast", "mean", "p99", "no-ops %", "verdict"]);
    let (mut ours, mut published) = (Vec::new(), Vec::new());
    for ((cuts, belfast), runs) in paper::WINDOW.iter().zip(runs.chunks(seeds as usize)) {
        let series = Series::of(&runs.iter().collect::<Vec<_>>(), |s| s.e2e_ns(1_200_000));
        let no_ops = format!("{:.1}", no_ops_percent(runs));
        let (mean, p99) = (series.mean_ms(), series.percentile_ms(99.0));
        table.rows.push(vec![cuts.to_string(), ms(*belfast), ms(mean), ms(p99), no_ops, verdict(mean, *belfast)]);
        ours.push(mean);
        published.push(*belfast);
    }
    table.notes.push(shape(&ours, &published));
    Ok(vec![table])
}

/// Peaks after bursts of 30 records on one of four shards.
///
/// # Errors
/// A run failed.
pub fn burst(options: &Options) -> Result<Vec<Table>, String> {
    const EVERY_NS: u64 = 150_000_000;
    let (seeds, bursts) = if options.quick { (2, 3) } else { (6, 8) };
    let paper_beat = |lag_fix| (Ordering::Fixed, Beat::Paper { lag_fix });
    let kinds = [
        ("free-tick", (Ordering::FreeTick, Beat::Target), Some(paper::BURST[0])),
        ("free-event", (Ordering::FreeEvent, Beat::Target), Some(paper::BURST[0])),
        ("fixed", (Ordering::Fixed, Beat::Target), Some(paper::BURST[1])),
        ("fixed, beat paper", paper_beat(true), Some(paper::BURST[1])),
        ("fixed, beat paper-without-lag-fix", paper_beat(false), Some(paper::BURST[2])),
    ];
    let burst_at = |number: u64, seed: u64| BEGIN_NS + (number + 1) * EVERY_NS + seed * 370_000;
    let setup = |(ordering, beat): (Ordering, Beat), seed: u64| {
        let times = (EVERY_NS / 2, bursts * EVERY_NS + EVERY_NS / 2);
        let mut setup = Setup::steady(&options.model, ordering, 4, 3_000, times, seed);
        setup.beat = beat;
        let all = (0..bursts).flat_map(|number| std::iter::repeat_n((burst_at(number, seed), 0), 30));
        setup.sends.extend(all);
        setup.sends.sort_unstable();
        setup
    };
    let setups: Vec<Setup> = kinds.iter().flat_map(|k| (0..seeds).map(|seed| setup(k.1, seed))).collect();
    let runs = options.spread(&setups, run)?;
    let title = format!(
        "peak e2e after a burst of 30 records on one of 4 shards of 3000 records/s, ms, C = 1.2 ms, model {}",
        options.model.name
    );
    let mut table = Table::new(title, &["mode", "published", "median", "max", "steady", "verdict"]);
    for ((name, _, published), runs) in kinds.iter().zip(runs.chunks(seeds as usize)) {
        let (mut peaks, mut steady) = (Vec::new(), Vec::new());
        for (seed, run) in (0..).zip(runs) {
            for number in 0..bursts {
                let at_ns = burst_at(number, seed);
                let of = |from: u64, to: u64| {
                    let near = run.samples.iter().filter(move |s| (from..to).contains(&s.intended_ns));
                    near.map(|s| s.e2e_ns(1_200_000))
                };
                peaks.extend(of(at_ns, at_ns + 30_000_000).max());
                steady.extend(of(at_ns - 30_000_000, at_ns));
            }
        }
        let (peaks, steady) = (Series::from(peaks), Series::from(steady).mean_ms());
        let (median, max) = (peaks.percentile_ms(50.0), peaks.percentile_ms(100.0));
        let judged = published.map_or("-".to_owned(), |published| verdict(median, published));
        let published = published.map_or("-".to_owned(), ms);
        table.rows.push(vec![(*name).to_owned(), published, ms(median), ms(max), ms(steady), judged]);
    }
    table
        .notes
        .push("published: Scalog beside the free modes, Belfast with and without its lag fix beside fixed".into());
    Ok(vec![table])
}
