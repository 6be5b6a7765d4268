//! HTTP client for downloads: hyper's HTTP/1.1, with TLS and proxies. One request per connection.
//!
//! `hub::catalog` decides about requests, retries and redirects.

use crate::config::ConfigError;
use crate::tls;
use http_body_util::{BodyExt, Empty};
use hub::catalog::{Head, Http, Hub, Network, PlainHttp, Request, Response};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::upgrade::{self, Upgraded};
use hyper::{Uri, rt};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::error::Error;
use std::io::{self, ErrorKind, Read};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio_rustls::TlsConnector;
use tower::ServiceExt;

mod proxy;
#[cfg(test)]
mod tests;

/// Whether `http://` addresses of other machines are allowed.
const ALLOW_HTTP: &str = "KVASIR_ALLOW_HTTP";
/// Timeout for connecting, divided among a host's addresses.
const CONNECT: Duration = Duration::from_secs(15);
/// Timeout for a connection with its tunnel and TLS, for a response head, and for each read of a body.
const SILENCE: Duration = Duration::from_secs(30);
/// Longest response head in bytes.
const MAX_HEAD: usize = 64 << 10;
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

/// Blocking HTTP client. Must not be used inside an async runtime.
pub(crate) struct Client {
    runtime: Arc<Runtime>,
    tls: Arc<ClientConfig>,
    proxies: Matcher,
    silence: Duration,
}

/// An open connection: plain, TLS, or a proxy's tunnel.
trait Duplex: rt::Read + rt::Write + Send + Unpin {}
impl<T: rt::Read + rt::Write + Send + Unpin> Duplex for T {}

impl Client {
    /// Reads the usual variables: proxies, and `SSL_CERT_FILE` in addition to the built-in roots.
    fn new(variable: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let mut roots = tls::built_in();
        let file = tls::CERTIFICATES;
        if let Some(path) = variable(file).filter(|path| !path.is_empty()) {
            tls::add(&mut roots, path.as_ref())
                .map_err(|why| ConfigError::Environment(format!("{file}={path}: {why}")))?;
        }
        let proxies = proxy::from_variables(variable).map_err(ConfigError::Environment)?;
        let tls = tls::client(roots).map_err(|error| ConfigError::Environment(error.to_string()))?;
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| ConfigError::Environment(format!("downloads: {error}")))?;
        Ok(Self { runtime: Arc::new(runtime), tls: Arc::new(tls), proxies, silence: SILENCE })
    }

    /// Connects to the server of `uri`, or to its proxy.
    async fn connect(&self, uri: &Uri, proxy: Option<&Intercept>) -> io::Result<Box<dyn Duplex>> {
        let dialed = proxy.map_or(uri, Intercept::uri).clone();
        let authority = dialed.authority().map(ToString::to_string).unwrap_or_default();
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_connect_timeout(Some(CONNECT));
        let stream = connector.oneshot(dialed).await.map_err(|error| {
            let error = failed(&error);
            io::Error::new(error.kind(), format!("{authority}: {error}"))
        })?;
        if uri.scheme_str() != Some("https") {
            return Ok(Box::new(stream));
        }
        let stream: Box<dyn Duplex> = match proxy {
            Some(proxy) => Box::new(tunnel(Box::new(stream), proxy, uri).await?),
            None => Box::new(stream),
        };
        let bare = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(bare).map_err(unusable)?;
        let stream = TlsConnector::from(Arc::clone(&self.tls)).connect(name, TokioIo::new(stream)).await?;
        Ok(Box::new(TokioIo::new(stream)))
    }
}

