//! Memory of a tensor that is being received: chunks are written to their places in any order.
//!
//! Each chunk has one slot, which is free, taken by one [`ChunkSlot`], or filled. Only the owner of a slot
//! reads or writes the chunk's bytes until all slots are filled. After that nothing writes to the tensor.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::ops::Deref;
use std::slice;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use memmap2::{MmapMut, MmapRaw};

use super::CHUNK_BYTES;
use crate::shard::StoredBytes;

/// Slot states. Only [`ChunkSlot`] takes and releases a slot; `FILLED` is final.
const FREE: u8 = 0;
const TAKEN: u8 = 1;
const FILLED: u8 = 2;

#[derive(Debug)]
pub struct TensorMemory(Arc<Tensor>);

#[derive(Debug)]
struct Tensor {
    bytes: usize,
    /// `bytes` bytes, mapped when the first slot is taken.
    memory: OnceLock<MmapRaw>,
    slots: Box<[AtomicU8]>,
}

/// Exclusive access to one chunk's place in its tensor. Dropping an unfinished slot frees it.
pub struct ChunkSlot {
    tensor: Arc<Tensor>,
    chunk: usize,
    /// Byte offset in the tensor, page-aligned.
    start: usize,
    /// Bytes of the chunk. `start + room` is at most the tensor's length.
    room: usize,
    /// Bytes received, from the first on; at most `room`.
    filled: usize,
    finished: bool,
}

/// A tensor whose slots are all filled.
struct Whole(Arc<Tensor>);

impl TensorMemory {
    /// For a tensor of `bytes` bytes. All chunks but the last have [`CHUNK_BYTES`].
    pub fn new(bytes: usize) -> Self {
        let slots = (0..bytes.div_ceil(CHUNK_BYTES)).map(|_| AtomicU8::new(FREE)).collect();
        Self(Arc::new(Tensor { bytes, memory: OnceLock::new(), slots }))
    }

    /// Takes the slot of a chunk. `None` if the slot is taken or filled, or if there is no such chunk. Fails
    /// if the tensor's memory cannot be allocated.
    pub fn slot(&self, chunk: usize) -> io::Result<Option<ChunkSlot>> {
        let Some(slot) = self.0.slots.get(chunk) else { return Ok(None) };
        if slot.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Ok(None);
        }
        let start = chunk * CHUNK_BYTES;
        let room = (self.0.bytes - start).min(CHUNK_BYTES);
        let slot = ChunkSlot { tensor: Arc::clone(&self.0), chunk, start, room, filled: 0, finished: false };
        self.0.map()?;
        slot.populate();
        Ok(Some(slot))
    }

    /// The tensor's bytes; `None` until every chunk is filled.
    pub fn bytes(&self) -> Option<&[u8]> {
        self.0.bytes()
    }

    /// Like [`Self::bytes`], but owned.
    pub fn stored(&self) -> Option<StoredBytes> {
        self.0.bytes()?;
        Some(Arc::new(Whole(Arc::clone(&self.0))))
    }
}

impl Tensor {
    fn map(&self) -> io::Result<()> {
        if self.memory.get().is_none() {
            // Two threads may get here. The mapping of the second one is dropped unused.
            let _ = self.memory.set(MmapMut::map_anon(self.bytes)?.into());
        }
        Ok(())
    }

    fn bytes(&self) -> Option<&[u8]> {
        let memory = self.memory.get()?;
        if !self.slots.iter().all(|slot| slot.load(Ordering::Acquire) == FILLED) {
            return None;
        }
        // SAFETY: the slice is the whole mapping, which lives as long as `self` and is initialised, since
        // anonymous memory begins as zeros. Every slot is filled, and the stores that mark them filled come
        // after the last writes; no slot is given out any more, so nothing writes again.
        Some(unsafe { slice::from_raw_parts(memory.as_ptr(), memory.len()) })
    }
}

impl ChunkSlot {
    /// Appends as much of `bytes` as fits.
    pub fn push(&mut self, bytes: &[u8]) {
        let Some(memory) = self.tensor.memory.get() else { return };
        let fits = (self.room - self.filled).min(bytes.len());
        // SAFETY: the target is inside the mapping, which has as many bytes as the tensor: see the fields. It
        // belongs to this slot alone, because only one slot exists while the state is `TAKEN`; the only other
        // reference to it is what `deref` returned, which `&mut self` has ended. `bytes`, a live reference,
        // is other memory.
        unsafe {
            let target = memory.as_mut_ptr().add(self.start + self.filled);
            target.copy_from_nonoverlapping(bytes.as_ptr(), fits);
        }
        self.filled += fits;
    }

