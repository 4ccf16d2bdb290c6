//! An RDMA fabric in memory: devices, queue pairs and a network that behave as badly as the verbs specification allows.
//!
//! It exists so that the transport is tested on machines without RDMA, and on a virtual clock under a seeded generator, so
//! that every run repeats. Nothing moves by itself: [`Fabric::step`] (and, if so configured, every poll) moves the clock on
//! and lets packets, acknowledgements and completions make random progress.
//!
//! What it does on purpose:
//! - The bytes of one message are placed in several pieces, at different times, in permuted order. Source bytes are fetched
//!   as late as possible, when their piece is placed, and after a loss.
//! - Completions are late, and not ordered between queue pairs nor between the send and receive side of one.
//! - Lost messages are sent again until the connection's patience ends; a receiver without receives holds its sender up
//!   for ever, like `rnr_retry` 7.
//! - After a sender's queue failed or was destroyed, some of what it had sent may still land, as from a switch's buffer.
//!   After a *receiver's* queue failed or was destroyed, nothing lands.
//! - A message of which a part was placed may never be finished.
//!
//! What it never does, because no reliable connection without relaxed ordering does, and the transport relies on it:
//! - It tears no aligned 8-byte word.
//! - It places no byte of a message before all bytes of the messages posted earlier to the same queue.
//! - It places nothing twice: a packet that arrives again is acknowledged, its bytes are dropped.
//! - It completes no request before its bytes are placed. (A device may acknowledge before memory shows the bytes; whoever
//!   relies on a sender's completion to read the receiver's memory by another path is not caught here.)
//!
//! What breaks a device for good, and so has to be excluded by construction, panics with a clear text: more requests or
//! receives than a queue was created for (a slot is free only once a completion that covers it was *polled*), a completion
//! queue that overruns, a source that was changed before its completion was polled, ranges outside registered memory.

mod device;
mod network;
mod queue;
mod rng;

use std::cell::RefCell;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;

use antelog_core::mem::Region;

use crate::provider::{
    Access, Completion, DeviceEvent, End, Limits, MemoryId, Patience, PortAddress, Provider, ProviderError, QueueId,
    Receive, RemoteMemory, Request,
};
use device::World;

/// One in so many draws; 0 is never, 1 always.
pub type OneIn = u32;

/// How the fabric behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Behaviour {
    /// What a step adds to the clock, in nanoseconds.
    pub step_ns: u64,
    /// Every poll begins with a step of the whole fabric.
    pub step_on_poll: bool,
    /// Polls between failing a queue and destroying it do: their user waits for what it flushes, and does nothing else.
    pub step_on_drain: bool,
    /// Into so many pieces, 1 to 16, a message is cut at most.
    pub pieces_max: u32,
    /// So many pieces (at random, 0 to this) one queue places in a step.
    pub pieces_per_step_max: u32,
    /// Acknowledgements reach a queue in one step in so many.
    pub ack_in: OneIn,
    /// Completions become visible, per queue and side, in one step in so many.
    pub completion_in: OneIn,
    /// Messages and acknowledgements that are lost. Sent again after one to four times the acknowledgement timeout.
    pub loss: OneIn,
    /// A sender waits so long when the receiver has posted no receive, in nanoseconds.
    pub not_ready_ns: u64,
    /// Steps in which the device fails a given connected queue.
    pub queue_failure: OneIn,
    /// Registrations that fail with ENOMEM.
    pub registration_failure: OneIn,
    /// Panic when a source changes before a completion that covers its request was polled.
    pub watch_sources: bool,
    /// With [`watch_sources`](Self::watch_sources): what was executed may change at once. Its owner may know from the
    /// peer's answer, as a ring does from a credit, and what is sent again after that is dropped by the peer's device.
    pub answers_free_sources: bool,
    /// Panic when a write is refused by the device that it is for: who writes means well and has been told the right key.
    pub watch_keys: bool,
}

impl Default for Behaviour {
    /// Slow, out of order and in pieces, but nothing is lost and nothing fails.
    fn default() -> Behaviour {
        Behaviour {
            step_ns: 200,
            step_on_poll: true,
            step_on_drain: false,
            pieces_max: 16,
            pieces_per_step_max: 16,
            ack_in: 3,
            completion_in: 3,
            loss: 0,
            not_ready_ns: 2_000,
            queue_failure: 0,
            registration_failure: 0,
            watch_sources: true,
            answers_free_sources: false,
            watch_keys: false,
        }
    }
}

/// What one emulated device has to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// What it tells its user.
    pub limits: Limits,
    /// How many queue pairs it is opened for.
    pub queues: usize,
    /// Bytes a request may take along.
    pub inline_bytes: usize,
    /// Memory that may be registered, in bytes.
    pub lockable_bytes: u64,
}

impl Default for Grant {
    fn default() -> Grant {
        let limits = Limits { message_bytes_max: 1 << 30, completions: 1 << 14, requests_max: 1 << 10 };
        Grant { limits, queues: 64, inline_bytes: 64, lockable_bytes: u64::MAX }
    }
}

/// A device of a fabric, for those who do things to it from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId(usize);

/// The network, the clock and all devices. Clones are the same fabric.
#[derive(Clone)]
pub struct Fabric(Rc<RefCell<World>>);

impl Fabric {
    /// An empty fabric. Equal seeds and equal calls give equal runs.
    pub fn new(seed: u64, behaviour: Behaviour) -> Fabric {
        Fabric(Rc::new(RefCell::new(World::new(seed, behaviour))))
    }

