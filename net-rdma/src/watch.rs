//! Sees when a device in use is removed.
//!
//! The kernel removes a device only once every process has let go of it, and does not tell those that neither sleep on it
//! nor call into it. A thread of its own looks whether programs can still open the device; data threads learn it from
//! [`Health`] with one load and never make a system call for it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::discover::Discovery;
use crate::health::Health;

/// How often it looks.
const EVERY: Duration = Duration::from_millis(100);

/// Looks until it is dropped.
pub struct Watch {
    /// Dropping it ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}

impl Watch {
    /// Watches the device of this name, and disables RDMA when it goes.
    pub fn start(device: &str, health: Health) -> Watch {
        Watch::start_below(Path::new("/sys"), device, health)
    }

    fn start_below(root: &Path, device: &str, health: Health) -> Watch {
        let (stop, stopped) = channel();
        let marker = marker(root, device);
        let device = device.to_owned();
        let look = move || {
            while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                if marker.as_ref().is_some_and(|marker| !marker.exists()) {
                    health.disable(&format!("RDMA device {device} was removed"));
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("antelog-watch".into()).spawn(look);
        Watch { stop: Some(stop), thread: thread.ok() }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What exists as long as programs can open the device; it goes first when the device is removed.
fn marker(root: &Path, device: &str) -> Option<PathBuf> {
    let uverbs = Discovery::read(root).device(device)?.uverbs.clone()?;
    Some(root.join("class/infiniband_verbs").join(uverbs))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_removed_device_disables_rdma() {
        let root = std::env::temp_dir().join(format!("antelog-watch-{}", std::process::id()));
        let verbs = root.join("class/infiniband_verbs/uverbs0");
        fs::create_dir_all(root.join("class/infiniband/rxe0/ports")).unwrap();
        fs::create_dir_all(&verbs).unwrap();
        fs::write(verbs.join("ibdev"), "rxe0\n").unwrap();
        let health = Health::new(Arc::new(|_: &str| {}));
        let watch = Watch::start_below(&root, "rxe0", health.clone());
        assert!(!health.is_disabled());
        fs::remove_dir_all(&verbs).unwrap();
        while !health.is_disabled() {
            std::thread::sleep(EVERY / 4);
        }
        assert_eq!(health.disabled().as_deref(), Some("RDMA device rxe0 was removed"));
        drop(watch);
        fs::remove_dir_all(&root).unwrap();
    }
}
