//! HTTP client for nodes' ops ports: one request, one bounded response, no keep-alive.

use anyhow::{Context, bail, ensure};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

/// Longest response read as text, in bytes.
const MAX_ANSWER_BYTES: u64 = 16 << 20;
/// Longest response head in bytes.
const MAX_HEAD_BYTES: u64 = 64 << 10;

/// Response of an ops port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OpsResponse {
    pub(crate) status: u16,
    pub(crate) body: String,
}

impl OpsResponse {
    /// The body; an error that includes it if the status is not 2xx.
    pub(crate) fn success(self) -> anyhow::Result<String> {
        ensure!((200..300).contains(&self.status), "status {}: {}", self.status, self.reason());
        Ok(self.body)
    }

    /// The message of an API error, or the whole body if it has another form.
    fn reason(&self) -> String {
        let json: Option<serde_json::Value> = serde_json::from_str(&self.body).ok();
        let message = json.as_ref().and_then(|json| json.pointer("/error/message")?.as_str());
        message.unwrap_or(self.body.trim()).to_owned()
    }
}

/// A request's body.
pub(crate) struct Body<'a> {
    /// Content type.
    pub(crate) kind: &'static str,
    /// Source of the body.
    pub(crate) from: &'a mut dyn Read,
    /// Length in bytes.
    pub(crate) length: u64,
}

/// A request.
pub(crate) struct Call<'a> {
    pub(crate) method: &'a str,
    /// Path and query.
    pub(crate) path: &'a str,
    /// API key, if required.
    pub(crate) key: Option<&'a str>,
    pub(crate) body: Option<Body<'a>>,
    /// Bounds every wait.
    pub(crate) timeout: Duration,
}

impl<'a> Call<'a> {
    /// A request without body and key.
    pub(crate) fn new(method: &'a str, path: &'a str, timeout: Duration) -> Self {
        Self { method, path, key: None, body: None, timeout }
    }

    /// Sends the request and reads the response head.
    pub(crate) fn send(self, server: SocketAddr) -> anyhow::Result<Incoming> {
        let Self { method, path, key, body, timeout } = self;
        let mut stream = TcpStream::connect_timeout(&server, timeout)
            .with_context(|| format!("cannot connect to {server}"))?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        let length = body.as_ref().map_or(0, |body| body.length);
        // HTTP/1.0: the response ends with the connection and is never chunked.
        let mut head = format!("{method} {path} HTTP/1.0\r\nHost: {server}\r\nContent-Length: {length}\r\n");
        if let Some(Body { kind, .. }) = &body {
            head += &format!("Content-Type: {kind}\r\n");
        }
        if let Some(key) = key {
            ensure!(!key.contains(char::is_control), "the API key contains control characters");
            head += &format!("Authorization: Bearer {key}\r\n");
        }
        stream.write_all(format!("{head}\r\n").as_bytes())?;
        let sent = match body {
            Some(Body { from, length, .. }) => std::io::copy(&mut from.take(length), &mut stream).map(drop),
            None => Ok(()),
        };
        // A server that refuses a body may stop reading. Its response matters more than the write error.
        let answer =
            Incoming::read(BufReader::new(stream)).with_context(|| format!("cannot read from {server}"));
        match (answer, sent) {
            (Ok(answer), _) => Ok(answer),
            (Err(_), Err(error)) => Err(error).with_context(|| format!("cannot send to {server}")),
            (Err(error), Ok(())) => Err(error),
        }
    }
}

/// A response whose body has not been read yet.
pub(crate) struct Incoming {
    status: u16,
    length: Option<u64>,
    body: BufReader<TcpStream>,
}

impl Incoming {
    fn read(mut stream: BufReader<TcpStream>) -> anyhow::Result<Self> {
        let mut head = Vec::new();
        let mut limited = (&mut stream).take(MAX_HEAD_BYTES);
        while !head.ends_with(b"\r\n\r\n") {
            ensure!(limited.read_until(b'\n', &mut head)? > 0, "the response is not HTTP");
        }
        let head = String::from_utf8_lossy(&head);
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
        let Some(status) = status.filter(|_| head.starts_with("HTTP/1.")) else {
            bail!("the response is not HTTP");
        };
        let header = |line: &str| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
        };
        Ok(Self { status, length: head.lines().find_map(header), body: stream })
    }

    /// Reads the whole response.
    pub(crate) fn text(self) -> anyhow::Result<OpsResponse> {
        let mut body = Vec::new();
        self.body.take(MAX_ANSWER_BYTES + 1).read_to_end(&mut body)?;
        ensure!(body.len() as u64 <= MAX_ANSWER_BYTES, "the response has more than 16 MiB");
        Ok(OpsResponse { status: self.status, body: String::from_utf8_lossy(&body).into_owned() })
    }

    /// Streams the body to `out` and returns its length. Any status but 200 and a truncated body are errors.
    pub(crate) fn copy_to(self, out: &mut impl Write) -> anyhow::Result<u64> {
        if self.status != 200 {
            self.text()?.success()?;
            bail!("the response has no body");
        }
        let length = self.length.context("the response has no content-length")?;
        let copied = std::io::copy(&mut self.body.take(length), out)?;
        ensure!(copied == length, "the response was cut off after {copied} of {length} bytes");
        Ok(copied)
    }
}

