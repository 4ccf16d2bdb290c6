//! What one subscription was told, event by event, against the order log and the regions.

use std::collections::VecDeque;

use antelog_protocol::client::{Event, Scope};

use super::{Oracle, Violation, matches};
use crate::client::Record;

/// See the module's text.
#[derive(Debug)]
pub(in crate::sim) struct Subscribed {
    scope: Scope,
    from: u64,
    /// `Scope::All`: everything below was handed out or is no record. `Scope::Shard`: the position after the last record
    /// that was handed out.
    next: u64,
    /// `Scope::Shard`: the same in slots; unknown until the first event.
    next_lsn: Option<u64>,
    confirmed: u64,
    /// Positions of records handed out and not confirmed, with their shards.
    handed: VecDeque<(u64, u16)>,
    /// The newest view that a `Fail` told of, by shard lost.
    told: Vec<(u16, u64)>,
    /// Over, and nothing may follow.
    pub(in crate::sim) ended: bool,
    pub(in crate::sim) delivered: u64,
}

impl Oracle {
    /// A new subscription; returns its number.
    pub(in crate::sim) fn subscribe(&mut self, scope: Scope, from: u64) -> usize {
        self.subscribed.push(Subscribed {
            scope,
            from,
            next: from,
            next_lsn: None,
            confirmed: from,
            handed: VecDeque::new(),
            told: Vec::new(),
            ended: false,
            delivered: 0,
        });
        self.subscribed.len() - 1
    }

    /// A subscription's session is gone.
    pub(in crate::sim) fn unsubscribe(&mut self, subscription: usize) {
        self.subscribed[subscription].ended = true;
    }

    /// A subscription is told something.
    pub(in crate::sim) fn event(&mut self, subscription: usize, event: &Event<Record>) {
        let result = self.judge(subscription, event).map_err(|violation| {
            let Subscribed { scope, from, .. } = self.subscribed[subscription];
            let what = format!("subscription {subscription} ({scope:?} from {from}): {}", violation.what);
            Violation::new(violation.id, what)
        });
        self.check(result);
    }

    fn judge(&mut self, subscription: usize, event: &Event<Record>) -> Result<(), Violation> {
        if self.subscribed[subscription].ended {
            return Err(Violation::new("I2", format!("{event:?} after the end")));
        }
        match event {
            Event::Fail { from } => self.judge_fail(subscription, from.0),
            Event::Unavailable { from, to } => self.judge_unavailable(subscription, from.0, to.0),
            Event::Deliver { position, shard, record, speculative, view } => {
                let newest = self.order.members.view;
                if u64::from(*view) > newest {
                    return Err(Violation::new("I10", format!("a delivery of view {view}, the newest is {newest}")));
                }
                self.judge_delivery(subscription, (position.0, shard.0), record, *speculative)
            }
            Event::Confirm { upto } => self.judge_confirm(subscription, upto.0),
        }
    }

    fn judge_delivery(
        &mut self,
        subscription: usize,
        (position, shard): (u64, u16),
        record: &Record,
        speculative: bool,
    ) -> Result<(), Violation> {
        let committed = self.order.committed();
        if !speculative && position >= committed {
            let what = format!("{position} is said to be bound, bound are positions below {committed}");
            return Err(Violation::new("I8", what));
        }
        let Some(place) = self.order.locate(position) else {
            return Err(Violation::new("I13", format!("{position} is delivered without a grant or cut")));
        };
        if place.shard != shard {
            return Err(Violation::new("I1", format!("{position} is shard {}'s, not {shard}'s", place.shard)));
        }
        if place.void {
            return self.judge_void_delivery(subscription, (position, shard, place.lsn), record);
        }
        self.advance(shard, place.lsn + 1)?;
        let Some(number) = self.shards[usize::from(shard)].entry(place.lsn).and_then(|entry| entry.record) else {
            return Err(Violation::new("I16", format!("{position} is delivered and holds no record")));
        };
        if !matches(number, self.records[number as usize].len, record) {
            let what = format!("{position} holds record {number}, other bytes are delivered");
            return Err(Violation::new("I1", what));
        }
        self.reached.speculative += u64::from(speculative && position >= committed);
        self.pass(subscription, position)?;
        let subscribed = &mut self.subscribed[subscription];
        subscribed.delivered += 1;
        subscribed.handed.push_back((position, shard));
        match subscribed.scope {
            Scope::All => subscribed.next = position + 1,
            Scope::Shard(_) => {
                subscribed.next_lsn = Some(place.lsn + 1);
                subscribed.next = position + 1;
            }
        }
        Ok(())
    }

