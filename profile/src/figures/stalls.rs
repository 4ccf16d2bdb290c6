//! How long nothing is confirmed after a loss: processes that are killed on virtual time, whose peers see their connections
//! closed at once.

use antelog_core::sim::stage::Victim;
use antelog_protocol::Ordering;

use super::curves::{RATE_PER_S, ms};
use super::drive::{NEVER, Run, run};
use super::setup::{Act, BEGIN_NS, Setup};
use super::{Options, Table, paper};

const MS: u64 = 1_000_000;
const SHARDS: u16 = 2;
/// Load before a loss, and for how long it is looked at, in nanoseconds.
const WARM_NS: u64 = 600 * MS;
const LOOKED_AT_NS: u64 = 600 * MS;

/// The longest time between two confirmations that ends after a loss, in milliseconds.
fn stall_ms(run: &Run, loss_ns: u64) -> f64 {
    let mut confirmed: Vec<u64> = run.samples.iter().map(|s| s.confirmed_ns).filter(|at| *at != NEVER).collect();
    confirmed.sort_unstable();
    let gaps = confirmed.windows(2).filter(|pair| pair[1] > loss_ns);
    gaps.map(|pair| pair[1] - pair[0]).max().unwrap_or(LOOKED_AT_NS) as f64 / 1e6
}

/// One loss of each kind in each run.
///
/// # Errors
/// A run failed.
pub fn stalls(options: &Options) -> Result<Vec<Table>, String> {
    let replica = |shard, number| Act::Kill(Victim::Replica { shard, number });
    let losses: [(&str, Vec<Act>, Option<f64>); 4] = [
        ("a primary", vec![replica(0, 0)], None),
        ("a backup", vec![replica(1, 1)], None),
        ("the leader of three sequencers", vec![Act::Kill(Victim::Leader)], None),
        // Beside a replica of shard 1 lives the backup of shard 0.
        ("a whole shard, and the other's backup", vec![replica(1, 0), replica(1, 1)], Some(paper::SHARD_LOST_MS)),
    ];
    let seeds = options.seeds();
    let loss_ns = |seed: u64| BEGIN_NS + WARM_NS + seed * 17 * MS / 10;
    let setup = |acts: &[Act], seed: u64| {
        let times = (WARM_NS / 2, WARM_NS / 2 + LOOKED_AT_NS);
        let mut setup = Setup::steady(&options.model, Ordering::Fixed, SHARDS, RATE_PER_S, times, seed);
        setup.sequencers = 3;
        setup.acts = acts.iter().map(|act| (loss_ns(seed), *act)).collect();
        setup
    };
    let setups: Vec<Setup> = losses.iter().flat_map(|(_, acts, _)| (0..seeds).map(|seed| setup(acts, seed))).collect();
    let runs = options.spread(&setups, run)?;
    let name = &options.model.name;
    let title = format!("time without confirmations after a loss, ms, 2 shards × 2 replicas, model {name}");
    let mut table = Table::new(title, &["lost", "median", "max", "records taken back (median)", "published"]);
    for ((what, _, published), runs) in losses.iter().zip(runs.chunks(seeds as usize)) {
        let mut stalls: Vec<f64> = (0..).zip(runs).map(|(seed, run)| stall_ms(run, loss_ns(seed))).collect();
        stalls.sort_unstable_by(f64::total_cmp);
        let mut back: Vec<u64> = runs.iter().map(|run| run.taken_back).collect();
        back.sort_unstable();
        let (median, most) = (stalls[stalls.len() / 2], stalls[stalls.len() - 1]);
        let published = published.map_or("-".to_owned(), ms);
        table.rows.push(vec![(*what).to_owned(), ms(median), ms(most), back[back.len() / 2].to_string(), published]);
    }
    table.notes.push("connections of a killed process close at once; suspect_ms 200, lost_grace_ms 5".to_owned());
    Ok(vec![table])
}
