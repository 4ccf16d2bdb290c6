//! `doctor`: looks at everything a node needs of its machine, and says for each lack what mends it.
//!
//! Each check is a function of the machine's files, and of the few facts that only trying tells ([`Tried`]), so that tests
//! can describe machines they do not run on.

mod machine;
mod pair;
mod parse;
mod rdma;

use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::process::ExitCode;

use antelog_net_rdma::discover::Discovery;
use antelog_net_rdma::verbs::library;
use antelog_net_tcp::TcpTransport;
use clap::Args;
use serde_json::{Value, json};

use super::host::{self, Host};
use super::transport::TransportArgs;
use super::{Stop, output};

#[derive(Args)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Measure writes, messages and bandwidth to another machine, where `antelog doctor --listen` waits
    #[arg(long, value_name = "HOST[:PORT]", conflicts_with = "listen")]
    pair: Option<String>,
    /// Wait for `antelog doctor --pair` of other machines, at port 7499 of all addresses unless told
    #[arg(long, value_name = "ADDR", num_args = 0..=1, default_missing_value = "0.0.0.0:7499")]
    listen: Option<String>,
    /// With --pair: seconds of each of the three measurements
    #[arg(long, value_name = "N", default_value_t = 2.0)]
    seconds: f64,
    #[command(flatten)]
    transport: TransportArgs,
}

/// What a machine lacks if a check fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// Nothing works.
    All,
    /// RDMA does not work; TCP may.
    Rdma,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Ok,
    /// It works, but could work better, or nobody can tell.
    Warn,
    Fail(Need),
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Level::Ok => "ok",
            Level::Warn => "warn",
            Level::Fail(_) => "fail",
        }
    }
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    /// What was looked at.
    check: String,
    level: Level,
    text: String,
    /// What mends it: mostly a command.
    mend: Option<String>,
}

impl Finding {
    fn ok(check: &str, text: impl Into<String>) -> Finding {
        Finding { check: check.to_owned(), level: Level::Ok, text: text.into(), mend: None }
    }

    fn warn(check: &str, text: impl Into<String>, mend: impl Into<String>) -> Finding {
        Finding { check: check.to_owned(), level: Level::Warn, text: text.into(), mend: Some(mend.into()) }
    }

    fn fail(need: Need, check: &str, text: impl Into<String>, mend: impl Into<String>) -> Finding {
        Finding { check: check.to_owned(), level: Level::Fail(need), text: text.into(), mend: Some(mend.into()) }
    }

    fn lines(&self) -> String {
        let mut lines = format!("{:<4}  {} — {}", self.level.name(), self.check, self.text);
        if let Some(mend) = &self.mend {
            lines.push_str(&format!("\n      → {mend}"));
        }
        lines
    }

    fn json(&self) -> Value {
        json!({ "check": self.check, "level": self.level.name(), "finding": self.text, "mend": self.mend })
    }
}

/// What only trying tells.
struct Tried {
    /// A TCP transport can be made; otherwise why not.
    io_uring: Result<(), String>,
    /// RoCE's UDP port can be bound; otherwise why not.
    roce_port: Result<(), ErrorKind>,
    /// The firewall's rules, where they can be seen.
    rules: Option<String>,
    /// libibverbs can be loaded; otherwise why not.
    library: Result<(), String>,
}

impl Tried {
    fn now() -> Tried {
        let rules = host::run("nft", &["list", "ruleset"]).or_else(|_| host::run("iptables-save", &[]));
        Tried {
            io_uring: TcpTransport::new(1, Default::default()).map(drop).map_err(|e| e.to_string()),
            roce_port: UdpSocket::bind((Ipv4Addr::UNSPECIFIED, rdma::ROCE_PORT)).map(drop).map_err(|e| e.kind()),
            rules: rules.ok(),
            library: library().map(drop),
        }
    }
}

/// What a machine is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Rdma,
    TcpOnly,
    Broken,
}

impl Verdict {
    fn of(findings: &[Finding]) -> Verdict {
        let fails = |need| findings.iter().any(|f| f.level == Level::Fail(need));
        match (fails(Need::All), fails(Need::Rdma)) {
            (true, _) => Verdict::Broken,
            (false, true) => Verdict::TcpOnly,
            (false, false) => Verdict::Rdma,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Verdict::Rdma => "rdma",
            Verdict::TcpOnly => "tcp",
            Verdict::Broken => "broken",
        }
    }

    fn text(self) -> &'static str {
        match self {
            Verdict::Rdma => "RDMA is usable",
            Verdict::TcpOnly => "TCP only: RDMA is not usable here",
            Verdict::Broken => "antelog cannot run here",
        }
    }

    fn exit_code(self) -> u8 {
        match self {
            Verdict::Rdma => 0,
            Verdict::Broken => 1,
            Verdict::TcpOnly => 3,
        }
    }
}

/// Looks at everything.
fn examine(host: &Host, tried: &Tried) -> Vec<Finding> {
    let found = Discovery::read(&host.path("sys"));
    let mut findings = machine::findings(host, tried);
    findings.extend(rdma::findings(host, &found, tried));
    findings
}

/// Runs `doctor`: exit code 0 RDMA is usable, 3 TCP only, 1 something needed is broken.
pub fn run(args: &DoctorArgs) -> Result<ExitCode, Stop> {
    if !(args.seconds > 0.0 && args.seconds <= 3600.0) {
        return Err(Stop::Failed(format!("--seconds {}: expected more than 0", args.seconds)));
    }
    if let Some(address) = &args.listen {
        return pair::listen(address, &args.transport).map(|()| ExitCode::SUCCESS);
    }
    if let Some(host) = &args.pair {
        return pair::pair(host, &args.transport, args.seconds, args.json).map(|()| ExitCode::SUCCESS);
    }
    let findings = examine(&Host::this(), &Tried::now());
    let verdict = Verdict::of(&findings);
    if args.json {
        let list: Vec<Value> = findings.iter().map(Finding::json).collect();
        output::print(&json!({ "verdict": verdict.name(), "findings": list }).to_string())?;
    } else {
        for finding in &findings {
            output::print(&finding.lines())?;
        }
        output::print(verdict.text())?;
    }
    Ok(ExitCode::from(verdict.exit_code()))
}

#[cfg(test)]
mod tests;
