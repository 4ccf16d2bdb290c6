//! Entries that the disk has lost: fetched from another replica of the shard, and given to others that have lost them.
//!
//! A reader's thread that meets rot waits, with whoever asked it; this replica asks the others for what is missing, one
//! after the other, and hands on what one of them has. The thread verifies that and writes it in place. See "Rot" in
//! DESIGN.md.

use std::collections::VecDeque;

use antelog_protocol::Lsn;
use antelog_protocol::wire::node::{FETCHED_HEAD_BYTES, NodeMessage, Place};

use super::disk::{entries, entry_bytes};
use super::peers::replica_peer;
use super::{Life, ReplicaAgent};
use crate::node::mailbox::{MailSender, Mailbox};
use crate::storage::{Mark, OldRead, Request, Rot};
use crate::transport::{PeerId, SEND_BYTES_MAX, Transport};

/// A replica is waited for as long as so many reports take, and those that are not connected for twice as long.
pub(super) const PATIENCE_REPORTS: u64 = 4;
/// Bytes of the log that one message takes.
const PIECE_BYTES: usize = SEND_BYTES_MAX - FETCHED_HEAD_BYTES;

/// What a reader's thread waits for.
#[derive(Debug)]
struct Wanted {
    before: Mark,
    until: u64,
    answer: MailSender<Option<(u16, Vec<u8>)>>,
    /// Replicas that were asked, by their bits.
    asked: u8,
    /// The one that has not answered, and until when it may.
    from: Option<(u16, u64)>,
    /// Those that are not connected are waited for until then.
    ends_ns: u64,
    /// What has come of the answer.
    bytes: Vec<u8>,
}

/// What another replica wants.
#[derive(Debug)]
struct Question {
    number: u16,
    before: Mark,
    until: u64,
}

/// The answer to one that is on its way.
#[derive(Debug)]
struct Answer {
    number: u16,
    before: Mark,
    state: State,
}

#[derive(Debug)]
enum State {
    /// The disk was asked, with this token.
    Asked(u64),
    /// So many of these bytes have left.
    Read(Vec<u8>, usize),
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Repairs {
    rot: Option<Mailbox<Rot>>,
    wanted: Option<Wanted>,
    /// Slot of the last entry that nobody had: the operator knows of it.
    told: Option<Lsn>,
    questions: VecDeque<Question>,
    answer: Option<Answer>,
}

impl Repairs {
    pub(super) fn new(rot: Option<Mailbox<Rot>>) -> Repairs {
        Repairs { rot, ..Repairs::default() }
    }

    /// Whether a reader's thread has said something that can be taken in.
    pub(super) fn waits(&self) -> bool {
        self.wanted.is_none() && self.rot.as_ref().is_some_and(Mailbox::waits)
    }

    pub(super) fn deadline_ns(&self) -> Option<u64> {
        let wanted = self.wanted.as_ref()?;
        Some(wanted.from.map_or(wanted.ends_ns, |(_, until_ns)| until_ns))
    }

    /// A replica's connection is another: nothing is on its way from or to it any more.
    pub(super) fn forget(&mut self, number: u16) {
        if let Some(wanted) = &mut self.wanted {
            wanted.from.take_if(|(from, _)| *from == number);
            wanted.asked &= !(1 << number);
        }
        self.questions.retain(|question| question.number != number);
        self.answer.take_if(|answer| answer.number == number);
    }

    /// Another replica has answered, or begun to.
    pub(super) fn on_fetched(&mut self, peer: PeerId, at: u64, left: u64, bytes: &[u8]) {
        let is_from = |wanted: &&mut Wanted| wanted.from.is_some_and(|(number, _)| replica_peer(number) == peer);
        let Some(wanted) = self.wanted.as_mut().filter(is_from) else { return };
        let had = wanted.bytes.len() as u64;
        let end = at.checked_add(bytes.len() as u64).and_then(|end| end.checked_add(left));
        if at != wanted.before.at + had || bytes.is_empty() || end.is_none_or(|end| end > wanted.until) {
            // It has nothing, or something else than was asked for.
            wanted.from = None;
            return;
        }
        wanted.bytes.extend_from_slice(bytes);
        if left == 0
            && let Some(Wanted { answer, bytes, from: Some((number, _)), .. }) = self.wanted.take()
        {
            answer.send(Some((number, bytes)));
        }
    }

    /// The disk has answered what another replica wants. What is not bound may become something else.
    fn on_read(&mut self, token: u64, read: OldRead, bound: Lsn) {
        let Some(Answer { before, state, .. }) = &mut self.answer else { return };
        if !matches!(state, State::Asked(asked) if *asked == token) {
            return;
        }
        let same = |begins: &Mark| (begins.at, begins.lsn, begins.crc) == (before.at, before.lsn, before.crc);
        let mut bytes = read.ok().filter(|(begins, _)| same(begins)).map(|(_, bytes)| bytes).unwrap_or_default();
        let is_bound = entries(&bytes).take_while(|(_, header)| header.lsn.plus(header.count.into()) <= bound);
        let end = is_bound.last().map_or(0, |(at, header)| at + entry_bytes(&header));
        bytes.truncate(end);
        *state = State::Read(bytes, 0);
    }
}

impl<T: Transport> ReplicaAgent<T> {
    /// Another replica has lost what follows a place.
    pub(super) fn on_fetch(&mut self, at: usize, before: Place, until: u64) {
        let number = self.peers[at].number;
        self.repairs.questions.retain(|question| question.number != number);
        self.repairs.questions.push_back(Question { number, before: before.into(), until });
    }

