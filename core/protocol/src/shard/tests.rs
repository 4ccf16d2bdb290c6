//! Appends, fills, reports, commits and duplicates of one shard, driven by hand.

use alloc::vec;
use alloc::vec::Vec;

use super::*;
use crate::ledger::grant_head;
use crate::types::{Member, ReplicaId};
use crate::wire::order::{ORDER_ENTRY_BYTES_MAX, encode_cut, encode_free_cut, encode_grant};

const TICK: u64 = 1_000_000;
const CLIENT: ClientId = ClientId(7);

#[derive(Default)]
struct World {
    records: Vec<u64>,
    no_ops: Vec<(u64, u32)>,
    acknowledged: Vec<(u64, u64)>,
    forgotten: Vec<u64>,
    reports: Vec<Report>,
}

impl ShardOut for World {
    fn record(&mut self, lsn: Lsn, _client: ClientId, _seq: u64) {
        self.records.push(lsn.0);
    }

    fn no_ops(&mut self, lsn: Lsn, count: u32) {
        self.no_ops.push((lsn.0, count));
    }

    fn acknowledge(&mut self, _client: ClientId, seq: u64, _lsn: Lsn, position: Position) {
        self.acknowledged.push((seq, position.0));
    }

    fn forget(&mut self, _client: ClientId, seq: u64) {
        self.forgotten.push(seq);
    }

    fn report(&mut self, report: &Report) {
        self.reports.push(*report);
    }
}

struct Rig {
    shard: Shard,
    world: World,
    index: u64,
    window: u64,
    mode: WindowMode,
}

/// Shard 1 of two, with quotas 2 and 3, windows of 4 cuts, one backup.
impl Rig {
    fn new() -> Rig {
        let config = ShardConfig {
            shard: ShardId(1),
            replica: ReplicaId { number: 0, incarnation: 1 },
            epoch: 1,
            tick_ns: TICK,
            tick_phase_ns: 250_000,
            beat: Beat::Target,
            fill_wait_ns: 0,
            pause_gaps: 0,
            standby: false,
            report_every_ns: 100 * TICK,
            pending_max: 16,
            sessions_max: 4,
            session_remembered: 16,
            free_cuts_max: 16,
        };
        let (mut shard, mut world) = (Shard::new(config), World::default());
        shard.set_counted(0, 0b10, &mut world);
        Rig { shard, world, index: 0, window: 0, mode: WindowMode::Fixed }
    }

    fn granted() -> Rig {
        let mut rig = Rig::new();
        rig.grant(0);
        rig
    }

    fn entry(&mut self, now: u64, bytes: &[u8]) {
        self.index += 1;
        let entry = OrderEntry::decode(bytes).unwrap();
        self.shard.on_order_entry(now, self.index, &entry, &mut self.world).unwrap();
    }

    fn grant(&mut self, now: u64) {
        let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
        let (w, quotas) = (self.window, if self.mode == WindowMode::Fixed { [2, 3] } else { [0, 0] });
        let members = [0u16, 1].map(|s| Member {
            shard: ShardId(s),
            quota: quotas[usize::from(s)],
            first_lsn: Lsn(w * 4 * u64::from(quotas[usize::from(s)])),
            open: true,
        });
        let head = grant_head(0, self.mode, w, 4, Position(w * 20));
        let len = encode_grant(&mut buffer, head, &members);
        self.window += 1;
        self.entry(now, &buffer[..len]);
    }

    fn cut(&mut self, now: u64, window: u64, cut: u32, prefix: u16) {
        let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
        let len = encode_cut(&mut buffer, 0, CutPoint { window, cut, prefix });
        self.entry(now, &buffer[..len]);
    }

    fn append(&mut self, now: u64, seq: u64) -> Append {
        self.shard.on_append(now, CLIENT, seq, &mut self.world)
    }

    fn placed(&mut self, now: u64, lsn: u64) {
        self.shard.on_placed(now, 1, Lsn(lsn), &mut self.world);
    }

    fn target(&mut self, now: u64, window: u64, cut: u32) {
        let target = Target { point: CutPoint { window, cut, prefix: 0 }, close: false, lead_ns: 0 };
        self.shard.on_target(now, target, &mut self.world);
    }

