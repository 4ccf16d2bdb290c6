//! What the order log says: granted windows, bound cuts, views — and the arithmetic of positions that follows.
//!
//! Sequencer, shards, gates and clients all apply the same entries to their own ledger, so position and lsn map to each
//! other identically everywhere (I12). Consecutive windows with the same members, quotas and mode merge into one *span*,
//! so a steady log's ledger does not grow. `PROTOCOL.md` §3.

mod members;
mod span;

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::fmt;

use crate::limits::NUMBER_MAX;
use crate::mutant::{Mutant, planted};
use crate::types::{CutPoint, Lsn, Member, Position, ShardId, WindowMode};
use crate::wire::order::{Grant, GrantHead, Lsns, OrderEntry};
pub use members::{Failed, Membership};
use span::Span;

/// Bytes of spans kept; older ones are forgotten and their positions read as trimmed. About 100 000 changes of a small
/// cluster's quotas.
const SPAN_BYTES_MAX: usize = 16 << 20;

/// The order log contradicts itself or what this follower knows: nothing may be served from it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contradiction {
    /// The invariant of `PROTOCOL.md` that does not hold.
    pub invariant: &'static str,
    /// What was seen.
    pub what: &'static str,
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the order stream contradicts itself ({}): {}", self.invariant, self.what)
    }
}

impl core::error::Error for Contradiction {}

/// Like `invariant!`, for data that came from a peer: an error instead of an assertion.
macro_rules! ensure {
    ($id:ident, $condition:expr, $what:literal) => {
        if !$condition {
            return Err(Contradiction { invariant: stringify!($id), what: $what });
        }
    };
}

/// What applying an entry did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// The index was applied before: nothing happened (I17).
    Again,
    /// The entry is void (`PROTOCOL.md` §5, Validity): nothing but the index moved.
    Void,
    /// A window opened.
    Granted,
    /// More positions are bound.
    Bound,
    /// A shard failed.
    ViewChanged,
    /// A shard has other members or another primary.
    MembersChanged(ShardId),
    /// Less is kept.
    Trimmed,
}

/// A slot of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The shard.
    pub shard: ShardId,
    /// Its slot.
    pub lsn: Lsn,
}

/// A follower's state of the order log. See the module's text.
#[derive(Debug)]
pub struct Ledger {
    spans: VecDeque<Span>,
    /// Positions below the first span's start, all bound.
    base: Position,
    /// What lies below is not to be kept, by whoever asked for it.
    trimmed: Position,
    applied_index: u64,
    view: u32,
    bound: CutPoint,
    committed: Position,
    failed: VecDeque<Failed>,
    /// Who holds each shard's log, in id order.
    memberships: Vec<Membership>,
    free_cuts_max: usize,
    /// Bytes of all spans but the rows of the last.
    span_bytes: usize,
}

impl Ledger {
    /// An empty ledger: index 0, nothing granted. `free_cuts_max` bounds the cuts of free windows remembered.
    pub fn new(free_cuts_max: usize) -> Ledger {
        Ledger::at(0, Position(0), 0, free_cuts_max)
    }

    /// The ledger of a follower that joins at a snapshot: everything below `base` is bound. The snapshot's entries
    /// follow through [`apply_snapshot`](Self::apply_snapshot).
    pub fn at(index: u64, base: Position, view: u32, free_cuts_max: usize) -> Ledger {
        Ledger {
            spans: VecDeque::new(),
            base,
            trimmed: Position(0),
            applied_index: index,
            view,
            bound: CutPoint::default(),
            committed: base,
            failed: VecDeque::new(),
            memberships: Vec::new(),
            free_cuts_max: free_cuts_max.max(1),
            span_bytes: 0,
        }
    }

    /// Index of the last entry applied.
    pub fn applied_index(&self) -> u64 {
        self.applied_index
    }

    /// The current view.
    pub fn view(&self) -> u32 {
        self.view
    }

    /// How far positions are bound, as a point.
    pub fn bound(&self) -> CutPoint {
        self.bound
    }

    /// First position that is not bound.
    pub fn committed(&self) -> Position {
        self.committed
    }

    /// Mode of the newest window granted.
    pub fn mode(&self) -> Option<WindowMode> {
        self.spans.back().map(|s| s.mode)
    }

    /// Number of the next window to grant.
    pub fn next_window(&self) -> u64 {
        self.spans.back().map_or(self.bound.window, |s| s.window_end())
    }

