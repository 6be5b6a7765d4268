//! Row operations on a device: norms, gates, sums, quantisation of rows.
//!
//! Buffers are `[rows][cols]` f32. Elementary functions give the same bits as on the CPU. Sums over a row
//! are added in another order, which depends on the row's width alone. With an argument `quantised`, an
//! operation also writes the 8-bit form of the rows, [`quantised_row_bytes`](super::quantised_row_bytes)
//! each, with the bits of [`QuantizedRows`](kernels::matmul::QuantizedRows).

use super::matmul::{Quantised, small};
use super::pack::{BLOCK, UNIT_COLS};
use super::{Argument, Compiled, CudaError, Device, DevicePtr, KernelId, Launch, source};
use kernels::backend::GateActivation;

#[cfg(test)]
mod tests;

/// Threads of a block in kernels with one or [`VALUES`] values per thread.
const THREADS: usize = 256;
/// Maximum number of threads of a block that processes a run of values.
const MAX_THREADS: usize = 1024;
/// Values of a thread, as long as there are enough threads.
const VALUES: usize = 4;
/// Values of a run that a block holds in shared memory: `HELD` of `rowwise.cu`.
const HELD: usize = VALUES * MAX_THREADS;

/// Returns the number by which kernels identify an activation: `Gating` of `math.cuh`.
pub(super) const fn gate_code(activation: GateActivation) -> u32 {
    match activation {
        GateActivation::Silu => 0,
        GateActivation::GeluTanh => 1,
        GateActivation::GeluErf => 2,
        GateActivation::Sigmoid => 3,
        GateActivation::ReluSquared => 4,
        GateActivation::ClampedSwiglu => 5,
        GateActivation::Identity => 6,
    }
}

/// The kernels of [`source::ROWWISE`].
#[derive(Debug, Clone)]
pub struct RowwiseKernels {
    quantise: KernelId,
    quantise_nvfp4: KernelId,
    norm: KernelId,
    add_norm: KernelId,
    gated_norm: KernelId,
    gate: KernelId,
    add: KernelId,
    scale_rows: KernelId,
    scale: KernelId,
    hadamard: KernelId,
    gather_cols: KernelId,
    gather_rows: KernelId,
    place_heads: KernelId,
    argmax: KernelId,
}

/// Rows and columns of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Rows of the step, or rows derived from them.
    pub rows: usize,
    /// Values of a row.
    pub cols: usize,
}

/// A weight or bias: f32 values for one run, or for several consecutive runs; they repeat along the row.
#[derive(Debug, Clone, Copy)]
pub struct Affine {
    pub start: DevicePtr,
    pub len: usize,
}

/// See [`kernels::backend::Norm`].
#[derive(Debug, Clone, Copy)]
pub struct DeviceNorm {
    /// `true` for an RMS norm, `false` for a norm with mean and variance.
    pub rms: bool,
    /// `None` multiplies by one.
    pub weight: Option<Affine>,
    /// `None` adds nothing.
    pub bias: Option<Affine>,
    /// Added to the mean square or variance.
    pub eps: f32,
    /// Values of a run; must divide the row's width.
    pub width: usize,
}

#[derive(Debug, Clone, Copy)]
pub struct Up {
    /// `[rows][cols]`
    pub start: DevicePtr,
    /// Values of a row.
    pub cols: usize,
    pub from: usize,
}

impl RowwiseKernels {
    /// Loads the compiled [`source::ROWWISE`].
    ///
    /// # Errors
    /// [`CudaError::NoKernel`] for another compiled source; errors of the device.
    pub fn load(device: &mut dyn Device, compiled: &Compiled) -> Result<Self, CudaError> {
        let kernels = device.load(compiled, source::ROWWISE.kernels)?;
        let [
            quantise,
            quantise_nvfp4,
            norm,
            add_norm,
            gated_norm,
            gate,
            add,
            scale_rows,
            scale,
            hadamard,
            gather_cols,
            gather_rows,
            place_heads,
            argmax,
        ] = *kernels
        else {
            let (name, source_name) = (source::ROWWISE.name.into(), compiled.source_name.clone());
            return Err(CudaError::NoKernel { name, source_name });
        };
        Ok(Self {
            quantise,
            quantise_nvfp4,
            norm,
            add_norm,
            gated_norm,
            gate,
            add,
            scale_rows,
            scale,
            hadamard,
            gather_cols,
            gather_rows,
            place_heads,
            argmax,
        })
    }

