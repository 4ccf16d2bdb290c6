//! Order, visibility, acknowledgement and the bounds of `poll`, without load.

use super::Harness;
use super::rig::{REGION_BYTES, Random, Rig, Seen, copy};
use crate::transport::{Event, LocalRange, PeerId, RemoteOffset, SENDS_IN_FLIGHT_MAX, Transport};

/// Lengths around everything a transport may treat differently.
const LENGTHS: [usize; 9] = [1, 8, 200, 512, 513, 1023, 1024, 5000, 70_000];

/// Where `order` and `visibility` count what was issued.
const WORD: usize = REGION_BYTES - 64;

fn fill_source<H: Harness>(rig: &mut Rig<'_, H>) {
    let bytes = Random(7).bytes(REGION_BYTES);
    rig.a.source.put(0, &bytes);
}

/// T1: writes, inline writes and messages in turn; each message finds what was issued before it.
pub fn order<H: Harness>(harness: &mut H) {
    let mut rig = Rig::new(harness);
    fill_source(&mut rig);
    let to = Rig::<H>::B;
    for step in 0..90u64 {
        let len = LENGTHS[step as usize % LENGTHS.len()];
        let offset = step as usize * 80_000;
        rig.insist("a write is accepted", |rig| rig.a.write(to, offset, len, None, None));
        let word = RemoteOffset { region: 0, offset: WORD };
        rig.insist("an inline write is accepted", |rig| {
            rig.a.transport.write_inline(to, &step.to_ne_bytes(), word, None)
        });
        rig.insist("a message is accepted", |rig| rig.a.transport.send(to, &step.to_le_bytes()));
    }
    let mut expected = 0u64;
    rig.until("all messages arrive", |rig| {
        for (peer, seen) in rig.b.seen.drain(..) {
            assert_eq!((peer, &seen), (Rig::<H>::A, &Seen::Received(expected.to_le_bytes().to_vec())), "T1: messages");
            let len = LENGTHS[expected as usize % LENGTHS.len()];
            let offset = expected as usize * 80_000;
            let there = copy(&rig.b.exposed[0], offset, len) == copy(&rig.a.source, offset, len);
            assert!(there, "T1: message {expected} overtook the write of {len} bytes before it");
            let word = rig.b.exposed[0].load_u64(WORD);
            assert!(word >= expected, "T1: message {expected} overtook the inline write before it");
            expected += 1;
        }
        expected == 90
    });
    // Of two writes to the same bytes the later one stays.
    for len in LENGTHS {
        let remote = RemoteOffset { region: 1, offset: 0 };
        for offset in [0, 100_000] {
            let local = LocalRange { region: rig.a.key, offset, len };
            rig.insist("a write is accepted", |rig| rig.a.transport.write(to, local, remote, None, None));
        }
        rig.drain_a(len as u64);
        let stays = copy(&rig.b.exposed[1], 0, len) == copy(&rig.a.source, 100_000, len);
        assert!(stays, "T1: the earlier of two writes of {len} bytes stayed");
    }
}

/// T2: at every notification the bytes it announces are there; the last of a burst is not lost.
pub fn visibility<H: Harness>(harness: &mut H) {
    let mut rig = Rig::new(harness);
    fill_source(&mut rig);
    let to = Rig::<H>::B;
    for step in 0..90u32 {
        let len = LENGTHS[step as usize % LENGTHS.len()];
        let offset = step as usize * 80_000;
        rig.insist("a write is accepted", |rig| rig.a.write(to, offset, len, Some(step), None));
        rig.until("a write notifies", |rig| !rig.b.seen.is_empty());
        assert_eq!(rig.b.seen, [(Rig::<H>::A, Seen::Notified(step))], "T2: notification");
        let there = copy(&rig.b.exposed[0], offset, len) == copy(&rig.a.source, offset, len);
        assert!(there, "T2: notification {step} came before its {len} bytes");
        rig.b.seen.clear();
    }
    for step in 0..1000u32 {
        let word = RemoteOffset { region: 0, offset: WORD };
        let bytes = u64::from(step).to_ne_bytes();
        rig.insist("an inline write is accepted", |rig| rig.a.transport.write_inline(to, &bytes, word, Some(step)));
    }
    let mut last = None;
    rig.until("the last of a burst notifies", |rig| {
        let word = rig.b.exposed[0].load_u64(WORD);
        for (_, seen) in rig.b.seen.drain(..) {
            let Seen::Notified(value) = seen else { panic!("only notifications are expected, got {seen:?}") };
            assert!(u64::from(value) <= word, "T2: notification {value} when only {word} was visible");
            assert!(last < Some(value), "T2: notification {value} after {last:?}");
            last = Some(value);
        }
        last == Some(999)
    });
    // An empty write can notify as well.
    rig.insist("an empty write is accepted", |rig| rig.a.write(to, 0, 0, Some(77), None));
    rig.until("an empty write notifies", |rig| rig.b.seen == [(Rig::<H>::A, Seen::Notified(77))]);
}

