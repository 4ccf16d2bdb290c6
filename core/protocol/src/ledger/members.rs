//! Who holds each shard's log, and what is void because a shard was lost as a whole. `PROTOCOL.md` §6.

use alloc::vec::Vec;

use super::{Applied, Ledger, Span};
use crate::mutant::{Mutant, planted};
use crate::types::{CutPoint, Lsn, Member, Position, ReplicaId, ShardId};
use crate::wire::order::{
    Decree, GrantHead, ShardChange, ShardChangeHead, encode_cut, encode_decree, encode_free_cut, encode_grant,
    encode_shard_change, encode_trim,
};

/// Failures remembered even when all they made void is forgotten: clients ask about them late.
pub const FAILURES_KEPT: usize = 1024;

/// A shard lost as a whole: its slots from `from` to `lease_end` are no-ops by decree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The shard.
    pub shard: ShardId,
    /// The view that the failure began.
    pub view: u32,
    /// First position that was not bound when the view changed.
    pub from: Position,
    /// End of the last window granted by then.
    pub lease_end: Position,
    /// First of its slots that was not bound: what follows never was, and it goes on here when it returns.
    pub lsn: Lsn,
}

/// Who holds a shard's log, by the newest committed change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The shard.
    pub shard: ShardId,
    /// Number of the newest change.
    pub change: u32,
    /// Counts the shard's primaries.
    pub epoch: u32,
    /// The primary's number.
    pub primary: u16,
    /// Number of the change with which it began, or returned when it had been lost.
    pub since_failure: u32,
    /// The members, the primary included, by number. None while the shard is lost.
    pub members: Vec<ReplicaId>,
}

impl Membership {
    /// The shard was lost as a whole and has not returned.
    pub fn has_failed(&self) -> bool {
        self.members.is_empty()
    }

    /// The member with this number.
    pub fn member(&self, number: u16) -> Option<ReplicaId> {
        self.members.iter().copied().find(|m| m.number == number)
    }

    /// Whether this life of a replica is a member.
    pub fn holds(&self, replica: ReplicaId) -> bool {
        self.members.contains(&replica)
    }
}

impl Ledger {
    /// Who holds a shard's log; `None` before its first change.
    pub fn membership(&self, shard: ShardId) -> Option<&Membership> {
        self.memberships.binary_search_by_key(&shard, |m| m.shard).ok().map(|at| &self.memberships[at])
    }

    /// All shards' memberships, in id order.
    pub fn memberships(&self) -> impl Iterator<Item = &Membership> {
        self.memberships.iter()
    }

    /// Whether a shard is lost at present.
    pub fn has_failed(&self, shard: ShardId) -> bool {
        self.membership(shard).is_some_and(Membership::has_failed)
    }

    /// The newest failure of a shard that is remembered.
    pub fn last_failure(&self, shard: ShardId) -> Option<&Failed> {
        self.failed.iter().rev().find(|f| f.shard == shard)
    }

    /// Whether a position that the shard was granted is a no-op because the shard was lost before it was bound.
    pub fn is_decreed(&self, shard: ShardId, position: Position) -> bool {
        // Leases end in the order of the failures.
        let mut concerned = self.failed.iter().rev().take_while(|f| f.lease_end > position);
        concerned.any(|f| (f.shard == shard || planted(Mutant::VoidTheNeighbours)) && f.from <= position)
    }

    /// The first positions at or above `from` and below `to` that were to be a shard's and are void, because it was lost:
    /// where they begin, and how many follow each other.
    pub fn decreed_run(&self, shard: ShardId, from: Position, to: Position) -> Option<(Position, u64)> {
        self.failed.iter().filter(|f| f.shard == shard).find_map(|f| {
            let (from, to) = (from.max(f.from), to.min(f.lease_end));
            let begin = self.spans.partition_point(|s| s.end() <= from);
            let spans = self.spans.range(begin..).take_while(|s| s.start < to);
            let (first, count) = spans.filter_map(|s| s.given_run(shard, from)).next()?;
            (first < to).then(|| (first, count.min(to.0 - first.0)))
        })
    }

