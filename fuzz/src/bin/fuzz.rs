//! The fuzzer for the decoder that `ANTELOG_FUZZ` names; `fuzz/run` builds and runs it.
#![no_main]

use std::sync::OnceLock;

use antelog_fuzz::{TARGETS, Target};
use libfuzzer_sys::fuzz_target;

fn target() -> &'static Target {
    static CHOSEN: OnceLock<&'static Target> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let name = std::env::var("ANTELOG_FUZZ").unwrap_or_default();
        Target::named(&name).unwrap_or_else(|| {
            let known: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
            eprintln!("ANTELOG_FUZZ=\"{name}\": expected one of {}", known.join(", "));
            std::process::exit(2)
        })
    })
}

fuzz_target!(|input: &[u8]| target().run(input));
