//! A small timing model: the real sequencer and shards, with constant delays between them, on virtual time. Everything is
//! exact, so latencies may be asserted. No transport, no agent, no client: those are simulated elsewhere.
#![allow(dead_code)] // each test file uses its part

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use antelog_protocol::sequencer::{Change, ChangeError, MemberConfig, Sequencer, SequencerConfig, SequencerOut};
use antelog_protocol::shard::{Append, Shard, ShardConfig, ShardOut};
use antelog_protocol::wire::node::{Report, Target};
use antelog_protocol::wire::order::OrderEntry;
use antelog_protocol::{Beat, ClientId, CutPoint, Lsn, Ordering, Position, ReplicaId, ShardId};

pub const US: u64 = 1000;
pub const TICK: u64 = 1000 * US;

#[derive(Clone)]
pub struct Model {
    pub shards: u16,
    pub standby: u16,
    pub quota: u32,
    pub window_cuts: u32,
    pub ordering: Ordering,
    pub beat: Beat,
    pub ground_windows: u32,
    pub fill_wait_ns: u64,
    pub pause_gaps: u32,
    pub target_pace_ns: u64,
    pub prefix_pace_ns: u64,
    /// Primary to backup and back.
    pub replicate_ns: u64,
    /// Either way between shard and sequencer.
    pub link_ns: u64,
}

impl Default for Model {
    fn default() -> Model {
        Model {
            shards: 4,
            standby: 0,
            quota: 10,
            window_cuts: 100,
            ordering: Ordering::Fixed,
            beat: Beat::Target,
            ground_windows: 5,
            fill_wait_ns: TICK / 10,
            pause_gaps: 8,
            target_pace_ns: TICK / 50,
            prefix_pace_ns: TICK / 8,
            replicate_ns: 20 * US,
            link_ns: 10 * US,
        }
    }
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Append { shard: usize },
    Placed { shard: usize, lsn: Lsn },
    Report { number: usize },
    Order { shard: usize, index: usize },
    Target { shard: usize, target: Target },
    Timer { shard: Option<usize> },
}

struct Pipe {
    now: u64,
    queue: BinaryHeap<Reverse<(u64, u64, Event)>>,
    issued: u64,
}

impl Pipe {
    fn at(&mut self, time: u64, event: Event) {
        self.issued += 1;
        self.queue.push(Reverse((time, self.issued, event)));
    }
}

struct ToWorld<'a> {
    shard: usize,
    pipe: &'a mut Pipe,
    reports: &'a mut Vec<Report>,
    slots: &'a mut Slots,
    replicate_ns: u64,
    report_ns: u64,
}

/// What is written down of one shard.
#[derive(Default)]
pub struct Slots {
    /// Arrival of each slot's record.
    arrived: BTreeMap<u64, u64>,
    /// (arrival, latency until bound) of each record, as acknowledged.
    pub bound: Vec<(u64, u64)>,
    pub records: u64,
    pub no_ops: u64,
    pub refused: Vec<ShardId>,
    end: u64,
}

impl ShardOut for ToWorld<'_> {
    fn record(&mut self, lsn: Lsn, _: ClientId, _: u64) {
        self.slots.arrived.insert(lsn.0, self.pipe.now);
        self.slots.records += 1;
        self.placed(lsn.0 + 1);
    }

    fn no_ops(&mut self, lsn: Lsn, count: u32) {
        self.slots.no_ops += u64::from(count);
        self.placed(lsn.0 + u64::from(count));
    }

    fn acknowledge(&mut self, _: ClientId, _: u64, lsn: Lsn, _: Position) {
        let arrived = self.slots.arrived.remove(&lsn.0).unwrap();
        self.slots.bound.push((arrived, self.pipe.now - arrived));
    }

    fn forget(&mut self, _: ClientId, _: u64) {
        unreachable!("nobody is so far behind here");
    }

    fn report(&mut self, report: &Report) {
        self.reports.push(*report);
        let (time, number) = (self.pipe.now + self.report_ns, self.reports.len() - 1);
        self.pipe.at(time, Event::Report { number });
    }
}

impl ToWorld<'_> {
    fn placed(&mut self, end: u64) {
        self.slots.end = end;
        let (time, shard) = (self.pipe.now + self.replicate_ns, self.shard);
        self.pipe.at(time, Event::Placed { shard, lsn: Lsn(end) });
    }
}

struct ToShards<'a> {
    pipe: &'a mut Pipe,
    proposals: VecDeque<Vec<u8>>,
    link_ns: u64,
}

