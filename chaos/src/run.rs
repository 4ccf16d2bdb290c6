//! A run: a cluster, clients, faults from a seed, and at the end the question whether what clients saw can be.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use antelog_core::sim::rng::Rng;
use clap::Args;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::check::{Verdict, check};
use crate::circumstances::{Circumstances, Durability};
use crate::clients::{Clients, PROBERS, READERS, WRITERS};
use crate::cluster::{Cluster, Shape};
use crate::faults::{KINDS, Kind, inject, name};
use crate::history::{self, now_ns};
use crate::stall::{longest, progress};

/// Places for clients.
pub const CLIENTS_MAX: usize = WRITERS + READERS + PROBERS;

/// How long a cluster may take to be whole again when nothing disturbs it any more.
const HEALS_WITHIN: Duration = Duration::from_secs(60);

/// A region that holds everything, where it is the only place.
const MEMORY_BYTES: usize = 1 << 30;
/// A small one, so that much is read from disk and a full disk is felt soon.
const REGION_BYTES: usize = 1 << 20;
/// Of a node's disk, besides what is written in the run's time.
const DISK_BYTES: u64 = 64 << 20;
/// More than a shard takes in a second.
const DISK_BYTES_A_SECOND: u64 = 1 << 20;
/// Who met a full disk may learn so late that there is room again, in nanoseconds.
const FULL_FOR_LONGER_NS: u64 = 2_000_000_000;

/// Arguments of a run.
#[derive(Args)]
pub struct RunArgs {
    /// How long faults go on
    #[arg(long, default_value_t = 300)]
    seconds: u64,
    /// The plan's seed; drawn and printed when it is not given
    #[arg(long)]
    seed: Option<u64>,
    /// Shards
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=4))]
    shards: u16,
    /// Replicas of each shard; there is a spare besides
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=3))]
    replicas: u16,
    /// Appends a second of each of the five writers
    #[arg(long, default_value_t = 200)]
    rate: u64,
    /// cluster.suspect_ms
    #[arg(long, default_value_t = 400)]
    suspect_ms: u64,
    /// What an acknowledgement promises; unless it is memory, every node has a small file system of its own in memory
    #[arg(long, value_enum, default_value_t)]
    durability: Durability,
    /// Only these kinds of fault; else all
    #[arg(long, value_enum, value_delimiter = ',')]
    kinds: Vec<Kind>,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Where a run takes place.
#[derive(Args)]
pub struct PlaceArgs {
    /// The antelog binary; else the one beside this program
    #[arg(long)]
    node: Option<PathBuf>,
    /// Keep histories and logs in this folder; else in one that is removed when all is well
    #[arg(long)]
    keep: Option<PathBuf>,
}

impl PlaceArgs {
    /// The node's binary.
    pub fn program(&self) -> Result<PathBuf, String> {
        let own = std::env::current_exe().map_err(|e| format!("cannot find this program: {e}"))?;
        let beside = own.with_file_name("antelog");
        let program = self.node.clone().unwrap_or(beside);
        if program.exists() {
            return program.canonicalize().map_err(|e| format!("{}: {e}", program.display()));
        }
        Err(format!("there is no {}: build it (cargo build --release -p antelog) or give --node", program.display()))
    }

    /// An empty folder, and whether it is removed afterwards.
    pub fn folder(&self, what: &str) -> Result<(PathBuf, bool), String> {
        let own = std::env::temp_dir().join(format!("antelog-chaos-{what}-{}", std::process::id()));
        let folder = self.keep.as_ref().map_or(own, |keep| keep.join(what));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).map_err(|e| format!("cannot make {}: {e}", folder.display()))?;
        Ok((folder, self.keep.is_none()))
    }
}

/// A fault that happened: from its begin until the cluster was whole again.
struct Happened {
    kind: Kind,
    /// When it was brought about, and when it ended.
    begun_ns: u64,
    ended_ns: u64,
    whole_ns: u64,
}

