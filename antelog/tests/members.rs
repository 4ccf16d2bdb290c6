//! Shards that come and go and orderings that change under load: every acknowledged record is delivered and confirmed
//! exactly once, in one order that everybody sees, and one client's records keep theirs.

mod common;

use std::collections::{BTreeMap, VecDeque};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering as Memory};
use std::thread::JoinHandle;
use std::time::Duration;

use antelog::{
    Change, ChangeError, Client, ClientOptions, Error, Event, Ordering, Position, Record, Refusal, Scope, ShardId, Slot,
};
use common::{Folder, PATIENCE, Server, antelog, bad, cluster_file_of, dev, good, nodes};

/// Appends of one writer under way.
const PIPELINED: usize = 200;
const STANDBY: [bool; 3] = [false, false, true];
/// A busy machine's stragglers are not grounded where a test says which shards are open.
const STEADY: &str = "region_bytes = 268435456\n[policy]\nground_windows = 0";

fn connect(address: &str) -> Client {
    Client::connect(ClientOptions::new([address])).unwrap()
}

/// A client whose own shard is this one.
fn connect_to(address: &str, shard: u128) -> Client {
    loop {
        let client = connect(address);
        if client.id().0 % client.map().shards.len() as u128 == shard {
            return client;
        }
    }
}

/// Threads that append without naming a shard, until they are told to stop.
struct Writers {
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Vec<(Position, String)>>>,
}

impl Writers {
    fn start(clients: Vec<Client>) -> Writers {
        let stop = Arc::new(AtomicBool::new(false));
        let acknowledged = Arc::new(AtomicU64::new(0));
        let start = |(writer, client): (usize, Client)| {
            let (stop, acknowledged) = (stop.clone(), acknowledged.clone());
            std::thread::spawn(move || write(writer, &client, &stop, &acknowledged))
        };
        let threads = clients.into_iter().enumerate().map(start).collect();
        Writers { stop, acknowledged, threads }
    }

