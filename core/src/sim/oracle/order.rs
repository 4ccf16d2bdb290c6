//! The order log as the oracle reads it: its own parser of the committed bytes and its own arithmetic of positions. It
//! shares nothing with the protocol's ledger but the byte format that PROTOCOL.md §3 and §5 define.

use super::Violation;
use super::members::{Failure, Members, Memberships};

/// How a window binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Fixed,
    Free,
}

#[derive(Clone, Copy, Debug)]
struct Part {
    shard: u16,
    quota: u64,
    first: u64,
    closed: bool,
    /// Slots of the members before this one in a cut.
    before: u64,
    /// Slots of this window from here on never come to be: the shard was lost.
    kept_end: u64,
}

/// One granted window.
#[derive(Debug)]
struct Window {
    number: u64,
    mode: Mode,
    start: u64,
    cuts: u64,
    parts: Vec<Part>,
    sum: u64,
    /// Free windows: position and slots after each cut.
    rows: Vec<(u64, Vec<u64>)>,
}

/// Where a position lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) shard: u16,
    pub(super) lsn: u64,
    /// Slots of the shard from here on at consecutive positions.
    pub(super) run: u64,
    /// No slot by decree: the shard was lost before this one was bound. `lsn` is the one that was granted.
    pub(super) void: bool,
}

/// What an entry of the order log did.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Applied {
    /// Nothing, or nothing but positions: of these shards more slots are bound.
    Bound,
    /// The members of a shard changed; what they were before.
    Members(u16, Members),
    /// A shard was lost; what its members were.
    Failed(Failure, Members),
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct OrderModel {
    windows: Vec<Window>,
    /// First slot and place in `windows` of each window that a shard is a member of.
    of_shard: Vec<Vec<(u64, usize)>>,
    /// Hash of each entry, from index 1 on.
    pub(super) hashes: Vec<u64>,
    /// Window, cut and prefix that binding has reached.
    bound: (u64, u64, u64),
    committed: u64,
    /// End of each shard's bound slots.
    committed_lsn: Vec<u64>,
    pub(super) members: Memberships,
    pub(super) prefix_cuts: u64,
    pub(super) free_cuts: u64,
    pub(super) grants: u64,
    pub(super) mode_changes: u64,
    pub(super) quota_changes: u64,
    pub(super) member_changes: u64,
    pub(super) closings: u64,
    pub(super) returns: u64,
    pub(super) early_ends: u64,
    /// The grant being read ends a free window early.
    free_ended: bool,
}

pub(super) struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    pub(super) fn number(&mut self, count: usize) -> Result<u64, Violation> {
        let short = || Violation::new("I17", "an order entry ends too early");
        let (head, rest) = self.0.split_at_checked(count).ok_or_else(short)?;
        self.0 = rest;
        Ok(head.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }
}

impl Window {
    fn part(&self, shard: u16) -> Option<(usize, Part)> {
        let at = self.parts.binary_search_by_key(&shard, |p| p.shard).ok()?;
        Some((at, self.parts[at]))
    }

    /// Position after the window's last slot; of a free window so far.
    fn end(&self) -> u64 {
        match self.mode {
            Mode::Fixed => self.start + self.cuts * self.sum,
            Mode::Free => self.rows.last().map_or(self.start, |row| row.0),
        }
    }

    /// A member's slot after the window's last, or so far.
    fn end_lsn(&self, at: usize) -> u64 {
        match self.mode {
            Mode::Fixed => {
                let part = self.parts[at];
                (part.first + self.cuts * part.quota).min(part.kept_end)
            }
            Mode::Free => self.rows.last().map_or(self.parts[at].first, |row| row.1[at]),
        }
    }

    fn row(&self, cut: usize) -> (u64, Option<&[u64]>) {
        match cut.checked_sub(1).map(|c| &self.rows[c]) {
            Some((position, lsns)) => (*position, Some(lsns)),
            None => (self.start, None),
        }
    }

    fn before_row(&self, lsns: Option<&[u64]>, at: usize) -> u64 {
        lsns.map_or(self.parts[at].first, |lsns| lsns[at])
    }

