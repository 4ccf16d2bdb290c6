//! A processor hog: another program that wants a core which the measurement uses.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use antelog_core::node::launch::cores;

/// One turn of spinning and sleeping: longer than a scheduler's slice, shorter than any run.
const TURN: Duration = Duration::from_millis(10);

/// What the hog takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HogConfig {
    /// The core, as an index into [`cores`].
    pub core: usize,
    /// The share of time in which it wants the core, above 0 and at most 1. How much of it the hog gets is the kernel's
    /// decision when others want the core too.
    pub duty: f64,
}

/// A thread that spins on a core until it is dropped.
#[derive(Debug)]
pub struct Hog {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Hog {
    /// Starts the thread.
    ///
    /// # Errors
    /// When there is no such core or no thread to be had, or the duty is no share.
    pub fn start(config: HogConfig) -> Result<Hog, String> {
        let HogConfig { core, duty } = config;
        if !(duty > 0.0 && duty <= 1.0) {
            return Err(format!("a hog that wants {duty} of a core's time: expected above 0 and at most 1"));
        }
        let available = cores();
        let Some(id) = available.get(core).copied() else {
            let count = available.len();
            return Err(format!("no core {core} for the hog: this process may use {count} core(s), numbered from 0"));
        };
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let body = move || {
            core_affinity::set_for_current(id);
            let spin = TURN.mul_f64(duty);
            while !seen.load(Ordering::Relaxed) {
                let start = Instant::now();
                while start.elapsed() < spin && !seen.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
                thread::sleep(TURN - spin);
            }
        };
        let thread = thread::Builder::new().name("antelog-hog".into()).spawn(body);
        let thread = thread.map_err(|e| format!("cannot start a thread: {e}"))?;
        Ok(Hog { stop, thread: Some(thread) })
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its loop cannot panic.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hog_runs_until_it_is_dropped() {
        let hog = Hog::start(HogConfig { core: 0, duty: 0.5 }).unwrap();
        let watched = Arc::downgrade(&hog.stop);
        assert!(watched.upgrade().is_some());
        drop(hog);
        assert!(watched.upgrade().is_none(), "the thread is still there");
    }

    #[test]
    fn nonsense_is_refused_with_a_reason() {
        let reason = |core, duty| Hog::start(HogConfig { core, duty }).unwrap_err();
        assert!(reason(usize::MAX, 0.5).contains("no core"));
        assert!(reason(0, 0.0).contains("above 0"));
        assert!(reason(0, f64::NAN).contains("above 0"));
    }
}
