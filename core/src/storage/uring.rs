//! The real disk: a directory whose files are written and read through io_uring, past the page cache where the file
//! system lets us. The storage's room for `unsafe`.
//!
//! What keeps this sound: whatever a request points to — a range of a region, a name — is owned by the request's slot until
//! its completion was taken, and a ring that is dropped first waits for what is under way.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ffi::CString;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::disk::{BLOCK_BYTES, Completion, Disk, FILES_MAX, Name, OPERATIONS_MAX, Op};
use crate::mem::{Region, sys};

const LOCK: &str = "lock";
const PROBE: &str = "probe";

/// A directory that this process has for itself.
#[derive(Debug)]
struct Place {
    path: PathBuf,
    directory: OwnedFd,
    /// Open and locked for as long as anybody uses the directory.
    _lock: fs::File,
    direct: bool,
}

/// Room for a file's name with its final zero.
type NameBytes = [u8; 32];

/// A request under way, and all that the kernel may look at for it.
#[derive(Debug, Default)]
struct Slot {
    busy: bool,
    token: u64,
    memory: Option<Arc<Region>>,
    names: [NameBytes; 2],
    /// The number to open the file under.
    opens: Option<usize>,
    /// The file and the length to give it if the file system cannot reserve space.
    length: Option<(usize, u64)>,
}

/// See the module's text.
pub struct UringDisk {
    place: Arc<Place>,
    /// Waits for what is under way before memory is freed; leaked if that is not to be had.
    ring: ManuallyDrop<IoUring>,
    slots: ManuallyDrop<Box<[Slot]>>,
    files: [Option<OwnedFd>; FILES_MAX],
    under_way: usize,
    queued: usize,
    /// Completions of operations that were done at once.
    done: VecDeque<Completion>,
    /// The kernel refuses the ring: everything under way failed with this `errno`.
    broken: Option<i32>,
    wake: OwnedFd,
    armed: bool,
}

impl UringDisk {
    /// Takes a directory, making it if it is not there, for this process alone. `direct` asks for writes past the page
    /// cache; see [`notice`](Self::notice) for what came of it.
    ///
    /// # Errors
    /// One line that says what is wrong with which directory, and what to do.
    pub fn open(path: &Path, direct: bool) -> Result<UringDisk, String> {
        let shown = path.display();
        let cannot = |error: io::Error| format!("cannot use the data directory {shown}: {error}");
        if !path.exists() {
            fs::create_dir_all(path).map_err(cannot)?;
            // A path like "data" has the parent "".
            let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            fs::File::open(parent).and_then(|parent| parent.sync_all()).map_err(cannot)?;
        }
        let directory = fs::File::open(path).map_err(cannot)?;
        if !directory.metadata().map_err(cannot)?.is_dir() {
            return Err(format!("the data directory {shown} is a file: name a directory"));
        }
        let lock = take_lock(path)?;
        let direct = direct && takes_direct(path).map_err(cannot)?;
        let place = Place { path: path.to_owned(), directory: directory.into(), _lock: lock, direct };
        UringDisk::start(Arc::new(place)).map_err(|error| format!("cannot use io_uring for {shown}: {error}"))
    }

