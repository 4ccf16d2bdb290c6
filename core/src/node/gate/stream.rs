//! One stream: a subscriber's cursor in one shard's log, delivered as far as the shard, its credit and the ring allow.

use antelog_protocol::ledger::Ledger;
use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::wire::entry::EntryHeader;
use antelog_protocol::wire::session::{Reply, SESSION_HEAD_BYTES_MAX, stream_bytes};
use antelog_protocol::{Lsn, Position, ShardId};

use super::old::{Old, OldCursor};
use crate::channel::Ring;
use crate::log::{Cursor, Item, Overrun};
use crate::node::bus::ShardPort;
use crate::storage::ReadError;
use crate::transport::Full;

/// Messages one stream may take of a cycle, so that a reader of old records does not hold up the tail of others.
const MESSAGES_PER_CYCLE: usize = 128;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) id: u32,
    pub(super) shard: ShardId,
    /// Everything of the shard below this position was told.
    next: Position,
    /// Unknown until windows up to `next` are known; in the log of the primary of this epoch.
    cursor: Option<Cursor>,
    epoch: Option<u32>,
    /// Where it is in entries that have left memory.
    old: OldCursor,
    /// Failures of the shard up to this view are taken into account, by the cursor or by the client when it said where to
    /// begin.
    failure: u32,
    credit_bytes: u64,
    consumed: u64,
    sent: u64,
}

/// Where a stream is delivered from.
pub(super) struct Source<'a> {
    pub(super) port: &'a ShardPort,
    /// In which its replica leads, as this cycle found it.
    pub(super) epoch: Option<u32>,
    /// First slot that may not be delivered.
    pub(super) deliverable: Lsn,
}

/// Why delivery stopped.
#[derive(Debug)]
pub(super) enum Delivery {
    /// Nothing more may be delivered now.
    Caught,
    /// The cycle's share is used up; there is more.
    More,
    /// The client's ring has no room.
    RingFull,
    /// The next slot is no longer kept.
    Trimmed { head: Position },
    /// A record was overwritten while it was being copied.
    Overrun,
    /// The next slot is on disk and cannot be read.
    Failed(ReadError),
}

/// What a call delivered.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Delivered {
    pub(super) messages: usize,
    pub(super) records: u64,
}

impl Stream {
    /// The client asks for it from a position on, and knows of failures up to a view.
    pub(super) fn new(
        (id, shard): (u32, ShardId),
        (from, view): (Position, u32),
        credit_bytes: u64,
        ledger: &Ledger,
    ) -> Stream {
        let failure = ledger.last_failure(shard).map_or(0, |f| f.view).max(view);
        let (next, cursor, epoch, old) = (from, None, None, OldCursor::default());
        Stream { id, shard, next, cursor, epoch, old, failure, credit_bytes, consumed: 0, sent: 0 }
    }

    /// Another primary's log has its own places; after a failure the shard goes on where it was bound. False: the client
    /// knows of failures that this gate does not know yet.
    fn follow(&mut self, epoch: Option<u32>, ledger: &Ledger) -> bool {
        let known = self.failure;
        for failed in ledger.failed().filter(|f| f.shard == self.shard && f.view > known) {
            self.next = self.next.min(failed.from);
            (self.failure, self.cursor) = (failed.view, None);
            self.old = OldCursor::default();
        }
        if self.epoch != epoch {
            (self.epoch, self.cursor) = (epoch, None);
            self.old = OldCursor::default();
        }
        self.failure <= ledger.view()
    }

    pub(super) fn on_consumed(&mut self, bytes: u64) -> Result<(), String> {
        if bytes < self.consumed || bytes > self.sent {
            return Err(format!("it says it consumed {bytes} bytes of stream {}, {} were sent", self.id, self.sent));
        }
        self.consumed = bytes;
        Ok(())
    }

    fn has_credit(&self, bytes: u64) -> bool {
        self.sent - self.consumed + bytes <= self.credit_bytes
    }
}

/// Position of the first slot that a port's log keeps.
pub(super) fn log_head(port: &ShardPort, ledger: &Ledger) -> Position {
    let first = loop {
        // An error means that the head moved just now.
        if let Ok(first) = first_kept(port) {
            break first;
        }
    };
    match ledger.position(port.shard, first) {
        Some(position) => position.max(ledger.first_known()),
        None if first < ledger.committed_lsn(port.shard) => ledger.first_known(),
        // Everything bound was dropped: what is kept has its place behind all that is granted.
        None => ledger.granted_end(),
    }
}

/// The first slot that a port's log keeps, in memory or on disk.
fn first_kept(port: &ShardPort) -> Result<Lsn, Overrun> {
    let in_memory = port.log.first()?.lsn;
    Ok(port.old.as_ref().map_or(in_memory, |old| in_memory.min(old.borrow().first())))
}

