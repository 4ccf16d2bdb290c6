//! A journal in a folder: one file, appended to and flushed by a thread of its own, replaced by a shorter one when it
//! has grown.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Journal, Record, Recovered, put_clean, put_identity, put_life, put_record};
use crate::node::idle::Waker;
use crate::storage::is_full;

/// How often a full disk is tried again.
const RETRY: Duration = Duration::from_millis(50);
/// Bytes after which a file is replaced, unless the snapshot it begins with is larger.
const LONG_BYTES: u64 = 4 << 20;

/// What the thread is asked to do.
enum Work {
    Append { number: u64, bytes: Vec<u8> },
    Replace { number: u64, bytes: Vec<u8> },
}

/// What the thread tells.
#[derive(Debug, Default)]
struct Told {
    kept: AtomicU64,
    /// The disk is full: nothing more is kept until there is room.
    full: AtomicBool,
    /// The member ends: there is no waiting for room.
    closing: AtomicBool,
    failure: Mutex<Option<String>>,
}

/// See the module's text.
#[derive(Debug)]
pub struct FileJournal {
    id: u64,
    life: u128,
    work: Option<Sender<Work>>,
    thread: Option<JoinHandle<()>>,
    told: Arc<Told>,
    /// Bytes of the file, and how many it began with.
    bytes: u64,
    began: u64,
}

/// The machine's life: another one after every start of its kernel, 0 if it does not tell.
fn machine_life() -> u128 {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap_or(0)
}

/// What could not be done, and the system's number for why.
#[derive(Debug)]
struct Failed {
    text: String,
    errno: Option<i32>,
}

impl From<Failed> for String {
    fn from(failed: Failed) -> String {
        failed.text
    }
}

fn failed(what: &str, path: &Path) -> impl FnOnce(std::io::Error) -> Failed {
    let text = format!("cannot {what} {}", path.display());
    move |error| Failed { text: format!("{text}: {error}"), errno: error.raw_os_error() }
}

/// The file's name with this number.
fn file_name(number: u64) -> String {
    format!("group-{number:08}.log")
}

/// The newest journal of a folder, and its number.
fn newest(folder: &Path) -> Result<Option<(u64, PathBuf)>, Failed> {
    let mut newest = None;
    for entry in fs::read_dir(folder).map_err(failed("read the folder", folder))? {
        let path = entry.map_err(failed("read the folder", folder))?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let number = name.strip_prefix("group-").and_then(|n| n.strip_suffix(".log")).and_then(|n| n.parse().ok());
        if let Some(number) = number {
            newest = newest.max(Some((number, path)));
        }
    }
    Ok(newest)
}

/// Writes a file as a whole: under another name first, so that it is there completely or not at all.
fn write_whole(folder: &Path, number: u64, bytes: &[u8]) -> Result<File, Failed> {
    let (path, begun) = (folder.join(file_name(number)), folder.join("group.new"));
    let mut file = File::create(&begun).map_err(failed("create", &begun))?;
    file.write_all(bytes).and_then(|()| file.sync_data()).map_err(failed("write", &begun))?;
    fs::rename(&begun, &path).map_err(failed("rename to", &path))?;
    File::open(folder).and_then(|f| f.sync_all()).map_err(failed("flush the folder", folder))?;
    Ok(file)
}

