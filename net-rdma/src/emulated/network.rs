//! The network's side of the fabric: moves what was posted to its peer, in pieces, late, and not always.

use std::collections::VecDeque;

use antelog_core::mem::Region;

use super::device::World;
use super::queue::{Message, Placing, Route, Side, Source, State, Stream};
use crate::provider::{Access, DeviceEvent, Done, Failure, Operation};

/// The verbs status of a receive whose buffer was too short.
const LOCAL_LENGTH_ERROR: u32 = 1;

/// What a queue had sent before it failed or was destroyed, and its peer has not executed yet.
pub(super) struct Orphan {
    route: Route,
    stream: Stream,
}

/// How far a stream got.
enum Progress {
    /// As far as chance would have it.
    Moved,
    /// Its next packet was lost.
    Lost,
    /// The peer has posted no receive.
    NotReady,
    /// The peer refuses the oldest message; its oldest receive fails with this.
    Refused(Failure),
}

impl World {
    /// Moves the clock on by `ns` and everything by a little.
    pub(super) fn advance(&mut self, ns: u64) {
        self.now_ns += ns;
        let devices = self.devices.len();
        let first = self.rng.below(devices);
        for n in 0..devices {
            let device = (first + n) % devices;
            if !self.devices[device].is_lost {
                self.advance_device(device);
            }
        }
        self.advance_orphans();
    }

    fn advance_device(&mut self, device: usize) {
        let queues = self.devices[device].queues.len();
        let first = self.rng.below(queues);
        for n in 0..queues {
            let queue = (first + n) % queues;
            let Some(ours) = &self.devices[device].queues[queue] else { continue };
            if self.behaviour.queue_failure > 0
                && matches!(ours.state, State::Connected(_))
                && self.rng.one_in(self.behaviour.queue_failure)
            {
                self.devices[device].events.push_back(DeviceEvent::Failed);
                self.fail(device, queue);
            }
            self.advance_queue(device, queue);
            self.show_completions(device, queue);
        }
    }

    fn show_completions(&mut self, device: usize, queue: usize) {
        let own = &mut self.devices[device];
        let Some(ours) = own.queues[queue].as_mut() else { return };
        let first = self.rng.bits() as usize & 1;
        for side in [first, 1 - first] {
            let done = &mut ours.done[side];
            if !done.is_empty() && self.rng.one_in(self.behaviour.completion_in) {
                let count = 1 + self.rng.below(done.len());
                own.completions.extend(done.drain(..count));
            }
        }
    }

    fn advance_queue(&mut self, device: usize, queue: usize) {
        let now_ns = self.now_ns;
        let ours = self.queue_mut(device, queue);
        let (State::Connected(patience), Some(route)) = (ours.state, ours.route) else { return };
        if ours.stream.messages.is_empty() || now_ns < ours.stalled_until_ns {
            return;
        }
        if ours.attempts > u32::from(patience.retries) {
            return self.put_in_error(device, queue, Failure::Unreachable, Failure::Flushed);
        }
        let is_ready = now_ns >= ours.not_ready_until_ns;
        let Some(target) = self.target(&route) else { return self.stall(device, queue) };
        if is_ready {
            let mut stream = std::mem::take(&mut self.queue_mut(device, queue).stream);
            let progress = self.advance_stream(device, &mut stream, target);
            self.queue_mut(device, queue).stream = stream;
            match progress {
                Progress::Moved => {}
                Progress::Lost => return self.stall(device, queue),
                Progress::NotReady => {
                    let until_ns = now_ns + self.behaviour.not_ready_ns;
                    self.queue_mut(device, queue).not_ready_until_ns = until_ns;
                }
                Progress::Refused(receive) => {
                    let executed = self.queue_mut(device, queue).stream.executed;
                    self.acknowledge(device, queue, executed);
                    self.put_in_error(device, queue, Failure::Refused, Failure::Flushed);
                    return self.put_in_error(target.0, target.1, Failure::Flushed, receive);
                }
            }
        }
        let executed = self.queue_mut(device, queue).stream.executed;
        if executed > 0 && self.rng.one_in(self.behaviour.ack_in) {
            if self.rng.one_in(self.behaviour.loss) {
                return self.stall(device, queue);
            }
            let count = 1 + self.rng.below(executed);
            self.acknowledge(device, queue, count);
        }
    }

