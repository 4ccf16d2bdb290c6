//! What the test binaries share: connections made by the real hand-shake.
#![allow(dead_code)] // not every test binary uses all of it

use std::net::SocketAddr;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use antelog_core::access::{Access, Secret};
use antelog_core::handshake::{Endpoint, Hello, Refusal, RefusalCode, Welcome};
use antelog_core::path::{Ability, Path};
use antelog_net_tcp::{Accept, Listener, ListenerHandle, TcpLink, dial};

/// Takes everybody of the cluster "test" in.
pub struct Doorman {
    links: Mutex<Sender<(Hello, TcpLink)>>,
    refusals: Mutex<Sender<String>>,
    pub payload: Vec<u8>,
    pub secrets: Vec<Secret>,
}

impl Accept for Doorman {
    fn secrets(&self, _: &Hello) -> &[Secret] {
        &self.secrets
    }

    fn decide(&self, hello: &Hello, _from: SocketAddr, secret: Option<usize>) -> Result<Welcome, Refusal> {
        if hello.cluster != "test" {
            let text = format!("this is cluster \"test\", not \"{}\"", hello.cluster);
            return Err(Refusal::new(RefusalCode::Cluster, text));
        }
        let payload = self.payload.clone();
        Ok(Welcome {
            incarnation: 5,
            ring_bytes: 6,
            record_bytes_max: 7,
            log_bytes: 8,
            access: if secret == Some(1) { Access::Read } else { Access::Admin },
            path: Path::Tcp,
            path_reason: "test".into(),
            payload,
        })
    }

    fn established(&self, hello: Hello, _: Welcome, _: Option<usize>, link: TcpLink) {
        let _ = self.links.lock().unwrap().send((hello, link));
    }

    fn refused(&self, from: SocketAddr, why: &str) {
        assert!(!why.contains('\n'), "not one line: {why}");
        let _ = self.refusals.lock().unwrap().send(format!("{from} {why}"));
    }
}

/// A listener and what it reported.
pub struct Door {
    pub handle: ListenerHandle,
    pub links: Receiver<(Hello, TcpLink)>,
    pub refusals: Receiver<String>,
}

impl Door {
    pub fn open(address: &str, payload: Vec<u8>) -> Door {
        Door::with_secrets(address, payload, Vec::new())
    }

    pub fn with_secrets(address: &str, payload: Vec<u8>, secrets: Vec<Secret>) -> Door {
        let (links, taken) = mpsc::channel();
        let (refusals, refused) = mpsc::channel();
        let doorman = Doorman { links: Mutex::new(links), refusals: Mutex::new(refusals), payload, secrets };
        let listener = Listener::bind(address.parse().unwrap()).unwrap();
        Door { handle: listener.serve(Arc::new(doorman)).unwrap(), links: taken, refusals: refused }
    }

    pub fn address(&self) -> SocketAddr {
        self.handle.local_addr()
    }

    /// The next refusal's line.
    pub fn refusal(&self) -> String {
        self.refusals.recv_timeout(Duration::from_secs(20)).expect("a refusal is reported")
    }
}

pub fn hello(cluster: &str) -> Hello {
    Hello {
        cluster: cluster.into(),
        from: Endpoint::Client { session: 42 },
        record_bytes_max: 4096,
        ring_bytes: 1 << 20,
        log_bytes: 0,
        ability: Ability::tcp(),
        nonce: None,
    }
}

/// Makes connected pairs of links.
pub struct Pairs {
    door: Door,
}

impl Pairs {
    pub fn new(address: &str) -> Pairs {
        Pairs { door: Door::open(address, Vec::new()) }
    }

    pub fn link(&self) -> (TcpLink, TcpLink) {
        let (called, _) = dial(self.door.address(), &hello("test"), None, Duration::from_secs(20)).unwrap();
        let (_, taken) = self.door.links.recv().unwrap();
        (called, taken)
    }
}
