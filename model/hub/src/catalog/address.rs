//! Addresses of models (`https://`, `http://`, `hf://`) and the URLs that they resolve to.

use std::fmt;
use std::net::IpAddr;

use super::without_part_number;

/// Longest address in bytes. Signed redirect targets have some kilobytes.
const MAX_ADDRESS: usize = 8 << 10;
/// Maximum number of files of a split set.
const MAX_PARTS: usize = 1000;
/// Default hub endpoint, if `HF_ENDPOINT` is not set.
const HUB: &str = "https://huggingface.co";

/// Error of a text that is not a valid model address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidAddress {
    /// Not `https://`, `http://` or `hf://`.
    #[error("must begin with https://, http:// or hf://")]
    Scheme,
    /// Too long, or contains characters that must be escaped in an address.
    #[error("is longer than 8 KiB or has characters that are not allowed in an address (write them as %XX)")]
    Characters,
    /// The host is missing, or the port is invalid.
    #[error("has no host, or an invalid port")]
    Host,
    /// The address contains a user name or a password.
    #[error("contains a user name; credentials in addresses are not accepted")]
    Credentials,
    #[error("must end with the name of a .gguf file, or be a repository: hf://OWNER/REPO")]
    File,
    /// A hub address without owner or repository, or with an invalid name.
    #[error("must be hf://OWNER/REPO/FILE.gguf or hf://OWNER/REPO, where REPO@REVISION names a revision")]
    Hub,
}

/// An `http://` or `https://` address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Url {
    tls: bool,
    host: String,
    port: u16,
    /// Path and query; begins with a slash.
    target: String,
}

impl Url {
    /// Parses a URL and drops its fragment.
    ///
    /// # Errors
    /// [`InvalidAddress`], except the variants about file names.
    pub fn parse(text: &str) -> Result<Self, InvalidAddress> {
        if text.len() > MAX_ADDRESS || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(InvalidAddress::Characters);
        }
        let (scheme, rest) = text.split_once("://").ok_or(InvalidAddress::Scheme)?;
        let tls = match scheme.to_ascii_lowercase().as_str() {
            "https" => true,
            "http" => false,
            _ => return Err(InvalidAddress::Scheme),
        };
        let rest = rest.split('#').next().unwrap_or_default();
        let (authority, target) = match rest.find(['/', '?']) {
            Some(at) => rest.split_at(at),
            None => (rest, "/"),
        };
        if authority.contains('@') {
            return Err(InvalidAddress::Credentials);
        }
        // In an IPv6 address, the port's colon comes after the bracket.
        let after = authority.rfind(']').map_or(0, |at| at + 1);
        let (host, port) = match authority.get(after..).and_then(|rest| rest.find(':')) {
            Some(colon) => (
                authority.get(..after + colon).unwrap_or_default(),
                authority.get(after + colon + 1..).unwrap_or_default().parse().ok().filter(|port| *port > 0),
            ),
            None => (authority, Some(if tls { 443 } else { 80 })),
        };
        let plain = |host: &str| host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
        let bracketed = |host: &str| {
            let inside = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
            inside.is_some_and(|inside| inside.parse::<std::net::Ipv6Addr>().is_ok())
        };
        match port {
            Some(port) if !host.is_empty() && (plain(host) || bracketed(host)) => {
                let slash = if target.starts_with('/') { "" } else { "/" };
                Ok(Self { tls, host: host.to_ascii_lowercase(), port, target: format!("{slash}{target}") })
            }
            _ => Err(InvalidAddress::Host),
        }
    }

    /// True for `https://`.
    pub fn is_tls(&self) -> bool {
        self.tls
    }

    /// Host name or IP address; an IPv6 address is in brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port, or the scheme's default port.
    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn target(&self) -> &str {
        &self.target
    }

    /// Host and port as in a `Host` header.
    pub fn authority(&self) -> String {
        let default = if self.tls { 443 } else { 80 };
        if self.port == default { self.host.clone() } else { format!("{}:{}", self.host, self.port) }
    }

    /// True if the host is `localhost` or a loopback address.
    pub fn is_loopback(&self) -> bool {
        let bare = self.host.trim_start_matches('[').trim_end_matches(']');
        bare == "localhost" || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }

    /// True if scheme, host and port are equal. Credentials may be sent only to the same server.
    pub fn same_server(&self, other: &Self) -> bool {
        (self.tls, &self.host, self.port) == (other.tls, &other.host, other.port)
    }

    /// Resolves a redirect's `Location` against this URL.
    ///
    /// # Errors
    /// [`InvalidAddress`].
    pub fn join(&self, location: &str) -> Result<Self, InvalidAddress> {
        let scheme = if self.tls { "https" } else { "http" };
        let head = location.split(['/', '?', '#']).next().unwrap_or_default();
        if head.ends_with(':') {
            return Self::parse(location);
        }
        if let Some(rest) = location.strip_prefix("//") {
            return Self::parse(&format!("{scheme}://{rest}"));
        }
        let path = self.target.split('?').next().unwrap_or_default();
        let base =
            if location.starts_with('/') { "" } else { path.rsplit_once('/').map_or("", |(dir, _)| dir) };
        let slash = if location.starts_with('/') { "" } else { "/" };
        Self::parse(&format!("{scheme}://{}{base}{slash}{location}", self.authority()))
    }

    /// The URL without its query, which may contain a secret. For messages and records.
    pub fn without_query(&self) -> String {
        let text = self.to_string();
        text.split('?').next().unwrap_or_default().to_owned()
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority(), self.target)
    }
}

