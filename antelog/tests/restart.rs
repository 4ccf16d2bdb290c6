//! Real processes with their logs on disk: killed, all at once or one after another, and started again where they were.

mod common;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use antelog::{Client, ClientOptions, Event, OnUnavailable, Position, Scope, ShardId, Slot, SubscribeOptions};
use common::writer::{Landed, Writer};
use common::{Folder, PATIENCE, Server, Tmpfs, bad, cluster_file, noise};

/// A region of 1 MiB: a few thousand records do not fit. Silence is put up with for as long as a busy disk may take to sync
/// what a fence asks for, a few times over.
const SIZES: &str = "region_bytes = 1048576\nrecord_bytes_max = 4096\nclient_ring_bytes = 262144\ntick_us = 1000\n\
                     suspect_ms = 2000\n";

/// Nothing here is about stragglers.
const PATIENT: &str = "policy.ground_windows=0";

/// Two shards with a backup each: the sequencer is node 0, shard 0 has nodes 1 and 2, shard 1 has 3 and 4.
struct Cluster {
    folder: Folder,
    config: String,
    servers: BTreeMap<u16, Server>,
}

impl Cluster {
    fn start(name: &str, durability: &str) -> Cluster {
        Cluster::start_with(name, &format!("durability = \"{durability}\""), None)
    }

    /// Node 2 has lost its disk, and node 1, which gives it the log, this record.
    fn begin_anew_from_rot(&mut self, record: &[u8]) {
        self.kill(&[2]);
        std::fs::remove_dir_all(self.log_of(2)).unwrap();
        self.rot(1, record, 0);
        self.start_nodes(&[2]);
    }

    /// With further keys of `[cluster]`, and with another folder for what node 2 keeps.
    fn start_with(name: &str, keys: &str, second: Option<&Path>) -> Cluster {
        let folder = Folder::new(name);
        let data = folder.0.join("data");
        let keys = format!("{SIZES}{keys}\n[launch]\ndata_dir = {data:?}");
        let (mut config, _) = cluster_file(&folder, "127.0.0.1", &keys);
        if let Some(second) = second {
            let text = std::fs::read_to_string(&config).unwrap();
            let text = text.replace("\nid = 2\n", &format!("\nid = 2\ndata_dir = {second:?}\n"));
            config = folder.file("second.toml", text.as_bytes());
        }
        let mut cluster = Cluster { folder, config, servers: BTreeMap::new() };
        cluster.start_nodes(&[0, 1, 2, 3, 4]);
        cluster
    }

    fn counters(&self, node: u16) -> String {
        self.folder.0.join(format!("counters-{node}")).to_string_lossy().into_owned()
    }

    fn start_nodes(&mut self, ids: &[u16]) {
        for id in ids {
            let counters = self.counters(*id);
            let _ = std::fs::remove_file(&counters);
            let id_text = id.to_string();
            let args = ["node", "--config", &self.config, "--id", &id_text, "--counters", &counters, "--set", PATIENT];
            self.servers.insert(*id, Server::start(&args));
        }
        ids.iter().for_each(|id| drop(self.servers[id].says("is up")));
    }

