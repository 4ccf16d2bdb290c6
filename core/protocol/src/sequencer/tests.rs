//! Grants, cuts with prefixes, targets, and both forms of free windows.

use alloc::vec;
use alloc::vec::Vec;

use super::*;
use crate::types::Position;

#[derive(Default)]
struct World {
    proposals: Vec<Vec<u8>>,
    targets: Vec<(u16, CutPoint)>,
}

impl SequencerOut for World {
    fn propose(&mut self, entry: &[u8]) {
        self.proposals.push(entry.to_vec());
    }

    fn target(&mut self, shard: ShardId, _primary: u16, target: Target) {
        self.targets.push((shard.0, target.point));
    }
}

fn sequencer(ordering: Ordering, window_cuts: u32) -> Sequencer {
    Sequencer::new(config(ordering, window_cuts))
}

/// Three shards with quotas 2, 3, 2, a tick of 1000 ns, and nothing that adapts.
fn config(ordering: Ordering, window_cuts: u32) -> SequencerConfig {
    let shard = |id, quota| MemberConfig { shard: ShardId(id), quota, standby: false, replicas: 0, members: 0 };
    SequencerConfig {
        tick_ns: 1000,
        tick_phase_ns: 300,
        window_cuts,
        ordering,
        beat: Beat::Target,
        shards: vec![shard(0, 2), shard(1, 3), shard(2, 2)],
        adaptive_quotas: false,
        target_pace_ns: 0,
        prefix_pace_ns: 0,
        late_ticks: 4,
        ground_windows: 0,
        free_cuts_max: 64,
        suspect_ns: 200_000_000,
        lost_grace_ns: 5_000_000,
    }
}

fn at(window: u64, cut: u32) -> CutPoint {
    CutPoint { window, cut, prefix: 0 }
}

/// The report of a shard whose slots in window 0 are all records.
fn report(shard: u16, point: CutPoint) -> Report {
    let quota = [2, 3, 2].get(usize::from(shard)).copied().unwrap_or(1);
    let records_lsn = Lsn(quota * u64::from(point.cut));
    Report { shard: ShardId(shard), point, records_lsn, ..Report::default() }
}

fn durable(shard: u16, lsn: u64) -> Report {
    Report { shard: ShardId(shard), durable_lsn: Lsn(lsn), ..Report::default() }
}

/// Commits everything proposed, in order.
fn commit(sequencer: &mut Sequencer, world: &mut World) {
    while !world.proposals.is_empty() {
        let entry = world.proposals.remove(0);
        let index = sequencer.ledger().applied_index() + 1;
        sequencer.on_committed(0, index, &entry, world).unwrap();
    }
}

#[test]
fn a_cut_takes_whole_cuts_and_the_prefix_of_members_that_are_ahead() {
    let (mut s, mut w) = (sequencer(Ordering::Fixed, 100), World::default());
    s.on_lead(0, &mut w);
    commit(&mut s, &mut w);
    assert_eq!(s.ledger().granted_lsn(ShardId(1)), Lsn(300));
    s.on_report(0, &report(1, at(0, 1)), &mut w);
    assert!(w.proposals.is_empty(), "shard 0 has not reported");
    assert_eq!(w.targets, [(0, at(0, 1)), (2, at(0, 1))], "the others are asked at once");
    s.on_report(0, &report(0, at(0, 1)), &mut w);
    commit(&mut s, &mut w);
    assert_eq!(s.ledger().bound(), CutPoint { window: 0, cut: 0, prefix: 2 });
    assert_eq!(s.ledger().committed(), Position(5));
    s.on_report(0, &report(2, at(0, 1)), &mut w);
    commit(&mut s, &mut w);
    assert_eq!(s.ledger().committed(), Position(7));
}

#[test]
fn one_proposal_is_in_flight_and_newer_ones_coalesce() {
    let (mut s, mut w) = (sequencer(Ordering::Fixed, 100), World::default());
    s.on_lead(0, &mut w);
    commit(&mut s, &mut w);
    for cut in 1..=3 {
        for shard in 0..3 {
            s.on_report(0, &report(shard, at(0, cut)), &mut w);
        }
    }
    assert_eq!(w.proposals.len(), 1);
    let first = w.proposals.remove(0);
    s.on_committed(0, 2, &first, &mut w).unwrap();
    assert_eq!(w.proposals.len(), 1, "all that came meanwhile is one cut");
    commit(&mut s, &mut w);
    assert_eq!(s.ledger().bound(), at(0, 3));
}

