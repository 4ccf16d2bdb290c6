//! RDMA that does not work is left alone: one line says why, and the same transports go on over the carrier.

use antelog_core::transport::DownReason;

use super::*;

/// After pairs ended for good, the same transports work over TCP.
fn works_over_the_carrier(rig: &mut Rig) {
    rig.a.events.clear();
    rig.b.events.clear();
    rig.connect(false);
    rig.until("a message goes over the carrier", |rig| rig.a.transport.send(PEER, b"plain").is_ok());
    rig.until("a write goes over the carrier", |rig| rig.a.write(4096, Some(7), Some(9)).is_ok());
    rig.until("it arrives", |rig| rig.a.events.contains(&Event::Placed { peer: PEER, token: 9 }));
    rig.until("it is announced", |rig| rig.b.events.contains(&Event::Notified { peer: PEER, value: 7 }));
    let messages = rig.b.messages();
    assert_eq!(messages.len(), 1);
    assert_eq!(rig.b.transport.message(messages[0]), b"plain");
    rig.b.transport.release(messages[0]);
    rig.settle();
    assert_eq!((rig.a.downs(), rig.b.downs()), (vec![], vec![]));
}

fn one_line(text: Option<String>) -> String {
    let text = text.expect("a reason");
    assert!(!text.contains('\n') && text.len() > 10, "{text:?}");
    text
}

/// Memory for sources cannot be locked: known before anybody connects.
#[test]
fn sources_that_cannot_be_registered_disable_rdma() {
    let fabric = Fabric::new(1, Behaviour::default());
    let (a, b) = (Side::granted(&fabric, &Options::default(), 4096), Side::new(&fabric, &Options::default()));
    let mut rig = Rig { fabric, links: Pairs::new("127.0.0.1:0"), a, b };
    let why = one_line(rig.a.health.disabled());
    assert!(why.contains("ulimit -l"), "{why}");
    rig.connect(true);
    rig.until("both hear of it", |rig| rig.a.downs().len() == 1 && rig.b.downs().len() == 1);
    assert_eq!(rig.b.health.disabled(), None);
    works_over_the_carrier(&mut rig);
}

/// A region to be exposed cannot be registered ahead of time.
#[test]
fn regions_that_cannot_be_prepared_disable_rdma() {
    let fabric = Fabric::new(2, Behaviour::default());
    let mut side = Side::granted(&fabric, &Options::default(), 100_000);
    assert_eq!(side.health.disabled(), None);
    side.transport.prepare(&side.region.clone());
    assert!(one_line(side.health.disabled()).contains("ulimit -l"));
}

/// Buffers for a pair cannot be locked: that pair stays on the carrier.
#[test]
fn a_pair_without_memory_is_avoided() {
    let fabric = Fabric::new(3, Behaviour::default());
    let (a, b) = (Side::granted(&fabric, &Options::default(), 1 << 20), Side::new(&fabric, &Options::default()));
    let mut rig = Rig { fabric, links: Pairs::new("127.0.0.1:0"), a, b };
    rig.connect(true);
    rig.until("both end", |rig| rig.a.downs().len() == 1 && rig.b.downs().len() == 1);
    assert_eq!(rig.a.downs(), [DownReason::Io(libc::ENOMEM)]);
    assert!(one_line(rig.a.health.avoided(HOST)).contains("ulimit -l"));
    assert_eq!((rig.a.health.disabled(), rig.b.health.disabled()), (None, None));
    works_over_the_carrier(&mut rig);
}

/// A pair that ever again fails to come up takes no more memory than the first time.
#[test]
fn failing_again_costs_nothing() {
    let fabric = Fabric::new(4, Behaviour::default());
    let options = receives(32);
    let (mut a, b) = (Side::new(&fabric, &options), Side::new(&fabric, &options));
    let limits = Limits { message_bytes_max: 1 << 20, completions: 1 << 12, requests_max: 40 };
    let buffers = (32 + 24) * 8192;
    let lockable_bytes = (2 << 16) + buffers + options.staging_bytes as u64;
    let device = fabric.device(Grant { limits, queues: 2, inline_bytes: 0, lockable_bytes });
    a.transport = RdmaTransport::new(tcp(), Some(device), 2, options, a.health.clone());
    a.transport.register(a.region.clone());
    let mut rig = Rig { fabric, links: Pairs::new("127.0.0.1:0"), a, b };
    for _ in 0..3 {
        rig.connect(true);
        rig.until("both end", |rig| rig.a.downs().len() == 1 && rig.b.downs().len() == 1);
        let why = one_line(rig.a.health.avoided(HOST));
        assert!(why.contains("at most 40 are granted"), "{why}");
        rig.a.events.clear();
        rig.b.events.clear();
    }
}

