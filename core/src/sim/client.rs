//! A simulated client: the production session, driven by writers, subscribers with compute time, and askers of questions.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use antelog_protocol::client::{Event, Scope};
use antelog_protocol::{Change, ChangeError, ClientId, Ordering, Position, Refusal, ShardId};

use super::control::{Calls, SimDialer};
use super::knobs::Knobs;
use super::network::{Shared, SimTransport};
use super::oracle::{Answer, Oracle, Violation, client_id, fill};
use super::overlay::{LinkOf, Overlay};
use super::rng::Rng;
use super::trace::Kind;
use super::workload::Writer;
use crate::client::session::{AppendError, Session, SessionOptions};
use crate::client::{Membership, Record, SessionHandler, Slot, SubscriptionId};

/// Reasons for the end of a connection that are nobody's fault.
const EXPECTED_ENDS: [&str; 3] = ["the node closed the connection", "the connection broke", "nobody answers"];

/// Questions of one client that wait at a time.
const QUESTIONS_MAX: usize = 64;

/// What all clients share.
pub(super) struct Common<O: Overlay> {
    pub(super) knobs: Rc<Knobs>,
    pub(super) network: Shared,
    pub(super) overlay: Rc<RefCell<O>>,
    pub(super) oracle: Rc<RefCell<Oracle>>,
    pub(super) calls: Rc<RefCell<Calls<LinkOf<O>>>>,
    /// Sessions so far.
    pub(super) sessions: std::cell::Cell<u32>,
}

struct Subscription {
    id: SubscriptionId,
    /// Its number at the oracle.
    number: usize,
    scope: Scope,
    /// It computes until then.
    busy_ns: u64,
    ended_at: Option<u64>,
}

/// What the session's handler needs: everything but the session.
struct Desk<O: Overlay> {
    common: Rc<Common<O>>,
    session: u32,
    now_ns: u64,
    compute_ns: u64,
    rng: Rng,
    subscriptions: Vec<Subscription>,
    /// Records answered in this cycle.
    answered: Vec<u32>,
    /// Reads that wait, by token.
    reads: BTreeMap<u64, u64>,
    /// Tails that wait, with the highest position acknowledged when they were asked.
    tails: BTreeMap<u64, Option<u64>>,
    /// Changes that wait, by token, and how many were made and refused.
    changes: BTreeSet<u64>,
    changed: [u64; 2],
    /// A subscriber was not ready until then.
    blocked_ns: u64,
}

/// See the module's text.
pub(super) struct SimClient<O: Overlay> {
    common: Rc<Common<O>>,
    thread: usize,
    session: Session<O::Transport, SimDialer<LinkOf<O>>>,
    desk: Desk<O>,
    writers: Vec<Writer>,
    rng: Rng,
    /// Subscriptions to make: when, and what of.
    planned: Vec<(u64, Scope, u64)>,
    read_at_ns: u64,
    tail_at_ns: u64,
    new_session_at_ns: u64,
    change_at_ns: u64,
    next_token: u64,
    buffer: Vec<u8>,
    /// Appends that met a full ring or too many outstanding ones.
    pub(super) pushed_back: [u64; 2],
    /// Subscriptions made after the order log had begun.
    pub(super) late_followers: u64,
}

fn new_session<O: Overlay>(
    common: &Rc<Common<O>>,
    thread: usize,
) -> (u32, Session<O::Transport, SimDialer<LinkOf<O>>>) {
    let number = common.sessions.get();
    common.sessions.set(number + 1);
    let knobs = &common.knobs;
    let client = ClientId(client_id(number));
    let gates = knobs.processes;
    let first = number as u16 % gates;
    let seeds = (0..gates.min(2)).map(|n| format!("gate-{}", (first + n) % gates)).collect();
    let mut options = SessionOptions::new(client, seeds);
    options.ring_bytes = knobs.ring_bytes;
    options.stream_credit_bytes = knobs.credit_bytes;
    options.backoff_min_ns = knobs.backoff_ns;
    options.backoff_max_ns = knobs.backoff_ns * 8;
    options.free_cuts_max = knobs.free_cuts_max;
    options.gates_max = gates;
    options.random_seed = knobs.seed ^ u64::from(number) << 40;
    let carrier = SimTransport::new(&common.network, thread, gates);
    let transport = common.overlay.borrow_mut().transport(carrier, thread, gates);
    let dialer = SimDialer::new(&common.network, &common.calls, thread, client, options.ring_bytes);
    common.network.borrow_mut().note(Kind::Session, thread as u64, number.into(), 0);
    let session =
        Session::new(transport, dialer, options).unwrap_or_else(|error| panic!("the knobs do not fit: {error}"));
    (number, session)
}

