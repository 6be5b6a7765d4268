//! Browsers that are sent here by another site: what is anybody's on this machine shall not be that site's.
//!
//! Two headers tell, which a page cannot change: `Origin`, the site that asks, and `Host`, by which name this machine was
//! found. A site may have a name of its own point to this machine, and is then of the same origin as what it asks for, to
//! the browser; so a name is nobody's but `localhost`.

use axum::http::{HeaderMap, header};
use std::net::IpAddr;

/// Whether it is a page of another site that has a browser ask, by what only browsers say.
pub fn from_elsewhere(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    if !host.is_empty() && !is_no_name(host) {
        return true;
    }
    let Some(origin) = headers.get(header::ORIGIN) else { return false };
    let same =
        origin.to_str().ok().and_then(|origin| origin.split_once("://")).is_some_and(|(_, at)| at == host);
    !same
}

/// As [`from_elsewhere`], of requests with which a browser names its site: all that open a WebSocket, and all but plain
/// reading. Other clients name none, and may call this machine what they like.
pub fn from_another_site(headers: &HeaderMap) -> bool {
    headers.contains_key(header::ORIGIN) && from_elsewhere(headers)
}

/// Whether a host is an address, or this machine whatever a name server says: another name may have been pointed here by
/// the site that a browser comes from.
fn is_no_name(host: &str) -> bool {
    let port = |(_, port): &(&str, &str)| port.bytes().all(|byte| byte.is_ascii_digit());
    let name = host.rsplit_once(':').filter(port).map_or(host, |(name, _)| name);
    let address = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || address.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A site that has its own name point to this machine, so that the browser takes our answers for its own, is refused.
    #[test]
    fn sec_no_name_is_this_machine() {
        let headers = |host: &str, origin: Option<&str>| -> HeaderMap {
            let origin = origin.map(|origin| (header::ORIGIN, origin.parse().unwrap()));
            HeaderMap::from_iter([(header::HOST, host.parse().unwrap())].into_iter().chain(origin))
        };
        for host in [
            "evil.example:9090",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:80",
            "[evil]:1",
        ] {
            assert!(from_elsewhere(&headers(host, None)), "{host}");
            assert!(from_elsewhere(&headers(host, Some(&format!("http://{host}")))), "{host}");
            assert!(from_another_site(&headers(host, Some(&format!("http://{host}")))), "{host}");
            assert!(!from_another_site(&headers(host, None)), "{host}");
        }
        for host in ["127.0.0.1:9090", "localhost", "LocalHost:9090", "[::1]:9090", "10.0.0.1"] {
            assert!(!from_elsewhere(&headers(host, None)), "{host}");
            assert!(!from_elsewhere(&headers(host, Some(&format!("http://{host}")))), "{host}");
            for origin in ["http://evil.example", "null", "file://"] {
                assert!(from_elsewhere(&headers(host, Some(origin))), "{host} {origin}");
                assert!(from_another_site(&headers(host, Some(origin))), "{host} {origin}");
            }
        }
    }
}
