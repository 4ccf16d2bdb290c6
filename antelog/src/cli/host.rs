//! The machine below a command: its distribution, its kernel, what this process may do, and programs that change it.
//!
//! All that is read comes from files below a root, so that tests can describe machines they do not run on.

use std::path::{Path, PathBuf};
use std::process::Command;

/// What only root may do, as bits of /proc/self/status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    /// Change interfaces.
    NetAdmin = 12,
    /// Lock memory beyond the limit.
    IpcLock = 14,
}

/// Whose packages a machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distribution {
    Debian,
    Ubuntu,
    /// Fedora, RHEL and their like.
    Fedora,
    Suse,
    Arch,
    Other,
}

impl Distribution {
    /// By the text of /etc/os-release: its own name first, then what it says it is like.
    pub fn of(os_release: &str) -> Distribution {
        let value = |key: &str| {
            let line = os_release.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix('='));
            line.unwrap_or_default().trim_matches(['"', '\'']).to_owned()
        };
        let names = format!("{} {}", value("ID"), value("ID_LIKE"));
        let known = names.split_whitespace().find_map(|name| match name {
            "ubuntu" => Some(Distribution::Ubuntu),
            "debian" => Some(Distribution::Debian),
            "fedora" | "rhel" | "centos" => Some(Distribution::Fedora),
            "suse" | "opensuse" | "sles" => Some(Distribution::Suse),
            "arch" => Some(Distribution::Arch),
            _ => None,
        });
        known.unwrap_or(Distribution::Other)
    }

    /// The command that installs packages, by their names on Debian, Fedora, SUSE and Arch.
    pub fn install(self, debian: &str, fedora: &str, suse: &str, arch: &str) -> String {
        match self {
            Distribution::Debian | Distribution::Ubuntu => format!("sudo apt-get install {debian}"),
            Distribution::Fedora => format!("sudo dnf install {fedora}"),
            Distribution::Suse => format!("sudo zypper install {suse}"),
            Distribution::Arch => format!("sudo pacman -S {arch}"),
            Distribution::Other => format!("install {fedora} (Debian: {debian})"),
        }
    }
}

/// A machine as its files describe it.
pub struct Host {
    root: PathBuf,
}

impl Host {
    /// The machine whose files are below `root`: `/`, except in tests.
    pub fn new(root: &Path) -> Host {
        Host { root: root.to_owned() }
    }

    /// The machine this runs on.
    pub fn this() -> Host {
        Host::new(Path::new("/"))
    }

    /// A path below the root.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// A file's text without blanks around it; `None` when there is none to be read.
    pub fn text(&self, path: &str) -> Option<String> {
        let text = std::fs::read(self.path(path)).ok()?;
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// Something is there.
    pub fn has(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// The kernel's release, as `uname -r` prints it.
    pub fn release(&self) -> String {
        self.text("proc/sys/kernel/osrelease").unwrap_or_else(|| "of unknown release".to_owned())
    }

    /// The distribution.
    pub fn distribution(&self) -> Distribution {
        Distribution::of(&self.text("etc/os-release").unwrap_or_default())
    }

    /// This process may do that.
    pub fn may(&self, capability: Capability) -> bool {
        self.text("proc/self/status").is_some_and(|status| has_capability(&status, capability))
    }

    /// Where rdma_rxe, which makes soft-RoCE devices, is.
    pub fn soft_roce_module(&self) -> Module {
        let folder = format!("lib/modules/{}", self.release());
        let lists = |list: &str| {
            self.text(&format!("{folder}/{list}")).is_some_and(|t| t.lines().any(|l| l.contains("/rdma_rxe.ko")))
        };
        if self.has("sys/module/rdma_rxe") || lists("modules.builtin") {
            Module::Loaded
        } else if lists("modules.dep") {
            Module::Installed
        } else {
            Module::Missing
        }
    }

    /// What mends the lack of rdma_rxe.
    pub fn soft_roce_package(&self) -> String {
        let release = self.release();
        let image = if std::env::consts::ARCH == "aarch64" { "linux-image-arm64" } else { "linux-image-amd64" };
        let boot = |why: &str| format!("sudo apt-get install {image}, and boot it: {why}");
        match self.distribution() {
            Distribution::Ubuntu => format!("sudo apt-get install linux-modules-extra-{release}"),
            Distribution::Debian if release.contains("-cloud-") => boot("the -cloud- kernels have no RDMA"),
            Distribution::Debian => boot("the running kernel is not Debian's, or this is a container"),
            Distribution::Fedora => format!("sudo dnf install kernel-modules-extra-{release}"),
            Distribution::Suse => "sudo zypper install kernel-default, and boot it".to_owned(),
            Distribution::Arch => "sudo pacman -S linux, and boot it".to_owned(),
            Distribution::Other => {
                "install the distribution's extra kernel modules, or a kernel with rdma_rxe".to_owned()
            }
        }
    }
}

/// Where a kernel module is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Module {
    /// In the running kernel.
    Loaded,
    /// Can be loaded.
    Installed,
    /// The running kernel has none.
    Missing,
}

/// Whether the text of /proc/self/status grants it.
fn has_capability(status: &str, capability: Capability) -> bool {
    let line = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let bits = line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    bits & (1 << capability as u64) != 0
}

/// Runs a program that an administrator has, and returns what it printed.
///
/// # Errors
/// One line: it is missing, or what it said.
pub fn run(program: &str, args: &[&str]) -> Result<String, String> {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new(program).args(args).env("PATH", path).env("LC_ALL", "C").output();
    let output = output.map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => format!("{program} is missing"),
        _ => format!("cannot run {program}: {e}"),
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.lines().map(str::trim).find(|l| !l.is_empty()).unwrap_or("it failed and said nothing").to_owned();
    Err(format!("{program} {}: {said}", args.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_are_told_by_name_and_by_likeness() {
        let of = Distribution::of;
        assert_eq!(of("PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nID=debian\n"), Distribution::Debian);
        assert_eq!(of("ID=ubuntu\nID_LIKE=debian\n"), Distribution::Ubuntu);
        assert_eq!(of("ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n"), Distribution::Ubuntu);
        assert_eq!(of("ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n"), Distribution::Fedora);
        assert_eq!(of("ID=\"opensuse-leap\"\nID_LIKE=\"suse opensuse\"\n"), Distribution::Suse);
        assert_eq!(of("ID=void\n"), Distribution::Other);
        assert_eq!(of(""), Distribution::Other);
    }

    #[test]
    fn capabilities_are_read_from_the_effective_set() {
        let root = "Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t000001ffffffffff\n";
        assert!(has_capability(root, Capability::NetAdmin) && has_capability(root, Capability::IpcLock));
        // Bit 12 alone.
        let admin = "CapEff:\t0000000000001000\n";
        assert!(has_capability(admin, Capability::NetAdmin) && !has_capability(admin, Capability::IpcLock));
        assert!(!has_capability("", Capability::NetAdmin));
    }
}
