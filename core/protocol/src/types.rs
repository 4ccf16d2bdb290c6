//! The words of the protocol. `PROTOCOL.md` §2 is their glossary.

use core::fmt;

/// One log partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardId(pub u16);

impl fmt::Display for ShardId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// One holder of a shard's log. A restart without its memory is another incarnation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaId {
    /// Its number in the shard: its place in the configuration.
    pub number: u16,
    /// Which life it is in; 0 stands for none.
    pub incarnation: u64,
}

impl fmt::Display for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{:x}", self.number, self.incarnation)
    }
}

/// Slot number inside one shard; counts records and no-ops, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

impl Lsn {
    /// The slot `count` further on.
    pub const fn plus(self, count: u64) -> Lsn {
        Lsn(self.0 + count)
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Slot number in the whole log, from 0 ("gsn" in the literature).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u64);

impl Position {
    /// The position `count` further on.
    pub const fn plus(self, count: u64) -> Position {
        Position(self.0 + count)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A client session: random, so that two sessions never share one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u128);

impl fmt::Display for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// How the positions of a window are bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WindowMode {
    /// Fix-ante ordering (Belfast): every cut takes each shard's quota, so positions are known beforehand.
    Fixed,
    /// Free-will ordering (Scalog): every cut takes what the shards report; nothing is speculative.
    Free,
}

/// Which windows the sequencer grants, and when it cuts: the modes of one binary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ordering {
    /// Fixed windows: a cut is bound as soon as every shard has reported it.
    Fixed,
    /// Free windows; shards report on their tick, the sequencer cuts on its own tick, as published baselines do.
    FreeTick,
    /// Free windows; shards report on their tick, the sequencer cuts as soon as every shard's report is in.
    FreeEvent,
    /// Fixed windows, and for a while free ones (cut as in `free-event`) when fixed cuts wait too long for their last
    /// report.
    Auto,
}

impl Ordering {
    /// The mode of the windows that this policy grants unless it has a reason for the other.
    pub const fn window_mode(self) -> WindowMode {
        match self {
            Ordering::Fixed | Ordering::Auto => WindowMode::Fixed,
            Ordering::FreeTick | Ordering::FreeEvent => WindowMode::Free,
        }
    }

    /// The name used in configuration and output.
    pub const fn name(self) -> &'static str {
        match self {
            Ordering::Fixed => "fixed",
            Ordering::FreeTick => "free-tick",
            Ordering::FreeEvent => "free-event",
            Ordering::Auto => "auto",
        }
    }

    /// Parses a [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<Ordering> {
        [Ordering::Fixed, Ordering::FreeTick, Ordering::FreeEvent, Ordering::Auto]
            .into_iter()
            .find(|o| o.name() == name)
    }
}

/// When fixed cuts are filled with no-ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Beat {
    /// On demand: a record that waited, or a cut that another shard has reached, has the cut filled at once. An idle log
    /// writes nothing.
    Target,
    /// The published rules of SpecLog's Belfast, for comparison: every cut is filled 1.5 ticks after the last report,
    /// records or not, and a shard three cuts behind the first is told to catch up (its lag fix).
    Paper {
        /// Whether shards are told to catch up.
        lag_fix: bool,
    },
}

impl Beat {
    /// The name used in configuration and output.
    pub const fn name(self) -> &'static str {
        match self {
            Beat::Target => "target",
            Beat::Paper { lag_fix: true } => "paper",
            Beat::Paper { lag_fix: false } => "paper-without-lag-fix",
        }
    }

    /// Parses a [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<Beat> {
        [Beat::Target, Beat::Paper { lag_fix: true }, Beat::Paper { lag_fix: false }]
            .into_iter()
            .find(|b| b.name() == name)
    }
}

/// How far positions are bound: the first `cut` cuts of `window` and, of the next cut, the first `prefix` members.
/// The end of a window is written as the start of the next: `(w + 1, 0, 0)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CutPoint {
    /// Window number.
    pub window: u64,
    /// Cuts of that window that are whole.
    pub cut: u32,
    /// Members of the next cut that are bound already.
    pub prefix: u16,
}

impl fmt::Display for CutPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {}, {})", self.window, self.cut, self.prefix)
    }
}

/// A shard's part in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The shard.
    pub shard: ShardId,
    /// Slots it contributes to every cut (0 in a free window).
    pub quota: u32,
    /// Its first slot in the window.
    pub first_lsn: Lsn,
    /// Whether it takes new appends. A shard that is grounded, leaving or has left is closed; it stays listed, with the
    /// quota that what it still holds needs, and then with none.
    pub open: bool,
}

