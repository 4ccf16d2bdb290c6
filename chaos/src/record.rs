//! Records that say which they are: whoever reads one knows who appended it, and whether a byte of it changed.

use antelog_core::sim::rng::Rng;

const MAGIC: u32 = 0x616C_6368;
const HEAD_BYTES: usize = 16;
/// Most records are small, one in 32 is large.
const SMALL_BYTES_MAX: u64 = 400;
const LARGE_BYTES_MAX: u64 = 8000;

/// The largest record, in bytes.
pub const RECORD_BYTES_MAX: u32 = 16_384;

/// A record by its writer and the writer's number for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    /// A process that appends; one that is started again is another.
    pub writer: u32,
    /// Counts the writer's appends.
    pub seq: u64,
}

impl Name {
    /// The record's bytes: its length and all that follows its head are drawn from its name.
    pub fn bytes(self) -> Vec<u8> {
        let mut rng = Rng::new(self.seq, u64::from(self.writer) + 1);
        let more = if rng.below(32) == 0 { LARGE_BYTES_MAX } else { SMALL_BYTES_MAX };
        let len = HEAD_BYTES + rng.below(more) as usize;
        let mut bytes = Vec::with_capacity(len + 8);
        bytes.extend_from_slice(&MAGIC.to_le_bytes());
        bytes.extend_from_slice(&self.writer.to_le_bytes());
        bytes.extend_from_slice(&self.seq.to_le_bytes());
        while bytes.len() < len {
            bytes.extend_from_slice(&rng.bits().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// The name of a record, if these are exactly the bytes of one.
    pub fn of(bytes: &[u8]) -> Option<Name> {
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let seq = u64::from_le_bytes(bytes.get(8..HEAD_BYTES)?.try_into().ok()?);
        let name = Name { writer: word(4)?, seq };
        (word(0)? == MAGIC && name.bytes() == bytes).then_some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_knows_its_name_and_no_byte_of_it_may_change() {
        for seq in 0..100 {
            let name = Name { writer: 7, seq };
            let mut bytes = name.bytes();
            assert_eq!(Name::of(&bytes), Some(name));
            let at = seq as usize % bytes.len();
            bytes[at] ^= 1;
            assert_eq!(Name::of(&bytes), None, "byte {at}");
            assert_eq!(Name::of(&name.bytes()[..bytes.len() - 1]), None);
        }
    }
}
