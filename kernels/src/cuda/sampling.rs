//! The largest values of rows, on a device.

use super::matmul::small;
use super::rowwise::Rows;
use super::{Compiled, CudaError, Device, DevicePtr, KernelId, Launch, source};

#[cfg(test)]
mod tests;

/// Threads of a block, as in `sampling.cu`.
const THREADS: u32 = 1024;

/// The kernels of [`source::SAMPLING`].
#[derive(Debug, Clone, Copy)]
pub struct SamplingKernels {
    best: KernelId,
}

impl SamplingKernels {
    /// Loads what was compiled of [`source::SAMPLING`].
    ///
    /// # Errors
    /// [`CudaError::NoKernel`] for what was compiled of another source; what the device says.
    pub fn load(device: &mut dyn Device, compiled: &Compiled) -> Result<Self, CudaError> {
        let kernels = device.load(compiled, source::SAMPLING.kernels)?;
        let [best] = kernels[..] else {
            return Err(CudaError::NoKernel {
                name: "best".into(),
                source_name: compiled.source_name.clone(),
            });
        };
        Ok(Self { best })
    }

    /// Of each row the `count` largest values, with their places, in no order: `out` is `[rows][count]` of a 32-bit place
    /// and an f32. Of equals the lowest places are taken; 0 is more than -0, and NaN more than anything.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for more values than a row has, or none; what the device says.
    pub fn best(
        &self,
        device: &mut dyn Device,
        of: Rows,
        x: DevicePtr,
        count: usize,
        out: DevicePtr,
    ) -> Result<(), CudaError> {
        if count == 0 || count > of.cols {
            return Err(CudaError::Invalid { what: format!("the best {count} of {} values", of.cols) });
        }
        if of.rows == 0 {
            return Ok(());
        }
        device.launch(&Launch {
            kernel: self.best,
            grid: [small(of.rows)?, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            arguments: &[x.into(), small(of.cols)?.into(), small(count)?.into(), out.into()],
        })
    }
}
