//! A cluster on virtual time for measurements: no faults but those that the caller brings about, no oracle, and one client,
//! whose turns the caller takes. Latencies are those of the production agents and session over the drawn delays, exact, and
//! the same on every machine.

use std::io;
use std::rc::Rc;

use antelog_protocol::ClientId;

use super::cluster::Runner;
use super::control::SimDialer;
use super::knobs::Knobs;
pub use super::machine::Turn;
use super::machine::{Death, Machine};
use super::network::{SimLink, SimTransport};
use super::overlay::Plain;
use super::queue::What;
use crate::client::session::{Session, SessionOptions};
use crate::node::mailbox::Notice;

/// A session on virtual time.
pub type SimSession = Session<SimTransport, SimDialer<SimLink>>;

/// See the module's text.
pub struct Stage {
    machine: Machine<Plain>,
    /// The client's thread, and until when its turn takes.
    client: usize,
    busy_ns: u64,
    /// Something was killed: that others lose their connections to it is no error any more.
    disturbed: bool,
}

/// What dies, and does not come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The process of a shard's replica, with whatever else lives in it.
    Replica {
        /// The shard.
        shard: u16,
        /// The replica's number in it: 0 leads at first.
        number: u16,
    },
    /// The process of the sequencer that leads.
    Leader,
}

impl Stage {
    /// A cluster, and the client's session, at time 0. The client's first turn is at the time that the third value says.
    ///
    /// # Errors
    /// When the system has no memory for it, or the knobs do not fit together.
    pub fn new(knobs: Knobs) -> io::Result<(Stage, SimSession, u64)> {
        let knobs = Rc::new(knobs);
        let mut machine = Machine::new(&knobs, Plain, false)?;
        let client = machine.add_thread(Vec::new(), Some(0));
        machine.start();
        let mut options = SessionOptions::new(ClientId(1), vec!["gate-0".into()]);
        options.ring_bytes = knobs.ring_bytes;
        options.stream_credit_bytes = knobs.credit_bytes;
        options.backoff_min_ns = knobs.backoff_ns;
        options.backoff_max_ns = knobs.backoff_ns * 8;
        options.free_cuts_max = knobs.free_cuts_max;
        options.gates_max = knobs.processes;
        let transport = SimTransport::new(&machine.network, client, knobs.processes);
        let dialer = SimDialer::new(&machine.network, &machine.calls, client, options.client, options.ring_bytes);
        let session = Session::new(transport, dialer, options).map_err(io::Error::other)?;
        let mut stage = Stage { machine, client, busy_ns: 0, disturbed: false };
        let now_ns = stage.until_client()?;
        Ok((stage, session, now_ns))
    }

    /// The client has taken its turn: everything else goes on until its next one, whose time is returned.
    ///
    /// # Errors
    /// When a node ends a connection or warns: nothing here gives it reason to.
    pub fn go_on(&mut self, turn: Turn) -> io::Result<u64> {
        self.machine.end(self.client, self.busy_ns, turn);
        let now_ns = self.machine.network.borrow().now_ns;
        self.settle(now_ns)?;
        self.until_client()
    }

    fn until_client(&mut self) -> io::Result<u64> {
        while let Some((now_ns, what)) = self.machine.next() {
            match what {
                Some(What::Step { thread, turn }) if self.machine.threads[thread].turn == turn => {
                    self.settle(now_ns)?;
                    let busy_ns = self.machine.begin(now_ns, thread);
                    if thread == self.client {
                        self.busy_ns = busy_ns;
                        return Ok(now_ns);
                    }
                    let work = self.machine.run_agents(now_ns, thread);
                    self.machine.end_agents(thread, busy_ns, work);
                }
                Some(what) => self.machine.act(now_ns, what),
                None => {}
            }
            self.settle(now_ns)?;
        }
        Err(io::Error::other("nothing is left to happen, and the client waits"))
    }

    fn settle(&mut self, now_ns: u64) -> io::Result<()> {
        let Some(notice) = self.machine.after(now_ns).pop().filter(|_| !self.disturbed) else { return Ok(()) };
        Err(io::Error::other(match notice {
            Notice::PeerDown { agent, peer, reason } => format!("{agent} lost peer {}: {reason:?}", peer.0),
            Notice::Warning { agent, text } => format!("{agent} warns: {text}"),
        }))
    }

    /// From now on the primary of a shard holds every report back this long, in nanoseconds.
    pub fn hold_reports(&mut self, shard: u16, delay_ns: u64) {
        let agent = self.machine.knobs.replica(shard, 0);
        if let Some(Runner::Replica(replica)) = &mut self.machine.cluster.runners[agent] {
            replica.set_report_delay(delay_ns);
        }
    }

    /// The thread of a shard's primary does nothing for so many nanoseconds, as if another program had its core.
    pub fn stall(&mut self, shard: u16, for_ns: u64) {
        let now_ns = self.machine.network.borrow().now_ns;
        let agent = self.machine.knobs.replica(shard, 0);
        let Some(thread) = self.machine.threads.iter().position(|t| t.agents.contains(&agent)) else {
            return;
        };
        self.machine.stall(thread, now_ns + for_ns);
    }

    /// A process dies now, as one that is killed: its peers see their connections closed.
    pub fn kill(&mut self, victim: Victim) {
        self.disturbed = true;
        let now_ns = self.machine.network.borrow().now_ns;
        match victim {
            Victim::Replica { shard, number } => {
                let agent = self.machine.knobs.replica(shard, number);
                let process = self.machine.cluster.places.processes[agent];
                self.machine.die(now_ns, Death { process, leave: 0, silent_ns: None, down_ns: None, power: false });
            }
            Victim::Leader => {
                if let Some((agent, _)) = self.machine.cluster.leader() {
                    self.machine.remove(&[agent]);
                }
            }
        }
    }

    /// A counter summed over all agents, like `reports` of the sequencer; `agent` is a prefix of their names.
    pub fn counted(&self, agent: &str, counter: &str) -> u64 {
        let counters = self.machine.cluster.counters.iter().filter(|c| c.agent().starts_with(agent));
        let all = counters.flat_map(|c| c.snapshot());
        all.filter(|(name, _)| name.rsplit_once('.').is_some_and(|(_, n)| n == counter)).map(|(_, value)| value).sum()
    }
}
