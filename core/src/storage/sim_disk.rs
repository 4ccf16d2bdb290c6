//! A disk in memory, on virtual time, with everything that goes wrong with real ones; deterministic by its seed.
//!
//! It belongs to whoever simulates: a process that uses it has a [`SimHandle`], and when the process dies the files remain.
//! What a file and the directory hold exists twice: as reads see it, and as it would be after a power loss, when of every
//! block that was not synced the old content, the new one, or some sectors of either may be found.

mod state;

use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::state::{File, Kind, Planned, State, User, comes};
use super::disk::{BLOCK_BYTES, Completion, Disk, Name, OPERATIONS_MAX, Op};
use crate::node::Waker;

/// What a disk does to its users. All zero: nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// An operation takes at least this long, in nanoseconds.
    pub delay_min_ns: u64,
    /// And at most this long.
    pub delay_max_ns: u64,
    /// So many of a hundred writes stop short.
    pub short_percent: u64,
    /// Space for files in all, in bytes; none for no limit.
    pub space_bytes: Option<u64>,
    /// On a full disk, writes fail even where space was reserved, as on file systems that copy on write.
    pub copies_on_write: bool,
    /// The sync after so many more fails, and what it was for is lost at the next power loss.
    pub sync_fails_after: Option<u64>,
    /// The write after so many more fails with an input/output error.
    pub write_fails_after: Option<u64>,
    /// After so many more operations nothing happens any more, as if power were lost: see [`SimDisk::is_dead`].
    pub dies_after: Option<u64>,
}

/// The disk, as its simulator has it. See the module's text.
#[derive(Clone)]
pub struct SimDisk(Arc<Mutex<State>>);

/// The disk, as a process has it.
pub struct SimHandle {
    disk: SimDisk,
    user: u64,
    /// Lets other users in when it goes.
    _lock: Option<Arc<Lock>>,
}

struct Lock(SimDisk);

impl Drop for Lock {
    fn drop(&mut self) {
        self.0.state().locked = false;
    }
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDisk").field("files", &self.files()).finish()
    }
}

impl SimDisk {
    /// An empty disk whose chances are drawn from this seed.
    pub fn new(seed: u64) -> SimDisk {
        SimDisk(Arc::new(Mutex::new(State::new(seed))))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A test that failed while it held the disk has told why.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the disk for a process.
    ///
    /// # Errors
    /// One line, when a process has it already.
    pub fn handle(&self) -> Result<SimHandle, String> {
        let mut state = self.state();
        if std::mem::replace(&mut state.locked, true) {
            return Err("the data directory sim is in use: stop it first, or name another directory".into());
        }
        drop(state);
        Ok(self.user(Some(Arc::new(Lock(self.clone())))))
    }

    fn user(&self, lock: Option<Arc<Lock>>) -> SimHandle {
        let mut state = self.state();
        state.numbers += 1;
        let user = state.numbers;
        state.users.insert(user, User::default());
        SimHandle { disk: self.clone(), user, _lock: lock }
    }

    /// What goes wrong from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.state().faults = faults;
    }

    /// What goes wrong.
    pub fn faults(&self) -> Faults {
        self.state().faults
    }

    /// Lets time pass: what is due by then is done, and wakes those who wait for it.
    pub fn advance(&self, to_ns: u64) {
        let mut state = self.state();
        state.run_until(to_ns);
        state.now_ns = state.now_ns.max(to_ns);
        let wakers: Vec<Waker> =
            state.users.values().filter(|u| !u.done.is_empty()).filter_map(|u| u.waker.clone()).collect();
        drop(state);
        wakers.iter().for_each(Waker::wake);
    }

    /// When something is done next.
    pub fn next_ns(&self) -> Option<u64> {
        self.state().planned.iter().map(|planned| planned.due_ns).min()
    }

    /// How far its time has come: whoever waits for an operation lets it pass.
    pub fn now_ns(&self) -> u64 {
        self.state().now_ns
    }

    /// How often the processes that used it have died.
    pub fn deaths(&self) -> u64 {
        self.state().deaths
    }

