//! The metrics: every counter of every agent under a documented name, and the connections between nodes.
//!
//! `core/METRICS.md` has the same list; tests hold them together.

use std::collections::BTreeMap;
use std::fmt;

use antelog_core::counters::Counters;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, prometheus_text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::cluster::Connection;

/// What a metric's value does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It grows, and begins at 0 when the process does.
    Counter,
    /// It is a state: it goes both ways, or begins where the log does.
    Gauge,
}

/// One metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name without what says that it is a counter.
    base: &'static str,
    /// What its value does.
    pub kind: Kind,
    /// What it means.
    pub help: &'static str,
}

impl Metric {
    /// Its name in the exported text.
    pub fn name(&self) -> String {
        match self.kind {
            Kind::Counter => format!("{}_total", self.base),
            Kind::Gauge => self.base.to_owned(),
        }
    }
}

const fn counter(base: &'static str, help: &'static str) -> Metric {
    Metric { base, kind: Kind::Counter, help }
}

const fn gauge(base: &'static str, help: &'static str) -> Metric {
    Metric { base, kind: Kind::Gauge, help }
}

/// Every metric there is.
pub const METRICS: &[Metric] = &[
    gauge("antelog_node_connected", "Whether the connection of this node to the node 'to' is up: 1 or 0"),
    counter("antelog_shard_records", "Records appended to the shard"),
    counter("antelog_shard_no_ops", "Slots of the shard filled without a record, so that a cut completes"),
    counter("antelog_shard_fills_by_age", "Fills because a record was a tick old or its writers paused"),
    counter("antelog_shard_fills_by_target", "Fills because the sequencer named a target"),
    counter("antelog_shard_fills_ahead", "Fills ahead of targets that were expected, over a slow link"),
    counter("antelog_shard_fills_by_timer", "Fills by the published fill timer (policy.beat = paper)"),
    counter("antelog_shard_grant_stalls", "Times that a record had to wait because no window was granted for it"),
    counter("antelog_shard_reports", "Reports sent to the sequencer"),
    counter("antelog_shard_appends_refused", "Appends that the shard refused"),
    gauge("antelog_shard_appended_lsn", "Slots of the shard appended at its primary"),
    gauge("antelog_shard_durable_lsn", "Slots of the shard that all its replicas hold"),
    gauge("antelog_shard_committed_lsn", "Slots of the shard whose position is bound"),
    gauge("antelog_replica_is_primary", "Whether the replica leads its shard: 1 or 0"),
    gauge("antelog_replica_is_member", "Whether the replica counts as holding the shard's log: 1 or 0"),
    gauge("antelog_replica_epoch", "Number of the shard's primary that the replica obeys"),
    gauge("antelog_replica_verified_lsn", "Slots that the replica has checked as a backup"),
    counter("antelog_replica_promotions", "Times that the replica became the primary"),
    counter("antelog_replica_demotions", "Times that the replica ceased to be the primary"),
    counter("antelog_replica_joins", "Times that the replica, as the primary, began to give another the log"),
    counter("antelog_replica_rot_found", "Times that a read met entries that the replica's disk had lost"),
    counter(
        "antelog_replica_rot_repaired",
        "Times that entries of another replica were written where the disk had lost them",
    ),
    counter("antelog_sequencer_reports", "Reports taken from replicas"),
    counter("antelog_sequencer_cuts", "Cuts bound"),
    counter("antelog_sequencer_grants", "Windows granted"),
    counter("antelog_sequencer_targets", "Targets sent to shards that were behind"),
    counter("antelog_sequencer_quota_changes", "Quotas that differ from the window before"),
    counter("antelog_sequencer_grounded", "Times that a straggler was grounded"),
    counter("antelog_sequencer_free_windows", "Free windows granted"),
    counter("antelog_sequencer_fallbacks", "Times that ordering auto fell back to free windows"),
    gauge("antelog_sequencer_committed_position", "Positions bound"),
    counter("antelog_sequencer_leads", "Times that the sequencer became the one that decides"),
    gauge("antelog_sequencer_members", "Sequencers that vote in the group"),
    gauge("antelog_sequencer_is_leader", "Whether the sequencer is the one that decides: 1 or 0"),
    gauge("antelog_sequencer_is_voter", "Whether the sequencer votes in the group: 1 or 0"),
    gauge("antelog_sequencer_term", "Term of the group: grows with every election"),
    gauge("antelog_sequencer_applied_index", "Entries of the order log that the sequencer has applied"),
    gauge("antelog_gate_clients", "Clients connected"),
    counter("antelog_gate_clients_refused", "Clients that were let in and then found no place"),
    counter("antelog_gate_clients_cut_off", "Clients cut off because they broke the rules or fell too far behind"),
    counter("antelog_gate_appends", "Appends handed to shards"),
    counter("antelog_gate_records_delivered", "Records delivered to subscribers"),
    counter("antelog_gate_pushed_back", "Times that an append waited because its shard's queue was full"),
    counter("antelog_gate_held_back", "Times that an append waited because of its client's limits"),
    counter("antelog_gate_forbidden", "Requests that the client's role does not allow"),
    gauge("antelog_gate_view", "Whole-shard failures so far, as the order stream says"),
    gauge("antelog_gate_applied_index", "Entries of the order log that the gate has applied"),
    gauge("antelog_gate_shard_open", "Whether the shard takes appends, as the order stream says: 1 or 0"),
    counter("antelog_rdma_writes", "One-sided writes issued, all peers together"),
    counter("antelog_rdma_sends", "Messages issued, all peers together"),
    counter("antelog_rdma_inline", "Requests that carried their bytes inline, all peers together"),
    counter("antelog_rdma_requests", "Work requests handed to the device, all peers together"),
    counter("antelog_rdma_doorbells", "Doorbells rung, all peers together"),
    counter("antelog_rdma_signalled", "Work requests that ask for a completion, all peers together"),
    counter("antelog_rdma_completions", "Completions taken, all peers together"),
    counter("antelog_rdma_received", "Messages received, all peers together"),
    counter("antelog_rdma_notified", "Notifications received, all peers together"),
    counter("antelog_rdma_credits", "Credits returned to senders, all peers together"),
    counter("antelog_rdma_full", "Operations put off because the queue was full, all peers together"),
    counter("antelog_rdma_retry_errors", "Pairs lost because a peer did not answer, all peers together"),
    counter("antelog_rdma_rnr_errors", "Pairs lost because a receiver was not ready, all peers together"),
    counter("antelog_rdma_peer_writes", "One-sided writes issued"),
    counter("antelog_rdma_peer_sends", "Messages issued"),
    counter("antelog_rdma_peer_inline", "Requests that carried their bytes inline"),
    counter("antelog_rdma_peer_requests", "Work requests handed to the device"),
    counter("antelog_rdma_peer_doorbells", "Doorbells rung"),
    counter("antelog_rdma_peer_signalled", "Work requests that ask for a completion"),
    counter("antelog_rdma_peer_completions", "Completions taken"),
    counter("antelog_rdma_peer_received", "Messages received"),
    counter("antelog_rdma_peer_notified", "Notifications received"),
    counter("antelog_rdma_peer_credits", "Credits returned to the sender"),
    counter("antelog_rdma_peer_full", "Operations put off because the queue was full"),
    counter("antelog_rdma_peer_retry_errors", "Pairs lost because the peer did not answer"),
    counter("antelog_rdma_peer_rnr_errors", "Pairs lost because the receiver was not ready"),
];

