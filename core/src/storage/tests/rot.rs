//! Old entries: found, verified, trimmed, rotten, repaired.

use antelog_protocol::Lsn;

use super::rig::*;
use crate::sim::rng::Rng;
use crate::storage::*;

fn log(entries: usize, seed: u64) -> (SimDisk, Scribe, LogStore<SimHandle>) {
    let disk = SimDisk::new(seed);
    let mut scribe = Scribe::new();
    let (mut store, _) = LogStore::open(disk.handle().unwrap(), &config(), scribe.region.clone()).unwrap();
    let mut rng = Rng::new(seed, 3);
    for _ in 0..entries {
        let room = REGION_BYTES as u64 - (scribe.end.at - store.released());
        if scribe.anything(&mut rng, room) {
            store.write_up_to(scribe.end);
        }
        store.settle().unwrap();
    }
    store.flush();
    store.settle().unwrap();
    (disk, scribe, store)
}

#[test]
fn any_slot_and_any_range_is_found() {
    let (_disk, scribe, store) = log(600, 1);
    let mut reader = store.reader(128 << 10).unwrap();
    let mut rng = Rng::new(1, 4);
    assert_readable(&mut reader, &scribe, Mark::default(), scribe.end);
    for _ in 0..300 {
        let lsn = Lsn(rng.below(scribe.end.lsn.0));
        let (begins, bytes) = read(&mut reader, Request::Entries { lsn, bytes_max: 1 }).unwrap();
        assert_eq!(begins, scribe.before(lsn));
        assert!(bytes == scribe.slice(begins.at, begins.at + bytes.len() as u64) && bytes.len() >= 64);
        let from = rng.below(scribe.end.at);
        let to = rng.range(from + 1, scribe.end.at).min(from + (100 << 10));
        let (begins, bytes) = read(&mut reader, Request::Range { from, to, mended: true }).unwrap();
        let first = scribe.marks[scribe.marks.partition_point(|m| m.at < from)];
        let end = scribe.before_at(to).at.max(first.at);
        assert_eq!(begins, first);
        assert!(bytes == scribe.slice(first.at, end), "{} bytes of {}", bytes.len(), end - first.at);
    }
    let beyond = read(&mut reader, Request::Entries { lsn: scribe.end.lsn, bytes_max: 1 });
    assert_eq!(beyond, Err(ReadError::Beyond { written: scribe.end.at }));
    let beyond = read(&mut reader, Request::Range { from: 0, to: scribe.end.at + 1, mended: true });
    assert_eq!(beyond, Err(ReadError::Beyond { written: scribe.end.at }));
}

#[test]
fn the_end_that_is_being_written_is_read_as_far_as_it_is() {
    let (_disk, mut scribe, mut store) = log(5, 2);
    let mut reader = store.reader(128 << 10).unwrap();
    for _ in 0..200 {
        let lsn = scribe.end.lsn;
        scribe.record(100);
        store.write_up_to(scribe.end);
        store.settle().unwrap();
        let (begins, bytes) = read(&mut reader, Request::Entries { lsn, bytes_max: 4096 }).unwrap();
        assert!(begins.lsn == lsn && bytes == scribe.slice(begins.at, scribe.end.at));
    }
}

#[test]
fn a_buffer_that_is_too_small_says_so() {
    let (_disk, mut scribe, mut store) = log(0, 3);
    scribe.record(100);
    scribe.record(20_000);
    store.write_up_to(scribe.end);
    store.settle().unwrap();
    let mut reader = store.reader(16 << 10).unwrap();
    assert!(read(&mut reader, Request::Entries { lsn: Lsn(0), bytes_max: 1 << 20 }).is_ok());
    let long = read(&mut reader, Request::Entries { lsn: Lsn(1), bytes_max: 1 << 20 });
    assert_eq!(long, Err(ReadError::TooLong { bytes: 20_096 }));
}