/// Why an append was refused. The record was not written and will not appear unless it is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// `seq` skips ahead: the shard expects another one of this session next.
    Gap {
        /// The `seq` the shard expects.
        expected: u64,
    },
    /// The session is not known here and `seq` is not 0: it was forgotten, or never wrote to this shard.
    UnknownSession,
    /// A retry from before what the shard remembers of this session.
    Forgotten,
    /// The record is larger than the cluster's `record_bytes_max`.
    TooLarge {
        /// The limit in bytes.
        limit_bytes: u32,
    },
    /// The shard's log region has no room left.
    RegionFull {
        /// The region's size in bytes.
        region_bytes: u64,
    },
    /// The disk of one of the shard's replicas is full.
    DiskFull,
    /// The shard is not served by the node that was asked.
    NotHere,
    /// The shard was failed by a view change and takes no appends.
    Failed,
    /// The shard was lost as a whole and has returned, and the session did not know. A retry is not taken: the record may
    /// have been bound and be missing.
    OldView {
        /// The view that the newest failure began.
        view: u32,
    },
    /// The shard takes no appends at present: it is grounded, leaving, or standing by.
    Closed {
        /// A shard that does.
        instead: ShardId,
    },
    /// The client's secret lets it read only.
    Forbidden,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Gap { expected } => write!(f, "the shard expects sequence number {expected} of this session next"),
            Refusal::UnknownSession => write!(f, "the shard does not know this session any more; open a new one"),
            Refusal::Forgotten => write!(f, "the retry is older than what the shard remembers of this session"),
            Refusal::TooLarge { limit_bytes } => {
                write!(f, "the record is larger than this cluster's limit of {limit_bytes} bytes (record_bytes_max)")
            }
            Refusal::RegionFull { region_bytes } => write!(
                f,
                "the shard's log region of {region_bytes} bytes is full; start the cluster with a larger region_bytes, \
                 or with retention = \"recycle\" to drop the oldest confirmed records"
            ),
            Refusal::DiskFull => write!(
                f,
                "the disk of one of the shard's replicas is full: it takes appends again as soon as there is room; make \
                 some, trim the log, or set keep_bytes or keep_s"
            ),
            Refusal::NotHere => write!(f, "the shard is not served by the node that was asked"),
            Refusal::Failed => write!(f, "the shard has failed and takes no appends"),
            Refusal::OldView { view } => write!(f, "the shard was lost and returned in view {view}"),
            Refusal::Closed { instead } => write!(
                f,
                "the shard takes no appends at present (it is grounded, leaving or standing by); append to shard \
                 {instead} instead"
            ),
            Refusal::Forbidden => {
                write!(f, "this client's secret lets it read only; an append needs that of the role append or admin")
            }
        }
    }
}

/// What became of an append that was not answered, because its shard was lost as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is in the log, for ever.
    Bound(Position),
    /// It is not in the log and never will be.
    NotInLog,
    /// It is in its shard's log and waits to be bound.
    Waiting,
    /// The shard cannot say any more: what it knew of the session was trimmed, or lost with records that are unavailable.
    Forgotten,
    /// The shard is not served by the node that was asked.
    NotHere,
}

/// A change that an operator asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The shard becomes a member at the next edge.
    Join(ShardId),
    /// The shard takes no more appends and leaves when what it holds is ordered.
    Leave(ShardId),
    /// Other windows are granted from the next edge on.
    Ordering(Ordering),
    /// What lies below this position, all of it bound, is not to be kept.
    Trim(Position),
}

/// Why a change was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeError {
    /// The cluster is configured without such a shard.
    UnknownShard(ShardId),
    /// Without it no shard would take appends.
    LastShard(ShardId),
    /// The client's secret does not let it change anything.
    Forbidden,
    /// What is not bound is not trimmed.
    NotBound,
}

impl fmt::Display for ChangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChangeError::UnknownShard(shard) => {
                write!(f, "the cluster is configured without a shard {shard}; add it to the configuration as a standby")
            }
            ChangeError::LastShard(shard) => {
                write!(f, "shard {shard} cannot leave: no other shard would take appends; add one first")
            }
            ChangeError::NotBound => {
                write!(f, "positions that are not bound yet cannot be trimmed: `antelog tail` says how far they are")
            }
            ChangeError::Forbidden => {
                write!(f, "this client's secret does not let it change the cluster; that needs the role admin")
            }
        }
    }
}

impl core::error::Error for ChangeError {}