    fn locate(&self, position: u64) -> Option<Place> {
        let offset = position - self.start;
        match self.mode {
            Mode::Fixed => {
                let (cut, inside) = (offset.checked_div(self.sum)?, offset % self.sum);
                if cut >= self.cuts {
                    return None;
                }
                let part = self.parts.iter().rev().find(|p| p.before <= inside && p.quota > 0)?;
                let n = inside - part.before;
                let lsn = part.first + cut * part.quota + n;
                let void = lsn >= part.kept_end;
                let run = if void { part.quota - n } else { (part.quota - n).min(part.kept_end - lsn) };
                Some(Place { shard: part.shard, lsn, run, void })
            }
            Mode::Free => {
                let cut = self.rows.partition_point(|row| row.0 <= position);
                let (_, ends) = self.rows.get(cut)?;
                let (start, starts) = self.row(cut);
                let mut inside = position - start;
                for (at, part) in self.parts.iter().enumerate() {
                    let first = self.before_row(starts, at);
                    let slots = ends[at] - first;
                    if inside < slots {
                        let (lsn, run) = (first + inside, slots - inside);
                        return Some(Place { shard: part.shard, lsn, run, void: false });
                    }
                    inside -= slots;
                }
                None
            }
        }
    }

    fn position(&self, shard: u16, lsn: u64) -> Option<u64> {
        let (at, part) = self.part(shard)?;
        let slots = lsn.checked_sub(part.first)?;
        match self.mode {
            Mode::Fixed => {
                let cut = slots.checked_div(part.quota)?;
                (cut < self.cuts && lsn < part.kept_end)
                    .then(|| self.start + cut * self.sum + part.before + slots % part.quota)
            }
            Mode::Free => {
                let cut = self.rows.partition_point(|row| row.1[at] <= lsn);
                let (_, ends) = self.rows.get(cut)?;
                let (start, starts) = self.row(cut);
                let before: u64 = (0..at).map(|k| ends[k] - self.before_row(starts, k)).sum();
                Some(start + before + lsn - self.before_row(starts, at))
            }
        }
    }
}

impl OrderModel {
    pub(super) fn new(shards: u16, succeed: bool) -> OrderModel {
        OrderModel {
            committed_lsn: vec![0; shards.into()],
            of_shard: vec![Vec::new(); shards.into()],
            members: Memberships::new(shards, succeed),
            ..OrderModel::default()
        }
    }

    /// First position that is not bound.
    pub(super) fn committed(&self) -> u64 {
        self.committed
    }

    /// End of a shard's bound slots.
    pub(super) fn committed_lsn(&self, shard: u16) -> u64 {
        self.committed_lsn[usize::from(shard)]
    }

    /// Window and cut that binding has reached, and cuts of that window; `None` before the first grant.
    pub(super) fn bound_cut(&self) -> Option<(u64, u64, u64)> {
        let (number, cut, _) = self.bound;
        let first = self.windows.first()?.number;
        let window = number.checked_sub(first).and_then(|at| self.windows.get(at as usize));
        Some((number, cut, window.map_or(0, |w| w.cuts)))
    }

    fn window_at(&self, position: u64) -> Option<&Window> {
        let after = self.windows.partition_point(|w| w.start <= position);
        self.windows[..after].last()
    }

    /// Where a granted position lies; in a free window a bound one.
    pub(super) fn locate(&self, position: u64) -> Option<Place> {
        self.window_at(position)?.locate(position)
    }

    /// Position of a slot that a grant or a free cut covers.
    pub(super) fn position(&self, shard: u16, lsn: u64) -> Option<u64> {
        let windows = self.of_shard.get(usize::from(shard))?;
        let after = windows.partition_point(|(first, _)| *first <= lsn);
        windows[..after].iter().rev().find_map(|(_, at)| self.windows[*at].position(shard, lsn))
    }

    /// Slots of a shard below a position that is bound or granted.
    pub(super) fn lsn_below(&self, shard: u16, position: u64) -> Option<u64> {
        let after = self.windows.partition_point(|w| w.start <= position);
        for window in self.windows[..after].iter().rev() {
            let Some((at, part)) = window.part(shard) else { continue };
            let offset = position - window.start;
            return match window.mode {
                Mode::Fixed => {
                    let cut = offset.checked_div(window.sum)?.min(window.cuts);
                    let inside = (offset - cut * window.sum).saturating_sub(part.before).min(part.quota);
                    let inside = if cut == window.cuts { 0 } else { inside };
                    Some((part.first + cut * part.quota + inside).min(part.kept_end))
                }
                Mode::Free => {
                    let cut = window.rows.partition_point(|row| row.0 <= position);
                    let (start, starts) = window.row(cut);
                    let first = window.before_row(starts, at);
                    let Some((_, ends)) = window.rows.get(cut) else { return Some(first) };
                    let before: u64 = (0..at).map(|k| ends[k] - window.before_row(starts, k)).sum();
                    Some(first + (position - start).saturating_sub(before).min(ends[at] - first))
                }
            };
        }
        Some(0)
    }

