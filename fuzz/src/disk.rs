//! What comes from files and from log regions.

use std::sync::Arc;

use antelog_core::access::Secret;
use antelog_core::config::Config;
use antelog_core::log::{LogOptions, LogWriter, REGION_BYTES_MIN, Retention, Verifier};
use antelog_core::mem::Region;
use antelog_protocol::wire::entry::{EntryHeader, HEADER_BYTES};
use antelog_protocol::{ClientId, Lsn, ShardId};

/// A small configuration that is in order.
pub const CONFIG: &str = include_str!("../corpus/config/good.toml");

thread_local! {
    /// A memory map takes longer than all the rest.
    static REGION: Arc<Region> = Region::new(REGION_BYTES_MIN).expect("memory");
}

/// Bytes that the log of a run may take; what lies behind is zero in every run.
const LOG_BYTES: usize = 16 << 10;

/// A log of a few entries, of which the input says the sizes and which bytes are not what they were.
pub fn log(input: &[u8]) {
    if let Some(header) = input.first_chunk::<HEADER_BYTES>()
        && let Ok(header) = EntryHeader::decode(header)
    {
        assert_eq!(EntryHeader::decode(&header.encode()), Ok(header));
        assert!(header.span_bytes() >= HEADER_BYTES);
    }
    let Some((sizes, damage)) = input.split_first_chunk::<8>() else { return };
    REGION.with(|region| {
        region.put(0, &[0; LOG_BYTES]);
        let shard = ShardId(3);
        let options = LogOptions { retention: Retention::Refuse, record_bytes_max: 2048 };
        let mut writer = LogWriter::new(region.clone(), shard, 1, options);
        writer.set_limits(Lsn(1 << 20), u64::MAX, u64::MAX);
        for (seq, size) in sizes.iter().enumerate() {
            if writer.make_room(usize::from(*size)).is_ok() {
                writer.record(ClientId(7), seq as u64, &[*size; 255][..usize::from(*size)]);
            }
        }
        for edit in damage.as_chunks::<3>().0.iter().take(256) {
            let at = usize::from(u16::from_le_bytes([edit[0], edit[1]])) % LOG_BYTES;
            let mut byte = [0];
            region.get(at, &mut byte);
            region.put(at, &[byte[0] ^ edit[2]]);
        }
        let mut verifier = Verifier::new(region.clone(), shard);
        let mut before = (verifier.at(), verifier.lsn());
        while let Ok(true) = verifier.step(LOG_BYTES as u64) {
            assert!(verifier.at() > before.0 && verifier.lsn() >= before.1 && verifier.at() <= LOG_BYTES as u64);
            before = (verifier.at(), verifier.lsn());
        }
        assert_eq!((verifier.at(), verifier.lsn()), before, "an entry that is refused moves nothing");
    });
}

pub fn config(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    match Config::parse(text, &[]) {
        Ok(config) => {
            assert_eq!(Config::parse(&config.to_string(), &[]), Ok(config), "printed, it is read as the same")
        }
        Err(error) => assert!(!error.0.contains('\n'), "not one line: {}", error.0),
    }
}

/// Overrides, a line each.
pub fn config_override(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let overrides: Vec<String> = text.lines().take(16).map(str::to_owned).collect();
    match Config::parse(CONFIG, &overrides) {
        Ok(config) => {
            assert_eq!(Config::parse(&config.to_string(), &[]), Ok(config), "printed, it is read as the same")
        }
        Err(error) => assert!(!error.0.contains('\n'), "not one line: {}", error.0),
    }
}

pub fn secret(input: &[u8]) {
    if let Ok(secret) = Secret::parse(input) {
        // Line ends behind it do not belong to it.
        assert_eq!(
            Secret::parse(&[input.trim_ascii_end(), b"\n"].concat()).is_ok(),
            input.trim_ascii_end().len() >= 16
        );
        assert_eq!(format!("{secret:?}"), "Secret(…)");
    }
}
