//! Standard output without panics: a reader that goes away ends the command quietly, any other error says what it was.

use std::io::{self, BufWriter, StdoutLock, Write};
use std::path::Path;
use std::time::Duration;

use super::{Outcome, Stop};

/// Buffered standard output.
pub struct Output(BufWriter<StdoutLock<'static>>);

impl Output {
    /// Locks standard output.
    pub fn new() -> Output {
        Output(BufWriter::with_capacity(1 << 16, io::stdout().lock()))
    }

    /// Writes bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> Outcome {
        self.0.write_all(bytes).map_err(stop)
    }

    /// Writes a line.
    pub fn line(&mut self, text: &str) -> Outcome {
        self.bytes(text.as_bytes())?;
        self.bytes(b"\n")
    }

    /// Hands everything to the reader.
    pub fn flush(&mut self) -> Outcome {
        self.0.flush().map_err(stop)
    }
}

fn stop(error: io::Error) -> Stop {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Stop::ReaderGone,
        _ => Stop::Failed(format!("cannot write to standard output: {error}")),
    }
}

/// Prints one line and flushes it.
pub fn print(text: &str) -> Outcome {
    let mut output = Output::new();
    output.line(text)?;
    output.flush()
}

/// Writes a file whole or not at all: first beside it, then renamed over it.
pub fn write_file(path: &Path, text: &str) -> Outcome {
    let beside = path.with_extension("partial");
    let failed = |e: io::Error| Stop::Failed(format!("cannot write {}: {e}", path.display()));
    std::fs::write(&beside, text).map_err(failed)?;
    std::fs::rename(&beside, path).map_err(failed)
}

/// How long a command waits in silence.
pub const SAY_AFTER: Duration = Duration::from_secs(2);

/// Says on standard error what a command waits for, each reason once.
#[derive(Default)]
pub struct Waits {
    said: String,
}

impl Waits {
    /// Says it, unless it was said last.
    pub fn say(&mut self, reason: String) {
        if self.said != reason {
            eprintln!("antelog: waiting: {reason}");
            self.said = reason;
        }
    }
}

/// Finds out before a long measurement whether its result can be written afterwards.
pub fn check_writable(path: Option<&Path>) -> Outcome {
    let Some(path) = path else { return Ok(()) };
    let beside = path.with_extension("partial");
    let failed = |e: io::Error| Stop::Failed(format!("cannot write {}: {e}", path.display()));
    std::fs::write(&beside, "").map_err(failed)?;
    std::fs::remove_file(&beside).map_err(failed)
}

/// A record as printable text: what is not printable ASCII or UTF-8 text is escaped, and at most `max` bytes are shown.
pub fn shown(record: &[u8], max: usize) -> String {
    let cut = &record[..record.len().min(max)];
    let mut text = String::with_capacity(cut.len() + 8);
    for chunk in cut.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() || c == '\\' { text.extend(c.escape_default()) } else { text.push(c) }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    if record.len() > max {
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_shown_as_text_without_control_characters() {
        assert_eq!(shown(b"plain", 80), "plain");
        assert_eq!(shown("żółw\n\x1b[31m\\".as_bytes(), 80), "żółw\\n\\u{1b}[31m\\\\");
        assert_eq!(shown(&[b'a', 0xFF, 0xFE, b'b'], 80), "a\\xff\\xfeb");
        assert_eq!(shown(b"abcdef", 3), "abc…");
    }
}
