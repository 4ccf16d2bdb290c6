//! How a replica comes to lead, to follow another, and to join. `PROTOCOL.md` §6.
//!
//! A promoted replica shuts the last primary out of its own memory, finds the end of its log, and has the other members do
//! the same and conform; only when all have answered does it serve. Whoever is no member is given the log by the primary,
//! from a place that both have or from where the primary's begins, and becomes one when it has everything.

use antelog_protocol::ledger::{Ledger, Membership};
use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::shard::ShardConfig;
use antelog_protocol::wire::node::{Greeting, NodeMessage, Place};
use antelog_protocol::{Lsn, ReplicaId};

use super::disk::Past;
use super::follower::Follower;
use super::leader::Leader;
use super::peers::Standing;
use super::{Life, ReplicaAgent};
use crate::log::Retention;
use crate::node::agent::leave;
use crate::transport::{DownReason, PeerId, Transport};

/// Bytes beyond the end of a log that one write may have begun to overwrite.
const WRITE_BYTES_MAX: u64 = 512 << 10;

impl<T: Transport> ReplicaAgent<T> {
    pub(super) fn greeting(&mut self) -> Greeting {
        let bound = self.follower().map_or(Place::default(), |f| f.bound());
        // Where the shard was lost, the last epoch is over: its primary may not know, and must not go on writing here.
        let lost = self.ledger().membership(self.shard).filter(|m| m.has_failed());
        let epoch = lost.map_or(self.epoch, |m| self.epoch.max(m.epoch + 1));
        Greeting { incarnation: self.own.incarnation, epoch, bound }
    }

    /// False when a replica does not say such a thing.
    pub(super) fn on_replica_message(&mut self, now_ns: u64, peer: PeerId, message: NodeMessage<'static>) -> bool {
        let Some(at) = self.peers.iter().position(|p| p.id() == peer) else { return false };
        match message {
            NodeMessage::Greeting(greeting) => {
                self.peers[at].greeting = Some(greeting);
                self.meet(now_ns, at);
            }
            NodeMessage::Start(place) => self.on_start(now_ns, at, place),
            NodeMessage::Session { client, next_seq, last_lsn } => {
                if self.primary == Some(self.peers[at].number)
                    && let Some(follower) = self.follower()
                {
                    follower.session(client, next_seq, last_lsn);
                }
            }
            NodeMessage::Started(place) => self.on_started(now_ns, at, place),
            NodeMessage::Fence(place) => self.on_fence(now_ns, at, place),
            NodeMessage::Fenced(place) => self.on_fenced(now_ns, at, place),
            NodeMessage::Fetch { before, until_bytes } => self.on_fetch(at, before, until_bytes),
            _ => return false,
        }
        true
    }

    /// A replica is there: a primary goes on with it where it was, or has it join.
    fn meet(&mut self, now_ns: u64, at: usize) {
        let epoch = self.epoch;
        let Some(replica) = self.peers[at].replica() else { return };
        match &mut self.life {
            Some(Life::Leading(leader)) => {
                if self.peers[at].greeting.is_some_and(|g| g.epoch > epoch) {
                    return; // The order stream will say who leads.
                }
                let peer = &mut self.peers[at];
                let same = peer.incarnation == replica.incarnation || planted(Mutant::ResumeAtTheOldOffset);
                let held = leader.shard.ledger().membership(self.shard).is_some_and(|m| m.holds(replica));
                match peer.standing {
                    Standing::Member if same && (held || planted(Mutant::ResumeAtTheOldOffset)) => {
                        peer.mirror.on_connected();
                    }
                    Standing::Joining if same => peer.mirror.on_connected(),
                    _ => {
                        peer.standing = Standing::Stranger;
                        self.have_one_join();
                    }
                }
            }
            Some(Life::Fencing(..)) => self.ask_for_fence(now_ns, at),
            _ => {}
        }
    }

