//! One run of a seed: the loop over virtual time, the clients' turns, what the oracle is shown, and the end.

mod count;
mod strikes;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use antelog_protocol::Beat;
use antelog_protocol::wire::order::OrderEntry;

use super::client::{Common, SimClient};
use super::cluster::Runner;
use super::knobs::Knobs;
use super::machine::{Machine, Turn};
use super::oracle::{Oracle, Violation};
use super::overlay::Overlay;
use super::queue::What;
use super::trace::Kind;
use super::{Failure, Outcome};
use crate::node::mailbox::Notice;
use crate::transport::DownReason;

/// Virtual time after the load in which everything has to be told.
const DRAIN_NS: u64 = 8_000_000_000;
/// How often the end is looked for.
const LOOK_NS: u64 = 250_000;
/// Positions read back in the end.
const READ_BACK: u64 = 24;
/// A shard that was lost may return without some of what it had.
const GAPS: &str = "bound records are in no log that is left";
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

/// An order entry as people read it.
fn shown(index: u64, entry: &[u8]) -> String {
    match OrderEntry::decode(entry) {
        Ok(OrderEntry::Grant(g)) => {
            let members: Vec<_> = g.members.iter().map(|m| (m.shard.0, m.quota, m.first_lsn.0, m.open)).collect();
            let (view, window, start) = (g.view, g.window, g.start);
            format!("order {index}: view {view} grants window {window} ({:?}) from {start}: {members:?}", g.mode)
        }
        Ok(OrderEntry::Cut { view, point }) => format!("order {index}: view {view} cuts {point}"),
        Ok(OrderEntry::FreeCut { view, point, lsns }) => {
            format!(
                "order {index}: view {view} cuts {point} freely: {:?}",
                lsns.iter().map(|l| l.0).collect::<Vec<_>>()
            )
        }
        Ok(OrderEntry::ShardChange(c)) => {
            let members: Vec<_> = c.members.iter().map(|m| (m.number, m.incarnation)).collect();
            let (change, epoch, primary) = (c.change, c.epoch, c.primary);
            format!("order {index}: shard {} change {change} epoch {epoch}: {primary} leads {members:?}", c.shard)
        }
        other => format!("order {index}: {other:?}"),
    }
}

/// See the module's text.
pub(super) struct Run<O: Overlay> {
    machine: Machine<O>,
    common: Rc<Common<O>>,
    oracle: Rc<RefCell<Oracle>>,
    clients: Vec<SimClient<O>>,
    phase: Phase,
    drained_by_ns: u64,
    /// Entries of each sequencer's order log that were looked at.
    seen_entries: Vec<u64>,
    /// A region has no room even for no-ops: by design nothing is bound any more.
    exhausted: bool,
    /// The next strike is aimed from then on.
    aimed_ns: u64,
    failure: Option<Failure>,
}

impl<O: Overlay> Run<O> {
    /// Builds everything; nothing has run.
    ///
    /// # Errors
    /// When the system has no memory for it.
    pub(super) fn new(knobs: Knobs, overlay: O, written: bool) -> std::io::Result<Run<O>> {
        let knobs = Rc::new(knobs);
        let machine = Machine::new(&knobs, overlay, written)?;
        // What has left memory is on disk, if there is one.
        let recycles = knobs.retention == crate::log::Retention::Recycle && knobs.replica_disks.is_none();
        let succeed = knobs.replica_disks.is_some_and(|disks| disks.flushed);
        let mut oracle = Oracle::new(knobs.shards, recycles || knobs.may_bind_freely(), succeed);
        oracle.may_forget = knobs.replica_disks.is_some();
        oracle.never_rests = knobs.policy.beat != Beat::Target;
        let oracle = Rc::new(RefCell::new(oracle));
        let common = Rc::new(Common {
            network: machine.network.clone(),
            overlay: machine.overlay.clone(),
            oracle: oracle.clone(),
            calls: machine.calls.clone(),
            sessions: Cell::new(0),
            knobs,
        });
        let mut run = Run {
            machine,
            oracle,
            clients: Vec::new(),
            phase: Phase::Load,
            drained_by_ns: common.knobs.load.load_ns + DRAIN_NS,
            seen_entries: vec![0; common.knobs.sequencers.into()],
            exhausted: false,
            aimed_ns: 0,
            failure: None,
            common,
        };
        run.start();
        Ok(run)
    }

