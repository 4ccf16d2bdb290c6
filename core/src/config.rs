//! The configuration of a cluster: one TOML file, validated as a whole, unknown keys refused.
//!
//! Cluster-wide keys are in `[cluster]`, `[policy]` and `[[shard]]`, per-process ones in `[launch]` and `[[node]]`.
//! Every key of `[cluster]`, `[policy]` and `[launch]` can be overridden by an environment variable
//! (`ANTELOG_CLUSTER_TICK_US=500`) and, above that, by a flag (`--set cluster.tick_us=500`).

mod access;
mod durability;
mod policy;
mod print;

use std::collections::BTreeSet;
use std::fmt;
use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};

use antelog_protocol::limits::{QUOTA_MAX, RECORD_BYTES_LIMIT, REPLICAS_MAX, SHARDS_MAX, WINDOW_CUTS_MAX};
use antelog_protocol::{Ordering, ShardId};
use serde::Deserialize;

use crate::channel::{CAPACITY_BYTES_MAX, CAPACITY_BYTES_MIN, message_bytes_max};
use crate::log::{Retention, region_bytes_valid};
use crate::node::gate::reply_bytes_max;
use crate::node::{Idle, LaunchMode};
use crate::path::Wish;

pub use access::AccessEntry;
pub use durability::Durability;
pub use policy::PolicyConfig;
use print::quoted;

/// Prefix of environment variables that override keys.
pub const ENVIRONMENT_PREFIX: &str = "ANTELOG_";

/// A whole configuration.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// What all nodes share.
    #[serde(default)]
    pub cluster: ClusterConfig,
    /// How the ordering adapts.
    #[serde(default)]
    pub policy: PolicyConfig,
    /// How this process runs its agents.
    #[serde(default)]
    pub launch: LaunchConfig,
    /// Secrets of clients.
    #[serde(default)]
    pub access: Vec<AccessEntry>,
    /// Shards.
    #[serde(rename = "shard")]
    pub shards: Vec<ShardEntry>,
    /// Nodes.
    #[serde(rename = "node")]
    pub nodes: Vec<NodeEntry>,
}

/// Cluster-wide keys.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterConfig {
    /// Name; nodes and clients of another are refused.
    pub name: String,
    /// `fixed`, `free-tick`, `free-event` or `auto`.
    #[serde(deserialize_with = "ordering")]
    pub ordering: Ordering,
    /// The ordering tick in microseconds.
    pub tick_us: u64,
    /// Cuts in a window.
    pub window_cuts: u32,
    /// A replica not heard from for this long is lost, in milliseconds; reports repeat four times as often.
    pub suspect_ms: u64,
    /// A lost connection to a replica that nobody else can speak for has this long to come back, in milliseconds.
    pub lost_grace_ms: u64,
    /// What an answer promises of a node that has a `data_dir`: `replicated` or `flushed`.
    pub durability: Durability,
    /// Largest record in bytes.
    pub record_bytes_max: u32,
    /// Appends a session may have outstanding per shard.
    pub outstanding_max: u32,
    /// Appends waiting for their cut, per shard.
    pub pending_max: usize,
    /// Sessions remembered per shard for duplicate suppression.
    pub sessions_max: usize,
    /// Bytes of each replica's log region.
    pub region_bytes: usize,
    /// What happens when a region is full: `refuse` appends, or `recycle` the oldest confirmed records.
    pub retention: Retention,
    /// Bytes of each shard's log that a node with a `data_dir` keeps on disk, at least; 0: all.
    pub keep_bytes: u64,
    /// Seconds for which records are kept on disk, at least; 0: for ever. What either key lets go is dropped.
    pub keep_s: u64,
    /// Bytes of a client's ring at its gate, in either direction.
    pub client_ring_bytes: usize,
    /// Most clients per gate.
    pub clients_max: u16,
    /// Cuts of free windows remembered; older positions of free windows read as trimmed.
    pub free_cuts_max: usize,
    /// A file with the secret that nodes and clients must know; absent: everybody is let in.
    pub secret_file: Option<String>,
    /// Appends a second and client; 0: no limit. The next one waits in the client's ring.
    pub client_appends_per_s: u64,
    /// Bytes appended a second and client; 0: no limit.
    pub client_bytes_per_s: u64,
    /// Subscriptions of a client; 0: no limit.
    pub client_subscriptions_max: u32,
}