    /// Plugs in a device. Dropping it takes its queues and memory away; its peers find it silent.
    pub fn device(&self, grant: Grant) -> Emulated {
        let device = self.0.borrow_mut().add_device(grant);
        Emulated { fabric: self.clone(), device, draining: false }
    }

    /// Moves the clock on by a step and everything by a little.
    pub fn step(&self) {
        let step_ns = self.0.borrow().behaviour.step_ns;
        self.advance(step_ns);
    }

    /// A step in which the clock jumps by `ns` nanoseconds: time-outs pass, everything else moves as in any step.
    pub fn advance(&self, ns: u64) {
        self.0.borrow_mut().advance(ns);
    }

    /// The clock jumps by `ns` nanoseconds, and nothing moves.
    pub fn pass(&self, ns: u64) {
        self.0.borrow_mut().now_ns += ns;
    }

    /// The clock in nanoseconds. It starts at 0.
    pub fn now_ns(&self) -> u64 {
        self.0.borrow().now_ns
    }

    /// How the fabric behaves now.
    pub fn behaviour(&self) -> Behaviour {
        self.0.borrow().behaviour
    }

    /// Changes the behaviour from here on.
    pub fn set_behaviour(&self, behaviour: Behaviour) {
        self.0.borrow_mut().behaviour = behaviour;
    }

    /// Nothing is under way: all that was requested was placed, acknowledged and polled.
    pub fn is_quiet(&self) -> bool {
        self.0.borrow().is_quiet()
    }

    /// The device has completions or events for its user.
    pub fn is_ready(&self, device: DeviceId) -> bool {
        let device = &self.0.borrow().devices[device.0];
        !device.completions.is_empty() || !device.events.is_empty()
    }

    /// Queues that are connected, on devices that were not lost.
    pub fn connected(&self) -> Vec<(DeviceId, QueueId)> {
        self.0.borrow().connected().map(|(device, queue)| (DeviceId(device), QueueId(queue as u16))).collect()
    }

    /// The device disappears: [`DeviceEvent::Lost`], posts fail, nothing completes any more.
    pub fn lose(&self, device: DeviceId) {
        self.0.borrow_mut().lose(device.0);
    }

    /// Takes the device's cable out ([`DeviceEvent::PortDown`]) or puts it back. While it is out everything is lost.
    pub fn set_link(&self, device: DeviceId, up: bool) {
        self.0.borrow_mut().set_link(device.0, up);
    }

    /// The device fails a queue of its own accord ([`DeviceEvent::Failed`]). Does nothing for a queue that does not exist.
    pub fn break_queue(&self, device: DeviceId, queue: QueueId) {
        self.0.borrow_mut().break_queue(device.0, usize::from(queue.0));
    }
}

/// One device of a [`Fabric`].
pub struct Emulated {
    fabric: Fabric,
    device: usize,
    /// A queue was failed and not destroyed yet.
    draining: bool,
}

impl Emulated {
    /// Names the device to its fabric.
    pub fn id(&self) -> DeviceId {
        DeviceId(self.device)
    }

    fn world(&self) -> std::cell::RefMut<'_, World> {
        self.fabric.0.borrow_mut()
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        self.world().remove_device(self.device);
    }
}

impl Provider for Emulated {
    fn limits(&self) -> Limits {
        self.world().devices[self.device].grant.limits
    }

    fn port(&self) -> PortAddress {
        self.world().devices[self.device].port()
    }

    fn register(&mut self, region: &Arc<Region>, access: Access) -> Result<MemoryId, ProviderError> {
        self.world().register(self.device, region, access)
    }

    fn remote(&self, memory: MemoryId) -> RemoteMemory {
        self.world().devices[self.device].memory(memory).remote
    }

    fn create(&mut self, queue: QueueId, requests: usize, receives: usize) -> Result<(u32, usize), ProviderError> {
        self.world().create(self.device, queue, requests, receives)
    }

    fn connect(&mut self, queue: QueueId, psn: u32, peer: &End, patience: Patience) -> Result<(), ProviderError> {
        self.world().connect(self.device, queue, psn, peer, patience)
    }

    fn post(&mut self, queue: QueueId, requests: &[Request]) -> Result<(), ProviderError> {
        self.world().post(self.device, queue, requests)
    }

    fn post_receives(&mut self, queue: QueueId, receives: &[Receive]) -> Result<(), ProviderError> {
        self.world().post_receives(self.device, queue, receives)
    }

    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        let draining = self.draining;
        let mut world = self.world();
        if world.behaviour.step_on_poll || (draining && world.behaviour.step_on_drain) {
            let step_ns = world.behaviour.step_ns;
            world.advance(step_ns);
        }
        world.poll(self.device, completions)
    }

    fn fail(&mut self, queue: QueueId) {
        self.draining = true;
        self.world().fail(self.device, usize::from(queue.0));
    }

    fn destroy(&mut self, queue: QueueId) {
        self.draining = false;
        self.world().destroy(self.device, usize::from(queue.0));
    }

    /// Nothing to do: there is no descriptor, the user polls.
    fn arm(&mut self) {}

    fn wait_fd(&self) -> Option<RawFd> {
        None
    }

    fn event(&mut self) -> Option<DeviceEvent> {
        self.world().devices[self.device].events.pop_front()
    }

    fn now_ns(&self) -> u64 {
        self.world().now_ns
    }
}