/// Names and values that tell the same metric of several agents apart.
type Labels = Vec<(String, String)>;

/// The metric and the labels of an agent's counter: `replica-3-1` and `epoch` are `antelog_replica_epoch` of shard 3's
/// replica 1.
fn place(node: u16, agent: &str, counter: &str) -> (String, Labels) {
    let mut parts = agent.split('-');
    let mut kind = parts.next().unwrap_or_default();
    let mut labels = vec![("node".to_owned(), node.to_string()), ("agent".to_owned(), agent.to_owned())];
    let numbers: &[&str] = if kind == "replica" { &["shard", "replica"] } else { &["number"] };
    labels.extend(numbers.iter().zip(parts).map(|(name, number)| ((*name).to_owned(), number.to_owned())));
    let mut name = String::new();
    for part in counter.split('.') {
        if part == "rdma" {
            kind = part;
            continue;
        }
        // `peer-3.writes` are the writes of peer 3.
        let (word, number) = part.split_once('-').unwrap_or((part, ""));
        name.push('_');
        name.push_str(word);
        if !number.is_empty() {
            labels.push((word.to_owned(), number.to_owned()));
        }
    }
    (format!("antelog_{kind}{name}"), labels)
}

/// The shard's metric that is behind what would be a replica's, if it is no replica's.
fn of_shard(base: &str) -> Option<String> {
    let name = format!("antelog_shard_{}", base.strip_prefix("antelog_replica_")?);
    METRICS.iter().any(|metric| metric.base == name).then_some(name)
}

/// The values of all metrics at one time.
struct Samples(BTreeMap<String, Vec<(Labels, u64)>>);

impl fmt::Debug for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl Collector for Samples {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (base, samples) in &self.0 {
            let known = METRICS.iter().find(|metric| metric.base == base);
            let (kind, help) = known.map_or((Kind::Gauge, "Not documented"), |metric| (metric.kind, metric.help));
            let kind = match kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
            };
            let mut family = encoder.encode_descriptor(base, help, None, kind)?;
            for (labels, value) in samples {
                let mut sample = family.encode_family(labels)?;
                match kind {
                    MetricType::Counter => {
                        sample.encode_counter::<prometheus_client::encoding::NoLabelSet, u64, u64>(value, None)?;
                    }
                    _ => sample.encode_gauge(value)?,
                }
            }
        }
        Ok(())
    }
}

