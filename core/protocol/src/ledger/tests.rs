//! Position arithmetic against hand-computed values and against a brute-force model.

use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::wire::order::{
    ORDER_ENTRY_BYTES_MAX, ShardChangeHead, encode_cut, encode_free_cut, encode_grant, encode_shard_change,
    encode_view_change,
};

fn member(shard: u16, quota: u32, first_lsn: u64) -> Member {
    Member { shard: ShardId(shard), quota, first_lsn: Lsn(first_lsn), open: true }
}

fn grant(ledger: &mut Ledger, mode: WindowMode, window: u64, cuts: u32, start: u64, members: &[Member]) -> Applied {
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let head = grant_head(ledger.view(), mode, window, cuts, Position(start));
    let len = encode_grant(&mut buffer, head, members);
    apply(ledger, &buffer[..len]).unwrap()
}

fn apply(ledger: &mut Ledger, bytes: &[u8]) -> Result<Applied, Contradiction> {
    let index = ledger.applied_index() + 1;
    ledger.apply(index, &OrderEntry::decode(bytes).unwrap())
}

fn cut(ledger: &mut Ledger, window: u64, cut: u32, prefix: u16) -> Applied {
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let len = encode_cut(&mut buffer, ledger.view(), CutPoint { window, cut, prefix });
    apply(ledger, &buffer[..len]).unwrap()
}

fn free_cut(ledger: &mut Ledger, window: u64, cut: u32, lsns: &[u64]) -> Result<Applied, Contradiction> {
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let lsns: Vec<Lsn> = lsns.iter().map(|l| Lsn(*l)).collect();
    let point = CutPoint { window, cut, prefix: 0 };
    let len = encode_free_cut(&mut buffer, ledger.view(), point, &lsns);
    apply(ledger, &buffer[..len])
}

#[test]
fn the_specifications_example() {
    // Quotas 2, 3, 2: cut 0 covers 0–6, cut 1 covers 7–13; the second shard's first record of cut 1 lands at 9.
    let mut ledger = Ledger::new(16);
    grant(&mut ledger, WindowMode::Fixed, 0, 100, 0, &[member(0, 2, 0), member(1, 3, 0), member(2, 2, 0)]);
    assert_eq!(ledger.position(ShardId(1), Lsn(3)), Some(Position(9)));
    assert_eq!(ledger.locate(Position(9)), Some(Slot { shard: ShardId(1), lsn: Lsn(3) }));
    assert_eq!(ledger.position(ShardId(0), Lsn(2)), Some(Position(7)));
    assert_eq!(ledger.position(ShardId(2), Lsn(199)), Some(Position(699)));
    assert_eq!(ledger.position(ShardId(2), Lsn(200)), None, "beyond the lease");
    assert_eq!(ledger.granted_lsn(ShardId(1)), Lsn(300));
    // A cut with a prefix binds the first members of the next cut.
    assert_eq!(cut(&mut ledger, 0, 1, 2), Applied::Bound);
    assert_eq!(ledger.committed(), Position(12));
    assert_eq!(ledger.committed_lsn(ShardId(0)), Lsn(4));
    assert_eq!(ledger.committed_lsn(ShardId(1)), Lsn(6));
    assert_eq!(ledger.committed_lsn(ShardId(2)), Lsn(2));
    assert_eq!(cut(&mut ledger, 0, 1, 1), Applied::Void, "a cut must advance");
    assert_eq!(cut(&mut ledger, 1, 0, 1), Applied::Void, "a cut needs a granted window");
    assert_eq!(cut(&mut ledger, 1, 0, 0), Applied::Bound, "the end of a window is the start of the next");
    assert_eq!(ledger.committed(), Position(700));
}