    /// Waits until a replica's present life is a member.
    fn is_member(&self, node: u16) {
        let deadline = std::time::Instant::now() + PATIENCE;
        while !std::fs::read_to_string(self.counters(node)).unwrap_or_default().contains(".is_member 1") {
            assert!(std::time::Instant::now() < deadline, "node {node} does not become a member");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// Waits until both shards take appends; what was appended for it.
    fn serves(&self) -> Landed {
        let landed = |shard: u16| {
            let client = Client::connect(ClientOptions::new(self.addresses())).unwrap();
            let deadline = std::time::Instant::now() + PATIENCE;
            loop {
                static NUMBER: AtomicU64 = AtomicU64::new(1 << 40);
                let record = record("trial", NUMBER.fetch_add(1, Ordering::Relaxed));
                match client.append(Some(ShardId(shard)), &record[..]) {
                    Ok(position) => return (record, position),
                    Err(error) => assert!(std::time::Instant::now() < deadline, "shard {shard}: {error}"),
                }
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        };
        (0..2).map(landed).collect()
    }

    /// As kill -9 does.
    fn kill(&mut self, ids: &[u16]) {
        for id in ids {
            drop(self.servers.remove(id));
        }
    }

    fn log_of(&self, node: u16) -> std::path::PathBuf {
        self.folder.0.join("data").join(format!("node-{node}")).join("log")
    }

    /// Turns a byte around in a replica's file where a record is, or what is so many bytes before it; twice, it is as it
    /// was.
    fn rot(&self, node: u16, record: &[u8], before: u64) {
        // The number in front of the noise stays as it is.
        let place = |path: PathBuf| Some((find(&std::fs::read(&path).unwrap(), &record[..12])?, path));
        let (found, path) = self.segments(node).into_iter().find_map(place).unwrap();
        let at = found as u64 + 14 - before;
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[!byte[0]], at).unwrap();
        file.sync_all().unwrap();
    }

    fn segments(&self, node: u16) -> Vec<PathBuf> {
        let files = std::fs::read_dir(self.log_of(node)).unwrap().map(|file| file.unwrap().path());
        let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|of| of == "log")).collect();
        files.sort();
        files
    }

    /// What the eight oldest segment files hold.
    fn oldest(&self, node: u16) -> Vec<Vec<u8>> {
        self.segments(node).iter().take(8).map(|path| std::fs::read(path).unwrap()).collect()
    }

    /// The addresses at which clients are served.
    fn addresses(&self) -> Vec<String> {
        let text = std::fs::read_to_string(&self.config).unwrap();
        let quoted = |line: &str| line.split('"').nth(1).map(str::to_owned);
        text.lines().filter(|line| line.starts_with("clients")).filter_map(quoted).collect()
    }

    fn writers(&self, name: &'static str) -> Vec<Writer> {
        (0..2)
            .map(|shard| Writer::begin(&self.addresses(), shard, move |n| record(&format!("{name}{shard}"), n)))
            .collect()
    }
}

/// A record that nobody else writes: a name, a number and noise.
fn record(name: &str, number: u64) -> Vec<u8> {
    let mut record = format!("{name}-{number}-").into_bytes();
    record.extend(noise(200 + (number % 13) as usize * 100, number + 1));
    record
}

fn find(bytes: &[u8], text: &[u8]) -> Option<usize> {
    bytes.windows(text.len()).position(|window| window == text)
}

fn end(writers: Vec<Writer>) -> Landed {
    writers.into_iter().flat_map(Writer::end).collect()
}

fn end_after_a_loss(writers: Vec<Writer>) -> Landed {
    writers.into_iter().flat_map(Writer::end_after_a_loss).collect()
}

/// Reads the log from its start to the last of these records: each is there once, where it was said to be, byte for byte, or
/// is said to be unavailable. Returns how many are not available.
fn check(addresses: &[String], landed: &[(Vec<u8>, Position)]) -> usize {
    let last = landed.iter().map(|(_, position)| *position).max().unwrap();
    let client = Client::connect(ClientOptions::new(addresses.to_vec())).unwrap();
    let options = SubscribeOptions { on_unavailable: OnUnavailable::Skip };
    let mut seen: BTreeMap<Position, Vec<u8>> = BTreeMap::new();
    let mut missing: Vec<(Position, Position)> = Vec::new();
    for event in client.subscribe_with(Scope::All, Position(0), options).unwrap().events() {
        match event.unwrap() {
            Event::Deliver { position, record, .. } => {
                assert_eq!(seen.insert(position, record.to_vec()), None, "two records at {position}");
            }
            Event::Confirm { upto } if upto > last => break,
            Event::Confirm { .. } => {}
            Event::Unavailable { from, to } => missing.push((from, to)),
            Event::Fail { from, .. } => seen.retain(|position, _| *position < from),
        }
    }
    let mut unavailable = 0;
    for (record, position) in landed {
        match seen.get(position) {
            Some(found) => assert!(found == record, "another record at {position}"),
            None => {
                let told = missing.iter().any(|(from, to)| from <= position && position < to);
                assert!(told, "the record at {position} is gone, and nobody says so");
                unavailable += 1;
            }
        }
    }
    let mut all: Vec<&Vec<u8>> = seen.values().collect();
    all.sort_unstable();
    assert!(all.windows(2).all(|pair| pair[0] != pair[1]), "a record is in the log twice");
    unavailable
}