    /// Quantises rows.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for sizes beyond 32 bits; errors of the device.
    pub fn quantise(
        &self,
        device: &mut dyn Device,
        of: Rows,
        x: DevicePtr,
        (form, quantised): (Quantised, DevicePtr),
    ) -> Result<(), CudaError> {
        let cols = small(of.cols)?;
        if form == Quantised::Nvfp4 {
            // The largest value of a row has to be known before any is rounded.
            let threads = padded(of.cols).div_ceil(VALUES).next_multiple_of(32).min(MAX_THREADS);
            let arguments = [x.into(), cols.into(), quantised.into()];
            return launch(device, self.quantise_nvfp4, [of.rows, 1], threads, &arguments);
        }
        let arguments = [x.into(), cols.into(), form.code().into(), quantised.into()];
        launch(device, self.quantise, [of.rows, blocks_of(padded(of.cols))], THREADS, &arguments)
    }

    /// `out = norm(x)`; `out` may be `x`.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for a norm that does not fit the row; errors of the device.
    pub fn norm(
        &self,
        device: &mut dyn Device,
        of: Rows,
        x: DevicePtr,
        norm: &DeviceNorm,
        out: DevicePtr,
        quantised: Option<DevicePtr>,
    ) -> Result<(), CudaError> {
        let fused = quantised.filter(|_| norm.is_whole_blocks(of));
        self.norm_into(device, of, x, norm, [out, fused.unwrap_or_default()])?;
        self.quantise_unless(fused, device, of, out, quantised)
    }

    /// Writes the 8-bit form of `norm(x)` alone.
    ///
    /// # Errors
    /// As [`Self::norm`]; [`CudaError::Invalid`] for a block of the 8-bit form with values of two runs.
    pub fn norm_to_int8(
        &self,
        device: &mut dyn Device,
        of: Rows,
        x: DevicePtr,
        norm: &DeviceNorm,
        quantised: DevicePtr,
    ) -> Result<(), CudaError> {
        if !norm.is_whole_blocks(of) {
            return Err(CudaError::Invalid { what: format!("8 bits of runs of {}", norm.width) });
        }
        self.norm_into(device, of, x, norm, [DevicePtr::default(), quantised])
    }

    /// Writes a norm to `out` and in 8 bits to `quantised`, of which one may be null.
    fn norm_into(
        &self,
        device: &mut dyn Device,
        of: Rows,
        x: DevicePtr,
        norm: &DeviceNorm,
        [out, quantised]: [DevicePtr; 2],
    ) -> Result<(), CudaError> {
        let runs = norm.runs(of)?;
        let (weight, weight_len) = affine(norm.weight)?;
        let (bias, bias_len) = affine(norm.bias)?;
        let arguments = [
            x.into(),
            small(norm.width)?.into(),
            u32::from(norm.rms).into(),
            norm.eps.into(),
            weight,
            weight_len,
            bias,
            bias_len,
            out.into(),
            quantised.into(),
        ];
        norm.launch(device, self.norm, [of.rows, runs], &arguments)
    }