#[test]
fn windows_follow_each_other_and_quotas_change_at_edges() {
    let mut ledger = Ledger::new(16);
    let shard = [ShardId(0), ShardId(1)];
    grant(&mut ledger, WindowMode::Fixed, 0, 10, 0, &[member(0, 1, 0), member(1, 2, 0)]);
    grant(&mut ledger, WindowMode::Fixed, 1, 10, 30, &[member(0, 1, 10), member(1, 2, 20)]);
    assert_eq!(ledger.spans.len(), 1, "equal windows merge");
    grant(&mut ledger, WindowMode::Fixed, 2, 10, 60, &[member(0, 4, 20), member(1, 1, 40)]);
    assert_eq!(ledger.position(shard[0], Lsn(19)), Some(Position(57)));
    assert_eq!(ledger.position(shard[0], Lsn(20)), Some(Position(60)));
    assert_eq!(ledger.position(shard[1], Lsn(41)), Some(Position(69)));
    assert_eq!(ledger.point_reached(shard[0], Lsn(27)), Some(CutPoint { window: 2, cut: 1, prefix: 0 }));
    assert_eq!(ledger.point_reached(shard[0], Lsn(15)), Some(CutPoint { window: 1, cut: 5, prefix: 0 }));
    assert_eq!(ledger.lsn_at(shard[1], CutPoint { window: 2, cut: 0, prefix: 0 }), Some(Lsn(40)));
    assert_eq!(ledger.lsn_at(shard[1], CutPoint { window: 3, cut: 0, prefix: 0 }), Some(Lsn(50)));
    assert_eq!(ledger.lsn_at(shard[1], CutPoint { window: 3, cut: 1, prefix: 0 }), None);
    assert_eq!(ledger.cut_of(shard[0], Lsn(25)), Some((Lsn(28), 4)));
    // A grant that is not the next window is void; one that contradicts where the last ended is an error.
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let head = grant_head(0, WindowMode::Fixed, 7, 10, Position(110));
    let len = encode_grant(&mut buffer, head, &[member(0, 4, 60), member(1, 1, 50)]);
    assert_eq!(apply(&mut ledger, &buffer[..len]), Ok(Applied::Void));
    let head = grant_head(0, WindowMode::Fixed, 3, 10, Position(111));
    let len = encode_grant(&mut buffer, head, &[member(0, 4, 60), member(1, 1, 50)]);
    assert_eq!(apply(&mut ledger, &buffer[..len]).unwrap_err().invariant, "I12");
}

#[test]
fn free_windows_bind_what_the_vectors_say() {
    let mut ledger = Ledger::new(2);
    let (a, b) = (ShardId(0), ShardId(1));
    grant(&mut ledger, WindowMode::Free, 0, 3, 0, &[member(0, 0, 0), member(1, 0, 0)]);
    assert_eq!(ledger.position(a, Lsn(0)), None);
    free_cut(&mut ledger, 0, 1, &[2, 1]).unwrap();
    free_cut(&mut ledger, 0, 2, &[2, 4]).unwrap();
    // Cut 0: a0 a1 b0; cut 1: b1 b2 b3.
    assert_eq!(ledger.position(b, Lsn(0)), Some(Position(2)));
    assert_eq!(ledger.position(b, Lsn(3)), Some(Position(5)));
    assert_eq!(ledger.position(a, Lsn(2)), None);
    assert_eq!(ledger.locate(Position(3)), Some(Slot { shard: b, lsn: Lsn(1) }));
    assert_eq!(ledger.committed(), Position(6));
    assert_eq!(ledger.granted_lsn(a), Lsn(2), "nothing is speculative in a free window");
    // The end of the window, and a fixed window after it. Only two cuts are remembered.
    free_cut(&mut ledger, 1, 0, &[3, 4]).unwrap();
    assert_eq!(ledger.position(a, Lsn(1)), None, "forgotten");
    assert_eq!(ledger.first_known(), Position(3));
    assert_eq!(ledger.position(a, Lsn(2)), Some(Position(6)));
    grant(&mut ledger, WindowMode::Fixed, 1, 10, 7, &[member(0, 2, 3), member(1, 1, 4)]);
    assert_eq!(ledger.position(a, Lsn(5)), Some(Position(10)));
    assert_eq!(free_cut(&mut ledger, 1, 1, &[4, 4]), Ok(Applied::Void));
}

