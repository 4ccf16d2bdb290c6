//! Proofs that both ends know a secret, over all that was said on the connection.
//!
//! ```text
//! caller    Hello with a nonce
//! acceptor  Challenge: a nonce of its own
//! caller    proof over hello and challenge
//! acceptor  Welcome, and a proof over hello, challenge, the caller's proof and the welcome
//! ```
//! A proof is an HMAC-SHA-256 of the bytes as they were sent, headers and so versions included, and of the side that says
//! it, so that neither can be played back to the other. Nonces are random: what was recorded proves nothing later. The
//! caller proves first: nobody learns anything of a cluster without knowing its secret.

use super::{Answer, HandshakeError, VERSION_BYTES_END, Welcome};
use crate::access::{PROOF_BYTES, Secret};

/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 32;

/// A random number that is used once.
pub type Nonce = [u8; NONCE_BYTES];

/// A proof that a secret is known.
pub type Proof = [u8; PROOF_BYTES];

/// A fresh nonce.
///
/// # Errors
/// The operating system has no random numbers: one line.
pub fn nonce() -> Result<Nonce, String> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|error| format!("the operating system gives no random numbers: {error}"))?;
    Ok(nonce)
}

/// Who proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Whoever made the connection.
    Caller,
    /// Whoever took it.
    Acceptor,
}

impl Side {
    const fn label(self) -> &'static [u8] {
        match self {
            Side::Caller => b"antelog caller\0",
            Side::Acceptor => b"antelog acceptor\0",
        }
    }
}

/// What was said on a connection so far, by both sides, in order.
#[derive(Debug, Default)]
pub struct Exchange(Vec<u8>);

impl Exchange {
    /// Adds a message: all of its bytes.
    pub fn add(&mut self, message: &[u8]) {
        // The length keeps two messages from passing for two others that meet elsewhere.
        self.0.extend_from_slice(&(message.len() as u64).to_le_bytes());
        self.0.extend_from_slice(message);
    }

    /// The proof of a side that knows a secret.
    pub fn prove(&self, secret: &Secret, side: Side) -> Proof {
        secret.prove(&[side.label(), &self.0])
    }

    /// The first of the secrets that the side has proven to know. Looks at all of them.
    pub fn proven(&self, secrets: &[Secret], side: Side, proof: &Proof) -> Option<usize> {
        let mut found = None;
        for (index, secret) in secrets.iter().enumerate() {
            if secret.verify(&[side.label(), &self.0], proof) {
                found = found.or(Some(index));
            }
        }
        found
    }

    /// A welcome with the acceptor's proof behind it.
    ///
    /// # Errors
    /// As [`Answer::encode`].
    pub fn seal(mut self, welcome: Welcome, secret: &Secret) -> Result<Vec<u8>, HandshakeError> {
        let mut bytes = Answer::Welcome(welcome).encode()?;
        bytes[VERSION_BYTES_END + 1] = super::CODE_PROVEN;
        self.add(&bytes);
        bytes.extend_from_slice(&self.prove(secret, Side::Acceptor));
        Ok(bytes)
    }
}
