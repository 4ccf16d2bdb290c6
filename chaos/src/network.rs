//! A network of our own: a namespace for each process, a bridge in another one, and rules in a namespace that drop what
//! comes from another. Nothing outside these namespaces is touched; all are removed when dropped.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

/// The address of a place.
pub fn address(place: usize) -> String {
    format!("10.77.{}.{}", place / 200, place % 200 + 1)
}

/// Namespaces, by place.
pub struct Network {
    prefix: String,
    places: usize,
    /// What is dropped: from, at.
    blocked: BTreeSet<(usize, usize)>,
}

/// Runs `ip`; what it says when it fails.
fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(args).stdin(Stdio::null()).output();
    let output = output.map_err(|e| format!("cannot run ip, of iproute2: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("ip {}: {}", args.join(" "), said.trim()))
}

impl Network {
    /// A bridge and so many places on it.
    ///
    /// # Errors
    /// One line: this machine does not let us.
    pub fn new(places: usize) -> Result<Network, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("network namespaces need root".into());
        }
        let mut network =
            Network { prefix: format!("antelog{}-", std::process::id()), places: 0, blocked: BTreeSet::new() };
        let bridge = network.bridge();
        ip(&["netns", "add", &bridge])?;
        ip(&["-n", &bridge, "link", "add", "bridge", "type", "bridge"])?;
        ip(&["-n", &bridge, "link", "set", "bridge", "up"])?;
        for place in 0..places {
            network.places = place + 1;
            network.add(place)?;
        }
        Ok(network)
    }

    fn bridge(&self) -> String {
        format!("{}bridge", self.prefix)
    }

    /// The namespace of a place.
    pub fn namespace(&self, place: usize) -> String {
        format!("{}{place}", self.prefix)
    }

    fn add(&self, place: usize) -> Result<(), String> {
        let (own, bridge, port) = (self.namespace(place), self.bridge(), format!("port{place}"));
        ip(&["netns", "add", &own])?;
        ip(&["-n", &own, "link", "add", "eth0", "type", "veth", "peer", "name", &port, "netns", &bridge])?;
        ip(&["-n", &bridge, "link", "set", &port, "master", "bridge", "up"])?;
        ip(&["-n", &own, "addr", "add", &format!("{}/16", address(place)), "dev", "eth0"])?;
        ip(&["-n", &own, "link", "set", "eth0", "up"])?;
        ip(&["-n", &own, "link", "set", "lo", "up"])?;
        // What is for this place is looked up behind the rules that drop.
        ip(&["-n", &own, "rule", "add", "pref", "100", "lookup", "local"])?;
        ip(&["-n", &own, "rule", "del", "pref", "0"])
    }

    /// From now on nothing from one place arrives at another; what is under way between them is lost without a word.
    pub fn block(&mut self, from: usize, at: usize) -> Result<(), String> {
        if from == at || !self.blocked.insert((from, at)) {
            return Ok(());
        }
        ip(&["-n", &self.namespace(at), "rule", "add", "from", &address(from), "pref", "10", "blackhole"])
    }

    /// Everything arrives everywhere again.
    pub fn heal(&mut self) -> Result<(), String> {
        for (from, at) in std::mem::take(&mut self.blocked) {
            ip(&["-n", &self.namespace(at), "rule", "del", "from", &address(from), "pref", "10", "blackhole"])?;
        }
        Ok(())
    }

    /// A command that runs at a place: as the process that is started, so that signals reach it.
    pub fn command(&self, place: usize, program: &std::path::Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(place)]).arg(program);
        command
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for place in 0..self.places {
            let _ = ip(&["netns", "del", &self.namespace(place)]);
        }
        let _ = ip(&["netns", "del", &self.bridge()]);
    }
}
