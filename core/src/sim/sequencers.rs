//! What befalls sequencers: the one that leads stands still, is cut off or hands over; any of them crashes and comes back
//! with what its disk has kept, or as another member of the group.

use std::cell::RefCell;
use std::rc::Rc;

use super::cluster::{Cluster, Runner};
use super::disk::SimDisk;
use super::knobs::Knobs;
use super::machine::Machine;
use super::overlay::Overlay;
use super::queue::What;
use super::rng::Rng;
use super::tap::Tap;
use crate::node::group::journal::Journal;
use crate::node::group::{GroupParts, member_id};
use crate::node::sequencer::SequencerAgent;
use crate::transport::Transport;

/// Disks of the sequencers, and how often each was started.
#[derive(Debug, Default)]
pub(super) struct Sites {
    disks: Vec<Rc<RefCell<SimDisk>>>,
    starts: Vec<u64>,
}

/// A sequencer on its own always flushes.
fn flushes(knobs: &Knobs) -> bool {
    knobs.flushed || knobs.sequencers == 1
}

impl Sites {
    pub(super) fn new(knobs: &Knobs) -> Sites {
        let disk = |member: u16, most_ns| SimDisk::new(Rng::new(knobs.seed, 64 + u64::from(member)), most_ns);
        let disks = knobs.disk_ns.map_or(Vec::new(), |ns| (0..knobs.sequencers).map(|m| disk(m, ns)).collect());
        Sites { disks, starts: vec![0; knobs.sequencers.into()] }
    }

    /// The member's process ends: what it gave to the kernel is kept. Or its machine does, which flushed disks survive.
    fn crash(&self, knobs: &Knobs, member: u16, machine: bool) {
        let Some(disk) = self.disks.get(usize::from(member)) else { return };
        match (machine, flushes(knobs)) {
            (false, _) => disk.borrow_mut().finish(),
            (true, true) => disk.borrow_mut().crash(),
            // Nobody knows what of it was flushed: it is as if nothing were there.
            (true, false) => disk.borrow_mut().erase(),
        }
    }

    /// A member's group for its next life; `None`: it is on its own and keeps nothing.
    pub(super) fn group(&mut self, knobs: &Knobs, member: u16, replicas: usize) -> Option<GroupParts> {
        let starts = &mut self.starts[usize::from(member)];
        *starts += 1;
        let id = member_id(*starts, member);
        let journal = self.disks.get(usize::from(member)).map(|disk| {
            let (journal, kept) = SimDisk::open(disk, id, flushes(knobs));
            (Box::new(journal) as Box<dyn Journal>, kept)
        });
        let alone = knobs.sequencers == 1 && journal.is_none();
        (!alone).then(|| GroupParts {
            nodes: (0..knobs.sequencers).collect(),
            own: member.into(),
            id,
            tick_ns: knobs.raft_tick_ns,
            replicas,
            journal,
        })
    }
}

impl<T: Transport> Cluster<T> {
    fn sequencer(&self, member: usize) -> Option<&SequencerAgent<Tap<T>>> {
        match &self.runners[self.sequencers[member]] {
            Some(Runner::Sequencer(sequencer)) => Some(sequencer),
            _ => None,
        }
    }

    /// The sequencer that leads, of several: its agent's number, and its member's.
    pub(super) fn leader(&self) -> Option<(usize, usize)> {
        let leads = |member: &usize| self.sequencer(*member).and_then(|s| s.members()).is_some_and(|m| m.leads);
        (0..self.sequencers.len()).find(leads).map(|member| (self.sequencers[member], member))
    }

    /// Whether every sequencer runs and, as it is now, has a vote: one of them may then lose its memory.
    fn group_is_whole(&self) -> bool {
        let members: Option<Vec<_>> =
            (0..self.sequencers.len()).map(|member| self.sequencer(member).and_then(|s| s.members())).collect();
        let leader = members.as_ref().and_then(|all| all.iter().find(|m| m.leads));
        let (Some(all), Some(leader)) = (&members, leader) else { return false };
        leader.voters.len() == all.len() && all.iter().all(|m| leader.voters.contains(&m.own))
    }
}

impl<O: Overlay> Machine<O> {
    pub(super) fn harm_a_sequencer(&mut self, now_ns: u64) {
        let Some(every_ns) = self.knobs.faults.leader_every_ns.filter(|_| self.faulty) else { return };
        self.network.borrow_mut().plan(now_ns + self.fate.gap(every_ns) + 1, What::LeaderFault);
        let for_ns = self.knobs.raft_tick_ns * self.fate.range(8, 40);
        let others = self.cluster.sequencers.len() as u64 - 1;
        let what = if others == 0 { 3 } else { self.fate.below(4) };
        if what == 3 {
            let (member, machine) = (self.fate.below(others + 1) as u16, self.fate.percent(50));
            return self.crash(now_ns, member, machine, for_ns / 2);
        }
        let Some((agent, member)) = self.cluster.leader() else { return };
        match what {
            0 => {
                self.probes.add("leader paused", 1);
                self.stall(self.cluster.thread_of(agent), now_ns + for_ns);
            }
            1 => {
                self.probes.add("leader isolated", 1);
                self.isolated = (agent, now_ns + for_ns);
                let mut network = self.network.borrow_mut();
                for link in network.links_of(self.cluster.endpoints[agent]) {
                    network.plan(now_ns, What::Lose { link });
                }
            }
            _ => {
                self.probes.add("leader hands over", 1);
                let to = (member + 1 + self.fate.below(others) as usize) % self.cluster.sequencers.len();
                if let Some(Runner::Sequencer(sequencer)) = &mut self.cluster.runners[agent] {
                    sequencer.transfer_leadership(to);
                }
            }
        }
    }

    /// A sequencer's process ends, or its machine does. Without what it knows it comes back as another member, which must
    /// not be one too many.
    pub(super) fn crash(&mut self, now_ns: u64, member: u16, machine: bool, for_ns: u64) {
        let knobs = self.knobs.clone();
        let keeps = knobs.disk_ns.is_some() && (!machine || flushes(&knobs));
        let agent = knobs.sequencer(member);
        if self.cluster.runners[agent].is_none() || (!keeps && !self.cluster.group_is_whole()) {
            return;
        }
        self.probes.add(if keeps { "sequencer crash" } else { "sequencer without memory" }, 1);
        self.remove(&[agent]);
        self.cluster.sites.crash(&knobs, member, machine);
        self.network.borrow_mut().plan(now_ns + for_ns, What::Revive { member });
    }

    /// A sequencer that crashed comes back.
    pub(super) fn revive(&mut self, now_ns: u64, member: u16) {
        let part = self.with_builder(|builder| builder.sequencer(member));
        self.place(now_ns, part);
    }
}
