//! The same on real files: a temporary directory, a small file system that fills up, two processes, a reader's thread.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use antelog_protocol::Lsn;
use antelog_protocol::wire::entry::{EntryHeader, EntryKind, HEADER_BYTES};

use super::rig::*;
use crate::node::Parker;
use crate::node::mailbox::mailbox;
use crate::sim::rng::Rng;
use crate::storage::*;

/// A directory of its own that is removed afterwards.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("antelog-storage-{}-{number}-{name}", std::process::id());
        Directory(std::env::temp_dir().join(name))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn open(path: &Path, direct: bool, scribe: &Scribe) -> (LogStore<UringDisk>, Recovered) {
    let disk = UringDisk::open(path, direct).unwrap();
    LogStore::open(disk, &config(), scribe.region.clone()).unwrap()
}

/// Appends some entries, as far as there is room in the region.
fn append(scribe: &mut Scribe, store: &mut LogStore<UringDisk>, rng: &mut Rng) {
    for _ in 0..4 {
        let room = REGION_BYTES as u64 - (scribe.end.at - store.released());
        scribe.anything(rng, room);
    }
    store.write_up_to(scribe.end);
}

fn write_and_recover(path: &Path, direct: bool) {
    let mut scribe = Scribe::new();
    let mut rng = Rng::new(1, 1);
    for round in 0..4 {
        let (mut store, found) = open(path, direct, &scribe);
        assert_eq!(store.disk().notice().is_none(), direct, "{:?}", store.disk().notice());
        assert_eq!((found.end, found.clean), (scribe.end, round % 2 == 0));
        scribe.assert_bytes(&scribe.region, found.in_region.at, found.end.at);
        assert_readable(&mut store.reader(128 << 10).unwrap(), &scribe, found.first, found.end);
        while scribe.end.at < (round + 1) * 3 * REGION_BYTES as u64 {
            append(&mut scribe, &mut store, &mut rng);
            if rng.percent(20) {
                store.flush();
            }
            store.poll(0).unwrap();
            if REGION_BYTES as u64 - (scribe.end.at - store.released()) < 70_000 {
                store.settle().unwrap();
            }
        }
        store.settle().unwrap();
        let mark = scribe.before_at(scribe.end.at - rng.below(100_000));
        store.truncate_to(mark).unwrap();
        scribe.cut(&mark);
        scribe.epoch += 1;
        append(&mut scribe, &mut store, &mut rng);
        store.save(&round.to_le_bytes());
        if round % 2 == 0 {
            // A process that just ends: the kernel has what was written.
            store.settle().unwrap();
        } else {
            store.finish().unwrap();
        }
    }
}

#[test]
fn a_log_in_real_files_is_written_cut_and_recovered() {
    let directory = Directory::new("direct");
    let takes_direct = UringDisk::open(&directory.0, true).unwrap().notice().is_none();
    if takes_direct {
        write_and_recover(&directory.0, true);
    } else {
        eprintln!("skipped: {} takes no O_DIRECT", directory.0.display());
    }
}

#[test]
fn a_log_is_written_through_the_page_cache_where_it_must_be() {
    let directory = Directory::new("cached");
    write_and_recover(&directory.0, false);
    let notice = UringDisk::open(&directory.0, false).unwrap().notice().unwrap();
    assert!(notice.contains("page cache") && notice.contains("O_DIRECT"), "{notice}");
}

#[test]
fn a_directory_that_is_none_or_foreign_is_refused() {
    let directory = Directory::new("foreign");
    std::fs::create_dir_all(&directory.0).unwrap();
    let file = directory.0.join("file");
    std::fs::write(&file, "x").unwrap();
    let error = UringDisk::open(&file, true).map(drop).unwrap_err();
    assert!(error.contains("is a file"), "{error}");
    let scribe = Scribe::new();
    let disk = UringDisk::open(&directory.0, true).unwrap();
    let error = LogStore::open(disk, &config(), scribe.region.clone()).map(drop).unwrap_err().to_string();
    assert!(error.contains("is not this replica's data directory: it holds \"file\""), "{error}");
}

/// Run by the test below as another process.
#[test]
fn the_other_process() {
    if let Some(path) = std::env::var_os("ANTELOG_STORAGE_TEST") {
        println!("other: {}", UringDisk::open(Path::new(&path), true).map(drop).unwrap_err());
    }
}

#[test]
fn a_second_process_is_refused() {
    let directory = Directory::new("two");
    let disk = UringDisk::open(&directory.0, true).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "storage::tests::real::the_other_process", "--nocapture"]);
    let output = command.env("ANTELOG_STORAGE_TEST", &directory.0).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let expected = format!("{} is in use by process {}: stop it first", directory.0.display(), std::process::id());
    assert!(said.contains(&expected), "{said}");
    drop(disk);
    assert!(UringDisk::open(&directory.0, true).is_ok());
}

