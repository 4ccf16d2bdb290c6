//! Builds the cluster of a run: the production agents with regions, queues and mirrors as the composition root builds them,
//! and the lines between them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use antelog_protocol::ShardId;
use antelog_protocol::sequencer::{MemberConfig, SequencerConfig};
use antelog_protocol::shard::ShardConfig;
use antelog_protocol::wire::session::ClusterMap;

use super::control::Line;
use super::knobs::Knobs;
use super::network::{LinkKind, Shared, SimTransport};
use super::overlay::{LinkOf, Overlay};
use super::rng::Rng;
use super::tap::{Role, Tap};
use crate::channel::mirror::{CONTROL_BYTES, Mirror};
use crate::channel::spsc;
use crate::counters::Counters;
use crate::log::LogWriter;
use crate::mem::Region;
use crate::node::backup::{BackupAgent, BackupParts, PRIMARY};
use crate::node::bus::{GatePort, Progress, ShardPort};
use crate::node::gate::{GateAgent, GateConfig, GateParts};
use crate::node::mailbox::{Admission, MailSender, Mailbox, Notice, mailbox};
use crate::node::sequencer::{Replica, SequencerAgent, SequencerParts};
use crate::node::shard::{SEQUENCER, ShardAgent, ShardParts};
use crate::node::{Agent, Waker};
use crate::transport::{PeerId, Transport};

/// An agent of the cluster.
pub(super) enum Runner<T: Transport> {
    Shard(Box<ShardAgent<Tap<T>>>),
    Backup(Box<BackupAgent<Tap<T>>>),
    Gate(Box<GateAgent<Tap<T>>>),
    Sequencer(Box<SequencerAgent<Tap<T>>>),
}

