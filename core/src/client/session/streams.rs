//! Subscriptions and their streams: what gates deliver goes into a merge, what the merge makes of it goes to the owner.
//!
//! A subscription has one [`Merge`] and one *stream* for each of its shards. Stream and subscription numbers carry a
//! generation, so what is still under way for an ended one is recognised and dropped.
//!
//! **Memory is bounded.** A stream may have received at most `stream_credit_bytes` that were not handed out; the credit is
//! given back in quarters as the merge passes what it received, and a stream is subscribed anew, after a reconnect, only
//! once everything received before was handed out. What was handed out and is not confirmed is kept too, for
//! re-delivery: that is bounded by the lease, because nothing is delivered beyond the granted windows.

use std::collections::VecDeque;

use antelog_protocol::client::{Content, Event, Merge, Scope, Slots};
use antelog_protocol::ledger::{Failed, Ledger};
use antelog_protocol::limits::NUMBER_MAX;
use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::wire::session::{Request, stream_bytes};
use antelog_protocol::{Lsn, Position, ShardId};

use super::gate::Gate;
use super::routes::Routes;
use super::{POOL_BYTES, POOL_RECORDS};
use crate::client::pool::RecordPool;
use crate::client::{Record, SessionHandler, SubscriptionId};

/// A million streams, and generations enough that a number is not used again while messages of its last use are under way.
const INDEX_BITS: u32 = 20;

/// Number of the next entry at `index` of a table: the generation above, the index below.
fn numbered(index: usize, generation: u32) -> u32 {
    (generation << INDEX_BITS) | index as u32
}

fn index_of(number: u32) -> usize {
    (number & ((1 << INDEX_BITS) - 1)) as usize
}

/// Received bytes up to a position, given back together.
#[derive(Clone, Copy, Debug, Default)]
struct Chunk {
    end: Position,
    bytes: u64,
}

#[derive(Debug)]
struct Stream {
    number: u32,
    subscription: usize,
    shard: ShardId,
    gate: usize,
    /// Subscribed on the current connection.
    sent: bool,
    /// Not before this time, after so many gates in a row said that they do not serve the shard.
    retry_ns: u64,
    pauses: u32,
    /// Received since the stream began, and of that given back, in credit bytes.
    received: u64,
    returned: u64,
    /// What was told to the gate of `returned`.
    reported: u64,
    /// Received and not handed out: full quarters, and the one that is filling.
    chunks: VecDeque<Chunk>,
    filling: Chunk,
    /// It is in the list of streams with something to send.
    due: bool,
}

#[derive(Debug)]
struct Subscription {
    id: SubscriptionId,
    scope: Scope,
    from: Position,
    /// `None` until the cluster's map is known.
    merge: Option<Merge<Record>>,
    streams: Vec<usize>,
    /// It is in the list of subscriptions to poll.
    dirty: bool,
    /// When the merge passes this position, a stream has credit to give back.
    settle_at: Position,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Streams {
    pool: RecordPool,
    subscriptions: Vec<Option<Subscription>>,
    streams: Vec<Option<Stream>>,
    generation: u32,
    credit_bytes: u64,
    dirty: Vec<usize>,
    due: Vec<usize>,
    goodbyes: Vec<(usize, u32)>,
    /// Subscriptions made before the map was known, or since it was last looked at.
    unplaced: bool,
    live: usize,
}

impl Streams {
    pub(super) fn new(credit_bytes: u64) -> Streams {
        Streams {
            subscriptions: Vec::new(),
            streams: Vec::new(),
            generation: 0,
            credit_bytes,
            pool: RecordPool::new(POOL_RECORDS, POOL_BYTES),
            dirty: Vec::new(),
            due: Vec::new(),
            goodbyes: Vec::new(),
            unplaced: false,
            live: 0,
        }
    }

    /// Number of subscriptions.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    pub(super) fn subscribe(&mut self, scope: Scope, from: Position) -> SubscriptionId {
        let index = free_index(&mut self.subscriptions);
        self.generation = self.generation.wrapping_add(1);
        let id = SubscriptionId(numbered(index, self.generation));
        let (streams, settle_at) = (Vec::new(), Position(u64::MAX));
        self.subscriptions[index] =
            Some(Subscription { id, scope, from, merge: None, streams, dirty: false, settle_at });
        self.unplaced = true;
        self.live += 1;
        id
    }

