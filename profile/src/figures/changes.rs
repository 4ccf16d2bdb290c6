//! Figures of change: a straggler, rates that change, a shard that joins.

use antelog_protocol::{Ordering, ShardId};

use super::curves::{RATE_PER_S, ms};
use super::drive::{Run, Sample, run};
use super::series::Series;
use super::setup::{Act, BEGIN_NS, Setup};
use super::{Options, Table, paper};

const MS: u64 = 1_000_000;
const SHARDS: u16 = 4;
const COMPUTE_NS: u64 = 1_200_000;
/// How late the straggler's reports are, in nanoseconds.
const LATE_NS: u64 = 5 * MS;
/// Back to what it was: within so much of it.
const BACK: f64 = 1.1;
/// How long after detection the others may take, in milliseconds.
const BACK_WANTED_MS: f64 = 20.0;
/// Records are averaged over so long, in nanoseconds.
const BIN_NS: u64 = 5 * MS;

/// Mean end-to-end latency of the samples of some shards intended in a time, in milliseconds.
fn mean_ms(runs: &[Run], shards: impl Fn(u16) -> bool, from_ns: u64, until_ns: u64) -> f64 {
    let of = |run: &Run| -> Vec<u64> {
        let some = |s: &&Sample| shards(s.shard) && (from_ns..until_ns).contains(&s.intended_ns);
        run.samples.iter().filter(some).map(|s| s.e2e_ns(COMPUTE_NS)).collect()
    };
    Series::from(runs.iter().flat_map(of).collect::<Vec<u64>>()).mean_ms()
}

/// From `from_ns` on: when the mean over a short time, and over the tenth of a second that follows, has come back to a
/// level; `None` when it has not before `until_ns`. Nanoseconds. A short time alone varies by more than a tenth.
fn back_ns(run: &Run, shards: impl Fn(u16) -> bool, level_ms: f64, from_ns: u64, until_ns: u64) -> Option<u64> {
    let runs = std::slice::from_ref(run);
    let within = |at: u64, for_ns: u64| mean_ms(runs, &shards, at, at + for_ns) <= BACK * level_ms;
    (from_ns..until_ns).step_by(MS as usize).find(|at| within(*at, BIN_NS) && within(*at, 100 * MS))
}

/// Median and greatest of some values in milliseconds, as text.
fn spread(values: &[f64]) -> [String; 2] {
    let mut sorted: Vec<f64> = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    [sorted.get(sorted.len() / 2), sorted.last()].map(|value| value.map_or("-".to_owned(), |v| ms(*v)))
}

fn row(what: &str, values: &[f64], wanted: Option<(f64, &str)>) -> Vec<String> {
    let [median, max] = spread(values);
    let worst = values.iter().copied().fold(0.0, f64::max);
    let verdict = match wanted {
        Some(_) if values.is_empty() => "never".to_owned(),
        Some((most, _)) => if worst <= most { "better" } else { "worse" }.to_owned(),
        None => "-".to_owned(),
    };
    vec![what.to_owned(), median, max, wanted.map_or("-".to_owned(), |(_, text)| text.to_owned()), verdict]
}

const COLUMNS: [&str; 5] = ["what", "median", "max", "wanted", "verdict"];

