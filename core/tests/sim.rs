//! The simulator: seeds repeat to the byte, default seeds pass, large clusters run, and its network keeps the contract.

use antelog_core::contract::{Harness, checks};
use antelog_core::sim::knobs::FaultSet;
use antelog_core::sim::network::{NetKnobs, Network, Shared, SimLink, SimTransport, Way, advance, connect};
use antelog_core::sim::probes::REQUIRED;
use antelog_core::sim::{Knobs, Outcome, Overrides, Probes, simulate};
use antelog_protocol::Ordering;

const ALL_FAULTS: &str = "lost-links,pauses,sessions,leaders,crashes,partitions,shard-loss";

fn run(seed: u64, overrides: &Overrides, traced: bool) -> Outcome {
    simulate(Knobs::draw(seed, overrides), traced).expect("memory for a small cluster")
}

fn passes(seed: u64, overrides: &Overrides) -> Outcome {
    let outcome = run(seed, overrides, false);
    if let Some(failure) = &outcome.failure {
        panic!("seed {seed} with {overrides:?}: {failure}");
    }
    outcome
}

#[test]
fn a_seed_repeats_to_the_byte() {
    for seed in 0..6 {
        let (first, again) = (run(seed, &Overrides::default(), true), run(seed, &Overrides::default(), true));
        assert!(first.trace.as_ref().is_some_and(|trace| trace.len() > 10_000), "seed {seed} did next to nothing");
        assert!(first.trace == again.trace, "seed {seed}: the traces differ");
        assert_eq!(first.digest, again.digest, "seed {seed}");
        // Writing the trace down changes nothing.
        assert_eq!(first.digest, run(seed, &Overrides::default(), false).digest, "seed {seed}");
    }
}

#[test]
fn seeds_differ() {
    let mut digests: Vec<u64> = (0..20).map(|seed| run(seed, &Overrides::default(), false).digest).collect();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 20);
}

#[test]
fn two_hundred_seeds_pass() {
    let mut probes = Probes::default();
    for seed in 0..200 {
        probes.merge(&passes(seed, &Overrides::default()).probes);
    }
    assert_eq!(probes.missed(&REQUIRED), Vec::<&str>::new(), "situations that were not reached");
}

/// Seeds that found something once: what it was.
#[test]
fn seeds_that_failed_once_pass() {
    // A stream that ended at a gate with nothing else to do: its last word was never sent.
    passes(106, &Overrides::default());
    // Everything that was bound had been dropped: "the log begins at 0".
    passes(94, &Overrides::default());
    passes(873, &Overrides::default());
    // A subscriber slower than the cuts of free windows that are remembered was not told so, and waited for ever.
    passes(35, &Overrides::default());
    passes(159, &Overrides::default());
    // A gate that became wanted while it was left alone after a lost connection was never called again.
    passes(22832, &Overrides::default());
}

/// As above, of clusters whose replicas die and come back, under the faults that found it.
#[test]
fn seeds_of_failing_over_that_failed_once_pass() {
    let with =
        |faults: &str, shards| Overrides { faults: FaultSet::from_names(faults), shards, ..Overrides::default() };
    let all = with(ALL_FAULTS, None);
    // The primary that was asked for the last fixed windows before a free one died; the next one was not asked.
    passes(164, &Overrides { shards: Some(4), ..Overrides::default() });
    // Two empty records under one number, of which the first was lost.
    passes(235, &with("lost-links,pauses,crashes,partitions", Some(3)));
    // The credit of what is void was not given back to a subscription to one shard.
    passes(1743, &Overrides::default());
    passes(1964, &Overrides::default());
    // Whoever waited for a fence heard of the next epoch from a fence first, and waited for ever.
    passes(719, &all);
    // A gate that learned late of a failure went back to before what was asked for; was called trimmed for it.
    passes(794, &all);
    passes(1392, &Overrides::default());
    // Half of a snapshot served clients; one was dropped because another sequencer ended.
    passes(278, &all);
    passes(1450, &all);
    // Older positions were forgotten for a snapshot.
    passes(365, &all);
    // What a member had placed and not verified was not counted after a fence.
    passes(241, &Overrides::default());
    // A snapshot that told of a failure long past cut the log of the primary that came after it.
    passes(1205, &all);
    // Void entries stood behind what a later primary wrote again, and were found when the replica was promoted.
    passes(2370, &all);
    // Both shards were told to leave while they were lost.
    passes(980, &Overrides::default());
}

/// As above, of replicas that come back with their disks.
#[test]
fn seeds_on_disk_that_failed_once_pass() {
    let all = Overrides { faults: Some(FaultSet::ALL), ..Overrides::default() };
    // Who led no more forgot the sessions of what had left memory, and said that they had appended nothing.
    passes(401, &all);
    passes(323, &all);
    // A joiner's word of what may be overwritten was of its last log, and what was not on disk yet was overwritten.
    passes(553, &all);
    passes(618, &all);
    // A joiner was told the end of the log of an earlier life before it was given anything.
    passes(669, &all);
    // A snapshot that told of a failure long past cut the log that a replica came back with.
    passes(442, &all);
    // What is bound was overwritten before whoever came back with it had learned so.
    passes(1014, &all);
    // What a predecessor had reported was bound before the others had said again what they have flushed.
    passes(1620, &Overrides::default());
    // The oracle took for a log what was only placed.
    passes(649, &all);
    // A joiner was told of sessions as of what was appended, gave that back, and forgot what had left memory with it.
    passes(104_955, &Overrides { shards: Some(3), ..all });
    passes(105_217, &Overrides { shards: Some(4), ..all });
    // What was missing after one loss was back after the next, and a new record was taken for a retry of an old one.
    passes(107_870, &Overrides { shards: Some(3), ..all });
}

#[test]
fn sixty_four_and_two_hundred_and_fifty_six_shards_pass() {
    for ordering in [Ordering::Fixed, Ordering::FreeTick, Ordering::FreeEvent] {
        let overrides = Overrides {
            shards: Some(64),
            rate_per_s: Some(500),
            load_ns: Some(20_000_000),
            ordering: Some(ordering),
            ..Overrides::default()
        };
        passes(1, &overrides);
        passes(2, &Overrides { shards: Some(256), load_ns: Some(8_000_000), ..overrides });
    }
}

struct Simulated {
    network: Shared,
}

impl Harness for Simulated {
    type T = SimTransport;

    fn transport(&mut self, peers_max: u16) -> SimTransport {
        SimTransport::new(&self.network, 0, peers_max)
    }

    fn link(&mut self) -> (SimLink, SimLink) {
        connect(&self.network)
    }

    fn step(&mut self) {
        advance(&self.network, 20_000);
    }
}

fn keeps_the_contract(nic: bool, capacity: (u64, u64)) {
    let knobs = NetKnobs {
        nic,
        ways: [Way { base_ns: 5_000, jitter_ns: 20_000 }; 3],
        long_ns: 300_000,
        long_one_in: 100,
        capacity,
        targets_overtake: false,
    };
    for (seed, (name, check)) in checks::<Simulated>().into_iter().enumerate() {
        println!("nic {nic}, capacity {capacity:?}: {name}");
        check(&mut Simulated { network: Network::new(seed as u64, knobs.clone(), false) });
    }
}

#[test]
fn the_network_keeps_the_contract_with_a_nic() {
    keeps_the_contract(true, (16, 64));
    keeps_the_contract(true, (600, 600));
}

#[test]
fn the_network_keeps_the_contract_when_operations_land_as_they_are_polled() {
    keeps_the_contract(false, (16, 64));
    keeps_the_contract(false, (600, 600));
}
