//! What runs kernels: memory, copies, launches. No kernel's meaning is known here.

use super::{Compiled, CudaError};

/// An address in a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address so many bytes further on.
    #[must_use]
    pub const fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// A kernel of a loaded module. Only the device that loaded it understands the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KernelId(pub(crate) u32);

/// What was recorded, to be run again. Only the device that recorded it understands the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GraphId(pub(crate) u32);

/// One parameter of a kernel, in the low bytes of eight: pointers, 32-bit and 64-bit integers, floats.
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
    /// Bytes of shared memory besides what the kernel declares.
    pub shared_bytes: u32,
    /// In the kernel's order, one for each of its parameters.
    pub arguments: &'a [Argument],
}

/// A device. Calls take effect in their order, as on one stream; [`Self::download`] waits for those before it.
pub trait Device: Send {
    /// What it is in a numeric class.
    fn name(&self) -> &'static str {
        "cuda"
    }

    /// Blocks of threads that can run at the same time without sharing anything, at least: one that does not say has one.
    fn multiprocessors(&self) -> usize {
        1
    }

    /// Loads a compiled source and names its kernels, in the order of `kernels`.
    ///
    /// # Errors
    /// [`CudaError::NoKernel`] if it lacks one; what the driver says.
    fn load(&mut self, compiled: &Compiled, kernels: &[&str]) -> Result<Vec<KernelId>, CudaError>;

    /// Takes memory, aligned to 256 bytes. What is in it is not defined.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    fn allocate(&mut self, bytes: usize) -> Result<DevicePtr, CudaError>;

    /// Gives back what [`Self::allocate`] gave.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for any other address.
    fn free(&mut self, ptr: DevicePtr) -> Result<(), CudaError>;

    /// Copies from the host.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] outside of one allocation.
    fn upload(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<(), CudaError>;

    /// Copies to the host, when all that was asked for before is done.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] outside of one allocation; what a kernel before it did wrong.
    fn download(&mut self, from: DevicePtr, out: &mut [u8]) -> Result<(), CudaError>;

    /// Copies inside the device; the two do not overlap.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] outside of one allocation.
    fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<(), CudaError>;

    /// Sets bytes.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] outside of one allocation.
    fn fill(&mut self, to: DevicePtr, value: u8, bytes: usize) -> Result<(), CudaError>;

    /// Runs a kernel.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for a launch beyond the device's limits.
    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), CudaError>;

    /// Waits for all that was asked for.
    ///
    /// # Errors
    /// What a kernel did wrong.
    fn synchronize(&mut self) -> Result<(), CudaError>;

    /// Begins to record: until [`Self::end_graph`] launches, fills and copies inside the device are kept, not run, and
    /// nothing else may be asked for.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for a device that does not record.
    fn begin_graph(&mut self) -> Result<(), CudaError> {
        Err(no_graphs())
    }

    /// Ends what [`Self::begin_graph`] began.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] where nothing is recorded.
    fn end_graph(&mut self) -> Result<GraphId, CudaError> {
        Err(no_graphs())
    }

    /// Runs what was recorded, with the addresses and numbers of then.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for a graph that is none of this device's.
    fn replay(&mut self, _graph: GraphId) -> Result<(), CudaError> {
        Err(no_graphs())
    }

    /// Gives back what was recorded; its number may come again.
    fn forget(&mut self, _graph: GraphId) {}
}

/// Records what `work` asks for; none where the device does not record. Whatever fails, the device records no longer.
///
/// # Errors
/// What `work` or the device says.
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
    CudaError::Invalid { what: "this device records no graphs".into() }
}
