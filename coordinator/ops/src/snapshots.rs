//! `/admin/v1/snapshots`: sequences, named by the request that made them (`x-request-id`), and their
//! snapshots.
//!
//! | request | does | answers |
//! |---|---|---|
//! | `GET` | lists | `{"sequences":[S],"snapshots":[K]}` |
//! | `POST` JSON `{"id","medium"}` | saves at the worker, in `memory` (default) or on `disk` | K |
//! | `POST` `application/octet-stream` | restores a snapshot's bytes, as `?id=` or a new name, at `?worker=` or the worker with the least load | S |
//! | `GET /{id}` | a snapshot's bytes: the saved one of this name, or else a new one | bytes |
//! | `POST /{id}/restore` JSON `{"as"}` | restores a saved snapshot, under its own name or another; if `?worker=` is another worker than its holder, its bytes move there | S |
//! | `POST /{id}/fork` JSON `{"as"}` | forks the sequence | S |
//! | `POST /{id}/reset` JSON `{"keep"}` | truncates the sequence to its first `keep` tokens | S |
//! | `DELETE /{id}` | deletes the sequence and the snapshot of this name | 204 |
//!
//! S is `{"id","choice","worker","model","tokens","cached","live"}`. K is
//! `{"id","choice","worker","model","bytes","medium"}`. Every request may have `?model=`, `?tenant=` and, where
//! a sequence is named, `?choice=` (default 0) and `?worker=`. An unknown name is 404; an operation refused
//! because of the current state is 409.

use super::Ops;
use super::sequence_access::{OPERATION_LIMIT, Query, SequenceAccess, answer, named};
use api::auth::Caller;
use api::error::ApiError;
use api::fields::Fields;
use api::limits::{self, BODY_IDLE, WRITE_STALL};
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use dispatch::random::random_u64;
use http_body_util::BodyExt;
use proto::ids::NodeId;
use proto::sequence::{
    SaveMedium, SequenceInfo, SequenceName, SequenceOperation, SequenceReply, SnapshotInfo,
};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::time::timeout;
use transport::SequenceBytes;

/// State, caller and query of a request.
type From = (State<Arc<Ops>>, Extension<Caller>, Query);

pub(super) fn router() -> Router<Arc<Ops>> {
    Router::new()
        .route("/admin/v1/snapshots", get(list).post(save_or_upload))
        .route("/admin/v1/snapshots/{id}", get(fetch).delete(drop_all))
        .route("/admin/v1/snapshots/{id}/restore", post(restore))
        .route("/admin/v1/snapshots/{id}/fork", post(fork))
        .route("/admin/v1/snapshots/{id}/reset", post(reset))
}

async fn list((State(ops), Extension(caller), query): From) -> Result<Json<Value>, ApiError> {
    let access = SequenceAccess::new(&ops, &caller, &query)?;
    let (mut sequences, mut snapshots) = (Vec::new(), Vec::new());
    for node in access.workers(&query, None)? {
        if let (SequenceReply::List(list), _) = access.call_worker(&node, SequenceOperation::List).await? {
            sequences.extend(list.sequences.into_iter().map(|info| sequence_json(&access, &node, &info)));
            snapshots.extend(list.snapshots.into_iter().map(|info| snapshot_json(&access, &node, &info)));
        }
    }
    Ok(Json(json!({"sequences": sequences, "snapshots": snapshots})))
}

async fn save_or_upload(from: From, request: Request) -> Result<Json<Value>, ApiError> {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    match kind {
        Some("application/octet-stream") => upload(from, request).await,
        _ => save(from, request).await,
    }
}

async fn save(
    (State(ops), Extension(caller), query): From,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let access = SequenceAccess::new(&ops, &caller, &query)?;
    let body = limits::read(request.into_body()).await?;
    let fields = Fields::parse(&body, &["id", "medium"])?;
    let id: String = fields.get("id")?.ok_or_else(|| ApiError::field("id", "is missing"))?;
    let sequence = named(id, &query)?;
    let medium: Option<SaveMedium> = fields.get("medium")?;
    let medium = medium.unwrap_or(SaveMedium::Memory);
    let operation = SequenceOperation::Save { sequence: sequence.clone(), medium };
    match access.call_holder(&query, &sequence, &operation).await? {
        (node, SequenceReply::Saved(info), _) => Ok(Json(snapshot_json(&access, &node, &info))),
        _ => Err(ApiError::Internal),
    }
}

