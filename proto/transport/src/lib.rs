//! QUIC with mutual TLS between the nodes of one cluster: connections, the streams of each kind of message,
//! the RPC services, and the heartbeats of event loops. Must not contain: scheduling, routing, arithmetic,
//! model files.
//!
//! A node [binds](Endpoint::bind) one endpoint. Every worker dials every coordinator ([`Dialer`]), and
//! coordinators dial each other. On a [`Connection`] either side opens streams; the first byte of a stream
//! is its [`StreamKind`]. Guarantees:
//!
//! - A `Connection` exists only after both certificates were checked (chain, validity, key usage, cluster,
//!   role, node id), both hellos were exchanged and a protocol version was agreed on.
//! - The identity of a peer comes from its certificate. A name in a body is only compared with it
//!   ([`Connection::require_node`]).
//! - A stream of a kind that the opener's role may not open is refused with [`StreamCode::Forbidden`].
//! - A revoked certificate cannot open a connection, and revocation closes the connections that it has
//!   opened.
//! - No 0-RTT and no session resumption: every connection checks the certificates again.
//!
//! A coordinator and a worker, in one process:
//!
//! ```
//! use kvasir_transport::service::{WorkerApi, deadline};
//! use kvasir_transport::{Connection, Dialer, Endpoint, EndpointConfig, Incoming};
//! use pki::{Expected, ca::Authority};
//! use proto::adapter::{AdapterOrder, AdapterRefusal};
//! use proto::block::BlockId;
//! use proto::deployment::{ModelsOrder, ModelsReport};
//! use proto::event::KvReplay;
//! use proto::ids::{ClusterName, Epoch, ModelId, NodeId, Role};
//! use proto::message::{GenerateError, GenerateFrame};
//! use proto::placement::{PlaceOrder, PlaceReport};
//! use proto::sequence::{PromptProgress, SequenceName};
//! use proto::worker::WorkerStatus;
//! use std::{sync::Arc, time::Duration, time::SystemTime};
//! use tarpc::context::Context;
//!
//! #[derive(Clone)]
//! struct Worker;
//!
//! impl WorkerApi for Worker {
//!     async fn kv_replay(self, _: Context, _from: u64) -> KvReplay {
//!         KvReplay::TakeSnapshot
//!     }
//!     async fn drain(self, _: Context) {}
//!     async fn undrain(self, _: Context) {}
//!     async fn status(self, _: Context) -> WorkerStatus {
//!         unreachable!("not called here")
//!     }
//!     async fn metrics_text(self, _: Context) -> String {
//!         "kvasir_up 1\n".into()
//!     }
//!     async fn place(self, _: Context, _order: PlaceOrder) -> PlaceReport {
//!         PlaceReport::default()
//!     }
//!     async fn load_adapter(self, _: Context, order: AdapterOrder) -> Result<(), AdapterRefusal> {
//!         Err(AdapterRefusal::Refused { reason: format!("{} does not fit", order.name) })
//!     }
//!     async fn unload_adapter(self, _: Context, name: ModelId) -> Result<(), AdapterRefusal> {
//!         Err(AdapterRefusal::Unknown(name))
//!     }
//!     async fn models(self, _: Context, _: ModelsOrder) -> ModelsReport {
//!         ModelsReport::default()
//!     }
//!     async fn prompt_progress(self, _: Context, _: BlockId, _: SequenceName) -> Option<PromptProgress> {
//!         None
//!     }
//! }
//!
//! /// Serves one connection to a coordinator.
//! async fn serve(connection: Connection) {
//!     while let Ok(incoming) = connection.accept().await {
//!         match incoming {
//!             Incoming::WorkerRpc(rpc) => drop(tokio::spawn(rpc.serve(Worker))),
//!             Incoming::Generate(mut call) => drop(tokio::spawn(async move {
//!                 let refused = GenerateFrame::Failed(GenerateError::Draining);
//!                 tokio::select! {
//!                     _ = call.reply.cancelled() => {} // and free what the sequence holds
//!                     _ = call.reply.send(&refused) => {}
//!                 }
//!             })),
//!             _ => {}
//!         }
//!     }
//! }
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), kvasir_transport::Error> {
//! let ca = Authority::new(ClusterName::new("example")?, SystemTime::now())?;
//! let identity = |role, name| ca.issue(role, NodeId::new(name)?, SystemTime::now())?.identity();
//! let any_port = "127.0.0.1:0".parse().expect("an address");
//!
//! let config = EndpointConfig::new(Epoch(1), [Role::Worker]);
//! let coordinator = Endpoint::bind(any_port, &identity(Role::Coordinator, "c0")?, config)?;
//! let config = EndpointConfig::new(Epoch(1), [Role::Worker]);
//! let worker = Arc::new(Endpoint::bind(any_port, &identity(Role::Worker, "w0")?, config)?);
//!
//! // The worker dials, and dials again whenever the connection is gone.
//! let target = coordinator.address().to_string();
//! tokio::spawn(async move {
//!     let mut dialer = Dialer::new(worker, target, Expected::any(Role::Coordinator));
//!     loop {
//!         serve(dialer.connect().await).await;
//!     }
//! });
//!
//! // The coordinator accepts, and calls.
//! let connection = coordinator.accept().await.expect("open");
//! assert_eq!(connection.peer().to_string(), "spiffe://example/worker/w0");
//! let api = connection.worker_api().await?;
//! let metrics = api.metrics_text(deadline(Duration::from_secs(5))).await;
//! assert_eq!(metrics.expect("an answer"), "kvasir_up 1\n");
//! # Ok(())
//! # }
//! ```

mod bulk;
mod close;
mod connection;
mod dialer;
mod driver;
mod encode;
mod encode_image;
mod endpoint;
mod error;
mod generate;
mod generate_call;
mod group;
mod handshake;
pub mod heartbeat;
mod hello;
mod incoming;
pub mod join;
mod kv;
mod lease;
mod local;
mod measurement;
mod operation;
mod peer_index;
mod prefixes;
mod probe;
mod pull;
mod reset;
mod revocation;
mod rpc;
mod sequence;
pub mod service;
mod shard;
mod socket;
mod stage;
mod streams;
mod tls;

pub use bulk::{BulkReceiver, BulkSender, Tensor, TensorHeader, TensorType};
pub use close::CloseCode;
pub use connection::Connection;
pub use dialer::{Backoff, Dialer};
pub use driver::Handover;
pub use encode::{EncodeCall, EncodeReplier};
pub use encode_image::{EncodeImageCall, EncodeImageReply, EncodeImageStream};
pub use endpoint::{Endpoint, EndpointStats};
pub use error::Error;
pub use generate::GenerateStream;
pub use generate_call::{GenerateCall, GenerateReply};
pub use group::{GroupReceiver, GroupSender, GroupStream};
pub use hello::{Hello, VersionRange};
pub use incoming::Incoming;
pub use kv::{KvEventReceiver, KvEventSender, KvSnapshotReply};
pub use lease::{LeaseCall, LeaseHeld, StageLease};
pub use local::EndpointConfig;
pub use measurement::receive_rate;
pub use operation::{
    OperationCall, OperationInputs, OperationReplier, OperationSender, OperationSession, OperationStream,
};
pub use peer_index::{PeerIndexCall, PeerIndexStream};
pub use pull::{PullCall, PullReply, PullStream};
pub use revocation::Revocations;
pub use rpc::{CoordinatorRpc, WorkerRpc};
pub use sequence::{SequenceBody, SequenceBytes, SequenceCall, SequenceExchange, SequenceReplier};
pub use shard::{ShardCall, ShardReply, ShardStream};
pub use stage::{
    ActivationReceiver, ActivationSender, StageBlocks, StageBlocksCall, StageCall, StageControl,
    StageOrderReceiver, StageOrders, StageReporter, StageReports,
};
pub use streams::{StreamCode, StreamKind};
