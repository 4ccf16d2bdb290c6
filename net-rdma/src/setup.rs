//! What two transports tell each other over the carrier before a pair's data moves to a queue pair.
//!
//! ```text
//! offer    1 | gid 16 | lid u16 | mtu u16 | infiniband u8 | number u32 | psn u32 | receives u32 | regions u16 | regions ×
//!          (address u64, length u64, rkey u32)
//! ready    2                                   my queue pair receives: you may send
//! decline  3 | UTF-8 text                      no RDMA between us, and why
//! refused  4                                   your device refused my request: I broke the rules
//! ```
//! All little-endian. These messages travel on an established, authenticated connection only, and keys are never logged.

use std::fmt;

use crate::provider::{End, PortAddress, RemoteMemory};

/// Most regions that one side exposes to a peer.
pub const REGIONS_MAX: usize = 64;

/// Longest text of a decline, in bytes.
const TEXT_BYTES_MAX: usize = 300;

const OFFER: u8 = 1;
const READY: u8 = 2;
const DECLINE: u8 = 3;
const REFUSED: u8 = 4;

/// One end of a pair as it offers itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Port, queue pair and first packet number.
    pub end: End,
    /// Receives posted for the other side's messages and notifications.
    pub receives: u32,
    /// Regions the other side may write, in the order in which it numbers them.
    pub regions: Vec<RemoteMemory>,
}

/// A message of the set-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Setup {
    /// See [`Offer`].
    Offer(Offer),
    /// The sender's queue pair is connected.
    Ready,
    /// The sender cannot use RDMA with us.
    Decline(String),
    /// Our device refused a request of the sender's. Its own device has told ours at the same time, which may report it
    /// later than the end of this connection.
    Refused,
}

/// The peer sent something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the peer's set-up of RDMA cannot be read: its version differs")
    }
}

impl Setup {
    /// The message's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(64);
        match self {
            Setup::Offer(offer) => {
                assert!(offer.regions.len() <= REGIONS_MAX, "more than {REGIONS_MAX} exposed regions");
                bytes.push(OFFER);
                bytes.extend_from_slice(&offer.end.port.gid);
                bytes.extend_from_slice(&offer.end.port.lid.to_le_bytes());
                bytes.extend_from_slice(&offer.end.port.mtu_bytes.to_le_bytes());
                bytes.push(offer.end.port.is_infiniband.into());
                bytes.extend_from_slice(&offer.end.number.to_le_bytes());
                bytes.extend_from_slice(&offer.end.psn.to_le_bytes());
                bytes.extend_from_slice(&offer.receives.to_le_bytes());
                bytes.extend_from_slice(&(offer.regions.len() as u16).to_le_bytes());
                for region in &offer.regions {
                    bytes.extend_from_slice(&region.address.to_le_bytes());
                    bytes.extend_from_slice(&region.len.to_le_bytes());
                    bytes.extend_from_slice(&region.rkey.to_le_bytes());
                }
            }
            Setup::Ready => bytes.push(READY),
            Setup::Refused => bytes.push(REFUSED),
            Setup::Decline(text) => {
                let end = (0..=text.len().min(TEXT_BYTES_MAX)).rev().find(|&end| text.is_char_boundary(end));
                bytes.push(DECLINE);
                bytes.extend_from_slice(&text.as_bytes()[..end.unwrap_or(0)]);
            }
        }
        bytes
    }

    /// Reads a message.
    ///
    /// # Errors
    /// Anything that no version of ours sends.
    pub fn decode(bytes: &[u8]) -> Result<Setup, Malformed> {
        let (&tag, rest) = bytes.split_first().ok_or(Malformed)?;
        match tag {
            OFFER => decode_offer(rest).map(Setup::Offer),
            READY if rest.is_empty() => Ok(Setup::Ready),
            REFUSED if rest.is_empty() => Ok(Setup::Refused),
            DECLINE if rest.len() <= TEXT_BYTES_MAX => {
                let text = std::str::from_utf8(rest).map_err(|_| Malformed)?;
                // It goes into the operator's log, as one line.
                if text.chars().any(char::is_control) { Err(Malformed) } else { Ok(Setup::Decline(text.to_owned())) }
            }
            _ => Err(Malformed),
        }
    }
}

