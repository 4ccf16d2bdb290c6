//! Messages between the members of a sequencer group: fixed layouts, little endian, fully checked when decoded.
//!
//! Raft's own messages travel in a layout of this module's, not in the library's encoding: it says what a member of this
//! version may be told, and nothing else is understood. A message that does not decode ends the connection.

use antelog_protocol::wire::DecodeError;
use antelog_protocol::wire::order::ORDER_ENTRY_BYTES_MAX;
use raft::eraftpb::{ConfChangeType, ConfState, Entry, EntryType, Message, MessageType};

use crate::transport::SEND_BYTES_MAX;

/// Members a group may have, whatever their part in it.
pub const MEMBERS_MAX: usize = 7;

/// Bytes of a snapshot in one message.
pub const CHUNK_BYTES_MAX: usize = 4096;

/// Largest snapshot taken from another member.
pub const SNAPSHOT_BYTES_MAX: usize = 1 << 30;

/// Bytes of entries that one message of Raft carries, unless a single entry is larger.
pub const APPEND_BYTES_MAX: u64 = 1024;

/// Bytes of the largest payload of an entry of the group's log: an order entry and its kind.
pub const PAYLOAD_BYTES_MAX: usize = ORDER_ENTRY_BYTES_MAX + 1;

const ENTRY_HEAD_BYTES: usize = 24;
const RAFT_HEAD_BYTES: usize = 80;
// A message of the most entries fits one `send`: to the library the smallest has 4 bytes, here a head and none.
const _: () = assert!(RAFT_HEAD_BYTES + 64 + (1 + ENTRY_HEAD_BYTES / 4) * APPEND_BYTES_MAX as usize <= SEND_BYTES_MAX);
const _: () = assert!(RAFT_HEAD_BYTES + 64 + ENTRY_HEAD_BYTES + PAYLOAD_BYTES_MAX <= SEND_BYTES_MAX);

/// First bytes of messages: no others' between nodes, so that one that goes astray is understood by nobody.
const HELLO: u8 = 65;
const FOUND: u8 = 66;
const RAFT: u8 = 67;
const HEARD: u8 = 68;
const CHUNK: u8 = 69;

/// Raft's messages that members send each other, with their numbers on the wire.
const RAFT_TYPES: [(u8, MessageType); 11] = [
    (1, MessageType::MsgAppend),
    (2, MessageType::MsgAppendResponse),
    (3, MessageType::MsgRequestVote),
    (4, MessageType::MsgRequestVoteResponse),
    (5, MessageType::MsgHeartbeat),
    (6, MessageType::MsgHeartbeatResponse),
    (7, MessageType::MsgTimeoutNow),
    (8, MessageType::MsgRequestPreVote),
    (9, MessageType::MsgRequestPreVoteResponse),
    (10, MessageType::MsgTransferLeader),
    (11, MessageType::MsgSnapshot),
];

/// A vote request's when leadership is handed over; a heartbeat's number of a question, see `ask_read`.
const CONTEXT_BYTES_MAX: usize = 16;

/// A change of the group's configuration, as an entry of its log carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reconfigure {
    /// What becomes of the member.
    pub kind: ConfChangeType,
    /// The member.
    pub id: u64,
}

/// Bytes of a [`Reconfigure`].
pub const RECONFIGURE_BYTES: usize = 9;

impl Reconfigure {
    /// Its bytes.
    pub fn encode(&self) -> [u8; RECONFIGURE_BYTES] {
        let mut bytes = [0; RECONFIGURE_BYTES];
        bytes[0] = match self.kind {
            ConfChangeType::AddNode => 1,
            ConfChangeType::RemoveNode => 2,
            ConfChangeType::AddLearnerNode => 3,
        };
        bytes[1..].copy_from_slice(&self.id.to_le_bytes());
        bytes
    }

    /// Reads it.
    ///
    /// # Errors
    /// When the bytes are no such change.
    pub fn decode(bytes: &[u8]) -> Result<Reconfigure, DecodeError> {
        let mut r = Bytes(bytes);
        let kind = match r.number(1)? {
            1 => ConfChangeType::AddNode,
            2 => ConfChangeType::RemoveNode,
            3 => ConfChangeType::AddLearnerNode,
            _ => return Err(DecodeError::Value("configuration change")),
        };
        let id = r.id()?;
        r.finish()?;
        Ok(Reconfigure { kind, id })
    }
}

