//! One client of a gate: its ring, its requests, and what it has still to be told. Everything is bounded; what does not
//! fit waits in the client's own ring or log, never in the gate's memory.

use std::collections::VecDeque;

use antelog_protocol::ledger::Ledger;
use antelog_protocol::wire::change::ChangeOutcome;
use antelog_protocol::wire::order::ORDER_ENTRY_BYTES_MAX;
use antelog_protocol::wire::session::{Reply, Request, SESSION_HEAD_BYTES_MAX};
use antelog_protocol::{ChangeError, ClientId, Outcome as AppendOutcome, Position, Refusal, ShardId};

use super::pace::Pace;
use super::stream::{self, Delivery, Source, Stream};
use super::{Common, GateConfig, Served, read};
use crate::access::{Access, Grant};
use crate::channel::Ring;
use crate::node::bus;
use crate::node::replica::CHANGES_MAX;
use crate::transport::{Full, PeerId, Transport};

/// Requests served for one client in one cycle.
const REQUESTS_PER_CYCLE: usize = 128;
/// Reads of one client that wait at a time.
const READS_MAX: usize = 1024;
/// Streams of one client.
const STREAMS_MAX: usize = 1024;
/// Questions for the tail of one client that wait at a time.
const TAILS_MAX: usize = 64;
/// Questions of one client what became of an append that wait at a time.
const OUTCOMES_MAX: usize = 64;

/// A small reply that waits for room in the client's ring.
#[derive(Clone, Copy, Debug)]
pub(super) enum Answer {
    Acknowledged { shard: ShardId, seq: u64, position: Position },
    Refused { shard: ShardId, attempt: u32, seq: u64, refusal: Refusal },
    Outcome { token: u64, outcome: AppendOutcome, next_seq: u64 },
    Tail { token: u64, position: Position, index: u64 },
    Changed { token: u64, outcome: ChangeOutcome },
    Closing,
    NotHere { stream: u32 },
    Crowded { stream: u32, subscriptions_max: u32 },
    Trimmed { stream: u32, head: Position },
}

/// How serving a client ended.
#[derive(Debug)]
pub(super) enum Outcome {
    /// `again`: something waits for room and must be looked at in the next cycle too.
    Done { count: usize, again: bool },
    /// The client broke the rules, or fell behind what the log keeps while it was being written to.
    CutOff { why: String },
}

/// Where a client is in the order stream.
#[derive(Debug)]
struct Following {
    next: u64,
    /// Messages of a snapshot not sent yet.
    snapshot: VecDeque<Vec<u8>>,
}

/// A client's appends at one port.
#[derive(Clone, Copy, Debug)]
struct Lane {
    /// The client's newest attempt to send what is outstanding, and the gate's number for it.
    attempt: u32,
    connection: u32,
    /// Appends handed to the shard in this attempt and not answered yet.
    outstanding: u32,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Client {
    session: ClientId,
    access: Access,
    /// Streams of one shard that it may have; 0: any number.
    subscriptions_max: usize,
    /// `None`: it may append as fast as it likes.
    pace: Option<Box<Pace>>,
    ring: Ring,
    /// By port.
    lanes: Vec<Lane>,
    /// Questions for the tail, and for outcomes, that wait.
    tails: usize,
    outcomes: usize,
    answers: VecDeque<Answer>,
    answers_max: usize,
    reads: VecDeque<read::Waiting>,
    streams: Vec<Stream>,
    following: Option<Following>,
    /// Some stream has more to deliver than a cycle's share.
    more: bool,
    /// The client's ring takes the largest record and the largest order entry. A first contact asks for a small one.
    answers_fit: bool,
    /// What was bound when the waiting reads were looked at last; `None` when a new one came since.
    reads_seen: Option<Position>,
}

impl Client {
    /// The client of a session's connection, which has a number of its own.
    pub(super) fn new(
        (session, connection): (ClientId, u32),
        grant: Grant,
        ring: Ring,
        config: &GateConfig,
        ports: usize,
    ) -> Client {
        let questions_max = TAILS_MAX + CHANGES_MAX + OUTCOMES_MAX;
        let answers_max = config.outstanding_max as usize * ports + STREAMS_MAX + questions_max;
        let largest = reply_bytes_max(config.record_bytes_max as usize);
        Client {
            session,
            access: grant.access,
            subscriptions_max: grant.limits.subscriptions_max as usize,
            pace: Pace::new(&grant.limits),
            answers_fit: ring.message_bytes_max() >= largest,
            reads_seen: None,
            ring,
            lanes: vec![Lane { attempt: 0, connection, outstanding: 0 }; ports],
            tails: 0,
            outcomes: 0,
            answers: VecDeque::with_capacity(answers_max),
            answers_max,
            reads: VecDeque::new(),
            streams: Vec::new(),
            following: None,
            more: false,
        }
    }

