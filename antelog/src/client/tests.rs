//! The library against a gate on loopback that keeps one shard's log in memory.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::thread;

use antelog_core::access::Access;
use antelog_core::channel::Ring;
use antelog_core::handshake::{Hello, Refusal as Rejection, RefusalCode, Welcome};
use antelog_core::mem::Region;
use antelog_core::path::Path;
use antelog_core::transport::{Event as Network, PeerId, Transport};
use antelog_net_tcp::{Accept, Listener, ListenerHandle, Options, TcpLink, TcpTransport};
use antelog_protocol::ledger::grant_head;
use antelog_protocol::wire::order::{ORDER_ENTRY_BYTES_MAX, encode_cut, encode_grant};
use antelog_protocol::wire::session::{ReadResult, Reply, Request, SESSION_HEAD_BYTES_MAX, ShardGates};
use antelog_protocol::{CutPoint, Lsn, Member, WindowMode};

use super::*;
use crate::Event;

const RING: usize = 64 << 10;
const CUTS: u32 = 1000;

/// Answers hand-shakes and hands connections to the gate's thread.
struct Door {
    links: Mutex<mpsc::Sender<TcpLink>>,
    map: Mutex<Vec<u8>>,
}

impl Accept for Door {
    fn decide(&self, hello: &Hello, _: SocketAddr, _: Option<usize>) -> Result<Welcome, Rejection> {
        if !["", "test"].contains(&hello.cluster.as_str()) {
            return Err(Rejection::new(RefusalCode::Cluster, "this is cluster \"test\""));
        }
        let payload = self.map.lock().unwrap().clone();
        Ok(Welcome {
            incarnation: 1,
            ring_bytes: RING as u64,
            record_bytes_max: 1000,
            log_bytes: 0,
            access: Access::Admin,
            path: Path::Tcp,
            path_reason: String::new(),
            payload,
        })
    }

    fn established(&self, hello: Hello, _: Welcome, _: Option<usize>, link: TcpLink) {
        // The first contact asks for the smallest ring and nothing else.
        if hello.ring_bytes == RING as u64 {
            self.links.lock().unwrap().send(link).unwrap();
        }
    }

    fn refused(&self, _: SocketAddr, _: &str) {}
}

/// A gate with shard 0, whose slots are all positions.
struct Gate {
    address: String,
    stop: Arc<AtomicBool>,
    drop_connection: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _listener: ListenerHandle,
}

impl Gate {
    fn start() -> Gate {
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().to_string();
        let map = ClusterMap {
            tick_ns: 1_000_000,
            record_bytes_max: 1000,
            outstanding_max: 16,
            suspect_ns: 200_000_000,
            shards: vec![ShardGates { shard: ShardId(0), gates: vec![(0, address.clone())] }],
            ordering: "fixed".into(),
        };
        let (links, arriving) = mpsc::channel();
        let door = Arc::new(Door { links: Mutex::new(links), map: Mutex::new(map.encode()) });
        let listener = listener.serve(door).unwrap();
        let (stop, drop_connection) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (stopping, dropping) = (stop.clone(), drop_connection.clone());
        let thread = thread::spawn(move || serve(&arriving, &stopping, &dropping));
        Gate { address, stop, drop_connection, thread: Some(thread), _listener: listener }
    }

