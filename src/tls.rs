//! Trusted roots for HTTPS servers: the built-in browser roots, or a file's.

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use std::path::Path;
use std::sync::Arc;

/// The usual variable for additional trusted certificates (PEM).
pub(crate) const CERTIFICATES: &str = "SSL_CERT_FILE";

/// The roots that browsers trust.
pub(crate) fn built_in() -> RootCertStore {
    RootCertStore::from_iter(webpki_roots::TLS_SERVER_ROOTS.iter().cloned())
}

/// Adds the certificates of a PEM file, which must contain at least one. The error text omits the file's
/// name.
pub(crate) fn add(roots: &mut RootCertStore, path: &Path) -> Result<(), String> {
    let before = roots.len();
    for certificate in CertificateDer::pem_file_iter(path).map_err(|error| error.to_string())? {
        let certificate = certificate.map_err(|error| error.to_string())?;
        roots.add(certificate).map_err(|error| error.to_string())?;
    }
    if roots.len() == before { Err("the file contains no certificate".to_owned()) } else { Ok(()) }
}

/// TLS 1.3 client configuration without a client certificate.
pub(crate) fn client(roots: RootCertStore) -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13])?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}
