//! A group of several members: Raft's state machine with its log, its timer and its messages.
//!
//! The library decides; here is what it leaves open: who the members are, when it is later, what is kept, and in which
//! bytes members talk. Nothing here does I/O or looks at a clock.

mod haste;
mod kept;
mod members;

use std::collections::VecDeque;
use std::mem::take;

use antelog_protocol::wire::DecodeError;
use raft::eraftpb::{ConfChange, EntryType, Message, MessageType};
use raft::{Config, RawNode, SnapshotStatus, StateRole};

use super::journal::{Journal, Record, Recovered};
use super::store::Store;
use super::wire::{APPEND_BYTES_MAX, CHUNK_BYTES_MAX, GroupMessage, MEMBERS_MAX, Reconfigure};

/// Ticks of Raft after which a member that heard nothing of a leader asks for votes, at the earliest.
const ELECTION_TICKS: usize = 10;
/// Between two members' patience: far more than a message's way, so that they do not ask at once.
const ELECTION_STEP_TICKS: usize = 3;
/// Between a leader's signs of life.
const HEARTBEAT_TICKS: usize = 2;
/// Messages of Raft under way to one member.
const INFLIGHT_MAX: usize = 64;
/// Messages waiting for one member; beyond that they are lost, which Raft allows.
const OUTBOX_MAX: usize = 512;
/// Entries kept for members that are behind; one further behind gets a snapshot.
const KEPT_ENTRIES: usize = 4096;
/// Entries beyond those after which the log is cut.
const CUT_AFTER_ENTRIES: usize = 4096;
/// Ticks for which a replica that was heard counts as heard.
const HEARD_TICKS: u64 = 10;

/// What a member of a group is made of.
#[derive(Debug)]
pub struct GroupParts {
    /// The members' nodes, sorted; a member's number is its place.
    pub nodes: Vec<u16>,
    /// This member's number.
    pub own: usize,
    /// The member's identity, see [`member_id`]; unless the journal knows another.
    pub id: u64,
    /// Raft's tick, in nanoseconds.
    pub tick_ns: u64,
    /// How many replicas there are.
    pub replicas: usize,
    /// Where the log is kept, and what was kept there before. `None`: in memory only.
    pub journal: Option<(Box<dyn Journal>, Recovered)>,
}

/// What a member learns from its group, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Learned {
    /// A payload is committed.
    Committed(Vec<u8>),
    /// All that was committed so far is replaced by this state: the member was too far behind.
    Installed(Vec<u8>),
    /// This member leads: all entries of former leaders were learned before this.
    Leads {
        /// Its term.
        term: u64,
    },
    /// It leads no more.
    Follows,
}

/// What was received breaks the rules: the connection is to be ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Garbage(pub DecodeError);

impl From<DecodeError> for Garbage {
    fn from(error: DecodeError) -> Garbage {
        Garbage(error)
    }
}

const fn garbage(what: &'static str) -> Garbage {
    Garbage(DecodeError::Value(what))
}

/// A member as another one sees it.
#[derive(Debug, Default)]
struct Other {
    connected: bool,
    /// Its identity on this connection, once it has said it.
    id: Option<u64>,
    blank: bool,
    outbox: VecDeque<Vec<u8>>,
    /// A snapshot on its way there: index, bytes, and how many of them are sent.
    giving: Option<(u64, Vec<u8>, usize)>,
    /// One on its way here: what announced it, its size, and what came so far.
    taking: Option<(Box<Message>, usize, Vec<u8>)>,
    /// Replicas it heard, and when it said so.
    heard: Vec<u8>,
    heard_at: u64,
}

/// See the module's text.
pub struct RaftGroup {
    nodes: Vec<u16>,
    own: usize,
    id: u64,
    tick_ns: u64,
    raw: RawNode<Store>,
    others: Vec<Other>,
    learned: VecDeque<Learned>,
    /// What waits until the record with this number is kept: Raft's number for it, and messages that promise it.
    held: VecDeque<(u64, u64, Vec<Message>)>,
    journal: Option<Box<dyn Journal>>,
    /// Records handed to the journal.
    handed: u64,
    /// The term in which this member was said to lead.
    leads: Option<u64>,
    /// The first members, for those of them that have not heard yet.
    founding: Vec<u64>,
    applied: u64,
    ticks: u64,
    tick_at_ns: Option<u64>,
    haste: haste::Haste,
    /// When each replica was last heard here, in ticks.
    heard_at: Vec<Option<u64>>,
    reads_asked: u64,
    reads_granted: u64,
}

