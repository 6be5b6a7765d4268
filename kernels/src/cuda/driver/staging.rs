//! Pinned host memory that copies pass through.

#![allow(unsafe_code)]

use super::super::CudaError;
use super::api::Driver;
use super::wait;
use cudarc::driver::sys::{CUevent, CUstream};
use std::time::Duration;

/// Bytes of one buffer: copies of weights run at full speed in pieces of this size, and little memory is pinned.
const PIECE: usize = 4 << 20;

/// Two buffers, used in turn: while the device copies one, the host fills the other.
#[derive(Debug)]
pub(super) struct Staging {
    driver: &'static Driver,
    stream: CUstream,
    longest_wait: Duration,
    buffers: [Buffer; 2],
    next: usize,
}

/// Pinned bytes, and the event after which they may be used again.
#[derive(Debug, Clone, Copy)]
struct Buffer {
    memory: *mut u8,
    free: CUevent,
}

impl Buffer {
    fn new(driver: &Driver) -> Result<Self, CudaError> {
        let (mut memory, mut free) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the pointer is to a handle of ours. The bytes are written before they are read.
        driver.check("cuMemHostAlloc", unsafe { (driver.allocate_host)(&raw mut memory, PIECE, 0) })?;
        // SAFETY: as above.
        let created = unsafe { (driver.create_event)(&raw mut free, wait::EVENT_FLAGS) };
        driver.check("cuEventCreate", created).inspect_err(|_| {
            // SAFETY: allocated just now, and forgotten.
            let _ = unsafe { (driver.free_host)(memory) };
        })?;
        Ok(Self { memory: memory.cast(), free })
    }
}

impl Staging {
    /// For copies on `stream`, in the context that is current.
    pub(super) fn new(
        driver: &'static Driver,
        stream: CUstream,
        longest_wait: Duration,
    ) -> Result<Self, CudaError> {
        let buffers = [Buffer::new(driver)?, Buffer::new(driver)?];
        Ok(Self { driver, stream, longest_wait, buffers, next: 0 })
    }

    /// Memory and event of the buffer whose turn it is, when the last copy with it is done.
    fn turn(&mut self) -> Result<(*mut u8, CUevent), CudaError> {
        self.next ^= 1;
        let Buffer { memory, free } = self.buffers[self.next];
        wait::event(self.driver, free, self.longest_wait)?;
        Ok((memory, free))
    }

    /// Copies to the device, in the stream's order. The bytes may be changed once this returns.
    ///
    /// # Safety
    /// So many bytes from `to` on must be the device's, until the stream has come there. The context must be current.
    pub(super) unsafe fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        let (driver, stream) = (self.driver, self.stream);
        for (index, piece) in bytes.chunks(PIECE).enumerate() {
            let (memory, free) = self.turn()?;
            // SAFETY: a buffer holds PIECE bytes, a piece has no more, and no copy reads the buffer any longer. It is
            // not written again before the event that follows the copy.
            unsafe {
                std::ptr::copy_nonoverlapping(piece.as_ptr(), memory, piece.len());
                let to = to + (index * PIECE) as u64;
                driver.check("cuMemcpyHtoDAsync", (driver.upload)(to, memory.cast(), piece.len(), stream))?;
                driver.check("cuEventRecord", (driver.record_event)(free, stream))?;
            }
        }
        Ok(())
    }

    /// Copies to the host, behind all that the stream was asked for.
    ///
    /// # Safety
    /// As for [`Self::upload`].
    pub(super) unsafe fn download(&mut self, from: u64, out: &mut [u8]) -> Result<(), CudaError> {
        let (driver, stream) = (self.driver, self.stream);
        for (index, piece) in out.chunks_mut(PIECE).enumerate() {
            let (memory, free) = self.turn()?;
            let from = from + (index * PIECE) as u64;
            // SAFETY: a buffer holds PIECE bytes, a piece has no more; nothing else uses the buffer.
            unsafe {
                driver.check(
                    "cuMemcpyDtoHAsync",
                    (driver.download)(memory.cast(), from, piece.len(), stream),
                )?;
                driver.check("cuEventRecord", (driver.record_event)(free, stream))?;
            }
            wait::event(driver, free, self.longest_wait)?;
            // SAFETY: the device has written these bytes, as the event behind the copy says, and writes them no more.
            unsafe { std::ptr::copy_nonoverlapping(memory, piece.as_mut_ptr(), piece.len()) };
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
                let _ = (self.driver.destroy_event)(buffer.free);
                let _ = (self.driver.free_host)(buffer.memory.cast());
            }
        }
    }
}
