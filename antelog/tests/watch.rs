//! Nodes as their operator sees them: metrics, health, readiness, events, and an end in order.

mod common;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use antelog::{Client, ClientOptions, ShardId};
use common::{Folder, PATIENCE, Server, bad, cluster_file, dev, good, nodes};

/// Asks for a path; status and body.
fn get(address: &str, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Asks until the answer is as wanted.
fn until(what: &str, is: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::yield_now();
    }
}

/// Where a server serves its metrics, by what it says.
fn watched(server: &Server) -> String {
    server.says("# metrics, health and readiness at http://").split("http://").nth(1).unwrap().to_owned()
}

#[test]
fn a_running_cluster_exports_exactly_the_documented_metrics() {
    let (server, address) = dev(&["--metrics", "127.0.0.1:0", "--transport", "tcp"]);
    let metrics = watched(&server);
    until("ready", || get(&metrics, "/ready") == (200, "ready\n".into()));
    good(&["append", "--cluster", &address], b"one\ntwo\n");
    let (status, text) = get(&metrics, "/metrics");
    assert_eq!(status, 200);
    let exported: BTreeSet<&str> = text.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    let document = include_str!("../../core/METRICS.md");
    let documented: BTreeSet<&str> = document
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .filter(|name| !name.starts_with("antelog_rdma"))
        .collect();
    assert_eq!(exported, documented);
    // Every sample belongs to one of them and says which node it is of.
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, rest) = line.split_once('{').unwrap();
        assert!(documented.contains(name) && rest.starts_with("node=\""), "{line}");
        rest.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap();
    }
    let records: u64 = text
        .lines()
        .filter(|line| line.starts_with("antelog_shard_records_total{"))
        .map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap())
        .sum();
    assert_eq!(records, 2);
    assert_eq!(get(&metrics, "/health"), (200, "the agents run\n".into()));
    let error = bad(&["dev", "--listen", "127.0.0.1:0", "--metrics", &metrics], b"");
    assert!(error.contains(&format!("cannot serve metrics on {metrics}: ")), "{error}");
}

#[test]
fn a_node_is_ready_once_it_has_a_sequencer_and_its_part_and_stays_so_when_others_go() {
    let folder = Folder::new("ready");
    let (config, _) = cluster_file(&folder, "127.0.0.1", "region_bytes = 67108864");
    let start = |id: &str| {
        let server = Server::start(&["node", "--config", &config, "--id", id, "--metrics", "127.0.0.1:0"]);
        let metrics = watched(&server);
        (server, metrics)
    };
    let (_backup, backup) = start("2");
    until("without its sequencer", || {
        let (status, missing) = get(&backup, "/ready");
        let lacks_both = missing.contains("node 2: neither leads shard 0 nor follows as a member of it\n")
            && missing.contains("node 2: no connection to node 0: ")
            && missing.contains("nothing listens on");
        status == 503 && lacks_both
    });
    assert_eq!(get(&backup, "/health").0, 200);
    let (_primary, primary) = start("1");
    let (_sequencer, sequencer) = start("0");
    let (other, _) = start("4");
    let _last = nodes(&config, &[3]);
    for metrics in [&backup, &primary, &sequencer] {
        until("ready", || get(metrics, "/ready") == (200, "ready\n".into()));
    }
    other.signal("-KILL");
    until("without the other shard's backup", || {
        get(&sequencer, "/metrics").1.contains("antelog_node_connected{node=\"0\",to=\"4\"} 0\n")
    });
    assert_eq!(get(&sequencer, "/ready"), (200, "ready\n".into()));
}

