//! The curves of the literature, from the production agents and session on virtual time: what a latency model's delays
//! make of them. No wall clock is read and no latency is computed from a formula, so figures are exact and repeat.
//!
//! * [`model`] — how long links take; * [`setup`] — one cluster, its load and what befalls it; * [`drive`] — one run;
//! * [`series`] — exact percentiles; * [`paper`] — the published numbers; * [`curves`], [`changes`], [`grid`] — figures.

pub mod changes;
pub mod curves;
pub mod drive;
pub mod grid;
pub mod model;
pub mod paper;
pub mod series;
pub mod setup;
pub mod stalls;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering as Atomic};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use self::model::Model;

/// A figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// End-to-end latency by computation; delivery and append by shards.
    Compute,
    /// End-to-end latency by number of shards.
    Shards,
    /// Bursts on one shard.
    Burst,
    /// End-to-end latency by window length.
    Window,
    /// One shard's reports come late.
    Straggler,
    /// Rates change.
    Rate,
    /// A shard joins.
    Join,
    /// Somebody is killed.
    Stalls,
    /// Where speculation loses.
    Grid,
}

impl Figure {
    /// All of them.
    pub const ALL: [Figure; 9] = [
        Figure::Compute,
        Figure::Shards,
        Figure::Burst,
        Figure::Window,
        Figure::Straggler,
        Figure::Rate,
        Figure::Join,
        Figure::Stalls,
        Figure::Grid,
    ];

    /// The name used on the command line and in output.
    pub const fn name(self) -> &'static str {
        match self {
            Figure::Compute => "compute",
            Figure::Shards => "shards",
            Figure::Burst => "burst",
            Figure::Window => "window",
            Figure::Straggler => "straggler",
            Figure::Rate => "rate",
            Figure::Join => "join",
            Figure::Stalls => "stalls",
            Figure::Grid => "grid",
        }
    }

    /// The figure with this name.
    pub fn from_name(name: &str) -> Option<Figure> {
        Figure::ALL.into_iter().find(|figure| figure.name() == name)
    }

    /// Runs it.
    ///
    /// # Errors
    /// One line: no memory, or a cluster did what it must not.
    pub fn run(self, options: &Options) -> Result<Vec<Table>, String> {
        match self {
            Figure::Compute => curves::compute(options),
            Figure::Shards => curves::shards(options),
            Figure::Burst => curves::burst(options),
            Figure::Window => curves::window(options),
            Figure::Straggler => changes::straggler(options),
            Figure::Rate => changes::rate(options),
            Figure::Join => changes::join(options),
            Figure::Stalls => stalls::stalls(options),
            Figure::Grid => grid::grid(options),
        }
    }
}

/// How to run a figure.
#[derive(Clone, Debug)]
pub struct Options {
    /// The latency model.
    pub model: Model,
    /// Less load and fewer seeds.
    pub quick: bool,
    /// Threads.
    pub jobs: usize,
}

impl Options {
    /// Seeds of each point: phases of tickers and writers differ between them, and their samples are merged.
    pub fn seeds(&self) -> u64 {
        if self.quick { 2 } else { 6 }
    }

    /// Warm-up and measured time of a point, in nanoseconds.
    pub fn times(&self) -> (u64, u64) {
        if self.quick { (150_000_000, 200_000_000) } else { (250_000_000, 500_000_000) }
    }

    /// Does the work items on all threads; results are in the items' order.
    ///
    /// # Errors
    /// The first item's that failed.
    pub fn spread<T: Sync, R: Send>(
        &self,
        items: &[T],
        work: impl Fn(&T) -> Result<R, String> + Sync,
    ) -> Result<Vec<R>, String> {
        let results: Vec<Mutex<Option<Result<R, String>>>> = items.iter().map(|_| Mutex::default()).collect();
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let worker = || {
            loop {
                let at = next.fetch_add(1, Atomic::Relaxed);
                let (Some(item), false) = (items.get(at), failed.load(Atomic::Relaxed)) else { return };
                let result = work(item);
                failed.fetch_or(result.is_err(), Atomic::Relaxed);
                *results[at].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..self.jobs.max(1) {
                scope.spawn(worker);
            }
        });
        let taken = results.into_iter().filter_map(|r| r.into_inner().unwrap_or_else(PoisonError::into_inner));
        taken.collect()
    }
}

/// A figure's result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Table {
    /// What it shows, with units.
    pub title: String,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// Rows, a cell for each column.
    pub rows: Vec<Vec<String>>,
    /// What else is to be said.
    pub notes: Vec<String>,
}

impl Table {
    /// A table without rows.
    pub fn new(title: impl Into<String>, columns: &[&str]) -> Table {
        let columns = columns.iter().map(|c| (*c).to_owned()).collect();
        Table { title: title.into(), columns, rows: Vec::new(), notes: Vec::new() }
    }

    /// The cell of a row in the column of this name.
    pub fn cell(&self, row: usize, column: &str) -> Option<&str> {
        let at = self.columns.iter().position(|c| c == column)?;
        self.rows.get(row)?.get(at).map(String::as_str)
    }

    /// As [`cell`](Self::cell), as a number.
    pub fn number(&self, row: usize, column: &str) -> Option<f64> {
        self.cell(row, column)?.parse().ok()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        let width = |at: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(at));
            cells.chain([&self.columns[at]]).map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        for row in std::iter::once(&self.columns).chain(&self.rows) {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
            writeln!(f, "  {}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "  {note}"))
    }
}
