//! Whole simulated clusters over [`RdmaTransport`]: the emulated fabric under the simulator's virtual time, with the
//! simulated network as the carrier.
//!
//! A seed draws how the fabric behaves, which threads have a device (a thread of the simulator is a host here), how large
//! the transports' queues are, and what fails: queue pairs, registrations, packets, and a host's device for good. The
//! simulator's own faults end carriers, and with them pairs. When its faults are over these are too.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use antelog_core::counters::Counters;
use antelog_core::sim::network::{SimLink, SimTransport};
use antelog_core::sim::rng::Rng;
use antelog_core::sim::{Knobs, Outcome, Overlay, simulate_over};
use antelog_core::transport::SENDS_IN_FLIGHT_MAX;

use crate::emulated::{Behaviour, DeviceId, Emulated, Fabric, Grant};
use crate::health::Health;
use crate::provider::{Limits, Patience};
use crate::{Link, Options, RdmaTransport};

/// Situations that a batch of at least [`BATCH_SEEDS`] default seeds must reach.
pub const REQUIRED: [&str; 9] = [
    "connection meant for a queue pair",
    "operation through a queue pair",
    "pair's carrier lost and made again",
    "queue pair failed and made again",
    "device lost, connection over the carrier",
    "pair did not come up, connection over the carrier",
    "registration failed",
    "full queue pair",
    "credit returned",
];

/// A batch this large has to reach everything.
pub const BATCH_SEEDS: u64 = 60;

/// A thread of the simulator and what it knows of RDMA.
struct Host {
    has_device: bool,
    is_lost: bool,
    health: Health,
}

/// When something fails, in virtual nanoseconds.
struct Faults {
    /// Mean between failures of a queue pair. `None`: none fails.
    queue_every_ns: Option<u64>,
    queue_at_ns: u64,
    /// One host's device vanishes then.
    loss_at_ns: u64,
}

/// See the module's text.
pub struct RdmaOverlay {
    fabric: Fabric,
    rng: Rng,
    options: Options,
    inline_bytes: usize,
    hosts: BTreeMap<usize, Host>,
    /// Every device and its thread; those that were dropped since do nothing.
    devices: Vec<(usize, DeviceId)>,
    counters: Vec<Counters>,
    faults: Faults,
    faulty: bool,
    /// Between steps of the fabric, on average.
    step_ns: u64,
    now_ns: u64,
    clock: Arc<AtomicU64>,
    said: Arc<Mutex<Vec<String>>>,
    /// Threads whose queue pairs have failed.
    broken: BTreeSet<usize>,
    /// Pairs of threads that were connected for RDMA.
    paired: BTreeSet<(usize, usize)>,
    reached: BTreeMap<&'static str, u64>,
}

/// Runs a simulation over the emulated fabric.
///
/// # Errors
/// When the system has no memory for it.
pub fn simulate(mut knobs: Knobs, traced: bool) -> std::io::Result<Outcome> {
    // What a pair says over its carrier while it comes up are no targets.
    knobs.net.targets_overtake = false;
    simulate_over(RdmaOverlay::draw(&knobs), knobs, traced)
}