#[test]
fn what_was_flushed_and_acknowledged_is_there_after_all_were_killed_at_once() {
    // The sequencer first, so that it sees nobody die; last; in the middle.
    for (round, order) in [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 2, 0, 3, 4]].into_iter().enumerate() {
        let mut cluster = Cluster::start(&format!("restart-flushed-{round}"), "flushed");
        let mut landed = Vec::new();
        for life in ["a", "b", "c"] {
            let writers = cluster.writers(life);
            writers.iter().for_each(|w| w.goes_on(400));
            cluster.kill(&order);
            cluster.start_nodes(&[0, 1, 2, 3, 4]);
            landed.extend(end_after_a_loss(writers));
            // A shard whose replicas all died while the sequencer lived was lost, and returns.
            landed.extend(cluster.serves());
            assert_eq!(check(&cluster.addresses(), &landed), 0, "everything is available");
        }
    }
}

#[test]
fn after_an_orderly_end_of_all_nothing_is_lost_without_flushing_either() {
    let mut cluster = Cluster::start("restart-orderly", "replicated");
    let mut landed = Vec::new();
    for life in ["a", "b"] {
        let writers = cluster.writers(life);
        writers.iter().for_each(|w| w.goes_on(1500));
        landed.extend(end(writers));
        for server in cluster.servers.values() {
            server.signal("-TERM");
        }
        for (_, server) in std::mem::take(&mut cluster.servers) {
            assert_eq!(server.exit_code(), Some(0));
        }
        cluster.start_nodes(&[0, 1, 2, 3, 4]);
        landed.extend(cluster.serves());
        assert_eq!(check(&cluster.addresses(), &landed), 0, "everything is available");
    }
}

#[test]
fn what_a_sudden_end_of_all_has_lost_is_told_and_never_something_else() {
    let mut cluster = Cluster::start("restart-replicated", "replicated");
    let mut landed = Vec::new();
    for life in ["a", "b", "c"] {
        let writers = cluster.writers(life);
        writers.iter().for_each(|w| w.goes_on(1000));
        cluster.kill(&[0, 1, 2, 3, 4]);
        cluster.start_nodes(&[0, 1, 2, 3, 4]);
        landed.extend(end_after_a_loss(writers));
        // Until its replicas had the time to come a lost shard's records are not available.
        cluster.serves();
        let unavailable = check(&cluster.addresses(), &landed);
        assert!(unavailable < landed.len() / 2, "{unavailable} of {} are not available", landed.len());
    }
}

#[test]
fn nodes_killed_one_at_a_time_come_back_with_their_logs_and_nobody_notices() {
    let mut cluster = Cluster::start("restart-each", "flushed");
    let writers = cluster.writers("a");
    writers.iter().for_each(|w| w.goes_on(500));
    for node in [1, 2, 3, 4, 0, 2, 1] {
        cluster.kill(&[node]);
        if node != 0 {
            writers.iter().for_each(|w| w.goes_on(300));
        }
        cluster.start_nodes(&[node]);
        if node != 0 {
            cluster.is_member(node);
        }
        writers.iter().for_each(|w| w.goes_on(300));
    }
    let landed = end(writers);
    assert_eq!(check(&cluster.addresses(), &landed), 0, "everything is available");
}

