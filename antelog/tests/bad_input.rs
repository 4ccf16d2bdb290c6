//! Bad input of every kind: one clear line, a non-zero exit, nothing lost, and everybody else goes on.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Stdio;

use common::{Folder, Server, antelog, bad, cluster_file, dev, good, nodes, noise};

#[test]
fn configurations_are_checked_as_a_whole() {
    let folder = Folder::new("config");
    let (good_file, _) = cluster_file(&folder, "127.0.0.1", "");
    let printed = good(&["config", "check", &good_file], b"");
    assert!(String::from_utf8(printed).unwrap().contains("window_cuts = 100"));
    let (bad_file, _) = cluster_file(&folder, "127.0.0.1", "tikc_us = 1000");
    let error = bad(&["config", "check", &bad_file], b"");
    assert!(error.contains("cluster.toml") && error.contains("line 3") && error.contains("tikc_us"), "{error}");
    let error = bad(&["node", "--config", &bad_file, "--id", "0"], b"");
    assert!(error.contains("unknown field `tikc_us`"), "{error}");
    let (good_file, _) = cluster_file(&folder, "127.0.0.1", "");
    let error = bad(&["node", "--config", &good_file, "--id", "9"], b"");
    assert!(error.contains("no node 9; it has 0, 1, 2, 3, 4"), "{error}");
    let error = bad(&["config", "check", "/nonexistent/file"], b"");
    assert!(error.contains("cannot read /nonexistent/file"), "{error}");
}

#[test]
fn a_port_in_use_is_named() {
    let (_server, address) = dev(&[]);
    let error = bad(&["dev", "--listen", &address], b"");
    assert!(error.contains(&address) && error.contains("in use"), "{error}");
}

#[test]
fn nobody_there_is_said_in_one_line() {
    let port = common::free_ports(1, "127.0.0.1")[0];
    let address = format!("127.0.0.1:{port}");
    let error = bad(&["tail", "--cluster", &address], b"");
    assert!(error.contains(&address), "{error}");
    let error = bad(&["tail", "--cluster", "no-port"], b"");
    assert!(error.contains("no-port"), "{error}");
}

#[test]
fn clients_of_another_cluster_are_refused_on_both_sides() {
    let (server, address) = dev(&[]);
    let error = bad(&["tail", "--cluster", &address, "--cluster-name", "other"], b"");
    assert!(error.contains("this is cluster \"dev\", the caller belongs to cluster \"other\""), "{error}");
    server.complains("the caller belongs to cluster \"other\"");
}

#[test]
fn peers_of_another_cluster_or_version_are_refused_on_both_sides() {
    let folder = Folder::new("strangers");
    let (config, _) = cluster_file(&folder, "127.0.0.1", "");
    let sequencer = nodes(&config, &[0]).remove(0);
    // The same ports under another cluster's name.
    let renamed = std::fs::read_to_string(&config).unwrap().replace("name = \"test\"", "name = \"other\"");
    let other = folder.file("other.toml", renamed.as_bytes());
    let stranger = Server::start(&["node", "--config", &other, "--id", "2"]);
    stranger.complains("this is cluster \"test\", the caller belongs to cluster \"other\"");
    sequencer.complains("the caller belongs to cluster \"other\"");
    assert_eq!(stranger.exit_code(), Some(1));
    // Another version: the magic is right, the version 9.
    let address = renamed.split("listen = \"").nth(1).unwrap().split('"').next().unwrap();
    let mut socket = TcpStream::connect(address).unwrap();
    socket.write_all(b"antelog\0\x09\x00\x00\x00").unwrap();
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).unwrap();
    assert!(answer.starts_with(b"antelog\0\x05\x00"), "{answer:?}");
    sequencer.complains("version 9");
    // A node whose sizes differ.
    let resized = std::fs::read_to_string(&config)
        .unwrap()
        .replace("name = \"test\"", "name = \"test\"\nregion_bytes = 67108864");
    let resized = folder.file("resized.toml", resized.as_bytes());
    let stranger = Server::start(&["node", "--config", &resized, "--id", "2"]);
    stranger.complains("the configurations differ");
    assert_eq!(stranger.exit_code(), Some(1));
}

