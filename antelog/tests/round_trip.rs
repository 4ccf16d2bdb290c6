//! What goes in comes out: files, lines and single records, against an embedded cluster and against five processes.

mod common;

use common::{Folder, cluster_file, dev, good, nodes, noise, run};

#[test]
fn a_64_mib_file_comes_back_byte_identical_from_dev() {
    let (_server, address) = dev(&[]);
    file_round_trip(&address, "dev");
}

#[test]
fn a_64_mib_file_comes_back_byte_identical_from_five_processes() {
    let folder = Folder::new("five");
    let (config, address) = cluster_file(&folder, "127.0.0.1", "");
    let _nodes = nodes(&config, &[0, 2, 4, 1, 3]);
    file_round_trip(&address, "five");
}

fn file_round_trip(address: &str, name: &str) {
    let folder = Folder::new(&format!("file-{name}"));
    // Not a multiple of the block: the last record is short.
    let bytes = noise((64 << 20) + 777, 42);
    let path = folder.file("input", &bytes);
    let said = good(&["append", "--cluster", address, "--file", &path, "--block", "4096", "--json"], b"");
    let said: serde_json::Value = serde_json::from_slice(&said).unwrap();
    assert_eq!((said["records"].as_u64(), said["bytes"].as_u64()), (Some(16385), Some(bytes.len() as u64)));
    let back = good(&["subscribe", "--cluster", address, "--raw", "--to-tail"], b"");
    assert!(back == bytes, "{} bytes came back, {} went in", back.len(), bytes.len());
}

#[test]
fn lines_come_back_whatever_is_in_them() {
    let (_server, address) = dev(&[]);
    let mut input: Vec<u8> = b"first\n\n\nnot utf-8: \xFF\xFE\x00\n".to_vec();
    input.extend(std::iter::repeat_n(b'x', 1 << 20));
    input.extend_from_slice("\nżółw\r\nlast without newline".as_bytes());
    let said = good(&["append", "--cluster", &address, "--lines"], &input);
    assert!(String::from_utf8_lossy(&said).starts_with("7 records, "), "{}", String::from_utf8_lossy(&said));
    let back = good(&["subscribe", "--cluster", &address, "--lines", "--to-tail"], b"");
    input.push(b'\n');
    assert!(back == input);
}

#[test]
fn a_record_is_read_by_position_and_the_tail_lies_behind_it() {
    let (_server, address) = dev(&[]);
    let c = ["--cluster", &address];
    let said = good(&[&["append", "--json", "--shard", "1"], &c[..]].concat(), b"hello\n");
    let said: serde_json::Value = serde_json::from_slice(&said).unwrap();
    let position = said["first"].as_u64().unwrap();
    let text = good(&[&["read", &position.to_string()], &c[..]].concat(), b"");
    assert_eq!(text, b"hello\n");
    let raw = good(&[&["read", "--raw", &position.to_string()], &c[..]].concat(), b"");
    assert_eq!(raw, b"hello");
    let tail: u64 = String::from_utf8(good(&[&["tail"], &c[..]].concat(), b"")).unwrap().trim().parse().unwrap();
    assert!(tail > position);
    // The position before it belongs to shard 0, which had nothing to say: a no-op.
    let no_op = good(&[&["read", "--json", "0"], &c[..]].concat(), b"");
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&no_op).unwrap()["kind"], "no-op");
    let beyond = run(&[&["read", "--wait", "0.2", "99999999"], &c[..]].concat(), b"");
    assert_eq!(beyond.status.code(), Some(1));
}

#[test]
fn events_show_speculation_and_then_confirmation() {
    let (_server, address) = dev(&[]);
    good(&["append", "--cluster", &address], b"one\ntwo\n");
    let text = good(&["subscribe", "--cluster", &address, "--events", "--json", "--count", "2"], b"");
    let events: Vec<serde_json::Value> =
        String::from_utf8(text).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let delivered: Vec<&str> =
        events.iter().filter(|e| e["event"] == "deliver").map(|e| e["text"].as_str().unwrap()).collect();
    assert_eq!(delivered, ["one", "two"]);
    assert!(events.iter().any(|e| e["event"] == "confirm"));
    assert!(events.iter().all(|e| e["event"] != "fail"));
}

#[test]
fn one_shard_can_be_followed_alone() {
    let (_server, address) = dev(&[]);
    good(&["append", "--cluster", &address, "--shard", "0"], b"zero\n");
    good(&["append", "--cluster", &address, "--shard", "1"], b"one\n");
    let only = good(&["subscribe", "--cluster", &address, "--shard", "1", "--lines", "--to-tail"], b"");
    assert_eq!(only, b"one\n");
    let both = good(&["subscribe", "--cluster", &address, "--lines", "--to-tail"], b"");
    assert_eq!(both, b"zero\none\n");
}

#[test]
fn every_ordering_and_ipv6_keep_what_is_appended() {
    for ordering in ["fixed", "free-tick", "free-event"] {
        let folder = Folder::new(&format!("ordering-{ordering}"));
        let settings = format!("ordering = \"{ordering}\"\nregion_bytes = 67108864");
        let (config, address) = cluster_file(&folder, "[::1]", &settings);
        let _nodes = nodes(&config, &[1, 2, 3, 4, 0]);
        let bytes = noise(3 << 20, 7);
        for shard in ["0", "1"] {
            good(&["append", "--cluster", &address, "--block", "1000", "--shard", shard], &bytes);
        }
        let back = good(&["subscribe", "--cluster", &address, "--raw", "--to-tail"], b"");
        assert!(back == [&bytes[..], &bytes[..]].concat(), "{ordering}");
        let one = good(&["subscribe", "--cluster", &address, "--raw", "--to-tail", "--shard", "1"], b"");
        assert!(one == bytes, "{ordering}");
    }
}

#[test]
fn a_cluster_that_listens_everywhere_is_reached_where_it_was_met() {
    let server = common::Server::start(&["dev", "--listen", "0.0.0.0:0"]);
    let line = server.says("clients connect to ");
    let port = line.split("0.0.0.0:").nth(1).unwrap().split(';').next().unwrap();
    let address = format!("127.0.0.1:{port}");
    good(&["append", "--cluster", &address], b"here\n");
    assert_eq!(good(&["subscribe", "--cluster", &address, "--lines", "--to-tail"], b""), b"here\n");
}
