//! The crate's room for `unsafe`: io_uring, the buffers the kernel reads and writes, and the few calls `std` lacks.
//!
//! The rule that keeps this sound: whatever a queued request points to is owned by a [`Socket`], and a `Socket`
//! that is dropped while a request of its own is in flight leaks what it owns instead of freeing it. So the rest of
//! the crate cannot cause a use after free, however wrong its book-keeping.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use antelog_core::mem::Region;
use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};

/// `IORING_RECVSEND_POLL_FIRST`, which the crate does not name: wait for the socket before the first attempt.
const RECEIVE_WAITS: u16 = 1;

/// How many pieces of memory one send gathers at most.
pub const PIECES_MAX: usize = 256;

/// Why io_uring cannot be used here. The text says what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetupError {
    /// The kernel forbids io_uring to this process (`EPERM`).
    Forbidden,
    /// The kernel has no io_uring at all (`ENOSYS`).
    Missing,
    /// The kernel's io_uring is too old; names what it lacks.
    TooOld(&'static str),
    /// The kernel may not lock the memory the queues need (`ENOMEM`).
    Memory,
    /// Anything else, as an `errno`.
    Os(i32),
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetupError::Forbidden => f.write_str(
                "io_uring is forbidden here: set the sysctl kernel.io_uring_disabled to 0, or in a container allow the \
                 io_uring system calls in its seccomp profile",
            ),
            SetupError::Missing => f.write_str(
                "this kernel has no io_uring (or a sandbox hides it): run Linux 6.1 or later with CONFIG_IO_URING",
            ),
            SetupError::TooOld(what) => {
                write!(f, "this kernel's io_uring lacks {what}: run Linux 6.1 or later")
            }
            SetupError::Memory => f.write_str(
                "the kernel may not lock memory for io_uring's queues: raise the memlock limit (ulimit -l, or \
                 LimitMEMLOCK= of the service)",
            ),
            SetupError::Os(errno @ (libc::EMFILE | libc::ENFILE)) => {
                let error = io::Error::from_raw_os_error(*errno);
                write!(f, "cannot set up io_uring: {error}: raise the limit of open files (ulimit -n)")
            }
            SetupError::Os(errno) => {
                write!(f, "cannot set up io_uring: {}", io::Error::from_raw_os_error(*errno))
            }
        }
    }
}

impl std::error::Error for SetupError {}

impl SetupError {
    fn from_setup(error: &io::Error) -> SetupError {
        match error.raw_os_error().unwrap_or(0) {
            libc::EPERM | libc::EACCES => SetupError::Forbidden,
            libc::ENOSYS => SetupError::Missing,
            libc::EINVAL => SetupError::TooOld("deferred task work (IORING_SETUP_DEFER_TASKRUN)"),
            libc::ENOMEM => SetupError::Memory,
            errno => SetupError::Os(errno),
        }
    }
}

/// One finished request.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// What the request was labelled with.
    pub label: u64,
    /// Bytes transferred, or a negated `errno`.
    pub result: i32,
    /// After a receive: the socket held more than was asked for.
    pub more: bool,
}

/// A submission and a completion queue, used by the thread that made them only.
pub struct Ring {
    ring: IoUring,
    /// Signalled by the kernel while armed. Polling the ring's own descriptor does not do: with deferred task work,
    /// kernels do not wake its waiters when work arrives, only when work was done.
    wake: OwnedFd,
    is_armed: bool,
}

