//! A replica's log on disk: the same stream of bytes at the same absolute offsets as in its region, cut into segment files.
//!
//! * [`LogStore`] writes the region's bytes behind whoever appends or verifies them, makes them durable in groups, and
//!   recovers them; * [`Reader`] finds old entries by slot, [`ReaderThread`] runs one beside a duty cycle;
//! * [`Disk`] is the seam below: [`UringDisk`] is a real directory, [`SimDisk`] a simulated one.
//!
//! See "Segments on disk" in DESIGN.md.

mod catalog;
mod disk;
mod error;
mod format;
mod jobs;
mod keep;
mod mark;
mod mend;
mod reader;
mod recover;
mod repair;
mod retention;
mod rewrite;
mod sim_disk;
mod store;
#[cfg(test)]
mod tests;
mod thread;
mod uring;
mod writes;

pub use disk::{BLOCK_BYTES, Completion, Disk, FILES_MAX, Name, OPERATIONS_MAX, Op};
pub(crate) use error::is_full;
pub use error::{AFTER_DAMAGE, StoreError};
pub use format::{CLUSTER_BYTES_MAX, HEADER_BYTES, Identity, Layout, NOTE_BYTES_MAX, Owner};
pub use keep::{OldEntries, OldEntriesPolled, OldEntriesThread, OldRead, Store};
pub use mark::{Mark, entry_bytes};
pub use mend::Rot;
pub use reader::{Answer, ReadError, Reader, Request};
pub use recover::{Recovered, refill_margin};
pub use retention::{Keep, Span};
pub use sim_disk::{Faults, SimDisk, SimHandle};
pub use store::{Condition, Damage, LogStore, StoreConfig, Verify};
pub use thread::{ReaderClient, ReaderThread};
pub use uring::UringDisk;
