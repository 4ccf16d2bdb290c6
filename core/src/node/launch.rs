//! Starts the threads of a node, pins them, watches them and stops them.
//!
//! **A panic stops the node.** An agent that panicked met a programmer's error, and the state it shares with the others
//! (queues, regions, its promises to peers) can no longer be trusted. All threads stop, so the peers see closed
//! connections and act on them, which they could not if half of the node went on. [`Running::failure`] says which thread
//! it was and why; the process reports it and ends.

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

use core_affinity::CoreId;

use super::agent::{AgentBuilder, Invoked, Left};
use super::clock::now_ns;
use super::idle::{Idle, Parker, Waker};
use crate::mem::sys;

/// One thread to start.
pub struct ThreadPlan {
    /// Its name in error messages and, cut to 15 bytes, in the operating system.
    pub name: String,
    /// The core to pin it to, as an index into [`cores`]; `None`: the kernel chooses.
    pub core: Option<usize>,
    /// What it does without work.
    pub idle: Idle,
    /// With [`Idle::Park`]: nanoseconds it keeps spinning after the last work before it blocks.
    pub spin_ns: u64,
    /// Its bed; the wakers were given to whoever brings it work.
    pub parker: Parker,
    /// Its agents, built in this order.
    pub agents: Vec<AgentBuilder>,
    /// The order in which they are called: see [`Invoked::build_in_turns`].
    pub turns: Vec<usize>,
}

/// Why a node did not start.
#[derive(Debug)]
pub enum LaunchError {
    /// The operating system refused a thread.
    Spawn {
        /// The thread.
        thread: String,
        /// The kernel's error.
        error: io::Error,
    },
    /// There is no such core, or the kernel refused to pin a thread to it.
    Core {
        /// The thread.
        thread: String,
        /// The index asked for.
        core: usize,
        /// How many cores this process may use.
        available: usize,
    },
    /// An agent could not be built, or panicked while it was.
    Agent {
        /// The thread.
        thread: String,
        /// The builder's error.
        reason: String,
    },
}

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LaunchError::Spawn { thread, error } => {
                write!(f, "cannot start thread {thread}: {error}; is the limit of processes (ulimit -u) reached?")
            }
            LaunchError::Core { thread, core, available } => write!(
                f,
                "cannot pin thread {thread} to core {core}: this process may use {available} core(s), numbered from 0; \
                 choose another core or none"
            ),
            LaunchError::Agent { thread, reason } => write!(f, "cannot set up thread {thread}: {reason}"),
        }
    }
}

impl std::error::Error for LaunchError {}

/// The cores this process may use. Read once, before anything is pinned: the operating system answers with the calling
/// thread's own mask, which new threads inherit.
pub fn cores() -> &'static [CoreId] {
    static CORES: OnceLock<Vec<CoreId>> = OnceLock::new();
    CORES.get_or_init(|| core_affinity::get_core_ids().unwrap_or_default())
}

/// What the threads of one launch share.
struct Shared {
    stop: AtomicBool,
    failure: Mutex<Option<String>>,
    wakers: Vec<Waker>,
}

impl Shared {
    fn halt(&self) {
        self.stop.store(true, Ordering::SeqCst);
        for waker in &self.wakers {
            waker.wake();
        }
    }

    fn stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Keeps the first failure and stops everything.
    fn fail(&self, failure: String) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        self.halt();
    }
}

/// The threads of a node. Dropping it stops them.
#[must_use = "dropping it stops the threads"]
pub struct Running {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("threads", &self.threads.len()).field("failure", &self.failure()).finish()
    }
}

