//! A client process that follows the log and writes down what it is told.

use std::path::PathBuf;
use std::time::Duration;

use antelog::{Client, ClientOptions, Event, OnUnavailable, Position, Scope, Slot, SubscribeOptions};
use clap::Args;

use crate::history::{Journal, Told, now_ns, told_line};
use crate::record::Name;

/// Positions that a last reader reads one by one.
const READS: u64 = 1000;
/// How long a read may take.
const READ_TIME: Duration = Duration::from_secs(10);

/// Arguments of a process that subscribes.
#[derive(Args)]
pub struct ReaderArgs {
    /// Addresses of gates
    #[arg(long, value_delimiter = ',')]
    gates: Vec<String>,
    /// The history's file
    #[arg(long)]
    file: PathBuf,
    /// It ends when this file is there and it has been confirmed everything up to the position in it
    #[arg(long)]
    until: PathBuf,
    /// It comes last: asks for the log's end, reads up to there, and reads some positions one by one
    #[arg(long)]
    last: bool,
}

/// Runs a reader. The last one writes the log's end into the file of `until`, for the others.
pub fn run(args: &ReaderArgs) -> Result<(), String> {
    let mut journal = Journal::create(&args.file)?;
    let mut options = ClientOptions::new(args.gates.iter().cloned());
    options.connect_timeout = Duration::from_secs(30);
    let client = Client::connect(options).map_err(|e| e.to_string())?;
    let mut end = None;
    if args.last {
        let tail = client.tail().map_err(|e| e.to_string())?.0;
        // Renamed, so that nobody reads half of it.
        let beside = args.until.with_extension("partial");
        let written = std::fs::write(&beside, tail.to_string()).and_then(|()| std::fs::rename(&beside, &args.until));
        written.map_err(|e| format!("cannot write {}: {e}", args.until.display()))?;
        end = Some(tail);
    }
    let skip = SubscribeOptions { on_unavailable: OnUnavailable::Skip };
    let mut subscription = client.subscribe_with(Scope::All, Position(0), skip).map_err(|e| e.to_string())?;
    let (mut confirmed, mut records) = (0, Vec::new());
    while end.is_none_or(|end| confirmed < end) {
        let event = subscription.next_timeout(Duration::from_millis(20)).map_err(|e| e.to_string())?;
        let told = match event {
            None => {
                journal.flush()?;
                if end.is_none() {
                    end = std::fs::read_to_string(&args.until).ok().and_then(|text| text.parse().ok());
                }
                continue;
            }
            Some(Event::Deliver { position, record, .. }) => {
                if args.last {
                    records.push(position.0);
                }
                Told::Deliver { position: position.0, record: Name::of(&record) }
            }
            Some(Event::Confirm { upto }) => {
                confirmed = upto.0;
                Told::Confirm { upto: upto.0 }
            }
            Some(Event::Fail { from }) => Told::Fail { from: from.0 },
            Some(Event::Unavailable { from, to }) => Told::Unavailable { from: from.0, to: to.0 },
        };
        told_line(&mut journal, now_ns(), &told);
        if matches!(told, Told::Confirm { .. }) {
            journal.flush()?;
        }
    }
    if args.last {
        read(&client, &mut journal, confirmed, &records)?;
    }
    journal.flush()
}

/// Reads positions all over the log: of records, and of those where there is none.
fn read(client: &Client, journal: &mut Journal, end: u64, records: &[u64]) -> Result<(), String> {
    let spread = |count: u64| (0..READS.min(count)).map(move |n| n * count / READS.min(count).max(1));
    let some = spread(records.len() as u64).map(|at| records[at as usize]);
    for position in some.chain(spread(end)) {
        let record = match client.read(Position(position), READ_TIME).map_err(|e| e.to_string())? {
            Slot::Record(record) => {
                let name = Name::of(&record);
                Some(name.ok_or_else(|| format!("position {position} holds bytes that nobody appended"))?)
            }
            Slot::NoOp | Slot::Unavailable => None,
            Slot::Trimmed(head) => return Err(format!("position {position} is trimmed: the log begins at {head}")),
        };
        told_line(journal, now_ns(), &Told::Read { position, record });
    }
    Ok(())
}
