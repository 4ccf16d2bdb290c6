//! Members of a group that follow the same order log, and take over from each other.

use alloc::vec;
use alloc::vec::Vec;

use super::*;
use crate::ledger::Applied;
use crate::sequencer::{MemberConfig, SequencerConfig};
use crate::types::ReplicaId;
use crate::types::{Beat, Lsn, Position, WindowMode};
use crate::wire::node::{Report, Target};
use crate::wire::order::{
    ORDER_ENTRY_BYTES_MAX, OrderEntry, ShardChangeHead, encode_cut, encode_shard_change, encode_view_change,
};

/// What a member wants done: proposals, targets with whether they close.
#[derive(Default)]
struct World {
    proposals: Vec<Vec<u8>>,
    targets: Vec<(u16, CutPoint, bool)>,
}

impl SequencerOut for World {
    fn propose(&mut self, entry: &[u8]) {
        self.proposals.push(entry.to_vec());
    }

    fn target(&mut self, shard: ShardId, _primary: u16, target: Target) {
        self.targets.push((shard.0, target.point, target.close));
    }
}

/// Two members, of which `leads` decides.
struct Group {
    members: [Sequencer; 2],
    leads: usize,
    world: World,
    now_ns: u64,
}

/// Three shards, of which the last stands by.
fn config() -> SequencerConfig {
    let shard = |id, standby| MemberConfig { shard: ShardId(id), quota: 10, standby, replicas: 0, members: 0 };
    SequencerConfig {
        tick_ns: 1000,
        tick_phase_ns: 0,
        window_cuts: 10,
        ordering: Ordering::Fixed,
        beat: Beat::Target,
        shards: vec![shard(0, false), shard(1, false), shard(2, true)],
        adaptive_quotas: true,
        target_pace_ns: 0,
        prefix_pace_ns: 0,
        late_ticks: 4,
        ground_windows: 5,
        free_cuts_max: 64,
        suspect_ns: 200_000,
        lost_grace_ns: 5_000,
    }
}

fn at(window: u64, cut: u32) -> CutPoint {
    CutPoint { window, cut, prefix: 0 }
}

impl Group {
    fn new() -> Group {
        let members = [(); 2].map(|()| Sequencer::new(config()));
        let mut group = Group { members, leads: 1, world: World::default(), now_ns: 0 };
        group.hand_over();
        group
    }

    /// The other member leads from now on.
    fn hand_over(&mut self) {
        self.members[self.leads].on_follow();
        self.world = World::default();
        self.leads = 1 - self.leads;
        self.members[self.leads].on_lead(self.now_ns, &mut self.world);
        self.commit();
    }

    fn commit(&mut self) {
        while !self.world.proposals.is_empty() {
            let entry = self.world.proposals.remove(0);
            self.apply(&entry);
        }
    }

    fn apply(&mut self, entry: &[u8]) -> Applied {
        let index = self.leader().ledger().applied_index() + 1;
        let mut applied = Applied::Again;
        for member in &mut self.members {
            applied = member.on_committed(self.now_ns, index, entry, &mut self.world).unwrap();
        }
        applied
    }

    fn leader(&self) -> &Sequencer {
        &self.members[self.leads]
    }

    /// A shard has appended this many records of so many slots and reports a cut.
    fn report(&mut self, shard: u16, point: CutPoint, records: u64) {
        let lsn = self.leader().ledger().lsn_at(ShardId(shard), point).unwrap();
        let report = Report {
            shard: ShardId(shard),
            point,
            records,
            records_lsn: lsn,
            durable_lsn: lsn,
            appended_lsn: lsn,
            applied_index: self.leader().ledger().applied_index(),
            ..Report::default()
        };
        self.members[self.leads].on_report(self.now_ns, &report, &mut self.world);
        self.commit();
    }

    /// Both shards report the same cuts, which take so many ticks each, with five records a tick.
    fn run(&mut self, cuts: core::ops::Range<u32>, window: u64, before: u64, ticks: u64) -> u64 {
        let mut records = before;
        for cut in cuts {
            self.now_ns += 1000 * ticks;
            records += 5 * ticks;
            (0..2).for_each(|shard| self.report(shard, at(window, cut), records));
        }
        records
    }

    fn change(&mut self, change: Change) {
        assert_eq!(self.leader().may_change(change), Ok(()));
        for member in &mut self.members {
            member.make_change(self.now_ns, change, &mut self.world);
        }
    }

