//! How a replica becomes the primary: with a log that it has followed, and the follower's state that goes with it.
//!
//! Everything that was ever delivered is in that log, and positions follow from the order log alone, so the shard goes on
//! where it stands. `PROTOCOL.md` §6.

use super::{Pending, Shard, ShardConfig, ShardOut};
use crate::duplicates::{Duplicates, Verdict};
use crate::ledger::Ledger;
use crate::types::{ClientId, Lsn, Outcome, Refusal, WindowMode};

/// What a replica brings along.
#[derive(Debug)]
pub struct Inheritance {
    /// Its state of the order log.
    pub ledger: Ledger,
    /// The sessions of all records below `from`.
    pub duplicates: Duplicates,
    /// What follows in the log is told with [`Shard::inherit`].
    pub from: Lsn,
    /// End of the log.
    pub end: Lsn,
    /// First slot after the last record.
    pub records_lsn: Lsn,
    /// Records in the log, ever.
    pub records: u64,
}

impl Shard {
    /// The shard of a new primary. Its further records are told with [`inherit`](Self::inherit), then
    /// [`begin`](Self::begin) is called.
    pub fn take_over(config: ShardConfig, inheritance: Inheritance) -> Shard {
        let Inheritance { ledger, duplicates, from, end, records_lsn, records } = inheritance;
        let shard = config.shard;
        let mut new = Shard::with(config, ledger, duplicates);
        new.committed = new.ledger.committed_lsn(shard);
        invariant!(I4, end >= new.committed, "shard {shard}: bound slots below {} are not in the log", new.committed);
        assert!(from <= end, "a log that ends at slot {end} has no slot {from}");
        new.appended = end;
        new.durable = new.committed;
        new.inherited = end;
        new.placed = [new.committed; crate::limits::REPLICAS_MAX];
        new.stats.records = records;
        new.reported.records_lsn = records_lsn;
        new
    }

    /// A record of the log that sessions are not known of yet, in log order.
    pub fn inherit(&mut self, lsn: Lsn, client: ClientId, seq: u64) {
        self.duplicates.replay(client, seq, lsn);
        if lsn >= self.committed {
            self.pending.push_back(Pending { lsn, client, seq });
        }
    }

    /// Serves from now on. The placements of these replicas count; see [`set_counted`](Self::set_counted).
    pub fn begin(&mut self, now_ns: u64, counted: u8, out: &mut impl ShardOut) {
        let shard = self.config.shard;
        self.counted = counted;
        self.fixed = self.ledger.mode() == Some(WindowMode::Fixed);
        self.granted = self.ledger.granted_lsn(shard).max(self.committed);
        self.fixed_end = self.ledger.fixed_end(shard);
        self.closed = !self.ledger.open(shard).unwrap_or(!self.config.standby);
        (self.appended_at_ns, self.advanced_at_ns) = (now_ns, now_ns);
        self.find_cut();
        let starts = self.ledger.point_reached(shard, self.appended).and_then(|p| self.ledger.lsn_at(shard, p));
        if starts != Some(self.appended) && (self.fixed || self.cut_end.is_some()) {
            self.partial_since_ns = Some(now_ns);
        }
        // What is bound is reported by others' words; it must not be reported as less.
        self.reported.point = self.ledger.point_reached(shard, self.committed).unwrap_or_default();
        self.advance_durable(now_ns, out);
        self.report_if_reached(now_ns, out);
        self.fill_when_granted(now_ns, out);
        self.send_report(now_ns, out);
    }

    /// What is bound in a predecessor's log it has reported, because every member held it; they may not have said so again.
    pub(super) fn believe_predecessor(&mut self, committed: Lsn) {
        if committed <= self.inherited {
            self.durable = self.durable.max(committed);
        }
    }

    /// The order log is told anew as of a later entry, and what lies between is not told at all. Whoever is the primary
    /// still goes on: nobody else has written its log, and nothing of it is bound that it has not reported.
    pub fn follow_anew(&mut self, now_ns: u64, ledger: Ledger, out: &mut impl ShardOut) {
        let shard = self.config.shard;
        let committed = ledger.committed_lsn(shard);
        invariant!(I2, committed >= self.committed, "shard {shard}: bound slots went back");
        self.believe_predecessor(committed);
        invariant!(I11, committed <= self.durable, "shard {shard}: slot {committed} is bound but not durable");
        let older = core::mem::replace(&mut self.ledger, ledger);
        self.committed = committed;
        while let Some(Pending { lsn, client, seq }) = self.pending.front().copied().filter(|p| p.lsn < committed) {
            self.pending.pop_front();
            // Fixed windows said so beforehand; which cut of a free one took it, only what is left out.
            match self.ledger.position(shard, lsn).or_else(|| older.position(shard, lsn)) {
                Some(position) => out.acknowledge(client, seq, lsn, position),
                None => out.forget(client, seq),
            }
        }
        self.ledger.continue_from(older);
        self.on_granted(now_ns, out);
        self.send_report(now_ns, out);
    }

    /// What became of a session's append, and which number is expected of it next. `whole`: the log is kept from its first
    /// slot on. Where it is not, records may be missing that were bound, if the shard was ever lost; a table that is full
    /// may have forgotten the session.
    pub fn outcome(&self, client: ClientId, seq: u64, whole: bool) -> (Outcome, u64) {
        let known = self.duplicates.next_seq(client);
        let shard = self.config.shard;
        let exact = match known {
            Some(_) => whole || self.ledger.last_failure(shard).is_none(),
            None => whole && !self.duplicates.is_full(),
        };
        let outcome = match self.duplicates.judge(client, seq) {
            Verdict::Retry(lsn) if lsn < self.committed => {
                self.ledger.position(shard, lsn).map_or(Outcome::Forgotten, Outcome::Bound)
            }
            Verdict::Retry(_) => Outcome::Waiting,
            Verdict::New | Verdict::Refuse(Refusal::Gap { .. } | Refusal::UnknownSession) if exact => Outcome::NotInLog,
            Verdict::New | Verdict::Refuse(_) => Outcome::Forgotten,
        };
        (outcome, known.unwrap_or(0))
    }

    /// The state of the order log, of a primary that is one no more.
    pub fn into_ledger(self) -> Ledger {
        self.ledger
    }

    /// The sessions that a replica which joins has to know of: their next number and the slot of their last record.
    pub fn sessions(&self) -> impl Iterator<Item = (ClientId, u64, Lsn)> + '_ {
        self.duplicates.sessions()
    }
}