#[test]
fn a_grant_ends_a_free_window_early_and_what_is_known_has_one_beginning() {
    let mut ledger = Ledger::new(2);
    let a = ShardId(0);
    grant(&mut ledger, WindowMode::Fixed, 0, 2, 0, &[member(0, 3, 0)]);
    grant(&mut ledger, WindowMode::Free, 1, 100, 6, &[member(0, 0, 6)]);
    assert_eq!(free_cut(&mut ledger, 1, 1, &[7]), Ok(Applied::Void), "the fixed window is not bound");
    let early = grant(&mut ledger, WindowMode::Fixed, 2, 2, 6, &[member(0, 1, 6)]);
    assert_eq!(early, Applied::Void, "a free window that has not begun cannot end");
    assert_eq!(ledger.granted_point(), CutPoint { window: 1, cut: 0, prefix: 0 });
    cut(&mut ledger, 1, 0, 0);
    free_cut(&mut ledger, 1, 1, &[8]).unwrap();
    assert_eq!(ledger.first_known(), Position(0));
    grant(&mut ledger, WindowMode::Fixed, 2, 2, 8, &[member(0, 1, 8)]);
    assert_eq!(ledger.bound(), CutPoint { window: 2, cut: 0, prefix: 0 });
    assert_eq!(ledger.position(a, Lsn(7)), Some(Position(7)));
    assert_eq!(ledger.position(a, Lsn(9)), Some(Position(9)));
    assert_eq!(ledger.locate(Position(3)), Some(Slot { shard: a, lsn: Lsn(3) }));
    // A second free window that outgrows what is remembered takes everything before it along.
    grant(&mut ledger, WindowMode::Free, 3, 100, 10, &[member(0, 0, 10)]);
    cut(&mut ledger, 3, 0, 0);
    for end in 11..14 {
        free_cut(&mut ledger, 3, end - 10, &[u64::from(end)]).unwrap();
    }
    assert_eq!(ledger.first_known(), Position(11));
    assert_eq!((ledger.locate(Position(3)), ledger.position(a, Lsn(3))), (None, None));
    assert_eq!(ledger.position(a, Lsn(12)), Some(Position(12)));
}

#[test]
fn a_free_cut_that_takes_slots_back_is_a_contradiction() {
    let mut ledger = Ledger::new(8);
    grant(&mut ledger, WindowMode::Free, 0, 3, 0, &[member(0, 0, 0)]);
    free_cut(&mut ledger, 0, 1, &[5]).unwrap();
    assert_eq!(free_cut(&mut ledger, 0, 2, &[4]).unwrap_err().invariant, "I2");
}

#[test]
fn positions_beyond_what_a_log_can_have_are_a_contradiction() {
    let most = NUMBER_MAX;
    let mut ledger = Ledger::new(8);
    grant(&mut ledger, WindowMode::Free, 0, 3, 0, &[member(0, 0, 0), member(1, 0, 0)]);
    free_cut(&mut ledger, 0, 1, &[most - 5, 5]).unwrap();
    assert_eq!(ledger.committed(), Position(most));
    assert_eq!(free_cut(&mut ledger, 0, 2, &[most - 5, 6]).unwrap_err().invariant, "I2");

    let mut ledger = Ledger::at(0, Position(most - 7), 0, 8);
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let head = grant_head(0, WindowMode::Fixed, 0, 4, Position(most - 7));
    let len = encode_grant(&mut buffer, head, &[member(0, 2, 0)]);
    assert_eq!(apply(&mut ledger, &buffer[..len]).unwrap_err().invariant, "I12");
}

#[test]
fn an_entry_applied_twice_changes_nothing_and_a_gap_is_an_error() {
    let mut ledger = Ledger::new(8);
    grant(&mut ledger, WindowMode::Fixed, 0, 10, 0, &[member(0, 2, 0)]);
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let len = encode_cut(&mut buffer, 0, CutPoint { window: 0, cut: 3, prefix: 0 });
    let entry = OrderEntry::decode(&buffer[..len]).unwrap();
    assert_eq!(ledger.apply(2, &entry), Ok(Applied::Bound));
    assert_eq!(ledger.apply(2, &entry), Ok(Applied::Again));
    assert_eq!(ledger.committed(), Position(6));
    assert_eq!(ledger.apply(4, &entry).unwrap_err().invariant, "I17");
}