impl Default for ClusterConfig {
    fn default() -> ClusterConfig {
        ClusterConfig {
            name: "antelog".into(),
            ordering: Ordering::Fixed,
            tick_us: 1000,
            window_cuts: 100,
            suspect_ms: 200,
            lost_grace_ms: 5,
            durability: Durability::Replicated,
            record_bytes_max: 1 << 20,
            outstanding_max: 1024,
            pending_max: 16384,
            sessions_max: 1024,
            region_bytes: 1 << 30,
            retention: Retention::Refuse,
            keep_bytes: 0,
            keep_s: 0,
            client_ring_bytes: 8 << 20,
            clients_max: 256,
            free_cuts_max: 1 << 18,
            secret_file: None,
            client_appends_per_s: 0,
            client_bytes_per_s: 0,
            client_subscriptions_max: 0,
        }
    }
}

/// Per-process keys.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LaunchConfig {
    /// `dedicated`: a thread per agent. `shared`: one thread for all agents of the process.
    #[serde(deserialize_with = "launch_mode")]
    pub mode: LaunchMode,
    /// `spin`, `yield` or `park`.
    pub idle: Idle,
    /// With `park`: microseconds a thread keeps spinning after work before it blocks.
    pub spin_us: u64,
    /// Core of the first thread; further threads take the following ones. Absent: threads that spin are pinned from core
    /// 0, threads that park are not pinned.
    pub first_core: Option<usize>,
    /// Spin even on more threads than there are cores.
    pub force: bool,
    /// Have the kernel back logs at start and clients' rings when they connect, so that no page fault delays a record:
    /// for nodes with memory to spare.
    pub prefault: bool,
    /// Folder for what nodes keep, each in a folder of its own in it, `node-ID`. Absent: nothing is written to disk.
    pub data_dir: Option<String>,
    /// `auto`: RDMA with peers that can use it too, TCP otherwise. `rdma` and `tcp`: nothing else.
    pub transport: Wish,
    /// RDMA device, `DEVICE[:PORT[:GID]]`. Absent: the one that has the node's address.
    pub rdma_device: Option<String>,
    /// RDMA sends a packet again after 4.096 µs · 2^this without an answer, and gives up after the eighth attempt.
    pub rdma_ack_timeout: u8,
    /// Where `/metrics`, `/health` and `/ready` are served over HTTP, `host:port`; absent: nowhere.
    pub metrics: Option<String>,
    /// How long a node that was told to end goes on to finish what clients have begun, in milliseconds.
    pub close_ms: u64,
}

impl Default for LaunchConfig {
    fn default() -> LaunchConfig {
        LaunchConfig {
            mode: LaunchMode::Shared,
            idle: Idle::Park,
            spin_us: 20,
            first_core: None,
            force: false,
            prefault: false,
            data_dir: None,
            transport: Wish::Auto,
            rdma_device: None,
            rdma_ack_timeout: 14,
            metrics: None,
            close_ms: 2000,
        }
    }
}

/// A shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// Its number.
    pub id: u16,
    /// Slots it contributes to every cut of a fixed window, until its arrival rate is known.
    #[serde(default = "default_quota")]
    pub quota: u32,
    /// It stands by: its nodes run, but it takes appends only after `antelog shard add`.
    #[serde(default)]
    pub standby: bool,
    /// When its ticks of free windows fall, in microseconds into the tick of the machine's clock. Absent: at random, as
    /// shards on different machines do.
    pub tick_phase_us: Option<u64>,
    /// For experiments: every report of the primary is held back this long before it leaves, in microseconds, and a newer
    /// one takes its place meanwhile. Makes the shard a straggler; 0 in every cluster that is to be used.
    #[serde(default)]
    pub report_delay_us: u64,
}

