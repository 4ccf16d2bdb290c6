//! The faults, and how each is brought about. A kind more is an entry of [`KINDS`] and an arm of [`inject`].

use std::time::Duration;

use antelog_core::sim::rng::Rng;
use rustix::process::Signal;

use crate::cluster::{Cluster, Status};

/// What can happen. One at a time, and the next when the cluster is whole again: so no shard without a disk ever loses all
/// of its replicas, which may lose acknowledged records by design, and no two sequencers forget at the same time, which
/// leaves no majority that remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Kind {
    KillPrimary,
    KillBackup,
    KillLeader,
    KillFollower,
    KillLeaderAndPrimary,
    StopReplica,
    StopSequencer,
    Isolate,
    Deafen,
    Mute,
    SplitPair,
    SplitPairOneWay,
    CutFromLeader,
    Terminate,
    KillWriter,
    FillReplica,
    FillSequencer,
    LoseReplica,
    LoseSequencer,
    KillShard,
    KillSequencers,
    KillAll,
    TerminateAll,
}

impl Kind {
    /// Without disks it cannot happen, or all is forgotten by design.
    pub fn needs_disks(self) -> bool {
        self >= Kind::FillReplica
    }

    /// All replicas of a shard are killed at once.
    pub fn is_sudden_end(self) -> bool {
        matches!(self, Kind::KillShard | Kind::KillAll)
    }
}

/// All of them, with their names.
pub const KINDS: &[(Kind, &str)] = &[
    (Kind::KillPrimary, "kill -9 of a primary"),
    (Kind::KillBackup, "kill -9 of a backup"),
    (Kind::KillLeader, "kill -9 of the leading sequencer"),
    (Kind::KillFollower, "kill -9 of another sequencer"),
    (Kind::KillLeaderAndPrimary, "kill -9 of leader and primary at once"),
    (Kind::StopReplica, "SIGSTOP of a replica, then SIGCONT"),
    (Kind::StopSequencer, "SIGSTOP of a sequencer, then SIGCONT"),
    (Kind::Isolate, "partition of a node from all, both ways"),
    (Kind::Deafen, "partition: a node hears nobody"),
    (Kind::Mute, "partition: nobody hears a node"),
    (Kind::SplitPair, "partition of two replicas, both ways"),
    (Kind::SplitPairOneWay, "partition of two replicas, one way"),
    (Kind::CutFromLeader, "partition of a primary and the leader, one way"),
    (Kind::Terminate, "SIGTERM and restart of a node"),
    (Kind::KillWriter, "kill -9 of a writer"),
    (Kind::FillReplica, "full disk of a replica"),
    (Kind::FillSequencer, "full disk of a sequencer"),
    (Kind::LoseReplica, "kill -9 of a replica, its disk lost"),
    (Kind::LoseSequencer, "kill -9 of a sequencer, its disk lost"),
    (Kind::KillShard, "kill -9 of all of a shard"),
    (Kind::KillSequencers, "kill -9 of all sequencers"),
    (Kind::KillAll, "kill -9 of all"),
    (Kind::TerminateAll, "SIGTERM and restart of all"),
];

/// The name of a kind.
pub fn name(kind: Kind) -> &'static str {
    KINDS.iter().find(|(k, _)| *k == kind).map_or("", |(_, name)| name)
}

/// What was done, for the operator.
pub struct Injected {
    pub what: String,
    /// How long until it is undone.
    pub lasts: Duration,
}

fn pick<T: Copy>(rng: &mut Rng, list: &[T]) -> Option<T> {
    (!list.is_empty()).then(|| list[rng.below(list.len() as u64) as usize])
}

