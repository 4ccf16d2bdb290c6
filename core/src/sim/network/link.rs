//! A link: two directions of operations under way, how they land, and how all of it ends.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{LinkKind, Network, Waiting};
use crate::mem::Region;
use crate::sim::queue::What;
use crate::sim::tap::{TARGET_TAG, TO_SEQUENCER_TAGS};
use crate::sim::trace::Kind;
use crate::transport::{DownReason, Full, PeerId, RemoteOffset, SENDS_IN_FLIGHT_MAX};

/// What an operation carries.
#[derive(Debug)]
pub(super) enum Body {
    /// Bytes of a registered region, read when they land.
    Write { source: Arc<Region>, offset: usize, len: usize, remote: RemoteOffset },
    /// Bytes copied when they were issued.
    Inline { bytes: Vec<u8>, remote: RemoteOffset },
    /// A message.
    Send { message: Vec<u8> },
}

impl Body {
    fn len(&self) -> usize {
        match self {
            Body::Write { len, .. } => *len,
            Body::Inline { bytes, .. } => bytes.len(),
            Body::Send { message } => message.len(),
        }
    }
}

/// An operation under way.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) body: Body,
    pub(super) notify: Option<u32>,
    pub(super) token: Option<u64>,
}

/// One direction.
#[derive(Debug)]
struct Pipe {
    wire: VecDeque<Operation>,
    /// How many at the front of the wire have arrived and not landed.
    arrived: usize,
    last_arrival_ns: u64,
    /// When operations that landed are acknowledged.
    acks: VecDeque<u64>,
    last_ack_ns: u64,
    /// Tokens of the acknowledgements under way, in order: those that a wall puts off keep it.
    tokens: VecDeque<u64>,
    /// Nothing passes in this direction before then.
    held_ns: u64,
    /// Operations that count against the capacity.
    in_flight: usize,
    capacity: usize,
    /// Messages that landed and were not released.
    unreleased: usize,
    /// The issuer met a full transport.
    starved: bool,
}

/// Who holds an end.
#[derive(Debug, Default)]
struct End {
    holder: Option<(usize, PeerId)>,
    exposed: Vec<Arc<Region>>,
    /// The link was lost before anybody took the end over.
    lost: Option<DownReason>,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) kind: LinkKind,
    pub(super) alive: bool,
    ends: [End; 2],
    pipes: [Pipe; 2],
}

impl Link {
    pub(super) fn new(kind: LinkKind, capacity: [usize; 2]) -> Link {
        let pipe = |capacity| Pipe {
            wire: VecDeque::new(),
            arrived: 0,
            last_arrival_ns: 0,
            acks: VecDeque::new(),
            last_ack_ns: 0,
            tokens: VecDeque::new(),
            held_ns: 0,
            in_flight: 0,
            capacity,
            unreleased: 0,
            starved: false,
        };
        Link { kind, alive: true, ends: Default::default(), pipes: capacity.map(pipe) }
    }
}

impl Network {
    /// A transport takes an end over as `peer`.
    pub(super) fn take_over(
        &mut self,
        endpoint: usize,
        peer: PeerId,
        (link, side): (u32, u8),
        exposed: &[Arc<Region>],
    ) {
        self.cut(endpoint, peer);
        self.endpoints[endpoint].peers[usize::from(peer.0)] = Some((link, side));
        let end = &mut self.links[link as usize].ends[usize::from(side)];
        end.holder = Some((endpoint, peer));
        end.exposed = exposed.to_vec();
        if let Some(reason) = end.lost {
            self.plan(self.now_ns, What::Down { link, side, reason });
            return;
        }
        let waiting = self.links[link as usize].pipes[usize::from(1 - side)].arrived;
        for _ in 0..waiting {
            self.landing(link, 1 - side);
        }
    }

