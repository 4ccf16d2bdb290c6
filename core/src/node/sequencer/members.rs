//! The other members of the sequencer's group: their messages, and what the group has learned.

use antelog_protocol::wire::change::{change_code, change_from};
use antelog_protocol::wire::order::ORDER_ENTRY_BYTES_MAX;
use antelog_protocol::{Change, ClientId};

use super::{Asking, CHANGES_REMEMBERED, Changed, SequencerAgent, state};
use crate::node::group::wire::Bytes;
use crate::node::group::{Group, Learned, RaftGroup};
use crate::node::mailbox::Notice;
use crate::node::order_log::OrderLog;
use crate::transport::{DownReason, MessageHandle, PeerId, Transport};

/// First byte of what the group commits: an order entry, which gets the next index of the order log, or a change that
/// all members must know of and no follower sees.
const ORDER: u8 = 0;
const CHANGE: u8 = 1;

/// The payload that stands for a change.
fn change_payload(client: ClientId, token: u64, change: Change) -> Vec<u8> {
    let (kind, detail) = change_code(change);
    let mut payload = vec![CHANGE];
    payload.extend_from_slice(&client.0.to_le_bytes());
    payload.extend_from_slice(&token.to_le_bytes());
    payload.extend_from_slice(&kind.to_le_bytes());
    payload.extend_from_slice(&detail.to_le_bytes());
    payload
}

fn change_of(payload: &[u8]) -> Option<(ClientId, u64, Change)> {
    let mut r = Bytes(payload);
    let client = u128::from(r.number(8).ok()?) | u128::from(r.number(8).ok()?) << 64;
    let token = r.number(8).ok()?;
    let change = change_from(r.number(2).ok()? as u16, r.number(8).ok()?).ok()?;
    Some((ClientId(client), token, change))
}

impl<T: Transport> SequencerAgent<T> {
    /// The term in which this member leads.
    pub(super) fn leads(&self) -> Option<u64> {
        match &self.group {
            Group::Alone => Some(1),
            Group::Raft(group) => group.leads(),
        }
    }

    /// The newest question whether this member still leads to which the answer was yes.
    pub(super) fn reads_granted(&self) -> u64 {
        match &self.group {
            // A group of one is its own quorum: what it has committed is current.
            Group::Alone => 0,
            Group::Raft(group) => group.reads_granted(),
        }
    }

    /// A question whether this member still leads: its number.
    pub(super) fn ask_read(&mut self) -> u64 {
        match &mut self.group {
            Group::Alone => 0,
            Group::Raft(group) => group.ask_read(),
        }
    }

    /// Hands the lead to another member before the process ends, and tells whoever waits for it.
    pub(super) fn look_whether_left(&mut self) {
        let Some(done) = &self.leaving else { return };
        match &mut self.group {
            // Whoever waits finds that nobody answers.
            Group::Alone => self.leaving = None,
            Group::Raft(group) if group.is_led_elsewhere() => {
                // Whoever waited may have lost patience.
                let _ = done.send(());
                self.leaving = None;
            }
            Group::Raft(group) => {
                if group.leads().is_some() && !group.hand_over() {
                    self.leaving = None;
                }
            }
        }
    }

    /// Whether the disk is full is told to the operator: without this member the others decide.
    pub(super) fn tell_whether_full(&mut self) {
        let is_full = self.raft().is_some_and(RaftGroup::disk_is_full);
        if is_full != std::mem::replace(&mut self.disk_is_full, is_full) {
            let text = if is_full {
                "the disk is full: this sequencer keeps nothing and does not count until there is room"
            } else {
                "the disk has room again: this sequencer counts"
            };
            let _ = self.notices.send(Notice::Warning { agent: self.name.clone(), text: text.into() });
        }
    }

    /// The member behind a peer's number, if it is no replica's.
    pub(super) fn member(&self, peer: PeerId) -> Option<usize> {
        usize::from(peer.0).checked_sub(self.followers.len())
    }