impl FileJournal {
    /// Opens the journal of a folder, which is made if it is not there. `id` is the member's identity if it has none yet.
    /// What is `flushed` survives a crash of the machine; what is only written survives one of the process, and after one
    /// of the machine the member begins without memory, as another. `waker` is called when something was kept.
    ///
    /// # Errors
    /// One line: what was tried, on which file, and what to do.
    pub fn open(folder: &Path, id: u64, flushed: bool, waker: Waker) -> Result<(FileJournal, Recovered), String> {
        fs::create_dir_all(folder).map_err(failed("make the folder", folder))?;
        let life = machine_life();
        let mut recovered = Recovered::default();
        let mut number = 0;
        let mut file = None;
        let mut bytes = Vec::new();
        if let Some((newest, path)) = newest(folder)? {
            number = newest;
            let mut open = OpenOptions::new().read(true).append(true).open(&path).map_err(failed("open", &path))?;
            open.read_to_end(&mut bytes).map_err(failed("read", &path))?;
            let (read, whole) = Recovered::read(&bytes).map_err(|e| format!("{}: {e}", path.display()))?;
            // What was not flushed may be gone, and votes with it.
            let trusted = flushed || read.clean || read.life == life;
            if read.id != 0 && trusted {
                open.set_len(whole as u64).map_err(failed("cut the torn end of", &path))?;
                bytes.truncate(whole);
                (recovered, file) = (read, Some(open));
            }
        }
        let id = if recovered.id == 0 { id } else { recovered.id };
        let mut start = Vec::new();
        put_life(&mut start, life);
        let file = match file {
            Some(mut file) => {
                file.write_all(&start).and_then(|()| file.sync_data()).map_err(failed("write to", folder))?;
                bytes.extend_from_slice(&start);
                file
            }
            None => {
                bytes.clear();
                put_identity(&mut bytes, id);
                bytes.extend_from_slice(&start);
                number += 1;
                write_whole(folder, number, &bytes)?
            }
        };
        let told = Arc::new(Told::default());
        let (work, todo) = channel();
        let keeper = Keeper {
            folder: folder.to_owned(),
            number,
            file,
            flushed,
            told: told.clone(),
            waker,
            bytes: bytes.len() as u64,
        };
        keeper.remove_others();
        let thread = std::thread::Builder::new().name("antelog-journal".into()).spawn(move || keeper.run(&todo));
        let thread = thread.map_err(|e| format!("cannot start the journal's thread: {e}"))?;
        let (bytes, began) = (bytes.len() as u64, LONG_BYTES / 2);
        let (work, thread) = (Some(work), Some(thread));
        Ok((FileJournal { id, life, work, thread, told, bytes, began }, recovered))
    }

    fn hand_over(&mut self, work: Work) {
        if let Some(sender) = &self.work {
            // A thread that is gone has said why.
            let _ = sender.send(work);
        }
    }
}

impl Journal for FileJournal {
    fn append(&mut self, number: u64, record: &Record<'_>) {
        let mut bytes = Vec::new();
        put_record(&mut bytes, record);
        self.bytes += bytes.len() as u64;
        self.hand_over(Work::Append { number, bytes });
    }

    fn replace(&mut self, number: u64, record: &Record<'_>) {
        let mut bytes = Vec::new();
        put_identity(&mut bytes, self.id);
        put_life(&mut bytes, self.life);
        put_record(&mut bytes, record);
        (self.bytes, self.began) = (bytes.len() as u64, bytes.len() as u64);
        self.hand_over(Work::Replace { number, bytes });
    }

    fn kept(&mut self, _now_ns: u64) -> Result<u64, String> {
        let failure = self.told.failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match failure {
            Some(failure) => Err(failure),
            None => Ok(self.told.kept.load(Ordering::Acquire)),
        }
    }

    fn is_long(&self) -> bool {
        self.bytes > LONG_BYTES.max(2 * self.began)
    }

    fn is_full(&self) -> bool {
        self.told.full.load(Ordering::Acquire)
    }

    fn deadline_ns(&self) -> Option<u64> {
        None
    }

