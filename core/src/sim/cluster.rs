//! Builds the cluster of a run: the production agents with regions, queues and mirrors as the composition root builds them,
//! and the lines between them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use antelog_protocol::sequencer::{MemberConfig, SequencerConfig};
use antelog_protocol::shard::ShardConfig;
use antelog_protocol::wire::session::{ClusterMap, ShardGates};
use antelog_protocol::{ReplicaId, ShardId};

use super::control::Line;
use super::knobs::Knobs;
use super::network::{LinkKind, Shared, SimTransport};
use super::overlay::{LinkOf, Overlay};
use super::rng::Rng;
use super::sequencers::{Site, Sites, sequencer_name};
use super::tap::{Role, Tap};
use crate::channel::spsc;
use crate::counters::Counters;
use crate::log::{LogOptions, Verifier};
use crate::mem::Region;
use crate::node::bus::{GatePort, Progress, ShardPort};
use crate::node::gate::{GateAgent, GateConfig, GateParts};
use crate::node::mailbox::{Admission, MailSender, Mailbox, Notice, mailbox};
use crate::node::replica::{PEERS_MAX, ReplicaAgent, ReplicaParts, replica_name, replica_peer, sequencer_peer};
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
    pub(super) runners: Vec<Runner<T>>,
    /// Agents of each thread, in the order in which they are called.
    pub(super) threads: Vec<Vec<usize>>,
    pub(super) mails: Vec<MailSender<Admission<T::Link>>>,
    pub(super) lines: Vec<Line<T::Link>>,
    /// Agents that are gates, by process.
    pub(super) gates: Vec<usize>,
    /// Agents that are sequencers.
    pub(super) sequencers: Vec<usize>,
    pub(super) sites: Sites,
    /// Each agent's end of the network.
    pub(super) endpoints: Vec<usize>,
    pub(super) counters: Vec<Counters>,
    /// Log regions of each shard, the primary's first.
    pub(super) regions: Vec<Vec<Arc<Region>>>,
    pub(super) map: ClusterMap,
}

impl<T: Transport> Cluster<T> {
    /// The thread an agent runs on.
    pub(super) fn thread_of(&self, agent: usize) -> usize {
        self.threads.iter().position(|agents| agents.contains(&agent)).unwrap_or(0)
    }

