//! Appends under way, and where those go that name no shard.
//!
//! Appends that name no shard go to the client's *own* shard, one at a time, so that they keep their order. When it takes no
//! appends any more, because it is leaving or stands by, they move to the shard that the refusal names: not before
//! everything of theirs is answered by the old one, and what it refused goes first, in its order. An append that names its
//! shard never moves.
//!
//! When the own shard is lost as a whole, appends go on with one that is not: those that were never sent, and those made
//! later. What was under way is unknown and never moves.

use std::collections::{BTreeMap, VecDeque};

use antelog_core::client::Record;
use antelog_protocol::{ClientId, Position, Refusal, ShardId};

use super::completion::{Permit, Promise};
use super::error::Error;

/// An append on its way.
#[derive(Debug)]
pub(super) struct Append {
    /// `None`: to the client's own shard.
    pub(super) shard: Option<ShardId>,
    pub(super) record: Record,
    pub(super) promise: Promise<Position>,
    pub(super) permit: Permit,
}

impl Append {
    pub(super) fn settle(self, result: Result<Position, Error>) {
        // The permit first: whoever waits for the result may append the next record at once.
        drop(self.permit);
        self.promise.keep(result);
    }
}

/// What was sent to one shard and is not answered.
#[derive(Debug, Default)]
struct Lane {
    /// In the order of their numbers.
    sent: VecDeque<(u64, Append)>,
    /// The shard refused one as closed, and named this one instead: what is behind that one is refused as a gap.
    instead: Option<ShardId>,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Appends {
    client: ClientId,
    lanes: BTreeMap<ShardId, Lane>,
    /// Appends that the session could not take yet, in order.
    waiting: BTreeMap<Option<ShardId>, VecDeque<Append>>,
    own: ShardId,
    /// Sent to the own shard without naming it, and not answered.
    own_sent: usize,
    /// The own shard is given up for this one.
    moving: Option<ShardId>,
    /// What it refused meanwhile, with their numbers.
    refused: Vec<(u64, Append)>,
}

impl Appends {
    pub(super) fn new(client: ClientId, own: ShardId) -> Appends {
        Appends {
            client,
            lanes: BTreeMap::new(),
            waiting: BTreeMap::new(),
            own,
            own_sent: 0,
            moving: None,
            refused: Vec::new(),
        }
    }

    /// Where an append to `shard` may be sent now, unless others wait in front of it.
    fn destination(&self, shard: Option<ShardId>) -> Option<ShardId> {
        shard.or(if self.moving.is_none() { Some(self.own) } else { None })
    }

    /// Sends an append with `send`, which gives it back when the session cannot take it, or keeps it until it can.
    pub(super) fn append(&mut self, append: Append, mut send: impl FnMut(ShardId, Append) -> Sent) {
        let key = append.shard;
        if let Some(queue) = self.waiting.get_mut(&key) {
            queue.push_back(append);
        } else if let Some(append) = self.try_send(append, &mut send) {
            self.waiting.entry(key).or_default().push_back(append);
        }
    }

    /// Sends what waits, as far as the session takes it.
    pub(super) fn send_waiting(&mut self, mut send: impl FnMut(ShardId, Append) -> Sent) {
        if self.waiting.is_empty() {
            return;
        }
        for (key, mut queue) in std::mem::take(&mut self.waiting) {
            while let Some(append) = queue.pop_front() {
                if let Some(append) = self.try_send(append, &mut send) {
                    queue.push_front(append);
                    self.waiting.insert(key, queue);
                    break;
                }
            }
        }
    }

    fn try_send(&mut self, append: Append, send: &mut impl FnMut(ShardId, Append) -> Sent) -> Option<Append> {
        let Some(shard) = self.destination(append.shard) else { return Some(append) };
        match send(shard, append) {
            Sent::As(seq, append) => {
                self.own_sent += usize::from(append.shard.is_none());
                self.lanes.entry(shard).or_default().sent.push_back((seq, append));
                None
            }
            Sent::NotYet(append) => Some(append),
            Sent::Instead(append, instead) if self.own_sent == 0 => {
                self.own = instead;
                self.try_send(append, send)
            }
            Sent::Instead(append, instead) => {
                self.moving.get_or_insert(instead);
                Some(append)
            }
            Sent::Never => None,
        }
    }

    /// Takes what was answered out of its lane.
    fn answered(&mut self, shard: ShardId, seq: u64) -> Option<Append> {
        let sent = &mut self.lanes.get_mut(&shard)?.sent;
        let at = sent.iter().position(|(number, _)| *number == seq)?;
        let (_, append) = sent.remove(at)?;
        self.own_sent -= usize::from(append.shard.is_none());
        Some(append)
    }

