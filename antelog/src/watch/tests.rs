//! The server, asked as scrapers, load balancers and strangers do.

use std::io::{Read, Write};

use super::*;

fn observed(connections: Vec<Connection>) -> (Observed, antelog_core::counters::Counter) {
    let config = "[[shard]]\nid = 0\n[[node]]\nid = 0\nrole = \"sequencer\"\nlisten = \"h:1\"\n\
                  [[node]]\nid = 1\nrole = \"primary\"\nshard = 0\nclients = \"h:2\"\n";
    let gate = Counters::new("gate");
    let open = gate.register("shard-0.open");
    let config = Config::parse(config, &[]).unwrap();
    (Observed::new(&config, vec![(1, gate)], Arc::new(move || connections.clone())), open)
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