impl<O: Overlay> SimClient<O> {
    /// Client number `number`, whose thread is `thread`.
    pub(super) fn new(common: &Rc<Common<O>>, number: u16, thread: usize) -> SimClient<O> {
        let knobs = &common.knobs;
        let mut rng = Rng::new(knobs.seed, 100 + u64::from(number));
        let (session_number, session) = new_session(common, thread);
        let writers = rng.range(u64::from(number == 0), 2);
        let all = u64::from(knobs.load.clients) * 3 / 2;
        let load_ns = knobs.load.load_ns;
        let compute_ns = if knobs.load.compute_ns == 0 { 0 } else { rng.below(knobs.load.compute_ns) };
        let subscriptions = rng.below(u64::from(knobs.load.subscriptions) + 1);
        let mut client = SimClient {
            common: common.clone(),
            thread,
            session,
            desk: Desk {
                common: common.clone(),
                session: session_number,
                now_ns: 0,
                compute_ns,
                rng: Rng::new(knobs.seed, 200 + u64::from(number)),
                subscriptions: Vec::new(),
                answered: Vec::new(),
                reads: BTreeMap::new(),
                tails: BTreeMap::new(),
                changes: BTreeSet::new(),
                changed: [0; 2],
                blocked_ns: u64::MAX,
            },
            writers: (0..writers).map(|_| Writer::draw(knobs, &mut rng, all.max(1))).collect(),
            planned: Vec::new(),
            read_at_ns: knobs.load.read_every_ns.map_or(u64::MAX, |every| rng.gap(every)),
            tail_at_ns: knobs.load.tail_every_ns.map_or(u64::MAX, |every| rng.gap(every)),
            new_session_at_ns: knobs.faults.new_session_every_ns.map_or(u64::MAX, |every| rng.gap(every)),
            // One operator is enough.
            change_at_ns: match knobs.policy.change_every_ns {
                Some(every) if number == 0 => rng.gap(every),
                _ => u64::MAX,
            },
            next_token: 0,
            buffer: Vec::new(),
            pushed_back: [0; 2],
            late_followers: 0,
            rng,
        };
        for n in 0..subscriptions.max(u64::from(number == 0)) {
            let at_ns = if n == 0 { 0 } else { client.rng.below(load_ns) };
            client.plan_subscription(at_ns);
        }
        client
    }

    fn plan_subscription(&mut self, at_ns: u64) {
        let shard = ShardId(self.rng.below(self.common.knobs.shards.into()) as u16);
        let scope = if self.rng.percent(60) { Scope::All } else { Scope::Shard(shard) };
        // In hundredths of what is bound by then.
        let from = self.rng.pick(&[0, 0, 50, 100]);
        self.planned.push((at_ns, scope, from));
    }

    /// One duty cycle; returns the work done.
    pub(super) fn step(&mut self, now_ns: u64) -> usize {
        self.desk.now_ns = now_ns;
        self.desk.blocked_ns = u64::MAX;
        let mut work = 0;
        if now_ns >= self.new_session_at_ns {
            self.begin_anew(now_ns);
            work += 1;
        }
        work += self.subscribe(now_ns) + self.ask(now_ns) + self.operate(now_ns) + self.write(now_ns);
        work += self.session.duty_cycle(now_ns, &mut self.desk);
        for record in std::mem::take(&mut self.desk.answered) {
            for writer in &mut self.writers {
                writer.answered(now_ns, record);
            }
        }
        self.resubscribe(now_ns);
        work
    }

    /// When `step` must run even if nothing arrives.
    pub(super) fn deadline_ns(&self) -> Option<u64> {
        let own = [self.read_at_ns, self.tail_at_ns, self.new_session_at_ns, self.change_at_ns, self.desk.blocked_ns];
        let planned = self.planned.iter().map(|p| p.0);
        let writers = self.writers.iter().map(Writer::at_ns);
        let all = own.into_iter().chain(planned).chain(writers).chain(self.session.deadline_ns());
        all.min().filter(|at| *at < u64::MAX / 2)
    }

