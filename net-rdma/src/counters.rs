//! What a transport counts: for all its peers together, and for each when they are few.
//!
//! Totals are `rdma.NAME`; those of a peer `rdma.peer-N.NAME`, where N is the peer's number at its agent.

use std::rc::Rc;

use antelog_core::counters::{Counter, Counters};
use antelog_core::transport::{Full, PeerId};

use crate::output::Issued;
use crate::provider::Failure;

/// With more peers than this a transport counts only totals.
const PEERS_COUNTED_MAX: usize = 8;

/// Names, in the order of `Which`.
const NAMES: [&str; 13] = [
    "writes",
    "sends",
    "inline",
    "requests",
    "doorbells",
    "signalled",
    "completions",
    "received",
    "notified",
    "credits",
    "full",
    "retry_errors",
    "rnr_errors",
];

#[derive(Clone, Copy)]
#[repr(usize)]
enum Which {
    Writes,
    Sends,
    Inline,
    Requests,
    Doorbells,
    Signalled,
    Completions,
    Received,
    Notified,
    Credits,
    Full,
    RetryErrors,
    RnrErrors,
}

struct Set([Counter; NAMES.len()]);

impl Set {
    fn new(counters: &Counters, prefix: &str) -> Rc<Set> {
        Rc::new(Set(NAMES.map(|name| counters.register(&format!("{prefix}{name}")))))
    }
}

/// All counters of a transport.
pub struct TransportCounters {
    total: Rc<Set>,
    peers: Vec<Rc<Set>>,
}

impl TransportCounters {
    /// Registers them for peers `0..peers`.
    pub fn new(counters: &Counters, peers: u16) -> TransportCounters {
        let total = Set::new(counters, "rdma.");
        let counted = if usize::from(peers) <= PEERS_COUNTED_MAX { peers } else { 0 };
        let peers = (0..counted).map(|peer| Set::new(counters, &format!("rdma.peer-{peer}."))).collect();
        TransportCounters { total, peers }
    }

    /// Those of a peer's pair.
    pub fn of(&self, peer: PeerId) -> PairCounters {
        PairCounters { total: Some(self.total.clone()), own: self.peers.get(usize::from(peer.0)).cloned() }
    }
}

/// Counters of one pair; by default nothing is counted.
#[derive(Clone, Default)]
pub struct PairCounters {
    total: Option<Rc<Set>>,
    own: Option<Rc<Set>>,
}

impl std::fmt::Debug for PairCounters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let values = self.total.iter().flat_map(|total| &total.0);
        f.debug_list().entries(values.zip(NAMES).map(|(counter, name)| (name, counter.get()))).finish()
    }
}

impl PairCounters {
    #[inline]
    fn add(&self, which: Which, amount: usize) {
        for set in [&self.total, &self.own].into_iter().flatten() {
            set.0[which as usize].add(amount as u64);
        }
    }

    #[inline]
    fn on_issued(&self, which: Which, issued: &Result<Issued, Full>) {
        match issued {
            Ok(issued) => {
                self.add(which, 1);
                if issued.inline > 0 {
                    self.add(Which::Inline, issued.inline);
                }
            }
            Err(Full) => self.add(Which::Full, 1),
        }
    }

    /// A one-sided write was issued or refused.
    #[inline]
    pub fn on_write(&self, issued: &Result<Issued, Full>) {
        self.on_issued(Which::Writes, issued);
    }

    /// A message was issued or refused.
    #[inline]
    pub fn on_send(&self, issued: &Result<Issued, Full>) {
        self.on_issued(Which::Sends, issued);
    }

    /// A doorbell handed over so many requests, so many of them signalled.
    #[inline]
    pub fn on_doorbell(&self, requests: usize, signalled: usize) {
        self.add(Which::Doorbells, 1);
        self.add(Which::Requests, requests);
        self.add(Which::Signalled, signalled);
    }

    /// A request completed.
    #[inline]
    pub fn on_completion(&self) {
        self.add(Which::Completions, 1);
    }

    /// A message arrived.
    #[inline]
    pub fn on_received(&self) {
        self.add(Which::Received, 1);
    }

    /// A notification arrived.
    #[inline]
    pub fn on_notified(&self) {
        self.add(Which::Notified, 1);
    }

    /// Credit was returned to the peer.
    #[inline]
    pub fn on_credit(&self) {
        self.add(Which::Credits, 1);
    }

    /// A request failed.
    pub fn on_failure(&self, failure: Failure) {
        match failure {
            Failure::Unreachable => self.add(Which::RetryErrors, 1),
            Failure::ReceiverNotReady => self.add(Which::RnrErrors, 1),
            Failure::Flushed | Failure::Refused | Failure::Other(_) => {}
        }
    }
}
