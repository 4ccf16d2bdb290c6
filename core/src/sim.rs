//! The simulator: whole clusters and their clients on virtual time, drawn from a seed and judged by an oracle.
//!
//! Everything above [`Transport`](crate::transport::Transport) is the code that production runs: agents, channels, logs,
//! sessions. Below it is a simulated [`network`], around it simulated threads (`machine`), a control thread
//! and a clock. One seeded generator decides everything, nothing depends on addresses or hash order, so a seed repeats a
//! run to the byte.
//!
//! * [`knobs`] — what a seed draws; * [`network`] — links with delays, bounds and losses; * `control` — connections made,
//!   lost and made again; * `cluster` — the agents of a run; * `process` — those that live and die together;
//! * `faults` — deaths, rebirths, walls; `run::strikes` — whom they hit; * `workload`, `client` — who uses the log;
//! * `machine` — all of that as threads on virtual time; `run` — a seed's run; [`stage`] — a cluster to measure instead;
//! * [`overlay`] — another transport between agents and network; `tap` — what the oracle sees of the order stream;
//! * [`oracle`] — what must hold; * [`probes`] — what a batch must have reached.
//!
//! * `stores` — disks of the replicas, `disk` — of the sequencers.
//!
//! **Not simulated:** disks that are full or rot, processes that end in order, and clocks that disagree.

mod client;
mod cluster;
mod control;
pub(crate) mod disk;
mod faults;
pub mod knobs;
mod machine;
pub mod network;
pub mod oracle;
pub mod overlay;
pub mod probes;
mod process;
mod queue;
pub mod rng;
mod run;
mod sequencers;
pub mod stage;
mod stores;
mod tap;
pub mod trace;
mod workload;

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

pub use knobs::{Knobs, Overrides};
pub use oracle::Violation;
pub use overlay::{Overlay, Plain};
pub use probes::Probes;

/// Why a run failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Something that must hold did not.
    Wrong(Violation),
    /// The faults were over, and something was never told.
    Stuck(String),
    /// An agent or a session panicked.
    Crash(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Wrong(violation) => write!(f, "wrong: {violation}"),
            Failure::Stuck(what) => write!(f, "stuck: {what}"),
            Failure::Crash(what) => write!(f, "crash: {}", what.replace('\n', " ")),
        }
    }
}

/// What became of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// A hash of everything that happened; 0 after a crash.
    pub digest: u64,
    /// Every event, if it was asked for.
    pub trace: Option<String>,
    /// How far virtual time came, in nanoseconds.
    pub virtual_ns: u64,
    /// What the run reached.
    pub probes: Probes,
    /// Why it failed, if it did.
    pub failure: Option<Failure>,
}

thread_local! {
    /// The message of the panic that is being caught on this thread; `None`: none is to be caught.
    static CAUGHT: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Has panics of runs kept instead of printed; everybody else's go where they went.
fn keep_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let kept = CAUGHT.with_borrow_mut(|caught| {
                caught.as_mut().map(|message| {
                    let place = info.location().map(ToString::to_string).unwrap_or_default();
                    *message = format!("{} at {place}", panic_text(info.payload()));
                })
            });
            if kept.is_none() {
                before(info);
            }
        }));
    });
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// Runs a simulation; `traced` keeps every event as text.
///
/// # Errors
/// When the system has no memory for it.
pub fn simulate(knobs: Knobs, traced: bool) -> std::io::Result<Outcome> {
    simulate_over(Plain, knobs, traced)
}

/// Runs a simulation over the transports of an overlay.
///
/// # Errors
/// As [`simulate`].
pub fn simulate_over<O: Overlay>(overlay: O, knobs: Knobs, traced: bool) -> std::io::Result<Outcome> {
    keep_panics();
    CAUGHT.set(Some(String::new()));
    let outcome = catch_unwind(AssertUnwindSafe(|| run::Run::new(knobs, overlay, traced).map(run::Run::go)));
    let message = CAUGHT.take().unwrap_or_default();
    outcome.unwrap_or_else(|_| {
        let failure = Some(Failure::Crash(message));
        Ok(Outcome { digest: 0, trace: None, virtual_ns: 0, probes: Probes::default(), failure })
    })
}
