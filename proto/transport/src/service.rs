//! The two RPC services. Methods are only appended; bodies are closed enums of versions.
//!
//! A call takes a context with its deadline: `client.status(deadline(SECOND))`. Dropping a call's future
//! cancels the call on the other side. Deadlines are cut to at most ten minutes.

use proto::adapter::{AdapterOrder, AdapterRefusal, AdapterReport};
use proto::block::BlockId;
use proto::deployment::{HostReport, ModelsOrder, ModelsReport};
use proto::event::KvReplay;
use proto::ids::ModelId;
use proto::message::image_encoder::EncoderReport;
use proto::placement::{PlaceOrder, PlaceReport};
use proto::sequence::{PromptProgress, SequenceName};
use proto::shard::ShippingReport;
use proto::usage::UsageReport;
use proto::worker::{CertificateReport, LoadReport, Refusal, Register, Registered, WorkerStatus};
use std::time::{Duration, Instant};

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
    /// Reports all adapters of the worker, after the registration and whenever they change. An older coordinator
    /// refuses the call.
    async fn adapters(report: AdapterReport) -> Result<(), Refusal>;
    /// Reports that the worker loads models by order, after the registration and whenever the values change. An older
    /// coordinator refuses the call.
    async fn host(report: HostReport) -> Result<(), Refusal>;
    /// Reports what ended requests have used, repeated until the coordinator replies. An older coordinator refuses the
    /// call.
    async fn usage(report: UsageReport);
    /// Reports that the worker encodes images for other workers, after the registration. An older coordinator refuses
    /// the call.
    async fn encoder(report: EncoderReport);
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
    /// Loads an adapter. Idempotent. An older worker refuses the call.
    async fn load_adapter(order: AdapterOrder) -> Result<(), AdapterRefusal>;
    /// Unloads an adapter. Requests that use it end normally.
    async fn unload_adapter(name: ModelId) -> Result<(), AdapterRefusal>;
    /// States the models that the worker should hold. Idempotent; the reply reports the progress. Called only at a
    /// worker that has called [`CoordinatorApi::host`].
    async fn models(order: ModelsOrder) -> ModelsReport;
    /// Returns how much of the prompt of a running sequence under `root` is computed; `None` if there is none, or if
    /// its engine does not tell. An older worker refuses the call.
    async fn prompt_progress(root: BlockId, name: SequenceName) -> Option<PromptProgress>;
}

/// Returns the context of a call that must be answered within `limit`.
pub fn deadline(limit: Duration) -> tarpc::context::Context {
    let mut context = tarpc::context::current();
    context.deadline = Instant::now() + limit;
    context
}
