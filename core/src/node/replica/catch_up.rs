//! Gives the log from disk to a replica that lacks what has left memory: one chunk at a time, from memory of its own, until
//! what it lacks is in the region again.

use std::sync::Arc;

use antelog_protocol::wire::entry::span_bytes;

use super::rot::PATIENCE_REPORTS;
use super::{Life, ReplicaAgent};
use crate::channel::mirror::LOG_REGION;
use crate::mem::Region;
use crate::storage::{BLOCK_BYTES, OldEntries, OldRead, ReadError, Request};
use crate::transport::{LocalRange, RegionKey, RemoteOffset, Transport};

/// Bytes of a chunk, if entries are no longer than half of that.
const CHUNK_BYTES_MIN: usize = 256 << 10;

/// Token of the placement of a chunk: no slot has this number.
pub(super) const CHUNK_TOKEN: u64 = u64::MAX;

/// A chunk on its way to a replica.
#[derive(Debug)]
struct Chunk {
    /// The replica's number.
    number: u16,
    /// Of the question to the disk.
    token: u64,
    from: u64,
    to: u64,
    state: State,
}

#[derive(Debug)]
enum State {
    /// The disk was asked.
    Asked,
    /// So many bytes are in the staging memory and have not left.
    Read(usize),
    /// They have left.
    Sent(usize),
    /// The disk does not give them.
    Failed(ReadError),
}

/// A replica that cannot be given what it lacks.
#[derive(Debug)]
struct Stuck {
    number: u16,
    /// From here on.
    from: u64,
    /// When to try again.
    retry_ns: u64,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct CatchUp {
    old: Box<dyn OldEntries>,
    staging: Arc<Region>,
    key: RegionKey,
    chunk: Option<Chunk>,
    /// Counts questions; an answer to one that nobody waits for is of no use.
    asked: u64,
    /// Up to here there is no whole entry more than was given: it needs not be tried again.
    in_vain: u64,
    stuck: Option<Stuck>,
}

/// Bytes of a chunk where records have at most so many.
pub(super) fn chunk_bytes(record_bytes_max: usize) -> usize {
    (2 * span_bytes(record_bytes_max)).max(CHUNK_BYTES_MIN).next_multiple_of(BLOCK_BYTES)
}

impl CatchUp {
    pub(super) fn new(old: Box<dyn OldEntries>, staging: Arc<Region>, key: RegionKey) -> CatchUp {
        CatchUp { old, staging, key, chunk: None, asked: 0, in_vain: 0, stuck: None }
    }

    /// A replica's connection, or its part in the log, is another: nothing is on its way to it any more.
    pub(super) fn forget(&mut self, number: u16) {
        if self.is_at(number) {
            self.chunk = None;
        }
    }

    fn is_at(&self, number: u16) -> bool {
        self.chunk.as_ref().is_some_and(|chunk| chunk.number == number)
    }

    /// As many bytes hold the longest entry, and go at a time.
    pub(super) fn chunk_bytes(&self) -> u64 {
        self.staging.len() as u64
    }

    /// Whether what a replica lacks can be read, as far as is known.
    pub(super) fn gives_to(&self, number: u16) -> bool {
        self.stuck.as_ref().is_none_or(|stuck| stuck.number != number)
    }

    fn waits_to_retry(&self, now_ns: u64, number: u16) -> bool {
        self.stuck.as_ref().is_some_and(|stuck| stuck.number == number && now_ns < stuck.retry_ns)
    }

    /// Asks the disk: the question's token, unless too much is asked for already.
    pub(super) fn ask(&mut self, request: Request) -> Option<u64> {
        self.old.request(self.asked + 1, request).ok()?;
        self.asked += 1;
        Some(self.asked)
    }

    /// Takes in what the disk has answered; the next answer that is for nobody who catches up.
    pub(super) fn take(&mut self) -> Option<(u64, OldRead)> {
        while let Some((token, read)) = self.old.poll() {
            let Some(chunk) = self.chunk.as_mut().filter(|chunk| chunk.token == token) else {
                return Some((token, read));
            };
            match read {
                Ok((begins, bytes)) if bytes.is_empty() || begins.at != chunk.from => {
                    self.in_vain = chunk.to;
                    self.chunk = None;
                }
                Ok((_, bytes)) => {
                    self.staging.put(0, &bytes);
                    chunk.state = State::Read(bytes.len());
                    let number = chunk.number;
                    self.stuck.take_if(|stuck| stuck.number == number);
                }
                Err(error) => chunk.state = State::Failed(error),
            }
        }
        None
    }