    /// `x += scale * norm(y)` with an RMS norm; without a norm, `x += scale * y`.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for a norm that does not fit the row or is not an RMS norm; errors of the
    /// device.
    pub fn add(
        &self,
        device: &mut dyn Device,
        of: Rows,
        x: DevicePtr,
        y: DevicePtr,
        norm: Option<&DeviceNorm>,
        scale: f32,
    ) -> Result<(), CudaError> {
        let Some(norm) = norm else {
            let count = of.rows * of.cols;
            let arguments = [x.into(), y.into(), scale.into(), (count as u64).into()];
            return launch(device, self.add, [count.div_ceil(THREADS), 1], THREADS, &arguments);
        };
        let runs = norm.runs(of)?;
        norm.check_rms()?;
        let (weight, weight_len) = affine(norm.weight)?;
        let width = small(norm.width)?.into();
        let arguments = [x.into(), y.into(), width, norm.eps.into(), weight, weight_len, scale.into()];
        norm.launch(device, self.add_norm, [of.rows, runs], &arguments)
    }

    /// `x = norm(x silu(gate))` if `gate_first`, else `norm(x) silu(gate)`, with an RMS norm.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for a norm that does not fit the row or is not an RMS norm; errors of the
    /// device.
    #[allow(clippy::too_many_arguments, reason = "an op's own parts, and where it runs")]
    pub fn gated_norm(
        &self,
        device: &mut dyn Device,
        of: Rows,
        x: DevicePtr,
        gate: DevicePtr,
        norm: &DeviceNorm,
        gate_first: bool,
        quantised: Option<DevicePtr>,
    ) -> Result<(), CudaError> {
        let runs = norm.runs(of)?;
        norm.check_rms()?;
        let (weight, weight_len) = affine(norm.weight)?;
        let fused = quantised.filter(|_| norm.is_whole_blocks(of));
        let arguments = [
            x.into(),
            gate.into(),
            small(norm.width)?.into(),
            norm.eps.into(),
            weight,
            weight_len,
            u32::from(gate_first).into(),
            fused.unwrap_or_default().into(),
        ];
        norm.launch(device, self.gated_norm, [of.rows, runs], &arguments)?;
        self.quantise_unless(fused, device, of, x, quantised)
    }

    /// `gate = activation(gate) * up[..][up.from..]`; without `up` only the activation. Without `keeps`, only the
    /// 8-bit form is written.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for columns that `up` does not have, and for a clamped SwiGLU without `up`;
    /// errors of the device.
    pub fn gate(
        &self,
        device: &mut dyn Device,
        of: Rows,
        gate: DevicePtr,
        up: Option<Up>,
        activation: GateActivation,
        (keeps, quantised): (bool, Option<DevicePtr>),
    ) -> Result<(), CudaError> {
        if activation == GateActivation::ClampedSwiglu && up.is_none() {
            return Err(CudaError::Invalid { what: "a clamped SwiGLU of nothing".into() });
        }
        let gating = gate_code(activation);
        let up = up.unwrap_or(Up { start: DevicePtr::default(), cols: of.cols, from: 0 });
        if up.from.checked_add(of.cols).is_none_or(|end| end > up.cols) {
            let what = format!("columns {}..+{} of rows of {}", up.from, of.cols, up.cols);
            return Err(CudaError::Invalid { what });
        }
        let arguments = [
            gate.into(),
            up.start.into(),
            small(of.cols)?.into(),
            small(up.cols)?.into(),
            small(up.from)?.into(),
            gating.into(),
            u32::from(keeps).into(),
            quantised.unwrap_or_default().into(),
        ];
        let cols = if quantised.is_some() { padded(of.cols) } else { of.cols };
        launch(device, self.gate, [of.rows, blocks_of(cols)], THREADS, &arguments)
    }

    /// `x[row] *= sigmoid(gate[row][0])`; `gate` is `[rows][gate_cols]`.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for sizes beyond 32 bits; errors of the device.
    pub fn scale_rows(
        &self,
        device: &mut dyn Device,
        of: Rows,
        x: DevicePtr,
        gate: DevicePtr,
        gate_cols: usize,
    ) -> Result<(), CudaError> {
        let arguments = [x.into(), gate.into(), small(of.cols)?.into(), small(gate_cols)?.into()];
        launch(device, self.scale_rows, [of.rows, of.cols.div_ceil(THREADS)], THREADS, &arguments)
    }

