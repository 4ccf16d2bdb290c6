//! The client's merge: turns shards' deliveries and the order stream into deliver, confirm and fail.
//!
//! Shards only deliver records; whether a position is bound, failed or a no-op by decree follows from the order stream
//! alone, through the client's own [`Ledger`]. The merge holds what it has handed out until it is confirmed, so that a
//! failure can be followed by re-delivery of the live shards' records without asking anybody. `PROTOCOL.md` §7.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::ledger::{Contradiction, Failed, Ledger};
use crate::mutant::{Mutant, planted};
use crate::types::{Lsn, Position, ShardId};

/// What a subscription covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Every shard, merged in position order.
    All,
    /// One shard, delivered as it comes.
    Shard(ShardId),
}

/// What a subscriber is told. `H` stands for a record's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<H> {
    /// A record. When `speculative`, hold outputs that depend on it until a `Confirm` passes its position.
    Deliver {
        /// Its position: predicted when `speculative`.
        position: Position,
        /// The shard that holds it.
        shard: ShardId,
        /// The record.
        record: H,
        /// Whether the position is not bound yet.
        speculative: bool,
        /// The view it was delivered in.
        view: u32,
    },
    /// Everything delivered below `upto` is bound as delivered.
    Confirm {
        /// First position not confirmed.
        upto: Position,
    },
    /// Everything delivered at or above `from` was speculated in vain; what still holds is delivered again.
    Fail {
        /// First position taken back: that of the first record lost.
        from: Position,
    },
}

/// What a shard delivered: one record, or consecutive slots without records.
#[derive(Clone, Debug)]
pub struct Slots<H> {
    /// The shard.
    pub shard: ShardId,
    /// The first slot.
    pub lsn: Lsn,
    /// Its position.
    pub position: Position,
    /// Slots: 1 for a record.
    pub count: u64,
    /// The view of the node that delivered.
    pub view: u32,
    /// `None` for no-ops.
    pub record: Option<H>,
}

#[derive(Clone, Debug)]
struct Held<H> {
    lsn: Lsn,
    position: Position,
    view: u32,
    /// Slots: 1 for a record.
    count: u64,
    /// `None` for no-ops.
    record: Option<H>,
}

#[derive(Debug)]
struct Stream<H> {
    shard: ShardId,
    queue: VecDeque<Held<H>>,
    /// The slot that the next delivery must begin with; unknown before the first.
    next_lsn: Option<Lsn>,
    /// Positions of this stream below this one have been received.
    next_position: Position,
    failed: Option<Failed>,
}

#[derive(Debug)]
struct Handed<H> {
    index: usize,
    held: Held<H>,
}

/// The merge of one subscription. Feed it with `on_…` and take events with [`Merge::poll`].
#[derive(Debug)]
pub struct Merge<H> {
    scope: Scope,
    streams: Vec<Stream<H>>,
    /// `Scope::All`: the next position to hand out. `Scope::Shard`: first position not passed.
    next: Position,
    confirmed: Position,
    view: u32,
    handed: VecDeque<Handed<H>>,
    fail: Option<Position>,
}

impl<H: Clone> Merge<H> {
    /// A subscription to `shards` (all of the cluster's for [`Scope::All`]) from a position on.
    pub fn new(scope: Scope, shards: &[ShardId], from: Position) -> Merge<H> {
        let streams = shards.iter().filter(|s| scope == Scope::All || scope == Scope::Shard(**s)).map(|shard| Stream {
            shard: *shard,
            queue: VecDeque::new(),
            next_lsn: None,
            next_position: from,
            failed: None,
        });
        Merge {
            scope,
            streams: streams.collect(),
            next: from,
            confirmed: from,
            view: 0,
            handed: VecDeque::new(),
            fail: None,
        }
    }

    /// First position not confirmed.
    pub fn confirmed(&self) -> Position {
        self.confirmed
    }

    /// First position not handed out.
    pub fn next(&self) -> Position {
        self.next
    }

    /// Where a stream must be resumed after its connection was lost.
    pub fn resume_from(&self, shard: ShardId) -> Option<Position> {
        self.streams.iter().find(|s| s.shard == shard).map(|s| s.next_position)
    }

