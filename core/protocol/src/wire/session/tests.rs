//! Session messages: written, read, cut short, and made of arbitrary bytes.

use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::super::change::tests::{CHANGES, OUTCOMES};
use super::*;

fn request_bytes(request: &Request<'_>) -> Vec<u8> {
    let mut head = [0; SESSION_HEAD_BYTES_MAX];
    let (len, body) = request.encode(&mut head);
    [&head[..len], body].concat()
}

fn reply_bytes(reply: &Reply<'_>) -> Vec<u8> {
    let mut head = [0; SESSION_HEAD_BYTES_MAX];
    let (len, body) = reply.encode(&mut head);
    [&head[..len], body].concat()
}

#[test]
fn requests_come_back_and_shorter_ones_are_refused() {
    let shard = ShardId(7);
    let changes = CHANGES.map(|change| Request::Change { token: 8, change });
    let others = [
        Request::Append { shard, attempt: 3, view: 4, seq: 9, record: b"" },
        Request::Subscribe { stream: 1, shard, from: Position(u64::MAX), credit_bytes: 5, view: 6 },
        Request::Unsubscribe { stream: 2 },
        Request::Consumed { stream: 3, bytes: 4 },
        Request::Follow,
        Request::Read { token: 5, position: Position(6) },
        Request::Cancel { token: 5 },
        Request::Tail { token: 7 },
        Request::Unfollow,
        Request::Outcome { token: 8, shard, client: ClientId(1 << 90), seq: 5 },
    ];
    for request in others.into_iter().chain(changes) {
        let bytes = request_bytes(&request);
        assert_eq!(Request::decode(&bytes), Ok(request));
        for end in 0..bytes.len() {
            assert!(Request::decode(&bytes[..end]).is_err(), "{end} bytes of {request:?} were taken");
        }
    }
    let append = Request::Append { shard, attempt: 0, view: 0, seq: 1, record: b"\x00record" };
    assert_eq!(Request::decode(&request_bytes(&append)), Ok(append));
    assert_eq!(Request::decode(&[99, 0, 0, 0, 0, 0, 0, 0]), Err(DecodeError::Tag(99)));
}

#[test]
fn replies_come_back_and_shorter_ones_are_refused() {
    let (shard, client, lsn, position) = (ShardId(7), ClientId(1 << 100), Lsn(3), Position(4));
    let mut replies = vec![
        Reply::Acknowledged { shard, seq: 1, position },
        Reply::Deliver { stream: 1, lsn, position, view: 2, speculative: true, client, seq: 5, record: b"" },
        Reply::NoOps { stream: 1, lsn, position, count: 6, view: 7 },
        Reply::Decreed { stream: 1, lsn, position, count: 6, view: 7 },
        Reply::Unavailable { stream: 1, lsn, position, count: 6, view: 7 },
        Reply::Trimmed { stream: 1, head: position },
        Reply::NotHere { stream: 1 },
        Reply::Crowded { stream: 1, subscriptions_max: 2 },
        Reply::Closing,
        Reply::Order { index: 8, entry: b"" },
        Reply::Snapshot { index: 1, base: position, entries: 2, view: 3 },
        Reply::TailIs { token: 1, position, index: 5 },
    ];
    replies.extend(OUTCOMES.map(|outcome| Reply::ChangeIs { token: 8, outcome }));
    for result in [
        ReadResult::Record(b""),
        ReadResult::NoOp,
        ReadResult::Elsewhere(shard),
        ReadResult::Trimmed(position),
        ReadResult::Unavailable,
    ] {
        replies.push(Reply::ReadIs { token: 1, result });
    }
    for outcome in [Outcome::Bound(position), Outcome::NotInLog, Outcome::Waiting, Outcome::Forgotten, Outcome::NotHere]
    {
        replies.push(Reply::OutcomeIs { token: 1, outcome, next_seq: 9 });
    }
    for refusal in [
        Refusal::Gap { expected: 3 },
        Refusal::UnknownSession,
        Refusal::Forgotten,
        Refusal::TooLarge { limit_bytes: 9 },
        Refusal::RegionFull { region_bytes: 10 },
        Refusal::DiskFull,
        Refusal::NotHere,
        Refusal::Failed,
        Refusal::Closed { instead: shard },
        Refusal::OldView { view: 3 },
        Refusal::Forbidden,
    ] {
        replies.push(Reply::Refused { shard, attempt: 6, seq: 2, refusal });
    }
    for reply in replies {
        let bytes = reply_bytes(&reply);
        assert_eq!(Reply::decode(&bytes), Ok(reply));
        for end in 0..bytes.len() {
            assert!(Reply::decode(&bytes[..end]).is_err(), "{end} bytes of {reply:?} were taken");
        }
    }
}

proptest! {
    /// Whatever arrives: an error or a message that encodes to the same bytes, never a panic.
    #[test]
    fn any_bytes_are_refused_or_mean_exactly_one_message(mut bytes in prop::collection::vec(any::<u8>(), 0..120)) {
        // Most random tags are unknown: make known ones likely.
        if bytes.len() > 2 {
            bytes[0] %= 18;
            bytes[1] = 0;
        }
        if let Ok(request) = Request::decode(&bytes) {
            let again = request_bytes(&request);
            prop_assert_eq!(Request::decode(&again), Ok(request));
        }
        if let Ok(reply) = Reply::decode(&bytes) {
            let again = reply_bytes(&reply);
            prop_assert_eq!(Reply::decode(&again), Ok(reply));
        }
        let _ = ClusterMap::decode(&bytes);
        let _ = crate::wire::node::NodeMessage::decode(&bytes);
        let _ = crate::wire::order::OrderEntry::decode(&bytes);
    }
}
