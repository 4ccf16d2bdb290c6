//! Who may connect, and what for: secrets that are read from files, and what each of them lets its holder do.
//!
//! A cluster without a secret takes everybody in, as an administrator. One with a secret takes in who proves that it knows
//! one (`handshake::proof`): nodes the cluster's own, clients that or one of an `[[access]]` table.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use serde::Deserialize;
use sha2::Sha256;

use crate::config::Config;
use crate::handshake::Endpoint;

/// The shortest secret, in bytes.
pub const SECRET_BYTES_MIN: usize = 16;

/// The longest file that is taken for a secret, in bytes.
pub const SECRET_BYTES_MAX: usize = 4096;

/// Bytes of a proof that a secret is known.
pub const PROOF_BYTES: usize = 32;

/// Most `[[access]]` tables: a proof is compared with the secret of each.
pub const ACCESS_ENTRIES_MAX: usize = 64;

/// What a client may do. Each includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// Read, subscribe, ask for tail and membership.
    Read,
    /// Append too.
    Append,
    /// Everything, changes of membership and ordering too.
    #[default]
    Admin,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Access::Read => "read",
            Access::Append => "append",
            Access::Admin => "admin",
        })
    }
}

/// What a client may use; 0 is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Appends a second.
    pub appends_per_s: u64,
    /// Bytes appended a second.
    pub bytes_per_s: u64,
    /// Subscriptions at a time.
    pub subscriptions_max: u32,
}

/// What the holder of a secret is granted. The default is what everybody has of a cluster without secrets and limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// What it may do.
    pub access: Access,
    /// How much of it.
    pub limits: Limits,
}

/// A secret that both ends of a connection know. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    /// Made of the secret, which itself is not kept.
    key: [u8; 32],
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl Secret {
    /// A secret of these bytes.
    ///
    /// # Errors
    /// Fewer than [`SECRET_BYTES_MIN`] or more than [`SECRET_BYTES_MAX`].
    pub fn new(bytes: &[u8]) -> Result<Secret, String> {
        if bytes.len() < SECRET_BYTES_MIN {
            return Err(format!(
                "the secret has {} bytes, at least {SECRET_BYTES_MIN} are needed; \"openssl rand -hex 32\" makes a good one",
                bytes.len()
            ));
        }
        if bytes.len() > SECRET_BYTES_MAX {
            return Err(format!("more than {SECRET_BYTES_MAX} bytes are no secret"));
        }
        Ok(Secret { key: mac(b"antelog secret", &[bytes]).finalize().into_bytes().into() })
    }

    /// The secret in the bytes of a file.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn parse(mut bytes: &[u8]) -> Result<Secret, String> {
        while let [rest @ .., b'\n' | b'\r'] = bytes {
            bytes = rest;
        }
        Secret::new(bytes)
    }

    /// Reads a secret from a file; line ends behind it do not belong to it.
    ///
    /// # Errors
    /// One line that names the file: it is missing, too short, or everybody on this machine may read or change it.
    pub fn read(path: impl AsRef<Path>) -> Result<Secret, String> {
        let path = path.as_ref();
        let failed = |why: String| format!("secret file {}: {why}", path.display());
        let unreadable = |error: std::io::Error| failed(format!("cannot read it: {error}"));
        // Looked at before it is opened: opening a pipe would wait for its writer.
        if !std::fs::metadata(path).map_err(unreadable)?.is_file() {
            return Err(failed("it is no file".into()));
        }
        let file = File::open(path).map_err(unreadable)?;
        let mode = file.metadata().map_err(unreadable)?.permissions().mode();
        if mode & 0o006 != 0 {
            return Err(failed(format!(
                "everybody on this machine may read or change it (mode {:o}): chmod 600 it, and make a new secret",
                mode & 0o777
            )));
        }
        let mut bytes = Vec::new();
        // One more than allowed, to notice.
        file.take(SECRET_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        Secret::parse(&bytes).map_err(failed)
    }

    /// The proof that this secret is known to whoever said `parts`.
    pub(crate) fn prove(&self, parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
        mac(&self.key, parts).finalize().into_bytes().into()
    }

    /// Whether `proof` is what [`prove`](Self::prove) makes of `parts`. Takes the same time whatever it is.
    pub(crate) fn verify(&self, parts: &[&[u8]], proof: &[u8; PROOF_BYTES]) -> bool {
        mac(&self.key, parts).verify_slice(proof).is_ok()
    }
}

fn mac(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("a key may have any length");
    parts.iter().for_each(|part| mac.update(part));
    mac
}

/// All secrets that a node knows, and what each grants.
#[derive(Clone, Debug, Default)]
pub struct Keyring {
    /// The cluster's own first; none of a cluster without.
    secrets: Vec<Secret>,
    /// Of each secret.
    grants: Vec<Grant>,
    /// Of everybody where there is no secret.
    open: Grant,
}

impl Keyring {
    /// Reads the secrets that a configuration names: the cluster's, and those of clients where clients are served.
    ///
    /// # Errors
    /// One line about the first that is not as it should be.
    pub fn load(config: &Config, serves_clients: bool) -> Result<Keyring, String> {
        let mut ring = Keyring { open: config.grant(None), ..Keyring::default() };
        let Some(file) = &config.cluster.secret_file else { return Ok(ring) };
        ring.add(file, ring.open).map_err(|e| format!("cluster.secret_file: {e}"))?;
        for entry in config.access.iter().filter(|_| serves_clients) {
            let grant = config.grant(Some(entry));
            ring.add(&entry.secret_file, grant).map_err(|e| format!("[[access]] role {}: {e}", entry.role))?;
        }
        Ok(ring)
    }

    fn add(&mut self, file: &str, grant: Grant) -> Result<(), String> {
        let secret = Secret::read(file)?;
        if self.secrets.contains(&secret) {
            return Err(format!("secret file {file}: another file has the same secret; each role needs its own"));
        }
        self.secrets.push(secret);
        self.grants.push(grant);
        Ok(())
    }

    /// The secret of the cluster's nodes, if there is one.
    pub fn cluster(&self) -> Option<&Secret> {
        self.secrets.first()
    }

    /// The secrets of which such a caller has to know one; none: everybody is let in.
    pub fn of(&self, caller: &Endpoint) -> &[Secret] {
        match caller {
            Endpoint::Node { .. } => &self.secrets[..self.secrets.len().min(1)],
            Endpoint::Client { .. } | Endpoint::Observer => &self.secrets,
        }
    }

    /// What is granted to a client that knows this one of [`of`](Self::of), or none.
    pub fn grant(&self, secret: Option<usize>) -> Grant {
        secret.map_or(self.open, |index| self.grants[index])
    }
}

#[cfg(test)]
mod tests;
