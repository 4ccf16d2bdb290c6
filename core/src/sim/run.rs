//! One run: the loop over virtual time, threads with their costs and pauses, faults, and the end.
//!
//! A thread runs its agents as production's does: until they find no work, then until something is due or somebody wakes
//! it. What it was doing when it is paused stays where it is; what others do meanwhile waits for it.

mod count;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};

use antelog_protocol::Beat;

use super::client::{Common, SimClient};
use super::cluster::{self, Cluster, Runner};
use super::control::{Answered, Calls};
use super::knobs::Knobs;
use super::network::{LinkKind, Network, Shared, SimLink};
use super::oracle::{Oracle, Violation};
use super::probes::Probes;
use super::queue::What;
use super::rng::Rng;
use super::trace::Kind;
use super::{Failure, Outcome};
use crate::node::Waker;
use crate::node::mailbox::{Admission, Notice};
use crate::transport::DownReason;

/// Virtual time after the load in which everything has to be told.
const DRAIN_NS: u64 = 8_000_000_000;
/// How often the end is looked for.
const LOOK_NS: u64 = 250_000;
/// Positions read back in the end.
const READ_BACK: u64 = 24;
/// A client that was cut off for this reason was too slow for what the log keeps.
const TOO_SLOW: &str = "the log dropped a record while it was being delivered";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Load,
    /// Until everything is told.
    Drain,
    /// Until what was acknowledged is read back.
    ReadBack,
    /// Until a first idle time is over, in which what is left may still be written.
    Rest {
        until_ns: u64,
    },
    /// Nothing may be written: order entries and slots from before.
    Idle {
        until_ns: u64,
        entries: u64,
        slots: u64,
    },
    Done,
}

struct Thread {
    agents: Vec<usize>,
    client: Option<usize>,
    /// Asleep: only an event or `next_ns` starts it.
    asleep: bool,
    turn: u64,
    next_ns: u64,
    busy_ns: u64,
    cycle_ns: u64,
    pause_at_ns: u64,
}

/// See the module's text.
pub(super) struct Run {
    common: Rc<Common>,
    network: Shared,
    oracle: Rc<RefCell<Oracle>>,
    cluster: Cluster,
    clients: Vec<SimClient>,
    threads: Vec<Thread>,
    wakes: Arc<Mutex<Vec<usize>>>,
    heard: Receiver<Notice>,
    rng: Rng,
    phase: Phase,
    drained_by_ns: u64,
    probes: Probes,
    seen_entries: u64,
    /// A region has no room even for no-ops: by design nothing is bound any more.
    exhausted: bool,
    failure: Option<Failure>,
    woken: VecDeque<usize>,
    notices: Vec<Notice>,
}

impl Run {
    /// Builds everything; nothing has run.
    ///
    /// # Errors
    /// When the system has no memory for it.
    pub(super) fn new(knobs: Knobs, written: bool) -> std::io::Result<Run> {
        let network = Network::new(knobs.seed, knobs.net.clone(), written);
        let (notices, heard) = channel();
        let wakes: Arc<Mutex<Vec<usize>>> = Arc::default();
        let wake = |thread| {
            let wakes = wakes.clone();
            Waker::calling(move || wakes.lock().unwrap_or_else(PoisonError::into_inner).push(thread))
        };
        let cluster = cluster::build(&knobs, &network, &notices, &wake)?;
        let may_trim = knobs.retention == crate::log::Retention::Recycle || knobs.may_bind_freely();
        let oracle = Rc::new(RefCell::new(Oracle::new(&cluster.regions, may_trim)));
        let calls = Calls {
            calls: Vec::new(),
            slots: Vec::new(),
            map: cluster.map.clone(),
            gate_ring_bytes: knobs.ring_bytes,
            call_ns: 4 * knobs.net.way_ns,
        };
        let common = Rc::new(Common {
            network: network.clone(),
            oracle: oracle.clone(),
            calls: Rc::new(RefCell::new(calls)),
            sessions: Cell::new(0),
            knobs,
        });
        let mut run = Run {
            network,
            oracle,
            cluster,
            clients: Vec::new(),
            threads: Vec::new(),
            wakes,
            heard,
            rng: Rng::new(common.knobs.seed, 4),
            phase: Phase::Load,
            drained_by_ns: common.knobs.load.load_ns + DRAIN_NS,
            probes: Probes::default(),
            seen_entries: 0,
            exhausted: false,
            failure: None,
            woken: VecDeque::new(),
            notices: Vec::new(),
            common,
        };
        run.start();
        Ok(run)
    }

