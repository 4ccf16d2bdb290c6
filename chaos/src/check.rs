//! Whether what clients saw can be a log's: nothing acknowledged is lost, doubled, moved or changed; appends are
//! linearizable; every subscriber was confirmed the same log.
//!
//! The log gives every append a position of its own, so linearizability need not be searched for as with other objects:
//! there is one order in question, that of the positions, and it must agree with real time. If one append was answered
//! before another was called, its position is the smaller one; if somebody was told that everything below a position is
//! bound, whoever calls afterwards lands at it or above. An append whose outcome nobody learned may be in the log or not,
//! once, and must fit in the same way if it is.

use std::collections::{BTreeMap, HashMap};

use crate::circumstances::Circumstances;
use crate::history::{Append, Got, History, Outcome, Subscriber, Told};
use crate::record::Name;

/// Violations told of in full; more are counted.
const TOLD_MAX: usize = 20;

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// What cannot be, a line each; at most twenty.
    pub violations: Vec<String>,
    /// How many there were.
    pub violations_total: usize,
    /// Appends called.
    pub appends: usize,
    /// Of them answered with a position.
    pub acknowledged: usize,
    /// Of them not answered, or answered with "unknown".
    pub unknown: usize,
    /// Of those in the log.
    pub unknown_in_log: usize,
    /// Of them refused.
    pub refused: usize,
    /// And of those because a disk was full.
    pub disk_full: usize,
    /// Reads of single positions.
    pub reads: usize,
    /// Of them without an answer in time.
    pub reads_failed: usize,
    /// Of them answered while a disk was full.
    pub reads_while_full: usize,
    /// Records in the log at the end.
    pub records: usize,
    /// Positions bound at the end.
    pub positions: u64,
    /// Positions that nobody has, though they are bound.
    pub unavailable: u64,
    /// Acknowledged records among those.
    pub acknowledged_unavailable: usize,
    /// Times that something was taken back, all subscribers together.
    pub fails: usize,
    /// Records that were taken back.
    pub taken_back: usize,
}

impl Verdict {
    fn complain(&mut self, what: String) {
        self.violations_total += 1;
        if self.violations.len() < TOLD_MAX {
            self.violations.push(what);
        }
    }
}

/// The log as it was at the end.
struct Log {
    records: BTreeMap<u64, Name>,
    of: HashMap<Name, u64>,
    end: u64,
    /// Positions that nobody has.
    unavailable: Vec<(u64, u64)>,
}

impl Log {
    fn is_unavailable(&self, position: u64) -> bool {
        self.unavailable.iter().any(|(from, to)| (*from..*to).contains(&position))
    }
}

/// Checks a history, which only the circumstances excuse from holding everything that was acknowledged.
pub fn check(history: &History, circumstances: &Circumstances) -> Verdict {
    let mut verdict = Verdict { appends: history.appends.len(), ..Verdict::default() };
    let log = read_log(&history.last, &mut verdict);
    let by_name: HashMap<Name, &Append> = history.appends.iter().map(|a| (a.name, a)).collect();
    for (position, name) in &log.records {
        match by_name.get(name) {
            None => verdict.complain(format!("position {position} holds {name:?}, which nobody appended")),
            Some(append) if matches!(append.outcome, Outcome::Refused | Outcome::DiskFull) => {
                verdict.complain(format!("{name:?} was refused and is in the log at position {position}"));
            }
            Some(_) => {}
        }
    }
    acknowledged(&history.appends, circumstances, &log, &mut verdict);
    lanes(&history.appends, &log, &mut verdict);
    real_time(history, &log, &mut verdict);
    for (name, subscriber) in &history.subscribers {
        subscribed(name, subscriber, &log, &by_name, &mut verdict);
    }
    reads(history, circumstances, &log, &mut verdict);
    if circumstances.shard_losses == 0 && verdict.fails > 0 {
        verdict.complain(format!("{} times something was taken back, though no shard was lost", verdict.fails));
    }
    if !circumstances.may_lack() && verdict.unavailable > 0 {
        verdict.complain(format!("{} positions are unavailable, which nothing excuses", verdict.unavailable));
    }
    verdict
}

