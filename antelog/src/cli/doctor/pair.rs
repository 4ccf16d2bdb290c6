//! `doctor --listen` and `doctor --pair`: what two machines are to each other, through the transport that nodes use.

use std::sync::Arc;
use std::time::{Duration, Instant};

use antelog::network::{Network, Traffic, own_addresses};
use antelog_core::config::resolve;
use antelog_core::mem::Region;
use antelog_core::node::now_ns;
use antelog_core::transport::{Event, LocalRange, PeerId, RegionKey, RemoteOffset, Transport};
use antelog_net_rdma::health::Health;
use antelog_profile::stats::{Series, Summary};
use serde_json::json;

use super::super::link::{Door, Linked, call};
use super::super::transport::TransportArgs;
use super::super::{Outcome, output};

/// Where `--pair` calls, unless told.
const PORT: u16 = 7499;

const PEER: PeerId = PeerId(0);
/// Bytes of a record.
const RECORD_BYTES: usize = 4096;
/// Bytes of a message: a report, or a cut.
const MESSAGE_BYTES: usize = 64;
/// Bytes of a write when bandwidth is measured, and how many of them are under way.
const BLOCK_BYTES: usize = 64 << 10;
const BLOCKS: u64 = 32;
const REGION_BYTES: usize = BLOCK_BYTES * BLOCKS as usize;
/// Operations before the first that counts.
const WARM_UP: u64 = 20;
/// Without any answer for so long the other side is given up.
const PATIENCE: Duration = Duration::from_secs(10);

/// One of the two ends.
struct End<T: Transport> {
    transport: T,
    source: RegionKey,
    is_down: bool,
}

impl<T: Transport> End<T> {
    /// Polls once: the newest token placed, and how many messages came; each is answered if `echoes`.
    fn poll(&mut self, echoes: bool) -> (Option<u64>, u64) {
        let mut events = [Event::Notified { peer: PEER, value: 0 }; 16];
        let count = self.transport.poll(&mut events);
        let (mut placed, mut messages) = (None, 0);
        for event in &events[..count] {
            match *event {
                Event::Placed { token, .. } => placed = Some(token),
                Event::Received { message, .. } => {
                    self.transport.release(message);
                    messages += 1;
                    if echoes {
                        // A caller has one message under way, so there is room.
                        let _ = self.transport.send(PEER, &[7; MESSAGE_BYTES]);
                    }
                }
                Event::Notified { .. } => {}
                Event::PeerDown { .. } => self.is_down = true,
            }
        }
        self.transport.flush();
        (placed, messages)
    }

    /// Polls until `done` says so.
    fn until(&mut self, mut done: impl FnMut(&mut Self, Option<u64>, u64) -> bool) -> Result<(), String> {
        let mut heard = Instant::now();
        loop {
            let (placed, messages) = self.poll(false);
            if placed.is_some() || messages > 0 {
                heard = Instant::now();
            }
            if done(self, placed, messages) {
                return Ok(());
            }
            if self.is_down {
                return Err("the other side ended the connection; its output says why".into());
            }
            if heard.elapsed() > PATIENCE {
                return Err(format!("no answer for {PATIENCE:?}"));
            }
            std::hint::spin_loop();
        }
    }

    fn write(&mut self, offset: usize, len: usize, token: u64) -> bool {
        let local = LocalRange { region: self.source, offset, len };
        let remote = RemoteOffset { region: 0, offset };
        self.transport.write(PEER, local, remote, None, Some(token)).is_ok()
    }

    /// Writes of a record until they are placed, one at a time.
    fn write_latency(&mut self, for_ns: u64) -> Result<Summary, String> {
        let mut series = Series::new();
        let until_ns = now_ns() + for_ns;
        for token in 0.. {
            let mut start = now_ns();
            self.until(|end, _, _| {
                start = now_ns();
                end.write(0, RECORD_BYTES, token)
            })?;
            self.transport.flush();
            self.until(|_, placed, _| placed == Some(token))?;
            if token >= WARM_UP {
                series.record_between(start, now_ns());
                if now_ns() > until_ns {
                    break;
                }
            }
        }
        Ok(series.summary())
    }

