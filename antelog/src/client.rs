//! The client: what programs use to append to, read and follow a log.
//!
//! A [`Client`] is a handle to a background thread that runs one session. Handles are cheap to clone and may be used from
//! any number of threads; the thread ends when the last handle, [`Pending`] and [`Subscription`] is gone.

mod appends;
mod completion;
mod connect;
mod driven;
mod error;
mod subscription;
mod worker;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use antelog_core::access::{Access, Secret};
use antelog_core::client::session::{Session, SessionOptions};
use antelog_core::client::{Membership, Slot};
use antelog_core::node::Parker;
use antelog_net_rdma::health::Health;
use antelog_protocol::client::Scope;
use antelog_protocol::wire::session::ClusterMap;
use antelog_protocol::{Change, ClientId, Outcome, Position, ShardId};

pub use driven::{DrivenSession, driven_session};
pub use error::Error;
pub use subscription::{OnUnavailable, SubscribeOptions, Subscription};

use appends::Append;
use completion::{Permits, deadline, promise};
use connect::{Caller, ClientDialer, First, first_contact};
use worker::{Command, Handle};

use crate::network::{Network, NetworkOptions, Traffic, own_addresses};

/// Most nodes that a client connects to.
const GATES_MAX: u16 = 256;

/// Takes lines for whoever runs the client.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// How to reach a cluster. [`ClientOptions::new`] has the defaults.
#[derive(Clone)]
pub struct ClientOptions {
    /// Addresses of nodes, as `host:port`: one that answers is enough to find the others.
    pub addresses: Vec<String>,
    /// The cluster's name, if only that cluster will do; empty: whichever answers.
    pub cluster_name: String,
    /// How long [`Client::connect`] and [`Client::tail`] wait for an answer.
    pub connect_timeout: Duration,
    /// Bytes that a [`Subscription`] buffers before it holds the log back.
    pub subscription_bytes: usize,
    /// The secret of a cluster that requires one; both sides prove that they know it.
    pub secret: Option<Secret>,
    /// Which networks to use.
    pub network: NetworkOptions,
    /// Where it is said which network was chosen for each connection, and why.
    pub log: Option<Log>,
}

impl fmt::Debug for ClientOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let network = &self.network;
        f.debug_struct("ClientOptions")
            .field("addresses", &self.addresses)
            .field("network", network)
            .finish_non_exhaustive()
    }
}

impl ClientOptions {
    /// The defaults for a cluster of which these nodes are known.
    pub fn new<A: Into<String>>(addresses: impl IntoIterator<Item = A>) -> ClientOptions {
        ClientOptions {
            addresses: addresses.into_iter().map(Into::into).collect(),
            cluster_name: String::new(),
            connect_timeout: Duration::from_secs(5),
            subscription_bytes: 1 << 20,
            secret: None,
            network: NetworkOptions::default(),
            log: None,
        }
    }
}

/// A connection to a log, for any number of threads.
///
/// ```no_run
/// use antelog::{Client, ClientOptions, Event, Position, Scope};
///
/// let client = Client::connect(ClientOptions::new(["127.0.0.1:7411"]))?;
/// let position = client.append(None, "hello")?;
/// println!("appended at {position}");
///
/// let mut subscription = client.subscribe(Scope::All, Position(0))?;
/// loop {
///     match subscription.next()? {
///         Event::Deliver { position, record, speculative, .. } => {
///             println!("{position}: {} bytes{}", record.len(), if speculative { ", not bound yet" } else { "" });
///         }
///         Event::Confirm { upto } => println!("everything below {upto} is bound as delivered"),
///         Event::Fail { from } => println!("forget what was delivered from {from} on"),
///         // Only when it is to go on there: see `SubscribeOptions`.
///         Event::Unavailable { from, to } => println!("nobody has positions {from} to {to} at present"),
///     }
/// }
/// # Ok::<(), antelog::Error>(())
/// ```
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
    map: ClusterMap,
    access: Access,
    client: ClientId,
    options: ClientOptions,
    /// Per shard of the map.
    permits: Vec<Arc<Permits>>,
    /// Of the appends that name no shard.
    own_permits: Arc<Permits>,
    next_token: AtomicU64,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("session", &self.0.client).field("map", &self.0.map).finish()
    }
}

