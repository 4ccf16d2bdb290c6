//! The floor on RDMA: what a bare request and its completion cost on this machine's device, beside the same through the
//! transport, measured in turns.
//!
//! Both ends are on the same device and driven by one thread: nothing but the device is between them. A write's time runs
//! until its completion, which needs no processor at the other end; a message's until its receive completes there.

use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::sync::Arc;

use antelog::network::{Network, NetworkOptions, NodeTransport, Traffic};
use antelog_core::channel::mirror::{CONTROL_BYTES, Mirror};
use antelog_core::mem::Region;
use antelog_core::node::now_ns;
use antelog_core::transport::{Event, LocalRange, PeerId, RegionKey, RemoteOffset, Transport};
use antelog_net_rdma::health::Health;
use antelog_net_rdma::provider::{
    Access, Completion, Done, End, Failure, Local, MemoryId, Operation, Patience, Provider, QueueId, Receive, Request,
};
use antelog_net_rdma::verbs::{Device, Place};
use antelog_profile::stats::{Series, Summary};
use antelog_protocol::Lsn;
use serde_json::json;

use super::link::{Door, call};

/// Bytes of a replicated record of 4 KiB: its entry in the log, header included.
const ENTRY_BYTES: usize = 4096 + 64;
/// Bytes of a small message: a report, or a cut.
const MESSAGE_BYTES: usize = 64;
/// Bytes of the log that is written over and over.
const LOG_BYTES: usize = 64 * ENTRY_BYTES;
/// Operations of each kind before the first that counts.
const WARM_UP: u64 = 100;
const QUEUE: QueueId = QueueId(0);
const PEER: PeerId = PeerId(0);

/// What was measured, in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct RdmaFloor {
    /// A write of an entry until its completion.
    bare_write: Summary,
    /// The same through the transport, until it is reported as placed.
    write: Summary,
    /// A write of an entry and a notified write of the log's end, as shards replicate, until it is reported as placed.
    replicate: Summary,
    /// A message until its receive completes.
    bare_send: Summary,
    /// The same through the transport, until it is reported as received.
    send: Summary,
}

/// Measures for about so long.
///
/// # Errors
/// The device cannot be used, or stopped working: one line.
pub fn measure(options: &NetworkOptions, each_ns: u64) -> Result<(RdmaFloor, String), String> {
    let network = Network::choose(options, &[Ipv4Addr::LOCALHOST.into()], Health::new(Arc::new(|_: &str| {})))?;
    let choice = network.device().ok_or("no RDMA device")?.clone();
    let place = Place { device: choice.device, port: choice.port, gid_index: choice.gid_index };
    let mut bare = Bare::new(&place)?;
    let mut pair = Pair::new(&network)?;
    let mut series: [Series; 5] = Default::default();
    let until_ns = now_ns() + 5 * each_ns;
    for number in 0.. {
        let times = [bare.write()?, pair.write()?, pair.replicate()?, bare.send()?, pair.send()?];
        if number >= WARM_UP {
            series.iter_mut().zip(times).for_each(|(series, ns)| series.record_ns(ns));
            if now_ns() > until_ns {
                break;
            }
        }
    }
    let [bare_write, write, replicate, bare_send, send] = series.map(|series| series.summary());
    Ok((RdmaFloor { bare_write, write, replicate, bare_send, send }, place.to_string()))
}

impl RdmaFloor {
    /// As a table, at most 100 columns wide.
    pub fn table(&self, place: &str) -> String {
        let mut text = String::new();
        let heads: String = ["p50", "p90", "p99", "count", "÷ bare"].iter().map(|head| format!("{head:>11}")).collect();
        let _ = writeln!(text, "{:<44}{heads}", "µs");
        let mut row = |name: &str, s: &Summary, bare: &Summary| {
            let values = [s.p50_us, s.p90_us, s.p99_us].map(|us| format!("{us:>11.1}")).concat();
            let _ = writeln!(text, "{name:<44}{values}{:>11}{:>11.2}", s.count, s.p50_us / bare.p50_us);
        };
        row("write of 4160 bytes, bare", &self.bare_write, &self.bare_write);
        row("write through the transport until placed", &self.write, &self.bare_write);
        row("replication: write, end, until placed", &self.replicate, &self.bare_write);
        row("message of 64 bytes, bare", &self.bare_send, &self.bare_send);
        row("message through the transport", &self.send, &self.bare_send);
        let _ = writeln!(text, "\nboth ends on {place}, one thread, measured in turns");
        text
    }

