//! State machine of one file's download: builds requests, interprets responses and schedules retries. Uses no
//! sockets, files or clocks.

use std::time::Duration;

use super::http::{Head, Request};
use super::{InvalidAddress, Url};

/// Maximum number of redirects that one request follows.
const MAX_REDIRECTS: u32 = 10;
/// Maximum number of consecutive failures without a byte received in between.
const MAX_FAILURES: u32 = 6;
/// Maximum number of restarts from byte 0 because the file changed or the server contradicted itself.
const MAX_RESTARTS: u32 = 4;
/// First pause before a retry. Each further pause is twice as long.
const PAUSE: Duration = Duration::from_secs(1);
/// Upper bound of a pause, whatever `Retry-After` says.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Upper bound of a model file's size.
pub(super) const MAX_BYTES: u64 = 1 << 44;

/// Error of a server's response that ends a download.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// HTTP status 401 or 403.
    #[error(
        "the server refuses access ({0}); a hub's model may require a token (HF_TOKEN) and accepted terms"
    )]
    Denied(u16),
    /// HTTP status 404 or 410.
    #[error("the server has no such file ({0})")]
    Absent(u16),
    #[error("the server responded with status {0}")]
    Status(u16),
    /// Too many redirects.
    #[error("more than {MAX_REDIRECTS} redirects")]
    Redirects,
    /// A redirect without a usable address.
    #[error("the server redirects to {location:?}: {source}")]
    Location { location: String, source: InvalidAddress },
    /// Not TLS, and not a loopback address.
    #[error(
        "{0} would be contacted without TLS; use https://, or allow it with --allow-http (KVASIR_ALLOW_HTTP=1)"
    )]
    Plain(String),
    /// The length differs from the pinned one.
    #[error("the file has {found} bytes on the server, expected {expected}")]
    Length {
        /// Actual bytes.
        found: u64,
        /// Pinned bytes.
        expected: u64,
    },
    #[error("the file has {found} bytes, at most {limit} are accepted")]
    Huge { found: u64, limit: u64 },
    /// The file changed, or the server contradicted itself, too often.
    #[error("the file changed on the server repeatedly during the download")]
    Unsteady,
    /// The network failed too often without a byte received in between.
    #[error("{MAX_FAILURES} attempts failed; the last error: {0}")]
    Failed(String),
}

/// Properties of the file that earlier responses reported. Stored beside the partial file.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct TransferState {
    /// Bytes of the file that are on disk.
    pub(super) have: u64,
    /// Size of the whole file.
    pub(super) total: Option<u64>,
    /// Detects that the file changed: a strong `ETag`, else `Last-Modified`.
    pub(super) validator: Option<String>,
    /// SHA-256 reported by the server.
    #[serde(rename = "told")]
    pub(super) reported_sha256: Option<String>,
}

/// Next action after a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResponseAction {
    /// Write the body at this position, after truncating the file to it.
    Body {
        at: u64,
    },
    Again,
    /// Retry after a pause.
    RetryAfter(Duration),
    /// The file is complete.
    Complete,
}

/// Hosts that may be contacted without TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PlainHttp {
    #[default]
    Loopback,
    /// Any host of an `http://` address. A redirect from `https://` to `http://` is still refused.
    Allowed,
}

/// Bytes that a file may have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    /// The exact number, if it is known.
    pub(super) expected: Option<u64>,
    /// Upper bound.
    pub(super) limit: u64,
}

/// A file that is being downloaded.
#[derive(Debug)]
pub(super) struct Transfer {
    origin: Url,
    bearer: Option<String>,
    plain: PlainHttp,
    size: Size,
    state: TransferState,
    /// Commit that the hub reported.
    commit: Option<String>,
    /// Target of the next request.
    url: Url,
    redirects: u32,
    failures: u32,
    restarts: u32,
}

impl Transfer {
    /// Downloads the file at `origin`. `state` describes the part already on disk.
    pub(super) fn new(
        origin: Url,
        bearer: Option<String>,
        plain: PlainHttp,
        size: Size,
        state: TransferState,
    ) -> Result<Self, Refusal> {
        let url = origin.clone();
        check_plain(&url, plain)?;
        let commit = None;
        Ok(Self { origin, bearer, plain, size, state, commit, url, redirects: 0, failures: 0, restarts: 0 })
    }

    /// The commit that the hub's file is of: 40 hexadecimal digits.
    pub(super) fn commit(&self) -> Option<&str> {
        self.commit.as_deref()
    }

