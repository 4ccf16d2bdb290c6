//! Safe wrappers of the system calls that `std` lacks.

use std::io;

/// Size of a small page in bytes, the granularity of mappings.
pub fn page_bytes() -> usize {
    // SAFETY: sysconf reads a constant of the running kernel and touches no memory of ours.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// The calling thread's last system error.
pub fn last_error() -> io::Error {
    io::Error::last_os_error()
}