/// Forwards the bytes as they arrive: a snapshot may be much longer than any other body.
async fn upload(
    (State(ops), Extension(caller), query): From,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let access = SequenceAccess::new(&ops, &caller, &query)?;
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    let bytes: u64 = length
        .and_then(|length| length.parse().ok())
        .ok_or_else(|| ApiError::field("content-length", "is required with a snapshot"))?;
    let name = new_name(query.id.clone(), &query)?;
    let workers = access.workers(&query, None)?;
    let node = workers.first().ok_or(ApiError::NoWorker)?;
    let operation = SequenceOperation::Upload { name: name.clone(), bytes };
    let mut exchange = access.open(node, operation).await?;
    let mut body = request.into_body();
    loop {
        let frame = timeout(BODY_IDLE, body.frame()).await.map_err(|_| ApiError::BodyTimeout)?;
        let Some(frame) = frame else { break };
        let frame = frame.map_err(|_| ApiError::field("body", "cut off or malformed"))?;
        let Ok(data) = frame.into_data() else { continue };
        let sent = timeout(WRITE_STALL, exchange.send(&data)).await;
        if sent.map_err(|_| ApiError::WorkerLost)?.is_err() {
            // The worker stopped reading; its reply has the reason.
            break;
        }
    }
    let answered = timeout(OPERATION_LIMIT, answer(exchange)).await;
    restored(&access, node, answered.unwrap_or(Err(ApiError::DeadlineExceeded))?.0).await
}

async fn fetch(
    (State(ops), Extension(caller), query): From,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let access = SequenceAccess::new(&ops, &caller, &query)?;
    let sequence = named(id, &query)?;
    let operation = SequenceOperation::Fetch { sequence: sequence.clone() };
    let (node, reply, bytes) = access.call_holder(&query, &sequence, &operation).await?;
    let SequenceReply::Bytes(length) = reply else { return Err(ApiError::Internal) };
    let pieces = futures::stream::try_unfold(bytes, async |mut bytes: SequenceBytes| {
        let piece = timeout(BODY_IDLE, bytes.next()).await.map_err(std::io::Error::other)?;
        let piece = piece.map_err(std::io::Error::other)?;
        Ok::<_, std::io::Error>(piece.map(|piece| (piece, bytes)))
    });
    let mut response = Body::from_stream(pieces).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_LENGTH, length.into());
    if let Ok(node) = HeaderValue::from_str(node.as_str()) {
        headers.insert("x-kvasir-worker", node);
    }
    Ok(response)
}

/// Restores at the snapshot's holder, or at the worker that the query names, by forwarding the bytes.
async fn restore(
    (State(ops), Extension(caller), query): From,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let access = SequenceAccess::new(&ops, &caller, &query)?;
    let body = body_or_empty(request).await?;
    let snapshot = named(id, &query)?;
    let name = match Fields::parse(&body, &["as"])?.get::<String>("as")? {
        Some(id) => named(id, &Query::default())?,
        None => snapshot.clone(),
    };
    // Here `worker` is the destination, not the holder.
    let anywhere = Query { worker: None, ..query.clone() };
    let operation = SequenceOperation::Restore { snapshot: snapshot.clone(), name: name.clone() };
    if query.worker.is_none() {
        let (node, reply, _) = access.call_holder(&anywhere, &snapshot, &operation).await?;
        return restored(&access, &node, reply).await;
    }
    let workers = access.workers(&query, None)?;
    let target = workers.first().ok_or(ApiError::NoWorker)?;
    match access.call_worker(target, operation).await {
        Ok((reply, _)) => return restored(&access, target, reply).await,
        Err(ApiError::Unknown { .. }) => {}
        Err(error) => return Err(error),
    }
    let operation = SequenceOperation::Fetch { sequence: snapshot.clone() };
    let (_, reply, mut pieces) = access.call_holder(&anywhere, &snapshot, &operation).await?;
    let SequenceReply::Bytes(bytes) = reply else { return Err(ApiError::Internal) };
    let moved = async {
        let mut exchange = access.open(target, SequenceOperation::Upload { name, bytes }).await?;
        while let Some(piece) = pieces.next().await.map_err(|_| ApiError::WorkerLost)? {
            if exchange.send(&piece).await.is_err() {
                break;
            }
        }
        answer(exchange).await
    };
    let answered = timeout(OPERATION_LIMIT, moved).await.unwrap_or(Err(ApiError::DeadlineExceeded))?;
    restored(&access, target, answered.0).await
}