#[test]
fn a_view_change_decrees_the_lease_and_voids_entries_of_the_old_view() {
    let mut ledger = Ledger::new(8);
    grant(&mut ledger, WindowMode::Fixed, 0, 10, 0, &[member(0, 2, 0), member(1, 1, 0)]);
    cut(&mut ledger, 0, 4, 0);
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let len = encode_view_change(&mut buffer, 1, ShardId(1));
    assert_eq!(apply(&mut ledger, &buffer[..len]), Ok(Applied::ViewChanged));
    assert_eq!(apply(&mut ledger, &buffer[..len]), Ok(Applied::Void), "each view begins once");
    let failed = *ledger.failed().next().unwrap();
    assert_eq!((failed.from, failed.lease_end), (Position(12), Position(30)));
    let len = encode_cut(&mut buffer, 0, CutPoint { window: 0, cut: 5, prefix: 0 });
    assert_eq!(apply(&mut ledger, &buffer[..len]), Ok(Applied::Void));
}

/// Brute force: lists the slots of every position by counting.
fn enumerate(windows: &[(u32, Vec<u32>)]) -> Vec<Slot> {
    let shards = windows[0].1.len();
    let mut next = vec![0u64; shards];
    let mut slots = Vec::new();
    for (cuts, quotas) in windows {
        for _ in 0..*cuts {
            for (shard, quota) in quotas.iter().enumerate() {
                for _ in 0..*quota {
                    slots.push(Slot { shard: ShardId(shard as u16), lsn: Lsn(next[shard]) });
                    next[shard] += 1;
                }
            }
        }
    }
    slots
}

fn windows() -> impl Strategy<Value = Vec<(u32, Vec<u32>)>> {
    (1usize..5).prop_flat_map(|shards| {
        let quotas = prop::collection::vec(0u32..5, shards).prop_filter("some quota", |q| q.iter().any(|x| *x > 0));
        prop::collection::vec((1u32..6, quotas), 1..6)
    })
}

