//! Errors between two nodes.

use crate::{StreamCode, VersionRange};
use pki::PeerIdentity;
use proto::codec::CodecError;
use proto::ids::{InvalidId, NodeId};
use std::net::SocketAddr;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An id or name breaks its rule.
    #[error(transparent)]
    InvalidId(#[from] InvalidId),
    /// A frame is too long, cut off or malformed.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// A certificate, a key or one of their files cannot be used.
    #[error(transparent)]
    Pki(#[from] pki::Error),
    /// The endpoint's socket cannot be opened.
    #[error("cannot listen on udp {address}: {source}")]
    Bind { address: SocketAddr, source: std::io::Error },
    /// A host name has no address.
    #[error("cannot resolve {target:?}: {source}")]
    Resolve {
        /// `host:port` as configured.
        target: String,
        source: std::io::Error,
    },
    /// A connection attempt cannot be started.
    #[error("cannot connect to {address}: {source}")]
    Connect { address: SocketAddr, source: quinn::ConnectError },
    /// This node refuses the peer's certificate.
    #[error("the certificate of {address} is refused: {reason}")]
    PeerRefused { address: SocketAddr, reason: String },
    /// The peer refuses this node's certificate. With TLS 1.3 a dialer learns this only after its own
    /// handshake succeeded, so the error appears in the exchange of hellos.
    #[error("{address} refuses our certificate ({reason})")]
    Refused {
        address: SocketAddr,
        /// The TLS alert, as text.
        reason: String,
    },
    /// The two nodes have no protocol version in common.
    #[error("protocol versions do not overlap: we speak {ours}, {peer} speaks {theirs}")]
    VersionMismatch { ours: VersionRange, theirs: VersionRange, peer: PeerIdentity },
    /// A node claims an id that its certificate does not carry.
    #[error("the node with the certificate of {certified} claims to be {claimed}")]
    Spoofed { certified: PeerIdentity, claimed: NodeId },
    /// An operation exceeded its time limit.
    #[error("{what} took longer than {limit_ms} ms")]
    Timeout { what: &'static str, limit_ms: u64 },
    #[error("lost the connection to {peer}: {reason}")]
    ConnectionLost {
        /// The peer's identity or address.
        peer: String,
        /// Reason as QUIC reports it.
        reason: String,
    },
    /// A worker refuses a pull.
    #[error("the KV transfer was refused: {0}")]
    PullRefused(#[from] proto::pull::PullRefusal),
    /// A worker refuses to send manifests or chunks.
    #[error("the request for chunks was refused: {0}")]
    ShardRefused(#[from] proto::shard::ShardRefusal),
    /// A stage of a replica does not join, or has left.
    #[error("the stage failed: {0}")]
    StageFailed(#[from] proto::stage::StageFailure),
    /// A stage of a replica refuses the claim.
    #[error("the claim of the stage was refused: {0}")]
    StageClaimed(#[from] proto::placement::ClaimRefusal),
    #[error("the endpoint is closed")]
    EndpointClosed,
    /// The peer stopped or reset the stream.
    #[error("the peer ended the stream: {0}")]
    StreamEnded(StreamCode),
    /// The stream ended before its content was complete.
    #[error("the stream was cut off: {what}")]
    StreamCut { what: &'static str },
    /// The peer violates the protocol.
    #[error("protocol violation by the peer: {0}")]
    Protocol(&'static str),
}

impl Error {
    /// Whether a retry, later or on another node, can succeed. `false` for errors that need an operator.
    pub fn retryable(&self) -> bool {
        match self {
            Self::Connect { .. }
            | Self::Resolve { .. }
            | Self::Timeout { .. }
            | Self::ConnectionLost { .. }
            | Self::StreamEnded(_)
            | Self::StreamCut { .. } => true,
            Self::InvalidId(_)
            | Self::Codec(_)
            | Self::Pki(_)
            | Self::Bind { .. }
            | Self::PeerRefused { .. }
            | Self::Refused { .. }
            | Self::VersionMismatch { .. }
            | Self::Spoofed { .. }
            | Self::PullRefused(_)
            | Self::ShardRefused(_)
            | Self::StageFailed(_)
            | Self::StageClaimed(_)
            | Self::EndpointClosed
            | Self::Protocol(_) => false,
        }
    }
}