/// The identity of a node's member: 48 bits of its incarnation, and the node.
pub fn member_id(incarnation: u64, node: u16) -> u64 {
    (incarnation << 16 | u64::from(node)).max(1)
}

/// The node of a member.
pub fn node_of(id: u64) -> u16 {
    id as u16
}

fn raw_node(id: u64, own: usize, store: Store, applied: u64) -> RawNode<Store> {
    let patience = ELECTION_TICKS + own * ELECTION_STEP_TICKS;
    let config = Config {
        id,
        election_tick: ELECTION_TICKS,
        heartbeat_tick: HEARTBEAT_TICKS,
        // One value to draw from: no randomness. Members differ instead.
        min_election_tick: patience,
        max_election_tick: patience + 1,
        applied,
        max_size_per_msg: APPEND_BYTES_MAX,
        max_inflight_msgs: INFLIGHT_MAX,
        check_quorum: true,
        pre_vote: true,
        ..Config::default()
    };
    let logger = slog::Logger::root(slog::Discard, slog::o!());
    match RawNode::new(&config, store, &logger) {
        Ok(raw) => raw,
        Err(error) => unreachable!("the group's constants are no configuration: {error}"),
    }
}

impl RaftGroup {
    /// A member that has heard of nobody yet.
    pub fn new(parts: GroupParts) -> RaftGroup {
        let GroupParts { nodes, own, id, tick_ns, replicas, journal } = parts;
        assert!(nodes.is_sorted() && own < nodes.len() && nodes.len() <= MEMBERS_MAX, "members by their nodes");
        let (journal, recovered) = journal.map_or((None, Recovered::default()), |(j, r)| (Some(j), r));
        let id = if recovered.id == 0 { id } else { recovered.id };
        let (applied, state) = (recovered.snapshot.get_metadata().index, recovered.snapshot.data.to_vec());
        let learned = if state.is_empty() { VecDeque::new() } else { VecDeque::from([Learned::Installed(state)]) };
        let mut others = Vec::new();
        others.resize_with(nodes.len(), Other::default);
        RaftGroup {
            id,
            tick_ns,
            haste: haste::Haste::default(),
            raw: raw_node(id, own, Store::recovered(recovered), applied),
            others,
            learned,
            held: VecDeque::new(),
            journal,
            handed: 0,
            leads: None,
            founding: Vec::new(),
            applied,
            ticks: 0,
            tick_at_ns: None,
            heard_at: vec![None; replicas],
            reads_asked: 0,
            reads_granted: 0,
            nodes,
            own,
        }
    }

    fn place_of(&self, id: u64) -> Option<usize> {
        self.nodes.binary_search(&node_of(id)).ok()
    }

    /// Begins a new group with these members, if this one has no state yet and is one of them.
    fn found(&mut self, voters: &[u64]) {
        let known = voters.iter().all(|v| self.place_of(*v).is_some());
        if !self.is_blank() || !voters.contains(&self.id) || !known {
            return;
        }
        let store = Store::founded(voters.to_vec());
        self.applied = store.last();
        self.raw = raw_node(self.id, self.own, store, self.applied);
        self.founding = voters.to_vec();
        self.held.clear();
        let (snapshot, hard) = (self.raw.store().kept_snapshot().clone(), self.raw.store().hard().clone());
        self.keep(&Record { snapshot: &snapshot, entries: &[], hard: Some(&hard) });
        self.greet();
        for place in 0..self.others.len() {
            self.tell_founding(place);
        }
    }

    fn is_blank(&self) -> bool {
        self.raw.store().is_blank() && self.raw.raft.term == 0
    }

    /// Founds the group when every configured member is there without state: the first of them says so.
    fn try_to_found(&mut self) {
        if self.own > 0 || !self.is_blank() {
            return;
        }
        let ids = self.others.iter().enumerate().map(|(place, other)| {
            if place == self.own { Some(self.id) } else { other.id.filter(|_| other.connected && other.blank) }
        });
        if let Some(voters) = ids.collect::<Option<Vec<u64>>>() {
            self.found(&voters);
        }
    }

