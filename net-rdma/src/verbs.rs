//! The real provider: an RDMA device driven through libibverbs, which is loaded at run time.
//!
//! `library` holds the functions for set-up and tear-down; requests, receives and completions go straight to the device's
//! own functions and cost no system call. This file and those below it are the crate's room for `unsafe`:
//! * what the library allocates is owned by a value in `objects` that releases it, in an order that the fields of
//!   [`Device`] fix;
//! * every range is checked against its registration before the device is told about it, and a region stays mapped until
//!   it is no longer registered. So the rest of the crate cannot make a device touch memory that is not its own.
#![allow(unsafe_code)]

mod causes;
mod ffi;
mod library;
mod objects;
mod post;
mod steps;
mod wake;

use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use antelog_core::mem::Region;

use crate::provider::{
    Access, Completion, DeviceEvent, Done, End, Failure, Limits, MemoryId, Patience, PortAddress, Provider,
    ProviderError, QueueId, Receive, RemoteMemory, Request,
};
pub use library::{Library, library};

/// Most requests that one [`Provider::post`] of a [`Device`] takes.
pub const REQUESTS_PER_POST: usize = post::LIST_MAX;

/// Inline bytes asked for, most wanted first. Devices grant what they like, and some refuse instead of granting less.
const INLINE_BYTES: [u32; 5] = [256, 220, 128, 64, 0];

/// Completions taken from the device at a time.
const POLL_MAX: usize = 32;

/// Which port of which device, under which of its addresses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The device's name, as in `/sys/class/infiniband`.
    pub device: String,
    /// The port, from 1.
    pub port: u8,
    /// Index into the port's GID table; on RoCE it chooses the version and the IP address.
    pub gid_index: u8,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place { device, port, gid_index } = self;
        write!(f, "RDMA device {device}, port {port}, GID index {gid_index}")
    }
}

impl Place {
    /// Tells what failed here, why, and what would mend it.
    fn error(&self, what: &str, error: &io::Error, cause: &str) -> ProviderError {
        let text = format!("{self}: {what}: {}: {cause}", causes::errno_text(error));
        ProviderError { text, errno: error.raw_os_error().unwrap_or(0) }
    }

    fn refused(&self, why: &str) -> ProviderError {
        ProviderError { text: format!("{self}: {why}"), errno: 0 }
    }
}

/// An open device.
///
/// Its descriptor ([`Provider::wait_fd`]) becomes readable for a completion after [`Provider::arm`], and also for an event
/// of the device, until [`Provider::event`] has taken it: whoever is woken looks at both. Connecting on RoCE may wait for
/// the kernel to resolve the peer's address. The device has to be dropped by the process that opened it, not by a fork.
///
/// The order of the fields is the order of release: each before what it was made from.
pub struct Device {
    queues: Vec<Option<objects::QueuePair>>,
    completions: objects::CompletionQueue,
    memories: Vec<objects::Memory>,
    wake: wake::Wake,
    channel: objects::Channel,
    domain: objects::Domain,
    context: objects::Context,
    /// Where the device puts completions before they are translated.
    polled: Box<[ffi::ibv_wc; POLL_MAX]>,
    place: Place,
    here: steps::Here,
    limits: Limits,
    /// A completion queue that can no longer be read, not reported yet. It is the only one, so nothing will complete.
    failed: bool,
    /// Reported once; nothing is left to wait for.
    lost: bool,
}

// SAFETY: libibverbs objects belong to no thread (the library is thread-safe, and here one thread at a time has them).
unsafe impl Send for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("place", &self.place).field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Device {
    /// Opens a device for up to `queues` queue pairs and, if it can hold as many, `completions` completions that nobody
    /// has taken yet ([`Limits::completions`] tells what was granted).
    ///
    /// # Errors
    /// No library, no such device, no right to use it, a port that is down or not there, an empty GID, or a kind of
    /// device that cannot be connected by address: one line with the remedy.
    pub fn open(place: &Place, queues: u16, completions: usize) -> Result<Device, ProviderError> {
        let library = library().map_err(|text| ProviderError { text, errno: 0 })?;
        let context = open_context(library, place)?;
        let attributes = context
            .attributes()
            .map_err(|error| place.error("cannot tell the device's limits", &error, causes::not_opened(&error)))?;
        let (here, message_bytes_max) = examine_port(&context, place)?;
        let no_room = |what, error: io::Error| place.error(what, &error, &causes::no_room(&error));
        let domain = objects::Domain::new(&context).map_err(|e| no_room("no protection domain", e))?;
        let channel = objects::Channel::new(&context).map_err(|e| no_room("no completion channel", e))?;
        let wake = wake::Wake::new([channel.fd(), context.events_fd()])
            .map_err(|error| place.error("no epoll", &error, "raise the limit of open files (ulimit -n)"))?;
        let entries = attributes.max_cqe.min(i32::try_from(completions).unwrap_or(i32::MAX)).max(1);
        let completions = objects::CompletionQueue::new(&context, entries, &channel).map_err(|error| {
            let what = format!("no completion queue for {entries} completions");
            place.error(&what, &error, &causes::no_completion_queue(&error))
        })?;
        let limits = Limits {
            message_bytes_max,
            completions: completions.len(),
            requests_max: usize::try_from(attributes.max_qp_wr).unwrap_or(0),
        };
        Ok(Device {
            queues: (0..queues).map(|_| None).collect(),
            completions,
            memories: Vec::new(),
            wake,
            channel,
            domain,
            context,
            polled: Box::new([ffi::ibv_wc::NONE; POLL_MAX]),
            place: place.clone(),
            here,
            limits,
            failed: false,
            lost: false,
        })
    }

