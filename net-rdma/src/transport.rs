//! The transport itself: pairs that agreed on RDMA on their queue pairs, everyone else on the carrier.
//!
//! The carrier is another [`Transport`], TCP in the product. Every peer is connected through it first. A link that the
//! hand-shake marked for RDMA then brings up a queue pair (`pair`), and from there on the carrier's connection carries
//! nothing but its own end: when the peer's process dies, that is how this side learns it at once. A pair that does not
//! come up, or a device that is lost, ends the connection with the reason kept in [`Health`], and the next one is made over
//! TCP.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;

use antelog_core::counters::Counters;
use antelog_core::mem::Region;
use antelog_core::transport::{
    DownReason, Event, Full, LocalRange, MessageHandle, PeerId, RegionKey, RemoteOffset, SEND_BYTES_MAX,
    SENDS_IN_FLIGHT_MAX, Transport,
};

use crate::counters::TransportCounters;
use crate::drain::Drain;
use crate::health::Health;
use crate::inbox::{Buffers, Held, Inbox, SLACK};
use crate::output::{Output, OutputSizes, REQUESTS_MIN};
use crate::pair::{Pair, Progress, label};
use crate::provider::{Access, Completion, End, Failure, Local, MemoryId, Patience, Provider, ProviderError, QueueId};
use crate::setup::{Offer, REGIONS_MAX, Setup};

/// The most bytes `write_inline` takes, by the contract.
const INLINE_BYTES_MAX: usize = 256;

/// Completions taken at a time.
const TAKEN: usize = 16;

/// Completions handled in one `poll` at most, so that a fast peer does not keep the owner from its other work.
const PER_POLL: usize = 256;

/// How long the end of a queue pair waits for its receives to be flushed. Longer changes nothing: the queue pair is
/// destroyed after it, and late completions are recognised.
const DRAIN_NS: u64 = 100_000_000;

/// Message handles with this bit are ours, the others the carrier's.
const OWN_HANDLE: u32 = 1 << 31;

/// Sizes and patience. The defaults suit a node.
#[derive(Clone, Debug)]
pub struct Options {
    /// Requests a pair may have outstanding.
    pub requests: usize,
    /// Receives posted for a pair: messages and notifications its peer may have under way. 8 KiB each.
    pub receives: usize,
    /// Memory for small operations under way, per pair, in bytes.
    pub staging_bytes: usize,
    /// Patience of connections.
    pub patience: Patience,
    /// Time for a pair to come up.
    pub bring_up_ns: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            requests: 128,
            receives: SENDS_IN_FLIGHT_MAX,
            staging_bytes: 256 << 10,
            patience: Patience { ack_timeout: 14, retries: 7 },
            bring_up_ns: 3_000_000_000,
        }
    }
}

impl Options {
    /// Completions that a transport for so many peers may have outstanding: the completion queue's size.
    pub fn completions(&self, peers: u16) -> usize {
        usize::from(peers) * (self.requests + 1 + self.receives + SLACK)
    }
}

/// An established connection through the carrier, and whether it is to become a pair.
#[derive(Debug)]
pub struct Link<L> {
    /// The carrier's.
    pub carrier: L,
    /// Where the peer is, if the hand-shake decided for RDMA.
    pub rdma: Option<IpAddr>,
}

/// How operations reach a peer.
#[derive(Debug)]
enum Route {
    None,
    Carrier,
    Pair(Box<Pair>),
}

/// A registered source of writes.
struct Source {
    region: Arc<Region>,
    key: RegionKey,
    memory: Option<MemoryId>,
}

