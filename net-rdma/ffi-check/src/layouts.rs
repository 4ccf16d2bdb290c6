//! Compares this project's libibverbs interface with two that bindgen made from the headers: `rdma-sys` from the
//! distribution's, `ibverbs-sys` from the rdma-core it carries. Sizes, offsets of all fields, values of all constants.
//!
//! Prints every difference and fails if there is one, or if a constant is compared with nothing.

#[allow(dead_code)]
#[path = "../../src/verbs/ffi.rs"]
mod ours;

use std::collections::BTreeSet;
use std::mem::offset_of;
use std::process::ExitCode;

/// `rdma-sys` as it names things.
mod rdma {
    pub use rdma_sys::*;
}

/// `ibverbs-sys` as it names things. Where `rdma-sys` has a module for an enum and this crate has plain constants, a module
/// with all of them stands in.
mod ibverbs {
    pub use ibverbs_sys::*;
    /// All constants.
    pub mod unnamed {
        pub use ibverbs_sys::*;
    }
    pub use unnamed as ibv_mtu;
    pub use unnamed as ibv_transport_type;
    pub use unnamed as ibv_event_type;
}

/// A constant's value, whatever the generator made of it.
trait Value {
    fn value(self) -> i64;
}

macro_rules! values {
    ($($type:ty: $value:expr;)*) => {
        $(impl Value for $type {
            fn value(self) -> i64 {
                let convert: fn($type) -> i64 = $value;
                convert(self)
            }
        })*
    };
}

values! {
    u32: |v| v.into();
    i32: |v| v.into();
    rdma::ibv_event_type: |v| v as i64;
    rdma::ibv_access_flags: |v| v.0.into();
    rdma::ibv_qp_attr_mask: |v| v.0.into();
    rdma::ibv_send_flags: |v| v.0.into();
    rdma::ibv_wc_flags: |v| v.0.into();
    ibverbs::ibv_access_flags: |v| v.0.into();
    ibverbs::ibv_qp_attr_mask: |v| v.0.into();
    ibverbs::ibv_send_flags: |v| v.0.into();
    ibverbs::ibv_wc_flags: |v| v.0.into();
}

#[derive(Default)]
struct Report {
    compared: usize,
    differences: Vec<String>,
    constants: BTreeSet<&'static str>,
}

impl Report {
    fn compare(&mut self, what: &str, ours: i64, theirs: i64) {
        self.compared += 1;
        if ours != theirs {
            self.differences.push(format!("{what}: {ours} here, {theirs} there"));
        }
    }
}

/// Offsets of fields by our path and, where it differs, theirs. A `whole` structure also has the same size; a `prefix` is
/// allocated by the library and ends here after the last field used.
macro_rules! structures {
    (
        $report:ident, $theirs:ident:
        $($extent:ident $name:ident { $($field:ident $(. $rest:ident)* $(= $($their:ident).+)?),* })*
    ) => {
        $(
            structures!(@size $extent $report $theirs $name);
            $($report.compare(
                concat!(stringify!($theirs), "::", stringify!($name), ".", stringify!($field $(. $rest)*)),
                offset_of!(ours::$name, $field $(. $rest)*) as i64,
                structures!(@offset $theirs $name [$field $(. $rest)*] $($($their).+)?),
            );)*
        )*
    };
    (@offset $theirs:ident $name:ident [$($field:ident).+]) => { offset_of!($theirs::$name, $($field).+) as i64 };
    (@offset $theirs:ident $name:ident [$($field:ident).+] $($their:ident).+) => {
        offset_of!($theirs::$name, $($their).+) as i64
    };
    (@size whole $report:ident $theirs:ident $name:ident) => {
        let what = concat!("size of ", stringify!($theirs), "::", stringify!($name));
        $report.compare(what, size_of::<ours::$name>() as i64, size_of::<$theirs::$name>() as i64);
        let what = concat!("alignment of ", stringify!($theirs), "::", stringify!($name));
        $report.compare(what, align_of::<ours::$name>() as i64, align_of::<$theirs::$name>() as i64);
    };
    (@size prefix $report:ident $theirs:ident $name:ident) => {};
}