    fn connect(&self) -> Client {
        Client::connect(ClientOptions::new([&self.address])).unwrap()
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// What the gate owes its client on this connection.
#[derive(Default)]
struct Due {
    streams: Vec<(u32, usize, u64)>,
    follows: bool,
    cuts_sent: u32,
    replies: Vec<Vec<u8>>,
}

impl Due {
    fn say(&mut self, reply: &Reply<'_>) {
        let mut head = [0; SESSION_HEAD_BYTES_MAX];
        let (len, body) = reply.encode(&mut head);
        self.replies.push([&head[..len], body].concat());
    }

    fn act(&mut self, log: &mut Vec<Vec<u8>>, request: &Request<'_>) {
        match *request {
            Request::Append { shard, seq, record, .. } => {
                if seq as usize == log.len() {
                    log.push(record.to_vec());
                }
                assert!((seq as usize) < log.len(), "one session's appends come without gaps");
                self.say(&Reply::Acknowledged { shard, seq, position: Position(seq) });
            }
            Request::Subscribe { stream, from, credit_bytes, .. } => {
                self.streams.push((stream, from.0 as usize, credit_bytes));
            }
            Request::Unsubscribe { stream } => self.streams.retain(|(s, ..)| *s != stream),
            Request::Consumed { .. } | Request::Cancel { .. } => {}
            Request::Follow => {
                let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
                let head = grant_head(0, WindowMode::Fixed, 0, CUTS, Position(0));
                let member = Member { shard: ShardId(0), quota: 1, first_lsn: Lsn(0), open: true };
                let len = encode_grant(&mut buffer, head, &[member]);
                self.say(&Reply::Snapshot { index: 1, base: Position(0), entries: 1, view: 0 });
                self.say(&Reply::Order { index: 1, entry: &buffer[..len] });
                (self.follows, self.cuts_sent) = (true, 0);
            }
            Request::Read { token, position } => {
                let record = log.get(position.0 as usize);
                if let Some(record) = record {
                    self.say(&Reply::ReadIs { token, result: ReadResult::Record(record) });
                }
            }
            Request::Tail { token } => {
                self.say(&Reply::TailIs { token, position: Position(log.len() as u64), index: 0 });
            }
            Request::Unfollow => self.follows = false,
            Request::Outcome { .. } | Request::Change { .. } => panic!("nobody asks for that here"),
        }
    }

    fn deliver(&mut self, log: &[Vec<u8>]) {
        for at in 0..self.streams.len() {
            let (stream, from, _) = self.streams[at];
            for (index, record) in log.iter().enumerate().skip(from) {
                let (lsn, position) = (Lsn(index as u64), Position(index as u64));
                let (client, view) = (ClientId(0), 0);
                let reply = Reply::Deliver { stream, lsn, position, view, speculative: true, client, seq: 0, record };
                self.say(&reply);
            }
            self.streams[at].1 = from.max(log.len());
        }
        while self.follows && (self.cuts_sent as usize) < log.len() {
            self.cuts_sent += 1;
            let mut buffer = [0; 64];
            let len = encode_cut(&mut buffer, 0, CutPoint { window: 0, cut: self.cuts_sent, prefix: 0 });
            self.say(&Reply::Order { index: 1 + u64::from(self.cuts_sent), entry: &buffer[..len] });
        }
    }
}

fn serve(arriving: &mpsc::Receiver<TcpLink>, stop: &AtomicBool, drop_connection: &AtomicBool) {
    let peer = PeerId(0);
    let mut tcp = TcpTransport::new(1, Options { messages: Some(1), ..Options::default() }).unwrap();
    let (incoming, staging) = (Region::new(Ring::region_bytes(RING)).unwrap(), Region::new(RING).unwrap());
    let key = tcp.register(staging.clone());
    let mut ring = Ring::new(incoming.clone(), staging, key, RING, RING);
    let mut log = Vec::new();
    let (mut due, mut up) = (Due::default(), false);
    while !stop.load(Ordering::Relaxed) {
        if let Ok(link) = arriving.try_recv() {
            tcp.fence(peer);
            ring.reset();
            tcp.admit(peer, link, std::slice::from_ref(&incoming));
            (due, up) = (Due::default(), true);
        }
        let mut events = [Network::Notified { peer, value: 0 }; 16];
        let count = tcp.poll(&mut events);
        if events[..count].iter().any(|event| matches!(event, Network::PeerDown { .. })) {
            up = false;
        }
        if drop_connection.swap(false, Ordering::Relaxed) {
            tcp.fence(peer);
            up = false;
        }
        if up {
            while let Some(message) = ring.peek().unwrap() {
                due.act(&mut log, &Request::decode(message).unwrap());
                ring.consume();
            }
            due.deliver(&log);
            let fits = due.replies.iter().take_while(|reply| ring.push(&[reply]).is_ok()).count();
            due.replies.drain(..fits);
            ring.publish(&mut tcp, peer);
            ring.credit(&mut tcp, peer);
        }
        tcp.flush();
        if count == 0 {
            thread::sleep(Duration::from_micros(50));
        }
    }
}

#[test]
fn records_are_appended_delivered_confirmed_and_read() {
    let gate = Gate::start();
    let client = gate.connect();
    assert_eq!(client.map().shards.len(), 1);
    let pending: Vec<Pending> =
        (0..100).map(|number| client.append_async(None, format!("record {number}")).unwrap()).collect();
    for (number, pending) in pending.into_iter().enumerate() {
        assert_eq!(pending.wait(), Ok(Position(number as u64)));
    }
    assert_eq!(client.append(ShardId(0), "last"), Ok(Position(100)));
    assert_eq!(client.tail(), Ok(Position(101)));
    let second = Duration::from_secs(1);
    assert_eq!(client.read(Position(7), second), Ok(Slot::Record(b"record 7"[..].into())));
    let unbound = client.read(Position(500), Duration::from_millis(10)).unwrap_err();
    assert!(unbound.to_string().starts_with("no answer to the read of position 500"), "{unbound}");

    let mut subscription = client.subscribe(Scope::All, Position(90)).unwrap();
    let (mut delivered, mut confirmed) = (Vec::new(), Position(90));
    while confirmed < Position(101) {
        match subscription.next_timeout(Duration::from_secs(5)).unwrap().expect("an event in time") {
            Event::Deliver { position, record, .. } => delivered.push((position, record)),
            Event::Confirm { upto } => confirmed = upto,
            Event::Fail { .. } | Event::Unavailable { .. } => panic!("nothing fails here"),
        }
    }
    assert_eq!(delivered.len(), 11);
    assert_eq!(delivered[10], (Position(100), b"last"[..].into()));
    assert_eq!(subscription.try_next(), Ok(None));
}

#[test]
fn a_lost_connection_is_not_noticed_by_writers_and_readers() {
    let gate = Gate::start();
    let client = gate.connect();
    let mut subscription = client.subscribe(Scope::Shard(ShardId(0)), Position(0)).unwrap();
    let writer = {
        let (client, drop_connection) = (client.clone(), gate.drop_connection.clone());
        thread::spawn(move || {
            let mut pending = Vec::new();
            for number in 0..200u32 {
                if number % 50 == 25 {
                    drop_connection.store(true, Ordering::Relaxed);
                }
                pending.push(client.append_async(None, number.to_le_bytes()).unwrap());
            }
            pending.into_iter().map(|p| p.wait().unwrap().0).collect::<Vec<u64>>()
        })
    };
    for number in 0..200u32 {
        let record = loop {
            match subscription.next_timeout(Duration::from_secs(10)).unwrap().expect("an event in time") {
                Event::Deliver { record, .. } => break record,
                _ => continue,
            }
        };
        assert_eq!(*record, number.to_le_bytes(), "once and in order");
    }
    assert_eq!(writer.join().unwrap(), (0..200).collect::<Vec<u64>>());
}

#[test]
fn several_threads_share_a_client() {
    let gate = Gate::start();
    let client = gate.connect();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let client = client.clone();
            thread::spawn(move || (0..100).map(|_| client.append(None, "x").unwrap()).collect::<Vec<_>>())
        })
        .collect();
    let mut positions: Vec<Position> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
    positions.sort();
    assert!(positions.into_iter().eq((0..400).map(Position)));
}

