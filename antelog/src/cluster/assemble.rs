//! Builds the agents of the local nodes, with the memory, queues and wakers that connect them.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use antelog_core::channel::spsc;
use antelog_core::config::{Config, Durability, NodeEntry, PolicyConfig, Role, ShardEntry};
use antelog_core::counters::Counters;
use antelog_core::log::{LogOptions, Retention, Verifier};
use antelog_core::mem::Region;
use antelog_core::node::bus::{GatePort, Progress, ShardPort};
use antelog_core::node::gate::{GateAgent, GateConfig, GateParts, OldLog};
use antelog_core::node::group::journal::{FileJournal, Journal};
use antelog_core::node::group::{GroupParts, member_id};
use antelog_core::node::launch::cores;
use antelog_core::node::mailbox::{Admission, MailSender, Mailbox, Notice, mailbox};
use antelog_core::node::replica::{
    DiskOptions, Opened, Readers, ReplicaAgent, ReplicaParts, open_disk, replica_name, replica_peer,
};
use antelog_core::node::sequencer::{Replica, SequencerAgent, SequencerParts};
use antelog_core::node::{Agent, AgentBuilder, Idle, LaunchMode, Parker, ThreadPlan, Waker, now_ns, plan};
use antelog_core::storage::{Keep, UringDisk};
use antelog_core::transport::{PeerId, Transport};
use antelog_protocol::sequencer::{MemberConfig, SequencerConfig};
use antelog_protocol::shard::ShardConfig;
use antelog_protocol::{ReplicaId, ShardId};

use super::connect::incarnation;
use super::networks::Networks;
use crate::network::{NodeLink, Traffic};

/// The queue of answers from a shard to its gate, in bytes: all pending acknowledgements and a second of order entries.
const ANSWERS_BYTES: usize = 4 << 20;

/// The queue of appends from a gate to a shard, in bytes, unless records are large. A cycle's worth: a longer queue would
/// only move the backlog from the client's ring to here, and its bytes out of the processor's cache.
const REQUESTS_BYTES_MIN: usize = 512 << 10;

/// Raft's ticks in the time after which a peer is suspected: a leader that is silent for half of it may lose its lead.
const RAFT_TICKS: u64 = 20;

type Mail = MailSender<Admission<NodeLink>>;

/// How to reach an agent from outside its thread.
pub(super) struct Door {
    pub(super) agent: String,
    pub(super) mail: Mail,
}

/// Everything that was built.
pub(super) struct Assembly {
    /// Threads to start, with their agents; none in launch mode `invoked`.
    pub(super) threads: Vec<ThreadPlan>,
    /// The agents in launch mode `invoked`, for the caller's own thread.
    pub(super) invoked: Vec<AgentBuilder>,
    /// The order in which those are called.
    pub(super) invoked_turns: Vec<usize>,
    /// The agent of each local node.
    pub(super) doors: Doors,
    pub(super) counters: Vec<Counters>,
}

/// Doors of the local agents.
pub(super) struct Doors {
    pub(super) nodes: BTreeMap<u16, Door>,
    pub(super) gate: Option<Door>,
    /// The gate's counters: how many clients it has.
    pub(super) gate_counters: Option<Counters>,
}

/// Numbers of replicas at the sequencer: nodes with a shard, by shard, in the order of their numbers in it.
pub(super) fn replicas(config: &Config) -> Vec<(u16, Replica)> {
    let mut list = Vec::new();
    for shard in shards(config) {
        for (number, node) in config.replicas_of(shard.id).enumerate() {
            let peer = PeerId(list.len() as u16);
            list.push((node.id, Replica { peer, shard: ShardId(shard.id), replica: number as u16 }));
        }
    }
    list
}

/// A sequencer's number at the others: they come after the replicas.
pub(super) fn member_peer(config: &Config, node: u16) -> Option<PeerId> {
    let place = config.sequencers().iter().position(|n| n.id == node)?;
    Some(PeerId((replicas(config).len() + place) as u16))
}

/// Shards in id order.
fn shards(config: &Config) -> Vec<ShardEntry> {
    let mut list = config.shards.clone();
    list.sort_unstable_by_key(|s| s.id);
    list
}