    pub(super) fn unsubscribe(&mut self, id: SubscriptionId) {
        let index = index_of(id.0);
        if self.subscriptions.get(index).is_some_and(|s| s.as_ref().is_some_and(|s| s.id == id)) {
            self.end(index);
        }
    }

    fn end(&mut self, index: usize) {
        self.end_streams(index);
        self.subscriptions[index] = None;
        self.dirty.retain(|dirty| *dirty != index);
        self.live -= 1;
    }

    fn end_streams(&mut self, subscription: usize) {
        let Some(subscription) = &mut self.subscriptions[subscription] else { return };
        for stream in subscription.streams.drain(..) {
            if let Some(stream) = self.streams[stream].take()
                && stream.sent
            {
                self.goodbyes.push((stream.gate, stream.number));
            }
        }
        let streams = &self.streams;
        self.due.retain(|due| streams[*due].is_some());
    }

    /// Gives subscriptions that have none yet their merge and streams, once the map is known.
    pub(super) fn place(&mut self, ledger: &Ledger, routes: &Routes, handler: &mut impl SessionHandler) {
        if !std::mem::take(&mut self.unplaced) {
            return;
        }
        for index in 0..self.subscriptions.len() {
            let Some(Subscription { id, scope, from, merge: None, .. }) = self.subscriptions[index] else { continue };
            if let Scope::Shard(shard) = scope
                && routes.gate_of(shard).is_none()
            {
                self.end(index);
                handler.on_unknown_shard(id, shard);
                continue;
            }
            self.open(index, from, ledger, routes);
        }
    }

    /// A new merge and new streams from a position on.
    fn open(&mut self, index: usize, from: Position, ledger: &Ledger, routes: &Routes) {
        let Some(subscription) = &mut self.subscriptions[index] else { return };
        let shards = routes.shards();
        let mut merge = Merge::new(subscription.scope, &shards, from);
        merge.begin_in(ledger);
        let covered: Vec<ShardId> = merge.shards().collect();
        subscription.merge = Some(merge);
        subscription.settle_at = Position(u64::MAX);
        for shard in covered {
            let Some(gate) = routes.gate_of(shard) else { continue };
            let at = free_index(&mut self.streams);
            self.generation = self.generation.wrapping_add(1);
            self.streams[at] = Some(Stream {
                number: numbered(at, self.generation),
                subscription: index,
                shard,
                gate,
                sent: false,
                retry_ns: 0,
                pauses: 0,
                received: 0,
                returned: 0,
                reported: 0,
                chunks: VecDeque::new(),
                filling: Chunk::default(),
                due: true,
            });
            self.due.push(at);
            subscription.streams.push(at);
        }
    }

    /// The cluster's map changed: records may be larger.
    pub(super) fn set_limits(&mut self, record_bytes_max: usize) {
        // With everything handed out, less than a quarter and one record are unreported: three quarters hold two more.
        self.credit_bytes = self.credit_bytes.max(4 * stream_bytes(record_bytes_max));
        self.unplaced = true;
    }

    /// Shards may be served elsewhere than before, or by another primary: there their streams are resumed.
    pub(super) fn on_routes(&mut self, routes: &Routes) {
        for (index, stream) in self.streams.iter_mut().enumerate() {
            let Some(stream) = stream.as_mut().filter(|s| routes.has_changed(s.shard)) else { continue };
            (stream.retry_ns, stream.pauses) = (0, 0);
            let Some(gate) = routes.gate_of(stream.shard).filter(|gate| *gate != stream.gate) else { continue };
            self.generation = self.generation.wrapping_add(1);
            if let Some(ended) = stream.resume_under(numbered(index, self.generation)) {
                self.goodbyes.push((stream.gate, ended));
            }
            stream.gate = gate;
            mark(&mut stream.due, &mut self.due, index);
        }
    }

    /// What a shard that was lost delivers is told anew.
    fn resume_all_of(&mut self, shard: ShardId) {
        for (index, stream) in self.streams.iter_mut().enumerate() {
            let Some(stream) = stream.as_mut().filter(|s| s.shard == shard) else { continue };
            self.generation = self.generation.wrapping_add(1);
            if let Some(ended) = stream.resume_under(numbered(index, self.generation)) {
                self.goodbyes.push((stream.gate, ended));
            }
            mark(&mut stream.due, &mut self.due, index);
        }
    }