    pub(super) fn on_acknowledged(&mut self, shard: ShardId, seq: u64, position: Position) {
        if let Some(append) = self.answered(shard, seq) {
            append.settle(Ok(position));
        }
        self.after_answer(shard);
    }

    pub(super) fn on_refused(&mut self, shard: ShardId, seq: u64, refusal: Refusal) {
        let Some(append) = self.answered(shard, seq) else { return };
        let lane = self.lanes.entry(shard).or_default();
        let refusal = match (refusal, lane.instead) {
            (Refusal::Closed { instead }, _) => {
                lane.instead = Some(instead);
                refusal
            }
            // It follows one that was refused as closed, and is refused for the same reason.
            (Refusal::Gap { .. } | Refusal::UnknownSession, Some(instead)) => Refusal::Closed { instead },
            _ => refusal,
        };
        match refusal {
            Refusal::Closed { instead } if append.shard.is_none() => {
                self.moving.get_or_insert(instead);
                self.refused.push((seq, append));
            }
            // Never sent to a shard that is lost: the next attempt says where to.
            Refusal::Failed if append.shard.is_none() => {
                self.moving.get_or_insert(self.own);
                self.refused.push((seq, append));
            }
            Refusal::Failed => append.settle(Err(Error::ShardLost { shard })),
            _ => append.settle(Err(Error::Refused { shard, refusal })),
        }
        self.after_answer(shard);
    }

    pub(super) fn on_unknown(&mut self, shard: ShardId, seq: u64) {
        if let Some(append) = self.answered(shard, seq) {
            append.settle(Err(Error::Unknown { shard, client: self.client, seq }));
        }
        self.after_answer(shard);
    }

    fn after_answer(&mut self, shard: ShardId) {
        if let Some(lane) = self.lanes.get_mut(&shard)
            && lane.sent.is_empty()
        {
            lane.instead = None;
        }
        if self.own_sent == 0
            && let Some(instead) = self.moving.take()
        {
            self.own = instead;
            self.refused.sort_unstable_by_key(|(seq, _)| *seq);
            let queue = self.waiting.entry(None).or_default();
            for (_, append) in self.refused.drain(..).rev() {
                queue.push_front(append);
            }
        }
    }
}

/// What became of an append that was handed to the session.
pub(super) enum Sent {
    /// It was taken under this number.
    As(u64, Append),
    /// It cannot be taken now.
    NotYet(Append),
    /// The own shard is lost: this one takes it.
    Instead(Append, ShardId),
    /// It will never be taken; whoever waits for it knows.
    Never,
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::completion::{Outcome, Permits, promise};
    use super::*;

    /// A session that takes everything and numbers it; what was sent, as `shard #seq record`.
    #[derive(Default)]
    struct Fake {
        next: BTreeMap<ShardId, u64>,
        sent: Vec<String>,
        lost: Option<ShardId>,
    }

    impl Fake {
        fn send(&mut self, shard: ShardId, append: Append) -> Sent {
            if self.lost == Some(shard) {
                return Sent::Instead(append, ShardId(shard.0 + 1));
            }
            let next = self.next.entry(shard).or_default();
            self.sent.push(format!("{shard} #{next} {}", String::from_utf8_lossy(&append.record)));
            *next += 1;
            Sent::As(*next - 1, append)
        }
    }

    struct Rig {
        appends: Appends,
        fake: Fake,
        permits: Arc<Permits>,
    }

    impl Rig {
        fn new() -> Rig {
            Rig { appends: Appends::new(ClientId(7), ShardId(0)), fake: Fake::default(), permits: Permits::new(100) }
        }

        fn append(&mut self, shard: Option<u16>, record: &str) -> Outcome<Position> {
            let (promise, outcome) = promise();
            let permit = Permits::take(&self.permits);
            let append = Append { shard: shard.map(ShardId), record: record.as_bytes().into(), promise, permit };
            self.appends.append(append, |shard, append| self.fake.send(shard, append));
            outcome
        }

        fn refuse(&mut self, shard: u16, seq: u64, refusal: Refusal) {
            self.appends.on_refused(ShardId(shard), seq, refusal);
        }

        fn acknowledge(&mut self, shard: u16, seq: u64, position: u64) {
            self.appends.on_acknowledged(ShardId(shard), seq, Position(position));
        }

        /// What was sent since the last call.
        fn sent(&mut self) -> Vec<String> {
            self.appends.send_waiting(|shard, append| self.fake.send(shard, append));
            std::mem::take(&mut self.fake.sent)
        }
    }

    const CLOSED: Refusal = Refusal::Closed { instead: ShardId(2) };

