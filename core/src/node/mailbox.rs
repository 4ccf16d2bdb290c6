//! How the control thread reaches data threads: a mailbox, one command a cycle; and how they answer: notices.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use antelog_protocol::ClientId;

use super::idle::Waker;
use crate::access::Grant;
use crate::transport::{DownReason, PeerId};

/// A connection that passed its hand-shake, for the agent that owns the transport.
#[derive(Debug)]
pub enum Admission<L> {
    /// A configured peer.
    Node {
        /// Its number at the agent.
        peer: PeerId,
        /// The connection.
        link: L,
    },
    /// A client.
    Client {
        /// Its session.
        session: ClientId,
        /// The connection.
        link: L,
        /// Capacity of the ring it receives in, in bytes.
        ring_bytes: usize,
        /// What it may do.
        grant: Grant,
    },
    /// The process is about to end: a replica or a sequencer gives up what others can take over.
    Leave {
        /// Gets a word when that is done. Dropped without one: there is nobody.
        done: Sender<()>,
    },
    /// The gate is to end: it tells its clients, takes no more requests, and finishes what it has begun.
    Close {
        /// Gets a word when that is done, which may be never.
        done: Sender<()>,
    },
}

/// What an agent tells the control thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A configured peer's connection is gone.
    PeerDown {
        /// The agent's name.
        agent: String,
        /// The peer's number at the agent.
        peer: PeerId,
        /// What was seen.
        reason: DownReason,
    },
    /// Something an operator should read: one line.
    Warning {
        /// The agent's name.
        agent: String,
        /// What happened, and what to do.
        text: String,
    },
}

/// The sending end of a mailbox.
#[derive(Debug)]
pub struct MailSender<M> {
    sender: Sender<M>,
    /// Commands sent so far.
    sent: Arc<AtomicUsize>,
    waker: Waker,
}

impl<M> Clone for MailSender<M> {
    fn clone(&self) -> Self {
        MailSender { sender: self.sender.clone(), sent: self.sent.clone(), waker: self.waker.clone() }
    }
}

impl<M> MailSender<M> {
    /// Puts a command into the mailbox and wakes its owner. False when the owner is gone.
    pub fn send(&self, mail: M) -> bool {
        let sent = self.sender.send(mail).is_ok();
        self.sent.fetch_add(1, Ordering::Release);
        self.waker.wake();
        sent
    }
}

/// The receiving end, owned by an agent. Looking into an empty one costs a load.
#[derive(Debug)]
pub struct Mailbox<M> {
    receiver: Receiver<M>,
    sent: Arc<AtomicUsize>,
    taken: usize,
}

impl<M> Mailbox<M> {
    /// The next command, if any.
    #[inline]
    pub fn take(&mut self) -> Option<M> {
        if !self.waits() {
            return None;
        }
        let mail = self.receiver.try_recv().ok()?;
        self.taken += 1;
        Some(mail)
    }

    /// Whether a command waits.
    #[inline]
    pub fn waits(&self) -> bool {
        self.sent.load(Ordering::Acquire) != self.taken
    }
}

/// A mailbox whose owner is woken by `waker`.
pub fn mailbox<M>(waker: Waker) -> (MailSender<M>, Mailbox<M>) {
    let (sender, receiver) = channel();
    let sent = Arc::new(AtomicUsize::new(0));
    (MailSender { sender, sent: sent.clone(), waker }, Mailbox { receiver, sent, taken: 0 })
}
