//! `soft-roce`: makes an RDMA device of a network interface, by the kernel's rdma_rxe, for machines without RDMA hardware.
//!
//! It only runs what an administrator would type (`modprobe`, `ip`, `rdma`), and turns each of the usual failures into one
//! line that says what mends it.

use std::net::IpAddr;
use std::time::Duration;

use antelog_net_rdma::discover::{DeviceInfo, Discovery, PortInfo, PortState};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::host::{Capability, Host, Module, run};
use super::{Outcome, Stop, output};

/// The device that `up` makes.
const DEVICE: &str = "antelog_rxe0";
/// The interface that `up` makes when it is given none.
const INTERFACE: &str = "antelog0";
/// Lets packets carry 4096 bytes: what rxe puts around them fits into the rest.
const MTU: &str = "4200";
/// How often `up` looks whether the device has become usable, and how long it waits between.
const LOOKS: (u32, Duration) = (40, Duration::from_millis(50));

#[derive(Subcommand)]
pub enum SoftRoceCommand {
    /// Make an RDMA device in software (needs root); does nothing where it exists
    Up(UpArgs),
    /// Remove what `up` made
    Down,
    /// Show the RDMA devices in software; exit code 0: one is usable
    Status(StatusArgs),
}

#[derive(Args)]
pub struct UpArgs {
    /// Make it of this interface, instead of a new one (antelog0) that only this machine can reach
    #[arg(long, value_name = "NAME", conflicts_with = "address")]
    netdev: Option<String>,
    /// Address of the new interface
    #[arg(long, value_name = "IP/BITS", default_value = "10.77.0.1/24")]
    address: String,
}

#[derive(Args)]
pub struct StatusArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `soft-roce`.
pub fn command(command: &SoftRoceCommand) -> Outcome {
    match command {
        SoftRoceCommand::Up(args) => up(args),
        SoftRoceCommand::Down => down(),
        SoftRoceCommand::Status(args) => status(args),
    }
}

fn up(args: &UpArgs) -> Outcome {
    let host = Host::this();
    check_address(&args.address)?;
    if let Some(name) = &args.netdev {
        check_interface(&host, name)?;
    }
    require_root(&host, "up")?;
    load_module(&host)?;
    let interface = args.netdev.as_deref().unwrap_or(INTERFACE);
    let found = devices(&host);
    let other = found.iter().find(|d| d.name == DEVICE && !interfaces(d).contains(&interface));
    if let Some(device) = other {
        let on = interfaces(device).join(", ");
        return Err(Stop::Failed(format!("{DEVICE} is on {on} already: sudo antelog soft-roce down, then up again")));
    }
    if args.netdev.is_none() {
        make_interface(&host, &args.address)?;
    }
    let device = match found.iter().find(|d| interfaces(d).contains(&interface)) {
        Some(device) => device.name.clone(),
        None => {
            make_device(&host, interface)?;
            DEVICE.to_owned()
        }
    };
    let (looks, pause) = LOOKS;
    for _ in 0..looks {
        if devices(&host).iter().any(|d| d.name == device && is_usable(d)) {
            break;
        }
        std::thread::sleep(pause);
    }
    let Some(info) = devices(&host).into_iter().find(|d| d.name == device) else {
        return Err(Stop::Failed(format!("{device} was made, and has gone again: see dmesg")));
    };
    if !is_usable(&info) {
        return Err(Stop::Failed(format!(
            "{}; give {interface} an IP address (ip addr add) and set it up (ip link set {interface} up)",
            described(&info)
        )));
    }
    output::print(&described(&info))?;
    output::print("Try: antelog demo --transport rdma")
}

fn down() -> Outcome {
    let host = Host::this();
    let has_device = devices(&host).iter().any(|d| d.name == DEVICE);
    let has_interface = host.has(&format!("sys/class/net/{INTERFACE}"));
    if !has_device && !has_interface {
        return output::print("nothing to remove");
    }
    require_root(&host, "down")?;
    if has_device {
        run("rdma", &["link", "delete", DEVICE]).map_err(|text| with_package(&host, text))?;
        output::print(&format!("removed the device {DEVICE}"))?;
    }
    if has_interface {
        run("ip", &["link", "delete", INTERFACE]).map_err(|text| with_package(&host, text))?;
        output::print(&format!("removed the interface {INTERFACE}"))?;
    }
    Ok(())
}

fn status(args: &StatusArgs) -> Outcome {
    let host = Host::this();
    let devices = devices(&host);
    let usable = devices.iter().any(is_usable);
    let module = match host.soft_roce_module() {
        Module::Loaded => "loaded",
        Module::Installed => "not loaded",
        Module::Missing => "missing",
    };
    if args.json {
        let devices: Vec<Value> = devices.iter().map(as_json).collect();
        output::print(&json!({ "usable": usable, "module": module, "devices": devices }).to_string())?;
    } else if devices.is_empty() {
        let hint = match host.soft_roce_module() {
            Module::Missing => format!("the kernel {} lacks it: {}", host.release(), host.soft_roce_package()),
            _ => "sudo antelog soft-roce up".to_owned(),
        };
        output::print(&format!("no RDMA device in software; rdma_rxe is {module} ({hint})"))?;
    } else {
        for device in &devices {
            output::print(&described(device))?;
        }
    }
    if usable { Ok(()) } else { Err(Stop::Told) }
}

/// The devices in software.
fn devices(host: &Host) -> Vec<DeviceInfo> {
    let mut devices = Discovery::read(&host.path("sys")).devices;
    devices.retain(|d| d.driver.as_deref() == Some("rxe"));
    devices
}

