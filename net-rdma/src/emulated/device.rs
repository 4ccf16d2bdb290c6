//! The devices' side of the fabric: memory, queues, posting, polling, errors. `network` moves what is posted here.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use antelog_core::mem::Region;

use super::network::Orphan;
use super::queue::{Entry, Message, Queue, Route, Side, Source, State, Watched};
use super::rng::Rng;
use super::{Behaviour, Grant};
use crate::provider::{
    Access, Completion, DeviceEvent, Done, End, Failure, MemoryId, Patience, PortAddress, ProviderError, QueueId,
    Receive, RemoteMemory, Request,
};

/// Registered memory.
pub(super) struct Memory {
    pub(super) region: Arc<Region>,
    pub(super) access: Access,
    pub(super) remote: RemoteMemory,
}

/// One device.
pub(super) struct Device {
    pub(super) grant: Grant,
    pub(super) gid: [u8; 16],
    pub(super) memories: Vec<Memory>,
    locked_bytes: u64,
    pub(super) queues: Vec<Option<Queue>>,
    /// Visible completions.
    pub(super) completions: VecDeque<Entry>,
    /// Visible completions and those to come: all take up room of the completion queue.
    held: usize,
    pub(super) is_up: bool,
    pub(super) is_lost: bool,
    pub(super) events: VecDeque<DeviceEvent>,
}

impl Device {
    pub(super) fn port(&self) -> PortAddress {
        PortAddress { gid: self.gid, lid: 0, mtu_bytes: 4096, is_infiniband: false }
    }

    pub(super) fn memory(&self, id: MemoryId) -> &Memory {
        self.memories.get(id.0 as usize).unwrap_or_else(|| panic!("{id:?} is not registered"))
    }

    fn check(&self, memory: MemoryId, offset: usize, len: usize) {
        let memory_bytes = self.memory(memory).region.len();
        let inside = offset.checked_add(len).is_some_and(|end| end <= memory_bytes);
        assert!(inside, "range {offset}+{len} lies outside {memory:?} of {memory_bytes} bytes");
    }
}

/// Everything behind a fabric's handle.
pub(super) struct World {
    pub(super) behaviour: Behaviour,
    pub(super) now_ns: u64,
    pub(super) rng: Rng,
    pub(super) devices: Vec<Device>,
    /// Queue pair number to device and queue.
    pub(super) numbers: HashMap<u32, (usize, usize)>,
    pub(super) orphans: Vec<Orphan>,
    /// Bytes on their way.
    pub(super) scratch: Vec<u8>,
    /// Queue pairs and memories made so far, from which numbers, keys and addresses are derived.
    made: u32,
    salt: u32,
}

