//! Which RDMA devices this machine has, read from sysfs, and which of them a node should use.
//!
//! Reading sysfs needs neither libibverbs nor permissions, so that it can explain why RDMA is not used even where no verb
//! can be called.

mod choice;

pub use antelog_core::path::Wish;
pub use choice::{Choice, Override, choose};

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

/// The RDMA devices of a machine, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Discovery {
    /// All that the kernel has registered, usable or not.
    pub devices: Vec<DeviceInfo>,
}

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name, like `mlx5_0` or `rxe0`.
    pub name: String,
    /// Its ports, by number.
    pub ports: Vec<PortInfo>,
    /// The NUMA node it is attached to, where it has one.
    pub numa_node: Option<i32>,
    /// Its node GUID as sysfs writes it.
    pub node_guid: Option<String>,
    /// Its firmware's version.
    pub firmware: Option<String>,
    /// The driver: that of the PCI device (`mlx5_core`), or a guess from the name for devices in software (`rxe`, `siw`).
    pub driver: Option<String>,
    /// What programs open it by, like `uverbs0`; `None` when `ib_uverbs` is not loaded.
    pub uverbs: Option<String>,
    /// It speaks iWARP, not RoCE or InfiniBand.
    pub is_iwarp: bool,
}

/// A port of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// Its number, from 1.
    pub number: u8,
    /// Its state.
    pub state: PortState,
    /// What is below it.
    pub link_layer: LinkLayer,
    /// Its rate as sysfs writes it, like `100 Gb/sec (4X EDR)`; may be empty.
    pub rate: String,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Its addresses, by index, without empty places of the table.
    pub gids: Vec<GidInfo>,
}

/// The state of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortState {
    /// No link.
    Down,
    /// Linked, not configured: on InfiniBand the subnet manager has not seen it.
    Init,
    /// Configured, not yet allowed to send.
    Armed,
    /// Usable.
    Active,
    /// Anything else, as sysfs writes it.
    Other(String),
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PortState::Down => "DOWN",
            PortState::Init => "INIT",
            PortState::Armed => "ARMED",
            PortState::Active => "ACTIVE",
            PortState::Other(text) => text,
        })
    }
}

/// What is below a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// RoCE or iWARP.
    Ethernet,
    /// InfiniBand.
    InfiniBand,
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LinkLayer::Ethernet => "Ethernet",
            LinkLayer::InfiniBand => "InfiniBand",
        })
    }
}

/// An address of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidInfo {
    /// Its place in the port's table.
    pub index: u8,
    /// The address in network order.
    pub gid: [u8; 16],
    /// How packets with it are framed.
    pub kind: GidKind,
    /// The network interface it comes from.
    pub netdev: Option<String>,
}

/// How packets with an address are framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// Ethernet frames: not routed, and never used here.
    RoceV1,
    /// UDP packets to port 4791.
    RoceV2,
    /// InfiniBand.
    InfiniBand,
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GidKind::RoceV1 => "RoCE v1",
            GidKind::RoceV2 => "RoCE v2",
            GidKind::InfiniBand => "InfiniBand",
        })
    }
}

impl GidInfo {
    /// The IP address it stands for: IPv4 where mapped, IPv6 otherwise; `None` on InfiniBand.
    pub fn ip(&self) -> Option<IpAddr> {
        (self.kind != GidKind::InfiniBand).then(|| IpAddr::from(self.gid).to_canonical())
    }

    /// It is valid on one link only (fe80::/10).
    pub fn is_link_local(&self) -> bool {
        Ipv6Addr::from(self.gid).is_unicast_link_local()
    }
}

impl fmt::Display for GidInfo {
    /// Kind and address, like `RoCE v2 10.77.0.1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.ip().unwrap_or_else(|| IpAddr::from(self.gid));
        write!(f, "{} {address}", self.kind)
    }
}

impl Discovery {
    /// Reads what is registered below `root`, which is `/sys` except in tests. What cannot be read is left out: devices may
    /// vanish at any time.
    pub fn read(root: &Path) -> Discovery {
        let class = root.join("class/infiniband");
        let opened_by: Vec<(String, String)> = names(&root.join("class/infiniband_verbs"))
            .into_iter()
            .filter_map(|uverbs| {
                let device = text(&root.join("class/infiniband_verbs").join(&uverbs).join("ibdev"))?;
                Some((device, uverbs))
            })
            .collect();
        let devices = names(&class).into_iter().map(|name| {
            let uverbs = opened_by.iter().find(|(device, _)| *device == name).map(|(_, uverbs)| uverbs.clone());
            device(&class.join(&name), name, uverbs)
        });
        Discovery { devices: devices.collect() }
    }

