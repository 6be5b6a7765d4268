//! Fingerprints of public keys.

use crate::error::CertificateError;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::prelude::{FromDer, X509Certificate};

/// SHA-256 of a public key (SubjectPublicKeyInfo, DER).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// Fingerprint of a certificate's public key.
    pub fn of_certificate(certificate: &CertificateDer<'_>) -> Result<Self, CertificateError> {
        let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| CertificateError::Unreadable)?;
        Ok(Self::of(parsed.public_key().raw))
    }

    pub(crate) fn of(public_key_info: &[u8]) -> Self {
        let digest = ring::digest::digest(&ring::digest::SHA256, public_key_info);
        Self(digest.as_ref().first_chunk().copied().unwrap_or_default())
    }
}

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Fingerprints of the public keys of the certificates in a PEM text.
pub fn fingerprints(certificates_pem: &str) -> Result<Vec<Fingerprint>, CertificateError> {
    CertificateDer::pem_slice_iter(certificates_pem.as_bytes())
        .map(|der| Fingerprint::of_certificate(&der.map_err(|_| CertificateError::Unreadable)?))
        .collect()
}
