//! A fixed amount of work to count instructions of: `.ci/instructions` runs it under callgrind with two amounts, and the
//! difference is what the added work costs, without the set-up.
//!
//! `protocol N`: N records through the state machines alone — two shards with a backup each, the sequencer and a client's
//! merge. `cycles N`: N records of 4 KiB through the duty cycles of shards, backups, sequencer, gate and session, over a
//! transport in memory. `reports N`: N reports that change nothing. `cuts N`: N cuts, each with the two reports it needs.
//! Time is virtual and nothing depends on chance, so the counts are the same in every run.

mod cluster;
mod memory;

use std::process::ExitCode;

use antelog_protocol::client::{Content, Event, Merge, Scope, Slots};
use antelog_protocol::ledger::Ledger;
use antelog_protocol::sequencer::{MemberConfig, Sequencer, SequencerConfig, SequencerOut};
use antelog_protocol::shard::{Append, Shard, ShardConfig, ShardOut};
use antelog_protocol::wire::node::{Report, Target};
use antelog_protocol::wire::order::OrderEntry;
use antelog_protocol::{Beat, ClientId, CutPoint, Lsn, Ordering, Position, ReplicaId, ShardId};

/// Shards of the cluster.
const SHARDS: u16 = 2;
/// Slots of a shard in a cut.
const QUOTA: u32 = 10;

fn shard_config(shard: u16) -> ShardConfig {
    ShardConfig {
        shard: ShardId(shard),
        replica: ReplicaId { number: 0, incarnation: 1 },
        epoch: 1,
        tick_ns: 1_000_000,
        tick_phase_ns: 0,
        beat: Beat::Target,
        fill_wait_ns: 100_000,
        pause_gaps: 3,
        standby: false,
        report_every_ns: 25_000_000,
        pending_max: 4096,
        sessions_max: 64,
        session_remembered: 1024,
        free_cuts_max: 16,
    }
}

fn sequencer_config() -> SequencerConfig {
    SequencerConfig {
        tick_ns: 1_000_000,
        tick_phase_ns: 0,
        window_cuts: 100,
        ordering: Ordering::Fixed,
        beat: Beat::Target,
        shards: (0..SHARDS)
            .map(|id| MemberConfig { shard: ShardId(id), quota: QUOTA, standby: false, replicas: 0, members: 0 })
            .collect(),
        // The same cuts in every version, whatever the pace of this load.
        adaptive_quotas: false,
        target_pace_ns: 20_000,
        prefix_pace_ns: 0,
        late_ticks: 4,
        ground_windows: 0,
        suspect_ns: 200_000_000,
        lost_grace_ns: 5_000_000,
        free_cuts_max: 16,
    }
}

/// Takes what shards and the sequencer say.
#[derive(Default)]
struct Outs {
    report: Option<Report>,
    proposal: Vec<u8>,
    acknowledged: u64,
}

impl ShardOut for Outs {
    fn record(&mut self, _: Lsn, _: ClientId, _: u64) {}
    fn no_ops(&mut self, lsn: Lsn, count: u32) {
        panic!("{count} no-ops from slot {lsn}: this load needs none");
    }
    fn acknowledge(&mut self, _: ClientId, _: u64, _: Lsn, _: Position) {
        self.acknowledged += 1;
    }
    fn forget(&mut self, _: ClientId, _: u64) {
        unreachable!("nobody is so far behind here");
    }
    fn report(&mut self, report: &Report) {
        self.report = Some(*report);
    }
}

impl SequencerOut for Outs {
    fn propose(&mut self, entry: &[u8]) {
        self.proposal.extend_from_slice(entry);
    }
    fn target(&mut self, _: ShardId, _: u16, _: Target) {}
}

/// A sequencer that commits what it proposes.
struct Order {
    sequencer: Sequencer,
    index: u64,
    /// What was committed and not passed on.
    committed: Vec<(u64, Vec<u8>)>,
}

impl Order {
    fn new() -> Order {
        let mut order = Order { sequencer: Sequencer::new(sequencer_config()), index: 0, committed: Vec::new() };
        let mut outs = Outs::default();
        order.sequencer.on_lead(0, &mut outs);
        order.commit(&mut outs);
        order
    }

    fn report(&mut self, report: &Report, outs: &mut Outs) {
        self.sequencer.on_report(0, report, outs);
        self.commit(outs);
    }

