//! The published curves' shapes, from the production code on virtual time: exact, so latencies are asserted.

use antelog_profile::figures::curves::{MODES, RATE_PER_S};
use antelog_profile::figures::drive::{Run, run};
use antelog_profile::figures::model::Model;
use antelog_profile::figures::series::Series;
use antelog_profile::figures::setup::Setup;
use antelog_profile::figures::{Figure, Options, Table};
use antelog_protocol::Ordering;

const MS: u64 = 1_000_000;

fn options(jobs: usize) -> Options {
    Options { model: Model::load("paper").unwrap(), quick: true, jobs }
}

fn figure(figure: Figure) -> Vec<Table> {
    figure.run(&options(2)).unwrap()
}

fn steady(ordering: Ordering, shards: u16, measure_ns: u64, seed: u64) -> Run {
    let model = Model::load("paper").unwrap();
    let run = run(&Setup::steady(&model, ordering, shards, RATE_PER_S, (100 * MS, measure_ns), seed)).unwrap();
    assert_eq!(run.unfinished, 0, "{} with {shards} shards", ordering.name());
    run
}

fn e2e_ms(run: &Run) -> f64 {
    Series::of(&[run], |s| s.e2e_ns(1_200_000)).mean_ms()
}

#[test]
fn a_run_repeats_exactly() {
    let times = |run: Run| run.samples.iter().map(|s| (s.delivered_ns, s.confirmed_ns)).collect::<Vec<_>>();
    let first = times(steady(Ordering::Fixed, 2, 20 * MS, 3));
    assert_eq!(first.len(), 400);
    assert_eq!(first, times(steady(Ordering::Fixed, 2, 20 * MS, 3)));
    assert_ne!(first, times(steady(Ordering::Fixed, 2, 20 * MS, 4)));
}

#[test]
fn the_paper_model_has_the_papers_delivery_and_order_path() {
    let runs: Vec<[Run; 3]> = (0..4).map(|seed| MODES.map(|mode| steady(mode, 4, 60 * MS, seed))).collect();
    let delivery = |mode: usize| {
        let runs: Vec<&Run> = runs.iter().map(|runs| &runs[mode]).collect();
        Series::of(&runs, |s| s.delivered_ns - s.intended_ns).mean_ms()
    };
    let [tick, event, fixed] = [0, 1, 2].map(delivery);
    assert!((1.09..1.15).contains(&fixed), "delivery {fixed:.3} ms, published 1.12");
    assert!((2.0..2.6).contains(&(tick - fixed)), "order path of free-tick {:.3} ms, about 2.33", tick - fixed);
    assert!((1.9..2.5).contains(&(event - fixed)), "order path of free-event {:.3} ms", event - fixed);
}

#[test]
fn speculation_gains_with_few_and_with_many_shards() {
    // Ten writers with phases of their own pause for three gaps quite often, and then cuts are filled in vain.
    for (pause_gaps, least) in [(3, 1.2), (8, 1.4)] {
        for (shards, measure_ns) in [(4, 100 * MS), (40, 30 * MS)] {
            let e2e = |mode| {
                let mut model = Model::load("paper").unwrap();
                model.policy.pause_gaps = pause_gaps;
                let times = (100 * MS, measure_ns);
                e2e_ms(&run(&Setup::steady(&model, mode, shards, RATE_PER_S, times, 1)).unwrap())
            };
            let gain = e2e(Ordering::FreeEvent) / e2e(Ordering::Fixed);
            assert!(gain >= least, "{shards} shards, pause_gaps {pause_gaps}: gain {gain:.3}");
        }
    }
}

#[test]
fn a_burst_peaks_below_the_published_one() {
    let table = &figure(Figure::Burst)[0];
    assert_eq!(table.cell(2, "mode"), Some("fixed"));
    let peak = table.number(2, "max").unwrap();
    assert!(peak <= 6.2, "{peak} ms\n{table}");
    let without_lag_fix = table.number(4, "median").unwrap();
    assert!(without_lag_fix > 9.0, "the published rules without their lag fix peak at {without_lag_fix} ms");
}

#[test]
fn the_others_are_back_soon_after_a_straggler_is_found() {
    let table = &figure(Figure::Straggler)[0];
    let [detection, back] = [0, 1].map(|row| table.number(row, "max").unwrap());
    assert!(detection <= 20.0 && back <= 20.0, "{table}");
    assert!(table.notes[0].contains("detected in 2 of 2 runs"), "{table}");
}

#[test]
fn quotas_follow_rates_and_decay() {
    let table = &figure(Figure::Rate)[0];
    let fits = table.notes.iter().filter(|note| note.ends_with("quotas fit in 2 of 2 runs")).count();
    assert_eq!(fits, 3, "{table}");
}

#[test]
fn a_shard_joins_within_a_window_and_a_tick() {
    let table = &figure(Figure::Join)[0];
    assert_eq!([table.cell(1, "verdict"), table.cell(2, "verdict")], [Some("better"); 2], "{table}");
}
