//! Where shards are served: beside each one's primary, by the session's own ledger.
//!
//! Before any membership is known a shard's gate is that of replica 0. A gate may know more than the session or less: what
//! it says of itself ("not here") only makes the session wait for the order stream and ask again. The slots of a shard that
//! is lost are told by any gate, from the order log alone: the session asks its relay.

use antelog_protocol::ShardId;
use antelog_protocol::ledger::Ledger;
use antelog_protocol::wire::session::ClusterMap;

/// Where one shard is served.
#[derive(Debug)]
pub(super) struct Route {
    pub(super) shard: ShardId,
    /// Number of each replica and the gate beside it.
    gates: Vec<(u16, usize)>,
    /// The gate to ask about the shard.
    pub(super) gate: usize,
    /// Of its primary; 0 while none is known.
    pub(super) epoch: u32,
    /// It is lost as a whole at present.
    pub(super) lost: bool,
    /// Any of that is new.
    changed: bool,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Routes {
    routes: Vec<Route>,
}

impl Routes {
    /// Takes the cluster's map in.
    pub(super) fn set_map(&mut self, map: &ClusterMap, gate_of: impl Fn(&str) -> usize) {
        let route = |shard: &antelog_protocol::wire::session::ShardGates| {
            let gates: Vec<(u16, usize)> =
                shard.gates.iter().map(|(replica, address)| (*replica, gate_of(address))).collect();
            // A map has at least one gate for each shard.
            let first = gates.first().map_or(0, |(_, gate)| *gate);
            let known = self.find(shard.shard).filter(|known| gates.iter().any(|(_, gate)| *gate == known.gate));
            let (gate, epoch, lost) = known.map_or((first, 0, false), |known| (known.gate, known.epoch, known.lost));
            Route { shard: shard.shard, gates, gate, epoch, lost, changed: true }
        };
        self.routes = map.shards.iter().map(route).collect();
    }

    /// Follows the primaries, and the relay where there are none.
    pub(super) fn follow(&mut self, ledger: &Ledger, relay: Option<usize>) {
        for route in &mut self.routes {
            let before = (route.gate, route.epoch, route.lost);
            let Some(membership) = ledger.membership(route.shard) else { continue };
            (route.epoch, route.lost) = (membership.epoch, membership.has_failed());
            let beside = route.gates.iter().find(|(replica, _)| *replica == membership.primary).map(|(_, gate)| *gate);
            let gate = if route.lost { relay } else { beside };
            route.gate = gate.unwrap_or(route.gate);
            route.changed |= before != (route.gate, route.epoch, route.lost);
        }
    }

    #[inline]
    fn find(&self, shard: ShardId) -> Option<&Route> {
        self.routes.binary_search_by_key(&shard, |r| r.shard).ok().map(|at| &self.routes[at])
    }

    /// All of them, in the order of the shards.
    pub(super) fn all(&self) -> impl Iterator<Item = &Route> {
        self.routes.iter()
    }

    /// All shards, in id order.
    pub(super) fn shards(&self) -> Vec<ShardId> {
        self.routes.iter().map(|r| r.shard).collect()
    }

    /// The gate to ask about a shard.
    #[inline]
    pub(super) fn gate_of(&self, shard: ShardId) -> Option<usize> {
        self.find(shard).map(|r| r.gate)
    }

    /// Whether everybody has to be told that the shard is served elsewhere, or by another primary.
    pub(super) fn has_changed(&self, shard: ShardId) -> bool {
        self.find(shard).is_some_and(|r| r.changed)
    }

    /// Everybody was told.
    pub(super) fn told(&mut self) {
        self.routes.iter_mut().for_each(|route| route.changed = false);
    }

    /// Whether the shard is lost as a whole at present.
    pub(super) fn is_lost(&self, shard: ShardId) -> bool {
        self.find(shard).is_some_and(|r| r.lost)
    }
}
