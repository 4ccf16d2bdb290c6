//! The client's thread: takes commands, drives the session, keeps promises, and parks when there is nothing to do.
//!
//! The queue of commands needs no bound of its own: appends hold a permit of their shard from before they are queued
//! until they are answered, and every other command belongs to a thread that waits for it or to a subscription.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use antelog_core::client::session::{AppendError, Dialer, Session};
use antelog_core::client::{Membership, Record, SessionHandler, Slot, SubscriptionId};
use antelog_core::node::{Parker, Waker, now_ns};
use antelog_core::transport::Transport;
use antelog_protocol::client::{Event, Scope};
use antelog_protocol::{Change, ChangeError, ClientId, Outcome, Position, Refusal, ShardId};

use super::appends::{Append, Appends, Sent};
use super::completion::{Promise, lock};
use super::error::Error;
use super::subscription::{Fed, Feed, OnUnavailable};

/// What the thread is asked to do.
#[derive(Debug)]
pub(super) enum Command {
    Append(Append),
    Subscribe {
        token: u64,
        scope: Scope,
        from: Position,
        on_unavailable: OnUnavailable,
        feed: Feed,
    },
    Unsubscribe {
        token: u64,
    },
    Read {
        token: u64,
        position: Position,
        promise: Promise<Slot>,
    },
    Tail {
        token: u64,
        promise: Promise<Position>,
    },
    /// What became of an append.
    Outcome {
        token: u64,
        shard: ShardId,
        client: ClientId,
        seq: u64,
        promise: Promise<Outcome>,
    },
    /// A change, or the question for the membership.
    Change {
        token: u64,
        change: Option<Change>,
        promise: Promise<Membership>,
    },
    Cancel {
        token: u64,
    },
}

#[derive(Debug, Default)]
struct Queue {
    commands: Vec<Command>,
    /// A reader has made room: something held back may be handed out.
    look: bool,
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

    /// A reader has made room. Noted, not only rung: the thread may have found the room missing and not be asleep yet.
    pub(super) fn look(&self) {
        lock(&self.shared.queue).look = true;
        self.wake();
    }

    fn wake(&self) {
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
        queue.look = false;
        queue.stop
    }

    fn waiting(&self) -> bool {
        let queue = lock(&self.shared.queue);
        queue.stop || queue.look || !queue.commands.is_empty()
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
    appends: Appends,
    feeds: Vec<Fed>,
    reads: BTreeMap<u64, Promise<Slot>>,
    tails: BTreeMap<u64, Promise<Position>>,
    changes: BTreeMap<u64, Promise<Membership>>,
    outcomes: BTreeMap<u64, Promise<Outcome>>,
    /// Subscriptions that ended here and not yet at the session.
    ended: Vec<SubscriptionId>,
}

impl Desk {
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
        self.appends.on_acknowledged(shard, seq, position);
    }

    fn on_refused(&mut self, shard: ShardId, seq: u64, refusal: Refusal) {
        self.appends.on_refused(shard, seq, refusal);
    }

    fn on_unknown(&mut self, shard: ShardId, seq: u64) {
        self.appends.on_unknown(shard, seq);
    }

    fn on_outcome(&mut self, token: u64, outcome: Outcome) {
        if let Some(promise) = self.outcomes.remove(&token) {
            promise.keep(Ok(outcome));
        }
    }

