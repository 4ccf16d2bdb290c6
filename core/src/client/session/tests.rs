//! The session against gates that are slow, vanish, contradict themselves and lie.

mod changes;
mod losses;
mod primaries;
mod world;

use antelog_protocol::Refusal;
use antelog_protocol::wire::session::{ReadResult, stream_bytes};

use super::*;
use world::{Rig, cut, view_change};

fn ack(shard: u16, seq: u64, position: u64) -> Reply<'static> {
    Reply::Acknowledged { shard: ShardId(shard), seq, position: Position(position) }
}

#[test]
fn appends_are_pipelined_and_acknowledged() {
    let mut rig = Rig::new();
    assert_eq!(rig.session.append(ShardId(0), b"x"), Err(AppendError::NotConnectedYet));
    rig.run();
    assert_eq!(rig.log.said, ["a: up"]);
    for (seq, record) in [b"r0", b"r1", b"r2"].into_iter().enumerate() {
        assert_eq!(rig.session.append(ShardId(0), record), Ok(seq as u64));
    }
    assert_eq!(rig.session.append(ShardId(1), b"s0"), Ok(0));
    assert_eq!(rig.requests(0), ["append 0 #0 r0", "append 0 #1 r1", "append 0 #2 r2"]);
    assert_eq!(rig.requests(1), ["append 1 #0 s0"]);
    assert_eq!(rig.session.outstanding(), 4);
    rig.net.world().reply(0, ack(0, 0, 0));
    rig.net.world().reply(0, ack(0, 1, 2));
    rig.net.world().reply(1, ack(1, 0, 1));
    assert_eq!(rig.said(), ["ack 0 #0 @0", "ack 0 #1 @2", "ack 1 #0 @1"]);
    assert_eq!(rig.session.outstanding(), 1);
    assert_eq!(rig.session.append(ShardId(7), b"x"), Err(AppendError::UnknownShard(ShardId(7))));
    assert_eq!(rig.session.append(ShardId(0), &[0; 1001]), Err(AppendError::TooLarge { limit_bytes: 1000 }));
}

#[test]
fn writers_are_pushed_back_at_the_limit() {
    let mut rig = Rig::new();
    rig.run();
    for _ in 0..8 {
        rig.session.append(ShardId(0), b"r").unwrap();
    }
    assert_eq!(rig.session.append(ShardId(0), b"r"), Err(AppendError::Full));
    rig.run();
    rig.net.world().reply(0, ack(0, 0, 0));
    rig.run();
    assert_eq!(rig.session.append(ShardId(0), b"r"), Ok(8));
}

#[test]
fn a_reconnect_sends_everything_again_in_order_before_anything_new() {
    let mut rig = Rig::new();
    rig.run();
    for record in [b"r0", b"r1", b"r2"] {
        rig.session.append(ShardId(0), record).unwrap();
    }
    rig.run();
    rig.net.world().reply(0, ack(0, 0, 0));
    rig.run();
    rig.net.world().drop_connection(0);
    rig.session.append(ShardId(0), b"r3").unwrap();
    rig.run();
    assert_eq!(rig.session.append(ShardId(0), b"r4"), Ok(4), "taken while the gate is away");
    rig.wait();
    assert_eq!(rig.requests(0), ["append 0 #1 r1", "append 0 #2 r2", "append 0 #3 r3", "append 0 #4 r4"]);
    for seq in 1..5 {
        rig.net.world().reply(0, ack(0, seq, 2 * seq));
    }
    assert_eq!(rig.said().last().unwrap(), "ack 0 #4 @8");
    assert!(rig.session.idle());
}

#[test]
fn a_gate_that_becomes_wanted_during_its_pause_is_called_after_it() {
    let mut rig = Rig::new();
    rig.run();
    rig.net.world().drop_connection(0); // it was called for the map only
    rig.run();
    rig.session.subscribe(Scope::Shard(ShardId(0)), Position(0));
    rig.run();
    assert!(rig.session.deadline_ns().is_some_and(|at| at > rig.now_ns), "nothing would call it");
    rig.wait();
    assert!(rig.net.world().connected(0));
}

#[test]
fn after_a_refusal_the_lane_continues_with_the_number_the_gate_expects() {
    let mut rig = Rig::new();
    rig.run();
    for record in [b"r0", b"r1", b"r2"] {
        rig.session.append(ShardId(0), record).unwrap();
    }
    rig.run();
    rig.net.world().reply(0, ack(0, 0, 0));
    rig.net.world().refuse(0, 0, 1, Refusal::RegionFull { region_bytes: 1 });
    rig.run();
    assert_eq!(rig.session.append(ShardId(0), b"r3"), Err(AppendError::Full), "the rest is refused first");
    rig.net.world().refuse(0, 0, 2, Refusal::Gap { expected: 1 });
    assert_eq!(rig.said(), ["ack 0 #0 @0", "refused 0 #1", "refused 0 #2"]);
    assert_eq!(rig.session.append(ShardId(0), b"r3"), Ok(1));
}