/// A number that no one else has, for tick phases.
fn random_u64() -> Result<u64, String> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|e| format!("the operating system gives no random numbers: {e}"))?;
    Ok(u64::from_le_bytes(bytes))
}

/// The threads being planned: agents are given to them in order.
struct Threads {
    plans: Vec<ThreadPlan>,
    wakers: Vec<Waker>,
    /// Thread of each agent.
    of_agent: Vec<usize>,
    next: usize,
    invoked: Vec<AgentBuilder>,
}

impl Threads {
    fn new(config: &Config, agents: usize) -> Result<Threads, String> {
        let launch = &config.launch;
        let placements =
            plan(launch.mode, agents, cores().len(), launch.idle, launch.force).map_err(|e| e.to_string())?;
        let mut threads =
            Threads { plans: vec![], wakers: vec![], of_agent: vec![0; agents], next: 0, invoked: vec![] };
        if launch.mode == LaunchMode::Invoked {
            // Whoever drives the agents does not park them.
            threads.wakers.push(Waker::none());
        }
        for (number, placement) in placements.into_iter().enumerate() {
            let (parker, waker) = Parker::new().map_err(|e| format!("cannot make an eventfd: {e}"))?;
            let core = match launch.first_core {
                Some(first) => Some(first + number),
                None => placement.core,
            };
            for agent in placement.agents {
                threads.of_agent[agent] = number;
            }
            threads.wakers.push(if launch.idle == Idle::Park { waker } else { Waker::none() });
            threads.plans.push(ThreadPlan {
                name: format!("antelog-{number}"),
                core,
                idle: launch.idle,
                spin_ns: launch.spin_us * 1000,
                parker,
                agents: vec![],
                turns: vec![],
            });
        }
        Ok(threads)
    }

    /// The waker of the thread that runs an agent.
    fn waker(&self, agent: usize) -> Waker {
        self.wakers[self.of_agent[agent]].clone()
    }

    fn add(&mut self, builder: AgentBuilder) {
        let thread = self.of_agent[self.next];
        self.next += 1;
        match self.plans.get_mut(thread) {
            Some(plan) => plan.agents.push(builder),
            None => self.invoked.push(builder),
        }
    }
}

/// What is collected while agents are built.
struct Assembler<'a> {
    config: &'a Config,
    networks: &'a Networks,
    notices: &'a Sender<Notice>,
    threads: Threads,
    doors: Doors,
    counters: Vec<Counters>,
    ports: Vec<ShardPort>,
    /// The gate's number among the agents: after the primaries.
    gate: usize,
}

/// The turns of agents that share a thread: backups between two turns of the primaries, so that what a primary writes is
/// placed, and known there to be, in the same step in which the gate then delivers it. See "Launch modes on few cores" in
/// DESIGN.md. Agents are numbered primaries, gate, other replicas, sequencers.
fn turns(primaries: usize, others: usize, sequencers: usize) -> Vec<usize> {
    let gates = usize::from(primaries + others > 0);
    let first_other = primaries + gates;
    let first_sequencer = first_other + others;
    let again = if others > 0 { 0..primaries } else { 0..0 };
    (0..primaries)
        .chain(first_other..first_sequencer)
        .chain(again)
        .chain(primaries..first_other)
        .chain(first_sequencer..first_sequencer + sequencers)
        .collect()
}