    pub(super) fn state(&self) -> &TransferState {
        &self.state
    }

    /// The next request to send.
    pub(super) fn request(&self) -> Request {
        // Without a validator the rest could belong to a changed file, so the download starts at byte 0.
        let resumes = self.state.have > 0 && self.state.validator.is_some();
        Request {
            url: self.url.clone(),
            from: resumes.then_some(self.state.have),
            if_range: self.state.validator.clone().filter(|_| resumes),
            bearer: self.bearer.clone().filter(|_| self.url.same_server(&self.origin)),
        }
    }

    /// Interprets the response to [`request`](Self::request).
    pub(super) fn head(&mut self, head: &Head) -> Result<ResponseAction, Refusal> {
        let requested = self.request().from;
        if let Some(reported_sha256) = head.header("x-linked-etag").and_then(sha256) {
            self.state.reported_sha256 = Some(reported_sha256);
        }
        let is_commit = |word: &&str| word.len() == 40 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
        if let Some(commit) = head.header("x-repo-commit").filter(is_commit) {
            self.commit = Some(commit.to_owned());
        }
        match head.status {
            200 => {
                self.state = TransferState {
                    reported_sha256: self.state.reported_sha256.take(),
                    ..TransferState::default()
                };
                let length = head.header("content-length").and_then(|length| length.parse().ok());
                self.learn(head, length)?;
                Ok(ResponseAction::Body { at: 0 })
            }
            206 => match (requested, head.header("content-range").and_then(content_range)) {
                (Some(from), Some(Range { first, total })) if first == from => {
                    let same = validator(head).is_none_or(|found| Some(found) == self.state.validator)
                        && (total.is_none() || self.state.total.is_none() || total == self.state.total);
                    if !same {
                        return self.start_over();
                    }
                    self.learn(head, total.or(self.state.total))?;
                    Ok(ResponseAction::Body { at: from })
                }
                _ => self.start_over(),
            },
            416 => {
                let total = head.header("content-range").and_then(|range| range.strip_prefix("bytes */"));
                let total: Option<u64> = total.and_then(|total| total.parse().ok());
                let complete = total == Some(self.state.have) && self.state.total == total;
                if complete { Ok(ResponseAction::Complete) } else { self.start_over() }
            }
            301 | 302 | 303 | 307 | 308 => self.follow(head.header("location").unwrap_or_default()),
            // The URL of a redirect target may have expired; retry from the original address.
            401 | 403 if self.url != self.origin && self.state.have > 0 => self.broken("refused", None),
            status @ (401 | 403) => Err(Refusal::Denied(status)),
            status @ (404 | 410) => Err(Refusal::Absent(status)),
            status @ (408 | 425 | 429 | 500 | 502 | 503 | 504) => {
                let after = head.header("retry-after").and_then(|seconds| seconds.parse().ok());
                self.broken(
                    &format!("the server responded with status {status}"),
                    after.map(Duration::from_secs),
                )
            }
            status => Err(Refusal::Status(status)),
        }
    }

    /// Counts `bytes` received of the body.
    pub(super) fn received(&mut self, bytes: u64) -> Result<(), Refusal> {
        self.state.have = self.state.have.saturating_add(bytes);
        self.failures = 0;
        let max = self.size.expected.or(self.state.total).unwrap_or(u64::MAX).min(self.size.limit);
        if self.state.have > max {
            return Err(self.wrong_length(self.state.have));
        }
        Ok(())
    }

    /// Handles a body that ended normally: complete, or to be continued if bytes are missing.
    pub(super) fn ended(&mut self) -> Result<ResponseAction, Refusal> {
        match self.state.total {
            Some(total) if self.state.have < total => {
                self.broken(&format!("the response ended after {} of {total} bytes", self.state.have), None)
            }
            // A chunked body marks its own end.
            _ => match self.size.expected {
                Some(expected) if expected != self.state.have => Err(self.wrong_length(self.state.have)),
                _ => Ok(ResponseAction::Complete),
            },
        }
    }

    /// Handles a failed connection or a temporary server error. `after` is the pause that the server
    /// requested.
    pub(super) fn broken(&mut self, why: &str, after: Option<Duration>) -> Result<ResponseAction, Refusal> {
        self.failures += 1;
        if self.failures >= MAX_FAILURES {
            return Err(Refusal::Failed(why.to_owned()));
        }
        self.begin_again();
        let own = PAUSE.saturating_mul(1 << (self.failures - 1).min(10));
        Ok(ResponseAction::RetryAfter(after.unwrap_or(own).min(LONGEST_PAUSE)))
    }

