//! Reads, tails, changes and outcomes: questions, asked again until a gate answers.
//!
//! A change and a question for the membership are answered twice: the gate says from which index of the order log on the
//! answer shows, and then the order stream shows it.

use std::collections::{BTreeMap, VecDeque};

use antelog_protocol::ledger::Ledger;
use antelog_protocol::wire::change::ChangeOutcome;
use antelog_protocol::wire::session::{ReadResult, Request};
use antelog_protocol::{Change, ClientId, Ordering, Outcome, Position, ShardId};

use super::appends::{Appends, Fate};
use super::gate::Gate;
use super::routes::Routes;
use crate::client::{Membership, SessionHandler, Slot};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read(Position),
    Tail,
    Change(Change),
    Membership,
    /// What became of an append.
    Outcome {
        shard: ShardId,
        client: ClientId,
        seq: u64,
    },
    /// The session's own question which number a shard that has returned expects; this and later ones are in doubt.
    Resolve {
        shard: ShardId,
        first: u64,
    },
}

#[derive(Debug)]
struct Question {
    /// The owner's name for it; on the wire goes a number of ours, so owners may choose freely.
    token: u64,
    kind: Kind,
    /// A gate said, or the ledger says, that this shard holds the answer.
    shard: Option<ShardId>,
    /// Where it was sent.
    gate: Option<usize>,
    /// Gates in a row that sent it on, and not before when it is sent again.
    hops: u32,
    retry_ns: u64,
    /// The order log shows the answer from this index on.
    index: Option<u64>,
}

/// What the rest of a session tells the questions.
pub(super) struct Known<'a> {
    pub(super) routes: &'a Routes,
    pub(super) appends: &'a Appends,
    pub(super) relay: Option<usize>,
    pub(super) client: ClientId,
    pub(super) now_ns: u64,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Questions {
    next: u64,
    open: BTreeMap<u64, Question>,
    unsent: VecDeque<u64>,
    /// Reads to be withdrawn: the gate asked, and the number.
    withdrawn: VecDeque<(usize, u64)>,
    /// Open questions that the order stream answers.
    followed: usize,
    /// Open questions of the session's own.
    own: usize,
    /// Answers so far.
    pub(super) answered: u64,
}

impl Questions {
    /// Questions of the owner without an answer.
    pub(super) fn len(&self) -> usize {
        self.open.len() - self.own
    }

    pub(super) fn read(&mut self, token: u64, position: Position, shard: Option<ShardId>) {
        self.ask(token, Kind::Read(position), shard);
    }

    pub(super) fn tail(&mut self, token: u64) {
        self.ask(token, Kind::Tail, None);
    }

    /// Asks for a change, or for the membership as it is.
    pub(super) fn change(&mut self, token: u64, change: Option<Change>) {
        self.ask(token, change.map_or(Kind::Membership, Kind::Change), None);
    }

    /// Asks what became of an append.
    pub(super) fn outcome(&mut self, token: u64, shard: ShardId, client: ClientId, seq: u64) {
        self.ask(token, Kind::Outcome { shard, client, seq }, Some(shard));
    }

    /// Asks which number of the session a shard expects.
    pub(super) fn resolve(&mut self, shard: ShardId, first: u64) {
        self.own += 1;
        self.ask(0, Kind::Resolve { shard, first }, Some(shard));
    }

    /// Whether the order stream must be followed to answer.
    pub(super) fn follow(&self) -> bool {
        self.followed > 0
    }

    fn ask(&mut self, token: u64, kind: Kind, shard: Option<ShardId>) {
        self.followed += usize::from(kind.is_followed());
        self.open.insert(self.next, Question { token, kind, shard, gate: None, hops: 0, retry_ns: 0, index: None });
        self.unsent.push_back(self.next);
        self.next += 1;
    }

    /// Forgets what was asked under the owner's token.
    pub(super) fn cancel(&mut self, token: u64) {
        for (number, question) in self.open.iter().filter(|(_, q)| q.is_named(token)) {
            if let (Some(gate), Kind::Read(_)) = (question.gate, question.kind) {
                self.withdrawn.push_back((gate, *number));
            }
        }
        self.open.retain(|_, q| !q.is_named(token));
        self.followed = self.open.values().filter(|q| q.kind.is_followed()).count();
    }

    /// What was asked of this gate is asked again. True if anything was.
    pub(super) fn on_down(&mut self, gate: usize) -> bool {
        let before = self.unsent.len();
        for (number, question) in self.open.iter_mut().filter(|(_, q)| q.gate == Some(gate)) {
            (question.gate, question.hops, question.retry_ns) = (None, 0, 0);
            self.unsent.push_back(*number);
        }
        self.unsent.len() > before
    }

    /// Shards may be served elsewhere than before: there it is asked again.
    pub(super) fn on_routes(&mut self, routes: &Routes) {
        for (number, question) in &mut self.open {
            let shard = question.shard.filter(|shard| routes.has_changed(*shard));
            let Some(to) = shard.and_then(|shard| routes.gate_of(shard)) else { continue };
            question.retry_ns = 0;
            let Some(gate) = question.gate.filter(|gate| *gate != to && question.index.is_none()) else { continue };
            if let Kind::Read(_) = question.kind {
                self.withdrawn.push_back((gate, *number));
            }
            (question.gate, question.hops) = (None, 0);
            self.unsent.push_back(*number);
        }
    }

