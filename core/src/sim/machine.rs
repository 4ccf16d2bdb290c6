//! What runs: threads with their costs and pauses, the agents on them, the connections between them, and virtual time.
//!
//! A thread runs its agents as production's does: until they find no work, then until something is due or somebody wakes
//! it. What it was doing when it is paused stays where it is; what others do meanwhile waits for it. What clients do is not
//! decided here: a client has a thread, and whoever drives the machine takes its turns.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use super::cluster::{self, Cluster};
use super::control::{Answered, Calls, Line};
use super::knobs::Knobs;
use super::network::{LinkKind, Network, Shared};
use super::overlay::{LinkOf, Overlay};
use super::probes::Probes;
use super::queue::What;
use super::rng::Rng;
use super::trace::Kind;
use crate::access::Grant;
use crate::node::Waker;
use crate::node::agent::Left;
use crate::node::mailbox::{Admission, Notice};

pub(super) struct Thread {
    pub(super) agents: Vec<usize>,
    pub(super) client: Option<usize>,
    /// Asleep: only an event or `next_ns` starts it.
    asleep: bool,
    pub(super) turn: u64,
    next_ns: u64,
    pub(super) busy_ns: u64,
    cycle_ns: u64,
    pause_at_ns: u64,
    /// Its next turn is followed by a pause this long.
    pub(super) pause_next_ns: u64,
    /// In its next turn its process dies, with so many operations having left.
    pub(super) dies: Option<Death>,
}

/// How a process dies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Death {
    pub(super) process: usize,
    /// Operations that still leave in the duty cycle in which it dies.
    pub(super) leave: u64,
    /// Its peers hear nothing for so long, if they do not see the connections closed.
    pub(super) silent_ns: Option<u64>,
    /// For how long it is down; `None`: until the faults are over.
    pub(super) down_ns: Option<u64>,
    /// Its machine loses power, and its disks what was not synced.
    pub(super) power: bool,
}

/// Nothing passes from some agents to others.
#[derive(Clone, Debug)]
pub(super) struct Wall {
    pub(super) from: Vec<usize>,
    pub(super) to: Vec<usize>,
    pub(super) until_ns: u64,
}

/// What was done in a turn.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// How much; 0 for nothing.
    pub work: usize,
    /// When there is something to do again, even if nothing arrives, in nanoseconds.
    pub deadline_ns: u64,
    /// Something waits already: what `prepare_wait` says.
    pub ready: bool,
}

/// See the module's text.
pub(super) struct Machine<O: Overlay> {
    pub(super) knobs: Rc<Knobs>,
    pub(super) network: Shared,
    pub(super) overlay: Rc<RefCell<O>>,
    /// The overlay's next step is planned.
    stepping: bool,
    pub(super) cluster: Cluster<O::Transport>,
    pub(super) calls: Rc<RefCell<Calls<LinkOf<O>>>>,
    pub(super) threads: Vec<Thread>,
    wakes: Arc<Mutex<Vec<usize>>>,
    heard: Receiver<Notice>,
    pub(super) notices: Sender<Notice>,
    /// How often each process was born, and for how long those that are down are so.
    pub(super) lives: Vec<u64>,
    pub(super) down: Vec<bool>,
    pub(super) walls: Vec<Wall>,
    /// Until when each agent is, as far as is known, out of order: down, paused, cut off.
    pub(super) troubled_ns: Vec<u64>,
    pub(super) rng: Rng,
    /// What befalls sequencers; others' draws do not depend on it.
    pub(super) fate: Rng,
    /// Whether who dies loses power; others' draws do not depend on it.
    pub(super) power: Rng,
    pub(super) probes: Probes,
    /// Faults may still happen.
    pub(super) faulty: bool,
    /// An agent that nobody reaches, and until when.
    pub(super) isolated: (usize, u64),
    pub(super) woken: VecDeque<usize>,
}