    /// `x = softcap(factor * x)` with `softcap(v) = cap tanh(v / cap)`. `None` applies only the factor.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn scale(
        &self,
        device: &mut dyn Device,
        of: Rows,
        x: DevicePtr,
        factor: f32,
        softcap: Option<f32>,
    ) -> Result<(), CudaError> {
        let count = of.rows * of.cols;
        let cap = softcap.unwrap_or(0.0);
        let arguments = [x.into(), factor.into(), cap.into(), (count as u64).into()];
        launch(device, self.scale, [count.div_ceil(THREADS), 1], THREADS, &arguments)
    }

    /// `out = x`, each run of `len` of the `count` values multiplied by the normalised Hadamard matrix. `len` is a power
    /// of two of at most 512. `out` may be `x`.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn hadamard(
        &self,
        device: &mut dyn Device,
        (x, out): (DevicePtr, DevicePtr),
        len: usize,
        count: usize,
    ) -> Result<(), CudaError> {
        const WARPS: usize = 4;
        let arguments = [out.into(), x.into(), (len as u32).into(), (count as u64).into()];
        launch(device, self.hadamard, [count.div_ceil(WARPS * len.max(32)), 1], 32 * WARPS, &arguments)
    }

    /// `out[row][i] = x[row][order[i]]`. `order` is f32; its values must be columns of `x` and are not checked.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for sizes beyond 32 bits; errors of the device.
    pub fn gather_cols(
        &self,
        device: &mut dyn Device,
        of: Rows,
        x: DevicePtr,
        order: DevicePtr,
        out: DevicePtr,
    ) -> Result<(), CudaError> {
        let count = of.rows * of.cols;
        let arguments = [out.into(), x.into(), order.into(), small(of.cols)?.into(), (count as u64).into()];
        launch(device, self.gather_cols, [count.div_ceil(THREADS), 1], THREADS, &arguments)
    }

    /// `out[row][at + i] = x[row][i]`; rows of `out` have `width` values.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for sizes beyond 32 bits; errors of the device.
    pub fn place_heads(
        &self,
        device: &mut dyn Device,
        of: Rows,
        x: DevicePtr,
        out: DevicePtr,
        width: usize,
        at: usize,
    ) -> Result<(), CudaError> {
        let count = of.rows * of.cols;
        let sizes = [small(of.cols)?, small(width)?, small(at)?];
        let [cols, width, at] = sizes.map(super::Argument::from);
        let arguments = [out.into(), x.into(), cols, width, at, (count as u64).into()];
        launch(device, self.place_heads, [count.div_ceil(THREADS), 1], THREADS, &arguments)
    }

    /// `out[row] = x[index[row]]` for the `of.rows` rows of `out`. `index` is u32; the values must be rows
    /// of `x` and are not checked.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for sizes beyond 32 bits; errors of the device.
    pub fn gather_rows(
        &self,
        device: &mut dyn Device,
        of: Rows,
        x: DevicePtr,
        index: DevicePtr,
        out: DevicePtr,
    ) -> Result<(), CudaError> {
        let arguments = [x.into(), small(of.cols)?.into(), index.into(), out.into()];
        launch(device, self.gather_rows, [of.rows, of.cols.div_ceil(THREADS)], THREADS, &arguments)
    }

    /// Writes to `out[row]`, u32, the index of the row's largest value; ties go to the lowest index. The
    /// index is [`NO_INDEX`](kernels::backend::NO_INDEX) for a row that holds NaN or infinity, or nothing
    /// above minus infinity.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for sizes beyond 32 bits; errors of the device.
    pub fn argmax(
        &self,
        device: &mut dyn Device,
        of: Rows,
        x: DevicePtr,
        out: DevicePtr,
    ) -> Result<(), CudaError> {
        let arguments = [x.into(), small(of.cols)?.into(), out.into()];
        let threads = of.cols.next_multiple_of(32).clamp(32, MAX_THREADS);
        launch(device, self.argmax, [of.rows, 1], threads, &arguments)
    }

    /// Quantises the rows separately if the operation could not do it itself.
    fn quantise_unless(
        &self,
        fused: Option<DevicePtr>,
        device: &mut dyn Device,
        of: Rows,
        x: DevicePtr,
        quantised: Option<DevicePtr>,
    ) -> Result<(), CudaError> {
        match (fused, quantised) {
            (None, Some(quantised)) => self.quantise(device, of, x, (Quantised::Int8, quantised)),
            _ => Ok(()),
        }
    }
}

