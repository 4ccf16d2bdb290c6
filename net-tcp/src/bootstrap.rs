//! Calling another node: connects, shakes hands, and says in one line what went wrong if something did.
//!
//! Set-up happens once per connection, so it blocks and uses plain sockets; only the established connection goes to
//! a [`TcpTransport`](crate::TcpTransport).

use std::error::Error;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use antelog_core::access::{PROOF_BYTES, Secret};
use antelog_core::handshake::proof::{Exchange, Side, nonce};
use antelog_core::handshake::{
    ANSWER_HEADER_BYTES, Answer, AnswerHeader, HandshakeError, Hello, Refusal, RefusalCode, VERSION, Welcome,
};
use rustix::net::sockopt;

/// How often an idle connection is tried; the kernel counts in seconds.
const KEEPALIVE: Duration = Duration::from_secs(1);

/// An established connection, both hand-shakes done, on its way to the data thread.
#[derive(Debug)]
pub struct TcpLink {
    stream: TcpStream,
    peer: SocketAddr,
}

impl TcpLink {
    pub(crate) fn new(stream: TcpStream, peer: SocketAddr) -> TcpLink {
        TcpLink { stream, peer }
    }

    /// The other side's address.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The connection is lost when what was sent stays unacknowledged for this long: the kernel alone would go on trying for
    /// a quarter of an hour. A side that has nothing to send asks every second whether the other one still knows of it: the
    /// word of its end may have been lost.
    ///
    /// # Errors
    /// The kernel's.
    pub fn give_up_after(&self, time: Duration) -> io::Result<()> {
        let time_ms = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(&self.stream, time_ms)?;
        sockopt::set_tcp_keepidle(&self.stream, KEEPALIVE)?;
        sockopt::set_tcp_keepintvl(&self.stream, KEEPALIVE)?;
        Ok(sockopt::set_socket_keepalive(&self.stream, true)?)
    }

    pub(crate) fn into_stream(self) -> TcpStream {
        self.stream
    }
}

/// Why there is no connection.
#[derive(Debug)]
pub enum DialError {
    /// Nobody listens there.
    Refused(SocketAddr),
    /// No connection or no answer within the time given.
    TimedOut(SocketAddr, Duration),
    /// The other side closed the connection during the hand-shake.
    Closed(SocketAddr),
    /// The operating system reported something else.
    Io(SocketAddr, io::Error),
    /// Whoever listens there does not speak this protocol, or not as it should.
    NotAntelog(SocketAddr, HandshakeError),
    /// It speaks this version of the protocol, and not ours.
    Version(SocketAddr, u16),
    /// It is antelog and does not want us.
    Rejected(SocketAddr, Refusal),
    /// The hello cannot be sent: a field is too long.
    Hello(HandshakeError),
    /// It did not prove that it knows our secret.
    Unproven(SocketAddr),
}

impl fmt::Display for DialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DialError::Refused(addr) => write!(f, "nothing listens on {addr}: is the node running?"),
            DialError::TimedOut(addr, time) => {
                write!(f, "{addr} did not answer within {time:?}: is it up, and does a firewall let it answer?")
            }
            DialError::Closed(addr) => write!(f, "{addr} closed the connection during the hand-shake"),
            DialError::Io(addr, error) => write!(f, "cannot connect to {addr}: {error}"),
            DialError::NotAntelog(addr, error) => write!(f, "{addr} is no antelog node: {error}"),
            DialError::Version(addr, theirs) => {
                write!(f, "{addr} refused the connection: it speaks protocol version {theirs}, this side {VERSION}")
            }
            DialError::Rejected(addr, refusal) => write!(f, "{addr} refused the connection: {}", refusal.text),
            DialError::Hello(error) => write!(f, "the hand-shake cannot be sent: {error}"),
            DialError::Unproven(addr) => write!(
                f,
                "{addr} did not prove that it knows the secret of this side: it is no node of the cluster, or has another \
                 secret"
            ),
        }
    }
}

impl Error for DialError {}