impl<O: Overlay> Machine<O> {
    /// Builds everything; nothing has run.
    ///
    /// # Errors
    /// When the system has no memory for it.
    pub(super) fn new(knobs: &Rc<Knobs>, mut overlay: O, written: bool) -> std::io::Result<Machine<O>> {
        let network = Network::new(knobs.seed, knobs.net.clone(), written);
        let (notices, heard) = channel();
        let wakes: Arc<Mutex<Vec<usize>>> = Arc::default();
        let wake = |thread| {
            let wakes = wakes.clone();
            Waker::calling(move || wakes.lock().unwrap_or_else(PoisonError::into_inner).push(thread))
        };
        let cluster = cluster::build(knobs, &network, &mut overlay, &notices, &wake)?;
        let calls = Calls {
            calls: Vec::new(),
            slots: Vec::new(),
            map: cluster.map.clone(),
            gate_ring_bytes: knobs.ring_bytes,
            call_ns: 4 * knobs.net.longest_way_ns(),
        };
        let mut machine = Machine {
            network,
            overlay: Rc::new(RefCell::new(overlay)),
            stepping: false,
            cluster,
            calls: Rc::new(RefCell::new(calls)),
            threads: Vec::new(),
            wakes,
            heard,
            notices,
            lives: vec![0; knobs.processes.into()],
            down: vec![false; knobs.processes.into()],
            walls: Vec::new(),
            troubled_ns: vec![0; knobs.agents()],
            rng: Rng::new(knobs.seed, 4),
            fate: Rng::new(knobs.seed, 7),
            power: Rng::new(knobs.seed, 10),
            probes: Probes::default(),
            faulty: true,
            isolated: (0, 0),
            woken: VecDeque::new(),
            knobs: knobs.clone(),
        };
        for agents in machine.cluster.places.threads.clone() {
            machine.add_thread(agents, None);
        }
        Ok(machine)
    }

    /// Has connections made, and faults begin.
    pub(super) fn start(&mut self) {
        let knobs = self.knobs.clone();
        let mut network = self.network.borrow_mut();
        for line in 0..self.cluster.lines.len() {
            network.plan(self.rng.below(4 * knobs.net.longest_way_ns()), What::Dial { line, life: 0 });
        }
        for (kind, every_ns) in knobs.faults.lost_every_ns.iter().enumerate() {
            if let Some(every_ns) = every_ns {
                network.plan(self.rng.gap(*every_ns), What::Fault { kind });
            }
        }
        let harm = knobs.sequencers > 1 || knobs.disk_ns.is_some();
        if let Some(every_ns) = knobs.faults.leader_every_ns.filter(|_| harm) {
            network.plan(self.fate.gap(every_ns), What::LeaderFault);
        }
    }

    /// When the last thread that is paused or working is done, and the last wall has fallen.
    pub(super) fn awake_ns(&self, now_ns: u64) -> u64 {
        let walls = self.walls.iter().map(|w| w.until_ns);
        self.threads.iter().map(|t| t.busy_ns).chain(walls).fold(now_ns, u64::max)
    }

    /// Adds a thread, for agents or for a client, and returns its number.
    pub(super) fn add_thread(&mut self, agents: Vec<usize>, client: Option<usize>) -> usize {
        let knobs = &self.knobs;
        let number = self.threads.len();
        let next_ns = self.rng.below(knobs.net.longest_way_ns());
        let cycle_ns = self.rng.range(knobs.cycle_ns / 2 + 1, knobs.cycle_ns * 2);
        let pause_at_ns = knobs.faults.pause_every_ns.map_or(u64::MAX, |every| self.rng.gap(every));
        let cycle_ns = cycle_ns * agents.len().max(1) as u64;
        let (asleep, turn, busy_ns) = (false, 0, 0);
        let (pause_next_ns, dies) = (0, None);
        self.threads.push(Thread {
            agents,
            client,
            asleep,
            turn,
            next_ns,
            busy_ns,
            cycle_ns,
            pause_at_ns,
            pause_next_ns,
            dies,
        });
        self.network.borrow_mut().plan(next_ns, What::Step { thread: number, turn: 0 });
        number
    }

    /// Goes on to the next thing that happens and returns it unless it was the network's; `None`: there is none.
    pub(super) fn next(&mut self) -> Option<(u64, Option<What>)> {
        let mut network = self.network.borrow_mut();
        let (at_ns, what) = network.queue.next()?;
        (network.now_ns, network.issue_ns) = (at_ns, at_ns);
        self.overlay.borrow_mut().at(at_ns, self.faulty);
        let network_did = network.act(what);
        Some((at_ns, (!network_did).then_some(what)))
    }