    /// Gives the log to a replica that is connected and no member, one at a time.
    fn have_one_join(&mut self) {
        let Some(Life::Leading(leader)) = &mut self.life else { return };
        let busy = leader.joiner.is_some()
            || self
                .peers
                .iter()
                .any(|p| p.connected && matches!(p.standing, Standing::Starting(_) | Standing::Joining));
        let membership = leader.shard.ledger().membership(self.shard);
        let waits = |p: &&mut super::Peer| {
            let fits = p.greeting.is_some_and(|g| g.epoch <= self.epoch);
            // A member's other life is no member; it joins when the first is dropped.
            let is_free = membership.is_some_and(|m| m.member(p.number).is_none());
            p.standing == Standing::Stranger && fits && is_free
        };
        let Some(peer) = self.peers.iter_mut().find(waits).filter(|_| !busy) else { return };
        let Some(greeting) = peer.greeting else { return };
        let own = Place { epoch: self.epoch, ..greeting.bound };
        let place = if greeting.bound.at_bytes > 0 && leader.log.has_place(own) {
            own
        } else {
            let on_disk = self.disk.as_ref().map(|disk| Place::from(disk.store.first()));
            match on_disk.or_else(|| leader.log.first_place()) {
                Some(first) => Place { epoch: self.epoch, ..first },
                None => return,
            }
        };
        peer.incarnation = greeting.incarnation;
        peer.standing = Standing::Starting(place);
        peer.forget_said();
        peer.from_disk = self.disk.is_some() && place.at_bytes < leader.log.head();
        peer.say(NodeMessage::Start(place));
        // As of what is bound: the rest it learns from the log, and may have to give back before it was given any of it.
        let bound = leader.shard.committed().max(place.lsn);
        let past = Past::of(&self.config, &leader.log, bound, leader.shard.sessions());
        for (client, next_seq, last_lsn) in past.duplicates.sessions() {
            peer.say(NodeMessage::Session { client, next_seq, last_lsn });
        }
        self.counters.joins.add(1);
        self.limit_log();
    }

    /// What a joiner was to be given next is kept no more: it is told where to begin once more.
    pub(super) fn have_join_anew(&mut self, now_ns: u64, number: u16) {
        let Some(Life::Leading(leader)) = &mut self.life else { return };
        let Some(peer) = self.peers.iter_mut().find(|p| p.number == number && p.standing == Standing::Joining) else {
            return;
        };
        peer.standing = Standing::Stranger;
        leader.joiner = leader.joiner.filter(|joiner| joiner.number != number);
        self.recount(now_ns);
        // What was under way to it must not land behind what it is told then.
        self.shut_out(Some(number));
        self.have_one_join();
    }

    fn on_start(&mut self, now_ns: u64, at: usize, place: Place) {
        if self.is_past(place.epoch) || self.leave.begun {
            return;
        }
        if self.is_primary() {
            self.step_down(now_ns);
        }
        self.obey(place.epoch, at);
        self.quiesce();
        let Some(Life::Following(follower)) = &mut self.life else { return };
        // An empty log may begin in any epoch; what follows has entries of their own.
        let anew = follower.start(Place { epoch: 0, ..place });
        self.conform_disk(place.epoch, anew);
        self.reached = place.at_bytes;
        (self.told, self.told_at) = (place, place.at_bytes);
        (self.tell_again, self.told_flushed) = (true, None);
        self.peers[at].say(NodeMessage::Started(place));
    }

    /// Whether whoever leads in an epoch is a primary of the past: of an earlier epoch, or of a shard that was lost since.
    fn is_past(&self, epoch: u32) -> bool {
        let lost = self.ledger().membership(self.shard).is_some_and(|m| m.has_failed() && epoch <= m.epoch);
        epoch < self.epoch || lost
    }

    fn on_started(&mut self, now_ns: u64, at: usize, place: Place) {
        let Some(Life::Leading(leader)) = &mut self.life else { return };
        let peer = &mut self.peers[at];
        if peer.standing != Standing::Starting(place) {
            return;
        }
        peer.restart(place);
        peer.standing = Standing::Joining;
        // What counts is what it says that it has flushed, where that is asked for.
        let counts = if self.disk.as_ref().is_some_and(|disk| disk.flushed) { Lsn(0) } else { place.lsn };
        leader.shard.restart_replica(peer.number, counts);
        let id = peer.id();
        let number = self.peers[at].number;
        self.forget_chunk(number);
        self.count_joiner(now_ns, id);
    }

    /// Whoever waited to lead follows: another leads in a later epoch.
    fn stop_fencing(&mut self) {
        self.life = match self.life.take() {
            Some(Life::Fencing(follower, _)) => Some(Life::Following(follower)),
            life => life,
        };
    }