fn digest(bytes: &[u8]) -> u64 {
    let mix = |sum: u64, word: u64| (sum ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    let mut words = bytes.chunks_exact(8);
    let sum = words.by_ref().fold(bytes.len() as u64, |sum, w| mix(sum, u64::from_le_bytes(w.try_into().unwrap())));
    words.remainder().iter().fold(sum, |sum, &byte| mix(sum, u64::from(byte)))
}

impl World {
    pub(super) fn new(seed: u64, behaviour: Behaviour) -> World {
        let mut rng = Rng::new(seed);
        let salt = rng.bits() as u32;
        World {
            behaviour,
            now_ns: 0,
            rng,
            devices: Vec::new(),
            numbers: HashMap::new(),
            orphans: Vec::new(),
            scratch: Vec::new(),
            made: 0,
            salt,
        }
    }

    /// A number nobody has seen before, nor one with the same lower 24 bits: odd factors permute.
    fn unseen(&mut self) -> u32 {
        self.made += 1;
        self.made.wrapping_mul(0x9E37_79B1).wrapping_add(self.salt)
    }

    pub(super) fn add_device(&mut self, grant: Grant) -> usize {
        let mut gid = [0; 16];
        gid[0] = 0xfd;
        gid[1..9].copy_from_slice(&self.rng.bits().to_be_bytes());
        gid[12..].copy_from_slice(&self.unseen().to_be_bytes());
        self.devices.push(Device {
            grant,
            gid,
            memories: Vec::new(),
            locked_bytes: 0,
            queues: (0..grant.queues).map(|_| None).collect(),
            completions: VecDeque::new(),
            held: 0,
            is_up: true,
            is_lost: false,
            events: VecDeque::new(),
        });
        self.devices.len() - 1
    }

    /// The user closed the device.
    pub(super) fn remove_device(&mut self, device: usize) {
        for queue in 0..self.devices[device].queues.len() {
            self.destroy(device, queue);
        }
        let device = &mut self.devices[device];
        device.is_lost = true;
        device.memories.clear();
        device.completions.clear();
    }

    pub(super) fn lose(&mut self, device: usize) {
        let device = &mut self.devices[device];
        if std::mem::replace(&mut device.is_lost, true) {
            return;
        }
        device.events.push_back(DeviceEvent::Lost);
        device.completions.clear();
        for queue in device.queues.iter_mut().flatten() {
            queue.stream = Default::default();
            queue.done.iter_mut().for_each(VecDeque::clear);
        }
    }

    pub(super) fn set_link(&mut self, device: usize, up: bool) {
        let device = &mut self.devices[device];
        if device.is_up && !up {
            device.events.push_back(DeviceEvent::PortDown);
        }
        device.is_up = up;
    }

    /// An error in the form a real device's has.
    fn error<T>(device: usize, what: &str, why: &str, errno: i32) -> Result<T, ProviderError> {
        Err(ProviderError { text: format!("emulated{device}: {what}: {why}"), errno })
    }

    fn usable(&self, device: usize, what: &str) -> Result<(), ProviderError> {
        if self.devices[device].is_lost {
            Self::error(device, what, "the device is gone", libc::ENODEV)
        } else {
            Ok(())
        }
    }

    pub(super) fn register(
        &mut self,
        device: usize,
        region: &Arc<Region>,
        access: Access,
    ) -> Result<MemoryId, ProviderError> {
        let len = region.len() as u64;
        let what = format!("register {len} bytes");
        self.usable(device, &what)?;
        if self.rng.one_in(self.behaviour.registration_failure) {
            return Self::error(device, &what, "out of memory", libc::ENOMEM);
        }
        let (locked, lockable) = (self.devices[device].locked_bytes, self.devices[device].grant.lockable_bytes);
        if lockable - locked < len {
            let why = format!("{locked} of {lockable} lockable bytes are in use; raise the limit (ulimit -l)");
            return Self::error(device, &what, &why, libc::ENOMEM);
        }
        let rkey = self.unseen();
        // No two memories of the fabric overlap, and none lies where this process has any: 2^44 bytes for each, above
        // the addresses that user space gets.
        let address = (1 << 60) + (u64::from(self.made) << 44) + ((self.rng.below(1 << 31) as u64) << 12);
        let device = &mut self.devices[device];
        device.locked_bytes += len;
        let remote = RemoteMemory { address, len, rkey };
        device.memories.push(Memory { region: Arc::clone(region), access, remote });
        Ok(MemoryId(device.memories.len() as u32 - 1))
    }

    pub(super) fn create(
        &mut self,
        device: usize,
        queue: QueueId,
        requests: usize,
        receives: usize,
    ) -> Result<(u32, usize), ProviderError> {
        let what = format!("create queue {} for {requests} requests and {receives} receives", queue.0);
        self.usable(device, &what)?;
        let grant = self.devices[device].grant;
        let index = usize::from(queue.0);
        assert!(index < grant.queues, "{queue:?}: the device was opened for {} queues", grant.queues);
        assert!(self.devices[device].queues[index].is_none(), "{queue:?} exists");
        if requests.max(receives) > grant.limits.requests_max {
            let why = format!("at most {} are granted", grant.limits.requests_max);
            return Self::error(device, &what, &why, libc::EINVAL);
        }
        let number = self.unseen() & 0xFF_FFFF;
        self.numbers.insert(number, (device, index));
        self.devices[device].queues[index] = Some(Queue::new(number, requests, receives));
        Ok((number, grant.inline_bytes))
    }

    pub(super) fn connect(
        &mut self,
        device: usize,
        queue: QueueId,
        psn: u32,
        peer: &End,
        patience: Patience,
    ) -> Result<(), ProviderError> {
        let what = format!("connect queue {} to queue pair {:#x}", queue.0, peer.number);
        self.usable(device, &what)?;
        let gid = self.devices[device].gid;
        let ours = self.queue_mut(device, usize::from(queue.0));
        if ours.state != State::Made || peer.number == ours.number {
            return Self::error(device, &what, "it failed or is connected already, or is its own peer", libc::EINVAL);
        }
        if psn.max(peer.psn).max(peer.number) > 0xFF_FFFF || !(1..=31).contains(&patience.ack_timeout) {
            return Self::error(device, &what, "a number or psn over 24 bits, or no time-out", libc::EINVAL);
        }
        ours.state = State::Connected(patience);
        ours.route = Some(Route {
            gid,
            number: ours.number,
            psn,
            peer_gid: peer.port.gid,
            peer_number: peer.number,
            peer_psn: peer.psn,
        });
        Ok(())
    }

    pub(super) fn queue_mut(&mut self, device: usize, queue: usize) -> &mut Queue {
        let queues = &mut self.devices[device].queues;
        queues.get_mut(queue).and_then(Option::as_mut).unwrap_or_else(|| panic!("queue {queue} does not exist"))
    }

    pub(super) fn post(&mut self, device: usize, queue: QueueId, requests: &[Request]) -> Result<(), ProviderError> {
        self.usable(device, "post")?;
        let index = usize::from(queue.0);
        for request in requests {
            let message = self.message(device, request);
            let inline_bytes = self.devices[device].grant.inline_bytes;
            assert!(!request.inline || message.len <= inline_bytes, "{} bytes inline", message.len);
            let ours = self.queue_mut(device, index);
            assert!(ours.state != State::Made, "{queue:?} is not connected");
            assert!(
                ours.requests_used < ours.requests_max,
                "{queue:?}: more than {} requests without a polled completion that covers them",
                ours.requests_max
            );
            ours.requests_used += 1;
            if ours.state == State::Error {
                let frees = std::mem::take(&mut ours.uncovered) + 1;
                self.complete(device, index, Side::Send, request.id, Err(Failure::Flushed), frees);
            } else {
                ours.stream.messages.push_back(message);
            }
        }
        Ok(())
    }

    fn message(&mut self, device: usize, request: &Request) -> Message {
        let local = request.local;
        let device = &self.devices[device];
        device.check(local.memory, local.offset, local.len);
        let longest = device.grant.limits.message_bytes_max;
        assert!(local.len <= longest, "{} bytes in a message, at most {longest}", local.len);
        let memory = local.memory.0 as usize;
        let mut watched = None;
        let source = if request.inline {
            let mut bytes = vec![0; local.len].into_boxed_slice();
            device.memories[memory].region.get(local.offset, &mut bytes);
            Source::Taken(bytes)
        } else {
            if self.behaviour.watch_sources {
                self.scratch.resize(local.len, 0);
                device.memories[memory].region.get(local.offset, &mut self.scratch);
                let digest = digest(&self.scratch);
                watched = Some(Watched { id: request.id, memory, offset: local.offset, len: local.len, digest });
            }
            Source::Memory { memory, offset: local.offset }
        };
        let (operation, signalled) = (request.operation, request.signalled);
        Message { id: request.id, operation, len: local.len, source, signalled, watched }
    }

    pub(super) fn post_receives(
        &mut self,
        device: usize,
        queue: QueueId,
        receives: &[Receive],
    ) -> Result<(), ProviderError> {
        self.usable(device, "post receives")?;
        let index = usize::from(queue.0);
        for receive in receives {
            self.devices[device].check(receive.local.memory, receive.local.offset, receive.local.len);
            let ours = self.queue_mut(device, index);
            assert!(
                ours.receives_used < ours.receives_max,
                "{queue:?}: more than {} receives without a polled completion",
                ours.receives_max
            );
            ours.receives_used += 1;
            if ours.state == State::Error {
                self.complete(device, index, Side::Receive, receive.id, Err(Failure::Flushed), 1);
            } else {
                ours.receives.push_back(*receive);
            }
        }
        Ok(())
    }

    /// The device writes a completion; it becomes visible later.
    pub(super) fn complete(
        &mut self,
        device: usize,
        queue: usize,
        side: Side,
        id: u64,
        result: Result<Done, Failure>,
        frees: usize,
    ) {
        let held = &mut self.devices[device].held;
        *held += 1;
        let room = self.devices[device].grant.limits.completions;
        assert!(self.devices[device].held <= room, "the completion queue of {room} entries overran");
        let queue_mut = self.queue_mut(device, queue);
        let completion = Completion { id, result };
        queue_mut.done[side as usize].push_back(Entry { queue, number: queue_mut.number, side, frees, completion });
    }

    pub(super) fn poll(&mut self, device: usize, out: &mut [Completion]) -> usize {
        let mut taken = 0;
        while taken < out.len()
            && let Some(entry) = self.devices[device].completions.pop_front()
        {
            out[taken] = entry.completion;
            taken += 1;
            self.devices[device].held -= 1;
            self.free_slots(device, &entry);
        }
        taken
    }

    fn free_slots(&mut self, device: usize, entry: &Entry) {
        let Device { queues, .. } = &mut self.devices[device];
        // A completion of a queue that was destroyed since frees nothing.
        let Some(queue) = queues[entry.queue].as_mut().filter(|q| q.number == entry.number) else { return };
        if entry.side == Side::Receive {
            queue.receives_used -= entry.frees;
            return;
        }
        queue.requests_used -= entry.frees;
        for _ in 0..entry.frees {
            // Flushed requests were never retired, and what became of their sources does not matter.
            let Some(queue) = self.devices[device].queues[entry.queue].as_mut() else { return };
            let Some(Some(watched)) = queue.retired.pop_front() else { continue };
            if entry.completion.result.is_ok() && !self.behaviour.answers_free_sources {
                self.check_source(device, &watched, "a completion that covers it was polled");
            }
        }
    }

    pub(super) fn check_source(&mut self, device: usize, watched: &Watched, until: &str) {
        let Watched { id, memory, offset, len, digest: before } = *watched;
        self.scratch.resize(len, 0);
        self.devices[device].memories[memory].region.get(offset, &mut self.scratch);
        let is_same = digest(&self.scratch) == before;
        assert!(
            is_same,
            "the source of request {id:#x} changed before {until}: {offset}+{len} of memory {memory} of device {device}"
        );
    }

    pub(super) fn fail(&mut self, device: usize, queue: usize) {
        let own = &mut self.devices[device];
        let Some(ours) = own.queues.get_mut(queue).and_then(Option::as_mut) else { return };
        if !own.is_lost && ours.state != State::Error {
            let executed = ours.stream.executed;
            let count = self.rng.below(executed + 1);
            self.acknowledge(device, queue, count);
            self.put_in_error(device, queue, Failure::Flushed, Failure::Flushed);
        }
    }

    pub(super) fn break_queue(&mut self, device: usize, queue: usize) {
        if self.devices[device].queues.get(queue).is_some_and(Option::is_some) {
            self.devices[device].events.push_back(DeviceEvent::Failed);
            self.fail(device, queue);
        }
    }

    /// Puts a queue into error: the oldest request and receive fail as given, the others are flushed.
    pub(super) fn put_in_error(&mut self, device: usize, queue: usize, request: Failure, receive: Failure) {
        self.leave_orphan(device, queue);
        let ours = self.queue_mut(device, queue);
        ours.state = State::Error;
        let messages = std::mem::take(&mut ours.stream).messages;
        let receives = std::mem::take(&mut ours.receives);
        let mut failure = request;
        for message in messages {
            let frees = std::mem::take(&mut self.queue_mut(device, queue).uncovered) + 1;
            self.complete(device, queue, Side::Send, message.id, Err(failure), frees);
            failure = Failure::Flushed;
        }
        let mut failure = receive;
        for receive in receives {
            self.complete(device, queue, Side::Receive, receive.id, Err(failure), 1);
            failure = Failure::Flushed;
        }
    }

    pub(super) fn destroy(&mut self, device: usize, queue: usize) {
        if self.devices[device].queues.get(queue).is_none_or(Option::is_none) {
            return;
        }
        self.leave_orphan(device, queue);
        let own = &mut self.devices[device];
        let Some(ours) = own.queues[queue].take() else { return };
        self.numbers.remove(&ours.number);
        // Either the completion queue is cleaned of the queue's completions or they stay.
        if self.rng.one_in(2) {
            own.completions.extend(ours.done.into_iter().flatten());
        } else {
            let before = own.completions.len();
            own.completions.retain(|entry| entry.number != ours.number);
            own.held -= before - own.completions.len() + ours.done.iter().map(VecDeque::len).sum::<usize>();
        }
    }

    pub(super) fn connected(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let living = self.devices.iter().enumerate().filter(|(_, device)| !device.is_lost);
        living.flat_map(|(at, device)| {
            let queues = device.queues.iter().enumerate();
            queues.filter_map(move |(queue, slot)| {
                matches!(slot.as_ref()?.state, State::Connected(_)).then_some((at, queue))
            })
        })
    }

    pub(super) fn is_quiet(&self) -> bool {
        let idle = |q: &Queue| q.stream.messages.is_empty() && q.done.iter().all(VecDeque::is_empty);
        self.orphans.is_empty()
            && self.devices.iter().all(|d| d.completions.is_empty() && d.queues.iter().flatten().all(idle))
    }
}