    /// The connection to a gate ended: its streams have to begin again. True if there are any.
    pub(super) fn on_down(&mut self, gate: usize) -> bool {
        let mut any = false;
        self.goodbyes.retain(|(g, _)| *g != gate);
        for (index, stream) in self.streams.iter_mut().enumerate() {
            let Some(stream) = stream.as_mut().filter(|s| s.gate == gate) else { continue };
            stream.sent = false;
            any = true;
            mark(&mut stream.due, &mut self.due, index);
        }
        any
    }

    /// The stream under a number, if it is not one that ended.
    #[inline]
    fn stream(&mut self, number: u32) -> Option<&mut Stream> {
        self.streams.get_mut(index_of(number))?.as_mut().filter(|s| s.number == number)
    }

    /// A record or no-ops arrived on a stream.
    #[inline]
    pub(super) fn on_slots(&mut self, gate: usize, ledger: &Ledger, number: u32, got: Got<'_>) -> Result<(), String> {
        let Got { lsn, position, count, view, content } = got;
        let content = match content {
            Content::NoOps if planted(Mutant::DeliverNoOps) => Content::Record(&[][..]),
            content => content,
        };
        let credit = self.credit_bytes;
        let Some(stream) = self.stream(number) else { return Ok(()) };
        if stream.gate != gate || !stream.sent {
            return Err("it delivers on a stream of another gate".into());
        }
        if count == 0 || lsn.0 > NUMBER_MAX || position.0 > NUMBER_MAX {
            return Err("a delivery has impossible numbers".into());
        }
        let bytes = stream_bytes(match content {
            Content::Record(record) => record.len(),
            _ => 0,
        });
        (stream.retry_ns, stream.pauses) = (0, 0);
        stream.received += bytes;
        if stream.received - stream.reported > credit {
            return Err(format!("it delivers beyond the credit of {credit} bytes"));
        }
        let end = position.plus(count);
        stream.filling.bytes += bytes;
        stream.filling.end = stream.filling.end.max(end);
        let closed = (stream.filling.bytes >= credit / 4).then(|| std::mem::take(&mut stream.filling));
        if let Some(chunk) = closed {
            stream.chunks.push_back(chunk);
        }
        let (shard, index) = (stream.shard, stream.subscription);
        let Some(subscription) = &mut self.subscriptions[index] else { return Ok(()) };
        if let Some(chunk) = closed {
            subscription.settle_at = subscription.settle_at.min(chunk.end);
        }
        let Some(merge) = &mut subscription.merge else { return Ok(()) };
        let content = match content {
            Content::Record(record) => Content::Record(self.pool.copy(record)),
            Content::NoOps => Content::NoOps,
            Content::Decreed => Content::Decreed,
            Content::Unavailable => Content::Unavailable,
        };
        let slots = Slots { shard, lsn, position, count, view, content };
        merge.on_slots(ledger, slots).map_err(|error| error.to_string())?;
        mark(&mut subscription.dirty, &mut self.dirty, index);
        Ok(())
    }

    pub(super) fn on_trimmed(&mut self, number: u32, head: Position, handler: &mut impl SessionHandler) {
        let Some(index) = self.stream(number).map(|s| s.subscription) else { return };
        let Some(id) = self.subscriptions[index].as_ref().map(|s| s.id) else { return };
        self.end(index);
        handler.on_trimmed(id, head);
    }

    pub(super) fn on_crowded(&mut self, number: u32, subscriptions_max: u32, handler: &mut impl SessionHandler) {
        let Some(index) = self.stream(number).map(|s| s.subscription) else { return };
        let Some(id) = self.subscriptions[index].as_ref().map(|s| s.id) else { return };
        self.end(index);
        handler.on_crowded(id, subscriptions_max);
    }

