//! A process: the replicas and the gate that live and die together, built as the composition root builds them.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use antelog_protocol::shard::ShardConfig;
use antelog_protocol::{ReplicaId, ShardId};

use super::cluster::{Places, Runner, protocol_configs, sequencer_name};
use super::knobs::Knobs;
use super::network::{Shared, SimTransport};
use super::oracle::Life;
use super::overlay::{LinkOf, Overlay};
use super::sequencers::Sites;
use super::stores::Stores;
use super::tap::{Role, Tap};
use crate::channel::spsc;
use crate::counters::Counters;
use crate::log::{LogOptions, LogReader, Retention, Verifier};
use crate::mem::Region;
use crate::node::bus::{GatePort, Progress, ShardPort};
use crate::node::gate::{GateAgent, GateConfig, GateParts, OldLog};
use crate::node::mailbox::{Admission, MailSender, Mailbox, Notice, mailbox};
use crate::node::replica::{PEERS_MAX, ReplicaAgent, ReplicaParts, replica_name};
use crate::node::sequencer::{Replica, SequencerAgent, SequencerParts};
use crate::storage::SimDisk;
use crate::transport::{PeerId, Transport};

/// Both ends of a mailbox for connections.
type Mails<L> = (MailSender<Admission<L>>, Mailbox<Admission<L>>);

/// A replica that begins a life.
pub(super) struct Birth {
    pub(super) shard: u16,
    pub(super) life: Life,
    pub(super) agent: usize,
    pub(super) region: Arc<Region>,
    pub(super) reader: LogReader,
    pub(super) disk: Option<SimDisk>,
}

/// An agent that was built, and what belongs to it.
pub(super) struct Part<T: Transport> {
    pub(super) agent: usize,
    pub(super) runner: Runner<T>,
    pub(super) mail: MailSender<Admission<T::Link>>,
    /// Its end of the network.
    pub(super) endpoint: usize,
    pub(super) counters: Counters,
    pub(super) birth: Option<Birth>,
}

/// What agents are built with.
pub(super) struct Builder<'a, O: Overlay> {
    pub(super) knobs: &'a Knobs,
    pub(super) network: &'a Shared,
    pub(super) overlay: &'a mut O,
    pub(super) notices: &'a Sender<Notice>,
    pub(super) places: &'a Places,
    pub(super) sites: &'a mut Sites,
    pub(super) stores: &'a mut Stores,
}

