//! A disk in memory, on virtual time, with everything that goes wrong with real ones; deterministic by its seed.
//!
//! It belongs to whoever simulates: a process that uses it has a [`SimHandle`], and when the process dies the files remain.
//! What a file and the directory hold exists twice: as reads see it, and as it would be after a power loss, when of every
//! block that was not synced the old content, the new one, or some sectors of either may be found.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::disk::{BLOCK_BYTES, Completion, Disk, FILES_MAX, Name, OPERATIONS_MAX, Op};
use crate::mem::Region;
use crate::node::Waker;
use crate::sim::rng::Rng;

const SECTOR_BYTES: usize = 512;

type Block = [u8; BLOCK_BYTES];

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

#[derive(Clone, Copy)]
struct Unsynced {
    /// As it is on the platter.
    old: Block,
    /// A sync failed for it: it will not be written any more although reads still see it.
    lost: bool,
}

#[derive(Default)]
struct File {
    /// As reads see them; what is not there is zero.
    blocks: BTreeMap<u64, Block>,
    /// What differs from the platter.
    unsynced: BTreeMap<u64, Unsynced>,
    length: u64,
    synced_length: u64,
    /// Space reserved or used, in bytes.
    reserved: u64,
}

impl File {
    fn block(&self, at: u64) -> Block {
        self.blocks.get(&at).copied().unwrap_or([0; BLOCK_BYTES])
    }

    fn set(&mut self, at: u64, block: Block) {
        let old = self.block(at);
        self.unsynced.entry(at).or_insert(Unsynced { old, lost: false }).lost = false;
        self.blocks.insert(at, block);
    }

    fn cut(&mut self, length: u64) {
        let first = length / BLOCK_BYTES as u64;
        let behind: Vec<u64> = self.blocks.range(first..).map(|(at, _)| *at).collect();
        for at in behind {
            let mut block = [0; BLOCK_BYTES];
            if at == first {
                let kept = (length % BLOCK_BYTES as u64) as usize;
                block[..kept].copy_from_slice(&self.block(at)[..kept]);
            }
            self.set(at, block);
        }
        self.length = length;
        self.reserved = length.next_multiple_of(BLOCK_BYTES as u64);
    }

    /// After a power loss.
    fn lose(&mut self, rng: &mut Rng) {
        for (at, Unsynced { old, lost }) in std::mem::take(&mut self.unsynced) {
            let mut block = self.block(at);
            match rng.below(3) {
                _ if lost => block = old,
                0 => block = old,
                1 => {}
                _ => {
                    for sector in (0..BLOCK_BYTES).step_by(SECTOR_BYTES).filter(|_| rng.percent(50)) {
                        block[sector..sector + SECTOR_BYTES].copy_from_slice(&old[sector..sector + SECTOR_BYTES]);
                    }
                }
            }
            self.blocks.insert(at, block);
        }
        if rng.percent(50) {
            self.length = self.synced_length;
        }
        self.synced_length = self.length;
    }
}

/// A change of the directory that may be lost.
#[derive(Clone, Copy, Debug)]
enum Change {
    Made(Name, usize),
    Renamed(Name, Name, usize),
    Removed(Name),
}

enum Kind {
    Open(usize, Name, bool),
    Allocate(usize, u64),
    SetLength(usize, u64),
    /// File, offset, source, offset in it, bytes that are written, CRC of the source when it was submitted.
    Write(usize, u64, Arc<Region>, usize, usize, u32),
    Read(usize, u64, Arc<Region>, usize, usize),
    /// Files as they were when the sync began: inode and its unsynced blocks.
    Sync(usize, Vec<(u64, Block)>, u64),
    Rename(Name, Name),
    Remove(Name),
    /// So many changes had completed when it began.
    SyncDirectory(u64),
}

struct Planned {
    due_ns: u64,
    number: u64,
    user: u64,
    token: u64,
    kind: Kind,
}

#[derive(Default)]
struct User {
    files: [Option<usize>; FILES_MAX],
    done: VecDeque<Completion>,
    under_way: usize,
    waker: Option<Waker>,
}

