//! Requests to encode texts, and their replies.

use super::GenerateError;
use crate::codec::bounded;
use crate::ids::{Attempt, ModelId, RequestId};
use crate::trace::TraceContext;
use serde::{Deserialize, Serialize};

/// Most texts of one encode call.
pub const MAX_ENCODE_TEXTS: usize = 256;
/// Most values of one encoded text.
pub const MAX_ENCODED_WIDTH: u32 = 1 << 14;

/// Texts to encode, as a coordinator sends them to a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodeRequest {
    pub request_id: RequestId,
    /// Number of the part, if the request is spread over several calls.
    pub part: u32,
    /// Number of the attempt at this part.
    pub attempt: Attempt,
    pub model: ModelId,
    /// At least one, at most [`MAX_ENCODE_TEXTS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_ENCODE_TEXTS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_ENCODE_TEXTS>"
    )]
    pub texts: Vec<EncodeText>,
    /// Milliseconds from receipt until the result is no longer needed; 0 is no limit.
    pub deadline_ms: u64,
    /// Parent span. `None` if the request is not recorded.
    pub trace: Option<TraceContext>,
}

/// One text, or two texts to compare, as the model's input with special tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodeText {
    /// Not empty.
    pub tokens: Vec<u32>,
    /// Index of the second text's first token, for models with segment ids.
    pub segment_start: Option<u32>,
}

/// Reply of a worker to an [`EncodeRequest`]; sent once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EncodeReply {
    /// All texts are encoded. The values follow the frame: `[texts, width]` f32, little endian, text by
    /// text.
    Encoded(EncodedHead),
    Failed(GenerateError),
}

/// See [`EncodeReply::Encoded`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodedHead {
    /// Number of texts, as in the request.
    pub texts: u32,
    /// Values per text: the vector's width or the number of scores, at most [`MAX_ENCODED_WIDTH`].
    pub width: u32,
}
