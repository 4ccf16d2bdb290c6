//! What a store's calls do, one by one, on a simulated disk.

use antelog_protocol::{Lsn, ShardId};

use super::rig::*;
use crate::storage::*;

type Opened = Result<(LogStore<SimHandle>, Recovered), StoreError>;

fn open(disk: &SimDisk, scribe: &Scribe) -> Opened {
    LogStore::open(disk.handle().unwrap(), &config(), scribe.region.clone())
}

#[test]
fn a_log_is_written_flushed_and_found_again() {
    let disk = SimDisk::new(1);
    let mut scribe = Scribe::new();
    let (mut store, found) = open(&disk, &scribe).unwrap();
    let none = Mark::default();
    assert_eq!(found, Recovered { first: none, in_region: none, end: none, clean: true, lost_bytes: 0 });
    assert!(store.is_idle() || store.room_end() == SEGMENT_BYTES);
    scribe.record(100);
    store.write_up_to(scribe.end);
    store.settle().unwrap();
    // Written, and not durable before it is asked for.
    assert_eq!((store.written(), store.flushed()), (scribe.end.at, none));
    store.flush();
    store.settle().unwrap();
    assert_eq!(store.flushed(), scribe.end);
    assert_eq!(store.released(), 0, "the last block is still needed");
    assert_eq!(store.room_end(), 2 * SEGMENT_BYTES, "one segment ahead");
    store.finish().unwrap();
    drop(store);
    let (store, found) = open(&disk, &scribe).unwrap();
    assert_eq!((found.end, found.clean), (scribe.end, true));
    assert_eq!((store.identity().generation, store.identity().incarnation), (2, 7));
    drop(store);
    assert!(!open(&disk, &scribe).unwrap().1.clean, "the last one did not finish");
}

#[test]
fn groups_of_commits_take_what_has_come_meanwhile() {
    let disk = SimDisk::new(2);
    let mut scribe = Scribe::new();
    let (mut store, _) = open(&disk, &scribe).unwrap();
    store.settle().unwrap();
    disk.set_faults(Faults { delay_min_ns: 100, delay_max_ns: 100, ..Faults::default() });
    let before = disk.operations();
    let mut now_ns = 0;
    for _ in 0..1000 {
        now_ns += 10;
        disk.advance(now_ns);
        scribe.record(10);
        store.write_up_to(scribe.end);
        store.flush();
        store.poll(now_ns).unwrap();
    }
    // A block's write, then its sync: 200 ns together, in which 20 records come.
    let operations = disk.operations() - before;
    assert!((90..250).contains(&operations), "{operations} operations for 1000 commits");
    let behind = (scribe.end.at - store.flushed().at) / 128;
    assert!(behind <= 60, "{behind} records behind after {operations} operations");
}

#[test]
fn foreign_directories_are_refused_with_one_clear_line() {
    let disk = SimDisk::new(3);
    let scribe = Scribe::new();
    drop(open(&disk, &scribe).unwrap());
    let refused = |change: fn(&mut StoreConfig), says: &str| {
        let mut config = config();
        change(&mut config);
        let error = LogStore::open(disk.handle().unwrap(), &config, scribe.region.clone()).map(drop).unwrap_err();
        let line = error.to_string();
        assert!(line.contains(says) && !line.contains('\n'), "{line}");
    };
    refused(
        |c| c.owner.cluster = "other".into(),
        "it belongs to cluster 'test', shard 3, replica 1, not to cluster 'other'",
    );
    refused(|c| c.owner.shard = ShardId(4), "not to cluster 'test', shard 4");
    refused(|c| c.owner.replica = 2, "replica 2");
    refused(|c| c.segment_bytes *= 2, "written with segments of 65536 and a region of 262144 bytes: configure these");
    disk.flip(Name::Identity, 8 * 40);
    refused(|_| {}, "'identity' is not as it was written");
    disk.remove(Name::Identity);
    refused(|_| {}, "it holds segments of a log and no identity");
    let first = disk.handle().unwrap();
    let second = disk.handle().map(drop).unwrap_err();
    assert!(second.contains("in use"), "{second}");
    drop(first);
    assert!(disk.handle().is_ok());
}