/// A small file system, while it lives.
struct Mount(Directory);

impl Mount {
    fn new(bytes: u64) -> Option<Mount> {
        let directory = Directory::new("full");
        std::fs::create_dir_all(&directory.0).ok()?;
        let size = format!("size={bytes}");
        let output = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&directory.0).output();
        output.is_ok_and(|output| output.status.success()).then_some(Mount(directory))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0.0).status();
    }
}

#[test]
fn a_full_file_system_refuses_and_goes_on_when_there_is_room() {
    // Four segments and the small files; the fifth does not fit.
    let Some(mount) = Mount::new(4 * (SEGMENT_BYTES + 4096) + 40_960) else {
        eprintln!("skipped: mounting a small file system takes root");
        return;
    };
    let path = mount.0.0.clone();
    let mut scribe = Scribe::new();
    let (mut store, _) = open(&path, true, &scribe);
    let mut now_ns = 0;
    while scribe.end.at < 3 * SEGMENT_BYTES + 10_000 {
        scribe.record(100);
        store.write_up_to(scribe.end);
        store.flush();
        store.poll(now_ns).unwrap();
    }
    // The last segment that fits is begun, and the one ahead of it finds the disk full.
    while store.condition() == Condition::Good {
        store.poll(now_ns).unwrap();
    }
    assert_eq!(store.room_end(), 4 * SEGMENT_BYTES);
    // What has its place is still written and made durable.
    while store.flushed() != scribe.end {
        store.poll(now_ns).unwrap();
    }
    let first = store.trim(2 * SEGMENT_BYTES);
    assert!(first.at > 0);
    while scribe.end.at < 4 * SEGMENT_BYTES + 10_000 {
        scribe.record(100);
        store.write_up_to(scribe.end);
    }
    store.flush();
    while store.flushed() != scribe.end {
        now_ns += 1_000_000;
        store.poll(now_ns).unwrap();
    }
    // One segment ahead still does not fit, which is said in time.
    assert_eq!((store.condition(), store.room_end()), (Condition::Full, 5 * SEGMENT_BYTES));
    drop(store);
    let (store, found) = open(&path, true, &scribe);
    assert_eq!((found.first, found.end), (first, scribe.end));
    drop(store);
}

/// A reader's thread answers while the log grows and loses its beginning.
#[test]
fn entries_are_read_while_the_log_is_written_and_trimmed() {
    let directory = Directory::new("reader");
    let mut scribe = Scribe::new();
    let (mut store, _) = open(&directory.0, true, &scribe);
    let (mut parker, waker) = Parker::new().unwrap();
    let reader = store.reader(128 << 10).unwrap();
    let (thread, mut client) = ReaderThread::spawn("reader", reader, 256 << 10, waker, None).unwrap();
    let (end, done) = (AtomicU64::new(0), AtomicBool::new(false));
    let counts = std::thread::scope(|scope| {
        let (end, done) = (&end, &done);
        let asking = scope.spawn(move || {
            let mut rng = Rng::new(3, 3);
            let (mut good, mut trimmed, mut beyond) = (0, 0, 0);
            while !done.load(Ordering::Acquire) || good < 100 {
                let lsn = Lsn(rng.below(end.load(Ordering::Acquire) + 2));
                client.request(lsn.0, Request::Entries { lsn, bytes_max: 10_000 }).unwrap();
                while client.is_empty() {
                    parker.park(&[], None, || !client.is_empty());
                }
                let answered = client.poll(|token, answer| {
                    assert_eq!(token, lsn.0);
                    match answer {
                        Ok((begins, bytes)) => {
                            assert_entries(begins, bytes, lsn);
                            good += 1;
                        }
                        Err(ReadError::Trimmed { .. }) => trimmed += 1,
                        Err(ReadError::Beyond { .. }) => beyond += 1,
                        Err(error) => panic!("{error}"),
                    }
                });
                assert!(answered.is_some());
            }
            (good, trimmed, beyond)
        });
        let mut rng = Rng::new(4, 4);
        while scribe.end.at < 20 * REGION_BYTES as u64 {
            append(&mut scribe, &mut store, &mut rng);
            store.flush();
            store.settle().unwrap();
            store.trim(scribe.end.at.saturating_sub(6 * SEGMENT_BYTES));
            end.store(scribe.end.lsn.0, Ordering::Release);
        }
        done.store(true, Ordering::Release);
        asking.join().unwrap()
    });
    drop(thread);
    assert!(counts.0 >= 100, "good, trimmed and beyond: {counts:?}");
}

