//! The hand-shake that opens every connection: who is calling, whom, and whether both sides fit together.
//!
//! Pure encoding and decoding, no sockets, so that every network uses the same one and tests need no network.
//!
//! ```text
//! caller   magic 8 | version u16 | len u16 | body                            Hello
//! answer   magic 8 | version u16 | tag u8 | code u8 | len u32 | body         Welcome (tag 1) or Refusal (tag 2)
//! ```
//! In a cluster with a secret there are a challenge (tag 3) and a proof between the two, see [`proof`], and a proof follows
//! the welcome, whose code says so.
//!
//! All little-endian. Magic and version come first in both, and the layout of a refusal never changes in any version
//! (its body is UTF-8 text without control characters), so two sides of different versions can always tell each other why
//! they do not talk.

pub mod proof;
mod reader;

use std::error::Error;
use std::fmt;

use self::proof::{NONCE_BYTES, Nonce};
use self::reader::Reader;
use crate::access::Access;
use crate::path::{Ability, Path, Wish};

/// The first bytes of every connection, in both directions.
pub const MAGIC: [u8; 8] = *b"antelog\0";

/// The version of the protocol this code speaks.
pub const VERSION: u16 = 5;

/// Length of what precedes a hello's body, in bytes.
pub const HELLO_HEADER_BYTES: usize = 12;

/// The longest body of a hello, in bytes.
pub const HELLO_BODY_BYTES_MAX: usize = 1024;

/// Length of what precedes an answer's body, in bytes.
pub const ANSWER_HEADER_BYTES: usize = 16;

/// The longest cluster name, in bytes.
pub const CLUSTER_BYTES_MAX: usize = 64;

/// The longest payload of a welcome, in bytes.
pub const PAYLOAD_BYTES_MAX: usize = 128 << 10;

/// The longest text of a refusal, in bytes.
pub const TEXT_BYTES_MAX: usize = 300;

/// The longest reason for a path, in bytes; what is longer is cut off.
const REASON_BYTES_MAX: usize = 255;

const WELCOME_FIXED_BYTES: usize = 8 + 8 + 8 + 4 + 1 + 1 + 1;
/// Where magic and version end, in both directions.
const VERSION_BYTES_END: usize = MAGIC.len() + 2;
const TAG_WELCOME: u8 = 1;
const TAG_REFUSAL: u8 = 2;
const TAG_CHALLENGE: u8 = 3;
/// Code of a welcome that a proof follows.
const CODE_PROVEN: u8 = 1;
const ENDPOINT_NODE: u8 = 1;
const ENDPOINT_CLIENT: u8 = 2;
const ENDPOINT_OBSERVER: u8 = 3;

/// Who is calling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A node of the cluster.
    Node {
        /// The caller's node id.
        from: u16,
        /// The node id it believes it is calling.
        to: u16,
        /// Grows whenever the caller restarts.
        incarnation: u64,
    },
    /// A client.
    Client {
        /// Unique to this client.
        session: u128,
    },
    /// Somebody who asks how the node is: the welcome's payload says so, and nothing follows it.
    Observer,
}

/// What the caller says first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The cluster it means to reach; at most [`CLUSTER_BYTES_MAX`] bytes.
    pub cluster: String,
    /// Who it is.
    pub from: Endpoint,
    /// The largest record it may write, in bytes.
    pub record_bytes_max: u32,
    /// Capacity of the receive ring it exposes, in bytes; 0 between nodes.
    pub ring_bytes: u64,
    /// Size of its log region, in bytes; 0 for clients.
    pub log_bytes: u64,
    /// Which networks it can and wants to use.
    pub ability: Ability,
    /// It has a secret, and insists that both sides prove to know it.
    pub nonce: Option<Nonce>,
}

/// The acceptor takes the caller in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Grows whenever the acceptor restarts.
    pub incarnation: u64,
    /// Capacity of the receive ring it exposes to the caller, in bytes.
    pub ring_bytes: u64,
    /// The largest record of the cluster, in bytes.
    pub record_bytes_max: u32,
    /// Size of its log region, in bytes.
    pub log_bytes: u64,
    /// What a client may do.
    pub access: Access,
    /// Which network the pair's data takes.
    pub path: Path,
    /// Why that one; what is longer than 255 bytes is cut off.
    pub path_reason: String,
    /// Opaque here; at most [`PAYLOAD_BYTES_MAX`] bytes.
    pub payload: Vec<u8>,
}

