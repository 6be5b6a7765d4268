//! The digest of a model, independent of its split into files.

use super::ChunkId;
use crate::gguf::ALIGNMENT_KEY;
use crate::gguf::writer::encode_value;
use crate::header::ModelHeader;
use crate::parallel::map_on_all_cpus;

/// Identifies the layout below; a new layout needs a new tag.
const TAG: &str = "kvasir model 1";

/// Hash of: tag; number of keys, then each key and value, ordered by key; number of tensors, then each name,
/// type and dimensions; then, tensor by tensor, the names of its chunks. Numbers are little-endian; strings
/// and lists have a length prefix. The alignment is omitted, because it is not part of the model.
///
/// The digest therefore verifies a list of chunks before any chunk is present.
pub(crate) fn digest(header: &ModelHeader, chunks: &[ChunkId]) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    put_string(&mut hash, TAG);

    let keys = || header.metadata().iter().filter(|(key, _)| *key != ALIGNMENT_KEY);
    put_number(&mut hash, keys().count());
    let mut encoded = Vec::new();
    for (key, value) in keys() {
        put_string(&mut hash, key);
        encoded.clear();
        encode_value(value, &mut encoded);
        hash.update(&encoded);
    }

    put_number(&mut hash, header.tensors().len());
    for info in header.tensors() {
        put_string(&mut hash, &info.name);
        hash.update(&info.ty.id().to_le_bytes());
        put_number(&mut hash, info.dims.len());
        for dim in &info.dims {
            hash.update(&dim.to_le_bytes());
        }
    }
    for ChunkId(chunk) in chunks {
        hash.update(chunk);
    }
    hash.finalize().into()
}

/// The hash of each chunk, computed with as many threads as CPUs.
pub(crate) fn hash_each(chunks: &[&[u8]]) -> Vec<blake3::Hash> {
    map_on_all_cpus(chunks.len(), |index| blake3::hash(chunks.get(index).copied().unwrap_or_default()))
}

fn put_number(hash: &mut blake3::Hasher, number: usize) {
    hash.update(&(number as u64).to_le_bytes());
}

fn put_string(hash: &mut blake3::Hasher, string: &str) {
    put_number(hash, string.len());
    hash.update(string.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::CHUNK_BYTES;

    #[test]
    fn threads_do_not_mix_chunks_up() {
        let bytes: Vec<u8> = (0..5 * CHUNK_BYTES).map(|n| (n / 1_000) as u8).collect();
        let chunks: Vec<&[u8]> = bytes.chunks(CHUNK_BYTES / 7).collect();
        let expected: Vec<_> = chunks.iter().map(|chunk| blake3::hash(chunk)).collect();
        assert_eq!(hash_each(&chunks), expected);
        assert!(hash_each(&[]).is_empty());
    }
}