/// Asserts that these are entries as the scribe makes them, the first of which holds a slot.
fn assert_entries(begins: Mark, bytes: &[u8], lsn: Lsn) {
    let mut at = 0;
    let mut next = begins.lsn;
    while at < bytes.len() {
        let header = EntryHeader::decode(bytes[at..at + HEADER_BYTES].try_into().unwrap()).unwrap();
        assert_eq!(header.lsn, next);
        next = next.plus(header.count.into());
        assert!(at > 0 || (begins.lsn <= lsn && lsn < next));
        let payload = &bytes[at + HEADER_BYTES..];
        if header.kind == EntryKind::Record {
            let expected = |n: usize| (n as u64 * 31 + header.seq * 7) as u8;
            assert!(payload[..header.length as usize].iter().enumerate().all(|(n, byte)| *byte == expected(n)));
        }
        at += if header.kind == EntryKind::Pad { HEADER_BYTES + header.length as usize } else { header.span_bytes() };
    }
}

/// Bytes of a segment's file, as they are on disk.
fn bytes_of(directory: &Path, segment: u64) -> Vec<u8> {
    std::fs::read(directory.join(Name::Segment(segment).to_string())).unwrap()
}

/// Turns bits around in a segment's file.
fn rot(directory: &Path, segment: u64, at: u64) {
    let file = std::fs::File::options().read(true).write(true).open(directory.join(Name::Segment(segment).to_string()));
    let (file, at) = (file.unwrap(), crate::storage::HEADER_BYTES + at - segment);
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
    file.sync_all().unwrap();
}

/// A reader's thread has what is rotten replaced before it answers, and says so if nobody has it.
#[test]
fn a_readers_thread_asks_for_what_the_disk_has_lost_and_writes_it_in_place() {
    let directory = Directory::new("rot");
    let mut scribe = Scribe::new();
    let (mut store, _) = open(&directory.0, true, &scribe);
    let mut rng = Rng::new(9, 9);
    while scribe.end.at < 3 * REGION_BYTES as u64 {
        append(&mut scribe, &mut store, &mut rng);
        store.flush();
        store.settle().unwrap();
    }
    let (mut parker, waker) = Parker::new().unwrap();
    let (sender, mut mailbox) = mailbox(waker.clone());
    let reader = store.reader(256 << 10).unwrap();
    let (_thread, mut client) = ReaderThread::spawn("reader", reader, 512 << 10, waker, Some(sender)).unwrap();
    let segment = 3 * SEGMENT_BYTES;
    let whole = bytes_of(&directory.0, segment);
    let records = || scribe.marks.windows(2).filter(|p| p[1].lsn.0 == p[0].lsn.0 + 1 && p[1].at - p[0].at > 128);
    let hit: Vec<Mark> = records().map(|pair| pair[0]).filter(|m| m.at > segment).take(3).collect();
    let ranged = Request::Range { from: hit[0].at, to: hit[2].at + 100_000, mended: true };
    let unmended = Request::Range { from: hit[0].at, to: hit[2].at + 100_000, mended: false };
    let entries = Request::Entries { lsn: hit[2].lsn, bytes_max: 1 };
    // What a request met, who helps, and whether it is answered.
    for (request, helps, good) in [
        (entries, true, true),
        (ranged, true, true),
        (unmended, true, false),
        (entries, false, false),
        (ranged, false, false),
    ] {
        // A header, and what a record holds.
        rot(&directory.0, segment, hit[0].at + 20);
        rot(&directory.0, segment, hit[2].at + 64 + 5);
        client.request(1, request).unwrap();
        let (mut found, mut repaired) = (0, 0);
        let answer = loop {
            parker.park(&[], None, || mailbox.waits() || !client.is_empty());
            match mailbox.take() {
                Some(Rot::Found { before, until, answer }) => {
                    found += 1;
                    assert!(hit.contains(&before) && until > before.at, "{before:?}");
                    let end = scribe.before_at(before.at + 10_000).at;
                    answer.send(helps.then(|| (4, scribe.slice(before.at, end.max(hit[1].at)).to_vec())));
                }
                Some(Rot::Repaired { before, bytes, giver: 4 }) => {
                    repaired += 1;
                    assert!(hit.contains(&before) && bytes > 0);
                }
                Some(told) => panic!("{told:?}"),
                None => {}
            }
            if let Some(answer) = client.poll(|_, answer| answer.map(|(begins, bytes)| (begins, bytes.to_vec()))) {
                break answer;
            }
        };
        if good {
            let (begins, bytes) = answer.unwrap();
            assert!(bytes == scribe.slice(begins.at, begins.at + bytes.len() as u64) && !bytes.is_empty());
            assert!(found > 0 && found == repaired);
        } else {
            assert!(matches!(answer, Err(ReadError::Damaged { .. })), "{answer:?}");
            assert_eq!((found > 0, repaired), (request != unmended, 0));
            // The second time puts it right.
            rot(&directory.0, segment, hit[0].at + 20);
            rot(&directory.0, segment, hit[2].at + 64 + 5);
        }
        if request != ranged {
            assert!(bytes_of(&directory.0, segment) == whole, "the file is as it was written");
        }
    }
}
