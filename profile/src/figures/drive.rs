//! One simulated measurement: production agents and session on virtual time, open-loop writers, a consumer per shard.
//!
//! Every record is kept as a sample with its times, so that one run gives the end-to-end latency for any computation: with
//! as many workers as there are records a computation begins when its record arrives, and its output is released at the
//! later of its end and the confirmation.

use std::collections::VecDeque;

use antelog_core::client::session::AppendError;
use antelog_core::client::{Membership, Record, SessionHandler, Slot, SubscriptionId};
use antelog_core::sim::stage::{SimSession, Stage, Turn};
use antelog_protocol::client::{Event, Scope};
use antelog_protocol::{Change, ChangeError, Position, Refusal, ShardId};

use super::setup::{Act, Setup};

/// A time that has not come.
pub const NEVER: u64 = u64::MAX;
/// How soon a record that the session did not take is offered again, in nanoseconds.
const RETRY_NS: u64 = 50_000;
/// How long after the load what is outstanding may take, in nanoseconds.
const DRAIN_NS: u64 = 400_000_000;
/// Counters that runs read, by the prefix of the agents that have them.
pub const COUNTED: [(&str, &str); 8] = [
    ("sequencer", "reports"),
    ("sequencer", "cuts"),
    ("sequencer", "quota_changes"),
    ("replica-", "records"),
    ("replica-", "no_ops"),
    ("replica-", "fills_by_age"),
    ("replica-", "fills_by_target"),
    ("replica-", "fills_ahead"),
];
/// Names the change that a setup asks for; questions for the membership have other tokens.
const CHANGE_TOKEN: u64 = 0;

/// A record. Times are nanoseconds of virtual time, [`NEVER`] where something did not happen.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The shard that its writer chose.
    pub shard: u16,
    /// When it was to be sent.
    pub intended_ns: u64,
    /// When its writer learnt its position.
    pub acknowledged_ns: u64,
    /// When the consumer had it.
    pub delivered_ns: u64,
    /// When the consumer knew its position to be bound.
    pub confirmed_ns: u64,
}

impl Sample {
    /// From the intended time until the output of a computation of this length may be released, in nanoseconds.
    pub fn e2e_ns(&self, compute_ns: u64) -> u64 {
        self.confirmed_ns.max(self.delivered_ns + compute_ns) - self.intended_ns
    }
}

/// What was seen of the cluster at a time.
#[derive(Clone, Debug)]
pub struct Seen {
    /// When, in nanoseconds.
    pub at_ns: u64,
    /// Stragglers grounded so far.
    pub grounded: u64,
}

/// What a run gave.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// The records whose intended time lies in the measured time.
    pub samples: Vec<Sample>,
    /// Of these, how many were never confirmed or acknowledged.
    pub unfinished: u64,
    /// The cluster over time, if that was asked for.
    pub seen: Vec<Seen>,
    /// The membership over time, if that was asked for: when it was told, in nanoseconds, and what.
    pub members: Vec<(u64, Membership)>,
    /// When the change that was asked for was told to be done, in nanoseconds.
    pub changed_ns: Option<u64>,
    /// Deliveries that were taken back.
    pub taken_back: u64,
    /// What [`COUNTED`] names was counted during the measured time, over all agents.
    pub counts: [u64; COUNTED.len()],
    /// The measured time, in nanoseconds.
    pub measured_ns: u64,
}

impl Run {
    /// A counter of [`COUNTED`].
    pub fn count(&self, counter: &str) -> u64 {
        let at = COUNTED.iter().position(|(_, name)| *name == counter);
        at.map_or(0, |at| self.counts[at])
    }
}

/// Share of no-ops among the slots of runs, in percent.
pub fn no_ops_percent<'a>(runs: impl IntoIterator<Item = &'a Run>) -> f64 {
    let (mut records, mut no_ops) = (0, 0);
    for run in runs {
        (records, no_ops) = (records + run.count("records"), no_ops + run.count("no_ops"));
    }
    100.0 * no_ops as f64 / (records + no_ops).max(1) as f64
}

/// What a writer has with one shard.
#[derive(Debug, Default)]
struct Lane {
    /// Records to be sent.
    waiting: VecDeque<u32>,
    /// Records without an answer, with their numbers.
    outstanding: VecDeque<(u64, u32)>,
    /// Records that were refused, while others wait for their answers.
    refused: Vec<(u64, u32)>,
    /// Where records go instead, and until when.
    instead: Option<(u16, u64)>,
}