/// Longest [`report_delay_us`](ShardEntry::report_delay_us).
const REPORT_DELAY_US_MAX: u64 = 10_000_000;

fn default_quota() -> u32 {
    10
}

/// What a node does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Binds the order.
    Sequencer,
    /// Takes a shard's appends at first: a backup that is promoted does so later.
    Primary,
    /// Holds a copy of a shard's log.
    Backup,
    /// Waits to take the place of a replica that is lost.
    Spare,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Sequencer => "sequencer",
            Role::Primary => "primary",
            Role::Backup => "backup",
            Role::Spare => "spare",
        })
    }
}

/// A node: one process, or one of several in an embedded cluster.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeEntry {
    /// Its number.
    pub id: u16,
    /// What it does.
    pub role: Role,
    /// The shard of a primary or backup.
    pub shard: Option<u16>,
    /// Where it listens for other nodes, `host:port`. A primary needs none: it calls the others.
    pub listen: Option<String>,
    /// Where clients are served, `host:port`, of every node with a shard: any of them may come to lead it.
    pub clients: Option<String>,
    /// Instead of [`LaunchConfig::data_dir`].
    pub data_dir: Option<String>,
    /// Instead of [`LaunchConfig::transport`].
    pub transport: Option<Wish>,
    /// Instead of [`LaunchConfig::rdma_device`].
    pub rdma_device: Option<String>,
}

impl NodeEntry {
    /// The shard, of a node that has one.
    pub fn shard_id(&self) -> Option<ShardId> {
        self.shard.map(ShardId)
    }
}

/// What is wrong with a configuration: one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(pub String);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

fn wrong(text: impl Into<String>) -> ConfigError {
    ConfigError(text.into())
}

fn ordering<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Ordering, D::Error> {
    let name = String::deserialize(deserializer)?;
    Ordering::from_name(&name).ok_or_else(|| {
        serde::de::Error::custom(format!("unknown ordering '{name}', expected fixed, free-tick, free-event or auto"))
    })
}

fn launch_mode<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<LaunchMode, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

impl Config {
    /// Reads a configuration, applies overrides (`key=value`, the later wins) and validates the result.
    ///
    /// # Errors
    /// One line that says what is wrong, where, and what would be right.
    pub fn parse(text: &str, overrides: &[String]) -> Result<Config, ConfigError> {
        let mut table: toml::Table = toml::from_str(text).map_err(|e| wrong(one_line(&e.to_string())))?;
        for item in overrides {
            set(&mut table, item)?;
        }
        let shown = toml::to_string(&table).map_err(|e| wrong(e.to_string()))?;
        // Without overrides the original text is parsed, so that a message names the file's own line.
        let source = if overrides.is_empty() { text } else { &shown };
        let config: Config = toml::from_str(source).map_err(|e| wrong(one_line(&e.to_string())))?;
        config.validate()?;
        Ok(config)
    }

    /// Overrides from environment variables, in the form that [`parse`](Self::parse) takes.
    pub fn environment(variables: impl Iterator<Item = (String, String)>) -> Vec<String> {
        let mut overrides = Vec::new();
        for (name, value) in variables {
            let Some(rest) = name.strip_prefix(ENVIRONMENT_PREFIX) else { continue };
            if rest == "SECRET_FILE" {
                // Quoted, so that a path that looks like a number stays a path.
                overrides.push(format!("cluster.secret_file={}", toml::Value::String(value)));
                continue;
            }
            for section in ["CLUSTER_", "POLICY_", "LAUNCH_"] {
                if let Some(key) = rest.strip_prefix(section) {
                    let section = section.trim_end_matches('_').to_lowercase();
                    overrides.push(format!("{section}.{}={value}", key.to_lowercase()));
                }
            }
        }
        overrides
    }

