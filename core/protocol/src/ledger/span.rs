//! A span: consecutive windows with equal members, quotas and mode, and the position arithmetic inside it.

use alloc::vec;
use alloc::vec::Vec;

use super::{Failed, Slot};
use crate::mutant::{Mutant, planted};
use crate::types::{CutPoint, Lsn, Member, Position, ShardId, WindowMode};
use crate::wire::order::{Grant, GrantHead, Lsns};

/// See the module's text.
#[derive(Debug)]
pub(super) struct Span {
    pub(super) mode: WindowMode,
    /// First window.
    pub(super) window: u64,
    windows: u64,
    cuts: u32,
    first_cut: u32,
    /// Position of the first slot.
    pub(super) start: Position,
    pub(super) members: Vec<Member>,
    /// Slots of the members before each one in a cut.
    before: Vec<u64>,
    /// Slots of a whole cut, `Q`.
    quota_sum: u64,
    /// Free windows: a ring of `rows_max` rows, one a cut: `[end position, end lsn of each member…]`.
    rows: Vec<u64>,
    rows_max: usize,
    /// Cuts taken so far in a free span.
    rows_pushed: u64,
    /// End position and lsns of the last row dropped; before that, where the span starts.
    row_base: Vec<u64>,
    /// A free span that a grant ended: no cut follows, wherever in its window that was.
    closed: bool,
    /// Members whose slots from an lsn on are no-ops by decree: places in `members`.
    lost: Vec<(usize, Lsn)>,
}

impl Span {
    pub(super) fn new(grant: &Grant<'_>, free_cuts_max: usize) -> Span {
        let members: Vec<Member> = grant.members.iter().collect();
        let mut before = Vec::with_capacity(members.len());
        let mut quota_sum = 0;
        for member in &members {
            before.push(quota_sum);
            quota_sum += u64::from(member.quota);
        }
        let width = members.len() + 1;
        let rows_max = if grant.mode == WindowMode::Free { free_cuts_max } else { 0 };
        let mut row_base = Vec::with_capacity(width);
        row_base.push(grant.start.0);
        row_base.extend(members.iter().map(|m| m.first_lsn.0));
        Span {
            mode: grant.mode,
            window: grant.window,
            windows: grant.windows.into(),
            cuts: grant.cuts,
            first_cut: grant.first_cut,
            start: grant.start,
            members,
            before,
            quota_sum,
            // Zeroed, so the kernel backs a page only when the first row of it is written.
            rows: vec![0; rows_max * width],
            rows_max,
            rows_pushed: 0,
            row_base,
            closed: false,
            lost: Vec::new(),
        }
    }

    /// Takes the next window into this span if it continues it with nothing changed. A free span continues only once its
    /// last window is whole.
    pub(super) fn extend(&mut self, grant: &Grant<'_>) -> bool {
        let quotas = |a: &Member, b: &Member| a.quota == b.quota || planted(Mutant::KeepOldQuotas);
        let alike = |a: &Member, b: &Member| a.shard == b.shard && quotas(a, b) && a.open == b.open;
        let same = self.mode == grant.mode
            // What was lost in this span must not be taken for lost in the next.
            && self.lost.is_empty()
            && self.cuts == grant.cuts
            && (self.mode == WindowMode::Fixed || self.rows_pushed == self.cuts_total())
            && self.members.len() == grant.members.len()
            && self.members.iter().zip(grant.members.iter()).all(|(a, b)| alike(a, &b));
        if same {
            self.windows += u64::from(grant.windows);
        }
        same
    }

    /// A member was lost as a whole: slots of this span that were granted and not bound by then never are.
    pub(super) fn lose(&mut self, failed: &Failed) {
        if self.mode == WindowMode::Free && self.rows_pushed == 0 && self.start == failed.lease_end {
            // A free window that no cut has begun begins where the shard was lost.
            if let Some(index) = self.member_index(failed.shard) {
                let first = self.members[index].first_lsn.min(failed.lsn);
                (self.members[index].first_lsn, self.row_base[1 + index]) = (first, first.0);
            }
            return;
        }
        // One that voids nothing may lie within a span that goes on behind it.
        let voids = self.start.max(failed.from) < self.end().min(failed.lease_end);
        let concerned = self.mode == WindowMode::Fixed && voids;
        if let Some(index) = self.member_index(failed.shard).filter(|_| concerned) {
            let member = &mut self.members[index];
            member.first_lsn = member.first_lsn.min(failed.lsn);
            self.lost.push((index, failed.lsn));
        }
    }

