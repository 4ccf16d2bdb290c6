//! What a disk gives a log: throughput behind the region, and the time of a write with its fdatasync.
//!
//! `cargo run --release -p antelog-core --example disk -- DIRECTORY [SECONDS]`

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use antelog_core::mem::Region;
use antelog_core::storage::{Damage, LogStore, Mark, Owner, StoreConfig, UringDisk, Verify};
use antelog_protocol::wire::entry::{CRC_OFFSET, EntryHeader, EntryKind, HEADER_BYTES, span_bytes};
use antelog_protocol::{ClientId, ShardId};

const REGION_BYTES: usize = 64 << 20;
const SEGMENT_BYTES: u64 = 128 << 20;
/// Segments kept, so that a short measurement does not fill the disk.
const KEPT_BYTES: u64 = 4 * SEGMENT_BYTES;

struct Log {
    region: Arc<Region>,
    end: Mark,
    payload: Vec<u8>,
}

impl Log {
    /// One record; its span divides the region, so that no pads are needed.
    fn append(&mut self) {
        let header = EntryHeader {
            kind: EntryKind::Record,
            shard: ShardId(0),
            length: self.payload.len() as u32,
            lsn: self.end.lsn,
            count: 1,
            epoch: 1,
            client: ClientId(1),
            seq: self.end.lsn.0,
            crc: 0,
        };
        let place = (self.end.at % REGION_BYTES as u64) as usize;
        self.region.put(place, &header.encode());
        self.region.put(place + HEADER_BYTES, &self.payload);
        let crc = self.region.crc32c(place, CRC_OFFSET, self.end.crc);
        let crc = self.region.crc32c(place + HEADER_BYTES, self.payload.len(), crc);
        self.region.put(place + CRC_OFFSET, &crc.to_le_bytes());
        let at = self.end.at + span_bytes(self.payload.len()) as u64;
        self.end = Mark { at, lsn: self.end.lsn.plus(1), crc, epoch: 1 };
    }
}

fn open(path: &Path, payload_bytes: usize) -> Result<(LogStore<UringDisk>, Log), String> {
    let disk = UringDisk::open(path, true)?;
    if let Some(notice) = disk.notice() {
        println!("{notice}");
    }
    let region = Region::new(REGION_BYTES).map_err(|error| error.to_string())?;
    region.prefault();
    let config = StoreConfig {
        owner: Owner { cluster: "disk".into(), shard: ShardId(0), replica: 0 },
        incarnation: 1,
        segment_bytes: SEGMENT_BYTES,
        verify: Verify::Newest,
        damage: Damage::Refuse,
        unix_ms: 0,
    };
    let (mut store, _) = LogStore::open(disk, &config, region.clone()).map_err(|error| error.to_string())?;
    // Another size of records than the last time: begin where it fits.
    store.start_over(Mark::default()).map_err(|error| error.to_string())?;
    Ok((store, Log { region, end: Mark::default(), payload: vec![7; payload_bytes] }))
}

/// Appends as fast as the disk takes it, without syncs but those of finished segments.
fn throughput(path: &Path, time: Duration) -> Result<(), String> {
    let (mut store, mut log) = open(path, 16 * 1024 - HEADER_BYTES)?;
    let begun = Instant::now();
    while begun.elapsed() < time {
        for _ in 0..64 {
            if log.end.at + (32 << 10) <= store.released() + REGION_BYTES as u64 {
                log.append();
            }
        }
        store.write_up_to(log.end);
        store.poll(begun.elapsed().as_nanos() as u64).map_err(|error| error.to_string())?;
        store.trim(log.end.at.saturating_sub(KEPT_BYTES));
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!("write-behind: {:.0} MB/s", store.written() as f64 / 1e6 / seconds);
    Ok(())
}

/// One record after another, each durable before the next.
fn commits(path: &Path, time: Duration) -> Result<(), String> {
    let (mut store, mut log) = open(path, 512 - HEADER_BYTES)?;
    let mut took: Vec<Duration> = Vec::new();
    let begun = Instant::now();
    while begun.elapsed() < time {
        let start = Instant::now();
        log.append();
        store.write_up_to(log.end);
        store.flush();
        while store.flushed().at < log.end.at {
            store.poll(begun.elapsed().as_nanos() as u64).map_err(|error| error.to_string())?;
        }
        took.push(start.elapsed());
    }
    took.sort_unstable();
    let at = |percent: usize| took[(took.len() - 1) * percent / 100].as_micros();
    println!("write + fdatasync of 512 bytes: p50 {} µs, p99 {} µs, {} in all", at(50), at(99), took.len());
    Ok(())
}

fn main() -> Result<(), String> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().ok_or("usage: disk DIRECTORY [SECONDS]")?;
    let seconds = arguments.next().map_or(Ok(3.0), |text| text.parse::<f64>());
    let time = Duration::from_secs_f64(seconds.map_err(|_| "SECONDS is a number")?);
    let path = Path::new(&directory).join("antelog-disk-example");
    let result = throughput(&path, time).and_then(|()| commits(&path, time));
    // Only what was made here goes.
    let _ = std::fs::remove_dir_all(&path);
    result
}
