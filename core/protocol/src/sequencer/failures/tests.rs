//! Who is lost, and what is written of it, driven by hand.

use alloc::vec;
use alloc::vec::Vec;

use super::super::{MemberConfig, SequencerConfig};
use super::*;
use crate::ledger::Applied;
use crate::types::{Beat, CutPoint, Ordering, Position};
use crate::wire::node::Target;

const MS: u64 = 1_000_000;

#[derive(Default)]
struct World(Vec<Vec<u8>>);

impl SequencerOut for World {
    fn propose(&mut self, entry: &[u8]) {
        self.0.push(entry.to_vec());
    }

    fn target(&mut self, _shard: ShardId, _primary: u16, _target: Target) {}
}

/// Shard 0 with two members and a spare, shard 1 with `others` members; quota 2 each, windows of 10 cuts, a tick of 1 ms;
/// silence is a loss after 100 ms, a connection has 5 ms to come back.
struct Rig {
    sequencer: Sequencer,
    world: World,
    now_ns: u64,
    reports: [[Report; 3]; 2],
}

impl Rig {
    fn new(others: u16) -> Rig {
        let shard =
            |id, replicas, members| MemberConfig { shard: ShardId(id), quota: 2, standby: false, replicas, members };
        let sequencer = Sequencer::new(SequencerConfig {
            tick_ns: MS,
            tick_phase_ns: 0,
            window_cuts: 10,
            ordering: Ordering::Fixed,
            beat: Beat::Target,
            shards: vec![shard(0, 3, 2), shard(1, others, others)],
            adaptive_quotas: false,
            target_pace_ns: 0,
            prefix_pace_ns: 0,
            late_ticks: 4,
            ground_windows: 0,
            suspect_ns: 100 * MS,
            lost_grace_ns: 5 * MS,
            free_cuts_max: 8,
        });
        let report = |shard: usize, replica: usize| Report {
            shard: ShardId(shard as u16),
            replica: replica as u16,
            incarnation: 10 * (1 + shard as u64) + replica as u64,
            ..Report::default()
        };
        let reports = [0, 1].map(|shard| [0, 1, 2].map(|replica| report(shard, replica)));
        let mut rig = Rig { sequencer, world: World::default(), now_ns: MS, reports };
        rig.sequencer.on_lead(rig.now_ns, &mut rig.world);
        rig.commit();
        for (shard, replicas) in [(0, 3), (1, usize::from(others))] {
            for replica in 0..replicas {
                rig.report(shard, replica, |_| {});
            }
        }
        rig
    }

    /// Commits what is proposed; what it changed of memberships and views, as text.
    fn commit(&mut self) -> Vec<alloc::string::String> {
        let mut said = Vec::new();
        while !self.world.0.is_empty() {
            let entry = self.world.0.remove(0);
            let index = self.sequencer.ledger().applied_index() + 1;
            match self.sequencer.on_committed(self.now_ns, index, &entry, &mut self.world).unwrap() {
                Applied::MembersChanged(shard) => {
                    let m = self.sequencer.ledger().membership(shard).unwrap();
                    let numbers: Vec<u16> = m.members.iter().map(|m| m.number).collect();
                    said.push(alloc::format!("{shard}: epoch {} primary {} of {numbers:?}", m.epoch, m.primary));
                }
                Applied::ViewChanged => said.push(alloc::format!("view {}", self.sequencer.ledger().view())),
                _ => {}
            }
        }
        said
    }

    /// A replica reports, with a change that stays.
    fn report(&mut self, shard: usize, replica: usize, change: impl FnOnce(&mut Report)) -> Vec<alloc::string::String> {
        let m = self.sequencer.ledger().membership(ShardId(shard as u16)).cloned();
        let report = &mut self.reports[shard][replica];
        if let Some(m) = m {
            (report.change, report.epoch) = (m.change, m.epoch);
            report.primary = m.primary == report.replica && !m.has_failed();
        }
        report.view = self.sequencer.ledger().view();
        change(report);
        let report = *report;
        self.sequencer.on_report(self.now_ns, &report, &mut self.world);
        self.commit()
    }

    fn down(&mut self, shard: u16, replica: u16) -> Vec<alloc::string::String> {
        self.sequencer.on_replica_down(self.now_ns, ShardId(shard), replica, &mut self.world);
        self.commit()
    }

    /// Time passes; all but these replicas go on reporting.
    fn wait(&mut self, ms: u64, silent: &[(usize, usize)]) -> Vec<alloc::string::String> {
        let mut said = Vec::new();
        for _ in 0..ms {
            self.now_ns += MS;
            for shard in 0..2 {
                for replica in 0..self.sequencer.replicas[shard].len() {
                    if !silent.contains(&(shard, replica)) {
                        said.extend(self.report(shard, replica, |_| {}));
                    }
                }
            }
            self.sequencer.on_time(self.now_ns, &mut self.world);
            said.extend(self.commit());
        }
        said
    }

