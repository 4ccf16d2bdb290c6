//! Which agent runs on which thread and core.
//!
//! Threads that spin are fast only while each has a core to itself: two spinners on one core take turns by the scheduler's
//! clock, milliseconds apart. So a plan that would do that is refused unless the user insists.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use serde::Deserialize;

use super::idle::Idle;

/// How agents are spread over threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LaunchMode {
    /// A thread for every agent, pinned when there are enough cores.
    Dedicated,
    /// One thread for all agents: no hand-over between threads, right for few cores.
    Shared,
    /// No thread: the caller steps the agents itself.
    Invoked,
}

impl fmt::Display for LaunchMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LaunchMode::Dedicated => "dedicated",
            LaunchMode::Shared => "shared",
            LaunchMode::Invoked => "invoked",
        })
    }
}

impl FromStr for LaunchMode {
    type Err = String;

    fn from_str(text: &str) -> Result<LaunchMode, String> {
        match text {
            "dedicated" => Ok(LaunchMode::Dedicated),
            "shared" => Ok(LaunchMode::Shared),
            "invoked" => Ok(LaunchMode::Invoked),
            _ => Err(format!("unknown launch mode {text:?}: use dedicated, shared or invoked")),
        }
    }
}

/// One thread of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The agents it runs, by their index.
    pub agents: Range<usize>,
    /// The core it is pinned to, as an index into [`cores`](super::launch::cores); `None`: the kernel chooses.
    pub core: Option<usize>,
}

/// A plan that cannot be fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanError {
    /// Threads that would spin.
    pub threads: usize,
    /// Cores this process may use.
    pub cores: usize,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlanError { threads, cores } = self;
        write!(
            f,
            "{threads} threads would spin on {cores} core(s) and take milliseconds from each other: use launch mode shared, \
             idle strategy park, or force it"
        )
    }
}

impl std::error::Error for PlanError {}

/// Spreads `agents` agents over threads. `cores` is how many cores the process may use; `force` accepts spinning on more
/// threads than that.
///
/// Threads are pinned from core 0 upwards when each gets a core of its own and they do not park: a parked thread gains
/// more from waking up on whatever core is free.
///
/// # Errors
/// [`PlanError`] when more threads than cores would spin.
pub fn plan(
    mode: LaunchMode,
    agents: usize,
    cores: usize,
    idle: Idle,
    force: bool,
) -> Result<Vec<Placement>, PlanError> {
    let threads = match mode {
        LaunchMode::Dedicated => agents,
        LaunchMode::Shared => agents.min(1),
        LaunchMode::Invoked => 0,
    };
    if idle == Idle::Spin && threads > cores && !force {
        return Err(PlanError { threads, cores });
    }
    let pinned = idle != Idle::Park && threads <= cores;
    let core = |thread| pinned.then_some(thread);
    Ok(match mode {
        LaunchMode::Dedicated => {
            (0..agents).map(|agent| Placement { agents: agent..agent + 1, core: core(agent) }).collect()
        }
        LaunchMode::Shared => (0..threads).map(|thread| Placement { agents: 0..agents, core: core(thread) }).collect(),
        LaunchMode::Invoked => Vec::new(),
    })
}

/// What to use when the user did not say: spinning threads of their own when that leaves the rest of the machine a
/// core, otherwise one thread that parks.
pub fn suggest(agents: usize, cores: usize) -> (LaunchMode, Idle) {
    if agents < cores { (LaunchMode::Dedicated, Idle::Spin) } else { (LaunchMode::Shared, Idle::Park) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for mode in [LaunchMode::Dedicated, LaunchMode::Shared, LaunchMode::Invoked] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert!("thread".parse::<LaunchMode>().unwrap_err().contains("dedicated, shared or invoked"));
    }

    #[test]
    fn dedicated_threads_get_cores_while_there_are_enough() {
        let plan = |agents, idle| plan(LaunchMode::Dedicated, agents, 2, idle, false);
        let spinning = plan(2, Idle::Spin).unwrap();
        assert_eq!(spinning[1], Placement { agents: 1..2, core: Some(1) });
        let error = plan(3, Idle::Spin).unwrap_err();
        assert_eq!(error, PlanError { threads: 3, cores: 2 });
        assert!(error.to_string().contains("3 threads would spin on 2 core(s)"));
        assert!(plan(3, Idle::Yield).unwrap().iter().all(|thread| thread.core.is_none()));
        assert!(plan(2, Idle::Park).unwrap().iter().all(|thread| thread.core.is_none()));
    }

    #[test]
    fn force_spins_unpinned() {
        let forced = plan(LaunchMode::Dedicated, 3, 2, Idle::Spin, true).unwrap();
        assert_eq!(forced.len(), 3);
        assert!(forced.iter().all(|thread| thread.core.is_none()));
    }

    #[test]
    fn shared_is_one_thread_and_invoked_none() {
        let shared = plan(LaunchMode::Shared, 5, 1, Idle::Spin, false).unwrap();
        assert_eq!(shared, [Placement { agents: 0..5, core: Some(0) }]);
        assert!(plan(LaunchMode::Shared, 0, 1, Idle::Park, false).unwrap().is_empty());
        assert!(plan(LaunchMode::Invoked, 5, 1, Idle::Spin, false).unwrap().is_empty());
    }

    #[test]
    fn small_machines_share_and_park() {
        assert_eq!(suggest(3, 2), (LaunchMode::Shared, Idle::Park));
        assert_eq!(suggest(2, 2), (LaunchMode::Shared, Idle::Park));
        assert_eq!(suggest(3, 10), (LaunchMode::Dedicated, Idle::Spin));
    }
}
