//! CORS: which origins may send requests from a browser.
//!
//! Requests are authenticated by a key that the page must know, never by credentials that a browser adds.
//! With keys, any origin is therefore allowed, unless the operator lists origins. Without keys, only pages
//! served by this machine are allowed, and the origins that the operator lists.

use axum::http::{HeaderMap, HeaderName, HeaderValue, Uri, header};
use std::net::IpAddr;

/// Response headers that pages may read.
const EXPOSED: &str = "x-request-id, request-id, x-kvasir-worker, x-kvasir-backend, x-kvasir-route, \
                       x-kvasir-documents, retry-after";
/// Lifetime of a preflight result in the browser's cache, in seconds.
const MAX_AGE: &str = "7200";
const PRIVATE_NETWORK: HeaderName = HeaderName::from_static("access-control-request-private-network");
const ALLOW_PRIVATE_NETWORK: HeaderName = HeaderName::from_static("access-control-allow-private-network");

/// The setting for any origin.
const ANY: &str = "*";
/// The setting for no origin.
const NONE: &str = "none";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cors {
    /// `None`: not configured.
    origins: Option<Vec<String>>,
}

impl Cors {
    /// Parses the setting: `*`, `none`, or origins such as `https://app.example`.
    ///
    /// # Errors
    /// The first text that is not an origin.
    pub fn new(origins: Option<&[String]>) -> Result<Self, String> {
        let normalize = |origin: &String| match origin.as_str() {
            ANY | NONE => Ok(origin.clone()),
            _ if is_origin(origin) => Ok(origin.to_ascii_lowercase()),
            _ => Err(origin.clone()),
        };
        let origins = origins.map(|origins| origins.iter().map(normalize).collect::<Result<_, _>>());
        Ok(Self { origins: origins.transpose()? })
    }

    /// The value of `access-control-allow-origin`: `*` or the request's origin. `None` if the origin is not
    /// allowed or the request has none. `open`: no keys are configured.
    pub fn allowed(&self, headers: &HeaderMap, open: bool) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        let Some(origins) = &self.origins else {
            return match open {
                true => is_loopback(origin).then(|| origin.clone()),
                false => Some(HeaderValue::from_static(ANY)),
            };
        };
        if origins.iter().any(|allowed| allowed == ANY) {
            return Some(HeaderValue::from_static(ANY));
        }
        let text = origin.to_str().ok()?;
        origins.iter().any(|allowed| allowed.eq_ignore_ascii_case(text)).then(|| origin.clone())
    }

    /// Whether the origin is allowed when no keys are configured.
    pub fn allowed_without_key(&self, headers: &HeaderMap) -> bool {
        self.allowed(headers, true).is_some()
    }
}

/// Adds the headers that let an allowed page read the response.
pub fn expose(response: &mut HeaderMap, allowed: HeaderValue) {
    if allowed != ANY {
        response.append(header::VARY, HeaderValue::from_static("origin"));
    }
    response.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
    response.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
}

/// Adds the headers of a preflight response. `methods`: the methods of the path.
pub fn preflight(request: &HeaderMap, response: &mut HeaderMap, methods: &'static str) {
    response.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(methods));
    if let Some(requested) = request.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        response.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, requested.clone());
    }
    if request.contains_key(PRIVATE_NETWORK) {
        response.insert(ALLOW_PRIVATE_NETWORK, HeaderValue::from_static("true"));
    }
    response.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE));
}

/// Whether the page was served by this machine. A site whose DNS name resolves to this machine has that name
/// as its origin and does not match.
fn is_loopback(origin: &HeaderValue) -> bool {
    let Some(uri) = origin.to_str().ok().and_then(|origin| origin.parse::<Uri>().ok()) else { return false };
    let Some(host) = uri.host() else { return false };
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    let web = matches!(uri.scheme_str(), Some("http" | "https"));
    web && (host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback()))
}

/// Whether `text` is `scheme://host[:port]` without a path, or `null`, the origin of sandboxed pages.
fn is_origin(text: &str) -> bool {
    let Some((scheme, host)) = text.split_once("://") else { return text == "null" };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    let host_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte);
    !scheme.is_empty() && scheme.bytes().all(plain) && !host.is_empty() && host.bytes().all(host_byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(origin: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::ORIGIN, origin.parse().unwrap())])
    }

    fn cors(origins: &[&str]) -> Cors {
        let origins: Vec<String> = origins.iter().map(|&origin| origin.to_owned()).collect();
        Cors::new(Some(&origins)).unwrap()
    }

    #[test]
    fn sec_origins_are_the_configured_ones() {
        let page = from("http://localhost:5173");
        let default_cors = Cors::new(None).unwrap();
        assert_eq!(default_cors.allowed(&page, false), Some(HeaderValue::from_static("*")));
        // Without keys, only origins of this machine are allowed.
        for here in ["http://localhost:5173", "https://LocalHost", "http://127.0.0.1:80", "http://[::1]:3000"]
        {
            assert_eq!(default_cors.allowed(&from(here), true), Some(HeaderValue::from_static(here)));
            assert!(default_cors.allowed_without_key(&from(here)));
        }
        for other in [
            "http://localhost.evil",
            "http://evil.localhost.evil:80",
            "http://127.0.0.1.evil",
            "http://evil@localhost.evil",
            "http://10.0.0.1",
            "chrome-extension://localhost",
            "file://localhost",
            "localhost",
            "null",
        ] {
            assert_eq!(default_cors.allowed(&from(other), true), None, "{other}");
        }
        let one = cors(&["http://localhost:5173", "https://App.example"]);
        assert_eq!(one.allowed(&page, true), Some(HeaderValue::from_static("http://localhost:5173")));
        assert!(one.allowed_without_key(&page) && one.allowed_without_key(&from("https://app.example")));
        for other in ["http://localhost:5174", "https://localhost:5173", "http://localhost:5173.evil", "null"]
        {
            assert_eq!(one.allowed(&from(other), false), None, "{other}");
        }
        assert_eq!(cors(&["*"]).allowed(&page, true), Some(HeaderValue::from_static("*")));
        assert_eq!(cors(&["none"]).allowed(&page, false), None);
        assert_eq!(one.allowed(&HeaderMap::new(), false), None, "no page asks");
    }

    #[test]
    fn texts_that_are_not_origins_are_refused() {
        for wrong in ["localhost", "http://", "http://a/b", "https://a?b", "://a", "http://a b", ""] {
            assert_eq!(Cors::new(Some(&[wrong.to_owned()])), Err(wrong.to_owned()));
        }
        for right in
            ["http://a", "https://a.b:1", "http://[::1]:80", "chrome-extension://abc", "null", "*", "none"]
        {
            assert!(Cors::new(Some(&[right.to_owned()])).is_ok(), "{right}");
        }
    }
}