    /// A shard is lost as a whole.
    fn lose(&mut self, shard: u16) {
        let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
        let len = encode_view_change(&mut buffer, self.leader().ledger().view() + 1, ShardId(shard));
        assert_eq!(self.apply(&buffer[..len]), Applied::ViewChanged);
        self.commit();
    }

    /// A shard that was lost for the first time is back.
    fn bring_back(&mut self, shard: u16) {
        let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
        let (view, shard) = (self.leader().ledger().view(), ShardId(shard));
        let head = ShardChangeHead { view, shard, change: 2, epoch: 2, primary: 0, since_failure: 0 };
        let len = encode_shard_change(&mut buffer, head, &[ReplicaId { number: 0, incarnation: 7 }]);
        assert_eq!(self.apply(&buffer[..len]), Applied::MembersChanged(shard));
        self.commit();
    }

    fn quotas(&self) -> Vec<(u16, u32, bool)> {
        self.leader().ledger().members().iter().map(|m| (m.shard.0, m.quota, m.open)).collect()
    }
}

#[test]
fn a_follower_applies_and_says_nothing() {
    let mut group = Group::new();
    group.run(1..5, 0, 0, 2);
    let follower = &mut group.members[1];
    assert_eq!(follower.deadline_ns(), u64::MAX);
    assert_eq!(follower.ledger().bound(), at(0, 4));
    let mut world = World::default();
    follower.on_time(1_000_000_000, &mut world);
    assert!(world.proposals.is_empty() && world.targets.is_empty());
    assert_eq!(follower.stats().cuts, 0, "what it has done itself");
}

#[test]
fn a_new_leader_goes_on_with_the_granted_windows_and_the_last_quotas() {
    let mut group = Group::new();
    // The rate is half the quota: the second window's grant says so.
    let records = group.run(1..10, 0, 0, 2);
    assert_eq!(group.quotas(), [(0, 5, true), (1, 5, true)]);
    let granted = group.leader().ledger().granted_point();
    group.hand_over();
    assert_eq!(group.leader().ledger().granted_point(), granted, "nothing is granted for that");
    // It hears what was reported before, of one shard also more, and asks the other for it.
    group.report(0, at(0, 9), records);
    group.report(1, at(1, 0), records);
    assert_eq!(group.leader().ledger().bound(), at(0, 9));
    assert_eq!(group.world.targets, [(0, at(0, 9), false), (0, at(1, 0), false)][1..]);
    group.report(0, at(1, 0), records);
    assert_eq!(group.leader().ledger().bound(), at(1, 0));
    // All records ever appended are no rate: nothing is known of the time before.
    group.run(1..6, 1, records, 1);
    assert_eq!(group.leader().ledger().granted_point(), at(3, 0));
    assert_eq!(group.quotas(), [(0, 5, true), (1, 5, true)]);
}

#[test]
fn what_operators_asked_for_is_done_by_the_next_leader() {
    let mut group = Group::new();
    // Committed, and the leader is gone before it has granted anything.
    group.change(Change::Join(ShardId(2)));
    group.world = World::default();
    group.hand_over();
    assert_eq!(group.quotas(), [(0, 10, true), (1, 10, true), (2, 10, true)]);
    group.change(Change::Leave(ShardId(0)));
    group.hand_over();
    let closing: Vec<u16> = group.world.targets.iter().filter(|t| t.2).map(|t| t.0).collect();
    assert_eq!(closing, [0]);
    group.change(Change::Ordering(Ordering::FreeEvent));
    group.world = World::default();
    group.hand_over();
    assert_eq!(group.leader().ledger().mode(), Some(WindowMode::Free));
}

#[test]
fn a_late_proposal_of_an_old_leader_is_void_if_it_says_nothing_new() {
    let mut group = Group::new();
    group.run(1..4, 0, 0, 2);
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let len = encode_cut(&mut buffer, 0, at(0, 2));
    assert_eq!(group.apply(&buffer[..len]), Applied::Void);
    assert!(OrderEntry::decode(&buffer[..len]).is_ok());
    group.hand_over();
    group.run(4..6, 0, 30, 2);
    assert_eq!(group.leader().ledger().bound(), at(0, 5));
}

