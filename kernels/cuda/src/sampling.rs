//! Largest values of rows, on a device.

use super::matmul::small;
use super::rowwise::Rows;
use super::{Compiled, CudaError, Device, DevicePtr, KernelId, Launch, source};

#[cfg(test)]
mod tests;

/// Threads of a block, as in `sampling.cu`.
const THREADS: u32 = 1024;

/// Maximum number of values that are selected from a row.
const MOST: usize = 1024;

/// The kernels of [`source::SAMPLING`].
#[derive(Debug, Clone, Copy)]
pub struct SamplingKernels {
    best: KernelId,
}

impl SamplingKernels {
    /// Loads the compiled [`source::SAMPLING`].
    ///
    /// # Errors
    /// [`CudaError::NoKernel`] for another compiled source; errors of the device.
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

    /// Finds the `count` largest values of each row with their indices, in no particular order. `out` is
    /// `[rows][count]` of a u32 index and an f32 value. Ties go to the lowest index; 0 is larger than -0,
    /// and NaN larger than everything.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] if `count` is 0, more than a row's values or more than 1,024; errors of the device.
    pub fn best(
        &self,
        device: &mut dyn Device,
        of: Rows,
        x: DevicePtr,
        count: usize,
        out: DevicePtr,
    ) -> Result<(), CudaError> {
        if count == 0 || count > of.cols.min(MOST) {
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
