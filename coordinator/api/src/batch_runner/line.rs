//! One line of a batch: a request to the endpoint of its batch, and its result in OpenAI's form.

use super::{ApiError, AppState, Background, BatchRecord, Endpoint, Line, Lines, Slots};
use crate::fields::Fields;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use dispatch::random::random_u64;
use files::{BatchLine, FilesError, MAX_RESULT_BYTES, Outcome, Results, now};
use http_body_util::BodyExt;
use proto::ids::RequestId;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A line's number, and its result as JSON.
pub(super) type LineResult = (u64, Outcome, Vec<u8>);

/// Attempts of a line that loses its worker each time, beyond those of the dispatch.
const MAX_LOST: u32 = 5;
/// Pause before another attempt, which doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
const EXPIRED: &str = "This request could not be executed before the completion window expired.";

/// The batch of a line.
pub(super) struct Context {
    state: Arc<AppState>,
    slots: Slots,
    tenant: String,
    key: Option<String>,
    endpoint: Endpoint,
    lines: Arc<Lines>,
    deadline: Instant,
}

/// A line of the output file or the error file.
#[derive(Serialize)]
struct Written<'a> {
    id: String,
    custom_id: &'a str,
    response: Option<WrittenResponse<'a>>,
    error: Option<WrittenError<'a>>,
}

#[derive(Serialize)]
struct WrittenResponse<'a> {
    status_code: u16,
    request_id: &'a str,
    body: &'a RawValue,
}

#[derive(Serialize)]
struct WrittenError<'a> {
    code: &'a str,
    message: &'a str,
}

impl Context {
    pub(super) fn new(
        state: &Arc<AppState>,
        slots: &Slots,
        batch: &BatchRecord,
        endpoint: Endpoint,
        lines: &Arc<Lines>,
    ) -> Self {
        let left = Duration::from_secs(batch.expires_at.saturating_sub(now()));
        Self {
            state: Arc::clone(state),
            slots: slots.clone(),
            tenant: batch.tenant.clone(),
            key: batch.key.clone(),
            endpoint,
            lines: Arc::clone(lines),
            deadline: Instant::now() + left,
        }
    }

