//! Taking calls: one unpinned thread drives all pending hand-shakes with non-blocking sockets.
//!
//! Strangers come in all kinds: port scanners, HTTP clients, other versions, connections that send nothing. None of
//! them may delay a node that means it, so every hand-shake has one deadline for all of it, their number is bounded,
//! and a newcomer displaces the oldest when there are too many.

use std::collections::VecDeque;
use std::error::Error;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use antelog_core::access::{PROOF_BYTES, Secret};
use antelog_core::handshake::proof::{Exchange, Side, nonce};
use antelog_core::handshake::{
    Answer, HELLO_BODY_BYTES_MAX, HELLO_HEADER_BYTES, HandshakeError, Hello, MAGIC, Refusal, RefusalCode, VERSION,
    Welcome, hello_body_bytes, may_be_handshake,
};

use crate::bootstrap::TcpLink;
use crate::uring::wait_ready;

/// How long a hand-shake may take as a whole.
pub const HANDSHAKE_TIME: Duration = Duration::from_secs(2);

/// How many hand-shakes may be under way.
pub const PENDING_MAX: usize = 64;

/// How long no connection is taken after the system could not give us one, for lack of descriptors say.
const PAUSE: Duration = Duration::from_millis(100);

/// How much a stranger may go on sending before it is cut off without having read its refusal.
const DRAIN_BYTES_MAX: usize = 64 << 10;

/// Decides who may connect. Called on the listener's thread, so it must not block.
pub trait Accept: Send + Sync {
    /// The secrets of which such a caller must prove that it knows one; none: nobody has to.
    fn secrets(&self, _hello: &Hello) -> &[Secret] {
        &[]
    }

    /// Whether the caller at `from` may connect; magic and version were fine, and it knows this one of the
    /// [`secrets`](Self::secrets), if there are any.
    ///
    /// # Errors
    /// The refusal to send.
    fn decide(&self, hello: &Hello, from: SocketAddr, secret: Option<usize>) -> Result<Welcome, Refusal>;

    /// The caller was welcomed, like this; the connection is for a data thread to admit.
    fn established(&self, hello: Hello, welcome: Welcome, secret: Option<usize>, link: TcpLink);

    /// A caller was turned away. `why` is one line that follows its address, like "speaks protocol version 7, …".
    fn refused(&self, from: SocketAddr, why: &str);
}

/// Why there is no listener.
#[derive(Debug)]
pub enum BindError {
    /// Another process has the port.
    InUse(SocketAddr),
    /// This machine does not have the address.
    NoSuchAddress(SocketAddr),
    /// The port is reserved for the superuser.
    Privileged(SocketAddr),
    /// Anything else.
    Io(SocketAddr, io::Error),
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BindError::InUse(addr) => write!(
                f,
                "cannot listen on {addr}: port {port} is in use by another process; stop it (\"ss -ltnp sport = \
                 :{port}\" shows which it is) or choose another port",
                port = addr.port()
            ),
            BindError::NoSuchAddress(addr) => write!(
                f,
                "cannot listen on {addr}: this machine does not have the address {}; \"ip addr\" shows those it has",
                addr.ip()
            ),
            BindError::Privileged(addr) => {
                write!(f, "cannot listen on {addr}: port {} needs privileges; choose one above 1023", addr.port())
            }
            BindError::Io(addr, error) => write!(f, "cannot listen on {addr}: {error}"),
        }
    }
}

impl Error for BindError {}

/// A bound port on which nobody is answered yet.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    local: SocketAddr,
}

impl Listener {
    /// Binds `addr`; port 0 lets the system choose one.
    ///
    /// # Errors
    /// [`BindError`], whose text says what to do.
    pub fn bind(addr: SocketAddr) -> Result<Listener, BindError> {
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse(addr),
            io::ErrorKind::AddrNotAvailable => BindError::NoSuchAddress(addr),
            io::ErrorKind::PermissionDenied => BindError::Privileged(addr),
            _ => BindError::Io(addr, error),
        };
        let socket = TcpListener::bind(addr).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        let local = socket.local_addr().map_err(failed)?;
        Ok(Listener { socket, local })
    }

    /// The address bound, with the port the system chose.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Answers calls on a thread of its own until the handle is dropped.
    ///
    /// # Errors
    /// The system's, when it has no thread or descriptor for it.
    pub fn serve(self, accept: Arc<dyn Accept>) -> io::Result<ListenerHandle> {
        let (wake, woken) = UnixStream::pair()?;
        let local = self.local;
        let mut server = Server { listener: self, woken, accept, pending: VecDeque::new(), paused_until: None };
        let thread = thread::Builder::new().name("antelog-listen".into()).spawn(move || server.run())?;
        Ok(ListenerHandle { local, wake: Some(wake), thread: Some(thread) })
    }
}

