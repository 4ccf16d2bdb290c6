//! Cells, verdicts and reports, on virtual time with scripted latencies.

use super::*;
use crate::fake::{FakeBench, MS, VirtualClock};

fn config(computes_ns: &[u64], scenarios: &[Scenario]) -> GridConfig {
    GridConfig {
        computes_ns: computes_ns.to_vec(),
        scenarios: scenarios.to_vec(),
        modes: vec![Ordering::Fixed, Ordering::FreeEvent],
        repetitions: 3,
        run_ns: 250 * MS,
        warm_up_ns: 50 * MS,
        drain_ns: 100 * MS,
        shards: 2,
        rate_per_s: 200.0,
        record_bytes: 64,
        workers: 16,
        hog: HogConfig { core: 0, duty: 0.5 },
        limit: 1.05,
        seed: 5,
        quiet: true,
        labels: Labels { transport: "tcp".into(), durability: "replicated".into(), launch: "shared".into(), cores: 2 },
    }
}

/// Runs a grid; `change` prepares the bench of each cell.
fn run_grid(config: &GridConfig, change: impl Fn(&Cell, &mut FakeBench)) -> (Grid, Vec<String>) {
    let clock = VirtualClock::default();
    let start = |cell: &Cell| {
        let mut bench = FakeBench::new(&clock);
        change(cell, &mut bench);
        Ok(bench)
    };
    let mut told = Vec::new();
    let tell = |result: &CellResult| {
        told.push(report::cell(result, config.limit));
        Ok::<(), ()>(())
    };
    let (grid, _) = run(&clock, config.clone(), start, tell).unwrap();
    (grid, told)
}

#[test]
fn rates_are_lowered_where_more_than_half_of_the_workers_would_be_busy() {
    let config = GridConfig { rate_per_s: 10_000.0, workers: 1024, ..config(&COMPUTES_NS, &Scenario::ALL) };
    let cells = config.cells();
    assert_eq!((cells.len(), config.runs()), (35, 210));
    let cell = |scenario, compute_ns| cells.iter().find(|c| c.scenario == scenario && c.compute_ns == compute_ns);
    let rates = |scenario, compute_ns| {
        let cell: &Cell = cell(scenario, compute_ns).unwrap();
        (cell.writers.iter().map(|w| w.rate_per_s).collect::<Vec<f64>>(), cell.utilisation)
    };
    assert_eq!(rates(Scenario::Steady, 0), (vec![10_000.0; 2], 0.0));
    assert_eq!(rates(Scenario::Steady, 4 * MS), (vec![10_000.0; 2], 40.0 / 1024.0));
    assert_eq!(rates(Scenario::Uneven, MS), (vec![2_000.0, 18_000.0], 18.0 / 1024.0));
    // 512 of 1024 workers at 50 ms compute 10,240 records/s, which the busier shard alone exceeds.
    let (uneven, utilisation) = rates(Scenario::Uneven, 50 * MS);
    assert_eq!(uneven.iter().map(|r| r.round()).collect::<Vec<f64>>(), [1_138.0, 10_240.0]);
    assert!((utilisation - 0.5).abs() < 1e-9, "{utilisation}");
}

#[test]
fn cells_have_their_scenarios_load() {
    let config = config(&[0], &Scenario::ALL);
    let demos: Vec<DemoConfig> = config.cells().iter().map(|cell| config.demo(cell, 9)).collect();
    let arrivals: Vec<Arrivals> = demos.iter().map(|demo| demo.load.arrivals).collect();
    let regular = Arrivals::Regular;
    assert_eq!(arrivals, [regular, Arrivals::Bursts(30), regular, regular, regular]);
    let hogs: Vec<bool> = demos.iter().map(|demo| demo.hog.is_some()).collect();
    assert_eq!(hogs, [false, false, false, true, false]);
    let split = Split { warm_up_ns: 50 * MS, measure_ns: 200 * MS };
    assert!(demos.iter().all(|demo| demo.split() == Ok(split)));
    for scenario in Scenario::ALL {
        assert_eq!(Scenario::from_name(scenario.name()), Some(scenario));
    }
}

#[test]
fn a_cell_is_worse_above_the_limit_and_ok_below() {
    let config = config(&[0, MS], &[Scenario::Steady]);
    // Fixed binds at 1000 + late, free-event at 1100, and at 2200 in one of the three repetitions.
    let late = |cell: &Cell, bench: &mut FakeBench| bench.fixed_late_us = if cell.compute_ns == 0 { 200 } else { 0 };
    let (grid, told) = run_grid(&config, late);
    let ratio = grid.results[0].ratio(|r| r.e2e_mean_us).unwrap();
    assert_eq!((ratio.count, (ratio.median * 100.0).round(), (ratio.min * 100.0).round()), (3, 109.0, 55.0));
    assert_eq!(grid.results[0].verdict, Verdict::Worse("mean e2e 1.09 times that of free-event".to_owned()));
    // In hand at 400, done at 1400, against 2100.
    assert_eq!(grid.results[1].verdict, Verdict::Ok);
    assert!(!grid.passes());
    for (told, expected) in told.iter().zip(["worse steady, compute 0 ms: mean e2e 1.09", "ok steady, compute 1 ms: "])
    {
        assert!(told.lines().last().unwrap().starts_with(expected), "{told}");
        assert!(told.contains("shard: no_ops 12, records 288"), "{told}");
    }
    let summary = report::summary(&grid);
    let lines: Vec<&str> = summary.lines().collect();
    assert_eq!(lines[2].split_whitespace().collect::<Vec<&str>>(), ["steady", "1.09!", "0.67"]);
    assert_eq!(*lines.last().unwrap(), "2 cells, 1 worse");
}

