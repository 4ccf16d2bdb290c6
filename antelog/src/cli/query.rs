//! `read`, `tail` and `outcome`.

use std::time::Duration;

use antelog::{ClientId, Position, ShardId, Slot};
use clap::Args;

use super::output::{self, Output};
use super::{ClusterArgs, Outcome, Stop};

#[derive(Args)]
pub struct ReadArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The position
    position: u64,
    /// Wait this many seconds for the position to be bound
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    wait: f64,
    /// Write only the record's bytes, without a newline
    #[arg(long, conflicts_with = "json")]
    raw: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct TailArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct OutcomeArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// The shard that the record was appended to
    #[arg(long, value_name = "S")]
    shard: u16,
    /// The session that appended it, as the error said
    #[arg(long, value_name = "ID", value_parser = session)]
    session: ClientId,
    /// The session's number for it, as the error said
    number: u64,
    /// Wait this many seconds for the shard to return
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    wait: f64,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

fn session(text: &str) -> Result<ClientId, String> {
    u128::from_str_radix(text, 16).map(ClientId).map_err(|_| "a session is named by 32 hexadecimal digits".into())
}

fn seconds(wait: f64) -> Result<Duration, Stop> {
    Duration::try_from_secs_f64(wait).map_err(|_| Stop::Failed(format!("--wait {wait}: expected seconds, like 2.5")))
}

/// Runs `outcome`.
pub fn outcome(args: &OutcomeArgs) -> Outcome {
    let wait = seconds(args.wait)?;
    let client = args.cluster.connect()?;
    let (position, text) = match client.outcome(ShardId(args.shard), args.session, args.number, wait)? {
        antelog::Outcome::Bound(position) => (Some(position), format!("bound at position {position}")),
        antelog::Outcome::NotInLog => (None, "not in the log".into()),
        _ => {
            return Err(Stop::Failed(format!(
                "shard {} cannot say any more what became of it: what it knew of the session was trimmed or lost",
                args.shard
            )));
        }
    };
    let value = || serde_json::json!({ "bound": position.is_some(), "position": position.map(|p| p.0) }).to_string();
    output::print(&if args.json { value() } else { text })
}

/// Runs `read`.
pub fn read(args: &ReadArgs) -> Outcome {
    let wait = seconds(args.wait)?;
    let position = args.position;
    let slot = args.cluster.connect()?.read(Position(position), wait)?;
    let mut output = Output::new();
    match slot {
        Slot::Record(record) if args.raw => output.bytes(&record)?,
        Slot::Record(record) if args.json => {
            let text = std::str::from_utf8(&record).ok();
            let value = serde_json::json!({
                "position": position, "kind": "record", "bytes": record.len(), "text": text, "hex": hex(&record),
            });
            output.line(&value.to_string())?;
        }
        Slot::Record(record) => output.line(&output::shown(&record, usize::MAX))?,
        Slot::NoOp if args.raw => {}
        Slot::NoOp if args.json => {
            output.line(&serde_json::json!({ "position": position, "kind": "no-op" }).to_string())?;
        }
        Slot::NoOp => output.line("(no-op: this position holds no record)")?,
        Slot::Unavailable => {
            return Err(Stop::Failed(format!(
                "position {position} is bound and unavailable: its shard is lost at present, or has returned without it"
            )));
        }
        Slot::Trimmed(head) => {
            return Err(Stop::Failed(format!("position {position} is no longer kept: the log begins at {head}")));
        }
    }
    output.flush()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Runs `tail`.
pub fn tail(args: &TailArgs) -> Outcome {
    let tail = args.cluster.connect()?.tail()?;
    let text = if args.json { serde_json::json!({ "tail": tail.0 }).to_string() } else { tail.to_string() };
    output::print(&text)
}
