//! The simulated control thread: it makes the connections between nodes, hears of their loss, makes them again after a
//! pause, and answers the calls of clients. Production's is threads that block in hand-shakes; agents see the same of it,
//! admissions in their mailboxes.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use antelog_protocol::ClientId;
use antelog_protocol::wire::session::ClusterMap;

use super::network::Shared;
use super::queue::What;
use crate::client::session::{Dialed, Dialer};
use crate::node::Waker;
use crate::transport::PeerId;

/// A connection between two nodes that is kept up: the caller makes it again when it hears of its loss.
#[derive(Debug)]
pub(super) struct Line<L> {
    /// The caller's number among the agents, and its name in notices.
    pub(super) caller: usize,
    pub(super) caller_name: String,
    /// The called node's number at the caller.
    pub(super) to_peer: PeerId,
    pub(super) callee: usize,
    /// The caller's number at the called node.
    pub(super) from_peer: PeerId,
    pub(super) kind: super::network::LinkKind,
    pub(super) pause_ns: u64,
    /// The newest connection.
    pub(super) link: Option<u32>,
    /// Which of its ends were admitted and not heard to be lost: bits by side.
    pub(super) up: u8,
    /// Counts deaths and births of the caller: what was planned before is void.
    pub(super) life: u32,
    /// Ends on their way to the agents: the connection's number, which end it is (0 is the caller's), and the end.
    pub(super) ends: Vec<(u32, u8, L)>,
}

/// A client's call to a gate.
#[derive(Debug)]
pub(super) struct Call<L> {
    pub(super) slot: usize,
    pub(super) address: String,
    pub(super) client: ClientId,
    pub(super) ring_bytes: usize,
    /// The gate's end, on its way to the gate.
    pub(super) end: Option<L>,
}

/// Where a session's answers wait.
#[derive(Debug)]
pub(super) struct Slot<L> {
    pub(super) thread: usize,
    pub(super) answers: VecDeque<Answered<L>>,
}

/// An answer to a call: link and map, or why not.
#[derive(Debug)]
pub(super) struct Answered<L> {
    pub(super) address: String,
    pub(super) result: Result<L, String>,
}

/// Calls of clients under way.
#[derive(Debug)]
pub(super) struct Calls<L> {
    pub(super) calls: Vec<Call<L>>,
    pub(super) slots: Vec<Slot<L>>,
    pub(super) map: ClusterMap,
    /// Capacity of a gate's incoming ring, in bytes.
    pub(super) gate_ring_bytes: usize,
    /// Time that a call takes, in nanoseconds.
    pub(super) call_ns: u64,
}

/// Dials for one session.
pub struct SimDialer<L> {
    network: Shared,
    calls: Rc<RefCell<Calls<L>>>,
    slot: usize,
    client: ClientId,
    ring_bytes: usize,
}

impl<L> SimDialer<L> {
    pub(super) fn new(
        network: &Shared,
        calls: &Rc<RefCell<Calls<L>>>,
        thread: usize,
        client: ClientId,
        ring_bytes: usize,
    ) -> SimDialer<L> {
        let mut list = calls.borrow_mut();
        list.slots.push(Slot { thread, answers: VecDeque::new() });
        let slot = list.slots.len() - 1;
        SimDialer { network: network.clone(), calls: calls.clone(), slot, client, ring_bytes }
    }
}

impl<L> Dialer<L> for SimDialer<L> {
    fn request(&mut self, address: &str) {
        let mut calls = self.calls.borrow_mut();
        let (slot, client, ring_bytes) = (self.slot, self.client, self.ring_bytes);
        calls.calls.push(Call { slot, address: address.to_owned(), client, ring_bytes, end: None });
        let call = calls.calls.len() - 1;
        let mut network = self.network.borrow_mut();
        let at_ns = network.issue_ns + calls.call_ns;
        network.plan(at_ns, What::DialGate { call });
    }

    fn take(&mut self) -> Option<Dialed<L>> {
        let mut calls = self.calls.borrow_mut();
        let Answered { address, result } = calls.slots[self.slot].answers.pop_front()?;
        let result = result.map(|link| (link, calls.map.clone(), calls.gate_ring_bytes, 1));
        Some(Dialed { address, result })
    }

    fn waker(&mut self, _: Waker) {}
}

impl<L> Drop for SimDialer<L> {
    fn drop(&mut self) {
        if let Ok(mut calls) = self.calls.try_borrow_mut() {
            calls.slots[self.slot].answers.clear();
        }
    }
}