    fn start(&mut self) {
        for number in 0..self.common.knobs.load.clients {
            let thread = self.machine.threads.len();
            self.clients.push(SimClient::new(&self.common, number, thread));
            self.machine.add_thread(Vec::new(), Some(number.into()));
        }
        self.machine.start();
        self.plan_strikes();
        self.tell_births();
        self.machine.network.borrow_mut().plan(self.common.knobs.load.load_ns, What::Look);
    }

    /// Runs to the end.
    pub(super) fn go(mut self) -> Outcome {
        while self.failure.is_none() && self.phase != Phase::Done {
            let Some((at_ns, what)) = self.machine.next() else {
                self.failure = Some(Failure::Stuck("nothing is left to happen".into()));
                break;
            };
            match what {
                Some(What::Step { thread, turn }) if self.machine.threads[thread].turn == turn => {
                    self.step(at_ns, thread)
                }
                Some(What::Look) => self.look(at_ns),
                Some(What::Strike { strike }) => self.strike(at_ns, strike),
                Some(What::Restart { process }) => self.restart(at_ns, process),
                Some(what) => self.machine.act(at_ns, what),
                None => {}
            }
            for notice in self.machine.after(at_ns) {
                self.hear(at_ns, notice);
            }
            if let Some(violation) = self.oracle.borrow().violation() {
                self.failure = Some(Failure::Wrong(violation.clone()));
            }
        }
        self.count();
        let mut network = self.machine.network.borrow_mut();
        Outcome {
            digest: network.trace.digest(),
            trace: network.trace.take_text(),
            virtual_ns: network.now_ns,
            probes: std::mem::take(&mut self.machine.probes),
            failure: self.failure.take(),
        }
    }

    /// One turn of a thread: every agent's duty cycle.
    fn step(&mut self, now_ns: u64, thread: usize) {
        let busy_ns = self.machine.begin(now_ns, thread);
        let client = self.machine.threads[thread].client;
        let work = match client {
            Some(client) => self.clients[client].step(now_ns),
            None => self.machine.run_agents(now_ns, thread),
        };
        // A sequencer is the last agent of its thread.
        let last = self.machine.threads[thread].agents.last();
        if last.is_some_and(|agent| self.machine.cluster.sequencers.contains(agent)) {
            self.take_order(now_ns);
        }
        self.machine.network.borrow_mut().note(Kind::Step, thread as u64, work as u64, busy_ns - now_ns);
        let Some(client) = client else { return self.machine.end_agents(thread, busy_ns, work) };
        let deadline_ns = self.clients[client].deadline_ns().unwrap_or(u64::MAX);
        let ready = work == 0 && deadline_ns > busy_ns && self.clients[client].prepare_wait();
        self.machine.end(thread, busy_ns, Turn { work, deadline_ns, ready });
    }

    /// Shows the oracle what the sequencers have committed and sent.
    fn take_order(&mut self, now_ns: u64) {
        let mut oracle = self.oracle.borrow_mut();
        let mut network = self.machine.network.borrow_mut();
        let mut struck = false;
        for (seen, agent) in self.seen_entries.iter_mut().zip(&self.machine.cluster.sequencers) {
            let Some(Runner::Sequencer(sequencer)) = &self.machine.cluster.runners[*agent] else { continue };
            let order = sequencer.order();
            // One that crashed begins again.
            *seen = (*seen).min(order.last_index());
            while *seen < order.last_index() {
                *seen += 1;
                let known = oracle.order_entries();
                let Some(entry) = order.get(*seen) else {
                    // A member that was given a snapshot knows nothing of what lies before it.
                    if *seen > known {
                        oracle.complain(Violation::new("L4", "the order log dropped entries in one cycle"));
                        return;
                    }
                    continue;
                };
                if *seen <= known {
                    oracle.committed_again(*seen, entry);
                    continue;
                }
                if let Some(what) = self.machine.falsely_failed(now_ns, entry, (&oracle, &network)) {
                    oracle.complain(Violation::new("I10", what));
                }
                oracle.committed(entry);
                let committed = oracle.committed_position();
                network.trace.say_with(now_ns, || shown(*seen, entry));
                network.note(Kind::Commit, *seen, super::trace::hash(entry), committed);
                struck |= strikes::aimed(self.common.knobs.faults.aim, entry, oracle.bound_cut());
            }
        }
        for tapped in std::mem::take(&mut network.taps) {
            oracle.tapped(&tapped);
        }
        for landed in network.landed.drain(..) {
            self.machine.probes.add("snapshot for a replica", u64::from(landed.snapshot));
            oracle.landed(landed);
        }
        self.machine.probes.add("target at the end of a window", std::mem::take(&mut network.edge_targets));
        drop((oracle, network));
        if struck {
            self.strike_aimed(now_ns);
        }
    }

