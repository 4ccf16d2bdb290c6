//! Finds an entry by lsn: for every block of the region, the offset and lsn of the first entry that begins in it.
//!
//! One pair of words per 64 KiB costs nothing to keep and needs no allocation; a look-up is a binary search over the
//! blocks in use and a walk of the headers in one block.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a block.
pub const BLOCK_BYTES: usize = 64 << 10;

/// The index of one log. Written by the log's writer; read by any thread for blocks between head and tail.
#[derive(Debug)]
pub(super) struct BlockIndex {
    /// Absolute offset of the first entry that begins in the block.
    offsets: Box<[AtomicU64]>,
    lsns: Box<[AtomicU64]>,
    /// CRC of the entry before it, with which its own is seeded.
    crcs: Box<[AtomicU64]>,
}

impl BlockIndex {
    pub(super) fn new(region_bytes: usize) -> BlockIndex {
        // A log that begins in the middle of a block reaches into one more than its region has.
        let blocks = region_bytes / BLOCK_BYTES + 1;
        let filled = |value| (0..blocks).map(|_| AtomicU64::new(value)).collect();
        BlockIndex { offsets: filled(u64::MAX), lsns: filled(0), crcs: filled(0) }
    }

    /// Forgets everything.
    pub(super) fn clear(&self) {
        self.offsets.iter().for_each(|offset| offset.store(u64::MAX, Ordering::Release));
    }

    /// Forgets blocks whose first entry begins at or after `at`.
    pub(super) fn forget_from(&self, at: u64) {
        for offset in self.offsets.iter().filter(|o| o.load(Ordering::Relaxed) >= at) {
            offset.store(u64::MAX, Ordering::Release);
        }
    }

    /// Makes an entry the first of its block: those before it are dropped.
    pub(super) fn begin_at(&self, at: u64, lsn: u64, crc_before: u32) {
        self.offsets[self.slot(at / BLOCK_BYTES as u64)].store(u64::MAX, Ordering::Release);
        self.note(at, lsn, crc_before);
    }

    /// CRC of the entry before a block's first one, which begins at `at`.
    pub(super) fn crc_before(&self, at: u64) -> Option<u32> {
        let block = at / BLOCK_BYTES as u64;
        let noted = self.first(block).is_some_and(|(offset, _)| offset == at);
        noted.then(|| self.crcs[self.slot(block)].load(Ordering::Acquire) as u32)
    }

    fn slot(&self, block: u64) -> usize {
        (block % self.offsets.len() as u64) as usize
    }

    /// The first entry of an absolute block, if one begins there.
    fn first(&self, block: u64) -> Option<(u64, u64)> {
        let slot = self.slot(block);
        let offset = self.offsets[slot].load(Ordering::Acquire);
        (offset / BLOCK_BYTES as u64 == block).then(|| (offset, self.lsns[slot].load(Ordering::Acquire)))
    }

    /// Notes an entry; only the first of its block counts. Call before the tail is published.
    #[inline]
    pub(super) fn note(&self, at: u64, lsn: u64, crc_before: u32) {
        let block = at / BLOCK_BYTES as u64;
        let slot = self.slot(block);
        let known = self.offsets[slot].load(Ordering::Relaxed);
        if known != u64::MAX && known / BLOCK_BYTES as u64 == block {
            return;
        }
        self.lsns[slot].store(lsn, Ordering::Release);
        self.crcs[slot].store(crc_before.into(), Ordering::Release);
        self.offsets[slot].store(at, Ordering::Release);
    }

    /// The first entry that begins at or after `at`, looking no further than `tail`: its offset and lsn.
    pub(super) fn next_block_entry(&self, at: u64, tail: u64) -> Option<(u64, u64)> {
        let mut block = at.div_ceil(BLOCK_BYTES as u64);
        while block * (BLOCK_BYTES as u64) < tail {
            if let Some(entry) = self.first(block) {
                return Some(entry);
            }
            block += 1;
        }
        None
    }

    /// A noted entry with an lsn at or below `lsn`, as close to it as the index knows, between `head` and `tail`.
    pub(super) fn at_or_before(&self, lsn: u64, head: u64, tail: u64) -> Option<(u64, u64)> {
        let mut low = head / BLOCK_BYTES as u64;
        let mut high = tail / BLOCK_BYTES as u64;
        let mut best = None;
        while low <= high {
            let middle = low + (high - low) / 2;
            // Large records leave blocks in which no entry begins: go down to the next that has one.
            let mut block = middle;
            let found = loop {
                match self.first(block) {
                    Some(entry) if entry.0 >= head => break Some(entry),
                    _ if block == low => break None,
                    _ => block -= 1,
                }
            };
            match found {
                Some(entry) if entry.1 <= lsn => {
                    best = Some(entry);
                    low = middle + 1;
                }
                Some(_) => {
                    if block == 0 {
                        break;
                    }
                    high = block - 1;
                }
                None => low = middle + 1,
            }
        }
        best
    }
}
