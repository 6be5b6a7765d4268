//! The GGUF format: one file, or a model split into a set of them.

use std::path::Path;

use crate::Error;
use crate::header::Contents;

pub use malformed::Malformed;
pub(crate) use parse::{ALIGNMENT_KEY, parse_table};

mod cursor;
mod malformed;
mod parse;
mod split;
pub mod writer;

/// Upper bounds of a file's contents. A count above its bound is refused before any allocation.
pub mod limits {
    pub const TENSORS: u64 = 65_536;
    /// Number of metadata keys.
    pub const KEYS: u64 = 65_536;
    /// Length of a key in bytes.
    pub const KEY_BYTES: u64 = 65_535;
    /// Length of a string in bytes.
    pub const STRING_BYTES: u64 = 64 << 20;
    pub const ELEMENTS: u64 = 16 << 20;
    pub const NESTING: u64 = 4;
    pub const DIMS: u64 = 4;
    /// Length of a tensor's name in bytes.
    pub const TENSOR_NAME_BYTES: u64 = 64;
    /// Number of files of a split set.
    pub const PARTS: u64 = 1_024;
}

/// Opens a file, or a whole set if `path` is any file of a split set. Omits the `split.*` keys, which only
/// describe the split.
pub(crate) fn open(path: &Path) -> Result<Contents, Error> {
    split::open(path)
}

#[cfg(test)]
mod tests;
