//! The digest of a model: the same for a file and for any set that it is split into.

use super::Gguf;
use super::parse::ALIGNMENT_KEY;
use super::writer::encode_value;
use crate::Error;

/// Names the layout below; a change of it changes the tag.
const TAG: &str = "kvasir model 1";

/// Hash of: tag; number of keys, then each key and value, ordered by key; number of tensors, then each name,
/// type and dimensions; then the hash of each tensor's bytes. Numbers are little-endian, strings and lists have
/// their length before them. The alignment, which says nothing about the model, is left out.
pub(super) fn digest(gguf: &Gguf) -> Result<[u8; 32], Error> {
    let mut hash = blake3::Hasher::new();
    put_string(&mut hash, TAG);

    let keys = || gguf.metadata.iter().filter(|(key, _)| *key != ALIGNMENT_KEY);
    put_number(&mut hash, keys().count());
    let mut encoded = Vec::new();
    for (key, value) in keys() {
        put_string(&mut hash, key);
        encoded.clear();
        encode_value(value, &mut encoded);
        hash.update(&encoded);
    }

    put_number(&mut hash, gguf.tensors.len());
    for info in &gguf.tensors {
        put_string(&mut hash, &info.name);
        hash.update(&info.ty.id().to_le_bytes());
        put_number(&mut hash, info.dims.len());
        for dim in &info.dims {
            hash.update(&dim.to_le_bytes());
        }
    }
    for info in &gguf.tensors {
        hash.update(blake3::hash(gguf.tensor_data(&info.name)?).as_bytes());
    }
    Ok(hash.finalize().into())
}

fn put_number(hash: &mut blake3::Hasher, number: usize) {
    hash.update(&(number as u64).to_le_bytes());
}

fn put_string(hash: &mut blake3::Hasher, string: &str) {
    put_number(hash, string.len());
    hash.update(string.as_bytes());
}