    /// Follows this replica from now on: nobody else's writes are the log's.
    fn obey(&mut self, epoch: u32, at: usize) {
        self.stop_fencing();
        if self.primary == Some(self.peers[at].number) && epoch == self.epoch {
            self.peers[at].forget_end();
            return;
        }
        self.epoch = self.epoch.max(epoch);
        let last = self.primary.replace(self.peers[at].number);
        self.peers[at].forget_end();
        self.shut_out(last.filter(|number| *number != self.peers[at].number));
        self.counters.epoch.set(self.epoch.into());
    }

    /// Nothing that this replica writes lands here any more.
    pub(super) fn shut_out(&mut self, number: Option<u16>) {
        let Some(peer) = number.and_then(|number| self.peer(number)).filter(|p| p.connected) else { return };
        let id = peer.id();
        peer.on_down();
        self.transport.fence(id);
        self.tell_down(id);
    }

    fn tell_down(&self, peer: PeerId) {
        let reason = DownReason::Closed;
        let notice = crate::node::mailbox::Notice::PeerDown { agent: self.name.clone(), peer, reason };
        let _ = self.notices.send(notice);
    }

    fn on_fence(&mut self, now_ns: u64, at: usize, end: Place) {
        if self.is_past(end.epoch) && !planted(Mutant::ObeyOldFences) {
            return;
        }
        self.obey(end.epoch, at);
        if self.is_primary() {
            self.step_down(now_ns);
        }
        self.quiesce();
        let Some(Life::Following(follower) | Life::Fencing(follower, _)) = &mut self.life else { return };
        // What the last primary placed counts, announced or not: it may have reported it.
        follower.log.find_end();
        self.reached = self.reached.max(follower.log.at());
        let place = follower.conform(Place { epoch: 0, ..end });
        self.conform_disk(end.epoch, false);
        (self.tell_again, self.told_flushed) = (true, None);
        self.peers[at].say(NodeMessage::Fenced(Place { epoch: end.epoch, ..place }));
        self.report_now(now_ns);
    }

    fn on_fenced(&mut self, now_ns: u64, at: usize, place: Place) {
        let Some(Life::Fencing(_, answered)) = &mut self.life else { return };
        if place.epoch != self.epoch {
            return;
        }
        *answered |= self.peers[at].bit();
        let peer = &mut self.peers[at];
        peer.incarnation = peer.greeting.map_or(0, |g| g.incarnation);
        peer.standing = Standing::Starting(place);
        self.serve_when_fenced(now_ns);
    }

    /// The order log says who holds this shard's log.
    pub(super) fn on_members_changed(&mut self, now_ns: u64) {
        let Some(m) = self.ledger().membership(self.shard) else { return };
        let (epoch, primary) = (m.epoch, m.primary);
        let (leads, begins) = (m.holds(self.own) && primary == self.own.number, m.change == 1 && m.holds(self.own));
        if begins && self.disk.is_some() && self.follower().is_some_and(|follower| follower.log.lsn() > Lsn(0)) {
            leave(format!(
                "{}: the log on disk is not empty, and the sequencers begin an order log without it: give them their \
                 data_dir back, or empty this node's",
                self.name
            ));
        }
        match &self.life {
            Some(Life::Leading(_)) if leads && epoch == self.epoch => self.keep_leading(now_ns),
            Some(Life::Leading(_)) => self.step_down(now_ns),
            Some(Life::Fencing(..)) if leads && epoch == self.epoch => self.serve_when_fenced(now_ns),
            _ => {}
        }
        if epoch > self.epoch && leads {
            self.be_promoted(now_ns, epoch);
        } else if epoch > self.epoch {
            self.stop_fencing();
            match self.peers.iter().position(|p| p.number == primary) {
                Some(at) => self.obey(epoch, at),
                None => self.epoch = epoch,
            }
        }
        self.report_now(now_ns);
    }

    /// Still the primary: members came or went.
    fn keep_leading(&mut self, now_ns: u64) {
        let Some(Life::Leading(leader)) = &mut self.life else { return };
        let Some(m) = leader.shard.ledger().membership(self.shard) else { return };
        let mut dropped = Vec::new();
        for peer in &mut self.peers {
            let is_member = m.holds(ReplicaId { number: peer.number, incarnation: peer.incarnation });
            if is_member {
                peer.standing = Standing::Member;
            } else if peer.standing == Standing::Member
                || leader.joiner.is_some_and(|joiner| joiner.number == peer.number)
            {
                peer.standing = Standing::Stranger;
                dropped.push(peer.number);
            }
        }
        leader.joiner = None;
        self.recount(now_ns);
        for number in dropped {
            // What was under way to it must not land behind what it is told now.
            self.shut_out(Some(number));
        }
        self.have_one_join();
    }

