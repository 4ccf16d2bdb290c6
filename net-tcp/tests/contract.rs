//! The contract's suite over loopback, IPv4 and IPv6, with connections made by the real hand-shake.

use antelog_core::contract::{Harness, checks};
use antelog_net_tcp::{Options, TcpLink, TcpTransport};

mod common;
use common::Pairs;

struct Loopback {
    pairs: Pairs,
    options: Options,
}

impl Harness for Loopback {
    type T = TcpTransport;

    fn transport(&mut self, peers_max: u16) -> TcpTransport {
        TcpTransport::new(peers_max, self.options.clone()).unwrap()
    }

    fn link(&mut self) -> (TcpLink, TcpLink) {
        self.pairs.link()
    }
}

fn run(address: &str, options: &Options) {
    for (name, check) in checks::<Loopback>() {
        println!("{address}: {name}");
        check(&mut Loopback { pairs: Pairs::new(address), options: options.clone() });
    }
}

#[test]
fn over_ipv4() {
    run("127.0.0.1:0", &Options::default());
}

#[test]
fn over_ipv6() {
    run("[::1]:0", &Options::default());
}

/// The smallest buffers make every boundary case frequent.
#[test]
fn with_small_buffers() {
    run("127.0.0.1:0", &Options { receive_bytes: 0, staging_bytes: 0, operations: 20, messages: None });
}