struct State {
    rng: Rng,
    faults: Faults,
    now_ns: u64,
    numbers: u64,
    /// In order of submission.
    planned: Vec<Planned>,
    users: BTreeMap<u64, User>,
    files: Vec<File>,
    /// As seen.
    names: BTreeMap<Name, usize>,
    /// After a power loss, if no change is kept.
    synced_names: BTreeMap<Name, usize>,
    /// Numbered, oldest first.
    changes: VecDeque<(u64, Change)>,
    changed: u64,
    dead: bool,
    locked: bool,
    operations: u64,
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

impl SimDisk {
    /// An empty disk whose chances are drawn from this seed.
    pub fn new(seed: u64) -> SimDisk {
        SimDisk(Arc::new(Mutex::new(State {
            rng: Rng::new(seed, 0xD15C),
            faults: Faults::default(),
            now_ns: 0,
            numbers: 0,
            planned: Vec::new(),
            users: BTreeMap::new(),
            files: Vec::new(),
            names: BTreeMap::new(),
            synced_names: BTreeMap::new(),
            changes: VecDeque::new(),
            changed: 0,
            dead: false,
            locked: false,
            operations: 0,
        })))
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
        let mut state = self.state();
        let mut planned = std::mem::take(&mut state.planned);
        planned.sort_by_key(|p| (p.due_ns, p.number));
        for Planned { user, kind, .. } in planned {
            if state.rng.percent(50) {
                state.execute(user, kind);
            }
        }
        state.users.clear();
        state.dead = false;
        state.faults.dies_after = None;
    }

