//! The order stream at a replica: entries, snapshots in their place, and what clients ask of who leads the sequencers.

use std::collections::VecDeque;

use antelog_protocol::ledger::{Applied, Ledger};
use antelog_protocol::wire::node::{NODE_MESSAGE_BYTES_MAX, NodeMessage};
use antelog_protocol::wire::order::OrderEntry;
use antelog_protocol::{Change, ClientId};

use super::{Life, ReplicaAgent, sequencer_peer};
use crate::node::bus;
use crate::transport::{MessageHandle, PeerId, Transport};

/// Changes on their way to the sequencer, for all clients together.
pub const CHANGES_MAX: usize = 64;

/// A change that was not answered: asked again of another leader and on a new connection.
#[derive(Clone, Copy, Debug)]
struct Asked {
    client: ClientId,
    token: u64,
    change: Change,
    sent: bool,
}

/// Questions and changes for who leads the sequencers.
#[derive(Debug, Default)]
pub(super) struct Questions {
    /// Who leads, and since which term.
    leads: Option<(u64, PeerId)>,
    /// A question that has not left.
    read_index: Option<u64>,
    /// The newest question that was not answered.
    asked: Option<u64>,
    changes: VecDeque<Asked>,
    /// A snapshot that is being received: from whom, its ledger, and entries still to come.
    snapshot: Option<(PeerId, Ledger, u32)>,
}

impl Questions {
    /// Who is asked may not have heard.
    pub(super) fn ask_again(&mut self) {
        self.read_index = self.asked;
        self.changes.iter_mut().for_each(|c| c.sent = false);
    }

    pub(super) fn on_sequencer_down(&mut self, peer: PeerId) {
        self.snapshot = self.snapshot.take().filter(|(from, ..)| *from != peer);
        self.leads = self.leads.filter(|(_, leads)| *leads != peer);
    }

    /// Whether this sequencer leads, as far as is known.
    pub(super) fn may_lead(&self, peer: PeerId) -> bool {
        self.leads.is_none_or(|(_, leads)| leads == peer)
    }

    pub(super) fn changes(&self) -> usize {
        self.changes.len()
    }

    /// A newer question's answer is good for older ones too.
    pub(super) fn ask(&mut self, token: u64) {
        (self.read_index, self.asked) = (Some(token), Some(token));
    }

    /// False: too many wait.
    pub(super) fn change(&mut self, client: ClientId, token: u64, change: Change) -> bool {
        let known = self.changes.iter().any(|c| (c.client, c.token) == (client, token));
        if !known && self.changes.len() == CHANGES_MAX {
            return false;
        }
        if !known {
            self.changes.push_back(Asked { client, token, change, sent: false });
        }
        true
    }
}