    pub(super) fn forget_failures(&mut self) {
        while self.failed.len() > FAILURES_KEPT && self.failed[0].lease_end <= self.base {
            self.failed.pop_front();
        }
    }

    fn membership_mut(&mut self, shard: ShardId) -> &mut Membership {
        let at = match self.memberships.binary_search_by_key(&shard, |m| m.shard) {
            Ok(at) => at,
            Err(at) => {
                let unknown =
                    Membership { shard, change: 0, epoch: 0, primary: 0, since_failure: 0, members: Vec::new() };
                self.memberships.insert(at, unknown);
                at
            }
        };
        &mut self.memberships[at]
    }

    /// Void unless it names its latest predecessor. What is known first of a shard is taken as it is: a snapshot begins so.
    pub(super) fn apply_shard_change(&mut self, change: &ShardChange<'_>) -> Applied {
        let led_by = change.members.iter().find(|m| m.number == change.primary);
        let known = self.membership(change.shard).map(|m| {
            let leads_on = m.primary == change.primary && m.member(m.primary) == led_by;
            (m.change, m.epoch, leads_on, m.has_failed())
        });
        if change.view != self.view {
            return Applied::Void;
        }
        if let Some((latest, epoch, leads_on, has_failed)) = known {
            let again = planted(Mutant::ApplyVoidChanges);
            let follows = change.change == latest + 1 && !change.members.is_empty() || again;
            // Another primary, or another life of the same, is another epoch; so is whoever begins where a lost shard ended.
            let begins = !leads_on || has_failed;
            let epoch_fits = if begins { change.epoch > epoch } else { change.epoch == epoch };
            if !follows || !(epoch_fits || again) {
                return Applied::Void;
            }
        }
        let members = self.membership_mut(change.shard);
        if known.is_none() && change.since_failure > 0 {
            members.since_failure = change.since_failure;
        } else if members.has_failed() {
            members.since_failure = change.change;
        }
        (members.change, members.epoch, members.primary) = (change.change, change.epoch, change.primary);
        members.members.clear();
        members.members.extend(change.members.iter());
        Applied::MembersChanged(change.shard)
    }

    /// A shard is lost: the next view begins, and what it has not bound is void.
    pub(super) fn apply_view_change(&mut self, view: u32, shard: ShardId) -> Applied {
        // No honest shard has changed its members so often that they cannot be told any more.
        let is_last = self.membership(shard).is_some_and(|m| m.change == u32::MAX - 1);
        if view != self.view + 1 || self.has_failed(shard) || is_last {
            return Applied::Void;
        }
        self.view = view;
        let lease_end = self.spans.back().map_or(self.committed, Span::end);
        let lsn = self.committed_lsn(shard);
        let members = self.membership_mut(shard);
        members.change += 1;
        members.members.clear();
        let failed = Failed { shard, view, from: self.committed, lease_end, lsn };
        self.decree(failed);
        Applied::ViewChanged
    }

    /// Part of a snapshot: a failure from before it that concerns positions beyond its base.
    pub(super) fn apply_decree(&mut self, decree: &Decree) -> Applied {
        let Decree { view, shard, from, lease_end, lsn } = *decree;
        self.decree(Failed { shard, view, from, lease_end, lsn });
        Applied::Void
    }

    fn decree(&mut self, failed: Failed) {
        for span in &mut self.spans {
            span.lose(&failed);
        }
        self.failed.push_back(failed);
    }

    /// What is void in a span that was opened just now: nothing, but in a snapshot.
    pub(super) fn lose_in_newest(&mut self) {
        let Ledger { spans, failed, .. } = self;
        if let Some(span) = spans.back_mut() {
            failed.iter().for_each(|f| span.lose(f));
        }
    }