proptest! {
    #[test]
    fn fixed_positions_match_counting(windows in windows()) {
        let slots = enumerate(&windows);
        let mut ledger = Ledger::new(4);
        let shards = windows[0].1.len();
        let (mut start, mut first) = (0u64, vec![0u64; shards]);
        for (w, (cuts, quotas)) in windows.iter().enumerate() {
            let members: Vec<Member> =
                (0..shards).map(|s| member(s as u16, quotas[s], first[s])).collect();
            grant(&mut ledger, WindowMode::Fixed, w as u64, *cuts, start, &members);
            start += u64::from(*cuts) * quotas.iter().map(|q| u64::from(*q)).sum::<u64>();
            for s in 0..shards {
                first[s] += u64::from(*cuts) * u64::from(quotas[s]);
            }
        }
        for (position, slot) in slots.iter().enumerate() {
            let position = Position(position as u64);
            prop_assert_eq!(ledger.position(slot.shard, slot.lsn), Some(position));
            prop_assert_eq!(ledger.locate(position), Some(*slot));
            for s in 0..shards {
                let expected = slots.iter().enumerate()
                    .find(|(p, x)| *p as u64 >= position.0 && x.shard.0 as usize == s)
                    .map(|(_, x)| x.lsn);
                if let Some(expected) = expected {
                    prop_assert_eq!(ledger.first_lsn_at(ShardId(s as u16), position), Some(expected));
                }
            }
        }
        prop_assert_eq!(ledger.locate(Position(slots.len() as u64)), None);
    }

    #[test]
    fn every_point_binds_exactly_the_slots_before_it(windows in windows(), seed in 0usize..1000) {
        let slots = enumerate(&windows);
        let mut ledger = Ledger::new(4);
        let shards = windows[0].1.len();
        let (mut start, mut first) = (0u64, vec![0u64; shards]);
        for (w, (cuts, quotas)) in windows.iter().enumerate() {
            let members: Vec<Member> = (0..shards).map(|s| member(s as u16, quotas[s], first[s])).collect();
            grant(&mut ledger, WindowMode::Fixed, w as u64, *cuts, start, &members);
            start += u64::from(*cuts) * quotas.iter().map(|q| u64::from(*q)).sum::<u64>();
            for s in 0..shards {
                first[s] += u64::from(*cuts) * u64::from(quotas[s]);
            }
        }
        let w = seed % windows.len();
        let c = (seed / 7) as u32 % windows[w].0;
        let prefix = (seed / 3) % shards;
        // Count the slots before the point by brute force.
        let mut before: u64 = windows[..w].iter()
            .map(|(cuts, q)| u64::from(*cuts) * q.iter().map(|x| u64::from(*x)).sum::<u64>()).sum();
        let q = &windows[w].1;
        before += u64::from(c) * q.iter().map(|x| u64::from(*x)).sum::<u64>();
        before += q[..prefix].iter().map(|x| u64::from(*x)).sum::<u64>();
        cut(&mut ledger, w as u64, c, prefix as u16);
        prop_assert_eq!(ledger.committed(), Position(before));
        for s in 0..shards {
            let bound = slots[..before as usize].iter().filter(|x| x.shard.0 as usize == s).count() as u64;
            prop_assert_eq!(ledger.committed_lsn(ShardId(s as u16)), Lsn(bound));
        }
        // A follower that joins by snapshot agrees on everything still open.
        let mut joined = Ledger::at(ledger.applied_index(), ledger.snapshot_base(), 0, 4);
        let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
        ledger.snapshot(&mut buffer, |entry| {
            joined.apply_snapshot(&OrderEntry::decode(entry).unwrap()).unwrap();
        });
        prop_assert_eq!(joined.committed(), ledger.committed());
        for (position, slot) in slots.iter().enumerate().skip(before as usize) {
            prop_assert_eq!(joined.position(slot.shard, slot.lsn), Some(Position(position as u64)));
        }
        // One that is told everything agrees on everything.
        let mut whole = Ledger::at(ledger.applied_index(), ledger.history_base(), 0, 4);
        ledger.history(&mut buffer, |entry| {
            whole.apply_snapshot(&OrderEntry::decode(entry).unwrap()).unwrap();
        });
        prop_assert_eq!(whole.committed(), ledger.committed());
        prop_assert_eq!(whole.bound(), ledger.bound());
        prop_assert_eq!(whole.granted_end(), ledger.granted_end());
        prop_assert_eq!(whole.next_window(), ledger.next_window());
        for slot in &slots {
            prop_assert_eq!(whole.position(slot.shard, slot.lsn), ledger.position(slot.shard, slot.lsn));
        }
        // One that was only behind keeps what it knew of the rest.
        joined.continue_from(ledger);
        for (position, slot) in slots.iter().enumerate() {
            prop_assert_eq!(joined.position(slot.shard, slot.lsn), Some(Position(position as u64)));
            prop_assert_eq!(joined.locate(Position(position as u64)), Some(*slot));
        }
    }
}

fn members(ledger: &mut Ledger, shard: u16, change: u32, epoch: u32, primary: u16, numbers: &[u16]) -> Applied {
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let head = ShardChangeHead { view: ledger.view(), shard: ShardId(shard), change, epoch, primary, since_failure: 0 };
    let members: Vec<_> =
        numbers.iter().map(|n| crate::ReplicaId { number: *n, incarnation: 70 + u64::from(*n) }).collect();
    let len = encode_shard_change(&mut buffer, head, &members);
    apply(ledger, &buffer[..len]).unwrap()
}

#[test]
fn a_history_tells_of_a_free_window_that_ended_without_a_cut() {
    let mut ledger = Ledger::new(4);
    grant(&mut ledger, WindowMode::Fixed, 0, 1, 0, &[member(0, 2, 0)]);
    grant(&mut ledger, WindowMode::Free, 1, 1, 2, &[member(0, 0, 2)]);
    cut(&mut ledger, 1, 0, 0);
    grant(&mut ledger, WindowMode::Fixed, 2, 1, 2, &[member(0, 2, 2)]);
    grant(&mut ledger, WindowMode::Fixed, 3, 1, 4, &[member(0, 3, 4)]);
    let mut late = Ledger::at(ledger.applied_index(), Position(0), 0, 4);
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    ledger.history(&mut buffer, |entry| {
        late.apply_snapshot(&OrderEntry::decode(entry).unwrap()).unwrap();
    });
    assert_eq!(
        (late.next_window(), late.bound(), late.granted_end()),
        (4, CutPoint { window: 2, cut: 0, prefix: 0 }, Position(7))
    );
}

