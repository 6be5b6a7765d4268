//! Errors of an engine.

use crate::engine::thread::{EXIT_BROKEN, EXIT_DEVICE_LOST};
use crate::executor::LostStage;
use crate::kv_cache::memory::MemoryRefused;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A kernel or a device failed or refused an operation.
    #[error(transparent)]
    Kernel(#[from] kernels::Error),
    /// The model file is not usable.
    #[error(transparent)]
    Model(#[from] model::Error),
    /// The model names a tensor that its source does not have.
    #[error("tensor {name:?} is missing from the model's source")]
    MissingTensor { name: String },
    /// Logits were requested from a layer range without the output head.
    #[error("this layer range does not hold the output head")]
    NoOutputHead,
    /// The KV arena would not hold one sequence, or free memory would fall below the floor.
    #[error("no room for the KV cache: {reason}")]
    KvMemory {
        /// Amounts and limit, as text.
        reason: String,
    },
    /// Less memory than the floor would stay free.
    #[error(transparent)]
    Memory(#[from] MemoryRefused),
    /// An ONNX file or an audio model is not usable, or failed.
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
    /// An adapter that cannot be loaded.
    #[error("adapter {name}: {reason}")]
    Adapter {
        name: String,
        /// Value and limit, as text.
        reason: String,
    },
    /// Pixels that the vision tower does not serve.
    #[error("image: {reason}")]
    Image {
        /// Value and limit, as text.
        reason: String,
    },
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    /// An invariant of caches or tables is broken. The worker stops rather than serve wrong content.
    #[error("invariant broken: {0}")]
    Invariant(String),
    /// Another stage of the replica is lost.
    #[error(transparent)]
    StageLost(#[from] LostStage),
    /// A stage received a request that it cannot execute.
    #[error("a step of the replica failed: {reason}")]
    StageStep {
        /// The request, and what the stage has.
        reason: String,
    },
    /// The load was no longer wanted.
    #[error("the load was cancelled")]
    LoadCancelled,
    /// The engine's thread has ended.
    #[error("the engine has stopped")]
    EngineStopped,
}

impl Error {
    /// Whether this process can no longer use the device.
    pub fn is_device_lost(&self) -> bool {
        matches!(self, Self::Kernel(kernels::Error::DeviceLost { .. }))
    }

    /// Exit code of a process whose engine fails with this error.
    pub fn exit_code(&self) -> i32 {
        if self.is_device_lost() { EXIT_DEVICE_LOST } else { EXIT_BROKEN }
    }

    /// Whether the cause is the content of a model file, so that the same bytes fail on every worker.
    pub fn is_of_content(&self) -> bool {
        match self {
            Self::Model(error) => !matches!(
                error,
                model::Error::Io { .. }
                    | model::Error::NotAFile { .. }
                    | model::Error::Shrunk { .. }
                    | model::Error::MissingPart { .. }
            ),
            Self::MissingTensor { .. } => true,
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
