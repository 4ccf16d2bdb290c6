//! As much of HTTP as a scraper or a load balancer needs: GET, one request a connection, everything bounded.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// The longest request, in bytes.
pub const REQUEST_BYTES_MAX: usize = 8 << 10;

/// How long a request and its answer may take each.
pub const TIME: Duration = Duration::from_secs(2);

/// What bytes are, as a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed<'a> {
    /// Its beginning, so far.
    More,
    /// A whole one.
    Get {
        /// The path, without what follows a question mark.
        path: &'a str,
    },
    /// None that is answered: the status that says why.
    Bad(u16),
}

/// Reads a request's head: its first line, and where it ends. What its other lines say is of no interest here.
pub fn parse(bytes: &[u8]) -> Parsed<'_> {
    let end = bytes.windows(4).take(REQUEST_BYTES_MAX).position(|four| four == b"\r\n\r\n");
    if end.is_none() && bytes.len() >= REQUEST_BYTES_MAX {
        return Parsed::Bad(431);
    }
    let Some(first) = bytes.split(|byte| *byte == b'\r').next().filter(|first| first.len() < bytes.len()) else {
        return Parsed::More;
    };
    let mut words = first.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Parsed::Bad(400);
    };
    let target = target.iter().all(u8::is_ascii_graphic).then(|| std::str::from_utf8(target).ok()).flatten();
    let Some(target) = target.filter(|target| target.starts_with('/') && version.starts_with(b"HTTP/1.")) else {
        return Parsed::Bad(400);
    };
    match (end, method) {
        (_, method) if method != b"GET" => Parsed::Bad(405),
        (None, _) => Parsed::More,
        _ => Parsed::Get { path: target.split('?').next().unwrap_or_default() },
    }
}

/// Reads a request and answers it. A caller that does not get to the point is left.
pub(super) fn serve(stream: &TcpStream, answer: impl Fn(&str) -> (u16, String)) {
    // Whatever fails here concerns this caller only, and it is gone then.
    let _ = converse(stream, answer);
}

fn converse(mut stream: &TcpStream, answer: impl Fn(&str) -> (u16, String)) -> io::Result<()> {
    let deadline = Instant::now() + TIME;
    let mut bytes = Vec::with_capacity(1024);
    let mut chunk = [0; 1024];
    let (status, body) = loop {
        match parse(&bytes) {
            Parsed::Get { path } => break answer(path),
            Parsed::Bad(status) => break (status, format!("{}\n", reason(status))),
            Parsed::More => {}
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break (408, format!("{}\n", reason(408)));
        }
        stream.set_read_timeout(Some(left))?;
        let room = (REQUEST_BYTES_MAX - bytes.len()).min(chunk.len());
        match stream.read(&mut chunk[..room]) {
            Ok(0) => return Ok(()),
            Ok(got) => bytes.extend_from_slice(&chunk[..got]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    };
    let head = format!(
        "HTTP/1.1 {status} {}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        reason(status),
        body.len()
    );
    stream.set_write_timeout(Some(TIME))?;
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    // Closing with something unread would reset the connection and destroy the answer before it is read.
    stream.set_read_timeout(Some(Duration::from_millis(100)))?;
    for _ in 0..64 {
        if stream.read(&mut chunk)? == 0 {
            break;
        }
    }
    Ok(())
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        431 => "Request Header Fields Too Large",
        _ => "Service Unavailable",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_and_everything_else_is_told_apart() {
        let get = |path| Parsed::Get { path };
        assert_eq!(parse(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), get("/metrics"));
        assert_eq!(parse(b"GET /ready?full=1 HTTP/1.0\r\n\r\nmore"), get("/ready"));
        let whole = b"GET / HTTP/1.1\r\nA: b\r\n\r\n";
        for end in 0..whole.len() {
            assert_eq!(parse(&whole[..end]), Parsed::More, "{end} bytes");
        }
        for (bytes, status) in [
            (&b"POST /metrics HTTP/1.1\r\n"[..], 405),
            (b"GET metrics HTTP/1.1\r\n\r\n", 400),
            (b"GET /a b HTTP/1.1\r\n\r\n", 400),
            (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
            (b"GET / HTTP/2\r\n\r\n", 400),
            (b"antelog\0\x03\0\r\n", 400),
            (&[b'a'; REQUEST_BYTES_MAX], 431),
        ] {
            assert_eq!(parse(bytes), Parsed::Bad(status), "{:?}", bytes.escape_ascii().to_string());
        }
    }
}
