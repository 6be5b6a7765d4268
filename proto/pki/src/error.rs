//! Errors of certificates, keys and their files.

use proto::ids::{ClusterName, InvalidId, NodeId, Role};
use std::path::PathBuf;

/// Most certificates of a chain from a peer or a file: a leaf and its links to a root.
pub(crate) const MAX_CHAIN: usize = 4;
/// Reason why a list that may be valid is refused.
pub(crate) const NOT_OURS: &str = "signed by none of the cluster's roots";

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An id or name breaks its rule.
    #[error(transparent)]
    InvalidId(#[from] InvalidId),
    /// A certificate or key cannot serve as a node's identity.
    #[error("certificate: {0}")]
    Certificate(#[from] CertificateError),
    /// A certificate authority or identity file cannot be read or written.
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    /// A key or certificate file would be overwritten.
    #[error("{path} already exists and is not overwritten")]
    WouldOverwrite { path: PathBuf },
    /// A key pair or certificate cannot be generated.
    #[error("cannot create a certificate: {0}")]
    Generate(#[from] rcgen::Error),
    /// TLS does not accept this node's own identity.
    #[error("cannot set up TLS: {0}")]
    Tls(#[from] rustls::Error),
}

/// Reason why a certificate, key or list is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// The input is not a certificate, key or PEM file.
    #[error("not readable")]
    Unreadable,
    /// A PEM file has no private key.
    #[error("no private key found")]
    NoKey,
    /// The PEM file has no certificate, or more than a chain may have.
    #[error("{found} certificates where 1 to {MAX_CHAIN} are expected")]
    ChainLength { found: usize },
    /// The certificate is a CA certificate; a node certificate was expected.
    #[error("a CA certificate is not a node's")]
    IsCa,
    /// The certificate is not a CA certificate; one was expected.
    #[error("not a CA certificate")]
    NotCa,
    /// The private key does not match the certificate.
    #[error("the key is not this certificate's")]
    OtherKey,
    /// The certificate may not sign handshakes.
    #[error("key usage must be digital signature and not certificate signing")]
    KeyUsage,
    /// The certificate has no SAN of type URI. Other names do not count.
    #[error("no SAN URI")]
    NoUri,
    /// The certificate has more than one SAN of type URI.
    #[error("more than one SAN URI")]
    SeveralUris,
    /// The SAN URI does not name a node.
    #[error("SAN URI {uri:?} is not spiffe://<cluster>/<coordinator|worker>/<node id>")]
    BadUri {
        /// The URI, cut to 200 characters.
        uri: String,
    },
    /// The node belongs to another cluster.
    #[error("the certificate is of cluster {found}, ours is {ours}")]
    WrongCluster { found: ClusterName, ours: ClusterName },
    /// A node of this role is not accepted here.
    #[error("role {} is not expected here", found.as_str())]
    WrongRole { found: Role },
    /// An authority that is still replacing another cannot be replaced.
    #[error("another root is still being replaced")]
    Rotating,
    #[error("revoked (serial {serial})")]
    Revoked {
        /// Serial number in hexadecimal digits.
        serial: String,
    },
    /// A certificate revocation list is refused.
    #[error("list of revoked certificates: {reason}")]
    RevocationList { reason: &'static str },
    /// A node's certificate request is refused.
    #[error("certificate request: {reason}")]
    Request { reason: &'static str },
    /// The authority's key was sealed with another cluster key, for other roots, or was changed.
    #[error("the authority's sealed key does not open with this cluster key")]
    Sealed,
    /// No certificate of the chain is the one that the join token names.
    #[error("the authority is not the one that the token names")]
    OtherAuthority,
    /// The certificate for a renewal belongs to another node.
    #[error("the certificate is {found}'s, not {expected}'s")]
    OtherName { found: String, expected: String },
    /// The node has the right role, but is not the one that was dialed.
    #[error("node {found} answered instead of {expected}")]
    WrongNode { found: NodeId, expected: NodeId },
}

impl CertificateError {
    /// Whether a revocation list may become valid with a root that this node does not know yet.
    pub fn is_foreign_list(&self) -> bool {
        *self == Self::RevocationList { reason: NOT_OURS }
    }
}