/// Why an acceptor refuses, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalCode {
    /// The caller does not speak this protocol.
    NotAntelog,
    /// It speaks another version of it.
    Version,
    /// It looks for another cluster.
    Cluster,
    /// It looks for another node, or claims to be one that the cluster does not have.
    Node,
    /// Too many connections.
    Busy,
    /// Sizes differ that must be equal.
    Incompatible,
    /// A newer incarnation of the caller is known already.
    Reborn,
    /// The caller does not know the cluster's secret, or only one side has one.
    Secret,
    /// Something else; the text says what. Also stands for codes of later versions.
    Other,
}

/// The acceptor turns the caller away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// For programs.
    pub code: RefusalCode,
    /// For people; continues a sentence like "the node refused the connection: …".
    pub text: String,
}

/// What an acceptor answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Come in.
    Welcome(Welcome),
    /// Prove that you know a secret.
    Challenge(Nonce),
    /// Stay out.
    Refusal(Refusal),
}

/// Bytes that are no hand-shake, or not one this version understands. The text continues "sent …" or "it …".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandshakeError {
    /// Another protocol: these are the first bytes.
    Magic(Vec<u8>),
    /// Another version of this protocol.
    Version(u16),
    /// A length above its limit, or below the least possible.
    Length {
        /// What is too long or too short.
        what: &'static str,
        /// The length that came.
        got: usize,
        /// The limit.
        limit: usize,
    },
    /// The bytes end inside a field.
    Truncated(&'static str),
    /// Bytes follow the last field.
    Trailing(usize),
    /// Text that is not UTF-8, or has control characters in it.
    Text(&'static str),
    /// A tag that means nothing.
    Tag {
        /// What it tags.
        what: &'static str,
        /// The value that came.
        got: u8,
    },
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HandshakeError::Magic(bytes) => {
                write!(f, "expected an antelog hand-shake, got \"{}\"", bytes.escape_ascii())?;
                let http = [&b"GET "[..], b"POST", b"HEAD", b"PUT ", b"OPTI", b"HTTP"];
                if http.iter().any(|start| bytes.starts_with(start)) {
                    f.write_str(" (this looks like HTTP)")?;
                } else if bytes.starts_with(&[0x16, 0x03]) {
                    f.write_str(" (this looks like TLS)")?;
                }
                Ok(())
            }
            HandshakeError::Version(theirs) => {
                write!(f, "expected protocol version {VERSION}, got version {theirs}")
            }
            HandshakeError::Length { what, got, limit } if got > limit => {
                write!(f, "expected at most {limit} bytes of {what}, got {got}")
            }
            HandshakeError::Length { what, got, limit } => {
                write!(f, "expected at least {limit} bytes of {what}, got {got}")
            }
            HandshakeError::Truncated(what) => write!(f, "expected {what}, got the end of the hand-shake"),
            HandshakeError::Trailing(bytes) => {
                write!(f, "expected the end of the hand-shake, got {bytes} more bytes")
            }
            HandshakeError::Text(what) => {
                write!(f, "expected UTF-8 without control characters as {what}, got other bytes")
            }
            HandshakeError::Tag { what, got } => write!(f, "expected a known {what}, got {got}"),
        }
    }
}

impl Error for HandshakeError {}

/// Whether `bytes`, the first of a connection so far, can still become a hand-shake.
pub fn may_be_handshake(bytes: &[u8]) -> bool {
    bytes.iter().zip(MAGIC).all(|(&byte, expected)| byte == expected)
}

/// Reads what every hand-shake starts with.
fn read_start(reader: &mut Reader<'_>) -> Result<u16, HandshakeError> {
    let magic = reader.take(MAGIC.len(), "the magic bytes")?;
    if magic != MAGIC {
        return Err(HandshakeError::Magic(magic.to_vec()));
    }
    reader.u16("the version")
}

/// Reads a hello's header: how many bytes of body follow.
///
/// # Errors
/// Another protocol, another version, or a body that is too long. The version is checked before anything behind it.
pub fn hello_body_bytes(header: &[u8; HELLO_HEADER_BYTES]) -> Result<usize, HandshakeError> {
    let mut reader = Reader(header);
    let version = read_start(&mut reader)?;
    if version != VERSION {
        return Err(HandshakeError::Version(version));
    }
    let len = usize::from(reader.u16("the body's length")?);
    limit("hello", len, HELLO_BODY_BYTES_MAX)?;
    Ok(len)
}

