//! Schedules and push-back, against times worked out by hand.

use super::*;
use crate::fake::{FakeLog, Latencies, MS, US, VirtualClock};

const LATENCIES: Latencies = Latencies { deliver_ns: MS, confirm_ns: MS, acknowledge_ns: MS };

fn config(shards: u16, rate_per_s: f64, arrivals: Arrivals) -> LoadConfig {
    LoadConfig { writers: even_writers(shards, rate_per_s), record_bytes: 64, arrivals, seed: 7 }
}

/// What was handed to a log, as (shard, intended, sent).
struct Taker(Vec<(u16, u64, u64)>, usize);

impl Log for Taker {
    fn append(&mut self, shard: ShardId, record: &[u8]) -> Result<u64, LogError> {
        if self.0.len() == self.1 {
            return Err(LogError::Full);
        }
        let stamp = Stamp::of(record).unwrap();
        self.0.push((shard.0, stamp.intended_ns, stamp.sent_ns));
        Ok(self.0.iter().filter(|(s, ..)| *s == shard.0).count() as u64 - 1)
    }
    fn subscribe(
        &mut self,
        _: antelog_protocol::client::Scope,
        _: antelog_protocol::Position,
    ) -> antelog_core::client::SubscriptionId {
        antelog_core::client::SubscriptionId(0)
    }
    fn poll<H: antelog_core::client::SessionHandler>(&mut self, _now_ns: u64, _handler: &mut H) -> usize {
        0
    }
}

#[test]
fn regular_writers_are_evenly_staggered() {
    let clock = VirtualClock::default();
    let mut load = Load::new(&config(4, 1000.0, Arrivals::Regular), 1, 0, 2 * MS).unwrap();
    let mut log = Taker(Vec::new(), usize::MAX);
    while load.next_ns().is_some() {
        load.send(&mut log, &clock).unwrap();
        clock.advance(50 * US);
    }
    let expected = [(0, 0), (1, 250), (2, 500), (3, 750), (0, 1000), (1, 1250), (2, 1500), (3, 1750)];
    assert_eq!(log.0, expected.map(|(shard, us)| (shard, us * US, us * US)));
}

#[test]
fn rounding_does_not_add_up() {
    // A third of a nanosecond is lost per record when the distance is rounded: 1 us in 3000 records.
    let clock = VirtualClock::default();
    let mut load = Load::new(&config(1, 3000.0, Arrivals::Regular), 1, 0, 1000 * MS + 1).unwrap();
    let mut log = Taker(Vec::new(), usize::MAX);
    clock.advance(1000 * MS);
    while load.next_ns().is_some() {
        load.send(&mut log, &clock).unwrap();
    }
    assert_eq!(log.0.len(), 3001);
    assert_eq!((log.0[1].1, log.0[2].1, log.0[3000].1), (333_333, 666_667, 1000 * MS));
}

#[test]
fn a_full_log_takes_records_later_in_order_with_their_intended_times() {
    let clock = VirtualClock::default();
    let mut load = Load::new(&config(1, 1000.0, Arrivals::Regular), 1, 0, 4 * MS).unwrap();
    let mut log = Taker(Vec::new(), 1);
    assert_eq!(load.send(&mut log, &clock), Ok(1));
    clock.advance(2 * MS);
    assert_eq!(load.send(&mut log, &clock), Ok(0));
    assert_eq!((load.next_ns(), load.pushed_back()), (Some(MS), 1));
    log.1 = 3;
    assert_eq!(load.send(&mut log, &clock), Ok(2));
    assert_eq!(log.0[1..], [(0, MS, 2 * MS), (0, 2 * MS, 2 * MS)]);
    assert_eq!((load.abandon(), load.next_ns(), load.outstanding()), (1, None, 3));
}

