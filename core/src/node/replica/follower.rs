//! The part of a replica that follows: checks what the primary writes, and keeps what it would need to lead.

use antelog_protocol::duplicates::Duplicates;
use antelog_protocol::ledger::Ledger;
use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::shard::{Inheritance, Shard, ShardConfig};
use antelog_protocol::wire::entry::EntryKind;
use antelog_protocol::wire::node::Place;
use antelog_protocol::{ClientId, Lsn};

use crate::log::{LogOptions, LogWriter, Verifier};

/// Entries verified in one cycle, and entries found to be bound.
const ENTRIES_PER_CYCLE: usize = 64;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Follower {
    pub(super) ledger: Ledger,
    pub(super) log: Verifier,
    /// Below this place everything is bound, and sessions are known.
    bound: Place,
    duplicates: Duplicates,
    /// The table was taken over from a primary that had appended this far: a log that ends before is not its.
    table_end: Lsn,
    /// The log ends in no-ops that go on up to this slot, where it was cut off.
    no_ops_until: Lsn,
    records: u64,
    records_lsn: Lsn,
    sessions_max: usize,
    remembered: usize,
}

impl Follower {
    /// A follower of the log that begins where `log` does.
    pub(super) fn new(config: &ShardConfig, ledger: Ledger, log: Verifier) -> Follower {
        let (sessions_max, remembered) = (config.sessions_max, config.session_remembered);
        let bound = log.first_place().unwrap_or(log.place());
        Follower {
            ledger,
            log,
            bound,
            duplicates: Duplicates::new(sessions_max, remembered),
            table_end: Lsn(0),
            no_ops_until: Lsn(0),
            records: 0,
            records_lsn: Lsn(0),
            sessions_max,
            remembered,
        }
    }

    /// Up to here the log holds nothing but what is bound.
    pub(super) fn bound(&self) -> Place {
        self.bound
    }

    /// Checks what the primary has written up to `end`. A bad entry ends the replica: it must not be promoted with it.
    pub(super) fn verify(&mut self, name: &str, end: u64) -> usize {
        let mut count = 0;
        let beyond = planted(Mutant::TakeShapesForEntries);
        while count < ENTRIES_PER_CYCLE && (self.log.at() < end || beyond) {
            match self.log.step(end) {
                Ok(true) => count += 1,
                Ok(false) => break,
                Err(error) => panic!("{name}: bad entry at slot {}: {error}", self.log.lsn()),
            }
        }
        count
    }

    /// Learns the sessions of what is bound meanwhile.
    pub(super) fn learn(&mut self) -> usize {
        let committed = self.ledger.committed_lsn(self.log.shard());
        for count in 0..ENTRIES_PER_CYCLE {
            let Some((header, behind)) = self.log.entry(self.bound).filter(|(_, p)| p.lsn <= committed) else {
                return count;
            };
            if header.kind == EntryKind::Record {
                self.duplicates.replay(header.client, header.seq, header.lsn);
                self.records += 1;
                self.records_lsn = behind.lsn;
            }
            self.bound = behind;
        }
        ENTRIES_PER_CYCLE
    }

    /// The primary says where its log is to be followed from. Where that is a place of what is bound here, what lies before
    /// it stays: it may be the place that another replica was told of, or this one some time ago.
    pub(super) fn start(&mut self, place: Place) {
        let found = self.log.place_before(place.lsn).filter(|found| Place { epoch: found.epoch, ..place } == *found);
        match found.filter(|found| found.at_bytes <= self.bound.at_bytes) {
            Some(own) => {
                self.log.rewind(own);
                self.bound = own;
            }
            None => {
                self.log.restart(place);
                self.bound = place;
            }
        }
        self.forget_sessions();
    }

    fn forget_sessions(&mut self) {
        self.duplicates = Duplicates::new(self.sessions_max, self.remembered);
        self.table_end = Lsn(0);
        self.no_ops_until = Lsn(0);
    }

    /// A session of the primary's table.
    pub(super) fn session(&mut self, client: ClientId, next_seq: u64, last_lsn: Lsn) {
        self.duplicates.restore(client, next_seq, last_lsn);
        self.table_end = self.table_end.max(last_lsn.plus(1));
    }

