//! What an answer promises.

use std::fmt;

use serde::Deserialize;

/// What has happened to a record, or to an entry of the order log, before it counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// All members hold it in memory, of the sequencers most; disks are written behind.
    #[default]
    Replicated,
    /// They have also flushed it to disk.
    Flushed,
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Durability::Replicated => "replicated",
            Durability::Flushed => "flushed",
        })
    }
}
