//! Fences, lost peers, returning peers, and peers that break the rules.

use super::Harness;
use super::rig::{REGION_BYTES, Random, Rig, Seen, Side, copy};
use crate::transport::{DownReason, LocalRange, RemoteOffset, Transport};

/// Writes as much as fits, at offsets that move on.
fn flood<H: Harness>(rig: &mut Rig<'_, H>, step: &mut usize) {
    while rig.a.write(Rig::<H>::B, *step * 4096 % (REGION_BYTES - 4096), 4096, Some(1), None).is_ok() {
        *step += 1;
    }
}

/// T6: a peer that goes on writing changes nothing any more, and nothing of it is reported.
pub fn fence<H: Harness>(harness: &mut H) {
    for rounds in 0..20 {
        let mut rig = Rig::new(harness);
        rig.a.source.put(0, &Random(21).bytes(REGION_BYTES));
        rig.b.holds = true;
        rig.insist("a message is accepted", |rig| rig.a.transport.send(Rig::<H>::B, b"kept"));
        rig.until("it arrives", |rig| rig.b.held.len() == 1);
        let mut step = 0;
        for _ in 0..rounds {
            flood(&mut rig, &mut step);
            rig.round();
        }
        flood(&mut rig, &mut step);
        rig.a.transport.flush();
        rig.b.transport.fence(Rig::<H>::A);
        let before = copy(&rig.b.exposed[0], 0, REGION_BYTES);
        rig.b.seen.clear();
        rig.until("the fenced side learns it", |rig| {
            flood(rig, &mut step);
            !rig.a.downs().is_empty()
        });
        rig.settle();
        assert_eq!(rig.a.downs().len(), 1, "T7: lost once, reported {:?}", rig.a.downs());
        assert!(copy(&rig.b.exposed[0], 0, REGION_BYTES) == before, "T6: bytes landed after the fence");
        assert_eq!(rig.b.seen, [], "T6: events of a fenced peer");
        rig.b.assert_full(Rig::<H>::A);
        rig.a.assert_full(Rig::<H>::B);
        // What was received before stays readable.
        assert_eq!(rig.b.transport.message(rig.b.held[0]), b"kept");
        rig.b.transport.release(rig.b.held[0]);
    }
}

/// T6: everything was sent, nothing polled: nothing lands. Fencing an unknown peer does nothing.
pub fn fence_at_once<H: Harness>(harness: &mut H) {
    let mut rig = Rig::new(harness);
    rig.a.source.put(0, &[7; 4096]);
    rig.insist("a write is accepted", |rig| rig.a.write(Rig::<H>::B, 0, 4096, Some(1), None));
    rig.a.transport.flush();
    for _ in 0..100 {
        rig.harness.step();
        rig.a.poll();
    }
    // `b` may have placed it while it was connected; from here on nothing changes.
    rig.b.transport.fence(Rig::<H>::A);
    let before = copy(&rig.b.exposed[0], 0, 4096);
    rig.b.seen.clear();
    rig.b.transport.fence(Rig::<H>::A);
    rig.b.transport.fence(crate::transport::PeerId(3));
    rig.settle();
    assert_eq!(copy(&rig.b.exposed[0], 0, 4096), before, "T6: bytes landed after the fence");
    assert_eq!(rig.b.seen, [], "T6: events of a fenced peer");
}

/// T7: the peer's process ends. One report, then full; a new connection starts clean.
pub fn down_and_back<H: Harness>(harness: &mut H) {
    let mut rig = Rig::new(harness);
    let to = Rig::<H>::B;
    for life in 0..5u64 {
        rig.a.source.put(0, &life.to_le_bytes());
        rig.insist("a write is accepted", |rig| rig.a.write(to, 0, 8, None, Some(life)));
        rig.until("it is placed", |rig| rig.a.placed() == Some(life));
        assert_eq!(copy(&rig.b.exposed[0], 0, 8), life.to_le_bytes());
        rig.a.seen.clear();
        // Left behind, to see that the next life does not inherit it.
        rig.insist("a write is accepted", |rig| rig.a.write(to, 8, 4096, Some(9), Some(1000 + life)));
        let successor = Side::new(rig.harness, 4, 2);
        drop(std::mem::replace(&mut rig.b, successor));
        rig.until("the loss is reported", |rig| !rig.a.downs().is_empty());
        rig.settle();
        assert_eq!(rig.a.downs(), [DownReason::Closed], "T7: how a process that ended is reported");
        assert!(matches!(rig.a.seen.last(), Some((_, Seen::Down(_)))), "T7: events after the end: {:?}", rig.a.seen);
        rig.a.assert_full(to);
        rig.a.seen.clear();
        rig.connect();
        rig.settle();
        assert_eq!(rig.a.seen, [], "T7: a new connection inherited events");
        assert_eq!(rig.b.seen, [], "T7: a new connection inherited operations");
        assert_eq!(copy(&rig.b.exposed[0], 0, 8192), [0; 8192], "T7: a new connection inherited writes");
    }
}

