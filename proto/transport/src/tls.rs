//! TLS settings of QUIC: those of [`pki::tls`], with this protocol's name.

use crate::Error;
use pki::{Expected, Identity};
use proto::ids::Role;
use quinn::crypto::rustls::{NoInitialCipherSuite, QuicClientConfig, QuicServerConfig};
use std::sync::Arc;

/// Names the form of the hello, which never changes. The hellos agree on versions above it.
const ALPN: &[u8] = b"kvasir/1";

/// Sent as SNI because QUIC requires a name. It is never evaluated, so it reveals nothing about the
/// cluster.
pub(super) const SERVER_NAME: &str = "node.kvasir.internal";

pub(super) fn server(identity: &Identity, accepts: &[Role]) -> Result<Arc<QuicServerConfig>, Error> {
    let mut config = pki::tls::server(identity, accepts)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Arc::new(QuicServerConfig::try_from(config).map_err(no_initial_cipher)?))
}

pub(super) fn client(identity: &Identity, expected: &Expected) -> Result<Arc<QuicClientConfig>, Error> {
    let mut config = pki::tls::client(identity, expected)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Arc::new(QuicClientConfig::try_from(config).map_err(no_initial_cipher)?))
}

fn no_initial_cipher(error: NoInitialCipherSuite) -> Error {
    pki::Error::Tls(rustls::Error::General(error.to_string())).into()
}
