//! Chooses the device, port and address a node uses, and says why, or why none.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use antelog_core::path::Wish;

use super::{DeviceInfo, Discovery, GidInfo, GidKind, LinkLayer, PortInfo, PortState};

/// What was prescribed: `DEVICE[:PORT[:GID]]`. The rest is chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Override {
    /// The device's name.
    pub device: Option<String>,
    /// The port's number, from 1.
    pub port: Option<u8>,
    /// The place in the port's table of addresses.
    pub gid_index: Option<u8>,
}

impl Override {
    fn is_empty(&self) -> bool {
        *self == Override::default()
    }
}

impl FromStr for Override {
    type Err = String;

    fn from_str(text: &str) -> Result<Override, String> {
        let wrong = || format!("RDMA device {text:?}: expected DEVICE[:PORT[:GID]], like mlx5_0 or mlx5_0:1:3");
        let mut parts = text.split(':');
        let device = parts.next().filter(|name| !name.is_empty() && !name.contains('/')).ok_or_else(wrong)?;
        let mut number = || parts.next().map(|part| part.parse::<u8>().map_err(|_| wrong())).transpose();
        let (port, gid_index) = (number()?, number()?);
        if parts.next().is_some() || port == Some(0) {
            return Err(wrong());
        }
        Ok(Override { device: Some(device.to_owned()), port, gid_index })
    }
}

impl fmt::Display for Override {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.device.as_deref().unwrap_or("any device"))?;
        for part in [self.port, self.gid_index].into_iter().flatten() {
            write!(f, ":{part}")?;
        }
        Ok(())
    }
}

/// The device, port and address to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The device's name.
    pub device: String,
    /// The port's number.
    pub port: u8,
    /// The place of the address in the port's table.
    pub gid_index: u8,
    /// Why these: one line.
    pub why: String,
}

/// Chooses for a node that listens on `addresses`, of which an unspecified one (`0.0.0.0`, `::`) stands for all of the
/// machine's. RoCE v1 is never chosen, an address of one link only (fe80::/10) only where it is asked for.
///
/// # Errors
/// Why RDMA is not used, in one line: what there is, and what each lacks.
pub fn choose(found: &Discovery, wish: Wish, wanted: &Override, addresses: &[IpAddr]) -> Result<Choice, String> {
    if wish == Wish::Tcp {
        return Err("TCP was asked for (--transport tcp)".to_owned());
    }
    if found.devices.is_empty() {
        let wanted = if wanted.is_empty() { String::new() } else { format!("; {wanted} was asked for") };
        return Err(format!("this machine has no RDMA device{wanted}"));
    }
    if !wanted.is_empty() {
        return prescribed(found, wanted, addresses);
    }
    let candidates = Candidate::all(found);
    let usable: Vec<&Candidate<'_>> = candidates.iter().filter(|c| c.lacks().is_none()).collect();
    let own = |c: &&&Candidate<'_>| addresses.iter().any(|a| c.is_at(*a));
    if let Some(candidate) = usable.iter().filter(own).min_by_key(|c| c.rank()) {
        return Ok(candidate.chosen("has the node's address"));
    }
    if let Some(candidate) = usable.iter().find(|c| c.gid.kind == GidKind::InfiniBand) {
        return Ok(candidate.chosen("is an active InfiniBand port"));
    }
    let routable: Vec<_> = usable.iter().filter(|c| c.rank() < Rank::LinkLocal).collect();
    let refused = refusals(found);
    match routable.iter().min_by_key(|c| c.rank()) {
        None => Err(format!("no RDMA device is usable: {}", refused.join("; "))),
        Some(best) if wish == Wish::Rdma => {
            Ok(best.chosen(&format!("is the first usable one; no device has {}", listed(addresses))))
        }
        Some(_) => {
            let has = routable.iter().map(|c| c.named()).chain(refused).collect::<Vec<_>>().join("; ");
            Err(format!("no RDMA device has {} (--transport rdma takes another); {has}", listed(addresses)))
        }
    }
}

