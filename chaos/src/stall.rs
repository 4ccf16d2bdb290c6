//! Time without confirmations: how long nobody was told that anything more is bound.

use crate::history::{History, Told};

/// When the confirmed prefix grew, for whichever subscriber was told first; sorted.
pub fn progress(history: &History) -> Vec<u64> {
    let mut told: Vec<(u64, u64)> = Vec::new();
    for subscriber in history.subscribers.values() {
        told.extend(subscriber.iter().filter_map(|(at_ns, told)| match told {
            Told::Confirm { upto } => Some((*at_ns, *upto)),
            _ => None,
        }));
    }
    told.sort_unstable();
    let mut highest = 0;
    told.retain(|(_, upto)| {
        let grew = *upto > highest;
        highest = highest.max(*upto);
        grew
    });
    told.into_iter().map(|(at_ns, _)| at_ns).collect()
}

/// The longest time without progress that began or ended within a span of time, in nanoseconds.
pub fn longest(progress: &[u64], (from_ns, to_ns): (u64, u64)) -> u64 {
    let first = progress.partition_point(|at| *at <= from_ns).saturating_sub(1);
    let last = progress.partition_point(|at| *at < to_ns);
    progress[first..(last + 1).min(progress.len())].windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_stall_is_what_no_subscriber_sees_an_end_of() {
        let confirm = |at_ns, upto| (at_ns, Told::Confirm { upto });
        let subscribers = BTreeMap::from([
            ("reader-0".to_owned(), vec![confirm(10, 1), confirm(20, 2), confirm(95, 9)]),
            ("reader-1".to_owned(), vec![confirm(12, 1), confirm(40, 3), confirm(90, 8)]),
        ]);
        let progress = progress(&History { subscribers, ..History::default() });
        assert_eq!(progress, [10, 20, 40, 90, 95]);
        assert_eq!(longest(&progress, (41, 80)), 50);
        assert_eq!(longest(&progress, (21, 30)), 20);
        assert_eq!(longest(&progress, (91, 200)), 5);
        assert_eq!(longest(&[], (0, 9)), 0);
    }
}
