//! `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, as vLLM has them: for administrators.
//!
//! An adapter is loaded by all workers of its model that are connected, each from its own file system. A worker that
//! joins later loads it too, as long as another worker has it.

use super::AppState;
use super::auth::Caller;
use super::error::ApiError;
use super::fields::Fields;
use super::http_ext::Peer;
use super::limits;
use super::origin::from_another_site;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use dispatch::AdapterOutcome;
use proto::adapter::{AdapterOrder, AdapterRefusal, MAX_ADAPTER_PATH};
use proto::ids::ModelId;
use std::fmt::{Debug, Write};
use std::net::IpAddr;
use std::sync::Arc;

/// The audit log, as this port writes to it.
pub trait AuditLog: Debug + Send + Sync {
    /// Records who did `what` to what, and the HTTP status that resulted.
    fn note(&self, who: &str, from: Option<IpAddr>, what: &str, on: &str, result: &str);
}

/// The operation of a request on an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Load,
    Unload,
}

const LOAD_FIELDS: [&str; 4] = ["load_inplace", "lora_name", "lora_path", "model"];
const UNLOAD_FIELDS: [&str; 2] = ["lora_int_id", "lora_name"];

/// Serves a request of an administrator: a caller with an admin key, or any caller that is no page of
/// another site if there are no keys.
pub(super) async fn call(
    state: Arc<AppState>,
    change: Change,
    request: Request,
) -> Result<Response, ApiError> {
    // `serve` inserted it.
    let caller = request.extensions().get::<Caller>().cloned().ok_or(ApiError::InvalidApiKey)?;
    let from = request.extensions().get::<Peer>().map(|peer| peer.0.ip().to_canonical());
    let what = match change {
        Change::Load => "POST /v1/load_lora_adapter",
        Change::Unload => "POST /v1/unload_lora_adapter",
    };
    let mut on = String::new();
    let allowed = caller.admin() || state.keys.is_open() && !from_another_site(request.headers());
    let done = match (allowed, change) {
        (false, _) => Err(ApiError::Forbidden),
        (true, Change::Load) => load(&state, request, &mut on).await,
        (true, Change::Unload) => unload(&state, request, &mut on).await,
    };
    let response = done.map(IntoResponse::into_response);
    let status = response.as_ref().map_or_else(ApiError::status, Response::status);
    let who = caller.key_id().map(|id| format!("key {id} of {}", caller.tenant()));
    state.audit.note(&who.unwrap_or_else(|| "nobody".to_owned()), from, what, &on, status.as_str());
    response
}

async fn load(state: &AppState, request: Request, on: &mut String) -> Result<String, ApiError> {
    let body = limits::read(request.into_body()).await?;
    let fields = Fields::parse(&body, &LOAD_FIELDS)?;
    let name = name(&fields)?;
    name.as_str().clone_into(on);
    let path: String = fields.get("lora_path")?.ok_or_else(|| ApiError::field("lora_path", "is missing"))?;
    if path.len() > MAX_ADAPTER_PATH || !path.starts_with('/') {
        let reason =
            format!("must be an absolute path of at most {MAX_ADAPTER_PATH} bytes on the workers' hosts");
        return Err(ApiError::field("lora_path", reason));
    }
    if fields.get::<bool>("load_inplace")?.unwrap_or(false) {
        return Err(ApiError::field("load_inplace", "is true: unload the adapter of this name first"));
    }
    if state.models.get(name.as_str()).is_some() {
        return Err(ApiError::field("lora_name", format!("{name} is the name of a model")));
    }
    let model: Option<String> = fields.get("model")?;
    let parent = match &model {
        Some(model) => state.models.get(model).ok_or_else(|| ApiError::ModelNotFound(model.clone()))?,
        None => state.models.only().ok_or_else(|| {
            ApiError::field("model", "is missing: several models are served, and an adapter belongs to one")
        })?,
    };
    let order = AdapterOrder { name: name.clone(), parent: parent.id.clone(), path };
    let outcomes = state.dispatch.load_adapter(&order).await;
    if outcomes.is_empty() {
        return Err(ApiError::NoWorker);
    }
    all(&outcomes, "loaded")?;
    Ok(format!("Success: LoRA adapter '{name}' added successfully."))
}

async fn unload(state: &AppState, request: Request, on: &mut String) -> Result<String, ApiError> {
    let body = limits::read(request.into_body()).await?;
    let fields = Fields::parse(&body, &UNLOAD_FIELDS)?;
    let name = name(&fields)?;
    name.as_str().clone_into(on);
    let mut outcomes = state.dispatch.unload_adapter(&name).await;
    if outcomes.is_empty() {
        return Err(ApiError::ModelNotFound(name.to_string()));
    }
    // A worker that does not have it any more is as good as one that unloads it.
    for (_, outcome) in &mut outcomes {
        if matches!(outcome, Err(AdapterRefusal::Unknown(_))) {
            *outcome = Ok(());
        }
    }
    all(&outcomes, "unloaded")?;
    Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
}

fn name(fields: &Fields<'_>) -> Result<ModelId, ApiError> {
    let name: String = fields.get("lora_name")?.ok_or_else(|| ApiError::field("lora_name", "is missing"))?;
    ModelId::new(name).map_err(|error| ApiError::field("lora_name", format!("must have {}", error.rule)))
}

/// Fails if a worker did not follow the order; names these and the others.
fn all(outcomes: &[AdapterOutcome], done: &str) -> Result<(), ApiError> {
    let mut why = String::new();
    for (node, outcome) in outcomes {
        if let Err(error) = outcome {
            let _ = write!(why, "{}{node}: {error}", if why.is_empty() { "" } else { "; " });
        }
    }
    if why.is_empty() {
        return Ok(());
    }
    let others: Vec<&str> =
        outcomes.iter().filter(|(_, outcome)| outcome.is_ok()).map(|(node, _)| node.as_str()).collect();
    if !others.is_empty() {
        let _ = write!(why, "; {done} at {}", others.join(", "));
    }
    Err(ApiError::Refused { why })
}
