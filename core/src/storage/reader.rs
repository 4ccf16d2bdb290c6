//! Reads old entries from the segment files: found by slot, verified along the chain, without waiting for the disk.
//!
//! A segment's first mark says where the chain can be taken up. Within a segment, marks are remembered as reading goes by
//! them, so that a slot is found in a short walk the next time.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use antelog_protocol::Lsn;
use antelog_protocol::wire::entry::EntryKind;

use super::catalog::{Catalog, Segment};
use super::disk::{BLOCK_BYTES, Disk, Name, Op};
use super::mark::{Chain, Mark, Step};
use super::store::LogStore;
use crate::mem::Region;
use crate::node::Waker;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// A mark is remembered about this often, in bytes of the log.
const INDEX_BYTES: u64 = 64 << 10;

/// Segments whose marks are remembered.
const INDEXED_MAX: usize = 16;

/// Requests that wait, at most.
const REQUESTS_MAX: usize = 64;

/// What to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Whole entries, verified: from the one that holds this slot on, as many as fit into this many bytes.
    Entries {
        /// The slot.
        lsn: Lsn,
        /// At most so many bytes; the first entry comes in any case if the reader's buffer holds it.
        bytes_max: usize,
    },
    /// Whole entries, verified: from the first that begins at this offset or behind it, as many as end in the range. None
    /// if not even that does.
    Range {
        /// Absolute offset in bytes.
        from: u64,
        /// Absolute offset of the end. The range ends earlier when the reader's buffer does.
        to: u64,
        /// What is rotten is asked of other replicas before the answer says so, where there are any to ask.
        mended: bool,
    },
}

impl Request {
    /// Whether an answer may end at `next`, where an entry ends that begins at `mark`.
    fn takes(&self, begins: &Mark, mark: &Mark, next: u64, buffer_bytes: usize) -> bool {
        match *self {
            // The first comes in any case.
            Request::Entries { bytes_max, .. } => {
                mark.at == begins.at || (next - begins.at) as usize <= bytes_max.min(buffer_bytes)
            }
            Request::Range { to, .. } => next <= to,
        }
    }
}

/// Why something cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadError {
    /// It is not kept any more.
    Trimmed {
        /// Before the first entry kept.
        first: Mark,
    },
    /// It is not on disk yet.
    Beyond {
        /// End of what is.
        written: u64,
    },
    /// The disk does not hold what was written.
    Damaged {
        /// Start of the segment: its file's name.
        segment: u64,
        /// Before the entry that does not continue the chain.
        before: Mark,
        /// The chain can be taken up again here: a range to fetch from a peer ends here.
        until: u64,
    },
    /// The entry is longer than the reader's buffer takes.
    TooLong {
        /// How long the entry is.
        bytes: usize,
    },
    /// The operating system refused.
    Failed {
        /// Its number for why.
        errno: i32,
    },
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReadError::Trimmed { first } => write!(f, "trimmed: the log on disk begins at slot {}", first.lsn),
            ReadError::Beyond { written } => write!(f, "not on disk yet, which holds the log up to offset {written}"),
            ReadError::Damaged { segment, before, .. } => {
                write!(f, "segment {} is damaged at offset {}, slot {}", Name::Segment(*segment), before.at, before.lsn)
            }
            ReadError::TooLong { bytes } => write!(f, "the entry of {bytes} bytes does not fit the reader's buffer"),
            ReadError::Failed { errno } => {
                write!(f, "cannot read the log on disk: {}", io::Error::from_raw_os_error(*errno))
            }
        }
    }
}

impl std::error::Error for ReadError {}

/// What was read, until the next [`Reader::poll`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The request's token.
    pub token: u64,
    /// Before the first entry.
    pub begins: Mark,
    /// Where they lie in [`Reader::buffer`].
    pub offset: usize,
    /// How many bytes.
    pub len: usize,
}

/// Marks within one segment, at growing offsets.
#[derive(Debug)]
struct Indexed {
    start: u64,
    marks: Vec<Mark>,
}

#[derive(Clone, Copy, Debug)]
struct Work {
    token: u64,
    request: Request,
    /// Verified up to here.
    mark: Mark,
    /// Before the first entry of the answer, once it is found.
    begins: Option<Mark>,
}

