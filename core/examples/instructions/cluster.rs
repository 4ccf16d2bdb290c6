//! Every agent of a cluster and one client, stepped on one thread over a transport in memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use antelog_core::access::Grant;
use antelog_core::channel::spsc;
use antelog_core::client::session::{Dialed, Dialer, Session, SessionOptions};
use antelog_core::client::{Record, SessionHandler, Slot, SubscriptionId};
use antelog_core::counters::Counters;
use antelog_core::log::{LogOptions, Retention, Verifier};
use antelog_core::mem::Region;
use antelog_core::node::bus::{GatePort, Progress, ShardPort};
use antelog_core::node::gate::{GateAgent, GateConfig, GateParts};
use antelog_core::node::mailbox::{Admission, MailSender, Mailbox, Notice, mailbox};
use antelog_core::node::replica::{ReplicaAgent, ReplicaParts, replica_name, replica_peer, sequencer_peer};
use antelog_core::node::sequencer::{Replica, SequencerAgent, SequencerParts};
use antelog_core::node::{Agent, Waker};
use antelog_core::transport::{PeerId, Transport};
use antelog_protocol::client::{Event, Scope};
use antelog_protocol::shard::ShardConfig;
use antelog_protocol::wire::session::{ClusterMap, ShardGates};
use antelog_protocol::{ClientId, Position, Refusal, ReplicaId, ShardId};

use super::memory::{Link, Memory, Network};
use super::{SHARDS, sequencer_config, shard_config};

/// Replicas of each shard.
const REPLICAS: u16 = 2;
/// Bytes of a record.
const RECORD_BYTES: usize = 4096;
/// Largest record.
const RECORD_BYTES_MAX: u32 = 8 << 10;
/// Records appended and not acknowledged.
const WINDOW: usize = 64;
/// Capacity of the client's rings, in bytes.
const RING_BYTES: usize = 1 << 20;
/// Virtual nanoseconds of a turn of all agents.
const TURN_NS: u64 = 10_000;
/// A log region, in bytes.
const REGION_BYTES: usize = 4 << 20;

type Mail = MailSender<Admission<Link>>;

/// Hands out the one connection there is.
struct Door {
    gate: Mail,
    link: Option<(Link, Link)>,
    answers: VecDeque<Dialed<Link>>,
    client: ClientId,
}

impl Dialer<Link> for Door {
    fn request(&mut self, address: &str) {
        let map = ClusterMap {
            tick_ns: 1_000_000,
            record_bytes_max: RECORD_BYTES_MAX,
            outstanding_max: 1024,
            suspect_ns: 200_000_000,
            shards: (0..SHARDS)
                .map(|shard| ShardGates { shard: ShardId(shard), gates: vec![(0, address.to_owned())] })
                .collect(),
            ordering: "fixed".into(),
        };
        let (ours, theirs) = self.link.take().expect("the gate is dialled once");
        self.gate.send(Admission::Client {
            session: self.client,
            link: theirs,
            ring_bytes: RING_BYTES,
            grant: Grant::default(),
        });
        self.answers.push_back(Dialed { address: address.to_owned(), result: Ok((ours, map, RING_BYTES, 1)) });
    }

    fn take(&mut self) -> Option<Dialed<Link>> {
        self.answers.pop_front()
    }

    fn waker(&mut self, _: Waker) {}
}

/// Counts what comes back.
#[derive(Default)]
struct Counts {
    acknowledged: u64,
    delivered: u64,
    bytes: u64,
    confirmed: Position,
}

impl SessionHandler for Counts {
    fn on_acknowledged(&mut self, _: ShardId, _: u64, _: Position) {
        self.acknowledged += 1;
    }
    fn on_refused(&mut self, shard: ShardId, seq: u64, refusal: Refusal) {
        panic!("shard {shard} refused {seq}: {refusal}");
    }
    fn on_unknown(&mut self, shard: ShardId, seq: u64) {
        panic!("append {seq} to shard {shard} is unknown");
    }

    fn on_event(&mut self, _: SubscriptionId, event: Event<Record>) {
        match event {
            Event::Deliver { record, .. } => {
                self.delivered += 1;
                self.bytes += record.len() as u64;
            }
            Event::Confirm { upto } => self.confirmed = upto,
            Event::Fail { from } => panic!("failed from {from} on"),
            Event::Unavailable { from, .. } => panic!("{from} is unavailable"),
        }
    }
    fn on_trimmed(&mut self, _: SubscriptionId, head: Position) {
        panic!("trimmed up to {head}");
    }
    fn on_read(&mut self, _: u64, _: Position, _: Slot) {}
    fn on_tail(&mut self, _: u64, _: Position) {}
    fn on_connection(&mut self, address: &str, error: Option<&str>) {
        assert!(error.is_none(), "{address}: {error:?}");
    }
}

/// What is collected while agents are made.
struct Assembly {
    network: Network,
    notices: Sender<Notice>,
    agents: Vec<Box<dyn Agent>>,
    ports: Vec<ShardPort>,
    replicas: Vec<Replica>,
    sequencer: (Mail, Option<Mailbox<Admission<Link>>>),
    counters: Vec<Counters>,
}

impl Assembly {
    fn counters(&mut self, agent: &str) -> Counters {
        self.counters.push(Counters::new(agent));
        self.counters[self.counters.len() - 1].clone()
    }

    /// Connects an agent to the sequencer.
    fn follow(&mut self, mail: &Mail, shard: ShardId, replica: u16) {
        let (ours, theirs) = self.network.link();
        let peer = PeerId(self.replicas.len() as u16);
        mail.send(Admission::Node { peer: sequencer_peer(0), link: ours });
        self.sequencer.0.send(Admission::Node { peer, link: theirs });
        self.replicas.push(Replica { peer, shard, replica });
    }

