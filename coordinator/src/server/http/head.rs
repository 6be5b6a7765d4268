//! Checks request heads before hyper parses them: where a head ends, whether it is valid, and how its body is
//! framed.
//!
//! hyper accepts two `Host` headers, a length with chunked encoding, or a bare line feed, and picks one
//! interpretation. A proxy in front may pick another, and then the two disagree about where a request ends
//! (request smuggling). Such heads are refused.

use api::error::ApiError;
use api::limits::{MAX_HEAD, MAX_HEADERS};
use axum::http::Uri;
use axum::http::uri::Authority;
use httparse::{Request, Status};
use std::mem::MaybeUninit;

/// How the body after a head is framed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    /// A body of this many bytes; 0: no body.
    Sized(u64),
    Chunked,
}

/// Finds the end of a head in bytes that arrive in parts.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// Bytes that were scanned.
    seen: usize,
    /// Start of the current line.
    line: usize,
}

impl Scan {
    /// The length of the head including its empty line, once `bytes` has all of it. `bytes` must begin with
    /// the head and only grow between calls.
    pub(super) fn end(&mut self, bytes: &[u8]) -> Result<Option<usize>, ApiError> {
        let new = bytes.get(self.seen..).unwrap_or_default();
        for feed in memchr::memchr_iter(b'\n', new) {
            let at = self.seen + feed;
            if at.checked_sub(1).and_then(|before| bytes.get(before)) != Some(&b'\r') {
                return Err(malformed("a line ends without a carriage return"));
            }
            if at >= MAX_HEAD {
                return Err(self.too_large());
            }
            if at == self.line + 1 {
                return Ok(Some(at + 1));
            }
            self.line = at + 1;
        }
        self.seen = bytes.len();
        if self.seen > MAX_HEAD { Err(self.too_large()) } else { Ok(None) }
    }

    fn too_large(&self) -> ApiError {
        match self.line {
            0 => ApiError::TargetTooLong { limit: MAX_HEAD },
            _ => ApiError::HeadTooLarge { limit: MAX_HEAD },
        }
    }
}

pub(super) fn check(head: &[u8]) -> Result<Framing, ApiError> {
    let mut headers = [const { MaybeUninit::uninit() }; MAX_HEADERS];
    let mut request = Request::new(&mut []);
    match request.parse_with_uninit_headers(head, &mut headers) {
        Ok(Status::Complete(_)) => {}
        Ok(Status::Partial) => return Err(malformed("it is incomplete")),
        Err(httparse::Error::TooManyHeaders) => return Err(ApiError::TooManyHeaders { limit: MAX_HEADERS }),
        Err(error) => return Err(malformed(&error.to_string())),
    }
    let current = request.version == Some(1);
    // Only CONNECT has an authority as its target.
    let target = request.path.unwrap_or_default();
    let form = target.starts_with('/') || target == "*" || target.contains("://");
    if Uri::try_from(target).is_err() || !(form || request.method == Some("CONNECT")) {
        return Err(malformed("the target is not a URI"));
    }
    let (mut hosts, mut length, mut chunked) = (0, None, false);
    for header in request.headers.iter() {
        match header.name.len() {
            4 if header.name.eq_ignore_ascii_case("host") => {
                hosts += 1;
                if hosts > 1 {
                    return Err(malformed("there is more than one host header"));
                }
                if !is_host(header.value) {
                    return Err(malformed("the host header names no host"));
                }
            }
            14 if header.name.eq_ignore_ascii_case("content-length") => {
                if length.is_some() {
                    return Err(malformed("there is more than one content-length header"));
                }
                length =
                    Some(number(header.value).ok_or_else(|| malformed("content-length is not a number"))?);
            }
            17 if header.name.eq_ignore_ascii_case("transfer-encoding") => {
                if chunked || !header.value.eq_ignore_ascii_case(b"chunked") {
                    return Err(malformed("transfer-encoding must be chunked, once"));
                }
                chunked = true;
            }
            _ => {}
        }
    }
    if current && hosts == 0 {
        return Err(malformed("there is no host header"));
    }
    match (chunked, length) {
        (true, Some(_)) => Err(malformed("there are both content-length and transfer-encoding")),
        (true, None) if !current => Err(malformed("HTTP/1.0 has no transfer-encoding")),
        (true, None) => Ok(Framing::Chunked),
        (false, length) => Ok(Framing::Sized(length.unwrap_or(0))),
    }
}

/// The path in a possibly incomplete request line.
pub(super) fn path(head: &[u8]) -> Option<&str> {
    let mut words = head.split(|byte| matches!(byte, b' ' | b'\r' | b'\n'));
    let target = std::str::from_utf8(words.nth(1)?).ok()?;
    target.split(['?', '#']).next()
}

fn malformed(reason: &str) -> ApiError {
    ApiError::BadHead { reason: reason.to_owned() }
}

/// Parses digits only: RFC 9110, section 8.6, allows no sign.
fn number(value: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(value).ok()?;
    text.parse().ok().filter(|_| value.iter().all(u8::is_ascii_digit))
}

