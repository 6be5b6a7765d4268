//! Selects the proxy for a server from the usual environment variables.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use model::catalog::Url;

/// An HTTP proxy.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Proxy {
    pub(super) host: String,
    pub(super) port: u16,
    /// Name and password, encoded for the header.
    credentials: Option<String>,
}

impl Proxy {
    fn parse(name: &str, text: &str) -> Result<Self, String> {
        // The error omits the value, which may contain a password.
        let wrong = |why: &str| format!("{name}: {why}");
        let rest = match text.split_once("://") {
            Some(("http", rest)) => rest,
            Some(_) => return Err(wrong("only proxies at http:// are supported")),
            None => text,
        };
        let (user, server) = match rest.rsplit_once('@') {
            Some((user, server)) => (Some(user), server),
            None => (None, rest),
        };
        let url = Url::parse(&format!("http://{server}")).map_err(|error| wrong(&error.to_string()))?;
        let credentials = user.map(|user| STANDARD.encode(unescaped(user)));
        Ok(Self { host: url.host().to_owned(), port: url.port(), credentials })
    }

    /// The authorization header line; empty without credentials.
    pub(super) fn authorization(&self) -> String {
        let header = |credentials| format!("Proxy-Authorization: Basic {credentials}\r\n");
        self.credentials.as_ref().map(header).unwrap_or_default()
    }
}

/// Decodes percent escapes: `%41` is `A`.
fn unescaped(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        let code = after.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match code.and_then(|hex| u8::from_str_radix(hex, 16).ok()).filter(|_| *byte == b'%') {
            Some(code) => {
                bytes.push(code);
                rest = after.get(2..).unwrap_or_default();
            }
            None => {
                bytes.push(*byte);
                rest = after;
            }
        }
    }
    bytes
}

/// Proxies configured in the environment.
#[derive(Default)]
pub(super) struct Proxies {
    https: Option<Proxy>,
    http: Option<Proxy>,
    /// Hosts contacted without a proxy: names including their subdomains, addresses, or `*`.
    direct: Vec<String>,
}

impl Proxies {
    /// Reads `https_proxy`, `http_proxy`, `all_proxy` and `no_proxy`, also in capitals. `HTTP_PROXY` is
    /// excluded, because a request to a CGI program can set it.
    pub(super) fn new(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let first = |names: &[&str]| {
            let set =
                |name: &&str| Some(((*name).to_owned(), variable(name).filter(|value| !value.is_empty())?));
            names.iter().find_map(set)
        };
        let proxy =
            |names: &[&str]| first(names).map(|(name, value)| Proxy::parse(&name, &value)).transpose();
        let direct = first(&["no_proxy", "NO_PROXY"]).map(|(_, value)| value).unwrap_or_default();
        let plain = |host: &str| host.trim().trim_start_matches('.').to_ascii_lowercase();
        Ok(Self {
            https: proxy(&["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"])?,
            http: proxy(&["http_proxy", "all_proxy", "ALL_PROXY"])?,
            direct: direct.split(',').map(plain).filter(|host| !host.is_empty()).collect(),
        })
    }

    /// The proxy for a server; `None` for loopback addresses.
    pub(super) fn of(&self, url: &Url) -> Option<&Proxy> {
        let proxy = if url.is_tls() { self.https.as_ref() } else { self.http.as_ref() };
        let host = url.host().trim_start_matches('[').trim_end_matches(']');
        let below = |name: &String| host.strip_suffix(name.as_str()).is_some_and(|rest| rest.ends_with('.'));
        let direct = self.direct.iter().any(|name| name == "*" || name == host || below(name));
        proxy.filter(|_| !direct && !url.is_loopback())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxies(variables: &[(&str, &str)]) -> Result<Proxies, String> {
        Proxies::new(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn each_server_has_the_proxy_of_its_scheme() {
        let all = proxies(&[
            ("HTTPS_PROXY", "http://me:p%40ss@secure:3128"),
            ("HTTP_PROXY", "http://not-this-one"),
            ("http_proxy", "plain:8080"),
            ("no_proxy", "inside.example, .corp.example,10.0.0.7"),
        ])
        .unwrap();
        let of = |url: &str| {
            let url = Url::parse(url).unwrap();
            all.of(&url).map(|proxy| format!("{}:{}", proxy.host, proxy.port))
        };
        assert_eq!(of("https://models.example/x").as_deref(), Some("secure:3128"));
        assert_eq!(of("http://models.example/x").as_deref(), Some("plain:8080"));
        for direct in [
            "https://inside.example/",
            "https://a.inside.example/",
            "https://b.corp.example/",
            "https://10.0.0.7/",
            "http://127.0.0.1/",
        ] {
            assert_eq!(of(direct), None, "{direct}");
        }
        assert!(of("https://notinside.example/").is_some());
        let header = all.of(&Url::parse("https://a/").unwrap()).unwrap().authorization();
        assert_eq!(header, format!("Proxy-Authorization: Basic {}\r\n", STANDARD.encode("me:p@ss")));
        assert!(
            proxies(&[("https_proxy", "http://p"), ("NO_PROXY", "*")])
                .unwrap()
                .of(&Url::parse("https://a/").unwrap())
                .is_none()
        );
    }

    #[test]
    fn a_wrong_proxy_is_told_without_its_password() {
        for wrong in ["socks5://me:secret@a", "http://me:secret@a:port", "me:secret@"] {
            let error = proxies(&[("all_proxy", wrong)]).err().unwrap();
            assert!(error.starts_with("all_proxy: ") && !error.contains("secret"), "{error}");
        }
        assert_eq!(unescaped("a%2fb%zz%"), b"a/b%zz%");
    }
}
