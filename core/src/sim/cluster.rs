//! Builds the cluster of a run: the production agents with regions, queues and mirrors as the composition root builds them,
//! and the lines between them.

use std::collections::BTreeMap;
use std::sync::mpsc::Sender;

use antelog_protocol::sequencer::{MemberConfig, SequencerConfig};
use antelog_protocol::shard::ShardConfig;
use antelog_protocol::wire::session::{ClusterMap, ShardGates};
use antelog_protocol::{ReplicaId, ShardId};

use super::control::Line;
use super::knobs::Knobs;
use super::network::{LinkKind, Network, Shared};
use super::overlay::Overlay;
use super::process::{Birth, Builder};
use super::rng::Rng;
use super::sequencers::Sites;
use super::stores::Stores;
use super::tap::Tap;
use crate::counters::Counters;
use crate::node::gate::GateAgent;
use crate::node::mailbox::{Admission, MailSender, Notice};
use crate::node::replica::{ReplicaAgent, replica_name, replica_peer, sequencer_peer};
use crate::node::sequencer::SequencerAgent;
use crate::node::{Agent, Waker};
use crate::transport::{PeerId, Transport};

/// An agent of the cluster.
pub(super) enum Runner<T: Transport> {
    Replica(Box<ReplicaAgent<Tap<T>>>),
    Gate(Box<GateAgent<Tap<T>>>),
    Sequencer(Box<SequencerAgent<Tap<T>>>),
}

impl<T: Transport> Runner<T> {
    pub(super) fn agent(&mut self) -> &mut dyn Agent {
        match self {
            Runner::Replica(agent) => &mut **agent,
            Runner::Gate(agent) => &mut **agent,
            Runner::Sequencer(agent) => &mut **agent,
        }
    }
}

/// Everything that was built.
pub(super) struct Cluster<T: Transport> {
    /// By agent. `None`: its process is down.
    pub(super) runners: Vec<Option<Runner<T>>>,
    pub(super) places: Places,
    pub(super) sites: Sites,
    pub(super) stores: Stores,
    pub(super) mails: Vec<MailSender<Admission<T::Link>>>,
    pub(super) lines: Vec<Line<T::Link>>,
    /// Agents that are gates, by process.
    pub(super) gates: Vec<usize>,
    /// Agents that are sequencers.
    pub(super) sequencers: Vec<usize>,
    /// Each agent's end of the network.
    pub(super) endpoints: Vec<usize>,
    /// By agent.
    pub(super) counters: Vec<Counters>,
    /// Counters of agents that are gone.
    pub(super) retired: Vec<Counters>,
    /// Replicas born since the oracle was told last.
    pub(super) born: Vec<Birth>,
    pub(super) map: ClusterMap,
}

impl<T: Transport> Cluster<T> {
    /// The thread an agent runs on.
    pub(super) fn thread_of(&self, agent: usize) -> usize {
        self.places.of_agent[agent]
    }

    /// Agents of a process: its replicas, then its gate.
    pub(super) fn agents_of(&self, process: usize) -> Vec<usize> {
        (0..self.sequencers[0]).filter(|agent| self.places.processes[*agent] == process).collect()
    }

    /// Whether a sequencer of several leads, or believes so.
    fn leads(&self, agent: usize) -> bool {
        matches!(&self.runners[agent], Some(Runner::Sequencer(sequencer)) if sequencer.members().is_some_and(|m| m.leads))
    }

    /// Whether a replica lacks the connection to a sequencer that leads.
    pub(super) fn is_cut_off(&self, replica: usize) -> bool {
        let alone = self.sequencers.len() == 1;
        let orders = self.lines.iter().filter(|l| l.caller == replica && l.kind == LinkKind::Order);
        orders.filter(|l| alone || self.leads(l.callee)).any(|line| line.up != 3)
    }

    /// Whether a replica has lost a connection to a sequencer and may not have heard of it.
    pub(super) fn is_losing(&self, replica: usize, network: &Network) -> bool {
        let mut orders = self.lines.iter().filter(|l| l.caller == replica && l.kind == LinkKind::Order);
        orders.any(|line| line.link.is_some_and(|link| !network.is_alive(link)))
    }

    /// An agent has heard that the connection to a peer is lost.
    pub(super) fn lost(&mut self, agent: &str, peer: PeerId) {
        let Some(number) = self.counters.iter().position(|counters| counters.agent() == agent) else { return };
        for line in self.lines.iter_mut().filter(|l| l.kind == LinkKind::Order) {
            if (line.caller, line.to_peer) == (number, peer) {
                line.up &= 2;
            } else if (line.callee, line.from_peer) == (number, peer) {
                line.up &= 1;
            }
        }
    }

