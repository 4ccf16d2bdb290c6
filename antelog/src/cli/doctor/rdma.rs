//! Checks of what RDMA needs: the library, a device, its port and address, memory that may be locked, and a way through
//! the firewall.

use std::io::ErrorKind;

use antelog_net_rdma::discover::{
    DeviceInfo, Discovery, GidKind, LinkLayer, Override, PortInfo, PortState, Wish, choose,
};

use super::super::host::{Capability, Host, Module};
use super::machine::{readable, region_bytes};
use super::parse::{self, Firewall};
use super::{Finding, Need, Tried};

/// The UDP port of RoCE v2.
pub const ROCE_PORT: u16 = 4791;

/// The largest path MTU there is, in bytes, and the interface MTU that allows it.
const PATH_MTU_MAX: u32 = 4096;
const INTERFACE_MTU: u32 = 4200;

/// All of them. Without a device there is little to look at.
pub fn findings(host: &Host, found: &Discovery, tried: &Tried) -> Vec<Finding> {
    let mut findings = vec![library(host, tried)];
    for device in &found.devices {
        findings.extend(access(host, device));
        findings.extend(provider(host, device));
        for port in &device.ports {
            findings.push(state(device, port));
            findings.extend(mtu(host, device, port));
        }
    }
    findings.push(usable(host, found));
    findings.push(soft_roce(host, found));
    findings.push(locked_memory(host));
    if has_roce(found) {
        findings.push(roce_port(host, tried));
        findings.push(firewall(tried));
    }
    findings.extend(numa(host, found));
    findings
}

fn has_roce(found: &Discovery) -> bool {
    let mut ports = found.devices.iter().filter(|d| !d.is_iwarp).flat_map(|d| &d.ports);
    ports.any(|p| p.link_layer == LinkLayer::Ethernet)
}

/// libibverbs, as the transport loads it.
fn library(host: &Host, tried: &Tried) -> Finding {
    match &tried.library {
        Ok(()) => Finding::ok("libibverbs", "can be loaded"),
        Err(error) => Finding::fail(
            Need::Rdma,
            "libibverbs",
            error.clone(),
            host.distribution().install("ibverbs-providers libibverbs1", "libibverbs", "libibverbs1", "rdma-core"),
        ),
    }
}

/// Programs may open the device.
fn access(host: &Host, device: &DeviceInfo) -> Option<Finding> {
    let check = format!("{} access", device.name);
    let Some(uverbs) = &device.uverbs else {
        return Some(Finding::warn(&check, "programs cannot open it", "sudo modprobe ib_uverbs"));
    };
    let path = format!("dev/infiniband/{uverbs}");
    let opened = std::fs::File::options().read(true).write(true).open(host.path(&path));
    let error = opened.err()?;
    let mend = match error.kind() {
        ErrorKind::NotFound => format!("in a container: --device=/{path}; otherwise: sudo udevadm trigger"),
        _ => format!("sudo chmod 666 /{path} (rdma-core's udev rules do it at boot)"),
    };
    Some(Finding::fail(Need::Rdma, &check, format!("cannot open /{path}: {error}"), mend))
}

/// The library has the user part of the device's driver. Where the list of them is kept elsewhere, nobody can tell.
fn provider(host: &Host, device: &DeviceInfo) -> Option<Finding> {
    let name = match device.driver.as_deref()? {
        "mlx5_core" => "mlx5",
        "mlx4_core" => "mlx4",
        name @ ("rxe" | "siw") => name,
        _ => return None,
    };
    let is_known = host.has(&format!("etc/libibverbs.d/{name}.driver"));
    if is_known || !host.has("etc/libibverbs.d") {
        return None;
    }
    let mend = host.distribution().install("ibverbs-providers", "libibverbs", "libibverbs", "rdma-core");
    let check = format!("{} driver", device.name);
    Some(Finding::fail(Need::Rdma, &check, format!("libibverbs has no driver {name}"), mend))
}

fn state(device: &DeviceInfo, port: &PortInfo) -> Finding {
    let check = format!("{} port {}", device.name, port.number);
    let gids: Vec<String> = port.gids.iter().map(|g| format!("GID {} {g}", g.index)).collect();
    let gids = if gids.is_empty() { "no GID".to_owned() } else { gids.join(", ") };
    let text = format!("{}, {}, {gids}", port.state, port.link_layer);
    let interface = port.gids.iter().find_map(|g| g.netdev.as_deref()).unwrap_or("INTERFACE");
    let is_good = |kind| kind == GidKind::RoceV2 || kind == GidKind::InfiniBand;
    match (&port.state, port.link_layer) {
        (PortState::Active, LinkLayer::InfiniBand) => Finding::ok(&check, text),
        (PortState::Active, _) if port.gids.iter().any(|g| is_good(g.kind) && !g.is_link_local()) => {
            Finding::ok(&check, text)
        }
        (PortState::Active, _) => Finding::warn(&check, text, format!("sudo ip addr add ADDRESS/BITS dev {interface}")),
        (_, LinkLayer::InfiniBand) => Finding::warn(&check, text, "sudo systemctl start opensm (on one machine)"),
        _ => Finding::warn(&check, text, format!("sudo ip link set {interface} up (and is a cable plugged in?)")),
    }
}

/// The path MTU that the interface below a port allows.
fn mtu(host: &Host, device: &DeviceInfo, port: &PortInfo) -> Option<Finding> {
    let interface = port.gids.iter().find_map(|g| g.netdev.as_deref())?;
    let interface_mtu: u32 = host.text(&format!("sys/class/net/{interface}/mtu"))?.parse().ok()?;
    if port.link_layer == LinkLayer::InfiniBand {
        return None;
    }
    let check = format!("{} MTU", device.name);
    let path_mtu = parse::path_mtu(interface_mtu).unwrap_or(0);
    let text = format!("{interface} has {interface_mtu}, which makes the path MTU {path_mtu}");
    Some(if path_mtu >= PATH_MTU_MAX {
        Finding::ok(&check, text)
    } else {
        let mend = format!("sudo ip link set {interface} mtu {INTERFACE_MTU} (switches and peers must allow it)");
        Finding::warn(&check, format!("{text}: a record takes more packets than it could"), mend)
    })
}