    pub(super) fn prepare_wait(&mut self) -> bool {
        self.session.prepare_wait()
    }

    /// Drops the session with all that it waits for, and goes on with another.
    fn begin_anew(&mut self, now_ns: u64) {
        let every = self.common.knobs.faults.new_session_every_ns.unwrap_or(u64::MAX / 4);
        self.new_session_at_ns = now_ns + self.rng.gap(every) + 1;
        let (number, session) = new_session(&self.common, self.thread);
        self.session = session;
        let mut oracle = self.common.oracle.borrow_mut();
        oracle.abandoned(self.desk.session);
        for subscription in self.desk.subscriptions.drain(..) {
            oracle.unsubscribe(subscription.number);
        }
        drop(oracle);
        self.desk.session = number;
        self.desk.reads.clear();
        self.desk.tails.clear();
        self.desk.changes.clear();
        for writer in &mut self.writers {
            writer.forget(now_ns);
        }
        self.plan_subscription(now_ns);
    }

    fn subscribe(&mut self, now_ns: u64) -> usize {
        let mut work = 0;
        while let Some(at) = self.planned.iter().position(|p| p.0 <= now_ns) {
            let (_, scope, percent) = self.planned.swap_remove(at);
            let mut oracle = self.common.oracle.borrow_mut();
            let from = oracle.committed_position() * percent / 100;
            self.late_followers += u64::from(oracle.order_entries() > 1);
            let id = self.session.subscribe(scope, Position(from));
            let number = oracle.subscribe(scope, from);
            self.desk.subscriptions.push(Subscription { id, number, scope, busy_ns: 0, ended_at: None });
            work += 1;
        }
        work
    }

    /// Subscribers that were too slow for what the log keeps go on from where it begins.
    fn resubscribe(&mut self, now_ns: u64) {
        for at in 0..self.desk.subscriptions.len() {
            let Some(head) = self.desk.subscriptions[at].ended_at.take() else { continue };
            let scope = self.desk.subscriptions[at].scope;
            let id = self.session.subscribe(scope, Position(head));
            let number = self.common.oracle.borrow_mut().subscribe(scope, head);
            self.desk.subscriptions[at] = Subscription { id, number, scope, busy_ns: now_ns, ended_at: None };
        }
    }

    fn ask(&mut self, now_ns: u64) -> usize {
        let mut work = 0;
        let waiting = self.desk.reads.len() + self.desk.tails.len();
        if now_ns >= self.read_at_ns {
            self.read_at_ns = now_ns + self.rng.gap(self.common.knobs.load.read_every_ns.unwrap_or(u64::MAX / 4)) + 1;
            let committed = self.common.oracle.borrow().committed_position();
            if waiting < QUESTIONS_MAX {
                // Some are asked for before they are bound.
                let position = self.rng.below(committed + committed / 16 + 2);
                self.read(position);
                work += 1;
            }
        }
        if now_ns >= self.tail_at_ns {
            self.tail_at_ns = now_ns + self.rng.gap(self.common.knobs.load.tail_every_ns.unwrap_or(u64::MAX / 4)) + 1;
            if waiting < QUESTIONS_MAX {
                self.ask_tail();
                work += 1;
            }
        }
        work
    }

    /// Asks for a change of membership or ordering, without waiting for the one before.
    fn operate(&mut self, now_ns: u64) -> usize {
        if now_ns < self.change_at_ns {
            return 0;
        }
        let knobs = &self.common.knobs;
        self.change_at_ns = now_ns + self.rng.gap(knobs.policy.change_every_ns.unwrap_or(u64::MAX / 4)) + 1;
        // Some of these shards do not exist.
        let known = u64::from(knobs.shards) + u64::from(self.rng.percent(50));
        let shard = ShardId(self.rng.below(known) as u16);
        let orderings = [Ordering::Fixed, Ordering::Auto, Ordering::FreeEvent, Ordering::FreeTick];
        let change = match self.rng.below(4) {
            0 => Change::Ordering(self.rng.pick(&orderings)),
            1 => Change::Leave(shard),
            _ => Change::Join(shard),
        };
        self.desk.changes.insert(self.next_token);
        self.session.change(self.next_token, change);
        self.next_token += 1;
        1
    }

