//! The session: one client's state machine over a transport.
//!
//! It connects to the gates it needs, numbers appends and sends them again after a lost connection, follows the order
//! stream at one gate, merges what shards deliver, and redirects reads. All of it happens in [`Session::duty_cycle`]; calls
//! in between only take note and stage. Nothing here blocks, sleeps or reads a clock.
//!
//! * `gate` — a connection and its ring; * `routes` — which gate serves a shard; * `watch` — silence;
//! * `appends`, `streams`, `order`, `questions` — one module for each kind of traffic; they know nothing of connections but
//!   "began" and "ended".
//!
//! **Gates are not trusted.** Every number is checked before it is used; a gate that contradicts itself, the ledger or the
//! protocol is fenced, reported through [`SessionHandler::on_connection`], and tried again after a pause.
//!
//! **Cost.** A record of a stream in order: one peek, one copy into its `Arc`, one push to and pop from the merge, one call
//! of the handler. Publishing, credit and flushing happen once per cycle, and only for gates with something to publish.

mod appends;
mod connect;
mod gate;
mod options;
mod order;
mod questions;
mod routes;
mod streams;
mod watch;

use std::os::fd::RawFd;

use antelog_protocol::client::{Content, Scope};
use antelog_protocol::limits::SHARDS_MAX;
use antelog_protocol::wire::session::{ClusterMap, Reply, SESSION_HEAD_BYTES_MAX};
use antelog_protocol::{Change, ClientId, Position, ShardId};

pub use options::{AppendError, Dialed, Dialer, RING_BYTES_MIN, SessionOptions, SetupError};

use super::pool::RecordPool;
use super::{Record, SessionHandler, SubscriptionId};
use crate::channel::{CAPACITY_BYTES_MAX, CAPACITY_BYTES_MIN, message_bytes_max};
use crate::node::Waker;
use crate::transport::{DownReason, Event, PeerId, Transport};
use appends::{Appends, Settled};
use gate::{Gate, Link};
use order::{KEEP_ALIVE, Order, Told};
use questions::{Known, Questions};
use routes::Routes;
use streams::{Got, Streams};
use watch::Watch;

/// Messages read from one gate before the merges are polled: bounds the work of one cycle.
const MESSAGES_PER_CYCLE: usize = 256;
/// Transport events taken at once.
const EVENTS_PER_POLL: usize = 64;
/// Failed attempts in a row after which another node is asked for a newer map.
const FAILURES_UNTIL_NEW_MAP: u32 = 3;

/// Where the cluster's map is asked for while it is not known, or may be out of date.
#[derive(Debug)]
struct Seeds {
    next: usize,
    dialing: Option<String>,
    wanted: bool,
    failures: u32,
    retry_ns: u64,
}

/// Records whose memory may wait for reuse, in each direction.
pub(super) const POOL_RECORDS: usize = 4096;
/// Bytes of records whose memory may wait for reuse, in each direction.
pub(super) const POOL_BYTES: usize = 16 << 20;

/// See the module's text.
pub struct Session<T: Transport, D> {
    transport: T,
    dialer: D,
    options: SessionOptions,
    map: Option<ClusterMap>,
    gates: Vec<Gate>,
    seeds: Seeds,
    routes: Routes,
    appends: Appends,
    pool: RecordPool,
    streams: Streams,
    order: Order,
    questions: Questions,
    watch: Watch,
    /// Requests to the dialer that were not answered yet.
    dials: usize,
    /// An answer taken early, by `prepare_wait`.
    dialed: Option<Dialed<T::Link>>,
    random: u64,
    /// When connections have to be looked after.
    timer_ns: u64,
}

impl<T: Transport, D: Dialer<T::Link>> Session<T, D> {
    /// A session that connects when it is first driven. `transport` takes `options.gates_max` peers.
    ///
    /// # Errors
    /// When the options do not fit together.
    pub fn new(transport: T, dialer: D, options: SessionOptions) -> Result<Self, SetupError> {
        options.check()?;
        Ok(Session {
            transport,
            dialer,
            map: None,
            gates: Vec::new(),
            seeds: Seeds { next: 0, dialing: None, wanted: true, failures: 0, retry_ns: 0 },
            routes: Routes::default(),
            appends: Appends::default(),
            pool: RecordPool::new(POOL_RECORDS, POOL_BYTES),
            streams: Streams::new(options.stream_credit_bytes),
            order: Order::new(options.free_cuts_max),
            questions: Questions::default(),
            watch: Watch::default(),
            dials: 0,
            dialed: None,
            random: options.random_seed | 1,
            timer_ns: 0,
            options,
        })
    }

