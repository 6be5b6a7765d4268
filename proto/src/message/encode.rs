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
pub struct EncodeRequest {
    pub request_id: RequestId,
    /// Which part of the request, where it is spread over several calls.
    pub part: u32,
    /// Which try at this part it is.
    pub attempt: Attempt,
    pub model: ModelId,
    /// The texts; at least one, at most [`MAX_ENCODE_TEXTS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_ENCODE_TEXTS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_ENCODE_TEXTS>"
    )]
    pub texts: Vec<EncodeText>,
    /// Milliseconds from receipt until the request is worth nothing any more; 0 is no limit.
    pub deadline_ms: u64,
    /// The span that it is below of; none if it is not recorded.
    pub trace: Option<TraceContext>,
}

/// A text, or two that are compared, as the model reads it: special tokens included.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodeText {
    /// The tokens; not empty.
    pub tokens: Vec<u32>,
    /// Where the second text begins, of a model that tells them apart.
    pub segment_start: Option<u32>,
}

/// What a worker answers to an [`EncodeRequest`], once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EncodeReply {
    /// What every text became. The values follow the frame: `texts * width` f32, little endian, text by text.
    Encoded(EncodedHead),
    Failed(GenerateError),
}

/// See [`EncodeReply::Encoded`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodedHead {
    /// As many as the request has.
    pub texts: u32,
    /// Values of each: a vector's width or the number of scores, at most [`MAX_ENCODED_WIDTH`].
    pub width: u32,
}
