//! What a thread does when there is nothing to do, and how another thread gets it out of that.
//!
//! **Parking without losing a wake-up.** The sleeper raises a flag, then looks for work once more, then sleeps. Whoever
//! brings work publishes it, then looks at the flag. A sequentially consistent fence stands between the two steps on
//! either side (Dekker's scheme), so at least one of them sees the other: either the sleeper finds the work or the waker
//! finds the flag and signals an eventfd. A thread that is awake thus costs its wakers a fence and a load, no system call.

use std::fmt;
use std::os::fd::RawFd;
use std::str::FromStr;

use serde::Deserialize;

use crate::mem::sys::PollFd;
use crate::sync::{Arc, AtomicBool, Bell, Ordering, fence};

/// How a thread waits for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Idle {
    /// Looks again at once: the lowest latency, and a core of its own.
    Spin,
    /// Lets other threads of the machine run before it looks again.
    Yield,
    /// Blocks in the kernel until something arrives or is due.
    Park,
}

impl fmt::Display for Idle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Idle::Spin => "spin",
            Idle::Yield => "yield",
            Idle::Park => "park",
        })
    }
}

impl FromStr for Idle {
    type Err = String;

    fn from_str(text: &str) -> Result<Idle, String> {
        match text {
            "spin" => Ok(Idle::Spin),
            "yield" => Ok(Idle::Yield),
            "park" => Ok(Idle::Park),
            _ => Err(format!("unknown idle strategy {text:?}: use spin, yield or park")),
        }
    }
}

#[derive(Debug)]
struct Bed {
    /// The sleeper is asleep, or about to be and will look for work once more.
    parked: AtomicBool,
    bell: Bell,
}

/// Wakes the thread that owns the matching [`Parker`], or whoever else runs agents.
#[derive(Clone, Debug)]
pub struct Waker(Wakes);

#[derive(Clone)]
enum Wakes {
    Nobody,
    Parked(Arc<Bed>),
    Calls(std::sync::Arc<dyn Fn() + Send + Sync>),
}

impl fmt::Debug for Wakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Wakes::Nobody => "Nobody",
            Wakes::Parked(_) => "Parked",
            Wakes::Calls(_) => "Calls",
        })
    }
}

impl Waker {
    /// For threads that never park: `wake` does nothing.
    pub fn none() -> Waker {
        Waker(Wakes::Nobody)
    }

    /// For threads that are not the operating system's: `wake` calls `wakes`, asleep or not. The simulator's.
    pub fn calling(wakes: impl Fn() + Send + Sync + 'static) -> Waker {
        Waker(Wakes::Calls(std::sync::Arc::new(wakes)))
    }

    /// Wakes the thread if it is parked. Call it after the work was published. Costs a system call only when the thread
    /// is parked or about to be, and then only one of several wakers pays.
    #[inline]
    pub fn wake(&self) {
        match &self.0 {
            Wakes::Nobody => {}
            Wakes::Parked(bed) => {
                fence(Ordering::SeqCst);
                if bed.parked.load(Ordering::Relaxed) {
                    bed.signal();
                }
            }
            Wakes::Calls(wakes) => wakes(),
        }
    }
}

impl Bed {
    #[cold]
    fn signal(&self) {
        if self.parked.swap(false, Ordering::Relaxed) {
            self.bell.ring();
        }
    }
}

/// Puts its thread to sleep; owned by that thread.
#[derive(Debug)]
pub struct Parker {
    bed: Arc<Bed>,
    /// What the kernel is asked to wait for; kept so that parking allocates only when it grows.
    list: Vec<PollFd>,
}

impl Parker {
    /// A parker and its waker.
    ///
    /// # Errors
    /// The kernel's error when the process has no descriptor left for the eventfd.
    pub fn new() -> std::io::Result<(Parker, Waker)> {
        let bed = Arc::new(Bed { parked: AtomicBool::new(false), bell: Bell::new()? });
        let parker = Parker { bed, list: Vec::with_capacity(16) };
        let waker = parker.waker();
        Ok((parker, waker))
    }

    /// One more waker of this thread.
    pub fn waker(&self) -> Waker {
        Waker(Wakes::Parked(self.bed.clone()))
    }

