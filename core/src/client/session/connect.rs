//! Connecting: seeds until the map is known, gates when they are wanted, pauses that grow, and what a new map changes. A
//! gate that cannot be reached is called again and again after its own pauses, and nobody else waits for it.

use super::*;

impl<T: Transport, D: Dialer<T::Link>> Session<T, D> {
    /// Dials what is due, places subscriptions and chooses a relay; sets the timer for the next time.
    pub(super) fn look_after(&mut self, now_ns: u64, handler: &mut impl SessionHandler) -> usize {
        let mut work = 0;
        let mut next_ns = u64::MAX;
        self.look_for_silence(now_ns, handler);
        self.choose_relay(now_ns);
        next_ns = next_ns.min(self.order.look_ns(self.patience()));
        if self.map.is_some() {
            self.streams.place(self.order.ledger(), &self.routes, handler);
        }
        for gate in &mut self.gates {
            let Link::Down { retry_ns } = gate.link else { continue };
            if !gate.wanted {
                continue;
            }
            if retry_ns > now_ns {
                next_ns = next_ns.min(retry_ns);
                continue;
            }
            gate.link = Link::Dialing;
            if self.seeds.dialing.as_ref() == Some(&gate.address) {
                continue; // its answer will do for both
            }
            self.dialer.request(&gate.address);
            self.dials += 1;
            work += 1;
        }
        if self.seeds.wanted && self.seeds.dialing.is_none() {
            if self.seeds.retry_ns > now_ns {
                next_ns = next_ns.min(self.seeds.retry_ns);
            } else {
                work += self.dial_seed();
            }
        }
        self.timer_ns = next_ns;
        work
    }

    /// Asks the next seed that is not connected or being dialled for the map.
    fn dial_seed(&mut self) -> usize {
        for _ in 0..self.options.seeds.len() {
            let address = &self.options.seeds[self.seeds.next % self.options.seeds.len()];
            self.seeds.next += 1;
            // A gate that is wanted is dialled anyway, after its own pause.
            let busy = |g: &Gate| g.address == *address && (g.wanted || !matches!(g.link, Link::Down { .. }));
            let busy = self.gates.iter().any(busy);
            if !busy {
                self.dialer.request(address);
                self.seeds.dialing = Some(address.clone());
                self.dials += 1;
                return 1;
            }
        }
        // All are in use already, so the map is as new as they know it.
        self.seeds.wanted = self.map.is_none();
        0
    }

    pub(super) fn take_dialed(&mut self, now_ns: u64, handler: &mut impl SessionHandler) -> usize {
        let mut work = 0;
        while let Some(Dialed { address, result }) = self.dialed.take().or_else(|| self.dialer.take()) {
            self.dials = self.dials.saturating_sub(1);
            work += 1;
            self.timer_ns = 0;
            let for_seed = self.seeds.dialing.as_ref() == Some(&address);
            if for_seed {
                self.seeds.dialing = None;
            }
            match result.and_then(|(link, map, capacity, _)| self.welcome(&address, link, map, capacity, now_ns)) {
                Ok(connected) => {
                    self.seeds.wanted = false;
                    self.seeds.failures = 0;
                    if connected {
                        handler.on_connection(&address, None);
                    }
                }
                Err(why) => {
                    handler.on_connection(&address, Some(&why));
                    if for_seed {
                        self.seed_failed(now_ns);
                    }
                    if let Some(index) = self.gates.iter().position(|g| g.address == address && !g.up()) {
                        self.pause(index, now_ns);
                    }
                }
            }
        }
        work
    }

    /// A gate let us in: takes its map and, if the map knows the gate by this address, the connection.
    ///
    /// A seed may be called by another name than in the map. Its connection is dropped then: two connections of one
    /// session to one gate would displace each other.
    fn welcome(
        &mut self,
        address: &str,
        link: T::Link,
        map: ClusterMap,
        capacity: usize,
        now_ns: u64,
    ) -> Result<bool, String> {
        self.take_map(map)?;
        let Some(index) = self.gates.iter().position(|g| g.address == address) else { return Ok(false) };
        if self.gates[index].up() {
            return Ok(false);
        }
        let record_bytes_max = self.map.as_ref().map_or(0, |m| m.record_bytes_max as usize);
        let needed = record_bytes_max + SESSION_HEAD_BYTES_MAX;
        let possible = capacity.is_power_of_two() && (CAPACITY_BYTES_MIN..=CAPACITY_BYTES_MAX).contains(&capacity);
        if !possible || message_bytes_max(capacity) < needed {
            return Err(format!("its ring of {capacity} bytes cannot take records of {record_bytes_max} bytes"));
        }
        if message_bytes_max(self.options.ring_bytes) < needed {
            return Err(format!(
                "this session's ring of {} bytes is too small for the cluster's records of up to {record_bytes_max} \
                 bytes; set ring_bytes to at least {}",
                self.options.ring_bytes,
                (4 * (needed + 8)).next_power_of_two()
            ));
        }
        let capacities = (self.options.ring_bytes, capacity);
        let prefault = self.options.prefault;
        self.gates[index].admit(&mut self.transport, PeerId(index as u16), link, capacities, prefault)?;
        self.gates[index].up_since_ns = now_ns;
        self.appends.on_link(index);
        Ok(true)
    }

