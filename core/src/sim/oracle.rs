//! The oracle: checks what clients were told against what the order log and the logs' regions say.
//!
//! It shares no code with the protocol but plain types: it parses order entries and log entries itself and computes
//! positions itself. Quotas, modes and members may change from window to window; shards may refuse appends; replicas may die
//! and be born again, and shards may be lost as a whole and return.
//!
//! | checked | where |
//! |---|---|
//! | I1, I8, I16 what is delivered is what the log holds at that position | `subscription` |
//! | I2 confirmed prefixes have no gap and only grow | `subscription`, `order` |
//! | I3, I7 each record once, in the order of its session and shard | `Oracle::advance` |
//! | I4, I5, I6 acknowledgements: position, real-time order, not before the cut | `Oracle::acknowledged` |
//! | I4 what was bound or delivered stands on every later member too, as long as its primary keeps it | `truth` |
//! | I9, I10, I15 taken back is only what a lost shard had not bound; cuts are predetermined | `subscription`, `order` |
//! | I10 nobody calls a shard lost that has a member in good health | the run |
//! | I11 bound or delivered is only what every member's region holds at that moment | `truth` |
//! | I14 after a view change nothing of the lost shard is bound or acknowledged | `order`, `Oracle::acknowledged` |
//! | I12 grants continue each other; followers get the committed bytes without a gap | `order`, `tapped`, `landed` |
//! | I13 nothing is delivered without a committed grant, nor from a free window before its cut | `subscription` |
//! | chain: backups have verified what their primaries appended | the run |
//! | L3 an idle log writes nothing, L4 queues are bounded | the run |

mod answers;
mod members;
mod order;
mod subscription;
mod truth;

use std::collections::BTreeMap;
use std::fmt;

use antelog_protocol::Refusal;

pub(super) use self::members::{Life, Members};
use self::order::{Applied, OrderModel};
pub(super) use self::subscription::Subscribed;
use self::truth::{Recognise, ShardTruth};
use super::network::{Landed, Tapped};
use super::process::Birth;

/// A broken invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The invariant of PROTOCOL.md §8, or what else the run demands.
    pub id: &'static str,
    /// What was seen.
    pub what: String,
}

impl Violation {
    pub(super) fn new(id: &'static str, what: impl Into<String>) -> Violation {
        Violation { id, what: what.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.id, self.what)
    }
}

/// What became of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// No answer yet.
    Open,
    Acknowledged,
    Refused,
    /// Its session was dropped, or has forgotten it: it may or may not be in the log.
    Abandoned,
}

/// A record that somebody appended.
#[derive(Clone, Copy, Debug)]
struct Record {
    session: u32,
    shard: u16,
    seq: u64,
    len: u32,
    fate: Fate,
    /// Its slot, once it was read from the region.
    lsn: Option<u64>,
    /// The highest position acknowledged to anybody before it was appended.
    floor: Option<u64>,
    /// The answer was on its way when the connection was lost.
    answer_lost: bool,
}

/// One session's appends to one shard, in the order in which it called.
#[derive(Debug, Default)]
struct Lane {
    records: Vec<u32>,
    /// Those before were read from the log or passed by.
    read: usize,
}

/// What answers of the log to questions may say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer<'a> {
    Record(&'a [u8]),
    NoOp,
    Trimmed(u64),
    Unavailable,
}

/// Things that a run reached, as counts.
#[derive(Clone, Debug, Default)]
pub(super) struct Reached {
    pub(super) no_op_splits: u64,
    pub(super) retries_answered: u64,
    pub(super) trims: u64,
    pub(super) reads: u64,
    pub(super) tails: u64,
    pub(super) speculative: u64,
    pub(super) refused: u64,
    pub(super) region_full: u64,
    pub(super) closed: u64,
    pub(super) fails: u64,
    /// Bound positions that nobody could show, as often as it was said.
    pub(super) unavailable: u64,
    pub(super) unknown: u64,
    /// Deliveries of a shard that was lost before they were bound.
    pub(super) void_deliveries: u64,
}

