//! A reader on a thread of its own, asked and answered over bounded queues: looking for an old entry may take a while, and
//! the thread that wants it has other things to do.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use antelog_protocol::Lsn;

use super::disk::Disk;
use super::mark::Mark;
use super::mend::Rot;
use super::reader::{Answer, ReadError, Reader, Request};
use crate::channel::spsc::{Consumer, Producer, channel};
use crate::node::mailbox::{MailSender, Mailbox, mailbox};
use crate::node::{Parker, Waker};
use crate::transport::Full;

/// Bytes before an answer's data: token, kind, a mark, two numbers.
const ANSWER_BYTES: usize = 56;
/// Room for requests, in bytes.
const REQUESTS_BYTES: usize = 4096;

/// The thread; dropped, it ends.
#[derive(Debug)]
pub struct ReaderThread {
    stop: Arc<AtomicBool>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

/// The asking side.
#[derive(Debug)]
pub struct ReaderClient {
    requests: Producer,
    answers: Consumer,
    /// Longest data of an answer, in bytes.
    bytes_max: usize,
}

/// The first words of a message; what is missing is 0.
fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    }
    words
}

impl ReaderThread {
    /// Starts a thread for `reader`, which wakes the asking thread with `waker` when it has answered. `answers_bytes`, a
    /// power of two, bounds the answers that wait; one answer has at most half of that, and no more than the reader's
    /// buffer. What is rotten is asked of other replicas through `rot`.
    ///
    /// # Errors
    /// When the system has no memory, descriptors or threads left.
    pub fn spawn<D: Disk + Send + 'static>(
        name: &str,
        reader: Reader<D>,
        answers_bytes: usize,
        waker: Waker,
        rot: Option<MailSender<Rot>>,
    ) -> io::Result<(ReaderThread, ReaderClient)> {
        let (parker, own) = Parker::new()?;
        let (requests, asked) = channel(REQUESTS_BYTES, own.clone())?;
        let (told, mut answers) = channel(answers_bytes, waker)?;
        answers.set_producer_waker(own.clone());
        let bytes_max = told.message_bytes_max() - ANSWER_BYTES;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let (answer, given) = mailbox(own.clone());
        let mender = Mender { rot, answer, given, wanted: None, reached: 0 };
        let run = move || Loop { reader, asked, told, parker, stop: stopped, held: None, mender }.run();
        let thread = std::thread::Builder::new().name(name.into()).spawn(run)?;
        Ok((ReaderThread { stop, waker: own, thread: Some(thread) }, ReaderClient { requests, answers, bytes_max }))
    }
}

impl Drop for ReaderThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was told by the panic hook.
            let _ = thread.join();
        }
    }
}

struct Loop<D: Disk> {
    reader: Reader<D>,
    asked: Consumer,
    told: Producer,
    parker: Parker,
    stop: Arc<AtomicBool>,
    /// An answer the queue had no room for.
    held: Option<(u64, Result<Answer, ReadError>)>,
    mender: Mender,
}

/// Has rotten entries replaced before a request is answered that met them.
struct Mender {
    rot: Option<MailSender<Rot>>,
    answer: MailSender<Option<(u16, Vec<u8>)>>,
    given: Mailbox<Option<(u16, Vec<u8>)>>,
    /// The request that waits, and what it met.
    wanted: Option<(u64, ReadError)>,
    /// The request that is at work was mended up to here: what is rotten before is so again.
    reached: u64,
}

impl Mender {
    /// Asks for what an answer lacks; false when it is to be given as it is.
    fn asks<D: Disk>(&mut self, reader: &Reader<D>, token: u64, answer: &Result<Answer, ReadError>) -> bool {
        let reached = std::mem::take(&mut self.reached);
        let (Some(rot), Err(error @ ReadError::Damaged { before, until, .. })) = (&self.rot, answer) else {
            return false;
        };
        let until = reader.repairable().min(*until);
        let may_be = !matches!(reader.answered(), Some(Request::Range { mended: false, .. }));
        let asks = may_be
            && (before.at >= reached && before.at < until)
            && rot.send(Rot::Found { before: *before, until, answer: self.answer.clone() });
        if asks {
            self.wanted = Some((token, *error));
        }
        asks
    }

    /// Puts right what was asked for, if the answer is there and is good: whether it was, and the request with its answer
    /// if it is not.
    fn mend<D: Disk>(&mut self, reader: &mut Reader<D>) -> Option<Result<(), (u64, ReadError)>> {
        let (token, error) = self.wanted?;
        let given = self.given.take()?;
        self.wanted = None;
        let (Some((giver, bytes)), ReadError::Damaged { before, .. }, Some(rot)) = (given, error, &self.rot) else {
            return Some(Err((token, error)));
        };
        Some(match reader.repair(before, &bytes) {
            Ok(()) => {
                rot.send(Rot::Repaired { before, bytes: bytes.len(), giver });
                self.reached = before.at + bytes.len() as u64;
                Ok(())
            }
            Err(error) => {
                rot.send(Rot::NotRepaired { lsn: before.lsn, error });
                Err((token, error))
            }
        })
    }
}