#[test]
fn what_cannot_work_is_said_in_one_line() {
    assert_eq!(Client::connect(ClientOptions::new([""; 0])).unwrap_err(), Error::NoAddress);
    let nobody = Client::connect(ClientOptions::new(["127.0.0.1:1", "nonsense"])).unwrap_err().to_string();
    assert!(
        nobody.contains("nothing listens on 127.0.0.1:1") && nobody.contains("cannot look up nonsense"),
        "{nobody}"
    );
    let gate = Gate::start();
    let mut options = ClientOptions::new([&gate.address]);
    options.cluster_name = "other".into();
    let refused = Client::connect(options).unwrap_err().to_string();
    assert!(refused.contains("this is cluster \"test\""), "{refused}");
    let client = gate.connect();
    let large = client.append(None, vec![0; 1001]).unwrap_err();
    assert_eq!(large, Error::TooLarge { bytes: 1001, limit_bytes: 1000 });
    let unknown = client.subscribe(Scope::Shard(ShardId(4)), Position(0)).unwrap_err().to_string();
    assert_eq!(unknown, "the cluster has no shard 4; its shards are 0");
    assert!(!client.problem().is_some_and(|p| p.contains('\n')));
}

#[test]
fn what_outlives_the_last_handle_still_works() {
    let gate = Gate::start();
    let pending = gate.connect().append_async(None, "x").unwrap();
    assert_eq!(pending.wait(), Ok(Position(0)));
    let mut subscription = gate.connect().subscribe(Scope::All, Position(0)).unwrap();
    assert!(matches!(subscription.next(), Ok(Event::Deliver { .. })));
}