#[test]
fn shards_merge_across_gates_speculatively_and_are_confirmed() {
    let mut rig = Rig::new();
    let (relay, a, b) = rig.subscribed();
    rig.net.world().deliver(1, b, 0, 1, b"b0");
    assert!(rig.said().is_empty(), "position 0 is missing");
    rig.net.world().deliver(0, a, 0, 0, b"a0");
    assert_eq!(rig.said(), ["?0 a0", "?1 b0"]);
    rig.net.world().order(relay, 2, &cut(0, 1));
    assert_eq!(rig.said(), ["=1"]);
    rig.net.world().order(relay, 3, &cut(1, 0));
    assert_eq!(rig.said(), ["=2"]);
    rig.net.world().order(relay, 4, &cut(2, 0));
    let no_ops = Reply::NoOps { stream: a, lsn: antelog_protocol::Lsn(1), position: Position(2), count: 1, view: 0 };
    rig.net.world().reply(0, no_ops);
    rig.net.world().deliver(1, b, 1, 3, b"b1");
    assert_eq!(rig.said(), ["+3 b1", "=4"]);
}

#[test]
fn a_failed_shard_takes_its_speculation_back() {
    let mut rig = Rig::new();
    let (relay, a, b) = rig.subscribed();
    rig.net.world().deliver(0, a, 0, 0, b"a0");
    rig.net.world().deliver(0, a, 1, 2, b"a1");
    rig.net.world().deliver(1, b, 0, 1, b"b0");
    assert_eq!(rig.said(), ["?0 a0", "?1 b0", "?2 a1"]);
    rig.net.world().order(relay, 2, &cut(0, 1));
    rig.net.world().order(relay, 3, &view_change(1, 1));
    assert_eq!(rig.said(), ["=1", "!1", "?2 a1"]);
}

#[test]
fn another_relay_continues_the_order_stream_wherever_it_begins() {
    let mut rig = Rig::new();
    let (relay, a, b) = rig.subscribed();
    rig.net.world().deliver(0, a, 0, 0, b"a0");
    rig.net.world().deliver(1, b, 0, 1, b"b0");
    assert_eq!(rig.said(), ["?0 a0", "?1 b0"]);
    rig.net.world().order(relay, 2, &cut(0, 1));
    assert_eq!(rig.said(), ["=1"]);
    let other = 1 - relay;
    rig.net.world().gates[relay].accepts = false;
    rig.net.world().drop_connection(relay);
    assert!(rig.requests(other).contains(&"follow".to_owned()));
    // The other one is behind: its snapshot is read over, and the entries behind it count once they are new.
    rig.net.world().snapshot(other, 1, &[world::grant(100)]);
    rig.net.world().order(other, 2, &cut(0, 1));
    assert!(rig.said().is_empty());
    rig.net.world().order(other, 3, &cut(1, 0));
    assert_eq!(rig.said(), ["=2"]);
    // It leaves something out: the session asks anew and takes the snapshot, which is newer this time.
    rig.net.world().order(other, 9, &cut(4, 0));
    assert_eq!(rig.requests(other), ["follow"]);
    rig.net.world().snapshot(other, 9, &[world::grant(100), cut(2, 0)]);
    let live = if other == 0 { (a, 1, 2) } else { (b, 1, 3) };
    rig.net.world().deliver(other, live.0, live.1, live.2, b"next");
    rig.run();
    if other == 0 {
        assert_eq!(rig.said(), ["+2 next", "=3"]);
    }
    assert!(rig.net.world().connected(other));
}

#[test]
fn a_snapshot_that_takes_back_what_is_bound_is_refused() {
    let mut rig = Rig::new();
    let (relay, ..) = rig.subscribed();
    rig.net.world().order(relay, 2, &cut(5, 0));
    rig.net.world().snapshot(relay, 8, &[world::grant(100), cut(4, 0)]);
    rig.run();
    assert!(!rig.net.world().connected(relay));
    assert!(rig.log.said.iter().any(|line| line.contains("takes back what is bound")), "{:?}", rig.log.said);
}

