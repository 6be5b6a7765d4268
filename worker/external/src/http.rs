//! HTTP/1.1 client of an engine's server: one connection a request, plain TCP, limits on time and bytes.

use crate::error::{EngineError, Wait, message_of};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use std::io;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

mod sse;

use sse::SseParser;

/// Most bytes of a response's head.
const MAX_HEAD: usize = 64 << 10;

/// Limits of every exchange with an engine's server.
#[derive(Debug, Clone, Copy)]
pub struct HttpLimits {
    pub connect: Duration,
    /// For the whole answer of a short request.
    pub response: Duration,
    /// For falling asleep, and for waking: weights are copied to host memory and back.
    pub sleep: Duration,
    /// From a generation's request to its first event: queueing and prefill are part of it.
    pub first_event: Duration,
    /// Between two events of a generation. Comments in the stream do not count as events.
    pub next_event: Duration,
    /// Bytes of a short answer.
    pub max_body: usize,
    /// Bytes of one event. SGLang repeats the whole answer in each event.
    pub max_event: usize,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            response: Duration::from_secs(10),
            sleep: Duration::from_secs(120),
            first_event: Duration::from_secs(300),
            next_event: Duration::from_secs(60),
            max_body: 4 << 20,
            max_event: 16 << 20,
        }
    }
}

/// Client of one server.
#[derive(Debug, Clone)]
pub struct HttpClient {
    /// `host:port`, as in the URL.
    authority: String,
    /// Path before every request's own path, without a slash at its end.
    base: String,
    authorization: Option<HeaderValue>,
    limits: HttpLimits,
}

