//! How a replica leaves whose process is about to end: its reports say so, the order log drops it while it still serves, and
//! whoever leads next has everything. What it has given back by then is sent again by clients.

use std::sync::mpsc::Sender;

use antelog_protocol::ReplicaId;

use super::ReplicaAgent;
use crate::transport::Transport;

/// Whether the replica leaves, and who waits for it.
#[derive(Debug, Default)]
pub(super) struct Leave {
    /// Its reports say that it leaves. It does not come back in this life.
    pub(super) begun: bool,
    /// Gets a word when it is no member any more; dropped without one when nobody can take its place.
    done: Option<Sender<()>>,
}

impl<T: Transport> ReplicaAgent<T> {
    pub(super) fn leave(&mut self, now_ns: u64, done: Sender<()>) {
        self.leave = Leave { begun: true, done: Some(done) };
        self.look_at_losses(now_ns);
        self.look_whether_left();
    }

    /// Tells whoever waits when the replica has left, or cannot.
    pub(super) fn look_whether_left(&mut self) {
        if self.leave.done.is_none() {
            return;
        }
        let own = ReplicaId { number: self.own.number, incarnation: self.own.incarnation };
        let m = self.ledger().membership(self.shard);
        let is_member = m.is_some_and(|m| m.holds(own));
        let is_last = m.is_some_and(|m| m.members.len() == 1);
        let is_cut_off = !self.sequencers.iter().any(|s| s.connected);
        if !is_member {
            if let Some(done) = self.leave.done.take() {
                // Whoever waited may have lost patience.
                let _ = done.send(());
            }
        } else if is_last || is_cut_off {
            self.leave.done = None;
        }
    }
}