    pub(super) fn session(&self) -> ClientId {
        self.session
    }

    /// A shard answered an append.
    pub(super) fn answer(&mut self, port: usize, answer: Answer) {
        // An answer to an append of an earlier connection or attempt was not counted in this one.
        self.lanes[port].outstanding = self.lanes[port].outstanding.saturating_sub(1);
        self.reply(answer);
    }

    /// A shard refused an append that came with the gate's number of a connection or attempt. One of an earlier came again
    /// with the newest: only what becomes of that counts, for the shard may take it although it refused the first.
    pub(super) fn refused(&mut self, port: usize, connection: u32, (shard, seq): (ShardId, u64), refusal: Refusal) {
        let lane = self.lanes[port];
        if connection == lane.connection || connection == bus::ANY_CONNECTION {
            self.answer(port, Answer::Refused { shard, attempt: lane.attempt, seq, refusal });
        }
    }

    /// The answer to a question for the tail.
    pub(super) fn tail(&mut self, answer: Answer) {
        self.tails = self.tails.saturating_sub(1);
        self.reply(answer);
    }

    /// The answer to a question for an append's outcome.
    pub(super) fn outcome(&mut self, answer: Answer) {
        self.outcomes = self.outcomes.saturating_sub(1);
        self.reply(answer);
    }

    /// Queues a small reply. What a client can cause is bounded when it asks; beyond that bound lie only repeated
    /// answers to retries, which it does not need.
    pub(super) fn reply(&mut self, answer: Answer) {
        if self.answers.len() < self.answers_max {
            self.answers.push_back(answer);
        }
    }

    /// Takes requests, sends what there is to send.
    pub(super) fn serve<T: Transport>(&mut self, common: &mut Common, transport: &mut T, peer: PeerId) -> Outcome {
        let mut count = 0;
        let mut stalled = false;
        while count < REQUESTS_PER_CYCLE && !common.closing {
            match self.take_request(common) {
                Ok(Taken::Nothing) => break,
                Ok(Taken::Request) => count += 1,
                Ok(Taken::Stalled) => {
                    stalled = true;
                    break;
                }
                Err(why) => return Outcome::CutOff { why },
            }
        }
        let again = stalled || count == REQUESTS_PER_CYCLE;
        self.more = false;
        match self.send(common) {
            Ok(sent) => count += sent,
            Err(why) => return Outcome::CutOff { why },
        }
        let credited = self.ring.credit(transport, peer);
        let published = self.ring.publish(transport, peer);
        if let Some(fault) = self.ring.fault() {
            return Outcome::CutOff { why: fault.to_string() };
        }
        Outcome::Done { count, again: again || self.more || !credited || !published }
    }

