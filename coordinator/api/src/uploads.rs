//! OpenAI's Files API, for the inputs and the results of batches. A file belongs to its tenant and stays at the
//! coordinator that took it, whose name is in its id.

use super::AppState;
use super::auth::Caller;
use super::error::ApiError;
use super::limits::{BODY_IDLE, MAX_FORM_FIELDS, MAX_FORM_TEXT};
use axum::Json;
use axum::body::Body;
use axum::extract::{Query, Request};
use axum::http::{HeaderValue, Method, Uri, header};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use files::{FileRecord, FilesError, Order, Page, Paging, Purpose, Upload};
use futures::{StreamExt, stream};
use multer::{Field, Multipart};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::io::Read;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// Seconds that a client may have a file kept.
pub(super) const KEEP_S: RangeInclusive<u64> = 3_600..=2_592_000;
/// Time for a whole upload.
const UPLOAD_TOTAL: Duration = Duration::from_secs(600);
/// Bytes of a file that are written or read at once.
const PIECE: usize = 256 << 10;
/// Longest name of a file, in bytes.
const MAX_NAME: usize = 255;
const MAX_PAGE: u64 = 10_000;

/// Serves `GET /v1/files` and `POST /v1/files`.
pub(super) async fn list_or_upload(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    if request.method() == Method::POST { upload(state, request).await } else { list(&state, &request) }
}

/// Serves `GET /v1/files/{file}` and `DELETE /v1/files/{file}`.
pub(super) async fn retrieve_or_delete(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    let (tenant, id) = (tenant(&request)?, id(&request));
    if request.method() != Method::DELETE {
        return Ok(Json(object(&state.batches.store().file(&tenant, &id)?)).into_response());
    }
    let deleted = json!({"id": id, "object": "file", "deleted": true});
    blocking(move || state.batches.store().delete(&tenant, &id)).await?;
    Ok(Json(deleted).into_response())
}

/// Serves `GET /v1/files/{file}/content`.
pub(super) async fn content(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    let (tenant, id) = (tenant(&request)?, id(&request));
    let (record, file) = blocking(move || state.batches.store().read(&tenant, &id)).await?;
    let pieces = stream::try_unfold(file, |mut file| async {
        let read = move || {
            let mut piece = Vec::with_capacity(PIECE);
            (&mut file).take(PIECE as u64).read_to_end(&mut piece)?;
            Ok::<_, std::io::Error>((!piece.is_empty()).then_some((Bytes::from(piece), file)))
        };
        tokio::task::spawn_blocking(read).await.map_err(std::io::Error::other)?
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/jsonl")),
        (header::CONTENT_LENGTH, HeaderValue::from(record.bytes)),
    ];
    Ok((headers, Body::from_stream(pieces)).into_response())
}

#[derive(Debug, Default, Deserialize)]
struct ListQuery {
    after: Option<String>,
    limit: Option<String>,
    order: Option<String>,
    purpose: Option<String>,
}

fn list(state: &AppState, request: &Request) -> Result<Response, ApiError> {
    let tenant = tenant(request)?;
    let ListQuery { after, limit, order, purpose } = query(request.uri())?;
    let order = match order.as_deref() {
        None | Some("desc") => Order::Descending,
        Some("asc") => Order::Ascending,
        Some(other) => return Err(ApiError::field("order", format!("{other:?} is neither asc nor desc"))),
    };
    let paging = Paging { after, limit: page_limit(limit.as_deref(), MAX_PAGE, MAX_PAGE)?, order };
    let purpose = match purpose.as_deref() {
        None => None,
        Some("batch") => Some(Purpose::Batch),
        Some("batch_output") => Some(Purpose::BatchOutput),
        // There are no files with other purposes.
        Some(_) => return Ok(Json(listed(Page { items: Vec::new(), has_more: false })).into_response()),
    };
    let page = state.batches.store().files(&tenant, purpose, &paging).map_err(after_unknown)?;
    let Page { items, has_more } = page;
    Ok(Json(listed(Page { items: items.iter().map(object).collect(), has_more })).into_response())
}

/// The query of a request.
pub(super) fn query<T: DeserializeOwned>(uri: &Uri) -> Result<T, ApiError> {
    let Query(query) =
        Query::try_from_uri(uri).map_err(|error| ApiError::field("query", error.body_text()))?;
    Ok(query)
}

/// The number of objects of a page.
pub(super) fn page_limit(text: Option<&str>, default: u64, most: u64) -> Result<usize, ApiError> {
    let wrong = |text: &str| {
        let shown: String = text.chars().take(64).collect();
        ApiError::field("limit", format!("{shown:?} is not a number from 1 to {most}"))
    };
    let limit = text.map(|text| {
        text.parse::<u64>().ok().filter(|limit| (1..=most).contains(limit)).ok_or_else(|| wrong(text))
    });
    Ok(limit.transpose()?.unwrap_or(default) as usize)
}

/// The error of a list whose cursor is no object of it.
pub(super) fn after_unknown(error: FilesError) -> ApiError {
    match error {
        FilesError::Unknown(id) => ApiError::field("after", format!("{id:?} is not known")),
        error => error.into(),
    }
}

/// A list in OpenAI's form.
pub(super) fn listed(page: Page<Value>) -> Value {
    let id = |object: Option<&Value>| object.map(|object| object["id"].clone());
    let (first, last) = (id(page.items.first()), id(page.items.last()));
    json!({"object": "list", "data": page.items, "first_id": first, "last_id": last, "has_more": page.has_more})
}

/// The tenant of a request. `serve` inserted the caller.
pub(super) fn tenant(request: &Request) -> Result<Arc<str>, ApiError> {
    let caller = request.extensions().get::<Caller>().ok_or(ApiError::InvalidApiKey)?;
    Ok(Arc::clone(caller.tenant()))
}

/// The id in the path: the part after `/v1/files/` or `/v1/batches/`.
pub(super) fn id(request: &Request) -> String {
    request.uri().path().split('/').nth(3).unwrap_or_default().to_owned()
}

/// Runs a call that waits for the disk.
pub(super) async fn blocking<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, FilesError> + Send + 'static,
) -> Result<T, ApiError> {
    Ok(tokio::task::spawn_blocking(call).await.map_err(|_| ApiError::Internal)??)
}

