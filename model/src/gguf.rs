//! The GGUF format: one file, or a model split into a set of them.

use std::path::Path;

use crate::Error;
use crate::file::Contents;

pub use crate::file::TensorInfo;
pub use malformed::Malformed;
pub(crate) use parse::{ALIGNMENT_KEY, parse_table};

mod cursor;
mod malformed;
mod parse;
mod split;
pub mod writer;

/// What a file may hold at most; a count above its limit is refused before anything is allocated for it.
pub mod limits {
    pub const TENSORS: u64 = 65_536;
    /// Metadata keys of a file.
    pub const KEYS: u64 = 65_536;
    /// Bytes of a key.
    pub const KEY_BYTES: u64 = 65_535;
    /// Bytes of a string.
    pub const STRING_BYTES: u64 = 16 << 20;
    pub const ELEMENTS: u64 = 16 << 20;
    pub const NESTING: u64 = 4;
    pub const DIMS: u64 = 4;
    /// Bytes of a tensor's name.
    pub const TENSOR_NAME_BYTES: u64 = 64;
    /// Files of a split set.
    pub const PARTS: u64 = 1_024;
}

/// Opens a file, or, given any file of a split set, the set. The `split.*` keys, which say only how a set is cut
/// into files, are left out.
pub(crate) fn open(path: &Path) -> Result<Contents, Error> {
    split::open(path)
}

#[cfg(test)]
mod tests;