async fn fork(
    (State(ops), Extension(caller), query): From,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let access = SequenceAccess::new(&ops, &caller, &query)?;
    let body = body_or_empty(request).await?;
    let sequence = named(id, &query)?;
    let name = new_name(Fields::parse(&body, &["as"])?.get("as")?, &Query::default())?;
    let operation = SequenceOperation::Fork { sequence: sequence.clone(), name };
    let (node, reply, _) = access.call_holder(&query, &sequence, &operation).await?;
    restored(&access, &node, reply).await
}

async fn reset(
    (State(ops), Extension(caller), query): From,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let access = SequenceAccess::new(&ops, &caller, &query)?;
    let body = limits::read(request.into_body()).await?;
    let tokens = Fields::parse(&body, &["keep"])?.get("keep")?;
    let tokens = tokens.ok_or_else(|| ApiError::field("keep", "is missing"))?;
    let sequence = named(id, &query)?;
    let operation = SequenceOperation::Reset { sequence: sequence.clone(), keep: tokens };
    let (node, reply, _) = access.call_holder(&query, &sequence, &operation).await?;
    restored(&access, &node, reply).await
}

async fn drop_all(
    (State(ops), Extension(caller), query): From,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    let access = SequenceAccess::new(&ops, &caller, &query)?;
    let sequence = named(id, &query)?;
    access.call_holder(&query, &sequence, &SequenceOperation::Drop { sequence: sequence.clone() }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Responds with a new or changed sequence. Later requests for it are routed to its worker.
async fn restored(
    access: &SequenceAccess<'_>,
    node: &NodeId,
    reply: SequenceReply,
) -> Result<Json<Value>, ApiError> {
    let SequenceReply::Sequence(info) = reply else { return Err(ApiError::Internal) };
    access.catch_up(node).await;
    let json = sequence_json(access, node, &info);
    access.note(info.name, node);
    Ok(Json(json))
}

/// The requested name, or a new one.
fn new_name(id: Option<String>, query: &Query) -> Result<SequenceName, ApiError> {
    named(id.unwrap_or_else(|| format!("{:016x}{:016x}", random_u64(), random_u64())), query)
}

/// The body; `{}` if it is empty.
async fn body_or_empty(request: Request) -> Result<bytes::Bytes, ApiError> {
    let body = limits::read(request.into_body()).await?;
    Ok(if body.is_empty() { bytes::Bytes::from_static(b"{}") } else { body })
}

fn sequence_json(access: &SequenceAccess<'_>, node: &NodeId, info: &SequenceInfo) -> Value {
    json!({
        "id": info.name.request.as_str(),
        "choice": info.name.choice,
        "worker": node.as_str(),
        "model": access.model.id.as_str(),
        "tokens": info.tokens,
        "cached": info.cached,
        "live": info.live,
    })
}

fn snapshot_json(access: &SequenceAccess<'_>, node: &NodeId, info: &SnapshotInfo) -> Value {
    json!({
        "id": info.name.request.as_str(),
        "choice": info.name.choice,
        "worker": node.as_str(),
        "model": access.model.id.as_str(),
        "bytes": info.bytes,
        "medium": info.medium.name(),
    })
}
