//! OpenAI's Batch API. A batch belongs to its tenant and runs at the coordinator that took it, in the fleet's idle time
//! ([`batch_runner`](crate::batch_runner)).

use super::AppState;
use super::auth::Caller;
use super::endpoint::Endpoint;
use super::error::ApiError;
use super::fields::Fields;
use super::limits;
use super::uploads::{KEEP_S, after_unknown, blocking, id, listed, page_limit, query, tenant};
use axum::Json;
use axum::extract::Request;
use axum::http::Method;
use axum::response::{IntoResponse, Response};
use files::{BatchRecord, NewBatch, Order, Page, Paging, Store};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Longest body that creates a batch, in bytes.
const MAX_BATCH_BODY: usize = 64 << 10;
/// Other requests arrive if there was one within this time.
const OTHERS_WITHIN: Duration = Duration::from_secs(10);
const MAX_PAGE: u64 = 100;
const DEFAULT_PAGE: u64 = 20;
/// Bounds of `metadata`: its pairs, and the characters of a key and of a value.
const MAX_METADATA: (usize, usize, usize) = (16, 64, 512);
const FIELDS: [&str; 5] =
    ["input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"];

/// The APIs that lines of a batch are for.
pub(super) const ENDPOINTS: [Endpoint; 4] =
    [Endpoint::Chat, Endpoint::Completions, Endpoint::Embeddings, Endpoint::Responses];

/// The files and batches of a coordinator, and the signal to its runner.
#[derive(Debug)]
pub struct Batches {
    store: Arc<Store>,
    changed: Notify,
    /// The last arrival of a request that is not a line of a batch.
    last_other: Mutex<Option<Instant>>,
}

impl Batches {
    pub fn new(store: Arc<Store>) -> Self {
        Self { store, changed: Notify::new(), last_other: Mutex::new(None) }
    }

    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// A request arrived that is not a line of a batch.
    pub(super) fn other_arrived(&self, now: Instant) {
        *self.last_other.lock() = Some(now);
    }

    /// Whether other requests than lines of batches arrive.
    pub(super) fn others_arrive(&self, now: Instant) -> bool {
        self.last_other.lock().is_some_and(|last| now.saturating_duration_since(last) < OTHERS_WITHIN)
    }

    /// Completes when a batch was created or cancelled.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }
}

/// Serves `GET /v1/batches` and `POST /v1/batches`.
pub(super) async fn list_or_create(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    if request.method() == Method::POST {
        return create(state, request).await;
    }
    let tenant = tenant(&request)?;
    let ListQuery { after, limit } = query(request.uri())?;
    let limit = page_limit(limit.as_deref(), DEFAULT_PAGE, MAX_PAGE)?;
    let paging = Paging { after, limit, order: Order::Descending };
    let Page { items, has_more } = state.batches.store.batches(&tenant, &paging).map_err(after_unknown)?;
    Ok(Json(listed(Page { items: items.iter().map(object).collect(), has_more })).into_response())
}

#[derive(Debug, Default, Deserialize)]
struct ListQuery {
    after: Option<String>,
    limit: Option<String>,
}

/// Serves `GET /v1/batches/{batch}`.
pub(super) async fn retrieve(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    let (tenant, id) = (tenant(&request)?, id(&request));
    Ok(Json(object(&state.batches.store.batch(&tenant, &id)?)).into_response())
}

/// Serves `POST /v1/batches/{batch}/cancel`.
pub(super) async fn cancel(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    let (tenant, id, app) = (tenant(&request)?, id(&request), Arc::clone(&state));
    let batch = blocking(move || app.batches.store.cancel(&tenant, &id)).await?;
    state.batches.changed.notify_one();
    Ok(Json(object(&batch)).into_response())
}

async fn create(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    // `serve` inserted it.
    let caller = request.extensions().get::<Caller>().cloned().ok_or(ApiError::InvalidApiKey)?;
    let _permit = caller.enter(Instant::now()).inspect_err(|error| error.count_limit(&state.metrics))?;
    let body = limits::read_within(request.into_body(), MAX_BATCH_BODY).await?;
    let new = new_batch(&body, caller.key_id())?;
    let (tenant, app) = (Arc::clone(caller.tenant()), Arc::clone(&state));
    let batch = blocking(move || app.batches.store.create_batch(&tenant, new)).await?;
    state.batches.changed.notify_one();
    Ok(Json(object(&batch)).into_response())
}

