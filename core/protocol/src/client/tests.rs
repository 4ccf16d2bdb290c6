//! The merge, driven by hand: order across shards, confirms without gaps, failure and re-delivery.

use alloc::vec;
use alloc::vec::Vec;

use super::*;
use crate::ledger::grant_head;
use crate::types::{CutPoint, Member, WindowMode};
use crate::wire::order::{ORDER_ENTRY_BYTES_MAX, OrderEntry, encode_cut, encode_grant, encode_view_change};

const A: ShardId = ShardId(0);
const B: ShardId = ShardId(1);

fn slots(
    shard: ShardId,
    lsn: u64,
    position: u64,
    count: u64,
    view: u32,
    record: Option<&'static str>,
) -> Slots<&'static str> {
    let content = record.map_or(Content::NoOps, Content::Record);
    Slots { shard, lsn: Lsn(lsn), position: Position(position), count, view, content }
}

/// Two shards with quotas 2 and 1, windows of 10 cuts: cut `c` covers a a b at 3c, 3c + 1, 3c + 2.
struct Rig {
    ledger: Ledger,
    merge: Merge<&'static str>,
}

fn apply(ledger: &mut Ledger, bytes: &[u8]) {
    let index = ledger.applied_index() + 1;
    ledger.apply(index, &OrderEntry::decode(bytes).unwrap()).unwrap();
}

impl Rig {
    fn new(scope: Scope) -> Rig {
        let mut ledger = Ledger::new(8);
        let members = [
            Member { shard: A, quota: 2, first_lsn: Lsn(0), open: true },
            Member { shard: B, quota: 1, first_lsn: Lsn(0), open: true },
        ];
        let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
        let head = grant_head(0, WindowMode::Fixed, 0, 10, Position(0));
        let len = encode_grant(&mut buffer, head, &members);
        apply(&mut ledger, &buffer[..len]);
        Rig { ledger, merge: Merge::new(scope, &[A, B], Position(0)) }
    }

    fn cut(&mut self, cut: u32, prefix: u16) {
        let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
        let len = encode_cut(&mut buffer, self.ledger.view(), CutPoint { window: 0, cut, prefix });
        apply(&mut self.ledger, &buffer[..len]);
    }

    fn fail(&mut self, shard: ShardId) {
        let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
        let len = encode_view_change(&mut buffer, self.ledger.view() + 1, shard);
        apply(&mut self.ledger, &buffer[..len]);
        let failed = *self.ledger.failed().last().unwrap();
        self.merge.on_view_change(&failed);
    }

    fn record(&mut self, shard: ShardId, lsn: u64, position: u64, record: &'static str) {
        let view = self.ledger.view();
        self.merge.on_slots(&self.ledger, slots(shard, lsn, position, 1, view, Some(record))).unwrap();
    }

    fn tell(&mut self, content: Content<&'static str>, shard: ShardId, lsn: u64, position: u64, count: u64) {
        let view = self.ledger.view();
        let slots = Slots { content, ..slots(shard, lsn, position, count, view, None) };
        self.merge.on_slots(&self.ledger, slots).unwrap();
    }

    /// `b` takes part again from window 1 on, with slots from `lsn`.
    fn return_b(&mut self, lsn: u64) {
        let members = [
            Member { shard: A, quota: 2, first_lsn: Lsn(20), open: true },
            Member { shard: B, quota: 1, first_lsn: Lsn(lsn), open: true },
        ];
        let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
        let head = grant_head(self.ledger.view(), WindowMode::Fixed, 1, 10, Position(30));
        let len = encode_grant(&mut buffer, head, &members);
        apply(&mut self.ledger, &buffer[..len]);
    }

    fn no_ops(&mut self, shard: ShardId, lsn: u64, position: u64, count: u64) {
        let view = self.ledger.view();
        self.merge.on_slots(&self.ledger, slots(shard, lsn, position, count, view, None)).unwrap();
    }

    /// Events as text: `+3a` delivered, `?3a` delivered speculatively, `=4` confirmed, `!2` failed.
    fn events(&mut self) -> Vec<alloc::string::String> {
        let mut events = vec![];
        while let Some(event) = self.merge.poll(&self.ledger).unwrap() {
            events.push(match event {
                Event::Deliver { position, record, speculative, .. } => {
                    alloc::format!("{}{position}{record}", if speculative { '?' } else { '+' })
                }
                Event::Confirm { upto } => alloc::format!("={upto}"),
                Event::Fail { from } => alloc::format!("!{from}"),
                Event::Unavailable { from, to } => alloc::format!("x{from}-{to}"),
            });
        }
        events
    }
}

