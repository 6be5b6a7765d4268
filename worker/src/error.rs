//! Errors of a worker.

use crate::engine::thread::{EXIT_BROKEN, EXIT_DEVICE_LOST};
use crate::kv_cache::memory::MemoryRefused;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A kernel or a device failed or refused an operation.
    #[error(transparent)]
    Kernel(#[from] kernels::Error),
    /// The environment selects kernels that are not available.
    #[error(transparent)]
    Backend(#[from] kernels::registry::SelectError),
    /// The model file is not usable.
    #[error(transparent)]
    Model(#[from] model::Error),
    /// The model's tokenizer is not usable.
    #[error(transparent)]
    Text(#[from] text::Error),
    #[error(transparent)]
    Transport(#[from] transport::Error),
    /// The model names a tensor that its source does not have.
    #[error("tensor {name:?} is missing from the model's source")]
    MissingTensor { name: String },
    /// Logits were requested from a layer range without the output head.
    #[error("this layer range does not hold the output head")]
    NoOutputHead,
    /// The model does not support the requested task.
    #[error("this model {does}: {instead}")]
    WrongTask {
        does: &'static str,
        /// What to use instead.
        instead: &'static str,
    },
    /// The KV arena would not hold one sequence, or free memory would fall below the floor.
    #[error("no room for the KV cache: {reason}")]
    KvMemory {
        /// Amounts and limit, as text.
        reason: String,
    },
    /// Less memory than the floor would stay free.
    #[error(transparent)]
    Memory(#[from] MemoryRefused),
    /// An audio model or an ONNX file is not usable, or failed.
    #[error(transparent)]
    Speech(#[from] speech::Error),
    /// A directory is in use by another process or cannot be created.
    #[error(transparent)]
    Directory(#[from] proto::directory::ClaimError),
    /// An option has a value that is not supported.
    #[error("{option}: {reason}")]
    Config {
        option: &'static str,
        /// Value and limit, as text.
        reason: String,
    },
    /// Coordinators sent another cluster key than the one in use.
    #[error("coordinators belong to clusters with different keys: another cluster key is in use here")]
    OtherKey,
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    /// An invariant of caches or tables is broken. The worker stops rather than serve wrong content.
    #[error("invariant broken: {0}")]
    Invariant(String),
    /// The model cannot be cut into that many layer ranges.
    #[error("the model can be cut into at most {most} shards, not {shards}")]
    Shards {
        /// The requested number.
        shards: usize,
        /// The maximum number.
        most: usize,
    },
    /// The model cannot be fetched from other workers.
    #[error(transparent)]
    Shipping(#[from] crate::weight_distribution::ShippingError),
    /// Another stage of the replica is lost.
    #[error(transparent)]
    StageLost(#[from] crate::pipeline::LostStage),
    /// A stage received a request that it cannot execute.
    #[error("a step of the replica failed: {reason}")]
    StageStep {
        /// The request, and what the stage has.
        reason: String,
    },
    /// A coordinator has accepted an epoch that is not the current one.
    #[error("a coordinator accepted epoch {}, which is not the current one", .0.0)]
    AnotherEpoch(proto::ids::Epoch),
    /// The model computed a value that is not finite.
    #[error("the model's {what} not finite: its weights or intermediate values contain NaN or infinity")]
    NotFinite { what: &'static str },
    /// The engine's thread has ended.
    #[error("the engine has stopped")]
    EngineStopped,
}

impl Error {
    /// Whether this process can no longer use the device.
    pub(crate) fn is_device_lost(&self) -> bool {
        matches!(self, Self::Kernel(kernels::Error::DeviceLost { .. }))
    }

    /// Exit code of a process whose engine fails with this error.
    pub(crate) fn exit_code(&self) -> i32 {
        if self.is_device_lost() { EXIT_DEVICE_LOST } else { EXIT_BROKEN }
    }

    /// Whether the cause is the content of a model file, so that the same bytes fail on every worker.
    pub(crate) fn is_of_content(&self) -> bool {
        match self {
            Self::Model(error) => !matches!(
                error,
                model::Error::Io { .. }
                    | model::Error::NotAFile { .. }
                    | model::Error::Shrunk { .. }
                    | model::Error::MissingPart { .. }
            ),
            Self::Text(_) | Self::MissingTensor { .. } | Self::WrongTask { .. } => true,
            Self::StageLost(lost) => {
                matches!(
                    lost.source,
                    transport::Error::StageFailed(proto::stage::StageFailure::BadFile { .. })
                )
            }
            _ => false,
        }
    }
}
