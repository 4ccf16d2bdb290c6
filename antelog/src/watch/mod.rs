//! Looking at running nodes from outside: metrics, health and readiness over HTTP.
//!
//! `/metrics` is in the Prometheus text format, its names are those of `core/METRICS.md`. `/health` is 200 while the agents
//! run and 503, with the reason, once one has failed. `/ready` is 200 while the node's connections are up and its shards may
//! take appends, and 503, with a line for each thing that is missing, otherwise. All of it runs on a thread of its own and
//! reads what data threads publish; it cannot disturb them.

pub mod http;
mod metrics;

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use antelog_core::config::Config;
use antelog_core::counters::Counters;

use crate::cluster::Connection;

pub use metrics::{Kind, METRICS, Metric};

/// Pause after a connection could not be taken, for lack of descriptors say.
const PAUSE: Duration = Duration::from_millis(100);

/// An agent's counters, and the node it belongs to.
#[derive(Clone, Debug)]
struct Watched {
    node: u16,
    counters: Counters,
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
    /// Shards that are not expected to take appends.
    standby: Arc<BTreeSet<u16>>,
    state: Arc<Mutex<State>>,
}

impl Observed {
    /// Of agents with the node each belongs to.
    pub(crate) fn new(config: &Config, agents: Vec<(u16, Counters)>, connections: Connections) -> Observed {
        Observed {
            agents: agents.into_iter().map(|(node, counters)| Watched { node, counters }).collect(),
            connections,
            standby: Arc::new(config.shards.iter().filter(|s| s.standby).map(|s| s.id).collect()),
            state: Arc::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The counters of all agents.
    pub fn counters(&self) -> impl Iterator<Item = &Counters> {
        self.agents.iter().map(|agent| &agent.counters)
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
        let down = connections.iter().filter(|connection| !connection.is_up);
        missing.extend(down.map(|c| format!("node {}: no connection to node {}: {}", c.node, c.to, c.why)));
        for agent in self.agents.iter() {
            for (name, value) in agent.counters.snapshot() {
                let shard = name.strip_prefix("gate.shard-").and_then(|rest| rest.strip_suffix(".open"));
                if let Some(shard) = shard.and_then(|shard| shard.parse().ok())
                    && value == 0
                    && !self.standby.contains(&shard)
                {
                    missing.push(format!("node {}: shard {shard} takes no appends", agent.node));
                }
            }
        }
        missing
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