#[test]
fn a_replica_without_its_disk_is_given_the_whole_log_and_serves_it() {
    let mut cluster = Cluster::start("restart-without", "replicated");
    let writers = cluster.writers("a");
    // More than the region holds.
    writers.iter().for_each(|w| w.goes_on(3000));
    cluster.kill(&[2]);
    std::fs::remove_dir_all(cluster.log_of(2)).unwrap();
    writers.iter().for_each(|w| w.goes_on(100));
    cluster.start_nodes(&[2]);
    cluster.is_member(2);
    // It leads now, and serves from its first position on.
    cluster.kill(&[1]);
    writers.iter().for_each(|w| w.goes_on(100));
    let landed = end(writers);
    assert_eq!(check(&cluster.addresses(), &landed), 0, "everything is available");
}

/// Four thousand records for each shard, several times what a region holds; some old ones of shard 0.
fn grown(cluster: &Cluster) -> (Landed, Landed) {
    let writers = cluster.writers("old");
    writers.iter().for_each(|w| w.goes_on(4000));
    let landed = end(writers);
    let is_old = |n: u64| [record("old0", n), record("old0", n + 1)];
    let old: Vec<Vec<u8>> = [1001, 1402, 1905].into_iter().flat_map(is_old).collect();
    let old = landed.iter().filter(|(record, _)| old.contains(record)).cloned().collect();
    (landed, old)
}

fn reads(cluster: &Cluster, position: Position) -> Slot {
    Client::connect(ClientOptions::new(cluster.addresses())).unwrap().read(position, PATIENCE).unwrap()
}

fn holds(slot: &Slot, record: &[u8]) -> bool {
    matches!(slot, Slot::Record(found) if found[..] == *record)
}

#[test]
fn what_a_disk_has_lost_is_fetched_from_the_other_replica_and_written_in_place() {
    let mut cluster = Cluster::start("restart-rot", "replicated");
    let (landed, old) = grown(&cluster);
    cluster.is_member(2);
    let spoil = |cluster: &Cluster, node: u16| {
        let whole = cluster.oldest(node);
        // What a record holds, or its header, or where its header begins.
        let spoilt = old.iter().zip([0, 14 + 40, 0, 0, 14 + 64, 0]);
        spoilt.for_each(|((record, _), before)| cluster.rot(node, record, before));
        assert!(cluster.oldest(node) != whole);
        whole
    };
    // The primary's, met by reads, and by a stream.
    let whole = spoil(&cluster, 1);
    for (record, position) in &old {
        let slot = reads(&cluster, *position);
        assert!(holds(&slot, record), "{slot:?} at {position}");
    }
    assert!(cluster.oldest(1) == whole, "the bytes on disk are as they were");
    cluster.servers[&1].complains("of replica 1 were written in place");
    spoil(&cluster, 1);
    assert_eq!(check(&cluster.addresses(), &landed), 0, "the stream goes on");
    assert!(cluster.oldest(1) == whole);
    // That of a backup which leads now, and has nobody to ask.
    cluster.kill(&[1]);
    cluster.serves();
    let (record, position) = &old[2];
    cluster.rot(2, record, 0);
    let slot = reads(&cluster, *position);
    assert!(matches!(slot, Slot::Unavailable), "{slot:?}");
    cluster.servers[&2].complains("no other replica has them now");
    cluster.rot(2, record, 0);
    cluster.start_nodes(&[1]);
    cluster.is_member(1);
    let whole = spoil(&cluster, 2);
    for (record, position) in &old {
        let slot = reads(&cluster, *position);
        assert!(holds(&slot, record), "{slot:?} at {position}");
    }
    assert!(cluster.oldest(2) == whole);
    cluster.servers[&2].complains("of replica 0 were written in place");
    // Nobody has it any more, until somebody mends one of them.
    cluster.rot(1, record, 0);
    cluster.rot(2, record, 0);
    let spoilt = [cluster.oldest(1), cluster.oldest(2)];
    let slot = reads(&cluster, *position);
    assert!(matches!(slot, Slot::Unavailable), "{slot:?}");
    assert!([cluster.oldest(1), cluster.oldest(2)] == spoilt);
    cluster.rot(1, record, 0);
    assert!(holds(&reads(&cluster, *position), record) && cluster.oldest(2) == whole);
}

