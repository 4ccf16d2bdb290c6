//! Everything that a seed draws. A run is its knobs and its seed: printed, they say what was run.

mod disks;

use std::fmt;

use antelog_protocol::{Beat, Ordering};

pub use self::disks::DiskKnobs;
use self::disks::{draw_disks, draw_power};
use super::network::{NetKnobs, Way};
use super::rng::Rng;
use crate::config::PolicyConfig;
use crate::log::Retention;

/// Bytes that every queue from a shard to its gate takes beside order entries.
const ANSWERS_BYTES: usize = 1 << 20;
/// Seeds in which processes die, are cut off or seem to be, or shards are lost, in percent.
const SEEDS_STRUCK_PERCENT: u64 = 40;
/// Single knobs chosen by the user instead of the seed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Number of shards.
    pub shards: Option<u16>,
    /// Records per second and shard.
    pub rate_per_s: Option<u64>,
    /// Nanoseconds of load.
    pub load_ns: Option<u64>,
    /// How positions are bound.
    pub ordering: Option<Ordering>,
    /// Number of sequencers.
    pub sequencers: Option<u16>,
    /// Which faults may happen.
    pub faults: Option<FaultSet>,
}

/// Kinds of faults, to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultSet(u16);

impl FaultSet {
    /// Every kind by its name.
    pub const NAMES: [&'static str; 8] =
        ["lost-links", "pauses", "sessions", "leaders", "crashes", "partitions", "shard-loss", "power"];
    /// No fault at all.
    pub const NONE: FaultSet = FaultSet(0);
    /// All kinds.
    pub const ALL: FaultSet = FaultSet((1 << FaultSet::NAMES.len()) - 1);

    /// The set of these kinds: `all`, `none`, or names separated by commas.
    pub fn from_names(text: &str) -> Option<FaultSet> {
        let bit = |name: &str| FaultSet::NAMES.iter().position(|known| *known == name).map(|at| 1 << at);
        match text {
            "all" => Some(FaultSet::ALL),
            "none" => Some(FaultSet::NONE),
            names => names.split(',').map(bit).try_fold(0, |bits, bit| Some(bits | bit?)).map(FaultSet),
        }
    }

    fn has(self, name: &str) -> bool {
        FaultSet::NAMES.iter().position(|known| *known == name).is_some_and(|at| self.0 & 1 << at != 0)
    }
}

impl fmt::Display for FaultSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = FaultSet::NAMES.into_iter().filter(|name| self.has(name)).collect();
        f.write_str(&if names.is_empty() { "none".to_owned() } else { names.join(",") })
    }
}

/// A place in a window at which a fault is aimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aim {
    /// When the window's first cut is bound.
    First,
    /// The last cut before the middle.
    BeforeMiddle,
    /// The middle, where the next window is granted.
    Middle,
    /// The last cut.
    Last,
    /// Just after a grant.
    Granted,
}

/// How large records are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// From none to 64 bytes.
    Tiny,
    /// Mostly some hundred bytes, some empty, some as large as is allowed.
    Mixed,
    /// From half the limit to the limit.
    Large,
}

/// Faults that are drawn, by their mean distance in nanoseconds.
#[derive(Clone, Debug)]
pub struct FaultKnobs {
    /// Between losses of one kind of link: replication, order, client. `None`: never lost.
    pub lost_every_ns: [Option<u64>; 3],
    /// Between pauses of one thread. `None`: never paused.
    pub pause_every_ns: Option<u64>,
    /// Longest pause, in nanoseconds.
    pub pause_ns: u64,
    /// Between pauses, isolations and hand-overs of the sequencer that leads, and crashes of any. `None`: none.
    pub leader_every_ns: Option<u64>,
    /// Attempts to connect that fail, in percent.
    pub dial_fails_percent: u64,
    /// Between sessions that are dropped for new ones, per client. `None`: never.
    pub new_session_every_ns: Option<u64>,
    /// Between deaths of a process, walls that nothing passes, pauses that make suspect, losses of whole shards, and losses
    /// of power everywhere. `None`: none.
    pub strike_every_ns: [Option<u64>; 5],
    /// Longest time that one of them lasts, in nanoseconds.
    pub strike_ns: u64,
    /// Processes that die without a word to their peers, in percent.
    pub silent_percent: u64,
    /// Where in a window a shard is lost or a process dies, beside those at any time.
    pub aim: Option<Aim>,
}