    fn last_point(&self) -> CutPoint {
        self.world.reports.last().unwrap().point
    }
}

fn at(window: u64, cut: u32) -> CutPoint {
    CutPoint { window, cut, prefix: 0 }
}

#[test]
fn a_record_is_deliverable_when_placed_and_acknowledged_when_its_cut_is_bound() {
    let mut rig = Rig::granted();
    for seq in 0..3 {
        assert_eq!(rig.append(10, seq), Append::Accepted(Lsn(seq)));
    }
    assert_eq!(rig.shard.deliverable(), Lsn(0));
    rig.placed(20, 2);
    assert_eq!(rig.shard.deliverable(), Lsn(2), "no need to wait for the tick");
    assert_eq!(rig.last_point(), at(0, 0));
    rig.placed(30, 3);
    assert_eq!(rig.last_point(), at(0, 1), "the cut's slots are durable");
    assert!(rig.world.acknowledged.is_empty(), "durability is no acknowledgement");
    rig.cut(40, 0, 1, 0);
    // Shard 1 follows shard 0's two slots: its first cut covers positions 2, 3 and 4.
    assert_eq!(rig.world.acknowledged, [(0, 2), (1, 3), (2, 4)]);
}

#[test]
fn a_prefix_binds_only_the_members_it_names() {
    let mut rig = Rig::granted();
    rig.append(0, 0);
    rig.append(0, 1);
    rig.append(0, 2);
    rig.placed(1, 3);
    rig.cut(2, 0, 0, 1);
    assert!(rig.world.acknowledged.is_empty(), "the prefix ends before shard 1");
}

#[test]
fn a_record_that_waited_a_tick_gets_its_cut_filled_and_an_idle_shard_writes_nothing() {
    let mut rig = Rig::granted();
    rig.shard.on_time(50 * TICK, &mut rig.world);
    assert!(rig.world.no_ops.is_empty());
    rig.append(50 * TICK, 0);
    rig.append(50 * TICK + 900_000, 1);
    assert_eq!(rig.shard.deadline_ns(), 51 * TICK);
    rig.shard.on_time(51 * TICK - 1, &mut rig.world);
    assert!(rig.world.no_ops.is_empty());
    rig.shard.on_time(51 * TICK, &mut rig.world);
    assert_eq!(rig.world.no_ops, [(2, 1)], "the cut that holds it, not one slot more");
    rig.shard.on_time(60 * TICK, &mut rig.world);
    assert_eq!(rig.world.no_ops.len(), 1);
    assert_eq!(rig.shard.stats().fills_by_age, 1);
}

#[test]
fn a_target_fills_once_up_to_the_cut_and_a_full_cut_needs_no_fill() {
    let mut rig = Rig::granted();
    for seq in 0..4 {
        rig.append(0, seq);
    }
    rig.target(10, 0, 1);
    assert!(rig.world.no_ops.is_empty(), "cut 0 is full already");
    rig.target(20, 0, 2);
    assert_eq!(rig.world.no_ops, [(4, 2)]);
    rig.target(30, 0, 2);
    rig.target(30, 0, 1);
    assert_eq!(rig.world.no_ops.len(), 1, "repeated and reordered targets do nothing");
    rig.placed(40, 6);
    assert_eq!(rig.last_point(), at(0, 2));
}

#[test]
fn a_target_beyond_the_grants_is_kept_and_resumed_on_the_grant() {
    let mut rig = Rig::granted();
    rig.target(10, 1, 1);
    assert_eq!(rig.world.no_ops, [(0, 12)], "up to the end of the window");
    rig.placed(11, 12);
    assert_eq!(rig.last_point(), at(1, 0));
    rig.grant(20);
    assert_eq!(rig.world.no_ops, [(0, 12), (12, 3)]);
}

#[test]
fn without_a_grant_nothing_is_speculated_or_reported() {
    let mut rig = Rig::granted();
    for seq in 0..15 {
        rig.append(0, seq);
    }
    rig.placed(10, 15);
    assert_eq!(rig.shard.deliverable(), Lsn(12));
    assert_eq!(rig.last_point(), at(1, 0));
    assert_eq!(rig.shard.stats().grant_stalls, 1);
    rig.grant(20);
    assert_eq!(rig.shard.deliverable(), Lsn(15));
    assert_eq!(rig.last_point(), at(1, 1));
}