/// How good an address is, best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    InfiniBand,
    V4,
    V6,
    LinkLocal,
}

/// One address of one port of one device.
struct Candidate<'a> {
    device: &'a DeviceInfo,
    port: &'a PortInfo,
    gid: &'a GidInfo,
}

impl<'a> Candidate<'a> {
    fn all(found: &'a Discovery) -> Vec<Candidate<'a>> {
        found.devices.iter().flat_map(|device| device.ports.iter().flat_map(|p| Candidate::of(device, p))).collect()
    }

    fn of(device: &'a DeviceInfo, port: &'a PortInfo) -> impl Iterator<Item = Candidate<'a>> {
        port.gids.iter().map(move |gid| Candidate { device, port, gid })
    }

    /// Why it cannot be used at all.
    fn lacks(&self) -> Option<String> {
        unusable(self.device).or_else(|| inactive(self.port)).or_else(|| {
            (self.gid.kind == GidKind::RoceV1).then(|| "it is RoCE v1, and only RoCE v2 is used".to_owned())
        })
    }

    /// It has the address; an unspecified one stands for all that are valid beyond one link.
    fn is_at(&self, address: IpAddr) -> bool {
        let Some(own) = self.gid.ip() else { return false };
        let is_any = address.is_unspecified() && !self.gid.is_link_local();
        is_any || own == address.to_canonical()
    }

    fn rank(&self) -> Rank {
        match self.gid.ip() {
            None => Rank::InfiniBand,
            Some(IpAddr::V4(_)) => Rank::V4,
            Some(IpAddr::V6(_)) if self.gid.is_link_local() => Rank::LinkLocal,
            Some(IpAddr::V6(_)) => Rank::V6,
        }
    }

    /// Like `rxe0 port 1 has 10.77.0.1 (GID 1)`.
    fn named(&self) -> String {
        let address = self.gid.ip().unwrap_or_else(|| IpAddr::from(self.gid.gid));
        format!("{} port {} has {address} (GID {})", self.device.name, self.port.number, self.gid.index)
    }

    fn chosen(&self, why: &str) -> Choice {
        let (device, port, gid) = (&self.device.name, self.port.number, self.gid);
        Choice {
            device: device.clone(),
            port,
            gid_index: gid.index,
            why: format!("{device} port {port} GID {} ({gid}) {why}", gid.index),
        }
    }
}

/// Why a device is of no use.
fn unusable(device: &DeviceInfo) -> Option<String> {
    if device.is_iwarp {
        return Some("it speaks iWARP, and only RoCE v2 and InfiniBand are used".to_owned());
    }
    device.uverbs.is_none().then(|| "programs cannot open it (modprobe ib_uverbs)".to_owned())
}

/// Why a port is of no use.
fn inactive(port: &PortInfo) -> Option<String> {
    match (&port.state, port.link_layer) {
        (PortState::Active, _) => None,
        (PortState::Init, LinkLayer::InfiniBand) => Some("it is INIT (no subnet manager: start opensm)".to_owned()),
        (state, _) => Some(format!("it is {state}")),
    }
}

/// What each port lacks that has nothing to choose.
fn refusals(found: &Discovery) -> Vec<String> {
    let mut lines = Vec::new();
    for device in &found.devices {
        if device.ports.is_empty() {
            lines.push(format!("{}: it has no port", device.name));
        }
        for port in &device.ports {
            if Candidate::of(device, port).all(|c| c.lacks().is_some() || c.rank() == Rank::LinkLocal) {
                lines.push(format!("{} port {}: {}", device.name, port.number, refusal(device, port)));
            }
        }
    }
    lines
}

