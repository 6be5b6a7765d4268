//! Responses that are kept for their tenant: a request continues one by its id, and they are read and deleted.

use crate::AppState;
use crate::admitted::AdmittedRequest;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::uploads::{blocking, id, listed, page_limit, query, tenant};
use axum::Json;
use axum::extract::Request;
use axum::http::{Method, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use files::{FilesError, Page, Store};
use memchr::memmem;
use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};
use std::sync::Arc;

const PREVIOUS: &str = "previous_response_id";
const FIELDS: [&str; 3] = ["input", "store", PREVIOUS];
/// Longest body that is parsed by a thread that serves connections, in bytes.
const SHORT_BODY: usize = 64 << 10;
const MAX_PAGE: u64 = 100;
const DEFAULT_PAGE: u64 = 20;

/// Keeps the response of a request.
#[derive(Debug)]
pub(crate) struct Keep {
    store: Arc<Store>,
    tenant: Arc<str>,
    /// All items that lead to the response.
    input: Vec<Box<RawValue>>,
}

impl Keep {
    /// Keeps the response. It can be read at once, and is written to the disk beside the answer.
    pub(super) fn keep(self, id: &str, response: &Value) {
        let Ok(raw) = to_raw_value(response) else { return };
        let Self { store, tenant, input } = self;
        store.responses().keep(&tenant, id, raw, input);
        let id = id.to_owned();
        let write = move || {
            if let Err(error) = store.responses().write(&tenant, &id) {
                tracing::warn!(%error, "a response is kept in memory alone");
            }
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(write)),
            Err(_) => write(),
        }
    }
}

/// Puts the items of the response that the request continues before its input. Returns the new body, of at most
/// `max_bytes`, and what keeps the response, unless the request has `store: false` or is a line of a batch. Of a
/// malformed body nothing is kept: planning refuses it.
pub(crate) async fn continued(
    state: &AppState,
    admitted: &AdmittedRequest,
    body: Bytes,
    max_bytes: usize,
) -> Result<(Bytes, Option<Keep>), ApiError> {
    let (store, tenant) = (Arc::clone(state.batches.store()), Arc::clone(admitted.caller.tenant()));
    let stores = admitted.background.is_none();
    if body.len() <= SHORT_BODY && memmem::find(&body, PREVIOUS.as_bytes()).is_none() {
        return with_previous(store, tenant, body, stores);
    }
    let read = tokio::task::spawn_blocking(move || with_previous(store, tenant, body, stores));
    let (body, keep) = read.await.map_err(|_| ApiError::Internal)??;
    if body.len() > max_bytes {
        return Err(ApiError::BodyTooLarge { limit: max_bytes });
    }
    Ok((body, keep))
}

/// See [`continued`]. Blocks if there is a response to read.
fn with_previous(
    store: Arc<Store>,
    tenant: Arc<str>,
    body: Bytes,
    stores: bool,
) -> Result<(Bytes, Option<Keep>), ApiError> {
    let Ok(fields) = Fields::parse(&body, &FIELDS) else { return Ok((body, None)) };
    let stores = stores && fields.get("store")?.unwrap_or(true);
    let previous: Option<String> = fields.get(PREVIOUS)?;
    if !stores && previous.is_none() {
        return Ok((body, None));
    }
    let Some(raw) = fields.raw("input") else { return Ok((body, None)) };
    let Some(own) = items(raw) else { return Ok((body, None)) };
    let mut input = Vec::new();
    if let Some(previous) = previous {
        let stored = store.responses().read(&tenant, &previous).map_err(|error| match error {
            FilesError::Unknown(id) => {
                ApiError::field(PREVIOUS, format!("{id:?} is not known at this coordinator"))
            }
            error => error.into(),
        })?;
        let output: Output = serde_json::from_str(stored.response.get()).map_err(|_| ApiError::Internal)?;
        input = stored.input;
        input.extend(output.output);
    }
    let continues = !input.is_empty();
    input.extend(own);
    let whole = if continues { with_input(&body, raw, &input) } else { body.clone() };
    Ok((whole, stores.then_some(Keep { store, tenant, input })))
}

#[derive(Deserialize)]
struct Output {
    output: Vec<Box<RawValue>>,
}