/// Builds the agents of the local nodes.
pub(super) fn assemble(
    config: &Config,
    local: &BTreeSet<u16>,
    networks: &Networks,
    notices: &Sender<Notice>,
) -> Result<Assembly, String> {
    let with = |wanted: fn(Role) -> bool| config.nodes.iter().filter(move |n| wanted(n.role) && local.contains(&n.id));
    let first = || with(|role| role == Role::Primary);
    let others = || with(|role| matches!(role, Role::Backup | Role::Spare));
    let sequencers = || with(|role| role == Role::Sequencer);
    let primaries = first().count();
    let gates = usize::from(primaries + others().count() > 0);
    let agents = local.len() + gates;
    let mut assembler = Assembler {
        config,
        networks,
        notices,
        threads: Threads::new(config, agents)?,
        doors: Doors { nodes: BTreeMap::new(), gate: None, gate_counters: None },
        counters: vec![],
        ports: vec![],
        gate: primaries,
    };
    let mut builders = Vec::new();
    for (number, node) in first().enumerate() {
        builders.push(assembler.replica(node, number)?);
    }
    let mut other_builders = Vec::new();
    for (number, node) in others().enumerate() {
        other_builders.push(assembler.replica(node, primaries + gates + number)?);
    }
    if gates > 0 {
        builders.push(assembler.gate()?);
    }
    builders.extend(other_builders);
    for node in sequencers() {
        builders.push(assembler.sequencer(node, builders.len())?);
    }
    let shared_turns = turns(primaries, others().count(), sequencers().count());
    for builder in builders {
        assembler.threads.add(builder);
    }
    let Assembler { mut threads, doors, counters, .. } = assembler;
    for plan in &mut threads.plans {
        // Agents either share one thread or have one each.
        plan.turns = if plan.agents.len() == agents { shared_turns.clone() } else { vec![0] };
    }
    Ok(Assembly {
        threads: threads.plans,
        invoked: threads.invoked,
        invoked_turns: if config.launch.mode == LaunchMode::Invoked { shared_turns } else { Vec::new() },
        doors,
        counters,
    })
}

