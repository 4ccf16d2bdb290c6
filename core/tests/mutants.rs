//! The simulator finds every bug that [`Mutant`] plants, within a stated number of seeds: what it does not complain about
//! in the code as it is, it has looked at.
//!
//! `cargo test --release -p antelog-core --features mutants --test mutants -- --nocapture` prints what caught what.

use antelog_core::log::{LogOptions, LogWriter, Retention};
use antelog_core::mem::Region;
use antelog_core::sim::knobs::FaultSet;
use antelog_core::sim::{Failure, Knobs, Overrides, simulate};
use antelog_core::storage::{BLOCK_BYTES, Damage, LogStore, Mark, Owner, SimDisk, StoreConfig, Verify};
use antelog_protocol::mutant::{Mutant, plant};
use antelog_protocol::{ClientId, ShardId};

use self::Caught::{Crash, Ends, Stuck, Wrong};

/// How a bug shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caught {
    /// The oracle names this invariant.
    Wrong(&'static str),
    /// Something is never told.
    Stuck,
    /// An agent panics and names this invariant.
    Crash(&'static str),
    /// An agent ends and says this.
    Ends(&'static str),
}

impl Caught {
    fn is(self, failure: &Failure) -> bool {
        match (self, failure) {
            (Wrong(id), Failure::Wrong(violation)) => violation.id == id,
            (Stuck, Failure::Stuck(_)) => true,
            (Crash(id), Failure::Crash(what)) => what.contains(&format!("({id})")),
            (Ends(text), Failure::Crash(what)) => what.contains(text),
            _ => false,
        }
    }
}

/// A bug, the most seeds that finding it may take, and how it may show. Limits are two to four times the most seeds that
/// were needed from any of three starts, so that drawing seeds differently does not break them.
const MUTANTS: [(Mutant, u64, &[Caught]); 31] = [
    (Mutant::AcknowledgeWhenDurable, 4, &[Wrong("I6")]),
    (Mutant::ReportOneSlotEarly, 4, &[Wrong("I11")]),
    (Mutant::ForgetSessions, 80, &[Wrong("I3"), Wrong("I4")]),
    (Mutant::ConfirmPastAGap, 4, &[Wrong("I2")]),
    (Mutant::SpeculateWithoutAGrant, 10, &[Wrong("I13"), Wrong("I1")]),
    (Mutant::ReadPastTheCommit, 6, &[Wrong("I4")]),
    (Mutant::KeepOldQuotas, 10, &[Wrong("I12"), Wrong("I8"), Wrong("I1"), Wrong("I16")]),
    (Mutant::DeliverNoOps, 4, &[Wrong("I16")]),
    (Mutant::FillOverARecord, 80, &[Wrong("I4")]),
    (Mutant::CountRepeatedReports, 60, &[Wrong("I11")]),
    (Mutant::ForgetTheTargetAtAnEdge, 3000, &[Stuck]),
    (Mutant::GrantTwice, 4, &[Wrong("I12")]),
    // A ledger may trip over the gap before the oracle hears of it.
    (Mutant::SkipAnOrderEntry, 20, &[Wrong("I12"), Crash("I12")]),
    (Mutant::AppendFirstRetries, 8, &[Wrong("I3")]),
    (Mutant::TakeShapesForEntries, 40, &[Wrong("chain"), Wrong("I11"), Stuck]),
    (Mutant::DeliverOverwritten, 3000, &[Wrong("I1"), Wrong("I2"), Wrong("I18")]),
    (Mutant::FollowFillsAhead, 60, &[Wrong("L3")]),
    (Mutant::QuorumOfMembers, 1000, &[Wrong("I11"), Wrong("I4"), Crash("I4")]),
    (Mutant::CountASpareEarly, 2000, &[Wrong("I4"), Wrong("I11")]),
    (Mutant::ResumeAtTheOldOffset, 2000, &[Wrong("I4"), Wrong("I11"), Wrong("chain"), Stuck, Ends("bad entry")]),
    (Mutant::ServeUnfenced, 10_000, &[Wrong("I4"), Wrong("I11"), Wrong("chain"), Stuck]),
    (Mutant::AppendOverAGap, 300, &[Wrong("I7"), Wrong("I4")]),
    (Mutant::KeepLostSpeculation, 50, &[Wrong("I8"), Wrong("I10"), Stuck]),
    (Mutant::FailConfirmed, 100, &[Wrong("I9")]),
    (Mutant::FailWithThePrimary, 1000, &[Wrong("I10")]),
    (Mutant::VoidTheNeighbours, 50, &[Wrong("I15"), Wrong("I2")]),
    (Mutant::RecycleUnbound, 300, &[Wrong("I18"), Wrong("I11")]),
    (Mutant::CountReportsOfLostShards, 10_000, &[Wrong("I11"), Wrong("I14"), Crash("I11")]),
    (Mutant::CountUnflushed, 400, &[Wrong("I4"), Wrong("I11"), Wrong("I14"), Crash("I4")]),
    (Mutant::RetryFailedSyncs, 100, &[Wrong("I4"), Crash("I4"), Ends("a replica's disk is refused")]),
    (Mutant::ForgetTheBaseOffset, 400, &[Wrong("I4"), Wrong("I11"), Stuck]),
];

/// Where the log on a disk ends that was cut in front of two entries of which the first was written again, with the same
/// bytes, before power was lost. Each entry takes two whole blocks, so that none is in the last block of the one before.
fn end_after_a_cut() -> u64 {
    let owner = Owner { cluster: "test".into(), shard: ShardId(0), replica: 0 };
    let config = StoreConfig {
        owner,
        incarnation: 1,
        segment_bytes: 64 << 10,
        verify: Verify::Newest,
        damage: Damage::Refuse,
        unix_ms: 0,
    };
    let disk = SimDisk::new(1);
    let region = Region::new(256 << 10).expect("memory");
    let options = LogOptions { retention: Retention::Refuse, record_bytes_max: 8192 };
    let mut log = LogWriter::new(region.clone(), ShardId(0), 1, options);
    let mut ends = [Mark::default(); 3];
    for (seq, end) in (0..).zip(&mut ends) {
        log.record(ClientId(7), seq, &[seq as u8; 2 * BLOCK_BYTES - 64]);
        *end = log.place().into();
    }
    let (mut store, _) = LogStore::open(disk.handle().expect("a free disk"), &config, region.clone()).expect("a log");
    let write = |store: &mut LogStore<_>, end| {
        store.write_up_to(end);
        store.flush();
        store.settle().expect("a disk without faults");
    };
    write(&mut store, ends[2]);
    store.truncate_to(ends[0]).expect("a disk without faults");
    write(&mut store, ends[1]);
    drop(store);
    disk.power_loss();
    let (_, found) = LogStore::open(disk.handle().expect("a free disk"), &config, region).expect("a log");
    found.end.at / (2 * BLOCK_BYTES as u64)
}

/// Faults that show a bug: those of failing over need worse ones than the others.
fn faults(mutant: Mutant) -> Option<FaultSet> {
    let names = match mutant {
        Mutant::QuorumOfMembers
        | Mutant::CountASpareEarly
        | Mutant::ResumeAtTheOldOffset
        | Mutant::ServeUnfenced
        | Mutant::FailWithThePrimary => "lost-links,pauses,crashes,partitions",
        Mutant::CountReportsOfLostShards
        | Mutant::KeepLostSpeculation
        | Mutant::FailConfirmed
        | Mutant::VoidTheNeighbours => "lost-links,pauses,crashes,partitions,shard-loss",
        Mutant::CountUnflushed | Mutant::RetryFailedSyncs | Mutant::ForgetTheBaseOffset => "crashes,power",
        // Whatever seeds draw.
        Mutant::AppendFirstRetries | Mutant::DeliverOverwritten | Mutant::RecycleUnbound => return None,
        _ => "lost-links,pauses,sessions",
    };
    FaultSet::from_names(names)
}

/// Small clusters: a seed takes some milliseconds.
fn run(seed: u64, faults: Option<FaultSet>) -> Option<Failure> {
    let overrides = Overrides { shards: Some(2 + (seed % 3) as u16), faults, ..Overrides::default() };
    simulate(Knobs::draw(seed, &overrides), false).expect("memory for a small cluster").failure
}

/// The switch is the whole process's, so one test plants one bug after the other.
#[test]
fn every_mutant_is_caught() {
    let mut missed = Vec::new();
    // Seeds that are needed, for each choice of faults.
    let mut most: Vec<(Option<FaultSet>, u64)> = Vec::new();
    let chosen = std::env::var("MUTANT").ok();
    let is_chosen = |mutant: &Mutant| chosen.as_ref().is_none_or(|name| *name == format!("{mutant:?}"));
    for (mutant, limit, expected) in MUTANTS.into_iter().filter(|(mutant, ..)| is_chosen(mutant)) {
        let faults = faults(mutant);
        plant(Some(mutant));
        let found = (0..limit).find_map(|seed| run(seed, faults).map(|failure| (seed + 1, failure)));
        plant(None);
        let Some((seeds, failure)) = found else {
            missed.push(format!("{mutant:?} is not caught by {limit} seeds"));
            continue;
        };
        match most.iter_mut().find(|(of, _)| *of == faults) {
            Some((_, most)) => *most = seeds.max(*most),
            None => most.push((faults, seeds)),
        }
        println!("{:<24} seeds {seeds:>3} of {limit:>3}  {failure}", format!("{mutant:?}"));
        if !expected.iter().any(|kind| kind.is(&failure)) {
            missed.push(format!("{mutant:?} is expected to be {expected:?}, but is {failure}"));
        }
    }
    for (faults, seed) in most.into_iter().flat_map(|(faults, most)| (0..most).map(move |seed| (faults, seed))) {
        if let Some(failure) = run(seed, faults) {
            missed.push(format!("seed {seed} fails with nothing planted: {failure}"));
        }
    }
    // What replicas do never writes the very same entry again behind a cut, so whole clusters do not show this one.
    assert_eq!(end_after_a_cut(), 2);
    plant(Some(Mutant::KeepTornTails));
    assert_eq!(end_after_a_cut(), 3, "KeepTornTails: the entry that was cut off is back");
    plant(None);
    assert!(missed.is_empty(), "\n{}\n", missed.join("\n"));
}
