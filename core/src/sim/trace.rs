//! What happened, in order: folded into a digest always, and written down when somebody wants to read it.

use std::fmt::Write;

/// Kinds of events in a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A thread ran its agents: thread, work done, nanoseconds until it may run again.
    Step = 1,
    /// An operation was handed to the network: link and side, bytes, arrival time.
    Issue,
    /// An operation took effect: link and side, bytes, token or 0.
    Land,
    /// A connection was made: link, kind.
    Link,
    /// A connection was lost or closed: link, kind.
    Lost,
    /// An agent was told of a lost connection: link, side.
    Down,
    /// An order entry was committed: index, hash of its bytes, first position not bound.
    Commit,
    /// A client appended: record, shard, number.
    Append,
    /// An append was acknowledged: record, position.
    Acknowledged,
    /// An append was refused: record, shard.
    Refused,
    /// A subscription was handed a record: subscription, position, speculative.
    Deliver,
    /// A subscription was told that positions are bound: subscription, end.
    Confirm,
    /// A read was answered: position, what was there.
    Read,
    /// A question for the tail was answered: position.
    Tail,
    /// A change of membership or ordering was answered: token, whether it was made.
    Change,
    /// A session began: client, session.
    Session,
    /// An agent was descheduled: thread, nanoseconds.
    Pause,
    /// The load ended, all was told, or the log was idle.
    Phase,
    /// What is under way above the network moved on: threads woken.
    Overlay,
    /// A process ended: its number, whether its peers were left in silence.
    Crash,
    /// A process came back without memory: its number, its life.
    Restart,
    /// Nothing passes over a link for a while: link and side, until when.
    Wall,
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Trace {
    digest: u64,
    text: Option<String>,
}

impl Trace {
    /// A trace; `written` keeps a line for every event, not only the digest.
    pub fn new(written: bool) -> Trace {
        Trace { digest: 0xcbf2_9ce4_8422_2325, text: written.then(String::new) }
    }

    /// The digest of all events so far.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// The written lines, taken out.
    pub fn take_text(&mut self) -> Option<String> {
        self.text.take()
    }

    /// Notes an event.
    #[inline]
    pub(super) fn note(&mut self, now_ns: u64, kind: Kind, a: u64, b: u64, c: u64) {
        for word in [now_ns, kind as u64, a, b, c] {
            self.digest = (self.digest ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23);
        }
        if let Some(text) = &mut self.text {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{:>9}.{:03} {kind:?} {a} {b} {c}", now_ns / 1000, now_ns % 1000);
        }
    }

    /// As [`say`](Self::say), with a line that is made only if somebody reads it.
    pub(super) fn say_with(&mut self, now_ns: u64, line: impl FnOnce() -> String) {
        if self.text.is_some() {
            self.say(now_ns, &line());
        }
    }

    /// Notes a line of text that is no event: it does not count for the digest.
    pub(super) fn say(&mut self, now_ns: u64, line: &str) {
        if let Some(text) = &mut self.text {
            let _ = writeln!(text, "{:>9}.{:03} # {line}", now_ns / 1000, now_ns % 1000);
        }
    }
}

/// A hash of bytes that is the same on every machine.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    let mut state = 0xcbf2_9ce4_8422_2325u64 ^ bytes.len() as u64;
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        state = (state ^ u64::from_le_bytes(word)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    }
    state
}