#[test]
fn a_segment_of_another_log_is_refused() {
    let (disk, other) = (SimDisk::new(4), SimDisk::new(5));
    let scribe = Scribe::new();
    drop(open(&disk, &scribe).unwrap());
    let owner = Owner { cluster: "other".into(), shard: SHARD, replica: 1 };
    let foreign = StoreConfig { owner, ..config() };
    drop(LogStore::open(other.handle().unwrap(), &foreign, scribe.region.clone()).unwrap());
    disk.take_from(&other, Name::Segment(0));
    let error = open(&disk, &scribe).map(drop).unwrap_err().to_string();
    assert!(error.contains("00000000000000000000.log is a segment of another log"), "{error}");
    disk.remove(Name::Segment(0));
    let error = open(&disk, &scribe).map(drop).unwrap_err().to_string();
    assert!(error.contains("its segments are missing"), "{error}");
}

#[test]
fn a_full_disk_holds_the_log_up_and_loses_nothing() {
    let disk = SimDisk::new(6);
    let mut scribe = Scribe::new();
    let (mut store, _) = open(&disk, &scribe).unwrap();
    // Room for the identity, its successor, and two segments.
    disk.set_faults(Faults { space_bytes: Some(2 * (SEGMENT_BYTES + HEADER_BYTES) + 16384), ..Faults::default() });
    let mut now_ns = 0;
    while scribe.end.at + 2048 < 3 * SEGMENT_BYTES {
        scribe.record(1000);
        store.write_up_to(scribe.end);
        store.flush();
        now_ns += 1;
        store.poll(now_ns).unwrap();
        disk.advance(now_ns);
    }
    assert_eq!(store.settle(), Err(StoreError::Full { place: "sim".into() }));
    assert_eq!(store.condition(), Condition::Full);
    assert_eq!((store.room_end(), store.written()), (2 * SEGMENT_BYTES, 2 * SEGMENT_BYTES));
    assert!(!store.is_idle());
    // Nothing is tried before it is time, and then everything goes on.
    disk.set_faults(Faults::default());
    store.poll(now_ns).unwrap();
    assert_eq!(store.condition(), Condition::Full);
    store.poll(store.deadline_ns().unwrap()).unwrap();
    store.settle().unwrap();
    assert_eq!((store.condition(), store.flushed()), (Condition::Good, scribe.end));
}

#[test]
fn a_failed_sync_is_for_ever() {
    let disk = SimDisk::new(7);
    let mut scribe = Scribe::new();
    let (mut store, _) = open(&disk, &scribe).unwrap();
    store.settle().unwrap();
    scribe.record(100);
    store.write_up_to(scribe.end);
    store.settle().unwrap();
    disk.set_faults(Faults { sync_fails_after: Some(0), ..Faults::default() });
    store.flush();
    let error = store.settle().unwrap_err();
    assert_eq!(error.to_string(), "sim: cannot sync the log: Input/output error (os error 5)");
    disk.set_faults(Faults::default());
    store.flush();
    assert_eq!(store.settle(), Err(error));
    assert_eq!((store.condition(), store.flushed()), (Condition::Failed, Mark::default()));
}

#[test]
fn a_joiner_begins_in_the_middle() {
    let disk = SimDisk::new(8);
    let mut scribe = Scribe::new();
    let (mut store, _) = open(&disk, &scribe).unwrap();
    scribe.record(5000);
    store.write_up_to(scribe.end);
    store.flush();
    store.settle().unwrap();
    let begins = Mark { at: 5 * SEGMENT_BYTES + 1216, lsn: Lsn(777), crc: 0x1234_5678, epoch: 4 };
    let mut scribe = Scribe::at(begins);
    drop(store);
    let (mut store, _) = open(&disk, &scribe).unwrap();
    store.start_over(begins).unwrap();
    assert_eq!((store.first(), store.flushed(), store.written()), (begins, begins, begins.at));
    for _ in 0..100 {
        scribe.record(1000);
    }
    store.write_up_to(scribe.end);
    store.flush();
    store.settle().unwrap();
    drop(store);
    disk.power_loss();
    let (store, found) = open(&disk, &scribe).unwrap();
    assert_eq!((found.first, found.end), (begins, scribe.end));
    let mut reader = store.reader(64 << 10).unwrap();
    assert_readable(&mut reader, &scribe, begins, scribe.end);
    let early = read(&mut reader, Request::Entries { lsn: Lsn(776), bytes_max: 1 });
    assert_eq!(early, Err(ReadError::Trimmed { first: begins }));
}