    /// Does what concerns connections.
    pub(super) fn act(&mut self, now_ns: u64, what: What) {
        match what {
            What::Dial { line, life } if self.cluster.lines[line].life == life => self.dial(now_ns, line),
            What::AdmitNode { line, link, side } => {
                let line = &mut self.cluster.lines[line];
                let Some(at) = line.ends.iter().position(|end| (end.0, end.1) == (link, side)) else { return };
                let (.., end) = line.ends.swap_remove(at);
                let (agent, peer) = if side == 0 { (line.caller, line.to_peer) } else { (line.callee, line.from_peer) };
                line.up |= if line.link == Some(link) { 1 << side } else { 0 };
                let (is_order, caller) = (line.kind == LinkKind::Order && line.up == 3, line.caller);
                if is_order {
                    self.troubled_ns[caller] = self.troubled_ns[caller].max(now_ns);
                }
                self.cluster.mails[agent].send(Admission::Node { peer, link: end });
            }
            What::DialGate { call } => self.dial_gate(now_ns, call),
            What::AdmitClient { call } => {
                let mut calls = self.calls.borrow_mut();
                let call = &mut calls.calls[call];
                let (Some(link), Some(gate)) = (call.end.take(), self.gate_at(&call.address)) else { return };
                let (session, ring_bytes) = (call.client, call.ring_bytes);
                self.cluster.mails[gate].send(Admission::Client { session, link, ring_bytes, grant: Grant::default() });
            }
            What::Fault { kind } => self.lose_a_link(now_ns, kind),
            What::LeaderFault => self.harm_a_sequencer(now_ns),
            What::Revive { member } => self.revive(now_ns, member),
            What::Disk { replica } => self.run_disk(now_ns, replica),
            What::Overlay => {
                let woken = self.overlay.borrow_mut().step();
                self.network.borrow_mut().note(Kind::Overlay, woken.len() as u64, 0, 0);
                self.woken.extend(woken);
                self.stepping = false;
            }
            _ => {}
        }
    }

    /// Begins a thread's turn; returns until when it takes.
    pub(super) fn begin(&mut self, now_ns: u64, thread: usize) -> u64 {
        let knobs = &self.knobs;
        let Thread { cycle_ns, pause_at_ns, .. } = self.threads[thread];
        let cost_ns = cycle_ns + self.rng.below(cycle_ns + 1);
        let mut pause_ns = 0;
        if now_ns >= pause_at_ns && self.faulty {
            pause_ns = self.rng.scale(100_000, knobs.faults.pause_ns);
            let every_ns = knobs.faults.pause_every_ns.unwrap_or(u64::MAX / 4);
            self.threads[thread].pause_at_ns = now_ns + pause_ns + self.rng.gap(every_ns);
            self.probes.add("pause longer than a tick", u64::from(pause_ns > knobs.tick_ns));
            self.network.borrow_mut().note(Kind::Pause, thread as u64, pause_ns, 0);
        }
        let long_ns = std::mem::take(&mut self.threads[thread].pause_next_ns);
        if long_ns > 0 {
            pause_ns = pause_ns.max(long_ns);
            self.network.borrow_mut().note(Kind::Pause, thread as u64, pause_ns, 1);
        }
        if pause_ns > knobs.tick_ns {
            for agent in self.threads[thread].agents.clone() {
                self.trouble(agent, now_ns + cost_ns + pause_ns);
            }
        }
        // Half of the pauses fall between what was seen and what is done about it.
        let inside = self.rng.percent(50);
        let busy_ns = now_ns + cost_ns + pause_ns;
        self.network.borrow_mut().issue_ns = if inside { busy_ns } else { now_ns + cost_ns };
        busy_ns
    }

    /// The duty cycles of a thread's agents; returns the work done.
    pub(super) fn run_agents(&mut self, now_ns: u64, thread: usize) -> usize {
        let dies = self.threads[thread].dies.take();
        self.network.borrow_mut().leave = dies.map(|death| death.leave);
        let Machine { threads, cluster, .. } = self;
        let (mut work, mut left) = (0, None);
        for agent in &threads[thread].agents {
            let Some(runner) = &mut cluster.runners[*agent] else { continue };
            match catch_unwind(AssertUnwindSafe(|| runner.agent().duty_cycle(now_ns))) {
                Ok(done) => work += done,
                Err(why) if why.is::<Left>() => left = left.or(Some(*agent)),
                Err(panic) => resume_unwind(panic),
            }
        }
        self.network.borrow_mut().leave = None;
        if let Some(death) = dies {
            self.probes.add("process died between two sends", 1);
            self.die(now_ns, death);
        }
        if let Some(agent) = left {
            self.leave(now_ns, agent);
        }
        work
    }

