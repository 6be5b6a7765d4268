//! A device that is none: the PTX that would have become its code, interpreted on the CPU.

use super::{Compiled, CudaError, Device, DevicePtr, KernelId, Launch};
use ptx::{KernelRef, Limits, Machine, RunError};

/// Runs kernels from their PTX and checks every access of theirs. A kernel's fault is returned by the launch itself.
#[derive(Debug)]
pub struct SimDevice {
    machine: Machine,
    kernels: Vec<KernelRef>,
}

impl SimDevice {
    /// An empty device with the limits of another one. The seed chooses the order of blocks and warps.
    pub fn new(limits: Limits, seed: u64) -> Self {
        Self { machine: Machine::new(limits, seed), kernels: Vec::new() }
    }

    /// What interprets: counts and coverage.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The interpreter's name of a kernel.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for a kernel of another device.
    pub fn kernel(&self, kernel: KernelId) -> Result<KernelRef, CudaError> {
        let known = self.kernels.get(kernel.0 as usize).copied();
        known.ok_or_else(|| CudaError::Invalid { what: "a kernel of another device".into() })
    }
}

impl From<RunError> for CudaError {
    fn from(error: RunError) -> Self {
        match error {
            RunError::OutOfMemory { wanted, free } => Self::OutOfMemory { wanted, free },
            other => Self::Invalid { what: other.to_string() },
        }
    }
}

impl Device for SimDevice {
    fn load(&mut self, compiled: &Compiled, kernels: &[&str]) -> Result<Vec<KernelId>, CudaError> {
        let source_name = &compiled.source_name;
        let module = self
            .machine
            .load(&compiled.ptx)
            .map_err(|error| CudaError::Invalid { what: format!("{source_name}: {error}") })?;
        let mut out = Vec::with_capacity(kernels.len());
        for &name in kernels {
            let kernel = self
                .machine
                .kernel(module, name)
                .ok_or_else(|| CudaError::NoKernel { name: name.into(), source_name: source_name.clone() })?;
            out.push(KernelId(self.kernels.len() as u32));
            self.kernels.push(kernel);
        }
        Ok(out)
    }

    fn allocate(&mut self, bytes: usize) -> Result<DevicePtr, CudaError> {
        Ok(DevicePtr(self.machine.allocate(bytes)?))
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), CudaError> {
        Ok(self.machine.free(ptr.0)?)
    }

    fn upload(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<(), CudaError> {
        Ok(self.machine.write(to.0, bytes)?)
    }

    fn download(&mut self, from: DevicePtr, out: &mut [u8]) -> Result<(), CudaError> {
        Ok(self.machine.read(from.0, out)?)
    }

    fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        Ok(self.machine.copy(from.0, to.0, bytes)?)
    }

    fn fill(&mut self, to: DevicePtr, value: u8, bytes: usize) -> Result<(), CudaError> {
        Ok(self.machine.fill(to.0, value, bytes)?)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), CudaError> {
        let arguments: Vec<u64> = launch.arguments.iter().map(|argument| argument.0).collect();
        self.machine.launch(&ptx::Launch {
            kernel: self.kernel(launch.kernel)?,
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            arguments: &arguments,
        })?;
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), CudaError> {
        Ok(())
    }
}
