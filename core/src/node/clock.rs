//! The process's clock. Read once per duty cycle and passed on: nothing below the loop reads it again.

use std::sync::OnceLock;
use std::time::Instant;

/// Nanoseconds since the process first asked: monotonic, and the same on all threads. 64 bits last for 584 years.
#[inline]
pub fn now_ns() -> u64 {
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    EPOCH.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::now_ns;

    #[test]
    fn time_never_runs_backwards_between_threads() {
        let before = now_ns();
        let meanwhile = std::thread::spawn(now_ns).join().unwrap();
        assert!(before <= meanwhile && meanwhile <= now_ns());
    }
}
