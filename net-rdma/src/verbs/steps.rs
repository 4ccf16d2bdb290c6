//! A queue pair's way from RESET to ready: what is said to the device at each step.

use std::ffi::c_uint;

use super::ffi::*;
use crate::provider::{End, Patience, PortAddress};

/// Sequence numbers and queue pair numbers are 24 bits.
const BITS_24: u32 = 0xFF_FFFF;

/// Routers a packet may pass.
const HOPS: u8 = 64;

/// Code for 0.64 ms: how long a sender waits when no receive is posted. With credits above, that does not happen.
const RECEIVER_NOT_READY_TIMER: u8 = 12;

/// Tries again forever when no receive is posted.
const RECEIVER_NOT_READY_RETRIES: u8 = 7;

/// One end of a connection to be, as its own device sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Here {
    pub address: PortAddress,
    pub port: u8,
    pub gid_index: u8,
    /// The InfiniBand port routes by global address even inside its subnet.
    pub global_required: bool,
}

fn nothing() -> ibv_qp_attr {
    let route = ibv_global_route {
        dgid: ibv_gid { raw: [0; 16] },
        flow_label: 0,
        sgid_index: 0,
        hop_limit: 0,
        traffic_class: 0,
    };
    let address =
        ibv_ah_attr { grh: route, dlid: 0, sl: 0, src_path_bits: 0, static_rate: 0, is_global: 0, port_num: 0 };
    ibv_qp_attr {
        qp_state: IBV_QPS_RESET,
        cur_qp_state: 0,
        path_mtu: 0,
        path_mig_state: 0,
        qkey: 0,
        rq_psn: 0,
        sq_psn: 0,
        dest_qp_num: 0,
        qp_access_flags: 0,
        cap: ibv_qp_cap { max_send_wr: 0, max_recv_wr: 0, max_send_sge: 0, max_recv_sge: 0, max_inline_data: 0 },
        ah_attr: address,
        alt_ah_attr: address,
        pkey_index: 0,
        alt_pkey_index: 0,
        en_sqd_async_notify: 0,
        sq_draining: 0,
        max_rd_atomic: 0,
        max_dest_rd_atomic: 0,
        min_rnr_timer: 0,
        port_num: 0,
        timeout: 0,
        retry_cnt: 0,
        rnr_retry: 0,
        alt_port_num: 0,
        alt_timeout: 0,
        rate_limit: 0,
    }
}

/// To a state that needs nothing else: RESET or ERR.
pub(super) fn to(state: c_uint) -> ibv_qp_attr {
    ibv_qp_attr { qp_state: state, ..nothing() }
}