    fn hear(&mut self, now_ns: u64, notice: Notice) {
        match notice {
            Notice::PeerDown { agent, peer, reason } => {
                if reason == DownReason::Protocol {
                    let what = format!("{agent} cut peer {} off for breaking the protocol", peer.0);
                    self.oracle.borrow_mut().complain(Violation::new("peer", what));
                }
            }
            Notice::Warning { agent, text } => {
                self.machine.network.borrow_mut().trace.say(now_ns, &format!("{agent}: {text}"));
                if text.contains("no room left even for no-ops") {
                    self.exhausted = true;
                } else if text.contains(TOO_SLOW) {
                    self.machine.probes.add("client cut off", 1);
                } else if text.contains(GAPS) && self.oracle.borrow().has_lost_shards() {
                    self.machine.probes.add("log on disk with gaps", 1);
                } else {
                    self.oracle.borrow_mut().complain(Violation::new("warning", format!("{agent}: {text}")));
                }
            }
        }
    }

    /// Slots that all primaries have appended.
    fn slots(&self) -> u64 {
        let counters = self.machine.cluster.counters.iter().flat_map(|c| c.snapshot());
        counters.filter(|(name, _)| name.ends_with(".appended_lsn")).map(|(_, count)| count).sum()
    }

    fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
        self.machine.faulty = phase == Phase::Load;
        let number = match phase {
            Phase::Load => 0,
            Phase::Drain => 1,
            Phase::ReadBack => 2,
            Phase::Rest { .. } => 3,
            Phase::Idle { .. } => 4,
            Phase::Done => 5,
        };
        self.machine.network.borrow_mut().note(Kind::Phase, number, 0, 0);
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
                self.restart_all(now_ns);
            }
            Phase::Drain | Phase::ReadBack => {
                for client in &mut self.clients {
                    client.give_up(committed);
                }
                match self.what_is_missing() {
                    None if self.phase == Phase::Drain => {
                        let drawn = (0..READ_BACK).map(|_| self.machine.rng.bits());
                        let oracle = self.oracle.borrow();
                        let positions: Vec<u64> = drawn.filter_map(|n| oracle.some_position(n)).collect();
                        drop(oracle);
                        self.clients[0].read_back(&positions);
                        self.wake_clients();
                        self.set_phase(Phase::ReadBack);
                    }
                    // What a paused thread has still to do with sessions that are gone is nobody's to miss.
                    None => {
                        let awake_ns = self.machine.awake_ns(now_ns);
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
                    return self.machine.network.borrow_mut().plan(now_ns + LOOK_NS, What::Look);
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
                    self.machine.probes.add("idle log", u64::from(at_rest));
                    self.oracle.borrow_mut().verify();
                    if let Some(what) = self.machine.cluster.wrongly_verified().filter(|_| at_rest) {
                        self.oracle.borrow_mut().complain(Violation::new("chain", what));
                    }
                    self.set_phase(Phase::Done);
                }
            }
            _ => {}
        }
        self.machine.network.borrow_mut().plan(now_ns + LOOK_NS, What::Look);
    }

    fn wake_clients(&mut self) {
        let clients = self.machine.threads.iter().enumerate().filter(|(_, t)| t.client.is_some());
        self.machine.woken.extend(clients.map(|(thread, _)| thread));
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
        oracle.behind().or_else(|| self.absent(&oracle))
    }
}
