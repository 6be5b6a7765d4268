//! TLS 1.3 with certificates on both sides, with ring. The two verifiers here check node names where rustls
//! would check host names.

use crate::error::{CertificateError, Error};
use crate::fingerprint::Fingerprint;
use crate::identity::{Expected, Identity, PeerIdentity};
use proto::ids::{ClusterName, Role};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    ClientHello, NoServerSessionStorage, ParsedCertificate, ResolvesServerCert, WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName, PeerIncompatible, RootCertStore, ServerConfig,
    SignatureScheme,
};
use std::sync::Arc;

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Fills `out` with cryptographically secure random bytes.
///
/// # Errors
/// [`Error::Tls`] if the operating system has none.
pub fn fill_random(out: &mut [u8]) -> Result<(), Error> {
    Ok(provider().secure_random.fill(out).map_err(rustls::Error::from)?)
}

fn roots(identity: &Identity) -> Result<Arc<RootCertStore>, rustls::Error> {
    let mut store = RootCertStore::empty();
    for root in &identity.material().roots {
        store.add(root.clone())?;
    }
    Ok(Arc::new(store))
}

/// Returns the settings of the listening side: requires a certificate of a node in this cluster whose role
/// is in `accepts`. With `strangers`, a dialer without a certificate is accepted too, and the caller must check
/// that the connection's protocol is for such dialers. The caller sets the application protocols.
///
/// # Errors
/// [`Error::Tls`] for a certificate that does not match its key, and for unusable roots.
pub fn server(identity: &Identity, accepts: &[Role], strangers: bool) -> Result<ServerConfig, Error> {
    let provider = provider();
    let verifier = NodeDials {
        identity: identity.clone(),
        provider: provider.clone(),
        accepts: accepts.to_vec(),
        strangers,
    };
    // Report unusable credentials now, not to the first peer that dials.
    verifier.chain()?;
    identity.material().certified()?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(verifier))
        .with_cert_resolver(Arc::new(Presented(identity.clone())));
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    Ok(config)
}

/// Returns the settings of the dialing side: accepts only `expected`, in this node's cluster. The caller
/// sets the application protocols.
///
/// # Errors
/// [`Error::Tls`] for unusable roots.
pub fn client(identity: &Identity, expected: &Expected) -> Result<ClientConfig, Error> {
    let provider = provider();
    let trusted = Trusted::Node {
        roots: roots(identity)?,
        identity: Box::new(identity.clone()),
        expected: expected.clone(),
    };
    let verifier = NodeAnswers { provider: provider.clone(), trusted };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_cert_resolver(Arc::new(Presented(identity.clone())));
    config.resumption = Resumption::disabled();
    config.enable_early_data = false;
    Ok(config)
}

/// Application protocol of a node that has no certificate yet, or renews its own.
pub const JOIN_PROTOCOL: &[u8] = b"kvasir-join/1";

/// Returns the settings of a dialer without a certificate. It accepts any coordinator whose chain ends in the
/// root with this fingerprint. The application protocol is [`JOIN_PROTOCOL`].
///
/// # Errors
/// [`Error::Tls`] if ring has no TLS 1.3.
pub fn joining(root: Fingerprint) -> Result<ClientConfig, Error> {
    let provider = provider();
    let verifier = NodeAnswers { provider: provider.clone(), trusted: Trusted::Root(root) };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    config.alpn_protocols = vec![JOIN_PROTOCOL.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_early_data = false;
    Ok(config)
}

/// rustls formats a foreign error with `Debug`, and only that text reaches the caller.
#[derive(thiserror::Error)]
#[error("{0}")]
struct Reason(CertificateError);

impl std::fmt::Debug for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

fn refuse(error: CertificateError) -> rustls::Error {
    rustls::CertificateError::Other(rustls::OtherError(Arc::new(Reason(error)))).into()
}

fn holds(
    identity: &Identity,
    leaf: &CertificateDer<'_>,
    more: &[CertificateDer<'_>],
) -> Result<(), rustls::Error> {
    identity.check_revoked(std::iter::once(leaf).chain(more)).map_err(|error| match error {
        // The peer gets the TLS alert for a revoked certificate.
        CertificateError::Revoked { .. } => rustls::CertificateError::Revoked.into(),
        other => refuse(other),
    })
}

fn of_cluster(leaf: &CertificateDer<'_>, ours: &ClusterName) -> Result<PeerIdentity, CertificateError> {
    let name = PeerIdentity::from_certificate(leaf)?;
    if name.cluster != *ours {
        return Err(CertificateError::WrongCluster { found: name.cluster, ours: ours.clone() });
    }
    Ok(name)
}

/// Presents the identity's present credentials at each handshake.
#[derive(Debug)]
struct Presented(Identity);

impl Presented {
    fn now(&self) -> Option<Arc<CertifiedKey>> {
        // The credentials were checked before they were stored.
        self.0.material().certified().ok().map(Arc::new)
    }
}

impl ResolvesServerCert for Presented {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let material = self.0.material();
        let mut certified = material.certified().ok()?;
        // A joining node knows only the fingerprint of a root.
        if hello.alpn().is_some_and(|mut names| names.any(|name| name == JOIN_PROTOCOL)) {
            certified.cert.extend(material.roots.iter().cloned());
        }
        Some(Arc::new(certified))
    }
}

impl ResolvesClientCert for Presented {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.now()
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Verifies peers that dial this node, with the roots at the time of the handshake.
#[derive(Debug)]
struct NodeDials {
    identity: Identity,
    provider: Arc<CryptoProvider>,
    accepts: Vec<Role>,
    /// Whether a dialer without a certificate is accepted.
    strangers: bool,
}

impl NodeDials {
    fn chain(&self) -> Result<Arc<dyn ClientCertVerifier>, rustls::Error> {
        WebPkiClientVerifier::builder_with_provider(roots(&self.identity)?, self.provider.clone())
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))
    }
}

