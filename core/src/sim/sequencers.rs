//! The sequencers of a simulated cluster: built at the start, and again when one comes back after a crash — with what its
//! disk has kept, or as another member.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::mpsc::Sender;

use antelog_protocol::ShardId;
use antelog_protocol::sequencer::SequencerConfig;

use super::cluster::{Cluster, Runner};
use super::control::Line;
use super::disk::SimDisk;
use super::knobs::Knobs;
use super::network::{Shared, SimTransport};
use super::overlay::{LinkOf, Overlay};
use super::rng::Rng;
use super::tap::{Role, Tap};
use crate::counters::Counters;
use crate::node::Waker;
use crate::node::group::journal::Journal;
use crate::node::group::{GroupParts, member_id};
use crate::node::mailbox::{Admission, MailSender, Notice, mailbox};
use crate::node::sequencer::{Replica, SequencerAgent, SequencerParts};
use crate::transport::PeerId;

/// Disks of the sequencers, and how often each was started.
#[derive(Debug, Default)]
pub(super) struct Sites {
    disks: Vec<Rc<RefCell<SimDisk>>>,
    starts: Vec<u64>,
}

/// What a sequencer is built from.
pub(super) struct Site<'a, O: Overlay> {
    pub(super) knobs: &'a Knobs,
    pub(super) network: &'a Shared,
    pub(super) overlay: &'a mut O,
    pub(super) notices: &'a Sender<Notice>,
    pub(super) thread: usize,
    pub(super) waker: Waker,
    pub(super) counters: Counters,
}

/// A sequencer, how connections reach it, and its end of the network.
pub(super) type Built<O> = (Runner<<O as Overlay>::Transport>, MailSender<Admission<LinkOf<O>>>, usize);

/// A member's name.
pub(super) fn sequencer_name(knobs: &Knobs, member: u16) -> String {
    if knobs.sequencers == 1 { "sequencer".into() } else { format!("sequencer-{member}") }
}

/// A sequencer on its own always flushes.
pub(super) fn flushes(knobs: &Knobs) -> bool {
    knobs.flushed || knobs.sequencers == 1
}

impl Sites {
    pub(super) fn new(knobs: &Knobs) -> Sites {
        let disk = |member: u16, most_ns| SimDisk::new(Rng::new(knobs.seed, 64 + u64::from(member)), most_ns);
        let disks = knobs.disk_ns.map_or(Vec::new(), |ns| (0..knobs.sequencers).map(|m| disk(m, ns)).collect());
        Sites { disks, starts: vec![0; knobs.sequencers.into()] }
    }

    /// Whether members keep what they know when only their process ends.
    pub(super) fn have_disks(&self) -> bool {
        !self.disks.is_empty()
    }

    /// The member's process ends: what it gave to the kernel is kept. Or its machine does, which flushed disks survive.
    pub(super) fn crash(&self, knobs: &Knobs, member: u16, machine: bool) {
        let Some(disk) = self.disks.get(usize::from(member)) else { return };
        match (machine, flushes(knobs)) {
            (false, _) => disk.borrow_mut().finish(),
            (true, true) => disk.borrow_mut().crash(),
            // Nobody knows what of it was flushed: it is as if nothing were there.
            (true, false) => disk.borrow_mut().erase(),
        }
    }

    /// Builds a member for its next life.
    pub(super) fn build<O: Overlay>(&mut self, site: Site<'_, O>, member: u16, config: SequencerConfig) -> Built<O> {
        let Site { knobs, network, overlay, notices, thread, waker, counters } = site;
        let members = 1 + knobs.backups;
        let replica = |at: u16| Replica { peer: PeerId(at), shard: ShardId(at / members), replica: at % members };
        let replicas: Vec<Replica> = (0..knobs.shards * members).map(replica).collect();
        let starts = &mut self.starts[usize::from(member)];
        *starts += 1;
        let id = member_id(*starts, member);
        let journal = self.disks.get(usize::from(member)).map(|disk| {
            let (journal, kept) = SimDisk::open(disk, id, flushes(knobs));
            (Box::new(journal) as Box<dyn Journal>, kept)
        });
        let alone = knobs.sequencers == 1 && journal.is_none();
        let group = (!alone).then(|| GroupParts {
            nodes: (0..knobs.sequencers).collect(),
            own: member.into(),
            id,
            tick_ns: knobs.raft_tick_ns,
            replicas: replicas.len(),
            journal,
        });
        let peers_max = replicas.len() as u16 + knobs.sequencers;
        let carrier = SimTransport::new(network, thread, peers_max);
        let endpoint = carrier.endpoint();
        network.borrow_mut().let_overtake(endpoint);
        let role = Role::Leader { replicas: replicas.len() as u16 };
        let transport = Tap::new(overlay.transport(carrier, thread, peers_max), network, role, peers_max);
        let (mail, mailbox) = mailbox(waker);
        let (name, notices) = (sequencer_name(knobs, member), notices.clone());
        let parts = SequencerParts { name, config, replicas, group, mailbox, notices, counters };
        (Runner::Sequencer(Box::new(SequencerAgent::new(parts, transport))), mail, endpoint)
    }
}

impl<T: crate::transport::Transport> Cluster<T> {
    fn sequencer(&self, member: usize) -> &SequencerAgent<Tap<T>> {
        match &self.runners[self.sequencers[member]] {
            Runner::Sequencer(sequencer) => sequencer,
            _ => unreachable!("agent {} is no sequencer", self.sequencers[member]),
        }
    }

    /// The sequencer that leads, of several: its agent's number, and its member's.
    pub(super) fn leader(&self) -> Option<(usize, usize)> {
        let leads = |member: &usize| self.sequencer(*member).members().is_some_and(|m| m.leads);
        (0..self.sequencers.len()).find(leads).map(|member| (self.sequencers[member], member))
    }

    /// Whether every sequencer, as it is now, has a vote: one of them may then lose its memory.
    pub(super) fn group_is_whole(&self) -> bool {
        let Some((_, leader)) = self.leader() else { return false };
        let Some(group) = self.sequencer(leader).members() else { return false };
        let takes_part = |member| self.sequencer(member).members().is_some_and(|m| group.voters.contains(&m.own));
        group.voters.len() == self.sequencers.len() && (0..self.sequencers.len()).all(takes_part)
    }

    /// Connections that are being made with an agent break; returns the lines that have to be dialled again by nobody else.
    pub(super) fn break_lines(&mut self, agent: usize) -> Vec<usize> {
        let mut broken = Vec::new();
        for (number, line) in self.lines.iter_mut().enumerate() {
            let Line { caller, callee, ends, .. } = line;
            let on_its_way = !ends.is_empty();
            if *caller == agent || (*callee == agent && on_its_way) {
                ends.clear();
                broken.push(number);
            }
        }
        broken
    }
}