impl FaultKnobs {
    /// Processes die, are cut off or seem to be, or shards are lost.
    pub fn strikes(&self) -> bool {
        self.strike_every_ns.iter().any(Option::is_some) || self.aim.is_some()
    }
}

/// How the ordering adapts, and what an operator asks of it meanwhile.
#[derive(Clone, Debug)]
pub struct PolicyKnobs {
    /// When cuts are filled.
    pub beat: Beat,
    /// Quotas follow arrival rates.
    pub adaptive_quotas: bool,
    /// Nanoseconds a fill for a target may wait.
    pub fill_wait_ns: u64,
    /// Gaps of the writers that count as a pause.
    pub pause_gaps: u32,
    /// Nanoseconds between targets.
    pub target_pace_ns: u64,
    /// Nanoseconds between cuts that only lengthen a prefix.
    pub prefix_pace_ns: u64,
    /// Ticks until a shard is late.
    pub late_ticks: u32,
    /// Windows on the ground. 0: none.
    pub ground_windows: u32,
    /// Shards from this number on stand by.
    pub standby_from: u16,
    /// Nanoseconds between changes of membership or ordering. `None`: none.
    pub change_every_ns: Option<u64>,
}

impl PolicyKnobs {
    /// The policy that a configuration gives, with every shard a member.
    pub fn configured(policy: &PolicyConfig, tick_ns: u64) -> PolicyKnobs {
        PolicyKnobs {
            beat: policy.beat,
            adaptive_quotas: policy.adaptive_quotas,
            fill_wait_ns: PolicyConfig::ns(policy.fill_wait_ticks, tick_ns),
            pause_gaps: policy.pause_gaps,
            target_pace_ns: PolicyConfig::ns(policy.target_pace_ticks, tick_ns),
            prefix_pace_ns: PolicyConfig::ns(policy.prefix_pace_ticks, tick_ns),
            late_ticks: policy.late_ticks,
            ground_windows: policy.ground_windows,
            standby_from: u16::MAX,
            change_every_ns: None,
        }
    }

    /// Whether a shard stands by at the start.
    pub fn stands_by(&self, shard: u16) -> bool {
        shard >= self.standby_from
    }
}

/// Who uses the log.
#[derive(Clone, Debug)]
pub struct LoadKnobs {
    /// Clients.
    pub clients: u16,
    /// Records per second and shard, all clients together.
    pub rate_per_s: u64,
    /// Nanoseconds of load.
    pub load_ns: u64,
    /// Record sizes.
    pub sizes: Sizes,
    /// Subscriptions per client, at most.
    pub subscriptions: u16,
    /// A subscriber computes this long for each record, at most, in nanoseconds.
    pub compute_ns: u64,
    /// Between reads of one client. `None`: none.
    pub read_every_ns: Option<u64>,
    /// Between questions for the tail of one client. `None`: none.
    pub tail_every_ns: Option<u64>,
}