impl Assembler<'_> {
    fn counters(&mut self, agent: &str) -> Counters {
        let counters = Counters::new(agent);
        self.counters.push(counters.clone());
        counters
    }

    fn door(&mut self, node: &NodeEntry, agent: &str, waker: Waker) -> Mailbox<Admission<NodeLink>> {
        let (mail, mailbox) = mailbox(waker);
        self.doors.nodes.insert(node.id, Door { agent: agent.into(), mail });
        mailbox
    }

    fn region(&self, what: &str) -> Result<Arc<Region>, String> {
        let bytes = self.config.cluster.region_bytes;
        let region = Region::new(bytes).map_err(|e| {
            format!("no memory for {what}'s log region of {bytes} bytes: {e}; lower cluster.region_bytes")
        })?;
        if self.config.launch.prefault {
            region.prefault();
        }
        Ok(region)
    }

    fn entry(&self, shard: ShardId) -> Option<&ShardEntry> {
        self.config.shards.iter().find(|entry| entry.id == shard.0)
    }

    fn shard_config(&self, replica: ReplicaId, shard: ShardId) -> Result<ShardConfig, String> {
        let (c, policy) = (&self.config.cluster, &self.config.policy);
        let entry = self.entry(shard);
        let tick_ns = c.tick_us * 1000;
        Ok(ShardConfig {
            shard,
            replica,
            epoch: 0,
            tick_ns,
            tick_phase_ns: match entry.and_then(|s| s.tick_phase_us) {
                Some(phase_us) => phase_us * 1000,
                None => random_u64()?,
            },
            beat: policy.beat,
            fill_wait_ns: PolicyConfig::ns(policy.fill_wait_ticks, tick_ns),
            pause_gaps: policy.pause_gaps,
            standby: entry.is_some_and(|s| s.standby),
            report_every_ns: c.suspect_ms * 1_000_000 / 4,
            pending_max: c.pending_max,
            sessions_max: c.sessions_max,
            session_remembered: c.outstanding_max as usize,
            free_cuts_max: c.free_cuts_max,
        })
    }

    fn replica(&mut self, node: &NodeEntry, agent: usize) -> Result<AgentBuilder, String> {
        let shard = node.shard_id().unwrap_or_default();
        let replicas = self.config.replicas_of(shard.0).count() as u16;
        let number = self.config.replicas_of(shard.0).position(|m| m.id == node.id).unwrap_or_default() as u16;
        let name = replica_name(shard, number);
        let c = &self.config.cluster;
        let region = self.region(&name)?;
        let mut log = Verifier::new(region.clone(), shard);
        let requests_bytes = (4 * (c.record_bytes_max as usize + 128)).next_power_of_two().max(REQUESTS_BYTES_MIN);
        let queue = |error: std::io::Error| format!("no memory for {name}'s queues: {error}");
        let (replica_waker, gate_waker) = (self.threads.waker(agent), self.threads.waker(self.gate));
        let (requests, mut shard_requests) = spsc::channel(requests_bytes, replica_waker.clone()).map_err(queue)?;
        let (shard_answers, mut answers) = spsc::channel(ANSWERS_BYTES, gate_waker.clone()).map_err(queue)?;
        shard_requests.set_producer_waker(gate_waker.clone());
        answers.set_producer_waker(replica_waker.clone());
        let progress = Arc::new(Progress::default());
        let relays = self.ports.is_empty();
        let own = ReplicaId { number, incarnation: incarnation() };
        let config = self.shard_config(own, shard)?;
        let opened = self.open_disk(node, &mut log, &config, replica_waker.clone())?;
        let (disk, old) = opened.map_or((None, None), |opened| (Some(opened.parts), Some(opened.old)));
        let old = old.map(|old| RefCell::new(OldLog::new(old)));
        let (log_reader, served) = (log.reader(), progress.clone());
        self.ports.push(ShardPort {
            shard,
            replica: number,
            log: log_reader,
            progress: served,
            requests,
            answers,
            old,
        });
        let gate = GatePort { progress, requests: shard_requests, answers: shard_answers, waker: gate_waker, relays };
        let report_delay_ns = self.entry(shard).map_or(0, |entry| entry.report_delay_us * 1000);
        let c = &self.config.cluster;
        // What is on disk needs not stay in memory.
        let retention = if disk.is_some() { Retention::Recycle } else { c.retention };
        let options = LogOptions { retention, record_bytes_max: c.record_bytes_max as usize };
        let (counters, network) = (self.counters(&name), self.networks.of(node));
        let mailbox = self.door(node, &name, replica_waker);
        let notices = self.notices.clone();
        Ok(Box::new(move || {
            let peers = usize::from(replica_peer(replicas).0);
            let mut transport = network.transport(peers, Traffic::OrderStream, Some(&counters))?;
            let source = transport.register(region.clone());
            transport.prepare(&region);
            network.check()?;
            let parts = ReplicaParts {
                config,
                replicas,
                report_delay_ns,
                options,
                log,
                disk,
                gate,
                mailbox,
                notices,
                counters,
            };
            let agent = ReplicaAgent::new(parts, source, transport).map_err(|e| e.to_string())?;
            Ok(Box::new(agent) as Box<dyn Agent>)
        }))
    }

    /// Opens the log of a replica that keeps one on disk, and takes it up in `log`.
    fn open_disk(
        &self,
        node: &NodeEntry,
        log: &mut Verifier,
        config: &ShardConfig,
        waker: Waker,
    ) -> Result<Option<Opened>, String> {
        let Some(folder) = self.config.data_dir(node) else { return Ok(None) };
        let c = &self.config.cluster;
        let disk = UringDisk::open(&folder.join("log"), true)?;
        let notice = disk.notice();
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let options = DiskOptions {
            cluster: c.name.clone(),
            flushed: c.durability == Durability::Flushed,
            keep: Keep {
                bytes: (c.keep_bytes > 0).then_some(c.keep_bytes),
                age_ms: (c.keep_s > 0).then_some(c.keep_s * 1000),
            },
            record_bytes_max: c.record_bytes_max as usize,
            unix_ms: (since.as_millis() as u64).saturating_sub(now_ns() / 1_000_000),
            readers: Readers::Threads,
        };
        let opened = open_disk(disk, log, config, &options, waker, self.threads.waker(self.gate))?;
        for text in notice.iter().chain(&opened.notice) {
            let agent = replica_name(config.shard, config.replica.number);
            // Nobody listens yet; it is read when somebody does.
            let _ = self.notices.send(Notice::Warning { agent, text: text.clone() });
        }
        Ok(Some(opened))
    }

    fn gate(&mut self) -> Result<AgentBuilder, String> {
        let c = &self.config.cluster;
        let config = GateConfig {
            clients_max: c.clients_max,
            ring_bytes: c.client_ring_bytes,
            outstanding_max: c.outstanding_max,
            record_bytes_max: c.record_bytes_max,
            free_cuts_max: c.free_cuts_max,
            prefault: self.config.launch.prefault,
        };
        let (mail, mailbox) = mailbox(self.threads.waker(self.gate));
        self.doors.gate = Some(Door { agent: "gate".into(), mail });
        let counters = self.counters("gate");
        self.doors.gate_counters = Some(counters.clone());
        let network = self.networks.of_gate();
        let ports = std::mem::take(&mut self.ports);
        let notices = self.notices.clone();
        Ok(Box::new(move || {
            let transport = network.transport(config.clients_max.into(), Traffic::Rings, Some(&counters))?;
            let parts = GateParts { config, ports, mailbox, notices, counters };
            Ok(Box::new(GateAgent::new(parts, transport)) as Box<dyn Agent>)
        }))
    }

    fn sequencer(&mut self, node: &NodeEntry, agent: usize) -> Result<AgentBuilder, String> {
        let nodes: Vec<u16> = self.config.sequencers().iter().map(|n| n.id).collect();
        let name = if nodes.len() == 1 { "sequencer".into() } else { format!("sequencer-{}", node.id) };
        let (counters, network) = (self.counters(&name), self.networks.of(node));
        let mailbox = self.door(node, &name, self.threads.waker(agent));
        let (c, policy) = (&self.config.cluster, &self.config.policy);
        let tick_ns = c.tick_us * 1000;
        let config = SequencerConfig {
            tick_ns,
            tick_phase_ns: random_u64()?,
            window_cuts: c.window_cuts,
            ordering: c.ordering,
            beat: policy.beat,
            shards: shards(self.config)
                .into_iter()
                .map(|s| MemberConfig {
                    shard: ShardId(s.id),
                    quota: s.quota,
                    standby: s.standby,
                    replicas: self.config.replicas_of(s.id).count() as u16,
                    members: 1 + self.config.nodes_of(s.id, Role::Backup).count() as u16,
                })
                .collect(),
            adaptive_quotas: policy.adaptive_quotas,
            target_pace_ns: PolicyConfig::ns(policy.target_pace_ticks, tick_ns),
            prefix_pace_ns: PolicyConfig::ns(policy.prefix_pace_ticks, tick_ns),
            late_ticks: policy.late_ticks,
            ground_windows: policy.ground_windows,
            suspect_ns: c.suspect_ms * 1_000_000,
            lost_grace_ns: c.lost_grace_ms * 1_000_000,
            free_cuts_max: c.free_cuts_max,
        };
        let replicas: Vec<Replica> = replicas(self.config).into_iter().map(|(_, replica)| replica).collect();
        let notices = self.notices.clone();
        let own = nodes.iter().position(|id| *id == node.id).unwrap_or_default();
        let (id, tick_ns) = (member_id(incarnation(), node.id), c.suspect_ms * 1_000_000 / RAFT_TICKS);
        // On its own it is the only one that has the order log: what it keeps must not be lost with the machine.
        let flushed = c.durability == Durability::Flushed || nodes.len() == 1;
        let folder = self.config.data_dir(node).map(|folder| folder.join("group"));
        let waker = self.threads.waker(agent);
        Ok(Box::new(move || {
            let peers = replicas.len() + nodes.len();
            let transport = network.transport(peers, Traffic::Reports, Some(&counters))?;
            let journal = folder.map(|folder| FileJournal::open(&folder, id, flushed, waker)).transpose()?;
            let journal = journal.map(|(journal, kept)| (Box::new(journal) as Box<dyn Journal>, kept));
            let alone = nodes.len() == 1 && journal.is_none();
            let parts = GroupParts { own, id, tick_ns, replicas: replicas.len(), journal, nodes };
            let group = (!alone).then_some(parts);
            let parts = SequencerParts { name, config, replicas, group, mailbox, notices, counters };
            Ok(Box::new(SequencerAgent::new(parts, transport)) as Box<dyn Agent>)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::turns;

    #[test]
    fn a_shared_thread_runs_backups_between_its_primaries_turns() {
        // Two shards with a backup each: primaries 0 and 1, gate 2, backups 3 and 4, sequencer 5.
        assert_eq!(turns(2, 2, 1), [0, 1, 3, 4, 0, 1, 2, 5]);
        // One node on its own.
        assert_eq!(turns(1, 0, 0), [0, 1]);
        assert_eq!(turns(0, 1, 0), [1, 0]);
        assert_eq!(turns(0, 0, 1), [0]);
    }
}
