//! What was heard of a cluster, put together: who leads what, how far it is, and what cannot go on.

use std::fmt::Write;

use antelog::status::{Here, Node};
use antelog::{ShardId, WindowMode};
use serde_json::{Value, json};

use super::Heard;

/// A node as it says it is.
struct NodeRow {
    node: Node,
    /// What it is at present, or why it does not answer.
    part: Result<String, String>,
    epoch: Option<u64>,
    /// Slots of its shard that its primary has appended and it has not verified.
    lag_slots: Option<u64>,
    /// Entries of the order log that it has not applied and somebody has.
    order_lag: Option<u64>,
    /// None: in memory only.
    data_dir: Option<String>,
}

/// A shard as its nodes say it is.
struct ShardRow {
    shard: u16,
    state: &'static str,
    epoch: Option<u64>,
    primary: Option<u16>,
    members: usize,
    quota: Option<u32>,
    appended: Option<u64>,
    durable: Option<u64>,
    bound: Option<u64>,
    /// Why it makes no progress.
    problem: Option<String>,
}

/// The sequencers as they say they are.
struct GroupRow {
    configured: usize,
    answering: usize,
    leader: Option<u16>,
    term: Option<u64>,
    voters: Option<u64>,
    problem: Option<String>,
}

/// See the module's text.
pub struct Report {
    cluster: String,
    ordering: String,
    durability: String,
    view: Option<u64>,
    window: Option<(u64, u64, &'static str)>,
    tail: Option<u64>,
    group: GroupRow,
    shards: Vec<ShardRow>,
    nodes: Vec<NodeRow>,
    /// What makes no progress, and why: a line each.
    pub problems: Vec<String>,
}

fn here(heard: &Heard, node: u16) -> Option<&Here> {
    heard.nodes.get(&node)?.as_ref().ok()?.here.iter().find(|here| here.node == node)
}

/// All nodes that answer and have such a role.
fn answering<'a>(heard: &'a Heard, is_asked: impl Fn(&Node) -> bool + 'a) -> impl Iterator<Item = &'a Here> {
    heard.first.nodes.iter().filter(move |n| is_asked(n)).filter_map(|n| here(heard, n.id))
}

impl Report {
    /// What can be said of it all.
    pub fn of(heard: &Heard) -> Report {
        let all = || answering(heard, |_| true);
        let view = all().filter_map(|h| h.value("gate", "view")).max();
        let window = heard.membership.as_ref().map(|m| {
            let mode = if m.mode == WindowMode::Fixed { "fixed" } else { "free" };
            (m.window, m.position.0, mode)
        });
        let group = group(heard);
        let shards = shards(heard);
        let applied = |h: &Here| {
            let own = h.agents.values().filter_map(|agent| agent.get("applied_index"));
            own.copied().max()
        };
        let newest = all().filter_map(applied).max();
        let nodes = heard.first.nodes.iter().map(|node| node_row(heard, node, &shards, newest)).collect();
        let mut problems: Vec<String> = group.problem.iter().map(|why| format!("the sequencers: {why}")).collect();
        problems.extend(shards.iter().filter_map(|s| Some(format!("shard {}: {}", s.shard, s.problem.as_ref()?))));
        Report {
            cluster: heard.first.cluster.clone(),
            ordering: heard.first.ordering.clone(),
            durability: heard.first.durability.clone(),
            view,
            window,
            tail: heard.tail.as_ref().ok().map(|p| p.0),
            group,
            shards,
            nodes,
            problems,
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut t = String::new();
        let or_dash = |value: Option<u64>| value.map_or_else(|| "-".into(), |v| v.to_string());
        let _ = writeln!(
            t,
            "cluster {}: configured for {} ordering, durability {}; view {}, bound below position {}",
            self.cluster,
            self.ordering,
            self.durability,
            or_dash(self.view),
            or_dash(self.tail)
        );
        let g = &self.group;
        let leader = g.leader.map_or_else(|| "no leader known".into(), |n| format!("node {n} leads"));
        let _ = writeln!(
            t,
            "sequencers: {} of {} answer, {leader}, term {}, {} vote",
            g.answering,
            g.configured,
            or_dash(g.term),
            or_dash(g.voters)
        );
        if let Some((window, position, mode)) = self.window {
            let _ = writeln!(t, "windows: {mode}, with these quotas from window {window} on, at position {position}");
        }
        let _ = writeln!(t, "\nshard  state    epoch  primary  members  quota    appended  durable  bound (slots)");
        for s in &self.shards {
            let _ = writeln!(
                t,
                "{:<5}  {:<7}  {:<5}  {:<7}  {:<7}  {:<7}  {:<8}  {:<7}  {}",
                s.shard,
                s.state,
                or_dash(s.epoch),
                s.primary.map_or_else(|| "-".into(), |n| format!("node {n}")),
                s.members,
                or_dash(s.quota.map(u64::from)),
                or_dash(s.appended),
                or_dash(s.durable),
                or_dash(s.bound)
            );
        }
        let _ = writeln!(t, "\nnode  role       shard  epoch  lag (slots)  order lag  log on    now");
        for n in &self.nodes {
            let now = match &n.part {
                Ok(part) => part.clone(),
                Err(why) => format!("NO ANSWER: {why}"),
            };
            let log = match (&n.part, &n.data_dir) {
                (Err(_), _) => "-",
                (Ok(_), Some(_)) => "disk",
                (Ok(_), None) => "memory",
            };
            let _ = writeln!(
                t,
                "{:<4}  {:<9}  {:<5}  {:<5}  {:<11}  {:<9}  {log:<8}  {now}",
                n.node.id,
                n.node.role,
                n.node.shard.map_or_else(|| "-".into(), |s| s.to_string()),
                or_dash(n.epoch),
                or_dash(n.lag_slots),
                or_dash(n.order_lag)
            );
        }
        for problem in &self.problems {
            let _ = writeln!(t, "\nNO PROGRESS: {problem}");
        }
        t
    }

    /// For programs.
    pub fn json(&self) -> Value {
        let shard = |s: &ShardRow| {
            json!({
                "shard": s.shard, "state": s.state, "epoch": s.epoch, "primary": s.primary, "members": s.members,
                "quota": s.quota, "appended_lsn": s.appended, "durable_lsn": s.durable, "committed_lsn": s.bound,
                "problem": s.problem,
            })
        };
        let node = |n: &NodeRow| {
            json!({
                "node": n.node.id, "role": n.node.role, "shard": n.node.shard, "address": n.node.address,
                "answers": n.part.is_ok(), "part": n.part.as_ref().ok(), "why": n.part.as_ref().err(),
                "epoch": n.epoch, "lag_slots": n.lag_slots, "order_lag": n.order_lag, "data_dir": n.data_dir,
            })
        };
        json!({
            "cluster": self.cluster, "ordering": self.ordering, "durability": self.durability, "view": self.view,
            "tail": self.tail,
            "window": self.window.map(|(window, position, mode)| {
                json!({ "window": window, "position": position, "mode": mode })
            }),
            "sequencers": {
                "configured": self.group.configured, "answering": self.group.answering, "leader": self.group.leader,
                "term": self.group.term, "voters": self.group.voters, "problem": self.group.problem,
            },
            "shards": self.shards.iter().map(shard).collect::<Vec<_>>(),
            "nodes": self.nodes.iter().map(node).collect::<Vec<_>>(),
            "problems": self.problems,
        })
    }
}

fn group(heard: &Heard) -> GroupRow {
    let is_sequencer = |n: &Node| n.role == "sequencer";
    let members: Vec<&Here> = answering(heard, is_sequencer).collect();
    let value = |h: &Here, name: &str| h.value("sequencer", name);
    // One that was cut off may not know yet that it leads no more: the highest term counts.
    let leads = members.iter().filter(|h| value(h, "is_leader") == Some(1)).max_by_key(|h| value(h, "term"));
    let problem = heard.tail.as_ref().err().map(|why| format!("nothing is committed: {why}"));
    GroupRow {
        configured: heard.first.nodes.iter().filter(|n| is_sequencer(n)).count(),
        answering: members.len(),
        leader: leads.map(|h| h.node),
        term: members.iter().filter_map(|h| value(h, "term")).max(),
        voters: leads.and_then(|h| value(h, "members")),
        problem,
    }
}

fn shards(heard: &Heard) -> Vec<ShardRow> {
    let mut numbers: Vec<u16> = heard.first.nodes.iter().filter_map(|n| n.shard).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers.into_iter().map(|shard| shard_row(heard, shard)).collect()
}

fn shard_row(heard: &Heard, shard: u16) -> ShardRow {
    let replicas: Vec<&Here> = answering(heard, |n| n.shard == Some(shard)).collect();
    let agent = format!("replica-{shard}-");
    let value = |h: &Here, name: &str| h.value(&agent, name);
    let epoch = replicas.iter().filter_map(|h| value(h, "epoch")).max();
    // One that was cut off may not know yet that it leads no more.
    let primary = replicas.iter().find(|h| value(h, "is_primary") == Some(1) && value(h, "epoch") == epoch);
    let members = replicas.iter().filter(|h| value(h, "is_member") == Some(1)).count();
    let standby = heard.first.nodes.iter().any(|n| n.shard == Some(shard) && n.standby);
    let part = heard.membership.as_ref().and_then(|m| m.member(ShardId(shard)));
    let fixed = heard.membership.as_ref().is_some_and(|m| m.mode == WindowMode::Fixed);
    let state = match (primary, part) {
        (None, _) => "no lead",
        (Some(_), None) if heard.membership.is_none() => "unknown",
        (Some(_), None) => "standby",
        (Some(_), Some(part)) if part.open => "open",
        (Some(_), Some(part)) if part.quota > 0 => "closing",
        (Some(_), Some(_)) => "closed",
    };
    let problem = match primary {
        Some(_) => None,
        None if replicas.is_empty() => Some("none of its nodes answers".into()),
        None => Some("none of its nodes that answer leads it".into()),
    };
    // Nobody waits for a shard that stands by.
    let problem = problem.filter(|_| !standby || part.is_some());
    ShardRow {
        shard,
        state,
        epoch,
        primary: primary.map(|h| h.node),
        members,
        quota: part.filter(|_| fixed).map(|p| p.quota),
        appended: primary.and_then(|h| value(h, "appended_lsn")),
        durable: primary.and_then(|h| value(h, "durable_lsn")),
        bound: primary.and_then(|h| value(h, "committed_lsn")),
        problem,
    }
}

fn node_row(heard: &Heard, node: &Node, shards: &[ShardRow], newest: Option<u64>) -> NodeRow {
    let silent = |why: &str| NodeRow {
        node: node.clone(),
        part: Err(why.to_owned()),
        epoch: None,
        lag_slots: None,
        order_lag: None,
        data_dir: None,
    };
    let here = match heard.nodes.get(&node.id) {
        Some(Ok(status)) => status.here.iter().find(|h| h.node == node.id),
        Some(Err(why)) => return silent(why),
        None => None,
    };
    let Some(here) = here else { return silent("it was not asked") };
    let agent = node.shard.map_or_else(|| "sequencer".to_owned(), |shard| format!("replica-{shard}-"));
    let value = |name: &str| here.value(&agent, name);
    let shard = shards.iter().find(|s| Some(s.shard) == node.shard);
    let leads = shard.is_some_and(|s| s.primary == Some(node.id));
    let part = match node.shard {
        None if value("is_leader") == Some(1) => "leads the sequencers",
        None if value("is_voter") == Some(1) => "follows",
        None => "does not vote yet",
        Some(_) if leads => "leads its shard",
        Some(_) if value("is_primary") == Some(1) => "was deposed, and does not know it yet",
        Some(_) if value("is_member") == Some(1) => "follows as a member",
        Some(_) if node.role == "spare" => "stands by",
        Some(_) => "is no member of its shard",
    };
    let follows = !leads && value("is_member") == Some(1);
    let verified = value("verified_lsn").filter(|_| follows);
    let lag = shard.and_then(|s| s.appended).zip(verified).map(|(appended, own)| appended.saturating_sub(own));
    let applied = here.value("gate", "applied_index").or_else(|| value("applied_index"));
    NodeRow {
        node: node.clone(),
        part: Ok(part.into()),
        epoch: value("epoch"),
        lag_slots: lag,
        order_lag: newest.zip(applied).map(|(newest, own)| newest.saturating_sub(own)),
        data_dir: here.data_dir.clone(),
    }
}
