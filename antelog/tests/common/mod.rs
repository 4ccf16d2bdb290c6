//! Runs the `antelog` binary as a user would: nodes in the background, commands in the foreground.
#![allow(dead_code)] // each test binary uses a part of this

pub mod writer;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// How long anything may take before a test says that it hangs. No result depends on it.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A running node or embedded cluster; killed when dropped.
pub struct Server {
    child: Child,
    stdout: Receiver<String>,
    stderr: Receiver<String>,
}

fn lines_of(stream: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Waits for a line that contains `text`; `other` is what the process says elsewhere, for the failure's message.
fn wait_for(lines: &Receiver<String>, text: &str, other: &Receiver<String>) -> String {
    let deadline = Instant::now() + PATIENCE;
    let mut seen = Vec::new();
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) if line.contains(text) => return line,
            Ok(line) => seen.push(line),
            Err(_) => {
                let other: Vec<String> = other.try_iter().collect();
                panic!("no line with {text:?}; there were:\n{}\nand\n{}", seen.join("\n"), other.join("\n"))
            }
        }
    }
}

impl Server {
    /// Starts the binary.
    pub fn start(args: &[&str]) -> Server {
        let mut child = antelog(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        Server { child, stdout: lines_of(stdout), stderr: lines_of(stderr) }
    }

    /// Waits for a line of standard output.
    pub fn says(&self, text: &str) -> String {
        wait_for(&self.stdout, text, &self.stderr)
    }

    /// Waits for a line of standard error.
    pub fn complains(&self, text: &str) -> String {
        wait_for(&self.stderr, text, &self.stdout)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// Waits for the process to end; its exit code.
    pub fn exit_code(mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the process does not end");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The binary with arguments, away from the environment's settings. On another machine than the one that built it,
/// `TEST_BINARY` says where it is; `TEST_ENVIRONMENT` has settings for all of its runs, like `ANTELOG_TRANSPORT=rdma`.
pub fn antelog(args: &[&str]) -> Command {
    let binary = std::env::var("TEST_BINARY").unwrap_or_else(|_| env!("CARGO_BIN_EXE_antelog").to_owned());
    let mut command = Command::new(binary);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ANTELOG_")) {
        command.env_remove(name);
    }
    let settings = std::env::var("TEST_ENVIRONMENT").unwrap_or_default();
    command.envs(settings.split_whitespace().filter_map(|setting| setting.split_once('=')));
    command.args(args);
    command
}

/// Runs a command to its end.
pub fn run(args: &[&str], input: &[u8]) -> Output {
    let mut command = antelog(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || {
        // A command that refuses its input may end before it has read it.
        let _ = stdin.write_all(&input);
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

/// Runs a command that must succeed; its standard output.
pub fn good(args: &[&str], input: &[u8]) -> Vec<u8> {
    let output = run(args, input);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Runs a command that must fail with one line; the line.
pub fn bad(args: &[&str], input: &[u8]) -> String {
    let output = run(args, input);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{args:?}: {error}");
    assert_eq!(error.trim_end().lines().count(), 1, "{args:?}: not one line: {error}");
    assert!(!error.contains("panicked"), "{error}");
    error
}

/// A busy machine may hold a shard up for longer than a straggler is put up with; then it takes no appends for a while.
/// Nothing here is about stragglers, and some clients insist on a shard.
const PATIENT: &str = "policy.ground_windows=0";

/// An embedded cluster, and its client address.
pub fn dev(extra: &[&str]) -> (Server, String) {
    let server = Server::start(&[&["dev", "--listen", "127.0.0.1:0", "--set", PATIENT], extra].concat());
    let line = server.says("clients connect to ");
    let address = line.split("connect to ").nth(1).unwrap().split(';').next().unwrap().to_owned();
    (server, address)
}

/// Ports that were free a moment ago, and that nobody gets by chance meanwhile: below those that the system hands out, in
/// another place for each process, and each once.
pub fn free_ports(count: usize, host: &str) -> Vec<u16> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let mut ports = Vec::new();
    while ports.len() < count {
        let offset = std::process::id().wrapping_mul(97) + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + (offset % 22_000) as u16;
        if TcpListener::bind((host, port)).is_ok() {
            ports.push(port);
        }
    }
    ports
}

/// A folder of this test's own, removed when dropped.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("antelog-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn file(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_string_lossy().into_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Two shards with a backup each, as five processes; region and record sizes from `cluster`.
pub fn cluster_file(folder: &Folder, host: &str, cluster: &str) -> (String, String) {
    cluster_file_of(folder, host, cluster, &[false, false])
}

/// Shards with a backup each, of which some stand by: the sequencer is node 0, shard `s` has nodes `1 + 2 s` and `2 + 2 s`.
pub fn cluster_file_of(folder: &Folder, host: &str, cluster: &str, standby: &[bool]) -> (String, String) {
    let ports = free_ports(1 + 3 * standby.len(), host.trim_matches(['[', ']']));
    let mut text = format!("[cluster]\nname = \"test\"\n{cluster}\n");
    for (shard, standby) in standby.iter().enumerate() {
        text += &format!("[[shard]]\nid = {shard}\nstandby = {standby}\n");
    }
    let p = &ports;
    text += &format!("[[node]]\nid = 0\nrole = \"sequencer\"\nlisten = \"{host}:{}\"\n", p[0]);
    for shard in 0..standby.len() {
        let (clients, listen, backups_clients) = (p[1 + shard * 3], p[2 + shard * 3], p[3 + shard * 3]);
        let (primary, backup) = (1 + shard * 2, 2 + shard * 2);
        text += &format!(
            "[[node]]\nid = {primary}\nrole = \"primary\"\nshard = {shard}\nclients = \"{host}:{clients}\"\n\
             [[node]]\nid = {backup}\nrole = \"backup\"\nshard = {shard}\nlisten = \"{host}:{listen}\"\n\
             clients = \"{host}:{backups_clients}\"\n"
        );
    }
    (folder.file("cluster.toml", text.as_bytes()), format!("{host}:{}", p[1]))
}

/// Starts nodes of a configuration.
pub fn nodes(config: &str, ids: &[u16]) -> Vec<Server> {
    let start = |id: &u16| Server::start(&["node", "--config", config, "--id", &id.to_string(), "--set", PATIENT]);
    let servers: Vec<Server> = ids.iter().map(start).collect();
    for server in &servers {
        server.says("is up");
    }
    servers
}

/// Bytes without a pattern, the same for the same seed.
pub fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(bytes);
    out
}

/// Whether a path exists.
pub fn exists(path: &str) -> bool {
    Path::new(path).exists()
}

/// A file system in memory, for root.
pub struct Tmpfs(pub Folder);

impl Tmpfs {
    /// Mounts one with room for so many bytes; none without the right to.
    pub fn mount(name: &str, bytes: u64) -> Option<Tmpfs> {
        let folder = Folder::new(name);
        let options = format!("size={bytes}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(&folder.0);
        mount.output().is_ok_and(|done| done.status.success()).then_some(Tmpfs(folder))
    }

    /// Gives it another size.
    pub fn resize(&self, bytes: u64) {
        let mut mount = Command::new("mount");
        mount.args(["-o", &format!("remount,size={bytes}")]).arg(&self.0.0);
        assert!(mount.output().unwrap().status.success());
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0.0).status();
    }
}
