//! Pinned host memory for copies.

#![allow(unsafe_code)]

use super::super::CudaError;
use super::api::Driver;
use super::wait;
use cudarc::driver::sys::{CUevent, CUstream};
use std::time::Duration;

/// Bytes of one buffer. Copies of weights reach full speed in pieces of this size, and little memory is
/// pinned.
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

/// Pinned bytes, and the event after which they may be reused.
#[derive(Debug, Clone, Copy)]
struct Buffer {
    memory: *mut u8,
    free: CUevent,
}

impl Buffer {
    fn new(driver: &Driver) -> Result<Self, CudaError> {
        let (mut memory, mut free) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the pointer is to a local handle. The bytes are written before they are read.
        driver.check("cuMemHostAlloc", unsafe { (driver.allocate_host)(&raw mut memory, PIECE, 0) })?;
        // SAFETY: as above.
        let created = unsafe { (driver.create_event)(&raw mut free, wait::EVENT_FLAGS) };
        driver.check("cuEventCreate", created).inspect_err(|_| {
            // SAFETY: the memory was just allocated and is not used afterwards.
            let _ = unsafe { (driver.free_host)(memory) };
        })?;
        Ok(Self { memory: memory.cast(), free })
    }
}

impl Staging {
    /// Creates the buffers for copies on `stream`, in the current context.
    pub(super) fn new(
        driver: &'static Driver,
        stream: CUstream,
        longest_wait: Duration,
    ) -> Result<Self, CudaError> {
        let buffers = [Buffer::new(driver)?, Buffer::new(driver)?];
        Ok(Self { driver, stream, longest_wait, buffers, next: 0 })
    }

    /// Switches to the other buffer, waits until its last copy is done, and returns its memory and event.
    fn turn(&mut self) -> Result<(*mut u8, CUevent), CudaError> {
        self.next ^= 1;
        let Buffer { memory, free } = self.buffers[self.next];
        wait::event(self.driver, free, self.longest_wait)?;
        Ok((memory, free))
    }

    /// Copies to the device, in the stream's order. The caller may change the bytes once this returns.
    ///
    /// # Safety
    /// The `bytes.len()` bytes from `to` on must belong to the device until the stream has executed the
    /// copy. The context must be current.
    pub(super) unsafe fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        let (driver, stream) = (self.driver, self.stream);
        for (index, piece) in bytes.chunks(PIECE).enumerate() {
            let (memory, free) = self.turn()?;
            // SAFETY: a buffer has PIECE bytes, a piece has at most as many, and no earlier copy still
            // reads the buffer. The buffer is not written again before the event that follows the copy.
            unsafe {
                std::ptr::copy_nonoverlapping(piece.as_ptr(), memory, piece.len());
                let to = to + (index * PIECE) as u64;
                driver.check("cuMemcpyHtoDAsync", (driver.upload)(to, memory.cast(), piece.len(), stream))?;
                driver.check("cuEventRecord", (driver.record_event)(free, stream))?;
            }
        }
        Ok(())
    }

    /// Copies to the host, after all earlier work of the stream.
    ///
    /// # Safety
    /// As for [`Self::upload`].
    pub(super) unsafe fn download(&mut self, from: u64, out: &mut [u8]) -> Result<(), CudaError> {
        let (driver, stream) = (self.driver, self.stream);
        for (index, piece) in out.chunks_mut(PIECE).enumerate() {
            let (memory, free) = self.turn()?;
            let from = from + (index * PIECE) as u64;
            // SAFETY: a buffer has PIECE bytes, a piece has at most as many; nothing else uses the buffer.
            unsafe {
                driver.check(
                    "cuMemcpyDtoHAsync",
                    (driver.download)(memory.cast(), from, piece.len(), stream),
                )?;
                driver.check("cuEventRecord", (driver.record_event)(free, stream))?;
            }
            wait::event(driver, free, self.longest_wait)?;
            // SAFETY: the event after the copy shows that the device has written these bytes and writes
            // them no more.
            unsafe { std::ptr::copy_nonoverlapping(memory, piece.as_mut_ptr(), piece.len()) };
        }
        Ok(())
    }

    /// Frees the memory.
    ///
    /// # Safety
    /// The stream must be idle, or its context lost.
    pub(super) unsafe fn destroy(self) {
        for buffer in self.buffers {
            // SAFETY: both were created by `Buffer::new`, and nothing uses them any more.
            unsafe {
                let _ = (self.driver.destroy_event)(buffer.free);
                let _ = (self.driver.free_host)(buffer.memory.cast());
            }
        }
    }
}
