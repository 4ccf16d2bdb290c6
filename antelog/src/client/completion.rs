//! Results on their way from the client's thread to the one that waits: a promise and its result, and the permits that
//! bound how many appends are under way.
//!
//! A promise that is dropped, by a panic for example, is broken with [`Error::Closed`]: nobody waits for ever.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error::Error;

/// Locks, whatever a thread that panicked left behind: all states under these locks are whole between statements.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits, until a time if there is one; false when that time has come.
pub(super) fn wait<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    deadline: Option<Instant>,
) -> (MutexGuard<'a, T>, bool) {
    let Some(deadline) = deadline else {
        return (condvar.wait(guard).unwrap_or_else(PoisonError::into_inner), true);
    };
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return (guard, false);
    }
    (condvar.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0, true)
}

/// The time after a duration from now; `None` when it lies beyond what the clock counts.
pub(super) fn deadline(after: Duration) -> Option<Instant> {
    Instant::now().checked_add(after)
}

#[derive(Debug)]
enum State<T> {
    Open,
    Filled(Result<T, Error>),
    Taken,
}

#[derive(Debug)]
struct Cell<T> {
    state: Mutex<State<T>>,
    filled: Condvar,
}

impl<T> State<T> {
    fn take(&mut self) -> Option<Result<T, Error>> {
        match std::mem::replace(self, State::Taken) {
            State::Filled(result) => Some(result),
            State::Taken => None,
            State::Open => {
                *self = State::Open;
                None
            }
        }
    }
}

/// The side that gives the result.
#[derive(Debug)]
pub(super) struct Promise<T>(Option<Arc<Cell<T>>>);

/// The side that takes it.
#[derive(Debug)]
pub(super) struct Outcome<T>(Arc<Cell<T>>);

pub(super) fn promise<T>() -> (Promise<T>, Outcome<T>) {
    let cell = Arc::new(Cell { state: Mutex::new(State::Open), filled: Condvar::new() });
    (Promise(Some(cell.clone())), Outcome(cell))
}

impl<T> Promise<T> {
    pub(super) fn keep(mut self, result: Result<T, Error>) {
        self.fill(result);
    }

    fn fill(&mut self, result: Result<T, Error>) {
        if let Some(cell) = self.0.take() {
            *lock(&cell.state) = State::Filled(result);
            cell.filled.notify_one();
        }
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        self.fill(Err(Error::Closed));
    }
}

impl<T> Outcome<T> {
    /// The result once it is there; `None` when the deadline came first, or the result was taken before.
    pub(super) fn wait(&self, deadline: Option<Instant>) -> Option<Result<T, Error>> {
        let mut state = lock(&self.0.state);
        while matches!(*state, State::Open) {
            let (guard, in_time) = wait(&self.0.filled, state, deadline);
            state = guard;
            if !in_time {
                break;
            }
        }
        state.take()
    }

    pub(super) fn try_take(&self) -> Option<Result<T, Error>> {
        lock(&self.0.state).take()
    }
}

/// A counting semaphore: how many appends a shard may have under way.
#[derive(Debug)]
pub(super) struct Permits {
    free: Mutex<usize>,
    returned: Condvar,
}

/// One append under way; its drop lets the next one in.
#[derive(Debug)]
pub(super) struct Permit(Arc<Permits>);

impl Permits {
    pub(super) fn new(count: usize) -> Arc<Permits> {
        Arc::new(Permits { free: Mutex::new(count), returned: Condvar::new() })
    }

    /// Waits for a permit.
    pub(super) fn take(permits: &Arc<Permits>) -> Permit {
        let mut free = lock(&permits.free);
        while *free == 0 {
            free = wait(&permits.returned, free, None).0;
        }
        *free -= 1;
        Permit(permits.clone())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        *lock(&self.0.free) += 1;
        self.0.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promise_is_kept_once_or_broken() {
        let (promise, outcome) = promise();
        assert_eq!(outcome.try_take(), None);
        assert_eq!(outcome.wait(deadline(Duration::from_millis(1))), None);
        let other = std::thread::spawn(move || promise.keep(Ok(7)));
        assert_eq!(outcome.wait(None), Some(Ok(7)));
        other.join().unwrap();
        assert_eq!(outcome.wait(None), None, "taken before");
        let (broken, outcome) = super::promise::<u8>();
        drop(broken);
        assert_eq!(outcome.wait(None), Some(Err(Error::Closed)));
    }

    #[test]
    fn permits_let_the_next_one_in_when_one_is_dropped() {
        let permits = Permits::new(1);
        let first = Permits::take(&permits);
        let shared = permits.clone();
        let second = std::thread::spawn(move || drop(Permits::take(&shared)));
        std::thread::sleep(Duration::from_millis(5));
        assert!(!second.is_finished());
        drop(first);
        second.join().unwrap();
    }
}
