//! HTTP client for downloads: HTTP/1.1, with TLS and proxies. One request per connection.
//!
//! `model::catalog` decides about requests, retries and redirects.

use crate::config::ConfigError;
use crate::tls;
use body::{Body, Framing};
use model::catalog::{Head, Http, Hub, Network, PlainHttp, Request, Response, Url};
use proxy::{Proxies, Proxy};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

mod body;
mod proxy;
#[cfg(test)]
mod tests;

/// Whether `http://` addresses of other machines are allowed.
const ALLOW_HTTP: &str = "KVASIR_ALLOW_HTTP";
/// Timeout for connecting.
const CONNECT: Duration = Duration::from_secs(15);
/// Timeout without any byte received.
const SILENCE: Duration = Duration::from_secs(30);
/// Longest response head in bytes.
const MAX_HEAD: u64 = 64 << 10;
const MAX_HEADERS: usize = 128;

/// Network access configured by the environment: proxies, certificates, hub endpoint. `allow_http` has the
/// same effect as `KVASIR_ALLOW_HTTP`.
pub(crate) fn network(allow_http: bool) -> anyhow::Result<Network> {
    let variable = |name: &str| std::env::var(name).ok();
    let hub =
        Hub::from_env(variable).map_err(|error| ConfigError::Environment(format!("HF_ENDPOINT: {error}")))?;
    let allowed =
        allow_http || variable(ALLOW_HTTP).is_some_and(|value| matches!(value.trim(), "1" | "true"));
    let plain = if allowed { PlainHttp::Allowed } else { PlainHttp::Loopback };
    Ok(Network { http: Box::new(Client::new(variable)?), hub, plain })
}

/// HTTP client for downloads.
pub(crate) struct Client {
    tls: Arc<ClientConfig>,
    proxies: Proxies,
    silence: Duration,
}

/// An open connection, plain or TLS.
trait Duplex: Read + Write {}
impl<T: Read + Write> Duplex for T {}

impl Client {
    /// Reads the usual variables: proxies, and `SSL_CERT_FILE` in addition to the built-in roots.
    fn new(variable: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let mut roots = tls::built_in();
        let file = tls::CERTIFICATES;
        if let Some(path) = variable(file).filter(|path| !path.is_empty()) {
            tls::add(&mut roots, path.as_ref())
                .map_err(|why| ConfigError::Environment(format!("{file}={path}: {why}")))?;
        }
        let proxies = Proxies::new(variable).map_err(ConfigError::Environment)?;
        let tls = tls::client(roots).map_err(|error| ConfigError::Environment(error.to_string()))?;
        Ok(Self { tls: Arc::new(tls), proxies, silence: SILENCE })
    }

    /// Connects to the server of `url`, or to its proxy. Also returns the request target for the request
    /// line.
    fn connect(&self, url: &Url) -> io::Result<(Box<dyn Duplex>, String)> {
        let proxy = self.proxies.of(url);
        let stream = match proxy {
            Some(proxy) => self.dial(&proxy.host, proxy.port)?,
            None => self.dial(url.host(), url.port())?,
        };
        if !url.is_tls() {
            let target = if proxy.is_some() { url.to_string() } else { url.target().to_owned() };
            return Ok((Box::new(stream), target));
        }
        let stream = match proxy {
            Some(proxy) => tunnel(stream, proxy, url)?,
            None => stream,
        };
        let bare = url.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let name =
            ServerName::try_from(bare).map_err(|error| io::Error::new(ErrorKind::InvalidInput, error))?;
        let session = ClientConnection::new(self.tls.clone(), name)
            .map_err(|error| io::Error::new(ErrorKind::InvalidInput, error))?;
        Ok((Box::new(StreamOwned::new(session, stream)), url.target().to_owned()))
    }

