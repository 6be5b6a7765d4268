//! What a download asks of the network. This crate opens no sockets: whoever downloads brings an [`Http`].

use std::io::{self, Read};
use std::time::Duration;

use super::Url;

/// A `GET`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub url: Url,
    /// First byte that is wanted, if not all are.
    pub from: Option<u64>,
    /// With `from`: send everything if the file is not this one any more.
    pub if_range: Option<String>,
    /// A token for this server alone.
    pub bearer: Option<String>,
}

/// The head of an answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Head {
    pub status: u16,
    /// Names, in lower case, and values.
    pub headers: Vec<(String, String)>,
}

impl Head {
    /// The first header of this name, given in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.trim())
    }
}

/// An answer: its head, and its body as it comes. A body that ends before its length is an error of `read`.
pub struct Response {
    pub head: Head,
    /// The rest; one without length and without chunks is an error of `read`.
    pub body: Box<dyn Read>,
}

/// Carries requests to servers. It follows no redirects and repeats nothing: what to do is decided by whoever asks.
pub trait Http {
    /// Sends a request and waits for the head of the answer, for a bounded time, as reading the body does.
    ///
    /// # Errors
    /// The network's, the server's, those of TLS. `InvalidData` and `PermissionDenied` are not tried again.
    fn get(&self, request: &Request) -> io::Result<Response>;

    /// Waits before the next attempt.
    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }
}