    /// The session's identity.
    pub fn client(&self) -> ClientId {
        self.options.client
    }

    /// The cluster's map; known after the first connection.
    pub fn map(&self) -> Option<&ClusterMap> {
        self.map.as_ref()
    }

    /// The transport, for its counters.
    pub fn transport(&self) -> &T {
        &self.transport
    }

    /// Names the thread to wake when a dial is answered.
    pub fn set_waker(&mut self, waker: Waker) {
        self.dialer.waker(waker);
    }

    /// Appends a record to a shard and returns its number; exactly one `on_acknowledged`, `on_refused` or `on_unknown` with
    /// that number follows, through any number of reconnects and whichever replica is the primary. Published by the next
    /// duty cycle.
    ///
    /// # Errors
    /// [`AppendError`]; nothing was sent then.
    #[inline]
    pub fn append(&mut self, shard: ShardId, record: &[u8]) -> Result<u64, AppendError> {
        if self.map.is_none() {
            return Err(AppendError::NotConnectedYet);
        }
        let pool = &mut self.pool;
        let seq = self.appends.append(&mut self.gates, shard, record, || pool.copy(record))?;
        self.after_append();
        Ok(seq)
    }

    /// As [`append`](Self::append), keeping a reference instead of a copy until the answer.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    #[inline]
    pub fn append_record(&mut self, shard: ShardId, record: &Record) -> Result<u64, AppendError> {
        if self.map.is_none() {
            return Err(AppendError::NotConnectedYet);
        }
        let seq = self.appends.append(&mut self.gates, shard, record, || record.clone())?;
        self.after_append();
        Ok(seq)
    }

    #[inline]
    fn after_append(&mut self) {
        if self.appends.behind() {
            self.timer_ns = 0; // its gate may have to be dialled
        }
    }

    /// Subscribes from a position on; also before the cluster's map is known.
    ///
    /// Memory: each of its streams holds at most [`SessionOptions::stream_credit_bytes`] that were not handed out, plus what
    /// was handed out and is not confirmed, which the granted windows bound. `Scope::All` covers the shards known when the
    /// subscription begins.
    pub fn subscribe(&mut self, scope: Scope, from: Position) -> SubscriptionId {
        self.timer_ns = 0;
        self.streams.subscribe(scope, from)
    }

    /// A shard that an owner may append to instead of one that is lost: one that is not lost and takes appends, as far as
    /// the session knows; different sessions are told different ones.
    pub fn another_shard(&self, than: ShardId) -> Option<ShardId> {
        let ledger = self.order.ledger();
        let is_open = |shard: &ShardId| ledger.open(*shard).unwrap_or(ledger.members().is_empty());
        let mut others = self.routes.shards();
        others.retain(|shard| *shard != than && !self.routes.is_lost(*shard) && is_open(shard));
        let nth = (self.options.client.0 % others.len().max(1) as u128) as usize;
        others.get(nth).copied()
    }

    /// Ends a subscription; nothing is reported for it any more. An ended one is ignored.
    pub fn unsubscribe(&mut self, id: SubscriptionId) {
        self.streams.unsubscribe(id);
    }

    /// Asks what a position holds; `on_read` follows once the position is bound, with `token`, the caller's name for it.
    pub fn read(&mut self, token: u64, position: Position) {
        let shard = self.order.ledger().locate(position).map(|slot| slot.shard);
        self.questions.read(token, position, shard);
        self.timer_ns = 0;
    }

    /// Asks for the first position that is not bound; `on_tail` follows.
    pub fn tail(&mut self, token: u64) {
        self.questions.tail(token);
        self.timer_ns = 0;
    }

    /// Asks what became of an append that this session or another made to a shard; `on_outcome` follows, after the shard's
    /// return if it is lost.
    ///
    /// For what `on_unknown` said of this session's own appends. Numbers of appends that are not in the log are used again
    /// by their session: another one may ask only about a session that appends no more.
    pub fn outcome(&mut self, token: u64, shard: ShardId, client: ClientId, seq: u64) {
        self.questions.outcome(token, shard, client, seq);
        self.timer_ns = 0;
    }

