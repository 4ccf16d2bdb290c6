//! What a member that is too far behind of its group is given instead of entries: the ledger as entries that build it,
//! what operators have asked for, and the changes that are remembered.

use antelog_protocol::ledger::Ledger;
use antelog_protocol::sequencer::Standing;
use antelog_protocol::wire::DecodeError;
use antelog_protocol::wire::change::{change_code, change_from, outcome_code, outcome_from};
use antelog_protocol::wire::order::{ORDER_ENTRY_BYTES_MAX, OrderEntry};
use antelog_protocol::{Change, ClientId, Position, ShardId};

use super::{CHANGES_REMEMBERED, Changed};
use crate::node::group::wire::Bytes;

/// What is written in front of everything else.
const FORMAT: u64 = 1;

/// The state of a member. See the module's text.
#[derive(Debug)]
pub(super) struct State {
    pub(super) ledger: Ledger,
    pub(super) standing: Standing,
    pub(super) changes: Vec<Changed>,
}

fn put(out: &mut Vec<u8>, value: u64, bytes: usize) {
    out.extend_from_slice(&value.to_le_bytes()[..bytes]);
}

/// The bytes of a member's state.
pub(super) fn encode<'a>(
    ledger: &Ledger,
    standing: &Standing,
    changes: impl ExactSizeIterator<Item = &'a Changed>,
) -> Vec<u8> {
    let mut out = Vec::new();
    put(&mut out, FORMAT, 1);
    for word in [ledger.applied_index(), ledger.history_base().0, ledger.view().into()] {
        put(&mut out, word, 8);
    }
    put(&mut out, change_code(Change::Ordering(standing.ordering)).1, 1);
    put(&mut out, standing.wanted.len() as u64, 2);
    standing.wanted.iter().for_each(|shard| put(&mut out, shard.0.into(), 2));
    put(&mut out, changes.len() as u64, 2);
    for Changed { client, token, outcome } in changes {
        out.extend_from_slice(&client.0.to_le_bytes());
        let (code, shard, index) = outcome_code(*outcome);
        for (value, bytes) in [(*token, 8), (code.into(), 2), (shard.into(), 2), (index, 8)] {
            put(&mut out, value, bytes);
        }
    }
    let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
    ledger.history(&mut buffer, |entry| {
        put(&mut out, entry.len() as u64, 4);
        out.extend_from_slice(entry);
    });
    out
}

/// Reads a member's state.
///
/// # Errors
/// When the bytes are none, or contradict themselves.
pub(super) fn decode(bytes: &[u8], free_cuts_max: usize) -> Result<State, String> {
    read(bytes, free_cuts_max).map_err(|error| format!("another member's state cannot be read: {error}"))
}

fn read(bytes: &[u8], free_cuts_max: usize) -> Result<State, String> {
    let text = |error: DecodeError| error.to_string();
    let mut r = Bytes(bytes);
    let mut number = |bytes| r.number(bytes).map_err(text);
    if number(1)? != FORMAT {
        return Err("it is of another version".into());
    }
    let (index, base) = (number(8)?, number(8)?);
    let view = u32::try_from(number(8)?).map_err(|_| "the view is too large")?;
    let ordering = match change_from(2, number(1)?).map_err(text)? {
        Change::Ordering(ordering) => ordering,
        Change::Join(_) | Change::Leave(_) | Change::Trim(_) => return Err("it names no ordering".into()),
    };
    let mut wanted = Vec::new();
    for _ in 0..number(2)? {
        wanted.push(ShardId(number(2)? as u16));
    }
    let mut changes = Vec::new();
    for _ in 0..number(2)?.min(CHANGES_REMEMBERED as u64) {
        let client = ClientId(u128::from(number(8)?) | u128::from(number(8)?) << 64);
        let (token, code, shard, index) = (number(8)?, number(2)? as u16, number(2)? as u16, number(8)?);
        changes.push(Changed { client, token, outcome: outcome_from(code, shard, index).map_err(text)? });
    }
    let mut ledger = Ledger::at(index, Position(base), view, free_cuts_max);
    while !r.0.is_empty() {
        let len = r.number(4).map_err(text)? as usize;
        let entry = OrderEntry::decode(r.take(len).map_err(text)?).map_err(text)?;
        ledger.apply_snapshot(&entry).map_err(|contradiction| contradiction.to_string())?;
    }
    Ok(State { ledger, standing: Standing { ordering, wanted }, changes })
}
