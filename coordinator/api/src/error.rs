//! Errors of the API: OpenAI's form, stable codes, no internal details.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use proto::message::GenerateError;
use proto::operation::Operation;
use proto::sequence::SequenceError;
use serde_json::{Value, json};
use std::time::Duration;

use dispatch::Failure;
use dispatch::metrics::Metrics;
use dispatch::models::LoadProgress;
use dispatch::quota::{Exceeded, Of};
use files::FilesError;
use router::balancer::Refusal;

/// The encodings of bodies that are decoded, for the header `Accept-Encoding`.
pub(super) const ENCODINGS: &str = "gzip, deflate";

/// An error that a client gets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// A field with an unacceptable value.
    #[error("{field}: {reason}")]
    InvalidField {
        /// Path of the field: `messages[2].role`.
        field: String,
        /// The value and the rule that it breaks.
        reason: String,
    },
    #[error("the body is longer than {limit} bytes")]
    BodyTooLarge { limit: usize },
    #[error("the body did not arrive in time")]
    BodyTimeout,
    /// The body is compressed in a way that is not decoded.
    #[error("content-encoding: {given:?} is none of {ENCODINGS}")]
    ContentEncoding { given: String },
    /// The request's head is invalid or ambiguous.
    #[error("the request's head is malformed: {reason}")]
    BadHead { reason: String },
    #[error("the request's head is longer than {limit} bytes")]
    HeadTooLarge { limit: usize },
    #[error("the request has more than {limit} headers")]
    TooManyHeaders { limit: usize },
    /// The request target alone is longer than the limit of a head.
    #[error("the request's target is longer than {limit} bytes")]
    TargetTooLong { limit: usize },
    #[error("the request's head did not arrive in time")]
    HeadTimeout,
    /// All connections have a running request.
    #[error("all {limit} connections of this port are in use; try again later")]
    Connections { limit: usize },
    /// The prompt's text exceeds the model's context by any tokenization.
    #[error(
        "the model's context is {limit} tokens; {bytes} bytes of prompt have at least {min_tokens} tokens"
    )]
    TextLength {
        bytes: usize,
        /// The fewest tokens that this number of bytes can have.
        min_tokens: u64,
        limit: u64,
    },
    /// Prompt and output exceed the model's context.
    #[error(
        "the model's context is {limit} tokens; the request needs {need} \
         (prompt {prompt}, output {})", need - prompt
    )]
    ContextLength {
        prompt: u64,
        /// Tokens of prompt and output.
        need: u64,
        limit: u64,
    },
    /// The client wants the server to store or continue a history.
    #[error("thread: the server stores no history: send the whole history as messages")]
    NoThreads,
    #[error("the model {0:?} does not exist")]
    ModelNotFound(String),
    #[error("no endpoint has this path and method")]
    NotFound,
    /// The path has other methods.
    #[error("no endpoint has this path and method; this path allows: {allow}")]
    Method {
        /// The value of the header `Allow`.
        allow: &'static str,
    },
    /// A page of an origin that is not allowed.
    #[error(
        "pages of this origin may not send requests here; the setting cors_origins lists the allowed origins"
    )]
    Origin,
    /// No sequence, snapshot or pin with this id.
    #[error("{what} is not known")]
    Unknown { what: String },
    /// Another coordinator keeps the object.
    #[error("{id:?} is kept by the coordinator {owner:?}: send the request there")]
    Elsewhere { id: String, owner: String },
    #[error("{why}")]
    Refused {
        /// The reason, with the limit if there is one.
        why: String,
    },
    /// No key, or an unknown one.
    #[error("no valid API key was given")]
    InvalidApiKey,
    /// The key is valid but does not permit this.
    #[error("this key may not do that")]
    Forbidden,
    /// The key is unknown, and the agreed keys are not known here yet.
    #[error("this coordinator has not read all keys yet; try again")]
    KeysUnknown,
    /// The model is unknown, and the deployed models are not known here yet.
    #[error("this coordinator has not read all deployed models yet; try again")]
    ModelsUnknown,
    /// A limit of the key or of its tenant is reached.
    #[error(
        "the limit of this {} is reached: {} {}",
        match .0.of { Of::Key => "key", Of::Tenant => "key's tenant" }, .0.allowed, .0.limit
    )]
    RateLimited(Exceeded),
    #[error("too many requests are waiting; try again later")]
    QueueFull { retry_after: Duration },
    /// No worker serves the model.
    #[error("no worker serves this model at the moment")]
    NoWorker,
    /// A deployed model is not ready yet.
    #[error("the model {model:?} is not ready: {progress}")]
    ModelLoading { model: String, progress: LoadProgress },
    /// A deployed model cannot be loaded now.
    #[error("the model {model:?} cannot be loaded: {reason}")]
    ModelUnavailable { model: String, reason: String },
    /// No worker offers the operation.
    #[error(
        "no worker offers the operation {operation} at the moment: start one with a model for it, or \
         with --operation and a bundle of models that has a folder {operation}"
    )]
    NotOffered { operation: Operation },
    /// The operation is offered, but not with this model.
    #[error(
        "the operation {operation} is not offered with the model {model:?}; it is offered with {}",
        .offered.join(", ")
    )]
    NotOfferedWith { operation: Operation, model: String, offered: Vec<String> },
    /// All workers that offer the operation are draining or not ready.
    #[error("the workers that offer the operation {operation} take no new work at the moment")]
    OperationAway { operation: Operation },
    /// No worker encodes the request's images.
    #[error("no worker that is reached encodes the images: {reason}")]
    NoEncoder { reason: String },
    /// The worker was lost and no other worker could continue.
    #[error("the worker that served this request was lost")]
    WorkerLost,
    /// The coordinators have no majority.
    #[error(
        "no majority of the coordinators agreed in time; the change may still be made, and may be sent again"
    )]
    NoQuorum,
    #[error("the request did not finish in time")]
    DeadlineExceeded,
    /// A model computed NaN or infinity.
    #[error("the model's results are not finite: its weights or intermediate values contain NaN or infinity")]
    NotFinite,
    #[error("internal error")]
    Internal,
}