/// A device that a node would take.
fn usable(host: &Host, found: &Discovery) -> Finding {
    match choose(found, Wish::Rdma, &Override::default(), &[]) {
        Ok(choice) => {
            let text = format!("{} port {} GID {} is usable", choice.device, choice.port, choice.gid_index);
            Finding::ok("RDMA device", text)
        }
        Err(text) => {
            let mend = match host.soft_roce_module() {
                _ if !found.devices.is_empty() => "mend what the lines about its devices and ports say",
                Module::Missing => "none in software either: see soft-RoCE below",
                _ => "without RDMA hardware: sudo antelog soft-roce up",
            };
            Finding::fail(Need::Rdma, "RDMA device", text, mend)
        }
    }
}

fn soft_roce(host: &Host, found: &Discovery) -> Finding {
    let has_hardware = found.devices.iter().any(|d| !matches!(d.driver.as_deref(), None | Some("rxe" | "siw")));
    match host.soft_roce_module() {
        Module::Loaded => Finding::ok("soft-RoCE", "rdma_rxe is loaded"),
        Module::Installed => Finding::ok("soft-RoCE", "rdma_rxe can be loaded: sudo antelog soft-roce up"),
        Module::Missing if has_hardware => Finding::ok("soft-RoCE", "no rdma_rxe, and there is hardware"),
        Module::Missing => {
            let text = format!("the kernel {} has no rdma_rxe", host.release());
            Finding::warn("soft-RoCE", text, host.soft_roce_package())
        }
    }
}

fn locked_memory(host: &Host) -> Finding {
    const CHECK: &str = "locked memory";
    let needed = region_bytes();
    if host.may(Capability::IpcLock) {
        return Finding::ok(CHECK, "this process may lock any amount");
    }
    let Some(limits) = host.text("proc/self/limits") else {
        return Finding::warn(CHECK, "unknown: /proc/self/limits cannot be read", "ulimit -l");
    };
    match parse::locked_bytes_max(&limits) {
        Some(bytes) if bytes < needed => Finding::fail(
            Need::Rdma,
            CHECK,
            format!("at most {}, and a replica's log region takes {}", readable(bytes), readable(needed)),
            "ulimit -l unlimited; for good: '* - memlock unlimited' in /etc/security/limits.conf and a new login, \
             LimitMEMLOCK=infinity in a systemd unit, --ulimit memlock=-1 for a container",
        ),
        Some(bytes) => Finding::ok(CHECK, format!("up to {}", readable(bytes))),
        None => Finding::ok(CHECK, "unlimited"),
    }
}

/// Nobody but the kernel receives RoCE's packets.
fn roce_port(host: &Host, tried: &Tried) -> Finding {
    let check = format!("UDP port {ROCE_PORT}");
    match tried.roce_port {
        Ok(()) => Finding::ok(&check, "not taken by a program"),
        Err(ErrorKind::AddrInUse) if host.has("sys/module/rdma_rxe") => Finding::ok(&check, "rxe receives on it"),
        Err(ErrorKind::AddrInUse) => {
            Finding::warn(&check, "a program has taken it", format!("sudo ss -lunp 'sport = :{ROCE_PORT}'"))
        }
        Err(kind) => {
            Finding::warn(&check, format!("cannot be tried: {kind}"), format!("sudo ss -lun | grep {ROCE_PORT}"))
        }
    }
}

/// RoCE's packets get in. Adapters in hardware pass the firewall by, and other machines' rules are not seen here.
fn firewall(tried: &Tried) -> Finding {
    let Some(rules) = &tried.rules else {
        let text = format!("unknown whether UDP port {ROCE_PORT} is let in: the rules cannot be seen");
        return Finding::warn(
            "firewall",
            text,
            format!("sudo nft list ruleset | grep -e {ROCE_PORT} -e 'policy drop'"),
        );
    };
    let open = format!(
        "sudo nft insert rule inet filter input udp dport {ROCE_PORT} accept \
         (firewalld: sudo firewall-cmd --add-port={ROCE_PORT}/udp)"
    );
    match parse::firewall(rules, ROCE_PORT) {
        Firewall::Open => Finding::ok("firewall", format!("no rule against UDP port {ROCE_PORT}")),
        Firewall::Accepted => Finding::ok("firewall", format!("lets UDP port {ROCE_PORT} in")),
        Firewall::Refused => Finding::warn("firewall", format!("a rule refuses UDP port {ROCE_PORT}"), open),
        Firewall::NotNamed => {
            Finding::warn("firewall", format!("drops what no rule names, and none names UDP port {ROCE_PORT}"), open)
        }
    }
}

/// Where several memory nodes are: which one a device is at.
fn numa(host: &Host, found: &Discovery) -> Vec<Finding> {
    if host.text("sys/devices/system/node/online").map_or(0, |list| parse::count(&list)) < 2 {
        return Vec::new();
    }
    let of = |device: &DeviceInfo| {
        let node = device.numa_node?;
        let cpus = host.text(&format!("sys/devices/system/node/node{node}/cpulist")).unwrap_or_default();
        let text = format!("node {node}, CPUs {cpus}: run nodes there (numactl -N {node} -m {node} antelog node ...)");
        Some(Finding::ok(&format!("{} NUMA", device.name), text))
    };
    found.devices.iter().filter_map(of).collect()
}
