//! A peer that shares no code with this project: built on the `ibverbs` crate, it talks to ours through `tests/peer.rs`.
//!
//! It returns three messages reversed, waits for bytes and a flag written into its memory and sends them back, and sends
//! back the number that came with a last write. Set-up goes through standard input and output, one line each.

use std::error::Error;
use std::io::{BufRead, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ibverbs::{CompletionQueue, MemoryRegion, QueuePair, QueuePairEndpoint, ibv_qp_type, ibv_wc};

/// Memory in words: room for the receives, then for an answer, then for what is written.
const WORDS: usize = 8192;
const RECEIVE_WORDS: usize = 512;
const RECEIVES: usize = 4;
const ANSWER: usize = RECEIVES * RECEIVE_WORDS;
const WRITTEN: usize = 4096;
const FLAG: usize = WORDS - 1;
/// After so long it gives up.
const HANG: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [device, gid_index, psn] = &arguments[..] else {
        return Err("usage: peer DEVICE GID_INDEX PSN_OF_THE_OTHER_END".into());
    };
    let devices = ibverbs::devices()?;
    let found = devices.iter().find(|found| found.name().is_some_and(|name| name.to_string_lossy() == *device));
    let context = found.ok_or("no such device")?.open()?;
    let completions = context.create_cq(64, 0)?;
    let domain = context.alloc_pd()?;
    let mut memory = domain.allocate::<u64>(WORDS)?;
    let prepared = domain
        .create_qp(&completions, &completions, ibv_qp_type::IBV_QPT_RC)
        .set_gid_index(gid_index.parse()?)
        .allow_remote_rw()
        .set_rq_psn(psn.parse()?)
        .set_timeout(18)
        .set_retry_count(7)
        .set_max_send_wr(8)
        .set_max_recv_wr(8)
        .build()?;
    let number = prepared.endpoint().num;
    println!("{number} {} {} {}", memory.as_ptr() as u64, memory.rkey().key, WORDS * 8);
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    // Both ends are on one port, so that only the number differs.
    let end = QueuePairEndpoint { num: line.trim().parse()?, ..prepared.endpoint() };
    let mut queue = prepared.handshake(end)?;
    for id in 0..RECEIVES {
        let range = id * RECEIVE_WORDS..(id + 1) * RECEIVE_WORDS;
        // SAFETY: the memory outlives the queue pair and the range is used for nothing else until the receive completes.
        unsafe { queue.post_receive(&mut memory, range, id as u64)? };
    }
    println!("ready");
    std::io::stdout().flush()?;
    serve(&completions, &mut queue, &mut memory)?;
    std::io::stdin().lock().read_line(&mut line)?;
    Ok(())
}

fn serve(
    completions: &CompletionQueue<'_>,
    queue: &mut QueuePair<'_>,
    memory: &mut MemoryRegion<u64>,
) -> Result<(), Box<dyn Error>> {
    for id in 0..RECEIVES - 1 {
        let received = completion(completions)?;
        assert_eq!(received.wr_id(), id as u64, "receives complete in order");
        assert_eq!(received.imm_data(), None);
        let words = received.len() / 8;
        for word in 0..words {
            memory[ANSWER + word] = memory[id * RECEIVE_WORDS + words - 1 - word].swap_bytes();
        }
        answer(completions, queue, memory, ANSWER, words)?;
    }
    let start = Instant::now();
    let flag = memory.as_ptr().wrapping_add(FLAG).cast_mut();
    // SAFETY: aligned, inside the memory, and accessed by this process as an atomic only.
    while unsafe { AtomicU64::from_ptr(flag) }.load(Ordering::Acquire) == 0 {
        if start.elapsed() > HANG {
            return Err("no flag came".into());
        }
    }
    answer(completions, queue, memory, WRITTEN, RECEIVE_WORDS)?;
    let notified = completion(completions)?;
    assert_eq!(notified.wr_id(), (RECEIVES - 1) as u64);
    memory[ANSWER] = u32::from_be(notified.imm_data().ok_or("the write came without its number")?).into();
    answer(completions, queue, memory, ANSWER, 1)
}

fn answer(
    completions: &CompletionQueue<'_>,
    queue: &mut QueuePair<'_>,
    memory: &mut MemoryRegion<u64>,
    first: usize,
    words: usize,
) -> Result<(), Box<dyn Error>> {
    // SAFETY: the range stays as it is until the send has completed, below.
    unsafe { queue.post_send(memory, first..first + words, 99)? };
    assert_eq!(completion(completions)?.wr_id(), 99);
    Ok(())
}

fn completion(completions: &CompletionQueue<'_>) -> Result<ibv_wc, Box<dyn Error>> {
    let start = Instant::now();
    let mut polled = [ibv_wc::default()];
    while completions.poll(&mut polled)?.is_empty() {
        if start.elapsed() > HANG {
            return Err("no completion came".into());
        }
    }
    match polled[0].error() {
        None => Ok(polled[0]),
        Some((status, vendor)) => Err(format!("a completion failed with status {status} ({vendor})").into()),
    }
}
