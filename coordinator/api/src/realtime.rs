//! Sessions of operations over a WebSocket: `GET /v1/realtime/vad`, `turn_detection`, `wakeword`, `speaker`,
//! `diarization`, `asr`
//! ([decision 46](../../../docs/decisions/0046-serve-sessions-over-websockets.md)).
//!
//! The session is opened at a worker before the WebSocket is, so that a refusal is an HTTP status. Then one
//! task forwards audio in one direction and results in the other, each as fast as its reader. A slow reader
//! costs one buffered message here, and the windows of QUIC and of the kernel.

mod event;
mod references;
mod session;

use super::auth::Caller;
use super::error::ApiError;
use super::operations::{Encoding, Query, Sessions, Slot, refused, session_headers};
use super::{AppState, Endpoint, spans};
use crate::http_ext::ConnectionPermit;
use axum::body::Body;
use axum::extract::Request;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::Response;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use dispatch::quota::Permit;
use dispatch::{OpenedSession, OperationJob, Seating};
use proto::ids::{ModelId, NodeId, RequestId};
use proto::operation::{OpenedOperation, Operation};
use proto::trace::Span;
use session::Session;
use sha1::{Digest, Sha1};
use std::sync::Arc;
use std::time::{Duration, Instant};
use transport::{OperationSender, OperationStream};

/// The only protocol version.
const VERSION: &str = "13";
/// Appended to the handshake's key; the response has the digest of both.
const GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
/// Characters of the handshake's key: 16 bytes in base64.
const KEY_CHARS: usize = 24;

/// Limits on the number and the length of sessions.
#[derive(Debug)]
pub struct SessionLimits {
    pub sessions: Arc<Sessions>,
    /// A session without a message for this long ends.
    pub idle: Duration,
    /// Longest session.
    pub longest: Duration,
}

/// The resources of an open session.
#[derive(Debug)]
struct Opened {
    state: Arc<AppState>,
    operation: Operation,
    encoding: Encoding,
    /// Least cosine of a speaker's references; `None` is the model's.
    cosine: Option<f32>,
    id: RequestId,
    caller: Caller,
    connection: ConnectionPermit,
    /// The worker, and its reply to the opening.
    node: NodeId,
    reply: OpenedOperation,
    /// `None` once taken, at the start of the session.
    streams: Option<(OperationSender, OperationStream)>,
    seat: Seating,
    trace: Option<Span>,
    _permit: Permit,
    _slot: Slot,
}

/// Opens a session and responds with the WebSocket.
pub(super) async fn open(
    state: Arc<AppState>,
    operation: Operation,
    mut request: Request,
) -> Result<Response, ApiError> {
    let mut trace = spans::receive(operation.name(), request.headers());
    let answered = async {
        let accept = handshake(request.method(), request.headers())?;
        // Inserted by hyper.
        let upgrade = hyper::upgrade::on(&mut request);
        let (head, _) = request.into_parts();
        let opened = begin(state, operation, &head, &mut trace).await?;
        let names = session_headers(&opened.node, &opened.reply);
        tokio::spawn(Session::run(opened, upgrade));
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
        headers.extend(names);
        Ok(response)
    }
    .await;
    if let (Err(error), Some(span)) = (&answered, &mut trace) {
        spans::failed(span, error);
    }
    answered
}

