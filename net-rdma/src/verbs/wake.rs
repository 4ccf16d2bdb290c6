//! One descriptor for all a parked thread waits for: completions and events of the device.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// An epoll over the device's descriptors.
pub(super) struct Wake {
    epoll: OwnedFd,
}

impl Wake {
    /// Readable whenever one of these is. They are made non-blocking: reading one that has nothing says so.
    pub fn new(fds: [RawFd; 2]) -> io::Result<Wake> {
        // SAFETY: no pointers are involved.
        let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: just made and nobody else's.
        let epoll = unsafe { OwnedFd::from_raw_fd(fd) };
        for fd in fds {
            // SAFETY: no pointers are involved.
            let flags = check(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
            // SAFETY: as above.
            check(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) })?;
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
            // SAFETY: `event` outlives the call.
            check(unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut event) })?;
        }
        Ok(Wake { epoll })
    }

    /// Stops waiting for a descriptor.
    pub fn forget(&self, fd: RawFd) {
        // SAFETY: this operation ignores its pointer.
        unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
    }

    pub fn fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
