//! The backup's duty cycle: verifies what the primary writes into its region, follows the order stream, reports.
//!
//! Replication itself needs no work here: the primary's writes land in the region without it.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use antelog_protocol::ShardId;
use antelog_protocol::ledger::Ledger;
use antelog_protocol::mutant::{Mutant, planted};
use antelog_protocol::wire::node::{NODE_MESSAGE_BYTES_MAX, NodeMessage, Report};
use antelog_protocol::wire::order::OrderEntry;

use super::agent::Agent;
use super::mailbox::{Admission, Mailbox, Notice};
use super::sequencer::ORDER_CREDIT;
use super::shard::SEQUENCER;
use crate::channel::mirror::{CONTROL_BYTES, END_AT};
use crate::counters::{Counter, Counters};
use crate::log::Verifier;
use crate::mem::Region;
use crate::transport::{DownReason, Event, MessageHandle, PeerId, RemoteOffset, Transport};

/// The primary's number at its backups.
pub const PRIMARY: PeerId = PeerId(1);

/// Entries verified in one cycle.
const VERIFY_PER_CYCLE: usize = 64;

/// What a backup agent is made of, besides its transport.
#[derive(Debug)]
pub struct BackupParts<L> {
    /// The shard.
    pub shard: ShardId,
    /// The replica's number in the shard, from 1.
    pub replica: u16,
    /// The log region, which the primary writes.
    pub region: Arc<Region>,
    /// The report is repeated this often, in nanoseconds.
    pub report_every_ns: u64,
    /// Cuts of free windows remembered.
    pub free_cuts_max: usize,
    /// Connections come from here.
    pub mailbox: Mailbox<Admission<L>>,
    /// Losses are told here.
    pub notices: Sender<Notice>,
    /// Counters to publish in.
    pub counters: Counters,
}

/// See the module's text.
pub struct BackupAgent<T: Transport> {
    name: String,
    transport: T,
    ledger: Ledger,
    verifier: Verifier,
    region: Arc<Region>,
    control: Arc<Region>,
    mailbox: Mailbox<Admission<T::Link>>,
    notices: Sender<Notice>,
    report: Report,
    report_every_ns: u64,
    report_at_ns: u64,
    sequencer_connected: bool,
    primary_connected: bool,
    /// End of the verified log that the primary was told, in absolute bytes.
    told_drained: u64,
    events: Box<[Event]>,
    verified: Counter,
}

impl<T: Transport> BackupAgent<T> {
    /// Builds the agent on the thread that will run it.
    ///
    /// # Errors
    /// When the kernel has no memory for the control region.
    pub fn new(parts: BackupParts<T::Link>, transport: T) -> std::io::Result<BackupAgent<T>> {
        let BackupParts { shard, replica, region, report_every_ns, free_cuts_max, mailbox, notices, counters } = parts;
        Ok(BackupAgent {
            name: format!("backup-{shard}-{replica}"),
            transport,
            ledger: Ledger::new(free_cuts_max),
            verifier: Verifier::new(region.clone(), shard),
            region,
            control: Region::new(CONTROL_BYTES)?,
            mailbox,
            notices,
            report: Report { shard, replica, ..Report::default() },
            report_every_ns,
            report_at_ns: 0,
            sequencer_connected: false,
            primary_connected: false,
            told_drained: 0,
            events: vec![Event::Notified { peer: SEQUENCER, value: 0 }; 64].into_boxed_slice(),
            verified: counters.register("verified_lsn"),
        })
    }

    fn admit(&mut self) -> usize {
        let Some(Admission::Node { peer, link }) = self.mailbox.take() else { return 0 };
        if peer == PRIMARY {
            let exposed = [self.region.clone(), self.control.clone()];
            self.transport.admit(peer, link, &exposed);
            self.primary_connected = true;
            self.told_drained = 0;
        } else {
            self.transport.admit(peer, link, &[]);
            self.sequencer_connected = true;
            self.report_at_ns = 0;
        }
        1
    }

