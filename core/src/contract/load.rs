//! Full queues, large writes, many peers and random traffic.

use std::collections::VecDeque;

use super::Harness;
use super::rig::{REGION_BYTES, Random, Rig, Seen, Side, copy};
use crate::transport::{Full, LocalRange, PeerId, RemoteOffset, SEND_BYTES_MAX, Transport};

/// More operations than any transport may accept without being polled.
const ACCEPTED_MAX: usize = 1_000_000;

/// T4: fills every kind of operation until full, without polling. What was accepted happens; what was not, does not.
pub fn full_without_effect<H: Harness>(harness: &mut H) {
    let mut rig = Rig::new(harness);
    let to = Rig::<H>::B;
    rig.a.source.put(0, &Random(3).bytes(REGION_BYTES));
    rig.a.source.put(REGION_BYTES - 1, &[0]);
    // A fresh connection may report full until it is set up.
    rig.drain_a(0);
    rig.a.seen.clear();
    for len in [4096, 100] {
        let before = copy(&rig.b.exposed[0], 0, REGION_BYTES);
        let mut accepted = 0;
        // Every write goes to a place of its own as long as there are some.
        let place = |index: usize| (index * 4096) % (REGION_BYTES - 4096);
        while rig.a.write(to, place(accepted), len, None, Some(accepted as u64)).is_ok() {
            accepted += 1;
            assert!(accepted < ACCEPTED_MAX, "T4: a write never reports full");
        }
        assert!(accepted >= 16, "T4: full after {accepted} writes of {len} bytes");
        for attempt in 0..100u64 {
            let again = rig.a.write(to, 7 << 20, len, Some(9), Some(attempt));
            assert_eq!(again, Err(Full), "T4: full, then not, without a poll");
        }
        let last = accepted as u64 - 1;
        rig.until("accepted writes are placed", |rig| rig.a.placed() == Some(last));
        rig.settle();
        assert_eq!(rig.a.placed(), Some(last), "T4: a refused write was placed");
        assert_eq!(rig.b.seen, [], "T4: a refused write notified");
        let untouched = copy(&rig.b.exposed[0], 7 << 20, len) == before[7 << 20..][..len];
        assert!(untouched || accepted > (7 << 20) / 4096, "T4: a refused write landed");
        for index in 0..accepted {
            let there = copy(&rig.b.exposed[0], place(index), len) == copy(&rig.a.source, place(index), len);
            assert!(there, "T4: accepted write {index} of {len} bytes is missing");
        }
        rig.a.seen.clear();
    }
}

/// T4: several thousand messages of random sizes, each insisted on until accepted, arrive once and in order.
pub fn messages_arrive_once<H: Harness>(harness: &mut H) {
    let mut rig = Rig::new(harness);
    let mut sizes = Random(11);
    let message = |step: u32, len: usize| {
        let mut bytes = Random(u64::from(step) + 1).bytes(len);
        bytes.extend_from_slice(&step.to_le_bytes());
        bytes
    };
    let mut expected = VecDeque::new();
    let mut refusals = 0;
    let check = |rig: &mut Rig<'_, H>, expected: &mut VecDeque<(u32, usize)>| {
        for (_, seen) in rig.b.seen.drain(..) {
            let (step, len) = expected.pop_front().expect("T4: a message nobody sent");
            assert_eq!(seen, Seen::Received(message(step, len)), "T4: message {step} of {len} bytes");
        }
        expected.is_empty()
    };
    for step in 0..4000u32 {
        let len = sizes.below(if step % 8 == 0 { SEND_BYTES_MAX - 3 } else { 200 });
        let bytes = message(step, len);
        while rig.a.transport.send(Rig::<H>::B, &bytes) == Err(Full) {
            refusals += 1;
            rig.round();
            check(&mut rig, &mut expected);
        }
        expected.push_back((step, len));
    }
    rig.until("all messages arrive", |rig| check(rig, &mut expected));
    assert!(refusals > 0, "T4: sends never report full");
}