    /// Issues an operation from this side of a link.
    pub(super) fn issue(&mut self, endpoint: usize, to: PeerId, operation: Operation) -> Result<(), Full> {
        let Some((link, side)) = self.endpoints[endpoint].peers[usize::from(to.0)] else { return Err(Full) };
        if let Some(left) = &mut self.leave {
            if *left == 0 {
                return Ok(());
            }
            *left -= 1;
        }
        let polled_ns = self.endpoints[endpoint].polled_ns;
        let Link { alive, pipes, .. } = &mut self.links[link as usize];
        let (alive, pipe) = (*alive, &mut pipes[usize::from(side)]);
        if pipe.in_flight == pipe.capacity {
            while pipe.acks.front().is_some_and(|at| *at <= polled_ns) {
                pipe.acks.pop_front();
                pipe.in_flight -= 1;
            }
        }
        if pipe.in_flight == pipe.capacity {
            if !pipe.starved {
                pipe.starved = true;
                let first = pipe.acks.front().copied();
                if let Some(at_ns) = first {
                    self.plan(at_ns, What::Room { link, side });
                }
            }
            self.seen.full += 1;
            return Err(Full);
        }
        pipe.in_flight += 1;
        if !alive {
            return Ok(()); // Lost, and this side does not know yet.
        }
        let bytes = operation.body.len();
        let is_target = matches!(&operation.body, Body::Send { message } if message.first() == Some(&TARGET_TAG));
        let (arrived, last) = (pipe.arrived, pipe.wire.len());
        let overtakes = self.knobs.targets_overtake && is_target && self.endpoints[endpoint].overtaken;
        let place = if overtakes { self.rng.range(arrived as u64, last as u64) as usize } else { last };
        self.seen.overtaken += u64::from(place < last);
        self.links[link as usize].pipes[usize::from(side)].wire.insert(place, operation);
        let arrival_ns = self.issue_ns + self.way_ns(link, bytes);
        let pipe = &mut self.links[link as usize].pipes[usize::from(side)];
        let arrival_ns = arrival_ns.max(pipe.last_arrival_ns).max(pipe.held_ns);
        pipe.last_arrival_ns = arrival_ns;
        self.plan(arrival_ns, What::Arrive { link, side });
        self.note(Kind::Issue, u64::from(link) * 2 + u64::from(side), bytes as u64, arrival_ns);
        Ok(())
    }

    pub(super) fn arrive(&mut self, link: u32, side: u8) {
        if !self.links[link as usize].alive || self.held(link, side, What::Arrive { link, side }) {
            return;
        }
        self.links[link as usize].pipes[usize::from(side)].arrived += 1;
        if self.links[link as usize].ends[usize::from(1 - side)].holder.is_some() {
            self.landing(link, side);
        }
    }

    /// An operation of a pipe with a receiver is ready to land: now or when polled.
    fn landing(&mut self, link: u32, side: u8) {
        let Some((endpoint, _)) = self.links[link as usize].ends[usize::from(1 - side)].holder else { return };
        if self.knobs.nic {
            self.land_all(link, side);
        } else {
            self.endpoints[endpoint].arrivals.push_back(link);
            self.wake(endpoint);
        }
    }

    /// Lands what has arrived, as far as receives are posted.
    fn land_all(&mut self, link: u32, side: u8) {
        while self.land(link, side, self.now_ns) {}
    }

    /// Lands the next operation of the peer of an endpoint, when polled.
    pub(super) fn land_polled(&mut self, endpoint: usize) -> bool {
        let Some(link) = self.endpoints[endpoint].arrivals.pop_front() else { return false };
        let ends = &self.links[link as usize].ends;
        let side = usize::from(ends[0].holder.is_some_and(|(holder, _)| holder == endpoint)) as u8;
        if self.links[link as usize].alive && !self.land(link, side, self.issue_ns) {
            self.endpoints[endpoint].held_back.push(link);
        }
        true
    }