    /// On an idle log: a replica that has not verified exactly what its shard's primary has appended.
    pub(super) fn wrongly_verified(&self) -> Option<String> {
        let living = self.counters.iter().zip(&self.runners).filter(|(_, runner)| runner.is_some());
        let counts: BTreeMap<String, u64> = living.flat_map(|(counters, _)| counters.snapshot()).collect();
        let of = |agent: &str, counter: &str| counts.get(&format!("{agent}.{counter}")).copied();
        let agents = || counts.keys().filter_map(|name| name.strip_suffix(".is_primary"));
        let primaries = agents().filter(|agent| of(agent, "is_primary") == Some(1));
        let appended: BTreeMap<&str, u64> =
            primaries.filter_map(|agent| Some((agent.rsplit_once('-')?.0, of(agent, "appended_lsn")?))).collect();
        // Who is no member may not have joined again yet.
        let backups = agents().filter(|a| of(a, "is_primary") == Some(0) && of(a, "is_member") == Some(1));
        backups.into_iter().find_map(|agent| {
            let (verified, appended) = (of(agent, "verified_lsn")?, appended.get(agent.rsplit_once('-')?.0)?);
            (verified != *appended).then(|| format!("{agent} has verified {verified} slots of {appended}"))
        })
    }
}

/// The only place where the protocol's options are made.
pub(super) fn protocol_configs(knobs: &Knobs) -> (SequencerConfig, Vec<ShardConfig>) {
    let rng = &mut Rng::new(knobs.seed, 3);
    let policy = &knobs.policy;
    let sequencer = SequencerConfig {
        tick_ns: knobs.tick_ns,
        tick_phase_ns: rng.below(knobs.tick_ns),
        window_cuts: knobs.window_cuts,
        ordering: knobs.ordering,
        beat: policy.beat,
        shards: (0..knobs.shards)
            .zip(&knobs.quotas)
            .map(|(id, quota)| MemberConfig {
                shard: ShardId(id),
                quota: *quota,
                standby: policy.stands_by(id),
                replicas: 1 + knobs.backups,
                members: 1 + knobs.backups,
            })
            .collect(),
        adaptive_quotas: policy.adaptive_quotas,
        target_pace_ns: policy.target_pace_ns,
        prefix_pace_ns: policy.prefix_pace_ns,
        late_ticks: policy.late_ticks,
        ground_windows: policy.ground_windows,
        suspect_ns: knobs.suspect_ns,
        lost_grace_ns: knobs.lost_grace_ns,
        free_cuts_max: knobs.free_cuts_max,
    };
    let shard = |shard| ShardConfig {
        shard: ShardId(shard),
        replica: ReplicaId::default(),
        epoch: 0,
        tick_ns: knobs.tick_ns,
        tick_phase_ns: rng.below(knobs.tick_ns),
        beat: policy.beat,
        fill_wait_ns: policy.fill_wait_ns,
        pause_gaps: policy.pause_gaps,
        standby: policy.stands_by(shard),
        report_every_ns: knobs.report_every_ns,
        pending_max: knobs.pending_max,
        sessions_max: 1024,
        session_remembered: knobs.outstanding_max as usize,
        free_cuts_max: knobs.free_cuts_max,
    };
    (sequencer, (0..knobs.shards).map(shard).collect())
}

/// Which agent runs where, and what wakes its thread.
pub(super) struct Places {
    /// Agents of each thread, in the order in which they are called.
    pub(super) threads: Vec<Vec<usize>>,
    pub(super) of_agent: Vec<usize>,
    /// The process of each agent.
    pub(super) processes: Vec<usize>,
    wakers: Vec<Waker>,
}

impl Places {
    /// Agents are numbered: replicas by shard, gates, sequencers.
    fn new(knobs: &Knobs, wake: &impl Fn(usize) -> Waker) -> Places {
        let processes = usize::from(knobs.processes);
        let agents = knobs.agents();
        let (members, replicas) = (usize::from(1 + knobs.backups), knobs.replicas());
        let process = |agent: usize| match agent {
            // A backup lives beside another process's primaries, if there is another.
            _ if agent < replicas => (agent / members + agent % members) % processes,
            _ if agent < replicas + processes => agent - replicas,
            _ if processes == 1 && knobs.sequencers == 1 => 0,
            _ => agent - replicas,
        };
        let by_process = (0..agents).map(process).collect();
        let of_agent: Vec<usize> = (0..agents).map(|a| if knobs.shared_threads { process(a) } else { a }).collect();
        let count = of_agent.iter().max().map_or(0, |most| most + 1);
        let threads = (0..count).map(|t| (0..agents).filter(|a| of_agent[*a] == t).collect()).collect();
        Places { threads, wakers: (0..count).map(wake).collect(), of_agent, processes: by_process }
    }

