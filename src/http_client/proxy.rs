//! Selects the proxy for a server from the usual environment variables.

use hub::catalog::Url;
use hyper::Uri;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};

/// Reads `https_proxy`, `http_proxy`, `all_proxy` and `no_proxy`, also in capitals. `HTTP_PROXY` is excluded,
/// because a request to a CGI program can set it. `no_proxy` has names including their subdomains, addresses
/// and networks, or `*`.
///
/// # Errors
/// The variable and why it names no usable proxy. The text omits the value, which may contain a password.
pub(super) fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Matcher, String> {
    let value = |name: &str| variable(name).filter(|value| !value.is_empty());
    let proxy = |names: &[&str]| {
        let Some((name, value)) = names.iter().find_map(|name| Some((name, value(name)?))) else {
            return Ok(String::new());
        };
        let proxy = Matcher::builder().all(&value).build().intercept(&Uri::from_static("http://server"));
        match proxy.as_ref().map(Intercept::uri) {
            Some(uri) if uri.scheme_str() != Some("http") => {
                Err(format!("{name}: only proxies at http:// are supported"))
            }
            Some(uri) if Url::parse(&uri.to_string()).is_ok() => Ok(value),
            _ => Err(format!("{name}: not http://HOST:PORT or http://USER:PASSWORD@HOST:PORT")),
        }
    };
    let direct = value("no_proxy").or_else(|| value("NO_PROXY")).unwrap_or_default();
    let https = proxy(&["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"])?;
    let http = proxy(&["http_proxy", "all_proxy", "ALL_PROXY"])?;
    Ok(Matcher::builder().https(https).http(http).no(direct).build())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxies(variables: &[(&str, &str)]) -> Result<Matcher, String> {
        from_variables(|name| {
            variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn each_server_has_the_proxy_of_its_scheme() {
        let all = proxies(&[
            ("HTTPS_PROXY", "http://me:p%40ss@secure:3128"),
            ("HTTP_PROXY", "http://not-this-one"),
            ("http_proxy", "plain:8080"),
            ("no_proxy", "inside.example, .Corp.example,10.0.0.7,fd00::7,10.1.0.0/16"),
        ])
        .unwrap();
        let of =
            |url: &'static str| all.intercept(&Uri::from_static(url)).map(|proxy| proxy.uri().to_string());
        assert_eq!(of("https://models.example/x").as_deref(), Some("http://secure:3128/"));
        assert_eq!(of("http://models.example/x").as_deref(), Some("http://plain:8080/"));
        for direct in [
            "https://inside.example/",
            "https://a.inside.example/",
            "https://b.corp.example/",
            "https://10.0.0.7/",
            "https://[fd00::7]/",
            "http://10.1.2.3/",
        ] {
            assert_eq!(of(direct), None, "{direct}");
        }
        assert!(of("https://notinside.example/").is_some());
        let proxy = all.intercept(&Uri::from_static("https://a/")).unwrap();
        assert_eq!(proxy.basic_auth().unwrap(), "Basic bWU6cEBzcw==");
        let none = proxies(&[("https_proxy", "http://p"), ("NO_PROXY", "*")]).unwrap();
        assert!(none.intercept(&Uri::from_static("https://a/")).is_none());
    }

    #[test]
    fn a_wrong_proxy_is_reported_without_its_password() {
        for wrong in [
            "socks5://me:secret@a",
            "https://me:secret@a",
            "http://me:secret@a:port",
            "http://me:secret@a:99999",
            "me:secret@",
            "http://me:secret@/",
        ] {
            let error = proxies(&[("all_proxy", wrong)]).err().unwrap();
            assert!(error.starts_with("all_proxy: ") && !error.contains("secret"), "{error}");
        }
    }
}
