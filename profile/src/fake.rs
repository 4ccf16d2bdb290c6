//! A log in memory with scripted latencies, and the virtual time it runs on: for the tests, which check measurements
//! against numbers worked out by hand.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use antelog_core::client::{Record, SessionHandler, SubscriptionId};
use antelog_protocol::client::{Event, Scope};
use antelog_protocol::{Ordering, Position, ShardId};

use crate::counted::Counted;
use crate::demo::Bench;
use crate::log::{Clock, Host, Log, LogError};

/// One microsecond and one millisecond in nanoseconds.
pub const US: u64 = 1_000;
pub const MS: u64 = 1_000 * US;

/// Time that passes only when told to.
#[derive(Clone, Default)]
pub struct VirtualClock(Rc<Cell<u64>>);

impl VirtualClock {
    pub fn advance(&self, ns: u64) {
        self.0.set(self.0.get() + ns);
    }
}

impl Clock for VirtualClock {
    fn now_ns(&self) -> u64 {
        self.0.get()
    }

    fn spin_until(&self, deadline_ns: u64) {
        self.0.set(self.0.get().max(deadline_ns));
    }
}

/// Moves the clock by a step per turn of the loop.
pub struct Stepper {
    pub clock: VirtualClock,
    pub step_ns: u64,
    pub counted: Vec<Counted>,
}

impl Host for Stepper {
    fn idle(&mut self, _work: usize, _until_ns: u64) {
        self.clock.advance(self.step_ns);
    }

    fn counted(&mut self) -> Counted {
        self.counted.pop().unwrap_or_default()
    }
}

/// What a cluster of one shard has counted.
pub fn counted(records: u64, no_ops: u64) -> Counted {
    [("shard-0.records".to_owned(), records), ("shard-0.no_ops".to_owned(), no_ops)].into_iter().collect()
}

/// Nanoseconds from an append to what follows from it.
#[derive(Clone, Copy)]
pub struct Latencies {
    pub deliver_ns: u64,
    pub confirm_ns: u64,
    pub acknowledge_ns: u64,
}

enum Told {
    Deliver(Position, ShardId, Record),
    Confirm(Position),
    Acknowledge(ShardId, u64, Position),
}

pub struct FakeLog {
    clock: VirtualClock,
    latencies: Latencies,
    /// While time is in here the log is full.
    pub full: Range<u64>,
    /// At this time everything unconfirmed fails, and is delivered again at once.
    pub fail_at_ns: Option<u64>,
    told: BTreeMap<(u64, u64), Told>,
    told_count: u64,
    next_seq: BTreeMap<ShardId, u64>,
    next_position: u64,
    handed: BTreeMap<Position, (ShardId, Record)>,
}

impl FakeLog {
    pub fn new(clock: &VirtualClock, latencies: Latencies) -> FakeLog {
        FakeLog {
            clock: clock.clone(),
            latencies,
            full: 0..0,
            fail_at_ns: None,
            told: BTreeMap::new(),
            told_count: 0,
            next_seq: BTreeMap::new(),
            next_position: 0,
            handed: BTreeMap::new(),
        }
    }

    fn tell(&mut self, after_ns: u64, what: Told) {
        self.told.insert((self.clock.now_ns() + after_ns, self.told_count), what);
        self.told_count += 1;
    }

    fn deliver(&self, position: Position, shard: ShardId, record: Record) -> Event<Record> {
        let speculative = self.latencies.deliver_ns < self.latencies.confirm_ns;
        Event::Deliver { position, shard, record, speculative, view: 0 }
    }
}

impl Log for FakeLog {
    fn append(&mut self, shard: ShardId, record: &[u8]) -> Result<u64, LogError> {
        if self.full.contains(&self.clock.now_ns()) {
            return Err(LogError::Full);
        }
        let next_seq = self.next_seq.entry(shard).or_default();
        let (seq, position) = (*next_seq, Position(self.next_position));
        *next_seq += 1;
        self.next_position += 1;
        let Latencies { deliver_ns, confirm_ns, acknowledge_ns } = self.latencies;
        self.tell(deliver_ns, Told::Deliver(position, shard, record.into()));
        self.tell(confirm_ns, Told::Confirm(position.plus(1)));
        self.tell(acknowledge_ns, Told::Acknowledge(shard, seq, position));
        Ok(seq)
    }