impl Client {
    /// Connects to a cluster and starts the client's thread.
    ///
    /// # Errors
    /// [`Error::NoAddress`], [`Error::Connect`] when no address leads to a node that lets us in, [`Error::System`].
    pub fn connect(options: ClientOptions) -> Result<Client, Error> {
        if options.addresses.is_empty() {
            return Err(Error::NoAddress);
        }
        let caller = caller_of(&options)?;
        let First { map, ring_bytes, access } = first_contact(&caller, &options.addresses)?;
        let client = random_id()?;
        let dialer = Caller { client, ring_bytes: ring_bytes as u64, ..caller };
        let mut session = SessionOptions::new(client, options.addresses.clone());
        session.ring_bytes = ring_bytes;
        session.gates_max = GATES_MAX;
        let own = map.shards[(client.0 % map.shards.len() as u128) as usize].shard;
        let (handle, thread) = start(session, dialer, own)?;
        let own_permits = Permits::new(map.outstanding_max as usize);
        let permits = map.shards.iter().map(|_| Permits::new(map.outstanding_max as usize)).collect();
        Ok(Client(Arc::new(Inner {
            handle,
            thread: Some(thread),
            map,
            access,
            client,
            options,
            permits,
            own_permits,
            next_token: AtomicU64::new(0),
        })))
    }

    /// The cluster as it was when the client connected.
    pub fn map(&self) -> &ClusterMap {
        &self.0.map
    }

    /// What this client may do, by its secret.
    pub fn access(&self) -> Access {
        self.0.access
    }

    /// The identity of this client's session.
    pub fn id(&self) -> ClientId {
        self.0.client
    }

    /// What is wrong with the connections to nodes, in one line, if anything is. The client goes on trying by itself.
    pub fn problem(&self) -> Option<String> {
        self.0.handle.problem()
    }

    /// Appends a record and waits until it is bound to a position, for ever.
    ///
    /// `shard: None` means this client's own shard, chosen at random when it connected: so all its records keep their
    /// order, and many clients spread over the shards. When that shard takes no appends any more, because it leaves, they
    /// move to one that does and keep their order all the same. An append that names its shard is refused then.
    ///
    /// Waits however long the cluster is away: the record is sent again after every lost connection and never appended
    /// twice. When the shard is lost as a whole meanwhile, the call fails with [`Error::Unknown`]; later ones that name no
    /// shard go to another.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::UnknownShard`], [`Error::Refused`], [`Error::ShardLost`], [`Error::Unknown`],
    /// [`Error::Closed`].
    pub fn append(&self, shard: impl Into<Option<ShardId>>, record: impl AsRef<[u8]>) -> Result<Position, Error> {
        self.append_async(shard, record)?.wait()
    }

    /// Appends a record without waiting for its position: any number of appends may be under way, and those of one
    /// thread that name the same shard, or none, are bound in the order of the calls.
    ///
    /// Pushback: as many appends as the cluster's `outstanding_max` may be under way per shard named, and as many that
    /// name none; at the limit this call waits for an acknowledgement.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::UnknownShard`], [`Error::Closed`]; nothing was appended then.
    pub fn append_async(&self, shard: impl Into<Option<ShardId>>, record: impl AsRef<[u8]>) -> Result<Pending, Error> {
        let record = record.as_ref();
        let limit_bytes = self.0.map.record_bytes_max as usize;
        if record.len() > limit_bytes {
            return Err(Error::TooLarge { bytes: record.len(), limit_bytes });
        }
        let shard = shard.into();
        let permits = match shard {
            Some(shard) => &self.0.permits[self.shard_index(shard)?],
            None => &self.0.own_permits,
        };
        let (promise, outcome) = promise();
        let permit = Permits::take(permits);
        self.0.handle.send(Command::Append(Append { shard, record: record.into(), promise, permit }))?;
        Ok(Pending { outcome, shard, _client: self.clone() })
    }

    /// Follows the log, or one shard of it, from a position on. It stops with [`Error::Unavailable`] where nobody has what
    /// comes next.
    ///
    /// # Errors
    /// [`Error::UnknownShard`], [`Error::Closed`].
    pub fn subscribe(&self, scope: Scope, from: Position) -> Result<Subscription, Error> {
        self.subscribe_with(scope, from, SubscribeOptions::default())
    }

