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
const BURST_MAX: usize = 64;
/// Unacknowledged records per shard that a table has room for before it must grow.
const OUTSTANDING_ROOM: usize = 4096;

/// When records fall due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrivals {
    /// At equal distances; the shards' phases are spread evenly over one distance.
    Regular,
    /// Independently of each other: exponential distances, from the seed.
    Poisson,
}

/// What to send.
#[derive(Clone, Debug)]
pub struct LoadConfig {
    /// The shards to write to.
    pub shards: Vec<ShardId>,
    /// Records per second and shard.
    pub rate_per_s: f64,
    /// Bytes per record, at least [`STAMP_BYTES`].
    pub record_bytes: usize,
    /// When records fall due.
    pub arrivals: Arrivals,
    /// Seed of [`Arrivals::Poisson`].
    pub seed: u64,
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
    /// Intended time of the next record, in nanoseconds.
    next_ns: u64,
    /// Records taken from the schedule.
    taken: u64,
    /// Nanoseconds from the start: the phase of a regular writer, the last arrival of a Poisson one. Kept with its
    /// fraction so that rounding does not add up over a run.
    offset: f64,
    random: Random,
    /// The log pushed back this turn.
    blocked: bool,
    first_seq: u64,
    outstanding: VecDeque<Outstanding>,
}

impl Writer {
    /// Takes the next intended time from the schedule.
    fn advance(&mut self, start_ns: u64, period_ns: f64, arrivals: Arrivals) {
        let offset = match arrivals {
            Arrivals::Regular => self.offset + self.taken as f64 * period_ns,
            Arrivals::Poisson => {
                self.offset -= self.random.next_unit().ln() * period_ns;
                self.offset
            }
        };
        self.taken += 1;
        self.next_ns = start_ns + offset.round() as u64;
    }
}

/// The writers of one client.
pub struct Load {
    writers: Vec<Writer>,
    period_ns: f64,
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
        if config.shards.is_empty() {
            return Err("the load names no shard to write to".to_owned());
        }
        if !(config.rate_per_s > 0.0 && config.rate_per_s <= 1e9) {
            return Err(format!("a rate of {} records/s per shard cannot be sent; give 0 < rate", config.rate_per_s));
        }
        if config.record_bytes < STAMP_BYTES {
            let bytes = config.record_bytes;
            return Err(format!("records of {bytes} bytes cannot be measured: their time stamps take {STAMP_BYTES}"));
        }
        let period_ns = 1e9 / config.rate_per_s;
        let phase_ns = period_ns / config.shards.len() as f64;
        let mut seeds = Random::new(config.seed);
        let writer = |(index, shard): (usize, &ShardId)| Writer {
            shard: *shard,
            next_ns: 0,
            taken: 0,
            offset: if config.arrivals == Arrivals::Regular { index as f64 * phase_ns } else { 0.0 },
            random: Random::new(seeds.next_u64()),
            blocked: false,
            first_seq: 0,
            outstanding: VecDeque::with_capacity(OUTSTANDING_ROOM),
        };
        let mut writers: Vec<Writer> = config.shards.iter().enumerate().map(writer).collect();
        writers.iter_mut().for_each(|w| w.advance(start_ns, period_ns, config.arrivals));
        let record = (0..config.record_bytes).map(|at| (at * 7 + at / 256) as u8).collect();
        let arrivals = config.arrivals;
        Ok(Load { writers, period_ns, arrivals, start_ns, end_ns, tag, record, sent: 0, settled: 0, pushed_back: 0 })
    }

    /// Sends what is due, the earliest first, and returns how many records that were.
    ///
    /// # Errors
    /// When the log will never take a record, or numbers records otherwise than one after the other.
    pub fn send(&mut self, log: &mut impl Log, clock: &impl Clock) -> Result<usize, String> {
        let before = self.sent;
        while self.sent - before < BURST_MAX as u64 {
            let due = self.writers.iter_mut().filter(|w| !w.blocked).min_by_key(|w| w.next_ns);
            let Some(writer) = due else { break };
            let now_ns = clock.now_ns();
            if writer.next_ns > now_ns || writer.next_ns >= self.end_ns {
                break;
            }
            let stamp = Stamp { intended_ns: writer.next_ns, sent_ns: now_ns, tag: self.tag };
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
                    writer.advance(self.start_ns, self.period_ns, self.arrivals);
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

    /// When the next record is due, in nanoseconds: in the past when the log pushed back. `None` when all are sent.
    pub fn next_ns(&self) -> Option<u64> {
        self.writers.iter().map(|w| w.next_ns).min().filter(|next| *next < self.end_ns)
    }

    /// Records handed to the log.
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
            while writer.next_ns < self.end_ns {
                writer.advance(self.start_ns, self.period_ns, self.arrivals);
                left += 1;
            }
        }
        left
    }
}

#[cfg(test)]
mod tests;
