//! The crate's error: what a model file, or the system under it, did wrong.

use std::io;
use std::path::PathBuf;

use crate::GgmlType;
use crate::gguf::Malformed;

/// Anything that can go wrong between a path and a [`crate::ModelSpec`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refused to open, read or map a file.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried: "open", "map", ...
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The path is a directory, a pipe, a device.
    #[error("{path} is not a regular file")]
    NotAFile { path: PathBuf },
    /// The file is not a GGUF that this reader accepts.
    #[error("{path}: {source}")]
    Malformed {
        path: PathBuf,
        /// What is wrong with it.
        source: Malformed,
    },
    /// The file became shorter while it was open.
    #[error("{path} was {was} bytes when it was opened and is {now} bytes now")]
    Shrunk {
        path: PathBuf,
        /// Bytes when opened.
        was: u64,
        /// Bytes now.
        now: u64,
    },
    /// The file is one of a split set, but its name does not tell where the others are.
    #[error(
        "{path} is part of a set of {count} files, but is not named PREFIX-{number:05}-of-{count:05}.gguf"
    )]
    SplitName {
        path: PathBuf,
        /// Its number in the set, from 1.
        number: u64,
        count: u64,
    },
    /// A file of a split set is not there.
    #[error("part {number} of {count} is missing: {path}")]
    MissingPart {
        path: PathBuf,
        /// Its number in the set, from 1.
        number: u64,
        count: u64,
    },
    /// A file of a split set contradicts the set.
    #[error("{path}: {key} is {found}, the set needs {expected}")]
    SplitMismatch {
        path: PathBuf,
        /// `split.no`, `split.count` or `split.tensors.count`.
        key: &'static str,
        /// What the file says, or what was counted.
        found: u64,
        expected: u64,
    },
    /// A required key is absent.
    #[error("the file has no key {key}")]
    MissingKey { key: String },
    /// A key holds another type than needed.
    #[error("{key} is {found}, expected {expected}")]
    KeyType { key: String, found: &'static str, expected: &'static str },
    /// An integer of a key does not fit the type that it is read as.
    #[error("{key} is {found}, which is not a valid {expected}")]
    KeyRange { key: String, found: i128, expected: &'static str },
    /// A tensor that the caller named is absent.
    #[error("the file has no tensor {tensor}")]
    MissingTensor { tensor: String },
    /// No translator reads this architecture.
    #[error("architecture {found:?} is not served; known are {}", known.join(", "))]
    UnknownArch {
        /// Value of `general.architecture`.
        found: String,
        known: Vec<&'static str>,
    },
    /// A hyper-parameter is absurd, contradicts another, or asks for something that is not served.
    #[error("{key} is {found}, needed is {needs}")]
    HyperParameter { key: String, found: String, needs: String },
    /// A tensor's dimensions are not those that the hyper-parameters ask for.
    #[error("tensor {tensor} has dimensions {found:?}, expected {expected:?}")]
    TensorShape {
        tensor: String,
        /// Its dimensions, ones at the end left out.
        found: Vec<u64>,
        expected: Vec<u64>,
    },
    /// A tensor that must be of one type is of another.
    #[error("tensor {tensor} is {found}, expected {expected}")]
    TensorType {
        tensor: String,
        found: GgmlType,
        /// The type that it must have.
        expected: GgmlType,
    },
    /// The file has a tensor that the architecture, as it is understood here, has no use for.
    #[error("tensor {tensor} has no place in architecture {arch}")]
    UnusedTensor { tensor: String, arch: String },
    /// A read reaches past the end of a tensor.
    #[error("{len} bytes from {offset} of tensor {tensor}, which has {bytes}")]
    TensorRange {
        tensor: String,
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes of the tensor.
        bytes: u64,
    },
    /// A model's manifest cannot be made.
    #[error(transparent)]
    Manifest(#[from] crate::shard::ManifestError),
    /// A model's chunks cannot be had from the store.
    #[error(transparent)]
    Store(#[from] crate::shard::StoreError),
    /// A safetensors checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] crate::checkpoint::CheckpointError),
    /// The metadata is no tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] crate::tokenizer::TokenizerError),
    /// A model cannot be had.
    #[error(transparent)]
    Catalog(#[from] crate::catalog::CatalogError),
    /// The chat template cannot be used, or refuses the messages.
    #[error(transparent)]
    ChatTemplate(#[from] crate::chat_template::TemplateError),
}
