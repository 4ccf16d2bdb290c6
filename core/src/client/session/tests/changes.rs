//! Changes of membership: asked until answered, and done when the order stream shows it.

use antelog_protocol::ledger::grant_head;
use antelog_protocol::wire::order::{ORDER_ENTRY_BYTES_MAX, encode_grant};
use antelog_protocol::{Change, ChangeError, Lsn, Member, Ordering, Refusal, WindowMode};

use super::world::{Rig, grant};
use super::*;

/// Window `window` of two cuts from a position on; quotas of shards 0 and 1, and whether they are open.
fn window(window: u64, start: u64, lsns: [u64; 2], quotas: [u32; 2], open: [bool; 2]) -> Vec<u8> {
    let member =
        |at: usize| Member { shard: ShardId(at as u16), quota: quotas[at], first_lsn: Lsn(lsns[at]), open: open[at] };
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let head = grant_head(0, WindowMode::Fixed, window, 2, Position(start));
    let len = encode_grant(&mut buffer, head, &[member(0), member(1)]);
    buffer[..len].to_vec()
}

#[test]
fn a_change_is_done_when_the_order_stream_shows_it_from_the_answered_index_on() {
    let mut rig = Rig::new();
    rig.session.change(80, Change::Leave(ShardId(1)));
    assert_eq!(rig.requests(0), ["change 0 Leave(ShardId(1))", "follow"]);
    rig.net.world().gates[1].accepts = false;
    rig.net.world().gates[2].accepts = false;
    rig.net.world().drop_connection(0);
    rig.wait();
    assert_eq!(rig.requests(0), ["change 0 Leave(ShardId(1))", "follow"], "asked again under the same number");
    rig.net.world().reply(0, Reply::ChangeIs { token: 0, outcome: Ok(2) });
    rig.net.world().snapshot(0, 1, &[grant(2)]);
    rig.net.world().order(0, 2, &window(1, 4, [2, 2], [1, 1], [true, false]));
    assert!(rig.said().is_empty(), "it takes no appends, but has slots");
    rig.net.world().order(0, 3, &window(2, 8, [4, 4], [1, 0], [true, false]));
    assert_eq!(rig.said(), ["member 80 window 2 @8 Fixed [(0, 1, true), (1, 0, false)]"]);
    // What a ledger shows that is older than the answer does not count.
    rig.session.change(81, Change::Leave(ShardId(1)));
    assert_eq!(rig.requests(0), ["change 1 Leave(ShardId(1))"]);
    rig.net.world().reply(0, Reply::ChangeIs { token: 1, outcome: Ok(4) });
    assert!(rig.said().is_empty());
    rig.net.world().order(0, 4, &window(3, 10, [6, 4], [1, 0], [true, false]));
    assert_eq!(rig.said(), ["member 81 window 2 @8 Fixed [(0, 1, true), (1, 0, false)]"]);
    assert!(rig.session.idle());
}

#[test]
fn a_change_that_is_not_taken_and_the_membership_are_answered() {
    let mut rig = Rig::new();
    rig.session.change(1, Change::Join(ShardId(7)));
    rig.session.membership(2);
    rig.session.change(3, Change::Ordering(Ordering::FreeTick));
    let asked = rig.requests(0);
    assert_eq!(asked, ["change 0 Join(ShardId(7))", "tail 1", "change 2 Ordering(FreeTick)", "follow"]);
    let unknown = ChangeError::UnknownShard(ShardId(7));
    rig.net.world().reply(0, Reply::ChangeIs { token: 0, outcome: Err(unknown) });
    assert_eq!(rig.said(), [format!("member 1 {unknown}")]);
    rig.net.world().reply(0, Reply::TailIs { token: 1, position: Position(0), index: 1 });
    rig.net.world().reply(0, Reply::ChangeIs { token: 2, outcome: Ok(1) });
    assert!(rig.said().is_empty(), "no index is known");
    rig.net.world().snapshot(0, 1, &[grant(2)]);
    assert_eq!(rig.said(), ["member 2 window 0 @0 Fixed [(0, 1, true), (1, 1, true)]"]);
    rig.session.cancel(3);
    assert!(rig.session.idle());
    rig.net.world().reply(0, Reply::TailIs { token: 2, position: Position(0), index: 1 });
    assert!(rig.said().is_empty(), "it was given up");
}

#[test]
fn a_closed_shard_says_where_to_go_and_takes_the_lane_s_number_again() {
    let mut rig = Rig::new();
    rig.run();
    for record in [b"r0", b"r1"] {
        rig.session.append(ShardId(0), record).unwrap();
    }
    rig.run();
    rig.net.world().refuse(0, 0, 0, Refusal::Closed { instead: ShardId(1) });
    rig.net.world().refuse(0, 0, 1, Refusal::UnknownSession);
    assert_eq!(rig.said(), ["refused 0 #0, 1 instead", "refused 0 #1"]);
    assert_eq!(rig.session.append(ShardId(0), b"r2"), Ok(0), "the shard may take appends again");
}

#[test]
fn a_refusal_for_want_of_a_right_is_told_for_each_and_the_session_goes_on() {
    let mut rig = Rig::new();
    rig.run();
    for record in [b"r0", b"r1"] {
        rig.session.append(ShardId(0), record).unwrap();
    }
    rig.session.change(4, Change::Join(ShardId(1)));
    rig.run();
    let refused = |seq| Reply::Refused { shard: ShardId(0), attempt: 1, seq, refusal: Refusal::Forbidden };
    rig.net.world().reply(0, refused(0));
    rig.net.world().reply(0, refused(1));
    rig.net.world().reply(0, Reply::ChangeIs { token: 0, outcome: Err(ChangeError::Forbidden) });
    let forbidden = ChangeError::Forbidden;
    assert_eq!(rig.said(), ["refused 0 #0".to_owned(), "refused 0 #1".to_owned(), format!("member 4 {forbidden}")]);
}

#[test]
fn a_gate_that_is_about_to_end_still_answers_and_is_told_what_was_read() {
    let mut rig = Rig::new();
    rig.run();
    rig.session.append(ShardId(0), b"r0").unwrap();
    rig.run();
    rig.net.world().reply(0, Reply::Closing);
    rig.run();
    let told = rig.log.said.iter().any(|line| line.ends_with(": the node is shutting down"));
    assert!(told, "{:?}", rig.log.said);
    rig.net.world().reply(0, Reply::Acknowledged { shard: ShardId(0), seq: 0, position: Position(7) });
    assert_eq!(rig.said(), ["ack 0 #0 @7"]);
}
