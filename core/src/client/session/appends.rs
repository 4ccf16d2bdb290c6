//! Outstanding appends: numbered, kept until answered, and sent again in order after every reconnect and move.
//!
//! One *lane* per shard. A lane's queue holds the records not answered yet, in the order of their numbers; the first
//! `sent` of them went out in the current *attempt*: since the lane was last moved to a gate, its gate connected, or said
//! "not here". A gate that answers a retry gives the original position, so sending everything again is always right, and
//! nothing new overtakes a retry because both come from the same queue. Refusals of earlier attempts are ignored.
//!
//! A refusal breaks the sequence: the gate still expects that number, and everything behind it is refused as a gap. The lane
//! then takes nothing new until it is empty and continues with the number that the gate expects.
//!
//! **A lost shard.** What was sent and not answered when a shard was lost as a whole is reported as unknown and never sent
//! again. The lane goes on once the shard has returned and said which of the session's numbers it expects next. A retry
//! cannot slip in before the session hears of the loss: each append says up to which view the session knows the shard's
//! failures, and a gate that knows of a newer one refuses it.

use std::collections::VecDeque;

use antelog_protocol::ledger::Ledger;
use antelog_protocol::limits::NUMBER_MAX;
use antelog_protocol::wire::session::Request;
use antelog_protocol::{Outcome, Position, Refusal, ShardId};

use super::gate::Gate;
use super::options::AppendError;
use super::routes::Routes;
use crate::client::{Record, SessionHandler};

/// Losses of one shard whose consequences are remembered.
const LOSSES_MAX: usize = 64;

#[derive(Debug)]
struct Outstanding {
    seq: u64,
    record: Record,
}

/// Whether a lane's next number is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Numbers {
    Known,
    /// Numbers from this one on were under way when the shard was lost; nobody was asked yet which the shard expects.
    Lost(u64),
    /// Asked.
    Asked(u64),
}

#[derive(Debug)]
struct Lane {
    shard: ShardId,
    gate: usize,
    /// Of the primary; 0 while none is known.
    epoch: u32,
    /// The shard is lost at present.
    lost: bool,
    next_seq: u64,
    /// Numbers below this one were used at some time; a refusal takes `next_seq` back, and late answers still come.
    used_to: u64,
    /// Numbers below this one may be those of several records: the log did not know of the first, and may again.
    reused_to: u64,
    /// The shard has, or may have, a record of this lane.
    taken: bool,
    queue: VecDeque<Outstanding>,
    /// Of the queue, how many were sent in the current attempt.
    sent: usize,
    /// Of the queue, how many were sent in earlier attempts: the shard may have them.
    doubtful: usize,
    attempt: u32,
    /// The shard's failures up to this view are known and dealt with.
    view: u32,
    /// After a refusal: the number to continue with once the queue is empty.
    resume: Option<u64>,
    numbers: Numbers,
    /// Numbers from, to (exclusive) that were under way in a loss, and what became of them.
    gone: Vec<(u64, u64, Outcome)>,
    /// Not sent before this time, after `pauses` gates in a row said that the shard is not there.
    retry_ns: u64,
    pauses: u32,
    /// The order stream was not followed when the oldest was sent: this number, and looks that have found it still open.
    recheck: Option<(u64, u32)>,
}

/// What a lane knows of one of its own numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The shard has to be asked.
    Ask,
    /// It is being asked.
    Later,
    Known(Outcome),
}

/// What an answer means beyond the append itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Settled {
    /// Nothing is outstanding under that number, or it answers an earlier attempt.
    Stale,
    /// The append is answered.
    Done,
    /// The gate does not serve the shard: everything is sent again after a pause.
    NotHere,
    /// The shard was lost meanwhile, in this view.
    Lost(u32),
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Appends {
    lanes: Vec<Lane>,
    outstanding: usize,
    outstanding_max: usize,
    record_bytes_max: usize,
    /// Some lane has records to send.
    behind: bool,
    /// Some lane has to ask for its next number.
    asks: bool,
    /// Answers so far.
    pub(super) answered: u64,
}

