//! Which connections between nodes are up, as hand-shakes and agents say: what a node that is asked whether it is ready
//! looks at.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use antelog_core::transport::PeerId;

/// A connection that there should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// The node here.
    pub node: u16,
    /// The node there.
    pub to: u16,
    /// Whether it is up.
    pub is_up: bool,
    /// Why it is not.
    pub why: String,
}

/// All of them, by the agent here and the peer's number there. Clones are handles to the same.
#[derive(Clone, Default)]
pub(super) struct Connections(Arc<Mutex<BTreeMap<(String, PeerId), Connection>>>);

impl Connections {
    fn table(&self) -> MutexGuard<'_, BTreeMap<(String, PeerId), Connection>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There should be one, which is not up yet.
    pub(super) fn expect(&self, agent: &str, peer: PeerId, node: u16, to: u16) {
        let connection = Connection { node, to, is_up: false, why: "not connected yet".into() };
        self.table().insert((agent.into(), peer), connection);
    }

    /// It is up.
    pub(super) fn up(&self, agent: &str, peer: PeerId) {
        self.change(agent, peer, true, "");
    }

    /// It is not, or not yet.
    pub(super) fn down(&self, agent: &str, peer: PeerId, why: &str) {
        self.change(agent, peer, false, why);
    }

    fn change(&self, agent: &str, peer: PeerId, is_up: bool, why: &str) {
        if let Some(connection) = self.table().get_mut(&(agent.to_owned(), peer)) {
            (connection.is_up, connection.why) = (is_up, why.to_owned());
        }
    }

    /// All, by agent and peer.
    pub(super) fn list(&self) -> Vec<Connection> {
        self.table().values().cloned().collect()
    }
}
