//! Who a node is: `spiffe://<cluster>/<role>/<node id>`, carried as the only URI among the names of its
//! certificate.

use super::revocation::Revoked;
use super::tls;
use crate::Error;
use crate::ids::{ClusterName, NodeId, Role};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use std::sync::{Arc, PoisonError, RwLock};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

const SCHEME: &str = "spiffe://";
/// Certificates sent by a peer or read from a file: a leaf and what links it to a root.
const MAX_CHAIN: usize = 4;

/// A node of a cluster, as a certificate names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PeerIdentity {
    pub cluster: ClusterName,
    /// What the node may do.
    pub role: Role,
    pub node: NodeId,
}

impl PeerIdentity {
    /// Checks what a certificate must say by itself to be a node's (not who signed it) and reads the name.
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
        let mut parts = uri.strip_prefix(SCHEME).ok_or_else(bad)?.split('/');
        let (Some(cluster), Some(role), Some(node), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
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

/// Whom a dialer wants to reach. The certificate must say so; an address or a DNS name proves nothing.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Expected {
    /// The role it must have.
    pub role: Role,
    /// The one node it must be, or any of that role.
    pub node: Option<NodeId>,
}

impl Expected {
    /// Any node of `role` in our own cluster.
    pub fn any(role: Role) -> Self {
        Self { role, node: None }
    }

    /// This node and no other.
    pub fn node(role: Role, node: NodeId) -> Self {
        Self { role, node: Some(node) }
    }
}

/// Why a certificate does not make its holder a node that we talk to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// Not a certificate, key or PEM file at all.
    #[error("not readable")]
    Unreadable,
    /// A private key is missing in a PEM file.
    #[error("no private key found")]
    NoKey,
    /// No certificate, or more than a chain can have.
    #[error("{found} certificates where 1 to {MAX_CHAIN} are expected")]
    ChainLength { found: usize },
    /// A certificate authority's own certificate.
    #[error("a CA certificate is not a node's")]
    IsCa,
    /// A certificate authority's certificate was expected.
    #[error("not a CA certificate")]
    NotCa,
    /// The private key belongs to another certificate.
    #[error("the key is not this certificate's")]
    OtherKey,
    /// It may not sign handshakes.
    #[error("key usage must be digital signature and not certificate signing")]
    KeyUsage,
    /// No SAN of type URI; other names do not count.
    #[error("no SAN URI")]
    NoUri,
    /// More than one SAN of type URI.
    #[error("more than one SAN URI")]
    SeveralUris,
    /// The SAN URI names no node.
    #[error("SAN URI {uri:?} is not spiffe://<cluster>/<coordinator|worker>/<node id>")]
    BadUri {
        /// The URI, cut to 200 characters.
        uri: String,
    },
    /// A node of another cluster.
    #[error("of cluster {found}, ours is {ours}")]
    WrongCluster { found: ClusterName, ours: ClusterName },
    /// A node whose role may not be here.
    #[error("role {} is not expected here", found.as_str())]
    WrongRole { found: Role },
    /// An authority that is still taking another's place cannot be replaced yet.
    #[error("another root is still being replaced")]
    Rotating,
    #[error("revoked (serial {serial})")]
    Revoked {
        /// Its serial number in hexadecimal.
        serial: String,
    },
    /// A list of revoked certificates cannot be taken.
    #[error("a list of revoked certificates: {reason}")]
    RevocationList { reason: &'static str },
    /// A certificate that an identity is to be renewed with is another node's.
    #[error("it is {found}'s, not {wanted}'s")]
    OtherName { found: String, wanted: String },
    /// A node of the right role that is not the one dialed.
    #[error("node {found} answered instead of {wanted}")]
    WrongNode { found: NodeId, wanted: NodeId },
}

/// What a node needs to prove who it is and to check others: its key, its certificate chain and the roots
/// of its cluster (two while a root is being replaced).
///
/// Clones are the same identity: what one of them is [renewed](Self::renew) with is what all of them, and every
/// endpoint bound with one of them, show and check from the next handshake on. Connections that stand go on.
#[derive(Debug, Clone)]
pub struct Identity {
    name: PeerIdentity,
    material: Arc<RwLock<Arc<Material>>>,
    pub(super) revoked: Revoked,
}

/// What an identity consists of just now.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Material {
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: PrivateKeyDer<'static>,
    pub(super) roots: Vec<CertificateDer<'static>>,
}

impl Identity {
    /// Reads an identity from PEM texts: the certificate chain (leaf first), the leaf's private key, the
    /// cluster's root certificates. The leaf must be a node's; whether key and certificate fit together and
    /// whether the chain holds is checked when the identity is put to use.
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

    /// Holds the certificates for revoked that are on these lists, PEM texts (`X509 CRL`) that a root of the cluster has
    /// signed; `false` if that is nothing new. Whoever is connected to an endpoint of this identity is told, and loses
    /// its connection if it is about itself.
    pub fn revoke(&self, lists: &[u8]) -> Result<bool, CertificateError> {
        let bad = CertificateError::RevocationList { reason: "not readable" };
        let lists: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(lists).collect();
        let lists = lists.map_err(|_| bad.clone())?;
        if lists.is_empty() {
            return Err(bad);
        }
        lists.iter().try_fold(false, |changed, list| Ok(self.learn_revoked(list)? || changed))
    }

    /// [`revoke`](Self::revoke) of one list as DER.
    pub(super) fn learn_revoked(&self, list: &[u8]) -> Result<bool, CertificateError> {
        self.revoked.learn(list, &self.material().roots)
    }

    /// Says in the log how many certificates are revoked by now.
    pub(super) fn tell_revoked(&self) {
        tracing::warn!(certificates = self.revoked.count(), "certificates are revoked");
        if self.revoked.check(&self.material().chain).is_err() {
            tracing::error!(node = %self.name, "this node's own certificate is revoked: others will not talk to it");
        }
    }

    /// Takes the certificate, key, roots and lists of revoked certificates of `other`, which must be of the same node
    /// and fit together. `false` if they are what it has already. What was revoked once stays so.
    pub fn renew(&self, other: &Self) -> Result<bool, Error> {
        if other.name != self.name {
            let (found, wanted) = (other.name.to_string(), self.name.to_string());
            return Err(CertificateError::OtherName { found, wanted }.into());
        }
        let new = other.material();
        tls::certified(&new)?;
        // Nobody panics while holding this lock.
        let mut material = self.material.write().unwrap_or_else(PoisonError::into_inner);
        let changed = *material != new;
        let roots = Arc::clone(&new);
        *material = new;
        drop(material);
        let revoked = self.revoked.renew(&other.revoked, &roots.roots)?;
        if revoked {
            self.tell_revoked();
        }
        Ok(changed || revoked)
    }

    /// Waits until more certificates are known to be revoked than so many; how many are.
    pub async fn more_revoked_than(&self, known: usize) -> usize {
        self.revoked.more_than(known).await
    }

    /// What it consists of just now.
    pub(super) fn material(&self) -> Arc<Material> {
        Arc::clone(&self.material.read().unwrap_or_else(PoisonError::into_inner))
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