    /// Takes a queue pair through one step.
    fn step(
        &mut self,
        queue: QueueId,
        (mut attributes, mask): (ffi::ibv_qp_attr, u32),
        what: impl Fn(&objects::QueuePair) -> String,
        cause: impl Fn(&io::Error) -> String,
    ) -> Result<(), ProviderError> {
        let pair = pair(&mut self.queues, &self.place, queue)?;
        pair.modify(&mut attributes, mask).map_err(|error| self.place.error(&what(pair), &error, &cause(&error)))
    }

    /// Nothing happens on this device any more, so nothing wakes a waiting thread either.
    fn give_up(&mut self) -> DeviceEvent {
        self.lost = true;
        self.wake.forget(self.channel.fd());
        self.wake.forget(self.context.events_fd());
        DeviceEvent::Lost
    }
}

fn open_context(library: &'static Library, place: &Place) -> Result<objects::Context, ProviderError> {
    let found = objects::Context::open(library, &place.device)
        .map_err(|error| place.error("cannot list RDMA devices", &error, causes::no_devices()))?;
    let context = match found.opened {
        Some(opened) => opened.map_err(|error| place.error("cannot open it", &error, causes::not_opened(&error)))?,
        None if found.names.is_empty() => {
            return Err(place.refused(&format!("there are no RDMA devices here: {}", causes::no_devices())));
        }
        None => return Err(place.refused(&format!("no such device; there are {}", found.names.join(", ")))),
    };
    if !context.is_infiniband_transport {
        return Err(
            place.refused("neither InfiniBand nor RoCE: such a device connects only through its own set-up (iWARP)")
        );
    }
    Ok(context)
}

/// The port as its peers need it, and the longest message it carries in bytes.
fn examine_port(context: &objects::Context, place: &Place) -> Result<(steps::Here, usize), ProviderError> {
    let Place { device, port: number, gid_index } = place;
    let port = context
        .port(*number)
        .map_err(|error| place.error("no such port", &error, &format!("see /sys/class/infiniband/{device}/ports")))?;
    if !matches!(port.state, ffi::IBV_PORT_ACTIVE | ffi::IBV_PORT_ACTIVE_DEFER) {
        return Err(place.refused("the port is down: check the cable, the network interface, or the subnet manager"));
    }
    let gid = context.gid(*number, *gid_index).map_err(|error| {
        place.error("no such GID", &error, &format!("see /sys/class/infiniband/{device}/ports/{number}/gids"))
    })?;
    if gid == [0; 16] {
        let table = format!("/sys/class/infiniband/{device}/ports/{number}/gids");
        return Err(place.refused(&format!("that GID is empty: give the interface an address, or choose from {table}")));
    }
    let is_infiniband = port.link_layer != ffi::IBV_LINK_LAYER_ETHERNET;
    let lid = if is_infiniband { port.lid } else { 0 };
    let mtu_bytes = steps::mtu_bytes(port.active_mtu).max(256);
    let here = steps::Here {
        address: PortAddress { gid, lid, mtu_bytes, is_infiniband },
        port: *number,
        gid_index: *gid_index,
        global_required: port.flags & ffi::IBV_QPF_GRH_REQUIRED != 0,
    };
    Ok((here, port.max_msg_sz as usize))
}

fn pair<'a>(
    queues: &'a mut [Option<objects::QueuePair>],
    place: &Place,
    queue: QueueId,
) -> Result<&'a mut objects::QueuePair, ProviderError> {
    let pair = queues.get_mut(usize::from(queue.0)).and_then(Option::as_mut);
    pair.ok_or_else(|| place.refused(&format!("queue pair {} was not made", queue.0)))
}