#[test]
fn credit_comes_back_in_quarters_and_bounds_what_is_kept() {
    let mut rig = Rig::new();
    let (_, a, b) = rig.subscribed();
    let record = [7; 1000];
    let each = stream_bytes(record.len());
    // Nothing of shard 1 comes, so after position 0 nothing can be handed out.
    let mut sent = 0;
    while (sent + 1) * each <= 8000 {
        rig.net.world().deliver(0, a, sent, 2 * sent, &record);
        sent += 1;
    }
    assert_eq!(rig.said().len(), 1);
    assert!(rig.requests(0).is_empty(), "less than a quarter was handed out");
    for lsn in 0..sent {
        rig.net.world().deliver(1, b, lsn, 2 * lsn + 1, b"b");
    }
    assert_eq!(rig.said().len() as u64, 2 * sent - 1);
    assert_eq!(rig.requests(0), [format!("consumed {a} {}", 6 * each)], "whole quarters, once");
    // Beyond the credit: the gate breaks the protocol.
    for lsn in sent..3 * sent {
        rig.net.world().deliver(0, a, lsn, 2 * lsn, &record);
        rig.run();
    }
    assert!(rig.log.said.iter().any(|line| line.contains("beyond the credit")), "{:?}", rig.log.said);
}

#[test]
fn a_subscriber_that_does_not_take_events_is_waited_for() {
    let mut rig = Rig::new();
    let (_, a, b) = rig.subscribed();
    rig.log.paused = true;
    for lsn in 0..5 {
        rig.net.world().deliver(0, a, lsn, 2 * lsn, &[b'x'; 1000]);
        rig.net.world().deliver(1, b, lsn, 2 * lsn + 1, &[b'y'; 1000]);
    }
    assert!(rig.said().is_empty());
    assert!(rig.requests(0).is_empty(), "no credit is given back");
    // The connection is lost meanwhile: the stream begins again only when all was handed out.
    rig.net.world().drop_connection(0);
    rig.wait();
    assert!(!rig.requests(0).iter().any(|line| line.starts_with("subscribe")));
    rig.log.paused = false;
    assert_eq!(rig.said().len(), 10);
    assert!(rig.requests(0).contains(&format!("subscribe {a} shard 0 @9")));
}

#[test]
fn a_subscription_resumes_after_a_reconnect_without_gap_or_repetition() {
    let mut rig = Rig::new();
    let (_, a, b) = rig.subscribed();
    rig.net.world().deliver(0, a, 0, 0, b"a0");
    rig.run();
    rig.net.world().drop_connection(0);
    rig.wait();
    assert!(rig.requests(0).contains(&format!("subscribe {a} shard 0 @1")));
    rig.net.world().deliver(0, a, 1, 2, b"a1");
    rig.net.world().deliver(1, b, 0, 1, b"b0");
    assert_eq!(rig.said(), ["?0 a0", "?1 b0", "?2 a1"]);
}

#[test]
fn an_ended_subscription_says_goodbye_and_late_deliveries_are_dropped() {
    let mut rig = Rig::new();
    let id = rig.session.subscribe(Scope::Shard(ShardId(0)), Position(4));
    let line = rig.requests(0).into_iter().find(|line| line.starts_with("subscribe")).unwrap();
    let stream: u32 = line.split(' ').nth(1).unwrap().parse().unwrap();
    rig.session.unsubscribe(id);
    rig.net.world().deliver(0, stream, 2, 4, b"late");
    assert!(rig.said().is_empty());
    assert_eq!(rig.requests(0), [format!("unsubscribe {stream}")]);
    rig.session.unsubscribe(id);
    rig.session.subscribe(Scope::Shard(ShardId(9)), Position(0));
    assert_eq!(rig.said(), ["no shard 9"]);
}

#[test]
fn garbage_is_fenced_reported_and_the_gate_tried_again() {
    let mut rig = Rig::new();
    let garbage: [&[u8]; 4] = [b"", b"\xff\xff\xff\xff\xff\xff\xff\xff", &[3; 70], b"GET / HTTP/1.1"];
    for bytes in garbage {
        rig.wait();
        assert!(rig.net.world().connected(0));
        rig.net.world().raw(0, &[bytes]);
        rig.session.append(ShardId(0), b"kept").ok();
        rig.run();
        assert!(!rig.net.world().connected(0), "{bytes:?} was taken");
        let said = std::mem::take(&mut rig.log.said);
        assert!(said.iter().any(|line| line.starts_with("a: ") && line.contains("malformed")), "{said:?}");
    }
    rig.wait();
    assert_eq!(rig.requests(0).len(), 4, "the appends are still there");
}

#[test]
fn a_trimmed_stream_ends_its_subscription() {
    let mut rig = Rig::new();
    let (_, a, b) = rig.subscribed();
    rig.net.world().reply(0, Reply::Trimmed { stream: a, head: Position(40) });
    assert_eq!(rig.said(), ["trimmed 40"]);
    let goodbyes = [rig.requests(0), rig.requests(1)].concat();
    assert!(goodbyes.contains(&format!("unsubscribe {b}")));
}