/// See the module's text. Made and used on one thread.
pub struct RdmaTransport<P: Provider, C: Transport> {
    /// Before the carrier, so that queue pairs end before the peers learn of the end.
    device: Option<P>,
    carrier: C,
    options: Options,
    health: Health,
    counters: Option<TransportCounters>,
    routes: Vec<Route>,
    pairs: usize,
    generation: u16,
    sources: Vec<Source>,
    /// Regions exposed so far.
    exposed: Vec<(Arc<Region>, MemoryId)>,
    spare_buffers: Vec<Rc<Buffers>>,
    spare_staging: Vec<(Arc<Region>, MemoryId)>,
    held: Vec<Option<Held>>,
    free_handles: Vec<u32>,
    /// Taken from the completion queue and not handled yet.
    backlog: VecDeque<Completion>,
    downs: VecDeque<(PeerId, DownReason)>,
    /// Pairs with something staged, or with receives to post again, each once.
    dirty: Vec<PeerId>,
    /// Pairs that are not up yet.
    starting: Vec<PeerId>,
    /// Queue pairs that the device said it failed, and that were not met yet.
    failed: usize,
    /// Pairs that end once the completion queue is empty.
    closing: Vec<PeerId>,
    #[cfg(feature = "mutants")]
    first_keys: std::collections::BTreeMap<PeerId, Vec<crate::provider::RemoteMemory>>,
}

impl<P: Provider, C: Transport> RdmaTransport<P, C> {
    /// A transport for peers `0..peers_max` over `carrier`; `device` was opened for as many queue pairs and for
    /// [`Options::completions`]. Without a device everyone stays on the carrier.
    pub fn new(carrier: C, device: Option<P>, peers_max: u16, options: Options, health: Health) -> RdmaTransport<P, C> {
        RdmaTransport {
            device,
            carrier,
            options,
            health,
            counters: None,
            routes: (0..peers_max).map(|_| Route::None).collect(),
            pairs: 0,
            generation: 0,
            sources: Vec::new(),
            exposed: Vec::new(),
            spare_buffers: Vec::new(),
            spare_staging: Vec::new(),
            held: Vec::new(),
            free_handles: Vec::new(),
            backlog: VecDeque::with_capacity(TAKEN),
            downs: VecDeque::new(),
            dirty: Vec::with_capacity(peers_max.into()),
            starting: Vec::new(),
            failed: 0,
            closing: Vec::with_capacity(peers_max.into()),
            #[cfg(feature = "mutants")]
            first_keys: Default::default(),
        }
    }

    /// Counts into these; set-up only.
    #[must_use]
    pub fn with_counters(mut self, counters: &Counters) -> RdmaTransport<P, C> {
        self.counters = Some(TransportCounters::new(counters, self.routes.len() as u16));
        self
    }

    /// Registers a region that will be exposed to peers, so that their admission need not wait for that: a log of a gigabyte
    /// takes a good part of a second. Set-up only; a failure disables RDMA.
    pub fn prepare(&mut self, region: &Arc<Region>) {
        if self.device.is_some()
            && let Err(error) = self.memory_of(region)
        {
            self.health.disable(&error.text);
        }
    }

    /// Whether data to this peer goes through a queue pair that is up.
    pub fn is_pair(&self, peer: PeerId) -> bool {
        matches!(self.routes.get(usize::from(peer.0)), Some(Route::Pair(pair)) if pair.is_up)
    }

    fn pair(&mut self, peer: PeerId) -> Option<&mut Pair> {
        match self.routes.get_mut(usize::from(peer.0)) {
            Some(Route::Pair(pair)) => Some(pair),
            _ => None,
        }
    }

    fn memory_of(&mut self, region: &Arc<Region>) -> Result<MemoryId, ProviderError> {
        if let Some((_, memory)) = self.exposed.iter().find(|(known, _)| Arc::ptr_eq(known, region)) {
            return Ok(*memory);
        }
        let device = self.device.as_mut().ok_or_else(no_device)?;
        let memory = device.register(region, Access::RemoteWrite)?;
        self.exposed.push((region.clone(), memory));
        Ok(memory)
    }

    /// Memory of our own, registered: used again when a pair ends.
    fn own_memory(&mut self, bytes: usize) -> Result<(Arc<Region>, MemoryId), ProviderError> {
        let no_memory = |error: std::io::Error| ProviderError {
            text: format!("no memory for {bytes} bytes of buffers: {error}"),
            errno: libc::ENOMEM,
        };
        let region = Region::new(bytes).map_err(no_memory)?;
        let memory = self.device.as_mut().ok_or_else(no_device)?.register(&region, Access::Local)?;
        Ok((region, memory))
    }

