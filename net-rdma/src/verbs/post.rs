//! Requests and receives as the device takes them: linked lists, built on the stack and handed over with one doorbell.

use std::ffi::c_uint;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

use super::ffi::*;
use super::objects::{Memory, QueuePair};
use crate::provider::{Local, Operation, Receive, Request};

/// Longest list handed over at once: what fits comfortably on the stack and in the cache.
pub(super) const LIST_MAX: usize = 16;

type Stack<T> = [MaybeUninit<T>; LIST_MAX];

fn piece(memories: &[Memory], local: &Local) -> ibv_sge {
    memories[local.memory.0 as usize].piece(local)
}

/// Hands over up to [`LIST_MAX`] requests in order.
pub(super) fn requests(queue: &mut QueuePair, memories: &[Memory], requests: &[Request]) -> io::Result<()> {
    assert!(requests.len() <= LIST_MAX, "{} requests posted at once, at most {LIST_MAX}", requests.len());
    if requests.is_empty() {
        return Ok(());
    }
    let mut works: Stack<ibv_send_wr> = [const { MaybeUninit::uninit() }; LIST_MAX];
    let mut pieces: Stack<ibv_sge> = [const { MaybeUninit::uninit() }; LIST_MAX];
    let work = works.as_mut_ptr().cast::<ibv_send_wr>();
    let sge = pieces.as_mut_ptr().cast::<ibv_sge>();
    for (index, request) in requests.iter().enumerate() {
        let local = &request.local;
        assert!(
            !request.inline || local.len <= queue.inline_bytes,
            "{} bytes inline, of {} that the queue takes",
            local.len,
            queue.inline_bytes
        );
        let (opcode, imm, rdma) = operation(&request.operation);
        let next = if index + 1 < requests.len() { work.wrapping_add(index + 1) } else { null_mut() };
        let described = ibv_send_wr {
            wr_id: request.id,
            next,
            sg_list: sge.wrapping_add(index),
            // A piece of length 0 means 2 GiB to some devices; no piece means 0 bytes to all.
            num_sge: i32::from(local.len > 0),
            opcode,
            send_flags: flags(request),
            imm_data: imm.to_be(),
            rdma,
            _xrc_and_others: MaybeUninit::uninit(),
        };
        // SAFETY: `index` is below `LIST_MAX`, so both places lie in the arrays above.
        unsafe {
            sge.add(index).write(piece(memories, local));
            work.add(index).write(described);
        }
    }
    // SAFETY: the list was just built, ends at the last request, and every piece was checked against its registration, which
    // outlives the queue pair.
    unsafe { queue.post_send(work) }
}

#[inline]
fn operation(operation: &Operation) -> (c_uint, u32, ibv_send_wr_rdma) {
    let _rest = MaybeUninit::uninit();
    match *operation {
        Operation::Write { address, rkey, imm } => {
            let opcode = if imm.is_some() { IBV_WR_RDMA_WRITE_WITH_IMM } else { IBV_WR_RDMA_WRITE };
            (opcode, imm.unwrap_or(0), ibv_send_wr_rdma { remote_addr: address, rkey, _rest })
        }
        Operation::Send { imm } => {
            let opcode = if imm.is_some() { IBV_WR_SEND_WITH_IMM } else { IBV_WR_SEND };
            (opcode, imm.unwrap_or(0), ibv_send_wr_rdma { remote_addr: 0, rkey: 0, _rest })
        }
    }
}

#[inline]
fn flags(request: &Request) -> c_uint {
    let signalled = if request.signalled { IBV_SEND_SIGNALED } else { 0 };
    let inline = if request.inline { IBV_SEND_INLINE } else { 0 };
    signalled | inline
}

/// Hands over receives, in as many lists as it takes.
pub(super) fn receives(queue: &mut QueuePair, memories: &[Memory], receives: &[Receive]) -> io::Result<()> {
    for some in receives.chunks(LIST_MAX) {
        let mut works: Stack<ibv_recv_wr> = [const { MaybeUninit::uninit() }; LIST_MAX];
        let mut pieces: Stack<ibv_sge> = [const { MaybeUninit::uninit() }; LIST_MAX];
        let work = works.as_mut_ptr().cast::<ibv_recv_wr>();
        let sge = pieces.as_mut_ptr().cast::<ibv_sge>();
        for (index, receive) in some.iter().enumerate() {
            let described = ibv_recv_wr {
                wr_id: receive.id,
                next: if index + 1 < some.len() { work.wrapping_add(index + 1) } else { null_mut() },
                sg_list: sge.wrapping_add(index),
                num_sge: i32::from(receive.local.len > 0),
            };
            // SAFETY: a chunk has at most `LIST_MAX` entries, so both places lie in the arrays above.
            unsafe {
                sge.add(index).write(piece(memories, &receive.local));
                work.add(index).write(described);
            }
        }
        // SAFETY: the list was just built, ends at the chunk's last receive, and every piece was checked against its
        // registration, which outlives the queue pair.
        unsafe { queue.post_receive(work)? };
    }
    Ok(())
}