    /// Reads a file as its users see it; what is not there is zero.
    pub fn peek(&self, name: Name, at: u64, into: &mut [u8]) {
        let state = self.state();
        let file = state.names.get(&name).map(|inode| &state.files[*inode]);
        let mut done = 0;
        while done < into.len() {
            let now = at + done as u64;
            let from = now as usize % BLOCK_BYTES;
            let len = (into.len() - done).min(BLOCK_BYTES - from);
            match file.and_then(|file| file.blocks.get(&(now / BLOCK_BYTES as u64))) {
                Some(block) => into[done..done + len].copy_from_slice(&block[from..from + len]),
                None => into[done..done + len].fill(0),
            }
            done += len;
        }
    }

    /// Whether [`Faults::dies_after`] has come: nothing happens until the power loss is over.
    pub fn is_dead(&self) -> bool {
        self.state().dead
    }

    /// Operations submitted so far.
    pub fn operations(&self) -> u64 {
        self.state().operations
    }

    /// The process that uses the disk dies: what is under way happens or not, what was done stays as reads see it.
    pub fn end_process(&self) {
        self.state().end_process();
    }

    /// The machine loses power: its processes die, and what was not synced is kept, lost, or torn.
    pub fn power_loss(&self) {
        self.end_process();
        self.state().lose();
    }

    /// Turns one bit of a file around, as cold data may rot.
    pub fn flip(&self, name: Name, bit: u64) {
        let mut state = self.state();
        let Some(&inode) = state.names.get(&name) else { return };
        let (at, within) = (bit / 8 / BLOCK_BYTES as u64, (bit / 8) as usize % BLOCK_BYTES);
        let file = &mut state.files[inode];
        let mut block = file.block(at);
        block[within] ^= 1 << (bit % 8);
        file.blocks.insert(at, block);
        if let Some(unsynced) = file.unsynced.get_mut(&at) {
            unsynced.old[within] ^= 1 << (bit % 8);
        }
    }

    /// Another disk with the same files, which nobody uses.
    pub fn copy(&self) -> SimDisk {
        let state = self.state();
        let copy = SimDisk::new(state.operations);
        let mut new = copy.state();
        for (name, inode) in &state.names {
            let File { blocks, length, reserved, .. } = &state.files[*inode];
            let file = File {
                blocks: blocks.clone(),
                length: *length,
                synced_length: *length,
                reserved: *reserved,
                ..File::default()
            };
            new.files.push(file);
            let inode = new.files.len() - 1;
            new.names.insert(*name, inode);
        }
        new.synced_names = new.names.clone();
        drop(new);
        copy
    }

    /// Makes bytes of a file zero, as if they had never been written.
    pub fn erase(&self, name: Name, from: u64, len: u64) {
        let mut state = self.state();
        let Some(&inode) = state.names.get(&name) else { return };
        let file = &mut state.files[inode];
        for (at, block) in file.blocks.range_mut(from / BLOCK_BYTES as u64..) {
            let start = at * BLOCK_BYTES as u64;
            let kept = from.saturating_sub(start).min(BLOCK_BYTES as u64) as usize;
            let end = (from + len).saturating_sub(start).min(BLOCK_BYTES as u64) as usize;
            if kept < end {
                block[kept..end].fill(0);
            }
        }
    }

    /// Takes a file of another disk in place of its own, as a careless operator might.
    pub fn take_from(&self, other: &SimDisk, name: Name) {
        let taken = other.copy();
        let mut state = self.state();
        let mut theirs = taken.state();
        let Some(inode) = theirs.names.get(&name).copied() else { return };
        state.files.push(std::mem::take(&mut theirs.files[inode]));
        let inode = state.files.len() - 1;
        state.names.insert(name, inode);
        state.synced_names.insert(name, inode);
    }

    /// Loses a file.
    pub fn remove(&self, name: Name) {
        let mut state = self.state();
        state.names.remove(&name);
        state.synced_names.remove(&name);
    }

    /// The files there are, and how long they are.
    pub fn files(&self) -> Vec<(Name, u64)> {
        let state = self.state();
        state.names.iter().map(|(name, inode)| (*name, state.files[*inode].length)).collect()
    }
}

