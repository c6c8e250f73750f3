//! HTTP/1.1, as little as clients of reports need: GET and HEAD, one request a connection.
//!
//! A client can send what it likes, as slowly as it likes. So there are limits on the size of a request and on the time
//! that a request or a response takes in all.

use std::fmt::Write as _;
use std::io::{self, Read};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimePrinter;

use crate::serve::address::{Stream, is_local};
use crate::serve::body::Body;

/// Maximum size of a request, in bytes.
pub(super) const MAX_REQUEST_BYTES: usize = 8 << 10;
/// Maximum number of a request's headers.
const MAX_HEADERS: usize = 64;
/// Maximum time in which a request must arrive.
pub(super) const READING: Duration = Duration::from_secs(2);
/// Maximum time in which a client must read the response.
const WRITING: Duration = Duration::from_secs(10);
/// Time and number of bytes for which a client is still read from after the response: if the client had not sent all of
/// its request, the kernel would otherwise discard the part of the response that the client has not read yet.
const LINGERING: (Duration, usize) = (Duration::from_secs(1), 256 << 10);

/// An HTTP request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    /// Whether only the headers of the response are wanted.
    pub(super) head_only: bool,
    /// The path, as it was sent.
    pub(super) path: String,
    /// The part after `?`.
    query: String,
    /// The formats that the client accepts.
    accept: String,
}

impl Request {
    /// Returns the value of a parameter, as it was sent.
    pub(super) fn parameter(&self, name: &str) -> Option<&str> {
        let pairs = self.query.split('&');
        let mut pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    /// Whether the client names a format among those that it accepts.
    pub(super) fn names_format(&self, format: &str) -> bool {
        let formats = self
            .accept
            .split(',')
            .filter_map(|format| format.split(';').next());
        formats
            .map(str::trim)
            .any(|known| known.eq_ignore_ascii_case(format))
    }
}

/// Status of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    BadRequest,
    Forbidden,
    NotFound,
    MethodNotAllowed,
    RequestTimeout,
    HeadersTooLarge,
    InternalError,
    NotImplemented,
    Unavailable,
}

impl Status {
    fn line(self) -> &'static str {
        match self {
            Self::Ok => "200 OK",
            Self::BadRequest => "400 Bad Request",
            Self::Forbidden => "403 Forbidden",
            Self::NotFound => "404 Not Found",
            Self::MethodNotAllowed => "405 Method Not Allowed",
            Self::RequestTimeout => "408 Request Timeout",
            Self::HeadersTooLarge => "431 Request Header Fields Too Large",
            Self::InternalError => "500 Internal Server Error",
            Self::NotImplemented => "501 Not Implemented",
            Self::Unavailable => "503 Service Unavailable",
        }
    }
}

/// An HTTP response.
#[derive(Debug, Clone)]
pub(super) struct Response {
    pub(super) status: Status,
    pub(super) content_type: &'static str,
    /// Further headers.
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) body: Body,
}

impl Response {
    /// Creates a response with a message for people.
    pub(super) fn text(status: Status, message: &str) -> Self {
        let mut headers = Vec::new();
        match status {
            Status::MethodNotAllowed => headers.push(("Allow", "GET, HEAD".to_owned())),
            Status::Unavailable => headers.push(("Retry-After", "1".to_owned())),
            _ => {}
        }
        Self {
            status,
            content_type: "text/plain; charset=utf-8",
            headers,
            body: Body::message(format!("{message}\n")),
        }
    }