/// RESET to INIT: from here on receives may be posted. Peers may write and nothing else.
pub(super) fn to_init(port: u8) -> (ibv_qp_attr, c_uint) {
    let attributes = ibv_qp_attr { port_num: port, qp_access_flags: IBV_ACCESS_REMOTE_WRITE, ..to(IBV_QPS_INIT) };
    (attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
}

/// INIT to RTR: ready to receive from the peer.
pub(super) fn to_rtr(here: &Here, peer: &End) -> (ibv_qp_attr, c_uint) {
    let attributes = ibv_qp_attr {
        path_mtu: mtu_code(here.address.mtu_bytes.min(peer.port.mtu_bytes)),
        dest_qp_num: peer.number & BITS_24,
        rq_psn: peer.psn & BITS_24,
        // Nobody reads, but some devices do not take 0.
        max_dest_rd_atomic: 1,
        min_rnr_timer: RECEIVER_NOT_READY_TIMER,
        ah_attr: route(here, &peer.port),
        ..to(IBV_QPS_RTR)
    };
    let mask = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    (attributes, mask)
}

/// RTR to RTS: ready to send.
pub(super) fn to_rts(psn: u32, patience: Patience) -> (ibv_qp_attr, c_uint) {
    let attributes = ibv_qp_attr {
        sq_psn: psn & BITS_24,
        timeout: patience.ack_timeout,
        retry_cnt: patience.retries,
        rnr_retry: RECEIVER_NOT_READY_RETRIES,
        max_rd_atomic: 1,
        ..to(IBV_QPS_RTS)
    };
    let mask =
        IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    (attributes, mask)
}

/// How packets get to the peer's port. On RoCE the global route is all there is; on InfiniBand the switches go by local
/// identifier and a global route is added only where one is needed, because it lengthens every packet by 40 bytes.
fn route(here: &Here, peer: &PortAddress) -> ibv_ah_attr {
    let address = &here.address;
    let is_global =
        !address.is_infiniband || here.global_required || peer.lid == 0 || address.gid[..8] != peer.gid[..8];
    let mut route = ibv_ah_attr {
        dlid: if address.is_infiniband { peer.lid } else { 0 },
        port_num: here.port,
        is_global: u8::from(is_global),
        ..nothing().ah_attr
    };
    if is_global {
        route.grh.dgid.raw = peer.gid;
        route.grh.sgid_index = here.gid_index;
        route.grh.hop_limit = HOPS;
    }
    route
}

/// Bytes of a path MTU by its code; 0 for an unknown code.
pub(super) fn mtu_bytes(code: c_uint) -> u16 {
    match code {
        IBV_MTU_256 => 256,
        IBV_MTU_512 => 512,
        IBV_MTU_1024 => 1024,
        IBV_MTU_2048 => 2048,
        IBV_MTU_4096 => 4096,
        _ => 0,
    }
}

/// The code of the largest path MTU that is not above `bytes`.
fn mtu_code(bytes: u16) -> c_uint {
    match bytes {
        4096.. => IBV_MTU_4096,
        2048.. => IBV_MTU_2048,
        1024.. => IBV_MTU_1024,
        512.. => IBV_MTU_512,
        _ => IBV_MTU_256,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(is_infiniband: bool, gid: [u8; 16], lid: u16, mtu_bytes: u16) -> PortAddress {
        PortAddress { gid, lid, mtu_bytes, is_infiniband }
    }

    fn here(address: PortAddress) -> Here {
        Here { address, port: 2, gid_index: 3, global_required: false }
    }

    #[test]
    fn roce_is_routed_by_gid_alone_and_takes_the_smaller_mtu() {
        let here = here(port(false, [1; 16], 0, 4096));
        let peer = End { port: port(false, [2; 16], 0, 1024), number: 0x0100_0007, psn: 0x0200_0009 };
        let (attributes, _) = to_rtr(&here, &peer);
        assert_eq!(attributes.path_mtu, IBV_MTU_1024);
        assert_eq!((attributes.dest_qp_num, attributes.rq_psn), (7, 9), "numbers are 24 bits");
        let route = attributes.ah_attr;
        assert_eq!((route.is_global, route.dlid, route.port_num), (1, 0, 2));
        assert_eq!((route.grh.dgid.raw, route.grh.sgid_index, route.grh.hop_limit), ([2; 16], 3, 64));
    }

    #[test]
    fn infiniband_is_routed_globally_only_where_it_must_be() {
        let gid = |subnet: u8, host: u8| {
            let mut gid = [subnet; 16];
            gid[15] = host;
            gid
        };
        let mut here = here(port(true, gid(0xFE, 1), 11, 4096));
        let same_subnet = port(true, gid(0xFE, 2), 12, 4096);
        let local = route(&here, &same_subnet);
        assert_eq!((local.is_global, local.dlid, local.grh.hop_limit), (0, 12, 0));
        let other_subnet = port(true, gid(0xFD, 2), 12, 4096);
        let global = route(&here, &other_subnet);
        assert_eq!((global.is_global, global.dlid, global.grh.dgid.raw), (1, 12, gid(0xFD, 2)));
        here.global_required = true;
        assert_eq!(route(&here, &same_subnet).is_global, 1);
    }

    #[test]
    fn mtus_have_codes() {
        for (bytes, code) in [(256, 1), (512, 2), (1024, 3), (2048, 4), (4096, 5)] {
            assert_eq!((mtu_code(bytes), mtu_bytes(code)), (code, bytes));
        }
        assert_eq!((mtu_code(1500), mtu_bytes(9)), (IBV_MTU_1024, 0));
    }
}