    /// Something was lost: the sender waits one to four times its time-out.
    fn stall(&mut self, device: usize, queue: usize) {
        let quarters = 4 + self.rng.below(13) as u64;
        let now_ns = self.now_ns;
        let ours = self.queue_mut(device, queue);
        if let State::Connected(patience) = ours.state {
            ours.stalled_until_ns = now_ns + (1024 << patience.ack_timeout) * quarters;
            ours.attempts += 1;
        }
    }

    /// The peer's device and queue, if what travels this route is taken there.
    fn target(&self, route: &Route) -> Option<(usize, usize)> {
        let &(device, queue) = self.numbers.get(&route.peer_number)?;
        let peer = &self.devices[device];
        let from_up = self.devices.iter().any(|d| d.gid == route.gid && d.is_up);
        let ours = peer.queues[queue].as_ref()?;
        let expected = ours.route?;
        let takes = matches!(ours.state, State::Connected(_))
            && peer.gid == route.peer_gid
            && expected.peer_number == route.number
            && expected.peer_gid == route.gid
            && expected.peer_psn == route.psn;
        (takes && from_up && peer.is_up && !peer.is_lost).then_some((device, queue))
    }

    /// Executes some of a stream at its target.
    fn advance_stream(&mut self, from: usize, stream: &mut Stream, target: (usize, usize)) -> Progress {
        let mut pieces = self.rng.below(self.behaviour.pieces_per_step_max as usize + 1);
        while pieces > 0 && stream.executed < stream.messages.len() {
            let message = &stream.messages[stream.executed];
            if stream.placing.is_none() {
                match self.begin(message, target) {
                    Ok(placing) => stream.placing = Some(placing),
                    Err(progress) => return progress,
                }
            }
            let Some(placing) = &mut stream.placing else { continue };
            if placing.is_lost() {
                placing.draw_loss(&mut self.rng, self.behaviour.loss);
                return Progress::Lost;
            }
            if placing.next < placing.count {
                let (at, len) = placing.piece(message.len);
                let (memory, offset) = (placing.memory, placing.offset + at);
                self.place(from, message, at, len, (target.0, memory, offset));
                pieces -= 1;
                continue;
            }
            if !self.deliver(message, target) {
                return Progress::NotReady;
            }
            if let (Some(watched), true) = (&message.watched, self.behaviour.answers_free_sources) {
                self.check_source(from, watched, "its bytes were placed");
            }
            stream.placing = None;
            stream.executed += 1;
        }
        Progress::Moved
    }

    /// The first packet of a message arrives.
    fn begin(&mut self, message: &Message, target: (usize, usize)) -> Result<Placing, Progress> {
        let peer = &self.devices[target.0];
        let receive = peer.queues[target.1].as_ref().and_then(|q| q.receives.front());
        let (memory, offset) = match (message.operation, receive) {
            // A peer looks for a receive before or after it places the bytes.
            (Operation::Write { imm: Some(_), .. }, None) if self.rng.one_in(2) => return Err(Progress::NotReady),
            // Keys are not checked for no bytes.
            (Operation::Write { .. }, _) if message.len == 0 => (0, 0),
            (Operation::Write { address, rkey, .. }, _) => {
                let found = peer.memories.iter().position(|m| {
                    let end = address.checked_add(message.len as u64);
                    m.remote.rkey == rkey
                        && m.access == Access::RemoteWrite
                        && address >= m.remote.address
                        && end.is_some_and(|end| end <= m.remote.address + m.remote.len)
                });
                assert!(found.is_some() || !self.behaviour.watch_keys, "a write with a key that opens nothing there");
                let Some(memory) = found else { return Err(Progress::Refused(Failure::Flushed)) };
                (memory, (address - peer.memories[memory].remote.address) as usize)
            }
            (Operation::Send { .. }, None) => return Err(Progress::NotReady),
            (Operation::Send { .. }, Some(receive)) if message.len > receive.local.len => {
                return Err(Progress::Refused(Failure::Other(LOCAL_LENGTH_ERROR)));
            }
            (Operation::Send { .. }, Some(receive)) => (receive.local.memory.0 as usize, receive.local.offset),
        };
        let mut placing = Placing::new(&mut self.rng, memory, offset, message.len, self.behaviour.pieces_max);
        placing.draw_loss(&mut self.rng, self.behaviour.loss);
        Ok(placing)
    }

