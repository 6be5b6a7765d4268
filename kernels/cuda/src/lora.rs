//! Addition of LoRA adapters to products of rows, on a device: `scale * B (A x)`.

use super::matmul::small;
use super::{Compiled, CudaError, Device, DevicePtr, KernelId, Launch, source};

/// Threads of a block.
const THREADS: usize = 128;

/// An adapter's part for one matrix, as the kernels read it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Part {
    /// `[rank][cols]`
    pub(super) a: DevicePtr,
    /// `[rank][outputs]`
    pub(super) b: DevicePtr,
    /// 0 if there is none.
    pub(super) rank: u32,
    pub(super) scale: f32,
}

impl Part {
    /// Bytes of a part in device memory.
    pub(super) const BYTES: usize = 24;

    pub(super) fn bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.a.0.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.b.0.to_ne_bytes());
        bytes[16..20].copy_from_slice(&self.rank.to_ne_bytes());
        bytes[20..].copy_from_slice(&self.scale.to_ne_bytes());
        bytes
    }
}

/// The additions to the products of one matrix.
#[derive(Debug, Clone, Copy)]
pub(super) struct Addition {
    pub(super) rows: usize,
    /// `[rows][cols]`
    pub(super) x: DevicePtr,
    pub(super) cols: usize,
    /// `[rows]`, u32: the number of each row's part; `count` or more for none.
    pub(super) adapters: DevicePtr,
    /// `[count]`
    pub(super) parts: DevicePtr,
    pub(super) count: usize,
    /// Largest rank of the parts.
    pub(super) rank: usize,
    /// Scratch memory, `[rows][rank]`.
    pub(super) inner: DevicePtr,
    /// `[rows][outputs]`
    pub(super) out: DevicePtr,
    pub(super) outputs: usize,
}

/// The kernels of [`source::LORA`].
#[derive(Debug, Clone, Copy)]
pub(super) struct LoraKernels {
    inner: KernelId,
    add: KernelId,
}

impl LoraKernels {
    /// Loads the compiled [`source::LORA`].
    ///
    /// # Errors
    /// [`CudaError::NoKernel`] for another compiled source; errors of the device.
    pub(super) fn load(device: &mut dyn Device, compiled: &Compiled) -> Result<Self, CudaError> {
        let kernels = device.load(compiled, source::LORA.kernels)?;
        let [inner, add] = kernels[..] else {
            let (name, source_name) = (source::LORA.name.into(), compiled.source_name.clone());
            return Err(CudaError::NoKernel { name, source_name });
        };
        Ok(Self { inner, add })
    }

    /// `out[row] += scale * B (A x[row])` for the rows with a part.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for sizes beyond 32 bits; errors of the device.
    pub(super) fn add(&self, device: &mut dyn Device, addition: &Addition) -> Result<(), CudaError> {
        let &Addition { rows, x, cols, adapters, parts, count, rank, inner, out, outputs } = addition;
        if rows == 0 || rank == 0 {
            return Ok(());
        }
        let [count, stride] = [small(count)?, small(rank)?];
        let mut launch = |kernel, grid: usize, to: DevicePtr, from: DevicePtr, width: usize| {
            device.launch(&Launch {
                kernel,
                grid: [small(rows)?, small(grid)?, 1],
                block: [THREADS as u32, 1, 1],
                shared_bytes: 0,
                arguments: &[
                    to.into(),
                    from.into(),
                    adapters.into(),
                    parts.into(),
                    count.into(),
                    small(width)?.into(),
                    stride.into(),
                ],
            })
        };
        launch(self.inner, rank, inner, x, cols)?;
        launch(self.add, outputs.div_ceil(THREADS), out, inner, outputs)
    }
}