/// All but the session.
struct Desk<'a> {
    setup: &'a Setup,
    now_ns: u64,
    samples: Vec<Sample>,
    lanes: Vec<Lane>,
    subscriptions: Vec<SubscriptionId>,
    /// Of each subscription, what was delivered and not confirmed.
    unconfirmed: Vec<VecDeque<(Position, u32)>>,
    members: Vec<(u64, Membership)>,
    changed_ns: Option<u64>,
    taken_back: u64,
    /// Records that were neither confirmed nor acknowledged.
    open: [u64; 2],
    error: Option<String>,
}

impl Desk<'_> {
    fn confirm(&mut self, record: u32) {
        self.samples[record as usize].confirmed_ns = self.now_ns;
        self.open[0] -= 1;
    }

    fn answered(&mut self, shard: ShardId, seq: u64) -> Option<u32> {
        let outstanding = &mut self.lanes[usize::from(shard.0)].outstanding;
        let at = outstanding.iter().position(|(number, _)| *number == seq)?;
        outstanding.remove(at).map(|(_, record)| record)
    }

    /// Once a closed shard has answered everything: what it refused goes elsewhere, before anything new.
    fn redirect(&mut self, shard: usize) {
        let lane = &mut self.lanes[shard];
        let (Some((instead, _)), true) = (lane.instead, lane.outstanding.is_empty()) else { return };
        let mut refused = std::mem::take(&mut lane.refused);
        refused.sort_unstable();
        let mut moved: VecDeque<u32> = refused.into_iter().map(|(_, record)| record).collect();
        moved.append(&mut lane.waiting);
        self.lanes[usize::from(instead)].waiting.extend(moved);
    }
}

impl SessionHandler for Desk<'_> {
    fn on_acknowledged(&mut self, shard: ShardId, seq: u64, _: Position) {
        let Some(record) = self.answered(shard, seq) else { return };
        self.samples[record as usize].acknowledged_ns = self.now_ns;
        self.open[1] -= 1;
        if !self.lanes[usize::from(shard.0)].refused.is_empty() {
            self.redirect(shard.0.into());
        }
    }

    fn on_refused(&mut self, shard: ShardId, seq: u64, refusal: Refusal) {
        let Some(record) = self.answered(shard, seq) else { return };
        let until_ns = self.now_ns + self.setup.window_ns();
        let lane = &mut self.lanes[usize::from(shard.0)];
        lane.refused.push((seq, record));
        match refusal {
            Refusal::Closed { instead } => lane.instead = Some((instead.0, until_ns)),
            // It follows a refusal that names another shard.
            Refusal::Gap { .. } | Refusal::UnknownSession => {}
            // The shard is lost: so is the record.
            Refusal::Failed if self.setup.has_losses() => {
                lane.refused.clear();
                return;
            }
            other => self.error = Some(format!("shard {shard} refused a record: {other}")),
        }
        self.redirect(shard.0.into());
    }

    fn on_unknown(&mut self, shard: ShardId, seq: u64) {
        if self.setup.has_losses() {
            self.answered(shard, seq);
            return;
        }
        self.error = Some(format!("shard {shard} was lost, and with it what became of record {seq}"));
    }

    fn on_event(&mut self, subscription: SubscriptionId, event: Event<Record>) {
        let Some(at) = self.subscriptions.iter().position(|id| *id == subscription) else { return };
        match event {
            Event::Deliver { position, record, speculative, .. } => {
                let number = u32::from_le_bytes(record[..4].try_into().unwrap_or_default());
                self.samples[number as usize].delivered_ns = self.now_ns;
                if speculative {
                    self.unconfirmed[at].push_back((position, number));
                } else {
                    self.confirm(number);
                }
            }
            Event::Confirm { upto } => {
                while let Some((_, number)) = self.unconfirmed[at].front().copied().filter(|(p, _)| *p < upto) {
                    self.unconfirmed[at].pop_front();
                    self.confirm(number);
                }
            }
            Event::Fail { from } if self.setup.has_losses() => {
                let before = self.unconfirmed[at].len();
                self.unconfirmed[at].retain(|(position, _)| *position < from);
                self.taken_back += (before - self.unconfirmed[at].len()) as u64;
            }
            Event::Unavailable { .. } if self.setup.has_losses() => {}
            Event::Fail { from } => self.error = Some(format!("everything from {from} on was speculated in vain")),
            Event::Unavailable { from, to } => {
                self.error = Some(format!("positions {from} to {to} are unavailable"));
            }
        }
    }

    fn on_trimmed(&mut self, _: SubscriptionId, head: Position) {
        self.error = Some(format!("the log begins at {head} already: a consumer was too slow"));
    }

    fn on_read(&mut self, _: u64, _: Position, _: Slot) {}

    fn on_tail(&mut self, _: u64, _: Position) {}

    fn on_membership(&mut self, token: u64, answer: Result<Membership, ChangeError>) {
        match answer {
            Ok(_) if token == CHANGE_TOKEN => self.changed_ns = Some(self.now_ns),
            Ok(membership) => self.members.push((self.now_ns, membership)),
            Err(error) => self.error = Some(error.to_string()),
        }
    }

    fn on_connection(&mut self, address: &str, error: Option<&str>) {
        if let Some(error) = error.filter(|_| !self.setup.has_losses()) {
            self.error = Some(format!("{address}: {error}"));
        }
    }
}

