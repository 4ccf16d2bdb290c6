//! The cluster map that a gate hands out with the hand-shake.

use alloc::string::String;
use alloc::vec::Vec;

use super::{DecodeError, Reader};
use crate::types::ShardId;

/// The gates beside a shard's replicas: whichever replica is the primary, its gate serves the shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardGates {
    /// The shard.
    pub shard: ShardId,
    /// Number of each replica, in ascending order, and the address of the gate beside it. Several replicas, of one shard or
    /// of many, may share a gate.
    pub gates: Vec<(u16, String)>,
}

impl ShardGates {
    /// The address of the gate beside a replica.
    pub fn gate(&self, replica: u16) -> Option<&str> {
        self.gates.iter().find(|(number, _)| *number == replica).map(|(_, address)| address.as_str())
    }
}

/// What a client must know of a cluster: which gates there are, and its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterMap {
    /// The ordering tick in nanoseconds.
    pub tick_ns: u64,
    /// A gate that relays the order stream and has not been heard for this long is asked whether it is still there.
    pub suspect_ns: u64,
    /// Largest record in bytes.
    pub record_bytes_max: u32,
    /// Appends a session may have outstanding per shard.
    pub outstanding_max: u32,
    /// Shards in id order with their gates, at least one each.
    pub shards: Vec<ShardGates>,
    /// Name of the ordering in force (`fixed`, `free-tick`, `free-event`).
    pub ordering: String,
}

impl ClusterMap {
    /// A shard's gates.
    pub fn shard(&self, shard: ShardId) -> Option<&ShardGates> {
        self.shards.binary_search_by_key(&shard, |s| s.shard).ok().map(|at| &self.shards[at])
    }

    /// The addresses of all gates; one that serves several replicas comes several times.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.shards.iter().flat_map(|s| s.gates.iter().map(|(_, address)| address.as_str()))
    }

    /// The map's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(&self.tick_ns.to_le_bytes());
        out.extend_from_slice(&self.suspect_ns.to_le_bytes());
        out.extend_from_slice(&self.record_bytes_max.to_le_bytes());
        out.extend_from_slice(&self.outstanding_max.to_le_bytes());
        put_text(&mut out, &self.ordering);
        out.extend_from_slice(&(self.shards.len() as u16).to_le_bytes());
        for ShardGates { shard, gates } in &self.shards {
            out.extend_from_slice(&shard.0.to_le_bytes());
            out.extend_from_slice(&(gates.len() as u16).to_le_bytes());
            for (replica, address) in gates {
                out.extend_from_slice(&replica.to_le_bytes());
                put_text(&mut out, address);
            }
        }
        out
    }

    /// Reads a map.
    ///
    /// # Errors
    /// When the bytes are not exactly one valid map.
    pub fn decode(bytes: &[u8]) -> Result<ClusterMap, DecodeError> {
        let mut r = Reader::new(bytes);
        let (tick_ns, suspect_ns) = (r.u64()?, r.u64()?);
        let (record_bytes_max, outstanding_max) = (r.u32()?, r.u32()?);
        if tick_ns == 0 || suspect_ns == 0 || outstanding_max == 0 {
            return Err(DecodeError::Value("limit"));
        }
        let ordering = get_text(&mut r)?;
        let count = r.u16()?;
        let mut shards: Vec<ShardGates> = Vec::new();
        for _ in 0..count {
            let shard = ShardId(r.u16()?);
            if shards.last().is_some_and(|last| last.shard >= shard) {
                return Err(DecodeError::Value("shard order"));
            }
            let mut gates: Vec<(u16, String)> = Vec::new();
            for _ in 0..r.u16()? {
                let replica = r.u16()?;
                if gates.last().is_some_and(|(last, _)| *last >= replica) {
                    return Err(DecodeError::Value("replica order"));
                }
                gates.push((replica, get_text(&mut r)?));
            }
            if gates.is_empty() {
                return Err(DecodeError::Value("gates"));
            }
            shards.push(ShardGates { shard, gates });
        }
        r.finish()?;
        if shards.is_empty() {
            return Err(DecodeError::Value("shards"));
        }
        Ok(ClusterMap { tick_ns, suspect_ns, record_bytes_max, outstanding_max, shards, ordering })
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    let len = text.len().min(255);
    out.push(len as u8);
    out.extend_from_slice(&text.as_bytes()[..len]);
}

fn get_text(r: &mut Reader<'_>) -> Result<String, DecodeError> {
    let len = r.u8()?;
    let bytes = r.bytes(len.into())?;
    // A client shows it to people.
    let text = core::str::from_utf8(bytes).ok().filter(|text| !text.chars().any(char::is_control));
    text.map(String::from).ok_or(DecodeError::Value("text"))
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn a_map_comes_back_and_an_impossible_one_is_refused() {
        let (a, b): (String, String) = ("127.0.0.1:1".into(), "[::1]:2".into());
        let map = ClusterMap {
            tick_ns: 1_000_000,
            suspect_ns: 2_000_000,
            record_bytes_max: 4096,
            outstanding_max: 8,
            shards: vec![
                ShardGates { shard: ShardId(0), gates: vec![(0, a.clone()), (1, b.clone())] },
                ShardGates { shard: ShardId(4), gates: vec![(0, b.clone()), (7, a.clone())] },
            ],
            ordering: "fixed".into(),
        };
        assert_eq!(ClusterMap::decode(&map.encode()), Ok(map.clone()));
        assert_eq!(map.shard(ShardId(4)).and_then(|s| s.gate(7)), Some(a.as_str()));
        assert_eq!(map.addresses().count(), 4);
        let lines = ClusterMap { ordering: "two\nlines".into(), ..map.clone() };
        assert_eq!(ClusterMap::decode(&lines.encode()), Err(DecodeError::Value("text")));
        let with = |shards| ClusterMap { shards, ..map.clone() }.encode();
        let twice = with(vec![map.shards[1].clone(), map.shards[1].clone()]);
        assert_eq!(ClusterMap::decode(&twice), Err(DecodeError::Value("shard order")));
        let mixed = with(vec![ShardGates { shard: ShardId(0), gates: vec![(1, a.clone()), (1, b)] }]);
        assert_eq!(ClusterMap::decode(&mixed), Err(DecodeError::Value("replica order")));
        let nowhere = with(vec![ShardGates { shard: ShardId(0), gates: vec![] }]);
        assert_eq!(ClusterMap::decode(&nowhere), Err(DecodeError::Value("gates")));
        assert_eq!(ClusterMap::decode(&with(vec![])), Err(DecodeError::Value("shards")));
    }
}