impl Ring {
    /// Makes queues for about `requests` requests at a time.
    ///
    /// # Errors
    /// What the kernel refused, and why that usually is.
    pub fn new(requests: u32) -> Result<Ring, SetupError> {
        let entries = requests.next_power_of_two().clamp(16, 8192);
        // Deferred task work makes the kernel complete requests only inside our own system calls: completions come
        // in batches, and no receive buffer changes behind our back. It implies cooperative task running.
        let mut ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .setup_clamp()
            .setup_cqsize(entries * 4)
            .build(entries)
            .map_err(|error| SetupError::from_setup(&error))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(|error| SetupError::from_setup(&error))?;
        let needed = [
            (opcode::Recv::CODE, "RECV"),
            (opcode::RecvMsg::CODE, "RECVMSG"),
            (opcode::Send::CODE, "SEND"),
            (opcode::SendMsg::CODE, "SENDMSG"),
        ];
        if let Some((_, name)) = needed.into_iter().find(|&(code, _)| !probe.is_supported(code)) {
            return Err(SetupError::TooOld(name));
        }
        if !ring.params().is_feature_nodrop() {
            return Err(SetupError::TooOld("lossless completions (IORING_FEAT_NODROP)"));
        }
        // Saves a descriptor look-up per system call; everything works without it.
        let _ = ring.submitter().register_ring_fd();
        let wake = event_fd().map_err(|error| SetupError::Os(error.raw_os_error().unwrap_or(0)))?;
        ring.submitter().register_eventfd(wake.as_raw_fd()).map_err(|error| SetupError::from_setup(&error))?;
        // A spinning owner should not pay for signals.
        ring.completion().disable_eventfd();
        Ok(Ring { ring, wake, is_armed: false })
    }

    /// A descriptor that becomes readable when completions or deferred work arrive after [`arm`](Self::arm).
    pub fn fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// Has arrivals signalled from now on. What arrived before is for [`has_work`](Self::has_work) to find, afterwards.
    pub fn arm(&mut self) {
        self.ring.completion().enable_eventfd();
        // Before looking for work: either we see the work, or the kernel sees that we want the signal.
        fence(Ordering::SeqCst);
        self.is_armed = true;
    }

    /// Ends what `arm` began; costs nothing if nothing was armed.
    #[inline]
    pub fn disarm(&mut self) {
        if self.is_armed {
            self.is_armed = false;
            self.ring.completion().disable_eventfd();
            let mut count = 0u64;
            // SAFETY: reads 8 bytes into 8 bytes. The descriptor does not block: without a signal nothing is read.
            unsafe { libc::read(self.wake.as_raw_fd(), (&raw mut count).cast(), size_of::<u64>()) };
        }
    }

    /// Whether completions, or work that leads to some, wait.
    pub fn has_work(&mut self) -> bool {
        if !self.ring.completion().is_empty() {
            return true;
        }
        self.has_deferred()
    }

    /// Whether deferred work waits to be done in the kernel.
    #[inline]
    pub fn has_deferred(&mut self) -> bool {
        let queue = self.ring.submission();
        queue.taskrun() || queue.cq_overflow()
    }

    /// Whether requests are queued that the kernel has not been told of.
    #[inline]
    pub fn has_queued(&mut self) -> bool {
        !self.ring.submission().is_empty()
    }

    /// Enters the kernel if requests are queued or deferred work waits; costs no system call otherwise.
    ///
    /// # Errors
    /// An `errno` that says the ring itself is unusable. Passing conditions are not errors: the next call retries.
    pub fn enter(&mut self) -> Result<(), i32> {
        let queue = self.ring.submission();
        if queue.is_empty() && !queue.taskrun() && !queue.cq_overflow() {
            return Ok(());
        }
        drop(queue);
        passing(self.ring.submit())
    }

    /// Like [`enter`](Self::enter), and waits up to `time` for a completion.
    ///
    /// # Errors
    /// As for `enter`.
    pub fn wait(&mut self, time: Duration) -> Result<(), i32> {
        let timespec = types::Timespec::from(time);
        let args = types::SubmitArgs::new().timespec(&timespec);
        passing(self.ring.submitter().submit_with_args(1, &args))
    }

    /// The next finished request.
    pub fn completion(&mut self) -> Option<Completion> {
        let entry: cqueue::Entry = self.ring.completion().next()?;
        let more = cqueue::sock_nonempty(entry.flags());
        Some(Completion { label: entry.user_data(), result: entry.result(), more })
    }

    /// Takes back the request with this label: when this returns, the kernel writes and reads nothing for it any more. Its
    /// completion is still to be taken.
    fn cancel(&mut self, label: u64) {
        // One that is only queued could not be found, and would start with the next submission.
        let _ = self.ring.submit();
        // Work deferred to this thread is done in here if it stands in the way. Not found: it has completed.
        let _ = self.ring.submitter().register_sync_cancel(None, types::CancelBuilder::user_data(label));
    }

