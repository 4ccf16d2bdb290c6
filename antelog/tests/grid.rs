//! The grid and the knob of its slow shard: what comes out, in counts. No speed is asserted.

mod common;

use std::time::Instant;

use antelog::cluster::{Cluster, Nodes};
use antelog::{Client, ClientOptions, Position};
use antelog_core::config::Config;
use antelog_core::node::Invoked;
use common::{Folder, PATIENCE, Server, run};

#[test]
fn one_cell_of_every_scenario_measures_both_modes() {
    let folder = Folder::new("grid");
    let json = folder.0.join("grid.json");
    let args = ["profile", "grid", "--cells", "compute=0.1", "--repetitions", "1", "--seconds", "0.3"];
    let more = ["--rate", "500", "--limit", "1000000", "--seed", "42", "--json", json.to_str().unwrap()];
    let output = run(&[&args[..], &more].concat(), b"");
    let text = String::from_utf8(output.stdout).unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("5 cells, about") && text.contains("(seed 42)"), "{text}{error}");
    assert_eq!(text.lines().last(), Some("5 cells, 0 worse"), "{text}{error}");
    assert_eq!(output.status.code(), Some(0), "{text}{error}");
    let grid: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let cells = grid["cells"].as_array().unwrap();
    let scenarios: Vec<&str> = cells.iter().map(|cell| cell["scenario"].as_str().unwrap()).collect();
    assert_eq!(scenarios, ["steady", "bursts", "slow-shard", "hog", "uneven"]);
    assert_eq!(cells[4]["rates_per_s"], serde_json::json!([100.0, 900.0]));
    for cell in cells {
        assert_eq!((&cell["compute_ms"], &cell["verdict"]), (&0.1.into(), &"ok".into()));
        assert_eq!(cell["e2e_mean_ratio"]["count"], 1);
        let records = |mode: &str| {
            let mode = &cell["modes"][mode];
            assert_eq!((&mode["failed"], &mode["totals"]["unfinished"]), (&0.into(), &0.into()), "{mode}");
            assert!(mode["counted"]["sequencer.cuts"].as_u64().unwrap() > 0, "{mode}");
            // A record that a grounded shard refused is sent twice.
            let total = |name: &str| mode["totals"][name].as_u64().unwrap();
            (total("sent") - total("moved"), mode["e2e"]["count"].as_u64().unwrap())
        };
        let (fixed, free) = (records("fixed"), records("free_event"));
        assert_eq!(fixed, free, "the modes got different loads");
        assert!(fixed.1 > 0 && fixed.0 > fixed.1, "{fixed:?}: the warm-up is sent and not measured");
    }
}

#[test]
fn an_interrupted_grid_prints_what_it_has() {
    let args =
        ["profile", "grid", "--cells", "compute=0,0.1", "scenario=steady", "--rate", "500", "--limit", "1000000"];
    let server = Server::start(&[&args[..], &["--repetitions", "1", "--seconds", "0.3"]].concat());
    server.says("ok steady, compute 0 ms");
    server.signal("-INT");
    server.says("fixed / free-event, mean e2e, median of pairs");
    // It may have been through by then.
    server.says(", 0 worse");
}

const CONFIG: &str = r#"
[cluster]
name = "delay"
region_bytes = 4194304
record_bytes_max = 8192
client_ring_bytes = 65536

[[shard]]
id = 0
quota = 1
report_delay_us = 10000000

[[node]]
id = 0
role = "sequencer"
listen = "127.0.0.1:0"
[[node]]
id = 1
role = "primary"
shard = 0
clients = "127.0.0.1:0"
[[node]]
id = 2
role = "backup"
shard = 0
listen = "127.0.0.1:0"
clients = "127.0.0.1:0"
"#;

/// Steps a cluster whose time stands still until something has happened.
fn step_until(agents: &mut Invoked, now_ns: u64, what: &str, happened: impl Fn() -> bool) {
    let started = Instant::now();
    while !happened() {
        if agents.step(now_ns) == 0 {
            std::thread::yield_now();
        }
        assert!(started.elapsed() < PATIENCE, "never: {what}");
    }
}

#[test]
fn a_delayed_report_leaves_when_its_time_has_come_and_not_before() {
    const DELAY_NS: u64 = 10_000_000_000;
    let config = Config::parse(CONFIG, &[]).unwrap();
    let (cluster, mut agents) = Cluster::invoked(config, Nodes::All).unwrap();
    let address = cluster.client_addresses()[0].clone();
    let cuts = || cluster.counter("sequencer", "cuts");
    let made = || cluster.counter("shard", "reports");
    let (mut now_ns, started) = (1_000_000_000, Instant::now());
    // A report is held back from when there is a connection for it. Time is moved on until the first one has left.
    while cluster.counter("sequencer", "reports") == 0 {
        now_ns += DELAY_NS;
        for _ in 0..100 {
            agents.step(now_ns);
        }
        assert!(started.elapsed() < PATIENCE, "the sequencer hears nothing");
    }
    let made_before = made();
    let appending = std::thread::spawn(move || {
        Client::connect(ClientOptions::new([address])).and_then(|client| client.append(None, b"late")).unwrap()
    });
    step_until(&mut agents, now_ns, "the record's report", || made() > made_before);
    for _ in 0..10_000 {
        agents.step(now_ns + DELAY_NS - 1);
    }
    assert_eq!(cuts(), 0, "the report was not held back");
    step_until(&mut agents, now_ns + DELAY_NS, "the cut", || cuts() == 1);
    step_until(&mut agents, now_ns + DELAY_NS, "the acknowledgement", || appending.is_finished());
    assert_eq!(appending.join().unwrap(), Position(0));
    drop(agents);
}
