//! HTTP(S) client for the collector that keeps the reason of a failure. The exporter itself reports only a
//! network error.

use crate::config::ConfigError;
use crate::tls;
use hyper_rustls::HttpsConnectorBuilder;
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use rustls::RootCertStore;
use std::error::Error;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::error::Elapsed;

/// Error of a batch of spans that the collector did not accept.
#[derive(Debug, thiserror::Error)]
pub(super) enum CollectorError {
    /// The certificate is not trusted, or TLS failed.
    #[error("TLS: {0}")]
    Tls(#[source] rustls::Error),
    /// The connection failed or was cut.
    #[error("connection failed: {0}")]
    Connection(#[source] io::Error),
    /// No response within this time.
    #[error("no response within {} s", .0.as_secs_f64())]
    Silent(Duration),
    /// An invalid response or an error status.
    #[error("{0}")]
    Refused(String),
}

#[derive(Debug)]
pub(super) struct Client {
    inner: Box<dyn HttpClient>,
    limit: Duration,
    failure: Failure,
}

/// The error of the last request, until it is taken.
#[derive(Debug, Clone, Default)]
pub(super) struct Failure(Arc<Mutex<Option<CollectorError>>>);

impl Failure {
    pub(super) fn take(&self) -> Option<CollectorError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn put(&self, error: CollectorError) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }
}

impl Client {
    /// A client with timeout `limit` that verifies `https://` collectors with `roots`.
    pub(super) fn new(roots: RootCertStore, limit: Duration) -> Result<Self, rustls::Error> {
        let connector = HttpsConnectorBuilder::new().with_tls_config(tls::client(roots)?);
        let connector = connector.https_or_http().enable_http1().build();
        let inner = Box::new(HyperClient::new(connector, limit, None));
        Ok(Self { inner, limit, failure: Failure::default() })
    }

    /// Handle to the error of the last request.
    pub(super) fn failure(&self) -> Failure {
        self.failure.clone()
    }

    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let answer = self.inner.send_bytes(request).await;
        if let Err(error) = &answer {
            self.failure.put(why(error.as_ref(), self.limit));
        }
        answer
    }
}

impl HttpClient for Client {
    // Desugared form of `async fn` in this trait.
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(self.send(request))
    }
}

/// Roots for the collector at `endpoint`: those of `certificates` alone if given, else the built-in ones and
/// those of `SSL_CERT_FILE`.
pub(super) fn roots(endpoint: &str, certificates: Option<&Path>) -> Result<RootCertStore, ConfigError> {
    let secure = endpoint.starts_with("https://");
    if let Some(path) = certificates {
        let refused = |why: String| ConfigError::field("otlp_certificate", path.display(), why);
        if !secure {
            return Err(refused(format!("only for a collector at https://, not for {endpoint}")));
        }
        let mut roots = RootCertStore::empty();
        return tls::add(&mut roots, path).map(|()| roots).map_err(refused);
    }
    let mut roots = tls::built_in();
    if secure && let Some(path) = std::env::var_os(tls::CERTIFICATES).filter(|path| !path.is_empty()) {
        let path = Path::new(&path);
        tls::add(&mut roots, path).map_err(|why| {
            ConfigError::Environment(format!("{}={}: {why}", tls::CERTIFICATES, path.display()))
        })?;
    }
    Ok(roots)
}

/// The root cause of a client error.
fn why(error: &(dyn Error + 'static), limit: Duration) -> CollectorError {
    let mut next = Some(error);
    let mut connection = None;
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<rustls::Error>() {
            return CollectorError::Tls(error.clone());
        }
        if error.is::<Elapsed>() {
            return CollectorError::Silent(limit);
        }
        next = match error.downcast_ref::<io::Error>() {
            // A wrapping I/O error reports its inner error's source as its own source.
            Some(error) => {
                connection = Some(io::Error::new(error.kind(), error.to_string()));
                error.get_ref().map(|inner| inner as &(dyn Error + 'static))
            }
            None => error.source(),
        };
    }
    connection.map_or_else(|| CollectorError::Refused(error.to_string()), CollectorError::Connection)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::CertificateError;
    use std::io::ErrorKind;

    #[test]
    fn the_root_cause_is_found() {
        let tls = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let hidden = io::Error::other(io::Error::new(ErrorKind::InvalidData, tls.clone()));
        let found = why(&hidden, Duration::from_secs(2));
        assert!(matches!(&found, CollectorError::Tls(error) if *error == tls), "{found:?}");
        let no_listener = io::Error::other(io::Error::from(ErrorKind::ConnectionRefused));
        let found = why(&no_listener, Duration::from_secs(2));
        let refused = |error: &io::Error| error.kind() == ErrorKind::ConnectionRefused;
        assert!(matches!(&found, CollectorError::Connection(error) if refused(error)), "{found:?}");
        let answered: HttpError = "request failed with status 503 Service Unavailable".into();
        let found = why(answered.as_ref(), Duration::from_secs(2));
        assert_eq!(found.to_string(), "request failed with status 503 Service Unavailable");
    }

    #[test]
    fn certificates_are_of_a_collector_that_has_one() {
        let dir = tempfile::tempdir().unwrap();
        let pem = dir.path().join("ca.pem");
        std::fs::write(&pem, "none").unwrap();
        let refused = |endpoint: &str| roots(endpoint, Some(&pem)).unwrap_err().to_string();
        assert!(
            refused("https://a:4318").contains("the file contains no certificate"),
            "{}",
            refused("https://a:4318")
        );
        assert!(
            refused("http://a:4318").contains("only for a collector at https://"),
            "{}",
            refused("http://a:4318")
        );
        assert!(!roots("https://a:4318", None).unwrap().is_empty());
    }
}
