//! The client processes: writers, readers and a prober, each in a namespace of its own, and the one that reads everything at the end.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::cluster::Cluster;

/// How long clients may take to end after they were told.
const PATIENCE: Duration = Duration::from_secs(90);

/// How many there are at a time.
pub const WRITERS: usize = 5;
/// And of those.
pub const READERS: usize = 2;
/// And one that reads single positions.
pub const PROBERS: usize = 1;

struct Client {
    place: usize,
    name: String,
    child: Child,
}

/// See the module's text.
pub struct Clients {
    folder: PathBuf,
    own: PathBuf,
    rate: u64,
    writers: Vec<Client>,
    readers: Vec<Client>,
    prober: Option<Client>,
    started: u32,
    /// Writers that were killed.
    pub killed: u32,
}

impl Clients {
    /// Starts them all; every writer appends so many records a second.
    pub fn start(cluster: &Cluster, folder: &Path, rate: u64) -> Result<Clients, String> {
        let own = std::env::current_exe().map_err(|e| format!("cannot find this program: {e}"))?;
        let mut clients = Clients {
            folder: folder.to_owned(),
            own,
            rate,
            writers: Vec::new(),
            readers: Vec::new(),
            prober: None,
            started: 0,
            killed: 0,
        };
        for reader in 0..READERS {
            let place = cluster.client_place(WRITERS + reader);
            let client = clients.reader(cluster, place, &format!("reader-{reader}"), false)?;
            clients.readers.push(client);
        }
        for writer in 0..WRITERS {
            clients.start_writer(cluster, cluster.client_place(writer))?;
        }
        let until = folder.join("stop").to_string_lossy().into_owned();
        let place = cluster.client_place(WRITERS + READERS);
        clients.prober = Some(clients.spawn(cluster, place, "prober", &["prober", "--until", &until])?);
        Ok(clients)
    }

    fn spawn(&self, cluster: &Cluster, place: usize, name: &str, args: &[&str]) -> Result<Client, String> {
        let mut command = cluster.network.command(place, &self.own);
        let log = self.folder.join(format!("{name}.log"));
        let log = std::fs::File::create(&log).map_err(|e| format!("cannot write {}: {e}", log.display()))?;
        command.args(args).args(["--gates", &cluster.gates(), "--file"]).arg(self.folder.join(name));
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
        let child = child.map_err(|e| format!("cannot start {name}: {e}"))?;
        Ok(Client { place, name: name.to_owned(), child })
    }

    fn start_writer(&mut self, cluster: &Cluster, place: usize) -> Result<(), String> {
        let (id, rate) = (self.started.to_string(), self.rate.to_string());
        let until = self.folder.join("stop").to_string_lossy().into_owned();
        let args = ["writer", "--id", &id, "--rate", &rate, "--until", &until];
        let client = self.spawn(cluster, place, &format!("writer-{id}"), &args)?;
        self.writers.push(client);
        self.started += 1;
        Ok(())
    }

    fn reader(&self, cluster: &Cluster, place: usize, name: &str, last: bool) -> Result<Client, String> {
        let until = self.folder.join("end").to_string_lossy().into_owned();
        let args: &[&str] =
            if last { &["reader", "--until", &until, "--last"] } else { &["reader", "--until", &until] };
        self.spawn(cluster, place, name, args)
    }

    /// Kills a writer; another one, with a number of its own, takes its place.
    pub fn kill_writer(&mut self, cluster: &Cluster, number: usize) -> Result<String, String> {
        let mut writer = self.writers.remove(number % self.writers.len());
        let _ = writer.child.kill();
        let _ = writer.child.wait();
        self.killed += 1;
        self.start_writer(cluster, writer.place)?;
        Ok(writer.name)
    }

    /// A client that ended too early: it says why in its log.
    pub fn ended(&mut self) -> Option<String> {
        let all = self.writers.iter_mut().chain(&mut self.readers).chain(&mut self.prober);
        let mut gone = all.filter_map(|c| c.child.try_wait().ok().flatten().map(|status| (c.name.clone(), status)));
        let (name, status) = gone.next()?;
        let said = std::fs::read_to_string(self.folder.join(format!("{name}.log"))).unwrap_or_default();
        Some(format!("{name} ended by itself ({status}): {}", said.trim()))
    }

    /// Ends the writers, reads everything with one more reader, and waits for the others to have come as far.
    pub fn finish(&mut self, cluster: &Cluster) -> Result<(), String> {
        let stop = self.folder.join("stop");
        std::fs::write(&stop, "").map_err(|e| format!("cannot write {}: {e}", stop.display()))?;
        let until = Instant::now() + PATIENCE;
        let ending = std::mem::take(&mut self.writers).into_iter().chain(self.prober.take());
        ending.collect::<Vec<_>>().into_iter().try_for_each(|client| self.wait(client, until))?;
        let last = self.reader(cluster, cluster.client_place(0), "last", true)?;
        self.wait(last, Instant::now() + PATIENCE)?;
        let until = Instant::now() + PATIENCE;
        std::mem::take(&mut self.readers).into_iter().try_for_each(|reader| self.wait(reader, until))
    }

    fn wait(&self, mut client: Client, until: Instant) -> Result<(), String> {
        loop {
            match client.child.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => {
                    let log = self.folder.join(format!("{}.log", client.name));
                    let said = std::fs::read_to_string(log).unwrap_or_default();
                    return Err(format!("{} failed ({status}): {}", client.name, said.trim()));
                }
                _ if Instant::now() > until => {
                    let _ = client.child.kill();
                    let _ = client.child.wait();
                    return Err(format!("{} did not come to its end within {PATIENCE:?}", client.name));
                }
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        for client in self.writers.iter_mut().chain(&mut self.readers).chain(&mut self.prober) {
            let _ = client.child.kill();
            let _ = client.child.wait();
        }
    }
}