impl Lane {
    fn new(shard: ShardId, gate: usize) -> Lane {
        Lane {
            shard,
            gate,
            epoch: 0,
            lost: false,
            next_seq: 0,
            used_to: 0,
            reused_to: 0,
            taken: false,
            queue: VecDeque::new(),
            sent: 0,
            doubtful: 0,
            attempt: 0,
            view: 0,
            resume: None,
            numbers: Numbers::Known,
            gone: Vec::new(),
            retry_ns: 0,
            pauses: 0,
            recheck: None,
        }
    }

    /// Sends everything again.
    fn begin_anew(&mut self) {
        self.doubtful = self.doubtful.max(self.sent);
        self.sent = 0;
        self.attempt = self.attempt.wrapping_add(1);
    }

    /// The shard was lost, in this view: what it may have is unknown, the rest is refused. Returns how many those were.
    fn lose(&mut self, view: u32, handler: &mut impl SessionHandler) -> usize {
        self.view = view;
        let (count, unknown) = (self.queue.len(), self.doubtful.max(self.sent));
        let first = self.queue.front().map_or(self.next_seq, |o| o.seq);
        // After a refusal the shard still expects that number, whatever was sent behind it.
        let first = self.resume.map_or(first, |resume| resume.min(first));
        self.taken |= unknown > 0;
        if let Numbers::Lost(earlier) | Numbers::Asked(earlier) = self.numbers {
            self.numbers = Numbers::Lost(earlier.min(first));
        } else {
            // Records that are missing for a while may be back, and others missing, whether anything was under way or not.
            self.numbers = if self.taken { Numbers::Lost(first) } else { Numbers::Known };
            self.next_seq = first;
        }
        if unknown > 0 {
            for gone in &mut self.gone {
                gone.1 = gone.1.min(first);
            }
            self.gone.retain(|(from, to, _)| from < to);
        }
        for (at, outstanding) in std::mem::take(&mut self.queue).into_iter().enumerate() {
            if at < unknown {
                handler.on_unknown(self.shard, outstanding.seq);
                self.next_seq = outstanding.seq + 1;
            } else {
                handler.on_refused(self.shard, outstanding.seq, Refusal::Failed);
            }
        }
        (self.sent, self.doubtful, self.resume) = (0, 0, None);
        self.attempt = self.attempt.wrapping_add(1);
        count
    }
}

impl Appends {
    pub(super) fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Whether some record was not sent on its gate's current connection.
    pub(super) fn behind(&self) -> bool {
        self.behind
    }

    /// The limits of the cluster's map.
    pub(super) fn set_limits(&mut self, outstanding_max: usize, record_bytes_max: usize) {
        (self.outstanding_max, self.record_bytes_max) = (outstanding_max, record_bytes_max);
    }

    /// Shards may be served elsewhere than before, or by another primary: there everything is sent again.
    pub(super) fn on_routes(&mut self, routes: &Routes) {
        for route in routes.all() {
            let index = match self.lanes.binary_search_by_key(&route.shard, |l| l.shard) {
                Ok(index) => index,
                Err(index) => {
                    self.lanes.insert(index, Lane::new(route.shard, route.gate));
                    index
                }
            };
            let lane = &mut self.lanes[index];
            if (lane.gate, lane.epoch, lane.lost) != (route.gate, route.epoch, route.lost) {
                let known = lane.epoch > 0 || lane.gate != route.gate;
                (lane.gate, lane.epoch, lane.lost) = (route.gate, route.epoch, route.lost);
                (lane.retry_ns, lane.pauses) = (0, 0);
                if known {
                    lane.begin_anew();
                    self.behind |= !lane.queue.is_empty();
                } else {
                    lane.recheck = lane.queue.front().map(|o| (o.seq, 0));
                }
            }
            self.asks |= !lane.lost && matches!(lane.numbers, Numbers::Lost(_));
        }
    }

