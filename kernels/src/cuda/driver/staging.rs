//! Pinned host memory that copies pass through.

#![allow(unsafe_code)]

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

/// Bytes of one buffer: copies of weights run at full speed in pieces of this size, and little memory is pinned.
const PIECE: usize = 4 << 20;

/// Two buffers, used in turn: while the device copies one, the host fills the other.
#[derive(Debug)]
pub(super) struct Staging {
    stream: sys::CUstream,
    buffers: [Buffer; 2],
    next: usize,
}

/// Pinned bytes, and the event after which they may be written again.
#[derive(Debug)]
struct Buffer {
    memory: *mut u8,
    free: sys::CUevent,
}

impl Buffer {
    fn new() -> Result<Self, DriverError> {
        // SAFETY: the bytes are written before they are read.
        let memory: *mut u8 = unsafe { result::malloc_host(PIECE, 0) }?.cast();
        let free = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).inspect_err(|_| {
            // SAFETY: allocated just now, and forgotten.
            let _ = unsafe { result::free_host(memory.cast()) };
        })?;
        Ok(Self { memory, free })
    }
}

impl Staging {
    /// For copies on `stream`, in the context that is current.
    pub(super) fn new(stream: sys::CUstream) -> Result<Self, DriverError> {
        Ok(Self { stream, buffers: [Buffer::new()?, Buffer::new()?], next: 0 })
    }

    /// The buffer whose turn it is, when the last copy from it is done.
    fn turn(&mut self) -> Result<&mut Buffer, DriverError> {
        self.next ^= 1;
        let buffer = &mut self.buffers[self.next];
        // SAFETY: the event lives; one that was never recorded counts as done.
        unsafe { result::event::synchronize(buffer.free) }?;
        Ok(buffer)
    }

    /// Copies to the device, in the stream's order. The bytes may be changed once this returns.
    ///
    /// # Safety
    /// So many bytes from `to` on must be the device's, until the stream has come there. The context must be current.
    pub(super) unsafe fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), DriverError> {
        let stream = self.stream;
        for (index, piece) in bytes.chunks(PIECE).enumerate() {
            let buffer = self.turn()?;
            // SAFETY: a buffer holds PIECE bytes, a piece has no more, and no copy reads the buffer any longer. It is
            // not written again before the event that follows the copy.
            unsafe {
                std::ptr::copy_nonoverlapping(piece.as_ptr(), buffer.memory, piece.len());
                let pinned = std::slice::from_raw_parts(buffer.memory, piece.len());
                result::memcpy_htod_async(to + (index * PIECE) as u64, pinned, stream)?;
                result::event::record(buffer.free, stream)?;
            }
        }
        Ok(())
    }

    /// Copies to the host, behind all that the stream was asked for.
    ///
    /// # Safety
    /// As for [`Self::upload`].
    pub(super) unsafe fn download(&mut self, from: u64, out: &mut [u8]) -> Result<(), DriverError> {
        let stream = self.stream;
        for (index, piece) in out.chunks_mut(PIECE).enumerate() {
            let buffer = self.turn()?;
            // SAFETY: a buffer holds PIECE bytes, a piece has no more; nothing else uses the buffer, and the stream is
            // waited for before it is read.
            unsafe {
                let pinned = std::slice::from_raw_parts_mut(buffer.memory, piece.len());
                result::memcpy_dtoh_async(pinned, from + (index * PIECE) as u64, stream)?;
                result::stream::synchronize(stream)?;
                piece.copy_from_slice(pinned);
            }
        }
        Ok(())
    }

    /// Gives the memory back.
    ///
    /// # Safety
    /// The stream must be idle, or its context lost.
    pub(super) unsafe fn destroy(self) {
        for buffer in self.buffers {
            // SAFETY: both were made by `Buffer::new`, and nothing uses them any more.
            unsafe {
                let _ = result::event::destroy(buffer.free);
                let _ = result::free_host(buffer.memory.cast());
            }
        }
    }
}
