//! A small file system in memory for each node: it can be full, and it can be lost. All are unmounted when dropped.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// The file that takes what is left of a file system.
const FILLER: &str = "filler";

/// File systems, by place.
pub struct Disks {
    folder: PathBuf,
    mounted: usize,
    /// Those that are full.
    full: Vec<usize>,
}

impl Disks {
    /// So many, of so many bytes each, in folders of this one.
    ///
    /// # Errors
    /// One line: this machine does not let us.
    pub fn mount(folder: &Path, count: usize, bytes: u64) -> Result<Disks, String> {
        let mut disks = Disks { folder: folder.to_owned(), mounted: 0, full: Vec::new() };
        for place in 0..count {
            let path = disks.path(place);
            let failed = |e: io::Error| format!("cannot mount a file system on {}: {e}", path.display());
            fs::create_dir_all(&path).map_err(failed)?;
            let size = std::ffi::CString::new(format!("size={bytes}")).unwrap_or_default();
            mount("antelog-chaos", &path, "tmpfs", MountFlags::empty(), Some(size.as_c_str()))
                .map_err(|e| failed(e.into()))?;
            disks.mounted = place + 1;
        }
        Ok(disks)
    }

    /// Where a place's file system is.
    pub fn path(&self, place: usize) -> PathBuf {
        self.folder.join(place.to_string())
    }

    /// Leaves no byte free.
    pub fn fill(&mut self, place: usize) -> Result<(), String> {
        let path = self.path(place).join(FILLER);
        let failed = |e: io::Error| format!("cannot fill {}: {e}", path.display());
        self.full.push(place);
        let mut file = File::create(&path).map_err(failed)?;
        for piece_bytes in [1 << 20, 4096] {
            let piece = vec![0; piece_bytes];
            loop {
                match file.write_all(&piece) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::StorageFull => break,
                    Err(error) => return Err(failed(error)),
                }
            }
        }
        Ok(())
    }

    /// None is full any more.
    pub fn free(&mut self) -> Result<(), String> {
        for place in std::mem::take(&mut self.full) {
            let path = self.path(place).join(FILLER);
            fs::remove_file(&path).map_err(|e| format!("cannot remove {}: {e}", path.display()))?;
        }
        Ok(())
    }

    /// Forgets everything of a node that does not run.
    pub fn lose(&self, place: usize) -> Result<(), String> {
        let path = self.path(place);
        let failed = |e: io::Error| format!("cannot empty {}: {e}", path.display());
        for entry in fs::read_dir(&path).map_err(failed)? {
            fs::remove_dir_all(entry.map_err(failed)?.path()).map_err(failed)?;
        }
        Ok(())
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        for place in 0..self.mounted {
            // Lazily: a process that was killed may not have let go of it yet.
            let _ = unmount(self.path(place), UnmountFlags::DETACH);
        }
    }
}
