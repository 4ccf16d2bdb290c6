//! Disks of the replicas: owned by the simulation, driven by virtual time, and still there when a process is not.
//!
//! What an agent waits for (a cut, an opening) is done within its turn, and its thread is busy for as long as it took.

use super::knobs::{DiskKnobs, Knobs};
use super::machine::Machine;
use super::overlay::Overlay;
use super::queue::What;
use super::rng::Rng;
use crate::log::Verifier;
use crate::node::Waker;
use crate::node::replica::{DiskOptions, Opened, Readers, open_disk};
use crate::storage::{Disk, Faults, Keep, SimDisk};
use antelog_protocol::shard::ShardConfig;

/// Syncs after which one fails, at most, where one does.
const SYNCS_MAX: u64 = 400;

/// The disks, by replica; none where replicas keep their logs in memory only.
pub(super) struct Stores {
    disks: Vec<SimDisk>,
    /// When each is looked at next.
    planned_ns: Vec<Option<u64>>,
    /// What befalls them; others' draws do not depend on it.
    fate: Rng,
}

impl Stores {
    pub(super) fn new(knobs: &Knobs) -> Stores {
        let count = if knobs.replica_disks.is_some() { knobs.replicas() } else { 0 };
        let seed = |replica: usize| knobs.seed.wrapping_mul(1 << 10).wrapping_add(replica as u64);
        Stores {
            disks: (0..count).map(|replica| SimDisk::new(seed(replica))).collect(),
            planned_ns: vec![None; count],
            fate: Rng::new(knobs.seed, 11),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.disks.is_empty()
    }

    /// A replica's disk.
    pub(super) fn of(&self, replica: usize) -> Option<&SimDisk> {
        self.disks.get(replica)
    }

    /// Opens a replica's log as the composition root does, and takes it up in `log`.
    pub(super) fn open(
        &mut self,
        knobs: &Knobs,
        replica: usize,
        log: &mut Verifier,
        config: &ShardConfig,
        (waker, gate_waker): (Waker, Waker),
    ) -> Option<Opened> {
        let (disk, disks) = (self.disks.get(replica)?, knobs.replica_disks.as_ref()?);
        let mut handle = disk.handle().unwrap_or_else(|why| panic!("a replica's disk: {why}"));
        handle.set_waker(waker.clone());
        let DiskKnobs { flushed, delay_ns: (delay_min_ns, delay_max_ns), short_percent, sync_fails_percent } = *disks;
        let faults = Faults { delay_min_ns, delay_max_ns, short_percent, ..Faults::default() };
        disk.set_faults(faults);
        let options = DiskOptions {
            cluster: "sim".into(),
            flushed,
            keep: Keep::default(),
            record_bytes_max: knobs.record_bytes_max as usize,
            unix_ms: 0,
            readers: Readers::Polled,
        };
        let opened = open_disk(handle, log, config, &options, waker, gate_waker);
        let opened = opened.unwrap_or_else(|why| panic!("a replica's disk is refused: {why}"));
        if self.fate.percent(sync_fails_percent) {
            disk.set_faults(Faults { sync_fails_after: Some(self.fate.scale(1, SYNCS_MAX)), ..faults });
        }
        Some(opened)
    }

    /// A replica's process dies, or its machine does.
    pub(super) fn die(&self, replica: usize, power: bool) {
        match self.disks.get(replica) {
            Some(disk) if power => disk.power_loss(),
            Some(disk) => disk.end_process(),
            None => {}
        }
    }

    /// From now on no disk fails.
    pub(super) fn mend(&self) {
        for disk in &self.disks {
            disk.set_faults(Faults { sync_fails_after: None, ..disk.faults() });
        }
    }
}

impl<O: Overlay> Machine<O> {
    /// For how long a machine has no power, in nanoseconds.
    pub(super) fn power_lasts_ns(&mut self) -> u64 {
        let suspect_ns = self.knobs.suspect_ns;
        self.power.scale(suspect_ns / 16 + 1, 2 * suspect_ns)
    }

    /// Replicas whose disks an agent uses: its own, or those beside a gate.
    fn disks_of(&self, agent: usize) -> std::ops::Range<usize> {
        let replicas = self.knobs.replicas();
        match agent {
            _ if self.cluster.stores.is_empty() => 0..0,
            _ if agent < replicas => agent..agent + 1,
            _ if self.cluster.gates.contains(&agent) => 0..replicas,
            _ => 0..0,
        }
    }

    /// Disks were asked for something in a thread's turn: until when the thread is busy.
    pub(super) fn plan_disks(&mut self, thread: usize, busy_ns: u64) -> u64 {
        let mut until_ns = busy_ns;
        if self.cluster.stores.is_empty() {
            return until_ns;
        }
        for agent in self.threads[thread].agents.clone() {
            for replica in self.disks_of(agent) {
                self.plan_disk(replica);
                if agent == replica {
                    until_ns = until_ns.max(self.cluster.stores.disks[replica].now_ns());
                }
            }
        }
        if until_ns > busy_ns {
            self.probes.add("replica waited for its disk", 1);
            for agent in self.threads[thread].agents.clone() {
                self.trouble(agent, until_ns);
            }
        }
        until_ns
    }

    fn plan_disk(&mut self, replica: usize) {
        let Some(next_ns) = self.cluster.stores.disks[replica].next_ns() else { return };
        let planned_ns = &mut self.cluster.stores.planned_ns[replica];
        if planned_ns.is_none_or(|planned| next_ns < planned) {
            *planned_ns = Some(next_ns);
            self.network.borrow_mut().plan(next_ns, What::Disk { replica });
        }
    }

    /// Something is done on a disk.
    pub(super) fn run_disk(&mut self, now_ns: u64, replica: usize) {
        self.cluster.stores.disks[replica].advance(now_ns);
        self.cluster.stores.planned_ns[replica] = None;
        self.plan_disk(replica);
    }
}
