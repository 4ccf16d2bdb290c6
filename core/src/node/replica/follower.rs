//! The part of a replica that follows: checks what the primary writes, and keeps what it would need to lead.

use antelog_protocol::ledger::Ledger;
use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::shard::{Inheritance, Shard, ShardConfig};
use antelog_protocol::wire::entry::EntryKind;
use antelog_protocol::wire::node::Place;
use antelog_protocol::{ClientId, Lsn};

use super::disk::Past;
use crate::log::{LogOptions, LogWriter, Verifier};

/// Entries verified in one cycle, and entries found to be bound.
const ENTRIES_PER_CYCLE: usize = 64;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Follower {
    pub(super) ledger: Ledger,
    pub(super) log: Verifier,
    /// Below this place everything is bound, and known.
    bound: Place,
    /// Below this slot everything is bound and stands here, known or not.
    sure: Lsn,
    past: Past,
    /// The table was taken over from a primary that had appended this far: a log that ends before is not its.
    table_end: Lsn,
    /// The log ends in no-ops that go on up to this slot, where it was cut off.
    no_ops_until: Lsn,
    config: ShardConfig,
}

impl Follower {
    /// A follower of the log that begins where `log` does, of which the `past` is not in memory.
    pub(super) fn new(config: &ShardConfig, ledger: Ledger, log: Verifier, past: Past) -> Follower {
        let bound = log.first_place().unwrap_or(log.place());
        let (sure, table_end, no_ops_until) = (Lsn(0), Lsn(0), Lsn(0));
        Follower { ledger, log, bound, sure, past, table_end, no_ops_until, config: config.clone() }
    }

    /// Who led until now, and gave back what was not bound: all that is left is.
    pub(super) fn of_bound(config: &ShardConfig, ledger: Ledger, log: Verifier, past: Past) -> Follower {
        let mut follower = Follower::new(config, ledger, log, past);
        follower.sure = follower.log.lsn();
        follower
    }

    /// To be called before the ledger hears of another primary: what is bound by then stands in this log, if it is true.
    pub(super) fn note_bound(&mut self, log_epoch: u32) {
        if self.is_true(log_epoch) {
            let committed = self.ledger.committed_lsn(self.log.shard());
            self.sure = self.sure.max(committed.min(self.log.lsn()));
        }
    }