/// A file in OpenAI's form.
fn object(file: &FileRecord) -> Value {
    json!({
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.name,
        "purpose": file.purpose.name(),
        "status": "processed",
        "status_details": null,
    })
}

async fn upload(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    // `serve` inserted it.
    let caller = request.extensions().get::<Caller>().cloned().ok_or(ApiError::InvalidApiKey)?;
    let _permit = caller.enter(Instant::now()).inspect_err(|error| error.count_limit(&state.metrics))?;
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let boundary = multer::parse_boundary(kind.unwrap_or_default()).map_err(|_| {
        let rule = "the body is a form (multipart/form-data) with a boundary, and the file its field file";
        ApiError::field("content-type", rule)
    })?;
    let (tenant, store) = (Arc::clone(caller.tenant()), Arc::clone(state.batches.store()));
    let most = store.limits().file_bytes;
    let length =
        request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let form = usize::try_from(most).unwrap_or(usize::MAX).saturating_add(MAX_FORM_FIELDS * MAX_FORM_TEXT);
    if length.is_some_and(|length: usize| length > form) {
        return Err(ApiError::BodyTooLarge { limit: form });
    }
    let upload = blocking(move || store.upload(&tenant)).await?;
    let pieces = request.into_body().into_data_stream();
    let pieces = stream::unfold(pieces, |mut pieces| async {
        let piece = timeout(BODY_IDLE, pieces.next()).await.unwrap_or_else(|_| {
            Some(Err(axum::Error::new(std::io::Error::from(std::io::ErrorKind::TimedOut))))
        });
        Some((piece?, pieces))
    });
    let form = read_form(Multipart::new(pieces.boxed(), boundary), upload);
    let Form { upload, name, keep_s } =
        timeout(UPLOAD_TOTAL, form).await.map_err(|_| ApiError::BodyTimeout)??;
    let file = blocking(move || upload.finish(name, keep_s)).await?;
    Ok(Json(object(&file)).into_response())
}

/// A form whose file is on disk.
struct Form {
    upload: Upload,
    name: String,
    keep_s: Option<u64>,
}

