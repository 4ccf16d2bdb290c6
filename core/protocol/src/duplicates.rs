//! Duplicate suppression: a retry returns the original slot, never a second one (I3).
//!
//! A session's `seq` is consecutive per shard, so all that is needed per session is the next `seq` and the slots of
//! the last few. What is forgotten depends on log contents only — the number of sessions and of records since — so that
//! every replica that replays the same log forgets the same. `PROTOCOL.md` §4.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use crate::mutant::{Mutant, planted};
use crate::types::{ClientId, Lsn, Refusal};

/// A slot that was not told when the session was taken over.
const UNKNOWN: Lsn = Lsn(u64::MAX);

#[derive(Debug)]
struct Session {
    next_seq: u64,
    last_lsn: Lsn,
    /// Slots of the last records, indexed by `seq % len`.
    slots: Box<[Lsn]>,
}

/// What the table says about an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The next record of its session: append it.
    New,
    /// A retry; the record has this slot.
    Retry(Lsn),
    /// Neither: refuse it.
    Refuse(Refusal),
}

/// The table of one shard.
#[derive(Debug)]
pub struct Duplicates {
    /// Where each session is in `table`.
    index: BTreeMap<ClientId, usize>,
    table: Vec<(ClientId, Session)>,
    /// Where the session that wrote last is: most likely the next one to write.
    last: usize,
    sessions_max: usize,
    remembered: usize,
}

impl Duplicates {
    /// A table of at most `sessions_max` sessions that remembers the last `remembered` records of each.
    pub fn new(sessions_max: usize, remembered: usize) -> Duplicates {
        assert!(sessions_max > 0 && remembered > 0, "a duplicate table needs room");
        Duplicates { index: BTreeMap::new(), table: Vec::new(), last: 0, sessions_max, remembered }
    }

    #[inline]
    fn find(&self, client: ClientId) -> Option<usize> {
        match self.table.get(self.last) {
            Some((id, _)) if *id == client => Some(self.last),
            _ => self.index.get(&client).copied(),
        }
    }

