//! Why a pair is down, and how long its end takes, when its queue pair fails: on the emulated fabric, over the simulated
//! network as the carrier.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use antelog_core::mem::Region;
use antelog_core::sim::network::{NetKnobs, Network, Shared, SimTransport, Way, advance, connect};
use antelog_core::transport::{DownReason, Event, PeerId, RemoteOffset, Transport};
use antelog_net_rdma::emulated::{Behaviour, DeviceId, Emulated, Fabric, Grant};
use antelog_net_rdma::health::Health;
use antelog_net_rdma::provider::{Patience, QueueId};
use antelog_net_rdma::{Link, Options, RdmaTransport};

const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const PEER: PeerId = PeerId(0);
const NOWHERE: Event = Event::PeerDown { peer: PEER, reason: DownReason::Closed };

const START: RemoteOffset = RemoteOffset { region: 0, offset: 0 };

type Side = RdmaTransport<Emulated, SimTransport>;

/// Two transports with a pair that is up.
struct Rig {
    network: Shared,
    fabric: Fabric,
    sides: [Side; 2],
    devices: [DeviceId; 2],
}

impl Rig {
    fn new(seed: u64) -> Rig {
        let ways = [Way { base_ns: 5_000, jitter_ns: 0 }; 3];
        let knobs =
            NetKnobs { nic: false, ways, long_ns: 0, long_one_in: 0, capacity: (64, 64), targets_overtake: false };
        let network = Network::new(seed, knobs, false);
        let behaviour =
            Behaviour { step_on_poll: false, step_on_drain: true, completion_in: 20, ..Behaviour::default() };
        let fabric = Fabric::new(seed, behaviour);
        let patience = Patience { ack_timeout: 1, retries: 1 };
        let options = Options { requests: 64, receives: 64, patience, ..Options::default() };
        let devices = [fabric.device(Grant::default()), fabric.device(Grant::default())];
        let ids = [devices[0].id(), devices[1].id()];
        let sides = devices.map(|device| {
            let carrier = SimTransport::new(&network, 0, 1);
            let health = Health::new(Arc::new(|line: &str| println!("    {line}")));
            RdmaTransport::new(carrier, Some(device), 1, options.clone(), health)
        });
        let mut rig = Rig { network, fabric, sides, devices: ids };
        let (here, there) = connect(&rig.network);
        for (side, carrier) in rig.sides.iter_mut().zip([here, there]) {
            side.admit(PEER, Link { carrier, rdma: Some(HOST) }, &[Region::new(4096).unwrap()]);
        }
        while !rig.sides.iter().all(|side| side.is_pair(PEER)) {
            assert_eq!(rig.go_on(), [None, None]);
        }
        rig
    }

    /// A step of everything; what each side has to report.
    fn go_on(&mut self) -> [Option<Event>; 2] {
        self.fabric.step();
        advance(&self.network, 200);
        let Rig { sides, .. } = self;
        [0, 1].map(|side| {
            let mut events = [NOWHERE; 1];
            (sides[side].poll(&mut events) == 1).then_some(events[0])
        })
    }

    /// Goes on until side 0 is told that its peer is down, and why. Side 1 does not look meanwhile, and ends nothing.
    fn down(&mut self) -> DownReason {
        for _ in 0..100_000 {
            self.fabric.step();
            let mut events = [NOWHERE; 1];
            if self.sides[0].poll(&mut events) == 1
                && let Event::PeerDown { reason, .. } = events[0]
            {
                return reason;
            }
        }
        panic!("the peer is not down");
    }
}

/// The receives are flushed as if the peer had broken the rules, but it is the device that failed.
#[test]
fn a_queue_that_the_device_fails_is_nobodys_breach() {
    for seed in 0..50 {
        let mut rig = Rig::new(seed);
        rig.fabric.break_queue(rig.devices[0], QueueId(0));
        assert_eq!(rig.down(), DownReason::Io(libc::EIO), "seed {seed}");
    }
}

/// The flushed receives may be seen before the request whose failure flushed them, or the other way round.
#[test]
fn a_peer_out_of_reach_is_no_breach_whatever_completes_first() {
    for seed in 0..50 {
        let mut rig = Rig::new(seed);
        rig.fabric.lose(rig.devices[1]);
        for _ in 0..=seed % 40 {
            rig.sides[0].write_inline(PEER, &[1; 8], START, None).unwrap();
        }
        rig.sides[0].flush();
        assert_eq!(rig.down(), DownReason::Io(libc::ETIMEDOUT), "seed {seed}");
    }
}

/// The peer writes where nothing is exposed to it.
#[test]
fn a_refused_request_is_the_peers_breach_even_with_own_requests_under_way() {
    for seed in 0..50 {
        let mut rig = Rig::new(seed);
        for _ in 0..seed % 20 {
            rig.sides[0].write_inline(PEER, &[1; 8], START, None).unwrap();
        }
        rig.sides[0].flush();
        let outside = RemoteOffset { region: 3, offset: 0 };
        rig.sides[1].write_inline(PEER, &[1; 8], outside, None).unwrap();
        rig.sides[1].flush();
        assert_eq!(rig.down(), DownReason::Protocol, "seed {seed}");
    }
}

/// What a queue flushes comes at once: nobody waits for completions that were taken before.
#[test]
fn the_end_of_a_pair_takes_no_longer_than_its_flushes() {
    for seed in 0..20 {
        let mut rig = Rig::new(seed);
        let from_ns = rig.fabric.now_ns();
        rig.fabric.break_queue(rig.devices[0], QueueId(0));
        rig.down();
        let took_ns = rig.fabric.now_ns() - from_ns;
        assert!(took_ns < 1_000_000, "seed {seed}: {took_ns} ns");
    }
}
