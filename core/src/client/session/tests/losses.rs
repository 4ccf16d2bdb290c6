//! Shards are lost as a whole and return: what is void, what is unknown, what is unavailable.

use antelog_protocol::wire::session::ReadResult;
use antelog_protocol::{Lsn, Outcome};

use super::world::{Rig, SUSPECT_NS, cut, cut_in, decree, grant_in, members, view_change};
use super::*;

/// Two shards led by their replica 0, a window of 100 cuts, and position 0 bound; as of index 4.
fn led() -> (Rig, usize, u32, u32) {
    let mut rig = Rig::new();
    let (relay, a, b) = rig.subscribed();
    rig.net.world().order(relay, 2, &members(0, (0, 1), 1, 0));
    rig.net.world().order(relay, 3, &members(0, (1, 1), 1, 0));
    rig.net.world().order(relay, 4, &cut(0, 1));
    assert!(rig.said().is_empty() && rig.requests(0).is_empty() && rig.requests(1).is_empty());
    (rig, relay, a, b)
}

fn outcome(rig: &mut Rig, gate: usize, outcome: Outcome, next_seq: u64) {
    let asked = rig.requests(gate).into_iter().find(|line| line.starts_with("outcome")).expect("it is asked");
    let token = asked.split(' ').nth(1).unwrap().parse().unwrap();
    rig.net.world().reply(gate, Reply::OutcomeIs { token, outcome, next_seq });
}

#[test]
fn a_late_acknowledgement_from_before_a_loss_is_not_taken_for_that_of_another_record() {
    let (mut rig, relay, ..) = led();
    rig.session.append(ShardId(1), b"r0").unwrap();
    rig.requests(1);
    // It is bound at position 1, and its primary is slow to say so.
    rig.net.world().order(relay, 5, &cut(1, 0));
    rig.net.world().order(relay, 6, &view_change(1, 1));
    let told: Vec<String> = rig.said().into_iter().filter(|line| !line.starts_with('=')).collect();
    assert_eq!(told, ["unknown 1 #0"]);
    // The shard returns without it: its number is used again.
    rig.net.world().order(relay, 7, &members(1, (1, 3), 2, 2));
    rig.run();
    outcome(&mut rig, 2, Outcome::Forgotten, 0);
    rig.run();
    assert_eq!(rig.session.append(ShardId(1), b"r1"), Ok(0));
    rig.net.world().reply(1, ack(1, 0, 1));
    assert!(rig.said().is_empty() && rig.session.outstanding() == 1);
    rig.net.world().reply(2, ack(1, 0, 201));
    assert_eq!(rig.said(), ["ack 1 #0 @201"]);
}

#[test]
fn appends_under_way_to_a_lost_shard_are_unknown_until_it_returns_and_says() {
    let (mut rig, relay, ..) = led();
    for record in [b"r0", b"r1", b"r2"] {
        rig.session.append(ShardId(1), record).unwrap();
    }
    rig.requests(1);
    rig.net.world().reply(1, ack(1, 0, 1));
    rig.run();
    rig.net.world().order(relay, 5, &cut(1, 0));
    rig.net.world().order(relay, 6, &view_change(1, 1));
    let told: Vec<String> = rig.said().into_iter().filter(|line| !line.starts_with('=')).collect();
    assert_eq!(told, ["ack 1 #0 @1", "unknown 1 #1", "unknown 1 #2"]);
    assert!(rig.session.idle());
    assert_eq!(rig.session.append(ShardId(1), b"r3"), Err(AppendError::Lost(ShardId(1))));
    assert!(rig.session.append(ShardId(0), b"s0").is_ok(), "others go on");
    rig.session.outcome(80, ShardId(1), ClientId(7), 1);
    rig.session.outcome(81, ShardId(1), ClientId(7), 2);
    let asked = |rig: &mut Rig, gate| rig.requests(gate).iter().any(|line| line.starts_with("outcome"));
    assert!((0..3).all(|gate| !asked(&mut rig, gate)), "nobody could answer");
    // It returns beside gate c, with r1 and without r2.
    rig.net.world().order(relay, 7, &members(1, (1, 3), 2, 2));
    rig.run();
    assert_eq!(rig.session.append(ShardId(1), b"r3"), Err(AppendError::Full), "its number is not known yet");
    outcome(&mut rig, 2, Outcome::Bound(Position(3)), 2);
    assert_eq!(rig.said(), ["outcome 81 NotInLog"], "no need to ask for that");
    outcome(&mut rig, 2, Outcome::Bound(Position(3)), 2);
    assert_eq!(rig.said(), ["outcome 80 Bound(Position(3))"]);
    assert_eq!(rig.session.append(ShardId(1), b"r3"), Ok(2));
    assert!(rig.requests(2).contains(&"append 1 #2 r3".to_owned()));
    rig.session.outcome(82, ShardId(1), ClientId(99), 5);
    rig.run();
    outcome(&mut rig, 2, Outcome::NotHere, 0);
    rig.wait();
    outcome(&mut rig, 2, Outcome::Forgotten, 0);
    assert_eq!(rig.said(), ["outcome 82 Forgotten"]);
}

