//! A node: agents with duty cycles, the threads they run on, and how those wait for work.
//!
//! * [`agent`] — what an agent is; a group of agents that one thread, or the caller, drives.
//! * [`replica`], [`sequencer`], [`gate`] — the agents of a cluster.
//! * [`group`] — which entries of the order log are committed: one sequencer, or several that agree.
//! * [`bus`], [`mailbox`] — how they reach each other inside a process.
//! * [`mod@launch`] — starts, pins, watches and stops the threads. [`mod@plan`] — which agent runs on which thread and core.
//! * [`idle`] — spinning, yielding and parking. [`clock`] — the time that duty cycles are given.

pub mod agent;
pub mod bus;
pub mod clock;
pub mod gate;
pub mod group;
pub mod idle;
pub mod launch;
pub mod mailbox;
pub mod order_log;
pub mod plan;
pub mod replica;
pub mod sequencer;

pub use agent::{Agent, AgentBuilder, Invoked};
pub use clock::now_ns;
pub use idle::{Idle, Parker, Waker};
pub use launch::{LaunchError, Running, ThreadPlan, launch};
pub use plan::{LaunchMode, Placement, PlanError, plan};
