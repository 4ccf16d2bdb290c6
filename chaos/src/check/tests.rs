//! Histories as they should be, and what is found in those that somebody has spoiled.

use super::*;
use crate::circumstances::Durability;
use crate::history::Read;

/// Disks there are none, and whole shards were lost so often.
fn lost(shard_losses: u64) -> Circumstances {
    Circumstances { shard_losses, ..Circumstances::default() }
}

fn name(writer: u32, seq: u64) -> Name {
    Name { writer, seq }
}

/// An append that was called and answered at these times.
fn append(writer: u32, seq: u64, called_ns: u64, answered_ns: u64, position: u64) -> Append {
    Append {
        name: name(writer, seq),
        lane: -1,
        invoked_ns: called_ns,
        answered_ns: Some(answered_ns),
        outcome: Outcome::Acknowledged(position),
    }
}

fn unknown(writer: u32, seq: u64, called_ns: u64) -> Append {
    Append { outcome: Outcome::Unknown, answered_ns: None, ..append(writer, seq, called_ns, 0, 0) }
}

fn deliver(position: u64, writer: u32, seq: u64) -> Told {
    Told::Deliver { position, record: Some(name(writer, seq)) }
}

/// Two writers, two records each at positions 0, 2, 3 and 5 (the others are no-ops), and a subscriber.
fn good() -> History {
    let appends =
        vec![append(1, 0, 10, 20, 0), append(2, 0, 15, 40, 2), append(1, 1, 50, 60, 3), append(2, 1, 55, 90, 5)];
    let told = [
        (16, deliver(0, 1, 0)),
        (22, Told::Confirm { upto: 1 }),
        (30, deliver(2, 2, 0)),
        (41, Told::Confirm { upto: 3 }),
        (58, deliver(3, 1, 1)),
        (59, deliver(5, 2, 1)),
        (95, Told::Confirm { upto: 6 }),
    ];
    let last = told.iter().map(|(_, told)| (100, told.clone())).collect();
    History {
        appends,
        subscribers: BTreeMap::from([("reader-0".to_owned(), told.to_vec())]),
        last,
        ..History::default()
    }
}

/// What is found when somebody has spoiled a good history.
fn found(spoil: impl FnOnce(&mut History)) -> Vec<String> {
    let mut history = good();
    spoil(&mut history);
    check(&history, &lost(0)).violations
}

#[track_caller]
fn only(spoil: impl FnOnce(&mut History), expected: &str) {
    let found = found(spoil);
    assert!(found.iter().any(|f| f.contains(expected)), "expected {expected:?}, found {found:#?}");
}

fn reader(history: &mut History) -> &mut Subscriber {
    history.subscribers.get_mut("reader-0").unwrap()
}

#[test]
fn a_good_history_is_good() {
    let verdict = check(&good(), &lost(0));
    let expected = Verdict { appends: 4, acknowledged: 4, records: 4, positions: 6, ..Verdict::default() };
    assert_eq!(verdict, expected);
}

#[test]
fn what_is_lost_doubled_moved_or_changed_is_found() {
    only(|h| h.last.retain(|(_, told)| *told != deliver(2, 2, 0)), "was acknowledged at 2 and is lost; there is None");
    only(|h| h.last[2].1 = deliver(2, 1, 1), "is in the log at 2 and at 3");
    only(|h| h.appends[1].outcome = Outcome::Acknowledged(4), "was acknowledged at 4 and is at 2");
    only(|h| h.last[2].1 = Told::Deliver { position: 2, record: None }, "position 2 holds bytes that nobody appended");
    only(|h| h.last.insert(6, (100, deliver(4, 9, 9))), "position 4 holds Name { writer: 9, seq: 9 }, which nobody");
    only(|h| h.appends[1].outcome = Outcome::Refused, "was refused and is in the log at position 2");
}