/// One shard's reports are late from some time on.
///
/// # Errors
/// A run failed.
pub fn straggler(options: &Options) -> Result<Vec<Table>, String> {
    let seeds = options.seeds();
    let setup = |ordering, seed: u64| {
        let mut setup = Setup::steady(&options.model, ordering, SHARDS, RATE_PER_S, (150 * MS, 550 * MS), seed);
        setup.acts.push((onset_ns(seed), Act::HoldReports { shard: SHARDS - 1, delay_ns: LATE_NS }));
        setup.watch_every_ns = Some(MS / 4);
        setup
    };
    let modes = [Ordering::FreeEvent, Ordering::Fixed];
    let setups: Vec<Setup> = modes.iter().flat_map(|m| (0..seeds).map(|seed| setup(*m, seed))).collect();
    let runs = options.spread(&setups, run)?;
    let (free, fixed) = runs.split_at(seeds as usize);
    let others = |shard: u16| shard != SHARDS - 1;
    let (mut found, mut quota) = (Vec::new(), Vec::new());
    for (seed, run) in (0..).zip(fixed) {
        let onset_ns = onset_ns(seed);
        let grounded_before = run.seen.iter().rfind(|s| s.at_ns <= onset_ns).map_or(0, |s| s.grounded);
        let Some(seen) = run.seen.iter().find(|s| s.grounded > grounded_before) else { continue };
        found.push((run, onset_ns, seen.at_ns));
        let gone = run.members.iter().find(|(at_ns, members)| {
            let member = members.member(ShardId(SHARDS - 1));
            *at_ns > onset_ns && member.is_some_and(|m| m.quota == 0)
        });
        quota.extend(gone.map(|(at_ns, _)| (at_ns - onset_ns) as f64 / 1e6));
    }
    let detection: Vec<f64> = found.iter().map(|(_, onset_ns, at_ns)| (at_ns - onset_ns) as f64 / 1e6).collect();
    // Over all runs: within a few milliseconds of one run latencies vary by more than a tenth.
    let mean = |part: &dyn Fn(u64, u64) -> (u64, u64)| {
        let all = found.iter().map(|(run, onset_ns, at_ns)| {
            let (from_ns, until_ns) = part(*onset_ns, *at_ns);
            mean_ms(std::slice::from_ref(*run), others, from_ns, until_ns)
        });
        all.sum::<f64>() / found.len() as f64
    };
    let before = mean(&|onset_ns, _| (onset_ns - 100 * MS, onset_ns));
    let within = |after: u64, for_ns: u64| mean(&|_, at_ns| (at_ns + after, at_ns + after + for_ns)) <= BACK * before;
    let bins = (0..200 * MS).step_by(MS as usize);
    let back_ns = bins.into_iter().find(|after| within(*after, BIN_NS) && within(*after, 100 * MS));
    let back: Vec<f64> = back_ns.into_iter().map(|ns| ns as f64 / 1e6).collect();
    let name = &options.model.name;
    let mut times = Table::new(format!("a straggler, reports 5 ms late: times in ms, fixed, model {name}"), &COLUMNS);
    times.rows.push(row("onset to detection", &detection, None));
    times.rows.push(row("detection until the others are back within 10 %", &back, Some((BACK_WANTED_MS, "20"))));
    let wanted = Some((paper::STRAGGLER_MS, "paper: 140"));
    times.rows.push(row("onset until the grant with quota 0 is known", &quota, wanted));
    times.notes.push(format!("detected in {} of {seeds} runs", detection.len()));
    let title = format!("mean e2e of the other shards by time since the onset, ms, C = 1.2 ms, model {name}");
    let mut curve = Table::new(title, &["from", "to", "free-event", "fixed"]);
    let bounds: [i64; 12] = [-50, 0, 5, 10, 15, 20, 30, 50, 100, 200, 300, 400];
    for pair in bounds.windows(2) {
        let mean = |runs: &[Run]| {
            let all = (0..).zip(runs).map(|(seed, run)| {
                let at = |ms: i64| onset_ns(seed).saturating_add_signed(ms * MS as i64);
                mean_ms(std::slice::from_ref(run), others, at(pair[0]), at(pair[1]))
            });
            ms(all.sum::<f64>() / runs.len() as f64)
        };
        curve.rows.push(vec![pair[0].to_string(), pair[1].to_string(), mean(free), mean(fixed)]);
    }
    Ok(vec![times, curve])
}

/// The onset falls at another place of a window for each seed.
fn onset_ns(seed: u64) -> u64 {
    BEGIN_NS + 260 * MS + seed * 17_300_000
}

/// Windows granted between a time and the first grant that passes a test, and when that was told.
fn windows_until(run: &Run, at_ns: u64, fits: impl Fn(ShardId, u32) -> bool) -> Option<(u64, u64)> {
    let before = run.members.iter().rfind(|(told_ns, _)| *told_ns <= at_ns)?.1.window;
    let fitting = run
        .members
        .iter()
        .find(|(told_ns, membership)| *told_ns > at_ns && membership.members.iter().all(|m| fits(m.shard, m.quota)))?;
    Some((fitting.1.window.saturating_sub(before), fitting.0 - at_ns))
}