#[test]
fn what_is_trimmed_is_told_apart_from_what_is_rotten_and_rot_is_repaired() {
    let (disk, scribe, mut store) = log(600, 4);
    let mut reader = store.reader(128 << 10).unwrap();
    let first = store.trim(2 * SEGMENT_BYTES + 30_000);
    store.settle().unwrap();
    assert!(first.at >= SEGMENT_BYTES && first.at < 3 * SEGMENT_BYTES);
    assert_eq!(disk.files()[0].0, Name::Segment(first.at - first.at % SEGMENT_BYTES));
    assert_eq!(read(&mut reader, Request::Entries { lsn: Lsn(0), bytes_max: 1 }), Err(ReadError::Trimmed { first }));
    assert_eq!(read(&mut reader, Request::Range { from: 0, to: 64, mended: true }), Err(ReadError::Trimmed { first }));
    let mut rng = Rng::new(4, 5);
    for _ in 0..100 {
        // Only bits that a CRC covers can be seen: a header's.
        let hit = scribe.before_at(rng.range(first.at, scribe.end.at - SEGMENT_BYTES));
        let segment = hit.at - hit.at % SEGMENT_BYTES;
        let bit = (HEADER_BYTES + hit.at - segment) * 8 + rng.below(64 * 8);
        // A pad before a segment is not needed to find what follows.
        if hit.at < first.at || scribe.before(hit.lsn) != hit {
            continue;
        }
        disk.flip(Name::Segment(segment), bit);
        let mut fresh = store.reader(128 << 10).unwrap();
        let error = read(&mut fresh, Request::Entries { lsn: hit.lsn, bytes_max: 1 }).unwrap_err();
        let ReadError::Damaged { segment: of, before, until } = error else { panic!("{error}") };
        assert_eq!((of, before), (segment, hit), "{error}");
        assert!(error.to_string().contains(&Name::Segment(segment).to_string()));
        // What lies before can still be read, and so can what comes behind the next mark.
        let good = scribe.before(first.lsn);
        assert!(read(&mut fresh, Request::Entries { lsn: good.lsn, bytes_max: 1 }).is_ok() || good == hit);
        if until < scribe.end.at {
            let next = scribe.before_at(until);
            assert!(read(&mut fresh, Request::Entries { lsn: next.lsn, bytes_max: 1 }).is_ok());
        }
        // Wrong bytes are not taken, the right ones are.
        let until = scribe.marks[scribe.marks.partition_point(|m| m.at <= hit.at)].at;
        let mut bytes = scribe.slice(hit.at, until).to_vec();
        bytes[20] ^= 1;
        assert!(matches!(fresh.repair(before, &bytes), Err(ReadError::Damaged { .. })));
        bytes[20] ^= 1;
        fresh.repair(before, &bytes).unwrap();
        assert!(read(&mut fresh, Request::Entries { lsn: hit.lsn, bytes_max: 1 }).is_ok());
    }
    drop((reader, store));
    disk.power_loss();
    let all = StoreConfig { verify: Verify::All, ..config() };
    let (_, found) = LogStore::open(disk.handle().unwrap(), &all, scribe.region.clone()).unwrap();
    assert_eq!((found.first, found.end), (first, scribe.end), "repairs are durable");
}

#[test]
fn retention_trims_by_bytes() {
    let (_disk, scribe, mut store) = log(600, 5);
    let keep = Keep { bytes: Some(3 * SEGMENT_BYTES), age_ms: None };
    let upto = store.trim_by(&keep, scribe.end.at);
    let first = store.trim(upto);
    // A segment goes when all its entries are below: the one that straddles the next keeps it.
    assert!(scribe.end.at - first.at >= 3 * SEGMENT_BYTES && scribe.end.at - first.at < 6 * SEGMENT_BYTES);
    assert_eq!(store.trim_by(&Keep::default(), scribe.end.at), 0);
}

#[test]
fn a_range_without_a_whole_entry_is_empty_and_one_with_rot_ends_before_it() {
    let (disk, scribe, store) = log(600, 6);
    let mut reader = store.reader(128 << 10).unwrap();
    let mut range = |from, to| read(&mut reader, Request::Range { from, to, mended: false });
    let marks = &scribe.marks;
    assert_eq!(range(marks[10].at, marks[11].at - 1), Ok((marks[10], Vec::new())));
    assert_eq!(range(marks[10].at + 1, marks[11].at), Ok((marks[11], Vec::new())));
    let whole = scribe.slice(marks[10].at, marks[14].at);
    assert_eq!(range(marks[10].at, marks[14].at), Ok((marks[10], whole.to_vec())));
    let hit = marks[12];
    let segment = hit.at - hit.at % SEGMENT_BYTES;
    disk.flip(Name::Segment(segment), (HEADER_BYTES + hit.at - segment) * 8 + 77);
    let mut reader = store.reader(128 << 10).unwrap();
    let mut range = |from, to| read(&mut reader, Request::Range { from, to, mended: false });
    let good = scribe.slice(marks[10].at, hit.at);
    assert_eq!(range(marks[10].at, marks[14].at), Ok((marks[10], good.to_vec())));
    assert!(matches!(range(hit.at, marks[14].at), Err(ReadError::Damaged { before, .. }) if before == hit));
}