    /// It leads from this epoch on, once nobody else can write.
    fn be_promoted(&mut self, now_ns: u64, epoch: u32) {
        let last = self.primary.take();
        self.shut_out(last);
        self.epoch = epoch;
        let life = self.life.take();
        let Some(Life::Following(mut follower) | Life::Fencing(mut follower, _)) = life else {
            unreachable!("a primary stepped down before it is promoted")
        };
        // Where a lost shard returns, what lies behind the bound slots is void.
        let returns = follower.ledger.membership(self.shard).is_some_and(|m| m.change == m.since_failure);
        if !returns {
            follower.log.find_end();
        }
        self.reached = self.reached.max(follower.log.at());
        self.life = Some(Life::Fencing(follower, 0));
        self.counters.promotions.add(1);
        self.counters.epoch.set(epoch.into());
        for at in 0..self.peers.len() {
            self.peers[at].standing = Standing::Stranger;
            self.ask_for_fence(now_ns, at);
        }
        self.serve_when_fenced(now_ns);
    }

    /// What a replica has answered to a fence counts on the connection on which it did.
    pub(super) fn forget_answer(&mut self, bit: u8) {
        if let Some(Life::Fencing(_, answered)) = &mut self.life {
            *answered &= !bit;
        }
    }

    fn ask_for_fence(&mut self, _now_ns: u64, at: usize) {
        let Some(Life::Fencing(follower, _)) = &self.life else { return };
        let end = Place { epoch: self.epoch, ..follower.log.place() };
        let members = follower.ledger.membership(self.shard);
        let peer = &mut self.peers[at];
        if peer.replica().is_some_and(|replica| members.is_some_and(|m| m.holds(replica))) {
            peer.forget_said();
            peer.say(NodeMessage::Fence(end));
        }
    }

    /// Serves as soon as all other members have answered.
    fn serve_when_fenced(&mut self, now_ns: u64) {
        let own = self.own.number;
        let Some(Life::Fencing(follower, answered)) = &self.life else { return };
        let Some(m) = follower.ledger.membership(self.shard) else { return };
        let others = m.members.iter().filter(|member| member.number != own).fold(0u8, |bits, o| bits | 1 << o.number);
        if others & !answered != 0 && !planted(Mutant::ServeUnfenced) {
            return;
        }
        let Some(Life::Fencing(follower, _)) = self.life.take() else { return };
        let config = ShardConfig { epoch: self.epoch, replica: self.own, ..self.config.clone() };
        let drained = self.overwritten(follower.log.head());
        self.log_epoch = self.epoch;
        if let Some(disk) = &mut self.disk {
            disk.lead(self.epoch);
        }
        let has_gaps = follower.has_gaps();
        if has_gaps && self.disk.is_some() {
            let text = "bound records are in no log that is left: reading them says 'unavailable'".into();
            self.warn(text);
        }
        let (shard, log) = follower.take_over(config, self.options, drained, self.disk.is_some());
        let mut leader = Box::new(Leader::new(shard, log, has_gaps));
        let flushed = self.disk.as_ref().filter(|disk| disk.flushed).map(|disk| disk.store.flushed().lsn);
        for peer in &mut self.peers {
            match peer.standing {
                Standing::Starting(place) if others & peer.bit() != 0 => {
                    peer.restart(place);
                    peer.standing = Standing::Member;
                    peer.from_disk = self.disk.is_some() && place.at_bytes < leader.log.head();
                    leader.shard.restart_replica(peer.number, if flushed.is_some() { Lsn(0) } else { place.lsn });
                }
                // It answered and is a member no more.
                _ => peer.standing = Standing::Stranger,
            }
        }
        if let Some(lsn) = flushed {
            leader.shard.restart_replica(own, lsn);
        }
        let counted = others | if flushed.is_some() { 1 << own } else { 0 };
        self.life = Some(Life::Leading(leader));
        // Before it fills anything: the region may be full.
        self.limit_log();
        if let Some(Life::Leading(leader)) = &mut self.life {
            leader.begin(now_ns, counted, &mut self.gate.answers);
        }
        self.counters.is_primary.set(1);
        self.counters.is_member.set(1);
        self.publish();
        self.gate.progress.set_serving(Some(self.epoch));
        self.gate.waker.wake();
        self.report_now(now_ns);
        self.have_one_join();
    }