    /// Builds a pair up to its offer.
    fn new_pair(&mut self, peer: PeerId, host: IpAddr, exposed: &[Arc<Region>]) -> Result<Pair, ProviderError> {
        assert!(exposed.len() <= REGIONS_MAX, "more than {REGIONS_MAX} exposed regions");
        if let Some(reason) = self.health.disabled() {
            return Err(ProviderError { text: reason, errno: libc::ENODEV });
        }
        let mut memories = Vec::with_capacity(exposed.len());
        for region in exposed {
            memories.push(self.memory_of(region)?);
        }
        if self.spare_buffers.is_empty() {
            let (region, memory) = self.own_memory(Buffers::bytes(self.options.receives))?;
            self.spare_buffers.push(Buffers::new(region, memory));
        }
        if self.spare_staging.is_empty() {
            let spare = self.own_memory(self.options.staging_bytes)?;
            self.spare_staging.push(spare);
        }
        let device = self.device.as_mut().ok_or_else(no_device)?;
        let limits = device.limits();
        let sizes = ((self.options.requests + 1).min(limits.requests_max), self.options.receives + SLACK);
        if sizes.0 < REQUESTS_MIN + 1 {
            let text = format!("queues of {} requests are too short, a pair needs {}", sizes.0, REQUESTS_MIN + 1);
            return Err(ProviderError { text, errno: libc::ENOSPC });
        }
        // Every request and receive of a failing queue completes: an overrun would be the end of the device for us.
        if (self.pairs + 1) * (sizes.0 + sizes.1) > limits.completions {
            let text =
                format!("the device's completion queue of {} is in use by {} pairs", limits.completions, self.pairs);
            return Err(ProviderError { text, errno: libc::ENOSPC });
        }
        let queue = QueueId(peer.0);
        let (number, inline_bytes) = device.create(queue, sizes.0, sizes.1)?;
        // Memory stays registered as long as the device is open, so it is taken only when nothing above can fail any more.
        let (Some(buffers), Some((staging, staging_memory))) = (self.spare_buffers.pop(), self.spare_staging.pop())
        else {
            unreachable!("both were just made");
        };
        self.generation = self.generation.wrapping_add(1);
        let sizes = OutputSizes { depth: sizes.0 - 1, inline_bytes, message_bytes_max: limits.message_bytes_max };
        // Predictable would do: the number only has to differ from what a former connection's late packets carry.
        let psn = (device.now_ns() >> 4) as u32 & 0xFF_FFFF;
        let mut pair = Pair {
            peer,
            generation: self.generation,
            host,
            is_up: false,
            progress: Progress::default(),
            deadline_ns: device.now_ns() + self.options.bring_up_ns,
            psn,
            output: Output::new(label(peer, self.generation), sizes, staging, staging_memory),
            inbox: Inbox::new(buffers),
            closing: None,
            is_dirty: false,
            counters: self.counters.as_ref().map(|counters| counters.of(peer)).unwrap_or_default(),
        };
        let offer = Offer {
            end: End { port: device.port(), number, psn },
            receives: (pair.inbox.buffers.count() - SLACK) as u32,
            regions: memories.iter().map(|memory| device.remote(*memory)).collect(),
        };
        pair.replenish(device, true)?;
        pair.progress.to_say.push_back(Setup::Offer(offer));
        Ok(pair)
    }