struct Driver<'a> {
    stage: Stage,
    session: SimSession,
    desk: Desk<'a>,
    next_send: usize,
    next_act: usize,
    retry_ns: u64,
    watch_ns: u64,
    questions: u64,
    seen: Vec<Seen>,
    record: Vec<u8>,
}

/// Runs a setup.
///
/// # Errors
/// One line: no memory, or something happened that must not in a cluster without failures.
pub fn run(setup: &Setup) -> Result<Run, String> {
    let text = |e: std::io::Error| e.to_string();
    let (stage, mut session, mut now_ns) = Stage::new(setup.knobs()).map_err(text)?;
    let subscriptions = (0..setup.shards).map(|s| session.subscribe(Scope::Shard(ShardId(s)), Position(0))).collect();
    let desk = Desk {
        setup,
        now_ns,
        samples: Vec::with_capacity(setup.sends.len()),
        lanes: (0..setup.shards).map(|_| Lane::default()).collect(),
        subscriptions,
        unconfirmed: vec![VecDeque::new(); setup.shards.into()],
        members: Vec::new(),
        changed_ns: None,
        taken_back: 0,
        open: [0; 2],
        error: None,
    };
    let watch_ns = if setup.watch_every_ns.is_some() { setup.from_ns } else { NEVER };
    let record = vec![0; setup.model.record_bytes];
    let (seen, retry_ns) = (Vec::new(), NEVER);
    let mut driver =
        Driver { stage, session, desk, next_send: 0, next_act: 0, retry_ns, watch_ns, questions: 0, seen, record };
    let mut counted = [None, None];
    loop {
        for (at_ns, counted) in [setup.from_ns, setup.until_ns].into_iter().zip(&mut counted) {
            if now_ns >= at_ns && counted.is_none() {
                *counted = Some(driver.counted());
            }
        }
        let turn = driver.turn(now_ns);
        if let Some(error) = driver.desk.error.take() {
            return Err(error);
        }
        let sent = driver.next_send == setup.sends.len();
        let over = now_ns >= setup.until_ns && sent && driver.desk.open == [0, 0];
        if over || now_ns > setup.until_ns + DRAIN_NS {
            break;
        }
        now_ns = driver.stage.go_on(turn).map_err(text)?;
    }
    let [before, after] = counted.map(Option::unwrap_or_default);
    let counts = std::array::from_fn(|at| after[at] - before[at]);
    let Desk { samples, members, changed_ns, taken_back, .. } = driver.desk;
    let measured = |s: &Sample| (setup.from_ns..setup.until_ns).contains(&s.intended_ns);
    let finished = |s: &Sample| s.confirmed_ns != NEVER && s.acknowledged_ns != NEVER;
    let (samples, left): (Vec<Sample>, Vec<Sample>) = samples.into_iter().filter(measured).partition(finished);
    Ok(Run {
        samples,
        unfinished: left.len() as u64,
        seen: driver.seen,
        members,
        changed_ns,
        taken_back,
        counts,
        measured_ns: setup.until_ns - setup.from_ns,
    })
}