#[test]
fn shards_merge_in_position_order_and_confirm_never_passes_what_was_delivered() {
    let mut rig = Rig::new(Scope::All);
    rig.record(B, 0, 2, "b");
    assert!(rig.events().is_empty(), "positions 0 and 1 are missing");
    rig.record(A, 0, 0, "a");
    assert_eq!(rig.events(), ["?0a"]);
    rig.cut(1, 0);
    assert_eq!(rig.events(), ["=1"], "bound up to 3 but delivered up to 1");
    rig.no_ops(A, 1, 1, 1);
    assert_eq!(rig.events(), ["+2b", "=3"], "a no-op is a position and no delivery");
}

#[test]
fn one_shard_is_delivered_at_once_and_confirmed_in_global_positions() {
    let mut rig = Rig::new(Scope::Shard(B));
    rig.record(B, 0, 2, "b");
    rig.record(B, 1, 5, "c");
    assert_eq!(rig.events(), ["?2b", "?5c"]);
    rig.cut(1, 1);
    assert_eq!(rig.events(), ["=5"], "one member of cut 1 is bound; position 5 is not");
    rig.cut(3, 0);
    assert_eq!(rig.events(), ["=8"], "slot 2 at position 8 was not delivered yet");
    rig.no_ops(B, 2, 8, 1);
    assert_eq!(rig.events(), ["=9"]);
}

#[test]
fn re_deliveries_are_dropped_and_skipped_slots_are_contradictions() {
    let mut rig = Rig::new(Scope::All);
    rig.record(A, 0, 0, "a");
    rig.record(A, 0, 0, "a");
    assert_eq!(rig.events(), ["?0a"]);
    assert_eq!(rig.merge.resume_from(A), Some(Position(1)));
    let skipped = rig.merge.on_slots(&rig.ledger, slots(A, 2, 3, 1, 0, Some("x")));
    assert_eq!(skipped.unwrap_err().invariant, "I7");
    let moved = rig.merge.on_slots(&rig.ledger, slots(A, 1, 4, 1, 0, Some("x")));
    assert_eq!(moved.unwrap_err().invariant, "I8");
}

#[test]
fn a_failed_shard_takes_back_only_from_its_first_lost_record_and_live_ones_come_again() {
    let mut rig = Rig::new(Scope::All);
    for (lsn, position, name) in [(0, 0, "a0"), (1, 1, "a1"), (2, 3, "a2"), (3, 4, "a3")] {
        rig.record(A, lsn, position, name);
    }
    rig.record(B, 0, 2, "b0");
    rig.record(B, 1, 5, "b1");
    assert_eq!(rig.events().len(), 6);
    rig.cut(0, 1);
    rig.fail(B);
    // Bound up to 2; B's first lost record is at 2; a2 and a3 come again at their positions, B's slots are no-ops.
    assert_eq!(rig.events(), ["=2", "!2", "?3a2", "?4a3"]);
    // Later deliveries of the old view are dropped.
    rig.merge.on_slots(&rig.ledger, slots(B, 2, 8, 1, 0, Some("late"))).unwrap();
    rig.cut(2, 0);
    assert_eq!(rig.events(), ["=6"]);
    rig.record(A, 4, 6, "a4");
    rig.record(A, 5, 7, "a5");
    rig.record(A, 6, 9, "a6");
    assert_eq!(rig.events(), ["?6a4", "?7a5", "?9a6"]);
}

#[test]
fn a_failure_that_took_nothing_from_this_client_is_silent() {
    let mut rig = Rig::new(Scope::All);
    rig.record(A, 0, 0, "a0");
    rig.record(A, 1, 1, "a1");
    rig.record(B, 1 - 1, 2, "b0");
    assert_eq!(rig.events(), ["?0a0", "?1a1", "?2b0"]);
    rig.cut(1, 0);
    rig.fail(B);
    assert_eq!(rig.events(), ["=3"]);
    rig.record(A, 2, 3, "a2");
    rig.record(A, 3, 4, "a3");
    rig.record(A, 4, 6, "a4");
    assert_eq!(rig.events(), ["?3a2", "?4a3", "?6a4"]);
}

/// `b` was delivered beyond what is bound, fails in cut 1 and returns: everything of `a` up to the lease's end is there.
fn returned(scope: Scope) -> Rig {
    let mut rig = Rig::new(scope);
    rig.record(B, 0, 2, "b0");
    rig.record(B, 1, 5, "b1");
    rig.record(B, 2, 8, "b2");
    rig.no_ops(A, 0, 0, 2);
    rig.cut(1, 0);
    assert_eq!(rig.events().concat().matches('b').count(), if scope == Scope::All { 1 } else { 3 });
    rig.fail(B);
    rig
}

#[test]
fn a_shard_that_returns_goes_on_with_its_first_slot_that_was_not_bound() {
    let mut rig = returned(Scope::Shard(B));
    assert_eq!(rig.events(), ["!5"]);
    assert_eq!(rig.merge.resume_from(B), Some(Position(3)), "what is void is told from there");
    rig.tell(Content::Decreed, B, 1, 5, 1);
    rig.return_b(1);
    rig.record(B, 1, 32, "b1");
    assert_eq!(rig.events(), ["?32b1"]);
}

