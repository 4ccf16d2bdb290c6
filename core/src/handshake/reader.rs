//! Reads the fields of a hand-shake, each with a name for the error.

use super::HandshakeError;

/// The bytes not read yet.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn take(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], HandshakeError> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(HandshakeError::Truncated(what))?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], HandshakeError> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(HandshakeError::Truncated(what))?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(super) fn u8(&mut self, what: &'static str) -> Result<u8, HandshakeError> {
        self.array(what).map(u8::from_le_bytes)
    }

    pub(super) fn u16(&mut self, what: &'static str) -> Result<u16, HandshakeError> {
        self.array(what).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, HandshakeError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, HandshakeError> {
        self.array(what).map(u64::from_le_bytes)
    }

    pub(super) fn u128(&mut self, what: &'static str) -> Result<u128, HandshakeError> {
        self.array(what).map(u128::from_le_bytes)
    }

    pub(super) fn text(&mut self, len: usize, what: &'static str) -> Result<String, HandshakeError> {
        let bytes = self.take(len, what)?;
        // It may go into the operator's log, as one line.
        let text = std::str::from_utf8(bytes).ok().filter(|text| !text.chars().any(char::is_control));
        text.map(str::to_owned).ok_or(HandshakeError::Text(what))
    }

    pub(super) fn reason(&mut self) -> Result<String, HandshakeError> {
        let len = usize::from(self.u8("a reason's length")?);
        self.text(len, "a reason")
    }

    pub(super) fn end(&self) -> Result<(), HandshakeError> {
        if self.0.is_empty() { Ok(()) } else { Err(HandshakeError::Trailing(self.0.len())) }
    }
}
