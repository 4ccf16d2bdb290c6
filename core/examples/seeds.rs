//! Runs seeds (temporary).
use antelog_core::sim::{Knobs, Overrides, simulate};
fn main() {
    let args: Vec<u64> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let mut bad = 0;
    for seed in args[0]..args[0] + args[1] {
        let knobs = Knobs::draw(seed, &Overrides::default());
        let shown = knobs.to_string();
        let outcome = std::panic::catch_unwind(|| simulate(knobs, false).unwrap());
        match outcome {
            Ok(outcome) => {
                if let Some(failure) = outcome.failure {
                    bad += 1;
                    println!("{seed}: {failure}\n   {shown}");
                }
            }
            Err(_) => {
                bad += 1;
                println!("{seed}: panic\n   {shown}");
            }
        }
        if bad > 12 {
            break;
        }
    }
    println!("bad {bad}");
}