impl<T: Transport> Runner<T> {
    pub(super) fn agent(&mut self) -> &mut dyn Agent {
        match self {
            Runner::Shard(agent) => &mut **agent,
            Runner::Backup(agent) => &mut **agent,
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
    pub(super) sequencer: usize,
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

    /// On an idle log: a backup that has not verified exactly what its primary has appended. Nothing that clients see
    /// depends on it while no backup is promoted.
    pub(super) fn wrongly_verified(&self) -> Option<String> {
        let counts: BTreeMap<String, u64> = self.counters.iter().flat_map(Counters::snapshot).collect();
        counts.iter().find_map(|(name, verified)| {
            let backup = name.strip_suffix(".verified_lsn")?;
            let shard = backup.strip_prefix("backup-")?.split('-').next()?;
            let appended = counts.get(&format!("shard-{shard}.appended_lsn"))?;
            (verified != appended).then(|| format!("{backup} has verified {verified} slots of {appended}"))
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
            .map(|(id, quota)| MemberConfig { shard: ShardId(id), quota: *quota, standby: policy.stands_by(id) })
            .collect(),
        adaptive_quotas: policy.adaptive_quotas,
        target_pace_ns: policy.target_pace_ns,
        prefix_pace_ns: policy.prefix_pace_ns,
        late_ticks: policy.late_ticks,
        ground_windows: policy.ground_windows,
        free_cuts_max: knobs.free_cuts_max,
    };
    let shard = |shard| ShardConfig {
        shard: ShardId(shard),
        epoch: 0,
        backups: knobs.backups.into(),
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
    /// Agents are numbered: primaries, gates, backups by shard, the sequencer.
    fn new(knobs: &Knobs, wake: &impl Fn(usize) -> Waker) -> Places {
        let (shards, processes) = (usize::from(knobs.shards), usize::from(knobs.processes));
        let agents = knobs.agents();
        let backups = shards * usize::from(knobs.backups);
        let process = |agent: usize| match agent {
            _ if agent < shards => agent % processes,
            _ if agent < shards + processes => agent - shards,
            // A backup lives beside another process's primaries, if there is another.
            _ if agent < shards + processes + backups => (agent + 1) % processes,
            _ if processes == 1 => 0,
            _ => processes,
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
    let (mails, counters, lines, regions) = (vec![], vec![], vec![], vec![]);
    let mut builder = Builder { knobs, network, overlay, notices, places, mails, counters, lines, regions };
    let (sequencer_config, shard_configs) = protocol_configs(knobs);
    let (shards, processes) = (usize::from(knobs.shards), usize::from(knobs.processes));
    let (mut runners, mut ports) = (Vec::new(), Vec::new());
    ports.resize_with(processes, Vec::new);
    for config in shard_configs {
        let (runner, port) = builder.shard(config)?;
        ports[runners.len() % processes].push(port);
        runners.push(runner);
    }
    for ports in ports {
        runners.push(builder.gate(runners.len(), ports));
    }
    for shard in 0..knobs.shards {
        for replica in 1..=knobs.backups {
            runners.push(builder.backup(runners.len(), shard, replica)?);
        }
    }
    let sequencer = runners.len();
    runners.push(builder.sequencer(sequencer, sequencer_config));
    let gates: Vec<usize> = (shards..shards + processes).collect();
    let map = ClusterMap {
        tick_ns: knobs.tick_ns,
        record_bytes_max: knobs.record_bytes_max,
        outstanding_max: knobs.outstanding_max,
        shards: (0..knobs.shards).map(|s| (ShardId(s), format!("gate-{}", usize::from(s) % processes))).collect(),
        ordering: knobs.ordering.name().into(),
    };
    let Builder { places, mails, counters, lines, regions, .. } = builder;
    Ok(Cluster { runners, threads: places.threads, mails, lines, gates, sequencer, counters, regions, map })
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
        if role == Role::Leader {
            self.network.borrow_mut().let_overtake(carrier.endpoint());
        }
        Tap::new(self.overlay.transport(carrier, thread, peers_max), self.network, role, peers_max)
    }

    /// Number of a replica at the sequencer, and its agent's.
    fn replica(&self, shard: u16, replica: u16) -> (PeerId, usize) {
        let (k, backups) = (usize::from(self.knobs.shards), usize::from(self.knobs.backups));
        let first_backup = k + usize::from(self.knobs.processes);
        let agent = match replica {
            0 => shard.into(),
            _ => first_backup + usize::from(shard) * backups + usize::from(replica) - 1,
        };
        (PeerId(shard * (1 + self.knobs.backups) + replica), agent)
    }

    fn line(&mut self, caller: (usize, &str), to_peer: PeerId, callee: usize, from_peer: PeerId, kind: LinkKind) {
        let (caller, name) = (caller.0, caller.1.to_owned());
        let pause_ns = self.knobs.backoff_ns;
        let ends = Vec::new();
        self.lines.push(Line { caller, caller_name: name, to_peer, callee, from_peer, kind, pause_ns, ends });
    }

    fn shard(&mut self, config: ShardConfig) -> std::io::Result<(Runner<O::Transport>, ShardPort)> {
        let shard = config.shard;
        let (agent, knobs) = (usize::from(shard.0), self.knobs);
        let gate = usize::from(knobs.shards) + agent % usize::from(knobs.processes);
        let name = format!("shard-{shard}");
        let region = Region::new(knobs.region_bytes)?;
        self.regions.push(vec![region.clone()]);
        let log = LogWriter::new(region.clone(), shard, 0, knobs.retention, knobs.record_bytes_max as usize);
        let (shard_waker, gate_waker) = (self.places.waker(agent), self.places.waker(gate));
        let (requests, mut shard_requests) = spsc::channel(knobs.requests_bytes, shard_waker.clone())?;
        let (shard_answers, mut answers) = spsc::channel(knobs.answers_bytes, gate_waker.clone())?;
        shard_requests.set_producer_waker(gate_waker.clone());
        answers.set_producer_waker(shard_waker);
        let progress = Arc::new(Progress::default());
        let port = ShardPort { shard, log: log.reader(), progress: progress.clone(), requests, answers };
        let gate = GatePort { progress, requests: shard_requests, answers: shard_answers, waker: gate_waker };
        let mut transport =
            self.transport(agent, 1 + usize::from(knobs.backups), Role::Follower { leader: SEQUENCER, number: agent });
        let source = transport.register(region.clone());
        let (at_sequencer, _) = self.replica(shard.0, 0);
        let sequencer = knobs.agents() - 1;
        self.line((agent, &name), SEQUENCER, sequencer, at_sequencer, LinkKind::Order);
        let mut mirrors = Vec::new();
        for number in 1..=knobs.backups {
            mirrors.push(Mirror::new(PeerId(number), source, region.len(), Region::new(CONTROL_BYTES)?));
            let (_, backup) = self.replica(shard.0, number);
            self.line((agent, &name), PeerId(number), backup, PRIMARY, LinkKind::Replication);
        }
        let (mailbox, counters) = (self.mailbox(agent), self.counters(&name));
        let notices = self.notices.clone();
        let parts = ShardParts { config, report_delay_ns: 0, log, mirrors, gate, mailbox, notices, counters };
        Ok((Runner::Shard(Box::new(ShardAgent::new(parts, transport))), port))
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

    fn backup(&mut self, agent: usize, shard: u16, replica: u16) -> std::io::Result<Runner<O::Transport>> {
        let name = format!("backup-{shard}-{replica}");
        let region = Region::new(self.knobs.region_bytes)?;
        self.regions[usize::from(shard)].push(region.clone());
        let (at_sequencer, _) = self.replica(shard, replica);
        let sequencer = self.knobs.agents() - 1;
        self.line((agent, &name), SEQUENCER, sequencer, at_sequencer, LinkKind::Order);
        let parts = BackupParts {
            shard: ShardId(shard),
            replica,
            region,
            report_every_ns: self.knobs.report_every_ns,
            free_cuts_max: self.knobs.free_cuts_max,
            mailbox: self.mailbox(agent),
            notices: self.notices.clone(),
            counters: self.counters(&name),
        };
        let transport = self.transport(agent, 2, Role::Follower { leader: SEQUENCER, number: agent });
        Ok(Runner::Backup(Box::new(BackupAgent::new(parts, transport)?)))
    }

    fn sequencer(&mut self, agent: usize, config: SequencerConfig) -> Runner<O::Transport> {
        let members = 1 + self.knobs.backups;
        let replica = |at: u16| Replica { peer: PeerId(at), shard: ShardId(at / members), replica: at % members };
        let replicas: Vec<Replica> = (0..self.knobs.shards * members).map(replica).collect();
        let transport = self.transport(agent, replicas.len(), Role::Leader);
        let (mailbox, counters) = (self.mailbox(agent), self.counters("sequencer"));
        let (name, group) = ("sequencer".into(), None);
        let parts = SequencerParts { name, config, replicas, group, mailbox, notices: self.notices.clone(), counters };
        Runner::Sequencer(Box::new(SequencerAgent::new(parts, transport)))
    }
}