/// Rates double on all shards or on one, or one shard falls silent.
///
/// # Errors
/// A run failed.
pub fn rate(options: &Options) -> Result<Vec<Table>, String> {
    let seeds = options.seeds();
    let cases = ["5 -> 10 K/s on all shards", "5 -> 10 K/s on one shard", "5 -> 0 K/s on one shard"];
    let setup = |case: usize, seed: u64| {
        let mut setup = Setup::steady(&options.model, Ordering::Fixed, SHARDS, 5_000, (150 * MS, 850 * MS), seed);
        let (at_ns, until_ns) = (onset_ns(seed), setup.until_ns);
        match case {
            0 => (0..SHARDS).for_each(|shard| setup.write(shard, 5_000, at_ns, until_ns)),
            1 => setup.write(0, 5_000, at_ns, until_ns),
            _ => setup.silence(0, at_ns),
        }
        setup.watch_every_ns = Some(MS);
        setup
    };
    let setups: Vec<Setup> =
        (0..cases.len()).flat_map(|c| (0..seeds).map(move |seed| (c, seed))).map(|(c, s)| setup(c, s)).collect();
    let runs = options.spread(&setups, run)?;
    let title = format!("rates change: fixed, {SHARDS} shards, C = 1.2 ms, model {}", options.model.name);
    let mut table = Table::new(title, &COLUMNS);
    for ((case, name), runs) in cases.iter().enumerate().zip(runs.chunks(seeds as usize)) {
        let fits = |shard: ShardId, quota: u32| match case {
            0 => (9..=11).contains(&quota),
            1 => (9..=11).contains(&quota) || shard.0 != 0,
            _ => quota == 1 || shard.0 != 0,
        };
        let (mut windows, mut fit_ms, mut back) = (Vec::new(), Vec::new(), Vec::new());
        for (seed, run) in (0..).zip(runs) {
            let at_ns = onset_ns(seed);
            let fit = windows_until(run, at_ns, fits);
            windows.extend(fit.map(|(windows, _)| windows as f64));
            fit_ms.extend(fit.map(|(_, ns)| ns as f64 / 1e6));
            let level = mean_ms(std::slice::from_ref(run), |_| true, at_ns + 400 * MS, at_ns + 500 * MS);
            back.extend(back_ns(run, |_| true, level, at_ns, at_ns + 400 * MS).map(|ns| (ns - at_ns) as f64 / 1e6));
        }
        let wanted = if case == 2 { None } else { Some((2.0, "2")) };
        table.rows.push(row(&format!("{name}: windows until a grant fits"), &windows, wanted));
        let two = 2.0 * f64::from(options.model.window_cuts) * options.model.tick_us as f64 / 1e3;
        let wanted = if case == 2 { None } else { Some((two, "2 windows' time")) };
        table.rows.push(row(&format!("{name}: ms until that grant is known"), &fit_ms, wanted));
        table.rows.push(row(&format!("{name}: ms until e2e is within 10 % of its new level"), &back, None));
        table.notes.push(format!("{name}: quotas fit in {} of {seeds} runs", windows.len()));
    }
    Ok(vec![table])
}

/// A shard that stood by joins; its writers are ready.
///
/// # Errors
/// A run failed.
pub fn join(options: &Options) -> Result<Vec<Table>, String> {
    let seeds = options.seeds();
    let setup = |seed: u64| {
        let times = (150 * MS, 600 * MS);
        let mut setup = Setup::steady(&options.model, Ordering::Fixed, SHARDS + 1, RATE_PER_S, times, seed);
        setup.standby_from = SHARDS;
        setup.acts.push((onset_ns(seed), Act::Join { shard: SHARDS }));
        setup
    };
    let setups: Vec<Setup> = (0..seeds).map(setup).collect();
    let runs = options.spread(&setups, run)?;
    let (mut done, mut first, mut ratio, mut peak) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (seed, run) in (0..).zip(&runs) {
        let at_ns = onset_ns(seed);
        done.extend(run.changed_ns.map(|ns| (ns - at_ns) as f64 / 1e6));
        let joined = run.samples.iter().filter(|s| s.shard == SHARDS);
        first.extend(joined.map(|s| s.acknowledged_ns).min().map(|ns| (ns - at_ns) as f64 / 1e6));
        let mean = |from_ns, until_ns| mean_ms(std::slice::from_ref(run), |shard| shard != SHARDS, from_ns, until_ns);
        let before = mean(at_ns - 100 * MS, at_ns);
        ratio.push(mean(at_ns, at_ns + 200 * MS) / before);
        let bins = (at_ns..at_ns + 200 * MS).step_by(BIN_NS as usize);
        peak.push(bins.map(|at| mean(at, at + BIN_NS) / before).fold(0.0, f64::max));
    }
    let title = format!("a fifth shard joins: fixed, C = 1.2 ms, model {}", options.model.name);
    let mut table = Table::new(title, &COLUMNS);
    let window_ms = f64::from(options.model.window_cuts) * options.model.tick_us as f64 / 1e3;
    let most = window_ms + options.model.tick_us as f64 / 1e3;
    table.rows.push(row("asked for until told done, ms", &done, None));
    table.rows.push(row("asked for until its first append is acknowledged, ms", &first, Some((most, "window + tick"))));
    table.rows.push(row("the others: e2e of the 200 ms after it over before", &ratio, Some((BACK, "1.1"))));
    table.rows.push(row("the others: worst 5 ms over before", &peak, None));
    Ok(vec![table])
}