    /// Sends what can be sent: to the gate of the shard in question, otherwise to the relay or any that is connected.
    /// Returns how much was sent and when to look again at the latest.
    pub(super) fn pump(
        &mut self,
        gates: &mut [Gate],
        known: &Known<'_>,
        handler: &mut impl SessionHandler,
    ) -> (usize, u64) {
        let (mut work, mut next_ns) = (0, u64::MAX);
        while let Some(&(gate, token)) = self.withdrawn.front() {
            // A gate that is not connected has forgotten it already.
            if gates.get_mut(gate).is_some_and(|g| g.up() && g.push(&Request::Cancel { token }).is_err()) {
                break;
            }
            self.withdrawn.pop_front();
            work += 1;
        }
        for _ in 0..self.unsent.len() {
            let Some(number) = self.unsent.pop_front() else { break };
            let Some(question) = self.open.get_mut(&number) else { continue };
            if let Some(outcome) = question.answer_known(known) {
                let token = question.token;
                self.open.remove(&number);
                handler.on_outcome(token, outcome);
                work += 1;
                continue;
            }
            let waits = question.retry_ns > known.now_ns;
            if waits {
                next_ns = next_ns.min(question.retry_ns);
            }
            if waits || question.is_held(known) || !question.send(number, gates, known) {
                self.unsent.push_back(number);
            } else {
                work += 1;
            }
        }
        (work, next_ns)
    }

    /// The answer to a read. True: it was no answer, but the name of another shard.
    pub(super) fn on_read(
        &mut self,
        (routes, gate): (&Routes, usize),
        number: u64,
        result: ReadResult<'_>,
        pause: impl Fn(u32) -> u64,
        handler: &mut impl SessionHandler,
    ) -> Result<bool, String> {
        let Some(question) = self.open.get_mut(&number) else { return Ok(false) };
        let Kind::Read(position) = question.kind else {
            return Err("it answers another question with a record".into());
        };
        let slot = match result {
            ReadResult::Record(record) => Slot::Record(record.into()),
            ReadResult::NoOp => Slot::NoOp,
            ReadResult::Trimmed(head) => Slot::Trimmed(head),
            ReadResult::Unavailable => Slot::Unavailable,
            ReadResult::Elsewhere(shard) => {
                let Some(to) = routes.gate_of(shard) else {
                    return Err(format!(
                        "it sends a read of position {position} on to shard {shard}, which there is not"
                    ));
                };
                if question.gate != Some(gate) {
                    return Ok(false); // It was asked elsewhere meanwhile.
                }
                question.shard = Some(shard);
                // The gate that is to serve it says that it does not: one of us is behind in the order stream.
                question.send_on(to == gate, pause);
                self.unsent.push_back(number);
                return Ok(true);
            }
        };
        let token = question.token;
        self.open.remove(&number);
        self.answered += 1;
        handler.on_read(token, position, slot);
        Ok(false)
    }

    /// The answer to what became of an append. True: the gate could not say.
    pub(super) fn on_outcome(
        &mut self,
        gate: usize,
        number: u64,
        (outcome, next_seq): (Outcome, u64),
        appends: &mut Appends,
        pause: impl Fn(u32) -> u64,
        handler: &mut impl SessionHandler,
    ) -> Result<bool, String> {
        let Some(question) = self.open.get_mut(&number) else { return Ok(false) };
        let (token, kind) = (question.token, question.kind);
        match (kind, outcome) {
            (Kind::Outcome { .. } | Kind::Resolve { .. }, Outcome::NotHere)
            | (Kind::Outcome { .. }, Outcome::Waiting) => {
                if question.gate == Some(gate) {
                    question.send_on(true, pause);
                    self.unsent.push_back(number);
                }
                return Ok(outcome == Outcome::NotHere);
            }
            (Kind::Outcome { .. }, _) => {
                self.open.remove(&number);
                self.answered += 1;
                handler.on_outcome(token, outcome);
            }
            (Kind::Resolve { shard, first }, _) => {
                self.open.remove(&number);
                self.own -= 1;
                appends.resolve(shard, first, outcome, next_seq)?;
            }
            _ => return Err("it answers another question with an append's outcome".into()),
        }
        Ok(false)
    }

    pub(super) fn on_tail(
        &mut self,
        ledger: &Ledger,
        number: u64,
        (position, index): (Position, u64),
        handler: &mut impl SessionHandler,
    ) -> Result<(), String> {
        let Some(question) = self.open.get_mut(&number) else { return Ok(()) };
        match question.kind {
            Kind::Tail => {
                let token = question.token;
                self.open.remove(&number);
                self.answered += 1;
                handler.on_tail(token, position);
            }
            Kind::Membership => {
                (question.index, question.gate) = (Some(index), None);
                self.on_moved(ledger, handler);
            }
            _ => return Err("it answers another question with the tail".into()),
        }
        Ok(())
    }

