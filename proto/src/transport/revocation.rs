//! Revocation of certificates before they expire. The cluster's authority signs a list of them (an X.509
//! CRL, RFC 5280). Any node may forward a list, because each receiver checks the signature.
//!
//! A node reads lists from its identity directory and sends them to all its peers, which forward them, so
//! that a list reaches all nodes within moments. A revoked certificate stays revoked: lists add up, and a
//! later list does not replace an earlier one. A list that another one covers is dropped.

use super::CloseCode;
use super::endpoint::{Counters, Local};
use super::identity::{CertificateError, Identity, PeerIdentity};
use super::streams::{FrameReader, FrameWriter, StreamCode, StreamKind, within, write_error};
use crate::Error;
use crate::codec::{Cap, CodecError};
use quinn::RecvStream;
use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};

/// Most bytes of a list, enough for some 12,000 certificates.
pub const MAX_REVOCATION_LIST: usize = 1 << 19;
/// Most lists that are kept. A list covers the earlier ones unless its authority has lost them.
const MAX_LISTS: usize = 16;
/// Interval at which all lists are sent again, because a peer may trust the root that signed a list only
/// later.
const AGAIN: Duration = Duration::from_secs(5);
/// Reason why a list that may be valid is refused.
const NOT_OURS: &str = "signed by none of the cluster's roots";
/// Time limit for a peer to accept a list. After a timeout the peer gets no more lists.
const TELLING_LIMIT: Duration = Duration::from_secs(10);

/// A certificate revocation list, as nodes send it to each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocations {
    /// The list as its authority signed it, in DER; at most [`MAX_REVOCATION_LIST`] bytes.
    pub list: Vec<u8>,
}

/// A list with a verified signature.
#[derive(Debug)]
struct List {
    der: Vec<u8>,
    /// The root that signed the list.
    root: CertificateDer<'static>,
    /// Issuer of the listed certificates, as the certificates name it.
    issuer: Vec<u8>,
    serials: BTreeSet<Vec<u8>>,
}

impl List {
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

type Lists = Arc<Vec<Arc<List>>>;

/// All revocation lists of an identity. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Revoked(Arc<watch::Sender<Lists>>);

impl Default for Revoked {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(Lists::default())))
    }
}

