//! The entry of a shard's log region: a 64-byte header, the payload, padding to 64 bytes.
//!
//! The CRC-32C of header and payload is seeded with the previous entry's CRC, so entries form a chain: bytes left from
//! the region's previous lap, or a payload shaped like an entry, never continue it. `PROTOCOL.md` §4.

use super::{DecodeError, Reader, Writer};
use crate::types::{ClientId, Lsn, ShardId};

/// Bytes of an entry header, and the alignment of entries.
pub const HEADER_BYTES: usize = 64;

/// Header bytes that the CRC covers (all but the CRC itself).
pub const CRC_OFFSET: usize = 60;

const VERSION: u8 = 1;

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// One slot with a client's record.
    Record,
    /// `count` slots without a record.
    NoOps,
    /// `count` slots that were bound and that no replica has any more: their shard was lost and has returned without them.
    Lost,
    /// No slot: skips to the end of the region so that entries stay contiguous.
    Pad,
}

/// The header of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryHeader {
    /// What follows.
    pub kind: EntryKind,
    /// The shard whose log this is.
    pub shard: ShardId,
    /// Payload bytes, without padding; for a pad, the bytes to skip.
    pub length: u32,
    /// First slot of the entry.
    pub lsn: Lsn,
    /// Slots: 1 for a record, any number from 1 for no-ops and lost slots, 0 for a pad.
    pub count: u32,
    /// The primary's epoch.
    pub epoch: u32,
    /// The writing session (zero unless a record).
    pub client: ClientId,
    /// The session's number for the record (zero unless a record).
    pub seq: u64,
    /// CRC-32C of the first 60 header bytes and the payload, seeded with the previous entry's.
    pub crc: u32,
}

impl EntryHeader {
    /// Bytes the entry takes in the region: header, payload, padding.
    pub fn span_bytes(&self) -> usize {
        span_bytes(self.length as usize)
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let kind = match self.kind {
            EntryKind::Record => 1,
            EntryKind::NoOps => 2,
            EntryKind::Pad => 3,
            EntryKind::Lost => 4,
        };
        let mut w = Writer::new(&mut bytes);
        w.u8(kind).u8(VERSION).u16(self.shard.0).u32(self.length).u64(self.lsn.0).u32(self.count).u32(self.epoch);
        w.u128(self.client.0).u64(self.seq).u64(0).u32(0).u32(self.crc);
        bytes
    }

    /// Reads a header. That its CRC continues the chain is for the caller to check: it has the payload.
    ///
    /// # Errors
    /// When a field has a value that no entry has.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<EntryHeader, DecodeError> {
        let mut r = Reader::new(bytes);
        let kind = match r.u8()? {
            1 => EntryKind::Record,
            2 => EntryKind::NoOps,
            3 => EntryKind::Pad,
            4 => EntryKind::Lost,
            tag => return Err(DecodeError::Tag(tag)),
        };
        if r.u8()? != VERSION {
            return Err(DecodeError::Value("version"));
        }
        let header = EntryHeader {
            kind,
            shard: ShardId(r.u16()?),
            length: r.u32()?,
            lsn: Lsn(r.u64()?),
            count: r.u32()?,
            epoch: r.u32()?,
            client: ClientId(r.u128()?),
            seq: r.u64()?,
            crc: {
                if r.u64()? != 0 || r.u32()? != 0 {
                    return Err(DecodeError::Value("reserved"));
                }
                r.u32()?
            },
        };
        let count_fits = match kind {
            EntryKind::Record => header.count == 1,
            EntryKind::NoOps | EntryKind::Lost => header.count >= 1 && header.length == 0,
            EntryKind::Pad => header.count == 0,
        };
        if !count_fits {
            return Err(DecodeError::Value("count"));
        }
        if kind != EntryKind::Record && (header.client.0 != 0 || header.seq != 0) {
            return Err(DecodeError::Value("client"));
        }
        Ok(header)
    }
}

/// Bytes an entry with a payload of `length_bytes` takes in the region.
pub const fn span_bytes(length_bytes: usize) -> usize {
    HEADER_BYTES + length_bytes.next_multiple_of(HEADER_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: EntryHeader = EntryHeader {
        kind: EntryKind::Record,
        shard: ShardId(3),
        length: 4096,
        lsn: Lsn(77),
        count: 1,
        epoch: 2,
        client: ClientId(0x1122),
        seq: 9,
        crc: 0xAABB_CCDD,
    };

    #[test]
    fn the_layout_is_the_written_one() {
        let bytes = RECORD.encode();
        assert_eq!(bytes[..8], [1, 1, 3, 0, 0, 16, 0, 0]);
        assert_eq!(bytes[8..24], [77, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(bytes[24..26], [0x22, 0x11]);
        assert_eq!(bytes[40], 9);
        assert_eq!(bytes[60..], [0xDD, 0xCC, 0xBB, 0xAA]);
        assert_eq!(EntryHeader::decode(&bytes), Ok(RECORD));
        assert_eq!(RECORD.span_bytes(), 4160);
        assert_eq!(span_bytes(1), 128);
        assert_eq!(span_bytes(0), 64);
    }

    #[test]
    fn zeroed_memory_and_impossible_fields_are_no_entries() {
        assert_eq!(EntryHeader::decode(&[0; 64]), Err(DecodeError::Tag(0)));
        let mut two = RECORD.encode();
        two[16] = 2;
        assert_eq!(EntryHeader::decode(&two), Err(DecodeError::Value("count")));
        let mut reserved = RECORD.encode();
        reserved[50] = 1;
        assert_eq!(EntryHeader::decode(&reserved), Err(DecodeError::Value("reserved")));
    }
}
