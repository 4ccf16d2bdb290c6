//! Connections come and go at random while everything else goes on, over a device that fails queues.

use super::*;

/// xorshift64*: runs repeat but for what the carrier's timing does to them.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % bound
    }
}

/// What one side may expect.
#[derive(Default)]
struct Owner {
    admitted: bool,
    /// Of the current life: sent, and the next to be received; the life is in each message.
    life: u64,
    sent: u64,
    next: u64,
    held: Vec<(MessageHandle, Vec<u8>)>,
    received: u64,
    downs: u64,
}

impl Owner {
    fn look(&mut self, side: &mut Side) {
        for event in std::mem::take(&mut side.events) {
            assert!(self.admitted, "{event:?} of a peer that is not admitted");
            match event {
                Event::PeerDown { .. } => {
                    self.admitted = false;
                    self.downs += 1;
                }
                Event::Received { message, .. } => {
                    let bytes = side.transport.message(message).to_vec();
                    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
                    assert_eq!((word(0), word(8)), (self.life, self.next), "T1");
                    self.next += 1;
                    self.received += 1;
                    self.held.push((message, bytes));
                }
                Event::Placed { .. } | Event::Notified { .. } => {}
            }
        }
    }

    fn release(&mut self, side: &mut Side, place: usize) {
        let (message, bytes) = self.held.swap_remove(place);
        assert_eq!(side.transport.message(message), bytes, "a held message changed");
        side.transport.release(message);
    }

    fn send(&mut self, side: &mut Side, len: usize) {
        let mut bytes = vec![self.sent as u8; len.max(16)];
        bytes[..8].copy_from_slice(&self.life.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sent.to_le_bytes());
        let sent = side.transport.send(PEER, &bytes);
        assert!(self.admitted || sent == Err(Full), "T7");
        self.sent += u64::from(sent.is_ok());
    }
}

fn churn(seed: u64, steps: u64) -> (u64, u64) {
    let options = Options { requests: 32, staging_bytes: 32 << 10, receives: 24, ..Options::default() };
    let mut rig = Rig::new(seed, &options);
    rig.fabric.set_behaviour(Behaviour { queue_failure: 60_000, ..Behaviour::default() });
    let mut random = Random(seed + 1);
    let mut owners = [Owner::default(), Owner::default()];
    for step in 0..steps {
        if owners.iter().all(|owner| !owner.admitted) || random.below(6000) == 0 {
            // A new life; sometimes while the old one still goes on.
            rig.connect(random.below(8) > 0);
            for owner in &mut owners {
                (owner.admitted, owner.life, owner.sent, owner.next) = (true, step, 0, 0);
            }
        }
        let own = random.below(2) as usize;
        let (side, owner) = (if own == 0 { &mut rig.a } else { &mut rig.b }, &mut owners[own]);
        match random.below(10) {
            0..=2 => (0..random.below(20))
                .for_each(|_| owner.send(side, 16 + random.below(8000) as usize % (1 << (own * 13)))),
            3 => {
                let _ = side.write(1 + random.below(5000) as usize, Some(1), Some(step));
            }
            4 => {
                side.transport.prepare_wait();
            }
            5 => side.transport.flush(),
            6 if !owner.held.is_empty() => {
                for _ in 0..=random.below(owner.held.len() as u64) {
                    owner.release(side, random.below(owner.held.len() as u64) as usize);
                }
            }
            7 if random.below(800) == 0 => {
                side.transport.fence(PEER);
                owner.admitted = false;
            }
            _ => {
                let mut events = [NOTHING; 16];
                let count = side.transport.poll(&mut events[..random.below(17) as usize]);
                side.events.extend(&events[..count]);
                owner.look(side);
            }
        }
    }
    rig.fabric.set_behaviour(Behaviour::default());
    rig.connect(true);
    for (side, owner) in [&mut rig.a, &mut rig.b].into_iter().zip(&mut owners) {
        while !owner.held.is_empty() {
            owner.release(side, 0);
        }
    }
    rig.until("both come up at last", |rig| rig.a.is_up() && rig.b.is_up());
    for _ in 0..100 {
        rig.until("a message is accepted", |rig| rig.a.transport.send(PEER, b"at last").is_ok());
        rig.until("it arrives", |rig| rig.b.release() == 1);
    }
    let sum = |value: fn(&Owner) -> u64| owners.iter().map(value).sum();
    (sum(|owner| owner.received), sum(|owner| owner.downs))
}

#[test]
fn lives_do_not_mix_and_nothing_is_lost_for_good() {
    let (mut received, mut downs) = (0, 0);
    for seed in 0..8 {
        let (more_received, more_downs) = churn(seed, 60_000);
        received += more_received;
        downs += more_downs;
    }
    assert!(received > 10_000 && downs > 50, "{received} messages, {downs} ends");
}