#[test]
fn a_replica_is_never_given_what_a_disk_has_lost() {
    let mut cluster = Cluster::start("restart-rot-joins", "replicated");
    let (landed, old) = grown(&cluster);
    cluster.begin_anew_from_rot(&old[2].0);
    // It joins when the disk is mended, and has met nothing bad until then.
    cluster.servers[&1].complains("replica 1 cannot be given the log: segment ");
    cluster.rot(1, &old[2].0, 0);
    cluster.is_member(2);
    cluster.kill(&[1]);
    assert_eq!(check(&cluster.addresses(), &landed), 0, "everything is available");
}

#[test]
fn whoever_lacks_what_nobody_has_any_more_begins_behind_it_when_it_is_trimmed() {
    let mut cluster = Cluster::start("restart-rot-trim", "replicated");
    let (landed, old) = grown(&cluster);
    cluster.begin_anew_from_rot(&old[2].0);
    cluster.servers[&1].complains("replica 1 cannot be given the log: segment ");
    let upto = Position(landed.iter().map(|(_, position)| position.0).max().unwrap() - 100);
    Client::connect(ClientOptions::new(cluster.addresses())).unwrap().trim(upto, PATIENCE).unwrap();
    cluster.is_member(2);
    cluster.kill(&[1]);
    for (record, position) in landed.iter().filter(|(_, position)| *position >= upto) {
        assert!(holds(&reads(&cluster, *position), record), "at {position}");
    }
}

#[test]
fn what_a_joiner_lacks_and_the_primary_has_lost_is_fetched_from_a_third_replica() {
    let ports = common::free_ports(2, "127.0.0.1");
    let third = format!(
        "[[node]]\nid = 5\nrole = \"backup\"\nshard = 0\nlisten = \"127.0.0.1:{}\"\nclients = \"127.0.0.1:{}\"\n",
        ports[0], ports[1]
    );
    let mut cluster = Cluster::start_with("restart-rot-third", &third, None);
    cluster.start_nodes(&[5]);
    let (landed, old) = grown(&cluster);
    cluster.is_member(5);
    cluster.kill(&[2]);
    std::fs::remove_dir_all(cluster.log_of(2)).unwrap();
    cluster.rot(1, &old[2].0, 0);
    cluster.start_nodes(&[2]);
    cluster.is_member(2);
    cluster.servers[&1].complains("of replica 1 were written in place");
    cluster.kill(&[1, 5]);
    assert_eq!(check(&cluster.addresses(), &landed), 0, "everything is available");
}