#[test]
fn an_unknown_outcome_may_be_either_but_not_twice() {
    assert!(found(|h| h.appends.push(unknown(3, 0, 12))).is_empty());
    let with = |h: &mut History, position| {
        h.appends.push(unknown(3, 0, 12));
        h.last.insert(6, (100, deliver(position, 3, 0)));
        reader(h).insert(6, (80, deliver(position, 3, 0)));
    };
    assert!(found(|h| with(h, 4)).is_empty());
    only(
        |h| {
            with(h, 4);
            h.last.insert(6, (100, deliver(1, 3, 0)));
        },
        "is in the log at",
    );
    let mut history = good();
    with(&mut history, 4);
    let verdict = check(&history, &lost(0));
    assert_eq!((verdict.unknown, verdict.unknown_in_log), (1, 1));
}

#[test]
fn the_order_of_positions_agrees_with_real_time() {
    // They overlap: either order is good.
    assert!(found(|h| h.appends[1].invoked_ns = 12).is_empty());
    // The one at 2 was answered at 40; the one at 0 must not have been called after that.
    only(
        |h| {
            h.subscribers.clear();
            h.appends[0] = append(3, 0, 45, 48, 0);
            h.last[0].1 = deliver(0, 3, 0);
        },
        "is at 0, and before it was called Name { writer: 2, seq: 0 } had been acknowledged at 2",
    );
    // The same of one whose outcome nobody learned and that is in the log.
    only(
        |h| {
            h.subscribers.clear();
            h.appends[0] = unknown(3, 0, 45);
            h.last[0].1 = deliver(0, 3, 0);
        },
        "had been acknowledged at 2",
    );
    // Whoever was confirmed everything up to 3 has seen what nobody had called yet.
    only(
        |h| {
            h.appends.remove(0);
            h.appends[0].invoked_ns = 42;
            h.appends[0].answered_ns = Some(45);
        },
        "is at 2, and before it was called reader-0 had been confirmed up to 3",
    );
    only(|h| h.appends[2].invoked_ns = 59, "was delivered before it was appended");
}