    /// A record of a shard that was lost meanwhile: true of what the shard held then, and nothing of it is confirmed.
    fn judge_void_delivery(
        &mut self,
        subscription: usize,
        (position, shard, lsn): (u64, u16, u64),
        record: &Record,
    ) -> Result<(), Violation> {
        let view = self.order.members.failure_at(shard, position).map_or(0, |f| f.view);
        if self.subscribed[subscription].told.contains(&(shard, view)) {
            return Err(Violation::new("I9", format!("{position} is delivered after the fail of view {view}")));
        }
        let is_it = |number: u32| matches(number, self.records[number as usize].len, record);
        // Whoever does not hear of the view goes on taking records, and they are delivered until clients hear of it.
        let taken_later =
            || (0..self.records.len() as u32).any(|n| self.records[n as usize].shard == shard && is_it(n));
        if !self.shards[usize::from(shard)].lost_records(lsn).any(is_it) && !taken_later() {
            let what = format!("{position} is delivered, which nobody appended to the lost shard {shard}");
            return Err(Violation::new("I1", what));
        }
        self.reached.void_deliveries += 1;
        let is_all = self.subscribed[subscription].scope == Scope::All;
        if is_all {
            self.pass(subscription, position)?;
        }
        let subscribed = &mut self.subscribed[subscription];
        if position < subscribed.next {
            return Err(Violation::new("I2", format!("{position} comes after {}", subscribed.next)));
        }
        subscribed.delivered += 1;
        subscribed.handed.push_back((position, shard));
        subscribed.next = position + 1;
        Ok(())
    }

    /// Bound slots that a lost shard held and that nobody can show: passed, and never delivered.
    fn judge_unavailable(&mut self, subscription: usize, from: u64, to: u64) -> Result<(), Violation> {
        let wrong = |what: &str| Err(Violation::new("I4", format!("positions {from} to {to} are unavailable: {what}")));
        if to <= from || to > self.order.committed() {
            return wrong("not all of them are bound");
        }
        self.pass(subscription, from)?;
        let mut at = from;
        while at < to {
            let Some(place) = self.order.locate(at).filter(|place| !place.void) else {
                return wrong("some are no slots");
            };
            if !self.order.members.may_lack(place.shard, place.lsn) {
                return wrong("their shard was never lost");
            }
            at += place.run.min(to - at);
            if let Scope::Shard(_) = self.subscribed[subscription].scope {
                self.subscribed[subscription].next_lsn = Some(place.lsn + place.run.min(to - from));
            }
        }
        self.reached.unavailable += 1;
        let subscribed = &mut self.subscribed[subscription];
        subscribed.next = subscribed.next.max(to);
        Ok(())
    }

    /// I8, I9, I10, I15: taken back is what was handed out of a lost shard, from its first record on.
    fn judge_fail(&mut self, subscription: usize, from: u64) -> Result<(), Violation> {
        let subscribed = &self.subscribed[subscription];
        if from < subscribed.confirmed {
            let what = format!("fails from {from}, confirmed are positions below {}", subscribed.confirmed);
            return Err(Violation::new("I9", what));
        }
        let handed = subscribed.handed.iter().find(|(position, _)| *position == from);
        let failure = handed.and_then(|(position, shard)| self.order.members.failure_at(*shard, *position));
        let Some(failure) = failure.copied() else {
            return Err(Violation::new("I10", format!("fails from {from}, where no record of a lost shard was")));
        };
        let sooner = subscribed.handed.iter().find(|(position, shard)| {
            let lost = self.order.members.failure_at(*shard, *position);
            *position < from && lost.is_some_and(|f| f.view <= failure.view)
        });
        if let Some((position, shard)) = sooner {
            let what = format!("fails from {from}, the record of shard {shard} at {position} is lost too");
            return Err(Violation::new("I8", what));
        }
        self.reached.fails += 1;
        let subscribed = &mut self.subscribed[subscription];
        subscribed.handed.retain(|(position, _)| *position < from);
        subscribed.next = from;
        if subscribed.scope == Scope::Shard(antelog_protocol::ShardId(failure.shard)) {
            subscribed.next_lsn = subscribed.next_lsn.map(|next| next.min(failure.lsn));
        }
        subscribed.told.push((failure.shard, failure.view));
        Ok(())
    }