    /// As [`subscribe`](Self::subscribe), with options.
    ///
    /// # Errors
    /// [`Error::UnknownShard`], [`Error::Closed`].
    pub fn subscribe_with(
        &self,
        scope: Scope,
        from: Position,
        options: SubscribeOptions,
    ) -> Result<Subscription, Error> {
        if let Scope::Shard(shard) = scope {
            self.shard_index(shard)?;
        }
        let token = self.token();
        let (feed, subscription) =
            subscription::subscription(Some(self.clone()), token, self.0.options.subscription_bytes);
        let on_unavailable = options.on_unavailable;
        self.0.handle.send(Command::Subscribe { token, scope, from, on_unavailable, feed })?;
        Ok(subscription)
    }

    /// What a position holds. Waits until the position is bound, at most `timeout`.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Closed`].
    pub fn read(&self, position: Position, timeout: Duration) -> Result<Slot, Error> {
        let token = self.token();
        let (promise, outcome) = promise();
        self.0.handle.send(Command::Read { token, position, promise })?;
        self.answer(&outcome, token, timeout, || format!("the read of position {position}"))
    }

    /// The first position that is not bound: everything appended and acknowledged so far lies below it.
    ///
    /// # Errors
    /// [`Error::Timeout`] after the connect timeout, [`Error::Closed`].
    pub fn tail(&self) -> Result<Position, Error> {
        let token = self.token();
        let (promise, outcome) = promise();
        self.0.handle.send(Command::Tail { token, promise })?;
        self.answer(&outcome, token, self.0.options.connect_timeout, || "the question for the tail".into())
    }

    /// What became of an append that failed with [`Error::Unknown`], this client's or that of another which appends no more.
    /// Waits for the return of its shard, at most `timeout`.
    ///
    /// # Errors
    /// [`Error::UnknownShard`], [`Error::Timeout`], [`Error::Closed`].
    pub fn outcome(&self, shard: ShardId, client: ClientId, seq: u64, timeout: Duration) -> Result<Outcome, Error> {
        self.shard_index(shard)?;
        let token = self.token();
        let (promise, outcome) = promise();
        self.0.handle.send(Command::Outcome { token, shard, client, seq, promise })?;
        self.answer(&outcome, token, timeout, || {
            format!("the question for the outcome of append {seq} of session {client} to shard {shard}")
        })
    }

    /// Changes who takes part in the log or how it is ordered, and waits until the order stream shows it done: a shard
    /// that joins takes appends, one that leaves has no slots any more, windows are ordered as asked. Asking for what is
    /// so already changes nothing.
    ///
    /// # Errors
    /// [`Error::NotChanged`] when the cluster declines, [`Error::Timeout`] when it is not done by then, though it may still
    /// be later; [`Error::Closed`].
    pub fn change(&self, change: Change, timeout: Duration) -> Result<Membership, Error> {
        self.ask_membership(Some(change), timeout)
    }

    /// Says that positions below `upto`, which are all bound, need not be kept any longer: reading them is an error from now
    /// on, and disks drop them by and by.
    ///
    /// # Errors
    /// As [`change`](Self::change).
    pub fn trim(&self, upto: Position, timeout: Duration) -> Result<(), Error> {
        self.change(Change::Trim(upto), timeout).map(drop)
    }

    /// Who takes part in the log, and how it is ordered: not older than this call.
    ///
    /// # Errors
    /// [`Error::Timeout`] after the connect timeout, [`Error::Closed`].
    pub fn membership(&self) -> Result<Membership, Error> {
        self.ask_membership(None, self.0.options.connect_timeout)
    }

    fn ask_membership(&self, change: Option<Change>, timeout: Duration) -> Result<Membership, Error> {
        let token = self.token();
        let (promise, outcome) = promise();
        self.0.handle.send(Command::Change { token, change, promise })?;
        self.answer(&outcome, token, timeout, || match change {
            Some(Change::Join(shard)) => format!("the request that shard {shard} join, which may still happen,"),
            Some(Change::Leave(shard)) => format!("the request that shard {shard} leave, which may still happen,"),
            Some(Change::Ordering(to)) => format!("the request for {} ordering, which may still happen,", to.name()),
            Some(Change::Trim(upto)) => format!("the request to trim the log up to {upto}, which may still happen,"),
            None => "the question for the membership".into(),
        })
    }