/// Closes a connection when it is dropped.
#[derive(Debug)]
struct OpenConnection(JoinHandle<()>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl HttpClient {
    /// A client of `url`, which is `http://HOST[:PORT][/PATH]`. The key is sent as a bearer token.
    ///
    /// # Errors
    ///
    /// If the URL has another form or the key cannot be sent in a header.
    pub fn new(url: &str, api_key: Option<&str>, limits: HttpLimits) -> Result<Self, EngineError> {
        let invalid = |reason| EngineError::InvalidUrl { url: url.chars().take(200).collect(), reason };
        let uri: Uri = url.parse().map_err(|_| invalid("not a URL"))?;
        if uri.scheme_str() != Some("http") {
            return Err(invalid("not an http:// URL"));
        }
        if uri.query().is_some() {
            return Err(invalid("the URL has a query"));
        }
        let host =
            uri.host().filter(|host| !host.is_empty()).ok_or_else(|| invalid("the URL has no host"))?;
        let authority = format!("{host}:{}", uri.port_u16().unwrap_or(80));
        let authorization = api_key
            .map(|key| {
                let mut value = HeaderValue::try_from(format!("Bearer {key}"))
                    .map_err(|_| invalid("the API key cannot be sent in a header"))?;
                value.set_sensitive(true);
                Ok::<_, EngineError>(value)
            })
            .transpose()?;
        Ok(Self { authority, base: uri.path().trim_end_matches('/').to_owned(), authorization, limits })
    }

    pub fn limits(&self) -> &HttpLimits {
        &self.limits
    }

    /// `host:port` of the server.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Status and body of a GET.
    pub(crate) async fn get(&self, path: &str) -> Result<(StatusCode, Bytes), EngineError> {
        let limit = self.limits.response;
        let exchange = async {
            let (response, _open) = self.send(Method::GET, path, Bytes::new()).await?;
            let status = response.status();
            Ok((status, self.read_body(response).await?))
        };
        timeout(limit, exchange).await.map_err(|_| timed_out(Wait::Response, limit))?
    }

    /// The body of a GET with status 200.
    pub(crate) async fn get_ok(&self, path: &str) -> Result<Bytes, EngineError> {
        let (status, body) = self.get(path).await?;
        match status {
            StatusCode::OK => Ok(body),
            _ => Err(EngineError::of_status(status.as_u16(), &message_of(&body))),
        }
    }

    pub(crate) async fn get_json<T: DeserializeOwned>(&self, path: &str) -> Result<T, EngineError> {
        let body = self.get_ok(path).await?;
        serde_json::from_slice(&body).map_err(|error| EngineError::invalid(format!("{path}: {error}")))
    }

    /// The answer to a short POST of JSON.
    pub(crate) async fn post_json<T: DeserializeOwned>(
        &self,
        path: &str,
        body: Bytes,
    ) -> Result<T, EngineError> {
        let body = self.post(path, body, self.limits.response).await?;
        serde_json::from_slice(&body).map_err(|error| EngineError::invalid(format!("{path}: {error}")))
    }

    /// Posts an order to sleep or to wake.
    pub(crate) async fn post_sleep(&self, path: &str, body: &'static str) -> Result<(), EngineError> {
        self.post(path, Bytes::from_static(body.as_bytes()), self.limits.sleep).await.map(|_| ())
    }

    /// The body of a POST with status 200.
    async fn post(&self, path: &str, body: Bytes, limit: Duration) -> Result<Bytes, EngineError> {
        let exchange = async {
            let (response, _open) = self.send(Method::POST, path, body).await?;
            let status = response.status();
            Ok::<_, EngineError>((status, self.read_body(response).await?))
        };
        let (status, body) =
            timeout(limit, exchange).await.map_err(|_| timed_out(Wait::Response, limit))??;
        match status {
            StatusCode::OK => Ok(body),
            _ => Err(EngineError::of_status(status.as_u16(), &message_of(&body))),
        }
    }

    /// Posts a generation and returns its events once the server answers with 200.
    pub(crate) async fn post_events(&self, path: &str, body: Bytes) -> Result<EventBody, EngineError> {
        let limit = self.limits.first_event;
        let deadline = Instant::now() + limit;
        let answer = timeout_at(deadline, self.send(Method::POST, path, body));
        let (response, open) = answer.await.map_err(|_| timed_out(Wait::FirstEvent, limit))??;
        let status = response.status();
        if status != StatusCode::OK {
            let body = timeout(self.limits.response, self.read_body(response));
            let body = body.await.map_err(|_| timed_out(Wait::Response, self.limits.response))?;
            return Err(EngineError::of_status(status.as_u16(), &message_of(&body.unwrap_or_default())));
        }
        let kind =
            response.headers().get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
        if !kind.starts_with(b"text/event-stream") {
            let kind = String::from_utf8_lossy(kind).into_owned();
            return Err(EngineError::invalid(format!(
                "{path}: content-type {kind:?} is not text/event-stream"
            )));
        }
        Ok(EventBody {
            incoming: response.into_body(),
            parser: SseParser::new(self.limits.max_event),
            first_deadline: Some(deadline),
            limits: self.limits,
            _open: open,
        })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(Response<Incoming>, OpenConnection), EngineError> {
        let unreachable = |source| EngineError::Connect { address: self.authority.clone(), source };
        let connect = timeout(self.limits.connect, TcpStream::connect(&self.authority));
        let stream = connect.await.map_err(|_| timed_out(Wait::Connect, self.limits.connect))?;
        let stream = stream.map_err(unreachable)?;
        let _ = stream.set_nodelay(true);
        let mut builder = http1::Builder::new();
        builder.max_buf_size(MAX_HEAD);
        let (mut sender, connection) = builder
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| unreachable(io::Error::other(error)))?;
        let open = OpenConnection(tokio::spawn(async move {
            let _ = connection.await;
        }));
        let mut request = hyper::Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header(header::HOST, &self.authority)
            .header(header::USER_AGENT, concat!("kvasir/", env!("CARGO_PKG_VERSION")))
            .header(header::ACCEPT, "*/*");
        if !body.is_empty() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        let request =
            request.body(Full::new(body)).map_err(|error| EngineError::invalid(error.to_string()))?;
        let response = sender.send_request(request).await.map_err(|error| cut(0, &error))?;
        Ok((response, open))
    }

    async fn read_body(&self, response: Response<Incoming>) -> Result<Bytes, EngineError> {
        let (mut incoming, mut body) = (response.into_body(), BytesMut::new());
        while let Some(frame) = incoming.frame().await {
            let frame = frame.map_err(|error| cut(0, &error))?;
            let Some(data) = frame.data_ref() else { continue };
            if body.len() + data.len() > self.limits.max_body {
                return Err(EngineError::TooLarge { what: "answer", limit: self.limits.max_body });
            }
            body.extend_from_slice(data);
        }
        Ok(body.freeze())
    }
}

/// Events of a generation. Dropping it closes the connection, which cancels the generation.
#[derive(Debug)]
pub(crate) struct EventBody {
    incoming: Incoming,
    parser: SseParser,
    /// Deadline of the first event, until it has arrived.
    first_deadline: Option<Instant>,
    limits: HttpLimits,
    _open: OpenConnection,
}

impl EventBody {
    /// The `data` of the next event; `None` after the last. `tokens` were received before, for errors.
    pub(crate) async fn next_event(&mut self, tokens: u32) -> Result<Option<Bytes>, EngineError> {
        let (wait, limit) = match self.first_deadline {
            Some(_) => (Wait::FirstEvent, self.limits.first_event),
            None => (Wait::NextEvent, self.limits.next_event),
        };
        let deadline = self.first_deadline.unwrap_or_else(|| Instant::now() + limit);
        loop {
            let event = self.parser.next_event();
            let event =
                event.map_err(|_| EngineError::TooLarge { what: "event", limit: self.limits.max_event })?;
            if let Some(event) = event {
                self.first_deadline = None;
                return Ok(Some(event));
            }
            let frame = timeout_at(deadline, self.incoming.frame()).await;
            match frame.map_err(|_| timed_out(wait, limit))? {
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        self.parser.feed(data);
                    }
                }
                Some(Err(error)) => return Err(cut(tokens, &error)),
                None => return Ok(None),
            }
        }
    }
}

fn timed_out(wait: Wait, limit: Duration) -> EngineError {
    EngineError::TimedOut { wait, limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX) }
}

/// The error of a connection that failed after the request was sent.
fn cut(tokens: u32, error: &hyper::Error) -> EngineError {
    if error.is_parse() {
        return EngineError::invalid(format!("not HTTP/1.1: {error}"));
    }
    EngineError::Closed { tokens, reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_plain_http_with_a_host() {
        let client = |url| HttpClient::new(url, None, HttpLimits::default());
        let made = client("http://localhost:8000/engine/").unwrap();
        assert_eq!((made.authority.as_str(), made.base.as_str()), ("localhost:8000", "/engine"));
        assert_eq!(client("http://[::1]:8000").unwrap().authority, "[::1]:8000");
        assert_eq!(client("http://engine").unwrap().authority, "engine:80");
        for wrong in ["", "localhost:8000", "https://localhost", "http://", "http://a?b=c", "http://a b"] {
            assert!(client(wrong).is_err(), "{wrong}");
        }
        assert!(HttpClient::new("http://a", Some("line\nbreak"), HttpLimits::default()).is_err());
    }
}
