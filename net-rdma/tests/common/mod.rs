//! Which port the tests on a real device use.

#![allow(dead_code)] // not every test binary uses all of it

use std::fs;
use std::io::Write;
use std::path::Path;

use antelog_net_rdma::verbs::Place;

/// Says that the running test is skipped, and why, past the capture of tests that pass.
pub fn skip(why: &str) {
    let thread = std::thread::current();
    let _ = writeln!(std::io::stderr(), "skipped: {}: {why}", thread.name().unwrap_or("a test"));
}

/// The first port with a RoCE v2 address that is an IPv4 one; `None`, with a line that says so: skip.
pub fn place() -> Option<Place> {
    let found = find_place();
    if found.is_none() {
        skip("no RDMA device with a RoCE v2 port and an IPv4 address (net-rdma/soft-roce-vm test has one)");
    }
    found
}

fn find_place() -> Option<Place> {
    let names = |path: &Path| -> Vec<String> {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    };
    let class = Path::new("/sys/class/infiniband");
    for device in names(class) {
        for port in names(&class.join(&device).join("ports")) {
            let folder = class.join(&device).join("ports").join(&port);
            for index in 0..=255u8 {
                let read =
                    |part: &str| fs::read_to_string(folder.join(part).join(index.to_string())).unwrap_or_default();
                if read("gids").starts_with("0000:0000:0000:0000:0000:ffff:") && read("gid_attrs/types").contains("v2")
                {
                    return Some(Place { device, port: port.parse().ok()?, gid_index: index });
                }
            }
        }
    }
    None
}
