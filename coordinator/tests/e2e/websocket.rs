//! A WebSocket client with a manual handshake, so that tests see refusals. It can send messages and invalid
//! bytes.

use super::client::Reply;
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use hyper::StatusCode;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

const LIMIT: Duration = Duration::from_secs(30);
/// The mask of the client's frames. Here it may be constant.
const MASK: [u8; 4] = [0x5a, 0x01, 0xc3, 0x77];

pub(crate) struct WebSocket {
    socket: WebSocketStream<TcpStream>,
    pub(crate) headers: HeaderMap,
}

/// Requests a WebSocket. Returns the connection, or the HTTP answer if refused.
pub(crate) async fn handshake(
    to: SocketAddr,
    path: &str,
    headers: &[(&str, &str)],
) -> Result<(TcpStream, HeaderMap), Reply> {
    let mut stream = TcpStream::connect(to).await.unwrap();
    let mut request = format!(
        "GET {path} HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    );
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        request += &format!("Host: {to}\r\n");
    }
    headers.iter().for_each(|(name, value)| request += &format!("{name}: {value}\r\n"));
    stream.write_all(format!("{request}\r\n").as_bytes()).await.unwrap();
    let read = async {
        // Read byte by byte: what follows the head is not HTTP.
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap();
        let mut lines = head.lines();
        let status = lines.next().unwrap().split(' ').nth(1).unwrap();
        let status: StatusCode = status.parse().unwrap();
        let fields = lines.filter_map(|line| line.split_once(": "));
        let headers: HeaderMap = fields
            .map(|(name, value)| (name.parse::<HeaderName>().unwrap(), value.parse::<HeaderValue>().unwrap()))
            .collect();
        let length = headers.get("content-length").map_or(0, |n| n.to_str().unwrap().parse().unwrap());
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.unwrap();
        (status, headers, body)
    };
    let (status, headers, body) = tokio::time::timeout(LIMIT, read).await.expect("a handshake is answered");
    match status.as_u16() {
        101 => {
            assert_eq!(headers["sec-websocket-accept"], "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
            Ok((stream, headers))
        }
        _ => Err(Reply { status, headers, body: body.into() }),
    }
}

/// One frame in wire format.
pub(crate) fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![first];
    match payload.len() {
        short @ 0..126 => bytes.push(0x80 | short as u8),
        long => {
            bytes.push(0x80 | 127);
            bytes.extend((long as u64).to_be_bytes());
        }
    }
    bytes.extend(MASK);
    bytes.extend(payload.iter().zip(MASK.iter().cycle()).map(|(byte, mask)| byte ^ mask));
    bytes
}

/// Samples as 16-bit little-endian bytes.
pub(crate) fn s16(samples: &[i16]) -> Bytes {
    samples.iter().flat_map(|sample| sample.to_le_bytes()).collect()
}

impl WebSocket {
    pub(crate) async fn open(to: SocketAddr, path: &str) -> Self {
        Self::open_with(to, path, &[]).await
    }

    pub(crate) async fn try_open(
        to: SocketAddr,
        path: &str,
        headers: &[(&str, &str)],
    ) -> Result<Self, Reply> {
        let (stream, headers) = handshake(to, path, headers).await?;
        Ok(Self { socket: WebSocketStream::from_raw_socket(stream, Role::Client, None).await, headers })
    }

    pub(crate) async fn open_with(to: SocketAddr, path: &str, headers: &[(&str, &str)]) -> Self {
        match Self::try_open(to, path, headers).await {
            Ok(session) => session,
            Err(reply) => panic!("{path}: {} {}", reply.status, reply.text()),
        }
    }

    pub(crate) async fn send_text(&mut self, text: &str) {
        self.send(Message::text(text)).await;
    }

    pub(crate) async fn send_samples(&mut self, samples: &[i16]) {
        self.send(Message::binary(s16(samples))).await;
    }

    pub(crate) async fn send(&mut self, message: Message) {
        let sent = tokio::time::timeout(LIMIT, self.socket.send(message)).await;
        sent.expect("a message is taken").unwrap();
    }

    /// Whether the other side accepts a message within `limit`.
    pub(crate) async fn takes(&mut self, message: Message, limit: Duration) -> bool {
        tokio::time::timeout(limit, self.socket.send(message)).await.is_ok_and(|sent| sent.is_ok())
    }

    /// Sends raw bytes.
    pub(crate) async fn raw(&mut self, bytes: &[u8]) {
        // The other side may close before all is written.
        let _ = self.socket.get_mut().write_all(bytes).await;
    }

    /// The next event as text.
    pub(crate) async fn next_text(&mut self) -> String {
        loop {
            let message = tokio::time::timeout(LIMIT, self.socket.next()).await.expect("an event in time");
            if let Message::Text(text) = message.unwrap().unwrap() {
                return text.to_string();
            }
        }
    }

    /// The next event; `None` at the end.
    pub(crate) async fn next(&mut self) -> Option<Value> {
        loop {
            let message = tokio::time::timeout(LIMIT, self.socket.next()).await.expect("an event in time")?;
            match message.unwrap() {
                Message::Text(text) => return Some(serde_json::from_str(&text).unwrap()),
                Message::Ping(_) | Message::Pong(_) => {}
                Message::Close(_) => return None,
                other => panic!("{other:?}"),
            }
        }
    }

    /// The next event of this type; skips others.
    pub(crate) async fn until(&mut self, kind: &str) -> Value {
        loop {
            let event = self.next().await.unwrap_or_else(|| panic!("closed before {kind}"));
            if event["type"] == kind {
                return event;
            }
        }
    }

    /// All remaining events, and the close code, if any.
    pub(crate) async fn rest(mut self) -> (Vec<Value>, Option<u16>) {
        let mut all = Vec::new();
        loop {
            match tokio::time::timeout(LIMIT, self.socket.next()).await.expect("an end in time") {
                Some(Ok(Message::Text(text))) => all.push(serde_json::from_str(&text).unwrap()),
                Some(Ok(Message::Close(close))) => return (all, close.map(|close| close.code.into())),
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return (all, None),
            }
        }
    }

    /// Sends a close frame.
    pub(crate) async fn leave(mut self) {
        let _ = self.socket.close(None).await;
        while let Ok(Some(Ok(_))) = tokio::time::timeout(LIMIT, self.socket.next()).await {}
    }
}
