//! The sending side of a pair: requests staged for the next doorbell, and the accounts that keep queues from overrunning.
//!
//! * **Doorbells.** Up to [`DOORBELL_MAX`] requests are chained and handed over at once, at the latest by `flush`.
//! * **Selective signalling.** Of the requests of a doorbell only the last that carries a token completes on its own; its
//!   completion covers all before it. Without tokens every quarter of the queue is signalled, so that slots come back.
//! * **Staging.** Small operations are copied into registered memory before the call returns; the device takes them along
//!   inline when they are short enough, and fetches them otherwise. A completion frees what it covers.
//! * **Credits.** A message or notification uses up a receive of the peer, of which we have as many as it posted and
//!   returned since.

use std::collections::VecDeque;
use std::sync::Arc;

use antelog_core::mem::Region;
use antelog_core::transport::{Full, SEND_BYTES_MAX};
use antelog_protocol::mutant::{Mutant, planted};

use crate::provider::{Local, MemoryId, Operation, RemoteMemory, Request};

/// Most requests handed over with one doorbell.
pub const DOORBELL_MAX: usize = 16;

/// Fewest requests of a queue: with fewer, a doorbell might not fit.
pub const REQUESTS_MIN: usize = 2 * DOORBELL_MAX;

/// Staged bytes start at multiples of this, so that neighbours share no cache line with bytes under way.
const STAGING_ALIGN: u64 = 64;

/// Length of the probe: the payload of the longest packet there is. A path that loses long packets only, as where a switch
/// takes shorter ones than the ports do, is found out by it.
const PROBE_BYTES: usize = 4096;

/// What a signalled request's completion says.
#[derive(Clone, Copy, Debug)]
struct Mark {
    request: u64,
    token: Option<u64>,
    staging_end: u64,
}

/// What an operation was, for the counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Issued {
    /// Requests it took.
    pub requests: usize,
    /// Those whose bytes go along inline.
    pub inline: usize,
}

/// The sending side. Positions are absolute counts, so nothing wraps.
#[derive(Debug)]
pub struct Output {
    label: u64,
    depth: u64,
    inline_bytes: usize,
    message_bytes_max: usize,
    staging: Arc<Region>,
    staging_memory: MemoryId,
    staging_bytes: u64,

    staged: Vec<Request>,
    /// Token of the newest staged request that has one, and its place in `staged`.
    newest_token: Option<(usize, u64)>,
    /// Requests ever staged.
    issued: u64,
    /// Of those, covered by a completion.
    done: u64,
    /// The newest signalled request, plus one.
    signalled: u64,
    marks: VecDeque<Mark>,
    staging_head: u64,
    staging_tail: u64,
    /// Staging position when the last signalled request was staged.
    staging_signalled: u64,
    /// Receives of the peer used, and those it granted.
    used: u64,
    granted: u64,
    initial: u64,

    remote: Vec<RemoteMemory>,
}

/// Sizes of an output.
#[derive(Clone, Copy, Debug)]
pub struct OutputSizes {
    /// Requests that may be outstanding; the queue has a slot more, for the last.
    pub depth: usize,
    /// Bytes a request takes along.
    pub inline_bytes: usize,
    /// Longest request.
    pub message_bytes_max: usize,
}

impl Output {
    /// An output whose requests' ids are `label` plus a count of 31 bits. `staging` is registered as `memory`.
    pub fn new(label: u64, sizes: OutputSizes, staging: Arc<Region>, memory: MemoryId) -> Output {
        let staging_bytes = staging.len() as u64;
        assert!(sizes.depth >= REQUESTS_MIN, "a queue of {} requests is too short", sizes.depth);
        assert!(staging_bytes.is_multiple_of(STAGING_ALIGN), "staging memory comes in lines");
        // Half may be under way without a signal, and a message may waste as much as it takes at the end.
        assert!(staging_bytes >= 4 * SEND_BYTES_MAX as u64, "staging memory of {staging_bytes} bytes is too short");
        Output {
            label,
            depth: sizes.depth as u64,
            inline_bytes: sizes.inline_bytes,
            message_bytes_max: sizes.message_bytes_max,
            staging,
            staging_memory: memory,
            staging_bytes,
            staged: Vec::with_capacity(DOORBELL_MAX),
            newest_token: None,
            issued: 0,
            done: 0,
            signalled: 0,
            marks: VecDeque::with_capacity(sizes.depth),
            staging_head: 0,
            staging_tail: 0,
            staging_signalled: 0,
            used: 0,
            granted: 0,
            initial: 0,
            remote: Vec::new(),
        }
    }

    /// The peer's regions, and how many receives it has posted for us.
    pub fn set_remote(&mut self, remote: Vec<RemoteMemory>, receives: u32) {
        self.remote = remote;
        self.initial = receives.into();
        self.granted = self.initial;
    }

