//! The contract's suite over queue pairs: on the emulated fabric everywhere, and on a real device where there is one.
//!
//! The carrier is TCP over loopback, with connections made by the real hand-shake, as in the product.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Arc;

use antelog_core::contract::{Harness, checks};
use antelog_net_rdma::discover::{Discovery, Override, Wish, choose};
use antelog_net_rdma::emulated::{Behaviour, Emulated, Fabric, Grant};
use antelog_net_rdma::health::Health;
use antelog_net_rdma::provider::{Limits, Patience, Provider};
use antelog_net_rdma::verbs::{Device, Place, library};
use antelog_net_rdma::{Link, Options, RdmaTransport};
use antelog_net_tcp::{TcpLink, TcpTransport};

#[path = "../../net-tcp/tests/common/mod.rs"]
mod common;
#[path = "common/mod.rs"]
mod device;
use common::Pairs;

const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Transports whose devices come from `open`.
struct Rdma<P, F: FnMut(u16, usize) -> P> {
    pairs: Pairs,
    options: Options,
    open: F,
}

impl<P: Provider, F: FnMut(u16, usize) -> P> Harness for Rdma<P, F> {
    type T = RdmaTransport<P, TcpTransport>;

    fn transport(&mut self, peers_max: u16) -> Self::T {
        let carrier = TcpTransport::new(peers_max, antelog_net_tcp::Options::default()).unwrap();
        let device = (self.open)(peers_max, self.options.completions(peers_max));
        let health = Health::new(Arc::new(|line: &str| println!("    {line}")));
        RdmaTransport::new(carrier, Some(device), peers_max, self.options.clone(), health)
    }

    fn link(&mut self) -> (Link<TcpLink>, Link<TcpLink>) {
        let (here, there) = self.pairs.link();
        (Link { carrier: here, rdma: Some(HOST) }, Link { carrier: there, rdma: Some(HOST) })
    }
}

fn emulated(seed: u64, behaviour: Behaviour, inline_bytes: usize, options: &Options) {
    for (name, check) in checks::<Rdma<Emulated, _>>() {
        println!("{name}");
        let fabric = Fabric::new(seed, behaviour);
        let open = move |queues: u16, completions: usize| {
            let limits = Limits { message_bytes_max: 1 << 20, completions, requests_max: 1 << 10 };
            fabric.device(Grant { limits, queues: queues.into(), inline_bytes, lockable_bytes: u64::MAX })
        };
        check(&mut Rdma { pairs: Pairs::new("127.0.0.1:0"), options: options.clone(), open });
    }
}

#[test]
fn over_an_unruly_fabric() {
    emulated(1, Behaviour::default(), 64, &Options::default());
}

/// Losses are made good by the device; short queues and no inline data make every boundary frequent.
#[test]
fn over_a_fabric_that_loses() {
    let behaviour = Behaviour { loss: 50, pieces_max: 4, ..Behaviour::default() };
    // A virtual step is 200 ns: time-outs of 4 µs are many steps.
    let patience = Patience { ack_timeout: 1, retries: 7 };
    let options = Options { requests: 32, staging_bytes: 32 << 10, patience, ..Options::default() };
    emulated(2, behaviour, 0, &options);
}

/// Runs on the first usable device of this machine; says so where there is none.
#[test]
fn over_a_real_device() {
    let found = Discovery::read(Path::new("/sys"));
    let choice = choose(&found, Wish::Rdma, &Override::default(), &[]).and_then(|c| library().map(|_| c));
    let choice = match choice {
        Ok(choice) => choice,
        Err(why) => return device::skip(&why),
    };
    println!("{}", choice.why);
    let place = Place { device: choice.device, port: choice.port, gid_index: choice.gid_index };
    // An emulated machine stops for longer than a network does.
    let patience = Patience { ack_timeout: 18, retries: 7 };
    let options = Options { patience, bring_up_ns: 20_000_000_000, ..Options::default() };
    let only = std::env::var("ANTELOG_CHECK").unwrap_or_default();
    for (name, check) in checks::<Rdma<Device, _>>() {
        if !name.contains(&only) {
            continue;
        }
        println!("{name}");
        let place = place.clone();
        let open = move |queues: u16, completions: usize| Device::open(&place, queues, completions).unwrap();
        check(&mut Rdma { pairs: Pairs::new("127.0.0.1:0"), options: options.clone(), open });
    }
}