impl RdmaOverlay {
    /// What the seed of these knobs draws.
    pub fn draw(knobs: &Knobs) -> RdmaOverlay {
        let mut rng = Rng::new(knobs.seed, 50);
        let step_ns = rng.scale(1_000, 8_000);
        let pieces_max = rng.range(1, 16) as u32;
        let behaviour = Behaviour {
            step_ns,
            step_on_poll: false,
            step_on_drain: true,
            pieces_max,
            pieces_per_step_max: rng.range(4, 64) as u32,
            ack_in: rng.range(1, 4) as u32,
            completion_in: rng.range(1, 4) as u32,
            loss: if rng.percent(40) { rng.scale(100, 5_000) as u32 } else { 0 },
            not_ready_ns: rng.scale(2_000, 50_000),
            queue_failure: 0,
            registration_failure: if rng.percent(15) { rng.scale(10, 100) as u32 } else { 0 },
            watch_sources: true,
            answers_free_sources: true,
            watch_keys: true,
        };
        let options = Options {
            requests: rng.pick(&[32, 64, 128, 128]),
            receives: rng.pick(&[16, 64, 64, SENDS_IN_FLIGHT_MAX]),
            staging_bytes: rng.pick(&[32 << 10, 64 << 10, 256 << 10]),
            patience: Patience { ack_timeout: rng.range(3, 8) as u8, retries: rng.range(3, 7) as u8 },
            bring_up_ns: rng.scale(5_000_000, 500_000_000),
        };
        let queue_every_ns = rng.percent(50).then(|| rng.scale(4_000_000, 100_000_000));
        let faults = Faults {
            queue_every_ns,
            queue_at_ns: queue_every_ns.map_or(u64::MAX, |every| rng.gap(every)),
            loss_at_ns: if rng.percent(30) { rng.below(knobs.load.load_ns) } else { u64::MAX },
        };
        RdmaOverlay {
            fabric: Fabric::new(rng.bits(), behaviour),
            options,
            inline_bytes: rng.pick(&[0, 64, 256]),
            hosts: BTreeMap::new(),
            devices: Vec::new(),
            counters: Vec::new(),
            faults,
            faulty: true,
            step_ns,
            now_ns: 0,
            clock: Arc::default(),
            said: Arc::default(),
            broken: BTreeSet::new(),
            paired: BTreeSet::new(),
            reached: BTreeMap::new(),
            rng,
        }
    }

    fn reach(&mut self, what: &'static str) {
        *self.reached.entry(what).or_default() += 1;
    }

    fn host(&mut self, thread: usize) -> &mut Host {
        let RdmaOverlay { hosts, rng, clock, said, .. } = self;
        hosts.entry(thread).or_insert_with(|| {
            let (clock, said) = (clock.clone(), said.clone());
            let log = Arc::new(move |line: &str| {
                said.lock().unwrap_or_else(PoisonError::into_inner).push(format!("host {thread}: {line}"));
            });
            let clock = Arc::new(move || Duration::from_nanos(clock.load(Ordering::Relaxed)));
            Host { has_device: rng.percent(90), is_lost: false, health: Health::on_clock(log, clock) }
        })
    }

    /// Whether `thread` would use RDMA with `peer`, and what there is to note about it if not.
    fn would(&mut self, thread: usize, peer: usize) -> (bool, Option<&'static str>) {
        let host = self.host(thread);
        if !host.has_device {
            (false, None)
        } else if host.health.is_disabled() {
            (false, host.is_lost.then_some("device lost, connection over the carrier"))
        } else if host.health.avoided(address(peer)).is_some() {
            (false, Some("pair did not come up, connection over the carrier"))
        } else {
            (true, None)
        }
    }

    fn fail_something(&mut self) {
        if self.now_ns >= self.faults.queue_at_ns {
            let every_ns = self.faults.queue_every_ns.unwrap_or(u64::MAX / 4);
            self.faults.queue_at_ns = self.now_ns + self.rng.gap(every_ns) + 1;
            let connected = self.fabric.connected();
            if !connected.is_empty() {
                let (device, queue) = self.rng.pick(&connected);
                self.fabric.break_queue(device, queue);
                self.broken.extend(self.devices.iter().filter(|(_, id)| *id == device).map(|(thread, _)| *thread));
            }
        }
        if self.now_ns >= self.faults.loss_at_ns {
            self.faults.loss_at_ns = u64::MAX;
            let able: Vec<usize> = self.hosts.iter().filter(|(_, host)| host.has_device).map(|(at, _)| *at).collect();
            if able.is_empty() {
                return;
            }
            let thread = self.rng.pick(&able);
            self.host(thread).is_lost = true;
            for (_, device) in self.devices.iter().filter(|(at, _)| *at == thread) {
                self.fabric.lose(*device);
            }
        }
    }