#[test]
fn a_backlog_is_sent_in_bursts() {
    let clock = VirtualClock::default();
    let mut load = Load::new(&config(2, 1000.0, Arrivals::Regular), 1, 0, 100 * MS).unwrap();
    clock.advance(100 * MS);
    let mut log = Taker(Vec::new(), usize::MAX);
    let bursts: Vec<usize> = (0..5).map(|_| load.send(&mut log, &clock).unwrap()).collect();
    assert_eq!(bursts, [64, 64, 64, 8, 0]);
    assert!(log.0.is_sorted_by_key(|(_, intended_ns, _)| *intended_ns));
}

#[test]
fn bursts_come_at_once_at_the_mean_rate_with_a_phase_from_the_seed() {
    let times = |seed| {
        let clock = VirtualClock::default();
        clock.advance(10 * MS);
        let config = LoadConfig { seed, ..config(2, 1000.0, Arrivals::Bursts(3)) };
        let mut load = Load::new(&config, 1, 0, 10 * MS).unwrap();
        let mut log = Taker(Vec::new(), usize::MAX);
        while load.next_ns().is_some() {
            load.send(&mut log, &clock).unwrap();
        }
        log.0.into_iter().map(|(shard, intended_ns, _)| (shard, intended_ns)).collect::<Vec<(u16, u64)>>()
    };
    // Three records every 3 ms; the phases that seed 7 gives to the two writers are 2_164_525 and 1_527_328 ns.
    let bursts = [(1, 1_527_328), (0, 2_164_525), (1, 4_527_328), (0, 5_164_525), (1, 7_527_328), (0, 8_164_525)];
    let expected: Vec<(u16, u64)> = bursts.into_iter().flat_map(|burst| [burst; 3]).collect();
    assert_eq!(times(7), expected);
    assert_ne!(times(8), expected);
}

#[test]
fn uneven_rates_have_the_mean() {
    let rates = |shards| uneven_writers(shards, 10_000.0).iter().map(|w| w.rate_per_s).collect::<Vec<f64>>();
    assert_eq!(rates(2), [2_000.0, 18_000.0]);
    assert_eq!(rates(4), [4_000.0, 16_000.0, 4_000.0, 16_000.0]);
    assert_eq!(rates(3), [5_000.0, 20_000.0, 5_000.0]);
    assert_eq!(rates(1), [10_000.0]);
    assert_eq!(mean_rate_per_s(&uneven_writers(2, 10_000.0)), 10_000.0);
    let clock = VirtualClock::default();
    clock.advance(4 * MS);
    let config = LoadConfig { writers: uneven_writers(2, 1000.0), ..config(2, 1.0, Arrivals::Regular) };
    let mut load = Load::new(&config, 1, 0, 4 * MS).unwrap();
    let mut log = Taker(Vec::new(), usize::MAX);
    load.send(&mut log, &clock).unwrap();
    // Every 5 ms to shard 0 and every 555.6 µs to shard 1, half of that after the start.
    let ns = [277_778, 833_333, 1_388_889, 1_944_444, 2_500_000, 3_055_556, 3_611_111];
    let expected: Vec<(u16, u64)> = [(0, 0)].into_iter().chain(ns.map(|ns| (1, ns))).collect();
    assert_eq!(log.0.iter().map(|(shard, ns, _)| (*shard, *ns)).collect::<Vec<(u16, u64)>>(), expected);
}