    /// Has rotten entries of this replica's disk replaced, and gives others what they have lost; returns the work done.
    pub(super) fn mend(&mut self, now_ns: u64) -> usize {
        let mut work = 0;
        while let Some((token, read)) = self.catch_up.as_mut().and_then(|catch_up| catch_up.take()) {
            let bound = self.bound();
            self.repairs.on_read(token, read, bound);
            work += 1;
        }
        while self.repairs.waits()
            && let Some(rot) = self.repairs.rot.as_mut().and_then(Mailbox::take)
        {
            self.on_rot(now_ns, rot);
            work += 1;
        }
        if self.repairs.wanted.is_some() {
            self.ask_for_wanted(now_ns);
        }
        if self.repairs.answer.is_some() || !self.repairs.questions.is_empty() {
            work += self.answer_questions();
        }
        work
    }

    /// Everything below this slot is bound, and known to be.
    fn bound(&self) -> Lsn {
        match &self.life {
            Some(Life::Leading(leader)) => leader.shard.committed(),
            Some(Life::Following(follower) | Life::Fencing(follower, _)) => follower.bound().lsn,
            None => Lsn(0),
        }
    }

    fn on_rot(&mut self, now_ns: u64, rot: Rot) {
        match rot {
            Rot::Found { before, until, answer } => {
                self.counters.rot_found.add(1);
                let ends_ns = now_ns + 2 * PATIENCE_REPORTS * self.config.report_every_ns;
                let wanted = Wanted { before, until, answer, asked: 0, from: None, ends_ns, bytes: Vec::new() };
                self.repairs.wanted = Some(wanted);
            }
            Rot::Repaired { before: Mark { at, lsn, .. }, bytes, giver } => {
                self.counters.rot_repaired.add(1);
                self.repairs.told = None;
                self.warn(format!(
                    "the disk had lost entries at offset {at}, slot {lsn}: {bytes} bytes of replica {giver} were written in \
                     place"
                ));
            }
            Rot::NotRepaired { lsn, error } => {
                self.warn(format!(
                    "the disk has lost the entry of slot {lsn}, and it cannot be written in place: {error}"
                ));
            }
        }
    }

    /// Asks the next replica for what a reader's thread waits for, if the last one has not got it.
    fn ask_for_wanted(&mut self, now_ns: u64) {
        let patience_ns = PATIENCE_REPORTS * self.config.report_every_ns;
        let Some(wanted) = &mut self.repairs.wanted else { return };
        if wanted.from.is_some_and(|(_, until_ns)| now_ns < until_ns) {
            return;
        }
        wanted.from = None;
        let asked = wanted.asked;
        if let Some(peer) = self.peers.iter_mut().find(|p| p.greeting.is_some() && asked & p.bit() == 0) {
            wanted.asked |= peer.bit();
            wanted.from = Some((peer.number, now_ns + patience_ns));
            wanted.bytes.clear();
            peer.say(NodeMessage::Fetch { before: wanted.before.into(), until_bytes: wanted.until });
        } else if now_ns >= wanted.ends_ns || self.peers.iter().all(|p| asked & p.bit() != 0) {
            let Mark { at, lsn, .. } = wanted.before;
            wanted.answer.send(None);
            self.repairs.wanted = None;
            if self.repairs.told.replace(lsn) != Some(lsn) {
                self.warn(format!(
                    "the disk has lost entries at offset {at}, slot {lsn}, and no other replica has them now: reading them \
                     says 'unavailable'"
                ));
            }
        }
    }

    /// Goes on with giving others what they have lost, one after the other; returns the work done.
    fn answer_questions(&mut self) -> usize {
        if self.repairs.answer.is_none() {
            let Some(Question { number, before, until }) = self.repairs.questions.pop_front() else { return 0 };
            let state = self.look_for(before, until).map_or(State::Read(Vec::new(), 0), State::Asked);
            self.repairs.answer = Some(Answer { number, before, state });
        }
        let Some(Answer { number, before, state: State::Read(bytes, sent) }) = &mut self.repairs.answer else {
            return 0;
        };
        let mut buffer = [0; SEND_BYTES_MAX];
        loop {
            let piece = &bytes[*sent..bytes.len().min(*sent + PIECE_BYTES)];
            let left_bytes = (bytes.len() - *sent - piece.len()) as u64;
            let message = NodeMessage::Fetched { at_bytes: before.at + *sent as u64, left_bytes, bytes: piece };
            let len = message.encode(&mut buffer);
            if self.transport.send(replica_peer(*number), &buffer[..len]).is_err() {
                return 0;
            }
            *sent += piece.len();
            if left_bytes == 0 {
                self.repairs.answer = None;
                return 1;
            }
        }
    }

    /// Asks the disk for whole entries behind a mark: the question's token, if they may be there.
    fn look_for(&mut self, before: Mark, until: u64) -> Option<u64> {
        let (disk, catch_up) = (self.disk.as_ref()?, self.catch_up.as_mut()?);
        let most = before.at.saturating_add(catch_up.chunk_bytes());
        let to = until.min(most).min(disk.store.written());
        // What is rotten here too is not asked of whoever asks.
        (to > before.at).then(|| catch_up.ask(Request::Range { from: before.at, to, mended: false })).flatten()
    }
}
