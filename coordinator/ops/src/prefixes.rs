//! `/admin/v1/prefixes`: pinned prefixes, which are computed in advance and protected against eviction.
//!
//! | request | does | answers |
//! |---|---|---|
//! | `GET` | lists | `{"prefixes":[P]}` |
//! | `POST` JSON `{"prompt" or "messages","ttl_s","add_special_tokens"}` | pins, at `?worker=` or at every worker that serves the model | `{"prefixes":[P]}` |
//! | `DELETE /{id}` | unpins | 204 |
//!
//! `prompt` is a text or token ids; `messages` is rendered by the model's chat template, without the beginning
//! of an answer. A pin covers the prefix's full hash units of 16 tokens. The tokens at the end of a text may
//! change when further text follows; token ids are exact. `ttl_s` is 3600 by default; 0: until unpinned. P is
//! `{"id","worker","model","tokens","expires_in_s" (null: never),"pinned_bytes","budget_bytes"}`; the budget is
//! the worker's, and a pin beyond it is refused with 409. Every request may have `?model=`, `?tenant=`,
//! `?worker=`.

use super::Ops;
use super::sequence_access::{Query, SequenceAccess};
use api::auth::Caller;
use api::error::ApiError;
use api::{limits, plan};
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::routing::{delete, get};
use axum::{Extension, Json, Router};
use proto::ids::NodeId;
use proto::sequence::{PinInfo, SequenceOperation, SequenceReply};
use serde_json::{Value, json};
use std::sync::Arc;

/// State, caller and query of a request.
type From = (State<Arc<Ops>>, Extension<Caller>, Query);

pub(super) fn router() -> Router<Arc<Ops>> {
    Router::new()
        .route("/admin/v1/prefixes", get(list).post(pin))
        .route("/admin/v1/prefixes/{id}", delete(unpin))
}

async fn list((State(ops), Extension(caller), query): From) -> Result<Json<Value>, ApiError> {
    let access = SequenceAccess::new(&ops, &caller, &query)?;
    let mut prefixes = Vec::new();
    for node in access.workers(&query, None)? {
        if let (SequenceReply::List(list), _) = access.call_worker(&node, SequenceOperation::List).await? {
            prefixes.extend(list.pins.into_iter().map(|info| pin_json(&access, &node, &info)));
        }
    }
    Ok(Json(json!({"prefixes": prefixes})))
}

/// Pins at all workers or at none: if one refuses, the others are unpinned.
async fn pin(
    (State(ops), Extension(caller), query): From,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let access = SequenceAccess::new(&ops, &caller, &query)?;
    let body = limits::read(request.into_body()).await?;
    let (model, limit) = (Arc::clone(&access.model), access.served.max_model_len);
    let tenant = query.tenant.as_deref().map_or_else(|| Arc::clone(caller.tenant()), Arc::from);
    let planned = ops.planning.run(&tenant, move || plan::prefix(&body, &model, limit));
    let plan::Prefix { tokens, ttl } = planned.await?;
    let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
    let workers = access.workers(&query, None)?;
    let calls = workers
        .iter()
        .map(|node| access.call_worker(node, SequenceOperation::Pin { tokens: tokens.clone(), ttl_ms }));
    let answers = futures::future::join_all(calls).await;
    let (mut pinned, mut refusal) = (Vec::new(), None);
    for (node, answer) in workers.iter().zip(answers) {
        match answer {
            Ok((SequenceReply::Pinned(info), _)) => pinned.push((node, info)),
            Ok(_) => refusal = Some(ApiError::Internal),
            Err(error) => refusal = Some(error),
        }
    }
    if let Some(error) = refusal {
        for (node, info) in pinned {
            // An unreachable worker unpins it when its time is up.
            let _ = access.call_worker(node, SequenceOperation::Unpin { pin: info.pin }).await;
        }
        return Err(error);
    }
    futures::future::join_all(pinned.iter().map(|(node, _)| access.catch_up(node))).await;
    let prefixes: Vec<Value> = pinned.iter().map(|(node, info)| pin_json(&access, node, info)).collect();
    Ok(Json(json!({"prefixes": prefixes})))
}

async fn unpin(
    (State(ops), Extension(caller), query): From,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    let unknown = || ApiError::Unknown { what: "this prefix".to_owned() };
    let (worker, pin) = id.rsplit_once('.').ok_or_else(unknown)?;
    let pin: u64 = pin.parse().map_err(|_| unknown())?;
    let access = SequenceAccess::new(&ops, &caller, &query)?;
    let worker = NodeId::new(worker).map_err(|_| unknown())?;
    access.call_worker(&worker, SequenceOperation::Unpin { pin }).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn pin_json(access: &SequenceAccess<'_>, node: &NodeId, info: &PinInfo) -> Value {
    json!({
        "id": format!("{node}.{}", info.pin),
        "worker": node.as_str(),
        "model": access.model.id.as_str(),
        "tokens": info.tokens,
        "expires_in_s": (info.ttl_ms > 0).then(|| info.ttl_ms.div_ceil(1000)),
        "pinned_bytes": info.pinned_bytes,
        "budget_bytes": info.budget_bytes,
    })
}