/// See the module's text.
#[derive(Debug)]
pub struct Oracle {
    order: OrderModel,
    shards: Vec<ShardTruth>,
    records: Vec<Record>,
    lanes: BTreeMap<(u32, u16), Lane>,
    subscribed: Vec<Subscribed>,
    /// Highest position acknowledged to anybody.
    acknowledged_to: Option<u64>,
    open: u64,
    /// Next index of each follower's link.
    followed: BTreeMap<u32, u64>,
    /// Index after the last that landed at each follower.
    landed: BTreeMap<usize, u64>,
    violation: Option<Violation>,
    /// Positions may be forgotten: regions are recycled or cuts of free windows dropped.
    pub(super) may_trim: bool,
    /// Slots of retries may be forgotten though they are kept: whoever joins with a log of its own is given the sessions'
    /// numbers only.
    pub(super) may_forget: bool,
    /// Positions are bound as long as the log runs.
    pub(super) never_rests: bool,
    pub(super) reached: Reached,
    moved: Vec<u16>,
}

/// Session ids as the simulation gives them: unique, and with the session's number in them.
pub(super) fn client_id(session: u32) -> u128 {
    0xA17E_0000_0000_0000_0000_0000_0000_0000 | u128::from(session) << 32 | 0x51
}

/// The bytes of a record: they say which record it is, if there are enough of them.
pub(super) fn fill(record: u32, bytes: &mut [u8]) {
    for (at, chunk) in bytes.chunks_mut(8).enumerate() {
        let word = word(record, at as u64).to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

fn word(record: u32, at: u64) -> u64 {
    (u64::from(record) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(at.wrapping_mul(0xD1B5_4A32_D192_ED03))
}

fn matches(record: u32, len: u32, bytes: &[u8]) -> bool {
    bytes.len() == len as usize
        && bytes.chunks(8).enumerate().all(|(at, chunk)| chunk == &word(record, at as u64).to_le_bytes()[..chunk.len()])
}

impl Oracle {
    /// An oracle for so many shards, whose replicas it is told of as they are born.
    /// `succeed`: a replica that comes back keeps everything that it ever counted as durable.
    pub(super) fn new(shards: u16, may_trim: bool, succeed: bool) -> Oracle {
        Oracle {
            order: OrderModel::new(shards, succeed),
            shards: (0..shards).map(ShardTruth::new).collect(),
            records: Vec::new(),
            lanes: BTreeMap::new(),
            subscribed: Vec::new(),
            acknowledged_to: None,
            open: 0,
            followed: BTreeMap::new(),
            landed: BTreeMap::new(),
            violation: None,
            may_trim,
            may_forget: false,
            never_rests: false,
            reached: Reached::default(),
            moved: Vec::new(),
        }
    }

    pub(super) fn violation(&self) -> Option<&Violation> {
        self.violation.as_ref()
    }

    /// Keeps the first violation.
    pub(super) fn complain(&mut self, violation: Violation) {
        self.violation.get_or_insert(violation);
    }

    fn check(&mut self, result: Result<(), Violation>) {
        if let Err(violation) = result {
            self.complain(violation);
        }
    }

    /// First position that is not bound.
    pub(super) fn committed_position(&self) -> u64 {
        self.order.committed()
    }

    /// Entries of the order log.
    pub(super) fn order_entries(&self) -> u64 {
        self.order.hashes.len() as u64
    }

    pub(super) fn order_counts(&self) -> [(&'static str, u64); 19] {
        let order = &self.order;
        let changes = &order.members.counts;
        [
            ("backup dropped", changes.dropped),
            ("primary promoted", changes.promoted),
            ("replica joined", changes.joined),
            ("shard returned", changes.returned),
            ("members succeeded", changes.succeeded),
            ("reborn replica joined", changes.reborn),
            ("deposed primary came back", changes.came_back),
            ("promotion with appends outstanding", changes.promoted_busy),
            ("void order entry", changes.voids),
            ("view change", order.members.failures.len() as u64),
            ("grant", order.grants),
            ("prefix cut", order.prefix_cuts),
            ("free cut", order.free_cuts),
            ("change of mode", order.mode_changes),
            ("change of quotas", order.quota_changes),
            ("change of members", order.member_changes),
            ("shard closed", order.closings),
            ("shard opened again", order.returns),
            ("free window ended early", order.early_ends),
        ]
    }

    /// Laps of its region that the busiest shard has made.
    pub(super) fn laps(&self) -> u64 {
        self.shards.iter().map(ShardTruth::laps).max().unwrap_or(0)
    }

    /// Whether some shard was ever lost as a whole.
    pub(super) fn has_lost_shards(&self) -> bool {
        !self.order.members.failures.is_empty()
    }

    /// Appends without an answer.
    pub(super) fn open(&self) -> u64 {
        self.open
    }

    /// A position that holds an acknowledged record, for reading: any one at or after the `n`th.
    pub(super) fn some_position(&self, n: u64) -> Option<u64> {
        let count = self.records.len() as u64;
        let start = n.checked_rem(count)? as usize;
        let record = self.records[start..].iter().find(|r| r.fate == Fate::Acknowledged)?;
        self.order.position(record.shard, record.lsn?)
    }

    /// A replica begins a life; the follower of the order stream with its number begins anew.
    pub(super) fn born(&mut self, birth: Birth) {
        self.landed.remove(&birth.agent);
        self.shards[usize::from(birth.shard)].born(birth);
    }

    /// The newest committed membership of a shard.
    pub(super) fn members(&self, shard: u16) -> &Members {
        self.order.members.of(shard)
    }

    /// Window, cut and cuts of the window that binding has reached, for faults that are aimed.
    pub(super) fn bound_cut(&self) -> Option<(u64, u64, u64)> {
        self.order.bound_cut()
    }

    /// What is known of a shard's slots, and how its records are recognised.
    fn truth(&mut self, shard: u16) -> (&mut ShardTruth, Known<'_>) {
        let Oracle { shards, records, lanes, .. } = self;
        (&mut shards[usize::from(shard)], Known { records, lanes, shard })
    }

    /// The sequencer committed this entry; true when a shard was lost with it.
    pub(super) fn committed(&mut self, entry: &[u8]) -> bool {
        let mut moved = std::mem::take(&mut self.moved);
        let applied = self.order.apply(entry, &mut moved);
        for &shard in &moved {
            let to = self.order.committed_lsn(shard);
            let (truth, mut known) = self.truth(shard);
            truth.bound = to;
            let read = truth.advance(to, "bound", &mut known);
            self.check(read);
        }
        self.moved = moved;
        let mut lost = false;
        match applied {
            Ok(Applied::Bound) => {}
            Ok(Applied::Members(shard, before)) => {
                let promoted = before.epoch > 0 && before.epoch < self.members(shard).epoch && !before.has_failed();
                self.order.members.counts.promoted_busy += u64::from(promoted && self.open > 0);
                let (members, committed) = (self.members(shard).clone(), self.order.committed_lsn(shard));
                let (truth, known) = self.truth(shard);
                let agreed = truth.on_members(&members, committed, &known);
                self.check(agreed);
            }
            Ok(Applied::Failed(failure, _)) => {
                lost = true;
                let members = self.members(failure.shard).clone();
                let (truth, known) = self.truth(failure.shard);
                for number in truth.on_failed(&members, failure.lsn, &known) {
                    let record = &mut self.records[number as usize];
                    record.lsn = None;
                    // It may be appended again when the shard has returned.
                    let Some(lane) = self.lanes.get_mut(&(record.session, record.shard)) else { continue };
                    let at = lane.records.iter().position(|r| *r == number).unwrap_or(lane.read);
                    lane.read = lane.read.min(at);
                }
            }
            Err(violation) => self.complain(violation),
        }
        lost
    }

    /// I12: every sequencer has the same order log.
    pub(super) fn committed_again(&mut self, index: u64, entry: &[u8]) {
        if self.order.hashes.get(index as usize - 1) != Some(&super::trace::hash(entry)) {
            self.complain(Violation::new("I12", format!("two sequencers have different order entries {index}")));
        }
    }

    /// I11: reads a shard's log up to a slot that somebody was handed.
    fn advance(&mut self, shard: u16, to: u64) -> Result<(), Violation> {
        let (truth, mut known) = self.truth(shard);
        truth.advance(to, "delivered", &mut known)
    }

    /// I4: every member of every shard holds all that its primary keeps.
    pub(super) fn verify(&mut self) {
        for shard in 0..self.shards.len() as u16 {
            let (truth, known) = self.truth(shard);
            let keeps = truth.primary_keeps();
            let verified = truth.verify(keeps, &known);
            self.check(verified);
        }
    }

    /// Somebody appends; returns the record's number, which its bytes must be made from.
    pub(super) fn next_record(&self) -> u32 {
        self.records.len() as u32
    }

    /// The append of [`next_record`](Self::next_record) was taken by the session.
    pub(super) fn appended(&mut self, session: u32, shard: u16, seq: u64, len: usize) {
        let number = self.next_record();
        let floor = self.acknowledged_to;
        let fate = Fate::Open;
        let len = len as u32;
        self.records.push(Record { session, shard, seq, len, fate, lsn: None, floor, answer_lost: false });
        self.lanes.entry((session, shard)).or_default().records.push(number);
        self.open += 1;
    }

    fn open_record(&self, session: u32, shard: u16, seq: u64) -> Option<u32> {
        let lane = self.lanes.get(&(session, shard))?;
        let open = |record: &&u32| {
            let record = &self.records[**record as usize];
            record.seq == seq && record.fate == Fate::Open
        };
        lane.records.iter().rev().find(open).copied()
    }

    /// I4, I5, I6.
    pub(super) fn acknowledged(&mut self, session: u32, shard: u16, seq: u64, position: u64) -> Option<u32> {
        let Some(number) = self.open_record(session, shard, seq) else {
            let what = format!("session {session}: number {seq} of shard {shard} is acknowledged and not open");
            self.complain(Violation::new("I3", what));
            return None;
        };
        let record = self.records[number as usize];
        let name = format!("record {number} (session {session}, shard {shard}, number {seq})");
        let expected = record.lsn.and_then(|lsn| self.order.position(shard, lsn));
        if position < self.order.committed() && record.lsn.is_none() {
            let what = format!("{name} is acknowledged at {position}, and what is bound does not hold it");
            self.complain(Violation::new("I4", what));
        } else if position >= self.order.committed() {
            let committed = self.order.committed();
            let what = format!("{name} is acknowledged at {position}, bound are positions below {committed}");
            self.complain(Violation::new("I6", what));
        } else if expected != Some(position) {
            self.complain(Violation::new("I4", format!("{name} is acknowledged at {position}, it is at {expected:?}")));
        }
        if record.floor.is_some_and(|floor| floor >= position) {
            let what =
                format!("{name} is at {position}, but {:?} was acknowledged before it was appended", record.floor);
            self.complain(Violation::new("I5", what));
        }
        self.reached.retries_answered += u64::from(record.answer_lost);
        self.records[number as usize].fate = Fate::Acknowledged;
        self.acknowledged_to = self.acknowledged_to.max(Some(position));
        self.open -= 1;
        Some(number)
    }

    /// The append was refused: it must never appear, unless positions may be forgotten and its own was.
    pub(super) fn refused(&mut self, session: u32, shard: u16, seq: u64, refusal: Refusal) -> Option<u32> {
        let Some(number) = self.open_record(session, shard, seq) else {
            let what = format!("session {session}: number {seq} of shard {shard} is refused and not open");
            self.complain(Violation::new("I3", what));
            return None;
        };
        let record = &mut self.records[number as usize];
        // A retry from before what the shard remembers, or of what it forgot when it was lost: it may be in the log, and
        // nobody can say where.
        let lost = self.order.members.failures.iter().any(|f| f.shard == shard);
        let forgotten = refusal == Refusal::Forgotten && (self.may_forget || self.may_trim || lost);
        record.fate = if forgotten { Fate::Abandoned } else { Fate::Refused };
        let written = record.lsn.filter(|_| !forgotten);
        self.open -= 1;
        self.reached.refused += 1;
        self.reached.closed += u64::from(matches!(refusal, Refusal::Closed { .. }));
        self.reached.region_full += u64::from(matches!(refusal, Refusal::RegionFull { .. }));
        if let Some(lsn) = written {
            let what = format!("record {number} is refused ({refusal}) and is slot {lsn} of shard {shard}");
            self.complain(Violation::new("I3", what));
        }
        Some(number)
    }

    /// The append's shard was lost: it may or may not be in the log.
    pub(super) fn unknown(&mut self, session: u32, shard: u16, seq: u64) -> Option<u32> {
        let Some(number) = self.open_record(session, shard, seq) else {
            let what = format!("session {session}: number {seq} of shard {shard} is unknown and not open");
            self.complain(Violation::new("I3", what));
            return None;
        };
        if self.order.members.failures.iter().all(|f| f.shard != shard) {
            let what = format!("record {number} is unknown, and shard {shard} was never lost");
            self.complain(Violation::new("I10", what));
        }
        self.reached.unknown += 1;
        self.records[number as usize].fate = Fate::Abandoned;
        self.open -= 1;
        Some(number)
    }

    /// A session is gone: its open appends may be in the log or not.
    pub(super) fn abandoned(&mut self, session: u32) {
        for lane in self.lanes.range((session, 0)..=(session, u16::MAX)) {
            for number in &lane.1.records {
                let record = &mut self.records[*number as usize];
                if record.fate == Fate::Open {
                    record.fate = Fate::Abandoned;
                    self.open -= 1;
                }
            }
        }
    }

    /// A session connected anew: answers to records that are bound already were lost.
    pub(super) fn reconnected(&mut self, session: u32) {
        for lane in self.lanes.range((session, 0)..=(session, u16::MAX)) {
            for number in lane.1.records.iter().rev() {
                let record = &mut self.records[*number as usize];
                if record.fate != Fate::Open {
                    break;
                }
                record.answer_lost |= record.lsn.is_some();
            }
        }
    }

    /// I12: followers are sent what is committed, in index order without a gap.
    pub(super) fn tapped(&mut self, tapped: &Tapped) {
        let Tapped { link, index, hash } = *tapped;
        let next = self.followed.insert(link, index + 1);
        if next.is_some_and(|next| next != index) {
            let what = format!("link {link} is sent order entry {index}, the next is {next:?}");
            self.complain(Violation::new("I12", what));
        }
        let known = index.checked_sub(1).and_then(|at| self.order.hashes.get(at as usize));
        if known != Some(&hash) {
            let what = format!("link {link} is sent an order entry {index} that is not the committed one");
            self.complain(Violation::new("I12", what));
        }
    }

    /// I12: a follower that comes back goes on with no later entry than the first that it never got.
    pub(super) fn landed(&mut self, landed: Landed) {
        let Landed { number: follower, index, snapshot } = landed;
        let next = self.landed.entry(follower).or_insert(1);
        if index > *next && !snapshot {
            let what = format!("follower {follower} gets order entry {index}, but has never got {next}");
            self.complain(Violation::new("I12", what));
            return;
        }
        // Whoever begins with a snapshot cannot say where older slots are.
        self.may_trim |= snapshot && *next == 1;
        *next = (index + 1).max(*next);
    }
}

/// Recognises the records of one shard.
struct Known<'a> {
    records: &'a mut Vec<Record>,
    lanes: &'a mut BTreeMap<(u32, u16), Lane>,
    shard: u16,
}

/// The session of a client id.
fn session_of(client: u128) -> u32 {
    (client >> 32) as u32
}

impl Recognise for Known<'_> {
    fn find(&mut self, client: u128, seq: u64, lsn: u64, bytes: &[u8]) -> Result<u32, Violation> {
        let lane = self.lanes.entry((session_of(client), self.shard)).or_default();
        find_record(self.records, lane, bytes, (self.shard, seq, lsn))
    }

    fn guess(&self, client: u128, seq: u64, bytes: &[u8]) -> Option<u32> {
        let lane = self.lanes.get(&(session_of(client), self.shard))?;
        lane.records.iter().copied().find(|record| self.is(*record, client, seq, bytes))
    }

    fn is(&self, number: u32, client: u128, seq: u64, bytes: &[u8]) -> bool {
        let record = &self.records[number as usize];
        (record.session, record.seq) == (session_of(client), seq) && matches(number, record.len, bytes)
    }
}

/// The record of a lane that stands in the log: the next one of its session, or a violation. Of records that nothing tells
/// apart (no bytes, and the same number, because the shard was lost with the first) it is the last: a number is used again
/// only after the shard has said that the log does not hold it, and entries are read as soon as they are bound.
fn find_record(
    records: &mut [Record],
    lane: &mut Lane,
    bytes: &[u8],
    (shard, seq, lsn): (u16, u64, u64),
) -> Result<u32, Violation> {
    let fits = |number: u32, records: &[Record]| {
        let record = &records[number as usize];
        record.seq == seq && matches(number, record.len, bytes)
    };
    let name = format!("slot {lsn} of shard {shard} (number {seq})");
    let candidate = lane.records[lane.read..]
        .iter()
        .rposition(|&number| fits(number, records) && records[number as usize].fate != Fate::Refused);
    let Some(at) = candidate else {
        let known = lane.records.iter().copied().find(|&number| fits(number, records));
        return Err(match known.map(|number| records[number as usize]) {
            Some(Record { fate: Fate::Refused, .. }) => Violation::new("I3", format!("{name} holds a refused record")),
            Some(Record { lsn: Some(first), .. }) => {
                Violation::new("I3", format!("{name} holds the record of slot {first} again"))
            }
            Some(_) => Violation::new("I7", format!("{name} comes after later records of its session")),
            None => Violation::new("I1", format!("{name} holds {} bytes that nobody appended", bytes.len())),
        });
    };
    let number = lane.records[lane.read + at];
    lane.read += at + 1;
    records[number as usize].lsn = Some(lsn);
    Ok(number)
}
