//! The floor: what sockets and memory alone cost on the same cores, with nothing of ours in between.
//!
//! A record's delivery cannot be faster than the network that carries it. Round trips of a record's size one way and an
//! acknowledgement's size the other say how fast that is here: once with both sides spinning, once with both blocking in
//! the kernel, which on small virtual machines differ by an order of magnitude.

use std::fmt::Write as _;
use std::hint::{black_box, spin_loop};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;

use core_affinity::CoreId;
use serde::Serialize;

use crate::log::{Clock, RealClock};
use crate::outside::{OutsideLoad, Watch};
use crate::stats::{Series, Summary};

/// Bytes sent one way: a record of the workload of interest.
pub const REQUEST_BYTES: usize = 4096;
/// Bytes sent back: an acknowledgement.
pub const ANSWER_BYTES: usize = 64;
/// Round trips before the first that counts, at most.
const WARM_UP: u64 = 200;
/// Copies per reading of the clock, which costs about as much as one.
const COPIES: usize = 256;

/// What to measure on.
#[derive(Clone, Debug)]
pub struct FloorConfig {
    /// Ids of the cores to use: the first two are. Threads are pinned to them; the caller's own thread is not touched.
    pub cores: Vec<usize>,
    /// Time for each of the measurements, in nanoseconds.
    pub each_ns: u64,
}

/// The ids of the cores that the calling thread may run on. Threads inherit this from the one that starts them, so ask
/// once, before any thread is pinned.
pub fn available_cores() -> Vec<usize> {
    core_affinity::get_core_ids().unwrap_or_default().into_iter().map(|core| core.id).collect()
}

/// Round trips of one kind.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RoundTrips {
    /// From before the first byte is written until the last of the answer is read.
    pub round_trip: Summary,
    /// Half of the median round trip in microseconds: an estimate, since the two directions carry different sizes.
    pub one_way_estimate_us: f64,
}

/// The floor of this machine.
#[derive(Clone, Debug, Serialize)]
pub struct Floor {
    /// antelog's version.
    pub version: &'static str,
    /// The cores of the two sides; equal when there was only one to use.
    pub cores: [usize; 2],
    /// Whether the threads could be pinned to them.
    pub pinned: bool,
    /// Bytes of a request.
    pub request_bytes: usize,
    /// Bytes of an answer.
    pub answer_bytes: usize,
    /// TCP over loopback, both sides reading without blocking over and over.
    pub tcp_spinning: RoundTrips,
    /// TCP over loopback, both sides blocking in the kernel.
    pub tcp_parked: RoundTrips,
    /// Copying a request's bytes within the processor's caches.
    pub memcpy: Summary,
    /// What else the machine did.
    pub outside_load: Option<OutsideLoad>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    Spinning,
    Parked,
}

/// Measures the floor. Takes three times [`FloorConfig::each_ns`] and a little.
///
/// # Errors
/// When no core is given, or loopback sockets do not work here.
pub fn measure(config: &FloorConfig) -> Result<Floor, String> {
    let first = *config.cores.first().ok_or("no core to measure on")?;
    let cores = [first, *config.cores.get(1).unwrap_or(&first)];
    let watch = Watch::start();
    let tcp = |waiting| {
        round_trips(waiting, cores, config.each_ns)
            .map_err(|error| format!("a TCP round trip over 127.0.0.1 failed: {error}; is loopback up?"))
    };
    let (tcp_spinning, pinned) = tcp(Waiting::Spinning)?;
    let (tcp_parked, parked_pinned) = tcp(Waiting::Parked)?;
    let (memcpy, copy_pinned) = on_core(first, || copies(config.each_ns));
    Ok(Floor {
        version: env!("CARGO_PKG_VERSION"),
        cores,
        pinned: pinned && parked_pinned && copy_pinned,
        request_bytes: REQUEST_BYTES,
        answer_bytes: ANSWER_BYTES,
        tcp_spinning,
        tcp_parked,
        memcpy,
        outside_load: watch.and_then(|w| w.stop()),
    })
}

