use antelog_core::sim::*;
use std::sync::atomic::*;
fn main() {
    let a: Vec<u64> = std::env::args().skip(1).map(|v| v.parse().unwrap()).collect();
    if a.len() == 1 {
        let k = Knobs::draw(a[0], &Overrides::default());
        println!("{k}");
        let o = simulate(k, true).unwrap();
        println!("{}", o.trace.unwrap_or_default());
        println!("{:016x} {:?}", o.digest, o.failure);
        return;
    }
    let next = AtomicU64::new(a[0]);
    let probes = std::sync::Mutex::new((Probes::default(), 0u64, 0u64));
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= a[0] + a[1] { return; }
                let o = simulate(Knobs::draw(seed, &Overrides::default()), false).unwrap();
                let mut p = probes.lock().unwrap();
                p.0.merge(&o.probes);
                if let Some(f) = o.failure { println!("seed {seed} {f}"); p.2 += 1 } else { p.1 += 1 }
            });
        }
    });
    let p = probes.into_inner().unwrap();
    for (n, c) in p.0.reached() { print!("{n}: {c}, ") }
    println!("\nmissed {:?}", p.0.missed());
    println!("{} passed, {} failed", p.1, p.2);
}