    #[test]
    fn refused_records_move_in_their_order_before_anything_new_and_only_when_all_are_answered() {
        let mut rig = Rig::new();
        let outcomes: Vec<_> = ["a", "b", "c"].map(|r| rig.append(None, r)).into();
        assert_eq!(rig.sent(), ["0 #0 a", "0 #1 b", "0 #2 c"]);
        rig.refuse(0, 1, CLOSED);
        let last = rig.append(None, "d");
        assert!(rig.sent().is_empty(), "a and c are not answered");
        rig.refuse(0, 2, Refusal::Gap { expected: 1 });
        assert!(rig.sent().is_empty(), "a is not answered");
        rig.acknowledge(0, 0, 7);
        assert_eq!(rig.sent(), ["2 #0 b", "2 #1 c", "2 #2 d"]);
        for seq in 0..3 {
            rig.acknowledge(2, seq, 10 + seq);
        }
        let positions: Vec<_> = outcomes.iter().map(|o| o.try_take().unwrap().unwrap().0).collect();
        assert_eq!(positions, [7, 10, 11]);
        assert_eq!(last.try_take(), Some(Ok(Position(12))));
        let stays = rig.append(None, "e");
        assert_eq!(rig.sent(), ["2 #3 e"]);
        drop(stays);
    }

    #[test]
    fn a_new_session_that_is_refused_from_its_first_record_on_moves_too() {
        let mut rig = Rig::new();
        let _outcomes = ["a", "b"].map(|r| rig.append(None, r));
        rig.sent();
        rig.refuse(0, 0, CLOSED);
        rig.refuse(0, 1, Refusal::UnknownSession);
        assert_eq!(rig.sent(), ["2 #0 a", "2 #1 b"]);
        rig.refuse(2, 0, Refusal::Closed { instead: ShardId(1) });
        rig.refuse(2, 1, Refusal::UnknownSession);
        assert_eq!(rig.sent(), ["1 #0 a", "1 #1 b"]);
    }

    #[test]
    fn an_append_that_names_its_shard_is_refused_with_the_reason_even_behind_one_that_moves() {
        let mut rig = Rig::new();
        let own = rig.append(None, "own");
        let named = rig.append(Some(0), "named");
        rig.sent();
        rig.refuse(0, 0, CLOSED);
        assert_eq!(rig.sent(), ["2 #0 own"], "the other one is none of its business");
        rig.refuse(0, 1, Refusal::Gap { expected: 0 });
        assert_eq!(named.try_take(), Some(Err(Error::Refused { shard: ShardId(0), refusal: CLOSED })));
        assert_eq!(own.try_take(), None);
        // A later gap has another reason.
        let later = rig.append(Some(0), "later");
        rig.sent();
        let gap = Refusal::Gap { expected: 0 };
        rig.refuse(0, 2, gap);
        assert_eq!(later.try_take(), Some(Err(Error::Refused { shard: ShardId(0), refusal: gap })));
    }

    #[test]
    fn what_was_under_way_to_a_lost_shard_is_unknown_and_the_rest_goes_to_another() {
        let mut rig = Rig::new();
        let [first, second] = ["a", "b"].map(|r| rig.append(None, r));
        let named = rig.append(Some(0), "named");
        rig.sent();
        rig.fake.lost = Some(ShardId(0));
        let later = rig.append(None, "c");
        assert!(rig.sent().is_empty(), "not before the others are answered");
        rig.appends.on_unknown(ShardId(0), 0);
        let unknown = Error::Unknown { shard: ShardId(0), client: ClientId(7), seq: 0 };
        assert_eq!(first.try_take(), Some(Err(unknown)));
        rig.refuse(0, 1, Refusal::Failed);
        rig.refuse(0, 2, Refusal::Failed);
        assert_eq!(named.try_take(), Some(Err(Error::ShardLost { shard: ShardId(0) })));
        assert_eq!(rig.sent(), ["1 #0 b", "1 #1 c"]);
        rig.acknowledge(1, 0, 9);
        assert_eq!((second.try_take(), later.try_take()), (Some(Ok(Position(9))), None));
    }

    #[test]
    fn other_refusals_are_reported_and_nothing_moves() {
        let mut rig = Rig::new();
        let full = rig.append(None, "a");
        rig.sent();
        let refusal = Refusal::RegionFull { region_bytes: 1 };
        rig.refuse(0, 0, refusal);
        assert_eq!(full.try_take(), Some(Err(Error::Refused { shard: ShardId(0), refusal })));
        let _next = rig.append(None, "b");
        assert_eq!(rig.sent(), ["0 #1 b"]);
    }
}