fn decode_offer(bytes: &[u8]) -> Result<Offer, Malformed> {
    let mut left = bytes;
    let gid = take(&mut left)?;
    let lid = u16::from_le_bytes(take(&mut left)?);
    let mtu_bytes = u16::from_le_bytes(take(&mut left)?);
    let [is_infiniband] = take(&mut left)?;
    let number = u32::from_le_bytes(take(&mut left)?);
    let psn = u32::from_le_bytes(take(&mut left)?);
    let receives = u32::from_le_bytes(take(&mut left)?);
    let regions = usize::from(u16::from_le_bytes(take(&mut left)?));
    let sane = matches!(mtu_bytes, 256 | 512 | 1024 | 2048 | 4096)
        && is_infiniband <= 1
        && number < 1 << 24
        && psn < 1 << 24
        && (1..=1 << 20).contains(&receives)
        && regions <= REGIONS_MAX;
    if !sane {
        return Err(Malformed);
    }
    let mut list = Vec::with_capacity(regions);
    for _ in 0..regions {
        let address = u64::from_le_bytes(take(&mut left)?);
        let len = u64::from_le_bytes(take(&mut left)?);
        let rkey = u32::from_le_bytes(take(&mut left)?);
        address.checked_add(len).ok_or(Malformed)?;
        list.push(RemoteMemory { address, len, rkey });
    }
    if !left.is_empty() {
        return Err(Malformed);
    }
    let port = PortAddress { gid, lid, mtu_bytes, is_infiniband: is_infiniband == 1 };
    Ok(Offer { end: End { port, number, psn }, receives, regions: list })
}

fn take<const N: usize>(left: &mut &[u8]) -> Result<[u8; N], Malformed> {
    let (taken, rest) = left.split_first_chunk().ok_or(Malformed)?;
    *left = rest;
    Ok(*taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer() -> Offer {
        let port = PortAddress { gid: [7; 16], lid: 3, mtu_bytes: 4096, is_infiniband: false };
        let regions = vec![RemoteMemory { address: 1 << 40, len: 4096, rkey: 0xABCD }];
        Offer { end: End { port, number: 0x12_3456, psn: 99 }, receives: 512, regions }
    }

    #[test]
    fn messages_come_back() {
        for setup in [Setup::Offer(offer()), Setup::Ready, Setup::Refused, Setup::Decline("no memory".into())] {
            assert_eq!(Setup::decode(&setup.encode()), Ok(setup));
        }
        let long = Setup::Decline("ü".repeat(400));
        assert_eq!(Setup::decode(&long.encode()), Ok(Setup::Decline("ü".repeat(150))));
    }

    #[test]
    fn everything_else_is_refused() {
        let good = Setup::Offer(offer()).encode();
        for end in 0..good.len() {
            assert_eq!(Setup::decode(&good[..end]), Err(Malformed), "cut off at {end}");
        }
        assert_eq!(Setup::decode(&[good.clone(), vec![0]].concat()), Err(Malformed));
        for (at, what) in [(0, "tag"), (20, "mtu"), (21, "kind of link"), (25, "number"), (29, "psn"), (35, "regions")]
        {
            let mut bad = good.clone();
            bad[at] = 0xEE;
            assert_eq!(Setup::decode(&bad), Err(Malformed), "{what}");
        }
    }

    #[test]
    fn keys_are_not_printed() {
        let text = format!("{:?}", offer());
        assert!(!text.contains("43981") && !text.to_lowercase().contains("abcd"), "{text}");
    }
}