    /// The gate does not serve the stream's shard: asked again after a pause, or where the order stream says.
    pub(super) fn on_not_here(&mut self, gate: usize, number: u32, pause: impl Fn(u32) -> u64) {
        let Some(stream) = self.stream(number).filter(|s| s.gate == gate) else { return };
        stream.sent = false;
        stream.retry_ns = pause(stream.pauses);
        stream.pauses = stream.pauses.saturating_add(1);
        let index = index_of(number);
        let Some(stream) = &mut self.streams[index] else { return };
        mark(&mut stream.due, &mut self.due, index);
    }

    /// The ledger moved: every merge may have something to say.
    pub(super) fn on_moved(&mut self) {
        for (index, subscription) in self.subscriptions.iter_mut().enumerate() {
            let Some(subscription) = subscription else { continue };
            mark(&mut subscription.dirty, &mut self.dirty, index);
        }
    }

    pub(super) fn on_view_change(&mut self, failed: &Failed) {
        for subscription in self.subscriptions.iter_mut().flatten() {
            if let Some(merge) = &mut subscription.merge {
                merge.on_view_change(failed);
            }
        }
        self.resume_all_of(failed.shard);
        self.on_moved();
    }

    /// A snapshot took the ledger's place. A subscription learns of the views that it missed one by one; one that cannot,
    /// because they are forgotten, takes back what was not confirmed and begins again there.
    pub(super) fn on_anew(&mut self, ledger: &Ledger, routes: &Routes, handler: &mut impl SessionHandler) {
        let mut oldest = ledger.view();
        for index in 0..self.subscriptions.len() {
            let Some(Subscription { merge: Some(merge), .. }) = &mut self.subscriptions[index] else { continue };
            let known = merge.view();
            let missed = || ledger.failed().filter(|f| f.view > known);
            if missed().count() == ledger.view().saturating_sub(known) as usize {
                oldest = oldest.min(known);
                missed().for_each(|failed| merge.on_view_change(failed));
            } else {
                self.restart(index, ledger, routes, handler);
            }
        }
        for failed in ledger.failed().filter(|f| f.view > oldest) {
            self.resume_all_of(failed.shard);
        }
        self.on_moved();
    }

    fn restart(&mut self, index: usize, ledger: &Ledger, routes: &Routes, handler: &mut impl SessionHandler) {
        let Some(Subscription { id, merge: Some(merge), .. }) = &self.subscriptions[index] else { return };
        let (id, from) = (*id, merge.confirmed());
        if merge.next() > from {
            handler.on_event(id, Event::Fail { from });
        }
        self.end_streams(index);
        self.open(index, from, ledger, routes);
    }

    /// Hands out what is ready. The error, if any, is a contradiction between what was delivered and what is bound; the
    /// subscription began again.
    #[inline]
    pub(super) fn poll(
        &mut self,
        ledger: &Ledger,
        routes: &Routes,
        handler: &mut impl SessionHandler,
    ) -> (usize, Option<String>) {
        let (mut work, mut fault) = (0, None);
        let mut kept = 0;
        for at in 0..self.dirty.len() {
            let index = self.dirty[at];
            let (events, result) = match &mut self.subscriptions[index] {
                Some(subscription) => subscription.poll(ledger, handler),
                None => continue,
            };
            work += events;
            self.settle(index);
            match result {
                Polled::Done => {
                    if let Some(subscription) = &mut self.subscriptions[index] {
                        subscription.dirty = false;
                    }
                    continue;
                }
                Polled::NotReady => {}
                Polled::Contradiction(error) => {
                    fault = Some(error);
                    self.restart(index, ledger, routes, handler);
                }
            }
            self.dirty[kept] = index;
            kept += 1;
        }
        self.dirty.truncate(kept);
        (work, fault)
    }

    /// Gives back the credit of what the merge has passed.
    #[inline]
    fn settle(&mut self, index: usize) {
        let Some(subscription) = &mut self.subscriptions[index] else { return };
        let Some(merge) = &subscription.merge else { return };
        let next = merge.next();
        if next < subscription.settle_at {
            return;
        }
        subscription.settle_at = Position(u64::MAX);
        for &at in &subscription.streams {
            let Some(stream) = &mut self.streams[at] else { continue };
            while stream.chunks.front().is_some_and(|chunk| chunk.end <= next) {
                stream.returned += stream.chunks.pop_front().map_or(0, |chunk| chunk.bytes);
                mark(&mut stream.due, &mut self.due, at);
            }
            if let Some(chunk) = stream.chunks.front() {
                subscription.settle_at = subscription.settle_at.min(chunk.end);
            }
        }
    }

