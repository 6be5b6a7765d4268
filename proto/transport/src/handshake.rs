//! The peer's identity after a handshake, and the error after a failed one.

use crate::Error;
use pki::PeerIdentity;
use quinn::ConnectionError;
use rustls::pki_types::CertificateDer;
use std::net::SocketAddr;

/// Returns the identity in the certificate that TLS has verified.
pub(super) fn certified(quic: &quinn::Connection) -> Result<PeerIdentity, Error> {
    let leaf = leaf(quic)?.ok_or(Error::Protocol("no certificate"))?;
    Ok(PeerIdentity::from_certificate(&leaf).map_err(pki::Error::from)?)
}

/// Returns the peer's own certificate, which TLS has verified; `None` if the peer has none.
pub(super) fn leaf(quic: &quinn::Connection) -> Result<Option<CertificateDer<'static>>, Error> {
    let Some(chain) = quic.peer_identity() else { return Ok(None) };
    let chain = chain.downcast::<Vec<CertificateDer<'static>>>();
    let chain = chain.map_err(|_| Error::Protocol("no certificate chain"))?;
    Ok(chain.into_iter().next())
}

/// Reports which side refused the other. TLS alerts travel as QUIC error codes 0x100 to 0x1ff (RFC 9001,
/// section 4.8).
pub(super) fn handshake_error(address: SocketAddr, error: &ConnectionError) -> Error {
    let is_alert = |code: quinn::TransportErrorCode| (0x100..0x200).contains(&u64::from(code));
    match error {
        ConnectionError::TransportError(ours) if is_alert(ours.code) => {
            Error::PeerRefused { address, reason: ours.reason.clone() }
        }
        ConnectionError::ConnectionClosed(theirs) if is_alert(theirs.error_code) => {
            Error::Refused { address, reason: theirs.to_string() }
        }
        other => Error::ConnectionLost { peer: address.to_string(), reason: other.to_string() },
    }
}
