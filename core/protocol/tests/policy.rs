//! The adaptive policy on virtual time: directed scenarios.

mod model;

use antelog_protocol::sequencer::{Change, ChangeError};
use antelog_protocol::{Beat, Ordering, ShardId, WindowMode};
use model::{Cluster, Model, TICK, US};

/// Four shards, ten records a tick each, evenly spread with shifted phases, for `ticks`.
fn steady(cluster: &mut Cluster, from: u64, ticks: u64) {
    for shard in 0..usize::from(cluster.model.shards - cluster.model.standby) {
        cluster.stream(shard, from + shard as u64 * 23 * US, TICK / 10, ticks * 10);
    }
}

fn compare(ordering: Ordering, change: impl Fn(&mut Model)) -> Cluster {
    let mut model = Model { ordering, ..Model::default() };
    change(&mut model);
    let mut cluster = Cluster::new(model);
    steady(&mut cluster, TICK, 1000);
    cluster.run_until(1100 * TICK);
    cluster
}

#[test]
fn steady_streams_need_hardly_any_no_ops_and_are_bound_sooner_than_with_free_windows() {
    let fixed = compare(Ordering::Fixed, |_| {});
    let free = compare(Ordering::FreeEvent, |_| {});
    let span = 100 * TICK..900 * TICK;
    let (fixed_mean, _) = fixed.latency(0..4, span.clone());
    let (free_mean, _) = free.latency(0..4, span);
    println!(
        "fixed {fixed_mean} free {free_mean} no-ops {} cuts {}",
        fixed.no_ops_per_mille(),
        fixed.sequencer.stats().cuts
    );
    assert_eq!((fixed.unbound(), free.unbound()), (0, 0));
    assert_eq!(fixed.quotas(), [10; 4]);
    assert!(fixed.no_ops_per_mille() < 10, "{} per mille", fixed.no_ops_per_mille());
    assert!(fixed_mean * 10 <= free_mean * 8, "{fixed_mean} against {free_mean}");
}

#[test]
fn an_idle_log_writes_nothing_and_wakes_without_an_extra_round_trip() {
    let mut cluster = Cluster::new(Model::default());
    steady(&mut cluster, TICK, 300);
    cluster.run_until(400 * TICK);
    let before = (cluster.sequencer.ledger().applied_index(), cluster.slots[0].no_ops);
    cluster.run_until(2000 * TICK);
    assert_eq!((cluster.sequencer.ledger().applied_index(), cluster.slots[0].no_ops), before);
    // A lone record: its cut is filled when no other record has come for eight times the interval the quota stands
    // for; the others follow by target. 20 µs to be placed, 800 to be filled and placed again, then 10 + 10 + 20 + 10
    // + 10.
    cluster.append_at(2001 * TICK, 2);
    cluster.run_until(2100 * TICK);
    assert_eq!(cluster.latency(0..4, 2000 * TICK..2100 * TICK), (880 * US, 880 * US));
}

#[test]
fn quotas_follow_a_rate_step_within_two_windows_and_decay_when_a_shard_goes_quiet() {
    let mut cluster = Cluster::new(Model { quota: 5, ..Model::default() });
    for shard in 0..4 {
        cluster.stream(shard, TICK, TICK / 5, 5 * 500);
    }
    // Shard 1 doubles its rate at tick 300 and goes quiet at 700.
    cluster.stream(1, 300 * TICK, TICK / 5, 5 * 400);
    for shard in [0, 2, 3] {
        cluster.stream(shard, 501 * TICK, TICK / 5, 5 * 1000);
    }
    cluster.run_until(299 * TICK);
    assert_eq!(cluster.quotas(), [5; 4]);
    cluster.run_until(500 * TICK);
    assert_eq!(cluster.quotas(), [5, 10, 5, 5]);
    // The step itself does nobody harm: cuts come as fast as the fastest shard fills them.
    let (_, worst) = cluster.latency(0..4, 290 * TICK..490 * TICK);
    assert!(worst < 1100 * US, "{worst}");
    cluster.run_until(1450 * TICK);
    assert_eq!(cluster.quotas(), [5, 1, 5, 5]);
    cluster.run_until(1700 * TICK);
    assert_eq!(cluster.unbound(), 0);
}