/// The primary of shard 0, born again, goes on alone.
fn life(ledger: &mut Ledger, change: u32, epoch: u32) -> Applied {
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let head = ShardChangeHead { view: ledger.view(), shard: ShardId(0), change, epoch, primary: 0, since_failure: 0 };
    let len = encode_shard_change(&mut buffer, head, &[crate::ReplicaId { number: 0, incarnation: 99 }]);
    apply(ledger, &buffer[..len]).unwrap()
}

#[test]
fn another_life_of_the_primary_is_another_epoch() {
    let mut ledger = Ledger::new(8);
    members(&mut ledger, 0, 1, 1, 0, &[0, 1]);
    assert_eq!(life(&mut ledger, 2, 2), Applied::MembersChanged(ShardId(0)));
    assert_eq!(ledger.membership(ShardId(0)).map(|m| (m.epoch, m.primary, m.members.len())), Some((2, 0, 1)));
}

#[test]
fn a_change_of_members_is_void_unless_it_names_its_predecessor() {
    let mut ledger = Ledger::new(8);
    let a = ShardId(0);
    assert_eq!(ledger.membership(a), None);
    assert_eq!(members(&mut ledger, 0, 1, 1, 0, &[0, 1]), Applied::MembersChanged(a));
    assert_eq!(members(&mut ledger, 0, 1, 1, 0, &[0]), Applied::Void, "an old one again");
    assert_eq!(members(&mut ledger, 0, 3, 1, 0, &[0]), Applied::Void, "one is missing");
    assert_eq!(members(&mut ledger, 0, 2, 1, 1, &[1]), Applied::Void, "another primary in the same epoch");
    assert_eq!(members(&mut ledger, 0, 2, 2, 0, &[0]), Applied::Void, "another epoch of the same primary");
    assert_eq!(life(&mut ledger, 2, 1), Applied::Void, "another life of the primary in the same epoch");
    assert_eq!(members(&mut ledger, 0, 2, 2, 1, &[1]), Applied::MembersChanged(a));
    let now = ledger.membership(a).unwrap();
    assert_eq!((now.change, now.epoch, now.primary, now.members.len()), (2, 2, 1, 1));
    assert!(now.holds(crate::ReplicaId { number: 1, incarnation: 71 }));
    assert!(!now.holds(crate::ReplicaId { number: 1, incarnation: 72 }), "a reborn replica is another one");
}

/// Quotas 2 and 1, windows of 10 cuts: cut `c` covers a a b at 3c, 3c + 1, 3c + 2. Two windows are granted when `b` is
/// lost in cut 3, of which `a`'s part is bound: position 11 on, slot 3 of `b`.
fn lost() -> Ledger {
    let mut ledger = Ledger::new(8);
    members(&mut ledger, 0, 1, 1, 0, &[0]);
    members(&mut ledger, 1, 1, 1, 0, &[0, 1]);
    grant(&mut ledger, WindowMode::Fixed, 0, 10, 0, &[member(0, 2, 0), member(1, 1, 0)]);
    grant(&mut ledger, WindowMode::Fixed, 1, 10, 30, &[member(0, 2, 20), member(1, 2, 10)]);
    cut(&mut ledger, 0, 3, 1);
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let len = encode_view_change(&mut buffer, 1, ShardId(1));
    assert_eq!(apply(&mut ledger, &buffer[..len]), Ok(Applied::ViewChanged));
    ledger
}

