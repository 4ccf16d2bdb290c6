//! The replicas, as the sequencer sees them: what each has applied, and what is on its way to it.

use std::collections::VecDeque;

use antelog_protocol::ShardId;
use antelog_protocol::ledger::Ledger;
use antelog_protocol::sequencer::SequencerOut;
use antelog_protocol::wire::node::{NODE_MESSAGE_BYTES_MAX, NodeMessage, ORDER_HEAD_BYTES, Report, Target};
use antelog_protocol::wire::order::ORDER_ENTRY_BYTES_MAX;

use super::{Changed, ORDER_CREDIT, Replica, SequencerAgent};
use crate::transport::Transport;

/// A replica.
#[derive(Debug)]
pub(super) struct Follower {
    pub(super) replica: Replica,
    pub(super) connected: bool,
    /// Its newest report: a member that takes over knows by it what every replica has.
    pub(super) report: Option<Report>,
    /// Next index to send; known once the replica has reported what it applied.
    pub(super) next: Option<u64>,
    pub(super) applied: u64,
    /// A snapshot on its way to it, in messages, because it lacks entries that are kept no longer.
    pub(super) snapshot: VecDeque<Vec<u8>>,
    /// It is to be told who leads.
    pub(super) lead_due: bool,
    /// A target that has not left.
    pub(super) target: Option<Target>,
    /// A `ReadIndex` that was not answered: its token, and the question to the group that it waits for.
    pub(super) read_index: Option<(u64, u64)>,
    /// Answers to changes that have not left.
    pub(super) changes: VecDeque<Changed>,
}

impl Follower {
    pub(super) fn new(replica: Replica) -> Follower {
        Follower {
            replica,
            connected: false,
            report: None,
            next: None,
            applied: 0,
            snapshot: VecDeque::new(),
            lead_due: false,
            target: None,
            read_index: None,
            changes: VecDeque::new(),
        }
    }

    /// Nothing is on its way to it any more.
    pub(super) fn drop_all(&mut self) {
        (self.next, self.target, self.read_index) = (None, None, None);
        self.snapshot.clear();
        self.changes.clear();
    }
}

/// The messages that bring a replica to where a ledger is.
fn snapshot(ledger: &Ledger) -> VecDeque<Vec<u8>> {
    let mut messages = VecDeque::new();
    let mut buffer = [0; ORDER_HEAD_BYTES + ORDER_ENTRY_BYTES_MAX];
    let mut entry = [0; ORDER_ENTRY_BYTES_MAX];
    let entries = ledger.history(&mut entry, |entry| {
        let len = NodeMessage::SnapshotEntry { entry }.encode(&mut buffer);
        messages.push_back(buffer[..len].to_vec());
    });
    let (index, base, view) = (ledger.applied_index(), ledger.history_base(), ledger.view());
    let len = NodeMessage::Snapshot { index, base, view, entries }.encode(&mut buffer);
    messages.push_front(buffer[..len].to_vec());
    messages
}

/// The protocol's effects.
pub(super) struct Effects<'a> {
    /// The proposal waiting to be committed.
    pub(super) proposal: &'a mut Vec<u8>,
    pub(super) followers: &'a mut [Follower],
}

impl SequencerOut for Effects<'_> {
    fn propose(&mut self, entry: &[u8]) {
        assert!(self.proposal.is_empty(), "one proposal is in flight at most");
        self.proposal.extend_from_slice(entry);
    }

    fn target(&mut self, shard: ShardId, primary: u16, target: Target) {
        let follower = self.followers.iter_mut().find(|f| f.replica.shard == shard && f.replica.replica == primary);
        if let Some(follower) = follower {
            follower.target = Some(target);
        }
    }
}

impl<T: Transport> SequencerAgent<T> {
    /// Sends what followers lack. While there is other work (`busy`) backups wait: nothing depends on them hearing at
    /// once, as long as they stay within half their credit.
    pub(super) fn send(&mut self, busy: bool) {
        let Some(term) = self.leads() else { return };
        for at in 0..self.followers.len() {
            let follower = &mut self.followers[at];
            let behind = follower.next.map_or(0, |next| (self.order.last_index() + 1).saturating_sub(next));
            let is_primary = follower.replica.replica == self.sequencer.primary(follower.replica.shard);
            if busy && !is_primary && behind < ORDER_CREDIT / 4 {
                continue;
            }
            if follower.lead_due && follower.connected {
                let mut buffer = [0; NODE_MESSAGE_BYTES_MAX];
                let len = NodeMessage::Lead { term }.encode(&mut buffer);
                follower.lead_due = self.transport.send(follower.replica.peer, &buffer[..len]).is_err();
            }
            if follower.next.is_some() && follower.connected {
                self.send_order(at);
                self.send_answers(at);
            }
        }
    }

    fn send_order(&mut self, at: usize) {
        let follower = &mut self.followers[at];
        let peer = follower.replica.peer;
        let Some(next) = follower.next.as_mut() else { return };
        if *next < self.order.first_index() && *next <= self.order.last_index() {
            follower.snapshot = snapshot(self.sequencer.ledger());
            *next = self.order.last_index() + 1;
        }
        while let Some(message) = follower.snapshot.front() {
            if self.transport.send(peer, message).is_err() {
                return;
            }
            follower.snapshot.pop_front();
        }
        while *next <= self.order.last_index() && *next <= follower.applied + ORDER_CREDIT {
            let Some(entry) = self.order.get(*next) else { return };
            let len = NodeMessage::Order { index: *next, entry }.encode(&mut self.message);
            if self.transport.send(peer, &self.message[..len]).is_err() {
                return;
            }
            *next += 1;
        }
    }

    fn send_answers(&mut self, at: usize) {
        let granted = self.reads_granted();
        let follower = &mut self.followers[at];
        let mut buffer = [0; NODE_MESSAGE_BYTES_MAX];
        if let Some(target) = follower.target {
            let len = NodeMessage::Target(target).encode(&mut buffer);
            if self.transport.send(follower.replica.peer, &buffer[..len]).is_ok() {
                follower.target = None;
            }
        }
        if let Some((token, _)) = follower.read_index.filter(|(_, question)| *question <= granted) {
            let index = self.order.last_index();
            let len = NodeMessage::ReadIndexIs { token, index }.encode(&mut buffer);
            if self.transport.send(follower.replica.peer, &buffer[..len]).is_ok() {
                follower.read_index = None;
            }
        }
        while let Some(Changed { client, token, outcome }) = follower.changes.front().copied() {
            let len = NodeMessage::ChangeIs { client, token, outcome }.encode(&mut buffer);
            if self.transport.send(follower.replica.peer, &buffer[..len]).is_err() {
                break;
            }
            follower.changes.pop_front();
        }
    }
}
