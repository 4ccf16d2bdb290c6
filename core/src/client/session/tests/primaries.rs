//! Primaries move and relays die: what is under way goes where the order stream says.

use antelog_protocol::wire::session::ReadResult;

use super::world::{Rig, SUSPECT_NS, cut, grant, members};
use super::*;

/// Both shards are led by their replica 0, as of index 3.
fn led() -> (Rig, usize, u32, u32) {
    let mut rig = Rig::new();
    let (relay, a, b) = rig.subscribed();
    rig.net.world().order(relay, 2, &members(0, (0, 1), 1, 0));
    rig.net.world().order(relay, 3, &members(0, (1, 1), 1, 0));
    assert!(rig.said().is_empty() && rig.requests(0).is_empty() && rig.requests(1).is_empty());
    (rig, relay, a, b)
}

fn appends(rig: &mut Rig, records: &[&[u8]]) {
    for record in records {
        rig.session.append(ShardId(0), record).unwrap();
    }
    rig.run();
}

#[test]
fn outstanding_appends_go_to_the_new_primary_in_order_before_anything_new() {
    let (mut rig, relay, ..) = led();
    appends(&mut rig, &[b"r0", b"r1", b"r2"]);
    assert_eq!(rig.requests(0).len(), 3);
    rig.net.world().reply(0, ack(0, 0, 0));
    rig.net.world().order(relay, 4, &members(0, (0, 2), 2, 2));
    rig.run();
    rig.session.append(ShardId(0), b"r3").unwrap();
    let sent: Vec<String> = rig.requests(2).into_iter().filter(|line| line.starts_with("append")).collect();
    assert_eq!(sent, ["append 0 #1 r1", "append 0 #2 r2", "append 0 #3 r3"]);
    assert_eq!(rig.said(), ["ack 0 #0 @0"]);
    // The old primary's gate has not heard: what it refuses now is nobody's business, what it acknowledges is true.
    rig.net.world().refuse(0, 0, 1, Refusal::NotHere);
    rig.net.world().refuse(0, 0, 2, Refusal::Gap { expected: 1 });
    rig.net.world().reply(0, ack(0, 1, 2));
    rig.net.world().reply(2, ack(0, 1, 2));
    rig.net.world().reply(2, ack(0, 2, 4));
    rig.net.world().reply(2, ack(0, 3, 6));
    assert_eq!(rig.said(), ["ack 0 #1 @2", "ack 0 #2 @4", "ack 0 #3 @6"]);
    assert!(rig.session.idle());
}

#[test]
fn a_primary_that_moves_twice_and_back_takes_what_is_outstanding_along() {
    let (mut rig, relay, ..) = led();
    appends(&mut rig, &[b"r0", b"r1"]);
    rig.requests(0);
    rig.net.world().order(relay, 4, &members(0, (0, 2), 2, 2));
    rig.run();
    rig.net.world().order(relay, 5, &members(0, (0, 3), 3, 1));
    assert!(rig.requests(1).contains(&"append 0 #0 r0".to_owned()));
    // Back to the first: an answer to what was sent there at first is none to what is sent there now.
    rig.net.world().order(relay, 6, &members(0, (0, 4), 4, 0));
    rig.run();
    let stale = Reply::Refused { shard: ShardId(0), attempt: 0, seq: 1, refusal: Refusal::Gap { expected: 0 } };
    rig.net.world().reply(0, stale);
    assert!(rig.said().is_empty());
    let again: Vec<String> = rig.requests(0).into_iter().filter(|line| line.starts_with("append")).collect();
    assert_eq!(again, ["append 0 #0 r0", "append 0 #1 r1"]);
    rig.net.world().reply(0, ack(0, 0, 0));
    rig.net.world().reply(0, ack(0, 1, 2));
    assert_eq!(rig.said(), ["ack 0 #0 @0", "ack 0 #1 @2"]);
}

#[test]
fn the_same_replica_that_leads_again_is_sent_everything_again() {
    let (mut rig, relay, ..) = led();
    appends(&mut rig, &[b"r0"]);
    rig.requests(0);
    rig.net.world().order(relay, 4, &members(0, (0, 2), 2, 1));
    rig.net.world().order(relay, 5, &members(0, (0, 3), 3, 0));
    assert!(rig.requests(0).contains(&"append 0 #0 r0".to_owned()), "it has forgotten whom to answer");
}