/// A model address given by a user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    kind: AddressKind,
    /// The model's file names, in the order of a split set. Empty for a repository as a folder.
    files: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum AddressKind {
    Web(Url),
    Hub {
        owner: String,
        repository: String,
        revision: String,
        /// Path in the repository up to the file name, including the final slash.
        folder: String,
    },
}

impl Address {
    /// True if MODEL has the form of an address.
    pub fn looks_like(model: &str) -> bool {
        model.contains("://")
    }

    /// Parses an address. Any file of a split set stands for the whole set.
    ///
    /// # Errors
    /// [`InvalidAddress`].
    pub fn parse(text: &str) -> Result<Self, InvalidAddress> {
        let (kind, file) = match text.strip_prefix("hf://") {
            Some(rest) => match Self::of_hub(rest)? {
                (kind, Some(file)) => (kind, file),
                (kind, None) => return Ok(Self { kind, files: Vec::new() }),
            },
            None => {
                let url = Url::parse(text)?;
                let path = url.target.split('?').next().unwrap_or_default();
                let file = path.rsplit('/').next().unwrap_or_default().to_owned();
                (AddressKind::Web(url), file)
            }
        };
        // The name is used for a local file.
        let named =
            file.to_ascii_lowercase().ends_with(".gguf") && !file.starts_with('.') && file.len() < 200;
        if !named {
            return Err(InvalidAddress::File);
        }
        let files = split_files(&file).ok_or(InvalidAddress::File)?;
        Ok(Self { kind, files })
    }

