//! Texts to be encoded and what becomes of them.

use super::GenerateError;
use crate::codec::bounded;
use crate::ids::{Attempt, ModelId, RequestId};
use crate::trace::TraceContext;
use serde::{Deserialize, Serialize};

/// Texts of one encode call at most.
pub const MAX_ENCODE_TEXTS: usize = 256;
/// Values of one encoded text at most.
pub const MAX_ENCODED_WIDTH: u32 = 1 << 14;

/// Texts to be encoded, as a coordinator hands them to a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EncodeRequest {
    /// First version.
    V1(EncodeRequestV1),
    /// Also says in which trace it is; since protocol version 4.
    V2(EncodeRequestV2),
}

impl EncodeRequest {
    /// What is to be encoded.
    pub fn call(&self) -> &EncodeRequestV1 {
        match self {
            Self::V1(call) | Self::V2(EncodeRequestV2 { call, .. }) => call,
        }
    }

    /// As the newest version has it.
    pub fn into_latest(self) -> EncodeRequestV2 {
        match self {
            Self::V1(call) => EncodeRequestV2 { call, trace: None },
            Self::V2(request) => request,
        }
    }
}

/// See [`EncodeRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodeRequestV2 {
    /// What is to be encoded.
    pub call: EncodeRequestV1,
    /// The span that it is below of; none if it is not recorded.
    pub trace: Option<TraceContext>,
}

impl EncodeRequestV2 {
    /// As a peer understands it with whom protocol version `version` was agreed on.
    pub fn at_version(self, version: u16) -> EncodeRequest {
        match version {
            4.. => EncodeRequest::V2(self),
            _ => EncodeRequest::V1(self.call),
        }
    }
}

/// See [`EncodeRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodeRequestV1 {
    /// The client's request.
    pub request_id: RequestId,
    /// Which part of the request, where it is spread over several calls.
    pub part: u32,
    /// Which try at this part it is.
    pub attempt: Attempt,
    /// The model.
    pub model: ModelId,
    /// The texts; at least one, at most [`MAX_ENCODE_TEXTS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_ENCODE_TEXTS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_ENCODE_TEXTS>"
    )]
    pub texts: Vec<EncodeTextV1>,
    /// Milliseconds from receipt until the request is worth nothing any more; 0 is no limit.
    pub deadline_ms: u64,
}

/// A text, or two that are compared, as the model reads it: special tokens included.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodeTextV1 {
    /// The tokens; not empty.
    pub tokens: Vec<u32>,
    /// Where the second text begins, of a model that tells them apart.
    pub segment_start: Option<u32>,
}

/// What a worker answers to an [`EncodeRequest`], once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EncodeReply {
    /// What every text became. The values follow the frame: `texts * width` f32, little endian, text by text.
    Encoded(EncodedV1),
    /// Nothing, and why.
    Failed(GenerateError),
}

/// See [`EncodeReply::Encoded`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodedV1 {
    /// As many as the request has.
    pub texts: u32,
    /// Values of each: a vector's width or the number of scores, at most [`MAX_ENCODED_WIDTH`].
    pub width: u32,
}