    fn head(&self) -> String {
        let mut head = format!(
            "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\
             Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n\
             Cross-Origin-Resource-Policy: same-origin\r\n",
            self.status.line(),
            self.content_type,
            self.body.bytes().len(),
        );
        // Writing to a String does not fail.
        if let Ok(date) = DateTimePrinter::new().timestamp_to_rfc9110_string(&Timestamp::now()) {
            let _ = write!(head, "Date: {date}\r\n");
        }
        for (name, value) in &self.headers {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        head + "\r\n"
    }

    /// Sends the response, and ends the connection.
    pub(super) fn send(&self, stream: &mut dyn Stream, head_only: bool) -> io::Result<()> {
        let deadline = Instant::now() + WRITING;
        write_all(stream, self.head().as_bytes(), deadline)?;
        if !head_only {
            write_all(stream, self.body.bytes(), deadline)?;
        }
        stream.end()?;
        let (time, most) = LINGERING;
        let deadline = Instant::now() + time;
        let mut bytes = [0; 4096];
        let mut read = 0;
        while read < most {
            match read_some(stream, &mut bytes, deadline)? {
                0 => break,
                length => read += length,
            }
        }
        Ok(())
    }
}

/// Reads a request. Returns None if there is no request, such as from a client that leaves again.
pub(super) fn read(
    stream: &mut dyn Stream,
    local_names: bool,
) -> io::Result<Option<Result<Request, Response>>> {
    let deadline = Instant::now() + READING;
    let mut bytes = [0; MAX_REQUEST_BYTES];
    let mut length = 0;
    loop {
        match read_some(stream, &mut bytes[length..], deadline) {
            Ok(0) => return Ok(None),
            Ok(more) => length += more,
            Err(error) if is_late(&error) => {
                let message = "the request takes too long";
                return Ok(Some(Err(Response::text(Status::RequestTimeout, message))));
            }
            Err(error) => return Err(error),
        }
        if let Some(parsed) = parse(&bytes[..length], local_names) {
            return Ok(Some(parsed));
        }
        if length == MAX_REQUEST_BYTES {
            return Ok(Some(Err(too_large())));
        }
    }
}

fn too_large() -> Response {
    let message = format!("a request has {MAX_REQUEST_BYTES} bytes at most");
    Response::text(Status::HeadersTooLarge, &message)
}

/// Parses a request. Returns None if it is not complete.
fn parse(bytes: &[u8], local_names: bool) -> Option<Result<Request, Response>> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => Some(check(&request, local_names)),
        Ok(httparse::Status::Partial) => None,
        Err(httparse::Error::TooManyHeaders) => Some(Err(too_large())),
        Err(_) => {
            let message = "this is no request of HTTP/1.1";
            Some(Err(Response::text(Status::BadRequest, message)))
        }
    }
}

fn check(request: &httparse::Request<'_, '_>, local_names: bool) -> Result<Request, Response> {
    let refused = |status, message| Err(Response::text(status, message));
    let values = |name: &'static str| {
        let headers = request.headers.iter();
        headers
            .filter(move |header| header.name.eq_ignore_ascii_case(name))
            .map(|header| str::from_utf8(header.value).unwrap_or_default().trim())
    };
    let mut hosts = values("host");
    let host = hosts.next();
    if hosts.next().is_some() || (host.is_none() && request.version == Some(1)) {
        return refused(Status::BadRequest, "a request has one Host");
    }
    let target = request.path.unwrap_or_default();
    // Requests to a proxy have this form. A proxy can get any Host.
    let (named, target) = match target.strip_prefix("http://") {
        Some(rest) => {
            let (host, target) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            (Some(host), target)
        }
        None => (None, target),
    };
    if local_names && ![host, named].into_iter().flatten().all(is_local) {
        let message = "this is served to this machine alone, as localhost, 127.0.0.1 or [::1]";
        return refused(Status::Forbidden, message);
    }
    let head_only = match request.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => return refused(Status::MethodNotAllowed, "only GET and HEAD are answered"),
    };
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    Ok(Request {
        head_only,
        path: path.to_owned(),
        query: query.to_owned(),
        accept: values("accept").collect::<Vec<_>>().join(","),
    })
}