    fn take_request(&mut self, common: &mut Common) -> Result<Taken, String> {
        let Some(bytes) = self.ring.peek().map_err(|e| e.to_string())? else { return Ok(Taken::Nothing) };
        let request = Request::decode(bytes).map_err(|e| format!("it sent what is no request: {e}"))?;
        let small = !self.answers_fit;
        if small && matches!(request, Request::Subscribe { .. } | Request::Follow | Request::Read { .. }) {
            return Err("its ring is too small for this cluster's records".into());
        }
        match request {
            Request::Append { shard, attempt, seq, .. } if self.access < Access::Append => {
                if self.answers.len() == self.answers_max {
                    return Ok(Taken::Stalled);
                }
                common.counters.forbidden.add(1);
                self.answers.push_back(Answer::Refused { shard, attempt, seq, refusal: Refusal::Forbidden });
            }
            Request::Append { shard, attempt, view, seq, record } => {
                if self.answers.len() == self.answers_max || is_early(&self.pace, common) {
                    return Ok(Taken::Stalled);
                }
                let bytes = record.len();
                let append = Append { session: self.session, shard, attempt, view, seq, record };
                match hand_over(common, append, &mut self.lanes) {
                    Ok(()) => {
                        if let Some(pace) = &mut self.pace {
                            pace.take(common.now_ns, bytes);
                        }
                    }
                    Err(Some(refusal)) => self.answers.push_back(Answer::Refused { shard, attempt, seq, refusal }),
                    Err(None) => return Ok(Taken::Stalled),
                }
            }
            Request::Subscribe { stream, shard, from, credit_bytes, view } => {
                self.subscribe(common, (stream, shard), ((from, view), credit_bytes))?;
            }
            Request::Unsubscribe { stream } => self.streams.retain(|s| s.id != stream),
            Request::Consumed { stream, bytes } => {
                if let Some(stream) = self.streams.iter_mut().find(|s| s.id == stream) {
                    stream.on_consumed(bytes)?;
                }
            }
            Request::Follow => {
                let next = common.ledger.applied_index() + 1;
                self.following = Some(Following { next, snapshot: snapshot(&common.ledger) });
            }
            Request::Read { token, position } => {
                if self.reads.len() == READS_MAX {
                    // Leaving it in the ring would hold up appends behind it, which may be what it waits for.
                    return Err(format!("it waits for more than {READS_MAX} reads"));
                }
                self.reads.push_back(read::Waiting::new(token, position));
                self.reads_seen = None;
            }
            Request::Cancel { token } => self.reads.retain(|waiting| waiting.token != token),
            Request::Unfollow => self.following = None,
            Request::Outcome { token, shard, client, seq } => {
                if !self.ask_outcome(common, token, shard, (client, seq)) {
                    return Ok(Taken::Stalled);
                }
            }
            Request::Tail { token } => {
                if self.tails == TAILS_MAX || !common.ask_tail(self.session, token) {
                    return Ok(Taken::Stalled);
                }
                self.tails += 1;
            }
            Request::Change { token, .. } if self.access < Access::Admin => {
                common.counters.forbidden.add(1);
                self.reply(Answer::Changed { token, outcome: Err(ChangeError::Forbidden) });
            }
            Request::Change { token, change } => {
                // Any shard has a line to the sequencer.
                if !common.ask(0, &bus::change(self.session, token, change)) {
                    return Ok(Taken::Stalled);
                }
            }
        }
        self.ring.consume();
        Ok(Taken::Request)
    }

    /// Asks a shard of this process what became of an append; false when there is no room now.
    fn ask_outcome(&mut self, common: &mut Common, token: u64, shard: ShardId, (client, seq): (ClientId, u64)) -> bool {
        let Served::Here(port) = common.served(shard) else {
            self.reply(Answer::Outcome { token, outcome: AppendOutcome::NotHere, next_seq: 0 });
            return true;
        };
        let asked = self.outcomes < OUTCOMES_MAX && common.ask(port, &bus::outcome(self.session, token, client, seq));
        self.outcomes += usize::from(asked);
        asked
    }