/// A listener at work. Stops when dropped.
#[derive(Debug)]
pub struct ListenerHandle {
    local: SocketAddr,
    wake: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl ListenerHandle {
    /// The address it listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Stops listening, drops unfinished hand-shakes and waits for the thread to end.
    pub fn stop(&mut self) {
        // The closed pair is what wakes the thread.
        self.wake = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for ListenerHandle {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Server {
    listener: Listener,
    woken: UnixStream,
    accept: Arc<dyn Accept>,
    /// Oldest first, so its deadline is the nearest.
    pending: VecDeque<Pending>,
    paused_until: Option<Instant>,
}

impl Server {
    fn run(&mut self) {
        let mut entries = Vec::with_capacity(PENDING_MAX + 2);
        loop {
            let now = Instant::now();
            self.paused_until = self.paused_until.filter(|&until| until > now);
            entries.clear();
            entries.push(entry(&self.woken, libc::POLLIN));
            entries.push(entry(&self.listener.socket, if self.paused_until.is_none() { libc::POLLIN } else { 0 }));
            entries.extend(self.pending.iter().map(|pending| entry(&pending.stream, pending.interest())));
            let next = self.pending.front().map(|oldest| oldest.deadline).into_iter().chain(self.paused_until).min();
            // Rounded up, or the last millisecond would be spent spinning.
            let time = next.map_or(Duration::from_secs(3600), |next| {
                next.saturating_duration_since(now) + Duration::from_millis(1)
            });
            if wait_ready(&mut entries, time).is_err() {
                // Out of kernel memory; the next attempt may find some.
                thread::sleep(PAUSE);
            }
            if entries[0].revents != 0 {
                return;
            }
            let now = Instant::now();
            let accept = &*self.accept;
            let mut states = entries[2..].iter();
            self.pending.retain_mut(|pending| {
                let is_ready = states.next().is_some_and(|entry| entry.revents != 0);
                (!is_ready || pending.advance(accept)) && !pending.is_late(now, accept)
            });
            if entries[1].revents != 0 {
                self.take_calls();
            }
        }
    }

    fn take_calls(&mut self) {
        // Bounded, so that a flood of calls does not starve those being answered.
        for _ in 0..PENDING_MAX {
            match self.listener.socket.accept() {
                Ok((stream, from)) => {
                    if self.pending.len() == PENDING_MAX
                        && let Some(oldest) = self.pending.pop_front()
                    {
                        let why = format!("made way for others: {PENDING_MAX} hand-shakes are pending");
                        self.accept.refused(oldest.from, &why);
                    }
                    if let Some(mut pending) = Pending::new(stream, from)
                        && pending.advance(&*self.accept)
                    {
                        self.pending.push_back(pending);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The caller gave up before we came to it.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.accept.refused(self.listener.local, &format!("cannot take calls: {error}"));
                    self.paused_until = Some(Instant::now() + PAUSE);
                    return;
                }
            }
        }
    }
}

fn entry(socket: &impl AsRawFd, events: libc::c_short) -> libc::pollfd {
    libc::pollfd { fd: socket.as_raw_fd(), events, revents: 0 }
}

/// Where a hand-shake is.
enum Stage {
    /// Reads the hello: bytes so far, bytes wanted as far as known.
    Hello { bytes: Vec<u8>, wanted: usize },
    /// Sends the challenge.
    Challenge { bytes: Vec<u8>, sent: usize, hello: Hello, exchange: Exchange },
    /// Reads the caller's proof.
    Proof { proof: [u8; PROOF_BYTES], got: usize, hello: Hello, exchange: Exchange },
    /// Sends the answer; then, if that is a welcome, the connection is established.
    Answer { bytes: Vec<u8>, sent: usize, welcomed: Option<(Hello, Welcome, Option<usize>)> },
    /// Reads on for a while after a refusal: closing now would reset the connection and destroy the refusal before
    /// it is read.
    Drain { bytes: usize },
}

/// A hand-shake under way.
struct Pending {
    stream: TcpStream,
    from: SocketAddr,
    deadline: Instant,
    stage: Stage,
}

impl Pending {
    fn new(stream: TcpStream, from: SocketAddr) -> Option<Pending> {
        stream.set_nonblocking(true).ok()?;
        stream.set_nodelay(true).ok()?;
        let stage = Stage::Hello { bytes: Vec::with_capacity(128), wanted: HELLO_HEADER_BYTES };
        Some(Pending { stream, from, deadline: Instant::now() + HANDSHAKE_TIME, stage })
    }

    fn interest(&self) -> libc::c_short {
        let writes = matches!(self.stage, Stage::Answer { .. } | Stage::Challenge { .. });
        if writes { libc::POLLOUT } else { libc::POLLIN }
    }

    /// Goes on as far as possible without blocking; false when it is over.
    fn advance(&mut self, accept: &dyn Accept) -> bool {
        loop {
            let next = match &mut self.stage {
                Stage::Hello { .. } => self.read_hello(accept),
                Stage::Challenge { .. } => self.write_challenge(),
                Stage::Proof { .. } => self.read_proof(accept),
                Stage::Answer { .. } => self.write_answer(accept),
                Stage::Drain { .. } => self.drain(),
            };
            match next {
                Ok(Some(stage)) => self.stage = stage,
                Ok(None) => return false,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    if !matches!(self.stage, Stage::Drain { .. }) {
                        accept.refused(self.from, &format!("left during the hand-shake: {error}"));
                    }
                    return false;
                }
            }
        }
    }

    fn is_late(&self, now: Instant, accept: &dyn Accept) -> bool {
        let is_late = now >= self.deadline;
        if is_late && !matches!(self.stage, Stage::Drain { .. }) {
            accept.refused(self.from, &format!("did not finish its hand-shake within {HANDSHAKE_TIME:?}"));
        }
        is_late
    }

    fn read_hello(&mut self, accept: &dyn Accept) -> io::Result<Option<Stage>> {
        let Stage::Hello { bytes, wanted } = &mut self.stage else { return Ok(None) };
        let mut chunk = [0; HELLO_HEADER_BYTES + HELLO_BODY_BYTES_MAX];
        // Never beyond the hello: what follows it belongs to the transport.
        let got = (&self.stream).read(&mut chunk[..*wanted - bytes.len()])?;
        if got == 0 {
            let what = if bytes.is_empty() { "without a word" } else { "in the middle of its hand-shake" };
            accept.refused(self.from, &format!("closed the connection {what}"));
            return Ok(None);
        }
        bytes.extend_from_slice(&chunk[..got]);
        if !may_be_handshake(bytes) {
            let start = bytes[..bytes.len().min(MAGIC.len())].to_vec();
            return Ok(Some(turn_away(self.from, &HandshakeError::Magic(start), accept)));
        }
        if bytes.len() < *wanted {
            return Ok(Some(Stage::Hello { bytes: std::mem::take(bytes), wanted: *wanted }));
        }
        if bytes.len() == HELLO_HEADER_BYTES
            && let Some(header) = bytes.first_chunk()
        {
            match hello_body_bytes(header) {
                Ok(0) => {}
                Ok(len) => {
                    let wanted = HELLO_HEADER_BYTES + len;
                    return Ok(Some(Stage::Hello { bytes: std::mem::take(bytes), wanted }));
                }
                Err(error) => return Ok(Some(turn_away(self.from, &error, accept))),
            }
        }
        let hello = match Hello::decode(&bytes[HELLO_HEADER_BYTES..]) {
            Ok(hello) => hello,
            Err(error) => return Ok(Some(turn_away(self.from, &error, accept))),
        };
        let requires = !accept.secrets(&hello).is_empty();
        Ok(Some(match (requires, hello.nonce.is_some()) {
            (false, false) => decide(self.from, hello, None, accept),
            (true, true) => challenge(self.from, hello, bytes, accept),
            (true, false) => refuse(self.from, Refusal::new(RefusalCode::Secret, SECRET_NEEDED), accept),
            (false, true) => refuse(self.from, Refusal::new(RefusalCode::Secret, SECRET_UNKNOWN), accept),
        }))
    }

    fn write_challenge(&mut self) -> io::Result<Option<Stage>> {
        let Stage::Challenge { bytes, sent, .. } = &mut self.stage else { return Ok(None) };
        write_all(&self.stream, bytes, sent)?;
        // Taken out whole: a hello is not copied.
        let Stage::Challenge { hello, exchange, .. } = std::mem::replace(&mut self.stage, Stage::Drain { bytes: 0 })
        else {
            return Ok(None);
        };
        Ok(Some(Stage::Proof { proof: [0; PROOF_BYTES], got: 0, hello, exchange }))
    }

    fn read_proof(&mut self, accept: &dyn Accept) -> io::Result<Option<Stage>> {
        let Stage::Proof { proof, got, .. } = &mut self.stage else { return Ok(None) };
        while *got < PROOF_BYTES {
            match (&self.stream).read(&mut proof[*got..])? {
                0 => {
                    accept.refused(self.from, "closed the connection in the middle of its hand-shake");
                    return Ok(None);
                }
                read => *got += read,
            }
        }
        let Stage::Proof { proof, hello, mut exchange, .. } =
            std::mem::replace(&mut self.stage, Stage::Drain { bytes: 0 })
        else {
            return Ok(None);
        };
        let Some(index) = exchange.proven(accept.secrets(&hello), Side::Caller, &proof) else {
            return Ok(Some(refuse(self.from, Refusal::new(RefusalCode::Secret, SECRET_WRONG), accept)));
        };
        exchange.add(&proof);
        Ok(Some(decide(self.from, hello, Some((index, exchange)), accept)))
    }

    fn write_answer(&mut self, accept: &dyn Accept) -> io::Result<Option<Stage>> {
        let Stage::Answer { bytes, sent, welcomed } = &mut self.stage else { return Ok(None) };
        write_all(&self.stream, bytes, sent)?;
        match welcomed.take() {
            Some((hello, welcome, secret)) => {
                accept.established(hello, welcome, secret, TcpLink::new(self.stream.try_clone()?, self.from));
                Ok(None)
            }
            None => {
                self.stream.shutdown(Shutdown::Write)?;
                Ok(Some(Stage::Drain { bytes: 0 }))
            }
        }
    }

    fn drain(&mut self) -> io::Result<Option<Stage>> {
        let Stage::Drain { bytes } = &mut self.stage else { return Ok(None) };
        let mut chunk = [0; 4096];
        let got = (&self.stream).read(&mut chunk)?;
        *bytes += got;
        Ok((got > 0 && *bytes <= DRAIN_BYTES_MAX).then_some(Stage::Drain { bytes: *bytes }))
    }
}

/// What a caller without a secret is told.
const SECRET_NEEDED: &str = "this cluster requires a secret: set cluster.secret_file for nodes, --secret-file or \
                             ANTELOG_SECRET_FILE for clients";
/// What a caller is told whose secret nobody knows here.
const SECRET_UNKNOWN: &str = "the caller has a secret and this cluster has none: set cluster.secret_file on all nodes, or \
                              let the caller have none";
/// What a caller is told that knows none of ours.
const SECRET_WRONG: &str = "the caller's secret is not one that this side knows: nodes need that of cluster.secret_file, \
                            clients that or one of an [[access]] table";

/// Sends what is left of `bytes`, as far as the socket takes it now.
fn write_all(mut stream: &TcpStream, bytes: &[u8], sent: &mut usize) -> io::Result<()> {
    while *sent < bytes.len() {
        match stream.write(&bytes[*sent..])? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => *sent += written,
        }
    }
    Ok(())
}

/// Asks the caller to prove that it knows a secret.
fn challenge(from: SocketAddr, hello: Hello, said: &[u8], accept: &dyn Accept) -> Stage {
    let challenge = nonce().and_then(|nonce| Answer::Challenge(nonce).encode().map_err(|e| e.to_string()));
    match challenge {
        Ok(bytes) => {
            let mut exchange = Exchange::default();
            exchange.add(said);
            exchange.add(&bytes);
            Stage::Challenge { bytes, sent: 0, hello, exchange }
        }
        Err(error) => refuse(from, Refusal::new(RefusalCode::Other, error), accept),
    }
}

/// Welcomes or refuses a caller, which has proven that it knows a secret if it has to.
fn decide(from: SocketAddr, hello: Hello, proven: Option<(usize, Exchange)>, accept: &dyn Accept) -> Stage {
    let secret = proven.as_ref().map(|(index, _)| *index);
    let welcome = match accept.decide(&hello, from, secret) {
        Ok(welcome) => welcome,
        Err(refusal) => return refuse(from, refusal, accept),
    };
    let bytes = match proven {
        Some((index, exchange)) => exchange.seal(welcome.clone(), &accept.secrets(&hello)[index]),
        None => Answer::Welcome(welcome.clone()).encode(),
    };
    match bytes {
        Ok(bytes) => Stage::Answer { bytes, sent: 0, welcomed: Some((hello, welcome, secret)) },
        Err(error) => {
            let refusal = Refusal::new(RefusalCode::Other, format!("its answer is invalid: {error}"));
            refuse(from, refusal, accept)
        }
    }
}

/// Refuses bytes that could not be read.
fn turn_away(from: SocketAddr, error: &HandshakeError, accept: &dyn Accept) -> Stage {
    let why = match error {
        HandshakeError::Version(theirs) => format!("speaks protocol version {theirs}, this side {VERSION}"),
        error => format!("sent no valid hand-shake: {error}"),
    };
    accept.refused(from, &why);
    answer(Refusal::from_error(error))
}

/// Refuses a caller that was understood.
fn refuse(from: SocketAddr, refusal: Refusal, accept: &dyn Accept) -> Stage {
    accept.refused(from, &format!("was refused ({:?}): {}", refusal.code, refusal.text));
    answer(refusal)
}

fn answer(refusal: Refusal) -> Stage {
    // Made anew so that a text that is too long is cut, not an error.
    let bytes = Answer::Refusal(Refusal::new(refusal.code, refusal.text)).encode().unwrap_or_default();
    Stage::Answer { bytes, sent: 0, welcomed: None }
}