/// Reads the bytes that have arrived, before the deadline.
fn read_some(stream: &mut dyn Stream, bytes: &mut [u8], deadline: Instant) -> io::Result<usize> {
    loop {
        stream.limit(left(deadline)?)?;
        match Read::read(stream, bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

/// Writes all bytes before the deadline, however slowly they are read.
fn write_all(stream: &mut dyn Stream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.limit(left(deadline)?)?;
        match io::Write::write(stream, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(length) => bytes = &bytes[length..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns the time that is left. An error replaces 0, which the kernel takes for no limit.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left < Duration::from_micros(1) {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(left)
}

fn is_late(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock
    )
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    fn status(request: &str, local_names: bool) -> Option<Status> {
        let outcome = parse(request.as_bytes(), local_names)?;
        Some(outcome.map_or_else(|refused| refused.status, |_| Status::Ok))
    }

    #[test]
    fn requests_are_taken_apart() {
        let bytes = b"GET /a/b?seconds=7&x HTTP/1.1\r\nHost: localhost:80\r\n\r\n";
        let request = parse(bytes, true).expect("complete").expect("right");
        assert_eq!((request.path.as_str(), request.head_only), ("/a/b", false));
        assert_eq!(request.parameter("seconds"), Some("7"));
        assert_eq!(request.parameter("x"), Some(""));
        assert_eq!(request.parameter("second"), None);
        let bytes = b"HEAD http://localhost/a HTTP/1.1\r\nhost: localhost\r\n\r\n";
        let request = parse(bytes, true).expect("complete").expect("right");
        assert_eq!((request.path.as_str(), request.head_only), ("/a", true));
    }

    #[test]
    fn what_is_wrong_is_refused_with_its_status() {
        for (request, expected) in [
            ("GET / HTTP/1.1\r\nHost: localhost\r\n", None),
            (
                "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
                Some(Status::Ok),
            ),
            ("GET / HTTP/1.0\r\n\r\n", Some(Status::Ok)),
            ("GET / HTTP/1.1\r\n\r\n", Some(Status::BadRequest)),
            (
                "GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
                Some(Status::BadRequest),
            ),
            (
                "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n",
                Some(Status::Forbidden),
            ),
            (
                "GET / HTTP/1.1\r\nHost: \u{ff}\r\n\r\n",
                Some(Status::Forbidden),
            ),
            (
                "GET http://example.com/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
                Some(Status::Forbidden),
            ),
            (
                "POST / HTTP/1.1\r\nHost: localhost\r\n\r\n",
                Some(Status::MethodNotAllowed),
            ),
            ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Some(Status::BadRequest)),
            ("\u{16}\u{3}\u{1}", Some(Status::BadRequest)),
        ] {
            assert_eq!(status(request, true), expected, "{request:?}");
        }
        let foreign = "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n";
        assert_eq!(status(foreign, false), Some(Status::Ok));
        let many = format!("GET / HTTP/1.1\r\n{}", "a: b\r\n".repeat(MAX_HEADERS + 1));
        assert_eq!(status(&many, true), Some(Status::HeadersTooLarge));
    }

    /// Returns the status that a client gets, or None if its request is not answered.
    fn read_from(client: impl FnOnce(UnixStream) + Send) -> Option<Status> {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        thread::scope(|scope| {
            scope.spawn(move || client(theirs));
            let mut ours: Box<dyn Stream> = Box::new(ours);
            let request = read(&mut *ours, true).expect("a socket")?;
            Some(request.map_or_else(|refused| refused.status, |_| Status::Ok))
        })
    }

    #[test]
    fn requests_have_a_size_and_a_time() {
        let start = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ";
        let of = |bytes: usize| {
            move |mut client: UnixStream| {
                let rest = bytes - start.len() - 4;
                let request = [&start[..], &vec![b'x'; rest], b"\r\n\r\n"].concat();
                assert_eq!(request.len(), bytes);
                // The client may be answered before it has sent all.
                let _ = client.write_all(&request);
            }
        };
        assert_eq!(read_from(of(MAX_REQUEST_BYTES)), Some(Status::Ok));
        assert_eq!(
            read_from(of(MAX_REQUEST_BYTES + 1)),
            Some(Status::HeadersTooLarge)
        );
        assert_eq!(read_from(drop), None);
        // This client never ends, and each of its bytes comes soon after the one before.
        let slow = |mut client: UnixStream| {
            for byte in start.iter().cycle() {
                if client.write_all(&[*byte]).is_err() {
                    break;
                }
                thread::sleep(Duration::from_millis(20));
            }
        };
        assert_eq!(read_from(slow), Some(Status::RequestTimeout));
    }
}