#[test]
fn the_next_window_is_granted_at_the_middle_of_the_last_one() {
    let (mut s, mut w) = (sequencer(Ordering::Fixed, 4), World::default());
    s.on_lead(0, &mut w);
    commit(&mut s, &mut w);
    assert_eq!(s.ledger().next_window(), 1);
    for shard in 0..3 {
        s.on_report(0, &report(shard, at(0, 1)), &mut w);
    }
    commit(&mut s, &mut w);
    assert_eq!(s.ledger().next_window(), 1);
    for shard in 0..3 {
        s.on_report(0, &report(shard, at(0, 2)), &mut w);
    }
    commit(&mut s, &mut w);
    assert_eq!(s.ledger().next_window(), 2);
    assert_eq!(s.ledger().granted_end(), Position(2 * 4 * 7));
}

#[test]
fn reports_lost_repeated_and_reordered_do_no_harm() {
    let (mut s, mut w) = (sequencer(Ordering::Fixed, 100), World::default());
    s.on_lead(0, &mut w);
    commit(&mut s, &mut w);
    for (shard, cut) in [(0, 5), (0, 2), (1, 5), (1, 1), (2, 5), (2, 5)] {
        s.on_report(0, &report(shard, at(0, cut)), &mut w);
        commit(&mut s, &mut w);
    }
    assert_eq!(s.ledger().bound(), at(0, 5));
    // A shard that repeats a report from below the target is told again.
    w.targets.clear();
    s.on_report(0, &report(0, at(0, 6)), &mut w);
    s.on_report(0, &report(1, at(0, 5)), &mut w);
    assert_eq!(w.targets, [(1, at(0, 6)), (2, at(0, 6)), (1, at(0, 6))]);
    s.on_report(0, &report(9, at(0, 6)), &mut w);
}

#[test]
#[should_panic(expected = "invariant I13")]
fn a_report_beyond_the_grants_is_a_broken_invariant() {
    let (mut s, mut w) = (sequencer(Ordering::Fixed, 100), World::default());
    s.on_lead(0, &mut w);
    commit(&mut s, &mut w);
    s.on_report(0, &report(0, at(1, 1)), &mut w);
}

#[test]
fn who_leaves_is_asked_for_the_fixed_windows_before_a_free_one() {
    let (mut s, mut w) = (sequencer(Ordering::Fixed, 4), World::default());
    s.on_lead(0, &mut w);
    commit(&mut s, &mut w);
    s.on_change(0, Change::Leave(ShardId(2)), &mut w).unwrap();
    s.on_change(0, Change::Ordering(Ordering::FreeEvent), &mut w).unwrap();
    commit(&mut s, &mut w);
    assert_eq!((s.ledger().mode(), s.ledger().bound()), (Some(WindowMode::Free), at(0, 0)));
    // Its primary was told and is lost; the next one reports.
    w.targets.clear();
    s.on_report(0, &report(2, at(0, 0)), &mut w);
    assert_eq!(w.targets, [(2, at(1, 0))]);
    s.on_report(0, &report(2, at(1, 0)), &mut w);
    assert_eq!(w.targets.len(), 1, "it has them all");
}

#[test]
fn free_event_cuts_when_every_report_is_in_and_only_if_something_is_new() {
    let (mut s, mut w) = (sequencer(Ordering::FreeEvent, 2), World::default());
    s.on_lead(0, &mut w);
    commit(&mut s, &mut w);
    for shard in 0..3 {
        s.on_report(0, &durable(shard, 0), &mut w);
    }
    assert!(w.proposals.is_empty(), "an idle log writes nothing");
    s.on_report(0, &durable(0, 4), &mut w);
    s.on_report(0, &durable(0, 5), &mut w);
    s.on_report(0, &durable(1, 0), &mut w);
    assert!(w.proposals.is_empty());
    s.on_report(0, &durable(2, 1), &mut w);
    commit(&mut s, &mut w);
    assert_eq!(s.ledger().committed(), Position(6));
    // The second cut ends the window; the grant of the next follows and carries on where it stopped.
    for shard in 0..3 {
        s.on_report(0, &durable(shard, 6), &mut w);
    }
    commit(&mut s, &mut w);
    assert_eq!((s.ledger().next_window(), s.ledger().committed()), (2, Position(18)));
    assert!(w.targets.is_empty());
}

#[test]
fn free_tick_cuts_on_the_sequencers_own_tick() {
    let (mut s, mut w) = (sequencer(Ordering::FreeTick, 100), World::default());
    s.on_lead(0, &mut w);
    commit(&mut s, &mut w);
    s.on_time(5000, &mut w);
    assert_eq!(s.deadline_ns(), 6300);
    s.on_report(0, &durable(1, 4), &mut w);
    s.on_time(6299, &mut w);
    assert!(w.proposals.is_empty());
    s.on_time(6300, &mut w);
    commit(&mut s, &mut w);
    assert_eq!(s.ledger().committed(), Position(4), "without waiting for the other shards");
    assert_eq!(s.deadline_ns(), 7300);
}
