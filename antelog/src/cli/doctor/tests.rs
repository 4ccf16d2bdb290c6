//! What is found on machines that are written down here.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// A machine below the temporary folder, gone with the value.
struct Fake(PathBuf);

impl Fake {
    fn new() -> Fake {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("antelog-doctor-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&root).unwrap();
        Fake(root)
    }

    fn file(&self, path: &str, text: &str) -> &Fake {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
        self
    }

    /// Soft-RoCE on `eth0`, as root, with all there should be.
    fn good() -> Fake {
        let fake = Fake::new();
        let device = "sys/class/infiniband/rxe0";
        let port = format!("{device}/ports/1");
        fake.file("etc/os-release", "ID=debian\n")
            .file("etc/libibverbs.d/rxe.driver", "driver rxe\n")
            .file("dev/infiniband/uverbs0", "")
            .file("sys/module/rdma_rxe/refcnt", "0")
            .file("sys/class/infiniband_verbs/uverbs0/ibdev", "rxe0")
            .file(&format!("{device}/parent"), "eth0")
            .file(&format!("{port}/state"), "4: ACTIVE")
            .file(&format!("{port}/link_layer"), "Ethernet")
            .file(&format!("{port}/gids/1"), "0000:0000:0000:0000:0000:ffff:0a4d:0001")
            .file(&format!("{port}/gid_attrs/types/1"), "RoCE v2")
            .file(&format!("{port}/gid_attrs/ndevs/1"), "eth0")
            .file("sys/class/net/eth0/mtu", "4200")
            .file("proc/self/status", "CapEff:\t000001ffffffffff\n")
            .file("proc/meminfo", "MemAvailable: 16777216 kB\n")
            .file("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
            .file("sys/devices/system/cpu/online", "0-7")
            .file("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc");
        fake
    }

    fn examine(&self, tried: &Tried) -> Vec<Finding> {
        examine(&Host::new(&self.0), tried)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn tried() -> Tried {
    Tried { io_uring: Ok(()), roce_port: Err(ErrorKind::AddrInUse), rules: Some(String::new()), library: Ok(()) }
}

fn worse(findings: &[Finding]) -> Vec<String> {
    findings.iter().filter(|f| f.level != Level::Ok).map(|f| format!("{} {}", f.level.name(), f.check)).collect()
}

fn find<'a>(findings: &'a [Finding], check: &str) -> &'a Finding {
    findings.iter().find(|f| f.check == check).unwrap_or_else(|| panic!("no check {check}"))
}

#[test]
fn a_good_machine_has_nothing_to_mend() {
    let findings = Fake::good().examine(&tried());
    assert_eq!(worse(&findings), [""; 0]);
    assert_eq!(Verdict::of(&findings), Verdict::Rdma);
    assert_eq!(find(&findings, "RDMA device").lines(), "ok    RDMA device — rxe0 port 1 GID 1 is usable");
    assert_eq!(find(&findings, "rxe0 port 1").text, "ACTIVE, Ethernet, GID 1 RoCE v2 10.77.0.1");
    assert_eq!(find(&findings, "rxe0 MTU").text, "eth0 has 4200, which makes the path MTU 4096");
}

#[test]
fn a_machine_of_which_nothing_can_be_read_still_gets_an_answer() {
    let findings = Fake::new().examine(&Tried { library: Err("not there".to_owned()), ..tried() });
    assert_eq!(
        worse(&findings),
        [
            "warn memory",
            "warn huge pages",
            "warn cores",
            "fail libibverbs",
            "fail RDMA device",
            "warn soft-RoCE",
            "warn locked memory"
        ]
    );
    assert_eq!(Verdict::of(&findings), Verdict::TcpOnly);
    assert_eq!(find(&findings, "RDMA device").text, "this machine has no RDMA device");
}

#[test]
fn without_io_uring_nothing_works() {
    let fake = Fake::good();
    fake.file("proc/sys/kernel/io_uring_disabled", "2\n");
    let findings = fake.examine(&Tried { io_uring: Err("io_uring is forbidden here".to_owned()), ..tried() });
    assert_eq!(Verdict::of(&findings), Verdict::Broken);
    assert_eq!(
        find(&findings, "io_uring").lines(),
        "fail  io_uring — io_uring is forbidden here\n      → sudo sysctl -w kernel.io_uring_disabled=0"
    );
}

#[test]
fn each_lack_is_found_and_told_how_to_mend() {
    let mends = |fake: &Fake, tried: &Tried, check: &str, level: &str, mend: &str| {
        let findings = fake.examine(tried);
        assert_eq!(worse(&findings), [format!("{level} {check}")]);
        let found = find(&findings, check).mend.clone().unwrap_or_default();
        assert!(found.contains(mend), "{check}: {found}");
    };
    let fake = Fake::good();
    fake.file("sys/class/net/eth0/mtu", "1500");
    mends(&fake, &tried(), "rxe0 MTU", "warn", "sudo ip link set eth0 mtu 4200");

    let fake = Fake::good();
    fake.file("proc/self/status", "CapEff:\t0000000000000000\n");
    fake.file("proc/self/limits", "Max locked memory         8388608              8388608              bytes\n");
    mends(&fake, &tried(), "locked memory", "fail", "ulimit -l unlimited");

    let fake = Fake::good();
    let none = || Tried { library: Err("cannot load libibverbs.so.1".to_owned()), ..tried() };
    mends(&fake, &none(), "libibverbs", "fail", "sudo apt-get install ibverbs-providers libibverbs1");
    fake.file("etc/os-release", "ID=fedora\n");
    mends(&fake, &none(), "libibverbs", "fail", "sudo dnf install libibverbs");

    let fake = Fake::good();
    std::fs::rename(fake.0.join("etc/libibverbs.d/rxe.driver"), fake.0.join("etc/libibverbs.d/siw.driver")).unwrap();
    mends(&fake, &tried(), "rxe0 driver", "fail", "ibverbs-providers");

    let fake = Fake::good();
    std::fs::remove_file(fake.0.join("dev/infiniband/uverbs0")).unwrap();
    mends(&fake, &tried(), "rxe0 access", "fail", "--device=/dev/infiniband/uverbs0");

    let fake = Fake::good();
    let closed = "chain input {\ntype filter hook input priority 0; policy drop;\n".to_owned();
    mends(&fake, &Tried { rules: Some(closed), ..tried() }, "firewall", "warn", "udp dport 4791 accept");
    mends(&fake, &Tried { rules: None, ..tried() }, "firewall", "warn", "sudo nft list ruleset");

    fake.file("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave");
    mends(&fake, &tried(), "frequency", "warn", "echo performance");
}

#[test]
fn a_port_that_is_down_leaves_tcp() {
    let fake = Fake::good();
    fake.file("sys/class/infiniband/rxe0/ports/1/state", "1: DOWN");
    let findings = fake.examine(&tried());
    assert_eq!(worse(&findings), ["warn rxe0 port 1", "fail RDMA device"]);
    assert_eq!(find(&findings, "RDMA device").text, "no RDMA device is usable: rxe0 port 1: it is DOWN");
    assert_eq!(Verdict::of(&findings), Verdict::TcpOnly);
    assert_eq!((Verdict::Rdma.exit_code(), Verdict::TcpOnly.exit_code(), Verdict::Broken.exit_code()), (0, 3, 1));
}

#[test]
fn the_module_for_soft_roce_is_found_or_named_by_package() {
    let fake = Fake::new();
    let release = "6.8.0-40-generic";
    fake.file("proc/sys/kernel/osrelease", release).file("etc/os-release", "ID=ubuntu\nID_LIKE=debian\n");
    let soft = |fake: &Fake| find(&fake.examine(&tried()), "soft-RoCE").clone();
    assert_eq!(soft(&fake).mend.as_deref(), Some("sudo apt-get install linux-modules-extra-6.8.0-40-generic"));
    fake.file("etc/os-release", "ID=debian\n").file("proc/sys/kernel/osrelease", "6.1.0-57-cloud-amd64");
    assert!(soft(&fake).mend.unwrap().ends_with("and boot it: the -cloud- kernels have no RDMA"));
    fake.file("proc/sys/kernel/osrelease", release);
    let list = format!("lib/modules/{release}/modules.dep");
    fake.file(&list, "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.zst: kernel/x.ko\n");
    assert_eq!(soft(&fake).text, "rdma_rxe can be loaded: sudo antelog soft-roce up");
}