    /// The place before which the last primary may have overwritten the log.
    fn overwritten(&self, head: u64) -> Place {
        let lapped = (self.reached + WRITE_BYTES_MAX).saturating_sub(self.region.len() as u64) > head;
        if self.options.retention == Retention::Recycle && lapped { self.told } else { Place::default() }
    }

    /// A primary no more: another leads, or the shard is lost. What is not bound is given back.
    fn step_down(&mut self, now_ns: u64) {
        if !self.is_primary() {
            return;
        }
        let Some(Life::Leading(leader)) = self.life.take() else { return };
        self.gate.progress.set_serving(None);
        self.gate.waker.wake();
        self.counters.is_primary.set(0);
        self.counters.demotions.add(1);
        // What is under way comes from the region.
        for number in self.peers.iter().filter(|p| p.connected).map(|p| p.number).collect::<Vec<_>>() {
            self.shut_out(Some(number));
        }
        self.peers.iter_mut().for_each(|p| p.standing = Standing::Stranger);
        self.quiesce();
        let Leader { shard, log, has_gaps, .. } = *leader;
        let committed = shard.committed();
        self.reached = log.tail();
        let past = Past { has_gaps, ..Past::of(&self.config, &log, committed, shard.sessions()) };
        let (log, anew) = log.give_up(committed);
        (self.told, self.told_at) = (log.place(), log.at());
        let follower = Follower::of_bound(&self.config, shard.into_ledger(), log, past);
        self.life = Some(Life::Following(Box::new(follower)));
        self.cut_disk(anew);
        self.look_at_losses(now_ns);
    }

    /// A shard was lost as a whole: if it is this one, nobody leads it.
    pub(super) fn on_view_changed(&mut self, now_ns: u64) {
        if !self.ledger().has_failed(self.shard) {
            return;
        }
        // Whoever is born anew hears of the past while it follows a later primary already, or keeps a later one's log.
        let known = self.epoch.max(self.log_epoch);
        if self.ledger().membership(self.shard).is_some_and(|m| m.epoch < known) {
            return self.report_now(now_ns);
        }
        self.step_down(now_ns);
        let last = self.primary.take();
        self.shut_out(last);
        self.quiesce();
        self.life = match self.life.take() {
            Some(Life::Following(mut follower) | Life::Fencing(mut follower, _)) => {
                follower.keep_below(follower.ledger.committed_lsn(self.shard), self.log_epoch);
                Some(Life::Following(follower))
            }
            life => life,
        };
        self.cut_disk(false);
        self.report_now(now_ns);
    }

    /// The order log was told anew. Whoever is the primary still goes on with its log; another may have lost its shard
    /// meanwhile, and keeps only what was bound then.
    pub(super) fn follow_anew(&mut self, now_ns: u64, ledger: Ledger) {
        let (shard, own) = (self.shard, self.own);
        let leads =
            ledger.membership(shard).is_some_and(|m| m.holds(own) && m.primary == own.number && m.epoch == self.epoch);
        // Who follows a later primary already holds that one's log, and whoever was born anew may have it on disk.
        let epoch = self.epoch.max(self.log_epoch);
        let is_past = |m: &Membership| epoch < m.epoch || m.has_failed() && epoch == m.epoch;
        let is_past = ledger.membership(shard).is_some_and(is_past);
        match &mut self.life {
            Some(Life::Leading(leader)) if leads => leader.follow_anew(now_ns, ledger, &mut self.gate.answers),
            _ => {
                self.step_down(now_ns);
                self.quiesce();
                let log_epoch = self.log_epoch;
                if let Some(follower) = self.follower() {
                    follower.follow_anew(ledger, is_past, log_epoch);
                }
                self.cut_disk(false);
            }
        }
        self.on_members_changed(now_ns);
        if self.ledger().has_failed(self.shard) {
            self.on_view_changed(now_ns);
        }
    }
}