    fn subscribe(
        &mut self,
        common: &Common,
        (stream, shard): (u32, ShardId),
        (from, credit_bytes): ((Position, u32), u64),
    ) -> Result<(), String> {
        self.streams.retain(|s| s.id != stream);
        if self.streams.len() == STREAMS_MAX {
            return Err(format!("it asked for more than {STREAMS_MAX} streams"));
        }
        if self.has_enough(shard) {
            let subscriptions_max = self.subscriptions_max as u32;
            self.reply(Answer::Crowded { stream, subscriptions_max });
        } else {
            self.streams.push(Stream::new((stream, shard), from, credit_bytes, &common.ledger));
        }
        Ok(())
    }

    /// Whether every append that was handed over is answered, and the client has read all that it was told. A replica that
    /// does not lead any more answers nothing: the client sends it again where another one does.
    pub(super) fn is_settled(&self, serving: &[Option<u32>]) -> bool {
        let mut lanes = self.lanes.iter().zip(serving);
        let are_answered = lanes.all(|(lane, serving)| lane.outstanding == 0 || serving.is_none());
        self.answers.is_empty() && are_answered && self.ring.is_consumed()
    }

    /// Whether it has as many subscriptions as it may have: each has one stream of a shard.
    fn has_enough(&self, shard: ShardId) -> bool {
        let limit = self.subscriptions_max;
        limit > 0 && self.streams.iter().filter(|s| s.shard == shard).count() >= limit
    }

    /// Sends answers, the order stream, records and reads, as far as the ring has room.
    fn send(&mut self, common: &mut Common) -> Result<usize, String> {
        let mut count = 0;
        if !self.send_answers(&mut count) {
            return Ok(count);
        }
        // The order stream goes first: a client that catches up must not be kept from confirming what it has.
        count += self.relay(common);
        match self.deliver(common)? {
            (delivered, true) => count += delivered,
            (delivered, false) => return Ok(count + delivered),
        }
        // A stream that ended has left an answer, and nothing else may happen here for a long time.
        if self.send_answers(&mut count) {
            count += self.read(common);
        }
        Ok(count)
    }

    /// Sends the answers that wait. False: the ring is full.
    fn send_answers(&mut self, count: &mut usize) -> bool {
        while let Some(answer) = self.answers.front() {
            if push(&mut self.ring, &reply_of(*answer)).is_err() {
                return false;
            }
            self.answers.pop_front();
            *count += 1;
        }
        true
    }

    /// Delivers what the streams may have. False: the ring is full.
    fn deliver(&mut self, common: &mut Common) -> Result<(usize, bool), String> {
        let mut count = 0;
        let mut at = 0;
        while at < self.streams.len() {
            let stream = &mut self.streams[at];
            let (delivered, end) = match common.served(stream.shard) {
                Served::Here(port) => {
                    let source = Source {
                        port: &common.ports[port],
                        epoch: common.serving[port],
                        deliverable: common.deliverable[port],
                    };
                    stream::deliver(stream, &source, &common.ledger, &mut self.ring)
                }
                Served::Lost => stream::deliver_lost(stream, &common.ledger, &mut self.ring),
                Served::Soon => {
                    at += 1;
                    continue;
                }
                Served::Elsewhere => {
                    let stream = self.streams.swap_remove(at).id;
                    self.reply(Answer::NotHere { stream });
                    continue;
                }
            };
            count += delivered.messages;
            common.counters.delivered.add(delivered.records);
            match end {
                Delivery::Caught => at += 1,
                Delivery::More => {
                    self.more = true;
                    at += 1;
                }
                Delivery::RingFull => return Ok((count, false)),
                Delivery::Trimmed { head } => {
                    let stream = self.streams.swap_remove(at).id;
                    self.reply(Answer::Trimmed { stream, head });
                }
                Delivery::Failed(why) => return Err(format!("its next record cannot be read: {why}")),
                Delivery::Overrun => {
                    return Err("the log dropped a record while it was being delivered: subscribe again".into());
                }
            }
        }
        Ok((count, true))
    }