    /// A slot of a member, or the first that was lost if that comes before.
    fn kept(&self, index: usize, lsn: Lsn) -> Lsn {
        self.lost.iter().filter(|(at, _)| *at == index).fold(lsn, |lsn, (_, first_lost)| lsn.min(*first_lost))
    }

    /// Whether a member's slot is a no-op by decree.
    fn is_lost(&self, index: usize, lsn: Lsn) -> bool {
        self.lost.iter().any(|(at, first_lost)| *at == index && *first_lost <= lsn)
    }

    /// Whether positions are predetermined.
    pub(super) fn is_fixed(&self) -> bool {
        self.mode == WindowMode::Fixed
    }

    /// Number of the window after the last.
    pub(super) fn window_end(&self) -> u64 {
        self.window + self.windows
    }

    /// Bytes this span holds on to.
    pub(super) fn held_bytes(&self) -> usize {
        let rows = self.rows_pushed.min(self.rows_max as u64) as usize;
        size_of::<Span>() + self.members.len() * (size_of::<Member>() + 16) + rows * self.width() * 8
    }

    /// A free span that a grant has ended.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Ends a free span where it is, and gives back the room for further cuts.
    pub(super) fn close(&mut self) {
        self.closed = true;
        if self.rows_pushed < self.rows_max as u64 {
            self.rows.truncate(self.rows_pushed as usize * self.width());
            self.rows.shrink_to_fit();
        }
    }

    /// Where the span begins, as a point.
    pub(super) fn first_point(&self) -> CutPoint {
        CutPoint { window: self.window, cut: self.first_cut, prefix: 0 }
    }

    /// Cuts from the span's start to its end.
    fn cuts_total(&self) -> u64 {
        if self.closed {
            return self.rows_pushed;
        }
        self.windows * u64::from(self.cuts) - u64::from(self.first_cut)
    }

    /// Cuts from the span's start to a point.
    fn cuts_until(&self, point: CutPoint) -> u64 {
        ((point.window - self.window) * u64::from(self.cuts) + u64::from(point.cut))
            .saturating_sub(u64::from(self.first_cut))
    }

    /// The point after this many cuts of the span.
    fn point_after(&self, cuts: u64) -> CutPoint {
        let from_window_start = cuts + u64::from(self.first_cut);
        CutPoint {
            window: self.window + from_window_start / u64::from(self.cuts),
            cut: (from_window_start % u64::from(self.cuts)) as u32,
            prefix: 0,
        }
    }

    /// The point `cuts` cuts after one of the span, at most its end.
    pub(super) fn later(&self, point: CutPoint, cuts: u64) -> CutPoint {
        self.point_after((self.cuts_until(point) + cuts).min(self.cuts_total()))
    }

    /// Whether a point lies in the span's windows (their common end excluded).
    pub(super) fn granted(&self, point: CutPoint) -> bool {
        point.window >= self.window
            && point.window < self.window_end()
            && point.cut < self.cuts
            && usize::from(point.prefix) < self.members.len()
    }

    /// Position after the span's last slot.
    pub(super) fn end(&self) -> Position {
        match self.mode {
            WindowMode::Fixed => self.start.plus(self.cuts_total() * self.quota_sum),
            WindowMode::Free => Position(self.last_row()[0]),
        }
    }

    /// Whether another span begins where this one ends, as far as is known.
    pub(super) fn leads_to(&self, next: &Span) -> bool {
        let goes_on =
            |m: &Member| next.first_lsn(m.shard).is_some() && next.first_lsn(m.shard) == self.end_lsn(m.shard);
        self.end() == next.start && self.window_end() == next.window && self.members.iter().all(goes_on)
    }

    fn member_index(&self, shard: ShardId) -> Option<usize> {
        match self.members.get(usize::from(shard.0)) {
            Some(member) if member.shard == shard => Some(usize::from(shard.0)),
            _ => self.members.binary_search_by_key(&shard, |m| m.shard).ok(),
        }
    }

    /// A member's first slot.
    pub(super) fn first_lsn(&self, shard: ShardId) -> Option<Lsn> {
        self.member_index(shard).map(|index| self.members[index].first_lsn)
    }