#[test]
fn records_ahead_of_the_grants_are_filled_after_the_grant() {
    let mut rig = Rig::granted();
    for seq in 0..13 {
        rig.append(0, seq);
    }
    rig.shard.on_time(5 * TICK, &mut rig.world);
    assert!(rig.world.no_ops.is_empty());
    rig.grant(6 * TICK);
    rig.shard.on_time(6 * TICK, &mut rig.world);
    assert_eq!(rig.world.no_ops, [(13, 2)], "the record has waited more than a tick already");
}

#[test]
fn retries_get_the_original_position_before_and_after_the_cut() {
    let mut rig = Rig::granted();
    for seq in 0..3 {
        rig.append(0, seq);
    }
    assert_eq!(rig.append(1, 1), Append::Waiting);
    rig.placed(2, 3);
    rig.cut(3, 0, 1, 0);
    assert_eq!(rig.append(4, 1), Append::Bound(Position(3)));
    assert_eq!(rig.append(5, 9), Append::Refused(Refusal::Gap { expected: 3 }));
    let stranger = rig.shard.on_append(6, ClientId(8), 4, &mut rig.world);
    assert_eq!(stranger, Append::Refused(Refusal::UnknownSession));
    assert_eq!(rig.world.records, [0, 1, 2]);
}

#[test]
fn pending_appends_are_bounded() {
    let mut rig = Rig::granted();
    for seq in 0..16 {
        assert_eq!(rig.append(0, seq), Append::Accepted(Lsn(seq)));
    }
    assert_eq!(rig.append(0, 16), Append::Busy);
    rig.placed(1, 16);
    rig.cut(2, 0, 2, 0);
    assert_eq!(rig.append(3, 16), Append::Accepted(Lsn(16)));
}

#[test]
fn free_windows_report_on_the_tick_and_deliver_what_is_bound() {
    let mut rig = Rig::new();
    rig.mode = WindowMode::Free;
    rig.grant(0);
    rig.append(10, 0);
    rig.append(10, 1);
    rig.placed(20, 2);
    assert_eq!(rig.shard.deliverable(), Lsn(0));
    rig.shard.on_time(100, &mut rig.world);
    let before = rig.world.reports.len();
    rig.shard.on_time(250_000, &mut rig.world);
    assert_eq!(rig.world.reports.len(), before + 1);
    assert_eq!(rig.world.reports[before].durable_lsn, Lsn(2));
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let len = encode_free_cut(&mut buffer, 0, at(0, 1), &[Lsn(5), Lsn(2)]);
    rig.entry(300_000, &buffer[..len]);
    assert_eq!(rig.shard.deliverable(), Lsn(2));
    assert_eq!(rig.world.acknowledged, [(0, 5), (1, 6)]);
    assert!(rig.world.no_ops.is_empty());
}

/// Where placements count when they are flushed, the other members say again what they have flushed to whoever leads now.
#[test]
fn what_a_predecessor_reported_is_bound_before_the_others_have_said_it_again() {
    let mut rig = Rig::granted();
    let config = ShardConfig { epoch: 2, ..rig.shard.config.clone() };
    let ledger = core::mem::replace(&mut rig.shard, Rig::new().shard).into_ledger();
    let duplicates = Duplicates::new(4, 16);
    let inheritance = Inheritance { ledger, duplicates, from: Lsn(0), end: Lsn(4), records_lsn: Lsn(4), records: 4 };
    rig.shard = Shard::take_over(config, inheritance);
    (0..4).for_each(|n| rig.shard.inherit(Lsn(n), CLIENT, n));
    rig.shard.begin(1, 0b11, &mut rig.world);
    assert_eq!((rig.shard.durable(), rig.shard.deliverable()), (Lsn(0), Lsn(0)));
    rig.cut(2, 0, 1, 0);
    assert_eq!(rig.world.acknowledged, [(0, 2), (1, 3), (2, 4)]);
    assert_eq!((rig.shard.durable(), rig.shard.committed()), (Lsn(3), Lsn(3)));
}