#[test]
fn a_snapshot_with_a_loss_that_voided_nothing_says_the_same() {
    let mut ledger = Ledger::new(8);
    members(&mut ledger, 0, 1, 1, 0, &[0]);
    members(&mut ledger, 1, 1, 1, 0, &[0]);
    grant(&mut ledger, WindowMode::Fixed, 0, 9, 0, &[member(0, 1, 0), member(1, 1, 0)]);
    cut(&mut ledger, 1, 0, 0);
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let len = encode_view_change(&mut buffer, 1, ShardId(1));
    assert_eq!(apply(&mut ledger, &buffer[..len]), Ok(Applied::ViewChanged));
    let failed = Failed { shard: ShardId(1), view: 1, from: Position(18), lease_end: Position(18), lsn: Lsn(9) };
    assert_eq!(ledger.failed().copied().collect::<Vec<_>>(), [failed]);
    // The next window has the same members and goes on in the same span.
    grant(&mut ledger, WindowMode::Fixed, 1, 9, 18, &[member(0, 1, 9), member(1, 1, 9)]);
    let mut late = Ledger::at(ledger.applied_index(), ledger.history_base(), ledger.view(), 8);
    ledger.history(&mut buffer, |entry| {
        late.apply_snapshot(&OrderEntry::decode(entry).unwrap()).unwrap();
    });
    for ledger in [&mut ledger, &mut late] {
        assert_eq!(ledger.position(ShardId(1), Lsn(17)), Some(Position(35)));
        grant(ledger, WindowMode::Fixed, 2, 9, 36, &[member(0, 1, 18), member(1, 1, 18)]);
    }
}

#[test]
fn a_snapshot_between_two_free_windows_says_where_a_shard_is_lost_then() {
    for cuts in [1, 3] {
        let mut ledger = Ledger::new(2);
        members(&mut ledger, 0, 1, 1, 0, &[0]);
        members(&mut ledger, 1, 1, 1, 0, &[0]);
        grant(&mut ledger, WindowMode::Free, 0, cuts, 0, &[member(0, 0, 0), member(1, 0, 0)]);
        for cut in 1..=u64::from(cuts) {
            let (window, at) = if cut == u64::from(cuts) { (1, 0) } else { (0, cut as u32) };
            free_cut(&mut ledger, window, at, &[3 * cut, 4 * cut]).unwrap();
        }
        let (a, b) = (3 * u64::from(cuts), 4 * u64::from(cuts));
        let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
        let mut late = Ledger::at(ledger.applied_index(), ledger.snapshot_base(), ledger.view(), 2);
        ledger.snapshot(&mut buffer, |entry| {
            late.apply_snapshot(&OrderEntry::decode(entry).unwrap()).unwrap();
        });
        for ledger in [&mut ledger, &mut late] {
            assert_eq!((ledger.committed(), ledger.bound().window), (Position(a + b), 1));
            let len = encode_view_change(&mut buffer, 1, ShardId(1));
            assert_eq!(apply(ledger, &buffer[..len]), Ok(Applied::ViewChanged));
            assert_eq!(ledger.failed().next().map(|failed| failed.lsn), Some(Lsn(b)));
            let next = [member(0, 0, a), member(1, 0, b)];
            grant(ledger, WindowMode::Free, 1, 1, a + b, &next);
            free_cut(ledger, 2, 0, &[a + 1, b]).unwrap();
            assert_eq!(ledger.committed(), Position(a + b + 1));
        }
    }
}