    /// Queues a request; false if the queue is full even after handing it to the kernel.
    ///
    /// # Safety
    /// What `entry` points to stays valid until its completion was taken.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the caller's promise.
        if unsafe { self.ring.submission().push(entry) }.is_ok() {
            return true;
        }
        let _ = self.ring.submit();
        // SAFETY: as above.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }
}

fn event_fd() -> io::Result<OwnedFd> {
    // SAFETY: makes a descriptor, touches no memory.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    // SAFETY: the descriptor is new and nobody else's.
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
}

fn passing(result: io::Result<usize>) -> Result<(), i32> {
    match result.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)) {
        Ok(_) | Err(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ETIME) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// A zeroed heap buffer without Rust references to it, because the kernel writes it.
struct Buffer {
    base: NonNull<u8>,
    len: usize,
}

impl Buffer {
    fn new(len: usize) -> Buffer {
        let bytes: Box<[u8]> = vec![0; len].into_boxed_slice();
        Buffer { base: NonNull::from(Box::leak(bytes)).cast(), len }
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "range outside a connection's buffer");
        // SAFETY: in range, as just checked.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let bytes = std::ptr::slice_from_raw_parts_mut(self.base.as_ptr(), self.len);
        // SAFETY: made from a box of this length in `new`, and nothing refers to it any more.
        drop(unsafe { Box::from_raw(bytes) });
    }
}

/// Bytes to send.
#[derive(Clone, Copy, Debug)]
pub enum Piece {
    /// A part of the staging buffer.
    Staged {
        /// First byte.
        offset: usize,
        /// Number of bytes.
        len: usize,
    },
    /// A part of a registered region.
    Source {
        /// Index into the socket's regions.
        region: usize,
        /// First byte.
        offset: usize,
        /// Number of bytes.
        len: usize,
    },
}

/// What requests of one connection point to.
struct Memory {
    fd: OwnedFd,
    receive: Buffer,
    staging: Buffer,
    vectors: Box<[libc::iovec; PIECES_MAX]>,
    header: Box<libc::msghdr>,
    /// Of a receive that lands: the range of the region, then the buffer.
    landing_vectors: Box<[libc::iovec; 2]>,
    landing_header: Box<libc::msghdr>,
    sources: Vec<Arc<Region>>,
    exposed: Vec<Arc<Region>>,
}

/// A range of an exposed region that the next received bytes belong to.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// Index into the socket's exposed regions.
    pub region: usize,
    /// First byte.
    pub offset: usize,
    /// Number of bytes.
    pub len: usize,
}

/// A receive in flight.
#[derive(Clone, Copy, Debug)]
struct Receiving {
    label: u64,
    /// It writes the buffer from this offset on.
    from: usize,
    /// Bytes of a region that it fills first.
    landing: usize,
}

/// A connected socket with its buffers; at most one receive and one send are in flight.
pub struct Socket {
    memory: ManuallyDrop<Memory>,
    receiving: Option<Receiving>,
    sending: bool,
}

impl Socket {
    /// Takes over a connected, blocking socket. `sources` are the regions it may send from, `exposed` those that what it
    /// receives may land in.
    pub fn new(
        fd: OwnedFd,
        receive_bytes: usize,
        staging_bytes: usize,
        sources: Vec<Arc<Region>>,
        exposed: Vec<Arc<Region>>,
    ) -> Socket {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: all-zero is a valid msghdr: null pointers with zero lengths.
        let header: libc::msghdr = unsafe { std::mem::zeroed() };
        let memory = Memory {
            fd,
            receive: Buffer::new(receive_bytes),
            staging: Buffer::new(staging_bytes),
            vectors: Box::new([empty; PIECES_MAX]),
            header: Box::new(header),
            landing_vectors: Box::new([empty; 2]),
            landing_header: Box::new(header),
            sources,
            exposed,
        };
        Socket { memory: ManuallyDrop::new(memory), receiving: None, sending: false }
    }