    /// Whether what is bound now is what this log holds, which is a copy of that of the primary of `log_epoch`: of slots
    /// bound under a later primary it may hold others.
    pub(super) fn is_true(&self, log_epoch: u32) -> bool {
        self.ledger.membership(self.log.shard()).is_none_or(|m| m.epoch <= log_epoch)
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
            self.past.learn(&header);
            self.bound = behind;
        }
        ENTRIES_PER_CYCLE
    }

    /// The primary says where its log is to be followed from. Where that is a place of what is bound here, what lies before
    /// it stays: it may be the place that another replica was told of, or this one some time ago. Returns whether the log is
    /// begun anew.
    pub(super) fn start(&mut self, place: Place) -> bool {
        let found = self.log.place_before(place.lsn).filter(|found| Place { epoch: found.epoch, ..place } == *found);
        let own = found.filter(|found| found.at_bytes <= self.bound.at_bytes);
        match own {
            Some(own) => {
                self.log.rewind(own);
                self.bound = own;
            }
            None => {
                // What is not bound may be void, and must not be found behind what the primary writes.
                if self.bound.at_bytes >= self.log.head() {
                    self.log.rewind(self.bound);
                }
                self.log.restart(place);
                self.bound = place;
            }
        }
        self.sure = self.sure.min(self.bound.lsn);
        let has_gaps = own.is_some() && self.past.has_gaps;
        self.forget_sessions();
        self.past.has_gaps = has_gaps;
        own.is_none()
    }

    fn forget_sessions(&mut self) {
        self.past = Past { has_gaps: self.past.has_gaps, ..Past::new(&self.config) };
        self.table_end = Lsn(0);
        self.no_ops_until = Lsn(0);
    }

    /// Records from a slot on are lost: whose last was one of them is learned again, as far as memory goes back.
    fn forget_sessions_from(&mut self, end: Lsn) {
        let known: Vec<_> = self.past.duplicates.sessions().collect();
        let is_whole = self.log.first_place().is_none_or(|first| first.lsn == Lsn(0));
        self.forget_sessions();
        for (client, next_seq, last_lsn) in known {
            if last_lsn < end {
                self.past.duplicates.restore(client, next_seq, last_lsn);
            } else {
                self.past.has_gaps |= !is_whole;
            }
        }
    }

    /// The sessions that are known.
    pub(super) fn sessions(&self) -> impl Iterator<Item = (ClientId, u64, Lsn)> + '_ {
        self.past.duplicates.sessions()
    }

    /// A session of the primary's table.
    pub(super) fn session(&mut self, client: ClientId, next_seq: u64, last_lsn: Lsn) {
        self.past.duplicates.restore(client, next_seq, last_lsn);
        self.table_end = self.table_end.max(last_lsn.plus(1));
    }

    /// A new primary's log ends at `end`: this one does so too, or before. Returns where.
    pub(super) fn conform(&mut self, end: Place) -> Place {
        if self.log.at() > end.at_bytes {
            self.log.rewind(end);
            self.sure = self.sure.min(end.lsn);
        }
        if self.bound.at_bytes > self.log.at() || end.lsn < self.table_end {
            // The table knows of records that are lost: it is made again of what there is.
            self.forget_sessions_from(end.lsn);
            self.bound = self.log.first_place().unwrap_or(self.log.place());
        }
        self.log.place()
    }

    /// Gives back all that is not bound, from this slot on, or not known to be. A log without the last bound slots says so
    /// by where it ends.
    pub(super) fn keep_below(&mut self, committed: Lsn, log_epoch: u32) {
        let committed = if self.is_true(log_epoch) { committed } else { committed.min(self.bound.lsn.max(self.sure)) };
        let Some(place) = self.log.place_before(committed) else { return };
        let cut = self.log.entry(place).filter(|(h, behind)| h.kind == EntryKind::NoOps && behind.lsn > committed);
        // Who hears of the loss again has given back its part of a run already.
        let before = if place.lsn == self.log.lsn() { self.no_ops_until } else { Lsn(0) };
        self.conform(place);
        self.no_ops_until = if cut.is_some() { committed } else { before };
    }

    /// A ledger made from a snapshot takes the place of this one's. If the shard was lost meanwhile, what is void is
    /// given back of a log from before.
    pub(super) fn follow_anew(&mut self, ledger: Ledger, is_past: bool, log_epoch: u32) {
        self.note_bound(log_epoch);
        let known = std::mem::replace(&mut self.ledger, ledger);
        let shard = self.log.shard();
        let lost = self.ledger.failed().find(|f| f.shard == shard && f.view > known.view()).map(|failed| failed.lsn);
        self.ledger.continue_from(known);
        if let Some(lsn) = lost.filter(|_| is_past) {
            self.keep_below(lsn, log_epoch);
        }
    }

    /// Becomes the primary: its shard, not begun yet, and its log. Readers find nothing before `drained`, which the last
    /// primary was told may be overwritten.
    pub(super) fn take_over(
        mut self,
        config: ShardConfig,
        options: LogOptions,
        drained: Place,
        on_disk: bool,
    ) -> (Shard, LogWriter) {
        self.log.drop_before(drained);
        let committed = self.ledger.committed_lsn(self.log.shard());
        let is_cut = self.no_ops_until >= committed;
        if !on_disk && self.log.lsn() < committed && !is_cut {
            // Only a shard that was lost comes back without bound slots: they stay missing. Memory keeps nothing before
            // them.
            let end = Place { lsn: committed, ..self.log.place() };
            self.log.restart(end);
            self.bound = end;
        }
        let (from, end) = (self.bound.lsn, self.log.lsn().max(committed));
        let Past { records, records_lsn, .. } = self.past;
        let (mut records, mut records_lsn) = (records, records_lsn);
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
        assert!(
            place.at_bytes == self.log.at(),
            "what is not known to be bound was overwritten from offset {}",
            place.at_bytes
        );
        let epoch = config.epoch;
        let Follower { ledger, past, log, .. } = self;
        let duplicates = past.duplicates;
        let mut shard = Shard::take_over(config, Inheritance { ledger, duplicates, from, end, records_lsn, records });
        for (lsn, client, seq) in tail {
            shard.inherit(lsn, client, seq);
        }
        let mut log = LogWriter::take_over(log, epoch, options);
        while log.next_lsn() < end {
            let count = u32::try_from(end.0 - log.next_lsn().0).unwrap_or(u32::MAX);
            if is_cut { log.no_ops(count) } else { log.lost(count) }
        }
        (shard, log)
    }

    /// Whether slots are missing in the log, or before it.
    pub(super) fn has_gaps(&self) -> bool {
        let committed = self.ledger.committed_lsn(self.log.shard());
        self.past.has_gaps || (self.log.lsn() < committed && self.no_ops_until < committed)
    }
}

