//! Identity of a node: `spiffe://<cluster>/<role>/<node id>`, the only SAN URI of its certificate.

use crate::error::{CertificateError, Error, MAX_CHAIN};
use crate::fingerprint::Fingerprint;
use crate::revocation::{RevocationLists, Revoked};
use proto::ids::{ClusterName, NodeId, Role};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use std::sync::{Arc, PoisonError, RwLock};
use tokio::sync::watch;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

const SCHEME: &str = "spiffe://";

/// Identity of a node, as its certificate states it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PeerIdentity {
    pub cluster: ClusterName,
    pub role: Role,
    pub node: NodeId,
}

impl PeerIdentity {
    /// Reads the identity of a node certificate. Checks the certificate's own fields, not its signature.
    pub fn from_certificate(certificate: &CertificateDer<'_>) -> Result<Self, CertificateError> {
        let (rest, parsed) =
            X509Certificate::from_der(certificate).map_err(|_| CertificateError::Unreadable)?;
        if !rest.is_empty() {
            return Err(CertificateError::Unreadable);
        }
        if parsed.is_ca() {
            return Err(CertificateError::IsCa);
        }
        let usage = parsed.key_usage().map_err(|_| CertificateError::Unreadable)?;
        let usage = usage.ok_or(CertificateError::KeyUsage)?.value;
        if !usage.digital_signature() || usage.key_cert_sign() {
            return Err(CertificateError::KeyUsage);
        }
        let names = parsed.subject_alternative_name().map_err(|_| CertificateError::Unreadable)?;
        let names = names.ok_or(CertificateError::NoUri)?;
        let mut uris = names.value.general_names.iter().filter_map(|name| match name {
            GeneralName::URI(uri) => Some(*uri),
            _ => None,
        });
        let uri = uris.next().ok_or(CertificateError::NoUri)?;
        if uris.next().is_some() {
            return Err(CertificateError::SeveralUris);
        }
        uri.parse()
    }
}

impl std::fmt::Display for PeerIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{SCHEME}{}/{}/{}", self.cluster, self.role.as_str(), self.node)
    }
}

impl std::str::FromStr for PeerIdentity {
    type Err = CertificateError;

    fn from_str(uri: &str) -> Result<Self, CertificateError> {
        let bad = || CertificateError::BadUri { uri: uri.chars().take(200).collect() };
        let mut fields = uri.strip_prefix(SCHEME).ok_or_else(bad)?.split('/');
        let (Some(cluster), Some(role), Some(node), None) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            return Err(bad());
        };
        let role = [Role::Coordinator, Role::Worker].into_iter().find(|r| r.as_str() == role);
        Ok(Self {
            cluster: ClusterName::new(cluster).map_err(|_| bad())?,
            role: role.ok_or_else(bad)?,
            node: NodeId::new(node).map_err(|_| bad())?,
        })
    }
}

/// Peer that a dialer accepts. The peer's certificate must match; an address or a DNS name proves nothing.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Expected {
    pub role: Role,
    /// `None` accepts any node of the role.
    pub node: Option<NodeId>,
}

impl Expected {
    /// Expects any node of `role` in this node's cluster.
    pub fn any(role: Role) -> Self {
        Self { role, node: None }
    }

    /// Expects exactly this node.
    pub fn node(role: Role, node: NodeId) -> Self {
        Self { role, node: Some(node) }
    }
}

/// Credentials of a node: its key, its certificate chain, and the roots of its cluster (two while a root is
/// being replaced) to check peers.
///
/// Clones share one state. After a [renewal](Self::renew), all clones and every endpoint bound with one of
/// them present and check the new credentials from the next handshake on. Open connections continue.
#[derive(Debug, Clone)]
pub struct Identity {
    name: PeerIdentity,
    material: Arc<RwLock<Arc<Material>>>,
    revoked: Revoked,
}

/// Present credentials of an identity.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Material {
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
    pub(crate) roots: Vec<CertificateDer<'static>>,
}

