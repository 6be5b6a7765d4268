//! Certificates of the nodes of a cluster: the cluster's own authority, identities and their files,
//! revocation lists, expiry, and the TLS settings with which nodes check each other.
//!
//! Invariants: a node's identity is the only SAN URI of its certificate. A certificate that no root of the
//! cluster has signed is refused, and so is a revoked one. A key is readable by its owner only and never
//! leaves this crate. This crate never contains sockets or messages.

pub mod ca;
mod error;
mod expiry;
mod fingerprint;
mod identity;
mod revocation;
pub mod service_account;
pub mod tls;

pub use error::{CertificateError, Error};
pub use expiry::{ExpiryWatch, Validities, Validity};
pub use fingerprint::{Fingerprint, fingerprints};
pub use identity::{Expected, Identity, PeerIdentity};
pub use revocation::{MAX_REVOCATION_LIST, RevocationList, RevocationLists};