    /// Members of the newest window granted, in id order.
    pub fn members(&self) -> &[Member] {
        self.spans.back().map_or(&[], |s| &s.members)
    }

    /// First window, and its first position, of the newest run of windows with the same mode, members and quotas.
    pub fn newest_run(&self) -> Option<(u64, Position)> {
        self.spans.back().map(|s| (s.window, s.start))
    }

    /// Failures, newest last: those that concern positions still known, and at least the newest 1024.
    pub fn failed(&self) -> impl DoubleEndedIterator<Item = &Failed> {
        self.failed.iter()
    }

    /// Applies the entry with this index. Applying one again changes nothing (I17).
    ///
    /// # Errors
    /// When the index leaves a gap or the entry contradicts what was applied before.
    pub fn apply(&mut self, index: u64, entry: &OrderEntry<'_>) -> Result<Applied, Contradiction> {
        if index <= self.applied_index {
            return Ok(Applied::Again);
        }
        let next = index == self.applied_index + 1 || planted(Mutant::SkipAnOrderEntry);
        ensure!(I17, next, "an index of the order stream is missing");
        ensure!(
            I12,
            !matches!(entry, OrderEntry::Decree(_)),
            "a failure from before a snapshot is told outside of one"
        );
        let applied = self.apply_snapshot(entry)?;
        self.applied_index = index;
        Ok(applied)
    }

    /// Applies an entry that is part of a snapshot: as [`apply`](Self::apply), without moving the index.
    ///
    /// # Errors
    /// When the entry contradicts what was applied before.
    pub fn apply_snapshot(&mut self, entry: &OrderEntry<'_>) -> Result<Applied, Contradiction> {
        match entry {
            OrderEntry::Grant(grant) => self.apply_grant(grant),
            OrderEntry::Cut { view, point } => self.apply_cut(*view, *point),
            OrderEntry::FreeCut { view, point, lsns } => self.apply_free_cut(*view, *point, lsns),
            OrderEntry::ViewChange { view, shard } => Ok(self.apply_view_change(*view, *shard)),
            OrderEntry::ShardChange(change) => Ok(self.apply_shard_change(change)),
            OrderEntry::Decree(decree) => Ok(self.apply_decree(decree)),
            OrderEntry::Trim { upto, .. } => Ok(self.apply_trim(*upto)),
        }
    }

    fn apply_grant(&mut self, grant: &Grant<'_>) -> Result<Applied, Contradiction> {
        let again = planted(Mutant::GrantTwice) && grant.window + 1 == self.next_window();
        if grant.view != self.view || (!self.spans.is_empty() && grant.window != self.next_window() && !again) {
            return Ok(Applied::Void);
        }
        if let Some(last) = self.spans.back_mut() {
            if last.mode == WindowMode::Free && self.bound.window + 1 < last.window_end() {
                // Only the window that is being cut can be ended by the next.
                return Ok(Applied::Void);
            }
            ensure!(I12, grant.first_cut == 0, "a later grant opens in the middle of a window");
            ensure!(I12, grant.start == last.end() || again, "a window does not start where the one before ends");
            let mut listed = grant.members.iter();
            for member in &last.members {
                let found = listed.find(|m| m.shard == member.shard).map(|m| m.first_lsn);
                ensure!(I12, found.is_some(), "a member of the window before is not listed any more");
                let stopped = last.end_lsn(member.shard);
                ensure!(I12, found == stopped || again, "a member's first slot is not where it stopped");
            }
            if last.extend(grant) {
                ensure!(I12, last.end().0 <= NUMBER_MAX, "it grants positions beyond what a log can have");
                return Ok(Applied::Granted);
            }
            if last.mode == WindowMode::Free {
                last.close();
                self.span_bytes += last.held_bytes();
                self.bound = CutPoint { window: grant.window, cut: 0, prefix: 0 };
            } else {
                self.span_bytes += last.held_bytes();
            }
        } else {
            ensure!(I12, grant.start == self.base, "the first window does not start at the snapshot's base");
            self.bound = CutPoint { window: grant.window, cut: grant.first_cut, prefix: 0 };
        }
        while self.span_bytes > SPAN_BYTES_MAX && self.spans[0].window_end() <= self.bound.window {
            self.forget(1);
        }
        let span = Span::new(grant, self.free_cuts_max);
        ensure!(I12, span.end().0 <= NUMBER_MAX, "it grants positions beyond what a log can have");
        self.spans.push_back(span);
        self.lose_in_newest();
        Ok(Applied::Granted)
    }