#[test]
fn records_over_the_limit_are_refused_and_the_session_goes_on() {
    let (_server, address) = dev(&["--set", "cluster.record_bytes_max=1000"]);
    let c = ["--cluster", &address];
    let error = bad(&[&["append", "--block", "1001"], &c[..]].concat(), b"x");
    assert!(error.contains("limit of 1000 bytes"), "{error}");
    let input = [&b"short\n"[..], &[b'y'; 1001], b"\nnever read\n"].concat();
    let error = bad(&[&["append"], &c[..]].concat(), &input);
    assert!(error.contains("line 2") && error.contains("1 records were appended before"), "{error}");
    good(&[&["append"], &c[..]].concat(), &[b'z'; 1000]);
    let back = good(&[&["subscribe", "--lines", "--to-tail"], &c[..]].concat(), b"");
    assert_eq!(back, [&b"short\n"[..], &[b'z'; 1000], b"\n"].concat());
}

#[test]
fn half_a_hand_shake_and_garbage_on_every_port_disturb_nobody() {
    let folder = Folder::new("garbage");
    let (config, address) = cluster_file(&folder, "127.0.0.1", "region_bytes = 67108864");
    let _servers = nodes(&config, &[0, 2, 4, 1, 3]);
    let text = std::fs::read_to_string(&config).unwrap();
    let ports = text.split('"').filter(|part| part.starts_with("127.0.0.1:"));
    let mut held = Vec::new();
    for port in ports {
        for garbage in
            [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], &noise(100_000, 3), b"antelog\0\x01\x00\xFF\xFF", b"ante"]
        {
            let mut socket = TcpStream::connect(port).unwrap();
            // A refusal may close the connection before all of it is sent.
            let _ = socket.write_all(garbage);
            held.push(socket);
        }
    }
    good(&["append", "--cluster", &address], b"still\nhere\n");
    assert_eq!(good(&["subscribe", "--cluster", &address, "--lines", "--to-tail"], b""), b"still\nhere\n");
    drop(held);
}