    /// Checks everything that can be checked without starting anything.
    ///
    /// # Errors
    /// The first thing wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.cluster.validate()?;
        self.validate_access()?;
        self.policy.validate()?;
        if !(1..=31).contains(&self.launch.rdma_ack_timeout) {
            let value = self.launch.rdma_ack_timeout;
            return Err(wrong(format!("launch.rdma_ack_timeout must be 1 to 31, not {value}")));
        }
        if self.launch.close_ms > 3_600_000 {
            return Err(wrong(format!("launch.close_ms must be 0 to 3600000, not {}", self.launch.close_ms)));
        }
        if let Some(address) = &self.launch.metrics {
            check_address(address).map_err(|e| wrong(format!("launch.metrics: {e}")))?;
        }
        self.validate_shards()?;
        self.validate_nodes()
    }

    fn validate_shards(&self) -> Result<(), ConfigError> {
        if self.shards.is_empty() || self.shards.len() > SHARDS_MAX {
            return Err(wrong(format!("a cluster has 1 to {SHARDS_MAX} shards: add [[shard]] tables")));
        }
        let mut ids = BTreeSet::new();
        for shard in &self.shards {
            if !ids.insert(shard.id) {
                return Err(wrong(format!("shard {} is listed twice", shard.id)));
            }
            if shard.standby && self.shards.iter().all(|s| s.standby) {
                return Err(wrong("every shard stands by: at least one must take appends from the start"));
            }
            if shard.quota == 0 || shard.quota > QUOTA_MAX {
                return Err(wrong(format!("shard {}: quota must be 1 to {QUOTA_MAX}, not {}", shard.id, shard.quota)));
            }
            if shard.report_delay_us > REPORT_DELAY_US_MAX {
                let (id, delay_us) = (shard.id, shard.report_delay_us);
                return Err(wrong(format!(
                    "shard {id}: report_delay_us must be 0 to {REPORT_DELAY_US_MAX}, not {delay_us}"
                )));
            }
            let primaries = self.nodes_of(shard.id, Role::Primary).count();
            if primaries != 1 {
                return Err(wrong(format!("shard {} has {primaries} primaries, it needs exactly one", shard.id)));
            }
            if self.nodes_of(shard.id, Role::Backup).count() > 2 {
                return Err(wrong(format!("shard {} has more than two backups", shard.id)));
            }
            let replicas = self.nodes.iter().filter(|n| n.shard == Some(shard.id)).count();
            if replicas > REPLICAS_MAX {
                return Err(wrong(format!("shard {} has {replicas} nodes, it may have {REPLICAS_MAX}", shard.id)));
            }
        }
        Ok(())
    }

    fn validate_nodes(&self) -> Result<(), ConfigError> {
        let sequencers = self.nodes.iter().filter(|n| n.role == Role::Sequencer).count();
        if ![1, 3, 5].contains(&sequencers) {
            return Err(wrong(format!(
                "a cluster has 1, 3 or 5 sequencer nodes, not {sequencers}: it goes on while most of them run"
            )));
        }
        let mut ids = BTreeSet::new();
        for node in &self.nodes {
            let id = node.id;
            if !ids.insert(id) {
                return Err(wrong(format!("node {id} is listed twice")));
            }
            match (node.role, node.shard) {
                (Role::Sequencer, Some(_)) => return Err(wrong(format!("node {id}: a sequencer has no shard"))),
                (Role::Primary | Role::Backup | Role::Spare, None) => {
                    return Err(wrong(format!("node {id}: a {} needs the key 'shard'", node.role)));
                }
                (_, Some(shard)) if !self.shards.iter().any(|s| s.id == shard) => {
                    return Err(wrong(format!("node {id}: there is no [[shard]] with id {shard}")));
                }
                _ => {}
            }
            if node.role != Role::Primary && node.listen.is_none() {
                return Err(wrong(format!("node {id}: a {} needs the key 'listen' (host:port)", node.role)));
            }
            match (node.role, &node.clients) {
                (Role::Primary | Role::Backup | Role::Spare, None) => {
                    let why = "where it serves clients when it leads its shard";
                    let role = node.role;
                    return Err(wrong(format!("node {id}: a {role} needs the key 'clients' (host:port): {why}")));
                }
                (Role::Sequencer, Some(_)) => {
                    return Err(wrong(format!("node {id}: a sequencer serves no clients: remove the key 'clients'")));
                }
                _ => {}
            }
            if self.cluster.durability == Durability::Flushed && self.data_dir(node).is_none() {
                return Err(wrong(format!(
                    "cluster.durability = \"flushed\" needs a disk, and node {id} has no data_dir: set launch.data_dir"
                )));
            }
            for (key, address) in [("listen", &node.listen), ("clients", &node.clients)] {
                if let Some(address) = address {
                    check_address(address).map_err(|e| wrong(format!("node {id}: {key}: {e}")))?;
                }
            }
        }
        Ok(())
    }

    /// The nodes of a shard with a role.
    pub fn nodes_of(&self, shard: u16, role: Role) -> impl Iterator<Item = &NodeEntry> {
        self.nodes.iter().filter(move |n| n.shard == Some(shard) && n.role == role)
    }

    /// The sequencer nodes, in id order: a member of the group is known by its place.
    pub fn sequencers(&self) -> Vec<&NodeEntry> {
        let mut nodes: Vec<&NodeEntry> = self.nodes.iter().filter(|n| n.role == Role::Sequencer).collect();
        nodes.sort_unstable_by_key(|n| n.id);
        nodes
    }

    /// A shard's nodes in the order of their numbers in it: its primary, its backups, its spares, each in the file's order.
    pub fn replicas_of(&self, shard: u16) -> impl Iterator<Item = &NodeEntry> {
        let with = move |role| self.nodes_of(shard, role);
        with(Role::Primary).chain(with(Role::Backup)).chain(with(Role::Spare))
    }

    /// The folder in which a node keeps what it keeps, if it keeps anything.
    pub fn data_dir(&self, node: &NodeEntry) -> Option<PathBuf> {
        let folder = node.data_dir.as_ref().or(self.launch.data_dir.as_ref())?;
        Some(Path::new(folder).join(format!("node-{}", node.id)))
    }

    /// The node with this number.
    pub fn node(&self, id: u16) -> Option<&NodeEntry> {
        self.nodes.iter().find(|n| n.id == id)
    }
}

