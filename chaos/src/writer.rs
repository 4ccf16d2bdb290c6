//! A client process that appends records and writes down what it called and what was answered.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;

use antelog::{Client, ClientOptions, Error, Pending, Refusal, ShardId};
use antelog_core::sim::rng::Rng;
use clap::Args;

use crate::history::{Journal, now_ns};
use crate::record::Name;

/// How long outstanding appends may take after the end.
const DRAIN_NS: u64 = 30_000_000_000;

/// Arguments of a process that appends.
#[derive(Args)]
pub struct WriterArgs {
    /// Addresses of gates
    #[arg(long, value_delimiter = ',')]
    gates: Vec<String>,
    /// The writer's number
    #[arg(long)]
    id: u32,
    /// The history's file
    #[arg(long)]
    file: PathBuf,
    /// It ends when this file is there
    #[arg(long)]
    until: PathBuf,
    /// Appends a second
    #[arg(long)]
    rate: u64,
}

/// What a writer names: its own shard, one and the same, or any; and how much it has under way.
struct Habit {
    outstanding_max: usize,
    lanes: Vec<i32>,
}

/// Writers differ: waiting for each answer shows violations of real time best, many under way of order and duplicates.
fn habit(id: u32, shards: &[i32]) -> Habit {
    let one = shards[id as usize % shards.len()];
    match id % 4 {
        0 => Habit { outstanding_max: 64, lanes: vec![-1] },
        1 => Habit { outstanding_max: 1, lanes: shards.to_vec() },
        2 => Habit { outstanding_max: 16, lanes: vec![one] },
        _ => Habit { outstanding_max: 1, lanes: vec![-1] },
    }
}

/// Runs a writer.
pub fn run(args: &WriterArgs) -> Result<(), String> {
    let mut journal = Journal::create(&args.file)?;
    let mut options = ClientOptions::new(args.gates.iter().cloned());
    options.connect_timeout = Duration::from_secs(30);
    let client = Client::connect(options).map_err(|e| e.to_string())?;
    let shards: Vec<i32> = client.map().shards.iter().map(|s| i32::from(s.shard.0)).collect();
    let habit = habit(args.id, &shards);
    let mut rng = Rng::new(u64::from(args.id), 77);
    let mut pending: VecDeque<(u64, Pending)> = VecDeque::new();
    let (mut seq, mut next_ns) = (0, now_ns());
    let mut until_ns = u64::MAX;
    loop {
        let now = now_ns();
        if until_ns == u64::MAX && args.until.exists() {
            until_ns = now + DRAIN_NS;
        }
        let ends = until_ns != u64::MAX;
        if (ends && pending.is_empty()) || now > until_ns {
            return journal.flush();
        }
        if !ends && now >= next_ns && pending.len() < habit.outstanding_max {
            let lane = habit.lanes[rng.below(habit.lanes.len() as u64) as usize];
            let shard = u16::try_from(lane).ok().map(ShardId);
            journal.say(format_args!("i {seq} {now} {lane}"));
            journal.flush()?;
            let bytes = Name { writer: args.id, seq }.bytes();
            pending.push_back((seq, client.append_async(shard, &bytes).map_err(|e| e.to_string())?));
            seq += 1;
            // What was missed while nothing was answered is not made up for.
            next_ns = (next_ns + 1_000_000_000 / args.rate.max(1)).max(now.saturating_sub(20_000_000));
            continue;
        }
        let waits = Duration::from_nanos(next_ns.saturating_sub(now).clamp(200_000, 2_000_000));
        let first = pending.front().map(|(seq, first)| (*seq, first.wait_timeout(waits)));
        match first {
            None => std::thread::sleep(waits),
            Some((_, None)) => {}
            Some((seq, Some(answer))) => {
                pending.pop_front();
                note(&mut journal, seq, &answer)?;
            }
        }
        let mut failed = Ok(());
        pending.retain(|(seq, appended)| match appended.try_take() {
            Some(answer) => {
                failed = failed.clone().and(note(&mut journal, *seq, &answer));
                false
            }
            None => true,
        });
        failed?;
        journal.flush()?;
    }
}

fn note(journal: &mut Journal, seq: u64, answer: &Result<antelog::Position, Error>) -> Result<(), String> {
    let now = now_ns();
    match answer {
        Ok(position) => journal.say(format_args!("a {seq} {now} {position}")),
        Err(Error::Refused { refusal: Refusal::DiskFull, .. }) => journal.say(format_args!("f {seq} {now}")),
        Err(Error::Refused { .. } | Error::ShardLost { .. }) => journal.say(format_args!("r {seq} {now}")),
        Err(Error::Unknown { .. }) => journal.say(format_args!("u {seq} {now}")),
        Err(error) => return Err(format!("append {seq}: {error}")),
    }
    Ok(())
}