    /// Whoever is one of the first members and does not know it is told.
    fn tell_founding(&mut self, place: usize) {
        let other = &self.others[place];
        if other.connected && other.blank && other.id.is_some_and(|id| self.founding.contains(&id)) {
            let voters = self.founding.clone();
            self.post(place, GroupMessage::Found { voters }.encode());
        }
    }

    fn post(&mut self, place: usize, message: Vec<u8>) {
        let other = &mut self.others[place];
        if other.connected && other.outbox.len() < OUTBOX_MAX {
            other.outbox.push_back(message);
        }
    }

    /// Tells every member who is here.
    fn greet(&mut self) {
        let hello = GroupMessage::Hello { id: self.id, blank: self.is_blank() }.encode();
        (0..self.others.len()).for_each(|place| self.post(place, hello.clone()));
    }

    /// A connection with a member begins.
    pub fn connected(&mut self, place: usize) {
        self.disconnected(place);
        self.others[place].connected = true;
        let hello = GroupMessage::Hello { id: self.id, blank: self.is_blank() };
        self.post(place, hello.encode());
    }

    /// The connection with a member is gone.
    pub fn disconnected(&mut self, place: usize) {
        let gone = take(&mut self.others[place]);
        if let Some(id) = gone.id {
            // Raft gives it nothing more until it hears what became of a snapshot, which may have left here and been lost.
            self.raw.report_snapshot(id, SnapshotStatus::Failure);
            self.look_at_lost(id);
            self.pump();
        }
    }

    /// A message of a member.
    ///
    /// # Errors
    /// When it breaks the rules.
    pub fn receive(&mut self, place: usize, bytes: &[u8]) -> Result<(), Garbage> {
        let (message, snapshot_bytes) = GroupMessage::decode(bytes)?;
        match message {
            GroupMessage::Hello { id, blank } => {
                if node_of(id) != self.nodes[place] || self.others[place].id.is_some_and(|known| known != id) {
                    return Err(garbage("member"));
                }
                (self.others[place].id, self.others[place].blank) = (Some(id), blank);
                self.tell_founding(place);
                self.try_to_found();
            }
            GroupMessage::Found { voters } => self.found(&voters),
            GroupMessage::Heard { mask } => {
                if mask.len() != self.heard_at.len().div_ceil(8) {
                    return Err(garbage("replicas heard"));
                }
                let other = &mut self.others[place];
                other.heard.clear();
                other.heard.extend_from_slice(mask);
                other.heard_at = self.ticks;
            }
            GroupMessage::Raft(message) => {
                if Some(message.from) != self.others[place].id || message.to != self.id {
                    return Err(garbage("member"));
                }
                if message.msg_type == MessageType::MsgSnapshot {
                    self.others[place].taking = Some((message, snapshot_bytes as usize, Vec::new()));
                    self.take_snapshot(place);
                } else {
                    self.check(&message)?;
                    let _ = self.raw.step(*message);
                }
            }
            GroupMessage::Chunk { index, offset, bytes } => {
                let Some((announced, size, came)) = &mut self.others[place].taking else {
                    return Err(garbage("chunk"));
                };
                let expected = announced.get_snapshot().get_metadata().index;
                if index != expected || offset != came.len() as u64 || came.len() + bytes.len() > *size {
                    return Err(garbage("chunk"));
                }
                came.extend_from_slice(bytes);
                self.take_snapshot(place);
            }
        }
        self.pump();
        Ok(())
    }

    /// Hands a snapshot to Raft when it is complete.
    fn take_snapshot(&mut self, place: usize) {
        if let Some((mut message, _, came)) = self.others[place].taking.take_if(|(_, size, came)| came.len() == *size) {
            message.mut_snapshot().data = came.into();
            let _ = self.raw.step(*message);
        }
    }

