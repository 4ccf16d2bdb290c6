//! Credits of receives, both ways at once: nobody ever meets an unposted receive, and nobody waits for ever.

use std::collections::VecDeque;

use antelog_core::mem::Region;

use super::*;
use crate::output::{Output, OutputSizes};

/// What travels: `None` is a message, otherwise a credit.
type Cargo = Option<u32>;

struct Side {
    inbox: Inbox,
    output: Output,
    issued: u64,
    /// On the way to the other side.
    wire: VecDeque<Cargo>,
    /// Receives with the device, oldest first.
    posted: VecDeque<u32>,
    /// Arrived and not polled yet.
    arrived: VecDeque<(u32, Cargo)>,
    held: Vec<u32>,
}

impl Side {
    fn new(receives: usize, peers_receives: usize) -> Side {
        let memory = |bytes| Region::new(bytes).unwrap();
        let sizes = OutputSizes { depth: 32, inline_bytes: 64, message_bytes_max: 8192 };
        let mut output = Output::new(0, sizes, memory(32 << 10), MemoryId(0));
        output.set_remote(Vec::new(), peers_receives as u32);
        let inbox = Inbox::new(Buffers::new(memory(Buffers::bytes(receives)), MemoryId(1)));
        let (wire, posted, arrived, held) = Default::default();
        let mut side = Side { inbox, output, issued: 0, wire, posted, arrived, held };
        side.post(true);
        // The probe.
        side.output.send_probe().unwrap();
        side.ring(Some(0));
        side
    }

    fn post(&mut self, all: bool) {
        loop {
            let slots = self.inbox.batch(all);
            if slots.is_empty() {
                break;
            }
            let count = slots.len().min(BATCH);
            self.posted.extend(&slots[slots.len() - count..]);
            self.inbox.on_posted(count);
        }
    }

    fn replenish(&mut self) {
        self.post(false);
        if let Some(count) = self.inbox.credit_due() {
            self.output.send_credit(count).unwrap();
            self.inbox.on_announced();
            self.ring(Some(count));
        }
    }

    /// One request goes out, and completes at once.
    fn ring(&mut self, cargo: Cargo) {
        self.output.doorbell(true);
        self.output.on_handed_over();
        self.output.on_done(self.issued);
        self.issued += 1;
        self.wire.push_back(cargo);
    }

    fn send(&mut self) -> bool {
        let sent = self.output.send(b"x").is_ok();
        if sent {
            self.ring(None);
        }
        sent
    }

    fn arrive(&mut self, cargo: Cargo) {
        let slot = self.posted.pop_front().expect("a receive is posted");
        self.arrived.push_back((slot, cargo));
    }

    fn poll(&mut self, most: usize) {
        for _ in 0..most.min(self.arrived.len()) {
            let (slot, cargo) = self.arrived.pop_front().unwrap();
            self.inbox.posted -= 1;
            match cargo {
                Some(credit) => {
                    self.inbox.release(slot, false);
                    assert!(self.output.on_credit(credit), "a credit that was not due");
                }
                None => self.held.push(slot),
            }
        }
        self.replenish();
    }

    fn release(&mut self, place: usize) {
        let slot = self.held.swap_remove(place);
        self.inbox.release(slot, true);
    }
}

#[test]
fn no_message_finds_no_receive_and_nobody_waits_for_ever() {
    let mut state = 1u64;
    let mut below = move |bound: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % bound
    };
    for receives in [[1, 1], [1, 512], [2, 3], [7, 7], [11, 64], [15, 16], [17, 31], [512, 512]] {
        let mut sides = [Side::new(receives[0], receives[1]), Side::new(receives[1], receives[0])];
        let mut sent = 0;
        for step in 0..40_000 {
            let own = below(2);
            // Now and then one side does nothing for long, or only sends.
            let idle = step / 1000 % 4;
            match below(4) {
                0 => (0..below(40)).for_each(|_| sent += usize::from(sides[own].send())),
                1 => {
                    for _ in 0..below(40) {
                        let Some(cargo) = sides[own].wire.pop_front() else { break };
                        sides[1 - own].arrive(cargo);
                    }
                }
                2 if idle != own => sides[own].poll(below(300)),
                _ if idle != own && !sides[own].held.is_empty() => {
                    for _ in 0..below(sides[own].held.len() + 1) {
                        let place = below(sides[own].held.len());
                        sides[own].release(place);
                    }
                }
                _ => {}
            }
        }
        // When all has arrived and was released there is credit.
        for _ in 0..10 {
            for own in [0, 1] {
                while let Some(cargo) = sides[own].wire.pop_front() {
                    sides[1 - own].arrive(cargo);
                }
                while !sides[own].held.is_empty() {
                    sides[own].release(0);
                }
                sides[own].poll(usize::MAX);
            }
        }
        assert!(sides.iter_mut().all(Side::send), "stuck with {receives:?} receives");
        assert!(sent > 500, "{sent} messages with {receives:?} receives");
    }
}

#[test]
fn credit_is_announced_by_quarters() {
    let mut side = Side::new(64, 64);
    side.wire.clear();
    assert_eq!((side.posted.len(), side.inbox.posted), (64 + SLACK, 64 + SLACK));
    for count in 1..=32 {
        side.arrive(None);
        side.poll(1);
        assert!(side.wire.is_empty(), "credit for what is held");
        side.release(0);
        side.replenish();
        let due = (count % 16 == 0).then_some(Some(count));
        assert_eq!(side.wire.pop_front(), due, "after {count}");
    }
    assert_eq!(side.inbox.posted, 64 + SLACK);
}
