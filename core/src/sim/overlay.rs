//! What lies between the agents and the simulated network: nothing, or another transport that uses it as its carrier. So a
//! transport of another crate is judged by the same clusters, faults and oracle.

use super::network::{SimLink, SimTransport};
use crate::transport::Transport;

/// Transports over the simulated network. Everything is told to it on virtual time, and it draws from its own generator.
pub trait Overlay {
    /// What agents and sessions use.
    type Transport: Transport;

    /// A transport for peers `0..peers_max` over `carrier`, whose owner is `thread`.
    fn transport(&mut self, carrier: SimTransport, thread: usize, peers_max: u16) -> Self::Transport;

    /// Both ends of a new connection, the caller's first, between agents on these threads.
    fn link(&mut self, carriers: (SimLink, SimLink), threads: (usize, usize)) -> (LinkOf<Self>, LinkOf<Self>);

    /// It is so late: called before anything happens. `faulty`: faults may still be made.
    fn at(&mut self, _now_ns: u64, _faulty: bool) {}

    /// When [`step`](Self::step) is to be called, if something is under way that moves by itself. Asked after everything
    /// that happens while no step is planned.
    fn next_ns(&mut self) -> Option<u64> {
        None
    }

    /// Moves what is under way; the threads for whose transports there is something.
    fn step(&mut self) -> Vec<usize> {
        Vec::new()
    }

    /// Lines that the transports wrote since the last call.
    fn said(&mut self) -> Vec<String> {
        Vec::new()
    }

    /// What was reached and how often: asked once, at the end.
    fn reached(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// The link of an overlay's transport.
pub type LinkOf<O> = <<O as Overlay>::Transport as Transport>::Link;

/// No overlay: the simulated network itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain;

impl Overlay for Plain {
    type Transport = SimTransport;

    fn transport(&mut self, carrier: SimTransport, _: usize, _: u16) -> SimTransport {
        carrier
    }

    fn link(&mut self, carriers: (SimLink, SimLink), _: (usize, usize)) -> (SimLink, SimLink) {
        carriers
    }
}