/// Slots below this one were bound and are in no log: their shard was lost and has returned without them. What was dropped
/// because it is old is not counted.
pub(super) fn missing_below(port: &ShardPort, ledger: &Ledger) -> Lsn {
    if ledger.last_failure(port.shard).is_none() {
        return Lsn(0);
    }
    let Ok(first) = first_kept(port) else { return Lsn(0) };
    let begins = ledger.failed().any(|f| f.shard == port.shard && f.lsn == first);
    if begins { first } else { Lsn(0) }
}

/// Delivers what may be delivered.
pub(super) fn deliver(
    stream: &mut Stream,
    source: &Source<'_>,
    ledger: &Ledger,
    ring: &mut Ring,
) -> (Delivered, Delivery) {
    let Source { port, deliverable, .. } = *source;
    let mut delivered = Delivered::default();
    if !stream.follow(source.epoch, ledger) {
        return (delivered, Delivery::Caught);
    }
    let missing_below = missing_below(port, ledger);
    let trimmed = || Delivery::Trimmed { head: log_head(port, ledger) };
    let mut cursor = match stream.cursor.map_or_else(|| find(stream, port, missing_below, ledger), |c| Ok(Some(c))) {
        Ok(Some(cursor)) => cursor,
        Ok(None) => return (delivered, Delivery::Caught),
        Err(Overrun) => return (delivered, trimmed()),
    };
    let void_until = ledger.last_failure(stream.shard).map_or(Position(0), |f| f.lease_end);
    // The cursor's position, and how many slots from it on have consecutive ones.
    let (mut position, mut run) = (Position(0), 0);
    let end = loop {
        if delivered.messages == MESSAGES_PER_CYCLE {
            break Delivery::More;
        }
        if run == 0 && (cursor.lsn < deliverable || stream.next < void_until) {
            let found = position_run(ledger, stream.shard, cursor.lsn);
            match decreed(stream, cursor.lsn, found.map(|(position, _)| position), ledger, ring) {
                Ok(false) => {}
                Ok(true) => {
                    delivered.messages += 1;
                    continue;
                }
                Err(end) => break end,
            }
            (position, run) = found.unwrap_or_default();
        }
        if cursor.lsn >= deliverable {
            break Delivery::Caught;
        }
        if run == 0 {
            // Bound so long ago that the ledger has forgotten where; or, I13, without a grant to speculate with.
            break if cursor.lsn < ledger.committed_lsn(stream.shard) { trimmed() } else { Delivery::Caught };
        }
        let passed = if cursor.lsn < missing_below {
            let count = run.min(missing_below.0 - cursor.lsn.0);
            stream.tell_missing((cursor.lsn, position), count, ledger, ring).map(|()| count)
        } else {
            let most = deliverable.0 - cursor.lsn.0;
            kept(stream, source, &mut cursor, (position, run, most), (ledger, ring), &mut delivered.records)
        };
        match passed {
            Ok(passed) => {
                cursor.lsn = cursor.lsn.plus(passed);
                (position, run) = (position.plus(passed), run.saturating_sub(passed));
                stream.next = position;
            }
            Err(end) => break end,
        }
        delivered.messages += 1;
    };
    stream.cursor = Some(cursor);
    (delivered, end)
}

/// Tells the slots of a shard that is lost: what is bound is unavailable, the rest is void.
pub(super) fn deliver_lost(stream: &mut Stream, ledger: &Ledger, ring: &mut Ring) -> (Delivered, Delivery) {
    let mut delivered = Delivered::default();
    if !stream.follow(None, ledger) {
        return (delivered, Delivery::Caught);
    }
    if stream.next < ledger.first_known() {
        return (delivered, Delivery::Trimmed { head: ledger.first_known() });
    }
    let end = ledger.committed_lsn(stream.shard);
    while delivered.messages < MESSAGES_PER_CYCLE {
        let lsn = ledger.first_lsn_at(stream.shard, stream.next).unwrap_or(end);
        let found = ledger.position_run(stream.shard, lsn).filter(|_| lsn < end);
        let told = match decreed(stream, lsn, found.map(|(position, _)| position), ledger, ring) {
            Ok(false) => match found {
                None => return (delivered, Delivery::Caught),
                Some((position, run)) => stream.tell_missing((lsn, position), run.min(end.0 - lsn.0), ledger, ring),
            },
            told => told.map(|_| ()),
        };
        if let Err(end) = told {
            return (delivered, end);
        }
        delivered.messages += 1;
    }
    (delivered, Delivery::More)
}