impl<O: Overlay> Builder<'_, O> {
    /// The agents of a process, with empty logs or those on their disks, in their `life`th life.
    ///
    /// # Errors
    /// When the system has no memory for it.
    pub(super) fn process(&mut self, process: usize, life: u64) -> std::io::Result<Vec<Part<O::Transport>>> {
        let (_, configs) = protocol_configs(self.knobs);
        let (mut parts, mut ports) = (Vec::new(), Vec::new());
        for config in configs {
            for number in 0..=self.knobs.backups {
                let agent = self.knobs.replica(config.shard.0, number);
                if self.places.processes[agent] == process {
                    let (part, port) = self.replica(config.clone(), number, (process, life), ports.is_empty())?;
                    ports.push(port);
                    parts.push(part);
                }
            }
        }
        parts.push(self.gate(self.knobs.replicas() + process, ports));
        Ok(parts)
    }

    fn mailbox(&self, agent: usize) -> Mails<LinkOf<O>> {
        mailbox(self.places.waker(agent))
    }

    fn transport(&mut self, agent: usize, peers: usize, role: Role) -> (Tap<O::Transport>, usize) {
        let (thread, peers_max) = (self.places.of_agent[agent], peers as u16);
        let carrier = SimTransport::new(self.network, thread, peers_max);
        let endpoint = carrier.endpoint();
        if matches!(role, Role::Leader { .. }) {
            self.network.borrow_mut().let_overtake(endpoint);
        }
        (Tap::new(self.overlay.transport(carrier, thread, peers_max), self.network, role, peers_max), endpoint)
    }

    fn replica(
        &mut self,
        config: ShardConfig,
        number: u16,
        (process, life): (usize, u64),
        relays: bool,
    ) -> std::io::Result<(Part<O::Transport>, ShardPort)> {
        let (knobs, shard) = (self.knobs, config.shard);
        let agent = knobs.replica(shard.0, number);
        let own = ReplicaId { number, incarnation: 1 + agent as u64 + life * knobs.agents() as u64 };
        let config = ShardConfig { replica: own, ..config };
        let name = replica_name(shard, number);
        let region = Region::new(knobs.region_bytes)?;
        let mut log = Verifier::new(region.clone(), shard);
        let birth = Birth {
            shard: shard.0,
            life: (number, own.incarnation),
            agent,
            region: region.clone(),
            reader: log.reader(),
            disk: self.stores.of(agent).cloned(),
        };
        let (replica_waker, gate_waker) = (self.places.waker(agent), self.places.waker(knobs.replicas() + process));
        let wakers = (replica_waker.clone(), gate_waker.clone());
        let opened = self.stores.open(knobs, agent, &mut log, &config, wakers);
        let (disk, old) = opened.map_or((None, None), |opened| (Some(opened.parts), Some(opened.old)));
        let (requests, mut shard_requests) = spsc::channel(knobs.requests_bytes, replica_waker.clone())?;
        let (shard_answers, mut answers) = spsc::channel(knobs.answers_bytes, gate_waker.clone())?;
        shard_requests.set_producer_waker(gate_waker.clone());
        answers.set_producer_waker(replica_waker);
        let progress = Arc::new(Progress::default());
        let port = ShardPort {
            shard,
            replica: number,
            log: log.reader(),
            progress: progress.clone(),
            requests,
            answers,
            old: old.map(|old| RefCell::new(OldLog::new(old))),
        };
        let gate = GatePort { progress, requests: shard_requests, answers: shard_answers, waker: gate_waker, relays };
        let role = Role::Follower { number: agent };
        let (mut transport, endpoint) = self.transport(agent, PEERS_MAX, role);
        let source = transport.register(region);
        let (mail, mailbox) = self.mailbox(agent);
        let counters = Counters::new(&name);
        // What is on disk needs not stay in memory.
        let retention = if disk.is_some() { Retention::Recycle } else { knobs.retention };
        let parts = ReplicaParts {
            config,
            replicas: 1 + knobs.backups,
            report_delay_ns: 0,
            options: LogOptions { retention, record_bytes_max: knobs.record_bytes_max as usize },
            log,
            disk,
            gate,
            mailbox,
            notices: self.notices.clone(),
            counters: counters.clone(),
        };
        let runner = Runner::Replica(Box::new(ReplicaAgent::new(parts, source, transport)?));
        Ok((Part { agent, runner, mail, endpoint, counters, birth: Some(birth) }, port))
    }

    fn gate(&mut self, agent: usize, ports: Vec<ShardPort>) -> Part<O::Transport> {
        let knobs = self.knobs;
        let config = GateConfig {
            clients_max: knobs.load.clients * 3 + 4,
            ring_bytes: knobs.ring_bytes,
            outstanding_max: knobs.outstanding_max,
            record_bytes_max: knobs.record_bytes_max,
            free_cuts_max: knobs.free_cuts_max,
            prefault: false,
        };
        let (transport, endpoint) = self.transport(agent, config.clients_max.into(), Role::Bystander);
        let ((mail, mailbox), counters) = (self.mailbox(agent), Counters::new("gate"));
        let parts = GateParts { config, ports, mailbox, notices: self.notices.clone(), counters: counters.clone() };
        let runner = Runner::Gate(Box::new(GateAgent::new(parts, transport)));
        Part { agent, runner, mail, endpoint, counters, birth: None }
    }

    /// A member of the group of sequencers.
    pub(super) fn sequencer(&mut self, member: u16) -> Part<O::Transport> {
        let (knobs, agent) = (self.knobs, self.knobs.sequencer(member));
        let (config, _) = protocol_configs(knobs);
        let members = 1 + knobs.backups;
        let replica = |at: u16| Replica { peer: PeerId(at), shard: ShardId(at / members), replica: at % members };
        let replicas: Vec<Replica> = (0..knobs.shards * members).map(replica).collect();
        let group = self.sites.group(knobs, member, replicas.len());
        let role = Role::Leader { replicas: replicas.len() as u16 };
        let (transport, endpoint) = self.transport(agent, replicas.len() + usize::from(knobs.sequencers), role);
        let name = sequencer_name(knobs, member);
        let ((mail, mailbox), counters) = (self.mailbox(agent), Counters::new(&name));
        let (notices, counted) = (self.notices.clone(), counters.clone());
        let parts = SequencerParts { name, config, replicas, group, mailbox, notices, counters: counted };
        let runner = Runner::Sequencer(Box::new(SequencerAgent::new(parts, transport)));
        Part { agent, runner, mail, endpoint, counters, birth: None }
    }
}
