//! The client library against a real cluster: several threads, waiting reads, tails, sessions that are lost.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use antelog::{Client, ClientOptions, Event, Position, Scope, ShardId, Slot};
use common::{Folder, cluster_file, dev, good, nodes};

fn connect(address: &str) -> Client {
    Client::connect(ClientOptions::new([address])).unwrap()
}

#[test]
fn threads_share_a_client_and_every_record_comes_once_in_their_orders() {
    let (_server, address) = dev(&["--set", "cluster.region_bytes=67108864"]);
    let client = connect(&address);
    let threads: Vec<_> = (0..4u8)
        .map(|thread| {
            let client = client.clone();
            std::thread::spawn(move || {
                let shard = ShardId(u16::from(thread % 2));
                let append = |n: u32| client.append_async(shard, format!("{thread} {n}")).unwrap();
                let pending: Vec<_> = (0..500).map(append).collect();
                pending.into_iter().map(|p| p.wait().unwrap()).collect::<Vec<Position>>()
            })
        })
        .collect();
    let positions: Vec<Vec<Position>> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    let tail = client.tail().unwrap();
    assert!(positions.iter().flatten().all(|p| *p < tail), "what is acknowledged lies below the tail");
    let mut seen = Vec::new();
    let mut subscription = client.subscribe(Scope::All, Position(0)).unwrap();
    loop {
        match subscription.next().unwrap() {
            Event::Deliver { position, record, .. } => {
                seen.push((position, String::from_utf8(record.to_vec()).unwrap()));
            }
            Event::Confirm { upto } if upto >= tail => break,
            Event::Confirm { .. } => {}
            Event::Fail { from } => panic!("speculation from {from} failed"),
            Event::Unavailable { from, .. } => panic!("{from} is unavailable"),
        }
    }
    let expected: usize = 4 * 500;
    assert_eq!(seen.iter().filter(|(p, _)| *p < tail).count(), expected);
    for (thread, own) in positions.iter().enumerate() {
        assert!(own.is_sorted(), "thread {thread}'s records keep its order");
        for (n, position) in own.iter().enumerate() {
            let (_, text) = seen.iter().find(|(p, _)| p == position).unwrap();
            assert_eq!(*text, format!("{thread} {n}"));
        }
    }
}

#[test]
fn reads_of_positions_to_come_hold_nothing_up_and_are_answered_in_the_end() {
    let (_server, address) = dev(&[]);
    let client = connect(&address);
    let first = client.append(ShardId(0), "first").unwrap();
    // Many reads beyond the tail are given up; each leaves nothing behind that would stop an append.
    let beyond = Position(first.0 + 100_000);
    for _ in 0..100 {
        assert!(client.read(beyond, Duration::from_millis(1)).is_err());
    }
    let next = client.append(ShardId(0), "next").unwrap();
    assert_eq!(client.read(next, Duration::from_secs(20)).unwrap(), Slot::Record(b"next"[..].into()));
    let waiting = std::thread::spawn({
        let (client, soon) = (client.clone(), Position(next.0 + 20));
        move || client.read(soon, Duration::from_secs(60)).unwrap()
    });
    for n in 0..100 {
        client.append(ShardId(n % 2), "more").unwrap();
    }
    waiting.join().unwrap();
}

#[test]
fn many_ask_for_the_tail_at_once_and_all_are_answered() {
    let folder = Folder::new("tails");
    let (config, address) = cluster_file(&folder, "127.0.0.1", "region_bytes = 67108864");
    let _nodes = nodes(&config, &[0, 2, 4, 1, 3]);
    let last = connect(&address).append(None, "x").unwrap();
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let client = connect(&address);
            std::thread::spawn(move || {
                for _ in 0..50 {
                    assert!(client.tail().unwrap() > last);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn a_client_with_a_tiny_ring_is_cut_off_and_nobody_else_notices() {
    let (server, address) = dev(&[]);
    good(&["append", "--cluster", &address], &[&[b'x'; 5000][..], b"\n"].concat());
    // A hand-shake for a ring of 4 KiB, by hand: cluster "", client session 7.
    let mut body = vec![0u8; 0];
    let hello = antelog_core::handshake::Hello {
        cluster: String::new(),
        from: antelog_core::handshake::Endpoint::Client { session: 7 },
        record_bytes_max: 0,
        ring_bytes: 4096,
        log_bytes: 0,
        ability: antelog_core::path::Ability::tcp(),
        nonce: None,
    };
    body.extend(hello.encode().unwrap());
    let mut socket = TcpStream::connect(&address).unwrap();
    socket.write_all(&body).unwrap();
    let mut answer = [0; 16];
    socket.read_exact(&mut answer).unwrap();
    // Frames from here on; whatever the bytes mean, the node must live.
    let _ = socket.write_all(&common::noise(100_000, 17));
    assert_eq!(good(&["subscribe", "--cluster", &address, "--raw", "--to-tail"], b""), [b'x'; 5000]);
    server.signal("-TERM");
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn appends_go_on_after_every_connection_was_cut() {
    let folder = Folder::new("cut");
    let (config, address) = cluster_file(&folder, "127.0.0.1", "region_bytes = 67108864\nsuspect_ms = 100");
    let servers = nodes(&config, &[0, 2, 4, 1, 3]);
    let client = connect(&address);
    let before: Vec<_> = (0..200).map(|n| client.append_async(ShardId(n % 2), format!("{n}")).unwrap()).collect();
    // A backup and the sequencer stand still for a while: nothing is lost, everything goes on.
    servers[1].signal("-STOP");
    servers[0].signal("-STOP");
    let meanwhile: Vec<_> = (200..400).map(|n| client.append_async(ShardId(n % 2), format!("{n}")).unwrap()).collect();
    servers[1].signal("-CONT");
    servers[0].signal("-CONT");
    let mut positions: Vec<Position> = before.into_iter().chain(meanwhile).map(|p| p.wait().unwrap()).collect();
    positions.sort_unstable();
    positions.dedup();
    assert_eq!(positions.len(), 400, "every record has a position of its own");
}

#[test]
fn one_client_too_many_is_told_so_and_comes_in_when_another_leaves() {
    let (server, address) = dev(&["--set", "cluster.clients_max=2"]);
    let first = connect(&address);
    first.append(None, "1").unwrap();
    let second = connect(&address);
    second.append(None, "2").unwrap();
    let refused = Client::connect(ClientOptions::new([&address])).unwrap_err().to_string();
    assert!(refused.contains("2 clients are connected") && refused.contains("clients_max"), "{refused}");
    server.complains("2 clients are connected");
    drop(first);
    // The gate notices the closed connection in its own time.
    let third = loop {
        if let Ok(client) = Client::connect(ClientOptions::new([&address])) {
            break client;
        }
        std::thread::yield_now();
    };
    third.append(None, "3").unwrap();
}