/// The log as the last subscriber was confirmed it.
fn read_log(last: &Subscriber, verdict: &mut Verdict) -> Log {
    let mut log = Log { records: BTreeMap::new(), of: HashMap::new(), end: 0, unavailable: Vec::new() };
    for (_, told) in last {
        match *told {
            Told::Deliver { position, record: Some(name) } => {
                if log.records.insert(position, name).is_some() {
                    verdict.complain(format!("position {position} was delivered twice to the last subscriber"));
                }
                if let Some(other) = log.of.insert(name, position) {
                    verdict.complain(format!("{name:?} is in the log at {other} and at {position}"));
                }
            }
            Told::Deliver { position, record: None } => {
                verdict.complain(format!("position {position} holds bytes that nobody appended"));
            }
            Told::Confirm { upto } => log.end = log.end.max(upto),
            Told::Fail { from } => {
                verdict.complain(format!("the last subscriber was taken back what is from {from} on"))
            }
            Told::Unavailable { from, to } => log.unavailable.push((from, to)),
            Told::Read { position, record } => {
                if log.records.get(&position).copied() != record {
                    let log = log.records.get(&position);
                    verdict.complain(format!("a read of position {position} gave {record:?}, the log holds {log:?}"));
                }
            }
        }
    }
    let end = log.end;
    let beyond: Vec<(u64, Name)> = log.records.range(end..).map(|(p, n)| (*p, *n)).collect();
    for (position, name) in beyond {
        // Delivered and not bound: not in the log as far as it was read.
        log.records.remove(&position);
        log.of.remove(&name);
    }
    (verdict.records, verdict.positions) = (log.records.len(), log.end);
    verdict.unavailable = log.unavailable.iter().map(|(from, to)| to - from).sum();
    log
}

/// What was answered is so, and stays so.
fn acknowledged(appends: &[Append], circumstances: &Circumstances, log: &Log, verdict: &mut Verdict) {
    for append in appends {
        let (name, found) = (append.name, log.of.get(&append.name));
        match append.outcome {
            Outcome::Acknowledged(position) => {
                verdict.acknowledged += 1;
                match found {
                    Some(at) if *at == position => {}
                    Some(at) => verdict.complain(format!("{name:?} was acknowledged at {position} and is at {at}")),
                    None if log.is_unavailable(position) => {
                        verdict.acknowledged_unavailable += 1;
                        let answered_ns = append.answered_ns.unwrap_or(u64::MAX);
                        if !circumstances.may_be_gone(append.invoked_ns, answered_ns) {
                            verdict.complain(format!("{name:?} was acknowledged at {position} and nobody has it"));
                        }
                    }
                    None => {
                        let instead = log.records.get(&position);
                        verdict.complain(format!(
                            "{name:?} was acknowledged at {position} and is lost; there is {instead:?}"
                        ));
                    }
                }
            }
            Outcome::Unknown => {
                verdict.unknown += 1;
                verdict.unknown_in_log += usize::from(found.is_some());
            }
            Outcome::Refused => verdict.refused += 1,
            Outcome::DiskFull => {
                (verdict.refused, verdict.disk_full) = (verdict.refused + 1, verdict.disk_full + 1);
                if !circumstances.was_full(append.invoked_ns, append.answered_ns.unwrap_or(u64::MAX)) {
                    verdict.complain(format!("{name:?} was refused for a full disk, and none was"));
                }
            }
        }
    }
}

/// The position of an append: by its answer, else by the log.
fn position(append: &Append, log: &Log) -> Option<u64> {
    match append.outcome {
        Outcome::Acknowledged(position) => Some(position),
        Outcome::Unknown => log.of.get(&append.name).copied(),
        Outcome::Refused | Outcome::DiskFull => None,
    }
}

/// What one writer appended to the same shard, or to none by name, keeps its order.
fn lanes(appends: &[Append], log: &Log, verdict: &mut Verdict) {
    let mut newest: BTreeMap<(u32, i32), (u64, u64)> = BTreeMap::new();
    let mut ordered: Vec<&Append> = appends.iter().collect();
    ordered.sort_unstable_by_key(|a| a.name);
    for append in ordered {
        let Some(at) = position(append, log) else { continue };
        let lane = (append.name.writer, append.lane);
        if let Some((seq, before)) = newest.insert(lane, (append.name.seq, at))
            && before >= at
        {
            let name = append.name;
            verdict.complain(format!("{name:?} is at {at}, and the writer's earlier append {seq} at {before}"));
        }
    }
}

/// Something that became known: at this time, that everything later lies at or above a position.
struct Floor {
    at_ns: u64,
    position: u64,
    why: String,
}

/// The order of positions agrees with real time.
fn real_time(history: &History, log: &Log, verdict: &mut Verdict) {
    let mut floors = Vec::new();
    for append in &history.appends {
        if let (Outcome::Acknowledged(at), Some(at_ns)) = (&append.outcome, append.answered_ns) {
            floors.push(Floor {
                at_ns,
                position: at + 1,
                why: format!("{:?} had been acknowledged at {at}", append.name),
            });
        }
    }
    for (name, subscriber) in &history.subscribers {
        for (at_ns, told) in subscriber {
            if let Told::Confirm { upto } = *told {
                floors.push(Floor {
                    at_ns: *at_ns,
                    position: upto,
                    why: format!("{name} had been confirmed up to {upto}"),
                });
            }
        }
    }
    floors.sort_unstable_by_key(|f| f.at_ns);
    let mut called: Vec<&Append> = history.appends.iter().collect();
    called.sort_unstable_by_key(|a| a.invoked_ns);
    let (mut known, mut highest): (_, Option<&Floor>) = (0, None);
    for append in called {
        // Equal times may be either order.
        while let Some(floor) = floors.get(known).filter(|f| f.at_ns < append.invoked_ns) {
            if highest.is_none_or(|h| floor.position > h.position) {
                highest = Some(floor);
            }
            known += 1;
        }
        if let (Some(at), Some(floor)) = (position(append, log), highest)
            && at < floor.position
        {
            verdict.complain(format!("{:?} is at {at}, and before it was called {}", append.name, floor.why));
        }
    }
}

