//! Who may connect and what for, as a user meets it: real processes, secrets in files, one clear line for whoever is kept
//! out.

mod common;

use std::os::unix::fs::PermissionsExt;

use antelog::{Client, ClientOptions, Error, Position, Scope, Secret};
use common::{Folder, Server, antelog, bad, cluster_file, dev, good, nodes};

/// A file that only its owner may read.
fn secret_file(folder: &Folder, name: &str) -> String {
    let path = folder.file(name, format!("the secret of {name}\n").as_bytes());
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path
}

struct Secrets {
    cluster: String,
    read: String,
    append: String,
    admin: String,
    keys: String,
    tables: String,
}

/// The `[cluster]` keys and `[[access]]` tables of a cluster with a secret for every role.
fn secrets(folder: &Folder, more: &str) -> Secrets {
    let file = |name| secret_file(folder, name);
    let (cluster, read, append, admin) = (file("cluster"), file("read"), file("append"), file("admin"));
    let mut tables = String::new();
    for (role, path) in [("read", &read), ("append", &append), ("admin", &admin)] {
        tables += &format!("[[access]]\nrole = \"{role}\"\nsecret_file = {path:?}\n{more}\n");
    }
    let keys = format!("region_bytes = 67108864\nsecret_file = {cluster:?}\n");
    Secrets { cluster, read, append, admin, keys, tables }
}