impl ApiError {
    pub fn field(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::InvalidField { field: field.into(), reason: reason.into() }
    }

    pub fn status(&self) -> StatusCode {
        match self {
            Self::InvalidField { .. } | Self::ContextLength { .. } => StatusCode::BAD_REQUEST,
            Self::BadHead { .. } | Self::TextLength { .. } | Self::NoThreads => StatusCode::BAD_REQUEST,
            Self::HeadTooLarge { .. } | Self::TooManyHeaders { .. } => {
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE
            }
            Self::TargetTooLong { .. } => StatusCode::URI_TOO_LONG,
            Self::HeadTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::Connections { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::Method { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::Origin => StatusCode::FORBIDDEN,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::ContentEncoding { .. } => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::ModelNotFound(_) | Self::NotOfferedWith { .. } => StatusCode::NOT_FOUND,
            Self::NotFound | Self::Unknown { .. } => StatusCode::NOT_FOUND,
            Self::NotOffered { .. } | Self::OperationAway { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::Refused { .. } => StatusCode::CONFLICT,
            Self::Elsewhere { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::InvalidApiKey => StatusCode::UNAUTHORIZED,
            Self::Forbidden => StatusCode::FORBIDDEN,
            Self::QueueFull { .. } | Self::RateLimited(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::KeysUnknown | Self::ModelsUnknown => StatusCode::SERVICE_UNAVAILABLE,
            Self::ModelLoading { .. } | Self::ModelUnavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::NoEncoder { .. }
            | Self::NoWorker
            | Self::WorkerLost
            | Self::DeadlineExceeded
            | Self::NoQuorum => StatusCode::SERVICE_UNAVAILABLE,
            Self::NotFinite | Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    pub fn code(&self) -> &'static str {
        match self {
            Self::InvalidField { .. }
            | Self::NoThreads
            | Self::BodyTooLarge { .. }
            | Self::ContentEncoding { .. }
            | Self::BadHead { .. }
            | Self::HeadTooLarge { .. }
            | Self::TooManyHeaders { .. }
            | Self::TargetTooLong { .. }
            | Self::NotFound
            | Self::Unknown { .. }
            | Self::Refused { .. } => "invalid_field",
            Self::Elsewhere { .. } => "other_coordinator",
            Self::Method { .. } => "method_not_allowed",
            Self::Origin => "origin_not_allowed",
            Self::BodyTimeout | Self::HeadTimeout | Self::DeadlineExceeded => "deadline_exceeded",
            Self::ContextLength { .. } | Self::TextLength { .. } => "context_length_exceeded",
            Self::ModelNotFound(_) | Self::NotOfferedWith { .. } => "model_not_found",
            Self::InvalidApiKey | Self::Forbidden => "invalid_api_key",
            Self::RateLimited(_) => "rate_limited",
            Self::QueueFull { .. } | Self::Connections { .. } => "queue_full",
            Self::ModelLoading { .. } => "model_loading",
            Self::NoWorker
            | Self::NoEncoder { .. }
            | Self::ModelUnavailable { .. }
            | Self::NotOffered { .. }
            | Self::OperationAway { .. } => "no_worker",
            Self::WorkerLost => "worker_lost",
            Self::NoQuorum | Self::KeysUnknown | Self::ModelsUnknown => "no_quorum",
            Self::NotFinite | Self::Internal => "internal",
        }
    }

    /// Counts the error if a limit of the key or of its tenant is why the request is refused.
    pub fn count_limit(&self, metrics: &Metrics) {
        if let Self::RateLimited(exceeded) = self {
            metrics.limited(exceeded.limit.name());
        }
    }
    /// Whether the request was shed (overload, or no worker available), as opposed to a failure.
    pub fn is_shed(&self) -> bool {
        matches!(
            self,
            Self::QueueFull { .. }
                | Self::RateLimited(_)
                | Self::Connections { .. }
                | Self::NoWorker
                | Self::NoEncoder { .. }
                | Self::ModelLoading { .. }
                | Self::ModelUnavailable { .. }
                | Self::NotOffered { .. }
                | Self::OperationAway { .. }
                | Self::KeysUnknown
                | Self::ModelsUnknown
                | Self::NoQuorum
        )
    }

    /// The body; also the data of an `error` event in a stream.
    pub fn body(&self) -> Value {
        let kind = match self.status().as_u16() {
            401 | 403 => "authentication_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        };
        let (param, code) = (self.param(), self.code());
        json!({"error": {"message": self.to_string(), "type": kind, "param": param, "code": code}})
    }

    /// The body in Ollama's form.
    pub fn ollama_body(&self) -> Value {
        json!({"error": self.to_string()})
    }

    /// The invalid field of the request.
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::InvalidField { field, .. } => Some(field.as_str()),
            Self::BodyTooLarge { .. } | Self::BodyTimeout => Some("body"),
            Self::ContentEncoding { .. } => Some("content-encoding"),
            Self::ModelNotFound(_) | Self::NotOfferedWith { .. } => Some("model"),
            Self::ModelLoading { .. } | Self::ModelUnavailable { .. } => Some("model"),
            Self::Unknown { .. } | Self::Elsewhere { .. } => Some("id"),
            Self::NoThreads => Some("thread"),
            _ => None,
        }
    }

    /// A response with this status and body, with `retry-after` if a retry can succeed.
    pub fn respond(&self, status: StatusCode, body: Value) -> Response {
        let mut response = (status, Json(body)).into_response();
        let retry = match self {
            Self::QueueFull { retry_after } => Some(retry_after.as_secs().max(1)),
            // Rounded up, so that the client does not return too early.
            Self::RateLimited(exceeded) => Some(exceeded.retry_after.as_secs_f64().ceil().max(1.0) as u64),
            Self::NoWorker | Self::WorkerLost | Self::NoQuorum | Self::KeysUnknown => Some(1),
            Self::NoEncoder { .. } | Self::Elsewhere { .. } => Some(1),
            Self::Connections { .. } | Self::ModelsUnknown => Some(1),
            Self::ModelLoading { progress, .. } => Some(progress.retry_after().as_secs_f64().ceil() as u64),
            Self::ModelUnavailable { .. } => Some(5),
            Self::NotOffered { .. } | Self::OperationAway { .. } => Some(1),
            _ => None,
        };
        if let Some(seconds) = retry {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Self::Method { allow } = self
            && !allow.is_empty()
        {
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allow));
        }
        if let Self::ContentEncoding { .. } = self {
            // RFC 9110, section 15.5.16.
            response.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static(ENCODINGS));
        }
        if response.status() == StatusCode::UNAUTHORIZED {
            // RFC 9110, section 15.5.2: a 401 must name the authentication scheme.
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// The response has the error as an extension, for `serve`.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.respond(self.status(), self.body());
        response.extensions_mut().insert(self);
        response
    }
}

impl From<Exceeded> for ApiError {
    fn from(exceeded: Exceeded) -> Self {
        Self::RateLimited(exceeded)
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::QueueFull { retry_after } => Self::QueueFull { retry_after },
            Refusal::NoWorker => Self::NoWorker,
            Refusal::Deadline => Self::DeadlineExceeded,
            Refusal::AttemptsFailed => Self::WorkerLost,
        }
    }
}

impl From<SequenceError> for ApiError {
    fn from(error: SequenceError) -> Self {
        match error {
            SequenceError::Unknown { what } => Self::Unknown { what },
            SequenceError::InvalidField { field, reason } => Self::InvalidField { field, reason },
            SequenceError::NotThisSnapshot(reason) => Self::field("snapshot", reason),
            SequenceError::QueueFull => Self::QueueFull { retry_after: Duration::from_secs(1) },
            SequenceError::Internal => Self::Internal,
            SequenceError::Live(_)
            | SequenceError::OverBudget { .. }
            | SequenceError::NoRoom { .. }
            | SequenceError::Unsupported(_) => Self::Refused { why: error.to_string() },
        }
    }
}

impl From<FilesError> for ApiError {
    fn from(error: FilesError) -> Self {
        match error {
            FilesError::Limit { field, .. } => {
                let named = if field.contains("batches") { "input_file_id" } else { "file" };
                Self::field(named, error.to_string())
            }
            FilesError::Purpose(_) => Self::field("input_file_id", error.to_string()),
            FilesError::Unknown(id) => Self::Unknown { what: format!("{id:?}") },
            FilesError::Elsewhere { id, owner } => Self::Elsewhere { id, owner },
            FilesError::InUse { .. } | FilesError::Ended { .. } => Self::Refused { why: error.to_string() },
            FilesError::Disk { .. } | FilesError::Damaged { .. } => {
                tracing::error!(%error, "files and batches cannot be read or written");
                Self::Internal
            }
        }
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused(refusal) => refusal.into(),
            Failure::Lost => Self::WorkerLost,
            Failure::Deadline => Self::DeadlineExceeded,
            Failure::Worker(error) => match error {
                GenerateError::ContextLength { need, limit } => {
                    Self::ContextLength { prompt: 0, need, limit }
                }
                GenerateError::InvalidField { field, reason }
                | GenerateError::Unsupported { field, reason } => Self::InvalidField { field, reason },
                GenerateError::QueueFull => Self::QueueFull { retry_after: Duration::from_secs(1) },
                GenerateError::Draining | GenerateError::ModelNotFound(_) => Self::NoWorker,
                GenerateError::DeadlineExceeded { .. } => Self::DeadlineExceeded,
                GenerateError::Internal => Self::Internal,
                GenerateError::NotFinite => Self::NotFinite,
                GenerateError::NoEncoder { reason } => Self::NoEncoder { reason },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dispatch::quota::Limit;

    /// One error of each kind whose message does not repeat the client's text.
    fn every() -> Vec<ApiError> {
        let second = Duration::from_secs(1);
        let exceeded = Exceeded {
            limit: Limit::Tokens,
            of: Of::Tenant,
            allowed: 7,
            retry_after: Duration::from_millis(1_001),
        };
        vec![
            ApiError::BodyTooLarge { limit: 8 },
            ApiError::BodyTimeout,
            ApiError::ContentEncoding { given: "br".into() },
            ApiError::ContextLength { prompt: 3, need: 9, limit: 8 },
            ApiError::BadHead { reason: "why".into() },
            ApiError::HeadTooLarge { limit: 8 },
            ApiError::TooManyHeaders { limit: 8 },
            ApiError::TargetTooLong { limit: 8 },
            ApiError::HeadTimeout,
            ApiError::Connections { limit: 8 },
            ApiError::TextLength { bytes: 90, min_tokens: 9, limit: 8 },
            ApiError::Method { allow: "GET" },
            ApiError::Origin,
            ApiError::Elsewhere { id: "f".into(), owner: "c2".into() },
            ApiError::NotFound,
            ApiError::InvalidApiKey,
            ApiError::Forbidden,
            ApiError::KeysUnknown,
            ApiError::ModelsUnknown,
            ApiError::RateLimited(exceeded),
            ApiError::QueueFull { retry_after: second },
            ApiError::NoWorker,
            ApiError::NoEncoder { reason: "w9: it is draining".into() },
            ApiError::ModelLoading { model: "m".into(), progress: LoadProgress::absent() },
            ApiError::ModelUnavailable { model: "m".into(), reason: "no room".into() },
            ApiError::NotOffered { operation: Operation::Vad },
            ApiError::NotOfferedWith {
                operation: Operation::TurnDetection,
                model: "mine".into(),
                offered: vec!["one".into(), "other".into()],
            },
            ApiError::OperationAway { operation: Operation::Asr },
            ApiError::WorkerLost,
            ApiError::NoQuorum,
            ApiError::DeadlineExceeded,
            ApiError::Internal,
            ApiError::from(Failure::Worker(GenerateError::NotFinite)),
            ApiError::from(Failure::Lost),
            ApiError::from(Failure::Worker(GenerateError::Internal)),
            ApiError::from(Failure::Worker(GenerateError::QueueFull)),
        ]
    }

    #[test]
    fn sec_error_bodies() {
        let codes = [
            "invalid_field",
            "method_not_allowed",
            "other_coordinator",
            "origin_not_allowed",
            "context_length_exceeded",
            "model_not_found",
            "invalid_api_key",
            "rate_limited",
            "queue_full",
            "no_worker",
            "model_loading",
            "no_quorum",
            "worker_lost",
            "deadline_exceeded",
            "internal",
        ];
        for error in every() {
            let body = error.body().to_string();
            assert!(codes.contains(&error.code()), "{body}");
            for inside in ["/", "::", ".rs", "panicked", "127.0.0.1", "secret", "spiffe"] {
                assert!(!body.contains(inside), "{body}");
            }
            let (status, response) = (error.status(), error.clone().into_response());
            let retry = response
                .headers()
                .get(header::RETRY_AFTER)
                .and_then(|value| value.to_str().ok()?.parse().ok());
            let retryable = matches!(status, StatusCode::TOO_MANY_REQUESTS)
                || status == StatusCode::SERVICE_UNAVAILABLE && error != ApiError::DeadlineExceeded;
            assert_eq!(retry.is_some_and(|seconds: u64| seconds > 0), retryable, "{error:?}");
            let scheme = response.headers().get(header::WWW_AUTHENTICATE).map(HeaderValue::as_bytes);
            assert_eq!(scheme, (status == StatusCode::UNAUTHORIZED).then_some(&b"Bearer"[..]), "{error:?}");
            if let ApiError::RateLimited(_) = error {
                assert_eq!(retry, Some(2), "not a moment too early");
            }
        }
    }
}
