//! The simulator finds every bug that [`Mutant`] plants, within a stated number of seeds: what it does not complain about
//! in the code as it is, it has looked at.
//!
//! `cargo test --release -p antelog-core --features mutants --test mutants -- --nocapture` prints what caught what.

use antelog_core::sim::{Failure, Knobs, Overrides, simulate};
use antelog_protocol::mutant::{Mutant, plant};

/// How a bug shows: the invariant that the oracle names, something that is never told, or an always-on assertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caught {
    Wrong(&'static str),
    Stuck,
    Crash,
}

impl Caught {
    fn by(failure: &Failure) -> Caught {
        match failure {
            Failure::Wrong(violation) => Caught::Wrong(violation.id),
            Failure::Stuck(_) => Caught::Stuck,
            Failure::Crash(_) => Caught::Crash,
        }
    }
}

/// A bug, the most seeds that finding it may take, and how it shows.
const MUTANTS: [(Mutant, u64, Caught); 17] = [
    (Mutant::AcknowledgeWhenDurable, 4, Caught::Wrong("I6")),
    (Mutant::ReportOneSlotEarly, 4, Caught::Wrong("I11")),
    (Mutant::ForgetSessions, 4, Caught::Wrong("I3")),
    (Mutant::ConfirmPastAGap, 4, Caught::Wrong("I2")),
    (Mutant::SpeculateWithoutAGrant, 10, Caught::Wrong("I13")),
    (Mutant::ReadPastTheCommit, 6, Caught::Wrong("I4")),
    (Mutant::KeepOldQuotas, 10, Caught::Wrong("I8")),
    (Mutant::DeliverNoOps, 4, Caught::Wrong("I16")),
    (Mutant::FillOverARecord, 80, Caught::Wrong("I4")),
    (Mutant::CountRepeatedReports, 6, Caught::Wrong("I11")),
    (Mutant::ForgetTheTargetAtAnEdge, 400, Caught::Stuck),
    (Mutant::GrantTwice, 4, Caught::Wrong("I12")),
    (Mutant::SkipAnOrderEntry, 12, Caught::Wrong("I12")),
    (Mutant::AppendFirstRetries, 4, Caught::Wrong("I3")),
    (Mutant::TakeShapesForEntries, 12, Caught::Wrong("chain")),
    (Mutant::DeliverOverwritten, 40, Caught::Wrong("I1")),
    (Mutant::FollowFillsAhead, 12, Caught::Wrong("L3")),
];

/// Small clusters: a seed takes some milliseconds.
fn run(seed: u64) -> Option<Failure> {
    let overrides = Overrides { shards: Some(2 + (seed % 3) as u16), ..Overrides::default() };
    simulate(Knobs::draw(seed, &overrides), false).expect("memory for a small cluster").failure
}

/// The switch is the whole process's, so one test plants one bug after the other.
#[test]
fn every_mutant_is_caught() {
    let mut missed = Vec::new();
    let mut most = 0;
    for (mutant, limit, expected) in MUTANTS {
        plant(Some(mutant));
        let found = (0..limit).find_map(|seed| run(seed).map(|failure| (seed + 1, failure)));
        plant(None);
        let Some((seeds, failure)) = found else {
            missed.push(format!("{mutant:?} is not caught by {limit} seeds"));
            continue;
        };
        most = most.max(seeds);
        println!("{:<24} seeds {seeds:>3} of {limit:>3}  {failure}", format!("{mutant:?}"));
        if Caught::by(&failure) != expected {
            missed.push(format!("{mutant:?} is expected to be {expected:?}, but is {failure}"));
        }
    }
    for seed in 0..most {
        if let Some(failure) = run(seed) {
            missed.push(format!("seed {seed} fails with nothing planted: {failure}"));
        }
    }
    assert!(missed.is_empty(), "\n{}\n", missed.join("\n"));
}