#[test]
fn a_client_killed_in_mid_append_leaves_whole_records_in_order() {
    let (_server, address) = dev(&["--set", "cluster.region_bytes=268435456"]);
    let mut command = antelog(&["append", "--cluster", &address, "--block", "512"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let bytes = noise(8 << 20, 5);
    child.stdin.take().unwrap().write_all(&bytes).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    good(&["append", "--cluster", &address], b"after\n");
    let back = good(&["subscribe", "--cluster", &address, "--raw", "--to-tail"], b"");
    let kept = back.len() - 5;
    assert_eq!(&back[kept..], b"after");
    assert!(
        kept.is_multiple_of(512) && back[..kept] == bytes[..kept],
        "{kept} bytes are not a prefix of whole records"
    );
}

#[test]
fn a_subscriber_that_stops_reading_is_pushed_back_and_delays_nobody() {
    let (server, address) = dev(&["--set", "cluster.region_bytes=268435456"]);
    let mut command = antelog(&["subscribe", "--cluster", &address, "--raw"]);
    // Nobody reads this pipe for a while.
    let mut stalled = command.stdout(Stdio::piped()).spawn().unwrap();
    let folder = Folder::new("stalled");
    let bytes = noise(48 << 20, 9);
    let path = folder.file("input", &bytes);
    good(&["append", "--cluster", &address, "--file", &path, "--block", "4096"], b"");
    let back = good(&["subscribe", "--cluster", &address, "--raw", "--to-tail"], b"");
    assert!(back == bytes, "another subscriber got {} bytes", back.len());
    // The stalled one goes on where it was.
    let mut late = vec![0; bytes.len()];
    stalled.stdout.take().unwrap().read_exact(&mut late).unwrap();
    assert!(late == bytes);
    stalled.kill().unwrap();
    stalled.wait().unwrap();
    server.signal("-TERM");
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn a_full_region_refuses_appends_and_still_serves_reads() {
    let (_server, address) = dev(&["--set", "cluster.region_bytes=8388608"]);
    let c = ["--cluster", &address];
    let bytes = noise(16 << 20, 11);
    let full = bad(&[&["append", "--block", "4096", "--shard", "0"], &c[..]].concat(), &bytes);
    assert!(full.contains("log region of 8388608 bytes is full") && full.contains("region_bytes"), "{full}");
    let again = bad(&[&["append", "--block", "4096", "--shard", "0"], &c[..]].concat(), &bytes[..4096]);
    assert!(again.contains("is full"), "{again}");
    good(&[&["append", "--shard", "1"], &c[..]].concat(), b"the other shard goes on\n");
    let back = good(&[&["subscribe", "--raw", "--to-tail", "--shard", "0"], &c[..]].concat(), b"");
    assert!(back.len() > 6 << 20 && back[..] == bytes[..back.len()], "{} bytes", back.len());
}

#[test]
fn a_recycling_region_drops_the_oldest_and_says_so() {
    let (_server, address) = dev(&["--set", "cluster.region_bytes=8388608", "--set", "cluster.retention=recycle"]);
    let c = ["--cluster", &address];
    let bytes = noise(24 << 20, 13);
    good(&[&["append", "--block", "4096", "--shard", "0"], &c[..]].concat(), &bytes);
    let error = bad(&[&["subscribe", "--raw", "--to-tail"], &c[..]].concat(), b"");
    assert!(error.contains("begins at position "), "{error}");
    let head: u64 = error
        .split("begins at position ")
        .nth(1)
        .unwrap()
        .split(|ch: char| !ch.is_ascii_digit())
        .next()
        .unwrap()
        .parse()
        .unwrap();
    let back = good(&[&["subscribe", "--raw", "--to-tail", "--from", &head.to_string()], &c[..]].concat(), b"");
    assert!(back.len() > 5 << 20 && bytes.ends_with(&back), "{} bytes", back.len());
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let (_server, address) = dev(&[]);
    let c = ["--cluster", &address];
    good(&[&["append", "--block", "1000"], &c[..]].concat(), &noise(4 << 20, 1));
    let mut command = antelog(&[&["subscribe", "--raw", "--to-tail"], &c[..]].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut few = [0; 100];
    child.stdout.take().unwrap().read_exact(&mut few).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty());
}

#[test]
fn appends_wait_for_a_cluster_that_is_still_starting() {
    let folder = Folder::new("late");
    let (config, address) = cluster_file(&folder, "127.0.0.1", "region_bytes = 67108864");
    // Primaries first: nothing can be durable or ordered yet.
    let _early = nodes(&config, &[1, 3]);
    let input = folder.file("input", b"patience\n");
    let append = Server::start(&["append", "--cluster", &address, "--file", &input]);
    append.complains("waiting: record 1 is not acknowledged yet; ");
    let _late = nodes(&config, &[2, 4, 0]);
    append.says("1 record, ");
    assert_eq!(append.exit_code(), Some(0));
    assert_eq!(good(&["subscribe", "--cluster", &address, "--lines", "--to-tail"], b""), b"patience\n");
}

#[test]
fn a_command_that_waits_says_for_what() {
    let folder = Folder::new("waits");
    let (config, address) = cluster_file(&folder, "127.0.0.1", "region_bytes = 67108864");
    // No backup and no sequencer: nothing is ever bound.
    let _early = nodes(&config, &[1, 3]);
    let append = Server::start(&["append", "--cluster", &address, "--file", &config]);
    // What it says of the cause depends on whether it has tried the backup yet, which does not listen.
    append.complains("waiting: record 1 is not acknowledged yet; ");
    let (dev, address) = dev(&[]);
    good(&["append", "--cluster", &address], b"seen\n");
    let subscribe = Server::start(&["subscribe", "--cluster", &address, "--lines"]);
    subscribe.says("seen");
    drop(dev);
    subscribe.complains("waiting: ");
}

#[test]
fn a_grid_that_makes_no_sense_is_refused_before_it_starts() {
    for (args, expected) in [
        (&["--cells", "compute=fast"][..], "--cells compute=fast: expected milliseconds up to 10000"),
        (
            &["--cells", "compute=0", "scenario=calm"],
            "there is no scenario 'calm'; expected steady, bursts, slow-shard",
        ),
        (&["--cells", "shards=2"], "--cells shards=2: expected compute=MS,… or scenario=NAME,…"),
        (&["--limit", "0"], "--limit 0: expected a ratio above 0"),
        (&["--limit", "NaN"], "--limit NaN: expected a ratio above 0"),
        (&["--rate", "0"], "--rate 0: expected records per second and shard"),
        (&["--seconds", "0.01"], "too short to measure"),
        (&["--hog-duty", "101"], "--hog-duty 101: expected above 0 and at most 100 per cent"),
        (&["--hog-core", "4096"], "--hog-core 4096: this process may use"),
        (&["--set", "cluster.tikc_us=5"], "tikc_us"),
        (&["--json", "/nonexistent/folder/grid.json"], "cannot write /nonexistent/folder/grid.json"),
    ] {
        let error = bad(&[&["profile", "grid"], args].concat(), b"");
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_result_that_cannot_be_written_is_noticed_before_the_measurement() {
    let error = bad(&["demo", "--json", "/nonexistent/folder/demo.json"], b"");
    assert!(error.contains("cannot write /nonexistent/folder/demo.json"), "{error}");
}