#[test]
fn rot_that_is_found_at_the_start_is_refused_and_an_empty_directory_is_given_the_log_anew() {
    let mut cluster = Cluster::start("restart-rot-start", "flushed");
    let (landed, old) = grown(&cluster);
    cluster.kill(&[2]);
    cluster.rot(2, &old[0].0, 0);
    let error = bad(&["node", "--config", &cluster.config, "--id", "2"], b"");
    assert!(error.contains("is damaged at offset") && error.contains("empty the directory, and another"), "{error}");
    std::fs::remove_dir_all(cluster.log_of(2)).unwrap();
    cluster.start_nodes(&[2]);
    cluster.is_member(2);
    cluster.kill(&[1]);
    assert_eq!(check(&cluster.addresses(), &landed), 0, "everything is available");
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

#[test]
fn a_directory_of_somebody_else_is_refused_in_one_line() {
    let mut cluster = Cluster::start("restart-foreign", "flushed");
    let writers = cluster.writers("a");
    writers.iter().for_each(|w| w.goes_on(10));
    end(writers);
    cluster.kill(&[0, 1, 2, 3, 4]);
    std::fs::remove_dir_all(cluster.log_of(2)).unwrap();
    copy(&cluster.log_of(1), &cluster.log_of(2));
    let error = bad(&["node", "--config", &cluster.config, "--id", "2"], b"");
    assert!(error.contains("belongs to cluster 'test', shard 0, replica 0, not to"), "{error}");
    let text = std::fs::read_to_string(&cluster.config).unwrap();
    let other = cluster.folder.file("other.toml", text.replace("name = \"test\"", "name = \"other\"").as_bytes());
    let error = bad(&["node", "--config", &other, "--id", "1"], b"");
    assert!(error.contains("cluster 'test', shard 0, replica 0, not to cluster 'other'"), "{error}");
    let diskless: String = text.lines().filter(|l| !l.starts_with("data_dir")).map(|l| format!("{l}\n")).collect();
    let diskless = cluster.folder.file("diskless.toml", diskless.as_bytes());
    let error = bad(&["config", "check", &diskless], b"");
    assert!(error.contains("\"flushed\" needs a disk, and node 0 has no data_dir"), "{error}");
}

#[test]
fn a_log_of_another_order_is_refused_in_one_line() {
    let mut cluster = Cluster::start("restart-order", "flushed");
    let writers = cluster.writers("a");
    writers.iter().for_each(|w| w.goes_on(10));
    end(writers);
    cluster.kill(&[0, 1, 2, 3, 4]);
    // The sequencer's log is gone, the shards' are not.
    std::fs::remove_dir_all(cluster.folder.0.join("data").join("node-0")).unwrap();
    let server = |id: &str| Server::start(&["node", "--config", &cluster.config, "--id", id]);
    let started: Vec<Server> = ["0", "1", "2", "3", "4"].map(server).into_iter().collect();
    started[1].complains("the sequencers begin an order log without it");
}

#[test]
fn a_full_disk_refuses_appends_loses_nothing_and_goes_on_when_there_is_room() {
    for durability in ["replicated", "flushed"] {
        let Some(disk) = Tmpfs::mount(&format!("restart-full-disk-{durability}"), 3 << 20) else {
            eprintln!("only root can mount a small file system: skipped");
            return;
        };
        let name = format!("restart-full-{durability}");
        let mut cluster = Cluster::start_with(&name, &format!("durability = \"{durability}\""), Some(&disk.0.0));
        cluster.is_member(2);
        let client = Client::connect(ClientOptions::new(cluster.addresses())).unwrap();
        let mut landed = Vec::new();
        let error = loop {
            let record = record("full", landed.len() as u64);
            match client.append(Some(ShardId(0)), &record[..]) {
                Ok(position) => landed.push((record, position)),
                Err(error) => break error.to_string(),
            }
        };
        assert!(error.contains("the disk of one of the shard's replicas is full"), "{error}");
        cluster.servers[&2].complains("the disk is full: the shard refuses appends");
        assert!(landed.len() > 1000, "{} records fit", landed.len());
        assert_eq!(check(&cluster.addresses(), &landed), 0, "reads go on");
        // Whoever has no room left at all leads all the same.
        let brim = std::fs::File::create(disk.0.0.join("brim")).unwrap();
        (0..).take_while(|at| brim.write_all_at(&[1; 4096], at * 4096).is_ok()).for_each(drop);
        cluster.kill(&[1]);
        assert_eq!(check(&cluster.addresses(), &landed), 0, "node 2 leads");
        cluster.start_nodes(&[1]);
        disk.resize(64 << 20);
        cluster.is_member(1);
        landed.extend(cluster.serves());
        cluster.servers[&2].complains("the disk has room again");
        cluster.kill(&[1]);
        landed.extend(cluster.serves());
        assert_eq!(check(&cluster.addresses(), &landed), 0, "node 2 has everything");
    }
}

#[test]
fn what_is_not_to_be_kept_is_dropped_and_sessions_are_not_forgotten() {
    let mut cluster = Cluster::start_with("restart-keep", "durability = \"flushed\"\nkeep_bytes = 1048576", None);
    let idle = Client::connect(ClientOptions::new(cluster.addresses())).unwrap();
    idle.append(Some(ShardId(0)), &b"early"[..]).unwrap();
    let writers = cluster.writers("a");
    writers.iter().for_each(|w| w.goes_on(6000));
    let bytes = |node: u16| -> u64 {
        let files = std::fs::read_dir(cluster.log_of(node)).unwrap();
        files.filter_map(|file| file.ok()?.metadata().ok()).map(|file| file.len()).sum()
    };
    let deadline = std::time::Instant::now() + PATIENCE;
    while [1, 2, 3, 4].into_iter().any(|node| bytes(node) > 2_500_000) {
        assert!(std::time::Instant::now() < deadline, "nothing is dropped");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let landed = end(writers);
    cluster.kill(&[0, 1, 2, 3, 4]);
    cluster.start_nodes(&[0, 1, 2, 3, 4]);
    cluster.serves();
    let client = Client::connect(ClientOptions::new(cluster.addresses())).unwrap();
    let first = client.subscribe(Scope::All, Position(0)).unwrap().events().next().unwrap();
    assert!(matches!(first, Err(antelog::Error::Trimmed { .. })), "{first:?}");
    let (record, position) = landed.last().unwrap();
    let read = client.read(*position, PATIENCE).unwrap();
    assert!(format!("{read:?}").contains("Record"), "{read:?} is not {}", record.len());
    // Its one record was dropped long ago, and the shard still knows what it expects of it.
    idle.append(Some(ShardId(0)), &b"late"[..]).unwrap();
}

#[test]
fn what_is_trimmed_is_dropped_and_stays_so() {
    let mut cluster = Cluster::start("restart-trim", "flushed");
    let writers = cluster.writers("a");
    writers.iter().for_each(|w| w.goes_on(4000));
    let landed = end(writers);
    let last = landed.iter().map(|(_, position)| *position).max().unwrap();
    let upto = Position(last.0 - 100);
    let client = Client::connect(ClientOptions::new(cluster.addresses())).unwrap();
    let error = client.trim(Position(last.0 + 1_000_000), PATIENCE).unwrap_err().to_string();
    assert!(error.contains("positions that are not bound yet cannot be trimmed"), "{error}");
    client.trim(upto, PATIENCE).unwrap();
    let trimmed =
        common::good(&["trim", "--cluster", &cluster.addresses()[0], &(upto.0 - 50).to_string(), "--wait", "60"], &[]);
    assert!(
        String::from_utf8(trimmed).unwrap().contains("the log begins at"),
        "less than is trimmed already is no error"
    );
    let deadline = std::time::Instant::now() + PATIENCE;
    for node in 1..=4 {
        // What memory holds is on disk too.
        while std::fs::read_dir(cluster.log_of(node)).unwrap().count() > 11 {
            assert!(std::time::Instant::now() < deadline, "node {node} drops nothing");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
    for restarted in [false, true] {
        if restarted {
            cluster.kill(&[0, 1, 2, 3, 4]);
            cluster.start_nodes(&[0, 1, 2, 3, 4]);
            cluster.serves();
        }
        let client = Client::connect(ClientOptions::new(cluster.addresses())).unwrap();
        let first = client.subscribe(Scope::All, Position(0)).unwrap().events().next().unwrap();
        assert!(matches!(first, Err(antelog::Error::Trimmed { head }) if head >= upto), "{first:?}");
        for (record, position) in landed.iter().filter(|(_, position)| position.0 + 40 > upto.0) {
            match client.read(*position, PATIENCE).unwrap() {
                Slot::Record(found) => assert!(*position >= upto && found[..] == record[..], "{position}"),
                Slot::Trimmed(head) => assert!(*position < upto && head >= upto, "{position} is before {head}"),
                other => panic!("{other:?} at {position}"),
            }
        }
    }
}
