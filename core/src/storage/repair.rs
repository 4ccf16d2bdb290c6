//! Puts right what a disk has changed: entries that a peer still has, written in place.

use super::disk::{BLOCK_BYTES, Disk, Name, Op};
use super::error::{StoreError, run};
use super::mark::{Mark, Step};
use super::reader::{ReadError, Reader};
use super::store::LogStore;
use crate::mem::Region;

const BLOCK: u64 = BLOCK_BYTES as u64;

impl<D: Disk> Reader<D> {
    /// Replaces whole entries from `before` on, as [`ReadError::Damaged`] named it, by `bytes`, which are verified first,
    /// and makes that durable. Waits for the disk; requests that are under way are done again.
    ///
    /// # Errors
    /// [`ReadError::Damaged`] when the bytes do not continue the chain; [`ReadError::Beyond`] when they reach into the last
    /// block of the log, which is being written, or the log was cut since the answer; otherwise why the file cannot be
    /// written.
    pub fn repair(&mut self, before: Mark, bytes: &[u8]) -> Result<(), ReadError> {
        self.interrupt();
        let catalog = self.catalog.clone();
        let _changing = catalog.change();
        let (first, written) = (catalog.first().unwrap_or_default(), catalog.written());
        let end = before.at + bytes.len() as u64;
        if before.at < first.at {
            return Err(ReadError::Trimmed { first });
        }
        if end > self.repairable() || catalog.cuts() != self.cuts {
            return Err(ReadError::Beyond { written });
        }
        self.verify(before, bytes)?;
        let mut at = before.at;
        while at < end {
            let start = at - at % self.segment_bytes;
            let to = end.min(start + self.segment_bytes);
            let part = &bytes[(at - before.at) as usize..(to - before.at) as usize];
            self.overwrite(start, at, part).map_err(|error| match error {
                StoreError::Io { errno: libc::ENOENT, .. } => ReadError::Trimmed { first },
                StoreError::Io { errno, .. } => ReadError::Failed { errno },
                _ => ReadError::Failed { errno: libc::ENOSPC },
            })?;
            at = to;
        }
        Ok(())
    }

    /// Up to here the files are not written any more, and can be repaired.
    pub(super) fn repairable(&self) -> u64 {
        let written = self.catalog.written();
        written - written % BLOCK
    }

    /// Follows the chain from `before` over `bytes`, which end between two entries.
    fn verify(&self, before: Mark, bytes: &[u8]) -> Result<(), ReadError> {
        let copy = memory(bytes.len().max(1))?;
        copy.put(0, bytes);
        let mut mark = before;
        let end = before.at + bytes.len() as u64;
        while mark.at < end {
            let place = (mark.at - before.at) as usize;
            match self.chain.step(&mark, &copy, place, bytes.len() - place) {
                Ok(Step::Entry(_, next)) => mark = next,
                _ => break,
            }
        }
        if mark.at == end {
            return Ok(());
        }
        Err(ReadError::Damaged { segment: mark.at - mark.at % self.segment_bytes, before: mark, until: end })
    }

    /// Writes bytes into a segment, durably; what shares their blocks stays as it is.
    fn overwrite(&mut self, start: u64, at: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let name = Name::Segment(start);
        let from = at - at % BLOCK;
        let len = ((at + bytes.len() as u64).next_multiple_of(BLOCK) - from) as usize;
        let blocks = memory(len).map_err(|_| StoreError::io(&self.disk, "allocate a buffer", libc::ENOMEM))?;
        let (file, file_at) = (0, LogStore::<D>::file_at(start, from));
        run(&mut self.disk, Op::Open { file, name, create: false }, name)?;
        let mut replace = || {
            let mut done = 0;
            while done < len {
                let (at, offset) = (file_at + done as u64, done);
                let read = Op::Read { file, at, target: &blocks, offset, len: len - done };
                done += whole_blocks(run(&mut self.disk, read, name)?).ok_or(libc::EIO).map_err(|errno| {
                    StoreError::Io { place: self.disk.place(), what: format!("read {name}"), errno }
                })?;
            }
            blocks.put((at - from) as usize, bytes);
            let mut done = 0;
            while done < len {
                let (at, offset) = (file_at + done as u64, done);
                let write = Op::Write { file, at, source: &blocks, offset, len: len - done };
                done += run(&mut self.disk, write, name)? / BLOCK_BYTES * BLOCK_BYTES;
            }
            run(&mut self.disk, Op::Sync { file }, name).map(drop)
        };
        let result = replace();
        self.disk.close(file);
        result
    }
}

/// Bytes read, in whole blocks; none if there are none, because the file ends.
fn whole_blocks(read: usize) -> Option<usize> {
    Some(read / BLOCK_BYTES * BLOCK_BYTES).filter(|bytes| *bytes > 0)
}

fn memory(bytes: usize) -> Result<std::sync::Arc<Region>, ReadError> {
    let bytes = bytes.next_multiple_of(BLOCK_BYTES);
    Region::new(bytes).map_err(|error| ReadError::Failed { errno: error.raw_os_error().unwrap_or(libc::ENOMEM) })
}
