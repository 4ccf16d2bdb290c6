//! A cluster of real processes, each in a namespace of its own: three sequencers, and for each shard its replicas and a
//! spare.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::circumstances::Durability;
use crate::disks::Disks;
use crate::network::{Network, address};
use crate::record::RECORD_BYTES_MAX;

const PORT: u16 = 7000;
const CLIENTS_PORT: u16 = 7001;
/// How often it is asked how it is, while something is waited for.
const ASK_EVERY: Duration = Duration::from_millis(150);

/// It is told what a cluster lacks that is not whole after this.
const LONG: Duration = Duration::from_secs(5);

/// What a cluster is like.
#[derive(Clone, Debug)]
pub struct Shape {
    pub shards: usize,
    pub replicas: usize,
    pub spares: usize,
    pub suspect_ms: u64,
    pub region_bytes: usize,
    pub durability: Durability,
    /// Of each node's, if there are any.
    pub disk_bytes: u64,
}

/// A node, its place in the network being its place in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    pub id: u16,
    /// None: a sequencer.
    pub shard: Option<usize>,
    role: &'static str,
}

/// How a cluster is, by its own word.
#[derive(Clone, Debug)]
pub struct Status(Value);

impl Status {
    /// The node that leads the sequencers.
    pub fn leader(&self) -> Option<u16> {
        self.0["sequencers"]["leader"].as_u64().map(|n| n as u16)
    }

    /// The node that leads a shard.
    pub fn primary(&self, shard: usize) -> Option<u16> {
        self.0["shards"][shard]["primary"].as_u64().map(|n| n as u16)
    }

    /// The nodes that follow a shard's primary as members.
    pub fn backups(&self, shard: usize) -> Vec<u16> {
        let rows = self.0["nodes"].as_array().map_or(&[][..], Vec::as_slice);
        let follows = |row: &&Value| row["shard"] == shard && row["part"] == "follows as a member";
        rows.iter().filter(follows).filter_map(|row| row["node"].as_u64().map(|n| n as u16)).collect()
    }

    /// Whole-shard failures so far.
    pub fn view(&self) -> u64 {
        self.0["view"].as_u64().unwrap_or(0)
    }

    /// What there is still to wait for until everybody answers, every shard has its replicas and all sequencers vote.
    fn lacks(&self, shape: &Shape) -> Option<String> {
        let rows = |name: &str| self.0[name].as_array().map_or(&[][..], Vec::as_slice);
        let silent = rows("nodes").iter().find(|n| n["answers"] != true);
        // Who was killed is a voter until the one in its place is: another kill now would be one too many.
        let parts = ["does not vote yet", "is no member of its shard"];
        let idle = rows("nodes").iter().find(|n| parts.iter().any(|part| n["part"] == *part));
        let small = rows("shards").iter().find(|s| s["members"].as_u64() < Some(shape.replicas as u64));
        let problem = rows("problems").first().map(|p| format!("{p}"));
        problem
            .or_else(|| silent.map(|n| format!("node {} does not answer", n["node"])))
            .or_else(|| idle.map(|n| format!("node {} {}", n["node"], n["part"])))
            .or_else(|| small.map(|s| format!("shard {} has {} members", s["shard"], s["members"])))
            .or_else(|| (self.0["sequencers"]["voters"] != 3).then(|| "not three sequencers vote".to_owned()))
            .or_else(|| self.leader().is_none().then(|| "no sequencer leads".to_owned()))
    }
}

/// A cluster at work.
pub struct Cluster {
    pub network: Network,
    pub disks: Option<Disks>,
    pub nodes: Vec<Node>,
    shape: Shape,
    folder: PathBuf,
    program: PathBuf,
    config: PathBuf,
    children: Vec<Option<Child>>,
    /// The place from which it is asked how it is.
    observer: usize,
    stopped: Vec<usize>,
}

fn nodes(shape: &Shape) -> Vec<Node> {
    let mut nodes: Vec<Node> = (0..3).map(|id| Node { id, shard: None, role: "sequencer" }).collect();
    for shard in 0..shape.shards {
        for number in 0..shape.replicas + shape.spares {
            let role = match number {
                0 => "primary",
                n if n < shape.replicas => "backup",
                _ => "spare",
            };
            nodes.push(Node { id: (10 * (shard + 1) + number) as u16, shard: Some(shard), role });
        }
    }
    nodes
}