impl Identity {
    /// Reads an identity from PEM texts: the certificate chain (leaf first), the leaf's private key, the
    /// cluster's root certificates. The leaf must be a node certificate. Whether key and certificate match,
    /// and whether the chain is valid, is checked when the identity is used.
    pub fn from_pem(chain: &[u8], key: &[u8], roots: &[u8]) -> Result<Self, CertificateError> {
        let chain = certificates(chain)?;
        let roots = certificates(roots)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| CertificateError::NoKey)?;
        let leaf = chain.first().ok_or(CertificateError::ChainLength { found: 0 })?;
        let name = PeerIdentity::from_certificate(leaf)?;
        let material = Arc::new(RwLock::new(Arc::new(Material { chain, key, roots })));
        Ok(Self { name, material, revoked: Revoked::default() })
    }

    pub fn name(&self) -> &PeerIdentity {
        &self.name
    }

    /// Adds certificate revocation lists, PEM texts (`X509 CRL`) that a root of the cluster has signed.
    /// Returns `false` if they add nothing. The lists are sent to all peers of this identity's endpoints.
    /// Connections of a revoked peer are closed.
    pub fn revoke(&self, lists: &[u8]) -> Result<bool, CertificateError> {
        let bad = CertificateError::RevocationList { reason: "not readable" };
        let lists: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(lists).collect();
        let lists = lists.map_err(|_| bad.clone())?;
        if lists.is_empty() {
            return Err(bad);
        }
        lists.iter().try_fold(false, |changed, list| Ok(self.learn_revoked(list)? || changed))
    }

    /// Like [`revoke`](Self::revoke), for one list in DER.
    pub fn learn_revoked(&self, list: &[u8]) -> Result<bool, CertificateError> {
        self.revoked.learn(list, &self.material().roots)
    }

    /// Logs the number of revoked certificates.
    pub fn log_revoked(&self) {
        tracing::warn!(certificates = self.revoked.count(), "loaded the list of revoked certificates");
        if self.is_revoked() {
            tracing::error!(node = %self.name, "this node's own certificate is revoked: other nodes refuse its connections");
        }
    }

    /// Takes over the certificate, key, roots and revocation lists of `other`. They must belong to the same
    /// node and match each other. Returns `false` if nothing changes. Revoked certificates stay revoked.
    pub fn renew(&self, other: &Self) -> Result<bool, Error> {
        if other.name != self.name {
            let (found, expected) = (other.name.to_string(), self.name.to_string());
            return Err(CertificateError::OtherName { found, expected }.into());
        }
        let new = other.material();
        new.certified()?;
        // No holder of this lock panics.
        let mut material = self.material.write().unwrap_or_else(PoisonError::into_inner);
        let changed = *material != new;
        let roots = Arc::clone(&new);
        *material = new;
        drop(material);
        let revoked = self.revoked.renew(&other.revoked, &roots.roots)?;
        if revoked {
            self.log_revoked();
        }
        Ok(changed || revoked)
    }

    /// Refuses a chain that contains a revoked certificate.
    ///
    /// # Errors
    /// [`CertificateError::Revoked`], and [`CertificateError::Unreadable`] if there are lists.
    pub fn check_revoked<'a>(
        &self,
        chain: impl IntoIterator<Item = &'a CertificateDer<'a>>,
    ) -> Result<(), CertificateError> {
        self.revoked.check(chain)
    }

    /// Whether this node's own certificate is on a list.
    pub fn is_revoked(&self) -> bool {
        self.revoked.check(&self.material().chain).is_err()
    }

    /// Whether the lists name all these certificates.
    pub fn lists_revoked<'a>(&self, serials: impl IntoIterator<Item = &'a [u8]>) -> bool {
        self.revoked.name_all(serials)
    }

    /// Returns the present revocation lists and all changes.
    pub fn revocation_lists(&self) -> watch::Receiver<RevocationLists> {
        self.revoked.subscribe()
    }

    /// Derives a secret from the node's private key. It is equal in all runs of the node until its key is
    /// renewed. `context` names the purpose, as [`blake3::derive_key`] requires.
    pub fn derive_secret(&self, context: &str) -> [u8; 32] {
        blake3::derive_key(context, self.material().key.secret_der())
    }

    /// Waits until more than `threshold` certificates are revoked. Returns their number.
    pub async fn more_revoked_than(&self, threshold: usize) -> usize {
        self.revoked.more_than(threshold).await
    }

    /// Fingerprint of the root that has signed this node's certificate.
    pub fn root(&self) -> Result<Fingerprint, CertificateError> {
        let material = self.material();
        let last = material.chain.last().ok_or(CertificateError::ChainLength { found: 0 })?;
        let (_, last) = X509Certificate::from_der(last).map_err(|_| CertificateError::Unreadable)?;
        let signed = |root: &&CertificateDer<'_>| {
            X509Certificate::from_der(root)
                .is_ok_and(|(_, root)| last.verify_signature(Some(root.public_key())).is_ok())
        };
        let root = material.roots.iter().find(signed).ok_or(CertificateError::OtherAuthority)?;
        Fingerprint::of_certificate(root)
    }

    /// Returns the present credentials.
    pub(crate) fn material(&self) -> Arc<Material> {
        Arc::clone(&self.material.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Material {
    /// Returns certificate and key. Fails if they do not match.
    pub(crate) fn certified(&self) -> Result<CertifiedKey, rustls::Error> {
        let provider = rustls::crypto::ring::default_provider();
        CertifiedKey::from_der(self.chain.clone(), self.key.clone_key(), &provider)
    }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let all = all.map_err(|_| CertificateError::Unreadable)?;
    match all.len() {
        1..=MAX_CHAIN => Ok(all),
        found => Err(CertificateError::ChainLength { found }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uri_round_trips() {
        for text in ["spiffe://c1/worker/w-1", "spiffe://kvasir/coordinator/coord0"] {
            assert_eq!(text.parse::<PeerIdentity>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn other_uris_are_refused() {
        for text in [
            "",
            "spiffe://",
            "spiffe://c1/worker",
            "spiffe://c1/worker/",
            "spiffe://c1/worker/w/1",
            "spiffe://c1/Worker/w1",
            "spiffe://c1/admin/w1",
            "spiffe://C1/worker/w1",
            "https://c1/worker/w1",
            "spiffe://c1/worker/../coordinator",
        ] {
            let error = text.parse::<PeerIdentity>().unwrap_err();
            assert_eq!(error, CertificateError::BadUri { uri: text.into() });
        }
    }
}
