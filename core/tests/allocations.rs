//! Writing and syncing a log allocates nothing once its files are open.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::PathBuf;

use antelog_core::mem::Region;
use antelog_core::storage::{Damage, LogStore, Mark, Owner, StoreConfig, UringDisk, Verify};
use antelog_protocol::ShardId;
use antelog_protocol::wire::entry::{CRC_OFFSET, EntryHeader, EntryKind, HEADER_BYTES};

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

const REGION_BYTES: usize = 1 << 20;

struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Appends an entry of no-ops: a header.
fn append(region: &Region, end: &mut Mark) {
    let (lsn, epoch) = (end.lsn, 1);
    let kind = EntryKind::NoOps;
    let client = antelog_protocol::ClientId(0);
    let header = EntryHeader { kind, shard: ShardId(0), length: 0, lsn, count: 1, epoch, client, seq: 0, crc: 0 };
    let place = (end.at % REGION_BYTES as u64) as usize;
    region.put(place, &header.encode());
    let crc = region.crc32c(place, CRC_OFFSET, end.crc);
    region.put(place + CRC_OFFSET, &crc.to_le_bytes());
    *end = Mark { at: end.at + HEADER_BYTES as u64, lsn: lsn.plus(1), crc, epoch };
}

#[test]
fn the_steady_state_allocates_nothing() {
    let path = std::env::temp_dir().join(format!("antelog-allocations-{}", std::process::id()));
    let _removed = Removed(path.clone());
    let region = Region::new(REGION_BYTES).unwrap();
    let config = StoreConfig {
        owner: Owner { cluster: "test".into(), shard: ShardId(0), replica: 0 },
        incarnation: 1,
        segment_bytes: 16 << 20,
        verify: Verify::Newest,
        damage: Damage::Refuse,
        unix_ms: 0,
    };
    let disk = UringDisk::open(&path, true).unwrap();
    let (mut store, found) = LogStore::open(disk, &config, region.clone()).unwrap();
    store.settle().unwrap();
    let mut end = found.end;
    let mut run = |store: &mut LogStore<UringDisk>, commits: usize| {
        for commit in 0..commits {
            for _ in 0..100 {
                append(&region, &mut end);
            }
            store.write_up_to(end);
            store.flush();
            store.poll(0).unwrap();
            // One after the other in each tenth; groups of what comes meanwhile otherwise.
            let behind = if commit % 10 == 0 { 0 } else { REGION_BYTES as u64 / 2 };
            while store.flushed().at + behind < end.at {
                store.poll(0).unwrap();
            }
        }
    };
    run(&mut store, 20);
    let before = ALLOCATIONS.with(Cell::get);
    run(&mut store, 1000);
    assert_eq!(ALLOCATIONS.with(Cell::get) - before, 0);
}
