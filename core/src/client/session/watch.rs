//! Silence: of a relay, and of whoever was asked something.
//!
//! A session follows the order stream when somebody wants to know, and from the first time on that it is in *doubt* where
//! something is served: a connection with something under way was lost, a gate said "not here", or nothing was answered for
//! `suspect_ns`. One that only appends, and is answered, costs its gate no order stream.

use super::*;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// The order stream is to be followed whether anybody wants to know or not.
    doubt: bool,
    /// When the answers are counted next, if any is waited for, and how many there were.
    look_ns: Option<u64>,
    answered: u64,
    /// The relay that was left because it was silent, and how many were in a row.
    avoid: Option<usize>,
    silent: u32,
}

impl<T: Transport, D: Dialer<T::Link>> Session<T, D> {
    /// It is not known any more where something is served.
    pub(super) fn doubt(&mut self) {
        self.watch.doubt = true;
        self.timer_ns = 0;
    }

    fn suspect_ns(&self) -> u64 {
        self.map.as_ref().map_or(self.options.backoff_max_ns, |map| map.suspect_ns)
    }

    /// Answers that are waited for.
    fn waits(&self) -> bool {
        self.appends.outstanding() + self.questions.len() > 0
    }

    /// When silence has to be looked for, at the latest.
    #[inline]
    pub(super) fn watch_ns(&mut self, now_ns: u64) -> u64 {
        if !self.waits() {
            self.watch.look_ns = None;
            return u64::MAX;
        }
        let suspect_ns = self.suspect_ns();
        *self.watch.look_ns.get_or_insert(now_ns.saturating_add(suspect_ns))
    }

    /// Notes who has been silent for too long.
    pub(super) fn look_for_silence(&mut self, now_ns: u64, handler: &mut impl SessionHandler) {
        let suspect_ns = self.suspect_ns();
        if self.watch.look_ns.is_some_and(|at| at <= now_ns) {
            let answered = self.appends.answered + self.questions.answered;
            if self.waits() && answered == self.watch.answered {
                self.watch.doubt = true;
            }
            self.appends.recheck(self.order.ledger(), handler);
            self.watch.answered = answered;
            self.watch.look_ns = self.waits().then(|| now_ns.saturating_add(suspect_ns));
        }
        if self.order.has_spoken() {
            (self.watch.avoid, self.watch.silent) = (None, 0);
        }
        let Some(relay) = self.order.relay() else { return };
        let patience_ns = self.patience();
        if !self.order.ask_if_silent(&mut self.gates, now_ns, patience_ns) {
            self.order.leave(&mut self.gates);
            self.questions.on_down(relay);
            self.watch.avoid = Some(relay);
            self.watch.silent = self.watch.silent.saturating_add(1);
        }
    }

    /// How long a relay may be silent before it is asked, and how long it has to answer then: the longer the more relays
    /// were silent, for then it is likely that none can speak and to change does not help.
    pub(super) fn patience(&self) -> (u64, u64) {
        let suspect_ns = self.suspect_ns();
        let patience_ns = suspect_ns.saturating_mul(1 << self.watch.silent.min(16));
        (suspect_ns, patience_ns.min(suspect_ns.max(self.options.backoff_max_ns)))
    }

    /// Follows the order stream somewhere, if need be: not where it was silent, unless there is nobody else.
    pub(super) fn choose_relay(&mut self, now_ns: u64) {
        let wanted = self.watch.doubt || self.streams.live() > 0 || self.questions.follow();
        if self.order.relay().is_some() || !wanted || self.gates.is_empty() {
            return;
        }
        // Not always the same: the one that just failed may be back first.
        let start = (self.next_random() % self.gates.len() as u64) as usize;
        let order = (start..self.gates.len()).chain(0..start);
        let avoid = self.watch.avoid;
        let others = || order.clone().filter(|gate| Some(*gate) != avoid);
        let found = others().find(|gate| self.gates[*gate].up());
        if let Some(gate) = found.or_else(|| avoid.filter(|gate| self.gates[*gate].up())) {
            self.order.follow(gate, now_ns);
            self.reroute();
        }
        let dialing = self.gates.iter().any(|g| g.link == Link::Dialing);
        if found.is_none()
            && !dialing
            && let Some(gate) = others().find(|gate| !self.gates[*gate].wanted)
        {
            self.gates[gate].wanted = true; // one more, until one answers
        }
    }

    /// Shards may be served elsewhere than before.
    pub(super) fn reroute(&mut self) {
        let Session { routes, appends, streams, order, questions, .. } = self;
        reroute(routes, appends, streams, order, questions);
        self.timer_ns = 0;
    }
}

/// Follows the primaries, and tells everybody.
pub(super) fn reroute(
    routes: &mut Routes,
    appends: &mut Appends,
    streams: &mut Streams,
    order: &Order,
    questions: &mut Questions,
) {
    routes.follow(order.ledger(), order.relay());
    appends.on_routes(routes);
    streams.on_routes(routes);
    questions.on_routes(routes);
    routes.told();
}