#[test]
fn a_moved_record_keeps_its_intended_time_and_goes_first() {
    let clock = VirtualClock::default();
    clock.advance(2 * MS);
    let mut load = Load::new(&config(2, 1000.0, Arrivals::Regular), 1, 0, 2 * MS).unwrap();
    let mut log = Taker(Vec::new(), usize::MAX);
    assert_eq!(load.send(&mut log, &clock), Ok(4));
    // Shard 0 refuses what was due at 0 and at 1 ms; there is no writer for shard 9.
    let stamps = [0, 1].map(|seq| load.settle(ShardId(0), seq).unwrap());
    assert!(!load.move_to(ShardId(9), stamps[0]));
    assert!(stamps.into_iter().all(|stamp| load.move_to(ShardId(1), stamp)));
    assert_eq!((load.next_ns(), load.outstanding()), (Some(0), 2));
    clock.advance(MS);
    assert_eq!(load.send(&mut log, &clock), Ok(2));
    assert_eq!(log.0[4..], [(1, 0, 3 * MS), (1, MS, 3 * MS)]);
    assert_eq!((load.next_ns(), load.outstanding(), load.sent()), (None, 4, 6));
    // What was moved and never sent is left, too.
    let stamp = load.settle(ShardId(1), 0).unwrap();
    assert!(load.move_to(ShardId(0), stamp));
    assert_eq!((load.abandon(), load.next_ns()), (1, None));
}

#[test]
fn poisson_arrivals_have_the_rate_and_depend_on_the_seed_only() {
    let intended = |seed| {
        let clock = VirtualClock::default();
        clock.advance(10_000 * MS);
        let config = LoadConfig { seed, ..config(2, 1000.0, Arrivals::Poisson) };
        let mut load = Load::new(&config, 1, 0, 10_000 * MS).unwrap();
        let mut log = Taker(Vec::new(), usize::MAX);
        while load.next_ns().is_some() {
            load.send(&mut log, &clock).unwrap();
        }
        log.0
    };
    let (first, again, other) = (intended(1), intended(1), intended(2));
    assert_eq!(first, again);
    assert_ne!(first, other);
    // 20,000 are expected with a standard deviation of 141; of their distances, e^-1 exceed the mean.
    assert!((19_400..20_600).contains(&first.len()), "{}", first.len());
    let of_shard: Vec<u64> = first.iter().filter(|(shard, ..)| *shard == 0).map(|(_, ns, _)| *ns).collect();
    let long = of_shard.windows(2).filter(|pair| pair[1] - pair[0] > MS).count() as f64 / of_shard.len() as f64;
    assert!((0.35..0.39).contains(&long), "{long}");
}

#[test]
fn acknowledgements_settle_records_in_any_order_and_once() {
    let clock = VirtualClock::default();
    let mut load = Load::new(&config(1, 1000.0, Arrivals::Regular), 9, 0, 3 * MS).unwrap();
    clock.advance(3 * MS);
    load.send(&mut FakeLog::new(&clock, LATENCIES), &clock).unwrap();
    let stamp = |intended_ns| Some(Stamp { intended_ns, sent_ns: 3 * MS, tag: 9 });
    assert_eq!(load.settle(ShardId(0), 1), stamp(MS));
    assert_eq!(load.settle(ShardId(0), 1), None);
    assert_eq!(load.settle(ShardId(0), 0), stamp(0));
    assert_eq!(load.settle(ShardId(0), 0), None);
    assert_eq!(load.settle(ShardId(5), 2), None);
    assert_eq!(load.outstanding(), 1);
    assert_eq!(load.settle(ShardId(0), 2), stamp(2 * MS));
    assert_eq!(load.settle(ShardId(0), 3), None);
    assert_eq!(load.outstanding(), 0);
}

#[test]
fn nonsense_is_refused_with_a_reason() {
    let reason = |config: LoadConfig| Load::new(&config, 0, 0, 1).map(|_| ()).unwrap_err();
    assert!(reason(config(0, 1.0, Arrivals::Regular)).contains("no shard"));
    assert!(reason(config(1, 0.0, Arrivals::Regular)).contains("rate of 0"));
    assert!(reason(config(1, f64::NAN, Arrivals::Regular)).contains("rate of NaN"));
    assert!(reason(config(1, 1.0, Arrivals::Bursts(0))).contains("at least 1 record"));
    assert!(reason(LoadConfig { record_bytes: 23, ..config(1, 1.0, Arrivals::Regular) }).contains("time stamps"));
    assert_eq!(Stamp::of(&[0; 23]), None);
}