/// Parses `127.0.0.1:9090` or `http://127.0.0.1:9090/`.
pub(crate) fn address(text: &str) -> anyhow::Result<SocketAddr> {
    let host = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
    let found = host.to_socket_addrs().with_context(|| format!("{text:?} is not HOST:PORT"))?.next();
    found.with_context(|| format!("{text:?} has no address"))
}

/// Sends one request without a body and reads the whole response. `timeout` bounds every wait.
pub(crate) fn request(
    server: SocketAddr,
    method: &str,
    path: &str,
    timeout: Duration,
) -> anyhow::Result<OpsResponse> {
    Call::new(method, path, timeout).send(server)?.text()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// A server that sends `answer` to one request and returns the request's bytes.
    fn server(answer: &'static [u8]) -> (SocketAddr, std::thread::JoinHandle<Vec<u8>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let served = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut read = vec![0; 4096];
            let mut got = 0;
            while !read[..got].windows(4).any(|end| end == b"\r\n\r\n") {
                match stream.read(&mut read[got..]).unwrap() {
                    0 => break,
                    more => got += more,
                }
            }
            stream.write_all(answer).unwrap();
            read.truncate(got);
            read
        });
        (address, served)
    }

    const LIMIT: Duration = Duration::from_secs(10);

    #[test]
    fn answers_are_taken_apart_and_nonsense_is_refused() {
        let (at, _) = server(b"HTTP/1.0 503 Service Unavailable\r\nA: b\r\n\r\nstarting\n");
        let answer = request(at, "GET", "/", LIMIT).unwrap();
        assert_eq!(answer, OpsResponse { status: 503, body: "starting\n".into() });
        assert!(answer.success().unwrap_err().to_string().contains("503: starting"));
        for bad in [&b""[..], b"HTTP/1.1 200 OK\r\n", b"SSH-2.0 200\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n"] {
            let (at, _) = server(bad);
            assert!(request(at, "GET", "/", LIMIT).is_err());
        }
    }

    #[test]
    fn an_error_is_shown_by_its_message() {
        let (at, _) = server(b"HTTP/1.0 404 Not Found\r\n\r\n{\"error\":{\"message\":\"r1 is not known\"}}");
        let error = request(at, "GET", "/", LIMIT).unwrap().success().unwrap_err();
        assert_eq!(error.to_string(), "status 404: r1 is not known");
    }

    #[test]
    fn bodies_go_out_with_their_key_and_come_in_whole_or_not_at_all() {
        let (at, served) = server(b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\n\x00\xff\x01\x02\x03");
        let body = Body { kind: "application/json", from: &mut &b"{}"[..], length: 2 };
        let call = Call { key: Some("secret"), body: Some(body), ..Call::new("POST", "/x?y=z", LIMIT) };
        let mut out = Vec::new();
        assert_eq!(call.send(at).unwrap().copy_to(&mut out).unwrap(), 5);
        assert_eq!(out, b"\x00\xff\x01\x02\x03");
        let sent = String::from_utf8(served.join().unwrap()).unwrap();
        for expected in
            ["POST /x?y=z HTTP/1.0\r\n", "Content-Length: 2\r\n", "Authorization: Bearer secret\r\n"]
        {
            assert!(sent.contains(expected), "{sent}");
        }
        let (at, _) = server(b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nabc");
        let cut = Call::new("GET", "/", LIMIT).send(at).unwrap().copy_to(&mut out).unwrap_err();
        assert!(cut.to_string().contains("3 of 5"), "{cut}");
        let split = Call { key: Some("a\r\nb"), ..Call::new("GET", "/", LIMIT) };
        let (at, served) = server(b"");
        assert!(split.send(at).err().unwrap().to_string().contains("control characters"));
        assert_eq!(served.join().unwrap(), b"");
    }

    #[test]
    fn addresses_come_bare_or_as_a_url() {
        let expected: SocketAddr = "127.0.0.1:9090".parse().unwrap();
        assert_eq!(address("127.0.0.1:9090").unwrap(), expected);
        assert_eq!(address("http://127.0.0.1:9090/").unwrap(), expected);
        assert!(address("9090").is_err());
    }

    #[test]
    fn a_closed_port_is_named() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let free = listener.local_addr().unwrap();
        drop(listener);
        let error = request(free, "GET", "/livez", Duration::from_secs(1)).unwrap_err();
        assert!(error.to_string().contains(&free.to_string()));
    }
}