    /// Waits until this many more records are acknowledged.
    fn progress(&self, records: u64) {
        let until = self.acknowledged.load(Memory::Relaxed) + records;
        let deadline = std::time::Instant::now() + PATIENCE;
        while self.acknowledged.load(Memory::Relaxed) < until {
            assert!(std::time::Instant::now() < deadline, "the writers do not get on");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// What was acknowledged, by position; each writer's positions grow.
    fn stop(self) -> BTreeMap<Position, String> {
        self.stop.store(true, Memory::Relaxed);
        let mut all = BTreeMap::new();
        for thread in self.threads {
            let written = thread.join().unwrap();
            assert!(written.windows(2).all(|w| w[0].0 < w[1].0), "a writer's records lost their order");
            for (position, record) in written {
                assert_eq!(all.insert(position, record), None, "position {position} was given twice");
            }
        }
        all
    }
}

fn write(writer: usize, client: &Client, stop: &AtomicBool, acknowledged: &AtomicU64) -> Vec<(Position, String)> {
    let (mut written, mut pending) = (Vec::new(), VecDeque::new());
    for number in 0.. {
        let stopping = stop.load(Memory::Relaxed);
        while pending.len() >= if stopping { 1 } else { PIPELINED } {
            let (record, append): (String, antelog::Pending) = pending.pop_front().unwrap();
            let position = append.wait_timeout(PATIENCE).expect("an append hangs").unwrap();
            written.push((position, record));
            acknowledged.fetch_add(1, Memory::Relaxed);
        }
        if stopping {
            break;
        }
        let record = format!("{writer} {number}");
        pending.push_back((record.clone(), client.append_async(None, &record).unwrap()));
    }
    written
}

/// A subscription to everything on a thread of its own, up to a tail that is said later.
struct Reader {
    tail: Arc<AtomicU64>,
    thread: JoinHandle<BTreeMap<Position, (ShardId, Record)>>,
}

impl Reader {
    fn start(client: &Client) -> Reader {
        let tail = Arc::new(AtomicU64::new(u64::MAX));
        let mut subscription = client.subscribe(Scope::All, Position(0)).unwrap();
        let until = tail.clone();
        let thread = std::thread::spawn(move || {
            let (mut seen, mut confirmed, mut last) = (BTreeMap::new(), Position(0), None);
            let mut quiet = Duration::ZERO;
            while confirmed.0 < until.load(Memory::Relaxed) {
                let Some(event) = subscription.next_timeout(Duration::from_millis(20)).unwrap() else {
                    quiet += Duration::from_millis(20);
                    assert!(quiet < PATIENCE, "nothing is delivered or confirmed any more, up to {confirmed}");
                    continue;
                };
                quiet = Duration::ZERO;
                match event {
                    Event::Deliver { position, shard, record, .. } => {
                        assert!(last < Some(position) && position >= confirmed, "{position} after {last:?}");
                        last = Some(position);
                        seen.insert(position, (shard, record));
                    }
                    Event::Confirm { upto } => {
                        assert!(upto > confirmed, "{upto} is confirmed after {confirmed}");
                        confirmed = upto;
                    }
                    Event::Fail { from } => panic!("no shard is lost, and {from} is taken back"),
                    Event::Unavailable { from, .. } => panic!("no shard is lost, and {from} is unavailable"),
                }
            }
            seen
        });
        Reader { tail, thread }
    }

    fn up_to(self, tail: Position) -> BTreeMap<Position, (ShardId, Record)> {
        self.tail.store(tail.0, Memory::Relaxed);
        self.thread.join().unwrap()
    }
}

/// Every acknowledged record was delivered once, at its position, and nothing else; reading it all again says the same.
fn check(
    client: &Client,
    reader: Reader,
    written: &BTreeMap<Position, String>,
) -> BTreeMap<Position, (ShardId, Record)> {
    let tail = client.tail().unwrap();
    let seen = reader.up_to(tail);
    assert_eq!(seen.len(), written.len());
    for ((at, record), (position, (_, delivered))) in written.iter().zip(&seen) {
        assert_eq!((at, record.as_bytes()), (position, &delivered[..]));
    }
    let again = Reader::start(client).up_to(tail);
    assert!(again == seen, "the log reads otherwise the second time");
    for (position, record) in written.iter().step_by(written.len().div_ceil(20)) {
        let slot = client.read(*position, PATIENCE).unwrap();
        assert_eq!(slot, Slot::Record(record.as_bytes().into()), "at {position}");
    }
    seen
}

fn shard(address: &str, what: &str, id: &str) -> String {
    String::from_utf8(good(&["shard", what, id, "--wait", "60", "--cluster", address], b"")).unwrap()
}

fn ordering(address: &str, name: &str) -> String {
    String::from_utf8(good(&["ordering", name, "--wait", "60", "--cluster", address], b"")).unwrap()
}

/// The state of each shard, as `shard list` says.
fn states(address: &str) -> Vec<String> {
    let said = good(&["shard", "list", "--json", "--cluster", address], b"");
    let said: serde_json::Value = serde_json::from_slice(&said).unwrap();
    let shards = said["shards"].as_array().unwrap();
    shards.iter().map(|s| s["state"].as_str().unwrap().to_owned()).collect()
}

fn dev_steady() -> (Server, String) {
    dev(&["--standby", "1", "--set", "cluster.region_bytes=268435456", "--set", "policy.ground_windows=0"])
}

/// A shard joins, another leaves while its clients go on writing.
fn come_and_go(address: &str) {
    let client = connect(address);
    assert_eq!(states(address), ["open", "open", "standby"]);
    let reader = Reader::start(&client);
    let writers = Writers::start(vec![connect_to(address, 0), connect_to(address, 1), connect_to(address, 0)]);
    writers.progress(3000);
    let said = shard(address, "add", "2");
    assert!(said.starts_with("shard 2 takes appends, from window ") && said.lines().count() == 1, "{said}");
    let mut named = BTreeMap::new();
    for number in 0..50 {
        let record = format!("named {number}");
        named.insert(client.append(ShardId(2), &record).unwrap(), record);
    }
    writers.progress(1000);
    let said = shard(address, "remove", "0");
    assert!(said.starts_with("shard 0 takes no appends and has no slots, from window "), "{said}");
    assert_eq!(states(address), ["closed", "open", "open"]);
    let refused = client.append(ShardId(0), "x").unwrap_err();
    assert!(
        matches!(refused, Error::Refused { shard: ShardId(0), refusal: Refusal::Closed { instead } } if instead.0 > 0),
        "{refused}"
    );
    writers.progress(3000);
    let mut written = writers.stop();
    written.append(&mut named);
    let seen = check(&client, reader, &written);
    for id in 0..3 {
        assert!(seen.values().any(|(shard, _)| shard.0 == id), "shard {id} has no record");
    }
}

#[test]
fn shards_join_and_leave_under_load_in_one_process() {
    let (_server, address) = dev_steady();
    come_and_go(&address);
}

#[test]
fn shards_join_and_leave_under_load_over_seven_processes() {
    let folder = Folder::new("members");
    let (config, address) = cluster_file_of(&folder, "127.0.0.1", STEADY, &STANDBY);
    let _nodes = nodes(&config, &[0, 2, 4, 6, 1, 3, 5]);
    come_and_go(&address);
}

#[test]
fn the_ordering_changes_under_load() {
    let folder = Folder::new("orderings");
    let (config, address) = cluster_file_of(&folder, "127.0.0.1", STEADY, &[false, false]);
    let _nodes = nodes(&config, &[0, 2, 4, 1, 3]);
    let client = connect(&address);
    let reader = Reader::start(&client);
    let writers = Writers::start(vec![connect_to(&address, 0), connect_to(&address, 1)]);
    writers.progress(2000);
    for (name, mode) in [("free-event", "free"), ("fixed", "fixed"), ("auto", "")] {
        let said = ordering(&address, name);
        assert!(said.starts_with(&format!("ordering is {name}, {mode}")), "{said}");
        writers.progress(2000);
    }
    for round in 0..20 {
        let name = ["free-event", "fixed", "free-tick", "auto"][round % 4];
        ordering(&address, name);
        writers.progress(50);
    }
    let written = writers.stop();
    check(&client, reader, &written);
}

#[test]
fn a_shard_comes_and_goes_twenty_times_under_load() {
    let (_server, address) = dev_steady();
    let client = connect(&address);
    let reader = Reader::start(&client);
    let writers = Writers::start((0..3).map(|own| connect_to(&address, own)).collect());
    for round in 0..20 {
        // Every other time the two shards change places, so that clients move to and fro.
        shard(&address, "add", "2");
        shard(&address, "remove", if round % 2 == 0 { "0" } else { "1" });
        shard(&address, "add", if round % 2 == 0 { "0" } else { "1" });
        shard(&address, "remove", "2");
        writers.progress(10);
    }
    let written = writers.stop();
    check(&client, reader, &written);
    assert_eq!(states(&address), ["open", "open", "closed"]);
}

#[test]
fn what_cannot_change_is_said_in_one_line() {
    let (_server, address) = dev(&["--shards", "1", "--standby", "1"]);
    let c = ["--cluster", &address];
    let error = bad(&[&["shard", "add", "9"], &c[..]].concat(), b"");
    assert!(error.contains("configured without a shard 9"), "{error}");
    let error = bad(&[&["shard", "remove", "0"], &c[..]].concat(), b"");
    assert!(error.contains("shard 0 cannot leave: no other shard would take appends"), "{error}");
    let error = bad(&[&["append", "--shard", "1"], &c[..]].concat(), b"x\n");
    assert!(error.contains("append to shard 0 instead"), "{error}");
    let error = bad(&[&["shard", "add", "1", "--wait=-1"], &c[..]].concat(), b"");
    assert!(error.contains("--wait -1: expected seconds"), "{error}");
    let client = connect(&address);
    let last = client.change(Change::Leave(ShardId(0)), PATIENCE);
    assert_eq!(last, Err(Error::NotChanged(ChangeError::LastShard(ShardId(0)))));
    // What is so already changes nothing.
    let before = client.membership().unwrap();
    assert_eq!(client.change(Change::Join(ShardId(0)), PATIENCE), Ok(before.clone()));
    assert_eq!(client.change(Change::Leave(ShardId(1)), PATIENCE), Ok(before.clone()));
    assert_eq!(client.change(Change::Ordering(Ordering::Fixed), PATIENCE), Ok(before));
}

#[test]
fn a_change_that_is_not_answered_in_time_says_so_and_one_that_is_given_up_hurts_nobody() {
    let folder = Folder::new("unanswered");
    let (config, address) = cluster_file_of(&folder, "127.0.0.1", STEADY, &STANDBY);
    let servers = nodes(&config, &[0, 2, 4, 6, 1, 3, 5]);
    let client = connect(&address);
    let reader = Reader::start(&client);
    let writers = Writers::start(vec![connect_to(&address, 0), connect_to(&address, 1)]);
    writers.progress(500);
    servers[0].signal("-STOP");
    let error = bad(&["shard", "add", "2", "--wait", "0.5", "--cluster", &address], b"");
    assert!(
        error.contains("no answer to the request that shard 2 join, which may still happen, within 500ms"),
        "{error}"
    );
    // Killed while it waits.
    let mut killed = antelog(&["shard", "remove", "0", "--cluster", &address])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(200));
    killed.kill().unwrap();
    killed.wait().unwrap();
    servers[0].signal("-CONT");
    // Both were asked for, and asking again for what was changed meanwhile is answered.
    shard(&address, "add", "2");
    shard(&address, "remove", "0");
    writers.progress(500);
    assert_eq!(states(&address), ["closed", "open", "open"]);
    let written = writers.stop();
    check(&client, reader, &written);
}