    /// The ledger knows of failures that a lane has not dealt with. What it told `first` may be older than what was sent:
    /// there the gate's word counts, unless none comes.
    pub(super) fn on_failures(&mut self, ledger: &Ledger, first: bool, handler: &mut impl SessionHandler) {
        for at in 0..self.lanes.len() {
            let lane = &self.lanes[at];
            if !(first && lane.recheck.is_some() && !ledger.has_failed(lane.shard)) {
                self.lose_if_lost(at, ledger, handler);
            }
        }
    }

    fn lose_if_lost(&mut self, at: usize, ledger: &Ledger, handler: &mut impl SessionHandler) -> bool {
        let lane = &mut self.lanes[at];
        let view = ledger.last_failure(lane.shard).map(|f| f.view).filter(|view| *view > lane.view);
        let Some(view) = view else { return false };
        let lost = lane.lose(view, handler);
        self.outstanding -= lost;
        self.answered += lost as u64;
        self.asks |= matches!(lane.numbers, Numbers::Lost(_));
        true
    }

    /// Time passed: what is still open since before the order stream was followed was lost with its shard, or is sent again.
    pub(super) fn recheck(&mut self, ledger: &Ledger, handler: &mut impl SessionHandler) {
        for at in 0..self.lanes.len() {
            let lane = &mut self.lanes[at];
            let Some((seq, looks)) = lane.recheck else { continue };
            if lane.queue.front().is_none_or(|o| o.seq != seq) {
                lane.recheck = None;
            } else if looks == 0 {
                lane.recheck = Some((seq, 1));
            } else {
                lane.recheck = None;
                if !self.lose_if_lost(at, ledger, handler) {
                    self.lanes[at].begin_anew();
                    self.behind = true;
                }
            }
        }
    }

    #[inline]
    fn lane_index(&self, shard: ShardId) -> Option<usize> {
        match self.lanes.get(usize::from(shard.0)) {
            Some(lane) if lane.shard == shard => Some(usize::from(shard.0)),
            _ => self.lanes.binary_search_by_key(&shard, |l| l.shard).ok(),
        }
    }

    /// Sends `record` if its gate is connected and nothing is in front of it; `keep` makes the copy that is kept, only when
    /// the append was taken.
    pub(super) fn append(
        &mut self,
        gates: &mut [Gate],
        shard: ShardId,
        record: &[u8],
        keep: impl FnOnce() -> Record,
    ) -> Result<u64, AppendError> {
        let index = self.lane_index(shard).ok_or(AppendError::UnknownShard(shard))?;
        if record.len() > self.record_bytes_max {
            return Err(AppendError::TooLarge { limit_bytes: self.record_bytes_max });
        }
        let lane = &mut self.lanes[index];
        if lane.lost {
            return Err(AppendError::Lost(shard));
        }
        if lane.queue.len() >= self.outstanding_max || lane.resume.is_some() || lane.numbers != Numbers::Known {
            return Err(AppendError::Full);
        }
        let gate = &mut gates[lane.gate];
        gate.wanted = true;
        let seq = lane.next_seq;
        if gate.up() && lane.sent == lane.queue.len() && lane.retry_ns == 0 {
            let request = Request::Append { shard, attempt: lane.attempt, view: lane.view, seq, record };
            gate.push(&request).map_err(|_| AppendError::Full)?;
            lane.sent += 1;
        } else {
            self.behind = true;
        }
        lane.next_seq += 1;
        lane.used_to = lane.used_to.max(lane.next_seq);
        lane.queue.push_back(Outstanding { seq, record: keep() });
        self.outstanding += 1;
        Ok(seq)
    }

