//! What `poll` does once there are pairs: completions become events, pairs come up and end.

use antelog_core::transport::{DownReason, Event, MessageHandle, PeerId, Transport};

use super::{NOTHING, OWN_HANDLE, PER_POLL, RdmaTransport, Route, TAKEN};
use crate::drain::reason_of;
use crate::health::PAIR_PAUSE;
use crate::inbox::Held;
use crate::pair::unlabel;
use crate::provider::{Completion, DeviceEvent, Done, Failure, Provider};
use crate::setup::Setup;

/// Why a pair is given up that connects and gets no probe through.
const NO_DATA: &str =
    "the queue pairs are connected and no data comes through: is UDP port 4791 filtered, or the GID not routed?";

impl<P: Provider, C: Transport> RdmaTransport<P, C> {
    /// True when the device is to be let go and was not yet.
    pub(super) fn health_news(&self) -> bool {
        self.device.is_some() && self.health.is_disabled()
    }

    /// The device is lost: every pair ends, and so does our hold on the device, which lets it be removed.
    fn lose_device(&mut self) {
        for peer in 0..self.routes.len() as u16 {
            self.break_pair(PeerId(peer), DownReason::Io(libc::ENODEV), None);
        }
        self.device = None;
        self.spare_buffers.clear();
        self.spare_staging.clear();
        self.exposed.clear();
        self.sources.iter_mut().for_each(|source| source.memory = None);
    }

    /// Asks the device what happened to it.
    pub(super) fn look_at_device(&mut self) {
        while let Some(event) = self.device.as_mut().and_then(P::event) {
            match event {
                DeviceEvent::Lost => self.health.disable("the RDMA device was removed or has failed"),
                DeviceEvent::Failed => self.failed += 1,
                DeviceEvent::PortDown => {}
            }
        }
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
                if let Err(failure) = completion.result {
                    // Ending a pair takes account of all its completions that are not handled, so they go back.
                    taken[place + 1..found].iter().rev().for_each(|later| self.backlog.push_front(*later));
                    self.on_failure(completion.id, failure);
                    break;
                }
                if let Some(event) = self.on_completion(completion) {
                    events[count] = event;
                    count += 1;
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
            match self.routes.get_mut(usize::from(peer.0)) {
                Some(Route::Pair(_)) => {}
                Some(route @ Route::Carrier) => {
                    if let Event::PeerDown { .. } = event {
                        *route = Route::None;
                    }
                    events[kept] = event;
                    kept += 1;
                    continue;
                }
                // An earlier event of the same poll ended the pair: that is all the owner hears of it.
                _ => {
                    if let Event::Received { message, .. } = event {
                        self.carrier.release(message);
                    }
                    continue;
                }
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

    /// [`Mutant::KeepOldKeys`](antelog_protocol::mutant::Mutant::KeepOldKeys).
    #[cfg(feature = "mutants")]
    fn with_old_keys(&mut self, peer: PeerId, mut setup: Setup) -> Setup {
        if let Setup::Offer(offer) = &mut setup
            && antelog_protocol::mutant::planted(antelog_protocol::mutant::Mutant::KeepOldKeys)
        {
            offer.regions = self.first_keys.entry(peer).or_insert_with(|| offer.regions.clone()).clone();
        }
        setup
    }

    fn on_setup(&mut self, peer: PeerId, setup: Setup) {
        #[cfg(feature = "mutants")]
        let setup = self.with_old_keys(peer, setup);
        let patience = self.options.patience;
        let Some(Route::Pair(pair)) = self.routes.get_mut(usize::from(peer.0)) else { return };
        let Some(device) = &mut self.device else { return };
        match setup {
            Setup::Offer(_) if pair.progress.is_connected || pair.progress.declined.is_some() => {
                self.break_pair(peer, DownReason::Protocol, Some("the peer's second offer on one connection"));
            }
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
            Ok(true) => {
                self.starting.retain(|listed| *listed != peer);
                // The peer may have been up before, and have used all its credit.
                Self::mark_dirty(pair, &mut self.dirty);
            }
            Ok(false) if device.now_ns() >= pair.deadline_ns => {
                let progress = &pair.progress;
                return Some(match (progress.is_connected, progress.is_peer_ready) {
                    (true, true) => NO_DATA.into(),
                    _ => "the peer did not answer the offer".into(),
                });
            }
            Ok(false) => {}
            Err(error) => return Some(error.text),
        }
        None
    }

    /// One successful completion; the event it means for the owner.
    #[inline]
    fn on_completion(&mut self, completion: &Completion) -> Option<Event> {
        let (peer, generation, slot) = unlabel(completion.id);
        let Some(Route::Pair(pair)) = self.routes.get_mut(usize::from(peer.0)) else { return None };
        if pair.generation != generation {
            return None;
        }
        let done = completion.result.ok()?;
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
                let held = Held::new(&pair.inbox.buffers, slot, len, peer.0);
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

    /// The queue of a pair failed. Everything outstanding fails with it, in no order between requests and receives, so the
    /// cause is the first failure that is no flush.
    fn on_failure(&mut self, id: u64, failure: Failure) {
        let (peer, generation, slot) = unlabel(id);
        let Some(pair) = self.pair(peer).filter(|pair| pair.generation == generation) else { return };
        pair.inbox.posted -= usize::from(slot.is_some());
        let (host, is_up, closing, counters) = (pair.host, pair.is_up, pair.closing, pair.counters.clone());
        let settled_ns = pair.deadline_ns.saturating_add(PAIR_PAUSE.as_nanos() as u64);
        let is_young = self.device.as_ref().is_some_and(|device| device.now_ns() < settled_ns);
        let drained = self.take_down(peer);
        let cause = Some(failure).filter(|failure| *failure != Failure::Flushed).or(drained);
        let failure = cause.unwrap_or(failure);
        counters.on_failure(failure);
        // What the device said is about one queue pair: one that failed of something else is not it.
        let by_device = cause.is_none() && self.failed > 0;
        self.failed -= usize::from(by_device);
        // An end that the carrier has announced already explains what fails now, but for a refusal by our own device.
        let reason = match reason_of(cause, by_device) {
            DownReason::Protocol => DownReason::Protocol,
            reason => closing.unwrap_or(reason),
        };
        // What comes up and breaks soon may do so again and again: it takes more than a probe to see what is wrong.
        let why = match (is_up, failure) {
            _ if closing.is_some() => None,
            (false, Failure::Unreachable) => Some(NO_DATA.to_owned()),
            (false, _) => Some(format!("the queue pair failed before it carried data: {failure:?}")),
            (true, _) if is_young => {
                let why = format!("queue pairs fail soon after they came up: {failure:?}");
                self.health.strike(host, &why).then_some(why)
            }
            (true, _) => None,
        };
        if failure == Failure::Refused {
            let _ = self.carrier.send(peer, &Setup::Refused.encode());
            self.carrier.flush();
        }
        self.report_end(peer, host, reason, why.as_deref());
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