    /// Asks for a change of membership or ordering; `on_membership` follows once the order stream shows it done, or at once
    /// with the reason why it was not taken. Asked again after a lost connection, and made once.
    pub fn change(&mut self, token: u64, change: Change) {
        self.questions.change(token, Some(change));
        self.timer_ns = 0;
    }

    /// Asks who takes part in the log and how it is ordered; `on_membership` follows.
    pub fn membership(&mut self, token: u64) {
        self.questions.change(token, None);
        self.timer_ns = 0;
    }

    /// Forgets what was asked for under `token`: nothing follows for it. A change that was asked for may still be made.
    pub fn cancel(&mut self, token: u64) {
        self.questions.cancel(token);
    }

    /// Appends without an answer.
    pub fn outstanding(&self) -> usize {
        self.appends.outstanding()
    }

    /// True when no append and no question waits for its answer.
    pub fn idle(&self) -> bool {
        self.appends.outstanding() == 0 && self.questions.len() == 0
    }

    /// Does what can be done without blocking; returns how much that was.
    pub fn duty_cycle(&mut self, now_ns: u64, handler: &mut impl SessionHandler) -> usize {
        let mut work = self.take_events(now_ns, handler);
        if self.dials > 0 {
            work += self.take_dialed(now_ns, handler);
        }
        if now_ns >= self.timer_ns {
            work += self.look_after(now_ns, handler);
        }
        for gate in 0..self.gates.len() {
            if self.gates[gate].ready {
                work += self.read_gate(gate, now_ns, handler);
            }
        }
        let (events, fault) = self.streams.poll(self.order.ledger(), &self.routes, handler);
        work += events;
        if let (Some(fault), Some(relay)) = (fault, self.order.relay()) {
            self.disconnect(relay, &fault, now_ns, handler);
        }
        work + self.send(now_ns, handler)
    }

    /// When `duty_cycle` must run even if nothing arrives.
    pub fn deadline_ns(&self) -> Option<u64> {
        (self.timer_ns != u64::MAX).then_some(self.timer_ns)
    }

    /// Appends the descriptors that become readable when something arrives.
    pub fn wait_fds(&self, fds: &mut Vec<RawFd>) {
        self.transport.wait_fds(fds);
    }

    /// Called right before the thread may block: true when work waits already.
    pub fn prepare_wait(&mut self) -> bool {
        if self.dials > 0 && self.dialed.is_none() {
            self.dialed = self.dialer.take();
        }
        self.dialed.is_some() || self.gates.iter().any(|g| g.ready) || self.transport.prepare_wait()
    }

    fn take_events(&mut self, now_ns: u64, handler: &mut impl SessionHandler) -> usize {
        let mut events = [Event::Notified { peer: PeerId(0), value: 0 }; EVENTS_PER_POLL];
        let count = self.transport.poll(&mut events);
        for event in &events[..count] {
            match *event {
                Event::Notified { peer, .. } => {
                    if let Some(gate) = self.gates.get_mut(usize::from(peer.0)).filter(|g| g.up()) {
                        gate.ready = true;
                    }
                }
                Event::PeerDown { peer, reason } => {
                    let why = match reason {
                        DownReason::Closed => "the node closed the connection".to_owned(),
                        DownReason::Io(errno) => {
                            format!("the connection broke: {}", std::io::Error::from_raw_os_error(errno))
                        }
                        DownReason::Protocol => "the node broke the transport's rules".to_owned(),
                    };
                    self.disconnect(peer.0.into(), &why, now_ns, handler);
                }
                Event::Received { peer, message } => {
                    self.transport.release(message);
                    self.disconnect(peer.0.into(), "it sent a message outside its ring", now_ns, handler);
                }
                Event::Placed { .. } => {}
            }
        }
        count
    }

