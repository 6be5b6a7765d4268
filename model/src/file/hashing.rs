//! Hashes a tensor while it is read in parts.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::Error;
use crate::parallel::map_on_all_cpus;
use crate::shard::{CHUNK_BYTES, ChunkId};

/// Chunks that are read at once, by all CPUs.
const AT_ONCE: usize = 8;
const CHUNK: u64 = CHUNK_BYTES as u64;

/// A tensor whose chunks are read once, in order, hashed, and kept while parts of them are likely to be asked for.
#[derive(Debug)]
pub(super) struct Hashing<'a> {
    /// Set when all chunks are hashed.
    chunks: &'a OnceLock<Vec<ChunkId>>,
    recent: Mutex<Recent>,
}

#[derive(Debug, Default)]
struct Recent {
    /// Number of the first chunk that is kept.
    first: usize,
    kept: VecDeque<Arc<Vec<u8>>>,
    /// Of the chunks up to the last one kept.
    ids: Vec<ChunkId>,
}

impl<'a> Hashing<'a> {
    pub(super) fn new(chunks: &'a OnceLock<Vec<ChunkId>>) -> Self {
        Self { chunks, recent: Mutex::default() }
    }

    /// The bytes of a tensor of `bytes` bytes in `range`; `read` reads any range of it. `None` if they are no longer
    /// or not yet kept, because parts are not asked for about in order.
    pub(super) fn part(
        &self,
        range: &Range<u64>,
        bytes: u64,
        read: &(dyn Fn(Range<u64>) -> Result<Vec<u8>, Error> + Sync),
    ) -> Result<Option<Vec<u8>>, Error> {
        let (first, end) = ((range.start / CHUNK) as usize, range.end.div_ceil(CHUNK) as usize);
        let all = bytes.div_ceil(CHUNK) as usize;
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if first < recent.first || first > recent.end() {
            return Ok(None);
        }
        while recent.end() < end {
            recent.forget_before(first);
            let next = recent.end();
            let hashed = map_on_all_cpus(AT_ONCE.min(all - next), |number| -> Result<_, Error> {
                let start = (next + number) as u64 * CHUNK;
                let chunk = read(start..bytes.min(start + CHUNK))?;
                let id = ChunkId(blake3::hash(&chunk).into());
                Ok((Arc::new(chunk), id))
            });
            for chunk in hashed {
                let (chunk, id) = chunk?;
                recent.kept.push_back(chunk);
                recent.ids.push(id);
            }
            if recent.end() == all {
                self.chunks.get_or_init(|| recent.ids.clone());
            }
        }
        let kept = recent.kept.iter().skip(first - recent.first).take(end - first).cloned();
        let kept: Vec<Arc<Vec<u8>>> = kept.collect();
        drop(recent);
        let mut part = Vec::with_capacity((range.end - range.start) as usize);
        for (number, chunk) in (first as u64..).zip(&kept) {
            let at = |place: u64| (place.saturating_sub(number * CHUNK) as usize).min(chunk.len());
            part.extend_from_slice(chunk.get(at(range.start)..at(range.end)).unwrap_or_default());
        }
        Ok(Some(part))
    }
}

impl Recent {
    fn end(&self) -> usize {
        self.first + self.kept.len()
    }

    /// Keeps the chunk before `number` too: another thread may still ask for a part that ends in it.
    fn forget_before(&mut self, number: usize) {
        while self.first + 1 < number && self.kept.pop_front().is_some() {
            self.first += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::writer::Writer;
    use crate::header::TensorInfo;
    use crate::{GgmlType, ModelFile};
    use metadata::Metadata;

    /// A model with a tensor of 20 chunks and a part of one, and a small one.
    fn model() -> tempfile::NamedTempFile {
        let mut writer = Writer::new(Metadata::default()).unwrap();
        writer.tensor("large", GgmlType::F32, &[20 * CHUNK / 4 + 300]).unwrap();
        writer.tensor("small", GgmlType::F32, &[8]).unwrap();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let bytes = |info: &TensorInfo| (0..info.bytes).map(|at| (at / 1000) as u8).collect::<Vec<u8>>();
        writer.write(&mut file, bytes).unwrap();
        file
    }

    #[test]
    fn parts_that_are_read_in_order_are_hashed_once() {
        let path = model();
        let (file, other) = [(); 2].map(|()| ModelFile::open(path.path()).unwrap()).into();
        let whole = other.tensor_data("large").unwrap();
        let tensor = file.tensor_bytes_to_hash("large").unwrap();
        let parts = whole.len().div_ceil(700_000);
        let equal = map_on_all_cpus(parts, |number| {
            let range = 700_000 * number..whole.len().min(700_000 * (number + 1));
            *tensor.part(range.start as u64..range.end as u64).unwrap() == whole[range]
        });
        assert!(equal.into_iter().all(|equal| equal));
        assert_eq!(file.chunks_of[0].get().unwrap().len(), 21);
        // Only the small tensor is read now.
        assert!(file.tensor_bytes_to_hash("large").unwrap().hashing.is_none());
        assert_eq!(file.digest().unwrap(), other.digest().unwrap());
        assert!(tensor.part(0..whole.len() as u64 + 1).is_err());
    }

    #[test]
    fn parts_in_another_order_are_read_too() {
        let path = model();
        let file = ModelFile::open(path.path()).unwrap();
        let whole = file.tensor_data("large").unwrap();
        let tensor = file.tensor_bytes_to_hash("large").unwrap();
        for range in [5 * CHUNK..6 * CHUNK, 3..40, 15 * CHUNK - 1..15 * CHUNK + 5, 9..9, 3 * CHUNK..4 * CHUNK]
        {
            let part = tensor.part(range.clone()).unwrap();
            assert!(*part == whole[range.start as usize..range.end as usize], "{range:?}");
        }
        assert!(file.chunks_of[0].get().is_none());
    }
}