impl Running {
    /// The name and message of the first thread that panicked. All threads are stopping or have stopped then.
    pub fn failure(&self) -> Option<String> {
        self.shared.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// True once every thread has ended.
    pub fn finished(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Tells all threads to stop, waits until their agents have, and returns the failure if there was one.
    pub fn stop(mut self) -> Option<String> {
        self.halt_and_join();
        self.failure()
    }

    fn halt_and_join(&mut self) {
        self.shared.halt();
        for thread in self.threads.drain(..) {
            // A panic was caught inside the thread and is in `failure`.
            let _ = thread.join();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.halt_and_join();
    }
}

/// Starts a thread for every plan, waits until all agents are built, and lets them run.
///
/// # Errors
/// The first error; then every thread has been stopped and no duty cycle has run.
pub fn launch(plans: Vec<ThreadPlan>) -> Result<Running, LaunchError> {
    let available = cores();
    for plan in &plans {
        if let Some(core) = plan.core.filter(|&core| core >= available.len()) {
            return Err(LaunchError::Core { thread: plan.name.clone(), core, available: available.len() });
        }
    }
    let wakers = plans.iter().map(|plan| plan.parker.waker()).collect();
    let shared = Arc::new(Shared { stop: AtomicBool::new(false), failure: Mutex::new(None), wakers });
    let mut running = Running { shared, threads: Vec::with_capacity(plans.len()) };
    let (report, reports) = channel();
    let mut starts = Vec::with_capacity(plans.len());
    for plan in plans {
        let (start, started) = channel();
        let (shared, report, name) = (running.shared.clone(), report.clone(), plan.name.clone());
        let body = move || thread_body(plan, &shared, &report, &started);
        match thread::Builder::new().name(name.clone()).spawn(body) {
            Ok(thread) => running.threads.push(thread),
            Err(error) => return Err(abandon(running, starts, LaunchError::Spawn { thread: name, error })),
        }
        starts.push(start);
    }
    drop(report);
    for result in reports.iter().take(starts.len()) {
        if let Err(error) = result {
            return Err(abandon(running, starts, error));
        }
    }
    for start in starts {
        // A thread waits for this and cannot have ended.
        let _ = start.send(());
    }
    Ok(running)
}

/// Ends threads that were not told to start: they wait for a word that can no longer come.
fn abandon(running: Running, starts: Vec<Sender<()>>, error: LaunchError) -> LaunchError {
    drop(starts);
    drop(running);
    error
}

/// The life of one thread: pin, build, report, wait for the start, run, stop.
fn thread_body(plan: ThreadPlan, shared: &Shared, report: &Sender<Result<(), LaunchError>>, start: &Receiver<()>) {
    let ThreadPlan { name, core, idle, spin_ns, mut parker, agents, turns } = plan;
    let built = prepare_thread(&name, core).and_then(|()| {
        let built = catch_unwind(AssertUnwindSafe(|| Invoked::build_in_turns(agents, turns)))
            .unwrap_or_else(|panic| Err(panic_text(&*panic)));
        built.map_err(|reason| LaunchError::Agent { thread: name.clone(), reason })
    });
    let mut agents = match built {
        Ok(agents) => agents,
        Err(error) => {
            let _ = report.send(Err(error));
            return;
        }
    };
    if report.send(Ok(())).is_err() || start.recv().is_err() {
        return;
    }
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        run(&mut agents, idle, spin_ns, &mut parker, shared);
        agents.stop(now_ns());
    }));
    if let Err(panic) = outcome {
        shared.fail(match panic.downcast_ref::<Left>() {
            Some(Left(why)) => why.clone(),
            None => format!("thread {name} panicked: {}", panic_text(&*panic)),
        });
    }
}

fn prepare_thread(name: &str, core: Option<usize>) -> Result<(), LaunchError> {
    sys::precise_timers();
    match core {
        Some(core) if !core_affinity::set_for_current(cores()[core]) => {
            Err(LaunchError::Core { thread: name.to_owned(), core, available: cores().len() })
        }
        _ => Ok(()),
    }
}

/// The loop of every data thread. The clock is read once a cycle; nothing is allocated after the first park.
fn run(agents: &mut Invoked, idle: Idle, spin_ns: u64, parker: &mut Parker, shared: &Shared) {
    let mut fds: Vec<RawFd> = Vec::with_capacity(16);
    let mut last_work = now_ns();
    while !shared.stopping() {
        let now = now_ns();
        if agents.step(now) > 0 {
            last_work = now;
            continue;
        }
        match idle {
            Idle::Spin => std::hint::spin_loop(),
            Idle::Yield => thread::yield_now(),
            Idle::Park if now - last_work < spin_ns => std::hint::spin_loop(),
            Idle::Park => {
                let timeout = agents.deadline_ns().map(|deadline| deadline.saturating_sub(now));
                if timeout == Some(0) {
                    continue;
                }
                fds.clear();
                agents.wait_fds(&mut fds);
                parker.park(&fds, timeout, || shared.stopping() || agents.prepare_wait());
            }
        }
    }
}

/// What a panic said.
fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

#[cfg(all(test, not(loom)))]
mod tests;