/// Single positions hold what the log does, at all times, and can be read while a disk is full.
fn reads(history: &History, circumstances: &Circumstances, log: &Log, verdict: &mut Verdict) {
    let mut answered = vec![0; circumstances.full_disks_ns.len()];
    for read in &history.reads {
        let (position, held) = (read.position, log.records.get(&read.position).copied());
        verdict.reads += 1;
        match read.got {
            Got::Record(name) if name == held && name.is_some() => {}
            Got::NoOp if held.is_none() => {}
            // It was there when it was read.
            Got::Record(Some(_)) if log.is_unavailable(position) => {}
            // It had not returned.
            Got::Unavailable if circumstances.shard_losses > 0 => continue,
            Got::Nothing => {
                verdict.reads_failed += 1;
                continue;
            }
            _ if position >= log.end => continue,
            ref got => verdict.complain(format!("a read of position {position} gave {got:?}, the log holds {held:?}")),
        }
        for (answered, (from, to)) in answered.iter_mut().zip(&circumstances.full_disks_ns) {
            *answered += usize::from(*from < read.began_ns && read.ended_ns < *to);
        }
    }
    verdict.reads_while_full = answered.iter().sum();
    if !history.reads.is_empty() && answered.contains(&0) {
        verdict.complain("while a disk was full no read was answered".into());
    }
}

/// A subscriber was confirmed what the log holds, all of it, and nothing else.
fn subscribed(who: &str, subscriber: &Subscriber, log: &Log, appends: &HashMap<Name, &Append>, verdict: &mut Verdict) {
    let mut held: BTreeMap<u64, Name> = BTreeMap::new();
    let mut skipped: Vec<(u64, u64)> = Vec::new();
    let mut confirmed = 0;
    for (at_ns, told) in subscriber {
        match *told {
            Told::Deliver { position, record } => {
                let Some(name) = record else {
                    verdict
                        .complain(format!("{who}: position {position} was delivered with bytes that nobody appended"));
                    continue;
                };
                if position < confirmed {
                    verdict.complain(format!(
                        "{who}: {position} was delivered after everything below {confirmed} was bound"
                    ));
                }
                if let Some(other) = held.insert(position, name) {
                    verdict.complain(format!("{who}: position {position} was {other:?}, then {name:?}"));
                }
                if appends.get(&name).is_some_and(|a| a.invoked_ns > *at_ns) {
                    verdict.complain(format!("{who}: {name:?} was delivered before it was appended"));
                }
            }
            Told::Confirm { upto } => {
                if upto < confirmed {
                    verdict.complain(format!("{who}: confirmed up to {confirmed}, then up to {upto}"));
                    continue;
                }
                compare(who, (confirmed, upto), &held, &skipped, log, verdict);
                held = held.split_off(&upto);
                confirmed = upto;
            }
            Told::Fail { from } => {
                verdict.fails += 1;
                if from < confirmed {
                    verdict.complain(format!("{who}: everything from {from} on was taken back, {confirmed} was bound"));
                }
                verdict.taken_back += held.split_off(&from).len();
            }
            Told::Unavailable { from, to } => skipped.push((from, to)),
            Told::Read { .. } => {}
        }
    }
    if confirmed > log.end {
        verdict.complain(format!("{who}: confirmed up to {confirmed}, the log ends at {}", log.end));
    }
}

/// Between two confirmations a subscriber holds what the log does.
fn compare(
    who: &str,
    (from, upto): (u64, u64),
    held: &BTreeMap<u64, Name>,
    skipped: &[(u64, u64)],
    log: &Log,
    verdict: &mut Verdict,
) {
    if log.records.range(from..upto).eq(held.range(from..upto)) {
        return;
    }
    let is_skipped = |position: &u64| skipped.iter().any(|(from, to)| (*from..*to).contains(position));
    for (position, name) in log.records.range(from..upto) {
        match held.get(position) {
            Some(other) if other == name => {}
            // It was told that nobody had it at that time.
            None if is_skipped(position) => {}
            other => {
                verdict.complain(format!("{who}: at {position} the log holds {name:?}, it was confirmed {other:?}"))
            }
        }
    }
    for (position, name) in held.range(from..upto).filter(|(p, _)| !log.records.contains_key(p)) {
        // A record that was bound when all of its shard's replicas were lost.
        if !log.is_unavailable(*position) {
            verdict.complain(format!("{who}: at {position} it was confirmed {name:?}, the log holds no record"));
        }
    }
}

#[cfg(test)]
mod tests;
