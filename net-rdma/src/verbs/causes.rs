//! What mends a failure, by step and error number: the second half of an error's line.

use std::io;
use std::net::Ipv6Addr;

use super::Place;
use crate::provider::PortAddress;

/// "Invalid argument (errno 22)".
pub(super) fn errno_text(error: &io::Error) -> String {
    let text = error.to_string();
    match error.raw_os_error() {
        Some(errno) => format!("{} (errno {errno})", text.split(" (os error").next().unwrap_or_default()),
        None => text,
    }
}

/// A GID as people write it.
pub(super) fn gid_text(gid: &[u8; 16]) -> String {
    let address = Ipv6Addr::from(*gid);
    address.to_ipv4_mapped().map_or_else(|| address.to_string(), |v4| v4.to_string())
}

/// Where a port's address comes from, as a peer or a log wants it.
pub(super) fn port_text(port: &PortAddress) -> String {
    if port.is_infiniband { format!("LID {}, {}", port.lid, gid_text(&port.gid)) } else { gid_text(&port.gid) }
}

/// No list of devices, or an empty one.
pub(super) fn no_devices() -> &'static str {
    "load the adapter's driver (such as mlx5_ib), or make a software device with `rdma link add rxe0 type rxe netdev eth0`; \
     a container also needs /dev/infiniband"
}

/// A device that does not open.
pub(super) fn not_opened(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            "this user may not open /dev/infiniband/uverbs*: join the group that owns it, often rdma"
        }
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
            "/dev/infiniband/uverbs* is missing: load ib_uverbs, and pass it on to a container with --device"
        }
        _ => "see the kernel log",
    }
}

/// A completion queue that is refused.
pub(super) fn no_completion_queue(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EINVAL) => "ask for fewer completions".to_owned(),
        _ => no_room(error),
    }
}

/// A queue pair that is refused.
pub(super) fn no_queue_pair(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOMEM | libc::EAGAIN) => format!("the device has no more queue pairs, or {}", memory_limit()),
        Some(libc::EINVAL) => "the device takes fewer outstanding requests".to_owned(),
        other => gone_or(other, "see the kernel log"),
    }
}

/// INIT is refused.
pub(super) fn no_init(error: &io::Error) -> String {
    gone_or(error.raw_os_error(), "the port does not exist or cannot carry reliable connections")
}

/// RTR is refused: the step that finds the way to the peer.
pub(super) fn no_route(error: &io::Error, place: &Place, port: &PortAddress, peer: &PortAddress) -> String {
    let Place { device, port: number, gid_index } = place;
    let is_v4 = |gid: &[u8; 16]| Ipv6Addr::from(*gid).to_ipv4_mapped().is_some();
    if !port.is_infiniband && is_v4(&port.gid) != is_v4(&peer.gid) {
        return "one end has an IPv4 GID and the other an IPv6 one: choose GIDs of one family".to_owned();
    }
    match error.raw_os_error() {
        Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ETIMEDOUT | libc::ENOENT | libc::ENXIO) => {
            "the peer's address does not resolve: both ports must be up and in networks that reach each other"
                .to_owned()
        }
        Some(libc::EINVAL) => format!(
            "the GID may have changed since with the interface's addresses, or the peer be in no network of this one; \
             compare /sys/class/infiniband/{device}/ports/{number}/gids/{gid_index}"
        ),
        other => gone_or(other, "see the kernel log"),
    }
}

/// RTS is refused.
pub(super) fn not_ready(error: &io::Error) -> String {
    gone_or(error.raw_os_error(), "the acknowledgement timeout is 0 to 31 and the retries 0 to 7")
}

/// Requests or receives that are refused.
pub(super) fn not_posted(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => "more are outstanding than the queue pair was made for".to_owned(),
        other => gone_or(other, "the queue pair is not in a state to take them"),
    }
}

/// Memory that is not registered, and what else takes some.
pub(super) fn no_room(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM) => memory_limit(),
        other => gone_or(other, "see the kernel log"),
    }
}

fn gone_or(errno: Option<i32>, otherwise: &str) -> String {
    match errno {
        Some(libc::EIO | libc::ENODEV) => "the device has vanished or its driver reset it".to_owned(),
        _ => otherwise.to_owned(),
    }
}

/// How much memory may be locked, and how to change that.
fn memory_limit() -> String {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` outlives the call.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) } == 0;
    match limit.rlim_cur {
        bytes if known && bytes != libc::RLIM_INFINITY => format!(
            "this process may lock {bytes} bytes in all (RLIMIT_MEMLOCK): raise it with `ulimit -l unlimited`, \
             LimitMEMLOCK=infinity in its service, or `--ulimit memlock=-1` for its container"
        ),
        _ => "the limit on locked memory (RLIMIT_MEMLOCK) is off, so memory itself, or the device's own, is short"
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_and_errors_read_well() {
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xFF, 0xFF, 10, 77, 0, 1]);
        assert_eq!(gid_text(&gid), "10.77.0.1");
        assert_eq!(gid_text(&[0xFE, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]), "fe80::1");
        assert_eq!(errno_text(&io::Error::from_raw_os_error(libc::EINVAL)), "Invalid argument (errno 22)");
    }

    #[test]
    fn ends_that_cannot_meet_are_told_so() {
        let place = Place { device: "rxe0".to_owned(), port: 1, gid_index: 0 };
        let error = io::Error::from_raw_os_error(libc::EINVAL);
        let ethernet = PortAddress { gid: [0; 16], lid: 0, mtu_bytes: 1024, is_infiniband: false };
        let mut v4 = ethernet;
        v4.gid[10..12].copy_from_slice(&[0xFF, 0xFF]);
        let text = no_route(&error, &place, &ethernet, &v4);
        assert_eq!(text, "one end has an IPv4 GID and the other an IPv6 one: choose GIDs of one family");
    }
}
