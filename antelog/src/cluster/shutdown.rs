//! The end of a node that was asked to end: nobody new is let in, clients are told why, what was begun is finished, all
//! within a bounded time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use antelog_core::node::mailbox::{Admission, MailSender};

use super::Cluster;
use crate::network::NodeLink;

/// How many times as long as it takes to suspect a silent node a hand-over may take: whoever can take over has done so by
/// then.
const HAND_OVER_SUSPECTS: u32 = 4;

/// How a gate is told to end, and whoever answers for it.
pub(super) struct Closer {
    /// The agents of the nodes here.
    pub(super) nodes: Vec<(u16, MailSender<Admission<NodeLink>>)>,
    pub(super) gate: Option<MailSender<Admission<NodeLink>>>,
    pub(super) is_closing: std::sync::Arc<AtomicBool>,
}

impl Cluster {
    /// Ends the nodes in an orderly way. Returns a failure, if there was one.
    pub fn close(self) -> Option<String> {
        // A shard without its backups or its sequencer would never get there.
        let patience = Duration::from_millis(self.config.launch.close_ms);
        let started = Instant::now();
        let suspect = Duration::from_millis(self.config.cluster.suspect_ms);
        self.hand_over((patience / 2).min(HAND_OVER_SUSPECTS * suspect));
        self.closer.is_closing.store(true, Ordering::Relaxed);
        if let Some(gate) = &self.closer.gate {
            let (done, is_done) = channel();
            tracing::info!("shutting down: clients are told, and what they have begun is finished");
            let left = patience.saturating_sub(started.elapsed());
            if gate.send(Admission::Close { done }) && is_done.recv_timeout(left).is_err() {
                tracing::warn!("not everything that clients have begun was finished within {patience:?}");
            }
        }
        self.stop()
    }

    /// Gives up what another process can take over, before clients are told: a shard's lead, a place among its replicas, the
    /// lead of the sequencers. A process that runs the whole cluster has nobody to hand it to.
    fn hand_over(&self, patience: Duration) {
        if self.closer.nodes.len() == self.config.nodes.len() {
            return;
        }
        let asked: Vec<(u16, Receiver<()>)> = self
            .closer
            .nodes
            .iter()
            .map(|(node, mail)| {
                let (done, is_done) = channel();
                mail.send(Admission::Leave { done });
                (*node, is_done)
            })
            .collect();
        let until = Instant::now() + patience;
        for (node, is_done) in asked {
            let why = match is_done.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(()) => {
                    tracing::info!(node, "node {node}: it leads nothing any more and is no member of a shard");
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => "there is nobody".to_owned(),
                Err(RecvTimeoutError::Timeout) => format!("nobody did within {patience:?}"),
            };
            tracing::warn!(
                node,
                reason = why,
                "node {node}: nobody takes over what it leads: {why}; it ends all the same"
            );
        }
    }
}
