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
    /// Bound positions that cannot be told: their shard is lost at present, or has returned without them. What is at them is
    /// neither delivered nor a no-op; what follows goes on behind them, and confirms pass them.
    Unavailable {
        /// The first of them.
        from: Position,
        /// The first behind them.
        to: Position,
    },
}

/// What a slot holds, as a shard's gate tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content<H> {
    /// A record.
    Record(H),
    /// Nothing: the slot was filled.
    NoOps,
    /// Nothing: positions that were to be the shard's and are void, because it was lost. They take none of its slots; the
    /// one named follows them.
    Decreed,
    /// It is bound, and no replica has it.
    Unavailable,
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
    /// What is there.
    pub content: Content<H>,
}

#[derive(Clone, Debug)]
struct Held<H> {
    lsn: Lsn,
    position: Position,
    view: u32,
    /// Slots: 1 for a record.
    count: u64,
    content: Content<H>,
}

impl<H> Held<H> {
    fn end(&self) -> Position {
        self.position.plus(self.count)
    }

    fn is_record(&self) -> bool {
        matches!(self.content, Content::Record(_))
    }

    /// Gives up what lies before a position.
    fn cut_before(&mut self, position: Position) {
        let passed = position.0.saturating_sub(self.position.0);
        (self.position, self.count) = (self.position.plus(passed), self.count - passed);
    }
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
    /// Deliveries of a gate that knows a newer view than the ledger, and what came behind them: they wait for the ledger.
    ahead: VecDeque<Slots<H>>,
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
            ahead: VecDeque::new(),
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

    /// The merge begins in a ledger's view: earlier failures took nothing from it.
    pub fn begin_in(&mut self, ledger: &Ledger) {
        for failed in ledger.failed() {
            if let Some(stream) = self.streams.iter_mut().find(|s| s.shard == failed.shard) {
                stream.failed = Some(*failed);
            }
        }
        self.view = ledger.view();
    }

    /// The newest view that it has heard of.
    pub fn view(&self) -> u32 {
        self.view
    }

    /// Whether anything that a shard delivered is not handed out.
    pub fn waiting(&self, shard: ShardId) -> bool {
        self.streams.iter().any(|s| s.shard == shard && !(s.queue.is_empty() && s.ahead.is_empty()))
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
        let Some(stream) = self.streams.iter_mut().find(|s| s.shard == slots.shard) else { return Ok(()) };
        if slots.view > ledger.view() || !stream.ahead.is_empty() {
            stream.ahead.push_back(slots);
            return Ok(());
        }
        self.take_slots(ledger, slots)
    }

    /// Deliveries that waited for the ledger's view.
    fn take_ahead(&mut self, ledger: &Ledger) -> Result<(), Contradiction> {
        for at in 0..self.streams.len() {
            while self.streams[at].ahead.front().is_some_and(|slots| slots.view <= ledger.view()) {
                let Some(slots) = self.streams[at].ahead.pop_front() else { break };
                self.take_slots(ledger, slots)?;
            }
        }
        Ok(())
    }

    fn take_slots(&mut self, ledger: &Ledger, slots: Slots<H>) -> Result<(), Contradiction> {
        let Slots { shard, lsn, position, count, view, content } = slots;
        let Some(stream) = self.streams.iter_mut().find(|s| s.shard == shard) else { return Ok(()) };
        let is_void = |f: &Failed| f.shard == shard && view < f.view && position >= f.from;
        if stream.failed.as_ref().is_some_and(is_void) || ledger.failed().any(is_void) {
            return Ok(()); // I14: later deliveries of a failed shard are dropped by view.
        }
        if let Content::Decreed = content {
            return self.on_decreed(ledger, shard, Held { lsn, position, view, count, content });
        }
        let known = ledger.position(shard, lsn);
        if known.is_some_and(|p| p != position) {
            return Err(Contradiction { invariant: "I8", what: "a delivery's position is not the granted one" });
        }
        // Delivered before the connection was lost, or from before the stream's beginning: a gate that learns of a
        // failure after it was asked goes back to that.
        let passed = match stream.next_lsn {
            Some(next) => next.0.saturating_sub(lsn.0),
            None => stream.next_position.0.saturating_sub(position.0),
        };
        if passed >= count {
            return Ok(());
        }
        let (lsn, position, count) = (lsn.plus(passed), position.plus(passed), count - passed);
        if stream.next_lsn.is_some_and(|next| lsn != next) || position < stream.next_position {
            return Err(Contradiction { invariant: "I7", what: "a shard's delivery skips a slot or goes back" });
        }
        if position < self.confirmed && !planted(Mutant::ConfirmPastAGap) {
            // Only a peer that breaks the protocol does this; `hand_out` may rely on it.
            return Err(Contradiction { invariant: "I2", what: "a delivery is new below the confirmed prefix" });
        }
        stream.next_lsn = Some(lsn.plus(count));
        stream.next_position = position.plus(count);
        stream.queue.push_back(Held { lsn, position, view, count, content });
        Ok(())
    }

