//! Faults that hit whole processes, threads and shards: deaths and rebirths, walls that nothing passes, and what they do to
//! whom. Who is hit is decided by the run, which knows from the order log who may be.

use super::cluster::Cluster;
use super::machine::{Death, Machine, Wall};
use super::overlay::Overlay;
use super::process::{Builder, Part};
use super::queue::What;
use super::trace::Kind;

impl<O: Overlay> Machine<O> {
    /// The agent is out of order until then.
    pub(super) fn trouble(&mut self, agent: usize, until_ns: u64) {
        self.troubled_ns[agent] = self.troubled_ns[agent].max(until_ns);
    }

    /// Until when an agent is out of order, or was: who is down or has no connection to a sequencer that leads is so now.
    pub(super) fn troubled_until(&self, now_ns: u64, agent: usize) -> u64 {
        let is_cut_off = self.cluster.runners[agent].is_none() || self.cluster.is_cut_off(agent);
        if is_cut_off { now_ns.max(self.troubled_ns[agent]) } else { self.troubled_ns[agent] }
    }

    /// A process ends now: its agents are gone with everything that they held but their disks.
    pub(super) fn die(&mut self, now_ns: u64, death: Death) {
        let Death { process, silent_ns, down_ns, power, .. } = death;
        if std::mem::replace(&mut self.down[process], true) {
            return;
        }
        self.network.borrow_mut().note(Kind::Crash, process as u64, silent_ns.unwrap_or(0), 0);
        self.probes.add("process died", 1);
        self.probes.add("process died in silence", u64::from(silent_ns.is_some()));
        let agents = self.cluster.agents_of(process);
        self.network.borrow_mut().silent_ns = silent_ns;
        self.remove(&agents);
        self.network.borrow_mut().silent_ns = None;
        if !self.cluster.stores.is_empty() {
            self.probes.add(if power { "machine of a process died" } else { "process on disk died" }, 1);
            agents.iter().for_each(|agent| self.cluster.stores.die(*agent, power));
        }
        for thread in &mut self.threads {
            thread.dies = thread.dies.filter(|death| death.process != process);
        }
        if let Some(down_ns) = down_ns {
            self.network.borrow_mut().plan(now_ns + down_ns, What::Restart { process });
        }
    }

    /// Agents are gone, and with them their connections.
    pub(super) fn remove(&mut self, agents: &[usize]) {
        for &agent in agents {
            self.cluster.runners[agent] = None;
        }
        for line in &mut self.cluster.lines {
            let side = [line.caller, line.callee].iter().position(|agent| agents.contains(agent));
            if let Some(side) = side {
                line.ends.retain(|(_, end, _)| usize::from(*end) != side);
                line.up = 0;
                line.life += u32::from(side == 0);
            }
        }
    }

    /// A process that is down comes back, with empty logs or what its disks have kept.
    ///
    /// # Errors
    /// When the system has no memory for it.
    pub(super) fn restart(&mut self, now_ns: u64, process: usize) -> std::io::Result<()> {
        if !std::mem::replace(&mut self.down[process], false) {
            return Ok(());
        }
        self.lives[process] += 1;
        let life = self.lives[process];
        self.network.borrow_mut().note(Kind::Restart, process as u64, life, 0);
        for part in self.with_builder(|builder| builder.process(process, life))? {
            self.place(now_ns, part);
        }
        Ok(())
    }

    pub(super) fn with_builder<R>(&mut self, build: impl FnOnce(&mut Builder<'_, O>) -> R) -> R {
        let Machine { knobs, network, overlay, notices, cluster, .. } = self;
        let overlay = &mut *overlay.borrow_mut();
        let Cluster { places, sites, stores, .. } = cluster;
        build(&mut Builder { knobs, network, overlay, notices, places, sites, stores })
    }

    /// An agent that was built takes its place, and has its connections made.
    pub(super) fn place(&mut self, now_ns: u64, part: Part<O::Transport>) {
        let way_ns = self.knobs.net.longest_way_ns();
        let agent = part.agent;
        self.cluster.runners[agent] = Some(part.runner);
        self.cluster.mails[agent] = part.mail;
        self.cluster.endpoints[agent] = part.endpoint;
        self.cluster.retired.push(std::mem::replace(&mut self.cluster.counters[agent], part.counters));
        self.cluster.born.extend(part.birth);
        self.trouble(agent, now_ns);
        self.woken.push_back(self.cluster.places.of_agent[agent]);
        for number in 0..self.cluster.lines.len() {
            let line = &mut self.cluster.lines[number];
            if line.caller == agent {
                line.life += 1;
                line.pause_ns = self.knobs.backoff_ns;
                let what = What::Dial { line: number, life: line.life };
                let at_ns = now_ns + self.rng.below(4 * way_ns);
                self.network.borrow_mut().plan(at_ns, what);
            }
        }
    }

    /// Every process that is down comes back, and nobody dies any more: the faults are over. A death that waited for a
    /// paused thread would come too late for anybody to bring the process back.
    ///
    /// # Errors
    /// As [`restart`](Self::restart).
    pub(super) fn restart_all(&mut self, now_ns: u64) -> std::io::Result<()> {
        self.threads.iter_mut().for_each(|thread| thread.dies = None);
        self.cluster.stores.mend();
        (0..self.down.len()).try_for_each(|process| self.restart(now_ns, process))
    }

    /// Whether nothing passes between two agents, in either direction.
    pub(super) fn walled(&mut self, now_ns: u64, a: usize, b: usize) -> bool {
        self.walls.retain(|wall| wall.until_ns > now_ns);
        let passes_not = |from, to| self.walls.iter().any(|w| w.from.contains(&from) && w.to.contains(&to));
        passes_not(a, b) || passes_not(b, a)
    }

    /// From now on nothing passes from some agents to others, for a while.
    pub(super) fn wall(&mut self, wall: Wall) {
        let mut network = self.network.borrow_mut();
        for line in &self.cluster.lines {
            let Some(link) = line.link else { continue };
            for (side, from, to) in [(0, line.caller, line.callee), (1, line.callee, line.caller)] {
                if wall.from.contains(&from) && wall.to.contains(&to) {
                    network.hold(link, side, wall.until_ns);
                }
            }
        }
        drop(network);
        for agent in wall.from.iter().chain(&wall.to).copied().collect::<Vec<_>>() {
            if !self.cluster.sequencers.contains(&agent) {
                self.trouble(agent, wall.until_ns);
            }
        }
        self.walls.push(wall);
    }
}
