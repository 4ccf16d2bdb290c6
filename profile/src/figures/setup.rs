//! What one simulated measurement is made of: a cluster of a model, a schedule of appends, and what befalls it.

use antelog_core::log::Retention;
use antelog_core::sim::Knobs;
use antelog_core::sim::knobs::{FaultKnobs, LoadKnobs, PolicyKnobs, Sizes};
use antelog_core::sim::network::NetKnobs;
use antelog_core::sim::rng::Rng;
use antelog_core::sim::stage::Victim;
use antelog_protocol::{Beat, Ordering};

use super::model::Model;

/// When the load begins, in nanoseconds: by then everybody is connected.
pub const BEGIN_NS: u64 = 50_000_000;
/// Writers of each shard.
pub const WRITERS: u64 = 10;
/// Bytes of a replica's region. It recycles: records that everybody has are dropped.
const REGION_BYTES: usize = 4 << 20;
/// Bytes of rings and queues.
const RING_BYTES: usize = 256 << 10;

/// What befalls a cluster at a time.
#[derive(Clone, Copy, Debug)]
pub enum Act {
    /// The primary holds every report back this long, in nanoseconds.
    HoldReports {
        /// Its shard.
        shard: u16,
        /// How long.
        delay_ns: u64,
    },
    /// The primary's thread does nothing for so many nanoseconds.
    Stall {
        /// Its shard.
        shard: u16,
        /// How long.
        for_ns: u64,
    },
    /// A process is killed.
    Kill(Victim),
    /// An operator has a shard join.
    Join {
        /// The shard.
        shard: u16,
    },
}

/// See the module's text. Times are nanoseconds of virtual time.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The latency model.
    pub model: Model,
    /// Decides delays, phases and the order of equals.
    pub seed: u64,
    /// Shards, each with a backup and a gate of its own.
    pub shards: u16,
    /// Shards from this number on stand by.
    pub standby_from: u16,
    /// Sequencers.
    pub sequencers: u16,
    /// How positions are bound.
    pub ordering: Ordering,
    /// When cuts are filled.
    pub beat: Beat,
    /// Cuts in a window.
    pub window_cuts: u32,
    /// Quotas that shards begin with.
    pub quotas: Vec<u32>,
    /// Intended times and shards of all records, in order.
    pub sends: Vec<(u64, u16)>,
    /// What happens when, in order.
    pub acts: Vec<(u64, Act)>,
    /// Records intended from then on are measured.
    pub from_ns: u64,
    /// And those intended before.
    pub until_ns: u64,
    /// How often the cluster is looked at, in nanoseconds; `None`: never.
    pub watch_every_ns: Option<u64>,
}

impl Setup {
    /// A cluster whose shards all take records at the same rate, from ten regular writers each, and have the quota that
    /// fits. The first `warm_ns` nanoseconds of the load are not measured, the `measure_ns` after them are.
    pub fn steady(
        model: &Model,
        ordering: Ordering,
        shards: u16,
        rate_per_s: u64,
        times: (u64, u64),
        seed: u64,
    ) -> Setup {
        let (warm_ns, measure_ns) = times;
        let until_ns = BEGIN_NS + warm_ns + measure_ns;
        let quota = (rate_per_s * model.tick_ns()).div_ceil(1_000_000_000).max(1) as u32;
        let mut setup = Setup {
            model: model.clone(),
            seed,
            shards,
            standby_from: u16::MAX,
            sequencers: 1,
            ordering,
            beat: model.policy.beat,
            window_cuts: model.window_cuts,
            quotas: vec![quota; shards.into()],
            sends: Vec::new(),
            acts: Vec::new(),
            from_ns: BEGIN_NS + warm_ns,
            until_ns,
            watch_every_ns: None,
        };
        for shard in 0..shards {
            setup.write(shard, rate_per_s, BEGIN_NS, until_ns);
        }
        setup
    }

