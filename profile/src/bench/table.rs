//! The bench's results as text.

use std::fmt::Write as _;

use super::Bench;
use crate::outside::OutsideLoad;
use crate::stats::Spread;

fn spread(spread: &Spread, digits: usize) -> String {
    let Spread { median, min, max, .. } = spread;
    format!("{median:.digits$} ({min:.digits$}–{max:.digits$})")
}

impl Bench {
    /// The results as a text table, ending in a line break.
    pub fn table(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:<11}{:>7}{:>23}{:>28}{:>30}{:>28}",
            "", "window", "thousand records/s", "delivery p50 µs", "delivery p99 µs", "append p50 µs"
        );
        for row in &self.rows {
            let Spread { median, min, max, count } = row.records_per_s;
            let rate = Spread { median: median / 1e3, min: min / 1e3, max: max / 1e3, count };
            let _ = writeln!(
                text,
                "{:<11}{:>7}{:>23}{:>28}{:>30}{:>28}",
                row.mode,
                row.window,
                spread(&rate, 1),
                spread(&row.delivery_p50_us, 1),
                spread(&row.delivery_p99_us, 1),
                spread(&row.append_p50_us, 1)
            );
        }
        if let Some(floor_us) = &self.floor_us {
            let _ = writeln!(
                text,
                "\nfloor: a TCP round trip between the same cores, spinning, p50 {} µs",
                spread(floor_us, 1)
            );
            for row in &self.rows {
                if let Some(by_floor) = &row.delivery_by_floor {
                    let _ =
                        writeln!(text, "  {}: one record's delivery p50 is {} × that", row.mode, spread(by_floor, 2));
                }
            }
        }
        if let Some(idle) = &self.idle {
            let share = Spread { median: idle.cpu_share.median * 100.0, ..idle.cpu_share };
            let share = Spread { min: share.min * 100.0, max: share.max * 100.0, ..share };
            let _ = writeln!(
                text,
                "idle, parked: {} % of a core, {} cuts, {} slots written, {} reports/s",
                spread(&share, 2),
                idle.cuts,
                idle.slots,
                spread(&idle.reports_per_s, 1)
            );
        }
        let consumers = if self.merged { "one subscription, merged" } else { "one subscription per shard" };
        let _ = writeln!(
            text,
            "\n{}\n{} shards, records of {} bytes, {consumers}; every record's bytes, order and count checked\n\
             median (least–greatest) of {} interleaved repetitions, each on a cluster of its own",
            self.cluster, self.shards, self.record_bytes, self.repetitions
        );
        if let Some(OutsideLoad { load_average_before, busy_cores, steal_share, cores }) = self.outside_load {
            let steal = steal_share * 100.0;
            let _ = writeln!(
                text,
                "outside load: load average {load_average_before:.2} before; others kept {busy_cores:.2} of {cores} cores \
                 busy, {steal:.1} % stolen"
            );
        }
        text
    }
}