#[test]
#[should_panic(expected = "invariant I11")]
fn a_cut_over_slots_that_are_not_durable_is_a_broken_invariant() {
    let mut rig = Rig::granted();
    rig.append(0, 0);
    rig.cut(1, 0, 1, 0);
}

#[test]
fn a_full_log_fills_to_the_end_of_the_grants_and_one_without_any_room_only_reports() {
    let mut rig = Rig::granted();
    rig.shard.set_room(FillRoom::Few);
    rig.target(10, 0, 1);
    assert_eq!(rig.world.no_ops, [(0, 12)], "one entry for the whole window");
    rig.shard.set_room(FillRoom::None);
    rig.grant(20);
    rig.target(30, 1, 1);
    rig.append(30, 0);
    rig.shard.on_time(200 * TICK, &mut rig.world);
    assert_eq!(rig.world.no_ops.len(), 1);
    let reports = rig.world.reports.len();
    rig.shard.on_time(400 * TICK, &mut rig.world);
    assert_eq!(rig.world.reports.len(), reports + 1, "it is still heard of");
    assert!(rig.shard.deadline_ns() > 400 * TICK, "and does not spin");
    // Room again: the target was kept.
    rig.shard.set_room(FillRoom::Plenty);
    assert!(rig.shard.deadline_ns() <= 410 * TICK);
    rig.shard.on_time(410 * TICK, &mut rig.world);
    assert_eq!(rig.world.no_ops.len(), 2, "without being asked again");
    rig.target(411 * TICK, 1, 2);
    assert_eq!(rig.world.no_ops.len(), 3);
}

#[test]
fn a_primary_that_is_told_the_order_log_anew_acknowledges_what_was_bound_meanwhile_and_goes_on() {
    let mut rig = Rig::granted();
    for seq in 0..4 {
        rig.append(0, seq);
    }
    rig.placed(1, 4);
    // Cut 1 was bound, and window 1 granted and begun for others: this shard's part is in windows that it knows.
    let mut ahead = Ledger::new(16);
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let mut other = Rig::granted();
    other.append(0, 0);
    other.append(0, 1);
    other.append(0, 2);
    other.placed(1, 3);
    other.cut(0, 0, 1, 0);
    let mut entries = Vec::new();
    let snapshot = other.shard.ledger();
    snapshot.snapshot(&mut buffer, |entry| entries.push(entry.to_vec()));
    for entry in &entries {
        ahead.apply_snapshot(&OrderEntry::decode(entry).unwrap()).unwrap();
    }
    rig.shard.follow_anew(2, ahead, &mut rig.world);
    assert_eq!(rig.world.acknowledged, [(0, 2), (1, 3), (2, 4)]);
    assert_eq!((rig.shard.committed(), rig.shard.pending()), (Lsn(3), 1));
    assert_eq!(rig.append(3, 4), Append::Accepted(Lsn(4)), "it leads as before");
    assert!(rig.world.forgotten.is_empty());
}

#[test]
fn records_that_a_free_cut_bound_unseen_are_said_to_be_forgotten() {
    let mut rig = Rig::new();
    rig.mode = WindowMode::Free;
    rig.grant(0);
    rig.append(0, 0);
    rig.append(0, 1);
    rig.placed(1, 2);
    // What follows the free window, as it is told to a follower that knows nothing.
    let mut ahead = Ledger::at(9, Position(7), 0, 16);
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let members = [(0u16, 5u64), (1, 2)].map(|(shard, lsn)| Member {
        shard: ShardId(shard),
        quota: 1,
        first_lsn: Lsn(lsn),
        open: true,
    });
    let len = encode_grant(&mut buffer, grant_head(0, WindowMode::Fixed, 1, 4, Position(7)), &members);
    ahead.apply_snapshot(&OrderEntry::decode(&buffer[..len]).unwrap()).unwrap();
    rig.shard.follow_anew(2, ahead, &mut rig.world);
    assert_eq!((rig.shard.committed(), rig.world.forgotten), (Lsn(2), vec![0, 1]));
}
