//! What a simulated disk holds, and what its operations do to it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::Faults;
use crate::mem::Region;
use crate::node::Waker;
use crate::sim::rng::Rng;
use crate::storage::disk::{BLOCK_BYTES, Completion, FILES_MAX, Name};

const SECTOR_BYTES: usize = 512;

pub(super) type Block = [u8; BLOCK_BYTES];

#[derive(Clone, Copy)]
pub(super) struct Unsynced {
    /// As it is on the platter.
    pub(super) old: Block,
    /// A sync failed for it: it will not be written any more although reads still see it.
    pub(super) lost: bool,
}

#[derive(Default)]
pub(super) struct File {
    /// As reads see them; what is not there is zero.
    pub(super) blocks: BTreeMap<u64, Block>,
    /// What differs from the platter.
    pub(super) unsynced: BTreeMap<u64, Unsynced>,
    pub(super) length: u64,
    pub(super) synced_length: u64,
    /// Space reserved or used, in bytes.
    pub(super) reserved: u64,
}

impl File {
    pub(super) fn block(&self, at: u64) -> Block {
        self.blocks.get(&at).copied().unwrap_or([0; BLOCK_BYTES])
    }

    pub(super) fn set(&mut self, at: u64, block: Block) {
        let old = self.block(at);
        self.unsynced.entry(at).or_insert(Unsynced { old, lost: false }).lost = false;
        self.blocks.insert(at, block);
    }

    pub(super) fn cut(&mut self, length: u64) {
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
    pub(super) fn lose(&mut self, rng: &mut Rng) {
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
pub(super) enum Change {
    Made(Name, usize),
    Renamed(Name, Name, usize),
    Exchanged((Name, usize), (Name, usize)),
    Removed(Name),
}

pub(super) enum Kind {
    Open(usize, Name, bool),
    Allocate(usize, u64),
    SetLength(usize, u64),
    /// File, offset, source, offset in it, bytes that are written, CRC of the source when it was submitted.
    Write(usize, u64, Arc<Region>, usize, usize, u32),
    Read(usize, u64, Arc<Region>, usize, usize),
    /// Files as they were when the sync began: inode and its unsynced blocks.
    Sync(usize, Vec<(u64, Block)>, u64),
    Rename(Name, Name),
    Exchange(Name, Name),
    Remove(Name),
    /// So many changes had completed when it began.
    SyncDirectory(u64),
}

pub(super) struct Planned {
    pub(super) due_ns: u64,
    pub(super) number: u64,
    pub(super) user: u64,
    pub(super) token: u64,
    pub(super) kind: Kind,
}

#[derive(Default)]
pub(super) struct User {
    pub(super) files: [Option<usize>; FILES_MAX],
    pub(super) done: VecDeque<Completion>,
    pub(super) under_way: usize,
    pub(super) waker: Option<Waker>,
}

pub(super) struct State {
    pub(super) rng: Rng,
    pub(super) faults: Faults,
    pub(super) now_ns: u64,
    pub(super) numbers: u64,
    /// In order of submission.
    pub(super) planned: Vec<Planned>,
    pub(super) users: BTreeMap<u64, User>,
    pub(super) files: Vec<File>,
    /// As seen.
    pub(super) names: BTreeMap<Name, usize>,
    /// After a power loss, if no change is kept.
    pub(super) synced_names: BTreeMap<Name, usize>,
    /// Numbered, oldest first.
    pub(super) changes: VecDeque<(u64, Change)>,
    pub(super) changed: u64,
    pub(super) dead: bool,
    pub(super) locked: bool,
    pub(super) operations: u64,
    pub(super) deaths: u64,
}

pub(super) fn apply(names: &mut BTreeMap<Name, usize>, change: Change) {
    match change {
        Change::Made(name, inode) => {
            names.insert(name, inode);
        }
        Change::Renamed(from, to, inode) => {
            names.remove(&from);
            names.insert(to, inode);
        }
        Change::Exchanged((one, first), (other, second)) => {
            names.insert(one, second);
            names.insert(other, first);
        }
        Change::Removed(name) => {
            names.remove(&name);
        }
    }
}

/// Counts down to a fault; true when it has come.
pub(super) fn comes(after: &mut Option<u64>) -> bool {
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
    pub(super) fn new(seed: u64) -> State {
        State {
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
            deaths: 0,
        }
    }

    /// The users die: what is under way happens or not.
    pub(super) fn end_process(&mut self) {
        let mut planned = std::mem::take(&mut self.planned);
        planned.sort_by_key(|p| (p.due_ns, p.number));
        for Planned { user, kind, .. } in planned {
            if self.rng.percent(50) {
                self.execute(user, kind);
            }
        }
        self.users.clear();
        self.deaths += 1;
        self.dead = false;
        self.faults.dies_after = None;
    }

    /// What is not synced is kept, lost, or torn.
    pub(super) fn lose(&mut self) {
        for file in &mut self.files {
            file.lose(&mut self.rng);
        }
        self.names = self.synced_names.clone();
        for (_, change) in std::mem::take(&mut self.changes) {
            if self.rng.percent(50) {
                apply(&mut self.names, change);
            }
        }
        self.synced_names = self.names.clone();
    }

    pub(super) fn run_until(&mut self, to_ns: u64) {
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

    pub(super) fn used(&self) -> u64 {
        let open = self.users.values().flat_map(|user| user.files.iter().flatten().copied());
        let mut inodes: Vec<usize> = self.names.values().copied().chain(open).collect();
        inodes.sort_unstable();
        inodes.dedup();
        inodes.iter().map(|inode| self.files[*inode].reserved).sum()
    }

    /// Whether the file may grow to `bytes`, which are then its own.
    pub(super) fn reserve(&mut self, inode: usize, bytes: u64) -> bool {
        let reserved = self.files[inode].reserved;
        let more = bytes.next_multiple_of(BLOCK_BYTES as u64).saturating_sub(reserved);
        if more > 0 && self.faults.space_bytes.is_some_and(|space| self.used() + more > space) {
            return false;
        }
        self.files[inode].reserved += more;
        true
    }

    pub(super) fn change(&mut self, change: Change) {
        self.changed += 1;
        self.changes.push_back((self.changed, change));
        apply(&mut self.names, change);
    }

    pub(super) fn execute(&mut self, user: u64, kind: Kind) -> i32 {
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
            Kind::Exchange(one, other) => match (self.names.get(&one), self.names.get(&other)) {
                (Some(&first), Some(&second)) => {
                    self.change(Change::Exchanged((one, first), (other, second)));
                    0
                }
                _ => -libc::ENOENT,
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

    pub(super) fn open(&mut self, user: u64, file: usize, name: Name, create: bool) -> i32 {
        let inode = match (self.names.get(&name), create) {
            (Some(&inode), false) => inode,
            (None, false) => return -libc::ENOENT,
            (Some(&inode), true) => {
                if matches!(name, Name::Segment(_)) {
                    self.files[inode].cut(0);
                }
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

    pub(super) fn write(&mut self, inode: usize, at: u64, source: &Region, offset: usize, len: usize, crc: u32) -> i32 {
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

    pub(super) fn sync(&mut self, inode: usize, blocks: &[(u64, Block)], length: u64) -> i32 {
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