    fn close(&mut self) {
        self.told.closing.store(true, Ordering::Release);
        self.work = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for FileJournal {
    fn drop(&mut self) {
        self.told.closing.store(true, Ordering::Release);
        self.work = None;
    }
}

/// The thread that writes.
struct Keeper {
    folder: PathBuf,
    number: u64,
    file: File,
    /// Of the file: whole records.
    bytes: u64,
    flushed: bool,
    told: Arc<Told>,
    waker: Waker,
}

impl Keeper {
    fn run(mut self, todo: &Receiver<Work>) {
        let result = self.keep(todo).and_then(|()| {
            let mut bytes = Vec::new();
            put_clean(&mut bytes);
            self.write(&bytes)?;
            Ok(self.file.sync_data().map_err(failed("flush", &self.path()))?)
        });
        if let Err(failure) = result {
            *self.told.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
        }
        self.waker.wake();
    }

    /// Keeps what it is given until nobody gives any more. What came meanwhile is flushed together.
    fn keep(&mut self, todo: &Receiver<Work>) -> Result<(), String> {
        while let Ok(first) = todo.recv() {
            let mut newest = 0;
            for work in std::iter::once(first).chain(todo.try_iter()) {
                match work {
                    Work::Append { number, bytes } => {
                        self.write(&bytes)?;
                        newest = number;
                    }
                    Work::Replace { number, bytes } => {
                        self.number += 1;
                        self.file = self.patiently(|keeper| write_whole(&keeper.folder, keeper.number, &bytes))?;
                        self.bytes = bytes.len() as u64;
                        self.remove_others();
                        newest = number;
                    }
                }
            }
            if self.flushed {
                self.file.sync_data().map_err(failed("flush", &self.path()))?;
            }
            self.told.kept.store(newest, Ordering::Release);
            self.waker.wake();
        }
        Ok(())
    }

    fn path(&self) -> PathBuf {
        self.folder.join(file_name(self.number))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.patiently(|keeper| {
            let written = keeper.file.write_all(bytes);
            // Half a record would end the journal for whoever reads it.
            let cut = if written.is_err() { keeper.cut() } else { Ok(()) };
            cut.and(written).map_err(failed("write to", &keeper.path()))
        })?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Ends the file behind its last whole record.
    fn cut(&mut self) -> std::io::Result<()> {
        self.file.set_len(self.bytes)?;
        self.file.seek(SeekFrom::Start(self.bytes)).map(drop)
    }

    /// Tries until a full disk has room: until then nothing counts as kept.
    fn patiently<T>(&mut self, mut work: impl FnMut(&mut Keeper) -> Result<T, Failed>) -> Result<T, String> {
        loop {
            let result = work(self);
            let is_full = result.as_ref().is_err_and(|failed| failed.errno.is_some_and(is_full));
            let waits = is_full && !self.told.closing.load(Ordering::Acquire);
            if self.told.full.swap(waits, Ordering::AcqRel) != waits {
                self.waker.wake();
            }
            if !waits {
                return result.map_err(|failed| failed.text);
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Removes older files; one that cannot be removed harms nobody.
    fn remove_others(&self) {
        let own = file_name(self.number);
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        for path in entries.flatten().map(|e| e.path()) {
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            if name.starts_with("group") && name != own {
                let _ = fs::remove_file(&path);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use raft::eraftpb::{ConfState, Entry, HardState, Snapshot};

    use super::*;

    /// A folder that is removed with the value.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("antelog-journal-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            Folder(path)
        }

        fn open(&self, flushed: bool) -> (FileJournal, Recovered) {
            FileJournal::open(&self.0, 7, flushed, Waker::none()).unwrap()
        }

        fn file(&self) -> PathBuf {
            newest(&self.0).unwrap().unwrap().1
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn first(journal: &mut FileJournal) {
        let mut snapshot = Snapshot::default();
        let meta = snapshot.mut_metadata();
        (meta.index, meta.term) = (1, 1);
        meta.set_conf_state(ConfState { voters: vec![7], ..ConfState::default() });
        let hard = HardState { term: 1, ..HardState::default() };
        journal.append(1, &Record { snapshot: &snapshot, entries: &[], hard: Some(&hard) });
        append(journal, 2, 2);
    }

    fn append(journal: &mut FileJournal, number: u64, index: u64) {
        let entry = Entry { index, term: 1, data: vec![9; 1000].into(), ..Entry::default() };
        journal.append(number, &Record { snapshot: &Snapshot::default(), entries: &[entry], hard: None });
    }

    #[test]
    fn a_journal_is_read_again_and_a_torn_end_is_cut() {
        let folder = Folder::new("again");
        let (mut journal, before) = folder.open(true);
        assert!(before.is_blank());
        first(&mut journal);
        journal.close();
        assert_eq!(journal.kept(0), Ok(2));
        let whole = fs::read(folder.file()).unwrap();
        fs::write(folder.file(), &whole[..whole.len() - 15]).unwrap();
        let (mut journal, read) = folder.open(true);
        assert_eq!((read.id, read.entries.len(), read.clean), (7, 0, false), "the last entry was torn");
        append(&mut journal, 1, 2);
        journal.close();
        let (_, read) = folder.open(true);
        assert_eq!((read.entries.len(), read.clean), (1, true));
    }

    #[test]
    fn a_long_one_is_replaced_by_a_short_one() {
        let folder = Folder::new("short");
        let (mut journal, _) = folder.open(true);
        first(&mut journal);
        let mut number = 2;
        while !journal.is_long() {
            number += 1;
            append(&mut journal, number, number);
        }
        let mut snapshot = Snapshot { data: b"state"[..].into(), ..Snapshot::default() };
        let meta = snapshot.mut_metadata();
        (meta.index, meta.term) = (number, 1);
        meta.set_conf_state(ConfState { voters: vec![7], ..ConfState::default() });
        journal.replace(number + 1, &Record { snapshot: &snapshot, entries: &[], hard: None });
        assert!(!journal.is_long());
        journal.close();
        assert!(fs::metadata(folder.file()).unwrap().len() < 1000);
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1, "the long one is gone");
        let (_, read) = folder.open(true);
        assert_eq!((read.snapshot.get_metadata().index, read.id), (number, 7));
    }

    /// `mount` with these options, on the folder.
    fn mount(options: &str, folder: &Path) -> bool {
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(folder);
        mount.output().is_ok_and(|done| done.status.success())
    }

    #[test]
    fn a_full_disk_keeps_nothing_until_it_has_room_and_no_half_record_stays() {
        let folder = Folder::new("full");
        fs::create_dir_all(&folder.0).unwrap();
        if !mount("size=65536", &folder.0) {
            eprintln!("only root can mount a small file system: skipped");
            return;
        }
        let (mut journal, _) = folder.open(true);
        first(&mut journal);
        (3..=100).for_each(|number| append(&mut journal, number, number));
        while !journal.is_full() {
            std::thread::sleep(RETRY);
        }
        let kept = journal.kept(0).unwrap();
        assert!(kept < 100, "100 KB do not fit into 64");
        assert!(mount("remount,size=1048576", &folder.0));
        while journal.kept(0).unwrap() < 100 {
            std::thread::sleep(RETRY);
        }
        assert!(!journal.is_full());
        journal.close();
        let (_, read) = folder.open(true);
        assert_eq!((read.entries.len(), read.clean), (99, true));
        drop(journal);
        let _ = std::process::Command::new("umount").arg("-l").arg(&folder.0).status();
    }

    #[test]
    fn what_was_not_flushed_is_trusted_only_while_the_machine_lives() {
        let folder = Folder::new("life");
        let (mut journal, _) = folder.open(false);
        first(&mut journal);
        journal.close();
        assert_eq!(journal.kept(0), Ok(2), "written, if not flushed");
        // As if the machine had ended before the writer did.
        let mut bytes = Vec::new();
        put_life(&mut bytes, 1);
        OpenOptions::new().append(true).open(folder.file()).unwrap().write_all(&bytes).unwrap();
        assert!(folder.open(false).1.is_blank());
    }
}
