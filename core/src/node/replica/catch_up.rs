//! Gives the log from disk to a replica that lacks what has left memory: one chunk at a time, from memory of its own, until
//! what it lacks is in the region again.

use std::sync::Arc;

use antelog_protocol::wire::entry::span_bytes;

use super::disk::{entries, entry_bytes};
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
    from: u64,
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
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct CatchUp {
    old: Box<dyn OldEntries>,
    staging: Arc<Region>,
    key: RegionKey,
    chunk: Option<Chunk>,
    /// Counts questions; an answer to an earlier one is of no use.
    asked: u64,
    /// Up to here there is no whole entry more than was given: it needs not be tried again.
    in_vain: u64,
}

/// Bytes of a chunk where records have at most so many.
pub(super) fn chunk_bytes(record_bytes_max: usize) -> usize {
    (2 * span_bytes(record_bytes_max)).max(CHUNK_BYTES_MIN).next_multiple_of(BLOCK_BYTES)
}

impl CatchUp {
    pub(super) fn new(old: Box<dyn OldEntries>, staging: Arc<Region>, key: RegionKey) -> CatchUp {
        CatchUp { old, staging, key, chunk: None, asked: 0, in_vain: 0 }
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

    fn ask(&mut self, number: u16, from: u64, to: u64) {
        if self.old.request(self.asked + 1, Request::Bytes { from, to }).is_ok() {
            self.asked += 1;
            self.chunk = Some(Chunk { number, from, state: State::Asked });
        }
    }

    /// Takes in what the disk has answered: why it cannot, if so.
    fn take(&mut self) -> Option<ReadError> {
        while let Some((token, read)) = self.old.poll() {
            if let Some(error) = self.take_answer(token, read) {
                return Some(error);
            }
        }
        None
    }

    fn take_answer(&mut self, token: u64, read: OldRead) -> Option<ReadError> {
        let asked = self.asked;
        let Chunk { state, from, .. } = self.chunk.as_mut().filter(|_| token == asked)?;
        match read {
            Ok((_, bytes)) => {
                // Whoever verifies it is told of whole entries only.
                let ends = entries(&bytes).map(|(at, header)| at + entry_bytes(&header));
                let whole = ends.take_while(|end| *end <= bytes.len()).last().unwrap_or(0);
                self.staging.put(0, &bytes[..whole]);
                *state = State::Read(whole);
                if whole == 0 {
                    self.in_vain = *from + bytes.len() as u64;
                    self.chunk = None;
                }
                None
            }
            Err(error) => {
                self.chunk = None;
                Some(error)
            }
        }
    }

    pub(super) fn waits(&mut self) -> bool {
        self.old.waits()
    }
}

impl<T: Transport> ReplicaAgent<T> {
    /// Notes which replicas have to be given the log from disk, and goes on giving it; returns the work done.
    pub(super) fn catch_up(&mut self) -> usize {
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
        let failed = catch_up.take();
        if catch_up.chunk.is_none()
            && let Some(peer) = self.peers.iter().find(|p| p.from_disk && p.mirror.connected())
        {
            let from = peer.mirror.sent();
            let room = (peer.mirror.drained() + lap).min(disk.store.written()).min(from + lap - from % lap);
            let to = room.min(from + catch_up.staging.len() as u64);
            if to > from && to != catch_up.in_vain {
                catch_up.ask(peer.number, from, to);
            }
        }
        let Some(chunk) = &mut catch_up.chunk else { return self.give_up_on(failed) };
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

    /// The disk does not give what a replica lacks: it begins anew from what there is.
    fn give_up_on(&mut self, failed: Option<ReadError>) -> usize {
        let Some(error) = failed else { return 0 };
        let text = format!("cannot give the log to another replica: {error}");
        let _ = self.notices.send(crate::node::mailbox::Notice::Warning { agent: self.name.clone(), text });
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
