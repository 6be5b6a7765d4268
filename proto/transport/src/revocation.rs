//! Distribution of revocation lists. Any node may forward a list, because each receiver checks the
//! signature. A node reads lists from its identity directory and sends them to all its peers, which forward
//! them, so that a list reaches all nodes within moments.

use super::close::CloseCode;
use super::local::{Counters, Local};
use super::streams::{FrameReader, FrameWriter, StreamCode, StreamKind, within, write_error};
use crate::Error;
use pki::{Identity, PeerIdentity, RevocationLists};
use proto::codec::{Cap, CodecError};
use quinn::RecvStream;
use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;

/// Interval at which all lists are sent again, because a peer may trust the root that signed a list only
/// later.
const AGAIN: Duration = Duration::from_secs(5);
/// Time limit for a peer to accept a list. After a timeout the peer gets no more lists.
const SEND_LIMIT: Duration = Duration::from_secs(10);

/// A certificate revocation list, as nodes send it to each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocations {
    /// The list as its authority signed it, in DER; at most [`pki::MAX_REVOCATION_LIST`] bytes.
    pub list: Vec<u8>,
}

/// Closes a connection once its peer's certificate is revoked, and sends all lists to the peer.
pub(super) fn watch(quic: quinn::Connection, local: Arc<Local>, peer: PeerIdentity) -> JoinHandle<()> {
    tokio::spawn(async move {
        let sending = async {
            if let Err(error) = send_lists(&quic, local.identity()).await {
                tracing::debug!(%peer, %error, "cannot send the list of revoked certificates to a peer");
            }
        };
        tokio::join!(end_when_revoked(&quic, &local, &peer), sending);
    })
}

async fn end_when_revoked(quic: &quinn::Connection, local: &Local, peer: &PeerIdentity) {
    let chain = quic.peer_identity().and_then(|chain| chain.downcast::<Vec<CertificateDer<'static>>>().ok());
    let Some(chain) = chain else { return };
    let identity = local.identity();
    let mut lists = identity.revocation_lists();
    loop {
        lists.mark_unchanged();
        if let Err(error) = identity.check_revoked(chain.iter()) {
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

async fn send_lists(quic: &quinn::Connection, identity: &Identity) -> Result<(), Error> {
    let mut receiver = identity.revocation_lists();
    let mut stream = None::<FrameWriter<Revocations>>;
    let mut sent = RevocationLists::default();
    loop {
        let lists = Arc::clone(&receiver.borrow_and_update());
        for list in lists.iter().filter(|list| !sent.iter().any(|sent| Arc::ptr_eq(sent, list))) {
            let list = Revocations { list: list.der().to_vec() };
            within("sending the list of revoked certificates", SEND_LIMIT, async {
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
        sent = lists;
        match tokio::time::timeout(AGAIN, receiver.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Ok(()),
            Err(_) => sent = RevocationLists::default(),
        }
    }
}

/// Receives a peer's lists until the stream ends or a list is malformed.
pub(super) async fn receive_lists(stream: RecvStream, local: Arc<Local>, peer: PeerIdentity) {
    let mut frames = FrameReader::<Revocations>::new(stream, Cap::Stream);
    loop {
        let learned = match frames.next().await {
            Ok(Some(revocations)) => local.identity().learn_revoked(&revocations.list),
            Err(Error::Codec(CodecError::UnknownVariant { .. })) => continue,
            Ok(None) | Err(_) => return,
        };
        match learned {
            Ok(false) => {}
            Ok(true) => local.identity().log_revoked(),
            // Signed by a future root or by a foreign one. The delay limits the rate of such lists.
            Err(error) if error.is_foreign_list() => {
                tracing::debug!(%peer, %error, "a list of revoked certificates is of no root of the cluster");
                tokio::time::sleep(SEND_LIMIT / 10).await;
            }
            Err(error) => {
                tracing::warn!(%peer, %error, "a peer sent an invalid list of revoked certificates; it is ignored");
                return frames.stop(StreamCode::Malformed);
            }
        }
    }
}
