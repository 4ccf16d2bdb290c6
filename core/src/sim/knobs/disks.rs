//! Disks of replicas, and power that is lost everywhere, as a seed draws them.

use super::{FaultSet, Knobs};
use crate::sim::rng::Rng;

/// Seeds in which replicas have disks, in percent.
const SEEDS_ON_DISK_PERCENT: u64 = 12;
/// The same where power may be lost because the user wants it.
const CHOSEN_ON_DISK_PERCENT: u64 = 50;

/// Disks that the replicas keep their logs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskKnobs {
    /// What is not on every member's disk does not count: durability `flushed`, not `replicated`.
    pub flushed: bool,
    /// An operation takes at least and at most so many nanoseconds.
    pub delay_ns: (u64, u64),
    /// Writes that stop short, in percent.
    pub short_percent: u64,
    /// Lives of a replica that a failed sync ends, in percent.
    pub sync_fails_percent: u64,
}

/// Whether replicas have disks, and are of durability `flushed`; and whether everything loses power at once, which needs
/// sequencers that keep what they know.
pub(super) fn draw_power(rng: &mut Rng, knobs: &mut Knobs, chosen: Option<FaultSet>) -> Option<bool> {
    let percent = chosen.map_or(SEEDS_ON_DISK_PERCENT, |set| if set.has("power") { CHOSEN_ON_DISK_PERCENT } else { 0 });
    let (drawn, flushed, all) = (rng.percent(percent), rng.percent(60), rng.percent(60));
    let every_ns = rng.scale(knobs.load.load_ns / 4 + 1, knobs.load.load_ns + 1);
    let disk_ns = rng.scale(10_000, 500_000);
    if !drawn {
        return None;
    }
    // A cluster has one durability, but a sequencer on its own always flushes.
    knobs.flushed = flushed;
    if all && (flushed || knobs.sequencers == 1) {
        knobs.disk_ns = knobs.disk_ns.or(Some(disk_ns));
        knobs.faults.strike_every_ns[4] = Some(every_ns);
    }
    Some(flushed)
}

/// A cut of a log takes dozens of operations, within which nobody is to be suspected.
pub(super) fn draw_disks(rng: &mut Rng, flushed: bool, suspect_ns: u64) -> DiskKnobs {
    let most_ns = rng.scale(2_000, (suspect_ns / 64).clamp(2_001, 500_000));
    DiskKnobs {
        flushed,
        delay_ns: (rng.below(most_ns / 2), most_ns),
        short_percent: rng.pick(&[0, 0, 10]),
        sync_fails_percent: rng.pick(&[0, 0, 10, 30]),
    }
}
