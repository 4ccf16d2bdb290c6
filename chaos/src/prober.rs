//! A client process that reads positions all over the log, one after the other, and writes down what they hold.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use antelog::{Client, ClientOptions, Position, Slot};
use antelog_core::sim::rng::Rng;
use clap::Args;

use crate::history::{Got, Journal, Read, now_ns, read_line};
use crate::record::Name;

/// Between two reads.
const EVERY: Duration = Duration::from_millis(5);
/// How long a read may take.
const READ_TIME: Duration = Duration::from_secs(1);
/// How often it is asked how long the log is.
const TAIL_EVERY: Duration = Duration::from_millis(200);
/// Half of the reads are of so many of the newest positions.
const NEWEST: u64 = 500;

/// Arguments of a process that reads.
#[derive(Args)]
pub struct ProberArgs {
    /// Addresses of gates
    #[arg(long, value_delimiter = ',')]
    gates: Vec<String>,
    /// The history's file
    #[arg(long)]
    file: PathBuf,
    /// It ends when this file is there
    #[arg(long)]
    until: PathBuf,
}

/// Runs a prober.
pub fn run(args: &ProberArgs) -> Result<(), String> {
    let mut journal = Journal::create(&args.file)?;
    let mut options = ClientOptions::new(args.gates.iter().cloned());
    // Also how long the answer for the log's end is waited for.
    options.connect_timeout = Duration::from_secs(5);
    let client = Client::connect(options).map_err(|e| e.to_string())?;
    let mut rng = Rng::new(1, 78);
    let (mut tail, mut asked) = (0, None::<Instant>);
    while !args.until.exists() {
        std::thread::sleep(EVERY);
        if asked.is_none_or(|at| at.elapsed() > TAIL_EVERY) {
            // Nobody may know it now; what is below the old one is still there.
            tail = client.tail().map_or(tail, |end| end.0);
            asked = Some(Instant::now());
        }
        if tail == 0 {
            continue;
        }
        let from = if rng.below(2) == 0 { tail.saturating_sub(NEWEST) } else { 0 };
        let position = from + rng.below(tail - from);
        let began_ns = now_ns();
        let got = match client.read(Position(position), READ_TIME) {
            Ok(Slot::Record(record)) => Got::Record(Name::of(&record)),
            Ok(Slot::NoOp) => Got::NoOp,
            Ok(Slot::Unavailable) => Got::Unavailable,
            Ok(Slot::Trimmed(head)) => return Err(format!("{position} is trimmed: the log begins at {head}")),
            Err(_) => Got::Nothing,
        };
        read_line(&mut journal, &Read { began_ns, ended_ns: now_ns(), position, got });
        journal.flush()?;
    }
    Ok(())
}
