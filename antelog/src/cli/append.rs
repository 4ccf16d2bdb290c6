//! `append`: records from a file or standard input, pipelined, in order.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;
use std::time::Instant;

use antelog::{Client, Error, Pending, Position, ShardId};
use clap::Args;

use super::output::{SAY_AFTER, Waits};
use super::{ClusterArgs, Outcome, Stop, output};

/// Appends under way before the oldest is waited for.
const PIPELINED_MAX: usize = 4096;

#[derive(Args)]
pub struct AppendArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Read this file instead of standard input
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// One record per line, without its newline (the default)
    #[arg(long, conflicts_with = "block")]
    lines: bool,
    /// One record per BYTES bytes; the last may be shorter
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..))]
    block: Option<u64>,
    /// Append to this shard; otherwise to one chosen for this session, so that order is kept
    #[arg(long, value_name = "S")]
    shard: Option<u16>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// What was appended so far.
#[derive(Default)]
struct Tally {
    records: u64,
    acknowledged: u64,
    bytes: u64,
    first: Option<Position>,
    last: Option<Position>,
}

struct Pipeline {
    client: Client,
    shard: Option<ShardId>,
    pending: VecDeque<Pending>,
    tally: Tally,
    waits: Waits,
}

impl Pipeline {
    fn append(&mut self, record: &[u8]) -> Outcome {
        while self.pending.len() >= PIPELINED_MAX {
            self.wait_one()?;
        }
        let number = self.tally.records + 1;
        let pending = self
            .client
            .append_async(self.shard, record)
            .map_err(|e| Stop::Failed(format!("record {number} ({} bytes) was not appended: {e}", record.len())))?;
        self.pending.push_back(pending);
        self.tally.records += 1;
        self.tally.bytes += record.len() as u64;
        Ok(())
    }

    fn wait_one(&mut self) -> Outcome {
        let number = self.tally.records - self.pending.len() as u64 + 1;
        let Some(pending) = self.pending.pop_front() else { return Ok(()) };
        let result = loop {
            if let Some(result) = pending.wait_timeout(SAY_AFTER) {
                break result;
            }
            let problem = self.client.problem();
            let why = problem.as_deref().unwrap_or("is every node of the cluster up?");
            self.waits.say(format!("record {number} is not acknowledged yet; {why}"));
        };
        let position = result.map_err(|e| match e {
            Error::Unknown { .. } => Stop::Failed(format!("record {number}: {e}")),
            _ => Stop::Failed(format!("record {number} was not appended: {e}")),
        })?;
        self.tally.acknowledged += 1;
        self.tally.first.get_or_insert(position);
        self.tally.last = Some(position);
        Ok(())
    }

    fn finish(&mut self) -> Outcome {
        while !self.pending.is_empty() {
            self.wait_one()?;
        }
        Ok(())
    }
}

/// Runs `append`.
pub fn run(args: &AppendArgs) -> Outcome {
    let input: Box<dyn Read> = match &args.file {
        Some(path) => Box::new(File::open(path).map_err(|e| format!("cannot open {}: {e}", path.display()))?),
        None => Box::new(io::stdin().lock()),
    };
    let client = args.cluster.connect()?;
    let limit = client.map().record_bytes_max as usize;
    let shard = args.shard.map(ShardId);
    let mut pipeline =
        Pipeline { client, shard, pending: VecDeque::new(), tally: Tally::default(), waits: Waits::default() };
    let started = Instant::now();
    let mut input = BufReader::with_capacity(1 << 18, input);
    let read = match args.block {
        Some(bytes) => blocks(&mut input, bytes, limit, &mut pipeline),
        None => lines(&mut input, limit, &mut pipeline),
    };
    // What was sent before an error is appended all the same: say how much.
    let finished = pipeline.finish();
    let tally = &pipeline.tally;
    if let Err(Stop::Failed(error)) = read.and(finished) {
        let acknowledged = tally.acknowledged;
        return Err(Stop::Failed(format!("{error} ({acknowledged} records were appended before)")));
    }
    report(tally, started.elapsed().as_secs_f64(), args.json)
}

fn report(tally: &Tally, seconds: f64, json: bool) -> Outcome {
    let Tally { records, bytes, first, last, .. } = tally;
    let (rate, mib) = (*records as f64 / seconds, *bytes as f64 / seconds / (1 << 20) as f64);
    if json {
        let value = serde_json::json!({
            "records": records, "bytes": bytes, "first": first.map(|p| p.0), "last": last.map(|p| p.0),
            "seconds": seconds, "records_per_s": rate,
        });
        return output::print(&value.to_string());
    }
    match (first, last) {
        (Some(first), Some(last)) => output::print(&format!(
            "{records} {}, {bytes} bytes, positions {first} to {last}, {rate:.0} records/s, {mib:.1} MiB/s",
            if *records == 1 { "record" } else { "records" },
        )),
        _ => output::print("0 records: the input is empty"),
    }
}

fn read_error(error: io::Error) -> Stop {
    Stop::Failed(format!("cannot read the input: {error}"))
}

fn blocks(input: &mut impl Read, bytes: u64, limit: usize, pipeline: &mut Pipeline) -> Outcome {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    if bytes > limit {
        return Err(Stop::Failed(format!(
            "--block {bytes} is over this cluster's limit of {limit} bytes a record (record_bytes_max)"
        )));
    }
    let mut record = vec![0; bytes];
    loop {
        let mut filled = 0;
        while filled < bytes {
            match input.read(&mut record[filled..]) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(read_error(error)),
            }
        }
        if filled > 0 {
            pipeline.append(&record[..filled])?;
        }
        if filled < bytes {
            return Ok(());
        }
    }
}

fn lines(input: &mut impl BufRead, limit: usize, pipeline: &mut Pipeline) -> Outcome {
    let mut line = Vec::new();
    let mut number = 0u64;
    loop {
        line.clear();
        number += 1;
        // One byte over the limit tells that the line is too long, however long it is.
        let most = limit as u64 + 2;
        let read = input.by_ref().take(most).read_until(b'\n', &mut line).map_err(read_error)?;
        if read == 0 {
            return Ok(());
        }
        if line.last() == Some(&b'\n') {
            line.pop();
        }
        if line.len() > limit {
            return Err(Stop::Failed(format!(
                "line {number} is over this cluster's limit of {limit} bytes a record (record_bytes_max): use --block"
            )));
        }
        pipeline.append(&line)?;
    }
}
