//! Reads, tails and changes: questions that any gate answers, asked again until one does.
//!
//! A change and a question for the membership are answered twice: the gate says from which index of the order log on the
//! answer shows, and then the order stream shows it.

use std::collections::{BTreeMap, VecDeque};

use antelog_protocol::ledger::Ledger;
use antelog_protocol::wire::change::ChangeOutcome;
use antelog_protocol::wire::session::{ReadResult, Request};
use antelog_protocol::{Change, Ordering, Position, ShardId};

use super::appends::Appends;
use super::gate::Gate;
use crate::client::{Membership, SessionHandler, Slot};

/// A read that was sent on this often runs in circles.
const HOPS_MAX: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read(Position),
    Tail,
    Change(Change),
    Membership,
}

#[derive(Debug)]
struct Question {
    /// The owner's name for it; on the wire goes a number of ours, so owners may choose freely.
    token: u64,
    kind: Kind,
    /// A gate said that this shard holds the answer.
    shard: Option<ShardId>,
    /// Where it was sent.
    gate: Option<usize>,
    hops: u32,
    /// The order log shows the answer from this index on.
    index: Option<u64>,
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
}

impl Questions {
    pub(super) fn len(&self) -> usize {
        self.open.len()
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

    /// Whether the order stream must be followed to answer.
    pub(super) fn follow(&self) -> bool {
        self.followed > 0
    }

    fn ask(&mut self, token: u64, kind: Kind, shard: Option<ShardId>) {
        self.followed += usize::from(kind.is_followed());
        self.open.insert(self.next, Question { token, kind, shard, gate: None, hops: 0, index: None });
        self.unsent.push_back(self.next);
        self.next += 1;
    }

    /// Forgets what was asked under the owner's token.
    pub(super) fn cancel(&mut self, token: u64) {
        for (number, question) in self.open.iter().filter(|(_, q)| q.token == token) {
            if let (Some(gate), Kind::Read(_)) = (question.gate, question.kind) {
                self.withdrawn.push_back((gate, *number));
            }
        }
        self.open.retain(|_, q| q.token != token);
        self.followed = self.open.values().filter(|q| q.kind.is_followed()).count();
    }

    /// What was asked of this gate is asked again.
    pub(super) fn on_down(&mut self, gate: usize) {
        for (number, question) in self.open.iter_mut().filter(|(_, q)| q.gate == Some(gate)) {
            question.gate = None;
            question.hops = 0;
            self.unsent.push_back(*number);
        }
    }

    /// Sends what can be sent: to the gate of the shard in question, otherwise to any that is connected.
    pub(super) fn pump(&mut self, gates: &mut [Gate], appends: &Appends) -> usize {
        let mut work = 0;
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
            let gate = match question.shard.and_then(|shard| appends.gate_of(shard)) {
                Some(gate) => Some(gate),
                None => gates.iter().position(Gate::up).or(if gates.is_empty() { None } else { Some(0) }),
            };
            let request = match question.kind {
                Kind::Read(position) => Request::Read { token: number, position },
                Kind::Tail | Kind::Membership => Request::Tail { token: number },
                Kind::Change(change) => Request::Change { token: number, change },
            };
            let sent = gate.filter(|&gate| {
                gates[gate].wanted = true;
                gates[gate].push(&request).is_ok()
            });
            match sent {
                Some(gate) => {
                    question.gate = Some(gate);
                    work += 1;
                }
                None => self.unsent.push_back(number),
            }
        }
        work
    }

    pub(super) fn on_read(
        &mut self,
        appends: &Appends,
        number: u64,
        result: ReadResult<'_>,
        handler: &mut impl SessionHandler,
    ) -> Result<(), String> {
        let Some(question) = self.open.get_mut(&number) else { return Ok(()) };
        let Kind::Read(position) = question.kind else {
            return Err("it answers a question for the tail with a record".into());
        };
        let slot = match result {
            ReadResult::Record(record) => Slot::Record(record.into()),
            ReadResult::NoOp => Slot::NoOp,
            ReadResult::Trimmed(head) => Slot::Trimmed(head),
            ReadResult::Elsewhere(shard) => {
                question.hops += 1;
                if question.hops > HOPS_MAX || appends.gate_of(shard).is_none() {
                    return Err(format!("it sends a read of position {position} on to shard {shard} in vain"));
                }
                question.shard = Some(shard);
                question.gate = None;
                self.unsent.push_back(number);
                return Ok(());
            }
        };
        let token = question.token;
        self.open.remove(&number);
        handler.on_read(token, position, slot);
        Ok(())
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
                handler.on_tail(token, position);
            }
            Kind::Membership => {
                (question.index, question.gate) = (Some(index), None);
                self.on_moved(ledger, handler);
            }
            Kind::Read(_) | Kind::Change(_) => return Err("it answers another question with the tail".into()),
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
            let due = question.index.is_some_and(|index| index <= applied) && question.kind.shown_by(&membership);
            if due {
                handler.on_membership(question.token, Ok(membership.clone()));
            }
            !due
        });
        self.followed -= before - self.open.len();
    }
}

impl Kind {
    /// Whether the order stream shows the answer.
    fn is_followed(self) -> bool {
        matches!(self, Kind::Change(_) | Kind::Membership)
    }

    /// Whether what was asked for is so.
    fn shown_by(self, membership: &Membership) -> bool {
        match self {
            Kind::Change(Change::Join(shard)) => membership.member(shard).is_some_and(|m| m.open),
            Kind::Change(Change::Leave(shard)) => membership.member(shard).is_none_or(|m| !m.open && m.quota == 0),
            // Its windows may be of either mode.
            Kind::Change(Change::Ordering(Ordering::Auto)) | Kind::Membership => true,
            Kind::Change(Change::Ordering(ordering)) => membership.mode == ordering.window_mode(),
            Kind::Read(_) | Kind::Tail => false,
        }
    }
}