    /// Adds a region to send from.
    pub fn add_source(&mut self, region: Arc<Region>) {
        self.memory.sources.push(region);
    }

    /// The region with this index.
    #[inline]
    pub fn source(&self, region: usize) -> &Arc<Region> {
        &self.memory.sources[region]
    }

    /// The regions that what is received may land in.
    #[inline]
    pub fn exposed(&self) -> &[Arc<Region>] {
        &self.memory.exposed
    }

    /// Whether a receive is in flight.
    pub fn is_receiving(&self) -> bool {
        self.receiving.is_some()
    }

    /// Whether a send is in flight.
    pub fn is_sending(&self) -> bool {
        self.sending
    }

    /// Size of the receive buffer in bytes.
    pub fn receive_bytes(&self) -> usize {
        self.memory.receive.len
    }

    /// Received bytes. Panics when a receive in flight may write there.
    #[inline]
    pub fn received(&self, offset: usize, len: usize) -> &[u8] {
        let at = self.memory.receive.at(offset, len);
        assert!(self.receiving.is_none_or(|r| offset + len <= r.from), "these bytes are still being received");
        // SAFETY: in range and initialised; the kernel writes elsewhere, and our own writes need `&mut self`.
        unsafe { std::slice::from_raw_parts(at, len) }
    }

    /// Moves received bytes to the buffer's start. Panics when a receive is in flight.
    pub fn compact(&mut self, offset: usize, len: usize) {
        assert!(self.receiving.is_none(), "cannot move bytes under a receive");
        let from = self.memory.receive.at(offset, len);
        // SAFETY: both ranges lie in the buffer (the target starts at 0), they may overlap, nobody else writes.
        unsafe { std::ptr::copy(from, self.memory.receive.base.as_ptr(), len) }
    }

    /// Queues a receive of at most `len` bytes into the buffer at `offset`; with `landing`, of the bytes of that range
    /// first, placed there without a copy. `waits`: the socket is known to be empty, so the kernel need not look before it
    /// waits. False if the ring is full, try again later.
    pub fn receive(
        &mut self,
        ring: &mut Ring,
        label: u64,
        (offset, len): (usize, usize),
        landing: Option<Range>,
        waits: bool,
    ) -> bool {
        assert!(self.receiving.is_none() && len > 0, "one receive at a time, with room");
        let at = self.memory.receive.at(offset, len);
        let flags = if waits { RECEIVE_WAITS } else { 0 };
        let entry = match landing {
            None => opcode::Recv::new(self.fd(), at, clamp(len)).ioprio(flags).build(),
            Some(Range { region, offset, len: bytes }) => {
                let region = &self.memory.exposed[region];
                assert!(offset.checked_add(bytes).is_some_and(|end| end <= region.len()), "range outside a region");
                // SAFETY: in range, as just checked.
                let target = unsafe { region.as_ptr().add(offset) };
                *self.memory.landing_vectors = [
                    libc::iovec { iov_base: target.cast(), iov_len: bytes },
                    libc::iovec { iov_base: at.cast(), iov_len: len },
                ];
                self.memory.landing_header.msg_iov = self.memory.landing_vectors.as_mut_ptr();
                self.memory.landing_header.msg_iovlen = 2;
                opcode::RecvMsg::new(self.fd(), &raw mut *self.memory.landing_header).ioprio(flags).build()
            }
        };
        // SAFETY: buffer, region, vectors and header live until the completion was reported by `finish_receive`, or for
        // ever (see `drop`); the latter two are not touched while a receive is in flight.
        let queued = unsafe { ring.push(&entry.user_data(label)) };
        if queued {
            self.receiving = Some(Receiving { label, from: offset, landing: landing.map_or(0, |range| range.len) });
        }
        queued
    }

    /// When this returns, nothing lands in a region any more.
    pub fn stop_landing(&mut self, ring: &mut Ring) {
        if let Some(Receiving { label, landing: 1.., .. }) = self.receiving {
            ring.cancel(label);
        }
    }

