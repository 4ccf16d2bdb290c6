//! Faults that hit processes, threads and whole shards: when, whom, and how. Unless whole shards may be lost, every shard
//! keeps a member in good health; who that is, the order log says.

use antelog_protocol::limits::REPLICAS_MAX;

use super::{Phase, Run};
use crate::sim::Failure;
use crate::sim::knobs::Aim;
use crate::sim::machine::{Death, Machine, Wall};
use crate::sim::network::Network;
use crate::sim::oracle::Oracle;
use crate::sim::overlay::Overlay;
use crate::sim::queue::{Strike, What};

const STRIKES: [Strike; 5] = [Strike::Crash, Strike::Wall, Strike::Pause, Strike::Shard, Strike::Power];
/// Most operations that still leave in the cycle in which a process dies.
const LEAVE_MAX: u64 = 12;
/// Ticks of the group within which another leader has taken over.
const LEAD_TICKS: u64 = 100;

/// Whether the entry that was committed is what a strike is aimed at.
pub(super) fn aimed(aim: Option<Aim>, entry: &[u8], bound: Option<(u64, u64, u64)>) -> bool {
    let (Some(aim), Some((_, cut, cuts))) = (aim, bound) else { return false };
    let is_cut = matches!(entry.first(), Some(2 | 3));
    match aim {
        Aim::First => is_cut && cut == 0,
        Aim::BeforeMiddle => is_cut && cut + 1 == cuts / 2,
        Aim::Middle => is_cut && cut == cuts / 2,
        Aim::Last => is_cut && cut + 1 == cuts,
        Aim::Granted => entry.first() == Some(&1),
    }
}

impl<O: Overlay> Machine<O> {
    /// I10: an entry that calls a shard lost though one of its members was in order all the time.
    pub(super) fn falsely_failed(
        &self,
        now_ns: u64,
        entry: &[u8],
        (oracle, network): (&Oracle, &Network),
    ) -> Option<String> {
        if entry.first() != Some(&4) {
            return None;
        }
        let shard = u16::from_le_bytes([entry[2], entry[3]]);
        let knobs = &self.knobs;
        // From the end of a trouble until the sequencer has heard of it, which may have been paused itself.
        let slack_ns = 2 * knobs.suspect_ns + 2 * knobs.faults.pause_ns.max(knobs.faults.strike_ns) + 10_000_000;
        // What a leader has decided may be committed by the next.
        let slack_ns = slack_ns + if knobs.sequencers > 1 { LEAD_TICKS * knobs.raft_tick_ns } else { 0 };
        let mut lives = oracle.members(shard).lives.iter();
        let well = lives.find(|(number, incarnation)| {
            let agent = knobs.replica(shard, *number);
            let process = self.cluster.places.processes[agent];
            let newest = 1 + agent as u64 + self.lives[process] * knobs.agents() as u64;
            *incarnation == newest
                && self.troubled_until(now_ns, agent) + slack_ns < now_ns
                && !self.cluster.is_losing(agent, network)
        });
        well.map(|(number, _)| format!("shard {shard} is called lost, and its member {number} is well"))
    }
}

impl<O: Overlay> Run<O> {
    pub(super) fn plan_strikes(&mut self) {
        let faults = self.common.knobs.faults.clone();
        for (strike, every_ns) in STRIKES.into_iter().zip(faults.strike_every_ns) {
            if let Some(every_ns) = every_ns {
                let at_ns = self.machine.rng.gap(every_ns);
                self.machine.network.borrow_mut().plan(at_ns, What::Strike { strike });
            }
        }
        if faults.aim.is_some() {
            self.aimed_ns = self.machine.rng.below(self.common.knobs.load.load_ns + 1);
        }
    }

    /// Tells the oracle of replicas that were born.
    pub(super) fn tell_births(&mut self) {
        // What the dead heard comes first.
        for landed in self.machine.network.borrow_mut().landed.drain(..) {
            self.oracle.borrow_mut().landed(landed);
        }
        for birth in self.machine.cluster.born.drain(..) {
            self.oracle.borrow_mut().born(birth);
        }
    }

    pub(super) fn restart(&mut self, now_ns: u64, process: usize) {
        if let Err(error) = self.machine.restart(now_ns, process) {
            self.failure = Some(Failure::Crash(format!("no memory for a process that is born again: {error}")));
        }
        self.tell_births();
    }

    pub(super) fn restart_all(&mut self, now_ns: u64) {
        if let Err(error) = self.machine.restart_all(now_ns) {
            self.failure = Some(Failure::Crash(format!("no memory for a process that is born again: {error}")));
        }
        self.tell_births();
    }

