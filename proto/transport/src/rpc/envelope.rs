//! Wire form of RPC calls and replies. A frame is a [`RequestHead`] or a [`ResponseHead`], followed by the
//! body if there is one.

use proto::codec::{self, Cap, CodecError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;
use std::time::{Duration, Instant};
use tarpc::trace::SamplingDecision;
use tarpc::{ClientMessage, Response, ServerError};

/// Longest deadline of a call.
const MAX_DEADLINE: Duration = Duration::from_secs(600);

/// Head of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum RequestHead {
    /// A call; its body follows.
    Call { id: u64, deadline_ms: u64, trace: RpcTrace },
    /// Cancels a call; no body.
    Cancel { id: u64, trace: RpcTrace },
}

/// Head of a reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum ResponseHead {
    Done {
        id: u64,
    },
    /// The call was not executed, or its result cannot be sent; no body.
    Failed {
        id: u64,
        failure: RpcFailure,
        detail: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct RpcTrace {
    trace: u128,
    span: u64,
    sampled: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum RpcFailure {
    UnknownMethod,
    Malformed,
    Throttled,
    TooLong,
    Other,
}

impl RpcFailure {
    fn of(kind: io::ErrorKind) -> Self {
        match kind {
            io::ErrorKind::Unsupported => Self::UnknownMethod,
            io::ErrorKind::InvalidData => Self::Malformed,
            io::ErrorKind::WouldBlock => Self::Throttled,
            io::ErrorKind::FileTooLarge => Self::TooLong,
            _ => Self::Other,
        }
    }

    fn kind(self) -> io::ErrorKind {
        match self {
            Self::UnknownMethod => io::ErrorKind::Unsupported,
            Self::Malformed => io::ErrorKind::InvalidData,
            Self::Throttled => io::ErrorKind::WouldBlock,
            Self::TooLong => io::ErrorKind::FileTooLarge,
            Self::Other => io::ErrorKind::Other,
        }
    }
}

impl From<&tarpc::trace::Context> for RpcTrace {
    fn from(context: &tarpc::trace::Context) -> Self {
        Self {
            trace: context.trace_id.into(),
            span: context.span_id.into(),
            sampled: context.sampling_decision == SamplingDecision::Sampled,
        }
    }
}

impl From<RpcTrace> for tarpc::trace::Context {
    fn from(trace: RpcTrace) -> Self {
        let sampling_decision =
            if trace.sampled { SamplingDecision::Sampled } else { SamplingDecision::Unsampled };
        Self { trace_id: trace.trace.into(), span_id: trace.span.into(), sampling_decision }
    }
}

fn milliseconds(duration: Duration) -> u64 {
    duration.as_millis().try_into().unwrap_or(u64::MAX)
}

pub(super) fn encode_request<Req: Serialize>(
    message: &ClientMessage<Req>,
    now: Instant,
) -> Result<Vec<u8>, CodecError> {
    match message {
        ClientMessage::Request(request) => {
            let head = RequestHead::Call {
                id: request.id,
                deadline_ms: milliseconds(request.context.deadline.saturating_duration_since(now)),
                trace: (&request.context.trace_context).into(),
            };
            encode_pair(&head, &request.message)
        }
        ClientMessage::Cancel { trace_context, request_id } => {
            codec::encode(&RequestHead::Cancel { id: *request_id, trace: trace_context.into() }, Cap::Control)
        }
        _ => Err(CodecError::Invalid { message: "ClientMessage", reason: "of a later tarpc".into() }),
    }
}

/// Encodes head and body. Together they must fit one frame's cap.
fn encode_pair<H: Serialize, B: Serialize>(head: &H, body: &B) -> Result<Vec<u8>, CodecError> {
    let mut frame = codec::encode(head, Cap::Control)?;
    codec::encode_into(body, Cap::Control, &mut frame)?;
    let (len, cap) = (frame.len(), Cap::Control.bytes());
    if len > cap {
        return Err(CodecError::TooLong { message: std::any::type_name::<B>(), len, cap });
    }
    Ok(frame)
}

/// Result of decoding a frame.
#[derive(Debug)]
pub(super) enum Decoded<T> {
    Item(T),
    /// A call that does not decode, with the reply that reports this to the caller.
    Refused(Vec<u8>),
}

pub(super) fn decode_request<Req: DeserializeOwned>(
    frame: &[u8],
    now: Instant,
) -> Result<Decoded<ClientMessage<Req>>, CodecError> {
    let (head, body) = codec::decode_prefix(frame, Cap::Control)?;
    match head {
        RequestHead::Call { id, deadline_ms, trace } => match codec::decode(body, Cap::Control) {
            Ok(message) => {
                let mut context = tarpc::context::current();
                context.deadline = now + Duration::from_millis(deadline_ms).min(MAX_DEADLINE);
                context.trace_context = trace.into();
                Ok(Decoded::Item(ClientMessage::Request(tarpc::Request { context, id, message })))
            }
            Err(error) => encode_failure(id, kind_of(&error), error.to_string()).map(Decoded::Refused),
        },
        RequestHead::Cancel { id, trace } => {
            Ok(Decoded::Item(ClientMessage::Cancel { trace_context: trace.into(), request_id: id }))
        }
    }
}

fn encode_failure(id: u64, kind: io::ErrorKind, detail: String) -> Result<Vec<u8>, CodecError> {
    codec::encode(&ResponseHead::Failed { id, failure: RpcFailure::of(kind), detail }, Cap::Control)
}

/// Encodes a reply. A result that does not fit a frame fails its own call, not the channel.
pub(super) fn encode_response<Resp: Serialize>(response: &Response<Resp>) -> Result<Vec<u8>, CodecError> {
    let id = response.request_id;
    match &response.message {
        Ok(body) => match encode_pair(&ResponseHead::Done { id }, body) {
            Err(error) => encode_failure(id, kind_of(&error), error.to_string()),
            frame => frame,
        },
        Err(error) => encode_failure(id, error.kind, error.detail.chars().take(1000).collect()),
    }
}

pub(super) fn decode_response<Resp: DeserializeOwned>(frame: &[u8]) -> Result<Response<Resp>, CodecError> {
    let (head, body) = codec::decode_prefix(frame, Cap::Control)?;
    let (request_id, message) = match head {
        // A reply that does not decode fails only its own call.
        ResponseHead::Done { id } => match codec::decode(body, Cap::Control) {
            Ok(message) => (id, Ok(message)),
            Err(error) => (id, Err(ServerError::new(kind_of(&error), error.to_string()))),
        },
        ResponseHead::Failed { id, failure, detail } => (id, Err(ServerError::new(failure.kind(), detail))),
    };
    Ok(Response { request_id, message })
}

fn kind_of(error: &CodecError) -> io::ErrorKind {
    match error {
        CodecError::UnknownVariant { .. } => io::ErrorKind::Unsupported,
        CodecError::TooLong { .. } => io::ErrorKind::FileTooLarge,
        CodecError::CutShort { .. } | CodecError::Trailing { .. } | CodecError::Invalid { .. } => {
            io::ErrorKind::InvalidData
        }
    }
}

#[cfg(test)]
mod tests;