    /// The record is bound: gives its place in the queue up, whichever gate says so. False when nothing is outstanding under
    /// that number, because it was answered before; an error when it was never used.
    pub(super) fn acknowledged(
        &mut self,
        shard: ShardId,
        seq: u64,
        position: Position,
        ledger: &Ledger,
    ) -> Result<bool, &'static str> {
        let index = self.lane_of_answer(shard, seq)?;
        let lane = &mut self.lanes[index];
        // What was bound before a loss was reported as unknown; its number may be another record's since.
        let dealt_with = ledger.last_failure(shard).filter(|failed| failed.view <= lane.view);
        if dealt_with.is_some_and(|failed| position < failed.lease_end) {
            return Ok(false);
        }
        (lane.retry_ns, lane.pauses, lane.taken) = (0, 0, true);
        let Some(at) = lane.place_of(seq) else { return Ok(false) };
        self.remove(index, at);
        Ok(true)
    }

    /// A gate refused an append.
    pub(super) fn refused(
        &mut self,
        (gate, shard, attempt): (usize, ShardId, u32),
        seq: u64,
        refusal: Refusal,
    ) -> Result<Settled, &'static str> {
        let index = self.lane_of_answer(shard, seq)?;
        let lane = &mut self.lanes[index];
        if lane.gate != gate || lane.attempt != attempt {
            return Ok(Settled::Stale);
        }
        let Some(at) = lane.place_of(seq) else { return Ok(Settled::Stale) };
        // The first of all was never taken by anybody: then none behind it was.
        let untaken = at == 0 && lane.doubtful == 0;
        let resume = match refusal {
            Refusal::OldView { view } if view > lane.view && (lane.taken || !untaken) => {
                if untaken {
                    (lane.sent, lane.doubtful) = (0, 0);
                }
                return Ok(Settled::Lost(view));
            }
            Refusal::OldView { .. } | Refusal::NotHere | Refusal::Failed => {
                lane.begin_anew();
                lane.doubtful = if untaken { 0 } else { lane.doubtful };
                self.behind = true;
                let Refusal::OldView { view } = refusal else { return Ok(Settled::NotHere) };
                lane.view = lane.view.max(view);
                return Ok(Settled::Stale);
            }
            // The log has forgotten the session: it may begin again.
            Refusal::UnknownSession => {
                lane.reused_to = if lane.taken { lane.used_to } else { lane.reused_to };
                Some(0)
            }
            // The number was used, long ago: it must not be used again.
            Refusal::Forgotten => lane.resume,
            _ => Some(lane.resume.map_or(seq, |r| r.min(seq))),
        };
        lane.resume = resume;
        self.remove(index, at);
        Ok(Settled::Done)
    }

    fn lane_of_answer(&self, shard: ShardId, seq: u64) -> Result<usize, &'static str> {
        let index = self.lane_index(shard).ok_or("it answered an append to a shard that was never used")?;
        if seq >= self.lanes[index].used_to {
            return Err("it answered an append that was never sent");
        }
        Ok(index)
    }

    fn remove(&mut self, index: usize, at: usize) {
        let lane = &mut self.lanes[index];
        lane.queue.remove(at);
        self.outstanding -= 1;
        self.answered += 1;
        lane.sent -= usize::from(at < lane.sent);
        lane.doubtful -= usize::from(at < lane.doubtful);
        if lane.queue.is_empty()
            && let Some(resume) = lane.resume.take()
        {
            lane.next_seq = resume;
        }
    }

    /// A gate says that the shard was lost in a view that the session has not heard of.
    pub(super) fn on_lost(&mut self, shard: ShardId, view: u32, handler: &mut impl SessionHandler) {
        let Some(index) = self.lane_index(shard) else { return };
        let lost = self.lanes[index].lose(view, handler);
        self.outstanding -= lost;
        self.answered += lost as u64;
        self.asks = true;
    }

    /// A gate said "not here", once more in a row: waits until then.
    pub(super) fn pause(&mut self, shard: ShardId, until_ns: impl Fn(u32) -> u64) {
        let Some(index) = self.lane_index(shard) else { return };
        let lane = &mut self.lanes[index];
        lane.retry_ns = until_ns(lane.pauses);
        lane.pauses = lane.pauses.saturating_add(1);
    }

    /// A connection began or ended: everything outstanding at that gate is unsent again. True if there is anything.
    pub(super) fn on_link(&mut self, gate: usize) -> bool {
        let mut any = false;
        for lane in self.lanes.iter_mut().filter(|l| l.gate == gate) {
            lane.begin_anew();
            any |= !lane.queue.is_empty();
        }
        self.behind |= any;
        any
    }

    /// Sends what is due and fits; returns how much was sent and when to look again at the latest.
    pub(super) fn pump(&mut self, gates: &mut [Gate], now_ns: u64) -> (usize, u64) {
        let (mut work, mut next_ns) = (0, u64::MAX);
        if !self.behind {
            return (work, next_ns);
        }
        let mut behind = false;
        for lane in &mut self.lanes {
            if lane.retry_ns > now_ns {
                next_ns = next_ns.min(lane.retry_ns);
                behind |= !lane.queue.is_empty();
                continue;
            }
            lane.retry_ns = 0;
            let gate = &mut gates[lane.gate];
            while let Some(next) = lane.queue.get(lane.sent) {
                gate.wanted = true;
                let (shard, attempt, view) = (lane.shard, lane.attempt, lane.view);
                let request = Request::Append { shard, attempt, view, seq: next.seq, record: &next.record };
                if gate.push(&request).is_err() {
                    behind = true;
                    break;
                }
                lane.sent += 1;
                work += 1;
            }
        }
        self.behind = behind;
        (work, next_ns)
    }

    /// The shards that have to be asked which number they expect next, and the first that is in doubt; once for each.
    pub(super) fn take_asks(&mut self) -> Vec<(ShardId, u64)> {
        let mut asks = Vec::new();
        if std::mem::take(&mut self.asks) {
            for lane in self.lanes.iter_mut().filter(|l| !l.lost) {
                if let Numbers::Lost(first) = lane.numbers {
                    lane.numbers = Numbers::Asked(first);
                    asks.push((lane.shard, first));
                }
            }
        }
        asks
    }

    /// The shard answered: it expects `next_seq`. What was in doubt below that is in the log.
    pub(super) fn resolve(
        &mut self,
        shard: ShardId,
        first: u64,
        outcome: Outcome,
        next_seq: u64,
    ) -> Result<(), String> {
        let Some(index) = self.lane_index(shard) else { return Ok(()) };
        let lane = &mut self.lanes[index];
        if lane.numbers != Numbers::Asked(first) {
            return Ok(());
        }
        let end = lane.next_seq;
        if outcome == Outcome::Forgotten && next_seq < lane.used_to {
            lane.reused_to = lane.used_to;
        }
        if (outcome == Outcome::Forgotten || first < lane.reused_to) && next_seq <= NUMBER_MAX {
            lane.gone.push((first, end, Outcome::Forgotten));
        } else if (first..=end).contains(&next_seq) {
            lane.gone.push((next_seq, end, Outcome::NotInLog));
        } else {
            return Err(format!("it expects append {next_seq} of this session, which has sent {first} to {end}"));
        }
        lane.gone.retain(|(from, to, _)| from < to);
        let surplus = lane.gone.len().saturating_sub(LOSSES_MAX);
        lane.gone.drain(..surplus);
        (lane.next_seq, lane.numbers) = (next_seq, Numbers::Known);
        lane.used_to = lane.used_to.max(next_seq);
        Ok(())
    }

    /// What is known of a number of this session.
    pub(super) fn fate(&self, shard: ShardId, seq: u64) -> Fate {
        let Some(lane) = self.lane_index(shard).map(|index| &self.lanes[index]) else { return Fate::Ask };
        match lane.numbers {
            Numbers::Lost(first) | Numbers::Asked(first) if seq >= first => Fate::Later,
            _ => {
                let gone = lane.gone.iter().find(|(from, to, _)| (*from..*to).contains(&seq));
                gone.map_or(Fate::Ask, |(.., outcome)| Fate::Known(*outcome))
            }
        }
    }
}

impl Lane {
    fn place_of(&self, seq: u64) -> Option<usize> {
        match self.queue.front() {
            Some(front) if front.seq == seq => Some(0),
            _ => self.queue.binary_search_by_key(&seq, |o| o.seq).ok(),
        }
    }
}