    fn take_events(&mut self) -> usize {
        let count = self.transport.poll(&mut self.events);
        for at in 0..count {
            match self.events[at] {
                Event::Received { peer, message } => self.on_message(peer, message),
                Event::PeerDown { peer, reason } => self.on_down(peer, reason),
                // The primary's writes: `verify` looks at the end it announced.
                Event::Notified { .. } | Event::Placed { .. } => {}
            }
        }
        count
    }

    fn on_message(&mut self, peer: PeerId, handle: MessageHandle) {
        match NodeMessage::decode(self.transport.message(handle)) {
            Ok(NodeMessage::Order { index, entry }) if peer == SEQUENCER => {
                let applied = OrderEntry::decode(entry).map(|entry| self.ledger.apply(index, &entry));
                match applied {
                    Ok(Ok(_)) => {}
                    Ok(Err(contradiction)) => panic!("{}: {contradiction}", self.name),
                    Err(error) => panic!("{}: the order stream holds no entry: {error}", self.name),
                }
            }
            Ok(NodeMessage::Lead { .. }) if peer == SEQUENCER => {}
            _ => {
                self.transport.fence(peer);
                self.on_down(peer, DownReason::Protocol);
            }
        }
        self.transport.release(handle);
    }

    fn on_down(&mut self, peer: PeerId, reason: DownReason) {
        if peer == PRIMARY {
            self.primary_connected = false;
        } else {
            self.sequencer_connected = false;
        }
        // The control thread may be gone already when the node stops.
        let _ = self.notices.send(Notice::PeerDown { agent: self.name.clone(), peer, reason });
    }

    /// Checks what the primary has written. A bad entry ends the replica: it must not be promoted with it.
    fn verify(&mut self) -> usize {
        let written = self.control.load_u64(END_AT);
        let mut count = 0;
        let beyond = planted(Mutant::TakeShapesForEntries);
        while count < VERIFY_PER_CYCLE && (self.verifier.at() < written || beyond) {
            match self.verifier.step(written) {
                Ok(true) => count += 1,
                Ok(false) => break,
                Err(error) => panic!("{}: bad entry at slot {}: {error}", self.name, self.verifier.lsn()),
            }
        }
        if count > 0 {
            self.report.durable_lsn = self.verifier.lsn();
            self.verified.set(self.verifier.lsn().0);
        }
        count
    }

    fn send(&mut self, now_ns: u64) {
        let untold = self.verifier.at() - self.told_drained;
        // Told often enough that the primary never waits, and no more often: each time is a message.
        if self.primary_connected && untold >= self.region.len() as u64 / 16 {
            let remote = RemoteOffset { region: 0, offset: END_AT };
            let end = self.verifier.at();
            if self.transport.write_inline(PRIMARY, &end.to_le_bytes(), remote, Some(0)).is_ok() {
                self.told_drained = end;
            }
        }
        let behind = self.ledger.applied_index() - self.report.applied_index;
        if self.sequencer_connected && (now_ns >= self.report_at_ns || behind >= ORDER_CREDIT / 2) {
            self.report.applied_index = self.ledger.applied_index();
            self.report.view = self.ledger.view();
            let mut buffer = [0; NODE_MESSAGE_BYTES_MAX];
            let len = NodeMessage::Report(self.report).encode(&mut buffer);
            if self.transport.send(SEQUENCER, &buffer[..len]).is_ok() {
                self.report_at_ns = now_ns + self.report_every_ns;
            }
        }
    }
}

impl<T: Transport> Agent for BackupAgent<T> {
    fn name(&self) -> &str {
        &self.name
    }

    fn duty_cycle(&mut self, now_ns: u64) -> usize {
        let mut work = self.take_events();
        // The acknowledgement of what has landed: the primary waits for it, and not for the verification.
        self.transport.flush();
        work += self.admit();
        let verified = self.verify();
        self.send(now_ns);
        self.transport.flush();
        work += verified;
        work
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.sequencer_connected.then_some(self.report_at_ns)
    }

    fn wait_fds(&self, fds: &mut Vec<RawFd>) {
        self.transport.wait_fds(fds);
    }

    fn prepare_wait(&mut self) -> bool {
        self.transport.prepare_wait() || self.mailbox.waits()
    }
}
