//! A closed loop: a fixed number of records under way, the next one sent as soon as one is done, and every record that
//! comes back checked.
//!
//! Open-loop load says how a log fares at a given rate; this says what rate it reaches and, with one record under way, what
//! the shortest way through it costs. A record is *under way* until it was both delivered to the subscriber and
//! acknowledged to the writer. Writer and subscriber are the same client, on the caller's thread.

use antelog_core::client::{Record, SessionHandler, Slot, SubscriptionId};
use antelog_protocol::client::{Event, Scope};
use antelog_protocol::{Position, Refusal, ShardId};

use crate::log::{Clock, Log, LogError};
use crate::stats::Series;

/// Bytes at the start of a record: its number within its shard and its send time; the number stands at the end once more.
const HEAD_BYTES: usize = 16;
/// Smallest record that can be checked.
pub const RECORD_BYTES_MIN: usize = HEAD_BYTES + 8;
/// Records sent in one turn of the loop at most, so that a large window does not keep the loop from receiving.
const BURST_MAX: u64 = 32;
/// How long records under way may take to finish before the run counts as failed, in nanoseconds.
const DRAIN_NS: u64 = 10_000_000_000;

/// One run of the loop.
#[derive(Clone, Debug)]
pub struct ClosedConfig {
    /// Written to in turn.
    pub shards: Vec<ShardId>,
    /// Bytes per record, at least [`RECORD_BYTES_MIN`].
    pub record_bytes: usize,
    /// Records under way.
    pub window: u64,
    /// Nanoseconds between the end of a record and the next one's start. With one record under way it keeps what follows an
    /// acknowledgement in the cluster from meeting the next record.
    pub pause_ns: u64,
    /// One subscription to all shards, merged in position order, instead of one for each shard.
    pub merged: bool,
    /// Nanoseconds before the measurement begins.
    pub warm_up_ns: u64,
    /// Nanoseconds measured.
    pub measure_ns: u64,
}

/// What a run gave.
#[derive(Clone, Debug, Default)]
pub struct Closed {
    /// Records that were delivered and acknowledged within the time measured, per second.
    pub records_per_s: f64,
    /// Send → record in the subscriber's hands.
    pub delivery: Series,
    /// Send → acknowledgement.
    pub append: Series,
    /// Records of the whole run, each delivered once and acknowledged once.
    pub records: u64,
}

/// What one shard's records have come to.
#[derive(Debug, Default)]
struct Lane {
    sent: u64,
    delivered: u64,
    acknowledged: u64,
    /// Of its records, the next to be acknowledged was sent at the front of this list.
    sent_ns: std::collections::VecDeque<u64>,
    first_seq: Option<u64>,
    /// The next record's position is not below this one.
    next_position: Position,
}

struct Checker<C> {
    clock: C,
    lanes: Vec<(ShardId, Lane)>,
    record_bytes: usize,
    measure: std::ops::Range<u64>,
    /// Finished within the time measured.
    finished: u64,
    merged: bool,
    closed: Closed,
    fault: Option<String>,
}

impl<C: Clock> Checker<C> {
    fn fault(&mut self, text: String) {
        self.fault.get_or_insert(text);
    }

    fn lane(&mut self, shard: ShardId) -> Option<&mut Lane> {
        self.lanes.iter_mut().find(|(id, _)| *id == shard).map(|(_, lane)| lane)
    }

    /// Records finished: delivered and acknowledged.
    fn done(&self) -> u64 {
        self.lanes.iter().map(|(_, lane)| lane.delivered.min(lane.acknowledged)).sum()
    }

    fn sent(&self) -> u64 {
        self.lanes.iter().map(|(_, lane)| lane.sent).sum()
    }

    /// Checks a record; returns when it was sent.
    fn check(&mut self, position: Position, shard: ShardId, record: &[u8]) -> Result<u64, String> {
        let (expected_bytes, merged) = (self.record_bytes, self.merged);
        let first = self.lanes.first().map_or(Position(0), |(_, lane)| lane.next_position);
        let Some(lane) = self.lane(shard) else { return Err(format!("shard {shard} was not written to")) };
        let least = if merged { first } else { lane.next_position };
        if position < least {
            return Err(format!("position {position} was delivered after {least}"));
        }
        let word =
            |at: usize| record.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(u64::MAX, u64::from_le_bytes);
        let (number, tail) = (word(0), word(record.len().saturating_sub(8)));
        if number != lane.delivered || tail != number || record.len() != expected_bytes {
            return Err(format!(
                "shard {shard} delivered record {number} of {} bytes that ends in {tail}, expected record {} of \
                 {expected_bytes} bytes",
                record.len(),
                lane.delivered
            ));
        }
        lane.delivered += 1;
        let next = if merged { self.lanes.first_mut().map(|(_, first)| first) } else { Some(lane) };
        if let Some(lane) = next {
            lane.next_position = position.plus(1);
        }
        Ok(word(8))
    }
}