impl Revoked {
    /// Adds a list that one of `roots` has signed. Returns `false` if it adds nothing.
    pub(super) fn learn(
        &self,
        der: &[u8],
        roots: &[CertificateDer<'static>],
    ) -> Result<bool, CertificateError> {
        // Most lists arrive repeatedly from every peer, and comparing bytes is cheaper than verifying a
        // signature.
        if self.0.borrow().iter().any(|known| known.der == der) {
            return Ok(false);
        }
        let new = List::read(der, roots)?;
        let mut outcome = Ok(false);
        self.0.send_if_modified(|lists| {
            if lists.iter().any(|known| known.covers(&new)) {
                return false;
            }
            let mut kept: Vec<_> = lists.iter().filter(|known| !new.covers(known)).cloned().collect();
            if kept.len() >= MAX_LISTS {
                outcome = Err(CertificateError::RevocationList { reason: "too many lists" });
                return false;
            }
            kept.push(Arc::new(new));
            *lists = Arc::new(kept);
            outcome = Ok(true);
            true
        });
        outcome
    }

    /// Adds the lists of `other`, which were signed by `roots`, and drops lists that none of `roots` has
    /// signed.
    pub(super) fn renew(
        &self,
        other: &Self,
        roots: &[CertificateDer<'static>],
    ) -> Result<bool, CertificateError> {
        self.0.send_if_modified(|lists| {
            let kept: Vec<_> = lists.iter().filter(|list| roots.contains(&list.root)).cloned().collect();
            let fewer = kept.len() < lists.len();
            *lists = Arc::new(kept);
            fewer
        });
        let others = Arc::clone(&other.0.borrow());
        others.iter().try_fold(false, |changed, list| Ok(self.learn(&list.der, roots)? || changed))
    }

    /// Refuses a chain that contains a revoked certificate.
    pub(super) fn check<'a>(
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

    /// Waits until the lists have more than `known` certificates. Returns their number.
    pub(super) async fn more_than(&self, known: usize) -> usize {
        let mut lists = self.0.subscribe();
        loop {
            lists.mark_unchanged();
            let count = self.count();
            if count > known {
                return count;
            }
            // `self` holds the sender, so this does not fail.
            if lists.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    pub(super) fn count(&self) -> usize {
        let lists = Arc::clone(&self.0.borrow());
        lists
            .iter()
            .flat_map(|list| list.serials.iter().map(|serial| (&list.issuer, serial)))
            .collect::<BTreeSet<_>>()
            .len()
    }
}

/// Closes a connection once its peer's certificate is revoked, and sends all lists to the peer.
pub(super) fn watch(quic: quinn::Connection, local: Arc<Local>, peer: PeerIdentity) -> JoinHandle<()> {
    tokio::spawn(async move {
        let told = async {
            if let Err(error) = tell(&quic, local.identity()).await {
                tracing::debug!(%peer, %error, "cannot send the list of revoked certificates to a peer");
            }
        };
        tokio::join!(end_when_revoked(&quic, &local, &peer), told);
    })
}

async fn end_when_revoked(quic: &quinn::Connection, local: &Local, peer: &PeerIdentity) {
    let chain = quic.peer_identity().and_then(|chain| chain.downcast::<Vec<CertificateDer<'static>>>().ok());
    let Some(chain) = chain else { return };
    let revoked = &local.identity().revoked;
    let mut lists = revoked.0.subscribe();
    loop {
        lists.mark_unchanged();
        if let Err(error) = revoked.check(chain.iter()) {
            Counters::add(&local.counters.revoked);
            tracing::warn!(%peer, %error, "closed the connection of a peer with a revoked certificate");
            quic.close(CloseCode::Revoked.to_wire(), CloseCode::Revoked.as_str().as_bytes());
            return;
        }
        if lists.changed().await.is_err() {
            return;
        }
    }
}

async fn tell(quic: &quinn::Connection, identity: &Identity) -> Result<(), Error> {
    let mut known = identity.revoked.0.subscribe();
    let mut stream = None::<FrameWriter<Revocations>>;
    let mut told = Lists::default();
    loop {
        let lists = Arc::clone(&known.borrow_and_update());
        for list in lists.iter().filter(|list| !told.iter().any(|told| Arc::ptr_eq(told, list))) {
            let list = Revocations { list: list.der.clone() };
            within("sending the list of revoked certificates", TELLING_LIMIT, async {
                if stream.is_none() {
                    let lost = |error: quinn::ConnectionError| Error::ConnectionLost {
                        peer: "the peer".into(),
                        reason: error.to_string(),
                    };
                    let mut opened = quic.open_uni().await.map_err(lost)?;
                    opened.write_all(&[StreamKind::Revocations as u8]).await.map_err(write_error)?;
                    stream = Some(FrameWriter::new(opened, Cap::Stream));
                }
                match &mut stream {
                    Some(stream) => stream.write(&list).await,
                    None => Ok(()),
                }
            })
            .await?;
        }
        told = lists;
        match tokio::time::timeout(AGAIN, known.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Ok(()),
            Err(_) => told = Lists::default(),
        }
    }
}

/// Receives a peer's lists until the stream ends or a list is malformed.
pub(super) async fn hear(stream: RecvStream, local: Arc<Local>, peer: PeerIdentity) {
    let mut frames = FrameReader::<Revocations>::new(stream, Cap::Stream);
    loop {
        let heard = match frames.next().await {
            Ok(Some(heard)) => local.identity().learn_revoked(&heard.list),
            Err(Error::Codec(CodecError::UnknownVariant { .. })) => continue,
            Ok(None) | Err(_) => return,
        };
        match heard {
            Ok(false) => {}
            Ok(true) => local.identity().tell_revoked(),
            // Signed by a future root or by a foreign one. The delay limits the rate of such lists.
            Err(CertificateError::RevocationList { reason: NOT_OURS }) => {
                tracing::debug!(%peer, "ignored a list of revoked certificates: it is {NOT_OURS}");
                tokio::time::sleep(TELLING_LIMIT / 10).await;
            }
            Err(error) => {
                tracing::warn!(%peer, %error, "a peer sent an invalid list of revoked certificates; it is ignored");
                return frames.stop(StreamCode::Malformed);
            }
        }
    }
}
