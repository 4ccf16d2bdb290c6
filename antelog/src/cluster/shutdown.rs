//! The end of a node that was asked to end: nobody new is let in, clients are told why, what was begun is finished, all
//! within a bounded time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use antelog_core::node::mailbox::{Admission, MailSender};

use super::Cluster;
use crate::network::NodeLink;

/// How a gate is told to end, and whoever answers for it.
pub(super) struct Closer {
    pub(super) gate: Option<MailSender<Admission<NodeLink>>>,
    pub(super) is_closing: std::sync::Arc<AtomicBool>,
}

impl Cluster {
    /// Ends the nodes in an orderly way. Returns a failure, if there was one.
    pub fn close(self) -> Option<String> {
        self.hand_over();
        // A shard without its backups or its sequencer would never get there.
        let patience = Duration::from_millis(self.config.launch.close_ms);
        self.closer.is_closing.store(true, Ordering::Relaxed);
        if let Some(gate) = &self.closer.gate {
            let (done, is_done) = channel();
            tracing::info!("shutting down: clients are told, and what they have begun is finished");
            if gate.send(Admission::Close { done }) && is_done.recv_timeout(patience).is_err() {
                tracing::warn!("not everything that clients have begun was finished within {patience:?}");
            }
        }
        self.stop()
    }

    /// Gives up what others can take over, before clients are told: the place for the hand-over of the sequencer's
    /// leadership and of a shard's primary. Today nobody can, so there is nothing to do.
    fn hand_over(&self) {}
}