impl Disk for SimHandle {
    fn submit(&mut self, op: Op<'_>, token: u64) -> bool {
        let mut guard = self.disk.state();
        let state = &mut *guard;
        state.operations += 1;
        if comes(&mut state.faults.dies_after) {
            state.dead = true;
            for planned in &state.planned {
                if let Some(user) = state.users.get_mut(&planned.user) {
                    user.under_way -= 1;
                    user.done.push_back(Completion { token: planned.token, result: -libc::EIO });
                }
            }
        }
        let Some(user) = state.users.get_mut(&self.user) else {
            // The process is dead and does not know.
            return true;
        };
        if state.dead {
            user.done.push_back(Completion { token, result: -libc::EIO });
            return true;
        }
        if user.under_way + user.done.len() >= OPERATIONS_MAX {
            return false;
        }
        user.under_way += 1;
        let inode = |file: usize| user.files[file].unwrap_or_else(|| panic!("file {file} is not open"));
        let blocks = |at: u64, offset: usize, len: usize| {
            let aligned = [at as usize, offset, len].iter().all(|n| n.is_multiple_of(BLOCK_BYTES));
            assert!(aligned && len > 0, "transfers are whole blocks");
        };
        let kind = match op {
            Op::Open { file, name, create } => Kind::Open(file, name, create),
            Op::Allocate { file, bytes } => Kind::Allocate(inode(file), bytes),
            Op::SetLength { file, bytes } => Kind::SetLength(inode(file), bytes),
            Op::Write { file, at, source, offset, len } => {
                blocks(at, offset, len);
                Kind::Write(inode(file), at, source.clone(), offset, len, source.crc32c(offset, len, 0))
            }
            Op::Read { file, at, target, offset, len } => {
                blocks(at, offset, len);
                Kind::Read(inode(file), at, target.clone(), offset, len)
            }
            Op::Sync { file } => {
                let inode = inode(file);
                let file = &state.files[inode];
                let blocks = file.unsynced.keys().map(|at| (*at, file.block(*at))).collect();
                Kind::Sync(inode, blocks, file.length)
            }
            Op::Rename { from, to } => Kind::Rename(from, to),
            Op::Exchange { one, other } => Kind::Exchange(one, other),
            Op::Remove { name } => Kind::Remove(name),
            Op::SyncDirectory => Kind::SyncDirectory(state.changed),
        };
        state.numbers += 1;
        let delay_ns = state.rng.range(state.faults.delay_min_ns, state.faults.delay_max_ns);
        let due_ns = state.now_ns + delay_ns;
        state.planned.push(Planned { due_ns, number: state.numbers, user: self.user, token, kind });
        true
    }

    fn enter(&mut self) {}

    fn completion(&mut self) -> Option<Completion> {
        self.disk.state().users.get_mut(&self.user)?.done.pop_front()
    }

    fn wait(&mut self) {
        let mut state = self.disk.state();
        let user = state.users.get(&self.user);
        let user = user.unwrap_or_else(|| panic!("a process that is dead waits for its disk"));
        if user.done.is_empty() && user.under_way > 0 {
            let own = state.planned.iter().filter(|planned| planned.user == self.user);
            let due_ns = own.map(|planned| planned.due_ns).min().unwrap_or(0);
            state.run_until(due_ns);
        }
    }

    fn close(&mut self, file: usize) {
        if let Some(user) = self.disk.state().users.get_mut(&self.user) {
            user.files[file] = None;
        }
    }

    fn forget_cached(&mut self, file: usize) {
        let mut state = self.disk.state();
        let Some(inode) = state.users.get(&self.user).and_then(|user| user.files[file]) else { return };
        let file = &mut state.files[inode];
        let lost: Vec<u64> = file.unsynced.iter().filter(|(_, u)| u.lost).map(|(at, _)| *at).collect();
        for at in lost {
            if let Some(unsynced) = file.unsynced.remove(&at) {
                file.blocks.insert(at, unsynced.old);
            }
        }
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.disk.state().names.keys().map(Name::to_string).collect())
    }

    fn place(&self) -> String {
        "sim".into()
    }

    fn another(&self) -> io::Result<SimHandle> {
        Ok(self.disk.user(self._lock.clone()))
    }

    fn set_waker(&mut self, waker: Waker) {
        if let Some(user) = self.disk.state().users.get_mut(&self.user) {
            user.waker = Some(waker);
        }
    }

    fn wait_fds(&self, _: &mut Vec<RawFd>) {}

    fn prepare_wait(&mut self) -> bool {
        self.disk.state().users.get(&self.user).is_some_and(|user| !user.done.is_empty())
    }
}

impl Drop for SimHandle {
    fn drop(&mut self) {
        // What is under way goes on without it.
        self.disk.state().users.remove(&self.user);
    }
}
