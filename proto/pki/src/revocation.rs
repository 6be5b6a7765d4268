//! Lists of revoked certificates (X.509 CRL, RFC 5280) that the cluster's authority has signed. A revoked
//! certificate stays revoked: lists add up, and a later list does not replace an earlier one. A list that
//! another one covers is dropped.

use crate::error::{CertificateError, NOT_OURS};
use rustls::pki_types::CertificateDer;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::watch;
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};

/// Most bytes of a list, enough for some 12,000 certificates.
pub const MAX_REVOCATION_LIST: usize = 1 << 19;
/// Most lists that are kept. A list covers the earlier ones unless its authority has lost them.
const MAX_LISTS: usize = 16;

/// A list with a verified signature.
#[derive(Debug)]
pub struct RevocationList {
    der: Vec<u8>,
    /// The root that signed the list.
    root: CertificateDer<'static>,
    /// Issuer of the listed certificates, as the certificates name it.
    issuer: Vec<u8>,
    serials: BTreeSet<Vec<u8>>,
}

impl RevocationList {
    /// The list as its authority signed it, in DER; at most [`MAX_REVOCATION_LIST`] bytes.
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    fn read(der: &[u8], roots: &[CertificateDer<'static>]) -> Result<Self, CertificateError> {
        let bad = |reason| CertificateError::RevocationList { reason };
        if der.len() > MAX_REVOCATION_LIST {
            return Err(bad("longer than 512 KiB"));
        }
        let (rest, list) = CertificateRevocationList::from_der(der).map_err(|_| bad("not an X.509 list"))?;
        if !rest.is_empty() {
            return Err(bad("not an X.509 list alone"));
        }
        let signed = |root: &&CertificateDer<'static>| {
            X509Certificate::from_der(root)
                .is_ok_and(|(_, root)| list.verify_signature(root.public_key()).is_ok())
        };
        let root = roots.iter().find(signed).ok_or_else(|| bad(NOT_OURS))?;
        let serials = list.iter_revoked_certificates().map(|entry| entry.serial().to_bytes_be());
        Ok(Self {
            root: root.clone(),
            issuer: list.issuer().as_raw().to_vec(),
            serials: serials.collect(),
            der: der.to_vec(),
        })
    }

    fn covers(&self, other: &Self) -> bool {
        (&self.root, &self.issuer) == (&other.root, &other.issuer) && self.serials.is_superset(&other.serials)
    }

    /// Returns the certificate's serial number if it is on the list.
    fn names(&self, certificate: &X509Certificate<'_>) -> Option<String> {
        let serial = certificate.tbs_certificate.serial.to_bytes_be();
        let named = certificate.issuer().as_raw() == self.issuer && self.serials.contains(&serial);
        named.then(|| serial.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// RevocationLists in the order in which they were added.
pub type RevocationLists = Arc<Vec<Arc<RevocationList>>>;

/// All revocation lists of an identity. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Revoked(Arc<watch::Sender<RevocationLists>>);

impl Default for Revoked {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(RevocationLists::default())))
    }
}

impl Revoked {
    /// Adds a list that one of `roots` has signed. Returns `false` if it adds nothing.
    pub(crate) fn learn(
        &self,
        der: &[u8],
        roots: &[CertificateDer<'static>],
    ) -> Result<bool, CertificateError> {
        // Most lists arrive repeatedly from every peer, and comparing bytes is cheaper than verifying a
        // signature.
        if self.0.borrow().iter().any(|list| list.der == der) {
            return Ok(false);
        }
        let new = RevocationList::read(der, roots)?;
        let mut outcome = Ok(false);
        self.0.send_if_modified(|lists| {
            if lists.iter().any(|list| list.covers(&new)) {
                return false;
            }
            let mut retained: Vec<_> = lists.iter().filter(|list| !new.covers(list)).cloned().collect();
            if retained.len() >= MAX_LISTS {
                outcome = Err(CertificateError::RevocationList { reason: "too many lists" });
                return false;
            }
            retained.push(Arc::new(new));
            *lists = Arc::new(retained);
            outcome = Ok(true);
            true
        });
        outcome
    }

    /// Adds the lists of `other`, which were signed by `roots`, and drops lists that none of `roots` has
    /// signed.
    pub(crate) fn renew(
        &self,
        other: &Self,
        roots: &[CertificateDer<'static>],
    ) -> Result<bool, CertificateError> {
        self.0.send_if_modified(|lists| {
            let retained: Vec<_> = lists.iter().filter(|list| roots.contains(&list.root)).cloned().collect();
            let fewer = retained.len() < lists.len();
            *lists = Arc::new(retained);
            fewer
        });
        let others = Arc::clone(&other.0.borrow());
        others.iter().try_fold(false, |changed, list| Ok(self.learn(&list.der, roots)? || changed))
    }

    /// Refuses a chain that contains a revoked certificate.
    pub(crate) fn check<'a>(
        &self,
        chain: impl IntoIterator<Item = &'a CertificateDer<'a>>,
    ) -> Result<(), CertificateError> {
        let lists = Arc::clone(&self.0.borrow());
        if lists.is_empty() {
            return Ok(());
        }
        for certificate in chain {
            let (_, parsed) =
                X509Certificate::from_der(certificate).map_err(|_| CertificateError::Unreadable)?;
            if let Some(serial) = lists.iter().find_map(|list| list.names(&parsed)) {
                return Err(CertificateError::Revoked { serial });
            }
        }
        Ok(())
    }

    pub(crate) fn name_all<'a>(&self, serials: impl IntoIterator<Item = &'a [u8]>) -> bool {
        let lists = Arc::clone(&self.0.borrow());
        serials.into_iter().all(|serial| lists.iter().any(|list| list.serials.contains(serial)))
    }

    /// Returns the present lists and all changes.
    pub(crate) fn subscribe(&self) -> watch::Receiver<RevocationLists> {
        self.0.subscribe()
    }

    /// Waits until the lists have more than `threshold` certificates. Returns their number.
    pub(crate) async fn more_than(&self, threshold: usize) -> usize {
        let mut lists = self.0.subscribe();
        loop {
            lists.mark_unchanged();
            let count = self.count();
            if count > threshold {
                return count;
            }
            // `self` holds the sender, so this does not fail.
            if lists.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    pub(crate) fn count(&self) -> usize {
        let lists = Arc::clone(&self.0.borrow());
        lists
            .iter()
            .flat_map(|list| list.serials.iter().map(|serial| (&list.issuer, serial)))
            .collect::<BTreeSet<_>>()
            .len()
    }
}
