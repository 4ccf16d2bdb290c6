//! The two formats beside the log's own: a segment's header and the identity. Little endian, versioned, with a CRC.
//!
//! A segment file is one block with the header, then the bytes of the log from the segment's start. The header lies within
//! the first 512 bytes, a sector, which a disk writes whole or not at all.

use std::sync::Arc;

use antelog_protocol::{Lsn, ShardId};

use super::disk::BLOCK_BYTES;
use super::mark::Mark;
use crate::crc::crc32c;

const SEGMENT_MAGIC: &[u8; 8] = b"antelogS";
const IDENTITY_MAGIC: &[u8; 8] = b"antelogI";
const VERSION: u32 = 1;

/// Bytes of a segment file before the log's bytes.
pub const HEADER_BYTES: u64 = BLOCK_BYTES as u64;
/// Bytes of a segment's header that mean something.
const SEGMENT_BYTES: usize = 256;
/// Longest name of a cluster, in bytes.
pub const CLUSTER_BYTES_MAX: usize = 64;
/// Longest note a caller may keep in the identity, in bytes.
pub const NOTE_BYTES_MAX: usize = 4096;
/// Bytes of the identity file.
pub(super) const IDENTITY_FILE_BYTES: usize = 2 * BLOCK_BYTES;

/// Whose log it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The cluster's name, at most [`CLUSTER_BYTES_MAX`] bytes.
    pub cluster: String,
    /// The shard.
    pub shard: ShardId,
    /// The replica's number in the shard.
    pub replica: u16,
}

/// How a log is laid out on disk and in memory: it can only be opened with the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of the log in a segment.
    pub segment_bytes: u64,
    /// Bytes of the log's region, which entries do not straddle.
    pub region_bytes: u64,
}

/// A segment's header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SegmentHeader {
    pub(super) cluster: Arc<str>,
    pub(super) shard: ShardId,
    pub(super) layout: Layout,
    /// Absolute offset of the segment's first byte.
    pub(super) start: u64,
    /// Before the first entry that begins in the segment.
    pub(super) first: Mark,
    /// Everything below was durable when the header was written.
    pub(super) flushed: u64,
    /// When the segment was begun, in milliseconds of Unix time.
    pub(super) begun_ms: u64,
}

/// What a replica must not forget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Whose directory it is.
    pub owner: Owner,
    /// The replica's incarnation: changes when it begins without its memory.
    pub incarnation: u64,
    /// Counts starts.
    pub generation: u64,
    /// The last user ended in an orderly way.
    pub clean: bool,
    /// The log begins anew at `flushed`, and what else is in the directory is to be removed.
    pub begins: bool,
    /// The layout of segments and region.
    pub layout: Layout,
    /// Everything below was durable when the identity was written.
    pub flushed: Mark,
    /// The caller's note.
    pub note: Vec<u8>,
}

struct Put<'a>(&'a mut [u8], usize);

impl Put<'_> {
    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0[self.1..self.1 + bytes.len()].copy_from_slice(bytes);
        self.1 += bytes.len();
        self
    }

    fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    fn mark(&mut self, mark: &Mark) -> &mut Self {
        self.u64(mark.at).u64(mark.lsn.0).u32(mark.crc).u32(mark.epoch)
    }

    fn cluster(&mut self, name: &str) -> &mut Self {
        assert!(name.len() <= CLUSTER_BYTES_MAX, "a cluster's name has at most {CLUSTER_BYTES_MAX} bytes");
        self.u16(name.len() as u16).bytes(name.as_bytes());
        self.1 += CLUSTER_BYTES_MAX - name.len();
        self
    }

    fn layout(&mut self, layout: &Layout) -> &mut Self {
        self.u64(layout.segment_bytes).u64(layout.region_bytes)
    }
}

struct Get<'a>(&'a [u8]);

impl<'a> Get<'a> {
    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(head)
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes(self.bytes(2)?.try_into().ok()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.bytes(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.bytes(8)?.try_into().ok()?))
    }

    fn mark(&mut self) -> Option<Mark> {
        Some(Mark { at: self.u64()?, lsn: Lsn(self.u64()?), crc: self.u32()?, epoch: self.u32()? })
    }

    fn cluster(&mut self) -> Option<String> {
        let len = usize::from(self.u16()?);
        let field = self.bytes(CLUSTER_BYTES_MAX)?;
        String::from_utf8(field.get(..len)?.to_vec()).ok()
    }

    fn layout(&mut self) -> Option<Layout> {
        Some(Layout { segment_bytes: self.u64()?, region_bytes: self.u64()? })
    }
}

/// Checks magic, version and CRC; what is between them.
fn body<'a>(bytes: &'a [u8], magic: &[u8; 8]) -> Option<Get<'a>> {
    let (covered, crc) = bytes.split_at_checked(bytes.len().checked_sub(4)?)?;
    let mut get = Get(covered);
    let good = get.bytes(8)? == magic && get.u32()? == VERSION && crc == crc32c(0, &[covered]).to_le_bytes();
    good.then_some(get)
}