/// What a seed drew. See the module's text.
#[derive(Clone, Debug)]
pub struct Knobs {
    /// The seed.
    pub seed: u64,
    /// Shards.
    pub shards: u16,
    /// Backups of each shard.
    pub backups: u16,
    /// Sequencers: 1, 3 or 5.
    pub sequencers: u16,
    /// The tick of their group, in nanoseconds: ten of them without a leader's sign of life begin an election.
    pub raft_tick_ns: u64,
    /// Sequencers keep what they know on disks that take up to so many nanoseconds. `None`: in memory only.
    pub disk_ns: Option<u64>,
    /// What is not on the sequencers' disks does not count.
    pub flushed: bool,
    /// Replicas keep their logs on disks. `None`: in memory only, and a process comes back without.
    pub replica_disks: Option<DiskKnobs>,
    /// Processes that serve shards, each with a gate.
    pub processes: u16,
    /// All agents of a process share a thread.
    pub shared_threads: bool,
    /// How positions are bound.
    pub ordering: Ordering,
    /// Cuts in a window.
    pub window_cuts: u32,
    /// The ordering tick, in nanoseconds.
    pub tick_ns: u64,
    /// Reports are repeated this often, in nanoseconds.
    pub report_every_ns: u64,
    /// Who is not heard for this long is lost, in nanoseconds.
    pub suspect_ns: u64,
    /// A lost connection that nobody can speak for has this long to come back, in nanoseconds.
    pub lost_grace_ns: u64,
    /// Quota of each shard.
    pub quotas: Vec<u32>,
    /// Largest record, in bytes.
    pub record_bytes_max: u32,
    /// Log region of each replica, in bytes.
    pub region_bytes: usize,
    /// What happens when a region is full.
    pub retention: Retention,
    /// Appends a session may have outstanding per shard.
    pub outstanding_max: u32,
    /// Appends waiting for their cut, per shard.
    pub pending_max: usize,
    /// Capacity of a client's rings, in bytes.
    pub ring_bytes: usize,
    /// Capacity of a shard's queue of requests, in bytes.
    pub requests_bytes: usize,
    /// Capacity of a shard's queue of answers, in bytes.
    pub answers_bytes: usize,
    /// Credit of a stream, in bytes.
    pub credit_bytes: u64,
    /// Cuts of free windows remembered.
    pub free_cuts_max: usize,
    /// A duty cycle takes about this long, in nanoseconds.
    pub cycle_ns: u64,
    /// A parked thread needs up to this long to wake, in nanoseconds.
    pub wake_ns: u64,
    /// First pause before a lost connection is made again, in nanoseconds.
    pub backoff_ns: u64,
    /// The policy.
    pub policy: PolicyKnobs,
    /// The network.
    pub net: NetKnobs,
    /// The load.
    pub load: LoadKnobs,
    /// The faults.
    pub faults: FaultKnobs,
}

/// How often each is drawn.
const ORDERINGS: [Ordering; 8] = [
    Ordering::Fixed,
    Ordering::Fixed,
    Ordering::Fixed,
    Ordering::Fixed,
    Ordering::Auto,
    Ordering::Auto,
    Ordering::FreeTick,
    Ordering::FreeEvent,
];