    /// The peer says how many receives it has posted again since the start, modulo 2^32. False if that is impossible.
    #[must_use]
    pub fn on_credit(&mut self, count: u32) -> bool {
        let known = self.granted - self.initial;
        let more = u64::from(count.wrapping_sub(known as u32));
        let granted = self.granted + more;
        if granted > self.used + self.initial {
            return false;
        }
        self.granted = granted;
        true
    }

    /// The staging memory, once the queue pair is gone.
    pub fn into_staging(self) -> (Arc<Region>, MemoryId) {
        (self.staging, self.staging_memory)
    }

    fn has_slots(&self, requests: usize) -> bool {
        self.issued - self.done + requests as u64 <= self.depth
    }

    /// Room for `len` staged bytes, in one piece; where it starts. Reserves nothing.
    fn staging_room(&self, len: usize) -> Option<u64> {
        let len = (len as u64).next_multiple_of(STAGING_ALIGN);
        let at = self.staging_head % self.staging_bytes;
        let start = if at + len <= self.staging_bytes {
            self.staging_head
        } else {
            self.staging_head - at + self.staging_bytes
        };
        (start + len <= self.staging_tail + self.staging_bytes).then_some(start)
    }

    fn stage_bytes(&mut self, start: u64, bytes: &[u8]) -> Local {
        let offset = (start % self.staging_bytes) as usize;
        self.staging.put(offset, bytes);
        self.staging_head = start + (bytes.len() as u64).next_multiple_of(STAGING_ALIGN);
        Local { memory: self.staging_memory, offset, len: bytes.len() }
    }

    fn stage(&mut self, operation: Operation, local: Local, token: Option<u64>, inline: bool) {
        let id = self.label | (self.issued & 0x7FFF_FFFF);
        if let Some(token) = token {
            self.newest_token = Some((self.staged.len(), token));
        }
        self.staged.push(Request { id, operation, local, signalled: false, inline });
        self.issued += 1;
    }

    /// Where `offset` of the peer's region is. A place outside is passed on as it is, under a key that opens nothing if
    /// there is no such region: the peer's device refuses it, and both sides learn that the rules were broken.
    fn place(&self, region: u16, offset: usize) -> (u64, u32) {
        let offset = offset as u64;
        match self.remote.get(usize::from(region)) {
            Some(memory) => (memory.address.wrapping_add(offset), memory.rkey),
            None => (offset, 0),
        }
    }

    /// A one-sided write of registered memory. Splits what is longer than one message.
    ///
    /// # Errors
    /// [`Full`], without effect. The caller hands over what is staged when [`is_batch`](Self::is_batch) says so, before.
    pub fn write(
        &mut self,
        local: Local,
        remote: (u16, usize),
        notify: Option<u32>,
        token: Option<u64>,
    ) -> Result<Issued, Full> {
        let parts = local.len.div_ceil(self.message_bytes_max).max(1);
        if !self.has_slots(parts) || (notify.is_some() && self.used == self.granted) {
            return Err(Full);
        }
        assert!(parts <= DOORBELL_MAX, "a write of {} bytes takes more than one doorbell", local.len);
        self.used += u64::from(notify.is_some());
        let (mut at, mut left) = (local.offset, local.len);
        for part in 0..parts {
            let len = left.min(self.message_bytes_max);
            let is_last = part + 1 == parts;
            let (address, rkey) = self.place(remote.0, remote.1.wrapping_add(at - local.offset));
            let operation = Operation::Write { address, rkey, imm: notify.filter(|_| is_last) };
            let piece = Local { memory: local.memory, offset: at, len };
            self.stage(operation, piece, token.filter(|_| is_last), false);
            (at, left) = (at + len, left - len);
        }
        Ok(Issued { requests: parts, inline: 0 })
    }

    /// A one-sided write of a few bytes that are copied.
    ///
    /// # Errors
    /// [`Full`], without effect.
    pub fn write_inline(&mut self, bytes: &[u8], remote: (u16, usize), notify: Option<u32>) -> Result<Issued, Full> {
        if !self.has_slots(1) || (notify.is_some() && self.used == self.granted) {
            return Err(Full);
        }
        let start = self.staging_room(bytes.len()).ok_or(Full)?;
        self.used += u64::from(notify.is_some());
        let (address, rkey) = self.place(remote.0, remote.1);
        let local = self.stage_bytes(start, bytes);
        let inline = bytes.len() <= self.inline_bytes;
        self.stage(Operation::Write { address, rkey, imm: notify }, local, None, inline);
        Ok(Issued { requests: 1, inline: inline.into() })
    }

