//! What clients saw, as they write it down: a line for each event, in files that survive the client's death.
//!
//! Times are nanoseconds of the machine's monotonic clock, which all processes share. A line that was cut off by a kill is
//! the last of its file and is not counted.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use rustix::time::{ClockId, clock_gettime};

use crate::record::Name;

/// The machine's monotonic clock.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// What became of an append.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Bound at this position.
    Acknowledged(u64),
    /// Not in the log.
    Refused,
    /// Not in the log: a disk was full.
    DiskFull,
    /// Nobody said.
    Unknown,
}

/// An append.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Append {
    /// The record.
    pub name: Name,
    /// Appends that name the same shard, or none, keep their order.
    pub lane: i32,
    /// Before it was called.
    pub invoked_ns: u64,
    /// After the answer was seen; none while nobody has answered.
    pub answered_ns: Option<u64>,
    /// What was answered.
    pub outcome: Outcome,
}

/// What a subscriber was told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// A record; `None`: its bytes are nobody's record.
    Deliver { position: u64, record: Option<Name> },
    /// Everything below is bound as delivered.
    Confirm { upto: u64 },
    /// Everything from here on is taken back.
    Fail { from: u64 },
    /// Nobody has what is bound here.
    Unavailable { from: u64, to: u64 },
    /// A read of a position: a record, or none.
    Read { position: u64, record: Option<Name> },
}

/// What a read of one position gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Got {
    /// A record; `None`: its bytes are nobody's record.
    Record(Option<Name>),
    /// There is none.
    NoOp,
    /// Nobody has what is bound there.
    Unavailable,
    /// No answer in time.
    Nothing,
}

/// A read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    /// Before it was called.
    pub began_ns: u64,
    /// After its answer.
    pub ended_ns: u64,
    /// Of which position.
    pub position: u64,
    /// What it gave.
    pub got: Got,
}

/// What one subscriber was told, and when.
pub type Subscriber = Vec<(u64, Told)>;

/// What all clients saw.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Every append that was called.
    pub appends: Vec<Append>,
    /// By file.
    pub subscribers: BTreeMap<String, Subscriber>,
    /// Of single positions.
    pub reads: Vec<Read>,
    /// A subscriber that came when all was over and read everything up to the log's end.
    pub last: Subscriber,
}

/// A file being written.
pub struct Journal {
    file: File,
    text: String,
}

impl Journal {
    /// An empty file.
    pub fn create(path: &Path) -> Result<Journal, String> {
        let file = File::create(path).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
        Ok(Journal { file, text: String::new() })
    }

    /// The next line; [`flush`](Self::flush) writes it.
    pub fn say(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = self.text.write_fmt(line);
        self.text.push('\n');
    }

    /// Gives everything to the kernel, which keeps it when this process is killed.
    pub fn flush(&mut self) -> Result<(), String> {
        self.file.write_all(self.text.as_bytes()).map_err(|e| format!("cannot write a history: {e}"))?;
        self.text.clear();
        Ok(())
    }
}

/// A line of a subscriber.
pub fn told_line(journal: &mut Journal, now_ns: u64, told: &Told) {
    match told {
        Told::Deliver { position, record: Some(name) } => {
            journal.say(format_args!("d {now_ns} {position} {} {}", name.writer, name.seq));
        }
        Told::Deliver { position, record: None } => journal.say(format_args!("d {now_ns} {position}")),
        Told::Confirm { upto } => journal.say(format_args!("c {now_ns} {upto}")),
        Told::Fail { from } => journal.say(format_args!("f {now_ns} {from}")),
        Told::Unavailable { from, to } => journal.say(format_args!("n {now_ns} {from} {to}")),
        Told::Read { position, record: Some(name) } => {
            journal.say(format_args!("r {now_ns} {position} {} {}", name.writer, name.seq));
        }
        Told::Read { position, record: None } => journal.say(format_args!("r {now_ns} {position}")),
    }
}

/// A line of a prober.
pub fn read_line(journal: &mut Journal, read: &Read) {
    let Read { began_ns, ended_ns, position, got } = read;
    match got {
        Got::Record(Some(name)) => {
            journal.say(format_args!("r {began_ns} {ended_ns} {position} {} {}", name.writer, name.seq));
        }
        Got::Record(None) => journal.say(format_args!("r {began_ns} {ended_ns} {position}")),
        Got::NoOp => journal.say(format_args!("n {began_ns} {ended_ns} {position}")),
        Got::Unavailable => journal.say(format_args!("u {began_ns} {ended_ns} {position}")),
        Got::Nothing => journal.say(format_args!("x {began_ns} {ended_ns} {position}")),
    }
}

