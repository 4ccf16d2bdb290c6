//! Every byte format of the protocol: fixed layouts, little endian, fully validated when decoded.
//!
//! * [`change`]: changes of membership and ordering, as parts of messages;
//! * [`entry`]: the 64-byte header of an entry in a shard's log region;
//! * [`order`]: entries of the order log;
//! * [`node`]: messages between replicas and the sequencer;
//! * [`session`]: messages between clients and gates; * [`map`]: the cluster map that a gate hands out.
//!
//! The version of all of them is the hand-shake's: peers of another version are refused before any of this is read.

pub mod change;
pub mod entry;
pub mod map;
pub mod node;
pub mod order;
pub mod session;

use core::fmt;

/// Why bytes were not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// The bytes end before the message does.
    Truncated,
    /// Bytes follow the end of the message.
    Trailing,
    /// No message has this tag.
    Tag(u8),
    /// A field has a value that it can never have; the text names the field.
    Value(&'static str),
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DecodeError::Truncated => write!(f, "the message ends too early"),
            DecodeError::Trailing => write!(f, "bytes follow the end of the message"),
            DecodeError::Tag(tag) => write!(f, "no message has the tag {tag}"),
            DecodeError::Value(field) => write!(f, "the field '{field}' has an impossible value"),
        }
    }
}

impl core::error::Error for DecodeError {}

/// Reads fixed-width fields from a slice.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { rest: bytes }
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let (head, rest) = self.rest.split_at_checked(count).ok_or(DecodeError::Truncated)?;
        self.rest = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(DecodeError::Truncated)?;
        self.rest = rest;
        Ok(*head)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u16(&mut self) -> Result<u16, DecodeError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn u128(&mut self) -> Result<u128, DecodeError> {
        Ok(u128::from_le_bytes(self.array()?))
    }

    /// All that is left.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        core::mem::take(&mut self.rest)
    }

    pub(crate) fn finish(&self) -> Result<(), DecodeError> {
        if self.rest.is_empty() { Ok(()) } else { Err(DecodeError::Trailing) }
    }
}

/// Writes fixed-width fields into a buffer that is known to be large enough.
pub(crate) struct Writer<'a> {
    buffer: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(buffer: &'a mut [u8]) -> Writer<'a> {
        Writer { buffer, at: 0 }
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.buffer[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
        self
    }

    pub(crate) fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    pub(crate) fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u128(&mut self, value: u128) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Bytes written so far.
    pub(crate) fn len(&self) -> usize {
        self.at
    }
}
