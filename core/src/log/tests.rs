//! Laps, drops, look-ups and verification of a region log.

use antelog_protocol::wire::node::Place;
use antelog_protocol::{ClientId, Lsn, ShardId};

use super::*;

const SHARD: ShardId = ShardId(4);
const REGION_BYTES: usize = 8 * BLOCK_BYTES;

fn writer(retention: Retention) -> LogWriter {
    LogWriter::new(Region::new(REGION_BYTES).unwrap(), SHARD, 1, LogOptions { retention, record_bytes_max: 64 << 10 })
}

/// A record of `length` bytes that tells its number.
fn record(number: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![number as u8; length];
    let head = number.to_le_bytes();
    let n = length.min(8);
    bytes[..n].copy_from_slice(&head[..n]);
    bytes
}

fn append(log: &mut LogWriter, number: u64, length: usize) -> Result<(), LogFull> {
    log.make_room(length)?;
    log.record(ClientId(9), number, &record(number, length));
    Ok(())
}

fn read(reader: &LogReader, cursor: &mut Cursor) -> Result<(u64, Vec<u8>), Overrun> {
    match reader.item(cursor)? {
        Item::Record { header, offset } => {
            let mut bytes = vec![0; header.length as usize];
            reader.region().get(offset, &mut bytes);
            reader.check(cursor.at)?;
            cursor.lsn = cursor.lsn.plus(1);
            Ok((header.seq, bytes))
        }
        Item::NoOps { count } | Item::Lost { count } => {
            cursor.lsn = cursor.lsn.plus(count);
            Ok((u64::MAX, vec![]))
        }
    }
}

#[test]
fn records_of_all_sizes_come_back_in_order_and_by_slot() {
    let mut log = writer(Retention::Refuse);
    let sizes = [0, 1, 63, 64, 65, 4096, 65_536, 10];
    for (number, size) in sizes.iter().enumerate() {
        append(&mut log, number as u64, *size).unwrap();
    }
    log.no_ops(5);
    append(&mut log, 8, 3).unwrap();
    assert_eq!(log.next_lsn(), Lsn(14));
    let reader = log.reader();
    let mut cursor = reader.first().unwrap();
    for (number, size) in sizes.iter().enumerate() {
        assert_eq!(read(&reader, &mut cursor), Ok((number as u64, record(number as u64, *size))));
    }
    assert_eq!(reader.item(&mut cursor), Ok(Item::NoOps { count: 5 }));
    let mut inside = reader.seek(Lsn(10)).unwrap();
    assert_eq!(reader.item(&mut inside), Ok(Item::NoOps { count: 3 }), "from the slot asked for");
    for (lsn, number) in [(0, 0), (6, 6), (7, 7), (13, 8)] {
        let mut cursor = reader.seek(Lsn(lsn)).unwrap();
        assert_eq!(read(&reader, &mut cursor).unwrap().0, number);
    }
}

#[test]
fn a_full_log_refuses_and_keeps_room_for_no_ops() {
    let mut log = writer(Retention::Refuse);
    let mut appended = 0;
    while append(&mut log, appended, 4096).is_ok() {
        appended += 1;
    }
    assert!((90..126).contains(&appended), "512 KiB hold about 100 records of 4 KiB beside the reserve: {appended}");
    assert!(log.has_room_for_no_ops());
    for _ in 0..200 {
        log.no_ops(1000);
    }
    let reader = log.reader();
    let mut cursor = reader.seek(Lsn(appended - 1)).unwrap();
    assert_eq!(read(&reader, &mut cursor).unwrap().0, appended - 1);
}

#[test]
fn a_recycling_log_drops_only_what_is_bound_and_laps_for_ever() {
    let mut log = writer(Retention::Recycle);
    let reader = log.reader();
    let mut verifier = Verifier::new(log.region().clone(), SHARD);
    let mut number = 0;
    while append(&mut log, number, 4096).is_ok() {
        number += 1;
    }
    let mut random = 1u64;
    for _ in 0..2000 {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let length = (random >> 33) as usize % 20_000;
        while verifier.step(log.tail()).unwrap() {}
        log.set_limits(log.next_lsn(), verifier.at(), u64::MAX);
        append(&mut log, number, length).unwrap();
        let mut last = reader.seek(Lsn(number)).unwrap();
        assert_eq!(read(&reader, &mut last), Ok((number, record(number, length))));
        number += 1;
    }
    assert!(log.tail() > 10 * REGION_BYTES as u64, "it went round more than ten times");
    assert_eq!(reader.seek(Lsn(0)), Err(Overrun));
    // Everything kept is found, from the first slot on.
    let mut cursor = reader.first().unwrap();
    let first = cursor.lsn.0;
    for number in first..number {
        assert_eq!(read(&reader, &mut cursor).unwrap().0, number);
        let mut sought = reader.seek(Lsn(number)).unwrap();
        assert_eq!(read(&reader, &mut sought).unwrap().0, number);
    }
}