impl DeviceNorm {
    /// Returns the runs of a row.
    fn runs(&self, of: Rows) -> Result<usize, CudaError> {
        let fits = |affine: Option<Affine>| {
            affine.is_none_or(|affine| {
                affine.len > 0 && affine.len.is_multiple_of(self.width) && of.cols.is_multiple_of(affine.len)
            })
        };
        let whole = self.width > 0 && of.cols.is_multiple_of(self.width);
        if !whole || !fits(self.weight) || !fits(self.bias) {
            let what = format!("a norm of {} values, or its weight, on rows of {}", self.width, of.cols);
            return Err(CudaError::Invalid { what });
        }
        Ok(of.cols / self.width)
    }

    fn check_rms(&self) -> Result<(), CudaError> {
        match self.rms && self.bias.is_none() {
            true => Ok(()),
            false => Err(CudaError::Invalid { what: "a norm here that is no RMS norm".into() }),
        }
    }

    /// Whether no block of the 8-bit form has values of two runs.
    fn is_whole_blocks(&self, of: Rows) -> bool {
        self.width == of.cols || self.width.is_multiple_of(BLOCK)
    }

    /// Launches a kernel with a block for each run.
    fn launch(
        &self,
        device: &mut dyn Device,
        kernel: KernelId,
        grid: [usize; 2],
        arguments: &[Argument],
    ) -> Result<(), CudaError> {
        let threads = self.width.div_ceil(VALUES).next_multiple_of(32).min(MAX_THREADS);
        let held = self.width.next_multiple_of(VALUES).min(HELD);
        launch_with(device, kernel, grid, threads, held * size_of::<f32>(), arguments)
    }
}

/// Returns the blocks for `cols` values, [`VALUES`] to a thread.
fn blocks_of(cols: usize) -> usize {
    cols.div_ceil(VALUES * THREADS)
}

/// Columns of the 8-bit form.
fn padded(cols: usize) -> usize {
    cols.next_multiple_of(UNIT_COLS)
}

fn affine(values: Option<Affine>) -> Result<(Argument, Argument), CudaError> {
    let Affine { start, len } = values.unwrap_or(Affine { start: DevicePtr::default(), len: 0 });
    Ok((start.into(), small(len)?.into()))
}

/// Launches a kernel, unless its grid is empty.
fn launch(
    device: &mut dyn Device,
    kernel: KernelId,
    grid: [usize; 2],
    threads: usize,
    arguments: &[Argument],
) -> Result<(), CudaError> {
    launch_with(device, kernel, grid, threads, 0, arguments)
}

/// Like [`launch`], with dynamic shared memory.
fn launch_with(
    device: &mut dyn Device,
    kernel: KernelId,
    grid: [usize; 2],
    threads: usize,
    shared_bytes: usize,
    arguments: &[Argument],
) -> Result<(), CudaError> {
    if grid.contains(&0) {
        return Ok(());
    }
    let (grid, block) = ([small(grid[0])?, small(grid[1])?, 1], [small(threads)?, 1, 1]);
    device.launch(&Launch { kernel, grid, block, shared_bytes: small(shared_bytes)?, arguments })
}