    fn shard(&mut self, shard: ShardId) {
        let (primary, backup) = (self.replica(shard, 0), self.replica(shard, 1));
        let (ours, theirs) = self.network.link();
        primary.send(Admission::Node { peer: replica_peer(1), link: ours });
        backup.send(Admission::Node { peer: replica_peer(0), link: theirs });
    }

    fn replica(&mut self, shard: ShardId, number: u16) -> Mail {
        let (mail, mailbox) = mailbox(Waker::none());
        self.follow(&mail, shard, number);
        let region = Region::new(REGION_BYTES).expect("memory");
        let log = Verifier::new(region.clone(), shard);
        let (requests, shard_requests) = spsc::channel(512 << 10, Waker::none()).expect("memory");
        let (shard_answers, answers) = spsc::channel(1 << 20, Waker::none()).expect("memory");
        let (progress, relays) = (Arc::new(Progress::default()), self.ports.is_empty());
        let gate = GatePort {
            progress: progress.clone(),
            requests: shard_requests,
            answers: shard_answers,
            waker: Waker::none(),
            relays,
        };
        self.ports.push(ShardPort {
            shard,
            replica: number,
            log: log.reader(),
            progress,
            requests,
            answers,
            old: None,
        });
        let replica = ReplicaId { number, incarnation: u64::from(number) + 1 };
        let mut transport = self.network.transport();
        let source = transport.register(region);
        let parts = ReplicaParts {
            config: ShardConfig { replica, epoch: 0, ..shard_config(shard.0) },
            replicas: REPLICAS,
            report_delay_ns: 0,
            options: LogOptions { retention: Retention::Recycle, record_bytes_max: RECORD_BYTES_MAX as usize },
            log,
            disk: None,
            gate,
            mailbox,
            notices: self.notices.clone(),
            counters: self.counters(&replica_name(shard, number)),
        };
        self.agents.push(Box::new(ReplicaAgent::new(parts, source, transport).expect("memory")));
        mail
    }

    fn gate(&mut self) -> Mail {
        let (mail, mailbox) = mailbox(Waker::none());
        let config = GateConfig {
            clients_max: 4,
            ring_bytes: RING_BYTES,
            outstanding_max: 1024,
            record_bytes_max: RECORD_BYTES_MAX,
            free_cuts_max: 16,
            prefault: true,
        };
        let ports = std::mem::take(&mut self.ports);
        let parts =
            GateParts { config, ports, mailbox, notices: self.notices.clone(), counters: self.counters("gate") };
        self.agents.push(Box::new(GateAgent::new(parts, self.network.transport())));
        mail
    }

    fn sequencer(&mut self) {
        let mut config = sequencer_config();
        for shard in &mut config.shards {
            (shard.replicas, shard.members) = (REPLICAS, REPLICAS);
        }
        let parts = SequencerParts {
            name: "sequencer".into(),
            config,
            group: None,
            replicas: std::mem::take(&mut self.replicas),
            mailbox: self.sequencer.1.take().expect("one sequencer"),
            notices: self.notices.clone(),
            counters: self.counters("sequencer"),
        };
        self.agents.push(Box::new(SequencerAgent::new(parts, self.network.transport())));
    }
}

/// N records through the whole cluster, and out again at a subscriber to all shards.
pub fn run(records: u64) {
    let network = Network::default();
    let (notices, heard) = channel();
    let (mail, mailbox) = mailbox(Waker::none());
    let mut assembly = Assembly {
        network: network.clone(),
        notices,
        agents: Vec::new(),
        ports: Vec::new(),
        replicas: Vec::new(),
        sequencer: (mail, Some(mailbox)),
        counters: Vec::new(),
    };
    (0..SHARDS).for_each(|shard| assembly.shard(ShardId(shard)));
    let gate = assembly.gate();
    assembly.sequencer();
    let client = ClientId(7);
    let door = Door { gate, link: Some(network.link()), answers: VecDeque::new(), client };
    let mut options = SessionOptions::new(client, vec!["gate".into()]);
    (options.ring_bytes, options.gates_max, options.prefault) = (RING_BYTES, 4, true);
    let session: Result<Session<Memory, Door>, _> = Session::new(network.transport(), door, options);
    let mut session = session.expect("sound options");

    session.subscribe(Scope::All, Position(0));
    let record = vec![7; RECORD_BYTES];
    let (mut counts, mut sent, mut now_ns) = (Counts::default(), 0, 0);
    while counts.delivered < records || counts.acknowledged < records {
        while sent < records && session.outstanding() < WINDOW {
            match session.append(ShardId((sent % u64::from(SHARDS)) as u16), &record) {
                Ok(_) => sent += 1,
                Err(_) => break,
            }
        }
        session.duty_cycle(now_ns, &mut counts);
        for agent in &mut assembly.agents {
            agent.duty_cycle(now_ns);
        }
        now_ns += TURN_NS;
        assert!(heard.try_recv().is_err() && now_ns < 1_000_000_000 + records * TURN_NS, "the cluster stands still");
    }
    let Counts { acknowledged, delivered, bytes, confirmed } = counts;
    println!("records {records} delivered {delivered} acknowledged {acknowledged} confirmed {confirmed} bytes {bytes}");
    let shown = |name: &str| name.starts_with("sequencer.") || name.ends_with(".no_ops");
    for (name, value) in assembly.counters.iter().flat_map(Counters::snapshot).filter(|(name, _)| shown(name)) {
        println!("{name} {value}");
    }
}