    /// Sends subscriptions, credit and goodbyes. Returns how much was sent and when to look again at the latest.
    #[inline]
    pub(super) fn pump(&mut self, gates: &mut [Gate], now_ns: u64) -> (usize, u64) {
        let (mut work, mut next_ns) = (0, u64::MAX);
        if !self.goodbyes.is_empty() {
            let before = self.goodbyes.len();
            self.goodbyes.retain(|(gate, stream)| {
                gates[*gate].up() && gates[*gate].push(&Request::Unsubscribe { stream: *stream }).is_err()
            });
            work += before - self.goodbyes.len();
        }
        let mut kept = 0;
        for at in 0..self.due.len() {
            let index = self.due[at];
            let Some(stream) = &mut self.streams[index] else { continue };
            let merge = self.subscriptions[stream.subscription].as_ref().and_then(|s| s.merge.as_ref());
            let Some(merge) = merge else { continue };
            let gate = &mut gates[stream.gate];
            gate.wanted = true;
            if stream.retry_ns > now_ns {
                next_ns = next_ns.min(stream.retry_ns);
            } else if stream.sync(gate, merge, self.credit_bytes) {
                stream.due = false;
                work += 1;
                continue;
            }
            self.due[kept] = index;
            kept += 1;
        }
        self.due.truncate(kept);
        (work, next_ns)
    }
}

/// What a gate delivered.
pub(super) struct Got<'a> {
    pub(super) lsn: Lsn,
    pub(super) position: Position,
    pub(super) count: u64,
    pub(super) view: u32,
    pub(super) content: Content<&'a [u8]>,
}

enum Polled {
    Done,
    NotReady,
    Contradiction(String),
}

impl Subscription {
    #[inline]
    fn poll(&mut self, ledger: &Ledger, handler: &mut impl SessionHandler) -> (usize, Polled) {
        let Some(merge) = &mut self.merge else { return (0, Polled::Done) };
        let mut work = 0;
        loop {
            if !handler.ready(self.id) {
                return (work, Polled::NotReady);
            }
            match merge.poll(ledger) {
                Ok(Some(event)) => handler.on_event(self.id, event),
                Ok(None) => return (work, Polled::Done),
                Err(contradiction) => return (work, Polled::Contradiction(contradiction.to_string())),
            }
            work += 1;
        }
    }
}

impl Stream {
    /// Begins again under another number: what is under way for the last one, given back if its gate has to be told, is
    /// dropped.
    fn resume_under(&mut self, number: u32) -> Option<u32> {
        let ended = std::mem::replace(&mut self.number, number);
        (self.retry_ns, self.pauses) = (0, 0);
        std::mem::take(&mut self.sent).then_some(ended)
    }

    /// Tells the gate what it has to know; true when it knows all.
    fn sync(&mut self, gate: &mut Gate, merge: &Merge<Record>, credit_bytes: u64) -> bool {
        let stream = self.number;
        if !self.sent {
            let from = merge.resume_from(self.shard).unwrap_or(merge.next());
            if merge.waiting(self.shard) {
                return false; // what was received before is not handed out yet
            }
            let view = merge.view();
            if gate.push(&Request::Subscribe { stream, shard: self.shard, from, credit_bytes, view }).is_err() {
                return false;
            }
            self.sent = true;
            (self.received, self.returned, self.reported) = (0, 0, 0);
            self.chunks.clear();
            self.filling = Chunk::default();
        } else if self.returned != self.reported {
            if gate.push(&Request::Consumed { stream, bytes: self.returned }).is_err() {
                return false;
            }
            self.reported = self.returned;
        }
        true
    }
}

/// Puts `index` into a list unless its flag says that it is there.
#[inline]
fn mark(flag: &mut bool, list: &mut Vec<usize>, index: usize) {
    if !*flag {
        *flag = true;
        list.push(index);
    }
}

fn free_index<T>(table: &mut Vec<Option<T>>) -> usize {
    table.iter().position(Option::is_none).unwrap_or_else(|| {
        table.push(None);
        table.len() - 1
    })
}