#[test]
fn a_writer_keeps_its_order() {
    only(
        |h| {
            h.subscribers.clear();
            // Called at the same time, so that only the writer's own order speaks.
            (h.appends[0].invoked_ns, h.appends[2].invoked_ns) = (10, 10);
            h.appends[0].outcome = Outcome::Acknowledged(3);
            h.appends[2].outcome = Outcome::Acknowledged(0);
            (h.last[0].1, h.last[4].1) = (deliver(0, 1, 1), deliver(3, 1, 0));
        },
        "is at 0, and the writer's earlier append 0 at 3",
    );
    // To different shards it need not.
    let found = found(|h| {
        h.subscribers.clear();
        (h.appends[0].invoked_ns, h.appends[2].invoked_ns, h.appends[2].lane) = (10, 10, 1);
        h.appends[0].outcome = Outcome::Acknowledged(3);
        h.appends[2].outcome = Outcome::Acknowledged(0);
        (h.last[0].1, h.last[4].1) = (deliver(0, 1, 1), deliver(3, 1, 0));
    });
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn subscribers_are_confirmed_the_log_and_nothing_else() {
    only(
        |h| reader(h).retain(|(_, told)| *told != deliver(2, 2, 0)),
        "reader-0: at 2 the log holds Name { writer: 2, seq: 0 }, it was confirmed None",
    );
    only(|h| reader(h)[2].1 = deliver(2, 2, 1), "reader-0: at 2 the log holds Name { writer: 2, seq: 0 }");
    only(|h| reader(h)[2].1 = deliver(1, 2, 0), "reader-0: at 1 it was confirmed Name { writer: 2, seq: 0 }");
    only(|h| reader(h).insert(4, (41, Told::Confirm { upto: 1 })), "confirmed up to 3, then up to 1");
    only(|h| reader(h).push((99, deliver(5, 2, 1))), "5 was delivered after everything below 6 was bound");
    only(|h| reader(h).insert(3, (30, deliver(2, 1, 1))), "position 2 was Name { writer: 2, seq: 0 }, then");
    only(|h| reader(h).push((99, Told::Confirm { upto: 7 })), "confirmed up to 7, the log ends at 6");
    only(|h| h.last.push((100, Told::Read { position: 2, record: None })), "a read of position 2 gave None");
}

#[test]
fn what_is_taken_back_needs_a_lost_shard_and_was_not_bound() {
    let fail = |h: &mut History, from| {
        let told = reader(h);
        told.insert(6, (60, Told::Fail { from }));
        told.insert(7, (61, deliver(5, 2, 1)));
    };
    only(|h| fail(h, 5), "1 times something was taken back, though no shard was lost");
    let mut history = good();
    fail(&mut history, 5);
    let verdict = check(&history, &lost(1));
    assert_eq!((&verdict.violations[..], verdict.fails, verdict.taken_back), (&[][..], 1, 1));
    let mut history = good();
    reader(&mut history).push((99, Told::Fail { from: 2 }));
    assert!(check(&history, &lost(1)).violations[0].contains("everything from 2 on was taken back, 6 was bound"));
    // Bound records that nobody has any more: by design, where a whole shard without a disk is lost.
    let mut history = good();
    history.last[2].1 = Told::Unavailable { from: 2, to: 3 };
    assert!(check(&history, &lost(0)).violations_total > 0);
    let verdict = check(&history, &lost(1));
    assert_eq!((&verdict.violations[..], verdict.acknowledged_unavailable, verdict.unavailable), (&[][..], 1, 1));
}

#[test]
fn with_disks_only_the_newest_may_be_gone_and_only_after_a_sudden_end() {
    let mut history = good();
    history.last[2].1 = Told::Unavailable { from: 2, to: 3 };
    let mut circumstances =
        Circumstances { durability: Durability::Replicated, sudden_ends_ns: vec![(45, 46)], ..lost(1) };
    let verdict = check(&history, &circumstances);
    assert_eq!((&verdict.violations[..], verdict.acknowledged_unavailable), (&[][..], 1));
    circumstances.durability = Durability::Flushed;
    let violations = check(&history, &circumstances).violations;
    assert!(violations[0].contains("was acknowledged at 2 and nobody has it"), "{violations:?}");
    // It was acknowledged after it.
    circumstances.durability = Durability::Replicated;
    circumstances.sudden_ends_ns = vec![(5, 6)];
    let violations = check(&history, &circumstances).violations;
    assert!(violations[0].contains("was acknowledged at 2 and nobody has it"), "{violations:?}");
}

#[test]
fn a_full_disk_refuses_appends_and_no_reads() {
    let mut history = good();
    let refused = Append { outcome: Outcome::DiskFull, ..append(3, 0, 30, 40, 0) };
    history.appends.push(refused);
    assert!(check(&history, &lost(0)).violations[0].contains("was refused for a full disk, and none was"));
    let full = Circumstances { durability: Durability::Flushed, full_disks_ns: vec![(25, 50)], ..lost(0) };
    let verdict = check(&history, &full);
    assert_eq!((verdict.violations_total, verdict.refused, verdict.disk_full), (0, 1, 1));
    let read = |position, got| Read { began_ns: 30, ended_ns: 31, position, got };
    history.reads.push(read(2, Got::Nothing));
    assert!(check(&history, &full).violations[0].contains("while a disk was full no read was answered"));
    history.reads.push(read(2, Got::Record(Some(name(2, 0)))));
    let verdict = check(&history, &full);
    assert_eq!((verdict.violations_total, verdict.reads, verdict.reads_failed, verdict.reads_while_full), (0, 2, 1, 1));
    history.reads.push(read(1, Got::NoOp));
    for wrong in [read(2, Got::NoOp), read(1, Got::Record(Some(name(2, 0)))), read(3, Got::Unavailable)] {
        history.reads[2] = wrong;
        assert!(check(&history, &full).violations[0].contains("a read of position"));
    }
}
