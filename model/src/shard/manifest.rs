//! Manifest: a model's header and the names of its chunks.

use super::{CHUNK_BYTES, ChunkId, ChunkPlace, digest};
use crate::Error;
use crate::gguf::writer::Writer;
use crate::gguf::{ALIGNMENT_KEY, Malformed, parse_table};
use crate::header::{ModelHeader, TensorInfo};

#[cfg(test)]
mod tests;

/// Longest manifest in bytes: enough for a vocabulary of a million long tokens and the chunks of 4 TB of
/// tensors.
pub const MANIFEST_BYTES: usize = 128 << 20;

const MAGIC: [u8; 4] = *b"KVMF";
/// Magic, version, length of the header.
const PREFIX_BYTES: usize = 16;

/// Manifest format versions. A released format never changes.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Version {
    /// Little-endian. Length of the header as u64; the header as the beginning of a GGUF file (metadata and
    /// tensor table, no tensor bytes); then 32 bytes per chunk, tensor by tensor.
    V1 = 1,
}

/// A model without its tensor bytes: header and chunk names.
#[derive(Debug, Clone)]
pub struct Manifest {
    header: ModelHeader,
    chunks: Vec<ChunkId>,
    /// Index of each tensor's first chunk.
    first: Vec<usize>,
    encoded: Vec<u8>,
}

/// Error of bytes that are not the manifest of a model.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// Longer than [`MANIFEST_BYTES`].
    #[error("the manifest has {bytes} bytes, at most {MANIFEST_BYTES}")]
    TooLong {
        /// Length in bytes.
        bytes: usize,
    },
    /// Not a manifest, or truncated.
    #[error("the {bytes} bytes are not a manifest")]
    NotAManifest { bytes: usize },
    /// Unsupported format version.
    #[error("the manifest has version {found}; version 1 is supported")]
    Version { found: u32 },
    /// The metadata or the tensor table cannot be read or written.
    #[error("the manifest's header: {0}")]
    Header(#[from] Malformed),
    /// The number of chunks does not match the tensors.
    #[error("the manifest has {found} chunks, but its tensors have {expected}")]
    Chunks {
        found: u64,
        /// Chunks that the tensors need; saturated if their size overflows.
        expected: u64,
    },
    /// Not in canonical form.
    #[error("the manifest is not in its canonical form")]
    NotCanonical,
    /// The manifest of another model.
    #[error("the manifest is of model {found}, expected {expected}")]
    Digest {
        /// Digest of this manifest.
        found: ChunkId,
        expected: ChunkId,
    },
}

impl Manifest {
    /// Decodes the manifest of the model with digest `model`. The sender need not be trusted.
    pub fn decode(bytes: &[u8], model: &[u8; 32]) -> Result<Self, ManifestError> {
        let manifest = Self::decode_any(bytes)?;
        match manifest.digest() {
            found if found == *model => Ok(manifest),
            found => Err(ManifestError::Digest { found: ChunkId(found), expected: ChunkId(*model) }),
        }
    }

    /// Decodes a manifest of any model; see [`Self::digest`]. Inconsistent data is refused, as by
    /// [`Self::decode`].
    pub fn decode_any(bytes: &[u8]) -> Result<Self, ManifestError> {
        if bytes.len() > MANIFEST_BYTES {
            return Err(ManifestError::TooLong { bytes: bytes.len() });
        }
        let not_a_manifest = || ManifestError::NotAManifest { bytes: bytes.len() };
        let (prefix, rest) = bytes.split_at_checked(PREFIX_BYTES).ok_or_else(not_a_manifest)?;
        let (words, _) = prefix.as_chunks::<4>();
        let &[magic, version, low, high] = words else { return Err(not_a_manifest()) };
        if magic != MAGIC {
            return Err(not_a_manifest());
        }
        let version = u32::from_le_bytes(version);
        if version != Version::V1 as u32 {
            return Err(ManifestError::Version { found: version });
        }
        let header_bytes = u64::from(u32::from_le_bytes(high)) << 32 | u64::from(u32::from_le_bytes(low));
        let header_bytes = usize::try_from(header_bytes).map_err(|_| not_a_manifest())?;
        let (header, chunks) = rest.split_at_checked(header_bytes).ok_or_else(not_a_manifest)?;
        let (chunks, left) = chunks.as_chunks::<32>();
        if !left.is_empty() {
            return Err(not_a_manifest());
        }
        let (metadata, tensors) = parse_table(header)?;
        let header = ModelHeader::new(metadata, tensors);
        let manifest = Self::new(&header, chunks.iter().map(|chunk| ChunkId(*chunk)).collect())?;
        match manifest.encoded == bytes {
            true => Ok(manifest),
            false => Err(ManifestError::NotCanonical),
        }
    }