    fn relay(&mut self, common: &Common) -> usize {
        let Some(following) = &mut self.following else { return 0 };
        let mut count = 0;
        loop {
            while let Some(message) = following.snapshot.front() {
                if self.ring.push(&[message]).is_err() {
                    return count;
                }
                following.snapshot.pop_front();
                count += 1;
            }
            if following.next > common.ledger.applied_index() {
                return count;
            }
            let Some(entry) = common.relay.get(following.next) else {
                // Too far behind for entries one by one.
                following.next = common.ledger.applied_index() + 1;
                following.snapshot = snapshot(&common.ledger);
                continue;
            };
            if push(&mut self.ring, &Reply::Order { index: following.next, entry }).is_err() {
                return count;
            }
            following.next += 1;
            count += 1;
        }
    }

    /// Answers the reads whose position is bound.
    fn read(&mut self, common: &Common) -> usize {
        let committed = common.ledger.committed();
        if self.reads.is_empty() || self.reads_seen == Some(committed) {
            return 0;
        }
        self.reads_seen = Some(committed);
        let mut count = 0;
        for _ in 0..self.reads.len() {
            let Some(mut waiting) = self.reads.pop_front() else { break };
            match read::answer(&mut self.ring, common, &mut waiting) {
                Ok(true) => count += 1,
                Ok(false) => {
                    if waiting.position < committed {
                        // Bound, but its shard's progress or the disk's answer has not got here: look again.
                        self.reads_seen = None;
                    }
                    self.reads.push_back(waiting);
                }
                Err(Full) => {
                    self.reads_seen = None;
                    self.reads.push_front(waiting);
                    break;
                }
            }
        }
        count
    }
}

/// Bytes of the largest message a gate sends.
pub(crate) const fn reply_bytes_max(record_bytes_max: usize) -> usize {
    let body = if record_bytes_max > ORDER_ENTRY_BYTES_MAX { record_bytes_max } else { ORDER_ENTRY_BYTES_MAX };
    SESSION_HEAD_BYTES_MAX + body
}

/// An append as a session sent it.
struct Append<'a> {
    session: ClientId,
    shard: ShardId,
    attempt: u32,
    view: u32,
    seq: u64,
    record: &'a [u8],
}

/// Whether the client's next append comes too early; notes when it may be looked at again.
fn is_early(pace: &Option<Box<Pace>>, common: &mut Common) -> bool {
    let Some(free_ns) = pace.as_ref().map(|pace| pace.free_ns()).filter(|free_ns| *free_ns > common.now_ns) else {
        return false;
    };
    common.counters.held_back.add(1);
    common.paced_ns = Some(common.paced_ns.map_or(free_ns, |first| first.min(free_ns)));
    true
}

/// Hands an append over to its shard. `Err(None)`: not now.
fn hand_over(
    common: &mut Common,
    Append { session, shard, attempt, view, seq, record }: Append<'_>,
    lanes: &mut [Lane],
) -> Result<(), Option<Refusal>> {
    let limit_bytes = common.config.record_bytes_max;
    if let Some(failed) = common.ledger.last_failure(shard).filter(|f| f.view > view) {
        // The session does not know that what it sent before may be bound and missing.
        return Err(Some(Refusal::OldView { view: failed.view }));
    }
    let port = match common.served(shard) {
        Served::Here(port) => port,
        Served::Soon => return Err(None),
        Served::Elsewhere | Served::Lost => return Err(Some(Refusal::NotHere)),
    };
    if record.len() > limit_bytes as usize {
        return Err(Some(Refusal::TooLarge { limit_bytes }));
    }
    if lanes[port].attempt != attempt {
        lanes[port] = Lane { attempt, connection: common.next_connection(), outstanding: 0 };
    }
    let lane = &mut lanes[port];
    if lane.outstanding >= common.config.outstanding_max {
        return Err(None);
    }
    let head = bus::append_head(session, lane.connection, common.serving[port].unwrap_or(0), seq);
    if common.ports[port].requests.push(&[&head, record]).is_err() {
        common.counters.pushed_back.add(1);
        common.queue_full = Some((port, head.len() + record.len()));
        return Err(None);
    }
    lane.outstanding += 1;
    common.counters.appends.add(1);
    Ok(())
}

