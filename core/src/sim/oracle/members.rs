//! Who holds each shard's log and which shards were lost, as the oracle reads it from the order log's bytes.

use std::collections::BTreeSet;

use super::Violation;
use super::order::Bytes;

/// A life of a replica: its number and its incarnation.
pub(in crate::sim) type Life = (u16, u64);

/// The newest committed membership of a shard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::sim) struct Members {
    pub(super) change: u64,
    pub(super) epoch: u64,
    pub(in crate::sim) primary: u16,
    /// By number; none before the first change and while the shard is lost.
    pub(in crate::sim) lives: Vec<Life>,
}

impl Members {
    /// The primary's life.
    pub(super) fn first(&self) -> Option<Life> {
        self.lives.iter().copied().find(|life| life.0 == self.primary)
    }

    /// Lost as a whole, and not returned.
    pub(in crate::sim) fn has_failed(&self) -> bool {
        self.lives.is_empty() && self.change > 0
    }
}

/// A shard lost as a whole: its slots from `lsn` on at positions from `from` to `lease_end` never come to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) shard: u16,
    pub(super) view: u64,
    pub(super) from: u64,
    pub(super) lease_end: u64,
    pub(super) lsn: u64,
}

/// How often each kind of change was seen.
#[derive(Clone, Debug, Default)]
pub(super) struct ChangeCounts {
    pub(super) dropped: u64,
    pub(super) promoted: u64,
    pub(super) joined: u64,
    pub(super) returned: u64,
    /// All members died, and later lives of some go on with what their disks have kept.
    pub(super) succeeded: u64,
    pub(super) voids: u64,
    /// Among those that joined: born anew, and primaries before.
    pub(super) reborn: u64,
    pub(super) came_back: u64,
    /// Promotions while somebody waited for an append.
    pub(super) promoted_busy: u64,
}

/// The newest memberships of all shards, and all failures.
#[derive(Debug, Default)]
pub(super) struct Memberships {
    shards: Vec<Members>,
    pub(super) view: u64,
    pub(super) failures: Vec<Failure>,
    pub(super) counts: ChangeCounts,
    /// Lives that were members, and those that led.
    known: BTreeSet<(u16, Life)>,
    /// A later life of a member keeps everything that it held.
    succeed: bool,
    led: BTreeSet<(u16, Life)>,
}

impl Memberships {
    pub(super) fn new(shards: u16, succeed: bool) -> Memberships {
        Memberships { shards: vec![Members::default(); shards.into()], succeed, ..Memberships::default() }
    }

    pub(super) fn of(&self, shard: u16) -> &Members {
        &self.shards[usize::from(shard)]
    }

    /// Reads a change of members behind its first eight bytes. `None`: it is void, else what was before it.
    pub(super) fn change(
        &mut self,
        bytes: &mut Bytes<'_>,
        shard: u16,
        view: u64,
    ) -> Result<Option<Members>, Violation> {
        let (change, epoch) = (bytes.number(4)?, bytes.number(4)?);
        let (primary, count) = (bytes.number(2)? as u16, bytes.number(2)?);
        bytes.number(4)?;
        let mut lives = Vec::new();
        for _ in 0..count {
            let incarnation = bytes.number(8)?;
            lives.push((bytes.number(2)? as u16, incarnation));
            bytes.number(6)?;
        }
        let wrong = |what: &str| {
            Err(Violation::new("I4", format!("change {change} of shard {shard}'s members (epoch {epoch}) {what}")))
        };
        let Some(known) = self.shards.get(usize::from(shard)) else { return wrong("is of no shard of the cluster") };
        let leads = lives.iter().copied().find(|life| life.0 == primary);
        // Another life of the same primary is another one.
        let begins = known.lives.is_empty() || known.first() != leads;
        let fits = if begins { epoch > known.epoch } else { epoch == known.epoch };
        if view != self.view || change != known.change + 1 || lives.is_empty() || !fits {
            self.counts.voids += 1;
            return Ok(None);
        }
        let next = Members { change, epoch, primary, lives };
        let Some(leads) = next.first() else { return wrong("names a primary that is no member") };
        let news: Vec<Life> = next.lives.iter().copied().filter(|life| !known.lives.contains(life)).collect();
        let added = news.len();
        let later = |life: &Life| known.lives.iter().any(|old| old.0 == life.0 && old.1 < life.1);
        if self.succeed && !known.lives.is_empty() && next.lives.iter().all(later) {
            // Whether they do hold everything is compared.
            self.counts.succeeded += 1;
        } else if !known.lives.is_empty() {
            // Only who held everything that was ever acknowledged may lead.
            if !known.lives.contains(&leads) {
                return wrong("has a replica lead that was no member");
            }
            if begins && added > 0 {
                return wrong("adds a member and promotes another");
            }
            self.counts.promoted += u64::from(begins);
            self.counts.joined += u64::from(added > 0);
            let is_new = |life: &&Life| !self.known.contains(&(shard, **life));
            let is_reborn = |life: &&Life| self.known.iter().any(|(s, known)| (*s, known.0) == (shard, life.0));
            self.counts.reborn += news.iter().filter(is_new).filter(is_reborn).count() as u64;
            self.counts.came_back += news.iter().filter(|life| self.led.contains(&(shard, **life))).count() as u64;
            self.counts.dropped += u64::from(!begins && added == 0);
        } else if known.change > 0 {
            self.counts.returned += 1;
        }
        self.known.extend(next.lives.iter().map(|life| (shard, *life)));
        self.led.insert((shard, leads));
        Ok(Some(std::mem::replace(&mut self.shards[usize::from(shard)], next)))
    }

    /// A shard is lost. `None`: the entry is void, else what was before it.
    pub(super) fn fail(&mut self, failure: Failure) -> Option<Members> {
        let known = &mut self.shards[usize::from(failure.shard)];
        if failure.view != self.view + 1 || known.has_failed() {
            self.counts.voids += 1;
            return None;
        }
        self.view = failure.view;
        self.failures.push(failure);
        let next = Members { change: known.change + 1, epoch: known.epoch, primary: known.primary, lives: Vec::new() };
        Some(std::mem::replace(known, next))
    }

    /// Whether a shard may have lost a slot that was bound: it held it when it was lost.
    pub(super) fn may_lack(&self, shard: u16, lsn: u64) -> bool {
        self.failures.iter().any(|f| f.shard == shard && lsn < f.lsn)
    }

    /// The failure that made a position of a shard void.
    pub(super) fn failure_at(&self, shard: u16, position: u64) -> Option<&Failure> {
        self.failures.iter().find(|f| f.shard == shard && (f.from..f.lease_end).contains(&position))
    }
}