/// Tells the next positions before `until` that are void. True if there were any.
fn decreed(
    stream: &mut Stream,
    lsn: Lsn,
    until: Option<Position>,
    ledger: &Ledger,
    ring: &mut Ring,
) -> Result<bool, Delivery> {
    let until = until.unwrap_or(Position(u64::MAX));
    let Some((position, count)) = ledger.decreed_run(stream.shard, stream.next, until) else { return Ok(false) };
    let (id, view) = (stream.id, ledger.view());
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    let reply = Reply::Decreed { stream: id, lsn, position, count, view };
    stream.tell_empty(&reply, position.plus(count.into()), ring).map(|()| true)
}

impl Stream {
    /// Tells slots that are bound and in no log.
    fn tell_missing(
        &mut self,
        (lsn, position): (Lsn, Position),
        count: u64,
        ledger: &Ledger,
        ring: &mut Ring,
    ) -> Result<(), Delivery> {
        let (stream, view) = (self.id, ledger.view());
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let reply = Reply::Unavailable { stream, lsn, position, count, view };
        self.tell_empty(&reply, position.plus(count.into()), ring)
    }

    /// Tells a record whose bytes are not in the region.
    fn tell_record(&mut self, reply: &Reply<'_>, record: &[u8], ring: &mut Ring) -> Result<(), Delivery> {
        let bytes = stream_bytes(record.len());
        if !self.has_credit(bytes) {
            return Err(Delivery::Caught);
        }
        let mut head = [0; SESSION_HEAD_BYTES_MAX];
        let (len, _) = reply.encode(&mut head);
        ring.push(&[&head[..len], record]).map_err(|Full| Delivery::RingFull)?;
        self.sent += bytes;
        Ok(())
    }

    fn tell_empty(&mut self, reply: &Reply<'_>, next: Position, ring: &mut Ring) -> Result<(), Delivery> {
        if !self.has_credit(stream_bytes(0)) {
            return Err(Delivery::Caught);
        }
        let mut head = [0; SESSION_HEAD_BYTES_MAX];
        let (len, _) = reply.encode(&mut head);
        ring.push(&[&head[..len]]).map_err(|Full| Delivery::RingFull)?;
        self.sent += stream_bytes(0);
        self.next = next;
        Ok(())
    }
}

fn position_run(ledger: &Ledger, shard: ShardId, lsn: Lsn) -> Option<(Position, u64)> {
    let found = ledger.position_run(shard, lsn);
    if found.is_none() && planted(Mutant::SpeculateWithoutAGrant) {
        let ahead = lsn.0.checked_sub(ledger.granted_lsn(shard).0)?;
        return Some((ledger.granted_end().plus(ahead), 1));
    }
    found
}

/// Delivers what the log has at a cursor: its slot's position, how many slots from it on have consecutive ones, and how many
/// may be delivered. Returns how many slots that were.
fn kept(
    stream: &mut Stream,
    source: &Source<'_>,
    cursor: &mut Cursor,
    (position, run, most): (Position, u64, u64),
    (ledger, ring): (&Ledger, &mut Ring),
    records: &mut u64,
) -> Result<u64, Delivery> {
    let port = source.port;
    match next_item(stream, port, cursor) {
        Next::Memory(Item::Record { header, offset }) => {
            record(stream, source, cursor, position, (&header, offset), ledger, ring)?;
            cursor.at += header.span_bytes() as u64;
            *records += 1;
            Ok(1)
        }
        Next::Memory(Item::NoOps { count }) => no_ops(stream, (cursor.lsn, position), count.min(most), ledger, ring),
        Next::Memory(Item::Lost { count }) => {
            let count = run.min(count).min(most);
            stream.tell_missing((cursor.lsn, position), count, ledger, ring).map(|()| count)
        }
        Next::Disk => match old_item(stream, port, (cursor.lsn, position), (most, run), ledger, ring) {
            Ok((passed, told)) => {
                *records += told;
                Ok(passed)
            }
            Err(Delivery::Trimmed { .. }) => Err(Delivery::Trimmed { head: log_head(port, ledger) }),
            Err(end) => Err(end),
        },
        Next::Gone => Err(Delivery::Trimmed { head: log_head(port, ledger) }),
    }
}

/// Where the next slot is.
enum Next {
    Memory(Item),
    Disk,
    Gone,
}

fn next_item(stream: &mut Stream, port: &ShardPort, cursor: &mut Cursor) -> Next {
    // What was read from disk is used up first: memory is looked through again behind it.
    if port.old.is_some() && stream.old.holds(cursor.lsn) {
        return Next::Disk;
    }
    stream.old.forget();
    match item(port, cursor) {
        Ok(item) => Next::Memory(item),
        Err(Overrun) if port.old.is_some() => Next::Disk,
        Err(Overrun) => Next::Gone,
    }
}

