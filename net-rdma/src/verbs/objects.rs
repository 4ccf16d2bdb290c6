//! The library's objects, each owned by a value that releases it.
//!
//! An object must be dropped before those it was made from; `Device` sees to that by the order of its fields. A failed
//! release is no reason to panic: the device may have vanished, and closing the context makes the kernel release the rest.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::RawFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use antelog_core::mem::Region;

use super::ffi::*;
use super::library::Library;
use crate::provider::{Access, Local, RemoteMemory};

/// The library returns an error number, or -1 with `errno` set.
fn check(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        error => Err(io::Error::from_raw_os_error(error.abs())),
    }
}

fn made<T>(object: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(object).ok_or_else(io::Error::last_os_error)
}

/// The devices' names, and the one that was wanted, opened, if it is among them.
pub(super) struct Found {
    pub names: Vec<String>,
    pub opened: Option<io::Result<Context>>,
}

/// An open device.
pub(super) struct Context {
    library: &'static Library,
    raw: NonNull<ibv_context>,
    /// Connects queue pairs by address; iWARP and the like do not.
    pub is_infiniband_transport: bool,
}

impl Context {
    /// Opens the device of that name.
    pub fn open(library: &'static Library, wanted: &str) -> io::Result<Found> {
        let mut count = 0;
        // SAFETY: `count` outlives the call.
        let list = made(unsafe { (library.get_device_list)(&mut count) })?;
        let mut found = Found { names: Vec::new(), opened: None };
        for index in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the list holds `count` devices that live until it is freed, below.
            let device = unsafe { *list.as_ptr().add(index) };
            // SAFETY: the name is a terminated string inside the device.
            let name = unsafe { CStr::from_ptr((library.get_device_name)(device)) }.to_string_lossy().into_owned();
            if name == wanted {
                // SAFETY: `device` is alive; an opened one stays so until it is closed.
                let raw = made(unsafe { (library.open_device)(device) });
                // SAFETY: as above.
                let transport = unsafe { (*device).transport_type };
                let is_infiniband_transport = transport == IBV_TRANSPORT_IB;
                found.opened = Some(raw.map(|raw| Context { library, raw, is_infiniband_transport }));
            }
            found.names.push(name);
        }
        // SAFETY: the list came from `get_device_list` and is not used any more.
        unsafe { (library.free_device_list)(list.as_ptr()) };
        Ok(found)
    }

    pub fn attributes(&self) -> io::Result<ibv_device_attr> {
        let mut attributes = MaybeUninit::zeroed();
        // SAFETY: the context is open and the structure has the header's size.
        check(unsafe { (self.library.query_device)(self.raw.as_ptr(), attributes.as_mut_ptr()) })?;
        // SAFETY: all fields are integers, for which zero is a value, and the library has filled them in.
        Ok(unsafe { attributes.assume_init() })
    }

    pub fn port(&self, port: u8) -> io::Result<ibv_port_attr> {
        let mut attributes = MaybeUninit::zeroed();
        // SAFETY: the context is open and the structure larger than what this function fills in.
        check(unsafe { (self.library.query_port)(self.raw.as_ptr(), port, attributes.as_mut_ptr()) })?;
        // SAFETY: all fields are integers, for which zero is a value.
        Ok(unsafe { attributes.assume_init() })
    }

    pub fn gid(&self, port: u8, index: u8) -> io::Result<[u8; 16]> {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: the context is open and `gid` outlives the call.
        check(unsafe { (self.library.query_gid)(self.raw.as_ptr(), port, index.into(), &mut gid) })?;
        Ok(gid.raw)
    }

    pub fn events_fd(&self) -> RawFd {
        // SAFETY: the context is open.
        unsafe { self.raw.as_ref().async_fd }
    }

    /// The next asynchronous event and, where it is about a port, the port. `WouldBlock`: none.
    pub fn event(&self) -> io::Result<(c_uint, c_int)> {
        let mut event = ibv_async_event { element: ibv_async_event_element { object: null_mut() }, event_type: 0 };
        // SAFETY: the context is open; its descriptor does not block.
        check(unsafe { (self.library.get_async_event)(self.raw.as_ptr(), &mut event) })?;
        // SAFETY: any value is a port number; it means something for events of ports.
        let port = unsafe { event.element.port_num };
        // SAFETY: the event was just taken. The object it is about is alive: nothing of this context is destroyed between
        // the two calls, and destroying an object takes its events off the queue.
        unsafe { (self.library.ack_async_event)(&mut event) };
        Ok((event.event_type, port))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: open, and everything made from it is gone.
        unsafe { (self.library.close_device)(self.raw.as_ptr()) };
    }
}

/// A protection domain.
pub(super) struct Domain {
    library: &'static Library,
    raw: NonNull<ibv_pd>,
}

