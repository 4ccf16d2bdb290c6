//! Looking at running nodes from outside: metrics, health and readiness over HTTP.
//!
//! `/metrics` is in the Prometheus text format, its names are those of `core/METRICS.md`. `/health` is 200 while the agents
//! run and 503, with the reason, once one has failed. `/ready` is 200 while the nodes can do their work and 503, with a line
//! for each thing that is missing, otherwise: a replica needs a sequencer, and to be a member of its shard, unless it stands
//! by as a spare; a shard that is led here has to take appends; a sequencer needs most of its group. All of it runs on a
//! thread of its own and reads what data threads publish; it cannot disturb them.

pub mod http;
mod metrics;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use antelog_core::config::{Config, Role};
use antelog_core::counters::Counters;

use crate::cluster::Connection;
use crate::status::Status;

pub use metrics::{Kind, METRICS, Metric};

/// Pause after a connection could not be taken, for lack of descriptors say.
const PAUSE: Duration = Duration::from_millis(100);

/// An agent's counters, and the node it belongs to.
#[derive(Clone, Debug)]
struct Watched {
    node: u16,
    counters: Counters,
}

impl Watched {
    /// The value of one counter.
    fn value(&self, name: &str) -> Option<u64> {
        let is_it =
            |full: &str| full.strip_prefix(self.counters.agent()).and_then(|rest| rest.strip_prefix('.')) == Some(name);
        self.counters.snapshot().into_iter().find(|(full, _)| is_it(full)).map(|(_, value)| value)
    }

    /// The shard that its agent, a replica, leads.
    fn leads(&self) -> Option<&str> {
        let (shard, _replica) = self.counters.agent().strip_prefix("replica-")?.split_once('-')?;
        (self.value("is_primary") == Some(1)).then_some(shard)
    }
}

#[derive(Debug, Default)]
struct State {
    failure: Option<String>,
    is_closing: bool,
}

/// Lists the connections that there should be.
type Connections = Arc<dyn Fn() -> Vec<Connection> + Send + Sync>;

/// What can be seen of the nodes of a process, from any thread. Clones are handles to the same.
#[derive(Clone)]
pub struct Observed {
    agents: Arc<[Watched]>,
    connections: Connections,
    /// The role of every node.
    roles: Arc<BTreeMap<u16, Role>>,
    /// Shards that are not expected to take appends.
    standby: Arc<BTreeSet<u16>>,
    config: Arc<Config>,
    state: Arc<Mutex<State>>,
}

