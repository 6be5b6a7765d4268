//! Settings and counters that an endpoint shares with its connections.

use super::hello::{Hello, VersionRange};
use pki::{Identity, PeerIdentity};
use proto::ids::{Epoch, Role};
use quinn::{TransportConfig, VarInt};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Longest UDP payload that path MTU discovery tries, for links with jumbo frames; on other paths discovery
/// settles for less. QUIC passes up to ten datagrams to the kernel at once, and the kernel accepts 65,507
/// bytes. With longer datagrams a burst would be lost silently as a whole, until discovery falls back to
/// the shortest datagrams.
pub(super) const MAX_DATAGRAM: u16 = 65_507 / 10;
/// Bytes sent before the first acknowledgement. The usual 12 KB are meant for the internet and smaller than
/// one prompt, so every new connection would wait for an acknowledgement in the middle of a prompt.
const INITIAL_WINDOW: u64 = 256 << 10;
/// Most packets that a peer receives before it sends an acknowledgement. Most exchanges are one or two
/// packets each way, and an acknowledgement is another packet that costs as much to send and to receive.
const ACK_EVERY: u32 = 8;

/// Settings of an endpoint. Start from [`EndpointConfig::new`].
#[derive(Debug, Clone)]
pub struct EndpointConfig {
    /// Epoch of this run of the process; sent to peers in the hello.
    pub epoch: Epoch,
    /// Roles of nodes that may dial this endpoint.
    pub accepts: Vec<Role>,
    /// Whether nodes without a certificate may ask this node for one ([`Endpoint::accept_join`]).
    ///
    /// [`Endpoint::accept_join`]: crate::Endpoint::accept_join
    pub joins: bool,
    /// Protocol versions that this node speaks.
    pub versions: VersionRange,
    /// A connection from which nothing arrives for this long is lost.
    pub idle_timeout: Duration,
    /// Ping interval of an idle connection; must be well below `idle_timeout`.
    pub keep_alive: Duration,
    /// Time limit for handshake and hello together.
    pub handshake_timeout: Duration,
    pub max_connections: usize,
    /// Most connections accepted from one IP address.
    pub max_connections_per_ip: usize,
    /// Number of unfinished handshakes from which on a dialer must prove its address first, which costs it
    /// a round trip; 0 is always.
    pub retry_from_handshakes: usize,
    /// Most bidirectional streams that a peer may have open, such as RPC channels and generations.
    pub max_bidi_streams: u32,
    /// Most unidirectional streams that a peer may have open.
    pub max_uni_streams: u32,
}

impl EndpointConfig {
    /// Returns the defaults: no joining nodes, 10 s idle timeout, 2 s keep-alive, 5 s handshake timeout, 1,024 connections,
    /// 256 per address, proof of address from 32 handshakes on, 4,096 bidirectional and 256 unidirectional
    /// streams.
    pub fn new(epoch: Epoch, accepts: impl Into<Vec<Role>>) -> Self {
        Self {
            epoch,
            accepts: accepts.into(),
            joins: false,
            versions: VersionRange::CURRENT,
            idle_timeout: Duration::from_secs(10),
            keep_alive: Duration::from_secs(2),
            handshake_timeout: Duration::from_secs(5),
            max_connections: 1024,
            max_connections_per_ip: 256,
            retry_from_handshakes: 32,
            max_bidi_streams: 4096,
            max_uni_streams: 256,
        }
    }

    pub(super) fn transport(&self) -> TransportConfig {
        let mut transport = TransportConfig::default();
        let mut mtu = quinn::MtuDiscoveryConfig::default();
        mtu.upper_bound(MAX_DATAGRAM);
        let mut acks = quinn::AckFrequencyConfig::default();
        acks.ack_eliciting_threshold(ACK_EVERY.into());
        let mut congestion = quinn::congestion::CubicConfig::default();
        congestion.initial_window(INITIAL_WINDOW);
        transport
            .max_idle_timeout(self.idle_timeout.try_into().ok())
            .keep_alive_interval(Some(self.keep_alive))
            .max_concurrent_bidi_streams(self.max_bidi_streams.into())
            .max_concurrent_uni_streams(self.max_uni_streams.into())
            // quinn's defaults are for 100 Mbit/s. A cluster's links carry 10 to 200 Gbit/s with round
            // trips of 0.2 to 1 ms. 200 Gbit/s times 0.2 ms are 5 MB, times 1 ms 25 MB: a stream's window
            // covers the first, a connection's window both. A CPU limits one connection to 1.4 GB/s, of
            // which 1 ms is 1.4 MB. Unread data is buffered here: one slow reader can fill a stream's
            // window but not the connection's, which is the most that a peer can make this node buffer.
            // With 32 MiB per stream two CPUs carried a sixth less, with 1 MiB a twelfth less
            // (docs/measurements/stages.md).
            .stream_receive_window(VarInt::from_u32(8 << 20))
            .receive_window(VarInt::from_u32(64 << 20))
            .send_window(64 << 20)
            .datagram_receive_buffer_size(None)
            .mtu_discovery_config(Some(mtu))
            .congestion_controller_factory(Arc::new(congestion))
            .ack_frequency_config(Some(acks));
        transport
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) accepted: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) over_limit: AtomicU64,
    pub(super) retried: AtomicU64,
    pub(super) spoofed: AtomicU64,
    pub(super) revoked: AtomicU64,
    pub(super) streams_refused: AtomicU64,
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// State of an endpoint that every connection of it shares.
#[derive(Debug)]
pub(super) struct Local {
    pub(super) identity: Identity,
    pub(super) config: EndpointConfig,
    pub(super) transport: Arc<TransportConfig>,
    pub(super) counters: Counters,
}

impl Local {
    pub(super) fn name(&self) -> &PeerIdentity {
        self.identity.name()
    }

    pub(super) fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(super) fn hello(&self) -> Hello {
        Hello { versions: self.config.versions, node: self.name().node.clone(), epoch: self.config.epoch }
    }
}