    /// A member's quota.
    pub(super) fn quota(&self, shard: ShardId) -> Option<u32> {
        self.member_index(shard).map(|index| self.members[index].quota)
    }

    /// End of a member's slots in the span: predetermined if fixed, bound so far if free.
    pub(super) fn end_lsn(&self, shard: ShardId) -> Option<Lsn> {
        let index = self.member_index(shard)?;
        let member = self.members[index];
        Some(match self.mode {
            WindowMode::Fixed => self.kept(index, member.first_lsn.plus(self.cuts_total() * u64::from(member.quota))),
            WindowMode::Free => Lsn(self.last_row()[1 + index]),
        })
    }

    /// Position at a point of a fixed span.
    pub(super) fn position_of(&self, point: CutPoint) -> Position {
        let prefix = self.before.get(usize::from(point.prefix)).copied().unwrap_or(self.quota_sum);
        self.start.plus(self.cuts_until(point) * self.quota_sum + prefix)
    }

    /// End of a member's slots at a point.
    pub(super) fn lsn_at(&self, shard: ShardId, point: CutPoint) -> Option<Lsn> {
        let index = self.member_index(shard)?;
        let member = self.members[index];
        let cuts = self.cuts_until(point).min(self.cuts_total());
        Some(match self.mode {
            WindowMode::Fixed => {
                let partly = index < usize::from(point.prefix) && cuts < self.cuts_total();
                self.kept(index, member.first_lsn.plus((cuts + u64::from(partly)) * u64::from(member.quota)))
            }
            WindowMode::Free => Lsn(self.row(cuts)?[1 + index]),
        })
    }

    /// The last whole cut with all of a member's slots below `lsn`.
    pub(super) fn point_reached(&self, shard: ShardId, lsn: Lsn) -> Option<CutPoint> {
        let index = self.member_index(shard)?;
        let member = self.members[index];
        if member.quota == 0 {
            return (lsn >= member.first_lsn).then(|| self.point_after(self.cuts_total()));
        }
        let slots = lsn.0.checked_sub(member.first_lsn.0)?;
        Some(self.point_after((slots / u64::from(member.quota)).min(self.cuts_total())))
    }

    /// End of the cut that holds a member's slot.
    pub(super) fn cut_end(&self, shard: ShardId, lsn: Lsn) -> Option<Lsn> {
        let member = self.members[self.member_index(shard)?];
        let slots = lsn.0.checked_sub(member.first_lsn.0)?;
        let quota = u64::from(member.quota);
        let cut = slots.checked_div(quota)?;
        (cut < self.cuts_total()).then(|| member.first_lsn.plus((cut + 1) * quota))
    }

    /// Position of a member's slot, and how many slots from it on are left of the member's part of the cut.
    pub(super) fn position_run(&self, shard: ShardId, lsn: Lsn) -> Option<(Position, u64)> {
        let index = self.member_index(shard)?;
        let member = self.members[index];
        let slots = lsn.0.checked_sub(member.first_lsn.0)?;
        if self.is_lost(index, lsn) {
            return None;
        }
        match self.mode {
            WindowMode::Fixed => {
                let quota = u64::from(member.quota);
                let cut = slots.checked_div(quota)?;
                let inside = slots - cut * quota;
                (cut < self.cuts_total())
                    .then(|| (self.start.plus(cut * self.quota_sum + self.before[index] + inside), quota - inside))
            }
            WindowMode::Free => {
                // The first row that ends beyond the slot.
                let row = self.row_partition(|row| row[1 + index] <= lsn.0);
                let (previous, this) = (self.row(row)?, self.row(row + 1)?);
                let inside = lsn.0.checked_sub(previous[1 + index])?;
                let before: u64 = (0..index).map(|k| this[1 + k] - previous[1 + k]).sum();
                Some((Position(previous[0] + before + inside), this[1 + index] - lsn.0))
            }
        }
    }

