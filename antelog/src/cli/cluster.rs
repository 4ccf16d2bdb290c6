//! `cluster status`: how every node, every shard and the sequencers are, asked of each of them.

mod report;

use std::collections::BTreeMap;
use std::time::Duration;

use antelog::status::{Status, ask};
use antelog::{Client, Membership, Position};
use clap::{Args, Subcommand};

use self::report::Report;
use super::output::Output;
use super::{ClusterArgs, Outcome, Stop};

#[derive(Subcommand)]
pub enum ClusterCommand {
    /// Print how every node, shard and sequencer is; exit code 1 when a shard or the sequencers make no progress
    ///
    /// Asks any one node that answers whom there is, and then each of them; needs the role `read`, and for what sequencers
    /// say of themselves the cluster's own secret.
    Status(StatusArgs),
}

#[derive(Args)]
pub struct StatusArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Wait this many seconds for each answer
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    wait: f64,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// What was heard of the cluster.
struct Heard {
    /// Whoever answered first: whom there is.
    first: Status,
    /// What each node said, or why it said nothing.
    nodes: BTreeMap<u16, Result<Status, String>>,
    /// The log's end, of the sequencers by way of any gate.
    tail: Result<Position, String>,
    /// Who takes part in the log, by the newest grant.
    membership: Option<Membership>,
}

/// Runs `cluster`.
pub fn run(command: &ClusterCommand) -> Outcome {
    let ClusterCommand::Status(args) = command;
    let wait = Duration::try_from_secs_f64(args.wait)
        .map_err(|_| Stop::Failed(format!("--wait {}: expected seconds, like 2.5", args.wait)))?;
    let report = Report::of(&hear(&args.cluster, wait)?);
    let mut output = Output::new();
    if args.json {
        output.line(&report.json().to_string())?;
    } else {
        report.text().lines().try_for_each(|line| output.line(line))?;
    }
    output.flush()?;
    if report.problems.is_empty() { Ok(()) } else { Err(Stop::Told) }
}

/// Asks all of these addresses at once.
fn ask_all(cluster: &ClusterArgs, addresses: &[String], wait: Duration) -> Result<Vec<Result<Status, String>>, String> {
    let secret = cluster.secret()?;
    let name = cluster.cluster_name.as_deref().unwrap_or_default();
    Ok(std::thread::scope(|scope| {
        let secret = secret.as_ref();
        let asked = addresses.iter().map(|address| scope.spawn(move || ask(address, name, secret, wait)));
        let asked: Vec<_> = asked.collect();
        asked.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("asking it failed".into()))).collect()
    }))
}

fn hear(cluster: &ClusterArgs, wait: Duration) -> Result<Heard, Stop> {
    let mut attempts = Vec::new();
    let mut first = None;
    for answer in ask_all(cluster, &cluster.cluster, wait)? {
        match answer {
            Ok(status) => first = first.or(Some(status)),
            Err(why) => attempts.push(why),
        }
    }
    let Some(first) = first else { return Err(Stop::Failed(format!("no node answers: {}", attempts.join("; ")))) };
    // One process may run several nodes, and answers for all of them.
    let mut addresses: Vec<String> = first.nodes.iter().map(|n| n.address.clone()).collect();
    addresses.sort_unstable();
    addresses.dedup();
    let log = std::thread::scope(|scope| {
        let asked = scope.spawn(|| ask_log(cluster, &first, wait));
        let answers = ask_all(cluster, &addresses, wait);
        (answers, asked.join())
    });
    let (answers, (tail, membership)) = (log.0?, log.1.unwrap_or((Err("asking failed".into()), None)));
    let by_address: BTreeMap<String, Result<Status, String>> = addresses.into_iter().zip(answers).collect();
    let mut nodes = BTreeMap::new();
    for node in &first.nodes {
        let answer = by_address.get(&node.address).cloned().unwrap_or_else(|| Err("it has no address".into()));
        let elsewhere = || by_address.values().flatten().find(|s| s.here.iter().any(|h| h.node == node.id)).cloned();
        let answer = match answer {
            Ok(status) if !status.here.iter().any(|here| here.node == node.id) => {
                elsewhere().ok_or_else(|| format!("another node answers at {}", node.address))
            }
            answer => answer,
        };
        nodes.insert(node.id, answer);
    }
    Ok(Heard { first, nodes, tail, membership })
}

/// Asks the log itself: only sequencers that can commit say where it ends.
fn ask_log(cluster: &ClusterArgs, first: &Status, wait: Duration) -> (Result<Position, String>, Option<Membership>) {
    let gates = first.nodes.iter().filter(|n| n.shard.is_some()).map(|n| n.address.clone());
    let client = cluster.options(gates.collect()).and_then(|mut options| {
        options.connect_timeout = wait;
        Client::connect(options).map_err(|e| e.to_string())
    });
    match client {
        Ok(client) => {
            let tail = client.tail().map_err(|e| e.to_string());
            let membership = tail.is_ok().then(|| client.membership().ok()).flatten();
            (tail, membership)
        }
        Err(why) => (Err(why), None),
    }
}
