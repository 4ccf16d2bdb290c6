//! What is measured. The measurement knows no cluster and no network: it drives a [`Log`], reads a [`Clock`] and waits
//! through a [`Host`], so that the same loop runs against a real session and, in tests, on virtual time.

use antelog_core::client::{SessionHandler, SubscriptionId};
use antelog_protocol::client::Scope;
use antelog_protocol::{Position, ShardId};

use crate::counted::Counted;

/// Why a record was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogError {
    /// No room now: the same record may be offered again later. Nothing happened.
    Full,
    /// It will never be taken; the text says why. Ends the run.
    Failed(String),
}

/// One client's access to a log. The owner of a session wraps it in a type of its own and implements this for it.
pub trait Log {
    /// Hands a record over for sending and returns its sequence number, consecutive per shard.
    ///
    /// # Errors
    /// [`LogError::Full`] when the log pushes back.
    fn append(&mut self, shard: ShardId, record: &[u8]) -> Result<u64, LogError>;

    /// Subscribes, before the first record is sent; the number comes back with each event.
    fn subscribe(&mut self, scope: Scope, from: Position) -> SubscriptionId;

    /// Sends and receives what is ready, without blocking, and tells `handler`. Returns how much work was done, 0 for
    /// none. A cluster that runs on the caller's thread does its duty cycles in here.
    fn poll<H: SessionHandler>(&mut self, now_ns: u64, handler: &mut H) -> usize;
}

/// Where time comes from. All times are nanoseconds since an arbitrary start that writers and consumer share.
pub trait Clock {
    /// The time now, in nanoseconds.
    fn now_ns(&self) -> u64;

    /// Burns the processor until `deadline_ns`.
    fn spin_until(&self, deadline_ns: u64) {
        while self.now_ns() < deadline_ns {
            std::hint::spin_loop();
        }
    }
}

/// The process's monotonic clock, the one that the nodes' duty cycles use.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealClock;

impl Clock for RealClock {
    #[inline]
    fn now_ns(&self) -> u64 {
        antelog_core::node::now_ns()
    }
}

/// What surrounds the loop: how it waits, and what the cluster counts about itself.
pub trait Host {
    /// Called once per turn of the loop. `work` is what the turn did, 0 for nothing; the loop has nothing of its own to
    /// do before `until_ns`, so a host may park the thread until then or until the network wakes it.
    fn idle(&mut self, work: usize, until_ns: u64);

    /// The cluster's counters so far. Called when the warm-up ends and when the load ends, so that neither counts.
    fn counted(&mut self) -> Counted {
        Counted::default()
    }

    /// Whether the user wants no more of this: asked once per turn of the loop, and the run then ends as failed.
    fn interrupted(&self) -> bool {
        false
    }
}

/// A host without counters that never parks: it spins, or gives the core away after a turn without work.
#[derive(Clone, Copy, Debug)]
pub struct PlainHost {
    /// Whether to give the core away: needed when there are more threads than cores.
    pub yields: bool,
}

impl Host for PlainHost {
    fn idle(&mut self, work: usize, _until_ns: u64) {
        match (work, self.yields) {
            (0, true) => std::thread::yield_now(),
            (0, false) => std::hint::spin_loop(),
            _ => {}
        }
    }
}