    /// An agent could not go on, and its process ends.
    fn leave(&mut self, now_ns: u64, agent: usize) {
        self.probes.add("replica left", 1);
        let process = self.cluster.places.processes[agent];
        let (power, down_ns) = (self.power.percent(50), self.power.scale(1_000, self.knobs.suspect_ns));
        self.die(now_ns, Death { process, leave: 0, silent_ns: None, down_ns: Some(down_ns), power });
    }

    /// Ends the turn of a thread with agents.
    pub(super) fn end_agents(&mut self, thread: usize, busy_ns: u64, work: usize) {
        let busy_ns = self.plan_disks(thread, busy_ns);
        let Machine { threads, cluster, .. } = self;
        let mut deadline_ns = u64::MAX;
        for agent in &threads[thread].agents {
            let Some(runner) = &mut cluster.runners[*agent] else { continue };
            let own_ns = runner.agent().deadline_ns().filter(|at| *at < u64::MAX / 2);
            deadline_ns = deadline_ns.min(own_ns.unwrap_or(u64::MAX));
        }
        let busy = work > 0 || deadline_ns <= busy_ns;
        let mut living = threads[thread].agents.iter().filter(|_| !busy);
        let ready = living.any(|at| cluster.runners[*at].as_mut().is_some_and(|r| r.agent().prepare_wait()));
        self.end(thread, busy_ns, Turn { work, deadline_ns, ready });
    }

    /// Ends a thread's turn: it goes on at once when it did any work or more waits, else at its deadline or when woken.
    pub(super) fn end(&mut self, thread: usize, busy_ns: u64, turn: Turn) {
        let again = turn.work > 0 || turn.deadline_ns <= busy_ns || turn.ready;
        let state = &mut self.threads[thread];
        state.busy_ns = busy_ns;
        state.asleep = !again;
        state.next_ns = if again { busy_ns } else { turn.deadline_ns };
        state.turn += 1;
        if state.next_ns != u64::MAX {
            let turn = state.turn;
            self.network.borrow_mut().plan(state.next_ns, What::Step { thread, turn });
        }
    }

    /// A thread does nothing until then: it is as if it had been at work.
    pub(super) fn stall(&mut self, thread: usize, until_ns: u64) {
        let state = &mut self.threads[thread];
        (state.busy_ns, state.next_ns, state.asleep) = (until_ns, until_ns, false);
        state.turn += 1;
        let turn = state.turn;
        self.network.borrow_mut().plan(until_ns, What::Step { thread, turn });
    }

    /// What follows every event: wake-ups, connections dropped and made again. Returns what agents have to tell.
    pub(super) fn after(&mut self, now_ns: u64) -> Vec<Notice> {
        {
            let mut network = self.network.borrow_mut();
            network.bury();
            self.woken.extend(network.woken.drain(..));
            let mut overlay = self.overlay.borrow_mut();
            for line in overlay.said() {
                network.trace.say(now_ns, &line);
            }
            if !self.stepping
                && let Some(at_ns) = overlay.next_ns()
            {
                network.plan(at_ns, What::Overlay);
                self.stepping = true;
            }
        }
        let mut wakes = self.wakes.lock().unwrap_or_else(PoisonError::into_inner);
        self.probes.add("wake-up between threads", wakes.len() as u64);
        self.woken.extend(wakes.drain(..));
        drop(wakes);
        while let Some(thread) = self.woken.pop_front() {
            self.wake(now_ns, thread);
        }
        let notices: Vec<Notice> = self.heard.try_iter().collect();
        for notice in &notices {
            if let Notice::PeerDown { agent, peer, .. } = notice {
                self.cluster.lost(agent, *peer);
                let lines = &mut self.cluster.lines;
                let Some(line) = lines.iter().position(|l| l.caller_name == *agent && l.to_peer == *peer) else {
                    continue;
                };
                let pause_ns = lines[line].pause_ns;
                lines[line].pause_ns = (pause_ns * 2).min(self.knobs.backoff_ns * 8);
                let life = lines[line].life;
                self.network.borrow_mut().plan(now_ns + pause_ns, What::Dial { line, life });
            }
        }
        notices
    }