#[test]
fn nothing_is_dropped_before_it_is_bound_or_verified() {
    let mut log = writer(Retention::Recycle);
    let mut number = 0;
    while append(&mut log, number, 4096).is_ok() {
        number += 1;
    }
    log.set_limits(Lsn(0), u64::MAX, u64::MAX);
    assert_eq!(append(&mut log, number, 4096), Err(LogFull), "not bound");
    log.set_limits(log.next_lsn(), 0, u64::MAX);
    assert_eq!(append(&mut log, number, 4096), Err(LogFull), "not verified by the backup");
    log.set_limits(log.next_lsn(), log.tail(), u64::MAX);
    assert_eq!(append(&mut log, number, 4096), Ok(()));
}

#[test]
fn a_log_that_began_in_the_middle_of_a_block_knows_its_first_place_for_a_whole_lap() {
    let mut verifier = Verifier::new(Region::new(REGION_BYTES).unwrap(), SHARD);
    let begins = Place { at_bytes: BLOCK_BYTES as u64 / 2, lsn: Lsn(7), ..verifier.place() };
    verifier.restart(begins);
    let options = LogOptions { retention: Retention::Recycle, record_bytes_max: 1 << 10 };
    let mut log = LogWriter::take_over(verifier, 2, options);
    log.set_limits(Lsn(0), u64::MAX, u64::MAX);
    for number in 0.. {
        if append(&mut log, number, 960).is_err() {
            break;
        }
    }
    assert!(log.tail() > REGION_BYTES as u64, "its end lies in the block of its beginning, a lap later");
    assert_eq!(log.first_place().map(|place| (place.at_bytes, place.lsn)), Some((begins.at_bytes, begins.lsn)));
    assert!(log.reader().seek(Lsn(8)).is_ok());
}

#[test]
fn what_was_given_back_does_not_follow_what_is_written_again_before_it() {
    let mut log = writer(Retention::Refuse);
    for number in 0..10 {
        append(&mut log, number, 100).unwrap();
    }
    let copy = Region::new(REGION_BYTES).unwrap();
    let span = antelog_protocol::wire::entry::span_bytes(100);
    copy.put_from(0, log.region(), 0, 10 * span);
    let mut verifier = Verifier::new(copy.clone(), SHARD);
    verifier.find_end();
    assert_eq!(verifier.lsn(), Lsn(10));
    let mut places = vec![verifier.first_place().unwrap()];
    while let Some((_, behind)) = verifier.entry(*places.last().unwrap()) {
        places.push(behind);
    }
    verifier.rewind(places[2]);
    // Another primary's log ends after five of them.
    copy.put_from(2 * span, log.region(), 2 * span, 3 * span);
    verifier.find_end();
    assert_eq!(verifier.lsn(), Lsn(5));
}

#[test]
fn whoever_gives_everything_back_goes_on_with_a_log_of_any_epoch() {
    let of_epoch = |epoch| {
        let region = Region::new(REGION_BYTES).unwrap();
        let mut log =
            LogWriter::new(region, SHARD, epoch, LogOptions { retention: Retention::Refuse, record_bytes_max: 100 });
        (0..3).for_each(|number| append(&mut log, number, 100).unwrap());
        log
    };
    let (older, newer) = (of_epoch(1), of_epoch(2));
    let mut verifier = Verifier::new(newer.region().clone(), SHARD);
    verifier.find_end();
    // A shard that lost what it had was begun again in epoch 2; what comes back now are its records of epoch 1.
    verifier.rewind(verifier.first_place().unwrap());
    newer.region().put_from(0, older.region(), 0, older.tail() as usize);
    verifier.find_end();
    assert_eq!(verifier.lsn(), Lsn(3));
}