    /// Slot at a position.
    pub(super) fn locate(&self, position: Position) -> Option<Slot> {
        let offset = position.0.checked_sub(self.start.0)?;
        match self.mode {
            WindowMode::Fixed => {
                let (cut, inside) = (offset / self.quota_sum, offset % self.quota_sum);
                if cut >= self.cuts_total() {
                    return None;
                }
                let index = self.before.partition_point(|b| *b <= inside) - 1;
                let member = self.members[index];
                let n = inside - self.before[index];
                Some(Slot { shard: member.shard, lsn: member.first_lsn.plus(cut * u64::from(member.quota) + n) })
            }
            WindowMode::Free => {
                let row = self.row_partition(|row| row[0] <= position.0);
                let (previous, this) = (self.row(row)?, self.row(row + 1)?);
                let mut inside = position.0.checked_sub(previous[0])?;
                for (index, member) in self.members.iter().enumerate() {
                    let slots = this[1 + index] - previous[1 + index];
                    if inside < slots {
                        return Some(Slot { shard: member.shard, lsn: Lsn(previous[1 + index] + inside) });
                    }
                    inside -= slots;
                }
                None
            }
        }
    }

    /// The first position at or above one that a fixed span has given to a member, void or not, and how many follow it.
    pub(super) fn given_run(&self, shard: ShardId, position: Position) -> Option<(Position, u64)> {
        let index = self.member_index(shard)?;
        let quota = u64::from(self.members[index].quota);
        if self.mode != WindowMode::Fixed || quota == 0 {
            return None;
        }
        let offset = position.0.saturating_sub(self.start.0);
        let (cut, inside) = (offset / self.quota_sum, offset % self.quota_sum);
        let passed = inside.saturating_sub(self.before[index]);
        let (cut, passed) = if passed < quota { (cut, passed) } else { (cut + 1, 0) };
        let first = self.start.plus(cut * self.quota_sum + self.before[index] + passed);
        (cut < self.cuts_total()).then_some((first, quota - passed))
    }

    /// First slot of a member at or above a position, if the span reaches that far.
    pub(super) fn first_lsn_at(&self, shard: ShardId, position: Position) -> Option<Lsn> {
        let index = self.member_index(shard)?;
        let member = self.members[index];
        let Some(offset) = position.0.checked_sub(self.start.0) else { return Some(member.first_lsn) };
        match self.mode {
            WindowMode::Fixed => {
                let (cut, inside) = (offset / self.quota_sum, offset % self.quota_sum);
                let n = inside.saturating_sub(self.before[index]).min(member.quota.into());
                let slots = cut * u64::from(member.quota) + n;
                // At the very end the first slot is the next span's, if it is known.
                (cut < self.cuts_total()).then(|| self.kept(index, member.first_lsn.plus(slots)))
            }
            WindowMode::Free => {
                let row = self.row_partition(|row| row[0] <= position.0);
                let (previous, this) = (self.row(row)?, self.row(row + 1)?);
                let inside = position.0.checked_sub(previous[0])?;
                let before: u64 = (0..index).map(|k| this[1 + k] - previous[1 + k]).sum();
                let slots = this[1 + index] - previous[1 + index];
                Some(Lsn(previous[1 + index] + inside.saturating_sub(before).min(slots)))
            }
        }
    }

    /// First position that the span can still map.
    pub(super) fn first_known(&self) -> Position {
        match self.mode {
            WindowMode::Fixed => self.start,
            WindowMode::Free => Position(self.row_base[0]),
        }
    }

    fn width(&self) -> usize {
        self.members.len() + 1
    }

    /// Whether cuts at its start are not remembered any more.
    pub(super) fn forgets(&self) -> bool {
        self.rows_dropped() > 0
    }

    /// Rows overwritten because only `rows_max` are kept.
    fn rows_dropped(&self) -> u64 {
        self.rows_pushed.saturating_sub(self.rows_max as u64)
    }

    /// Row after `cuts` cuts of the span: row 0 is where it starts. `None` if dropped or not there yet.
    fn row(&self, cuts: u64) -> Option<&[u64]> {
        let dropped = self.rows_dropped();
        if cuts == dropped {
            return Some(&self.row_base);
        }
        if cuts < dropped || cuts > self.rows_pushed {
            return None;
        }
        let at = ((cuts - 1) % self.rows_max as u64) as usize * self.width();
        Some(&self.rows[at..at + self.width()])
    }

    fn last_row(&self) -> &[u64] {
        self.row(self.rows_pushed).unwrap_or(&self.row_base)
    }

    /// Number of cuts whose row satisfies `below`, counted like `row`'s argument, minus one: the last row below.
    fn row_partition(&self, below: impl Fn(&[u64]) -> bool) -> u64 {
        let (mut low, mut high) = (self.rows_dropped(), self.rows_pushed);
        // Invariant of the search: row(low) is below (or is the base), rows above high are not.
        while low < high {
            let middle = (low + high).div_ceil(2);
            if self.row(middle).is_some_and(&below) { low = middle } else { high = middle - 1 }
        }
        low
    }

