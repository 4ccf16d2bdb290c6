//! Bugs planted on purpose: each is a mistake that this protocol's implementations could make, behind a switch that only
//! tests can turn. The simulator has to find every one of them, or its silence about the code as it is says little.
//!
//! Without the feature `mutants` nothing can be planted and [`planted`] is the constant `false`.

/// One bug. What is said is what the code does while the bug is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mutant {
    /// A shard acknowledges records as soon as they are durable and have a position, not when their cut is bound.
    AcknowledgeWhenDurable = 1,
    /// A shard reports a cut while its last slot is missing.
    ReportOneSlotEarly,
    /// A shard loses its table of sessions with its connection to the sequencer, and takes unknown sessions at any number.
    ForgetSessions,
    /// A client's merge confirms what is bound though it was not handed out.
    ConfirmPastAGap,
    /// A shard lets its gate deliver beyond the grants, at positions that the gate guesses.
    SpeculateWithoutAGrant,
    /// A gate answers reads of positions that are not bound yet.
    ReadPastTheCommit,
    /// A ledger goes on with the quotas of the window before, from which it computes where the window after starts.
    KeepOldQuotas,
    /// A client is handed no-ops as empty records.
    DeliverNoOps,
    /// A no-op is written in place of a record that arrives while a fill waits; the record is acknowledged.
    FillOverARecord,
    /// The sequencer counts the first report of a new connection, which repeats an older one, as one cut more.
    CountRepeatedReports,
    /// A shard does not resume its target when the grant comes that it waited for, and ignores repetitions of it.
    ForgetTheTargetAtAnEdge,
    /// The sequencer grants every window twice, and ledgers take the second grant for one of the window after.
    GrantTwice,
    /// The sequencer skips an order entry when a follower comes back, and ledgers do not look at the index.
    SkipAnOrderEntry,
    /// A shard appends the retry of a session's first record again.
    AppendFirstRetries,
    /// A backup takes for an entry what is shaped like one: what the region's previous lap left behind its log's end.
    TakeShapesForEntries,
    /// A gate delivers from where a record was, whatever has been written there since.
    DeliverOverwritten,
    /// The sequencer asks all shards to follow one that has filled ahead with no-ops, so that an idle log chases itself.
    FollowFillsAhead,
    /// Ledgers apply a change of a shard's members that does not name its predecessor.
    ApplyVoidChanges,
    /// A shard acknowledges what most of its members hold, though any of them may be promoted.
    QuorumOfMembers,
    /// A primary asks for a spare to become a member before it holds what was appended meanwhile.
    CountASpareEarly,
    /// A primary goes on writing to a reborn backup where it was with the one before.
    ResumeAtTheOldOffset,
    /// A backup obeys a fence of an epoch that is over.
    ObeyOldFences,
    /// A new primary serves before all others have fenced the old one.
    ServeUnfenced,
    /// A backup does not look at whether an entry continues the chain.
    UnchainedEntries,
    /// The sequencer counts reports of a shard's earlier lives.
    CountReportsOfLostShards,
    /// A shard appends a session's record though one before it is missing.
    AppendOverAGap,
    /// A client does not take back what a lost shard had delivered.
    KeepLostSpeculation,
    /// A client takes back more than what was lost: the last confirmed position too.
    FailConfirmed,
    /// The sequencer gives a shard up that has lost its primary alone.
    FailWithThePrimary,
    /// For clients and gates everything of a lost shard's lease is void, whosever it is.
    VoidTheNeighbours,
    /// A region in want of room drops records that are not bound.
    RecycleUnbound,
    /// A new queue pair uses the keys of the first one with its peer.
    KeepOldKeys,
    /// Memory for small operations is used again once the device knows of them, not when it is done with them.
    ReuseHandedOver,
    /// With durability `flushed` a replica counts what it has before that is on its disk.
    CountUnflushed,
    /// A sync that failed is tried again, and when that succeeds everything is taken to be on the disk.
    RetryFailedSyncs,
    /// A log that was cut keeps in its files what lies behind its end.
    KeepTornTails,
    /// A log that is taken up from disk begins at the region's beginning, however often it has gone around.
    ForgetTheBaseOffset,
}

/// Whether this bug is planted.
#[cfg(not(feature = "mutants"))]
#[inline(always)]
pub const fn planted(_mutant: Mutant) -> bool {
    false
}

#[cfg(feature = "mutants")]
pub use switch::{plant, planted};

#[cfg(feature = "mutants")]
mod switch {
    use core::sync::atomic::{AtomicU8, Ordering};

    use super::Mutant;

    static PLANTED: AtomicU8 = AtomicU8::new(0);

    /// Whether this bug is planted.
    #[inline]
    pub fn planted(mutant: Mutant) -> bool {
        PLANTED.load(Ordering::Relaxed) == mutant as u8
    }

    /// Plants a bug in the whole process in place of any other, or none.
    pub fn plant(mutant: Option<Mutant>) {
        PLANTED.store(mutant.map_or(0, |mutant| mutant as u8), Ordering::Relaxed);
    }
}
