//! Errors of an engine's server.

use crate::arguments::Unsupported;
use std::io;

/// Most characters of a server's own message that an error keeps.
pub const MAX_MESSAGE: usize = 512;

/// What a time limit applied to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wait {
    Connect,
    /// The whole answer of a short request, for example of `/health`.
    Response,
    /// From the request to the first event of a generation.
    FirstEvent,
    /// Between two events of a generation.
    NextEvent,
}

impl Wait {
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => "connection",
            Self::Response => "response",
            Self::FirstEvent => "first event",
            Self::NextEvent => "next event",
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The engine would ignore an argument, or serve it with another meaning.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    #[error("{url}: {reason}")]
    InvalidUrl { url: String, reason: &'static str },
    /// No connection: refused, unreachable, or reset before the request was sent.
    #[error("{address}: {source}")]
    Connect { address: String, source: io::Error },
    #[error("no {} within {limit_ms} ms", .wait.name())]
    TimedOut { wait: Wait, limit_ms: u64 },
    /// The server is starting, draining, or its queue is full: status 429 or 503.
    #[error("the engine is overloaded ({status}): {message}")]
    Overloaded { status: u16, message: String },
    /// The server refused the request: another 4xx.
    #[error("the engine refused the request ({status}): {message}")]
    Refused { status: u16, message: String },
    /// The server failed: another status, or an error inside the stream.
    #[error("the engine failed ({status}): {message}")]
    Failed { status: u16, message: String },
    /// The engine ended the generation itself, without a finish reason of the protocol.
    #[error("the engine aborted the request: {message}")]
    Aborted { message: String },
    /// The connection closed before the answer was complete.
    #[error("the engine closed the stream after {tokens} tokens: {reason}")]
    Closed {
        /// Tokens received before.
        tokens: u32,
        reason: String,
    },
    /// The answer does not follow the protocol.
    #[error("the engine's answer is invalid: {reason}")]
    InvalidAnswer { reason: String },
    #[error("the engine's {what} has more than {limit} bytes")]
    TooLarge { what: &'static str, limit: usize },
}

impl EngineError {
    /// Whether another engine may be able to serve the same request. Statuses that are about this server and
    /// not about the request, such as a wrong key or a missing path, count as well.
    pub fn retryable(&self) -> bool {
        match self {
            Self::Refused { status, .. } => matches!(status, 401 | 403 | 404 | 405 | 408),
            Self::InvalidUrl { .. } => false,
            _ => true,
        }
    }

    /// Whether the engine itself seems to be gone or stuck, so that its cache counts as lost until it answers
    /// again.
    pub fn lost(&self) -> bool {
        matches!(self, Self::Connect { .. } | Self::Closed { .. } | Self::TimedOut { .. })
    }

    pub(crate) fn invalid(reason: impl Into<String>) -> Self {
        Self::InvalidAnswer { reason: bounded(&reason.into()) }
    }

    /// The error for a status other than 2xx.
    pub(crate) fn of_status(status: u16, message: &str) -> Self {
        let message = bounded(message);
        match status {
            429 | 503 => Self::Overloaded { status, message },
            400..=499 => Self::Refused { status, message },
            _ => Self::Failed { status, message },
        }
    }
}

/// The message inside a server's error body. The shapes are `{"error": {"message"}}`, `{"error": "..."}`,
/// `{"message"}`, `{"detail"}`, or a plain text.
pub(crate) fn message_of(body: &[u8]) -> String {
    let text = || String::from_utf8_lossy(body.get(..MAX_MESSAGE * 4).unwrap_or(body)).trim().to_owned();
    let Ok(value) = serde_json::from_slice::<serde_json::Value>(body) else { return bounded(&text()) };
    let found =
        [value.pointer("/error/message"), value.get("error"), value.get("message"), value.get("detail")];
    let found = found.into_iter().flatten().find_map(|field| field.as_str().map(str::to_owned));
    bounded(&found.unwrap_or_else(text))
}

/// At most [`MAX_MESSAGE`] characters, without control characters.
pub(crate) fn bounded(text: &str) -> String {
    text.chars().take(MAX_MESSAGE).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_shape_of_an_error_body_has_its_message_found() {
        for body in [
            r#"{"error":{"code":400,"message":"too long","type":"x"}}"#,
            r#"{"error":"too long"}"#,
            r#"{"object":"error","message":"too long"}"#,
            r#"{"detail":"too long"}"#,
            "too long\n",
        ] {
            assert_eq!(message_of(body.as_bytes()), "too long", "{body}");
        }
    }

    #[test]
    fn a_long_message_is_cut() {
        let long = "é".repeat(100_000);
        assert!(message_of(long.as_bytes()).chars().count() <= MAX_MESSAGE);
        assert_eq!(bounded("a\nb\u{7}"), "a b ");
    }

    #[test]
    fn only_a_refused_request_is_not_retryable() {
        for status in [400, 413, 422] {
            assert!(!EngineError::of_status(status, "").retryable(), "{status}");
        }
        for status in [401, 404, 429, 500, 502, 503] {
            assert!(EngineError::of_status(status, "").retryable(), "{status}");
        }
        assert!(EngineError::TimedOut { wait: Wait::NextEvent, limit_ms: 1 }.lost());
        assert!(!EngineError::of_status(503, "").lost());
    }
}