    fn on_event(&mut self, subscription: SubscriptionId, event: Event<Record>) {
        if let Event::Unavailable { from, to } = event
            && self.feeds.iter().any(|fed| fed.id == subscription && fed.on_unavailable == OnUnavailable::Stop)
        {
            self.ended.push(subscription);
            return self.end(subscription, Error::Unavailable { from, to });
        }
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

    fn on_membership(&mut self, token: u64, answer: Result<Membership, ChangeError>) {
        if let Some(promise) = self.changes.remove(&token) {
            promise.keep(answer.map_err(Error::NotChanged));
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

    fn on_crowded(&mut self, subscription: SubscriptionId, subscriptions_max: u32) {
        self.end(subscription, Error::Crowded { subscriptions_max });
    }

    fn ready(&mut self, subscription: SubscriptionId) -> bool {
        self.feed(subscription).is_none_or(Feed::ready)
    }
}

/// Everything the thread owns.
struct Worker<T: Transport, D> {
    session: Session<T, D>,
    desk: Desk,
}

/// Runs until it is told to stop. Appends that name no shard begin with `own`.
pub(super) fn run<T: Transport, D: Dialer<T::Link>>(
    session: Session<T, D>,
    own: ShardId,
    mut parker: Parker,
    handle: Handle,
) {
    let _ended = Ended(handle.clone());
    let desk = Desk {
        handle: handle.clone(),
        appends: Appends::new(session.client(), own),
        feeds: Vec::new(),
        reads: BTreeMap::new(),
        tails: BTreeMap::new(),
        changes: BTreeMap::new(),
        outcomes: BTreeMap::new(),
        ended: Vec::new(),
    };
    let mut worker = Worker { session, desk };
    worker.session.set_waker(parker.waker());
    let mut fds = Vec::new();
    let mut commands = Vec::new();
    while !handle.take(&mut commands) {
        worker.desk.appends.send_waiting(|shard, append| send(&mut worker.session, shard, append));
        let mut work = commands.len();
        for command in commands.drain(..) {
            worker.act(command);
        }
        work += worker.session.duty_cycle(now_ns(), &mut worker.desk);
        for subscription in worker.desk.ended.drain(..) {
            worker.session.unsubscribe(subscription);
        }
        if work == 0 {
            let timeout_ns = worker.session.deadline_ns().map(|at| at.saturating_sub(now_ns()));
            // Looked up each time: a transport that loses its device closes that device's descriptor.
            fds.clear();
            worker.session.wait_fds(&mut fds);
            parker.park(&fds, timeout_ns, || handle.waiting() || worker.session.prepare_wait());
        }
    }
}

impl<T: Transport, D: Dialer<T::Link>> Worker<T, D> {
    fn act(&mut self, command: Command) {
        match command {
            Command::Append(append) => {
                self.desk.appends.append(append, |shard, append| send(&mut self.session, shard, append));
            }
            Command::Subscribe { token, scope, from, on_unavailable, feed } => {
                let id = self.session.subscribe(scope, from);
                self.desk.feeds.push(Fed { id, token, on_unavailable, feed });
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
            Command::Outcome { token, shard, client, seq, promise } => {
                self.desk.outcomes.insert(token, promise);
                self.session.outcome(token, shard, client, seq);
            }
            Command::Change { token, change, promise } => {
                self.desk.changes.insert(token, promise);
                match change {
                    Some(change) => self.session.change(token, change),
                    None => self.session.membership(token),
                }
            }
            Command::Cancel { token } => {
                self.session.cancel(token);
                self.desk.reads.remove(&token);
                self.desk.tails.remove(&token);
                self.desk.changes.remove(&token);
                self.desk.outcomes.remove(&token);
            }
        }
    }
}

/// Hands an append to the session.
fn send<T: Transport, D: Dialer<T::Link>>(session: &mut Session<T, D>, shard: ShardId, append: Append) -> Sent {
    let error = match session.append_record(shard, &append.record) {
        Ok(seq) => return Sent::As(seq, append),
        Err(AppendError::Full | AppendError::NotConnectedYet) => return Sent::NotYet(append),
        Err(AppendError::TooLarge { limit_bytes }) => Error::TooLarge { bytes: append.record.len(), limit_bytes },
        Err(AppendError::Lost(shard)) if append.shard.is_none() => {
            return match session.another_shard(shard) {
                Some(instead) => Sent::Instead(append, instead),
                None => Sent::NotYet(append),
            };
        }
        Err(AppendError::Lost(shard)) => Error::ShardLost { shard },
        Err(AppendError::UnknownShard(shard)) => Error::UnknownShard { shard, shards: Vec::new() },
    };
    append.settle(Err(error));
    Sent::Never
}

#[cfg(test)]
mod tests {
    use antelog_core::node::Waker;

    use super::*;

    #[test]
    fn room_that_a_reader_makes_before_the_thread_sleeps_is_not_missed() {
        let handle = Handle::new(Waker::none());
        assert!(!handle.waiting());
        // The thread has found a buffer full and is on its way to bed; nobody can ring it out yet.
        handle.look();
        assert!(handle.waiting(), "what is looked at before falling asleep says so");
        assert!(!handle.take(&mut Vec::new()) && !handle.waiting());
    }
}