    /// Adds a shard's regular writers, together `rate_per_s` records a second, with phases drawn from the seed.
    pub fn write(&mut self, shard: u16, rate_per_s: u64, from_ns: u64, until_ns: u64) {
        let period_ns = 1_000_000_000 * WRITERS / rate_per_s;
        let rng = &mut Rng::new(self.seed, 1000 + u64::from(shard));
        for _ in 0..WRITERS {
            let first_ns = from_ns + rng.below(period_ns);
            self.sends.extend((first_ns..until_ns).step_by(period_ns as usize).map(|at_ns| (at_ns, shard)));
        }
        self.sends.sort_unstable();
    }

    /// Drops the records to a shard from a time on.
    pub fn silence(&mut self, shard: u16, from_ns: u64) {
        self.sends.retain(|(at_ns, s)| *s != shard || *at_ns < from_ns);
    }

    /// Time of a window, in nanoseconds.
    pub fn window_ns(&self) -> u64 {
        u64::from(self.window_cuts) * self.model.tick_ns()
    }

    /// Whether somebody is killed.
    pub fn has_losses(&self) -> bool {
        self.acts.iter().any(|(_, act)| matches!(act, Act::Kill(_)))
    }

    /// The simulator's knobs.
    pub(super) fn knobs(&self) -> Knobs {
        let model = &self.model;
        let mut policy = PolicyKnobs::configured(&model.policy, model.tick_ns());
        (policy.beat, policy.standby_from) = (self.beat, self.standby_from);
        // Where nobody is killed nobody is to be suspected; else the defaults.
        let (suspect_ns, lost_grace_ns) =
            if self.has_losses() { (200_000_000, 5_000_000) } else { (400_000_000, 200_000_000) };
        let ways = [model.replication.into(), model.order.into(), model.client.into()];
        Knobs {
            seed: self.seed,
            shards: self.shards,
            backups: 1,
            sequencers: self.sequencers,
            raft_tick_ns: 10_000_000,
            disk_ns: None,
            flushed: false,
            replica_disks: None,
            // Where somebody is killed the first primary and the last backup live alone.
            processes: if self.has_losses() { self.shards + 1 } else { self.shards },
            shared_threads: false,
            ordering: self.ordering,
            window_cuts: self.window_cuts,
            tick_ns: model.tick_ns(),
            suspect_ns,
            lost_grace_ns,
            // A quarter of the default `suspect_ms`.
            report_every_ns: 50_000_000,
            quotas: self.quotas.clone(),
            record_bytes_max: model.record_bytes as u32,
            region_bytes: REGION_BYTES,
            retention: Retention::Recycle,
            outstanding_max: 4096,
            pending_max: 16384,
            ring_bytes: RING_BYTES,
            requests_bytes: RING_BYTES,
            answers_bytes: 1 << 20,
            credit_bytes: 1 << 20,
            free_cuts_max: 1 << 16,
            cycle_ns: model.cycle_ns,
            wake_ns: model.wake_ns,
            backoff_ns: 10_000_000,
            policy,
            net: NetKnobs {
                nic: false,
                ways,
                long_ns: 0,
                long_one_in: 0,
                capacity: (1 << 14, 1 << 14),
                targets_overtake: false,
            },
            load: LoadKnobs {
                clients: 1,
                rate_per_s: 0,
                load_ns: self.until_ns,
                sizes: Sizes::Tiny,
                subscriptions: 0,
                compute_ns: 0,
                read_every_ns: None,
                tail_every_ns: None,
            },
            faults: FaultKnobs {
                lost_every_ns: [None; 3],
                leader_every_ns: None,
                pause_every_ns: None,
                pause_ns: 0,
                dial_fails_percent: 0,
                new_session_every_ns: None,
                strike_every_ns: [None; 5],
                strike_ns: 0,
                silent_percent: 0,
                aim: None,
            },
        }
    }
}
