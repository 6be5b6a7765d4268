//! Weight distribution: a worker requests a model's manifest, or chunks by their names, from another
//! worker. One request is one stream: a [`ShardRequest`], and back [`ShardFrame`]s in the order of the
//! request, the bytes of each after its frame.
//!
//! The receiver trusts no reply: it checks a manifest against the model's digest and a chunk against its
//! name.

use crate::codec::bounded;
use crate::ids::{ModelId, NodeId};
use serde::{Deserialize, Serialize};

/// Most chunks of one request.
pub const MAX_CHUNKS: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ShardRequest {
    /// The manifest of a model.
    Manifest(ModelRef),
    /// Chunks of any models.
    Chunks(ChunkRequest),
}

/// Reference to a model.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ModelRef {
    Digest([u8; 32]),
    /// Name under which the requested worker serves the model.
    Named(ModelId),
}

/// See [`ShardRequest::Chunks`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkRequest {
    /// Names of the chunks: BLAKE3 of their bytes. At most [`MAX_CHUNKS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_CHUNKS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_CHUNKS>"
    )]
    pub names: Vec<[u8; 32]>,
}

/// Reply for one requested item. There is one frame for each item, in the order of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ShardFrame {
    /// The complete item follows the frame: this number of bytes.
    Bytes(u32),
    /// The worker does not hold the item.
    NotHeld,
    Failed(ShardRefusal),
}

/// Reason why a worker sends nothing, or nothing more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
pub enum ShardRefusal {
    /// The worker sends to its maximum number of receivers.
    #[error("the source already serves its limit of requests")]
    Busy,
    #[error("internal error")]
    Internal,
}

/// Most sources that a report lists.
pub const MAX_STRUCK: usize = 256;

/// Progress of a worker's model download from other workers, as reported to coordinators.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShippingReport {
    /// Bytes of all chunks of the model; 0 if the model is a local file.
    pub wanted: u64,
    /// Bytes of these chunks that the worker has.
    pub present: u64,
    /// Workers that are no longer used as a source because they sent chunks with wrong bytes. At most
    /// [`MAX_STRUCK`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_STRUCK>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_STRUCK>"
    )]
    pub struck: Vec<NodeId>,
}
