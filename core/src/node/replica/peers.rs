//! The other replicas of the shard: who is connected, what is still to be said to each, and what the primary makes of them.

use std::collections::VecDeque;
use std::sync::Arc;

use antelog_protocol::ReplicaId;
use antelog_protocol::limits::{REPLICAS_MAX, SEQUENCERS_MAX};
use antelog_protocol::wire::node::{Greeting, NODE_MESSAGE_BYTES_MAX, NodeMessage, Place};

use crate::channel::mirror::{CONTROL_BYTES, DRAINED_AT, END_AT, FLUSHED_AT, Mirror, ROOM_AT};
use crate::mem::Region;
use crate::transport::{PeerId, RegionKey, Transport};

/// Number of a sequencer member at every replica.
pub const fn sequencer_peer(member: u16) -> PeerId {
    PeerId(member)
}

/// Number of a replica at the other replicas of its shard.
pub const fn replica_peer(number: u16) -> PeerId {
    PeerId(SEQUENCERS_MAX as u16 + number)
}

/// Most peers of a replica.
pub const PEERS_MAX: usize = SEQUENCERS_MAX + REPLICAS_MAX;

/// What a primary makes of another replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Nothing is written to it.
    Stranger,
    /// It was told where to follow from, and has not answered.
    Starting(Place),
    /// It follows, and is no member yet.
    Joining,
    /// A member that holds the log as far as its mirror says.
    Member,
}

/// One of the other replicas.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) number: u16,
    pub(super) mirror: Mirror,
    pub(super) connected: bool,
    /// What it said of itself on this connection.
    pub(super) greeting: Option<Greeting>,
    pub(super) standing: Standing,
    /// The life that the standing is about.
    pub(super) incarnation: u64,
    /// What it lacks has left memory: it is given the log from disk.
    pub(super) from_disk: bool,
    /// Messages that have not left.
    outbox: VecDeque<NodeMessage<'static>>,
}

impl Peer {
    pub(super) fn id(&self) -> PeerId {
        replica_peer(self.number)
    }

    pub(super) fn bit(&self) -> u8 {
        1 << self.number
    }

    /// This life of the replica, as it has said itself.
    pub(super) fn replica(&self) -> Option<ReplicaId> {
        self.greeting.map(|g| ReplicaId { number: self.number, incarnation: g.incarnation })
    }

    pub(super) fn say(&mut self, message: NodeMessage<'static>) {
        if self.connected {
            self.outbox.push_back(message);
        }
    }

    pub(super) fn on_connected(&mut self, greeting: Greeting) {
        self.connected = true;
        self.greeting = None;
        self.outbox.clear();
        self.say(NodeMessage::Greeting(greeting));
    }

    pub(super) fn on_down(&mut self) {
        self.connected = false;
        self.greeting = None;
        self.outbox.clear();
        self.mirror.on_down();
        if !matches!(self.standing, Standing::Member | Standing::Joining) {
            self.standing = Standing::Stranger;
        }
    }

    /// Sends what waits; returns how much left.
    pub(super) fn send<T: Transport>(&mut self, transport: &mut T) -> usize {
        let mut count = 0;
        while let Some(message) = self.outbox.front() {
            let mut buffer = [0; NODE_MESSAGE_BYTES_MAX];
            let len = message.encode(&mut buffer);
            if transport.send(replica_peer(self.number), &buffer[..len]).is_err() {
                break;
            }
            self.outbox.pop_front();
            count += 1;
        }
        count
    }

    /// Up to here the region may be overwritten for its sake.
    pub(super) fn drained(&self) -> u64 {
        match self.standing {
            Standing::Stranger => u64::MAX,
            _ if self.from_disk => u64::MAX,
            Standing::Starting(place) => place.at_bytes,
            Standing::Joining | Standing::Member => self.mirror.drained(),
        }
    }

    /// It is about to be told where its log goes on, or ends: what the words of this pair say is of another log, or of an
    /// earlier life, and it says it again.
    pub(super) fn forget_said(&mut self) {
        for word in [DRAINED_AT, FLUSHED_AT, ROOM_AT] {
            self.mirror.control().store_u64(word, 0);
        }
    }

    /// It follows from a place on. What it said meanwhile of flushed slots, and of what may be overwritten, may still be
    /// of its last log: behind the place that is void.
    pub(super) fn restart(&mut self, place: Place) {
        let flushed = self.mirror.flushed().min(place.lsn);
        self.mirror.control().store_u64(FLUSHED_AT, flushed.0);
        let drained = self.mirror.drained().min(place.at_bytes);
        self.mirror.control().store_u64(DRAINED_AT, drained);
        self.mirror.restart(place.at_bytes);
    }

    /// Up to here its disk has room for records, in absolute bytes.
    pub(super) fn disk_room(&self) -> u64 {
        let counts = matches!(self.standing, Standing::Joining | Standing::Member);
        if counts { self.mirror.disk_room() } else { u64::MAX }
    }

    /// End of the log that it has written as primary.
    pub(super) fn end(&self) -> u64 {
        self.mirror.control().load_u64(END_AT)
    }

    /// Forgets what it wrote as primary.
    pub(super) fn forget_end(&self) {
        self.mirror.control().store_u64(END_AT, 0);
    }
}

/// The control regions of a replica's pairs, by number of the other replica.
pub(super) fn peers(own: u16, replicas: u16, source: RegionKey, region_bytes: usize) -> std::io::Result<Vec<Peer>> {
    let others = (0..replicas).filter(|number| *number != own);
    let peer = |number| {
        let control: Arc<Region> = Region::new(CONTROL_BYTES)?;
        Ok(Peer {
            number,
            mirror: Mirror::new(replica_peer(number), source, region_bytes, control),
            connected: false,
            greeting: None,
            standing: Standing::Stranger,
            incarnation: 0,
            from_disk: false,
            outbox: VecDeque::new(),
        })
    };
    others.map(peer).collect()
}

#[cfg(test)]
mod tests {
    use antelog_protocol::Lsn;

    use super::*;

    #[test]
    fn what_a_joiner_said_of_its_last_log_does_not_count_behind_where_it_follows_from() {
        let mut peer = peers(0, 2, RegionKey(0), 1 << 20).unwrap().remove(0);
        peer.forget_said();
        // On their way when it was told where to begin.
        peer.mirror.control().store_u64(DRAINED_AT, 500_000);
        peer.mirror.control().store_u64(FLUSHED_AT, 200);
        let place = Place { at_bytes: 4096, lsn: Lsn(3), ..Place::default() };
        peer.restart(place);
        assert_eq!((peer.mirror.drained(), peer.mirror.flushed()), (4096, Lsn(3)));
        peer.mirror.control().store_u64(DRAINED_AT, 64);
        peer.restart(place);
        assert_eq!(peer.mirror.drained(), 64, "less is what it has said since");
    }
}