#[test]
fn a_verifier_stops_at_the_first_break_of_the_chain() {
    let mut log = writer(Retention::Refuse);
    for number in 0..10 {
        append(&mut log, number, 1000).unwrap();
    }
    let verify = |log: &LogWriter| {
        let mut verifier = Verifier::new(log.region().clone(), SHARD);
        loop {
            match verifier.step(log.tail()) {
                Ok(true) => {}
                Ok(false) => return Ok(verifier.lsn()),
                Err(error) => return Err((verifier.lsn(), error)),
            }
        }
    };
    assert_eq!(verify(&log), Ok(Lsn(10)));
    // One payload bit of the fifth entry; entries are 64 + 1024 bytes apart.
    log.region().put(4 * 1088 + 64 + 500, &[0xFF]);
    assert_eq!(verify(&log), Err((Lsn(4), VerifyError::Crc)));
    // An entry copied over another breaks the chain even though it is whole.
    let mut entry = vec![0; 1088];
    log.region().get(2 * 1088, &mut entry);
    log.region().put(3 * 1088, &entry);
    assert_eq!(verify(&log), Err((Lsn(3), VerifyError::Lsn { found: Lsn(2), expected: Lsn(3) })));
    let mut stranger = Verifier::new(log.region().clone(), ShardId(5));
    assert_eq!(stranger.step(log.tail()), Err(VerifyError::Shard(SHARD)));
}

#[test]
fn a_slot_that_is_kept_is_found_whatever_was_dropped_before_it() {
    let mut log = writer(Retention::Recycle);
    let reader = log.reader();
    for number in 0..50 {
        append(&mut log, number, 4096).unwrap();
    }
    // A cursor that waits for a slot to come stands at the tail of now.
    let waiting = reader.seek(Lsn(1000)).unwrap();
    for number in 50..1001 {
        log.set_limits(log.next_lsn(), u64::MAX, u64::MAX);
        append(&mut log, number, 4096).unwrap();
    }
    assert_eq!(reader.check(waiting.at), Err(Overrun), "the place is gone");
    let mut found = reader.seek(Lsn(1000)).unwrap();
    assert_eq!(read(&reader, &mut found).unwrap().0, 1000, "the slot is not");
    assert_eq!(reader.item(&mut waiting.clone()), Err(Overrun), "nothing is read from a place that is gone");
}

#[test]
fn a_log_of_which_nothing_is_left_begins_where_it_was_cut() {
    let mut log = writer(Retention::Recycle);
    (0..10).for_each(|number| append(&mut log, number, 100).unwrap());
    let (mut log, _) = log.give_up(Lsn(10));
    let (early, late) = (log.place_before(Lsn(3)).unwrap(), log.place_before(Lsn(7)).unwrap());
    log.drop_before(early);
    assert_eq!(log.reader().first().map(|first| first.lsn), Ok(Lsn(3)));
    // The head has moved on since it began.
    log.drop_before(late);
    log.rewind(late);
    assert_eq!(log.reader().first(), Ok(Cursor { at: late.at_bytes, lsn: Lsn(7) }));
    let mut log = LogWriter::take_over(log, 2, LogOptions { retention: Retention::Recycle, record_bytes_max: 1 << 10 });
    // As a primary's does when its region is full: it drops without saying where the log begins.
    for number in 7..2000 {
        log.set_limits(log.next_lsn(), u64::MAX, u64::MAX);
        append(&mut log, number, 1000).unwrap();
    }
    let head = log.first_place().unwrap();
    let (mut log, _) = log.give_up(head.lsn);
    assert_eq!((log.head(), log.at()), (head.at_bytes, head.at_bytes), "nothing is left");
    assert_eq!(log.reader().first(), Ok(Cursor { at: head.at_bytes, lsn: head.lsn }));
    log.rewind(head);
    assert_eq!(log.reader().first(), Ok(Cursor { at: head.at_bytes, lsn: head.lsn }));
}

#[test]
fn the_first_numbers_of_sessions_from_a_slot_on_are_found_in_the_log() {
    let mut log = writer(Retention::Recycle);
    for (client, seq) in [(7, 0), (9, 0), (7, 1), (8, 5), (7, 2)] {
        log.record(ClientId(client), seq, b"record");
        log.no_ops(2);
    }
    let numbers = |lsn| log.first_numbers_from(Lsn(lsn)).into_iter().collect::<Vec<_>>();
    assert_eq!(numbers(0), [(ClientId(7), 0), (ClientId(8), 5), (ClientId(9), 0)]);
    // Slot 4 is one of the no-ops behind session 9's record.
    assert_eq!(numbers(4), [(ClientId(7), 1), (ClientId(8), 5)]);
    assert_eq!(numbers(15), []);
}