impl Observed {
    /// Of agents with the node each belongs to.
    pub(crate) fn new(config: &Config, agents: Vec<(u16, Counters)>, connections: Connections) -> Observed {
        Observed {
            agents: agents.into_iter().map(|(node, counters)| Watched { node, counters }).collect(),
            connections,
            roles: Arc::new(config.nodes.iter().map(|n| (n.id, n.role)).collect()),
            standby: Arc::new(config.shards.iter().filter(|s| s.standby).map(|s| s.id).collect()),
            config: Arc::new(config.clone()),
            state: Arc::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All counters of the nodes, as (`agent.name`, value). Those of a replica that leads its shard are there a second time
    /// as the shard's.
    pub fn counters(&self) -> Vec<(String, u64)> {
        let mut all: Vec<(String, u64)> = self.agents.iter().flat_map(|agent| agent.counters.snapshot()).collect();
        for agent in self.agents.iter() {
            let Some(shard) = agent.leads() else { continue };
            let own = agent.counters.snapshot().into_iter();
            let of_shard = own.filter_map(|(full, value)| {
                let name = full.strip_prefix(agent.counters.agent())?;
                Some((format!("shard-{shard}{name}"), value))
            });
            all.extend(of_shard);
        }
        all
    }

    /// The nodes have failed.
    pub fn fail(&self, why: &str) {
        self.state().failure.get_or_insert_with(|| why.to_owned());
    }

    /// The nodes are about to end.
    pub fn close(&self) {
        self.state().is_closing = true;
    }

    /// Why the nodes have failed, if they have.
    pub fn failure(&self) -> Option<String> {
        self.state().failure.clone()
    }

    /// What the nodes lack to do their work: a line each.
    pub fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        {
            let state = self.state();
            missing.extend(state.failure.as_ref().map(|why| format!("failed: {why}")));
            missing.extend(state.is_closing.then(|| "shutting down".to_owned()));
        }
        let connections = (self.connections)();
        for node in self.agents.iter().map(|agent| agent.node).collect::<BTreeSet<u16>>() {
            missing.extend(self.missing_sequencers(node, &connections));
        }
        let led: BTreeSet<&str> = self.agents.iter().filter_map(Watched::leads).collect();
        for agent in self.agents.iter() {
            missing.extend(self.missing_part(agent));
            missing.extend(self.closed_shards(agent, &led));
        }
        missing
    }

    /// The connections that a replica lacks to reach any sequencer, a sequencer to reach most of its group.
    fn missing_sequencers(&self, node: u16, connections: &[Connection]) -> Vec<String> {
        let is_sequencer = |id: u16| self.roles.get(&id) == Some(&Role::Sequencer);
        let own: Vec<&Connection> = connections.iter().filter(|c| c.node == node && is_sequencer(c.to)).collect();
        let up = own.iter().filter(|c| c.is_up).count();
        // A sequencer reaches itself, and needs as many others as do not reach half of the group without it.
        let needed = if is_sequencer(node) { own.len().div_ceil(2) } else { own.len().min(1) };
        if up >= needed {
            return Vec::new();
        }
        let down = own.iter().filter(|c| !c.is_up);
        down.map(|c| format!("node {node}: no connection to node {}: {}", c.to, c.why)).collect()
    }

    /// What a replica has no part in.
    fn missing_part(&self, agent: &Watched) -> Option<String> {
        let (shard, _replica) = agent.counters.agent().strip_prefix("replica-")?.split_once('-')?;
        let stands_by = self.roles.get(&agent.node) == Some(&Role::Spare);
        let is_outside = !stands_by && agent.value("is_primary") == Some(0) && agent.value("is_member") == Some(0);
        is_outside.then(|| format!("node {}: neither leads shard {shard} nor follows as a member of it", agent.node))
    }

    /// Shards that are led here and take no appends.
    fn closed_shards(&self, agent: &Watched, led: &BTreeSet<&str>) -> Vec<String> {
        let closed = |(name, value): (String, u64)| {
            let shard = name.strip_prefix("gate.shard-")?.strip_suffix(".open")?;
            let is_expected = led.contains(shard) && !self.standby.contains(&shard.parse().ok()?);
            (value == 0 && is_expected).then(|| format!("node {}: shard {shard} takes no appends", agent.node))
        };
        agent.counters.snapshot().into_iter().filter_map(closed).collect()
    }

    /// How the nodes are, for whoever asks them one by one.
    pub fn status(&self) -> Status {
        let agents: Vec<(u16, &Counters)> = self.agents.iter().map(|a| (a.node, &a.counters)).collect();
        Status::of(&self.config, &agents, self.missing())
    }

    /// All metrics in the Prometheus text format.
    pub fn metrics(&self) -> String {
        let agents: Vec<(u16, &Counters)> = self.agents.iter().map(|a| (a.node, &a.counters)).collect();
        metrics::render(&agents, &(self.connections)())
    }

    /// The status and body that answer a request for a path.
    fn answer(&self, path: &str) -> (u16, String) {
        match path {
            "/metrics" => (200, self.metrics()),
            "/health" => match self.failure() {
                None => (200, "the agents run\n".into()),
                Some(why) => (503, format!("failed: {why}\n")),
            },
            "/ready" => match &self.missing()[..] {
                [] => (200, "ready\n".into()),
                missing => (503, missing.iter().map(|line| format!("{line}\n")).collect()),
            },
            _ => (404, "there are /metrics, /health and /ready\n".into()),
        }
    }
}

/// A server at work. Stops when dropped.
pub struct Watch {
    local: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// A bound port on which nobody is answered yet.
pub struct Port(TcpListener, SocketAddr);

impl Port {
    /// Binds an address; port 0 lets the system choose one. Nobody has to prove anything to read what will be said here:
    /// choose an address that only those reach who may.
    ///
    /// # Errors
    /// The address cannot be had: one line.
    pub fn bind(address: SocketAddr) -> Result<Port, String> {
        let bound = TcpListener::bind(address).and_then(|listener| {
            let local = listener.local_addr()?;
            Ok(Port(listener, local))
        });
        bound.map_err(|error| format!("cannot serve metrics on {address}: {error}"))
    }

    /// Answers until what it returns is dropped.
    ///
    /// # Errors
    /// The system has no thread for it: one line.
    pub fn serve(self, observed: Observed) -> Result<Watch, String> {
        let Port(listener, local) = self;
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = stop.clone();
        let body = move || run(&listener, &observed, &stopping);
        let thread = std::thread::Builder::new().name("antelog-watch".into()).spawn(body);
        let thread = thread.map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(Watch { local, stop, thread: Some(thread) })
    }
}

impl Watch {
    /// The address it serves on, with the port the system chose.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // A call wakes the thread. One that cannot be made finds nobody: the thread ends with the process then.
        let woken = TcpStream::connect_timeout(&self.local, http::TIME);
        if let (Ok(_), Some(thread)) = (woken, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

/// Takes one connection after the other: each has a deadline, so none keeps the others waiting for long.
fn run(listener: &TcpListener, observed: &Observed, stop: &AtomicBool) {
    loop {
        let accepted = listener.accept();
        if stop.load(Ordering::SeqCst) {
            return;
        }
        match accepted {
            Ok((stream, _)) => http::serve(&stream, |path| observed.answer(path)),
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

#[cfg(test)]
mod tests;