    /// A message, copied.
    ///
    /// # Errors
    /// [`Full`], without effect.
    pub fn send(&mut self, bytes: &[u8]) -> Result<Issued, Full> {
        if !self.has_slots(1) || self.used == self.granted {
            return Err(Full);
        }
        let start = self.staging_room(bytes.len()).ok_or(Full)?;
        self.used += 1;
        let local = self.stage_bytes(start, bytes);
        let inline = bytes.len() <= self.inline_bytes;
        self.stage(Operation::Send { imm: None }, local, None, inline);
        Ok(Issued { requests: 1, inline: inline.into() })
    }

    /// An empty message that returns credit: it needs none itself.
    ///
    /// # Errors
    /// [`Full`], without effect.
    pub fn send_credit(&mut self, count: u32) -> Result<(), Full> {
        if !self.has_slots(1) {
            return Err(Full);
        }
        let local = Local { memory: self.staging_memory, offset: 0, len: 0 };
        self.stage(Operation::Send { imm: Some(count) }, local, None, false);
        Ok(())
    }

    /// The first message of all: it needs no credit either.
    ///
    /// # Errors
    /// [`Full`], without effect.
    pub fn send_probe(&mut self) -> Result<(), Full> {
        let start = self.staging_room(PROBE_BYTES).filter(|_| self.has_slots(1)).ok_or(Full)?;
        let local = self.stage_bytes(start, &[0; PROBE_BYTES]);
        self.stage(Operation::Send { imm: Some(0) }, local, None, false);
        Ok(())
    }

    /// An empty request for the slot that [`OutputSizes::depth`] leaves, instead of what is staged.
    pub fn last_request(&mut self) -> Request {
        self.staged.clear();
        let local = Local { memory: self.staging_memory, offset: 0, len: 0 };
        self.stage(Operation::Send { imm: None }, local, None, false);
        let mut last = self.staged[0];
        last.signalled = true;
        last
    }

    /// A doorbell's worth is staged: hand it over before staging `more` requests.
    pub fn is_batch(&self, more: usize) -> bool {
        self.staged.len() + more > DOORBELL_MAX
    }

    /// Requests a write of so many bytes takes.
    pub fn parts(&self, len: usize) -> usize {
        len.div_ceil(self.message_bytes_max).max(1)
    }

    /// What is staged, with signals set where completions are needed; empty if nothing is. `probe`: signal the last one
    /// whatever it is. Call [`on_handed_over`](Self::on_handed_over) afterwards.
    pub fn doorbell(&mut self, probe: bool) -> (&[Request], usize) {
        let count = self.staged.len();
        if count == 0 {
            return (&[], 0);
        }
        let first = self.issued - count as u64;
        let mut signals = 0;
        if let Some((place, token)) = self.newest_token.take() {
            self.signal(first, place, Some(token));
            signals += 1;
        }
        let is_silent_long = self.issued - self.signalled >= self.depth / 4;
        let is_staging_short = self.staging_head - self.staging_signalled >= self.staging_bytes / 2;
        let is_last_signalled = self.signalled == self.issued;
        if !is_last_signalled && (probe || is_silent_long || is_staging_short) {
            self.signal(first, count - 1, None);
            signals += 1;
        }
        (&self.staged, signals)
    }

    fn signal(&mut self, first: u64, place: usize, token: Option<u64>) {
        let request = first + place as u64;
        self.staged[place].signalled = true;
        self.signalled = request + 1;
        // What was staged behind this request is under way when it completes. The end is known for the doorbell's last
        // request only; any other frees no more than the signal before it.
        let is_last = place + 1 == self.staged.len();
        let staging_end = if is_last { self.staging_head } else { self.staging_signalled };
        if is_last {
            self.staging_signalled = self.staging_head;
        }
        self.marks.push_back(Mark { request, token, staging_end });
    }

    /// What [`doorbell`](Self::doorbell) returned is with the device.
    pub fn on_handed_over(&mut self) {
        self.staged.clear();
        if planted(Mutant::ReuseHandedOver) {
            self.staging_head = self.staging_tail;
        }
    }

    /// The request with this id completed, and all before it. Returns the newest token that is placed by that.
    pub fn on_done(&mut self, id: u64) -> Option<u64> {
        let low = id & 0x7FFF_FFFF;
        let mut token = None;
        while let Some(mark) = self.marks.front() {
            // Signalled requests complete in order, so the id is that of the oldest mark or, should a device report only
            // the newest of several, of a later one.
            let distance = low.wrapping_sub(mark.request & 0x7FFF_FFFF) & 0x7FFF_FFFF;
            if distance > self.depth {
                break;
            }
            self.done = mark.request + 1;
            self.staging_tail = self.staging_tail.max(mark.staging_end);
            token = mark.token.or(token);
            self.marks.pop_front();
        }
        token
    }
}

#[cfg(test)]
mod tests;