#[test]
fn events_are_lines_for_people_or_json_for_programs() {
    let garbage = |address: &str| {
        let _ = TcpStream::connect(address).unwrap().write_all(b"GET / HTTP/1.1\r\n\r\n");
    };
    let (server, address) = dev(&[]);
    garbage(&address);
    let line = server.complains("clients: refused 127.0.0.1:");
    assert!(line.starts_with("antelog: clients: refused ") && line.contains("this looks like HTTP"), "{line}");
    let (server, address) = dev(&["--log-format", "json", "--log", "warn"]);
    garbage(&address);
    // Warnings only, so this is the first line.
    let line = server.complains("");
    let event: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&event["level"], &event["target"]), (&"WARN".into(), &"antelog::cluster::connect".into()));
    assert!(event["peer"].as_str().unwrap().starts_with("127.0.0.1:"), "{line}");
    assert!(event["reason"].as_str().unwrap().contains("sent no valid hand-shake"), "{line}");
    assert!(event["timestamp"].is_string(), "{line}");
    let error = bad(&["dev", "--log", "antelog=loud"], b"");
    assert!(error.contains("--log antelog=loud: "), "{error}");
}

#[test]
fn a_node_that_ends_finishes_what_clients_have_begun_and_tells_them() {
    let folder = Folder::new("close");
    let (config, address) = cluster_file(&folder, "127.0.0.1", "region_bytes = 67108864");
    let patient = std::fs::read_to_string(&config).unwrap() + "[launch]\nclose_ms = 600000\n";
    std::fs::write(&config, patient).unwrap();
    let mut servers = nodes(&config, &[0, 2, 4, 1, 3]);
    let client = Client::connect(ClientOptions::new([&address])).unwrap();
    let before = client.append(ShardId(0), "before").unwrap();
    // Without its sequencer the shard can neither acknowledge nor hand over.
    servers[0].signal("-STOP");
    let pending: Vec<_> = (0..10).map(|n| client.append_async(ShardId(0), format!("{n}")).unwrap()).collect();
    let primary = servers.remove(3);
    // The appends are on their way to the gate; one that is not there yet when it closes would stay outside.
    let second = Client::connect(ClientOptions::new([&address])).unwrap();
    second.read(before, common::PATIENCE).unwrap();
    primary.signal("-TERM");
    primary.complains("nobody takes over what it leads: nobody did within");
    primary.complains("shutting down: clients are told");
    until("the client is told", || client.problem().is_some_and(|p| p.contains("the node is shutting down")));
    let refused = Client::connect(ClientOptions::new([&address])).unwrap_err().to_string();
    assert!(refused.contains("the node is shutting down"), "{refused}");
    servers[0].signal("-CONT");
    assert_eq!(primary.exit_code(), Some(0));
    // Answered by it, or by the backup that follows it.
    let bound: Vec<_> = pending.into_iter().map(|p| p.wait().unwrap()).collect();
    assert!(bound.is_sorted_by(|a, b| a < b), "{bound:?}");
}

#[test]
fn a_second_signal_ends_a_node_at_once() {
    let folder = Folder::new("twice");
    let (config, address) = cluster_file(&folder, "127.0.0.1", "region_bytes = 67108864");
    let patient = std::fs::read_to_string(&config).unwrap() + "[launch]\nclose_ms = 600000\n";
    std::fs::write(&config, patient).unwrap();
    let mut servers = nodes(&config, &[0, 2, 4, 1, 3]);
    let client = Client::connect(ClientOptions::new([&address])).unwrap();
    let before = client.append(ShardId(0), "before").unwrap();
    servers[0].signal("-STOP");
    let _pending = client.append_async(ShardId(0), "never acknowledged").unwrap();
    Client::connect(ClientOptions::new([&address])).unwrap().read(before, common::PATIENCE).unwrap();
    let primary = servers.remove(3);
    primary.signal("-TERM");
    primary.complains("shutting down: clients are told");
    until("the client is told", || client.problem().is_some_and(|p| p.contains("the node is shutting down")));
    primary.signal("-INT");
    assert_eq!(primary.exit_code(), Some(130));
}

#[test]
fn an_idle_node_ends_without_waiting_for_anybody() {
    let (server, address) = dev(&["--set", "launch.close_ms=600000"]);
    let client = Client::connect(ClientOptions::new([&address])).unwrap();
    client.append(None, "done").unwrap();
    server.signal("-INT");
    assert_eq!(server.exit_code(), Some(0));
}