#[test]
fn notes_are_saved_newest_first() {
    let disk = SimDisk::new(9);
    let scribe = Scribe::new();
    let (mut store, _) = open(&disk, &scribe).unwrap();
    let first = store.save(b"one");
    let second = store.save(&[2; NOTE_BYTES_MAX]);
    assert_eq!((first, second, store.saved()), (1, 2, 0));
    store.settle().unwrap();
    assert_eq!(store.saved(), 2);
    drop(store);
    disk.power_loss();
    let (store, _) = open(&disk, &scribe).unwrap();
    assert_eq!(store.identity().note, [2; NOTE_BYTES_MAX]);
}

#[test]
fn a_log_cut_far_back_is_loaded_again() {
    let disk = SimDisk::new(10);
    let mut scribe = Scribe::new();
    let (mut store, _) = open(&disk, &scribe).unwrap();
    while scribe.end.at < 3 * REGION_BYTES as u64 {
        scribe.record(3000);
        store.write_up_to(scribe.end);
        store.settle().unwrap();
    }
    let mark = scribe.before_at(REGION_BYTES as u64 + 12_345);
    store.truncate_to(mark).unwrap();
    scribe.cut(&mark);
    let in_region = store.load().unwrap();
    assert!(mark.at - in_region.at > REGION_BYTES as u64 / 2);
    scribe.assert_bytes(&scribe.region, in_region.at, mark.at);
    scribe.epoch += 1;
    scribe.record(10);
    store.write_up_to(scribe.end);
    store.flush();
    store.settle().unwrap();
    assert_eq!(store.flushed(), scribe.end);
}

/// A replica that is fenced, promoted, started again or told to begin anew has to write down that it was.
#[test]
fn a_full_disk_takes_notes_cuts_and_beginnings() {
    let disk = SimDisk::new(8);
    let mut scribe = Scribe::new();
    let (mut store, _) = open(&disk, &scribe).unwrap();
    while scribe.end.at < 2 * SEGMENT_BYTES + 10_000 {
        scribe.record(1000);
        store.write_up_to(scribe.end);
        store.flush();
        store.settle().unwrap();
    }
    store.save_now(b"before").unwrap();
    let fill = |space_bytes| disk.set_faults(Faults { space_bytes: Some(space_bytes), ..Faults::default() });
    // Not a block is left.
    fill(1);
    store.save_now(b"fenced").unwrap();
    let end = scribe.marks[scribe.marks.len() - 5];
    store.truncate_to(end).unwrap();
    scribe.cut(&end);
    store.save_now(b"promoted").unwrap();
    drop(store);
    disk.end_process();
    fill(1);
    let (mut store, found) = open(&disk, &scribe).unwrap();
    assert_eq!((found.end, &store.identity().note[..]), (end, &b"promoted"[..]));
    store.save_now(b"again").unwrap();
    // What a beginning takes is less than what it gives back.
    fill(4 * SEGMENT_BYTES);
    let begins = scribe.marks[scribe.marks.len() - 9];
    store.start_over(begins).unwrap();
    store.save_now(b"anew").unwrap();
    drop(store);
    disk.power_loss();
    let (store, found) = open(&disk, &scribe).unwrap();
    assert_eq!((found.first, found.end, &store.identity().note[..]), (begins, begins, &b"anew"[..]));
}