/// What of it excuses what clients saw.
fn circumstances(args: &RunArgs, happened: &[Happened], shard_losses: u64) -> Circumstances {
    let of = |is: fn(&Happened) -> bool, longer_ns| -> Vec<(u64, u64)> {
        happened.iter().filter(|h| is(h)).map(|h| (h.begun_ns, h.ended_ns + longer_ns)).collect()
    };
    Circumstances {
        durability: args.durability,
        shard_losses,
        sudden_ends_ns: of(|h| h.kind.is_sudden_end(), 0),
        full_disks_ns: of(|h| h.kind == Kind::FillReplica, FULL_FOR_LONGER_NS),
    }
}

/// Ends a run when somebody wants it to, so that namespaces are removed.
pub fn interrupted() -> Result<Arc<AtomicBool>, String> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, flag.clone()).map_err(|e| format!("cannot catch signals: {e}"))?;
    }
    Ok(flag)
}

/// Runs it; whether all was well.
pub fn run(args: &RunArgs) -> Result<bool, String> {
    let mut drawn = [0; 4];
    getrandom::fill(&mut drawn).map_err(|e| format!("no random numbers: {e}"))?;
    let seed = args.seed.unwrap_or_else(|| u64::from(u32::from_le_bytes(drawn)));
    let interrupted = interrupted()?;
    let (folder, is_removed) = args.place.folder("run")?;
    let program = args.place.program()?;
    let shape = Shape {
        shards: args.shards.into(),
        replicas: args.replicas.into(),
        spares: 1,
        suspect_ms: args.suspect_ms,
        region_bytes: if args.durability == Durability::Memory { MEMORY_BYTES } else { REGION_BYTES },
        durability: args.durability,
        disk_bytes: DISK_BYTES + args.seconds * DISK_BYTES_A_SECOND,
    };
    let keeps = args.durability.key().unwrap_or("memory only");
    println!(
        "seed {seed}: {keeps}, 3 sequencers, {} shards × {} replicas + a spare, {WRITERS} writers, {READERS} \
         subscribers, {} s",
        args.shards, args.replicas, args.seconds
    );
    let mut cluster = match Cluster::start(&shape, CLIENTS_MAX, &program, &folder) {
        Ok(cluster) => cluster,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(true);
        }
    };
    let result = disturb(args, seed, &mut cluster, &folder, &interrupted);
    drop(cluster);
    let is_good = match result {
        Ok(is_good) => is_good,
        Err(why) => {
            println!("FAILED: {why}");
            false
        }
    };
    if is_good && is_removed {
        let _ = std::fs::remove_dir_all(&folder);
    } else {
        println!("histories and logs are in {}; the plan: --seed {seed}", folder.display());
    }
    Ok(is_good)
}

fn disturb(
    args: &RunArgs,
    seed: u64,
    cluster: &mut Cluster,
    folder: &Path,
    interrupted: &AtomicBool,
) -> Result<bool, String> {
    cluster.wait_whole(HEALS_WITHIN)?;
    let mut clients = Clients::start(cluster, folder, args.rate)?;
    let mut happened = Vec::new();
    let faults = faults(args, seed, cluster, &mut clients, &mut happened, interrupted);
    // Also after a failure: what clients saw, and how long they stood still, may tell why.
    let mended = cluster.mend().and_then(|()| cluster.wait_whole(HEALS_WITHIN));
    let finished = clients.finish(cluster);
    let view = mended.as_ref().map_or(1, |status| status.view());
    let history = history::read(folder)?;
    let circumstances = circumstances(args, &happened, view);
    circumstances.write(folder)?;
    table(&happened, &progress(&history));
    // A log that nobody could read to its end says nothing of what is missing.
    faults.and(mended.map(drop)).and(finished)?;
    let verdict = check(&history, &circumstances);
    report(&verdict, view, clients.killed);
    Ok(verdict.violations_total == 0)
}

