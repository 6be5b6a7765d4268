//! The crate's error type: invalid model files and failing system calls.

use std::io;
use std::path::PathBuf;

use crate::GgmlType;
use crate::gguf::Malformed;

/// Anything that can go wrong between a path and a [`crate::ModelSpec`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Opening, reading or mapping a file failed.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// The failed operation: "open", "map", ...
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The path is a directory, a pipe, a device.
    #[error("{path} is not a regular file")]
    NotAFile { path: PathBuf },
    /// The file is not a valid GGUF.
    #[error("{path}: {source}")]
    Malformed { path: PathBuf, source: Malformed },
    /// The file was truncated while open.
    #[error("{path} was {was} bytes when it was opened and is {now} bytes now")]
    Shrunk {
        path: PathBuf,
        /// Bytes when opened.
        was: u64,
        /// Bytes now.
        now: u64,
    },
    /// The file belongs to a split set, but its name does not reveal the names of the others.
    #[error(
        "{path} is part of a set of {count} files, but is not named PREFIX-{number:05}-of-{count:05}.gguf"
    )]
    SplitName {
        path: PathBuf,
        /// Its number in the set, from 1.
        number: u64,
        count: u64,
    },
    /// A file of a split set is missing.
    #[error("part {number} of {count} is missing: {path}")]
    MissingPart {
        path: PathBuf,
        /// Its number in the set, from 1.
        number: u64,
        count: u64,
    },
    /// A file of a split set contradicts the set.
    #[error("{path}: {key} is {found}, but {expected} in the other files of the set")]
    SplitMismatch {
        path: PathBuf,
        /// `split.no`, `split.count` or `split.tensors.count`.
        key: &'static str,
        /// The value in the file, or the actual count.
        found: u64,
        expected: u64,
    },
    /// A key is absent or has the wrong type.
    #[error(transparent)]
    Key(#[from] metadata::KeyError),
    /// The requested tensor is absent.
    #[error("the file has no tensor {tensor}")]
    MissingTensor { tensor: String },
    /// No translator supports this architecture.
    #[error("architecture {found:?} is not supported; supported are {}", supported.join(", "))]
    UnknownArch {
        /// Value of `general.architecture`.
        found: String,
        supported: Vec<&'static str>,
    },
    /// A hyper-parameter is out of range, contradicts another one, or requests something unsupported.
    #[error("{key} is {found}, expected {needs}")]
    HyperParameter { key: String, found: String, needs: String },
    /// A tensor's dimensions do not match the hyper-parameters.
    #[error("tensor {tensor} has dimensions {found:?}, expected {expected:?}")]
    TensorShape {
        tensor: String,
        /// Its dimensions without trailing ones.
        found: Vec<u64>,
        expected: Vec<u64>,
    },
    /// A tensor has the wrong type.
    #[error("tensor {tensor} is {found}, expected {expected}")]
    TensorType { tensor: String, found: GgmlType, expected: GgmlType },
    /// The file has a tensor that the architecture's translator does not use.
    #[error("architecture {arch} has no tensor {tensor}")]
    UnusedTensor { tensor: String, arch: String },
    /// A read reaches past the end of a tensor.
    #[error("cannot read {len} bytes from offset {offset} of tensor {tensor}, which has {bytes}")]
    TensorRange {
        tensor: String,
        offset: u64,
        /// Bytes requested.
        len: u64,
        /// Length of the tensor in bytes.
        bytes: u64,
    },
    /// The model's manifest cannot be built.
    #[error(transparent)]
    Manifest(#[from] crate::shard::ManifestError),
    /// The model's chunks cannot be read from the store.
    #[error(transparent)]
    Store(#[from] crate::shard::StoreError),
    /// A zero point of a matrix whose configuration says that it is symmetric.
    #[error(
        "tensor {tensor} has the zero point {found}, but its configuration says that it is symmetric (8, or 128 of 8 bits)"
    )]
    ZeroPoint { tensor: String, found: u8 },
    /// A code that is no number.
    #[error("tensor {tensor} has a value that is not a number")]
    NotANumber { tensor: String },
    /// A safetensors checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] crate::checkpoint::CheckpointError),
}
