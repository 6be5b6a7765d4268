//! A tensor in the making: memory of all of it, which chunks are received into where they belong, in any order.
//!
//! Each chunk has one slot, which is free, taken by one [`ChunkSlot`], or filled for good. Nobody looks at a byte of a chunk
//! but who has its slot, until all are filled; from then on nobody writes.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::ops::Deref;
use std::slice;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use memmap2::{MmapMut, MmapRaw};

use super::CHUNK_BYTES;
use crate::file::StoredBytes;

/// States of a slot. It is taken and given back by [`ChunkSlot`] only; nothing leads away from `FILLED`.
const FREE: u8 = 0;
const TAKEN: u8 = 1;
const FILLED: u8 = 2;

#[derive(Debug)]
pub struct TensorMemory(Arc<Tensor>);

#[derive(Debug)]
struct Tensor {
    bytes: usize,
    /// Taken when the first chunk comes: `bytes` bytes.
    memory: OnceLock<MmapRaw>,
    slots: Box<[AtomicU8]>,
}

/// The place of one chunk in its tensor, which nobody else has. Dropped unfinished it is free again.
pub struct ChunkSlot {
    tensor: Arc<Tensor>,
    chunk: usize,
    /// Where it begins in the tensor: at a page.
    start: usize,
    /// Bytes of the chunk: `start + room` is at most the tensor's.
    room: usize,
    /// Bytes that are there, from the first on: at most `room`.
    filled: usize,
    finished: bool,
}

/// A tensor that is known to be whole.
struct Whole(Arc<Tensor>);

impl TensorMemory {
    /// Of a tensor of `bytes` bytes, all of whose chunks but the last have [`CHUNK_BYTES`].
    pub fn new(bytes: usize) -> Self {
        let slots = (0..bytes.div_ceil(CHUNK_BYTES)).map(|_| AtomicU8::new(FREE)).collect();
        Self(Arc::new(Tensor { bytes, memory: OnceLock::new(), slots }))
    }

    /// The place of the chunk of this number; none where somebody has it or has filled it, or there is no such chunk.
    /// Fails where there is no memory for the tensor.
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

    /// The tensor, once every chunk is there.
    pub fn bytes(&self) -> Option<&[u8]> {
        self.0.bytes()
    }

    /// As [`Self::bytes`], for whoever keeps it.
    pub fn stored(&self) -> Option<StoredBytes> {
        self.0.bytes()?;
        Some(Arc::new(Whole(Arc::clone(&self.0))))
    }
}

impl Tensor {
    fn map(&self) -> io::Result<()> {
        if self.memory.get().is_none() {
            // Two may get here. What the second one has mapped it gives back untouched.
            let _ = self.memory.set(MmapMut::map_anon(self.bytes)?.into());
        }
        Ok(())
    }

    fn bytes(&self) -> Option<&[u8]> {
        let memory = self.memory.get()?;
        if !self.slots.iter().all(|slot| slot.load(Ordering::Acquire) == FILLED) {
            return None;
        }
        // SAFETY: all of the mapping, which lives as long as `self` and is initialised, since anonymous memory begins as zeros.
        // Every slot is filled, and the stores that say so come behind the last writes; none is given out any more, so nobody
        // writes again.
        Some(unsafe { slice::from_raw_parts(memory.as_ptr(), memory.len()) })
    }
}

impl ChunkSlot {
    /// Appends what there is room for.
    pub fn push(&mut self, bytes: &[u8]) {
        let Some(memory) = self.tensor.memory.get() else { return };
        let fits = (self.room - self.filled).min(bytes.len());
        // SAFETY: the target is inside the mapping, which has as many bytes as the tensor: see the fields. It belongs to this
        // slot alone, of which there is one while the state is `TAKEN`; the only reference to it is what `deref` gave, which
        // `&mut self` has ended. `bytes`, a reference that lives now, is of other memory.
        unsafe {
            let target = memory.as_mut_ptr().add(self.start + self.filled);
            target.copy_from_nonoverlapping(bytes.as_ptr(), fits);
        }
        self.filled += fits;
    }

    /// The chunk is complete and as its name says: it stays. False, and the slot is free again, if bytes are missing.
    pub fn finish(mut self) -> bool {
        self.finished = self.filled == self.room;
        self.finished
    }

    /// Asks for all its pages in one call, where `push` would stop at each.
    fn populate(&self) {
        let Some(memory) = self.tensor.memory.get() else { return };
        // SAFETY: the range begins at a page inside the mapping and ends inside its last one (see `push`). What is there stays
        // as it is: pages are only made. A system that does not know this fails, and the pages come one by one.
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
        // SAFETY: inside the mapping (see `push`), which lives as long as `tensor` and is initialised (see `Tensor::bytes`).
        // Nobody writes there while the reference lives: only this slot may, for which it would be borrowed.
        unsafe { slice::from_raw_parts(memory.as_ptr().add(self.start), self.filled) }
    }
}

impl Drop for ChunkSlot {
    fn drop(&mut self) {
        let state = if self.finished { FILLED } else { FREE };
        if let Some(slot) = self.tensor.slots.get(self.chunk) {
            // Whoever has it next, or reads the whole tensor, sees what was written.
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

// Chunks must start at pages: the largest that Linux has on any machine that this runs on.
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
            chunks[chunk].chunks(100_000).for_each(|part| slot.push(part));
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