    /// The repository, and the name of the file unless the repository itself is the model.
    fn of_hub(rest: &str) -> Result<(AddressKind, Option<String>), InvalidAddress> {
        if rest.len() > MAX_ADDRESS || !rest.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(InvalidAddress::Characters);
        }
        let mut segments = rest.strip_suffix('/').unwrap_or(rest).split('/');
        let owner = segments.next().unwrap_or_default();
        let repository = segments.next().unwrap_or_default();
        let (repository, revision) = repository.split_once('@').unwrap_or((repository, "main"));
        let path: Vec<&str> = segments.collect();
        let word = |word: &str| {
            !word.is_empty()
                && !word.starts_with('.')
                && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        };
        if ![owner, repository, revision].into_iter().chain(path.iter().copied()).all(word) {
            return Err(InvalidAddress::Hub);
        }
        let (file, folder) = match path.split_last() {
            Some((file, folder)) => (Some((*file).to_owned()), folder),
            None => (None, &[][..]),
        };
        let folder = folder.iter().map(|segment| format!("{segment}/")).collect();
        let kind = AddressKind::Hub {
            owner: owner.into(),
            repository: repository.into(),
            revision: revision.into(),
            folder,
        };
        Ok((kind, file))
    }

    /// Names of the model's files. Empty for a folder.
    pub fn files(&self) -> &[String] {
        &self.files
    }

    /// Whether the model is a repository of a hub, as a folder.
    pub fn is_folder(&self) -> bool {
        self.files.is_empty()
    }

    /// Model name in the API: the file name without extension and part number, or the repository's name.
    pub fn id(&self) -> &str {
        if let (AddressKind::Hub { repository, .. }, true) = (&self.kind, self.is_folder()) {
            return repository;
        }
        let file = self.files.first().map_or("", String::as_str);
        without_part_number(file.get(..file.len().saturating_sub(".gguf".len())).unwrap_or_default())
    }

    /// The address of the same files in the revision `commit`.
    pub(super) fn at(&self, commit: &str) -> Self {
        let mut pinned = self.clone();
        if let AddressKind::Hub { revision, .. } = &mut pinned.kind {
            commit.clone_into(revision);
        }
        pinned
    }

    /// URL of the list of all files in a repository. `None` for an address elsewhere.
    pub(super) fn list_url(&self, hub: &Hub) -> Option<Url> {
        let AddressKind::Hub { owner, repository, revision, .. } = &self.kind else { return None };
        let base = hub.endpoint.target.trim_end_matches('/');
        let target = format!("{base}/api/models/{owner}/{repository}/tree/{revision}?recursive=true");
        Some(Url { target, ..hub.endpoint.clone() })
    }

    /// URL of one of [`Self::files`], or of a file of the folder.
    pub(super) fn url(&self, hub: &Hub, file: &str) -> Url {
        match &self.kind {
            AddressKind::Web(url) => {
                let (path, query) = match url.target.split_once('?') {
                    Some((path, query)) => (path, format!("?{query}")),
                    None => (url.target.as_str(), String::new()),
                };
                let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
                Url { target: format!("{folder}/{file}{query}"), ..url.clone() }
            }
            AddressKind::Hub { owner, repository, revision, folder } => {
                let base = hub.endpoint.target.trim_end_matches('/');
                let target = format!("{base}/{owner}/{repository}/resolve/{revision}/{folder}{file}");
                Url { target, ..hub.endpoint.clone() }
            }
        }
    }

    /// True for a hub address, which may need a token.
    pub(super) fn is_of_hub(&self) -> bool {
        matches!(self.kind, AddressKind::Hub { .. })
    }
}

/// Omits the query. This text identifies the address and is shown to users.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.files.first().map_or("", String::as_str);
        match &self.kind {
            AddressKind::Web(_) => f.write_str(&self.url(&Hub::default(), file).without_query()),
            AddressKind::Hub { owner, repository, revision, folder } => {
                let at = if revision == "main" { String::new() } else { format!("@{revision}") };
                let slash = if self.is_folder() { "" } else { "/" };
                write!(f, "hf://{owner}/{repository}{at}{slash}{folder}{file}")
            }
        }
    }
}

/// File names of the split set that `file` belongs to, or `file` alone. `None` if the set has too many files.
fn split_files(file: &str) -> Option<Vec<String>> {
    let stem = file.get(..file.len().checked_sub(".gguf".len())?)?;
    let ending = file.get(stem.len()..)?;
    let base = without_part_number(stem);
    if base == stem {
        return Some(vec![file.to_owned()]);
    }
    let count: usize = stem.rsplit_once("-of-")?.1.parse().ok()?;
    let in_range = (1..=MAX_PARTS).contains(&count);
    in_range.then(|| (1..=count).map(|number| format!("{base}-{number:05}-of-{count:05}{ending}")).collect())
}

/// Endpoint of `hf://` addresses, and the token, which is sent only to that endpoint.
#[derive(Clone)]
pub struct Hub {
    pub(super) endpoint: Url,
    pub(super) token: Option<String>,
}

impl Default for Hub {
    fn default() -> Self {
        let endpoint = Url { tls: true, host: String::new(), port: 443, target: "/".into() };
        Self { endpoint: Url::parse(HUB).unwrap_or(endpoint), token: None }
    }
}