    pub(super) fn on_change(
        &mut self,
        ledger: &Ledger,
        number: u64,
        outcome: ChangeOutcome,
        handler: &mut impl SessionHandler,
    ) -> Result<(), String> {
        let Some(question) = self.open.get_mut(&number) else { return Ok(()) };
        if !matches!(question.kind, Kind::Change(_)) {
            return Err("it answers a question that asks for no change with one".into());
        }
        match outcome {
            Ok(index) => {
                (question.index, question.gate) = (Some(index), None);
                self.on_moved(ledger, handler);
            }
            Err(error) => {
                let token = question.token;
                self.open.remove(&number);
                self.followed -= 1;
                self.answered += 1;
                handler.on_membership(token, Err(error));
            }
        }
        Ok(())
    }

    /// The ledger moved: it may show what was asked for.
    #[inline]
    pub(super) fn on_moved(&mut self, ledger: &Ledger, handler: &mut impl SessionHandler) {
        if self.followed > 0 {
            self.answer_followed(ledger, handler);
        }
    }

    fn answer_followed(&mut self, ledger: &Ledger, handler: &mut impl SessionHandler) {
        let Some(membership) = Membership::of(ledger) else { return };
        let applied = ledger.applied_index();
        let before = self.open.len();
        self.open.retain(|_, question| {
            let due =
                question.index.is_some_and(|index| index <= applied) && question.kind.shown_by(&membership, ledger);
            if due {
                handler.on_membership(question.token, Ok(membership.clone()));
            }
            !due
        });
        self.followed -= before - self.open.len();
        self.answered += (before - self.open.len()) as u64;
    }
}

impl Question {
    /// Whether it is the owner's, under this name.
    fn is_named(&self, token: u64) -> bool {
        self.token == token && !matches!(self.kind, Kind::Resolve { .. })
    }

    /// What became of an own append, when the session knows.
    fn answer_known(&self, known: &Known<'_>) -> Option<Outcome> {
        match self.kind {
            Kind::Outcome { shard, client, seq } if client == known.client => match known.appends.fate(shard, seq) {
                Fate::Known(outcome) => Some(outcome),
                Fate::Ask | Fate::Later => None,
            },
            _ => None,
        }
    }

    /// Whether nobody can answer at present: the shard is lost, or has to be asked something else first.
    fn is_held(&self, known: &Known<'_>) -> bool {
        match self.kind {
            Kind::Outcome { shard, client, seq } => {
                let later = || client == known.client && known.appends.fate(shard, seq) == Fate::Later;
                known.routes.is_lost(shard) || later()
            }
            Kind::Resolve { shard, .. } => known.routes.is_lost(shard),
            _ => false,
        }
    }

    fn send(&mut self, number: u64, gates: &mut [Gate], known: &Known<'_>) -> bool {
        let relay = known.relay.filter(|relay| gates[*relay].up());
        let gate = match self.shard.and_then(|shard| known.routes.gate_of(shard)).or(relay) {
            Some(gate) => gate,
            None if gates.is_empty() => return false,
            None => gates.iter().position(Gate::up).unwrap_or(0),
        };
        let request = match self.kind {
            Kind::Read(position) => Request::Read { token: number, position },
            Kind::Tail | Kind::Membership => Request::Tail { token: number },
            Kind::Change(change) => Request::Change { token: number, change },
            Kind::Outcome { shard, client, seq } => Request::Outcome { token: number, shard, client, seq },
            Kind::Resolve { shard, first } => {
                Request::Outcome { token: number, shard, client: known.client, seq: first }
            }
        };
        gates[gate].wanted = true;
        let sent = gates[gate].push(&request).is_ok();
        if sent {
            self.gate = Some(gate);
        }
        sent
    }

    /// Asked again, after a pause if whoever was asked is the right one, or this has gone on for long.
    fn send_on(&mut self, right: bool, pause: impl Fn(u32) -> u64) {
        let wait = right || self.hops > 2;
        self.retry_ns = if wait { pause(self.hops) } else { 0 };
        self.hops = self.hops.saturating_add(1);
        self.gate = None;
    }
}

impl Kind {
    /// Whether the order stream shows the answer.
    fn is_followed(self) -> bool {
        matches!(self, Kind::Change(_) | Kind::Membership)
    }

    /// Whether what was asked for is so.
    fn shown_by(self, membership: &Membership, ledger: &Ledger) -> bool {
        match self {
            Kind::Change(Change::Join(shard)) => membership.member(shard).is_some_and(|m| m.open),
            Kind::Change(Change::Leave(shard)) => membership.member(shard).is_none_or(|m| !m.open && m.quota == 0),
            // Its windows may be of either mode.
            Kind::Change(Change::Ordering(Ordering::Auto)) | Kind::Membership => true,
            Kind::Change(Change::Trim(upto)) => ledger.trimmed() >= upto,
            Kind::Change(Change::Ordering(ordering)) => membership.mode == ordering.window_mode(),
            _ => false,
        }
    }
}