    fn start(place: Arc<Place>) -> io::Result<UringDisk> {
        // No single issuer and no deferred work: a log is opened on one thread and then written on another.
        let ring = IoUring::builder().setup_clamp().build(OPERATIONS_MAX as u32)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::OpenAt::CODE, opcode::Fallocate::CODE, opcode::RenameAt::CODE, opcode::UnlinkAt::CODE];
        if needed.into_iter().any(|code| !probe.is_supported(code)) || !ring.params().is_feature_nodrop() {
            return Err(io::Error::other("this kernel's io_uring lacks file operations: run Linux 6.1 or later"));
        }
        let wake = sys::eventfd()?;
        ring.submitter().register_eventfd(wake.as_raw_fd())?;
        let mut disk = UringDisk {
            place,
            ring: ManuallyDrop::new(ring),
            slots: ManuallyDrop::new((0..OPERATIONS_MAX).map(|_| Slot::default()).collect()),
            files: [const { None }; FILES_MAX],
            under_way: 0,
            queued: 0,
            done: VecDeque::with_capacity(OPERATIONS_MAX),
            broken: None,
            wake,
            armed: false,
        };
        // A spinning owner should not pay for signals.
        disk.ring.completion().disable_eventfd();
        Ok(disk)
    }

    /// What the operator should be told about the directory, once.
    pub fn notice(&self) -> Option<String> {
        let path = self.place.path.display();
        (!self.place.direct)
            .then(|| format!("{path}: the log is written through the page cache, not past it (O_DIRECT)"))
    }

    fn fd(&self, file: usize) -> RawFd {
        self.files[file].as_ref().map_or_else(|| panic!("file {file} is not open"), AsRawFd::as_raw_fd)
    }

    /// Builds the request for `op`, which points into slot `at` and what that holds.
    fn entry(&mut self, at: usize, op: &Op<'_>) -> squeue::Entry {
        let directory = types::Fd(self.place.directory.as_raw_fd());
        match *op {
            Op::Open { file, name, create } => {
                assert!(self.files[file].is_none(), "file {file} is open already");
                let mut flags = libc::O_RDWR | libc::O_CLOEXEC | libc::O_NOFOLLOW;
                let is_segment = matches!(name, Name::Segment(_));
                flags |= if create { libc::O_CREAT } else { 0 };
                flags |= if create && is_segment { libc::O_TRUNC } else { 0 };
                flags |= if self.place.direct && is_segment { libc::O_DIRECT } else { 0 };
                self.slots[at].opens = Some(file);
                let name = self.name(at, 0, name);
                opcode::OpenAt::new(directory, name).flags(flags).mode(0o600).build()
            }
            Op::Allocate { file, bytes } => {
                self.slots[at].length = Some((file, bytes));
                opcode::Fallocate::new(types::Fd(self.fd(file)), bytes).build()
            }
            Op::Write { file, at: to, source, offset, len } => {
                let from = self.hold(at, source, to, offset, len);
                opcode::Write::new(types::Fd(self.fd(file)), from, len as u32).offset(to).build()
            }
            Op::Read { file, at: from, target, offset, len } => {
                let to = self.hold(at, target, from, offset, len);
                opcode::Read::new(types::Fd(self.fd(file)), to, len as u32).offset(from).build()
            }
            Op::Sync { file } => {
                opcode::Fsync::new(types::Fd(self.fd(file))).flags(types::FsyncFlags::DATASYNC).build()
            }
            Op::Rename { from, to } => {
                let (from, to) = (self.name(at, 0, from), self.name(at, 1, to));
                opcode::RenameAt::new(directory, from, directory, to).build()
            }
            Op::Exchange { one, other } => {
                let (one, other) = (self.name(at, 0, one), self.name(at, 1, other));
                opcode::RenameAt::new(directory, one, directory, other).flags(libc::RENAME_EXCHANGE).build()
            }
            Op::Remove { name } => opcode::UnlinkAt::new(directory, self.name(at, 0, name)).build(),
            Op::SyncDirectory => opcode::Fsync::new(directory).build(),
            Op::SetLength { .. } => unreachable!("done at once"),
        }
    }

    /// Writes a name into a slot; the pointer is good until the slot is given back.
    fn name(&mut self, at: usize, which: usize, name: Name) -> *const libc::c_char {
        let bytes = &mut self.slots[at].names[which];
        *bytes = NameBytes::default();
        // The longest name has 24 bytes; the last byte stays zero.
        let end = bytes.len() - 1;
        write!(&mut bytes[..end], "{name}").unwrap_or_else(|_| panic!("the file name {name} is too long"));
        bytes.as_ptr().cast()
    }

    /// Keeps a region alive for a request, and returns where the range lies.
    fn hold(&mut self, at: usize, region: &Arc<Region>, file_at: u64, offset: usize, len: usize) -> *mut u8 {
        let inside = offset.checked_add(len).is_some_and(|end| end <= region.len());
        assert!(inside, "range {offset}+{len} lies outside a region of {} bytes", region.len());
        let aligned = [offset, len, file_at as usize].iter().all(|n| n.is_multiple_of(BLOCK_BYTES));
        assert!(aligned && len > 0, "transfers are whole blocks");
        self.slots[at].memory = Some(region.clone());
        // SAFETY: in range, as just checked.
        unsafe { region.as_ptr().add(offset) }
    }

    /// Enters the kernel with what is queued, and waits for `wanted` completions.
    fn submit_and_wait(&mut self, wanted: usize) {
        if self.broken.is_some() {
            return;
        }
        match self.ring.submit_and_wait(wanted) {
            Ok(_) => self.queued = self.ring.submission().len(),
            // Passing conditions: the next call tries again.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
            Err(error) => self.broken = Some(error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }

    /// What a broken ring answers for everything under way. The slots keep what the kernel may still look at.
    fn broken_completion(&mut self) -> Option<Completion> {
        let errno = self.broken?;
        let slot = self.slots.iter_mut().find(|slot| slot.busy)?;
        slot.busy = false;
        std::mem::forget(slot.memory.take());
        self.under_way -= 1;
        Some(Completion { token: slot.token, result: -errno })
    }

    /// Takes what a request that is done was for.
    fn finish(&mut self, at: usize, mut result: i32) -> Completion {
        let slot = &mut self.slots[at];
        let (opens, length) = (slot.opens.take(), slot.length.take());
        slot.busy = false;
        slot.memory = None;
        let token = slot.token;
        self.under_way -= 1;
        if let Some(file) = opens.filter(|_| result >= 0) {
            // SAFETY: the kernel has just made this descriptor for us.
            self.files[file] = Some(unsafe { OwnedFd::from_raw_fd(result) });
            result = 0;
        }
        if let Some((file, bytes)) = length.filter(|_| result == -libc::EOPNOTSUPP) {
            // A file system that cannot reserve space will say that it is full when it is.
            result = self.set_length(file, bytes);
        }
        Completion { token, result }
    }

    fn set_length(&self, file: usize, bytes: u64) -> i32 {
        // SAFETY: changes the length of an open file of ours and touches no memory.
        let done = unsafe { libc::ftruncate(self.fd(file), bytes as libc::off_t) };
        if done == 0 { 0 } else { -sys::last_error().raw_os_error().unwrap_or(libc::EIO) }
    }

    fn disarm(&mut self) {
        if self.armed {
            self.armed = false;
            self.ring.completion().disable_eventfd();
            sys::eventfd_drain(std::os::fd::AsFd::as_fd(&self.wake));
        }
    }
}

impl Disk for UringDisk {
    fn submit(&mut self, op: Op<'_>, token: u64) -> bool {
        if self.under_way + self.done.len() >= OPERATIONS_MAX {
            return false;
        }
        if let Op::SetLength { file, bytes } = op {
            let result = self.set_length(file, bytes);
            self.done.push_back(Completion { token, result });
            return true;
        }
        let Some(at) = self.slots.iter().position(|slot| !slot.busy) else { return false };
        let entry = self.entry(at, &op).user_data(at as u64);
        self.slots[at].busy = true;
        self.slots[at].token = token;
        // SAFETY: what the entry points to is owned by the slot, which is given back when its completion was taken.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "the queue has a place for every slot");
        self.under_way += 1;
        self.queued += 1;
        true
    }

    fn enter(&mut self) {
        if self.queued > 0 {
            self.submit_and_wait(0);
        }
    }

    fn completion(&mut self) -> Option<Completion> {
        self.disarm();
        if let Some(done) = self.done.pop_front() {
            return Some(done);
        }
        if self.under_way == 0 {
            return None;
        }
        let entry = self.ring.completion().next();
        match entry {
            Some(entry) => Some(self.finish(entry.user_data() as usize, entry.result())),
            None => self.broken_completion(),
        }
    }

    fn wait(&mut self) {
        if self.done.is_empty() && self.under_way > 0 {
            self.submit_and_wait(1);
        }
    }

    fn close(&mut self, file: usize) {
        self.files[file] = None;
    }

    fn forget_cached(&mut self, file: usize) {
        if !self.place.direct {
            // SAFETY: advice about an open file of ours; touches no memory, and a refusal changes nothing.
            unsafe { libc::posix_fadvise(self.fd(file), 0, 0, libc::POSIX_FADV_DONTNEED) };
        }
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.place.path)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            // A file system's own folder at its root is no sign of another owner.
            if ![LOCK, PROBE, "lost+found"].contains(&name.as_str()) {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn place(&self) -> String {
        self.place.path.display().to_string()
    }

    fn another(&self) -> io::Result<UringDisk> {
        UringDisk::start(self.place.clone())
    }

    fn wait_fds(&self, fds: &mut Vec<RawFd>) {
        fds.push(self.wake.as_raw_fd());
    }

    fn prepare_wait(&mut self) -> bool {
        self.enter();
        self.armed = true;
        self.ring.completion().enable_eventfd();
        // Either we see the completion, or the kernel sees that we want the signal.
        fence(Ordering::SeqCst);
        !self.done.is_empty() || self.broken.is_some() || !self.ring.completion().is_empty()
    }
}

impl Drop for UringDisk {
    fn drop(&mut self) {
        while self.under_way > 0 && self.broken.is_none() {
            self.submit_and_wait(1);
            while self.under_way > 0 && self.completion().is_some() {}
        }
        if self.broken.is_none() {
            // SAFETY: dropped once, here; nothing is under way, so the kernel looks at neither of them any more.
            unsafe {
                ManuallyDrop::drop(&mut self.ring);
                ManuallyDrop::drop(&mut self.slots);
            }
        }
    }
}

impl std::fmt::Debug for UringDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UringDisk").field("place", &self.place).field("under_way", &self.under_way).finish()
    }
}

