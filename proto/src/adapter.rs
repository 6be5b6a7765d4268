//! LoRA adapters: what workers report of them, and the orders to load and to unload them.

use crate::codec::bounded;
use crate::ids::{Epoch, ModelId};
use serde::{Deserialize, Serialize};

/// Most adapters of one worker.
pub const MAX_ADAPTERS: usize = 256;
/// Longest path of an adapter, in bytes.
pub const MAX_ADAPTER_PATH: usize = 4096;

/// An adapter that a worker serves as a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedAdapter {
    /// Name of the model in the API.
    pub name: ModelId,
    /// The model that it adds to.
    pub parent: ModelId,
    /// Digest of the parent with the adapter; part of every block root, and the model of generate requests:
    /// [`ModelId::of_adapter`].
    pub digest: [u8; 32],
    pub rank: u32,
    /// Folder on the worker's host.
    pub path: String,
    /// Loaded by [`AdapterOrder`], not at the worker's start.
    pub ordered: bool,
}

/// All adapters of a worker. It replaces the report before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterReport {
    /// Epoch of this run of the process.
    pub epoch: Epoch,
    /// At most [`MAX_ADAPTERS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_ADAPTERS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_ADAPTERS>"
    )]
    pub adapters: Vec<OfferedAdapter>,
}

/// Order to load an adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterOrder {
    pub name: ModelId,
    /// The worker must serve this model.
    pub parent: ModelId,
    /// Folder on the worker's host; at most [`MAX_ADAPTER_PATH`] bytes.
    pub path: String,
}

/// Why a worker did not follow an order about an adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum AdapterRefusal {
    /// The adapter to unload is not loaded.
    #[error("there is no adapter {0}")]
    Unknown(ModelId),
    /// The files cannot be used, a limit would be exceeded, or the worker serves no adapters.
    #[error("{reason}")]
    Refused { reason: String },
}