    /// The sessions: their next number and the slot of their last record.
    pub fn sessions(&self) -> impl Iterator<Item = (ClientId, u64, Lsn)> + '_ {
        self.table.iter().map(|(client, s)| (*client, s.next_seq, s.last_lsn))
    }

    /// The number expected of a session next; `None` when it is not known.
    pub fn next_seq(&self, client: ClientId) -> Option<u64> {
        self.find(client).map(|at| self.table[at].1.next_seq)
    }

    /// Whether sessions may have been forgotten.
    pub fn is_full(&self) -> bool {
        self.table.len() == self.sessions_max
    }

    /// Takes a session over from another replica's table. Where its records are is not known until they are
    /// [`replay`](Self::replay)ed; retries of the others are refused.
    pub fn restore(&mut self, client: ClientId, next_seq: u64, last_lsn: Lsn) {
        if self.find(client).is_none() {
            let slots = vec![UNKNOWN; self.remembered].into_boxed_slice();
            self.insert(client, Session { next_seq, last_lsn, slots });
        }
    }

    /// As [`record`](Self::record), for a record that the table may know of already, and of sessions that began before the
    /// log that is replayed does.
    pub fn replay(&mut self, client: ClientId, seq: u64, lsn: Lsn) {
        let Some(at) = self.find(client) else {
            let slots = vec![UNKNOWN; self.remembered].into_boxed_slice();
            self.insert(client, Session { next_seq: seq, last_lsn: lsn, slots });
            return self.replay(client, seq, lsn);
        };
        let session = &mut self.table[at].1;
        session.slots[(seq % self.remembered as u64) as usize] = lsn;
        session.next_seq = session.next_seq.max(seq + 1);
        session.last_lsn = session.last_lsn.max(lsn);
    }

    /// Judges an append without changing anything.
    pub fn judge(&self, client: ClientId, seq: u64) -> Verdict {
        let Some(at) = self.find(client) else {
            let new = seq == 0 || planted(Mutant::ForgetSessions);
            return if new { Verdict::New } else { Verdict::Refuse(Refusal::UnknownSession) };
        };
        let session = &self.table[at].1;
        let over_a_gap = seq > session.next_seq && planted(Mutant::AppendOverAGap);
        if seq == session.next_seq || planted(Mutant::AppendFirstRetries) && seq == 0 || over_a_gap {
            Verdict::New
        } else if seq > session.next_seq {
            Verdict::Refuse(Refusal::Gap { expected: session.next_seq })
        } else if session.next_seq - seq > self.remembered as u64 {
            Verdict::Refuse(Refusal::Forgotten)
        } else {
            match session.slots[(seq % self.remembered as u64) as usize] {
                UNKNOWN => Verdict::Refuse(Refusal::Forgotten),
                lsn => Verdict::Retry(lsn),
            }
        }
    }

    /// Records that `(client, seq)` has slot `lsn`. Allocates only for a session's first record.
    pub fn record(&mut self, client: ClientId, seq: u64, lsn: Lsn) {
        if let Some(at) = self.find(client) {
            self.last = at;
            let session = &mut self.table[at].1;
            let again = planted(Mutant::AppendFirstRetries) && seq < session.next_seq;
            let follows = session.next_seq == seq || again || planted(Mutant::AppendOverAGap);
            invariant!(I3, follows, "session {client} wrote {seq} after {}", session.next_seq);
            invariant!(
                I7,
                session.last_lsn < lsn,
                "session {client} went back from slot {} to {lsn}",
                session.last_lsn
            );
            if !again {
                session.next_seq = seq + 1;
            }
            session.last_lsn = lsn;
            session.slots[(seq % self.remembered as u64) as usize] = lsn;
            return;
        }
        invariant!(I3, seq == 0 || planted(Mutant::ForgetSessions), "an unknown session {client} began at {seq}");
        let mut slots = vec![Lsn(0); self.remembered].into_boxed_slice();
        slots[(seq % self.remembered as u64) as usize] = lsn;
        self.insert(client, Session { next_seq: seq + 1, last_lsn: lsn, slots });
    }

    /// A session more; the one idle longest in log order makes room.
    fn insert(&mut self, client: ClientId, session: Session) {
        let session = (client, session);
        let full = self.table.len() == self.sessions_max;
        let idle = self.table.iter_mut().enumerate().min_by_key(|(_, (_, s))| s.last_lsn).filter(|_| full);
        self.last = match idle {
            Some((at, place)) => {
                self.index.remove(&place.0);
                *place = session;
                at
            }
            None => {
                self.table.push(session);
                self.table.len() - 1
            }
        };
        self.index.insert(client, self.last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_return_their_slot_and_everything_else_is_refused() {
        let mut table = Duplicates::new(2, 3);
        let (a, b, c) = (ClientId(1), ClientId(2), ClientId(3));
        assert_eq!(table.judge(a, 1), Verdict::Refuse(Refusal::UnknownSession));
        for seq in 0..5 {
            assert_eq!(table.judge(a, seq), Verdict::New);
            table.record(a, seq, Lsn(10 + seq));
        }
        assert_eq!(table.judge(a, 4), Verdict::Retry(Lsn(14)));
        assert_eq!(table.judge(a, 2), Verdict::Retry(Lsn(12)));
        assert_eq!(table.judge(a, 1), Verdict::Refuse(Refusal::Forgotten));
        assert_eq!(table.judge(a, 6), Verdict::Refuse(Refusal::Gap { expected: 5 }));
        table.record(b, 0, Lsn(20));
        table.record(c, 0, Lsn(21));
        let mut late = Duplicates::new(2, 3);
        for (client, next_seq, last_lsn) in table.sessions() {
            late.restore(client, next_seq, last_lsn);
        }
        assert_eq!(late.judge(b, 0), Verdict::Refuse(Refusal::Forgotten), "it is not known where");
        assert_eq!(late.judge(b, 1), Verdict::New);
        late.replay(b, 0, Lsn(20));
        late.replay(b, 1, Lsn(22));
        assert_eq!((late.judge(b, 0), late.judge(b, 1)), (Verdict::Retry(Lsn(20)), Verdict::Retry(Lsn(22))));
        // Room for two: the session idle longest in log order went.
        assert_eq!(table.judge(a, 5), Verdict::Refuse(Refusal::UnknownSession));
        assert_eq!(table.judge(b, 0), Verdict::Retry(Lsn(20)));
    }
}