/// The text that `/metrics` answers.
pub(super) fn render(agents: &[(u16, &Counters)], connections: &[Connection]) -> String {
    let mut samples: BTreeMap<String, Vec<(Labels, u64)>> = BTreeMap::new();
    for (node, counters) in agents {
        let all = counters.snapshot();
        let leads = all.iter().any(|(name, value)| name.ends_with(".is_primary") && *value == 1);
        for (full, value) in all {
            let name = full.strip_prefix(counters.agent()).and_then(|rest| rest.strip_prefix('.')).unwrap_or(&full);
            let (mut base, labels) = place(*node, counters.agent(), name);
            if let Some(of_shard) = of_shard(&base) {
                // What a replica counts as the primary is the shard's, and nobody's while it does not lead.
                if !leads {
                    continue;
                }
                base = of_shard;
            }
            samples.entry(base).or_default().push((labels, value));
        }
    }
    for connection in connections {
        let labels = vec![("node".into(), connection.node.to_string()), ("to".into(), connection.to.to_string())];
        let list = samples.entry("antelog_node_connected".into()).or_default();
        list.push((labels, connection.is_up.into()));
    }
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Samples(samples)));
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = prometheus_text::encode(&mut text, &registry);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_placed_by_their_agents_and_names() {
        let at = |agent: &str, counter: &str| {
            let (base, labels) = place(5, agent, counter);
            let labels: Vec<String> = labels.into_iter().map(|(name, value)| format!("{name}={value}")).collect();
            format!("{base} {}", labels.join(" "))
        };
        let replica = "antelog_replica_verified_lsn node=5 agent=replica-3-1 shard=3 replica=1";
        assert_eq!(at("replica-3-1", "verified_lsn"), replica);
        assert_eq!(at("gate", "clients"), "antelog_gate_clients node=5 agent=gate");
        assert_eq!(at("gate", "shard-7.open"), "antelog_gate_shard_open node=5 agent=gate shard=7");
        assert_eq!(at("sequencer", "rdma.writes"), "antelog_rdma_writes node=5 agent=sequencer");
        assert_eq!(at("sequencer-2", "cuts"), "antelog_sequencer_cuts node=5 agent=sequencer-2 number=2");
        assert_eq!(at("gate", "rdma.peer-0.sends"), "antelog_rdma_peer_sends node=5 agent=gate peer=0");
    }

    #[test]
    fn the_text_is_as_prometheus_reads_it() {
        let (first, second, odd) = (Counters::new("replica-0-0"), Counters::new("replica-0-1"), Counters::new("gate"));
        for (replica, records) in [(&first, 7), (&second, 5)] {
            replica.register("records").set(records);
            replica.register("is_primary").set(u64::from(records == 7));
        }
        odd.register("unheard_of").set(1);
        let up = Connection { node: 1, to: 0, is_up: true, why: String::new() };
        let text = render(&[(1, &first), (2, &second), (1, &odd)], &[up]);
        let expected = "\
            # HELP antelog_gate_unheard_of Not documented\n\
            # TYPE antelog_gate_unheard_of gauge\n\
            antelog_gate_unheard_of{node=\"1\",agent=\"gate\"} 1\n\
            # HELP antelog_node_connected Whether the connection of this node to the node 'to' is up: 1 or 0\n\
            # TYPE antelog_node_connected gauge\n\
            antelog_node_connected{node=\"1\",to=\"0\"} 1\n\
            # HELP antelog_replica_is_primary Whether the replica leads its shard: 1 or 0\n\
            # TYPE antelog_replica_is_primary gauge\n\
            antelog_replica_is_primary{node=\"1\",agent=\"replica-0-0\",shard=\"0\",replica=\"0\"} 1\n\
            antelog_replica_is_primary{node=\"2\",agent=\"replica-0-1\",shard=\"0\",replica=\"1\"} 0\n\
            # HELP antelog_shard_records_total Records appended to the shard\n\
            # TYPE antelog_shard_records_total counter\n\
            antelog_shard_records_total{node=\"1\",agent=\"replica-0-0\",shard=\"0\",replica=\"0\"} 7\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn the_document_lists_exactly_these_metrics() {
        let document = include_str!("../../../core/METRICS.md");
        let mut listed: Vec<&str> = document.lines().filter_map(|l| l.strip_prefix("| `")?.split('`').next()).collect();
        let mut exported: Vec<String> = METRICS.iter().map(Metric::name).collect();
        listed.sort_unstable();
        exported.sort_unstable();
        assert_eq!(listed, exported);
        for metric in METRICS {
            let row = format!(
                "| `{}` | {} | {} |",
                metric.name(),
                if metric.kind == Kind::Counter { "counter" } else { "gauge" },
                metric.help
            );
            assert!(document.lines().any(|line| line == row), "METRICS.md lacks this row:\n{row}");
        }
    }
}
