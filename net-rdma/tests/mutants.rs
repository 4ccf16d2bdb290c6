//! The emulated fabric finds the bugs of RDMA that [`Mutant`] plants, within a stated number of seeds.
//!
//! `cargo test --release -p antelog-net-rdma --features mutants --test mutants -- --nocapture` prints what caught what.

use antelog_core::sim::{Failure, Knobs, Overrides};
use antelog_net_rdma::sim::simulate;
use antelog_protocol::mutant::{Mutant, plant};

/// A bug, the most seeds that finding it may take, and what the fabric says.
const MUTANTS: [(Mutant, u64, &str); 2] = [
    (Mutant::KeepOldKeys, 200, "a write with a key that opens nothing there"),
    (Mutant::ReuseHandedOver, 20, "changed"),
];

fn run(seed: u64) -> Option<Failure> {
    simulate(Knobs::draw(seed, &Overrides::default()), false).expect("memory for a small cluster").failure
}

/// The switch is the whole process's, so one test plants one bug after the other.
#[test]
fn every_mutant_is_caught() {
    for (mutant, limit, says) in MUTANTS {
        plant(Some(mutant));
        let found = (0..limit).find_map(|seed| run(seed).map(|failure| (seed, failure)));
        plant(None);
        let Some((seed, failure)) = found else { panic!("{mutant:?} is not caught by {limit} seeds") };
        println!("{mutant:?}: seed {seed} of {limit}: {failure}");
        assert!(matches!(&failure, Failure::Crash(what) if what.contains(says)), "{mutant:?} shows as {failure}");
        assert_eq!(run(seed), None, "with nothing planted");
    }
}