    /// Lands one operation if one has arrived and may land; `base_ns` is when its acknowledgement leaves.
    fn land(&mut self, link: u32, side: u8, base_ns: u64) -> bool {
        let Link { kind, alive, ends, pipes } = &mut self.links[link as usize];
        let (kind, pipe) = (*kind, &mut pipes[usize::from(side)]);
        let Some((endpoint, peer)) = ends[usize::from(1 - side)].holder.filter(|_| *alive && pipe.arrived > 0) else {
            return false;
        };
        let message =
            pipe.wire.front().and_then(|o| if let Body::Send { message } = &o.body { Some(message) } else { None });
        if let Some(message) = message.filter(|_| pipe.unreleased == SENDS_IN_FLIGHT_MAX) {
            // A sequencer that does not run for many times the suspicion time is told often enough that its replicas
            // live: the transport holds that back, and what they ask behind it. Nothing else may need it to.
            let to_sequencer = message.first().is_some_and(|tag| TO_SEQUENCER_TAGS.contains(tag));
            if kind != LinkKind::Client && !to_sequencer {
                self.seen.overrun = self.seen.overrun.or(Some(link));
            }
            return false;
        }
        let Some(Operation { body, notify, token }) = pipe.wire.pop_front() else { return false };
        pipe.arrived -= 1;
        let bytes = body.len();
        let exposed = &ends[usize::from(1 - side)].exposed;
        let inside = |remote: RemoteOffset| {
            let region = exposed.get(usize::from(remote.region))?;
            remote.offset.checked_add(bytes).is_some_and(|end| end <= region.len()).then_some((region, remote.offset))
        };
        let message = match body {
            Body::Write { source, offset, len, remote } => match inside(remote) {
                Some((region, at)) => {
                    region.put_from(at, &source, offset, len);
                    None
                }
                None => return self.break_rules(link, side),
            },
            Body::Inline { bytes, remote } => match inside(remote) {
                Some((region, at)) => {
                    match <[u8; 8]>::try_from(&bytes[..]) {
                        Ok(word) if at.is_multiple_of(8) => region.store_u64(at, u64::from_ne_bytes(word)),
                        _ => region.put(at, &bytes),
                    }
                    None
                }
                None => return self.break_rules(link, side),
            },
            Body::Send { message } => {
                pipe.unreleased += 1;
                Some(message)
            }
        };
        self.note(Kind::Land, u64::from(link) * 2 + u64::from(side), bytes as u64, token.unwrap_or(0));
        self.tell(endpoint, link, peer, notify, message);
        self.acknowledge(link, side, base_ns, token);
        true
    }

    /// Puts what an operation has to tell into its receiver's inbox.
    fn tell(&mut self, endpoint: usize, link: u32, peer: PeerId, notify: Option<u32>, message: Option<Vec<u8>>) {
        if notify.is_none() && message.is_none() {
            return;
        }
        let inbox = &mut self.endpoints[endpoint].inbox;
        if let Some(message) = message {
            inbox.push_back((link, peer, Waiting::Received { message }));
        } else if let Some(value) = notify {
            match inbox.back_mut() {
                Some((last, _, Waiting::Notified { value: old })) if *last == link => *old = value,
                _ => inbox.push_back((link, peer, Waiting::Notified { value })),
            }
        }
        self.wake(endpoint);
    }

    fn acknowledge(&mut self, link: u32, side: u8, base_ns: u64, token: Option<u64>) {
        let way_ns = self.way_ns(link, 0);
        let back_ns = self.links[link as usize].pipes[usize::from(1 - side)].held_ns;
        let pipe = &mut self.links[link as usize].pipes[usize::from(side)];
        let at_ns = (base_ns + way_ns).max(pipe.last_ack_ns).max(back_ns);
        pipe.last_ack_ns = at_ns;
        pipe.acks.push_back(at_ns);
        let room = pipe.starved && pipe.acks.len() == 1;
        if let Some(token) = token {
            pipe.tokens.push_back(token);
            self.plan(at_ns, What::Acked { link, side });
        }
        if room {
            self.plan(at_ns, What::Room { link, side });
        }
    }

    /// Nothing passes in a direction of a link until then.
    pub(in crate::sim) fn hold(&mut self, link: u32, side: u8, until_ns: u64) {
        if self.links[link as usize].alive {
            self.note(Kind::Wall, u64::from(link) * 2 + u64::from(side), until_ns, 0);
            let pipe = &mut self.links[link as usize].pipes[usize::from(side)];
            pipe.held_ns = pipe.held_ns.max(until_ns);
        }
    }

    /// Puts something off that comes from a side through which nothing passes now.
    fn held(&mut self, link: u32, side: u8, what: What) -> bool {
        let held_ns = self.links[link as usize].pipes[usize::from(side)].held_ns;
        if held_ns > self.now_ns {
            self.plan(held_ns, what);
        }
        held_ns > self.now_ns
    }

    pub(super) fn acked(&mut self, link: u32, side: u8) {
        if self.held(link, 1 - side, What::Acked { link, side }) {
            return;
        }
        let Link { alive: true, ends, pipes, .. } = &mut self.links[link as usize] else { return };
        let Some(token) = pipes[usize::from(side)].tokens.pop_front() else { return };
        let Some((endpoint, peer)) = ends[usize::from(side)].holder else { return };
        match self.endpoints[endpoint].inbox.back_mut() {
            Some((last, _, Waiting::Placed { token: old })) if *last == link => *old = token,
            _ => self.endpoints[endpoint].inbox.push_back((link, peer, Waiting::Placed { token })),
        }
        self.wake(endpoint);
    }