/// Writes far larger than any buffer, in both directions at once, with small operations between them.
pub fn big_writes<H: Harness>(harness: &mut H) {
    const LEN: usize = 3 << 20;
    let mut rig = Rig::new(harness);
    rig.a.source.put(0, &Random(5).bytes(REGION_BYTES));
    rig.b.source.put(0, &Random(6).bytes(REGION_BYTES));
    let (to_a, to_b) = (Rig::<H>::A, Rig::<H>::B);
    for step in 0..3u64 {
        let offset = step as usize * 12_345;
        rig.insist("a big write is accepted", |rig| rig.a.write(to_b, offset, LEN, Some(1), None));
        rig.insist("a message is accepted", |rig| rig.a.transport.send(to_b, b"behind"));
        rig.insist("a big write is accepted", |rig| rig.b.write(to_a, offset, LEN, None, None));
        rig.insist("a small write is accepted", |rig| rig.a.write(to_b, 4 << 20, 8, None, Some(step)));
        rig.insist("a small write is accepted", |rig| rig.b.write(to_a, 4 << 20, 8, None, Some(step)));
        rig.until("both are placed", |rig| {
            if rig.b.seen.contains(&(to_a, Seen::Received(b"behind".to_vec()))) {
                let there = copy(&rig.b.exposed[0], offset, LEN) == copy(&rig.a.source, offset, LEN);
                assert!(there, "T1: a message overtook a big write");
            }
            rig.a.placed() == Some(step) && rig.b.placed() == Some(step)
        });
        let there = copy(&rig.a.exposed[0], offset, LEN) == copy(&rig.b.source, offset, LEN);
        assert!(there, "T3: a big write is placed and not there");
        rig.a.seen.clear();
        rig.b.seen.clear();
    }
}

/// One transport with sixteen peers, each with traffic of its own in both directions.
pub fn many_peers<H: Harness>(harness: &mut H) {
    const PEERS: u16 = 16;
    const STEPS: u64 = 100;
    let mut hub = Side::new(harness, PEERS, 1);
    let mut spokes: Vec<Side<H::T>> = Vec::new();
    for peer in 0..PEERS {
        let mut spoke = Side::new(harness, 1, 1);
        let (to_spoke, to_hub) = harness.link();
        hub.transport.admit(PeerId(peer), to_spoke, &hub.exposed);
        spoke.transport.admit(PeerId(0), to_hub, &spoke.exposed);
        spoke.source.put(0, &Random(u64::from(peer) + 1).bytes(1 << 20));
        spokes.push(spoke);
    }
    hub.source.put(0, &Random(99).bytes(1 << 20));
    let mut sent = vec![(0u64, 0u64); usize::from(PEERS)];
    for _ in 0..ACCEPTED_MAX {
        for (peer, spoke) in spokes.iter_mut().enumerate() {
            let (from_spoke, from_hub) = &mut sent[peer];
            let local = LocalRange { region: spoke.key, offset: *from_spoke as usize * 2000, len: 2000 };
            let offset = peer * 256_000 + *from_spoke as usize * 2000;
            let remote = RemoteOffset { region: 0, offset };
            let token = Some(*from_spoke);
            if *from_spoke < STEPS && spoke.transport.write(PeerId(0), local, remote, Some(1), token).is_ok() {
                *from_spoke += 1;
            }
            let message = [peer as u8, *from_hub as u8];
            if *from_hub < STEPS && hub.transport.send(PeerId(peer as u16), &message).is_ok() {
                *from_hub += 1;
            }
            spoke.transport.flush();
        }
        hub.transport.flush();
        harness.step();
        let events: usize = hub.poll() + spokes.iter_mut().map(|spoke| spoke.poll()).sum::<usize>();
        let done = |spoke: &Side<H::T>| spoke.placed() == Some(STEPS - 1) && spoke.messages().len() as u64 == STEPS;
        if spokes.iter().all(done) {
            break;
        }
        if events == 0 {
            std::thread::yield_now();
        }
    }
    for (peer, spoke) in spokes.iter().enumerate() {
        assert_eq!(spoke.placed(), Some(STEPS - 1), "peer {peer}: not all was placed");
        let len = STEPS as usize * 2000;
        let there = copy(&hub.exposed[0], peer * 256_000, len) == copy(&spoke.source, 0, len);
        assert!(there, "peer {peer}: its bytes are wrong");
        for (step, bytes) in spoke.messages().into_iter().enumerate() {
            assert_eq!(bytes, [peer as u8, step as u8], "peer {peer}: a message is wrong");
        }
        assert!(hub.seen.contains(&(PeerId(peer as u16), Seen::Notified(1))), "peer {peer}: no notification");
    }
}

