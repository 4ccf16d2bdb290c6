//! A configuration as TOML, every key with the value in force.

use std::fmt;

use super::Config;

/// A text as TOML writes it.
pub(super) fn quoted(text: &str) -> toml::Value {
    toml::Value::String(text.to_owned())
}

impl fmt::Display for Config {
    /// The whole configuration in force, as TOML.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.cluster;
        writeln!(
            f,
            "[cluster]\nname = {}\nordering = \"{}\"\ntick_us = {}",
            quoted(&c.name),
            c.ordering.name(),
            c.tick_us
        )?;
        writeln!(f, "window_cuts = {}\nsuspect_ms = {}", c.window_cuts, c.suspect_ms)?;
        writeln!(f, "lost_grace_ms = {}\ndurability = \"{}\"", c.lost_grace_ms, c.durability)?;
        writeln!(f, "record_bytes_max = {}\noutstanding_max = {}", c.record_bytes_max, c.outstanding_max)?;
        writeln!(f, "pending_max = {}\nsessions_max = {}", c.pending_max, c.sessions_max)?;
        writeln!(f, "region_bytes = {}\nretention = \"{}\"", c.region_bytes, c.retention)?;
        writeln!(f, "keep_bytes = {}\nkeep_s = {}", c.keep_bytes, c.keep_s)?;
        writeln!(f, "client_ring_bytes = {}\nclients_max = {}", c.client_ring_bytes, c.clients_max)?;
        writeln!(f, "free_cuts_max = {}", c.free_cuts_max)?;
        self.fmt_client_limits(f)?;
        write!(f, "{}", self.policy)?;
        let l = &self.launch;
        writeln!(f, "\n[launch]\nmode = \"{}\"\nidle = \"{}\"\nspin_us = {}", l.mode, l.idle, l.spin_us)?;
        if let Some(core) = l.first_core {
            writeln!(f, "first_core = {core}")?;
        }
        writeln!(f, "force = {}\nprefault = {}", l.force, l.prefault)?;
        if let Some(folder) = &l.data_dir {
            writeln!(f, "data_dir = {folder:?}")?;
        }
        writeln!(f, "transport = \"{}\"\nrdma_ack_timeout = {}", l.transport, l.rdma_ack_timeout)?;
        if let Some(device) = &l.rdma_device {
            writeln!(f, "rdma_device = {}", quoted(device))?;
        }
        writeln!(f, "close_ms = {}", l.close_ms)?;
        if let Some(address) = &l.metrics {
            writeln!(f, "metrics = {}", quoted(address))?;
        }
        self.fmt_access(f)?;
        for shard in &self.shards {
            writeln!(f, "\n[[shard]]\nid = {}\nquota = {}", shard.id, shard.quota)?;
            if shard.standby {
                writeln!(f, "standby = true")?;
            }
            if let Some(phase) = shard.tick_phase_us {
                writeln!(f, "tick_phase_us = {phase}")?;
            }
            if shard.report_delay_us > 0 {
                writeln!(f, "report_delay_us = {}", shard.report_delay_us)?;
            }
        }
        for node in &self.nodes {
            writeln!(f, "\n[[node]]\nid = {}\nrole = \"{}\"", node.id, node.role)?;
            if let Some(shard) = node.shard {
                writeln!(f, "shard = {shard}")?;
            }
            for (key, address) in [("listen", &node.listen), ("clients", &node.clients)] {
                if let Some(address) = address {
                    writeln!(f, "{key} = {}", quoted(address))?;
                }
            }
            if let Some(folder) = &node.data_dir {
                writeln!(f, "data_dir = {folder:?}")?;
            }
            if let Some(transport) = node.transport {
                writeln!(f, "transport = \"{transport}\"")?;
            }
            if let Some(device) = &node.rdma_device {
                writeln!(f, "rdma_device = {}", quoted(device))?;
            }
        }
        Ok(())
    }
}