/// Whether `value` is `host[:port]`, or empty, as for a target without authority.
fn is_host(value: &[u8]) -> bool {
    if value.is_empty() {
        return true;
    }
    let Ok(authority) = Authority::try_from(value) else { return false };
    let (text, host) = (authority.as_str(), authority.host());
    let port = text.strip_prefix(host).and_then(|rest| rest.strip_prefix(':'));
    !text.contains('@')
        && !host.is_empty()
        && port.is_none_or(|port| port.is_empty() || authority.port_u16().is_some())
}

/// Tracks a chunked body to find its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Chunks {
    /// In a chunk's size: digits so far, and the size so far.
    Size(u8, u64),
    /// In an extension after the size, with that size.
    Extension(u64),
    /// Before the line feed after the size.
    SizeEnd(u64),
    /// Bytes left in a chunk.
    Data(u64),
    /// The line end after a chunk: carriage return, then line feed.
    DataReturn,
    DataFeed,
    /// In a line after the last chunk; whether it is empty so far.
    Trailer(bool),
    /// The line feed of such a line.
    TrailerFeed(bool),
    /// The body is complete.
    Done,
    /// Invalid; hyper reports the error.
    Broken,
}

/// Most digits of a chunk's size.
const SIZE_DIGITS: u8 = 16;

impl Chunks {
    pub(super) const START: Self = Self::Size(0, 0);