impl<C: Clock> SessionHandler for Checker<C> {
    fn on_acknowledged(&mut self, shard: ShardId, seq: u64, _: Position) {
        let now_ns = self.clock.now_ns();
        let Some(lane) = self.lane(shard) else { return };
        let expected = lane.first_seq.unwrap_or(seq) + lane.acknowledged;
        let Some(sent_ns) = lane.sent_ns.pop_front().filter(|_| expected == seq) else {
            return self.fault(format!("shard {shard} acknowledged record {seq}, expected {expected}"));
        };
        lane.acknowledged += 1;
        if self.measure.contains(&sent_ns) {
            self.closed.append.record_between(sent_ns, now_ns);
        }
    }

    fn on_refused(&mut self, shard: ShardId, seq: u64, refusal: Refusal) {
        self.fault(format!("shard {shard} refused record {seq}: {refusal}"));
    }

    fn on_unknown(&mut self, shard: ShardId, seq: u64) {
        self.fault(format!("shard {shard} was lost, and with it what became of record {seq}"));
    }

    fn on_event(&mut self, _: SubscriptionId, event: Event<Record>) {
        match event {
            Event::Deliver { position, shard, record, .. } => {
                let now_ns = self.clock.now_ns();
                match self.check(position, shard, &record) {
                    Ok(sent_ns) if self.measure.contains(&sent_ns) => {
                        self.closed.delivery.record_between(sent_ns, now_ns);
                    }
                    Ok(_) => {}
                    Err(fault) => self.fault(fault),
                }
            }
            Event::Confirm { .. } => {}
            Event::Fail { from } => self.fault(format!("speculation failed from position {from} on")),
            Event::Unavailable { from, to } => self.fault(format!("positions {from} to {to} are unavailable")),
        }
    }

    fn on_trimmed(&mut self, _: SubscriptionId, head: Position) {
        self.fault(format!("the log begins at position {head}: the subscription ended"));
    }

    fn on_read(&mut self, _: u64, _: Position, _: Slot) {}

    fn on_tail(&mut self, _: u64, _: Position) {}

    fn on_connection(&mut self, address: &str, error: Option<&str>) {
        if let Some(error) = error {
            self.fault(format!("the connection to {address} was lost: {error}"));
        }
    }
}

/// Runs the loop on a log that nobody else has written to or writes to, and checks that every record sent is delivered
/// once, unchanged, in its shard's order and at a position of its own, and acknowledged once.
///
/// # Errors
/// What was wrong with the first record that failed the check, or that the log gave up.
pub fn drive<L: Log, C: Clock + Clone>(log: &mut L, clock: &C, config: &ClosedConfig) -> Result<Closed, String> {
    if config.record_bytes < RECORD_BYTES_MIN || config.window == 0 || config.shards.is_empty() {
        return Err(format!("a run needs records of {RECORD_BYTES_MIN} bytes or more, a window and a shard"));
    }
    match config.merged {
        true => _ = log.subscribe(Scope::All, Position(0)),
        false => config.shards.iter().for_each(|shard| _ = log.subscribe(Scope::Shard(*shard), Position(0))),
    }
    let from_ns = clock.now_ns() + config.warm_up_ns;
    let until_ns = from_ns + config.measure_ns;
    let mut checker = Checker {
        clock: clock.clone(),
        lanes: config.shards.iter().map(|shard| (*shard, Lane::default())).collect(),
        record_bytes: config.record_bytes,
        measure: from_ns..until_ns,
        finished: 0,
        merged: config.merged,
        closed: Closed::default(),
        fault: None,
    };
    let mut record: Vec<u8> = (0..config.record_bytes).map(|at| (at * 7 + at / 256) as u8).collect();
    let (mut turn, mut done_before, mut done_last, mut not_before_ns) = (0, None, 0, 0);
    loop {
        let now_ns = clock.now_ns();
        let done = checker.done();
        if now_ns >= from_ns {
            done_before.get_or_insert(done);
        }
        if done != done_last {
            (done_last, not_before_ns) = (done, now_ns + config.pause_ns);
        }
        if now_ns < until_ns && now_ns >= not_before_ns {
            let free = (config.window + done - checker.sent()).min(BURST_MAX);
            send(log, clock, &mut checker, &mut record, &mut turn, free)?;
        }
        if now_ns < until_ns {
            checker.finished = done - done_before.unwrap_or(done);
        } else if done == checker.sent() {
            break;
        } else if now_ns > until_ns + DRAIN_NS {
            return Err(format!("{} of {} records were not finished", checker.sent() - done, checker.sent()));
        }
        log.poll(now_ns, &mut checker);
        if let Some(fault) = checker.fault {
            return Err(fault);
        }
    }
    let (records, finished) = (checker.done(), checker.finished);
    Ok(Closed { records, records_per_s: finished as f64 / (config.measure_ns as f64 / 1e9), ..checker.closed })
}

