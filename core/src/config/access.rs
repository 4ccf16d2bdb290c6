//! `[[access]]`: what clients may do, by the secret they know.

use std::fmt;

use serde::Deserialize;

use super::{Config, ConfigError, quoted, wrong};
use crate::access::{ACCESS_ENTRIES_MAX, Access, Grant, Limits};

/// A secret of clients and what it grants. Limits that are absent are those of `[cluster]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AccessEntry {
    /// `read`, `append` or `admin`.
    pub role: Access,
    /// A file with the secret.
    pub secret_file: String,
    /// Instead of `cluster.client_appends_per_s`.
    pub appends_per_s: Option<u64>,
    /// Instead of `cluster.client_bytes_per_s`.
    pub bytes_per_s: Option<u64>,
    /// Instead of `cluster.client_subscriptions_max`.
    pub subscriptions_max: Option<u32>,
}

impl Config {
    /// What an entry grants; without one, what the cluster's own secret does, or having none where none is needed.
    pub fn grant(&self, entry: Option<&AccessEntry>) -> Grant {
        let c = &self.cluster;
        Grant {
            access: entry.map_or(Access::Admin, |e| e.role),
            limits: Limits {
                appends_per_s: entry.and_then(|e| e.appends_per_s).unwrap_or(c.client_appends_per_s),
                bytes_per_s: entry.and_then(|e| e.bytes_per_s).unwrap_or(c.client_bytes_per_s),
                subscriptions_max: entry.and_then(|e| e.subscriptions_max).unwrap_or(c.client_subscriptions_max),
            },
        }
    }

    pub(super) fn validate_access(&self) -> Result<(), ConfigError> {
        let paths = self.cluster.secret_file.iter().chain(self.access.iter().map(|e| &e.secret_file));
        if paths.into_iter().any(|path| path.is_empty()) {
            return Err(wrong("secret_file must name a file"));
        }
        if self.access.len() > ACCESS_ENTRIES_MAX {
            return Err(wrong(format!("at most {ACCESS_ENTRIES_MAX} [[access]] tables")));
        }
        if !self.access.is_empty() && self.cluster.secret_file.is_none() {
            return Err(wrong(
                "[[access]] needs cluster.secret_file: without it everybody is let in, and may do everything",
            ));
        }
        Ok(())
    }

    pub(super) fn fmt_client_limits(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.cluster;
        if let Some(file) = &c.secret_file {
            writeln!(f, "secret_file = {}", quoted(file))?;
        }
        writeln!(f, "client_appends_per_s = {}", c.client_appends_per_s)?;
        writeln!(f, "client_bytes_per_s = {}", c.client_bytes_per_s)?;
        writeln!(f, "client_subscriptions_max = {}", c.client_subscriptions_max)
    }

    pub(super) fn fmt_access(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for entry in &self.access {
            let file = quoted(&entry.secret_file);
            writeln!(f, "\n[[access]]\nrole = \"{}\"\nsecret_file = {file}", entry.role)?;
            let limits = [("appends_per_s", entry.appends_per_s), ("bytes_per_s", entry.bytes_per_s)];
            let subscriptions = ("subscriptions_max", entry.subscriptions_max.map(u64::from));
            for (key, limit) in limits.into_iter().chain([subscriptions]) {
                if let Some(limit) = limit {
                    writeln!(f, "{key} = {limit}")?;
                }
            }
        }
        Ok(())
    }
}
