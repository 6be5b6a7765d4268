//! The crate's error type.

use std::io;
use std::path::PathBuf;

/// Why a model cannot be resolved, downloaded or verified.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operation on a file or a directory failed.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// The failed operation: "open", "lock", ...
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error(transparent)]
    Catalog(#[from] crate::catalog::CatalogError),
}