    /// Blocks until the waker is used, one of `fds` is readable, or `timeout_ns` nanoseconds have passed (`None`: no
    /// limit). `recheck` is called after wakers can see that this thread is about to sleep: it returns true if work has
    /// appeared, and then nothing blocks. May return early for no reason. Returns whether it went to sleep.
    ///
    /// Panics when the kernel refuses to wait: no memory, or more descriptors than the process may have open.
    pub fn park(&mut self, fds: &[RawFd], timeout_ns: Option<u64>, mut recheck: impl FnMut() -> bool) -> bool {
        // Every change of the flag is a read-modify-write: that puts wakers' and sleepers' changes in one order, which the
        // model checker can only follow so. Next to a system call it costs nothing.
        self.bed.parked.swap(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if recheck() {
            self.bed.parked.swap(false, Ordering::Relaxed);
            return false;
        }
        // A waker that saw the flag just before it falls may ring after this; the next sleep then ends at once.
        self.bed.bell.sleep(&mut self.list, fds, timeout_ns);
        self.bed.parked.swap(false, Ordering::Relaxed);
        true
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::mem::sys;

    #[test]
    fn names_come_back() {
        for idle in [Idle::Spin, Idle::Yield, Idle::Park] {
            assert_eq!(idle.to_string().parse(), Ok(idle));
            #[derive(Deserialize)]
            struct Config {
                idle: Idle,
            }
            assert_eq!(toml::from_str::<Config>(&format!("idle = \"{idle}\"")).unwrap().idle, idle);
        }
        assert!("sleep".parse::<Idle>().unwrap_err().contains("spin, yield or park"));
    }

    #[test]
    fn work_seen_at_the_last_moment_keeps_the_thread_awake() {
        let (mut parker, waker) = Parker::new().unwrap();
        assert!(!parker.park(&[], None, || true));
        // Not parked any more: no signal is left behind, so this one runs into its timeout.
        waker.wake();
        assert!(parker.park(&[], Some(1000), || false));
        assert!(!parker.bed.parked.load(Ordering::Relaxed));
    }

    #[test]
    fn a_wake_between_the_flag_and_the_sleep_is_not_lost() {
        let (mut parker, waker) = Parker::new().unwrap();
        for _ in 0..100 {
            // No timeout: a lost wake-up hangs here.
            assert!(parker.park(&[], None, || {
                waker.wake();
                Waker::none().wake();
                false
            }));
        }
    }

    #[test]
    fn a_readable_descriptor_ends_the_sleep() {
        let (mut parker, _waker) = Parker::new().unwrap();
        let event = sys::eventfd().unwrap();
        sys::eventfd_signal(event.as_fd());
        assert!(parker.park(&[event.as_raw_fd()], None, || false));
    }

    /// Two threads hand a number back and forth and sleep in between: a lost wake-up hangs the test.
    #[test]
    fn two_parked_threads_wake_each_other() {
        const ROUNDS: u64 = 5000;
        let turn = Arc::new(AtomicU64::new(0));
        let (mut here, here_waker) = Parker::new().unwrap();
        let (mut there, there_waker) = Parker::new().unwrap();
        let play = |parker: &mut Parker, other: &Waker, turn: &AtomicU64, parity: u64| {
            for round in (parity..ROUNDS).step_by(2) {
                while turn.load(Ordering::Acquire) != round {
                    parker.park(&[], None, || turn.load(Ordering::Relaxed) == round);
                }
                turn.store(round + 1, Ordering::Release);
                other.wake();
            }
        };
        let shared = turn.clone();
        let other = std::thread::spawn(move || play(&mut there, &here_waker, &shared, 1));
        play(&mut here, &there_waker, &turn, 0);
        other.join().unwrap();
        assert_eq!(turn.load(Ordering::Acquire), ROUNDS);
    }
}

/// Run with `RUSTFLAGS="--cfg loom" cargo test --release -p antelog-core loom_`.
#[cfg(all(test, loom))]
mod models {
    use super::*;

    /// A lost wake-up is a deadlock, which the model checker reports.
    #[test]
    fn loom_a_parked_thread_is_always_woken() {
        loom::model(|| {
            let (mut parker, waker) = Parker::new().unwrap();
            let work = Arc::new(AtomicBool::new(false));
            let shared = work.clone();
            let bringing = loom::thread::spawn(move || {
                shared.store(true, Ordering::Relaxed);
                waker.wake();
            });
            while !work.load(Ordering::Relaxed) {
                parker.park(&[], None, || work.load(Ordering::Relaxed));
            }
            bringing.join().unwrap();
        });
    }
}
