//! The operations port of a coordinator: health, metrics, administration, dashboard.
//!
//! Read in this order:
//!
//! - this file: who may call what ([`router()`]), probes, metrics, drains
//! - `cluster`: the status of the cluster
//! - `coordinators`, `deployments`, `keys`, `nodes`, `plans`: changes that the group agrees on
//! - `sequence_access`, then `snapshots` and `prefixes`: sequences and prefixes at their workers
//! - `usage`: what tenants, keys and models used
//! - `relabel`: the workers' metrics in this coordinator's
//! - `dashboard`: the page, its data, and why a worker is busy
//!
//! Guarantees: `/admin/v1` requires an administrator: an admin key, or a caller on this machine. Only the
//! probes, the metrics and the page's files, which contain no secrets, are open to everybody. Every change and
//! every refusal is in the audit log. Probes and metrics are served without a group and without workers.
//! Must not contain: the inference API (the playground's routes are passed in), how the group agrees, planning,
//! routing.

mod cluster;
mod coordinators;
mod dashboard;
mod deployments;
mod keys;
mod nodes;
mod plans;
mod prefixes;
mod relabel;
mod sequence_access;
mod snapshots;
mod usage;

pub use dashboard::Feed;

use api::Endpoint;
use api::auth::{Caller, Keys};
use api::error::ApiError;
use api::http_ext::Peer;
use api::origin::from_elsewhere;
use api::planning_threads::PlanningThreads;
use axum::extract::{Path, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use consensus::table::{Change, Refusal};
use consensus::telemetry::RaftMetrics;
use dispatch::Dispatch;
use dispatch::metrics::Metrics;
use dispatch::models::Models;
use group::agreement::{Agreement, ChangeError};
use group::audit::{Audit, Record};
use group::deployments::Deployments;
use group::replicas::Replicas;
use model::shard::ChunkId;
use pki::Identity;
use proto::block::ClusterKey;
use proto::ids::NodeId;
use router::chain_memo::ChainMemo;
use router::table::TableError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use transport::heartbeat;
use transport::heartbeat::Heartbeat;

/// How long a scrape waits for workers.
const SCRAPE_LIMIT: Duration = Duration::from_secs(1);
/// How long the status waits for the workers' own metrics; later ones are omitted.
const STATUS_LIMIT: Duration = Duration::from_millis(300);
/// Content type of metrics.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Most characters of a path in the audit log.
const MAX_PATH: usize = 256;
/// The rest of such a path is a key's id, or by mistake the key itself.
const KEY_PATH: &str = "/admin/v1/keys/";

/// State shared by all handlers of the operations port.
#[derive(Debug)]
pub struct Ops {
    pub id: NodeId,
    pub dispatch: Arc<Dispatch>,
    /// Commits operators' changes. `None`: changes apply to this coordinator only.
    pub agreement: Option<Arc<Agreement>>,
    /// Models over several workers. `None` without a group.
    pub replicas: Option<Arc<Replicas>>,
    /// Deployed models. `None` without a group.
    pub deployments: Option<Arc<Deployments>>,
    pub models: Arc<Models>,
    /// Authenticates administrators of other machines.
    pub keys: Arc<Keys>,
    pub cluster_key: ClusterKey,
    /// Computes hash chains of prompts under the cluster key.
    pub chains: Arc<ChainMemo>,
    /// Runs the tokenizing of prefixes in the tenants' turns.
    pub planning: Arc<PlanningThreads>,
    pub metrics: Arc<Metrics>,
    /// The group's Raft metrics. `None` without a group.
    pub raft: Option<RaftMetrics>,
    /// The dashboard's feed.
    pub feed: Feed,
    /// The audit log.
    pub audit: Arc<Audit>,
    /// Whether this node may report itself ready.
    pub gate: ReadyGate,
    /// Identity whose certificates are reported.
    pub identity: Identity,
    /// Loops without which nothing is served.
    pub loops: Vec<Heartbeat>,
}

/// Whether this node may report itself ready: it is released and not stopping.
#[derive(Debug, Default)]
pub struct ReadyGate {
    released: AtomicBool,
    stopping: AtomicBool,
}

impl ReadyGate {
    /// If `held`, the gate is closed until [`release`](Self::release).
    pub fn new(held: bool) -> Self {
        Self { released: AtomicBool::new(!held), stopping: AtomicBool::new(false) }
    }

    /// Opens the gate, unless the node is stopping.
    pub fn release(&self) {
        self.released.store(true, Ordering::Relaxed);
    }

    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    fn is_open(&self) -> bool {
        self.released.load(Ordering::Relaxed) && !self.stopping.load(Ordering::Relaxed)
    }
}

/// Orchestrators' probes; served even if all connections are in use.
pub const PROBES: [&str; 3] = ["/livez", "/readyz", "/startupz"];
/// The API endpoints that the dashboard's playground calls.
pub const PLAYGROUND: [Endpoint; 2] = [Endpoint::Models, Endpoint::Chat];

/// All routes of the port. `playground`: the API's routes of [`PLAYGROUND`].
pub fn router(ops: Arc<Ops>, playground: Router<Arc<Ops>>) -> Router {
    let admin = Router::new()
        .route("/admin/v1/cluster", get(cluster))
        .route("/admin/v1/ready", post(release))
        .route("/admin/v1/workers/{id}/dead", post(dead))
        .route("/admin/v1/workers/{id}/drain", post(async |ops, id| drain(ops, id, true).await))
        .route("/admin/v1/workers/{id}/undrain", post(async |ops, id| drain(ops, id, false).await))
        .route("/admin/v1/files/{digest}/pardon", post(unblock))
        .merge(coordinators::router())
        .merge(snapshots::router())
        .merge(prefixes::router())
        .merge(dashboard::router())
        .merge(keys::router())
        .merge(nodes::router())
        .merge(plans::router())
        .merge(usage::router())
        .merge(deployments::router())
        .layer(from_fn_with_state(Arc::clone(&ops), admins_only));
    let playground = playground.layer(from_fn_with_state(Arc::clone(&ops), api_callers_only));
    Router::new()
        .route("/livez", get(livez))
        .route("/startupz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .merge(dashboard::files())
        .merge(admin)
        .merge(playground)
        .fallback(async || ApiError::NotFound)
        // The router adds the header.
        .method_not_allowed_fallback(async || ApiError::Method { allow: "" })
        .with_state(ops)
}

/// The subject of an operator's change in the audit log, if the path does not name it.
#[derive(Debug, Clone, Default)]
struct Subject(Arc<OnceLock<String>>);

impl Subject {
    fn set(&self, subject: String) {
        // The first value is kept.
        let _already = self.0.set(subject);
    }
}

/// Authenticates an administrator: a caller on this machine, or an admin key. Refuses browser requests that
/// another site initiated.
fn administrator(ops: &Ops, request: &Request) -> Result<Caller, ApiError> {
    let headers = request.headers();
    let local =
        request.extensions().get::<Peer>().is_some_and(|peer| peer.0.ip().to_canonical().is_loopback());
    if local && !from_elsewhere(headers) {
        // The key still selects the tenant whose sequences are meant.
        return Ok(ops.keys.authenticate(headers).unwrap_or_else(|_| ops.keys.local()));
    }
    if ops.keys.is_open() {
        return Err(ApiError::Forbidden);
    }
    let caller = ops.keys.authenticate(headers)?;
    if caller.admin() { Ok(caller) } else { Err(ApiError::Forbidden) }
}

/// Middleware of `/admin/v1`. Records every change and every refusal in the audit log.
async fn admins_only(State(ops): State<Arc<Ops>>, mut request: Request, next: Next) -> Response {
    let allowed = administrator(&ops, &request);
    let from = request.extensions().get::<Peer>().map(|peer| peer.0.ip().to_canonical());
    let method = request.method().clone();
    let path = request.uri().path();
    let path: String = match path.starts_with(KEY_PATH) {
        true => format!("{KEY_PATH}ID"),
        false => path.chars().take(MAX_PATH).collect(),
    };
    let subject = Subject::default();
    let (author, response) = match allowed {
        Ok(caller) => {
            let author = caller.key_id().map(|id| format!("key {id} of {}", caller.tenant()));
            request.extensions_mut().insert(caller);
            request.extensions_mut().insert(subject.clone());
            (author.unwrap_or_else(|| "local".into()), next.run(request).await)
        }
        Err(error) => ("nobody".into(), error.into_response()),
    };
    let status = response.status();
    if method != Method::GET || matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
        ops.audit.note(&Record {
            who: &author,
            from,
            what: &format!("{method} {path}"),
            on: subject.0.get().map_or("", String::as_str),
            result: status.as_str(),
        });
    }
    response
}

/// With keys, the API's own authentication decides. Without keys, the API accepts every caller of its port,
/// which is then reachable from this machine only; this port may be reachable from other machines, so the
/// caller must be an administrator.
async fn api_callers_only(State(ops): State<Arc<Ops>>, request: Request, next: Next) -> Response {
    match administrator(&ops, &request) {
        Err(error) if ops.keys.is_open() => error.into_response(),
        _ => next.run(request).await,
    }
}

/// Alive if all loops make progress.
async fn livez(State(ops): State<Arc<Ops>>) -> Response {
    let stopped = heartbeat::stopped(&ops.loops).await;
    if stopped.is_empty() {
        return "ok\n".into_response();
    }
    let why = format!("{} is stuck\n", stopped.join(" and "));
    (StatusCode::SERVICE_UNAVAILABLE, why).into_response()
}

async fn readyz(State(ops): State<Arc<Ops>>) -> Response {
    if let Some(settings) = ops.agreement.as_ref().and_then(|agreement| agreement.odd_settings()) {
        let why = format!("{settings}: differs from the other coordinators\n");
        return (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    }
    let served = ops.dispatch.can_serve(&ops.models);
    if ops.gate.is_open() && served {
        return "ok\n".into_response();
    }
    let why = if served { "held back\n" } else { "no worker is ready\n" };
    (StatusCode::SERVICE_UNAVAILABLE, why).into_response()
}

async fn scrape(State(ops): State<Arc<Ops>>) -> Response {
    let mut workers = ops.dispatch.worker_metrics(SCRAPE_LIMIT).await;
    // A worker's own text has the metrics of its instances, with the model as a label.
    workers.retain(|(node, _)| !node.is_instance());
    ops.metrics.note_node(&ops.identity);
    ops.metrics.note_differences(ops.agreement.as_ref().map_or(0, |agreement| agreement.differences().len()));
    let mut text = ops.metrics.text(&ops.dispatch.metrics_load(), &ops.models, &ops.chains, ops.keys.count());
    relabel::append(&mut text, &workers);
    text.push_str("# EOF\n");
    ([(header::CONTENT_TYPE, METRICS_TYPE)], text).into_response()
}

async fn cluster(State(ops): State<Arc<Ops>>) -> Response {
    // The workers' metrics are needed only for stages.
    let metrics = match cluster::has_stages(&ops) {
        true => ops.dispatch.worker_metrics(STATUS_LIMIT).await,
        false => Vec::new(),
    };
    Json(cluster::view(&ops, &cluster::asleep(&metrics))).into_response()
}

async fn release(State(ops): State<Arc<Ops>>) -> StatusCode {
    ops.gate.release();
    StatusCode::NO_CONTENT
}

async fn dead(State(ops): State<Arc<Ops>>, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    let node = worker_name(id)?;
    if ops.dispatch.notice_dead(&node) { Ok(StatusCode::NO_CONTENT) } else { Err(ApiError::NotFound) }
}

async fn drain(
    State(ops): State<Arc<Ops>>,
    Path(id): Path<String>,
    draining: bool,
) -> Result<StatusCode, ApiError> {
    let node = worker_name(id)?;
    let made = match &ops.agreement {
        Some(agreement) => agreement.drain(&node, draining).await.map_err(to_api_error),
        None => ops.dispatch.drain(&node, draining).await.map_err(|error| match error {
            TableError::UnknownWorker(_) => ApiError::NotFound,
            error => {
                tracing::error!(%node, %error, "a drain or its end failed");
                ApiError::Internal
            }
        }),
    };
    if made.is_ok() && !draining {
        ops.dispatch.lost_devices().unblock(&node);
    }
    count(&ops, if draining { "drain" } else { "undrain" }, &made);
    made.map(|()| StatusCode::NO_CONTENT)
}

/// Removes a model from the block list.
async fn unblock(State(ops): State<Arc<Ops>>, Path(digest): Path<String>) -> Result<StatusCode, ApiError> {
    let digest = ChunkId::from_hex(&digest);
    let ChunkId(digest) = digest.ok_or_else(|| ApiError::field("digest", "64 hexadecimal digits"))?;
    // Without a group, no model is placed.
    let agreement = ops.agreement.as_ref().ok_or(ApiError::NotFound)?;
    let made = agreement.plan(Change::ModelUnblocked(digest)).await.map_err(to_api_error);
    count(&ops, "pardon", &made);
    made.map(|()| StatusCode::NO_CONTENT)
}

/// The response to a change that the group did not make. Not a `From`: both types are of other crates.
fn to_api_error(error: ChangeError) -> ApiError {
    match error {
        ChangeError::NoQuorum => ApiError::NoQuorum,
        ChangeError::Refused(Refusal::Unknown(_)) => ApiError::NotFound,
        ChangeError::Refused(refusal) => ApiError::Refused { why: refusal.to_string() },
        ChangeError::Explained(why) => ApiError::Refused { why },
    }
}

/// Counts the outcome of an operator's change.
fn count<T>(ops: &Ops, operation: &'static str, made: &Result<T, ApiError>) {
    let outcome = match made {
        Ok(_) => "made",
        Err(ApiError::NoQuorum) => "no_quorum",
        Err(_) => "refused",
    };
    ops.metrics.changed(operation, outcome);
}

fn worker_name(id: String) -> Result<NodeId, ApiError> {
    NodeId::new(id).map_err(|error| ApiError::field("id", error.rule))
}

#[cfg(test)]
mod tests;