async fn read_form(mut form: Multipart<'_>, upload: Upload) -> Result<Form, ApiError> {
    let (mut upload, mut written) = (Some(upload), None);
    let (mut purpose, mut anchor, mut seconds) = (None, None, None);
    let mut seen = HashSet::new();
    for fields in 0.. {
        let Some(field) = form.next_field().await.map_err(|error| torn(&error))? else { break };
        if fields == MAX_FORM_FIELDS {
            return Err(ApiError::field("body", format!("has more than {MAX_FORM_FIELDS} fields")));
        }
        let name = field.name().unwrap_or_default().chars().take(64).collect::<String>();
        if !seen.insert(name.clone()) {
            return Err(ApiError::field(name, "is given twice"));
        }
        match name.as_str() {
            "file" => {
                let file_name = file_name(&field)?;
                let upload = upload.take().ok_or(ApiError::Internal)?;
                written = Some((write(field, upload).await?, file_name));
            }
            "purpose" => purpose = Some(text(&name, field).await?),
            "expires_after[anchor]" => anchor = Some(text(&name, field).await?),
            "expires_after[seconds]" => seconds = Some(text(&name, field).await?),
            _ => return Err(ApiError::field(name, "is not a known field")),
        }
    }
    match purpose.as_deref() {
        Some("batch") => {}
        Some(other) => return Err(ApiError::field("purpose", format!("{other:?} is not batch"))),
        None => return Err(ApiError::field("purpose", "is missing: batch")),
    }
    let keep_s = match (anchor.as_deref(), seconds.as_deref()) {
        (None, None) => None,
        (Some("created_at"), Some(seconds)) => Some(keep("expires_after[seconds]", seconds)?),
        (Some("created_at"), None) => {
            return Err(ApiError::field("expires_after[seconds]", "is missing"));
        }
        (anchor, _) => {
            let shown = anchor.unwrap_or_default();
            return Err(ApiError::field("expires_after[anchor]", format!("{shown:?} is not created_at")));
        }
    };
    let (upload, name) =
        written.ok_or_else(|| ApiError::field("file", "is missing: the requests, a line each"))?;
    Ok(Form { upload, name, keep_s })
}

fn torn(error: &multer::Error) -> ApiError {
    let late = |error: &(dyn std::error::Error + 'static)| {
        error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::TimedOut)
    };
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        if late(error) {
            return ApiError::BodyTimeout;
        }
        source = error.source();
    }
    ApiError::field("body", "is cut off, or no form")
}

/// Writes the file of a form.
async fn write(mut field: Field<'_>, mut upload: Upload) -> Result<Upload, ApiError> {
    let mut piece = BytesMut::new();
    loop {
        let more = field.chunk().await.map_err(|error| torn(&error))?;
        piece.extend_from_slice(more.as_deref().unwrap_or_default());
        if piece.len() >= PIECE || more.is_none() && !piece.is_empty() {
            let bytes = piece.split().freeze();
            upload = blocking(move || upload.write(&bytes).map(|()| upload)).await?;
        }
        if more.is_none() {
            return Ok(upload);
        }
    }
}

/// The name of the file in a form.
fn file_name(field: &Field<'_>) -> Result<String, ApiError> {
    let name = field.file_name().unwrap_or("file.jsonl");
    if name.len() > MAX_NAME {
        return Err(ApiError::field(
            "file",
            format!("its name has {} bytes, the limit is {MAX_NAME}", name.len()),
        ));
    }
    Ok(name.to_owned())
}

/// A field of a form other than the file.
async fn text(name: &str, mut field: Field<'_>) -> Result<String, ApiError> {
    let mut bytes = Vec::new();
    while let Some(more) = field.chunk().await.map_err(|error| torn(&error))? {
        bytes.extend_from_slice(&more);
        if bytes.len() > MAX_FORM_TEXT {
            return Err(ApiError::field(name, format!("has more than {MAX_FORM_TEXT} bytes")));
        }
    }
    let text = String::from_utf8(bytes).map_err(|_| ApiError::field(name, "is not UTF-8"))?;
    Ok(text.chars().take(256).collect())
}

/// Seconds that a file is kept.
fn keep(field: &str, text: &str) -> Result<u64, ApiError> {
    text.trim().parse().ok().filter(|seconds| KEEP_S.contains(seconds)).ok_or_else(|| {
        let (least, most) = (KEEP_S.start(), KEEP_S.end());
        ApiError::field(field, format!("{text:?} is not a number of seconds from {least} to {most}"))
    })
}
