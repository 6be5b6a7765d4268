//! A model in pieces that any node can hold: its tensors cut into chunks that are named by what is in them, and a
//! manifest that says which chunks make which tensors.
//!
//! Chunks start at fixed places of their tensor, so every cut of the layers shares them. A model's digest is made of
//! its manifest and nothing else, so whoever knows the digest can trust a manifest from anyone, and then every chunk.
//! See docs/decisions/0015-make-the-manifest-the-models-digest.md.

use std::fmt;

mod chunk_buffer;
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

/// Bytes of a chunk; the last of a tensor may be shorter.
pub const CHUNK_BYTES: usize = 4 << 20;

/// The name of a chunk: BLAKE3 of its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkId(pub [u8; 32]);

impl ChunkId {
    /// The name of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(blake3::hash(bytes).into())
    }

    /// The name that is written as these 64 hexadecimal digits.
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
    /// Where it starts in the tensor; a multiple of [`CHUNK_BYTES`].
    pub offset: u64,
    /// Its bytes, at least 1 and at most [`CHUNK_BYTES`].
    pub bytes: usize,
}
