//! The client's thread: takes commands, drives the session, keeps promises, and parks when there is nothing to do.
//!
//! The queue of commands needs no bound of its own: appends hold a permit of their shard from before they are queued
//! until they are answered, and every other command belongs to a thread that waits for it or to a subscription.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use antelog_core::client::session::{AppendError, Dialer, Session};
use antelog_core::client::{Record, SessionHandler, Slot, SubscriptionId};
use antelog_core::node::{Parker, Waker, now_ns};
use antelog_core::transport::Transport;
use antelog_protocol::client::{Event, Scope};
use antelog_protocol::{Position, Refusal, ShardId};

use super::completion::{Permit, Promise, lock};
use super::error::Error;
use super::subscription::{Fed, Feed};

/// An append on its way.
#[derive(Debug)]
pub(super) struct Append {
    pub(super) shard: ShardId,
    pub(super) record: Record,
    pub(super) promise: Promise<Position>,
    pub(super) permit: Permit,
}

/// What the thread is asked to do.
#[derive(Debug)]
pub(super) enum Command {
    Append(Append),
    Subscribe { token: u64, scope: Scope, from: Position, feed: Feed },
    Unsubscribe { token: u64 },
    Read { token: u64, position: Position, promise: Promise<Slot> },
    Tail { token: u64, promise: Promise<Position> },
    Cancel { token: u64 },
}

#[derive(Debug, Default)]
struct Queue {
    commands: Vec<Command>,
    stop: bool,
    ended: bool,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// Addresses that cannot be reached, and why.
    problems: Mutex<BTreeMap<String, String>>,
}

/// How others reach the thread.
#[derive(Clone, Debug)]
pub(super) struct Handle {
    shared: Arc<Shared>,
    waker: Waker,
}

impl Handle {
    pub(super) fn new(waker: Waker) -> Handle {
        Handle { shared: Arc::default(), waker }
    }

    /// Queues a command. An error when the thread has ended.
    pub(super) fn send(&self, command: Command) -> Result<(), Error> {
        let mut queue = lock(&self.shared.queue);
        if queue.ended {
            // Not dropped under the lock: a broken promise runs code of its own.
            drop(queue);
            return Err(Error::Closed);
        }
        queue.commands.push(command);
        drop(queue);
        self.wake();
        Ok(())
    }

    pub(super) fn wake(&self) {
        self.waker.wake();
    }

    pub(super) fn stop(&self) {
        lock(&self.shared.queue).stop = true;
        self.wake();
    }

    /// What is wrong with the connections, in one line.
    pub(super) fn problem(&self) -> Option<String> {
        let problems = lock(&self.shared.problems);
        let lines: Vec<&str> = problems.values().map(String::as_str).collect();
        (!lines.is_empty()).then(|| lines.join("; "))
    }

    /// Takes all commands into `into`; true when the thread is to stop.
    fn take(&self, into: &mut Vec<Command>) -> bool {
        let mut queue = lock(&self.shared.queue);
        std::mem::swap(&mut queue.commands, into);
        queue.stop
    }

    fn waiting(&self) -> bool {
        let queue = lock(&self.shared.queue);
        queue.stop || !queue.commands.is_empty()
    }
}

/// Marks the thread as ended, however it ends, and breaks the promises that are queued.
struct Ended(Handle);

impl Drop for Ended {
    fn drop(&mut self) {
        let mut queue = lock(&self.0.shared.queue);
        queue.ended = true;
        let left = std::mem::take(&mut queue.commands);
        drop(queue);
        drop(left);
    }
}

/// What the session's answers are for.
struct Desk {
    handle: Handle,
    /// Per shard, in the order of their numbers.
    appends: BTreeMap<ShardId, VecDeque<(u64, Append)>>,
    feeds: Vec<Fed>,
    reads: BTreeMap<u64, Promise<Slot>>,
    tails: BTreeMap<u64, Promise<Position>>,
}

impl Desk {
    fn settle(&mut self, shard: ShardId, seq: u64, result: Result<Position, Error>) {
        let Some(queue) = self.appends.get_mut(&shard) else { return };
        let Some(at) = queue.iter().position(|(number, _)| *number == seq) else { return };
        let Some((_, Append { promise, permit, .. })) = queue.remove(at) else { return };
        // The permit first: whoever waits for the result may append the next record at once.
        drop(permit);
        promise.keep(result);
    }

    fn feed(&self, id: SubscriptionId) -> Option<&Feed> {
        self.feeds.iter().find(|fed| fed.id == id).map(|fed| &fed.feed)
    }

    fn end(&mut self, id: SubscriptionId, error: Error) {
        if let Some(at) = self.feeds.iter().position(|fed| fed.id == id) {
            self.feeds.swap_remove(at).feed.end(error);
        }
    }
}

impl SessionHandler for Desk {
    fn on_acknowledged(&mut self, shard: ShardId, seq: u64, position: Position) {
        self.settle(shard, seq, Ok(position));
    }

    fn on_refused(&mut self, shard: ShardId, seq: u64, refusal: Refusal) {
        self.settle(shard, seq, Err(Error::Refused { shard, refusal }));
    }