    fn ask_tail(&mut self) {
        let floor = self.common.oracle.borrow().floor();
        self.desk.tails.insert(self.next_token, floor);
        self.session.tail(self.next_token);
        self.next_token += 1;
    }

    fn read(&mut self, position: u64) {
        self.desk.reads.insert(self.next_token, position);
        self.session.read(self.next_token, Position(position));
        self.next_token += 1;
    }

    fn write(&mut self, now_ns: u64) -> usize {
        let mut work = 0;
        let SimClient { writers, rng, session, common, desk, buffer, pushed_back, .. } = self;
        for writer in writers {
            while writer.due(now_ns, rng) {
                let (shard, len) = writer.choose(rng);
                let mut oracle = common.oracle.borrow_mut();
                let record = oracle.next_record();
                buffer.resize(len, 0);
                fill(record, buffer);
                match session.append(ShardId(shard), buffer) {
                    Ok(seq) => {
                        oracle.appended(desk.session, shard, seq, len);
                        common.network.borrow_mut().note(Kind::Append, record.into(), shard.into(), seq);
                        writer.taken(record);
                        work += 1;
                    }
                    Err(AppendError::NotConnectedYet) => writer.pushed_back(now_ns + 100_000),
                    Err(AppendError::Lost(_)) => writer.pushed_back(now_ns + 100_000),
                    Err(AppendError::Full) => {
                        let many = session.outstanding() >= common.knobs.outstanding_max as usize;
                        pushed_back[usize::from(many)] += 1;
                        writer.pushed_back(now_ns + 50_000);
                    }
                    Err(error) => {
                        oracle.complain(Violation::new("append", format!("shard {shard}, {len} bytes: {error}")));
                        writer.end();
                    }
                }
            }
        }
        work
    }

    /// The load is over: nothing new, and what can never be answered is taken back. The first client reads what was
    /// acknowledged and everything from the start.
    pub(super) fn drain(&mut self, now_ns: u64, verify: bool) {
        for writer in &mut self.writers {
            writer.end();
        }
        self.planned.clear();
        self.desk.compute_ns = 0;
        (self.read_at_ns, self.tail_at_ns, self.new_session_at_ns) = (u64::MAX, u64::MAX, u64::MAX);
        self.change_at_ns = u64::MAX;
        // One that a later one undid is never seen done.
        for token in std::mem::take(&mut self.desk.changes) {
            self.session.cancel(token);
        }
        if verify {
            self.planned.push((now_ns, Scope::All, 0));
            self.ask_tail();
        }
    }

    /// Everything is settled: reads positions back.
    pub(super) fn read_back(&mut self, positions: &[u64]) {
        for position in positions {
            self.read(*position);
        }
    }

    /// Takes back the reads of positions that nothing will bind any more.
    pub(super) fn give_up(&mut self, committed: u64) {
        let beyond = self.desk.reads.iter().filter(|(_, position)| **position >= committed);
        let tokens: Vec<u64> = beyond.map(|(token, _)| *token).collect();
        for token in tokens {
            self.session.cancel(token);
            self.desk.reads.remove(&token);
        }
    }

    /// Changes of membership or ordering that were made and refused.
    pub(super) fn changed(&self) -> [u64; 2] {
        self.desk.changed
    }

    /// What the client still waits for.
    pub(super) fn waits_for(&self) -> Option<String> {
        let (appends, reads, tails) = (self.session.outstanding(), self.desk.reads.len(), self.desk.tails.len());
        let session = self.desk.session;
        (appends + reads + tails + self.planned.len() > 0)
            .then(|| format!("session {session} waits for {appends} appends, {reads} reads and {tails} tails"))
    }
}

impl<O: Overlay> Desk<O> {
    fn note(&self, kind: Kind, a: u64, b: u64, c: u64) {
        self.common.network.borrow_mut().note(kind, a, b, c);
    }

    fn subscription(&mut self, id: SubscriptionId) -> Option<&mut Subscription> {
        self.subscriptions.iter_mut().find(|s| s.id == id)
    }
}

impl<O: Overlay> SessionHandler for Desk<O> {
    fn on_acknowledged(&mut self, shard: ShardId, seq: u64, position: Position) {
        let record = self.common.oracle.borrow_mut().acknowledged(self.session, shard.0, seq, position.0);
        self.note(Kind::Acknowledged, record.map_or(u64::MAX, u64::from), position.0, 0);
        self.answered.extend(record);
    }