    /// Void unless it trims more than before, and nothing but what is bound (I18).
    fn apply_trim(&mut self, upto: Position) -> Applied {
        if upto <= self.trimmed || upto > self.committed {
            return Applied::Void;
        }
        self.trimmed = upto;
        Applied::Trimmed
    }

    fn apply_cut(&mut self, view: u32, point: CutPoint) -> Result<Applied, Contradiction> {
        let Some(index) = self.span_index(point.window) else { return Ok(Applied::Void) };
        let span = &self.spans[index];
        // The end of a fixed window is the start of whatever follows.
        let at_start = point == span.first_point();
        let granted = span.granted(point) || (point.cut == 0 && point.prefix == 0 && point.window == span.window_end());
        let in_fixed = at_start || span.mode == WindowMode::Fixed;
        if view != self.view || point <= self.bound || !granted || !in_fixed {
            return Ok(Applied::Void);
        }
        let committed = if at_start { span.start } else { span.position_of(point) };
        // I2: the confirmed prefix only grows.
        ensure!(I2, committed >= self.committed, "a cut moves the bound prefix back");
        self.bound = point;
        self.committed = committed;
        Ok(Applied::Bound)
    }

    fn apply_free_cut(&mut self, view: u32, point: CutPoint, lsns: &Lsns<'_>) -> Result<Applied, Contradiction> {
        let cut_ends_window = point.cut == 0;
        let holding = if cut_ends_window { point.window.checked_sub(1) } else { Some(point.window) };
        let Some(index) = holding.and_then(|w| self.span_index(w)) else { return Ok(Applied::Void) };
        let span = &mut self.spans[index];
        let next = span.next_free_point();
        let begun = self.bound >= span.first_point() && !span.is_whole();
        if view != self.view || point <= self.bound || span.mode != WindowMode::Free || point != next || !begun {
            return Ok(Applied::Void);
        }
        ensure!(I12, lsns.len() == span.members.len(), "a free cut's vector has not the window's members");
        let Some(committed) = span.push_free_cut(lsns) else {
            return Err(Contradiction { invariant: "I2", what: "a free cut takes slots back" });
        };
        ensure!(I2, committed.0 <= NUMBER_MAX, "a free cut binds positions beyond what a log can have");
        self.bound = point;
        self.committed = committed;
        if index > 0 && self.spans[index].forgets() {
            // What is known has one beginning.
            self.forget(index);
        }
        Ok(Applied::Bound)
    }

    /// Forgets the oldest spans.
    fn forget(&mut self, spans: usize) {
        for span in self.spans.drain(..spans) {
            self.span_bytes -= span.held_bytes();
        }
        self.base = self.spans.front().map_or(self.committed, |s| s.start);
        self.forget_failures();
    }

    /// This ledger was made from a snapshot; an older one of the same order log knows of positions before it. Takes over
    /// what that knows without a gap.
    pub fn continue_from(&mut self, older: Ledger) {
        let Some(first) = self.spans.front() else { return };
        let Ledger { spans: mut known, view, .. } = older;
        known.retain(|span| span.window < first.window);
        for failed in self.failed.iter().filter(|f| f.view > view) {
            known.iter_mut().for_each(|span| span.lose(failed));
        }
        if !known.back().is_some_and(|last| last.leads_to(first)) {
            return;
        }
        // What it knew to be open is over.
        known.iter_mut().filter(|span| span.mode == WindowMode::Free).for_each(Span::close);
        self.base = older.base;
        self.span_bytes += known.iter().map(Span::held_bytes).sum::<usize>();
        while let Some(span) = known.pop_back() {
            self.spans.push_front(span);
        }
    }

    /// The newest span that begins at or before `window`.
    fn span_index(&self, window: u64) -> Option<usize> {
        // Most ask for the newest; written out, because this is on every record's way.
        let newest = self.spans.len().checked_sub(1)?;
        if self.spans[newest].window <= window {
            return Some(newest);
        }
        self.spans.iter().rposition(|s| s.window <= window)
    }

    /// The position of a shard's slot: bound, or predetermined by a grant. `None` before a grant, for slots that no
    /// free cut has taken yet, and for slots forgotten.
    pub fn position(&self, shard: ShardId, lsn: Lsn) -> Option<Position> {
        self.position_run(shard, lsn).map(|(position, _)| position)
    }