/// A device is lost in every state of its pair; messages that are held stay readable.
#[test]
fn a_lost_device_is_disabled_and_the_carrier_goes_on() {
    for rounds in [None, Some(0), Some(5), Some(20), Some(50)] {
        let mut rig = Rig::new(9, &Options::default());
        rig.connect(true);
        if let Some(rounds) = rounds {
            (0..rounds).for_each(|_| rig.round());
        } else {
            rig.until("both come up", |rig| rig.a.is_up() && rig.b.is_up());
            rig.b.transport.send(PEER, b"held").unwrap();
        }
        let mut held = Vec::new();
        rig.until("the message is held", |rig| {
            held.extend(rig.a.messages());
            rounds.is_some() || held.len() == 1
        });
        rig.fabric.lose(rig.a.device);
        // As a parked thread or the watch finds out.
        rig.a.transport.prepare_wait();
        rig.until("both hear of it", |rig| rig.a.downs().len() == 1 && rig.b.downs().len() == 1);
        rig.settle();
        assert_eq!((rig.a.downs(), rig.b.downs().len()), (vec![DownReason::Io(libc::ENODEV)], 1));
        one_line(rig.a.health.disabled());
        assert_eq!(rig.b.health.disabled(), None);
        assert_eq!(rig.a.write(64, None, None), Err(Full));
        for message in held {
            assert_eq!(rig.a.transport.message(message), b"held");
            rig.a.transport.release(message);
        }
        // Sources that come later go to the carrier alone.
        rig.a.transport.register(Region::new(4096).unwrap());
        works_over_the_carrier(&mut rig);
    }
}

/// Everything but the data gets through.
#[test]
fn pairs_without_data_are_given_up_in_time() {
    let fabric = Fabric::new(5, Behaviour { loss: 1, ..Behaviour::default() });
    // Longer than the bring-up takes: the deadline is what ends it.
    let patience = Patience { ack_timeout: 25, retries: 7 };
    let options = Options { patience, bring_up_ns: 2_000_000, ..Options::default() };
    let (a, b) = (Side::new(&fabric, &options), Side::new(&fabric, &options));
    let mut rig = Rig { fabric, links: Pairs::new("127.0.0.1:0"), a, b };
    rig.connect(true);
    rig.until("both end", |rig| rig.a.downs().len() == 1 && rig.b.downs().len() == 1);
    let reasons = [&rig.a, &rig.b].map(|side| side.health.avoided(HOST));
    let reason = one_line(reasons.into_iter().flatten().next());
    assert!(reason.contains("no data comes through"), "{reason}");
    works_over_the_carrier(&mut rig);
}

/// The same when the device gives up before the deadline.
#[test]
fn pairs_whose_probe_is_unanswered_say_so() {
    let fabric = Fabric::new(6, Behaviour { loss: 1, ..Behaviour::default() });
    let options = Options { patience: Patience { ack_timeout: 1, retries: 1 }, ..Options::default() };
    let (a, b) = (Side::new(&fabric, &options), Side::new(&fabric, &options));
    let mut rig = Rig { fabric, links: Pairs::new("127.0.0.1:0"), a, b };
    rig.connect(true);
    rig.until("both end", |rig| rig.a.downs().len() == 1 && rig.b.downs().len() == 1);
    let reasons = [&rig.a, &rig.b].map(|side| side.health.avoided(HOST));
    let reason = one_line(reasons.into_iter().flatten().next());
    assert!(reason.contains("no data comes through"), "{reason}");
}

/// A path that carries the probe and then fails, again and again: once may be chance, after the third time it is TCP.
#[test]
fn a_path_that_breaks_soon_after_it_came_up_three_times_is_avoided() {
    let options = Options { patience: Patience { ack_timeout: 1, retries: 1 }, ..Options::default() };
    let mut rig = Rig::up(7, &options);
    for time in 1..=3 {
        assert_eq!(rig.a.health.avoided(HOST), None, "before time {time}");
        rig.fabric.set_behaviour(Behaviour { loss: 1, ..Behaviour::default() });
        rig.a.write(4096, None, Some(1)).unwrap();
        rig.until("both end", |rig| rig.a.downs().len() == time && rig.b.downs().len() == time);
        assert_eq!(rig.a.downs()[time - 1], DownReason::Io(libc::ETIMEDOUT));
        rig.fabric.set_behaviour(Behaviour::default());
        if time < 3 {
            rig.connect(true);
            rig.until("it is up again", |rig| rig.a.is_up() && rig.b.is_up());
        }
    }
    let reason = one_line(rig.a.health.avoided(HOST));
    assert!(reason.contains("Unreachable"), "{reason}");
    works_over_the_carrier(&mut rig);
}

/// One that has worked for long gets another chance: it may have been a cable.
#[test]
fn a_path_that_worked_for_long_is_tried_again() {
    let options = Options { patience: Patience { ack_timeout: 1, retries: 1 }, ..Options::default() };
    let mut rig = Rig::up(8, &options);
    rig.fabric.advance(200_000_000_000);
    rig.fabric.set_behaviour(Behaviour { loss: 1, ..Behaviour::default() });
    rig.a.write(4096, None, Some(1)).unwrap();
    rig.until("both end", |rig| rig.a.downs().len() == 1 && rig.b.downs().len() == 1);
    assert_eq!((rig.a.health.avoided(HOST), rig.b.health.avoided(HOST)), (None, None));
}

/// A peer that goes away, up or not, says nothing about RDMA.
#[test]
fn a_peer_that_dies_is_not_avoided() {
    for rounds in [0, 3, 10, 30, 3000] {
        let mut rig = Rig::new(rounds as u64, &Options::default());
        rig.connect(true);
        (0..rounds).for_each(|_| rig.round());
        let _ = rig.a.write(4096, Some(1), Some(1));
        rig.a.transport.flush();
        let other = Side::new(&rig.fabric, &Options::default());
        drop(std::mem::replace(&mut rig.b, other));
        rig.until("a hears of it", |rig| rig.a.downs().len() == 1);
        rig.settle();
        assert_eq!((rig.a.downs(), rig.a.health.avoided(HOST)), (vec![DownReason::Closed], None));
        works_over_the_carrier(&mut rig);
    }
}
