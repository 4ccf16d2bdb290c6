//! What a replica does with its log on disk: writes it behind memory, tells what is flushed there and how much room there
//! is, cuts it with the log, and ends it.

use antelog_protocol::mutant::{Mutant, planted};

use super::{Life, ReplicaAgent};
use crate::channel::mirror::{CONTROL_REGION, FLUSHED_AT, ROOM_AT};
use crate::transport::{RemoteOffset, Transport};

impl<T: Transport> ReplicaAgent<T> {
    /// Writes behind what the log has.
    pub(super) fn write_behind(&mut self, now_ns: u64) -> usize {
        let Some(disk) = &mut self.disk else { return 0 };
        let end = match &self.life {
            Some(Life::Leading(leader)) => leader.log.place(),
            Some(Life::Following(follower) | Life::Fencing(follower, _)) => follower.log.place(),
            None => return 0,
        };
        let work = disk.write_behind(now_ns, end);
        let (flushed, room) = (disk.flushed, disk.room());
        if flushed {
            self.tell_flushed(now_ns);
        }
        if room != 0 || self.told_room != Some(0) {
            self.tell_room(room);
        }
        if self.disk.as_mut().is_some_and(|disk| disk.is_time_to_drop(now_ns)) {
            self.drop_old();
        }
        work
    }

    /// Whether the disk is full is told to whoever takes appends.
    fn tell_room(&mut self, room: u64) {
        let is_full = room != 0;
        if is_full != std::mem::replace(&mut self.disk_is_full, is_full) {
            let text = if is_full {
                "the disk is full: the shard refuses appends and goes on by itself when there is room"
            } else {
                "the disk has room again: the shard takes appends"
            };
            self.warn(text.into());
        }
        if self.is_primary() {
            self.told_room = Some(room);
            return;
        }
        let primary = self.peers.iter().find(|p| Some(p.number) == self.primary && p.greeting.is_some());
        if let Some(peer) = primary.filter(|_| self.told_room != Some(room)) {
            let remote = RemoteOffset { region: CONTROL_REGION, offset: ROOM_AT };
            if self.transport.write_inline(peer.id(), &room.to_le_bytes(), remote, Some(0)).is_ok() {
                self.told_room = Some(room);
            }
        }
    }

    /// Drops from disk what is bound and not to be kept any longer.
    fn drop_old(&mut self) {
        let (ledger, shard) = (self.ledger(), self.shard);
        let trimmed = ledger.first_lsn_at(shard, ledger.trimmed()).unwrap_or_default();
        let Some(disk) = &mut self.disk else { return };
        match &self.life {
            Some(Life::Leading(leader)) => {
                // What others are given from disk is kept for them.
                let gives = |number| self.catch_up.as_ref().is_some_and(|catch_up| catch_up.gives_to(number));
                let given = self.peers.iter().any(|p| p.from_disk && gives(p.number));
                if let Some(first) = leader.log.first_place().filter(|_| !given) {
                    disk.drop_old(trimmed, first, leader.shard.sessions());
                }
            }
            Some(Life::Following(f) | Life::Fencing(f, _)) => disk.drop_old(trimmed, f.bound(), f.sessions()),
            None => {}
        }
    }

    /// What is flushed here counts.
    fn tell_flushed(&mut self, now_ns: u64) {
        let Some(disk) = &self.disk else { return };
        let early = planted(Mutant::CountUnflushed);
        let flushed = if early { disk.store.requested().lsn } else { disk.store.flushed().lsn };
        if self.is_primary() {
            return self.count_flushed(now_ns, flushed);
        }
        let primary = self.peers.iter().find(|p| Some(p.number) == self.primary && p.greeting.is_some());
        if let Some(peer) = primary.filter(|_| self.told_flushed != Some(flushed)) {
            let remote = RemoteOffset { region: CONTROL_REGION, offset: FLUSHED_AT };
            if self.transport.write_inline(peer.id(), &flushed.0.to_le_bytes(), remote, Some(0)).is_ok() {
                self.told_flushed = Some(flushed);
            }
        }
    }

    /// Nothing of the region is being written to disk: it may be changed.
    pub(super) fn quiesce(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.quiesce();
        }
    }

    /// The log was made to conform to the primary of an epoch; the disk follows before that is answered.
    pub(super) fn conform_disk(&mut self, epoch: u32, anew: bool) {
        self.log_epoch = epoch;
        let own = self.own.incarnation;
        let Some(end) = self.follower().map(|follower| follower.log.place()) else { return };
        if let Some(disk) = &mut self.disk {
            disk.conform(end, anew, epoch, own);
        }
    }

    /// The log ends where it does now; the disk follows.
    pub(super) fn cut_disk(&mut self, anew: bool) {
        let Some(end) = self.follower().map(|follower| follower.log.place()) else { return };
        if let Some(disk) = &mut self.disk {
            disk.cut(end, anew);
        }
    }

    /// The replica ends in an orderly way. What others have placed here counts, and is kept.
    pub(super) fn end_log(&mut self) {
        if self.disk.is_none() {
            return;
        }
        // Nothing lands any more.
        for number in self.peers.iter().filter(|p| p.connected).map(|p| p.number).collect::<Vec<_>>() {
            self.shut_out(Some(number));
        }
        let end = match &mut self.life {
            Some(Life::Leading(leader)) => leader.log.place(),
            Some(Life::Following(follower) | Life::Fencing(follower, _)) => {
                follower.log.find_end();
                follower.log.place()
            }
            None => return,
        };
        if let Some(disk) = &mut self.disk
            && let Err(error) = disk.finish(end)
        {
            let text = format!("{error}: the newest records may not be on disk");
            self.warn(text);
        }
    }
}