    fn ready(&self) -> impl Iterator<Item = usize> + '_ {
        self.devices.iter().filter(|(_, device)| self.fabric.is_ready(*device)).map(|(thread, _)| *thread)
    }
}

/// A thread's address.
fn address(thread: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(10 << 24 | thread as u32))
}

impl Overlay for RdmaOverlay {
    type Transport = RdmaTransport<Emulated, SimTransport>;

    fn transport(&mut self, carrier: SimTransport, thread: usize, peers_max: u16) -> Self::Transport {
        let options = self.options.clone();
        let host = self.host(thread);
        if host.has_device && host.is_lost {
            host.health.disable("no such device");
        }
        let usable = host.has_device && !host.health.is_disabled();
        let health = host.health.clone();
        let completions = options.completions(peers_max);
        let limits = Limits { message_bytes_max: 1 << 20, completions, requests_max: 1 << 10 };
        let queues = peers_max.into();
        let grant = Grant { limits, queues, inline_bytes: self.inline_bytes, lockable_bytes: u64::MAX };
        let device = usable.then(|| self.fabric.device(grant));
        self.devices.extend(device.iter().map(|device| (thread, device.id())));
        let counters = Counters::new("rdma");
        let transport = RdmaTransport::new(carrier, device, peers_max, options, health).with_counters(&counters);
        self.counters.push(counters);
        transport
    }

    fn link(&mut self, carriers: (SimLink, SimLink), threads: (usize, usize)) -> (Link<SimLink>, Link<SimLink>) {
        let ways = [self.would(threads.0, threads.1), self.would(threads.1, threads.0)];
        let rdma = ways.iter().all(|(would, _)| *would);
        ways.into_iter().filter_map(|(_, why)| why).for_each(|why| self.reach(why));
        if rdma {
            self.reach("connection meant for a queue pair");
            if self.broken.remove(&threads.0) || self.broken.remove(&threads.1) {
                self.reach("queue pair failed and made again");
            } else if !self.paired.insert(threads) {
                self.reach("pair's carrier lost and made again");
            }
        }
        let link = |carrier, peer| Link { carrier, rdma: rdma.then(|| address(peer)) };
        (link(carriers.0, threads.1), link(carriers.1, threads.0))
    }

    fn at(&mut self, now_ns: u64, faulty: bool) {
        self.fabric.pass(now_ns - self.now_ns);
        self.now_ns = now_ns;
        self.clock.store(now_ns, Ordering::Relaxed);
        if self.faulty && !faulty {
            let behaviour = self.fabric.behaviour();
            self.fabric.set_behaviour(Behaviour { loss: 0, registration_failure: 0, ..behaviour });
        }
        self.faulty = faulty;
        if faulty {
            self.fail_something();
        }
    }

    fn next_ns(&mut self) -> Option<u64> {
        if self.fabric.is_quiet() && self.ready().next().is_none() {
            return None;
        }
        Some(self.now_ns + self.rng.range(self.step_ns / 2, self.step_ns * 3 / 2))
    }

    fn step(&mut self) -> Vec<usize> {
        self.fabric.advance(0);
        self.ready().collect()
    }

    fn said(&mut self) -> Vec<String> {
        std::mem::take(&mut *self.said.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn reached(&self) -> Vec<(&'static str, u64)> {
        let mut reached = self.reached.clone();
        for (name, count) in self.counters.iter().flat_map(Counters::snapshot) {
            let name = match name.rsplit_once(".rdma.").map_or("", |(_, counter)| counter) {
                "writes" | "sends" => "operation through a queue pair",
                "full" => "full queue pair",
                "credits" => "credit returned",
                "retry_errors" => "peer out of reach",
                _ => continue,
            };
            *reached.entry(name).or_default() += count;
        }
        let failed = self.hosts.values().filter_map(|host| host.health.disabled());
        let failed = failed.filter(|why| why.contains("out of memory")).count();
        *reached.entry("registration failed").or_default() += failed as u64;
        reached.into_iter().collect()
    }
}
