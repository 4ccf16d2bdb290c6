//! Real processes that die: appends go on, and nothing acknowledged is lost, duplicated, reordered or changed.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use antelog::{Client, ClientOptions, Event, Position, Scope};
use common::writer::{Landed, Writer};
use common::{Folder, PATIENCE, Server, cluster_file, nodes};

const CLUSTER: &str = "region_bytes = 16777216\nrecord_bytes_max = 4096\nclient_ring_bytes = 262144\ntick_us = 1000\n\
                       suspect_ms = 400\n";

fn writer(addresses: &[String], shard: u16, name: &'static str) -> Writer {
    Writer::begin(addresses, shard, move |number| format!("{name}-{number}").into_bytes())
}

/// Reads the log from its start up to a position: every record acknowledged is there once, where it was said to be.
fn check(addresses: &[String], writers: Vec<Writer>) {
    let landed: Vec<Landed> = writers.into_iter().map(Writer::end).collect();
    let last = landed.iter().flatten().map(|(_, position)| *position).max().unwrap();
    let client = Client::connect(ClientOptions::new(addresses.to_vec())).unwrap();
    let mut seen: BTreeMap<Vec<u8>, Position> = BTreeMap::new();
    for event in client.subscribe(Scope::All, Position(0)).unwrap().events() {
        match event.unwrap() {
            Event::Deliver { position, record, .. } => {
                if let Some(other) = seen.insert(record.to_vec(), position) {
                    panic!("{} is at {other} and at {position}", record.escape_ascii());
                }
            }
            Event::Confirm { upto } if upto > last => break,
            Event::Confirm { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    for writer in &landed {
        for (record, position) in writer {
            assert_eq!(seen.get(record), Some(position), "{}", record.escape_ascii());
        }
        assert!(writer.is_sorted_by(|a, b| a.1 < b.1), "one writer's appends are in its order");
    }
}

/// The addresses at which clients are served, of all nodes of the file.
fn addresses(config: &str) -> Vec<String> {
    let text = std::fs::read_to_string(config).unwrap();
    let quoted = |line: &str| line.split('"').nth(1).map(str::to_owned);
    text.lines().filter(|line| line.starts_with("clients")).filter_map(quoted).collect()
}

fn again(config: &str, id: u16) -> Server {
    nodes(config, &[id]).remove(0)
}

#[test]
fn a_primary_that_is_killed_is_followed_by_its_backup_and_comes_back_as_one() {
    let folder = Folder::new("failover-primary");
    let (config, _) = cluster_file(&folder, "127.0.0.1", CLUSTER);
    let mut servers = nodes(&config, &[0, 1, 2, 3, 4]);
    let addresses = addresses(&config);
    let writers = vec![writer(&addresses, 0, "a"), writer(&addresses, 1, "b")];
    writers.iter().for_each(|w| w.goes_on(50));
    // Node 1 is shard 0's primary.
    drop(servers.remove(1));
    writers.iter().for_each(|w| w.goes_on(200));
    // It comes back without its memory, and joins.
    servers.push(again(&config, 1));
    writers.iter().for_each(|w| w.goes_on(200));
    check(&addresses, writers);
}

#[test]
fn a_backup_that_is_killed_and_comes_back_is_noticed_by_nobody() {
    let folder = Folder::new("failover-backup");
    let (config, _) = cluster_file(&folder, "127.0.0.1", CLUSTER);
    let mut servers = nodes(&config, &[0, 1, 2, 3, 4]);
    let addresses = addresses(&config);
    let writers = vec![writer(&addresses, 0, "a"), writer(&addresses, 1, "b")];
    writers.iter().for_each(|w| w.goes_on(50));
    for _ in 0..3 {
        // Node 2 is shard 0's backup.
        drop(servers.remove(2));
        writers.iter().for_each(|w| w.goes_on(100));
        servers.insert(2, again(&config, 2));
        writers.iter().for_each(|w| w.goes_on(100));
    }
    check(&addresses, writers);
}

#[test]
fn a_primary_that_is_stopped_for_long_is_deposed_and_harms_nobody_when_it_goes_on() {
    let folder = Folder::new("failover-stopped");
    let (config, _) = cluster_file(&folder, "127.0.0.1", CLUSTER);
    let servers = nodes(&config, &[0, 1, 2, 3, 4]);
    let addresses = addresses(&config);
    let writers = vec![writer(&addresses[1..], 0, "a"), writer(&addresses[1..], 1, "b")];
    writers.iter().for_each(|w| w.goes_on(50));
    servers[1].signal("-STOP");
    writers.iter().for_each(|w| w.goes_on(200));
    servers[1].signal("-CONT");
    writers.iter().for_each(|w| w.goes_on(200));
    check(&addresses, writers);
}

/// Follows everything while faults go on: whatever fails or is unavailable is a panic.
fn follower(addresses: &[String], last: Arc<AtomicU64>) -> JoinHandle<()> {
    let client = Client::connect(ClientOptions::new(addresses.to_vec())).unwrap();
    std::thread::spawn(move || {
        for event in client.subscribe(Scope::All, Position(0)).unwrap().events() {
            match event.unwrap() {
                Event::Deliver { .. } => {}
                Event::Confirm { upto } if upto.0 > last.load(Ordering::Relaxed) => return,
                Event::Confirm { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    })
}

#[test]
fn a_node_that_is_told_to_end_hands_over_first_and_nobody_notices() {
    let folder = Folder::new("failover-orderly");
    let (config, _) = cluster_file(&folder, "127.0.0.1", CLUSTER);
    let mut servers = nodes(&config, &[0, 1, 2, 3, 4]);
    let addresses = addresses(&config);
    let writers = vec![writer(&addresses, 0, "a"), writer(&addresses, 1, "b"), writer(&addresses, 0, "c")];
    let last = Arc::new(AtomicU64::new(u64::MAX));
    let follower = follower(&addresses[1..], last.clone());
    writers.iter().for_each(|w| w.goes_on(50));
    // Node 1 leads shard 0, then node 2 does; at last node 2 is a backup.
    for node in [1, 2, 1, 2] {
        let leaver = servers.remove(node);
        leaver.signal("-TERM");
        leaver.complains("leads nothing any more and is no member of a shard");
        assert_eq!(leaver.exit_code(), Some(0));
        writers.iter().for_each(|w| w.goes_on(100));
        servers.insert(node, again(&config, node as u16));
        // It has joined when the other one could leave.
        servers[node].says("network");
        wait_for_members(&addresses, 2);
    }
    writers.iter().for_each(|w| w.goes_on(100));
    let ended: Vec<Writer> = writers;
    last.store(0, Ordering::Relaxed);
    follower.join().unwrap();
    check(&addresses, ended);
}

/// Waits until shard 0 has so many members.
fn wait_for_members(addresses: &[String], members: u64) {
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        let output = common::run(&["cluster", "status", "--json", "--cluster", &addresses.join(",")], &[]);
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        if status["shards"][0]["members"] == members {
            return;
        }
        assert!(std::time::Instant::now() < deadline, "{status:#}");
    }
}

#[test]
fn whoever_has_nobody_to_hand_over_to_says_so_and_ends() {
    let folder = Folder::new("failover-nobody");
    let (config, clients) = cluster_file(&folder, "127.0.0.1", CLUSTER);
    let mut servers = nodes(&config, &[0, 1, 2, 3, 4]);
    common::good(&["append", "--cluster", &clients], b"one\ntwo\n");
    drop(servers.remove(2));
    wait_for_members(&addresses(&config), 1);
    for node in [1, 0] {
        let leaver = servers.remove(node);
        leaver.signal("-TERM");
        leaver.complains("nobody takes over what it leads: there is nobody");
        assert_eq!(leaver.exit_code(), Some(0));
    }
}
