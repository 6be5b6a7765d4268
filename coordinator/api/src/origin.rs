//! Detects browser requests that another site initiated. Such a site must not get what is open to this
//! machine.
//!
//! Two headers decide, which a page cannot change: `Origin`, the requesting site, and `Host`, the name by
//! which this machine was found. A site may let its DNS name resolve to this machine; to the browser its page
//! then has the same origin as this server (DNS rebinding). Therefore only IP addresses and `localhost` are
//! accepted as hosts.

use axum::http::{HeaderMap, header};
use std::net::IpAddr;

/// Whether a page of another site initiated the request, by headers that browsers send.
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

/// Like [`from_elsewhere`], for requests with an `Origin` only. Browsers send it with every WebSocket and
/// every request that is not a plain read. Other clients send none and may use any host name.
pub fn from_another_site(headers: &HeaderMap) -> bool {
    headers.contains_key(header::ORIGIN) && from_elsewhere(headers)
}

/// Whether a host is an IP address or `localhost`. Any other name may be one that the initiating site let
/// resolve to this machine.
fn is_no_name(host: &str) -> bool {
    let port = |(_, port): &(&str, &str)| port.bytes().all(|byte| byte.is_ascii_digit());
    let name = host.rsplit_once(':').filter(port).map_or(host, |(name, _)| name);
    let address = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || address.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Refuses a site whose DNS name resolves to this machine, so that the browser takes responses for the
    /// site's own.
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