    /// Messages there and back, one at a time.
    fn round_trips(&mut self, for_ns: u64) -> Result<Summary, String> {
        let mut series = Series::new();
        let until_ns = now_ns() + for_ns;
        for number in 0.. {
            let start = now_ns();
            self.until(|end, _, _| end.transport.send(PEER, &[7; MESSAGE_BYTES]).is_ok())?;
            self.transport.flush();
            self.until(|_, _, messages| messages > 0)?;
            if number >= WARM_UP {
                series.record_between(start, now_ns());
                if now_ns() > until_ns {
                    break;
                }
            }
        }
        Ok(series.summary())
    }

    /// Bytes placed per second with many writes under way.
    fn bandwidth(&mut self, for_ns: u64) -> Result<f64, String> {
        let start = now_ns();
        let (mut issued, mut placed) = (0u64, 0u64);
        while now_ns() < start + for_ns || placed < issued {
            while now_ns() < start + for_ns
                && issued < placed + BLOCKS
                && self.write((issued % BLOCKS) as usize * BLOCK_BYTES, BLOCK_BYTES, issued + 1)
            {
                issued += 1;
            }
            self.transport.flush();
            let before = placed;
            self.until(|_, token, _| {
                placed = token.unwrap_or(placed);
                placed > before || issued == before
            })?;
        }
        Ok(placed as f64 * BLOCK_BYTES as f64 / ((now_ns() - start) as f64 / 1e9))
    }
}

fn end(network: &Network, linked: Linked) -> Result<End<impl Transport + use<>>, String> {
    let region = || Region::new(REGION_BYTES).map_err(|e| format!("no memory for {REGION_BYTES} bytes: {e}"));
    let mut transport = network.transport(1, Traffic::Reports, None)?;
    let source = transport.register(region()?);
    network.check()?;
    transport.admit(PEER, linked.link, &[region()?]);
    Ok(End { transport, source, is_down: false })
}

fn said() -> Health {
    Health::new(Arc::new(|line: &str| eprintln!("antelog: {line}")))
}

/// Answers pairs until Ctrl-C.
pub fn listen(address: &str, transport: &TransportArgs) -> Outcome {
    let address = resolve(address)?;
    let network = Network::choose(&transport.options(), &[address.ip()], said())?;
    let door = Door::open(address, &network)?;
    output::print(&format!(
        "network: {}\nwaiting at {} for: antelog doctor --pair HOST",
        network.text(),
        door.address()
    ))?;
    while let Some(linked) = door.next() {
        output::print(&format!("{} over {}: {}", linked.peer, linked.path, linked.reason))?;
        let mut end = end(&network, linked)?;
        while !end.is_down {
            end.poll(true);
        }
    }
    Ok(())
}

/// Measures against a listener.
pub fn pair(host: &str, transport: &TransportArgs, seconds: f64, is_json: bool) -> Outcome {
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let name = if has_port { host.to_owned() } else { format!("{host}:{PORT}") };
    let address = resolve(&name)?;
    let network = Network::choose(&transport.options(), &own_addresses(&[name]), said())?;
    let linked =
        call(address, &network).map_err(|error| format!("{error} (on the other machine: antelog doctor --listen)"))?;
    let (path, reason) = (linked.path, linked.reason.clone());
    let mut end = end(&network, linked)?;
    let each_ns = (seconds * 1e9) as u64;
    let write = end.write_latency(each_ns)?;
    let round_trip = end.round_trips(each_ns)?;
    let bytes_per_s = end.bandwidth(each_ns)?;
    if is_json {
        let text = json!({
            "peer": address.to_string(), "path": path.to_string(), "reason": reason, "network": network.text(),
            "write_4096_until_placed": write, "round_trip_64": round_trip, "write_bytes_per_s": bytes_per_s,
        });
        return output::print(&text.to_string());
    }
    output::print(&format!("{address} over {path}: {reason}\n{:<42}{:>10}{:>10}{:>10}", "µs", "p50", "p99", "count"))?;
    for (what, s) in [("write of 4096 bytes until placed", write), ("message of 64 bytes there and back", round_trip)] {
        output::print(&format!("{what:<42}{:>10.1}{:>10.1}{:>10}", s.p50_us, s.p99_us, s.count))?;
    }
    output::print(&format!("writes of 64 KiB, 32 under way: {:.2} Gbit/s", bytes_per_s * 8.0 / 1e9))
}
