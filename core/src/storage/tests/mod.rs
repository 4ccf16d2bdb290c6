//! Tests of the storage, on the simulated disk and on real ones.

mod basics;
mod model;
mod real;
mod rig;
mod rot;
mod torn;
