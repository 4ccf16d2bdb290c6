//! What a cluster counts about itself, by name: whatever its agents publish is carried into the reports, so that a new
//! counter needs no change here.

use std::collections::BTreeMap;

/// Names that end like this are places in a log: how far they moved says the same as the counts of records and no-ops.
const PLACE_SUFFIXES: [&str; 2] = ["_lsn", "_position"];

/// Counters as `agent.name` → value, cumulative since the cluster's start. Agents of one kind are numbered: `shard-0`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted(BTreeMap<String, u64>);

impl FromIterator<(String, u64)> for Counted {
    fn from_iter<I: IntoIterator<Item = (String, u64)>>(counters: I) -> Counted {
        Counted(counters.into_iter().collect())
    }
}

impl Counted {
    /// What was counted since `earlier`.
    pub fn since(&self, earlier: &Counted) -> Counted {
        let grown = |name: &String, value: u64| value.saturating_sub(earlier.0.get(name).copied().unwrap_or_default());
        self.0.iter().map(|(name, value)| (name.clone(), grown(name, *value))).collect()
    }

    /// Adds what another run has counted.
    pub fn add(&mut self, other: &Counted) {
        for (name, value) in &other.0 {
            *self.0.entry(name.clone()).or_default() += value;
        }
    }

    /// Sum of one counter over all agents of a kind, like `shard`.
    pub fn total(&self, kind: &str, name: &str) -> u64 {
        self.values(kind, name).iter().sum()
    }

    /// One counter of all agents of a kind, in the order of their numbers.
    fn values(&self, kind: &str, name: &str) -> Vec<u64> {
        let parts = self.0.iter().filter_map(|(full, value)| Some((split(full)?, *value)));
        let mut values: Vec<(u32, u64)> = parts
            .filter(|((of, _, counter), _)| (*of, *counter) == (kind, name))
            .map(|((_, number, _), value)| (number, value))
            .collect();
        values.sort_unstable();
        values.into_iter().map(|(_, value)| value).collect()
    }

    /// No-ops as a share of all slots of all shards, 0 to 1; 0 when there are none.
    pub fn no_op_share(&self) -> f64 {
        let no_ops = self.total("shard", "no_ops");
        let slots = self.total("shard", "records") + no_ops;
        if slots == 0 { 0.0 } else { no_ops as f64 / slots as f64 }
    }

    /// All counters that are not 0, except places in a log: `sequencer: cuts 20, grants 2; shard: no_ops 0/3`. Agents of
    /// one kind share an entry, their values in the order of their numbers. Empty when there is nothing to say.
    pub fn compact(&self) -> String {
        let mut kinds: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (kind, _, name) in self.0.iter().filter(|(_, value)| **value > 0).filter_map(|(full, _)| split(full)) {
            let names = kinds.entry(kind).or_default();
            if !names.contains(&name) && !PLACE_SUFFIXES.iter().any(|suffix| name.ends_with(suffix)) {
                names.push(name);
            }
        }
        let entry = |kind: &str, name: &str| {
            let values: Vec<String> = self.values(kind, name).iter().map(u64::to_string).collect();
            format!("{name} {}", values.join("/"))
        };
        let kinds = kinds.iter().filter(|(_, names)| !names.is_empty()).map(|(kind, names)| {
            let entries: Vec<String> = names.iter().map(|name| entry(kind, name)).collect();
            format!("{kind}: {}", entries.join(", "))
        });
        kinds.collect::<Vec<String>>().join("; ")
    }

    /// The counters that are 0 in `other`: what happened only here.
    pub fn only_here(&self, other: &Counted) -> Counted {
        let absent = |name: &String| other.0.get(name).copied().unwrap_or_default() == 0;
        self.0.iter().filter(|(name, _)| absent(name)).map(|(name, value)| (name.clone(), *value)).collect()
    }

    /// All counters by their full names.
    pub fn by_name(&self) -> &BTreeMap<String, u64> {
        &self.0
    }
}

/// `shard-3.no_ops` is (`shard`, 3, `no_ops`); an agent without a number has number 0.
fn split(full: &str) -> Option<(&str, u32, &str)> {
    let (agent, name) = full.rsplit_once('.')?;
    let numbered = agent.rsplit_once('-').and_then(|(kind, number)| Some((kind, number.parse().ok()?)));
    let (kind, number) = numbered.unwrap_or((agent, 0));
    Some((kind, number, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(counters: &[(&str, u64)]) -> Counted {
        counters.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn the_share_is_of_the_slots_since_the_warm_up() {
        let warm = counted(&[("shard-0.records", 10), ("shard-0.no_ops", 90)]);
        let end = counted(&[("shard-0.records", 56), ("shard-0.no_ops", 94), ("shard-1.records", 50)]);
        assert_eq!(end.since(&warm).no_op_share(), 0.04);
        assert_eq!(Counted::default().no_op_share(), 0.0);
    }

    #[test]
    fn counters_are_shown_by_name_with_a_value_per_agent() {
        let mut all = counted(&[("sequencer.cuts", 20), ("sequencer.targets", 0), ("sequencer.new_one", 3)]);
        all.add(&counted(&[
            ("shard-10.no_ops", 4),
            ("shard-2.no_ops", 0),
            ("shard-0.no_ops", 7),
            ("shard-0.stalls", 0),
        ]));
        all.add(&counted(&[
            ("shard-0.committed_lsn", 99),
            ("sequencer.committed_position", 198),
            ("shard-10.no_ops", 1),
        ]));
        assert_eq!(all.compact(), "sequencer: cuts 20, new_one 3; shard: no_ops 7/0/5");
        assert_eq!((all.total("shard", "no_ops"), all.total("sequencer", "cuts")), (12, 20));
        assert_eq!(counted(&[("shard-0.durable_lsn", 5), ("gate.clients", 0)]).compact(), "");
    }

    #[test]
    fn what_happened_in_the_warm_up_only_is_told_apart() {
        let warm = counted(&[("shard-1.grounded", 1), ("shard-1.no_ops", 5)]);
        let later = counted(&[("shard-1.grounded", 0), ("shard-1.no_ops", 50)]);
        assert_eq!(warm.only_here(&later).compact(), "shard: grounded 1");
    }
}
