//! Images at addresses. They are fetched only from hosts that the operator allows, and only over connections to public
//! addresses: the address that is checked is the one that is connected to.

#[cfg(test)]
mod tests;

use super::error::ApiError;
use super::limits::MAX_IMAGE_BYTES;
use bytes::Bytes;
use dispatch::models::MAX_FILE_BYTES;
use futures::stream::{self, StreamExt, TryStreamExt};
use http_body_util::{BodyExt, Empty};
use hub::catalog::Url;
use hyper::body::Body;
use hyper::client::conn::http1;
use hyper::header::{self, HeaderValue};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, lookup_host};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// The setting for all hosts.
const ANY: &str = "any";
/// Time to fetch one image, with all redirects.
const FETCH_TIME: Duration = Duration::from_secs(10);
const MAX_REDIRECTS: usize = 3;
/// Images of a request that are fetched at once.
const AT_ONCE: usize = 4;
/// Longest response head in bytes.
const MAX_HEAD: usize = 64 << 10;
const MAX_HEADERS: usize = 128;
/// Longest address, in bytes.
const MAX_ADDRESS: usize = 8 << 10;

/// Files by their addresses.
pub type Fetched = HashMap<String, Bytes>;

/// Fetches images from the hosts that the operator allows.
#[derive(Debug)]
pub struct ImageUrls {
    /// Names, or `*.` and a domain. `None`: all.
    hosts: Option<Vec<String>>,
    tls: Arc<ClientConfig>,
    reachable: fn(IpAddr) -> bool,
    /// Time for one image.
    time: Duration,
}

/// An open connection.
trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

enum Answer {
    File(Bytes),
    Moved(String),
}

