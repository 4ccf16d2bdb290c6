//! The end of a queue pair: what it flushes is taken before it is destroyed, and the cause of its failure found among it.
//!
//! Completions of the sending and the receiving side are in no order between each other, so the first failure that is seen
//! need not be the one that came first. A last request, posted when the queue pair has failed already, completes behind all
//! other requests: with it all is known.

use antelog_core::transport::{DownReason, PeerId};

use crate::pair::{Pair, unlabel};
use crate::provider::{Completion, Failure, Provider};

/// See the module's text.
#[derive(Debug)]
pub struct Drain {
    peer: PeerId,
    generation: u16,
    /// Receives that were not flushed yet.
    posted: usize,
    /// The last request, until it completed.
    last: Option<u64>,
    /// The first failure that is not a flush.
    cause: Option<Failure>,
}

impl Drain {
    /// Begins: the pair's queue has failed.
    pub fn new<P: Provider>(pair: &mut Pair, device: &mut P) -> Drain {
        let last = if pair.progress.is_connected { pair.post_last(device) } else { None };
        Drain { peer: pair.peer, generation: pair.generation, posted: pair.inbox.posted, last, cause: None }
    }

    /// Takes a completion if it is this pair's.
    pub fn takes(&mut self, completion: &Completion) -> bool {
        let (peer, generation, slot) = unlabel(completion.id);
        if (peer, generation) != (self.peer, self.generation) {
            return false;
        }
        self.posted -= usize::from(slot.is_some());
        if self.last == Some(completion.id) {
            self.last = None;
        }
        if let Err(failure) = completion.result
            && failure != Failure::Flushed
        {
            self.cause.get_or_insert(failure);
        }
        true
    }

    /// Something is still to come.
    pub fn is_open(&self) -> bool {
        self.posted > 0 || self.last.is_some()
    }

    /// What the queue pair failed of, if a completion said so.
    pub fn cause(&self) -> Option<Failure> {
        self.cause
    }
}

/// Why a pair is down whose queue failed. `by_device`: the device has said that a queue pair failed without the peer's
/// doing. If it has not, and everything is flushed without a cause, the device refused a request of the peer's: nothing
/// else puts the responding side into error.
pub fn reason_of(cause: Option<Failure>, by_device: bool) -> DownReason {
    match cause {
        Some(Failure::Refused) => DownReason::Protocol,
        Some(Failure::Unreachable) => DownReason::Io(libc::ETIMEDOUT),
        Some(Failure::ReceiverNotReady) => DownReason::Io(libc::ENOBUFS),
        Some(Failure::Other(_)) => DownReason::Io(libc::EIO),
        Some(Failure::Flushed) | None if by_device => DownReason::Io(libc::EIO),
        Some(Failure::Flushed) | None => DownReason::Protocol,
    }
}
