//! Replicates a shard's log to one backup: every byte of the region goes to the same offset of the backup's region.
//!
//! Entries appended in one duty cycle are contiguous and leave as one write (two at the end of a lap) straight from the
//! region. `Placed` comes back with the lsn as token. A word tells the backup how far the log reaches, for it to verify:
//! only what is placed, and not for every write but when nothing is under way or enough has gathered, since no record
//! waits for that and each word would delay the one behind it. After a lost connection everything that was not placed is
//! written again, to the same place: writing twice does no harm. See "Replication" in DESIGN.md.

use std::collections::VecDeque;
use std::sync::Arc;

use antelog_protocol::Lsn;

use crate::mem::Region;
use crate::transport::{LocalRange, PeerId, RegionKey, RemoteOffset, Transport};

/// Index of the log region among the regions that a replica exposes to another.
pub const LOG_REGION: u16 = 0;
/// Index of the control region of this pair of replicas among them.
pub const CONTROL_REGION: u16 = 1;
/// Bytes of a control region.
pub const CONTROL_BYTES: usize = 64;
/// In a control region, written by a primary: end of the log as it is placed, in absolute bytes.
pub const END_AT: usize = 0;
/// In a control region, written by a backup: up to here it has verified the log, knows that it is bound, and lets it be
/// overwritten, in absolute bytes.
pub const DRAINED_AT: usize = 8;
/// In a control region, written by a backup whose log counts when it is flushed to disk: the slot below which it is. The
/// newest word counts, on this connection and on the next of the same life.
pub const FLUSHED_AT: usize = 16;

/// In a control region, written by a backup whose disk is full: the offset up to which it has room, in absolute bytes. 0: as
/// much as is wanted.
pub const ROOM_AT: usize = 24;

/// Largest single write, in bytes.
const WRITE_BYTES_MAX: u64 = 256 << 10;
/// Bytes placed that are worth a word to the backup while more is under way, at most; a sixteenth of a small region.
const ANNOUNCE_BYTES: u64 = 64 << 10;
/// Most flushes whose placement is outstanding.
const MARKS_MAX: usize = 1024;

/// The sending side of replication to one backup.
#[derive(Debug)]
pub struct Mirror {
    peer: PeerId,
    region_bytes: u64,
    source: RegionKey,
    control: Arc<Region>,
    connected: bool,
    /// End of what was handed to the transport, in absolute bytes.
    sent: u64,
    /// The end last announced to the backup: `announced <= placed <= sent`.
    announced: u64,
    /// End of what is placed, in absolute bytes: where a new connection resumes.
    placed: u64,
    /// Ends of flushes under way with the slot after each, oldest first.
    marks: VecDeque<(u64, Lsn)>,
}

impl Mirror {
    /// A mirror to `peer` of the log region registered as `source`. `control` is the region exposed to the backup.
    pub fn new(peer: PeerId, source: RegionKey, region_bytes: usize, control: Arc<Region>) -> Mirror {
        Mirror {
            peer,
            region_bytes: region_bytes as u64,
            source,
            control,
            connected: false,
            sent: 0,
            announced: 0,
            placed: 0,
            marks: VecDeque::with_capacity(MARKS_MAX),
        }
    }

    /// The backup.
    pub fn peer(&self) -> PeerId {
        self.peer
    }

    /// The region the backup may write.
    pub fn control(&self) -> &Arc<Region> {
        &self.control
    }

    /// Whether the backup is connected.
    pub fn connected(&self) -> bool {
        self.connected
    }

    /// Up to here the backup lets its log be overwritten, in absolute bytes.
    pub fn drained(&self) -> u64 {
        self.control.load_u64(DRAINED_AT)
    }

    /// The slot below which the backup has flushed its log.
    pub fn flushed(&self) -> Lsn {
        Lsn(self.control.load_u64(FLUSHED_AT))
    }

    /// Up to here the backup's disk has room, in absolute bytes, if it is full.
    pub fn disk_room(&self) -> u64 {
        match self.control.load_u64(ROOM_AT) {
            0 => u64::MAX,
            at => at,
        }
    }

    /// End of what was handed to the transport, in absolute bytes.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Everything up to `at` was placed by other means than [`pump`](Self::pump), which goes on from there.
    pub fn on_caught_up(&mut self, at: u64) {
        (self.sent, self.placed) = (at, at);
    }

    /// Bytes appended that the transport has not taken yet.
    pub fn lag_bytes(&self, tail: u64) -> u64 {
        tail - self.sent
    }

    /// The replica's log is good up to here, and goes on from here.
    pub fn restart(&mut self, at: u64) {
        self.connected = true;
        (self.sent, self.placed, self.announced) = (at, at, at);
        self.marks.clear();
    }

    /// A new connection: everything not placed is written again.
    pub fn on_connected(&mut self) {
        self.connected = true;
        self.sent = self.placed;
        self.announced = 0;
        self.marks.clear();
    }

    /// The connection is lost.
    pub fn on_down(&mut self) {
        self.connected = false;
    }

    /// The transport reports `Placed` with this token; returns the slot below which everything is placed.
    pub fn on_placed(&mut self, token: u64) -> Lsn {
        let lsn = Lsn(token);
        while let Some(&(end, _)) = self.marks.front().filter(|(_, mark)| *mark <= lsn) {
            self.placed = end;
            self.marks.pop_front();
        }
        lsn
    }

    /// Issues what was appended up to `tail`, the log's end, before slot `next_lsn`. What the transport does not take
    /// is issued by a later call.
    pub fn pump<T: Transport>(&mut self, transport: &mut T, tail: u64, next_lsn: Lsn) {
        if !self.connected || (self.sent == tail && self.announced == tail) {
            return;
        }
        self.write_entries(transport, tail, next_lsn);
        self.announce(transport);
    }

    /// Tells the backup how far its log reaches, if that is worth a word.
    pub fn announce<T: Transport>(&mut self, transport: &mut T) {
        if !self.connected {
            // What is placed is of an earlier connection: whoever is to begin anew must not take it for what it is given.
            return;
        }
        let untold = self.placed - self.announced;
        let is_idle = self.marks.is_empty() && self.sent == self.placed;
        if untold > 0 && (is_idle || untold >= ANNOUNCE_BYTES.min(self.region_bytes / 16)) {
            let remote = RemoteOffset { region: CONTROL_REGION, offset: END_AT };
            if transport.write_inline(self.peer, &self.placed.to_le_bytes(), remote, Some(0)).is_ok() {
                self.announced = self.placed;
            }
        }
    }

    fn write_entries<T: Transport>(&mut self, transport: &mut T, tail: u64, next_lsn: Lsn) {
        while self.sent < tail {
            let offset = self.sent % self.region_bytes;
            let len = (tail - self.sent).min(self.region_bytes - offset).min(WRITE_BYTES_MAX);
            let last = self.sent + len == tail;
            if last && self.marks.len() == MARKS_MAX {
                // The write that completes a flush carries its token; it waits until there is room to remember it.
                return;
            }
            let token = last.then_some(next_lsn.0);
            let local = LocalRange { region: self.source, offset: offset as usize, len: len as usize };
            let remote = RemoteOffset { region: LOG_REGION, offset: offset as usize };
            if transport.write(self.peer, local, remote, None, token).is_err() {
                return;
            }
            self.sent += len;
            if token.is_some() {
                self.marks.push_back((self.sent, next_lsn));
            }
        }
    }
}
