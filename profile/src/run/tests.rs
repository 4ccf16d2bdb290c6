//! The whole loop on virtual time.

use super::*;
use crate::consumer::Compute;
use crate::fake::{FakeLog, Latencies, MS, Stepper, US, VirtualClock, counted};
use crate::load::{Arrivals, even_writers};
use crate::log::LogError;

fn config(shards: u16) -> RunConfig {
    RunConfig {
        load: LoadConfig {
            writers: even_writers(shards, 1000.0),
            record_bytes: 128,
            arrivals: Arrivals::Regular,
            seed: 1,
        },
        merged: true,
        hog: None,
        consumer: ConsumerConfig { compute_ns: 0, workers: 1, kind: Compute::Timed },
        from: Position(0),
        warm_up_ns: 0,
        measure_ns: 1000 * MS,
        drain_ns: 100 * MS,
        tag: 0xA11CE,
    }
}

const LATENCIES: Latencies = Latencies { deliver_ns: 400 * US, confirm_ns: MS, acknowledge_ns: 1200 * US };

fn run(config: &RunConfig, change: impl FnOnce(&mut FakeLog)) -> Outcome {
    let clock = VirtualClock::default();
    let mut host =
        Stepper { clock: clock.clone(), step_ns: 20 * US, counted: vec![counted(1000, 20), counted(40, 16)] };
    let mut log = FakeLog::new(&clock, LATENCIES);
    change(&mut log);
    drive(&mut log, &clock, &mut host, config).unwrap()
}

fn assert_close(actual: f64, expected: f64) {
    assert!((actual - expected).abs() <= expected * 0.001, "{actual} is not {expected}");
}

#[test]
fn latencies_are_those_of_the_script() {
    let Outcome { measured, counted: since_warm_up, counted_before } = run(&config(2), |_| {});
    let series = [&measured.append, &measured.delivery, &measured.confirm, &measured.e2e, &measured.confirm_wait];
    for (series, expected_us) in series.into_iter().zip([1200.0, 400.0, 1000.0, 1000.0, 600.0]) {
        assert_eq!(series.count(), 2000);
        assert_close(series.mean_us(), expected_us);
        assert_close(series.max_us(), expected_us);
    }
    assert_eq!((measured.totals.sent, measured.totals.speculative, measured.totals.unfinished), (2000, 2000, 0));
    assert_eq!((since_warm_up, counted_before), (counted(960, 4), counted(40, 16)));
}

#[test]
fn a_stall_shows_in_intended_latencies_and_not_in_service_times() {
    let Outcome { measured, .. } = run(&config(1), |log| log.full = 400 * MS..600 * MS);
    // 200 of 1000 records fall due during the stall and wait 200, 199, … 1 ms for its end; then 400 us to be delivered.
    assert_eq!(measured.delivery.count(), 1000);
    assert_close(measured.delivery.max_us(), 200_400.0);
    assert_close(measured.delivery.quantile_us(0.9), 100_400.0);
    assert_close(measured.delivery.quantile_us(0.5), 400.0);
    assert_close(measured.delivery.mean_us(), 400.0 + (1..=200).sum::<u64>() as f64);
    assert_close(measured.append.max_us(), 201_200.0);
    // Sent late, and then served as fast as ever.
    assert_close(measured.delivery_service.max_us(), 400.0);
    assert_close(measured.append_service.max_us(), 1200.0);
    assert!(measured.totals.pushed_back > 0);
}

#[test]
fn the_warm_up_is_sent_and_not_measured() {
    let Outcome { measured, .. } = run(&RunConfig { warm_up_ns: 500 * MS, ..config(1) }, |log| log.full = 0..100 * MS);
    assert_eq!((measured.totals.sent, measured.append.count()), (1500, 1000));
    assert_close(measured.append.max_us(), 1200.0);
}

#[test]
fn computing_overlaps_with_the_order_path() {
    let mut config = config(1);
    config.consumer.compute_ns = 500 * US;
    // In hand at 400, done at 900, bound at 1000.
    assert_close(run(&config, |_| {}).measured.e2e.mean_us(), 1000.0);
    config.consumer.compute_ns = 900 * US;
    assert_close(run(&config, |_| {}).measured.e2e.mean_us(), 1300.0);
}

#[test]
fn records_of_others_are_not_measured() {
    let clock = VirtualClock::default();
    let mut log = FakeLog::new(&clock, LATENCIES);
    log.append(ShardId(1), &[7; 4]).unwrap();
    log.append(ShardId(1), &[7; 128]).unwrap();
    let mut host = Stepper { clock: clock.clone(), step_ns: 20 * US, counted: Vec::new() };
    let measured = drive(&mut log, &clock, &mut host, &config(1)).unwrap().measured;
    assert_eq!((measured.totals.foreign, measured.totals.delivered, measured.totals.unfinished), (2, 1000, 0));
}

#[test]
fn failed_speculation_is_counted() {
    // At 500.5 ms only the record sent at 500 is in hand and not bound.
    let measured = run(&config(1), |log| log.fail_at_ns = Some(500 * MS + 500 * US)).measured;
    assert_eq!((measured.totals.fails, measured.totals.failed, measured.totals.released), (1, 1, 1000));
    assert_eq!((measured.delivery.count(), measured.e2e.count()), (1001, 1000));
    assert_close(measured.delivery.max_us(), 500.0);
}

#[test]
fn what_does_not_finish_is_counted() {
    let Outcome { measured, .. } = run(&config(1), |log| log.full = 900 * MS..10_000 * MS);
    assert_eq!((measured.totals.sent, measured.totals.unfinished), (900, 100));
}

#[test]
fn a_log_that_gives_up_ends_the_run() {
    struct Broken;
    impl Log for Broken {
        fn append(&mut self, _shard: ShardId, _record: &[u8]) -> Result<u64, LogError> {
            Err(LogError::Failed("its owner went away".to_owned()))
        }
        fn subscribe(&mut self, _: antelog_protocol::client::Scope, _: Position) -> SubscriptionId {
            SubscriptionId(0)
        }
        fn poll<H: SessionHandler>(&mut self, _now_ns: u64, _handler: &mut H) -> usize {
            0
        }
    }
    let clock = VirtualClock::default();
    let mut host = Stepper { clock: clock.clone(), step_ns: US, counted: Vec::new() };
    let why = drive(&mut Broken, &clock, &mut host, &config(1)).unwrap_err();
    assert_eq!(why, "shard 0: its owner went away");
}
