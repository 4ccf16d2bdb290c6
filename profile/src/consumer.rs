//! A consumer that computes on what it is given and releases outputs once nothing can take them back.
//!
//! It takes records in batches: whatever is in hand when a worker becomes free. One worker is the serial consumer of the
//! published measurements; more compute several batches at once. The output of a record leaves at the later of two times:
//! its computation is done, and its position is known to be bound. Speculative delivery lets the two overlap.

use std::collections::VecDeque;

use antelog_protocol::Position;

use crate::load::Stamp;
use crate::log::Clock;
use crate::stats::Measured;

/// How a computation passes its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compute {
    /// The worker is taken until the time is over, and the processor is free: as if the worker were elsewhere. Right where
    /// there are fewer cores than threads. The end is noticed at the loop's next turn.
    Timed,
    /// The loop itself burns the processor and neither sends nor receives meanwhile.
    Spin,
}

impl Compute {
    /// The name used in configuration and output.
    pub const fn name(self) -> &'static str {
        match self {
            Compute::Timed => "timed",
            Compute::Spin => "spin",
        }
    }
}

/// What the consumer computes.
#[derive(Clone, Copy, Debug)]
pub struct ConsumerConfig {
    /// Time that the computation on one batch takes, in nanoseconds, however many records it has.
    pub compute_ns: u64,
    /// Batches computed at once, at least 1.
    pub workers: usize,
    /// How that time passes.
    pub kind: Compute,
}

/// Records that the consumer has room for before its table must grow.
const ITEMS_ROOM: usize = 16 * 1024;
/// A time that has not come yet.
const NOT_YET: u64 = u64::MAX;

struct Item {
    position: Position,
    intended_ns: u64,
    in_hand_ns: u64,
    confirmed_ns: u64,
    done_ns: u64,
}

/// A computation on the items numbered `from..to`.
#[derive(Clone, Copy)]
struct Batch {
    from: u64,
    to: u64,
    start_ns: u64,
    due_ns: u64,
}

/// The consumer. Items are numbered in the order of delivery, which is the order of positions; the numbers of items that a
/// failure takes back are given out again.
pub struct Consumer {
    config: ConsumerConfig,
    /// Items whose outputs have not all been released yet, and what lies between them.
    items: VecDeque<Item>,
    /// The number of `items[0]`.
    first: u64,
    /// The first item that no batch has taken.
    in_hand: u64,
    /// The first item that no `Confirm` covers.
    unconfirmed: u64,
    /// What workers compute, in the order of starting, which is the order of ending: every batch takes the same time.
    busy: VecDeque<Batch>,
    released: u64,
}

impl Consumer {
    /// A consumer with nothing in hand.
    ///
    /// # Errors
    /// When it has no worker.
    pub fn new(config: &ConsumerConfig) -> Result<Consumer, String> {
        if config.workers == 0 {
            return Err("a consumer needs at least 1 worker".to_owned());
        }
        Ok(Consumer {
            config: *config,
            items: VecDeque::with_capacity(ITEMS_ROOM),
            first: 0,
            in_hand: 0,
            unconfirmed: 0,
            busy: VecDeque::with_capacity(config.workers),
            released: 0,
        })
    }

    fn end(&self) -> u64 {
        self.first + self.items.len() as u64
    }

    /// A record arrived. One whose position is bound already counts as confirmed on arrival: the consumer knows.
    pub fn on_deliver(
        &mut self,
        now_ns: u64,
        position: Position,
        stamp: Stamp,
        speculative: bool,
        measured: &mut Measured,
    ) {
        assert!(self.items.back().is_none_or(|last| last.position < position), "deliveries go back at {position}");
        measured.totals.delivered += 1;
        measured.totals.speculative += u64::from(speculative);
        if measured.covers(stamp.intended_ns) {
            measured.delivery.record_between(stamp.intended_ns, now_ns);
            measured.delivery_service.record_between(stamp.sent_ns, now_ns);
        }
        let mut item = Item {
            position,
            intended_ns: stamp.intended_ns,
            in_hand_ns: now_ns,
            confirmed_ns: NOT_YET,
            done_ns: NOT_YET,
        };
        if !speculative {
            confirm(&mut item, now_ns, measured);
        }
        self.items.push_back(item);
    }