    /// What the library takes for a corrupted log, and ends the process for, ends the connection instead.
    fn check(&self, m: &Message) -> Result<(), Garbage> {
        let raft = &self.raw.raft;
        let last = raft.raft_log.last_index();
        let broken = match m.msg_type {
            MessageType::MsgHeartbeat => m.commit > last,
            MessageType::MsgAppendResponse => raft.state == StateRole::Leader && m.term == raft.term && m.index > last,
            MessageType::MsgAppend if m.term >= raft.term => m.entries.iter().any(|e| {
                e.index <= raft.raft_log.committed && raft.raft_log.term(e.index).is_ok_and(|t| t > 0 && t != e.term)
            }),
            _ => false,
        };
        if broken { Err(garbage("log")) } else { Ok(()) }
    }

    /// Time passed.
    pub fn tick(&mut self, now_ns: u64) {
        self.hasten(now_ns);
        if self.tick_at_ns.is_some_and(|at| now_ns < at) {
            return;
        }
        // A thread that did not run for long does not count that time: what was sent meanwhile still waits to be read.
        self.tick_at_ns = Some(now_ns + self.tick_ns);
        self.ticks += 1;
        self.try_to_found();
        self.settle(now_ns);
        let log = &self.raw.raft.raft_log;
        if self.raw.store().conf().voters == [self.id]
            && self.raw.raft.state == StateRole::Follower
            && log.persisted == log.last_index()
        {
            let _ = self.raw.campaign(); // There is nobody else to wait for.
        }
        self.raw.tick();
        self.pump();
        if self.leads.is_some() {
            self.replace_members();
            if self.disk_is_full() {
                // It learns nothing of what it does not keep, so nobody would.
                self.hand_over();
            }
        }
        if self.ticks.is_multiple_of(HEARTBEAT_TICKS as u64) {
            let mask = self.heard_mask();
            let message = GroupMessage::Heard { mask: &mask }.encode();
            (0..self.others.len()).for_each(|place| self.post(place, message.clone()));
        }
        self.pump();
    }

    /// When [`tick`](Self::tick), or [`settle`](Self::settle), has something to do.
    pub fn deadline_ns(&self) -> u64 {
        let journal_ns = self.journal.as_ref().and_then(|j| j.deadline_ns()).unwrap_or(u64::MAX);
        self.tick_at_ns.unwrap_or(0).min(journal_ns).min(self.haste.due_ns())
    }

    /// Proposes a payload; false when it is not taken: ask again later, if this member still leads.
    pub fn propose(&mut self, payload: Vec<u8>) -> bool {
        let taken = self.leads.is_some() && self.raw.propose(Vec::new(), payload).is_ok();
        self.pump();
        taken
    }

    /// What was learned next.
    pub fn learn(&mut self) -> Option<Learned> {
        self.learned.pop_front()
    }

    /// The term in which this member leads and has learned all that was committed before.
    pub fn leads(&self) -> Option<u64> {
        self.leads
    }

    /// The member that leads, as far as this one knows, and the term.
    pub fn leader(&self) -> (Option<usize>, u64) {
        (self.place_of(self.raw.raft.leader_id).filter(|_| self.raw.raft.leader_id != 0), self.raw.raft.term)
    }

    /// The identities of those that take part: with a vote, and without one yet.
    pub fn members(&self) -> (&[u64], &[u64]) {
        let conf = self.raw.store().conf();
        (&conf.voters, &conf.learners)
    }

    /// How many members are configured.
    pub fn size(&self) -> usize {
        self.nodes.len()
    }

    /// This member's identity.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Asks the others whether this member still leads: [`reads_granted`](Self::reads_granted) reaches the number
    /// returned when most have said so after this.
    pub fn ask_read(&mut self) -> u64 {
        self.reads_asked += 1;
        self.raw.read_index(self.reads_asked.to_le_bytes().to_vec());
        self.pump();
        self.reads_asked
    }

    /// The newest question of [`ask_read`](Self::ask_read) to which the answer was yes.
    pub fn reads_granted(&self) -> u64 {
        self.reads_granted
    }

    /// The next message to a member; it is asked for again until [`sent`](Self::sent).
    pub fn outgoing(&mut self, place: usize) -> Option<&[u8]> {
        let other = &mut self.others[place];
        if other.outbox.is_empty()
            && let Some((index, bytes, sent)) = &mut other.giving
        {
            let piece = &bytes[*sent..(*sent + CHUNK_BYTES_MAX).min(bytes.len())];
            let chunk = GroupMessage::Chunk { index: *index, offset: *sent as u64, bytes: piece }.encode();
            *sent += piece.len();
            if *sent == bytes.len() {
                other.giving = None;
            }
            other.outbox.push_back(chunk);
        }
        other.outbox.front().map(Vec::as_slice)
    }

