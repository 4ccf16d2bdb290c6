//! What `poll` does once there are pairs: completions become events, pairs come up and end.

use antelog_core::transport::{DownReason, Event, MessageHandle, PeerId, Transport};

use super::{NOTHING, OWN_HANDLE, PER_POLL, RdmaTransport, Route, TAKEN};
use crate::drain::reason_of;
use crate::inbox::Held;
use crate::pair::unlabel;
use crate::provider::{Completion, Done, Failure, Provider};
use crate::setup::Setup;

impl<P: Provider, C: Transport> RdmaTransport<P, C> {
    /// True when the device is to be let go and was not yet.
    pub(super) fn health_news(&self) -> bool {
        self.device.is_some() && self.health.is_disabled()
    }

    /// Goes on from the carrier's `count` events.
    pub(super) fn report(&mut self, events: &mut [Event], count: usize) -> usize {
        let mut count = self.sort_out(events, count);
        if self.health_news() {
            self.lose_device();
        }
        self.start_pairs();
        let mut handled = 0;
        while count < events.len() && handled < PER_POLL {
            let room = (events.len() - count).min(TAKEN);
            let mut taken = [NOTHING; TAKEN];
            let mut found = 0;
            while found < room
                && let Some(completion) = self.backlog.pop_front()
            {
                taken[found] = completion;
                found += 1;
            }
            if found == 0 {
                found = self.device.as_mut().map_or(0, |device| device.poll(&mut taken[..room]));
            }
            if found == 0 {
                // Everything that came before the end was reported.
                self.end_closing();
                break;
            }
            handled += found;
            for (place, completion) in taken[..found].iter().enumerate() {
                if completion.result.is_err() {
                    // Those behind it say more about it: they are found with the rest of what its queue flushes.
                    taken[place + 1..found].iter().rev().for_each(|later| self.backlog.push_front(*later));
                }
                if let Some(event) = self.on_completion(completion) {
                    events[count] = event;
                    count += 1;
                }
                if completion.result.is_err() {
                    break;
                }
            }
        }
        if !self.dirty.is_empty() {
            self.ring_dirty();
        }
        while count < events.len()
            && let Some((peer, reason)) = self.downs.pop_front()
        {
            events[count] = Event::PeerDown { peer, reason };
            count += 1;
        }
        count
    }

    /// Takes the set-up's messages, and the ends of pairs' connections, out of the carrier's events; how many are left.
    fn sort_out(&mut self, events: &mut [Event], count: usize) -> usize {
        let mut kept = 0;
        for place in 0..count {
            let event = events[place];
            let (Event::Placed { peer, .. }
            | Event::Notified { peer, .. }
            | Event::Received { peer, .. }
            | Event::PeerDown { peer, .. }) = event;
            if self.pair(peer).is_none() {
                if let Event::PeerDown { peer, .. } = event
                    && let Some(route) = self.routes.get_mut(usize::from(peer.0))
                {
                    *route = Route::None;
                }
                events[kept] = event;
                kept += 1;
                continue;
            }
            match event {
                Event::Received { message, .. } => {
                    let setup = Setup::decode(self.carrier.message(message));
                    self.carrier.release(message);
                    match setup {
                        Ok(setup) => self.on_setup(peer, setup),
                        Err(error) => self.break_pair(peer, DownReason::Protocol, Some(&error.to_string())),
                    }
                }
                Event::PeerDown { reason, .. } => {
                    if let Some(Route::Pair(pair)) = self.routes.get_mut(usize::from(peer.0)) {
                        Self::close_later(pair, &mut self.closing, reason);
                    }
                }
                // Nothing else travels on a pair's carrier.
                Event::Placed { .. } | Event::Notified { .. } => {
                    self.break_pair(peer, DownReason::Protocol, None);
                }
            }
        }
        kept
    }

    fn on_setup(&mut self, peer: PeerId, setup: Setup) {
        let patience = self.options.patience;
        let Some(Route::Pair(pair)) = self.routes.get_mut(usize::from(peer.0)) else { return };
        let Some(device) = &mut self.device else { return };
        match setup {
            Setup::Offer(offer) => {
                if let Err(why) = pair.on_offer(device, offer, patience) {
                    pair.progress.to_say.push_back(Setup::Decline(why.clone()));
                    pair.progress.declined = Some(why);
                }
            }
            Setup::Ready => pair.progress.is_peer_ready = true,
            Setup::Refused => Self::close_later(pair, &mut self.closing, DownReason::Protocol),
            Setup::Decline(why) => {
                let why = format!("the peer declines: {why}");
                self.break_pair(peer, DownReason::Io(libc::ENODEV), Some(&why));
            }
        }
    }

    /// Brings pairs on: says what is to be said, probes, goes up or gives up.
    fn start_pairs(&mut self) {
        let mut place = 0;
        while let Some(&peer) = self.starting.get(place) {
            let failure = self.start_pair(peer);
            if let Some(why) = failure {
                self.break_pair(peer, DownReason::Io(libc::ENODEV), Some(&why));
            }
            // A pair that is up or gone has left the list.
            place += usize::from(self.starting.get(place) == Some(&peer));
        }
    }

