//! TLS settings of QUIC: those of [`pki::tls`], with this protocol's name.

use crate::Error;
use pki::Fingerprint;
use pki::tls::JOIN_PROTOCOL;
use pki::{Expected, Identity};
use proto::ids::Role;
use quinn::crypto::rustls::{NoInitialCipherSuite, QuicClientConfig, QuicServerConfig};
use std::sync::Arc;

/// Names the form of the hello, which never changes. The hellos agree on versions above it.
const ALPN: &[u8] = b"kvasir/1";

/// Sent as SNI because QUIC requires a name. It is never evaluated, so it reveals nothing about the
/// cluster.
pub(super) const SERVER_NAME: &str = "node.kvasir.internal";

/// With `joins`, also speaks [`JOIN_PROTOCOL`]; only then a dialer needs no certificate.
pub(super) fn server(
    identity: &Identity,
    accepts: &[Role],
    joins: bool,
) -> Result<Arc<QuicServerConfig>, Error> {
    let mut config = pki::tls::server(identity, accepts, joins)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.alpn_protocols.extend(joins.then(|| JOIN_PROTOCOL.to_vec()));
    Ok(Arc::new(QuicServerConfig::try_from(config).map_err(no_initial_cipher)?))
}

pub(super) fn client(identity: &Identity, expected: &Expected) -> Result<Arc<QuicClientConfig>, Error> {
    let mut config = pki::tls::client(identity, expected)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Arc::new(QuicClientConfig::try_from(config).map_err(no_initial_cipher)?))
}

/// How a dialer and a coordinator know each other.
#[derive(Debug, Clone, Copy)]
pub enum JoinBy<'a> {
    /// The dialer has no certificate. The coordinator's chain must end in this root.
    Root(Fingerprint),
    /// The dialer renews its certificate.
    Identity(&'a Identity),
}

/// Settings of a dialer that asks for a certificate.
pub(super) fn join_client(by: &JoinBy<'_>) -> Result<Arc<QuicClientConfig>, Error> {
    let config = match by {
        JoinBy::Root(root) => pki::tls::joining(*root)?,
        JoinBy::Identity(identity) => {
            let mut config = pki::tls::client(identity, &Expected::any(Role::Coordinator))?;
            config.alpn_protocols = vec![JOIN_PROTOCOL.to_vec()];
            config
        }
    };
    Ok(Arc::new(QuicClientConfig::try_from(config).map_err(no_initial_cipher)?))
}

fn no_initial_cipher(error: NoInitialCipherSuite) -> Error {
    pki::Error::Tls(rustls::Error::General(error.to_string())).into()
}