    /// Discards the partial file because the file changed or the server contradicted itself.
    fn start_over(&mut self) -> Result<ResponseAction, Refusal> {
        self.restarts += 1;
        if self.restarts > MAX_RESTARTS {
            return Err(Refusal::Unsteady);
        }
        self.state = TransferState::default();
        self.begin_again();
        Ok(ResponseAction::Again)
    }

    fn begin_again(&mut self) {
        self.url = self.origin.clone();
        self.redirects = 0;
    }

    fn follow(&mut self, location: &str) -> Result<ResponseAction, Refusal> {
        self.redirects += 1;
        if self.redirects > MAX_REDIRECTS {
            return Err(Refusal::Redirects);
        }
        let url = self.url.join(location).map_err(|source| Refusal::Location {
            location: location.split('?').next().unwrap_or_default().chars().take(200).collect(),
            source,
        })?;
        if self.url.is_tls() && !url.is_tls() {
            return Err(Refusal::Plain(url.without_query()));
        }
        check_plain(&url, self.plain)?;
        self.url = url;
        Ok(ResponseAction::Again)
    }

    /// Records the file's size and validator from a response head.
    fn learn(&mut self, head: &Head, total: Option<u64>) -> Result<(), Refusal> {
        if let (Some(total), Some(expected)) = (total, self.size.expected)
            && total != expected
        {
            return Err(self.wrong_length(total));
        }
        if let Some(found) = total.filter(|total| *total > self.size.limit) {
            return Err(Refusal::Huge { found, limit: self.size.limit });
        }
        self.state.total = total;
        self.state.validator = validator(head).or(self.state.validator.take());
        Ok(())
    }

    fn wrong_length(&self, found: u64) -> Refusal {
        match self.size.expected.or(self.state.total) {
            Some(expected) => Refusal::Length { found, expected },
            None => Refusal::Huge { found, limit: self.size.limit },
        }
    }
}

fn check_plain(url: &Url, plain: PlainHttp) -> Result<(), Refusal> {
    if url.is_tls() || url.is_loopback() || plain == PlainHttp::Allowed {
        Ok(())
    } else {
        Err(Refusal::Plain(url.without_query()))
    }
}

/// Value for `If-Range`: a strong `ETag`, else a date.
fn validator(head: &Head) -> Option<String> {
    let strong = head.header("etag").filter(|etag| etag.starts_with('"') && etag.len() < 256);
    let found = strong.or_else(|| head.header("last-modified").filter(|date| date.len() < 64))?;
    found.bytes().all(|byte| (b' '..=b'~').contains(&byte)).then(|| found.to_owned())
}

struct Range {
    first: u64,
    total: Option<u64>,
}

/// Parses `bytes 5-9/10` and `bytes 5-9/*`.
fn content_range(text: &str) -> Option<Range> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let total = if total == "*" { None } else { Some(total.parse().ok()?) };
    (first <= last && total.is_none_or(|total| last < total)).then_some(Range { first, total })
}