/// See the module's text.
pub struct Reader<D: Disk> {
    pub(super) disk: D,
    pub(super) chain: Chain,
    pub(super) segment_bytes: u64,
    pub(super) catalog: Arc<Catalog>,
    buffer: Arc<Region>,
    /// Absolute offset of the buffer's first byte, and of the end of what it holds.
    base: u64,
    filled: u64,
    /// End of what was written already when it was read into the buffer.
    good: u64,
    /// The segment that is open.
    open: Option<u64>,
    /// An operation is under way.
    busy: Option<Busy>,
    requests: VecDeque<(u64, Request)>,
    work: Option<Work>,
    /// What was answered last.
    answered: Option<(u64, Request)>,
    index: VecDeque<Indexed>,
    /// How often the log had been cut when the request was begun that is at work, or was last.
    pub(super) cuts: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Busy {
    Opening(u64),
    /// What lies below this offset was written before.
    Reading(u64),
}

/// What a look at the buffer leads to.
enum Next {
    /// Bytes up to this offset are needed.
    Needs(u64),
    Answer(Answer),
    Error(ReadError),
}

impl<D: Disk> LogStore<D> {
    /// A reader of this log with a buffer for answers, for this thread or another.
    ///
    /// # Errors
    /// When the system has no memory or descriptors for it.
    pub fn reader(&self, buffer_bytes: usize) -> io::Result<Reader<D>> {
        Ok(Reader {
            disk: self.disk.another()?,
            chain: self.chain,
            segment_bytes: self.layout.segment_bytes,
            catalog: self.catalog.clone(),
            buffer: Region::new(buffer_bytes.next_multiple_of(BLOCK_BYTES))?,
            base: 0,
            filled: 0,
            good: 0,
            open: None,
            busy: None,
            requests: VecDeque::with_capacity(REQUESTS_MAX),
            work: None,
            answered: None,
            index: VecDeque::with_capacity(INDEXED_MAX),
            cuts: 0,
        })
    }
}

impl<D: Disk> Reader<D> {
    /// Asks for something; false when `REQUESTS_MAX` requests wait already.
    pub fn request(&mut self, token: u64, request: Request) -> bool {
        let room = self.requests.len() < REQUESTS_MAX;
        if room {
            self.requests.push_back((token, request));
        }
        room
    }

    /// What was answered last.
    pub(super) fn answered(&self) -> Option<Request> {
        self.answered.map(|(_, request)| request)
    }

    /// What was answered last is done again, before anything else.
    pub(super) fn redo(&mut self) {
        if let Some(answered) = self.answered.take() {
            self.requests.push_front(answered);
        }
    }

    /// Where answers lie.
    pub fn buffer(&self) -> &Region {
        &self.buffer
    }

    /// Whether nothing is asked for.
    pub fn is_idle(&self) -> bool {
        self.work.is_none() && self.requests.is_empty()
    }

    /// See [`Disk::set_waker`].
    pub fn set_waker(&mut self, waker: Waker) {
        self.disk.set_waker(waker);
    }

    /// Descriptors that become readable when the disk has done something.
    pub fn wait_fds(&self, fds: &mut Vec<RawFd>) {
        self.disk.wait_fds(fds);
    }

    /// To be called before sleeping; true when something can be done already.
    pub fn prepare_wait(&mut self) -> bool {
        self.disk.prepare_wait() || (self.busy.is_none() && !self.is_idle())
    }

    /// Waits for the disk, if something is under way.
    pub fn wait(&mut self) {
        if self.busy.is_some() {
            self.disk.wait();
        }
    }

    /// Goes on with what is asked for; the next answer, in the order of requests. An answer's bytes are good until the
    /// next call.
    pub fn poll(&mut self) -> Option<(u64, Result<Answer, ReadError>)> {
        while let Some(completion) = self.disk.completion() {
            if let Err(error) = self.take(completion.result) {
                let Work { token, request, .. } = self.work.take()?;
                self.answered = Some((token, request));
                return Some((token, Err(error)));
            }
        }
        while self.busy.is_none() {
            if self.work.is_none() {
                let (token, request) = self.requests.pop_front()?;
                match self.begin(token, request) {
                    Ok(work) => self.work = Some(work),
                    Err(error) => {
                        self.answered = Some((token, request));
                        return Some((token, Err(error)));
                    }
                }
            }
            let token = self.work.as_ref()?.token;
            let result = match self.look() {
                Next::Needs(to) => match self.fetch(to) {
                    Ok(()) => continue,
                    Err(error) => Err(error),
                },
                Next::Answer(answer) => Ok(answer),
                Next::Error(error) => Err(error),
            };
            let request = self.work.take()?.request;
            if self.catalog.cuts() == self.cuts {
                self.answered = Some((token, request));
                return Some((token, result));
            }
            // The log was cut meanwhile: what was read may be what was discarded.
            self.requests.push_front((token, request));
        }
        self.disk.enter();
        None
    }