impl Knobs {
    /// Draws the knobs of a seed.
    pub fn draw(seed: u64, overrides: &Overrides) -> Knobs {
        let rng = &mut Rng::new(seed, 1);
        // Others' draws do not depend on these.
        let group = &mut Rng::new(seed, 8);
        let many = rng.percent(6);
        let drawn = if many { rng.range(9, 64) } else { rng.pick(&[2, 2, 2, 3, 3, 4, 5, 8]) };
        let shards = overrides.shards.unwrap_or(drawn as u16).max(1);
        let backups = rng.pick(&[0, 1, 1, 1, 2]);
        let ordering = rng.pick(&ORDERINGS);
        let ordering = overrides.ordering.unwrap_or(ordering);
        let tick_ns = rng.pick(&[200_000, 500_000, 1_000_000, 1_000_000, 2_000_000]).max(u64::from(shards) * 4_000);
        let load = draw_load(rng, overrides, shards, tick_ns);
        let record_bytes_max = match load.sizes {
            Sizes::Tiny => 64,
            Sizes::Mixed => rng.scale(512, 8 << 10) as u32,
            Sizes::Large => rng.scale(1 << 10, 16 << 10) as u32,
        };
        let region_bytes = (256 << 10) * rng.pick(&[1, 1, 1, 2, 4]);
        let retention = if rng.percent(75) { Retention::Recycle } else { Retention::Refuse };
        let ring_bytes = (4 * (record_bytes_max as usize + 128)).next_power_of_two().max(32 << 10);
        let outstanding_max = rng.scale(4, 512) as u32;
        let faults = draw_faults(rng, shards, tick_ns);
        let way_ns = rng.scale(2_000, 128_000);
        let low = rng.scale(16, 64);
        let mut knobs = Knobs {
            seed,
            shards,
            backups,
            sequencers: overrides.sequencers.unwrap_or(group.pick(&[1, 1, 1, 3, 3, 5])),
            raft_tick_ns: group.scale(500_000, 5_000_000),
            disk_ns: group.percent(60).then(|| group.scale(10_000, 2_000_000)),
            flushed: group.percent(50),
            replica_disks: None,
            processes: rng.range(1, u64::from(shards.min(4))) as u16,
            shared_threads: rng.percent(40),
            ordering,
            window_cuts: rng.scale(1, 100) as u32,
            tick_ns,
            report_every_ns: rng.scale(2_000_000, 50_000_000),
            suspect_ns: 400_000_000,
            lost_grace_ns: 200_000_000,
            quotas: draw_quotas(rng, shards, load.rate_per_s, tick_ns),
            record_bytes_max,
            region_bytes,
            retention,
            outstanding_max,
            pending_max: rng.scale(16, 4096) as usize,
            ring_bytes: ring_bytes << rng.below(3),
            requests_bytes: ring_bytes << rng.below(2),
            answers_bytes: ANSWERS_BYTES,
            credit_bytes: rng.scale(4 << 10, 256 << 10),
            free_cuts_max: rng.pick(&[16, 256, 1024, 1024]),
            cycle_ns: rng.scale(300, 5_000),
            wake_ns: rng.pick(&[0, 2_000, 10_000, 60_000]),
            backoff_ns: rng.scale(200_000, 5_000_000),
            policy: draw_policy(rng, shards, tick_ns),
            net: NetKnobs {
                nic: rng.percent(40),
                ways: [Way { base_ns: way_ns, jitter_ns: rng.below(2 * way_ns) }; 3],
                long_ns: rng.scale(100_000, 5_000_000),
                long_one_in: rng.pick(&[0, 200, 1000, 5000]),
                capacity: (low, low * rng.range(1, 16)),
                targets_overtake: Rng::new(seed, 5).percent(30),
            },
            load,
            faults: FaultKnobs {
                leader_every_ns: group.percent(60).then(|| group.scale(8_000_000, 100_000_000)),
                ..faults
            },
        };
        let disks = &mut Rng::new(seed, 9);
        let has_disks = draw_power(disks, &mut knobs, overrides.faults);
        draw_strikes(&mut Rng::new(seed, 6), &mut knobs, overrides.faults);
        if let Some(flushed) = has_disks {
            knobs.replica_disks = Some(draw_disks(disks, flushed, knobs.suspect_ns));
        }
        knobs
    }

    /// Whether positions may be bound by free cuts, of which only so many are remembered.
    pub fn may_bind_freely(&self) -> bool {
        self.ordering != Ordering::Fixed || self.policy.change_every_ns.is_some()
    }

    /// Replicas, gates and sequencers: how many agents there are.
    pub fn agents(&self) -> usize {
        self.replicas() + usize::from(self.processes) + usize::from(self.sequencers)
    }

    /// A sequencer's number among the agents.
    pub fn sequencer(&self, member: u16) -> usize {
        self.replicas() + usize::from(self.processes) + usize::from(member)
    }

    /// Replicas of all shards, which are the first agents.
    pub fn replicas(&self) -> usize {
        usize::from(self.shards) * usize::from(1 + self.backups)
    }

    /// A replica's number among the agents.
    pub fn replica(&self, shard: u16, number: u16) -> usize {
        usize::from(shard) * usize::from(1 + self.backups) + usize::from(number)
    }
}

fn draw_load(rng: &mut Rng, overrides: &Overrides, shards: u16, tick_ns: u64) -> LoadKnobs {
    let rate = rng.scale(200, 25_600);
    let rate_per_s = overrides.rate_per_s.unwrap_or(rate).max(1);
    // A few thousand records a run, in at least some windows' time.
    let records = rng.scale(100, 3_200);
    let load = records * 1_000_000_000 / (rate_per_s * u64::from(shards));
    let load_ns = overrides.load_ns.unwrap_or(load.clamp(10 * tick_ns, 150_000_000));
    let some = |rng: &mut Rng, percent, low, high| rng.percent(percent).then(|| rng.scale(low, high));
    LoadKnobs {
        clients: rng.range(1, 4) as u16,
        rate_per_s,
        load_ns,
        sizes: rng.pick(&[Sizes::Tiny, Sizes::Mixed, Sizes::Mixed, Sizes::Large]),
        subscriptions: rng.range(1, 3) as u16,
        compute_ns: rng.pick(&[0, 0, 1_000, 50_000, 500_000]),
        read_every_ns: some(rng, 50, 200_000, 20_000_000),
        tail_every_ns: some(rng, 50, 500_000, 20_000_000),
    }
}

