//! The primitives under the thread queue and parking, in one place so that the model checker can replace them.
//!
//! Built with `RUSTFLAGS="--cfg loom"`, the same code runs on loom's atomics, and the tests called `loom_…` explore every
//! interleaving of it. Otherwise these are the standard library's, and a [`Bell`] is an eventfd.

#[cfg(not(loom))]
pub(crate) use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering, fence},
};

#[cfg(loom)]
pub(crate) use loom::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering, fence},
};

#[cfg(not(loom))]
pub(crate) use eventfd::Bell;
#[cfg(loom)]
pub(crate) use model::Bell;

#[cfg(not(loom))]
mod eventfd {
    use std::io;
    use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

    use crate::mem::sys::{self, PollFd};

    /// Wakes one sleeper; a ring that nobody slept through ends the next sleep at once.
    #[derive(Debug)]
    pub(crate) struct Bell(OwnedFd);

    impl Bell {
        pub(crate) fn new() -> io::Result<Bell> {
            sys::eventfd().map(Bell)
        }

        pub(crate) fn ring(&self) {
            sys::eventfd_signal(self.0.as_fd());
        }

        /// Blocks until a ring, a readable descriptor or the timeout. `list` is scratch space.
        pub(crate) fn sleep(&self, list: &mut Vec<PollFd>, fds: &[RawFd], timeout_ns: Option<u64>) {
            list.clear();
            list.push(sys::readable(self.0.as_raw_fd()));
            list.extend(fds.iter().map(|&fd| sys::readable(fd)));
            if let Err(error) = sys::ppoll(list, timeout_ns) {
                panic!("cannot wait for {} descriptors: {error}", list.len());
            }
            if list[0].revents != 0 {
                sys::eventfd_drain(self.0.as_fd());
            }
        }
    }
}

#[cfg(loom)]
mod model {
    use std::io;
    use std::os::fd::RawFd;

    use crate::mem::sys::PollFd;

    /// A bell that the model checker understands. Time does not pass in a model: no timeout ever ends a sleep.
    #[derive(Debug)]
    pub(crate) struct Bell(loom::sync::Notify);

    impl Bell {
        pub(crate) fn new() -> io::Result<Bell> {
            Ok(Bell(loom::sync::Notify::new()))
        }

        pub(crate) fn ring(&self) {
            self.0.notify();
        }

        pub(crate) fn sleep(&self, _: &mut Vec<PollFd>, _: &[RawFd], _: Option<u64>) {
            self.0.wait();
        }
    }
}
