//! A device that refuses requests it was promised to take.

use std::cell::Cell;
use std::os::fd::RawFd;
use std::rc::Rc;

use antelog_net_rdma::provider::{
    Access, Completion, DeviceEvent, End, MemoryId, PortAddress, Provider, ProviderError, QueueId, Receive,
    RemoteMemory, Request,
};

use super::*;

/// Takes requests and then says that it did not: nobody can tell how many were taken.
struct Faulty {
    device: Emulated,
    fails: Rc<Cell<bool>>,
}

impl Provider for Faulty {
    fn limits(&self) -> Limits {
        self.device.limits()
    }

    fn port(&self) -> PortAddress {
        self.device.port()
    }

    fn register(&mut self, region: &Arc<Region>, access: Access) -> Result<MemoryId, ProviderError> {
        self.device.register(region, access)
    }

    fn remote(&self, memory: MemoryId) -> RemoteMemory {
        self.device.remote(memory)
    }

    fn create(&mut self, queue: QueueId, requests: usize, receives: usize) -> Result<(u32, usize), ProviderError> {
        self.device.create(queue, requests, receives)
    }

    fn connect(&mut self, queue: QueueId, psn: u32, peer: &End, patience: Patience) -> Result<(), ProviderError> {
        self.device.connect(queue, psn, peer, patience)
    }

    fn post(&mut self, queue: QueueId, requests: &[Request]) -> Result<(), ProviderError> {
        self.device.post(queue, requests)?;
        let error = ProviderError { text: "the queue took no requests".into(), errno: libc::ENOMEM };
        if self.fails.get() { Err(error) } else { Ok(()) }
    }

    fn post_receives(&mut self, queue: QueueId, receives: &[Receive]) -> Result<(), ProviderError> {
        self.device.post_receives(queue, receives)
    }

    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        self.device.poll(completions)
    }

    fn fail(&mut self, queue: QueueId) {
        self.device.fail(queue);
    }

    fn destroy(&mut self, queue: QueueId) {
        self.device.destroy(queue);
    }

    fn arm(&mut self) {}

    fn wait_fd(&self) -> Option<RawFd> {
        None
    }

    fn event(&mut self) -> Option<DeviceEvent> {
        self.device.event()
    }

    fn now_ns(&self) -> u64 {
        self.device.now_ns()
    }
}

/// What the device may have taken is not handed over again, the pair ends, and the host is left alone for a while.
#[test]
fn nothing_is_handed_over_twice_when_the_device_refuses() {
    let options = Options::default();
    let mut rig = Rig::new(1, &options);
    let fails = Rc::new(Cell::new(false));
    let limits = Limits { message_bytes_max: 1 << 20, completions: options.completions(2), requests_max: 1 << 10 };
    let device = rig.fabric.device(Grant { limits, queues: 2, inline_bytes: 64, lockable_bytes: u64::MAX });
    let device = Faulty { device, fails: fails.clone() };
    let health = rig.a.health.clone();
    let mut sender = RdmaTransport::new(tcp(), Some(device), 2, options, health.clone());
    let (to_b, to_a) = rig.links.link();
    sender.admit(PEER, Link { carrier: to_b, rdma: Some(HOST) }, &[]);
    rig.b.admit(to_a, true);
    let mut events = Vec::new();
    let mut round = |sender: &mut RdmaTransport<Faulty, TcpTransport>, b: &mut Side| {
        let mut some = [NOTHING; 8];
        let count = sender.poll(&mut some);
        events.extend_from_slice(&some[..count]);
        sender.flush();
        b.poll();
        events.len()
    };
    for _ in 0..ROUNDS_MAX {
        round(&mut sender, &mut rig.b);
        if sender.is_pair(PEER) && rig.b.is_up() {
            break;
        }
    }
    // More than one poll reports: the end waits for it, and the pair looks alive until then.
    (0..20).for_each(|_| rig.b.transport.send(PEER, b"late").unwrap());
    rig.b.transport.flush();
    fails.set(true);
    for _ in 0..3 {
        sender.send(PEER, b"once").unwrap();
    }
    sender.flush();
    assert_eq!(sender.send(PEER, b"never"), Err(Full));
    sender.flush();
    (0..2000).for_each(|_| rig.b.poll());
    (0..2000).for_each(|_| assert!(round(&mut sender, &mut rig.b) <= 21));
    assert_eq!(events.len(), 21);
    assert_eq!(events[20], Event::PeerDown { peer: PEER, reason: DownReason::Io(libc::ENOMEM) });
    assert!(rig.b.messages().len() <= 3);
    assert_eq!(rig.b.downs().len(), 1);
    assert_eq!(health.avoided(HOST).as_deref(), Some("the queue took no requests"));
}