impl<D: Disk> Loop<D> {
    fn run(mut self) {
        let mut fds = Vec::new();
        self.reader.wait_fds(&mut fds);
        while !self.stop.load(Ordering::Acquire) {
            if self.turn() {
                continue;
            }
            let Loop { reader, asked, told, parker, stop, held, mender } = &mut self;
            let needed = held.as_ref().map(|(_, answer)| ANSWER_BYTES + answer.map_or(0, |answer| answer.len));
            parker.park(&fds, None, || {
                stop.load(Ordering::Acquire)
                    || match needed {
                        Some(needed) => told.room() >= needed,
                        None if mender.wanted.is_some() => mender.given.waits(),
                        None => reader.prepare_wait() || !asked.is_empty(),
                    }
            });
        }
    }

    /// Does something; false when there is nothing to do.
    fn turn(&mut self) -> bool {
        if let Some(held) = self.held {
            if !self.tell(&held) {
                return false;
            }
            self.held = None;
        }
        if self.mender.wanted.is_some() {
            match self.mender.mend(&mut self.reader) {
                None => return false,
                Some(Ok(())) => self.reader.redo(),
                Some(Err((token, error))) => self.held = Some((token, Err(error))),
            }
            return true;
        }
        let mut work = false;
        while let Some(message) = self.asked.peek() {
            if !self.reader.request_words(message) {
                break;
            }
            self.asked.consume();
            work = true;
        }
        if let Some(answer) = self.reader.poll() {
            work = true;
            if !self.mender.asks(&self.reader, answer.0, &answer.1) && !self.tell(&answer) {
                self.held = Some(answer);
            }
        }
        work
    }

    fn tell(&mut self, (token, answer): &(u64, Result<Answer, ReadError>)) -> bool {
        let too_long = answer.ok().filter(|a| ANSWER_BYTES + a.len > self.told.message_bytes_max());
        let answer = too_long.map_or(*answer, |answer| Err(ReadError::TooLong { bytes: answer.len }));
        let mut head = [0; ANSWER_BYTES];
        let mark = |m: &Mark| [m.at, m.lsn.0, u64::from(m.crc) | u64::from(m.epoch) << 32];
        let (kind, [a, b, c], d, e) = match &answer {
            Ok(answer) => (0, mark(&answer.begins), 0, 0),
            Err(ReadError::Trimmed { first }) => (1, mark(first), 0, 0),
            Err(ReadError::Beyond { written }) => (2, [0; 3], *written, 0),
            Err(ReadError::Damaged { segment, before, until }) => (3, mark(before), *until, *segment),
            Err(ReadError::TooLong { bytes }) => (4, [0; 3], *bytes as u64, 0),
            Err(ReadError::Failed { errno }) => (5, [0; 3], u64::from(errno.unsigned_abs()), 0),
        };
        for (word, value) in head.chunks_exact_mut(8).zip([*token, kind, a, b, c, d, e]) {
            word.copy_from_slice(&value.to_le_bytes());
        }
        let pushed = match answer {
            Ok(answer) if answer.len > 0 => self.told.push_from(&head, self.reader.buffer(), answer.offset, answer.len),
            _ => self.told.push(&[&head]),
        };
        self.told.publish();
        pushed.is_ok()
    }
}

impl<D: Disk> Reader<D> {
    /// Takes a request as a client wrote it; false when there is no room for it.
    fn request_words(&mut self, message: &[u8]) -> bool {
        let [token, kind, a, b] = words(message);
        let request = match kind {
            0 => Request::Entries { lsn: Lsn(a), bytes_max: b as usize },
            _ => Request::Range { from: a, to: b, mended: kind == 1 },
        };
        self.request(token, request)
    }
}

impl ReaderClient {
    /// Asks for something: a token, a kind and two numbers on the queue. Ask for no more than half of the queue for answers.
    ///
    /// # Errors
    /// `Full`: too many requests wait; answers come first.
    pub fn request(&mut self, token: u64, request: Request) -> Result<(), Full> {
        let message = self.bytes_max;
        let (kind, a, b) = match request {
            Request::Entries { lsn, bytes_max } => (0, lsn.0, bytes_max.min(message) as u64),
            Request::Range { from, to, mended } => {
                (if mended { 1 } else { 2 }, from, to.min(from.saturating_add(message as u64)))
            }
        };
        let words = [token, kind, a, b].map(u64::to_le_bytes);
        self.requests.push(&[&words[0], &words[1], &words[2], &words[3]])?;
        self.requests.publish();
        Ok(())
    }

    /// Whether nothing is answered: to be looked at before sleeping.
    pub fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }

    /// The next answer, in the order of requests: its token, and before which entry its bytes begin, or why there are none.
    /// The bytes are handed to `take` where they lie.
    pub fn poll<R>(&mut self, take: impl FnOnce(u64, Result<(Mark, &[u8]), ReadError>) -> R) -> Option<R> {
        let message = self.answers.peek()?;
        let [token, kind, at, lsn, chain, number, segment] = words(message);
        let mark = Mark { at, lsn: Lsn(lsn), crc: chain as u32, epoch: (chain >> 32) as u32 };
        let answer = match kind {
            0 => Ok((mark, &message[ANSWER_BYTES..])),
            1 => Err(ReadError::Trimmed { first: mark }),
            2 => Err(ReadError::Beyond { written: number }),
            3 => Err(ReadError::Damaged { segment, before: mark, until: number }),
            4 => Err(ReadError::TooLong { bytes: number as usize }),
            _ => Err(ReadError::Failed { errno: number as i32 }),
        };
        let result = take(token, answer);
        self.answers.consume();
        Some(result)
    }
}
