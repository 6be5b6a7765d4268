//! A client for the ops ports of our own nodes: one request, one bounded answer, no keep-alive.

use anyhow::{Context, bail, ensure};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

/// No answer of an ops port that we read is larger.
const MAX_ANSWER_BYTES: u64 = 16 << 20;

/// What an ops port said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    /// HTTP status.
    pub(crate) status: u16,
    /// The body as text.
    pub(crate) body: String,
}

impl Answer {
    /// The body, or an error that shows it if the status is not 2xx.
    pub(crate) fn success(self) -> anyhow::Result<String> {
        ensure!((200..300).contains(&self.status), "answered {}: {}", self.status, self.body.trim());
        Ok(self.body)
    }
}

/// The address in `127.0.0.1:9090` or `http://127.0.0.1:9090/`.
pub(crate) fn address(text: &str) -> anyhow::Result<SocketAddr> {
    let host = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
    let found = host.to_socket_addrs().with_context(|| format!("{text:?} is not HOST:PORT"))?.next();
    found.with_context(|| format!("{text:?} has no address"))
}

/// Sends one request and reads the whole answer; every wait is bounded by `timeout`.
pub(crate) fn request(
    server: SocketAddr,
    method: &str,
    path: &str,
    timeout: Duration,
) -> anyhow::Result<Answer> {
    let mut stream = TcpStream::connect_timeout(&server, timeout)
        .with_context(|| format!("nobody answers on {server}"))?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    // HTTP/1.0: the answer ends with the connection and is never chunked.
    write!(stream, "{method} {path} HTTP/1.0\r\nHost: {server}\r\nContent-Length: 0\r\n\r\n")?;
    let mut answer = Vec::new();
    stream
        .take(MAX_ANSWER_BYTES + 1)
        .read_to_end(&mut answer)
        .with_context(|| format!("reading from {server}"))?;
    ensure!(answer.len() as u64 <= MAX_ANSWER_BYTES, "{server} answers {path} with more than 16 MiB");
    parse(&answer).with_context(|| format!("{server} does not speak HTTP"))
}

fn parse(answer: &[u8]) -> anyhow::Result<Answer> {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { bail!("the answer has no end of headers") };
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    let status = status.filter(|_| head.starts_with("HTTP/1.")).context("the answer has no status")?;
    Ok(Answer { status, body: body.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_taken_apart_and_nonsense_is_refused() {
        let answer = parse(b"HTTP/1.0 503 Service Unavailable\r\nA: b\r\n\r\nstarting\n").unwrap();
        assert_eq!(answer, Answer { status: 503, body: "starting\n".into() });
        assert!(answer.success().unwrap_err().to_string().contains("503: starting"));
        for bad in [&b""[..], b"HTTP/1.1 200 OK\r\n", b"SSH-2.0 200\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n"] {
            assert!(parse(bad).is_err());
        }
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
