//! A cluster of one process per node on this machine, for measurements that are to cross process boundaries.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use antelog_core::config::Config;

/// How long a node may take to end after it was asked to.
const END_TIME: Duration = Duration::from_secs(5);

/// Nodes at work, each a child process. Dropping it ends them and removes their folder.
pub struct Processes {
    folder: PathBuf,
    children: Vec<(u16, Child)>,
    clients: Vec<String>,
}

impl Processes {
    /// Starts every node of `config`, whose addresses with port 0 get free ones.
    ///
    /// # Errors
    /// One line: the folder, a port or a process could not be had.
    pub fn start(mut config: Config) -> Result<Processes, String> {
        let folder =
            std::env::temp_dir().join(format!("antelog-{}-{}", std::process::id(), antelog_core::node::now_ns()));
        std::fs::create_dir_all(&folder).map_err(|e| format!("cannot make {}: {e}", folder.display()))?;
        let mut processes = Processes { folder, children: Vec::new(), clients: Vec::new() };
        // Held until all are chosen, so that no port is chosen twice.
        let mut held = Vec::new();
        for node in &mut config.nodes {
            for address in [&mut node.listen, &mut node.clients].into_iter().flatten() {
                if let Some(host) = address.strip_suffix(":0") {
                    let socket =
                        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|e| format!("no free port: {e}"))?;
                    let port = socket.local_addr().map_err(|e| format!("no free port: {e}"))?.port();
                    *address = format!("{host}:{port}");
                    held.push(socket);
                }
            }
            processes.clients.extend(node.clients.clone());
        }
        drop(held);
        let file = processes.folder.join("cluster.toml");
        std::fs::write(&file, config.to_string()).map_err(|e| format!("cannot write {}: {e}", file.display()))?;
        for node in &config.nodes {
            let child = processes.spawn(node.id, &file).map_err(|e| format!("cannot start node {}: {e}", node.id))?;
            processes.children.push((node.id, child));
        }
        Ok(processes)
    }

    fn spawn(&self, id: u16, file: &Path) -> io::Result<Child> {
        let log = File::create(self.log(id))?;
        Command::new(std::env::current_exe()?)
            .args(["node", "--id", &id.to_string(), "--config"])
            .arg(file)
            .arg("--counters")
            .arg(self.counters_file(id))
            // Its client knows no secret.
            .env_remove("ANTELOG_SECRET_FILE")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
    }

    fn log(&self, id: u16) -> PathBuf {
        self.folder.join(format!("node-{id}.log"))
    }

    fn counters_file(&self, id: u16) -> PathBuf {
        self.folder.join(format!("node-{id}.counters"))
    }

    /// Where clients connect.
    pub fn clients(&self) -> &[String] {
        &self.clients
    }

    /// The counters of all nodes as they were written last, as (`agent.name`, value).
    pub fn counters(&self) -> Vec<(String, u64)> {
        let mut all = Vec::new();
        for (id, _) in &self.children {
            let text = std::fs::read_to_string(self.counters_file(*id)).unwrap_or_default();
            all.extend(text.lines().filter_map(|line| {
                let (name, value) = line.split_once(' ')?;
                Some((name.to_owned(), value.parse().ok()?))
            }));
        }
        all
    }

    /// What a node that has ended by itself said last, if one has.
    pub fn failure(&mut self) -> Option<String> {
        let (id, status) =
            self.children.iter_mut().find_map(|(id, child)| Some((*id, child.try_wait().ok().flatten()?)))?;
        let said = std::fs::read_to_string(self.log(id)).unwrap_or_default();
        Some(format!("node {id} ended ({status}): {}", said.lines().last().unwrap_or("it said nothing")))
    }

    /// All lines that the nodes have said to their operator, once each.
    pub fn said(&self) -> Vec<String> {
        let logs = self.children.iter().map(|(id, _)| std::fs::read_to_string(self.log(*id)).unwrap_or_default());
        logs.flat_map(|log| log.lines().map(|line| line.trim_start_matches("antelog: ").to_owned()).collect::<Vec<_>>())
            .collect()
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for (_, child) in &self.children {
            // Kills by the number of a child that was not waited for: it cannot be anybody else's.
            let _ = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
        }
        let until = Instant::now() + END_TIME;
        for (_, child) in &mut self.children {
            while child.try_wait().is_ok_and(|status| status.is_none()) {
                if Instant::now() > until {
                    let _ = child.kill();
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