impl Provider for Device {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn port(&self) -> PortAddress {
        self.here.address
    }

    fn register(&mut self, region: &Arc<Region>, access: Access) -> Result<MemoryId, ProviderError> {
        let memory = objects::Memory::new(&self.domain, region, access).map_err(|error| {
            let what = format!("cannot register {} bytes of memory", region.len());
            self.place.error(&what, &error, &causes::no_room(&error))
        })?;
        let id = u32::try_from(self.memories.len()).expect("fewer than 2^32 regions");
        self.memories.push(memory);
        Ok(MemoryId(id))
    }

    fn remote(&self, memory: MemoryId) -> RemoteMemory {
        self.memories[memory.0 as usize].remote()
    }

    fn create(&mut self, queue: QueueId, requests: usize, receives: usize) -> Result<(u32, usize), ProviderError> {
        assert!(self.queues[usize::from(queue.0)].is_none(), "queue pair {} exists", queue.0);
        let depth = |wanted: usize| u32::try_from(wanted.max(1)).unwrap_or(u32::MAX);
        let depths = (depth(requests), depth(receives));
        let make = |bytes| objects::QueuePair::new(&self.context, &self.domain, &self.completions, depths, bytes);
        let [most, less @ ..] = INLINE_BYTES;
        let made = less.into_iter().fold(make(most), |made, bytes| made.or_else(|_| make(bytes)));
        let pair = made.map_err(|error| {
            let what = format!("no queue pair for {requests} requests and {receives} receives");
            self.place.error(&what, &error, &causes::no_queue_pair(&error))
        })?;
        let granted = (pair.number(), pair.inline_bytes);
        self.queues[usize::from(queue.0)] = Some(pair);
        let what = |pair: &objects::QueuePair| format!("queue pair {} did not go from RESET to INIT", pair.number());
        let stepped = self.step(queue, steps::to_init(self.place.port), what, causes::no_init);
        if stepped.is_err() {
            self.destroy(queue);
        }
        stepped.map(|()| granted)
    }

    fn connect(&mut self, queue: QueueId, psn: u32, peer: &End, patience: Patience) -> Result<(), ProviderError> {
        let (place, here) = (self.place.clone(), self.here);
        if here.address.is_infiniband != peer.port.is_infiniband {
            return Err(place.refused("one end is InfiniBand and the other Ethernet: they cannot reach each other"));
        }
        let what = |states: &'static str| {
            let peer_text = format!("queue pair {} at {}", peer.number, causes::port_text(&peer.port));
            move |pair: &objects::QueuePair| {
                format!("queue pair {} did not go from {states} towards {peer_text}", pair.number())
            }
        };
        let no_route = |error: &io::Error| causes::no_route(error, &place, &here.address, &peer.port);
        self.step(queue, steps::to_rtr(&here, peer), what("INIT to RTR"), no_route)?;
        self.step(queue, steps::to_rts(psn, patience), what("RTR to RTS"), causes::not_ready)
    }

    #[inline]
    fn post(&mut self, queue: QueueId, requests: &[Request]) -> Result<(), ProviderError> {
        let pair = pair(&mut self.queues, &self.place, queue)?;
        post::requests(pair, &self.memories, requests).map_err(|error| {
            let what = format!("queue pair {} did not take {} requests", pair.number(), requests.len());
            self.place.error(&what, &error, &causes::not_posted(&error))
        })
    }

    fn post_receives(&mut self, queue: QueueId, receives: &[Receive]) -> Result<(), ProviderError> {
        let pair = pair(&mut self.queues, &self.place, queue)?;
        post::receives(pair, &self.memories, receives).map_err(|error| {
            let what = format!("queue pair {} did not take {} receives", pair.number(), receives.len());
            self.place.error(&what, &error, &causes::not_posted(&error))
        })
    }

    #[inline]
    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        let mut count = 0;
        while count < completions.len() {
            let room = (completions.len() - count).min(POLL_MAX);
            let Ok(taken) = self.completions.poll(&mut self.polled[..room]) else {
                self.failed = true;
                break;
            };
            for (completion, polled) in completions[count..].iter_mut().zip(&self.polled[..taken]) {
                *completion = translate(polled);
            }
            count += taken;
            if taken < room {
                break;
            }
        }
        count
    }

    fn fail(&mut self, queue: QueueId) {
        if let Some(Some(pair)) = self.queues.get_mut(usize::from(queue.0)) {
            // Refused only where there is nothing left to fail: the device has vanished.
            let _ = pair.modify(&mut steps::to(ffi::IBV_QPS_ERR), ffi::IBV_QP_STATE);
        }
    }

    fn destroy(&mut self, queue: QueueId) {
        if let Some(slot) = self.queues.get_mut(usize::from(queue.0)) {
            *slot = None;
        }
    }

    fn arm(&mut self) {
        if !self.lost && self.completions.arm(&self.channel).is_err() {
            self.failed = true;
        }
    }

    fn wait_fd(&self) -> Option<RawFd> {
        Some(self.wake.fd())
    }

    fn event(&mut self) -> Option<DeviceEvent> {
        if self.lost {
            return None;
        }
        if std::mem::take(&mut self.failed) {
            return Some(self.give_up());
        }
        loop {
            match self.context.event() {
                Ok((ffi::IBV_EVENT_DEVICE_FATAL | ffi::IBV_EVENT_CQ_ERR, _)) => return Some(self.give_up()),
                Ok((ffi::IBV_EVENT_PORT_ERR, port)) if port == i32::from(self.place.port) => {
                    return Some(DeviceEvent::PortDown);
                }
                Ok((ffi::IBV_EVENT_QP_FATAL, _)) => return Some(DeviceEvent::Failed),
                // That the device refused a request of a peer's is told by completions.
                Ok(_) => {}
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return None,
                    io::ErrorKind::Interrupted => {}
                    // The descriptor itself fails once the kernel has taken the device away.
                    _ => return Some(self.give_up()),
                },
            }
        }
    }

    fn now_ns(&self) -> u64 {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `now` outlives the call, which cannot fail for this clock.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }
}