    /// It is time for a strike of this kind.
    pub(super) fn strike(&mut self, now_ns: u64, strike: Strike) {
        if self.phase != Phase::Load {
            return;
        }
        if let Some(every_ns) = self.common.knobs.faults.strike_every_ns[strike as usize] {
            let at_ns = now_ns + self.machine.rng.gap(every_ns) + 1;
            self.machine.network.borrow_mut().plan(at_ns, What::Strike { strike });
        }
        match strike {
            Strike::Crash => self.kill_one(now_ns),
            Strike::Wall => self.cut_off(now_ns),
            Strike::Pause => self.deschedule(now_ns),
            Strike::Shard => {
                for _ in 0..1 + u64::from(self.machine.rng.percent(25)) {
                    self.lose_a_shard(now_ns);
                }
            }
            Strike::Power => self.lose_power(now_ns),
        }
    }

    /// The order log is where a strike was aimed.
    pub(super) fn strike_aimed(&mut self, now_ns: u64) {
        if self.phase != Phase::Load || now_ns < self.aimed_ns {
            return;
        }
        self.aimed_ns = now_ns + self.common.knobs.load.load_ns / 3 + 1;
        self.machine.probes.add("aimed strike", 1);
        if self.may_lose_shards() && self.machine.rng.percent(70) {
            self.lose_a_shard(now_ns);
        } else {
            self.kill_one(now_ns);
        }
    }

    fn may_lose_shards(&self) -> bool {
        self.common.knobs.faults.strike_every_ns[Strike::Shard as usize].is_some()
    }

    /// Whether every shard keeps a member in good health without these agents.
    fn may_hit(&self, now_ns: u64, agents: &[usize]) -> bool {
        let (knobs, oracle) = (&self.common.knobs, self.oracle.borrow());
        let mut shards = (0..knobs.shards)
            .filter(|shard| (0..=knobs.backups).any(|number| agents.contains(&knobs.replica(*shard, number))));
        self.may_lose_shards()
            || shards.all(|shard| {
                let members = oracle.members(shard);
                members.lives.iter().any(|(number, _)| {
                    let agent = knobs.replica(shard, *number);
                    !agents.contains(&agent) && self.machine.troubled_until(now_ns, agent) < now_ns
                })
            })
    }

    fn lasts_ns(&mut self) -> u64 {
        let most_ns = self.common.knobs.faults.strike_ns;
        self.machine.rng.scale(most_ns / 16 + 1, most_ns + 1)
    }

    /// A process dies, at once or within a duty cycle of one of its threads.
    fn kill_one(&mut self, now_ns: u64) {
        let process = self.machine.rng.below(self.common.knobs.processes.into()) as usize;
        let agents = self.machine.cluster.agents_of(process);
        if self.may_hit(now_ns, &agents) {
            self.kill(now_ns, process);
        }
    }

    fn kill(&mut self, now_ns: u64, process: usize) {
        let faults = &self.common.knobs.faults;
        let (silent_percent, strike_ns) = (faults.silent_percent, faults.strike_ns);
        let rng = &mut self.machine.rng;
        let silent_ns = rng.percent(silent_percent).then(|| rng.scale(strike_ns / 8 + 1, 2 * strike_ns + 1));
        let leave = rng.below(LEAVE_MAX);
        let (inside, stays) = (rng.percent(60), rng.percent(15));
        let down_ns = self.lasts_ns();
        let power = self.common.knobs.replica_disks.is_some() && self.machine.power.percent(50);
        let death = Death { process, leave, silent_ns, down_ns: Some(down_ns).filter(|_| !stays), power };
        let agents = self.machine.cluster.agents_of(process);
        let agent = agents[self.machine.rng.below(agents.len() as u64) as usize];
        let thread = self.machine.cluster.thread_of(agent);
        let sequencers = &self.machine.cluster.sequencers;
        let beside = self.machine.threads[thread].agents.iter().any(|agent| sequencers.contains(agent));
        if inside && !beside && !self.machine.down[process] {
            self.machine.threads[thread].dies = Some(death);
            self.machine.woken.push_back(thread);
        } else {
            self.machine.die(now_ns, death);
        }
    }

