//! What is found in sysfs and what is chosen of it, on trees of files as kernels write them.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use antelog_net_rdma::discover::{Choice, Discovery, GidKind, LinkLayer, Override, PortState, Wish, choose};

/// A tree below the temporary folder, gone with the value.
struct Sysfs(PathBuf);

impl Sysfs {
    fn new() -> Sysfs {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("antelog-sysfs-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&root).unwrap();
        Sysfs(root)
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, format!("{text}\n")).unwrap();
    }

    /// A device that programs can open as `uverbs`, without ports.
    fn device(&self, name: &str, uverbs: &str) {
        self.file(&format!("class/infiniband/{name}/node_type"), "1: CA");
        self.file(&format!("class/infiniband/{name}/node_guid"), "345a:61ff:fe35:8638");
        self.file(&format!("class/infiniband_verbs/{uverbs}/ibdev"), name);
        self.file("class/infiniband_verbs/abi_version", "6");
    }

    fn port(&self, device: &str, number: u8, state: &str, link_layer: &str) {
        let port = format!("class/infiniband/{device}/ports/{number}");
        self.file(&format!("{port}/state"), state);
        self.file(&format!("{port}/link_layer"), link_layer);
        self.file(&format!("{port}/rate"), "100 Gb/sec (4X EDR)");
        self.file(&format!("{port}/lid"), if link_layer == "InfiniBand" { "0x1a" } else { "0x0" });
        // The kernel shows places without an address, whose attributes cannot be read.
        self.file(&format!("{port}/gids/9"), "0000:0000:0000:0000:0000:0000:0000:0000");
    }

    fn gid(&self, device: &str, port: u8, index: u8, gid: &str, kind: &str, netdev: &str) {
        let port = format!("class/infiniband/{device}/ports/{port}");
        self.file(&format!("{port}/gids/{index}"), gid);
        self.file(&format!("{port}/gid_attrs/types/{index}"), kind);
        self.file(&format!("{port}/gid_attrs/ndevs/{index}"), netdev);
    }

    fn read(&self) -> Discovery {
        Discovery::read(&self.0)
    }
}