/// The items of an input; `None` if it is neither a text nor a list.
fn items(raw: &str) -> Option<Vec<Box<RawValue>>> {
    if raw.starts_with('[') {
        return serde_json::from_str(raw).ok();
    }
    let text: String = serde_json::from_str(raw).ok()?;
    let parts = json!([{"type": "input_text", "text": text}]);
    let item = json!({"type": "message", "role": "user", "content": parts});
    Some(vec![to_raw_value(&item).ok()?])
}

/// The body with a list in place of its input, whose text is `raw`, a part of the body.
fn with_input(body: &Bytes, raw: &str, input: &[Box<RawValue>]) -> Bytes {
    let start = raw.as_ptr().addr() - body.as_ptr().addr();
    let (before, after) = (&body[..start], &body[start + raw.len()..]);
    let list = input.iter().map(|item| item.get()).collect::<Vec<_>>().join(",");
    [before, b"[", list.as_bytes(), b"]", after].concat().into()
}

/// Serves `GET /v1/responses/{response}` and `DELETE /v1/responses/{response}`.
pub(crate) async fn retrieve_or_delete(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    let (tenant, id) = (tenant(&request)?, id(&request));
    if request.method() == Method::DELETE {
        let deleted = json!({"id": id, "object": "response", "deleted": true});
        blocking(move || state.batches.store().responses().delete(&tenant, &id)).await?;
        return Ok(Json(deleted).into_response());
    }
    let GetQuery { stream } = query(request.uri())?;
    if stream == Some(true) {
        return Err(ApiError::field("stream", "a kept response is not streamed"));
    }
    let stored = blocking(move || state.batches.store().responses().read(&tenant, &id)).await?;
    let json = [(header::CONTENT_TYPE, "application/json")];
    Ok((json, Box::<str>::from(stored.response).into_string()).into_response())
}

#[derive(Debug, Default, Deserialize)]
struct GetQuery {
    stream: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
struct ListQuery {
    after: Option<String>,
    limit: Option<String>,
    order: Option<String>,
}

/// Serves `GET /v1/responses/{response}/input_items`.
pub(crate) async fn input_items(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    let (tenant, id) = (tenant(&request)?, id(&request));
    let ListQuery { after, limit, order } = query(request.uri())?;
    let limit = page_limit(limit.as_deref(), DEFAULT_PAGE, MAX_PAGE)?;
    let stored = blocking(move || state.batches.store().responses().read(&tenant, &id)).await?;
    let item = |(at, raw): (usize, Box<RawValue>)| {
        let mut item: Value = serde_json::from_str(raw.get()).map_err(|_| ApiError::Internal)?;
        if let Some(item) = item.as_object_mut() {
            item.entry("id").or_insert_with(|| format!("item_{at}").into());
            // The short forms of messages and of their content are written out.
            item.entry("type").or_insert_with(|| "message".into());
            let kind =
                if item.get("role") == Some(&json!("assistant")) { "output_text" } else { "input_text" };
            if let Some(content @ Value::String(_)) = item.get_mut("content") {
                *content = json!([{"type": kind, "text": content.take()}]);
            }
        }
        Ok(item)
    };
    let items = stored.input.into_iter().enumerate().map(item);
    let mut items: Vec<Value> = items.collect::<Result<_, ApiError>>()?;
    match order.as_deref() {
        None | Some("desc") => items.reverse(),
        Some("asc") => {}
        Some(other) => return Err(ApiError::field("order", format!("{other:?} is neither asc nor desc"))),
    }
    if let Some(after) = after {
        let at = items.iter().position(|item| item["id"] == after.as_str());
        let at = at.ok_or_else(|| ApiError::field("after", format!("{after:?} is not known")))?;
        items.drain(..=at);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    Ok(Json(listed(Page { items, has_more })).into_response())
}

/// Serves `POST /v1/responses/{response}/cancel`.
pub(crate) async fn cancel(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    let (tenant, id) = (tenant(&request)?, id(&request));
    blocking(move || state.batches.store().responses().read(&tenant, &id)).await?;
    Err(ApiError::field("response", "only responses with background can be cancelled; this one has ended"))
}