    fn subscribe(&mut self, _scope: Scope, _from: Position) -> SubscriptionId {
        SubscriptionId(0)
    }

    fn poll<H: SessionHandler>(&mut self, now_ns: u64, handler: &mut H) -> usize {
        let subscription = SubscriptionId(0);
        let mut work = 0;
        while self.told.first_key_value().is_some_and(|((at_ns, _), _)| *at_ns <= now_ns) {
            let Some((_, told)) = self.told.pop_first() else { break };
            work += 1;
            match told {
                Told::Deliver(position, shard, record) => {
                    self.handed.insert(position, (shard, record.clone()));
                    handler.on_event(subscription, self.deliver(position, shard, record));
                }
                Told::Confirm(upto) => {
                    self.handed.retain(|position, _| *position >= upto);
                    handler.on_event(subscription, Event::Confirm { upto });
                }
                Told::Acknowledge(shard, seq, position) => handler.on_acknowledged(shard, seq, position),
            }
        }
        if self.fail_at_ns.take_if(|at_ns| *at_ns <= now_ns).is_some() {
            if let Some((from, _)) = self.handed.first_key_value() {
                handler.on_event(subscription, Event::Fail { from: *from });
            }
            for (position, (shard, record)) in &self.handed {
                handler.on_event(subscription, self.deliver(*position, *shard, record.clone()));
            }
        }
        work
    }
}

/// Fixed delivers at 400 µs and binds at 1000; free-event delivers bound at 1100, free-tick at 1500. Every other
/// repetition is slower by a factor.
pub struct FakeBench {
    pub clock: VirtualClock,
    stepper: Stepper,
    mode: Ordering,
    /// Fixed binds so much later, in microseconds.
    pub fixed_late_us: u64,
    /// The user interrupts after so many starts.
    pub interrupt_after: usize,
    pub started: Vec<(Ordering, u32)>,
    pub stopped: usize,
    /// This run does not start.
    pub fail: Option<(Ordering, u32)>,
    /// Cluster counters, given at the end of the warm-up and of the load in turn.
    at_end: bool,
}

impl FakeBench {
    pub fn new(clock: &VirtualClock) -> FakeBench {
        let clock = clock.clone();
        let stepper = Stepper { clock: clock.clone(), step_ns: 50 * US, counted: Vec::new() };
        FakeBench {
            clock,
            stepper,
            mode: Ordering::Fixed,
            fixed_late_us: 0,
            interrupt_after: usize::MAX,
            started: Vec::new(),
            stopped: 0,
            fail: None,
            at_end: false,
        }
    }
}

impl Host for FakeBench {
    fn idle(&mut self, work: usize, until_ns: u64) {
        self.stepper.idle(work, until_ns);
    }

    fn counted(&mut self) -> Counted {
        self.at_end = !self.at_end;
        match (self.at_end, self.mode) {
            (true, _) => counted(50, 50),
            (false, Ordering::Fixed) => counted(146, 54),
            (false, _) => counted(146, 50),
        }
    }

    fn interrupted(&self) -> bool {
        self.started.len() > self.interrupt_after
    }
}

impl Bench for FakeBench {
    type Log = FakeLog;

    fn start(&mut self, mode: Ordering, repetition: u32) -> Result<FakeLog, String> {
        self.started.push((mode, repetition));
        if self.fail == Some((mode, repetition)) {
            return Err("no such luck".to_owned());
        }
        self.mode = mode;
        let (deliver_us, confirm_us) = match mode {
            Ordering::Fixed | Ordering::Auto => (400, 1000 + self.fixed_late_us),
            Ordering::FreeEvent => (1100, 1100),
            Ordering::FreeTick => (1500, 1500),
        };
        let ns = |us: u64| us * US * if repetition == 1 && mode == Ordering::FreeEvent { 2 } else { 1 };
        let acknowledge_ns = ns(confirm_us + 100);
        Ok(FakeLog::new(
            &self.clock,
            Latencies { deliver_ns: ns(deliver_us), confirm_ns: ns(confirm_us), acknowledge_ns },
        ))
    }

    fn stop(&mut self, _log: FakeLog) -> Result<(), String> {
        self.stopped += 1;
        Ok(())
    }
}