/// A message between two members.
#[derive(Clone, Debug, PartialEq)]
pub enum GroupMessage<'a> {
    /// The first on every connection: who is there, and whether it has no part in any group yet.
    Hello {
        /// The member's identity: a restart without memory has another.
        id: u64,
        /// It has no state.
        blank: bool,
    },
    /// The first members of a new group: whoever has no state and is listed takes part.
    Found {
        /// Their identities.
        voters: Vec<u64>,
    },
    /// Of Raft's.
    Raft(Box<Message>),
    /// Which replicas the sender heard of late, one bit each in the order of their numbers.
    Heard {
        /// The bits.
        mask: &'a [u8],
    },
    /// A piece of a snapshot, the last of which completes the message of Raft's that announced it.
    Chunk {
        /// The snapshot's index in the group's log.
        index: u64,
        /// First byte of the piece.
        offset: u64,
        /// The piece.
        bytes: &'a [u8],
    },
}

/// The bytes not read yet.
pub(crate) struct Bytes<'a>(pub(crate) &'a [u8]);

impl<'a> Bytes<'a> {
    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let (head, rest) = self.0.split_at_checked(count).ok_or(DecodeError::Truncated)?;
        self.0 = rest;
        Ok(head)
    }

    /// A number of 1 to 8 bytes.
    pub(crate) fn number(&mut self, count: usize) -> Result<u64, DecodeError> {
        Ok(self.take(count)?.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }

    fn id(&mut self) -> Result<u64, DecodeError> {
        match self.number(8)? {
            0 => Err(DecodeError::Value("member")),
            id => Ok(id),
        }
    }

    pub(super) fn finish(&self) -> Result<(), DecodeError> {
        if self.0.is_empty() { Ok(()) } else { Err(DecodeError::Trailing) }
    }
}

/// Writes members' identities, their number first.
pub(super) fn put_ids(out: &mut Vec<u8>, ids: &[u64]) {
    out.push(ids.len() as u8);
    ids.iter().for_each(|id| out.extend_from_slice(&id.to_le_bytes()));
}

/// Reads identities: sorted by nobody, but each once.
pub(super) fn take_ids(r: &mut Bytes<'_>) -> Result<Vec<u64>, DecodeError> {
    let count = r.number(1)? as usize;
    if count > MEMBERS_MAX {
        return Err(DecodeError::Value("members"));
    }
    let ids = (0..count).map(|_| r.id()).collect::<Result<Vec<u64>, _>>()?;
    let twice = ids.iter().enumerate().any(|(at, id)| ids[..at].contains(id));
    if twice { Err(DecodeError::Value("members")) } else { Ok(ids) }
}

/// Writes who takes part.
pub(super) fn put_conf(out: &mut Vec<u8>, conf: &ConfState) {
    put_ids(out, &conf.voters);
    put_ids(out, &conf.learners);
}

/// Reads who takes part. Configurations are changed one member at a time, so there are no joint ones.
pub(super) fn take_conf(r: &mut Bytes<'_>) -> Result<ConfState, DecodeError> {
    let (voters, learners) = (take_ids(r)?, take_ids(r)?);
    if voters.is_empty() || voters.iter().any(|v| learners.contains(v)) {
        return Err(DecodeError::Value("members"));
    }
    Ok(ConfState { voters, learners, ..ConfState::default() })
}

/// Writes an entry of the group's log.
pub(super) fn put_entry(out: &mut Vec<u8>, entry: &Entry) {
    // The library's own encoding of a configuration change is not what is kept and sent: ours is its context.
    let (kind, data) = match entry.entry_type {
        EntryType::EntryNormal => (0, &entry.data),
        _ => (1, &entry.context),
    };
    out.extend_from_slice(&(data.len() as u32).to_le_bytes());
    out.extend_from_slice(&[kind, 0, 0, 0]);
    out.extend_from_slice(&entry.index.to_le_bytes());
    out.extend_from_slice(&entry.term.to_le_bytes());
    out.extend_from_slice(data);
}

/// Reads an entry of the group's log.
pub(super) fn take_entry(r: &mut Bytes<'_>) -> Result<Entry, DecodeError> {
    let len = r.number(4)? as usize;
    let kind = r.number(4)?;
    let mut entry = Entry { index: r.number(8)?, term: r.number(8)?, ..Entry::default() };
    if len > PAYLOAD_BYTES_MAX || entry.index == 0 || entry.term == 0 {
        return Err(DecodeError::Value("entry"));
    }
    let data = r.take(len)?;
    match kind {
        0 => entry.data = data.to_vec().into(),
        1 => {
            Reconfigure::decode(data)?;
            entry.entry_type = EntryType::EntryConfChange;
            entry.context = data.to_vec().into();
        }
        _ => return Err(DecodeError::Value("kind of entry")),
    }
    Ok(entry)
}

