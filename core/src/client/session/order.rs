//! The order stream as the session follows it: one ledger, fed by one gate at a time.
//!
//! A relay begins with a snapshot. One that covers more than the session knows replaces its ledger once it is complete; one
//! that covers less is read over, and of the entries behind it only those count that are new. A ledger therefore never
//! goes back, whatever relay it comes from.
//!
//! A relay says something at least every `suspect_ns`: an idle log writes nothing, so one that is silent for so long is
//! asked for the tail, which it can answer only with the sequencers' help. One that does not is left for another.
//!
//! Entries come from a peer: numbers that would overflow the arithmetic of positions are refused before they are applied.

use antelog_protocol::Position;
use antelog_protocol::ledger::{Applied, Failed, Ledger};
use antelog_protocol::limits::NUMBER_MAX;
use antelog_protocol::wire::order::OrderEntry;
use antelog_protocol::wire::session::Request;

use super::gate::Gate;

/// The token of the question whether a relay is there.
pub(super) const KEEP_ALIVE: u64 = u64::MAX;

/// Most entries of a snapshot: twice the spans of a ledger, with room to spare.
const SNAPSHOT_ENTRIES_MAX: u32 = 1 << 14;

/// What an order message means for the subscriptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// Nothing.
    None,
    /// Grants or bound positions: merges may have something to say.
    Moved,
    /// A shard has other members, or another primary.
    MembersChanged,
    /// The ledger's newest failure is new.
    ViewChanged,
    /// A snapshot took the ledger's place; before the `first` nothing was known. View changes may have been skipped.
    Anew { first: bool },
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
    /// When the relay was chosen or heard last.
    heard_ns: u64,
    /// When it was asked whether it is there, if it has not answered.
    asked_ns: Option<u64>,
    /// It has told something new since it was chosen.
    spoken: bool,
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
            heard_ns: 0,
            asked_ns: None,
            spoken: false,
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
    pub(super) fn follow(&mut self, gate: usize, now_ns: u64) {
        self.relay = Some(gate);
        self.heard(now_ns);
        self.spoken = false;
        self.ask_anew();
    }

    /// The relay said something of the order log.
    #[inline]
    pub(super) fn heard(&mut self, now_ns: u64) {
        (self.heard_ns, self.asked_ns) = (now_ns, None);
    }

    /// Whether the relay has said anything that it could not have said out of its own memory.
    pub(super) fn has_spoken(&self) -> bool {
        self.spoken && self.asked_ns.is_none()
    }

    /// Asks a relay that has been silent for `suspect_ns` whether it is there; false when it has not answered that for
    /// `patience_ns`.
    pub(super) fn ask_if_silent(&mut self, gates: &mut [Gate], now_ns: u64, patience_ns: (u64, u64)) -> bool {
        if self.relay.is_none() || now_ns < self.look_ns(patience_ns) {
            return true;
        }
        let (None, Some(relay)) = (self.asked_ns, self.relay) else { return false };
        // One whose ring is full for so long is as good as silent.
        let _ = gates[relay].push(&Request::Tail { token: KEEP_ALIVE });
        self.asked_ns = Some(now_ns);
        true
    }

    /// When to look whether the relay is silent.
    pub(super) fn look_ns(&self, (suspect_ns, patience_ns): (u64, u64)) -> u64 {
        match (self.relay, self.asked_ns) {
            (None, _) => u64::MAX,
            (_, None) => self.heard_ns.saturating_add(suspect_ns),
            (_, Some(asked_ns)) => asked_ns.saturating_add(patience_ns),
        }
    }

    /// The relay answered whether it is there.
    pub(super) fn is_there(&mut self, now_ns: u64) {
        self.heard(now_ns);
        self.spoken = true;
    }

    /// Leaves a relay whose connection is up.
    pub(super) fn leave(&mut self, gates: &mut [Gate]) {
        if let Some(relay) = self.relay {
            // Without room it goes on relaying; that is ignored.
            let _ = gates[relay].push(&Request::Unfollow);
            self.on_down(relay);
        }
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
            self.asked_ns = None;
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
            return Ok(Told::None); // It was left, and has not heard.
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
            return Ok(Told::None);
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
        self.spoken = true;
        match self.ledger.apply(index, &decode(entry)?).map_err(|error| error.to_string())? {
            Applied::Again | Applied::Void => Ok(Told::None),
            Applied::Granted | Applied::Bound | Applied::Trimmed => Ok(Told::Moved),
            Applied::MembersChanged(_) => Ok(Told::MembersChanged),
            Applied::ViewChanged => Ok(Told::ViewChanged),
        }
    }

    /// Puts a complete snapshot into force.
    fn finish_snapshot(&mut self) -> Result<Told, String> {
        if self.snapshot.as_ref().is_none_or(|s| s.left > 0) {
            return Ok(Told::None);
        }
        let Some(Snapshot { ledger: Some(ledger), .. }) = self.snapshot.take() else { return Ok(Told::None) };
        // I2, and the order log counts views upwards. A failure begins where the log was bound.
        let known = &self.ledger;
        let backwards = |f: &Failed| f.view > known.view() && f.from < known.committed();
        if ledger.committed() < known.committed() || ledger.view() < known.view() || ledger.failed().any(backwards) {
            return Err("its snapshot of the order log takes back what is bound".into());
        }
        let first = known.applied_index() == 0;
        self.ledger = ledger;
        Ok(Told::Anew { first })
    }
}

/// Reads an entry and checks that no number in it is absurd.
fn decode(bytes: &[u8]) -> Result<OrderEntry<'_>, String> {
    OrderEntry::decode(bytes).map_err(|error| format!("an order entry is malformed: {error}"))
}
