//! `shard` and `ordering`: who takes part in a running log, and how it is ordered.

use std::time::Duration;

use antelog::{Change, Membership, Ordering, Position, ShardGates, ShardId, WindowMode};
use clap::{Args, Subcommand};

use super::output::{self, Output};
use super::{ClusterArgs, Outcome, Stop};

#[derive(Subcommand)]
pub enum ShardCommand {
    /// Let a shard that stands by, or has left, take appends
    Add(ShardArgs),
    /// Let a shard take no more appends: what it holds is ordered, stays readable, and then it has no more slots
    Remove(ShardArgs),
    /// Print every shard's part in the log
    List(ListArgs),
}

#[derive(Args)]
pub struct ShardArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The shard, one of the cluster's configuration
    id: u16,
    #[command(flatten)]
    wait: WaitArgs,
}

#[derive(Args)]
pub struct ListArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct OrderingArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// fixed, free-tick, free-event or auto
    #[arg(value_parser = parse_ordering)]
    ordering: Ordering,
    #[command(flatten)]
    wait: WaitArgs,
}

#[derive(Args)]
pub struct TrimArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The first position to keep
    position: u64,
    #[command(flatten)]
    wait: WaitArgs,
}

#[derive(Args)]
struct WaitArgs {
    /// Wait this many seconds until the order stream shows it done
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    wait: f64,
}

fn parse_ordering(name: &str) -> Result<Ordering, String> {
    Ordering::from_name(name).ok_or_else(|| "expected fixed, free-tick, free-event or auto".into())
}

/// Runs `shard`.
pub fn shard(command: &ShardCommand) -> Outcome {
    match command {
        ShardCommand::Add(args) => {
            let shown = change(&args.cluster, Change::Join(ShardId(args.id)), &args.wait)?;
            output::print(&format!("shard {} takes appends, {}", args.id, since(&shown)))
        }
        ShardCommand::Remove(args) => {
            let shown = change(&args.cluster, Change::Leave(ShardId(args.id)), &args.wait)?;
            output::print(&format!("shard {} takes no appends and has no slots, {}", args.id, since(&shown)))
        }
        ShardCommand::List(args) => list(args),
    }
}

/// Runs `trim`.
pub fn trim(args: &TrimArgs) -> Outcome {
    change(&args.cluster, Change::Trim(Position(args.position)), &args.wait)?;
    output::print(&format!("the log begins at position {}", args.position))
}

/// Runs `ordering`.
pub fn ordering(args: &OrderingArgs) -> Outcome {
    let shown = change(&args.cluster, Change::Ordering(args.ordering), &args.wait)?;
    output::print(&format!("ordering is {}, {} windows {}", args.ordering.name(), mode(shown.mode), since(&shown)))
}

fn change(cluster: &ClusterArgs, change: Change, args: &WaitArgs) -> Result<Membership, Stop> {
    let wait = Duration::try_from_secs_f64(args.wait)
        .map_err(|_| Stop::Failed(format!("--wait {}: expected seconds, like 2.5", args.wait)))?;
    Ok(cluster.connect()?.change(change, wait)?)
}

fn since(shown: &Membership) -> String {
    format!("from window {} on, which begins at position {}", shown.window, shown.position)
}

fn mode(mode: WindowMode) -> &'static str {
    match mode {
        WindowMode::Fixed => "fixed",
        WindowMode::Free => "free",
    }
}

/// A shard's part in one word.
fn state(membership: &Membership, shard: ShardId) -> &'static str {
    match membership.member(shard) {
        None => "standby",
        Some(member) if member.open => "open",
        // It takes no appends, and slots are granted for what it still holds.
        Some(member) if member.quota > 0 => "closing",
        Some(_) => "closed",
    }
}

fn list(args: &ListArgs) -> Outcome {
    let client = args.cluster.connect()?;
    let membership = client.membership()?;
    let fixed = membership.mode == WindowMode::Fixed;
    // In free windows a shard gets what it has, whatever that is.
    let quota = |shard| membership.member(shard).filter(|_| fixed).map(|m| m.quota);
    let shards = &client.map().shards;
    if args.json {
        let shard = |s: &ShardGates| {
            let address = s.gates.first().map(|(_, address)| address);
            serde_json::json!({
                "shard": s.shard.0, "state": state(&membership, s.shard), "quota": quota(s.shard), "address": address,
            })
        };
        let value = serde_json::json!({
            "window": membership.window, "position": membership.position.0, "mode": mode(membership.mode),
            "shards": shards.iter().map(shard).collect::<Vec<_>>(),
        });
        return output::print(&value.to_string());
    }
    let mut output = Output::new();
    output.line(&format!("{} windows, as follows {}", mode(membership.mode), since(&membership)))?;
    output.line("shard  state    quota    served at")?;
    for ShardGates { shard, gates } in shards {
        let quota = quota(*shard).map_or_else(|| "-".into(), |q| q.to_string());
        let addresses: Vec<&str> = gates.iter().map(|(_, address)| address.as_str()).collect();
        let state = state(&membership, *shard);
        output.line(&format!("{:<5}  {state:<7}  {quota:<7}  {}", shard.0, addresses.join(" ")))?;
    }
    output.flush()
}
