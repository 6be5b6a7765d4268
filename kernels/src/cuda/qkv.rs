//! Between the projections and attention: norm of heads, rotation, keys and values into the cache.

use super::kv::{KvBlock, type_number};
use super::source::{self, Source};
use super::step::StepPointers;
use super::{Argument, Compiled, CudaError, Device, DevicePtr, KernelId, Launch};
use crate::attention::check_len;
use crate::backend::{KvShape, RopeSource};
use crate::error::Error;

#[cfg(test)]
mod tests;

const WARPS: usize = 4;

/// The kernels that serve layers of one shape.
#[derive(Debug, Clone)]
pub struct QkvKernels {
    shape: KvShape,
    block: KvBlock,
    rope_angles: KernelId,
    run_factors: KernelId,
    qkv: KernelId,
}

/// A rotary embedding as its kernel wants it.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceRope {
    /// Per pair, what it turns by for each position, in 2^-64 of a full turn.
    turns: Vec<u64>,
    interleaved: bool,
    magnitude: f32,
}

/// Cosines and sines of a step's rows.
#[derive(Debug, Clone, Copy)]
pub struct RopeAngles {
    /// `[rows][pairs][2]`, as [`QkvKernels::angles`] leaves them.
    pub angles: DevicePtr,
    /// Pairs of a head that rotate.
    pub pairs: usize,
    /// Pairs (2i, 2i + 1) if true, (i, i + pairs) otherwise.
    pub interleaved: bool,
}

/// RMS norm of the runs of a row.
#[derive(Debug, Clone, Copy)]
pub struct HeadNorm {
    /// As many values as a run has, or as the row; none multiplies by one.
    pub weight: Option<(DevicePtr, usize)>,
    /// Added to the mean square.
    pub eps: f32,
    pub width: usize,
}

/// Keys and values on their way into the cache. They are not changed.
#[derive(Debug, Clone, Copy)]
pub struct KeysValues {
    /// `[rows][kv_heads * head_dim]`
    pub k: DevicePtr,
    /// `[rows][kv_heads * v_head_dim]`; may be `k`.
    pub v: DevicePtr,
    pub k_norm: Option<HeadNorm>,
    pub v_norm: Option<HeadNorm>,
}

/// One layer's q, k and v.
#[derive(Debug, Clone, Copy)]
pub struct QkvCall<'a> {
    /// `[rows][heads * head_dim]`, changed in place.
    pub q: DevicePtr,
    pub q_norm: Option<HeadNorm>,
    /// None where the layer reads another's.
    pub kv: Option<KeysValues>,
    /// None for no rotation.
    pub rope: Option<RopeAngles>,
    pub arena: DevicePtr,
    pub step: &'a StepPointers,
    /// Its rows.
    pub rows: usize,
    pub group: usize,
    /// Of the layer inside a block.
    pub layer_offset: usize,
    /// [`QkvKernels::scratch_bytes`].
    pub scratch: DevicePtr,
}

impl DeviceRope {
    /// # Errors
    /// [`Error::Length`] for an odd number of rotating elements, or factors of another length than half of it.
    pub fn new(source: &RopeSource) -> Result<Self, Error> {
        let pairs = source.n_rot / 2;
        check_len("rotating elements of a head", pairs * 2, source.n_rot)?;
        if let Some(factors) = &source.factors {
            check_len("rope factors", pairs, factors.len())?;
        }
        let turn = |i: usize| {
            let exponent = -2.0 * i as f64 / source.n_rot as f64;
            let factor = source.factors.as_ref().map_or(1.0, |factors| f64::from(factors[i]));
            let radians = f64::from(source.base).powf(exponent) / factor * f64::from(source.freq_scale);
            // Whole turns make no difference at whole positions.
            let turns = (radians / std::f64::consts::TAU).rem_euclid(1.0);
            (turns * 2f64.powi(64)) as u64
        };
        let turns = (0..pairs).map(turn).collect();
        Ok(Self { turns, interleaved: source.interleaved, magnitude: source.magnitude })
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.turns.iter().flat_map(|turn| turn.to_ne_bytes()).collect()
    }

    /// Bytes of the angles of so many rows.
    pub fn angle_bytes(&self, rows: usize) -> usize {
        rows * self.turns.len() * 2 * size_of::<f32>()
    }
}