#[test]
fn roles_are_enforced_in_a_cluster_of_five_processes() {
    let folder = Folder::new("roles");
    let s = secrets(&folder, "");
    let (config, address) = cluster_file(&folder, "127.0.0.1", &format!("{}{}", s.keys, s.tables));
    let printed = String::from_utf8(good(&["config", "check", &config], b"")).unwrap();
    assert!(printed.contains("role = \"append\"") && !printed.contains("the secret of"), "{printed}");
    let servers = nodes(&config, &[0, 2, 4, 1, 3]);
    let with = |command: &[&str], secret: &str| -> Vec<String> {
        let secret = ["--cluster", &address, "--secret-file", secret];
        command.iter().chain(&secret).map(|arg| (*arg).to_owned()).collect()
    };
    fn args(args: &[String]) -> Vec<&str> {
        args.iter().map(String::as_str).collect()
    }

    for secret in [&s.append, &s.admin, &s.cluster] {
        good(&args(&with(&["append"], secret)), b"line\n");
    }
    let error = bad(&args(&with(&["append"], &s.read)), b"line\n");
    assert!(error.contains("this client's secret lets it read only"), "{error}");
    for secret in [&s.read, &s.append, &s.admin, &s.cluster] {
        let back = good(&args(&with(&["subscribe", "--lines", "--to-tail"], secret)), b"");
        assert_eq!(back, b"line\nline\nline\n");
        good(&args(&with(&["shard", "list"], secret)), b"");
    }
    for command in [&["shard", "add", "1"][..], &["ordering", "free-event"]] {
        for secret in [&s.read, &s.append] {
            let error = bad(&args(&with(command, secret)), b"");
            assert!(error.contains("that needs the role admin"), "{error}");
        }
        good(&args(&with(command, &s.admin)), b"");
    }

    // Strangers.
    let error = bad(&["tail", "--cluster", &address], b"");
    assert!(error.contains("this cluster requires a secret") && error.contains("--secret-file"), "{error}");
    servers[3].complains("this cluster requires a secret");
    let wrong = secret_file(&folder, "wrong");
    let error = bad(&args(&with(&["tail"], &wrong)), b"");
    assert!(error.contains("the caller's secret is not one that this side knows"), "{error}");
    servers[3].complains("the caller's secret is not one");
    let open = folder.file("open", b"sixteen bytes or more");
    let error = bad(&args(&with(&["tail"], &open)), b"");
    assert!(error.contains("everybody on this machine may read or change it"), "{error}");
    // From the environment.
    let output = antelog(&["tail", "--cluster", &address]).env("ANTELOG_SECRET_FILE", &s.read).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_node_without_the_secret_ends_and_one_with_another_keeps_trying() {
    let folder = Folder::new("nodes");
    let s = secrets(&folder, "");
    let (config, _) = cluster_file(&folder, "127.0.0.1", &s.keys);
    let sequencer = nodes(&config, &[0]).remove(0);
    let text = std::fs::read_to_string(&config).unwrap();
    let none = folder.file("none.toml", text.replace("secret_file", "#").as_bytes());
    let stranger = Server::start(&["node", "--config", &none, "--id", "2"]);
    stranger.complains("this cluster requires a secret: set cluster.secret_file");
    sequencer.complains("this cluster requires a secret");
    assert_eq!(stranger.exit_code(), Some(1));
    // A client's secret does not make a node.
    let other = folder.file("other.toml", text.replace(&s.cluster, &s.admin).as_bytes());
    let stranger = Server::start(&["node", "--config", &other, "--id", "2"]);
    stranger.complains("the caller's secret is not one that this side knows");
    sequencer.complains("the caller's secret is not one");
    stranger.signal("-TERM");
    assert_eq!(stranger.exit_code(), Some(0));
    let missing = folder.file("missing.toml", text.replace(&s.cluster, "/nonexistent").as_bytes());
    let error = bad(&["node", "--config", &missing, "--id", "2"], b"");
    assert!(error.contains("cluster.secret_file: secret file /nonexistent: cannot read it"), "{error}");
}

#[test]
fn a_client_that_insists_on_a_secret_is_told_that_there_is_none() {
    let folder = Folder::new("insists");
    let (server, address) = dev(&[]);
    let secret = secret_file(&folder, "mine");
    let error = bad(&["tail", "--cluster", &address, "--secret-file", &secret], b"");
    assert!(error.contains("the caller has a secret and this cluster has none"), "{error}");
    server.complains("the caller has a secret and this cluster has none");
}

#[test]
fn limits_hold_a_client_back_and_lose_nothing() {
    let folder = Folder::new("limits");
    let counters = folder.file("counters", b"");
    let (_server, address) = dev(&[
        "--counters",
        &counters,
        "--set",
        "cluster.client_appends_per_s=2000",
        "--set",
        "cluster.client_subscriptions_max=2",
    ]);
    // Half a second's worth: some of it has to wait.
    let lines: String = (0..1000).map(|n| format!("{n}\n")).collect();
    good(&["append", "--cluster", &address], lines.as_bytes());
    let back = good(&["subscribe", "--cluster", &address, "--lines", "--to-tail"], b"");
    assert_eq!(back, lines.as_bytes());
    let held_back = || {
        let text = std::fs::read_to_string(&counters).unwrap();
        text.lines().find_map(|l| l.strip_prefix("gate.held_back ")).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0)
    };
    let deadline = std::time::Instant::now() + common::PATIENCE;
    while held_back() == 0 {
        assert!(std::time::Instant::now() < deadline, "nothing was held back");
        std::thread::yield_now();
    }

    let client = Client::connect(ClientOptions::new([&address])).unwrap();
    let mut first = client.subscribe(Scope::All, Position(0)).unwrap();
    let mut second = client.subscribe(Scope::All, Position(0)).unwrap();
    assert!(first.next().is_ok() && second.next().is_ok());
    let mut third = client.subscribe(Scope::All, Position(0)).unwrap();
    assert_eq!(third.next(), Err(Error::Crowded { subscriptions_max: 2 }));
    // Others have their own.
    let other = Client::connect(ClientOptions::new([&address])).unwrap();
    assert!(other.subscribe(Scope::All, Position(0)).unwrap().next().is_ok());
    drop(first);
    // Its end is told in order: a place is free for whatever comes after it.
    assert!(client.subscribe(Scope::All, Position(0)).unwrap().next().is_ok());
    assert!(second.next().is_ok());
}

#[test]
fn the_library_says_what_a_secret_is_good_for() {
    let folder = Folder::new("library");
    let s = secrets(&folder, "");
    let (_server, address) = dev(&["--set", &format!("cluster.secret_file={}", s.cluster)]);
    let mut options = ClientOptions::new([&address]);
    let error = Client::connect(options.clone()).unwrap_err().to_string();
    assert!(error.contains("this cluster requires a secret"), "{error}");
    options.secret = Some(Secret::read(&s.cluster).unwrap());
    let client = Client::connect(options).unwrap();
    assert_eq!(client.access(), antelog::Access::Admin);
    assert!(!format!("{client:?}").contains("the secret of"));
    client.append(None, "in").unwrap();
}
