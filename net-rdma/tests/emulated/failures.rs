//! Ends and failures: queues that fail or go, devices that are lost, memory that cannot be had.

use antelog_core::mem::Region;
use antelog_net_rdma::emulated::{Behaviour, Fabric, Grant};
use antelog_net_rdma::provider::{
    Access, Completion, DeviceEvent, Done, Failure, Provider, ProviderError, QueueId, Request,
};

use super::{BYTES, Node, OK, Q, bytes, calm, connect, pair, patterned, slow, steps, wait_out};

#[test]
fn a_failed_queue_gives_everything_back() {
    for seed in 0..20 {
        let (fabric, mut a, mut b) = pair(seed, slow());
        (10..14).for_each(|n| a.receive(n, 8));
        for n in 0..8 {
            let request = a.write(&b, n, n as usize * 64, 64);
            a.provider.post(Q, &[Request { signalled: n % 4 == 1, ..request }]).unwrap();
        }
        steps(&fabric, seed as usize);
        a.provider.fail(Q);
        a.provider.fail(QueueId(9));
        steps(&fabric, 50);
        let done = a.poll();
        let receives: Vec<_> = done.iter().filter(|c| c.0 >= 10).copied().collect();
        assert_eq!(receives, (10..14).map(|n| (n, Err(Failure::Flushed))).collect::<Vec<_>>());
        // First what had succeeded and is signalled, then all others.
        let requests: Vec<_> = done.iter().filter(|c| c.0 < 10).copied().collect();
        let succeeded = requests.iter().take_while(|c| c.1 == OK).count();
        assert_eq!(requests[..succeeded], [(1, OK), (5, OK)][..succeeded]);
        let flushed: Vec<u64> = requests[succeeded..].iter().map(|c| c.0).collect();
        assert!(requests[succeeded..].iter().all(|c| c.1 == Err(Failure::Flushed)));
        assert!(flushed.iter().copied().eq(8 - flushed.len() as u64..8), "{requests:?}");
        // All slots are free again once a completion covers those that succeeded unsignalled.
        a.provider.post(Q, &[a.write(&b, 8, 0, 8)]).unwrap();
        steps(&fabric, 50);
        assert_eq!(a.poll(), [(8, Err(Failure::Flushed))]);
        for n in 0..16 {
            a.provider.post(Q, &[a.write(&b, n, 0, 8)]).unwrap();
        }
        // The peer notices nothing before it sends.
        b.provider.post(Q, &[b.write(&a, 1, 0, 8)]).unwrap();
        wait_out(&fabric);
        assert_eq!(b.poll(), [(1, Err(Failure::Unreachable))]);
    }
}

#[test]
fn nothing_lands_in_a_queue_that_ended() {
    for (seed, destroy) in (0..40).map(|seed| (seed, seed % 2 == 0)) {
        let (fabric, mut a, mut b) = pair(seed, Behaviour { pieces_per_step_max: 2, ..slow() });
        patterned(&a.closed.1, 512);
        for n in 0..8 {
            a.provider.post(Q, &[a.write(&b, n, n as usize * 512, 512)]).unwrap();
        }
        steps(&fabric, 10);
        if destroy {
            b.provider.destroy(Q)
        } else {
            b.provider.fail(Q)
        }
        let before = bytes(&b.open.1, 0, BYTES);
        assert!(before.contains(&0));
        wait_out(&fabric);
        assert_eq!(bytes(&b.open.1, 0, BYTES), before);
        let done = a.poll();
        assert_eq!(done.len(), 8);
        assert!(done.iter().filter(|c| c.1 == Err(Failure::Unreachable)).count() == 1, "{done:?}");
    }
}

#[test]
fn what_a_queue_had_sent_may_land_after_it_ended() {
    let (mut landed_later, mut unfinished) = (0, 0);
    for seed in 0..40 {
        let (fabric, mut a, b) = pair(seed, Behaviour { pieces_per_step_max: 2, ..slow() });
        let sent = patterned(&a.closed.1, 512);
        a.provider.post(Q, &[a.write(&b, 1, 0, 512), a.write(&b, 2, 512, 512)]).unwrap();
        steps(&fabric, 5);
        if seed % 2 == 0 {
            a.provider.destroy(Q)
        } else {
            a.provider.fail(Q)
        }
        // The bytes are those from before.
        a.closed.1.put(0, &[0xFF; 512]);
        let before = bytes(&b.open.1, 0, 1024);
        steps(&fabric, 100);
        let after = bytes(&b.open.1, 0, 1024);
        landed_later += usize::from(after != before);
        unfinished += usize::from(after[..512].contains(&0));
        assert!(after.iter().enumerate().all(|(n, &byte)| byte == 0 || byte == sent[n % 512]));
        assert!(fabric.is_quiet() || seed % 2 == 1);
    }
    assert!(landed_later > 10 && unfinished > 5, "{landed_later} {unfinished}");
}