    /// Positions of a shard are void, says a gate whose order log goes back further than the client's.
    fn on_decreed(&mut self, ledger: &Ledger, shard: ShardId, mut held: Held<H>) -> Result<(), Contradiction> {
        let known = held.view <= ledger.view() && ledger.first_known() <= held.position;
        let granted = ledger.locate(held.position).is_some_and(|slot| slot.shard == shard);
        if known && granted && !ledger.is_decreed(shard, held.position) {
            return Err(Contradiction { invariant: "I15", what: "a live shard's slots are said to be void" });
        }
        let next = self.next;
        let Some(stream) = self.streams.iter_mut().find(|s| s.shard == shard) else { return Ok(()) };
        let from = stream.next_position.max(next);
        if held.end() <= from {
            return Ok(()); // Passed already.
        }
        held.cut_before(from);
        stream.next_position = held.end();
        stream.queue.push_back(held);
        Ok(())
    }

    /// The view changed: what the failed shard has not bound is void. Call once per `ViewChange` applied.
    pub fn on_view_change(&mut self, failed: &Failed) {
        if failed.view <= self.view {
            return;
        }
        self.view = failed.view;
        if planted(Mutant::KeepLostSpeculation) {
            return;
        }
        let Some(index) = self.streams.iter().position(|s| s.shard == failed.shard) else { return };
        let lost = self
            .handed
            .iter()
            .find(|h| h.index == index && h.held.position >= failed.from && h.held.is_record())
            .map(|h| h.held.position);
        // What it delivered are positions without slots now; the slots come to lie elsewhere when the shard has returned.
        // The positions have to be passed, perhaps by a ledger that does not go back so far.
        let all = self.scope == Scope::All;
        let stream = &mut self.streams[index];
        stream.failed = Some(*failed);
        let handed = self.handed.iter_mut().filter(|h| h.index == index).map(|h| &mut h.held);
        for held in handed.chain(&mut stream.queue).filter(|held| held.position >= failed.from) {
            held.content = Content::Decreed;
        }
        if !all {
            stream.queue.retain(|held| held.position < failed.from);
        }
        if stream.next_lsn.is_some_and(|next| next > failed.lsn) {
            // What was bound was delivered; the stream goes on with the first slot that was not, wherever that comes to lie.
            stream.next_lsn = Some(failed.lsn);
            if !all {
                stream.next_position = stream.next_position.min(failed.from);
            }
        }
        let Some(first_lost) = lost else { return };
        invariant!(I9, first_lost >= self.confirmed, "a failure at {first_lost} below the confirmed prefix");
        // Take back what was handed out from there on; live shards' records go to the front of their queues again.
        while self.handed.back().is_some_and(|h| h.held.position >= first_lost) {
            let Some(Handed { index: from, held }) = self.handed.pop_back() else { break };
            if from != index || all {
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
        if self.streams.iter().any(|s| !s.ahead.is_empty()) {
            self.take_ahead(ledger)?;
        }
        if let Some(from) = self.fail {
            // What was bound before the failure is confirmed first.
            let upto = ledger.committed().min(from);
            if upto > self.confirmed {
                return self.confirm(ledger, upto).map(Some);
            }
            self.fail = None;
            let below = self.confirmed.0.checked_sub(1).filter(|_| planted(Mutant::FailConfirmed));
            let from = below.map_or(from, Position);
            return Ok(Some(Event::Fail { from }));
        }
        while let Some((index, held)) = self.take_ready(ledger) {
            if matches!(held.content, Content::Unavailable) && held.position > self.confirmed {
                // A subscriber may stop here: it knows first what it has.
                let upto = held.position;
                self.streams[index].queue.push_front(held);
                return self.confirm(ledger, upto).map(Some);
            }
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
        // What is unavailable is bound: the gate may know so before the client does.
        let may_go = |held: &Held<H>| !matches!(held.content, Content::Unavailable) || held.end() <= ledger.committed();
        if self.scope != Scope::All {
            self.skip_passed();
            let stream = self.streams.first_mut()?;
            return if stream.queue.front().is_some_and(may_go) {
                stream.queue.pop_front().map(|h| (0, h))
            } else {
                None
            };
        }
        self.skip_decreed(ledger);
        let next = self.next;
        let is_next = |s: &Stream<H>| s.queue.front().is_some_and(|held| held.position == next && may_go(held));
        let index = match ledger.locate(next) {
            Some(slot) => {
                self.streams.iter().position(|s| s.shard == slot.shard).filter(|i| is_next(&self.streams[*i]))
            }
            None => self.streams.iter().position(is_next),
        };
        let held = self.streams[index?].queue.pop_front()?;
        Some((index?, held))
    }

    /// Void positions of the one shard that other slots or a confirm have passed already.
    fn skip_passed(&mut self) {
        let Some(stream) = self.streams.first_mut() else { return };
        while let Some(held) = stream.queue.front_mut().filter(|h| matches!(h.content, Content::Decreed)) {
            let passed = self.next.max(self.confirmed);
            if held.end() > passed {
                return held.cut_before(passed);
            }
            self.next = self.next.max(held.end());
            stream.queue.pop_front();
        }
    }

    /// Slots of failed shards up to their lease end are no-ops by decree.
    fn skip_decreed(&mut self, ledger: &Ledger) {
        if ledger.failed().next().is_none() && self.streams.iter().all(|s| s.failed.is_none()) {
            return;
        }
        while let Some(slot) = ledger.locate(self.next).filter(|slot| ledger.is_decreed(slot.shard, self.next)) {
            self.note_decreed(slot.shard, slot.lsn);
            self.next = self.next.plus(1);
        }
        for stream in &mut self.streams {
            // What a gate said of the same positions.
            while stream.queue.front().is_some_and(|h| matches!(h.content, Content::Decreed) && h.end() <= self.next) {
                stream.queue.pop_front();
            }
            if let Some(held) = stream.queue.front_mut().filter(|h| matches!(h.content, Content::Decreed)) {
                held.cut_before(self.next);
            }
        }
    }

    /// The next position is void. Kept with what is handed out: after another failure it has to be passed again, perhaps by
    /// a ledger that does not go back so far.
    fn note_decreed(&mut self, shard: ShardId, lsn: Lsn) {
        let Some(index) = self.streams.iter().position(|s| s.shard == shard) else { return };
        let next = self.next;
        match self.handed.back_mut() {
            Some(Handed { index: last, held })
                if *last == index && matches!(held.content, Content::Decreed) && held.end() == next =>
            {
                held.count += 1;
            }
            _ => {
                let held = Held { lsn, position: next, view: self.view, count: 1, content: Content::Decreed };
                self.handed.push_back(Handed { index, held });
            }
        }
    }

    /// Moves `next` past slots that are about to be handed out.
    fn pass(&mut self, ledger: &Ledger, index: usize, held: &Held<H>) {
        let end = held.end();
        self.next = match self.scope {
            Scope::All => end,
            // The slot that is named follows.
            Scope::Shard(_) if matches!(held.content, Content::Decreed) => end,
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
        let (content, end) = (held.content.clone(), held.end());
        let (shard, position, view) = (stream.shard, held.position, held.view);
        if end > self.confirmed {
            self.handed.push_back(Handed { index, held });
        }
        match content {
            Content::Record(record) => Some(Event::Deliver { position, shard, record, speculative, view }),
            Content::Unavailable => Some(Event::Unavailable { from: position, to: end }),
            // I16: no-ops count as positions and never reach the user.
            Content::NoOps | Content::Decreed => None,
        }
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
            let bound = ledger.position(shard, held.lsn).filter(|_| !matches!(held.content, Content::Decreed));
            if bound.is_some_and(|p| p != held.position) {
                return Err(Contradiction { invariant: "I8", what: "a delivery is bound to another position" });
            }
            if held.end() > upto {
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