/// Both sides issue random operations; in the end memory and messages are what a model says.
pub fn random_traffic<H: Harness>(harness: &mut H) {
    for seed in 1..=4 {
        let mut rig = Rig::new(harness);
        let mut random = Random(seed * 0x9E37_79B9);
        let content = random.bytes(REGION_BYTES);
        rig.a.source.put(0, &content);
        rig.b.source.put(0, &content);
        let mut models = [vec![0; REGION_BYTES], vec![0; REGION_BYTES]];
        let mut sent: [Vec<Vec<u8>>; 2] = [Vec::new(), Vec::new()];
        let mut tokens = [0u64, 0];
        rig.a.slice = 1 + random.below(8);
        rig.b.slice = 1 + random.below(8);
        for _ in 0..6000 {
            if random.below(5) == 0 {
                rig.round();
                continue;
            }
            let from = random.below(2);
            let (side, to) = if from == 0 { (&mut rig.a, Rig::<H>::B) } else { (&mut rig.b, Rig::<H>::A) };
            let shift = random.below(17);
            let len = random.below(1 << shift);
            let offset = random.below(REGION_BYTES - len);
            let target = random.below(REGION_BYTES - 1 - len);
            let remote = RemoteOffset { region: 0, offset: target };
            let notify = (random.below(3) == 0).then_some(7);
            let bytes = &content[offset..offset + len];
            match random.below(4) {
                0 if len <= SEND_BYTES_MAX => {
                    if side.transport.send(to, bytes).is_ok() {
                        sent[from].push(bytes.to_vec());
                    }
                }
                1 if len <= 256 => {
                    if side.transport.write_inline(to, bytes, remote, notify).is_ok() {
                        models[from][target..target + len].copy_from_slice(bytes);
                    }
                }
                _ => {
                    let local = LocalRange { region: side.key, offset, len };
                    let token = (random.below(2) == 0).then_some(tokens[from] + 1);
                    if side.transport.write(to, local, remote, notify, token).is_ok() {
                        models[from][target..target + len].copy_from_slice(bytes);
                        tokens[from] += u64::from(token.is_some());
                    }
                }
            }
            if random.below(16) == 0 {
                side.transport.flush();
            }
        }
        let last = u64::MAX;
        let end = REGION_BYTES - 1;
        rig.insist("a last write is accepted", |rig| rig.a.write(Rig::<H>::B, end, 1, None, Some(last)));
        rig.insist("a last write is accepted", |rig| rig.b.write(Rig::<H>::A, end, 1, None, Some(last)));
        rig.until("all is placed", |rig| rig.a.placed() == Some(last) && rig.b.placed() == Some(last));
        rig.settle();
        for (from, region, receiver) in [(0, &rig.b.exposed[0], &rig.b), (1, &rig.a.exposed[0], &rig.a)] {
            models[from][end] = content[end];
            assert!(copy(region, 0, REGION_BYTES) == models[from], "seed {seed}: memory differs from the model");
            assert_eq!(receiver.messages(), sent[from], "seed {seed}: messages differ from the model");
        }
    }
}