    fn start(&mut self) {
        for agents in self.cluster.threads.clone() {
            self.add_thread(agents, None);
        }
        for number in 0..self.common.knobs.load.clients {
            let thread = self.threads.len();
            self.clients.push(SimClient::new(&self.common, number, thread));
            self.add_thread(Vec::new(), Some(number.into()));
        }
        let knobs = &self.common.knobs;
        let mut network = self.network.borrow_mut();
        for line in 0..self.cluster.lines.len() {
            network.plan(self.rng.below(4 * knobs.net.way_ns), What::Dial { line });
        }
        for (kind, every_ns) in knobs.faults.lost_every_ns.iter().enumerate() {
            if let Some(every_ns) = every_ns {
                network.plan(self.rng.gap(*every_ns), What::Fault { kind });
            }
        }
        network.plan(knobs.load.load_ns, What::Look);
    }

    fn add_thread(&mut self, agents: Vec<usize>, client: Option<usize>) {
        let knobs = &self.common.knobs;
        let number = self.threads.len();
        let next_ns = self.rng.below(knobs.net.way_ns);
        let cycle_ns = self.rng.range(knobs.cycle_ns / 2 + 1, knobs.cycle_ns * 2);
        let pause_at_ns = knobs.faults.pause_every_ns.map_or(u64::MAX, |every| self.rng.gap(every));
        let cycle_ns = cycle_ns * agents.len().max(1) as u64;
        let (asleep, turn, busy_ns) = (false, 0, 0);
        self.threads.push(Thread { agents, client, asleep, turn, next_ns, busy_ns, cycle_ns, pause_at_ns });
        self.network.borrow_mut().plan(next_ns, What::Step { thread: number, turn: 0 });
    }

    /// Runs to the end.
    pub(super) fn go(mut self) -> Outcome {
        while self.failure.is_none() && self.phase != Phase::Done {
            let next = self.network.borrow_mut().queue.next();
            let Some((at_ns, what)) = next else {
                self.failure = Some(Failure::Stuck("nothing is left to happen".into()));
                break;
            };
            {
                let mut network = self.network.borrow_mut();
                (network.now_ns, network.issue_ns) = (at_ns, at_ns);
            }
            let network_did = self.network.borrow_mut().act(what);
            if !network_did {
                self.act(at_ns, what);
            }
            self.after(at_ns);
        }
        self.count();
        let mut network = self.network.borrow_mut();
        Outcome {
            digest: network.trace.digest(),
            trace: network.trace.take_text(),
            virtual_ns: network.now_ns,
            probes: std::mem::take(&mut self.probes),
            failure: self.failure.take(),
        }
    }

    fn act(&mut self, now_ns: u64, what: What) {
        match what {
            What::Step { thread, turn } if self.threads[thread].turn == turn => self.step(now_ns, thread),
            What::Dial { line } => self.dial(now_ns, line),
            What::AdmitNode { line, link, side } => {
                let line = &mut self.cluster.lines[line];
                let Some(at) = line.ends.iter().position(|e| e.id() == link && (e.side() == side)) else { return };
                let end = line.ends.swap_remove(at);
                let (agent, peer) = if side == 0 { (line.caller, line.to_peer) } else { (line.callee, line.from_peer) };
                self.cluster.mails[agent].send(Admission::Node { peer, link: end });
            }
            What::DialGate { call } => self.dial_gate(now_ns, call),
            What::AdmitClient { call } => {
                let mut calls = self.common.calls.borrow_mut();
                let call = &mut calls.calls[call];
                let (Some(link), Some(gate)) = (call.end.take(), self.gate_at(&call.address)) else { return };
                let (session, ring_bytes) = (call.client, call.ring_bytes);
                self.cluster.mails[gate].send(Admission::Client { session, link, ring_bytes });
            }
            What::Fault { kind } => self.lose_a_link(now_ns, kind),
            What::Look => self.look(now_ns),
            _ => {}
        }
    }

