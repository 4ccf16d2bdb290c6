//! What is accepted, what is refused, and in which words.

use super::*;

const GOOD: &str = r#"
[cluster]
name = "test"
tick_us = 500

[policy]
beat = "paper"

[[shard]]
id = 0
quota = 4

[[node]]
id = 0
role = "sequencer"
listen = "127.0.0.1:7400"

[[node]]
id = 1
role = "primary"
shard = 0
clients = "[::1]:7411"

[[node]]
id = 2
role = "backup"
shard = 0
listen = "127.0.0.1:7402"
clients = "127.0.0.1:7412"
"#;

fn error(text: &str) -> String {
    let error = Config::parse(text, &[]).unwrap_err().to_string();
    assert!(!error.contains('\n'), "not one line: {error}");
    error
}

#[test]
fn a_good_file_is_read_and_printed_in_full_and_reads_back_the_same() {
    let config = Config::parse(GOOD, &[]).unwrap();
    assert_eq!((config.cluster.tick_us, config.cluster.window_cuts, config.shards[0].quota), (500, 100, 4));
    assert_eq!(Config::parse(&config.to_string(), &[]), Ok(config));
    let odd = ["cluster.name='a \"b\" \u{fe0f}'".to_owned(), "launch.rdma_device=\"x\\u0000\\ny\"".to_owned()];
    let odd = Config::parse(GOOD, &odd).unwrap();
    assert_eq!(odd.launch.rdma_device.as_deref(), Some("x\0\ny"));
    assert_eq!(Config::parse(&odd.to_string(), &[]), Ok(odd));
    let slow = Config::parse(&GOOD.replace("quota = 4", "quota = 4\nreport_delay_us = 5000"), &[]).unwrap();
    assert_eq!(slow.shards[0].report_delay_us, 5000);
    assert_eq!(Config::parse(&slow.to_string(), &[]), Ok(slow));
}

#[test]
fn unknown_keys_are_refused_with_their_line() {
    let text = GOOD.replace("tick_us = 500", "tick_us = 500\ntikc = 1");
    let error = error(&text);
    assert!(error.contains("line 5") && error.contains("unknown field `tikc`"), "{error}");
}

#[test]
fn impossible_values_are_refused_in_one_line() {
    for (from, to, expected) in [
        ("tick_us = 500", "tick_us = 1", "cluster.tick_us must be 10 to 10000000, not 1"),
        ("tick_us = 500", "ordering = \"sorted\"", "unknown ordering 'sorted'"),
        ("beat = \"paper\"", "beat = \"drum\"", "unknown beat 'drum', expected target, paper or"),
        ("beat = \"paper\"", "fill_wait_ticks = -1.0", "policy.fill_wait_ticks must be 0 to 10, not -1"),
        ("beat = \"paper\"", "late_ticks = 0", "policy.late_ticks must be 1 to 1000000, not 0"),
        ("quota = 4", "standby = true", "every shard stands by"),
        ("quota = 4", "quota = 0", "shard 0: quota must be 1 to 1048576, not 0"),
        ("quota = 4", "report_delay_us = 10000001", "shard 0: report_delay_us must be 0 to 10000000, not 10000001"),
        ("role = \"primary\"", "role = \"backup\"", "shard 0 has 0 primaries"),
        ("clients = \"[::1]:7411\"", "", "node 1: a primary needs the key 'clients'"),
        ("clients = \"127.0.0.1:7412\"", "", "node 2: a backup needs the key 'clients'"),
        ("tick_us = 500", "lost_grace_ms = 201", "cluster.lost_grace_ms must be 0 to 200, not 201"),
        ("clients = \"[::1]:7411\"", "clients = \"::1:7411\"", "write an IPv6 address in brackets, like [::1]:7411"),
        ("listen = \"127.0.0.1:7400\"", "listen = \"7400\"", "node 0: listen: '7400' is no address"),
        ("id = 2", "id = 1", "node 1 is listed twice"),
        ("tick_us = 500", "record_bytes_max = 4194304", "client_ring_bytes must be at least 33554432"),
        ("tick_us = 500", "record_bytes_max = 9\nclient_ring_bytes = 4096", "client_ring_bytes must be at least 32768"),
        ("tick_us = 500", "client_ring_bytes = 16", "client_ring_bytes must be a power of two from 4096"),
        ("tick_us = 500", "region_bytes = 1000", "cluster.region_bytes must be a multiple of 65536"),
    ] {
        let error = error(&GOOD.replace(from, to));
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn overrides_win_over_the_file_and_later_ones_over_earlier() {
    let variables = [("ANTELOG_CLUSTER_TICK_US", "700"), ("ANTELOG_LAUNCH_IDLE", "yield"), ("PATH", "/bin")];
    let variables = variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    let mut overrides = Config::environment(variables);
    assert_eq!(overrides, ["cluster.tick_us=700", "launch.idle=yield"]);
    overrides.push("cluster.tick_us=800".into());
    let config = Config::parse(GOOD, &overrides).unwrap();
    assert_eq!((config.cluster.tick_us, config.launch.idle), (800, Idle::Yield));
    let unknown = Config::parse(GOOD, &["cluster.tick=1".into()]).unwrap_err().to_string();
    assert!(unknown.contains("unknown field `tick`"), "{unknown}");
    let malformed = Config::parse(GOOD, &["tick=1".into()]).unwrap_err().to_string();
    assert!(malformed.contains("expected section.key=value"), "{malformed}");
}
