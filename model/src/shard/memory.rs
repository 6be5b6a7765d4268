//! Memory that chunks are received into, and that whole tensors are made of while their chunks come.

use std::fmt;
use std::io;
use std::ops::Deref;
use std::sync::Arc;

use memmap2::{Advice, MmapMut};

use super::CHUNK_BYTES;
use crate::file::StoredBytes;

/// Memory for one chunk at a time. It begins at a page, so that what is in it can be written past the page cache.
#[derive(Default)]
pub struct ChunkBuffer {
    /// Taken when it is used first.
    memory: Option<MmapMut>,
    length: usize,
}

impl ChunkBuffer {
    /// Forgets what is in it, and sees to it that a chunk has room.
    pub fn clear(&mut self) -> io::Result<()> {
        self.length = 0;
        if self.memory.is_none() {
            self.memory = Some(MmapMut::map_anon(CHUNK_BYTES)?);
        }
        Ok(())
    }

    /// Appends what there is room for.
    pub fn push(&mut self, bytes: &[u8]) {
        let room = self.memory.as_mut().and_then(|memory| memory.get_mut(self.length..));
        let room = room.unwrap_or_default();
        let fits = room.len().min(bytes.len());
        if let (Some(room), Some(bytes)) = (room.get_mut(..fits), bytes.get(..fits)) {
            room.copy_from_slice(bytes);
            self.length += fits;
        }
    }
}

impl Deref for ChunkBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.memory.as_ref().and_then(|memory| memory.get(..self.length)).unwrap_or_default()
    }
}

impl fmt::Debug for ChunkBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkBuffer").field("length", &self.length).finish_non_exhaustive()
    }
}

/// A tensor in the making: chunks are put where they belong, in any order, each once.
#[derive(Debug)]
pub struct TensorMemory {
    /// Taken when the first chunk is there.
    memory: Option<MmapMut>,
    bytes: usize,
    missing: usize,
}

impl TensorMemory {
    /// Of a tensor of `bytes` bytes in `chunks` chunks.
    pub fn new(bytes: usize, chunks: usize) -> Self {
        Self { memory: None, bytes, missing: chunks }
    }

    /// Puts a chunk at `offset`; gives the tensor when it was the last one that was missing. Fails where there is no
    /// memory for it, or no such place in it.
    pub fn put(&mut self, offset: usize, chunk: &[u8]) -> io::Result<Option<StoredBytes>> {
        let mut memory = match self.memory.take() {
            Some(memory) => memory,
            None => MmapMut::map_anon(self.bytes)?,
        };
        let end = offset.checked_add(chunk.len()).filter(|end| *end <= memory.len());
        let end = end.ok_or(io::ErrorKind::InvalidInput)?;
        // All pages in one call, for which copying would stop at each; a system that does not know this stops.
        let _ = memory.advise_range(Advice::PopulateWrite, offset, chunk.len());
        memory.get_mut(offset..end).ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(chunk);
        self.missing = self.missing.saturating_sub(1);
        match self.missing {
            0 => Ok(Some(Arc::new(memory.make_read_only()?))),
            _ => {
                self.memory = Some(memory);
                Ok(None)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_is_there_with_its_last_chunk() {
        let mut tensor = TensorMemory::new(7, 3);
        assert!(tensor.put(4, b"ef").unwrap().is_none());
        assert!(tensor.put(0, b"abcd").unwrap().is_none());
        let whole = tensor.put(6, b"g").unwrap().unwrap();
        assert_eq!((*whole).as_ref(), b"abcdefg");
        assert!(TensorMemory::new(7, 3).put(6, b"gh").is_err(), "not that long");
    }

    #[test]
    fn a_buffer_holds_a_chunk_and_no_more() {
        let mut buffer = ChunkBuffer::default();
        buffer.clear().unwrap();
        buffer.push(b"ab");
        buffer.push(b"c");
        assert_eq!(&*buffer, b"abc");
        buffer.push(&vec![1; CHUNK_BYTES]);
        assert_eq!(buffer.len(), CHUNK_BYTES);
        buffer.clear().unwrap();
        assert!(buffer.is_empty());
    }
}