    /// Something arrived for a thread: if it is asleep it wakes up.
    fn wake(&mut self, now_ns: u64, thread: usize) {
        let wake_ns = self.knobs.wake_ns;
        let Thread { asleep, next_ns, busy_ns, .. } = self.threads[thread];
        if !asleep {
            return;
        }
        let at_ns = (now_ns + self.rng.below(wake_ns + 1)).max(busy_ns);
        if at_ns < next_ns {
            let state = &mut self.threads[thread];
            state.next_ns = at_ns;
            state.turn += 1;
            // It runs at that time whatever else wakes it.
            state.asleep = false;
            let turn = state.turn;
            self.network.borrow_mut().plan(at_ns, What::Step { thread, turn });
        }
    }

    fn dial_fails(&mut self) -> bool {
        let percent = self.knobs.faults.dial_fails_percent;
        let fails = self.faulty && self.rng.percent(percent);
        self.probes.add("connection attempt failed", u64::from(fails));
        fails
    }

    fn dial(&mut self, now_ns: u64, number: usize) {
        let way_ns = self.knobs.net.longest_way_ns();
        let (isolated, until_ns) = self.isolated;
        let Line { caller, callee, life, pause_ns, .. } = self.cluster.lines[number];
        if self.cluster.runners[caller].is_none() {
            return;
        }
        let cut_off = now_ns < until_ns && (caller == isolated || callee == isolated);
        let nobody = cut_off || self.cluster.runners[callee].is_none() || self.walled(now_ns, caller, callee);
        if nobody || self.dial_fails() {
            self.network.borrow_mut().plan(now_ns + pause_ns, What::Dial { line: number, life });
            return;
        }
        let threads = (self.cluster.thread_of(caller), self.cluster.thread_of(callee));
        let line = &mut self.cluster.lines[number];
        let mut network = self.network.borrow_mut();
        let carriers = network.connect(line.kind);
        let link = carriers.0.id();
        let (caller_end, callee_end) = self.overlay.borrow_mut().link(carriers, threads);
        line.ends.extend([(link, 0, caller_end), (link, 1, callee_end)]);
        (line.link, line.up) = (Some(link), 0);
        let callee_ns = now_ns + self.rng.range(way_ns, 3 * way_ns);
        let caller_ns = callee_ns + self.rng.below(2 * way_ns);
        network.plan(callee_ns, What::AdmitNode { line: number, link, side: 1 });
        network.plan(caller_ns, What::AdmitNode { line: number, link, side: 0 });
    }

    fn gate_at(&self, address: &str) -> Option<usize> {
        let number: usize = address.strip_prefix("gate-")?.parse().ok()?;
        self.cluster.gates.get(number).copied().filter(|gate| self.cluster.runners[*gate].is_some())
    }

    fn dial_gate(&mut self, now_ns: u64, number: usize) {
        let fails = self.dial_fails();
        let mut calls = self.calls.borrow_mut();
        let (slot, address) = (calls.calls[number].slot, calls.calls[number].address.clone());
        let result: Result<LinkOf<O>, String> = match self.gate_at(&address) {
            Some(gate) if !fails => {
                let threads = (calls.slots[slot].thread, self.cluster.thread_of(gate));
                let mut network = self.network.borrow_mut();
                let carriers = network.connect(LinkKind::Client);
                let (client_end, gate_end) = self.overlay.borrow_mut().link(carriers, threads);
                calls.calls[number].end = Some(gate_end);
                let at_ns = now_ns + self.rng.below(2 * self.knobs.net.longest_way_ns());
                network.plan(at_ns, What::AdmitClient { call: number });
                Ok(client_end)
            }
            _ => Err(format!("nobody answers at {address}")),
        };
        calls.slots[slot].answers.push_back(Answered { address, result });
        self.woken.push_back(calls.slots[slot].thread);
    }

    fn lose_a_link(&mut self, now_ns: u64, kind: usize) {
        if !self.faulty {
            return;
        }
        let every_ns = self.knobs.faults.lost_every_ns[kind].unwrap_or(u64::MAX / 4);
        let mut network = self.network.borrow_mut();
        let links = network.living(kind);
        if !links.is_empty() {
            let link = self.rng.pick(&links);
            network.plan(now_ns, What::Lose { link });
        }
        network.plan(now_ns + self.rng.gap(every_ns) + 1, What::Fault { kind });
    }
}
