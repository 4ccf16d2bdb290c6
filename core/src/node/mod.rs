//! The machinery that runs a node: agents with duty cycles, the threads they run on, and how those wait for work.
//!
//! * [`mod@agent`] — what an agent is; a group of agents that one thread, or the caller, drives.
//! * [`mod@launch`] — starts, pins, watches and stops the threads.
//! * [`mod@plan`] — which agent runs on which thread and core.
//! * [`mod@idle`] — spinning, yielding and parking.
//! * [`mod@clock`] — the time that duty cycles are given.

pub mod agent;
pub mod clock;
pub mod idle;
pub mod launch;
pub mod plan;

pub use agent::{Agent, AgentBuilder, Invoked};
pub use clock::now_ns;
pub use idle::{Idle, Parker, Waker};
pub use launch::{LaunchError, Running, ThreadPlan, launch};
pub use plan::{LaunchMode, Placement, PlanError, plan};