    fn members(&self, shard: u16) -> Vec<u16> {
        let m = self.sequencer.ledger().membership(ShardId(shard)).unwrap();
        m.members.iter().map(|m| m.number).collect()
    }
}

#[test]
fn a_shard_begins_when_all_its_members_have_reported_and_spares_wait() {
    let rig = Rig::new(2);
    assert_eq!((rig.members(0), rig.members(1)), (vec![0, 1], vec![0, 1]));
    let m = rig.sequencer.ledger().membership(ShardId(0)).unwrap();
    assert_eq!((m.change, m.epoch, m.primary, m.members[1].incarnation), (1, 1, 0, 11));
}

#[test]
fn a_lost_connection_of_a_backup_counts_when_its_primary_has_lost_it_too() {
    let mut rig = Rig::new(2);
    assert!(rig.down(0, 1).is_empty(), "the primary hears it");
    assert_eq!(rig.report(0, 0, |r| r.lost = 0b10), ["0: epoch 1 primary 0 of [0]"]);
}

#[test]
fn a_lost_primary_is_followed_by_the_member_that_verified_most() {
    let mut rig = Rig::new(3);
    rig.report(1, 1, |r| r.durable_lsn = Lsn(7));
    rig.report(1, 2, |r| r.durable_lsn = Lsn(9));
    rig.report(1, 1, |r| r.lost = 0b001);
    assert!(rig.down(1, 0).is_empty(), "replica 2 still hears it");
    assert_eq!(rig.report(1, 2, |r| r.lost = 0b001), ["1: epoch 2 primary 2 of [1, 2]"]);
}

#[test]
fn who_leaves_is_dropped_while_somebody_stays_and_the_last_is_not() {
    let mut rig = Rig::new(2);
    assert_eq!(rig.report(0, 1, |r| r.lost = 0b10), ["0: epoch 1 primary 0 of [0]"]);
    assert!(rig.report(0, 0, |r| r.lost = 0b01).is_empty(), "nobody can take over");
    assert!(rig.report(1, 1, |r| r.durable_lsn = Lsn(3)).is_empty());
    assert_eq!(rig.report(1, 0, |r| r.lost = 0b01), ["1: epoch 2 primary 1 of [1]"]);
    // A spare that leaves does not join.
    let mut rig = Rig::new(2);
    rig.report(0, 2, |r| r.lost = 0b100);
    let spare = ReplicaId { number: 2, incarnation: 12 };
    assert_eq!(rig.report(0, 0, |r| r.joiner = Some(spare)), ["0: epoch 1 primary 0 of [0, 1]"]);
    // Both leave: both stay until one of them is gone.
    let mut rig = Rig::new(2);
    assert_eq!(rig.report(1, 0, |r| r.lost = 0b01), ["1: epoch 2 primary 1 of [1]"]);
    assert!(rig.report(1, 1, |r| r.lost = 0b10).is_empty());
}

#[test]
fn another_life_of_a_member_is_no_member() {
    let mut rig = Rig::new(2);
    assert_eq!(rig.report(0, 1, |r| r.incarnation = 99), ["0: epoch 1 primary 0 of [0]"]);
    assert_eq!(rig.report(1, 0, |r| r.incarnation = 98), ["1: epoch 2 primary 1 of [1]"]);
}

#[test]
fn who_is_silent_is_lost_after_a_while_and_a_connection_that_comes_back_in_time_is_not() {
    let mut rig = Rig::new(2);
    assert!(rig.wait(99, &[(0, 1)]).is_empty());
    assert_eq!(rig.wait(30, &[(0, 1)]), ["0: epoch 1 primary 0 of [0]"]);
    let mut rig = Rig::new(1);
    assert!(rig.down(1, 0).is_empty());
    assert!(rig.wait(3, &[(1, 0)]).is_empty(), "it has five milliseconds");
    assert!(rig.wait(10, &[]).is_empty());
    assert!(rig.down(1, 0).is_empty());
    assert_eq!(rig.wait(8, &[(1, 0)]), ["view 1"], "nobody else can speak for it");
}

#[test]
fn a_replica_that_has_caught_up_is_added_and_one_that_is_lost_again_is_said_not_to_be() {
    let mut rig = Rig::new(2);
    let spare = ReplicaId { number: 2, incarnation: 12 };
    assert_eq!(rig.report(0, 0, |r| r.joiner = Some(spare)), ["0: epoch 1 primary 0 of [0, 1, 2]"]);
    assert!(rig.report(0, 0, |r| r.joiner = None).is_empty());
    // The spare of another life, which the primary does not know to be gone.
    let mut rig = Rig::new(2);
    rig.report(0, 2, |r| r.incarnation = 77);
    assert_eq!(rig.report(0, 0, |r| r.joiner = Some(spare)), ["0: epoch 1 primary 0 of [0, 1]"], "its change counts");
}

