//! A subscription of the library: a bounded buffer between the client's thread and the one that reads.
//!
//! The reader takes everything buffered in one go and then works without a lock. A full buffer stops the session from
//! handing out more to this subscription; the stream's credit then runs out and the log stops sending. Nothing is dropped.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use antelog_core::client::{Record, SubscriptionId};
use antelog_protocol::client::Event;

use super::Client;
use super::completion::{deadline, lock, wait};
use super::error::Error;
use super::worker::Command;

/// What an event without a record counts in a buffer, in bytes; also added to every record.
const EVENT_BYTES: usize = 64;

#[derive(Debug, Default)]
struct Buffer {
    events: VecDeque<Event<Record>>,
    bytes: usize,
    /// The reader waits for an event.
    reader_waits: bool,
    /// The session waits for room.
    session_waits: bool,
    end: Option<Error>,
}

#[derive(Debug)]
struct Shared {
    buffer: Mutex<Buffer>,
    filled: Condvar,
    bytes_max: usize,
}

/// What a subscription does when it comes to records that are bound and that nobody has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnUnavailable {
    /// It ends there, with [`Error::Unavailable`].
    #[default]
    Stop,
    /// It says so, with [`Event::Unavailable`], and goes on behind them.
    Skip,
}

/// How to subscribe. [`SubscribeOptions::default`] has the defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubscribeOptions {
    /// What to do about records that nobody has.
    pub on_unavailable: OnUnavailable,
}

/// The session's side. Dropping it ends the subscription with [`Error::Closed`].
#[derive(Debug)]
pub(super) struct Feed(Arc<Shared>);

impl Feed {
    /// Whether there is room; if not, the reader will ask the thread to look again.
    pub(super) fn ready(&self) -> bool {
        let mut buffer = lock(&self.0.buffer);
        let ready = buffer.bytes < self.0.bytes_max;
        buffer.session_waits = !ready;
        ready
    }

    pub(super) fn push(&self, event: Event<Record>) {
        let mut buffer = lock(&self.0.buffer);
        buffer.bytes += EVENT_BYTES
            + match &event {
                Event::Deliver { record, .. } => record.len(),
                _ => 0,
            };
        buffer.events.push_back(event);
        if std::mem::take(&mut buffer.reader_waits) {
            drop(buffer);
            self.0.filled.notify_one();
        }
    }

    /// Nothing follows what was pushed but this.
    pub(super) fn end(&self, error: Error) {
        lock(&self.0.buffer).end.get_or_insert(error);
        self.0.filled.notify_one();
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.end(Error::Closed);
    }
}

/// A stream of events: records as soon as they are durable, and what became of them. Dropping it ends it.
///
/// Events come in this order: a record is delivered, `speculative` if its position is only predicted; a `Confirm` says that
/// everything delivered below a position is bound as delivered; a `Fail` takes back everything delivered from a position
/// on, and what still holds of it is delivered again.
///
/// A reader that stops reading holds back nothing but this subscription: at most
/// [`subscription_bytes`](crate::ClientOptions::subscription_bytes) are buffered, and again as much is being read.
#[derive(Debug)]
pub struct Subscription {
    shared: Arc<Shared>,
    /// The client's thread runs as long as somebody reads. `None` in tests.
    client: Option<Client>,
    token: u64,
    taken: VecDeque<Event<Record>>,
}

pub(super) fn subscription(client: Option<Client>, token: u64, bytes_max: usize) -> (Feed, Subscription) {
    let shared = Arc::new(Shared { buffer: Mutex::default(), filled: Condvar::new(), bytes_max });
    (Feed(shared.clone()), Subscription { shared, client, token, taken: VecDeque::new() })
}

impl Subscription {
    /// The next event; waits for it.
    ///
    /// # Errors
    /// [`Error::Trimmed`] when the log no longer has the next record, [`Error::Unavailable`] when nobody has it at present
    /// and the subscription is to stop there; either stays the answer then. [`Error::Closed`].
    #[allow(clippy::should_implement_trait)] // an iterator cannot say how it ended; see `Subscription::events`
    pub fn next(&mut self) -> Result<Event<Record>, Error> {
        loop {
            if let Some(event) = self.next_until(None)? {
                return Ok(event);
            }
        }
    }

    /// The next event, or `None` if none comes within `time`.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub fn next_timeout(&mut self, time: Duration) -> Result<Option<Event<Record>>, Error> {
        self.next_until(deadline(time))
    }

    /// The next event if it is there already.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub fn try_next(&mut self) -> Result<Option<Event<Record>>, Error> {
        self.next_until(Some(Instant::now()))
    }

    /// The events as an iterator, which never ends by itself: after an error it repeats it.
    pub fn events(&mut self) -> impl Iterator<Item = Result<Event<Record>, Error>> + '_ {
        std::iter::repeat_with(|| self.next())
    }

    fn next_until(&mut self, deadline: Option<Instant>) -> Result<Option<Event<Record>>, Error> {
        if let Some(event) = self.taken.pop_front() {
            return Ok(Some(event));
        }
        let mut buffer = lock(&self.shared.buffer);
        while buffer.events.is_empty() {
            if let Some(end) = &buffer.end {
                return Err(end.clone());
            }
            buffer.reader_waits = true;
            let (guard, in_time) = wait(&self.shared.filled, buffer, deadline);
            buffer = guard;
            if !in_time && buffer.events.is_empty() {
                buffer.reader_waits = false;
                return Ok(None);
            }
        }
        std::mem::swap(&mut self.taken, &mut buffer.events);
        buffer.bytes = 0;
        let session_waits = std::mem::take(&mut buffer.session_waits);
        drop(buffer);
        if let (true, Some(client)) = (session_waits, &self.client) {
            client.0.handle.look();
        }
        Ok(self.taken.pop_front())
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(client) = &self.client {
            // A thread that has ended has no subscription to end.
            let _ = client.0.handle.send(Command::Unsubscribe { token: self.token });
        }
    }
}

/// A feed under the session's and the library's name for it.
#[derive(Debug)]
pub(super) struct Fed {
    pub(super) id: SubscriptionId,
    pub(super) token: u64,
    pub(super) on_unavailable: OnUnavailable,
    pub(super) feed: Feed,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_buffer_says_so_and_is_taken_at_once() {
        let (feed, mut subscription) = subscription(None, 0, 3 * EVENT_BYTES);
        let confirm = |upto| Event::Confirm { upto: antelog_protocol::Position(upto) };
        for upto in 0..3 {
            assert!(feed.ready());
            feed.push(confirm(upto));
        }
        assert!(!feed.ready());
        assert_eq!(subscription.next(), Ok(confirm(0)));
        assert!(feed.ready());
        feed.push(confirm(3));
        feed.end(Error::Trimmed { head: antelog_protocol::Position(9) });
        assert_eq!((1..4).map(|_| subscription.try_next()).collect::<Result<Vec<_>, _>>().unwrap().len(), 3);
        assert!(matches!(subscription.next(), Err(Error::Trimmed { .. })));
        assert!(matches!(subscription.events().next(), Some(Err(Error::Trimmed { .. }))));
    }

    #[test]
    fn a_waiting_reader_is_woken_and_a_timeout_is_no_error() {
        let (feed, mut subscription) = subscription(None, 0, 1000);
        assert_eq!(subscription.try_next(), Ok(None));
        assert_eq!(subscription.next_timeout(Duration::from_millis(1)), Ok(None));
        let reader = std::thread::spawn(move || subscription.next());
        std::thread::sleep(Duration::from_millis(5));
        drop(feed);
        assert_eq!(reader.join().unwrap(), Err(Error::Closed));
    }
}