    /// Marks the slot filled if the chunk is complete; its hash must have been verified. If bytes are
    /// missing, returns false and frees the slot.
    pub fn finish(mut self) -> bool {
        self.finished = self.filled == self.room;
        self.finished
    }

    /// Populates all pages of the slot in one call, to avoid a page fault for each in `push`.
    fn populate(&self) {
        let Some(memory) = self.tensor.memory.get() else { return };
        // SAFETY: the range begins at a page inside the mapping and ends inside its last page (see `push`).
        // Existing contents stay unchanged: pages are only populated. A system without this call returns an
        // error, and the pages are populated one by one.
        unsafe {
            let start = memory.as_mut_ptr().add(self.start);
            libc::madvise(start.cast(), self.room, libc::MADV_POPULATE_WRITE);
        }
    }
}

impl Deref for ChunkSlot {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let Some(memory) = self.tensor.memory.get() else { return &[] };
        // SAFETY: inside the mapping (see `push`), which lives as long as `tensor` and is initialised (see
        // `Tensor::bytes`). Nothing writes there while the reference lives: only this slot may write, and it
        // would have to be borrowed mutably.
        unsafe { slice::from_raw_parts(memory.as_ptr().add(self.start), self.filled) }
    }
}

impl Drop for ChunkSlot {
    fn drop(&mut self) {
        let state = if self.finished { FILLED } else { FREE };
        if let Some(slot) = self.tensor.slots.get(self.chunk) {
            // Release: the next owner of the slot, or a reader of the whole tensor, sees the writes.
            slot.store(state, Ordering::Release);
        }
    }
}

impl fmt::Debug for ChunkSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkSlot")
            .field("chunk", &self.chunk)
            .field("filled", &self.filled)
            .finish_non_exhaustive()
    }
}

impl AsRef<[u8]> for Whole {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes().unwrap_or_default()
    }
}

// Chunks must start at pages. 64 KiB is the largest page size of supported Linux systems.
const _: () = assert!(CHUNK_BYTES.is_multiple_of(64 << 10));

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_tensor_is_there_with_its_last_chunk() {
        let chunks = [vec![1; CHUNK_BYTES], vec![2; CHUNK_BYTES], vec![3; 5]];
        let tensor = TensorMemory::new(2 * CHUNK_BYTES + 5);
        let fill = |chunk: usize| {
            let mut slot = tensor.slot(chunk).unwrap().unwrap();
            chunks[chunk].chunks(100_000).for_each(|piece| slot.push(piece));
            assert_eq!(&*slot, chunks[chunk]);
            assert!(slot.finish());
        };
        fill(2);
        assert!(tensor.bytes().is_none() && tensor.stored().is_none());
        thread::scope(|scope| {
            scope.spawn(|| fill(1));
            scope.spawn(|| fill(0));
        });
        assert_eq!(tensor.bytes().unwrap(), chunks.concat());
        let whole = tensor.stored().unwrap();
        drop(tensor);
        assert_eq!((*whole).as_ref(), chunks.concat());
    }

    #[test]
    fn a_slot_is_one_chunks_until_it_is_given_back() {
        let tensor = TensorMemory::new(CHUNK_BYTES + 3);
        let mut slot = tensor.slot(1).unwrap().unwrap();
        assert!(tensor.slot(1).unwrap().is_none(), "taken");
        assert!(tensor.slot(2).unwrap().is_none(), "no such chunk");
        slot.push(b"ab");
        assert!(!slot.finish(), "a byte is missing");
        let mut slot = tensor.slot(1).unwrap().unwrap();
        assert!(slot.is_empty());
        slot.push(b"cdefg");
        assert_eq!(&*slot, b"cde", "no more than there is room for");
        drop(slot);
        let mut slot = tensor.slot(1).unwrap().unwrap();
        slot.push(b"xyz");
        assert!(slot.finish() && tensor.slot(1).unwrap().is_none(), "filled");
        assert!(tensor.bytes().is_none() && tensor.stored().is_none());
    }
}