/// What both crates name alike.
macro_rules! common {
    ($report:ident, $theirs:ident) => {
        structures! { $report, $theirs:
            prefix ibv_device { node_type, transport_type }
            whole ibv_context_ops { poll_cq, req_notify_cq, post_send, post_recv }
            prefix ibv_context { device, ops, cmd_fd, async_fd }
            whole ibv_pd { context, handle }
            whole ibv_comp_channel { context, fd, refcnt }
            prefix ibv_cq { context, channel, cq_context, handle, cqe }
            prefix ibv_qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num }
            whole ibv_mr { context, pd, addr, length, handle, lkey, rkey }
            whole ibv_device_attr {
                fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id, hw_ver, max_qp,
                max_qp_wr, device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom,
                max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd,
                max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach,
                max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge, max_pkeys, local_ca_ack_delay,
                phys_port_cnt
            }
            prefix ibv_port_attr {
                state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr,
                pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width,
                active_speed, phys_state, link_layer, flags
            }
            whole ibv_gid { raw }
            whole ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
            whole ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
            whole ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
            whole ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
            whole ibv_qp_attr {
                qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap,
                ah_attr, alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify, sq_draining, max_rd_atomic,
                max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout,
                rate_limit
            }
            whole ibv_sge { addr, length, lkey }
            whole ibv_recv_wr { wr_id, next, sg_list, num_sge }
            whole ibv_async_event { element, element.port_num, event_type }
        }
        let room = size_of::<ours::ibv_port_attr>() >= size_of::<$theirs::ibv_port_attr>();
        $report.compare("room for ibv_port_attr", room.into(), 1);
        constants! { $report, $theirs:
            ibv_transport_type: IBV_TRANSPORT_IB;
            ibv_port_state: IBV_PORT_ACTIVE, IBV_PORT_ACTIVE_DEFER;
            ibv_mtu: IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096;
            ibv_access_flags: IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE;
            ibv_qp_type: IBV_QPT_RC;
            ibv_qp_state: IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_ERR;
            ibv_qp_attr_mask: IBV_QP_STATE, IBV_QP_ACCESS_FLAGS, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_AV,
                IBV_QP_PATH_MTU, IBV_QP_TIMEOUT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN,
                IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_SQ_PSN, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_DEST_QPN;
            ibv_wr_opcode: IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM;
            ibv_send_flags: IBV_SEND_SIGNALED, IBV_SEND_INLINE;
            ibv_wc_status: IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR,
                IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_RESP_TIMEOUT_ERR;
            ibv_wc_opcode: IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM;
            ibv_wc_flags: IBV_WC_WITH_IMM;
            ibv_event_type: IBV_EVENT_CQ_ERR, IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR,
                IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ERR;
        }
    };
}

macro_rules! constants {
    ($report:ident, $theirs:ident: $($group:ident: $($name:ident),*;)*) => {
        $($(
            $report.constants.insert(stringify!($name));
            let what = concat!(stringify!($theirs), "::", stringify!($name));
            $report.compare(what, ours::$name.into(), $theirs::$group::$name.value());
        )*)*
    };
}

fn main() -> ExitCode {
    let mut report = Report::default();
    common!(report, rdma);
    common!(report, ibverbs);
    structures! { report, rdma:
        whole ibv_send_wr {
            wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data = imm_data_invalidated_rkey_union.imm_data,
            rdma = wr, rdma.remote_addr = wr.rdma.remote_addr, rdma.rkey = wr.rdma.rkey, _xrc_and_others = qp_type
        }
        whole ibv_wc {
            wr_id, status, opcode, vendor_err, byte_len, imm_data = imm_data_invalidated_rkey_union.imm_data, qp_num,
            src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits
        }
    }
    structures! { report, ibverbs:
        whole ibv_send_wr {
            wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data = __bindgen_anon_1.imm_data,
            rdma = wr, rdma.remote_addr = wr.rdma.remote_addr, rdma.rkey = wr.rdma.rkey, _xrc_and_others = qp_type
        }
        // The fields ahead of these are private there.
        whole ibv_wc { imm_data, qp_num, src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits }
    }
    // An anonymous enum that only one of the two keeps, and a macro (for 1 << 0, in verbs_api.h) that neither does.
    constants! { report, ibverbs: unnamed: IBV_LINK_LAYER_INFINIBAND, IBV_LINK_LAYER_ETHERNET; }
    report.constants.insert("IBV_QPF_GRH_REQUIRED");
    for (name, _) in ours::CONSTANTS {
        if !report.constants.contains(name) {
            report.differences.push(format!("{name} is compared with nothing"));
        }
    }
    for difference in &report.differences {
        println!("{difference}");
    }
    println!("{} sizes, offsets and values compared, {} differ", report.compared, report.differences.len());
    if report.differences.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
