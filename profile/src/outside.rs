//! What else the machine does while we measure. A latency without it is hard to judge on a shared or small machine.

use std::fs;

use serde::Serialize;

/// Load that is not ours.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OutsideLoad {
    /// The one-minute load average just before.
    pub load_average_before: f64,
    /// Cores that others kept busy meanwhile, on average. Interrupts count as theirs where the kernel accounts for them
    /// apart from processes.
    pub busy_cores: f64,
    /// Share of all cores' time that the hypervisor gave to others, 0 to 1.
    pub steal_share: f64,
    /// Cores of the machine.
    pub cores: usize,
}

/// Ticks of `/proc/stat` and `/proc/self/stat`, which have the same length.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Ticks {
    /// All cores, all states.
    total: u64,
    /// Spent on processes and interrupts.
    busy: u64,
    stolen: u64,
    /// Of this process, and of its children that have ended and been waited for.
    own: u64,
    cores: usize,
}

/// An observation under way.
#[derive(Debug)]
pub struct Watch {
    load_average_before: f64,
    start: Ticks,
}

impl Watch {
    /// Begins to observe; `None` where the system has no `/proc`.
    pub fn start() -> Option<Watch> {
        let load = fs::read_to_string("/proc/loadavg").ok()?;
        let load_average_before = load.split_whitespace().next()?.parse().ok()?;
        Some(Watch { load_average_before, start: read_ticks()? })
    }

    /// What others did since the start. Node processes should have been waited for by now: until then they are others.
    pub fn stop(&self) -> Option<OutsideLoad> {
        Some(outside(self.load_average_before, self.start, read_ticks()?))
    }
}

/// Seconds of processor time that the threads of this process have used so far, those that have ended left out; `None`
/// where the system does not tell.
pub fn threads_cpu_s() -> Option<f64> {
    let mut ns = 0;
    for thread in fs::read_dir("/proc/self/task").ok()? {
        // A thread may end between the two look-ups.
        let Ok(text) = fs::read_to_string(thread.ok()?.path().join("schedstat")) else { continue };
        ns += text.split_whitespace().next()?.parse::<u64>().ok()?;
    }
    Some(ns as f64 / 1e9)
}

fn outside(load_average_before: f64, start: Ticks, end: Ticks) -> OutsideLoad {
    let total = end.total.saturating_sub(start.total).max(1) as f64;
    let own = end.own.saturating_sub(start.own);
    let others = end.busy.saturating_sub(start.busy).saturating_sub(own) as f64;
    OutsideLoad {
        load_average_before,
        busy_cores: others / total * end.cores as f64,
        steal_share: end.stolen.saturating_sub(start.stolen) as f64 / total,
        cores: end.cores,
    }
}

fn read_ticks() -> Option<Ticks> {
    parse_ticks(&fs::read_to_string("/proc/stat").ok()?, &fs::read_to_string("/proc/self/stat").ok()?)
}

fn parse_ticks(system: &str, own: &str) -> Option<Ticks> {
    let line = system.lines().find(|line| line.starts_with("cpu "))?;
    // user nice system idle iowait irq softirq steal; the guest times that follow are part of user and nice.
    let cpu: Vec<u64> = line.split_whitespace().skip(1).take(8).map_while(|field| field.parse().ok()).collect();
    let [user, nice, kernel, idle, io_wait, irq, soft_irq, stolen] = cpu[..] else { return None };
    let busy = user + nice + kernel + irq + soft_irq;
    let is_core =
        |line: &&str| line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    // The second field is the program's name in parentheses and may hold anything: what follows begins with the third.
    let (_, fields) = own.rsplit_once(')')?;
    let own: Vec<u64> = fields.split_whitespace().skip(11).take(4).map_while(|field| field.parse().ok()).collect();
    let [user, kernel, children_user, children_kernel] = own[..] else { return None };
    Some(Ticks {
        total: busy + idle + io_wait + stolen,
        busy,
        stolen,
        own: user + kernel + children_user + children_kernel,
        cores: system.lines().filter(is_core).count(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYSTEM: &str = "cpu  100 10 50 800 20 3 7 10 5 0\ncpu0 50 5 25 400 10 2 3 5 5 0\ncpu1 50 5 25 400 10 1 4 5 0 0\n\
                          intr 5 0\nctxt 7\n";
    const OWN: &str = "42 (a (strange) name) S 1 42 42 0 -1 4194304 100 0 0 0 30 12 2 1 20 0 1 0 17 9 9\n";

    #[test]
    fn ticks_are_read_from_the_kernels_text() {
        let expected = Ticks { total: 1000, busy: 170, stolen: 10, own: 45, cores: 2 };
        assert_eq!(parse_ticks(SYSTEM, OWN), Some(expected));
        assert_eq!(parse_ticks("cpu  1 2 3", OWN), None);
        assert_eq!(parse_ticks(SYSTEM, "42 (short) S 1"), None);
        assert_eq!(parse_ticks("", ""), None);
    }

    #[test]
    fn what_is_not_ours_is_others() {
        let start = Ticks { total: 1000, busy: 170, stolen: 10, own: 45, cores: 2 };
        let end = Ticks { total: 1400, busy: 370, stolen: 30, own: 145, cores: 2 };
        // 200 of 400 ticks were busy, 100 of them ours: a quarter of two cores.
        let load = outside(1.5, start, end);
        assert_eq!(load, OutsideLoad { load_average_before: 1.5, busy_cores: 0.5, steal_share: 0.05, cores: 2 });
    }
}