impl Domain {
    pub fn new(context: &Context) -> io::Result<Domain> {
        // SAFETY: the context is open.
        let raw = made(unsafe { (context.library.alloc_pd)(context.raw.as_ptr()) })?;
        Ok(Domain { library: context.library, raw })
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: made by `alloc_pd`; queue pairs and memory in it are gone.
        unsafe { (self.library.dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// Where a completion queue announces completions.
pub(super) struct Channel {
    library: &'static Library,
    raw: NonNull<ibv_comp_channel>,
}

impl Channel {
    pub fn new(context: &Context) -> io::Result<Channel> {
        // SAFETY: the context is open.
        let raw = made(unsafe { (context.library.create_comp_channel)(context.raw.as_ptr()) })?;
        Ok(Channel { library: context.library, raw })
    }

    pub fn fd(&self) -> RawFd {
        // SAFETY: the channel is alive.
        unsafe { self.raw.as_ref().fd }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: made by `create_comp_channel`; its completion queue is gone.
        unsafe { (self.library.destroy_comp_channel)(self.raw.as_ptr()) };
    }
}

/// A completion queue with the two functions of its device that work on it.
pub(super) struct CompletionQueue {
    library: &'static Library,
    raw: NonNull<ibv_cq>,
    poll: PollCq,
    request_notification: ReqNotifyCq,
}

impl CompletionQueue {
    pub fn new(context: &Context, entries: c_int, channel: &Channel) -> io::Result<CompletionQueue> {
        // SAFETY: the context is open; its table of functions does not change once it is.
        let ops = unsafe { &context.raw.as_ref().ops };
        let (Some(poll), Some(request_notification)) = (ops.poll_cq, ops.req_notify_cq) else {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        };
        let library = context.library;
        // SAFETY: context and channel are alive; vector 0 always exists.
        let raw = unsafe { (library.create_cq)(context.raw.as_ptr(), entries, null_mut(), channel.raw.as_ptr(), 0) };
        Ok(CompletionQueue { library, raw: made(raw)?, poll, request_notification })
    }

    /// Completions it holds.
    pub fn len(&self) -> usize {
        // SAFETY: the queue is alive.
        usize::try_from(unsafe { self.raw.as_ref().cqe }).unwrap_or(0)
    }

    /// Takes completions; returns how many. No system call on any device made for speed.
    #[inline]
    pub fn poll(&mut self, into: &mut [ibv_wc]) -> io::Result<usize> {
        let room = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue is alive and the device fills in at most `room` entries.
        let taken = unsafe { (self.poll)(self.raw.as_ptr(), room, into.as_mut_ptr()) };
        usize::try_from(taken).map_err(|_| io::Error::other("the completion queue cannot be read"))
    }

    /// Discards announcements that were not taken, then asks for one of the next completion.
    pub fn arm(&mut self, channel: &Channel) -> io::Result<()> {
        let mut events = 0;
        let result = loop {
            let (mut queue, mut user) = (null_mut(), null_mut());
            // SAFETY: the channel is alive and its descriptor does not block.
            match check(unsafe { (self.library.get_cq_event)(channel.raw.as_ptr(), &mut queue, &mut user) }) {
                Ok(()) => events += 1,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        if events > 0 {
            // SAFETY: this queue is the only one on the channel, so the events were its own.
            unsafe { (self.library.ack_cq_events)(self.raw.as_ptr(), events) };
        }
        result?;
        // SAFETY: the queue is alive.
        check(unsafe { (self.request_notification)(self.raw.as_ptr(), 0) })
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: made by `create_cq`; its queue pairs are gone and every event taken was acknowledged at once.
        unsafe { (self.library.destroy_cq)(self.raw.as_ptr()) };
    }
}

/// A registered region, which lives as long as the device may touch it.
pub(super) struct Memory {
    library: &'static Library,
    raw: NonNull<ibv_mr>,
    lkey: u32,
    region: ManuallyDrop<Arc<Region>>,
}

impl Memory {
    pub fn new(domain: &Domain, region: &Arc<Region>, access: Access) -> io::Result<Memory> {
        // Without relaxed ordering, which would let a flag be seen before the bytes written ahead of it.
        let flags = match access {
            Access::Local => IBV_ACCESS_LOCAL_WRITE,
            Access::RemoteWrite => IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
        };
        let address = region.as_ptr().cast::<c_void>();
        let library = domain.library;
        // SAFETY: the domain is alive; the range is the region's mapping, kept until it is deregistered; the region may be
        // written by peers at any time (its own rules).
        let raw = made(unsafe { (library.reg_mr)(domain.raw.as_ptr(), address, region.len(), flags as c_int) })?;
        // SAFETY: just made.
        let lkey = unsafe { raw.as_ref().lkey };
        Ok(Memory { library, raw, lkey, region: ManuallyDrop::new(Arc::clone(region)) })
    }

    pub fn remote(&self) -> RemoteMemory {
        // SAFETY: the registration is alive.
        let rkey = unsafe { self.raw.as_ref().rkey };
        RemoteMemory { address: self.region.as_ptr() as u64, len: self.region.len() as u64, rkey }
    }

    /// The piece of a request for a range, which must lie inside.
    #[inline]
    pub fn piece(&self, local: &Local) -> ibv_sge {
        let (offset, len) = (local.offset, local.len);
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.region.len());
        assert!(inside, "range {offset}+{len} lies outside registered memory of {} bytes", self.region.len());
        let length = u32::try_from(len).expect("one request moves less than 4 GiB");
        ibv_sge { addr: self.region.as_ptr() as u64 + offset as u64, length, lkey: self.lkey }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: made by `reg_mr`; queue pairs that use it are gone.
        match check(unsafe { (self.library.dereg_mr)(self.raw.as_ptr()) }) {
            Err(error) if error.raw_os_error() != Some(libc::EIO) => {
                // Still registered: the device may write it, so the region is never unmapped. EIO is the kernel's answer
                // once the device has vanished and it has taken the memory back itself.
            }
            // SAFETY: dropped here only; the device cannot reach the memory any more.
            _ => unsafe { ManuallyDrop::drop(&mut self.region) },
        }
    }
}

/// A queue pair with the two functions of its device that work on it.
pub(super) struct QueuePair {
    library: &'static Library,
    raw: NonNull<ibv_qp>,
    post_send: PostSend,
    post_receive: PostRecv,
    /// Bytes a request may take along.
    pub inline_bytes: usize,
}

impl QueuePair {
    /// Makes one, still in RESET, for so many requests and receives of one piece each and so many inline bytes.
    pub fn new(
        context: &Context,
        domain: &Domain,
        completions: &CompletionQueue,
        depths: (u32, u32),
        inline_bytes: u32,
    ) -> io::Result<QueuePair> {
        // SAFETY: the context is open; its table of functions does not change once it is.
        let ops = unsafe { &context.raw.as_ref().ops };
        let (Some(post_send), Some(post_receive)) = (ops.post_send, ops.post_recv) else {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        };
        let mut wanted = ibv_qp_init_attr {
            qp_context: null_mut(),
            send_cq: completions.raw.as_ptr(),
            recv_cq: completions.raw.as_ptr(),
            srq: null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: depths.0,
                max_recv_wr: depths.1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline_bytes,
            },
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let library = context.library;
        // SAFETY: domain and completion queue are alive and outlive the queue pair.
        let raw = made(unsafe { (library.create_qp)(domain.raw.as_ptr(), &mut wanted) })?;
        // The library puts what the device granted where the wish was.
        let inline_bytes = wanted.cap.max_inline_data as usize;
        Ok(QueuePair { library, raw, post_send, post_receive, inline_bytes })
    }

    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is alive.
        unsafe { self.raw.as_ref().qp_num }
    }

    pub fn modify(&mut self, attributes: &mut ibv_qp_attr, mask: c_uint) -> io::Result<()> {
        // SAFETY: the queue pair is alive and the structure has the header's size.
        check(unsafe { (self.library.modify_qp)(self.raw.as_ptr(), attributes, mask as c_int) })
    }

    /// Hands a list of requests to the device.
    ///
    /// # Safety
    /// `first` heads a terminated list of initialised requests whose pieces lie in memory registered with the queue
    /// pair's domain, and which stays registered until they complete.
    #[inline]
    pub unsafe fn post_send(&mut self, first: *mut ibv_send_wr) -> io::Result<()> {
        let mut refused = null_mut();
        // SAFETY: the queue pair is alive; the caller answers for the list.
        check(unsafe { (self.post_send)(self.raw.as_ptr(), first, &mut refused) })
    }

    /// Hands a list of receives to the device.
    ///
    /// # Safety
    /// As for `post_send`.
    #[inline]
    pub unsafe fn post_receive(&mut self, first: *mut ibv_recv_wr) -> io::Result<()> {
        let mut refused = null_mut();
        // SAFETY: as for `post_send`.
        check(unsafe { (self.post_receive)(self.raw.as_ptr(), first, &mut refused) })
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // To RESET first: it stops both directions, so that even if the queue pair cannot be destroyed nothing lands.
        // Devices that cannot go there from every state can go to ERR, which stops them too.
        let stopped = self.modify(&mut super::steps::to(IBV_QPS_RESET), IBV_QP_STATE);
        if stopped.is_err() {
            let _ = self.modify(&mut super::steps::to(IBV_QPS_ERR), IBV_QP_STATE);
        }
        // SAFETY: made by `create_qp` and not used again. Asynchronous events of it were acknowledged when taken.
        unsafe { (self.library.destroy_qp)(self.raw.as_ptr()) };
    }
}
