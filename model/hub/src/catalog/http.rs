//! HTTP interface of downloads. This crate opens no sockets; the caller supplies an [`Http`].

use std::io::{self, Read};
use std::time::Duration;

use super::Url;

/// An HTTP `GET` request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub url: Url,
    /// First byte requested; `None` requests the whole file.
    pub from: Option<u64>,
    /// With `from`: validator for `If-Range`. The server sends the whole file if it changed.
    pub if_range: Option<String>,
    /// Bearer token, for this server only.
    pub bearer: Option<String>,
}

/// Status and headers of a response.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Head {
    pub status: u16,
    /// Header names in lower case, with their values.
    pub headers: Vec<(String, String)>,
}

impl Head {
    /// The first header with this lower-case name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.trim())
    }
}

/// A response head and a streamed body. A body that ends before its declared length is an error of `read`.
pub struct Response {
    pub head: Head,
    /// The body. One with neither a length nor chunked encoding is an error of `read`.
    pub body: Box<dyn Read>,
}

/// Sends requests. Follows no redirects and does not retry; the caller decides about both.
pub trait Http {
    /// Sends a request and waits for the response head. Both this wait and reading the body have a time
    /// limit.
    ///
    /// # Errors
    /// Errors of the network, the server and TLS. `InvalidData` and `PermissionDenied` are not retried.
    fn get(&self, request: &Request) -> io::Result<Response>;

    /// Waits before the next attempt.
    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }
}
