//! Reads: what a position holds, once it is bound.

use antelog_protocol::Position;
use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::wire::session::{ReadResult, Reply};

use super::client::push;
use super::old::{Old, OldCursor};
use super::{Common, Served, stream};
use crate::channel::Ring;
use crate::log::Item;
use crate::transport::Full;

/// A read that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) token: u64,
    pub(super) position: Position,
    old: OldCursor,
}

impl Waiting {
    pub(super) fn new(token: u64, position: Position) -> Waiting {
        Waiting { token, position, old: OldCursor::default() }
    }
}

/// Answers one read. `Ok(false)`: its position is not bound yet, or its shard has not got that far here.
pub(super) fn answer(ring: &mut Ring, common: &Common, waiting: &mut Waiting) -> Result<bool, Full> {
    let Waiting { token, position, ref mut old } = *waiting;
    if position >= common.ledger.committed() && !planted(Mutant::ReadPastTheCommit) {
        return Ok(false);
    }
    let is = |result| Reply::ReadIs { token, result };
    let kept = Some(position).filter(|position| *position >= common.ledger.first_known());
    let Some(slot) = kept.and_then(|position| common.ledger.locate(position)) else {
        let head = common.ledger.first_known();
        return push(ring, &is(ReadResult::Trimmed(head))).map(|()| true);
    };
    if common.ledger.is_decreed(slot.shard, position) {
        return push(ring, &is(ReadResult::NoOp)).map(|()| true);
    }
    let at = match common.served(slot.shard) {
        Served::Here(port) => port,
        Served::Soon => return Ok(false),
        Served::Elsewhere => return push(ring, &is(ReadResult::Elsewhere(slot.shard))).map(|()| true),
        Served::Lost => return push(ring, &is(ReadResult::Unavailable)).map(|()| true),
    };
    let (port, deliverable) = (&common.ports[at], common.deliverable[at]);
    if slot.lsn >= deliverable {
        return Ok(false);
    }
    if slot.lsn < stream::missing_below(port, &common.ledger) {
        return push(ring, &is(ReadResult::Unavailable)).map(|()| true);
    }
    let log = &port.log;
    let found = log.seek(slot.lsn).and_then(|mut cursor| log.item(&mut cursor).map(|item| (cursor, item)));
    match found {
        Ok((_, Item::NoOps { .. })) => push(ring, &is(ReadResult::NoOp))?,
        Ok((_, Item::Lost { .. })) => push(ring, &is(ReadResult::Unavailable))?,
        Ok((cursor, Item::Record { header, offset })) => {
            // Copied first and then checked: what was overwritten meanwhile must not be answered.
            let mut record = Vec::new();
            log.region().append_to(offset, header.length as usize, &mut record);
            if log.check(cursor.at).is_ok() && port.progress.serving() == common.serving[at] {
                push(ring, &is(ReadResult::Record(&record)))?;
            } else {
                return Ok(false);
            }
        }
        Err(_) => {
            let read = port.old.as_ref().map_or(Old::Trimmed, |log| old.only(&mut log.borrow_mut(), slot.lsn));
            match read {
                Old::Record(_, record) => push(ring, &is(ReadResult::Record(record)))?,
                Old::NoOps(_) => push(ring, &is(ReadResult::NoOp))?,
                Old::Waits | Old::Again => return Ok(false),
                // What the disk has lost is in no log that is served.
                Old::Lost(_) | Old::Failed(_) => push(ring, &is(ReadResult::Unavailable))?,
                Old::Trimmed => push(ring, &is(ReadResult::Trimmed(stream::log_head(port, &common.ledger))))?,
            }
        }
    }
    Ok(true)
}