    /// The device of this name.
    pub fn device(&self, name: &str) -> Option<&DeviceInfo> {
        self.devices.iter().find(|d| d.name == name)
    }
}

fn device(path: &Path, name: String, uverbs: Option<String>) -> DeviceInfo {
    let driver = std::fs::read_link(path.join("device/driver"))
        .ok()
        .and_then(|target| Some(target.file_name()?.to_string_lossy().into_owned()))
        .or_else(|| in_software(path, &name));
    let mut ports: Vec<PortInfo> = names(&path.join("ports"))
        .into_iter()
        .filter_map(|number| Some(port(&path.join("ports").join(&number), number.parse().ok()?)))
        .collect();
    ports.sort_by_key(|p| p.number);
    DeviceInfo {
        ports,
        // The kernel writes -1 for "none".
        numa_node: text(&path.join("device/numa_node")).and_then(|t| t.parse().ok()).filter(|node| *node >= 0),
        node_guid: text(&path.join("node_guid")),
        firmware: text(&path.join("fw_ver")),
        driver,
        uverbs,
        is_iwarp: text(&path.join("node_type")).is_some_and(|t| t.ends_with("RNIC")),
        name,
    }
}

/// The driver of a device without hardware. rxe has a file that names its interface; siw can only be told by its name.
fn in_software(path: &Path, name: &str) -> Option<String> {
    let known = ["rxe", "siw"].into_iter().find(|driver| name.contains(driver));
    if path.join("parent").is_file() {
        return Some("rxe".to_owned());
    }
    known.map(str::to_owned)
}

fn port(path: &Path, number: u8) -> PortInfo {
    let link_layer = match text(&path.join("link_layer")).as_deref() {
        Some("InfiniBand") => LinkLayer::InfiniBand,
        _ => LinkLayer::Ethernet,
    };
    let mut gids: Vec<GidInfo> =
        names(&path.join("gids")).into_iter().filter_map(|index| gid(path, index.parse().ok()?, link_layer)).collect();
    gids.sort_by_key(|g| g.index);
    PortInfo {
        number,
        state: state(&text(&path.join("state")).unwrap_or_default()),
        link_layer,
        rate: text(&path.join("rate")).unwrap_or_default(),
        lid: text(&path.join("lid")).and_then(|t| hexadecimal(&t)).unwrap_or(0),
        gids,
    }
}

/// The address at a place of a port's table, unless the place is empty.
fn gid(port: &Path, index: u8, link_layer: LinkLayer) -> Option<GidInfo> {
    let address: Ipv6Addr = text(&port.join("gids").join(index.to_string()))?.parse().ok()?;
    let attributes = port.join("gid_attrs");
    if address.is_unspecified() {
        return None;
    }
    let kind = match (link_layer, text(&attributes.join("types").join(index.to_string())).as_deref()) {
        (LinkLayer::InfiniBand, _) => GidKind::InfiniBand,
        (LinkLayer::Ethernet, Some("RoCE v2")) => GidKind::RoceV2,
        (LinkLayer::Ethernet, _) => GidKind::RoceV1,
    };
    let netdev = text(&attributes.join("ndevs").join(index.to_string()));
    Some(GidInfo { index, gid: address.octets(), kind, netdev })
}

/// sysfs writes `4: ACTIVE`.
fn state(text: &str) -> PortState {
    match text.split_once(": ").map_or(text, |(_, word)| word) {
        "DOWN" => PortState::Down,
        "INIT" => PortState::Init,
        "ARMED" => PortState::Armed,
        "ACTIVE" => PortState::Active,
        "" => PortState::Other("of unknown state".to_owned()),
        other => PortState::Other(other.to_owned()),
    }
}

fn hexadecimal(text: &str) -> Option<u16> {
    u16::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// The names in a folder, sorted; none when it cannot be read.
fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).filter(|name| !name.starts_with('.')).collect();
    names.sort();
    names
}

/// A file's text without blanks around it; `None` when it cannot be read or is blank.
fn text(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}
