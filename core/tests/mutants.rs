//! The simulator finds every bug that [`Mutant`] plants, within a stated number of seeds: what it does not complain about
//! in the code as it is, it has looked at.
//!
//! `cargo test --release -p antelog-core --features mutants --test mutants -- --nocapture` prints what caught what.

use antelog_core::sim::{Failure, Knobs, Overrides, simulate};
use antelog_protocol::mutant::{Mutant, plant};

/// How a bug shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caught {
    /// The oracle names what does not hold.
    Wrong(&'static str),
    /// Something was never told.
    Stuck,
    /// An always-on assertion, with its text or its invariant.
    Crash(&'static str),
}

impl Caught {
    fn is(self, failure: &Failure) -> bool {
        match (self, failure) {
            (Caught::Wrong(id), Failure::Wrong(violation)) => violation.id == id,
            (Caught::Stuck, Failure::Stuck(_)) => true,
            (Caught::Crash(text), Failure::Crash(what)) => what.contains(text),
            _ => false,
        }
    }
}

/// A bug, the most seeds that finding it may take, and how it may show.
const MUTANTS: &[(Mutant, u64, &[Caught])] = &[
    (Mutant::AcknowledgeWhenDurable, 2000, &[]),
    (Mutant::ReportOneSlotEarly, 2000, &[]),
    (Mutant::ForgetSessions, 2000, &[]),
    (Mutant::ConfirmPastAGap, 2000, &[]),
    (Mutant::SpeculateWithoutAGrant, 2000, &[]),
    (Mutant::ReadPastTheCommit, 2000, &[]),
    (Mutant::KeepOldQuotas, 2000, &[]),
    (Mutant::DeliverNoOps, 2000, &[]),
    (Mutant::FillOverARecord, 2000, &[]),
    (Mutant::CountRepeatedReports, 2000, &[]),
    (Mutant::GrantTwice, 2000, &[]),
    (Mutant::SkipAnOrderEntry, 2000, &[]),
    (Mutant::AppendFirstRetries, 2000, &[]),
    (Mutant::TakeShapesForEntries, 2000, &[]),
    (Mutant::DeliverOverwritten, 2000, &[]),
    (Mutant::FollowFillsAhead, 2000, &[]),
    (Mutant::ForgetTheTargetAtAnEdge, 2000, &[]),
];

/// Small clusters: a seed takes a few milliseconds.
fn run(seed: u64) -> Option<Failure> {
    let overrides = Overrides { shards: Some(2 + (seed % 3) as u16), ..Overrides::default() };
    simulate(Knobs::draw(seed, &overrides), false).expect("memory for a small cluster").failure
}

#[test]
fn every_mutant_is_caught() {
    let only = std::env::var("ONLY").unwrap_or_default();
    let start: u64 = std::env::var("START").ok().and_then(|s| s.parse().ok()).unwrap_or(0);
    for (mutant, limit, _) in MUTANTS {
        if !format!("{mutant:?}").contains(&only) { continue; }
        plant(Some(*mutant));
        let at = std::time::Instant::now();
        let caught = (start..start+*limit).find_map(|seed| run(seed).map(|failure| (seed + 1 - start, failure)));
        plant(None);
        println!("{mutant:?} {caught:?} {:?}", at.elapsed());
    }
}