    /// One turn of a thread: every agent's duty cycle.
    fn step(&mut self, now_ns: u64, thread: usize) {
        let knobs = &self.common.knobs;
        let Thread { cycle_ns, pause_at_ns, .. } = self.threads[thread];
        let cost_ns = cycle_ns + self.rng.below(cycle_ns + 1);
        let mut pause_ns = 0;
        if now_ns >= pause_at_ns && self.phase == Phase::Load {
            pause_ns = self.rng.scale(100_000, knobs.faults.pause_ns);
            let every_ns = knobs.faults.pause_every_ns.unwrap_or(u64::MAX / 4);
            self.threads[thread].pause_at_ns = now_ns + pause_ns + self.rng.gap(every_ns);
            self.probes.add("pause longer than a tick", u64::from(pause_ns > knobs.tick_ns));
            self.network.borrow_mut().note(Kind::Pause, thread as u64, pause_ns, 0);
        }
        // Half of the pauses fall between what was seen and what is done about it.
        let inside = self.rng.percent(50);
        let busy_ns = now_ns + cost_ns + pause_ns;
        self.network.borrow_mut().issue_ns = if inside { busy_ns } else { now_ns + cost_ns };
        let work = self.run_agents(now_ns, thread);
        self.network.borrow_mut().note(Kind::Step, thread as u64, work as u64, busy_ns - now_ns);
        let deadline_ns = self.deadline_ns(thread);
        let again = work > 0 || deadline_ns <= busy_ns || self.prepare_wait(thread);
        let state = &mut self.threads[thread];
        state.busy_ns = busy_ns;
        state.asleep = !again;
        state.next_ns = if again { busy_ns } else { deadline_ns };
        state.turn += 1;
        let (next_ns, turn) = (state.next_ns, state.turn);
        if next_ns != u64::MAX {
            self.network.borrow_mut().plan(next_ns, What::Step { thread, turn });
        }
    }

    fn run_agents(&mut self, now_ns: u64, thread: usize) -> usize {
        if let Some(client) = self.threads[thread].client {
            return self.clients[client].step(now_ns);
        }
        let mut work = 0;
        for at in 0..self.threads[thread].agents.len() {
            let agent = self.threads[thread].agents[at];
            work += self.cluster.runners[agent].agent().duty_cycle(now_ns);
            if agent == self.cluster.sequencer {
                self.take_order();
            }
        }
        work
    }

    fn deadline_ns(&mut self, thread: usize) -> u64 {
        let Thread { agents, client, .. } = &self.threads[thread];
        let deadline = match client {
            Some(client) => self.clients[*client].deadline_ns(),
            None => agents.iter().filter_map(|a| self.cluster.runners[*a].agent().deadline_ns()).min(),
        };
        deadline.filter(|at| *at < u64::MAX / 2).unwrap_or(u64::MAX)
    }

    fn prepare_wait(&mut self, thread: usize) -> bool {
        let Thread { agents, client, .. } = &self.threads[thread];
        match client {
            Some(client) => self.clients[*client].prepare_wait(),
            None => agents.iter().any(|a| self.cluster.runners[*a].agent().prepare_wait()),
        }
    }

    /// Shows the oracle what the sequencer has committed and sent.
    fn take_order(&mut self) {
        let Runner::Sequencer(sequencer) = &self.cluster.runners[self.cluster.sequencer] else { return };
        let order = sequencer.order();
        let mut oracle = self.oracle.borrow_mut();
        let mut network = self.network.borrow_mut();
        while self.seen_entries < order.last_index() {
            self.seen_entries += 1;
            let Some(entry) = order.get(self.seen_entries) else {
                oracle.complain(Violation::new("L4", "the order log dropped entries in one cycle"));
                break;
            };
            oracle.committed(entry);
            let committed = oracle.committed_position();
            network.note(Kind::Commit, self.seen_entries, super::trace::hash(entry), committed);
            if entry[0] == 1 {
                self.probes.add("grant", 1);
            }
        }
        for tapped in std::mem::take(&mut network.taps) {
            oracle.tapped(&tapped);
        }
        for (follower, index) in network.landed.drain(..) {
            oracle.landed(follower, index);
        }
        self.probes.add("target at the end of a window", std::mem::take(&mut network.edge_targets));
    }

    /// What follows every event: wake-ups, connections dropped, losses heard of, violations.
    fn after(&mut self, now_ns: u64) {
        {
            let mut network = self.network.borrow_mut();
            network.bury();
            self.woken.extend(network.woken.drain(..));
        }
        let mut wakes = self.wakes.lock().unwrap_or_else(PoisonError::into_inner);
        self.probes.add("wake-up between threads", wakes.len() as u64);
        self.woken.extend(wakes.drain(..));
        drop(wakes);
        while let Some(thread) = self.woken.pop_front() {
            self.wake(now_ns, thread);
        }
        self.notices.extend(self.heard.try_iter());
        for notice in std::mem::take(&mut self.notices) {
            self.hear(now_ns, notice);
        }
        if let Some(violation) = self.oracle.borrow().violation() {
            self.failure = Some(Failure::Wrong(violation.clone()));
        }
    }