#[test]
fn cuts_go_on_without_a_lost_shard_and_it_returns_with_the_longest_log() {
    let mut rig = Rig::new(2);
    let slots = |cut: u32| CutPoint { window: 0, cut, prefix: 0 };
    let reach = |cut| move |r: &mut Report| (r.point, r.records_lsn, r.durable_lsn) = (slots(cut), Lsn(2), Lsn(2));
    rig.report(0, 0, reach(1));
    rig.report(1, 0, reach(1));
    assert_eq!(rig.sequencer.ledger().committed(), Position(4));
    rig.report(1, 0, |r| r.durable_lsn = Lsn(6));
    // Both of its replicas die.
    rig.report(1, 1, |r| r.lost = 0b01);
    assert!(rig.down(1, 0).contains(&"1: epoch 2 primary 1 of [1]".into()));
    assert!(rig.down(1, 1).is_empty());
    let said = rig.wait(8, &[(1, 0), (1, 1)]);
    assert_eq!(said, ["view 1"]);
    rig.report(0, 0, |r| (r.point, r.records_lsn) = (slots(3), Lsn(6)));
    assert!(rig.sequencer.ledger().committed() >= Position(12), "shard 0 goes on: its cut 3 is bound");
    // They come back: one kept its log, the other has another life.
    assert!(
        rig.report(1, 1, |r| (r.lost, r.incarnation, r.durable_lsn) = (0, 55, Lsn(0))).is_empty(),
        "the other may come"
    );
    assert_eq!(rig.report(1, 0, |r| (r.lost, r.durable_lsn) = (0, Lsn(2))), ["1: epoch 3 primary 0 of [0]"]);
    let member = *rig.sequencer.ledger().member(ShardId(1)).unwrap();
    assert_eq!((member.first_lsn, member.open), (Lsn(2), true), "it goes on behind its last bound slot");
}

/// Every member of shard 1 died with the sequencers, whose new leader has heard nobody.
fn reborn() -> Rig {
    let mut rig = Rig::new(2);
    rig.now_ns += MS;
    rig.sequencer.expect_replicas(rig.now_ns);
    for replica in 0..3 {
        rig.report(0, replica, |_| {});
    }
    rig
}

#[test]
fn members_that_are_born_again_with_all_that_counted_go_on_with_the_longest_log() {
    let mut rig = reborn();
    assert!(
        rig.report(1, 0, |r| (r.incarnation, r.succeeds, r.durable_lsn) = (98, 20, Lsn(5))).is_empty(),
        "1 may come"
    );
    let said = rig.report(1, 1, |r| (r.incarnation, r.succeeds, r.durable_lsn) = (99, 21, Lsn(7)));
    assert_eq!(said, ["1: epoch 2 primary 1 of [0, 1]"]);
    let m = rig.sequencer.ledger().membership(ShardId(1)).unwrap();
    assert_eq!((m.members[0].incarnation, m.members[1].incarnation), (98, 99));
    // One that has not heard who the members are cannot say that it was one.
    let mut rig = reborn();
    let behind = |r: &mut Report| (r.incarnation, r.change, r.durable_lsn) = (98, 0, Lsn(5));
    assert!(rig.report(1, 0, behind).is_empty());
    assert!(rig.report(1, 1, |r| (r.incarnation, r.succeeds) = (99, 21)).is_empty());
    assert_eq!(rig.report(1, 0, |r| r.succeeds = 20), ["1: epoch 2 primary 0 of [0, 1]"]);
}

#[test]
fn one_that_kept_everything_goes_on_alone_when_the_others_have_not_or_do_not_come() {
    let mut rig = reborn();
    assert!(rig.report(1, 1, |r| (r.incarnation, r.durable_lsn) = (99, Lsn(9))).is_empty(), "0 may come");
    let said = rig.report(1, 0, |r| (r.incarnation, r.succeeds, r.durable_lsn) = (98, 20, Lsn(5)));
    assert_eq!(said, ["1: epoch 2 primary 0 of [0]"]);
    let mut rig = reborn();
    assert!(rig.report(1, 1, |r| (r.incarnation, r.succeeds) = (99, 21)).is_empty());
    assert!(rig.wait(1000, &[(1, 0)]).is_empty(), "a new leader is patient");
    assert_eq!(rig.wait(200, &[(1, 0)]), ["1: epoch 2 primary 1 of [1]"]);
}

#[test]
fn members_that_are_born_again_without_what_counted_are_a_lost_shard() {
    let mut rig = reborn();
    assert!(rig.report(1, 0, |r| (r.incarnation, r.durable_lsn) = (98, Lsn(5))).is_empty());
    // That of another life than the member's is not enough.
    let said = rig.report(1, 1, |r| (r.incarnation, r.succeeds, r.durable_lsn) = (99, 77, Lsn(7)));
    assert_eq!(said, ["view 1"]);
}