    /// Takes what the operation under way has brought.
    fn take(&mut self, result: i32) -> Result<(), ReadError> {
        let passing = result == -libc::EINTR || result == -libc::EAGAIN;
        match self.busy.take() {
            Some(Busy::Opening(start)) if result >= 0 => self.open = Some(start),
            Some(Busy::Reading(written)) if result as usize >= BLOCK_BYTES && result > 0 => {
                self.filled += result as u64 - result as u64 % BLOCK;
                self.good = self.filled.min(written);
            }
            _ if passing => {}
            Some(Busy::Opening(_)) if result == -libc::ENOENT => {
                // Trimmed since the catalog was looked at, if nobody else has removed it.
                return Err(self.damage());
            }
            // A file that ends where the log does not.
            Some(Busy::Reading(_)) if result >= 0 => return Err(self.damage()),
            _ => return Err(ReadError::Failed { errno: -result }),
        }
        Ok(())
    }

    fn begin(&mut self, token: u64, request: Request) -> Result<Work, ReadError> {
        let cuts = self.catalog.cuts();
        if cuts != self.cuts {
            // The files are not what they were.
            self.cuts = cuts;
            self.index.clear();
            self.close();
        }
        let first = self.catalog.first().unwrap_or_default();
        let written = self.catalog.written();
        let mark = match request {
            Request::Entries { lsn, .. } => self.mark_before(lsn).ok_or(ReadError::Trimmed { first })?,
            Request::Range { from, .. } if from < first.at => return Err(ReadError::Trimmed { first }),
            Request::Range { from, to, .. } if to > written || from >= to => return Err(ReadError::Beyond { written }),
            Request::Range { from, .. } => self.mark_before_at(from).ok_or(ReadError::Trimmed { first })?,
        };
        let request = match request {
            Request::Range { from, to, mended } => {
                Request::Range { from, to: to.min(from - from % BLOCK + self.buffer.len() as u64), mended }
            }
            request => request,
        };
        self.empty(mark.at);
        Ok(Work { token, request, mark, begins: None })
    }

    /// Empties the buffer, which is to begin with the block of `at`.
    fn empty(&mut self, at: u64) {
        let base = at - at % BLOCK;
        (self.base, self.filled, self.good) = (base, base, base);
    }

    /// The mark closest to a slot, at or before it.
    fn mark_before(&self, lsn: Lsn) -> Option<Mark> {
        let segment = self.catalog.by_lsn(lsn)?;
        Some(self.nearest(&segment, |mark| mark.lsn <= lsn))
    }

    /// The mark closest to an offset, at or before it.
    fn mark_before_at(&self, at: u64) -> Option<Mark> {
        let segment = self.catalog.by_first(at)?;
        Some(self.nearest(&segment, |mark| mark.at <= at))
    }

    /// The last known mark of a segment that is not too far, or its first.
    fn nearest(&self, segment: &Segment, is_before: impl Fn(&Mark) -> bool) -> Mark {
        let indexed = self.index.iter().find(|indexed| indexed.start == segment.start);
        let marks = indexed.map_or(&[][..], |indexed| &indexed.marks);
        marks[..marks.partition_point(is_before)].last().copied().unwrap_or(segment.first)
    }

    /// Remembers a mark that was passed.
    fn note(&mut self, mark: Mark) {
        let start = mark.at - mark.at % self.segment_bytes;
        let position = self.index.iter().position(|indexed| indexed.start == start);
        let indexed = match position {
            Some(at) => &mut self.index[at],
            None => {
                if self.index.len() == INDEXED_MAX {
                    self.index.pop_front();
                }
                self.index.push_back(Indexed { start, marks: vec![mark] });
                return;
            }
        };
        if indexed.marks.last().is_none_or(|last| mark.at >= last.at + INDEX_BYTES) {
            indexed.marks.push(mark);
        }
    }

    /// Goes on with the request, as far as the buffer's bytes allow.
    fn look(&mut self) -> Next {
        let Some(mut work) = self.work else { return Next::Error(ReadError::Failed { errno: libc::EINVAL }) };
        let (request, buffer_bytes) = (work.request, self.buffer.len());
        let written = self.catalog.written();
        loop {
            let mark = work.mark;
            let available = self.good.saturating_sub(mark.at) as usize;
            let place = mark.at.saturating_sub(self.base) as usize;
            let step = self.chain.step(&mark, &self.buffer, place, available);
            if let Request::Range { from, .. } = request
                && mark.at >= from
            {
                work.begins.get_or_insert(mark);
            }
            match step {
                Ok(Step::Entry(header, next)) => {
                    if let Request::Entries { lsn, .. } = request
                        && header.kind != EntryKind::Pad
                        && lsn < next.lsn
                    {
                        work.begins.get_or_insert(mark);
                    }
                    if let Some(begins) = work.begins.filter(|b| !request.takes(b, &mark, next.at, buffer_bytes)) {
                        return self.whole(&work, begins, mark);
                    }
                    self.note(next);
                    work.mark = next;
                    self.work = Some(work);
                }
                Ok(Step::Needs(bytes)) => {
                    let end = mark.at + bytes as u64;
                    // The rest of the answer would not fit, or is not there yet.
                    let is_held = end <= written.min(self.base + buffer_bytes as u64);
                    let ends_here = !is_held && matches!(request, Request::Entries { .. });
                    let is_whole = |begins: &Mark| {
                        !request.takes(begins, &mark, end, usize::MAX) || (mark.at > begins.at && ends_here)
                    };
                    return match work.begins.filter(is_whole) {
                        Some(begins) => self.whole(&work, begins, mark),
                        None if end > written => Next::Error(ReadError::Beyond { written }),
                        None if bytes + BLOCK_BYTES > buffer_bytes => Next::Error(ReadError::TooLong { bytes }),
                        None => Next::Needs(end),
                    };
                }
                Err(_) => {
                    return match work.begins {
                        // What is good before the damage is an answer.
                        Some(begins) if mark.at > begins.at => self.whole(&work, begins, mark),
                        _ => Next::Error(self.damage()),
                    };
                }
            }
        }
    }