    /// Something arrived for a thread: if it is asleep it wakes up.
    fn wake(&mut self, now_ns: u64, thread: usize) {
        let wake_ns = self.common.knobs.wake_ns;
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

    fn hear(&mut self, now_ns: u64, notice: Notice) {
        match notice {
            Notice::PeerDown { agent, peer, reason } => {
                if reason == DownReason::Protocol {
                    let what = format!("{agent} cut peer {} off for breaking the protocol", peer.0);
                    self.oracle.borrow_mut().complain(Violation::new("peer", what));
                }
                let lines = &mut self.cluster.lines;
                let Some(line) = lines.iter().position(|l| l.caller_name == agent && l.to_peer == peer) else { return };
                let pause_ns = lines[line].pause_ns;
                lines[line].pause_ns = (pause_ns * 2).min(self.common.knobs.backoff_ns * 8);
                self.network.borrow_mut().plan(now_ns + pause_ns, What::Dial { line });
            }
            Notice::Warning { agent, text } => {
                self.network.borrow_mut().trace.say(now_ns, &format!("{agent}: {text}"));
                if text.contains("no room left even for no-ops") {
                    self.exhausted = true;
                } else if text.contains(TOO_SLOW) {
                    self.probes.add("client cut off", 1);
                } else {
                    self.oracle.borrow_mut().complain(Violation::new("warning", format!("{agent}: {text}")));
                }
            }
        }
    }

    fn dial_fails(&mut self) -> bool {
        let percent = self.common.knobs.faults.dial_fails_percent;
        let fails = self.phase == Phase::Load && self.rng.percent(percent);
        self.probes.add("connection attempt failed", u64::from(fails));
        fails
    }

    fn dial(&mut self, now_ns: u64, number: usize) {
        let way_ns = self.common.knobs.net.way_ns;
        if self.dial_fails() {
            let pause_ns = self.cluster.lines[number].pause_ns;
            self.network.borrow_mut().plan(now_ns + pause_ns, What::Dial { line: number });
            return;
        }
        let line = &mut self.cluster.lines[number];
        let mut network = self.network.borrow_mut();
        let (caller_end, callee_end) = network.connect(line.kind);
        let link = caller_end.id();
        line.ends.extend([caller_end, callee_end]);
        let callee_ns = now_ns + self.rng.range(way_ns, 3 * way_ns);
        let caller_ns = callee_ns + self.rng.below(2 * way_ns);
        network.plan(callee_ns, What::AdmitNode { line: number, link, side: 1 });
        network.plan(caller_ns, What::AdmitNode { line: number, link, side: 0 });
    }

    fn gate_at(&self, address: &str) -> Option<usize> {
        let number: usize = address.strip_prefix("gate-")?.parse().ok()?;
        self.cluster.gates.get(number).copied()
    }

    fn dial_gate(&mut self, now_ns: u64, number: usize) {
        let fails = self.dial_fails();
        let mut calls = self.common.calls.borrow_mut();
        let (slot, address) = (calls.calls[number].slot, calls.calls[number].address.clone());
        let result: Result<SimLink, String> = match self.gate_at(&address) {
            Some(_) if !fails => {
                let mut network = self.network.borrow_mut();
                let (client_end, gate_end) = network.connect(LinkKind::Client);
                calls.calls[number].end = Some(gate_end);
                let at_ns = now_ns + self.rng.below(2 * self.common.knobs.net.way_ns);
                network.plan(at_ns, What::AdmitClient { call: number });
                Ok(client_end)
            }
            _ => Err(format!("nobody answers at {address}")),
        };
        calls.slots[slot].answers.push_back(Answered { address, result });
        self.woken.push_back(calls.slots[slot].thread);
    }

    fn lose_a_link(&mut self, now_ns: u64, kind: usize) {
        if self.phase != Phase::Load {
            return;
        }
        let every_ns = self.common.knobs.faults.lost_every_ns[kind].unwrap_or(u64::MAX / 4);
        let mut network = self.network.borrow_mut();
        let links = network.living(kind);
        if !links.is_empty() {
            let link = self.rng.pick(&links);
            network.plan(now_ns, What::Lose { link });
        }
        network.plan(now_ns + self.rng.gap(every_ns) + 1, What::Fault { kind });
    }

    /// Slots that all primaries have appended.
    fn slots(&self) -> u64 {
        let counters = self.cluster.counters.iter().flat_map(|c| c.snapshot());
        counters.filter(|(name, _)| name.ends_with(".appended_lsn")).map(|(_, count)| count).sum()
    }

    fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
        let number = match phase {
            Phase::Load => 0,
            Phase::Drain => 1,
            Phase::ReadBack => 2,
            Phase::Rest { .. } => 3,
            Phase::Idle { .. } => 4,
            Phase::Done => 5,
        };
        self.network.borrow_mut().note(Kind::Phase, number, 0, 0);
    }

