//! Errors of files and batches.

use crate::record::Status;
use std::path::PathBuf;

/// Why a call on files or batches failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FilesError {
    /// A file of the store cannot be read or written.
    #[error("{path}: {why}", path = .path.display())]
    Disk { path: PathBuf, why: String },
    /// A record before the last one is unreadable.
    #[error("{path}: the record at byte {at} is damaged", path = .path.display())]
    Damaged { path: PathBuf, at: u64 },
    /// A value above its limit.
    #[error("{field}: {value} is above the limit of {limit}")]
    Limit { field: &'static str, value: u64, limit: u64 },
    /// The tenant has no such object.
    #[error("{0:?} is not known")]
    Unknown(String),
    /// Another coordinator took the object.
    #[error("{id:?} is kept by the coordinator {owner:?}; send the request there")]
    Elsewhere { id: String, owner: String },
    /// An unfinished batch reads the file.
    #[error("{file:?} is the input of the batch {batch:?}, which has not ended")]
    InUse { file: String, batch: String },
    /// A file that a batch cannot read.
    #[error("{0:?} was not uploaded with the purpose batch")]
    Purpose(String),
    /// A batch that cannot be cancelled any more.
    #[error("the batch {id:?} cannot be cancelled: it is {}", .status.name())]
    Ended { id: String, status: Status },
}

impl FilesError {
    /// From an error of the operating system.
    pub(crate) fn disk(path: &std::path::Path, error: &std::io::Error) -> Self {
        Self::Disk { path: path.to_owned(), why: error.to_string() }
    }
}