    /// The answer that goes from `begins` to `ends`; a pad's skipped bytes may lie outside of the buffer, but not of a
    /// range.
    fn whole(&self, work: &Work, begins: Mark, ends: Mark) -> Next {
        if ends.at == begins.at {
            return Next::Answer(Answer { token: work.token, begins, offset: 0, len: 0 });
        }
        if self.good < ends.at && matches!(work.request, Request::Range { .. }) {
            return Next::Needs(ends.at);
        }
        let end = ends.at.min(self.good);
        Next::Answer(self.answer(work, begins, (end - begins.at) as usize))
    }

    fn answer(&self, work: &Work, begins: Mark, len: usize) -> Answer {
        Answer { token: work.token, begins, offset: (begins.at - self.base) as usize, len }
    }

    /// Why the entry at hand cannot be verified.
    fn damage(&self) -> ReadError {
        let first = self.catalog.first().unwrap_or_default();
        let before = self.work.map_or(first, |work| work.mark);
        if before.at < first.at {
            return ReadError::Trimmed { first };
        }
        let segment = before.at - before.at % self.segment_bytes;
        let until = self.catalog.segments().iter().find(|s| s.first.at > before.at).map(|s| s.first.at);
        ReadError::Damaged { segment, before, until: until.unwrap_or(self.catalog.written()) }
    }

    /// Begins to bring more bytes into the buffer, so that it comes to hold what reaches up to `to`.
    fn fetch(&mut self, to: u64) -> Result<(), ReadError> {
        let keep = self.work.map_or(self.base, |work| work.begins.unwrap_or(work.mark).at);
        if to > self.base + self.buffer.len() as u64 || keep >= self.filled {
            self.empty(keep);
        }
        // The block in which the log ended is read again.
        self.filled = self.filled.min(self.good - self.good % BLOCK);
        let start = self.filled - self.filled % self.segment_bytes;
        if self.open != Some(start) {
            if self.catalog.by_offset(start).is_none_or(|segment| segment.start != start) {
                return Err(ReadError::Trimmed { first: self.catalog.first().unwrap_or_default() });
            }
            self.close();
            self.submit(Op::Open { file: 0, name: Name::Segment(start), create: false }, Busy::Opening(start));
            return Ok(());
        }
        let room = self.base + self.buffer.len() as u64 - self.filled;
        // Whole blocks, so that the last one, which is being written, is asked for too.
        let written = self.catalog.written();
        let end = written.next_multiple_of(BLOCK).min(start + self.segment_bytes);
        let len = room.min(end.saturating_sub(self.filled)) as usize;
        if len == 0 {
            return Err(self.damage());
        }
        let (buffer, offset) = (self.buffer.clone(), (self.filled - self.base) as usize);
        let at = LogStore::<D>::file_at(start, self.filled);
        self.submit(Op::Read { file: 0, at, target: &buffer, offset, len }, Busy::Reading(written));
        Ok(())
    }

    fn submit(&mut self, op: Op<'_>, busy: Busy) {
        let taken = self.disk.submit(op, 0);
        assert!(taken, "a reader has one operation under way");
        self.busy = Some(busy);
    }

    /// Lets what is under way end, and begins the request anew that it was for.
    pub(super) fn interrupt(&mut self) {
        while self.busy.is_some() {
            match self.disk.completion() {
                Some(_) => self.busy = None,
                None => self.disk.wait(),
            }
        }
        // An opening may have succeeded.
        self.disk.close(0);
        self.open = None;
        if let Some(work) = self.work.take() {
            self.requests.push_front((work.token, work.request));
        }
    }

    pub(super) fn close(&mut self) {
        if self.open.take().is_some() {
            self.disk.close(0);
        }
    }
}