    /// On an idle log: a replica that has not verified exactly what its shard's primary has appended.
    pub(super) fn wrongly_verified(&self) -> Option<String> {
        let counts: BTreeMap<String, u64> = self.counters.iter().flat_map(Counters::snapshot).collect();
        let of = |agent: &str, counter: &str| counts.get(&format!("{agent}.{counter}")).copied();
        let agents = || counts.keys().filter_map(|name| name.strip_suffix(".is_primary"));
        let primaries = agents().filter(|agent| of(agent, "is_primary") == Some(1));
        let appended: BTreeMap<&str, u64> =
            primaries.filter_map(|agent| Some((agent.rsplit_once('-')?.0, of(agent, "appended_lsn")?))).collect();
        agents().filter(|agent| of(agent, "is_primary") == Some(0)).find_map(|agent| {
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
struct Places {
    threads: Vec<Vec<usize>>,
    of_agent: Vec<usize>,
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
        let of_agent: Vec<usize> = (0..agents).map(|a| if knobs.shared_threads { process(a) } else { a }).collect();
        let count = of_agent.iter().max().map_or(0, |most| most + 1);
        let threads = (0..count).map(|t| (0..agents).filter(|a| of_agent[*a] == t).collect()).collect();
        Places { threads, wakers: (0..count).map(wake).collect(), of_agent }
    }

    fn waker(&self, agent: usize) -> Waker {
        self.wakers[self.of_agent[agent]].clone()
    }
}

struct Builder<'a, O: Overlay> {
    knobs: &'a Knobs,
    network: &'a Shared,
    overlay: &'a mut O,
    notices: &'a Sender<Notice>,
    places: Places,
    mails: Vec<MailSender<Admission<LinkOf<O>>>>,
    counters: Vec<Counters>,
    lines: Vec<Line<LinkOf<O>>>,
    regions: Vec<Vec<Arc<Region>>>,
    endpoints: Vec<usize>,
    sites: Sites,
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
    let (mails, counters, lines, regions, endpoints) = (vec![], vec![], vec![], vec![], vec![]);
    let sites = Sites::new(knobs);
    let mut builder =
        Builder { knobs, network, overlay, notices, places, mails, counters, lines, regions, endpoints, sites };
    let (sequencer_config, shard_configs) = protocol_configs(knobs);
    let processes = usize::from(knobs.processes);
    let (mut runners, mut ports) = (Vec::new(), Vec::new());
    ports.resize_with(processes, Vec::new);
    for config in shard_configs {
        builder.regions.push(Vec::new());
        for number in 0..=knobs.backups {
            let process = (usize::from(config.shard.0) + usize::from(number)) % processes;
            let (runner, port) = builder.replica(config.clone(), number, process, ports[process].is_empty())?;
            ports[process].push(port);
            runners.push(runner);
        }
    }
    let first_gate = runners.len();
    for ports in ports {
        runners.push(builder.gate(runners.len(), ports));
    }
    let sequencers: Vec<usize> = (0..knobs.sequencers).map(|member| knobs.sequencer(member)).collect();
    for member in 0..knobs.sequencers {
        runners.push(builder.sequencer(member, sequencer_config.clone()));
    }
    let gates: Vec<usize> = (first_gate..first_gate + processes).collect();
    let map = ClusterMap {
        tick_ns: knobs.tick_ns,
        record_bytes_max: knobs.record_bytes_max,
        outstanding_max: knobs.outstanding_max,
        suspect_ns: knobs.suspect_ns,
        shards: (0..knobs.shards).map(|s| gates_of(knobs, s)).collect(),
        ordering: knobs.ordering.name().into(),
    };
    let Builder { places, mails, counters, lines, regions, endpoints, sites, .. } = builder;
    let threads = places.threads;
    Ok(Cluster { runners, threads, mails, lines, gates, sequencers, sites, endpoints, counters, regions, map })
}

/// The gates beside a shard's replicas.
fn gates_of(knobs: &Knobs, shard: u16) -> ShardGates {
    let gate = |number: u16| (number, format!("gate-{}", (shard + number) % knobs.processes));
    ShardGates { shard: ShardId(shard), gates: (0..=knobs.backups).map(gate).collect() }
}

impl<O: Overlay> Builder<'_, O> {
    fn counters(&mut self, name: &str) -> Counters {
        let counters = Counters::new(name);
        self.counters.push(counters.clone());
        counters
    }

    fn mailbox(&mut self, agent: usize) -> Mailbox<Admission<LinkOf<O>>> {
        let (mail, mailbox) = mailbox(self.places.waker(agent));
        self.mails.push(mail);
        mailbox
    }

    fn transport(&mut self, agent: usize, peers: usize, role: Role) -> Tap<O::Transport> {
        let (thread, peers_max) = (self.places.of_agent[agent], peers as u16);
        let carrier = SimTransport::new(self.network, thread, peers_max);
        self.endpoints.push(carrier.endpoint());
        Tap::new(self.overlay.transport(carrier, thread, peers_max), self.network, role, peers_max)
    }

    fn line(&mut self, caller: (usize, &str), to_peer: PeerId, callee: usize, from_peer: PeerId, kind: LinkKind) {
        let (caller, name) = (caller.0, caller.1.to_owned());
        let pause_ns = self.knobs.backoff_ns;
        let ends = Vec::new();
        self.lines.push(Line { caller, caller_name: name, to_peer, callee, from_peer, kind, pause_ns, ends });
    }

    fn replica(
        &mut self,
        config: ShardConfig,
        number: u16,
        process: usize,
        relays: bool,
    ) -> std::io::Result<(Runner<O::Transport>, ShardPort)> {
        let (knobs, shard) = (self.knobs, config.shard);
        let agent = knobs.replica(shard.0, number);
        let own = ReplicaId { number, incarnation: 1 + agent as u64 };
        let config = ShardConfig { replica: own, ..config };
        let name = replica_name(shard, number);
        let region = Region::new(knobs.region_bytes)?;
        self.regions[usize::from(shard.0)].push(region.clone());
        let log = Verifier::new(region.clone(), shard);
        let (replica_waker, gate_waker) = (self.places.waker(agent), self.places.waker(knobs.replicas() + process));
        let (requests, mut shard_requests) = spsc::channel(knobs.requests_bytes, replica_waker.clone())?;
        let (shard_answers, mut answers) = spsc::channel(knobs.answers_bytes, gate_waker.clone())?;
        shard_requests.set_producer_waker(gate_waker.clone());
        answers.set_producer_waker(replica_waker);
        let progress = Arc::new(Progress::default());
        let port =
            ShardPort { shard, replica: number, log: log.reader(), progress: progress.clone(), requests, answers };
        let gate = GatePort { progress, requests: shard_requests, answers: shard_answers, waker: gate_waker, relays };
        let role = Role::Follower { number: agent };
        let mut transport = self.transport(agent, PEERS_MAX, role);
        let source = transport.register(region);
        for member in 0..knobs.sequencers {
            let callee = knobs.sequencer(member);
            self.line((agent, &name), sequencer_peer(member), callee, PeerId(agent as u16), LinkKind::Order);
        }
        for higher in number + 1..=knobs.backups {
            let callee = knobs.replica(shard.0, higher);
            self.line((agent, &name), replica_peer(higher), callee, replica_peer(number), LinkKind::Replication);
        }
        let parts = ReplicaParts {
            config,
            replicas: 1 + knobs.backups,
            report_delay_ns: 0,
            options: LogOptions { retention: knobs.retention, record_bytes_max: knobs.record_bytes_max as usize },
            log,
            gate,
            mailbox: self.mailbox(agent),
            notices: self.notices.clone(),
            counters: self.counters(&name),
        };
        Ok((Runner::Replica(Box::new(ReplicaAgent::new(parts, source, transport)?)), port))
    }

    fn gate(&mut self, agent: usize, ports: Vec<ShardPort>) -> Runner<O::Transport> {
        let knobs = self.knobs;
        let config = GateConfig {
            clients_max: knobs.load.clients * 3 + 4,
            ring_bytes: knobs.ring_bytes,
            outstanding_max: knobs.outstanding_max,
            record_bytes_max: knobs.record_bytes_max,
            free_cuts_max: knobs.free_cuts_max,
            prefault: false,
        };
        let transport = self.transport(agent, config.clients_max.into(), Role::Bystander);
        let (mailbox, counters) = (self.mailbox(agent), self.counters("gate"));
        let parts = GateParts { config, ports, mailbox, notices: self.notices.clone(), counters };
        Runner::Gate(Box::new(GateAgent::new(parts, transport)))
    }

    fn sequencer(&mut self, member: u16, config: SequencerConfig) -> Runner<O::Transport> {
        let (knobs, agent) = (self.knobs, self.knobs.sequencer(member));
        let (name, first) = (sequencer_name(knobs, member), knobs.replicas() as u16);
        for higher in member + 1..knobs.sequencers {
            let (callee, kind) = (knobs.sequencer(higher), LinkKind::Order);
            self.line((agent, &name), PeerId(first + higher), callee, PeerId(first + member), kind);
        }
        let counters = self.counters(&name);
        let (thread, waker) = (self.places.of_agent[agent], self.places.waker(agent));
        let (network, overlay, notices) = (self.network, &mut *self.overlay, self.notices);
        let site = Site { knobs, network, overlay, notices, thread, waker, counters };
        let (runner, mail, endpoint) = self.sites.build(site, member, config);
        self.mails.push(mail);
        self.endpoints.push(endpoint);
        runner
    }
}