enum Taken {
    Nothing,
    Request,
    Stalled,
}

fn reply_of(answer: Answer) -> Reply<'static> {
    match answer {
        Answer::Acknowledged { shard, seq, position } => Reply::Acknowledged { shard, seq, position },
        Answer::Refused { shard, attempt, seq, refusal } => Reply::Refused { shard, attempt, seq, refusal },
        Answer::Outcome { token, outcome, next_seq } => Reply::OutcomeIs { token, outcome, next_seq },
        Answer::Tail { token, position, index } => Reply::TailIs { token, position, index },
        Answer::Changed { token, outcome } => Reply::ChangeIs { token, outcome },
        Answer::Closing => Reply::Closing,
        Answer::NotHere { stream } => Reply::NotHere { stream },
        Answer::Crowded { stream, subscriptions_max } => Reply::Crowded { stream, subscriptions_max },
        Answer::Trimmed { stream, head } => Reply::Trimmed { stream, head },
    }
}

pub(super) fn push(ring: &mut Ring, reply: &Reply<'_>) -> Result<(), Full> {
    let mut head = [0; SESSION_HEAD_BYTES_MAX];
    let (len, body) = reply.encode(&mut head);
    ring.push(&[&head[..len], body])
}

/// The messages that bring a new follower to the ledger's state.
fn snapshot(ledger: &Ledger) -> VecDeque<Vec<u8>> {
    let mut messages = VecDeque::new();
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    let mut head = [0; SESSION_HEAD_BYTES_MAX];
    let entries = ledger.snapshot(&mut buffer, |entry| {
        let (len, body) = Reply::Order { index: ledger.applied_index(), entry }.encode(&mut head);
        messages.push_back([&head[..len], body].concat());
    });
    let start =
        Reply::Snapshot { index: ledger.applied_index(), base: ledger.snapshot_base(), entries, view: ledger.view() };
    let (len, _) = start.encode(&mut head);
    messages.push_front(head[..len].to_vec());
    messages
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Region;
    use crate::transport::RegionKey;

    #[test]
    fn a_refusal_of_an_earlier_connection_is_not_taken_for_one_of_this() {
        let bytes = 64 << 10;
        let incoming = Region::new(Ring::region_bytes(bytes)).unwrap();
        let staging = Region::new(bytes).unwrap();
        let ring = Ring::new(incoming, staging, RegionKey(0), bytes, bytes);
        let config = GateConfig {
            clients_max: 1,
            ring_bytes: bytes,
            outstanding_max: 4,
            record_bytes_max: 100,
            free_cuts_max: 16,
            prefault: false,
        };
        let mut client = Client::new((ClientId(7), 2), Grant::default(), ring, &config, 1);
        // The append went to the shard on both connections; it was closed when it saw the first and is open again.
        client.lanes[0].outstanding = 1;
        let (shard, seq) = (ShardId(0), 5);
        let closed = Refusal::Closed { instead: ShardId(1) };
        client.refused(0, 1, (shard, seq), closed);
        assert_eq!((client.answers.len(), client.lanes[0].outstanding), (0, 1));
        client.answer(0, Answer::Acknowledged { shard, seq, position: Position(9) });
        assert_eq!((client.answers.len(), client.lanes[0].outstanding), (1, 0));
        client.refused(0, 2, (shard, seq), closed);
        assert_eq!(client.answers.len(), 2);
    }
}