    fn take_map(&mut self, map: ClusterMap) -> Result<(), String> {
        if self.map.as_ref() == Some(&map) {
            return Ok(());
        }
        if map.shards.is_empty() || map.shards.len() > SHARDS_MAX {
            return Err(format!("its map has {} shards, not 1 to {SHARDS_MAX}", map.shards.len()));
        }
        let mut addresses: Vec<&str> = map.addresses().collect();
        addresses.sort_unstable();
        addresses.dedup();
        addresses.retain(|address| !self.gates.iter().any(|g| g.address == *address));
        let spare = |gates: &[Gate]| gates.iter().position(|g| !map.addresses().any(|a| *a == g.address) && !g.wanted);
        for address in addresses {
            if self.gates.len() < usize::from(self.options.gates_max) {
                self.gates.push(Gate::new(address.to_owned()));
            } else if let Some(index) = spare(&self.gates) {
                self.gates[index].address = address.to_owned();
                self.gates[index].link = Link::Down { retry_ns: 0 };
            } else {
                return Err(format!("its map names more than {} nodes (gates_max)", self.options.gates_max));
            }
        }
        let gates = &self.gates;
        // Every address of the map has a gate by now.
        self.routes.set_map(&map, |address| gates.iter().position(|g| g.address == address).unwrap_or(0));
        self.appends.set_limits(map.outstanding_max as usize, map.record_bytes_max as usize);
        self.streams.set_limits(map.record_bytes_max as usize);
        self.map = Some(map);
        self.reroute();
        Ok(())
    }

    /// A connection is to end or has ended: cuts the gate off, tells everyone, and pauses before the next attempt.
    pub(super) fn disconnect(&mut self, index: usize, why: &str, now_ns: u64, handler: &mut impl SessionHandler) {
        let Some(gate) = self.gates.get_mut(index).filter(|g| g.up()) else { return };
        self.transport.fence(PeerId(index as u16));
        gate.ready = false;
        gate.output = false;
        // Being let in says little: a gate that cuts us off again and again must not be called without pause.
        if now_ns.saturating_sub(gate.up_since_ns) >= self.options.backoff_max_ns {
            gate.failures = 0;
        }
        handler.on_connection(&gate.address, Some(why));
        self.pause(index, now_ns);
        let appends = self.appends.on_link(index);
        let streams = self.streams.on_down(index);
        let questions = self.questions.on_down(index);
        if appends || streams || questions {
            self.doubt();
        }
        self.order.on_down(index);
    }

    /// The next attempt to connect to a gate comes after a pause that grows with every failure.
    fn pause(&mut self, index: usize, now_ns: u64) {
        let failures = self.gates[index].failures;
        let retry_ns = now_ns.saturating_add(self.backoff(failures));
        let gate = &mut self.gates[index];
        gate.link = Link::Down { retry_ns };
        gate.failures = failures.saturating_add(1);
        if gate.failures >= FAILURES_UNTIL_NEW_MAP {
            self.seeds.wanted = true;
        }
        self.timer_ns = 0;
    }

    /// The next seed is asked at once; a pause follows when all have failed.
    fn seed_failed(&mut self, now_ns: u64) {
        self.seeds.failures = self.seeds.failures.saturating_add(1);
        let rounds = self.seeds.failures / self.options.seeds.len().max(1) as u32;
        let whole = self.seeds.failures.is_multiple_of(self.options.seeds.len().max(1) as u32);
        self.seeds.retry_ns = if whole { now_ns.saturating_add(self.backoff(rounds - 1)) } else { now_ns };
    }

    /// A pause after this many earlier failures: doubling, capped, and from half to the whole of it at random, so that the
    /// clients of a node that went down do not all come back at once.
    fn backoff(&mut self, failures: u32) -> u64 {
        let least = self.options.backoff_min_ns.max(1);
        let most = self.options.backoff_max_ns.max(least);
        let pause = least.saturating_mul(1 << failures.min(32)).min(most);
        pause / 2 + self.next_random() % (pause / 2 + 1)
    }

    pub(super) fn next_random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}