impl<T: Transport> ReplicaAgent<T> {
    /// False when it was no message for a replica.
    pub(super) fn on_sequencer_message(&mut self, now_ns: u64, peer: PeerId, handle: MessageHandle) -> bool {
        match NodeMessage::decode(self.transport.message(handle)) {
            Ok(NodeMessage::Order { index, entry }) => {
                let Ok(decoded) = OrderEntry::decode(entry) else {
                    panic!("{}: the order stream holds no entry", self.name)
                };
                let applied = match &mut self.life {
                    Some(Life::Leading(leader)) => {
                        leader.on_order_entry(now_ns, index, &decoded, &mut self.gate.answers)
                    }
                    Some(Life::Following(f) | Life::Fencing(f, _)) => {
                        if matches!(decoded, OrderEntry::ShardChange(_)) {
                            f.note_bound(self.log_epoch);
                        }
                        f.ledger.apply(index, &decoded)
                    }
                    None => unreachable!("a replica is told something while it changes"),
                };
                let applied = applied.unwrap_or_else(|contradiction| panic!("{}: {contradiction}", self.name));
                if self.gate.relays && applied != Applied::Again {
                    bus::tell(&mut self.gate.answers, &[&bus::order_head(index), entry]);
                }
                match applied {
                    Applied::MembersChanged(shard) if shard == self.shard => self.on_members_changed(now_ns),
                    Applied::ViewChanged => self.on_view_changed(now_ns),
                    _ => {}
                }
            }
            Ok(NodeMessage::Target(target)) => {
                if let Some(Life::Leading(leader)) = &mut self.life {
                    leader.on_target(now_ns, target, &mut self.gate.answers);
                }
            }
            Ok(NodeMessage::ReadIndexIs { token, index }) => {
                self.questions.asked = self.questions.asked.filter(|asked| *asked > token);
                bus::tell(&mut self.gate.answers, &[&bus::read_index_is(token, index)]);
            }
            Ok(NodeMessage::ChangeIs { client, token, outcome }) => {
                self.questions.changes.retain(|c| (c.client, c.token) != (client, token));
                bus::tell(&mut self.gate.answers, &[&bus::change_is(client, token, outcome)]);
            }
            Ok(NodeMessage::Lead { term }) => {
                if self.questions.leads.is_none_or(|(known, _)| known < term) {
                    self.questions.leads = Some((term, peer));
                    self.questions.ask_again();
                    // It may have last heard a while ago.
                    self.report_now(now_ns);
                }
            }
            Ok(NodeMessage::Snapshot { index, base, view, entries }) => {
                let ledger = Ledger::at(index, base, view, self.config.free_cuts_max);
                self.questions.snapshot = Some((peer, ledger, entries));
                if self.gate.relays {
                    bus::tell(&mut self.gate.answers, &[&bus::snapshot(index, base, view, entries)]);
                }
                self.end_snapshot(now_ns);
            }
            Ok(NodeMessage::SnapshotEntry { entry }) => {
                // Whoever led before may still be telling one that another's has taken the place of.
                let Some((from, ledger, left)) = &mut self.questions.snapshot else { return true };
                if *from != peer {
                    return true;
                }
                let Ok(decoded) = OrderEntry::decode(entry) else { panic!("{}: a snapshot holds no entry", self.name) };
                if let Err(contradiction) = ledger.apply_snapshot(&decoded) {
                    panic!("{}: {contradiction}", self.name);
                }
                *left = left.saturating_sub(1);
                if self.gate.relays {
                    bus::tell(&mut self.gate.answers, &[&bus::snapshot_entry(), entry]);
                }
                self.end_snapshot(now_ns);
            }
            _ => return false,
        }
        true
    }

    /// When a snapshot is whole, the order stream goes on from there.
    fn end_snapshot(&mut self, now_ns: u64) {
        let Some((_, ledger, _)) = self.questions.snapshot.take_if(|(.., left)| *left == 0) else { return };
        if ledger.applied_index() > self.ledger().applied_index() {
            self.follow_anew(now_ns, ledger);
        }
        self.report_now(now_ns);
    }

    pub(super) fn send_questions(&mut self) {
        if self.questions.read_index.is_none() && self.questions.changes.iter().all(|c| c.sent) {
            return;
        }
        let connected = (0..).zip(&self.sequencers).find(|(_, s)| s.connected).map(|(m, _)| sequencer_peer(m));
        let Some(leads) = self.questions.leads.map(|(_, peer)| peer).or(connected) else { return };
        let mut buffer = [0; NODE_MESSAGE_BYTES_MAX];
        if let Some(token) = self.questions.read_index {
            let len = NodeMessage::ReadIndex { token }.encode(&mut buffer);
            if self.transport.send(leads, &buffer[..len]).is_ok() {
                self.questions.read_index = None;
            }
        }
        for asked in self.questions.changes.iter_mut().filter(|c| !c.sent) {
            let Asked { client, token, change, .. } = *asked;
            let len = NodeMessage::Change { client, token, change }.encode(&mut buffer);
            asked.sent = self.transport.send(leads, &buffer[..len]).is_ok();
        }
    }
}
