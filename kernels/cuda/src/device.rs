//! Interface of a device: memory, copies, launches, graphs. It is independent of the kernels.

use super::{Compiled, CudaError};

/// An address in a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// Returns the address `bytes` bytes further on.
    #[must_use]
    pub const fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// A kernel of a loaded module. The number is valid only for the device that loaded it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KernelId(pub(crate) u32);

/// A recorded graph. The number is valid only for the device that recorded it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GraphId(pub(crate) u32);

/// One parameter of a kernel, in the low bytes of a u64: a pointer, a 32-bit or 64-bit integer, or a float.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Argument(pub(crate) u64);

impl From<DevicePtr> for Argument {
    fn from(value: DevicePtr) -> Self {
        Self(value.0)
    }
}

impl From<u32> for Argument {
    fn from(value: u32) -> Self {
        Self(u64::from(value))
    }
}

impl From<i32> for Argument {
    fn from(value: i32) -> Self {
        Self(u64::from(value.cast_unsigned()))
    }
}

impl From<u64> for Argument {
    fn from(value: u64) -> Self {
        Self(value)
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Self {
        Self(u64::from(value.to_bits()))
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    pub kernel: KernelId,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory, in addition to the kernel's static shared memory.
    pub shared_bytes: u32,
    /// One for each of the kernel's parameters, in order.
    pub arguments: &'a [Argument],
}

/// A device. Calls take effect in their order, as on one stream. [`Self::download`] waits for the earlier
/// calls.
pub trait Device: Send {
    /// Returns the device's name in a numeric class.
    fn name(&self) -> &'static str {
        "cuda"
    }

    /// Returns the number of multiprocessors, which run blocks in parallel. The default is 1.
    fn multiprocessors(&self) -> usize {
        1
    }

    /// Loads a compiled source and returns its kernels, in the order of `kernels`.
    ///
    /// # Errors
    /// [`CudaError::NoKernel`] if it lacks a kernel; errors of the driver.
    fn load(&mut self, compiled: &Compiled, kernels: &[&str]) -> Result<Vec<KernelId>, CudaError>;

    /// Allocates memory, aligned to 256 bytes. Its contents are undefined.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    fn allocate(&mut self, bytes: usize) -> Result<DevicePtr, CudaError>;

    /// Frees memory from [`Self::allocate`].
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for any other address.
    fn free(&mut self, ptr: DevicePtr) -> Result<(), CudaError>;

    /// Copies from the host.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] unless the bytes lie inside one allocation.
    fn upload(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<(), CudaError>;

    /// Copies to the host, after all earlier work is done.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] unless the bytes lie inside one allocation; errors of earlier kernels.
    fn download(&mut self, from: DevicePtr, out: &mut [u8]) -> Result<(), CudaError>;

    /// Copies inside the device. The ranges must not overlap.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] unless each range lies inside one allocation.
    fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<(), CudaError>;

    /// Sets bytes to `value`.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] unless the bytes lie inside one allocation.
    fn fill(&mut self, to: DevicePtr, value: u8, bytes: usize) -> Result<(), CudaError>;

    /// Runs a kernel.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for a launch beyond the device's limits.
    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), CudaError>;

    /// Waits for all earlier work.
    ///
    /// # Errors
    /// Errors of earlier kernels.
    fn synchronize(&mut self) -> Result<(), CudaError>;

    /// Begins to record a graph. Until [`Self::end_graph`], launches, fills and copies inside the device
    /// are recorded and not run; all other calls are refused.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] if the device does not support graphs.
    fn begin_graph(&mut self) -> Result<(), CudaError> {
        Err(no_graphs())
    }

    /// Ends the recording that [`Self::begin_graph`] began.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] if no recording has begun.
    fn end_graph(&mut self) -> Result<GraphId, CudaError> {
        Err(no_graphs())
    }

    /// Runs a recorded graph, with the addresses and numbers of the recording.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for a graph that this device does not have.
    fn replay(&mut self, _graph: GraphId) -> Result<(), CudaError> {
        Err(no_graphs())
    }

    /// Frees a recorded graph. Its number may be reused.
    fn forget(&mut self, _graph: GraphId) {}
}

/// Records the calls of `work`. Returns `None` if the device does not support graphs. After an error the
/// device no longer records.
///
/// # Errors
/// Errors of `work` or of the device.
pub fn record<E: From<CudaError>>(
    device: &mut dyn Device,
    work: impl FnOnce(&mut dyn Device) -> Result<(), E>,
) -> Result<Option<GraphId>, E> {
    match device.begin_graph() {
        Ok(()) => {}
        Err(CudaError::Invalid { .. }) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let done = work(device);
    let ended = device.end_graph();
    match (done, ended) {
        (Ok(()), ended) => Ok(Some(ended?)),
        (Err(error), ended) => {
            if let Ok(graph) = ended {
                device.forget(graph);
            }
            Err(error)
        }
    }
}

pub(super) fn no_graphs() -> CudaError {
    CudaError::Invalid { what: "this device cannot record CUDA graphs".into() }
}