/// Delivers what is at a slot that has left memory: how many slots, and how many of them have records.
fn old_item(
    stream: &mut Stream,
    port: &ShardPort,
    (lsn, position): (Lsn, Position),
    (most, run): (u64, u64),
    ledger: &Ledger,
    ring: &mut Ring,
) -> Result<(u64, u64), Delivery> {
    let Some(log) = &port.old else { return Err(Delivery::Caught) };
    let mut old = std::mem::take(&mut stream.old);
    let told = match old.next(&mut log.borrow_mut(), lsn) {
        Old::Record(header, bytes) => {
            let record = record_reply(stream, lsn, position, &header, ledger);
            stream.tell_record(&record, bytes, ring).map(|()| (1, 1))
        }
        Old::NoOps(count) => no_ops(stream, (lsn, position), count.min(most), ledger, ring).map(|passed| (passed, 0)),
        Old::Lost(count) => {
            let count = run.min(count).min(most);
            stream.tell_missing((lsn, position), count, ledger, ring).map(|()| (count, 0))
        }
        Old::Waits => Err(Delivery::Caught),
        Old::Again => Err(Delivery::More),
        Old::Trimmed => Err(Delivery::Trimmed { head: position }),
        Old::Failed(error) => Err(Delivery::Failed(error)),
    };
    stream.old = old;
    told
}

fn record_reply(
    stream: &Stream,
    lsn: Lsn,
    position: Position,
    header: &EntryHeader,
    ledger: &Ledger,
) -> Reply<'static> {
    Reply::Deliver {
        stream: stream.id,
        lsn,
        position,
        view: ledger.view(),
        speculative: position >= ledger.committed(),
        client: header.client,
        seq: header.seq,
        record: &[],
    }
}

/// What is at a cursor whose slot may be delivered.
fn item(port: &ShardPort, cursor: &mut Cursor) -> Result<Item, Overrun> {
    if port.log.check(cursor.at).is_err() && !planted(Mutant::DeliverOverwritten) {
        // A cursor that waited for its slot may stand at an entry that is gone while the slot itself is there.
        *cursor = port.log.seek(cursor.lsn)?;
    }
    port.log.item(cursor)
}

/// Delivers a record.
#[inline]
fn record(
    stream: &mut Stream,
    source: &Source<'_>,
    cursor: &Cursor,
    position: Position,
    (header, offset): (&EntryHeader, usize),
    ledger: &Ledger,
    ring: &mut Ring,
) -> Result<(), Delivery> {
    let port = source.port;
    let bytes = stream_bytes(header.length as usize);
    if !stream.has_credit(bytes) {
        return Err(Delivery::Caught);
    }
    let reply = record_reply(stream, cursor.lsn, position, header, ledger);
    let mut head = [0; SESSION_HEAD_BYTES_MAX];
    let (len, _) = reply.encode(&mut head);
    let pushed = ring.push_from(&head[..len], port.log.region(), offset, header.length as usize);
    pushed.map_err(|Full| Delivery::RingFull)?;
    // A primary that was deposed meanwhile is written to by another.
    if port.log.check(cursor.at).is_err() || port.progress.serving() != source.epoch {
        return Err(Delivery::Overrun);
    }
    stream.sent += bytes;
    Ok(())
}

/// Delivers slots without records, at most `most`, as far as they have consecutive positions; returns how many.
fn no_ops(
    stream: &mut Stream,
    (lsn, position): (Lsn, Position),
    most: u64,
    ledger: &Ledger,
    ring: &mut Ring,
) -> Result<u64, Delivery> {
    let count = u32::try_from(ledger.run_length(stream.shard, lsn, most)).unwrap_or(u32::MAX);
    let reply = Reply::NoOps { stream: stream.id, lsn, position, count, view: ledger.view() };
    stream.tell_empty(&reply, position.plus(count.into()), ring).map(|()| count.into())
}

/// Where the stream goes on; `None` until windows up to its position are known.
fn find(stream: &Stream, port: &ShardPort, missing_below: Lsn, ledger: &Ledger) -> Result<Option<Cursor>, Overrun> {
    if stream.next < ledger.first_known() {
        return Err(Overrun);
    }
    let Some(lsn) = ledger.first_lsn_at(port.shard, stream.next) else { return Ok(None) };
    // What is missing is nowhere in the log.
    if lsn < missing_below {
        return Ok(Some(Cursor { at: 0, lsn }));
    }
    match port.log.seek(lsn) {
        // It is on disk, or nowhere: that is found out where it is read.
        Err(Overrun) if port.old.is_some() => Ok(Some(Cursor { at: 0, lsn })),
        found => found.map(Some),
    }
}

#[cfg(test)]
mod tests;
