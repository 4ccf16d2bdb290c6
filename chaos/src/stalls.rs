//! How long nobody is told that anything more is bound, for each kind of loss: measured on real processes.

use std::time::Duration;

use clap::Args;

use crate::circumstances::Durability;
use crate::clients::Clients;
use crate::cluster::{Cluster, Shape, Status};
use crate::history::{self, History, Told, now_ns};
use crate::run::{CLIENTS_MAX, PlaceArgs};
use crate::stall::{longest, progress};

/// Published for Belfast: a lost shard of two, of a lease of 100 ms.
const PAPER_MS: f64 = 55.5;
/// A stall that lasts longer is counted as this.
const LOOKED_AT: Duration = Duration::from_secs(3);
const HEALS_WITHIN: Duration = Duration::from_secs(60);

/// Arguments of a measurement.
#[derive(Args)]
pub struct StallArgs {
    /// How often each loss is brought about
    #[arg(long, default_value_t = 10)]
    repetitions: u32,
    /// Appends a second of each of the five writers
    #[arg(long, default_value_t = 400)]
    rate: u64,
    /// cluster.suspect_ms
    #[arg(long, default_value_t = 200)]
    suspect_ms: u64,
    #[command(flatten)]
    place: PlaceArgs,
}

/// What is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    Primary,
    Backup,
    Leader,
    Shard,
}

const LOSSES: [(Loss, &str); 4] = [
    (Loss::Primary, "a primary, kill -9"),
    (Loss::Backup, "a backup, kill -9"),
    (Loss::Leader, "the leading sequencer, kill -9"),
    (Loss::Shard, "a whole shard, kill -9 of both replicas"),
];

impl Loss {
    fn victims(self, status: &Status) -> Vec<u16> {
        match self {
            Loss::Primary => status.primary(1).into_iter().collect(),
            Loss::Backup => status.backups(1).first().copied().into_iter().collect(),
            Loss::Leader => status.leader().into_iter().collect(),
            Loss::Shard => status.primary(1).into_iter().chain(status.backups(1)).collect(),
        }
    }
}

/// When each loss began, in nanoseconds, and what clients saw.
struct Measured {
    begins_ns: Vec<u64>,
    history: History,
}

/// Measures and prints.
pub fn run(args: &StallArgs) -> Result<bool, String> {
    let program = args.place.program()?;
    println!(
        "3 sequencers, 2 shards × 2 replicas, durability replicated, TCP over veth between namespaces, suspect_ms {}, \
         5 writers of {} records/s each, {} repetitions",
        args.suspect_ms, args.rate, args.repetitions
    );
    println!("\nlost                                       stall ms: median   longest   records taken back (median)");
    for (loss, name) in LOSSES {
        let mut stalls = Vec::new();
        let mut taken_back = Vec::new();
        // What a lost shard without a disk has forgotten stays unavailable: a cluster of its own for each time.
        let (clusters, times) = if loss == Loss::Shard { (args.repetitions, 1) } else { (1, args.repetitions) };
        for number in 0..clusters {
            let (folder, is_removed) = args.place.folder(&format!("stalls-{loss:?}-{number}"))?;
            let Some(measured) = measure(args, loss, times, &program, &folder)? else { return Ok(true) };
            let told = progress(&measured.history);
            for begin_ns in &measured.begins_ns {
                let end_ns = begin_ns + LOOKED_AT.as_nanos() as u64;
                stalls.push(longest(&told, (*begin_ns, end_ns)) as f64 / 1e6);
                taken_back.push(taken(&measured.history, (*begin_ns, end_ns)));
            }
            if is_removed {
                let _ = std::fs::remove_dir_all(&folder);
            }
        }
        stalls.sort_unstable_by(f64::total_cmp);
        taken_back.sort_unstable();
        let middle = stalls.len() / 2;
        let paper = if loss == Loss::Shard { format!("   paper: {PAPER_MS}") } else { String::new() };
        let (median, most) = (stalls[middle], stalls[stalls.len() - 1]);
        println!("{name:<42} {median:>16.1} {most:>9.1} {:>12}{paper}", taken_back[middle]);
    }
    Ok(true)
}

fn measure(
    args: &StallArgs,
    loss: Loss,
    times: u32,
    program: &std::path::Path,
    folder: &std::path::Path,
) -> Result<Option<Measured>, String> {
    let shape = Shape {
        shards: 2,
        replicas: 2,
        spares: 0,
        suspect_ms: args.suspect_ms,
        region_bytes: 1 << 28,
        durability: Durability::Memory,
        disk_bytes: 0,
    };
    let mut cluster = match Cluster::start(&shape, CLIENTS_MAX, program, folder) {
        Ok(cluster) => cluster,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(None);
        }
    };
    let mut status = cluster.wait_whole(HEALS_WITHIN)?;
    let clients = Clients::start(&cluster, folder, args.rate)?;
    let mut begins_ns = Vec::new();
    for _ in 0..times {
        std::thread::sleep(Duration::from_millis(1500));
        let places: Vec<usize> = loss.victims(&status).iter().map(|id| cluster.place(*id)).collect();
        begins_ns.push(now_ns());
        cluster.kill_all(&places);
        std::thread::sleep(LOOKED_AT);
        if loss != Loss::Shard {
            cluster.mend()?;
            status = cluster.wait_whole(HEALS_WITHIN)?;
        }
    }
    drop(clients);
    Ok(Some(Measured { begins_ns, history: history::read(folder)? }))
}

/// The most records that a subscriber was taken back in a span of time.
fn taken(history: &History, (from_ns, to_ns): (u64, u64)) -> usize {
    let of = |subscriber: &history::Subscriber| {
        let mut held = std::collections::BTreeSet::new();
        let mut count = 0;
        for (at_ns, told) in subscriber {
            match told {
                Told::Deliver { position, .. } => {
                    held.insert(*position);
                }
                Told::Confirm { upto } => held = held.split_off(upto),
                Told::Fail { from } => {
                    let back = held.split_off(from).len();
                    count += if (from_ns..to_ns).contains(at_ns) { back } else { 0 };
                }
                _ => {}
            }
        }
        count
    };
    history.subscribers.values().map(of).max().unwrap_or(0)
}