/// T3: one token covers all kinds of operations issued before it.
pub fn placed_is_cumulative<H: Harness>(harness: &mut H) {
    let mut rig = Rig::new(harness);
    fill_source(&mut rig);
    let to = Rig::<H>::B;
    for (index, &len) in LENGTHS.iter().enumerate() {
        rig.insist("a write is accepted", |rig| rig.a.write(to, index * 80_000, len, None, None));
        let word = RemoteOffset { region: 1, offset: index * 8 };
        let bytes = (index as u64).to_ne_bytes();
        rig.insist("an inline write is accepted", |rig| rig.a.transport.write_inline(to, &bytes, word, None));
    }
    rig.settle();
    assert_eq!(rig.a.seen, [], "T3: events nobody asked for");
    rig.insist("a write is accepted", |rig| rig.a.write(to, 7_000_000, 3000, None, Some(0)));
    rig.until("the write is placed", |rig| !rig.a.seen.is_empty());
    assert_eq!(rig.a.seen, [(to, Seen::Placed(0))], "T3");
    for (index, &len) in LENGTHS.iter().enumerate() {
        let there = copy(&rig.b.exposed[0], index * 80_000, len) == copy(&rig.a.source, index * 80_000, len);
        assert!(there, "T3: placed, but an earlier write of {len} bytes is missing");
        assert_eq!(rig.b.exposed[1].load_u64(index * 8), index as u64, "T3: an earlier inline write is missing");
    }
    assert_eq!(rig.b.seen, [], "a write without notification was reported");
}

/// T3: an acknowledgement of one write says nothing about the next, which the peer has not looked at yet.
pub fn placed_is_not_early<H: Harness>(harness: &mut H) {
    let mut rig = Rig::new(harness);
    fill_source(&mut rig);
    for step in 0..100u64 {
        let (first, second) = (2 * step, 2 * step + 1);
        let offset = |token: u64| token as usize * 4096;
        rig.insist("a write is accepted", |rig| rig.a.write(Rig::<H>::B, offset(first), 4096, Some(1), Some(first)));
        rig.until("it arrives", |rig| {
            rig.a.transport.flush();
            rig.b.poll();
            !rig.b.seen.is_empty()
        });
        rig.b.transport.flush();
        rig.b.seen.clear();
        rig.insist("a write is accepted", |rig| rig.a.write(Rig::<H>::B, offset(second), 4096, None, Some(second)));
        for _ in 0..20 {
            rig.a.transport.flush();
            rig.harness.step();
            rig.a.poll();
        }
        if rig.a.placed() == Some(second) {
            let there = copy(&rig.b.exposed[0], offset(second), 4096) == copy(&rig.a.source, offset(second), 4096);
            assert!(there, "T3: write {second} is said to be placed and is not there");
        }
        rig.until("both are placed", |rig| rig.a.placed() == Some(second));
    }
}

/// T3: tokens are reported in order, perhaps not all, but the last for sure, and never before their effect.
pub fn placed_rises<H: Harness>(harness: &mut H) {
    let mut rig = Rig::new(harness);
    fill_source(&mut rig);
    let mut last = None;
    let mut check = move |rig: &mut Rig<'_, H>| {
        for (peer, seen) in rig.a.seen.drain(..) {
            let Seen::Placed(token) = seen else { panic!("only placed is expected, got {seen:?}") };
            assert_eq!(peer, Rig::<H>::B);
            assert!(last < Some(token), "T3: placed {token} after {last:?}");
            let offset = token as usize * 700;
            let there = copy(&rig.b.exposed[0], offset, 1500) == copy(&rig.a.source, offset, 1500);
            assert!(there, "T3: {token} was placed and is not there");
            last = Some(token);
        }
        last
    };
    for token in 0..5000u64 {
        rig.insist("a write is accepted", |rig| {
            check(rig);
            rig.a.write(Rig::<H>::B, token as usize * 700, 1500, None, Some(token))
        });
    }
    rig.until("the last token is placed", |rig| check(rig) == Some(4999));
}