/// Runs on a thread of its own, pinned to a core. Tells whether the pinning succeeded.
fn on_core<T: Send>(core: usize, work: impl FnOnce() -> T + Send) -> (T, bool) {
    thread::scope(|scope| {
        let thread = scope.spawn(move || {
            let pinned = core_affinity::set_for_current(CoreId { id: core });
            (work(), pinned)
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn round_trips(waiting: Waiting, cores: [usize; 2], each_ns: u64) -> io::Result<(RoundTrips, bool)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    // Both ends exist before a thread starts, so neither can wait for one that failed to.
    let mut client = TcpStream::connect(listener.local_addr()?)?;
    let (mut server, _) = listener.accept()?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(waiting == Waiting::Spinning)?;
    }
    let (asked, answered) = thread::scope(|scope| {
        let answering = scope.spawn(move || on_core(cores[1], || answer(&mut server)));
        // The client's end closes with its thread, and that ends the server's.
        let asked = on_core(cores[0], move || ask(&mut client, each_ns));
        (asked, answering.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    answered.0?;
    let round_trip = asked.0?.summary();
    Ok((RoundTrips { round_trip, one_way_estimate_us: round_trip.p50_us / 2.0 }, asked.1 && answered.1))
}

fn ask(stream: &mut TcpStream, each_ns: u64) -> io::Result<Series> {
    let mut series = Series::new();
    let (request, mut answer) = ([7; REQUEST_BYTES], [0; ANSWER_BYTES]);
    let begin_ns = RealClock.now_ns();
    let mut until_ns = None;
    for number in 0.. {
        let start_ns = RealClock.now_ns();
        write_whole(stream, &request)?;
        if !read_whole(stream, &mut answer)? {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let end_ns = RealClock.now_ns();
        match until_ns {
            // On one core a spinning round trip takes whole time slices: the warm-up has an end in time as well.
            None if number >= WARM_UP || end_ns - begin_ns >= each_ns / 10 => {
                until_ns = Some(end_ns.saturating_add(each_ns));
            }
            None => {}
            Some(until_ns) => {
                series.record_between(start_ns, end_ns);
                if end_ns >= until_ns {
                    break;
                }
            }
        }
    }
    Ok(series)
}

fn answer(stream: &mut TcpStream) -> io::Result<()> {
    let (mut request, answer) = ([0; REQUEST_BYTES], [7; ANSWER_BYTES]);
    while read_whole(stream, &mut request)? {
        write_whole(stream, &answer)?;
    }
    Ok(())
}

/// Fills `buffer`; `false` when the other side has closed before the first byte.
fn read_whole(stream: &mut TcpStream, buffer: &mut [u8]) -> io::Result<bool> {
    let mut filled = 0;
    while filled < buffer.len() {
        match stream.read(&mut buffer[filled..]) {
            Ok(0) if filled == 0 => return Ok(false),
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => spin_loop(),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn write_whole(stream: &mut TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => spin_loop(),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A copy takes tens of nanoseconds, too few for three digits: the series records picoseconds and is scaled afterwards.
fn copies(each_ns: u64) -> Summary {
    let mut series = Series::new();
    let (source, mut target) = (vec![7u8; REQUEST_BYTES], vec![0u8; REQUEST_BYTES]);
    let until_ns = RealClock.now_ns().saturating_add(each_ns);
    loop {
        let start_ns = RealClock.now_ns();
        for _ in 0..COPIES {
            black_box(&mut target).copy_from_slice(black_box(&source));
        }
        let end_ns = RealClock.now_ns();
        series.record_ns((end_ns - start_ns) * 1000 / COPIES as u64);
        if end_ns >= until_ns {
            break;
        }
    }
    let ps = series.summary();
    Summary {
        mean_us: ps.mean_us / 1e3,
        p50_us: ps.p50_us / 1e3,
        p90_us: ps.p90_us / 1e3,
        p99_us: ps.p99_us / 1e3,
        p999_us: ps.p999_us / 1e3,
        max_us: ps.max_us / 1e3,
        count: ps.count * COPIES as u64,
    }
}

impl Floor {
    /// Whether both sides had to share a core.
    pub fn is_on_one_core(&self) -> bool {
        self.cores[0] == self.cores[1]
    }

    /// The floor as a text table, at most 100 columns wide, ending in a line break.
    pub fn table(&self) -> String {
        let mut text = String::new();
        let heads: String = ["mean", "p50", "p90", "p99", "count"].iter().map(|head| format!("{head:>12}")).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{:<34}{heads}", "µs");
        let mut row = |name: &str, s: &Summary, digits: usize| {
            let values = [s.mean_us, s.p50_us, s.p90_us, s.p99_us].map(|us| format!("{us:>12.digits$}")).concat();
            let _ = writeln!(text, "{name:<34}{values}{:>12}", s.count);
        };
        row("TCP round trip, spinning", &self.tcp_spinning.round_trip, 1);
        row("TCP round trip, parked", &self.tcp_parked.round_trip, 1);
        row("memory copy, in cache", &self.memcpy, 3);
        let (spinning, parked) = (self.tcp_spinning.one_way_estimate_us, self.tcp_parked.one_way_estimate_us);
        let _ = writeln!(text, "one way, estimated as half a round trip: spinning {spinning:.1}, parked {parked:.1}");
        let (request, answer) = (self.request_bytes, self.answer_bytes);
        let [a, b] = self.cores;
        let _ = writeln!(
            text,
            "\n{request} bytes there, {answer} back, over loopback, between cores {a} and {b}; warm-up dropped"
        );
        if self.is_on_one_core() {
            text.push_str("NOTE only one core is available: both sides share it, and spinning ones block each other\n");
        }
        if !self.pinned {
            text.push_str("NOTE the threads could not be pinned: the system may have moved them between cores\n");
        }
        if let Some(OutsideLoad { load_average_before, busy_cores, steal_share, cores }) = self.outside_load {
            let steal = steal_share * 100.0;
            let _ = writeln!(
                text,
                "outside load: load average {load_average_before:.2} before; others kept {busy_cores:.2} of {cores} cores \
                 busy, {steal:.1} % stolen"
            );
        }
        text
    }

    /// The floor as JSON.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers with text keys are valid JSON")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that everything is measured and reported; how long it takes is the machine's business.
    fn check(cores: Vec<usize>) -> Floor {
        let floor = measure(&FloorConfig { cores, each_ns: 5_000_000 }).unwrap();
        for round_trips in [floor.tcp_spinning, floor.tcp_parked] {
            assert!(round_trips.round_trip.count > 0);
            assert_eq!(round_trips.one_way_estimate_us * 2.0, round_trips.round_trip.p50_us);
        }
        assert!(floor.memcpy.count >= COPIES as u64);
        let table = floor.table();
        assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
        let json: serde_json::Value = serde_json::from_str(&floor.json()).unwrap();
        assert!(json["tcp_parked"]["round_trip"]["p99_us"].is_f64() && json["memcpy"]["p50_us"].is_f64());
        floor
    }

    #[test]
    fn the_floor_is_measured_between_cores_and_on_one() {
        let cores = available_cores();
        let one = check(vec![cores[0]]);
        assert!(one.is_on_one_core() && one.table().contains("only one core is available"));
        if let [a, b, ..] = cores[..] {
            assert!(!check(vec![a, b]).is_on_one_core());
        }
        assert_eq!(available_cores(), cores, "the caller's thread was pinned");
    }

    #[test]
    fn cores_that_do_not_exist_are_told() {
        assert!(measure(&FloorConfig { cores: Vec::new(), each_ns: 1 }).is_err());
        let floor = check(vec![1023]);
        assert!(!floor.pinned && floor.table().contains("could not be pinned"));
    }
}
