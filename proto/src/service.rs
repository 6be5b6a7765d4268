//! The two RPC services. Methods are only appended; bodies are closed enums of versions.
//!
//! A call takes a context with its deadline: `client.status(deadline(SECOND))`. Dropping a call's future
//! cancels the call on the other side. Deadlines are cut to at most ten minutes.

use crate::event::KvReplay;
use crate::ids::{Epoch, NodeId};
use crate::message::{LoadReport, Register, Registered, WorkerStatus};
use crate::placement::{PlaceOrder, PlaceReport};
use crate::shard::ShippingReport;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Reason why a coordinator refuses a worker's call. In each case the worker must register again, with a
/// new epoch if the old one is fenced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The node id in the body is not the one of the certificate.
    #[error("node id {claimed} is not the one in the certificate")]
    NotYourName { claimed: NodeId },
    /// A later epoch of this worker is registered.
    #[error("the epoch is older than epoch {}, which is known", known.0)]
    StaleEpoch { known: Epoch },
    /// The lease has expired, or the coordinator has restarted.
    #[error("not registered")]
    NotRegistered,
    /// The cluster serves other weights or another tokenizer under the name of one of the worker's models.
    #[error("model {model} differs from the cluster's model of that name")]
    ModelDiffers { model: String },
    /// Another process with the same identity is alive.
    #[error(
        "another process with this worker's identity is alive at {at}; each worker needs an identity of its own"
    )]
    AlreadyHere { at: String },
    /// A setting of this coordinator differs from that of the other coordinators.
    #[error("this coordinator's {settings} differs from the other coordinators")]
    SettingsDiffer { settings: String },
}

/// Expiry of a worker's certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateReport {
    /// Seconds since 1970.
    pub ends: i64,
}

/// Calls of a worker to each coordinator.
#[tarpc::service]
pub trait CoordinatorApi {
    /// Registers the worker, also again after a lost lease. Required before other calls.
    async fn register(request: Register) -> Result<Registered, Refusal>;
    /// Reports load and progress. Progress renews the lease.
    async fn report(report: LoadReport) -> Result<(), Refusal>;
    /// Reports the progress of the model download, also before registration. From protocol version 4 on.
    async fn shipping(report: ShippingReport);
    /// Reports when the worker's certificate expires; repeated after each renewal. An older coordinator
    /// refuses the call.
    async fn certificate(report: CertificateReport);
}

/// Calls of a coordinator to each worker.
#[tarpc::service]
pub trait WorkerApi {
    /// Returns the events of the present epoch from number `from` on, if they are still held.
    async fn kv_replay(from: u64) -> KvReplay;
    /// Stops accepting new work. Idempotent; `status` shows the progress.
    async fn drain();
    async fn undrain();
    async fn status() -> WorkerStatus;
    /// Returns the worker's own metrics in Prometheus text format.
    async fn metrics_text() -> String;
    /// Assigns a pool worker its stage of a replica. Idempotent; the reply reports the progress. From
    /// protocol version 4 on.
    async fn place(order: PlaceOrder) -> PlaceReport;
}

/// Returns the context of a call that must be answered within `limit`.
pub fn deadline(limit: Duration) -> tarpc::context::Context {
    let mut context = tarpc::context::current();
    context.deadline = Instant::now() + limit;
    context
}