#[cfg(test)]
mod tests {
    use antelog_protocol::ledger::grant_head;
    use antelog_protocol::wire::order::{
        ORDER_ENTRY_BYTES_MAX, OrderEntry, ShardChangeHead, encode_cut, encode_grant, encode_shard_change,
        encode_view_change,
    };
    use antelog_protocol::{Beat, CutPoint, Member, Position, ReplicaId, ShardId, WindowMode};

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
        let (log, _) = log.give_up(Lsn(10));
        let mut follower = Follower::new(&config, Ledger::new(4), log, Past::new(&config));
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

    #[test]
    fn a_run_of_no_ops_that_was_cut_off_is_remembered_however_often_the_loss_is_heard_of() {
        let region = Region::new(REGION_BYTES_MIN).unwrap();
        let options = LogOptions { retention: Retention::Refuse, record_bytes_max: 64 };
        let mut log = LogWriter::new(region, ShardId(0), 1, options);
        (0..4).for_each(|seq| log.record(ClientId(7), seq, b"record"));
        log.no_ops(6);
        let mut follower = follower();
        follower.log = log.give_up(Lsn(10)).0;
        follower.bound = follower.log.place();
        for _ in 0..2 {
            follower.keep_below(Lsn(8), 1);
            assert_eq!((follower.log.lsn(), follower.no_ops_until), (Lsn(4), Lsn(8)));
        }
    }

    #[test]
    fn whose_last_record_is_kept_is_known_after_a_cut_and_whose_is_not_is_learned_again() {
        let mut follower = follower();
        follower.log.drop_before(follower.log.place_before(Lsn(4)).unwrap());
        follower.session(ClientId(8), 3, Lsn(2));
        follower.session(ClientId(9), 5, Lsn(9));
        follower.conform(follower.log.place_before(Lsn(8)).unwrap());
        assert_eq!(follower.sessions().collect::<Vec<_>>(), [(ClientId(8), 3, Lsn(2))]);
        // Records of the other's may lie before what memory has.
        assert!(follower.past.has_gaps);
        assert_eq!(follower.bound().lsn, Lsn(4));
    }

    fn tell(ledger: &mut Ledger, write: impl Fn(&mut [u8]) -> usize) {
        let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
        let len = write(&mut buffer);
        let index = ledger.applied_index() + 1;
        ledger.apply(index, &OrderEntry::decode(&buffer[..len]).unwrap()).unwrap();
    }

    fn lead(ledger: &mut Ledger, change: u32, epoch: u32, number: u16) {
        let head = ShardChangeHead { view: 0, shard: ShardId(0), change, epoch, primary: number, since_failure: 0 };
        tell(ledger, |buffer| encode_shard_change(buffer, head, &[ReplicaId { number, incarnation: 5 }]));
    }

    /// Ten slots are granted and eight of them bound, in epoch 1; then another leads, and then the shard is lost.
    #[test]
    fn whoever_hears_of_another_primary_and_of_a_loss_at_once_keeps_what_was_bound() {
        let mut follower = follower();
        let (quota, first_lsn, open) = (1, Lsn(0), true);
        let head = grant_head(0, WindowMode::Fixed, 0, 10, Position(0));
        let ledger = &mut follower.ledger;
        lead(ledger, 1, 1, 1);
        tell(ledger, |b| encode_grant(b, head, &[Member { shard: ShardId(0), quota, first_lsn, open }]));
        tell(ledger, |b| encode_cut(b, 0, CutPoint { window: 0, cut: 8, prefix: 0 }));
        // Nothing of this is known yet: sessions are learned a few entries at a time.
        follower.bound = follower.log.first_place().unwrap();
        follower.note_bound(1);
        lead(&mut follower.ledger, 2, 2, 0);
        follower.note_bound(1);
        tell(&mut follower.ledger, |b| encode_view_change(b, 1, ShardId(0)));
        let committed = follower.ledger.committed_lsn(ShardId(0));
        follower.keep_below(committed, 1);
        assert_eq!((committed, follower.log.lsn()), (Lsn(8), Lsn(8)));
        // What is bound under the other primary is not what this log holds.
        let mut follower = self::follower();
        follower.bound = follower.log.first_place().unwrap();
        lead(&mut follower.ledger, 1, 2, 0);
        follower.note_bound(1);
        follower.keep_below(Lsn(8), 1);
        assert_eq!(follower.log.lsn(), Lsn(0));
    }
}