    /// Reads what a gate wrote, up to a limit.
    fn read_gate(&mut self, index: usize, now_ns: u64, handler: &mut impl SessionHandler) -> usize {
        let (mut work, mut fault, mut heard) = (0, None, Heard::default());
        let (least, most) = (self.options.backoff_min_ns.max(1), self.options.backoff_max_ns);
        while work < MESSAGES_PER_CYCLE {
            let Some(ring) = self.gates[index].ring() else { break };
            let message = match ring.peek() {
                Ok(Some(message)) => message,
                Ok(None) => {
                    self.gates[index].ready = false;
                    break;
                }
                Err(error) => {
                    fault = Some(error.to_string());
                    break;
                }
            };
            let parts = Parts {
                routes: &mut self.routes,
                appends: &mut self.appends,
                streams: &mut self.streams,
                order: &mut self.order,
                questions: &mut self.questions,
                heard: &mut heard,
                now_ns,
                pause_ns: (least, most.max(least)),
            };
            match Reply::decode(message) {
                Ok(reply) => fault = parts.dispatch(index, &reply, handler).err(),
                Err(error) => fault = Some(format!("it sent a malformed message: {error}")),
            }
            if fault.is_some() {
                break;
            }
            ring.consume();
            work += 1;
        }
        if work > 0 {
            self.gates[index].output = true;
        }
        if heard.is_closing {
            self.gates[index].closing = true;
            handler.on_connection(&self.gates[index].address, Some("the node is shutting down"));
        }
        if heard.not_here {
            self.doubt();
        }
        if let Some(fault) = fault {
            self.disconnect(index, &fault, now_ns, handler);
        }
        work
    }

    /// Sends what is due, publishes and flushes.
    fn send(&mut self, now_ns: u64, handler: &mut impl SessionHandler) -> usize {
        for (shard, first) in self.appends.take_asks() {
            self.questions.resolve(shard, first);
        }
        let (mut work, append_ns) = self.appends.pump(&mut self.gates, now_ns);
        let known = Known {
            routes: &self.routes,
            appends: &self.appends,
            relay: self.order.relay(),
            client: self.options.client,
            now_ns,
        };
        let (asked, ask_ns) = self.questions.pump(&mut self.gates, &known, handler);
        let (sent, stream_ns) = self.streams.pump(&mut self.gates, now_ns);
        work += asked + sent;
        self.timer_ns = self.timer_ns.min(append_ns).min(ask_ns).min(stream_ns).min(self.watch_ns(now_ns));
        self.order.pump(&mut self.gates);
        for index in 0..self.gates.len() {
            if let Some(at_ns) = self.gates[index].dial_at_ns() {
                self.timer_ns = self.timer_ns.min(at_ns); // wanted, perhaps, only since connections were looked after
            }
            if !self.gates[index].output {
                continue;
            }
            if let Err(fault) = self.gates[index].publish(&mut self.transport, PeerId(index as u16)) {
                self.disconnect(index, &fault, now_ns, handler);
            }
        }
        self.transport.flush();
        work
    }
}

/// What a message may touch, while its bytes are borrowed from the ring.
struct Parts<'a> {
    routes: &'a mut Routes,
    appends: &'a mut Appends,
    streams: &'a mut Streams,
    order: &'a mut Order,
    questions: &'a mut Questions,
    heard: &'a mut Heard,
    now_ns: u64,
    /// The shortest and the longest pause before somebody is asked again.
    pause_ns: (u64, u64),
}

/// What a gate said that concerns the whole session.
#[derive(Debug, Default)]
struct Heard {
    /// It does not serve what was asked of it: where it is served has to be learned.
    not_here: bool,
    /// It is about to end.
    is_closing: bool,
}

