//! Safe wrappers of the system calls that `std` lacks.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

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

/// A descriptor to wait for, and what was found: `libc`'s own structure, which is plain data.
pub use libc::pollfd as PollFd;

/// An entry that waits for `fd` to become readable.
pub fn readable(fd: std::os::fd::RawFd) -> PollFd {
    PollFd { fd, events: libc::POLLIN, revents: 0 }
}

/// Blocks until one of `fds` is ready, `timeout_ns` nanoseconds have passed (`None`: for ever) or a signal arrived; returns
/// how many are ready, 0 for a timeout or a signal.
///
/// # Errors
/// The kernel's error; only a lack of memory or a list longer than the process's limit of open files can cause one.
pub fn ppoll(fds: &mut [PollFd], timeout_ns: Option<u64>) -> io::Result<usize> {
    let timeout = timeout_ns.map(|ns| libc::timespec {
        // At most 2^64 / 10^9, and less than 10^9: both fit the fields of every platform.
        tv_sec: (ns / 1_000_000_000) as _,
        tv_nsec: (ns % 1_000_000_000) as _,
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the list and the timeout live across the call; the kernel writes only `revents` of the entries given.
    let ready = unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout, std::ptr::null()) };
    match usize::try_from(ready) {
        Ok(ready) => Ok(ready),
        Err(_) => {
            let error = last_error();
            if error.kind() == io::ErrorKind::Interrupted { Ok(0) } else { Err(error) }
        }
    }
}

/// A new event counter, non-blocking and closed on exec.
///
/// # Errors
/// The kernel's error when the process has no descriptor left.
pub fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: creates a descriptor and touches no memory.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(last_error());
    }
    // SAFETY: the descriptor was created just above and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes an event counter readable.
pub fn eventfd_signal(fd: BorrowedFd<'_>) {
    let one = 1u64;
    // SAFETY: the kernel reads 8 bytes of `one`. It can only fail when the counter is at its limit, and then it is
    // readable, which is all that is asked for.
    unsafe { libc::write(fd.as_raw_fd(), std::ptr::from_ref(&one).cast(), 8) };
}

/// Makes an event counter unreadable until the next signal.
pub fn eventfd_drain(fd: BorrowedFd<'_>) {
    let mut count = 0u64;
    // SAFETY: the kernel writes 8 bytes of `count`. It can only fail when there is nothing to read, which is the goal.
    unsafe { libc::read(fd.as_raw_fd(), std::ptr::from_mut(&mut count).cast(), 8) };
}

/// Lets the calling thread's timers expire within 1 ns of their time instead of the default 50 µs.
pub fn precise_timers() {
    // SAFETY: sets a scheduling attribute of the calling thread. Where it is refused, sleeps are longer and still right.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) };
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn an_event_is_seen_until_drained() {
        let event = eventfd().unwrap();
        let mut fds = [readable(event.as_raw_fd())];
        assert_eq!(ppoll(&mut fds, Some(0)).unwrap(), 0);
        eventfd_signal(event.as_fd());
        eventfd_signal(event.as_fd());
        assert_eq!(ppoll(&mut fds, None).unwrap(), 1);
        assert_ne!(fds[0].revents & libc::POLLIN, 0);
        eventfd_drain(event.as_fd());
        assert_eq!(ppoll(&mut fds, Some(1000)).unwrap(), 0);
    }
}