/// Locks the directory against other processes.
fn take_lock(path: &Path) -> Result<fs::File, String> {
    let name = path.join(LOCK);
    let cannot = |error: io::Error| format!("cannot lock the data directory {}: {error}", path.display());
    let mut options = fs::OpenOptions::new();
    let mut file =
        options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&name).map_err(cannot)?;
    // SAFETY: locks an open file of ours and touches no memory.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
        let error = sys::last_error();
        if error.raw_os_error() != Some(libc::EWOULDBLOCK) {
            return Err(cannot(error));
        }
        let mut holder = String::new();
        let _ = file.read_to_string(&mut holder);
        return Err(format!(
            "the data directory {} is in use by process {}: stop it first, or name another directory",
            path.display(),
            holder.trim()
        ));
    }
    // Only a courtesy to whoever finds the directory locked: a full disk must not keep a replica from starting.
    let _ = file.set_len(0).and_then(|()| write!(file, "{}", std::process::id()));
    Ok(file)
}

/// Whether the directory's file system takes a block past the page cache.
fn takes_direct(path: &Path) -> io::Result<bool> {
    let name = path.join(PROBE);
    let text = CString::new(name.as_os_str().as_bytes())?;
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_CLOEXEC | libc::O_DIRECT;
    // SAFETY: the path lives across the call.
    let fd = unsafe { libc::open(text.as_ptr(), flags, 0o600 as libc::c_uint) };
    if fd < 0 {
        let error = sys::last_error();
        // The file may have been made before its opening failed.
        let _ = fs::remove_file(&name);
        return if error.raw_os_error() == Some(libc::EINVAL) { Ok(false) } else { Err(error) };
    }
    // SAFETY: the descriptor is new and nobody else's.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    let block = Region::new(BLOCK_BYTES)?;
    // SAFETY: the region is as long as what is written.
    let written = unsafe { libc::pwrite(file.as_raw_fd(), block.as_ptr().cast(), BLOCK_BYTES, 0) };
    let refused = written < 0 && sys::last_error().raw_os_error() == Some(libc::EINVAL);
    fs::remove_file(&name)?;
    Ok(!refused)
}