    /// As JSON.
    pub fn json(&self, place: &str) -> serde_json::Value {
        json!({
            "device": place,
            "bare_write": self.bare_write, "write": self.write, "replicate": self.replicate,
            "bare_send": self.bare_send, "send": self.send,
            "write_ratio": self.write.p50_us / self.bare_write.p50_us,
            "replicate_ratio": self.replicate.p50_us / self.bare_write.p50_us,
            "send_ratio": self.send.p50_us / self.bare_send.p50_us,
        })
    }
}

/// Two queue pairs without anything of ours above.
struct Bare {
    here: Device,
    there: Device,
    source: MemoryId,
    target: (u64, u32),
    buffer: MemoryId,
    inline_bytes: usize,
}

impl Bare {
    fn new(place: &Place) -> Result<Bare, String> {
        let failed = |error: antelog_net_rdma::provider::ProviderError| error.text;
        let mut here = Device::open(place, 1, 256).map_err(failed)?;
        let mut there = Device::open(place, 1, 256).map_err(failed)?;
        let region = || Region::new(LOG_BYTES).map_err(|e| format!("no memory: {e}"));
        let source = here.register(&region()?, Access::Local).map_err(failed)?;
        let target = there.register(&region()?, Access::RemoteWrite).map_err(failed)?;
        let buffer = there.register(&region()?, Access::Local).map_err(failed)?;
        let (number, inline_bytes) = here.create(QUEUE, 32, 32).map_err(failed)?;
        let (other, _) = there.create(QUEUE, 32, 32).map_err(failed)?;
        let patience = Patience { ack_timeout: 18, retries: 7 };
        let end = End { port: here.port(), number, psn: 7 };
        let far = End { port: there.port(), number: other, psn: 9 };
        here.connect(QUEUE, 7, &far, patience).map_err(failed)?;
        there.connect(QUEUE, 9, &end, patience).map_err(failed)?;
        let remote = there.remote(target);
        Ok(Bare { here, there, source, target: (remote.address, remote.rkey), buffer, inline_bytes })
    }

    fn write(&mut self) -> Result<u64, String> {
        let local = Local { memory: self.source, offset: 0, len: ENTRY_BYTES };
        let operation = Operation::Write { address: self.target.0, rkey: self.target.1, imm: None };
        let request = Request { id: 1, operation, local, signalled: true, inline: false };
        let start = now_ns();
        self.here.post(QUEUE, &[request]).map_err(|error| error.text)?;
        wait(&mut self.here)?;
        Ok(now_ns() - start)
    }

    fn send(&mut self) -> Result<u64, String> {
        let local = Local { memory: self.buffer, offset: 0, len: MESSAGE_BYTES };
        self.there.post_receives(QUEUE, &[Receive { id: 2, local }]).map_err(|error| error.text)?;
        let local = Local { memory: self.source, offset: 0, len: MESSAGE_BYTES };
        let inline = MESSAGE_BYTES <= self.inline_bytes;
        let request = Request { id: 3, operation: Operation::Send { imm: None }, local, signalled: true, inline };
        let start = now_ns();
        self.here.post(QUEUE, &[request]).map_err(|error| error.text)?;
        wait(&mut self.there)?;
        let took = now_ns() - start;
        wait(&mut self.here)?;
        Ok(took)
    }
}

fn wait(device: &mut Device) -> Result<(), String> {
    let nothing = Completion { id: 0, result: Err(Failure::Flushed) };
    let mut found = [nothing; 1];
    while device.poll(&mut found) == 0 {
        std::hint::spin_loop();
    }
    match found[0].result {
        Ok(Done::Request | Done::Received { .. } | Done::Notified { .. }) => Ok(()),
        Err(failure) => Err(format!("a bare request failed: {failure:?}")),
    }
}