/// Sends up to `count` records, to the shards in turn.
fn send<L: Log, C: Clock>(
    log: &mut L,
    clock: &C,
    checker: &mut Checker<C>,
    record: &mut [u8],
    turn: &mut usize,
    count: u64,
) -> Result<(), String> {
    let tail = record.len() - 8;
    for _ in 0..count {
        let shards = checker.lanes.len();
        let (shard, lane) = &mut checker.lanes[*turn % shards];
        let sent_ns = clock.now_ns();
        record[..8].copy_from_slice(&lane.sent.to_le_bytes());
        record[8..HEAD_BYTES].copy_from_slice(&sent_ns.to_le_bytes());
        record[tail..].copy_from_slice(&lane.sent.to_le_bytes());
        match log.append(*shard, record) {
            Ok(seq) => lane.first_seq.get_or_insert(seq - lane.sent),
            Err(LogError::Full) => return Ok(()),
            Err(LogError::Failed(why)) => return Err(format!("shard {shard}: {why}")),
        };
        lane.sent += 1;
        lane.sent_ns.push_back(sent_ns);
        *turn += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{FakeLog, Latencies, MS, US, VirtualClock};

    const SHARDS: [ShardId; 2] = [ShardId(0), ShardId(1)];

    struct Stepping(FakeLog, VirtualClock);

    impl Log for Stepping {
        fn append(&mut self, shard: ShardId, record: &[u8]) -> Result<u64, LogError> {
            self.0.append(shard, record)
        }

        fn subscribe(&mut self, scope: Scope, from: Position) -> SubscriptionId {
            self.0.subscribe(scope, from)
        }

        fn poll<H: SessionHandler>(&mut self, now_ns: u64, handler: &mut H) -> usize {
            self.1.advance(US);
            self.0.poll(now_ns + US, handler)
        }
    }

    fn log(clock: &VirtualClock) -> Stepping {
        let latencies = Latencies { deliver_ns: 100 * US, confirm_ns: 200 * US, acknowledge_ns: 250 * US };
        Stepping(FakeLog::new(clock, latencies), clock.clone())
    }

    fn config(window: u64) -> ClosedConfig {
        ClosedConfig {
            shards: SHARDS.to_vec(),
            record_bytes: 64,
            window,
            pause_ns: 0,
            merged: true,
            warm_up_ns: MS,
            measure_ns: 50 * MS,
        }
    }

    #[test]
    fn a_window_of_records_is_under_way() {
        for window in [1, 8] {
            let clock = VirtualClock::default();
            let closed = drive(&mut log(&clock), &clock, &config(window)).unwrap();
            // One window every 251 µs: 250 until the acknowledgement and 1 until the loop sends again.
            let expected = window as f64 / 251e-6;
            assert!((closed.records_per_s / expected - 1.0).abs() < 0.02, "{} of {expected}", closed.records_per_s);
            assert!((closed.delivery.quantile_us(0.5) - 100.0).abs() < 1.0, "{:?}", closed.delivery.summary());
            assert!((closed.append.quantile_us(0.5) - 250.0).abs() < 1.0, "{:?}", closed.append.summary());
            assert!(closed.records >= closed.delivery.count() && closed.delivery.count() > 150 * window);
        }
    }

    #[test]
    fn a_failed_speculation_fails_the_run() {
        let clock = VirtualClock::default();
        let mut log = log(&clock);
        // Four records are sent every 251 µs; this is between their delivery and their confirmation.
        log.0.fail_at_ns = Some(10 * MS + 190 * US);
        assert!(drive(&mut log, &clock, &config(4)).is_err_and(|fault| fault.contains("speculation failed")));
    }

    #[test]
    fn what_cannot_be_checked_is_refused() {
        let clock = VirtualClock::default();
        let short = ClosedConfig { record_bytes: RECORD_BYTES_MIN - 1, ..config(1) };
        assert!(drive(&mut log(&clock), &clock, &short).is_err_and(|e| e.contains("24 bytes or more")));
        assert!(drive(&mut log(&clock), &clock, &config(0)).is_err());
    }
}