    /// Reads the next committed entry; `moved` becomes the shards whose bound slots moved.
    pub(super) fn apply(&mut self, entry: &[u8], moved: &mut Vec<u16>) -> Result<Applied, Violation> {
        self.hashes.push(super::super::trace::hash(entry));
        moved.clear();
        let mut bytes = Bytes(entry);
        let (tag, detail) = (bytes.number(1)?, bytes.number(1)?);
        let (small, view) = (bytes.number(2)?, bytes.number(4)?);
        if tag == 4 {
            return Ok(self.fail(small as u16, view));
        }
        if tag == 5 {
            let changed = self.members.change(&mut bytes, small as u16, view)?;
            return Ok(changed.map_or(Applied::Bound, |before| Applied::Members(small as u16, before)));
        }
        if view != self.members.view {
            self.members.counts.voids += 1;
            return Ok(Applied::Bound);
        }
        let bound = match tag {
            1 => self.grant(&mut bytes, detail, small),
            2 => {
                let point = (bytes.number(8)?, bytes.number(4)?, small);
                self.cut(point, moved)
            }
            3 => {
                let point = (bytes.number(8)?, bytes.number(4)?, 0);
                let lsns = (0..small).map(|_| bytes.number(8)).collect::<Result<Vec<_>, _>>()?;
                self.free_cut(point, lsns, moved)
            }
            tag => Err(Violation::new("I17", format!("an order entry of an unknown kind {tag}"))),
        };
        bound.map(|()| Applied::Bound)
    }

    /// A shard is lost: what was granted to it and is not bound never comes to be.
    fn fail(&mut self, shard: u16, view: u64) -> Applied {
        let (from, lsn) = (self.committed, self.committed_lsn(shard));
        let lease_end = self.windows.last().map_or(from, Window::end);
        let failure = Failure { shard, view, from, lease_end, lsn };
        let Some(before) = self.members.fail(failure) else { return Applied::Bound };
        let first_window = self.windows.partition_point(|w| w.end() <= from);
        for window in &mut self.windows[first_window..] {
            let free = window.mode == Mode::Free && window.rows.is_empty();
            let Ok(at) = window.parts.binary_search_by_key(&shard, |p| p.shard) else { continue };
            let part = &mut window.parts[at];
            match window.mode {
                Mode::Fixed => part.kept_end = part.kept_end.min(lsn),
                // One that has not begun begins where the shard was lost.
                Mode::Free if free => part.first = part.first.min(lsn),
                Mode::Free => {}
            }
        }
        let windows = &self.windows;
        self.of_shard[usize::from(shard)].retain(|(first, at)| *at < first_window || *first < lsn);
        for (at, window) in windows.iter().enumerate().skip(first_window) {
            if let Some((_, part)) = window.part(shard).filter(|(_, p)| window.mode == Mode::Free && p.first == lsn) {
                self.of_shard[usize::from(shard)].push((part.first, at));
            }
        }
        Applied::Failed(failure, before)
    }

    fn grant(&mut self, bytes: &mut Bytes<'_>, mode: u64, members: u64) -> Result<(), Violation> {
        let (number, start) = (bytes.number(8)?, bytes.number(8)?);
        let (windows, cuts, first_cut) = (bytes.number(4)?, bytes.number(4)?, bytes.number(4)?);
        let mode = if mode == 0 { Mode::Fixed } else { Mode::Free };
        let wrong = |what: String| Err(Violation::new("I12", format!("the grant of window {number} {what}")));
        if windows != 1 || first_cut != 0 || cuts == 0 {
            return wrong("does not open one whole window".into());
        }
        let (mut parts, mut sum) = (Vec::new(), 0);
        for _ in 0..members {
            let shard = bytes.number(2)? as u16;
            let closed = bytes.number(2)? != 0;
            let (quota, first) = (bytes.number(4)?, bytes.number(8)?);
            if parts.last().is_some_and(|p: &Part| p.shard >= shard) || usize::from(shard) >= self.committed_lsn.len() {
                return wrong(format!("names shard {shard} out of order"));
            }
            let stopped = self.windows.iter().rev().find_map(|w| w.part(shard).map(|(at, _)| w.end_lsn(at)));
            if stopped.is_some_and(|lsn| lsn != first) {
                return wrong(format!("lets shard {shard} begin at slot {first}, it stopped at {stopped:?}"));
            }
            parts.push(Part { shard, quota, first, closed, before: sum, kept_end: u64::MAX });
            sum += quota;
        }
        if let Some(last) = self.windows.last() {
            if number != last.number + 1 || start != last.end() {
                return wrong(format!("starts at {start} after window {} that ends at {}", last.number, last.end()));
            }
            if last.parts.iter().any(|p| parts.iter().all(|q| q.shard != p.shard)) {
                return wrong("does not list a member of the window before".into());
            }
            if last.mode == Mode::Free && self.bound < (last.number, 0, 0) {
                return wrong("ends a free window that has not begun".into());
            }
            self.free_ended |= last.mode == Mode::Free && self.bound < (number, 0, 0);
            self.mode_changes += u64::from(last.mode != mode);
            let same = |a: &Part, b: &Part| a.shard == b.shard && a.quota == b.quota;
            self.member_changes += u64::from(last.parts.len() != parts.len());
            let closed = |parts: &[Part]| parts.iter().filter(|p| p.closed).count();
            self.closings += u64::from(closed(&last.parts) < closed(&parts));
            self.returns += u64::from(closed(&last.parts) > closed(&parts));
            self.quota_changes += u64::from(!last.parts.iter().zip(&parts).all(|(a, b)| same(a, b)));
        } else if start != 0 {
            return wrong(format!("is the first and starts at {start}"));
        }
        if std::mem::take(&mut self.free_ended) {
            self.early_ends += 1;
            self.bound = (number, 0, 0);
        }
        self.grants += 1;
        for part in &parts {
            self.of_shard[usize::from(part.shard)].push((part.first, self.windows.len()));
        }
        self.windows.push(Window { number, mode, start, cuts, parts, sum, rows: Vec::new() });
        Ok(())
    }