#[test]
fn who_takes_part_is_taken_from_the_last_grant() {
    let mut group = Group::new();
    group.run(1..6, 0, 0, 2);
    // Shard 1 stays behind: it is grounded, which the next grant says.
    for cut in 6..10 {
        group.now_ns += 5000;
        group.report(0, at(0, cut), u64::from(cut) * 10);
    }
    let now_ns = group.now_ns;
    group.members[0].on_time(now_ns, &mut group.world);
    assert!(group.leader().stats().grounded == 1, "{:?}", group.world.targets);
    // Nobody else knows yet: it goes on as a member.
    group.hand_over();
    (0..2).for_each(|shard| group.report(shard, at(0, 9), 90));
    assert_eq!(group.leader().ledger().bound(), at(0, 9));
    assert_eq!(group.quotas().iter().filter(|(_, _, open)| *open).count(), 2);
}

#[test]
fn somebody_takes_slots_when_the_last_member_leaves_while_others_are_grounded() {
    let mut group = Group::new();
    group.run(1..6, 0, 0, 2);
    let leave = Change::Leave(ShardId(0));
    assert_eq!(group.leader().may_change(leave), Ok(()));
    // Between the question and its commit shard 1 is grounded.
    for cut in 6..10 {
        group.now_ns += 5000;
        group.report(0, at(0, cut), u64::from(cut) * 10);
    }
    let now_ns = group.now_ns;
    group.members[0].on_time(now_ns, &mut group.world);
    assert_eq!(group.leader().may_change(leave), Err(ChangeError::LastShard(ShardId(0))));
    for member in &mut group.members {
        member.make_change(now_ns, leave, &mut group.world);
    }
    group.commit();
    assert!(group.quotas().iter().any(|(shard, _, open)| *shard == 1 && *open), "{:?}", group.quotas());
}

#[test]
fn who_is_grounded_is_called_back_when_nobody_else_is_left() {
    let mut group = Group::new();
    group.run(1..6, 0, 0, 2);
    for cut in 6..10 {
        group.now_ns += 5000;
        group.report(0, at(0, cut), u64::from(cut) * 10);
    }
    let now_ns = group.now_ns;
    group.members[0].on_time(now_ns, &mut group.world);
    assert_eq!(group.leader().stats().grounded, 1);
    group.report(1, at(0, 9), 90);
    group.report(0, at(0, 9), 90);
    group.lose(0);
    assert_eq!(group.quotas().iter().filter(|(_, _, open)| *open).map(|q| q.0).collect::<Vec<_>>(), [1]);
}

#[test]
fn a_shard_that_was_told_to_leave_while_it_was_lost_does_not_take_part_when_it_is_back() {
    for leaves in [false, true] {
        let mut group = Group::new();
        group.run(1..4, 0, 0, 2);
        group.lose(1);
        if leaves {
            group.change(Change::Leave(ShardId(1)));
        }
        group.commit();
        group.bring_back(1);
        assert_eq!(group.leader().ledger().open(ShardId(1)), Some(!leaves));
        group.lose(0);
        let last = if leaves { Err(ChangeError::LastShard(ShardId(0))) } else { Ok(()) };
        assert_eq!(group.leader().may_change(Change::Leave(ShardId(0))), last);
    }
}

#[test]
fn a_state_of_another_member_is_as_good_as_the_entries() {
    let mut group = Group::new();
    group.run(1..10, 0, 0, 2);
    let leader = group.leader();
    let ledger = leader.ledger();
    let mut copy = Ledger::at(ledger.applied_index(), ledger.snapshot_base(), ledger.view(), 64);
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    ledger.snapshot(&mut buffer, |entry| {
        copy.apply_snapshot(&OrderEntry::decode(entry).unwrap()).unwrap();
    });
    let standing = leader.standing();
    let mut late = Sequencer::new(config());
    late.restore(copy, &standing);
    group.members[1] = late;
    group.hand_over();
    group.run(9..10, 0, 90, 2);
    (0..2).for_each(|shard| group.report(shard, at(1, 0), 100));
    assert_eq!(group.leader().ledger().bound(), at(1, 0));
    assert_eq!(group.quotas(), [(0, 5, true), (1, 5, true)]);
    assert_eq!(group.leader().ledger().committed(), Position(200));
    assert_eq!(group.leader().ledger().granted_lsn(ShardId(0)), Lsn(100 + 50));
}