#[test]
fn all_modes_of_a_repetition_are_run_and_seeds_repeat_a_grid() {
    let order = |seed| {
        let config = GridConfig { seed, repetitions: 8, ..config(&[0], &[Scenario::Steady, Scenario::Bursts]) };
        let started = std::cell::RefCell::new(Vec::new());
        let clock = VirtualClock::default();
        let tell = |result: &CellResult| {
            let modes = &result.demo.as_ref().unwrap().modes;
            assert!(modes.iter().all(|mode| mode.repetitions.len() == 8));
            Ok::<(), ()>(())
        };
        let start = |cell: &Cell| {
            started.borrow_mut().push(config.demo(cell, 0).load.arrivals);
            Ok(FakeBench::new(&clock))
        };
        let (grid, _) = run(&clock, config.clone(), start, tell).unwrap();
        let seeds: Vec<u64> = grid.results.iter().map(|r| r.demo.as_ref().unwrap().config.seed).collect();
        (started.into_inner(), seeds)
    };
    let (arrivals, seeds) = order(1);
    assert_eq!(arrivals, [Arrivals::Regular, Arrivals::Bursts(30)]);
    assert_ne!(seeds[0], seeds[1], "every cell has an order of its own");
    assert_eq!(order(1).1, seeds);
    assert_ne!(order(2).1, seeds);
}

#[test]
fn a_cell_that_fails_is_marked_and_the_grid_goes_on() {
    let config = config(&[0, MS, 2 * MS], &[Scenario::Steady]);
    let clock = VirtualClock::default();
    let start = |cell: &Cell| match cell.compute_ns {
        0 => Err("no such luck".to_owned()),
        _ => {
            let mut bench = FakeBench::new(&clock);
            bench.fail = (cell.compute_ns == MS).then_some((Ordering::FreeEvent, 1));
            Ok(bench)
        }
    };
    let (grid, _) = run(&clock, config.clone(), start, |_| Ok::<(), ()>(())).unwrap();
    assert_eq!(grid.results[0].verdict, Verdict::Failed("no such luck".to_owned()));
    // What the other repetitions measured is shown all the same.
    assert_eq!(grid.results[1].verdict, Verdict::Failed("free-event repetition 2: no such luck".to_owned()));
    assert_eq!(grid.results[1].ratio(|r| r.e2e_mean_us).unwrap().count, 2);
    assert_eq!(grid.results[2].verdict, Verdict::Ok);
    assert!(report::summary(&grid).ends_with("3 cells, 0 worse, 2 failed\n"));
    let json: serde_json::Value = serde_json::from_str(&report::json(&grid).unwrap()).unwrap();
    let verdicts: Vec<&str> =
        json["cells"].as_array().unwrap().iter().map(|cell| cell["verdict"].as_str().unwrap()).collect();
    assert_eq!(verdicts, ["failed", "failed", "ok"]);
    assert_eq!(json["cells"][2]["modes"]["fixed"]["counted"]["shard-0.no_ops"], 12);
    assert!(json["cells"][0]["e2e_mean_ratio"].is_null());
}

#[test]
fn an_interrupted_grid_has_what_was_measured() {
    let config = config(&[0, MS, 2 * MS], &[Scenario::Steady]);
    // In the second cell after one repetition, so there is something to say about it.
    let change =
        |cell: &Cell, bench: &mut FakeBench| bench.interrupt_after = if cell.compute_ns == MS { 2 } else { 99 };
    let (grid, told) = run_grid(&config, change);
    assert_eq!((grid.results.len(), told.len(), grid.passes()), (2, 2, false));
    assert_eq!(grid.results[1].ratio(|r| r.e2e_mean_us).unwrap().count, 1);
    assert!(report::summary(&grid).ends_with("2 cells of 3, interrupted, 0 worse\n"));
    let (grid, _) = run_grid(&config, |_, bench| bench.interrupt_after = 0);
    assert!(grid.results.is_empty());
}

#[test]
fn reports_fit_and_say_beforehand_what_comes() {
    let config = config(&COMPUTES_NS, &Scenario::ALL);
    let heading = report::heading(&config).unwrap();
    for text in [
        "35 cells, about 75 s; Ctrl-C prints what there is",
        "fixed and free-event 3 times, interleaved in random order (seed 5)",
        "0.20 s after a warm-up of 0.05 s that is dropped",
        "every writer sends 30 records at once",
        "shard 1 holds every report back by 5000 µs",
        "another thread wants core 0 for 50 % of the time",
    ] {
        assert!(heading.replace("\n  ", " ").contains(text), "{text:?} is missing in\n{heading}");
    }
    let (_, told) = run_grid(&config, |_, _| ());
    for line in told.iter().flat_map(|told| told.lines()).chain(heading.lines()) {
        assert!(line.chars().count() <= crate::demo::report::WIDTH, "{} columns: {line}", line.chars().count());
    }
    let short = GridConfig { run_ns: 40 * MS, ..config };
    assert!(report::heading(&short).unwrap_err().contains("too short to measure"));
}