impl SequencerOut for ToShards<'_> {
    fn propose(&mut self, entry: &[u8]) {
        self.proposals.push_back(entry.to_vec());
    }

    fn target(&mut self, shard: ShardId, _primary: u16, target: Target) {
        let time = self.pipe.now + self.link_ns;
        self.pipe.at(time, Event::Target { shard: shard.0.into(), target });
    }
}

pub struct Cluster {
    pub model: Model,
    pub sequencer: Sequencer,
    pub shards: Vec<Shard>,
    pub slots: Vec<Slots>,
    /// Added to each report's way.
    pub report_delay_ns: Vec<u64>,
    pipe: Pipe,
    reports: Vec<Report>,
    entries: Vec<Vec<u8>>,
    seqs: Vec<u64>,
    timers: Vec<u64>,
}

impl Cluster {
    pub fn new(model: Model) -> Cluster {
        let members = (0..model.shards).map(|id| MemberConfig {
            shard: ShardId(id),
            quota: model.quota,
            standby: id >= model.shards - model.standby,
            replicas: 0,
            members: 0,
        });
        let members: Vec<MemberConfig> = members.collect();
        let sequencer = Sequencer::new(SequencerConfig {
            tick_ns: TICK,
            tick_phase_ns: 0,
            window_cuts: model.window_cuts,
            ordering: model.ordering,
            beat: model.beat,
            shards: members.clone(),
            adaptive_quotas: true,
            target_pace_ns: model.target_pace_ns,
            prefix_pace_ns: model.prefix_pace_ns,
            late_ticks: 4,
            ground_windows: model.ground_windows,
            suspect_ns: 200 * TICK,
            lost_grace_ns: 5 * TICK,
            free_cuts_max: 4096,
        });
        let shard = |m: &MemberConfig| {
            Shard::new(ShardConfig {
                shard: m.shard,
                replica: ReplicaId { number: 0, incarnation: 1 },
                epoch: 1,
                tick_ns: TICK,
                tick_phase_ns: TICK * u64::from(m.shard.0) / u64::from(model.shards),
                beat: model.beat,
                fill_wait_ns: model.fill_wait_ns,
                pause_gaps: model.pause_gaps,
                standby: m.standby,
                report_every_ns: 50 * TICK,
                pending_max: 1 << 20,
                sessions_max: 4,
                session_remembered: 16,
                free_cuts_max: 4096,
            })
        };
        let count = usize::from(model.shards);
        let mut cluster = Cluster {
            sequencer,
            shards: members.iter().map(shard).collect(),
            slots: (0..count).map(|_| Slots::default()).collect(),
            report_delay_ns: vec![0; count],
            pipe: Pipe { now: 1, queue: BinaryHeap::new(), issued: 0 },
            reports: Vec::new(),
            entries: Vec::new(),
            seqs: vec![0; count],
            timers: vec![u64::MAX; count + 1],
            model,
        };
        for shard in 0..count {
            cluster.with_shard(shard, |s, now, out| s.set_counted(now, 0b10, out));
        }
        cluster.with_sequencer(|s, now, out| s.on_lead(now, out));
        cluster
    }

    pub fn now(&self) -> u64 {
        self.pipe.now
    }

