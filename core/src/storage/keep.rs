//! What a replica and its gate use of a log on disk, whatever the disk is.

use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;

use antelog_protocol::Lsn;

use super::catalog::Catalog;
use super::disk::Disk;
use super::error::StoreError;
use super::format::Identity;
use super::mark::Mark;
use super::mend::Rot;
use super::reader::{ReadError, Reader, Request};
use super::retention::Keep;
use super::store::{Condition, LogStore};
use super::thread::{ReaderClient, ReaderThread};
use crate::node::mailbox::MailSender;
use crate::transport::Full;

/// A [`LogStore`] on some disk; see there for what each does.
pub trait Store: fmt::Debug + Send {
    /// See [`LogStore::write_up_to`].
    fn write_up_to(&mut self, end: Mark);
    /// See [`LogStore::flush`].
    fn flush(&mut self);
    /// See [`LogStore::poll`].
    ///
    /// # Errors
    /// When writing or syncing failed, now or earlier: the replica must end.
    fn poll(&mut self, now_ns: u64) -> Result<usize, StoreError>;
    /// See [`LogStore::wait_for_writes`].
    fn wait_for_writes(&mut self);
    /// See [`LogStore::requested`].
    fn requested(&self) -> Mark;
    /// See [`LogStore::written`].
    fn written(&self) -> u64;
    /// See [`LogStore::released`].
    fn released(&self) -> u64;
    /// See [`LogStore::flushed`].
    fn flushed(&self) -> Mark;
    /// See [`LogStore::first`].
    fn first(&self) -> Mark;
    /// See [`LogStore::identity`].
    fn identity(&self) -> &Identity;
    /// See [`LogStore::condition`].
    fn condition(&self) -> Condition;
    /// See [`LogStore::room_end`].
    fn room_end(&self) -> u64;
    /// See [`LogStore::truncate_to`].
    ///
    /// # Errors
    /// When the disk fails.
    fn truncate_to(&mut self, end: Mark) -> Result<(), StoreError>;
    /// See [`LogStore::start_over`].
    ///
    /// # Errors
    /// When the disk fails.
    fn start_over(&mut self, begins: Mark) -> Result<(), StoreError>;
    /// See [`LogStore::save_now`].
    ///
    /// # Errors
    /// When the disk fails or is full.
    fn save_now(&mut self, note: &[u8]) -> Result<(), StoreError>;
    /// See [`LogStore::finish`].
    ///
    /// # Errors
    /// When the disk fails or is full.
    fn finish(&mut self) -> Result<(), StoreError>;
    /// See [`LogStore::trim`].
    fn trim(&mut self, upto: u64) -> Mark;
    /// See [`LogStore::trim_by`].
    fn trim_by(&self, keep: &Keep, allowed: u64) -> u64;
    /// See [`LogStore::trim_before`].
    fn trim_before(&self, lsn: Lsn) -> u64;
    /// See [`LogStore::deadline_ns`].
    fn deadline_ns(&self) -> Option<u64>;
    /// See [`LogStore::wait_fds`].
    fn wait_fds(&self, fds: &mut Vec<RawFd>);
    /// See [`LogStore::prepare_wait`].
    fn prepare_wait(&mut self) -> bool;
}

impl<D: Disk + Send> Store for LogStore<D> {
    fn write_up_to(&mut self, end: Mark) {
        LogStore::write_up_to(self, end);
    }

    fn flush(&mut self) {
        LogStore::flush(self);
    }

    fn poll(&mut self, now_ns: u64) -> Result<usize, StoreError> {
        LogStore::poll(self, now_ns)
    }

    fn wait_for_writes(&mut self) {
        LogStore::wait_for_writes(self);
    }

    fn requested(&self) -> Mark {
        LogStore::requested(self)
    }

    fn written(&self) -> u64 {
        LogStore::written(self)
    }

    fn released(&self) -> u64 {
        LogStore::released(self)
    }

    fn flushed(&self) -> Mark {
        LogStore::flushed(self)
    }

    fn first(&self) -> Mark {
        LogStore::first(self)
    }

    fn identity(&self) -> &Identity {
        LogStore::identity(self)
    }

    fn condition(&self) -> Condition {
        LogStore::condition(self)
    }

    fn room_end(&self) -> u64 {
        LogStore::room_end(self)
    }

    fn truncate_to(&mut self, end: Mark) -> Result<(), StoreError> {
        LogStore::truncate_to(self, end)
    }

    fn start_over(&mut self, begins: Mark) -> Result<(), StoreError> {
        LogStore::start_over(self, begins)
    }

    fn save_now(&mut self, note: &[u8]) -> Result<(), StoreError> {
        LogStore::save_now(self, note)
    }

    fn finish(&mut self) -> Result<(), StoreError> {
        LogStore::finish(self)
    }

    fn trim(&mut self, upto: u64) -> Mark {
        LogStore::trim(self, upto)
    }

