//! The order log in memory: committed entries by index, the newest few megabytes of them.
//!
//! A group of one commits as it appends. Gates keep the tail of the order stream in the same structure, to relay it.
//! Fixed memory: entries that fall out can no longer be sent, and a follower that far behind gets a snapshot (from a
//! gate) or is refused (by the sequencer).

use std::collections::VecDeque;

use antelog_protocol::wire::order::ORDER_ENTRY_BYTES_MAX;

/// See the module's text.
#[derive(Debug)]
pub struct OrderLog {
    bytes: Box<[u8]>,
    /// Offset and length in `bytes` of the entries kept, oldest first.
    entries: VecDeque<(usize, usize)>,
    entries_max: usize,
    /// Where the next entry goes.
    at: usize,
    /// Index of the newest entry.
    last: u64,
}

impl OrderLog {
    /// An empty log that keeps at most `entries_max` entries and `bytes_max` bytes of them. The first entry appended
    /// gets index `after + 1`.
    pub fn new(after: u64, entries_max: usize, bytes_max: usize) -> OrderLog {
        assert!(entries_max > 0 && bytes_max >= 2 * ORDER_ENTRY_BYTES_MAX, "an order log holds at least an entry");
        OrderLog {
            bytes: vec![0; bytes_max].into_boxed_slice(),
            entries: VecDeque::with_capacity(entries_max),
            entries_max,
            at: 0,
            last: after,
        }
    }

    /// Index of the newest entry.
    pub fn last_index(&self) -> u64 {
        self.last
    }

    /// Index of the oldest entry kept, or the next index when there is none.
    pub fn first_index(&self) -> u64 {
        self.last + 1 - self.entries.len() as u64
    }

    /// Appends an entry; returns its index.
    pub fn append(&mut self, entry: &[u8]) -> u64 {
        assert!(entry.len() <= ORDER_ENTRY_BYTES_MAX, "an order entry of {} bytes", entry.len());
        if self.at + entry.len() > self.bytes.len() {
            self.drop_between(self.at, self.bytes.len());
            self.at = 0;
        }
        self.drop_between(self.at, self.at + entry.len());
        if self.entries.len() == self.entries_max {
            self.entries.pop_front();
        }
        self.bytes[self.at..self.at + entry.len()].copy_from_slice(entry);
        self.entries.push_back((self.at, entry.len()));
        self.at += entry.len();
        self.last += 1;
        self.last
    }

    /// Drops the oldest entries that lie in `from..to`, which is about to be overwritten.
    fn drop_between(&mut self, from: usize, to: usize) {
        while self.entries.front().is_some_and(|(at, len)| *at < to && from < at + len) {
            self.entries.pop_front();
        }
    }

    /// The entry with this index, if it is kept.
    pub fn get(&self, index: u64) -> Option<&[u8]> {
        let nth = usize::try_from(index.checked_sub(self.first_index())?).ok()?;
        let (at, len) = *self.entries.get(nth)?;
        Some(&self.bytes[at..at + len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_kept_until_they_are_overwritten() {
        let mut log = OrderLog::new(0, 1000, 2 * ORDER_ENTRY_BYTES_MAX);
        for number in 1..=500u64 {
            let entry = vec![number as u8; 20 + number as usize % 50];
            assert_eq!(log.append(&entry), number);
            assert_eq!(log.get(number), Some(&entry[..]));
        }
        assert!(log.first_index() > 1, "the oldest fell out");
        for number in log.first_index()..=500 {
            assert_eq!(log.get(number).unwrap(), vec![number as u8; 20 + number as usize % 50]);
        }
        assert_eq!(log.get(log.first_index() - 1), None);
        assert_eq!(log.get(501), None);
    }

    #[test]
    fn the_number_of_entries_is_bounded() {
        let mut log = OrderLog::new(41, 3, 1 << 20);
        for entry in [[1u8], [2], [3], [4]] {
            log.append(&entry);
        }
        assert_eq!((log.first_index(), log.last_index()), (43, 45));
        assert_eq!(log.get(43), Some(&[2u8][..]));
    }
}