    /// Ends a pair's queue: when this returns nothing from its peer lands. Returns why the queue had failed, if it had and a
    /// completion says so.
    fn take_down(&mut self, peer: PeerId) -> Option<Failure> {
        let route = self.routes.get_mut(usize::from(peer.0))?;
        let Route::Pair(mut pair) = std::mem::replace(route, Route::None) else { return None };
        self.pairs -= 1;
        for list in [&mut self.dirty, &mut self.starting, &mut self.closing] {
            list.retain(|listed| *listed != peer);
        }
        self.look_at_device();
        let device = self.device.as_mut()?;
        device.fail(pair.queue());
        let until_ns = device.now_ns() + DRAIN_NS;
        let mut drain = Drain::new(&mut pair, device);
        self.backlog.retain(|completion| !drain.takes(completion));
        let mut taken = [NOTHING; TAKEN];
        while drain.is_open() && !self.health.is_disabled() && device.now_ns() < until_ns {
            let count = device.poll(&mut taken);
            self.backlog.extend(taken[..count].iter().filter(|completion| !drain.takes(completion)));
        }
        device.destroy(pair.queue());
        // What is left of the queue must not fill the completion queue of the next.
        loop {
            let count = device.poll(&mut taken);
            self.backlog.extend(taken[..count].iter().filter(|completion| !drain.takes(completion)));
            if count == 0 {
                break;
            }
        }
        let Pair { output, inbox, .. } = *pair;
        self.spare_staging.push(output.into_staging());
        if Rc::strong_count(&inbox.buffers) == 1 {
            self.spare_buffers.push(inbox.buffers);
        }
        drain.cause()
    }

    /// Ends a pair and reports it. `why` is given when the device or the set-up is at fault rather than the peer.
    fn break_pair(&mut self, peer: PeerId, reason: DownReason, why: Option<&str>) {
        let Some(pair) = self.pair(peer) else { return };
        let host = pair.host;
        self.take_down(peer);
        self.report_end(peer, host, reason, why);
    }

    /// The rest of a pair's end, after its queue's.
    fn report_end(&mut self, peer: PeerId, host: IpAddr, reason: DownReason, why: Option<&str>) {
        if let Some(why) = why {
            self.health.avoid(host, why);
            self.health.say(&format!("rdma with {host} ends: {why}; the next connection uses tcp"));
        }
        self.carrier.fence(peer);
        self.downs.push_back((peer, reason));
    }

    fn mark_dirty(pair: &mut Pair, dirty: &mut Vec<PeerId>) {
        if !pair.is_dirty {
            pair.is_dirty = true;
            dirty.push(pair.peer);
        }
    }

    /// The pair ends in a later `poll`, when nothing of it is left to report.
    fn close_later(pair: &mut Pair, closing: &mut Vec<PeerId>, reason: DownReason) {
        if pair.closing.is_none() {
            pair.closing = Some(reason);
            closing.push(pair.peer);
        }
    }

    /// The device did not take what it was promised to have room for.
    fn refuse(pair: &mut Pair, closing: &mut Vec<PeerId>, health: &Health, error: &ProviderError) {
        health.avoid(pair.host, &error.text);
        health.say(&format!("rdma with {} ends: {error}; the next connection uses tcp", pair.host));
        Self::close_later(pair, closing, DownReason::Io(error.errno));
    }

    /// The pair to issue to, with room for `requests` more in its doorbell.
    #[inline]
    fn outlet(&mut self, to: PeerId, requests: impl Fn(&Output) -> usize) -> Result<&mut Pair, Full> {
        let (Some(Route::Pair(pair)), Some(device)) = (self.routes.get_mut(usize::from(to.0)), &mut self.device) else {
            return Err(Full);
        };
        if !pair.is_up || pair.closing.is_some() {
            return Err(Full);
        }
        if pair.output.is_batch(requests(&pair.output))
            && let Err(error) = pair.ring(device, false)
        {
            Self::refuse(pair, &mut self.closing, &self.health, &error);
            return Err(Full);
        }
        Self::mark_dirty(pair, &mut self.dirty);
        Ok(pair)
    }