impl Parts<'_> {
    /// Acts on one message. An error is what the gate did wrong.
    #[inline]
    fn dispatch(mut self, gate: usize, reply: &Reply<'_>, handler: &mut impl SessionHandler) -> Result<(), String> {
        match *reply {
            Reply::Deliver { stream, lsn, position, view, record, .. } => {
                let got = Got { lsn, position, count: 1, view, content: Content::Record(record) };
                self.streams.on_slots(gate, self.order.ledger(), stream, got)
            }
            Reply::Acknowledged { shard, seq, position } => {
                if self.appends.acknowledged(shard, seq, position, self.order.ledger())? {
                    handler.on_acknowledged(shard, seq, position);
                }
                Ok(())
            }
            Reply::NoOps { stream, lsn, position, count, view } => {
                let got = Got { lsn, position, count: count.into(), view, content: Content::NoOps };
                self.streams.on_slots(gate, self.order.ledger(), stream, got)
            }
            Reply::Order { index, entry } => {
                if self.order.relay() == Some(gate) {
                    self.order.heard(self.now_ns);
                }
                let told = self.order.on_entry(gate, index, entry)?;
                self.act_on(told, handler);
                Ok(())
            }
            _ => self.dispatch_rare(gate, reply, handler),
        }
    }

    fn dispatch_rare(
        &mut self,
        gate: usize,
        reply: &Reply<'_>,
        handler: &mut impl SessionHandler,
    ) -> Result<(), String> {
        let (now_ns, (least, most)) = (self.now_ns, self.pause_ns);
        let until = |pauses: u32| now_ns.saturating_add(least.saturating_mul(1 << pauses.min(32)).min(most));
        match *reply {
            Reply::Decreed { stream, lsn, position, count, view } => {
                let got = Got { lsn, position, count: count.into(), view, content: Content::Decreed };
                self.streams.on_slots(gate, self.order.ledger(), stream, got)?;
            }
            Reply::Unavailable { stream, lsn, position, count, view } => {
                let got = Got { lsn, position, count: count.into(), view, content: Content::Unavailable };
                self.streams.on_slots(gate, self.order.ledger(), stream, got)?;
            }
            Reply::Snapshot { index, base, entries, view } => {
                let told = self.order.on_snapshot(gate, (index, base, entries, view))?;
                self.act_on(told, handler);
            }
            Reply::Refused { shard, attempt, seq, refusal } => {
                match self.appends.refused((gate, shard, attempt), seq, refusal)? {
                    Settled::Stale => {}
                    Settled::Done => handler.on_refused(shard, seq, refusal),
                    Settled::NotHere => {
                        self.appends.pause(shard, until);
                        self.heard.not_here = true;
                    }
                    Settled::Lost(view) => self.appends.on_lost(shard, view, handler),
                }
            }
            Reply::Trimmed { stream, head } => self.streams.on_trimmed(stream, head, handler),
            Reply::Closing => self.heard.is_closing = true,
            Reply::Crowded { stream, subscriptions_max } => {
                self.streams.on_crowded(stream, subscriptions_max, handler);
            }
            Reply::NotHere { stream } => {
                self.streams.on_not_here(gate, stream, until);
                self.heard.not_here = true;
            }
            Reply::ReadIs { token, result } => {
                let routes = (&*self.routes, gate);
                self.heard.not_here |= self.questions.on_read(routes, token, result, until, handler)?;
            }
            Reply::TailIs { token: KEEP_ALIVE, .. } if self.order.relay() == Some(gate) => self.order.is_there(now_ns),
            Reply::TailIs { token, position, index } => {
                self.questions.on_tail(self.order.ledger(), token, (position, index), handler)?;
            }
            Reply::ChangeIs { token, outcome } => {
                self.questions.on_change(self.order.ledger(), token, outcome, handler)?;
            }
            Reply::OutcomeIs { token, outcome, next_seq } => {
                let answer = (outcome, next_seq);
                let not_here = self.questions.on_outcome(gate, token, answer, self.appends, until, handler)?;
                self.heard.not_here |= not_here;
            }
            // Dispatched before.
            Reply::Deliver { .. } | Reply::Acknowledged { .. } | Reply::NoOps { .. } | Reply::Order { .. } => {}
        }
        Ok(())
    }

    /// Tells everybody what became of the ledger.
    fn act_on(&mut self, told: Told, handler: &mut impl SessionHandler) {
        match told {
            Told::None => return,
            Told::Moved => self.streams.on_moved(),
            Told::MembersChanged => self.reroute(),
            Told::ViewChanged => {
                if let Some(failed) = self.order.ledger().failed().last() {
                    self.streams.on_view_change(failed);
                }
                self.appends.on_failures(self.order.ledger(), false, handler);
                self.reroute();
            }
            Told::Anew { first } => {
                self.streams.on_anew(self.order.ledger(), self.routes, handler);
                self.reroute();
                self.appends.on_failures(self.order.ledger(), first, handler);
            }
        }
        self.questions.on_moved(self.order.ledger(), handler);
    }

    fn reroute(&mut self) {
        watch::reroute(self.routes, self.appends, self.streams, self.order, self.questions);
    }
}

#[cfg(test)]
mod tests;
