//! The writes under way: whole blocks straight from the log's region, and copies of the last, unfinished block and of
//! headers.

use std::io;
use std::sync::Arc;

use super::catalog::Segment;
use super::disk::{BLOCK_BYTES, Disk, Name, Op};
use super::format::SegmentHeader;
use super::store::{Active, LogStore, Passing, WRITE};
use crate::mem::Region;

/// Writes under way at a time.
const WRITES_MAX: usize = 16;

/// Longest write, in bytes.
const WRITE_BYTES_MAX: u64 = 1 << 20;

const BLOCK: u64 = BLOCK_BYTES as u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    UnderWay,
    /// To be given to the disk again at once.
    Again,
    /// To be given to the disk again when it may have room.
    Waits,
    Done,
}

/// A write, from the moment it is decided until everything before it is done too.
#[derive(Clone, Copy, Debug)]
struct Write {
    /// Of the segment.
    start: u64,
    file: usize,
    at: u64,
    /// Of the region, or of the slot's own block.
    staged: bool,
    offset: usize,
    len: usize,
    done: usize,
    /// The log's end when this and all before are done.
    to: u64,
    state: State,
    /// It met a full disk and has not succeeded since.
    full: bool,
}

/// A ring of writes in the log's order.
#[derive(Debug)]
pub(super) struct Writes {
    ring: [Option<Write>; WRITES_MAX],
    /// Counts writes that are done with; the oldest is at this number modulo the ring.
    oldest: u64,
    next: u64,
    /// A block for each write.
    blocks: Arc<Region>,
}

impl Writes {
    pub(super) fn new() -> io::Result<Writes> {
        let blocks = Region::new(WRITES_MAX * BLOCK_BYTES)?;
        Ok(Writes { ring: [None; WRITES_MAX], oldest: 0, next: 0, blocks })
    }

    fn is_full(&self) -> bool {
        self.next - self.oldest == WRITES_MAX as u64
    }

    pub(super) fn is_empty(&self) -> bool {
        self.next == self.oldest
    }

    /// Forgets everything; nothing may be under way.
    pub(super) fn clear(&mut self) {
        self.ring = [None; WRITES_MAX];
        self.oldest = self.next;
    }

    /// Whether a write met a full disk and has not succeeded since.
    pub(super) fn is_held_up(&self) -> bool {
        !self.is_empty() && self.ring.iter().flatten().any(|write| write.full && write.state != State::Done)
    }

    /// Lets what waited for room try again.
    pub(super) fn retry(&mut self) {
        for write in self.ring.iter_mut().flatten().filter(|w| w.state == State::Waits) {
            write.state = State::Again;
        }
    }
}

impl<D: Disk> LogStore<D> {
    pub(super) fn on_written(&mut self, at: usize, result: i32) {
        let mut write = self.writes.ring[at].expect("a write is under way here");
        let rest = write.len - write.done;
        write.state = match result {
            0 => {
                self.fail(&format!("write {}", Name::Segment(write.start)), libc::EIO);
                State::Waits
            }
            1.. if result as usize >= rest => State::Done,
            1.. => {
                // A short write goes on at the block it ended in.
                write.done += result as usize / BLOCK_BYTES * BLOCK_BYTES;
                State::Again
            }
            _ => match self.passes(result, "write", Name::Segment(write.start)) {
                Passing::Again => State::Again,
                Passing::Later | Passing::Never => State::Waits,
            },
        };
        write.full |= write.state == State::Waits;
        self.writes.ring[at] = Some(write);
        if write.state == State::Done
            && let Some(segment) = self.active.iter_mut().find(|s| s.start == write.start)
        {
            segment.dirty = true;
        }
        self.settle_writes();
    }

    /// Moves the written end over the oldest writes that are done.
    fn settle_writes(&mut self) {
        while !self.writes.is_empty() {
            let at = (self.writes.oldest % WRITES_MAX as u64) as usize;
            match self.writes.ring[at] {
                Some(Write { state: State::Done, to, .. }) => {
                    self.written = to;
                    self.writes.ring[at] = None;
                    self.writes.oldest += 1;
                }
                _ => break,
            }
        }
        self.catalog.set_written(self.written);
    }

    /// Gives the disk all writes it can have now.
    pub(super) fn pump_writes(&mut self) {
        for at in 0..WRITES_MAX {
            if self.writes.ring[at].is_some_and(|write| write.state == State::Again) {
                self.give(at);
            }
        }
        while !self.writes.is_full() && self.write_next() {}
        if self.segment_start(self.submitted) > self.segment_start(self.later.at) {
            // A finished segment is made durable without being asked, so that its file can be closed.
            self.flush();
        }
    }

