//! What the threads of readers and their replica, which has peers to ask, tell each other of rotten entries.

use antelog_protocol::Lsn;

use super::mark::Mark;
use super::reader::ReadError;
use crate::node::mailbox::MailSender;

/// What a reader's thread tells its replica.
#[derive(Debug)]
pub enum Rot {
    /// The disk has not what was written behind a mark: other replicas are to be asked. Nothing else is read meanwhile.
    Found {
        /// Before the first entry that is rotten.
        before: Mark,
        /// No more than this is wanted, an absolute offset.
        until: u64,
        /// Takes whole entries from there on as another replica has them, and its number, or the word that nobody has.
        answer: MailSender<Option<(u16, Vec<u8>)>>,
    },
    /// Entries were written in place, durably.
    Repaired {
        /// Before the first of them.
        before: Mark,
        /// How many bytes.
        bytes: usize,
        /// Whose they are.
        giver: u16,
    },
    /// What was given could not be written in place.
    NotRepaired {
        /// Slot of the first entry that is rotten.
        lsn: Lsn,
        /// Why.
        error: ReadError,
    },
}
