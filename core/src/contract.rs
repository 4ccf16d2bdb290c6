//! The test suite every transport passes.
//!
//! A network's tests implement [`Harness`] and run [`CHECKS`](checks) over it. All transports of a check live on one
//! thread and are polled in turn, so a check neither needs threads nor measures time: progress is bounded in rounds
//! of polling. A check panics with a message that says which guarantee was broken.
//!
//! ```ignore
//! for (name, check) in antelog_core::contract::checks::<MyHarness>() {
//!     println!("{name}");
//!     check(&mut MyHarness::new());
//! }
//! ```

mod basics;
mod endings;
mod load;
mod rig;

use crate::transport::Transport;

/// Makes the transports and connections of one network.
pub trait Harness {
    /// The transport under test.
    type T: Transport;

    /// A transport for peers `0..peers_max` without connections.
    fn transport(&mut self, peers_max: u16) -> Self::T;

    /// Both ends of a fresh connection.
    #[allow(clippy::type_complexity)] // two links, said in full
    fn link(&mut self) -> (<Self::T as Transport>::Link, <Self::T as Transport>::Link);

    /// Called once per round of polling: a simulated network moves here.
    fn step(&mut self) {}
}

/// One check of the suite. Panics if the transport breaks the contract.
pub type Check<H> = fn(&mut H);

/// All checks with their names.
pub fn checks<H: Harness>() -> Vec<(&'static str, Check<H>)> {
    vec![
        ("T1 operations take effect in issue order", basics::order),
        ("T2 bytes are visible before their notification", basics::visibility),
        ("T3 placed covers all earlier operations", basics::placed_is_cumulative),
        ("T3 placed is never early", basics::placed_is_not_early),
        ("T3 every placed is of a token, rising", basics::placed_rises),
        ("T5 polls fill at most the slice given", basics::bounded_polls),
        ("waiting is announced only when nothing is there", basics::prepare_wait),
        ("messages stay readable until released", basics::held_messages),
        ("T4 a full transport refuses without effect", load::full_without_effect),
        ("T4 every accepted message arrives once", load::messages_arrive_once),
        ("writes of megabytes arrive whole", load::big_writes),
        ("sixteen peers at a time", load::many_peers),
        ("random traffic against a model", load::random_traffic),
        ("T6 nothing lands after a fence", endings::fence),
        ("T6 a fence before the first poll", endings::fence_at_once),
        ("T7 a lost peer is reported once and can come back", endings::down_and_back),
        ("T7 readmission replaces a living connection", endings::readmission),
        ("writes outside exposed regions end the connection", endings::outside),
        ("ends while operations are under way", endings::ends_under_load),
    ]
}
