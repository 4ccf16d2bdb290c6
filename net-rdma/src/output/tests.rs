//! Accounts of the sending side: what is signalled, what is free when, and that ids may wrap.

use super::*;

const LABEL: u64 = 7 << 48 | 3 << 32;
const SOURCE: MemoryId = MemoryId(1);
const STAGING: MemoryId = MemoryId(2);
const REGION: RemoteMemory = RemoteMemory { address: 1 << 40, len: 1 << 20, rkey: 0xABC };

fn output(depth: usize, staging_bytes: usize, receives: u32) -> Output {
    let sizes = OutputSizes { depth, inline_bytes: 64, message_bytes_max: 1000 };
    let mut output = Output::new(LABEL, sizes, Region::new(staging_bytes).unwrap(), STAGING);
    output.set_remote(vec![REGION], receives);
    output
}

fn write(output: &mut Output, len: usize, notify: Option<u32>, token: Option<u64>) -> Result<usize, Full> {
    let local = Local { memory: SOURCE, offset: 64, len };
    output.write(local, (0, 4096), notify, token).map(|issued| issued.requests)
}

/// Hands over what is staged: the requests, and the counts of those that are signalled.
fn ring(output: &mut Output) -> (Vec<Request>, Vec<u64>) {
    let (requests, signals) = output.doorbell(false);
    let requests = requests.to_vec();
    output.on_handed_over();
    let signalled: Vec<u64> = requests.iter().filter(|r| r.signalled).map(|r| r.id - LABEL).collect();
    assert_eq!(signalled.len(), signals);
    (requests, signalled)
}

#[test]
fn sixteen_requests_take_one_doorbell_and_the_last_token_one_signal() {
    let mut output = output(128, 1 << 15, 8);
    for token in 0..16 {
        assert!(!output.is_batch(1));
        assert_eq!(write(&mut output, 100, None, Some(token)), Ok(1));
    }
    assert!(output.is_batch(1));
    let (requests, signalled) = ring(&mut output);
    assert_eq!((requests.len(), signalled), (16, vec![15]));
    assert_eq!(ring(&mut output), (vec![], vec![]));
    assert_eq!(output.on_done(LABEL | 15), Some(15));
    // Silent requests behind the last token wait for a later signal.
    write(&mut output, 100, None, Some(70)).unwrap();
    write(&mut output, 100, None, Some(71)).unwrap();
    write(&mut output, 100, None, None).unwrap();
    assert_eq!(ring(&mut output).1, [17]);
    assert_eq!(output.on_done(LABEL | 17), Some(71));
}

#[test]
fn without_tokens_every_quarter_of_the_queue_is_signalled() {
    let mut output = output(128, 1 << 15, 8);
    let mut all = Vec::new();
    for _ in 0..8 {
        (0..16).for_each(|_| assert_eq!(write(&mut output, 10, None, None), Ok(1)));
        all.extend(ring(&mut output).1);
    }
    assert_eq!(all, [31, 63, 95, 127]);
    assert_eq!(write(&mut output, 10, None, None), Err(Full));
    assert_eq!(output.on_done(LABEL | 31), None);
    for _ in 0..32 {
        assert_eq!(write(&mut output, 10, None, None), Ok(1));
        if output.is_batch(1) {
            ring(&mut output);
        }
    }
    assert_eq!(write(&mut output, 10, None, None), Err(Full));
    // A completion of a later request covers all before it.
    assert_eq!(output.on_done(LABEL | 127), None);
    assert_eq!(output.issued - output.done, 32);
}

#[test]
fn staging_memory_comes_back_only_with_a_completion_that_covers_it() {
    let mut output = output(128, 4 * 8192, 512);
    let message = [1; 8192];
    write(&mut output, 10, None, Some(9)).unwrap();
    (0..4).for_each(|_| assert!(output.send(&message).is_ok()));
    assert_eq!(output.send(&message), Err(Full));
    let (requests, signalled) = ring(&mut output);
    assert_eq!(requests[1..].iter().map(|r| r.local.offset).collect::<Vec<_>>(), [0, 8192, 16384, 24576]);
    assert_eq!(signalled, [0, 4], "the token, and the last because memory is short");
    assert_eq!(output.on_done(LABEL), Some(9));
    assert_eq!(output.send(&message), Err(Full), "the token's write was before the messages");
    assert_eq!(output.on_done(LABEL | 4), None);
    assert!(output.send(&message).is_ok());
    assert_eq!(ring(&mut output).0[0].local, Local { memory: STAGING, offset: 0, len: 8192 });
}

