//! Virtual time: what is to happen, by time, and among equal times in the order in which it was planned.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use crate::transport::DownReason;

/// Something that happens at a point in virtual time.
#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    /// The oldest operation under way from this side of a link reaches the other side.
    Arrive { link: u32, side: u8 },
    /// The acknowledgement of an operation with a token reaches the side that issued it.
    Acked { link: u32, side: u8 },
    /// A side that met a full transport can go on.
    Room { link: u32, side: u8 },
    /// This side of a link learns that the link is lost.
    Down { link: u32, side: u8, reason: DownReason },
    /// A link breaks.
    Lose { link: u32 },
    /// A thread runs, unless it was planned anew since.
    Step { thread: usize, turn: u64 },
    /// The control thread makes a connection between two nodes, unless the caller has died since.
    Dial { line: usize, life: u32 },
    /// A dialled connection is handed to an agent.
    AdmitNode { line: usize, link: u32, side: u8 },
    /// A client's call reaches a gate.
    DialGate { call: usize },
    /// A client's connection is handed to its gate.
    AdmitClient { call: usize },
    /// What is under way above the network moves.
    Overlay,
    /// Some link of a kind is lost.
    Fault { kind: usize },
    /// Something befalls a sequencer, mostly the one that leads.
    LeaderFault,
    /// A sequencer that crashed comes back.
    Revive { member: u16 },
    /// Something worse than a lost link happens.
    Strike { strike: Strike },
    /// A process that is down comes back, with nothing but its disk.
    Restart { process: usize },
    /// Something is done on a replica's disk.
    Disk { replica: usize },
    /// The state of the whole run is looked at.
    Look,
}

/// Kinds of faults that hit whole processes or whole shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Strike {
    /// A process ends.
    Crash,
    /// Nothing passes between some agents for a while.
    Wall,
    /// A thread is paused for so long that it is suspected.
    Pause,
    /// A whole shard is lost, or two.
    Shard,
    /// All machines lose power at once.
    Power,
}

#[derive(Debug)]
struct Planned {
    at_ns: u64,
    number: u64,
    what: What,
}

impl PartialEq for Planned {
    fn eq(&self, other: &Planned) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Planned {}

impl PartialOrd for Planned {
    fn partial_cmp(&self, other: &Planned) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Planned {
    fn cmp(&self, other: &Planned) -> Ordering {
        (self.at_ns, self.number).cmp(&(other.at_ns, other.number))
    }
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Queue {
    heap: BinaryHeap<Reverse<Planned>>,
    planned: u64,
}

impl Queue {
    pub(super) fn plan(&mut self, at_ns: u64, what: What) {
        self.planned += 1;
        self.heap.push(Reverse(Planned { at_ns, number: self.planned, what }));
    }

    pub(super) fn next(&mut self) -> Option<(u64, What)> {
        self.heap.pop().map(|Reverse(planned)| (planned.at_ns, planned.what))
    }

    pub(super) fn next_at_ns(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse(planned)| planned.at_ns)
    }
}