    /// Everything up to a position was handed out or is no record (I2).
    fn pass(&mut self, subscription: usize, to: u64) -> Result<(), Violation> {
        let Subscribed { scope, from, next, next_lsn, .. } = self.subscribed[subscription];
        let missed = |position| Err(Violation::new("I2", format!("passes {position}, which holds a record")));
        match scope {
            Scope::All => {
                if to < next {
                    return Err(Violation::new("I2", format!("{to} comes after {next}")));
                }
                let mut at = next;
                while at < to {
                    let Some(place) = self.order.locate(at) else { return missed(at) };
                    let run = place.run.min(to - at);
                    if place.void {
                        at += run;
                        continue;
                    }
                    self.advance(place.shard, place.lsn + run)?;
                    let truth = &self.shards[usize::from(place.shard)];
                    if let Some(lsn) = truth.record_between(place.lsn, place.lsn + run) {
                        return missed(at + lsn - place.lsn);
                    }
                    let entry = truth.entry(place.lsn);
                    let split = entry.is_some_and(|e| e.lsn + e.count > place.lsn + place.run);
                    self.reached.no_op_splits += u64::from(split);
                    at += run;
                }
                self.subscribed[subscription].next = to;
            }
            Scope::Shard(shard) => {
                let Some(first) = next_lsn.or_else(|| self.order.lsn_below(shard.0, from)) else { return missed(from) };
                let Some(end) = self.order.lsn_below(shard.0, to) else { return missed(to) };
                if end < first {
                    return Err(Violation::new("I2", format!("{to} comes after slot {first}")));
                }
                self.advance(shard.0, end)?;
                if let Some(lsn) = self.shards[usize::from(shard.0)].record_between(first, end) {
                    return missed(self.order.position(shard.0, lsn).unwrap_or(to));
                }
                self.subscribed[subscription].next_lsn = Some(end);
            }
        }
        Ok(())
    }

    fn judge_confirm(&mut self, subscription: usize, upto: u64) -> Result<(), Violation> {
        let committed = self.order.committed();
        if upto > committed {
            return Err(Violation::new("I8", format!("confirms up to {upto}, bound are positions below {committed}")));
        }
        if upto <= self.subscribed[subscription].confirmed {
            return Err(Violation::new("I2", format!("confirms {upto} again")));
        }
        let ahead = match self.subscribed[subscription] {
            Subscribed { scope: Scope::All, next, .. } => upto > next,
            Subscribed { scope: Scope::Shard(shard), next_lsn, .. } => {
                next_lsn.is_none_or(|next| self.order.lsn_below(shard.0, upto).is_some_and(|end| end > next))
            }
        };
        if ahead {
            self.pass(subscription, upto)?;
        }
        while let Some((position, shard)) = self.subscribed[subscription].handed.front().copied() {
            if position >= upto {
                break;
            }
            if self.order.members.failure_at(shard, position).is_some() {
                let what = format!("confirms up to {upto}, but the record delivered at {position} was lost");
                return Err(Violation::new("I8", what));
            }
            self.subscribed[subscription].handed.pop_front();
        }
        self.subscribed[subscription].confirmed = upto;
        Ok(())
    }

    /// A subscription is told that the log begins above its next position.
    pub(in crate::sim) fn trimmed(&mut self, subscription: usize, head: u64) {
        let may_trim = self.may_trim;
        let subscribed = &mut self.subscribed[subscription];
        subscribed.ended = true;
        self.reached.trims += 1;
        let (from, next) = (subscribed.from, subscribed.next);
        if !may_trim || head <= from {
            let what = format!("subscription {subscription} (from {from}, next {next}) is trimmed below {head}");
            self.complain(Violation::new("I18", what));
        }
    }

    /// Subscriptions that were not told everything that is bound.
    pub(in crate::sim) fn behind(&self) -> Option<String> {
        let committed = self.order.committed();
        let behind = |s: &Subscribed| {
            let untold = match s.scope {
                // The published beat binds for ever.
                Scope::All if self.never_rests => self.acknowledged_to.is_some_and(|to| s.confirmed <= to),
                Scope::All => s.confirmed < committed,
                // Where positions were forgotten, what belongs to other shards is confirmed with the shard's next record.
                Scope::Shard(shard) => {
                    let end = self.order.committed_lsn(shard.0);
                    let first = s.next_lsn.or_else(|| self.order.lsn_below(shard.0, s.from)).unwrap_or(end);
                    self.shards[usize::from(shard.0)].record_between(first, end).is_some()
                        || s.confirmed < s.next.min(committed)
                }
            };
            !s.ended && s.from < committed && untold
        };
        let (at, subscribed) = self.subscribed.iter().enumerate().find(|(_, s)| behind(s))?;
        let Subscribed { scope, from, confirmed, delivered, .. } = subscribed;
        Some(format!(
            "subscription {at} ({scope:?} from {from}) has {delivered} records and is confirmed up to {confirmed} of \
             {committed}"
        ))
    }
}