    /// To be called when the receive's completion was taken. Returns how many bytes of a region it was to fill first.
    pub fn finish_receive(&mut self) -> usize {
        self.receiving.take().map_or(0, |receiving| receiving.landing)
    }

    /// Copies `bytes` into the staging buffer.
    #[inline]
    pub fn stage(&mut self, offset: usize, bytes: &[u8]) {
        let at = self.memory.staging.at(offset, bytes.len());
        // SAFETY: in range; `bytes` cannot be in the buffer, of which no reference is ever handed out.
        unsafe { at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    /// Copies bytes of a source region into the staging buffer.
    #[inline]
    pub fn stage_source(&mut self, offset: usize, region: usize, from: usize, len: usize) {
        let at = self.memory.staging.at(offset, len);
        // SAFETY: in range and initialised; no other reference to the buffer exists. The kernel only reads it.
        let out = unsafe { std::slice::from_raw_parts_mut(at, len) };
        self.memory.sources[region].get(from, out);
    }

    /// Queues a send of at most [`PIECES_MAX`] of `pieces`. False if the ring is full, try again later.
    pub fn send(&mut self, ring: &mut Ring, label: u64, pieces: impl Iterator<Item = Piece>) -> bool {
        assert!(!self.sending, "one send at a time");
        let mut count = 0;
        for piece in pieces.take(PIECES_MAX) {
            let (at, len) = match piece {
                Piece::Staged { offset, len } => (self.memory.staging.at(offset, len), len),
                Piece::Source { region, offset, len } => {
                    let region = &self.memory.sources[region];
                    assert!(offset.checked_add(len).is_some_and(|end| end <= region.len()), "range outside a region");
                    // SAFETY: in range, as just checked.
                    (unsafe { region.as_ptr().add(offset) }, len)
                }
            };
            self.memory.vectors[count] = libc::iovec { iov_base: at.cast(), iov_len: len };
            count += 1;
        }
        let entry = if count == 1 {
            let only = self.memory.vectors[0];
            opcode::Send::new(self.fd(), only.iov_base.cast_const().cast(), clamp(only.iov_len))
                .flags(libc::MSG_NOSIGNAL)
                .build()
        } else {
            self.memory.header.msg_iov = self.memory.vectors.as_mut_ptr();
            self.memory.header.msg_iovlen = count as _;
            opcode::SendMsg::new(self.fd(), &raw const *self.memory.header).flags(libc::MSG_NOSIGNAL as u32).build()
        };
        // SAFETY: vectors, header, staging buffer and regions live until the completion was reported by
        // `finish_send`, or for ever (see `drop`); the first two are not touched while a send is in flight.
        self.sending = unsafe { ring.push(&entry.user_data(label)) };
        self.sending
    }

    /// To be called when the send's completion was taken.
    pub fn finish_send(&mut self) {
        self.sending = false;
    }

    /// Ends the connection in both directions: requests in flight finish soon, and nothing more is sent.
    pub fn shutdown(&self) {
        // SAFETY: the descriptor is open and ours. It may be disconnected already, which is no matter.
        unsafe { libc::shutdown(self.memory.fd.as_raw_fd(), libc::SHUT_RDWR) };
    }

    fn fd(&self) -> types::Fd {
        types::Fd(self.memory.fd.as_raw_fd())
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.receiving.is_none() && !self.sending {
            // SAFETY: dropped once, here; no request refers to it any more.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        } else {
            // A request still points to the buffers, so they must never be freed. Normal operation never comes here.
            self.shutdown();
        }
    }
}

fn clamp(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX).min(1 << 30)
}

/// Waits until one of `entries` is ready or `time` is over; `revents` say which are.
///
/// # Errors
/// The kernel's error; an interrupted wait is none and reports nothing ready.
pub fn wait_ready(entries: &mut [libc::pollfd], time: Duration) -> io::Result<()> {
    let milliseconds = i32::try_from(time.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: pointer and length are those of a slice; stale descriptors are reported in `revents`.
    let ready = unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, milliseconds) };
    let error = io::Error::last_os_error();
    if ready < 0 && error.kind() != io::ErrorKind::Interrupted { Err(error) } else { Ok(()) }
}
