//! The seam below the store: every file operation, asynchronous, so that a duty cycle never waits for a disk and the
//! simulator can be one.
//!
//! Files are known by a [`Name`] in the one directory of a replica and, while open, by a small number that the user of the
//! disk chooses. Operations read and write [`Region`]s only, which the disk keeps alive until the completion was taken.

use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use crate::mem::Region;
use crate::node::Waker;

/// Unit of all transfers, in bytes: offsets and lengths of reads and writes are multiples of it.
pub const BLOCK_BYTES: usize = 4096;

/// Most files that are open at a time.
pub const FILES_MAX: usize = 32;

/// Most operations under way at a time.
pub const OPERATIONS_MAX: usize = 64;

/// A file of a replica's directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Name {
    /// The segment that begins at this absolute offset.
    Segment(u64),
    /// Whose directory this is, and what the replica must not forget.
    Identity,
    /// The next identity, until it is renamed.
    IdentityNew,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Name::Segment(start) => write!(f, "{start:020}.log"),
            Name::Identity => f.write_str("identity"),
            Name::IdentityNew => f.write_str("identity.new"),
        }
    }
}

impl Name {
    /// The name of this file, if it is one of a replica's.
    pub fn parse(text: &str) -> Option<Name> {
        match text {
            "identity" => Some(Name::Identity),
            "identity.new" => Some(Name::IdentityNew),
            _ => {
                let digits = text.strip_suffix(".log").filter(|d| d.len() == 20)?;
                let start = digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())??;
                Some(Name::Segment(start))
            }
        }
    }
}

/// One operation.
#[derive(Clone, Copy, Debug)]
pub enum Op<'a> {
    /// Opens a file under a number that is free; `create` makes it if it is not there, and empties a segment that is.
    Open {
        /// The number.
        file: usize,
        /// The file.
        name: Name,
        /// Whether to make it.
        create: bool,
    },
    /// Reserves space for this length and makes the file as long.
    Allocate {
        /// An open file.
        file: usize,
        /// Its length, in bytes.
        bytes: u64,
    },
    /// Cuts the file to this length.
    SetLength {
        /// An open file.
        file: usize,
        /// Its length, in bytes.
        bytes: u64,
    },
    /// Writes `len` bytes from `offset` of `source` at `at` of the file. The result says how many were written.
    Write {
        /// An open file.
        file: usize,
        /// Where to, in bytes.
        at: u64,
        /// Where from. Nobody may change these bytes until the completion.
        source: &'a Arc<Region>,
        /// First byte in `source`.
        offset: usize,
        /// How many bytes.
        len: usize,
    },
    /// Reads into a region. The result says how many bytes there were: fewer at the file's end.
    Read {
        /// An open file.
        file: usize,
        /// Where from, in bytes.
        at: u64,
        /// Where to.
        target: &'a Arc<Region>,
        /// First byte in `target`.
        offset: usize,
        /// How many bytes.
        len: usize,
    },
    /// Makes everything durable that was written to the file and completed before.
    Sync {
        /// An open file.
        file: usize,
    },
    /// Gives a file another name, replacing what had it.
    Rename {
        /// The old name.
        from: Name,
        /// The new name.
        to: Name,
    },
    /// Gives two files each other's names.
    Exchange {
        /// The one.
        one: Name,
        /// The other.
        other: Name,
    },
    /// Removes a file.
    Remove {
        /// The file.
        name: Name,
    },
    /// Makes creations, renames and removals durable that completed before.
    SyncDirectory,
}

impl Op<'_> {
    /// What the operation does, for messages.
    pub fn verb(&self) -> &'static str {
        match self {
            Op::Open { create: true, .. } => "create",
            Op::Open { .. } => "open",
            Op::Allocate { .. } => "reserve space for",
            Op::SetLength { .. } => "cut",
            Op::Write { .. } => "write",
            Op::Read { .. } => "read",
            Op::Sync { .. } | Op::SyncDirectory => "sync",
            Op::Rename { .. } => "rename",
            Op::Exchange { .. } => "exchange",
            Op::Remove { .. } => "remove",
        }
    }
}

/// An operation that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The token it was submitted with.
    pub token: u64,
    /// Bytes, or 0, or a negated `errno`.
    pub result: i32,
}

/// A directory's file operations. See the module's text.
pub trait Disk: Sized {
    /// Queues an operation; false when [`OPERATIONS_MAX`] are under way, and then nothing happened.
    fn submit(&mut self, op: Op<'_>, token: u64) -> bool;

    /// Hands queued operations over. Never waits.
    fn enter(&mut self);

    /// The next operation that is done.
    fn completion(&mut self) -> Option<Completion>;

    /// Waits until an operation is done that is under way. For recovery and rare commands only.
    fn wait(&mut self);

    /// Closes a file nothing is under way for; its number is free again.
    fn close(&mut self, file: usize);

    /// Drops what memory holds of an open file that was synced, so that reads show what the disk has.
    fn forget_cached(&mut self, file: usize);

    /// The names of everything in the directory, beside what the disk itself keeps there.
    ///
    /// # Errors
    /// The operating system's.
    fn list(&self) -> io::Result<Vec<String>>;

    /// The directory, as an operator knows it.
    fn place(&self) -> String;

    /// Another user of the same directory, for a reader on another thread.
    ///
    /// # Errors
    /// The operating system's.
    fn another(&self) -> io::Result<Self>;

    /// Whom to wake when something is done, for a disk that has no descriptors to wait for.
    fn set_waker(&mut self, _waker: Waker) {}

    /// Descriptors that become readable when operations are done while the owner sleeps.
    fn wait_fds(&self, fds: &mut Vec<RawFd>);

    /// To be called before sleeping; true when something is done already.
    fn prepare_wait(&mut self) -> bool;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_and_sort_by_offset() {
        for name in [Name::Segment(0), Name::Segment(u64::MAX), Name::Identity, Name::IdentityNew] {
            assert_eq!(Name::parse(&name.to_string()), Some(name));
        }
        assert_eq!(Name::Segment(4096).to_string(), "00000000000000004096.log");
        for foreign in ["4096.log", "lost+found", "0000000000000000409x.log", "+0000000000000000001.log", ""] {
            assert_eq!(Name::parse(foreign), None);
        }
        assert_eq!(Name::parse("99999999999999999999.log"), None, "no 64-bit number");
    }
}
