//! Open-loop load: one writer per shard sends at times fixed beforehand, however slow the log is.
//!
//! A writer that waits for the log before it takes the next record hides every stall behind a single slow record. Here a
//! record has an *intended* send time from a schedule; when the log pushes back, the record keeps that time and is sent as
//! soon as possible, in order, and so do all that fall due meanwhile. Several writers on one shard would add nothing: evenly
//! staggered regular writers are together a regular one, and Poisson writers a Poisson one, of the summed rate.

use std::collections::VecDeque;

use antelog_protocol::ShardId;

use crate::log::{Clock, Log, LogError};

/// Bytes at the start of every record: intended send time, actual send time (nanoseconds, little-endian), the run's tag.
pub const STAMP_BYTES: usize = 24;
/// Records sent per turn of the loop at most, so that a backlog does not keep the loop from receiving.
const SENDS_PER_TURN_MAX: usize = 64;
/// Unacknowledged records per shard that a table has room for before it must grow.
const OUTSTANDING_ROOM: usize = 4096;

/// When records fall due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrivals {
    /// At equal distances; the shards' phases are spread evenly over one distance.
    Regular,
    /// Independently of each other: exponential distances, from the seed.
    Poisson,
    /// So many records at once, again and again at equal distances; each writer's phase is drawn from the seed.
    Bursts(u32),
}

/// One shard's writer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WriterConfig {
    /// The shard it writes to.
    pub shard: ShardId,
    /// Records per second.
    pub rate_per_s: f64,
}

/// What to send.
#[derive(Clone, Debug)]
pub struct LoadConfig {
    /// One writer per shard.
    pub writers: Vec<WriterConfig>,
    /// Bytes per record, at least [`STAMP_BYTES`].
    pub record_bytes: usize,
    /// When records fall due.
    pub arrivals: Arrivals,
    /// Seed of [`Arrivals::Poisson`] and [`Arrivals::Bursts`].
    pub seed: u64,
}

/// Records per second and shard, on average over the shards; 0 without any.
pub fn mean_rate_per_s(writers: &[WriterConfig]) -> f64 {
    writers.iter().map(|writer| writer.rate_per_s).sum::<f64>() / writers.len().max(1) as f64
}

/// Writers of shards 0, 1, … with a mean rate of `rate_per_s` records/s that differs from shard to shard: 1 : 9 on two
/// shards (2,000 and 18,000 at a mean of 10,000), otherwise 1 : 4 in turn.
pub fn uneven_writers(shards: u16, rate_per_s: f64) -> Vec<WriterConfig> {
    let high = if shards == 2 { 9.0 } else { 4.0 };
    let part = |shard: u16| if shard.is_multiple_of(2) { 1.0 } else { high };
    let parts: f64 = (0..shards).map(part).sum();
    let rate = |shard| rate_per_s * f64::from(shards) * part(shard) / parts;
    (0..shards).map(|shard| WriterConfig { shard: ShardId(shard), rate_per_s: rate(shard) }).collect()
}

/// Writers of shards 0, 1, … with a rate of `rate_per_s` records/s each.
pub fn even_writers(shards: u16, rate_per_s: f64) -> Vec<WriterConfig> {
    (0..shards).map(|shard| WriterConfig { shard: ShardId(shard), rate_per_s }).collect()
}

/// What a record says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// When it should have been sent, in nanoseconds.
    pub intended_ns: u64,
    /// When it was handed to the log, in nanoseconds.
    pub sent_ns: u64,
    /// The run it belongs to.
    pub tag: u64,
}

impl Stamp {
    /// Reads a record's stamp; `None` when the record is too short to have one.
    pub fn of(record: &[u8]) -> Option<Stamp> {
        let word = |at: usize| record.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
        Some(Stamp { intended_ns: word(0)?, sent_ns: word(8)?, tag: word(16)? })
    }