    fn on_event(&mut self, subscription: SubscriptionId, event: Event<Record>) {
        if let Some(feed) = self.feed(subscription) {
            feed.push(event);
        }
    }

    fn on_trimmed(&mut self, subscription: SubscriptionId, head: Position) {
        self.end(subscription, Error::Trimmed { head });
    }

    fn on_read(&mut self, token: u64, _: Position, slot: Slot) {
        if let Some(promise) = self.reads.remove(&token) {
            promise.keep(Ok(slot));
        }
    }

    fn on_tail(&mut self, token: u64, position: Position) {
        if let Some(promise) = self.tails.remove(&token) {
            promise.keep(Ok(position));
        }
    }

    fn on_connection(&mut self, address: &str, error: Option<&str>) {
        let mut problems = lock(&self.handle.shared.problems);
        match error {
            Some(error) => problems.insert(address.to_owned(), format!("{address}: {error}")),
            None => problems.remove(address),
        };
    }

    fn on_unknown_shard(&mut self, subscription: SubscriptionId, shard: ShardId) {
        self.end(subscription, Error::UnknownShard { shard, shards: Vec::new() });
    }

    fn ready(&mut self, subscription: SubscriptionId) -> bool {
        self.feed(subscription).is_none_or(Feed::ready)
    }
}

/// Everything the thread owns.
struct Worker<T: Transport, D> {
    session: Session<T, D>,
    desk: Desk,
    /// Appends that the session could not take yet, in order.
    waiting: BTreeMap<ShardId, VecDeque<Append>>,
}

/// Runs until it is told to stop.
pub(super) fn run<T: Transport, D: Dialer<T::Link>>(session: Session<T, D>, mut parker: Parker, handle: Handle) {
    let _ended = Ended(handle.clone());
    let desk = Desk {
        handle: handle.clone(),
        appends: BTreeMap::new(),
        feeds: Vec::new(),
        reads: BTreeMap::new(),
        tails: BTreeMap::new(),
    };
    let mut worker = Worker { session, desk, waiting: BTreeMap::new() };
    worker.session.set_waker(parker.waker());
    let mut fds = Vec::new();
    worker.session.wait_fds(&mut fds);
    let mut commands = Vec::new();
    while !handle.take(&mut commands) {
        worker.append_waiting();
        let mut work = commands.len();
        for command in commands.drain(..) {
            worker.act(command);
        }
        work += worker.session.duty_cycle(now_ns(), &mut worker.desk);
        if work == 0 {
            let timeout_ns = worker.session.deadline_ns().map(|at| at.saturating_sub(now_ns()));
            parker.park(&fds, timeout_ns, || handle.waiting() || worker.session.prepare_wait());
        }
    }
}

impl<T: Transport, D: Dialer<T::Link>> Worker<T, D> {
    fn act(&mut self, command: Command) {
        match command {
            Command::Append(append) => match self.waiting.get_mut(&append.shard) {
                // Order within a shard is the order of the calls.
                Some(queue) => queue.push_back(append),
                None => {
                    if let Some(append) = self.append(append) {
                        self.waiting.entry(append.shard).or_default().push_back(append);
                    }
                }
            },
            Command::Subscribe { token, scope, from, feed } => {
                let id = self.session.subscribe(scope, from);
                self.desk.feeds.push(Fed { id, token, feed });
            }
            Command::Unsubscribe { token } => {
                if let Some(at) = self.desk.feeds.iter().position(|fed| fed.token == token) {
                    self.session.unsubscribe(self.desk.feeds.swap_remove(at).id);
                }
            }
            Command::Read { token, position, promise } => {
                self.desk.reads.insert(token, promise);
                self.session.read(token, position);
            }
            Command::Tail { token, promise } => {
                self.desk.tails.insert(token, promise);
                self.session.tail(token);
            }
            Command::Cancel { token } => {
                self.session.cancel(token);
                self.desk.reads.remove(&token);
                self.desk.tails.remove(&token);
            }
        }
    }

    /// Appends; gives the append back when the session cannot take it yet.
    fn append(&mut self, append: Append) -> Option<Append> {
        let Append { shard, ref record, .. } = append;
        match self.session.append_record(shard, record) {
            Ok(seq) => {
                self.desk.appends.entry(shard).or_default().push_back((seq, append));
                return None;
            }
            Err(AppendError::Full | AppendError::NotConnectedYet) => return Some(append),
            Err(AppendError::TooLarge { limit_bytes }) => {
                let bytes = record.len();
                append.promise.keep(Err(Error::TooLarge { bytes, limit_bytes }));
            }
            Err(AppendError::UnknownShard(shard)) => {
                append.promise.keep(Err(Error::UnknownShard { shard, shards: Vec::new() }));
            }
        }
        None
    }

    fn append_waiting(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        for (shard, mut queue) in std::mem::take(&mut self.waiting) {
            while let Some(append) = queue.pop_front() {
                if let Some(append) = self.append(append) {
                    queue.push_front(append);
                    self.waiting.insert(shard, queue);
                    break;
                }
            }
        }
    }
}