impl Http for Client {
    fn get(&self, request: &Request) -> io::Result<Response> {
        let uri: Uri = request.url.to_string().parse().map_err(unusable)?;
        let proxy = self.proxies.intercept(&uri).filter(|_| !request.url.is_loopback());
        let plain_proxy = proxy.as_ref().filter(|_| !request.url.is_tls());
        let target =
            if plain_proxy.is_some() { request.url.to_string() } else { request.url.target().into() };
        let bytes = request.from.map(|from| format!("bytes={from}-"));
        let bearer = request.bearer.as_ref().map(|token| format!("Bearer {token}"));
        let mut get = hyper::Request::get(target)
            .header(header::HOST, request.url.authority())
            .header(header::USER_AGENT, concat!("kvasir/", env!("CARGO_PKG_VERSION")))
            .header(header::ACCEPT, "*/*")
            .header(header::ACCEPT_ENCODING, "identity")
            .header(header::CONNECTION, "close");
        let optional: [(HeaderName, Option<&[u8]>); 4] = [
            (header::RANGE, bytes.as_deref().map(str::as_bytes)),
            (header::IF_RANGE, request.if_range.as_deref().map(str::as_bytes)),
            (header::AUTHORIZATION, bearer.as_deref().map(str::as_bytes)),
            (
                header::PROXY_AUTHORIZATION,
                plain_proxy.and_then(Intercept::basic_auth).map(HeaderValue::as_bytes),
            ),
        ];
        for (name, value) in optional {
            if let Some(value) = value {
                get = get.header(name, value);
            }
        }
        let get = get.body(Empty::new()).map_err(unusable)?;
        let response = self.runtime.block_on(async {
            let stream = in_time(self.silence, self.connect(&uri, proxy.as_ref())).await?;
            in_time(self.silence, send(stream, get)).await
        })?;
        let (head, frames) = response.into_parts();
        let headers = head.headers.iter().map(|(name, value)| {
            (name.as_str().to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned())
        });
        let head = Head { status: head.status.as_u16(), headers: headers.collect() };
        let chunked = head.header("transfer-encoding").is_some_and(|way| way.eq_ignore_ascii_case("chunked"));
        let bounded = chunked || frames.size_hint().exact().is_some();
        let (runtime, silence) = (Arc::clone(&self.runtime), self.silence);
        let body = Body { runtime, silence, frames, bounded, buffer: Bytes::new() };
        Ok(Response { head, body: Box::new(body) })
    }
}

/// Requests a tunnel to the server of `uri` from a proxy.
async fn tunnel(stream: Box<dyn Duplex>, proxy: &Intercept, uri: &Uri) -> io::Result<Upgraded> {
    let to = format!("{}:{}", uri.host().unwrap_or_default(), uri.port_u16().unwrap_or(443));
    let mut connect = hyper::Request::connect(&to).header(header::HOST, &to);
    if let Some(credentials) = proxy.basic_auth() {
        connect = connect.header(header::PROXY_AUTHORIZATION, credentials);
    }
    let response = send(stream, connect.body(Empty::new()).map_err(unusable)?).await?;
    let status = response.status().as_u16();
    if (200..300).contains(&status) {
        return upgrade::on(response).await.map_err(|error| failed(&error));
    }
    let at = proxy.uri().authority().map(ToString::to_string).unwrap_or_default();
    // Rejected credentials or a denied target: a retry is useless.
    let kind = if matches!(status, 403 | 407) { ErrorKind::InvalidInput } else { ErrorKind::Other };
    Err(io::Error::new(kind, format!("the proxy {at} responded with status {status}")))
}

/// Sends a request and waits for the response head.
async fn send(
    stream: Box<dyn Duplex>,
    request: hyper::Request<Empty<Bytes>>,
) -> io::Result<hyper::Response<Incoming>> {
    let mut http = http1::Builder::new();
    http.title_case_headers(true).max_buf_size(MAX_HEAD).max_headers(MAX_HEADERS);
    let (mut sender, connection) = http.handshake(stream).await.map_err(|error| failed(&error))?;
    tokio::spawn(connection.with_upgrades());
    sender.send_request(request).await.map_err(|error| failed(&error))
}

async fn in_time<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let timed_out = |_| io::Error::new(ErrorKind::TimedOut, "no data was received in time");
    tokio::time::timeout(limit, work).await.map_err(timed_out)?
}

/// A streamed body. Holds the runtime that its connection runs on.
struct Body {
    runtime: Arc<Runtime>,
    silence: Duration,
    frames: Incoming,
    /// False if the body ends with the connection, so that a truncated body cannot be detected.
    bounded: bool,
    buffer: Bytes,
}

impl Read for Body {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if !self.bounded {
            return Err(io::Error::new(ErrorKind::InvalidData, "the response has no content-length"));
        }
        while self.buffer.is_empty() {
            let frame = async { self.frames.frame().await.transpose().map_err(|error| failed(&error)) };
            match self.runtime.block_on(in_time(self.silence, frame))? {
                Some(frame) => self.buffer = frame.into_data().unwrap_or_default(),
                None => return Ok(0),
            }
        }
        let got = (&self.buffer[..]).read(to)?;
        drop(self.buffer.split_to(got));
        Ok(got)
    }
}

/// An error of a request that cannot be sent.
fn unusable(error: impl Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, error)
}

/// An I/O error with the texts of all causes and the kind of the innermost one.
fn failed(error: &(dyn Error + 'static)) -> io::Error {
    let mut kind = match error.downcast_ref::<hyper::Error>() {
        Some(error) if error.is_parse() => ErrorKind::InvalidData,
        Some(error) if error.is_incomplete_message() => ErrorKind::UnexpectedEof,
        _ => ErrorKind::Other,
    };
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        kind = error.downcast_ref().map_or(kind, io::Error::kind);
        text += &format!(": {error}");
        cause = error.source();
    }
    io::Error::new(kind, text)
}