/// Two transports, connected, with a mirror between them.
struct Pair {
    here: NodeTransport,
    there: NodeTransport,
    mirror: Mirror,
    /// End of the log so far, in bytes and slots.
    log: (u64, u64),
    source: RegionKey,
}

impl Pair {
    fn new(network: &Network) -> Result<Pair, String> {
        let region = |bytes| Region::new(bytes).map_err(|e| format!("no memory: {e}"));
        let mut here = network.transport(1, Traffic::OrderStream, None)?;
        let mut there = network.transport(1, Traffic::OrderStream, None)?;
        let source = here.register(region(LOG_BYTES)?);
        network.check()?;
        let door = Door::open((Ipv4Addr::LOCALHOST, 0).into(), network)?;
        let near = call(door.address(), network)?;
        let far = door.next().ok_or("no connection over loopback")?;
        let control = region(CONTROL_BYTES)?;
        here.admit(PEER, near.link, std::slice::from_ref(&control));
        there.admit(PEER, far.link, &[region(LOG_BYTES)?, region(CONTROL_BYTES)?]);
        let mut mirror = Mirror::new(PEER, source, LOG_BYTES, control);
        mirror.on_connected();
        let mut pair = Pair { here, there, mirror, log: (0, 0), source };
        while !pair.here.is_pair(PEER) || !pair.there.is_pair(PEER) {
            pair.settle()?;
        }
        Ok(pair)
    }

    fn write(&mut self) -> Result<u64, String> {
        self.settle()?;
        let local = LocalRange { region: self.source, offset: 0, len: ENTRY_BYTES };
        let remote = RemoteOffset { region: 0, offset: 0 };
        let start = now_ns();
        self.here.write(PEER, local, remote, None, Some(0)).map_err(|_| "a write was refused")?;
        self.here.flush();
        while look(&mut self.here)?.0.is_none() {}
        Ok(now_ns() - start)
    }

    fn replicate(&mut self) -> Result<u64, String> {
        self.settle()?;
        self.log = (self.log.0 + ENTRY_BYTES as u64, self.log.1 + 1);
        let start = now_ns();
        self.mirror.pump(&mut self.here, self.log.0, Lsn(self.log.1));
        self.here.flush();
        let placed = loop {
            if let Some(placed) = look(&mut self.here)?.0 {
                break placed;
            }
        };
        let took = now_ns() - start;
        self.mirror.on_placed(placed);
        // What a shard does in its next cycle.
        self.mirror.pump(&mut self.here, self.log.0, Lsn(self.log.1));
        Ok(took)
    }

    fn send(&mut self) -> Result<u64, String> {
        self.settle()?;
        let start = now_ns();
        self.here.send(PEER, &[7; MESSAGE_BYTES]).map_err(|_| "a message was refused")?;
        self.here.flush();
        while !look(&mut self.there)?.1 {}
        Ok(now_ns() - start)
    }

    /// Handles what earlier operations have left behind, outside of what is timed.
    fn settle(&mut self) -> Result<(), String> {
        for _ in 0..3 {
            for side in [&mut self.here, &mut self.there] {
                look(side)?;
                side.flush();
            }
        }
        Ok(())
    }
}

/// Polls one side once.
fn look(transport: &mut NodeTransport) -> Result<(Option<u64>, bool), String> {
    let mut events = [Event::Notified { peer: PEER, value: 0 }; 4];
    let count = transport.poll(&mut events);
    let mut found = (None, false);
    for event in &events[..count] {
        match *event {
            Event::Placed { token, .. } => found.0 = Some(token),
            Event::Received { message, .. } => {
                transport.release(message);
                found.1 = true;
            }
            Event::Notified { .. } => {}
            Event::PeerDown { reason, .. } => return Err(format!("the pair ended: {reason:?}")),
        }
    }
    Ok(found)
}
