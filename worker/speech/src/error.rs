//! Errors of audio models and of the ONNX runtime.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A kernel failed or refused an operation.
    #[error(transparent)]
    Kernel(#[from] kernels::Error),
    /// No backend can serve the operation, or the environment selects one that cannot.
    #[error(transparent)]
    Backend(#[from] kernels::registry::SelectError),
    /// A model's file is not usable.
    #[error("{path}: {reason}")]
    Artefact {
        path: PathBuf,
        /// The fault of the file.
        reason: String,
    },
    /// An option has a value that is not supported.
    #[error("{option}: {reason}")]
    Config {
        option: &'static str,
        /// Value and limit, as text.
        reason: String,
    },
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    /// Another program failed.
    #[error("{program}: {reason}")]
    Program { program: &'static str, reason: String },
    /// The model computed a value that is not finite.
    #[error("the model's {what} not finite: its weights or intermediate values contain NaN or infinity")]
    NotFinite { what: &'static str },
    /// The model panicked in this session, or its thread has ended.
    #[error("the session is lost: its model panicked, or the model's thread has ended")]
    SessionLost,
}
