//! Reads and tails: questions that any gate answers, asked again until one does.

use std::collections::{BTreeMap, VecDeque};

use antelog_protocol::wire::session::{ReadResult, Request};
use antelog_protocol::{Position, ShardId};

use super::appends::Appends;
use super::gate::Gate;
use crate::client::{SessionHandler, Slot};

/// A read that was sent on this often runs in circles.
const HOPS_MAX: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read(Position),
    Tail,
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
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Questions {
    next: u64,
    open: BTreeMap<u64, Question>,
    unsent: VecDeque<u64>,
    /// Reads to be withdrawn: the gate asked, and the number.
    withdrawn: VecDeque<(usize, u64)>,
}

impl Questions {
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn read(&mut self, token: u64, position: Position, shard: Option<ShardId>) {
        self.ask(Question { token, kind: Kind::Read(position), shard, gate: None, hops: 0 });
    }

    pub(super) fn tail(&mut self, token: u64) {
        self.ask(Question { token, kind: Kind::Tail, shard: None, gate: None, hops: 0 });
    }

    fn ask(&mut self, question: Question) {
        self.open.insert(self.next, question);
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
                Kind::Tail => Request::Tail { token: number },
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
        number: u64,
        position: Position,
        handler: &mut impl SessionHandler,
    ) -> Result<(), String> {
        let Some(question) = self.open.get(&number) else { return Ok(()) };
        if question.kind != Kind::Tail {
            return Err("it answers a read with the tail".into());
        }
        let token = question.token;
        self.open.remove(&number);
        handler.on_tail(token, position);
        Ok(())
    }
}