fn config(shape: &Shape, nodes: &[Node], disks: Option<&Disks>) -> String {
    let mut text = format!(
        "[cluster]\nname = \"chaos\"\nsuspect_ms = {}\nregion_bytes = {}\nrecord_bytes_max = {RECORD_BYTES_MAX}\n\
         client_ring_bytes = 1048576\n",
        shape.suspect_ms, shape.region_bytes
    );
    if let Some(durability) = shape.durability.key() {
        text += &format!("durability = \"{durability}\"\n");
    }
    (0..shape.shards).for_each(|shard| text += &format!("[[shard]]\nid = {shard}\n"));
    for (place, node) in nodes.iter().enumerate() {
        text +=
            &format!("[[node]]\nid = {}\nrole = \"{}\"\nlisten = \"{}:{PORT}\"\n", node.id, node.role, address(place));
        if let Some(disks) = disks {
            text += &format!("data_dir = {:?}\n", disks.path(place));
        }
        if let Some(shard) = node.shard {
            text += &format!("shard = {shard}\nclients = \"{}:{CLIENTS_PORT}\"\n", address(place));
        }
    }
    text
}

impl Cluster {
    /// Starts one, with places for so many clients besides.
    pub fn start(shape: &Shape, clients: usize, program: &Path, folder: &Path) -> Result<Cluster, String> {
        let nodes = nodes(shape);
        let network = Network::new(nodes.len() + clients + 1)?;
        let has_disks = shape.durability != Durability::Memory;
        let disks =
            has_disks.then(|| Disks::mount(&folder.join("disks"), nodes.len(), shape.disk_bytes)).transpose()?;
        let file = folder.join("cluster.toml");
        std::fs::write(&file, config(shape, &nodes, disks.as_ref()))
            .map_err(|e| format!("cannot write {}: {e}", file.display()))?;
        let mut cluster = Cluster {
            network,
            disks,
            shape: shape.clone(),
            folder: folder.to_owned(),
            program: program.to_owned(),
            config: file,
            children: nodes.iter().map(|_| None).collect(),
            observer: nodes.len(),
            stopped: Vec::new(),
            nodes,
        };
        for place in 0..cluster.nodes.len() {
            cluster.run(place)?;
        }
        Ok(cluster)
    }

    /// The place of a client.
    pub fn client_place(&self, client: usize) -> usize {
        self.observer + 1 + client
    }

    /// Every gate's address.
    pub fn gates(&self) -> String {
        let served = self.nodes.iter().enumerate().filter(|(_, n)| n.shard.is_some());
        served.map(|(place, _)| format!("{}:{CLIENTS_PORT}", address(place))).collect::<Vec<_>>().join(",")
    }

    /// The place of a node.
    pub fn place(&self, node: u16) -> usize {
        self.nodes.iter().position(|n| n.id == node).unwrap_or_default()
    }

    /// Starts the node at a place, if it does not run.
    pub fn run(&mut self, place: usize) -> Result<(), String> {
        if let Some(child) = &mut self.children[place]
            && child.try_wait().is_ok_and(|ended| ended.is_none())
        {
            return Ok(());
        }
        let id = self.nodes[place].id;
        let path = self.folder.join(format!("node-{id}.log"));
        let log = OpenOptions::new().create(true).append(true).open(&path);
        let log: File = log.map_err(|e| format!("cannot write {}: {e}", path.display()))?;
        let mut command = self.network.command(place, &self.program);
        command.args(["node", "--id", &id.to_string(), "--config"]).arg(&self.config);
        command.arg("--counters").arg(self.folder.join(format!("counters-{id}")));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.children[place] = Some(command.spawn().map_err(|e| format!("cannot start node {id}: {e}"))?);
        Ok(())
    }