impl Driver<'_> {
    fn counted(&self) -> [u64; COUNTED.len()] {
        COUNTED.map(|(agent, counter)| self.stage.counted(agent, counter))
    }

    fn turn(&mut self, now_ns: u64) -> Turn {
        self.desk.now_ns = now_ns;
        let mut work = self.act(now_ns) + self.take_due(now_ns) + self.send(now_ns);
        if now_ns >= self.watch_ns {
            self.watch(now_ns);
        }
        work += self.session.duty_cycle(now_ns, &mut self.desk);
        let setup = self.desk.setup;
        let sends = setup.sends.get(self.next_send).map(|(at_ns, _)| *at_ns);
        let acts = setup.acts.get(self.next_act).map(|(at_ns, _)| *at_ns);
        let others = [sends, acts, self.session.deadline_ns(), Some(self.retry_ns), Some(self.watch_ns)];
        let end_ns = if now_ns < setup.until_ns { setup.until_ns } else { setup.until_ns + DRAIN_NS + 1 };
        let deadline_ns = others.into_iter().flatten().min().unwrap_or(NEVER).min(end_ns);
        let ready = work == 0 && self.session.prepare_wait();
        Turn { work, deadline_ns, ready }
    }

    fn act(&mut self, now_ns: u64) -> usize {
        let before = self.next_act;
        while let Some((_, act)) = self.desk.setup.acts.get(self.next_act).filter(|(at_ns, _)| *at_ns <= now_ns) {
            self.next_act += 1;
            match *act {
                Act::HoldReports { shard, delay_ns } => self.stage.hold_reports(shard, delay_ns),
                Act::Stall { shard, for_ns } => self.stage.stall(shard, for_ns),
                Act::Kill(victim) => self.stage.kill(victim),
                Act::Join { shard } => self.session.change(CHANGE_TOKEN, Change::Join(ShardId(shard))),
            }
        }
        self.next_act - before
    }

    /// Takes what is due from the schedule. Writers of a shard that stands by begin once it has joined.
    fn take_due(&mut self, now_ns: u64) -> usize {
        let Driver { desk, next_send, .. } = self;
        let before = *next_send;
        while let Some((intended_ns, shard)) = desk.setup.sends.get(*next_send).filter(|(at_ns, _)| *at_ns <= now_ns) {
            *next_send += 1;
            if *shard >= desk.setup.standby_from && desk.changed_ns.is_none() {
                continue;
            }
            let record = desk.samples.len() as u32;
            let (acknowledged_ns, delivered_ns, confirmed_ns) = (NEVER, NEVER, NEVER);
            let (shard, intended_ns) = (*shard, *intended_ns);
            desk.samples.push(Sample { shard, intended_ns, acknowledged_ns, delivered_ns, confirmed_ns });
            desk.open = desk.open.map(|open| open + 1);
            let lane = desk.lanes[usize::from(shard)].instead.filter(|(_, until_ns)| now_ns < *until_ns);
            desk.lanes[usize::from(lane.map_or(shard, |(instead, _)| instead))].waiting.push_back(record);
        }
        *next_send - before
    }

    fn send(&mut self, now_ns: u64) -> usize {
        let Driver { desk, session, record, retry_ns, .. } = self;
        *retry_ns = NEVER;
        let mut work = 0;
        for (shard, lane) in desk.lanes.iter_mut().enumerate() {
            while let (Some(number), true) = (lane.waiting.front().copied(), lane.refused.is_empty()) {
                record[..4].copy_from_slice(&number.to_le_bytes());
                match session.append(ShardId(shard as u16), record) {
                    Ok(seq) => {
                        lane.waiting.pop_front();
                        lane.outstanding.push_back((seq, number));
                        work += 1;
                    }
                    Err(AppendError::Full | AppendError::NotConnectedYet) => {
                        *retry_ns = now_ns + RETRY_NS;
                        break;
                    }
                    Err(_) if desk.setup.has_losses() => {
                        lane.waiting.pop_front();
                    }
                    Err(error) => {
                        desk.error = Some(error.to_string());
                        return work;
                    }
                }
            }
        }
        work
    }

    fn watch(&mut self, now_ns: u64) {
        self.watch_ns = now_ns + self.desk.setup.watch_every_ns.unwrap_or(NEVER / 2);
        self.seen.push(Seen { at_ns: now_ns, grounded: self.stage.counted("sequencer", "grounded") });
        self.questions += 1;
        self.session.membership(self.questions);
    }
}
