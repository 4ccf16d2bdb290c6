//! The server, asked as scrapers, load balancers and strangers do.

use std::io::{Read, Write};

use antelog_core::counters::Counter;

use super::*;

/// Node 1 with a replica that leads, as its gate sees it, and what the gate says of the shard.
fn observed(connections: Vec<Connection>) -> (Observed, Counter) {
    let (observed, [is_primary, is_member, open]) = watched(connections);
    is_primary.set(1);
    is_member.set(1);
    (observed, open)
}

/// Node 1 with a replica: whether it leads, whether it is a member, whether its shard is open.
fn watched(connections: Vec<Connection>) -> (Observed, [Counter; 3]) {
    let config = "[[shard]]\nid = 0\n[[node]]\nid = 0\nrole = \"sequencer\"\nlisten = \"h:1\"\n\
                  [[node]]\nid = 1\nrole = \"primary\"\nshard = 0\nclients = \"h:2\"\n";
    let (gate, replica) = (Counters::new("gate"), Counters::new("replica-0-0"));
    let counters = [replica.register("is_primary"), replica.register("is_member"), gate.register("shard-0.open")];
    let config = Config::parse(config, &[]).unwrap();
    let agents = vec![(1, gate), (1, replica)];
    (Observed::new(&config, agents, Arc::new(move || connections.clone())), counters)
}

fn serve(observed: &Observed) -> Watch {
    Port::bind("127.0.0.1:0".parse().unwrap()).unwrap().serve(observed.clone()).unwrap()
}

fn ask(watch: &Watch, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(watch.local_addr()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(bytes).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn get(watch: &Watch, path: &str) -> (String, String) {
    let answer = ask(watch, format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes());
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

const OK: &str = "HTTP/1.1 200 OK";
const NOT_NOW: &str = "HTTP/1.1 503 Service Unavailable";

#[test]
fn readiness_names_what_is_missing() {
    let down = Connection { node: 1, to: 0, is_up: false, why: "nothing listens on h:1".into() };
    let (observed, open) = observed(vec![down]);
    let watch = serve(&observed);
    let (status, body) = get(&watch, "/ready");
    let missing = "node 1: no connection to node 0: nothing listens on h:1\nnode 1: shard 0 takes no appends\n";
    assert_eq!((&status[..], &body[..]), (NOT_NOW, missing));
    open.set(1);
    assert_eq!(get(&watch, "/ready").1, "node 1: no connection to node 0: nothing listens on h:1\n");
    assert_eq!(get(&watch, "/health"), (OK.into(), "the agents run\n".into()));
}

#[test]
fn a_replica_is_ready_as_a_member_and_whether_other_replicas_are_there_is_no_matter() {
    let to = |to, is_up| Connection { node: 1, to, is_up, why: "not connected yet".into() };
    let (observed, [is_primary, is_member, _open]) = watched(vec![to(0, true), to(2, false)]);
    assert_eq!(observed.missing(), ["node 1: neither leads shard 0 nor follows as a member of it"]);
    is_member.set(1);
    assert!(observed.missing().is_empty(), "that its shard takes appends is for the primary to say");
    is_primary.set(1);
    assert_eq!(observed.missing(), ["node 1: shard 0 takes no appends"]);
}

#[test]
fn a_replica_that_leads_is_counted_as_the_shard_too() {
    let (observed, [is_primary, ..]) = watched(vec![]);
    let names = || observed.counters().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    let own = ["gate.shard-0.open", "replica-0-0.is_primary", "replica-0-0.is_member"];
    assert_eq!(names(), own);
    is_primary.set(1);
    assert_eq!(names(), [&own[..], &["shard-0.is_primary", "shard-0.is_member"]].concat());
}

#[test]
fn a_failure_and_an_end_to_come_are_told() {
    let (observed, open) = observed(vec![]);
    open.set(1);
    let watch = serve(&observed);
    assert_eq!(get(&watch, "/ready"), (OK.into(), "ready\n".into()));
    observed.close();
    assert_eq!(get(&watch, "/ready"), (NOT_NOW.into(), "shutting down\n".into()));
    assert_eq!(get(&watch, "/health").0, OK);
    observed.fail("thread antelog-0 panicked");
    observed.fail("and then another thing");
    assert_eq!(get(&watch, "/health"), (NOT_NOW.into(), "failed: thread antelog-0 panicked\n".into()));
    assert!(get(&watch, "/metrics").1.contains("antelog_gate_shard_open{node=\"1\",agent=\"gate\",shard=\"0\"} 1\n"));
}

#[test]
fn strangers_are_answered_or_left_and_delay_nobody_for_long() {
    let (observed, _open) = observed(vec![]);
    let watch = serve(&observed);
    assert!(ask(&watch, b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc").starts_with("HTTP/1.1 405 "));
    assert!(ask(&watch, b"antelog\0\x03\x00\x10\x00\r\n").starts_with("HTTP/1.1 400 "));
    assert!(ask(&watch, &[b'x'; 100_000]).starts_with("HTTP/1.1 431 "));
    assert!(get(&watch, "/secrets").0.starts_with("HTTP/1.1 404 "));
    // Says nothing; it is left after its time.
    let silent = TcpStream::connect(watch.local_addr()).unwrap();
    assert_eq!(get(&watch, "/health").0, OK);
    drop(silent);
    let taken = Port::bind(watch.local_addr()).err().unwrap();
    assert!(taken.starts_with(&format!("cannot serve metrics on {}: ", watch.local_addr())), "{taken}");
}