impl Hub {
    /// Reads the environment variables of the hub's own tools: `HF_ENDPOINT`; `HF_TOKEN`, else the file
    /// `HF_TOKEN_PATH`, else `token` in `HF_HOME` (by default `~/.cache/huggingface`).
    ///
    /// # Errors
    /// [`InvalidAddress`] if `HF_ENDPOINT` is invalid.
    pub fn from_env(variable: impl Fn(&str) -> Option<String>) -> Result<Self, InvalidAddress> {
        let set = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let endpoint = Url::parse(set("HF_ENDPOINT").as_deref().unwrap_or(HUB))?;
        let file = || {
            let home =
                || set("HF_HOME").or_else(|| set("HOME").map(|home| format!("{home}/.cache/huggingface")));
            let path = set("HF_TOKEN_PATH").or_else(|| home().map(|home| format!("{home}/token")))?;
            std::fs::read_to_string(path).ok()
        };
        let token = set("HF_TOKEN").or_else(file).map(|token| token.trim().to_owned());
        let sound = |token: &String| !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
        Ok(Self { endpoint, token: token.filter(sound) })
    }
}

/// Hides the token.
impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map(|_| "set");
        f.debug_struct("Hub").field("endpoint", &self.endpoint).field("token", &token).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    #[test]
    fn addresses_are_read_and_written() {
        for (text, host, port, target) in [
            ("https://models.example/a/b.gguf", "models.example", 443, "/a/b.gguf"),
            ("HTTP://LocalHost:8080/b.gguf?x=1#y", "localhost", 8080, "/b.gguf?x=1"),
            ("https://[::1]:9/b.gguf", "[::1]", 9, "/b.gguf"),
            ("https://a?b", "a", 443, "/?b"),
        ] {
            let url = url(text);
            assert_eq!((url.host(), url.port(), url.target()), (host, port, target), "{text}");
            assert_eq!(Url::parse(&url.to_string()), Ok(url), "{text}");
        }
        for (text, why) in [
            ("ftp://a/b.gguf", InvalidAddress::Scheme),
            ("https:///b.gguf", InvalidAddress::Host),
            ("https://a:0/b", InvalidAddress::Host),
            ("https://a:99999/b", InvalidAddress::Host),
            ("https://a:/b", InvalidAddress::Host),
            ("https://[::1/b", InvalidAddress::Host),
            ("https://a%2fb/", InvalidAddress::Host),
            ("https://me:secret@a/b", InvalidAddress::Credentials),
            ("https://a/b c", InvalidAddress::Characters),
            ("https://a/b\r\nHost: c", InvalidAddress::Characters),
            (&format!("https://a/{}", "b".repeat(9000)), InvalidAddress::Characters),
        ] {
            assert_eq!(Url::parse(text), Err(why), "{text}");
        }
    }

    #[test]
    fn redirects_are_followed_to_their_target() {
        let from = url("https://a.example:444/x/y?z=1");
        for (location, to) in [
            ("http://b/c", "http://b/c"),
            ("//b/c", "https://b/c"),
            ("/c?d", "https://a.example:444/c?d"),
            ("c/d", "https://a.example:444/x/c/d"),
            ("?d", "https://a.example:444/x/?d"),
        ] {
            assert_eq!(from.join(location).unwrap().to_string(), to, "{location}");
        }
        assert_eq!(from.join("file:///etc/passwd"), Err(InvalidAddress::Scheme));
        assert_eq!(from.join("/a\nb"), Err(InvalidAddress::Characters));
    }

    #[test]
    fn loopback_is_distinguished_from_the_network() {
        for here in ["http://localhost/", "http://127.1.2.3/", "http://[::1]:1/"] {
            assert!(url(here).is_loopback(), "{here}");
        }
        for there in ["http://localhost.example/", "http://10.0.0.1/", "http://[::2]/", "http://0.0.0.0/"] {
            assert!(!url(there).is_loopback(), "{there}");
        }
    }

    #[test]
    fn a_model_of_the_web_has_a_name_and_all_its_files() {
        let single = Address::parse("https://a.example/m/My-Model.Q4.gguf?sig=secret").unwrap();
        assert_eq!((single.id(), single.files()), ("My-Model.Q4", &["My-Model.Q4.gguf".to_owned()][..]));
        assert_eq!(single.to_string(), "https://a.example/m/My-Model.Q4.gguf");
        let split = Address::parse("https://a.example/m/b-00002-of-00003.gguf?sig=s").unwrap();
        assert_eq!((split.id(), split.files().len()), ("b", 3));
        let last = split.url(&Hub::default(), &split.files()[2]).to_string();
        assert_eq!(last, "https://a.example/m/b-00003-of-00003.gguf?sig=s");
        for wrong in
            ["https://a.example/", "https://a/b.bin", "https://a/.gguf", "https://a/b-00001-of-99999.gguf"]
        {
            assert_eq!(Address::parse(wrong), Err(InvalidAddress::File), "{wrong}");
        }
    }

    #[test]
    fn a_model_of_the_hub_is_found_at_its_endpoint() {
        let hub = Hub { endpoint: url("http://127.0.0.1:5/hub/"), token: None };
        for (text, shown, target) in [
            ("hf://o/r/f.gguf", "hf://o/r/f.gguf", "/hub/o/r/resolve/main/f.gguf"),
            ("hf://o/r@v1/d/f.gguf", "hf://o/r@v1/d/f.gguf", "/hub/o/r/resolve/v1/d/f.gguf"),
        ] {
            let address = Address::parse(text).unwrap();
            assert_eq!(address.to_string(), shown);
            assert_eq!(address.url(&hub, &address.files()[0]).target(), target);
            assert_eq!(Address::parse(shown), Ok(address));
        }
        for wrong in [
            "hf://o",
            "hf://o/",
            "hf://o//f.gguf",
            "hf://o/r/../f.gguf",
            "hf://o/r@/f.gguf",
            "hf://o/r@",
            "hf://o/r//",
            "hf://o/..",
            "hf://o/r/a%20b.gguf",
        ] {
            assert_eq!(Address::parse(wrong), Err(InvalidAddress::Hub), "{wrong}");
        }
        assert_eq!(Address::parse("hf://o/r/f.bin"), Err(InvalidAddress::File));
    }

    #[test]
    fn a_repository_is_a_folder_with_its_own_name() {
        let hub = Hub { endpoint: url("http://127.0.0.1:5/hub/"), token: None };
        for (text, shown, revision) in
            [("hf://o/r.1", "hf://o/r.1", "main"), ("hf://o/r.1@v2/", "hf://o/r.1@v2", "v2")]
        {
            let address = Address::parse(text).unwrap();
            assert!(address.is_folder() && address.files().is_empty());
            assert_eq!((address.id(), address.to_string().as_str()), ("r.1", shown));
            let file = address.url(&hub, "1_Pooling/config.json");
            assert_eq!(file.target(), format!("/hub/o/r.1/resolve/{revision}/1_Pooling/config.json"));
            let list = address.list_url(&hub).unwrap();
            assert_eq!(list.target(), format!("/hub/api/models/o/r.1/tree/{revision}?recursive=true"));
            assert_eq!(address.at("abc").to_string(), "hf://o/r.1@abc");
        }
    }

    #[test]
    fn the_hub_address_comes_from_its_variables_and_its_token_is_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "of-the-file\n").unwrap();
        let home = dir.path().display().to_string();
        let hub = Hub::from_env(|name| match name {
            "HF_ENDPOINT" => Some("https://mirror.example/".into()),
            "HF_HOME" => Some(home.clone()),
            _ => None,
        })
        .unwrap();
        assert_eq!((hub.endpoint.host(), hub.token.as_deref()), ("mirror.example", Some("of-the-file")));
        assert!(!format!("{hub:?}").contains("of-the-file"));
        let hub = Hub::from_env(|name| (name == "HF_TOKEN").then(|| "of the variable".into())).unwrap();
        assert_eq!((hub.endpoint.to_string(), hub.token), (format!("{HUB}/"), None), "no token has blanks");
    }
}