    fn cut(&mut self, point: (u64, u64, u64), moved: &mut Vec<u16>) -> Result<(), Violation> {
        let wrong = |what: &str| Err(Violation::new("I2", format!("the cut {point:?} {what}")));
        if point <= self.bound {
            return wrong("does not advance");
        }
        let (number, cut, prefix) = point;
        // The end of a window is written as the start of the next.
        let holding = if (cut, prefix) == (0, 0) { number.wrapping_sub(1) } else { number };
        let first = self.windows.first().map_or(0, |w| w.number);
        let Some(window) = holding.checked_sub(first).and_then(|at| self.windows.get(at as usize)) else {
            return wrong("lies beyond the grants");
        };
        let cut = if holding == number { cut } else { window.cuts };
        if window.mode != Mode::Fixed || cut > window.cuts || prefix as usize >= window.parts.len() {
            return wrong("is not one of a granted fixed window");
        }
        let in_prefix = |at: usize| cut < window.cuts && (at as u64) < prefix;
        let taken: u64 = window.parts.iter().take(prefix as usize).map(|p| p.quota).sum();
        let committed = window.start + cut * window.sum + taken;
        if committed < self.committed {
            return wrong("takes positions back");
        }
        // Earlier windows are passed as wholes.
        let passed = &self.windows[self.bound.0.saturating_sub(first) as usize..(holding - first) as usize];
        for (at, part) in passed.iter().flat_map(|w| w.parts.iter().enumerate().map(move |(at, p)| (w.end_lsn(at), p)))
        {
            let end = &mut self.committed_lsn[usize::from(part.shard)];
            *end = (*end).max(at);
            moved.push(part.shard);
        }
        for (at, part) in window.parts.iter().enumerate() {
            let lsn = (part.first + (cut + u64::from(in_prefix(at))) * part.quota).min(part.kept_end);
            let end = &mut self.committed_lsn[usize::from(part.shard)];
            if lsn > *end {
                *end = lsn;
                moved.push(part.shard);
            }
        }
        self.prefix_cuts += u64::from(prefix > 0);
        self.bound = point;
        self.committed = committed;
        Ok(())
    }

    fn free_cut(&mut self, point: (u64, u64, u64), lsns: Vec<u64>, moved: &mut Vec<u16>) -> Result<(), Violation> {
        let wrong = |what: &str| Err(Violation::new("I2", format!("the free cut {point:?} {what}")));
        let Some(window) = self.windows.last_mut().filter(|w| w.mode == Mode::Free) else {
            return wrong("has no free window");
        };
        if self.bound < (window.number, 0, 0) {
            return wrong("comes before the fixed windows are bound");
        }
        let next = window.rows.len() as u64 + 1;
        let expected = if next == window.cuts { (window.number + 1, 0, 0) } else { (window.number, next, 0) };
        if point != expected || lsns.len() != window.parts.len() {
            return wrong("is not the next one");
        }
        let mut end = window.end();
        for (at, part) in window.parts.iter().enumerate() {
            let before = window.end_lsn(at);
            if lsns[at] < before {
                return wrong("takes slots back");
            }
            end += lsns[at] - before;
            if lsns[at] > before {
                self.committed_lsn[usize::from(part.shard)] = lsns[at];
                moved.push(part.shard);
            }
        }
        if end == self.committed {
            return Err(Violation::new("L3", format!("the free cut {point:?} binds nothing")));
        }
        window.rows.push((end, lsns));
        self.free_cuts += 1;
        self.bound = point;
        self.committed = end;
        Ok(())
    }
}