impl Hello {
    /// Header and body.
    ///
    /// # Errors
    /// [`HandshakeError::Length`] for a cluster name that is too long.
    pub fn encode(&self) -> Result<Vec<u8>, HandshakeError> {
        limit("cluster name", self.cluster.len(), CLUSTER_BYTES_MAX)?;
        let mut body = Vec::with_capacity(128);
        body.push(self.cluster.len() as u8); // at most 64
        body.extend_from_slice(self.cluster.as_bytes());
        match self.from {
            Endpoint::Node { from, to, incarnation } => {
                body.push(ENDPOINT_NODE);
                body.extend_from_slice(&from.to_le_bytes());
                body.extend_from_slice(&to.to_le_bytes());
                body.extend_from_slice(&incarnation.to_le_bytes());
            }
            Endpoint::Client { session } => {
                body.push(ENDPOINT_CLIENT);
                body.extend_from_slice(&session.to_le_bytes());
            }
            Endpoint::Observer => body.push(ENDPOINT_OBSERVER),
        }
        body.extend_from_slice(&self.record_bytes_max.to_le_bytes());
        body.extend_from_slice(&self.ring_bytes.to_le_bytes());
        body.extend_from_slice(&self.log_bytes.to_le_bytes());
        body.push(wish_byte(self.ability.wish));
        body.push(self.ability.rdma.is_ok().into());
        put_reason(&mut body, self.ability.rdma.as_ref().err().map_or("", String::as_str));
        body.push(self.nonce.is_some().into());
        body.extend_from_slice(self.nonce.as_ref().map_or(&[][..], Nonce::as_slice));
        let mut bytes = Vec::with_capacity(HELLO_HEADER_BYTES + body.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(body.len() as u16).to_le_bytes()); // far below 1024
        bytes.extend_from_slice(&body);
        Ok(bytes)
    }

    /// Reads a body of the length that [`hello_body_bytes`] said.
    ///
    /// # Errors
    /// The first thing that is not as it should be.
    pub fn decode(body: &[u8]) -> Result<Hello, HandshakeError> {
        let mut reader = Reader(body);
        let len = usize::from(reader.u8("the cluster name's length")?);
        limit("cluster name", len, CLUSTER_BYTES_MAX)?;
        let cluster = reader.text(len, "the cluster name")?;
        let from = match reader.u8("the endpoint's kind")? {
            ENDPOINT_NODE => Endpoint::Node {
                from: reader.u16("the caller's node id")?,
                to: reader.u16("the called node id")?,
                incarnation: reader.u64("the incarnation")?,
            },
            ENDPOINT_CLIENT => Endpoint::Client { session: reader.u128("the session")? },
            ENDPOINT_OBSERVER => Endpoint::Observer,
            got => return Err(HandshakeError::Tag { what: "endpoint's kind", got }),
        };
        let record_bytes_max = reader.u32("the largest record's size")?;
        let ring_bytes = reader.u64("the ring's size")?;
        let log_bytes = reader.u64("the log's size")?;
        let wish = wish_from(reader.u8("the transport wished for")?)?;
        let can = reader.u8("whether RDMA can be used")?;
        let why = reader.reason()?;
        let rdma = match can {
            0 => Err(why),
            1 if why.is_empty() => Ok(()),
            got => return Err(HandshakeError::Tag { what: "use of RDMA", got }),
        };
        let nonce = match reader.u8("whether there is a nonce")? {
            0 => None,
            1 => Some(reader.array("the nonce")?),
            got => return Err(HandshakeError::Tag { what: "use of a secret", got }),
        };
        reader.end()?;
        let ability = Ability { wish, rdma };
        Ok(Hello { cluster, from, record_bytes_max, ring_bytes, log_bytes, ability, nonce })
    }
}

impl RefusalCode {
    fn byte(self) -> u8 {
        match self {
            RefusalCode::Other => 0,
            RefusalCode::NotAntelog => 1,
            RefusalCode::Version => 2,
            RefusalCode::Cluster => 3,
            RefusalCode::Node => 4,
            RefusalCode::Busy => 5,
            RefusalCode::Incompatible => 6,
            RefusalCode::Reborn => 7,
            RefusalCode::Secret => 8,
        }
    }