    /// The machine loses power: its processes die, and what was not synced is kept, lost, or torn.
    pub fn power_loss(&self) {
        self.end_process();
        let mut guard = self.state();
        let state = &mut *guard;
        for file in &mut state.files {
            file.lose(&mut state.rng);
        }
        state.names = state.synced_names.clone();
        for (_, change) in std::mem::take(&mut state.changes) {
            if state.rng.percent(50) {
                apply(&mut state.names, change);
            }
        }
        state.synced_names = state.names.clone();
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

fn apply(names: &mut BTreeMap<Name, usize>, change: Change) {
    match change {
        Change::Made(name, inode) => {
            names.insert(name, inode);
        }
        Change::Renamed(from, to, inode) => {
            names.remove(&from);
            names.insert(to, inode);
        }
        Change::Removed(name) => {
            names.remove(&name);
        }
    }
}

/// Counts down to a fault; true when it has come.
fn comes(after: &mut Option<u64>) -> bool {
    match after {
        Some(0) => {
            *after = None;
            true
        }
        Some(left) => {
            *left -= 1;
            false
        }
        None => false,
    }
}

impl State {
    fn run_until(&mut self, to_ns: u64) {
        loop {
            let next = self.planned.iter().enumerate().min_by_key(|(_, p)| (p.due_ns, p.number));
            let Some((at, _)) = next.filter(|(_, p)| p.due_ns <= to_ns && !self.dead) else { return };
            let Planned { user, token, kind, due_ns, .. } = self.planned.remove(at);
            self.now_ns = self.now_ns.max(due_ns);
            let result = self.execute(user, kind);
            if let Some(user) = self.users.get_mut(&user) {
                user.under_way -= 1;
                user.done.push_back(Completion { token, result });
            }
        }
    }

    fn used(&self) -> u64 {
        let open = self.users.values().flat_map(|user| user.files.iter().flatten().copied());
        let mut inodes: Vec<usize> = self.names.values().copied().chain(open).collect();
        inodes.sort_unstable();
        inodes.dedup();
        inodes.iter().map(|inode| self.files[*inode].reserved).sum()
    }

    /// Whether the file may grow to `bytes`, which are then its own.
    fn reserve(&mut self, inode: usize, bytes: u64) -> bool {
        let reserved = self.files[inode].reserved;
        let more = bytes.next_multiple_of(BLOCK_BYTES as u64).saturating_sub(reserved);
        if more > 0 && self.faults.space_bytes.is_some_and(|space| self.used() + more > space) {
            return false;
        }
        self.files[inode].reserved += more;
        true
    }

    fn change(&mut self, change: Change) {
        self.changed += 1;
        self.changes.push_back((self.changed, change));
        apply(&mut self.names, change);
    }

    fn execute(&mut self, user: u64, kind: Kind) -> i32 {
        match kind {
            Kind::Open(file, name, create) => self.open(user, file, name, create),
            Kind::Allocate(inode, bytes) => {
                if !self.reserve(inode, bytes) {
                    return -libc::ENOSPC;
                }
                let length = &mut self.files[inode].length;
                *length = bytes.max(*length);
                0
            }
            Kind::SetLength(inode, bytes) => {
                self.files[inode].cut(bytes);
                0
            }
            Kind::Write(inode, at, source, offset, len, crc) => self.write(inode, at, &source, offset, len, crc),
            Kind::Read(inode, at, target, offset, len) => {
                let file = &self.files[inode];
                let len = file.length.saturating_sub(at).min(len as u64) as usize;
                for from in (0..len).step_by(BLOCK_BYTES) {
                    let block = file.block((at + from as u64) / BLOCK_BYTES as u64);
                    target.put(offset + from, &block[..BLOCK_BYTES.min(len - from)]);
                }
                len as i32
            }
            Kind::Sync(inode, blocks, length) => self.sync(inode, &blocks, length),
            Kind::Rename(from, to) => match self.names.get(&from) {
                Some(&inode) => {
                    self.change(Change::Renamed(from, to, inode));
                    0
                }
                None => -libc::ENOENT,
            },
            Kind::Remove(name) => {
                if !self.names.contains_key(&name) {
                    return -libc::ENOENT;
                }
                self.change(Change::Removed(name));
                0
            }
            Kind::SyncDirectory(upto) => {
                if comes(&mut self.faults.sync_fails_after) {
                    return -libc::EIO;
                }
                while self.changes.front().is_some_and(|(number, _)| *number <= upto) {
                    if let Some((_, change)) = self.changes.pop_front() {
                        apply(&mut self.synced_names, change);
                    }
                }
                0
            }
        }
    }

    fn open(&mut self, user: u64, file: usize, name: Name, create: bool) -> i32 {
        let inode = match (self.names.get(&name), create) {
            (Some(&inode), false) => inode,
            (None, false) => return -libc::ENOENT,
            (Some(&inode), true) => {
                self.files[inode].cut(0);
                inode
            }
            (None, true) => {
                self.files.push(File::default());
                let inode = self.files.len() - 1;
                self.change(Change::Made(name, inode));
                inode
            }
        };
        if let Some(user) = self.users.get_mut(&user) {
            assert!(user.files[file].is_none(), "file {file} is open already");
            user.files[file] = Some(inode);
        }
        0
    }

    fn write(&mut self, inode: usize, at: u64, source: &Region, offset: usize, len: usize, crc: u32) -> i32 {
        assert_eq!(source.crc32c(offset, len, 0), crc, "the bytes of a write changed while it was under way");
        if comes(&mut self.faults.write_fails_after) {
            return -libc::EIO;
        }
        let full = self.faults.space_bytes.is_some_and(|space| self.used() + len as u64 > space);
        if (full && self.faults.copies_on_write) || !self.reserve(inode, at + len as u64) {
            return -libc::ENOSPC;
        }
        let mut len = len;
        if self.rng.percent(self.faults.short_percent) {
            len = self.rng.range(1, (len / SECTOR_BYTES) as u64) as usize * SECTOR_BYTES;
        }
        let file = &mut self.files[inode];
        for from in (0..len).step_by(BLOCK_BYTES) {
            let number = (at + from as u64) / BLOCK_BYTES as u64;
            let mut block = file.block(number);
            let part = BLOCK_BYTES.min(len - from);
            source.get(offset + from, &mut block[..part]);
            file.set(number, block);
        }
        file.length = file.length.max(at + len as u64);
        len as i32
    }

    fn sync(&mut self, inode: usize, blocks: &[(u64, Block)], length: u64) -> i32 {
        let fails = comes(&mut self.faults.sync_fails_after);
        let file = &mut self.files[inode];
        for (at, content) in blocks {
            let now = file.block(*at);
            let Some(unsynced) = file.unsynced.get_mut(at) else { continue };
            if fails {
                unsynced.lost = true;
            } else if !unsynced.lost {
                unsynced.old = *content;
                if now == *content {
                    file.unsynced.remove(at);
                }
            }
        }
        if fails {
            return -libc::EIO;
        }
        file.synced_length = length;
        0
    }
}

impl SimHandle {
    /// Names the thread to wake when something is done.
    pub fn set_waker(&self, waker: Waker) {
        if let Some(user) = self.disk.state().users.get_mut(&self.user) {
            user.waker = Some(waker);
        }
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