    /// One step of one pair; the reason if it fails.
    fn start_pair(&mut self, peer: PeerId) -> Option<String> {
        let Some(Route::Pair(pair)) = self.routes.get_mut(usize::from(peer.0)) else {
            self.starting.retain(|listed| *listed != peer);
            return None;
        };
        let device = self.device.as_mut()?;
        let mut said = false;
        while let Some(setup) = pair.progress.to_say.front() {
            if self.carrier.send(peer, &setup.encode()).is_err() {
                break;
            }
            pair.progress.to_say.pop_front();
            said = true;
        }
        if said {
            self.carrier.flush();
        }
        if pair.progress.to_say.is_empty()
            && let Some(why) = pair.progress.declined.take()
        {
            return Some(why);
        }
        match pair.advance(device) {
            Ok(true) => self.starting.retain(|listed| *listed != peer),
            Ok(false) if device.now_ns() >= pair.deadline_ns => {
                let progress = &pair.progress;
                return Some(match (progress.is_connected, progress.is_peer_ready) {
                    (true, true) => {
                        "the queue pairs are connected and no data comes through: is UDP port 4791 filtered, \
                                     or the GID not routed?"
                            .into()
                    }
                    _ => "the peer did not answer the offer".into(),
                });
            }
            Ok(false) => {}
            Err(error) => return Some(error.text),
        }
        None
    }

    /// One completion; the event it means for the owner.
    #[inline]
    fn on_completion(&mut self, completion: &Completion) -> Option<Event> {
        let (peer, generation, slot) = unlabel(completion.id);
        let Some(Route::Pair(pair)) = self.routes.get_mut(usize::from(peer.0)) else { return None };
        if pair.generation != generation {
            return None;
        }
        let done = match completion.result {
            Ok(done) => done,
            Err(failure) => {
                self.on_failure(peer, failure, slot.is_some());
                return None;
            }
        };
        // Freed slots and receives may let a credit go out.
        Self::mark_dirty(pair, &mut self.dirty);
        match (done, slot) {
            (Done::Request, None) => {
                pair.counters.on_completion();
                pair.progress.is_probe_done = true;
                pair.output.on_done(completion.id).map(|token| Event::Placed { peer, token })
            }
            (Done::Notified { imm }, Some(slot)) => {
                pair.inbox.posted -= 1;
                pair.inbox.release(slot, true);
                pair.counters.on_notified();
                Some(Event::Notified { peer, value: imm })
            }
            (Done::Received { imm: Some(credit), .. }, Some(slot)) => {
                pair.inbox.posted -= 1;
                pair.inbox.release(slot, false);
                pair.progress.is_probe_seen = true;
                if !pair.output.on_credit(credit) {
                    Self::close_later(pair, &mut self.closing, DownReason::Protocol);
                }
                None
            }
            (Done::Received { len, imm: None }, Some(slot)) => {
                pair.inbox.posted -= 1;
                pair.counters.on_received();
                let held = Held::new(&pair.inbox.buffers, slot, len, (peer.0, generation));
                let place = self.free_handles.pop().unwrap_or_else(|| {
                    self.held.push(None);
                    self.held.len() as u32 - 1
                });
                self.held[place as usize] = Some(held);
                Some(Event::Received { peer, message: MessageHandle(OWN_HANDLE | place) })
            }
            (Done::Request, Some(_)) | (_, None) => unreachable!("a device that mixes up requests and receives"),
        }
    }

    /// The queue of a pair failed; this is the first failure that was seen.
    fn on_failure(&mut self, peer: PeerId, failure: Failure, is_receive: bool) {
        let Some(pair) = self.pair(peer) else { return };
        pair.inbox.posted -= usize::from(is_receive);
        let (host, is_up, closing) = (pair.host, pair.is_up, pair.closing);
        let counters = pair.counters.clone();
        let drained = self.take_down(peer);
        let cause = Some(failure).filter(|failure| *failure != Failure::Flushed).or(drained);
        counters.on_failure(cause.unwrap_or(failure));
        // What the device said is about one queue pair: one that failed of something else is not it.
        let by_device = cause.is_none() && self.failed > 0;
        self.failed -= usize::from(by_device);
        // An end that the carrier has announced already explains what fails now, but for a refusal by our own device.
        let reason = match reason_of(cause, by_device) {
            DownReason::Protocol => DownReason::Protocol,
            reason => closing.unwrap_or(reason),
        };
        if cause == Some(Failure::Refused) {
            let _ = self.carrier.send(peer, &Setup::Refused.encode());
            self.carrier.flush();
        }
        let why = format!("the queue pair failed before it carried data: {:?}", cause.unwrap_or(failure));
        self.on_ended(peer, reason, (!is_up).then_some((host, &why)));
    }

    /// Ends pairs whose end is known and of which nothing is left to report.
    fn end_closing(&mut self) {
        while let Some(peer) = self.closing.pop() {
            let Some(pair) = self.pair(peer) else { continue };
            let reason = pair.closing.unwrap_or(DownReason::Closed);
            // Before it was up, the end of the connection says nothing about RDMA.
            self.break_pair(peer, reason, None);
        }
    }
}