    fn on_refused(&mut self, shard: ShardId, seq: u64, refusal: Refusal) {
        let record = self.common.oracle.borrow_mut().refused(self.session, shard.0, seq, refusal);
        self.note(Kind::Refused, record.map_or(u64::MAX, u64::from), shard.0.into(), 0);
        self.answered.extend(record);
    }

    fn on_unknown(&mut self, shard: ShardId, seq: u64) {
        let record = self.common.oracle.borrow_mut().unknown(self.session, shard.0, seq);
        self.note(Kind::Refused, record.map_or(u64::MAX, u64::from), shard.0.into(), 1);
        self.answered.extend(record);
    }

    fn on_event(&mut self, id: SubscriptionId, event: Event<Record>) {
        let (now_ns, compute_ns) = (self.now_ns, self.rng.below(2 * self.compute_ns + 1));
        let Some(subscription) = self.subscription(id) else { return };
        let number = subscription.number;
        if let Event::Deliver { .. } = &event {
            subscription.busy_ns = now_ns + compute_ns;
        }
        self.common.oracle.borrow_mut().event(number, &event);
        match event {
            Event::Deliver { position, speculative, .. } => {
                self.note(Kind::Deliver, number as u64, position.0, speculative.into());
            }
            Event::Confirm { upto } => self.note(Kind::Confirm, number as u64, upto.0, 0),
            Event::Fail { .. } | Event::Unavailable { .. } => {}
        }
    }

    fn on_trimmed(&mut self, id: SubscriptionId, head: Position) {
        let Some(subscription) = self.subscription(id) else { return };
        subscription.ended_at = Some(head.0);
        let number = subscription.number;
        self.common.oracle.borrow_mut().trimmed(number, head.0);
    }

    fn on_read(&mut self, token: u64, position: Position, slot: Slot) {
        if self.reads.remove(&token) != Some(position.0) {
            let what = format!("a read of {position} is answered that nobody asked for");
            self.common.oracle.borrow_mut().complain(Violation::new("read", what));
        }
        let answer = match &slot {
            Slot::Record(record) => Answer::Record(record),
            Slot::NoOp => Answer::NoOp,
            Slot::Trimmed(head) => Answer::Trimmed(head.0),
            Slot::Unavailable => Answer::Unavailable,
        };
        self.common.oracle.borrow_mut().read(position.0, &answer);
        self.note(Kind::Read, position.0, 0, 0);
    }

    fn on_tail(&mut self, token: u64, position: Position) {
        if let Some(floor) = self.tails.remove(&token) {
            self.common.oracle.borrow_mut().tail(floor, position.0);
        }
        self.note(Kind::Tail, position.0, 0, 0);
    }

    fn on_membership(&mut self, token: u64, answer: Result<Membership, ChangeError>) {
        if !self.changes.remove(&token) {
            let what = "a change is answered that nobody asked for".to_owned();
            self.common.oracle.borrow_mut().complain(Violation::new("change", what));
        }
        self.changed[usize::from(answer.is_err())] += 1;
        self.note(Kind::Change, token, answer.is_ok().into(), 0);
    }

    fn on_connection(&mut self, address: &str, error: Option<&str>) {
        let now_ns = self.now_ns;
        let line = format!("session {} {address}: {}", self.session, error.unwrap_or("connected"));
        self.common.network.borrow_mut().trace.say(now_ns, &line);
        match error {
            None => self.common.oracle.borrow_mut().reconnected(self.session),
            Some(error) if EXPECTED_ENDS.iter().any(|expected| error.starts_with(expected)) => {}
            Some(_) => self.common.oracle.borrow_mut().complain(Violation::new("session", line)),
        }
    }

    fn on_unknown_shard(&mut self, _: SubscriptionId, shard: ShardId) {
        let what = format!("shard {shard} is unknown to session {}", self.session);
        self.common.oracle.borrow_mut().complain(Violation::new("session", what));
    }

    fn ready(&mut self, id: SubscriptionId) -> bool {
        let now_ns = self.now_ns;
        let busy_ns = self.subscription(id).map_or(0, |s| s.busy_ns);
        if busy_ns > now_ns {
            self.blocked_ns = self.blocked_ns.min(busy_ns);
        }
        busy_ns <= now_ns
    }
}