/// What a device is made of.
fn interfaces(device: &DeviceInfo) -> Vec<&str> {
    let mut names: Vec<&str> = device.ports.iter().flat_map(|p| &p.gids).filter_map(|g| g.netdev.as_deref()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// It has an address that is valid beyond one link.
fn is_usable(device: &DeviceInfo) -> bool {
    device.ports.iter().any(|p| p.state == PortState::Active && p.gids.iter().any(|g| !g.is_link_local()))
}

/// One line about a device.
fn described(device: &DeviceInfo) -> String {
    let ports = device.ports.iter().map(|port| {
        let gids: Vec<String> = port.gids.iter().map(|g| format!("GID {} {g}", g.index)).collect();
        let gids = if gids.is_empty() { "no GID".to_owned() } else { gids.join(", ") };
        format!("port {} {}: {gids}", port.number, port.state)
    });
    let ports = ports.collect::<Vec<_>>().join("; ");
    format!("{} on {}: {ports}", device.name, interfaces(device).join(", "))
}

fn as_json(device: &DeviceInfo) -> Value {
    let port = |p: &PortInfo| {
        let gids: Vec<Value> = p
            .gids
            .iter()
            .map(|g| {
                json!({ "index": g.index, "kind": g.kind.to_string(), "netdev": g.netdev,
                    "address": g.ip().map(|ip| ip.to_string()) })
            })
            .collect();
        json!({ "number": p.number, "state": p.state.to_string(), "gids": gids })
    };
    json!({
        "name": device.name,
        "usable": is_usable(device),
        "made_by_antelog": device.name == DEVICE,
        "ports": device.ports.iter().map(port).collect::<Vec<_>>(),
    })
}

fn check_address(text: &str) -> Outcome {
    let parsed = text.split_once('/').and_then(|(ip, bits)| {
        let ip: IpAddr = ip.parse().ok()?;
        let bits: u8 = bits.parse().ok()?;
        (bits <= if ip.is_ipv4() { 32 } else { 128 }).then_some(())
    });
    parsed.ok_or_else(|| Stop::Failed(format!("--address {text:?}: expected IP/BITS, like 10.77.0.1/24")))
}

fn check_interface(host: &Host, name: &str) -> Outcome {
    let folder = format!("sys/class/net/{name}");
    if name.is_empty() || name.contains('/') || !host.has(&folder) {
        return Err(Stop::Failed(format!("--netdev {name:?}: there is no such interface (ip link lists them)")));
    }
    if host.text(&format!("{folder}/uevent")).is_some_and(|t| t.lines().any(|l| l == "DEVTYPE=vlan")) {
        return Err(Stop::Failed(format!(
            "--netdev {name}: rxe takes no VLAN interface; name the one below it, and use the VLAN's GID"
        )));
    }
    // ARPHRD_LOOPBACK
    if host.text(&format!("{folder}/type")).as_deref() == Some("772") {
        return Err(Stop::Failed(format!(
            "--netdev {name}: connections over a loopback interface hang; leave --netdev out to get one that works"
        )));
    }
    Ok(())
}

fn require_root(host: &Host, command: &str) -> Outcome {
    match host.may(Capability::NetAdmin) {
        true => Ok(()),
        false => Err(Stop::Failed(format!("needs root: sudo antelog soft-roce {command}"))),
    }
}

fn load_module(host: &Host) -> Outcome {
    if host.soft_roce_module() == Module::Loaded {
        return Ok(());
    }
    run("modprobe", &["rdma_rxe"]).map(drop).map_err(|text| match host.soft_roce_module() {
        Module::Installed => Stop::Failed(with_package(host, text)),
        _ => Stop::Failed(format!("the kernel {} has no rdma_rxe: {}", host.release(), host.soft_roce_package())),
    })
}

/// Makes the interface and gives it its address, each unless it is so already.
fn make_interface(host: &Host, address: &str) -> Outcome {
    let ip = |args: &[&str]| run("ip", args).map(drop).map_err(|text| Stop::Failed(with_package(host, text)));
    if !host.has(&format!("sys/class/net/{INTERFACE}")) {
        ip(&["link", "add", INTERFACE, "type", "dummy"])?;
    }
    ip(&["link", "set", INTERFACE, "mtu", MTU, "up"])?;
    ip(&["addr", "replace", address, "dev", INTERFACE])
}

fn make_device(host: &Host, interface: &str) -> Outcome {
    let Err(text) = run("rdma", &["link", "add", DEVICE, "type", "rxe", "netdev", interface]) else { return Ok(()) };
    // Somebody else has just made one.
    if text.contains("File exists") {
        return Ok(());
    }
    if interface == INTERFACE {
        // Nothing half made stays behind.
        let _ = run("ip", &["link", "delete", INTERFACE]);
    }
    Err(Stop::Failed(refused(host, interface, text)))
}

/// What the refusal of `rdma link add` means.
fn refused(host: &Host, interface: &str, text: String) -> String {
    if text.contains("not permitted") {
        return format!("{text}: rxe takes neither VLANs nor interfaces of another network namespace ({interface})");
    }
    if ["nknown", "not recognized", "Usage"].iter().any(|said| text.contains(said)) {
        return format!("{text}: iproute2 before 5.2 cannot add devices; {}", iproute(host));
    }
    with_package(host, text)
}

/// The text, with what to install if it says that a program is missing.
fn with_package(host: &Host, text: String) -> String {
    match text.split_once(" is missing") {
        Some(("modprobe", _)) => format!("{text}: {}", host.distribution().install("kmod", "kmod", "kmod", "kmod")),
        Some(_) => format!("{text}: {}", iproute(host)),
        None => text,
    }
}

fn iproute(host: &Host) -> String {
    host.distribution().install("iproute2", "iproute", "iproute2", "iproute2")
}