    /// Looks whether the run can go on to its next phase.
    fn look(&mut self, now_ns: u64) {
        let knobs = &self.common.knobs;
        let rest_ns = 10 * knobs.tick_ns + knobs.report_every_ns;
        let committed = self.oracle.borrow().committed_position();
        match self.phase {
            Phase::Load => {
                for (number, client) in self.clients.iter_mut().enumerate() {
                    client.drain(now_ns, number == 0);
                }
                self.wake_clients();
                self.set_phase(Phase::Drain);
            }
            Phase::Drain | Phase::ReadBack => {
                for client in &mut self.clients {
                    client.give_up(committed);
                }
                match self.what_is_missing() {
                    None if self.phase == Phase::Drain => {
                        let drawn = (0..READ_BACK).map(|_| self.rng.bits());
                        let oracle = self.oracle.borrow();
                        let positions: Vec<u64> = drawn.filter_map(|n| oracle.some_position(n)).collect();
                        drop(oracle);
                        self.clients[0].read_back(&positions);
                        self.wake_clients();
                        self.set_phase(Phase::ReadBack);
                    }
                    // What a paused thread has still to do with sessions that are gone is nobody's to miss.
                    None => {
                        let awake_ns = self.threads.iter().map(|t| t.busy_ns).fold(now_ns, u64::max);
                        self.set_phase(Phase::Rest { until_ns: awake_ns + rest_ns });
                    }
                    // By design nothing is bound any more once a region is used up to its end.
                    Some(_) if self.exhausted => self.set_phase(Phase::Done),
                    Some(missing) if now_ns > self.drained_by_ns => self.failure = Some(Failure::Stuck(missing)),
                    Some(_) => {}
                }
            }
            Phase::Rest { until_ns } if now_ns >= until_ns => {
                if self.what_is_missing().is_some() {
                    self.set_phase(Phase::ReadBack);
                    return self.network.borrow_mut().plan(now_ns + LOOK_NS, What::Look);
                }
                let (entries, slots) = (self.oracle.borrow().order_entries(), self.slots());
                self.set_phase(Phase::Idle { until_ns: now_ns + rest_ns, entries, slots });
            }
            Phase::Idle { until_ns, entries, slots } if now_ns >= until_ns => {
                let now = (self.oracle.borrow().order_entries(), self.slots());
                // The published beat fills for ever. Shards may still have to return from the ground.
                let at_rest = now == (entries, slots);
                if !at_rest && knobs.policy.beat == Beat::Target {
                    if now_ns > self.drained_by_ns {
                        let what = format!(
                            "an idle log writes: entries and slots went from {:?} to {now:?}",
                            (entries, slots)
                        );
                        self.oracle.borrow_mut().complain(Violation::new("L3", what));
                    }
                    self.set_phase(Phase::Rest { until_ns: now_ns + rest_ns });
                } else {
                    self.probes.add("idle log", u64::from(at_rest));
                    if let Some(what) = self.cluster.wrongly_verified().filter(|_| at_rest) {
                        self.oracle.borrow_mut().complain(Violation::new("chain", what));
                    }
                    self.set_phase(Phase::Done);
                }
            }
            _ => {}
        }
        self.network.borrow_mut().plan(now_ns + LOOK_NS, What::Look);
    }

    fn wake_clients(&mut self) {
        let clients = self.threads.iter().enumerate().filter(|(_, t)| t.client.is_some());
        self.woken.extend(clients.map(|(thread, _)| thread));
    }

    fn what_is_missing(&self) -> Option<String> {
        if let Some(waits) = self.clients.iter().find_map(SimClient::waits_for) {
            return Some(waits);
        }
        let oracle = self.oracle.borrow();
        let open = oracle.open();
        if open > 0 {
            return Some(format!("{open} appends have no answer"));
        }
        oracle.behind()
    }
}