    pub(super) fn waker(&self, agent: usize) -> Waker {
        self.wakers[self.of_agent[agent]].clone()
    }
}

/// Builds the cluster. `wake` makes the waker of a thread.
///
/// # Errors
/// When the system has no memory for it.
pub(super) fn build<O: Overlay>(
    knobs: &Knobs,
    network: &Shared,
    overlay: &mut O,
    notices: &Sender<Notice>,
    wake: &impl Fn(usize) -> Waker,
) -> std::io::Result<Cluster<O::Transport>> {
    let places = Places::new(knobs, wake);
    let processes = usize::from(knobs.processes);
    let replicas = knobs.replicas();
    let mut sites = Sites::new(knobs);
    let mut stores = Stores::new(knobs);
    let (places_of, stores_of) = (&places, &mut stores);
    let mut builder =
        Builder { knobs, network, overlay, notices, places: places_of, sites: &mut sites, stores: stores_of };
    let mut parts = Vec::new();
    for process in 0..processes {
        parts.extend(builder.process(process, 0)?);
    }
    for member in 0..knobs.sequencers {
        parts.push(builder.sequencer(member));
    }
    parts.sort_by_key(|part| part.agent);
    let map = ClusterMap {
        tick_ns: knobs.tick_ns,
        record_bytes_max: knobs.record_bytes_max,
        outstanding_max: knobs.outstanding_max,
        suspect_ns: knobs.suspect_ns,
        shards: (0..knobs.shards).map(|s| gates_of(knobs, s)).collect(),
        ordering: knobs.ordering.name().into(),
    };
    let mut cluster = Cluster {
        runners: Vec::new(),
        mails: Vec::new(),
        lines: lines(knobs),
        gates: (replicas..replicas + processes).collect(),
        sequencers: (0..knobs.sequencers).map(|member| knobs.sequencer(member)).collect(),
        endpoints: Vec::new(),
        counters: Vec::new(),
        retired: Vec::new(),
        born: Vec::new(),
        map,
        places,
        sites,
        stores,
    };
    for part in parts {
        cluster.runners.push(Some(part.runner));
        cluster.mails.push(part.mail);
        cluster.endpoints.push(part.endpoint);
        cluster.counters.push(part.counters);
        cluster.born.extend(part.birth);
    }
    Ok(cluster)
}

/// The gates beside a shard's replicas.
fn gates_of(knobs: &Knobs, shard: u16) -> ShardGates {
    let gate = |number: u16| (number, format!("gate-{}", (shard + number) % knobs.processes));
    ShardGates { shard: ShardId(shard), gates: (0..=knobs.backups).map(gate).collect() }
}

/// The name of a sequencer in notices and counters.
pub(super) fn sequencer_name(knobs: &Knobs, member: u16) -> String {
    if knobs.sequencers == 1 { "sequencer".into() } else { format!("sequencer-{member}") }
}

/// The connections that are kept up: of every replica to the sequencers and to those of its shard with higher numbers, of
/// every sequencer to those with higher numbers.
fn lines<L>(knobs: &Knobs) -> Vec<Line<L>> {
    let line = |caller: usize, name: &str, to_peer, callee, from_peer, kind| Line {
        caller,
        caller_name: name.to_owned(),
        to_peer,
        callee,
        from_peer,
        kind,
        pause_ns: knobs.backoff_ns,
        ends: Vec::new(),
        link: None,
        up: 0,
        life: 0,
    };
    let mut lines = Vec::new();
    for shard in 0..knobs.shards {
        for number in 0..=knobs.backups {
            let agent = knobs.replica(shard, number);
            let name = replica_name(ShardId(shard), number);
            for member in 0..knobs.sequencers {
                let (callee, from) = (knobs.sequencer(member), PeerId(agent as u16));
                lines.push(line(agent, &name, sequencer_peer(member), callee, from, LinkKind::Order));
            }
            for higher in number + 1..=knobs.backups {
                let callee = knobs.replica(shard, higher);
                let (to, from) = (replica_peer(higher), replica_peer(number));
                lines.push(line(agent, &name, to, callee, from, LinkKind::Replication));
            }
        }
    }
    let first = knobs.replicas() as u16;
    for member in 0..knobs.sequencers {
        let (agent, name) = (knobs.sequencer(member), sequencer_name(knobs, member));
        for higher in member + 1..knobs.sequencers {
            let (to, from) = (PeerId(first + higher), PeerId(first + member));
            lines.push(line(agent, &name, to, knobs.sequencer(higher), from, LinkKind::Order));
        }
    }
    lines
}
