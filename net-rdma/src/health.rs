//! Whether RDMA can be used, as the data threads find out and the threads that make connections need to know.
//!
//! A device can vanish, refuse to lock memory, or connect and carry no data. Whoever finds out says so here; the next
//! connection is then made over TCP, with the reason in its log line. Nothing is retried by itself before
//! [`PAIR_PAUSE`], and a lost device stays unused until the process starts again.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a pair whose RDMA did not come up, or broke again and again without the peer being gone, stays on TCP.
pub const PAIR_PAUSE: Duration = Duration::from_secs(60);

/// Pairs with a host that break within a pause before it is avoided: one may be chance.
const STRIKES_MAX: u32 = 3;

/// Hosts remembered at most; the oldest is forgotten.
const PAIRS_MAX: usize = 1024;

#[derive(Default)]
struct Known {
    disabled: Option<String>,
    hosts: HashMap<IpAddr, Trouble>,
}

/// What went wrong with a host.
struct Trouble {
    since: Duration,
    reason: String,
    strikes: u32,
}

/// See the module's text. Clones are handles to the same state.
#[derive(Clone)]
pub struct Health {
    known: Arc<Mutex<Known>>,
    is_disabled: Arc<AtomicBool>,
    log: Arc<dyn Fn(&str) + Send + Sync>,
    /// Time since some start.
    clock: Arc<dyn Fn() -> Duration + Send + Sync>,
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Health").field("disabled", &self.disabled()).finish_non_exhaustive()
    }
}

impl Health {
    /// Nothing is wrong yet; lines for the operator go to `log`.
    pub fn new(log: Arc<dyn Fn(&str) + Send + Sync>) -> Health {
        let start = Instant::now();
        Health::on_clock(log, Arc::new(move || start.elapsed()))
    }

    /// As [`new`](Self::new), on another clock, which says how long ago some start was.
    pub fn on_clock(log: Arc<dyn Fn(&str) + Send + Sync>, clock: Arc<dyn Fn() -> Duration + Send + Sync>) -> Health {
        Health { known: Arc::default(), is_disabled: Arc::default(), log, clock }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// RDMA is of no use to this process any more. The first reason stays.
    pub fn disable(&self, reason: &str) {
        let mut known = self.known();
        if known.disabled.is_none() {
            known.disabled = Some(reason.to_owned());
            (self.log)(&format!("rdma is off from here on: {reason}"));
        }
        drop(known);
        self.is_disabled.store(true, Ordering::Release);
    }

    /// Why RDMA is off, if it is.
    pub fn disabled(&self) -> Option<String> {
        if self.is_disabled() { self.known().disabled.clone() } else { None }
    }

    /// Whether it is off: one load, for the hot path.
    #[inline]
    pub fn is_disabled(&self) -> bool {
        self.is_disabled.load(Ordering::Relaxed)
    }

    /// RDMA to this host did not work; it is tried again after [`PAIR_PAUSE`].
    pub fn avoid(&self, host: IpAddr, reason: &str) {
        self.count(host, reason, STRIKES_MAX);
    }

    /// RDMA to this host worked and broke soon. Returns whether it is avoided from now on, as [`avoid`](Self::avoid) does
    /// at once: this was the third time within a pause.
    pub fn strike(&self, host: IpAddr, reason: &str) -> bool {
        self.count(host, reason, 1) >= STRIKES_MAX
    }

    fn count(&self, host: IpAddr, reason: &str, strikes: u32) -> u32 {
        let now = (self.clock)();
        let mut known = self.known();
        if known.hosts.len() >= PAIRS_MAX
            && let Some(oldest) = known.hosts.iter().min_by_key(|(_, trouble)| trouble.since).map(|(host, _)| *host)
        {
            known.hosts.remove(&oldest);
        }
        let earlier = known.hosts.get(&host).filter(|trouble| now - trouble.since < PAIR_PAUSE);
        let strikes = strikes + earlier.map_or(0, |trouble| trouble.strikes);
        known.hosts.insert(host, Trouble { since: now, reason: reason.to_owned(), strikes });
        strikes
    }

    /// Why RDMA to this host is avoided now, if it is.
    pub fn avoided(&self, host: IpAddr) -> Option<String> {
        let known = self.known();
        let trouble = known.hosts.get(&host).filter(|trouble| trouble.strikes >= STRIKES_MAX)?;
        ((self.clock)() - trouble.since < PAIR_PAUSE).then(|| trouble.reason.clone())
    }

    /// A line for the operator.
    pub fn say(&self, line: &str) {
        (self.log)(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_stays_and_hosts_are_avoided_one_by_one() {
        let said = Arc::new(Mutex::new(Vec::new()));
        let log = said.clone();
        let health = Health::new(Arc::new(move |line: &str| log.lock().unwrap().push(line.to_owned())));
        let (one, other) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        health.clone().avoid(one, "no data came through");
        assert_eq!(health.avoided(one).as_deref(), Some("no data came through"));
        assert_eq!((health.avoided(other), health.disabled(), health.is_disabled()), (None, None, false));
        assert_eq!([1, 2, 3].map(|_| health.strike(other, "it broke")), [false, false, true]);
        assert_eq!(health.avoided(other).as_deref(), Some("it broke"));
        health.disable("the device is gone");
        health.disable("something else");
        assert_eq!(health.disabled().as_deref(), Some("the device is gone"));
        assert!(health.is_disabled());
        assert_eq!(*said.lock().unwrap(), ["rdma is off from here on: the device is gone"]);
        for number in 0..3000u32 {
            health.avoid(std::net::Ipv4Addr::from(number).into(), "x");
        }
        assert_eq!(health.known().hosts.len(), PAIRS_MAX);
    }
}
