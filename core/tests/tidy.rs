//! The code's own rules, checked: sizes, headers, rooms for unsafe, names of invariants and design notes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Longest source file, in lines.
const FILE_LINES_MAX: usize = 600;
/// Longest function, in lines.
const FUNCTION_LINES_MAX: usize = 80;
/// Longest line, in characters.
const LINE_CHARS_MAX: usize = 125;

/// The only files that may contain unsafe code.
const UNSAFE_ROOMS: [&str; 10] = [
    "core/src/mem/",
    "core/src/channel/ring.rs",
    "core/src/channel/spsc.rs",
    "core/src/storage/uring.rs",
    "net-tcp/src/uring.rs",
    "net-rdma/src/verbs.rs",
    "net-rdma/src/verbs/",
    "net-rdma/src/inbox.rs",
    "net-rdma/ffi-check/src/peer.rs",
    "fuzz/src/allocations.rs",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every Rust source of the workspace as (path from the root, text).
fn sources() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for top in ["core", "net-tcp", "net-rdma", "antelog", "profile", "fuzz"] {
        collect(&root().join(top), &mut found);
    }
    assert!(found.len() > 30, "the walk found only {} files", found.len());
    found
}

fn collect(folder: &Path, found: &mut Vec<(String, String)>) {
    let mut entries: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.ends_with("target") {
            // What a build generates.
        } else if path.is_dir() {
            collect(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let name = path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/");
            found.push((name, std::fs::read_to_string(&path).unwrap()));
        }
    }
}

fn complain(complaints: &[String]) {
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[test]
fn files_are_short_and_say_why_they_exist() {
    let mut complaints = Vec::new();
    for (name, text) in sources() {
        let lines = text.lines().count();
        if lines > FILE_LINES_MAX {
            complaints.push(format!("{name}: {lines} lines, at most {FILE_LINES_MAX}"));
        }
        if !text.starts_with("//!") {
            complaints.push(format!("{name}: does not begin with a header (//!) that says why it exists"));
        }
        for (number, line) in text.lines().enumerate() {
            if line.chars().count() > LINE_CHARS_MAX && !line.contains("http") {
                complaints.push(format!("{name}:{}: a line of more than {LINE_CHARS_MAX} characters", number + 1));
            }
        }
    }
    complain(&complaints);
}

#[test]
fn functions_are_short() {
    let mut complaints = Vec::new();
    for (name, text) in sources() {
        let mut start: Option<(usize, usize)> = None;
        for (number, line) in text.lines().enumerate() {
            let indent = line.len() - line.trim_start().len();
            let code = line.trim_start();
            let begins =
                ["fn ", "pub fn ", "pub(crate) fn ", "pub(super) fn ", "pub const fn ", "const fn ", "unsafe fn "];
            if start.is_none() && begins.iter().any(|b| code.starts_with(b)) {
                start = Some((number, indent));
            }
            if let Some((first, at)) = start
                && indent == at
                && (code == "}" || code.ends_with(';') || code.ends_with("{}") || code.ends_with(" }"))
            {
                let lines = number - first + 1;
                if lines > FUNCTION_LINES_MAX {
                    complaints.push(format!("{name}:{}: a function of {lines} lines", first + 1));
                }
                start = None;
            }
        }
    }
    complain(&complaints);
}

#[test]
fn unsafe_code_stays_in_its_rooms_and_gives_reasons() {
    let word = concat!("un", "safe");
    let mut complaints = Vec::new();
    for (name, text) in sources() {
        let in_room = UNSAFE_ROOMS.iter().any(|room| name.starts_with(room));
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let opens = [" {", " fn", " impl"].iter().any(|next| code.contains(&format!("{word}{next}")));
            // A test that counts allocations has to be an allocator.
            if opens && !in_room && !name.ends_with("tests/tidy.rs") && !name.ends_with("tests/allocations.rs") {
                complaints.push(format!("{name}:{}: {word} code outside its rooms", number + 1));
            }
        }
    }
    complain(&complaints);
}

#[test]
fn nothing_unfinished_is_left() {
    let mut complaints = Vec::new();
    let words = [concat!("to", "do!("), concat!("unimpl", "emented!("), concat!("FIX", "ME"), concat!("db", "g!(")];
    for (name, text) in sources() {
        for (number, line) in text.lines().enumerate() {
            for word in words {
                if line.contains(word) {
                    complaints.push(format!("{name}:{}: {word}", number + 1));
                }
            }
        }
    }
    complain(&complaints);
}

#[test]
fn invariants_that_the_specification_says_are_asserted_are() {
    let specification = std::fs::read_to_string(root().join("core/protocol/PROTOCOL.md")).unwrap();
    let sources = sources();
    let mut complaints = Vec::new();
    let mut seen = BTreeSet::new();
    for line in specification.lines().filter(|l| l.starts_with("| I")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let (id, places) = (cells[0], cells[cells.len() - 1]);
        seen.insert(id.to_owned());
        for place in places.split('`').filter(|p| p.ends_with(".rs") && !p.contains("tests")) {
            let cited =
                sources.iter().filter(|(name, _)| name == &format!("core/protocol/src/{place}")).any(|(_, text)| {
                    [format!("invariant!({id},"), format!("ensure!({id},"), format!("\"{id}\"")]
                    .iter()
                    .any(|citation| text.contains(citation))
                    // Multi-line calls put the id on a line of its own.
                    || text.lines().any(|l| l.trim() == format!("{id},"))
                    || text.contains(&format!("{id}:"))
                });
            if !cited {
                complaints.push(format!("{id}: not asserted in {place}, where PROTOCOL.md says it is"));
            }
        }
    }
    assert_eq!(seen.len(), 18, "the specification lists I1 to I18");
    complain(&complaints);
}

#[test]
fn design_notes_that_the_code_cites_exist() {
    let design = std::fs::read_to_string(root().join("core/DESIGN.md")).unwrap();
    let notes: BTreeSet<&str> = design.lines().filter_map(|l| l.strip_prefix("## ")).collect();
    let mut complaints = Vec::new();
    for (name, text) in sources().iter().filter(|(name, _)| !name.ends_with("tidy.rs")) {
        let joined: String =
            text.lines().map(|l| l.trim().trim_start_matches(['/', '!']).trim()).collect::<Vec<_>>().join(" ");
        for (at, _) in joined.match_indices("in DESIGN.md") {
            let quoted = joined[..at].trim_end().strip_suffix('"').and_then(|b| b.rfind('"').map(|q| &b[q + 1..]));
            match quoted {
                Some(note) if notes.contains(note) => {}
                other => complaints.push(format!("{name}: cites {other:?}, which DESIGN.md does not have")),
            }
        }
    }
    complain(&complaints);
}