    /// Whether all granted cuts of a free span were taken.
    pub(super) fn is_whole(&self) -> bool {
        self.rows_pushed >= self.cuts_total()
    }

    /// The point that the next free cut reaches.
    pub(super) fn next_free_point(&self) -> CutPoint {
        self.point_after(self.rows_pushed + 1)
    }

    /// Adds a free cut. `None` if it takes slots back. Returns the position after it.
    pub(super) fn push_free_cut(&mut self, lsns: &Lsns<'_>) -> Option<Position> {
        let last = self.last_row();
        let mut end = last[0];
        for (lsn, before) in lsns.iter().zip(&last[1..]) {
            end += lsn.0.checked_sub(*before)?;
        }
        let width = self.width();
        let at = (self.rows_pushed % self.rows_max as u64) as usize * width;
        let row = &mut self.rows[at..at + width];
        if self.rows_pushed >= self.rows_max as u64 {
            self.row_base.copy_from_slice(row);
        }
        row[0] = end;
        for (cell, lsn) in row[1..].iter_mut().zip(lsns.iter()) {
            *cell = lsn.0;
        }
        self.rows_pushed += 1;
        Some(Position(end))
    }

    /// The grant that tells a new follower of this span; from a point on if the span is free.
    pub(super) fn grant_from(&self, from: Option<CutPoint>, view: u32) -> (GrantHead, Vec<Member>) {
        let mut head = GrantHead {
            view,
            mode: self.mode,
            window: self.window,
            windows: self.windows as u32,
            cuts: self.cuts,
            first_cut: self.first_cut,
            start: self.start,
        };
        let mut members = self.members.clone();
        if let (WindowMode::Free, Some(point)) = (self.mode, from) {
            head.window = point.window;
            head.first_cut = point.cut;
            head.windows = (self.window_end() - point.window) as u32;
            let last = self.last_row();
            head.start = Position(last[0]);
            for (member, lsn) in members.iter_mut().zip(&last[1..]) {
                member.first_lsn = Lsn(*lsn);
            }
        }
        (head, members)
    }

    /// The grant that tells of all of this span that is known; of a free span, its cuts follow.
    pub(super) fn grant_known(&self, view: u32) -> (GrantHead, Vec<Member>) {
        match self.mode {
            WindowMode::Fixed => self.grant_from(None, view),
            WindowMode::Free => self.grant_after(self.rows_dropped(), view),
        }
    }

    /// The grant of a free span from behind its last cut but one; the last follows.
    pub(super) fn grant_of_last_cut(&self, view: u32) -> (GrantHead, Vec<Member>) {
        self.grant_after(self.rows_pushed.saturating_sub(1), view)
    }

    /// Where the last cut of a free span begins.
    pub(super) fn before_last_cut(&self) -> Position {
        Position(self.row(self.rows_pushed.saturating_sub(1)).unwrap_or(&self.row_base)[0])
    }

    /// The grant of a free span from behind so many of its cuts, of which the last is known.
    fn grant_after(&self, cuts: u64, view: u32) -> (GrantHead, Vec<Member>) {
        let (mut head, mut members) = self.grant_from(None, view);
        let (point, row) = (self.point_after(cuts), self.row(cuts).unwrap_or(&self.row_base));
        (head.window, head.first_cut, head.start) = (point.window, point.cut, Position(row[0]));
        head.windows = (self.window_end() - point.window) as u32;
        for (member, lsn) in members.iter_mut().zip(&row[1..]) {
            member.first_lsn = Lsn(*lsn);
        }
        (head, members)
    }

    /// The last cut of a free span.
    pub(super) fn last_cut(&self) -> Option<(CutPoint, Vec<Lsn>)> {
        self.rows().next_back()
    }

    /// The cuts of a free span that are remembered: the point that each reaches, and where the members' slots end there.
    pub(super) fn rows(&self) -> impl DoubleEndedIterator<Item = (CutPoint, Vec<Lsn>)> + '_ {
        let known = self.rows_dropped() + 1..=self.rows_pushed;
        known.filter_map(|cuts| {
            let row = self.row(cuts)?;
            Some((self.point_after(cuts), row[1..].iter().map(|lsn| Lsn(*lsn)).collect()))
        })
    }
}