#[test]
fn a_merge_passes_what_is_void_whether_its_ledger_or_a_gate_says_so() {
    let mut rig = returned(Scope::All);
    for cut in 1..10 {
        rig.no_ops(A, 2 * cut, 3 * cut, 2);
        // Told again, and known already.
        rig.tell(Content::Decreed, B, 1, 3 * cut + 2, 1);
    }
    rig.return_b(1);
    rig.no_ops(A, 20, 30, 2);
    rig.record(B, 1, 32, "b1");
    assert_eq!(rig.events(), ["?32b1"]);
    // A client that knows the order log from window 1 on only.
    let mut late = Ledger::at(rig.ledger.applied_index(), Position(30), 1, 8);
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let members = [
        Member { shard: A, quota: 2, first_lsn: Lsn(20), open: true },
        Member { shard: B, quota: 1, first_lsn: Lsn(1), open: true },
    ];
    let head = grant_head(1, WindowMode::Fixed, 1, 10, Position(30));
    let len = encode_grant(&mut buffer, head, &members);
    late.apply_snapshot(&OrderEntry::decode(&buffer[..len]).unwrap()).unwrap();
    let mut merge = Merge::new(Scope::All, &[A, B], Position(24));
    merge.begin_in(&late);
    for (shard, lsn, position, count, content) in [
        (A, 16, 24, 2, Content::NoOps),
        (B, 1, 26, 1, Content::Decreed),
        (A, 18, 27, 2, Content::NoOps),
        (B, 1, 29, 1, Content::Decreed),
        (A, 20, 30, 2, Content::NoOps),
        (B, 1, 32, 1, Content::Record("b1")),
    ] {
        merge.on_slots(&late, Slots { content, ..slots(shard, lsn, position, count, 1, None) }).unwrap();
    }
    let confirmed = merge.poll(&late).unwrap();
    assert_eq!(
        confirmed,
        Some(Event::Deliver { position: Position(32), shard: B, record: "b1", speculative: true, view: 1 })
    );
    assert_eq!(merge.poll(&late).unwrap(), Some(Event::Confirm { upto: Position(30) }));
}

#[test]
fn live_slots_are_not_void_because_a_gate_says_so() {
    let mut rig = Rig::new(Scope::All);
    let void = Slots { content: Content::Decreed, ..slots(B, 0, 2, 1, 0, None) };
    assert_eq!(rig.merge.on_slots(&rig.ledger, void).unwrap_err().invariant, "I15");
}

#[test]
fn unavailable_records_are_told_when_they_are_bound_after_the_confirm_of_what_lies_before() {
    let mut rig = Rig::new(Scope::All);
    rig.record(A, 0, 0, "a0");
    rig.no_ops(A, 1, 1, 1);
    rig.tell(Content::Unavailable, B, 0, 2, 1);
    assert_eq!(rig.events(), ["?0a0"], "the client does not know yet that it is bound");
    rig.cut(1, 0);
    assert_eq!(rig.events(), ["=2", "x2-3", "=3"]);
}

#[test]
fn failures_one_after_another_take_back_each_what_is_theirs() {
    let mut rig = returned(Scope::All);
    rig.record(A, 2, 3, "a2");
    rig.no_ops(A, 3, 4, 1);
    rig.record(A, 4, 6, "a4");
    assert_eq!(rig.events(), ["?3a2", "?6a4"]);
    rig.fail(A);
    assert_eq!(rig.events(), ["!3"]);
    assert!(rig.events().is_empty());
}

#[test]
fn what_a_gate_tells_from_before_the_beginning_of_a_stream_is_passed() {
    let mut rig = Rig::new(Scope::All);
    rig.merge = Merge::new(Scope::All, &[A, B], Position(1));
    rig.no_ops(A, 0, 0, 2);
    rig.record(B, 0, 2, "b0");
    assert_eq!(rig.events(), ["?2b0"]);
    rig.no_ops(A, 2, 3, 1);
    // Told anew and cut otherwise.
    rig.no_ops(A, 2, 3, 2);
    rig.record(B, 1, 5, "b1");
    rig.cut(2, 0);
    assert_eq!(rig.events(), ["+5b1", "=6"]);
}

#[test]
fn a_subscription_to_one_shard_passes_what_is_void_of_it_as_it_is_told() {
    let mut rig = returned(Scope::Shard(B));
    assert_eq!(rig.events(), ["!5"]);
    // Its ledger does not go back so far.
    rig.ledger = Ledger::at(rig.ledger.applied_index(), Position(30), 1, 8);
    rig.tell(Content::Decreed, B, 1, 5, 1);
    assert_eq!(rig.events(), ["=6"]);
    assert_eq!(rig.merge.next(), Position(6), "what was received of it is given back");
    rig.tell(Content::Decreed, B, 1, 29, 1);
    assert_eq!((rig.events(), rig.merge.next()), (vec!["=30".into()], Position(30)));
}
