//! Certificates for nodes that make their own key: the key and its certificate request (PKCS#10) on the node,
//! the certificate for a request at the authority, and the authority's key as coordinators keep it.

use super::{
    Access, Authority, IssuedNode, NODE_KEY, Serial, file_error, node_params, read_text, since_epoch,
    write_over,
};
use crate::error::{CertificateError, Error};
use crate::fingerprint::Fingerprint;
use proto::block::ClusterKey;
use proto::ids::{NodeId, Role};
use rcgen::{
    CertificateParams, CertificateSigningRequestParams, KeyPair, PKCS_ECDSA_P256_SHA256, PublicKey,
    PublicKeyData, SerialNumber,
};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Most bytes of a certificate request.
pub const MAX_REQUEST: usize = 4096;
/// BLAKE3 context of the key that seals the authority's key.
const SEAL_CONTEXT: &str = "kvasir 2026-11-29 authority key at coordinators";

/// Private key of a node that has no certificate for it yet.
pub struct NodeKey(KeyPair);

impl std::fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("NodeKey").field(&self.fingerprint()).finish()
    }
}

impl NodeKey {
    /// Creates an ECDSA P-256 key.
    pub fn new() -> Result<Self, Error> {
        Ok(Self(KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?))
    }

    /// Reads the key in an identity directory.
    pub fn load(directory: &Path) -> Result<Self, Error> {
        Ok(Self(KeyPair::from_pem(&read_text(&directory.join(NODE_KEY))?)?))
    }

    /// Writes the key to an identity directory, readable by its owner only. The directory is created if
    /// missing; a key in it is replaced.
    pub fn save(&self, directory: &Path) -> Result<(), Error> {
        proto::directory::make_private(directory).map_err(file_error(directory))?;
        write_over(directory, NODE_KEY, &self.0.serialize_pem(), Access::Owner)
    }

    /// Returns a certificate request (PKCS#10) for this key, in DER. It names nobody: the authority chooses
    /// the name.
    pub fn request(&self) -> Result<Vec<u8>, Error> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        Ok(params.serialize_request(&self.0)?.der().to_vec())
    }

    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.0.subject_public_key_info())
    }

    /// Returns the identity of this key with the certificate and the roots that the authority sent. Fails
    /// if the certificate is another key's.
    pub fn certified(&self, certificate_pem: &str, roots_pem: &str) -> Result<IssuedNode, Error> {
        let issued = IssuedNode {
            certificate_pem: certificate_pem.to_owned(),
            key_pem: self.0.serialize_pem(),
            ca_pem: roots_pem.to_owned(),
        };
        issued.identity()?.material().certified()?;
        Ok(issued)
    }
}

/// A certificate request with a verified signature: the sender holds the private key.
#[derive(Debug)]
pub struct CertificateRequest(PublicKey);

impl CertificateRequest {
    /// Reads a certificate request in DER. Only ECDSA P-256 keys are accepted.
    pub fn from_der(der: &[u8]) -> Result<Self, CertificateError> {
        let bad = |reason| CertificateError::Request { reason };
        if der.len() > MAX_REQUEST {
            return Err(bad("longer than 4,096 bytes"));
        }
        let request = CertificateSigningRequestParams::from_der(&der.into());
        let request = request.map_err(|_| bad("not readable, or not signed by its own key"))?;
        // The algorithm is that of the signature; the point tells the curve.
        let point = request.public_key.der_bytes();
        if *request.public_key.algorithm() != PKCS_ECDSA_P256_SHA256 || point.len() != 65 {
            return Err(bad("the key is not ECDSA P-256"));
        }
        Ok(Self(request.public_key))
    }

    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.0.subject_public_key_info())
    }
}

/// A certificate and the roots to check peers with, as PEM texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certified {
    pub certificate_pem: String,
    pub roots_pem: String,
}

impl Authority {
    /// Issues a certificate for the key of `request`, valid from `now` for `lifetime`.
    pub fn certify(
        &self,
        request: &CertificateRequest,
        (role, node): (Role, &NodeId),
        serial: &Serial,
        lifetime: Duration,
        now: SystemTime,
    ) -> Result<Certified, Error> {
        let mut params = node_params(&self.cluster, role, node, Some(lifetime), now)?;
        params.serial_number = Some(SerialNumber::from(serial.bytes().to_vec()));
        let certificate_pem = params.signed_by(&request.0, &self.issuer)?.pem();
        Ok(Certified { certificate_pem, roots_pem: self.certificate_pem.clone() })
    }

    /// Encrypts the authority's key (ChaCha20-Poly1305, bound to the roots) under a key that is derived from
    /// the cluster key.
    pub fn seal(&self, key: &ClusterKey) -> Result<Vec<u8>, Error> {
        let mut nonce = [0; NONCE_LEN];
        crate::tls::fill_random(&mut nonce)?;
        let mut sealed = self.issuer.key().serialize_pem().into_bytes();
        let (nonce, prefix) = (Nonce::assume_unique_for_key(nonce), nonce);
        sealing_key(key)?
            .seal_in_place_append_tag(nonce, Aad::from(self.certificate_pem.as_bytes()), &mut sealed)
            .map_err(|_| CertificateError::Sealed)?;
        Ok([&prefix[..], &sealed].concat())
    }