    fn dial(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let mut failed = io::Error::new(ErrorKind::NotFound, format!("{host} has no address"));
        for address in (bare, port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, CONNECT) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(self.silence))?;
                    stream.set_write_timeout(Some(self.silence))?;
                    return Ok(stream);
                }
                Err(error) => failed = io::Error::new(error.kind(), format!("{address}: {error}")),
            }
        }
        Err(failed)
    }
}

impl Http for Client {
    fn get(&self, request: &Request) -> io::Result<Response> {
        let (mut stream, target) = self.connect(&request.url)?;
        let mut text = format!("GET {target} HTTP/1.1\r\nHost: {}\r\n", request.url.authority());
        let version = env!("CARGO_PKG_VERSION");
        text += &format!("User-Agent: kvasir/{version}\r\nAccept: */*\r\nAccept-Encoding: identity\r\n");
        text += "Connection: close\r\n";
        if let Some(from) = request.from {
            text += &format!("Range: bytes={from}-\r\n");
        }
        if let Some(validator) = &request.if_range {
            text += &format!("If-Range: {validator}\r\n");
        }
        if let Some(token) = &request.bearer {
            text += &format!("Authorization: Bearer {token}\r\n");
        }
        if let Some(proxy) = self.proxies.of(&request.url).filter(|_| !request.url.is_tls()) {
            text += &proxy.authorization();
        }
        text += "\r\n";
        stream.write_all(text.as_bytes()).map_err(named)?;
        stream.flush().map_err(named)?;
        let mut stream = BufReader::with_capacity(64 << 10, stream);
        loop {
            let head = read_head(&mut stream)?;
            // Skip informational responses.
            if (100..200).contains(&head.status) {
                continue;
            }
            let framing = Framing::of(&head)?;
            return Ok(Response { head, body: Box::new(Body::new(stream, framing)) });
        }
    }
}

/// Requests a tunnel to the server of `url` from a proxy.
fn tunnel(mut stream: TcpStream, proxy: &Proxy, url: &Url) -> io::Result<TcpStream> {
    let to = format!("{}:{}", url.host(), url.port());
    let request = format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n{}\r\n", proxy.authorization());
    stream.write_all(request.as_bytes()).map_err(named)?;
    // Read byte by byte: the bytes after the head belong to TLS.
    let head = read_head(&mut BufReader::with_capacity(1, &mut stream))?;
    if (200..300).contains(&head.status) {
        return Ok(stream);
    }
    let why = format!("the proxy {}:{} answered {}", proxy.host, proxy.port, head.status);
    // Rejected credentials or a denied target: a retry is useless.
    let kind = if matches!(head.status, 403 | 407) { ErrorKind::InvalidInput } else { ErrorKind::Other };
    Err(io::Error::new(kind, why))
}

/// Reads up to the empty line after the headers.
fn read_head(stream: &mut impl BufRead) -> io::Result<Head> {
    let mut text = Vec::new();
    let mut limited = stream.take(MAX_HEAD);
    while !text.ends_with(b"\r\n\r\n") {
        if limited.read_until(b'\n', &mut text).map_err(named)? == 0 {
            return Err(match text.len() as u64 {
                MAX_HEAD => invalid("the head of the answer is too long"),
                _ => io::Error::new(ErrorKind::UnexpectedEof, "the connection ended before an answer"),
            });
        }
    }
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut parsed = httparse::Response::new(&mut headers);
    parsed.parse(&text).map_err(|error| invalid(&format!("it does not speak HTTP: {error}")))?;
    let headers = parsed
        .headers
        .iter()
        .map(|header| (header.name.to_ascii_lowercase(), String::from_utf8_lossy(header.value).into_owned()));
    Ok(Head { status: parsed.code.unwrap_or_default(), headers: headers.collect() })
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

/// Adds text to I/O errors that have none of their own.
fn named(error: io::Error) -> io::Error {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            io::Error::new(ErrorKind::TimedOut, "nothing came for too long")
        }
        _ => error,
    }
}
