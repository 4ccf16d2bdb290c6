//! The nodes' hot path allocates nothing: appends, replication, speculative delivery, reports, cuts, grants and acks of a
//! whole cluster, driven on one thread whose allocations are counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use antelog::cluster::{Cluster, Nodes};
use antelog::{Client, ClientOptions, Event, Position, Scope};
use antelog_core::config::Config;
use antelog_core::node::now_ns;

thread_local! {
    static COUNTING: Cell<bool> = const { Cell::new(false) };
}

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counter;

fn count() {
    // A thread that is going away has no thread-local storage any more; it is not the one that counts.
    if COUNTING.try_with(Cell::get).unwrap_or(false) {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counter = Counter;

const CONFIG: &str = r#"
[cluster]
name = "allocations"
region_bytes = 4194304
retention = "recycle"
record_bytes_max = 8192
client_ring_bytes = 65536

[[shard]]
id = 0
quota = 3
[[shard]]
id = 1
quota = 5

[[node]]
id = 0
role = "sequencer"
listen = "127.0.0.1:0"
[[node]]
id = 1
role = "primary"
shard = 0
clients = "127.0.0.1:0"
[[node]]
id = 2
role = "backup"
shard = 0
listen = "127.0.0.1:0"
clients = "127.0.0.1:0"
[[node]]
id = 3
role = "primary"
shard = 1
clients = "127.0.0.1:0"
[[node]]
id = 4
role = "backup"
shard = 1
listen = "127.0.0.1:0"
clients = "127.0.0.1:0"
"#;

const WARM_UP_RECORDS: u64 = 4000;
const RECORDS: u64 = 12_000;

/// Appends to both shards and follows the log until enough is confirmed; tells how far it is.
fn work(address: String, confirmed: &AtomicU64) {
    let client = Client::connect(ClientOptions::new([address])).unwrap();
    let mut subscription = client.subscribe(Scope::All, Position(0)).unwrap();
    let shards: Vec<_> = client.map().shards.iter().map(|s| s.shard).collect();
    let record = vec![7u8; 4096];
    let mut pending = std::collections::VecDeque::new();
    let (mut sent, mut delivered) = (0, 0u64);
    while delivered < RECORDS {
        while sent < RECORDS && pending.len() < 64 {
            pending.push_back(client.append_async(shards[(sent % 2) as usize], &record).unwrap());
            sent += 1;
        }
        if let Some(oldest) = pending.pop_front() {
            oldest.wait().unwrap();
        }
        while let Some(event) = subscription.try_next().unwrap() {
            match event {
                Event::Deliver { record, .. } => {
                    assert_eq!(record.len(), 4096);
                    delivered += 1;
                }
                Event::Confirm { .. } => confirmed.store(delivered, Ordering::Relaxed),
                Event::Fail { from } => panic!("speculation from {from} failed"),
                Event::Unavailable { from, .. } => panic!("{from} is unavailable"),
            }
        }
    }
}

/// With quotas that stay nothing is allocated. A window whose quotas changed is one more span for each of the six
/// followers of the order log, of at most four allocations, and nothing else.
#[test]
fn a_steady_cluster_allocates_nothing_and_a_change_of_quotas_a_span() {
    let (allocations, grants) = run(&["policy.adaptive_quotas=false", "policy.ground_windows=0"]);
    assert!(grants > 5, "windows were opened while it counted");
    assert_eq!(allocations, 0, "the nodes' thread allocated");
    // The faster the cluster, the larger its quotas and the fewer its windows.
    let (allocations, grants) = run(&[]);
    assert!(allocations <= 6 * 4 * grants, "{allocations} allocations at {grants} grants");
}

/// Runs a cluster; returns the allocations counted and the windows granted in all.
fn run(policy: &[&str]) -> (u64, u64) {
    ALLOCATIONS.store(0, Ordering::Relaxed);
    let config = Config::parse(CONFIG, &policy.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>()).unwrap();
    let (cluster, mut agents) = Cluster::invoked(config, Nodes::All).unwrap();
    let address = cluster.client_addresses()[0].clone();
    let (confirmed, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let worker = std::thread::spawn({
        let (confirmed, done) = (confirmed.clone(), done.clone());
        move || {
            work(address, &confirmed);
            done.store(true, Ordering::Relaxed);
        }
    });
    let mut counted_from = 0;
    while !done.load(Ordering::Relaxed) && !worker.is_finished() {
        // The client's connection, its rings and its session's first records allocate; what follows does not.
        let now = confirmed.load(Ordering::Relaxed);
        let steady = now >= WARM_UP_RECORDS && now + 500 < RECORDS;
        if steady && counted_from == 0 {
            counted_from = now;
        }
        COUNTING.set(steady);
        let busy = agents.step(now_ns());
        COUNTING.set(false);
        if busy == 0 {
            std::thread::yield_now();
        }
    }
    worker.join().unwrap();
    assert!(counted_from > 0 && counted_from < RECORDS / 2, "nothing was counted");
    assert_eq!(cluster.counter("shard", "records"), RECORDS);
    let result = (ALLOCATIONS.load(Ordering::Relaxed), cluster.counter("sequencer", "grants"));
    drop(agents);
    result
}