impl ClusterConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        let within = |key: &str, value: u64, low: u64, high: u64| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(wrong(format!("cluster.{key} must be {low} to {high}, not {value}")))
            }
        };
        if self.name.is_empty() || self.name.len() > crate::handshake::CLUSTER_BYTES_MAX {
            return Err(wrong(format!("cluster.name must have 1 to {} bytes", crate::handshake::CLUSTER_BYTES_MAX)));
        }
        if self.name.chars().any(char::is_control) {
            return Err(wrong("cluster.name must have no control characters: it is told to peers and to operators"));
        }
        within("tick_us", self.tick_us, 10, 10_000_000)?;
        within("window_cuts", self.window_cuts.into(), 2, WINDOW_CUTS_MAX.into())?;
        within("suspect_ms", self.suspect_ms, 4, 3_600_000)?;
        within("lost_grace_ms", self.lost_grace_ms, 0, self.suspect_ms)?;
        within("record_bytes_max", self.record_bytes_max.into(), 1, RECORD_BYTES_LIMIT as u64)?;
        within("outstanding_max", self.outstanding_max.into(), 1, 1 << 20)?;
        within("pending_max", self.pending_max as u64, 1, 1 << 20)?;
        within("sessions_max", self.sessions_max as u64, 1, 1 << 20)?;
        within("keep_s", self.keep_s, 0, 100_000_000_000)?;
        within("clients_max", self.clients_max.into(), 1, 16_384)?;
        within("free_cuts_max", self.free_cuts_max as u64, 16, 1 << 24)?;
        if !region_bytes_valid(self.region_bytes) {
            return Err(wrong(format!(
                "cluster.region_bytes must be a multiple of {} and at least {}, not {}",
                crate::log::BLOCK_BYTES,
                crate::log::REGION_BYTES_MIN,
                self.region_bytes
            )));
        }
        if self.record_bytes_max as usize > self.region_bytes / 8 {
            return Err(wrong("cluster.record_bytes_max must be at most an eighth of cluster.region_bytes"));
        }
        let ring = self.client_ring_bytes;
        if !ring.is_power_of_two() || !(CAPACITY_BYTES_MIN..=CAPACITY_BYTES_MAX).contains(&ring) {
            return Err(wrong(format!(
                "cluster.client_ring_bytes must be a power of two from {CAPACITY_BYTES_MIN} to {CAPACITY_BYTES_MAX}"
            )));
        }
        let needed = reply_bytes_max(self.record_bytes_max as usize);
        if message_bytes_max(ring) < needed {
            return Err(wrong(format!(
                "cluster.client_ring_bytes must be at least {} for records of {} bytes",
                (4 * (needed + 64)).next_power_of_two(),
                self.record_bytes_max
            )));
        }
        Ok(())
    }
}