    fn with_sequencer(&mut self, act: impl FnOnce(&mut Sequencer, u64, &mut ToShards<'_>)) {
        let now = self.pipe.now;
        let link_ns = self.model.link_ns;
        let mut out = ToShards { pipe: &mut self.pipe, proposals: VecDeque::new(), link_ns };
        act(&mut self.sequencer, now, &mut out);
        while let Some(entry) = out.proposals.pop_front() {
            self.entries.push(entry.clone());
            let index = self.entries.len();
            self.sequencer.on_committed(now, index as u64, &entry, &mut out).unwrap();
            for shard in 0..self.shards.len() {
                out.pipe.at(now + link_ns, Event::Order { shard, index: index - 1 });
            }
        }
        let deadline = self.sequencer.deadline_ns();
        let at = self.timers.len() - 1;
        self.arm(at, None, deadline);
    }

    fn arm(&mut self, at: usize, shard: Option<usize>, deadline: u64) {
        if deadline != u64::MAX && deadline < self.timers[at] {
            self.timers[at] = deadline.max(self.pipe.now);
            self.pipe.at(self.timers[at], Event::Timer { shard });
        }
    }

    fn with_shard<R>(&mut self, shard: usize, act: impl FnOnce(&mut Shard, u64, &mut ToWorld<'_>) -> R) -> R {
        let mut out = ToWorld {
            shard,
            pipe: &mut self.pipe,
            reports: &mut self.reports,
            slots: &mut self.slots[shard],
            replicate_ns: self.model.replicate_ns,
            report_ns: self.model.link_ns + self.report_delay_ns[shard],
        };
        let now = out.pipe.now;
        let result = act(&mut self.shards[shard], now, &mut out);
        let deadline = self.shards[shard].deadline_ns();
        self.arm(shard, Some(shard), deadline);
        result
    }

    pub fn change(&mut self, change: Change) -> Result<(), ChangeError> {
        let mut result = Ok(());
        self.with_sequencer(|s, now, out| result = s.on_change(now, change, out));
        result
    }

    /// A record arrives at `shard` at `time`.
    pub fn append_at(&mut self, time: u64, shard: usize) {
        self.pipe.at(time, Event::Append { shard });
    }

    /// `count` records at `shard`, `every_ns` apart, the first at `from`.
    pub fn stream(&mut self, shard: usize, from: u64, every_ns: u64, count: u64) {
        (0..count).for_each(|n| self.append_at(from + n * every_ns, shard));
    }

    /// Runs until `time`.
    pub fn run_until(&mut self, time: u64) {
        while self.pipe.queue.peek().is_some_and(|Reverse((at, ..))| *at <= time) {
            let Some(Reverse((at, _, event))) = self.pipe.queue.pop() else { return };
            self.pipe.now = at;
            self.on(event);
        }
        self.pipe.now = time;
    }

    fn on(&mut self, event: Event) {
        match event {
            Event::Append { shard } => {
                let seq = self.seqs[shard];
                let verdict = self.with_shard(shard, |s, now, out| s.on_append(now, ClientId(shard as u128), seq, out));
                match verdict {
                    Append::Accepted(_) => self.seqs[shard] += 1,
                    Append::Refused(antelog_protocol::Refusal::Closed { instead }) => {
                        self.slots[shard].refused.push(instead);
                    }
                    other => panic!("append to shard {shard}: {other:?}"),
                }
            }
            Event::Placed { shard, lsn } => self.with_shard(shard, |s, now, out| s.on_placed(now, 1, lsn, out)),
            Event::Report { number } => {
                let report = self.reports[number];
                self.with_sequencer(|s, now, out| s.on_report(now, &report, out));
            }
            Event::Order { shard, index } => {
                let bytes = self.entries[index].clone();
                let entry = OrderEntry::decode(&bytes).unwrap();
                self.with_shard(shard, |s, now, out| s.on_order_entry(now, index as u64 + 1, &entry, out)).unwrap();
            }
            Event::Target { shard, target } => self.with_shard(shard, |s, now, out| s.on_target(now, target, out)),
            Event::Timer { shard } => {
                let at = shard.unwrap_or(self.timers.len() - 1);
                if self.timers[at] > self.pipe.now {
                    return;
                }
                self.timers[at] = u64::MAX;
                match shard {
                    Some(shard) => self.with_shard(shard, |s, now, out| s.on_time(now, out)),
                    None => self.with_sequencer(|s, now, out| s.on_time(now, out)),
                }
            }
        }
    }

    /// Mean and largest latency, in ns, of the records that arrived at these shards in a time span.
    pub fn latency(&self, shards: std::ops::Range<usize>, span: std::ops::Range<u64>) -> (u64, u64) {
        let all = self.slots[shards].iter().flat_map(|s| s.bound.iter());
        let all: Vec<u64> = all.filter(|(arrived, _)| span.contains(arrived)).map(|(_, latency)| *latency).collect();
        assert!(!all.is_empty(), "no record was bound");
        (all.iter().sum::<u64>() / all.len() as u64, *all.iter().max().unwrap())
    }

    /// Records appended and not bound.
    pub fn unbound(&self) -> usize {
        self.slots.iter().map(|s| s.arrived.len()).sum()
    }

    /// No-ops of all slots, in per mille.
    pub fn no_ops_per_mille(&self) -> u64 {
        let (no_ops, records) = self.slots.iter().fold((0, 0), |(n, r), s| (n + s.no_ops, r + s.records));
        1000 * no_ops / (no_ops + records).max(1)
    }

    pub fn quotas(&self) -> Vec<u32> {
        self.sequencer.ledger().members().iter().map(|m| m.quota).collect()
    }

    pub fn bound(&self) -> CutPoint {
        self.sequencer.ledger().bound()
    }
}