/// Quotas around what a tick brings, off by a factor for some: too small and too large ones are where fills, stalls and
/// prefixes come from.
fn draw_quotas(rng: &mut Rng, shards: u16, rate_per_s: u64, tick_ns: u64) -> Vec<u32> {
    let fitting = (rate_per_s * tick_ns / 1_000_000_000).max(1);
    let even = rng.percent(50);
    let one = rng.range(1, 2 * fitting);
    let quota = |rng: &mut Rng| if even { one } else { rng.scale(1, 4 * fitting) };
    (0..shards).map(|_| quota(rng).min(400) as u32).collect()
}

fn draw_policy(rng: &mut Rng, shards: u16, tick_ns: u64) -> PolicyKnobs {
    let lag_fix = rng.percent(50);
    PolicyKnobs {
        beat: if rng.percent(8) { Beat::Paper { lag_fix } } else { Beat::Target },
        adaptive_quotas: rng.percent(75),
        fill_wait_ns: rng.pick(&[0, tick_ns / 10, tick_ns / 10, tick_ns / 2]),
        pause_gaps: rng.pick(&[0, 1, 3, 3, 8]),
        target_pace_ns: rng.pick(&[0, tick_ns / 50, tick_ns / 4]),
        prefix_pace_ns: rng.pick(&[0, tick_ns / 8, 2 * tick_ns]),
        late_ticks: rng.pick(&[1, 4, 4, 16]),
        ground_windows: rng.pick(&[0, 1, 5, 5]),
        standby_from: if rng.percent(25) { rng.range(1, shards.into()) as u16 } else { shards },
        change_every_ns: rng.percent(30).then(|| rng.scale(1_000_000, 40_000_000)),
    }
}

fn draw_faults(rng: &mut Rng, shards: u16, tick_ns: u64) -> FaultKnobs {
    let lost = |rng: &mut Rng| rng.percent(35).then(|| rng.scale(4_000_000, 200_000_000));
    // A gate that is paused for longer would find more order entries than its queue takes.
    let most_ns = (8_000 * tick_ns / u64::from(shards)).min(50_000_000);
    FaultKnobs {
        lost_every_ns: [lost(rng), lost(rng), lost(rng)],
        pause_every_ns: rng.percent(60).then(|| rng.scale(2_000_000, 500_000_000)),
        pause_ns: rng.scale(100_000, most_ns.max(100_000)),
        leader_every_ns: None,
        dial_fails_percent: rng.pick(&[0, 0, 20, 50]),
        new_session_every_ns: rng.percent(25).then(|| rng.scale(10_000_000, 200_000_000)),
        strike_every_ns: [None; 5],
        strike_ns: 0,
        silent_percent: 0,
        aim: None,
    }
}

