//! antelog's load generator and measurements: what a latency is, how it is recorded and how it is reported.
//!
//! Reading order:
//!
//! * [`log`] — what is measured: anything that appends and delivers; and the clock, which tests replace by virtual time.
//! * [`load`] — open-loop writers with intended send times.
//! * [`consumer`] — a consumer that computes on batches and releases outputs once they are confirmed.
//! * [`stats`] — the histograms; [`counted`] — what the cluster counts about itself.
//! * [`run`] — writers and consumer in one loop, for a given time.
//! * [`demo`] — modes beside each other: interleaved repetitions, gains, and the model's prediction next to them.
//! * [`grid`] — demos over many computations and scenarios: where does speculation lose?
//! * [`figures`] — the published curves on the simulator: real agents and sessions over modelled delays.
//! * [`hog`] — another program that wants a core.
//! * [`mod@bench`] — how many records a cluster moves, one record beside the bare network, and an idle cluster.
//! * [`floor`] — what loopback sockets and memory alone cost on the same cores.
//! * [`outside`] — what else the machine was doing meanwhile.
#![forbid(unsafe_code)]

pub mod bench;
pub mod consumer;
pub mod counted;
pub mod demo;
#[cfg(test)]
mod fake;
pub mod figures;
pub mod floor;
pub mod grid;
pub mod hog;
pub mod load;
pub mod log;
pub mod outside;
pub mod run;
pub mod stats;