#[test]
fn a_lost_shard_keeps_what_is_bound_and_goes_on_there_when_it_returns() {
    let (a, b) = (ShardId(0), ShardId(1));
    let mut ledger = lost();
    let failed = Failed { shard: b, view: 1, from: Position(11), lease_end: Position(70), lsn: Lsn(3) };
    assert_eq!(ledger.failed().copied().collect::<Vec<_>>(), [failed]);
    assert!(ledger.has_failed(b) && !ledger.has_failed(a));
    assert_eq!(ledger.position(b, Lsn(2)), Some(Position(8)), "bound");
    assert_eq!(ledger.position(b, Lsn(3)), None, "void");
    assert_eq!(ledger.position(b, Lsn(12)), None, "void in the next window too");
    assert_eq!(ledger.position(a, Lsn(25)), Some(Position(39)), "live shards keep their positions");
    assert_eq!(ledger.granted_lsn(b), Lsn(3));
    // Cuts go on over the void slots.
    assert_eq!(cut(&mut ledger, 1, 2, 0), Applied::Bound);
    assert_eq!((ledger.committed(), ledger.committed_lsn(a), ledger.committed_lsn(b)), (Position(38), Lsn(24), Lsn(3)));
    // The shard has no slots until it returns; then its next slot is the first that was not bound.
    grant(&mut ledger, WindowMode::Fixed, 2, 10, 70, &[member(0, 2, 40), member(1, 0, 3)]);
    assert_eq!(members(&mut ledger, 1, 3, 1, 0, &[0]), Applied::Void, "who returns begins an epoch");
    assert_eq!(members(&mut ledger, 1, 3, 2, 1, &[1]), Applied::MembersChanged(b));
    assert!(!ledger.has_failed(b));
    assert_eq!(ledger.membership(b).unwrap().since_failure, 3);
    grant(&mut ledger, WindowMode::Fixed, 3, 10, 90, &[member(0, 2, 60), member(1, 1, 3)]);
    assert_eq!(ledger.position(b, Lsn(3)), Some(Position(92)));
    assert_eq!(ledger.position(b, Lsn(2)), Some(Position(8)));
    assert_eq!(ledger.locate(Position(92)), Some(Slot { shard: b, lsn: Lsn(3) }));
}

#[test]
fn a_snapshot_tells_of_members_and_of_what_is_void() {
    let mut ledger = lost();
    cut(&mut ledger, 0, 5, 0);
    grant(&mut ledger, WindowMode::Fixed, 2, 10, 70, &[member(0, 2, 40), member(1, 0, 3)]);
    members(&mut ledger, 1, 3, 2, 1, &[1]);
    members(&mut ledger, 1, 4, 2, 1, &[1, 2]);
    for base in [ledger.snapshot_base(), ledger.history_base()] {
        agrees(&ledger, base);
    }
}

/// A follower that is told what is known from `base` on agrees with the ledger.
fn agrees(ledger: &Ledger, base: Position) {
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let mut entries = Vec::new();
    let note = |entry: &[u8]| entries.push(entry.to_vec());
    let whole = base == ledger.history_base();
    let count = if whole { ledger.history(&mut buffer, note) } else { ledger.snapshot(&mut buffer, note) };
    assert_eq!(count as usize, entries.len());
    let mut late = Ledger::at(ledger.applied_index(), base, ledger.view(), 8);
    for entry in &entries {
        late.apply_snapshot(&OrderEntry::decode(entry).unwrap()).unwrap();
    }
    assert_eq!(late.committed(), Position(15));
    for shard in [ShardId(0), ShardId(1)] {
        assert_eq!(late.membership(shard), ledger.membership(shard));
        assert_eq!(late.committed_lsn(shard), ledger.committed_lsn(shard));
        for lsn in 0..70 {
            let known = ledger.position(shard, Lsn(lsn)).filter(|p| *p >= base);
            assert_eq!(late.position(shard, Lsn(lsn)), known, "shard {shard}, slot {lsn}");
        }
    }
    grant(&mut late, WindowMode::Fixed, 3, 10, 90, &[member(0, 2, 60), member(1, 1, 3)]);
}

#[test]
fn only_what_is_bound_is_trimmed_and_whoever_comes_late_is_told() {
    let mut ledger = lost();
    let committed = ledger.committed();
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let mut trim = |ledger: &mut Ledger, upto: u64| {
        let len = crate::wire::order::encode_trim(&mut buffer, ledger.view(), Position(upto));
        apply(ledger, &buffer[..len]).unwrap()
    };
    assert_eq!(trim(&mut ledger, committed.0 + 1), Applied::Void);
    assert_eq!(trim(&mut ledger, 5), Applied::Trimmed);
    assert_eq!(trim(&mut ledger, 5), Applied::Void);
    assert_eq!((ledger.first_known(), ledger.trimmed()), (Position(5), Position(5)));
    let mut late = Ledger::at(ledger.applied_index(), ledger.history_base(), ledger.view(), 8);
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    ledger.history(&mut buffer, |entry| {
        late.apply_snapshot(&OrderEntry::decode(entry).unwrap()).unwrap();
    });
    assert_eq!((late.first_known(), late.trimmed()), (Position(5), Position(5)));
}
