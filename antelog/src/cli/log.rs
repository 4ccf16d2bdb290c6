//! Where a node's events go: standard error, as lines for people or as JSON.

use std::fmt;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

use super::Stop;

/// How a node says what happens to it.
#[derive(Args)]
pub struct LogArgs {
    /// How events are written to standard error
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    log_format: LogFormat,
    /// Which events: error, warn, info, debug, trace or off, also by target, like warn,antelog::cluster=info
    #[arg(long, value_name = "LEVEL", env = "RUST_LOG", default_value = "info")]
    log: String,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// A line for people
    Text,
    /// A JSON object a line, with time, level and fields like node, peer and reason
    Json,
}

impl LogArgs {
    /// Takes this process's events from here on.
    pub fn start(&self) -> Result<(), Stop> {
        let filter = Targets::from_str(&self.log).map_err(|error| format!("--log {}: {error}", self.log))?;
        let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
        let registry = tracing_subscriber::registry().with(filter);
        let started = match self.log_format {
            LogFormat::Text => registry.with(layer.event_format(Lines)).try_init(),
            LogFormat::Json => registry.with(layer.json().flatten_event(true)).try_init(),
        };
        started.map_err(|error| Stop::Failed(format!("cannot log: {error}")))
    }

    /// The end of a node, in the format of its events: what reads them should not have to read something else.
    pub fn end(&self, outcome: super::Outcome) -> super::Outcome {
        match outcome {
            Err(Stop::Failed(text)) if self.log_format == LogFormat::Json => {
                tracing::error!("{text}");
                Err(Stop::Told)
            }
            outcome => outcome,
        }
    }
}

/// `antelog: ` and what happened: the fields are in it.
struct Lines;

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        struct Message<'a>(Writer<'a>, fmt::Result);
        impl Visit for Message<'_> {
            fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
                if field.name() == "message" {
                    self.1 = write!(self.0, "{value:?}");
                }
            }
        }
        writer.write_str("antelog: ")?;
        let mut message = Message(writer.by_ref(), Ok(()));
        event.record(&mut message);
        message.1?;
        writeln!(writer)
    }
}