#[test]
fn a_token_before_staged_bytes_frees_only_what_earlier_signals_cover() {
    let mut output = output(128, 4 * 8192, 512);
    (0..2).for_each(|_| assert!(output.send(&[1; 8192]).is_ok()));
    assert_eq!(ring(&mut output).1, [1]);
    write(&mut output, 10, None, Some(5)).unwrap();
    assert!(output.write_inline(&[2; 100], (0, 0), None).is_ok());
    assert_eq!(ring(&mut output).1, [2]);
    assert_eq!(output.on_done(LABEL | 2), Some(5));
    assert_eq!((output.staging_tail, output.staging_head), (16384, 16384 + 128));
}

#[test]
fn messages_and_notifications_use_credit_and_nothing_else_does() {
    let mut output = output(128, 1 << 15, 2);
    assert!(output.send(b"one").is_ok());
    assert!(write(&mut output, 10, Some(1), None).is_ok());
    assert_eq!(output.send(b"three"), Err(Full));
    assert_eq!(output.write_inline(b"three", (0, 0), Some(3)), Err(Full));
    assert_eq!(write(&mut output, 10, Some(3), None), Err(Full));
    assert!(output.write_inline(b"silent", (0, 0), None).is_ok());
    assert!(write(&mut output, 10, None, None).is_ok());
    assert!(output.send_credit(7).is_ok());
    assert!(output.on_credit(1));
    assert!(output.send(b"three").is_ok());
    assert_eq!(output.send(b"four"), Err(Full));
    // More than was used, or less than was said before.
    assert!(!output.on_credit(4));
    assert!(!output.on_credit(0));
    assert!(output.on_credit(3));
    assert_eq!(output.granted - output.used, 2);
}

/// Counts of credits go on beyond 2^32.
#[test]
fn credit_wraps() {
    let mut output = output(128, 1 << 15, 16);
    output.used = (1 << 32) + 5;
    output.granted = output.initial + (1 << 32) - 3;
    assert!(output.on_credit(u32::MAX));
    assert!(output.on_credit(4));
    assert_eq!(output.granted, output.initial + (1 << 32) + 4);
    assert!(!output.on_credit(6));
}

#[test]
fn long_writes_are_split_and_the_last_part_tells() {
    let mut output = output(128, 1 << 15, 8);
    assert_eq!(output.parts(2500), 3);
    assert_eq!(write(&mut output, 2500, Some(6), Some(1)), Ok(3));
    let (requests, signalled) = ring(&mut output);
    let operation = |at: u64, imm| Operation::Write { address: (1 << 40) + 4096 + at, rkey: 0xABC, imm };
    let request = |id: u64, at: u64, len, imm, signalled| Request {
        id: LABEL | id,
        operation: operation(at, imm),
        local: Local { memory: SOURCE, offset: 64 + at as usize, len },
        signalled,
        inline: false,
    };
    let parts =
        [request(0, 0, 1000, None, false), request(1, 1000, 1000, None, false), request(2, 2000, 500, Some(6), true)];
    assert_eq!((requests, signalled), (parts.to_vec(), vec![2]));
    assert_eq!(output.used, 1);
    // Nothing of a write without room for all of its parts is staged; one of no bytes is a request all the same.
    let mut short = self::output(32, 1 << 15, 8);
    (0..30).for_each(|_| assert!(write(&mut short, 1, None, None).is_ok()));
    assert_eq!(write(&mut short, 2500, None, None), Err(Full));
    assert_eq!(
        (short.issued, write(&mut short, 0, None, None), write(&mut short, 2000, None, None)),
        (30, Ok(1), Err(Full))
    );
}

#[test]
fn full_changes_nothing() {
    let mut no_slots = output(32, 1 << 15, 100);
    (0..32).for_each(|_| assert!(write(&mut no_slots, 1, None, None).is_ok()));
    let mut no_credit = output(32, 1 << 15, 0);
    let mut no_memory = output(32, 1 << 15, 100);
    (0..4).for_each(|_| assert!(no_memory.send(&[0; 8192]).is_ok()));
    for output in [&mut no_slots, &mut no_credit, &mut no_memory] {
        let before = format!("{output:?}");
        assert_eq!(output.send(b"x"), Err(Full));
        assert_eq!(output.write_inline(b"x", (0, 0), Some(1)), Err(Full));
        assert_eq!(format!("{output:?}"), before);
    }
    assert_eq!(write(&mut no_slots, 1, None, Some(1)), Err(Full));
    assert_eq!(no_slots.send_credit(1), Err(Full));
    assert_eq!(no_slots.newest_token, None);
    assert!(no_credit.send_credit(1).is_ok());
}