    pub(super) fn on_group_message(&mut self, now_ns: u64, peer: PeerId, member: usize, handle: MessageHandle) {
        let Group::Raft(group) = &mut self.group else { return self.transport.release(handle) };
        let received = group.receive(member, self.transport.message(handle));
        self.transport.release(handle);
        if received.is_err() {
            self.transport.fence(peer);
            self.on_down(now_ns, peer, DownReason::Protocol);
        }
    }

    /// Sends what members have to say to each other.
    pub(super) fn send_to_members(&mut self) {
        let Group::Raft(group) = &mut self.group else { return };
        for member in 0..group.size() {
            let peer = PeerId((self.followers.len() + member) as u16);
            while let Some(message) = group.outgoing(member) {
                if self.transport.send(peer, message).is_err() {
                    break;
                }
                group.sent(member);
            }
        }
    }

    /// Has proposals committed and applies what was: at once when there is no group to ask.
    pub(super) fn commit(&mut self, now_ns: u64) {
        let mut entry = [0; ORDER_ENTRY_BYTES_MAX];
        loop {
            while matches!(self.group, Group::Alone) && !self.proposal.is_empty() {
                let len = self.proposal.len();
                entry[..len].copy_from_slice(&self.proposal);
                self.proposal.clear();
                self.apply_order(now_ns, &entry[..len]);
            }
            self.learn(now_ns);
            if self.asking.is_empty() || !self.make_next_change(now_ns) {
                break;
            }
        }
    }

    fn apply_order(&mut self, now_ns: u64, entry: &[u8]) {
        let index = self.order.append(entry);
        let (sequencer, mut effects) = self.split();
        if let Err(contradiction) = sequencer.on_committed(now_ns, index, entry, &mut effects) {
            panic!("sequencer: {contradiction}");
        }
    }

    /// Proposes to the group and applies what it has learned, until there is nothing more.
    fn learn(&mut self, now_ns: u64) {
        loop {
            let Group::Raft(group) = &mut self.group else { return };
            if !self.proposal.is_empty() && group.propose([&[ORDER], &self.proposal[..]].concat()) {
                self.proposal.clear();
            }
            match group.learn() {
                Some(Learned::Committed(payload)) => self.on_committed(now_ns, &payload),
                Some(Learned::Installed(bytes)) => self.install(&bytes),
                Some(Learned::Leads { .. }) => self.take_over(now_ns),
                Some(Learned::Follows) => self.step_back(),
                None => break,
            }
        }
        if self.raft().is_some_and(|group| group.wants_snapshot()) {
            let standing = self.sequencer.standing();
            let bytes = state::encode(self.sequencer.ledger(), &standing, self.changes.iter());
            if let Group::Raft(group) = &mut self.group {
                group.offer_snapshot(bytes);
            }
        }
    }

    fn raft(&self) -> Option<&RaftGroup> {
        match &self.group {
            Group::Alone => None,
            Group::Raft(group) => Some(group),
        }
    }

    fn on_committed(&mut self, now_ns: u64, payload: &[u8]) {
        let change = match payload.split_first() {
            Some((&ORDER, entry)) => return self.apply_order(now_ns, entry),
            Some((&CHANGE, rest)) => change_of(rest),
            _ => None,
        };
        let Some((client, token, change)) = change else {
            panic!("sequencer: the group's log holds what no member of this version proposes");
        };
        self.apply_change(now_ns, client, token, change);
    }

    fn apply_change(&mut self, now_ns: u64, client: ClientId, token: u64, change: Change) {
        if self.changed(client, token).is_some() {
            return; // Two leaders were asked for it.
        }
        let (sequencer, mut effects) = self.split();
        sequencer.make_change(now_ns, change, &mut effects);
        let changed = Changed { client, token, outcome: Ok(self.order.last_index()) };
        self.remember(changed);
    }