/// T7: admitting a connected peer again fences the old connection, without a report, and the new one works.
pub fn readmission<H: Harness>(harness: &mut H) {
    let mut rig = Rig::new(harness);
    let (to_a, to_b) = (Rig::<H>::A, Rig::<H>::B);
    for life in 0..10u64 {
        rig.insist("a write is accepted", |rig| rig.b.write(to_a, 0, 4096, Some(1), Some(life)));
        rig.b.transport.flush();
        rig.connect();
        rig.a.seen.clear();
        rig.b.seen.clear();
        rig.insist("a write is accepted", |rig| rig.a.write(to_b, 0, 4096, None, Some(100 + life)));
        rig.insist("a message is accepted", |rig| rig.b.transport.send(to_a, b"hello again"));
        rig.until("the new connection works both ways", |rig| {
            rig.a.placed() == Some(100 + life) && rig.a.messages() == [b"hello again"]
        });
        rig.settle();
        assert_eq!(rig.a.downs(), [], "T7: a replaced connection was reported");
        assert_eq!(rig.b.seen, [], "T7: the new connection inherited something");
    }
}

/// Writes outside what was exposed land nowhere and end the connection on both sides.
pub fn outside<H: Harness>(harness: &mut H) {
    let far =
        [(0, REGION_BYTES), (0, REGION_BYTES - 4095), (0, usize::MAX - 100), (1, usize::MAX), (2, 0), (u16::MAX, 0)];
    for (region, offset) in far {
        let mut rig = Rig::new(harness);
        rig.a.source.put(0, &[0xee; 8192]);
        let local = LocalRange { region: rig.a.key, offset: 0, len: 4096 };
        let remote = RemoteOffset { region, offset };
        rig.insist("a write is accepted", |rig| rig.a.transport.write(Rig::<H>::B, local, remote, Some(1), Some(1)));
        rig.until("both sides report it", |rig| !rig.a.downs().is_empty() && !rig.b.downs().is_empty());
        rig.settle();
        assert_eq!(rig.b.seen, [(Rig::<H>::A, Seen::Down(DownReason::Protocol))], "write to {region}:{offset}");
        assert_eq!(rig.a.seen.len(), 1, "write to {region}:{offset} reported {:?}", rig.a.seen);
        for exposed in &rig.b.exposed {
            let untouched = copy(exposed, 0, REGION_BYTES).iter().all(|&byte| byte == 0);
            assert!(untouched, "a write to {region}:{offset} landed");
        }
        rig.a.assert_full(Rig::<H>::B);
        rig.b.assert_full(Rig::<H>::A);
    }
}

/// Both sides write, send and hold messages while one of them disappears; all reports still are in order.
pub fn ends_under_load<H: Harness>(harness: &mut H) {
    for rounds in [0, 1, 3, 10, 30] {
        let mut rig = Rig::new(harness);
        rig.a.source.put(0, &Random(31).bytes(REGION_BYTES));
        rig.b.source.put(0, &Random(32).bytes(REGION_BYTES));
        rig.a.slice = 2;
        let mut step = 0;
        let mut sent = 0u32;
        for _ in 0..=rounds {
            flood(&mut rig, &mut step);
            while rig.b.transport.send(Rig::<H>::A, &sent.to_le_bytes()).is_ok() {
                sent += 1;
            }
            rig.round();
        }
        rig.b.transport.flush();
        let successor = Side::new(rig.harness, 4, 2);
        drop(std::mem::replace(&mut rig.b, successor));
        rig.until("the loss is reported", |rig| {
            flood(rig, &mut step);
            !rig.a.downs().is_empty()
        });
        rig.settle();
        assert_eq!(rig.a.downs().len(), 1, "T7: lost once, reported {:?}", rig.a.downs());
        for (step, bytes) in rig.a.messages().into_iter().enumerate() {
            assert_eq!(bytes, (step as u32).to_le_bytes(), "T1: messages before the end");
        }
        assert!(matches!(rig.a.seen.last(), Some((_, Seen::Down(_)))), "T7: events after the end");
        rig.a.assert_full(Rig::<H>::B);
    }
}
