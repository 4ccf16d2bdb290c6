//! A whole demo on virtual time, with scripted latencies per mode.

use super::*;
use crate::consumer::Compute;
use crate::fake::{FakeBench, MS, US, VirtualClock};
use crate::load::{Arrivals, even_writers};

fn config(modes: &[Ordering], repetitions: u32) -> DemoConfig {
    let load = LoadConfig { writers: even_writers(2, 200.0), record_bytes: 4096, arrivals: Arrivals::Regular, seed: 3 };
    DemoConfig {
        modes: modes.to_vec(),
        repetitions,
        seconds: 0.25 * modes.len() as f64 * f64::from(repetitions),
        warm_up_ns: 50 * MS,
        drain_ns: 50 * MS,
        load,
        merged: true,
        hog: None,
        consumer: ConsumerConfig { compute_ns: 500 * US, workers: 1, kind: Compute::Timed },
        seed: 11,
        quiet: true,
        labels: Labels { transport: "tcp".into(), durability: "replicated".into(), launch: "shared".into(), cores: 2 },
    }
}

const ALL: [Ordering; 3] = [Ordering::FreeTick, Ordering::FreeEvent, Ordering::Fixed];

fn assert_close(actual: f64, expected: f64) {
    assert!((actual - expected).abs() <= expected * 0.002, "{actual} is not {expected}");
}

#[test]
fn every_repetition_runs_each_mode_once_in_random_order() {
    let mut bench = FakeBench::new(&VirtualClock::default());
    let clock = bench.clock.clone();
    run(&mut bench, &clock, config(&ALL, 8)).unwrap();
    assert_eq!((bench.started.len(), bench.stopped), (24, 24));
    let orders: Vec<Vec<Ordering>> =
        bench.started.chunks(3).map(|chunk| chunk.iter().map(|(mode, _)| *mode).collect()).collect();
    for (number, chunk) in bench.started.chunks(3).enumerate() {
        assert!(ALL.iter().all(|mode| chunk.contains(&(*mode, number as u32))));
    }
    assert!(orders.iter().any(|order| *order != orders[0]), "the order never changes");
    let mut again = FakeBench::new(&VirtualClock::default());
    let clock = again.clock.clone();
    run(&mut again, &clock, config(&ALL, 8)).unwrap();
    assert_eq!(again.started, bench.started);
}

#[test]
fn gains_order_paths_and_predictions_follow_from_the_script() {
    let mut bench = FakeBench::new(&VirtualClock::default());
    let clock = bench.clock.clone();
    let demo = run(&mut bench, &clock, config(&ALL, 3)).unwrap();
    // 200 ms measured × 2 shards × 200 records/s × 3 repetitions.
    assert!(demo.modes.iter().all(|result| result.measured.e2e.count() == 240));
    let [tick, event, fixed] = &demo.modes[..] else { panic!() };
    // In hand at 400 and done at 900, bound at 1000.
    assert_close(fixed.measured.e2e.mean_us(), 1000.0);
    assert_close(fixed.order_path_us.unwrap(), 600.0);
    assert_close(tick.measured.e2e.mean_us(), 2000.0);
    assert_close(tick.order_path_us.unwrap(), 1100.0);
    // Two repetitions at 1100 and one at 2200, and 500 of computation after it.
    assert_close(event.measured.delivery.mean_us(), 4400.0 / 3.0);
    assert_close(event.order_path_us.unwrap(), 4400.0 / 3.0 - 400.0);
    let gain = demo.gain(Ordering::FreeEvent).unwrap();
    for (spread, median, max) in [(gain.delivery_p50, 2.75, 5.5), (gain.e2e_mean, 1.6, 2.7)] {
        assert_close(spread.median, median);
        assert_close(spread.min, median);
        assert_close(spread.max, max);
        assert_eq!(spread.count, 3);
    }
    // (400 + 700 + 0 + 500) / max(400 + 600, 400 + 0 + 500), and 2.7 in one repetition.
    assert_close(gain.e2e_predicted, 1.6);
    assert_close(demo.gain(Ordering::FreeTick).unwrap().e2e_predicted, 2.0);
    assert_close(fixed.counted.no_op_share(), 0.04);
    assert_eq!((tick.counted.no_op_share(), event.counted.total("shard", "records")), (0.0, 288));
}

