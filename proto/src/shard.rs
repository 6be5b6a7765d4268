//! What a worker asks of another that holds a model's bytes: its manifest, or chunks by their names. One request is one
//! stream: a [`ShardRequest`] goes one way; [`ShardFrame`]s come back, in the order of what was asked for, the bytes of
//! each behind its frame.
//!
//! Nothing that comes back is believed: a manifest is checked against the model's digest, a chunk against its name.

use crate::codec::bounded;
use crate::ids::{ModelId, NodeId};
use serde::{Deserialize, Serialize};

/// Chunks that one request names at most.
pub const MAX_CHUNKS: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ShardRequest {
    /// The manifest of a model.
    Manifest(ModelRef),
    /// Chunks, whatever model they are of.
    Chunks(ChunkRequest),
}

/// A model that somebody holds.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ModelRef {
    Digest([u8; 32]),
    /// By the name under which the worker that is asked serves it.
    Named(ModelId),
}

/// See [`ShardRequest::Chunks`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkRequest {
    /// Their names: BLAKE3 of their bytes. At most [`MAX_CHUNKS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_CHUNKS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_CHUNKS>"
    )]
    pub names: Vec<[u8; 32]>,
}

/// What comes back, for everything that was asked for, in that order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ShardFrame {
    /// So many bytes of it follow the frame: all that there are.
    Bytes(u32),
    /// It is not held here.
    NotHeld,
    Failed(ShardRefusal),
}

/// Why a worker sends nothing, or nothing more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
pub enum ShardRefusal {
    /// It sends to as many others already as it may.
    #[error("it sends to too many others")]
    Busy,
    #[error("internal error")]
    Internal,
}

/// Sources that a report names at most.
pub const MAX_STRUCK: usize = 256;

/// How far a worker is with getting its model from others, as coordinators are told.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShippingReport {
    /// Bytes of chunks that belong to it; 0 where the model is a file.
    pub wanted: u64,
    /// Bytes of these that it has.
    pub present: u64,
    /// Workers that it does not ask any more, since they have sent other bytes than chunks' names say. At most
    /// [`MAX_STRUCK`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_STRUCK>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_STRUCK>"
    )]
    pub struck: Vec<NodeId>,
}