/// What a port lacks that is not chosen by itself.
fn refusal(device: &DeviceInfo, port: &PortInfo) -> String {
    if let Some(text) = unusable(device).or_else(|| inactive(port)) {
        return text;
    }
    let kinds: Vec<&GidInfo> = port.gids.iter().filter(|g| g.kind != GidKind::RoceV1).collect();
    if port.gids.is_empty() {
        "it has no GID (give its interface an IP address)".to_owned()
    } else if kinds.is_empty() {
        "it has only RoCE v1 GIDs, and only RoCE v2 is used".to_owned()
    } else {
        "it has only a link-local GID (give its interface an IP address)".to_owned()
    }
}

fn listed(addresses: &[IpAddr]) -> String {
    match addresses {
        [] => "an address of this node".to_owned(),
        [one] => format!("the address {one}"),
        many => format!("an address of {}", many.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// Follows what was prescribed and chooses the rest, the best first: the node's address, then routable ones, then others.
fn prescribed(found: &Discovery, wanted: &Override, addresses: &[IpAddr]) -> Result<Choice, String> {
    let devices: Vec<&DeviceInfo> =
        found.devices.iter().filter(|d| wanted.device.as_ref().is_none_or(|name| *name == d.name)).collect();
    if devices.is_empty() {
        let names: Vec<&str> = found.devices.iter().map(|d| d.name.as_str()).collect();
        return Err(format!("RDMA device {wanted}: there is no such device; there is {}", names.join(", ")));
    }
    let mut fitting = Vec::new();
    let mut lacking = Vec::new();
    for device in devices {
        match on_device(device, wanted) {
            Ok(candidates) => fitting.extend(candidates),
            Err(text) => lacking.push(text),
        }
    }
    let best = fitting.iter().min_by_key(|c| (!addresses.iter().any(|a| c.is_at(*a)), c.rank()));
    match best {
        Some(candidate) => Ok(candidate.chosen("was asked for")),
        None => Err(format!("RDMA device {wanted}: {}", lacking.join("; "))),
    }
}

/// The usable addresses of a device that fit what was prescribed; otherwise what is in the way.
fn on_device<'a>(device: &'a DeviceInfo, wanted: &Override) -> Result<Vec<Candidate<'a>>, String> {
    let ports: Vec<&PortInfo> = device.ports.iter().filter(|p| wanted.port.is_none_or(|n| n == p.number)).collect();
    if let (true, Some(number)) = (ports.is_empty(), wanted.port) {
        let numbers: Vec<String> = device.ports.iter().map(|p| p.number.to_string()).collect();
        return Err(format!("{} has no port {number}; it has port {}", device.name, numbers.join(", ")));
    }
    let mut fitting = Vec::new();
    let mut lacking = Vec::new();
    for port in ports {
        let named = format!("{} port {}", device.name, port.number);
        let gids: Vec<_> =
            Candidate::of(device, port).filter(|c| wanted.gid_index.is_none_or(|i| i == c.gid.index)).collect();
        if let Some(text) = unusable(device).or_else(|| inactive(port)) {
            lacking.push(format!("{named}: {text}"));
        } else if let (true, Some(index)) = (gids.is_empty(), wanted.gid_index) {
            let has: Vec<String> = port.gids.iter().map(|g| format!("GID {} ({g})", g.index)).collect();
            let has = if has.is_empty() { "no GID at all".to_owned() } else { has.join(", ") };
            lacking.push(format!("{named} has no GID {index}; it has {has}"));
        } else if gids.iter().all(|c| c.lacks().is_some()) {
            let what = wanted.gid_index.map_or(refusal(device, port), |index| {
                format!("GID {index}: {}", gids.iter().find_map(Candidate::lacks).unwrap_or_default())
            });
            lacking.push(format!("{named}: {what}"));
        }
        fitting.extend(gids.into_iter().filter(|c| c.lacks().is_none()));
    }
    if fitting.is_empty() { Err(lacking.join("; ")) } else { Ok(fitting) }
}
