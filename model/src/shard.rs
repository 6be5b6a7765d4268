//! A model as content-addressed pieces: tensors are cut into chunks named by their hash, and a manifest lists
//! the chunks of each tensor.
//!
//! Chunks start at fixed offsets in their tensor, so all layer ranges share them. A model's digest covers
//! only its manifest. A node that knows the digest can verify a manifest from any sender, and then every
//! chunk. See docs/decisions/0015-make-the-manifest-the-models-digest.md.

use std::fmt;
use std::sync::Arc;

mod chunk_buffer;
pub(crate) mod digest;
mod manifest;
pub(crate) mod mapped;
mod packed;
pub(crate) mod store;
mod tensor_memory;
pub(crate) mod verified_chunks;

pub use chunk_buffer::ChunkBuffer;
pub use manifest::{MANIFEST_BYTES, Manifest, ManifestError};
pub use packed::{PackedFile, PackedRegion, PackedWriter, RegionWriter};
pub use store::{HeldModel, ShardStore, StoreError, StoreReservation};
pub use tensor_memory::{ChunkSlot, TensorMemory};

/// Bytes of a tensor that do not change while this value exists.
pub type StoredBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Bytes of a chunk; the last of a tensor may be shorter.
pub const CHUNK_BYTES: usize = 4 << 20;

/// The name of a chunk: BLAKE3 of its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkId(pub [u8; 32]);

impl ChunkId {
    /// Hashes the bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(blake3::hash(bytes).into())
    }

    /// Parses 64 hexadecimal digits.
    pub fn from_hex(digits: &str) -> Option<Self> {
        Some(Self(blake3::Hash::from_hex(digits).ok()?.into()))
    }
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChunkId({self})")
    }
}

/// One chunk of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkPlace<'a> {
    pub id: ChunkId,
    pub tensor: &'a str,
    /// Byte offset in the tensor; a multiple of [`CHUNK_BYTES`].
    pub offset: u64,
    /// Length in bytes, from 1 to [`CHUNK_BYTES`].
    pub bytes: usize,
}
