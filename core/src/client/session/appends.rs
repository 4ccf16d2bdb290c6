//! Outstanding appends: numbered, kept until answered, and sent again in order after every reconnect.
//!
//! One *lane* per shard. A lane's queue holds the records not answered yet, in the order of their numbers; the first
//! `sent` of them went out on the current connection. A gate that answers a retry gives the original position, so sending
//! everything again is always right, and nothing new overtakes a retry because both come from the same queue.
//!
//! A refusal breaks the sequence: the gate still expects that number, and everything behind it is refused as a gap. The lane
//! then takes nothing new until it is empty and continues with the number that the gate expects.

use std::collections::VecDeque;

use antelog_protocol::wire::session::{ClusterMap, Request};
use antelog_protocol::{Refusal, ShardId};

use super::gate::Gate;
use super::options::AppendError;
use crate::client::Record;

#[derive(Debug)]
struct Outstanding {
    seq: u64,
    record: Record,
}

#[derive(Debug)]
struct Lane {
    shard: ShardId,
    gate: usize,
    next_seq: u64,
    /// Numbers below this one were used at some time; a refusal takes `next_seq` back, and late answers still come.
    used_to: u64,
    queue: VecDeque<Outstanding>,
    /// Of the queue, how many were sent on the current connection.
    sent: usize,
    /// After a refusal: the number to continue with once the queue is empty.
    resume: Option<u64>,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Appends {
    lanes: Vec<Lane>,
    outstanding: usize,
    outstanding_max: usize,
    record_bytes_max: usize,
    /// Some lane has records to send.
    behind: bool,
}

impl Appends {
    pub(super) fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Whether some record was not sent on its gate's current connection.
    pub(super) fn behind(&self) -> bool {
        self.behind
    }

    /// Takes the cluster's map in. A shard that moved is sent everything again at its new gate.
    pub(super) fn set_map(&mut self, map: &ClusterMap, mut gate_of: impl FnMut(&str) -> usize) {
        self.outstanding_max = map.outstanding_max as usize;
        self.record_bytes_max = map.record_bytes_max as usize;
        for (shard, address) in &map.shards {
            let gate = gate_of(address);
            match self.lanes.binary_search_by_key(shard, |l| l.shard) {
                Ok(index) => {
                    let lane = &mut self.lanes[index];
                    if lane.gate != gate {
                        lane.gate = gate;
                        lane.sent = 0;
                        self.behind = true;
                    }
                }
                Err(index) => {
                    let lane = Lane {
                        shard: *shard,
                        gate,
                        next_seq: 0,
                        used_to: 0,
                        queue: VecDeque::new(),
                        sent: 0,
                        resume: None,
                    };
                    self.lanes.insert(index, lane);
                }
            }
        }
    }

    #[inline]
    fn lane_index(&self, shard: ShardId) -> Option<usize> {
        match self.lanes.get(usize::from(shard.0)) {
            Some(lane) if lane.shard == shard => Some(usize::from(shard.0)),
            _ => self.lanes.binary_search_by_key(&shard, |l| l.shard).ok(),
        }
    }

    /// All shards, in id order.
    pub(super) fn shards(&self) -> Vec<ShardId> {
        self.lanes.iter().map(|l| l.shard).collect()
    }

    /// The gate that serves a shard.
    #[inline]
    pub(super) fn gate_of(&self, shard: ShardId) -> Option<usize> {
        self.lane_index(shard).map(|index| self.lanes[index].gate)
    }

    /// Sends `record` if its gate is connected and nothing is in front of it; `keep` makes the copy that is kept, only when
    /// the append was taken.
    pub(super) fn append(
        &mut self,
        gates: &mut [Gate],
        shard: ShardId,
        record: &[u8],
        keep: impl FnOnce() -> Record,
    ) -> Result<u64, AppendError> {
        let index = self.lane_index(shard).ok_or(AppendError::UnknownShard(shard))?;
        if record.len() > self.record_bytes_max {
            return Err(AppendError::TooLarge { limit_bytes: self.record_bytes_max });
        }
        let lane = &mut self.lanes[index];
        if lane.queue.len() >= self.outstanding_max || lane.resume.is_some() {
            return Err(AppendError::Full);
        }
        let gate = &mut gates[lane.gate];
        gate.wanted = true;
        let seq = lane.next_seq;
        if gate.up() && lane.sent == lane.queue.len() {
            gate.push(&Request::Append { shard, seq, record }).map_err(|_| AppendError::Full)?;
            lane.sent += 1;
        } else {
            self.behind = true;
        }
        lane.next_seq += 1;
        lane.used_to = lane.used_to.max(lane.next_seq);
        lane.queue.push_back(Outstanding { seq, record: keep() });
        self.outstanding += 1;
        Ok(seq)
    }

    /// An answer came: gives the record's place in the queue up. False when nothing is outstanding under that number,
    /// because it was answered before the connection was lost; an error when it was never used.
    pub(super) fn settle(&mut self, shard: ShardId, seq: u64, refusal: Option<Refusal>) -> Result<bool, &'static str> {
        let index = self.lane_index(shard).ok_or("it answered an append to a shard that was never used")?;
        let lane = &mut self.lanes[index];
        if seq >= lane.used_to {
            return Err("it answered an append that was never sent");
        }
        let at = match lane.queue.front() {
            Some(front) if front.seq == seq => 0,
            _ => match lane.queue.binary_search_by_key(&seq, |o| o.seq) {
                Ok(at) => at,
                Err(_) => return Ok(false),
            },
        };
        lane.queue.remove(at);
        self.outstanding -= 1;
        if at < lane.sent {
            lane.sent -= 1;
        }
        match refusal {
            // The log has forgotten the session: it may begin again.
            Some(Refusal::UnknownSession) => lane.resume = Some(0),
            // The number was used, long ago: it must not be used again.
            Some(Refusal::Forgotten) => {}
            Some(_) => lane.resume = Some(lane.resume.map_or(seq, |r| r.min(seq))),
            None => {}
        }
        if lane.queue.is_empty()
            && let Some(resume) = lane.resume.take()
        {
            lane.next_seq = resume;
        }
        Ok(true)
    }

    /// A connection began or ended: everything outstanding at that gate is unsent again.
    pub(super) fn on_link(&mut self, gate: usize) {
        for lane in self.lanes.iter_mut().filter(|l| l.gate == gate) {
            lane.sent = 0;
            self.behind |= !lane.queue.is_empty();
        }
    }

    /// Sends what is due and fits; returns how much was sent.
    pub(super) fn pump(&mut self, gates: &mut [Gate]) -> usize {
        if !self.behind {
            return 0;
        }
        let mut work = 0;
        let mut behind = false;
        for lane in &mut self.lanes {
            let gate = &mut gates[lane.gate];
            while let Some(next) = lane.queue.get(lane.sent) {
                gate.wanted = true;
                if gate.push(&Request::Append { shard: lane.shard, seq: next.seq, record: &next.record }).is_err() {
                    behind = true;
                    break;
                }
                lane.sent += 1;
                work += 1;
            }
        }
        self.behind = behind;
        work
    }
}
