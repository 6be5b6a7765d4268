//! A device that computes nothing, for tests of the calls that it gets.

use crate::{Arch, Compiled, CudaError, Device, DevicePtr, KernelId, Launch};

/// Discards its inputs and records the grids of launches.
#[derive(Default)]
pub(crate) struct Hole {
    kernels: u32,
    pub(crate) grids: Vec<[u32; 3]>,
}

/// Returns an empty compiled source.
pub(crate) fn empty_source(source_name: &str) -> Compiled {
    let (source_name, cubin) = (source_name.to_owned(), Vec::new());
    Compiled { source_name, arch: Arch::SM_90, cubin, ptx: String::new(), log: String::new() }
}

impl Device for Hole {
    fn load(&mut self, _: &Compiled, kernels: &[&str]) -> Result<Vec<KernelId>, CudaError> {
        let first = self.kernels;
        self.kernels += kernels.len() as u32;
        Ok((first..self.kernels).map(KernelId).collect())
    }

    fn allocate(&mut self, _: usize) -> Result<DevicePtr, CudaError> {
        Ok(DevicePtr(256))
    }

    fn free(&mut self, _: DevicePtr) -> Result<(), CudaError> {
        Ok(())
    }

    fn upload(&mut self, _: DevicePtr, _: &[u8]) -> Result<(), CudaError> {
        Ok(())
    }

    fn download(&mut self, _: DevicePtr, _: &mut [u8]) -> Result<(), CudaError> {
        Ok(())
    }

    fn copy(&mut self, _: DevicePtr, _: DevicePtr, _: usize) -> Result<(), CudaError> {
        Ok(())
    }

    fn fill(&mut self, _: DevicePtr, _: u8, _: usize) -> Result<(), CudaError> {
        Ok(())
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), CudaError> {
        self.grids.push(launch.grid);
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), CudaError> {
        Ok(())
    }
}