    pub(super) fn room(&mut self, link: u32, side: u8) {
        let Link { alive: true, ends, pipes, .. } = &mut self.links[link as usize] else { return };
        pipes[usize::from(side)].starved = false;
        let Some((endpoint, _)) = ends[usize::from(side)].holder else { return };
        self.endpoints[endpoint].room = true;
        self.wake(endpoint);
    }

    /// A message's buffer came back: what waited for it may land.
    pub(super) fn released(&mut self, endpoint: usize, link: u32) {
        let ends = &self.links[link as usize].ends;
        let side = usize::from(ends[0].holder.is_some_and(|(holder, _)| holder == endpoint));
        let pipe = &mut self.links[link as usize].pipes[side];
        pipe.unreleased = pipe.unreleased.saturating_sub(1);
        if self.knobs.nic {
            self.land_all(link, side as u8);
        } else {
            let held = &mut self.endpoints[endpoint].held_back;
            if let Some(at) = held.iter().position(|l| *l == link) {
                held.remove(at);
                self.endpoints[endpoint].arrivals.push_front(link);
            }
        }
    }

    /// A write outside what was exposed ends the connection.
    fn break_rules(&mut self, link: u32, side: u8) -> bool {
        self.seen.rules_broken += 1;
        self.end(link);
        let way_ns = self.way_ns(link, 0);
        self.plan(self.now_ns, What::Down { link, side: 1 - side, reason: DownReason::Protocol });
        self.plan(self.now_ns + way_ns, What::Down { link, side, reason: DownReason::Closed });
        false
    }

    /// The link carries nothing any more.
    fn end(&mut self, link: u32) {
        let Link { kind, alive, pipes, .. } = &mut self.links[link as usize];
        *alive = false;
        let busy = pipes.iter().any(|pipe| !pipe.wire.is_empty());
        for pipe in pipes {
            pipe.wire.clear();
            pipe.arrived = 0;
        }
        let kind = *kind;
        self.seen.lost[kind as usize] += u64::from(busy);
        self.note(Kind::Lost, link.into(), kind as u64, busy.into());
    }

    /// Whether a link has not broken and was not closed.
    pub(in crate::sim) fn is_alive(&self, link: u32) -> bool {
        self.links[link as usize].alive
    }

    /// The link breaks: both sides learn of it, each at its own time.
    pub(super) fn lose(&mut self, link: u32) {
        if !self.links[link as usize].alive {
            return;
        }
        self.end(link);
        for side in [0, 1] {
            let way_ns = self.way_ns(link, 0) + self.rng.below(2_000_000);
            let reason = if self.rng.percent(50) { DownReason::Closed } else { DownReason::Io(104) };
            self.plan(self.now_ns + way_ns, What::Down { link, side, reason });
        }
    }

    /// One side closes: the other learns of it.
    pub(super) fn close(&mut self, link: u32, side: u8, reason: DownReason) {
        if !self.links[link as usize].alive {
            return;
        }
        self.end(link);
        let way_ns = self.way_ns(link, 0) + self.silent_ns.unwrap_or(0);
        self.plan(self.issue_ns.max(self.now_ns) + way_ns, What::Down { link, side: 1 - side, reason });
    }

    pub(super) fn down(&mut self, link: u32, side: u8, reason: DownReason) {
        if self.held(link, 1 - side, What::Down { link, side, reason }) {
            return;
        }
        let end = &mut self.links[link as usize].ends[usize::from(side)];
        let Some((endpoint, peer)) = end.holder else {
            end.lost = Some(reason);
            return;
        };
        if self.endpoints[endpoint].peers[usize::from(peer.0)] != Some((link, side)) {
            return;
        }
        self.note(Kind::Down, link.into(), side.into(), 0);
        self.endpoints[endpoint].inbox.push_back((link, peer, Waiting::Down { reason }));
        self.wake(endpoint);
    }

    /// Cuts a peer off: nothing of it is reported or lands any more.
    pub(super) fn cut(&mut self, endpoint: usize, peer: PeerId) {
        let Some(slot) = self.endpoints[endpoint].peers.get_mut(usize::from(peer.0)) else { return };
        let Some((link, side)) = slot.take() else { return };
        self.endpoints[endpoint].inbox.retain(|(of, ..)| *of != link);
        let Link { kind, pipes, .. } = &self.links[link as usize];
        let writes = pipes[usize::from(1 - side)].wire.iter().filter(|o| matches!(o.body, Body::Write { .. }));
        if *kind == LinkKind::Replication {
            self.seen.fenced += writes.count() as u64;
        }
        self.close(link, side, DownReason::Closed);
    }
}