#[test]
fn a_straggler_is_grounded_comes_back_and_stays_away_longer_the_next_time() {
    let mut cluster = Cluster::new(Model::default());
    steady(&mut cluster, TICK, 3000);
    cluster.run_until(250 * TICK);
    cluster.report_delay_ns[3] = 5 * TICK;
    cluster.run_until(280 * TICK);
    assert_eq!(cluster.sequencer.stats().grounded, 1);
    assert!(!cluster.slots[3].refused.is_empty(), "its writers are told where to go");
    assert!(cluster.slots[3].refused.iter().all(|instead| instead.0 < 3));
    // Late for 4 ticks, found out within one more, then its one report of all its slots: 5 ticks and a bit.
    let (_, during) = cluster.latency(0..3, 250 * TICK..262 * TICK);
    let (_, after) = cluster.latency(0..3, 262 * TICK..900 * TICK.min(cluster.now()));
    assert!(during < 40 * TICK && after < 1100 * US, "{during} {after}");
    cluster.run_until(400 * TICK);
    assert_eq!(cluster.quotas(), [10, 10, 10, 0]);
    // It is well again: it returns after five windows.
    cluster.report_delay_ns[3] = 0;
    cluster.run_until(1200 * TICK);
    assert_eq!((cluster.sequencer.stats().grounded, cluster.quotas()), (1, vec![10; 4]));
    // It straggles again soon after: away for ten.
    cluster.report_delay_ns[3] = 5 * TICK;
    cluster.run_until(1300 * TICK);
    assert_eq!(cluster.sequencer.stats().grounded, 2);
    cluster.report_delay_ns[3] = 0;
    cluster.run_until(2000 * TICK);
    assert_eq!(cluster.quotas()[3], 0);
    cluster.run_until(2700 * TICK);
    assert!(cluster.quotas()[3] > 0);
    cluster.run_until(3200 * TICK);
    assert_eq!(cluster.unbound(), 0);
}

#[test]
fn at_least_half_of_the_shards_keep_their_quota() {
    let mut cluster = Cluster::new(Model::default());
    steady(&mut cluster, TICK, 900);
    cluster.run_until(100 * TICK);
    // Most are late: it is not the shards.
    cluster.report_delay_ns = vec![0, 40 * TICK, 40 * TICK, 40 * TICK];
    cluster.run_until(145 * TICK);
    assert_eq!(cluster.sequencer.stats().grounded, 0);
    cluster.report_delay_ns = vec![0; 4];
    cluster.run_until(400 * TICK);
    cluster.report_delay_ns = vec![0, 0, 40 * TICK, 40 * TICK];
    cluster.run_until(500 * TICK);
    assert!(cluster.sequencer.stats().grounded >= 1);
    // A third one may not follow them.
    cluster.report_delay_ns[1] = 40 * TICK;
    for tick in 500..900 {
        cluster.run_until(tick * TICK);
        assert!(cluster.sequencer.ledger().members().iter().filter(|m| m.open).count() >= 2, "tick {tick}");
    }
    cluster.run_until(1200 * TICK);
    assert_eq!(cluster.unbound(), 0);
}

#[test]
fn a_shard_joins_within_milliseconds_on_a_busy_and_on_an_idle_log_and_leaves_with_everything_bound() {
    for busy in [true, false] {
        let mut cluster = Cluster::new(Model { standby: 1, ..Model::default() });
        if busy {
            steady(&mut cluster, TICK, 600);
        }
        cluster.run_until(250 * TICK);
        assert_eq!(cluster.quotas().len(), 3);
        cluster.append_at(250 * TICK, 3);
        cluster.run_until(251 * TICK);
        assert_eq!(cluster.slots[3].refused.len(), 1, "it stands by");
        cluster.change(Change::Join(ShardId(3))).unwrap();
        cluster.change(Change::Join(ShardId(3))).unwrap();
        cluster.stream(3, 252 * TICK, TICK / 10, 3000);
        cluster.run_until(300 * TICK);
        let (_, worst) = cluster.latency(3..4, 252 * TICK..299 * TICK);
        assert!(worst < 1200 * US, "the joiner's records waited {worst}");
        // It leaves under load: what it took is bound, the rest is sent elsewhere.
        cluster.run_until(400 * TICK);
        cluster.change(Change::Leave(ShardId(3))).unwrap();
        cluster.run_until(700 * TICK);
        assert_eq!((cluster.quotas()[3], cluster.sequencer.ledger().open(ShardId(3))), (0, Some(false)));
        assert_eq!(cluster.unbound(), 0);
        assert_eq!(cluster.slots[3].refused.len() as u64 + cluster.slots[3].records, 3001);
        // And comes back.
        cluster.change(Change::Join(ShardId(3))).unwrap();
        cluster.append_at(710 * TICK, 3);
        cluster.run_until(800 * TICK);
        assert_eq!((cluster.sequencer.ledger().open(ShardId(3)), cluster.unbound()), (Some(true), 0));
    }
}

#[test]
fn impossible_changes_are_refused() {
    let mut cluster = Cluster::new(Model { shards: 2, standby: 1, ..Model::default() });
    cluster.run_until(TICK);
    assert_eq!(cluster.change(Change::Join(ShardId(9))), Err(ChangeError::UnknownShard(ShardId(9))));
    assert_eq!(cluster.change(Change::Leave(ShardId(0))), Err(ChangeError::LastShard(ShardId(0))));
    assert_eq!(cluster.change(Change::Leave(ShardId(1))), Ok(()), "it is out already");
}

