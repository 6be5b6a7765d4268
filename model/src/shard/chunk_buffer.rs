//! Receive buffer for chunks whose tensor is not assembled in memory.

use std::fmt;
use std::io;
use std::ops::Deref;

use memmap2::MmapMut;

use super::CHUNK_BYTES;

/// Memory for one chunk at a time, page-aligned so that its contents can be written past the page cache.
#[derive(Default)]
pub struct ChunkBuffer {
    /// Allocated at first use.
    memory: Option<MmapMut>,
    length: usize,
}

impl ChunkBuffer {
    /// Empties the buffer and allocates room for a chunk.
    pub fn clear(&mut self) -> io::Result<()> {
        self.length = 0;
        if self.memory.is_none() {
            self.memory = Some(MmapMut::map_anon(CHUNK_BYTES)?);
        }
        Ok(())
    }

    /// Appends as much of `bytes` as fits.
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

#[cfg(test)]
mod tests {
    use super::*;

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