    /// As [`position`](Self::position), with the number of slots from this one on that have consecutive positions: the
    /// rest of the shard's part of the cut. For followers of a shard, which look up one slot after the other.
    pub fn position_run(&self, shard: ShardId, lsn: Lsn) -> Option<(Position, u64)> {
        self.spans[self.span_of(shard, lsn)?].position_run(shard, lsn)
    }

    /// The newest span in which the shard begins at or before `lsn`. Members stay listed, so spans that begin at or
    /// before a slot come first; most questions are about the newest, nearly all about the newest three.
    fn span_of(&self, shard: ShardId, lsn: Lsn) -> Option<usize> {
        let mut index = self.spans.len();
        for _ in 0..3 {
            index = index.checked_sub(1)?;
            if self.spans[index].first_lsn(shard)? <= lsn {
                return Some(index);
            }
        }
        let begins = |s: &Span| s.first_lsn(shard).is_none_or(|first| first <= lsn);
        let end = self.spans.partition_point(begins);
        end.checked_sub(1).filter(|index| self.spans[*index].first_lsn(shard).is_some())
    }

    /// The slot at a position, as far as grants and bound cuts tell.
    pub fn locate(&self, position: Position) -> Option<Slot> {
        let newest = self.spans.back()?;
        if newest.start <= position {
            return newest.locate(position);
        }
        let index = self.spans.partition_point(|s| s.start <= position).checked_sub(1)?;
        self.spans[index].locate(position)
    }

    /// First position that is kept and that this ledger can still map.
    pub fn first_known(&self) -> Position {
        self.history_base().max(self.trimmed)
    }

    /// Where the follower of a [`history`](Self::history) starts.
    pub fn history_base(&self) -> Position {
        self.spans.front().map_or(self.base, Span::first_known)
    }

    /// What lies below this position is not to be kept.
    pub fn trimmed(&self) -> Position {
        self.trimmed
    }

    /// End of a shard's bound slots.
    pub fn committed_lsn(&self, shard: ShardId) -> Lsn {
        let Some(newest) = self.span_index(self.bound.window) else { return Lsn(0) };
        self.spans[newest].lsn_at(shard, self.bound).unwrap_or_default()
    }

    /// End of the slots whose position is known beforehand or bound. In a free window that is the end of the bound
    /// slots (I13: nobody speculates without a grant).
    pub fn granted_lsn(&self, shard: ShardId) -> Lsn {
        self.spans.back().and_then(|last| last.end_lsn(shard)).unwrap_or_default()
    }

    /// End of the slots whose cut is predetermined: those of granted fixed windows.
    pub fn fixed_end(&self, shard: ShardId) -> Lsn {
        let last_fixed = self.spans.iter().rev().find(|s| s.mode == WindowMode::Fixed);
        last_fixed.and_then(|s| s.end_lsn(shard)).unwrap_or_default()
    }

    /// Whether a shard takes appends, by the newest grant; `None` while it was never a member.
    pub fn open(&self, shard: ShardId) -> Option<bool> {
        self.member(shard).map(|m| m.open)
    }

    /// A shard's part in the newest window granted.
    pub fn member(&self, shard: ShardId) -> Option<&Member> {
        self.members().iter().find(|m| m.shard == shard)
    }

    /// The first window, of those still known, in which a shard is listed.
    pub fn listed_since(&self, shard: ShardId) -> Option<u64> {
        self.spans.iter().find(|s| s.first_lsn(shard).is_some()).map(|s| s.window)
    }

    /// A shard's quota in a granted fixed window that is still known.
    pub fn quota(&self, shard: ShardId, window: u64) -> Option<u32> {
        let span = self.spans.get(self.span_index(window)?)?;
        (span.mode == WindowMode::Fixed && window < span.window_end()).then(|| span.quota(shard)).flatten()
    }

    /// How the cut after the bound ones is made: the mode of the window in which the bound prefix ends.
    pub fn bound_mode(&self) -> Option<WindowMode> {
        let span = &self.spans[self.span_index(self.bound.window)?];
        (self.bound.window < span.window_end()).then_some(span.mode)
    }

    /// End of a shard's slots at a point of a granted fixed window: where it must be for a report of that point.
    pub fn lsn_at(&self, shard: ShardId, point: CutPoint) -> Option<Lsn> {
        let span = &self.spans[self.span_index(point.window)?];
        if point == span.first_point() {
            return span.first_lsn(shard);
        }
        let inside = span.granted(point) || (point.cut == 0 && point.window == span.window_end());
        if span.mode != WindowMode::Fixed || !inside {
            return None;
        }
        span.lsn_at(shard, point)
    }

