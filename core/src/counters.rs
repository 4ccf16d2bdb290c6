//! Counters that one agent writes and anyone may read: how one looks inside a running node.
//!
//! Each agent has a [`Counters`] of its own and registers its counters at set-up. A counter has one writer, so adding is a
//! load and a store without a locked instruction, and an agent's counters lie together on cache lines of its own.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// How many counters one agent may register.
pub const COUNTERS_MAX: usize = 512;

#[repr(align(128))]
struct Block([AtomicU64; COUNTERS_MAX]);

/// The counters of one agent. Clones are handles to the same counters.
#[derive(Clone)]
pub struct Counters {
    agent: Arc<str>,
    block: Arc<Block>,
    names: Arc<Mutex<Vec<String>>>,
}

impl Counters {
    /// An empty set; `agent` becomes the prefix of all names.
    pub fn new(agent: &str) -> Counters {
        Counters {
            agent: agent.into(),
            block: Arc::new(Block([const { AtomicU64::new(0) }; COUNTERS_MAX])),
            names: Arc::default(),
        }
    }

    /// The agent's name: the prefix of all names.
    pub fn agent(&self) -> &str {
        &self.agent
    }

    /// Adds a counter that starts at 0. Set-up only. Panics when the name is taken or [`COUNTERS_MAX`] is reached: the
    /// set of counters is code, not input.
    pub fn register(&self, name: &str) -> Counter {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(!names.iter().any(|taken| taken == name), "counter {name} of {} registered twice", self.agent);
        assert!(names.len() < COUNTERS_MAX, "more than {COUNTERS_MAX} counters in {}", self.agent);
        names.push(name.to_owned());
        Counter { block: self.block.clone(), index: names.len() - 1, one_writer: PhantomData }
    }

    /// All counters as (`agent.name`, value), in the order of registration. Values are read one by one, so sums across
    /// counters of a running agent may be off by what happened meanwhile.
    pub fn snapshot(&self) -> Vec<(String, u64)> {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let value = |index: usize| self.block.0[index].load(Ordering::Relaxed);
        names.iter().enumerate().map(|(index, name)| (format!("{}.{name}", self.agent), value(index))).collect()
    }
}

impl std::fmt::Debug for Counters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self.snapshot()).finish()
    }
}

/// One counter, held by its only writer: it can move to another thread but not be shared.
pub struct Counter {
    block: Arc<Block>,
    index: usize,
    /// Makes the type `!Sync`: `add` is not an atomic read-modify-write.
    one_writer: PhantomData<Cell<()>>,
}

impl Counter {
    #[inline]
    fn word(&self) -> &AtomicU64 {
        &self.block.0[self.index]
    }

    /// Adds `amount`, wrapping.
    #[inline]
    pub fn add(&self, amount: u64) {
        let word = self.word();
        word.store(word.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }

    /// Replaces the value; for gauges such as a position or a queue's length.
    #[inline]
    pub fn set(&self, value: u64) {
        self.word().store(value, Ordering::Relaxed);
    }

    /// The current value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.word().load(Ordering::Relaxed)
    }
}

impl std::fmt::Debug for Counter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Counter({})", self.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_from_another_thread() {
        let counters = Counters::new("shard-0");
        let (appends, tail) = (counters.register("appends"), counters.register("tail"));
        let writer = std::thread::spawn(move || {
            for _ in 0..1000 {
                appends.add(2);
            }
            tail.set(77);
            (appends.get(), tail.get())
        });
        assert_eq!(writer.join().unwrap(), (2000, 77));
        let expected = vec![("shard-0.appends".to_owned(), 2000), ("shard-0.tail".to_owned(), 77)];
        assert_eq!(counters.clone().snapshot(), expected);
    }

    #[test]
    #[should_panic(expected = "registered twice")]
    fn a_name_is_used_once() {
        let counters = Counters::new("gate");
        let _first = counters.register("sent");
        counters.register("sent");
    }
}