#[test]
fn a_destroyed_queue_is_made_again_under_a_new_number() {
    let (mut kept, mut cleaned) = (0, 0);
    for seed in 0..20 {
        let (fabric, mut a, mut b) = pair(seed, slow());
        a.provider.post(Q, &[a.write(&b, 1, 0, 8)]).unwrap();
        steps(&fabric, 50);
        for node in [&mut a, &mut b] {
            node.provider.destroy(Q);
            node.provider.destroy(Q);
        }
        connect(&mut a, &mut b, Q);
        patterned(&a.closed.1, 8);
        for n in 2..18 {
            a.provider.post(Q, &[a.write(&b, n, 0, 8)]).unwrap();
        }
        steps(&fabric, 100);
        // Completions of the old queue may be there still, before the new ones, and free none of the new slots.
        let mut ids: Vec<u64> = a.poll().iter().map(|c| c.0).collect();
        if ids[0] == 1 {
            ids.remove(0);
            kept += 1;
        } else {
            cleaned += 1;
        }
        assert_eq!(ids, (2..18).collect::<Vec<_>>());
        assert_eq!(bytes(&b.open.1, 0, 8), [1, 2, 3, 4, 5, 6, 7, 8]);
    }
    assert!(kept > 0 && cleaned > 0, "{kept} {cleaned}");
}

#[test]
#[should_panic(expected = "QueueId(0) exists")]
fn a_queue_is_made_once() {
    let (_fabric, mut a, _b) = pair(1, calm());
    a.end(Q, 1).port.gid[0] = 0;
}

#[test]
#[should_panic(expected = "QueueId(0) is not connected")]
fn requests_need_a_connection() {
    let fabric = Fabric::new(1, calm());
    let (mut a, b) = (Node::new(&fabric, Grant::default()), Node::new(&fabric, Grant::default()));
    a.end(Q, 1);
    a.provider.post(Q, &[a.write(&b, 1, 0, 8)]).unwrap();
}

#[test]
fn a_device_fails_queues_of_its_own_accord() {
    let (fabric, mut a, b) = pair(8, calm());
    fabric.break_queue(a.provider.id(), Q);
    fabric.break_queue(a.provider.id(), QueueId(3));
    assert_eq!((a.provider.event(), a.provider.event()), (Some(DeviceEvent::Failed), None));
    a.provider.post(Q, &[a.write(&b, 1, 0, 8)]).unwrap();
    steps(&fabric, 10);
    assert_eq!(a.poll(), [(1, Err(Failure::Flushed))]);

    let (fabric, mut a, _b) = pair(8, Behaviour { queue_failure: 100, ..calm() });
    a.receive(10, 8);
    steps(&fabric, 5000);
    assert_eq!(a.poll(), [(10, Err(Failure::Flushed))]);
    assert_eq!((a.provider.event(), a.provider.event()), (Some(DeviceEvent::Failed), None), "once: it is in error");
}

#[test]
fn of_a_lost_device_nothing_completes_any_more() {
    let (fabric, mut a, mut b) = pair(9, calm());
    a.receive(10, 8);
    a.provider.post(Q, &[a.write(&b, 1, 0, 8)]).unwrap();
    steps(&fabric, 5);
    fabric.lose(a.provider.id());
    fabric.lose(a.provider.id());
    b.provider.post(Q, &[b.write(&a, 1, 0, 8)]).unwrap();
    patterned(&b.closed.1, 8);
    wait_out(&fabric);
    assert_eq!((a.provider.event(), a.provider.event()), (Some(DeviceEvent::Lost), None));
    assert_eq!(a.poll(), []);
    let text = "emulated0: post: the device is gone".to_owned();
    let request = a.write(&b, 2, 0, 8);
    assert_eq!(a.provider.post(Q, &[request]), Err(ProviderError { text, errno: 19 }));
    assert!(a.provider.post_receives(Q, &[]).is_err());
    assert!(a.provider.create(QueueId(1), 1, 1).is_err());
    a.provider.fail(Q);
    a.provider.destroy(Q);
    steps(&fabric, 50);
    assert_eq!(a.poll(), []);
    assert_eq!(bytes(&a.open.1, 0, 8), [0; 8]);
    assert_eq!(b.poll(), [(1, Err(Failure::Unreachable))]);
}

