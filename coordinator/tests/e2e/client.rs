//! An HTTP client with one connection per request.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpStream;

const LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.text()))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// Status, `error.code` and `error.param` of an error; of one in Ollama's form only the status.
    pub(crate) fn error(&self) -> (u16, String, String) {
        let json = self.json();
        if json["error"].as_str().is_some_and(|message| !message.is_empty()) {
            return (self.status.as_u16(), String::new(), String::new());
        }
        let text = |name: &str| json["error"][name].as_str().unwrap_or_default().to_owned();
        assert!(json["error"]["message"].as_str().is_some_and(|m| !m.is_empty()), "{json}");
        assert!(json["error"]["type"].is_string(), "{json}");
        (self.status.as_u16(), text("code"), text("param"))
    }
}

pub(crate) async fn send(
    to: SocketAddr,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Reply {
    let exchange = async {
        let response = open(to, method, path, headers, body).await;
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Reply { status: head.status, headers: head.headers, body }
    };
    tokio::time::timeout(LIMIT, exchange).await.unwrap_or_else(|_| panic!("{path}: no answer in {LIMIT:?}"))
}

pub(crate) async fn get(to: SocketAddr, path: &str) -> Reply {
    send(to, Method::GET, path, &[], Bytes::new()).await
}

pub(crate) async fn post(to: SocketAddr, path: &str, body: &Value) -> Reply {
    send(to, Method::POST, path, &[("content-type", "application/json")], body.to_string()).await
}

async fn open(
    to: SocketAddr,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> hyper::Response<Incoming> {
    let stream = TcpStream::connect(to).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let mut request = Request::builder().method(method).uri(path).header("host", to.to_string());
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    sender.send_request(request.body(Full::new(body.into())).unwrap()).await.unwrap()
}

/// A stream of server-sent events, read one by one. Dropping it closes the connection.
pub(crate) struct Events {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    body: Incoming,
    buffer: String,
}

impl Events {
    pub(crate) async fn post(to: SocketAddr, path: &str, body: &Value) -> Self {
        Self::post_with(to, path, &[], body).await
    }

    pub(crate) async fn post_with(
        to: SocketAddr,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> Self {
        Self::open(open(to, Method::POST, path, headers, body.to_string())).await
    }

    pub(crate) async fn get(to: SocketAddr, path: &str) -> Self {
        Self::open(open(to, Method::GET, path, &[], Bytes::new())).await
    }

    async fn open(opened: impl Future<Output = hyper::Response<Incoming>>) -> Self {
        let response = tokio::time::timeout(LIMIT, opened).await.expect("no head in time");
        let (head, body) = response.into_parts();
        Self { status: head.status, headers: head.headers, body, buffer: String::new() }
    }

    /// The next line of a stream of lines. `None` at the end.
    pub(crate) async fn line(&mut self) -> Option<String> {
        loop {
            if let Some((line, rest)) = self.buffer.split_once('\n') {
                let line = line.to_owned();
                self.buffer = rest.to_owned();
                return Some(line);
            }
            let frame = tokio::time::timeout(LIMIT, self.body.frame()).await.expect("no line in time")?;
            let data = frame.unwrap().into_data().unwrap();
            self.buffer.push_str(std::str::from_utf8(&data).unwrap());
        }
    }

    /// The next event: its name, if any, and its data; of a comment `:` and its text. `None` at the end.
    pub(crate) async fn next(&mut self) -> Option<(Option<String>, String)> {
        loop {
            if let Some((event, rest)) = self.buffer.split_once("\n\n") {
                let (mut name, mut data) = (None, String::new());
                for line in event.lines() {
                    match line.split_once(": ") {
                        Some(("event", text)) => name = Some(text.to_owned()),
                        Some(("data", text)) => data.push_str(text),
                        Some(("", text)) => (name, data) = (Some(":".to_owned()), text.to_owned()),
                        other => panic!("{other:?}"),
                    }
                }
                self.buffer = rest.to_owned();
                return Some((name, data));
            }
            let frame = tokio::time::timeout(LIMIT, self.body.frame()).await.expect("no event in time")?;
            let data = frame.unwrap().into_data().unwrap();
            self.buffer.push_str(std::str::from_utf8(&data).unwrap());
        }
    }

    /// All remaining events, and whether the stream ended with `[DONE]`.
    pub(crate) async fn rest(&mut self) -> (Vec<Value>, bool) {
        let mut all = Vec::new();
        while let Some((_, data)) = self.next().await {
            if data == "[DONE]" {
                assert_eq!(self.next().await, None);
                return (all, true);
            }
            all.push(serde_json::from_str(&data).unwrap());
        }
        (all, false)
    }
}