#[test]
fn the_ordering_changes_under_load_and_at_rest_and_nothing_is_lost() {
    for busy in [true, false] {
        let mut cluster = Cluster::new(Model::default());
        if busy {
            steady(&mut cluster, TICK, 900);
        }
        let mut mode = |at: u64, ordering: Ordering, window: WindowMode| {
            cluster.run_until(at * TICK);
            cluster.change(Change::Ordering(ordering)).unwrap();
            cluster.append_at((at + 5) * TICK, 0);
            cluster.run_until((at + 50) * TICK);
            assert_eq!(cluster.sequencer.ledger().mode(), Some(window));
            let (_, worst) = cluster.latency(0..4, at * TICK..(at + 48) * TICK);
            assert!(worst < 3000 * US, "{ordering:?}: {worst}");
        };
        mode(110, Ordering::FreeEvent, WindowMode::Free);
        mode(210, Ordering::Fixed, WindowMode::Fixed);
        mode(230 + 31, Ordering::FreeTick, WindowMode::Free);
        mode(350, Ordering::FreeEvent, WindowMode::Free);
        mode(450, Ordering::Auto, WindowMode::Fixed);
        cluster.run_until(1000 * TICK);
        assert_eq!(cluster.unbound(), 0);
    }
}

#[test]
fn auto_leaves_fixed_windows_when_cuts_wait_for_their_last_report_and_returns() {
    // Now one, now another shard answers 3.8 ticks late: never long enough to be the straggler.
    let mut cluster = Cluster::new(Model { ordering: Ordering::Auto, ground_windows: 3, ..Model::default() });
    steady(&mut cluster, TICK, 900);
    for n in 0..300 {
        cluster.report_delay_ns = vec![0; 4];
        cluster.report_delay_ns[n * 7 % 4] = 19 * TICK / 5;
        cluster.run_until((n as u64 + 1) * 3 * TICK + (n as u64 * 377) % 1000 * US);
    }
    let stats = cluster.sequencer.stats();
    assert!(stats.fallbacks >= 1 && stats.free_windows >= 3, "{stats:?}");
    cluster.report_delay_ns = vec![0; 4];
    // A steady stream is better off with fixed windows.
    steady(&mut cluster, 1000 * TICK, 1000);
    cluster.run_until(2100 * TICK);
    assert_eq!((cluster.sequencer.ledger().mode(), cluster.unbound()), (Some(WindowMode::Fixed), 0));
}

#[test]
fn the_published_beat_fills_for_ever_and_needs_its_lag_fix() {
    let burst = |beat| {
        let mut cluster = Cluster::new(Model { beat, quota: 3, ground_windows: 0, ..Model::default() });
        for shard in 0..4 {
            cluster.stream(shard, TICK, TICK / 3, 900);
        }
        cluster.stream(0, 150 * TICK, 2 * US, 30);
        cluster.run_until(400 * TICK);
        assert_eq!(cluster.unbound(), 0);
        let idle = cluster.slots[1].no_ops;
        cluster.run_until(500 * TICK);
        (cluster.latency(0..4, 149 * TICK..160 * TICK).1, cluster.slots[1].no_ops - idle)
    };
    let (ours, idle) = burst(Beat::Target);
    assert_eq!(idle, 0);
    let (paper, idle) = burst(Beat::Paper { lag_fix: true });
    assert!(idle > 100, "the published timer fills an idle log: {idle}");
    let (without, _) = burst(Beat::Paper { lag_fix: false });
    assert!(ours <= paper && paper < without, "{ours} {paper} {without}");
}
#[test]
fn where_links_are_slow_shards_fill_ahead_of_the_target_they_expect() {
    // Two shards at 2 and two at 18 records a tick; 1.9 ticks from a target's departure to its answer's arrival.
    let run = |ordering| {
        let links = Model { ordering, link_ns: 700 * US, replicate_ns: 500 * US, ..Model::default() };
        let mut cluster = Cluster::new(links);
        for shard in 0..4 {
            let every = if shard % 2 == 0 { TICK / 2 } else { TICK / 18 };
            cluster.stream(shard, TICK + shard as u64 * 31 * US, every, 1000 * TICK / every);
        }
        cluster.run_until(1100 * TICK);
        let ahead: u64 = cluster.shards.iter().map(|s| s.stats().fills_ahead).sum();
        (cluster.latency(0..4, 300 * TICK..950 * TICK).0, ahead, cluster.unbound())
    };
    let (fixed, ahead, unbound) = run(Ordering::Fixed);
    let (free, none, _) = run(Ordering::FreeEvent);
    assert!(ahead > 50 && none == 0 && unbound == 0, "{ahead} {none} {unbound}");
    assert!(fixed * 100 < free * 95, "{fixed} against {free}");
}