    /// Posts freed receives and hands over what is staged, for every pair that has some.
    fn ring_dirty(&mut self) {
        let Some(device) = &mut self.device else { return };
        for peer in self.dirty.drain(..) {
            let Some(Route::Pair(pair)) = self.routes.get_mut(usize::from(peer.0)) else { continue };
            pair.is_dirty = false;
            // After an error nobody knows how much of what is staged the device took: nothing is handed over twice.
            if pair.closing.is_some() {
                continue;
            }
            if let Err(error) = pair.replenish(device, false).and_then(|()| pair.ring(device, false)) {
                Self::refuse(pair, &mut self.closing, &self.health, &error);
            }
        }
    }
}

mod reports;

/// A place in a list of completions.
const NOTHING: Completion = Completion { id: 0, result: Err(Failure::Flushed) };

fn no_device() -> ProviderError {
    ProviderError { text: "this process uses no RDMA device".into(), errno: libc::ENODEV }
}

impl<P: Provider, C: Transport> Transport for RdmaTransport<P, C> {
    type Link = Link<C::Link>;

    fn register(&mut self, region: Arc<Region>) -> RegionKey {
        let own = RegionKey(u16::try_from(self.sources.len()).expect("fewer than 65536 regions"));
        let key = self.carrier.register(region.clone());
        let registered = self.device.as_mut().map(|device| device.register(&region, Access::Local)).transpose();
        let memory = registered.unwrap_or_else(|error| {
            self.health.disable(&error.text);
            None
        });
        self.sources.push(Source { region, key, memory });
        own
    }

    fn admit(&mut self, peer: PeerId, link: Link<C::Link>, exposed: &[Arc<Region>]) {
        self.fence(peer);
        let Some(host) = link.rdma else {
            self.carrier.admit(peer, link.carrier, exposed);
            self.routes[usize::from(peer.0)] = Route::Carrier;
            return;
        };
        self.carrier.admit(peer, link.carrier, &[]);
        match self.new_pair(peer, host, exposed) {
            Ok(pair) => {
                self.routes[usize::from(peer.0)] = Route::Pair(Box::new(pair));
                self.pairs += 1;
                self.starting.push(peer);
                // As many messages may be held at once as there are receives; `poll` does not allocate for them.
                self.held.reserve(self.pairs * (self.options.receives + SLACK));
                self.free_handles.reserve(self.held.capacity() - self.free_handles.len());
            }
            Err(error) => {
                // Said to the peer, so that both know why the next connection is made over TCP.
                if let Some(device) = &mut self.device {
                    device.destroy(QueueId(peer.0));
                }
                self.health.avoid(host, &error.text);
                self.health.say(&format!("no rdma with {host}: {}; the next connection uses tcp", error.text));
                let _ = self.carrier.send(peer, &Setup::Decline(error.text).encode());
                self.carrier.flush();
                self.carrier.fence(peer);
                self.downs.push_back((peer, DownReason::Io(error.errno)));
            }
        }
    }

    #[inline]
    fn write(
        &mut self,
        to: PeerId,
        local: LocalRange,
        remote: RemoteOffset,
        notify: Option<u32>,
        token: Option<u64>,
    ) -> Result<(), Full> {
        let source = &self.sources[usize::from(local.region.0)];
        if let Some(Route::Carrier) = self.routes.get(usize::from(to.0)) {
            let local = LocalRange { region: source.key, ..local };
            return self.carrier.write(to, local, remote, notify, token);
        }
        let inside = local.offset.checked_add(local.len).is_some_and(|end| end <= source.region.len());
        assert!(inside, "a write from outside its region");
        let memory = source.memory;
        let pair = self.outlet(to, |output| output.parts(local.len))?;
        // Without memory there is no pair, or the region came later and the device took no more: it is off then.
        let memory = memory.ok_or(Full)?;
        let from = Local { memory, offset: local.offset, len: local.len };
        let issued = pair.output.write(from, (remote.region, remote.offset), notify, token);
        pair.counters.on_write(&issued);
        issued.map(|_| ())
    }