    fn answer<R>(
        &self,
        outcome: &completion::Outcome<R>,
        token: u64,
        timeout: Duration,
        what: impl FnOnce() -> String,
    ) -> Result<R, Error> {
        outcome.wait(deadline(timeout)).unwrap_or_else(|| {
            self.0.handle.send(Command::Cancel { token })?;
            Err(Error::Timeout { what: what(), after: timeout, problem: self.problem() })
        })
    }

    fn token(&self) -> u64 {
        self.0.next_token.fetch_add(1, Ordering::Relaxed)
    }

    fn shard_index(&self, shard: ShardId) -> Result<usize, Error> {
        let shards = &self.0.map.shards;
        shards
            .binary_search_by_key(&shard, |s| s.shard)
            .map_err(|_| Error::UnknownShard { shard, shards: shards.iter().map(|s| s.shard).collect() })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.handle.stop();
        if let Some(thread) = self.thread.take() {
            // A panic was reported by its thread, and whoever waited for it has got `Closed`.
            let _ = thread.join();
        }
    }
}

/// An append whose position is not known yet. Dropping it does not take the append back.
#[must_use = "the append may fail; wait for it"]
pub struct Pending {
    outcome: completion::Outcome<Position>,
    shard: Option<ShardId>,
    /// The client's thread runs as long as somebody may wait for it.
    _client: Client,
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("shard", &self.shard).finish_non_exhaustive()
    }
}

impl Pending {
    /// The shard it names.
    pub fn shard(&self) -> Option<ShardId> {
        self.shard
    }

    /// Waits until the record is bound.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::ShardLost`], [`Error::Unknown`], [`Error::Closed`].
    pub fn wait(self) -> Result<Position, Error> {
        self.outcome.wait(None).unwrap_or(Err(Error::Closed))
    }

    /// The result if it comes within `time`. Like [`try_take`](Self::try_take) it gives a result once.
    pub fn wait_timeout(&self, time: Duration) -> Option<Result<Position, Error>> {
        self.outcome.wait(deadline(time))
    }

    /// The result if it is there; once. After that, [`wait`](Self::wait) fails with [`Error::Closed`].
    pub fn try_take(&self) -> Option<Result<Position, Error>> {
        self.outcome.try_take()
    }
}

/// Chooses the networks, and prepares the first contact under an id of its own.
fn caller_of(options: &ClientOptions) -> Result<Caller, Error> {
    let log = options.log.clone();
    let health = Health::new(log.clone().unwrap_or_else(|| Arc::new(|_: &str| {})));
    let own = own_addresses(&options.addresses);
    let network = Network::choose(&options.network, &own, health).map_err(Error::System)?;
    Ok(Caller {
        cluster: options.cluster_name.clone(),
        client: random_id()?,
        ring_bytes: 0,
        timeout: options.connect_timeout,
        secret: options.secret.clone(),
        network,
        log,
    })
}

/// A random session id: two clients never share one.
fn random_id() -> Result<ClientId, Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| Error::System(format!("no random numbers: {error}")))?;
    Ok(ClientId(u128::from_le_bytes(bytes)))
}

/// Starts the client's thread, which makes transport and session: neither can move between threads.
fn start(options: SessionOptions, caller: Caller, own: ShardId) -> Result<(Handle, JoinHandle<()>), Error> {
    let (parker, waker) = Parker::new().map_err(|error| Error::System(format!("no descriptor left: {error}")))?;
    let handle = Handle::new(waker);
    let (report, reported) = mpsc::channel();
    let shared = handle.clone();
    let body = move || {
        let session = caller.network.transport(options.gates_max.into(), Traffic::Rings, None).and_then(|transport| {
            Session::new(transport, ClientDialer::new(caller), options).map_err(|error| error.to_string())
        });
        match session {
            Ok(session) => {
                let _ = report.send(Ok(()));
                worker::run(session, own, parker, shared);
            }
            Err(error) => {
                let _ = report.send(Err(error));
            }
        }
    };
    let thread = std::thread::Builder::new()
        .name("antelog-client".into())
        .spawn(body)
        .map_err(|error| Error::System(format!("cannot start a thread: {error}")))?;
    match reported.recv() {
        Ok(Ok(())) => Ok((handle, thread)),
        Ok(Err(error)) => Err(Error::System(error)),
        Err(_) => Err(Error::Closed),
    }
}

#[cfg(test)]
mod tests;