    /// A new primary's log ends at `end`: this one does so too, or before. Returns where.
    pub(super) fn conform(&mut self, end: Place) -> Place {
        if self.log.at() > end.at_bytes {
            self.log.rewind(end);
        }
        if self.bound.at_bytes > self.log.at() || end.lsn < self.table_end {
            // The table knows of records that are lost: it is made again of what there is.
            self.forget_sessions();
            self.bound = self.log.first_place().unwrap_or(self.log.place());
        }
        self.log.place()
    }

    /// Gives back all that is not bound. A log without the last bound slots says so by where it ends.
    pub(super) fn keep_what_is_bound(&mut self) {
        let committed = self.ledger.committed_lsn(self.log.shard());
        let Some(place) = self.log.place_before(committed) else { return };
        let cut = self.log.entry(place).filter(|(h, behind)| h.kind == EntryKind::NoOps && behind.lsn > committed);
        self.conform(place);
        self.no_ops_until = if cut.is_some() { committed } else { Lsn(0) };
    }

    /// Becomes the primary: its shard, not begun yet, and its log. Readers find nothing before `drained`, which the last
    /// primary was told may be overwritten.
    pub(super) fn take_over(mut self, config: ShardConfig, options: LogOptions, drained: Place) -> (Shard, LogWriter) {
        self.log.drop_before(drained);
        let committed = self.ledger.committed_lsn(self.log.shard());
        if self.log.lsn() < committed && self.no_ops_until < committed {
            // Only a shard that was lost comes back without bound slots: they stay missing.
            let end = Place { lsn: committed, ..self.log.place() };
            self.log.restart(end);
            self.bound = end;
        }
        let (from, end) = (self.bound.lsn, self.log.lsn().max(committed));
        let (mut records, mut records_lsn) = (self.records, self.records_lsn);
        let mut tail = Vec::new();
        let mut place = self.bound;
        while let Some((header, behind)) = self.log.entry(place) {
            if header.kind == EntryKind::Record {
                tail.push((header.lsn, header.client, header.seq));
                records += 1;
                records_lsn = behind.lsn;
            }
            place = behind;
        }
        let epoch = config.epoch;
        let Follower { ledger, duplicates, log, .. } = self;
        let mut shard = Shard::take_over(config, Inheritance { ledger, duplicates, from, end, records_lsn, records });
        for (lsn, client, seq) in tail {
            shard.inherit(lsn, client, seq);
        }
        let mut log = LogWriter::take_over(log, epoch, options);
        if log.next_lsn() < end {
            log.no_ops(u32::try_from(end.0 - log.next_lsn().0).unwrap_or(u32::MAX));
        }
        (shard, log)
    }
}

#[cfg(test)]
mod tests {
    use antelog_protocol::{Beat, ReplicaId, ShardId};

    use super::*;
    use crate::log::{REGION_BYTES_MIN, Retention};
    use crate::mem::Region;

    /// A follower whose log holds ten records, all of them bound.
    fn follower() -> Follower {
        let shard = ShardId(0);
        let region = Region::new(REGION_BYTES_MIN).unwrap();
        let options = LogOptions { retention: Retention::Refuse, record_bytes_max: 64 };
        let mut log = LogWriter::new(region, shard, 1, options);
        (0..10).for_each(|seq| log.record(ClientId(7), seq, b"record"));
        let config = ShardConfig {
            shard,
            replica: ReplicaId { number: 1, incarnation: 5 },
            epoch: 0,
            tick_ns: 1,
            tick_phase_ns: 0,
            beat: Beat::Target,
            fill_wait_ns: 0,
            pause_gaps: 8,
            standby: false,
            report_every_ns: 1,
            pending_max: 16,
            sessions_max: 4,
            session_remembered: 4,
            free_cuts_max: 4,
        };
        let mut follower = Follower::new(&config, Ledger::new(4), log.give_up(Lsn(10)));
        follower.bound = follower.log.place();
        follower
    }

    #[test]
    fn whoever_follows_from_a_place_of_its_own_keeps_what_lies_before() {
        let mut follower = follower();
        let (end, early) = (follower.bound(), follower.log.place_before(Lsn(4)).unwrap());
        // The primary was told of this place when its connection was made, another replica of a later one since.
        follower.start(Place { epoch: 3, ..early });
        assert_eq!((follower.log.head(), follower.log.at(), follower.bound()), (0, early.at_bytes, early));
        assert_eq!(follower.log.first_place().map(|p| p.lsn), Some(Lsn(0)));
        // A place that it does not have: nothing of its own log counts.
        follower.start(end);
        assert_eq!((follower.log.head(), follower.log.lsn()), (end.at_bytes, Lsn(10)));
    }
}