    /// Sends a signal to the node at a place.
    pub fn signal(&mut self, place: usize, signal: Signal) {
        if signal == Signal::STOP {
            self.stopped.push(place);
        }
        if let Some(pid) = self.children[place].as_ref().and_then(|c| Pid::from_raw(c.id() as i32)) {
            // One that has ended by itself is found by `ended`.
            let _ = kill_process(pid, signal);
        }
    }

    /// Kills the node at a place.
    pub fn kill(&mut self, place: usize) {
        if let Some(mut child) = self.children[place].take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Kills nodes at once.
    pub fn kill_all(&mut self, places: &[usize]) {
        places.iter().for_each(|place| self.signal(*place, Signal::KILL));
        places.iter().for_each(|place| self.kill(*place));
    }

    /// Tells the node at a place to end, and waits for it.
    pub fn terminate(&mut self, place: usize) -> Result<(), String> {
        self.signal(place, Signal::TERM);
        self.wait_for(place)
    }

    /// Waits for a node that was told to end.
    fn wait_for(&mut self, place: usize) -> Result<(), String> {
        let Some(mut child) = self.children[place].take() else { return Ok(()) };
        let status = child.wait().map_err(|e| e.to_string())?;
        let id = self.nodes[place].id;
        if status.success() { Ok(()) } else { Err(format!("node {id} was told to end and did so with {status}")) }
    }

    /// Tells all nodes to end, and waits for them.
    pub fn terminate_all(&mut self) -> Result<(), String> {
        // A second signal would end it at once.
        (0..self.nodes.len()).for_each(|place| self.signal(place, Signal::TERM));
        (0..self.nodes.len()).try_for_each(|place| self.wait_for(place))
    }

    /// The end of all faults: whoever is stopped goes on, there is room on disks, the network is whole, everybody runs.
    pub fn mend(&mut self) -> Result<(), String> {
        // Who was killed is started again; nobody else may be missing.
        if let Some(ended) = self.ended() {
            return Err(ended);
        }
        self.disks.as_mut().map_or(Ok(()), Disks::free)?;
        for place in std::mem::take(&mut self.stopped) {
            self.signal(place, Signal::CONT);
        }
        self.network.heal()?;
        (0..self.nodes.len()).try_for_each(|place| self.run(place))
    }

    /// A node that ended by itself: a panic, a contradiction, a failure.
    pub fn ended(&mut self) -> Option<String> {
        for (node, child) in self.nodes.iter().zip(&mut self.children) {
            if let Some(Ok(Some(status))) = child.as_mut().map(Child::try_wait) {
                return Some(format!("node {} ended by itself ({status}): see node-{}.log", node.id, node.id));
            }
        }
        None
    }

    /// How it says it is.
    pub fn status(&self) -> Result<Status, String> {
        let mut command = self.network.command(self.observer, &self.program);
        command.args(["cluster", "status", "--json", "--wait", "2", "--cluster", &self.gates()]);
        let output = command.stdin(Stdio::null()).output().map_err(|e| e.to_string())?;
        serde_json::from_slice(&output.stdout)
            .map(Status)
            .map_err(|_| String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }

    /// Waits until everybody answers and every shard has all its replicas; says what it waited for if that took long.
    pub fn wait_whole(&mut self, patience: Duration) -> Result<Status, String> {
        let began = Instant::now();
        let deadline = began + patience;
        let mut lacked = String::new();
        loop {
            if let Some(ended) = self.ended() {
                return Err(ended);
            }
            let status = self.status();
            let lacks = status.as_ref().map_or_else(|why| Some(why.clone()), |status| status.lacks(&self.shape));
            match (status, lacks) {
                (Ok(status), None) => {
                    if began.elapsed() > LONG {
                        println!("          whole after {:.1} s: {lacked}", began.elapsed().as_secs_f64());
                    }
                    return Ok(status);
                }
                (status, Some(lacks)) if Instant::now() > deadline => {
                    let said = status.map_or_else(|why| why, |status| format!("{:#}", status.0));
                    return Err(format!("it is not whole {patience:?} after everything was mended: {lacks}:\n{said}"));
                }
                (_, lacks) => {
                    lacked = lacks.unwrap_or_default();
                    std::thread::sleep(ASK_EVERY);
                }
            }
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for place in 0..self.children.len() {
            self.kill(place);
        }
    }
}
