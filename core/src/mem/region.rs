//! A region: page-aligned memory with a fixed address, written by this process and by peers' one-sided writes.
//!
//! Bytes in a region may change under a reader when a peer writes them, so the safe interface copies in and out
//! and never hands out references. Who may read what, and when, is published by the protocols above (an lsn, a
//! ring's tail): the release/acquire pair of that publication orders the copies.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::sys;

/// Alignment and size of a huge page on x86-64 and aarch64, in bytes.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// What backs a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Reserved huge pages (`vm.nr_hugepages`).
    Huge,
    /// Ordinary memory: small pages, or transparent huge pages after [`Region::prefault`].
    Small,
}

/// Page-aligned, zero-initialised shared memory. See the module's text for the rules of access.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    mapped: usize,
    pages: Pages,
}

// SAFETY: the mapping lives until drop and is plain memory; all access goes through the methods below, whose callers
// order racing copies by publication as the module's text says.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len_bytes` (rounded up to whole pages) of zeroed memory, on huge pages when the kernel has some.
    ///
    /// # Errors
    /// The kernel's error when it has no memory or address space for it.
    pub fn new(len_bytes: usize) -> io::Result<Arc<Region>> {
        assert!(len_bytes > 0, "a region needs at least one byte");
        let huge = len_bytes >= HUGE_PAGE_BYTES;
        if huge {
            let mapped = len_bytes.next_multiple_of(HUGE_PAGE_BYTES);
            if let Ok(base) = map(mapped, libc::MAP_HUGETLB) {
                return Ok(Arc::new(Region { base, len: len_bytes, mapped, pages: Pages::Huge }));
            }
        }
        let mapped = len_bytes.next_multiple_of(sys::page_bytes());
        let base = map(mapped, libc::MAP_NORESERVE)?;
        Ok(Arc::new(Region { base, len: len_bytes, mapped, pages: Pages::Small }))
    }

    /// Has the kernel back all of the memory now, by huge pages if it can, so that no page fault holds up whoever touches
    /// it first. Huge pages are asked for here only: taken one by one in the middle of work, each costs the time to
    /// clear 2 MiB, and tens of milliseconds when the kernel has to compact memory for it.
    pub fn prefault(&self) {
        if self.len >= HUGE_PAGE_BYTES {
            // SAFETY: the range is our own mapping; the advice does not change its contents. Refusal does no harm.
            unsafe { libc::madvise(self.base.as_ptr().cast(), self.mapped, libc::MADV_HUGEPAGE) };
        }
        // SAFETY: the range is our own mapping; populating it changes no contents.
        let done = unsafe { libc::madvise(self.base.as_ptr().cast(), self.mapped, libc::MADV_POPULATE_WRITE) };
        if done != 0 {
            // A kernel before 5.14: touch every page. Writing what is there is harmless, nobody uses the region yet.
            for offset in (0..self.len).step_by(sys::page_bytes()) {
                let mut byte = [0];
                self.get(offset, &mut byte);
                self.put(offset, &byte);
            }
        }
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// What backs the memory.
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// Address of the first byte, for transports that hand it to the kernel or a device.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    #[inline]
    fn check(&self, offset: usize, len: usize) {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "range {offset}+{len} lies outside a region of {} bytes", self.len);
    }

    /// Copies `bytes` in at `offset`. Panics when the range lies outside.
    #[inline]
    pub fn put(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        // SAFETY: the range was checked; source and destination cannot overlap because no reference to region
        // memory is ever handed out by a safe function.
        unsafe { self.base.as_ptr().add(offset).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    /// Copies `out.len()` bytes out from `offset`. Panics when the range lies outside.
    #[inline]
    pub fn get(&self, offset: usize, out: &mut [u8]) {
        self.check(offset, out.len());
        // SAFETY: as for `put`.
        unsafe { out.as_mut_ptr().copy_from_nonoverlapping(self.base.as_ptr().add(offset), out.len()) }
    }

    /// Copies `len` bytes from `source` to here. Panics when a range lies outside or both regions are the same.
    #[inline]
    pub fn put_from(&self, offset: usize, source: &Region, source_offset: usize, len: usize) {
        self.check(offset, len);
        source.check(source_offset, len);
        assert!(!std::ptr::eq(self, source), "copies go between two regions");
        // SAFETY: both ranges were checked and lie in different mappings.
        unsafe {
            let from = source.base.as_ptr().add(source_offset);
            self.base.as_ptr().add(offset).copy_from_nonoverlapping(from, len);
        }
    }

    /// Appends `len` bytes from `offset` to `out`. Panics when the range lies outside.
    pub fn append_to(&self, offset: usize, len: usize, out: &mut Vec<u8>) {
        let old = out.len();
        out.resize(old + len, 0);
        self.get(offset, &mut out[old..]);
    }

    /// Reads a word that another thread or a peer publishes (acquire). `offset` must be a multiple of 8.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    /// Publishes a word (release). `offset` must be a multiple of 8.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) {
        self.word(offset).store(value, Ordering::Release);
    }

    #[inline]
    fn word(&self, offset: usize) -> &AtomicU64 {
        self.check(offset, 8);
        assert!(offset.is_multiple_of(8), "a published word is aligned to 8 bytes");
        // SAFETY: in range and aligned (the base is page-aligned); atomics may be shared with any other access that is
        // atomic too, and words are only accessed as words (by convention of the layouts in `channel`).
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// CRC-32C of a range, continued from `seed`.
    pub fn crc32c(&self, offset: usize, len: usize, seed: u32) -> u32 {
        // SAFETY: the slice lives for this call only; the caller reads published bytes (module text).
        crate::crc::crc32c(seed, &[unsafe { self.bytes(offset, len) }])
    }

    /// A view of published bytes without a copy.
    ///
    /// # Safety
    /// Nobody, peers included, may write the range while the slice lives.
    #[inline]
    pub unsafe fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        self.check(offset, len);
        // SAFETY: in range; the caller keeps writers away.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset), len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing can refer to it any more: users hold an `Arc<Region>`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

fn map(len: usize, extra_flags: libc::c_int) -> io::Result<NonNull<u8>> {
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | extra_flags,
            -1,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(sys::last_error());
    }
    NonNull::new(address.cast()).ok_or_else(|| io::Error::other("mmap returned address zero"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_and_words_are_published() {
        let region = Region::new(8192).unwrap();
        region.put(100, b"antelog");
        let mut out = [0u8; 7];
        region.prefault();
        region.get(100, &mut out);
        assert_eq!(&out, b"antelog");
        region.store_u64(4096, 77);
        assert_eq!(region.load_u64(4096), 77);
        // "123456789" has the published CRC-32C check value 0xE3069283.
        region.put(0, b"123456789");
        assert_eq!(region.crc32c(0, 9, 0), 0xE306_9283);
    }

    #[test]
    #[should_panic(expected = "outside a region")]
    fn a_range_outside_is_refused() {
        Region::new(4096).unwrap().put(4090, &[0; 7]);
    }
}