/// Reads what a prober wrote.
pub fn read_reads(path: &Path) -> Result<Vec<Read>, String> {
    let mut reads = Vec::new();
    for (at, (kind, numbers)) in lines(path)?.into_iter().enumerate() {
        let wrong = || format!("{}:{}: no line of a prober", path.display(), at + 1);
        let numbers: Vec<u64> = numbers.iter().map(|n| *n as u64).collect();
        let [began_ns, ended_ns, position, ref name @ ..] = numbers[..] else { return Err(wrong()) };
        let got = match (&kind[..], name) {
            ("r", [writer, seq]) => Got::Record(Some(Name { writer: *writer as u32, seq: *seq })),
            ("r", _) => Got::Record(None),
            ("n", _) => Got::NoOp,
            ("u", _) => Got::Unavailable,
            ("x", _) => Got::Nothing,
            _ => return Err(wrong()),
        };
        reads.push(Read { began_ns, ended_ns, position, got });
    }
    Ok(reads)
}

/// The whole lines of a file: their kind and numbers.
fn lines(path: &Path) -> Result<Vec<(String, Vec<i64>)>, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let mut all = Vec::new();
    for (at, line) in whole.lines().enumerate() {
        let mut words = line.split(' ');
        let kind = words.next().unwrap_or_default().to_owned();
        let numbers: Result<Vec<i64>, _> = words.map(str::parse).collect();
        let numbers = numbers.map_err(|e| format!("{}:{}: {e}", path.display(), at + 1))?;
        all.push((kind, numbers));
    }
    Ok(all)
}

/// Reads what a subscriber wrote.
pub fn read_subscriber(path: &Path) -> Result<Subscriber, String> {
    let mut told = Vec::new();
    for (at, (kind, numbers)) in lines(path)?.into_iter().enumerate() {
        let number = |at: usize| numbers.get(at).map(|n| *n as u64);
        let name = number(2).zip(number(3)).map(|(writer, seq)| Name { writer: writer as u32, seq });
        let event = match (&kind[..], number(1)) {
            ("d", Some(position)) => Told::Deliver { position, record: name },
            ("r", Some(position)) => Told::Read { position, record: name },
            ("c", Some(upto)) => Told::Confirm { upto },
            ("f", Some(from)) => Told::Fail { from },
            ("n", Some(from)) => Told::Unavailable { from, to: number(2).unwrap_or(from) },
            _ => return Err(format!("{}:{}: no line of a subscriber", path.display(), at + 1)),
        };
        told.push((number(0).unwrap_or_default(), event));
    }
    Ok(told)
}

/// Reads what a writer wrote.
pub fn read_writer(path: &Path, writer: u32) -> Result<Vec<Append>, String> {
    let mut appends: Vec<Append> = Vec::new();
    for (at, (kind, numbers)) in lines(path)?.into_iter().enumerate() {
        let wrong = || format!("{}:{}: no line of a writer", path.display(), at + 1);
        let [seq, now_ns, rest @ ..] = &numbers[..] else { return Err(wrong()) };
        if kind == "i" {
            let lane = *rest.first().ok_or_else(wrong)? as i32;
            let name = Name { writer, seq: *seq as u64 };
            let invoked_ns = *now_ns as u64;
            appends.push(Append { name, lane, invoked_ns, answered_ns: None, outcome: Outcome::Unknown });
            continue;
        }
        // A writer numbers its appends from 0 on.
        let append = appends.get_mut(*seq as usize).ok_or_else(wrong)?;
        append.answered_ns = Some(*now_ns as u64);
        append.outcome = match &kind[..] {
            "a" => Outcome::Acknowledged(*rest.first().ok_or_else(wrong)? as u64),
            "r" => Outcome::Refused,
            "f" => Outcome::DiskFull,
            "u" => Outcome::Unknown,
            _ => return Err(wrong()),
        };
    }
    Ok(appends)
}

/// Reads everything that clients left in a folder: `writer-N`, `reader-N`, `prober` and `last`.
pub fn read(folder: &Path) -> Result<History, String> {
    let mut history = History::default();
    let failed = |e: std::io::Error| format!("cannot read {}: {e}", folder.display());
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        names.push(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    for name in names {
        let path = folder.join(&name);
        if let Some(writer) = name.strip_prefix("writer-").and_then(|n| n.parse().ok()) {
            history.appends.extend(read_writer(&path, writer)?);
        } else if name.starts_with("reader-") {
            history.subscribers.insert(name.clone(), read_subscriber(&path)?);
        } else if name == "prober" {
            history.reads = read_reads(&path)?;
        } else if name == "last" {
            history.last = read_subscriber(&path)?;
        }
    }
    Ok(history)
}