#[test]
fn reads_are_redirected_and_asked_again_after_a_lost_connection() {
    let mut rig = Rig::new();
    rig.session.read(70, Position(5));
    rig.session.tail(71);
    assert_eq!(rig.requests(0), ["read 0 @5", "tail 1"]);
    rig.net.world().reply(0, Reply::ReadIs { token: 0, result: ReadResult::Elsewhere(ShardId(1)) });
    rig.net.world().reply(0, Reply::TailIs { token: 1, position: Position(12), index: 0 });
    assert_eq!(rig.said(), ["tail 71 12"]);
    assert_eq!(rig.requests(1), ["read 0 @5"]);
    rig.net.world().drop_connection(1);
    rig.wait();
    assert_eq!(rig.requests(1), ["read 0 @5"]);
    rig.net.world().reply(1, Reply::ReadIs { token: 0, result: ReadResult::NoOp });
    assert_eq!(rig.said(), ["read 70 @5 NoOp"]);
    assert!(rig.session.idle());
    rig.session.read(72, Position(6));
    rig.run();
    rig.session.cancel(72);
    assert!(rig.session.idle());
}

#[test]
fn a_refused_hand_shake_is_reported_each_time_and_pauses_grow() {
    let mut rig = Rig::new();
    rig.net.world().gates[0].accepts = false;
    let mut pauses = Vec::new();
    rig.run();
    for _ in 0..12 {
        rig.pause();
        let next = rig.session.deadline_ns().unwrap();
        pauses.push(next - rig.now_ns);
    }
    assert!(rig.log.said.len() >= 12 && rig.log.said.iter().all(|line| line == "a: wrong cluster"));
    assert!(pauses[0] <= 20_000_000 && *pauses.last().unwrap() >= 1_000_000_000, "{pauses:?}");
    rig.net.world().gates[0].accepts = true;
    rig.wait();
    assert!(rig.net.world().connected(0));
}

#[test]
fn a_seed_known_by_another_name_gives_the_map_only() {
    let mut rig = Rig::with(|options| options.seeds = vec!["nowhere".into(), "alias".into()]);
    rig.net.world().gates[1].address = "alias".into();
    rig.run();
    assert_eq!(rig.log.said, ["nowhere: wrong cluster"]);
    assert!(rig.session.map().is_some() && !rig.net.world().connected(1));
    rig.session.append(ShardId(0), b"r0").unwrap();
    assert_eq!(rig.requests(0), ["append 0 #0 r0"]);
}

/// Well-formed messages with arbitrary content, mixed with honest ones: the session may fence, it may not panic.
#[test]
fn no_message_makes_the_session_panic() {
    let mut random = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = move |bound: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 11) % bound
    };
    for _ in 0..1000 {
        let mut rig = Rig::new();
        rig.session.subscribe(Scope::Shard(ShardId(1)), Position(3));
        let (relay, a, b) = rig.subscribed();
        for _ in 0..60 {
            let gate = next(2) as usize;
            let stream = [a, b, a.wrapping_sub(1 << 20), next(u64::MAX) as u32][next(4) as usize];
            let mut number = || [next(12), next(12), next(200), next(u64::MAX), u64::MAX][next(5) as usize];
            let (lsn, position, view) = (antelog_protocol::Lsn(number()), Position(number()), number() as u32 % 3);
            let reply = match number() % 9 {
                0 | 1 => {
                    let (client, seq, record) = (ClientId(0), 0, &b"rec"[..]);
                    Reply::Deliver { stream, lsn, position, view, speculative: true, client, seq, record }
                }
                2 => Reply::NoOps { stream, lsn, position, count: number() as u32, view },
                3 => Reply::Snapshot { index: number(), base: position, entries: number() as u32 % 4, view },
                4 => Reply::Acknowledged { shard: ShardId(number() as u16), seq: number(), position },
                5 => Reply::ReadIs { token: number(), result: ReadResult::Elsewhere(ShardId(view as u16)) },
                6 => Reply::NotHere { stream },
                _ => {
                    let entry = match number() % 3 {
                        0 => cut(number() as u32, view as u16),
                        1 => view_change(view, number() as u16 % 3),
                        _ => world::grant(number() as u32 % 5 + 1),
                    };
                    let index = number();
                    rig.net.world().order(if number() % 4 == 0 { gate } else { relay }, index, &entry);
                    continue;
                }
            };
            rig.net.world().reply(gate, reply);
            rig.session.read(number(), position);
            rig.session.append(ShardId(view as u16), b"r").ok();
            rig.session.duty_cycle(rig.now_ns, &mut rig.log);
            rig.now_ns += 1_000_000;
        }
    }
}
