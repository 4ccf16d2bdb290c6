//! Checks of what both transports need, and of what costs speed.

use antelog_core::config::ClusterConfig;

use super::super::host::Host;
use super::parse;
use super::{Finding, Need, Tried};

/// Bytes of a replica's log region unless configured otherwise.
pub fn region_bytes() -> u64 {
    ClusterConfig::default().region_bytes as u64
}

/// Bytes as people read them.
pub fn readable(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 => format!("{:.1} GiB", b as f64 / (1u64 << 30) as f64),
        b if b >= 1 << 20 => format!("{} MiB", b >> 20),
        b => format!("{} KiB", b >> 10),
    }
}

/// All of them.
pub fn findings(host: &Host, tried: &Tried) -> Vec<Finding> {
    vec![io_uring(host, tried), memory(host), huge_pages(host), cores(host), governor(host), clock(host)]
}

fn io_uring(host: &Host, tried: &Tried) -> Finding {
    let Err(text) = &tried.io_uring else { return Finding::ok("io_uring", "usable: TCP works") };
    let mend = match host.text("proc/sys/kernel/io_uring_disabled").as_deref() {
        None | Some("0") => "run Linux 6.1 or later; in a container, allow io_uring in its seccomp profile",
        _ => "sudo sysctl -w kernel.io_uring_disabled=0",
    };
    Finding::fail(Need::All, "io_uring", text, mend)
}

fn memory(host: &Host) -> Finding {
    let needed = region_bytes();
    let available = host.text("proc/meminfo").and_then(|t| parse::meminfo(&t, "MemAvailable")).map(|kb| kb << 10);
    match available {
        None => Finding::warn("memory", "unknown: /proc/meminfo does not tell", "cat /proc/meminfo"),
        Some(bytes) if bytes < needed => Finding::warn(
            "memory",
            format!("{} available, and a replica's log region takes {}", readable(bytes), readable(needed)),
            "lower cluster.region_bytes in cluster.toml",
        ),
        Some(bytes) => {
            Finding::ok("memory", format!("{} available; a replica's log takes {}", readable(bytes), readable(needed)))
        }
    }
}

fn huge_pages(host: &Host) -> Finding {
    let text = host.text("proc/meminfo").unwrap_or_default();
    let value = |key| parse::meminfo(&text, key).unwrap_or(0);
    let reserved = value("HugePages_Free") * (value("Hugepagesize") << 10);
    if reserved >= region_bytes() {
        return Finding::ok("huge pages", format!("{} reserved", readable(reserved)));
    }
    let setting = host.text("sys/kernel/mm/transparent_hugepage/enabled");
    match setting.as_deref().and_then(parse::chosen) {
        Some(choice @ ("always" | "madvise")) => Finding::ok("huge pages", format!("transparent ones ({choice})")),
        _ => Finding::warn(
            "huge pages",
            "neither reserved nor transparent: more TLB misses, and more work to register memory",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        ),
    }
}

fn cores(host: &Host) -> Finding {
    match host.text("sys/devices/system/cpu/online").map_or(0, |list| parse::count(&list)) {
        0 => Finding::warn("cores", "unknown: sysfs does not tell", "nproc"),
        // A data thread that spins, a gate's threads beside it, and somebody has to do the rest.
        few @ 1..=3 => Finding::warn(
            "cores",
            format!("{few}: nodes and clients whose threads spin share them, which costs latency"),
            "one node for each machine, or idle = \"park\" in [launch] of cluster.toml",
        ),
        many => Finding::ok("cores", format!("{many}; each thread that spins takes one")),
    }
}

fn governor(host: &Host) -> Finding {
    match host.text("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").as_deref() {
        None => Finding::ok("frequency", "not scaled by this kernel"),
        Some("performance") => Finding::ok("frequency", "governor performance"),
        Some(other) => Finding::warn(
            "frequency",
            format!("governor {other}: the first microseconds after a pause are slow"),
            "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
        ),
    }
}

fn clock(host: &Host) -> Finding {
    match host.text("sys/devices/system/clocksource/clocksource0/current_clocksource").as_deref() {
        None => Finding::ok("clock", "source unknown"),
        Some(slow @ ("hpet" | "acpi_pm" | "jiffies" | "refined-jiffies")) => Finding::warn(
            "clock",
            format!("source {slow}: reading the time takes a microsecond or is coarse"),
            "dmesg | grep -i tsc says why; if the TSC is sound, boot with the kernel argument tsc=reliable",
        ),
        Some(source) => Finding::ok("clock", format!("source {source}")),
    }
}