    pub(super) fn waits(&mut self) -> bool {
        self.old.waits()
    }
}

impl<T: Transport> ReplicaAgent<T> {
    /// Notes which replicas have to be given the log from disk, and goes on giving it; returns the work done.
    pub(super) fn catch_up(&mut self, now_ns: u64) -> usize {
        let (Some(disk), Some(catch_up)) = (&self.disk, &mut self.catch_up) else { return 0 };
        let Some(Life::Leading(leader)) = &mut self.life else { return 0 };
        let (head, tail, lap) = (leader.log.head(), leader.log.tail(), self.region.len() as u64);
        for peer in self.peers.iter_mut().filter(|p| p.mirror.connected()) {
            if peer.mirror.sent() < head {
                peer.from_disk = true;
            } else if peer.mirror.drained() + lap - lap / 8 >= tail && !catch_up.is_at(peer.number) {
                // From here on memory can wait for it.
                peer.from_disk = false;
            }
        }
        if catch_up.chunk.is_none()
            && let Some(peer) = self
                .peers
                .iter()
                .find(|p| p.from_disk && p.mirror.connected() && !catch_up.waits_to_retry(now_ns, p.number))
        {
            let (number, from) = (peer.number, peer.mirror.sent());
            let room = (peer.mirror.drained() + lap).min(disk.store.written()).min(from + lap - from % lap);
            let to = room.min(from + catch_up.staging.len() as u64);
            // What it is given, it verifies, and ends when that is not good: what is rotten must not leave.
            if to > from
                && to != catch_up.in_vain
                && let Some(token) = catch_up.ask(Request::Range { from, to, mended: true })
            {
                catch_up.chunk = Some(Chunk { number, token, from, to, state: State::Asked });
            }
        }
        let Some(chunk) = &mut catch_up.chunk else { return 0 };
        if let State::Failed(error) = chunk.state {
            let (number, from) = (chunk.number, chunk.from);
            catch_up.chunk = None;
            return self.give_up_on(now_ns, number, from, error);
        }
        let State::Read(len) = chunk.state else { return 0 };
        let Some(peer) = self.peers.iter().find(|p| p.number == chunk.number) else { return 0 };
        let local = LocalRange { region: catch_up.key, offset: 0, len };
        let remote = RemoteOffset { region: LOG_REGION, offset: (chunk.from % lap) as usize };
        if self.transport.write(peer.id(), local, remote, None, Some(CHUNK_TOKEN)).is_err() {
            return 0;
        }
        chunk.state = State::Sent(len);
        1
    }

    /// The disk does not give what a replica lacks: it is tried again later, or the replica begins anew from what there is.
    fn give_up_on(&mut self, now_ns: u64, number: u16, from: u64, error: ReadError) -> usize {
        let Some(catch_up) = &mut self.catch_up else { return 0 };
        let retry_ns = now_ns + PATIENCE_REPORTS * self.config.report_every_ns;
        let before = catch_up.stuck.replace(Stuck { number, from, retry_ns });
        if before.is_none_or(|before| (before.number, before.from) != (number, from)) {
            self.warn(format!(
                "replica {number} cannot be given the log: {error}; it is tried again until the disk is repaired, or the \
                 log is trimmed beyond"
            ));
        }
        if matches!(error, ReadError::Trimmed { .. }) {
            self.have_join_anew(now_ns, number);
        }
        1
    }

    /// A chunk is placed.
    pub(super) fn on_chunk_placed(&mut self, now_ns: u64, number: u16) {
        let Some(catch_up) = &mut self.catch_up else { return };
        let Some(Chunk { from, state: State::Sent(len), .. }) = catch_up.chunk.take_if(|c| c.number == number) else {
            return;
        };
        let Some(peer) = self.peers.iter_mut().find(|p| p.number == number) else { return };
        peer.mirror.on_caught_up(from + len as u64);
        let (id, Some(Life::Leading(leader))) = (peer.id(), &self.life) else { return };
        if peer.mirror.sent() == leader.log.tail() {
            // Nothing follows that would say so.
            let lsn = leader.log.next_lsn();
            self.on_log_placed(now_ns, id, lsn);
        }
    }
}
