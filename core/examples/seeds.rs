//! Runs seeds (temporary): FIRST COUNT [FAULTS] [trace].
use antelog_core::sim::knobs::FaultSet;
use antelog_core::sim::{Knobs, Overrides, Probes, simulate};
fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (first, count): (u64, u64) = (args[0].parse().unwrap(), args[1].parse().unwrap());
    let faults = args.get(2).filter(|f| *f != "-").map(|f| FaultSet::from_names(f).expect("faults"));
    let traced = args.get(3).is_some_and(|a| a == "t");
    let mut kinds: std::collections::BTreeMap<String, (u64, Vec<u64>)> = Default::default();
    let mut probes = Probes::default();
    for seed in first..first + count {
        let small = std::env::var("SMALL").is_ok();
        let shards = small.then_some(2 + (seed % 3) as u16);
        let knobs = Knobs::draw(seed, &Overrides { faults, shards, ..Overrides::default() });
        let shown = knobs.to_string();
        let outcome = simulate(knobs, traced).unwrap();
        probes.merge(&outcome.probes);
        if let Some(trace) = &outcome.trace {
            println!("{shown}\n{trace}");
        }
        if let Some(failure) = outcome.failure {
            let text = failure.to_string();
            println!("{seed}: {text}");
            let kind: String = text.chars().filter(|c| !c.is_ascii_digit()).take(90).collect();
            let entry = kinds.entry(kind).or_default();
            entry.0 += 1;
            entry.1.push(seed);
        }
    }
    println!("---");
    for (name, count) in probes.reached() {
        println!("  {name}: {count}");
    }
    for (kind, (count, seeds)) in kinds {
        println!("!!{count:>5} {kind} {:?}", &seeds[..seeds.len().min(8)]);
    }
}