#[test]
fn a_gate_that_knows_of_a_loss_takes_no_retry_of_a_session_that_does_not() {
    let mut rig = Rig::new();
    rig.run();
    for record in [b"r0", b"r1"] {
        rig.session.append(ShardId(0), record).unwrap();
    }
    rig.run();
    // Never taken by anybody: the session learns of a loss before its time.
    rig.net.world().refuse(0, 0, 0, Refusal::OldView { view: 3 });
    rig.net.world().refuse(0, 0, 1, Refusal::OldView { view: 3 });
    assert!(rig.said().is_empty());
    assert_eq!(rig.requests(0)[2..], ["append 0 #0 r0", "append 0 #1 r1"]);
    // The process begins again, and with it the shard.
    rig.net.world().drop_connection(0);
    rig.wait();
    assert!(rig.requests(0).contains(&"append 0 #0 r0".to_owned()));
    rig.net.world().refuse(0, 0, 0, Refusal::OldView { view: 4 });
    rig.net.world().refuse(0, 0, 1, Refusal::OldView { view: 4 });
    assert_eq!(rig.said(), ["unknown 0 #0", "unknown 0 #1"]);
    outcome(&mut rig, 0, Outcome::NotInLog, 0);
    rig.run();
    assert_eq!(rig.session.append(ShardId(0), b"r2"), Ok(0));
}

/// What is missing when a shard returns for the first time may be there when it does so again, under numbers that were used
/// for other records meanwhile.
#[test]
fn a_number_is_asked_for_after_every_loss_whether_anything_was_under_way_or_not() {
    let (mut rig, relay, ..) = led();
    rig.session.append(ShardId(1), b"r0").unwrap();
    rig.requests(1);
    rig.net.world().reply(1, ack(1, 0, 1));
    rig.run();
    rig.net.world().order(relay, 5, &cut(1, 0));
    rig.net.world().order(relay, 6, &view_change(1, 1));
    rig.net.world().order(relay, 7, &members(1, (1, 3), 2, 2));
    rig.run();
    assert_eq!(rig.session.append(ShardId(1), b"r1"), Err(AppendError::Full), "its number is not known yet");
    outcome(&mut rig, 2, Outcome::Forgotten, 0);
    rig.said();
    assert_eq!(rig.session.append(ShardId(1), b"r1"), Ok(0));
    rig.run();
    rig.net.world().refuse(2, 1, 0, Refusal::OldView { view: 2 });
    assert_eq!(rig.said(), ["refused 1 #0"], "it would be taken for a retry of r0");
    outcome(&mut rig, 2, Outcome::Bound(Position(1)), 1);
    rig.run();
    assert_eq!(rig.session.append(ShardId(1), b"r2"), Ok(1));
}

#[test]
fn a_lost_shard_returns_into_the_streams_behind_its_void_positions() {
    let (mut rig, relay, a, b) = led();
    rig.net.world().deliver(0, a, 0, 0, b"a0");
    rig.net.world().deliver(1, b, 0, 1, b"b0");
    rig.net.world().deliver(1, b, 1, 3, b"b1");
    rig.net.world().deliver(0, a, 1, 2, b"a1");
    assert_eq!(rig.said(), ["+0 a0", "?1 b0", "?2 a1", "?3 b1", "=1"]);
    // Bound up to 2: b's slot 1 is void.
    rig.net.world().order(relay, 5, &cut(1, 0));
    rig.net.world().order(relay, 6, &view_change(1, 1));
    assert_eq!(rig.said(), ["=2", "!3"]);
    let told = rig.net.world().stream(relay, 1);
    assert_eq!(
        rig.requests(relay).last().unwrap(),
        &format!("subscribe {told} shard 1 @4"),
        "any gate tells what is void"
    );
    rig.net.world().deliver(1, b, 2, 5, b"late");
    rig.net.world().order(relay, 7, &cut_in(1, 0, 100, 0));
    rig.net.world().order(relay, 8, &members(1, (1, 3), 2, 2));
    rig.net.world().order(relay, 9, &grant_in(1, (1, 10), 200, [100, 1]));
    rig.run();
    let back = rig.net.world().stream(2, 1);
    for lsn in 2..100 {
        rig.net.world().deliver_in(1, 0, a, (lsn, 2 * lsn), b"a");
        rig.run();
    }
    rig.log.said.clear();
    rig.net.world().deliver_in(1, 0, a, (100, 200), b"a100");
    rig.net.world().deliver_in(1, 2, back, (1, 201), b"b1 again");
    assert_eq!(rig.said(), ["?200 a100", "?201 b1 again"]);
}