    /// All positions below `upto` are bound.
    pub fn on_confirm(&mut self, now_ns: u64, upto: Position, measured: &mut Measured) {
        while self.unconfirmed < self.end() {
            let item = &mut self.items[(self.unconfirmed - self.first) as usize];
            if item.position >= upto {
                break;
            }
            self.unconfirmed += 1;
            if item.confirmed_ns != NOT_YET {
                continue;
            }
            confirm(item, now_ns, measured);
            if item.done_ns != NOT_YET {
                release(item, measured);
                self.released += 1;
            }
        }
        self.forget_released();
    }

    /// Everything delivered at or above `from` is taken back. A worker all of whose batch is taken back is free at once;
    /// what is delivered again is measured again.
    pub fn on_fail(&mut self, from: Position, measured: &mut Measured) {
        measured.totals.fails += 1;
        while self.items.back().is_some_and(|item| item.position >= from) {
            let Some(item) = self.items.pop_back() else { break };
            assert!(item.confirmed_ns == NOT_YET, "a failure from {from} takes back what was confirmed");
            measured.totals.failed += 1;
        }
        let end = self.end();
        self.in_hand = self.in_hand.min(end);
        self.busy.retain_mut(|batch| {
            batch.to = batch.to.min(end);
            batch.from < batch.to
        });
    }

    /// Ends computations that are due and starts others with what is in hand. Returns how many batches ended or started.
    pub fn on_cycle(&mut self, now_ns: u64, clock: &impl Clock, measured: &mut Measured) -> usize {
        let mut work = self.finish(now_ns, measured);
        while self.in_hand < self.end() && self.busy.len() < self.config.workers {
            // Spinning for another worker's batch takes time of its own.
            let start_ns = if self.config.kind == Compute::Spin { clock.now_ns() } else { now_ns };
            let batch =
                Batch { from: self.in_hand, to: self.end(), start_ns, due_ns: start_ns + self.config.compute_ns };
            self.in_hand = batch.to;
            for item in self.items.range((batch.from - self.first) as usize..(batch.to - self.first) as usize) {
                if measured.covers(item.intended_ns) {
                    measured.queue.record_between(item.in_hand_ns, start_ns);
                }
            }
            self.busy.push_back(batch);
            work += 1;
            let end_ns = match self.config.kind {
                Compute::Timed => now_ns,
                Compute::Spin => {
                    clock.spin_until(batch.due_ns);
                    clock.now_ns()
                }
            };
            work += self.finish(end_ns, measured);
        }
        work
    }

    fn finish(&mut self, now_ns: u64, measured: &mut Measured) -> usize {
        let mut finished = 0;
        while let Some(batch) = self.busy.front().copied().filter(|batch| batch.due_ns <= now_ns) {
            self.busy.pop_front();
            finished += 1;
            for number in batch.from..batch.to {
                let item = &mut self.items[(number - self.first) as usize];
                item.done_ns = now_ns;
                if measured.covers(item.intended_ns) {
                    measured.compute.record_between(batch.start_ns, now_ns);
                }
                if item.confirmed_ns != NOT_YET {
                    release(item, measured);
                    self.released += 1;
                }
            }
        }
        if finished > 0 {
            self.forget_released();
        }
        finished
    }

    /// Only from the front, and only what a `Confirm` has passed: items are found by their number.
    fn forget_released(&mut self) {
        while self.first < self.unconfirmed && self.items.front().is_some_and(|item| item.done_ns != NOT_YET) {
            self.items.pop_front();
            self.first += 1;
        }
    }

    /// When the next computation ends, in nanoseconds.
    pub fn next_ns(&self) -> Option<u64> {
        self.busy.front().map(|batch| batch.due_ns)
    }

    /// Records whose outputs have been released.
    pub fn released(&self) -> u64 {
        self.released
    }
}

fn confirm(item: &mut Item, now_ns: u64, measured: &mut Measured) {
    item.confirmed_ns = now_ns;
    if measured.covers(item.intended_ns) {
        measured.confirm.record_between(item.intended_ns, now_ns);
        measured.confirm_wait.record_between(item.in_hand_ns, now_ns);
    }
}

fn release(item: &Item, measured: &mut Measured) {
    measured.totals.released += 1;
    if measured.covers(item.intended_ns) {
        measured.e2e.record_between(item.intended_ns, item.confirmed_ns.max(item.done_ns));
    }
}

#[cfg(test)]
mod tests;