/// What hits processes and shards: in a share of seeds, or what was chosen.
fn draw_strikes(rng: &mut Rng, knobs: &mut Knobs, chosen: Option<FaultSet>) {
    let share = rng.percent(SEEDS_STRUCK_PERCENT);
    let chosen_has = |name| chosen.map(|set| set.has(name));
    let load_ns = knobs.load.load_ns;
    let every = |rng: &mut Rng, name, percent| {
        let drawn = rng.percent(percent);
        let every_ns = rng.scale(load_ns / 8 + 1, load_ns + 1);
        chosen_has(name).unwrap_or(drawn && share).then_some(every_ns)
    };
    let crash = every(rng, "crashes", 60);
    let wall = every(rng, "partitions", 50);
    let pause = every(rng, "pauses", 40).filter(|_| rng.percent(70));
    let shard = every(rng, "shard-loss", 35);
    let faults = &mut knobs.faults;
    if chosen_has("lost-links") == Some(false) {
        (faults.lost_every_ns, faults.dial_fails_percent) = ([None; 3], 0);
    }
    if chosen_has("pauses") == Some(false) {
        faults.pause_every_ns = None;
    }
    if chosen_has("sessions") == Some(false) {
        faults.new_session_every_ns = None;
    }
    if chosen_has("leaders") == Some(false) {
        faults.leader_every_ns = None;
    }
    let power = faults.strike_every_ns[4];
    faults.strike_every_ns = [crash, wall, pause, shard, power];
    let aims = [Aim::First, Aim::BeforeMiddle, Aim::Middle, Aim::Last, Aim::Granted];
    let aim = rng.pick(&aims);
    faults.aim = Some(aim).filter(|_| rng.percent(40) && (crash.is_some() || shard.is_some()));
    if !faults.strikes() {
        return;
    }
    let tick_ns = knobs.tick_ns;
    // A gate that is paused for longer would find more order entries than its queue takes.
    let most_ns = (8_000 * tick_ns / u64::from(knobs.shards)).min(200_000_000);
    // What the network does ordinarily makes nobody suspect.
    let net = &knobs.net;
    let long_ns = if net.long_one_in > 0 { net.long_ns } else { 0 };
    let way_ns = net.ways.iter().map(|way| way.base_ns + way.jitter_ns + long_ns).max().unwrap_or(0);
    let least_ns = (4 * tick_ns).max(4 * way_ns);
    knobs.suspect_ns = rng.scale(least_ns, (2 * least_ns).max(50_000_000)).min(most_ns / 2).max(least_ns);
    knobs.lost_grace_ns = rng.scale(2 * tick_ns, (4 * tick_ns).max(knobs.suspect_ns)).min(knobs.suspect_ns);
    knobs.report_every_ns = knobs.report_every_ns.min(knobs.suspect_ns / 4);
    faults.strike_ns = rng.scale(knobs.suspect_ns, 4 * knobs.suspect_ns).min(most_ns);
    faults.silent_percent = rng.pick(&[0, 30, 100]);
    // Whoever dies leaves the other members of a shard alive, if there are any.
    let most = (knobs.shards + knobs.backups).min(5);
    knobs.processes = knobs.processes.max(1 + knobs.backups + u16::from(rng.percent(50))).min(most);
}

impl fmt::Display for Knobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut quotas: Vec<u32> = self.quotas.clone();
        quotas.dedup();
        writeln!(
            f,
            "seed={} shards={} backups={} sequencers={} raft_tick_ns={} disk_ns={:?} flushed={} processes={} \
             shared_threads={} ordering={} window_cuts={} tick_ns={}",
            self.seed,
            self.shards,
            self.backups,
            self.sequencers,
            self.raft_tick_ns,
            self.disk_ns,
            self.flushed,
            self.processes,
            self.shared_threads,
            self.ordering.name(),
            self.window_cuts,
            self.tick_ns
        )?;
        writeln!(
            f,
            "report_every_ns={} suspect_ns={} lost_grace_ns={} quotas={quotas:?} record_bytes_max={} region_bytes={} \
             retention={} outstanding_max={} pending_max={}",
            self.report_every_ns,
            self.suspect_ns,
            self.lost_grace_ns,
            self.record_bytes_max,
            self.region_bytes,
            self.retention,
            self.outstanding_max,
            self.pending_max
        )?;
        writeln!(
            f,
            "ring_bytes={} requests_bytes={} answers_bytes={} credit_bytes={} free_cuts_max={} cycle_ns={} wake_ns={} \
             backoff_ns={}",
            self.ring_bytes,
            self.requests_bytes,
            self.answers_bytes,
            self.credit_bytes,
            self.free_cuts_max,
            self.cycle_ns,
            self.wake_ns,
            self.backoff_ns
        )?;
        writeln!(f, "replica_disks={:?}", self.replica_disks)?;
        write!(f, "{:?}\n{:?}\n{:?}\n{:?}", self.policy, self.net, self.load, self.faults)
    }
}
