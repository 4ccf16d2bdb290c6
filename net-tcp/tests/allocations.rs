//! The steady state allocates nothing: operations, flush, poll, message and release.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use antelog_core::mem::Region;
use antelog_core::transport::{Event, LocalRange, PeerId, RemoteOffset, Transport};
use antelog_net_tcp::{Options, TcpTransport};

mod common;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

fn count() {
    // Gone while a thread ends; nothing of ours runs then.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A thousand rounds of everything, filling the queues in each tenth.
fn traffic(sides: &mut [TcpTransport; 2], token: &mut u64) -> usize {
    const PEER: PeerId = PeerId(0);
    let mut events = [Event::Placed { peer: PEER, token: 0 }; 8];
    let mut reported = 0;
    for round in 0..1000 {
        for side in &mut *sides {
            for _ in 0..if round % 10 == 0 { 3000 } else { 1 } {
                *token += 1;
                let key = antelog_core::transport::RegionKey(0);
                let remote = RemoteOffset { region: 0, offset: 0 };
                let large = LocalRange { region: key, offset: 0, len: 5000 };
                let small = LocalRange { region: key, offset: 0, len: 50 };
                let _ = side.write(PEER, large, remote, Some(1), Some(*token));
                let _ = side.write(PEER, small, remote, None, None);
                let _ = side.write_inline(PEER, b"inline", remote, Some(2));
                let _ = side.send(PEER, b"message");
            }
            side.flush();
            let _ = side.prepare_wait();
            let count = side.poll(&mut events);
            reported += count;
            for event in &events[..count] {
                if let Event::Received { message, .. } = *event {
                    assert_eq!(side.message(message), b"message");
                    side.release(message);
                }
            }
        }
    }
    reported
}

#[test]
fn nothing_is_allocated_after_admission() {
    let pairs = common::Pairs::new("127.0.0.1:0");
    let new = || TcpTransport::new(1, Options::default()).unwrap();
    let mut sides = [new(), new()];
    let (one, other) = pairs.link();
    for (side, link) in sides.iter_mut().zip([one, other]) {
        let region = Region::new(1 << 20).unwrap();
        side.register(region.clone());
        side.admit(PeerId(0), link, &[region]);
    }
    let mut token = 0;
    let before = ALLOCATIONS.get();
    let reported = traffic(&mut sides, &mut token);
    assert_eq!(ALLOCATIONS.get() - before, 0, "the steady state allocated");
    assert!(reported > 3000, "hardly anything happened: {reported} events");
}