impl ClientCertVerifier for NodeDials {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // A list of roots would only reveal information to strangers. Nodes have only one certificate to
        // offer.
        &[]
    }

    fn client_auth_mandatory(&self) -> bool {
        !self.strangers
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.chain()?.verify_client_cert(leaf, intermediates, now)?;
        holds(&self.identity, leaf, intermediates)?;
        let name = of_cluster(leaf, &self.identity.name().cluster).map_err(refuse)?;
        if !self.accepts.contains(&name.role) {
            return Err(refuse(CertificateError::WrongRole { found: name.role }));
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(PeerIncompatible::Tls13RequiredForQuic.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, leaf, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Verifies peers that this node has dialed.
#[derive(Debug)]
struct NodeAnswers {
    provider: Arc<CryptoProvider>,
    trusted: Trusted,
}

/// The peers that a dialer accepts.
#[derive(Debug)]
enum Trusted {
    /// The expected one of this node's cluster.
    Node { roots: Arc<RootCertStore>, identity: Box<Identity>, expected: Expected },
    /// Any coordinator whose chain ends in this root. The dialer has no certificate.
    Root(Fingerprint),
}

impl NodeAnswers {
    /// Refuses a certificate that none of `roots` has signed.
    fn check_chain(
        &self,
        leaf: &CertificateDer<'_>,
        more: &[CertificateDer<'_>],
        roots: &RootCertStore,
        now: UnixTime,
    ) -> Result<(), rustls::Error> {
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(
            &ParsedCertificate::try_from(leaf)?,
            roots,
            more,
            now,
            algorithms,
        )
    }
}

impl ServerCertVerifier for NodeAnswers {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        more: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let (name, expected) = match &self.trusted {
            Trusted::Node { roots, identity, expected } => {
                self.check_chain(leaf, more, roots, now)?;
                holds(identity, leaf, more)?;
                let name = of_cluster(leaf, &identity.name().cluster).map_err(refuse)?;
                (name, expected.clone())
            }
            Trusted::Root(root) => {
                let named = more
                    .iter()
                    .find(|der| Fingerprint::of_certificate(der).is_ok_and(|found| found == *root));
                let named = named.ok_or_else(|| refuse(CertificateError::OtherAuthority))?;
                let mut roots = RootCertStore::empty();
                roots.add(named.clone().into_owned())?;
                self.check_chain(leaf, more, &roots, now)?;
                let name = PeerIdentity::from_certificate(leaf).map_err(refuse)?;
                (name, Expected::any(Role::Coordinator))
            }
        };
        if name.role != expected.role {
            return Err(refuse(CertificateError::WrongRole { found: name.role }));
        }
        match expected.node {
            Some(expected) if expected != name.node => {
                Err(refuse(CertificateError::WrongNode { found: name.node, expected }))
            }
            _ => Ok(ServerCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(PeerIncompatible::Tls13RequiredForQuic.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, leaf, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
