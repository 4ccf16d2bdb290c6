//! What one subscription was told, event by event, against the order log and the regions.

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
            Event::Unavailable { from, .. } => {
                Err(Violation::new("I10", format!("{from} is unavailable: no shard has failed")))
            }
            Event::Fail { from } => Err(Violation::new("I10", format!("fails from {from}: no shard has failed"))),
            Event::Deliver { position, shard, record, speculative, view } => {
                if *view != 0 {
                    return Err(Violation::new("I10", format!("a delivery of view {view}: no shard has failed")));
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
        self.advance(shard, place.lsn + 1)?;
        let Some((_, _, Some(number))) = self.shards[usize::from(shard)].entry(place.lsn) else {
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
        match subscribed.scope {
            Scope::All => subscribed.next = position + 1,
            Scope::Shard(_) => {
                subscribed.next_lsn = Some(place.lsn + 1);
                subscribed.next = position + 1;
            }
        }
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
                    self.advance(place.shard, place.lsn + run)?;
                    let truth = &self.shards[usize::from(place.shard)];
                    if let Some(lsn) = truth.record_between(place.lsn, place.lsn + run) {
                        return missed(at + lsn - place.lsn);
                    }
                    let entry = truth.entry(place.lsn);
                    let split = entry.is_some_and(|(lsn, count, _)| lsn + count > place.lsn + place.run);
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
                    self.shards[usize::from(shard.0)].record_between(first, end).is_some() || s.confirmed < s.next
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
