//! What can go wrong with a log on disk, in one line each.

use std::fmt;
use std::io;

use super::disk::{Disk, Name, Op};

/// What to do about a log that is damaged when it is opened. It is not mended then: sessions and lost slots are learned from
/// all of it, and whoever is given the log anew learns them from a primary.
pub const AFTER_DAMAGE: &str =
    "empty the directory, and another replica gives it the log anew; if there is none, repair the disk";

/// Why a log cannot be opened, or not be written any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreError {
    /// The operating system refused an operation.
    Io {
        /// The directory.
        place: String,
        /// What was tried, with which file.
        what: String,
        /// The system's number for why.
        errno: i32,
    },
    /// The directory belongs to somebody else, or was written for another configuration.
    Foreign {
        /// The directory.
        place: String,
        /// What does not fit.
        why: String,
    },
    /// Something that was durable is not there, or not as it was written.
    Damaged {
        /// The directory.
        place: String,
        /// What is wrong.
        why: String,
        /// Absolute offset up to which the log is good.
        good_to: u64,
    },
    /// The disk is full, and the command cannot wait for room.
    Full {
        /// The directory.
        place: String,
    },
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreError::Io { place, what, errno } => {
                write!(f, "{place}: cannot {what}: {}", io::Error::from_raw_os_error(*errno))
            }
            StoreError::Foreign { place, why } => {
                write!(f, "{place} is not this replica's data directory: {why}")
            }
            StoreError::Damaged { place, why, good_to } => {
                write!(f, "{place} is damaged: {why}; the log is good up to offset {good_to}: {AFTER_DAMAGE}")
            }
            StoreError::Full { place } => write!(f, "{place}: the disk is full: make room"),
        }
    }
}

impl std::error::Error for StoreError {}

impl StoreError {
    pub(super) fn io<D: Disk>(disk: &D, what: &str, errno: i32) -> StoreError {
        StoreError::Io { place: disk.place(), what: what.to_owned(), errno }
    }
}

/// Whether an `errno` says that there is no room, which passes.
pub(crate) fn is_full(errno: i32) -> bool {
    errno == libc::ENOSPC || errno == libc::EDQUOT
}

/// Does one operation and waits for it. Nothing else may be under way on this disk.
pub(super) fn run<D: Disk>(disk: &mut D, op: Op<'_>, name: Name) -> Result<usize, StoreError> {
    loop {
        let taken = disk.submit(op, 0);
        assert!(taken, "nothing else is under way");
        disk.enter();
        let result = loop {
            match disk.completion() {
                Some(completion) => break completion.result,
                None => disk.wait(),
            }
        };
        match result {
            0.. => return Ok(result as usize),
            _ if result == -libc::EINTR || result == -libc::EAGAIN => {}
            _ if is_full(-result) => return Err(StoreError::Full { place: disk.place() }),
            _ => return Err(StoreError::io(disk, &format!("{} {name}", op.verb()), -result)),
        }
    }
}