impl QkvKernels {
    /// The source that serves a shape.
    ///
    /// # Errors
    /// As [`KvBlock::new`].
    pub fn source(shape: &KvShape) -> Result<&'static Source, Error> {
        KvBlock::new(shape)?;
        Ok(&source::QKV[type_number(shape.kv_type)])
    }

    /// Loads what was compiled of [`Self::source`].
    ///
    /// # Errors
    /// [`CudaError::NoKernel`] for what was compiled of another source, [`CudaError::Invalid`] for a shape that is not
    /// served; what the device says.
    pub fn load(device: &mut dyn Device, compiled: &Compiled, shape: KvShape) -> Result<Self, CudaError> {
        let block = KvBlock::new(&shape).map_err(|error| CudaError::Invalid { what: error.to_string() })?;
        let kernels = device.load(compiled, source::QKV[type_number(shape.kv_type)].kernels)?;
        let [rope_angles, run_factors, qkv] = kernels[..] else {
            return Err(CudaError::NoKernel {
                name: "qkv".into(),
                source_name: compiled.source_name.clone(),
            });
        };
        Ok(Self { shape, block, rope_angles, run_factors, qkv })
    }

    /// Checks a call; the device memory that [`Self::launch`] needs besides its buffers: norms of runs that are no
    /// heads.
    ///
    /// # Errors
    /// [`Error::Length`] for a norm that does not divide a row, a weight that is as long as neither, or a head that is
    /// narrower than what rotates.
    pub fn scratch_bytes(&self, call: &QkvCall<'_>) -> Result<usize, Error> {
        let (head_dim, rotates) = (self.shape.head_dim, call.rope.map_or(0, |rope| 2 * rope.pairs));
        if rotates > head_dim {
            return Err(Error::Length { what: "head width", expected: rotates, found: head_dim });
        }
        let mut runs = 0;
        for (norm, width, heads) in self.norms(call) {
            let Some(norm) = norm else { continue };
            let row = width * heads;
            if norm.width == 0 || !row.is_multiple_of(norm.width) {
                return Err(Error::Length { what: "norm input", expected: norm.width, found: row });
            }
            if let Some((_, len)) = norm.weight
                && len != norm.width
                && len != row
            {
                return Err(Error::Length { what: "norm weight", expected: norm.width, found: len });
            }
            runs += if norm.width == width { 0 } else { call.rows * (row / norm.width) };
        }
        Ok(runs * size_of::<f32>())
    }

    /// Cosines and sines of the step's rows, once a step for each rotary embedding. `turns` are
    /// [`DeviceRope::bytes`]; `angles` has room for [`DeviceRope::angle_bytes`].
    ///
    /// # Errors
    /// What the device says.
    pub fn angles(
        &self,
        device: &mut dyn Device,
        rope: &DeviceRope,
        turns: DevicePtr,
        step: &StepPointers,
        rows: usize,
        angles: DevicePtr,
    ) -> Result<RopeAngles, CudaError> {
        let pairs = rope.turns.len();
        let threads = rows * pairs;
        if threads > 0 {
            let (pairs, rows) = ((pairs as u32).into(), (rows as u32).into());
            let arguments =
                [angles.into(), turns.into(), step.positions.into(), rope.magnitude.into(), pairs, rows];
            device.launch(&Launch {
                kernel: self.rope_angles,
                grid: [threads.div_ceil(128) as u32, 1, 1],
                block: [128, 1, 1],
                shared_bytes: 0,
                arguments: &arguments,
            })?;
        }
        Ok(RopeAngles { angles, pairs, interleaved: rope.interleaved })
    }

    /// Norms, rotates and writes the step's rows. The call has been checked by [`Self::scratch_bytes`].
    ///
    /// # Errors
    /// What the device says.
    pub fn launch(&self, device: &mut dyn Device, call: &QkvCall<'_>) -> Result<(), CudaError> {
        if call.rows == 0 {
            return Ok(());
        }
        let number = |n: usize| Argument::from(n as u32);
        let none = DevicePtr::default();
        let (k, v) = call.kv.map_or((none, none), |kv| (kv.k, kv.v));
        let mut pointers = vec![call.q, k, v];
        let mut numbers: Vec<Argument> = Vec::new();
        let mut factors = call.scratch;
        for ((norm, width, heads), x) in self.norms(call).into_iter().zip([call.q, k, v]) {
            let Some(norm) = norm else {
                pointers.extend([none, none]);
                numbers.extend([number(0), number(1), 0.0f32.into()]);
                continue;
            };
            let runs = call.rows * heads * width / norm.width;
            let mut own = none;
            if norm.width != width {
                own = factors;
                factors = factors.offset(runs * size_of::<f32>());
                device.launch(&Launch {
                    kernel: self.run_factors,
                    grid: [runs.div_ceil(WARPS) as u32, 1, 1],
                    block: [128, 1, 1],
                    shared_bytes: 0,
                    arguments: &[own.into(), x.into(), number(norm.width), norm.eps.into(), number(runs)],
                })?;
            }
            let (weight, len) = norm.weight.unwrap_or((none, 1));
            pointers.extend([weight, own]);
            numbers.extend([number(norm.width), number(len), norm.eps.into()]);
        }
        let rope = call.rope.unwrap_or(RopeAngles { angles: none, pairs: 0, interleaved: false });
        let KvShape { heads, kv_heads, head_dim, v_head_dim, .. } = self.shape;
        pointers.extend([rope.angles, call.arena, call.step.tables, call.step.table_starts(call.group)]);
        pointers.extend([call.step.positions, call.step.row_sequences]);
        let mut arguments: Vec<Argument> = pointers.into_iter().map(Argument::from).collect();
        arguments.push((call.layer_offset as u64).into());
        arguments.extend(numbers);
        arguments.extend([number(rope.pairs), u32::from(rope.interleaved).into()]);
        arguments.extend([heads, kv_heads, head_dim, v_head_dim].map(number));
        arguments.push(self.block.block_shift().into());
        arguments.extend([self.block.k_stripe(), self.block.v_stripe()].map(number));
        let all = if call.kv.is_some() { heads + 2 * kv_heads } else { heads };
        device.launch(&Launch {
            kernel: self.qkv,
            grid: [call.rows as u32, all.div_ceil(WARPS) as u32, 1],
            block: [128, 1, 1],
            shared_bytes: 0,
            arguments: &arguments,
        })
    }

    /// Norm, head width and heads of q, k and v.
    fn norms(&self, call: &QkvCall<'_>) -> [(Option<HeadNorm>, usize, usize); 3] {
        let KvShape { heads, kv_heads, head_dim, v_head_dim, .. } = self.shape;
        let (k, v) = call.kv.map_or((None, None), |kv| (kv.k_norm, kv.v_norm));
        [(call.q_norm, head_dim, heads), (k, head_dim, kv_heads), (v, v_head_dim, kv_heads)]
    }
}
