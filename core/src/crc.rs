//! The checksum that chains log entries: CRC-32C, continued from the entry before.

use crc_fast::{CrcAlgorithm, Digest};

/// The CRC-32C of `parts`, one after the other, continued from `seed`: the CRC of what came before, 0 at the start.
#[inline]
pub(crate) fn crc32c(seed: u32, parts: &[&[u8]]) -> u32 {
    // A finished CRC-32C is the complement of the register.
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!seed));
    for part in parts {
        digest.update(part);
    }
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    #[test]
    fn it_is_the_castagnoli_crc_and_continues() {
        assert_eq!(crc32c(0, &[b"123456789"]), 0xE306_9283);
        assert_eq!(crc32c(crc32c(0, &[b"1234"]), &[b"5", b"6789"]), 0xE306_9283);
        // RFC 3720, B.4: 32 bytes of zeros, of ones, and counting up.
        assert_eq!(crc32c(0, &[&[0; 32]]), 0x8A91_36AA);
        assert_eq!(crc32c(0, &[&[0xFF; 32]]), 0x62A8_AB43);
        let counting: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(0, &[&counting]), 0x46DD_794E);
        // Long enough for every kernel, and cut anywhere.
        let long: Vec<u8> = (0..5000u32).map(|n| ((n * 31) >> 3) as u8).collect();
        let whole = crc32c(7, &[&long]);
        for at in [0, 1, 15, 16, 17, 255, 256, 257, 4095, 4096, 5000] {
            assert_eq!(crc32c(crc32c(7, &[&long[..at]]), &[&long[at..]]), whole, "cut at {at}");
        }
    }
}
