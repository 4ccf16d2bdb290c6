//! `read` and `tail`.

use std::time::Duration;

use antelog::{Position, Slot};
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

/// Runs `read`.
pub fn read(args: &ReadArgs) -> Outcome {
    let wait = Duration::try_from_secs_f64(args.wait)
        .map_err(|_| Stop::Failed(format!("--wait {}: expected seconds, like 2.5", args.wait)))?;
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
