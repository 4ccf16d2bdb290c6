//! A leader whose connection closes is followed without waiting for its silence.

use raft::{INVALID_ID, StateRole};

use super::RaftGroup;

/// Members try one after the other, so many in a tick.
const TRIES_IN_A_TICK: u64 = 2;
/// How often each tries.
const TRIES: u32 = 4;

/// A leader's connection was closed: how often this member will still try to be the next, and when.
#[derive(Default)]
pub(super) struct Haste {
    left: u32,
    /// Not known before time is told.
    at_ns: Option<u64>,
}

impl Haste {
    /// When there is something to do.
    pub(super) fn due_ns(&self) -> u64 {
        if self.left > 0 { self.at_ns.unwrap_or(0) } else { u64::MAX }
    }
}

impl RaftGroup {
    /// A member's connection was closed. Others still follow it if only this one's is, and do not vote then.
    pub(super) fn look_at_lost(&mut self, id: u64) {
        self.raw.report_unreachable(id);
        if self.raw.raft.leader_id == id {
            self.raw.raft.leader_id = INVALID_ID;
            self.haste = Haste { left: TRIES, at_ns: None };
        }
    }

    /// Asks for votes soon: who comes first of those that are left at once, the others one after the other.
    pub(super) fn hasten(&mut self, now_ns: u64) {
        if self.haste.left == 0 {
            return;
        }
        let raft = &self.raw.raft;
        // Who has no vote does not ask for any.
        if raft.leader_id != INVALID_ID || raft.state == StateRole::Leader || !raft.promotable() {
            self.haste.left = 0;
            return;
        }
        let Some(at_ns) = self.haste.at_ns else {
            let before = self.others.iter().take(self.own).filter(|o| o.connected).count() as u64;
            self.haste.at_ns = Some(now_ns + before * self.tick_ns / TRIES_IN_A_TICK);
            return;
        };
        if now_ns >= at_ns {
            let pause_ns = self.tick_ns.max(self.others.len() as u64 * self.tick_ns / TRIES_IN_A_TICK);
            self.haste = Haste { left: self.haste.left - 1, at_ns: Some(at_ns + pause_ns) };
            let _ = self.raw.campaign();
            self.pump();
        }
    }
}
