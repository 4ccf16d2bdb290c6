//! Connects a session to gates over TCP, on a thread of its own: name look-up, connection and hand-shake block.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use antelog_core::client::session::{Dialed, Dialer};
use antelog_core::config::resolve;
use antelog_core::handshake::{Endpoint, Hello};
use antelog_core::node::Waker;
use antelog_net_tcp::{TcpLink, dial};
use antelog_protocol::ClientId;
use antelog_protocol::wire::session::ClusterMap;

/// Time for an attempt with its hand-shake.
const DIAL_TIME: Duration = Duration::from_secs(3);

/// A [`Dialer`] over TCP. Its thread ends when it is dropped.
#[derive(Debug)]
pub struct TcpDialer {
    requests: Sender<Ask>,
    answers: Receiver<Dialed<TcpLink>>,
}

#[derive(Debug)]
enum Ask {
    Dial(String),
    Wake(Waker),
}

impl TcpDialer {
    /// A dialer for a session. `cluster` may be empty: then any cluster will do.
    ///
    /// # Errors
    /// The operating system's, when it has no thread for it.
    pub fn new(client: ClientId, cluster: &str, ring_bytes: usize) -> std::io::Result<TcpDialer> {
        let (requests, asked) = channel();
        let (answer, answers) = channel();
        let hello = Hello {
            cluster: cluster.to_owned(),
            from: Endpoint::Client { session: client.0 },
            record_bytes_max: 0,
            ring_bytes: ring_bytes as u64,
            log_bytes: 0,
        };
        std::thread::Builder::new().name("antelog-dial".into()).spawn(move || work(&asked, &answer, &hello))?;
        Ok(TcpDialer { requests, answers })
    }
}

fn work(asked: &Receiver<Ask>, answer: &Sender<Dialed<TcpLink>>, hello: &Hello) {
    let mut waker = Waker::none();
    for ask in asked {
        match ask {
            Ask::Wake(new) => waker = new,
            Ask::Dial(address) => {
                let result = call(&address, hello);
                if answer.send(Dialed { address, result }).is_err() {
                    return;
                }
                waker.wake();
            }
        }
    }
}

fn call(address: &str, hello: &Hello) -> Result<(TcpLink, ClusterMap, usize, u64), String> {
    let (link, welcome) = dial(resolve(address)?, hello, DIAL_TIME).map_err(|e| e.to_string())?;
    let map = ClusterMap::decode(&welcome.payload).map_err(|e| format!("{address} sent no cluster map: {e}"))?;
    let ring = usize::try_from(welcome.ring_bytes).map_err(|_| format!("{address} has an impossible ring size"))?;
    Ok((link, map, ring, welcome.incarnation))
}

impl Dialer<TcpLink> for TcpDialer {
    fn request(&mut self, address: &str) {
        // The thread only ends with this dialer.
        let _ = self.requests.send(Ask::Dial(address.to_owned()));
    }

    fn take(&mut self) -> Option<Dialed<TcpLink>> {
        self.answers.try_recv().ok()
    }

    fn waker(&mut self, waker: Waker) {
        let _ = self.requests.send(Ask::Wake(waker));
    }
}