    /// Calls `emit` with the entries that bring a new follower from [`snapshot_base`](Self::snapshot_base) to here;
    /// returns how many. `buffer` holds one entry.
    pub fn snapshot(&self, buffer: &mut [u8], mut emit: impl FnMut(&[u8])) -> u32 {
        let mut count = 0;
        let mut say = |bytes: &[u8]| {
            emit(bytes);
            count += 1;
        };
        self.say_members(buffer, &mut say);
        let first = self.snapshot_first().unwrap_or(self.spans.len());
        for (index, span) in self.spans.iter().enumerate().skip(first) {
            if index == first && self.ends_free(index) {
                say_grant(buffer, &mut say, span.grant_of_last_cut(self.view));
                if let Some((point, lsns)) = span.last_cut() {
                    let len = encode_free_cut(buffer, self.view, point, &lsns);
                    say(&buffer[..len]);
                }
                continue;
            }
            let from = if index == first { Some(self.bound) } else { None };
            let starts_at = say_grant(buffer, &mut say, span.grant_from(from, self.view));
            if index == first && span.is_fixed() && self.bound > starts_at {
                let len = encode_cut(buffer, self.view, self.bound);
                say(&buffer[..len]);
            }
        }
        self.say_trim(buffer, &mut say);
        count
    }

    /// As [`snapshot`](Self::snapshot), with all that this ledger knows, from [`history_base`](Self::history_base) on: for
    /// those that map old positions, as whoever serves a log does.
    pub fn history(&self, buffer: &mut [u8], mut emit: impl FnMut(&[u8])) -> u32 {
        let mut count = 0;
        let mut say = |bytes: &[u8]| {
            emit(bytes);
            count += 1;
        };
        self.say_members(buffer, &mut say);
        let bound_in = self.spans.iter().rposition(|s| s.window <= self.bound.window);
        for (index, span) in self.spans.iter().enumerate() {
            let starts_at = say_grant(buffer, &mut say, span.grant_known(self.view));
            if !span.is_fixed() && (span.is_closed() || span.rows().next().is_some()) {
                if index > 0 {
                    // What comes before a free window is bound when its first cut is, or when it ends.
                    let len = encode_cut(buffer, self.view, starts_at);
                    say(&buffer[..len]);
                }
                for (point, lsns) in span.rows() {
                    let len = encode_free_cut(buffer, self.view, point, &lsns);
                    say(&buffer[..len]);
                }
            } else if bound_in == Some(index) && (self.bound > starts_at || index > 0) {
                let len = encode_cut(buffer, self.view, self.bound);
                say(&buffer[..len]);
            }
        }
        self.say_trim(buffer, &mut say);
        count
    }

    /// What is not to be kept: everything bound was told before.
    fn say_trim(&self, buffer: &mut [u8], say: &mut impl FnMut(&[u8])) {
        if self.trimmed > Position(0) {
            let len = encode_trim(buffer, self.view, self.trimmed);
            say(&buffer[..len]);
        }
    }

    /// Who holds each shard's log, and which shards were lost.
    fn say_members(&self, buffer: &mut [u8], say: &mut impl FnMut(&[u8])) {
        for m in &self.memberships {
            let head = ShardChangeHead {
                view: self.view,
                shard: m.shard,
                change: m.change.max(1),
                epoch: m.epoch,
                primary: m.primary,
                since_failure: m.since_failure,
            };
            let len = encode_shard_change(buffer, head, &m.members);
            say(&buffer[..len]);
        }
        for f in &self.failed {
            let Failed { shard, view, from, lease_end, lsn } = *f;
            let len = encode_decree(buffer, &Decree { view, shard, from, lease_end, lsn });
            say(&buffer[..len]);
        }
    }
}

/// Says a grant; where its windows start.
fn say_grant(buffer: &mut [u8], say: &mut impl FnMut(&[u8]), (head, members): (GrantHead, Vec<Member>)) -> CutPoint {
    let len = encode_grant(buffer, head, &members);
    say(&buffer[..len]);
    CutPoint { window: head.window, cut: head.first_cut, prefix: 0 }
}