fn seal(bytes: &mut [u8]) {
    let (covered, crc) = bytes.split_at_mut(bytes.len() - 4);
    crc.copy_from_slice(&crc32c(0, &[covered]).to_le_bytes());
}

impl SegmentHeader {
    pub(super) fn encode(&self) -> [u8; SEGMENT_BYTES] {
        let mut bytes = [0; SEGMENT_BYTES];
        let mut put = Put(&mut bytes, 0);
        put.bytes(SEGMENT_MAGIC).u32(VERSION).cluster(&self.cluster).u16(self.shard.0).layout(&self.layout);
        put.u64(self.start).mark(&self.first).u64(self.flushed).u64(self.begun_ms);
        seal(&mut bytes);
        bytes
    }

    /// The header at the beginning of a segment file's bytes; none if it is torn or was never written.
    pub(super) fn decode(bytes: &[u8]) -> Option<SegmentHeader> {
        let mut get = body(bytes.get(..SEGMENT_BYTES)?, SEGMENT_MAGIC)?;
        Some(SegmentHeader {
            cluster: get.cluster()?.into(),
            shard: ShardId(get.u16()?),
            layout: get.layout()?,
            start: get.u64()?,
            first: get.mark()?,
            flushed: get.u64()?,
            begun_ms: get.u64()?,
        })
    }
}

impl Identity {
    /// Writes the whole file's bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        assert!(self.note.len() <= NOTE_BYTES_MAX, "the identity keeps at most {NOTE_BYTES_MAX} bytes");
        let mut bytes = vec![0; IDENTITY_FILE_BYTES];
        let mut put = Put(&mut bytes, 0);
        put.bytes(IDENTITY_MAGIC).u32(VERSION).cluster(&self.owner.cluster).u16(self.owner.shard.0);
        put.u16(self.owner.replica)
            .u64(self.incarnation)
            .u64(self.generation)
            .u16(self.clean.into())
            .u16(self.begins.into());
        put.layout(&self.layout).mark(&self.flushed).u16(self.note.len() as u16).bytes(&self.note);
        seal(&mut bytes);
        bytes
    }

    /// The identity in a file's bytes; none if they are not the ones that were written.
    pub(super) fn decode(bytes: &[u8]) -> Option<Identity> {
        let mut get = body(bytes.get(..IDENTITY_FILE_BYTES)?, IDENTITY_MAGIC)?;
        Some(Identity {
            owner: Owner { cluster: get.cluster()?, shard: ShardId(get.u16()?), replica: get.u16()? },
            incarnation: get.u64()?,
            generation: get.u64()?,
            clean: get.u16()? != 0,
            begins: get.u16()? != 0,
            layout: get.layout()?,
            flushed: get.mark()?,
            note: {
                let len = usize::from(get.u16()?);
                get.bytes(len)?.to_vec()
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark() -> Mark {
        Mark { at: 0x1122, lsn: Lsn(33), crc: 0x4455_6677, epoch: 8 }
    }

    #[test]
    fn a_segment_header_comes_back_and_every_changed_bit_is_seen() {
        let header = SegmentHeader {
            cluster: "demo".into(),
            shard: ShardId(3),
            layout: Layout { segment_bytes: 1 << 20, region_bytes: 1 << 22 },
            start: 1 << 20,
            first: mark(),
            flushed: 77,
            begun_ms: 99,
        };
        let bytes = header.encode();
        assert_eq!(bytes[..12], *b"antelogS\x01\0\0\0");
        assert_eq!(bytes[12..18], *b"\x04\0demo");
        assert_eq!(SegmentHeader::decode(&bytes), Some(header));
        for bit in 0..bytes.len() * 8 {
            let mut wrong = bytes;
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(SegmentHeader::decode(&wrong), None, "bit {bit}");
        }
        assert_eq!(SegmentHeader::decode(&[0; 4096]), None);
        assert_eq!(SegmentHeader::decode(&bytes[..100]), None);
    }

    #[test]
    fn an_identity_comes_back_with_the_longest_name_and_note() {
        let identity = Identity {
            owner: Owner { cluster: "n".repeat(CLUSTER_BYTES_MAX), shard: ShardId(9), replica: 2 },
            incarnation: 5,
            generation: 6,
            clean: true,
            begins: false,
            layout: Layout { segment_bytes: 1 << 20, region_bytes: 1 << 22 },
            flushed: mark(),
            note: vec![7; NOTE_BYTES_MAX],
        };
        let bytes = identity.encode();
        assert_eq!(Identity::decode(&bytes), Some(identity));
        assert_eq!(Identity::decode(&bytes[..4096]), None, "half a file");
        let mut wrong = bytes;
        wrong[5000] ^= 1;
        assert_eq!(Identity::decode(&wrong), None);
    }
}