    /// The message that [`outgoing`](Self::outgoing) showed has left.
    pub fn sent(&mut self, place: usize) {
        self.others[place].outbox.pop_front();
    }

    /// A replica was heard.
    pub fn hear(&mut self, replica: usize) {
        self.heard_at[replica] = Some(self.ticks);
    }

    /// Does all that Raft has become ready for.
    fn pump(&mut self) {
        while self.raw.has_ready() {
            let mut ready = self.raw.ready();
            for state in ready.take_read_states() {
                let mut word = [0; 8];
                word.copy_from_slice(&state.request_ctx);
                self.reads_granted = self.reads_granted.max(u64::from_le_bytes(word));
            }
            self.send(ready.take_messages());
            let snapshot = ready.snapshot().clone();
            if !snapshot.is_empty() {
                self.raw.mut_store().install(&snapshot);
                self.applied = snapshot.get_metadata().index;
                if !snapshot.data.is_empty() {
                    self.learned.push_back(Learned::Installed(snapshot.data.to_vec()));
                } // Else of a new group: nothing was committed.
            }
            let entries = ready.take_entries();
            let hard = ready.hs().cloned();
            let store = self.raw.mut_store();
            store.append(&entries);
            if let Some(hard) = &hard {
                store.set_hard(hard.clone());
            }
            let (number, messages) = (ready.number(), ready.take_persisted_messages());
            let committed = ready.take_committed_entries();
            self.raw.advance_append_async(ready);
            let record = self.keep(&Record { snapshot: &snapshot, entries: &entries, hard: hard.as_ref() });
            self.held.push_back((record, number, messages));
            if self.journal.is_none() {
                self.on_kept(record);
            }
            self.apply(&committed);
            self.advance_applied();
        }
        self.look_at_role();
        self.cut();
    }

    fn send(&mut self, messages: Vec<Message>) {
        for mut message in messages {
            let Some(place) = self.place_of(message.to) else { continue };
            if self.others[place].id != Some(message.to) {
                // Another incarnation is there, or nobody.
                if message.msg_type == MessageType::MsgSnapshot {
                    self.raw.report_snapshot(message.to, SnapshotStatus::Failure);
                }
                continue;
            }
            if message.msg_type == MessageType::MsgSnapshot {
                let index = message.get_snapshot().get_metadata().index;
                let bytes = GroupMessage::Raft(Box::new(message.clone())).encode();
                let data = take(&mut message.mut_snapshot().data).to_vec();
                self.others[place].giving = (!data.is_empty()).then_some((index, data, 0));
                self.post(place, bytes);
            } else {
                self.post(place, GroupMessage::Raft(Box::new(message)).encode());
            }
        }
    }

    fn apply(&mut self, entries: &[raft::eraftpb::Entry]) {
        for entry in entries {
            self.applied = entry.index;
            if entry.entry_type == EntryType::EntryNormal {
                if !entry.data.is_empty() {
                    self.learned.push_back(Learned::Committed(entry.data.to_vec()));
                }
            } else if let Ok(Reconfigure { kind, id }) = Reconfigure::decode(&entry.context) {
                let change = ConfChange { change_type: kind, node_id: id, ..ConfChange::default() };
                // A change that cannot be made, like the removal of the last, changes nothing, everywhere.
                if let Ok(conf) = self.raw.apply_conf_change(&change) {
                    self.raw.mut_store().set_conf(conf);
                }
            }
            if self.raw.raft.state == StateRole::Leader && entry.term == self.raw.raft.term && self.leads.is_none() {
                self.leads = Some(entry.term);
                self.learned.push_back(Learned::Leads { term: entry.term });
            }
        }
    }

    fn look_at_role(&mut self) {
        let raft = &self.raw.raft;
        if self.leads.is_some_and(|term| raft.state != StateRole::Leader || raft.term != term) {
            self.leads = None;
            self.learned.push_back(Learned::Follows);
        }
    }
}