fn put_raft(out: &mut Vec<u8>, m: &Message) {
    let number = RAFT_TYPES.iter().find(|(_, t)| *t == m.msg_type).map(|(n, _)| *n);
    let Some(number) = number else { unreachable!("a member sends no {:?}", m.msg_type) };
    out.extend_from_slice(&[RAFT, number, m.reject.into(), m.entries.len() as u8]);
    out.extend_from_slice(&(m.context.len() as u32).to_le_bytes());
    let words = [m.to, m.from, m.term, m.log_term, m.index, m.commit, m.commit_term, m.request_snapshot, m.reject_hint];
    words.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
    out.extend_from_slice(&m.context);
    m.entries.iter().for_each(|entry| put_entry(out, entry));
    if m.msg_type == MessageType::MsgSnapshot {
        let meta = m.get_snapshot().get_metadata();
        out.extend_from_slice(&meta.index.to_le_bytes());
        out.extend_from_slice(&meta.term.to_le_bytes());
        out.extend_from_slice(&(m.get_snapshot().data.len() as u64).to_le_bytes());
        put_conf(out, meta.get_conf_state());
    }
}

/// Reads a message of Raft's. Of a snapshot the data follows in chunks; `snapshot_bytes` says how many bytes.
fn take_raft(r: &mut Bytes<'_>, snapshot_bytes: &mut u64) -> Result<Message, DecodeError> {
    let number = r.number(1)? as u8;
    let Some((_, msg_type)) = RAFT_TYPES.iter().find(|(n, _)| *n == number) else {
        return Err(DecodeError::Tag(number));
    };
    let reject = match r.number(1)? {
        0 => false,
        1 => true,
        _ => return Err(DecodeError::Value("reject")),
    };
    let (entries, context) = (r.number(1)?, r.number(4)? as usize);
    let mut m = Message { msg_type: *msg_type, reject, to: r.id()?, from: r.id()?, ..Message::default() };
    (m.term, m.log_term, m.index) = (r.number(8)?, r.number(8)?, r.number(8)?);
    (m.commit, m.commit_term) = (r.number(8)?, r.number(8)?);
    (m.request_snapshot, m.reject_hint) = (r.number(8)?, r.number(8)?);
    if context > CONTEXT_BYTES_MAX || m.term == 0 {
        return Err(DecodeError::Value("context or term"));
    }
    m.context = r.take(context)?.to_vec().into();
    for at in 0..entries {
        let entry = take_entry(r)?;
        if *msg_type != MessageType::MsgAppend || Some(entry.index) != m.index.checked_add(1 + at) {
            return Err(DecodeError::Value("entries"));
        }
        m.entries.push(entry);
    }
    if *msg_type == MessageType::MsgSnapshot {
        let (index, term, bytes) = (r.number(8)?, r.number(8)?, r.number(8)?);
        let conf = take_conf(r)?;
        if index == 0 || term == 0 || bytes > SNAPSHOT_BYTES_MAX as u64 {
            return Err(DecodeError::Value("snapshot"));
        }
        *snapshot_bytes = bytes;
        let meta = m.mut_snapshot().mut_metadata();
        (meta.index, meta.term) = (index, term);
        meta.set_conf_state(conf);
    }
    Ok(m)
}

