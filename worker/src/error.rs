//! What can go wrong in a worker.

use crate::engine::thread::{EXIT_BROKEN, EXIT_DEVICE_LOST};
use crate::kv_cache::memory::MemoryRefused;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A kernel or device refused or failed.
    #[error(transparent)]
    Kernel(#[from] kernels::Error),
    /// The environment asks for kernels that cannot be had.
    #[error(transparent)]
    Backend(#[from] kernels::registry::SelectError),
    /// The model file is not usable.
    #[error(transparent)]
    Model(#[from] model::Error),
    #[error(transparent)]
    Transport(#[from] proto::Error),
    /// The model names a tensor that its source does not hold.
    #[error("tensor {name:?} is missing from the model's source")]
    MissingTensor { name: String },
    /// Logits were asked of a layer range without the output head.
    #[error("this layer range does not hold the output head")]
    NoOutputHead,
    /// A model is not made for what it is asked.
    #[error("this model {does}: {instead}")]
    WrongTask {
        does: &'static str,
        /// What it can be asked.
        instead: &'static str,
    },
    /// The KV arena would not hold one sequence, or memory would fall below the floor.
    #[error("no room for the KV cache: {reason}")]
    KvMemory {
        /// Figures and limit, in words.
        reason: String,
    },
    /// Less memory would be left than must stay free.
    #[error(transparent)]
    Memory(#[from] MemoryRefused),
    /// A file beside the model is not what it is for.
    #[error("{path}: {reason}")]
    Artefact {
        path: std::path::PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A directory is another process's, or cannot be had.
    #[error(transparent)]
    Directory(#[from] proto::directory::ClaimError),
    /// An option has a value that cannot be served.
    #[error("{option}: {reason}")]
    Config {
        option: &'static str,
        /// Value and limit, in words.
        reason: String,
    },
    /// Coordinators name another key of block ids than the one that everything here is kept under.
    #[error("coordinators belong to clusters with different keys: another cluster key is in use here")]
    OtherKey,
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    /// An invariant of caches or tables does not hold: the worker stops rather than serve wrong content.
    #[error("invariant broken: {0}")]
    Invariant(String),
    /// A model cannot be cut into so many layer ranges.
    #[error("this model can be cut into {most} shards at most, not {shards}")]
    Shards {
        /// How many were asked for.
        shards: usize,
        /// How many there can be.
        most: usize,
    },
    /// A model cannot be had from other workers.
    #[error(transparent)]
    Shipping(#[from] crate::weight_distribution::ShippingError),
    /// Another stage of the replica is gone.
    #[error(transparent)]
    StageLost(#[from] crate::pipeline::LostStage),
    /// A stage is asked for something that it cannot do.
    #[error("a step of a replica: {reason}")]
    StageStep {
        /// What, and what it has.
        reason: String,
    },
    /// A coordinator has accepted a life that this worker does not go on with.
    #[error("epoch {} was accepted, which is not the present one", .0.0)]
    AnotherLife(proto::ids::Epoch),
    /// A model computes what is no number.
    #[error("the model's {what} not finite: its weights, or what was computed of them, hold NaN or infinity")]
    NotFinite { what: &'static str },
    /// The engine thread is gone.
    #[error("the engine has stopped")]
    EngineStopped,
}

impl Error {
    /// Whether the device can do nothing more for this process.
    pub(crate) fn is_device_lost(&self) -> bool {
        let Self::Kernel(kernels::Error::Cuda(error)) = self else { return false };
        matches!(**error, kernels::cuda::CudaError::Lost { .. })
    }

    /// What the process ends with whose engine cannot go on because of it.
    pub(crate) fn exit_code(&self) -> i32 {
        if self.is_device_lost() { EXIT_DEVICE_LOST } else { EXIT_BROKEN }
    }

    /// Whether it comes of what a model file says, so that the same bytes fail wherever they are loaded.
    pub(crate) fn is_of_content(&self) -> bool {
        match self {
            Self::Model(error) => !matches!(
                error,
                model::Error::Io { .. }
                    | model::Error::NotAFile { .. }
                    | model::Error::Shrunk { .. }
                    | model::Error::MissingPart { .. }
            ),
            Self::MissingTensor { .. } | Self::WrongTask { .. } => true,
            Self::StageLost(lost) => {
                matches!(lost.source, proto::Error::StageFailed(proto::stage::StageFailure::BadFile { .. }))
            }
            _ => false,
        }
    }
}