    fn from_byte(byte: u8) -> RefusalCode {
        match byte {
            1 => RefusalCode::NotAntelog,
            2 => RefusalCode::Version,
            3 => RefusalCode::Cluster,
            4 => RefusalCode::Node,
            5 => RefusalCode::Busy,
            6 => RefusalCode::Incompatible,
            7 => RefusalCode::Reborn,
            8 => RefusalCode::Secret,
            _ => RefusalCode::Other,
        }
    }
}

impl Refusal {
    /// A refusal; text beyond [`TEXT_BYTES_MAX`] is cut off.
    pub fn new(code: RefusalCode, text: impl Into<String>) -> Refusal {
        let text: String = text.into();
        let mut text = text.replace(char::is_control, " ");
        if text.len() > TEXT_BYTES_MAX {
            let end = (0..=TEXT_BYTES_MAX).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
            text.truncate(end);
        }
        Refusal { code, text }
    }

    /// The refusal that answers bytes which could not be read.
    pub fn from_error(error: &HandshakeError) -> Refusal {
        match error {
            HandshakeError::Magic(_) => Refusal::new(RefusalCode::NotAntelog, error.to_string()),
            HandshakeError::Version(theirs) => {
                let text = format!("it speaks protocol version {VERSION}, this side {theirs}");
                Refusal::new(RefusalCode::Version, text)
            }
            _ => Refusal::new(RefusalCode::Other, error.to_string()),
        }
    }
}

impl Answer {
    /// Header and body.
    ///
    /// # Errors
    /// [`HandshakeError::Length`] for a payload or text that is too long.
    pub fn encode(&self) -> Result<Vec<u8>, HandshakeError> {
        let (tag, code, body) = match self {
            Answer::Welcome(welcome) => {
                limit("welcome payload", welcome.payload.len(), PAYLOAD_BYTES_MAX)?;
                let mut body = Vec::with_capacity(WELCOME_FIXED_BYTES + welcome.payload.len());
                body.extend_from_slice(&welcome.incarnation.to_le_bytes());
                body.extend_from_slice(&welcome.ring_bytes.to_le_bytes());
                body.extend_from_slice(&welcome.log_bytes.to_le_bytes());
                body.extend_from_slice(&welcome.record_bytes_max.to_le_bytes());
                body.push(access_byte(welcome.access));
                body.push((welcome.path == Path::Rdma).into());
                put_reason(&mut body, &welcome.path_reason);
                body.extend_from_slice(&welcome.payload);
                (TAG_WELCOME, 0, body)
            }
            Answer::Challenge(nonce) => (TAG_CHALLENGE, 0, nonce.to_vec()),
            Answer::Refusal(refusal) => {
                limit("refusal text", refusal.text.len(), TEXT_BYTES_MAX)?;
                (TAG_REFUSAL, refusal.code.byte(), refusal.text.as_bytes().to_vec())
            }
        };
        let mut bytes = Vec::with_capacity(ANSWER_HEADER_BYTES + body.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&[tag, code]);
        bytes.extend_from_slice(&(body.len() as u32).to_le_bytes()); // limited above
        bytes.extend_from_slice(&body);
        Ok(bytes)
    }
}

/// What precedes an answer's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerHeader {
    /// The version the acceptor speaks.
    pub version: u16,
    /// Bytes of body that follow.
    pub body_bytes: usize,
    /// A proof follows the body.
    pub is_proven: bool,
    tag: u8,
    code: u8,
}