    /// Runs a line until it has a result. A line that finds no worker, no room or no quota waits and tries again.
    pub(super) async fn run(self: Arc<Self>, line: Line) -> Result<LineResult, FilesError> {
        let (context, number) = (Arc::clone(&self), line.number);
        let line = super::on_disk(move || context.lines.read(&line)).await?;
        let (mut lost, mut pause) = (0, FIRST_PAUSE);
        loop {
            let slot = self.slots.take().await;
            let Some(id) = request_id() else { return Err(FilesError::Unknown(line.custom_id)) };
            let (status, error, body) = self.attempt(&line, &id).await;
            drop(slot);
            let wait = match error {
                Some(error) => wait_after(&error, &mut lost),
                None => None,
            };
            let Some(wait) = wait else {
                return Ok((number, outcome(status), written(&line, &id, status, &body)));
            };
            tokio::time::sleep(wait.max(pause).min(LONGEST_PAUSE)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Status, error and body of one attempt.
    async fn attempt(&self, line: &BatchLine, id: &RequestId) -> (StatusCode, Option<ApiError>, Vec<u8>) {
        let refused = |error: ApiError| (error.status(), error.body().to_string().into_bytes(), error);
        let response = match self.request(line, id) {
            Ok(request) => self.endpoint.handle(Arc::clone(&self.state), request).await,
            Err(error) => {
                let (status, body, error) = refused(error);
                return (status, Some(error), body);
            }
        };
        let (mut head, body) = response.into_parts();
        let error = head.extensions.remove::<ApiError>();
        let body = http_body_util::Limited::new(body, MAX_RESULT_BYTES / 2).collect().await;
        match body {
            Ok(body) => (head.status, error, body.to_bytes().to_vec()),
            Err(_) => {
                let reason = format!("the answer is longer than {} bytes", MAX_RESULT_BYTES / 2);
                let (status, body, error) = refused(ApiError::Refused { why: reason });
                (status, Some(error), body)
            }
        }
    }

    fn request(&self, line: &BatchLine, id: &RequestId) -> Result<Request, ApiError> {
        let caller = self.state.keys.caller(&self.tenant, self.key.as_deref())?;
        let body = line.body.get();
        let fields = Fields::parse(body.as_bytes(), &["stream"])?;
        if fields.get::<bool>("stream")? == Some(true) {
            return Err(ApiError::field("stream", "true: a line of a batch has no stream"));
        }
        let mut request = Request::new(Body::from(body.to_owned()));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.endpoint.path().parse().map_err(|_| ApiError::Internal)?;
        let extensions = request.extensions_mut();
        extensions.insert(caller);
        extensions.insert(id.clone());
        extensions.insert(Background { deadline: self.deadline });
        Ok(request)
    }

    /// Gives all lines without a result the error of an expired batch.
    pub(super) fn expire(
        &self,
        mut results: Results,
    ) -> impl FnOnce() -> Result<Results, FilesError> + Send + 'static {
        let lines = Arc::clone(&self.lines);
        move || {
            let missing: Vec<Line> =
                lines.order().iter().filter(|line| !results.has(line.number)).copied().collect();
            for some in missing.chunks(super::WRITE_AT_ONCE) {
                let expired = some.iter().map(|line| {
                    let custom_id = lines.read(line)?.custom_id;
                    let error = WrittenError { code: "batch_expired", message: EXPIRED };
                    let written = Written {
                        id: result_id(),
                        custom_id: &custom_id,
                        response: None,
                        error: Some(error),
                    };
                    Ok((line.number, Outcome::Failed, serde_json::to_vec(&written).unwrap_or_default()))
                });
                let expired: Vec<LineResult> = expired.collect::<Result<_, FilesError>>()?;
                results.append(&expired)?;
            }
            Ok(results)
        }
    }
}

/// The least time until another attempt; `None` if the error is the result of the line.
fn wait_after(error: &ApiError, lost: &mut u32) -> Option<Duration> {
    match error {
        ApiError::RateLimited(exceeded) => Some(exceeded.retry_after),
        ApiError::QueueFull { retry_after } => Some(*retry_after),
        ApiError::ModelLoading { progress, .. } => Some(progress.retry_after()),
        ApiError::NoWorker
        | ApiError::NoEncoder { .. }
        | ApiError::NotOffered { .. }
        | ApiError::OperationAway { .. }
        | ApiError::ModelUnavailable { .. }
        | ApiError::KeysUnknown
        | ApiError::ModelsUnknown
        | ApiError::NoQuorum => Some(Duration::from_secs(1)),
        // The batch ends with its deadline.
        ApiError::DeadlineExceeded => Some(Duration::from_secs(1)),
        ApiError::WorkerLost => {
            *lost += 1;
            (*lost < MAX_LOST).then_some(Duration::ZERO)
        }
        _ => None,
    }
}

fn outcome(status: StatusCode) -> Outcome {
    if status.is_success() { Outcome::Completed } else { Outcome::Failed }
}

fn request_id() -> Option<RequestId> {
    RequestId::new(format!("{:016x}{:016x}", random_u64(), random_u64())).ok()
}

fn result_id() -> String {
    format!("batch_req_{:016x}{:08x}", random_u64(), random_u64() >> 32)
}

/// The result of a line, on one line of text.
fn written(line: &BatchLine, id: &RequestId, status: StatusCode, body: &[u8]) -> Vec<u8> {
    let text = || Value::String(String::from_utf8_lossy(body).into_owned()).to_string();
    let value = serde_json::from_slice::<Value>(body);
    // As the API wrote it, unless that has line feeds.
    let body = match std::str::from_utf8(body).ok().filter(|text| !text.contains('\n')) {
        Some(whole) if value.is_ok() => whole.to_owned(),
        _ => value.map_or_else(|_| text(), |value| value.to_string()),
    };
    let Ok(body) = RawValue::from_string(body) else { return Vec::new() };
    let response = WrittenResponse { status_code: status.as_u16(), request_id: id.as_str(), body: &body };
    let written =
        Written { id: result_id(), custom_id: &line.custom_id, response: Some(response), error: None };
    serde_json::to_vec(&written).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_one_line_with_the_answer_as_it_was_written() {
        let line =
            BatchLine { custom_id: "a\n\"b\"".into(), body: RawValue::from_string("{}".into()).unwrap() };
        let id = request_id().unwrap();
        let result = |status, body: &[u8]| {
            let text = String::from_utf8(written(&line, &id, status, body)).unwrap();
            assert!(!text.contains('\n'));
            assert!(text.contains(&format!("\"request_id\":\"{}\"", id.as_str())));
            (serde_json::from_str::<Value>(&text).unwrap(), text)
        };
        let (value, text) = result(StatusCode::OK, br#"{"b":1.50,"a":"x\ny"}"#);
        assert!(text.contains(r#""body":{"b":1.50,"a":"x\ny"}"#), "{text}");
        assert_eq!((value["custom_id"].as_str(), &value["error"]), (Some("a\n\"b\""), &Value::Null));
        assert_eq!(value["response"]["status_code"], 200);
        let (value, _) = result(StatusCode::BAD_REQUEST, b"{\n\"a\": 1}");
        assert_eq!(
            (&value["response"]["body"]["a"], &value["response"]["status_code"]),
            (&1.into(), &400.into())
        );
        assert_eq!(result(StatusCode::BAD_GATEWAY, b"no \xff").0["response"]["body"], "no \u{fffd}");
        assert_eq!(
            (outcome(StatusCode::OK), outcome(StatusCode::NOT_FOUND)),
            (Outcome::Completed, Outcome::Failed)
        );
    }

    #[test]
    fn a_line_that_loses_its_worker_again_and_again_ends() {
        let mut lost = 0;
        let tries = std::iter::from_fn(|| wait_after(&ApiError::WorkerLost, &mut lost)).count();
        assert_eq!(tries as u32, MAX_LOST - 1);
        assert!(wait_after(&ApiError::NoWorker, &mut lost).is_some());
        assert_eq!(wait_after(&ApiError::field("model", "x"), &mut lost), None);
        assert_eq!(wait_after(&ApiError::Internal, &mut lost), None);
    }
}