impl ImageUrls {
    /// Parses the setting: `any`, or names of hosts, of which `*.example.com` stands for all of a domain. `None` if no
    /// host is allowed.
    ///
    /// # Errors
    /// The first text that is no name of a host.
    pub fn new(hosts: &[String]) -> Result<Option<Self>, String> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        let name = |host: &String| {
            let bare = host.strip_prefix("*.").unwrap_or(host);
            let named = !bare.is_empty() && bare.bytes().all(plain);
            named.then(|| host.to_ascii_lowercase()).ok_or_else(|| host.clone())
        };
        let listed = hosts.iter().map(name).collect::<Result<Vec<_>, _>>()?;
        if listed.is_empty() {
            return Ok(None);
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let roots = RootCertStore::from_iter(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let any = listed.iter().any(|host| host == ANY);
        Ok(Some(Self {
            hosts: (!any).then_some(listed),
            tls: Arc::new(tls),
            reachable: is_public,
            time: FETCH_TIME,
        }))
    }

    fn allows(&self, host: &str) -> bool {
        let matches = |allowed: &String| match allowed.strip_prefix('*') {
            Some(domain) => host.ends_with(domain),
            None => allowed == host,
        };
        self.hosts.as_ref().is_none_or(|hosts| hosts.iter().any(matches))
    }

    /// Fetches the images of a request: the path of each one's field, and its address.
    pub async fn fetch_all(&self, images: Vec<(String, String)>) -> Result<Fetched, ApiError> {
        let mut fetches = stream::iter(images)
            .map(|(field, address)| async move {
                let file = match timeout(self.time, self.fetch(&address)).await {
                    Ok(fetched) => fetched,
                    Err(_) => Err(format!("the image was not fetched within {:?}", self.time)),
                };
                match file {
                    Ok(file) => Ok((field, address, file)),
                    Err(reason) => Err(ApiError::field(field, reason)),
                }
            })
            .buffered(AT_ONCE);
        let (mut files, mut bytes) = (Fetched::new(), 0);
        while let Some((field, address, file)) = fetches.try_next().await? {
            bytes += file.len();
            if bytes > MAX_IMAGE_BYTES {
                let limit = format!("the limit is {MAX_IMAGE_BYTES} for all images of a request");
                return Err(ApiError::field(
                    field,
                    format!("the images up to here have {bytes} bytes, {limit}"),
                ));
            }
            files.insert(address, file);
        }
        Ok(files)
    }

    async fn fetch(&self, address: &str) -> Result<Bytes, String> {
        if address.len() > MAX_ADDRESS {
            return Err(format!("the address has {} bytes, the limit is {MAX_ADDRESS}", address.len()));
        }
        let mut url = Url::parse(address).map_err(|error| format!("the address {error}"))?;
        for _ in 0..=MAX_REDIRECTS {
            match self.get(&url).await? {
                Answer::File(file) => return Ok(file),
                Answer::Moved(to) => {
                    url = url
                        .join(&to)
                        .map_err(|error| format!("the address that {} names {error}", url.host()))?;
                }
            }
        }
        Err(format!("the address is redirected more than {MAX_REDIRECTS} times"))
    }

    async fn get(&self, url: &Url) -> Result<Answer, String> {
        let host = url.host();
        let failed = |error: &dyn std::error::Error| format!("{host}: {error}");
        let stream = self.connect(url).await?;
        let mut builder = http1::Builder::new();
        builder.max_buf_size(MAX_HEAD).max_headers(MAX_HEADERS);
        let handshake = builder.handshake::<_, Empty<Bytes>>(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| failed(&error))?;
        // Dropped with the answer.
        let mut tasks = JoinSet::new();
        tasks.spawn(connection);
        let request = Request::get(url.target())
            .header(header::HOST, url.authority())
            .header(header::USER_AGENT, concat!("kvasir/", env!("CARGO_PKG_VERSION")))
            .header(header::ACCEPT, "image/*")
            .header(header::ACCEPT_ENCODING, "identity")
            .header(header::CONNECTION, "close")
            .body(Empty::new())
            .map_err(|error| failed(&error))?;
        let response = sender.send_request(request).await.map_err(|error| failed(&error))?;
        let status = response.status();
        if matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308) {
            let to = response.headers().get(header::LOCATION).map(HeaderValue::to_str);
            let Some(Ok(to)) = to else { return Err(format!("{host} answered {status} without an address")) };
            return Ok(Answer::Moved(to.to_owned()));
        }
        if status != StatusCode::OK {
            return Err(format!("{host} answered {status}"));
        }
        let mut body = response.into_body();
        let too_large = || format!("the image has more than {MAX_FILE_BYTES} bytes");
        if body.size_hint().lower() > MAX_FILE_BYTES as u64 {
            return Err(too_large());
        }
        let mut file = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|error| failed(&error))?.into_data() else { continue };
            if file.len() + data.len() > MAX_FILE_BYTES {
                return Err(too_large());
            }
            file.extend_from_slice(&data);
        }
        Ok(Answer::File(file.into()))
    }

    /// Connects to a host that is allowed, at a public address.
    async fn connect(&self, url: &Url) -> Result<Box<dyn Duplex>, String> {
        let host = url.host();
        if !self.allows(host) {
            return Err(format!(
                "the server fetches no images from {host}: the setting image_urls lists the hosts"
            ));
        }
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let found = lookup_host((bare, url.port())).await.map_err(|error| format!("{host}: {error}"))?;
        let public: Vec<SocketAddr> = found.filter(|address| (self.reachable)(address.ip())).collect();
        let mut last = format!("{host} has no public address");
        for address in public {
            let stream = match TcpStream::connect(address).await {
                Ok(stream) => stream,
                Err(error) => {
                    last = format!("{host}: {error}");
                    continue;
                }
            };
            if !url.is_tls() {
                return Ok(Box::new(stream));
            }
            let name = ServerName::try_from(bare.to_owned()).map_err(|error| format!("{host}: {error}"))?;
            let stream = TlsConnector::from(Arc::clone(&self.tls)).connect(name, stream).await;
            return Ok(Box::new(stream.map_err(|error| format!("{host}: {error}"))?));
        }
        Err(last)
    }
}

/// Whether the address is one of the public internet.
fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => is_public_v4(ip),
        IpAddr::V6(ip) => match ip.to_ipv4_mapped() {
            Some(ip) => is_public_v4(ip),
            None => is_public_v6(ip),
        },
    }
}

fn is_public_v4(ip: Ipv4Addr) -> bool {
    let [a, b, c, _] = ip.octets();
    // Shared addresses of providers, protocol assignments, benchmarks, relays of 6to4, and reserved ones.
    let special = (a == 100 && b & 0xc0 == 64)
        || (a == 192 && b == 0 && c == 0)
        || (a == 198 && b & 0xfe == 18)
        || (a == 192 && b == 88 && c == 99)
        || a == 0
        || a >= 240;
    !(special
        || ip.is_private()
        || ip.is_loopback()
        || ip.is_link_local()
        || ip.is_multicast()
        || ip.is_broadcast()
        || ip.is_documentation()
        || ip.is_unspecified())
}

/// Global unicast addresses, without those that are documentation or contain another address: 6to4 and Teredo.
fn is_public_v6(ip: Ipv6Addr) -> bool {
    let [a, b, ..] = ip.segments();
    a & 0xe000 == 0x2000
        && a != 0x2002
        && !(a == 0x2001 && (b < 0x200 || b == 0xdb8))
        && !(a == 0x3fff && b < 0x1000)
}
