//! Several sequencers as processes: the log goes on while most of them run, and after all of them were started again.

mod common;

use std::time::{Duration, Instant};

use common::{Folder, PATIENCE, Server, free_ports, good};

/// Two shards with a backup each behind so many sequencers, which are nodes 0, 1, …
struct Cluster {
    folder: Folder,
    config: String,
    clients: String,
    sequencers: Vec<Option<Server>>,
    _replicas: Vec<Server>,
    appended: u32,
}

impl Cluster {
    fn start(name: &str, sequencers: u16, cluster: &str) -> Cluster {
        let folder = Folder::new(name);
        let replicas = sequencers..sequencers + 4;
        let ports = free_ports(usize::from(sequencers) + 8, "127.0.0.1");
        let address = |at: u16| format!("127.0.0.1:{}", ports[usize::from(at)]);
        let mut text = format!("[cluster]\nname = \"test\"\nregion_bytes = 16777216\n{cluster}\n");
        text += "[policy]\nground_windows = 0\n[[shard]]\nid = 0\n[[shard]]\nid = 1\n";
        for id in 0..sequencers {
            text += &format!("[[node]]\nid = {id}\nrole = \"sequencer\"\nlisten = \"{}\"\n", address(id));
        }
        for (at, id) in (0..).zip(replicas.clone()) {
            let (role, shard) = (["primary", "backup"][at % 2], at / 2);
            let (listen, clients) = (address(id), address(id + 4));
            text += &format!(
                "[[node]]\nid = {id}\nrole = \"{role}\"\nshard = {shard}\nlisten = \"{listen}\"\nclients = \"{clients}\"\n"
            );
        }
        let config = folder.file("cluster.toml", text.as_bytes());
        let clients = address(sequencers + 4);
        let replicas = replicas.map(|id| start(&config, id, &[])).collect();
        let mut cluster = Cluster { folder, config, clients, sequencers: Vec::new(), _replicas: replicas, appended: 0 };
        cluster.sequencers.resize_with(sequencers.into(), || None);
        (0..sequencers).for_each(|id| cluster.start_sequencer(id));
        cluster
    }

    fn counters(&self, id: u16) -> String {
        self.folder.0.join(format!("counters-{id}")).to_string_lossy().into_owned()
    }

    fn start_sequencer(&mut self, id: u16) {
        let file = self.counters(id);
        let _ = std::fs::remove_file(&file);
        self.sequencers[usize::from(id)] = Some(start(&self.config, id, &["--counters", &file]));
    }

    fn kill_sequencer(&mut self, id: u16) {
        self.sequencers[usize::from(id)] = None;
    }

    /// The sequencer that leads, once one does.
    fn leader(&self) -> u16 {
        let deadline = Instant::now() + PATIENCE;
        loop {
            for (id, _) in (0..).zip(&self.sequencers).filter(|(_, s)| s.is_some()) {
                let counters = std::fs::read_to_string(self.counters(id)).unwrap_or_default();
                let leads = |line: &str| line.contains(".leads") && !line.trim_end().ends_with(" 0");
                if counters.lines().any(leads) {
                    return id;
                }
            }
            assert!(Instant::now() < deadline, "nobody leads");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn append(&mut self, lines: u32) {
        let text: String = (self.appended..self.appended + lines).map(|n| format!("{n}\n")).collect();
        self.appended += lines;
        good(&["append", "--cluster", &self.clients], text.as_bytes());
    }

    /// Everything appended is in the log once.
    fn check(&self) {
        let read = good(&["subscribe", "--cluster", &self.clients, "--lines", "--to-tail"], &[]);
        let mut read: Vec<u32> = String::from_utf8(read).unwrap().lines().map(|l| l.parse().unwrap()).collect();
        read.sort_unstable();
        assert!(read.into_iter().eq(0..self.appended));
    }
}

fn start(config: &str, id: u16, more: &[&str]) -> Server {
    let id = id.to_string();
    let server = Server::start(&[&["node", "--config", config, "--id", &id], more].concat());
    server.says("is up");
    server
}

#[test]
fn appends_go_on_when_the_leading_sequencer_is_killed_and_when_the_next_one_is() {
    let mut cluster = Cluster::start("group-killed", 3, "");
    cluster.append(100);
    let first = cluster.leader();
    cluster.kill_sequencer(first);
    cluster.append(100);
    let second = cluster.leader();
    // It comes back without its memory, as another member, and the group is whole again.
    cluster.start_sequencer(first);
    cluster.append(100);
    let joined = |cluster: &Cluster| {
        let counters = std::fs::read_to_string(cluster.counters(first)).unwrap_or_default();
        counters.lines().any(|l| l.contains(".members 3"))
    };
    let deadline = Instant::now() + PATIENCE;
    while !joined(&cluster) {
        assert!(Instant::now() < deadline, "the member that came back does not take part");
        std::thread::sleep(Duration::from_millis(20));
    }
    cluster.kill_sequencer(second);
    cluster.append(100);
    cluster.check();
}

#[test]
fn a_group_goes_on_after_all_its_members_were_killed_at_once() {
    for durability in ["replicated", "flushed"] {
        let name = format!("group-restart-{durability}");
        let data = Folder::new(&format!("{name}-data"));
        let keys = format!("durability = \"{durability}\"\n[launch]\ndata_dir = {:?}", data.0);
        let mut cluster = Cluster::start(&name, 3, &keys);
        cluster.append(100);
        (0..3).for_each(|id| cluster.kill_sequencer(id));
        (0..3).for_each(|id| cluster.start_sequencer(id));
        cluster.append(100);
        cluster.check();
    }
}

#[test]
fn a_sequencer_on_its_own_goes_on_with_what_it_has_kept() {
    let data = Folder::new("group-alone-data");
    let mut cluster = Cluster::start("group-alone", 1, &format!("[launch]\ndata_dir = {:?}", data.0));
    cluster.append(100);
    cluster.kill_sequencer(0);
    cluster.start_sequencer(0);
    cluster.append(100);
    cluster.check();
}

#[test]
fn a_sequencer_that_is_told_to_end_hands_the_lead_over_under_load() {
    let mut cluster = Cluster::start("group-orderly", 3, "");
    cluster.append(10);
    let clients = cluster.clients.clone();
    let writer = std::thread::spawn(move || {
        let text: String = (10..20_010).map(|n| format!("{n}\n")).collect();
        good(&["append", "--cluster", &clients], text.as_bytes());
    });
    cluster.appended += 20_000;
    for _ in 0..2 {
        let first = cluster.leader();
        let leader = cluster.sequencers[usize::from(first)].take().unwrap();
        leader.signal("-TERM");
        leader.complains("leads nothing any more");
        assert_eq!(leader.exit_code(), Some(0));
        assert_ne!(cluster.leader(), first);
        cluster.start_sequencer(first);
        let deadline = Instant::now() + PATIENCE;
        while !std::fs::read_to_string(cluster.counters(first)).unwrap_or_default().contains(".members 3") {
            assert!(Instant::now() < deadline, "the member that came back does not take part");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    writer.join().unwrap();
    cluster.append(100);
    cluster.check();
}