    fn commit(&mut self, outs: &mut Outs) {
        while !outs.proposal.is_empty() {
            let entry = std::mem::take(&mut outs.proposal);
            self.index += 1;
            self.sequencer.on_committed(0, self.index, &entry, outs).expect("no contradiction");
            self.committed.push((self.index, entry));
        }
    }
}

fn protocol(records: u64) {
    let mut order = Order::new();
    let mut shards: Vec<Shard> = (0..SHARDS).map(|shard| Shard::new(shard_config(shard))).collect();
    shards.iter_mut().for_each(|shard| shard.set_counted(0, 0b10, &mut Outs::default()));
    let mut ledger = Ledger::new(16);
    let ids: Vec<ShardId> = (0..SHARDS).map(ShardId).collect();
    let mut merge: Merge<u64> = Merge::new(Scope::All, &ids, Position(0));
    let (mut outs, mut delivered, mut confirmed) = (Outs::default(), 0, Position(0));
    for number in 0..records {
        let seq = number / u64::from(SHARDS);
        let shard = (number % u64::from(SHARDS)) as usize;
        let now_ns = 1_000 * number;
        follow(&mut order, &mut shards, &mut ledger, now_ns, &mut outs);
        let client = ClientId(7);
        let accepted = shards[shard].on_append(now_ns, client, seq, &mut outs);
        assert_eq!(accepted, Append::Accepted(Lsn(seq)));
        shards[shard].on_placed(now_ns, 1, Lsn(seq + 1), &mut outs);
        if let Some(report) = outs.report.take() {
            order.report(&report, &mut outs);
        }
        assert!(shards[shard].deliverable() > Lsn(seq));
        let position = ledger.position(ids[shard], Lsn(seq)).expect("granted");
        let slots =
            Slots { shard: ids[shard], lsn: Lsn(seq), position, count: 1, view: 0, content: Content::Record(number) };
        merge.on_slots(&ledger, slots).expect("no contradiction");
        while let Some(event) = merge.poll(&ledger).expect("no contradiction") {
            match event {
                Event::Deliver { .. } => delivered += 1,
                Event::Confirm { upto } => confirmed = upto,
                Event::Fail { from } => panic!("failed from {from} on"),
                Event::Unavailable { from, .. } => panic!("{from} is unavailable"),
            }
        }
    }
    let stats = order.sequencer.stats();
    println!("records {records} delivered {delivered} acknowledged {} confirmed {confirmed}", outs.acknowledged);
    println!("reports {} cuts {} grants {}", stats.reports, stats.cuts, stats.grants);
}

/// Passes on what was committed.
fn follow(order: &mut Order, shards: &mut [Shard], ledger: &mut Ledger, now_ns: u64, outs: &mut Outs) {
    for (index, bytes) in order.committed.drain(..) {
        let entry = OrderEntry::decode(&bytes).expect("an entry");
        ledger.apply(index, &entry).expect("no contradiction");
        for shard in shards.iter_mut() {
            shard.on_order_entry(now_ns, index, &entry, outs).expect("no contradiction");
        }
    }
    outs.report = None;
}

fn report(shard: u16, cuts: u64) -> Report {
    let point = CutPoint { window: cuts / 100, cut: (cuts % 100) as u32, prefix: 0 };
    Report { shard: ShardId(shard), point, durable_lsn: Lsn(cuts * u64::from(QUOTA)), ..Report::default() }
}

fn reports(count: u64) {
    let (mut order, mut outs) = (Order::new(), Outs::default());
    let report = report(0, 1);
    for _ in 0..count {
        order.report(&report, &mut outs);
    }
    println!("reports {} cuts {}", order.sequencer.stats().reports, order.sequencer.stats().cuts);
}

fn cuts(count: u64) {
    let (mut order, mut outs) = (Order::new(), Outs::default());
    for cut in 1..=count {
        for shard in 0..SHARDS {
            order.report(&report(shard, cut), &mut outs);
        }
        order.committed.clear();
    }
    let stats = order.sequencer.stats();
    println!("reports {} cuts {} bound {}", stats.reports, stats.cuts, order.sequencer.ledger().committed());
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let count = arguments.get(1).and_then(|count| count.parse().ok());
    match (arguments.first().map(String::as_str), count) {
        (Some("protocol"), Some(count)) => protocol(count),
        (Some("cycles"), Some(count)) => cluster::run(count),
        (Some("reports"), Some(count)) => reports(count),
        (Some("cuts"), Some(count)) => cuts(count),
        _ => {
            eprintln!("usage: instructions protocol|cycles|reports|cuts N");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