    #[inline]
    fn write_inline(
        &mut self,
        to: PeerId,
        bytes: &[u8],
        remote: RemoteOffset,
        notify: Option<u32>,
    ) -> Result<(), Full> {
        assert!(bytes.len() <= INLINE_BYTES_MAX, "inline writes take at most {INLINE_BYTES_MAX} bytes");
        if let Some(Route::Carrier) = self.routes.get(usize::from(to.0)) {
            return self.carrier.write_inline(to, bytes, remote, notify);
        }
        let pair = self.outlet(to, |_| 1)?;
        let issued = pair.output.write_inline(bytes, (remote.region, remote.offset), notify);
        pair.counters.on_write(&issued);
        issued.map(|_| ())
    }

    #[inline]
    fn send(&mut self, to: PeerId, message: &[u8]) -> Result<(), Full> {
        assert!(message.len() <= SEND_BYTES_MAX, "messages have at most {SEND_BYTES_MAX} bytes");
        if let Some(Route::Carrier) = self.routes.get(usize::from(to.0)) {
            return self.carrier.send(to, message);
        }
        let pair = self.outlet(to, |_| 1)?;
        let issued = pair.output.send(message);
        pair.counters.on_send(&issued);
        issued.map(|_| ())
    }

    fn flush(&mut self) {
        if !self.dirty.is_empty() {
            self.ring_dirty();
        }
        self.carrier.flush();
    }

    fn poll(&mut self, events: &mut [Event]) -> usize {
        // Half of the places are kept for pairs, whatever the carrier has to say.
        let kept = if self.pairs == 0 { 0 } else { events.len() / 2 };
        let room = events.len() - kept;
        let count = self.carrier.poll(&mut events[..room]);
        if self.pairs == 0 && self.downs.is_empty() && !self.health_news() {
            return count;
        }
        self.report(events, count)
    }

    #[inline]
    fn message(&self, handle: MessageHandle) -> &[u8] {
        if handle.0 & OWN_HANDLE == 0 {
            return self.carrier.message(handle);
        }
        let held = self.held.get((handle.0 & !OWN_HANDLE) as usize).and_then(Option::as_ref);
        held.expect("a message that was not released").bytes()
    }

    fn release(&mut self, handle: MessageHandle) {
        if handle.0 & OWN_HANDLE == 0 {
            return self.carrier.release(handle);
        }
        let place = handle.0 & !OWN_HANDLE;
        let held = self.held.get_mut(place as usize).and_then(Option::take).expect("a message that was not released");
        self.free_handles.push(place);
        match self.routes.get_mut(usize::from(held.peer)) {
            Some(Route::Pair(pair)) if Rc::ptr_eq(&pair.inbox.buffers, &held.buffers) => {
                pair.inbox.release(held.slot, true);
                Self::mark_dirty(pair, &mut self.dirty);
            }
            // The last message of a pair that is gone: its memory is of use again while the device is.
            _ if self.device.is_some() && Rc::strong_count(&held.buffers) == 1 => self.spare_buffers.push(held.buffers),
            _ => {}
        }
    }

    fn fence(&mut self, peer: PeerId) {
        self.carrier.fence(peer);
        self.take_down(peer);
        self.downs.retain(|(down, _)| *down != peer);
        if let Some(route) = self.routes.get_mut(usize::from(peer.0)) {
            *route = Route::None;
        }
    }

    fn wait_fds(&self, fds: &mut Vec<RawFd>) {
        self.carrier.wait_fds(fds);
        fds.extend(self.device.as_ref().and_then(P::wait_fd));
    }

    fn prepare_wait(&mut self) -> bool {
        // A peer may be waiting for the credit of what was released since the last poll.
        self.ring_dirty();
        if self.carrier.prepare_wait() || !self.downs.is_empty() || !self.backlog.is_empty() {
            return true;
        }
        let Some(device) = &mut self.device else { return false };
        device.arm();
        let mut taken = [NOTHING; TAKEN];
        let count = device.poll(&mut taken);
        self.backlog.extend(&taken[..count]);
        self.look_at_device();
        // Pairs that are coming up have a deadline that no descriptor announces.
        !self.backlog.is_empty() || !self.starting.is_empty() || !self.closing.is_empty() || self.health_news()
    }
}