/// Brings a fault about. `None`: there is nobody to whom it could happen. [`Cluster::mend`] ends it.
pub fn inject(cluster: &mut Cluster, status: &Status, kind: Kind, rng: &mut Rng) -> Result<Option<Injected>, String> {
    let shards = cluster.nodes.iter().filter_map(|n| n.shard).max().map_or(0, |s| s + 1);
    let shard = rng.below(shards as u64) as usize;
    let (primary, backup) = (status.primary(shard), pick(rng, &status.backups(shard)));
    let leader = status.leader();
    let sequencers: Vec<u16> = cluster.nodes.iter().filter(|n| n.shard.is_none()).map(|n| n.id).collect();
    let others: Vec<u16> = sequencers.iter().copied().filter(|id| Some(*id) != leader).collect();
    let all: Vec<u16> = cluster.nodes.iter().map(|n| n.id).collect();
    let replicas: Vec<u16> = cluster.nodes.iter().filter(|n| n.shard == Some(shard)).map(|n| n.id).collect();
    let members: Vec<u16> = primary.into_iter().chain(backup).collect();
    let long = match kind {
        // As long as it takes to use up what was reserved.
        Kind::FillReplica | Kind::FillSequencer => Duration::from_millis(rng.range(3000, 7000)),
        _ => Duration::from_millis(rng.scale(100, 4000)),
    };
    let targets: Vec<u16> = match kind {
        Kind::KillPrimary => primary.into_iter().collect(),
        Kind::KillBackup => backup.into_iter().collect(),
        Kind::KillLeader => leader.into_iter().collect(),
        Kind::KillFollower => pick(rng, &others).into_iter().collect(),
        Kind::KillLeaderAndPrimary => leader.into_iter().chain(primary).collect(),
        Kind::StopReplica => pick(rng, &replicas).into_iter().collect(),
        Kind::FillReplica | Kind::LoseReplica => pick(rng, &members).into_iter().collect(),
        Kind::StopSequencer | Kind::FillSequencer | Kind::LoseSequencer => pick(rng, &sequencers).into_iter().collect(),
        Kind::Isolate | Kind::Deafen | Kind::Mute | Kind::Terminate => pick(rng, &all).into_iter().collect(),
        Kind::SplitPair | Kind::SplitPairOneWay => primary.into_iter().chain(backup).collect(),
        Kind::CutFromLeader => primary.into_iter().chain(leader).collect(),
        Kind::KillShard => replicas,
        Kind::KillSequencers => sequencers,
        Kind::KillAll | Kind::TerminateAll => all,
        Kind::KillWriter => return Ok(None),
    };
    let needed = match kind {
        Kind::KillLeaderAndPrimary | Kind::SplitPair | Kind::SplitPairOneWay | Kind::CutFromLeader => 2,
        _ => 1,
    };
    if targets.len() < needed {
        return Ok(None);
    }
    bring_about(cluster, kind, &targets, rng)?;
    let what = targets.iter().map(|id| id.to_string()).collect::<Vec<_>>().join(", ");
    let what = if targets.len() == 1 { format!("node {what}") } else { format!("nodes {what}") };
    Ok(Some(Injected { what, lasts: long }))
}

fn bring_about(cluster: &mut Cluster, kind: Kind, targets: &[u16], rng: &mut Rng) -> Result<(), String> {
    let places: Vec<usize> = targets.iter().map(|id| cluster.place(*id)).collect();
    let everywhere = 0..cluster.client_place(crate::run::CLIENTS_MAX);
    match kind {
        Kind::StopReplica | Kind::StopSequencer => cluster.signal(places[0], Signal::STOP),
        Kind::Isolate | Kind::Deafen | Kind::Mute => {
            for other in everywhere {
                if kind != Kind::Mute {
                    cluster.network.block(other, places[0])?;
                }
                if kind != Kind::Deafen {
                    cluster.network.block(places[0], other)?;
                }
            }
        }
        Kind::SplitPair => {
            cluster.network.block(places[0], places[1])?;
            cluster.network.block(places[1], places[0])?;
        }
        Kind::SplitPairOneWay | Kind::CutFromLeader => {
            let (from, at) = if rng.below(2) == 0 { (0, 1) } else { (1, 0) };
            cluster.network.block(places[from], places[at])?;
        }
        Kind::Terminate => cluster.terminate(places[0])?,
        Kind::TerminateAll => cluster.terminate_all()?,
        Kind::FillReplica | Kind::FillSequencer => {
            cluster.disks.as_mut().map_or(Ok(()), |disks| disks.fill(places[0]))?;
        }
        Kind::LoseReplica | Kind::LoseSequencer => {
            cluster.kill_all(&places);
            cluster.disks.as_ref().map_or(Ok(()), |disks| disks.lose(places[0]))?;
        }
        _ => cluster.kill_all(&places),
    }
    Ok(())
}