    /// Reads an authority from its roots and the bytes of [`seal`](Self::seal).
    pub fn unseal(certificate_pem: &str, sealed: &[u8], key: &ClusterKey) -> Result<Self, Error> {
        let (nonce, sealed) = sealed.split_first_chunk().ok_or(CertificateError::Sealed)?;
        let mut opened = sealed.to_vec();
        let opened = sealing_key(key)?
            .open_in_place(
                Nonce::assume_unique_for_key(*nonce),
                Aad::from(certificate_pem.as_bytes()),
                &mut opened,
            )
            .map_err(|_| CertificateError::Sealed)?;
        let key_pem = std::str::from_utf8(opened).map_err(|_| CertificateError::Sealed)?;
        Self::from_pem(certificate_pem.to_owned(), key_pem)
    }
}

fn sealing_key(key: &ClusterKey) -> Result<LessSafeKey, CertificateError> {
    let key = blake3::derive_key(SEAL_CONTEXT, &key.0);
    let key = UnboundKey::new(&CHACHA20_POLY1305, &key).map_err(|_| CertificateError::Sealed)?;
    Ok(LessSafeKey::new(key))
}

/// Unix seconds at which a certificate of `lifetime` ends.
pub fn ends_unix_s(now: SystemTime, lifetime: Duration) -> u64 {
    (since_epoch(now) + lifetime).as_secs()
}

/// Replaces the certificate and the roots in an identity directory whose key stays. Each file is replaced as a
/// whole, the roots first.
pub fn replace_certificate(directory: &Path, certificate_pem: &str, roots_pem: &str) -> Result<(), Error> {
    NodeKey::load(directory)?.certified(certificate_pem, roots_pem)?;
    write_over(directory, super::CA_CERTIFICATE, roots_pem, Access::All)?;
    write_over(directory, super::NODE_CERTIFICATE, certificate_pem, Access::All)
}

/// Whether this process may replace the certificate in an identity directory. A link is another program's, such
/// as Kubernetes'.
pub fn is_writable(directory: &Path) -> bool {
    let certificate = directory.join(super::NODE_CERTIFICATE).symlink_metadata();
    certificate.is_ok_and(|file| file.is_file())
        && super::write_partial(directory, super::NODE_CERTIFICATE, "", Access::All)
            .is_ok_and(|partial| std::fs::remove_file(partial).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PeerIdentity;
    use proto::ids::ClusterName;

    fn authority() -> Authority {
        Authority::new(ClusterName::new("c").unwrap(), SystemTime::now()).unwrap()
    }

    #[test]
    fn a_certificate_is_for_the_key_of_the_request_and_the_name_of_the_authority() {
        let (authority, key, now) = (authority(), NodeKey::new().unwrap(), SystemTime::now());
        let request = CertificateRequest::from_der(&key.request().unwrap()).unwrap();
        assert_eq!(request.fingerprint(), key.fingerprint());
        let (node, serial) = (NodeId::new("w0").unwrap(), Serial::random().unwrap());
        let lifetime = Duration::from_secs(3600);
        let certified = authority.certify(&request, (Role::Worker, &node), &serial, lifetime, now).unwrap();
        let issued = key.certified(&certified.certificate_pem, &certified.roots_pem).unwrap();
        let identity = issued.identity().unwrap();
        let name = PeerIdentity { cluster: ClusterName::new("c").unwrap(), role: Role::Worker, node };
        assert_eq!(*identity.name(), name);
        assert_eq!(issued.serial().unwrap(), serial);
        assert_eq!(identity.validities().unwrap().node.ends.cast_unsigned(), ends_unix_s(now, lifetime));
        // Another key's certificate is of no use.
        let other = NodeKey::new().unwrap();
        other.certified(&certified.certificate_pem, &certified.roots_pem).unwrap_err();
    }

    #[test]
    fn a_changed_or_foreign_request_is_refused() {
        let key = NodeKey::new().unwrap();
        let der = key.request().unwrap();
        for at in 0..der.len() {
            let mut changed = der.clone();
            changed[at] ^= 1;
            // The signature does not cover the outermost tag.
            if let Ok(request) = CertificateRequest::from_der(&changed) {
                assert_eq!(request.fingerprint(), key.fingerprint(), "byte {at}");
            }
        }
        for cut in 0..der.len() {
            CertificateRequest::from_der(&der[..cut]).unwrap_err();
        }
        let p384 = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
        let foreign = CertificateParams::default().serialize_request(&p384).unwrap();
        let error = CertificateRequest::from_der(foreign.der()).unwrap_err();
        assert_eq!(error.to_string(), "certificate request: the key is not ECDSA P-256");
        CertificateRequest::from_der(&vec![0x30; MAX_REQUEST + 1]).unwrap_err();
    }

    #[test]
    fn a_sealed_authority_opens_with_the_cluster_key_and_its_own_roots_only() {
        let (authority, key) = (authority(), ClusterKey([7; 32]));
        let sealed = authority.seal(&key).unwrap();
        assert!(!String::from_utf8_lossy(&sealed).contains("PRIVATE"));
        assert_ne!(sealed, authority.seal(&key).unwrap());
        let pem = authority.certificate_pem();
        let opened = Authority::unseal(pem, &sealed, &key).unwrap();
        assert_eq!(opened.issuer.key().serialize_pem(), authority.issuer.key().serialize_pem());
        assert_eq!(opened.cluster(), authority.cluster());
        Authority::unseal(pem, &sealed, &ClusterKey([8; 32])).unwrap_err();
        Authority::unseal(super::tests::authority().certificate_pem(), &sealed, &key).unwrap_err();
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            Authority::unseal(pem, &changed, &key).unwrap_err();
        }
        Authority::unseal(pem, &sealed[..5], &key).unwrap_err();
    }
}