#[test]
fn the_table_fits_and_says_what_was_measured() {
    let mut bench = FakeBench::new(&VirtualClock::default());
    bench.fail = Some((Ordering::Fixed, 1));
    let clock = bench.clock.clone();
    let mut demo = run(&mut bench, &clock, config(&ALL, 3)).unwrap();
    demo.failures.push("word ".repeat(60));
    demo.outside = Some(OutsideLoad { load_average_before: 1.5, busy_cores: 0.25, steal_share: 0.01, cores: 2 });
    // The greatest values that can be recorded, everywhere.
    let mut wide = demo.clone();
    for result in &mut wide.modes {
        (0..9).for_each(|_| result.measured.delivery.record_ns(u64::MAX));
        result.measured.confirm_wait.record_ns(u64::MAX);
        result.measured.totals.unfinished = 12_345_678;
        result.measured.totals.refused = 12_345_678;
    }
    for demo in [&demo, &wide] {
        let table = report::table(demo);
        for line in table.lines() {
            assert!(line.chars().count() <= report::WIDTH, "{} columns: {line}", line.chars().count());
        }
    }
    let table = report::table(&demo);
    for text in [
        "free-event / fixed",
        "median of 2 pairs",
        "delivery p50  2.75× (2.75–2.75)",
        "predicted 1.60×, at most 1.70× (limit at equal O: 2×)",
        "transport tcp, durability replicated, launch shared, 2 cores",
        "compute 500 µs timed, 1 worker",
        "load average 1.50 before; meanwhile others kept 0.25 of 2 cores",
        "warm-up of 0.05 s",
        "no-ops 4.0 %",
        "FAILED fixed repetition 2: no such luck",
    ] {
        assert!(table.replace("\n  ", " ").contains(text), "{text:?} is missing in\n{table}");
    }
}

#[test]
fn json_has_the_promised_shape() {
    let mut bench = FakeBench::new(&VirtualClock::default());
    let clock = bench.clock.clone();
    let demo = run(&mut bench, &clock, config(&ALL, 2)).unwrap();
    let json: serde_json::Value = serde_json::from_str(&report::json(&demo)).unwrap();
    assert_eq!((&json["transport"], &json["durability"]), (&"tcp".into(), &"replicated".into()));
    assert_eq!((&json["launch"], &json["cores"]), (&"shared".into(), &2.into()));
    let modes = json["modes"].as_object().unwrap();
    assert_eq!(modes.keys().collect::<Vec<_>>(), ["fixed", "free_event", "free_tick"]);
    for mode in modes.values() {
        for latency in ["append", "delivery", "confirm", "e2e"] {
            for figure in ["mean_us", "p50_us", "p90_us", "p99_us", "p999_us"] {
                assert!(mode[latency][figure].as_f64().unwrap() > 0.0, "{latency} {figure}");
            }
            assert_eq!(mode[latency]["count"], 160);
        }
        assert!(mode["order_path_us"].is_f64() && mode["no_op_share"].is_f64());
    }
    assert_close(json["modes"]["fixed"]["order_path_us"].as_f64().unwrap(), 600.0);
    let gain = json["gain"].as_object().unwrap();
    assert_eq!(gain.keys().collect::<Vec<_>>(), ["delivery_p50", "e2e_mean", "e2e_p50", "e2e_predicted"]);
    assert_close(gain["delivery_p50"].as_f64().unwrap(), (2.75 + 5.5) / 2.0);
}

#[test]
fn a_free_mode_alone_has_no_gain_and_no_order_path() {
    let mut bench = FakeBench::new(&VirtualClock::default());
    let clock = bench.clock.clone();
    let demo = run(&mut bench, &clock, config(&[Ordering::FreeEvent], 1)).unwrap();
    assert_eq!((demo.modes[0].order_path_us, demo.gain(Ordering::FreeEvent)), (None, None));
    assert!(report::table(&demo).contains("order path O not known"));
    assert!(report::json(&demo).contains("\"gain\": null"));
}

#[test]
fn a_mode_without_a_single_success_is_an_error() {
    let mut bench = FakeBench::new(&VirtualClock::default());
    bench.fail = Some((Ordering::Fixed, 0));
    let clock = bench.clock.clone();
    let why = run(&mut bench, &clock, config(&ALL, 1)).unwrap_err();
    assert_eq!(why, "no run in mode fixed succeeded: fixed repetition 1: no such luck");
}

#[test]
fn seconds_are_divided_over_the_runs() {
    let config = DemoConfig { seconds: 6.0, ..config(&ALL, 10) };
    assert_eq!(config.split(), Ok(Split { warm_up_ns: 50 * MS, measure_ns: 150 * MS }));
    let long = DemoConfig { warm_up_ns: 500 * MS, ..config.clone() };
    assert_eq!(long.split(), Ok(Split { warm_up_ns: 50 * MS, measure_ns: 150 * MS }));
    let short = DemoConfig { seconds: 1.0, ..long };
    assert!(short.split().unwrap_err().contains("give at least 2.0 s"));
    assert!(DemoConfig { modes: Vec::new(), ..config }.split().is_err());
}
