//! Every decoder of antelog that reads bytes from the network or from disk, as a function of arbitrary bytes.
//!
//! What each must keep: it does not panic (overflows count), it ends, it allocates no more than a bound that it states,
//! and what it accepts encodes to the same bytes, or, where several encodings mean the same, to a message that is read back
//! as the same.

pub mod allocations;
mod disk;
mod wire;

use allocations::{Counted, peak_bytes};

#[global_allocator]
static ALLOCATOR: Counted = Counted;

/// A decoder under test.
pub struct Target {
    /// Its name, and that of its folder of inputs.
    pub name: &'static str,
    /// What it may allocate: so many bytes, and so many for each byte of input.
    pub bytes_max: (usize, usize),
    run: fn(&[u8]),
}

const fn target(name: &'static str, bytes_max: (usize, usize), run: fn(&[u8])) -> Target {
    Target { name, bytes_max, run }
}

/// All of them.
pub const TARGETS: &[Target] = &[
    target("hello", (8 << 10, 8), wire::hello),
    target("answer", (8 << 10, 8), wire::answer),
    target("request", (0, 0), wire::request),
    target("reply", (0, 0), wire::reply),
    target("node_message", (0, 0), wire::node_message),
    target("order", (64 << 10, 64), wire::order),
    target("cluster_map", (8 << 10, 32), wire::cluster_map),
    target("tcp_frame", (0, 0), wire::tcp_frame),
    target("rdma_setup", (8 << 10, 8), wire::rdma_setup),
    target("ring", (8 << 10, 8), wire::ring),
    target("http", (0, 0), wire::http),
    target("log", (64 << 10, 8), disk::log),
    target("config", (256 << 10, 2048), disk::config),
    target("override", (256 << 10, 2048), disk::config_override),
    target("secret", (4 << 10, 2), disk::secret),
];

impl Target {
    /// The one with this name.
    pub fn named(name: &str) -> Option<&'static Target> {
        TARGETS.iter().find(|target| target.name == name)
    }

    /// Runs it on an input. Panics when it does what it must not.
    pub fn run(&self, input: &[u8]) {
        let bytes = peak_bytes(|| (self.run)(input));
        let (fixed, each) = self.bytes_max;
        let most = fixed + each * input.len();
        assert!(bytes <= most, "{}: {bytes} bytes allocated for {} of input, at most {most}", self.name, input.len());
    }
}

/// The parts of an input that is several: each has its length, of two bytes, in front; the last one is what is left.
fn parts(mut input: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, rest) = input.split_first_chunk::<2>()?;
        let (part, rest) = rest.split_at(usize::from(u16::from_le_bytes(*length)).min(rest.len()));
        input = rest;
        Some(part)
    })
}

/// Parts put together as [`parts`] takes them apart.
pub fn joined(parts: &[Vec<u8>]) -> Vec<u8> {
    parts.iter().flat_map(|part| [&(part.len() as u16).to_le_bytes()[..], part].concat()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was found once is not found again, with any toolchain and without the fuzzer.
    #[test]
    fn every_input_of_the_corpus_is_taken() {
        let mut count = 0;
        for target in TARGETS {
            let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
            for file in std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
                target.run(&std::fs::read(file.unwrap().path()).unwrap());
                count += 1;
            }
        }
        assert!(count > TARGETS.len());
    }
}
