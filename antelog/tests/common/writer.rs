//! A writer in the background: what it appends, and where that lands.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use antelog::{Client, ClientOptions, Error, Position, ShardId};

use super::PATIENCE;

/// Records and where they are.
pub type Landed = Vec<(Vec<u8>, Position)>;

/// Appends numbered records to one shard, one after the other, until it is told to stop or cannot go on.
pub struct Writer {
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    thread: JoinHandle<(Landed, Option<Error>)>,
}

impl Writer {
    /// Begins with record 0.
    pub fn begin(addresses: &[String], shard: u16, record: impl Fn(u64) -> Vec<u8> + Send + 'static) -> Writer {
        let (stop, acknowledged) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let client = Client::connect(ClientOptions::new(addresses.to_vec())).unwrap();
        let thread = std::thread::spawn({
            let (stop, acknowledged) = (stop.clone(), acknowledged.clone());
            move || {
                let mut landed = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let record = record(landed.len() as u64);
                    match client.append(Some(ShardId(shard)), &record[..]) {
                        Ok(position) => landed.push((record, position)),
                        Err(error) => return (landed, Some(error)),
                    }
                    acknowledged.store(landed.len() as u64, Ordering::Relaxed);
                }
                (landed, None)
            }
        });
        Writer { stop, acknowledged, thread }
    }

    /// Waits until so many more records are acknowledged.
    pub fn goes_on(&self, records: u64) {
        let wanted = self.acknowledged.load(Ordering::Relaxed) + records;
        let deadline = Instant::now() + PATIENCE;
        while self.acknowledged.load(Ordering::Relaxed) < wanted {
            assert!(Instant::now() < deadline, "appends do not go on");
            assert!(!self.thread.is_finished(), "the writer ended");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops it; where each record landed that was acknowledged. Every append was.
    pub fn end(self) -> Landed {
        let (landed, error) = self.stop();
        assert!(error.is_none(), "after {} records: {}", landed.len(), error.unwrap());
        landed
    }

    /// As [`end`](Self::end), after everybody died: what was under way then may be lost, and the client says so.
    pub fn end_after_a_loss(self) -> Landed {
        self.stop().0
    }

    fn stop(self) -> (Landed, Option<Error>) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}