/// Parses a quoted SHA-256, as hubs send it in `x-linked-etag`.
fn sha256(etag: &str) -> Option<String> {
    let hex = etag.trim_matches('"');
    (hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| hex.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfer(expected: Option<u64>, state: TransferState) -> Transfer {
        let url = Url::parse("https://a.example/m.gguf").unwrap();
        let size = Size { expected, limit: MAX_BYTES };
        Transfer::new(url, Some("secret".into()), PlainHttp::Loopback, size, state).unwrap()
    }

    fn head(status: u16, headers: &[(&str, &str)]) -> Head {
        let headers = headers.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        Head { status, headers }
    }

    fn half() -> TransferState {
        TransferState { have: 5, total: Some(10), validator: Some("\"v1\"".into()), reported_sha256: None }
    }

    #[test]
    fn a_whole_file_comes_in_one_answer() {
        let mut transfer = transfer(None, TransferState::default());
        assert_eq!(transfer.request().from, None);
        let answer = head(200, &[("content-length", "10"), ("etag", "\"v1\"")]);
        assert_eq!(transfer.head(&answer), Ok(ResponseAction::Body { at: 0 }));
        transfer.received(10).unwrap();
        assert_eq!(transfer.ended(), Ok(ResponseAction::Complete));
        assert_eq!(transfer.received(1), Err(Refusal::Length { found: 11, expected: 10 }));
    }

    #[test]
    fn a_part_is_gone_on_with_only_if_the_file_is_the_same() {
        let range = ("content-range", "bytes 5-9/10");
        for (answer, verdict, have) in [
            (head(206, &[range, ("etag", "\"v1\"")]), ResponseAction::Body { at: 5 }, 5),
            (head(206, &[range]), ResponseAction::Body { at: 5 }, 5),
            (head(206, &[("content-range", "bytes 5-9/*")]), ResponseAction::Body { at: 5 }, 5),
            // Changed file, wrong position, no position, wrong length: start over.
            (head(206, &[range, ("etag", "\"v2\"")]), ResponseAction::Again, 0),
            (head(206, &[("content-range", "bytes 4-9/10")]), ResponseAction::Again, 0),
            (head(206, &[]), ResponseAction::Again, 0),
            (head(206, &[("content-range", "bytes 5-9/9")]), ResponseAction::Again, 0),
            (head(206, &[("content-range", "bytes 5-10/11")]), ResponseAction::Again, 0),
            // A server without range support, or with a changed file, sends the whole file.
            (head(200, &[("content-length", "20"), ("etag", "\"v2\"")]), ResponseAction::Body { at: 0 }, 0),
            (head(416, &[("content-range", "bytes */10")]), ResponseAction::Again, 0),
        ] {
            let mut transfer = transfer(None, half());
            let request = transfer.request();
            assert_eq!((request.from, request.if_range.as_deref()), (Some(5), Some("\"v1\"")));
            assert_eq!(transfer.head(&answer), Ok(verdict), "{answer:?}");
            assert_eq!(transfer.state().have, have, "{answer:?}");
        }
        let whole = TransferState { have: 10, ..half() };
        assert_eq!(
            transfer(None, whole).head(&head(416, &[("content-range", "bytes */10")])),
            Ok(ResponseAction::Complete)
        );
        let unnamed = TransferState { validator: None, ..half() };
        assert_eq!(transfer(None, unnamed).request().from, None, "a change could not be noticed");
    }

    #[test]
    fn weak_names_of_a_file_are_not_used() {
        for (headers, found) in [
            (&[("etag", "W/\"v\""), ("last-modified", "Sun, 22 Nov 2026")][..], Some("Sun, 22 Nov 2026")),
            (&[("etag", "W/\"v\"")], None),
            (&[("etag", "\"v\"")], Some("\"v\"")),
            (&[("etag", "\"a\r\nb\"")], None),
        ] {
            assert_eq!(validator(&head(200, headers)).as_deref(), found);
        }
    }

    #[test]
    fn redirects_are_followed_so_far_and_never_out_of_tls() {
        let mut transfer = transfer(None, half());
        assert_eq!(transfer.head(&head(302, &[("location", "/other")])), Ok(ResponseAction::Again));
        assert_eq!(transfer.request().bearer.as_deref(), Some("secret"), "the same server");
        let linked = "\"53AA51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db\"";
        let away = head(302, &[("location", "https://cdn.example/x?sig=1"), ("x-linked-etag", linked)]);
        assert_eq!(transfer.head(&away), Ok(ResponseAction::Again));
        assert_eq!(transfer.request().bearer, None, "another server is not told the token");
        assert_eq!(transfer.request().from, Some(5));
        assert_eq!(
            transfer.state().reported_sha256.as_deref(),
            Some(linked.to_ascii_lowercase().trim_matches('"'))
        );
        // The signed URL may have expired, so the original address is requested again.
        assert_eq!(transfer.head(&head(403, &[])), Ok(ResponseAction::RetryAfter(PAUSE)));
        assert_eq!(transfer.request().url.host(), "a.example");
        for _ in 0..MAX_REDIRECTS {
            assert_eq!(transfer.head(&away), Ok(ResponseAction::Again));
        }
        assert_eq!(transfer.head(&away), Err(Refusal::Redirects));
        for out in ["http://b.example/x", "http://127.0.0.1/x"] {
            let plain = head(302, &[("location", &format!("{out}?secret"))]);
            assert_eq!(self::transfer(None, half()).head(&plain), Err(Refusal::Plain(out.into())));
        }
        let none = self::transfer(None, half()).head(&head(302, &[]));
        assert!(matches!(none, Ok(ResponseAction::Again)), "an empty location is the folder: {none:?}");
        let wrong = self::transfer(None, half()).head(&head(302, &[("location", "file:///etc/passwd")]));
        assert!(matches!(wrong, Err(Refusal::Location { .. })), "{wrong:?}");
    }

    #[test]
    fn only_this_machine_is_asked_without_tls_unless_that_is_allowed() {
        let url = |text| Url::parse(text).unwrap();
        let size = Size { expected: None, limit: MAX_BYTES };
        let new =
            |text, plain| Transfer::new(url(text), None, plain, size, TransferState::default()).map(drop);
        assert!(new("http://127.0.0.1:1/m", PlainHttp::Loopback).is_ok());
        assert!(matches!(new("http://a.example/m", PlainHttp::Loopback), Err(Refusal::Plain(_))));
        assert!(new("http://a.example/m", PlainHttp::Allowed).is_ok());
    }

    #[test]
    fn failures_are_borne_as_long_as_bytes_come_between_them() {
        let mut transfer = transfer(None, half());
        for round in 0..20 {
            for expected in [1, 2, 4, 8] {
                let paused = transfer.broken("cut", None);
                assert_eq!(paused, Ok(ResponseAction::RetryAfter(Duration::from_secs(expected))), "{round}");
            }
            transfer.state.have = 4;
            transfer.received(1).unwrap();
        }
        let busy = head(503, &[("retry-after", "7")]);
        assert_eq!(transfer.head(&busy), Ok(ResponseAction::RetryAfter(Duration::from_secs(7))));
        let never = head(429, &[("retry-after", "86400")]);
        assert_eq!(transfer.head(&never), Ok(ResponseAction::RetryAfter(LONGEST_PAUSE)));
        for _ in 0..3 {
            transfer.broken("cut", None).unwrap();
        }
        assert_eq!(transfer.broken("cut off", None), Err(Refusal::Failed("cut off".into())));
    }

    #[test]
    fn an_answer_that_ends_early_is_gone_on_with() {
        let mut transfer = transfer(Some(10), TransferState::default());
        transfer.head(&head(200, &[("content-length", "10"), ("etag", "\"v1\"")])).unwrap();
        transfer.received(4).unwrap();
        assert!(matches!(transfer.ended(), Ok(ResponseAction::RetryAfter(_))));
        assert_eq!(transfer.request().from, Some(4));
        let mut chunked = self::transfer(Some(10), TransferState::default());
        chunked.head(&head(200, &[])).unwrap();
        chunked.received(9).unwrap();
        assert_eq!(chunked.ended(), Err(Refusal::Length { found: 9, expected: 10 }));
    }

    #[test]
    fn a_response_that_cannot_be_the_file_ends_the_download() {
        let answer = |expected, status, headers: &[(&str, &str)]| {
            transfer(expected, half()).head(&head(status, headers)).unwrap_err()
        };
        assert_eq!(
            answer(Some(9), 200, &[("content-length", "10")]),
            Refusal::Length { found: 10, expected: 9 }
        );
        assert_eq!(
            answer(None, 200, &[("content-length", "99999999999999")]),
            Refusal::Huge { found: 99_999_999_999_999, limit: MAX_BYTES }
        );
        assert_eq!(answer(None, 401, &[]), Refusal::Denied(401));
        assert_eq!(answer(None, 404, &[]), Refusal::Absent(404));
        assert_eq!(answer(None, 418, &[]), Refusal::Status(418));
        let mut unsteady = transfer(None, half());
        let changed = head(206, &[("content-range", "bytes 5-9/10"), ("etag", "\"v2\"")]);
        for _ in 0..MAX_RESTARTS {
            unsteady.state = half();
            assert_eq!(unsteady.head(&changed), Ok(ResponseAction::Again));
        }
        unsteady.state = half();
        assert_eq!(unsteady.head(&changed), Err(Refusal::Unsteady));
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(256))]
        #[test]
        fn no_header_makes_it_panic_or_resume_elsewhere(
            status in 0u16..600, name in "content-range|content-length|location|etag|retry-after", value in "\\PC{0,40}",
            have in 0u64..20,
        ) {
            let mut transfer = transfer(None, TransferState { have, ..half() });
            let from = transfer.request().from;
            if let Ok(ResponseAction::Body { at }) = transfer.head(&head(status, &[(&name, &value)])) {
                proptest::prop_assert!(at == 0 || Some(at) == from);
            }
        }
    }
}