    /// How many of the next bytes belong to this body.
    pub(super) fn take(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        while let Some(&byte) = bytes.get(at)
            && !matches!(self, Self::Done | Self::Broken)
        {
            if let Self::Data(left) = self {
                let count = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len() - at);
                *left -= count as u64;
                at += count;
                if *left == 0 {
                    *self = Self::DataReturn;
                }
                continue;
            }
            *self = self.step(byte);
            at += 1;
        }
        // hyper gets all bytes of an invalid body and reports the error.
        if *self == Self::Broken { bytes.len() } else { at }
    }

    fn step(self, byte: u8) -> Self {
        match (self, byte) {
            (Self::Size(digits, size), _) if byte.is_ascii_hexdigit() && digits < SIZE_DIGITS => {
                let digit = char::from(byte).to_digit(16).unwrap_or(0);
                Self::Size(digits + 1, size << 4 | u64::from(digit))
            }
            (Self::Size(1.., size) | Self::Extension(size), b'\r') => Self::SizeEnd(size),
            (Self::Size(1.., size), b';' | b' ' | b'\t') => Self::Extension(size),
            (Self::Extension(size), other) if other != b'\n' => Self::Extension(size),
            (Self::SizeEnd(0), b'\n') => Self::Trailer(true),
            (Self::SizeEnd(size), b'\n') => Self::Data(size),
            (Self::DataReturn, b'\r') => Self::DataFeed,
            (Self::DataFeed, b'\n') => Self::START,
            (Self::Trailer(empty), b'\r') => Self::TrailerFeed(empty),
            (Self::Trailer(_), other) if other != b'\n' => Self::Trailer(false),
            (Self::TrailerFeed(true), b'\n') => Self::Done,
            (Self::TrailerFeed(false), b'\n') => Self::Trailer(true),
            _ => Self::Broken,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(lines: &str) -> Vec<u8> {
        format!("POST /v1/completions HTTP/1.1\r\n{lines}\r\n").into_bytes()
    }

    #[test]
    fn unambiguous_heads_are_accepted() {
        for (lines, framing) in [
            ("host: x\r\n", Framing::Sized(0)),
            ("Host: x:80\r\nContent-Length: 12\r\n", Framing::Sized(12)),
            ("HOST: [::1]:8080\r\nTransfer-Encoding: Chunked\r\n", Framing::Chunked),
            ("host:\r\ncontent-length: 0\r\nx-a: b\r\n", Framing::Sized(0)),
            ("host: a_b.example.\r\nconnection: close, te\r\n", Framing::Sized(0)),
        ] {
            assert_eq!(check(&head(lines)), Ok(framing), "{lines:?}");
        }
        assert_eq!(check(b"GET / HTTP/1.0\r\n\r\n"), Ok(Framing::Sized(0)), "1.0 needs no host");
        assert_eq!(check(b"GET http://x/v1/models?a=b HTTP/1.1\r\nhost: x\r\n\r\n"), Ok(Framing::Sized(0)));
    }

    #[test]
    fn sec_heads_that_may_mean_two_things_are_refused() {
        for lines in [
            "",
            "host: a\r\nhost: b\r\n",
            "host: a\r\nHost: a\r\n",
            "host: a, b\r\n",
            "host: user@a\r\n",
            "host: a/b\r\n",
            "host: a:b\r\n",
            "host: a:99999\r\n",
            "host: a b\r\n",
            "host: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n",
            "host: x\r\ncontent-length: 2\r\ncontent-length: 2\r\n",
            "host: x\r\ncontent-length: 2, 2\r\n",
            "host: x\r\ncontent-length: +2\r\n",
            "host: x\r\ncontent-length: -1\r\n",
            "host: x\r\ncontent-length: 0x10\r\n",
            "host: x\r\ncontent-length:\r\n",
            "host: x\r\ncontent-length: 99999999999999999999\r\n",
            "host: x\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n",
            "host: x\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n",
            "host: x\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
            "host: x\r\ntransfer-encoding: chunked, identity\r\n",
            "host: x\r\ntransfer-encoding: gzip, chunked\r\n",
            "host: x\r\ntransfer-encoding: xchunked\r\n",
            "host: x\r\ntransfer-encoding : chunked\r\n",
            "host: x\r\n folded\r\n",
            " host: x\r\n",
            "host: x\r\nx y: z\r\n",
            "host: x\r\nx: \0\r\n",
            "host: x\r\nx\r\n",
        ] {
            assert!(matches!(check(&head(lines)), Err(ApiError::BadHead { .. })), "{lines:?}");
        }
        for whole in [
            "GET / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n",
            "GET / HTTP/2.0\r\nhost: x\r\n\r\n",
            "PRI * HTTP/2.0\r\n\r\n",
            "GET  / HTTP/1.1\r\nhost: x\r\n\r\n",
            "G(T / HTTP/1.1\r\nhost: x\r\n\r\n",
            "GET /\u{7f} HTTP/1.1\r\nhost: x\r\n\r\n",
            "GET nowhere HTTP/1.1\r\nhost: x\r\n\r\n",
        ] {
            assert!(matches!(check(whole.as_bytes()), Err(ApiError::BadHead { .. })), "{whole:?}");
        }
        let many = format!("host: x\r\n{}", "a: b\r\n".repeat(MAX_HEADERS));
        assert_eq!(check(&head(&many)), Err(ApiError::TooManyHeaders { limit: MAX_HEADERS }));
    }

    #[test]
    fn a_head_ends_at_its_empty_line_or_at_the_limit() {
        let whole = head("host: x\r\n");
        let mut scan = Scan::default();
        for end in 1..whole.len() {
            assert_eq!(scan.end(&whole[..end]), Ok(None));
        }
        let mut more = whole.clone();
        more.extend(b"body\n");
        assert_eq!(scan.end(&more), Ok(Some(whole.len())));
        let bare = Scan::default().end(b"GET / HTTP/1.1\nhost: x\n\n");
        assert!(matches!(bare, Err(ApiError::BadHead { .. })));
        let whole = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "y".repeat(MAX_HEAD));
        assert_eq!(Scan::default().end(whole.as_bytes()), Err(ApiError::TargetTooLong { limit: MAX_HEAD }));
        let long = head(&format!("x: {}\r\n", "y".repeat(MAX_HEAD)));
        assert_eq!(Scan::default().end(&long), Err(ApiError::HeadTooLarge { limit: MAX_HEAD }));
        let target = format!("GET /{} HTTP/1.1\r\n\r\n", "y".repeat(MAX_HEAD));
        let refused = Scan::default().end(target.as_bytes().get(..=MAX_HEAD).unwrap());
        assert_eq!(refused, Err(ApiError::TargetTooLong { limit: MAX_HEAD }));
    }

    #[test]
    fn the_path_of_an_incomplete_head_is_found() {
        assert_eq!(path(b"GET /v1/models?x HTTP/1.1\r\n"), Some("/v1/models"));
        assert_eq!(path(b"POST /v1/mess"), Some("/v1/mess"));
        assert_eq!(path(b"nonsense"), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// However the bytes are split, the end of a chunked body is found.
        #[test]
        fn the_end_of_a_chunked_body_is_found(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..6),
            trailer in any::<bool>(),
            cuts in prop::collection::vec(1usize..9, 1..40),
        ) {
            let mut body = Vec::new();
            for (at, chunk) in chunks.iter().enumerate() {
                let extension = if at % 2 == 0 { "" } else { ";a=b" };
                body.extend(format!("{:X}{extension}\r\n", chunk.len()).into_bytes());
                body.extend(chunk);
                body.extend(b"\r\n");
            }
            body.extend(b"0\r\n");
            if trailer {
                body.extend(b"x: y\r\n");
            }
            body.extend(b"\r\n");
            let whole = body.len();
            body.extend(b"GET / HTTP/1.1\r\n");
            let (mut state, mut at) = (Chunks::START, 0);
            for cut in cuts.iter().cycle() {
                let taken = state.take(&body[at..body.len().min(at + cut)]);
                at += taken;
                if state == Chunks::Done {
                    break;
                }
                prop_assert!(taken > 0);
            }
            prop_assert_eq!(at, whole);
        }
    }

    #[test]
    fn invalid_chunks_are_left_to_hyper() {
        for body in ["x\r\n", "\r\n", "2\nab", "2\r\nabc", "11111111111111111\r\n"] {
            let mut state = Chunks::START;
            assert_eq!((state.take(body.as_bytes()), state), (body.len(), Chunks::Broken), "{body:?}");
        }
    }
}