    /// `chunks` are those of all tensors in order.
    pub(crate) fn new(header: &ModelHeader, chunks: Vec<ChunkId>) -> Result<Self, ManifestError> {
        // The alignment of tensors in a file is not part of the model.
        let mut metadata = header.metadata().clone();
        metadata.retain(|key| key != ALIGNMENT_KEY);
        let mut writer = Writer::new(metadata.clone())?;
        let mut first = Vec::with_capacity(header.tensors().len());
        let mut expected = 0u64;
        for info in header.tensors() {
            writer.tensor(&info.name, info.ty, &info.dims)?;
            // Saturates: a number of chunks that does not fit is refused below.
            first.push(usize::try_from(expected).unwrap_or(usize::MAX));
            expected = expected.saturating_add(info.bytes.div_ceil(CHUNK_BYTES as u64));
        }
        let found = chunks.len() as u64;
        if found != expected {
            return Err(ManifestError::Chunks { found, expected });
        }
        let table = writer.header();
        let mut encoded = Vec::with_capacity(PREFIX_BYTES + table.len() + 32 * chunks.len());
        encoded.extend(MAGIC);
        encoded.extend((Version::V1 as u32).to_le_bytes());
        encoded.extend((table.len() as u64).to_le_bytes());
        encoded.extend(table);
        encoded.extend(chunks.iter().flat_map(|ChunkId(id)| id));
        if encoded.len() > MANIFEST_BYTES {
            return Err(ManifestError::TooLong { bytes: encoded.len() });
        }
        let header = ModelHeader::new(metadata, header.tensors().cloned().collect());
        Ok(Self { header, chunks, first, encoded })
    }

    /// Metadata and tensor table: enough to build a spec, a tokenizer and a placement.
    pub fn header(&self) -> &ModelHeader {
        &self.header
    }

    /// The model's digest, equal to that of a file with the same model.
    pub fn digest(&self) -> [u8; 32] {
        digest::digest(&self.header, &self.chunks)
    }

    /// The canonical encoding.
    pub fn encoded(&self) -> &[u8] {
        &self.encoded
    }

    /// Names of all chunks, tensor by tensor.
    pub fn all_chunks(&self) -> &[ChunkId] {
        &self.chunks
    }

    /// A tensor's chunks in order.
    pub fn chunks(&self, tensor: &str) -> Result<impl Iterator<Item = ChunkPlace<'_>>, Error> {
        let missing = || Error::MissingTensor { tensor: tensor.to_owned() };
        let index = self.header.index(tensor).ok_or_else(missing)?;
        let info: &TensorInfo = self.header.tensor(tensor).ok_or_else(missing)?;
        let first = self.first.get(index).copied().ok_or_else(missing)?;
        let offsets = (0..info.bytes).step_by(CHUNK_BYTES);
        let ids = self.chunks.iter().skip(first);
        Ok(ids.zip(offsets).map(|(id, offset)| ChunkPlace {
            id: *id,
            tensor: &info.name,
            offset,
            bytes: (info.bytes - offset).min(CHUNK_BYTES as u64) as usize,
        }))
    }
}