impl AnswerHeader {
    /// Reads an answer's header. A refusal is understood whatever its version; everything else in ours only.
    ///
    /// # Errors
    /// Another protocol, a welcome of another version, an unknown tag or a body of an impossible length.
    pub fn decode(header: &[u8; ANSWER_HEADER_BYTES]) -> Result<AnswerHeader, HandshakeError> {
        let mut reader = Reader(header);
        let version = read_start(&mut reader)?;
        let tag = reader.u8("the answer's kind")?;
        let code = reader.u8("the refusal's code")?;
        let body_bytes = usize::try_from(reader.u32("the body's length")?).unwrap_or(usize::MAX);
        match tag {
            TAG_REFUSAL => limit("refusal text", body_bytes, TEXT_BYTES_MAX)?,
            _ if version != VERSION => return Err(HandshakeError::Version(version)),
            TAG_CHALLENGE if code != 0 => return Err(HandshakeError::Tag { what: "challenge", got: code }),
            TAG_CHALLENGE if body_bytes < NONCE_BYTES => {
                return Err(HandshakeError::Length { what: "challenge", got: body_bytes, limit: NONCE_BYTES });
            }
            TAG_CHALLENGE => limit("challenge", body_bytes, NONCE_BYTES)?,
            TAG_WELCOME if code > CODE_PROVEN => return Err(HandshakeError::Tag { what: "welcome", got: code }),
            TAG_WELCOME if body_bytes < WELCOME_FIXED_BYTES => {
                let what = "welcome";
                return Err(HandshakeError::Length { what, got: body_bytes, limit: WELCOME_FIXED_BYTES });
            }
            TAG_WELCOME => limit("welcome", body_bytes, WELCOME_FIXED_BYTES + REASON_BYTES_MAX + PAYLOAD_BYTES_MAX)?,
            got => return Err(HandshakeError::Tag { what: "kind of answer", got }),
        }
        let is_proven = tag == TAG_WELCOME && code == CODE_PROVEN;
        Ok(AnswerHeader { version, body_bytes, is_proven, tag, code })
    }

    /// Reads the body that belongs to this header.
    ///
    /// # Errors
    /// A body of another length than the header said, or text that is not UTF-8.
    pub fn decode_body(&self, body: &[u8]) -> Result<Answer, HandshakeError> {
        let mut reader = Reader(body);
        if body.len() > self.body_bytes {
            return Err(HandshakeError::Trailing(body.len() - self.body_bytes));
        }
        if self.tag == TAG_REFUSAL {
            let text = reader.text(self.body_bytes, "the refusal's text")?;
            return Ok(Answer::Refusal(Refusal { code: RefusalCode::from_byte(self.code), text }));
        }
        if self.tag == TAG_CHALLENGE {
            return Ok(Answer::Challenge(reader.array("the nonce")?));
        }
        let incarnation = reader.u64("the incarnation")?;
        let ring_bytes = reader.u64("the ring's size")?;
        let log_bytes = reader.u64("the log's size")?;
        let record_bytes_max = reader.u32("the largest record's size")?;
        let access = access_from(reader.u8("the access")?)?;
        let path = match reader.u8("the path")? {
            0 => Path::Tcp,
            1 => Path::Rdma,
            got => return Err(HandshakeError::Tag { what: "path", got }),
        };
        let path_reason = reader.reason()?;
        let len = (self.body_bytes - WELCOME_FIXED_BYTES).checked_sub(path_reason.len());
        let payload = reader.take(len.ok_or(HandshakeError::Truncated("the payload"))?, "the payload")?.to_vec();
        Ok(Answer::Welcome(Welcome {
            incarnation,
            ring_bytes,
            record_bytes_max,
            log_bytes,
            access,
            path,
            path_reason,
            payload,
        }))
    }
}

fn limit(what: &'static str, got: usize, limit: usize) -> Result<(), HandshakeError> {
    if got > limit { Err(HandshakeError::Length { what, got, limit }) } else { Ok(()) }
}

fn access_byte(access: Access) -> u8 {
    match access {
        Access::Read => 0,
        Access::Append => 1,
        Access::Admin => 2,
    }
}

fn access_from(byte: u8) -> Result<Access, HandshakeError> {
    match byte {
        0 => Ok(Access::Read),
        1 => Ok(Access::Append),
        2 => Ok(Access::Admin),
        got => Err(HandshakeError::Tag { what: "access", got }),
    }
}

fn wish_byte(wish: Wish) -> u8 {
    match wish {
        Wish::Auto => 0,
        Wish::Rdma => 1,
        Wish::Tcp => 2,
    }
}

fn wish_from(byte: u8) -> Result<Wish, HandshakeError> {
    match byte {
        0 => Ok(Wish::Auto),
        1 => Ok(Wish::Rdma),
        2 => Ok(Wish::Tcp),
        got => Err(HandshakeError::Tag { what: "transport", got }),
    }
}

/// Writes a reason: its length in a byte, then its text, cut off at a character.
fn put_reason(body: &mut Vec<u8>, text: &str) {
    let text = text.replace(char::is_control, " ");
    let end = (0..=text.len().min(REASON_BYTES_MAX)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    body.push(end as u8); // at most 255
    body.extend_from_slice(&text.as_bytes()[..end]);
}

#[cfg(test)]
mod tests;