fn new_batch(body: &[u8], key: Option<&str>) -> Result<NewBatch, ApiError> {
    let fields = Fields::parse(body, &FIELDS)?;
    let missing = |name, what| ApiError::field(name, format!("is missing: {what}"));
    let input_file_id: Option<String> = fields.get("input_file_id")?;
    let input_file_id = input_file_id
        .ok_or_else(|| missing("input_file_id", "the id of a file with the purpose batch".to_owned()))?;
    let paths = || ENDPOINTS.map(Endpoint::path).join(", ");
    let endpoint: Option<String> = fields.get("endpoint")?;
    let endpoint = endpoint.ok_or_else(|| missing("endpoint", format!("one of {}", paths())))?;
    if !ENDPOINTS.iter().any(|known| known.path() == endpoint) {
        let shown: String = endpoint.chars().take(64).collect();
        return Err(ApiError::field("endpoint", format!("{shown:?} is none of {}", paths())));
    }
    let window: Option<String> = fields.get("completion_window")?;
    match window.as_deref() {
        Some("24h") => {}
        Some(other) => {
            let shown: String = other.chars().take(64).collect();
            return Err(ApiError::field("completion_window", format!("{shown:?} is not 24h")));
        }
        None => return Err(missing("completion_window", "24h".to_owned())),
    }
    let metadata = fields.get("metadata")?.map(checked_metadata).transpose()?;
    let keep_output_s = fields.get("output_expires_after")?.map(keep_output).transpose()?;
    Ok(NewBatch { key: key.map(str::to_owned), endpoint, input_file_id, metadata, keep_output_s })
}

fn checked_metadata(pairs: Map<String, Value>) -> Result<Map<String, Value>, ApiError> {
    let wrong = |reason: String| Err(ApiError::field("metadata", reason));
    let (most, key_limit, value_limit) = MAX_METADATA;
    if pairs.len() > most {
        return wrong(format!("has {} pairs, the limit is {most}", pairs.len()));
    }
    for (key, value) in &pairs {
        let characters = key.chars().count();
        if characters > key_limit {
            return wrong(format!("a key has {characters} characters, the limit is {key_limit}"));
        }
        match value.as_str().map(|text| text.chars().count()) {
            Some(characters) if characters > value_limit => {
                return wrong(format!("{key:?} has {characters} characters, the limit is {value_limit}"));
            }
            Some(_) => {}
            None => return wrong(format!("{key:?} is not a text")),
        }
    }
    Ok(pairs)
}

#[derive(Debug, Deserialize)]
struct ExpiresAfter {
    anchor: String,
    seconds: u64,
}

fn keep_output(ExpiresAfter { anchor, seconds }: ExpiresAfter) -> Result<u64, ApiError> {
    let wrong = |reason| Err(ApiError::field("output_expires_after", reason));
    if anchor != "created_at" {
        return wrong(format!(
            "the anchor {:?} is not created_at",
            anchor.chars().take(64).collect::<String>()
        ));
    }
    if !KEEP_S.contains(&seconds) {
        return wrong(format!("{seconds} seconds are not from {} to {}", KEEP_S.start(), KEEP_S.end()));
    }
    Ok(seconds)
}

/// A batch in OpenAI's form.
fn object(batch: &BatchRecord) -> Value {
    let fault = |error: &files::LineError| {
        let files::LineError { code, message, param, line } = error;
        json!({"code": code, "message": message, "param": param, "line": line})
    };
    let errors = (!batch.errors.is_empty())
        .then(|| json!({"object": "list", "data": batch.errors.iter().map(fault).collect::<Vec<_>>()}));
    // The files exist once the batch has ended.
    let result = |id: &Option<String>| id.clone().filter(|_| batch.status.is_final());
    json!({
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status.name(),
        "output_file_id": result(&batch.output_file_id),
        "error_file_id": result(&batch.error_file_id),
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "completed_at": batch.completed_at,
        "failed_at": batch.failed_at,
        "expired_at": batch.expired_at,
        "cancelling_at": batch.cancelling_at,
        "cancelled_at": batch.cancelled_at,
        "request_counts": {
            "total": batch.counts.total,
            "completed": batch.counts.completed,
            "failed": batch.counts.failed,
        },
        "metadata": batch.metadata,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_read_or_its_field_refused() {
        let good = json!({
            "input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h",
            "metadata": {"a": "b"}, "output_expires_after": {"anchor": "created_at", "seconds": 3600},
        });
        let read = |body: &Value| new_batch(body.to_string().as_bytes(), Some("k"));
        let batch = read(&good).unwrap();
        assert_eq!((batch.endpoint.as_str(), batch.keep_output_s), ("/v1/chat/completions", Some(3600)));
        assert_eq!((batch.key.as_deref(), batch.metadata.unwrap().len()), (Some("k"), 1));
        let refused = |field: &str, value: Value| {
            let mut body = good.clone();
            body[field] = value;
            let error = read(&body).unwrap_err();
            assert_eq!((error.param(), error.status().as_u16()), (Some(field), 400), "{error}");
        };
        for field in ["input_file_id", "endpoint", "completion_window"] {
            refused(field, Value::Null);
            refused(field, json!(1));
        }
        assert_eq!(new_batch(b"{}", None).unwrap_err().param(), Some("input_file_id"));
        refused("endpoint", json!("/v1/messages"));
        refused("completion_window", json!("1h"));
        refused("metadata", json!({"a": 1}));
        refused("metadata", json!({"a": "x".repeat(513)}));
        refused("metadata", json!({"x".repeat(65): "a"}));
        refused("metadata", (0..17).map(|n| (n.to_string(), json!("x"))).collect::<Map<_, _>>().into());
        refused("output_expires_after", json!({"anchor": "now", "seconds": 3600}));
        refused("output_expires_after", json!({"anchor": "created_at", "seconds": 3599}));
        refused("output_expires_after", json!({"anchor": "created_at"}));
    }
}