#[test]
fn what_nobody_has_is_unavailable_and_never_a_no_op() {
    let (mut rig, relay, a, _) = led();
    rig.net.world().deliver(0, a, 0, 0, b"a0");
    rig.net.world().order(relay, 5, &cut(3, 0));
    rig.net.world().order(relay, 6, &view_change(1, 1));
    rig.run();
    let told = rig.net.world().stream(relay, 1);
    let missing = Reply::Unavailable { stream: told, lsn: Lsn(0), position: Position(1), count: 1, view: 1 };
    rig.net.world().reply(relay, missing);
    rig.net.world().deliver_in(1, 0, a, (1, 2), b"a1");
    assert_eq!(rig.said(), ["+0 a0", "=1", "x1-2", "+2 a1", "=3"]);
    rig.session.read(70, Position(3));
    let asked = rig.requests(relay);
    assert_eq!(asked.last().unwrap(), "read 0 @3", "{asked:?}");
    rig.net.world().reply(relay, Reply::ReadIs { token: 0, result: ReadResult::Unavailable });
    assert_eq!(rig.said(), ["read 70 @3 Unavailable"]);
}

/// Everything up to position 3 was handed out, position 0 is confirmed, and the relay is lost.
fn without_relay() -> (Rig, usize) {
    let (mut rig, relay, a, b) = led();
    for lsn in 0..2 {
        rig.net.world().deliver(0, a, lsn, 2 * lsn, b"a");
        rig.net.world().deliver(1, b, lsn, 2 * lsn + 1, b"b");
    }
    rig.run();
    rig.log.said.clear();
    rig.net.world().gates[relay].accepts = false;
    rig.net.world().drop_connection(relay);
    rig.wait();
    let other = (0..3).find(|gate| rig.requests(*gate).contains(&"follow".to_owned())).unwrap();
    (rig, other)
}

#[test]
fn views_missed_are_learned_one_by_one_and_fail_once() {
    let (mut rig, relay) = without_relay();
    let failures = [decree(1, 1, (3, 200), 1), decree(2, 1, (260, 300), 31)];
    let now = [grant_in(2, (1, 100), 200, [100, 1]), cut_in(2, 1, 30, 0)];
    rig.net.world().snapshot_in(2, relay, (40, 200), &[&failures[..], &now[..]].concat());
    // b's slot 1, at position 3, was not bound; a's slot 1 was.
    // What is void is passed.
    assert_eq!(rig.said(), ["=3", "!3", "=4"]);
    assert!(rig.said().is_empty());
}

#[test]
fn views_missed_that_took_nothing_are_silent() {
    let (mut rig, relay) = without_relay();
    let entries = [decree(1, 1, (4, 200), 2), grant_in(1, (1, 100), 200, [100, 2])];
    rig.net.world().snapshot_in(1, relay, (40, 200), &entries);
    assert_eq!(rig.said(), ["=4"]);
}

#[test]
fn views_that_are_forgotten_take_everything_back_that_is_not_confirmed() {
    let (mut rig, relay) = without_relay();
    rig.net.world().snapshot_in(3, relay, (40, 200), &[grant_in(3, (1, 100), 200, [100, 2])]);
    assert_eq!(rig.said(), ["!1"]);
    let resumed: Vec<String> = (0..3).flat_map(|gate| rig.requests(gate)).filter(|l| l.contains("@1")).collect();
    assert!(!resumed.is_empty());
    assert!(rig.said().is_empty(), "once");
}

#[test]
fn a_snapshot_in_which_a_failure_takes_back_what_is_bound_is_refused() {
    let (mut rig, relay) = without_relay();
    rig.net.world().snapshot_in(1, relay, (40, 200), &[decree(1, 1, (0, 200), 0)]);
    rig.run();
    assert!(rig.log.said.iter().any(|line| line.contains("takes back what is bound")), "{:?}", rig.log.said);
}

#[test]
fn what_was_lost_before_the_order_stream_was_followed_is_unknown_when_nobody_answers() {
    let mut rig = Rig::new();
    rig.run();
    rig.session.append(ShardId(0), b"r0").unwrap();
    rig.run();
    rig.now_ns += SUSPECT_NS;
    rig.requests(0);
    let entries = [members(1, (0, 3), 2, 0), decree(1, 0, (0, 200), 0), grant_in(1, (0, 100), 0, [0, 0])];
    rig.net.world().snapshot_in(1, 0, (9, 0), &entries);
    assert!(rig.said().is_empty(), "the gate would know better, if it answered");
    rig.now_ns += SUSPECT_NS;
    rig.run();
    rig.now_ns += SUSPECT_NS;
    assert_eq!(rig.said(), ["unknown 0 #0"]);
}

#[test]
fn an_append_that_was_never_sent_to_a_shard_that_is_lost_is_refused() {
    let (mut rig, relay, ..) = led();
    assert_eq!(relay, 0);
    rig.net.world().gates[1].accepts = false;
    rig.net.world().drop_connection(1);
    rig.run();
    rig.session.append(ShardId(1), b"r0").unwrap();
    rig.run();
    rig.net.world().order(relay, 5, &view_change(1, 1));
    assert_eq!(rig.said(), ["refused 1 #0"]);
}