impl<'a> GroupMessage<'a> {
    /// The message's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            GroupMessage::Hello { id, blank } => {
                out.extend_from_slice(&[HELLO, (*blank).into()]);
                out.extend_from_slice(&id.to_le_bytes());
            }
            GroupMessage::Found { voters } => {
                out.push(FOUND);
                put_ids(&mut out, voters);
            }
            GroupMessage::Raft(message) => put_raft(&mut out, message),
            GroupMessage::Heard { mask } => {
                out.push(HEARD);
                out.extend_from_slice(mask);
            }
            GroupMessage::Chunk { index, offset, bytes } => {
                out.push(CHUNK);
                out.extend_from_slice(&index.to_le_bytes());
                out.extend_from_slice(&offset.to_le_bytes());
                out.extend_from_slice(bytes);
            }
        }
        out
    }

    /// Reads a message; with that of a snapshot comes how many bytes of chunks follow it.
    ///
    /// # Errors
    /// When the bytes are not exactly one valid message.
    pub fn decode(bytes: &'a [u8]) -> Result<(GroupMessage<'a>, u64), DecodeError> {
        let mut r = Bytes(bytes);
        let mut snapshot_bytes = 0;
        let message = match r.number(1)? as u8 {
            HELLO => {
                let blank = match r.number(1)? {
                    0 => false,
                    1 => true,
                    _ => return Err(DecodeError::Value("blank")),
                };
                GroupMessage::Hello { id: r.id()?, blank }
            }
            FOUND => {
                let voters = take_ids(&mut r)?;
                if voters.is_empty() {
                    return Err(DecodeError::Value("members"));
                }
                GroupMessage::Found { voters }
            }
            RAFT => GroupMessage::Raft(Box::new(take_raft(&mut r, &mut snapshot_bytes)?)),
            HEARD => GroupMessage::Heard { mask: r.take(r.0.len())? },
            CHUNK => {
                let (index, offset) = (r.number(8)?, r.number(8)?);
                if r.0.is_empty() || r.0.len() > CHUNK_BYTES_MAX {
                    return Err(DecodeError::Value("chunk"));
                }
                GroupMessage::Chunk { index, offset, bytes: r.take(r.0.len())? }
            }
            tag => return Err(DecodeError::Tag(tag)),
        };
        r.finish()?;
        Ok((message, snapshot_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages() -> Vec<GroupMessage<'static>> {
        let entry = |index, data: &'static [u8]| Entry { index, term: 3, data: data.into(), ..Entry::default() };
        let change = Reconfigure { kind: ConfChangeType::AddLearnerNode, id: 77 };
        let mut conf = entry(12, b"");
        conf.entry_type = EntryType::EntryConfChange;
        conf.context = change.encode().to_vec().into();
        let mut append = Message { to: 1, from: 2, term: 3, log_term: 2, index: 10, commit: 9, ..Message::default() };
        append.msg_type = MessageType::MsgAppend;
        append.entries = vec![entry(11, b"abc"), conf].into();
        let mut vote = Message { to: 1, from: 2, term: 4, index: 10, log_term: 3, ..Message::default() };
        vote.msg_type = MessageType::MsgRequestVote;
        vote.context = b"CampaignTransfer"[..].into();
        let mut refusal = Message { to: 2, from: 1, term: 4, reject: true, reject_hint: 5, ..Message::default() };
        refusal.msg_type = MessageType::MsgAppendResponse;
        let mut snapshot = Message { to: 1, from: 2, term: 4, ..Message::default() };
        snapshot.msg_type = MessageType::MsgSnapshot;
        let meta = snapshot.mut_snapshot().mut_metadata();
        (meta.index, meta.term) = (8, 3);
        meta.set_conf_state(ConfState { voters: vec![1, 2], learners: vec![3], ..ConfState::default() });
        let raft = |m: &Message| GroupMessage::Raft(Box::new(m.clone()));
        vec![
            GroupMessage::Hello { id: 5, blank: true },
            GroupMessage::Found { voters: vec![5, 6, 7] },
            raft(&append),
            raft(&vote),
            raft(&refusal),
            raft(&snapshot),
            GroupMessage::Heard { mask: &[1, 2] },
            GroupMessage::Chunk { index: 8, offset: 4096, bytes: &[9; 10] },
        ]
    }

    #[test]
    fn messages_come_back_and_what_is_cut_off_is_refused() {
        for message in messages() {
            let bytes = message.encode();
            assert_eq!(GroupMessage::decode(&bytes), Ok((message.clone(), 0)));
            if matches!(message, GroupMessage::Heard { .. } | GroupMessage::Chunk { .. }) {
                continue; // What they carry ends where the message does.
            }
            for end in 0..bytes.len() {
                assert!(GroupMessage::decode(&bytes[..end]).is_err(), "{end} bytes of {message:?}");
            }
            assert!(GroupMessage::decode(&[&bytes[..], &[0]].concat()).is_err(), "{message:?}");
        }
    }

    #[test]
    fn flipped_bits_are_refused_or_read_as_another_message() {
        for message in messages() {
            let bytes = message.encode();
            for bit in 0..8 * bytes.len() {
                let mut flipped = bytes.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                if let Ok(read) = GroupMessage::decode(&flipped) {
                    assert_ne!(read, (message.clone(), 0));
                }
            }
        }
    }

    #[test]
    fn impossible_values_are_refused() {
        assert!(GroupMessage::decode(&GroupMessage::Hello { id: 0, blank: false }.encode()).is_err());
        assert!(GroupMessage::decode(&GroupMessage::Found { voters: vec![] }.encode()).is_err());
        assert!(GroupMessage::decode(&GroupMessage::Found { voters: vec![4, 4] }.encode()).is_err());
        assert!(GroupMessage::decode(&GroupMessage::Found { voters: (1..=8).collect() }.encode()).is_err());
        assert_eq!(GroupMessage::decode(&[]), Err(DecodeError::Truncated));
        assert_eq!(GroupMessage::decode(&[9]), Err(DecodeError::Tag(9)));
    }
}