    /// The last whole cut whose slots of `shard` all lie below `lsn`, within granted fixed windows.
    pub fn point_reached(&self, shard: ShardId, lsn: Lsn) -> Option<CutPoint> {
        let end = self.span_of(shard, lsn)? + 1;
        let fixed = self.spans.range(..end).rev().find(|s| s.mode == WindowMode::Fixed)?;
        fixed.point_reached(shard, lsn)
    }

    /// End of the cut that holds the slot, in a granted fixed window, and the shard's quota there.
    pub fn cut_of(&self, shard: ShardId, lsn: Lsn) -> Option<(Lsn, u32)> {
        let span = &self.spans[self.span_of(shard, lsn)?];
        if span.mode == WindowMode::Fixed { span.cut_end(shard, lsn).zip(span.quota(shard)) } else { None }
    }

    /// The point that lies `cuts` cuts after one in a granted fixed window, not beyond that window's span.
    pub fn point_after(&self, point: CutPoint, cuts: u64) -> Option<CutPoint> {
        let span = self.spans.get(self.span_index(point.window)?)?;
        (span.mode == WindowMode::Fixed && span.granted(point)).then(|| span.later(point, cuts))
    }

    /// The point at which a slot of a granted fixed window is bound: the end of its cut.
    pub fn point_of(&self, shard: ShardId, lsn: Lsn) -> Option<CutPoint> {
        let (end, _) = self.cut_of(shard, lsn)?;
        self.spans[self.span_of(shard, lsn)?].point_reached(shard, end)
    }

    /// End of the predetermined cuts: of the last granted window if it is fixed, else of the fixed windows before it.
    pub fn granted_point(&self) -> CutPoint {
        match self.spans.back() {
            Some(last) if last.mode == WindowMode::Free => CutPoint { cut: 0, ..last.first_point() },
            _ => CutPoint { window: self.next_window(), cut: 0, prefix: 0 },
        }
    }

    /// Position after the last granted window, or after what is bound when that window is free.
    pub fn granted_end(&self) -> Position {
        self.spans.back().map_or(self.base, Span::end)
    }

    /// The point that the next cut of a free window reaches.
    pub fn next_free_point(&self) -> Option<CutPoint> {
        self.spans.back().filter(|s| s.mode == WindowMode::Free).map(Span::next_free_point)
    }

    /// First slot of `shard` at or above `position`, when windows up to there are known.
    pub fn first_lsn_at(&self, shard: ShardId, position: Position) -> Option<Lsn> {
        if position < self.first_known() {
            return None;
        }
        self.spans.iter().find_map(|s| s.first_lsn_at(shard, position))
    }

    /// Slots of `shard` that follow `lsn` at consecutive positions, `lsn` included, at most `max`.
    pub fn run_length(&self, shard: ShardId, lsn: Lsn, max: u64) -> u64 {
        let Some(start) = self.position(shard, lsn) else { return 0 };
        let mut count = 1;
        while count < max && self.position(shard, lsn.plus(count)) == Some(start.plus(count)) {
            count += 1;
        }
        count
    }

    /// Where a snapshot's follower starts: everything below is bound.
    pub fn snapshot_base(&self) -> Position {
        match self.snapshot_first() {
            Some(first) if self.spans[first].mode == WindowMode::Fixed => self.spans[first].start,
            Some(first) if self.ends_free(first) => self.spans[first].before_last_cut(),
            _ => self.committed,
        }
    }

    /// Index of the span in which the bound prefix ends. It is told even if nothing is left to bind in it: where its
    /// members' slots end is where they go on, or are lost.
    fn snapshot_first(&self) -> Option<usize> {
        self.span_index(self.bound.window)
    }

    /// Whether a span is a free one of which everything is bound.
    fn ends_free(&self, index: usize) -> bool {
        let span = &self.spans[index];
        span.mode == WindowMode::Free && span.window_end() <= self.bound.window
    }
}

/// The head of a grant of the order log.
pub fn grant_head(view: u32, mode: WindowMode, window: u64, cuts: u32, start: Position) -> GrantHead {
    GrantHead { view, mode, window, windows: 1, cuts, first_cut: 0, start }
}

#[cfg(test)]
mod tests;
