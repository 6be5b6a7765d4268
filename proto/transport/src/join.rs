//! The exchange of a node that joins, or renews its certificate: one connection with one stream.

use super::connection::Slot;
use super::handshake::{handshake_error, leaf};
use super::streams::{FrameReader, FrameWriter, within};
use super::tls;
pub use super::tls::JoinBy;
use crate::Error;
use pki::Fingerprint;
use pki::PeerIdentity;
use pki::ca::Serial;
use pki::tls::JOIN_PROTOCOL;
use proto::codec::Cap;
use proto::join::{JoinReply, JoinRequest};
use quinn::crypto::rustls::HandshakeData;
use quinn::{Connection, SendStream};
use std::net::SocketAddr;
use std::time::Duration;

/// Longest exchange, for each address of a coordinator.
const EXCHANGE_LIMIT: Duration = Duration::from_secs(10);
/// Longest wait until the dialer has read the reply.
const READ_LIMIT: Duration = Duration::from_secs(5);

/// The certificate with which a node asks for the next one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Presented {
    pub name: PeerIdentity,
    pub key: Fingerprint,
    pub serial: Serial,
    pub ends_unix_s: u64,
}

/// A request that waits for its reply.
#[derive(Debug)]
pub struct JoinCall {
    pub request: JoinRequest,
    pub from: SocketAddr,
    /// `None` for a node without a certificate.
    pub presented: Option<Presented>,
    send: SendStream,
    quic: Connection,
    _slot: Slot,
}

impl JoinCall {
    pub(super) async fn read(quic: Connection, slot: Slot) -> Result<Self, Error> {
        let presented = match leaf(&quic)? {
            Some(leaf) => {
                let name = PeerIdentity::from_certificate(&leaf).map_err(pki::Error::from)?;
                let (serial, ends_unix_s) = Serial::and_end_of(&leaf).map_err(pki::Error::from)?;
                let key = Fingerprint::of_certificate(&leaf).map_err(pki::Error::from)?;
                Some(Presented { name, key, serial, ends_unix_s })
            }
            None => None,
        };
        let (send, receive) = quic.accept_bi().await.map_err(|error| lost(&quic, &error))?;
        let mut reader = FrameReader::<JoinRequest>::new(receive, Cap::Stream);
        let request = reader.next().await?.ok_or(Error::StreamCut { what: "the request to join" })?;
        Ok(Self { request, from: quic.remote_address(), presented, send, quic, _slot: slot })
    }

    /// Sends the reply and waits until the dialer has read it, at most 5 s.
    pub async fn reply(self, reply: &JoinReply) -> Result<(), Error> {
        let mut writer = FrameWriter::new(self.send, Cap::Stream);
        writer.write(reply).await?;
        writer.finish();
        let read = within("the reply to a joining node", READ_LIMIT, async {
            writer.stream().stopped().await.map(drop).map_err(|_| Error::StreamCut { what: "reply" })
        });
        let read = read.await;
        self.quic.close(0_u32.into(), b"done");
        read
    }
}

/// Whether the dialer has chosen the protocol of joining nodes.
pub(super) fn is_join(quic: &Connection) -> bool {
    let data = quic.handshake_data().and_then(|data| data.downcast::<HandshakeData>().ok());
    data.is_some_and(|data| data.protocol.as_deref() == Some(JOIN_PROTOCOL))
}

/// Sends a request to the coordinator at `target` (`host:port`) and returns its reply. Tries each of the host's
/// addresses.
pub async fn ask(target: &str, by: JoinBy<'_>, request: &JoinRequest) -> Result<JoinReply, Error> {
    let resolve = |source| Error::Resolve { target: target.to_owned(), source };
    let addresses = tokio::net::lookup_host(target).await.map_err(resolve)?;
    let mut failed = resolve(std::io::ErrorKind::NotFound.into());
    for address in addresses {
        match within("joining", EXCHANGE_LIMIT, exchange(address, by, request)).await {
            Ok(reply) => return Ok(reply),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

async fn exchange(address: SocketAddr, by: JoinBy<'_>, request: &JoinRequest) -> Result<JoinReply, Error> {
    let any: SocketAddr = match address {
        SocketAddr::V4(_) => (std::net::Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let endpoint = quinn::Endpoint::client(any).map_err(|source| Error::Bind { address: any, source })?;
    let config = quinn::ClientConfig::new(tls::join_client(&by)?);
    let connecting = endpoint
        .connect_with(config, address, tls::SERVER_NAME)
        .map_err(|source| Error::Connect { address, source })?;
    let quic = connecting.await.map_err(|error| handshake_error(address, &error))?;
    let replied = async {
        let (send, receive) = quic.open_bi().await.map_err(|error| handshake_error(address, &error))?;
        let mut writer = FrameWriter::new(send, Cap::Stream);
        writer.write(request).await?;
        writer.finish();
        let mut reader = FrameReader::<JoinReply>::new(receive, Cap::Stream);
        reader.next().await?.ok_or(Error::StreamCut { what: "the reply to a joining node" })
    };
    let replied = replied.await.map_err(|error| match quic.close_reason() {
        // The coordinator's verdict on a certificate arrives only now.
        Some(reason) => handshake_error(address, &reason),
        None => error,
    });
    quic.close(0_u32.into(), b"done");
    replied
}

fn lost(quic: &Connection, error: &quinn::ConnectionError) -> Error {
    Error::ConnectionLost { peer: quic.remote_address().to_string(), reason: error.to_string() }
}