    /// Fetches the bytes from the source, as it is now, and puts them into the target's memory.
    fn place(&mut self, from: usize, message: &Message, at: usize, len: usize, to: (usize, usize, usize)) {
        let target: &Region = &self.devices[to.0].memories[to.1].region;
        match &message.source {
            Source::Taken(bytes) => target.put(to.2, &bytes[at..at + len]),
            Source::Memory { memory, offset } => {
                self.scratch.resize(len, 0);
                self.devices[from].memories[*memory].region.get(offset + at, &mut self.scratch);
                target.put(to.2, &self.scratch);
            }
        }
    }

    /// All bytes are there. False: the receive it needs is not.
    fn deliver(&mut self, message: &Message, target: (usize, usize)) -> bool {
        let len = message.len;
        let done = match message.operation {
            Operation::Write { imm: None, .. } => return true,
            Operation::Write { imm: Some(imm), .. } => Done::Notified { imm },
            Operation::Send { imm } => Done::Received { len, imm },
        };
        let Some(receive) = self.queue_mut(target.0, target.1).receives.pop_front() else { return false };
        self.complete(target.0, target.1, Side::Receive, receive.id, Ok(done), 1);
        true
    }

    /// The peer's acknowledgement of the oldest `count` executed messages arrives.
    pub(super) fn acknowledge(&mut self, device: usize, queue: usize, count: usize) {
        for _ in 0..count {
            let ours = self.queue_mut(device, queue);
            ours.attempts = 0;
            ours.stream.executed -= 1;
            let Some(message) = ours.stream.messages.pop_front() else { return };
            ours.uncovered += 1;
            ours.retired.push_back(message.watched);
            if message.signalled {
                let frees = std::mem::take(&mut ours.uncovered);
                self.complete(device, queue, Side::Send, message.id, Ok(Done::Request), frees);
            }
        }
    }

    /// A queue ends: some of what it had sent is still on its way, with the bytes as they are now.
    pub(super) fn leave_orphan(&mut self, device: usize, queue: usize) {
        let ours = self.queue_mut(device, queue);
        let (State::Connected(_), Some(route)) = (ours.state, ours.route) else { return };
        let unexecuted = ours.stream.messages.len() - ours.stream.executed;
        let count = self.rng.below(unexecuted + 1);
        let memories = &self.devices[device].memories;
        let Some(ours) = &self.devices[device].queues[queue] else { return };
        let taken = |message: &Message| {
            let bytes = match &message.source {
                Source::Taken(bytes) => bytes.clone(),
                Source::Memory { memory, offset } => {
                    let mut bytes = vec![0; message.len].into_boxed_slice();
                    memories[*memory].region.get(*offset, &mut bytes);
                    bytes
                }
            };
            Message { source: Source::Taken(bytes), watched: None, ..*message }
        };
        let messages: VecDeque<Message> =
            ours.stream.messages.iter().skip(ours.stream.executed).take(count).map(taken).collect();
        let placing = self.queue_mut(device, queue).stream.placing.take();
        if count > 0 {
            self.orphans.push(Orphan { route, stream: Stream { messages, executed: 0, placing } });
        }
    }

    fn advance_orphans(&mut self) {
        for mut orphan in std::mem::take(&mut self.orphans) {
            let Some(target) = self.target(&orphan.route) else { continue };
            match self.advance_stream(target.0, &mut orphan.stream, target) {
                Progress::Moved if orphan.stream.executed < orphan.stream.messages.len() => self.orphans.push(orphan),
                Progress::Refused(receive) => self.put_in_error(target.0, target.1, Failure::Flushed, receive),
                // Nobody is left to send again.
                _ => {}
            }
        }
    }
}