#[test]
fn ids_wrap_at_31_bits() {
    let mut output = output(32, 1 << 15, 100);
    let start = (1 << 31) - 20;
    (output.issued, output.done, output.signalled) = (start, start, start);
    let mut placed = Vec::new();
    for token in 0..100u64 {
        assert_eq!(write(&mut output, 1, None, Some(token)), Ok(1));
        let (requests, _) = ring(&mut output);
        assert_eq!(requests[0].id, LABEL | (start + token) & 0x7FFF_FFFF);
        // Completions lag behind by 20 requests.
        if token >= 20 {
            placed.extend(output.on_done(LABEL | (start + token - 20) & 0x7FFF_FFFF));
        }
    }
    assert_eq!(placed, (0..80).collect::<Vec<_>>());
    assert_eq!(output.on_done(LABEL | (start + 99) & 0x7FFF_FFFF), Some(99));
    assert_eq!(output.on_done(LABEL | (start + 99) & 0x7FFF_FFFF), None, "reported again");
    assert_eq!((output.done, output.marks.len()), (start + 100, 0));
}

/// The probe is as long as the longest packet: a path that loses long packets only is found out before it carries data.
#[test]
fn the_probe_fills_a_packet_of_every_path() {
    let mut output = output(32, 1 << 15, 1);
    output.send_probe().unwrap();
    let (requests, signals) = output.doorbell(true);
    let local = Local { memory: STAGING, offset: 0, len: 4096 };
    let operation = Operation::Send { imm: Some(0) };
    assert_eq!(requests, [Request { id: LABEL, operation, local, signalled: true, inline: false }]);
    assert_eq!((signals, output.used), (1, 0));
}

/// Whatever is issued and however late completions come: no staged byte is used twice at a time, no queue is overrun, and
/// nothing is stuck once everything completed.
#[test]
fn staged_bytes_are_never_used_twice_at_a_time() {
    let mut state = 1u64;
    let mut below = move |bound: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % bound
    };
    let mut output = output(32, 4 * 8192, u32::MAX);
    // Ids of signalled requests under way; counts and ranges of staged ones.
    let mut signalled = VecDeque::new();
    let mut staged: VecDeque<(u64, usize, usize)> = VecDeque::new();
    let (mut accepted, mut refused) = (0, 0);
    for _ in 0..200_000 {
        if output.is_batch(1) || below(4) == 0 {
            signalled.extend(ring_and_track(&mut output, &mut staged));
        }
        if below(6) == 0
            && let Some(done) = signalled.pop_front()
        {
            output.on_done(LABEL | done);
            staged.retain(|(count, ..)| *count > done);
        }
        let issued = match below(3) {
            0 => output.send(&[0; 8192][..below(8193) as usize]),
            1 => output.write_inline(&[0; 256][..below(257) as usize], (0, 0), None),
            _ => output.write(Local { memory: SOURCE, offset: 0, len: 9 }, (0, 0), None, (below(2) == 0).then_some(1)),
        };
        *if issued.is_ok() { &mut accepted } else { &mut refused } += 1;
        assert!(output.issued - output.done <= 32);
        if issued.is_err() && below(3) == 0 {
            signalled.extend(ring_and_track(&mut output, &mut staged));
            while let Some(done) = signalled.pop_front() {
                output.on_done(LABEL | done);
                staged.retain(|(count, ..)| *count > done);
            }
            assert!(output.send(&[0; 8192]).is_ok(), "stuck: {output:?}");
        }
    }
    assert!(accepted > 30_000 && refused > 10_000, "{accepted} accepted, {refused} refused");
}

/// Hands over what is staged and notes which staged bytes that puts under way.
fn ring_and_track(output: &mut Output, staged: &mut VecDeque<(u64, usize, usize)>) -> Vec<u64> {
    let (requests, signals) = ring(output);
    for request in requests.iter().filter(|request| request.local.memory == STAGING) {
        let (from, to) = (request.local.offset, request.local.offset + request.local.len);
        let clash = staged.iter().find(|(_, start, end)| from < *end && *start < to);
        assert_eq!(clash, None, "{from}..{to} is under way");
        staged.push_back((request.id - LABEL, from, to));
    }
    signals
}
