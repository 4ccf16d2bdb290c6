//! Reuses the memory of records, so that a steady stream allocates nothing.
//!
//! Allocators give memory back and fetch it again in the middle of work. On a small virtual machine such calls were seen to
//! take hundreds of microseconds (under a tracer) while other threads ran. A record whose last user is gone is overwritten
//! by the next one of the same length instead.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Record;

/// Records handed out lately, oldest first, and those whose users are gone. The one freed last is used next: its bytes are
/// the likeliest to be in the processor's cache still. See the module's text.
#[derive(Debug)]
pub(super) struct RecordPool {
    used: VecDeque<Record>,
    free: Vec<Record>,
    records_max: usize,
    bytes: usize,
    bytes_max: usize,
}

impl RecordPool {
    /// A pool that remembers at most so many records and bytes.
    pub(super) fn new(records_max: usize, bytes_max: usize) -> RecordPool {
        let (used, free) = (VecDeque::with_capacity(records_max), Vec::with_capacity(records_max));
        RecordPool { used, free, records_max, bytes: 0, bytes_max }
    }

    /// A record with these bytes, in memory of an earlier one if its users are gone.
    pub(super) fn copy(&mut self, bytes: &[u8]) -> Record {
        // Two of them: more are found to be free than are taken, so all are found in time.
        for _ in 0..2 {
            match self.used.pop_front() {
                Some(oldest) if Arc::strong_count(&oldest) == 1 => self.free.push(oldest),
                // Still in use: looked at again when the others have been looked at.
                Some(oldest) => {
                    self.used.push_back(oldest);
                    break;
                }
                None => break,
            }
        }
        if let Some(mut record) = self.free.pop() {
            match Arc::get_mut(&mut record) {
                Some(memory) if memory.len() == bytes.len() => {
                    memory.copy_from_slice(bytes);
                    self.used.push_back(record.clone());
                    return record;
                }
                // Of another length: let it go.
                _ => self.bytes -= record.len(),
            }
        }
        let record = Record::from(bytes);
        if self.used.len() + self.free.len() < self.records_max && self.bytes + record.len() <= self.bytes_max {
            self.bytes += record.len();
            self.used.push_back(record.clone());
        }
        record
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_reused_when_its_users_are_gone_and_only_then() {
        let mut pool = RecordPool::new(4, 1000);
        let first = pool.copy(b"abc");
        let second = pool.copy(b"def");
        assert_eq!((&first[..], &second[..]), (&b"abc"[..], &b"def"[..]), "a record in use keeps its bytes");
        let at = first.as_ptr();
        drop((first, second));
        let reused: Vec<Record> = (0..4).map(|_| pool.copy(b"xyz")).collect();
        assert!(reused.iter().any(|r| r.as_ptr() == at));
        assert!(reused.iter().all(|r| r[..] == b"xyz"[..]));
        assert_eq!(&pool.copy(b"longer")[..], b"longer");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut pool = RecordPool::new(2, 10);
        let kept: Vec<Record> = (0..5).map(|n| pool.copy(&[n; 4])).collect();
        assert_eq!((pool.used.len() + pool.free.len(), pool.bytes), (2, 8));
        assert!(kept.iter().enumerate().all(|(n, r)| r[..] == [n as u8; 4]));
    }
}
