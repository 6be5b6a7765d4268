//! Nodes that violate the protocol: arbitrary certificates, and QUIC without the crate's transport.

use crate::cluster::{any_port, node};
use kvasir_transport::{Hello, VersionRange};
use pki::Identity;
use proto::codec::{self, Cap};
use proto::ids::Epoch;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};
use std::net::SocketAddr;
use std::sync::Arc;

/// A test authority that signs any certificate.
pub(crate) struct Root {
    pub(crate) certificate: Certificate,
    pub(crate) issuer: Issuer<'static, KeyPair>,
}

impl Root {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(DnType::CommonName, "root");
        let certificate = params.self_signed(&key).unwrap();
        Self { certificate, issuer: Issuer::new(params, key) }
    }

    pub(crate) fn sign(&self, params: &CertificateParams) -> Shown {
        let key = KeyPair::generate().unwrap();
        Shown { chain: vec![params.signed_by(&key, &self.issuer).unwrap()], key }
    }

    pub(crate) fn identity(&self, role: &str, name: &str) -> Identity {
        self.sign(&leaf(&format!("spiffe://c/{role}/{name}"))).identity(self)
    }
}

/// A certificate chain and its key.
pub(crate) struct Shown {
    pub(crate) chain: Vec<Certificate>,
    pub(crate) key: KeyPair,
}

impl Shown {
    pub(crate) fn der(&self) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let chain = self.chain.iter().map(|certificate| certificate.der().clone()).collect();
        (chain, PrivateKeyDer::try_from(self.key.serialize_der()).unwrap())
    }

    pub(crate) fn identity(&self, root: &Root) -> Identity {
        let chain: String = self.chain.iter().map(Certificate::pem).collect();
        let key = self.key.serialize_pem();
        Identity::from_pem(chain.as_bytes(), key.as_bytes(), root.certificate.pem().as_bytes()).unwrap()
    }
}

/// A valid node certificate. Each row of the table breaks one field.
pub(crate) fn leaf(uri: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![SanType::URI(uri.try_into().unwrap())];
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
    params
}

/// A verifier that accepts every certificate.
#[derive(Debug)]
pub(crate) struct Gullible;

impl ServerCertVerifier for Gullible {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        rustls::crypto::ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

/// Presents its certificate unchecked, because rustls itself would refuse a key that does not match.
#[derive(Debug)]
struct Shows(Arc<rustls::sign::CertifiedKey>);

impl Shows {
    fn new(shown: &Shown) -> Arc<Self> {
        let (chain, key) = shown.der();
        let key = rustls::crypto::ring::sign::any_supported_type(&key).unwrap();
        Arc::new(Self(Arc::new(rustls::sign::CertifiedKey::new(chain, key))))
    }
}

impl rustls::client::ResolvesClientCert for Shows {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<rustls::sign::CertifiedKey>> {
        Some(self.0.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl rustls::server::ResolvesServerCert for Shows {
    fn resolve(&self, _: rustls::server::ClientHello<'_>) -> Option<Arc<rustls::sign::CertifiedKey>> {
        Some(self.0.clone())
    }
}

pub(crate) fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Connects a bare QUIC client that presents `shown`, or no certificate.
pub(crate) async fn dial(address: SocketAddr, shown: Option<&Shown>) -> quinn::Connection {
    dial_for(address, shown, "kvasir/1").await.unwrap()
}

/// Like [`dial`], with another application protocol, which the listener may not speak.
pub(crate) async fn dial_for(
    address: SocketAddr,
    shown: Option<&Shown>,
    protocol: &str,
) -> Result<quinn::Connection, quinn::ConnectionError> {
    let builder = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Gullible));
    let mut config = match shown {
        Some(shown) => builder.with_client_cert_resolver(Shows::new(shown)),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![protocol.into()];
    let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(config).unwrap()));
    let endpoint = quinn::Endpoint::client(any_port()).unwrap();
    // The dialer checks nothing, so its own handshake succeeds even if the listener refuses.
    endpoint.connect_with(config, address, "any").unwrap().await
}

/// Starts a bare QUIC server that presents `shown` and requests no certificate.
pub(crate) fn listen(shown: &Shown) -> quinn::Endpoint {
    let mut config = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Shows::new(shown));
    config.alpn_protocols = vec!["kvasir/1".into()];
    let config = quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(config).unwrap()));
    let endpoint = quinn::Endpoint::server(config, any_port()).unwrap();
    let accepting = endpoint.clone();
    tokio::spawn(async move {
        while let Some(incoming) = accepting.accept().await {
            // The dialer is expected to abort the handshake.
            drop(incoming.await);
        }
    });
    endpoint
}

/// Builds a frame around `body`. `len` may be wrong.
pub(crate) fn frame(len: usize, body: &[u8]) -> Vec<u8> {
    [&(len as u32).to_be_bytes()[..], body].concat()
}

/// Sends a hello as `name` on the connection's first stream and waits for the reply.
pub(crate) async fn hello(connection: &quinn::Connection, name: &str) {
    let hello = Hello { versions: VersionRange::CURRENT, node: node(name), epoch: Epoch(1) };
    let body = codec::encode(&hello, Cap::Control).unwrap();
    let (mut send, mut receive) = connection.open_bi().await.unwrap();
    send.write_all(&[&[255], &frame(body.len(), &body)[..]].concat()).await.unwrap();
    send.finish().unwrap();
    // The caller checks on the connection whether a reply came.
    drop(receive.read_to_end(1000).await);
}