#[test]
fn a_closed_device_is_silent() {
    let (fabric, a, mut b) = pair(10, slow());
    let region = a.open.1.clone();
    b.provider.post(Q, &[b.write(&a, 1, 0, 8)]).unwrap();
    patterned(&b.closed.1, 8);
    drop(a);
    wait_out(&fabric);
    assert_eq!(b.poll(), [(1, Err(Failure::Unreachable))]);
    assert_eq!(bytes(&region, 0, 8), [0; 8]);
}

#[test]
fn a_cable_that_comes_back_in_time_costs_only_time() {
    for (back_in_time, result) in [(true, OK), (false, Err(Failure::Unreachable))] {
        let (fabric, mut a, b) = pair(11, calm());
        patterned(&a.closed.1, 8);
        fabric.set_link(a.provider.id(), false);
        assert_eq!((a.provider.event(), a.provider.event()), (Some(DeviceEvent::PortDown), None));
        a.provider.post(Q, &[a.write(&b, 1, 0, 8)]).unwrap();
        steps(&fabric, 10);
        if !back_in_time {
            wait_out(&fabric);
        }
        fabric.set_link(a.provider.id(), true);
        wait_out(&fabric);
        assert_eq!(a.poll(), [(1, result)]);
        assert_eq!(bytes(&b.open.1, 0, 1), [u8::from(back_in_time)]);
    }
}

#[test]
fn memory_that_may_not_be_locked_is_not_registered() {
    let fabric = Fabric::new(12, calm());
    let mut device = fabric.device(Grant { lockable_bytes: 10_000, ..Grant::default() });
    let region = Region::new(BYTES).unwrap();
    device.register(&region, Access::Local).unwrap();
    let text = "emulated0: register 8192 bytes: 8192 of 10000 lockable bytes are in use; raise the limit (ulimit -l)";
    let refused = device.register(&region, Access::Local);
    assert_eq!(refused, Err(ProviderError { text: text.to_owned(), errno: 12 }));

    fabric.set_behaviour(Behaviour { registration_failure: 2, ..calm() });
    let mut device = fabric.device(Grant::default());
    let granted = (0..100).filter(|_| device.register(&region, Access::Local).is_ok()).count();
    assert!((30..70).contains(&granted), "{granted}");
}

#[test]
fn addresses_keys_and_numbers_are_not_to_be_guessed_but_repeat() {
    let draw = |seed| {
        let (_fabric, a, b) = pair(seed, calm());
        let (open, closed) = (a.provider.remote(a.open.0), b.provider.remote(b.open.0));
        assert_eq!(open.len, BYTES as u64);
        assert!(open.address > 1 << 60, "no address of this process");
        assert_eq!(open.address % 4096, 0);
        (open.address, open.rkey, closed.address, closed.rkey, a.provider.port().gid)
    };
    assert_eq!(draw(1), draw(1));
    let ((a1, k1, a2, k2, g1), (b1, l1, ..)) = (draw(1), draw(2));
    assert!(a1 != a2 && k1 != k2 && a1 != b1 && k1 != l1 && g1 != [0; 16]);
}

#[test]
fn limits_are_kept() {
    let fabric = Fabric::new(13, calm());
    let mut device = fabric.device(Grant { inline_bytes: 220, queues: 1, ..Grant::default() });
    assert_eq!(device.create(Q, 1025, 1).unwrap_err().errno, 22);
    let (number, inline_bytes) = device.create(Q, 1024, 1).unwrap();
    assert!(number < 1 << 24 && inline_bytes == 220);
    assert_eq!(device.wait_fd(), None);
    let mut none: [Completion; 0] = [];
    assert_eq!(device.poll(&mut none), 0);
}

#[test]
fn a_poll_moves_the_fabric_if_so_configured() {
    let (fabric, mut a, b) = pair(14, Behaviour { step_on_poll: true, ..calm() });
    a.provider.post(Q, &[a.write(&b, 1, 0, 8)]).unwrap();
    let mut polls = 0;
    let mut out = [Completion { id: 0, result: Ok(Done::Request) }];
    while a.provider.poll(&mut out) == 0 {
        polls += 1;
    }
    assert!(polls < 10 && out[0].id == 1);
    assert_eq!(fabric.now_ns(), (polls + 1) * 200);
    assert_eq!(a.provider.now_ns(), fabric.now_ns());
}