    fn write(self, record: &mut [u8]) {
        for (at, word) in [(0, self.intended_ns), (8, self.sent_ns), (16, self.tag)] {
            record[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// A small generator of random numbers: SplitMix64. One seed gives one sequence on every machine and in every version.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in (0, 1].
    pub fn next_unit(&mut self) -> f64 {
        ((self.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Shuffles `items`; every order is equally likely.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, (self.next_u64() % (last as u64 + 1)) as usize);
        }
    }
}

struct Outstanding {
    stamp: Stamp,
    settled: bool,
}

struct Writer {
    shard: ShardId,
    period_ns: f64,
    /// Intended time of the schedule's next record, in nanoseconds.
    next_ns: u64,
    /// Intended times of records that other shards refused and that are to be sent to this one, in nanoseconds.
    moved: VecDeque<u64>,
    /// Records taken from the schedule.
    taken: u64,
    /// Nanoseconds from the start: the phase of a regular or bursting writer, the last arrival of a Poisson one. Kept with
    /// its fraction so that rounding does not add up over a run.
    offset: f64,
    random: Random,
    /// The log pushed back this turn.
    blocked: bool,
    first_seq: u64,
    outstanding: VecDeque<Outstanding>,
}

impl Writer {
    /// Takes the next intended time from the schedule.
    fn advance(&mut self, start_ns: u64, arrivals: Arrivals) {
        let offset = match arrivals {
            Arrivals::Regular => self.offset + self.taken as f64 * self.period_ns,
            Arrivals::Poisson => {
                self.offset -= self.random.next_unit().ln() * self.period_ns;
                self.offset
            }
            Arrivals::Bursts(records) => {
                let records = u64::from(records);
                self.offset + (self.taken / records * records) as f64 * self.period_ns
            }
        };
        self.taken += 1;
        self.next_ns = start_ns + offset.round() as u64;
    }

    /// When the next record is due, in nanoseconds; `None` when the schedule is over and nothing was moved here.
    fn due_ns(&self, end_ns: u64) -> Option<u64> {
        let scheduled = (self.next_ns < end_ns).then_some(self.next_ns);
        self.moved.front().copied().into_iter().chain(scheduled).min()
    }

    /// The record that is due at `due_ns` was taken: goes on to the next one.
    fn take(&mut self, due_ns: u64, start_ns: u64, arrivals: Arrivals) {
        match self.moved.front() {
            Some(front) if *front == due_ns => drop(self.moved.pop_front()),
            _ => self.advance(start_ns, arrivals),
        }
    }
}

/// The writers of one client.
pub struct Load {
    writers: Vec<Writer>,
    arrivals: Arrivals,
    start_ns: u64,
    end_ns: u64,
    tag: u64,
    /// The record that is stamped and sent over and over; the log copies it.
    record: Vec<u8>,
    sent: u64,
    settled: u64,
    pushed_back: u64,
}

impl Load {
    /// Writers that send from `start_ns` until before `end_ns`, stamping records with `tag`.
    ///
    /// # Errors
    /// When the configuration makes no sense.
    pub fn new(config: &LoadConfig, tag: u64, start_ns: u64, end_ns: u64) -> Result<Load, String> {
        if config.writers.is_empty() {
            return Err("the load names no shard to write to".to_owned());
        }
        if let Some(writer) = config.writers.iter().find(|w| !(w.rate_per_s > 0.0 && w.rate_per_s <= 1e9)) {
            let (shard, rate) = (writer.shard, writer.rate_per_s);
            return Err(format!("a rate of {rate} records/s to shard {shard} cannot be sent; give 0 < rate"));
        }
        if config.arrivals == Arrivals::Bursts(0) {
            return Err("a burst needs at least 1 record".to_owned());
        }
        if config.record_bytes < STAMP_BYTES {
            let bytes = config.record_bytes;
            return Err(format!("records of {bytes} bytes cannot be measured: their time stamps take {STAMP_BYTES}"));
        }
        let mut seeds = Random::new(config.seed);
        let writer = |(index, writer): (usize, &WriterConfig)| {
            let period_ns = 1e9 / writer.rate_per_s;
            let mut random = Random::new(seeds.next_u64());
            let offset = match config.arrivals {
                Arrivals::Regular => index as f64 * period_ns / config.writers.len() as f64,
                Arrivals::Poisson => 0.0,
                Arrivals::Bursts(records) => random.next_unit() * f64::from(records) * period_ns,
            };
            Writer {
                shard: writer.shard,
                period_ns,
                next_ns: 0,
                moved: VecDeque::new(),
                taken: 0,
                offset,
                random,
                blocked: false,
                first_seq: 0,
                outstanding: VecDeque::with_capacity(OUTSTANDING_ROOM),
            }
        };
        let mut writers: Vec<Writer> = config.writers.iter().enumerate().map(writer).collect();
        writers.iter_mut().for_each(|w| w.advance(start_ns, config.arrivals));
        let record = (0..config.record_bytes).map(|at| (at * 7 + at / 256) as u8).collect();
        let arrivals = config.arrivals;
        Ok(Load { writers, arrivals, start_ns, end_ns, tag, record, sent: 0, settled: 0, pushed_back: 0 })
    }

    /// Sends what is due, the earliest first, and returns how many records that were.
    ///
    /// # Errors
    /// When the log will never take a record, or numbers records otherwise than one after the other.
    pub fn send(&mut self, log: &mut impl Log, clock: &impl Clock) -> Result<usize, String> {
        let before = self.sent;
        while self.sent - before < SENDS_PER_TURN_MAX as u64 {
            let free = self.writers.iter_mut().filter(|w| !w.blocked);
            let due = free.filter_map(|w| w.due_ns(self.end_ns).map(|due_ns| (due_ns, w)));
            let Some((due_ns, writer)) = due.min_by_key(|(due_ns, _)| *due_ns) else { break };
            let now_ns = clock.now_ns();
            if due_ns > now_ns {
                break;
            }
            let stamp = Stamp { intended_ns: due_ns, sent_ns: now_ns, tag: self.tag };
            stamp.write(&mut self.record);
            match log.append(writer.shard, &self.record) {
                Ok(seq) => {
                    if writer.outstanding.is_empty() {
                        writer.first_seq = seq;
                    }
                    let expected = writer.first_seq + writer.outstanding.len() as u64;
                    if seq != expected {
                        return Err(format!("shard {} numbered a record {seq}, not {expected}", writer.shard));
                    }
                    writer.outstanding.push_back(Outstanding { stamp, settled: false });
                    writer.take(due_ns, self.start_ns, self.arrivals);
                    self.sent += 1;
                }
                Err(LogError::Full) => {
                    writer.blocked = true;
                    self.pushed_back += 1;
                }
                Err(LogError::Failed(why)) => return Err(format!("shard {}: {why}", writer.shard)),
            }
        }
        self.writers.iter_mut().for_each(|w| w.blocked = false);
        Ok((self.sent - before) as usize)
    }

    /// A record was acknowledged or refused: returns its stamp, or `None` when it is not one of this load's that waits.
    pub fn settle(&mut self, shard: ShardId, seq: u64) -> Option<Stamp> {
        let writer = self.writers.iter_mut().find(|w| w.shard == shard)?;
        let index = usize::try_from(seq.checked_sub(writer.first_seq)?).ok()?;
        let record = writer.outstanding.get_mut(index).filter(|r| !r.settled)?;
        record.settled = true;
        let stamp = record.stamp;
        while writer.outstanding.front().is_some_and(|r| r.settled) {
            writer.outstanding.pop_front();
            writer.first_seq += 1;
        }
        self.settled += 1;
        Some(stamp)
    }

    /// A record that was refused, and settled thereby, is to be sent to `shard` instead, with the intended time of its
    /// stamp: as soon as possible, since that has passed. Returns whether there is a writer for it.
    pub fn move_to(&mut self, shard: ShardId, stamp: Stamp) -> bool {
        let writer = self.writers.iter_mut().find(|w| w.shard == shard);
        writer.map(|writer| writer.moved.push_back(stamp.intended_ns)).is_some()
    }

    /// When the next record is due, in nanoseconds: in the past when the log pushed back. `None` when all are sent.
    pub fn next_ns(&self) -> Option<u64> {
        self.writers.iter().filter_map(|w| w.due_ns(self.end_ns)).min()
    }

    /// Records handed to the log, each time counted.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Of these, neither acknowledged nor refused yet.
    pub fn outstanding(&self) -> u64 {
        self.sent - self.settled
    }

    /// Times the log pushed back.
    pub fn pushed_back(&self) -> u64 {
        self.pushed_back
    }

    /// The tag on this load's records.
    pub fn tag(&self) -> u64 {
        self.tag
    }

    /// Takes what is left of the schedule without sending it and returns how many records that were.
    pub fn abandon(&mut self) -> u64 {
        let mut left = 0;
        for writer in &mut self.writers {
            while let Some(due_ns) = writer.due_ns(self.end_ns) {
                writer.take(due_ns, self.start_ns, self.arrivals);
                left += 1;
            }
        }
        left
    }
}

#[cfg(test)]
mod tests;
