//! What travels on a connection after the hand-shake: 24-byte headers, each followed by its payload.
//!
//! Both ends are the same version (the hand-shake sees to it), so the layout has no room for negotiation. It still
//! is validated field by field: a peer that is mad or was attacked must be cut off, not followed.
//!
//! ```text
//! byte  0 kind     1 write, 2 send, 3 placed
//!       1 flags    bit 0: carries a notification; bit 1: wants to be acknowledged
//!       2 region   u16, writes: index into the receiver's exposed regions
//!       4 notify   u32, writes: the hint, 0 without bit 0
//!       8 offset   u64, writes: first byte in the region; placed: how many operations took effect so far
//!      16 len      u32, bytes of payload that follow
//!      20 number   u32, low half of the operation's number on this connection, from 1; placed: 0
//! ```
//! All little-endian.

/// Length of every header, in bytes.
pub const HEADER_BYTES: usize = 24;

const KIND_WRITE: u8 = 1;
const KIND_SEND: u8 = 2;
const KIND_PLACED: u8 = 3;
const FLAG_NOTIFY: u8 = 1;
const FLAG_ACKNOWLEDGE: u8 = 2;

/// A decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Bytes for an exposed region; the payload follows.
    Write {
        /// Index into the receiver's exposed regions.
        region: u16,
        /// First byte there. Not yet checked against the region.
        offset: u64,
        /// Bytes of payload.
        len: u32,
        /// Hint to report, if any.
        notify: Option<u32>,
        /// Whether the sender waits for an acknowledgement.
        acknowledge: bool,
        /// Low half of the operation's number.
        number: u32,
    },
    /// A message; the payload follows.
    Send {
        /// Bytes of payload.
        len: u32,
        /// Low half of the operation's number.
        number: u32,
    },
    /// The first `count` operations of the other direction took effect.
    Placed {
        /// Cumulative number of operations.
        count: u64,
    },
}

/// The bytes are no header of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadFrame;

impl Frame {
    /// The header's bytes.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let (kind, flags, region, notify, offset, len, number) = match self {
            Frame::Write { region, offset, len, notify, acknowledge, number } => {
                let flags = u8::from(notify.is_some()) * FLAG_NOTIFY + u8::from(acknowledge) * FLAG_ACKNOWLEDGE;
                (KIND_WRITE, flags, region, notify.unwrap_or(0), offset, len, number)
            }
            Frame::Send { len, number } => (KIND_SEND, 0, 0, 0, 0, len, number),
            Frame::Placed { count } => (KIND_PLACED, 0, 0, 0, count, 0, 0),
        };
        bytes[0] = kind;
        bytes[1] = flags;
        bytes[2..4].copy_from_slice(&region.to_le_bytes());
        bytes[4..8].copy_from_slice(&notify.to_le_bytes());
        bytes[8..16].copy_from_slice(&offset.to_le_bytes());
        bytes[16..20].copy_from_slice(&len.to_le_bytes());
        bytes[20..24].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    /// Reads a header. Fields that a kind does not use must be zero, so that no two headers mean the same.
    ///
    /// # Errors
    /// [`BadFrame`] for an unknown kind or flag, or a field that should be zero and is not.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Frame, BadFrame> {
        let [kind, flags, r0, r1, n0, n1, n2, n3, o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3, s0, s1, s2, s3] =
            *bytes;
        let region = u16::from_le_bytes([r0, r1]);
        let notify = u32::from_le_bytes([n0, n1, n2, n3]);
        let offset = u64::from_le_bytes([o0, o1, o2, o3, o4, o5, o6, o7]);
        let len = u32::from_le_bytes([l0, l1, l2, l3]);
        let number = u32::from_le_bytes([s0, s1, s2, s3]);
        match kind {
            KIND_WRITE if flags & !(FLAG_NOTIFY | FLAG_ACKNOWLEDGE) == 0 => {
                let notified = flags & FLAG_NOTIFY != 0;
                if !notified && notify != 0 {
                    return Err(BadFrame);
                }
                let acknowledge = flags & FLAG_ACKNOWLEDGE != 0;
                Ok(Frame::Write { region, offset, len, notify: notified.then_some(notify), acknowledge, number })
            }
            KIND_SEND if flags == 0 && region == 0 && notify == 0 && offset == 0 => Ok(Frame::Send { len, number }),
            KIND_PLACED if flags == 0 && region == 0 && notify == 0 && len == 0 && number == 0 => {
                Ok(Frame::Placed { count: offset })
            }
            _ => Err(BadFrame),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames() -> impl Strategy<Value = Frame> {
        let write = (any::<u16>(), any::<u64>(), any::<u32>(), any::<Option<u32>>(), any::<bool>(), any::<u32>())
            .prop_map(|(region, offset, len, notify, acknowledge, number)| Frame::Write {
                region,
                offset,
                len,
                notify,
                acknowledge,
                number,
            });
        let send = (any::<u32>(), any::<u32>()).prop_map(|(len, number)| Frame::Send { len, number });
        let placed = any::<u64>().prop_map(|count| Frame::Placed { count });
        prop_oneof![write, send, placed]
    }

    proptest! {
        #[test]
        fn a_header_comes_back(frame in frames()) {
            prop_assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        }

        #[test]
        fn what_decodes_is_canonical(bytes in any::<[u8; HEADER_BYTES]>(), kind in 0u8..5, flags in 0u8..5) {
            let mut bytes = bytes;
            bytes[0] = kind;
            bytes[1] = flags;
            if let Ok(frame) = Frame::decode(&bytes) {
                prop_assert_eq!(frame.encode(), bytes);
            }
        }
    }
}