#[test]
fn streams_are_resumed_at_the_new_primary_and_the_old_one_is_not_heard_any_more() {
    let (mut rig, relay, a, b) = led();
    rig.net.world().deliver(0, a, 0, 0, b"a0");
    rig.net.world().deliver(1, b, 0, 1, b"b0");
    assert_eq!(rig.said(), ["?0 a0", "?1 b0"]);
    rig.net.world().order(relay, 4, &members(0, (0, 2), 2, 2));
    rig.run();
    assert!(rig.requests(0).contains(&format!("unsubscribe {a}")));
    let moved = rig.net.world().stream(2, 0);
    assert_eq!(rig.requests(2), [format!("subscribe {moved} shard 0 @1")]);
    rig.net.world().deliver(0, a, 1, 2, b"late");
    rig.net.world().deliver(2, moved, 1, 2, b"a1");
    rig.net.world().order(relay, 5, &cut(1, 1));
    assert_eq!(rig.said(), ["+2 a1", "=3"]);
    assert!(rig.net.world().connected(0));
}

#[test]
fn a_gate_that_is_behind_is_asked_again_after_a_pause_or_left_when_the_order_stream_says_so() {
    let mut rig = Rig::new();
    rig.run();
    appends(&mut rig, &[b"r0", b"r1"]);
    rig.session.read(70, Position(4));
    assert_eq!(rig.requests(0), ["append 0 #0 r0", "append 0 #1 r1", "read 0 @4"]);
    rig.net.world().refuse(0, 0, 0, Refusal::NotHere);
    rig.net.world().refuse(0, 0, 1, Refusal::NotHere);
    rig.net.world().reply(0, Reply::ReadIs { token: 0, result: ReadResult::Elsewhere(ShardId(0)) });
    assert_eq!(rig.requests(0), ["follow"], "it is learned where the shard is");
    rig.pause();
    rig.pause();
    let mut again = rig.requests(0);
    again.sort();
    assert_eq!(again, ["append 0 #0 r0", "append 0 #1 r1", "read 0 @4"]);
    rig.net.world().refuse(0, 0, 0, Refusal::NotHere);
    rig.net.world().snapshot(0, 1, &[members(0, (0, 1), 5, 1), grant(100)]);
    let mut moved = rig.requests(1);
    moved.sort();
    assert_eq!(moved, ["append 0 #0 r0", "append 0 #1 r1", "read 0 @4"], "at once");
    assert!(rig.said().is_empty());
}

#[test]
fn a_relay_that_is_silent_is_asked_and_then_left_for_another() {
    let (mut rig, relay, ..) = led();
    rig.now_ns += SUSPECT_NS;
    rig.run();
    assert_eq!(rig.requests(relay), [format!("tail {}", u64::MAX)]);
    rig.net.world().reply(relay, Reply::TailIs { token: u64::MAX, position: Position(0), index: 3 });
    rig.run();
    rig.now_ns += SUSPECT_NS;
    assert_eq!(rig.requests(relay), [format!("tail {}", u64::MAX)]);
    rig.now_ns += SUSPECT_NS;
    assert_eq!(rig.requests(relay), ["unfollow"]);
    let other = (0..3).find(|gate| rig.net.world().connected(*gate) && *gate != relay).unwrap();
    assert_eq!(rig.requests(other), ["follow"]);
    // What the old one still relays is not heard.
    rig.net.world().order(relay, 9, &cut(1, 0));
    rig.run();
    assert!(rig.net.world().connected(relay));
}

#[test]
fn a_lost_relay_is_replaced_by_a_gate_that_nobody_needed_before() {
    let mut rig = Rig::new();
    rig.session.subscribe(Scope::Shard(ShardId(0)), Position(0));
    rig.run();
    for gate in [0, 1] {
        rig.net.world().gates[gate].accepts = false;
    }
    rig.net.world().drop_connection(0);
    rig.wait();
    rig.wait();
    assert!(rig.requests(2).contains(&"follow".to_owned()));
    rig.net.world().snapshot(2, 1, &[members(0, (0, 1), 2, 2), grant(100)]);
    rig.run();
    let stream = rig.net.world().stream(2, 0);
    rig.net.world().deliver(2, stream, 0, 0, b"a0");
    assert_eq!(rig.said(), ["?0 a0"]);
}

#[test]
fn an_append_that_nobody_answers_has_the_order_stream_followed() {
    let mut rig = Rig::new();
    rig.run();
    appends(&mut rig, &[b"r0"]);
    assert_eq!(rig.requests(0), ["append 0 #0 r0"]);
    rig.now_ns += SUSPECT_NS;
    assert_eq!(rig.requests(0), ["follow"]);
    // It is still with the same primary; whether that knows of it is not sure.
    rig.net.world().snapshot(0, 1, &[members(0, (0, 1), 5, 0), grant(100)]);
    assert!(rig.requests(0).is_empty());
    rig.now_ns += SUSPECT_NS;
    rig.run();
    rig.now_ns += SUSPECT_NS;
    assert!(rig.requests(0).contains(&"append 0 #0 r0".to_owned()));
}