/// Checks that an address has a host and a port; names are resolved only when they are used.
fn check_address(address: &str) -> Result<(), String> {
    let Some((host, port)) = address.rsplit_once(':') else {
        return Err(format!("'{address}' is no address: expected host:port"));
    };
    if host.is_empty() || port.parse::<u16>().is_err() {
        return Err(format!("'{address}' is no address: expected host:port"));
    }
    if host.contains(':') && !(host.starts_with('[') && host.ends_with(']')) {
        return Err(format!("'{address}': write an IPv6 address in brackets, like [::1]:{port}"));
    }
    Ok(())
}

/// Resolves a `host:port` address.
///
/// # Errors
/// One line that names the address.
pub fn resolve(address: &str) -> Result<std::net::SocketAddr, String> {
    let mut found = address.to_socket_addrs().map_err(|e| format!("cannot resolve '{address}': {e}"))?;
    found.next().ok_or_else(|| format!("'{address}' resolves to nothing"))
}

/// Sets `section.key=value` in a table.
fn set(table: &mut toml::Table, item: &str) -> Result<(), ConfigError> {
    let malformed = || wrong(format!("override '{item}': expected section.key=value, like cluster.tick_us=500"));
    let (path, value) = item.split_once('=').ok_or_else(malformed)?;
    let (section, key) = path.trim().split_once('.').ok_or_else(malformed)?;
    if !["cluster", "policy", "launch"].contains(&section) {
        return Err(wrong(format!(
            "override '{item}': only keys of [cluster], [policy] and [launch] can be overridden"
        )));
    }
    // A value that is no TOML value by itself is a string without its quotes.
    let parsed = toml::from_str::<toml::Table>(&format!("v = {value}")).ok().and_then(|mut t| t.remove("v"));
    let value = parsed.unwrap_or_else(|| toml::Value::String(value.trim().into()));
    let section = table.entry(section).or_insert_with(|| toml::Value::Table(toml::Table::new()));
    let section = section.as_table_mut().ok_or_else(malformed)?;
    section.insert(key.trim().into(), value);
    Ok(())
}

/// A TOML error without its picture of the line, which takes several lines.
fn one_line(error: &str) -> String {
    let place = error.lines().next().unwrap_or_default().trim_start_matches("TOML parse error at ");
    let last = error.lines().rfind(|l| !l.trim().is_empty() && !l.contains('|')).unwrap_or_default();
    if place == last { place.to_owned() } else { format!("{place}: {}", last.trim()) }
}

#[cfg(test)]
mod tests;