    /// The shards subscribed to.
    pub fn shards(&self) -> impl Iterator<Item = ShardId> + '_ {
        self.streams.iter().map(|s| s.shard)
    }

    /// A record or no-ops of a shard arrived.
    ///
    /// # Errors
    /// When the stream skips a slot or a position contradicts the ledger.
    pub fn on_slots(&mut self, ledger: &Ledger, slots: Slots<H>) -> Result<(), Contradiction> {
        let Slots { shard, lsn, position, count, view, record } = slots;
        let Some(stream) = self.streams.iter_mut().find(|s| s.shard == shard) else { return Ok(()) };
        if stream.failed.is_some_and(|f| view < f.view && position >= f.from) {
            return Ok(()); // I14: later deliveries of a failed shard are dropped by view.
        }
        let known = ledger.position(shard, lsn);
        if known.is_some_and(|p| p != position) {
            return Err(Contradiction { invariant: "I8", what: "a delivery's position is not the granted one" });
        }
        if stream.next_lsn.is_some_and(|next| lsn < next) {
            return Ok(()); // Delivered before the connection was lost.
        }
        if stream.next_lsn.is_some_and(|next| lsn != next) || position < stream.next_position {
            return Err(Contradiction { invariant: "I7", what: "a shard's delivery skips a slot or goes back" });
        }
        if position < self.confirmed && !planted(Mutant::ConfirmPastAGap) {
            // Only a peer that breaks the protocol does this; `hand_out` may rely on it.
            return Err(Contradiction { invariant: "I2", what: "a delivery is new below the confirmed prefix" });
        }
        stream.next_lsn = Some(lsn.plus(count));
        stream.next_position = position.plus(count);
        stream.queue.push_back(Held { lsn, position, view, count, record });
        Ok(())
    }

    /// The view changed: what the failed shard has not bound is void. Call once per `ViewChange` applied.
    pub fn on_view_change(&mut self, failed: &Failed) {
        if failed.view <= self.view {
            return;
        }
        self.view = failed.view;
        let Some(index) = self.streams.iter().position(|s| s.shard == failed.shard) else { return };
        let lost = self
            .handed
            .iter()
            .find(|h| h.index == index && h.held.position >= failed.from && h.held.record.is_some())
            .map(|h| h.held.position);
        self.streams[index].failed = Some(*failed);
        self.streams[index].queue.retain(|held| held.position < failed.from);
        let Some(first_lost) = lost else { return };
        invariant!(I9, first_lost >= self.confirmed, "a failure at {first_lost} below the confirmed prefix");
        // Take back what was handed out from there on; live shards' records go to the front of their queues again.
        while self.handed.back().is_some_and(|h| h.held.position >= first_lost) {
            let Some(Handed { index: from, held }) = self.handed.pop_back() else { break };
            if from != index {
                self.streams[from].queue.push_front(held);
            }
        }
        self.next = self.next.min(first_lost);
        self.fail = Some(self.fail.map_or(first_lost, |f| f.min(first_lost)));
    }

    /// The next event that is ready, if any.
    ///
    /// # Errors
    /// When what was delivered contradicts what is bound (I8).
    pub fn poll(&mut self, ledger: &Ledger) -> Result<Option<Event<H>>, Contradiction> {
        if let Some(from) = self.fail {
            // What was bound before the failure is confirmed first.
            let upto = ledger.committed().min(from);
            if upto > self.confirmed {
                return self.confirm(ledger, upto).map(Some);
            }
            self.fail = None;
            return Ok(Some(Event::Fail { from }));
        }
        while let Some((index, held)) = self.take_ready(ledger) {
            self.pass(ledger, index, &held);
            if let Some(event) = self.hand_out(ledger, index, held) {
                return Ok(Some(event));
            }
        }
        let upto = ledger.committed().min(self.confirmable(ledger));
        if upto > self.confirmed {
            return self.confirm(ledger, upto).map(Some);
        }
        Ok(None)
    }

    fn take_ready(&mut self, ledger: &Ledger) -> Option<(usize, Held<H>)> {
        if self.scope != Scope::All {
            let held = self.streams.first_mut()?.queue.pop_front()?;
            return Some((0, held));
        }
        self.skip_decreed(ledger);
        let next = self.next;
        let is_next = |s: &Stream<H>| s.queue.front().is_some_and(|held| held.position == next);
        let index = match ledger.locate(next) {
            Some(slot) => {
                self.streams.iter().position(|s| s.shard == slot.shard).filter(|i| is_next(&self.streams[*i]))
            }
            None => self.streams.iter().position(is_next),
        };
        let held = self.streams[index?].queue.pop_front()?;
        Some((index?, held))
    }

    /// Slots of failed shards up to their lease end are no-ops by decree.
    fn skip_decreed(&mut self, ledger: &Ledger) {
        while self.streams.iter().any(|s| s.failed.is_some()) {
            let Some(slot) = ledger.locate(self.next) else { return };
            let failed = self.streams.iter().find(|s| s.shard == slot.shard).and_then(|s| s.failed);
            if !failed.is_some_and(|f| self.next >= f.from && self.next < f.lease_end) {
                return;
            }
            self.next = self.next.plus(1);
        }
    }

    /// Moves `next` past slots that are about to be handed out.
    fn pass(&mut self, ledger: &Ledger, index: usize, held: &Held<H>) {
        let end = held.position.plus(held.count);
        self.next = match self.scope {
            Scope::All => end,
            // Positions between this slot and the shard's next one belong to others: they are passed too.
            Scope::Shard(shard) => {
                let after = held.lsn.plus(held.count);
                let known = ledger.first_known() <= held.position;
                let next = self.streams[index].queue.front().map(|h| h.position);
                next.or_else(|| ledger.position(shard, after).filter(|_| known)).unwrap_or(end).max(end)
            }
        };
    }

    fn hand_out(&mut self, ledger: &Ledger, index: usize, held: Held<H>) -> Option<Event<H>> {
        let speculative = held.position >= ledger.committed();
        let early = planted(Mutant::ConfirmPastAGap);
        invariant!(
            I2,
            held.position >= self.confirmed || early,
            "position {} is delivered after its confirm",
            held.position
        );
        let stream = &self.streams[index];
        let record = held.record.clone();
        let (shard, position, view) = (stream.shard, held.position, held.view);
        if position.plus(held.count) > self.confirmed {
            self.handed.push_back(Handed { index, held });
        }
        // I16: no-ops count as positions and never reach the user.
        let record = record?;
        Some(Event::Deliver { position, shard, record, speculative, view })
    }

    /// First position that may not be confirmed because it was not handed out.
    fn confirmable(&self, ledger: &Ledger) -> Position {
        if planted(Mutant::ConfirmPastAGap) {
            return ledger.committed();
        }
        let Scope::Shard(shard) = self.scope else { return self.next };
        let Some(stream) = self.streams.first() else { return self.next };
        let next_lsn = stream.next_lsn.or_else(|| ledger.first_lsn_at(shard, self.next));
        match next_lsn {
            // The shard's next slot bounds the confirm; without a grant it lies beyond all that is bound.
            Some(lsn) if ledger.first_known() <= self.next => {
                ledger.position(shard, lsn).unwrap_or(ledger.committed()).max(self.next)
            }
            _ => self.next,
        }
    }

    fn confirm(&mut self, ledger: &Ledger, upto: Position) -> Result<Event<H>, Contradiction> {
        invariant!(I2, upto > self.confirmed, "a confirm of {upto} goes back");
        while let Some(front) = self.handed.front() {
            let held = &front.held;
            if held.position >= upto {
                break;
            }
            let shard = self.streams[front.index].shard;
            let bound = ledger.position(shard, held.lsn);
            if bound.is_some_and(|p| p != held.position) {
                return Err(Contradiction { invariant: "I8", what: "a delivery is bound to another position" });
            }
            if held.position.plus(held.count) > upto {
                break;
            }
            self.handed.pop_front();
        }
        self.confirmed = upto;
        Ok(Event::Confirm { upto })
    }
}

#[cfg(test)]
mod tests;