    fn trim_by(&self, keep: &Keep, allowed: u64) -> u64 {
        LogStore::trim_by(self, keep, allowed)
    }

    fn trim_before(&self, lsn: Lsn) -> u64 {
        LogStore::trim_before(self, lsn)
    }

    fn deadline_ns(&self) -> Option<u64> {
        LogStore::deadline_ns(self)
    }

    fn wait_fds(&self, fds: &mut Vec<RawFd>) {
        LogStore::wait_fds(self, fds);
    }

    fn prepare_wait(&mut self) -> bool {
        LogStore::prepare_wait(self)
    }
}

impl<D: Disk> fmt::Debug for LogStore<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogStore").field("place", &self.disk.place()).field("written", &self.written).finish()
    }
}

/// What was read: before which entry it begins, and the bytes of whole entries.
pub type OldRead = Result<(Mark, Vec<u8>), ReadError>;

/// Entries that have left memory, for whoever may not wait for a disk.
pub trait OldEntries: fmt::Debug + Send {
    /// Asks for something; the answer has the same token.
    ///
    /// # Errors
    /// `Full`: too many requests wait; answers come first.
    fn request(&mut self, token: u64, request: Request) -> Result<(), Full>;

    /// The next answer, in the order of requests.
    fn poll(&mut self) -> Option<(u64, OldRead)>;

    /// Whether an answer waits: to be looked at before sleeping.
    fn waits(&mut self) -> bool;

    /// Before the first entry kept on disk.
    fn first(&self) -> Mark;
}

/// A reader on a thread of its own: see [`ReaderThread`].
#[derive(Debug)]
pub struct OldEntriesThread {
    client: ReaderClient,
    catalog: Arc<Catalog>,
    /// Ends when dropped.
    _thread: ReaderThread,
}

impl OldEntriesThread {
    /// Starts a thread for the reader of a log; the parameters are those of [`ReaderThread::spawn`].
    ///
    /// # Errors
    /// When the system has no memory, descriptors or threads left.
    pub fn spawn<D: Disk + Send + 'static>(
        name: &str,
        reader: Reader<D>,
        answers_bytes: usize,
        waker: crate::node::Waker,
        rot: Option<MailSender<Rot>>,
    ) -> std::io::Result<OldEntriesThread> {
        let catalog = reader.catalog.clone();
        let (thread, client) = ReaderThread::spawn(name, reader, answers_bytes, waker, rot)?;
        Ok(OldEntriesThread { client, catalog, _thread: thread })
    }
}

impl OldEntries for OldEntriesThread {
    fn request(&mut self, token: u64, request: Request) -> Result<(), Full> {
        self.client.request(token, request)
    }

    fn poll(&mut self) -> Option<(u64, OldRead)> {
        self.client.poll(|token, read| (token, read.map(|(begins, bytes)| (begins, bytes.to_vec()))))
    }

    fn waits(&mut self) -> bool {
        !self.client.is_empty()
    }

    fn first(&self) -> Mark {
        self.catalog.first().unwrap_or_default()
    }
}

/// A reader on the thread of whoever asks: it goes on whenever it is polled.
pub struct OldEntriesPolled<D: Disk> {
    reader: Reader<D>,
}

impl<D: Disk> OldEntriesPolled<D> {
    /// Whoever asks is woken with `waker` when the disk has done something.
    pub fn new(mut reader: Reader<D>, waker: crate::node::Waker) -> OldEntriesPolled<D> {
        reader.set_waker(waker);
        OldEntriesPolled { reader }
    }
}

impl<D: Disk> fmt::Debug for OldEntriesPolled<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OldEntriesPolled").field("is_idle", &self.reader.is_idle()).finish()
    }
}

impl<D: Disk + Send> OldEntries for OldEntriesPolled<D> {
    fn request(&mut self, token: u64, request: Request) -> Result<(), Full> {
        // No more at a time than fits the reader's buffer beside the block that it begins in.
        let most = self.reader.buffer().len() as u64 / 2;
        let request = match request {
            Request::Entries { lsn, bytes_max } => Request::Entries { lsn, bytes_max: bytes_max.min(most as usize) },
            Request::Range { from, to, mended } => {
                Request::Range { from, to: to.min(from.saturating_add(most)), mended }
            }
        };
        if self.reader.request(token, request) { Ok(()) } else { Err(Full) }
    }

    fn poll(&mut self) -> Option<(u64, OldRead)> {
        let (token, read) = self.reader.poll()?;
        let read = read.map(|answer| {
            let mut bytes = Vec::new();
            self.reader.buffer().append_to(answer.offset, answer.len, &mut bytes);
            (answer.begins, bytes)
        });
        Some((token, read))
    }

    fn waits(&mut self) -> bool {
        self.reader.prepare_wait()
    }

    fn first(&self) -> Mark {
        self.reader.catalog.first().unwrap_or_default()
    }
}