/// T5: slices of one event and of none; nothing is lost and everything keeps its order.
pub fn bounded_polls<H: Harness>(harness: &mut H) {
    let mut rig = Rig::new(harness);
    rig.b.slice = 1;
    rig.a.slice = 1;
    let to = Rig::<H>::B;
    for step in 0..200u32 {
        rig.insist("a write is accepted", |rig| rig.a.write(to, 0, 64, Some(step), Some(u64::from(step))));
        rig.insist("a message is accepted", |rig| rig.a.transport.send(to, &step.to_le_bytes()));
    }
    rig.a.transport.flush();
    rig.b.slice = 0;
    rig.settle();
    rig.b.slice = 1;
    rig.until("all messages arrive", |rig| rig.b.messages().len() == 200);
    rig.until("all writes are placed", |rig| rig.a.placed() == Some(199));
    for (step, bytes) in rig.b.messages().into_iter().enumerate() {
        assert_eq!(bytes, (step as u32).to_le_bytes(), "T5: order with slices of one");
    }
}

/// A thread that blocks only when `prepare_wait` allows it never misses an event.
pub fn prepare_wait<H: Harness>(harness: &mut H) {
    let mut rig = Rig::new(harness);
    rig.settle();
    let mut fds = Vec::new();
    rig.b.transport.wait_fds(&mut fds);
    if fds.is_empty() {
        return;
    }
    for step in 0..50u32 {
        let mut idle = 0;
        while rig.b.transport.prepare_wait() {
            rig.b.poll();
            idle += 1;
            assert!(idle < 10_000, "prepare_wait never lets an idle thread block");
        }
        assert!(rig.b.seen.is_empty(), "events out of nothing: {:?}", rig.b.seen);
        rig.insist("a write is accepted", |rig| rig.a.write(Rig::<H>::B, 0, 4096, Some(step), Some(u64::from(step))));
        rig.a.transport.flush();
        let mut rounds = 0;
        while !rig.b.transport.prepare_wait() {
            rig.harness.step();
            rig.a.poll();
            std::thread::yield_now();
            rounds += 1;
            assert!(rounds < 1_000_000, "prepare_wait does not see that an event waits");
        }
        rig.until("what waits is reported", |rig| !rig.b.seen.is_empty());
        rig.b.seen.clear();
        rig.until("the write is placed", |rig| rig.a.placed() == Some(u64::from(step)));
    }
}

/// As many messages as a peer may have under way stay readable at the same time, and their slots come back.
pub fn held_messages<H: Harness>(harness: &mut H) {
    let mut rig = Rig::new(harness);
    rig.b.holds = true;
    let message = |step: usize| (step as u32).to_le_bytes().repeat(1 + step % 16);
    for batch in 0..3 {
        for step in 0..SENDS_IN_FLIGHT_MAX {
            rig.insist("a message is accepted", |rig| rig.a.transport.send(Rig::<H>::B, &message(step)));
        }
        rig.until("all messages arrive unreleased", |rig| rig.b.held.len() == SENDS_IN_FLIGHT_MAX);
        for (step, &handle) in rig.b.held.iter().enumerate() {
            assert_eq!(rig.b.transport.message(handle), message(step), "message {step} of batch {batch} changed");
        }
        // In another order than they came.
        let half = rig.b.held.len() / 2;
        rig.b.held.rotate_left(half);
        for handle in rig.b.held.drain(..) {
            rig.b.transport.release(handle);
        }
        rig.b.seen.clear();
    }
    let mut events = [Event::Placed { peer: PeerId(0), token: 0 }; 1];
    assert_eq!(rig.b.transport.poll(&mut events), 0, "a message came twice");
}
