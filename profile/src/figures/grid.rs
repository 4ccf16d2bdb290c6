//! Where does speculation lose? Computations and scenarios, fixed and auto beside free-event, the same arrivals for each.

use antelog_core::sim::rng::Rng;
use antelog_protocol::Ordering;

use super::curves::{RATE_PER_S, health};
use super::drive::{Run, run};
use super::series::Series;
use super::setup::{Act, BEGIN_NS, Setup};
use super::{Options, Table};
use crate::grid::{BURST_RECORDS, COMPUTES_NS, REPORT_DELAY_US, Scenario};
use crate::load::uneven_writers;

/// Greatest ratio that is not worse.
const LIMIT: f64 = 1.02;
const SHARDS: u16 = 4;
const MODES: [Ordering; 3] = [Ordering::FreeEvent, Ordering::Fixed, Ordering::Auto];
/// Another program takes the first primary's core for so long, so often, in nanoseconds.
const HOG_NS: (u64, u64) = (3_000_000, 10_000_000);

fn setup(options: &Options, scenario: Scenario, ordering: Ordering, seed: u64) -> Setup {
    let mut setup = Setup::steady(&options.model, ordering, SHARDS, RATE_PER_S, options.times(), seed);
    let until_ns = setup.until_ns;
    match scenario {
        Scenario::Steady => {}
        Scenario::Bursts => {
            let every_ns = u64::from(BURST_RECORDS) * 1_000_000_000 / RATE_PER_S;
            setup.sends.clear();
            for shard in 0..SHARDS {
                let first_ns = BEGIN_NS + Rng::new(seed, 2000 + u64::from(shard)).below(every_ns);
                let times = (first_ns..until_ns).step_by(every_ns as usize);
                setup.sends.extend(times.flat_map(|at| std::iter::repeat_n((at, shard), BURST_RECORDS as usize)));
            }
            setup.sends.sort_unstable();
        }
        Scenario::SlowShard => {
            setup.acts.push((0, Act::HoldReports { shard: SHARDS - 1, delay_ns: REPORT_DELAY_US * 1000 }));
        }
        Scenario::Hog => {
            let (for_ns, every_ns) = HOG_NS;
            let times = (BEGIN_NS..until_ns).step_by(every_ns as usize);
            setup.acts.extend(times.map(|at_ns| (at_ns, Act::Stall { shard: 0, for_ns })));
        }
        Scenario::Uneven => {
            setup.sends.clear();
            for writer in uneven_writers(SHARDS, RATE_PER_S as f64) {
                setup.write(writer.shard.0, writer.rate_per_s as u64, BEGIN_NS, until_ns);
            }
        }
    }
    setup
}

/// Runs it for one model.
///
/// # Errors
/// A run failed.
pub fn grid(options: &Options) -> Result<Vec<Table>, String> {
    let seeds = options.seeds();
    let mut setups = Vec::new();
    for scenario in Scenario::ALL {
        for mode in MODES {
            setups.extend((0..seeds).map(|seed| setup(options, scenario, mode, seed)));
        }
    }
    let runs = options.spread(&setups, run)?;
    let title = format!("mean e2e over that of free-event, {SHARDS} shards, model {}", options.model.name);
    let names = ["scenario", "C ms", "free-event ms", "fixed", "auto", "verdict fixed", "verdict auto"];
    let mut table = Table::new(title, &names);
    for (scenario, runs) in Scenario::ALL.iter().zip(runs.chunks(MODES.len() * seeds as usize)) {
        let modes: Vec<Vec<&Run>> = runs.chunks(seeds as usize).map(|runs| runs.iter().collect()).collect();
        for compute_ns in COMPUTES_NS {
            let means: Vec<f64> = modes.iter().map(|r| Series::of(r, |s| s.e2e_ns(compute_ns)).mean_ms()).collect();
            let [fixed, auto] = [means[1] / means[0], means[2] / means[0]];
            let judge = |ratio: f64| if ratio > LIMIT { "worse" } else { "ok" }.to_owned();
            let compute = format!("{}", compute_ns as f64 / 1e6);
            let (free, ratios) = (format!("{:.2}", means[0]), [fixed, auto].map(|r| format!("{r:.3}")));
            let [fixed_ratio, auto_ratio] = ratios;
            let first = [scenario.name().to_owned(), compute, free, fixed_ratio, auto_ratio];
            table.rows.push([&first[..], &[judge(fixed), judge(auto)]].concat());
        }
    }
    table.notes.extend(health(&runs));
    Ok(vec![table])
}
