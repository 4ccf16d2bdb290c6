//! What a run has reached, collected from everything in it when it is over.

use super::Run;
use crate::sim::Failure;
use crate::sim::client::SimClient;
use crate::sim::oracle::Violation;
use crate::sim::overlay::Overlay;

impl<O: Overlay> Run<O> {
    /// Collects what the run has reached, and the checks that are made once.
    pub(super) fn count(&mut self) {
        let knobs = &self.common.knobs;
        let network = self.machine.network.borrow();
        let oracle = self.oracle.borrow();
        let probes = &mut self.machine.probes;
        if let (Some(link), None) = (network.seen.overrun, &self.failure) {
            let what = format!("more messages than receives are posted for are under way on link {link}");
            self.failure = Some(Failure::Wrong(Violation::new("L4", what)));
        }
        let mut leads = 0;
        for (name, value) in
            self.machine.cluster.counters.iter().chain(&self.machine.cluster.retired).flat_map(|c| c.snapshot())
        {
            let name = match name.rsplit_once('.').map_or("", |(_, counter)| counter) {
                "fills_by_age" => "fill by age",
                "fills_by_target" => "fill by target",
                "grant_stalls" => "grant stall",
                "fills_ahead" => "fill ahead of a target",
                "fills_by_timer" => "fill by the published timer",
                "grounded" => "straggler grounded",
                "fallbacks" => "fallback to free windows",
                "pushed_back" => "gate queue full",
                "leads" => {
                    leads += value;
                    continue;
                }
                _ => continue,
            };
            probes.add(name, value);
        }
        for (name, count) in oracle.order_counts() {
            probes.add(name, count);
        }
        let [replication, order, client] = network.seen.lost;
        let reached = &oracle.reached;
        let sum = |count: fn(&SimClient<O>) -> u64| self.clients.iter().map(count).sum::<u64>();
        let counts = [
            ("connection lost during replication", replication),
            ("connection lost during order stream", order),
            ("connection lost during client", client),
            ("full transport", network.seen.full),
            ("target overtook an order entry", network.seen.overtaken),
            ("late write of a fenced primary", network.seen.fenced),
            ("fail delivered", reached.fails),
            ("unavailable told", reached.unavailable),
            ("append unknown", reached.unknown),
            ("delivery of a lost shard", reached.void_deliveries),
            ("region lap", oracle.laps()),
            ("region full refusal", reached.region_full),
            ("closed shard refusal", reached.closed),
            ("change made", sum(|c| c.changed()[0])),
            ("change refused", sum(|c| c.changed()[1])),
            ("no-op run split", reached.no_op_splits),
            ("retry answered after reconnect", reached.retries_answered),
            ("speculative delivery", reached.speculative),
            ("trimmed", reached.trims),
            ("read answered", reached.reads),
            ("tail answered", reached.tails),
            ("late follower", sum(|c| c.late_followers)),
            ("client ring full", sum(|c| c.pushed_back[0])),
            ("outstanding limit reached", sum(|c| c.pushed_back[1])),
            ("session replaced", u64::from(self.common.sessions.get()) - self.clients.len() as u64),
            ("change of leader", leads.saturating_sub(1)),
            ("more than eight shards", u64::from(knobs.shards > 8)),
            ("no backups", u64::from(knobs.backups == 0)),
            ("region exhausted", u64::from(self.exhausted)),
        ];
        for (name, count) in counts.into_iter().chain(self.machine.overlay.borrow().reached()) {
            probes.add(name, count);
        }
    }
}