    /// Decides the next write; false when there is none now.
    fn write_next(&mut self) -> bool {
        let from = self.submitted;
        if self.requested.at == from && !self.active.iter().any(|s| s.header_due && s.first.is_some()) {
            return false;
        }
        let start = self.segment_start(from);
        let Some(which) = self.active.iter().position(|segment| segment.start == start) else { return false };
        if self.active[which].header_due {
            return self.write_header(which);
        }
        if !from.is_multiple_of(BLOCK) && self.written != from {
            // The block was written in part, and two writes of one block could be done in either order.
            return false;
        }
        let block = from - from % BLOCK;
        let limit = self.requested.at.min(start + self.layout.segment_bytes);
        let lap_end = (block / self.layout.region_bytes + 1) * self.layout.region_bytes;
        let end = (limit - limit % BLOCK).min(lap_end).min(block + WRITE_BYTES_MAX);
        let (file, at) = (self.active[which].file, Self::file_at(start, block));
        let offset = (block % self.layout.region_bytes) as usize;
        let state = State::Again;
        if end > from {
            let len = (end - block) as usize;
            self.add(Write { start, file, at, staged: false, offset, len, done: 0, to: end, state, full: false });
            return true;
        }
        // The last block is written when that is worth it: before a sync, or when the disk has nothing better to do.
        let due = self.wanted.at > from || self.writes.is_empty();
        if limit == from || !due {
            return false;
        }
        let own = self.own_block();
        let mut bytes = [0; BLOCK_BYTES];
        self.region.get(offset, &mut bytes[..(limit - block) as usize]);
        self.writes.blocks.put(own, &bytes);
        self.add(Write {
            start,
            file,
            at,
            staged: true,
            offset: own,
            len: BLOCK_BYTES,
            done: 0,
            to: limit,
            state,
            full: false,
        });
        true
    }

    fn write_header(&mut self, which: usize) -> bool {
        let Active { start, file, first, begun_ms, .. } = self.active[which];
        let segment = match first {
            Some(first) => Segment { start, first, begun_ms },
            None => {
                let known = self.firsts.front().filter(|(of, _)| *of == start).map(|(_, first)| *first);
                let Some(first) = known else { return false };
                self.firsts.pop_front();
                let segment = Segment { start, first, begun_ms: self.wall_ms() };
                self.active[which].first = Some(first);
                self.active[which].begun_ms = segment.begun_ms;
                self.catalog.segments().push(segment);
                self.told = self.flushed.at;
                segment
            }
        };
        self.active[which].header_due = false;
        let header = self.header(&segment).encode();
        let own = self.own_block();
        let mut bytes = [0; BLOCK_BYTES];
        bytes[..header.len()].copy_from_slice(&header);
        self.writes.blocks.put(own, &bytes);
        let to = self.submitted;
        let state = State::Again;
        self.add(Write {
            start,
            file,
            at: 0,
            staged: true,
            offset: own,
            len: BLOCK_BYTES,
            done: 0,
            to,
            state,
            full: false,
        });
        true
    }

    /// What the header of a segment says now.
    pub(super) fn header(&self, segment: &Segment) -> SegmentHeader {
        let Segment { start, first, begun_ms } = *segment;
        let cluster = self.cluster.clone();
        let (shard, layout, flushed) = (self.chain.shard, self.layout, self.flushed.at);
        SegmentHeader { cluster, shard, layout, start, first, flushed, begun_ms }
    }

    /// Offset of the next write's own block.
    fn own_block(&self) -> usize {
        (self.writes.next % WRITES_MAX as u64) as usize * BLOCK_BYTES
    }

    fn add(&mut self, write: Write) {
        let at = (self.writes.next % WRITES_MAX as u64) as usize;
        self.writes.next += 1;
        self.submitted = write.to;
        self.writes.ring[at] = Some(write);
        self.give(at);
    }

    fn give(&mut self, at: usize) {
        let Some(write) = &mut self.writes.ring[at] else { return };
        write.state = State::UnderWay;
        let Write { file, at: to, staged, offset, len, done, .. } = *write;
        let source = if staged { self.writes.blocks.clone() } else { self.region.clone() };
        let op = Op::Write { file, at: to + done as u64, source: &source, offset: offset + done, len: len - done };
        self.submit(op, WRITE | at as u64);
    }
}