/// Opens a session at a worker. Takes the span out of `trace` on success.
async fn begin(
    state: Arc<AppState>,
    operation: Operation,
    request: &Parts,
    trace: &mut Option<Span>,
) -> Result<Opened, ApiError> {
    let arrived = Instant::now();
    // Inserted by `serve` and by the listener.
    let caller = request.extensions.get::<Caller>().cloned().ok_or(ApiError::InvalidApiKey)?;
    let id = request.extensions.get::<RequestId>().cloned().ok_or(ApiError::Internal)?;
    let connection = request.extensions.get::<ConnectionPermit>().cloned().ok_or(ApiError::Internal)?;
    let query = Query::read(&request.uri)?;
    let job = OperationJob {
        request_id: id.clone(),
        operation,
        model: query.model()?,
        backend: query.backend(),
        sample_rate: query.sample_rate()?,
        options: query.options(operation)?,
        trace: trace.as_ref().map(Span::context),
        tenant: Arc::clone(caller.tenant()),
        key: caller.key_id().map(str::to_owned),
    };
    let encoding = query.encoding()?;
    let cosine = if operation == Operation::Speaker { query.cosine()? } else { None };
    let limited = |error: &ApiError| error.count_limit(&state.metrics);
    let permit = caller.enter(arrived).inspect_err(limited)?;
    let slot = state.realtime.sessions.enter(caller.tenant()).map_err(ApiError::from);
    let slot = slot.inspect_err(limited)?;
    let opens = |model: &ModelId| caller.may_use(model);
    let opening = state.dispatch.open_operation(&job, &opens).await;
    let OpenedSession { node, opened: reply, sender, answers, seat } =
        opening.map_err(|why| refused(operation, job.model.as_ref(), why))?;
    state.metrics.operations().opened(operation, arrived.elapsed());
    if let Some(span) = trace {
        spans::session_opened(span, operation, (&id, &reply.model), &node, &reply.backend);
        span.part("open", arrived);
    }
    let trace = trace.take();
    Ok(Opened {
        state,
        operation,
        encoding,
        cosine,
        id,
        caller,
        connection,
        node,
        reply,
        streams: Some((sender, answers)),
        seat,
        trace,
        _permit: permit,
        _slot: slot,
    })
}

/// Checks a WebSocket handshake and returns `sec-websocket-accept` (RFC 6455, section 4.2).
fn handshake(method: &Method, headers: &HeaderMap) -> Result<HeaderValue, ApiError> {
    let has_token = |name: HeaderName, word: &str| {
        let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).any(|token| token.trim().eq_ignore_ascii_case(word))
    };
    // The router also passes HEAD on.
    if *method != Method::GET {
        return Err(Endpoint::Realtime(Operation::Vad).method_not_allowed());
    }
    if !has_token(header::CONNECTION, "upgrade") || !has_token(header::UPGRADE, "websocket") {
        return Err(ApiError::field(
            "upgrade",
            "only WebSockets are served here, and the request is no WebSocket upgrade",
        ));
    }
    if !has_token(header::SEC_WEBSOCKET_VERSION, VERSION) {
        return Err(ApiError::field("sec-websocket-version", "is not 13"));
    }
    let key = headers.get(header::SEC_WEBSOCKET_KEY).map(HeaderValue::as_bytes);
    let key = key.filter(|key| key.len() == KEY_CHARS);
    let key = key.ok_or_else(|| ApiError::field("sec-websocket-key", "is not 16 bytes in base64"))?;
    let digest = Sha1::new().chain_update(key).chain_update(GUID).finalize();
    HeaderValue::from_str(&STANDARD.encode(digest)).map_err(|_| ApiError::Internal)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
    }

    #[test]
    fn a_handshake_is_answered_or_refused_by_its_field() {
        let whole = [
            (header::CONNECTION, "keep-alive, Upgrade"),
            (header::UPGRADE, "WebSocket"),
            (header::SEC_WEBSOCKET_VERSION, VERSION),
            // The example of RFC 6455.
            (header::SEC_WEBSOCKET_KEY, "dGhlIHNhbXBsZSBub25jZQ=="),
        ];
        let answer = handshake(&Method::GET, &headers(&whole)).unwrap();
        assert_eq!(answer, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        let head = handshake(&Method::HEAD, &headers(&whole));
        assert_eq!(head, Err(ApiError::Method { allow: "GET, OPTIONS" }));
        for (at, field) in
            ["upgrade", "upgrade", "sec-websocket-version", "sec-websocket-key"].iter().enumerate()
        {
            let mut torn = whole.to_vec();
            torn[at].1 = "other";
            match handshake(&Method::GET, &headers(&torn)) {
                Err(ApiError::InvalidField { field: named, .. }) => assert_eq!(named, *field),
                other => panic!("{other:?}"),
            }
        }
    }
}
