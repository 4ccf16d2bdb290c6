//! What the transport costs on loopback, beside bare sockets: `cargo run --release --example pingpong`.
//!
//! Two spinning threads. Latency: a write of 4 KiB with a token until it is placed, one at a time, against 4 KiB
//! over a bare non-blocking `TcpStream` answered by 64 bytes. Throughput: the same with 64 writes under way.

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use antelog_core::access::Access;
use antelog_core::handshake::{Endpoint, Hello, Refusal, Welcome};
use antelog_core::mem::Region;
use antelog_core::path::{Ability, Path};
use antelog_core::transport::{Event, LocalRange, PeerId, RemoteOffset, Transport};
use antelog_net_tcp::{Accept, Listener, Options, TcpLink, TcpTransport, dial};

const RECORD_BYTES: usize = 4096;
const REPLY_BYTES: usize = 64;
const WINDOW: usize = 64;
const ROUNDS: usize = 100_000;
const WARM_UP: usize = 5_000;
const PEER: PeerId = PeerId(0);
type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

struct Everybody(Mutex<Sender<TcpLink>>);

impl Accept for Everybody {
    fn decide(&self, _: &Hello, _: SocketAddr, _: Option<usize>) -> std::result::Result<Welcome, Refusal> {
        Ok(Welcome {
            incarnation: 1,
            ring_bytes: 0,
            record_bytes_max: 0,
            log_bytes: 0,
            access: Access::Admin,
            path: Path::Tcp,
            path_reason: String::new(),
            payload: Vec::new(),
        })
    }

    fn established(&self, _: Hello, _: Welcome, _: Option<usize>, link: TcpLink) {
        // Fails only when the program is at its end.
        let _ = self.0.lock().map(|links| links.send(link));
    }

    fn refused(&self, from: SocketAddr, why: &str) {
        eprintln!("{from} {why}");
    }
}

fn links() -> Result<(TcpLink, TcpLink)> {
    let (taken, links) = mpsc::channel();
    let listener = Listener::bind("127.0.0.1:0".parse()?)?;
    let address = listener.local_addr();
    let _handle = listener.serve(Arc::new(Everybody(Mutex::new(taken))))?;
    let from = Endpoint::Client { session: 1 };
    let hello = Hello {
        cluster: "bench".into(),
        from,
        record_bytes_max: 0,
        ring_bytes: 0,
        log_bytes: 0,
        ability: Ability::tcp(),
        nonce: None,
    };
    let (here, _) = dial(address, &hello, None, Duration::from_secs(5))?;
    Ok((here, links.recv()?))
}

fn print(what: &str, mut times: Vec<Duration>, total: Duration) {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    let rate = times.len() as f64 / total.as_secs_f64();
    println!(
        "{what:<34} p50 {:7.2}  p99 {:7.2}  p99.9 {:7.2} us  {:8.0} writes/s  {:6.2} Gbit/s",
        at(0.5),
        at(0.99),
        at(0.999),
        rate,
        rate * RECORD_BYTES as f64 * 8e-9
    );
}

/// Keeps `window` writes under way and measures each from its issue until it is placed.
fn transport(window: usize) -> Result<()> {
    let (here, there) = links()?;
    let is_over = Arc::new(AtomicBool::new(false));
    let over = is_over.clone();
    let other = thread::spawn(move || -> Result<()> {
        let mut transport = TcpTransport::new(1, Options::default())?;
        transport.admit(PEER, there, &[Region::new(4 << 20)?]);
        let mut events = [Event::Placed { peer: PEER, token: 0 }; 16];
        while !over.load(Ordering::Relaxed) {
            transport.poll(&mut events);
            transport.flush();
        }
        Ok(())
    });
    let mut transport = TcpTransport::new(1, Options::default())?;
    let key = transport.register(Region::new(4 << 20)?);
    transport.admit(PEER, here, &[]);
    let mut events = [Event::Placed { peer: PEER, token: 0 }; 16];
    let mut issued: Vec<Instant> = Vec::with_capacity(ROUNDS + WARM_UP);
    let mut times = Vec::with_capacity(ROUNDS + WARM_UP);
    let mut start = Instant::now();
    while times.len() < ROUNDS + WARM_UP {
        while issued.len() < ROUNDS + WARM_UP && issued.len() - times.len() < window {
            let offset = issued.len() % 512 * RECORD_BYTES;
            let local = LocalRange { region: key, offset, len: RECORD_BYTES };
            let token = issued.len() as u64;
            issued.push(Instant::now());
            if transport.write(PEER, local, RemoteOffset { region: 0, offset }, Some(1), Some(token)).is_err() {
                issued.pop();
                break;
            }
        }
        transport.flush();
        let count = transport.poll(&mut events);
        for event in &events[..count] {
            match *event {
                Event::Placed { token, .. } => {
                    let now = Instant::now();
                    while times.len() <= token as usize {
                        times.push(now - issued[times.len()]);
                        if times.len() == WARM_UP {
                            start = now;
                        }
                    }
                }
                other => return Err(format!("unexpected {other:?}").into()),
            }
        }
    }
    let total = start.elapsed();
    is_over.store(true, Ordering::Relaxed);
    drop(transport);
    other.join().map_err(|_| "the other thread panicked")??;
    print(&format!("transport, window {window}"), times.split_off(WARM_UP), total);
    Ok(())
}

/// Reads exactly `out.len()` bytes, spinning if the socket does not block; false at the end.
fn read_all(stream: &mut TcpStream, out: &mut [u8]) -> io::Result<bool> {
    let mut filled = 0;
    while filled < out.len() {
        match stream.read(&mut out[filled..]) {
            Ok(0) => return Ok(false),
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn bare(is_spinning: bool) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut here = TcpStream::connect(listener.local_addr()?)?;
    let (mut there, _) = listener.accept()?;
    for stream in [&here, &there] {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(is_spinning)?;
    }
    let other = thread::spawn(move || -> io::Result<()> {
        let mut record = [0; RECORD_BYTES];
        while read_all(&mut there, &mut record)? {
            // The socket's buffer is empty at this point, so a small write is never refused.
            there.write_all(&record[..REPLY_BYTES])?;
        }
        Ok(())
    });
    let record = [7; RECORD_BYTES];
    let mut reply = [0; REPLY_BYTES];
    let mut times = Vec::with_capacity(ROUNDS);
    let mut start = Instant::now();
    for round in 0..ROUNDS + WARM_UP {
        if round == WARM_UP {
            start = Instant::now();
        }
        let issued = Instant::now();
        here.write_all(&record)?;
        read_all(&mut here, &mut reply)?;
        if round >= WARM_UP {
            times.push(issued.elapsed());
        }
    }
    let total = start.elapsed();
    drop(here);
    other.join().map_err(|_| "the other thread panicked")??;
    print(if is_spinning { "bare sockets, spinning" } else { "bare sockets, blocking" }, times, total);
    Ok(())
}

fn main() -> Result<()> {
    println!("{RECORD_BYTES} bytes there, an acknowledgement back; {ROUNDS} times each");
    for _ in 0..2 {
        bare(true)?;
        transport(1)?;
    }
    bare(false)?;
    transport(WINDOW)
}
