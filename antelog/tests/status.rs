//! `antelog cluster status` of real processes: what it says when all is well, and of what was killed.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::time::Instant;

use common::{Folder, PATIENCE, bad, cluster_file, good, nodes, run};
use serde_json::Value;

const CLUSTER: &str =
    "region_bytes = 16777216\nrecord_bytes_max = 4096\nclient_ring_bytes = 262144\nsuspect_ms = 400\n";

/// What it says, and its exit code.
fn status(address: &str, more: &[&str]) -> (Value, Option<i32>) {
    let output = run(&[&["cluster", "status", "--json", "--cluster", address], more].concat(), &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    let value = serde_json::from_str(&text).unwrap_or_else(|e| {
        panic!("{e}: {text} {}", String::from_utf8_lossy(&output.stderr));
    });
    (value, output.status.code())
}

/// Asks until it says so.
fn until(address: &str, is_so: impl Fn(&Value) -> bool) -> (Value, Option<i32>) {
    until_with(address, &[], is_so)
}

fn until_with(address: &str, more: &[&str], is_so: impl Fn(&Value) -> bool) -> (Value, Option<i32>) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (value, code) = status(address, &[&["--wait", "20"], more].concat());
        if is_so(&value) {
            return (value, code);
        }
        assert!(Instant::now() < deadline, "{value:#}");
    }
}

fn node(value: &Value, id: u64) -> &Value {
    value["nodes"].as_array().unwrap().iter().find(|n| n["node"] == id).unwrap()
}

/// The address at which a node is asked.
fn address(value: &Value, id: u64) -> String {
    node(value, id)["address"].as_str().unwrap().to_owned()
}

#[test]
fn every_node_can_be_asked_and_what_was_killed_is_named() {
    let folder = Folder::new("status");
    let (config, clients) = cluster_file(&folder, "127.0.0.1", CLUSTER);
    let mut servers = nodes(&config, &[0, 1, 2, 3, 4]);
    good(&["append", "--cluster", &clients], b"one\ntwo\n");
    let none = serde_json::json!([]);
    let is_whole = |v: &Value| (0..2).all(|shard| v["shards"][shard]["members"] == 2) && v["problems"] == none;
    let (whole, code) = until(&clients, is_whole);
    assert_eq!(code, Some(0), "{whole:#}");
    assert_eq!((&whole["view"], &whole["window"]["mode"]), (&0.into(), &"fixed".into()));
    assert_eq!(whole["durability"], "replicated");
    assert!(whole["tail"].as_u64().unwrap() >= 2, "{whole:#}");
    let sequencers = &whole["sequencers"];
    assert_eq!((&sequencers["leader"], &sequencers["term"], &sequencers["voters"]), (&0.into(), &1.into(), &1.into()));
    for (shard, primary) in [(0, 1), (1, 3)] {
        let row = &whole["shards"][shard];
        assert_eq!((&row["primary"], &row["epoch"], &row["state"]), (&primary.into(), &1.into(), &"open".into()));
        assert!(row["quota"].as_u64().unwrap() > 0, "{row}");
    }
    assert_eq!(node(&whole, 2)["part"], "follows as a member");
    assert_eq!(node(&whole, 2)["data_dir"], Value::Null);
    // A sequencer serves no clients, and tells the same.
    let (of_sequencer, code) = status(&address(&whole, 0), &[]);
    assert_eq!((&of_sequencer["nodes"][0]["part"], code), (&"leads the sequencers".into(), Some(0)));
    // For people: a table.
    let text = String::from_utf8(good(&["cluster", "status", "--cluster", &clients], &[])).unwrap();
    assert!(text.contains("sequencers: 1 of 1 answer, node 0 leads, term 1, 1 vote"), "{text}");

    // A backup is killed: the log goes on without it, which says so.
    drop(servers.remove(2));
    let other = address(&whole, 4);
    let (without, code) = until(&other, |v| v["shards"][0]["members"] == 1);
    assert_eq!((code, &node(&without, 2)["answers"]), (Some(0), &false.into()), "{without:#}");
    assert!(node(&without, 2)["why"].as_str().unwrap().contains("nothing listens"), "{without:#}");
    // So is its primary: the shard is lost.
    drop(servers.remove(1));
    let (lost, code) = until(&other, |v| v["view"] == 1);
    assert_eq!(code, Some(1), "{lost:#}");
    assert_eq!(lost["problems"], serde_json::json!(["shard 0: none of its nodes answers"]));
    assert_eq!(lost["shards"][1]["problem"], Value::Null);
    // And the sequencer.
    drop(servers.remove(0));
    let (dead, code) = status(&other, &["--wait", "1"]);
    assert_eq!((code, &dead["sequencers"]["answering"]), (Some(1), &0.into()), "{dead:#}");
    assert!(dead["problems"][0].as_str().unwrap().starts_with("the sequencers: nothing is committed"), "{dead:#}");
    drop(servers);
    let none = bad(&["cluster", "status", "--cluster", &other], &[]);
    assert!(none.contains("no node answers"), "{none}");
}

#[test]
fn whoever_may_read_may_ask_gates_and_sequencers_insist_on_the_clusters_secret() {
    let folder = Folder::new("status-access");
    let secret = |name: &str, bytes: &[u8]| {
        let file = folder.file(name, bytes);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        file
    };
    let own = secret("cluster.secret", b"the secret of the cluster");
    let reader = secret("reader.secret", b"the secret of a reader");
    let keys = format!("{CLUSTER}secret_file = \"{own}\"\n[[access]]\nrole = \"read\"\nsecret_file = \"{reader}\"\n");
    let (config, clients) = cluster_file(&folder, "127.0.0.1", &keys);
    let _servers = nodes(&config, &[0, 1, 2, 3, 4]);
    good(&["append", "--cluster", &clients, "--secret-file", &own], b"one\n");
    let (seen, code) = until_with(&clients, &["--secret-file", &own], |v| v["problems"] == serde_json::json!([]));
    assert_eq!((code, &seen["sequencers"]["leader"]), (Some(0), &0.into()), "{seen:#}");
    let (seen, code) = status(&clients, &["--secret-file", &reader]);
    assert_eq!((code, &seen["sequencers"]["answering"]), (Some(0), &0.into()), "{seen:#}");
    assert_eq!(node(&seen, 0)["answers"], false);
    let stranger = bad(&["cluster", "status", "--cluster", &clients], &[]);
    assert!(stranger.contains("secret"), "{stranger}");
}
