//! Models that a worker loads by order: a coordinator states which models a worker should hold and in which state, and
//! the worker reports how far it is. Each model that is ready registers as an instance of the worker:
//! [`NodeId::instance`](crate::ids::NodeId::instance).

use crate::codec::bounded;
use crate::ids::{Epoch, ModelId};
use crate::placement::Lead;
use crate::served_model::{MAX_MODELS, ModelTask};
use serde::{Deserialize, Serialize};

/// Longest path or address of a source, in bytes.
pub const MAX_SOURCE: usize = 4096;
/// Most labels of a worker.
pub const MAX_LABELS: usize = 32;
/// Longest label, in bytes.
pub const MAX_LABEL: usize = 128;
/// Most addresses of holders of one model.
pub const MAX_SOURCES: usize = 16;

/// Origin of a model's files.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ModelSource {
    /// A path on the workers. A worker that lacks the file fetches the model's chunks from other workers.
    File(String),
    /// A catalog name, or an `https://` or `hf://` address.
    Fetch(String),
}

impl ModelSource {
    /// The path or address.
    pub fn as_str(&self) -> &str {
        match self {
            Self::File(text) | Self::Fetch(text) => text,
        }
    }
}

/// A worker that loads models by order. Sent after the registration and when the values change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostReport {
    /// Epoch of the worker's own registration.
    pub epoch: Epoch,
    /// Bytes for weights, caches and scratch of all models together.
    pub budget: u64,
    /// Engine that computes the models, one of [`ENGINES`](crate::served_model::ENGINES).
    pub engine: String,
    /// Speed at which it computes stages of models on several workers; `None` if it takes none.
    pub stages: Option<StageSpeed>,
    /// `key=value`, at most [`MAX_LABELS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_LABELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_LABELS>"
    )]
    pub labels: Vec<String>,
}

/// Speed of a worker, by which the layers of a model are divided among several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageSpeed {
    /// Bytes per second that decode steps read.
    pub bandwidth: u64,
    /// Multiply-adds per second of prefill steps.
    pub compute: u64,
}

/// State of a model that an order asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum WantedState {
    /// The files are found or fetched, and [`ModelFacts`] reported. Nothing is loaded.
    Identified,
    /// The model takes no requests. Its caches and device memory are given back; its weights may stay in host
    /// memory as far as the budget allows.
    Asleep,
    /// The model is loaded and takes requests.
    Ready,
}

/// A model that a worker should hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderedModel {
    /// Name under which the instance registers.
    pub model: ModelId,
    pub source: ModelSource,
    /// Digest that the files must have. `None` only with [`WantedState::Identified`].
    pub digest: Option<[u8; 32]>,
    pub wanted: WantedState,
    /// Longest sequence, in tokens; 0 is the model's own limit.
    pub context: u32,
    /// While asleep, the weights stay in host memory as long as no model that is wanted ready needs the room.
    pub pin: bool,
    /// Weight of the model in the device's turns; 0 counts as 1.
    pub priority: u32,
    /// Addresses, `ip:port`, of other workers that have the files; at most [`MAX_SOURCES`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SOURCES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SOURCES>"
    )]
    pub holders: Vec<String>,
}

/// Order of a coordinator to a worker that loads models by order. It states the full wanted state and is sent
/// repeatedly. A model that is no longer listed finishes its requests and is unloaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelsOrder {
    /// Index up to which the coordinator has applied the Raft log. Of two orders, the one with the higher version
    /// holds.
    pub version: u64,
    /// At most [`MAX_MODELS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_MODELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_MODELS>"
    )]
    pub models: Vec<OrderedModel>,
    /// Replica over several workers whose first stage this worker is.
    pub lead: Option<Lead>,
}

/// Reply to a [`ModelsOrder`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelsReport {
    /// That of the order which the report is about. The reply to an order may still be about an earlier one.
    pub version: u64,
    /// Bytes for weights, caches and scratch of all models together.
    pub budget: u64,
    /// Bytes that all models hold, the worker's own model included.
    pub used: u64,
    /// Bytes that the worker's own model holds and does not give back.
    pub own: u64,
    /// At most [`MAX_MODELS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_MODELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_MODELS>"
    )]
    pub models: Vec<ModelReport>,
}

/// A model of an order, as the worker has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelReport {
    pub model: ModelId,
    pub state: ModelState,
    /// Thousandths of the bytes of the present stage that are done.
    pub permille: u16,
    /// Estimated milliseconds until the model is ready; 0 if unknown.
    pub eta_ms: u32,
    /// Number of failed attempts to reach the wanted state.
    pub failures: u32,
    /// Why the last attempt failed; empty if none failed.
    pub reason: String,
    /// Bytes that the model holds.
    pub bytes: u64,
    /// Milliseconds since the last request ended; 0 while one runs, and for a model that is not ready.
    pub idle_ms: u64,
    /// Whether the files are complete on this host.
    pub has_files: bool,
    /// Known once the files are found.
    pub facts: Option<ModelFacts>,
}

/// State of a model at a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelState {
    Absent,
    /// Files are fetched or read for their digest.
    Fetching,
    /// Weights are read and converted.
    Loading,
    /// Weights come back to the device.
    Waking,
    Ready,
    Asleep,
    /// The last attempt failed; the worker tries again.
    Failed,
    /// The files cannot be loaded, or have another digest. No attempt follows until the order changes.
    BadFile,
}

impl ModelState {
    pub fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Fetching => "fetching",
            Self::Loading => "loading",
            Self::Waking => "waking",
            Self::Ready => "ready",
            Self::Asleep => "asleep",
            Self::Failed => "failed",
            Self::BadFile => "bad_file",
        }
    }
}

/// Content of a model's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelFacts {
    pub digest: [u8; 32],
    pub tokenizer_digest: [u8; 32],
    pub task: ModelTask,
    /// The model's longest sequence, in tokens.
    pub context: u32,
    /// Bytes that the loaded model needs at least on the worker that reports: weights, scratch and the smallest
    /// cache.
    pub needed_bytes: u64,
}
