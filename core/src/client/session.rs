//! The session: one client's state machine over a transport.
//!
//! It connects to the gates it needs, numbers appends and sends them again after a lost connection, follows the order
//! stream at one gate, merges what shards deliver, and redirects reads. All of it happens in [`Session::duty_cycle`]; calls
//! in between only take note and stage. Nothing here blocks, sleeps or reads a clock.
//!
//! * `gate` — a connection and its ring; * `appends`, `streams`, `order`, `questions` — one module for each kind of
//!   traffic; they know nothing of connections but "began" and "ended".
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
mod streams;

use std::os::fd::RawFd;

use antelog_protocol::client::Scope;
use antelog_protocol::limits::SHARDS_MAX;
use antelog_protocol::wire::session::{ClusterMap, Reply, SESSION_HEAD_BYTES_MAX};
use antelog_protocol::{Change, ClientId, Position, ShardId};

pub use options::{AppendError, Dialed, Dialer, RING_BYTES_MIN, SessionOptions, SetupError};

use super::pool::RecordPool;
use super::{Record, SessionHandler, SubscriptionId};
use crate::channel::{CAPACITY_BYTES_MAX, CAPACITY_BYTES_MIN, message_bytes_max};
use crate::node::Waker;
use crate::transport::{DownReason, Event, PeerId, Transport};
use appends::Appends;
use gate::{Gate, Link};
use order::{Order, Told};
use questions::Questions;
use streams::{Got, Streams};

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
    appends: Appends,
    pool: RecordPool,
    streams: Streams,
    order: Order,
    questions: Questions,
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
            appends: Appends::default(),
            pool: RecordPool::new(POOL_RECORDS, POOL_BYTES),
            streams: Streams::new(options.stream_credit_bytes),
            order: Order::new(options.free_cuts_max),
            questions: Questions::default(),
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

    /// Appends a record to a shard and returns its number; exactly one `on_acknowledged` or `on_refused` with that number
    /// follows, through any number of reconnects. Published by the next duty cycle.
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
        let (events, fault) = self.streams.poll(self.order.ledger(), &self.appends, handler);
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
        let (mut work, mut fault, mut note, mut closing) = (0, None, None, false);
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
                appends: &mut self.appends,
                streams: &mut self.streams,
                order: &mut self.order,
                questions: &mut self.questions,
                note: &mut note,
                closing: &mut closing,
                retry_ns: now_ns.saturating_add(self.options.backoff_max_ns),
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
        self.gates[index].closing |= closing;
        if let Some(note) = note {
            handler.on_connection(&self.gates[index].address, Some(&note));
            self.seeds.wanted = true;
            self.timer_ns = 0;
        }
        if let Some(fault) = fault {
            self.disconnect(index, &fault, now_ns, handler);
        }
        work
    }

    /// Sends what is due, publishes and flushes.
    fn send(&mut self, now_ns: u64, handler: &mut impl SessionHandler) -> usize {
        let mut work = self.appends.pump(&mut self.gates);
        work += self.questions.pump(&mut self.gates, &self.appends);
        let (sent, retry_ns) = self.streams.pump(&mut self.gates, now_ns);
        work += sent;
        self.timer_ns = self.timer_ns.min(retry_ns);
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
    appends: &'a mut Appends,
    streams: &'a mut Streams,
    order: &'a mut Order,
    questions: &'a mut Questions,
    /// Something the owner should hear that is no reason to cut the gate off.
    note: &'a mut Option<String>,
    closing: &'a mut bool,
    retry_ns: u64,
}

impl Parts<'_> {
    /// Acts on one message. An error is what the gate did wrong.
    #[inline]
    fn dispatch(self, gate: usize, reply: &Reply<'_>, handler: &mut impl SessionHandler) -> Result<(), String> {
        let Parts { appends, streams, order, questions, note, closing, retry_ns } = self;
        match *reply {
            Reply::Deliver { stream, lsn, position, view, record, .. } => {
                let got = Got { lsn, position, count: 1, view, record: Some(record) };
                streams.on_slots(gate, order.ledger(), stream, got)
            }
            Reply::Acknowledged { shard, seq, position } => {
                if appends.settle(shard, seq, None)? {
                    handler.on_acknowledged(shard, seq, position);
                }
                Ok(())
            }
            Reply::NoOps { stream, lsn, position, count, view } => {
                let got = Got { lsn, position, count: count.into(), view, record: None };
                streams.on_slots(gate, order.ledger(), stream, got)
            }
            Reply::Order { index, entry } => {
                let told = order.on_entry(gate, index, entry)?;
                act_on(told, order, streams, appends, handler);
                questions.on_moved(order.ledger(), handler);
                Ok(())
            }
            Reply::Snapshot { index, base, entries, view } => {
                let told = order.on_snapshot(gate, (index, base, entries, view))?;
                act_on(told, order, streams, appends, handler);
                questions.on_moved(order.ledger(), handler);
                Ok(())
            }
            Reply::Refused { shard, seq, refusal } => {
                if appends.settle(shard, seq, Some(refusal))? {
                    handler.on_refused(shard, seq, refusal);
                }
                Ok(())
            }
            Reply::Trimmed { stream, head } => {
                streams.on_trimmed(stream, head, handler);
                Ok(())
            }
            Reply::Closing => {
                *closing = true;
                *note = Some("the node is shutting down".into());
                Ok(())
            }
            Reply::Crowded { stream, subscriptions_max } => {
                streams.on_crowded(stream, subscriptions_max, handler);
                Ok(())
            }
            Reply::NotHere { stream } => {
                let shard = streams.on_not_here(stream, retry_ns);
                *note =
                    shard.map(|shard| format!("it does not serve shard {shard}; the cluster's map may be out of date"));
                Ok(())
            }
            Reply::ReadIs { token, result } => questions.on_read(appends, token, result, handler),
            Reply::TailIs { token, position, index } => {
                questions.on_tail(order.ledger(), token, (position, index), handler)
            }
            Reply::ChangeIs { token, outcome } => questions.on_change(order.ledger(), token, outcome, handler),
        }
    }
}

/// Tells the subscriptions what became of the ledger.
fn act_on(told: Told, order: &Order, streams: &mut Streams, appends: &Appends, handler: &mut impl SessionHandler) {
    match told {
        Told::None => {}
        Told::Moved => streams.on_moved(),
        Told::ViewChanged => match order.ledger().failed().last() {
            Some(failed) => streams.on_view_change(failed),
            None => streams.on_moved(),
        },
        Told::ViewsMissed => streams.restart_all(order.ledger(), appends, handler),
    }
}

#[cfg(test)]
mod tests;
