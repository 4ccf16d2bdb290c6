//! The latency model of a figure: how long links take, what a turn of a thread costs, and the cluster's constants.

use antelog_core::config::PolicyConfig;
use antelog_core::sim::network::Way;
use serde::Deserialize;

const PAPER: &str = include_str!("../../models/paper.toml");
const LAN: &str = include_str!("../../models/lan.toml");

/// Longest time that a model may give to anything, in nanoseconds.
const TIME_NS_MAX: u64 = 1_000_000_000;

/// One direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// The shortest time, in nanoseconds.
    pub base_ns: u64,
    /// Most that it takes longer, in nanoseconds; every time in between is equally likely.
    pub jitter_ns: u64,
}

impl From<Link> for Way {
    fn from(link: Link) -> Way {
        Way { base_ns: link.base_ns, jitter_ns: link.jitter_ns }
    }
}

/// See the module's text.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Its name in output: a built-in one's, or the file's.
    #[serde(skip)]
    pub name: String,
    /// The ordering tick, in microseconds.
    pub tick_us: u64,
    /// Cuts in a window.
    pub window_cuts: u32,
    /// Bytes of a record.
    pub record_bytes: usize,
    /// The computation on a record where a figure does not vary it, in nanoseconds.
    pub compute_ns: u64,
    /// What a turn of a thread costs, in nanoseconds: from half as much to four times as much.
    pub cycle_ns: u64,
    /// Most that a parked thread takes to wake, in nanoseconds.
    pub wake_ns: u64,
    /// Between a client and a gate.
    pub client: Link,
    /// Between a primary and a backup.
    pub replication: Link,
    /// Between a replica and the sequencer.
    pub order: Link,
    /// As in a cluster's configuration; production's defaults if it is absent.
    #[serde(default)]
    pub policy: PolicyConfig,
}

impl Model {
    /// The built-in model of this name, or the one in this file.
    ///
    /// # Errors
    /// One line that says what is wrong with the file.
    pub fn load(name: &str) -> Result<Model, String> {
        match name {
            "paper" => Model::parse(name, PAPER),
            "lan" => Model::parse(name, LAN),
            _ => {
                let text = std::fs::read_to_string(name).map_err(|e| {
                    format!(
                        "cannot read the model {name}: {e}; give a file, or one of the built-in models paper and lan"
                    )
                })?;
                Model::parse(name, &text)
            }
        }
    }

    fn parse(name: &str, text: &str) -> Result<Model, String> {
        let wrong = |why: &str| format!("model {name}: {why}");
        let mut model: Model = toml::from_str(text).map_err(|e| wrong(e.to_string().replace('\n', " ").trim()))?;
        let times = [model.client, model.replication, model.order].map(|l| l.base_ns.max(l.jitter_ns));
        let longest = times.into_iter().chain([model.compute_ns, model.cycle_ns, model.wake_ns]).max().unwrap_or(0);
        if longest > TIME_NS_MAX {
            return Err(wrong(&format!("times may be at most {TIME_NS_MAX} ns, not {longest}")));
        }
        let shortest = [model.client, model.replication, model.order].map(|l| l.base_ns).into_iter().min().unwrap_or(0);
        if shortest == 0 || model.cycle_ns == 0 {
            return Err(wrong("cycle_ns and every base_ns must be at least 1"));
        }
        if !(10..=10_000_000).contains(&model.tick_us) || !(2..=10_000).contains(&model.window_cuts) {
            return Err(wrong("tick_us must be 10 to 10000000 and window_cuts 2 to 10000"));
        }
        if !(8..=4096).contains(&model.record_bytes) {
            return Err(wrong(&format!("record_bytes must be 8 to 4096, not {}", model.record_bytes)));
        }
        model.name = name.to_owned();
        Ok(model)
    }

    /// The ordering tick, in nanoseconds.
    pub fn tick_ns(&self) -> u64 {
        self.tick_us * 1000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_models_are_sound_and_wrong_files_are_told_in_one_line() {
        assert_eq!(Model::load("paper").unwrap().name, "paper");
        assert_eq!(Model::load("lan").unwrap().tick_ns(), 1_000_000);
        let zero = LAN.replacen("base_ns = 10_000", "base_ns = 0", 1);
        assert_eq!(Model::parse("x", &zero).unwrap_err(), "model x: cycle_ns and every base_ns must be at least 1");
        assert!(!Model::parse("x", "tick_us = ").unwrap_err().contains('\n'));
        assert!(Model::load("/nowhere").unwrap_err().starts_with("cannot read the model /nowhere"));
    }
}
