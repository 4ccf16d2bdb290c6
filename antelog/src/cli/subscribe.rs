//! `subscribe`: the log as text, as raw bytes, or as the events of speculation.

use std::collections::VecDeque;

use antelog::{Event, OnUnavailable, Position, Record, Scope, ShardId, SubscribeOptions};
use clap::Args;

use super::output::{Output, SAY_AFTER, Waits, shown};
use super::{ClusterArgs, Outcome};

/// Bytes of a record shown in text.
const SHOWN_BYTES_MAX: usize = 200;

#[derive(Args)]
pub struct SubscribeArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// First position wanted
    #[arg(long, value_name = "P", default_value_t = 0)]
    from: u64,
    /// Only this shard's records
    #[arg(long, value_name = "S")]
    shard: Option<u16>,
    /// End after this many records
    #[arg(long, value_name = "N", conflicts_with = "to_tail")]
    count: Option<u64>,
    /// End at what is the tail now
    #[arg(long)]
    to_tail: bool,
    /// Write only the bytes of confirmed records, one after another
    #[arg(long, conflicts_with_all = ["events", "json"])]
    raw: bool,
    /// Like --raw, with a newline after each record
    #[arg(long, conflicts_with_all = ["events", "json", "raw"])]
    lines: bool,
    /// Show deliver, confirm and fail as they happen, speculative records included
    #[arg(long)]
    events: bool,
    /// One JSON object per line
    #[arg(long)]
    json: bool,
    /// At records that nobody has, because their shard is lost or has returned without them
    #[arg(long, value_name = "stop|skip", value_parser = on_unavailable, default_value = "stop")]
    on_unavailable: OnUnavailable,
}

fn on_unavailable(text: &str) -> Result<OnUnavailable, String> {
    match text {
        "stop" => Ok(OnUnavailable::Stop),
        "skip" => Ok(OnUnavailable::Skip),
        _ => Err("use stop or skip".into()),
    }
}

/// A record that is delivered and not confirmed yet.
struct Waiting {
    position: Position,
    shard: ShardId,
    record: Record,
}

/// Runs `subscribe`.
pub fn run(args: &SubscribeArgs) -> Outcome {
    let client = args.cluster.connect()?;
    let from = Position(args.from);
    let end = if args.to_tail { Some(client.tail()?) } else { None };
    if end.is_some_and(|end| end <= from) || args.count == Some(0) {
        return Ok(());
    }
    let scope = args.shard.map_or(Scope::All, |s| Scope::Shard(ShardId(s)));
    let options = SubscribeOptions { on_unavailable: args.on_unavailable };
    let mut subscription = client.subscribe_with(scope, from, options)?;
    let mut output = Output::new();
    let mut waiting: VecDeque<Waiting> = VecDeque::new();
    let mut written = 0;
    let mut waits = Waits::default();
    loop {
        let event = match subscription.try_next()? {
            Some(event) => event,
            None => {
                // Nothing more at once: let the reader have what there is.
                output.flush()?;
                loop {
                    if let Some(event) = subscription.next_timeout(SAY_AFTER)? {
                        break event;
                    }
                    if let Some(problem) = client.problem() {
                        waits.say(problem);
                    }
                }
            }
        };
        if args.events {
            show_event(&mut output, &event, args.json)?;
        }
        match event {
            Event::Deliver { position, shard, record, .. } => {
                waiting.push_back(Waiting { position, shard, record });
            }
            Event::Fail { from } => waiting.retain(|w| w.position < from),
            // Shown among the events; otherwise standard output holds records only.
            Event::Unavailable { .. } if args.events => {}
            Event::Unavailable { from, to } => eprintln!("antelog: positions {from} to {to} are unavailable: skipped"),
            Event::Confirm { upto } => {
                while waiting.front().is_some_and(|w| w.position < upto) {
                    let Some(next) = waiting.pop_front() else { break };
                    if end.is_none_or(|end| next.position < end) {
                        if !args.events {
                            show_record(&mut output, &next, args)?;
                        }
                        written += 1;
                    }
                    if args.count == Some(written) {
                        return output.flush();
                    }
                }
                if end.is_some_and(|end| upto >= end) {
                    return output.flush();
                }
            }
        }
    }
}

fn show_record(output: &mut Output, waiting: &Waiting, args: &SubscribeArgs) -> Outcome {
    let Waiting { position, shard, record } = waiting;
    if args.raw {
        return output.bytes(record);
    }
    if args.lines {
        output.bytes(record)?;
        return output.bytes(b"\n");
    }
    if args.json {
        let text = std::str::from_utf8(record).ok();
        let value = serde_json::json!({
            "position": position.0, "shard": shard.0, "bytes": record.len(), "text": text,
        });
        return output.line(&value.to_string());
    }
    output.line(&format!("{position}\t{shard}\t{}", shown(record, SHOWN_BYTES_MAX)))
}

fn show_event(output: &mut Output, event: &Event<Record>, json: bool) -> Outcome {
    let line = match event {
        Event::Deliver { position, shard, record, speculative, view } => {
            if json {
                let text = std::str::from_utf8(record).ok();
                serde_json::json!({
                    "event": "deliver", "position": position.0, "shard": shard.0, "speculative": speculative,
                    "view": view, "bytes": record.len(), "text": text,
                })
                .to_string()
            } else {
                let how = if *speculative { "speculative" } else { "bound" };
                format!("deliver {position}\tshard {shard}\t{how}\t{}", shown(record, SHOWN_BYTES_MAX))
            }
        }
        Event::Confirm { upto } if json => serde_json::json!({ "event": "confirm", "upto": upto.0 }).to_string(),
        Event::Confirm { upto } => format!("confirm up to {upto}"),
        Event::Fail { from } if json => serde_json::json!({ "event": "fail", "from": from.0 }).to_string(),
        Event::Fail { from } => format!("fail from {from}"),
        Event::Unavailable { from, to } if json => {
            serde_json::json!({ "event": "unavailable", "from": from.0, "to": to.0 }).to_string()
        }
        Event::Unavailable { from, to } => format!("unavailable {from} to {to}"),
    };
    output.line(&line)
}
