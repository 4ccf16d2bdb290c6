//! The order stream as the session follows it: one ledger, fed by one gate at a time.
//!
//! A relay begins with a snapshot. One that covers more than the session knows replaces its ledger once it is complete; one
//! that covers less is read over, and of the entries behind it only those count that are new. A ledger therefore never
//! goes back, whatever relay it comes from.
//!
//! Entries come from a peer: numbers that would overflow the arithmetic of positions are refused before they are applied.

use antelog_protocol::Position;
use antelog_protocol::ledger::{Applied, Ledger};
use antelog_protocol::limits::NUMBER_MAX;
use antelog_protocol::wire::order::OrderEntry;
use antelog_protocol::wire::session::Request;

use super::gate::Gate;

/// Most entries of a snapshot: twice the spans of a ledger, with room to spare.
const SNAPSHOT_ENTRIES_MAX: u32 = 1 << 14;

/// What an order message means for the subscriptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// Nothing.
    None,
    /// Grants or bound positions: merges may have something to say.
    Moved,
    /// The ledger's newest failure is new.
    ViewChanged,
    /// A snapshot skipped view changes: what was speculated may be void without a way to tell what.
    ViewsMissed,
}

/// A snapshot being received.
#[derive(Debug)]
struct Snapshot {
    /// `None`: it covers less than the session knows.
    ledger: Option<Ledger>,
    left: u32,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Order {
    ledger: Ledger,
    free_cuts_max: usize,
    /// The gate that relays.
    relay: Option<usize>,
    /// A `Follow` is to be sent to the relay.
    due: bool,
    /// Entries before the next snapshot say nothing.
    awaiting: bool,
    snapshot: Option<Snapshot>,
}

impl Order {
    pub(super) fn new(free_cuts_max: usize) -> Order {
        Order {
            ledger: Ledger::new(free_cuts_max),
            free_cuts_max,
            relay: None,
            due: false,
            awaiting: true,
            snapshot: None,
        }
    }

    #[inline]
    pub(super) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    pub(super) fn relay(&self) -> Option<usize> {
        self.relay
    }

    /// Follows the order stream at a gate that has just been found connected.
    pub(super) fn follow(&mut self, gate: usize) {
        self.relay = Some(gate);
        self.ask_anew();
    }

    fn ask_anew(&mut self) {
        self.due = true;
        self.awaiting = true;
        self.snapshot = None;
    }

    /// The connection to a gate ended.
    pub(super) fn on_down(&mut self, gate: usize) {
        if self.relay == Some(gate) {
            self.relay = None;
            self.due = false;
            self.snapshot = None;
        }
    }

    #[inline]
    pub(super) fn pump(&mut self, gates: &mut [Gate]) {
        if let (true, Some(relay)) = (self.due, self.relay) {
            self.due = gates[relay].push(&Request::Follow).is_err();
        }
    }

    pub(super) fn on_snapshot(
        &mut self,
        gate: usize,
        (index, base, entries, view): (u64, Position, u32, u32),
    ) -> Result<Told, String> {
        if self.relay != Some(gate) {
            return Err("it relays the order stream unasked".into());
        }
        if entries > SNAPSHOT_ENTRIES_MAX || index > NUMBER_MAX || base.0 > NUMBER_MAX || view == u32::MAX {
            return Err("its snapshot of the order log has impossible numbers".into());
        }
        self.awaiting = false;
        let newer = index > self.ledger.applied_index();
        let ledger = newer.then(|| Ledger::at(index, base, view, self.free_cuts_max));
        self.snapshot = Some(Snapshot { ledger, left: entries });
        self.finish_snapshot()
    }

    pub(super) fn on_entry(&mut self, gate: usize, index: u64, entry: &[u8]) -> Result<Told, String> {
        if self.relay != Some(gate) {
            return Err("it relays the order stream unasked".into());
        }
        if let Some(snapshot) = &mut self.snapshot {
            snapshot.left -= 1; // 0 is never stored
            if let Some(ledger) = &mut snapshot.ledger {
                ledger.apply_snapshot(&decode(entry)?).map_err(|error| error.to_string())?;
            }
            return self.finish_snapshot();
        }
        let applied = self.ledger.applied_index();
        if self.awaiting || index <= applied {
            return Ok(Told::None);
        }
        if index != applied + 1 {
            // The relay has left something out, to catch up perhaps: it has to begin anew.
            self.ask_anew();
            return Ok(Told::None);
        }
        match self.ledger.apply(index, &decode(entry)?).map_err(|error| error.to_string())? {
            Applied::Again | Applied::Void => Ok(Told::None),
            Applied::Granted | Applied::Bound => Ok(Told::Moved),
            Applied::ViewChanged => Ok(Told::ViewChanged),
        }
    }

    /// Puts a complete snapshot into force.
    fn finish_snapshot(&mut self) -> Result<Told, String> {
        if self.snapshot.as_ref().is_none_or(|s| s.left > 0) {
            return Ok(Told::None);
        }
        let Some(Snapshot { ledger: Some(ledger), .. }) = self.snapshot.take() else { return Ok(Told::None) };
        // I2, and the order log counts views upwards.
        if ledger.committed() < self.ledger.committed() || ledger.view() < self.ledger.view() {
            return Err("its snapshot of the order log takes back what is bound".into());
        }
        let missed = ledger.view() > self.ledger.view();
        self.ledger = ledger;
        Ok(if missed { Told::ViewsMissed } else { Told::Moved })
    }
}

/// Reads an entry and checks that no number in it is absurd.
fn decode(bytes: &[u8]) -> Result<OrderEntry<'_>, String> {
    OrderEntry::decode(bytes).map_err(|error| format!("an order entry is malformed: {error}"))
}
