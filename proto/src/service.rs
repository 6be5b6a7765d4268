//! The two RPC services. Methods are only appended; bodies are closed enums of versions.
//!
//! Calls are made with a context that carries the deadline: `client.status(deadline(SECOND))`. Dropping a
//! call's future cancels it on the other side. A deadline of more than ten minutes is cut to that.

use crate::event::KvReplay;
use crate::ids::{Epoch, NodeId};
use crate::message::{LoadReport, Register, Registered, WorkerStatus};
use crate::placement::{PlaceOrder, PlaceReport};
use crate::shard::ShippingReport;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Why a coordinator does not accept what a worker says. In each case the worker's way back is to register
/// again, with a new epoch where the old one is fenced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The body's node id is not the certificate's.
    #[error("{claimed} is not the certified node id")]
    NotYourName { claimed: NodeId },
    /// Another life of this worker has taken over.
    #[error("epoch {} is known, this one is older", known.0)]
    StaleEpoch { known: Epoch },
    /// The lease ran out, or the coordinator has restarted.
    #[error("not registered")]
    NotRegistered,
    /// A model is served under a known name with other weights or another tokenizer.
    #[error("model {model} differs from what the cluster serves under that name")]
    ModelDiffers { model: String },
    /// Another process with the same identity is alive.
    #[error(
        "another process with this worker's identity is alive at {at}; each worker needs an identity of its own"
    )]
    AlreadyHere { at: String },
    /// The coordinator has a setting that is not the other coordinators'.
    #[error("this coordinator's {settings} is not that of the other coordinators")]
    SettingsDiffer { settings: String },
}

/// When a worker's certificate ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateReport {
    /// Seconds since 1970.
    pub ends: i64,
}

/// What a worker calls at each coordinator.
#[tarpc::service]
pub trait CoordinatorApi {
    /// Joins, or joins again after a lost lease. Required before anything else is said.
    async fn register(request: Register) -> Result<Registered, Refusal>;
    /// Reports load and progress, and renews the lease by progress.
    async fn report(report: LoadReport) -> Result<(), Refusal>;
    /// Says how far the worker is with getting its model, also before it has registered. From protocol version 4 on.
    async fn shipping(report: ShippingReport);
    /// Says when the worker's certificate ends, and again when it has another one. An older coordinator refuses it.
    async fn certificate(report: CertificateReport);
}

/// What a coordinator calls at each worker.
#[tarpc::service]
pub trait WorkerApi {
    /// The events of the present epoch from number `from` on, as far as they are still held.
    async fn kv_replay(from: u64) -> KvReplay;
    /// Takes no new work from now on. Repeating it changes nothing; progress shows in `status`.
    async fn drain();
    async fn undrain();
    async fn status() -> WorkerStatus;
    /// The worker's own metrics in the text format that Prometheus scrapes.
    async fn metrics_text() -> String;
    /// From protocol version 4 on, of a worker of the pool: what part of which replica it shall be. Repeating it
    /// changes nothing; the answer says how far it is.
    async fn place(order: PlaceOrder) -> PlaceReport;
}

/// The context of a call that must be answered within `limit`.
pub fn deadline(limit: Duration) -> tarpc::context::Context {
    let mut context = tarpc::context::current();
    context.deadline = Instant::now() + limit;
    context
}
