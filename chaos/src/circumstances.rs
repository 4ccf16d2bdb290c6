//! What was done to a cluster, as far as it excuses what clients saw. It is kept beside their histories.

use std::path::Path;

/// A name no client's history has.
const FILE: &str = "circumstances";

/// With durability `replicated` disks are written behind, at once. What was acknowledged longer ago than this when all
/// replicas of a shard were killed counts as written, in nanoseconds.
const NEWEST_NS: u64 = 2_000_000_000;

/// What an acknowledgement promises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Durability {
    /// The record is in every member's memory, and there are no disks
    #[default]
    Memory,
    /// It is in every member's memory; disks are written behind
    Replicated,
    /// It is on every member's disk
    Flushed,
}

impl Durability {
    /// Its name in a configuration, where there is a disk.
    pub fn key(self) -> Option<&'static str> {
        match self {
            Durability::Memory => None,
            Durability::Replicated => Some("replicated"),
            Durability::Flushed => Some("flushed"),
        }
    }
}

/// See the module's text. Times are of the histories' clock, as spans.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Circumstances {
    /// What was promised.
    pub durability: Durability,
    /// How often a whole shard was lost: without that nothing may be taken back.
    pub shard_losses: u64,
    /// When all replicas of a shard were killed at once.
    pub sudden_ends_ns: Vec<(u64, u64)>,
    /// When a member's disk was full.
    pub full_disks_ns: Vec<(u64, u64)>,
}

impl Circumstances {
    /// Whether a record may be gone that was acknowledged, see "What is on disk" in the README.
    pub fn may_be_gone(&self, invoked_ns: u64, answered_ns: u64) -> bool {
        match self.durability {
            Durability::Memory => self.shard_losses > 0,
            Durability::Flushed => false,
            Durability::Replicated => {
                let takes = |(from, to): &(u64, u64)| invoked_ns < *to && answered_ns + NEWEST_NS > *from;
                self.sudden_ends_ns.iter().any(takes)
            }
        }
    }

    /// Whether anything that is bound may be gone.
    pub fn may_lack(&self) -> bool {
        match self.durability {
            Durability::Memory => self.shard_losses > 0,
            Durability::Flushed => false,
            Durability::Replicated => !self.sudden_ends_ns.is_empty(),
        }
    }

    /// Whether a disk was full at some time between these.
    pub fn was_full(&self, from_ns: u64, to_ns: u64) -> bool {
        self.full_disks_ns.iter().any(|(from, to)| *from < to_ns && from_ns < *to)
    }

    /// Keeps it in a folder.
    pub fn write(&self, folder: &Path) -> Result<(), String> {
        let mut text = format!("durability {}\n", self.durability.key().unwrap_or("memory"));
        text += &format!("shard-losses {}\n", self.shard_losses);
        for (name, spans) in [("sudden-end", &self.sudden_ends_ns), ("full-disk", &self.full_disks_ns)] {
            spans.iter().for_each(|(from, to)| text += &format!("{name} {from} {to}\n"));
        }
        let path = folder.join(FILE);
        std::fs::write(&path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))
    }

    /// Reads it again.
    pub fn read(folder: &Path) -> Result<Circumstances, String> {
        let path = folder.join(FILE);
        let text = std::fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
        let mut read = Circumstances::default();
        for line in text.lines() {
            let wrong = || format!("{}: \"{line}\" says nothing", path.display());
            let words: Vec<&str> = line.split(' ').collect();
            let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok()).ok_or_else(wrong);
            match words[0] {
                "durability" => {
                    let word = words.get(1).ok_or_else(wrong)?;
                    read.durability = clap::ValueEnum::from_str(word, false).map_err(|_| wrong())?;
                }
                "shard-losses" => read.shard_losses = number(1)?,
                "sudden-end" => read.sudden_ends_ns.push((number(1)?, number(2)?)),
                "full-disk" => read.full_disks_ns.push((number(1)?, number(2)?)),
                _ => return Err(wrong()),
            }
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_comes_back() {
        let folder = std::env::temp_dir().join(format!("antelog-chaos-circumstances-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let all = Circumstances {
            durability: Durability::Replicated,
            shard_losses: 3,
            sudden_ends_ns: vec![(1, 2), (3, 4)],
            full_disks_ns: vec![(5, 6)],
        };
        all.write(&folder).unwrap();
        assert_eq!(Circumstances::read(&folder), Ok(all));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn only_the_newest_may_be_gone_and_only_where_disks_are_written_behind() {
        let second = 1_000_000_000;
        let sudden_ends_ns = vec![(10 * second, 11 * second)];
        let replicated =
            Circumstances { durability: Durability::Replicated, sudden_ends_ns, ..Circumstances::default() };
        assert!(replicated.may_be_gone(9 * second, 9 * second + 1));
        assert!(!replicated.may_be_gone(7 * second, 8 * second), "long before");
        assert!(!replicated.may_be_gone(11 * second, 12 * second), "afterwards");
        let flushed = Circumstances { durability: Durability::Flushed, shard_losses: 1, ..replicated };
        assert!(!flushed.may_be_gone(9 * second, 9 * second + 1) && !flushed.may_lack());
    }
}