    pub(super) fn changed(&self, client: ClientId, token: u64) -> Option<Changed> {
        self.changes.iter().find(|c| (c.client, c.token) == (client, token)).copied()
    }

    /// Remembers what became of a change, and answers whoever waits for it.
    fn remember(&mut self, changed: Changed) {
        if self.changes.len() == CHANGES_REMEMBERED {
            self.changes.pop_front();
        }
        self.changes.push_back(changed);
        let followers = &mut self.followers;
        self.asking.retain(|asking| {
            let answered = (asking.client, asking.token) == (changed.client, changed.token);
            if answered {
                followers[usize::from(asking.peer.0)].changes.push_back(changed);
            }
            !answered
        });
        self.changing = self.changing.filter(|asked| *asked != (changed.client, changed.token));
    }

    /// Has a change made, unless it was made before: an answer that was lost must not undo what others have changed since.
    pub(super) fn change(&mut self, now_ns: u64, asking: Asking) {
        match self.changed(asking.client, asking.token) {
            Some(changed) => self.followers[usize::from(asking.peer.0)].changes.push_back(changed),
            // Asked again on the same connection: it heard of this leader after it had asked.
            None if self.asking.contains(&asking) => {}
            None => self.asking.push_back(asking),
        }
        self.commit(now_ns);
    }

    /// Has the next change made that was asked for: one at a time, because each is judged by what those before it have
    /// made. Whether there was one.
    fn make_next_change(&mut self, now_ns: u64) -> bool {
        let Some(Asking { client, token, change, .. }) = self.asking.front().copied() else { return false };
        if self.changing.is_some() {
            return false;
        }
        if let Err(error) = self.sequencer.may_change(change) {
            self.remember(Changed { client, token, outcome: Err(error) });
            return true;
        }
        match &mut self.group {
            Group::Alone => self.apply_change(now_ns, client, token, change),
            Group::Raft(group) => {
                if !group.propose(change_payload(client, token, change)) {
                    return false;
                }
                self.changing = Some((client, token));
            }
        }
        true
    }

    /// This member leads: it knows what is committed, and from their newest reports where the replicas are.
    fn take_over(&mut self, now_ns: u64) {
        self.counters.leads.add(1);
        self.proposal.clear();
        self.changing = None;
        for follower in &mut self.followers {
            follower.drop_all();
            follower.lead_due = true;
        }
        let (sequencer, mut effects) = self.split();
        sequencer.on_lead(now_ns, &mut effects);
        for at in 0..self.followers.len() {
            let Some(report) = self.followers[at].report else { continue };
            // It may be of a while ago: what the replica has applied meanwhile it says when it hears who leads.
            if report.applied_index <= self.order.last_index() {
                let (sequencer, mut effects) = self.split();
                sequencer.on_report(now_ns, &report, &mut effects);
                self.commit(now_ns);
            }
            if !self.followers[at].connected {
                let (sequencer, mut effects) = self.split();
                sequencer.on_replica_down(now_ns, report.shard, report.replica, &mut effects);
            }
        }
    }

    /// Another one leads, or nobody does for now.
    fn step_back(&mut self) {
        self.sequencer.on_follow();
        self.proposal.clear();
        self.asking.clear();
        self.changing = None;
        self.followers.iter_mut().for_each(super::followers::Follower::drop_all);
    }

    /// Another member's state replaces this one's, which was too far behind.
    fn install(&mut self, bytes: &[u8]) {
        match state::decode(bytes, self.free_cuts_max) {
            Ok(state) => {
                let index = state.ledger.applied_index();
                self.order = OrderLog::new(index, super::ORDER_ENTRIES_MAX, super::ORDER_BYTES_MAX);
                self.changes = state.changes.into();
                self.sequencer.restore(state.ledger, &state.standing);
            }
            Err(error) => panic!("sequencer: {error}"),
        }
    }
}