impl Drop for Sysfs {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const LINK_LOCAL: &str = "fe80:0000:0000:0000:345a:61ff:fe35:8638";
const GLOBAL: &str = "2001:0db8:0000:0000:0000:0000:0000:0001";
const MAPPED_77: &str = "0000:0000:0000:0000:0000:ffff:0a4d:0001";
const MAPPED_192: &str = "0000:0000:0000:0000:0000:ffff:c0a8:0105";

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn choice(device: &str, port: u8, gid_index: u8, why: &str) -> Result<Choice, String> {
    Ok(Choice { device: device.to_owned(), port, gid_index, why: why.to_owned() })
}

fn error(text: &str) -> Result<Choice, String> {
    Err(text.to_owned())
}

fn auto(found: &Discovery, address: &str) -> Result<Choice, String> {
    choose(found, Wish::Auto, &Override::default(), &[ip(address)])
}

fn rdma(found: &Discovery, address: &str) -> Result<Choice, String> {
    choose(found, Wish::Rdma, &Override::default(), &[ip(address)])
}

fn prescribed(found: &Discovery, wanted: &str, address: &str) -> Result<Choice, String> {
    choose(found, Wish::Auto, &wanted.parse().unwrap(), &[ip(address)])
}

/// Soft-RoCE on a dummy interface.
fn one_rxe() -> Sysfs {
    let sysfs = Sysfs::new();
    sysfs.device("rxe0", "uverbs0");
    sysfs.file("class/infiniband/rxe0/parent", "dummy0");
    sysfs.file("class/infiniband/rxe0/fw_ver", "");
    sysfs.port("rxe0", 1, "4: ACTIVE", "Ethernet");
    sysfs.gid("rxe0", 1, 0, LINK_LOCAL, "RoCE v2", "dummy0");
    sysfs.gid("rxe0", 1, 1, MAPPED_77, "RoCE v2", "dummy0");
    sysfs
}

/// A card with two devices, of which the first has no link; each address once per RoCE version, as mlx5 has it.
fn mlx5_pair() -> Sysfs {
    let sysfs = Sysfs::new();
    for (name, uverbs, state, mapped) in
        [("mlx5_0", "uverbs0", "1: DOWN", MAPPED_77), ("mlx5_1", "uverbs1", "4: ACTIVE", MAPPED_192)]
    {
        sysfs.device(name, uverbs);
        sysfs.file(&format!("class/infiniband/{name}/fw_ver"), "16.35.2000");
        sysfs.file(&format!("class/infiniband/{name}/device/numa_node"), "1");
        let driver = sysfs.0.join(format!("class/infiniband/{name}/device/driver"));
        std::os::unix::fs::symlink("../../../../bus/pci/drivers/mlx5_core", driver).unwrap();
        sysfs.port(name, 1, state, "Ethernet");
        let netdev = if name == "mlx5_0" { "eth0" } else { "eth1" };
        for (index, gid) in [LINK_LOCAL, GLOBAL, mapped].into_iter().enumerate() {
            sysfs.gid(name, 1, 2 * index as u8, gid, "IB/RoCE v1", netdev);
            sysfs.gid(name, 1, 2 * index as u8 + 1, gid, "RoCE v2", netdev);
        }
    }
    sysfs
}

fn infiniband() -> Sysfs {
    let sysfs = Sysfs::new();
    sysfs.device("mlx4_0", "uverbs0");
    sysfs.port("mlx4_0", 1, "2: INIT", "InfiniBand");
    sysfs.port("mlx4_0", 2, "4: ACTIVE", "InfiniBand");
    for port in [1, 2] {
        sysfs.gid("mlx4_0", port, 0, "fe80:0000:0000:0000:0002:c903:00e8:acb1", "IB/RoCE v1", "");
    }
    sysfs
}

#[test]
fn soft_roce_is_read_whole() {
    let found = one_rxe().read();
    let device = found.device("rxe0").unwrap();
    assert_eq!(found.devices.len(), 1);
    assert_eq!(device.driver.as_deref(), Some("rxe"));
    assert_eq!(device.uverbs.as_deref(), Some("uverbs0"));
    assert_eq!(device.node_guid.as_deref(), Some("345a:61ff:fe35:8638"));
    assert_eq!((device.numa_node, device.firmware.as_deref(), device.is_iwarp), (None, None, false));
    let [port] = &device.ports[..] else { panic!("one port") };
    assert_eq!((port.number, port.lid, &port.state, port.link_layer), (1, 0, &PortState::Active, LinkLayer::Ethernet));
    assert_eq!(port.rate, "100 Gb/sec (4X EDR)");
    let gids: Vec<_> = port.gids.iter().map(|g| (g.index, g.kind, g.ip().unwrap(), g.netdev.as_deref())).collect();
    assert_eq!(
        gids,
        [
            (0, GidKind::RoceV2, ip("fe80::345a:61ff:fe35:8638"), Some("dummy0")),
            (1, GidKind::RoceV2, ip("10.77.0.1"), Some("dummy0")),
        ]
    );
}

#[test]
fn the_devices_of_a_card_are_read_with_driver_and_node() {
    let found = mlx5_pair().read();
    let device = found.device("mlx5_1").unwrap();
    assert_eq!(device.driver.as_deref(), Some("mlx5_core"));
    assert_eq!((device.numa_node, device.firmware.as_deref()), (Some(1), Some("16.35.2000")));
    assert_eq!(device.uverbs.as_deref(), Some("uverbs1"));
    assert_eq!(found.device("mlx5_0").unwrap().ports[0].state, PortState::Down);
    let kinds: Vec<_> = device.ports[0].gids.iter().map(|g| (g.index, g.kind)).collect();
    let (v1, v2) = (GidKind::RoceV1, GidKind::RoceV2);
    assert_eq!(kinds, [(0, v1), (1, v2), (2, v1), (3, v2), (4, v1), (5, v2)]);
}

#[test]
fn infiniband_is_read_with_its_local_identifier() {
    let found = infiniband().read();
    let [first, second] = &found.devices[0].ports[..] else { panic!("two ports") };
    assert_eq!((&first.state, &second.state), (&PortState::Init, &PortState::Active));
    assert_eq!((second.lid, second.link_layer), (0x1a, LinkLayer::InfiniBand));
    assert_eq!((second.gids[0].kind, second.gids[0].ip()), (GidKind::InfiniBand, None));
}

#[test]
fn a_machine_without_devices_says_so() {
    let found = Sysfs::new().read();
    assert_eq!(found, Discovery::default());
    assert_eq!(auto(&found, "10.77.0.1"), error("this machine has no RDMA device"));
    assert_eq!(rdma(&found, "10.77.0.1"), error("this machine has no RDMA device"));
    let asked = prescribed(&found, "mlx5_0:1", "10.77.0.1");
    assert_eq!(asked, error("this machine has no RDMA device; mlx5_0:1 was asked for"));
}

#[test]
fn the_device_with_the_nodes_address_is_taken() {
    let found = one_rxe().read();
    let own = choice("rxe0", 1, 1, "rxe0 port 1 GID 1 (RoCE v2 10.77.0.1) has the node's address");
    assert_eq!(auto(&found, "10.77.0.1"), own);
    assert_eq!(auto(&found, "::ffff:10.77.0.1"), own);
    assert_eq!(auto(&found, "0.0.0.0"), own);
    assert_eq!(auto(&found, "::"), own);
    assert_eq!(rdma(&found, "10.77.0.1"), own);
    assert_eq!(choose(&found, Wish::Auto, &Override::default(), &[ip("127.0.0.1"), ip("10.77.0.1")]), own);
    let local = auto(&found, "fe80::345a:61ff:fe35:8638").unwrap();
    assert_eq!(local.gid_index, 0);
}

#[test]
fn without_the_nodes_address_auto_declines_and_rdma_takes_the_first() {
    let found = one_rxe().read();
    assert_eq!(
        auto(&found, "10.0.0.1"),
        error(
            "no RDMA device has the address 10.0.0.1 (--transport rdma takes another); rxe0 port 1 has 10.77.0.1 (GID 1)"
        )
    );
    assert_eq!(
        rdma(&found, "127.0.0.1"),
        choice(
            "rxe0",
            1,
            1,
            "rxe0 port 1 GID 1 (RoCE v2 10.77.0.1) is the first usable one; no device has the address 127.0.0.1"
        )
    );
    let tcp = choose(&found, Wish::Tcp, &Override::default(), &[ip("10.77.0.1")]);
    assert_eq!(tcp, error("TCP was asked for (--transport tcp)"));
}

#[test]
fn a_port_without_link_is_not_taken() {
    let found = mlx5_pair().read();
    let own = choice("mlx5_1", 1, 5, "mlx5_1 port 1 GID 5 (RoCE v2 192.168.1.5) has the node's address");
    assert_eq!(auto(&found, "192.168.1.5"), own);
    // The address is on the port that is down.
    assert_eq!(
        auto(&found, "10.77.0.1"),
        error(
            "no RDMA device has the address 10.77.0.1 (--transport rdma takes another); \
             mlx5_1 port 1 has 2001:db8::1 (GID 3); \
             mlx5_1 port 1 has 192.168.1.5 (GID 5); mlx5_0 port 1: it is DOWN"
        )
    );
    // IPv4 before IPv6, and both before what is valid on one link.
    let first = rdma(&found, "10.77.0.1").unwrap();
    assert_eq!((first.device.as_str(), first.port, first.gid_index), ("mlx5_1", 1, 5));
    assert_eq!(auto(&found, "0.0.0.0").unwrap().gid_index, 5);
    assert_eq!(auto(&found, "2001:db8::1").unwrap().gid_index, 3);
}

#[test]
fn an_active_infiniband_port_fits_any_address() {
    let found = infiniband().read();
    let active =
        choice("mlx4_0", 2, 0, "mlx4_0 port 2 GID 0 (InfiniBand fe80::2:c903:e8:acb1) is an active InfiniBand port");
    assert_eq!(auto(&found, "10.0.0.1"), active);
    assert_eq!(rdma(&found, "10.0.0.1"), active);
    assert_eq!(
        prescribed(&found, "mlx4_0:1", "10.0.0.1"),
        error("RDMA device mlx4_0:1: mlx4_0 port 1: it is INIT (no subnet manager: start opensm)")
    );
}

#[test]
fn a_link_local_address_is_taken_only_when_asked_for() {
    let sysfs = Sysfs::new();
    sysfs.device("rxe0", "uverbs0");
    sysfs.port("rxe0", 1, "4: ACTIVE", "Ethernet");
    sysfs.gid("rxe0", 1, 0, LINK_LOCAL, "RoCE v2", "eth0");
    let found = sysfs.read();
    let refused =
        error("no RDMA device is usable: rxe0 port 1: it has only a link-local GID (give its interface an IP address)");
    assert_eq!(auto(&found, "0.0.0.0"), refused);
    assert_eq!(rdma(&found, "10.0.0.1"), refused);
    let asked = choice("rxe0", 1, 0, "rxe0 port 1 GID 0 (RoCE v2 fe80::345a:61ff:fe35:8638) was asked for");
    assert_eq!(prescribed(&found, "rxe0", "10.0.0.1"), asked);
    assert_eq!(prescribed(&found, "rxe0:1:0", "10.0.0.1"), asked);
}

#[test]
fn roce_v1_is_never_taken() {
    let sysfs = Sysfs::new();
    sysfs.device("mlx4_0", "uverbs0");
    sysfs.port("mlx4_0", 1, "4: ACTIVE", "Ethernet");
    sysfs.gid("mlx4_0", 1, 0, MAPPED_77, "IB/RoCE v1", "eth0");
    let found = sysfs.read();
    let reason = "mlx4_0 port 1: it has only RoCE v1 GIDs, and only RoCE v2 is used";
    assert_eq!(auto(&found, "10.77.0.1"), error(&format!("no RDMA device is usable: {reason}")));
    assert_eq!(rdma(&found, "10.77.0.1"), error(&format!("no RDMA device is usable: {reason}")));
    assert_eq!(prescribed(&found, "mlx4_0", "10.77.0.1"), error(&format!("RDMA device mlx4_0: {reason}")));
    assert_eq!(
        prescribed(&found, "mlx4_0:1:0", "10.77.0.1"),
        error("RDMA device mlx4_0:1:0: mlx4_0 port 1: GID 0: it is RoCE v1, and only RoCE v2 is used")
    );
}

#[test]
fn devices_that_cannot_be_used_are_named_with_the_reason() {
    let sysfs = one_rxe();
    std::fs::remove_dir_all(sysfs.0.join("class/infiniband_verbs")).unwrap();
    sysfs.file("class/infiniband/siw0/node_type", "4: RNIC");
    sysfs.port("siw0", 1, "4: ACTIVE", "Ethernet");
    sysfs.gid("siw0", 1, 0, "0252:5400:7700:0000:0000:0000:0000:0000", "IB/RoCE v1", "eth0");
    sysfs.device("bare0", "uverbs7");
    assert_eq!(sysfs.read().device("siw0").unwrap().driver.as_deref(), Some("siw"));
    assert_eq!(
        rdma(&sysfs.read(), "10.77.0.1"),
        error(
            "no RDMA device is usable: bare0: it has no port; \
             rxe0 port 1: programs cannot open it (modprobe ib_uverbs); \
             siw0 port 1: it speaks iWARP, and only RoCE v2 and InfiniBand are used"
        )
    );
}

#[test]
fn what_was_prescribed_is_followed_and_the_rest_chosen() {
    let found = mlx5_pair().read();
    let chosen =
        |wanted: &str, address: &str| prescribed(&found, wanted, address).map(|c| (c.device, c.port, c.gid_index));
    let on = |gid_index| Ok(("mlx5_1".to_owned(), 1, gid_index));
    assert_eq!(chosen("mlx5_1", "10.0.0.1"), on(5));
    assert_eq!(chosen("mlx5_1", "2001:db8::1"), on(3));
    assert_eq!(chosen("mlx5_1:1:1", "192.168.1.5"), on(1));
    let refused = |wanted: &str, text: &str| assert_eq!(chosen(wanted, "10.0.0.1"), Err(text.to_owned()));
    refused("mlx5_2", "RDMA device mlx5_2: there is no such device; there is mlx5_0, mlx5_1");
    refused("mlx5_0", "RDMA device mlx5_0: mlx5_0 port 1: it is DOWN");
    refused("mlx5_1:2", "RDMA device mlx5_1:2: mlx5_1 has no port 2; it has port 1");
    let found = one_rxe().read();
    assert_eq!(
        prescribed(&found, "rxe0:1:7", "10.77.0.1"),
        error(
            "RDMA device rxe0:1:7: rxe0 port 1 has no GID 7; \
             it has GID 0 (RoCE v2 fe80::345a:61ff:fe35:8638), GID 1 (RoCE v2 10.77.0.1)"
        )
    );
}

#[test]
fn wishes_and_prescriptions_are_read_and_written() {
    for text in ["auto", "rdma", "tcp"] {
        assert_eq!(text.parse::<Wish>().unwrap().to_string(), text);
    }
    assert_eq!("RDMA".parse::<Wish>(), Err("unknown transport 'RDMA', expected auto, rdma or tcp".to_owned()));
    for text in ["rxe0", "rxe0:1", "mlx5_bond_0:2:255"] {
        assert_eq!(text.parse::<Override>().unwrap().to_string(), text);
    }
    for text in ["", ":1", "rxe0:", "rxe0:0", "rxe0:1:256", "rxe0:1:2:3", "rxe0:x", "../x"] {
        let expected = format!("RDMA device {text:?}: expected DEVICE[:PORT[:GID]], like mlx5_0 or mlx5_0:1:3");
        assert_eq!(text.parse::<Override>(), Err(expected));
    }
}
