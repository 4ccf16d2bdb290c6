//! Ends torn at every sector, and what a chain's break means.

use super::rig::*;
use crate::sim::rng::Rng;
use crate::storage::*;

/// A store with some entries written and flushed, on a disk without faults.
fn written(entries: usize, seed: u64) -> (SimDisk, Scribe, LogStore<SimHandle>) {
    let disk = SimDisk::new(seed);
    let mut scribe = Scribe::new();
    let (mut store, _) = LogStore::open(disk.handle().unwrap(), &config(), scribe.region.clone()).unwrap();
    let mut rng = Rng::new(seed, 2);
    for _ in 0..entries {
        let room = REGION_BYTES as u64 - (scribe.end.at - store.released());
        if scribe.anything(&mut rng, room) {
            store.write_up_to(scribe.end);
        }
        store.flush();
        store.settle().unwrap();
    }
    (disk, scribe, store)
}

fn reopen(disk: &SimDisk, scribe: &Scribe, config: &StoreConfig) -> Result<Recovered, StoreError> {
    LogStore::open(disk.handle().unwrap(), config, scribe.region.clone()).map(|(_, found)| found)
}

/// The log is cut off at every sector of its last 16 KiB: it ends with the last entry that is whole.
#[test]
fn an_end_torn_at_any_sector_is_cut_behind_the_last_whole_entry() {
    let (disk, scribe, store) = written(120, 5);
    drop(store);
    let start = scribe.end.at - scribe.end.at % SEGMENT_BYTES;
    let from = start.max(scribe.end.at.saturating_sub(16 << 10));
    for at in (from..scribe.end.at).step_by(512) {
        let copy = disk.copy();
        copy.erase(Name::Segment(start), HEADER_BYTES + at - start, 100_000);
        // An entry of which only padding is gone is whole.
        let whole = scribe.marks.windows(2).take_while(|pair| covered_to(&scribe, &pair[0], &pair[1]) <= at).last();
        let found = reopen(&copy, &scribe, &StoreConfig { damage: Damage::Cut, ..config() }).unwrap();
        assert_eq!(found.end, whole.unwrap()[1], "torn at {at}");
        // And so it stays.
        assert_eq!(reopen(&copy, &scribe, &config()).unwrap().end, found.end);
    }
}

/// End of what the CRC covers of the entry between two marks.
fn covered_to(scribe: &Scribe, from: &Mark, to: &Mark) -> u64 {
    let bytes = scribe.slice(from.at, to.at);
    let header = antelog_protocol::wire::entry::EntryHeader::decode(bytes[..64].try_into().unwrap()).unwrap();
    match header.kind {
        antelog_protocol::wire::entry::EntryKind::Record => from.at + 64 + u64::from(header.length),
        _ => from.at + 64,
    }
}

#[test]
fn durable_bytes_that_are_broken_are_damage_and_not_an_end() {
    let (disk, scribe, store) = written(200, 6);
    drop(store);
    let newest = scribe.end.at - scribe.end.at % SEGMENT_BYTES;
    let broken = scribe.before_at(newest - 1000);
    let segment = broken.at - broken.at % SEGMENT_BYTES;
    disk.flip(Name::Segment(segment), (HEADER_BYTES + broken.at - segment + 20) * 8);
    let error = reopen(&disk, &scribe, &config()).unwrap_err();
    let StoreError::Damaged { good_to, .. } = &error else { panic!("{error}") };
    assert_eq!(*good_to, broken.at);
    let line = error.to_string();
    assert!(line.contains(&Name::Segment(segment).to_string()) && line.contains("empty the directory"), "{line}");
    // A replica that fetches the rest from a peer takes what is good.
    let cut = StoreConfig { damage: Damage::Cut, ..config() };
    let found = reopen(&disk, &scribe, &cut).unwrap();
    assert_eq!(found.end, broken);
    assert!(found.lost_bytes > 0 && found.lost_bytes <= scribe.end.at - broken.at);
    let again = reopen(&disk, &scribe, &config()).unwrap();
    assert_eq!((again.end, again.lost_bytes), (broken, 0));
}

/// Entries behind the end do not come back, even when the very same entry is written again before them.
#[test]
fn what_lies_behind_a_cut_never_comes_back() {
    let (disk, mut scribe, store) = written(0, 7);
    drop(store);
    let (mut store, _) = LogStore::open(disk.handle().unwrap(), &config(), scribe.region.clone()).unwrap();
    for _ in 0..3 {
        scribe.no_ops(5);
    }
    store.write_up_to(scribe.end);
    store.flush();
    store.settle().unwrap();
    let first = scribe.marks[1];
    store.truncate_to(first).unwrap();
    assert_eq!(store.flushed(), first);
    // The same entry again, with the same bytes: the third would continue the chain.
    scribe.cut(&first);
    scribe.no_ops(5);
    store.write_up_to(scribe.end);
    store.flush();
    store.settle().unwrap();
    drop(store);
    disk.power_loss();
    assert_eq!(reopen(&disk, &scribe, &config()).unwrap().end, scribe.end);
}

#[test]
fn a_missing_segment_is_a_gap_and_a_lost_header_is_found_again() {
    let (disk, scribe, store) = written(250, 8);
    drop(store);
    let middle = 2 * SEGMENT_BYTES;
    assert!(scribe.end.at > 4 * SEGMENT_BYTES);
    let lost = disk.copy();
    lost.erase(Name::Segment(middle), 0, 512);
    let found = reopen(&lost, &scribe, &config()).unwrap();
    assert_eq!((found.end, found.first), (scribe.end, Mark::default()));
    // It was written again: what lies before it may go.
    for start in [0, SEGMENT_BYTES] {
        lost.remove(Name::Segment(start));
    }
    let found = reopen(&lost, &scribe, &config()).unwrap();
    assert_eq!(found.first, scribe.marks[scribe.marks.partition_point(|m| m.at < middle)]);
    disk.remove(Name::Segment(middle));
    let error = reopen(&disk, &scribe, &config()).unwrap_err().to_string();
    assert!(error.contains("no segment follows"), "{error}");
}