/// A completion in the provider's terms. Of failures, only the id and the status are read: the rest is not defined.
#[inline]
fn translate(polled: &ffi::ibv_wc) -> Completion {
    let imm = u32::from_be(polled.imm_data);
    let result = match (polled.status, polled.opcode) {
        (ffi::IBV_WC_SUCCESS, ffi::IBV_WC_RECV) => {
            let imm = (polled.wc_flags & ffi::IBV_WC_WITH_IMM != 0).then_some(imm);
            Ok(Done::Received { len: polled.byte_len as usize, imm })
        }
        (ffi::IBV_WC_SUCCESS, ffi::IBV_WC_RECV_RDMA_WITH_IMM) => Ok(Done::Notified { imm }),
        (ffi::IBV_WC_SUCCESS, _) => Ok(Done::Request),
        (ffi::IBV_WC_WR_FLUSH_ERR, _) => Err(Failure::Flushed),
        (ffi::IBV_WC_RETRY_EXC_ERR | ffi::IBV_WC_RESP_TIMEOUT_ERR, _) => Err(Failure::Unreachable),
        (ffi::IBV_WC_RNR_RETRY_EXC_ERR, _) => Err(Failure::ReceiverNotReady),
        (ffi::IBV_WC_REM_INV_REQ_ERR | ffi::IBV_WC_REM_ACCESS_ERR | ffi::IBV_WC_REM_OP_ERR, _) => Err(Failure::Refused),
        (status, _) => Err(Failure::Other(status)),
    };
    Completion { id: polled.wr_id, result }
}

#[cfg(test)]
mod tests {
    use super::*;
    use antelog_core::mem::sys;

    /// The first device whose first port has an address, whatever kind it is.
    fn any_device() -> Option<Device> {
        let names = std::fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
        let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut places =
            names.flat_map(|device| (0..8).map(move |gid_index| Place { device: device.clone(), port: 1, gid_index }));
        places.find_map(|place| Device::open(&place, 1, 16).ok())
    }

    /// Soft-RoCE does not vanish under its users, so its descriptor is exchanged for one that fails as theirs would.
    #[test]
    fn a_device_that_vanished_is_reported_once_and_wakes_nobody() {
        let Some(mut device) = any_device() else {
            println!("skipped: no RDMA device");
            return;
        };
        device.create(QueueId(0), 4, 4).unwrap();
        assert_eq!(device.event(), None);
        let folder = std::fs::File::open("/").unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&folder);
        // SAFETY: both descriptors are open; reading a folder fails, which is all that happens to it.
        assert!(unsafe { libc::dup2(fd, device.context.events_fd()) } >= 0);
        assert_eq!(device.event(), Some(DeviceEvent::Lost));
        assert_eq!(device.event(), None);
        device.arm();
        device.fail(QueueId(0));
        assert_eq!(device.event(), None);
        let fd = device.wait_fd().unwrap();
        assert_eq!(sys::ppoll(&mut [sys::readable(fd)], Some(0)).unwrap(), 0);
    }
}