/// Connects to the node at `addr` and shakes hands, all within `timeout`. Blocks. With a secret, both sides prove that they
/// know it, or there is no connection; the hello gets its nonce here.
///
/// # Errors
/// [`DialError`], whose text names the address.
pub fn dial(
    addr: SocketAddr,
    hello: &Hello,
    secret: Option<&Secret>,
    timeout: Duration,
) -> Result<(TcpLink, Welcome), DialError> {
    let mut hello = hello.clone();
    if secret.is_some() {
        hello.nonce = Some(nonce().map_err(|text| DialError::Io(addr, io::Error::other(text)))?);
    }
    let bytes = hello.encode().map_err(DialError::Hello)?;
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::ConnectionRefused => DialError::Refused(addr),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => DialError::TimedOut(addr, timeout),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            DialError::Closed(addr)
        }
        _ => DialError::Io(addr, error),
    };
    let deadline = Instant::now() + timeout;
    let stream = TcpStream::connect_timeout(&addr, left(deadline).map_err(failed)?).map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    stream.set_write_timeout(Some(left(deadline).map_err(failed)?)).map_err(failed)?;
    (&stream).write_all(&bytes).map_err(failed)?;
    let mut exchange = Exchange::default();
    exchange.add(&bytes);
    let read = || read_answer(&stream, addr, deadline, &failed);
    let mut answer = read()?;
    if let (Some(secret), Answer::Challenge(_)) = (secret, &answer.answer) {
        exchange.add(&answer.bytes);
        let proof = exchange.prove(secret, Side::Caller);
        (&stream).write_all(&proof).map_err(failed)?;
        exchange.add(&proof);
        answer = read()?;
    }
    let is_proven = match (secret, &answer.proof) {
        (None, None) => true,
        (Some(secret), Some(proof)) => {
            exchange.add(&answer.bytes);
            exchange.proven(std::slice::from_ref(secret), Side::Acceptor, proof).is_some()
        }
        _ => false,
    };
    match answer.answer {
        Answer::Refusal(refusal) if refusal.code == RefusalCode::Version => {
            Err(DialError::Version(addr, answer.version))
        }
        Answer::Refusal(refusal) => Err(DialError::Rejected(addr, refusal)),
        Answer::Welcome(welcome) if is_proven => {
            stream.set_read_timeout(None).map_err(failed)?;
            stream.set_write_timeout(None).map_err(failed)?;
            Ok((TcpLink::new(stream, addr), welcome))
        }
        Answer::Welcome(_) | Answer::Challenge(_) => Err(DialError::Unproven(addr)),
    }
}

/// An answer as it came.
struct Said {
    answer: Answer,
    version: u16,
    /// Header and body.
    bytes: Vec<u8>,
    /// What followed.
    proof: Option<[u8; PROOF_BYTES]>,
}

fn read_answer(
    stream: &TcpStream,
    addr: SocketAddr,
    deadline: Instant,
    failed: &impl Fn(io::Error) -> DialError,
) -> Result<Said, DialError> {
    let mut bytes = vec![0; ANSWER_HEADER_BYTES];
    read_all(stream, &mut bytes, deadline).map_err(failed)?;
    let header = AnswerHeader::decode(bytes.first_chunk().unwrap_or(&[0; ANSWER_HEADER_BYTES]));
    let header = header.map_err(|error| match error {
        HandshakeError::Version(theirs) => DialError::Version(addr, theirs),
        error => DialError::NotAntelog(addr, error),
    })?;
    bytes.resize(ANSWER_HEADER_BYTES + header.body_bytes, 0);
    read_all(stream, &mut bytes[ANSWER_HEADER_BYTES..], deadline).map_err(failed)?;
    let mut proof = None;
    if header.is_proven {
        read_all(stream, proof.insert([0; PROOF_BYTES]), deadline).map_err(failed)?;
    }
    let answer = header.decode_body(&bytes[ANSWER_HEADER_BYTES..]);
    let answer = answer.map_err(|error| DialError::NotAntelog(addr, error))?;
    Ok(Said { answer, version: header.version, bytes, proof })
}

/// The time until `deadline`, which is never zero: sockets take that to mean for ever.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Fills `out`. The deadline holds for all of it, so a peer that sends a byte now and then gains nothing.
fn read_all(mut stream: &TcpStream, out: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < out.len() {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(&mut out[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
