//! A tensor of the store in memory: its chunks are mapped one after the other and form one slice.
#![allow(unsafe_code)]

use std::fs::{File, Metadata};
use std::os::fd::AsRawFd;
use std::path::Path;

use memmap2::{Mmap, MmapMut, MmapOptions, UncheckedAdvice};

use super::store::{StoreError, chunk_path, io_error};
use super::verified_chunks::VerifiedChunks;
use super::{CHUNK_BYTES, ChunkPlace};
use crate::mmap::forget_cached;
use crate::shard::digest::hash_each;

/// The verified chunks of one tensor, read-only.
#[derive(Debug)]
pub(crate) struct MappedTensor {
    map: Mmap,
}

impl MappedTensor {
    /// Maps `chunks` under the directory `dir`: `bytes` bytes in total, at least one. Hashes the
    /// chunks that were not verified since the system started.
    pub(crate) fn open<'a>(
        dir: &Path,
        bytes: usize,
        chunks: impl Iterator<Item = ChunkPlace<'a>>,
        sound: &VerifiedChunks,
    ) -> Result<Self, StoreError> {
        let reserve = || MmapOptions::new().len(bytes).map_anon();
        let mut region = reserve().map_err(io_error("map", dir))?;
        let mut unknown = Vec::new();
        for (index, chunk) in chunks.enumerate() {
            let file = map_chunk(&mut region, dir, chunk)?;
            if !sound.is_verified(chunk.id, &file) {
                unknown.push((index, chunk.id, file));
            }
        }
        let map = region.make_read_only().map_err(io_error("map", dir))?;
        let chunks: Vec<&[u8]> =
            unknown.iter().filter_map(|(index, ..)| map.chunks(CHUNK_BYTES).nth(*index)).collect();
        for ((_, chunk, file), hash) in unknown.iter().zip(hash_each(&chunks)) {
            if chunk.0 != *hash.as_bytes() {
                return Err(StoreError::Damaged { chunk: *chunk });
            }
            sound.note(*chunk, file);
        }
        Ok(Self { map })
    }
}

impl MappedTensor {
    /// Releases its pages, and those of its chunks under `dir` that no other process has mapped.
    pub(crate) fn forget<'a>(&self, dir: &Path, chunks: impl Iterator<Item = ChunkPlace<'a>>) {
        // SAFETY: the pages are those of files that are mapped read-only and never written again: a later
        // access sees the same bytes.
        if unsafe { self.map.unchecked_advise(UncheckedAdvice::DontNeed) }.is_err() {
            return;
        }
        for chunk in chunks {
            if let Ok(file) = File::open(chunk_path(dir, chunk.id)) {
                forget_cached(&file, 0, 0);
            }
        }
    }
}

impl AsRef<[u8]> for MappedTensor {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

/// Maps a chunk's file at its offset in the tensor. Returns the file's metadata.
fn map_chunk(region: &mut MmapMut, dir: &Path, chunk: ChunkPlace<'_>) -> Result<Metadata, StoreError> {
    let path = chunk_path(dir, chunk.id);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(StoreError::Missing { chunk: chunk.id });
        }
        Err(source) => return Err(io_error("open", &path)(source)),
    };
    let found = file.metadata().map_err(io_error("stat", &path))?;
    let start = usize::try_from(chunk.offset).ok();
    let target = start.and_then(|start| region.get_mut(start..start.checked_add(chunk.bytes)?));
    let Some(target) = target.filter(|_| found.len() == chunk.bytes as u64) else {
        return Err(StoreError::Damaged { chunk: chunk.id });
    };
    // SAFETY: `target` lies inside a mapping that this function has exclusively, and starts at a multiple of
    // `CHUNK_BYTES` from its beginning, hence at a page. It ends where the next chunk begins or inside the
    // last page of the mapping, so that exactly its own pages are replaced, by readable ones that stay mapped
    // as long as `region`, whose drop unmaps the whole range whatever was mapped into it. Nothing writes to
    // them: `region` is made read-only before other code sees it, and until then only `mmap` touches it. The
    // remaining risk is another process that changes the file: callers treat the bytes as untrusted, as those
    // of `crate::mmap`.
    let mapped = unsafe {
        libc::mmap(
            target.as_mut_ptr().cast(),
            chunk.bytes,
            libc::PROT_READ,
            libc::MAP_SHARED | libc::MAP_FIXED,
            file.as_raw_fd(),
            0,
        )
    };
    match mapped {
        libc::MAP_FAILED => Err(io_error("map", &path)(std::io::Error::last_os_error())),
        _ => Ok(found),
    }
}

// Chunks must start at pages. 64 KiB is the largest page size of supported Linux systems.
const _: () = assert!(CHUNK_BYTES.is_multiple_of(64 << 10));