/// One fault after the other until the time is up.
fn faults(
    args: &RunArgs,
    seed: u64,
    cluster: &mut Cluster,
    clients: &mut Clients,
    happened: &mut Vec<Happened>,
    interrupted: &AtomicBool,
) -> Result<(), String> {
    let mut rng = Rng::new(seed, 0);
    let started = Instant::now();
    let mut status = cluster.wait_whole(HEALS_WITHIN)?;
    // Every kind comes once before any comes again.
    let mut kinds: Vec<Kind> = Vec::new();
    let can_be = |kind: &Kind| {
        let is_asked_for = args.kinds.is_empty() || args.kinds.contains(kind);
        is_asked_for && (args.durability != Durability::Memory || !kind.needs_disks())
    };
    if !KINDS.iter().any(|(kind, _)| can_be(kind)) {
        return Err("none of these kinds can be without disks: give --durability".into());
    }
    while started.elapsed() < Duration::from_secs(args.seconds) && !interrupted.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(rng.range(50, 600)));
        if kinds.is_empty() {
            kinds = KINDS.iter().map(|(kind, _)| *kind).filter(can_be).collect();
        }
        let kind = kinds.swap_remove(rng.below(kinds.len() as u64) as usize);
        let begun_ns = now_ns();
        let (what, lasts) = if kind == Kind::KillWriter {
            (clients.kill_writer(cluster, rng.below(64) as usize)?, Duration::ZERO)
        } else {
            let Some(injected) = inject(cluster, &status, kind, &mut rng)? else { continue };
            (injected.what, injected.lasts)
        };
        println!("{:>7.1} s  {}: {what} for {} ms", started.elapsed().as_secs_f64(), name(kind), lasts.as_millis());
        std::thread::sleep(lasts);
        // What was not written when it was killed is gone; others' answers may be under way for as long as it is away.
        let ended_ns = now_ns();
        let mended = cluster.mend().and_then(|()| cluster.wait_whole(HEALS_WITHIN));
        happened.push(Happened { kind, begun_ns, ended_ns, whole_ns: now_ns() });
        let view = status.view();
        status = mended.map_err(|e| format!("after {}: {what}: {e}", name(kind)))?;
        if status.view() > view {
            println!("          view {}: a shard was lost", status.view());
        }
        if let Some(ended) = clients.ended() {
            return Err(ended);
        }
    }
    Ok(())
}

/// What happened, and how long nothing was confirmed.
fn table(happened: &[Happened], progress: &[u64]) {
    println!(
        "\nfault                                          times   stall ms: median   longest   whole again s: longest"
    );
    for (kind, name) in KINDS {
        let of: Vec<&Happened> = happened.iter().filter(|h| h.kind == *kind).collect();
        let mut stalls: Vec<u64> = of.iter().map(|h| longest(progress, (h.begun_ns, h.whole_ns))).collect();
        stalls.sort_unstable();
        let (Some(most), Some(middle)) = (stalls.last(), stalls.get(stalls.len() / 2)) else { continue };
        let whole_ns = of.iter().map(|h| h.whole_ns - h.ended_ns).max().unwrap_or(0);
        let (middle_ms, most_ms, whole_s) = (*middle as f64 / 1e6, *most as f64 / 1e6, whole_ns as f64 / 1e9);
        println!("{name:<46} {:>5} {middle_ms:>18.1} {most_ms:>9.1} {whole_s:>24.1}", of.len());
    }
}

fn report(verdict: &Verdict, view: u64, killed: u32) {
    println!(
        "\n{} appends: {} confirmed to their writers, {} refused ({} for a full disk), {} unknown of which {} are in the \
         log ({killed} writers killed)\n{} reads of single positions: {} without an answer within a second, {} answered \
         while a disk was full\n{} records at {} positions; {view} whole shards lost, {} times taken back ({} records), \
         {} positions unavailable ({} acknowledged)",
        verdict.appends,
        verdict.acknowledged,
        verdict.refused,
        verdict.disk_full,
        verdict.unknown,
        verdict.unknown_in_log,
        verdict.reads,
        verdict.reads_failed,
        verdict.reads_while_full,
        verdict.records,
        verdict.positions,
        verdict.fails,
        verdict.taken_back,
        verdict.unavailable,
        verdict.acknowledged_unavailable,
    );
    if verdict.violations_total == 0 {
        println!(
            "no violation: nothing acknowledged is lost, doubled, moved or changed; appends are linearizable; every \
                  subscriber was confirmed the same log"
        );
    } else {
        println!("{} VIOLATIONS:", verdict.violations_total);
        verdict.violations.iter().for_each(|violation| println!("  {violation}"));
    }
}