    /// All machines lose power at once, and come back at times of their own.
    fn lose_power(&mut self, now_ns: u64) {
        self.machine.probes.add("power lost everywhere", 1);
        for process in 0..usize::from(self.common.knobs.processes) {
            let down_ns = Some(self.machine.power_lasts_ns());
            self.machine.die(now_ns, Death { process, leave: 0, silent_ns: None, down_ns, power: true });
        }
        for member in 0..self.common.knobs.sequencers {
            let down_ns = self.machine.power_lasts_ns();
            self.machine.crash(now_ns, member, true, down_ns);
        }
    }

    /// Nothing passes between some agents, in one direction or both: two processes, a process and all others, a replica and
    /// the sequencers, two replicas.
    fn cut_off(&mut self, now_ns: u64) {
        let knobs = self.common.knobs.clone();
        let replicas = knobs.replicas();
        let rng = &mut self.machine.rng;
        let process = rng.below(knobs.processes.into()) as usize;
        let other = rng.below(knobs.processes.into()) as usize;
        let replica = rng.below(replicas as u64) as usize;
        let members = usize::from(1 + knobs.backups);
        let sibling = replica / members * members + rng.below(members as u64) as usize;
        let kind = rng.below(4);
        let cluster = &self.machine.cluster;
        let (from, to) = match kind {
            0 => (cluster.agents_of(process), cluster.agents_of(other)),
            1 => {
                let inside = cluster.agents_of(process);
                let outside = (0..knobs.agents()).filter(|agent| !inside.contains(agent)).collect();
                (inside, outside)
            }
            2 => (vec![replica], cluster.sequencers.clone()),
            _ => (vec![replica], vec![sibling]),
        };
        let hit: Vec<usize> = if kind == 1 || kind == 2 { from.clone() } else { [from.clone(), to.clone()].concat() };
        if process == other && kind == 0 || replica == sibling && kind == 3 || !self.may_hit(now_ns, &hit) {
            return;
        }
        let until_ns = now_ns + self.lasts_ns();
        self.machine.probes.add("partition", 1);
        let ways = self.machine.rng.below(3);
        if ways != 1 {
            self.machine.wall(Wall { from: from.clone(), to: to.clone(), until_ns });
        }
        if ways != 0 {
            self.machine.wall(Wall { from: to, to: from, until_ns });
        }
        self.machine.probes.add("partition in one direction", u64::from(ways < 2));
    }

    /// A thread with replicas is not scheduled for so long that they are suspected.
    fn deschedule(&mut self, now_ns: u64) {
        let replica = self.machine.rng.below(self.common.knobs.replicas() as u64) as usize;
        let thread = self.machine.cluster.thread_of(replica);
        let agents = self.machine.threads[thread].agents.clone();
        if !self.may_hit(now_ns, &agents) {
            return;
        }
        let for_ns = self.lasts_ns();
        self.machine.probes.add("pause of a suspect", u64::from(for_ns > self.common.knobs.suspect_ns));
        self.machine.threads[thread].pause_next_ns = for_ns;
        self.machine.woken.push_back(thread);
        for agent in agents {
            self.machine.trouble(agent, now_ns + for_ns);
        }
    }

    /// All members of a shard die, or are cut off from the sequencers.
    fn lose_a_shard(&mut self, now_ns: u64) {
        let knobs = self.common.knobs.clone();
        let shard = self.machine.rng.below(knobs.shards.into()) as u16;
        let lives = self.oracle.borrow().members(shard).lives.clone();
        let agents: Vec<usize> = lives.iter().map(|(number, _)| knobs.replica(shard, *number)).collect();
        if agents.is_empty() || agents.len() > REPLICAS_MAX {
            return;
        }
        if self.machine.rng.percent(50) {
            let mut processes: Vec<usize> = agents.iter().map(|a| self.machine.cluster.places.processes[*a]).collect();
            processes.sort_unstable();
            processes.dedup();
            for process in processes {
                self.kill(now_ns, process);
            }
        } else {
            // Long enough to be suspected; what they hold is still there when they return.
            let until_ns = now_ns + knobs.suspect_ns + self.lasts_ns();
            self.machine.probes.add("shard cut off", 1);
            self.machine.wall(Wall { from: agents, to: self.machine.cluster.sequencers.clone(), until_ns });
        }
    }

    /// A replica that should be a member again by now and is none.
    pub(super) fn absent(&self, oracle: &Oracle) -> Option<String> {
        let knobs = &self.common.knobs;
        if !knobs.faults.strikes() {
            return None;
        }
        let all = usize::from(1 + knobs.backups);
        let short = (0..knobs.shards).find(|shard| oracle.members(*shard).lives.len() < all)?;
        let lives = &oracle.members(short).lives;
        Some(format!("shard {short} has only the members {lives:?} of {all}"))
    }
}
